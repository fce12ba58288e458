"""QDQ with one thing wrong: another group, scale, rounding or gradient than the contract's.

Values keep the contract's order of operations wherever the fault does not touch it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, cast

import torch

from references.formats import Grid, grid_named, round_to_grid, steps_at
from references.qdq import from_tiles, scale_of, state_tiles
from references.semantics import SiteRule

Tensor = torch.Tensor


def faulty_qdq(x: Tensor, rule: SiteRule, fmt: str, block_v: int | None) -> Tensor:
    """QDQ of a state (`block_v` given) or of W rows (None) by a rule that may depart from the contract.

    Args:
        x: `[..., K, V]` or `[..., K]`.
        rule: the rule.
        fmt: the format asked for.
        block_v: tile width asked for.
    """
    grid = grid_named(rule.fmt or fmt)
    grid = replace(grid, largest=rule.largest) if rule.largest else grid
    key_axis = -1 if block_v is None else -2
    groups, axes = x, (_W_AXES if block_v is None else _STATE_AXES)[rule.scope]
    if rule.scope == "half_keys":
        groups = groups.unflatten(key_axis, (2, x.shape[key_axis] // 2))  # type: ignore[no-untyped-call]
    if block_v is not None:
        groups = state_tiles(groups, max(1, int(block_v * rule.tile)))
    axes = tuple(range(groups.ndim)) if axes is None else axes
    y = cast(Tensor, _FaultyQDQ.apply(groups, rule, grid, axes))  # type: ignore[no-untyped-call]
    y = y if block_v is None else from_tiles(y, x.shape[-1])
    y = y.reshape(x.shape)
    if rule.twice:
        return faulty_qdq(y, SiteRule(tile=0.5), fmt, block_v)
    return y


# Which axes share a scale; None means all of them.
_STATE_AXES: Mapping[str, tuple[int, ...] | None] = {
    "group": (-3, -1),
    "head": (-3, -2, -1),
    "tensor": None,
    "row": (-2, -1),
    "half_keys": (-3, -1),
}
_W_AXES: Mapping[str, tuple[int, ...] | None] = {
    "group": (-1,),
    "head": (-2, -1),
    "tensor": None,
    "half_keys": (-1,),
}


def _truncate(x: Tensor, grid: Grid) -> Tensor:
    x = x.clamp(-grid.largest, grid.largest)
    step = steps_at(x, grid)
    return torch.trunc(x / step) * step


def _ties_away(x: Tensor, grid: Grid) -> Tensor:
    x = x.clamp(-grid.largest, grid.largest)
    step = steps_at(x, grid)
    quotient = x / step
    whole = torch.trunc(quotient)
    return (whole + torch.trunc((quotient - whole) * 2.0)) * step


def _through_fp16(x: Tensor, grid: Grid) -> Tensor:
    return round_to_grid(x.to(torch.float16).to(torch.float32), grid)


_ROUNDINGS: Mapping[str, Callable[[Tensor, Grid], Tensor]] = {
    "nearest_even": round_to_grid,
    "truncate": _truncate,
    "ties_away": _ties_away,
    "through_fp16": _through_fp16,
}


class _FaultyQDQ(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rule: SiteRule, grid: Grid, axes: tuple[int, ...]) -> Tensor:
        x32 = x.to(torch.float32)
        amax = x32.abs().amax(axes, keepdim=True)
        used = amax.to(torch.bfloat16).to(torch.float32) if rule.amax == "bf16" else amax
        scale = scale_of(used, grid)
        if rule.scale == "reciprocal":
            one = torch.ones_like(used)
            quotient = used * (one / torch.full_like(used, grid.largest))
            scale = torch.where(quotient < 2.0**-126, one, quotient)
            ratio = x32 * (one / scale)
        else:
            ratio = x32 / scale
        codes = _ROUNDINGS[rule.rounding](ratio, grid)
        ctx.rule, ctx.grid, ctx.axes = rule, grid, axes
        ctx.save_for_backward(x32, amax, scale, ratio, codes)
        return (codes * scale).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _GRADIENTS[ctx.rule.gradient](ctx, grads[0]), None, None, None


def _identity(ctx: Any, dy: Tensor) -> Tensor:
    return dy


def _clamped(ctx: Any, dy: Tensor) -> Tensor:
    _, _, _, ratio, _ = ctx.saved_tensors
    return torch.where(ratio.abs() >= ctx.grid.largest, torch.zeros_like(dy), dy)


def _through_scale(ctx: Any, dy: Tensor) -> Tensor:
    """The derivative of `scale(x) * code(x / scale(x))`, codes straight-through, equal maxima sharing it."""
    x, amax, _, ratio, codes = ctx.saved_tensors
    d_scale = (dy * (codes - ratio)).sum(ctx.axes, keepdim=True)
    is_largest = (x.abs() == amax).to(dy.dtype)
    share = is_largest * torch.sign(x) / is_largest.sum(ctx.axes, keepdim=True)
    return torch.add(dy, d_scale / ctx.grid.largest * share)


def _rounded(ctx: Any, dy: Tensor) -> Tensor:
    """The gradient of `cast(x / scale) * scale` where the cast rounds its gradient to the format as well."""
    _, _, scale, _, _ = ctx.saved_tensors
    return torch.div(round_to_grid((dy * scale).contiguous(), ctx.grid), scale)


_GRADIENTS: Mapping[str, Callable[[Any, Tensor], Tensor]] = {
    "identity": _identity,
    "clamped": _clamped,
    "through_scale": _through_scale,
    "rounded": _rounded,
}
