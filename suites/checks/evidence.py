"""What a problem has to be judged by: the oracle's answer, its noise, its budgets, and its wrong answers.

Everything here depends on the problem and the arithmetic alone, never on the subject, and is kept for the
next subject or control that is judged on the same problem.
"""

from __future__ import annotations

import hashlib
import math
import zlib
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from qualify.budgets import (
    FARTHEST,
    REACH,
    UNDERFLOW,
    UNIT_ROUNDOFF,
    Noise,
    derive_limits,
    judged_arithmetic,
    measure_noise,
)
from qualify.case import Case, CheckOutput
from qualify.compare import Layout, Limits, compare_budget, holds, layout_of, mismatch
from qualify.filters import Projection, compare_filters, project
from qualify.problem import CARRIERS, Outcome, Problem, run_op
from qualify.records import Comparison, Verdict
from qualify.regimes import AXES, build_problem
from qualify.subjects import Subject
from references.arithmetic import Arithmetic, Noisy
from references.gdn_chunk import dg_magnitude, gdn_chunk
from references.semantics import CONTRACT, Semantics
from references.sites import Observed, Offsets, Tipped
from references.wrong_answers import WRONG_ANSWERS, Setting, setting_of
from suites.checks.final_state import judge_final_state, rounded_state, state_steps
from suites.checks.tie_free import CHUNK, TIE_FREE, may_flip, tie_free
from suites.oracle import activated, expected, op_options

Tensor = torch.Tensor

RUNS = 5
"""Noise runs with random rounding, beside those that round as hardware does."""

SITE_RUNS = 2
"""Noise runs that show how far noise moves what is rounded; a row of many numbers shares what they say."""

BATCHED = 800
"""Tokens times heads up to which several noise runs are made in one call; larger ones gain nothing from
it."""

FAULTY_RUNS = 2
"""Noise runs that have the fault, for each wrong answer that a case is held against."""

FILTERS_PER_CASE = 2
"""Wrong answers that one case is held against; cases take turns, so that a profile sees all of them often."""

KEPT = 48
"""Problems whose evidence is kept in a process."""

SHAPE = Verdict.FAILED_SHAPE

UNROUNDED_FINAL = Semantics(final_rounded=False)

CARRIER_NAMES: Mapping[torch.dtype, str] = {dtype: name for name, dtype in CARRIERS.items()}


@dataclass(eq=False)
class Evidence:
    """All that a subject's outcome on one problem is held against.

    Attributes:
        problem: never handed to a subject itself, see `fresh`.
        arithmetic: what the budgets are derived in.
        smooth: whether no correct implementation can round to another code on the way to any tensor.
        expected: the oracle's outcome.
        noise, limits, layouts: by tensor.
        raw_state, state_width: where smooth and rounded, the final state before its rounding, and how far
            correct implementations may be from it.
    """

    problem: Problem
    arithmetic: str
    smooth: bool
    expected: Outcome
    noise: dict[str, Noise]
    limits: dict[str, Limits]
    layouts: dict[str, Layout]
    raw_state: Tensor | None = None
    state_width: Tensor | None = None
    _projections: dict[str, Projection | None] = field(default_factory=dict)

    def tensors(self) -> dict[str, Tensor]:
        """The expected tensors that are judged."""
        return {name: x for name in self.noise if (x := self.expected[name]) is not None}

    def errors(self, outcome: Outcome) -> dict[str, Tensor]:
        """`actual - expected` in fp64 for every judged tensor."""
        return {
            n: x.detach().double() - e for n, e in self.tensors().items() if (x := outcome[n]) is not None
        }

    def projection(self, name: str) -> Projection | None:
        """The filter of one wrong answer, computed once; None where it changes nothing here."""
        if name not in self._projections:
            self._projections[name] = self._project(name)
        return self._projections[name]

    def _project(self, name: str) -> Projection | None:
        semantics = WRONG_ANSWERS[name].semantics
        wrong = expected(self.problem, semantics=semantics)
        alternative = {t: x for t in self.noise if (x := wrong[t]) is not None}
        if all(torch.equal(alternative[t], e) for t, e in self.tensors().items()):
            return None
        runs = noise_runs(self.problem, self.arithmetic, FAULTY_RUNS, semantics=semantics, seed=2)
        faulty = [self.errors(run) for run in runs]
        return project(name, self.tensors(), alternative, self.noise, self.layouts, faulty)

    @cached_property
    def setting(self) -> Setting:
        """What the problem has, as far as it decides which wrong answers can show in it."""
        p = self.problem
        return setting_of(
            p.q,
            p.k,
            p.v,
            p.g,
            p.beta,
            p.initial_state,
            do=p.do,
            dht=p.dht if p.output_final_state else None,
            cu_seqlens=p.cu_seqlens,
            state_format=p.state_format,
            w_format=p.w_format,
            state_block_v=p.state_block_v,
            w_dtype=p.carrier,
        )

    @cached_property
    def applicable(self) -> list[str]:
        """The wrong answers that can show on this problem, in the order of their table."""
        return [name for name, wrong in WRONG_ANSWERS.items() if wrong.applies(self.setting)]

    def projections(self, names: Sequence[str]) -> list[Projection]:
        """The filters among `names` that change something here."""
        return [p for name in names if (p := self.projection(name)) is not None]


