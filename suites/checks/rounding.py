"""Outputs rounded once, to nearest: each is a product of two short numbers that is longer than the carrier.

In one problem a token's key is a unit vector of its own and its query a multiple of it, so that its output
is that multiple of its value, and dbeta is one of its elements times a power of two. In another a token is
alone, and its value and incoming gradient meet in one column: dq is a multiple of the key and dk of the
query. In the third a lone token writes nothing, since its value is zero: dv is its beta times one row of the
state's gradient, and dg the one element in which that gradient and the state meet. Every operand of a matmul
fits eight bits, every product the accumulator; what is left is how a kernel writes its results.
"""

from __future__ import annotations

import torch

from qualify.case import Case, CheckOutput
from qualify.checks_table import CheckRow
from qualify.compare import compare_bound, layout_of, ulp
from qualify.problem import CARRIERS, Problem
from qualify.records import Comparison
from qualify.regimes import Numbers
from qualify.subjects import Subject
from suites.checks.bits import Exact, judged, remembered
from suites.checks.evidence import WrongResultError, device_of, outcome_of, output_of
from suites.checks.probes import CARRIER_BITS, moved_to, packed, short
from suites.checks.rows import DTYPES, OP, levels, profiles
from suites.oracle import expected

Tensor = torch.Tensor

BITS = 8
"""Significant bits of every operand: what the narrowest carrier holds."""

SEQUENCES, HEADS, VALUE_HEADS = 6, 2, 4
BLOCK_V, LARGEST_CODE = 16, 448.0

LARGEST_RAW = 12.0
"""Raw betas are as large as this: sigmoids are near 0 and near 1."""

UNIT = 2.0**-24
FACTOR = 8 * UNIT
"""What turns gates to another base and back may move dg, relative to it: far less than a tie is away."""

SIGMOID_ROUNDINGS, RELATIVE_ROUNDINGS = 8.0, 32.0
"""Roundings of fp32 in 1 - y, as parts of 1, and in an exponential and products, relative to them."""

DERIVATION = (
    "each element is the product of two numbers of eight bits, exact in fp32 and longer than a 16-bit "
    "carrier: it is rounded once, to nearest, and no product lies in the middle between two results"
)


def run(case: Case, subject: Subject) -> CheckOutput:
    """Judges how o, dq, dk, dv, dg and dbeta are rounded.

    Args:
        case: levels of dtype, sites, packing, scalars and heads.
        subject: what is judged.
    """
    key = ("rounding", tuple(sorted(case.levels.items())), case.seed, device_of(case))
    exacts = [
        ("", remembered((*key, "outputs"), lambda: outputs(case))),
        ("keys.", remembered((*key, "gradients"), lambda: gradients(case))),
        ("state.", remembered((*key, "states"), lambda: states(case))),
    ]
    return output_of(judged(subject, exacts), *(exact.problem for _, exact in exacts))


