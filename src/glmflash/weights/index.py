"""A checkpoint by its headers: which tensors it holds, in which files, and whether they fit.

Knows the shard index, single files, and how to say everything that is wrong at once. Touches no
tensor.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from glmflash.config import GlmMoeDsaConfig, ModelConfig, read_config
from glmflash.config_values import shorten
from glmflash.errors import CheckpointError
from glmflash.weights.headers import Header, TensorInfo, read_header
from glmflash.weights.table import (
    BF16,
    F32,
    FP8,
    SCALE_SUFFIX,
    Storage,
    TensorSpec,
    expected_tensors,
    scale_shape,
)

INDEX_NAME, SINGLE_NAME = "model.safetensors.index.json", "model.safetensors"
FLOATS = (BF16, "F16", F32)  # any of them is exact for a tensor that is not FP8
SHOWN = 3  # names per group of a message


@dataclass(frozen=True)
class Checkpoint:
    """Headers of all files of a checkpoint.

    tensors: name to (shard, place in it). shards: file name to its size in bytes. config is None
    for files without a config.json beside them.
    """

    root: Path
    config: ModelConfig | GlmMoeDsaConfig | None
    tensors: dict[str, tuple[str, TensorInfo]]
    shards: dict[str, int]

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Checkpoint:
        """Read all headers of a directory, or of one .safetensors file.

        Raises CheckpointError or ConfigError; `check` compares the tensors with the config.
        """
        path = Path(path)
        if path.is_dir():
            root, weight_map = path, _weight_map(path)
            shards = sorted(set(weight_map.values())) if weight_map else [SINGLE_NAME]
        elif path.exists() and path.suffix == ".safetensors":
            root, weight_map, shards = path.parent, None, [path.name]
        elif path.exists():
            raise CheckpointError(
                f"{path} is neither a directory nor a .safetensors file; give a checkpoint"
            )
        else:
            raise CheckpointError(f"there is no {path}; give a checkpoint directory")
        config = read_config(root) if (root / "config.json").exists() else None
        headers = _read_headers(root, shards)
        if weight_map:
            check_index(weight_map, headers, str(root))
        return cls(
            root,
            config,
            {name: (shard, t) for shard, h in headers.items() for name, t in h.tensors.items()},
            {shard: (root / shard).stat().st_size for shard in headers},
        )

    @property
    def storage(self) -> Storage:
        """How the matrices are stored: FP8 if there is any, else what most tensors are."""
        infos = [info for _, info in self.tensors.values()]
        if any(info.dtype == FP8 or info.name.endswith(SCALE_SUFFIX) for info in infos):
            return "fp8"
        sizes = Counter[str]()
        for info in infos:
            sizes[info.dtype] += info.nbytes
        return "fp32" if sizes[F32] > sizes[BF16] + sizes["F16"] else "bf16"

    @property
    def has_mtp(self) -> bool:
        """Whether the layer after the last is there; transformers drops it when saving."""
        if self.config is None:
            return False
        text = self.config.text if isinstance(self.config, ModelConfig) else self.config
        inside = f".layers.{text.num_hidden_layers}."
        return any(inside in name for name in self.tensors)

    def check(self) -> None:
        """Compare every tensor with the config's table.

        Tolerated: any float type for a tensor that is not FP8 (transformers widens some), and no
        MTP layer at all. Raises one CheckpointError that names everything else.
        """
        if self.config is None:
            raise CheckpointError(f"{self.root} holds no config.json to check the tensors against")
        expected = expected_tensors(self.config, self.storage)
        found = {name: info for name, (_, info) in self.tensors.items()}
        problems = compare_tensors(found, expected, self.has_mtp)
        if problems:
            raise CheckpointError(
                f"{self.root}: the tensors do not fit config.json: {'; '.join(problems)}; "
                "fetch the incomplete files again, or use the config.json that belongs to them"
            )


def compare_tensors(
    found: Mapping[str, TensorInfo], expected: Mapping[str, TensorSpec], has_mtp: bool
) -> list[str]:
    """What is missing, unexpected, of wrong shape or type: one phrase per kind of problem."""
    weights = {n: spec for n, spec in expected.items() if not n.endswith(SCALE_SUFFIX)}
    missing = [
        name
        for name, spec in weights.items()
        if name not in found and (has_mtp or spec.component != "mtp")
    ]
    unexpected, shapes, types, scales = [], [], [], []
    for name, info in found.items():
        weight_name = name.removesuffix(SCALE_SUFFIX)
        if weight_name not in weights:
            unexpected.append(name)
        elif weight_name != name:
            scales += _scale_problems(name, info, found.get(weight_name))
        else:
            spec = weights[name]
            if info.shape != spec.shape:
                shapes.append(f"{name} is {list(info.shape)}, expected {list(spec.shape)}")
            if info.dtype == FP8 and name + SCALE_SUFFIX not in found:
                scales.append(f"{name} is FP8 without {name + SCALE_SUFFIX}")
            elif info.dtype not in FLOATS and (info.dtype != FP8 or len(info.shape) != 2):
                types.append(f"{name} is {info.dtype}, expected {spec.dtype}")
    groups = {
        "missing": missing,
        "unexpected": unexpected,
        "wrong shape": shapes,
        "wrong type": types,
        "wrong scales": scales,
    }
    return [f"{kind} {summarize(names)}" for kind, names in groups.items() if names]


def _scale_problems(name: str, info: TensorInfo, weight: TensorInfo | None) -> list[str]:
    if weight is None or weight.dtype != FP8:
        return [f"{name} has no FP8 weight"]
    problems = []
    if info.shape != scale_shape(weight.shape):
        found, wanted = list(info.shape), list(scale_shape(weight.shape))
        problems.append(f"{name} is {found}, expected {wanted} for the weight's blocks")
    if info.dtype != F32:
        problems.append(f"{name} is {info.dtype}, expected {F32}")
    return problems


def summarize(lines: Iterable[str]) -> str:
    """`4 (a.0 and 2 like it, b)`: lines that differ only in numbers are shown once."""
    groups: dict[str, list[str]] = {}
    for line in lines:
        groups.setdefault(re.sub(r"\d+", "*", line), []).append(line)
    shown = [
        group[0] + (f" and {len(group) - 1} like it" if len(group) > 1 else "")
        for group in list(groups.values())[:SHOWN]
    ]
    more = sum(len(group) for group in list(groups.values())[SHOWN:])
    rest = f", and {more} more" if more else ""
    return f"{sum(map(len, groups.values()))} ({', '.join(shown)}{rest})"


def parse_index(raw: bytes, where: str) -> dict[str, str]:
    """The weight_map of an index file: tensor to shard. where: names it in messages.

    Raises CheckpointError; shard names are plain file names, so they stay inside the directory.
    """
    try:
        index = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique)
    except CheckpointError as error:
        raise CheckpointError(f"{where}: {error}") from None
    except (ValueError, RecursionError) as error:
        reason = str(error).splitlines()[0]
        raise CheckpointError(f"{where} is not JSON ({reason}); download it again") from error
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{where} has no weight_map; download it again")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or not re.fullmatch(r"[\w.+-]+\.safetensors", shard, re.A):
            raise CheckpointError(
                f"{where} puts {shorten(name)} into {shorten(shard)}; "
                "expected the name of a .safetensors file in the same directory"
            )
    return weight_map


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = [name for name, count in Counter(name for name, _ in pairs).items() if count > 1]
        raise CheckpointError(f"the name {shorten(twice[0])} occurs twice; download the file again")
    return found


def check_index(weight_map: Mapping[str, str], headers: Mapping[str, Header], where: str) -> None:
    """The index and the shards must name the same tensors, each in one place.

    Raises one CheckpointError that names everything that differs.
    """
    places: dict[str, list[str]] = {}
    for shard, header in headers.items():
        for name in header.tensors:
            places.setdefault(name, []).append(shard)
    groups = {
        "the index names tensors that no shard holds": [n for n in weight_map if n not in places],
        "the index does not name tensors of the shards": [n for n in places if n not in weight_map],
        "several shards hold the same tensor": [n for n, s in places.items() if len(s) > 1],
        "the index names another shard than the one that holds the tensor": [
            n for n, s in places.items() if len(s) == 1 and weight_map.get(n, s[0]) != s[0]
        ],
    }
    problems = [f"{what}: {summarize(names)}" for what, names in groups.items() if names]
    if problems:
        raise CheckpointError(
            f"{where}: {'; '.join(problems)}; fetch index and shards again, from one revision"
        )


def _weight_map(root: Path) -> dict[str, str] | None:
    """Tensor to shard, or None for a checkpoint in a single file."""
    index, single = root / INDEX_NAME, root / SINGLE_NAME
    if not index.exists():
        if single.exists():
            return None
        others = sorted(path.name for path in root.glob("*.safetensors"))
        if others:
            raise CheckpointError(
                f"{root} holds {len(others)} .safetensors files ({others[0]}, …) but no "
                f"{INDEX_NAME}; download the index too"
            )
        raise CheckpointError(
            f"{root} is not a checkpoint: it holds neither {INDEX_NAME} nor {SINGLE_NAME}"
        )
    try:
        weight_map = parse_index(index.read_bytes(), str(index))
    except OSError as error:
        raise CheckpointError(f"{index} cannot be read: {error.strerror}") from error
    if single.exists() and SINGLE_NAME not in weight_map.values():
        raise CheckpointError(
            f"{root} holds both {SINGLE_NAME} and {INDEX_NAME} with other shards; "
            "remove the one that does not belong to the checkpoint"
        )
    return weight_map


def _read_headers(root: Path, shards: list[str]) -> dict[str, Header]:
    """All headers; missing and damaged shards are reported together."""
    missing = [shard for shard in shards if not (root / shard).exists()]
    if missing:
        raise CheckpointError(
            f"{root}: missing shards {summarize(missing)} of {len(shards)}; download them"
        )
    headers: dict[str, Header] = {}
    errors: list[str] = []
    for shard in shards:
        try:
            headers[shard] = read_header(root / shard)
        except CheckpointError as error:
            errors.append(str(error))
    if errors:
        more = f"; and {len(errors) - 1} more damaged shards" if len(errors) > 1 else ""
        raise CheckpointError(errors[0] + more)
    return headers
