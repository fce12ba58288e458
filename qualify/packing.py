"""The body of a receipt as it lies in a file, where nothing is said twice; and unpacked again.

Packed, a case holds its id and what cannot be derived from it; what many cases share is a row of one of five
tables, named by its index: why a case has no result, how a comparison is judged, which launch configurations
ran, which wrong answers were ruled out, on which GPU. A field that is absent is empty, zero or false. The
packed form of a body is unique: `packed(unpacked(x)) == x` for everything that was packed here, and for
nothing else.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from qualify.canonical import canonical_bytes, digest_bytes
from qualify.case import case_of_id
from qualify.records import Verdict, jsonable

SCHEMA = "gdn-qualify/receipt"
SCHEMA_VERSION = 2
"""2: cases are packed, see below. 1 said everything of every case."""

Row = Mapping[str, Any]

REASONS, RULES, LAUNCHES, RULED_OUT, GPUS = "reasons", "rules", "launches", "ruled_out", "gpus"
TABLES = (REASONS, RULES, LAUNCHES, RULED_OUT, GPUS)

WHY: Mapping[str, Any] = {"reason": "", "requirement": "", "value_seen": ""}
"""What a row of `reasons` holds, and what is left out of it."""

OWN: Mapping[str, Any] = {
    "input_digest": "",
    "duration_s": 0,
    "peak_memory_bytes": 0,
    "worker": "",
    "must_run": False,
}
"""What a case says for itself beside its id and verdict, and what is left out of it."""

JUDGED_BY: Mapping[str, Any] = {
    "kind": None,
    "metric": None,
    "derivation": None,
    "failure": str(Verdict.FAILED_NUMERIC),
}
"""What a row of `rules` says of every comparison under it."""

MEASURED: Mapping[str, Any] = {
    "error": 0,
    "budget": 0,
    "nonfinite": {},
    "discrimination": {},
    "looks_like": None,
    "because": "",
}
"""What a comparison says for itself beside its tensor."""

DERIVED = frozenset({"check", "subject", "levels", "regime", "seed", "command"})
CASE_FIELDS = (
    frozenset({"case_id", "verdict", "comparisons", "launch", "gpu"}) | DERIVED | set(WHY) | set(OWN)
)
COMPARISON_FIELDS = (
    frozenset({"tensor", "statistics", "worst", "excluded", "passed", "margin"})
    | set(JUDGED_BY)
    | set(MEASURED)
)


def command_of(case_id: str, subject: str, given: str) -> str:
    """The command that runs a case again.

    Args:
        case_id: the case.
        subject: its subject's name.
        given: what the user wrote to name the subject; empty or the name itself where that suffices.
    """
    command = f"qualify rerun {shlex.quote(case_id)}"
    return command + (f" --subject {shlex.quote(given)}" if given not in ("", subject) else "")


def packed(body: Row) -> dict[str, Any]:
    """The body of a receipt as it is written.

    Args:
        body: the body with every case whole; a field that is on its default may be absent.

    Raises:
        ValueError, TypeError, KeyError: a case that contradicts its id or has a field that no case has.
    """
    tables: dict[str, _Table] = {name: _Table() for name in TABLES}
    commands = _commands(body)
    cases = [_packed_case(row, tables, commands) for row in body["cases"]]
    rows = {name: table.rows for name, table in tables.items() if table.rows}
    return {**body, "cases": cases, **({"tables": rows} if rows else {})}


def unpacked(body: Row) -> dict[str, Any]:
    """The body of a receipt with every case whole, and with whether each comparison passes and its margin.

    Raises:
        ValueError, TypeError, ArithmeticError: it is not laid out as `packed` does.
    """
    whole = dict(body)
    found = whole.pop("tables", {})
    _expect(type(found) is dict, "tables", "an object", found)
    tables = {name: _listed(found.get(name, []), name) for name in TABLES}
    rules = [_Rule(row) for row in tables[RULES]]
    commands = _commands(body)
    whole["cases"] = [
        _whole_case(_object(row, "a case"), tables, rules, commands)
        for row in _listed(body.get("cases"), "cases")
    ]
    return whole


def written(text: bytes) -> bytes:
    """The bytes of the file of a receipt: canonical JSON (RFC 8785) and one newline.

    Args:
        text: the canonical JSON of the body, packed.
    """
    made = {"id": digest_bytes(text), "schema": SCHEMA, "schema_version": SCHEMA_VERSION}
    return b'{"body":' + text + b"," + canonical_bytes(made)[1:] + b"\n"


class _Table:
    """Rows by the order of their first use."""

    def __init__(self) -> None:
        self.rows: list[Any] = []
        self._places: dict[Any, int] = {}

    def place(self, key: Any, row: Callable[[], Any]) -> int:
        """The index of a row, which is made when its key is new."""
        found = self._places.get(key)
        if found is None:
            found = self._places[key] = len(self.rows)
            self.rows.append(row())
        return found


def _packed_case(row: Row, tables: Mapping[str, _Table], commands: Callable[[str, str], str]) -> Row:
    case_id = row["case_id"]
    _expect(set(row) <= CASE_FIELDS, case_id, "a case without unknown fields", sorted({*row} - CASE_FIELDS))
    for name, value in _derived(case_id, commands).items():
        _expect(
            row.get(name, value) == value, case_id, f"a case whose {name} is that of its id", row.get(name)
        )
    made = {"case_id": case_id, "verdict": str(row["verdict"]), **_kept(row, OWN)}
    why = _kept(row, WHY)
    if why:
        made["why"] = tables[REASONS].place(tuple(why.items()), lambda: why)
    if row.get("launch"):
        launch = dict(sorted(row["launch"].items()))
        made["launch"] = tables[LAUNCHES].place(tuple(launch.items()), lambda: launch)
    if row.get("gpu"):
        made["gpu"] = tables[GPUS].place(row["gpu"], lambda: row["gpu"])
    if row.get("comparisons"):
        made["comparisons"] = [_packed_comparison(c, tables) for c in row["comparisons"]]
    return made


def _packed_comparison(row: Row, tables: Mapping[str, _Table]) -> Row:
    _expect(row.keys() <= COMPARISON_FIELDS, "a comparison", "without unknown fields", row)
    statistics, worst = row.get("statistics") or {}, row.get("worst")
    figures, place = tuple(sorted(statistics)), tuple(sorted(worst["place"])) if worst else ()
    key = (*[row.get(name, default) for name, default in JUDGED_BY.items()], figures, place)
    made = {"tensor": row["tensor"], "rule": tables[RULES].place(key, lambda: _rule(row, figures, place))}
    made.update(_kept(row, MEASURED))
    if figures:
        made["statistics"] = [statistics[name] for name in figures]
    if worst:
        made["worst"] = [worst["expected"], worst["actual"], *[worst["place"][name] for name in place]]
    names = row.get("excluded")
    if names:
        made["excluded"] = tables[RULED_OUT].place(tuple(names), lambda: list(names))
    return made


def _rule(row: Row, figures: Sequence[str], place: Sequence[str]) -> Row:
    """The row of `rules` that a comparison stands under."""
    shown = {"statistics": list(figures), "place": list(place)}
    return {**_kept(row, JUDGED_BY), **{name: names for name, names in shown.items() if names}}


def _kept(row: Row, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a row that are not on their defaults."""
    return {name: row[name] for name, default in defaults.items() if row.get(name, default) != default}


