"""Waivers: documented exceptions that are re-judged on every run. Pure but for reading the file; no torch.

A waiver turns a failing case into a waived one, and nothing else. It is red itself when it has expired, when
no executed case matches it, and when a case that it covers passes: an exception that is no longer needed
hides the next fault.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import date, timedelta
from pathlib import Path
from typing import Any

from qualify.errors import UsageError
from qualify.records import EXECUTED, FAILURES, CaseRecord, Verdict

MAX_BYTES = 2**20
MAX_DAYS = 366
"""A waiver lasts a year at most; then someone has to look again."""

TEXTS = ("cases", "owner", "issue", "reason")
OPTIONS = ("profile", "sm", "driver", "versions", "verdicts")
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


def read_waivers(path: Path, today: date) -> tuple[Waiver, ...]:
    """The waivers of a TOML file: an array of tables `[[waiver]]`.

    Raises:
        UsageError: no such file, no TOML, an unknown or missing key, a wrong type, a term beyond a year.
    """
    try:
        if path.stat().st_size > MAX_BYTES:
            raise UsageError(f"{path} must be at most {MAX_BYTES} bytes, got {path.stat().st_size}; split it")
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path} must be readable, got {error.strerror or error}; check the path") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} must be TOML, got {str(error)[:200]}; mend it") from error
    if set(document) - {"waiver"} or not isinstance(document.get("waiver", []), list):
        raise UsageError(f"{path} must hold [[waiver]] tables alone, got {sorted(document)[:5]}; mend it")
    return tuple(
        _waiver(row, f"{path}, waiver {i}", today) for i, row in enumerate(document.get("waiver", []), 1)
    )


def _waiver(row: Any, where: str, today: date) -> Waiver:
    if not isinstance(row, dict):
        raise UsageError(f"{where}: must be a table, got {type(row).__name__}; write [[waiver]]")
    unknown = sorted(set(row) - {*TEXTS, "expires", *OPTIONS})
    if unknown:
        raise UsageError(
            f"{where}: knows {', '.join((*TEXTS, 'expires', *OPTIONS))}, got {unknown[0]!r}; remove it"
        )
    for name in TEXTS:
        if not isinstance(row.get(name), str) or not row[name].strip():
            raise UsageError(f"{where}: must have {name} as text, got {row.get(name)!r}; say it")
    if not row["cases"].replace("*", "").replace("?", "").strip():
        raise UsageError(f"{where}: must name some cases, got {row['cases']!r}; narrow the pattern")
    return Waiver(
        **{name: row[name] for name in TEXTS},
        expires=_expiry(row.get("expires"), where, today),
        profile=_text(row, "profile", where),
        sm=_versions(row.get("sm", ""), where),
        driver=_versions(row.get("driver", ""), where),
        versions=_software(row.get("versions", {}), where),
        verdicts=_verdicts(row.get("verdicts", []), where),
    )


def _expiry(value: Any, where: str, today: date) -> date:
    try:
        day = value if type(value) is date else date.fromisoformat(value)
    except (TypeError, ValueError):
        raise UsageError(f"{where}: expires must be a day like 2027-01-31, got {value!r}; set one") from None
    if day > today + timedelta(days=MAX_DAYS):
        raise UsageError(f"{where}: must expire within {MAX_DAYS} days, got {day}; choose an earlier day")
    return day


def _text(row: Mapping[str, Any], name: str, where: str) -> str:
    value = row.get(name, "")
    if not isinstance(value, str):
        raise UsageError(f"{where}: {name} must be text, got {value!r}; quote it")
    return value


def _versions(value: Any, where: str) -> str:
    if not isinstance(value, str) or any(not _clause(part) for part in value.split(",") if value):
        raise UsageError(f"{where}: versions read like 9.0 or >=570,<580, got {value!r}; mend it")
    return value


def _software(value: Any, where: str) -> dict[str, str]:
    if not isinstance(value, dict):
        raise UsageError(
            f"{where}: versions must be a table of software, got {value!r}; write versions.triton = ..."
        )
    return {name: _versions(spec, where) for name, spec in value.items()}


def _verdicts(value: Any, where: str) -> tuple[Verdict, ...]:
    known = {str(v): v for v in FAILURES - {Verdict.STALE_WAIVER}}
    if not isinstance(value, list) or any(not isinstance(v, str) or v not in known for v in value):
        raise UsageError(
            f"{where}: verdicts must be among {', '.join(sorted(known))}, got {value!r}; mend it"
        )
    return tuple(known[v] for v in value)


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
    match = re.fullmatch(r"\s*(<=|>=|==|!=|<|>|)\s*(\d{1,9}(?:\.\d{1,9})*)\s*", part)
    return (match[1], _numbers(match[2])) if match else None


def _numbers(version: str) -> tuple[int, ...]:
    match = re.match(r"\d{1,9}(?:\.\d{1,9})*", version.partition("+")[0])
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def glob(pattern: str, text: str) -> bool:
    """Whether a pattern of `*` (anything) and `?` (one character) matches a whole text, in linear time.

    Pieces between stars are looked for from left to right, each at its first place: no backtracking, so that
    a pattern with many stars cannot hang its reader.
    """
    first, *others = [re.escape(piece).replace(r"\?", ".") for piece in pattern.split("*")]
    if not others:
        return bool(re.fullmatch(first, text, re.DOTALL))
    start = re.match(first, text, re.DOTALL)
    place = start.end() if start else -1
    for piece in others[:-1]:
        found = re.compile(piece, re.DOTALL).search(text, place) if place >= 0 else None
        place = found.end() if found else -1
    length = len(pattern) - pattern.rfind("*") - 1
    end = len(text) - length
    return 0 <= place <= end and bool(re.fullmatch(others[-1], text[end:], re.DOTALL))
