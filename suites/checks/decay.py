"""The decay alone, to the precision of fp32 in every carrier.

Where no token writes (beta = 0), the final state is the initial one times the exponential of the sum of all
gates, and the initial state's gradient is the final one's times the same. No matmul operand takes part in
that, so the noise of a 16-bit carrier hides nothing: a gate that was narrowed shows, or a running sum, and so
does a gate that the op itself makes of a raw one in less than fp32.
"""

from __future__ import annotations

import torch

from qualify.case import Case, CheckOutput
from qualify.checks_table import CheckRow
from qualify.compare import compare_bound, layout_of
from qualify.problem import Outcome, Problem
from qualify.records import Comparison
from qualify.regimes import build_problem
from qualify.subjects import Subject
from references.wrong_answers import WRONG_ANSWERS
from suites.checks.evidence import WrongResultError, device_of, outcome_of, output_of
from suites.checks.rows import DTYPES, OP, profiles
from suites.oracle import activated, expected, softplus

Tensor = torch.Tensor

JUDGED = ("final_state", "dh0")
UNIT = 2.0**-24
"""Unit roundoff of fp32."""

CHUNK = 64
PER_EXPONENTIAL = 3.0
"""Roundings of an exponential and the product with it, for each chunk or for each token."""

BASE_ROUNDINGS = 3.0
"""Roundings of a gate where the exponential has another base: of the constant, product and argument."""

PER_ACTIVATION = 8.0
"""Roundings of a gate that is made of a raw one, as parts of 1: a logarithm takes its argument rounded beside
1, and the logarithm of a GPU is off by as much as 2^-22 there."""

WIDER = 4.0
"""Raw gates are this many times wider than elsewhere, so that both tails of a softplus count."""

DEPARTURES = ("gate_bf16", "gate_base_two", "gate_exclusive", "first_gate_head", "no_update_decay")
"""Wrong answers about the decay, as far as it can show here."""

CLEAR = 2.0
"""A wrong answer is excluded when it is this many budgets away: its own rounding may bring it one nearer."""


def run(case: Case, subject: Subject) -> CheckOutput:
    """Judges the final state and the initial state's gradient where no token writes.

    Args:
        case: levels of `qualify.regimes.AXES`; sequences are not packed.
        subject: what is judged.
    """
    problem = silent(build_problem(case.levels, "random", case.seed, device_of(case)))
    try:
        outcome = outcome_of(subject, problem)
    except WrongResultError as error:
        return output_of([error.comparison], problem)
    return output_of(judge(problem, outcome), problem)


def silent(problem: Problem) -> Problem:
    """A problem in which no token writes and the output has no gradient; raw gates are wide."""
    g = WIDER * problem.g if problem.use_gate_in_kernel else problem.g
    return problem.with_(g=g, beta=torch.zeros_like(problem.beta), do=None)


def judge(problem: Problem, outcome: Outcome) -> list[Comparison]:
    """Holds both states of an outcome against the bound of fp32 arithmetic.

    Args:
        problem: `silent`, of sequences that are not packed.
        outcome: of a subject.
    """
    exact = expected(problem)
    wrong = {name: expected(problem, semantics=WRONG_ANSWERS[name].semantics) for name in DEPARTURES}
    leaves = {name: leaf.detach().double() for name, leaf in problem.leaves().items()}
    bound = relative_bound(activated(problem, leaves)[2]) + gate_bound(problem)
    return [_judged(name, bound, exact, outcome[name], wrong) for name in JUDGED]


def relative_bound(g: Tensor) -> Tensor:
    """Largest relative error of `exp(sum g)` in fp32, `[B, HV]`, the larger of two ways to compute it.

    Args:
        g: log decays `[B, T, HV]`. A sum over a chunk rounds its partial sums, and they are largest one after
            the other; a recurrence rounds an exponential and a product for each token. Either way each gate
            may be rounded in another base, and so may the exponential's argument.
    """
    sizes = g.double().abs()
    total, tokens = sizes.sum(1), g.shape[1]
    partial = torch.stack([chunk.cumsum(1).sum(1) for chunk in torch.split(sizes, CHUNK, 1)])
    chunks = partial.sum(0) + PER_EXPONENTIAL * len(partial)
    return UNIT * (BASE_ROUNDINGS * total + chunks.clamp_min(PER_EXPONENTIAL * tokens))


def gate_bound(problem: Problem) -> Tensor:
    """Largest error of the sum of gates that fp32 makes of raw ones, `[B, HV]`; zero where gates are given.

    `exp(A_log) * softplus(g + dt_bias)` rounds the sum, the exponentials and their arguments in another base,
    and the logarithm, which is off by parts of 1 where the softplus is small.
    """
    if not problem.use_gate_in_kernel:
        return problem.g.new_zeros(problem.g.shape[0], problem.g.shape[2], dtype=torch.float64)
    assert problem.A_log is not None
    raw, log_size = problem.g.double(), problem.A_log.double()
    raw = raw if problem.dt_bias is None else raw + problem.dt_bias.double()
    relative = PER_EXPONENTIAL + BASE_ROUNDINGS * log_size.abs()
    errors = PER_ACTIVATION + BASE_ROUNDINGS * raw.abs() + relative * softplus(raw)
    return UNIT * log_size.exp() * errors.sum(1)


def _judged(
    name: str, bound: Tensor, exact: Outcome, actual: Tensor | None, wrong: dict[str, Outcome]
) -> Comparison:
    target = exact[name]
    assert target is not None
    allowed = bound[..., None, None] * target.abs() + 2.0**-126
    distances = {
        other: float(((x - target).abs() / allowed).max()) / CLEAR
        for other, found in wrong.items()
        if (x := found[name]) is not None
    }
    return compare_bound(
        name,
        target,
        actual,
        allowed,
        layout_of(name),
        derivation="fp32 bound of a running sum over each chunk, or of an exponential and a product for each "
        "token, and of another base",
        discrimination=distances,
    )


ROWS = (
    CheckRow(
        "probe.decay",
        "suites.checks.decay:run",
        "where no token writes, nothing but the decay is left, and nothing hides it",
        needs=OP,
        axes={
            "dtype": DTYPES,
            "gates": ("ordinary", "weak", "zero"),
            "packing": ("single", "batch"),
            "sites": ("none", "w"),
            "layout": ("kv", "vk"),
            "length": ("65", "145"),
            "heads": ("16x16", "32x48"),
            "grouping": ("hv1", "hv2"),
            "scalars": ("fp32", "carrier", "bf16"),
        },
        regimes=("random",),
        must_run=tuple(
            {"dtype": dtype, "gates": "ordinary", "scalars": scalars}
            for dtype in DTYPES
            for scalars in ("fp32", "carrier")
        ),
        profiles=profiles(
            "each", "pairs", quick={"dtype": ("bf16",), "gates": ("ordinary",), "length": ("65",)}
        ),
    ),
    CheckRow(
        "probe.gate",
        "suites.checks.decay:run",
        "a gate that the op makes of a raw one is made in fp32, whatever the dtype of the raw one",
        needs=OP,
        axes={
            "dtype": DTYPES,
            "fused": ("gate", "bare_gate"),
            "scalars": ("carrier", "fp32", "bf16"),
            "packing": ("batch",),
            "sites": ("none",),
            "length": ("65",),
            "heads": ("16x16",),
            "grouping": ("hv2",),
        },
        regimes=("random",),
        profiles=profiles("pairs", "pairs", quick={"dtype": ("bf16",)}),
    ),
)
