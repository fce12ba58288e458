"""Every launch configuration of a subject, forced one by one: each must be exact, and repeatable."""

from __future__ import annotations

from qualify.case import Case, CheckOutput
from qualify.checks_table import CheckRow
from qualify.compare import compare_exact, holds
from qualify.records import Comparison, Verdict
from qualify.subjects import Subject
from references.qdq import qdq_state, qdq_w
from suites.checks.bits import Exact
from suites.checks.evidence import device_of, outcome_of, output_of
from suites.checks.exact import exact_of
from suites.checks.rows import DTYPES, OP, profiles

PARTS = 4
"""The axis `part`: which quarter of the launch rows a case forces."""


def run(case: Case, subject: Subject) -> CheckOutput:
    """Forces each launch row of one part of the table and judges the op without tolerance, twice.

    Args:
        case: levels of `qualify.exact_regimes.DEFAULTS` and of `part`.
        subject: what is judged.
    """
    exact = exact_of({k: v for k, v in case.levels.items() if k != "part"}, case.seed, device_of(case))
    names = subject.launch_rows[int(case.levels["part"]) :: PARTS]
    comparisons = [c for name in names for c in _forced(name, subject, exact)]
    if not comparisons:
        comparisons = [
            holds("launch_rows", 0, 1, derivation="this part of the table of launch rows is empty")
        ]
    return output_of(comparisons, exact.problem)


def _forced(name: str, subject: Subject, exact: Exact) -> list[Comparison]:
    """One row, forced: on the op and on the QDQ functions. A row refuses what it is not made for."""
    found: list[Comparison] = []
    refusals = []
    for judge in (_op, _qdq):
        try:
            found += judge(name, subject, exact)
        except (ValueError, NotImplementedError) as error:
            refusals.append(str(error))
    if not found:
        reason = refusals[0] if refusals else "it is used by nothing here"
        found.append(holds(f"{name}.refuses", 0, 1, derivation=f"the row is not for this call: {reason}"))
    return found


def _op(name: str, subject: Subject, exact: Exact) -> list[Comparison]:
    assert subject.force_launch_row is not None
    with subject.force_launch_row(name):
        first, second = (outcome_of(subject, exact.problem) for _ in "12")
    found = exact.judge(first, f"{name}.")
    if subject.deterministic:
        failure = Verdict.FAILED_NONDETERMINISTIC
        found += [
            compare_exact(f"{name}.repeated.{tensor}", x, second[tensor], failure=failure)
            for tensor, x in first.tensors.items()
            if x is not None and x.numel()
        ]
    return found


def _qdq(name: str, subject: Subject, exact: Exact) -> list[Comparison]:
    assert subject.force_launch_row is not None
    x = exact.problem.v.flatten(0, 2) / 3
    found = []
    with subject.force_launch_row(name):
        if subject.qdq_state is not None:
            target = qdq_state(x, block_v=16, fmt="e4m3")
            actual = subject.qdq_state(x.clone(), block_v=16, fmt="e4m3")
            found.append(compare_exact(f"{name}.qdq_state", target, actual))
        if subject.qdq_w is not None:
            found.append(compare_exact(f"{name}.qdq_w", qdq_w(x), subject.qdq_w(x.clone(), fmt="e4m3")))
    return found


ROWS = (
    CheckRow(
        "op.launch_rows",
        "suites.checks.launch_rows:run",
        "the fastest configuration hides the faulty one: each is forced, judged and repeated",
        needs=("launch_rows", *OP),
        axes={
            "dtype": DTYPES,
            "sites": ("both",),
            "heads": ("48x64", "64x64"),
            "length": ("129",),
            "part": tuple(str(i) for i in range(PARTS)),
        },
        regimes=("exact",),
        strength="all",
        profiles=profiles("each", "all"),
    ),
)
