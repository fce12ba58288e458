"""Grid membership: every element of a rounded fp32 final state is code * scale, whatever led to it."""

from __future__ import annotations

import math
from functools import lru_cache

import torch

from qualify.case import Case, CheckOutput
from qualify.checks_table import CheckRow
from qualify.compare import holds
from qualify.problem import Problem
from qualify.records import Comparison
from qualify.regimes import build_problem
from qualify.subjects import Subject
from references.formats import grid_named, round_to_grid
from references.qdq import state_tiles
from references.wrong_answers import WRONG_ANSWERS
from suites.checks.evidence import WrongResultError, device_of, outcome_of, output_of
from suites.checks.rows import DTYPES, OP, levels, profiles
from suites.oracle import expected

Tensor = torch.Tensor

SMALLEST_NORMAL = 2.0**-126
ENOUGH_TILES = 8
"""Fewer tiles could be on a grid by chance."""

SUSPECTS = (
    "state_off",
    "state_e5m2",
    "state_int8",
    "state_e4m3",
    "state_half_tile",
    "state_double_tile",
    "state_per_head",
    "state_per_tensor",
    "state_per_row",
    "state_half_keys",
    "final_unrounded",
)
"""Wrong answers that leave the grid, a coarser one, or groups of their own behind."""


def run(case: Case, subject: Subject) -> CheckOutput:
    """Judges that the final state of an ordinary run lies on the grid, tile by tile.

    Args:
        case: levels of `qualify.regimes.AXES` with the state site on, a regime and a seed.
        subject: what is judged.
    """
    problem = build_problem(case.levels, case.regime, case.seed, device_of(case)).with_(do=None, dht=None)
    try:
        state = outcome_of(subject, problem)["final_state"]
    except WrongResultError as error:
        return output_of([error.comparison], problem)
    assert state is not None
    key = (tuple(sorted(case.levels.items())), case.regime, case.seed)
    return output_of(_judged(state, problem, _excluded(*key)), problem)


@lru_cache(maxsize=64)
def _excluded(at: tuple[tuple[str, str], ...], regime: str, seed: int) -> tuple[str, ...]:
    """The wrong answers whose own final state fails this check."""
    problem = build_problem(dict(at), regime, seed).with_(do=None, dht=None)
    found = []
    for name in SUSPECTS:
        wrong = expected(problem, semantics=WRONG_ANSWERS[name].semantics)["final_state"]
        assert wrong is not None
        if not all(c.passed for c in _judged(wrong.float(), problem, ())):
            found.append(name)
    return tuple(found)


def _judged(state: Tensor, problem: Problem, excluded: tuple[str, ...]) -> list[Comparison]:
    fmt = problem.state_format or "e4m3"
    tiles = state_tiles(state.mT if problem.state_v_first else state, problem.state_block_v)
    tiles = tiles.movedim(-2, -3).flatten(0, -3).flatten(1)  # [tiles, K * block_v]
    largest = tiles.abs().amax(1)
    tiles = tiles[(largest > 2 * SMALLEST_NORMAL * grid_named(fmt).largest) & largest.isfinite()]
    if len(tiles) < ENOUGH_TILES:
        return [
            holds(
                "grid.tiles", ENOUGH_TILES - len(tiles), ENOUGH_TILES, f"only {len(tiles)} tiles are not zero"
            )
        ]
    off, codes = _off_grid(tiles, fmt)
    comparisons = [
        holds(
            "grid.members",
            int(off.sum()),
            tiles.numel(),
            f"{int(off.sum())} elements in {int(off.any(1).sum())} of {len(tiles)} tiles are no code * scale",
            metric="grid",
            derivation=f"the scale of a tile is its largest element / {grid_named(fmt).largest:g}",
            excluded=excluded,
        )
    ]
    if fmt == "e4m3":
        mantissas = torch.frexp(codes[codes.abs() >= 2.0**-6].double().abs()).mantissa
        seen = set(mantissas.tolist())
        comparisons.append(
            holds(
                "grid.mantissas",
                8 - len(seen),
                8,
                f"only {len(seen)} of 8 mantissas occur: a coarser grid",
                excluded=excluded,
            )
        )
    return comparisons


def _off_grid(tiles: Tensor, fmt: str) -> tuple[Tensor, Tensor]:
    """Which elements `[tiles, n]` are no code times their tile's scale, and the codes."""
    grid = grid_named(fmt)
    top = torch.full_like(tiles[:, :1], grid.largest)
    largest = tiles.abs().amax(1, keepdim=True)
    near = largest / top
    best, codes = torch.ones_like(tiles, dtype=torch.bool), torch.zeros_like(tiles)
    for aside in (0.0, math.inf, -math.inf):  # the quotient, and its neighbours that give the same product
        scale = near if aside == 0.0 else torch.nextafter(near, torch.full_like(near, aside))
        candidate = round_to_grid((tiles / scale).contiguous(), grid)
        off = (candidate * scale != tiles) | (scale * top != largest)
        better = off.sum(1, keepdim=True) < best.sum(1, keepdim=True)
        best, codes = torch.where(better, off, best), torch.where(better, candidate, codes)
    return best, codes


ROWS = (
    CheckRow(
        "op.grid",
        "suites.checks.grid:run",
        "noise before the last rounding may move a code, but nothing may leave the grid",
        needs=OP,
        axes=levels("dtype", "format", "layout")
        | {
            "sites": ("both", "state"),
            "block_v": ("16", "32", "64"),
            "packing": ("docs", "batch", "unequal"),
            "length": ("65", "129"),
            "heads": ("32x48", "60x40", "48x64"),
            "gates": ("ordinary", "weak"),
            "grouping": ("hv2",),
        },
        regimes=("random", "huge", "saturating"),
        must_run=tuple({"dtype": dtype, "format": "e4m3"} for dtype in DTYPES),
        profiles=profiles(
            "each", "pairs", quick={"dtype": ("bf16",), "format": ("e4m3",), "length": ("65",)}
        ),
    ),
)
