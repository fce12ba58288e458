"""Where declared precision enters an oracle: exact, or one random member of the family of correct answers.

An oracle hands every matmul, stored intermediate, cumulative sum and exponential to an `Arithmetic`. `EXACT`
computes them as they are. `Noisy` rounds matmul operands and stored tensors to the declared precision, adds
the rounding noise of fp32 accumulation, and does the same, with draws of its own, to every gradient on the
way back; rounding is stochastic by default, so that repeated runs sample what correct implementations of that
precision can give (Monte Carlo arithmetic: Parker, Pierce, Eggert, 2000). `MAGNITUDES` measures how much
cancels in the gradient of the gates.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import torch

Tensor = torch.Tensor

UNIT_ROUNDOFF = 2.0**-24
"""Half the distance between 1 and the next fp32 number."""

EXP_ERROR = 2.0**-22
"""Relative error of the fast exponential of a GPU (PTX ISA, ex2.approx.f32, with its final rounding)."""


@dataclass(frozen=True)
class Precision:
    """Explicit mantissa bits; the exponent below which numbers are evenly spaced, None if too small."""

    mantissa_bits: int
    min_exponent: int | None = None


PRECISIONS: Mapping[str, Precision] = {
    "ieee": Precision(23),
    "fp32": Precision(23),
    "tf32": Precision(10),
    "bf16": Precision(7),
    "fp16": Precision(10, -14),
}

BLOCK = 16
"""Rows of the diagonal blocks that are inverted by substitution before blocks are put together."""

FULL = ("ieee", "fp32")
"""Precisions of an operand that round nothing which fp32 holds."""

MODES = ("stochastic", "nearest", "toward_zero")


class Arithmetic:
    """Exact arithmetic, and the interface that every other arithmetic has."""

    def matmul(self, a: Tensor, b: Tensor, left: Tensor | None = None, right: Tensor | None = None) -> Tensor:
        """`a @ b`; its gradient is linearised at `left` and `right` where they are given.

        Args:
            a: `[..., m, n]`.
            b: `[..., n, p]`, with the same leading axes.
            left: what stands for `a` in the gradient of `b`.
            right: what stands for `b` in the gradient of `a`.
        """
        if left is None and right is None:
            return a @ b
        return cast(Tensor, _Matmul.apply(self, a, b, left, right))  # type: ignore[no-untyped-call]

    def inverse(self, strictly_lower: Tensor) -> Tensor:
        """`(I + L)^-1` for a strictly lower triangular `L` of shape `[..., C, C]`."""
        return cast(Tensor, _Inverse.apply(self, strictly_lower))  # type: ignore[no-untyped-call]

    def cumsum(self, g: Tensor) -> Tensor:
        """The cumulative sum along the last axis."""
        return cast(Tensor, _Cumsum.apply(self, g))  # type: ignore[no-untyped-call]

    def total(self, last: Tensor) -> Tensor:
        """The sum of all gates of a chunk, given as the last cumulative one; it may be added up apart."""
        return last

    def decay(self, later: Tensor, earlier: Tensor | None = None, keep: Tensor | None = None) -> Tensor:
        """`exp(later - earlier)`, zero where `keep` is false; masked before the exponential.

        Args:
            later: cumulative log decay.
            earlier: cumulative log decay that broadcasts against `later`; absent means zero.
            keep: bool mask that broadcasts against the result.
        """
        return cast(Tensor, _Decay.apply(self, later, earlier, keep))  # type: ignore[no-untyped-call]

    def scaled(self, factor: Tensor, x: Tensor, at: Tensor | None = None, *, copies: bool = False) -> Tensor:
        """`factor * x`; the gradient of the factor is the sum of `dy * x` over what the factor lacks.

        Args:
            factor: broadcasts against `x`.
            x: any shape.
            at: what stands for `x` in the gradient of the factor, or None.
            copies: whether the gradient of the factor is made of copies of `x` and `dy` in the carrier.
        """
        return cast(Tensor, _Scaled.apply(self, factor, x, at, copies))  # type: ignore[no-untyped-call]

    def store(self, x: Tensor) -> Tensor:
        """A tensor that goes through memory in the carrier dtype, and so does its gradient."""
        return x

    def accumulator(self, x: Tensor) -> Tensor:
        """A tensor that is kept in fp32, and so is its gradient: the state."""
        return x

    def gates(self, x: Tensor) -> Tensor:
        """A gate or write strength: exact on the way in, its gradient is stored in the dtype of the gates."""
        return x

    # What the autograd functions below ask for. Exact: nothing happens.

    def _operand(self, x: Tensor) -> Tensor:
        return x

    def _copy(self, x: Tensor) -> Tensor:
        return x

    def _product(self, a: Tensor, b: Tensor) -> Tensor:
        return a @ b

    def _solve(self, strictly_lower: Tensor) -> Tensor:
        return _unit_lower_inverse(strictly_lower)

    def _prefix_sums(self, x: Tensor) -> Tensor:
        return x.cumsum(-1)

    def _suffix_sums(self, x: Tensor) -> Tensor:
        return x.flip(-1).cumsum(-1).flip(-1)

    def _exponential(self, value: Tensor, exponent: Tensor) -> Tensor:
        return value

    def _exponent_gradient(self, upstream: Tensor, is_matrix: bool) -> Tensor:
        return upstream

    def _reduced(self, upstream: Tensor, shape: torch.Size, sign: float) -> Tensor:
        return _sum_to(upstream, shape) * sign


class _Magnitudes(Arithmetic):
    """Exact values; the gradient of the gates is replaced by the sum of the magnitudes of its terms."""

    def _reduced(self, upstream: Tensor, shape: torch.Size, sign: float) -> Tensor:
        return _sum_to(upstream.abs(), shape)


EXACT = Arithmetic()
"""Exact arithmetic in the dtype of the oracle."""

MAGNITUDES: Arithmetic = _Magnitudes()
"""Exact arithmetic whose gradient of `g` is the sum of the magnitudes that cancel in it."""


class Noisy(Arithmetic):
    """One random member of the family of correct low-precision answers.

    Args:
        operand: precision of matmul operands: `ieee`, `tf32`, `bf16` or `fp16`.
        accumulate: precision of accumulation, `fp32`, or `exact` to leave its noise out.
        store: precision of stored intermediates and gradients: the carrier's.
        seed: chooses the member.
        mode: `stochastic` rounding, `nearest`, or `toward_zero` (what hardware does to TF32 operands that
            were not rounded before); stored tensors round to nearest in the last.
        solve: precision at which the triangular solve sees its matrix; default `tf32` for reduced operands.
        gates: precision of the gradients of `g` and `beta`.
    """

    def __init__(
        self,
        operand: str = "bf16",
        accumulate: str = "fp32",
        store: str = "bf16",
        seed: int = 0,
        mode: str = "stochastic",
        solve: str | None = None,
        gates: str = "fp32",
    ) -> None:
        for option, value in (("operand", operand), ("store", store), ("gates", gates)):
            if value not in PRECISIONS:
                raise ValueError(f"{option} must be one of {', '.join(PRECISIONS)}, got {value!r}")
        if accumulate not in ("fp32", "exact"):
            raise ValueError(f"accumulate must be fp32 or exact, got {accumulate!r}; choose one of them")
        if mode not in MODES:
            raise ValueError(f"mode must be one of {', '.join(MODES)}, got {mode!r}; choose a listed mode")
        self.operand, self.accumulate, self.mode, self.seed = operand, accumulate, mode, seed
        self.stored, self.gate = store, gates
        self._full_operands = operand in FULL
        self.solve = solve or ("fp32" if self._full_operands else "tf32")
        self._random = random.Random(seed)

    def matmul(self, a: Tensor, b: Tensor, left: Tensor | None = None, right: Tensor | None = None) -> Tensor:
        """`a @ b` with rounded operands and fp32 accumulation, and so are its two gradients."""
        return cast(Tensor, _Matmul.apply(self, a, b, left, right))  # type: ignore[no-untyped-call]

    def store(self, x: Tensor) -> Tensor:
        """`x` and its gradient, rounded to the carrier."""
        return cast(Tensor, _Rounded.apply(self, x, self.stored, True))  # type: ignore[no-untyped-call]

    def accumulator(self, x: Tensor) -> Tensor:
        """`x` and its gradient, rounded to fp32."""
        return cast(Tensor, _Rounded.apply(self, x, "fp32", True))  # type: ignore[no-untyped-call]

    def gates(self, x: Tensor) -> Tensor:
        """`x`, its gradient rounded to the dtype of the gates."""
        return cast(Tensor, _Rounded.apply(self, x, self.gate, False))  # type: ignore[no-untyped-call]

    def round(self, x: Tensor, precision: str, mode: str | None = None) -> Tensor:
        """`x` (fp64) rounded to a precision, in this arithmetic's mode or the one given."""
        mode = mode or self.mode
        kept = PRECISIONS[precision]
        drop = 52 - kept.mantissa_bits
        bits = x.contiguous().view(torch.int64)
        if mode == "stochastic":
            rounded = bits + self._bits(x, drop)
        elif mode == "nearest":
            rounded = bits + ((bits >> drop) & 1) + ((1 << (drop - 1)) - 1)
        else:
            rounded = bits.clone()
        rounded = rounded.bitwise_and_(-(1 << drop)).view(torch.float64)
        if kept.min_exponent is not None:
            return torch.where(x.abs() < 2.0**kept.min_exponent, self._round_even(x, kept, mode), rounded)
        return rounded

    def _round_even(self, x: Tensor, kept: Precision, mode: str) -> Tensor:
        step = 2.0 ** ((kept.min_exponent or 0) - kept.mantissa_bits)
        if mode == "stochastic":
            return torch.floor(x / step + 0.5 + 0.5 * self._unit(x)) * step
        return (torch.round(x / step) if mode == "nearest" else torch.trunc(x / step)) * step

    def _operand(self, x: Tensor) -> Tensor:
        return self.round(x, self.operand)

    def _copy(self, x: Tensor) -> Tensor:
        return self._stored(x, self.stored)

    def _stored(self, x: Tensor, precision: str) -> Tensor:
        return self.round(x, precision, "nearest" if self.mode == "toward_zero" else None)

    def _product(self, a: Tensor, b: Tensor) -> Tensor:
        y = a @ b
        if self.accumulate == "exact":
            return y
        unit = self._unit(y)
        if self._full_operands:
            # Each partial sum is rounded. In n steps they drift towards y and wander by the root of what they
            # add: their mean square is about y^2 / 3 + sum((a b)^2) / 2. Twice that covers truncating units.
            typical = torch.addcmul((a * a) @ (b * b) * 2.0, y, y, value=4.0 / 3.0).sqrt_()
        else:  # far below the noise of the operands: Cauchy and Schwarz's bound will do
            typical = torch.linalg.vector_norm(a, dim=-1, keepdim=True) * torch.linalg.vector_norm(
                b, dim=-2, keepdim=True
            )
        return y.addcmul_(typical, unit, value=UNIT_ROUNDOFF * a.shape[-1] ** 0.5)

    def _solve(self, strictly_lower: Tensor) -> Tensor:
        lower = self._stored(strictly_lower, self.solve)
        return _unit_lower_inverse(lower) if self.solve in FULL else self._inverse_by_blocks(lower)

    def _inverse_by_blocks(self, strictly_lower: Tensor) -> Tensor:
        """The inverse as matrix units make it: of blocks of 16, then of pairs of blocks by two products."""
        size = strictly_lower.shape[-1]
        if size <= BLOCK:
            return _unit_lower_inverse(strictly_lower)
        half = BLOCK
        while 2 * half < size:
            half *= 2
        missing = 2 * half - size
        padded = torch.nn.functional.pad(strictly_lower, (0, missing, 0, missing))
        above, below = padded[..., :half, :half], padded[..., half:, half:]
        first, second = self._inverse_by_blocks(torch.stack([above, below])).unbind()
        corner = self.round(padded[..., half:, :half], self.solve)
        left, right = self.round(second, self.solve), self.round(first, self.solve)
        between = -self._product(left, self.round(self._product(corner, right), self.solve))
        upper = torch.cat([first, torch.zeros_like(first)], -1)
        return torch.cat([upper, torch.cat([between, second], -1)], -2)[..., :size, :size]

    def _prefix_sums(self, x: Tensor) -> Tensor:
        total = x.cumsum(-1)
        if self.accumulate == "exact":
            return total
        # Adding zero is exact, one after the other; in a tree each sum is rounded in its own way. Twice the
        # rounding of a sum: gates are often turned into binary logarithms, which rounds once more.
        steps = (total * (x != 0.0)).mul_(self._unit(x)).mul_(2.0 * UNIT_ROUNDOFF).cumsum(-1)
        own = (total * self._unit(x)).mul_(2.0 * UNIT_ROUNDOFF)
        return self.round(total + steps + own, "fp32", "nearest")

    def total(self, last: Tensor) -> Tensor:
        """In another order, as a reduction beside a scan has it: no difference to a partial sum is exact."""
        if self.accumulate == "exact":
            return last
        x = last.detach()
        apart = self.round(x + x * self._unit(x) * (2.0 * UNIT_ROUNDOFF), "fp32", "nearest")
        return last + (apart - x)

    def _suffix_sums(self, x: Tensor) -> Tensor:
        total = super()._suffix_sums(x)
        if self.accumulate == "exact":
            return total
        # Summed from the end, or as the whole less what comes before: either way as large as the largest sum.
        largest = total.abs().amax(-1, keepdim=True) if x.shape[-1] else total
        return torch.addcmul(total, largest, self._unit(x), value=2.0 * UNIT_ROUNDOFF)

    def _exponential(self, value: Tensor, exponent: Tensor) -> Tensor:
        relative = (exponent.abs() * UNIT_ROUNDOFF).add_(EXP_ERROR).mul_(self._unit(value))
        return torch.addcmul(value, value, relative.nan_to_num_(0.0))

    def _exponent_gradient(self, upstream: Tensor, is_matrix: bool) -> Tensor:
        # Rounded once for the later and the earlier token, or what must cancel between them would not.
        return self._operand(upstream) if is_matrix else upstream

    def _reduced(self, upstream: Tensor, shape: torch.Size, sign: float) -> Tensor:
        total = _sum_to(upstream, shape)
        if self.accumulate == "exact" or shape == upstream.shape:
            return total * sign
        magnitudes = _sum_to(upstream.abs(), shape)
        return torch.addcmul(total * sign, magnitudes, self._unit(magnitudes), value=UNIT_ROUNDOFF)

    def _bits(self, like: Tensor, drop: int) -> Tensor:
        return self._window(_bit_pool(like.device, drop), like)

    def _unit(self, like: Tensor) -> Tensor:
        return self._window(_unit_pool(like.device), like)

    def _window(self, pool: Tensor, like: Tensor) -> Tensor:
        """Random windows of the pool, one after the other until there are as many numbers as in `like`."""
        count, half = like.numel(), _POOL // 2
        pieces = [
            pool[start : start + min(half, count - done)]
            for done in range(0, max(1, count), half)
            for start in (self._random.randrange(half),)
        ]
        return (pieces[0] if len(pieces) == 1 else torch.cat(pieces)).view(like.shape)


