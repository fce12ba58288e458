"""A case: one check on one cell with one regime and one seed; and what a check hands back."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from qualify.records import Comparison


@dataclass(frozen=True)
class Case:
    """One thing to run. Its id is the same in pytest, on the command line, in waivers and in receipts.

    Attributes:
        check: name of the row in the table of checks, such as `op.whole`.
        levels: axis -> level, every axis that the check varies, in the table's order.
        regime: the input distribution.
        seed: seeds everything random in the case.
        subject: name of the subject that is judged.
        must_run: whether the profile cannot be qualified without this case.
    """

    check: str
    levels: Mapping[str, str]
    regime: str
    seed: int
    subject: str
    must_run: bool = False

    @property
    def case_id(self) -> str:
        """``subject/check[axis:level,...]regime#seed``."""
        cell = ",".join(f"{axis}:{level}" for axis, level in self.levels.items())
        return f"{self.subject}/{self.check}[{cell}]{self.regime}#{self.seed}"


ID = re.compile(r"([^/\[\]]+)/([^\[\]]+)\[([^\[\]]*)\]([^#\[\]]+)#(-?[0-9]{1,18})")


def case_of_id(case_id: str) -> Case:
    """The case that an id names, whatever tables planned it.

    Raises:
        ValueError: the text is no case id, or names no case that would have this id.
    """
    match = ID.fullmatch(case_id)
    if match is not None:
        subject, check, cell, regime, seed = match.groups()
        levels = {axis: level for axis, _, level in (p.partition(":") for p in cell.split(",") if p)}
        case = Case(check, levels, regime, int(seed), subject)
        if case.case_id == case_id:
            return case
    raise ValueError(
        f"a case id must be subject/check[axis:level,...]regime#seed, got {case_id[:120]!r}; check it"
    )


@dataclass(frozen=True)
class CheckOutput:
    """What a check returns: its comparisons, a digest of the inputs and the launch configurations that ran.

    `unsupported` says, in one line, what the subject does not offer; then there are no comparisons.
    """

    comparisons: tuple[Comparison, ...]
    input_digest: str = ""
    launch: Mapping[str, str] = field(default_factory=dict)
    unsupported: str = ""
