"""Error as a function of length: how fast does an error grow, beside how large it is?

With both sites off and next to no decay, the state remembers everything, and so it remembers every
rounding. A correct kernel's error grows from chunk to chunk as the noise of the oracle does. One that keeps
the state, the cumulative gate or a running sum in a narrower format grows faster long before it is large.
"""

from __future__ import annotations

import math

import torch

from qualify.budgets import SLACK
from qualify.case import Case, CheckOutput
from qualify.checks_table import CheckRow
from qualify.compare import Layout, block_norms, mismatch
from qualify.problem import Outcome
from qualify.records import Comparison
from qualify.subjects import Subject
from suites.checks.arithmetic import measured_arithmetic
from suites.checks.evidence import (
    Evidence,
    WrongResultError,
    dtype_of,
    evidence_of,
    judge,
    outcome_of,
    output_of,
)
from suites.checks.rows import DTYPES, OP, profiles

Tensor = torch.Tensor

JUDGED = ("o", "dv", "dg")
"""Tensors whose error by chunk is followed: forward along the sequence, the gradients backward."""

NEGLIGIBLE = 0.1
"""Errors this far below those of correct runs have no slope that matters."""

LEVELS = {"packing": "single", "sites": "none", "grouping": "hv2", "initial": "given", "final": "kept"}


def run(case: Case, subject: Subject) -> CheckOutput:
    """Judges level and slope of the error of one long sequence.

    Args:
        case: levels of `dtype`, `length` (several chunks), `heads` and `gates` (weak ones).
        subject: what is judged.
    """
    arithmetic = measured_arithmetic(case, subject)
    evidence = evidence_of(case, subject, arithmetic=arithmetic, **LEVELS)
    try:
        outcome = outcome_of(subject, evidence.problem)
    except WrongResultError as error:
        return output_of([error.comparison], evidence.problem)
    comparisons = judge(evidence, outcome)
    comparisons += [_slope(evidence, outcome, name) for name in JUDGED]
    return output_of(comparisons, evidence.problem)


def growth(error: Tensor, typical: Tensor, layout: Layout, *, backward: bool) -> float:
    """Factor by which an error grows per doubling of the length, beyond the growth of the typical error.

    Args:
        error: fp64, shape of the tensor.
        typical: `[chunks, H]`, norms of the errors of correct runs.
        layout: names of the axes.
        backward: whether errors pile up from the end.
    """
    norms = block_norms(error, layout)
    ratio = (norms.square().sum(1) / typical.square().sum(1).clamp_min(1e-300)).sqrt().clamp_min(NEGLIGIBLE)
    ratio = ratio.flip(0) if backward else ratio
    half = max(1, len(ratio) // 2)
    early, late = ratio[:half].log().mean(), ratio[-half:].log().mean()
    return float((late - early).exp())


def _slope(evidence: Evidence, outcome: Outcome, name: str) -> Comparison:
    expected, actual = evidence.tensors()[name], outcome[name]
    dtype = dtype_of(evidence.problem, name)
    wrong = mismatch(
        f"{name}.slope", actual, shape=tuple(expected.shape), dtype=dtype, device=expected.device
    )
    if wrong is not None:
        return wrong
    assert actual is not None
    layout, errors = evidence.layouts[name], evidence.noise[name].errors
    norms = torch.stack([block_norms(e, layout) for e in errors])
    typical = norms.square().mean(0).sqrt() + block_norms(evidence.noise[name].floor, layout)
    backward = name != "o"
    runs = [growth(e, typical, layout, backward=backward) for e in errors]
    found = growth(actual.double() - expected, typical, layout, backward=backward)
    return Comparison(
        tensor=name,
        kind="budget",
        metric="growth_over_length",
        error=found if math.isfinite(found) else math.nan,
        budget=1.0 + SLACK * max(1.0, *runs),
        derivation=f"late over early error, in units of correct runs; the largest of these {max(runs):.3g}",
        statistics={"largest_correct": max(runs)},
    )


ROWS = (
    CheckRow(
        "op.slope",
        "suites.checks.slope:run",
        "an error that grows too fast with length is found before it is large",
        needs=OP,
        axes={
            "dtype": DTYPES,
            "sites": ("none",),
            "gates": ("zero", "weak"),
            "length": ("512",),
            "heads": ("16x16", "64x64", "128x128"),
        },
        regimes=("random",),
        profiles=profiles("all", "all", cpu_axes={"heads": ("16x16",)}),
    ),
)
