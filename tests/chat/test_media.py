"""The public face of media: what may be handed over, what comes out, and the processor's file."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import av
import numpy as np
import PIL.Image
import pytest

from glmflash.chat.media import (
    Image,
    PreparedMedia,
    ProcessorConfig,
    Video,
    prepare,
)
from glmflash.config import ModelConfig, VisionConfig, shipped
from glmflash.errors import ConfigError, MediaError, MissingExtraError

PROCESSOR = ProcessorConfig()
MEAN = [0.48145466, 0.4578275, 0.40821073]
STD = [0.26862954, 0.26130258, 0.27577711]


def noise(height: int, width: int, count: int = 1) -> np.ndarray:
    random = np.random.default_rng(height + width + count)
    return random.integers(0, 256, (count, height, width, 3), dtype=np.uint8)


def picture(height: int = 112, width: int = 140) -> PIL.Image.Image:
    return PIL.Image.fromarray(noise(height, width)[0])


def test_a_picture_becomes_patches(tmp_path: Path) -> None:
    path = tmp_path / "photo.png"
    picture().save(path)
    prepared = prepare(Image.open(path), PROCESSOR)
    assert (prepared.kind, prepared.grid, prepared.timestamps) == ("image", (1, 8, 10), ())
    assert (prepared.slices, prepared.tokens) == (1, 20)
    assert prepared.pixel_values.shape == (80, 1176)
    assert prepared.pixel_values.dtype == np.float32
    for source in (str(path), path.read_bytes(), picture()):
        assert prepare(Image(source), PROCESSOR).digest == prepared.digest


def test_a_video_becomes_patches(tmp_path: Path) -> None:
    frames = noise(56, 84, 30)
    path = tmp_path / "clip.mkv"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("ffv1", rate=10)
        stream.height, stream.width, stream.pix_fmt = 56, 84, "bgr0"
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())
    prepared = prepare(Video.open(path), PROCESSOR)
    assert (prepared.kind, prepared.grid) == ("video", (3, 4, 6))
    assert (prepared.slices, prepared.tokens) == (3, 6)
    assert prepared.timestamps == (0.0, 1.0, 2.0)
    assert prepared.pixel_values.shape == (3 * 24, 1176)
    # ten a second, so every fifth frame
    same = Video(frames=[PIL.Image.fromarray(f) for f in frames[::5]], fps=2)
    assert prepare(same, PROCESSOR).digest == prepared.digest


def test_the_digest_is_of_all_that_the_model_sees() -> None:
    frames = noise(84, 112, 4)
    prepared = prepare(Video(frames=frames, fps=2), PROCESSOR)
    said = b"video (2, 6, 8) (0.0, 1.0)\n" + prepared.pixel_values.tobytes()
    assert prepared.digest == hashlib.sha256(said).hexdigest()
    changed = frames.copy()
    changed[3, 83, 111, 2] ^= 1
    others = [
        Video(frames=changed, fps=2),
        Video(frames=frames, fps=1),  # same pixels, other times
        Video(frames=frames[:2], fps=2),
        Video(frames=frames.transpose(0, 2, 1, 3), fps=2),
    ]
    digests = [prepare(other, PROCESSOR).digest for other in others]
    assert len({prepared.digest, *digests}) == 5
    still = prepare(Image(PIL.Image.fromarray(noise(112, 112)[0])), PROCESSOR)
    twice = prepare(Video(frames=np.repeat(noise(112, 112), 2, 0)), PROCESSOR)
    assert np.array_equal(still.pixel_values, twice.pixel_values)
    assert still.digest != twice.digest


def test_tokens_follow_the_merge_size() -> None:
    pixels = np.zeros((2 * 6 * 12, 1176), np.float32)
    prepared = PreparedMedia("video", pixels, (2, 6, 12), (0.0, 1.0), "", merge_size=3)
    assert (prepared.slices, prepared.tokens) == (2, 8)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({}, "of a source or of frames"),
        ({"source": "a.mp4", "frames": []}, "of a source or of frames"),
        ({"source": "a.mp4", "fps": 2.0}, "brings its own rate"),
        ({"frames": [], "fps": 0.0}, r"fps is 0\.0"),
        ({"frames": [], "fps": -1.0}, r"fps is -1\.0"),
        ({"frames": [], "fps": float("nan")}, "fps is nan"),
        ({"frames": [], "fps": 5e-324}, "fps is 5e-324"),
    ],
)
def test_videos_that_cannot_be(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(MediaError, match=says):
        Video(**arguments)


@pytest.mark.parametrize("kind", [Image, Video])
def test_missing_files(tmp_path: Path, kind: type[Image] | type[Video]) -> None:
    with pytest.raises(MediaError, match="does not exist"):
        kind.open(tmp_path / "gone")
    with pytest.raises(MediaError, match="is not a file"):
        kind.open(tmp_path)
    with pytest.raises(MediaError, match="does not exist"):
        prepare(kind(tmp_path / "gone"), PROCESSOR)


def test_neither_picture_nor_video() -> None:
    with pytest.raises(MediaError, match="an Image or a Video, not str"):
        prepare("photo.png", PROCESSOR)  # type: ignore[arg-type]


def test_missing_parts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "clip"
    path.write_bytes(b"")
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(
        MissingExtraError, match=r"reading videos .*pip install 'glmflash\[media\]'"
    ):
        prepare(Video(path), PROCESSOR)
    prepare(Image(picture()), PROCESSOR)
    for name in [name for name in sys.modules if name.partition(".")[0] == "PIL"]:
        monkeypatch.setitem(sys.modules, name, None)
    for medium in (Image(path), Video(path), Video(frames=noise(9, 9))):
        with pytest.raises(MissingExtraError, match=r"pip install 'glmflash\[media\]'"):
            prepare(medium, PROCESSOR)


def test_nothing_heavy_is_imported_before_use() -> None:
    script = (
        "import sys, glmflash.chat.media\n"
        "print(sorted({'torch', 'PIL', 'av', 'transformers'} & set(sys.modules)))"
    )
    found = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == "[]"


# The content of the released file, by its published table.
RELEASED: dict[str, Any] = {
    "image_processor": {
        "do_rescale": True,
        "image_mean": MEAN,
        "image_processor_type": "Glm5NextImageProcessor",
        "image_std": STD,
        "max_image_tokens": 8000,
        "merge_size": 2,
        "min_image_tokens": 16,
        "patch_expand_factor": 1,
        "patch_size": 14,
        "temporal_patch_size": 2,
    },
    "processor_class": "Glm5NextProcessor",
    "video_processor": {
        "do_rescale": True,
        "fps": 2,
        "image_mean": MEAN,
        "image_std": STD,
        "max_image_tokens": 240000,
        "merge_size": 2,
        "min_image_tokens": 16,
        "patch_expand_factor": 1,
        "patch_size": 14,
        "temporal_patch_size": 2,
        "video_processor_type": "Glm5NextVideoProcessor",
    },
}


def test_the_released_file_says_the_defaults(tmp_path: Path) -> None:
    (tmp_path / "processor_config.json").write_text(json.dumps(RELEASED, indent=2) + "\n")
    assert (tmp_path / "processor_config.json").stat().st_size == 909  # the published length
    found = ProcessorConfig.from_dir(tmp_path)
    assert found == ProcessorConfig()
    assert (found.image.max_image_tokens, found.video.max_image_tokens) == (8000, 240_000)
    assert (found.fps, found.max_frames) == (2.0, 2048)
    assert found.image.image_mean == tuple(MEAN)
    assert found.image.image_std == tuple(STD)


def test_no_file_is_the_released_one(tmp_path: Path) -> None:
    assert ProcessorConfig.from_dir(tmp_path) == ProcessorConfig()


def test_what_a_file_leaves_out_is_released(tmp_path: Path) -> None:
    values = {"image_processor": {"max_image_tokens": 100}, "video_processor": {"fps": 0.5}}
    (tmp_path / "processor_config.json").write_text(json.dumps(values))
    found = ProcessorConfig.from_dir(tmp_path)
    released = ProcessorConfig()
    assert found.image == replace(released.image, max_image_tokens=100)
    assert found.video == released.video
    assert (found.fps, found.max_frames) == (0.5, 2048)


def test_values_of_the_file_are_used() -> None:
    values = {
        "image_processor": {"image_mean": [0, 0.5, 0], "image_std": [1, 1, 1]},
        "video_processor": {
            "fps": 1,
            "max_frames": 4,
            "max_image_tokens": 2,
            "min_image_tokens": 1,
        },
    }
    processor = ProcessorConfig.from_dict(values)
    grey = PIL.Image.new("RGB", (112, 112), (255, 255, 0))
    pixels = prepare(Image(grey), processor).pixel_values.reshape(-1, 3, 392)
    np.testing.assert_allclose(pixels[0].mean(-1), [1, 0.5, 0], atol=1e-6)
    video = prepare(Video(frames=noise(112, 112, 12), fps=1), processor)
    assert video.grid == (2, 2, 2)
    assert video.timestamps == (0.0, 7.0)  # of 0, 3, 7, 11


@pytest.mark.parametrize(
    ("section", "key", "value", "says"),
    [
        ("image_processor", "patch_size", 0, "expected an integer >= 1"),
        ("image_processor", "patch_size", "14", "expected an integer >= 1"),
        ("image_processor", "image_mean", [0.5, 0.5], "expected 3 numbers"),
        ("image_processor", "image_mean", [0.5, 0.5, None], "expected 3 numbers"),
        ("image_processor", "image_mean", [0.5, 0.5, 10**400], "expected 3 numbers"),
        ("image_processor", "image_std", [0.5, 0.5, 0], "expected numbers > 0"),
        ("image_processor", "max_image_tokens", 15, r"at least min_image_tokens \(16\)"),
        ("image_processor", "do_rescale", False, "expected True"),
        ("image_processor", "resample", 2, "expected 3"),
        ("image_processor", "rescale_factor", 1.0, "nothing else is implemented"),
        ("video_processor", "patch_expand_factor", 2, "expected 1"),
        ("video_processor", "fps", 0, "expected a finite number > 0"),
        ("video_processor", "max_frames", -1, "expected an integer >= 1"),
    ],
)
def test_wrong_values(section: str, key: str, value: Any, says: str) -> None:
    values = {**RELEASED, section: {**RELEASED[section], key: value}}
    with pytest.raises(ConfigError, match=rf"^f: {section}\.{key} is .*{says}"):
        ProcessorConfig.from_dict(values, "f")


@pytest.mark.parametrize("text", ["", "[1]", "{", '{"image_processor": 3}', "\xff" * 3, "[" * 9999])
def test_broken_files(tmp_path: Path, text: str) -> None:
    path = tmp_path / "processor_config.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match="processor_config") as raised:
        ProcessorConfig.from_dir(tmp_path)
    assert "\n" not in str(raised.value)


def released_vision() -> VisionConfig:
    config = shipped("glm-5.3-flash")
    assert isinstance(config, ModelConfig)
    assert config.vision is not None
    return config.vision


def test_the_released_processor_fits_the_released_tower() -> None:
    ProcessorConfig().check(released_vision())


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("patch_size", "patch_size"),
        ("temporal_patch_size", "temporal_patch_size"),
        ("spatial_merge_size", "merge_size"),
    ],
)
def test_a_processor_that_does_not_fit_the_tower(theirs: str, ours: str) -> None:
    vision = replace(released_vision(), **{theirs: 7})
    says = rf"image_processor\.{ours} is \d+; expected 7, vision_config\.{theirs}"
    with pytest.raises(ConfigError, match=says):
        ProcessorConfig().check(vision)
    fitting = replace(ProcessorConfig().image, **{ours: 7})
    with pytest.raises(ConfigError, match=rf"video_processor\.{ours} is"):
        ProcessorConfig(image=fitting).check(vision)
    ProcessorConfig(image=fitting, video=fitting).check(vision)


def test_a_tower_of_other_channels() -> None:
    with pytest.raises(ConfigError, match="in_channels is 4; expected 3"):
        ProcessorConfig().check(replace(released_vision(), in_channels=4))
