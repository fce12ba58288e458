"""Budgets: how far a correct implementation may be from the oracle, measured and not typed in.

The oracle's graph is run several times in the declared arithmetic with random rounding (Monte Carlo
arithmetic: Parker, 1997). The errors of these runs are a sample of what correct implementations give. A
budget is a multiple of the largest error of that sample, in the same metric, plus the rounding of the
output itself. The multiple is `SLACK`, one number for everything.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from qualify.compare import Layout, Limits, block_norms, block_sums, holds, ulp
from qualify.records import Comparison
from qualify.subjects import USUAL_ARITHMETIC

Tensor = torch.Tensor

SLACK = 2.5
"""Budget over the largest error of the noise runs; docs/calibration.md has the measurements behind it."""

REACH = 2.0
"""How near to a boundary between two codes, in unit roundoffs of an operand, an element may change sides: it
is the product of rounded operands and rounded itself, or of one that was cut."""

FARTHEST: Mapping[str, float] = MappingProxyType({"ieee": 4.0})
"""The same in standard deviations of what noise runs show in an element's row, where that is further: terms
that cancel leave more than a roundoff of what is left. One flip of twenty thousand comes from further away.
Only where a single flip is far above all other noise; coarser arithmetics flip codes in every run."""

UNIT_ROUNDOFF: Mapping[str, float] = MappingProxyType(
    {"ieee": 2.0**-24, "tf32": 2.0**-11, "fp16": 2.0**-11, "bf16": 2.0**-8}
)
"""Largest relative error of rounding a matmul operand, by the name of the arithmetic."""

COARSENESS: Mapping[str, int] = MappingProxyType({"ieee": 0, "tf32": 1, "fp16": 1, "bf16": 2})
"""Order of arithmetics from fine to coarse."""

CANCELLED = 2.0**-22
"""Error of terms that cancel in a sum, relative to them: a few fp32 roundings, whatever the operands."""

UNDERFLOW: Mapping[str, float] = MappingProxyType(
    {"ieee": 2.0**-125, "tf32": 2.0**-125, "bf16": 2.0**-125, "fp16": 2.0**-25}
)
"""Absolute error per unit of amplitude of an operand that is too small for its format, or flushed to zero."""


@dataclass(frozen=True)
class Noise:
    """What the noise runs say about one tensor.

    Attributes:
        errors: `[R, *shape]` fp64, the error of each run.
        sigma: `[*shape]` fp64, the pooled standard deviation of each element's error, the rounding of the
            output included; never zero.
        reach: `[*shape]` fp64, sigma enlarged where it rests on an element's own few runs: few draws of one
            number that all came out small say little about the next.
        floor: `[*shape]` fp64, error that every correct output may have: its own rounding and underflow.
        roundoff: unit roundoff of the operands; no tensor is taken to be less noisy than one operand
        rounding.
    """

    errors: Tensor
    sigma: Tensor
    reach: Tensor
    floor: Tensor
    roundoff: float


def measure_noise(
    expected: Tensor,
    runs: Tensor,
    *,
    dtype: torch.dtype,
    underflow: float = 0.0,
    magnitude: Tensor | None = None,
    roundoff: float = 0.0,
) -> Noise:
    """Pools the errors of noise runs into a size of error for each element.

    An element's own few runs say little about it, so its size is at least 0.7 of what its row (the channels
    of one token and head, a row of a state) shows, a tenth of what the whole tensor shows, and one rounding
    of an operand: kernels differ in which products they round.

    Args:
        expected: fp64, the exact answer.
        runs: `[R, *shape]` fp64, the answers of the noise runs.
        dtype: dtype of the output that is judged.
        underflow: absolute error of a number that vanishes on the way, in units of this output.
        magnitude: size of the terms that cancel in `expected`, added as errors of random sign add up; its
            shape; None where nothing cancels.
        roundoff: unit roundoff of the operands, the relative size of the error of each cancelling term.
    """
    errors = runs - expected
    own = errors.square().mean(0)
    row = own.mean(-1, keepdim=True) if own.dim() >= 3 else own
    rounding = ulp(expected, dtype) / 2
    floor = rounding + underflow
    if magnitude is not None:
        floor = floor + CANCELLED * magnitude
    pooled = torch.maximum(torch.maximum(own, row / 2), own.mean() / 100)
    operand = (roundoff * expected).square() / 3.0
    rounded = floor.square() / 3.0
    sigma = (torch.maximum(pooled, operand) + rounded).sqrt()
    reach = (torch.maximum(own * few_draws(len(runs)) ** 2, sigma.square()) + rounded).sqrt()
    return Noise(errors, sigma, reach, floor, roundoff)


def few_draws(runs: int) -> float:
    """How much further than a normal deviate one in a million draws falls, when sigma is known from `runs`
    draws.

    The two-sided quantile of Student's t at 2e-6 over 8.3, the factor that elements are judged with:
    28 for 5 degrees of freedom, 16 for 7, 10.8 for 10; `1 + 60 / runs^2` is within a fifth of it.
    """
    return 1.0 + 60.0 / runs**2


def derive_limits(
    expected: Tensor,
    noise: Noise,
    layout: Layout,
    *,
    tipped: Tensor | None = None,
    step: Tensor | None = None,
    slack: float = SLACK,
    source: str = "",
) -> Limits:
    """The budget of a tensor from its noise.

    Whole tensor and heads: slack times the largest norm among the runs. A chunk of a head: the same, but
    never relatively tighter than the head's median chunk, since a few runs of a few numbers can all be
    lucky. An element, where everything is smooth: slack times sigma, times `1 + sqrt(2 ln n) / 2` for the
    largest of n. Where a rounding to a grid can flip, a few runs see few of the flips that there can be: what
    all of them do at once is added, and an element is bounded by the largest error of its head in any run.

    Args:
        expected: fp64.
        noise: from `measure_noise`.
        layout: names of the axes.
        tipped: error of a run in which every code within `REACH` of a boundary is the one beyond it, the
            shape of `expected`; None where no correct implementation rounds on the way to another code.
        step: what one flip moves each element of a rounded output, its shape; None when it is not rounded.
        slack: the multiple.
        source: which runs these were, for the derivation.
    """
    runs = noise.errors.shape[0]
    norms = torch.stack([block_norms(e, layout) for e in noise.errors])  # [R, blocks, H]
    floors = block_norms(noise.floor, layout)
    units = block_norms(expected, layout)
    operand = noise.roundoff / math.sqrt(3.0)
    largest = torch.maximum(norms.amax(0), operand * units)
    relative = torch.where(units > 0, largest / units, torch.zeros_like(units))
    typical = relative.median(0).values * units
    heads = torch.maximum(norms.square().sum(1).sqrt().amax(0), operand * units.square().sum(0).sqrt())
    total = max(float(norms.square().sum((1, 2)).sqrt().amax()), operand * float(units.norm()))
    deviates = math.sqrt(2.0 * math.log(max(8, expected.numel()))) / 2.0
    element = slack * (1.0 + deviates) * noise.reach
    few = slack * _few(noise.sigma, layout, few_draws(runs) * (1.0 + deviates))
    flips = torch.zeros_like(floors)
    if tipped is not None or step is not None:
        element = torch.maximum(element, slack * _head_maxima(noise.errors, layout))
    if tipped is not None:
        element = element + _head_maxima(tipped.unsqueeze(0), layout)
        flips = block_norms(tipped, layout)
    if step is not None:
        element = element + step
        flips = flips + _block_maxima(step, layout)
    floors = floors + flips
    return Limits(
        total=slack * total + float(noise.floor.norm() + flips.norm()),
        head=torch.maximum(slack * heads, few.square().sum(0).sqrt()) + floors.square().sum(0).sqrt(),
        block=torch.maximum(slack * torch.maximum(largest, typical), few) + floors,
        element=element + noise.floor,
        derivation=f"{slack:g} x the largest of {runs} runs of the oracle in {source} + output rounding",
    )


def _few(sigma: Tensor, layout: Layout, single: float) -> Tensor:
    """Norms `[blocks, H]` that blocks of few elements may reach, one element `single` sigma."""
    count = block_sums(torch.ones_like(sigma), layout).clamp_min(1.0)
    return block_norms(sigma, layout) * (1.0 + (single - 1.0) / count.sqrt())


def _block_maxima(step: Tensor, layout: Layout) -> Tensor:
    """The largest step `[sequences, H]` of each state: what its norm may gain when a single code flips."""
    kept = [i for i, axis in enumerate(layout.axes) if axis in ("sequence", "head")]
    reduced = [i for i in range(step.dim()) if i not in kept]
    return step.amax(reduced)


def _head_maxima(errors: Tensor, layout: Layout) -> Tensor:
    """The largest error of each head over all runs, in a shape that broadcasts against one run."""
    head = layout.axes.index("head")
    others = [i for i in range(errors.dim()) if i != head + 1]
    shape = [1] * (errors.dim() - 1)
    shape[head] = -1
    return errors.abs().amax(others).reshape(shape)


def judged_arithmetic(declared: Mapping[str, str], carrier: str, measured: str | None = None) -> str:
    """The arithmetic that budgets are derived in: the finest of declared, usual and measured.

    Args:
        declared: carrier -> arithmetic, as the subject declares it.
        carrier: `fp32`, `bf16` or `fp16`.
        measured: what the judge measured with both sites off, or None.
    """
    candidates = [declared.get(carrier, USUAL_ARITHMETIC[carrier]), USUAL_ARITHMETIC[carrier]]
    if measured is not None:
        candidates.append(measured)
    known = [name for name in candidates if name in COARSENESS]
    return min(known, key=lambda name: UNIT_ROUNDOFF[name])


def declaration_holds(declared: Mapping[str, str], carrier: str) -> Comparison:
    """Holds when the declared arithmetic is known and not coarser than the carrier's usual one.

    Args:
        declared: carrier -> arithmetic, as the subject declares it.
        carrier: `fp32`, `bf16` or `fp16`.
    """
    usual = USUAL_ARITHMETIC[carrier]
    name = declared.get(carrier, usual)
    known = name in COARSENESS
    looser = known and UNIT_ROUNDOFF[name] > UNIT_ROUNDOFF[usual]
    because = ""
    if not known:
        because = f"arithmetic must be one of {', '.join(COARSENESS)}, got {name!r} for {carrier}"
    elif looser:
        because = f"{name} is declared for {carrier}, coarser than the usual {usual}; a subject buys no room"
    return holds(
        "declared_arithmetic", int(bool(because)), 1, because, derivation=f"the usual one is {usual}"
    )
