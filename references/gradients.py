"""Gradients that are not those of the value: tools for straight-through rounding and for backward faults."""

from __future__ import annotations

from typing import Any, cast

import torch

Tensor = torch.Tensor


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, value: Tensor) -> Tensor:
        return value

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def straight_through(x: Tensor, value: Tensor) -> Tensor:
    """`value`, exactly, with the identity gradient to `x`; both of one shape and dtype."""
    return cast(Tensor, _StraightThrough.apply(x, value))  # type: ignore[no-untyped-call]


class _ScaledGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: Any) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] * ctx.factor, None


def scaled_gradient(x: Tensor, factor: Tensor | float) -> Tensor:
    """`x` unchanged; its gradient times `factor`."""
    return cast(Tensor, _ScaledGradient.apply(x, factor))  # type: ignore[no-untyped-call]
