"""The cover of a plan counted again from a receipt's cases: levels, constraints and cells are all in it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from qualify.cover import prove
from qualify.records import CaseRecord
from reports.model import CheckFacts, Cover, Plan

SM, REGIME = "sm", "regime"
MAX_STEPS = 20_000_000
"""Partial cells held against a constraint, in all proofs: 174 proofs under 13 constraints take a million."""

Space = dict[str, tuple[str, ...]]


def recounted(plan: Plan, cases: Sequence[CaseRecord]) -> Iterator[tuple[Cover, str]]:
    """Each recorded proof of cover with what is wrong with it; nothing is when it can be counted again.

    Raises:
        ValueError: counting takes too long.
    """
    steps = iter(range(MAX_STEPS // (1 + len(plan.constraints))))
    checks = {check.name: check for check in plan.checks}
    cells: dict[tuple[str, str], dict[tuple[str, ...], dict[str, str]]] = {}
    for case in cases:
        own = {axis: level for axis, level in case.levels.items() if axis != SM} | {REGIME: case.regime}
        cells.setdefault((case.check, case.levels.get(SM, "")), {})[tuple(own.values())] = own
    for cover in plan.covers:
        if cover.check not in checks:
            yield cover, f"the plan has no check {cover.check!r}"
            continue
        space, forbidden = _space(plan, checks[cover.check], cover.sm)
        found = prove(
            space,
            forbidden,
            list(cells.get((cover.check, cover.sm), {}).values()),
            cover.strength,
            [axis for axis in cover.axes if axis in space],
            steps,
        )
        same = (found.covered, found.possible, found.invalid) == (cover.covered, cover.possible, 0)
        known = all(axis in space for axis in cover.axes)
        yield (
            cover,
            ""
            if same and known
            else f"counted {found.covered} of {found.possible} with {found.invalid} invalid cells, "
            f"recorded {cover.covered} of {cover.possible}",
        )


def uncounted(plan: Plan, cases: Iterable[CaseRecord]) -> list[str]:
    """Checks on the profile's own SM that have cases and no proof of cover."""
    proved = {(cover.check, cover.sm) for cover in plan.covers}
    ran = {(case.check, case.levels.get(SM, "")): None for case in cases if case.levels.get(SM) == plan.sm}
    return [check for check, sm in ran if (check, sm) not in proved]


def _space(plan: Plan, check: CheckFacts, sm: str) -> tuple[Space, list[Mapping[str, tuple[str, ...]]]]:
    """The levels that a check has on one SM, and the constraints that are left once the SM is fixed."""
    space: Space = {**check.axes, REGIME: check.regimes}
    forbidden: list[Mapping[str, tuple[str, ...]]] = []
    for constraint in plan.constraints:
        forbid = constraint.forbid
        touches = constraint.check in ("", check.name) and set(forbid) <= {*check.axes, REGIME, SM}
        if not touches or sm not in forbid.get(SM, (sm,)):
            continue
        rest = {axis: levels for axis, levels in forbid.items() if axis != SM}
        if len(rest) == 1:
            ((axis, gone),) = rest.items()
            space[axis] = tuple(level for level in space[axis] if level not in gone)
        elif rest:
            forbidden.append(rest)
    return space, forbidden
