"""Records of cases that compared nothing: what kept them from running, or how they ended."""

from __future__ import annotations

from typing import Any

from qualify.plan import PlannedCase
from qualify.records import CaseRecord, Verdict


def blank(planned: PlannedCase, verdict: Verdict, reason: str, **more: Any) -> CaseRecord:
    """The record of a planned case; `more` are further fields of `CaseRecord`."""
    case = planned.case
    return CaseRecord(
        case_id=case.case_id,
        check=case.check,
        subject=case.subject,
        levels=dict(case.levels),
        regime=case.regime,
        seed=case.seed,
        must_run=case.must_run,
        verdict=verdict,
        reason=reason,
        **more,
    )