def _whole_case(
    row: Row, tables: Mapping[str, list[Any]], rules: Sequence[_Rule], commands: Callable[[str, str], str]
) -> dict[str, Any]:
    made = dict(row)
    made["comparisons"] = [
        _whole_comparison(_object(c, "a comparison"), tables[RULED_OUT], rules)
        for c in _listed(row.get("comparisons", []), "comparisons")
    ]
    if "why" in row:
        made |= _object(_at(tables[REASONS], made.pop("why"), REASONS), REASONS)
    if "launch" in row:
        made["launch"] = _at(tables[LAUNCHES], row["launch"], LAUNCHES)
    if "gpu" in row:
        made["gpu"] = _at(tables[GPUS], row["gpu"], GPUS)
    case_id = row.get("case_id")
    _expect(type(case_id) is str, "case_id", "text", case_id)
    made |= _derived(str(case_id), commands)
    made["case_id"], made["verdict"] = case_id, row.get("verdict")
    return made


def _whole_comparison(row: Row, ruled_out: list[Any], rules: Sequence[_Rule]) -> dict[str, Any]:
    made = {"error": 0, "budget": 0, **row}
    rule: _Rule = _at(rules, made.pop("rule", None), RULES)
    made |= rule.said
    values = _listed(row.get("statistics", []), "statistics")
    _expect(len(values) == len(rule.statistics), "statistics", "as many as their rule names", len(values))
    made["statistics"] = dict(zip(rule.statistics, values, strict=True))
    if "worst" in row:
        worst = _listed(row["worst"], "worst")
        wanted = 2 + len(rule.place)
        _expect(len(worst) == wanted, "worst", "two values and a place as its rule names it", len(worst))
        place = dict(zip(rule.place, worst[2:], strict=True))
        made["worst"] = {"expected": worst[0], "actual": worst[1], "place": place}
    if "excluded" in row:
        made["excluded"] = _at(ruled_out, row["excluded"], RULED_OUT)
    made["passed"], made["margin"] = _judged(float(made["error"]), float(made["budget"]))
    return made


