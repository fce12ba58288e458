"""The QDQ functions alone, bit by bit: every carrier, format and tile width, on what is hard to round."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import torch

from qualify.case import Case, CheckOutput
from qualify.checks_table import CheckRow, Options
from qualify.compare import compare_exact, holds, mismatch
from qualify.problem import CARRIERS
from qualify.records import Comparison, Verdict
from qualify.regimes import Numbers
from qualify.subjects import Subject
from references.formats import grid_named
from references.qdq import qdq_state, qdq_w
from suites.checks.defaults import optional
from suites.checks.evidence import device_of
from suites.checks.probes import PATTERNS
from suites.checks.rows import DTYPES, GPU, levels, profiles

Tensor = torch.Tensor
Function = Callable[[Tensor], Tensor]

SHAPES = ((1, 48), (3, 40), (13, 16), (64, 130), (100, 33), (256, 16))
"""K x V: one row, no powers of two, partial tiles, the largest K."""

INCOMING = (1.1, 3e-4, -1000.0, 2.0**-14, 448.0, 449.0, -0.0, 7.3)
"""Incoming gradients that a cast to the format, a clamp or a scale would change."""


def run_state_bits(case: Case, subject: Subject) -> CheckOutput:
    """Judges the values of `qdq_state`.

    Args:
        case: levels of dtype, format and block_v.
        subject: what is judged.
    """
    own, reference = _state_functions(case, subject)
    return CheckOutput(tuple(_bits(own, reference, _state_inputs(case))))


def run_w_bits(case: Case, subject: Subject) -> CheckOutput:
    """Judges the values of `qdq_w`.

    Args:
        case: level of dtype.
        subject: what is judged.
    """
    own, reference = _w_functions(subject)
    return CheckOutput(tuple(_bits(own, reference, _w_inputs(case))))


def run_state_gradient(case: Case, subject: Subject) -> CheckOutput:
    """Judges the gradient of `qdq_state` and what must not depend on the call.

    Args:
        case: levels of dtype, format and block_v.
        subject: what is judged.
    """
    own, reference = _state_functions(case, subject)
    x = _ordinary(case, 13, 2 * int(case.levels["block_v"]) + 8)
    usual = case.levels["block_v"] == "64" and case.levels["format"] == "e4m3"
    plain = _by_default(subject.qdq_state, qdq_state, x) if usual else []
    return CheckOutput((*_gradients(own, x), *_invariants(own, reference, x, subject), *plain))


def run_state_many(case: Case, subject: Subject) -> CheckOutput:
    """Judges the values of `qdq_state` where one call holds very many states.

    Args:
        case: levels of dtype and blocks, the number of states.
        subject: what is judged.
    """
    own, reference = _state_functions(case, subject)
    like = torch.empty(0, dtype=CARRIERS[case.levels["dtype"]], device=device_of(case))
    return CheckOutput((_many(own, reference, like, (int(case.levels["blocks"]), 2, 3)),))


def run_w_gradient(case: Case, subject: Subject) -> CheckOutput:
    """Judges the gradient of `qdq_w` and what must not depend on the call.

    Args:
        case: level of dtype.
        subject: what is judged.
    """
    own, reference = _w_functions(subject)
    x = _ordinary(case, 7, 48)
    plain = _by_default(subject.qdq_w, qdq_w, x)
    return CheckOutput((*_gradients(own, x), *_invariants(own, reference, x, subject), *plain))


def run_w_many(case: Case, subject: Subject) -> CheckOutput:
    """Judges the values of `qdq_w` where one call holds very many rows.

    Args:
        case: levels of dtype and blocks, the number of rows.
        subject: what is judged.
    """
    own, reference = _w_functions(subject)
    like = torch.empty(0, dtype=CARRIERS[case.levels["dtype"]], device=device_of(case))
    return CheckOutput((_many(own, reference, like, (int(case.levels["blocks"]), 3)),))


def _state_functions(case: Case, subject: Subject) -> tuple[Function, Function]:
    function, options = (
        subject.qdq_state,
        {"block_v": int(case.levels["block_v"]), "fmt": case.levels["format"]},
    )
    assert function is not None
    return (lambda x: function(x, **options)), (lambda x: qdq_state(x, **options))  # type: ignore[arg-type]


def _w_functions(subject: Subject) -> tuple[Function, Function]:
    function = subject.qdq_w
    assert function is not None
    return (lambda x: function(x, fmt="e4m3")), (lambda x: qdq_w(x, fmt="e4m3"))


# ---- inputs ----


def _state_inputs(case: Case) -> Mapping[str, list[Tensor]]:
    carrier, fmt, block = CARRIERS[case.levels["dtype"]], case.levels["format"], int(case.levels["block_v"])
    numbers = Numbers(case.seed + 11)
    found = {
        name: [make(numbers, K, V, block, fmt).float() for K, V in SHAPES[(i + case.seed) % 2 :: 2]]
        for i, (name, make) in enumerate(PATTERNS.items())
    }
    found["stack"] = [
        torch.stack([PATTERNS["near_ties"](numbers, 16, 24, block, fmt) for _ in range(4)]).view(
            2, 2, 16, 24
        ),
        torch.stack([PATTERNS["random"](numbers, 8, block + 8, block, fmt) for _ in range(12)])
        .view(2, 3, 2, 8, block + 8)
        .float(),
    ]
    found["edges"] = [_edges(numbers, 8, 2 * block + 5, carrier)]
    found["poison"] = [
        *(_poisoned(x, block) for x in (numbers.bell(8, 3 * block), numbers.bell(5, block + 3))),
        *(_poisoned_end(numbers.bell(5, 2 * block + 3), number) for number in (torch.nan, torch.inf)),
    ]
    if carrier is not torch.float32:
        found["all_codes"] = [_all_codes(carrier, grid_named(fmt).largest, block)]
    return _in(found, carrier, device_of(case))


def _w_inputs(case: Case) -> Mapping[str, list[Tensor]]:
    carrier, numbers = CARRIERS[case.levels["dtype"]], Numbers(case.seed + 13)
    found = {
        name: [make(numbers, K, 4, 1, "e4m3").T.contiguous() for K in (1, 3, 13, 64, 100, 128, 256)]
        for name, make in PATTERNS.items()
    }
    found["stack"] = [numbers.bell(2, 5, 3, 48)]
    found["edges"] = [_edges(numbers, 8, 37, carrier)]
    found["poison"] = [_poisoned(numbers.bell(12, 64).T.contiguous(), 1).T.contiguous()]
    if carrier is not torch.float32:
        found["all_codes"] = [_all_codes(carrier, 448.0, 128).T.contiguous()]
    return _in(found, carrier, device_of(case))


def _ordinary(case: Case, rows: int, columns: int) -> Tensor:
    """Numbers of a few binades, so that no carrier's subnormal range is met."""
    x = Numbers(case.seed + 17).bell(rows, columns)
    return (x + torch.sign(x) * 0.1).to(CARRIERS[case.levels["dtype"]]).to(device_of(case))


