"""Synthetic receipts: of any size, with every part filled, the same for the same arguments."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from qualify.canonical import canonical_bytes, digest
from qualify.cover import prove
from qualify.packing import command_of
from qualify.records import CaseRecord, Comparison, Verdict, Worst
from qualify.verdicts import of_comparisons
from reports.model import seal
from reports.parts import rebuilt
from reports.verify import plan_digest

AXES: Mapping[str, tuple[str, ...]] = {
    "sm": ("sm80", "sm90", "sm100"),
    "dtype": ("bf16", "fp16", "fp32"),
    "heads": ("hv1", "hv2", "hv4", "hv8"),
    "sites": ("off", "state", "w", "both"),
    "block_v": ("16", "32", "64", "128"),
    "packing": ("single", "docs", "one_token", "empty_doc"),
    "length": ("T1", "T63", "T64", "T65", "T129", "T1025"),
    "layout": ("kv", "vk"),
}
CHECKS = ("op.whole", "op.stages", "op.split_run", "qdq.state_bits", "qdq.w_bits")
REGIMES = ("zero_gate", "weak_gate", "normal", "strong_gate")
TENSORS = ("o", "final_state", "dq", "dk", "dv", "dg", "dbeta", "dh0")
METRICS = ("rel_l2", "worst_head_rel_l2", "worst_chunk_rel_l2", "max_over_scale")
WRONG_ANSWERS = ("state_off", "w_off", "tile_of_64", "truncation", "gradient_through_rounding")
TYPICAL_ERROR: Mapping[str, float] = {"bf16": 3.4e-3, "fp16": 5e-4, "fp32": 9e-4}
GPU = "GPU-5a7c0e1f"

GIVEN = "our subjects/kernels.py"
"""What the user wrote to name the subject."""

DERIVATION = "1.5 x the largest of 8 independent runs of the exact graph with {dtype} operands"


def cells(count: int, rng: random.Random) -> Iterator[tuple[str, dict[str, str], str]]:
    """`count` different (check, levels, regime), drawn without repetition."""
    everything = list(product(CHECKS, REGIMES, *AXES.values()))
    for check, regime, *levels in rng.sample(everything, count):
        yield check, dict(zip(AXES, levels, strict=True)), regime


def budget_comparison(tensor: str, metric: str, dtype: str, length: int, rng: random.Random) -> Comparison:
    """A comparison within its budget, with figures of a believable size."""
    budget = TYPICAL_ERROR[dtype] * rng.uniform(1.2, 1.6) * (1 + 0.02 * math.log2(1 + length))
    error = budget * (0.3 + 0.65 * rng.betavariate(2, 5))
    first = metric == "rel_l2"
    return Comparison(
        tensor=tensor,
        kind="budget",
        metric=metric,
        error=error,
        budget=budget,
        derivation=DERIVATION.format(dtype=dtype),
        statistics={
            "max_abs": error * 9.5,
            "mean_abs": error * 0.6,
            "p99_abs": error * 3.1,
            "rel_l2": error,
            "ulps_max": float(rng.randint(1, 40)),
            "grid_steps_max": float(rng.choice((0, 0, 0, 1, 1, 2))),
            **({"codes_apart_0": 16380.0, "codes_apart_1": 4.0} if tensor == "final_state" else {}),
        }
        if first
        else {},
        worst=Worst(
            {
                "sequence": 0,
                "token": rng.randrange(length),
                "head": rng.randrange(8),
                "channel": rng.randrange(64),
            },
            1.0,
            1.0 + error,
        ),
        discrimination={name: rng.uniform(1.1, 9.0) for name in WRONG_ANSWERS[:3]} if first else {},
        excluded=WRONG_ANSWERS[:3] if first else (),
    )


def exact_comparison(tensor: str, rng: random.Random) -> Comparison:
    """A comparison of bits that found none different."""
    return Comparison(
        tensor, "exact", "bits", 0.0, 0.0, "equal in every bit",
        statistics={"elements": float(rng.randrange(10**5, 10**7))}, excluded=WRONG_ANSWERS[3:],
    )  # fmt: skip


def case(
    check: str, levels: Mapping[str, str], regime: str, rng: random.Random, metrics: Sequence[str]
) -> CaseRecord:
    """One case: skipped where the GPU of SM 9.0 cannot run it, passed everywhere else."""
    cell = ",".join(f"{axis}:{level}" for axis, level in levels.items())
    case_id = f"kernels/{check}[{cell}]{regime}#0"
    common: dict[str, Any] = {
        "case_id": case_id, "check": check, "subject": "kernels", "levels": dict(levels), "regime": regime,
        "seed": 0, "must_run": levels["sm"] == "sm90" and levels["block_v"] == "64",
        "command": command_of(case_id, "kernels", GIVEN),
    }  # fmt: skip
    if levels["sm"] == "sm100":
        return CaseRecord(
            **common,
            verdict=Verdict.SKIPPED,
            reason="needs sm_number of at least 100, got 90: the cell is one of SM 10",
            requirement="sm 10",
            value_seen="90",
        )
    length = int(levels["length"][1:])
    if check.startswith("qdq"):
        comparisons = tuple(exact_comparison(name, rng) for name in ("value", "code"))
    else:
        comparisons = tuple(
            budget_comparison(tensor, metric, levels["dtype"], length, rng)
            for tensor in TENSORS
            for metric in metrics
        )
    return CaseRecord(
        **common,
        verdict=Verdict.PASSED,
        input_digest=digest(case_id),
        comparisons=comparisons,
        launch={"gdn_chunk_forward": f"block_v=64 warps={rng.choice((4, 8))} stages=2"},
        duration_s=rng.lognormvariate(-2.5, 0.8),
        peak_memory_bytes=rng.randrange(2**20, 2**30),
        worker="gw0",
        gpu=GPU,
    )


def broken(record: CaseRecord, looks_like: str | None = "state_off") -> CaseRecord:
    """The same case with its first tensor far outside its budget."""
    first = record.comparisons[0]
    error = 3.7 * first.budget if first.budget else 12.0
    wrong = replace(first, error=error, looks_like=looks_like, excluded=(), because="the error is too large")
    comparisons = (wrong, *record.comparisons[1:])
    verdict, reason = of_comparisons(comparisons)
    return replace(record, comparisons=comparisons, verdict=verdict, reason=reason)


def records(
    count: int, *, seed: int = 0, failures: int = 0, metrics: Sequence[str] = METRICS[:1]
) -> list[CaseRecord]:
    """`count` case records, of which `failures` of the executed ones fail."""
    rng = random.Random(seed)
    made = [case(check, levels, regime, rng, metrics) for check, levels, regime in cells(count, rng)]
    executed = [i for i, r in enumerate(made) if r.verdict is Verdict.PASSED]
    for i in executed[:failures]:
        made[i] = broken(made[i])
    return made


def environment(worker: str = "gw0", shard: int = 0, driver: str = "570.124.06") -> dict[str, Any]:
    """One worker's machine."""
    return {
        "worker": worker,
        "shard": shard,
        "gpu": {
            "name": "NVIDIA H200", "uuid": GPU, "sm": "9.0", "memory": "143771 MiB",
            "driver": driver, "ecc": "on", "mig": "off", "clocks": "1980 MHz / 3201 MHz",
        },
        "software": {
            "python": {"version": "3.12.11", "reason": ""},
            "torch": {"version": "2.11.0+cu130", "reason": ""},
            "triton": {"version": "3.6.0", "reason": ""},
            "cuda": {"version": "13.0", "reason": ""},
            "ptxas": {"version": "13.0.88", "reason": ""},
            "fla": {"version": None, "reason": "OSError: libz3.so: cannot open shared object file"},
        },
        "switches": {"allow_tf32": True, "deterministic_algorithms": False},
        "variables": {"CUDA_VISIBLE_DEVICES": "0"},
        "system": {"os": "Linux 6.8", "host_cpu": "Intel Xeon Platinum 8480"},
    }  # fmt: skip


