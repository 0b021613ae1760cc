"""The linear kernels against fp64 arithmetic, and against themselves: bitwise row invariance."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from glmflash import kernels
from glmflash.kernels.linear import Weight, linear, reference

NATIVE = [name for name in kernels.available() if name != kernels.REFERENCE]
KINDS = ["fp8", "bf16", "fp32"]
TYPES = [torch.bfloat16, torch.float32]
ROWS = [1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 13, 16, 24, 25, 37, 70]


@pytest.fixture(params=NATIVE)
def kernel_set(request: pytest.FixtureRequest) -> Iterator[str]:
    yield str(request.param)
    kernels.set_threads(0)


def make(kind: str, n: int, k: int, seed: int = 0) -> reference.Stored:
    g = torch.Generator().manual_seed(seed)
    if kind != "fp8":
        weight = torch.randn(n, k, generator=g) * k**-0.5
        return weight.to(torch.bfloat16 if kind == "bf16" else torch.float32), None
    codes = torch.randint(0, 256, (n, k), generator=g, dtype=torch.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0x38  # NaN is no weight; subnormals and zeros are in there
    scale = torch.rand(-(-n // 128), -(-k // 128), generator=g) * k**-0.5 / 100
    return codes.view(torch.float8_e4m3fn), scale


def e4m3(codes: Tensor) -> Tensor:
    """fp64 values of FP8 codes, by the definition of the format."""
    c = codes.to(torch.int64)
    exponent, mantissa = (c >> 3) & 15, (c & 7).double()
    normal = (1 + mantissa / 8) * torch.pow(2.0, (exponent - 7).double())
    size = torch.where(exponent == 0, mantissa * 2.0**-9, normal)
    return torch.where(c >= 128, -size, size)


def exact(weight: Tensor, scale: Tensor | None) -> Tensor:
    if scale is None:
        return weight.double()
    n, k = weight.shape
    blocks = torch.arange(n).div(128, rounding_mode="floor"), torch.arange(k).div(128).long()
    return e4m3(weight.view(torch.uint8)) * scale.double()[blocks[0]][:, blocks[1]]


def assert_close(y: Tensor, x: Tensor, weight: Tensor, relative: float = 1e-5) -> None:
    """Within `relative` of fp64 (of the sum of magnitudes: cancellation is no error), plus one
    rounding if y is bf16."""
    want = x.double() @ weight.T
    bound = relative * (x.double().abs() @ weight.abs().T) + 1e-37
    if y.dtype == torch.bfloat16:
        bound = bound + want.abs() * 2.0**-8
    assert bool(((y.double() - want).abs() <= bound).all())


@pytest.mark.parametrize("x_type", TYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_equals_fp64(kernel_set: str, kind: str, x_type: torch.dtype) -> None:
    for n, k in [(1, 1), (33, 5), (96, 384), (97, 130), (130, 257), (256, 640)]:
        weight, scale = make(kind, n, k)
        x = torch.randn(70, k).to(x_type)
        prepared = Weight.of((weight, scale), kernel_set=kernel_set)
        for y_type in TYPES:
            assert_close(linear(x, prepared, dtype=y_type), x, exact(weight, scale))


@pytest.mark.parametrize("x_type", TYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_depends_on_nothing_but_itself(
    kernel_set: str, kind: str, x_type: torch.dtype
) -> None:
    for n, k in [(97, 130), (160, 1100)]:
        stored = make(kind, n, k)
        x = torch.randn(70, k).to(x_type)
        kernels.set_threads(1)
        rows = Weight.of(stored, kernel_set=kernel_set)
        alone = torch.cat([linear(row, rows) for row in x.split(1)])
        for packed in (False, True):
            prepared = Weight.of(stored, packed=packed, kernel_set=kernel_set)
            for threads in (1, 2):
                kernels.set_threads(threads)
                for m in ROWS:
                    assert torch.equal(linear(x[:m], prepared), alone[:m])
                    assert torch.equal(linear(x[70 - m :], prepared), alone[70 - m :])


def test_more_rows_than_one_pass(kernel_set: str) -> None:
    stored = make("fp8", 64, 128)
    x = torch.randn(1100, 128).bfloat16()
    prepared = Weight.of(stored, kernel_set=kernel_set)
    pieces = [linear(part, prepared) for part in x.split(100)]
    assert torch.equal(linear(x, prepared), torch.cat(pieces))


@given(data=st.data())
@settings(max_examples=40, deadline=None)
@pytest.mark.parametrize("name", NATIVE)
def test_any_shape(name: str, data: st.DataObject) -> None:
    n, k = data.draw(st.integers(1, 300)), data.draw(st.integers(1, 400))
    m, kind = data.draw(st.integers(1, 30)), data.draw(st.sampled_from(KINDS))
    stored = make(kind, n, k, seed=n * 1000 + k)
    x = torch.randn(m, k).bfloat16()
    y = linear(x, Weight.of(stored, kernel_set=name), dtype=torch.float32)
    assert_close(y, x, exact(*stored))
    packed = Weight.of(stored, packed=True, kernel_set=name)
    assert torch.equal(y, linear(x, packed, dtype=torch.float32))


@pytest.mark.parametrize("packed", [False, True])
def test_every_fp8_code_is_exact(kernel_set: str, packed: bool) -> None:
    codes = torch.arange(256, dtype=torch.uint8).repeat(2)[:384].view(3, 128)
    codes[(codes & 0x7F) == 0x7F] = 0
    weight, scale = codes.view(torch.float8_e4m3fn), torch.ones(1, 1)
    prepared = Weight.of((weight, scale), packed=packed, kernel_set=kernel_set)
    for x_type in TYPES:
        y = linear(torch.eye(128).to(x_type), prepared, dtype=torch.float32)
        assert torch.equal(y.double(), e4m3(codes).T)


@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e30, 2.0**110])
def test_extreme_scales(kernel_set: str, scale: float) -> None:
    weight, scales = make("fp8", 150, 300)
    assert scales is not None
    scales[0, 1] = scale
    x = torch.randn(3, 300).bfloat16()
    y = linear(x, Weight.of((weight, scales), kernel_set=kernel_set), dtype=torch.float32)
    assert_close(y, x, exact(weight, scales))


def test_tiny_activations(kernel_set: str) -> None:
    """Subnormal fp32 results keep an absolute error below the smallest normal number."""
    weight, _ = make("bf16", 40, 128)
    x = (torch.randn(5, 128) * 1e-37).bfloat16()
    y = linear(x, Weight.of((weight, None), kernel_set=kernel_set), dtype=torch.float32)
    assert bool((y.double() - x.double() @ weight.double().T).abs().max() < 128 * 2.0**-126)


@pytest.mark.parametrize("kind", KINDS)
def test_unaligned_rows_of_a_mapped_file(kernel_set: str, kind: str) -> None:
    weight, scale = make(kind, 70, 300)
    data = bytearray(3 + weight.nbytes + 7)
    view = torch.frombuffer(data, dtype=torch.uint8)[3 : 3 + weight.nbytes]
    view.copy_(weight.view(torch.uint8).flatten())
    shifted = torch.frombuffer(data, dtype=weight.dtype, count=weight.numel(), offset=3)
    shifted = shifted.view(70, 300)
    x = torch.randn(9, 300).bfloat16()
    want = linear(x, Weight.of((weight, scale), kernel_set=kernel_set))
    assert shifted.data_ptr() % 2
    assert torch.equal(want, linear(x, Weight.of((shifted, scale), kernel_set=kernel_set)))


def test_strides_and_out(kernel_set: str) -> None:
    weight, scale = make("fp8", 100, 256)
    wide = torch.randn(6, 700).bfloat16()
    x = wide[:, 101 : 101 + 256]
    prepared = Weight.of((weight[:, :], scale), kernel_set=kernel_set)
    want = linear(x.contiguous(), prepared)
    y = torch.full((6, 150), 7.0, dtype=torch.bfloat16)
    assert torch.equal(linear(x, prepared, out=y[:, 20:120]), want)
    assert bool((y[:, :20] == 7).all())
    assert bool((y[:, 120:] == 7).all())
    assert torch.equal(linear(x.view(2, 3, 256), prepared), want.view(2, 3, 100))


def test_several_matrices_side_by_side(kernel_set: str) -> None:
    parts = [make("fp8", 130, 256, 1), make("bf16", 7, 256, 2), make("fp8", 64, 256, 3)]
    for m in (1, 40):
        x = torch.randn(m, 256).bfloat16()
        y = linear(x, Weight.of(*parts, kernel_set=kernel_set))
        each = [linear(x, Weight.of(part, kernel_set=kernel_set)) for part in parts]
        assert torch.equal(y, torch.cat(each, -1))


def test_empty_batch(kernel_set: str) -> None:
    prepared = Weight.of(make("bf16", 8, 16), kernel_set=kernel_set)
    assert linear(torch.zeros(0, 16), prepared).shape == (0, 8)


def test_reference() -> None:
    weight, scale = make("fp8", 140, 200)
    x = torch.randn(4, 200)
    y = linear(x, Weight.of((weight, scale), kernel_set=kernels.REFERENCE))
    assert_close(y, x, exact(weight, scale))
    rounded = reference.dense(weight, scale, "bf16").double()
    assert torch.equal(rounded, exact(weight, scale).float().bfloat16().double())


@pytest.mark.parametrize(
    ("weight", "scale", "message"),
    [
        (torch.zeros(4, 4, dtype=torch.float16), None, "FP8 .e4m3., BF16 or FP32"),
        (torch.zeros(4, 4).T[::1, ::2], None, "dense rows"),
        (torch.zeros(4, 4), torch.ones(1, 1), "belong to FP8"),
        (torch.zeros(4, 4).to(torch.float8_e4m3fn), None, "needs fp32 scales of shape"),
        (torch.zeros(4, 4).to(torch.float8_e4m3fn), torch.ones(2, 1), "needs fp32 scales"),
    ],
)
def test_weights_that_do_not_fit(weight: Tensor, scale: Tensor | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Weight.of((weight, scale))


def test_calls_that_do_not_fit() -> None:
    prepared = Weight.of(make("bf16", 8, 16))
    with pytest.raises(ValueError, match="x must be"):
        linear(torch.zeros(2, 15), prepared)
    with pytest.raises(ValueError, match="out must be"):
        linear(torch.zeros(2, 16), prepared, out=torch.zeros(2, 9))
    with pytest.raises(ValueError, match="bf16 or fp32"):
        linear(torch.zeros(2, 16), prepared, dtype=torch.float16)
    with pytest.raises(ValueError, match="of the same k"):
        Weight.of(make("bf16", 8, 16), make("bf16", 8, 17))
    with pytest.raises(ValueError, match="cannot share"):
        Weight.of(make("bf16", 8, 16), make("fp32", 8, 16))