def _in(found: Mapping[str, list[Tensor]], carrier: torch.dtype, device: str) -> Mapping[str, list[Tensor]]:
    limit = torch.finfo(carrier).max
    return MappingProxyType(
        {
            name: [
                torch.where(x.isnan() | x.isinf(), x, x.clamp(-limit, limit)).to(carrier).to(device)
                for x in xs
            ]
            for name, xs in found.items()
        }
    )


def _edges(numbers: Numbers, K: int, V: int, carrier: torch.dtype) -> Tensor:
    """Zeros of both signs, subnormal numbers and large ones, each in rows of their own."""
    info = torch.finfo(carrier)
    x = numbers.bell(K, V)
    x[0] = 0.0
    x[1] = -0.0
    x[2] *= info.tiny
    x[3] *= info.smallest_normal * 2.0**-3
    x[4, ::3] = -0.0
    x[5] *= info.max / 64
    x[6] = x[6, 0]
    return x


def _poisoned(x: Tensor, block: int) -> Tensor:
    """One NaN in the first group and one infinity in the last, the rest clean."""
    x = x.clone()
    x[-1, min(block, x.shape[1]) - 1] = torch.nan
    if x.shape[1] > 2 * block:
        x[0, -1] = -torch.inf
    return x


def _poisoned_end(x: Tensor, number: float) -> Tensor:
    """One number that is none in the last, partial group, the rest clean."""
    x = x.clone()
    x[1, -2] = number
    return x


