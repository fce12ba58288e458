"""The named wrong answers that every qualified subject is told apart from, where each of them can show."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from qualify.tables import WrongAnswerRow
from references.wrong_answers import WRONG_ANSWERS


@dataclass(frozen=True)
class Where:
    """What a need of a wrong answer says about where a run has to exclude it."""

    sites: tuple[str, ...] = ()
    formats: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()


NEEDS: Mapping[str, Where] = {
    "state": Where(sites=("state",)),
    "state_e4m3": Where(sites=("state",), formats=("e4m3",)),
    "state_int8": Where(sites=("state",), formats=("int8",)),
    "w": Where(sites=("w",)),
    "w_e4m3": Where(sites=("w",)),
    "w_not_bf16": Where(dtypes=("fp32", "fp16")),
    "beyond_fp16": Where(dtypes=("fp32", "bf16")),
}
"""Needs that are about sites, formats and carriers; the others are about shapes, which the cells choose."""


def _row(name: str) -> WrongAnswerRow:
    wrong = WRONG_ANSWERS[name]
    found = [NEEDS[need] for need in wrong.needs if need in NEEDS]
    return WrongAnswerRow(
        name,
        wrong.because,
        sites=tuple(dict.fromkeys(site for where in found for site in where.sites)),
        formats=tuple(dict.fromkeys(fmt for where in found for fmt in where.formats)),
        dtypes=next((where.dtypes for where in found if where.dtypes), ()),
    )


ROWS: tuple[WrongAnswerRow, ...] = tuple(_row(name) for name in WRONG_ANSWERS)
