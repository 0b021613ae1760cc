"""Components from names alone, against the table that was written from the specification."""

from __future__ import annotations

import pytest

from glmflash.config import shipped
from glmflash.verify.components import component, guess_layer_kinds, layer_kinds
from glmflash.weights.table import expected_tensors


@pytest.mark.parametrize("name", ["glm-5.3-flash", "glm-5.3"])
def test_every_released_name(name: str) -> None:
    config = shipped(name)
    table = expected_tensors(config, "fp8")
    kinds = layer_kinds(config)
    wrong = [s.name for s in table.values() if component(s.name, kinds) != s.component]
    assert wrong == []
    assert guess_layer_kinds(table) == kinds


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["model.layers.3.self_attn.q_proj.weight"], "kda"),
        (["model.layers.3.self_attn.kv_b_proj.weight"], "mla"),
        (["model.layers.3.self_attn.o_proj.weight"], "attention"),
        (["model.layers.3.self_attn.o_proj.weight", "model.layers.3.eh_proj.weight"], "mtp"),
        (["model.layers.3.eh_proj.weight", "model.layers.3.self_attn.q_a_proj.weight"], "mtp"),
        (["model.language_model.layers.0.mlp.gate_proj.weight"], "dense_mlp"),
        (["model.language_model.layers.0.mlp.gate.weight"], "router"),
        (["model.visual.blocks.3.attn.qkv.weight"], "vision"),
        (["model.visual.layers.3.norm.weight"], "vision"),
        (["transformer.h.0.attn.weight"], "other"),
        (["decoder.layers.0.self_attn.q_proj.weight"], "other"),
        (["model.layers.x.self_attn.q_proj.weight"], "other"),
        (["model.layers.3.unheard_of.weight"], "other"),
        ([""], "other"),
    ],
)
def test_names_without_a_config(names: list[str], expected: str) -> None:
    assert component(names[0], guess_layer_kinds(names)) == expected