def _all_codes(carrier: torch.dtype, largest: float, block: int) -> Tensor:
    """Every finite number of a 16-bit carrier up to the largest code, in tiles `[rows, block]` of scale 1."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(carrier)
    kept = every[every.isfinite() & (every.abs() <= largest)].double()
    rows = -(-len(kept) // (block - 1))
    padded = torch.cat([kept, kept.new_zeros(rows * (block - 1) - len(kept))]).view(rows, block - 1)
    crown = torch.full((rows, 1), largest, dtype=torch.float64)
    tiles = torch.cat([padded, crown], 1)
    per_tile = 256
    missing = -rows % per_tile
    tiles = torch.cat([tiles, tiles[:1].expand(missing, -1)])
    return torch.cat(list(torch.split(tiles, per_tile)), 1)


# ---- judging ----


def _bits(own: Function, reference: Function, inputs: Mapping[str, list[Tensor]]) -> list[Comparison]:
    """Every input as it is, and the last of each name through a view: other strides may take other code."""
    comparisons = []
    for name, xs in inputs.items():
        for x in xs:
            shape = "x".join(map(str, x.shape))
            target = reference(x)
            views = {f"{name}[{shape}]": x.clone()}
            if x is xs[-1] and name != "all_codes":
                views[f"{name}[{shape}].transposed"] = x.mT.contiguous().mT
            for shown, view in views.items():
                comparisons.append(_one(shown, own, view, target))
    return comparisons


def _one(name: str, own: Function, x: Tensor, target: Tensor) -> Comparison:
    """One call, in bits."""
    found = _called(name, own, x)
    if isinstance(found, Comparison):
        return found
    derivation = "code * scale, every operation IEEE: one answer in bits"
    return compare_exact(name, target, found, nan_equal=True, derivation=derivation)


def _called(name: str, function: Function, x: Tensor) -> Tensor | Comparison:
    """What a function returns for `x`, or the comparison that says that it is no such tensor."""
    found: object = function(x)
    wrong = mismatch(name, found, shape=tuple(x.shape), dtype=x.dtype, device=x.device)
    if wrong is not None:
        return wrong
    assert isinstance(found, Tensor)
    return found.detach()


def _stack(x: Tensor) -> Tensor:
    """`x` four times at different sizes, `[2, 2, ...]`: sequences and heads, as the op holds them."""
    return torch.stack([x, x * 2, x * -0.5, x * 4]).view(2, 2, *x.shape)


def _gradients(own: Function, x: Tensor) -> list[Comparison]:
    """The gradients of a matrix and of a stack of matrices, and of a matrix after an overflow."""
    limits = torch.finfo(x.dtype)
    extreme = (torch.nan, torch.inf, limits.max, -torch.inf, limits.min, limits.smallest_normal, 1.5)
    return [
        _gradient("gradient", own, x),
        _gradient("gradient.stack", own, _stack(x)),
        _gradient("gradient.extreme", own, x, extreme),  # a loss scale is found by what arrives not finite
        _gradient("gradient.of_sum", own, x, ()),
    ]


def _gradient(name: str, own: Function, x: Tensor, arriving: Sequence[float] = INCOMING) -> Comparison:
    """The gradient of every element, the largest of each group included, is the incoming one."""
    leaf = x.clone().requires_grad_()
    if arriving:
        values = torch.tensor(arriving, dtype=torch.float64, device=x.device).to(x.dtype)
        incoming = values.repeat(-(-x.numel() // len(arriving)))[: x.numel()].view(x.shape).clone()
    else:  # what a sum hands back
        incoming = x.new_ones(()).expand_as(x)
    kept = incoming.clone()
    y = own(leaf)
    if not isinstance(y, Tensor) or y.grad_fn is None:
        return holds(name, 1, 1, "the result carries no gradient back to the input")
    (dx,) = torch.autograd.grad(y, leaf, incoming, allow_unused=True)
    return compare_exact(
        name,
        kept,
        dx if dx is not None else torch.zeros_like(x),
        nan_equal=True,
        derivation="identity straight-through: the incoming gradient itself at every element",
    )


def _by_default(function: Function | None, reference: Function, x: Tensor) -> list[Comparison]:
    """What is left out takes the value that the interface names; nothing is left out that must be given."""
    assert function is not None
    if not optional(reference) <= optional(function):
        return []
    derivation = "an option that is left out takes the default that the interface names"
    return [compare_exact("by_default", reference(x), function(x), derivation=derivation)]


def _many(own: Function, reference: Function, like: Tensor, shape: tuple[int, ...]) -> Comparison:
    """Groups by the thousand in one call: the last ones are as the first."""
    count = torch.Size(shape).numel()
    x = ((torch.arange(count, device=like.device) * 37 % 1009) - 504.5).to(like.dtype).view(shape) / 64
    return _one("many", own, x, reference(x))


def _invariants(own: Function, reference: Function, x: Tensor, subject: Subject) -> list[Comparison]:
    target = reference(x)
    views = {"transposed": x.mT.contiguous().mT, "offset": _offset(x), "strided": _strided(x)}
    found = [compare_exact(f"view.{name}", target, own(view)) for name, view in views.items()]
    stack = _stack(x)
    turned = stack.transpose(0, 1).contiguous().transpose(0, 1)
    found.append(compare_exact("view.stack", reference(stack), own(turned)))
    for power in (-3, 4):
        factor = 2.0**power
        found.append(
            compare_exact(
                f"times_two_to_{power}",
                target * factor,
                own(x * factor),
                derivation="scales and values are multiplied by the same power of two",
            )
        )
    kept, again = x.clone(), x.clone()
    result = own(again)
    found.append(compare_exact("input", kept, again, derivation="the input is not written"))
    aliased = result.untyped_storage().data_ptr() == again.untyped_storage().data_ptr()
    found.append(holds("separate_storage", int(aliased), 1, "the result shares the input's storage"))
    if subject.deterministic:
        failure = Verdict.FAILED_NONDETERMINISTIC
        found.append(compare_exact("repeated", result, own(x), nan_equal=True, failure=failure))
    empty = x[..., :0].contiguous()
    nothing = own(empty)
    fits = isinstance(nothing, Tensor) and nothing.shape == empty.shape and nothing.dtype == x.dtype
    found.append(holds("no_elements", int(not fits), 1, "no elements in must be no elements out"))
    return found


def _offset(x: Tensor) -> Tensor:
    """The same values at an offset in a larger buffer full of NaN."""
    buffer = torch.full((x.numel() + 32,), torch.nan, dtype=x.dtype, device=x.device)
    view = buffer[16 : 16 + x.numel()].view(x.shape)
    return view.copy_(x)


def _strided(x: Tensor) -> Tensor:
    """The same values as every second column of a larger tensor full of NaN."""
    larger = torch.full((*x.shape[:-1], 2 * x.shape[-1]), torch.nan, dtype=x.dtype, device=x.device)
    view = larger[..., ::2]
    return view.copy_(x)


_STATE_AXES = levels("dtype", "format", "block_v") | {"sites": ("state",)}
_W_AXES = levels("dtype") | {"sites": ("w",)}
_EACH_FORMAT = tuple({"dtype": "fp32", "format": fmt} for fmt in ("e4m3", "int8"))  # the dtype of states
_EACH_DTYPE = tuple({"dtype": dtype} for dtype in DTYPES)

ROWS = (
    CheckRow(
        "qdq.state_bits",
        "suites.checks.qdq:run_state_bits",
        "a rounding has one right answer: ties, near-ties, tiny, huge, partial and poisoned tiles, all codes",
        needs=("qdq_state",),
        axes=_STATE_AXES,
        regimes=("grid",),
        must_run=_EACH_FORMAT,
        profiles=profiles("pairs", "all", quick={"dtype": ("bf16",), "format": ("e4m3",)}),
    ),
    CheckRow(
        "qdq.w_bits",
        "suites.checks.qdq:run_w_bits",
        "as the state, one scale per row",
        needs=("qdq_w",),
        axes=_W_AXES,
        regimes=("grid",),
        must_run=_EACH_DTYPE,
        profiles=profiles("all", "all", quick={"dtype": ("bf16",)}),
    ),
    CheckRow(
        "qdq.state_gradient",
        "suites.checks.qdq:run_state_gradient",
        "the gradient is the incoming one, and views, powers of two and repeats change nothing",
        needs=("qdq_state",),
        axes=_STATE_AXES,
        regimes=("grid",),
        must_run=_EACH_FORMAT,
        profiles=profiles("pairs", "all", quick={"dtype": ("bf16",), "format": ("e4m3",)}),
    ),
    CheckRow(
        "qdq.state_many",
        "suites.checks.qdq:run_state_many",
        "a launch holds so many blocks on an axis, and what lies beyond is to be rounded all the same",
        needs=("qdq_state",),
        axes={
            "dtype": DTYPES,
            "format": ("e4m3", "int8"),
            "block_v": ("16",),
            "sites": ("state",),
            "blocks": ("65537",),
        },
        regimes=("grid",),
        profiles={"cpu": Options("each")} | {name: Options("pairs") for name in GPU},
    ),
    CheckRow(
        "qdq.w_many",
        "suites.checks.qdq:run_w_many",
        "as the state, one scale per row",
        needs=("qdq_w",),
        axes={"dtype": DTYPES, "sites": ("w",), "blocks": ("65537",)},
        regimes=("grid",),
        profiles={"cpu": Options("each")} | {name: Options("pairs") for name in GPU},
    ),
    CheckRow(
        "qdq.w_gradient",
        "suites.checks.qdq:run_w_gradient",
        "as the state, one scale per row",
        needs=("qdq_w",),
        axes=_W_AXES,
        regimes=("grid",),
        must_run=_EACH_DTYPE,
        profiles=profiles("all", "all", quick={"dtype": ("bf16",)}),
    ),
)
