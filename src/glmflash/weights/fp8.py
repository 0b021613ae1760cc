"""FP8 weights: e4m3 values with one fp32 scale per block of 128 x 128.

Knows the rule `W[r, c] = float32(W8[r, c]) * S[r // 128, c // 128]`, rounded once to bf16, and its
inverse. Knows nothing of files. The stored scale multiplies, whatever its `_inv` suffix says.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

LARGEST = 448.0  # of e4m3
TINIEST = 1e-12  # keeps the scale of an all-zero block above 0


def dequantize(
    w8: Tensor,
    scale: Tensor,
    block: tuple[int, int] = (128, 128),
    round_to: Literal["bf16", "none"] = "bf16",
) -> Tensor:
    """FP8 `[out, in]` and scales `[ceil(out / 128), ceil(in / 128)]` to bf16, or unrounded fp32.

    Bit for bit the rule above; the last blocks of a row or column may be ragged.
    """
    rows, columns = w8.shape
    out = torch.empty(rows, columns, dtype=torch.bfloat16 if round_to == "bf16" else torch.float32)
    # One row of blocks at a time: its intermediate values stay in the cache of a core.
    for i, begin in enumerate(range(0, rows, block[0])):
        part = slice(begin, begin + block[0])
        values, scales = _decode(w8[part], scale[i])
        out[part] = values.mul_(scales.repeat_interleave(block[1])[:columns])
    return out


def _decode(w8: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """fp32 values and the scales that go with them: 4 times as fast as torch's conversion.

    e4m3 is fp16 with a shorter exponent and mantissa: moved to its place, the same bits mean the
    value / 256, and the scales take the 256. Only the codes of NaN mean something else there.
    """
    codes, larger = w8.view(torch.uint8), scales * 256.0
    holds_nan = codes.numel() > 0 and int(codes.bitwise_and(0x7F).max()) == 0x7F
    if holds_nan or not bool(larger.isfinite().all()):
        return w8.to(torch.float32), scales
    bits = codes.view(torch.int8).to(torch.int16)  # carries the sign into the upper half
    bits.bitwise_left_shift_(7).bitwise_and_(~0x4000)
    return bits.view(torch.float16).to(torch.float32), larger


def quantize(w: Tensor) -> tuple[Tensor, Tensor]:
    """A matrix `[out, in]` to FP8 values and scales, as the release stores them.

    A block's scale is its largest magnitude / 448, so that value becomes the largest of e4m3.
    """
    rows, columns = w.shape
    blocks = -(-columns // 128)
    w8 = torch.empty(rows, columns, dtype=torch.float8_e4m3fn)
    scale = torch.empty(-(-rows // 128), blocks)
    for i, begin in enumerate(range(0, rows, 128)):
        part = w[begin : begin + 128].float()
        padded = torch.nn.functional.pad(part, (0, blocks * 128 - columns))
        largest = padded.view(len(part), blocks, 128).abs().amax(dim=(0, 2))
        scale[i] = largest.clamp_min(TINIEST) / LARGEST
        w8[begin : begin + 128] = part / scale[i].repeat_interleave(128)[:columns]
    return w8, scale
