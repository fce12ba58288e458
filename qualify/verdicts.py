"""Verdicts: from comparisons to the verdict of a case, from cases to the verdict of a run. Pure; no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from qualify.errors import Exit
from qualify.records import EXECUTED, FAILURES, CaseRecord, Comparison, Overall, Verdict

WORST_FIRST = (
    Verdict.FAILED_SHAPE,
    Verdict.FAILED_NONFINITE,
    Verdict.FAILED_NONDETERMINISTIC,
    Verdict.FAILED_NUMERIC,
)
"""Of several failing comparisons of a case, the first of these names its verdict."""

NOT_SEEN = "no worker got as far as importing it"
"""A subject's import error where nothing was seen of it: that is not its failure."""

LACKS = "offers"
"""`requirement` of a case whose subject lacks the function: it does not fail the run by itself."""

EXITS: Mapping[Overall, Exit] = {
    Overall.QUALIFIED: Exit.QUALIFIED,
    Overall.QUALIFIED_WITH_WAIVERS: Exit.QUALIFIED,
    Overall.NOT_QUALIFIED: Exit.NOT_QUALIFIED,
    Overall.INCOMPLETE: Exit.INCOMPLETE,
}


def of_comparisons(comparisons: Sequence[Comparison]) -> tuple[Verdict, str]:
    """The verdict of a case that ran to its end, and why in one line (empty for a pass).

    No comparison at all is an error of the check: nothing is green by absence.
    """
    if not comparisons:
        return Verdict.ERROR, "the check compared nothing"
    failing = [c for c in comparisons if not c.passed]
    if not failing:
        return Verdict.PASSED, ""
    worst = min(failing, key=_severity)
    return worst.failure, explain(worst, len(failing))


def _severity(comparison: Comparison) -> int:
    known = comparison.failure in WORST_FIRST
    return WORST_FIRST.index(comparison.failure) if known else len(WORST_FIRST)


def explain(comparison: Comparison, failing: int = 1) -> str:
    """Why a comparison failed, in one line."""
    text = (
        f"{comparison.tensor}: {comparison.metric} is {comparison.error:.4g}, allowed {comparison.budget:.4g}"
    )
    if comparison.because:
        text += f" ({comparison.because})"
    if comparison.looks_like:
        text += f"; looks like: {comparison.looks_like}"
    return text + (f"; {failing - 1} more comparisons fail" if failing > 1 else "")


@dataclass(frozen=True)
class SubjectOffer:
    """What a run's verdict needs to know of a subject."""

    name: str
    offers: tuple[str, ...]
    import_error: str = ""


@dataclass(frozen=True)
class Exclusion:
    """A wrong answer that a subject has to be told apart from, for what was executed; and the evidence.

    Attributes:
        subject, wrong_answer, dtype, site, format: what was executed and what must be excluded there.
        evidence: (case id, tensor, kind, strength) of the comparisons that exclude it, strongest first.
    """

    subject: str
    wrong_answer: str
    dtype: str
    site: str
    format: str
    evidence: tuple[tuple[str, str, str, float], ...] = ()


@dataclass(frozen=True)
class Judgement:
    """The verdict of a run and the reasons for it, the gravest first."""

    overall: Overall
    reasons: tuple[str, ...]


def judge(
    records: Sequence[CaseRecord],
    *,
    planned: int,
    subjects: Sequence[SubjectOffer],
    exclusions: Sequence[Exclusion] = (),
    uncovered: Sequence[str] = (),
    overrun: Sequence[str] = (),
    control_checks: frozenset[str] = frozenset(),
) -> Judgement:
    """The verdict of a run.

    A failure outranks incompleteness. QUALIFIED means that nothing failed, that every must-run case was
    executed and passed, that every other planned case has a result, that no rule kept more cases from running
    than its budget allows, that every control was caught and that every named wrong answer is excluded.

    Args:
        records: one for each planned case.
        planned: how many cases were planned.
        subjects: what each subject offers.
        exclusions: the wrong answers that had to be excluded.
        uncovered: proofs of cover that do not hold, in words.
        overrun: skips beyond their budgets, in words.
        control_checks: names of the checks that judge the judge.
    """
    judged = [r for r in records if r.check not in control_checks]
    controls = [r for r in records if r.check in control_checks]
    failures = [*_lacking(subjects), *_failing(judged), *_ruled_out(judged, subjects)]
    if failures:
        return Judgement(Overall.NOT_QUALIFIED, tuple(failures))
    gaps = [
        *(f"{s.name} was not judged: {NOT_SEEN}" for s in subjects if s.import_error == NOT_SEEN),
        *_missing(records, planned),
        *_not_executed(judged),
        *_uncaught(controls),
        *_not_excluded(exclusions),
        *uncovered,
        *overrun,
    ]
    if gaps:
        return Judgement(Overall.INCOMPLETE, tuple(gaps))
    waived = [r.case_id for r in judged if r.verdict is Verdict.WAIVED]
    if waived:
        return Judgement(Overall.QUALIFIED_WITH_WAIVERS, (_count(waived, "waived"),))
    return Judgement(Overall.QUALIFIED, ())


