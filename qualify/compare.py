"""Comparisons: two tensors in, a frozen record of how they differ out. Nothing here asserts or prints.

Everything is computed in fp64 on the device of the tensors. A NaN never equals anything unless the caller
declares that the expected NaN is part of the answer.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from qualify.records import Comparison, Verdict, Worst

Tensor = torch.Tensor

TOKEN_AXES = ("sequence", "token", "head", "channel")
STATE_AXES = ("sequence", "head", "row", "column")


@dataclass(frozen=True)
class Layout:
    """Names the axes of a tensor, so that an index can be told as a place.

    Attributes:
        axes: one name per dimension; `sequence`, `token` and `head` have a meaning, others are only told.
        cu_seqlens: boundaries of packed sequences along the token axis, or None.
        chunk_size: tokens per chunk, counted from the start of each sequence.
    """

    axes: tuple[str, ...]
    cu_seqlens: tuple[int, ...] | None = None
    chunk_size: int = 64

    def place(self, index: tuple[int, ...]) -> dict[str, int]:
        """Coordinates of one element by name; a packed token is told by its sequence and position in it."""
        place = dict(zip(self.axes, index, strict=True))
        if "token" in place:
            if self.cu_seqlens is not None:
                sequence = bisect.bisect_right(self.cu_seqlens, place["token"]) - 1
                place["sequence"] = sequence
                place["token"] -= self.cu_seqlens[sequence]
            place["chunk"] = place["token"] // self.chunk_size
        return place

    def block_place(self, block: int, tokens: int) -> dict[str, int]:
        """Where a block of `block_norms` sits: its sequence, and its chunk when there is a token axis."""
        if "token" not in self.axes:
            return {"sequence": block} if "sequence" in self.axes else {}
        numbers = self.block_of_token(tokens)
        sequence, inside = divmod(block, max(numbers) + 1)
        first = Layout(self.axes[:2], self.cu_seqlens, self.chunk_size).place(
            (sequence, numbers.index(inside))
        )
        return {"sequence": first["sequence"], "chunk": first["chunk"]}

    def block_of_token(self, tokens: int) -> list[int]:
        """The number of the chunk, counted over all packed sequences, that each token belongs to."""
        bounds = self.cu_seqlens if self.cu_seqlens is not None else (0, tokens)
        blocks: list[int] = []
        following = 0
        for start, end in itertools.pairwise(bounds):
            blocks += [following + t // self.chunk_size for t in range(end - start)]
            following += -(-(end - start) // self.chunk_size)
        return blocks


def layout_of(tensor: str, cu_seqlens: Tensor | None = None, *, dims: int = 4) -> Layout:
    """The layout of one of the eight tensors (or of a stage that looks like one) by its name.

    Args:
        tensor: `final_state` and `dh0` are states `[N, HV, K, V]`; all others are tokens `[B, T, H(, D)]`.
        cu_seqlens: `[N + 1]` boundaries, or None.
        dims: number of dimensions of the tensor.
    """
    if tensor.split(".")[-1] in ("final_state", "dh0", "initial_state"):
        return Layout(STATE_AXES[:dims])
    if dims < 3:
        return Layout(("head", "channel")[:dims])
    bounds = tuple(int(x) for x in cu_seqlens.tolist()) if cu_seqlens is not None else None
    return Layout(TOKEN_AXES[:dims], bounds)


@dataclass(frozen=True)
class Limits:
    """The budget of one tensor, absolute, in every metric that it is judged in.

    Attributes:
        total: largest L2 norm of the whole error.
        head: `[H]` largest L2 norm of the error of each head.
        block: `[blocks, H]` largest L2 norm of the error of each chunk (state: each sequence) and head.
        element: largest absolute error of each element, shape of the tensor.
        derivation: where the numbers come from, in words.
    """

    total: float
    head: Tensor
    block: Tensor
    element: Tensor
    derivation: str


def nonfinite_counts(x: Tensor) -> dict[str, int]:
    """Counts of NaN, +inf and -inf, only the classes that occur."""
    if not x.is_floating_point():
        return {}
    counts = {
        "nan": int(torch.isnan(x).sum()),
        "posinf": int(torch.isposinf(x).sum()),
        "neginf": int(torch.isneginf(x).sum()),
    }
    return {name: n for name, n in counts.items() if n}


def mismatch(
    tensor: str,
    actual: object,
    *,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
) -> Comparison | None:
    """A failing comparison when `actual` is no tensor of this shape, dtype and device; None when it is.

    Args:
        tensor: what the tensor is called.
        actual: whatever the subject returned.
        shape, dtype, device: what the contract demands.
    """
    found = ""
    if not isinstance(actual, Tensor):
        found = f"a tensor was expected, got {type(actual).__name__}"
    elif tuple(actual.shape) != tuple(shape):
        found = f"shape {tuple(shape)} was expected, got {tuple(actual.shape)}"
    elif actual.dtype != dtype:
        found = f"dtype {dtype} was expected, got {actual.dtype}"
    elif actual.device.type != device.type:
        found = f"device {device} was expected, got {actual.device}"
    if not found:
        return None
    return Comparison(
        tensor=tensor,
        kind="property",
        metric="shape",
        error=1.0,
        budget=0.0,
        derivation="type, shape, dtype and device follow from the contract",
        failure=Verdict.FAILED_SHAPE,
        because=found,
    )


def holds(
    name: str,
    violations: float,
    checked: int,
    because: str = "",
    *,
    metric: str = "violations",
    derivation: str = "the property has no tolerance",
    excluded: tuple[str, ...] = (),
    failure: Verdict = Verdict.FAILED_NUMERIC,
    worst: Worst | None = None,
) -> Comparison:
    """A property that holds when nothing violates it.

    Args:
        name: what is asserted.
        violations: how many of the things looked at violate it.
        checked: how many were looked at.
        because: what was seen, for the failing case.

    Raises:
        ValueError: nothing was looked at.
    """
    if checked <= 0:
        raise ValueError(
            f"property {name!r} looked at {checked} things; a property of nothing proves nothing"
        )
    return Comparison(
        tensor=name,
        kind="property",
        metric=metric,
        error=float(violations),
        budget=0.0,
        derivation=derivation,
        statistics={"checked": float(checked)},
        excluded=excluded if violations == 0 else (),
        failure=failure,
        because=because if violations else "",
        worst=worst,
    )


def statistics(expected: Tensor, actual: Tensor, *, step: Tensor | None = None) -> dict[str, float]:
    """Figures on an error: absolute (max, mean, p99), relative L2, ULPs of `actual`'s dtype, grid steps.

    Args:
        expected, actual: equal shapes, any float dtypes, at least one element.
        step: distance between neighbouring grid values around each element, when there is a grid.

    Raises:
        ValueError: there is no element.
    """
    _require_elements(expected)
    e, a = expected.detach().double(), actual.detach().double()
    error = (a - e).abs()
    flat = error.flatten()
    rank = max(1, math.ceil(0.99 * flat.numel()))
    norm = float(e.norm())
    figures = {
        "max_abs": float(flat.max()),
        "mean_abs": float(flat.mean()),
        "p99_abs": float(flat.kthvalue(rank).values),
        "rel_l2": float(error.norm()) / norm if norm > 0 else float(error.norm()),
    }
    if actual.is_floating_point() and actual.dtype != torch.float64:
        figures["ulps_max"] = float((error / ulp(e, actual.dtype)).max())
    if step is not None:
        figures["grid_steps_max"] = float((error / step).max())
    return figures


def ulp(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The distance between neighbouring numbers of `dtype` around each `|x|`, subnormals included."""
    info = torch.finfo(dtype)
    _, exponent = torch.frexp(x.double().abs().clamp_min(info.tiny))
    return torch.ldexp(torch.full_like(x, info.eps, dtype=torch.float64), exponent - 1)


