"""Waivers, a policy's results and a comparison put into a receipt, with the verdict that follows from all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from datetime import date
from pathlib import Path
from typing import Any

from qualify.records import CaseRecord, jsonable
from qualify.waivers import apply_waivers, read_waivers
from reports import changes, gates, rederive
from reports.model import Body, Gate, Receipt
from reports.parts import rebuilt
from reports.reading import ReceiptError, reader, without_collector


def waived(receipt: Receipt, path: Path, today: date) -> dict[str, Any]:
    """The raw body of a receipt with the waivers of a file applied.

    Raises:
        ReceiptError: waivers were applied already.
        UsageError: the file is no waiver file.
    """
    body = receipt.body
    if body.waivers:
        raise ReceiptError("waivers were applied to this receipt already; apply them to the one that was run")
    records, results = apply_waivers(
        read_waivers(path, today),
        body.cases,
        receipt.raw["environments"],
        profile=body.plan.profile,
        today=today,
        control_checks=rederive.control_checks(body.plan),
    )
    cases = [_changed(raw, before, after) for raw, before, after in zip(
        receipt.raw["cases"], body.cases, records, strict=True
    )]  # fmt: skip
    return rebuilt({**receipt.raw, "cases": cases, "waivers": [result.to_json() for result in results]})


def _changed(raw: Mapping[str, Any], before: CaseRecord, after: CaseRecord) -> Mapping[str, Any]:
    return raw if before is after else {**raw, "verdict": str(after.verdict), "reason": after.reason}


def gated(
    raw: Mapping[str, Any], policy: Mapping[str, Any], baseline: Receipt | None, receipt_id: str, today: date
) -> tuple[dict[str, Any], list[Gate]]:
    """The raw body with the policy's results in it, and the results. Earlier results are replaced.

    Args:
        raw: a body as JSON values.
        policy: the rules.
        baseline: the earlier receipt that rules may compare with.
        receipt_id: id of the receipt that the body was read from.
        today: the day that waivers must be valid on.

    Raises:
        ReceiptError: a rule needs a baseline and there is none.
    """
    with without_collector():
        body = replace(reader(Body)(raw, "receipt"), gates=(), comparison=None)
        moved = changes.compare(baseline, Receipt(receipt_id, body, raw)) if baseline else None
        scene = gates.Scene(body, rederive.judgement(body).overall, moved, today)
        results = gates.apply_policy(policy, scene)
        made = {
            **raw,
            "gates": [asdict(gate) for gate in results],
            "comparison": jsonable(asdict(moved)) if moved else None,
        }
        return rederive.restated(made, replace(body, gates=tuple(results), comparison=moved)), results
