"""What the terminal says while a run is at work, and of one case afterwards."""

from __future__ import annotations

from dataclasses import replace

from qualify.progress import Failures, explanation
from qualify.records import CaseRecord, Comparison, Verdict

GOOD = Comparison(tensor="o", kind="budget", metric="rel_l2", error=0.5, budget=1.0, derivation="made up")
BAD = replace(GOOD, tensor="dk", error=2.0)


def failed(case_id: str, subject: str, reason: str) -> CaseRecord:
    return CaseRecord(case_id, "op.whole", subject, {}, "random", 0, Verdict.ERROR, reason=reason)


def test_what_every_case_of_a_subject_fails_of_is_said_once() -> None:
    failures = Failures()
    assert "a/1: no module x" in failures.line(failed("a/1", "a", "no module x"))
    assert failures.line(failed("a/2", "a", "no module x")) == ""
    assert failures.line(failed("b/1", "b", "no module x"))
    assert failures.line(failed("a/3", "a", "another reason"))
    assert failures.line(replace(failed("a/4", "a", "not asked"), verdict=Verdict.SKIPPED)) == ""


def test_comparisons_that_failed_are_explained_first() -> None:
    record = replace(
        failed("a/1", "a", "dk: too far"), verdict=Verdict.FAILED_NUMERIC, comparisons=(GOOD, BAD, GOOD)
    )
    marks = [line.split()[2] for line in explanation(record.to_json()) if " (budget) " in line]
    assert marks == ["FAILS:", "passes:", "passes:"]
