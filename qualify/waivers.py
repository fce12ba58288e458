"""Waivers: documented exceptions that are re-judged on every run. Pure; no torch.

A waiver turns a failing case into a waived one, and nothing else. It is red itself when it has expired, when
no executed case matches it, and when a case that it covers passes: an exception that is no longer needed
hides the next fault.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import date, timedelta
from functools import lru_cache
from typing import Any

from qualify.errors import UsageError
from qualify.records import EXECUTED, FAILURES, CaseRecord, Verdict
from qualify.toml_file import TomlFile, shown

MAX_PATTERN, MAX_WAIVERS = 2000, 1000
MAX_DAYS = 366
"""A waiver lasts a year at most; then someone has to look again."""

TEXTS = ("cases", "owner", "issue", "reason")
OPTIONS = ("profile", "sm", "driver", "versions", "verdicts")
DAY = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")
RESERVED = frozenset({"profile", "sm", "driver", "verdicts"})
"""What no software may be called: a scope names these beside the software."""

RELATIONS = {"<": (-1,), "<=": (-1, 0), "==": (0,), ">=": (0, 1), ">": (1,), "!=": (-1, 1)}


@dataclass(frozen=True)
class Waiver:
    """One documented exception.

    Attributes:
        cases: pattern of case ids, in which `*` stands for anything and `?` for one character; the whole id
            must match.
        owner, issue, reason: who answers for it, where it is tracked, why it is tolerable.
        expires: the last day on which it holds.
        profile: the profile that it belongs to; in another it is not looked at. Empty: every profile.
        sm, driver: what the case's machine must have, as versions: `9.0`, `<580`, `>=570,<580`.
        versions: software -> versions, likewise.
        verdicts: the failures that it excuses; empty: every failure.
    """

    cases: str
    owner: str
    issue: str
    reason: str
    expires: date
    profile: str = ""
    sm: str = ""
    driver: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    verdicts: tuple[Verdict, ...] = ()

    def matches(self, case_id: str) -> bool:
        """Whether the pattern matches a whole id."""
        return glob(self.cases, case_id)

    def scope(self) -> dict[str, str]:
        """Everything beside the pattern that limits it, as text."""
        named = {"profile": self.profile, "sm": self.sm, "driver": self.driver, **self.versions}
        named["verdicts"] = ", ".join(self.verdicts)
        return {name: value for name, value in named.items() if value}


@dataclass(frozen=True)
class WaiverResult:
    """What became of a waiver: `used`, or one of the red states `unused`, `expired`, `stale`."""

    waiver: Waiver
    state: str
    cases: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The row of the receipt."""
        w = self.waiver
        row = {name: value for name, value in asdict(w).items() if name in ("owner", "issue", "reason")}
        return {
            "pattern": w.cases,
            **row,
            "expires": w.expires.isoformat(),
            "scope": w.scope(),
            "state": self.state,
            "cases": list(self.cases),
        }


def waivers_in(file: TomlFile, today: date) -> tuple[Waiver, ...]:
    """The waivers of a TOML file: an array of tables `[[waiver]]`, see `waivers.schema.json`.

    A key that is there says something: what is empty is refused, since it would excuse more than it names.

    Raises:
        UsageError: an unknown or missing key, a wrong type, an empty value, a term beyond a year.
    """
    rows = file.document.get("waiver", [])
    if set(file.document) - {"waiver"} or not isinstance(rows, list):
        raise UsageError(
            f"{file.where} must hold [[waiver]] tables alone, got {shown(sorted(file.document))}; mend it"
        )
    if len(rows) > MAX_WAIVERS:
        raise UsageError(f"{file.where} must hold at most {MAX_WAIVERS} waivers, got {len(rows)}; split it")
    return tuple(_waiver(row, f"{file.where}, waiver {i}", today) for i, row in enumerate(rows, 1))


