"""Every named wrong answer, ruled out on a problem where it shows.

Two problems for each carrier and format. On the first nothing can flip, so that even small departures stand
out; it has one value head for each q/k head and no empty sequence. The second has all that the first lacks:
grouped heads, square states, an empty sequence.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from qualify.case import Case, CheckOutput
from qualify.checks_table import CheckRow, Options
from qualify.records import Comparison
from qualify.subjects import Subject
from references.wrong_answers import WRONG_ANSWERS
from suites.checks.evidence import (
    Evidence,
    WrongResultError,
    evidence_of,
    judge,
    outcome_of,
    output_of,
)
from suites.checks.rows import DTYPES, GPU, OP
from suites.checks.tie_free import TIE_FREE

PARTS = 4
"""The axis `part`: which quarter of the table of wrong answers a case takes, or what is left."""

REST = "rest"
"""The level of `part` that takes the wrong answers of `INEXACT` alone."""

INEXACT: tuple[str, ...] = (
    "state_double_tile",
    "state_per_head",
    "state_read_before_rounding",
    "v_reads_unrounded",
    "o_reads_unrounded",
    "w_right_side_rounded",
    "empty_state_zero",
    "empty_state_unrounded",
    "no_read_decay",
    "no_w_decay",
    "last_gate_early",
    "backward_at_unrounded_state",
    "backward_at_unrounded_w",
    "backward_at_recomputed_w",
    "solve_adjoint_at_rounded_w",
)
"""Wrong answers that no probe and no case of the exact regime rules out on a CPU in every carrier and
format. A CPU asks the rest of the table in bf16 alone, where budgets are widest; a name that is missing here
makes its verdict incomplete."""

QUARTERS = tuple(str(i) for i in range(PARTS))

FORMATTED = frozenset({"state", "state_int8"})
"""Needs of the wrong answers that another format of the state site makes another question."""

PROBLEMS: Mapping[str, tuple[str, Mapping[str, str]]] = MappingProxyType(
    {
        "tie_free": (
            TIE_FREE,
            {
                "grouping": "hv1",
                "heads": "32x48",
                "block_v": "16",
                "packing": "docs",
                "length": "145",
                "gates": "weak",
            },
        ),
        "grouped": (
            "random",
            {
                "grouping": "hv2",
                "heads": "32x32",
                "block_v": "16",
                "packing": "empty_middle",
                "length": "145",
            },
        ),
    }
)
"""Name -> regime and levels."""


def run(case: Case, subject: Subject) -> CheckOutput:
    """Projects a subject's error onto the wrong answers of one part of the table.

    Args:
        case: levels of `dtype`, `format`, `sites` and `part`, and a seed.
        subject: what is judged.
    """
    evidences = [
        evidence_of(Case(case.check, case.levels, regime, case.seed, case.subject), subject, **levels)
        for regime, levels in PROBLEMS.values()
    ]
    shares = _shared_out(evidences, case.levels["part"], case.levels.get("format", "e4m3"))
    comparisons: list[Comparison] = []
    for evidence, names in zip(evidences, shares, strict=True):
        try:
            comparisons += judge(evidence, outcome_of(subject, evidence.problem), names)
        except WrongResultError as error:
            comparisons.append(error.comparison)
    return output_of(comparisons, *(evidence.problem for evidence in evidences))


def _shared_out(evidences: list[Evidence], part: str, fmt: str) -> list[list[str]]:
    """For each problem the wrong answers to look for: each on the first problem that tells it from the
    contract.

    The format of the state site matters to faults of that site only; the others are asked with E4M3.
    """
    shares: list[list[str]] = [[] for _ in evidences]
    asked = [n for n, w in WRONG_ANSWERS.items() if fmt == "e4m3" or FORMATTED & set(w.needs)]
    chosen_names = [n for n in asked if n in INEXACT] if part == REST else asked[int(part) :: PARTS]
    for name in chosen_names:
        able = [i for i, evidence in enumerate(evidences) if name in evidence.applicable]
        if "decays" in WRONG_ANSWERS[name].needs:
            able.reverse()
        telling = (i for i in able if (p := evidences[i].projection(name)) is not None and p.telling)
        chosen = next(telling, able[0] if able else None)
        if chosen is not None:
            shares[chosen].append(name)
    return shares


def _row(
    name: str, because: str, dtypes: tuple[str, ...], parts: tuple[str, ...], **options: Options
) -> CheckRow:
    return CheckRow(
        name,
        "suites.checks.named:run",
        because,
        needs=OP,
        axes={"dtype": dtypes, "sites": ("both",), "format": ("e4m3", "int8"), "part": parts},
        regimes=("random",),
        strength="all",
        must_run=tuple({"dtype": dtype} for dtype in dtypes),
        profiles=options,
    )


ROWS = (
    _row(
        "op.named",
        "every named wrong answer is told from the contract on a problem that shows it",
        DTYPES,
        QUARTERS,
        cpu=Options("all", axes={"dtype": ("bf16",)}),
        **{name: Options("all") for name in GPU},
    ),
    _row(
        "op.inexact",
        "what no exact check rules out, in the carriers of which a CPU does not ask everything",
        tuple(dtype for dtype in DTYPES if dtype != "bf16"),
        (REST,),
        cpu=Options("all"),
    ),
)
