"""Properties of the op that need no oracle: repeats, checkpoints, borders, poison, memory and arguments."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from qualify.budgets import judged_arithmetic
from qualify.capabilities import ruled_out
from qualify.case import Case, CheckOutput
from qualify.checks_table import CheckRow
from qualify.compare import compare_exact, holds
from qualify.problem import Outcome, Problem, run_op
from qualify.records import Comparison, Verdict
from qualify.regimes import build_problem
from qualify.subjects import Subject
from suites.checks.bits import Exact
from suites.checks.defaults import shortened
from suites.checks.evidence import (
    Evidence,
    device_of,
    digest_of,
    evidence_for,
    evidence_of,
    fresh,
    judge,
    judge_tensor,
    outcome_of,
    output_of,
    remembered,
)
from suites.checks.rows import DTYPES, OP, levels, profiles
from suites.checks.stored import stored

Tensor = torch.Tensor
Op = Callable[..., tuple[Tensor, Tensor | None]]

TOKENS = ("o", "dq", "dk", "dv", "dg", "dbeta")
STATES = ("final_state", "dh0")


def run_repeat(case: Case, subject: Subject) -> CheckOutput:
    """Judges that equal calls give equal bits, with activation checkpointing too, and touch no input.

    Where the subject declares that repeated calls may differ, each call is held against the oracle instead.

    Args:
        case: levels of `qualify.regimes.AXES` and of checkpointing.
        subject: what is judged.
    """
    problem = _problem(case)
    alike = _Alike(case, subject, problem)
    first = outcome_of(subject, problem)
    again = fresh(problem)
    checkpointing = case.levels.get("checkpointing") == "on"
    second = run_op(_checkpointed(_op(subject)) if checkpointing else _op(subject), again)
    comparisons = alike(first, second, "repeated", Verdict.FAILED_NONDETERMINISTIC)
    if checkpointing:
        third = run_op(_recomputed(_op(subject)), fresh(problem))
        comparisons += alike(first, third, "recomputed", Verdict.FAILED_NONDETERMINISTIC)
    else:
        comparisons += [*_inference(subject, problem), *_activations_untouched(case, subject)]
    alone = fresh(problem)
    recorded = Outcome({name: first[name] for name in ("o", "final_state")})
    comparisons += alike(recorded, _without_gradient(subject, alone), "no_grad", Verdict.FAILED_NUMERIC)
    comparisons += [*_untouched(problem, again, "input"), *_untouched(problem, alone, "no_grad_input")]
    return output_of(comparisons, problem)


def run_borders(case: Case, subject: Subject) -> CheckOutput:
    """Judges that nothing passes from one sequence, or one group of heads, to another.

    Args:
        case: levels of `qualify.regimes.AXES`.
        subject: what is judged.
    """
    problem = _problem(case)
    first, inner = (_filled(problem) * 2)[:2]
    comparisons = [*_gradient_stays(subject, problem, inner), *_poison_fills_its_tile(subject, problem)]
    if subject.deterministic:
        for target in dict.fromkeys((inner, first)):
            comparisons += _poison_stays(subject, problem, target)
        comparisons += _head_poison_stays(subject, problem)
    return output_of(comparisons, problem)


def run_memory(case: Case, subject: Subject) -> CheckOutput:
    """Judges that nothing is read around the inputs and nothing of the results is left unwritten.

    Where the subject declares that repeated calls may differ, each call is held against the oracle instead.

    Args:
        case: levels of `qualify.regimes.AXES`.
        subject: what is judged.
    """
    problem = _problem(case)
    alike = _Alike(case, subject, problem)
    plain = outcome_of(subject, problem)
    guarded = run_op(_op(subject), _embedded(problem))
    with _dirty_allocator(device_of(case), problem):
        dirty = outcome_of(subject, problem)
    comparisons = [
        *alike(plain, guarded, "guard_zones", Verdict.FAILED_NUMERIC),
        *alike(plain, dirty, "dirty_memory", Verdict.FAILED_NUMERIC),
    ]
    return output_of(comparisons, problem)


def run_arguments(case: Case, subject: Subject) -> CheckOutput:
    """Judges what is returned for what is asked: no state, one gradient, none at all; and unusual arguments.

    Args:
        case: levels of `qualify.regimes.AXES`.
        subject: what is judged.
    """
    evidence = evidence_of(case, subject)
    problem, op = evidence.problem, _op(subject)
    silent = problem.with_(output_final_state=False, do=None, dht=None)
    _, state = _call(op, fresh(silent))
    shape = None if state is None else tuple(state.shape)
    comparisons = [
        holds(
            "no_state_asked",
            int(shape is not None and len(shape) != 4),
            1,
            f"without output_final_state the second result must be None (or a state), got shape {shape}",
        )
    ]
    for name in problem.leaves():
        found = judge_tensor(evidence, name, _only(op, fresh(problem), name))
        comparisons.append(replace(found, tensor=f"only.{name}"))
    comparisons += [*_by_default(subject, problem), *_other_scales(subject, evidence)]
    comparisons += [*_other_scalars(subject, evidence), *_no_tokens(subject, problem)]
    return output_of(comparisons, problem)


# ---- running ----


def _op(subject: Subject) -> Op:
    assert subject.chunk_gated_delta_rule is not None
    return subject.chunk_gated_delta_rule


def _problem(case: Case) -> Problem:
    return build_problem(case.levels, case.regime, case.seed, device_of(case))


def _checkpointed(op: Op) -> Op:
    def wrapped(*args: Any, **options: Any) -> tuple[Tensor, Tensor | None]:
        result: tuple[Tensor, Tensor | None] = checkpoint(op, *args, use_reentrant=False, **options)
        return result

    return wrapped


_POSITIONAL = ("q", "k", "v", "g", "beta")
_BY_NAME = ("initial_state", "A_log", "dt_bias")


def _recomputed(op: Op) -> Op:
    """The op as a reentrant checkpoint runs it: without a graph, then once more inside the backward."""

    def wrapped(*args: Any, **options: Any) -> tuple[Tensor, Tensor | None]:
        given = dict(zip(_POSITIONAL, args, strict=True)) | {n: options[n] for n in _BY_NAME}
        names = [n for n, x in given.items() if x is not None]
        results = _Recomputed.apply(op, names, options, *(given[n] for n in names))  # type: ignore[no-untyped-call]
        return results[0], results[1]

    return wrapped


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, op: Op, names: list[str], options: dict[str, Any], *leaves: Tensor) -> Any:
        ctx.op, ctx.names, ctx.options = op, names, options
        ctx.save_for_backward(*leaves)
        ctx.set_materialize_grads(False)
        return _named_call(op, dict(zip(names, leaves, strict=True)), options)

    @staticmethod
    def backward(ctx: Any, *dy: Tensor | None) -> Any:
        leaves = [x.detach().requires_grad_(x.requires_grad) for x in ctx.saved_tensors]
        with torch.enable_grad():
            found = _named_call(ctx.op, dict(zip(ctx.names, leaves, strict=True)), ctx.options)
        pairs = [(y, d) for y, d in zip(found, dy, strict=True) if y is not None and d is not None]
        grads = torch.autograd.grad([y for y, _ in pairs], leaves, [d for _, d in pairs], allow_unused=True)
        return None, None, None, *grads


def _named_call(op: Op, given: dict[str, Tensor], options: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
    tokens = (given[n] for n in _POSITIONAL)
    return op(*tokens, **options | {n: given.get(n) for n in _BY_NAME})


def _call(op: Op, problem: Problem) -> tuple[Tensor, Tensor | None]:
    return op(problem.q, problem.k, problem.v, problem.g, problem.beta, **problem.options())


def _without_gradient(subject: Subject, problem: Problem) -> Outcome:
    """The outputs of a forward that records nothing, as the first pass of a checkpoint may be.

    The problem's own tensors are handed over, so that what the call writes into them shows.
    """
    with torch.no_grad():
        o, final_state = _call(_op(subject), problem)
    return Outcome({"o": o, "final_state": final_state})


@dataclass(frozen=True)
class _Alike:
    """Holds one call against another: bits, or budgets where repeated calls may differ."""

    case: Case
    subject: Subject
    problem: Problem

    def __call__(self, a: Outcome, b: Outcome, prefix: str, failure: Verdict) -> list[Comparison]:
        if self.subject.deterministic:
            return _equal(a, b, prefix, failure)
        names = [name for name, x in a.tensors.items() if x is not None and x.numel()]
        found = (judge_tensor(self._evidence, name, b[name]) for name in names)
        return [replace(comparison, tensor=f"{prefix}.{comparison.tensor}") for comparison in found]

    @cached_property
    def _evidence(self) -> Evidence:
        arithmetic = judged_arithmetic(self.subject.arithmetic, self.case.levels["dtype"])
        return evidence_for(self.problem, arithmetic)


def _inference(subject: Subject, problem: Problem) -> list[Comparison]:
    """A call without gradient and without states, which may take a path of its own, gives no other bits."""
    if not subject.deterministic:
        return []
    bare = problem.with_(initial_state=None, output_final_state=False, dht=None)
    o, final_state = _call(_op(subject), fresh(bare))
    recorded = Outcome({"o": o.detach(), "final_state": final_state})
    return _equal(recorded, _without_gradient(subject, fresh(bare)), "inference", Verdict.FAILED_NUMERIC)


def _activations_untouched(case: Case, subject: Subject) -> list[Comparison]:
    """What gates and norms are made of is an input as well."""
    levels = {**case.levels, "fused": "all"}
    if ruled_out(subject.capabilities, levels):
        return []
    problem = build_problem(levels, case.regime, case.seed, device_of(case))
    given = fresh(problem)
    try:
        _without_gradient(subject, given)
    except NotImplementedError:
        return []
    return _untouched(problem, given, "fused_input")


def _equal(a: Outcome, b: Outcome, prefix: str, failure: Verdict) -> list[Comparison]:
    return [
        compare_exact(
            f"{prefix}.{name}", x, b[name], failure=failure, derivation="the same call, the same bits"
        )
        for name, x in a.tensors.items()
        if x is not None and x.numel()
    ]


def _untouched(before: Problem, after: Problem, prefix: str) -> list[Comparison]:
    """Every tensor that was handed over still holds its bits: inputs, boundaries and incoming gradients."""
    return [
        compare_exact(f"{prefix}.{name}", x, getattr(after, name), derivation="inputs are not written")
        for name, x in vars(before).items()
        if isinstance(x, Tensor) and x.numel()
    ]


# ---- borders ----


def _sequences(problem: Problem) -> int:
    return problem.k.shape[0] if problem.cu_seqlens is None else len(problem.cu_seqlens) - 1


def _filled(problem: Problem) -> list[int]:
    """The sequences that have tokens."""
    return [n for n in range(_sequences(problem)) if problem.q[_span(problem, n)].numel()]


def _span(problem: Problem, sequence: int) -> tuple[slice, slice]:
    """Where a sequence's tokens are, as slices of `[B, T]`."""
    if problem.cu_seqlens is None:
        return slice(sequence, sequence + 1), slice(None)
    start, end = problem.cu_seqlens[sequence : sequence + 2].tolist()
    return slice(None), slice(int(start), int(end))