def _waiver(row: Any, where: str, today: date) -> Waiver:
    if not isinstance(row, dict):
        raise UsageError(f"{where}: must be a table, got {type(row).__name__}; write [[waiver]]")
    unknown = sorted(set(row) - {*TEXTS, "expires", *OPTIONS})
    if unknown:
        known = ", ".join((*TEXTS, "expires", *OPTIONS))
        raise UsageError(f"{where}: knows {known}, got {shown(unknown[0])!r}; remove it")
    texts: dict[str, Any] = {name: _text(row.get(name), name, where) for name in TEXTS}
    if len(texts["cases"]) > MAX_PATTERN:
        raise UsageError(
            f"{where}: cases must be at most {MAX_PATTERN} characters, got {len(texts['cases'])}; use stars"
        )
    if not texts["cases"].replace("*", "").replace("?", "").strip():
        raise UsageError(f"{where}: must name some cases, got {shown(row['cases'])!r}; narrow the pattern")
    read = {name: read(row[name], name, where) for name, read in READ.items() if name in row}
    return Waiver(**texts, expires=_expiry(row.get("expires"), where, today), **read)


def _expiry(value: Any, where: str, today: date) -> date:
    try:
        text = value if isinstance(value, str) and DAY.fullmatch(value) else ""
        day = value if type(value) is date else date.fromisoformat(text)
    except ValueError:
        raise UsageError(
            f"{where}: expires must be a day like 2027-01-31, got {shown(value)}; set one"
        ) from None
    if day > today + timedelta(days=MAX_DAYS):
        raise UsageError(f"{where}: must expire within {MAX_DAYS} days, got {day}; choose an earlier day")
    return day


