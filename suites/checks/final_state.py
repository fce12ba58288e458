"""A final state judged element by element, where all that leads to it is smooth.

The state before its rounding is known to within `d`, the half-width that correct implementations differ by. A
correct final state is then code * scale, with a scale that such a state can have, and every code lies
between the codes of `x - d` and `x + d`. A flip is allowed exactly where a boundary is that near, and
nowhere else.
"""

from __future__ import annotations

import torch

from qualify.compare import Layout, statistics
from qualify.problem import Problem
from qualify.records import Comparison, Worst
from references.formats import grid_named, round_to_grid, steps_at
from references.qdq import from_tiles, qdq_state, state_tiles

Tensor = torch.Tensor

ULPS = 2.0**-22
"""Relative room for `code * scale` and the recovered scale, both rounded in fp32."""

SMALLEST_NORMAL = 2.0**-126

NEAR_STEPS = 3
"""Differences of 0, 1 and 2 steps are counted apart, larger ones together."""


def rounded_state(state: Tensor, problem: Problem) -> Tensor:
    """A final state in the problem's layout after the state site, fp64.

    Args:
        state: `[N, HV, K, V]`, or `[N, HV, V, K]` when the problem says so.
        problem: layout, tile and format.
    """
    if problem.state_format is None:
        return state
    key_first = state.mT if problem.state_v_first else state
    value = qdq_state(key_first.float(), block_v=problem.state_block_v, fmt=problem.state_format).double()
    return value.mT if problem.state_v_first else value


def state_steps(state: Tensor, problem: Problem) -> Tensor:
    """How far one flip moves each element of a rounded state, in the problem's layout, fp64."""
    grid = grid_named(problem.state_format or "e4m3")
    tiles = _tiles(state, problem)
    scale = tiles.abs().amax((-3, -1), keepdim=True) / grid.largest
    codes = tiles / torch.where(scale > 0, scale, torch.ones_like(scale))
    return _untile(steps_at(codes.contiguous(), grid) * scale, state, problem)


def judge_final_state(
    actual: Tensor, raw: Tensor, width: Tensor, problem: Problem, layout: Layout
) -> Comparison:
    """Counts the elements of a rounded final state that no correct implementation can return.

    Args:
        actual: the subject's final state, fp32, in the problem's layout.
        raw: the oracle's state before its last rounding, same shape, fp64.
        width: `d`, same shape, fp64.
        problem: layout, tile and format.
        layout: names of the axes.
    """
    wrong_scale, wrong_code, off_grid = _violations(actual, raw, width, problem)
    rounded = rounded_state(raw, problem)
    wrong = wrong_scale | wrong_code | off_grid
    count = int(wrong.sum())
    reasons = {
        "belong to a tile whose scale no correct state has": int(wrong_scale.sum()),
        "are not code * scale": int(off_grid.sum()),
        "have a code out of reach": int(wrong_code.sum()),
    }
    return Comparison(
        tensor="final_state",
        kind="property",
        metric="codes_out_of_reach",
        error=float(count),
        budget=0.0,
        derivation="each code lies between those of x - d and x + d, d from the noise before rounding",
        statistics=statistics(rounded, actual)
        | codes_apart(rounded, actual.double(), problem)
        | {"elements": float(raw.numel()), "uncertain": float(_uncertain(raw, width, problem))},
        worst=_worst(actual, raw, wrong, layout) if count else None,
        because="; ".join(f"{n} elements {what}" for what, n in reasons.items() if n),
    )


def codes_apart(expected: Tensor, actual: Tensor, problem: Problem) -> dict[str, float]:
    """How many elements of two rounded states have codes 0, 1, 2 or more steps of the grid apart.

    Each code is recovered with the scale of its own tile, so that a scale that differs moves no code.

    Args:
        expected, actual: in the problem's layout, fp64.
        problem: layout, tile and format.
    """
    apart = (_ranks(expected, problem) - _ranks(actual, problem)).abs()
    counts = {f"codes_apart_{n}": float((apart == n).sum()) for n in range(NEAR_STEPS)}
    beyond = float(apart.numel()) - sum(counts.values())
    return counts | {"codes_apart_more": beyond, "grid_steps_max": float(apart.max())}


