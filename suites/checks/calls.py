"""Calls that meet: two of one shape in flight, as layers of a model are, and buffers that hold new inputs.

Whatever a subject keeps for its backward, or caches by shape or by address, belongs to one call. So two calls
run forward before either runs backward, one of them backward twice; and one call finds other numbers in the
very tensors of an earlier one. Each answer is the one that the call gives alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from qualify.budgets import judged_arithmetic
from qualify.case import Case, CheckOutput
from qualify.checks_table import CheckRow
from qualify.compare import compare_exact, holds
from qualify.problem import Outcome, Problem, run_op
from qualify.records import Comparison
from qualify.regimes import build_problem
from qualify.subjects import Subject
from suites.checks.evidence import (
    WrongResultError,
    checked_op,
    device_of,
    evidence_for,
    fresh,
    judge,
    output_of,
)
from suites.checks.rows import DTYPES, OP, levels, profiles

Tensor = torch.Tensor

OTHER_SEED = 7919
"""Added to the seed for the second problem."""


def run(case: Case, subject: Subject) -> CheckOutput:
    """Judges two calls of one shape, each alone, both in flight, and one in the other's tensors.

    Args:
        case: levels of `qualify.regimes.AXES`.
        subject: what is judged.
    """
    one, other = _two_problems(case)
    tensors = [fresh(problem) for problem in (one, other)]  # held: neither call finds the other's addresses
    try:
        alone = [_copied(run_op(checked_op(subject, p), p)) for p in tensors]
        alike = _Alike(subject, case, (one, other), alone)
        comparisons = _in_flight(subject, (one, other), alike)
        first, second = _reused(subject, one, other)
        # memory of calls that have ended is handed out again, so the first may be the one that is mixed up
        comparisons += [*alike("fresh", 0, first), *alike("reused", 1, second)]
    except WrongResultError as error:
        comparisons = [error.comparison]
    return output_of(comparisons, one, other)


def _two_problems(case: Case) -> tuple[Problem, Problem]:
    """Two problems of one shape; packed, the documents of the second come in reverse order."""
    device = device_of(case)
    one = build_problem(case.levels, case.regime, case.seed, device)
    other = build_problem(case.levels, case.regime, case.seed + OTHER_SEED, device)
    if one.cu_seqlens is not None:
        lengths = one.cu_seqlens.diff().flip(0)
        ends = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).to(one.cu_seqlens)
        other = other.with_(cu_seqlens=ends)
    return one, other


def _copied(outcome: Outcome) -> Outcome:
    """A copy that no later call can write into."""
    return Outcome({name: None if x is None else x.clone() for name, x in outcome.tensors.items()})


@dataclass(frozen=True)
class _Alike:
    """Holds an outcome against the same call's alone: bits, or budgets where repeated calls may differ."""

    subject: Subject
    case: Case
    problems: Sequence[Problem]
    alone: Sequence[Outcome]

    def __call__(self, when: str, which: int, found: Outcome) -> list[Comparison]:
        if self.subject.deterministic:
            return [
                compare_exact(f"{when}.{name}", x, found[name], derivation="the same call alone")
                for name, x in self.alone[which].tensors.items()
                if x is not None and x.numel()
            ]
        arithmetic = judged_arithmetic(self.subject.arithmetic, self.case.levels["dtype"])
        return judge(evidence_for(self.problems[which], arithmetic), found)


@dataclass
class _Started:
    """A call that has run forward and waits for its backward."""

    problem: Problem
    leaves: dict[str, Tensor]
    outputs: dict[str, Tensor | None]

    def outcome(self, *, again: bool = False) -> Outcome:
        """Outputs as they are now, and gradients; `again` keeps the graph for one more pass."""
        given = {"o": self.problem.do, "final_state": self.problem.dht}
        pairs = [(y, dy) for n, y in self.outputs.items() if y is not None and (dy := given[n]) is not None]
        found = torch.autograd.grad(
            [y for y, _ in pairs],
            list(self.leaves.values()),
            [dy for _, dy in pairs],
            retain_graph=again,
            allow_unused=True,
        )
        tensors = self.outputs | dict(zip(self.leaves, found, strict=True))
        return Outcome({n: None if x is None else x.detach() for n, x in tensors.items()})


def _start(subject: Subject, problem: Problem) -> _Started:
    leaves = {name: leaf.detach().requires_grad_() for name, leaf in problem.leaves().items()}
    names = {"dh0": "initial_state", "dA_log": "A_log", "ddt_bias": "dt_bias"}
    options = problem.options() | {names[n]: x for n, x in leaves.items() if n in names}
    tokens = (leaves[n] for n in ("dq", "dk", "dv", "dg", "dbeta"))
    o, final_state = checked_op(subject, problem)(*tokens, **options)
    return _Started(problem, leaves, {"o": o, "final_state": final_state})


def _in_flight(subject: Subject, problems: Sequence[Problem], alike: _Alike) -> list[Comparison]:
    """Forward, forward, backward of the first, of the second, and of the first once more."""
    first, second = (_start(subject, fresh(problem)) for problem in problems)
    early = first.outcome(again=True)
    late = second.outcome()
    try:
        once_more = first.outcome()
    except RuntimeError:  # a graph that can be used once refuses in so many words: no wrong number comes out
        repeated = [holds("once_more.refused", 0, 1)]
    else:
        repeated = alike("once_more", 0, once_more)
    # held against the calls alone only now: what a later call overwrites shows
    return [*alike("first_of_two", 0, early), *alike("second_of_two", 1, late), *repeated]


def _reused(subject: Subject, one: Problem, other: Problem) -> tuple[Outcome, Outcome]:
    """The first problem's outcome, and the second one's in the very tensors."""
    tensors = fresh(one)
    first = _copied(_start(subject, tensors).outcome())
    for name, x in vars(other).items():
        if isinstance(x, Tensor):
            getattr(tensors, name).copy_(x)
    return first, _start(subject, tensors).outcome()


ROWS = (
    CheckRow(
        "op.calls",
        "suites.checks.calls:run",
        "layers of one shape are in flight together, and buffers are used again: a call has its own memory",
        needs=OP,
        axes=levels("dtype", "sites", "layout")
        | {
            "packing": ("single", "docs"),
            "fused": ("none", "all"),
            "length": ("65",),
            "heads": ("32x48",),
            "grouping": ("hv2",),
            "block_v": ("16",),
        },
        regimes=("random",),
        must_run=tuple({"dtype": dtype, "sites": "both"} for dtype in DTYPES),
        profiles=profiles(
            "each", "pairs", quick={"dtype": ("bf16",), "sites": ("both",), "packing": ("docs",)}
        ),
    ),
)