def _lacking(subjects: Sequence[SubjectOffer]) -> list[str]:
    seen = [s for s in subjects if s.import_error != NOT_SEEN]
    reasons = [f"{s.name} could not be imported: {s.import_error}" for s in seen if s.import_error]
    return reasons + [
        f"{s.name} offers neither the op nor a QDQ function"
        for s in seen
        if not s.import_error and not set(s.offers) & {"chunk_gated_delta_rule", "qdq_state", "qdq_w"}
    ]


def _failing(judged: Sequence[CaseRecord]) -> list[str]:
    by_verdict = {
        verdict: [r for r in judged if r.verdict is verdict] for verdict in Verdict if verdict in FAILURES
    }
    return [
        f"{_count([r.case_id for r in found], str(verdict))}: {found[0].reason}"
        for verdict, found in by_verdict.items()
        if found
    ]


def _ruled_out(judged: Sequence[CaseRecord], subjects: Sequence[SubjectOffer]) -> list[str]:
    """Must-run cases that a subject declines although it offers the function."""
    declined = [
        r for r in judged if r.must_run and r.verdict is Verdict.UNSUPPORTED and r.requirement != LACKS
    ]
    if not declined:
        return []
    return [f"{_count([r.case_id for r in declined], 'must run and unsupported')}: {declined[0].reason}"]


def _missing(records: Sequence[CaseRecord], planned: int) -> list[str]:
    without = [r for r in records if r.verdict in (Verdict.NOT_RUN, Verdict.EXCLUDED)]
    reasons = (
        [f"{_count([r.case_id for r in without], 'without a result')}: {without[0].reason}"]
        if without
        else []
    )
    if len(records) != planned:
        reasons.append(f"{planned} cases were planned, {len(records)} are recorded")
    return reasons


def _not_executed(judged: Sequence[CaseRecord]) -> list[str]:
    lacking = [
        r
        for r in judged
        if r.must_run
        and r.verdict not in EXECUTED
        and r.verdict not in (Verdict.NOT_RUN, Verdict.EXCLUDED, Verdict.UNSUPPORTED)
    ]
    reasons = (
        [f"{_count([r.case_id for r in lacking], 'must run and did not')}: {lacking[0].reason}"]
        if lacking
        else []
    )
    if not any(r.verdict in EXECUTED for r in judged):
        reasons.append("no case was executed")
    return reasons


def _uncaught(controls: Sequence[CaseRecord]) -> list[str]:
    """Controls that ran and were not caught; those without a result are missing like any other case."""
    counted = (Verdict.PASSED, Verdict.SKIPPED, Verdict.NOT_RUN, Verdict.EXCLUDED)
    missed = [r for r in controls if r.verdict not in counted]
    return [f"control not caught: {r.case_id}: {r.reason}" for r in missed]


def _not_excluded(exclusions: Sequence[Exclusion]) -> list[str]:
    return [
        f"nothing excludes the wrong answer {e.wrong_answer} for {e.subject} at "
        + ",".join(
            f"{name}:{value}"
            for name, value in (("dtype", e.dtype), ("site", e.site), ("format", e.format))
            if value
        )
        for e in exclusions
        if not e.evidence
    ]


def _count(ids: Sequence[str], what: str) -> str:
    return f"{len(ids)} {'case' if len(ids) == 1 else 'cases'} {what}, first {ids[0]}"
