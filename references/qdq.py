"""QDQ of the two sites: round to a low-precision grid and back, identity straight-through gradient.

One scale per group: `amax / largest` in fp32 with IEEE division, exactly 1 where that quotient is below the
smallest normal fp32 number. Code: `x / scale` in fp32, saturated, rounded to nearest even. Value:
`code * scale` in fp32, then the carrier dtype. A group that holds a non-finite value becomes NaN throughout.

Divisors are tensors, never Python numbers: dividing a CUDA tensor by a Python number multiplies by its
reciprocal, which is another rounding.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from references.formats import Grid, grid_named, round_to_grid, steps_at
from references.gradients import straight_through

Tensor = torch.Tensor

SMALLEST_NORMAL = 2.0**-126
"""Smallest normal fp32 number; a scale below it is replaced by 1."""

STATE_TILES = (16, 32, 64, 128)
"""The widths that a state tile can have."""


class Quantized(NamedTuple):
    """Codes, scales and values of grouped data: `[..., group]`, `[..., 1]`, `[..., group]`, all fp32."""

    codes: Tensor
    scales: Tensor
    values: Tensor


def scale_of(amax: Tensor, grid: Grid) -> Tensor:
    """The scale of a group from its largest magnitude, both fp32; NaN where `amax` is not finite."""
    quotient = amax / torch.tensor(grid.largest, dtype=torch.float32, device=amax.device)
    scale = torch.where(quotient < SMALLEST_NORMAL, torch.ones_like(quotient), quotient)
    return torch.where(torch.isfinite(amax), scale, torch.full_like(scale, torch.nan))


@torch.no_grad()
def quantize(groups: Tensor, grid: Grid, axes: tuple[int, ...] = (-1,)) -> Quantized:
    """Codes, scales and values of data whose groups lie along `axes`.

    Args:
        groups: any shape and float dtype; converted to fp32 first.
        grid: the grid.
        axes: the axes that share one scale.
    """
    x = groups.detach().to(torch.float32)
    amax = x.abs().amax(axes, keepdim=True) if x.numel() else x.sum(axes, keepdim=True)
    scales = scale_of(amax, grid)
    codes = round_to_grid(x / scales, grid)
    return Quantized(codes, scales, codes * scales)


@torch.no_grad()
def tip(groups: Tensor, reach: Tensor, grid: Grid, axes: tuple[int, ...] = (-1,)) -> Tensor:
    """QDQ in which every element that is near a boundary between two codes takes the one beyond it, and no
    further one.

    Args:
        groups: any shape and float dtype; converted to fp32 first.
        reach: how near, in units of the element; its shape.
        grid: the grid.
        axes: the axes that share one scale.

    Returns:
        The values, fp32, in the shape of `groups`.
    """
    exact = quantize(groups, grid, axes)
    ratio = groups.detach().to(torch.float32) / exact.scales
    near = torch.minimum((reach / exact.scales).to(torch.float32), steps_at(exact.codes, grid))
    above, below = (round_to_grid(ratio + sign * near, grid) for sign in (1.0, -1.0))
    return torch.where(above != exact.codes, above, below) * exact.scales


def state_tiles(state: Tensor, block_v: int) -> Tensor:
    """`[..., K, V]` as `[..., K, tiles, block_v]`, the last tile filled up with zeros."""
    missing = -state.shape[-1] % block_v
    if missing:
        state = torch.nn.functional.pad(state, (0, missing))
    return state.reshape(*state.shape[:-1], state.shape[-1] // block_v, block_v)


def from_tiles(tiles: Tensor, columns: int) -> Tensor:
    """Undoes `state_tiles`: `[..., K, columns]` out of `[..., K, tiles, block_v]`, its padding dropped."""
    return tiles.flatten(-2)[..., :columns]


def state_codes(state: Tensor, *, block_v: int = 64, fmt: str = "e4m3") -> Quantized:
    """Codes `[..., K, tiles, block_v]`, scales `[..., 1, tiles, 1]` and values of a state `[..., K, V]`."""
    _check_block_v(block_v)
    return quantize(state_tiles(state, block_v), grid_named(fmt), (-3, -1))


def w_codes(w: Tensor, *, fmt: str = "e4m3") -> Quantized:
    """Codes `[..., K]`, scales `[..., 1]` and values `[..., K]` of W rows."""
    return quantize(w, grid_named(fmt))


def qdq_state(state: Tensor, *, block_v: int = 64, fmt: str = "e4m3") -> Tensor:
    """Rounds a state tile by tile, one scale per `[K, block_v]` tile; the last tile may be partial.

    Args:
        state: `[..., K, V]`, any float dtype.
        block_v: tile width, one of 16, 32, 64, 128.
        fmt: `e4m3` or `int8` (`e5m2` is known as a grid).

    Returns:
        The rounded state in the shape and dtype of `state`; its gradient is the identity.

    Raises:
        ValueError: for an unknown format or tile width.
    """
    values = from_tiles(state_codes(state, block_v=block_v, fmt=fmt).values, state.shape[-1])
    return straight_through(state, values.to(state.dtype))


def qdq_w(w: Tensor, *, fmt: str = "e4m3") -> Tensor:
    """Rounds W row by row, one scale per token and head over K.

    Args:
        w: `[..., K]`, any float dtype.
        fmt: the format.

    Returns:
        The rounded W in the shape and dtype of `w`; its gradient is the identity.

    Raises:
        ValueError: for an unknown format.
    """
    return straight_through(w, w_codes(w, fmt=fmt).values.to(w.dtype))


def _check_block_v(block_v: int) -> None:
    if block_v not in STATE_TILES:
        allowed = ", ".join(map(str, STATE_TILES))
        raise ValueError(f"block_v must be one of {allowed}, got {block_v}; choose a listed tile width")
