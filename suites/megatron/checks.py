"""The checks: what the processes of a scenario found, as comparisons."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qualify.case import Case, CheckOutput
from qualify.records import Comparison
from qualify.subjects import Subject
from suites.megatron.faults import AMONG_RANKS, FAULTS
from suites.megatron.processes import Results

FAULTS_MODULE = "suites.megatron.faults"


def run(case: Case, subject: Subject) -> CheckOutput:
    """Runs the scenario that the check is named after: `megatron.sites` runs `sites`.

    Args:
        case: axes `tp`, and where the scenario varies them `sites`, `recompute` and `sequence`.
        subject: its module names an adapter in `ADAPTER`, or is one.
    """
    adapter = adapter_of(subject)
    if not adapter:
        return CheckOutput((), unsupported="the subject has neither ADAPTER nor convert and revert")
    ranks = case.levels["tp"]
    asked = request(case.check.partition(".")[2], case.levels, adapter)
    found = result_of(asked, ranks, together(adapter, ranks))
    if found["unsupported"]:
        return CheckOutput((), unsupported=found["unsupported"])
    return CheckOutput(tuple(comparison(row) for row in found["findings"]), launch=facts(found))


def control(case: Case, subject: Subject) -> CheckOutput:
    """Runs an adapter with a planted fault; caught means that a finding does not hold."""
    fault = case.levels["fault"]
    scenario, _ = FAULTS[fault]
    ranks = case.levels["tp"]
    found = result_of(request(scenario, {}, f"{FAULTS_MODULE}:{fault}"), ranks, planted(ranks))
    failing = [row for row in map(comparison, found["findings"]) if not row.passed]
    caught = f"megatron.{scenario}: {failing[0].tensor}" if failing else "nothing"
    return CheckOutput(
        (
            Comparison(
                tensor=fault,
                kind="control",
                metric="missed",
                error=0.0 if failing else 1.0,
                budget=0.0,
                derivation=f"caught by {caught}",
                because="" if failing else f"every finding of megatron.{scenario} holds",
            ),
        ),
        launch=facts(found),
    )


def facts(found: Mapping[str, Any]) -> dict[str, str]:
    """What ran, and how long it took."""
    return {**found["facts"], "seconds": f"{found.get('seconds', 0.0):.1f}"}


def out_of_scope(case: Case, subject: Subject) -> CheckOutput:
    """Never runs: its cases stand in a receipt as what it says nothing about."""
    return CheckOutput((), unsupported=f"{case.levels['scope']} is not qualified here")


def adapter_of(subject: Subject) -> str:
    """Where the subject's adapter is loaded from; empty when it has none."""
    named = getattr(subject.module, "ADAPTER", "")
    if named:
        return str(named)
    whole = all(callable(getattr(subject.module, name, None)) for name in ("convert", "revert"))
    return subject.origin if whole else ""


def comparison(row: Mapping[str, Any]) -> Comparison:
    """A finding as a comparison."""
    error, budget = float(row["error"]), float(row["budget"])
    return Comparison(
        tensor=row["what"],
        kind="exact" if budget == 0.0 else "relation",
        metric="differences" if budget == 0.0 else "rel_l2",
        error=error,
        budget=budget,
        derivation=row["because"],
        because="" if error <= budget else f"{row['what']}: does not hold, {row['because']}",
    )


def request(scenario: str, levels: Mapping[str, str], adapter: str) -> dict[str, Any]:
    """What the processes are asked for by a cell."""
    return {
        "scenario": scenario,
        "sites": levels.get("sites", "both"),
        "recompute": levels.get("recompute", "none"),
        "sequence_parallel": levels.get("sequence") == "on",
        "adapter": adapter,
    }


result_of = Results()
"""The results of this process."""


def together(adapter: str, ranks: str) -> list[dict[str, Any]]:
    """Every request of one size: those that the tables make of an adapter, then the planted faults."""
    from suites.megatron.tables import CELLS

    rows = [request(scenario, levels, adapter) for scenario, levels in CELLS if levels["tp"] == ranks]
    return rows + planted(ranks)


def planted(ranks: str) -> list[dict[str, Any]]:
    """The requests that the planted faults of one size make."""
    return [
        request(scenario, {}, f"{FAULTS_MODULE}:{name}")
        for name, (scenario, _) in FAULTS.items()
        if ranks == ranks_of(name)
    ]


def ranks_of(fault: str) -> str:
    """How many ranks it takes to show a fault."""
    return "2" if fault in AMONG_RANKS else "1"
