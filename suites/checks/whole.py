"""The whole op, black box: every output and gradient within its budget, and away from named wrong answers."""

from __future__ import annotations

from qualify.budgets import declaration_holds
from qualify.case import Case, CheckOutput
from qualify.checks_table import CheckRow, Constraint
from qualify.regimes import VALUE_REGIMES
from qualify.subjects import Subject
from suites.checks.evidence import (
    Evidence,
    WrongResultError,
    evidence_of,
    judge,
    outcome_of,
    output_of,
    turn,
)
from suites.checks.rows import DTYPES, GROUPINGS, OP, levels, profiles
from suites.checks.stored import stored
from suites.checks.tie_free import TIE_FREE

LARGE = ("64x64", "96x48", "100x72", "128x128", "64x128", "256x16", "16x256")


def run(case: Case, subject: Subject) -> CheckOutput:
    """Judges the eight tensors of one call.

    Args:
        case: levels of `qualify.regimes.AXES`, a regime of values and a seed.
        subject: what is judged.
    """
    evidence = evidence_of(case, subject)
    return judged(case, subject, evidence, turn(case, evidence))


def judged(case: Case, subject: Subject, evidence: Evidence, wrong_answers: tuple[str, ...]) -> CheckOutput:
    """Runs a subject on a problem and holds its outcome against the evidence.

    Args:
        case: names the carrier.
        subject: what is judged.
        evidence: of the problem.
        wrong_answers: what to project onto.
    """
    comparisons = [declaration_holds(subject.arithmetic, case.levels.get("dtype", "fp32"))]
    try:
        outcome = outcome_of(subject, evidence.problem)
        comparisons += judge(evidence, outcome, wrong_answers)
        comparisons += stored(evidence, outcome)
    except WrongResultError as error:
        comparisons.append(error.comparison)
    return output_of(comparisons, evidence.problem)


LONG = "2113"
"""More than 32 chunks, and no whole number of them: an index that wraps, a grid that ends too early."""

NO_BOUNDARIES = Constraint(
    {"packing": ("single",), "boundaries": ("int32",)}, "sequences that are not packed have no boundaries"
)

_CPU_HEADS = ("16x16", "32x48", "32x32", "48x64", "60x40", "100x72", "16x256", "128x128")
_MANY = ("batch5", "many")
_CPU_PACKINGS = tuple(level for level in levels("packing")["packing"] if level not in _MANY)
_CPU_LENGTHS = ("1", "15", "17", "64", "65", "127", "129", "192", "257")

_ON_OR_OFF = levels("dtype", "format") | {"sites": ("both", "none")}
_ONE_OR_PACKED = _ON_OR_OFF | {"packing": ("single", "docs"), "layout": ("kv", "vk")}

