"""How results were stored: rounded to nearest, and in a dtype of their own.

A result that was cut instead of rounded is too small by half a unit in the last place on average; among
errors that point either way, of thousands of elements, that stands out though each of them is within every
budget. A result that is returned in fp32 but went through 16 bits, those of another tensor, has none below.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from qualify.budgets import SLACK, Noise
from qualify.compare import holds, ulp
from qualify.problem import Outcome, Problem
from qualify.records import Comparison
from suites.checks.evidence import Evidence, dtype_of

Tensor = torch.Tensor

CUT = 0.5
"""Mean error, in units in the last place, of a result that was cut (towards zero) or rounded up."""

UNEXPLAINED = 0.15
"""Mean error of a correct implementation that noise runs do not show: a third of what a cut leaves."""

NEAREST_SIGMA = 12.0**-0.5
"""Standard deviation of a rounding to nearest, in units in the last place."""

DEVIATIONS = 5.0
"""Standard deviations of a mean of roundings that chance does not reach."""

ENOUGH = 64
"""Fewer elements could have no low bits by chance."""


class Bias(NamedTuple):
    """A mean error towards larger magnitudes, in units in the last place, and the largest that passes."""

    mean: float
    limit: float


def stored(evidence: Evidence, outcome: Outcome) -> list[Comparison]:
    """Judges how an outcome was stored: what is narrower than fp32, and what is fp32 beside narrow tensors.

    Args:
        evidence: of the problem that was run.
        outcome: of a subject; its tensors have the expected shapes.
    """
    problem = evidence.problem
    biases: dict[str, Bias] = {}
    narrow: list[str] = []
    wide: list[str] = []
    for name, expected in evidence.tensors().items():
        actual = outcome[name]
        if actual is None or actual.shape != expected.shape or not bool(torch.isfinite(actual).all()):
            continue
        dtype = dtype_of(problem, name)
        if dtype is not torch.float32:
            if (bias := bias_of(expected, actual, evidence.noise[name], dtype)) is not None:
                biases[name] = bias
        elif told := [short for short in short_dtypes(problem) if can_tell(expected, short)]:
            (narrow if any(is_narrow(actual, short) for short in told) else wide).append(name)
    return [*_rounded(biases), *_own_dtype(narrow, wide)]


def short_dtypes(problem: Problem) -> list[torch.dtype]:
    """The 16-bit dtypes among those of the carrier, the gates and the betas."""
    given = dict.fromkeys((problem.carrier, problem.g.dtype, problem.beta.dtype))
    return [dtype for dtype in given if dtype in (torch.bfloat16, torch.float16)]


def bias_of(expected: Tensor, actual: Tensor, noise: Noise, dtype: torch.dtype) -> Bias | None:
    """The mean signed error of a tensor; None where noise or few elements would hide a cut.

    Elements are weighted by how much of their error is the rounding of the output.

    Args:
        expected: fp64.
        actual: the subject's, in `dtype`.
        noise: of the tensor.
        dtype: what the output is rounded to.
    """
    unit = ulp(expected, dtype)
    weight = 1.0 / (1.0 + (noise.sigma / unit).square())
    weight = torch.where(expected.abs() > torch.finfo(dtype).tiny, weight, torch.zeros_like(weight))
    total = float(weight.sum())
    if total == 0.0:
        return None
    signed = weight * expected.sign() / unit / total
    runs = (noise.errors * signed).flatten(1).sum(1)
    chance = DEVIATIONS * NEAREST_SIGMA * float(weight.square().sum().sqrt()) / total
    limit = UNEXPLAINED + chance + SLACK * float(runs.abs().max())
    mean = float(((actual.double() - expected) * signed).sum())
    return Bias(mean, limit) if limit < 0.8 * CUT else None


def _rounded(biases: dict[str, Bias]) -> list[Comparison]:
    if not biases:
        return []
    name, worst = max(biases.items(), key=lambda item: abs(item[1].mean) / item[1].limit)
    return [
        Comparison(
            tensor=f"{name}.rounding",
            kind="budget",
            metric="mean_error_ulps",
            error=abs(worst.mean),
            budget=worst.limit,
            derivation=f"{UNEXPLAINED:g} + {SLACK:g} x the largest of the noise runs + {DEVIATIONS:g} "
            f"standard deviations of as many roundings to nearest; worst of {len(biases)} tensors",
            because=f"a result that was cut is off by {CUT:g} on average",
        )
    ]


def can_tell(expected: Tensor, carrier: torch.dtype) -> bool:
    """Whether most elements of an expected fp32 tensor need more bits than the carrier has."""
    return int(expected.count_nonzero()) >= ENOUGH and _share(expected.float(), carrier) < 0.5


def is_narrow(actual: Tensor, carrier: torch.dtype) -> bool:
    """Whether no element of an fp32 tensor needs more bits than the carrier has."""
    return bool(actual.any()) and _share(actual, carrier) == 1.0


def _share(x: Tensor, carrier: torch.dtype) -> float:
    x = x[x != 0]
    return float((x.to(carrier).float() == x).double().mean())


def _own_dtype(narrow: list[str], wide: list[str]) -> list[Comparison]:
    if not narrow + wide:
        return []
    because = f"{', '.join(narrow)}: fp32, but every element is a number of 16 bits"
    return [holds("own_dtype", len(narrow), len(narrow + wide), because)]
