"""`glmflash compare`: two checkpoints side by side, from configs and headers."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

SHOWN = 8  # lines for one kind of tensor difference; --json has all


def compare(
    a: Annotated[str, typer.Argument(help="As for inspect: directory, config, id, URL, name.")],
    b: Annotated[str, typer.Argument(help="What to compare it with.")],
    json_: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say what carried over, what changed and what is new between two checkpoints.

    Compares configs, mechanisms, cache sizes, and names, shapes and types of tensors; never their
    values. Examples:

      glmflash compare glm-5.3 glm-5.3-flash

      glmflash compare ./original ./copy --json
    """
    from glmflash.cli.common import console, print_json
    from glmflash.cli.facts import fetching, uncollected
    from glmflash.verify.compare import compare as compare_subjects
    from glmflash.verify.subject import open_subject

    with uncollected(), fetching() as progress:
        facts = compare_subjects(open_subject(a, progress), open_subject(b, progress))
    if json_:
        print_json(facts)
        return
    screen = console()
    _print_sizes(screen, facts)
    if facts["identical"]:
        screen.print("nothing differs in config and headers; values were not compared")
        return
    for part in (_print_mechanisms, _print_config, _print_cache, _print_tensors):
        part(screen, facts)


def _print_sizes(screen: Console, facts: dict[str, Any]) -> None:
    from glmflash.cli.facts import table

    a, b = facts["a"], facts["b"]
    read = {"config": "tensors follow from its config", "checkpoint": "by its headers"}
    for name, side in (("a", a), ("b", b)):
        about = read.get(side["source"], "one file")
        screen.print(f"{name}: {side['target']} ({about})")
    rows = table("", "a", "b")
    rows.add_row("model type", str(a["model_type"]), str(b["model_type"]))
    for name in ("parameters", "active", "tensors", "bytes"):
        rows.add_row(name, *(f"{x[name]:,}" if x[name] else "unknown" for x in (a, b)))
    screen.print(rows)
    together = facts["tensors_together"]
    screen.print(f"together {a['tensors']:,} + {b['tensors']:,} = {together:,} tensors")


def _print_mechanisms(screen: Console, facts: dict[str, Any]) -> None:
    from glmflash.cli.facts import table

    statuses = {row["status"] for row in facts["mechanisms"] or []}
    if statuses <= {"carried over"}:
        return
    for status, title in (
        ("new", "new in b"),
        ("gone", "not in b"),
        ("changed", "changed"),
        ("carried over", "carried over"),
    ):
        if status not in statuses:
            continue
        rows = table(title, "", wrap="")
        for row in facts["mechanisms"]:
            if row["status"] != status:
                continue
            text = row["b"] or row["a"]
            if status == "changed":
                text = f"{row['a']}\n-> {row['b']}"
            rows.add_row(row["name"], text)
        screen.print()
        screen.print(rows)


def _print_config(screen: Console, facts: dict[str, Any]) -> None:
    from glmflash.cli.facts import table

    config = facts["config"]
    if not config:
        return
    if config["changed"]:
        rows = table("config key", "a -> b", wrap="a -> b")
        for key, (before, after) in config["changed"].items():
            rows.add_row(key.removeprefix("quantization_config."), f"{before} -> {after}")
        screen.print()
        screen.print(rows)
    for part, title in (("only_a", "only in a"), ("only_b", "only in b")):
        if config[part]:
            screen.print(f"\n{title}: {_keys(config[part])}")
    screen.print(f"\n{len(config['same'])} keys of config.json are equal in both")


def _keys(values: dict[str, Any]) -> str:
    """Keys and values; a nested object as the number of its keys."""
    nested = Counter(key.partition(".")[0] for key in values if "." in key)
    plain = [f"{key} {value}" for key, value in values.items() if "." not in key]
    return ", ".join([*plain, *(f"{name} ({count} keys)" for name, count in nested.items())])


def _print_cache(screen: Console, facts: dict[str, Any]) -> None:
    from glmflash.cli.facts import size, table

    cache = facts["cache"]
    if not cache or all(row["a"] == row["b"] for row in cache["layouts"]):
        return
    longest = list(cache["layouts"][0]["a"]["totals"])[-1]
    rows = table("cache layout", "a B/token", "b B/token", "a / b", "a", "b")
    rows.title = f"growing caches; the last two columns at {int(longest):,} tokens"
    for row in cache["layouts"]:
        sides = (row["a"], row["b"])
        rows.add_row(
            row["name"],
            *(f"{side['bytes_per_token']:,}" for side in sides),
            f"{row['ratio']:.1f}x",
            *(size(side["totals"][longest]) for side in sides),
        )
    screen.print()
    screen.print(rows)
    for row in cache["layouts"]:
        if row["name"] in ("fp8", "fp8, keys not pooled"):
            screen.print(f"{row['name']}: a = {row['a']['formula']}; b = {row['b']['formula']}")
    at_longest = [
        _gigabytes(cache["layouts"][0][side]["totals"][longest], facts[side]["cache"])
        for side in ("a", "b")
    ]
    screen.print(f"fp8 at {int(longest):,} tokens: {' against '.join(at_longest)}")
    _print_vendor_claim(screen, facts["vendor_claim"])