def _judged(error: float, budget: float) -> tuple[bool, float | str]:
    """Whether a comparison passes, and its margin as JSON; both follow from error and budget."""
    margin = error / budget if budget > 0 else 0.0 if error == 0 else math.inf
    return error <= budget, jsonable(margin)


class _Rule:
    """A row of `rules`, read."""

    def __init__(self, row: Any) -> None:
        said = dict(_object(row, RULES))
        self.statistics = _names(said.pop("statistics", []), "statistics")
        self.place = _names(said.pop("place", []), "place")
        self.said = said


def _derived(case_id: str, commands: Callable[[str, str], str]) -> dict[str, Any]:
    case = case_of_id(case_id)
    return {
        "check": case.check,
        "subject": case.subject,
        "levels": dict(case.levels),
        "regime": case.regime,
        "seed": case.seed,
        "command": commands(case_id, case.subject),
    }


def _commands(body: Row) -> Callable[[str, str], str]:
    """`command_of` for the subjects of a body."""
    given = {
        row.get("name"): str(row.get("given", ""))
        for row in _listed(body.get("subjects"), "subjects")
        if type(row) is dict and type(row.get("name")) is str
    }
    return lambda case_id, subject: command_of(case_id, subject, given.get(subject, ""))


def _expect(holds: bool, where: str, rule: str, value: object) -> None:
    if not holds:
        raise ValueError(
            f"{where} must be {rule}, got {str(value)[:120]!r}; the file was edited or is foreign"
        )


def _object(value: Any, where: str) -> Row:
    _expect(type(value) is dict, where, "an object", value)
    return value  # type: ignore[no-any-return]


def _listed(value: Any, where: str) -> list[Any]:
    _expect(type(value) is list or type(value) is tuple, where, "a list", value)
    return value  # type: ignore[no-any-return]


def _names(value: Any, where: str) -> list[str]:
    names = _listed(value, where)
    distinct = all(type(name) is str for name in names) and len(set(names)) == len(names)
    _expect(distinct, where, "a list of different names", names)
    return names


def _at(rows: Sequence[Any], index: Any, table: str) -> Any:
    _expect(type(index) is int and 0 <= index < len(rows), "an index", f"one of a row of {table}", index)
    return rows[index]