def _own(x: Tensor, where: int | tuple[slice, slice]) -> Tensor:
    """A sequence's part of a tensor."""
    return x[where]


def _outside(problem: Problem, name: str, x: Tensor, sequence: int) -> Tensor:
    """What of a tensor belongs to other sequences, flattened."""
    keep = torch.ones_like(x, dtype=torch.bool)
    if name in STATES:
        keep[sequence] = False
    else:
        keep[_span(problem, sequence)] = False
    return x[keep]


def _gradient_stays(subject: Subject, problem: Problem, target: int) -> Iterator[Comparison]:
    """With an incoming gradient in one sequence alone, every gradient of the others is exactly zero."""
    if _sequences(problem) == 1 or problem.do is None:
        return
    do = torch.zeros_like(problem.do)
    dht = None if problem.dht is None else torch.zeros_like(problem.dht)
    do[_span(problem, target)] = problem.do[_span(problem, target)]
    if dht is not None and problem.dht is not None:
        dht[target] = problem.dht[target]
    outcome = outcome_of(subject, problem.with_(do=do, dht=dht))
    for name in ("dq", "dk", "dv", "dg", "dbeta", "dh0"):
        gradient = outcome[name]
        if gradient is None:
            continue
        rest = _outside(problem, name, gradient, target)
        if rest.numel():
            yield compare_exact(
                f"border.{name}",
                torch.zeros_like(rest),
                rest,
                derivation="no gradient crosses from one sequence to another",
            )