def compare_exact(
    tensor: str,
    expected: Tensor,
    actual: object,
    *,
    layout: Layout | None = None,
    nan_equal: bool = False,
    signed_zero: bool = False,
    derivation: str = "equal in every bit",
    excluded: tuple[str, ...] = (),
    failure: Verdict = Verdict.FAILED_NUMERIC,
) -> Comparison:
    """Counts the elements whose bits differ.

    Args:
        expected, actual: same shape, dtype and device, at least one element.
        nan_equal: whether an expected NaN is met by any NaN.
        signed_zero: whether -0 and +0 differ (the contract leaves the sign of a zero free).
        excluded: named wrong answers that are ruled out when all bits are equal.
        failure: the verdict of a difference.

    Raises:
        ValueError: there is no element.
    """
    _require_elements(expected)
    shape = mismatch(
        tensor, actual, shape=tuple(expected.shape), dtype=expected.dtype, device=expected.device
    )
    if shape is not None:
        return shape
    assert isinstance(actual, Tensor)
    expected, actual = expected.detach(), actual.detach()
    same = (
        (expected == actual) & (torch.signbit(expected) == torch.signbit(actual))
        if signed_zero
        else (expected == actual)
    )
    if nan_equal:
        same = same | (torch.isnan(expected) & torch.isnan(actual))
    differing = int((~same).sum())
    found = nonfinite_counts(actual)
    new = found if not nan_equal and differing else {}
    return Comparison(
        tensor=tensor,
        kind="exact",
        metric="bits",
        error=float(differing),
        budget=0.0,
        derivation=derivation,
        statistics={"elements": float(expected.numel())},
        nonfinite=found,
        worst=_worst_differing(expected, actual, same, layout) if differing else None,
        excluded=() if differing else excluded,
        failure=Verdict.FAILED_NONFINITE if new else failure,
        because=f"{differing} of {expected.numel()} elements differ" if differing else "",
    )