ROWS = (
    CheckRow(
        "op.smooth",
        "suites.checks.whole:run",
        "both sites on over several chunks, where no code can flip: tight budgets see what flips would hide",
        needs=OP,
        axes=levels("dtype", "block_v", "sites", "layout", "gradients", "scalars", "strides")
        | {
            "grouping": ("hv1",),
            "format": ("e4m3", "int8"),
            "packing": ("single", "batch", "docs", "unequal"),
            "length": ("129", "145", "257"),
            "heads": ("16x16", "16x40", "32x48"),
            "gates": ("zero", "weak", "ordinary"),
        },
        regimes=(TIE_FREE,),
        constraints=(
            Constraint(
                {"gates": ("ordinary",), "heads": ("32x48",)},
                "under decay the tokens of a chunk span too few keys to place every state element",
            ),
        ),
        must_run=(
            {"dtype": "bf16", "sites": "both"},
            {"dtype": "fp16", "sites": "both"},
            {"dtype": "fp32", "sites": "both"},
        ),
        profiles=profiles(quick={"dtype": ("fp32", "bf16"), "sites": ("both",), "length": ("145",)}),
    ),
    CheckRow(
        "op.whole",
        "suites.checks.whole:run",
        "all eight tensors over shapes, packings, layouts, gates, activations, gradients and values",
        needs=OP,
        axes=levels(
            "dtype",
            "grouping",
            "block_v",
            "packing",
            "sites",
            "format",
            "layout",
            "length",
            "heads",
            "gates",
            "fused",
            "gradients",
            "scalars",
            "strides",
            "scale",
            "initial",
            "final",
        )
        | {"grouping": GROUPINGS},
        regimes=tuple(VALUE_REGIMES),
        constraints=(
            Constraint(
                {"sm": ("cpu",), "grouping": ("hv8", "hv4", "hv3"), "heads": ("48x64", "60x40", *LARGE)},
                "seconds on a CPU for no new path",
            ),
            Constraint(
                {"sm": ("cpu",), "grouping": ("hv8", "hv4"), "length": ("129", "145", "257")},
                "seconds on a CPU for no new path",
            ),
            Constraint(
                {"sm": ("cpu",), "heads": LARGE, "length": ("129", "145", "257")},
                "seconds on a CPU for no new path",
            ),
            Constraint(
                {"sm": ("cpu",), "heads": ("128x128",), "packing": ("docs", "one_token", "unequal")},
                "seconds on a CPU for no new path",
            ),
            Constraint(
                {"regime": ("small",), "fused": ("gate", "bare_gate", "sigmoid", "neg", "none")},
                "the regime is about the normalisation",
            ),
        ),
        must_run=(
            {"dtype": "bf16", "grouping": "hv2"},
            {"dtype": "fp16", "grouping": "hv2"},
            {"dtype": "fp32", "grouping": "hv2"},
            # as training calls it
            *({"dtype": d, "initial": "zero", "final": "dropped", "sites": "both"} for d in DTYPES),
        ),
        profiles=profiles(
            cpu_axes={"heads": _CPU_HEADS, "length": _CPU_LENGTHS, "packing": _CPU_PACKINGS},
            quick={
                "dtype": ("fp32", "bf16"),
                "packing": _CPU_PACKINGS,
                "grouping": ("hv2",),
                "heads": ("32x48", "48x64"),
                "length": ("65", "129"),
            },
        ),
    ),
    CheckRow(
        "op.absent",
        "suites.checks.whole:run",
        "states and gradients that are not given, not asked for or do not arrive",
        needs=OP,
        axes=levels("dtype", "packing", "sites", "format", "initial", "final", "gradients")
        | {"length": ("65", "129"), "heads": ("16x16", "16x48"), "block_v": ("16",)},
        regimes=("random",),
        must_run=tuple({"packing": packing, "initial": "zero"} for packing in _MANY),
        profiles=profiles(),
    ),
    CheckRow(
        "op.long",
        "suites.checks.whole:run",
        "one sequence of more chunks than a table, a counter or a loop was made for",
        needs=OP,
        axes=_ONE_OR_PACKED
        | {
            "gates": ("ordinary", "weak"),
            "length": (LONG,),
            "heads": ("16x16", "128x128"),
            "block_v": ("16",),
        }
        | levels("boundaries"),
        regimes=("random",),
        constraints=(NO_BOUNDARIES,),
        profiles=profiles("each", "pairs", cpu_axes={"dtype": ("fp32", "bf16"), "heads": ("16x16",)}),
    ),
    CheckRow(
        "op.heads",
        "suites.checks.whole:run",
        "a single head, an odd number of them, more than an index in a word of the launch, and boundaries in "
        "integers of either size",
        needs=OP,
        axes=_ONE_OR_PACKED
        | {
            "grouping": ("hv32", "h1", "h3", "h1hv3"),
            "length": ("17", "65"),
            "heads": ("16x16", "128x128"),
            "block_v": ("16",),
        }
        | levels("boundaries"),
        regimes=("random",),
        constraints=(
            NO_BOUNDARIES,
            Constraint(
                {"sm": ("cpu",), "grouping": ("hv32",), "length": ("65",)}, "seconds on a CPU for no new path"
            ),
        ),
        profiles=profiles("each", "pairs", cpu_axes={"dtype": ("bf16", "fp32"), "heads": ("16x16",)}),
    ),
    CheckRow(
        "op.sizes",
        "suites.checks.whole:run",
        "more keys or values than two tiles of 64 hold, over many chunks and in a sequence that ends in the "
        "second half of its only one",
        needs=OP,
        axes=_ON_OR_OFF
        | {
            "packing": ("single", "batch"),
            "grouping": ("hv1",),
            "length": ("63", "193"),
            "heads": ("256x16", "16x256"),
            "block_v": ("16",),
        },
        regimes=("random",),
        profiles=profiles("pairs", "pairs", cpu_axes={"dtype": ("fp32", "bf16")}),
    ),
)
