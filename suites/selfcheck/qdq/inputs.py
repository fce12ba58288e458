"""Inputs on which a QDQ kernel and its reference could part: `[groups, size]`, each row one group."""

from __future__ import annotations

from collections.abc import Callable

import torch

from references.formats import Grid, all_codes

Tensor = torch.Tensor


def neighbours(x: Tensor) -> Tensor:
    """x and the values of its dtype next to it on both sides, side by side; x positive."""
    bits = x.view({2: torch.int16, 4: torch.int32}[x.element_size()])
    return torch.cat([(bits + step).view(x.dtype) for step in (-1, 0, 1)], dim=-1)


def with_amax(values: Tensor, amax: float) -> Tensor:
    """Rows of values with one element put in front that is their largest magnitude."""
    first = torch.full((*values.shape[:-1], 1), amax, dtype=values.dtype)
    return torch.cat([first, values], dim=-1)


def midpoints(grid: Grid) -> Tensor:
    """Every tie between neighbouring positive codes, fp32."""
    codes = all_codes(grid)
    codes = codes[codes >= 0]
    return ((codes[1:] + codes[:-1]) / 2).float()


def random_rows(dtype: torch.dtype, grid: Grid, seed: torch.Generator) -> Tensor:
    """Normal values, rows of very different size."""
    return (torch.randn(40, 96, generator=seed) * torch.logspace(-3, 3, 40)[:, None]).to(dtype)


def ties(dtype: torch.dtype, grid: Grid, seed: torch.Generator) -> Tensor:
    """Every tie and its neighbours, of both signs, at scales 1, 2 and 1/4."""
    positive = neighbours(midpoints(grid).to(dtype))
    both = torch.cat([positive, -positive])
    return torch.stack([with_amax(both, grid.largest) * scale for scale in (1.0, 2.0, 0.25)])


def near_ties(dtype: torch.dtype, grid: Grid, seed: torch.Generator) -> Tensor:
    """Ties times a scale that is no power of two, and their neighbours: the division decides."""
    amax = grid.largest * (1 + torch.rand(64, 1, generator=seed)).to(dtype).float()
    values = midpoints(grid) * (amax / torch.tensor(grid.largest))
    return torch.cat([amax.to(dtype), neighbours(values.to(dtype))], dim=-1)


def subnormal(dtype: torch.dtype, grid: Grid, seed: torch.Generator) -> Tensor:
    """Groups that are subnormal in the carrier, or whose scale would be subnormal in fp32."""
    tiny = torch.finfo(dtype).smallest_normal
    rows = torch.randn(16, 32, generator=seed).double() * tiny * torch.logspace(-6, 3, 16).double()[:, None]
    edge = torch.full((3, 32), grid.largest * 2.0**-126, dtype=torch.float64)
    return torch.cat([rows, edge * torch.tensor([1 - 2**-7, 1.0, 1 + 2**-7])[:, None]]).to(dtype)


def zeros(dtype: torch.dtype, grid: Grid, seed: torch.Generator) -> Tensor:
    """A group of zeros, one of negative zeros, and negative zeros beside a one."""
    rows = torch.zeros(3, 32)
    rows[1:] *= -1.0
    rows[2, 5] = 1.0
    return rows.to(dtype)


def one_huge(dtype: torch.dtype, grid: Grid, seed: torch.Generator) -> Tensor:
    """One element far above the others, at the edge of the contract where the carrier reaches it."""
    rows = torch.randn(4, 32, generator=seed)
    rows[:, 7] = torch.tensor([1e4, -6e4, 2.0**127, -(2.0**127)])
    return rows.clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max).to(dtype)


def nonfinite(dtype: torch.dtype, grid: Grid, seed: torch.Generator) -> Tensor:
    """NaN of both signs and infinities, each in a group of its own, and one clean group."""
    rows = torch.randn(6, 32, generator=seed).to(dtype)
    poison = [float("nan"), -float("nan"), float("inf"), -float("inf")]
    rows[torch.arange(4), torch.tensor([0, 31, 5, 9])] = torch.tensor(poison, dtype=dtype)
    rows[4, 1:3] = torch.tensor([float("inf"), float("nan")], dtype=dtype)
    return rows


KINDS: dict[str, Callable[[torch.dtype, Grid, torch.Generator], Tensor]] = {
    f.__name__: f for f in (random_rows, ties, near_ties, subnormal, zeros, one_huge, nonfinite)
}


def every_code(dtype: torch.dtype, largest: float) -> Tensor:
    """Every finite 16-bit value up to `largest`, in rows of 2048 that hold `largest` and so have scale 1."""
    values = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    values = values[values.abs() <= largest]
    padding = -len(values) % 2047
    rows = torch.cat([values, torch.zeros(padding, dtype=dtype)]).view(-1, 2047)
    return with_amax(rows, largest)


def assert_same_bits(actual: Tensor, expected: Tensor) -> None:
    """Equal shape, dtype and bits; only the sign of a zero and the payload of a NaN are free."""
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype
    differ = (actual != expected) & ~(actual.isnan() & expected.isnan())
    places = differ.nonzero()[:3].tolist()
    assert not places, [(p, actual[tuple(p)].item(), expected[tuple(p)].item()) for p in places]
