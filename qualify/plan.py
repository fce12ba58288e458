"""The plan: every case of a profile, in order, with what each needs; and its proof of cover."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

from qualify.axes import REGIME_AXIS, SM_AXIS, Profile
from qualify.canonical import digest
from qualify.case import Case
from qualify.checks_table import CheckRow, Constraint, Options, Strength
from qualify.cover import Proof
from qualify.errors import UsageError
from qualify.matrix import Cell, cells, fits, proofs
from qualify.tables import Tables

PLAN_NAME = "plan.json"
CONTROLS_SUBJECT = "controls"
"""The subject of control cases: they judge the judge, whoever is judged beside them."""


@dataclass(frozen=True)
class PlannedCase:
    """A case with what running it takes.

    Attributes:
        case: what is run.
        run: dotted path of the check.
        needs: what the subject must offer.
        time_limit_s: after this it hangs.
        control: whether it judges the judge.
    """

    case: Case
    run: str
    needs: tuple[str, ...]
    time_limit_s: float
    control: bool = False

    @property
    def case_id(self) -> str:
        """The case's id."""
        return self.case.case_id


@dataclass(frozen=True)
class PlannedSubject:
    """A subject.

    Attributes:
        name: how ids call it.
        spec: where workers load it from.
        given: what the user wrote, for commands that repeat a case.
    """

    name: str
    spec: str
    given: str = ""


@dataclass(frozen=True)
class CoverFacts:
    """A proof with the check and the SM that it belongs to."""

    check: str
    sm: str
    proof: Proof


@dataclass(frozen=True)
class Plan:
    """What will be run, of which profile, and what it covers."""

    profile: Profile
    tables: str
    seed: int
    subjects: tuple[PlannedSubject, ...]
    cases: tuple[PlannedCase, ...]
    covers: tuple[CoverFacts, ...] = ()
    document: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @cached_property
    def by_id(self) -> dict[str, PlannedCase]:
        """The planned cases by id."""
        return {planned.case_id: planned for planned in self.cases}

    @cached_property
    def axes(self) -> dict[str, list[str]]:
        """Axis -> the levels that planned cases use, in order of first use."""
        used: dict[str, dict[str, None]] = {}
        for planned in self.cases:
            for axis, level in {**planned.case.levels, REGIME_AXIS: planned.case.regime}.items():
                used.setdefault(axis, {})[level] = None
        return {axis: list(levels) for axis, levels in used.items()}

    @cached_property
    def digest(self) -> str:
        """Digest of the profile, the axes and the ids, the must-run ones named: shards merge under it."""
        return digest(
            {
                "profile": self.profile.name,
                "axes": self.axes,
                "cases": sorted(self.by_id),
                "must_run": sorted(p.case_id for p in self.cases if p.case.must_run),
            }
        )


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
    for row in rows:
        options = row.profiles[profile.name]
        known: _Known = []
        for sm in (profile.sm, *profile.other_sms):
            found, proof = _row_cells(tables, row, options, profile, sm, known)
            covers += [CoverFacts(row.name, sm, p) for p in proof]
            judged = [CONTROLS_SUBJECT] if row.control else [s.name for s in subjects]
            for name in judged:
                planned += _cases(row, options, profile, sm, found, name, seed)
    if not planned:
        raise UsageError(f"profile {profile.name} must have cases, got none; add rows to the table of checks")
    return Plan(
        profile, path, seed, tuple(subjects), tuple(planned), tuple(covers), _document(tables, rows, profile)
    )


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
        "wrong_answers": [_listed(asdict(w)) for w in tables.wrong_answers],
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
        for offset in options.seeds if own else options.seeds[:1]:
            case = Case(row.name, levels, cell[REGIME_AXIS], seed + offset, subject, must_run)
            made.append(PlannedCase(case, row.run, row.needs, limit, row.control))
    return made


def select(plan: Plan, patterns: Sequence[str]) -> frozenset[str]:
    """The ids that any of the patterns matches; with no pattern, all.

    A pattern is a part of an id, in which `*` stands for anything and `?` for one character.

    Raises:
        UsageError: a pattern matches no planned case.
    """
    if not patterns:
        return frozenset(plan.by_id)
    chosen: set[str] = set()
    for pattern in patterns:
        words = re.escape(pattern).replace(r"\*", ".*").replace(r"\?", ".")
        found = {case_id for case_id in plan.by_id if re.search(words, case_id)}
        if not found:
            raise UsageError(
                f"selection must match a planned case, got {pattern!r}; `qualify plan` lists them"
            )
        chosen |= found
    return frozenset(chosen)


def case_from_id(tables: Tables, case_id: str, time_limit_s: float) -> PlannedCase:
    """The case that an id names, whatever profile planned it.

    Raises:
        UsageError: the text is no case id of these tables.
    """
    match = re.fullmatch(r"([^/\[\]]+)/([^\[\]]+)\[([^\[\]]*)\]([^#\[\]]+)#(-?\d+)", case_id)
    if match is None:
        raise UsageError(
            f"a case id reads subject/check[axis:level,...]regime#seed, got {case_id!r}; copy it"
        )
    subject, check, cell, regime, seed = match.groups()
    row = tables.check(check)
    pairs = [pair.partition(":") for pair in cell.split(",") if pair]
    levels = {axis: level for axis, _, level in pairs}
    known = {**{axis.name: axis.levels for axis in tables.axes}, **row.axes}
    for axis, level in levels.items():
        if level not in known.get(axis, ()):
            raise UsageError(f"level must be one that the tables know, got {axis}:{level}; copy the id again")
    if list(levels) != [SM_AXIS, *row.axes] or regime not in row.regimes:
        raise UsageError(
            f"{check} varies {SM_AXIS}, {', '.join(row.axes)} in a known regime, got {case_id!r}"
        )
    case = Case(check, levels, regime, int(seed), subject)
    return PlannedCase(case, row.run, row.needs, time_limit_s, row.control)


def plan_to_json(plan: Plan) -> str:
    """The plan as JSON for workers: subjects and cases."""
    body = {
        "profile": asdict(plan.profile),
        "tables": plan.tables,
        "seed": plan.seed,
        "digest": plan.digest,
        "subjects": [asdict(s) for s in plan.subjects],
        "cases": [
            {**asdict(p), "case": {**asdict(p.case), "levels": dict(p.case.levels)}} for p in plan.cases
        ],
        "covers": [asdict(c) for c in plan.covers],
        "document": plan.document,
    }
    return json.dumps(body, separators=(",", ":"))


def _proof_from_json(row: Mapping[str, Any]) -> Proof:
    missing = tuple(tuple((axis, level) for axis, level in one) for one in row["missing"])
    return Proof(**{**row, "axes": tuple(row["axes"]), "missing": missing})


def plan_from_json(text: str) -> Plan:
    """The inverse of `plan_to_json`.

    Raises:
        ValueError, KeyError, TypeError: the text is no plan.
    """
    body: dict[str, Any] = json.loads(text)
    profile: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in body["profile"].items()}
    cases = tuple(
        PlannedCase(Case(**p["case"]), p["run"], tuple(p["needs"]), p["time_limit_s"], p["control"])
        for p in body["cases"]
    )
    covers = tuple(CoverFacts(c["check"], c["sm"], _proof_from_json(c["proof"])) for c in body["covers"])
    subjects = tuple(PlannedSubject(**s) for s in body["subjects"])
    return Plan(Profile(**profile), body["tables"], body["seed"], subjects, cases, covers, body["document"])
