"""Cases that were kept from running, by rule, and how many of them a profile allows. Pure; no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from qualify.axes import REGIME_AXIS, SM_AXIS, SkipBudget
from qualify.records import CaseRecord, Verdict

KEPT = frozenset({Verdict.SKIPPED, Verdict.UNSUPPORTED})
"""What budgets are about. What a selection leaves out has no budget: it makes a run incomplete by itself."""

ANY = "*"
ROUNDING = 1e-9

When = Mapping[str, Sequence[str]]


@dataclass(frozen=True)
class SkipTally:
    """How many cases of a subject one rule kept from running, and how many it may.

    Attributes:
        subject, requirement: whose cases, and the rule.
        cases: how many.
        budget: how many are allowed; None where the profile has no word on the rule.
        because: why so many.
    """

    subject: str
    requirement: str
    cases: int
    budget: int | None
    because: str = ""

    @property
    def over(self) -> bool:
        """Whether more were kept from running than are allowed."""
        return self.budget is not None and self.cases > self.budget


def tallies(
    records: Sequence[CaseRecord], budgets: Sequence[SkipBudget], requirements: Mapping[str, When], sm: str
) -> list[SkipTally]:
    """A tally for each subject and rule that kept a case from running.

    A share is one of the cases that the rule can touch: those on the levels of a requirement; for what a
    subject declines, its cases on the profile's own SM.

    Args:
        records: of the run or of one shard.
        budgets: of the profile; the first that names a rule, or `*`, holds.
        requirements: name -> the levels that it is about.
        sm: the SM that the profile qualifies.
    """
    kept = Counter((r.subject, r.requirement) for r in records if r.verdict in KEPT)
    made = []
    for (subject, name), cases in kept.items():
        row = next((b for b in budgets if b.requirement in (name, ANY)), None)
        when = requirements.get(name, {SM_AXIS: (sm,)})
        touched = sum(r.subject == subject and _stands(r, when) for r in records)
        budget = int(row.share * touched + ROUNDING) if row else None
        made.append(SkipTally(subject, name, cases, budget, row.because if row else ""))
    return made


def allowed(found: Sequence[SkipTally]) -> dict[str, int | None]:
    """Rule -> how many cases of all subjects it may keep from running; None where it has no budget."""
    made: dict[str, int | None] = {}
    for tally in found:
        before = made.get(tally.requirement, 0)
        made[tally.requirement] = None if before is None or tally.budget is None else before + tally.budget
    return made


def overrun(found: Sequence[SkipTally]) -> list[str]:
    """The tallies that are over their budgets, in words."""
    return [
        f"{t.cases} {'case' if t.cases == 1 else 'cases'} of {t.subject} kept from running by "
        f"{t.requirement!r}, {t.budget} are allowed: {t.because}"
        for t in found
        if t.over
    ]


def _stands(record: CaseRecord, when: When) -> bool:
    levels = {**record.levels, REGIME_AXIS: record.regime}
    return all(levels.get(axis) in wanted for axis, wanted in when.items())
