"""The vision tower: patches of one picture or video to features of the language model's width.

Knows the blocks, the axial rotation, the 2x2 downsampling and the merger, and that a frame attends
only to itself; does not know where pixels come from or where features go in the prompt.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from glmflash.config import VisionConfig
from glmflash.errors import MediaError
from glmflash.kernels.norm.reference import rms_norm, swiglu
from glmflash.weights.store import WeightStore

PREFIX = "model.visual."
# Patches that pass the tower together: whole frames, at least one. Bounds what a long video needs.
GROUP_PATCHES = 8192
# Rows that pass an MLP together: a picture has up to 32,000, which are four times as wide inside.
MLP_ROWS = 4096
MERGER_NORM_EPS = 1e-5  # a LayerNorm with its own epsilon, not the config's rms_norm_eps


class Affine:
    """`y = x Wᵀ + b` with W flattened to `[out, in]`; a missing bias is none."""

    def __init__(
        self, store: WeightStore, dtype: torch.dtype, name: str, bias: bool = True
    ) -> None:
        self.weight = store.dense(f"{PREFIX}{name}.weight", dtype).flatten(1)
        self.bias = store.dense(f"{PREFIX}{name}.bias", dtype) if bias else None

    def __call__(self, x: Tensor) -> Tensor:
        """`[..., in]` to `[..., out]`."""
        return functional.linear(x, self.weight, self.bias)


class VisionMlp:
    """`W_down swiglu(W_gate x, W_up x)`: with biases in a block, without in the merger."""

    def __init__(
        self, store: WeightStore, dtype: torch.dtype, name: str, limit: float, bias: bool
    ) -> None:
        self.gate = Affine(store, dtype, f"{name}.gate_proj", bias)
        self.up = Affine(store, dtype, f"{name}.up_proj", bias)
        self.down = Affine(store, dtype, f"{name}.down_proj", bias)
        self.limit = limit

    def __call__(self, x: Tensor) -> Tensor:
        """`[P, D]` to `[P, D]`."""
        return self.down(swiglu(self.gate(x), self.up(x), self.limit))


class VisionBlock:
    """Pre-norm attention over the patches of each frame, then a pre-norm MLP."""

    def __init__(
        self, store: WeightStore, dtype: torch.dtype, config: VisionConfig, index: int
    ) -> None:
        def norm(name: str) -> Tensor:
            return store.dense(f"{PREFIX}{at}.{name}.weight", dtype)

        at = f"blocks.{index}"
        self.heads, self.eps = config.num_heads, config.rms_norm_eps
        self.norm1, self.norm2 = norm("norm1"), norm("norm2")
        self.q_norm, self.k_norm = norm("attn.q_norm"), norm("attn.k_norm")
        self.qkv = Affine(store, dtype, f"{at}.attn.qkv")
        self.proj = Affine(store, dtype, f"{at}.attn.proj")
        self.mlp = VisionMlp(store, dtype, f"{at}.mlp", config.swiglu_limit, bias=True)

    def attend(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        """`[frames, patches, D]` to the same; never builds a matrix of patches by patches."""
        frames, patches, width = x.shape
        qkv = self.qkv(x).view(frames, patches, 3, self.heads, width // self.heads)
        q, k, v = qkv.unbind(2)
        q = rotate(rms_norm(q, self.q_norm, self.eps), *rotation)
        k = rotate(rms_norm(k, self.k_norm, self.eps), *rotation)
        q, k, v = (z.transpose(1, 2) for z in (q, k, v))
        mixed = functional.scaled_dot_product_attention(q, k, v)  # scale 1 / sqrt(head dim)
        return self.proj(mixed.transpose(1, 2).flatten(2))

    def __call__(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        x = x + self.attend(rms_norm(x, self.norm1, self.eps), rotation)
        return x + in_pieces(self.mlp, rms_norm(x, self.norm2, self.eps))


class Merger:
    """`mlp(GELU(LayerNorm(W x)))`, no biases but the norm's, no residual."""

    def __init__(self, store: WeightStore, dtype: torch.dtype, config: VisionConfig) -> None:
        self.proj = Affine(store, dtype, "merger.proj", bias=False)
        norm = f"{PREFIX}merger.post_projection_norm"
        self.norm_weight = store.dense(f"{norm}.weight", dtype)
        self.norm_bias = store.dense(f"{norm}.bias", dtype)
        self.mlp = VisionMlp(store, dtype, "merger", config.swiglu_limit, bias=False)

    def __call__(self, x: Tensor) -> Tensor:
        """`[M, D]` to `[M, D]`."""
        z, weight, bias = self.proj(x), self.norm_weight, self.norm_bias
        normed = functional.layer_norm(z, weight.shape, weight, bias, MERGER_NORM_EPS)
        return self.mlp(functional.gelu(normed))  # the erf form


