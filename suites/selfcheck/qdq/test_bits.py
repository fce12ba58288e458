"""The QDQ kernels equal the reference in every bit."""

# mypy: disable-error-code="untyped-decorator, no-untyped-call"

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from kernels.qdq import qdq_state, qdq_w
from kernels.qdq.device import narrow, round_code, widen
from references import qdq as reference
from references.formats import GRIDS, round_to_grid
from suites.selfcheck.qdq.inputs import KINDS, assert_same_bits, every_code

Tensor = torch.Tensor

CARRIERS = [torch.float32, torch.bfloat16, torch.float16]
SIXTEEN_BIT = [torch.bfloat16, torch.float16]


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("dtype", CARRIERS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_w_rows_equal_the_reference(kind: str, dtype: torch.dtype) -> None:
    w = KINDS[kind](dtype, GRIDS["e4m3"], generator())
    w = w.flatten(0, -2)
    assert_same_bits(qdq_w(w), reference.qdq_w(w))


@pytest.mark.parametrize("dtype", CARRIERS, ids=str)
@pytest.mark.parametrize("fmt", ["e4m3", "int8"])
@pytest.mark.parametrize("kind", KINDS)
def test_state_tiles_equal_the_reference(kind: str, fmt: str, dtype: torch.dtype) -> None:
    groups = KINDS[kind](dtype, GRIDS[fmt], generator()).flatten(0, -2)[:8]
    state = torch.nn.functional.pad(groups, (0, -groups.shape[-1] % 16)).view(len(groups), 16, -1)
    assert_same_bits(qdq_state(state, block_v=128, fmt=fmt), reference.qdq_state(state, block_v=128, fmt=fmt))


@pytest.mark.parametrize("dtype", SIXTEEN_BIT, ids=str)
def test_every_16_bit_value_at_scale_one(dtype: torch.dtype) -> None:
    w = every_code(dtype, 448.0)
    expected = round_to_grid(w.float(), GRIDS["e4m3"]).to(dtype)
    assert_same_bits(qdq_w(w), expected)
    state = every_code(dtype, 127.0)[:, :, None]
    assert_same_bits(
        qdq_state(state, block_v=16, fmt="int8"), round_to_grid(state.float(), GRIDS["int8"]).to(dtype)
    )


@triton.jit
def round_kernel(X, Y, N: tl.constexpr, FMT: tl.constexpr):  # type: ignore[no-untyped-def]
    places = tl.arange(0, N)
    y = round_code(widen(tl.load(X + places)), FMT, "portable")
    tl.store(Y + places, narrow(y, Y.dtype.element_ty))


@pytest.mark.parametrize("dtype", SIXTEEN_BIT, ids=str)
@pytest.mark.parametrize("fmt", ["e4m3", "int8"])
def test_device_rounding_saturates_and_rounds_every_16_bit_value(fmt: str, dtype: torch.dtype) -> None:
    x = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    x = torch.where(x.isnan(), torch.zeros_like(x), x)  # the code of a NaN is not specified
    actual = torch.empty(x.shape)
    round_kernel[(1,)](x, actual, N=x.numel(), FMT=fmt)
    assert_same_bits(actual, round_to_grid(x.float(), GRIDS[fmt]))


@triton.jit
def copy_kernel(X, Y, N: tl.constexpr):  # type: ignore[no-untyped-def]
    places = tl.arange(0, N)
    tl.store(Y + places, narrow(widen(tl.load(X + places)), Y.dtype.element_ty))


@pytest.mark.parametrize("dtype", SIXTEEN_BIT, ids=str)
def test_widening_keeps_every_16_bit_value(dtype: torch.dtype) -> None:
    x = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    actual = torch.empty(x.shape)
    copy_kernel[(1,)](x, actual, N=x.numel())
    assert_same_bits(actual, x.float())


@pytest.mark.parametrize("dtype", SIXTEEN_BIT, ids=str)
def test_narrowing_rounds_to_nearest_even(dtype: torch.dtype) -> None:
    high = torch.arange(2**16, dtype=torch.int64) << 16
    low = torch.tensor([0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0x1000, 0x3000, 0xFFFF])
    x = (high[:, None] + low).flatten().to(torch.int32).view(torch.float32)
    actual = torch.empty(x.shape, dtype=dtype)
    copy_kernel[(1,)](x, actual, N=x.numel())
    assert_same_bits(actual, x.to(dtype))


@pytest.mark.parametrize("start", [1, 65, 129, 193])
def test_w_of_every_head_size_up_to_256(start: int) -> None:
    for K in range(start, start + 64):
        w = torch.randn(3, K, generator=generator(K))
        assert_same_bits(qdq_w(w), reference.qdq_w(w))


@pytest.mark.parametrize("K", [1, 2, 3, 15, 17, 48, 100, 128, 255, 256])
@pytest.mark.parametrize(("V", "block_v"), [(1, 16), (15, 16), (33, 32), (70, 64), (130, 128), (64, 64)])
def test_states_of_any_size_have_partial_tiles(K: int, V: int, block_v: int) -> None:
    state = torch.randn(K, V, generator=generator(K)).to(torch.bfloat16)
    assert_same_bits(qdq_state(state, block_v=block_v), reference.qdq_state(state, block_v=block_v))


def strided_views() -> dict[str, Tensor]:
    base = torch.randn(3, 4, 5, 6, 8, generator=generator())
    return {
        "transposed": base.mT,
        "heads before tokens": base.permute(0, 2, 1, 3, 4),
        "every other": base[:, ::2, 1:, :, ::2],
        "expanded": base[:, :1, :, :, :].expand(3, 7, 5, 6, 8),
        "reversed order": base.permute(4, 3, 2, 1, 0),
        "unmergeable": torch.randn(4, 4, 4, 4, 4, 4, generator=generator())[:3, :3, :3, :3, :3, :3],
        "unmergeable by far": torch.randn(3, 3, 3, 3, 3, 3, generator=generator())[:2, :2, :2, :2, :2, :2],
        "one dimension": base.flatten()[::3],
    }


@pytest.mark.parametrize("view", strided_views())
def test_views_of_any_strides(view: str) -> None:
    x = strided_views()[view]
    assert_same_bits(qdq_w(x), reference.qdq_w(x))
    if x.ndim > 1:
        few = x.flatten(0, -5)[:2] if x.ndim > 5 else x[:2]
        assert_same_bits(qdq_state(few, block_v=16), reference.qdq_state(few, block_v=16))


def test_offsets_beyond_32_bits() -> None:
    storage = torch.empty(2**31 + 4096, dtype=torch.bfloat16)  # untouched pages cost no memory
    w = storage.as_strided((2, 64), (2**31, 1))
    w.copy_(torch.randn(2, 64, generator=generator()))
    assert_same_bits(qdq_w(w), reference.qdq_w(w))
    column = storage.as_strided((64, 2), (1, 2**31))
    assert_same_bits(qdq_w(column), reference.qdq_w(column))
    state = storage.as_strided((2, 8, 8), (2**31, 8, 1))
    assert_same_bits(qdq_state(state, block_v=16), reference.qdq_state(state, block_v=16))


@pytest.mark.parametrize("shape", [(0,), (0, 16), (3, 0), (2, 0, 16, 8), (2, 3, 0, 8), (2, 3, 16, 0)])
def test_no_elements_give_no_elements(shape: tuple[int, ...]) -> None:
    x = torch.empty(shape, requires_grad=True)
    assert qdq_w(x).shape == shape
    if len(shape) > 1:
        y = qdq_state(x)
        y.sum().backward()
        assert y.shape == shape
        assert x.grad is not None


@pytest.mark.parametrize(("dtype", "bits"), [(torch.bfloat16, 8), (torch.float16, 11)], ids=str)
def test_one_correction_divides_every_pair_of_short_significands(dtype: torch.dtype, bits: int) -> None:
    """What `divide_for_code` does on a GPU, an fma being one rounding of what long double holds."""
    significands = np.arange(1 << (bits - 1), 1 << bits).astype(np.float32)
    scale = np.frexp(significands / np.float32(448.0))[0] * np.float32(2)
    x, divisor = np.meshgrid(significands, scale)
    reciprocal = np.float32(1.0) / divisor
    quotient = x * reciprocal
    remainder = (np.longdouble(x) - np.longdouble(quotient) * divisor).astype(np.float32)
    corrected = (np.longdouble(quotient) + np.longdouble(remainder) * reciprocal).astype(np.float32)
    assert (quotient != x / divisor).mean() > 0.2
    assert (corrected == x / divisor).all()
