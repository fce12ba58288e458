"""Matched filters: does an error point towards a named wrong answer?

Noise in thousands of dimensions has almost no component along one given direction. The direction here is the
difference between the oracle's answer and the answer of a named wrong semantics. An implementation that has
the fault projects to 1, a correct one to what the noise runs of the oracle's own graph project to.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from qualify.budgets import Noise
from qualify.compare import Layout, block_sums
from qualify.records import Comparison

Tensor = torch.Tensor

SIGNIFICANT = 4.0
"""The decision point lies at least this many standard deviations above the largest correct run."""

LEAST_REACH = 0.1
"""The decision point is at least this far above the largest correct run, however little the runs scatter."""

LARGEST_CORRECT = 0.7
"""Where correct runs project further than this, the case says nothing about the wrong answer."""

OUTLIER = 8.0
"""An element counts at most as if its wrong answer were this many sigma away: no single element decides."""

LARGEST_SHARE = 1.0 / 16.0
"""No chunk of a head has more than this share of the information, if others have any; in all tensors
together, since one code that flips shows in all of them."""

CLIP = 2.0
"""The projection of one chunk counts at most this much."""


@dataclass(frozen=True)
class Projection:
    """One direction, and how far correct runs go along it.

    Attributes:
        name: the wrong answer.
        weights: tensor name -> `w * d`, shape of the tensor; a block's projection is `sum(w d e) / sum(w d
        d)`. powers: tensor name -> `[blocks, H]` `sum(w d d)`.
        layouts: tensor name -> names of its axes.
        correct: projections of the noise runs.
        faulty: projections of noisy runs that have the fault.
        power: information in the whole case: squared distance of the wrong answer in units of the noise.
    """

    name: str
    weights: Mapping[str, Tensor]
    powers: Mapping[str, Tensor]
    layouts: Mapping[str, Layout]
    correct: tuple[float, ...]
    faulty: tuple[float, ...]
    power: float

    @property
    def largest_correct(self) -> float:
        """The largest projection of a correct run, at least 0."""
        return max(0.0, *self.correct)

    @property
    def smallest_faulty(self) -> float:
        """The smallest projection of a run with the fault, at most 1."""
        return min(1.0, *self.faulty)

    @property
    def spread(self) -> float:
        """Standard deviation over the correct runs; the few faulty ones bound it from above, and count
        half."""
        return max(_deviation(self.correct), _deviation(self.faulty) / 2.0)

    @property
    def separation(self) -> float:
        """The distance from the correct runs to the decision point, over what significance asks for."""
        if self.largest_correct > LARGEST_CORRECT:
            return 0.0
        reach = max(0.0, self.decision - self.largest_correct)
        return reach / (
            SIGNIFICANT * max(self.spread, 1.0 / math.sqrt(self.power), LEAST_REACH / SIGNIFICANT)
        )

    @property
    def telling(self) -> bool:
        """Whether this case can tell the wrong answer from the right one."""
        return self.separation >= 1.0 and self.decision - self.largest_correct >= LEAST_REACH

    @property
    def decision(self) -> float:
        """Projections beyond this accuse: nearer to the fault than to the largest correct run."""
        return (self.largest_correct + self.smallest_faulty) / 2

    def of(self, errors: Mapping[str, Tensor]) -> float:
        """The projection of an error: blocks weighted with their information, none with more than its
        share."""
        return _combined(self.weights, self.powers, self.layouts, errors)


def _combined(
    weights: Mapping[str, Tensor],
    powers: Mapping[str, Tensor],
    layouts: Mapping[str, Layout],
    errors: Mapping[str, Tensor],
) -> float:
    products = torch.cat([block_sums(weights[t] * errors[t], layouts[t]).flatten() for t in weights])
    power = torch.cat([powers[t].flatten() for t in weights])
    heavy = power > 0
    products, power = products[heavy], power[heavy]
    share = power.clamp_max(float(power.sum()) * LARGEST_SHARE / len(weights))
    projections = (products / power).clamp(-CLIP, CLIP)
    return float((projections * share).sum() / share.sum())


def project(
    name: str,
    expected: Mapping[str, Tensor],
    alternative: Mapping[str, Tensor],
    noise: Mapping[str, Noise],
    layouts: Mapping[str, Layout],
    faulty: Sequence[Mapping[str, Tensor]],
) -> Projection | None:
    """Builds the filter for one wrong answer; None when it changes nothing in this case.

    Every element is weighted with the inverse of its noise variance, so that loud heads, chunks and tensors
    do not drown the others.

    Args:
        name: the wrong answer.
        expected: tensor name -> exact answer, fp64.
        alternative: tensor name -> the wrong answer's, fp64.
        noise: tensor name -> noise of the correct runs.
        layouts: tensor name -> names of its axes.
        faulty: errors of noisy runs that have the fault, at least one.
    """
    weights, powers = {}, {}
    for tensor, e in expected.items():
        d = alternative[tensor] - e
        if not bool(d.any()) or not bool(torch.isfinite(d).all()):
            continue
        weights[tensor] = d / torch.maximum(noise[tensor].sigma, d.abs() / OUTLIER).square()
        weights[tensor] = torch.where(_visible(d, noise[tensor]), weights[tensor], torch.zeros_like(d))
        powers[tensor] = block_sums(weights[tensor] * d, layouts[tensor])
    power = sum(float(p.sum()) for p in powers.values())
    if power <= 1.0:
        return None
    runs = next(iter(noise.values())).errors.shape[0]
    correct = tuple(
        _combined(weights, powers, layouts, {t: noise[t].errors[r] for t in weights}) for r in range(runs)
    )
    wrong = tuple(_combined(weights, powers, layouts, run) for run in faulty)
    return Projection(name, weights, powers, layouts, correct, wrong, power)


def _visible(d: Tensor, noise: Noise) -> Tensor:
    """Elements whose departure is larger than the rounding of the output, or is dithered by noise that is."""
    return torch.maximum(d.abs(), noise.errors.square().mean(0).sqrt()) >= noise.floor


def _deviation(values: Sequence[float]) -> float:
    if len(values) < 2:
        return 0.0
    mean = sum(values) / len(values)
    return math.sqrt(sum((c - mean) ** 2 for c in values) / (len(values) - 1))


def compare_filters(
    projections: Sequence[Projection], errors: Mapping[str, Tensor], noise: Mapping[str, Noise]
) -> Comparison:
    """Holds a subject's error against wrong answers; the error told is the projection that comes closest to
    accuse.

    Args:
        projections: filters of one problem, at least one.
        errors: tensor name -> `actual - expected`, fp64.
        noise: tensor name -> noise of the correct runs.
    """
    values = {p.name: p.of(errors) for p in projections}
    telling = [p for p in projections if p.telling]
    nearest = max(telling or projections, key=lambda p: _closeness(values[p.name], p))
    accused = [p for p in telling if not values[p.name] <= p.decision]
    c = values[nearest.name]
    fit = best_fit(projections, errors, noise) if accused else None
    return Comparison(
        tensor="all",
        kind="filter",
        metric="projection",
        error=c if telling else 0.0,
        budget=max(nearest.decision, 0.0),
        derivation=(
            f"towards {nearest.name}: correct runs reach {nearest.largest_correct:.3g} "
            f"+- {nearest.spread:.2g}, runs with the fault {nearest.smallest_faulty:.3g}"
        ),
        statistics={f"c.{name}": value for name, value in values.items()},
        discrimination={p.name: p.separation if p.telling else min(p.separation, 0.99) for p in projections},
        excluded=tuple(p.name for p in telling if p not in accused),
        looks_like=fit or (nearest.name if accused else None),
        because=f"the error points to {', '.join(p.name for p in accused)}" if accused else "",
    )


def _closeness(c: float, p: Projection) -> float:
    return math.inf if math.isnan(c) else (c - p.largest_correct) / max(p.decision - p.largest_correct, 1e-9)


def best_fit(
    projections: Sequence[Projection], errors: Mapping[str, Tensor], noise: Mapping[str, Noise]
) -> str | None:
    """The wrong answer that explains most of an error, if it leaves less than half of it.

    Args:
        projections: filters of one problem.
        errors: tensor name -> `actual - expected`.
        noise: tensor name -> noise, for the weights.
    """
    best, explained = None, 0.0
    total = sum(float((errors[t] / noise[t].sigma).square().sum()) for t in errors)
    for p in projections:
        c = p.of(errors)
        gain = (2 * c - c * c) * p.power / total if total > 0 else 0.0
        if 0.5 < c < 1.5 and gain > explained:
            best, explained = p.name, gain
    return best if explained > 0.5 else None