_POOL = 1 << 20


@cache
def _bit_pool(device: torch.device, drop: int) -> Tensor:
    generator = torch.Generator().manual_seed(drop)
    return torch.randint(0, 1 << drop, (_POOL,), dtype=torch.int64, generator=generator).to(device)


@cache
def _unit_pool(device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.rand(_POOL, dtype=torch.float64, generator=generator).mul_(2.0).sub_(1.0).to(device)


def _unit_lower_inverse(strictly_lower: Tensor) -> Tensor:
    identity = torch.eye(strictly_lower.shape[-1], dtype=strictly_lower.dtype, device=strictly_lower.device)
    inverse: Tensor = torch.linalg.solve_triangular(
        strictly_lower, identity.expand(strictly_lower.shape), upper=False, unitriangular=True
    )
    return inverse


def _sum_to(x: Tensor, shape: torch.Size) -> Tensor:
    return x if x.shape == shape else x.sum_to_size(shape)


class _Matmul(torch.autograd.Function):
    """A matmul whose gradient may be linearised elsewhere than at its operands."""

    @staticmethod
    def forward(ctx: Any, arithmetic: Arithmetic, a: Tensor, b: Tensor, left: Any, right: Any) -> Tensor:
        a, b = arithmetic._operand(a), arithmetic._operand(b)
        ctx.arithmetic = arithmetic
        ctx.save_for_backward(
            a if left is None else arithmetic._operand(left),
            b if right is None else arithmetic._operand(right),
        )
        return arithmetic._product(a, b)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor | None, Tensor | None, None, None]:
        left, right = ctx.saved_tensors
        dy = ctx.arithmetic._operand(grads[0])
        da = ctx.arithmetic._product(dy, right.mT) if ctx.needs_input_grad[1] else None
        db = ctx.arithmetic._product(left.mT, dy) if ctx.needs_input_grad[2] else None
        return None, da, db, None, None


