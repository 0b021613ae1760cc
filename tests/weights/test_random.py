"""Checkpoints on disk: whole or absent, equal for equal arguments, in little memory."""

import hashlib
import json
import os
import resource
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import safetensors
import torch
from transformers import (
    AutoModelForImageTextToText,
    AutoTokenizer,
    PreTrainedTokenizerFast,
)

import glmflash
from glmflash.chat.processor import ProcessorConfig
from glmflash.chat.tokenizer import Tokenizer
from glmflash.config import ModelConfig
from glmflash.errors import CheckpointError, ResourceError
from glmflash.weights.fp8 import quantize
from glmflash.weights.headers import read_header
from glmflash.weights.index import Checkpoint
from glmflash.weights.presets import STORAGES, Overrides, preset
from glmflash.weights.random import write_checkpoint
from glmflash.weights.store import WeightStore
from glmflash.weights.table import ITEM_BYTES
from glmflash.weights.values import draw
from tests.oracle.runs import assert_parity, random_tokens, trusted_logits

FILES = {
    "config.json", "generation_config.json", "model-00001-of-00001.safetensors",
    "model.safetensors.index.json", "processor_config.json", "tokenizer.json",
    "tokenizer_config.json",
}  # fmt: skip
MIB = 1 << 20


@pytest.fixture(scope="module", params=STORAGES)
def storage(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def tiny(storage, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("random") / storage
    write_checkpoint(path, preset("tiny"), storage)
    return path


def digests(folder: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.iterdir()}


def run(code: str, *arguments: str, **options) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, **options
    )


def test_it_is_a_checkpoint_of_every_expected_tensor(tiny, storage) -> None:
    assert {path.name for path in tiny.iterdir()} == FILES
    opened = Checkpoint.open(tiny)
    opened.check()
    specs = preset("tiny").tensors(storage)
    found = {name: (info.dtype, info.shape) for name, (_, info) in opened.tensors.items()}
    assert found == {name: (spec.dtype, spec.shape) for name, spec in specs.items()}
    with WeightStore.open(tiny) as store:
        assert store.config == preset("tiny").stored_config(storage)
        assert all(bool(store.tensor(name).float().isfinite().all()) for name in store.names())


def test_the_reference_reader_agrees(tiny, storage) -> None:
    """safetensors' own reader sees the same names, shapes, types and values."""
    specs = preset("tiny").tensors(storage)
    path = tiny / "model-00001-of-00001.safetensors"
    with safetensors.safe_open(path, "pt") as file, WeightStore.open(tiny) as store:
        assert set(file.keys()) == set(specs)
        assert file.metadata() == {"format": "pt"}
        for name in file.keys():  # noqa: SIM118
            ours, theirs = store.tensor(name), file.get_tensor(name)
            assert ours.dtype == theirs.dtype
            assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))


def test_index_counts_every_byte(tiny, storage) -> None:
    index = json.loads((tiny / "model.safetensors.index.json").read_text())
    specs = preset("tiny").tensors(storage)
    assert index["metadata"] == {"total_size": sum(spec.nbytes for spec in specs.values())}
    assert set(index["weight_map"]) == set(specs)


@pytest.mark.parametrize("storage", ["fp8"], indirect=True)
def test_fp8_is_the_quantised_draw(tiny) -> None:
    specs = preset("tiny").tensors("fp8")
    with WeightStore.open(tiny) as store:
        for name, spec in specs.items():
            if spec.dtype == "F8_E4M3":
                w8, scale = quantize(torch.cat(list(draw(spec, 0))))
                assert torch.equal(store.tensor(name).view(torch.uint8), w8.view(torch.uint8))
                assert torch.equal(store.tensor(f"{name}_scale_inv"), scale)


@pytest.mark.parametrize("storage", ["fp8"], indirect=True)
def test_other_files_have_the_released_content(tiny, tmp_path) -> None:
    generation = json.loads((tiny / "generation_config.json").read_text())
    text = ModelConfig.from_dir(tiny).text
    assert generation == {
        "_from_model_config": True, "eos_token_id": list(text.eos_token_id),
        "pad_token_id": text.pad_token_id, "temperature": 1.0, "top_p": 0.95,
        "transformers_version": "5.16.0",
    }  # fmt: skip
    raw = (tiny / "processor_config.json").read_bytes()
    assert len(raw) == 909  # as the released file
    values = json.loads(raw)
    assert values["processor_class"] == "Glm5NextProcessor"
    assert values["image_processor"]["max_image_tokens"] == 8000
    assert values["video_processor"]["max_image_tokens"] == 240_000
    assert values["video_processor"]["fps"] == 2
    assert ProcessorConfig.from_dir(tiny) == ProcessorConfig()
    # byte for byte at full size: 194 bytes
    write_checkpoint(tmp_path / "x", preset("tiny", Overrides(vocab=154_880)), "fp8")
    assert hashlib.sha256((tmp_path / "x/generation_config.json").read_bytes()).hexdigest() == (
        "230c30609ecbbb9e6583bedde8e7bdda0c6eb8fe5fad0eaeb3d1b293d751cb4f"
    )