REQUIREMENT = {
    "name": "sm 10",
    "when": {"sm": ["sm100"]},
    "fact": "sm_number",
    "test": "at_least",
    "value": "100",
    "because": "the cell is one of SM 10",
}
SKIP_BUDGETS = [
    {"requirement": "sm 10", "share": 1.0, "because": "planned to be seen"},
    {"requirement": "*", "share": 0.05, "because": "hardly anything else"},
]
CONTROLS = (
    "state rounding left out",
    "W rounded along the wrong axis",
    "tile of 64 instead of 32",
    "ties rounded away",
    "scale with a reciprocal",
    "dg of the last token dropped",
)
CONTROL_CHECK = "control.faults"


def check_rows(rows: Sequence[CaseRecord]) -> list[dict[str, Any]]:
    """The checks that the cases belong to, with the levels that they stand on."""
    made = []
    for name in dict.fromkeys(r.check for r in rows):
        own = [r for r in rows if r.check == name]
        axes = {a: sorted({r.levels[a] for r in own}) for a in own[0].levels if a != "sm"}
        made.append(
            {
                "name": name,
                "run": f"suites.checks:{name}",
                "because": f"what {name} shows",
                "needs": [] if name.startswith(("qdq", "control")) else ["chunk_gated_delta_rule"],
                "axes": axes,
                "regimes": sorted({r.regime for r in own}),
                "strength": "each",
                "control": name == CONTROL_CHECK,
            }
        )
    return made


