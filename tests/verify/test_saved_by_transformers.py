"""Checkpoints that transformers saved: counted by us as torch counts them."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import pytest

from glmflash.verify.compare import compare
from glmflash.verify.inspect import report
from glmflash.verify.subject import open_subject

with warnings.catch_warnings():  # importing transformers warns of its own affairs
    warnings.simplefilter("ignore")
    from ..oracle.tiny import Tiny, make_tiny


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """As `save_pretrained` leaves it: fp32, one file, no MTP layer though the config has one."""
    return make_tiny(tmp_path_factory.mktemp("saved"), seed=1, mtp=False)


def facts(tiny: Tiny) -> dict[str, Any]:
    return report(open_subject(str(tiny.path)))


def test_parameters_as_torch_counts_them(saved: Tiny) -> None:
    found = facts(saved)
    model = saved.oracle
    state = model.state_dict()
    assert found["parameters"]["total"] == sum(math.prod(x.shape) for x in state.values())
    vision = sum(x.numel() for name, x in state.items() if "visual" in name)
    assert found["parameters"]["vision"] == vision
    assert found["parameters"]["mtp"] == 0
    experts = sum(x.numel() for name, x in state.items() if ".experts." in name)
    assert found["parameters"]["by_component"]["routed_experts"] == experts
    mixing = sum(x.numel() for name, x in state.items() if "_hc." in name)
    assert found["parameters"]["by_component"]["mhc"] == mixing


@pytest.mark.parametrize("storage", ["fp32", "bf16", "fp8"])
def test_bytes_as_torch_counts_them(storage: Any, tmp_path: Path) -> None:
    tiny = make_tiny(tmp_path, seed=2, storage=storage)
    found = facts(tiny)
    assert found["bytes"]["total"] == sum(x.nbytes for x in tiny.tensors.values())
    assert found["tensors"] == len(tiny.tensors)
    weights = {n: x for n, x in tiny.tensors.items() if not n.endswith("_scale_inv")}
    assert found["parameters"]["total"] == sum(x.numel() for x in weights.values())
    quantised = {n.split(".")[-2] for n, x in weights.items() if x.itemsize == 1}
    modules = found["quantisation"]["components"].values()
    assert {module for part in modules for module in part} == quantised


def test_storages_of_one_model_compare(saved: Tiny, tmp_path: Path) -> None:
    other = make_tiny(tmp_path, seed=1, storage="bf16", mtp=False)
    found = compare(open_subject(str(saved.path)), open_subject(str(other.path)))
    tensors = found["tensors"] or {}
    changed = [name for name, x in other.tensors.items() if x.dtype != saved.tensors[name].dtype]
    assert sorted(row["name"] for row in tensors["dtype"]) == sorted(changed)
    assert tensors["only_a"] == tensors["only_b"] == tensors["shape"] == []
