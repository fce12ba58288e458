"""Waivers, a policy's results and a comparison put into a receipt, with the verdict that follows from all."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from datetime import date
from typing import Any

from qualify.canonical import canonical_bytes
from qualify.records import CaseRecord, jsonable
from qualify.toml_file import TomlFile
from qualify.waivers import Waiver, WaiverResult, apply_waivers, waivers_in
from reports import changes, gates, rederive
from reports.model import Body, Gate, PolicyFacts, Receipt
from reports.parts import rebuilt
from reports.reading import ReceiptError, reader, without_collector


def waived(receipt: Receipt, file: TomlFile, today: date) -> dict[str, Any]:
    """The raw body of a receipt with the waivers of a file applied.

    Raises:
        ReceiptError: waivers were applied already.
        UsageError: the file is no waiver file.
    """
    body = receipt.body
    if body.waivers or body.waiver_file:
        raise ReceiptError(
            "waivers were applied to this receipt already; apply them to the one that was run, which "
            "`qualify render` writes from the run's folder"
        )
    records, results = applied(waivers_in(file, today), receipt, body.cases, today)
    cases = [_changed(raw, before, after) for raw, before, after in zip(
        receipt.raw["cases"], body.cases, records, strict=True
    )]  # fmt: skip
    rows = [result.to_json() for result in results]
    named = {"name": file.name, "digest": file.digest, "day": today.isoformat()}
    return rebuilt({**receipt.raw, "cases": cases, "waivers": rows, "waiver_file": named})


def applied(
    waivers: Sequence[Waiver], receipt: Receipt, cases: Sequence[CaseRecord], today: date
) -> tuple[list[CaseRecord], list[WaiverResult]]:
    """Waivers applied to the cases of a receipt, under its plan and on its machines."""
    plan = receipt.body.plan
    return apply_waivers(
        waivers,
        cases,
        receipt.raw["environments"],
        profile=plan.profile,
        today=today,
        control_checks=rederive.control_checks(plan),
    )


def _changed(raw: Mapping[str, Any], before: CaseRecord, after: CaseRecord) -> Mapping[str, Any]:
    return raw if before is after else {**raw, "verdict": str(after.verdict), "reason": after.reason}


def gated(
    raw: Mapping[str, Any], policy: TomlFile, baseline: Receipt | None, receipt_id: str, today: date
) -> tuple[dict[str, Any], list[Gate]]:
    """The raw body with the policy and its results in it, and the results. Earlier ones are replaced.

    Args:
        raw: a body as JSON values.
        policy: the file of the rules.
        baseline: the earlier receipt that rules may compare with.
        receipt_id: id of the receipt that the body was read from.
        today: the day that waivers must be valid on.

    Raises:
        ReceiptError: a rule needs a baseline and there is none.
        UsageError: the file is no policy.
    """
    rules = json.loads(canonical_bytes(gates.rules_in(policy)))
    facts = PolicyFacts(policy.name, policy.digest, today.isoformat(), rules)
    with without_collector():
        body = replace(reader(Body)(raw, "receipt"), gates=(), comparison=None, policy=facts)
        ungated = rederive.judgement(body)
        body = replace(body, header=replace(body.header, verdict=ungated.overall, reasons=ungated.reasons))
        moved = changes.compare(baseline, Receipt(receipt_id, body, raw)) if baseline else None
        body = replace(body, comparison=moved)
        results = results_of(body)
        made = {
            **raw,
            "policy": asdict(facts),
            "gates": [asdict(gate) for gate in results],
            "comparison": jsonable(asdict(moved)) if moved else None,
        }
        return rederive.restated(made, replace(body, gates=tuple(results))), results


def results_of(body: Body) -> list[Gate]:
    """The results of the policy in a body, from its cases, waivers and comparison.

    Raises:
        ReceiptError: a rule needs a comparison and there is none.
        UsageError: the rules are no policy.
    """
    if body.policy is None:
        return []
    gates.checked(body.policy.rules, "the policy")
    ungated = replace(body, gates=())
    overall = rederive.judgement(ungated).overall
    today = date.fromisoformat(body.policy.day)
    return gates.apply_policy(body.policy.rules, gates.Scene(ungated, overall, body.comparison, today))
