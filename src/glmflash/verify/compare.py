"""Two checkpoints side by side: config keys, mechanisms, caches, and tensors by their headers.

Knows the stable keys of `glmflash compare --json`. Reads no tensor, so values are not compared.
"""

from __future__ import annotations

import re
from collections import Counter
from fractions import Fraction
from functools import cache
from typing import Any

from glmflash.config import GlmMoeDsaConfig, ModelConfig, TextConfig
from glmflash.verify.arithmetic import (
    LENGTHS,
    Config,
    active,
    cache_shape,
    count,
    fixed_state,
    layouts,
    number,
)
from glmflash.verify.claims import VENDOR_RATIO, is_release
from glmflash.verify.inspect import cache_facts
from glmflash.verify.mechanisms import mechanisms
from glmflash.verify.subject import Subject
from glmflash.weights.table import TensorSpec

LONG_LIST = 8  # longer lists are shown as counts
HOISTED = ("text_config", "rope_parameters")  # GLM-5.3 keeps at the top what Flash nests


def compare(a: Subject, b: Subject) -> dict[str, Any]:
    """Everything `glmflash compare` says. Parts that need both configs are None without them."""
    both = a.config is not None and b.config is not None
    tensors = _compare_names(a.tensors, b.tensors) if _same_names(a.config, b.config) else None
    config = _compare_configs(a.raw or {}, b.raw or {}) if both else None
    different = bool(config and any(config[part] for part in ("changed", "only_a", "only_b")))
    return {
        "a": _side(a),
        "b": _side(b),
        "tensors_together": len(a.tensors) + len(b.tensors),
        "identical": tensors is not None and tensors["identical"] and not different,
        "config": config,
        "mechanisms": _mechanisms(a.config, b.config) if a.config and b.config else None,
        "cache": _cache(a.config, b.config) if a.config and b.config else None,
        "vendor_claim": _vendor_claim(a.config, b.config),
        "tensors": tensors,
        "patterns": None if tensors else _compare_patterns(a.tensors, b.tensors),
    }


def _same_names(a: Config | None, b: Config | None) -> bool:
    """Whether tensors are to be compared name by name: copies, slices and files of one model.

    Models of different width share hardly a shape; they are compared by kinds of tensors.
    """
    if a is None or b is None:
        return True
    return type(a) is type(b) and _text(a).hidden_size == _text(b).hidden_size


def _text(config: Config) -> TextConfig | GlmMoeDsaConfig:
    return config.text if isinstance(config, ModelConfig) else config


def _side(subject: Subject) -> dict[str, Any]:
    counts = count(subject.tensors)
    config = subject.config
    return {
        "target": subject.label,
        "source": subject.source,
        "model_type": config.model_type if config else None,
        "parameters": counts.total,
        "active": active(config, counts).trunk if config else None,
        "tensors": counts.tensors,
        "bytes": counts.bytes,
        "bytes_by_dtype": counts.bytes_by_dtype,
        "cache": cache_facts(config, counts) if config else None,
    }