def cover_rows(rows: Sequence[CaseRecord], checks: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The proof, for each check on each SM, that it meets the levels that it meets there."""
    made = []
    for check in checks:
        space = {**{a: tuple(v) for a, v in check["axes"].items()}, "regime": tuple(check["regimes"])}
        for sm in dict.fromkeys(r.levels["sm"] for r in rows if r.check == check["name"]):
            cells = [
                {**{a: v for a, v in r.levels.items() if a != "sm"}, "regime": r.regime}
                for r in rows
                if r.check == check["name"] and r.levels["sm"] == sm
            ]
            covered = [a for a in space if {c[a] for c in cells} == set(space[a])]
            proof = prove(space, [], cells, 1, covered)
            made.append(
                {
                    "scope": f"{check['name']} on {sm}",
                    "check": check["name"],
                    "sm": sm,
                    "axes": covered,
                    "strength": 1,
                    "covered": proof.covered,
                    "possible": proof.possible,
                }
            )
    return made


def plan_of(rows: Sequence[CaseRecord], profile: str = "h100") -> dict[str, Any]:
    """The plan that these cases fulfil."""
    axes: dict[str, list[str]] = {}
    for row in rows:
        for axis, level in {**row.levels, "regime": row.regime}.items():
            known = axes.setdefault(axis, [])
            if level not in known:
                known.append(level)
    checks = check_rows(rows)
    return {
        "profile": profile,
        "sm": "sm90",
        "digest": plan_digest(profile, axes, rows),
        "cases": len(rows),
        "seed": 0,
        "axes": axes,
        "constraints": [
            {
                "name": "sites:off,block_v:16",
                "check": "another.check",
                "forbid": {"sites": ["off"], "block_v": ["16"]},
                "because": "the tile changes nothing without the state site",
            }
        ],
        "covers": cover_rows(rows, checks),
        "checks": checks,
        "requirements": [REQUIREMENT],
        "skip_budgets": SKIP_BUDGETS,
        "must_run": sum(r.must_run for r in rows),
        "wrong_answers": [
            {"name": name, "because": f"{name} is a fault", "sites": [], "formats": []}
            for name in WRONG_ANSWERS
        ],
    }


def control(fault: str, caught: bool) -> CaseRecord:
    """A planted fault that was caught, or missed."""
    levels = {"sm": "sm90", "dtype": "bf16", "fault": fault.replace(" ", "_")}
    cell = ",".join(f"{axis}:{level}" for axis, level in levels.items())
    comparison = Comparison(
        tensor=levels["fault"],
        kind="control",
        metric="missed",
        error=0.0 if caught else 1.0,
        budget=0.0,
        derivation="op.whole: dk projection 0.97" if caught else "every comparison held",
        because=fault,
    )
    verdict, reason = of_comparisons([comparison])
    case_id = f"controls/{CONTROL_CHECK}[{cell}]ordinary#0"
    return CaseRecord(
        case_id=case_id,
        command=command_of(case_id, "controls", ""),
        check=CONTROL_CHECK,
        subject="controls",
        levels=levels,
        regime="ordinary",
        seed=0,
        verdict=verdict,
        reason=reason,
        comparisons=(comparison,),
        must_run=True,
        worker="gw0",
    )


def body(
    count: int = 120,
    *,
    seed: int = 0,
    failures: int = 0,
    missed: int = 0,
    metrics: Sequence[str] = METRICS[:1],
    time: str = "2026-11-30T07:00:00Z",
) -> dict[str, Any]:
    """The body of a receipt whose parts agree with one another.

    Args:
        count: cases of the subject.
        failures: how many of them fail.
        missed: how many planted faults are not caught.
        metrics: in which each of the eight tensors is judged.
    """
    rows = records(count, seed=seed, failures=failures, metrics=metrics)
    controls = [control(fault, i < len(CONTROLS) - missed) for i, fault in enumerate(CONTROLS)]
    return body_of([*rows, *controls], time=time)


def body_of(rows: Sequence[CaseRecord], *, time: str = "2026-11-30T07:00:00Z") -> dict[str, Any]:
    """The body of a receipt of these cases."""
    made: dict[str, Any] = {
        "header": {
            "time": time,
            "harness": {
                "name": "gdn-qualify",
                "version": "0.1.0",
                "commit": "6ec013359a",
                "dirty": False,
                "digest": digest("harness"),
            },
            "command": "qualify run --profile h100 --subject kernels --out out",
            "profile": "h100",
            "verdict": "INCOMPLETE",
            "reasons": [],
            "duration_s": 312.4,
            "shard": None,
            "shards": [],
        },
        "subjects": [SUBJECT],
        "plan": plan_of(rows),
        "environments": [environment()],
        "cases": [r.to_json() for r in rows],
        "controls": [],
        "discrimination": [],
        "skips": [],
        "waivers": [],
        "gates": [],
        "comparison": None,
        "compile_tier": [
            {
                "kernel": kernel,
                "sm": sm,
                "variant": "block_v=64",
                "registers": 96 + 8 * i,
                "spills": 0,
                "shared_bytes": 16384 * (1 + i),
                "conversion": conversion,
                "passed": True,
                "because": "",
            }
            for i, kernel in enumerate(("qdq_state", "qdq_w", "gdn_chunk_forward"))
            for sm, conversion in CONVERSIONS
        ],
        "manifest": {},
    }
    return rebuilt(made)


CONVERSIONS = (("8.0", "portable"), ("8.9", "portable"), ("9.0", "cvt.rn.satfinite.e4m3x2.f32"))
SUBJECT = {
    "name": "kernels",
    "origin": "kernels.py",
    "given": GIVEN,
    "package": "gdn-qualify",
    "version": "0.1.0",
    "commit": "6ec013359a3a4a1f8a7c5e2b1d0f9e8d7c6b5a49",
    "dirty": False,
    "diff_digest": "",
    "files": {"kernels/qdq/__init__.py": digest("a"), "kernels/gdn/__init__.py": digest("b")},
    "backend": "triton",
    "offers": ["chunk_gated_delta_rule", "qdq_state", "qdq_w", "stages"],
    "capabilities": {"min_sm": "8.0"},
    "arithmetic": {"bf16": "bf16", "fp16": "fp16", "fp32": "tf32"},
    "deterministic": True,
    "import_error": "",
}


def shards(count: int, parts: int, **options: Any) -> list[dict[str, Any]]:
    """Sealed receipts of the shards of one run, each from a machine of its own."""
    whole = body(count, **options)
    made = []
    for i in range(parts):
        header = {**whole["header"], "shard": {"index": i, "count": parts}}
        part = {
            **whole,
            "header": header,
            "cases": whole["cases"][i::parts],
            "environments": [environment(driver="570.124.06" if i else "565.57.01")],
        }
        made.append(seal(rebuilt(part)))
    return made


def receipt(count: int = 120, **options: Any) -> dict[str, Any]:
    """A sealed receipt around `body`."""
    return seal(body(count, **options))


def write(path: Path, value: Mapping[str, Any]) -> Path:
    """Writes a receipt as the project does: canonical JSON and a newline."""
    path.write_bytes(canonical_bytes(value) + b"\n")
    return path