class VisionTower:
    """Features of one picture or video."""

    def __init__(self, store: WeightStore, dtype: torch.dtype) -> None:
        """Read the tower's tensors as `dtype`. Raises MediaError on a text-only checkpoint."""
        config = store.config.vision
        if config is None:
            raise MediaError("this checkpoint is text-only: it has no vision tower")
        self.config, self.dtype = config, dtype
        self.patch_embed = Affine(store, dtype, "patch_embed.proj")
        self.blocks = [VisionBlock(store, dtype, config, i) for i in range(config.depth)]
        self.post_norm = store.dense(f"{PREFIX}post_layernorm.weight", dtype)
        # A convolution whose stride is its kernel is a linear map of the block's pixels. Patches
        # come as 2x2 blocks, pixel by pixel, so the kernel's channel axis goes last.
        kernel = store.dense(f"{PREFIX}downsample.weight", dtype)
        self.downsample_weight = kernel.permute(0, 2, 3, 1).flatten(1).contiguous()
        self.downsample_bias = store.dense(f"{PREFIX}downsample.bias", dtype)
        self.merger = Merger(store, dtype, config)

    def __call__(self, pixel_values: Tensor, grid: tuple[int, int, int]) -> Tensor:
        """pixel_values `[t*h*w, C*T*p*p]` to features `[t*h*w / merge^2, D]`, in their order.

        grid: (t, h, w), slices and patches of each. Patches are in order of 2x2 blocks. Raises
        MediaError if the grid does not fit the patches.
        """
        slices, height, width = grid
        frame, merge = height * width, self.config.spatial_merge_size
        if min(grid) < 1 or height % merge or width % merge or len(pixel_values) != slices * frame:
            raise MediaError(
                f"{len(pixel_values)} patches do not make a grid of {slices} x {height} x {width} "
                f"whose sides are multiples of {merge}; prepare the medium anew"
            )
        rotation = axial_rotation(height, width, self.config)
        together = frame * max(1, GROUP_PATCHES // frame)
        groups = torch.split(pixel_values, together)
        return torch.cat([self._features(group, frame, rotation) for group in groups])

    def _features(self, pixels: Tensor, frame: int, rotation: tuple[Tensor, Tensor]) -> Tensor:
        x = self.patch_embed(pixels.to(self.dtype))
        x = x.view(-1, frame, x.shape[-1])
        for block in self.blocks:
            x = block(x, rotation)
        x = rms_norm(x, self.post_norm, self.config.rms_norm_eps)
        x = x.view(-1, self.downsample_weight.shape[1])
        x = functional.linear(x, self.downsample_weight, self.downsample_bias)
        return in_pieces(self.merger, x)


def axial_rotation(height: int, width: int, config: VisionConfig) -> tuple[Tensor, Tensor]:
    """Cosine and sine `[h*w, 1, d/2]` of every patch, fp32, d the head size.

    The first half of the angles turns with the row, the second with the column, at the frequencies
    theta^(-2i / (d/2)). Patches are listed block by block, row by row inside a block.
    """
    half = config.hidden_size // config.num_heads // 2
    frequencies = config.rope_theta ** -(torch.arange(0, half, 2, dtype=torch.float32) / half)
    merge = config.spatial_merge_size
    axes = (torch.arange(n, dtype=torch.float32) for n in (height, width))
    positions = torch.stack(torch.meshgrid(*axes, indexing="ij"))
    blocks = positions.view(2, height // merge, merge, width // merge, merge).transpose(2, 3)
    rows, columns = blocks.reshape(2, -1, 1) * frequencies
    angles = torch.cat([rows, columns], dim=-1).unsqueeze(1)
    return angles.cos(), angles.sin()


def rotate(z: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs (z_i, z_{i+d/2}) of `[frames, patches, heads, d]` by their angles, in fp32."""
    first, second = z.float().chunk(2, dim=-1)
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return turned.to(z.dtype)


def in_pieces(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """`function` of rows `[..., D]`, a few thousand rows at a time."""
    pieces = [function(rows) for rows in torch.split(x.flatten(0, -2), MLP_ROWS)]
    return torch.cat(pieces).view(*x.shape[:-1], -1)
