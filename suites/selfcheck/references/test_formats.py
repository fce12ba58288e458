"""Grids and rounding onto them, counted out against two independent implementations."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
import torch

from references.formats import E4M3, E5M2, GRIDS, INT8, Grid, all_codes, grid_named, round_to_grid

TORCH_TYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
NUMPY_TYPES = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}
FLOATS = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
ALL_GRIDS = pytest.mark.parametrize("grid", GRIDS.values(), ids=lambda grid: grid.name)
FLOAT_GRIDS = pytest.mark.parametrize("grid", [E4M3, E5M2], ids=lambda grid: grid.name)


def every_value(carrier: torch.dtype, limit: float) -> torch.Tensor:
    """Every finite bf16 or fp16 value up to a magnitude, as fp32."""
    values = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(carrier).to(torch.float32)
    return values[values.abs() <= limit]


def bits(x: torch.Tensor) -> torch.Tensor:
    """The bit pattern, with one zero."""
    return (x + 0.0).to(torch.float32).view(torch.int32)


@FLOATS
@FLOAT_GRIDS
@pytest.mark.parametrize("carrier", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_every_carrier_value_rounds_as_torch_and_ml_dtypes_do(
    carrier: torch.dtype, grid: Grid, dtype: torch.dtype
) -> None:
    values = every_value(carrier, grid.largest)
    assert len(values) > 30_000
    rounded = round_to_grid(values.to(dtype), grid)
    assert torch.equal(bits(rounded), bits(values.to(TORCH_TYPES[grid.name]).to(torch.float32)))
    by_numpy = values.numpy().astype(NUMPY_TYPES[grid.name]).astype(np.float32)
    assert torch.equal(bits(rounded), bits(torch.from_numpy(by_numpy)))


@FLOAT_GRIDS
def test_all_codes_are_those_of_the_8_bit_types(grid: Grid) -> None:
    codes = np.arange(256, dtype=np.uint8).view(NUMPY_TYPES[grid.name]).astype(np.float64)
    expected = sorted({float(code) + 0.0 for code in codes if math.isfinite(code)})
    assert all_codes(grid).tolist() == expected


def test_int8_codes_are_symmetric_integers() -> None:
    assert all_codes(INT8).tolist() == [float(code) for code in range(-127, 128)]


@FLOATS
@ALL_GRIDS
def test_codes_stay_and_ties_go_to_the_even_code(grid: Grid, dtype: torch.dtype) -> None:
    codes = all_codes(grid).to(dtype)
    assert torch.equal(round_to_grid(codes, grid), codes)
    ties = (codes[1:] + codes[:-1]) / 2  # exact: one bit more than the codes
    below, above = round_to_grid(ties, grid) == codes[:-1], round_to_grid(ties, grid) == codes[1:]
    assert bool((below | above).all())
    # Counted from zero, codes alternate between even and odd mantissas.
    index_from_zero = (torch.arange(len(codes)) - len(codes) // 2).abs()
    assert torch.equal(below, index_from_zero[:-1] % 2 == 0)


@FLOATS
@ALL_GRIDS
def test_the_neighbours_of_a_tie_go_to_the_nearer_code(grid: Grid, dtype: torch.dtype) -> None:
    codes = all_codes(grid).to(dtype)
    ties = (codes[1:] + codes[:-1]) / 2
    down, up = (torch.nextafter(ties, torch.full_like(ties, end)) for end in (-math.inf, math.inf))
    assert torch.equal(round_to_grid(down, grid), codes[:-1])
    assert torch.equal(round_to_grid(up, grid), codes[1:])


@FLOATS
def test_magnitudes_beyond_the_largest_code_saturate(dtype: torch.dtype) -> None:
    beyond = torch.tensor([449.0, 464.0, 465.0, 480.0, 1e6, math.inf], dtype=dtype)
    assert round_to_grid(beyond, E4M3).tolist() == [448.0] * 6
    assert round_to_grid(-beyond, E4M3).tolist() == [-448.0] * 6
    assert (
        round_to_grid(torch.tensor([127.4, 127.5, 128.0, math.inf], dtype=dtype), INT8).tolist()
        == [127.0] * 4
    )


@FLOATS
@ALL_GRIDS
def test_nan_stays_nan(grid: Grid, dtype: torch.dtype) -> None:
    assert bool(round_to_grid(torch.tensor([math.nan, -math.nan], dtype=dtype), grid).isnan().all())


@FLOAT_GRIDS
def test_subnormal_codes_are_evenly_spaced(grid: Grid) -> None:
    step = grid.smallest_step
    count = 1 << grid.mantissa_bits
    expected = [step * index for index in range(count + 1)]
    codes = all_codes(grid)
    assert codes[codes >= 0][: count + 1].tolist() == expected
    halves = torch.tensor([step * 0.5, step * 1.5, step * 2.5], dtype=torch.float32)
    assert round_to_grid(halves, grid).tolist() == [0.0, 2 * step, 2 * step]
    assert round_to_grid(torch.tensor([2.0**-126, 2.0**-149]), grid).tolist() == [0.0, 0.0]


def test_rounding_touches_neither_its_input_nor_its_strides() -> None:
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(0)).mT
    before = x.clone()
    rounded = round_to_grid(x, E4M3)
    assert torch.equal(x, before)
    assert torch.equal(rounded, round_to_grid(x.contiguous(), E4M3))


def test_unknown_formats_and_dtypes_are_refused() -> None:
    with pytest.raises(ValueError, match="format must be one of e4m3, e5m2, int8, got 'fp4'"):
        grid_named("fp4")
    with pytest.raises(TypeError, match="float16"):
        round_to_grid(torch.zeros(2, dtype=torch.float16), E4M3)