def _text(value: Any, name: str, where: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise UsageError(f"{where}: must have {name} as text, got {shown(value)}; say it or leave it out")
    return value


def _versions(value: Any, name: str, where: str) -> str:
    if not isinstance(value, str) or any(_clause(part) is None for part in value.split(",")):
        raise UsageError(f"{where}: {name} must read like 9.0 or >=570,<580, got {shown(value)}; mend it")
    return value


def _software(value: Any, name: str, where: str) -> dict[str, str]:
    if not isinstance(value, dict) or not value or not RESERVED.isdisjoint(value):
        raise UsageError(
            f"{where}: versions must be a table of software, got {shown(value)}; write versions.triton = ..."
        )
    return {
        software: _versions(spec, f"versions.{shown(software)}", where) for software, spec in value.items()
    }


def _verdicts(value: Any, name: str, where: str) -> tuple[Verdict, ...]:
    known = {str(v): v for v in FAILURES - {Verdict.STALE_WAIVER}}
    if (
        not isinstance(value, list)
        or not value
        or any(not isinstance(v, str) or v not in known for v in value)
    ):
        raise UsageError(
            f"{where}: verdicts must be among {', '.join(sorted(known))}, got {shown(value)}; mend it"
        )
    return tuple(known[v] for v in value)


READ: Mapping[str, Callable[[Any, str, str], Any]] = {
    "profile": _text,
    "sm": _versions,
    "driver": _versions,
    "versions": _software,
    "verdicts": _verdicts,
}
"""How each optional key is read."""


def apply_waivers(
    waivers: Sequence[Waiver],
    records: Sequence[CaseRecord],
    environments: Sequence[Mapping[str, Any]],
    *,
    profile: str,
    today: date,
    control_checks: frozenset[str] = frozenset(),
) -> tuple[list[CaseRecord], list[WaiverResult]]:
    """The records with failures waived and passing ones marked stale, and what became of each waiver.

    Args:
        waivers: those of the file; a waiver of another profile is left out.
        records: every planned case.
        environments: rows of the receipt; a record is matched through its worker.
        profile: the profile that was run.
        today: the day that expiry is judged on.
        control_checks: checks whose cases judge the judge: no waiver reaches them.
    """
    machines = {str(e.get("worker", "")): e for e in environments}
    changed = {record.case_id: record for record in records}
    results = []
    for waiver in waivers:
        if waiver.profile not in ("", profile):
            continue
        touched = [
            r
            for r in records
            if r.verdict in EXECUTED
            and r.check not in control_checks
            and waiver.matches(r.case_id)
            and _in_scope(waiver, machines.get(r.worker))
        ]
        if today > waiver.expires:
            results.append(WaiverResult(waiver, "expired", tuple(r.case_id for r in touched)))
            continue
        excused = [r for r in touched if r.verdict in (waiver.verdicts or FAILURES)]
        stale = [r for r in touched if r.verdict is Verdict.PASSED]
        changed |= {r.case_id: _waived(r, waiver) for r in excused}
        changed |= {r.case_id: _stale(r, waiver) for r in stale}
        state = "stale" if stale else "used" if excused else "unused"
        results.append(WaiverResult(waiver, state, tuple(r.case_id for r in (stale or excused))))
    return [changed[record.case_id] for record in records], results


def _waived(record: CaseRecord, waiver: Waiver) -> CaseRecord:
    return replace(
        record,
        verdict=Verdict.WAIVED,
        reason=f"waived by {waiver.owner} ({waiver.issue}): {record.verdict}: {record.reason}",
    )


def _stale(record: CaseRecord, waiver: Waiver) -> CaseRecord:
    return replace(
        record,
        verdict=Verdict.STALE_WAIVER,
        reason=f"passes although {waiver.owner} ({waiver.issue}) waives it; remove or narrow the waiver",
    )


def _in_scope(waiver: Waiver, machine: Mapping[str, Any] | None) -> bool:
    wanted = {("gpu", "sm"): waiver.sm, ("gpu", "driver"): waiver.driver}
    wanted |= {("software", name): spec for name, spec in waiver.versions.items()}
    return all(satisfies(_seen(machine, *place), spec) for place, spec in wanted.items() if spec)


def _seen(machine: Mapping[str, Any] | None, section: str, name: str) -> str:
    value = (machine or {}).get(section, {}).get(name, "")
    return str((value.get("version") if isinstance(value, Mapping) else value) or "")


def satisfies(seen: str, spec: str) -> bool:
    """Whether a version satisfies every clause of `>=570,<580`; an unknown version satisfies none.

    Args:
        seen: a dotted version; what follows a `+` is not compared.
        spec: clauses set apart by commas; a bare version means that the leading parts are equal.
    """
    numbers = _numbers(seen)
    if not numbers:
        return False
    for part in spec.split(","):
        relation, wanted = _clause(part) or ("", ())
        if relation:
            width = max(len(numbers), len(wanted))
            left, right = (n + (0,) * (width - len(n)) for n in (numbers, wanted))
            if ((left > right) - (left < right)) not in RELATIONS[relation]:
                return False
        elif not wanted or numbers[: len(wanted)] != wanted:
            return False
    return True


def _clause(part: str) -> tuple[str, tuple[int, ...]] | None:
    match = re.fullmatch(r" *(<=|>=|==|!=|<|>|) *([0-9]{1,9}(?:\.[0-9]{1,9})*) *", part)
    return (match[1], _numbers(match[2])) if match else None


def _numbers(version: str) -> tuple[int, ...]:
    match = re.match(r"[0-9]{1,9}(?:\.[0-9]{1,9})*", version.partition("+")[0])
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def glob(pattern: str, text: str) -> bool:
    """Whether a pattern of `*` (anything) and `?` (one character) matches a whole text, in linear time.

    Pieces between stars are looked for from left to right, each at its first place: no backtracking, so that
    a pattern with many stars cannot hang its reader.
    """
    first, *others = _pieces(pattern)
    if not others:
        return bool(first.fullmatch(text))
    start = first.match(text)
    place = start.end() if start else -1
    for piece in others[:-1]:
        found = piece.search(text, place) if place >= 0 else None
        if found is None:
            return False
        place = found.end()
    end = len(text) - (len(pattern) - pattern.rfind("*") - 1)
    return 0 <= place <= end and bool(others[-1].fullmatch(text, end))


@lru_cache(maxsize=4096)
def _pieces(pattern: str) -> tuple[re.Pattern[str], ...]:
    """What stands between the stars of a pattern."""
    pieces = re.sub(r"\*+", "*", pattern).split("*")
    return tuple(re.compile(re.escape(piece).replace(r"\?", "."), re.DOTALL) for piece in pieces)