def _poison_stays(subject: Subject, problem: Problem, target: int) -> Iterator[Comparison]:
    """NaN in every input of one sequence changes no bit of another, and shows in its own."""
    if _sequences(problem) == 1:
        return
    clean, poisoned = outcome_of(subject, problem), fresh(problem)
    where = _span(problem, target)
    for given in (poisoned.q, poisoned.k, poisoned.v, poisoned.g, poisoned.beta):
        given[where] = torch.nan
    dirty = run_op(_op(subject), poisoned)
    for name, x in clean.tensors.items():
        if x is None or name not in TOKENS + STATES:
            continue
        y = dirty[name]
        rest = _outside(problem, name, x, target)
        if rest.numel() and isinstance(y, Tensor) and y.shape == x.shape:
            yield compare_exact(
                f"poison_{target}.{name}",
                rest,
                _outside(problem, name, y, target),
                derivation="a sequence does not depend on its neighbours",
            )
    yield _appears(f"poison_{target}.appears", dirty["o"], lambda o: o[where])
    yield _appears(f"poison_{target}.appears_in_state", dirty["final_state"], lambda s: s[target])
    for name in ("dq", "dk", "dv", "dg", "dbeta", "dh0"):
        x = clean[name]
        own = partial(_own, where=target if name in STATES else where)
        if x is not None and bool(own(x).any()):
            yield _appears(f"poison_{target}.appears_in_{name}", dirty[name], own)


