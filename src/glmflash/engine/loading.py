"""Before a model is built: where the checkpoint is, whether it fits, what it asks for."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path

import torch

from glmflash import kernels
from glmflash.config import TextConfig
from glmflash.engine.memory import available_bytes
from glmflash.errors import CheckpointError, ConfigError, ResourceError
from glmflash.settings import Settings
from glmflash.weights.store import WeightStore
from glmflash.weights.table import SCALE_SUFFIX

GIB = 1 << 30
RESERVE = GIB // 2  # left free for activations and caches when matrices are held


def locate(target: str | os.PathLike[str]) -> Path:
    """The directory of a checkpoint: a path, or a hub id found in the local hub cache."""
    path = Path(target)
    if path.is_dir():
        return path
    if path.exists():
        raise CheckpointError(f"{path} is a file; a checkpoint is the directory around it")
    name = str(target)
    parts = name.split("/")
    if len(parts) == 2 and all(parts) and not name.startswith((".", "/", "~")):
        return _in_hub_cache(name)
    raise CheckpointError(
        f"there is no directory {name}; give a checkpoint directory or a hub id like org/name"
    )


def _in_hub_cache(repository: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(repository, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError) as error:
        raise CheckpointError(
            f"{repository} is neither a directory nor in the local hub cache; download it first "
            f"(hf download {repository}; the released model takes 306 GiB)"
        ) from error


def plan_memory(store: WeightStore, dtype: torch.dtype, exact_fp8: bool) -> bool:
    """Whether matrices are held in the kernels' own layout (the torch reference: expanded).

    Raises ResourceError if not even the tensors fit that must be converted to `dtype` and cannot
    stay in the mapped file.
    """
    native = kernels.native() is not None
    size = torch.empty(0, dtype=dtype).element_size()
    held = converted = 0
    for name in store.names():
        tensor = store.tensor(name)
        if name.endswith(SCALE_SUFFIX):
            continue
        if tensor.dtype == torch.float8_e4m3fn and exact_fp8:
            held += tensor.numel() * (1 if native else size)
        elif tensor.dtype == torch.float8_e4m3fn:  # the file does not hold the rounded values
            converted += tensor.numel() * (2 if native else size)
            held += tensor.numel() * (2 if native else 0)
        elif native and tensor.dim() == 2 and dtype in (tensor.dtype, torch.float32):
            held += tensor.nbytes
        elif tensor.dtype != dtype:
            converted += tensor.numel() * size
    room = available_bytes() - RESERVE
    if converted > room:
        raise ResourceError(
            f"{store.root} needs {converted / GIB:.1f} GiB of memory to be held as {dtype}, "
            f"{max(room, 0) / GIB:.1f} GiB is free; use dtype='auto' or a larger machine"
        )
    return converted + held <= room


def fingerprint(store: WeightStore, settings: Settings, dtype: torch.dtype) -> str:
    """Names a model and the settings that decide its state: what a saved session must match.

    Hashes config, headers, and both ends of every shard's data.
    """
    digest = hashlib.sha256()
    digest.update(json.dumps(store.config.to_dict(), sort_keys=True).encode())
    choices = (dtype, settings.mtp, settings.round_weights, kernels.active())
    digest.update(repr(choices).encode())
    for shard in sorted(store.shards):
        with (store.root / shard).open("rb") as file:
            digest.update(file.read(1 << 16))
            size = file.seek(0, os.SEEK_END)
            digest.update(size.to_bytes(8, "little"))
            file.seek(max(0, size - (1 << 16)))
            digest.update(file.read())
    return digest.hexdigest()[:32]


@dataclass(frozen=True)
class GenerationDefaults:
    """What generation_config.json asks for where a request does not say."""

    temperature: float
    top_p: float
    eos_token_ids: tuple[int, ...]

    @staticmethod
    def from_dir(directory: Path, config: TextConfig) -> GenerationDefaults:
        """Read the file; without one, temperature 1 and the config's own stop ids."""
        path = directory / "generation_config.json"
        if not path.exists():
            return GenerationDefaults(1.0, 1.0, config.eos_token_id)
        try:
            raw = json.loads(path.read_text())
            eos = raw.get("eos_token_id", config.eos_token_id)
            return GenerationDefaults(
                float(raw.get("temperature", 1.0)),
                float(raw.get("top_p", 1.0)),
                (eos,) if isinstance(eos, int) else tuple(int(i) for i in eos),
            )
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise ConfigError(f"{path} cannot be read: {error}") from error
