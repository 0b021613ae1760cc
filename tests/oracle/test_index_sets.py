"""The tokens that each query attends to, as sets, against transformers' indexer."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from glmflash.model.kpool import KPoolIndexer

from .conftest import Specimen, Zoo
from .runs import random_chunks

NAMES = ["base", "two sparse layers", "pools of 2", "pools of 16", "no tail", "odd sizes"]
Sets = list[list[set[int]]]  # by sparse layer, then by position


def oracle_sets(specimen: Specimen) -> Sets:
    """Chosen tokens as transformers' indexers return them, -1 removed."""
    found: Sets = []
    trunk = specimen.tiny.oracle.model.language_model
    indexers = [m for m in trunk.modules() if type(m).__name__.endswith("Indexer")]

    def note(_module: torch.nn.Module, _inputs: object, chosen: Tensor) -> None:
        found.append([{t for t in row if t >= 0} for row in chosen[0].tolist()])

    handles = [indexer.register_forward_hook(note) for indexer in indexers]
    with torch.no_grad():
        specimen.tiny.oracle(input_ids=torch.tensor([specimen.ids]), use_cache=False)
    for handle in handles:
        handle.remove()
    return found


def our_sets(specimen: Specimen, sizes: list[int], patch: pytest.MonkeyPatch) -> Sets:
    """Chosen tokens while a session takes the prompt in pieces of these sizes."""
    layers: dict[int, list[set[int]]] = {}
    right = KPoolIndexer.select

    def watch(
        self: KPoolIndexer, u: Tensor, q_latent: Tensor, state: object, start: int
    ) -> Tensor | None:
        tokens = right(self, u, q_latent, state, start)
        rows = layers.setdefault(id(self), [])
        for i in range(len(u)):
            everything = set(range(start + i + 1))
            rows.append(everything if tokens is None else {t for t in tokens[i].tolist() if t >= 0})
        return tokens

    patch.setattr(KPoolIndexer, "select", watch)
    session, end = specimen.engine.session(), 0
    for size in sizes:
        end += size
        session.sync(specimen.ids[:end])
    return list(layers.values())


@pytest.mark.parametrize("largest", [7, 70])
@pytest.mark.parametrize("name", NAMES)
def test_sets(zoo: Zoo, monkeypatch: pytest.MonkeyPatch, name: str, largest: int) -> None:
    specimen = zoo[name]
    assert specimen.expected is not None  # the oracle's choices are clear
    length = len(specimen.ids) if largest > 7 else 60
    sizes = random_chunks(length, seed=3, largest=largest)
    theirs = [layer[:length] for layer in oracle_sets(specimen)]
    ours = our_sets(specimen, sizes, monkeypatch)
    assert (
        len(ours)
        == len(theirs)
        == specimen.tiny.text["layer_types"].count("deepseek_sparse_attention")
    )
    for mine, other in zip(ours, theirs, strict=True):
        for position, (a, b) in enumerate(zip(mine, other, strict=True)):
            assert a == b, f"position {position}: {sorted(a)} against {sorted(b)}"


def test_selection_is_real(zoo: Zoo) -> None:
    """The prompts are long enough that most queries leave most tokens out."""
    sets = oracle_sets(zoo["base"])[0]
    assert sum(len(chosen) < (position + 1) / 3 for position, chosen in enumerate(sets)) > 100