def outputs(case: Case) -> Exact:
    """The problem whose `o` and `dbeta` are judged."""
    at, numbers = case.levels, Numbers(case.seed + 83)
    K, V = (int(n) for n in at["heads"].split("x"))
    multiple = _numbers(numbers, SEQUENCES, K, HEADS, 1)
    own = torch.stack([numbers.uniform(K).argsort() for _ in range(SEQUENCES)])
    keys = torch.eye(K, dtype=torch.float64)[own].unsqueeze(2).expand(-1, -1, HEADS, -1)
    of_value_head = multiple.repeat_interleave(VALUE_HEADS // HEADS, 2)
    values = _without_ties(_numbers(numbers, SEQUENCES, K, VALUE_HEADS, V), of_value_head, at["dtype"])
    # one column of each token has a gradient, a power of two: dbeta is the same product as its output
    column = (numbers.uniform(SEQUENCES, K, VALUE_HEADS, 1) * V).floor().long()
    arriving = numbers.pick((1.0, -2.0, 0.5, 4.0), SEQUENCES, K, VALUE_HEADS, 1)
    do = torch.zeros_like(values).scatter(-1, column, arriving)
    return _exact(case, {"o": None, "dbeta": None}, q=multiple * keys, k=keys, v=values, do=do)


def run_strength(case: Case, subject: Subject) -> CheckOutput:
    """Judges the gradient of a raw beta, where the op makes a sigmoid of it, to the precision of fp32; where
    beta is narrower, what arrives and what is returned may be rounded to its dtype.

    Args:
        case: levels of dtype, fused, sites, packing and heads.
        subject: what is judged.
    """
    problem = strengths(case)
    try:
        outcome = outcome_of(subject, problem)
    except WrongResultError as error:
        return output_of([error.comparison], problem)
    return output_of([judge_strength(problem, outcome["dbeta"])], problem)


def strengths(case: Case) -> Problem:
    """The problem of `outputs` with raw betas of any size and sign."""
    numbers, neg = Numbers(case.seed + 97), case.levels["fused"] == "neg"
    problem = outputs(case).problem
    raw = numbers.uniform(*problem.beta.shape, low=-LARGEST_RAW, high=LARGEST_RAW)
    return problem.with_(beta=raw.to(problem.beta), use_beta_sigmoid_in_kernel=True, allow_neg_eigval=neg)


def judge_strength(problem: Problem, actual: Tensor | None) -> Comparison:
    """Holds dbeta against a bound of fp32.

    A sigmoid y is a few roundings off, and `y (1 - y)` loses what cancels in 1 - y: parts of 1, whatever is
    left of it.

    Args:
        problem: of `strengths`.
        actual: the subject's dbeta.
    """
    target, dtype = expected(problem)["dbeta"], problem.beta.dtype
    assert target is not None
    y = problem.beta.double().sigmoid()
    arriving = target / (y * (1 - y))
    own = 2 * ulp(target, dtype) if dtype is not torch.float32 else torch.zeros_like(target)
    return compare_bound(
        "dbeta",
        target,
        actual,
        UNIT * (SIGMOID_ROUNDINGS * arriving.abs() + RELATIVE_ROUNDINGS * target.abs()) + own,
        layout_of("dbeta", dims=target.dim()),
        dtype=dtype,
        derivation="fp32 bound of a sigmoid's slope, of what arrives at it and of what cancels in 1 - y, and "
        "two units in the last place of a narrower beta",
    )


def gradients(case: Case) -> Exact:
    """The problem whose `dq` and `dk` are judged."""
    at, numbers = case.levels, Numbers(case.seed + 89)
    K, V = (int(n) for n in at["heads"].split("x"))
    column = (numbers.uniform(SEQUENCES, 1, VALUE_HEADS, 1) * V).floor().long()
    zeros = torch.zeros(SEQUENCES, 1, VALUE_HEADS, V, dtype=torch.float64)
    arriving = _numbers(numbers, SEQUENCES, 1, HEADS, 1)
    of_value_head = torch.zeros(SEQUENCES, 1, VALUE_HEADS, 1, dtype=torch.float64)
    of_value_head[:, :, :: VALUE_HEADS // HEADS] = arriving  # one of each group: a sum would be rounded
    q, k = (_without_ties(_numbers(numbers, SEQUENCES, 1, HEADS, K), arriving, at["dtype"]) for _ in range(2))
    v, do = zeros.scatter(-1, column, 1.0), zeros.scatter(-1, column, of_value_head)
    return _exact(case, {"dq": None, "dk": None}, q=q, k=k, v=v, do=do)


def states(case: Case) -> Exact:
    """The problem whose `dv` and `dg` are judged.

    The row of the state that the key reads is zero. In another row one element meets a gradient; one of each
    tile, which meets none, is the largest code, so that rounding moves nothing.
    """
    at, numbers = case.levels, Numbers(case.seed + 101)
    K, V = (int(n) for n in at["heads"].split("x"))
    shape = (SEQUENCES, VALUE_HEADS)
    rows = torch.stack([numbers.uniform(K).argsort()[:3] for _ in range(SEQUENCES)])
    read, met, largest = (rows[:, i, None].expand(shape) for i in range(3))
    column = (numbers.uniform(*shape) * V).floor().long()
    beta, arriving = _numbers(numbers, *shape, 1), _numbers(numbers, *shape)
    held = _numbers(numbers, *shape) if at["sites"] == "none" else _on_the_grid(numbers, *shape)
    held = _without_ties(held, arriving, at["dtype"])
    n, h = torch.meshgrid(*map(torch.arange, shape), indexing="ij")
    state, dht = (torch.zeros(*shape, K, V, dtype=torch.float64) for _ in range(2))
    state[n, h, largest] = torch.zeros(V).scatter(0, torch.arange(0, V, BLOCK_V), LARGEST_CODE).double()
    state[n, h, met, column] = held
    dht[n, h, read] = _without_ties(_numbers(numbers, *shape, V), beta, at["dtype"])
    dht[n, h, read, column] = 0.0  # else dg would be a sum
    dht[n, h, met, column] = arriving
    key = torch.nn.functional.one_hot(rows[:, 0], K).double().view(SEQUENCES, 1, 1, K)
    exact = _exact(
        case,
        {"dv": None, "dg": None},
        q=torch.zeros(SEQUENCES, 1, HEADS, K),
        k=key.expand(-1, -1, HEADS, -1),
        v=torch.zeros(SEQUENCES, 1, VALUE_HEADS, V),
        beta=beta.view(SEQUENCES, 1, VALUE_HEADS),
        initial_state=state,
        dht=dht,
    )
    exact.room = {"dg": FACTOR * exact.expected["dg"].double().abs()}
    return exact


def _exact(case: Case, parts: dict[str, None], *, q: Tensor, k: Tensor, v: Tensor, **others: Tensor) -> Exact:
    """The problem of float tensors as the cell's call has them; no gates, and betas of 1 unless given."""
    at, carrier = case.levels, CARRIERS[case.levels["dtype"]]
    scalar = CARRIERS.get(at["scalars"], carrier)
    ones = torch.ones(v.shape[:3])
    problem = Problem(
        q=q.to(carrier),
        k=k.to(carrier),
        v=v.to(carrier),
        g=torch.zeros_like(ones, dtype=scalar),
        beta=others.pop("beta", ones).to(scalar),
        state_format="e4m3" if at["sites"] == "both" else None,
        state_block_v=BLOCK_V,
        w_format="e4m3" if at["sites"] == "both" else None,
    )
    problem = problem.with_(**{n: x.to(carrier if n == "do" else torch.float32) for n, x in others.items()})
    return Exact(moved_to(device_of(case), packed(problem, at)), {**parts}, DERIVATION, wrong=())


def _numbers(numbers: Numbers, *shape: int) -> Tensor:
    """Any numbers of eight bits, none of them near zero."""
    return short((1.0 + numbers.uniform(*shape)) * numbers.pick((1.0, -1.0, 0.5, -2.0), *shape), BITS)


def _on_the_grid(numbers: Numbers, *shape: int) -> Tensor:
    """Codes of E4M3, beside the largest one as beside any other."""
    return short((1.0 + numbers.uniform(*shape)) * numbers.pick((1.0, -8.0, 0.5, 64.0), *shape), 4)


def _without_ties(x: Tensor, factor: Tensor, dtype: str) -> Tensor:
    """`x` with 1 for every element whose product with `factor` would lie between two results."""
    mantissa = torch.frexp(x * factor).mantissa * 2.0 ** CARRIER_BITS[dtype]
    return torch.where((mantissa - mantissa.trunc()).abs() == 0.5, torch.ones_like(x), x)


ROWS = (
    CheckRow(
        "probe.rounding",
        "suites.checks.rounding:run",
        "results that are cut, or rounded twice, hide in the noise of a 16-bit carrier",
        needs=OP,
        axes=levels("dtype")
        | {"sites": ("none", "both"), "packing": ("batch", "docs"), "scalars": ("carrier", "fp32")}
        # the default scale is a power of two
        | {"heads": ("16x16", "64x64")},
        regimes=("probe",),
        must_run=tuple({"dtype": dtype} for dtype in DTYPES),
        profiles=profiles("each", "pairs", quick={"dtype": ("fp16", "bf16"), "heads": ("16x16",)}),
    ),
    CheckRow(
        "probe.strength",
        "suites.checks.rounding:run_strength",
        "a sigmoid that was saved in the carrier has lost the slope of large betas",
        needs=OP,
        axes=levels("dtype")
        | {
            "fused": ("sigmoid", "neg"),
            "sites": ("none",),
            "packing": ("batch", "docs"),
            "scalars": ("fp32", "bf16"),
            "heads": ("16x16",),
        },
        regimes=("probe",),
        profiles=profiles("each", "pairs", quick={"dtype": ("bf16",)}),
    ),
)