def _head_poison_stays(subject: Subject, problem: Problem) -> Iterator[Comparison]:
    """NaN in v of the last value head changes no bit of another head, and shows in its own."""
    heads, value_heads = problem.k.shape[2], problem.v.shape[2]
    clean, poisoned = outcome_of(subject, problem), fresh(problem)
    poisoned.v[..., -1, :] = torch.nan
    dirty = run_op(_op(subject), poisoned)
    kept = {"o": -1, "dv": -1, "dg": -1, "dbeta": -1, "dq": heads - 1, "dk": heads - 1}
    for name, last in kept.items():
        y = dirty[name]
        x = clean[name]
        if x is None or not isinstance(y, Tensor) or y.shape != x.shape or not x[:, :, :last].numel():
            continue
        yield compare_exact(
            f"head_poison.{name}",
            x[:, :, :last],
            y[:, :, :last],
            derivation="a head does not depend on the values of another",
        )
    state: Tensor | None = clean["final_state"]
    after = dirty["final_state"]
    if state is not None and value_heads > 1:
        yield compare_exact(
            "head_poison.final_state",
            state[:, :-1],
            after[:, :-1] if isinstance(after, Tensor) else after,
            derivation="a head does not depend on the values of another",
        )
    yield _appears("head_poison.appears", dirty["o"], lambda o: o[..., -1, :])
    if problem.state_format is not None:
        # with every column of v poisoned, every tile of a sequence that has tokens holds NaN throughout
        filled = _filled(problem)
        yield _appears("head_poison.appears_in_state", after, lambda s: s[filled][:, -1], everywhere=True)