def _gigabytes(growing: float, fixed: dict[str, Any]) -> str:
    """`6.3 GB + 0.07 GB of state …`: the recurrent state, and what else does not grow."""
    if not fixed["state_bytes_bf16"]:
        return f"{growing / 1e9:.1f} GB"
    half, full = (fixed[f"state_bytes_{dtype}"] / 1e9 for dtype in ("bf16", "fp32"))
    conv = fixed["conv_bytes_bf16"] / 1e9
    return (
        f"{growing / 1e9:.1f} GB + {half:.2f} GB of KDA state in bf16 ({full:.2f} GB in fp32) "
        f"+ {conv:.3f} GB of conv columns"
    )


def _print_vendor_claim(screen: Console, claim: dict[str, Any] | None) -> None:
    if not claim:
        return
    judged = "reproduced" if claim["reproduced"] else "not reproduced by any layout here"
    crossing = claim["tokens_where_fp8_with_fixed_state_crosses"]
    screen.print(
        f'the vendor\'s "{claim["claim"]}" is {judged}; nearest: {claim["nearest"]}, '
        f"{claim['ratios'][claim['nearest']]:.1f}x. With the fixed state counted, fp8 passes that "
        f"ratio at {crossing:,} tokens and exceeds it beyond."
    )


def _print_tensors(screen: Console, facts: dict[str, Any]) -> None:
    screen.print()
    if facts["tensors"]:
        _print_names(screen, facts["tensors"])
    else:
        _print_patterns(screen, facts["patterns"])


def _print_names(screen: Console, tensors: dict[str, Any]) -> None:
    """Two copies of one model: tensor by tensor, what differs alike on one line."""
    from glmflash.verify.compare import pattern

    if tensors["identical"]:
        screen.print(f"tensors: all {tensors['compared']:,} have equal names, shapes and types")
        return
    screen.print(f"{tensors['compared']:,} tensors are in both")
    changes = {
        key: [(row["name"], f" {row['a']} -> {row['b']}") for row in tensors[key]]
        for key in ("shape", "dtype")
    }
    for title, found in (
        ("only in a", [(name, "") for name in tensors["only_a"]]),
        ("only in b", [(name, "") for name in tensors["only_b"]]),
        ("shape differs", changes["shape"]),
        ("type differs", changes["dtype"]),
    ):
        if not found:
            continue
        screen.print(f"{title}, {len(found):,} tensors:")
        groups: dict[tuple[str, str], list[str]] = {}
        for name, change in found:
            groups.setdefault((pattern(name), change), []).append(name)
        for (_, change), names in list(groups.items())[:SHOWN]:
            more = f" and {len(names) - 1:,} like it" if len(names) > 1 else ""
            screen.print(f"  {names[0]}{more}{change}")
        if len(groups) > SHOWN:
            screen.print(f"  and {len(groups) - SHOWN:,} more kinds; --json lists all")


def _print_patterns(screen: Console, patterns: list[dict[str, Any]]) -> None:
    """Two different models: kinds of tensors. Scales follow their weights and are left out."""
    rows = [row for row in patterns if not row["pattern"].endswith("_scale_inv")]
    both = [row for row in rows if row["a"] and row["b"]]
    screen.print(f"{len(both)} kinds of tensors are in both; stored type differs in")
    for row in both:
        before, after = (" and ".join(row[side]["dtypes"]) for side in ("a", "b"))
        if before != after:
            screen.print(f"  {row['pattern']}: {before} -> {after}")
    for status, title in (("only_a", "only in a"), ("only_b", "only in b")):
        found = [row for row in rows if row["status"] == status]
        if found:
            count = sum(row[status[-1]]["count"] for row in found)
            names = dict.fromkeys(_kind(row["pattern"]) for row in found)
            screen.print(f"{title}, {count:,} tensors: {', '.join(names)}")


def _kind(pattern: str) -> str:
    """Name below the layer; the vision tower as one."""
    if pattern.startswith("model.visual."):
        return "model.visual.*"
    return pattern.removeprefix("model.layers.*.").removesuffix(".weight")