def block_sums(x: Tensor, layout: Layout) -> Tensor:
    """Sums `[blocks, H]` over every chunk of every sequence (state: every sequence) and head, fp64.

    Args:
        x: a tensor whose axes are those of `layout`.
    """
    values = x.detach().double()
    axes = layout.axes
    if "token" not in axes:
        keep = [i for i, axis in enumerate(axes) if axis in ("sequence", "head")]
        reduce = [i for i in range(len(axes)) if i not in keep]
        sums = values.sum(reduce) if reduce else values
        return sums.reshape(-1, x.shape[axes.index("head")])
    per_token = values.sum(list(range(3, x.dim()))) if x.dim() > 3 else values  # [B, T, H]
    blocks = torch.tensor(layout.block_of_token(x.shape[1]), device=x.device, dtype=torch.long)
    count = int(blocks.max()) + 1 if blocks.numel() else 0
    sums = values.new_zeros(x.shape[0], count, x.shape[2]).index_add_(1, blocks, per_token)
    return sums.reshape(-1, x.shape[2])


def block_norms(x: Tensor, layout: Layout) -> Tensor:
    """L2 norms `[blocks, H]` over the blocks of `block_sums`."""
    return block_sums(x.detach().double().square(), layout).sqrt()


def compare_budget(
    tensor: str,
    expected: Tensor,
    actual: object,
    limits: Limits,
    layout: Layout,
    *,
    dtype: torch.dtype | None = None,
    kind: str = "budget",
    scale: Tensor | None = None,
) -> Comparison:
    """Holds a tensor against its budget: whole, worst head, worst chunk, worst element; tells the worst of
    these.

    Args:
        expected: fp64.
        actual: what the subject returned; must have `expected`'s shape and `dtype`.
        limits: absolute budgets.
        dtype: dtype that `actual` must have; None: `expected`'s own.
        kind: kind of the comparison.
        scale: what errors are told relative to, shape of `expected` (dg: the magnitudes that cancel); default
            `expected` itself. It scales error and budget alike, never the verdict.

    Returns:
        One comparison in the metric with the largest margin; the margins of all four are among its
        statistics.

    Raises:
        ValueError: there is no element.
    """
    _require_elements(expected)
    wrong = mismatch(
        tensor, actual, shape=tuple(expected.shape), dtype=dtype or expected.dtype, device=expected.device
    )
    if wrong is not None:
        return wrong
    assert isinstance(actual, Tensor)
    found = nonfinite_counts(actual)
    error = actual.detach().double() - expected
    reference = expected if scale is None else scale
    metrics = _metrics(error, reference, limits, layout)
    metric = max(metrics, key=lambda name: metrics[name].margin)
    worst = metrics[metric]
    index = _unravel(_margin(error.abs(), limits.element).argmax(), error.shape)
    figures = statistics(expected, actual) | {f"margin_{name}": m.margin for name, m in metrics.items()}
    unit = worst.unit if worst.unit > 0 and math.isfinite(worst.unit) else 1.0
    return Comparison(
        tensor=tensor,
        kind=kind,
        metric=metric,
        error=math.nan if found else worst.error / unit,
        budget=worst.budget / unit,
        derivation=limits.derivation,
        statistics=figures,
        nonfinite=found,
        failure=Verdict.FAILED_NONFINITE if found else Verdict.FAILED_NUMERIC,
        worst=Worst({**layout.place(index), **worst.place}, float(expected[index]), float(actual[index])),
        because=f"{sum(found.values())} non-finite elements" if found else "",
    )