def _poison_fills_its_tile(subject: Subject, problem: Problem) -> Iterator[Comparison]:
    """One NaN or infinity in a given state makes its tile of the final state NaN throughout, and no other.

    Without it a NaN spreads along its own column alone: the state site is what fills the tile.
    """
    if problem.state_format is None or problem.initial_state is None:
        return
    clean = outcome_of(subject, problem.with_(do=None, dht=None))["final_state"]
    for name, value in (("nan", torch.nan), ("inf", torch.inf)):
        poisoned = fresh(problem.with_(do=None, dht=None))
        _key_first(poisoned, poisoned.initial_state)[-1, -1, 1, 1] = value
        outcome = outcome_of(subject, poisoned)
        dirty = outcome["final_state"]
        yield _appears(
            f"state_{name}.fills_its_tile",
            dirty,
            lambda s: _key_first(problem, s)[-1, -1, :, : problem.state_block_v],
            everywhere=True,
        )
        if _sequences(problem) - 1 in _filled(problem):
            # a state that is rounded on entry is read with its whole tile full of NaN
            yield _appears(
                f"state_{name}.fills_its_tile_of_o",
                outcome["o"],
                lambda o: o[_span(problem, _sequences(problem) - 1)][..., -1, : problem.state_block_v],
                everywhere=True,
            )
        if subject.deterministic and clean is not None and dirty is not None:
            rest, other = (_key_first(problem, s).clone() for s in (clean, dirty))
            for state in (rest, other):
                state[-1, -1, :, : problem.state_block_v] = 0.0
            yield compare_exact(f"state_{name}.stays", rest, other, derivation="a tile is an island")


def _key_first(problem: Problem, state: Tensor | None) -> Tensor:
    """A state as `[N, HV, K, V]`, a view of it in either layout."""
    assert state is not None
    return state.mT if problem.state_v_first else state


def _appears(
    name: str, x: Tensor | None, part: Callable[[Tensor], Tensor], *, everywhere: bool = False
) -> Comparison:
    """NaN that went in comes out: somewhere, or in every element."""
    if x is None:
        return holds(name, 0, 1)
    found = part(x).isnan()
    missing = not bool(found.all() if everywhere else found.any())
    return holds(
        name,
        int(missing),
        1,
        "a NaN that went in became a number",
        failure=Verdict.FAILED_NONFINITE,
        derivation="a poisoned value is never laundered into a number",
    )


# ---- memory ----

GUARD = 64
"""Elements around every input, a multiple of what vector loads are aligned to."""


def _embedded(problem: Problem) -> Problem:
    """The same inputs inside larger buffers full of NaN (a huge integer around boundaries)."""
    moved = {n: _guarded(x) for n, x in vars(problem).items() if isinstance(x, Tensor)}
    return problem.with_(**moved)


def _guarded(x: Tensor) -> Tensor:
    x = x.contiguous()
    fill = torch.nan if x.is_floating_point() else 2**30
    buffer = torch.full((x.numel() + 2 * GUARD,), fill, dtype=x.dtype, device=x.device)
    return buffer[GUARD : GUARD + x.numel()].view(x.shape).copy_(x)


@contextlib.contextmanager
def _dirty_allocator(device: str, problem: Problem) -> Iterator[None]:
    """New memory holds NaN: on a GPU by leaving such blocks in the cache, on a CPU where tensors are made."""
    if device != "cpu":
        count = 4 * max(x.numel() for x in (problem.q, problem.k, problem.v))
        blocks = [
            torch.full((max(256, count >> shift),), torch.nan, device=device)
            for shift in range(16)
            for _ in "12"
        ]
        del blocks
        yield
        return
    with contextlib.ExitStack() as stack:
        for owner, name in (
            (torch, "empty"),
            (torch, "empty_like"),
            (torch, "empty_strided"),
            (Tensor, "new_empty"),
        ):
            stack.enter_context(_replaced(owner, name))
        yield


