"""What a target is: a directory, a config, one file, something remote, or a shipped config.

Knows how each is opened and checked. Gives every command the same view: the config and the list of
tensors, read from headers or assumed from the config.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from glmflash.config import SHIPPED, ModelConfig, read_config
from glmflash.errors import CheckpointError, RemoteError, RequestError
from glmflash.verify.arithmetic import Config
from glmflash.verify.components import component, guess_layer_kinds, layer_kinds
from glmflash.weights.headers import TensorInfo, read_header
from glmflash.weights.index import INDEX_NAME, Checkpoint
from glmflash.weights.remote import Progress, RemoteFiles, fetch, locate
from glmflash.weights.table import BF16, Storage, TensorSpec, expected_tensors

Source = Literal["config", "checkpoint", "file"]


@dataclass(frozen=True)
class Subject:
    """A checkpoint as far as it is known without its tensors.

    source: "config" alone, a whole "checkpoint", or one "file" of which nothing else is known.
    raw: content of config.json. tensors: as stored, `layer` not filled in. shards: bytes of tensors
    by file; None from a config alone.
    template: SHA-256 of chat_template.jinja, None where there is none.
    """

    label: str
    source: Source
    config: Config | None
    raw: dict[str, Any] | None
    tensors: list[TensorSpec]
    shards: dict[str, int] | None
    template: str | None


def open_subject(target: str, progress: Progress | None = None) -> Subject:
    """Open what the user named; reads configs and headers only.

    progress: told (headers fetched, headers in all) for remote targets. Raises ConfigError,
    CheckpointError, RemoteError, or RequestError for a name that is none of these.
    """
    path = Path(target)
    if _exists(path):
        return _of_path(target, path)
    if target.lower() in SHIPPED:
        name = target.lower()
        return _of_config(name, shipped_json(name), f"shipped {name}")
    location = locate(target)
    if location is None:
        raise RequestError(
            f"{target}: no such path; give a directory, a config.json, a .safetensors file, "
            f"a hub id (org/name), a URL, or {' or '.join(SHIPPED)}"
        )
    try:
        files = fetch(location, progress)
    except RemoteError as error:
        if "://" in target:
            raise
        raise RemoteError(f"{target} is no path here; as a hub id: {error}") from error
    return _of_remote(target, files)


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # no name of a file: too long, as a URL can be
        return False


def _of_path(target: str, path: Path) -> Subject:
    if path.is_dir() or path.name == INDEX_NAME:
        return _open_directory(target, path if path.is_dir() else path.parent)
    if path.suffix == ".safetensors":
        return _of_file(target, path.name, read_header(path).tensors.values())
    return _of_config(target, read_json(path), target)


def read_json(path: Path) -> dict[str, Any]:
    """A config file as it is. Raises ConfigError through the checks of `read_config`."""
    read_config(path)
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def shipped_json(name: str) -> dict[str, Any]:
    """The content of a config that comes with the package."""
    file = resources.files("glmflash") / "data" / f"{name}.config.json"
    content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return content


def _open_directory(label: str, path: Path) -> Subject:
    checkpoint = Checkpoint.open(path)
    if checkpoint.config is None:
        raise CheckpointError(
            f"{path} holds no config.json, so its tensors cannot be checked; "
            "fetch config.json too, or give one of the .safetensors files"
        )
    template = path / "chat_template.jinja"
    try:
        found = template.read_bytes() if template.exists() else None
    except OSError as error:
        raise CheckpointError(f"{template} cannot be read: {error.strerror}") from error
    return _of_checkpoint(label, checkpoint, read_json(path / "config.json"), found)


def _of_remote(label: str, files: RemoteFiles) -> Subject:
    if files.checkpoint is None:
        return _of_config(label, files.config or {}, label)
    if files.config is None:
        infos = (info for _, info in files.checkpoint.tensors.values())
        return _of_file(label, ", ".join(files.checkpoint.shards), infos)
    return _of_checkpoint(label, files.checkpoint, files.config, files.template)


def _of_config(label: str, raw: dict[str, Any], where: str) -> Subject:
    config = read_config(raw, where)
    text = config.text if isinstance(config, ModelConfig) else config
    storage: Storage = "fp32" if text.dtype == "float32" else "bf16"
    tensors = list(expected_tensors(config, "fp8" if config.quantization else storage).values())
    if text.dtype == "float16":
        tensors = [spec._replace(dtype="F16") if spec.dtype == BF16 else spec for spec in tensors]
    return Subject(label, "config", config, raw, tensors, None, None)


def _of_file(label: str, name: str, infos: Iterable[TensorInfo]) -> Subject:
    infos = list(infos)
    kinds = guess_layer_kinds(info.name for info in infos)
    tensors = [_as_spec(info, kinds) for info in infos]
    shards = {name: sum(info.nbytes for info in infos)}
    return Subject(label, "file", None, None, tensors, shards, None)


def _of_checkpoint(
    label: str, checkpoint: Checkpoint, raw: dict[str, Any], template: bytes | None
) -> Subject:
    checkpoint.check()
    assert checkpoint.config is not None  # check() has raised otherwise
    kinds = layer_kinds(checkpoint.config)
    tensors, shards = [], dict.fromkeys(checkpoint.shards, 0)
    for shard, info in checkpoint.tensors.values():
        tensors.append(_as_spec(info, kinds))
        shards[shard] += info.nbytes
    digest = hashlib.sha256(template).hexdigest() if template is not None else None
    return Subject(label, "checkpoint", checkpoint.config, raw, tensors, shards, digest)


def _as_spec(info: TensorInfo, kinds: dict[str, str]) -> TensorSpec:
    return TensorSpec(info.name, info.shape, info.dtype, component(info.name, kinds), None)
