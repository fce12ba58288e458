"""The whole op, black box: every output and gradient within its budget, and away from named wrong answers."""

from __future__ import annotations

from qualify.budgets import declaration_holds
from qualify.case import Case, CheckOutput
from qualify.subjects import Subject
from suites.checks.evidence import (
    Evidence,
    WrongResultError,
    evidence_of,
    judge,
    outcome_of,
    output_of,
    turn,
)


def run(case: Case, subject: Subject) -> CheckOutput:
    """Judges the eight tensors of one call.

    Args:
        case: levels of `qualify.regimes.AXES`, a regime of values and a seed.
        subject: what is judged.
    """
    evidence = evidence_of(case, subject)
    return judged(case, subject, evidence, turn(case, evidence))


def judged(case: Case, subject: Subject, evidence: Evidence, wrong_answers: tuple[str, ...]) -> CheckOutput:
    """Runs a subject on a problem and holds its outcome against the evidence.

    Args:
        case: names the carrier.
        subject: what is judged.
        evidence: of the problem.
        wrong_answers: what to project onto.
    """
    comparisons = [declaration_holds(subject.arithmetic, case.levels.get("dtype", "fp32"))]
    try:
        comparisons += judge(evidence, outcome_of(subject, evidence.problem), wrong_answers)
    except WrongResultError as error:
        comparisons.append(error.comparison)
    return output_of(comparisons, evidence.problem)