@contextlib.contextmanager
def _replaced(owner: Any, name: str) -> Iterator[None]:
    original = getattr(owner, name)

    def filled(*args: Any, **options: Any) -> Tensor:
        made: Tensor = original(*args, **options)
        if made.is_floating_point() and made.device.type == "cpu":
            with torch.no_grad():
                made.fill_(torch.nan)
        return made

    inherited = name not in vars(owner)
    setattr(owner, name, filled)
    try:
        yield
    finally:
        if inherited:
            delattr(owner, name)
        else:
            setattr(owner, name, original)


# ---- arguments ----


def _by_default(subject: Subject, problem: Problem) -> list[Comparison]:
    """A call that leaves out what says nothing gives the bits of the call that says everything."""
    op = _op(subject)
    if not subject.deterministic:
        return []
    with torch.no_grad():
        o, final_state = _call(op, fresh(problem))
        short = fresh(problem)
        shorter = op(short.q, short.k, short.v, short.g, short.beta, **shortened(op, short.options()))
    return [
        compare_exact(f"by_default.{name}", x, y, derivation="an option that is left out takes its default")
        for name, x, y in zip(("o", "final_state"), (o, final_state), shorter, strict=True)
        if x is not None
    ]


def _other_scales(subject: Subject, evidence: Evidence) -> Iterator[Comparison]:
    """The other sign of scale and do turns the sign of o and nothing else; a scale of zero leaves o zero.

    A subject may refuse such a scale; one that takes it must not take it for another.
    """
    problem = evidence.problem
    scale = problem.k.shape[-1] ** -0.5 if problem.scale is None else problem.scale
    do = None if problem.do is None else -problem.do
    negative = _unless_refused(subject, problem.with_(scale=-scale, do=do))
    if negative is not None:
        for name in evidence.tensors():
            found = negative[name]
            turned = -found if name == "o" and isinstance(found, Tensor) else found
            yield replace(judge_tensor(evidence, name, turned), tensor=f"scale_negative.{name}")
    zero = _unless_refused(subject, problem.with_(scale=0.0))
    if zero is not None:
        for name in ("o", "dq"):
            if isinstance(found := zero[name], Tensor):
                left = int(found.count_nonzero())
                yield holds(f"scale_zero.{name}", left, found.numel(), "a scale of zero is taken for another")


def _other_scalars(subject: Subject, evidence: Evidence) -> Iterator[Comparison]:
    """Gates and betas in a dtype of their own are computed in fp32, and their gradients have that dtype.

    A subject may refuse such a dtype; one that takes it must not take its bits, or its width, for others.
    """
    problem = evidence.problem
    narrow = torch.float16 if problem.carrier is torch.bfloat16 else torch.bfloat16
    for g_dtype, beta_dtype in ((torch.float64, torch.float64), (narrow, torch.float32)):
        changed = problem.with_(g=problem.g.to(g_dtype), beta=problem.beta.to(beta_dtype))
        outcome = _unless_refused(subject, changed)
        if outcome is not None:
            key = ("scalars", digest_of(changed), evidence.arithmetic)
            own = remembered(key, partial(evidence_for, changed, evidence.arithmetic))
            found = judge(own, outcome) + (stored(own, outcome) if g_dtype is narrow else [])
            name = f"gates_{str(g_dtype).removeprefix('torch.')}"
            yield from (replace(comparison, tensor=f"{name}.{comparison.tensor}") for comparison in found)


def _no_tokens(subject: Subject, problem: Problem) -> Iterator[Comparison]:
    """A call without a token gives back its states, rounded as on entry; a subject may refuse it."""
    nothing = {name: getattr(problem, name)[:, :0] for name in _POSITIONAL}
    bounds = None if problem.cu_seqlens is None else torch.zeros_like(problem.cu_seqlens)
    empty = problem.with_(**nothing, cu_seqlens=bounds, do=None)
    outcome = _unless_refused(subject, empty)
    if outcome is not None:
        exact = Exact(empty, {"final_state": None, "dh0": None}, "no token touches a state", wrong=())
        yield from exact.judge(outcome, "no_tokens.")