def _compare_configs(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    left, right = _flat(a), _flat(b)
    shared = [key for key in left if key in right]
    return {
        "same": {key: _shown(left[key]) for key in shared if left[key] == right[key]},
        "changed": {
            key: _shown_apart(left[key], right[key]) for key in shared if left[key] != right[key]
        },
        "only_a": {key: _shown(value) for key, value in left.items() if key not in right},
        "only_b": {key: _shown(value) for key, value in right.items() if key not in left},
    }


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested keys joined by dots; the text model's own value stands before one at the top."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            if key in HOISTED:
                flat |= _flat({k: v for k, v in value.items() if k != "model_type"}, prefix)
            else:
                flat |= _flat(value, f"{prefix}{key}.")
        elif f"{prefix}{key}" not in flat or prefix:
            flat[f"{prefix}{key}"] = value
    return flat


def _shown(value: Any) -> Any:
    """Long lists as `34 x linear_attention, 11 x …`, or as their length if all entries differ."""
    if not isinstance(value, list) or len(value) <= LONG_LIST:
        return value
    counted = Counter(map(str, value))
    if len(counted) > LONG_LIST:
        return f"{len(value):,} entries"
    return ", ".join(f"{times} x {name}" for name, times in counted.items())


def _shown_apart(a: Any, b: Any) -> list[Any]:
    shown = [_shown(a), _shown(b)]
    lists = isinstance(a, list) and isinstance(b, list) and min(len(a), len(b)) > LONG_LIST
    if lists and (shown[0] == shown[1] or Counter(map(str, a)) == Counter(map(str, b))):
        place = next(i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
        shown = [f"{text}; [{place}] is {v[place]}" for text, v in zip(shown, (a, b), strict=True)]
    return shown


def _mechanisms(a: Config, b: Config) -> list[dict[str, Any]]:
    left, right = mechanisms(a), mechanisms(b)
    rows = []
    for name in left:
        before, after = left[name], right[name]
        if before == after:
            status = "carried over"
        else:
            status = "new" if before is None else "gone" if after is None else "changed"
        if before or after:
            rows.append({"name": name, "a": before, "b": after, "status": status})
    return rows


def _cache(a: Config, b: Config) -> dict[str, Any]:
    """Growing caches by layout with their ratio a / b, fixed state left out."""
    left = {layout.name: layout for layout in layouts(a)}
    right = {layout.name: layout for layout in layouts(b)}
    rows = []
    for name in dict.fromkeys((*left, *right)):
        # A layout that only one model has is compared with the plain fp8 layout of the other.
        plain = name.partition(",")[0].partition(" ")[0]
        one, other = left.get(name, left[plain]), right.get(name, right[plain])
        rows.append(
            {
                "name": name,
                "a": {"formula": one.formula, **_bytes(one.bytes_per_token)},
                "b": {"formula": other.formula, **_bytes(other.bytes_per_token)},
                "ratio": float(one.bytes_per_token / other.bytes_per_token),
            }
        )
    return {"layouts": rows}


def _bytes(per_token: Fraction) -> dict[str, Any]:
    totals = {str(tokens): number(per_token * tokens) for tokens in LENGTHS}
    return {"bytes_per_token": number(per_token), "totals": totals}


def _vendor_claim(a: Config | None, b: Config | None) -> dict[str, Any] | None:
    """The vendor's ratio against every pair of layouts here, in whichever order they came."""
    larger = next((c for c in (a, b) if isinstance(c, GlmMoeDsaConfig)), None)
    flash = next((c for c in (a, b) if isinstance(c, ModelConfig) and is_release(c)), None)
    if larger is None or flash is None:
        return None
    ratios = {row["name"]: row["ratio"] for row in _cache(larger, flash)["layouts"]}
    big, small = cache_shape(larger).per_token(1), cache_shape(flash).per_token(1)
    ratios["fp8 against bf16"] = float(big / cache_shape(flash).per_token(2))
    nearest = min(ratios, key=lambda name: abs(ratios[name] - VENDOR_RATIO))
    fixed = fixed_state(flash).nbytes(recurrent_size=4)
    vendor = Fraction(str(VENDOR_RATIO))
    return {
        "claim": f"about {VENDOR_RATIO}x less cache than GLM-5.3",
        "reproduced": any(round(ratio, 1) == VENDOR_RATIO for ratio in ratios.values()),
        "ratios": ratios,
        "nearest": nearest,
        "tokens_where_fp8_with_fixed_state_crosses": int(vendor * fixed / (big - vendor * small)),
    }


def _compare_names(a: list[TensorSpec], b: list[TensorSpec]) -> dict[str, Any]:
    """Differences tensor by tensor, for two copies of one model."""
    left, right = {x.name: x for x in a}, {y.name: y for y in b}
    shared = [(x, right[x.name]) for x in a if x.name in right]
    found: dict[str, Any] = {
        "compared": len(shared),
        "only_a": [name for name in left if name not in right],
        "only_b": [name for name in right if name not in left],
        "shape": [
            {"name": x.name, "a": list(x.shape), "b": list(y.shape)}
            for x, y in shared
            if x.shape != y.shape
        ],
        "dtype": [
            {"name": x.name, "a": x.dtype, "b": y.dtype} for x, y in shared if x.dtype != y.dtype
        ],
    }
    lists = ("only_a", "only_b", "shape", "dtype")
    return {"identical": not any(found[part] for part in lists), **found}


def pattern(name: str) -> str:
    """A tensor name that fits both models: layer and expert numbers as *, one prefix."""
    layer, experts, rest = name.partition(".experts.")
    if experts:  # nearly all tensors: only the part before the experts is new to the cache
        return f"{_unnumbered(layer)}.experts.*.{rest.partition('.')[2]}"
    return _unnumbered(name)


@cache
def _unnumbered(name: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", name.replace("model.language_model.", "model."))


def _compare_patterns(a: list[TensorSpec], b: list[TensorSpec]) -> list[dict[str, Any]]:
    """Differences by kind of tensor, for two different models. Order: as in a, then new in b."""
    left, right = _patterns(a), _patterns(b)
    rows = []
    for name in dict.fromkeys((*left, *right)):
        before, after = left.get(name), right.get(name)
        if before == after:
            status = "carried over"
        else:
            status = "only_b" if before is None else "only_a" if after is None else "changed"
        rows.append({"pattern": name, "a": before, "b": after, "status": status})
    return rows


def _patterns(tensors: list[TensorSpec]) -> dict[str, dict[str, Any]]:
    """Per pattern: how many tensors, of which shapes and types."""
    found: dict[str, dict[str, Any]] = {}
    kinds = Counter((pattern(spec.name), spec.shape, spec.dtype) for spec in tensors)
    for (name, shape, dtype), times in kinds.items():
        group = found.setdefault(name, {"count": 0, "shapes": [], "dtypes": []})
        group["count"] += times
        if list(shape) not in group["shapes"]:
            group["shapes"].append(list(shape))
        if dtype not in group["dtypes"]:
            group["dtypes"].append(dtype)
    return found
