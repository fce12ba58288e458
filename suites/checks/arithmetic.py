"""The precision that a subject declares, held against the one that it shows with both sites off.

With the sites off nothing flips, so an fp32 result shows by its error alone whether matmul operands were
kept in fp32 or rounded to TF32. The 16-bit carriers hide it: their outputs are rounded more coarsely than
that.
"""

from __future__ import annotations

from qualify.budgets import declaration_holds, judged_arithmetic
from qualify.case import Case, CheckOutput
from qualify.checks_table import CheckRow
from qualify.compare import holds
from qualify.records import Comparison
from qualify.subjects import Subject
from suites.checks.evidence import (
    Evidence,
    WrongResultError,
    evidence_of,
    judge,
    outcome_of,
    output_of,
)
from suites.checks.rows import DTYPES, OP, profiles

PROBE = {"sites": "none", "grouping": "hv2", "length": "145", "heads": "32x48"}

_measured: dict[tuple[str, str, str], str | None] = {}


def run(case: Case, subject: Subject) -> CheckOutput:
    """Judges the op with both sites off, and the declaration.

    Args:
        case: the level of `dtype`.
        subject: what is judged.
    """
    carrier = case.levels.get("dtype", "fp32")
    evidence = _probe(case, subject, judged_arithmetic(subject.arithmetic, carrier))
    comparisons = [declaration_holds(subject.arithmetic, carrier), _not_looser(case, subject)]
    try:
        comparisons += judge(evidence, outcome_of(subject, evidence.problem))
    except WrongResultError as error:
        comparisons.append(error.comparison)
    return output_of(comparisons, evidence.problem)


def measured_arithmetic(case: Case, subject: Subject) -> str | None:
    """`ieee` where an fp32 subject shows with both sites off that it keeps fp32 operands; None: nothing
    shown.

    Args:
        case: names the carrier and the machine.
        subject: what is measured, once for each process.
    """
    if case.levels.get("dtype", "fp32") != "fp32":
        return None
    key = (subject.name, subject.origin, case.levels.get("sm", "cpu"))
    if key not in _measured:
        _measured[key] = _measure(case, subject)
    return _measured[key]


def _measure(case: Case, subject: Subject) -> str | None:
    evidence = _probe(case, subject, "ieee")
    try:
        comparisons = judge(evidence, outcome_of(subject, evidence.problem))
    except Exception:  # noqa: BLE001 - whatever a subject raises shows nothing about its precision
        return None
    return "ieee" if all(c.passed for c in comparisons) else None


def _probe(case: Case, subject: Subject, arithmetic: str) -> Evidence:
    levels = {"dtype": case.levels.get("dtype", "fp32"), "sm": case.levels.get("sm", "cpu")}
    probe = Case(case.check, levels, "random", 0, case.subject)
    return evidence_of(probe, subject, arithmetic=arithmetic, **PROBE)


def _not_looser(case: Case, subject: Subject) -> Comparison:
    """A coarser arithmetic than the measured one is declared in so many words: that is room for errors."""
    carrier = case.levels.get("dtype", "fp32")
    declared = (getattr(subject.module, "ARITHMETIC", None) or {}).get(carrier)
    measured = measured_arithmetic(case, subject)
    looser = measured == "ieee" and declared not in (None, "ieee")
    return holds(
        "declared_and_measured_arithmetic",
        int(looser),
        1,
        f"{declared} is declared for {carrier}, with both sites off it computes in {measured}; declare that",
        derivation="errors with both sites off, held against the budget of fp32 operands",
    )


ROWS = (
    CheckRow(
        "op.arithmetic",
        "suites.checks.arithmetic:run",
        "the declared arithmetic buys no room: neither coarser than usual nor than measured",
        needs=OP,
        axes={"dtype": DTYPES, "sites": ("none",)},
        regimes=("random",),
        strength="all",
        must_run=tuple({"dtype": dtype} for dtype in DTYPES),
        profiles=profiles("all", "all", quick={"dtype": ("fp32", "bf16")}, quick_strength="all"),
    ),
)
