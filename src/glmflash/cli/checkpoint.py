"""`glmflash checkpoint random`: a random checkpoint in the layout of the release."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from glmflash.errors import RequestError

checkpoint = typer.Typer(
    no_args_is_help=True,
    help="Make checkpoints.\n\nExample:\n\n  glmflash checkpoint random ./tiny --like tiny",
)
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "KI": 1 << 10, "MI": 1 << 20, "GI": 1 << 30}


@checkpoint.callback()
def _group() -> None:
    """Keeps `random` a sub-command."""


@checkpoint.command("random")
def random(
    out: Annotated[Path, typer.Argument(help="A new directory.")],
    like: Annotated[
        str, typer.Option(help="glm-5.3-flash (real widths), bench (0.76 B) or tiny.")
    ] = "tiny",
    layers: Annotated[int | None, typer.Option(help="Decoder layers.")] = None,
    experts: Annotated[int | None, typer.Option(help="Routed experts of a layer.")] = None,
    hidden: Annotated[int | None, typer.Option(help="Width of the residual streams.")] = None,
    vocab: Annotated[int | None, typer.Option(help="Rows of the embedding.")] = None,
    index_topk: Annotated[
        int | None, typer.Option(help="Tokens that sparse attention looks at.")
    ] = None,
    vision: Annotated[bool, typer.Option(help="With the vision tower.")] = True,
    mtp: Annotated[bool, typer.Option(help="With the MTP layer, if the model has one.")] = True,
    dtype: Annotated[
        str | None, typer.Option(help="fp8, bf16 or fp32. Default: the model's own.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Equal seeds give equal files.", min=0)] = 0,
    shard_size: Annotated[str, typer.Option(help="Largest shard, as 5GiB or 500MB.")] = "5GiB",
) -> None:
    """Write a random checkpoint: names, shapes and types of the release, values that hide nothing.

    It is streamed to disk, so a large one needs little memory.

    Examples:

      glmflash checkpoint random ./tiny

      glmflash checkpoint random ./slice --like glm-5.3-flash --layers 4 --experts 8
    """
    from glmflash.cli.common import console
    from glmflash.cli.progress import writing
    from glmflash.weights.presets import STORAGES, Overrides, preset

    if dtype is not None and dtype not in STORAGES:
        raise RequestError(f"--dtype is {dtype!r}; give {', '.join(STORAGES)}")
    size = _bytes(shard_size)
    model = preset(like, Overrides(layers, experts, hidden, vocab, index_topk, vision, mtp))
    from glmflash.weights.random import write_checkpoint

    with writing(str(out)) as update:
        total = write_checkpoint(out, model, dtype, seed, size, update)
    console(stderr=True).print(f"wrote {out}: {total:,} bytes of tensors", markup=False)


def _bytes(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]I?)?B?", text.strip().upper())
    value = float(match[1]) * _UNITS[match[2] or ""] if match else 0
    if not match or value < 1:
        raise RequestError(f"--shard-size is {text!r}; give a size such as 5GiB or 500MB")
    return int(value)
