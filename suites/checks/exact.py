"""The exact regime: the whole op, all eight tensors, bit for bit, on inputs where only the sites round."""

from __future__ import annotations

from collections.abc import Mapping

from qualify.budgets import CANCELLED
from qualify.case import Case, CheckOutput
from qualify.checks_table import CheckRow, Constraint
from qualify.exact_regimes import build_exact_problem
from qualify.problem import TENSORS
from qualify.subjects import Subject
from suites.checks.bits import Exact, judged, remembered
from suites.checks.evidence import device_of, gate_magnitudes, output_of
from suites.checks.rows import DTYPES, OP, levels, profiles

DERIVATION = (
    "every intermediate fits 8 significant bits (fp32 accumulators 24) in any order of summation, "
    "which the generator proved for this input: all correct implementations give the same bits (dg may be a "
    "few fp32 roundings off: gates in powers of two are multiplied by ln 2 on the way back)"
)


def run(case: Case, subject: Subject) -> CheckOutput:
    """Judges the eight tensors of one call without tolerance.

    Args:
        case: levels of `qualify.exact_regimes.DEFAULTS` and a seed.
        subject: what is judged.
    """
    exact = exact_of(case.levels, case.seed, device_of(case))
    return output_of(judged(subject, [("", exact)]), exact.problem)


def exact_of(levels: Mapping[str, str], seed: int, device: str) -> Exact:
    """The proved problem of a cell with its expected tensors, kept for the next subject."""
    key = ("exact", tuple(sorted(levels.items())), seed, device)
    return remembered(key, lambda: _made(levels, seed, device))


def _made(levels: Mapping[str, str], seed: int, device: str) -> Exact:
    problem = build_exact_problem(levels, seed, device)
    if levels.get("final") == "dropped":
        problem = problem.with_(output_final_state=False, dht=None)
    exact = Exact(problem, dict.fromkeys(TENSORS), DERIVATION)
    # of what cancels in dg; it is summed over tokens, and what such a sum leaves is as large as the largest
    sizes, found = gate_magnitudes(problem), exact.expected
    exact.room = {
        n: CANCELLED * (size + found[n].double().abs().amax(1, keepdim=True)) for n, size in sizes.items()
    }
    return exact


_AXES = levels("dtype", "sites", "format", "layout", "initial", "final") | {
    "grouping": ("hv1", "hv2"),
    "block_v": ("16", "32"),
    "packing": ("single", "docs", "batch", "empty_middle"),
    "gradients": ("both", "output", "state"),
    "length": ("65", "129"),
    "heads": ("32x48", "48x64"),
}

ROWS = (
    CheckRow(
        "op.exact",
        "suites.checks.exact:run",
        "where nothing rounds but the sites, a single wrong bit is a fault, however small",
        needs=OP,
        axes=_AXES,
        regimes=("exact",),
        constraints=(
            Constraint(
                {"sm": ("cpu",), "packing": ("docs", "batch", "empty_middle"), "length": ("129",)},
                "minutes under an interpreter for no new path",
            ),
        ),
        must_run=(
            *({"dtype": dtype, "sites": sites} for dtype in DTYPES for sites in ("both", "none")),
            # as training calls it
            *(
                {"dtype": d, "sites": "both", "initial": "zero", "final": "dropped"} | {"length": "129"}
                for d in DTYPES
            ),
        ),
        profiles=profiles(
            "each",
            "pairs",
            quick={
                "dtype": ("bf16",),
                "sites": ("both",),
                "length": ("65",),
                "heads": ("32x48",),
                "packing": ("docs",),
                "layout": ("vk",),
                "initial": ("given",),
                "final": ("kept",),
                "gradients": ("both",),
                "grouping": ("hv2",),
                "block_v": ("16",),
            },
        ),
    ),
)
