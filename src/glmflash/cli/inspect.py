"""`glmflash inspect`: what a checkpoint is, from its config and headers alone."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

SHARD_COLUMNS = 3
TITLES = {
    "mhc": "mHC",
    "kda": "KDA",
    "mla": "sparse attention",
    "dense_mlp": "dense MLP",
    "mtp": "MTP layer",
}


def inspect(
    target: Annotated[
        str,
        typer.Argument(
            help="Directory, config.json, .safetensors file, hub id (org/name[@revision]), URL, "
            "or a shipped config: glm-5.3-flash, glm-5.3."
        ),
    ],
    json_: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say what a checkpoint holds and costs: parameters, bytes, caches, published claims.

    Reads headers only, from a hub or web server too. Examples:

      glmflash inspect glm-5.3-flash

      glmflash inspect ./checkpoint --json
    """
    from glmflash.cli.common import console, print_json
    from glmflash.cli.facts import fetching, uncollected
    from glmflash.verify.inspect import report
    from glmflash.verify.subject import open_subject

    with uncollected(), fetching() as progress:
        facts = report(open_subject(target, progress))
    if json_:
        print_json(facts)
        return
    screen = console()
    screen.print(_headline(facts))
    for part in (_print_parameters, _print_stored, _print_cache, _print_claims):
        screen.print()
        part(screen, facts)


def _headline(facts: dict[str, Any]) -> str:
    model = facts["model"]
    if not model:
        return f"{facts['target']}: one file; components are guessed from names"
    kinds = {"linear_attention": "KDA", "sparse_attention": "sparse attention"}
    mtp = "no MTP layer"
    if model["mtp_layers"]:
        mtp = "MTP layer" if facts["parameters"]["mtp"] else "MTP layer declared but not stored"
    parts = [
        f"{model['layers']} layers",
        *(f"{count} {kinds[kind]}" for kind, count in model["attention"].items()),
        f"{model['mlp'].get('dense', 0)} dense MLP",
        f"{model['routed_experts']} experts, {model['experts_per_token']} per token",
        mtp,
        "vision" if model["vision"] else "text only",
    ]
    return f"{facts['target']} ({model['model_type']}): {'; '.join(parts)}"


def _print_parameters(screen: Console, facts: dict[str, Any]) -> None:
    from glmflash.cli.facts import short, table

    found = facts["parameters"]
    stored = facts["bytes"]
    rows = table("component", "parameters", "", "bytes")
    for name, value in found["by_component"].items():
        nbytes = stored["by_component"][name]
        title = TITLES.get(name, name.replace("_", " "))
        rows.add_row(title, f"{value:,}", short(value), f"{nbytes:,}")
    rows.add_section()
    if found["trunk"] != found["total"]:
        beside = sum(stored["by_component"].get(name, 0) for name in ("mtp", "vision"))
        nbytes = stored["total"] - beside
        rows.add_row("text trunk", f"{found['trunk']:,}", short(found["trunk"]), f"{nbytes:,}")
    total = found["total"]
    rows.add_row("total", f"{total:,}", short(total), f"{stored['total']:,}")
    screen.print(rows)
    if not found["active_definitions"]:
        return
    screen.print()
    rows = table("", "active parameters per token", wrap="active parameters per token")
    rows.columns[0].justify = "right"
    for row in found["active_definitions"]:
        rows.add_row(f"{row['parameters']:,}", row["definition"])
    screen.print(rows)


def _print_stored(screen: Console, facts: dict[str, Any]) -> None:
    from glmflash.cli.facts import size, table

    stored = facts["bytes"]
    assumed = " (assumed from the config)" if stored["assumed_from_config"] else ""
    rows = table(f"stored{assumed}", "tensors", "bytes", "")
    for dtype, nbytes in stored["by_dtype"].items():
        count = facts["tensors_by_dtype"][dtype]
        rows.add_row(dtype, f"{count:,}", f"{nbytes:,}", size(nbytes))
    rows.add_section()
    total = stored["total"]
    large = f"{total / 2**30:,.1f} GiB" if total >= 2**30 else size(total)
    rows.add_row("total", f"{facts['tensors']:,}", f"{total:,}", large)
    screen.print(rows)
    _print_shards(screen, stored["by_shard"] or {})
    quantised = facts["quantisation"]
    for component, modules in quantised["components"].items():
        screen.print(f"FP8 in {component}: {', '.join(modules)}")
    if not quantised["components"]:
        screen.print("nothing is quantised")
    if quantised["method"]:
        block = " x ".join(map(str, quantised["block"]))
        screen.print(
            f"config says {quantised['method']} {quantised['format']} in blocks of {block}, "
            f"{quantised['not_converted']:,} modules left out"
        )
    template = facts["template"]
    digest = f", SHA-256 {template['sha256'][:16]}…" if template["sha256"] else ""
    screen.print(f"chat template: {template['revision'] or template['status']}{digest}")


def _print_shards(screen: Console, shards: dict[str, int]) -> None:
    """Bytes of tensors by shard; of numbered names only the number is repeated."""
    from glmflash.cli.facts import table

    if not shards:
        return
    marks = [re.sub(r"model-(\d+)-of-\d+\.safetensors", r"\1", name) for name in shards]
    columns = min(SHARD_COLUMNS, len(marks)) if all(map(str.isdecimal, marks)) else 1
    screen.print()
    rows = table(*(["shard", "bytes of tensors"] * columns))
    cells = [(mark, f"{nbytes:,}") for mark, nbytes in zip(marks, shards.values(), strict=True)]
    for first in range(0, len(cells), columns):
        rows.add_row(*(text for cell in cells[first : first + columns] for text in cell))
    screen.print(rows)
    screen.print()


def _print_cache(screen: Console, facts: dict[str, Any]) -> None:
    from glmflash.cli.facts import size, table

    cache = facts["cache"]
    if not cache:
        return
    lengths = list(cache["layouts"][0]["totals"])
    rows = table("cache of one sequence", "B/token", *(f"{int(n):,}" for n in lengths))
    for layout in cache["layouts"]:
        totals = (size(layout["totals"][n]) for n in lengths)
        rows.add_row(layout["name"], f"{layout['bytes_per_token']:,}", *totals)
    screen.print(rows)
    if cache["fixed_bytes"]:
        screen.print(
            f"totals include {cache['fixed_bytes']:,} B of fixed state: "
            f"KDA {cache['state_bytes_fp32']:,} (fp32; {cache['state_bytes_bf16']:,} in bf16), "
            f"conv {cache['conv_bytes_bf16']:,} (bf16), "
            f"open pool {cache['open_pool_bytes_bf16']:,} (bf16)"
        )
    for layout in cache["layouts"]:
        screen.print(f"{layout['name']}: {layout['formula']}")


def _print_claims(screen: Console, facts: dict[str, Any]) -> None:
    from glmflash.cli.facts import table

    if not facts["claims"]:
        return
    title = "published claims beside the arithmetic"
    rows = table("", title, wrap=title)
    for claim in facts["claims"]:
        rows.add_row(claim["id"], f"{claim['claim']}\n{claim['arithmetic']}\n-> {claim['verdict']}")
    screen.print(rows)
