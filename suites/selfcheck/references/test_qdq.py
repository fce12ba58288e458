"""QDQ of the two sites: scale, code, value and gradient of the contract."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from references.formats import GRIDS, all_codes, grid_named
from references.qdq import SMALLEST_NORMAL, qdq_state, qdq_w, quantize, state_codes, tip, w_codes

Tensor = torch.Tensor
FORMATS = pytest.mark.parametrize("fmt", ["e4m3", "int8"])
CARRIERS = pytest.mark.parametrize(
    "carrier",
    [torch.float64, torch.float32, torch.bfloat16, torch.float16],
    ids=["fp64", "fp32", "bf16", "fp16"],
)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def row_by_hand(row: list[float], fmt: str) -> list[float]:
    """QDQ of one group of fp32 numbers, code by code, in rational arithmetic rounded as numpy's fp32 does."""
    grid = grid_named(fmt)
    codes = [Fraction(code) for code in all_codes(grid).tolist()]
    values = np.array(row, dtype=np.float32)
    scale = np.float32(np.max(np.abs(values))) / np.float32(grid.largest)
    scale = np.float32(1.0) if scale < np.float32(SMALLEST_NORMAL) else scale
    out = []
    for value in values:
        ratio = Fraction(float(value / scale))
        nearest = min(abs(code - ratio) for code in codes)
        tied = [index for index, code in enumerate(codes) if abs(code - ratio) == nearest]
        middle = len(codes) // 2
        index = next(i for i in tied if len(tied) == 1 or (i - middle) % 2 == 0)
        out.append(float(np.float32(float(codes[index])) * scale))
    return out


@FORMATS
def test_w_rows_equal_a_code_by_code_computation(fmt: str) -> None:
    rows = randn(24, 40) * torch.logspace(-30, 30, 24, base=2.0)[:, None]
    expected = torch.tensor([row_by_hand(row, fmt) for row in rows.tolist()])
    assert torch.equal(qdq_w(rows, fmt=fmt), expected)


@FORMATS
@pytest.mark.parametrize("block_v", [16, 32, 64, 128])
@pytest.mark.parametrize("width", [1, 16, 48, 100, 128])
def test_state_tiles_are_rows_of_their_own(width: int, block_v: int, fmt: str) -> None:
    state = randn(2, 3, 24, width)
    rounded = qdq_state(state, block_v=block_v, fmt=fmt)
    for start in range(0, width, block_v):
        tile = state[..., start : start + block_v]
        expected = qdq_w(tile.flatten(-2), fmt=fmt).view(tile.shape)
        assert torch.equal(rounded[..., start : start + block_v], expected)


@CARRIERS
@FORMATS
def test_value_is_code_times_scale_in_fp32_then_the_carrier(fmt: str, carrier: torch.dtype) -> None:
    w = randn(9, 64).to(carrier)
    quantized = w_codes(w, fmt=fmt)
    assert {x.dtype for x in quantized} == {torch.float32}
    assert torch.equal(qdq_w(w, fmt=fmt), (quantized.codes * quantized.scales).to(carrier))
    assert set(quantized.codes.flatten().tolist()) <= set(all_codes(grid_named(fmt)).tolist())
    state = randn(2, 16, 40).to(carrier)
    tiles = state_codes(state, block_v=32, fmt=fmt)
    assert tiles.codes.shape == (2, 16, 2, 32)
    assert tiles.scales.shape == (2, 1, 2, 1)


def test_fp64_data_goes_through_fp32_first() -> None:
    w = randn(4, 32).to(torch.float64) * (1.0 + 2.0**-40)
    assert torch.equal(qdq_w(w), qdq_w(w.to(torch.float32)).to(torch.float64))


@FORMATS
def test_scales_divide_as_ieee_does(fmt: str) -> None:
    amax = randn(5000, 1).abs()
    scales = w_codes(amax, fmt=fmt).scales
    expected = amax.numpy() / np.float32(grid_named(fmt).largest)
    assert np.array_equal(scales.numpy(), expected)
    reciprocal = amax.numpy() * (np.float32(1.0) / np.float32(grid_named(fmt).largest))
    assert not np.array_equal(scales.numpy(), reciprocal)


