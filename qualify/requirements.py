"""Requirements: what a machine must have to run a cell, as rows; a skip is a row and the value seen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Test = Literal["is", "at_least"]


@dataclass(frozen=True)
class Requirement:
    """A need of the cells that stand on one of the named levels of every named axis.

    Attributes:
        name: how skips refer to it.
        when: axis -> levels; a cell without one of these axes is not touched.
        fact: the fact about the machine that is looked at (`sm`, `sm_number`, `gpu_memory_gib`, ...).
        test: `is` (equal as text) or `at_least` (as a number).
        value: what is needed.
        because: why.
    """

    name: str
    when: Mapping[str, tuple[str, ...]]
    fact: str
    test: Test
    value: str
    because: str


@dataclass(frozen=True)
class Unmet:
    """Why a case cannot run here: the requirement, the value seen, and both in one line."""

    requirement: str
    value_seen: str
    reason: str


def unmet(levels: Mapping[str, str], facts: Mapping[str, Any], table: Sequence[Requirement]) -> Unmet | None:
    """The first requirement of a cell that a machine does not meet, or None.

    Args:
        levels: the cell, `regime` included.
        facts: what the machine was seen to have; a missing fact meets nothing.
        table: the requirements.
    """
    for row in table:
        if applies(row, levels) and not meets(row, facts.get(row.fact)):
            seen = str(facts.get(row.fact, "unknown"))
            words = "to be" if row.test == "is" else "of at least"
            reason = f"needs {row.fact} {words} {row.value}, got {seen}: {row.because}"
            return Unmet(row.name, seen, reason)
    return None


def applies(row: Requirement, levels: Mapping[str, str]) -> bool:
    """Whether a cell stands on one of the named levels of every named axis."""
    return all(levels.get(axis) in wanted for axis, wanted in row.when.items())


def meets(row: Requirement, seen: Any) -> bool:
    """Whether a value seen passes a requirement's test."""
    if seen is None:
        return False
    if row.test == "is":
        return str(seen) == row.value
    try:
        return float(seen) >= float(row.value)
    except ValueError:
        return False
