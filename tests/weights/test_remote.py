"""Remote checkpoints against a real HTTP server: what is fetched, what refused, who sees tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from glmflash.errors import CheckpointError, GlmflashError, RemoteError
from glmflash.weights import remote
from glmflash.weights.index import Checkpoint
from glmflash.weights.remote import Location, RemoteFiles, fetch, locate
from glmflash.weights.table import TensorSpec

from ..verify.checkpoints import small_config, write_checkpoint, write_header
from .server import Behaviour, serving

SHARD = "model-00001-of-00003.safetensors"
INDEX = "model.safetensors.index.json"
HUB = "/org/name/resolve/main"


@pytest.fixture(autouse=True)
def plain_surroundings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No proxy, no token of the machine, no waiting before another try."""
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NO_PROXY", "*")
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.setattr(remote, "RETRY_SECONDS", (0, 0))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("served")
    write_checkpoint(path, small_config())
    (path / "chat_template.jinja").write_text("{{ messages }}")
    return path


@contextmanager
def hub(folder: Path, monkeypatch: pytest.MonkeyPatch, **rules: object) -> Iterator[Behaviour]:
    """The folder as repository org/name of the hub that HF_ENDPOINT names."""
    with serving(folder, **{"prefix": HUB, **rules}) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url + "/")
        yield server


def get(target: str, timeout: float = 30) -> RemoteFiles:
    location = locate(target)
    assert location is not None
    return fetch(location, timeout=timeout)


def same_as_local(files: RemoteFiles, folder: Path) -> bool:
    local = Checkpoint.open(folder)
    found = files.checkpoint
    assert found is not None
    return (found.config, found.tensors, found.shards) == (
        local.config,
        local.tensors,
        local.shards,
    )


def test_hub_id_reads_as_the_local_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int]] = []
    with hub(folder, monkeypatch):
        location = locate("org/name")
        assert location
        files = fetch(location, lambda done, total: seen.append((done, total)))
    assert same_as_local(files, folder)
    assert files.template == b"{{ messages }}"
    assert files.config == json.loads((folder / "config.json").read_text())
    assert seen == [(1, 3), (2, 3), (3, 3)]