@FORMATS
def test_scale_is_one_below_the_smallest_normal_quotient(fmt: str) -> None:
    largest = grid_named(fmt).largest
    edge = largest * SMALLEST_NORMAL
    groups = torch.tensor([[0.0], [edge], [np.nextafter(np.float32(edge), np.float32(0.0))], [1e-45]])
    assert w_codes(groups, fmt=fmt).scales.flatten().tolist() == [1.0, SMALLEST_NORMAL, 1.0, 1.0]
    assert qdq_w(groups, fmt=fmt).flatten().tolist() == [0.0, np.float32(edge), 0.0, 0.0]


@FORMATS
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_a_group_with_a_poisoned_value_becomes_nan_throughout(poison: float, fmt: str) -> None:
    w = randn(3, 32)
    w[1, 7] = poison
    assert qdq_w(w, fmt=fmt).isnan().all(-1).tolist() == [False, True, False]
    state = randn(2, 16, 64)
    state[0, 3, 40] = poison
    poisoned = qdq_state(state, block_v=32, fmt=fmt).isnan()
    assert bool(poisoned[0, :, 32:].all())
    assert int(poisoned.sum()) == 16 * 32


@FORMATS
@CARRIERS
def test_gradient_is_the_incoming_one_at_every_element(carrier: torch.dtype, fmt: str) -> None:
    for function, shape in ((qdq_w, (5, 32)), (qdq_state, (3, 16, 80))):
        x = randn(*shape).to(carrier).requires_grad_()
        incoming = (randn(*shape, seed=1) * torch.tensor([1.1, 3e-4, 1000.0, 1e-8])[0]).to(carrier)
        (gradient,) = torch.autograd.grad(function(x, fmt=fmt), x, incoming)
        assert torch.equal(gradient, incoming)


@FORMATS
@pytest.mark.parametrize("power", [-20, -1, 3, 17])
def test_powers_of_two_pass_through(power: int, fmt: str) -> None:
    state = randn(2, 24, 40)
    assert torch.equal(qdq_state(state * 2.0**power, fmt=fmt), qdq_state(state, fmt=fmt) * 2.0**power)


@FORMATS
def test_rounding_twice_is_rounding_once(fmt: str) -> None:
    # 8a - 7n is at most 3 when n = round(8a / 7), so the product 7n rounds back to 8a; likewise 128a - 127n.
    w = randn(20_000, 8)
    once = qdq_w(w, fmt=fmt)
    assert torch.equal(qdq_w(once, fmt=fmt), once)


def test_views_and_empty_tensors_are_rounded_as_copies_are() -> None:
    state = randn(40, 24, 2).mT
    assert torch.equal(qdq_state(state, block_v=16), qdq_state(state.contiguous(), block_v=16))
    assert qdq_state(torch.zeros(0, 4, 16)).shape == (0, 4, 16)
    assert qdq_w(torch.zeros(3, 0, 8)).shape == (3, 0, 8)


def test_bad_options_are_refused_with_rule_value_and_remedy() -> None:
    with pytest.raises(ValueError, match="block_v must be one of 16, 32, 64, 128, got 48; choose"):
        qdq_state(torch.zeros(2, 2), block_v=48)
    with pytest.raises(ValueError, match="got 'fp8'"):
        qdq_w(torch.zeros(2, 2), fmt="fp8")
    assert set(GRIDS) == {"e4m3", "e5m2", "int8"}


def test_tipping_changes_the_side_of_what_is_within_reach_of_a_boundary_and_of_nothing_else() -> None:
    inside = [448.0, 1.0, -1.12, 240.0, 0.0, 1.05, 1.075]
    near = [1.06, -1.06, 1.065, 17.01, 16.99]  # boundaries at 1.0625 and 17
    beyond = [1.125, -1.125, 1.0, 16.0, 18.0]
    row = torch.tensor([inside + near])
    grid = grid_named("e4m3")
    exact = quantize(row, grid)
    reach = 0.004 * row.abs()
    assert torch.equal(tip(row, torch.zeros_like(row), grid), exact.values)
    tipped = tip(row, reach, grid)
    assert tipped[0].tolist() == exact.values[0, : len(inside)].tolist() + beyond
    scaled = tip(row * 0.37, 0.37 * reach, grid)
    assert bool((((scaled - qdq_w(row * 0.37)) != 0) == ((tipped - exact.values) != 0)).all())


def test_tipping_goes_no_further_than_to_the_code_beyond_the_boundary() -> None:
    row = torch.tensor([[448.0, 1.05, 33.0, -33.0, 0.0]])
    tipped = tip(row, torch.full_like(row, 100.0), grid_named("e4m3"))
    assert tipped[0].tolist() == [416.0, 1.125, 36.0, -28.0, 2.0**-9]