class _Inverse(torch.autograd.Function):
    """The inverse of a unit lower triangular matrix and its adjoint `dL = -X^T dX X^T`."""

    @staticmethod
    def forward(ctx: Any, arithmetic: Arithmetic, strictly_lower: Tensor) -> Tensor:
        inverse = arithmetic._operand(arithmetic._solve(strictly_lower))
        ctx.arithmetic = arithmetic
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor]:
        (inverse,) = ctx.saved_tensors
        arithmetic = ctx.arithmetic
        half = arithmetic._product(arithmetic._operand(grads[0]), inverse.mT)
        return None, -arithmetic._product(inverse.mT, arithmetic._operand(half))


class _Cumsum(torch.autograd.Function):
    """A cumulative sum along the last axis; its adjoint is the cumulative sum from the end."""

    @staticmethod
    def forward(ctx: Any, arithmetic: Arithmetic, g: Tensor) -> Tensor:
        ctx.arithmetic = arithmetic
        return arithmetic._prefix_sums(g)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor]:
        return None, ctx.arithmetic._suffix_sums(grads[0])


class _Decay(torch.autograd.Function):
    """`exp(later - earlier)` under a mask."""

    @staticmethod
    def forward(ctx: Any, arithmetic: Arithmetic, later: Tensor, earlier: Any, keep: Any) -> Tensor:
        exponent = later if earlier is None else later - earlier
        if keep is not None:
            exponent = exponent.masked_fill(~keep, -torch.inf)
        value = arithmetic._exponential(exponent.exp(), exponent)
        ctx.arithmetic, ctx.is_matrix = arithmetic, keep is not None
        ctx.shapes = (later.shape, None if earlier is None else earlier.shape)
        ctx.save_for_backward(value)
        return value

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor, Tensor | None, None]:
        (value,) = ctx.saved_tensors
        later, earlier = ctx.shapes
        upstream = ctx.arithmetic._exponent_gradient(grads[0] * value, ctx.is_matrix)
        d_later = ctx.arithmetic._reduced(upstream, later, 1.0)
        return (
            None,
            d_later,
            None if earlier is None else ctx.arithmetic._reduced(upstream, earlier, -1.0),
            None,
        )


