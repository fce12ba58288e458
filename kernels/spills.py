"""How much a thread may spill to memory: a table of launch rows and architectures, each with its reason.

A row that is not named here must not spill at all.
"""

from __future__ import annotations

from dataclasses import dataclass

from kernels.launch import ANY_SM


@dataclass(frozen=True)
class Spill:
    """What a launch row may spill on some architectures.

    Attributes:
        row: the row's name.
        stack_bytes: the most stack of one thread, in any build of the row.
        because: why a launch that spills this much is taken.
        sm: smallest and largest SM, both included.
    """

    row: str
    stack_bytes: int
    because: str
    sm: tuple[int, int] = ANY_SM


SPILLS: tuple[Spill, ...] = ()


def allowance(row: str, sm: int) -> Spill:
    """The first entry of the table for a row on an SM; nothing may be spilled where there is none."""
    found = (spill for spill in SPILLS if spill.row == row and spill.sm[0] <= sm <= spill.sm[1])
    return next(found, Spill(row, 0, "no spill is justified"))