def test_revision(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with hub(folder, monkeypatch, prefix="/org/name/resolve/690b7052"):
        assert same_as_local(get("org/name@690b7052"), folder)
    with hub(folder, monkeypatch, prefix="/org/name/resolve/refs%2Fpr%2F1"):
        assert same_as_local(get("org/name@refs/pr/1"), folder)


@pytest.mark.parametrize("page", ["", "/", "/tree/main", f"/resolve/main/{INDEX}", "?library=x"])
def test_pages_of_a_hub(folder: Path, monkeypatch: pytest.MonkeyPatch, page: str) -> None:
    with hub(folder, monkeypatch) as server:
        assert same_as_local(get(f"{server.url}/org/name{page}"), folder)


def test_one_file_of_a_hub(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    local = Checkpoint.open(folder)
    with hub(folder, monkeypatch) as server:
        files = get(f"{server.url}/org/name/blob/main/{SHARD}")
        assert files.config is None
        assert files.checkpoint
        assert files.checkpoint.tensors == {
            name: place for name, place in local.tensors.items() if place[0] == SHARD
        }
        alone = get(f"{server.url}/org/name/blob/main/config.json")
        assert alone.checkpoint is None
        assert alone.config == json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize("page", ["", "/", f"/{INDEX}"])
def test_folder_of_a_plain_server(folder: Path, page: str) -> None:
    with serving(folder, prefix="/files/glm/small") as server:
        assert same_as_local(get(f"{server.url}/files/glm/small{page}"), folder)


def test_mirror_that_no_variable_names(folder: Path) -> None:
    with serving(folder, prefix=HUB) as server:
        assert same_as_local(get(f"{server.url}/org/name"), folder)


@pytest.mark.parametrize(
    "target",
    ["name", "no/such/file.safetensors", "a b/c", "/absolute/path", "x/y/z", "", "ftp://h/x"],
)
def test_not_remote(target: str) -> None:
    assert locate(target) is None


def test_default_hub() -> None:
    assert locate("zai-org/GLM-5.3-Flash") == Location(
        ("https://huggingface.co/zai-org/GLM-5.3-Flash/resolve/main",),
        None,
    )


def test_only_headers_travel(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with hub(folder, monkeypatch) as server:
        get("org/name")
        for shard in folder.glob("*.safetensors"):
            asked = server.asked(shard.name)
            assert [seen.range for seen in asked] == [f"bytes=0-{remote.FIRST_BYTES - 1}"]
            assert asked[0].sent == remote.FIRST_BYTES < shard.stat().st_size


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One shard whose header is longer than the first request, and 1 GB of tensors behind it."""
    path = tmp_path_factory.mktemp("large")
    specs = [TensorSpec(f"layer.{i}.{'x' * 80}", (2, 64), "F32", "", None) for i in range(4000)]
    write_header(path / SHARD, [*specs, TensorSpec("big", (250_000_000,), "F32", "", None)])
    return path


@pytest.mark.parametrize("ranges", [True, False])
def test_long_header(large: Path, ranges: bool) -> None:
    with serving(large, ranges=ranges) as server:
        files = get(f"{server.url}/{SHARD}")
        asked = server.asked(SHARD)
    assert files.checkpoint
    assert files.checkpoint.tensors == Checkpoint.open(large / SHARD).tensors
    header = files.checkpoint.tensors["layer.0." + "x" * 80][1].start
    first = remote.FIRST_BYTES
    assert first < header
    assert [seen.range for seen in asked] == [f"bytes=0-{first - 1}", f"bytes={first}-{header - 1}"]
    # Without ranges the answer is abandoned; what stays in the sockets' buffers is a few MB.
    assert all(seen.sent < 50_000_000 for seen in asked)
    if ranges:
        assert sum(seen.sent for seen in asked) == header


def test_token_does_not_follow_a_redirect(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    with (
        serving(folder, prefix=HUB) as store,
        hub(folder, monkeypatch, redirect=store.url, token="secret") as door,
    ):
        assert same_as_local(get("org/name"), folder)
    assert {seen.authorization for seen in door.seen} == {"Bearer secret"}
    assert {seen.authorization for seen in store.seen} == {None}


def test_token_is_for_the_hub_only(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    with serving(folder) as server:
        get(f"{server.url}/{SHARD}")
        assert server.seen[0].authorization is None


def refused(target: str, kind: type[GlmflashError] = RemoteError, timeout: float = 30) -> str:
    with pytest.raises(kind) as caught:
        get(target, timeout)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_private_repository(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with hub(folder, monkeypatch, token="right"):
        assert "(401)" in refused("org/name")
        assert "set HF_TOKEN" in refused("org/name")
        monkeypatch.setenv("HF_TOKEN", "wrong")
        message = refused("org/name")
        assert "may not read it" in message
        assert "wrong" not in message
        monkeypatch.setenv("HF_TOKEN", "right")
        assert same_as_local(get("org/name"), folder)


@pytest.mark.parametrize(
    ("status", "words"),
    [(403, "access refused (403)"), (418, "answered 418"), (500, "try again later")],
)
def test_refusals(folder: Path, monkeypatch: pytest.MonkeyPatch, status: int, words: str) -> None:
    with hub(folder, monkeypatch, failures=[status] * 3):
        assert words in refused("org/name")


def test_passing_failures(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with hub(folder, monkeypatch, failures=[503, 429]) as server:
        assert same_as_local(get("org/name"), folder)
        assert len(server.asked("config.json")) == 3


def test_unknown_repository(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with hub(folder, monkeypatch):
        message = refused("org/other")
        assert "no checkpoint at" in message
        assert "check name and revision" in message


def test_missing_file(folder: Path) -> None:
    with serving(folder) as server:
        assert "not found (404)" in refused(f"{server.url}/nothing.json")
        assert "not found (404)" in refused(f"{server.url}/nothing.safetensors")


@pytest.mark.parametrize(("ranges", "cut"), [(True, 1000), (False, 2_800_000)])
def test_truncated_body(folder: Path, ranges: bool, cut: int) -> None:
    for name in ("config.json", SHARD):
        with serving(folder, ranges=ranges, cut=cut) as server:
            assert "try again" in refused(f"{server.url}/{name}")
            assert len(server.seen) == 3


def test_less_than_announced(folder: Path) -> None:
    with serving(folder, short=1000) as server:
        message = refused(f"{server.url}/{SHARD}")
        assert "sent 261,144 of 262,144 bytes" in message
        assert len(server.seen) == 3


def test_silence(folder: Path) -> None:
    with serving(folder, stall=1.0) as server:
        message = refused(f"{server.url}/config.json", timeout=0.1)
        assert "no answer within 0.1 s" in message
        assert len(server.seen) == 1  # waiting again for as long would try a user's patience


def test_nobody_listens() -> None:
    with serving(Path()) as server:
        url = server.url
    assert "cannot connect" in refused(f"{url}/config.json")


def test_endless_redirect(folder: Path) -> None:
    with serving(folder) as server:
        server.redirect = server.url
        assert "cannot be read" in refused(f"{server.url}/config.json")


def test_size_not_told(folder: Path) -> None:
    with serving(folder, ranges=False, sizes=False) as server:
        assert "does not tell the file's size" in refused(f"{server.url}/{SHARD}")


def test_another_range_than_asked(folder: Path) -> None:
    with serving(folder, shift=8) as server:
        assert "another range" in refused(f"{server.url}/{SHARD}")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "empty"),
        (b"short", "has no header"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n", "LFS pointer"),
        ((1 << 63).to_bytes(8, "little") + b"{}", "announces a header"),
        ((1 << 20).to_bytes(8, "little") + b"{}", "truncated"),
        ((2).to_bytes(8, "little") + b"[]", "not a safetensors file"),
    ],
)
def test_no_safetensors_file(tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / SHARD).write_bytes(content)
    with serving(tmp_path) as server:
        assert words in refused(f"{server.url}/{SHARD}", CheckpointError)
        assert len(server.seen) == 1


def test_shard_missing_on_the_server(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, small_config())
    (tmp_path / SHARD).unlink()
    with serving(tmp_path) as server:
        assert f"{SHARD}: not found (404)" in refused(server.url)


def test_index_that_leads_elsewhere(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, small_config())
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "../../secret.safetensors"}}))
    with serving(tmp_path) as server:
        refused(server.url, CheckpointError)
        assert not [seen for seen in server.seen if "secret" in seen.path]


def test_index_that_names_an_absent_tensor(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, small_config())
    index = json.loads((tmp_path / INDEX).read_text())
    index["weight_map"]["nowhere"] = SHARD
    (tmp_path / INDEX).write_text(json.dumps(index))
    with serving(tmp_path) as server:
        assert "nowhere" in refused(server.url, CheckpointError)


def test_half_a_checkpoint(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, small_config())
    config = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").unlink()
    with serving(tmp_path) as server:
        assert "no config.json" in refused(server.url, CheckpointError)
        (tmp_path / "config.json").write_text(config)
        (tmp_path / INDEX).unlink()
        assert "neither" in refused(server.url)
        (tmp_path / "config.json").write_text("<html>sign in</html>")
        assert "not JSON" in refused(server.url)
        (tmp_path / "config.json").write_text("[]")
        assert "expected an object" in refused(server.url)


def test_single_file_checkpoint(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, small_config(), shards=1)
    (tmp_path / INDEX).unlink()
    (tmp_path / "model-00001-of-00001.safetensors").rename(tmp_path / "model.safetensors")
    with serving(tmp_path) as server:
        assert same_as_local(get(server.url), tmp_path)
