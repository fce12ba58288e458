"""The plan: every case of a profile, in order, with what each needs; and its proof of cover."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

from qualify.axes import REGIME_AXIS, SM_AXIS, Profile, SkipBudget
from qualify.canonical import digest
from qualify.case import Case, case_of_id
from qualify.cover import Proof
from qualify.errors import UsageError
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
        interpreted: whether it has kernels that run in an interpreter where there is no GPU.
    """

    name: str
    spec: str
    given: str = ""
    interpreted: bool = False


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
    try:
        case = case_of_id(case_id)
    except ValueError as error:
        raise UsageError(str(error)) from error
    check, levels, regime = case.check, case.levels, case.regime
    row = tables.check(check)
    known = {**{axis.name: axis.levels for axis in tables.axes}, **row.axes}
    for axis, level in levels.items():
        if level not in known.get(axis, ()):
            raise UsageError(f"level must be one that the tables know, got {axis}:{level}; copy the id again")
    if list(levels) != [SM_AXIS, *row.axes] or regime not in row.regimes:
        raise UsageError(
            f"{check} varies {SM_AXIS}, {', '.join(row.axes)} in a known regime, got {case_id!r}"
        )
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
    profile["skip_budgets"] = tuple(SkipBudget(**row) for row in profile["skip_budgets"])
    cases = tuple(
        PlannedCase(Case(**p["case"]), p["run"], tuple(p["needs"]), p["time_limit_s"], p["control"])
        for p in body["cases"]
    )
    covers = tuple(CoverFacts(c["check"], c["sm"], _proof_from_json(c["proof"])) for c in body["covers"])
    subjects = tuple(PlannedSubject(**s) for s in body["subjects"])
    return Plan(Profile(**profile), body["tables"], body["seed"], subjects, cases, covers, body["document"])