def test_text_only_has_no_processor(tmp_path) -> None:
    write_checkpoint(tmp_path / "x", preset("tiny", Overrides(vision=False, mtp=False)))
    assert {path.name for path in (tmp_path / "x").iterdir()} == FILES - {"processor_config.json"}
    with WeightStore.open(tmp_path / "x") as store:
        assert store.config.vision is None
        assert not store.has_mtp


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory) -> Path:
    """Written by another process with another hash seed, by one thread and by seven."""
    place = tmp_path_factory.mktemp("elsewhere")
    code = (
        "import sys, torch\n"
        "from glmflash.weights.presets import preset\n"
        "from glmflash.weights.random import write_checkpoint\n"
        "for threads in (1, 7):\n"
        "    torch.set_num_threads(threads)\n"
        "    for storage in sys.argv[2:]:\n"
        "        write_checkpoint(f'{sys.argv[1]}/{threads}-{storage}', preset('tiny'), storage)\n"
        "    assert torch.get_num_threads() == threads\n"
    )
    done = run(code, str(place), *STORAGES, env=os.environ | {"PYTHONHASHSEED": "7"})
    assert done.returncode == 0, done.stderr
    return place


@pytest.mark.parametrize("threads", [1, 7])
def test_equal_arguments_give_equal_files(tiny, storage, elsewhere, threads) -> None:
    assert digests(elsewhere / f"{threads}-{storage}") == digests(tiny)


def test_another_seed_changes_all_weights(tiny, storage, tmp_path) -> None:
    write_checkpoint(tmp_path / "x", preset("tiny"), storage, seed=1)
    with WeightStore.open(tiny) as first, WeightStore.open(tmp_path / "x") as second:
        for name in first.names():
            # codes of FP8 are compared; its scales may agree by chance
            if not name.endswith("_scale_inv"):
                a, b = (store.tensor(name).view(torch.uint8) for store in (first, second))
                assert not torch.equal(a, b), name


def test_shards_keep_to_their_size_and_to_the_values(tiny, storage, tmp_path) -> None:
    limit = 100_000
    write_checkpoint(tmp_path / "x", preset("tiny"), storage, shard_size=limit)
    opened = Checkpoint.open(tmp_path / "x")
    opened.check()
    names = list(opened.shards)
    assert len(names) > 8
    assert names == [f"model-{i + 1:05}-of-{len(names):05}.safetensors" for i in range(len(names))]
    sizes, counts = Counter[str](), Counter[str]()
    for shard, info in opened.tensors.values():
        sizes[shard] += info.nbytes
        counts[shard] += 1
    for shard in names:
        assert sizes[shard] <= limit or counts[shard] == 1, shard
    for name, (shard, _) in opened.tensors.items():
        if name.endswith("_scale_inv"):
            assert opened.tensors[name.removesuffix("_scale_inv")][0] == shard
    with WeightStore.open(tiny) as whole, WeightStore.open(tmp_path / "x") as split:
        for name in whole.names():
            raw = (store.tensor(name).view(torch.uint8) for store in (whole, split))
            assert torch.equal(*raw)


def test_odd_widths_are_aligned_too(tmp_path) -> None:
    write_checkpoint(tmp_path / "x", preset("tiny", Overrides(hidden=65)), "fp8")
    header = read_header(tmp_path / "x/model-00001-of-00001.safetensors")
    for info in header.tensors.values():
        assert info.start % ITEM_BYTES[info.dtype] == 0
    with WeightStore.open(tmp_path / "x"):
        pass


def test_progress_counts_every_byte(tmp_path) -> None:
    steps: list[tuple[int, int]] = []
    total = write_checkpoint(
        tmp_path / "x", preset("tiny"), progress=lambda done, of: steps.append((done, of))
    )
    assert {of for _, of in steps} == {total}
    done = [done for done, _ in steps]
    assert done == sorted(done)
    assert done[-1] == total


def test_memory_does_not_grow_with_the_checkpoint(tmp_path) -> None:
    code = (
        "import resource, sys\n"
        "from pathlib import Path\n"
        "from glmflash.weights.presets import Overrides, preset\n"
        "from glmflash.weights.random import write_checkpoint\n"
        "def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "write_checkpoint(Path(sys.argv[1], 'a'), preset('tiny'), 'fp8')\n"
        "before = peak()\n"
        "model = preset('bench', Overrides(layers=3))\n"
        "size = write_checkpoint(Path(sys.argv[1], 'b'), model, 'fp8')\n"
        "print(size, (peak() - before) * (1 if sys.platform == 'darwin' else 1024))"
    )
    done = run(code, str(tmp_path))
    assert done.returncode == 0, done.stderr
    size, grown = map(int, done.stdout.split())
    assert size > 290 * MIB
    assert grown < 100 * MIB


