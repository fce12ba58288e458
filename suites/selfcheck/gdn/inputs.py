"""Problems for the fused op, and what it is held against: bits in an exact regime, else derived budgets."""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any

import torch

from kernels.gdn import ARITHMETIC, chunk_gated_delta_rule
from qualify.exact_regimes import build_exact_problem
from qualify.problem import Outcome, Problem, run_op
from qualify.regimes import build_problem
from suites.checks.evidence import CARRIER_NAMES, dtype_of, evidence_for, judge
from suites.oracle import expected

Tensor = torch.Tensor


def levels_of(cell: str) -> dict[str, str]:
    """`dtype:bf16,length:65` as axis -> level."""
    pairs = [part.partition(":") for part in cell.split(",")]
    return {axis: level for axis, _, level in pairs}


@lru_cache
def exact_problem(cell: str, seed: int = 0) -> Problem:
    """A problem on which every correct implementation gives the same bits, proved by its generator."""
    return build_exact_problem(levels_of(cell), seed)


def random_problem(cell: str, seed: int = 0) -> Problem:
    """An ordinary problem."""
    return build_problem(levels_of(cell), "random", seed)


def run(problem: Problem, **more: Any) -> Outcome:
    """The op, forward and backward, with further options of the call."""
    return run_op(partial(chunk_gated_delta_rule, **more), problem)


def wrong_bits(problem: Problem, actual: Outcome) -> list[str]:
    """The tensors of an outcome that are not the exact answer rounded to their dtype."""
    exact = {name: x for name, x in expected(problem).tensors.items() if x is not None}
    return [n for n, x in exact.items() if not same(actual[n], x.to(dtype_of(problem, n)))]


def different_bits(one: Outcome, other: Outcome) -> list[str]:
    """The tensors in which two outcomes differ."""
    names = one.tensors.keys() | other.tensors.keys()
    return sorted(n for n in names if not same(one[n], other[n]))


def same(one: Tensor | None, other: Tensor | None) -> bool:
    """Whether two tensors are equal in dtype, shape and every value, or both are absent."""
    if one is None or other is None:
        return one is other
    return one.dtype == other.dtype and torch.equal(one, other)


def beyond_budget(problem: Problem, actual: Outcome, *, arithmetic: str = "", smooth: bool) -> list[str]:
    """The tensors of an outcome that are further from the oracle than its noisy runs allow.

    Args:
        problem: what was run.
        actual: the op's outcome.
        arithmetic: precision of matmul operands; default what the op declares for the carrier.
        smooth: whether no rounding of a site but the last can flip a code.
    """
    precision = arithmetic or ARITHMETIC[CARRIER_NAMES[problem.carrier]]
    evidence = evidence_for(problem, precision, smooth=smooth)
    return [f"{c.tensor}: {c.error:.3g} > {c.budget:.3g}" for c in judge(evidence, actual) if not c.passed]
