"""Planning: from the tables, a profile and subjects to a plan with its proof of cover."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from qualify.axes import REGIME_AXIS, SM_AXIS, Profile
from qualify.case import Case
from qualify.checks_table import CheckRow, Constraint, Options, Strength
from qualify.cover import Proof
from qualify.errors import UsageError
from qualify.matrix import Cell, cells, fits, proofs
from qualify.plan import CONTROLS_SUBJECT, CoverFacts, Plan, PlannedCase, PlannedSubject
from qualify.tables import Tables

INTERPRETED_BECAUSE = "a call takes seconds where kernels are interpreted"


def make_plan(
    tables: Tables,
    profile_name: str,
    subjects: Sequence[PlannedSubject],
    *,
    seed: int = 0,
    path: str = "",
) -> Plan:
    """Builds the cases of a profile for some subjects.

    Args:
        tables: what the matrix is made of.
        profile_name: a profile of the tables.
        subjects: who is judged.
        seed: added to every seed of the tables.
        path: dotted path of the tables, for workers.

    Raises:
        UsageError: no such profile, or a must-run cell that no valid cell contains.
    """
    profile = tables.profile(profile_name)
    planned: list[PlannedCase] = []
    covers: list[CoverFacts] = []
    rows = [r for r in tables.checks if profile.name in r.profiles and (profile.controls or not r.control)]
    told: list[CheckRow] = []
    for row in rows:
        known: _Known = []
        for widest, (variant, names) in _from_widest(_variants(tables, row, profile, subjects)):
            options = variant.profiles[profile.name]
            for sm in (profile.sm, *(() if row.control else profile.other_sms)):
                found, proof = _row_cells(tables, variant, options, profile, sm, known)
                made = [c for name in names for c in _cases(variant, options, profile, sm, found, name, seed)]
                planned += made
                covers += [CoverFacts(row.name, sm, p) for p in proof if widest and made]
            told += [variant] if widest else []
    if not planned:
        raise UsageError(f"profile {profile.name} must have cases, got none; add rows to the table of checks")
    planned.sort(key=lambda p: _turn(tables, p))
    document = _document(tables, told, profile)
    return Plan(profile, path, seed, tuple(subjects), tuple(planned), tuple(covers), document)


def _turn(tables: Tables, planned: PlannedCase) -> int:
    """Which level of the axis that is swept a case is on; cases without it come with the first."""
    levels = next((axis.levels for axis in tables.axes if axis.name == tables.sweep), ())
    level = planned.case.levels.get(tables.sweep)
    return levels.index(level) if level in levels else 0


_Variant = tuple[CheckRow, list[str]]
"""A row and the subjects that it is asked of in this form."""


def _variants(
    tables: Tables, row: CheckRow, profile: Profile, subjects: Sequence[PlannedSubject]
) -> list[_Variant]:
    """The forms that a row takes: the whole of it, and what is left where a subject is interpreted."""
    if row.control:
        return [(row, [CONTROLS_SUBJECT])]
    slow = [s.name for s in subjects if profile.sm == "cpu" and s.interpreted]
    others = [s.name for s in subjects if s.name not in slow]
    made = [(row, others), (_interpreted(row, profile), slow)]
    return [(variant, names) for variant, names in made if names]


def _from_widest(variants: list[_Variant]) -> Iterator[tuple[bool, _Variant]]:
    """Each variant with whether it is the first, whose cells the proofs of cover are about."""
    return ((i == 0, variant) for i, variant in enumerate(variants))


def _interpreted(row: CheckRow, profile: Profile) -> CheckRow:
    """The row with what its options take away from interpreted subjects written as constraints on the CPU."""
    options = row.profiles[profile.name]
    less = options.interpreted
    own = (less.time_limit_s if less else None) or options.time_limit_s or profile.time_limit_s
    limit = max(own, profile.interpreted_limit_s)
    if less is None:
        return replace(row, profiles={profile.name: replace(options, time_limit_s=limit)})
    kept = dict(less.axes) | ({REGIME_AXIS: less.regimes} if less.regimes else {})
    whole = {axis: options.axes.get(axis, levels) for axis, levels in row.axes.items()}
    whole[REGIME_AXIS] = options.regimes or row.regimes
    taken = {axis: tuple(x for x in whole[axis] if x not in levels) for axis, levels in kept.items()}
    extra = [
        Constraint({SM_AXIS: (profile.sm,), axis: levels}, INTERPRETED_BECAUSE)
        for axis, levels in taken.items()
        if levels
    ]
    changed = replace(
        options,
        strength=less.strength or options.strength,
        seeds=less.seeds,
        must_run=less.must_run,
        time_limit_s=limit,
    )
    return replace(row, constraints=(*row.constraints, *extra), profiles={profile.name: changed})


def _document(tables: Tables, rows: Sequence[CheckRow], profile: Profile) -> dict[str, Any]:
    """What a receipt says of the tables that the plan came from."""
    checks = [
        {
            "name": row.name,
            "run": row.run,
            "because": row.because,
            "needs": list(row.needs),
            "axes": {
                axis: list(row.profiles[profile.name].axes.get(axis, levels))
                for axis, levels in row.axes.items()
            },
            "regimes": list(row.profiles[profile.name].regimes or row.regimes),
            "strength": row.profiles[profile.name].strength or row.strength,
            "control": row.control,
        }
        for row in rows
    ]
    named = [("", c) for c in tables.constraints] + [(row.name, c) for row in rows for c in row.constraints]
    constraints = [
        {
            "name": ",".join(f"{axis}:{'|'.join(levels)}" for axis, levels in c.forbid.items()),
            "check": check,
            "forbid": {axis: list(levels) for axis, levels in c.forbid.items()},
            "because": c.because,
        }
        for check, c in named
    ]
    return {
        "checks": checks,
        "constraints": constraints,
        "requirements": [_listed(asdict(r)) for r in tables.requirements],
        "wrong_answers": [_listed(asdict(w)) for w in tables.wrong_answers if profile.wrong_answers],
    }


def _listed(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {k: _listed(v) for k, v in value.items()}
    return [_listed(v) for v in value] if isinstance(value, list | tuple) else value


_Known = list[tuple[object, list[Cell], list[Proof]]]
"""What was asked of covertable for other SMs, with its answer: most SMs ask the same."""


def _row_cells(
    tables: Tables, row: CheckRow, options: Options, profile: Profile, sm: str, known: _Known
) -> tuple[list[tuple[Cell, bool]], list[Proof]]:
    """The cells of a row on one SM, each with whether it must run, and what they cover."""
    space, forbidden = _space(tables, row, options, sm)
    own = sm == profile.sm
    strength: Strength = (options.strength or row.strength) if own else profile.elsewhere
    numerical = [axis.name for axis in tables.axes if axis.kind == "numerical"]
    presets = row.must_run if own and options.must_run else ()
    if own:
        _refuse_impossible(row, presets, space, forbidden)
    question = (space, forbidden, strength, presets)
    answer = next((row for row in known if row[0] == question), None)
    if answer is None:
        made = cells(space, forbidden, strength, numerical, presets)
        answer = (question, made, proofs(space, forbidden, made, strength, numerical))
        known.append(answer)
    _, made, proof = answer
    firsts = [next((i for i, c in enumerate(made) if p.items() <= c.items()), -1) for p in presets]
    marked = [(cell, i in firsts) for i, cell in enumerate(made)]
    return marked, proof


def _space(
    tables: Tables, row: CheckRow, options: Options, sm: str
) -> tuple[dict[str, tuple[str, ...]], list[Mapping[str, tuple[str, ...]]]]:
    """The levels that a row has on one SM, and the constraints that are left once the SM is fixed."""
    space = {axis: options.axes.get(axis, levels) for axis, levels in row.axes.items()}
    space[REGIME_AXIS] = options.regimes or row.regimes
    forbidden: list[Mapping[str, tuple[str, ...]]] = []
    for constraint in constraints_of(tables, row):
        if sm not in constraint.forbid.get(SM_AXIS, (sm,)):
            continue
        rest = {axis: levels for axis, levels in constraint.forbid.items() if axis != SM_AXIS}
        if len(rest) == 1:
            (axis, gone), *_ = rest.items()
            if axis in space:
                space[axis] = tuple(level for level in space[axis] if level not in gone)
        elif rest:
            forbidden.append(rest)
    return space, forbidden


def constraints_of(tables: Tables, row: CheckRow) -> list[Constraint]:
    """The constraints that touch a row: of the tables and its own, those whose axes it all varies."""
    known = {*row.axes, REGIME_AXIS, SM_AXIS}
    return [c for c in (*tables.constraints, *row.constraints) if set(c.forbid) <= known]


def _refuse_impossible(
    row: CheckRow,
    presets: Sequence[Mapping[str, str]],
    space: Mapping[str, tuple[str, ...]],
    forbidden: Sequence[Mapping[str, tuple[str, ...]]],
) -> None:
    rules = [rule for rule in forbidden if all(axis in space for axis in rule)]
    for preset in presets:
        possible_levels = all(level in space.get(axis, ()) for axis, level in preset.items())
        if possible_levels and not fits(preset, space, rules):
            raise UsageError(f"{row.name}: must-run cell {dict(preset)} breaks a constraint; mend the row")


def _cases(
    row: CheckRow,
    options: Options,
    profile: Profile,
    sm: str,
    found: Iterable[tuple[Cell, bool]],
    subject: str,
    seed: int,
) -> list[PlannedCase]:
    own = sm == profile.sm
    limit = options.time_limit_s or profile.time_limit_s
    made: list[PlannedCase] = []
    for cell, must_run in found:
        levels = {SM_AXIS: sm, **{axis: cell[axis] for axis in row.axes}}
        for offset in options.seeds if own else (options.seeds or (0,))[:1]:
            case = Case(row.name, levels, cell[REGIME_AXIS], seed + offset, subject, must_run)
            made.append(PlannedCase(case, row.run, row.needs, limit, row.control))
    return made
