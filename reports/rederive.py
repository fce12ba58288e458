"""The verdict derived again from what a receipt holds, by the same code that derives it for a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import date
from typing import Any

from qualify.exclusions import OP, exclusions
from qualify.records import FAILURES, CaseRecord, Overall, Verdict
from qualify.skips import SkipTally, overrun, tallies
from qualify.verdicts import Exclusion, Judgement, SubjectOffer, judge
from qualify.waivers import Waiver
from reports.model import Body, Gate, Plan, WaiverFacts

GOOD_WAIVER = "used"


def control_checks(plan: Plan) -> frozenset[str]:
    """The checks whose cases judge the judge."""
    return frozenset(check.name for check in plan.checks if check.control)


def excluded(body: Body, records: Sequence[CaseRecord]) -> list[Exclusion]:
    """Every wrong answer that had to be ruled out, with the evidence that the cases hold."""
    op_checks = frozenset(check.name for check in body.plan.checks if OP in check.needs)
    return exclusions(records, body.plan.wrong_answers, [s.name for s in body.subjects], op_checks)


def skip_tallies(body: Body) -> list[SkipTally]:
    """What each rule kept from running, with its budget, counted from the cases."""
    plan = body.plan
    return tallies(body.cases, plan.skip_budgets, {r.name: r.when for r in plan.requirements}, plan.sm)


def judgement(body: Body) -> Judgement:
    """The verdict that follows from the cases, the cover, the waivers and the gates of a receipt."""
    uncovered = [
        f"the cells of {c.scope} cover {c.covered} of {c.possible} tuples of {c.strength}"
        for c in body.plan.covers
        if c.covered != c.possible
    ]
    base = judge(
        body.cases,
        planned=body.plan.cases,
        subjects=[SubjectOffer(s.name, s.offers, s.import_error) for s in body.subjects],
        exclusions=excluded(body, body.cases),
        uncovered=uncovered,
        overrun=overrun(skip_tallies(body)),
        control_checks=control_checks(body.plan),
    )
    red = [*_red_waivers(body.waivers), *_red_gates(body.gates)]
    if not red:
        return base
    held = base.reasons if base.overall is Overall.NOT_QUALIFIED else ()
    return Judgement(Overall.NOT_QUALIFIED, (*held, *red))


def waiver_of(row: WaiverFacts) -> Waiver:
    """The waiver that a row of a receipt tells of.

    Raises:
        ValueError: a row of no waiver.
    """
    scope = dict(row.scope)
    named = {name: scope.pop(name, "") for name in ("profile", "sm", "driver")}
    verdicts = tuple(Verdict(name) for name in scope.pop("verdicts", "").split(", ") if name)
    expires = date.fromisoformat(row.expires)
    return Waiver(
        row.pattern, row.owner, row.issue, row.reason, expires, **named, versions=scope, verdicts=verdicts
    )


def as_run(cases: Sequence[CaseRecord], waivers: Sequence[WaiverFacts]) -> list[CaseRecord]:
    """The cases as they were before waivers were applied: a waived one says in its reason what it was.

    One whose reason none of the waivers gave stays waived.
    """
    openings = [f"waived by {waiver.owner} ({waiver.issue}): " for waiver in waivers]
    return [_as_run(case, openings) for case in cases]


def _as_run(case: CaseRecord, openings: Sequence[str]) -> CaseRecord:
    if case.verdict is Verdict.STALE_WAIVER:
        return replace(case, verdict=Verdict.PASSED, reason="")
    if case.verdict is Verdict.WAIVED:
        for opening in openings:
            verdict, _, reason = case.reason.removeprefix(opening).partition(": ")
            if case.reason.startswith(opening) and verdict in FAILURES and reason:
                return replace(case, verdict=Verdict(verdict), reason=reason)
    return case


def _red_waivers(waivers: Sequence[WaiverFacts]) -> list[str]:
    return [f"waiver {w.pattern} of {w.owner} is {w.state}" for w in waivers if w.state != GOOD_WAIVER]


def _red_gates(gates: Sequence[Gate]) -> list[str]:
    return [f"gate {g.rule}: {g.value}, allowed {g.limit}" for g in gates if not g.passed]


def restated(raw: Mapping[str, Any], body: Body) -> dict[str, Any]:
    """A raw body whose header states the verdict that follows from its parts.

    Args:
        raw: the body as JSON values.
        body: the same body, read.
    """
    found = judgement(body)
    header = {**raw["header"], "verdict": str(found.overall), "reasons": list(found.reasons)}
    return {**raw, "header": header}