def compare_bound(
    tensor: str,
    expected: Tensor,
    actual: object,
    allowed: Tensor,
    layout: Layout,
    *,
    derivation: str,
    dtype: torch.dtype = torch.float32,
    discrimination: Mapping[str, float] | None = None,
) -> Comparison:
    """Holds every element of a tensor against a bound of its own; tells the largest share of one.

    Args:
        expected: fp64.
        actual: what the subject returned; must have `dtype` and `expected`'s shape.
        allowed: fp64, positive, the bound of each element.
        derivation: where the bound comes from.
        discrimination: wrong answer -> how far beyond the bound it is; above 1 it is excluded.
    """
    wrong = mismatch(tensor, actual, shape=tuple(expected.shape), dtype=dtype, device=expected.device)
    if wrong is not None:
        return wrong
    assert isinstance(actual, Tensor)
    shares = ((actual.detach().double() - expected).abs() / allowed).nan_to_num(
        nan=torch.inf, posinf=torch.inf
    )
    index = _unravel(shares.argmax(), shares.shape)
    told = dict(discrimination or {})
    return Comparison(
        tensor=tensor,
        kind="budget",
        metric="share_of_bound",
        error=float(shares.max()),
        budget=1.0,
        derivation=derivation,
        worst=Worst(layout.place(index), float(expected[index]), float(actual[index])),
        discrimination=told,
        excluded=tuple(name for name, distance in told.items() if distance > 1.0),
    )


@dataclass(frozen=True)
class _Metric:
    error: float
    budget: float
    unit: float
    place: Mapping[str, int] = field(default_factory=dict)

    @property
    def margin(self) -> float:
        if self.error == 0.0:
            return 0.0
        ratio = self.error / self.budget if self.budget > 0 else math.inf
        return math.inf if math.isnan(ratio) else ratio


def _metrics(error: Tensor, reference: Tensor, limits: Limits, layout: Layout) -> dict[str, _Metric]:
    """Error and budget in each metric, where the margin is worst."""
    norms, units = block_norms(error, layout), block_norms(reference, layout)
    heads, head_units = norms.square().sum(0).sqrt(), units.square().sum(0).sqrt()
    h = int(_margin(heads, limits.head).argmax())
    row, column = divmod(int(_margin(norms, limits.block).argmax()), norms.shape[1])
    tokens = error.shape[1] if "token" in layout.axes else 0
    block = layout.block_place(row, tokens) | {"head": column}
    index = _unravel(_margin(error.abs(), limits.element).argmax(), error.shape)
    local = float(reference.double().norm()) / math.sqrt(error.numel())
    return {
        "rel_l2": _Metric(float(error.norm()), limits.total, float(reference.double().norm())),
        "worst_head_rel_l2": _Metric(
            float(heads[h]), float(limits.head[h]), float(head_units[h]), {"head": h}
        ),
        "worst_chunk_rel_l2": _Metric(
            float(norms[row, column]), float(limits.block[row, column]), float(units[row, column]), block
        ),
        "max_over_scale": _Metric(float(error[index].abs()), float(limits.element[index]), local),
    }


def _unravel(flat: Tensor, shape: torch.Size) -> tuple[int, ...]:
    return tuple(int(i) for i in torch.unravel_index(flat.cpu(), shape))


def _margin(error: Tensor, budget: Tensor) -> Tensor:
    ratio = torch.where(error == 0, torch.zeros_like(error), error / budget)
    return ratio.nan_to_num(nan=math.inf, posinf=math.inf).flatten()


def _worst_differing(expected: Tensor, actual: Tensor, same: Tensor, layout: Layout | None) -> Worst:
    gap = (actual.double() - expected.double()).abs().nan_to_num(nan=math.inf, posinf=math.inf)
    gap = torch.where(same, torch.full_like(gap, -1.0), gap)
    index = _unravel(gap.flatten().argmax(), gap.shape)
    place = layout.place(index) if layout is not None else {f"axis{i}": n for i, n in enumerate(index)}
    return Worst(place, float(expected[index]), float(actual[index]))


def _require_elements(expected: Tensor) -> None:
    if expected.numel() == 0:
        raise ValueError(
            f"a comparison needs at least one element, got shape {tuple(expected.shape)}; "
            "an empty comparison proves nothing"
        )