def fresh(problem: Problem) -> Problem:
    """A copy in storage of its own, with the same strides: a subject that writes into it harms nobody
    else."""
    copies = {n: _copied(x) for n, x in vars(problem).items() if isinstance(x, Tensor)}
    return problem.with_(**copies)


def _copied(x: Tensor) -> Tensor:
    """The same values with the same strides in other memory; what is expanded stays so, and what lies between
    the values of a view is copied, so that whoever reads it finds the same in every run."""
    span = 1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True)) if x.numel() else 0
    return x.as_strided((span,), (1,)).clone().as_strided(x.shape, x.stride())


def evidence_for(
    problem: Problem, arithmetic: str, *, smooth: bool = False, runs: int = RUNS, wide: bool = False
) -> Evidence:
    """Runs the oracle exactly and noisily.

    Args:
        problem: what is judged.
        arithmetic: precision of matmul operands, a key of `UNIT_ROUNDOFF`.
        smooth: whether the problem is one on which no rounding but that of the final state can flip.
        runs: noise runs with random rounding.
        wide: whether stored tensors keep the range of fp32, whatever the carrier.
    """
    exact = expected(problem)
    final = smooth and problem.state_format is not None and problem.output_final_state
    semantics = UNROUNDED_FINAL if final else None
    carrier = CARRIER_NAMES[problem.carrier]
    store = "tf32" if wide and carrier == "fp16" else carrier  # fp16 without its range
    members = noise_runs(problem, arithmetic, runs, semantics=semantics, store=store)
    members += deterministic_runs(problem, arithmetic, semantics, store=store)
    if problem.w_format is None and problem.carrier is not torch.float32:
        members.append(_without_w(problem, _noisy(problem, arithmetic, "nearest", 1, store), semantics))
    tipped = Outcome({}) if smooth else tipped_run(problem, arithmetic, store)
    evidence = Evidence(problem, arithmetic, smooth, exact, {}, {}, {})
    magnitudes = gate_magnitudes(problem)
    for name, tensor in exact.tensors.items():
        if tensor is None or tensor.numel() == 0:
            continue
        layout = evidence.layouts[name] = layout_of(name, problem.cu_seqlens, dims=tensor.dim())
        samples = torch.stack([m for run in members if (m := run[name]) is not None])

        def measured(target: Tensor, samples: Tensor, name: str = name) -> Noise:
            return measure_noise(
                target,
                samples,
                dtype=dtype_of(problem, name),
                underflow=_underflow(problem, name, arithmetic, wide),
                magnitude=magnitudes.get(name),
                roundoff=UNIT_ROUNDOFF[arithmetic],
            )

        if name == "final_state" and final:
            raw = expected(problem.with_(do=None, dht=None), semantics=UNROUNDED_FINAL)["final_state"]
            assert raw is not None
            evidence.raw_state = raw
            before = measured(raw, samples)
            evidence.state_width = derive_limits(raw, before, layout, source=arithmetic).element
            samples = torch.stack([rounded_state(s, problem) for s in samples])
        rounds = name == "final_state" and problem.state_format is not None
        evidence.noise[name] = measured(tensor, samples)
        evidence.limits[name] = derive_limits(
            tensor,
            evidence.noise[name],
            layout,
            tipped=None if (moved := tipped[name]) is None else moved - tensor,
            step=state_steps(tensor, problem) if rounds else None,
            source=arithmetic,
        )
    return evidence


