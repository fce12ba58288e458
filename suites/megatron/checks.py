"""The checks: what the processes of a scenario found, as comparisons."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from qualify.case import Case, CheckOutput
from qualify.plugin import DEVICES_VARIABLE
from qualify.records import Comparison
from qualify.subjects import Subject
from suites.megatron.faults import FAULTS

LINES = 6
"""How much of a failed process's output is kept."""


def run(case: Case, subject: Subject) -> CheckOutput:
    """Runs the scenario that the check is named after: `megatron.sites` runs `sites`.

    Args:
        case: axes `tp`, and where the scenario varies them `sites`, `recompute` and `sequence`.
        subject: its module names an adapter in `ADAPTER`, or is one.
    """
    adapter = adapter_of(subject)
    if not adapter:
        return CheckOutput((), unsupported="the subject has neither ADAPTER nor convert and revert")
    found = result_of(request(case.check.partition(".")[2], case.levels, adapter), case.levels["tp"])
    if found["unsupported"]:
        return CheckOutput((), unsupported=found["unsupported"], launch=found["facts"])
    return CheckOutput(tuple(comparison(row) for row in found["findings"]), launch=found["facts"])


def control(case: Case, subject: Subject) -> CheckOutput:
    """Runs an adapter with a planted fault; caught means that a finding does not hold."""
    fault = case.levels["fault"]
    scenario, _ = FAULTS[fault]
    found = result_of(request(scenario, {}, f"suites.megatron.faults:{fault}"), "1", together=False)
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
        launch=found["facts"],
    )


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


_RESULTS: dict[str, dict[str, Any]] = {}
"""Results by size and request, for the life of this process."""

_BATCHED: set[tuple[str, str]] = set()
"""Sizes and adapters whose cells were run together already."""


def result_of(asked: Mapping[str, Any], ranks: str, *, together: bool = True) -> dict[str, Any]:
    """The result of a request: out of the batch of its size and adapter, run when first asked, or alone.

    Args:
        asked: a request.
        ranks: how many ranks share a layer.
        together: whether to run the other cells of the same size in the same processes.

    Raises:
        RuntimeError: the scenario or its processes failed.
    """
    key, adapter = key_of(asked, ranks), str(asked["adapter"])
    if together and key not in _RESULTS and (ranks, adapter) not in _BATCHED:
        _BATCHED.add((ranks, adapter))
        remember(batch(adapter, ranks), ranks)
    if key not in _RESULTS:
        remember([asked], ranks)
    found = _RESULTS.get(key)
    if found is None:
        raise RuntimeError(f"{asked['scenario']} must write a result, got none; its processes ended early")
    if found["error"]:
        raise RuntimeError(found["error"])
    return found


def key_of(asked: Mapping[str, Any], ranks: str) -> str:
    """A request and its size as text."""
    return json.dumps([ranks, dict(asked)], sort_keys=True)


def batch(adapter: str, ranks: str) -> list[dict[str, Any]]:
    """Every request of one size that the tables make of an adapter; with one rank, the planted faults too."""
    from suites.megatron.tables import CELLS

    rows = [request(scenario, levels, adapter) for scenario, levels in CELLS if levels["tp"] == ranks]
    faults = FAULTS.items() if ranks == "1" else ()
    return rows + [request(scenario, {}, f"suites.megatron.faults:{name}") for name, (scenario, _) in faults]


def remember(rows: Sequence[Mapping[str, Any]], ranks: str) -> None:
    """Runs requests in one set of processes and keeps what they wrote, also when they ended early.

    Raises:
        RuntimeError: they wrote nothing.
    """
    with tempfile.TemporaryDirectory() as folder:
        asked, out = Path(folder) / "requests.json", Path(folder) / "found.json"
        asked.write_text(json.dumps([dict(row) for row in rows]))
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks]
        command += ["-m", "suites.megatron.world", "--tensor-parallel", ranks]
        command += ["--requests", str(asked), "--out", str(out)]
        variables = environment(int(ranks))
        done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
        if not out.exists():
            raise RuntimeError(
                f"ranks must write results, ended with {done.returncode}: {reason(done.stderr)}"
            )
        found = json.loads(out.read_text())
    for row, made in zip(rows, found["results"], strict=False):
        _RESULTS[key_of(row, ranks)] = {**made, "facts": found["facts"]}


def environment(ranks: int) -> dict[str, str]:
    """The environment of the processes: as many GPUs of the run as there are ranks, and no compiler.

    Megatron fuses small functions with torch.compile; what is qualified is not among them, and without it a
    process starts in seconds.
    """
    devices = [d for d in os.environ.get(DEVICES_VARIABLE, "").split(",") if d]
    chosen = {"CUDA_VISIBLE_DEVICES": ",".join(devices[:ranks])} if devices else {}
    paths = os.pathsep.join(p or os.getcwd() for p in sys.path)
    return {**os.environ, **chosen, "TORCHDYNAMO_DISABLE": "1", "PYTHONPATH": paths}


def reason(output: str) -> str:
    """The lines of a failed process that say why: its last exception, or its last lines."""
    lines = [line for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line and "torch.distributed.elastic" not in line]
    return " | ".join(errors[:1] or lines[-LINES:])[:600]
