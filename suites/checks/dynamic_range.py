"""The range between very large and very small numbers, where a narrower format in between shows.

State and its gradient are fp32 whatever the carrier. A kernel that narrows them to fp16 before a matmul turns
65,536 into infinity and 2^-25 into nothing; one that narrows nothing gives every element to the precision of
its operands. The noise here has the operands' precision, but the range of fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch

from qualify.budgets import judged_arithmetic
from qualify.case import Case, CheckOutput
from qualify.checks_table import CheckRow, Constraint
from qualify.compare import compare_budget, holds
from qualify.problem import Problem
from qualify.records import Comparison
from qualify.regimes import AXES, build_problem
from qualify.subjects import Subject
from references.wrong_answers import WRONG_ANSWERS
from suites.checks.evidence import Evidence, device_of, evidence_for, remembered
from suites.checks.rows import DTYPES, OP, profiles
from suites.checks.whole import judged
from suites.oracle import expected

Tensor = torch.Tensor


@dataclass(frozen=True)
class Extreme:
    """A problem with numbers at the end of the range.

    Attributes:
        levels: over the levels of the case.
        change: from an ordinary problem.
        because: what narrows, overflows or vanishes.
        excludes: wrong answers that this extreme brings out.
        wide: whether operands keep the range of fp32; decays may underflow in them.
    """

    levels: Mapping[str, str]
    change: Callable[[Problem], Problem]
    because: str
    wide: bool = True
    excludes: tuple[str, ...] = ()


def run(case: Case, subject: Subject) -> CheckOutput:
    """Judges the eight tensors of one call at an end of the range.

    Args:
        case: the axis `extreme` names a row of `EXTREMES`; further levels as in `qualify.regimes.AXES`.
        subject: what is judged.
    """
    extreme = EXTREMES[case.levels["extreme"]]
    at = {axis: level for axis, level in {**case.levels, **extreme.levels}.items() if axis in AXES}
    arithmetic = judged_arithmetic(subject.arithmetic, at.get("dtype", "fp32"))
    wide = {"fp16": "tf32"}.get(arithmetic, arithmetic) if extreme.wide else arithmetic
    device = device_of(case)
    evidence = remembered(
        ("dynamic_range", case.levels["extreme"], tuple(at.items()), case.seed, device, wide),
        lambda: evidence_for(
            extreme.change(build_problem(at, "random", case.seed, device)),
            wide,
            smooth=True,
            wide=extreme.wide,
        ),
    )
    output = judged(case, subject, evidence, ())
    told = [name for name in extreme.excludes if _is_told_apart(evidence, name)]
    if told and all(c.passed for c in output.comparisons):
        output = replace(output, comparisons=(*output.comparisons, _excluded(tuple(told))))
    return replace(output, comparisons=tuple(_with_cause(c, extreme.because) for c in output.comparisons))


def _with_cause(comparison: Comparison, cause: str) -> Comparison:
    """A failing comparison that says what its problem is there to bring out."""
    if comparison.passed:
        return comparison
    said = (comparison.because, f"it shows where {cause}")
    return replace(comparison, because="; ".join(part for part in said if part))


def _is_told_apart(evidence: Evidence, name: str) -> bool:
    """Whether a wrong answer would have failed the budgets of this problem."""
    wrong = expected(evidence.problem, semantics=WRONG_ANSWERS[name].semantics)
    return not all(
        compare_budget(tensor, exact, wrong[tensor], evidence.limits[tensor], evidence.layouts[tensor]).passed
        for tensor, exact in evidence.tensors().items()
    )


def _excluded(names: tuple[str, ...]) -> Comparison:
    return holds(
        "range", 0, 1, derivation="the wrong answers fail the budgets that the subject met", excluded=names
    )


def _large_state(problem: Problem) -> Problem:
    """State elements of 2^17 in key channels that no query and no key looks at.

    Incoming gradients are so small that dq and dk fit in fp16 with room for what an implementation makes on
    the way, such as the gradient of a q that was scaled before: K^0.5 times as large.
    """
    assert problem.initial_state is not None
    state = problem.initial_state.clone()
    state[:, :, :2] = torch.sign(state[:, :, :2]) * 2.0**17
    q, k = problem.q.clone(), problem.k.clone()
    q[..., :2], k[..., :2] = 0.0, 0.0
    small = {n: None if x is None else x / 256 for n, x in (("do", problem.do), ("dht", problem.dht))}
    return problem.with_(q=q, k=k, initial_state=state, **small)


def _large_read(problem: Problem) -> Problem:
    """A large state that queries look at: q S is beyond 65504, and the scale takes `o` far below it."""
    kept = problem.q.clone()
    large = _large_state(problem)
    return large.with_(q=kept, scale=2.0**-7)


def _tiny_state_gradient(problem: Problem) -> Problem:
    """An incoming gradient of 2^-25 on the final state and none on the output."""
    assert problem.dht is not None
    return problem.with_(do=None, dht=problem.dht * 2.0**-25)


def _huge_state(problem: Problem) -> Problem:
    """A state of 2^100 that strong gates take away within the first tokens."""
    assert problem.initial_state is not None
    q, k = problem.q.clone(), problem.k.clone()
    q[:, :4], k[:, :4] = 0.0, 0.0
    return problem.with_(q=q, k=k, initial_state=problem.initial_state * 2.0**100)


def _large_query(problem: Problem) -> Problem:
    """Queries 64 times as long, and a scale that takes it back: powers of two leave every product alone."""
    scale = problem.k.shape[-1] ** -0.5 if problem.scale is None else problem.scale
    return problem.with_(q=problem.q * 64.0, scale=scale / 64.0)


_NARROW = ("state_copy_fp16",)
_ONE = {"packing": "single", "length": "63", "sites": "state", "grouping": "hv2"}
_TWO = {"packing": "batch", "length": "65", "sites": "none", "grouping": "hv2"}

EXTREMES: Mapping[str, Extreme] = MappingProxyType(
    {
        "large_state": Extreme(
            _ONE, _large_state, "a state above 65504 is narrowed to fp16", excludes=_NARROW
        ),
        "large_state_carried": Extreme(_TWO, _large_state, "a carried state above 65504 is narrowed to fp16"),
        "large_read": Extreme(_ONE, _large_read, "what is read from a state is narrowed before it is scaled"),
        "tiny_dht": Extreme(_ONE, _tiny_state_gradient, "a state gradient of 2^-25 is narrowed to fp16"),
        "tiny_dht_carried": Extreme(
            _TWO, _tiny_state_gradient, "a carried state gradient is narrowed to fp16"
        ),
        "huge_state": Extreme(
            _ONE | {"gates": "strong"},
            _huge_state,
            "infinity meets zero at the start of a chunk",
        ),
        "strong_gates": Extreme(
            _TWO | {"gates": "strong"},
            lambda p: p,
            "the exponential of a positive difference of gates is taken",
            wide=False,
        ),
        "extreme_gates": Extreme(
            _TWO | {"gates": "extreme"},
            lambda p: p,
            "the exponential of a positive difference of gates is taken",
            wide=False,
        ),
        "mixed_gates": Extreme(
            _TWO | {"gates": "mixed"}, lambda p: p, "decays lie between nothing and everything", wide=False
        ),
        "large_query": Extreme(_TWO, _large_query, "queries are taken to be short", wide=False),
    }
)
"""Name -> extreme."""


ROWS = (
    CheckRow(
        "op.dynamic_range",
        "suites.checks.dynamic_range:run",
        "states and their gradients keep the range of fp32, whatever the carrier",
        needs=OP,
        axes={
            "dtype": DTYPES,
            "extreme": tuple(EXTREMES),
            "heads": ("32x32", "48x64"),
            "layout": ("kv", "vk"),
        },
        regimes=("random",),
        constraints=(
            Constraint({"extreme": ("huge_state",), "dtype": ("fp16",)}, "fp16 gradients do not hold 2^100"),
        ),
        must_run=(
            *({"dtype": dtype, "extreme": "large_state"} for dtype in DTYPES),
            {"dtype": "fp16", "extreme": "large_read"},
            {"dtype": "fp16", "extreme": "tiny_dht"},
        ),
        profiles=profiles("pairs", "all"),
    ),
)
