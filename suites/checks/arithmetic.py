"""The precision that a subject declares, held against the one that it shows with both sites off.

With the sites off nothing flips, so an fp32 result shows by its error alone whether matmul operands were
kept in fp32 or rounded to TF32. The 16-bit carriers hide it: their outputs are rounded more coarsely than
that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from qualify.budgets import declaration_holds, judged_arithmetic
from qualify.case import Case, CheckOutput
from qualify.checks_table import CheckRow
from qualify.compare import holds
from qualify.problem import Outcome
from qualify.records import Comparison
from qualify.subjects import Subject, declared_arithmetic
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

ONE_CHUNK = {"sites": "state", "length": "64"}
"""What the probe of a path with a site has instead: a state that is given and one chunk, so that no code
flips before the end."""

HEADS = ("32x48", "64x64")
"""Sizes of heads that a declaration is held against: implementations choose a way to compute by them."""

COARSE = 0.1
"""Errors above this share of what rounded operands give come from rounded operands."""

_measured: dict[tuple[str, ...], str | None] = {}


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
    """`ieee` where an fp32 subject shows that it keeps fp32 operands; None: nothing shown.

    It has to show it with both sites off, where nothing hides it. What is called with a site on or with
    larger heads may be another kernel: one whose gradients all have the errors of rounded operands is judged
    as what it is. Every other error there is an error.

    Args:
        case: names the carrier, the machine, the sites and the heads.
        subject: what is measured, once for each process, sites and heads.
    """
    if case.levels.get("dtype", "fp32") != "fp32" or _shown(case, subject, **PROBE) != "ieee":
        return None
    sites, heads = case.levels.get("sites", "none"), case.levels.get("heads", PROBE["heads"])
    path = {**PROBE, "heads": heads} | (ONE_CHUNK if sites != "none" else {})
    return "ieee" if path == PROBE or _shown(case, subject, **path) != "coarser" else None


def _shown(case: Case, subject: Subject, **levels: str) -> str | None:
    """`ieee`, `coarser` or None (neither) for one path of a subject, measured once."""
    key = (subject.name, subject.origin, case.levels.get("sm", "cpu"), *levels.values())
    if key not in _measured:
        _measured[key] = _measure(case, subject, levels)
    return _measured[key]


def _measure(case: Case, subject: Subject, levels: Mapping[str, str]) -> str | None:
    evidence = _probe(case, subject, "ieee", levels)
    try:
        outcome = outcome_of(subject, evidence.problem)
        comparisons = judge(evidence, outcome)
    except Exception:  # noqa: BLE001 - whatever a subject raises shows nothing about its precision
        return None
    if all(c.passed for c in comparisons):
        return "ieee"
    return "coarser" if _rounds_operands(outcome, _probe(case, subject, "tf32", levels)) else None


def _rounds_operands(outcome: Outcome, coarse: Evidence) -> bool:
    """Whether the error of every gradient is of the size that rounded operands give it."""
    sizes = [
        (error.square().mean().sqrt(), coarse.noise[name].errors.square().mean().sqrt())
        for name, error in coarse.errors(outcome).items()
        if name.startswith("d")
    ]
    return bool(sizes) and all(bool(error > COARSE * usual) for error, usual in sizes)


def _probe(
    case: Case, subject: Subject, arithmetic: str, levels: Mapping[str, str] = MappingProxyType(PROBE)
) -> Evidence:
    known = {"dtype": case.levels.get("dtype", "fp32"), "sm": case.levels.get("sm", "cpu")}
    probe = Case(case.check, known, "random", 0, case.subject)
    return evidence_of(probe, subject, arithmetic=arithmetic, **levels)


def _not_looser(case: Case, subject: Subject) -> Comparison:
    """A coarser arithmetic than every measured one is declared in so many words: that is room for errors."""
    carrier = case.levels.get("dtype", "fp32")
    declared = declared_arithmetic(subject.module).get(carrier)
    looser = declared not in (None, "ieee") and all(
        measured_arithmetic(replace(case, levels={**case.levels, "sites": sites, "heads": heads}), subject)
        for sites in ("none", "state")
        for heads in HEADS
    )
    return holds(
        "declared_and_measured_arithmetic",
        int(looser),
        1,
        f"{declared} is declared for {carrier}, but it computes in ieee with the sites off and a state "
        f"site on, for heads of {' and '.join(HEADS)}; declare ieee",
        derivation="errors without a flip, held against the budget of fp32 operands",
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