def noise_runs(
    problem: Problem,
    arithmetic: str,
    runs: int,
    *,
    semantics: Semantics | None = None,
    seed: int = 1,
    store: str | None = None,
) -> list[Outcome]:
    """Random members of the family of correct answers; small ones side by side, each with a copy of the
    heads.

    Args:
        problem: what is run.
        arithmetic: precision of matmul operands.
        runs: how many with random rounding.
        semantics: a departure from the contract, or None.
        seed: chooses the members.
        store: precision of stored tensors; default the carrier's.
    """
    random = _noisy(problem, arithmetic, "stochastic", seed, store)
    if semantics is not None and (semantics.heads, semantics.gate_heads) != (
        CONTRACT.heads,
        CONTRACT.gate_heads,
    ):
        batch = 1
    else:
        batch = max(1, min(runs, BATCHED // max(1, problem.g.numel())))
    members: list[Outcome] = []
    while len(members) < runs:
        copies = expected(_repeated(problem, batch), semantics=semantics, arithmetic=random)
        members += _split(copies, batch)
    return members[:runs]


def deterministic_runs(
    problem: Problem, arithmetic: str, semantics: Semantics | None = None, *, store: str | None = None
) -> list[Outcome]:
    """The members of the family that round as hardware does: to nearest, and TF32 operands by truncation too.

    TF32 has the mantissa of fp16 and the range of fp32, so that a kernel may take it for an fp16 carrier, and
    keep what it stores in fp32. Its inverse is that of fp32: where it is truncated alone, the errors of a
    chunk of similar keys all point the same way.

    Args:
        problem: what is run.
        arithmetic: precision of matmul operands.
        semantics: a departure from the contract, or None.
        store: precision of stored tensors; default the carrier's.
    """
    members = [_noisy(problem, arithmetic, "nearest", 1, store)]
    if arithmetic in ("tf32", "fp16"):
        members.append(_noisy(problem, "tf32", "toward_zero", 1, "fp32", solve="fp32"))
    return [expected(problem, semantics=semantics, arithmetic=member) for member in members]


def tipped_run(problem: Problem, arithmetic: str, store: str) -> Outcome:
    """The exact outcome but for codes: every one that noise can change is the one beyond its boundary.

    Args:
        problem: what is run.
        arithmetic: precision of matmul operands.
        store: precision of stored tensors.
    """
    far = {}
    if deviations := FARTHEST.get(arithmetic):
        noise = site_noise(problem, arithmetic, store)
        far = {key: deviations * sigma for key, sigma in noise.items()}
    return expected(problem, offsets=Tipped(REACH * UNIT_ROUNDOFF[arithmetic], far))


def site_noise(problem: Problem, arithmetic: str, store: str) -> dict[Hashable, Tensor]:
    """How far noise moves what is rounded, by site and chunk: a standard deviation for each row.

    Rounding itself is that of the exact run, so that codes which flip are not taken for noise.

    Args:
        problem, arithmetic, store: as for `tipped_run`.
    """
    forward = problem.with_(do=None, dht=None)
    exact = Observed(Offsets())
    expected(forward, offsets=exact)
    squares: dict[Hashable, Tensor] = {}
    for seed in range(SITE_RUNS if exact.given else 0):
        seen = Observed(exact.offsets.freeze())
        expected(forward, arithmetic=_noisy(problem, arithmetic, "stochastic", seed, store), offsets=seen)
        for key, x in seen.given.items():
            moved = (x - exact.given[key]).square()
            squares[key] = squares[key] + moved if key in squares else moved
    return {key: x.mean(-1, keepdim=True).div_(SITE_RUNS).sqrt_() for key, x in squares.items()}


def _without_w(problem: Problem, arithmetic: Arithmetic, semantics: Semantics | None) -> Outcome:
    """A member that never materialises W, as a token recurrence does where the W site is off."""

    def op(*args: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        return gdn_chunk(*args, **{**options, "w_dtype": torch.float32})

    return expected(problem, arithmetic=arithmetic, semantics=semantics, op=op)


class Folding(Noisy):
    """A member of the family that multiplies a factor into every operand before it rounds it.

    Kernels fold decay and scale into one operand or the other, so that a number is rounded though it was
    exact. Rounding after a random common factor, and dividing it out again, samples what that does.
    """

    def _operand(self, x: Tensor) -> Tensor:
        factor = self._random.uniform(1.0, 2.0)
        return super()._operand(x * factor) / factor


def _noisy(
    problem: Problem, arithmetic: str, mode: str, seed: int, store: str | None, solve: str | None = None
) -> Arithmetic:
    stored = store or CARRIER_NAMES[problem.carrier]
    gates = CARRIER_NAMES.get(problem.g.dtype, "fp32")
    family = Folding if mode == "stochastic" else Noisy
    return family(operand=arithmetic, store=stored, seed=seed, mode=mode, gates=gates, solve=solve)


_HEAD_AXIS = {"initial_state": 1, "dht": 1, "A_log": 0, "dt_bias": 0}


def _repeated(problem: Problem, times: int) -> Problem:
    copies = {}
    for name in ("q", "k", "v", "g", "beta", "initial_state", "do", "dht", "A_log", "dt_bias"):
        x = getattr(problem, name)
        if x is not None:
            axis = _HEAD_AXIS.get(name, 2)
            copies[name] = torch.cat([x] * times, axis)
    return problem.with_(**copies)


def _split(outcome: Outcome, times: int) -> list[Outcome]:
    parts: list[dict[str, Tensor | None]] = [{} for _ in range(times)]
    for name, x in outcome.tensors.items():
        axis = {"final_state": 1, "dh0": 1, "dA_log": 0, "ddt_bias": 0}.get(name, 2)
        pieces = [None] * times if x is None else x.chunk(times, axis)
        for part, piece in zip(parts, pieces, strict=True):
            part[name] = piece
    return [Outcome(part) for part in parts]


def gate_magnitudes(problem: Problem) -> dict[str, Tensor]:
    """How large rounding errors of the terms are that cancel in the gates' gradients, over their roundoff.

    n errors of random signs add up to their root mean square times the root of n: the sum of the magnitudes
    over the root of n. n counts the later tokens of the chunk, or all tokens for a parameter of the gate.
    """
    if problem.do is None and (problem.dht is None or not problem.output_final_state):
        return {}
    leaves = {name: leaf.detach().double().requires_grad_() for name, leaf in problem.leaves().items()}
    with torch.enable_grad():
        q, k, g, beta = activated(problem, leaves)
    sums = dg_magnitude(
        q.detach(),
        k.detach(),
        leaves["dv"].detach(),
        g.detach(),
        beta.detach(),
        leaves["dh0"].detach() if "dh0" in leaves else None,
        do=problem.do,
        dht=problem.dht if problem.output_final_state else None,
        **op_options(problem),
    )
    sizes = sums / _terms(problem).sqrt().view(1, -1, 1)
    if not problem.use_gate_in_kernel:
        return {"dg": sizes}
    names = [n for n in ("dg", "dA_log", "ddt_bias") if n in leaves]
    found = torch.autograd.grad(g, [leaves[n] for n in names], sizes)
    tokens = math.sqrt(problem.g.shape[0] * problem.g.shape[1])
    return {n: x.abs() / (1.0 if n == "dg" else tokens) for n, x in zip(names, found, strict=True)}


def _terms(problem: Problem) -> Tensor:
    """How many tokens of its chunk come after each token, itself included: `[T]`."""
    layout = layout_of("dg", problem.cu_seqlens, dims=3)
    blocks = torch.tensor(layout.block_of_token(problem.g.shape[1]), device=problem.g.device)
    ends = torch.bincount(blocks).cumsum(0)[blocks] if blocks.numel() else blocks
    return (ends - torch.arange(len(blocks), device=blocks.device)).double()


def _underflow(problem: Problem, tensor: str, arithmetic: str, wide: bool) -> float:
    """What is lost of a tensor when an operand underflows: a decay that was folded into it, for instance."""

    def largest(*inputs: Tensor | None) -> float:
        return max(
            (float(x.detach().abs().max()) for x in inputs if x is not None and x.numel()), default=0.0
        )

    forward = max(1.0, largest(problem.v, problem.initial_state))
    if tensor in ("o", "final_state"):
        return UNDERFLOW[arithmetic] * forward
    if (
        wide and problem.carrier is torch.float16 and tensor != "dh0"
    ):  # through W's gradient, in W's own dtype
        return UNDERFLOW["fp16"] * forward
    vanished = UNDERFLOW["ieee"] * forward  # a gradient on the way, whatever the size of what came in
    return UNDERFLOW[arithmetic] * largest(problem.do, problem.dht) * forward + vanished


def dtype_of(problem: Problem, tensor: str) -> torch.dtype:
    """The dtype in which the contract returns one of the tensors."""
    if tensor == "o":
        return problem.carrier
    if tensor == "final_state":
        return torch.float32
    return problem.leaves()[tensor].dtype


_kept: OrderedDict[Hashable, Evidence] = OrderedDict()


def remembered(key: Hashable, make: Callable[[], Evidence]) -> Evidence:
    """The evidence of a key, made once and kept as long as it is among the last `KEPT` that were used."""
    evidence = _kept.pop(key) if key in _kept else make()
    _kept[key] = evidence
    while len(_kept) > KEPT:
        _kept.popitem(last=False)
    return evidence


def _made(levels: Mapping[str, str], regime: str, seed: int, device: str, arithmetic: str) -> Evidence:
    problem = build_problem(levels, "random" if regime == TIE_FREE else regime, seed, device)
    if regime == TIE_FREE:
        return evidence_for(tie_free(problem), arithmetic, smooth=not may_flip(problem))
    rounds = problem.state_format is not None or problem.w_format is not None
    return evidence_for(problem, arithmetic, smooth=not rounds or is_one_chunk(problem))


def is_one_chunk(problem: Problem) -> bool:
    """Whether every sequence holds one chunk and W is not rounded: then only the final rounding can flip."""
    bounds = problem.cu_seqlens
    lengths = [problem.k.shape[1]] if bounds is None else bounds.diff().tolist()
    return problem.w_format is None and min(lengths) > 0 and max(lengths) <= CHUNK


def device_of(case: Case) -> str:
    """Where a case runs: on a GPU for every SM but `cpu`."""
    return "cpu" if case.levels.get("sm", "cpu") == "cpu" else "cuda"


def evidence_of(case: Case, subject: Subject, *, arithmetic: str | None = None, **levels: str) -> Evidence:
    """The evidence for a case, kept for the next subject that is judged on it.

    Args:
        case: levels, regime and seed decide the problem.
        subject: its declared arithmetic decides the budgets, unless another one is finer.
        arithmetic: what the judge measured, or None.
        levels: levels that the check adds or overrides.
    """
    at = {**case.levels, **levels}
    arithmetic = judged_arithmetic(subject.arithmetic, at.get("dtype", "fp32"), arithmetic)
    known = {axis: level for axis, level in at.items() if axis in AXES}
    key = (tuple(sorted(known.items())), case.regime, case.seed, device_of(case), arithmetic)
    return remembered(key, lambda: _made(known, case.regime, case.seed, device_of(case), arithmetic))


def output_of(comparisons: Sequence[Comparison], *problems: Problem) -> CheckOutput:
    """What a check hands back, with a digest of the inputs that were run."""
    return CheckOutput(tuple(comparisons), input_digest=digest_of(*problems))


def digest_of(*problems: Problem) -> str:
    """SHA-256 over every input of some problems, options included."""
    digest = hashlib.sha256()
    for problem in problems:
        for name, value in sorted(vars(problem).items()):
            digest.update(f"{name}:".encode())
            if isinstance(value, Tensor):
                digest.update(f"{value.dtype}{tuple(value.shape)}".encode())
                digest.update(value.detach().contiguous().cpu().view(-1).view(torch.uint8).numpy().tobytes())
            else:
                digest.update(repr(value).encode())
    return digest.hexdigest()


class WrongResultError(RuntimeError):
    """A subject returned something of the wrong type, shape, dtype or device; the comparison says what."""

    def __init__(self, comparison: Comparison) -> None:
        super().__init__(comparison.because)
        self.comparison = comparison


def outcome_of(subject: Subject, problem: Problem) -> Outcome:
    """Runs a subject forward and backward on a copy of a problem.

    Raises:
        WrongResultError: before the backward, when `o` or `final_state` is not what the contract returns.
        Whatever the subject raises.
    """
    return run_op(checked_op(subject, problem), fresh(problem))


def checked_op(subject: Subject, problem: Problem) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """The subject's op for problems of one shape; raises WrongResultError when a result has another."""
    op = subject.chunk_gated_delta_rule
    assert op is not None
    states = problem.k.shape[0] if problem.cu_seqlens is None else len(problem.cu_seqlens) - 1
    tail = (problem.k.shape[3], problem.v.shape[3])
    state = (states, problem.v.shape[2], *(reversed(tail) if problem.state_v_first else tail))

    def checked(*args: Any, **options: Any) -> tuple[Tensor, Tensor | None]:
        found = op(*args, **options)
        if not isinstance(found, tuple | list) or len(found) != 2:
            raise WrongResultError(
                holds(
                    "result", 1, 1, f"(o, final_state) was expected, got {_described(found)}", failure=SHAPE
                )
            )
        o, final = found
        device = problem.v.device
        wrong = mismatch("o", o, shape=tuple(problem.v.shape), dtype=problem.carrier, device=device)
        if wrong is None and problem.output_final_state:
            wrong = mismatch("final_state", final, shape=state, dtype=torch.float32, device=device)
        if wrong is not None:
            raise WrongResultError(wrong)
        return o, final

    return checked


def _described(found: object) -> str:
    return f"a sequence of {len(found)}" if isinstance(found, tuple | list) else type(found).__name__


def judge(evidence: Evidence, outcome: Outcome, wrong_answers: Sequence[str] = ()) -> list[Comparison]:
    """Holds every tensor of an outcome against its budget and all of them together against wrong answers.

    Args:
        evidence: of the problem that was run.
        outcome: the subject's.
        wrong_answers: names; those that change nothing on this problem are left out.
    """
    comparisons = []
    for name in evidence.tensors():
        comparisons.append(judge_tensor(evidence, name, outcome[name]))
    whole = all(c.metric != "shape" and not c.nonfinite for c in comparisons)
    projections = evidence.projections(wrong_answers) if whole else []
    if projections:
        comparisons.append(
            compare_filters(projections, evidence.errors(_without_gaps(evidence, outcome)), evidence.noise)
        )
    return comparisons


def judge_tensor(evidence: Evidence, name: str, actual: Tensor | None) -> Comparison:
    """Holds one tensor against its budget.

    Args:
        evidence: of the problem that was run.
        name: one of `evidence.tensors()`.
        actual: the subject's; a gradient that is absent counts as zero.
    """
    expected_tensor = evidence.tensors()[name]
    problem, layout, dtype = evidence.problem, evidence.layouts[name], dtype_of(evidence.problem, name)
    if actual is None and not bool(expected_tensor.any()):
        actual = torch.zeros_like(expected_tensor, dtype=dtype)
    raw, width = evidence.raw_state, evidence.state_width
    if name == "final_state" and raw is not None and width is not None:
        wrong = mismatch(name, actual, shape=tuple(raw.shape), dtype=dtype, device=raw.device)
        if wrong is not None or actual is None or bool(torch.isfinite(actual).all()):
            return wrong or judge_final_state(_given(actual), raw, width, problem, layout)
    return compare_budget(name, expected_tensor, actual, evidence.limits[name], layout, dtype=dtype)


def _given(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor


def _without_gaps(evidence: Evidence, outcome: Outcome) -> Outcome:
    """The outcome with zeros for gradients that are absent because they are zero."""
    return Outcome(
        {n: torch.zeros_like(e) if outcome[n] is None else outcome[n] for n, e in evidence.tensors().items()}
    )


def turn(case: Case, evidence: Evidence, count: int = FILTERS_PER_CASE) -> tuple[str, ...]:
    """The wrong answers that a case is held against: cases take turns, so that a profile sees all of them.

    Args:
        case: its cell and seed decide whose turn it is.
        evidence: of its problem.
        count: how many.
    """
    names = evidence.applicable
    cell = ",".join(f"{a}:{b}" for a, b in case.levels.items()) + f"{case.regime}#{case.seed}"
    start = zlib.crc32(cell.encode())
    stride = max(1, len(names) // max(1, count))
    return tuple(
        dict.fromkeys(names[(start + i * stride) % len(names)] for i in range(min(count, len(names))))
    )
