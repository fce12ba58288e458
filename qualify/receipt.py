"""The receipt: a pure function of a run's plan and log."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from qualify.blank import blank
from qualify.canonical import canonical_bytes, digest
from qualify.exclusions import OP, exclusions
from qualify.execute import RECEIPT_NAME, in_shard, read_plan
from qualify.log import LOG_NAME, Log, read_log
from qualify.packing import SCHEMA, SCHEMA_VERSION, command_of, packed, unpacked, written
from qualify.plan import Plan
from qualify.records import CaseRecord, Comparison, Verdict, jsonable
from qualify.skips import allowed, overrun, tallies
from qualify.tables import WrongAnswerRow
from qualify.verdicts import NOT_SEEN, Exclusion, Judgement, SubjectOffer, judge

SCHEMA_FILE = Path(__file__).with_name("receipt.schema.json")

NO_RESULT = "the log has no result for this case"
STATISTIC_DIGITS = 4
MAX_COUNT = 1e12
FIGURE_DIGITS = 6
VALUE_DIGITS = 9


def assemble(folder: Path) -> dict[str, Any]:
    """The receipt of a run, finished or not: whatever is planned and has no result is recorded as not run.

    Its body holds every case whole; `write_receipt` packs it.

    Args:
        folder: the run's folder.

    Raises:
        UsageError: it holds no plan.
    """
    plan = read_plan(folder)
    return receipt_of(plan, read_log(folder / LOG_NAME))


def receipt_of(plan: Plan, log: Log) -> dict[str, Any]:
    """The receipt of a plan and a log."""
    run: dict[str, Any] = log.runs[0] if log.runs else {"time": 0.0}
    index, count = run.get("shard", (0, 1))
    shard = (int(index), int(count))
    records = complete(plan, log, shard)
    document = plan.document
    facts = _subject_facts(plan, log)
    controls = frozenset(row["name"] for row in document["checks"] if row["control"])
    op_checks = frozenset(row["name"] for row in document["checks"] if OP in row["needs"])
    wrong = [WrongAnswerRow(**_tuples(row)) for row in document["wrong_answers"]]
    found = tallies(records, plan.profile.skip_budgets, _levels_of(document["requirements"]), plan.profile.sm)
    excluded = exclusions(records, wrong, [s.name for s in plan.subjects], op_checks)
    judgement = judge(
        records,
        planned=len(plan.cases),
        subjects=[SubjectOffer(s["name"], tuple(s["offers"]), s["import_error"]) for s in facts],
        exclusions=excluded,
        uncovered=_uncovered(plan),
        overrun=overrun(found),
        control_checks=controls,
    )
    body = {
        "header": _header(plan, log, run, judgement, shard),
        "subjects": facts,
        "plan": plan_part(plan),
        "environments": list(log.environments.values()),
        "cases": [compact(record) for record in records],
        "controls": [_control(r) for r in records if r.check in controls],
        "discrimination": [_discrimination(e) for e in excluded],
        "skips": _skips(records, allowed(found)),
        "waivers": [],
        "gates": [],
        "comparison": None,
        "compile_tier": [compiled_row(r, c) for r in records for c in r.comparisons if c.kind == "build"],
        "manifest": {},
    }
    body = jsonable(body)
    return {"schema": SCHEMA, "schema_version": SCHEMA_VERSION, "id": digest(packed(body)), "body": body}


def write_receipt(folder: Path, receipt: Mapping[str, Any]) -> Path:
    """Writes `receipt.json` whole or not at all, and returns its path.

    Raises:
        OSError: the folder cannot be written.
    """
    path = folder / RECEIPT_NAME
    draft = path.with_suffix(".json.part")
    draft.write_bytes(written(canonical_bytes(packed(receipt["body"]))))
    return draft.replace(path)


def complete(plan: Plan, log: Log, shard: tuple[int, int] = (0, 1)) -> list[CaseRecord]:
    """A record for every planned case of a shard, in plan order; one without a result was not run."""
    origins = {s.name: s.given for s in plan.subjects}
    made = []
    for planned in in_shard(plan, shard):
        record = log.records.get(planned.case_id)
        if record is None:
            reason = log.stopped.get(planned.case.subject, NO_RESULT)
            record = blank(planned, Verdict.NOT_RUN, reason)
        given = origins.get(planned.case.subject, "")
        command = command_of(planned.case_id, planned.case.subject, given)
        made.append(replace(record, command=command, must_run=planned.case.must_run))
    return made


def compact(record: CaseRecord) -> dict[str, Any]:
    """A record as JSON without the fields that are on their defaults."""
    row = _without_defaults(record)
    row["comparisons"] = [_without_defaults(c) for c in map(_rounded, record.comparisons)]
    return row


def _without_defaults(record: CaseRecord | Comparison) -> dict[str, Any]:
    row = {}
    for f in fields(record):
        value = getattr(record, f.name)
        default = f.default_factory() if f.default_factory is not MISSING else f.default
        if default is MISSING or value != default:
            row[f.name] = asdict(value) if f.name == "worst" and value is not None else value
    row.pop("comparisons", None)
    return row


def _rounded(comparison: Comparison) -> Comparison:
    """The same comparison with short figures, where that does not change whether it passes."""
    worst = comparison.worst
    made = replace(
        comparison,
        error=_short(comparison.error, FIGURE_DIGITS),
        budget=_short(comparison.budget, FIGURE_DIGITS),
        statistics={k: _counted(v) for k, v in comparison.statistics.items()},
        discrimination={k: _short(v, STATISTIC_DIGITS) for k, v in comparison.discrimination.items()},
        worst=worst
        and replace(
            worst, expected=_short(worst.expected, VALUE_DIGITS), actual=_short(worst.actual, VALUE_DIGITS)
        ),
    )
    if made.passed == comparison.passed:
        return made
    return replace(made, error=comparison.error, budget=comparison.budget)


def _counted(value: float) -> float:
    """A figure in four digits; a count is kept whole."""
    whole = abs(value) < MAX_COUNT and value == int(value)
    return value if whole else _short(value, STATISTIC_DIGITS)


def _short(value: float, digits: int) -> float:
    return float(f"{value:.{digits}g}") if math.isfinite(value) else value


def _header(
    plan: Plan, log: Log, run: Mapping[str, Any], judgement: Judgement, shard: Sequence[int]
) -> dict[str, Any]:
    end = max((e["time"] for e in log.ended), default=run["time"])
    return {
        "time": datetime.fromtimestamp(run["time"], UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "harness": run.get("harness", {"name": "gdn-qualify", "version": "unknown"}),
        "command": run.get("command", ""),
        "profile": plan.profile.name,
        "verdict": judgement.overall,
        "reasons": list(judgement.reasons),
        "duration_s": round(end - run["time"], 3),
        "shard": {"index": shard[0], "count": shard[1]} if shard[1] > 1 else None,
        "shards": [],
    }


def plan_part(plan: Plan) -> dict[str, Any]:
    """What a receipt says of a plan."""
    covers = [
        {
            "scope": f"{c.check} on {c.sm}",
            "check": c.check,
            "sm": c.sm,
            "axes": list(c.proof.axes),
            "strength": c.proof.strength,
            "covered": c.proof.covered,
            "possible": c.proof.possible,
        }
        for c in plan.covers
    ]
    return {
        "profile": plan.profile.name,
        "sm": plan.profile.sm,
        "digest": plan.digest,
        "cases": len(plan.cases),
        "seed": plan.seed,
        "axes": plan.axes,
        "must_run": sum(p.case.must_run for p in plan.cases),
        "covers": covers,
        "checks": plan.document["checks"],
        "constraints": plan.document["constraints"],
        "requirements": plan.document["requirements"],
        "skip_budgets": [asdict(row) for row in plan.profile.skip_budgets],
        "wrong_answers": plan.document["wrong_answers"],
    }


def _subject_facts(plan: Plan, log: Log) -> list[dict[str, Any]]:
    return [
        {
            **(
                log.subjects.get(s.name)
                or {
                    "name": s.name,
                    "origin": Path(s.given).name,
                    "offers": [],
                    "import_error": log.stopped.get(s.name, NOT_SEEN),
                }
            ),
            **({"given": s.given} if s.given not in ("", s.name) else {}),
            **({"interpreted": True} if s.interpreted else {}),
        }
        for s in plan.subjects
    ]


def _uncovered(plan: Plan) -> list[str]:
    return [
        f"the cells of {c.check} on {c.sm} cover {c.proof.covered} of {c.proof.possible} tuples of "
        f"{c.proof.strength}, {c.proof.invalid} cells are invalid"
        for c in plan.covers
        if not c.proof.complete
    ]


def _control(record: CaseRecord) -> dict[str, Any]:
    caught = record.verdict is Verdict.PASSED
    found = [c for c in record.comparisons if c.kind == "control"]
    return {
        "name": record.levels.get("fault", record.check),
        "dtype": record.levels.get("dtype", ""),
        "fault": next((c.because for c in found), ""),
        "caught": caught,
        "caught_by": [
            {"case_id": record.case_id, "tensor": c.derivation, "kind": c.kind} for c in found if c.passed
        ],
        "because": record.reason,
    }


def _discrimination(exclusion: Exclusion) -> dict[str, Any]:
    return {
        "wrong_answer": exclusion.wrong_answer,
        "subject": exclusion.subject,
        "dtype": exclusion.dtype,
        "site": exclusion.site,
        "format": exclusion.format,
        "excluded": bool(exclusion.evidence),
        "best": exclusion.evidence[0][3] if exclusion.evidence else 0.0,
        "by": [
            {"case_id": case_id, "tensor": tensor, "kind": kind, "value": value}
            for case_id, tensor, kind, value in exclusion.evidence
        ],
        "because": "" if exclusion.evidence else "no comparison that passed tells it apart",
    }


def compiled_row(record: CaseRecord, build: Comparison) -> dict[str, Any]:
    """A comparison of kind `build` as a row of the table of what was compiled without running."""
    kernel, _, variant = build.tensor.partition(":")
    sm = int(record.levels["target"].removeprefix("sm"))
    return {
        "kernel": kernel,
        "sm": f"{sm // 10}.{sm % 10}",
        "variant": variant,
        "registers": int(build.statistics["registers"]),
        "spills": int(build.statistics["spilled_bytes"]),
        "shared_bytes": int(build.statistics["shared_bytes"]),
        "conversion": build.derivation.partition("; ")[0],
        "passed": build.passed,
        "because": build.because,
    }


def _levels_of(requirements: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Sequence[str]]]:
    return {row["name"]: row["when"] for row in requirements}


def _skips(records: Sequence[CaseRecord], budgets: Mapping[str, int | None]) -> list[dict[str, Any]]:
    grouped: dict[tuple[str, str], list[CaseRecord]] = {}
    for record in records:
        if record.verdict in (Verdict.SKIPPED, Verdict.UNSUPPORTED, Verdict.EXCLUDED):
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


def _tuples(row: Mapping[str, Any]) -> dict[str, Any]:
    return {k: tuple(v) if isinstance(v, list) else v for k, v in row.items()}


def read_receipt_file(path: Path) -> dict[str, Any]:
    """A receipt as JSON with every case whole, for looking one up; `qualify verify` is what checks one.

    Raises:
        UsageError: the file is no receipt, or not the canonical text of one.
    """
    from qualify.errors import UsageError

    try:
        data = path.read_bytes()
        receipt = json.loads(data)
        if (receipt["schema"], receipt["schema_version"]) != (SCHEMA, SCHEMA_VERSION):
            raise ValueError("another schema or another version of it")
        if data != written(canonical_bytes(receipt["body"])):
            raise ValueError("other bytes than the canonical ones: it was edited or formatted")
        receipt["body"] = unpacked(receipt["body"])
    except (OSError, ValueError, KeyError, TypeError, ArithmeticError, RecursionError) as error:
        raise UsageError(f"{path} must be a receipt, got something else ({error}); check the path") from error
    return receipt  # type: ignore[no-any-return]
