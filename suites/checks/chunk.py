"""One chunk for each sequence, from a given state: the state site judged where nothing can hide behind a
flip.

The entry rounding acts on given numbers and is exact; W is not rounded; so everything up to the state
before its last rounding is smooth, and is budgeted tightly. The last rounding is judged element by element.
"""

from __future__ import annotations

from qualify.case import Case, CheckOutput
from qualify.subjects import Subject
from suites.checks.arithmetic import measured_arithmetic
from suites.checks.evidence import evidence_of, turn
from suites.checks.whole import judged

WRONG_ANSWERS_PER_CASE = 3


def run(case: Case, subject: Subject) -> CheckOutput:
    """Judges the eight tensors of one call with the state site alone.

    Args:
        case: levels of `qualify.regimes.AXES`; `length` at most 64.
        subject: what is judged.
    """
    arithmetic = measured_arithmetic(case, subject)
    evidence = evidence_of(case, subject, arithmetic=arithmetic, sites="state", final="kept")
    if not evidence.smooth:
        raise ValueError(
            f"op.chunk needs one chunk for each sequence, got length {case.levels.get('length')}"
        )
    return judged(case, subject, evidence, turn(case, evidence, WRONG_ANSWERS_PER_CASE))
