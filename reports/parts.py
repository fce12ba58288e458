"""The parts of a receipt that follow from its cases, as rows of JSON; and receipts written whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from qualify.canonical import canonical_bytes, digest_bytes
from qualify.packing import packed, written
from qualify.records import CaseRecord, Verdict, jsonable
from qualify.skips import allowed
from qualify.verdicts import Exclusion
from reports.model import Body, Control, Skip
from reports.reading import ReceiptError, reader
from reports.rederive import control_checks, excluded, restated, skip_tallies

IDLE = (Verdict.SKIPPED, Verdict.UNSUPPORTED, Verdict.EXCLUDED)


def control_row(record: CaseRecord) -> dict[str, Any]:
    """The row of a planted fault."""
    found = [c for c in record.comparisons if c.kind == "control"]
    return {
        "name": record.levels.get("fault", record.check),
        "dtype": record.levels.get("dtype", ""),
        "fault": next((c.because for c in found), ""),
        "caught": record.verdict is Verdict.PASSED,
        "caught_by": [
            {"case_id": record.case_id, "tensor": c.derivation, "kind": c.kind} for c in found if c.passed
        ],
        "because": record.reason,
    }


def wrong_answer_row(found: Exclusion) -> dict[str, Any]:
    """The row of a wrong answer that had to be ruled out."""
    return {
        "wrong_answer": found.wrong_answer,
        "subject": found.subject,
        "dtype": found.dtype,
        "site": found.site,
        "format": found.format,
        "excluded": bool(found.evidence),
        "best": found.evidence[0][3] if found.evidence else 0.0,
        "by": [dict(zip(("case_id", "tensor", "kind", "value"), e, strict=True)) for e in found.evidence],
        "because": "" if found.evidence else "no comparison that passed tells it apart",
    }


def skip_rows(records: Sequence[CaseRecord], budgets: Mapping[str, int | None]) -> list[dict[str, Any]]:
    """Skips by rule and value seen, with the budget of each rule."""
    grouped: dict[tuple[str, str], list[CaseRecord]] = {}
    for record in records:
        if record.verdict in IDLE:
            grouped.setdefault((record.requirement, record.value_seen), []).append(record)
    return [
        {
            "requirement": requirement,
            "value_seen": seen,
            "reason": found[0].reason,
            "cases": len(found),
            "budget": budgets.get(requirement),
        }
        for (requirement, seen), found in grouped.items()
    ]


def controls(body: Body) -> tuple[Control, ...]:
    """The planted faults as the cases tell of them."""
    checks = control_checks(body.plan)
    rows = [control_row(case) for case in body.cases if case.check in checks]
    found: tuple[Control, ...] = reader(tuple[Control, ...])(jsonable(rows), "controls")
    return found


def skips(body: Body) -> tuple[Skip, ...]:
    """What the cases say was kept from running, under the budgets of the plan."""
    found: tuple[Skip, ...] = reader(tuple[Skip, ...])(
        skip_rows(body.cases, allowed(skip_tallies(body))), "skips"
    )
    return found


def rebuilt(raw: Mapping[str, Any], body: Body | None = None) -> dict[str, Any]:
    """A raw body with controls, wrong answers, skips, verdict and reasons as its cases say.

    Args:
        raw: a body whose cases, waivers or gates were changed.
        body: the same body, where it was read already.
    """
    body = body or reader(Body)(raw, "receipt")
    controls = control_checks(body.plan)
    made = {
        **raw,
        "controls": jsonable([control_row(case) for case in body.cases if case.check in controls]),
        "discrimination": jsonable([wrong_answer_row(found) for found in excluded(body, body.cases)]),
        "skips": skip_rows(body.cases, allowed(skip_tallies(body))),
    }
    return restated(made, body)


def write_receipt(path: Path, body: Mapping[str, Any]) -> str:
    """Writes a receipt around a body whose cases are whole; the file whole or not at all. Returns its id.

    Raises:
        ReceiptError: the file cannot be written.
    """
    text = canonical_bytes(packed(body))
    write_file(path, written(text))
    return digest_bytes(text)


def write_file(path: Path, data: bytes | str) -> None:
    """Writes a file whole or not at all.

    Raises:
        ReceiptError: it cannot be written.
    """
    draft = path.with_name(path.name + ".part")
    try:
        draft.write_bytes(data.encode("utf-8", "replace") if isinstance(data, str) else data)
        draft.replace(path)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise ReceiptError(
            f"{path}: could not be written ({error.strerror or error}); check the folder"
        ) from error
