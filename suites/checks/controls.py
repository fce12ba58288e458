"""Planted faults, run as any subject is on a few of the qualification's own cells: would it have noticed?

A fault counts as caught when a check fails it and passes the same implementation without the fault. The looks
that a control names only say where to begin; all others follow until one catches it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from types import MappingProxyType

from qualify.case import Case, CheckOutput
from qualify.checks_table import CheckRow, Constraint, Options
from qualify.plan import PlannedCase
from qualify.records import CaseRecord, Comparison, Verdict
from qualify.run_case import run_case
from qualify.subjects import Subject, subject_from_module
from suites.checks.bits import unnamed
from suites.checks.rows import DTYPES, GPU
from suites.checks.tie_free import TIE_FREE
from suites.controls.control import Control
from suites.controls.table import CONTROLS
from suites.subjects.eager import EAGER

DISAGREES = frozenset(
    {
        Verdict.FAILED_NUMERIC,
        Verdict.FAILED_SHAPE,
        Verdict.FAILED_NONFINITE,
        Verdict.FAILED_NONDETERMINISTIC,
    }
)
"""Verdicts that come from a comparison. A check that breaks down under a fault has caught nothing."""


@dataclass(frozen=True)
class Look:
    """A cell of a check that many faults show in.

    Attributes:
        check: name of the row in the table of checks.
        levels: axis -> level; the row's first level where none is given, the control's dtype always.
        regime: the input distribution; the row's first where none is given.
    """

    check: str
    levels: Mapping[str, str] = field(default_factory=dict)
    regime: str = ""


_PACKED = {"grouping": "hv2", "packing": "docs", "length": "65", "sites": "none"}
_BOTH = {
    "sites": "both",
    "packing": "docs",
    "grouping": "hv2",
    "block_v": "16",
    "length": "65",
    "heads": "32x48",
}
_MANY = {"length": "65", "heads": "16x16", "sites": "none"}
_FEW_HEADS = {"packing": "docs", "length": "65", "heads": "16x16", "sites": "none"}
_FUSED = {"grouping": "hv2", "packing": "single", "length": "17", "heads": "16x16", "sites": "none"}

LOOKS: Mapping[str, Look] = MappingProxyType(
    {
        "qdq": Look("qdq.state_bits", {"block_v": "32"}),
        "qdq_int8": Look("qdq.state_bits", {"block_v": "32", "format": "int8"}),
        "qdq_by_default": Look("qdq.state_gradient", {"block_v": "64"}),
        "qdq_w": Look("qdq.w_bits"),
        "qdq_many": Look("qdq.state_many"),
        "qdq_w_many": Look("qdq.w_many"),
        "qdq_gradient": Look("qdq.state_gradient", {"block_v": "16"}),
        "qdq_w_gradient": Look("qdq.w_gradient"),
        "probe_state": Look("probe.state", {"block_v": "16"}),
        "probe_w": Look("probe.w"),
        "probe_state_wide": Look("probe.state", {"heads": "256x16", "block_v": "16"}),
        "probe_w_late": Look("probe.w", {"before": "2112"}),
        "probe_w_stateless": Look("probe.w", {"initial": "zero", "final": "dropped"}),
        "probe_w_wide": Look("probe.w", {"heads": "128x128"}),
        "probe_write": Look("probe.write", {"block_v": "16"}),
        "probe_write_short": Look("probe.write", {"block_v": "16", "written": "50"}),
        "decay": Look("probe.decay", {"packing": "batch"}),
        "decay_carrier": Look("probe.decay", {"packing": "batch", "scalars": "carrier"}),
        "gate_carrier": Look("probe.gate", {"scalars": "carrier", "packing": "batch"}),
        "rounding": Look("probe.rounding"),
        "strength": Look("probe.strength"),
        "exact": Look("op.exact", {"sites": "both", "grouping": "hv2", "length": "129"}),
        "exact_docs": Look("op.exact", {"sites": "both", "packing": "docs", "grouping": "hv2"}),
        "exact_empty": Look("op.exact", {"sites": "both", "packing": "empty_middle", "layout": "vk"}),
        "exact_int8": Look("op.exact", {"sites": "state", "format": "int8"}),
        "exact_wide": Look("op.exact", {"sites": "none", "heads": "48x64"}),
        "repeat": Look("op.repeat", _BOTH | {"checkpointing": "off"}),
        "checkpoint": Look("op.repeat", _BOTH | {"checkpointing": "on"}),
        "memory": Look("op.memory", _BOTH),
        "calls": Look("op.calls", {"sites": "both", "packing": "docs"}),
        "arguments": Look("op.arguments", {"sites": "both", "packing": "docs"}),
        "borders": Look("op.borders", _BOTH),
        "stages": Look("op.stages", _BOTH),
        "refusals": Look("op.refusals"),
        "qdq_refusals": Look("qdq.refusals"),
        "plain": Look(
            "op.whole",
            _PACKED
            | {
                "heads": "48x64",
                "strides": "views",
                "gradients": "strided",
                "gates": "ordinary",
                "layout": "vk",
            },
        ),
        "square": Look("op.whole", _PACKED | {"heads": "32x32", "layout": "vk", "length": "17"}),
        "odd": Look("op.whole", {"heads": "100x72", "length": "63", "grouping": "hv1", "sites": "none"}),
        "fused": Look("op.whole", _FUSED | {"fused": "all"}),
        "given_scale": Look("op.whole", _FUSED | {"fused": "norm", "scale": "given"}),
        "many": Look("op.absent", _MANY | {"packing": "many"}),
        "many_from_zero": Look("op.absent", _MANY | {"packing": "many", "initial": "zero"}),
        "batch5": Look("op.absent", _MANY | {"packing": "batch5"}),
        "one_head": Look("op.heads", _FEW_HEADS | {"grouping": "h1"}),
        "three_heads": Look("op.heads", _FEW_HEADS | {"grouping": "h3"}),
        "sizes": Look("op.sizes", {"packing": "single"}),
        "padded": Look("op.whole", _PACKED | {"packing": "empty_last", "heads": "16x16", "length": "17"}),
        "small": Look("op.whole", _FUSED | {"fused": "norm"}, "small"),
        "repeated": Look("op.whole", _PACKED | {"heads": "16x16", "packing": "single"}, "repeated"),
        "chunk": Look("op.chunk", {"packing": "docs", "length": "17", "heads": "32x48", "block_v": "16"}),
        "smooth": Look(
            "op.smooth",
            {"packing": "docs", "length": "145", "heads": "16x40", "block_v": "16", "gates": "weak"},
            TIE_FREE,
        ),
        "strong_gates": Look("op.dynamic_range", {"extreme": "strong_gates", "heads": "32x32"}),
        "large_state": Look("op.dynamic_range", {"extreme": "large_state", "heads": "32x32"}),
        "large_read": Look("op.dynamic_range", {"extreme": "large_read", "heads": "32x32"}),
        "large_query": Look("op.dynamic_range", {"extreme": "large_query", "heads": "32x32"}),
        "tiny_dht": Look("op.dynamic_range", {"extreme": "tiny_dht_carried", "heads": "32x32"}),
        **{f"named_{part}": Look("op.named", {"part": str(part)}) for part in range(4)},
        "long": Look("op.long"),
        "documents": Look("op.documents", {"blocks": "1025", "sites": "none"}),
    }
)
"""Name -> look, the cheapest and sharpest first."""


def run(case: Case, subject: Subject) -> CheckOutput:
    """Looks for one planted fault until a look catches it.

    Args:
        case: levels of `dtype` and `fault`, and a seed.
        subject: offers nothing; the fault is the subject.
    """
    control = CONTROLS[case.levels["fault"]]
    faulty = control.subject()
    with unnamed():
        seen = (_caught(case, faulty, name) for name in _order(control))
        found = next((text for text in seen if text), "")
    return CheckOutput(
        (
            Comparison(
                tensor=control.name,
                kind="control",
                metric="missed",
                error=0.0 if found else 1.0,
                budget=0.0,
                derivation=found or f"none of {len(LOOKS)} looks tells it from the sound implementation",
                because=control.because,
            ),
        )
    )


def look_at(name: str, subject: Subject, dtype: str, seed: int, sm: str = "cpu") -> CaseRecord:
    """Runs a subject on one look, guarded and judged as in any qualification.

    Args:
        name: of the look.
        subject: who is judged.
        dtype: the carrier.
        seed: any integer.
        sm: where it runs.
    """
    look = LOOKS[name]
    row = _row(look.check)
    levels = {"sm": sm, **{axis: row.axes[axis][0] for axis in row.axes}, **look.levels, "dtype": dtype}
    case = Case(row.name, levels, look.regime or row.regimes[0], seed, subject.name)
    return run_case(PlannedCase(case, row.run, row.needs, time_limit_s=0.0), subject)


def _order(control: Control) -> Iterator[str]:
    yield from dict.fromkeys((*control.looks, *LOOKS))


def _caught(case: Case, faulty: Subject, name: str) -> str:
    """What caught a fault, in one line; empty where nothing did, or where the sound one fails as well."""
    dtype, sm = case.levels["dtype"], case.levels.get("sm", "cpu")
    record = look_at(name, faulty, dtype, case.seed, sm)
    if record.verdict not in DISAGREES or not _sound_passes(name, dtype, case.seed, sm):
        return ""
    failing = next(c for c in record.comparisons if not c.passed)
    return (
        f"{record.check} ({name}): {failing.tensor} by {failing.kind}, {failing.metric} {failing.error:.3g}"
    )


@lru_cache(maxsize=256)
def _sound_passes(name: str, dtype: str, seed: int, sm: str) -> bool:
    sound = subject_from_module(EAGER, "eager")
    return look_at(name, sound, dtype, seed, sm).verdict is Verdict.PASSED


def _row(check: str) -> CheckRow:
    from suites.tables.checks import CHECKS  # the table holds this module's row as well

    return next(row for row in CHECKS if row.name == check)


ROWS = (
    CheckRow(
        "control.fault",
        "suites.checks.controls:run",
        "a qualification that cannot fail a bad kernel is worth nothing",
        axes={"dtype": DTYPES, "fault": tuple(CONTROLS)},
        regimes=("planted",),
        constraints=tuple(
            Constraint({"dtype": (dtype,), "fault": (control.name,)}, because)
            for control in CONTROLS.values()
            for dtype, because in control.unseen.items()
        ),
        strength="all",
        profiles={name: Options("all", time_limit_s=60.0) for name in ("cpu", *GPU)}
        | {"quick": Options("all", axes={"dtype": ("bf16",)}, time_limit_s=60.0)},
        control=True,
    ),
)
