"""One chunk for each sequence, from a given state: the state site judged where nothing can hide behind a
flip.

The entry rounding acts on given numbers and is exact; W is not rounded; so everything up to the state
before its last rounding is smooth, and is budgeted tightly. The last rounding is judged element by element.
"""

from __future__ import annotations

from qualify.case import Case, CheckOutput
from qualify.checks_table import CheckRow, Constraint
from qualify.regimes import VALUE_REGIMES
from qualify.subjects import Subject
from suites.checks.arithmetic import measured_arithmetic
from suites.checks.evidence import evidence_of, turn
from suites.checks.rows import GROUPINGS, OP, levels, profiles
from suites.checks.whole import judged

WRONG_ANSWERS_PER_CASE = 3


def run(case: Case, subject: Subject) -> CheckOutput:
    """Judges the eight tensors of one call with the state site alone.

    Args:
        case: levels of `qualify.regimes.AXES`; `length` at most 64.
        subject: what is judged.
    """
    arithmetic = measured_arithmetic(case, subject)
    evidence = evidence_of(case, subject, arithmetic=arithmetic, sites="state", final="kept")
    if not evidence.smooth:
        raise ValueError(
            f"op.chunk needs one chunk for each sequence, got length {case.levels.get('length')}"
        )
    return judged(case, subject, evidence, turn(case, evidence, WRONG_ANSWERS_PER_CASE))


ROWS = (
    CheckRow(
        "op.chunk",
        "suites.checks.chunk:run",
        "one chunk from a given state: the state site without flips, its last rounding code by code",
        needs=OP,
        axes=levels(
            "dtype",
            "grouping",
            "block_v",
            "format",
            "layout",
            "gates",
            "initial",
            "fused",
            "scalars",
            "strides",
        )
        | {
            "grouping": GROUPINGS,
            "sites": ("state",),
            "packing": ("single", "batch", "docs", "one_token"),
            "gradients": ("both", "state", "strided", "expanded", "tiny"),
            "length": ("1", "15", "16", "17", "63", "64"),
            "heads": ("16x16", "32x48", "48x64", "60x40", "16x256", "128x32"),
        },
        regimes=tuple(VALUE_REGIMES),
        constraints=(
            Constraint(
                {"sm": ("cpu",), "grouping": ("hv8",), "heads": ("48x64", "60x40", "16x256", "128x32")},
                "no new path",
            ),
            Constraint(
                {"regime": ("small",), "fused": ("gate", "bare_gate", "sigmoid", "neg", "none")},
                "the regime is about the normalisation",
            ),
        ),
        must_run=({"dtype": "bf16"}, {"dtype": "fp16"}, {"dtype": "fp32"}),
        profiles=profiles(
            quick={
                "dtype": ("fp32", "bf16"),
                "grouping": ("hv2",),
                "heads": ("16x16", "32x48"),
                "length": ("17", "64"),
            }
        ),
    ),
)
