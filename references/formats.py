"""Low-precision grids as data, and rounding onto them in exact arithmetic.

A grid is described by four numbers. The distance between neighbouring codes around `x` is
`max(2^floor(log2 |x|), 2^min_exponent) * 2^-mantissa_bits`; a uniform integer grid is the case in which the
maximum is always the second term. Nothing here depends on a cast of the framework to an 8-bit type.

Source: OCP 8-bit Floating Point Specification (E4M3, E5M2); symmetric INT8 as in the contract.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

Tensor = torch.Tensor

# The exponent field of a floating-point number, read as an integer of the same width.
_EXPONENT_FIELD: Mapping[torch.dtype, tuple[torch.dtype, int]] = {
    torch.float32: (torch.int32, 0x7F80_0000),
    torch.float64: (torch.int64, 0x7FF0_0000_0000_0000),
}


@dataclass(frozen=True)
class Grid:
    """A symmetric set of representable codes around zero.

    Attributes:
        name: how the format is called in options.
        mantissa_bits: explicit mantissa bits.
        min_exponent: below `2^min_exponent` the codes are evenly spaced.
        largest: the largest code; larger magnitudes saturate to it.
    """

    name: str
    mantissa_bits: int
    min_exponent: int
    largest: float

    @property
    def smallest_step(self) -> float:
        """The distance between neighbouring codes near zero."""
        return 2.0 ** (self.min_exponent - self.mantissa_bits)


E4M3 = Grid("e4m3", mantissa_bits=3, min_exponent=-6, largest=448.0)
E5M2 = Grid("e5m2", mantissa_bits=2, min_exponent=-14, largest=57344.0)
INT8 = Grid("int8", mantissa_bits=7, min_exponent=7, largest=127.0)

GRIDS: Mapping[str, Grid] = MappingProxyType({grid.name: grid for grid in (E4M3, E5M2, INT8)})


def grid_named(name: str) -> Grid:
    """The grid of a format name.

    Raises:
        ValueError: for a name that is not in `GRIDS`.
    """
    if name not in GRIDS:
        raise ValueError(f"format must be one of {', '.join(GRIDS)}, got {name!r}; choose a listed format")
    return GRIDS[name]


def steps_at(x: Tensor, grid: Grid) -> Tensor:
    """The distance between neighbouring codes at each element of `x` (fp32 or fp64, same shape)."""
    integer, field = _field_of(x)
    power = (x.view(integer) & field).view(x.dtype)
    return power.clamp_min(2.0**grid.min_exponent) * 2.0**-grid.mantissa_bits


@torch.no_grad()
def round_to_grid(x: Tensor, grid: Grid) -> Tensor:
    """Rounds to the nearest code, ties to the even one, exactly.

    Magnitudes beyond the largest code saturate to it, infinities included; NaN stays NaN. Every operation is
    exact: steps are powers of two, so division and product only move the exponent, and rounding to an
    integer is to nearest even.

    Args:
        x: any shape, fp32 or fp64.
        grid: the grid.

    Returns:
        Codes, in the shape and dtype of `x`, without gradient.
    """
    x = x.detach().contiguous()
    x = x.clamp(-grid.largest, grid.largest)
    step = steps_at(x, grid)
    return torch.round(x / step).mul_(step)


def all_codes(grid: Grid) -> Tensor:
    """Every code of a grid, once, ascending, fp64. Zero appears once, unsigned."""
    positive = [0.0]
    while positive[-1] < grid.largest:
        last = torch.tensor(positive[-1], dtype=torch.float64)
        positive.append(positive[-1] + float(steps_at(last, grid)))
    return torch.tensor([-code for code in positive[:0:-1]] + positive, dtype=torch.float64)


def _field_of(x: Tensor) -> tuple[torch.dtype, int]:
    if x.dtype not in _EXPONENT_FIELD:
        raise TypeError(f"rounding onto a grid takes float32 or float64, got {x.dtype}; convert first")
    return _EXPONENT_FIELD[x.dtype]