def _ranks(state: Tensor, problem: Problem) -> Tensor:
    """The number of each element's code, counted from zero with its sign, in the problem's layout, fp64."""
    grid = grid_named(problem.state_format or "e4m3")
    tiles = _tiles(state, problem)
    scale = tiles.abs().amax((-3, -1), keepdim=True) / grid.largest
    divisor = torch.where(scale < SMALLEST_NORMAL, torch.ones_like(scale), scale)
    codes = round_to_grid((tiles / divisor).contiguous(), grid)
    steps = steps_at(codes, grid)
    binade = torch.log2(steps / grid.smallest_step)
    return _untile(codes / steps + codes.sign() * binade * 2.0**grid.mantissa_bits, state, problem)


def _tiles(x: Tensor, problem: Problem) -> Tensor:
    return state_tiles(x.mT if problem.state_v_first else x, problem.state_block_v)


def _untile(x: Tensor, like: Tensor, problem: Problem) -> Tensor:
    columns = like.shape[-2] if problem.state_v_first else like.shape[-1]
    state = from_tiles(x, columns)
    return state.mT if problem.state_v_first else state


def _violations(
    actual: Tensor, raw: Tensor, width: Tensor, problem: Problem
) -> tuple[Tensor, Tensor, Tensor]:
    grid = grid_named(problem.state_format or "e4m3")
    y, x, d = (_tiles(t.double(), problem) for t in (actual, raw, width))
    axes = (-3, -1)
    largest = y.abs().amax(axes, keepdim=True)
    low = (x.abs() - d).amax(axes, keepdim=True).clamp_min(0.0) / grid.largest
    high = (x.abs() + d).amax(axes, keepdim=True) / grid.largest
    scale = largest / grid.largest
    plausible = (scale >= low * (1 - ULPS)) & (scale <= high * (1 + ULPS))
    unit = (low < SMALLEST_NORMAL) & (largest == 0)  # with scale 1 so small a tile rounds to zeros
    usable = plausible & (scale >= SMALLEST_NORMAL * (1 - ULPS))
    divisor = torch.where(usable, scale, torch.ones_like(scale))
    code = y / divisor
    reach = ULPS * code.abs() + SMALLEST_NORMAL / divisor  # subnormal values are coarse, or flushed to zero
    lower, upper = (round_to_grid(((x + s * d) / divisor).contiguous(), grid) for s in (-1.0, 1.0))
    on_grid = (round_to_grid(code.contiguous(), grid) - code).abs() <= reach
    within = (code >= lower - reach) & (code <= upper + reach)
    bad_scale = (~(plausible | unit)).expand_as(y)
    return (
        _untile(bad_scale, actual, problem),
        _untile(~within & ~bad_scale, actual, problem),
        _untile(~on_grid & ~bad_scale, actual, problem),
    )


def _uncertain(raw: Tensor, width: Tensor, problem: Problem) -> int:
    """How many elements are so near a boundary that two codes are allowed."""
    grid = grid_named(problem.state_format or "e4m3")
    x, d = _tiles(raw, problem), _tiles(width, problem)
    scale = x.abs().amax((-3, -1), keepdim=True).clamp_min(1e-300) / grid.largest
    lower, upper = (round_to_grid(((x + s * d) / scale).contiguous(), grid) for s in (-1.0, 1.0))
    return int((lower != upper).sum())


def _worst(actual: Tensor, raw: Tensor, wrong: Tensor, layout: Layout) -> Worst:
    gap = torch.where(wrong, (actual.double() - raw).abs(), torch.full_like(raw, -1.0))
    index = tuple(int(i) for i in torch.unravel_index(gap.flatten().argmax().cpu(), gap.shape))
    return Worst(layout.place(index), float(raw[index]), float(actual[index]))
