"""Which wrong answers a run had to exclude, and the comparisons that exclude them. Pure; no torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from qualify.records import EXECUTED, CaseRecord, Comparison, Verdict
from qualify.tables import WrongAnswerRow
from qualify.verdicts import Exclusion

OP = "chunk_gated_delta_rule"
SITES: Mapping[str, tuple[str, ...]] = {"state": ("state",), "w": ("w",), "both": ("state", "w"), "none": ()}
"""Level of the axis `sites` -> the sites that are on."""

W_FORMAT = "e4m3"
MAX_EVIDENCE = 1

Place = tuple[str, str, str]
"""dtype, site, format; a wrong answer of no site in particular leaves the last two empty."""


def exclusions(
    records: Sequence[CaseRecord],
    rows: Sequence[WrongAnswerRow],
    subjects: Sequence[str],
    op_checks: frozenset[str],
) -> list[Exclusion]:
    """Every wrong answer at every place that the op was executed at, with the strongest evidence against it.

    Args:
        records: of the whole run.
        rows: the named wrong answers.
        subjects: names of the subjects judged.
        op_checks: the checks that run the op.
    """
    found = []
    for subject in subjects:
        own = [r for r in records if r.subject == subject and r.verdict in EXECUTED]
        places = {place: None for r in own if r.check in op_checks for place in places_of(r.levels)}
        for row in rows:
            for place in _required(row, places):
                found.append(Exclusion(subject, row.name, *place, evidence=_evidence(row.name, place, own)))
    return found


def places_of(levels: Mapping[str, str]) -> Iterator[Place]:
    """The dtype alone, and dtype, site and format for every site that is on."""
    dtype = levels.get("dtype", "")
    yield dtype, "", ""
    for site in SITES.get(levels.get("sites", "none"), ()):
        yield dtype, site, W_FORMAT if site == "w" else levels.get("format", "e4m3")


def _required(row: WrongAnswerRow, places: Mapping[Place, None]) -> list[Place]:
    return [
        (dtype, site, fmt)
        for dtype, site, fmt in places
        if (site in row.sites if row.sites else not site)
        and (not row.formats or fmt in row.formats)
        and (not row.dtypes or dtype in row.dtypes)
    ]


def _evidence(
    name: str, place: Place, records: Sequence[CaseRecord]
) -> tuple[tuple[str, str, str, float], ...]:
    found = [
        (record.case_id, c.tensor, c.kind, _strength(c, name))
        for record in records
        if record.verdict is Verdict.PASSED and _speaks_for(record.levels, place)
        for c in record.comparisons
        if c.passed and (name in c.excluded or c.discrimination.get(name, 0.0) > 1.0)
    ]
    return tuple(sorted(found, key=lambda row: -row[3])[:MAX_EVIDENCE])


def _speaks_for(levels: Mapping[str, str], place: Place) -> bool:
    """Whether a case ran at a place; an axis that its check does not vary speaks for every level."""
    dtype, site, fmt = place
    if levels.get("dtype", dtype) != dtype:
        return False
    if not site:
        return True
    on = SITES.get(levels["sites"], ()) if "sites" in levels else (site,)
    formats = (W_FORMAT,) if site == "w" else (levels.get("format", fmt),)
    return site in on and fmt in formats


def _strength(comparison: Comparison, name: str) -> float:
    """Discrimination where there is a figure; without bound for an exclusion that has no tolerance."""
    return comparison.discrimination.get(name, math.inf)