class _Scaled(torch.autograd.Function):
    """A tensor times a factor that broadcasts against it."""

    @staticmethod
    def forward(ctx: Any, arithmetic: Arithmetic, factor: Tensor, x: Tensor, at: Any, copies: bool) -> Tensor:
        ctx.arithmetic, ctx.copies = arithmetic, copies
        ctx.save_for_backward(factor, x if at is None else at)
        return factor * x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor | None, Tensor | None, None, None]:
        factor, x = ctx.saved_tensors
        (dy,) = grads
        d_factor = None
        if ctx.needs_input_grad[1]:
            pair = (ctx.arithmetic._copy(dy), ctx.arithmetic._copy(x)) if ctx.copies else (dy, x)
            d_factor = ctx.arithmetic._reduced(pair[0] * pair[1], factor.shape, 1.0)
        dx = _sum_to(factor * dy, x.shape) if ctx.needs_input_grad[2] else None
        return None, d_factor, dx, None, None


class _Rounded(torch.autograd.Function):
    """A tensor rounded to a precision on the way in, where asked, and its gradient on the way back."""

    @staticmethod
    def forward(ctx: Any, arithmetic: Noisy, x: Tensor, precision: str, forward: bool) -> Tensor:
        ctx.arithmetic, ctx.precision = arithmetic, precision
        return arithmetic._stored(x, precision) if forward else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor, None, None]:
        return None, ctx.arithmetic._stored(grads[0], ctx.precision), None, None
