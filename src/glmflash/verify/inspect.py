"""The facts of one checkpoint, ready for JSON: what it is, what it weighs, what it costs to run.

Knows the stable keys of `glmflash inspect --json`. Opens nothing: a Subject comes in.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import Any

from glmflash.config import ModelConfig
from glmflash.verify.arithmetic import (
    LENGTHS,
    Active,
    Config,
    Counts,
    active,
    count,
    fixed_state,
    layouts,
    number,
)
from glmflash.verify.claims import Claim, claims, is_release
from glmflash.verify.subject import Subject

# SHA-256 of the published chat_template.jinja: revision, date, what to know.
TEMPLATES = {
    "34d5ee66b12fa6446cdae131c352b8f68cd85369e0e6fda115583805fada3891": (
        "3f1971b7 (2026-08-27): missing content renders as None; superseded by 690b7052"
    ),
    "0c4099f3382d6c92700dfb99725025360966fd73032f0ecf32377c0d9e6309c5": "690b7052 (2026-09-04)",
    "3740abcea51c45830cb3ca562084ad5fb2ef53589376f73332e9886f93ade41c": (
        "of GLM-5.3, aca966e4 (2026-09-04): text only, images never reach the prompt"
    ),
}


def report(subject: Subject) -> dict[str, Any]:
    """Everything `glmflash inspect` says. Parts that need a config are None without one."""
    counts = count(subject.tensors)
    config = subject.config
    used = active(config, counts) if config else None
    judged: list[Claim] = []
    if isinstance(config, ModelConfig) and is_release(config):
        judged = claims(config, counts)
    return {
        "target": subject.label,
        "source": subject.source,
        "model": _model(config) if config else None,
        "parameters": _parameters(counts, used),
        "bytes": {
            "total": counts.bytes,
            "by_dtype": counts.bytes_by_dtype,
            "by_component": counts.bytes_by_component,
            "by_shard": subject.shards,
            "assumed_from_config": subject.source == "config",
        },
        "tensors": counts.tensors,
        "tensors_by_dtype": counts.tensors_by_dtype,
        "shards": len(subject.shards) if subject.shards is not None else None,
        "cache": cache_facts(config, counts) if config else None,
        "quantisation": _quantisation(subject),
        "template": _template(subject.template),
        "claims": [asdict(claim) for claim in judged],
    }


def _model(config: Config) -> dict[str, Any]:
    text = config.text if isinstance(config, ModelConfig) else config
    return {
        "model_type": config.model_type,
        "layers": text.num_hidden_layers,
        "attention": dict(Counter(_attention_kinds(config))),
        "mlp": dict(Counter(text.mlp_layer_types)),
        "routed_experts": text.n_routed_experts,
        "experts_per_token": text.num_experts_per_tok,
        "mtp_layers": text.num_nextn_predict_layers,
        "vision": isinstance(config, ModelConfig) and config.vision is not None,
        "context": text.max_position_embeddings,
        "dtype": text.dtype,
    }


def _attention_kinds(config: Config) -> tuple[str, ...]:
    if isinstance(config, ModelConfig):
        return config.text.layer_types
    return ("sparse_attention",) * config.num_hidden_layers


def _parameters(counts: Counts, used: Active | None) -> dict[str, Any]:
    return {
        "total": counts.total,
        "trunk": counts.trunk,
        "mtp": counts.mtp,
        "vision": counts.vision,
        "active": used.trunk if used else None,
        "active_definitions": _definitions(used) if used else None,
        "by_component": counts.parameters,
    }


def _definitions(used: Active) -> list[dict[str, Any]]:
    rows = [
        ("active", used.trunk, "trunk per token: chosen experts, without the embedding table"),
        ("with_embedding", used.with_embedding, "the same with the whole embedding table"),
        ("mtp", used.mtp, "more per draft of the MTP layer (the shared head runs once more)"),
        ("vision", used.vision, "more for patches of images and videos"),
        ("everything", used.everything, "with embedding table, MTP layer and vision"),
    ]
    return [{"name": n, "parameters": size, "definition": text} for n, size, text in rows if size]


def cache_facts(config: Config, counts: Counts) -> dict[str, Any]:
    """Bytes of one sequence. Totals add the fixed state: recurrent fp32, the rest bf16."""
    known = {layout.name: layout for layout in layouts(config, mtp=counts.mtp > 0)}
    state = fixed_state(config)
    fixed = state.nbytes(recurrent_size=4)
    found = {
        "bytes_per_token_bf16": number(known["bf16"].bytes_per_token),
        "bytes_per_token_fp8": number(known["fp8"].bytes_per_token),
        "state_bytes_fp32": 4 * state.recurrent,
        "state_bytes_bf16": 2 * state.recurrent,
        "conv_bytes_bf16": 2 * state.conv,
        "open_pool_bytes_bf16": 2 * state.open_pool,
        "fixed_bytes": fixed,
        "layouts": [
            {
                "name": layout.name,
                "formula": layout.formula,
                "bytes_per_token": number(layout.bytes_per_token),
                "totals": {str(n): number(layout.bytes_per_token * n) + fixed for n in LENGTHS},
            }
            for layout in known.values()
        ],
    }
    for name in ("fp8", "bf16"):
        if f"{name} with MTP" in known:
            value = known[f"{name} with MTP"].bytes_per_token
            found[f"bytes_per_token_{name}_mtp"] = number(value)
    return found


def _quantisation(subject: Subject) -> dict[str, Any]:
    """Which modules hold FP8 weights, by component, and what the config says about it."""
    quantised: dict[str, set[str]] = {}
    for spec in subject.tensors:
        if spec.dtype.startswith("F8"):
            module = spec.name.removesuffix(".weight").rpartition(".")[2]
            quantised.setdefault(spec.component, set()).add(module)
    declared = subject.config.quantization if subject.config else None
    return {
        "method": declared.quant_method if declared else None,
        "format": declared.fmt if declared else None,
        "block": list(declared.weight_block_size) if declared else None,
        "not_converted": len(declared.modules_to_not_convert) if declared else None,
        "components": {name: sorted(modules) for name, modules in sorted(quantised.items())},
    }


def _template(digest: str | None) -> dict[str, Any]:
    if digest is None:
        return {"status": "absent", "sha256": None, "revision": None}
    known = TEMPLATES.get(digest)
    return {"status": "known" if known else "unknown", "sha256": digest, "revision": known}
