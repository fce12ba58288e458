"""Small charts as geometry: the templates draw what is computed here, and nothing is measured twice."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from qualify.records import CaseRecord
from reports import text
from reports.figures import TensorRow, family, in_order, measured, middle, orderable, tensor_rank
from reports.model import Plan

LENGTH_AXES = ("length", "tokens", "T", "tail", "seqlen")
"""Names under which an axis of sequence lengths is known, the first that the plan has."""

MARGIN_BINS = 20
STEP_BINS = ("0", "1", "2", "3", "4+")


@dataclass(frozen=True)
class Bar:
    """One bar of a histogram: what it counts, how many, whether it stands for failures."""

    label: str
    count: int
    beyond: bool = False


@dataclass(frozen=True)
class Histogram:
    """Counts by bin, with the words that replace the picture for those who do not see it."""

    title: str
    bars: tuple[Bar, ...]
    summary: str

    @property
    def top(self) -> int:
        """The largest count, at least 1."""
        return max(1, *(bar.count for bar in self.bars))


def margin_histogram(tensor: str, rows: Iterable[TensorRow]) -> Histogram | None:
    """The tightest margins of a tensor, case by case, in steps of 0.05; None where all are exact."""
    margins = [m for row in rows if row.tensor == tensor for m in row.margins]
    inside = [m for m in margins if 0 < m <= 1]
    beyond = sum(m > 1 for m in margins)
    if not inside and not beyond:
        return None
    bins = [0] * MARGIN_BINS
    for m in inside:
        bins[min(MARGIN_BINS - 1, math.ceil(m * MARGIN_BINS) - 1)] += 1
    bars = [Bar(f"{i / MARGIN_BINS:.2f} to {(i + 1) / MARGIN_BINS:.2f}", n) for i, n in enumerate(bins)]
    bars.append(Bar("beyond 1", beyond, beyond=True))
    told = f"median margin {text.margin(middle(margins))}, largest {text.margin(max(margins))}"
    summary = f"{text.plural(len(margins), 'case')}, {told}, {beyond} beyond 1"
    return Histogram(tensor, tuple(bars), summary)


def step_histogram(tensor: str, cases: Iterable[CaseRecord]) -> Histogram | None:
    """The largest error of a tensor in grid steps, case by case; None where no grid was judged."""
    counts = [0] * len(STEP_BINS)
    for case in cases:
        steps = [
            orderable(c.statistics["grid_steps_max"])
            for c in case.comparisons
            if "grid_steps_max" in c.statistics and family(c.tensor) == tensor
        ]
        if steps:
            counts[int(min(len(STEP_BINS) - 1, max(steps)))] += 1
    if not any(counts):
        return None
    summary = ", ".join(f"{n} cases {label} steps" for label, n in zip(STEP_BINS, counts, strict=True) if n)
    return Histogram(
        tensor, tuple(Bar(label, n) for label, n in zip(STEP_BINS, counts, strict=True)), summary
    )


@dataclass(frozen=True)
class Point:
    """The errors of the cases of one length: quartiles, and their places on the chart (0 to 1)."""

    label: str
    low: float
    median: float
    high: float
    x: float
    y_low: float
    y_median: float
    y_high: float


@dataclass(frozen=True)
class Series:
    """One tensor's relative L2 error over the lengths of the plan, on a shared logarithmic scale."""

    tensor: str
    points: tuple[Point, ...]


@dataclass(frozen=True)
class OverLength:
    """Error over length for every tensor, with the decades that the charts share."""

    axis: str
    low: int
    high: int
    series: tuple[Series, ...]

    @property
    def decades(self) -> range:
        """The powers of ten that are ruled, five or six at most."""
        return range(self.low, self.high + 1, max(1, math.ceil((self.high - self.low) / 5)))


def over_length(plan: Plan, cases: Sequence[CaseRecord]) -> OverLength | None:
    """Relative L2 errors by tensor and length; None where no axis of lengths was varied."""
    known = set(plan.axes) | {axis for case in cases for axis in case.levels}
    axis = next((name for name in LENGTH_AXES if name in known), None)
    if axis is None:
        return None
    errors: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for case in cases:
        for tensor, comparisons in measured(case):
            found = [c.error for c in comparisons if c.metric == "rel_l2" and 0 < c.error < math.inf]
            if found and axis in case.levels:
                errors[tensor][case.levels[axis]].append(max(found))
    values = [e for by_length in errors.values() for es in by_length.values() for e in quartiles(es)]
    if not values:
        return None
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    high = max(high, low + 1)
    levels = in_order({level for by_length in errors.values() for level in by_length}, ())
    series = tuple(
        Series(tensor, _points(errors[tensor], levels, low, high))
        for tensor in sorted(errors, key=tensor_rank)
        if len(errors[tensor]) > 1
    )
    return OverLength(axis, low, high, series) if series else None


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """The values at a quarter, a half and three quarters of some ordered values."""
    ordered = sorted(values)
    low, half, high = (ordered[len(ordered) * i // 4] for i in (1, 2, 3))
    return low, half, high


def _points(
    by_length: Mapping[str, list[float]], levels: Sequence[str], low: int, high: int
) -> tuple[Point, ...]:
    def height(error: float) -> float:
        return (math.log10(error) - low) / (high - low)

    made = []
    for i, level in enumerate(levels):
        if level in by_length:
            found = quartiles(by_length[level])
            made.append(Point(level, *found, i / max(1, len(levels) - 1), *map(height, found)))
    return tuple(made)