def test_same_model_in_transformers(tiny, storage) -> None:
    """Every tensor finds its place there but the MTP layer's, and the logits are ours."""
    if storage == "fp8":
        pytest.importorskip("accelerate")
    model, info = AutoModelForImageTextToText.from_pretrained(tiny, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["mismatched_keys"]
    assert not info["error_msgs"]
    assert info["unexpected_keys"]
    assert all(key.startswith("model.language_model.layers.5.") for key in info["unexpected_keys"])
    ids = random_tokens(24, seed=1)  # more than the 8 that sparse attention looks at
    theirs = trusted_logits(model.float().eval(), ids)
    with glmflash.open(tiny, dtype="float32") as engine:
        assert_parity(np.asarray(engine.logits(ids)), theirs)
    assert 0.5 < theirs.std() < 3  # real models: about 1.3


@pytest.mark.parametrize("storage", ["bf16"], indirect=True)
def test_transformers_loads_the_tokenizer(tiny) -> None:
    text = "[gMASK]<sop><|user|>What is the answer?\n<|assistant|>"
    ours = Tokenizer.from_dir(tiny, ModelConfig.from_dir(tiny))
    for kind in (AutoTokenizer, PreTrainedTokenizerFast):
        theirs = kind.from_pretrained(tiny)
        ids = theirs(text)["input_ids"]
        assert ids == ours.encode_raw(text)
        assert theirs.decode(ids) == text == ours.decode(ids)
        assert theirs.decode(ids, skip_special_tokens=True) == "What is the answer?\n"
        assert theirs.eos_token_id == ModelConfig.from_dir(tiny).text.eos_token_id[0]
        assert len(theirs) == ours.vocab_length


# Refusals


def test_a_full_directory_or_a_file_is_left_alone(tmp_path) -> None:
    (tmp_path / "mine.txt").write_text("keep")
    for out in (tmp_path, tmp_path / "mine.txt"):
        with pytest.raises(CheckpointError, match="exists and is not empty; give a new directory"):
            write_checkpoint(out, preset("tiny"))
    assert [p.name for p in tmp_path.iterdir()] == ["mine.txt"]
    assert (tmp_path / "mine.txt").read_text() == "keep"
    with pytest.raises(CheckpointError, match="root of a file system"):
        write_checkpoint("/", preset("tiny"))


def test_empty_and_missing_directories_are_filled(tmp_path) -> None:
    (tmp_path / "empty").mkdir()
    before = os.umask(0o027)
    try:
        for out in (tmp_path / "empty", tmp_path / "a/b/c"):
            write_checkpoint(out, preset("tiny"))
            assert {path.name for path in out.iterdir()} == FILES
            assert out.stat().st_mode & 0o777 == 0o750  # as any directory this person makes
    finally:
        os.umask(before)


def test_place_that_cannot_be_written(tmp_path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ResourceError, match=r"cannot write .*; nothing was left behind"):
        write_checkpoint(tmp_path / "file/x", preset("tiny"))


def test_too_little_room_is_known_before_writing(tmp_path) -> None:
    with pytest.raises(ResourceError, match=r"needs \d+\.\d\d GiB, but .* is free there; give few"):
        write_checkpoint(tmp_path / "a/b", preset("tiny", Overrides(hidden=2_000_000_000)))
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    """A real file system of 4 MiB."""
    place = tmp_path / "disk"
    place.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(place)], capture_output=True
    )
    if made.returncode:
        pytest.skip("only root may mount a file system")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_small_disk_is_refused(small_disk) -> None:
    with pytest.raises(ResourceError, match=r"needs .* MiB, but 4\.00 MiB is free there"):
        write_checkpoint(small_disk / "x", preset("tiny", Overrides(layers=12)), "fp32")
    assert list(small_disk.iterdir()) == []


def test_a_disk_that_takes_nothing(small_disk) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(ResourceError, match=r"cannot write .*: Read-only file system; nothing"):
        write_checkpoint(small_disk / "x", preset("tiny"))


def test_a_disk_that_fills_up_meanwhile(small_disk) -> None:
    def somebody_else_writes(_done: int, _total: int) -> None:
        with (small_disk / "other").open("wb") as other:
            other.write(bytes(3 * MIB))

    with pytest.raises(ResourceError, match=r"full, .* nothing was left behind; free some space"):
        write_checkpoint(small_disk / "x", preset("tiny"), progress=somebody_else_writes)
    assert [path.name for path in small_disk.iterdir()] == ["other"]


def test_files_of_limited_size(tmp_path) -> None:
    """Needs no root: the kernel refuses to let a file of this process grow."""
    usual = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, usual[1]))
    try:
        with pytest.raises(ResourceError, match="full, or files there are limited"):
            write_checkpoint(tmp_path / "x", preset("tiny"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)
    assert list(tmp_path.iterdir()) == []


def test_interrupted_leaves_nothing(tmp_path) -> None:
    def press_control_c(done: int, total: int) -> None:
        if done > total / 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_checkpoint(tmp_path / "x", preset("tiny"), progress=press_control_c)
    assert list(tmp_path.iterdir()) == []
