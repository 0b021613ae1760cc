"""The vision tower against transformers in fp32, and what it must not do to memory."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from glmflash.errors import MediaError
from glmflash.model import vision
from glmflash.model.vision import VisionTower
from glmflash.weights.store import WeightStore

from ..oracle.tiny import Tiny, make_tiny

TOLERANCE = 2e-5
Grid = tuple[int, int, int]


def noise(grid: Grid, seed: int = 0) -> Tensor:
    """Patches as normalised pixels are: mean 0, about 1 wide."""
    random = torch.Generator().manual_seed(seed)
    return torch.randn(grid[0] * grid[1] * grid[2], 3 * 2 * 14 * 14, generator=random)


@torch.no_grad()
def expected(tiny: Tiny, pixels: Tensor, grids: list[Grid]) -> Tensor:
    output = tiny.oracle.get_image_features(pixels, torch.tensor(grids))
    return torch.cat(output.pooler_output)


def difference(a: Tensor, b: Tensor) -> float:
    assert a.shape == b.shape
    return float((a - b).abs().max())


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return make_tiny(tmp_path_factory.mktemp("vision") / "tiny", seed=0)


@pytest.fixture(scope="module")
def tower(tiny: Tiny) -> Iterator[VisionTower]:
    with WeightStore.open(tiny.path) as store:
        yield VisionTower(store, torch.float32)


@pytest.mark.parametrize(
    "grid",
    [(1, 2, 2), (1, 4, 4), (1, 2, 30), (1, 22, 6), (2, 2, 2), (3, 4, 6), (5, 10, 8)],
    ids=str,
)
def test_features(tiny: Tiny, tower: VisionTower, grid: Grid) -> None:
    pixels = noise(grid)
    found = tower(pixels, grid)
    assert difference(found, expected(tiny, pixels, [grid])) <= TOLERANCE
    assert float(found.std()) > 0.1  # the random weights let the pixels through


@torch.no_grad()
def test_video_features(tiny: Tiny, tower: VisionTower) -> None:
    grid = (3, 6, 4)
    pixels = noise(grid)
    output = tiny.oracle.get_video_features(pixels, torch.tensor([grid]))
    assert difference(tower(pixels, grid), output.pooler_output[0]) <= TOLERANCE


def test_pictures_in_one_call_of_the_oracle(tiny: Tiny, tower: VisionTower) -> None:
    grids: list[Grid] = [(1, 4, 6), (2, 8, 2), (1, 2, 2)]
    parts = [noise(grid, seed) for seed, grid in enumerate(grids)]
    found = torch.cat([tower(part, grid) for part, grid in zip(parts, grids, strict=True)])
    assert difference(found, expected(tiny, torch.cat(parts), grids)) <= TOLERANCE


VARIANTS: dict[str, dict[str, Any]] = {
    "odd sizes": {"hidden_size": 36, "num_heads": 3, "intermediate_size": 52, "depth": 3},
    "other rotation and eps": {
        "rope_parameters": {"rope_type": "axial", "rope_theta": 50.0},
        "rms_norm_eps": 1e-2,
    },
    "larger patches of one frame": {"patch_size": 16, "temporal_patch_size": 1},
    "blocks of 3": {"spatial_merge_size": 3},
    "clamps bind": {"swiglu_limit": 0.3},  # 10 never does with small random weights
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants(tmp_path: Path, variant: str) -> None:
    tiny = make_tiny(tmp_path / "tiny", seed=3, vision=VARIANTS[variant])
    grid = (2, 6, 12)
    config = tiny.oracle.config.vision_config
    values = 3 * config.temporal_patch_size * config.patch_size**2
    random = torch.Generator().manual_seed(1)
    pixels = torch.randn(2 * 6 * 12, values, generator=random)
    with WeightStore.open(tiny.path) as store:
        found = VisionTower(store, torch.float32)(pixels, grid)
    assert difference(found, expected(tiny, pixels, [grid])) <= TOLERANCE


@torch.no_grad()
def test_bfloat16(tmp_path: Path) -> None:
    """A bf16 checkpoint computed in bf16, beside transformers in bf16 and both beside fp32."""
    tiny = make_tiny(tmp_path / "tiny", seed=0, storage="bf16")
    grid = (2, 6, 4)
    pixels = noise(grid)
    exact = expected(tiny, pixels, [grid])
    half = copy.deepcopy(tiny.oracle.model.visual).to(torch.bfloat16)
    theirs = half(pixels.bfloat16(), grid_thw=torch.tensor([grid])).pooler_output
    with WeightStore.open(tiny.path) as store:
        found = VisionTower(store, torch.bfloat16)(pixels, grid)
    assert found.dtype == torch.bfloat16
    error, their_error = difference(found.float(), exact), difference(theirs.float(), exact)
    assert error <= 1.5 * their_error
    assert difference(found.float(), theirs.float()) <= 0.02 * float(exact.abs().max())


def test_groups_and_pieces_change_nothing(
    tower: VisionTower, monkeypatch: pytest.MonkeyPatch
) -> None:
    grid = (5, 4, 6)
    pixels = noise(grid)
    whole = tower(pixels, grid)
    seen: list[int] = []
    features = tower._features

    def spied(rows: Tensor, frame: int, rotation: tuple[Tensor, Tensor]) -> Tensor:
        seen.append(len(rows))
        return features(rows, frame, rotation)

    monkeypatch.setattr(tower, "_features", spied)
    monkeypatch.setattr(vision, "GROUP_PATCHES", 50)
    monkeypatch.setattr(vision, "MLP_ROWS", 7)
    assert difference(tower(pixels, grid), whole) <= 1e-6
    assert seen == [48, 48, 24]  # two frames of 24 patches a group


def test_a_frame_attends_only_to_itself(tower: VisionTower) -> None:
    grid = (3, 4, 4)
    pixels = noise(grid)
    other = pixels.clone()
    other[16:32] = noise((1, 4, 4), seed=9)
    before, after = tower(pixels, grid), tower(other, grid)
    assert torch.equal(before[:4], after[:4])
    assert torch.equal(before[8:], after[8:])
    assert difference(before[4:8], after[4:8]) > 0.1


def test_a_large_frame_builds_no_matrix_of_patches(tower: VisionTower) -> None:
    """9,216 patches: the matrix would be 0.7 GB a block. Only the streaming kernel is allowed."""
    grid = (1, 96, 96)
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION]), torch.inference_mode():
        features = tower(noise(grid), grid)
    assert features.shape == (48 * 48, 64)
    assert bool(features.isfinite().all())


@pytest.mark.parametrize(
    ("patches", "grid"), [(16, (1, 4, 6)), (12, (1, 3, 4)), (12, (1, 4, 3)), (0, (0, 4, 4))]
)
def test_a_grid_that_does_not_fit(tower: VisionTower, patches: int, grid: Grid) -> None:
    with pytest.raises(MediaError, match=f"{patches} patches do not make a grid"):
        tower(torch.zeros(patches, 1176), grid)


def test_text_only(tiny: Tiny) -> None:
    with WeightStore.open(tiny.path) as store:
        store.config = replace(store.config, vision=None, token_ids=None)
        with pytest.raises(MediaError, match="text-only"):
            VisionTower(store, torch.float32)