def _unless_refused(subject: Subject, problem: Problem) -> Outcome | None:
    try:
        return run_op(_op(subject), fresh(problem))
    except Exception:  # noqa: BLE001 - a foreign subject refuses with whatever it likes
        return None


def _only(op: Op, problem: Problem, wanted: str) -> Tensor | None:
    """The gradient of one input where no other input requires one."""
    leaves = {n: x.detach().requires_grad_(n == wanted) for n, x in problem.leaves().items()}
    names = {"dh0": "initial_state", "dA_log": "A_log", "ddt_bias": "dt_bias"}
    options = problem.options() | {names[n]: x for n, x in leaves.items() if n in names}
    o, final = op(*(leaves[n] for n in ("dq", "dk", "dv", "dg", "dbeta")), **options)
    given = ((o, problem.do), (final, problem.dht))
    pairs = [(y, dy) for y, dy in given if dy is not None and y is not None and y.requires_grad]
    if not pairs:
        return None
    (found,) = torch.autograd.grad(
        [y for y, _ in pairs], [leaves[wanted]], [dy for _, dy in pairs], allow_unused=True
    )
    return found


_AXES = levels("dtype", "sites", "layout") | {
    "format": ("e4m3", "int8"),
    "block_v": ("16", "32"),
    "heads": ("32x48", "48x64", "60x40"),
    "grouping": ("hv1", "hv2"),
    "length": ("15", "65"),
}
_QUICK = {"dtype": ("bf16",), "sites": ("both",), "length": ("65",), "heads": ("32x48",)}
_EACH_DTYPE = tuple({"dtype": dtype, "sites": "both"} for dtype in DTYPES)

ROWS = (
    CheckRow(
        "op.repeat",
        "suites.checks.invariants:run_repeat",
        "equal calls give equal bits, also when a checkpoint runs the forward again, and no input is written",
        needs=OP,
        axes=_AXES
        | {"checkpointing": ("off", "on"), "packing": ("single", "docs"), "strides": ("packed", "views")},
        regimes=("random",),
        must_run=tuple({**cell, "checkpointing": "on"} for cell in _EACH_DTYPE),
        profiles=profiles("each", "pairs", quick=_QUICK),
    ),
    CheckRow(
        "op.borders",
        "suites.checks.invariants:run_borders",
        "sequences and heads are islands: no value, gradient or NaN crosses, and no NaN disappears",
        needs=OP,
        axes=_AXES | {"packing": ("batch", "docs", "unequal", "one_token", "empty_middle")},
        regimes=("random",),
        must_run=_EACH_DTYPE,
        profiles=profiles("each", "pairs", quick=_QUICK),
    ),
    CheckRow(
        "op.memory",
        "suites.checks.invariants:run_memory",
        "what lies around the inputs, and what new memory holds, must not matter",
        needs=OP,
        axes=_AXES | {"packing": ("single", "docs", "unequal")},
        regimes=("random",),
        must_run=_EACH_DTYPE,
        profiles=profiles("each", "pairs", quick=_QUICK),
    ),
    CheckRow(
        "op.arguments",
        "suites.checks.invariants:run_arguments",
        "what is not asked for is not given, each gradient comes alone as it does beside others, and unusual "
        "arguments (scales, dtypes of gates, no token) are refused or taken for what they are",
        needs=OP,
        axes=levels("dtype", "sites")
        | {
            "packing": ("single", "docs"),
            "fused": ("none", "all"),
            "length": ("17",),
            "heads": ("32x48",),
            "grouping": ("hv2",),
        },
        regimes=("random",),
        profiles=profiles("each", "pairs"),
    ),
)
