"""Faults in the gradient of a rounding, and in what the backward is linearised at."""

from __future__ import annotations

from collections.abc import Callable

import torch

from suites.controls.control import Control, named_look
from suites.subjects.eager import EagerGDN, EagerQDQ, Notes

Tensor = torch.Tensor


def _largest_of(x: Tensor) -> Tensor:
    """Whether an element is the largest of its column of groups; a stand-in for the element at the clamp."""
    return x.abs() == x.abs().amax(-1, keepdim=True)


def _clamped(self: EagerQDQ, dy: Tensor, x: Tensor, values: Callable[[Tensor], Tensor]) -> Tensor:
    return torch.where(_largest_of(x), torch.zeros_like(dy), dy)


def _rounded(self: EagerQDQ, dy: Tensor, x: Tensor, values: Callable[[Tensor], Tensor]) -> Tensor:
    return values(dy)


def _through_scale(self: EagerQDQ, dy: Tensor, x: Tensor, values: Callable[[Tensor], Tensor]) -> Tensor:
    residual = torch.where(x == 0, torch.zeros_like(x), (values(x) - x) / x.abs().amax(-1, keepdim=True))
    return dy + torch.where(_largest_of(x), (dy * residual).sum(-1, keepdim=True) * x.sign(), 0.0).to(
        dy.dtype
    )


def _clamped_in_a_stack(self: EagerQDQ, dy: Tensor, x: Tensor, values: Callable[[Tensor], Tensor]) -> Tensor:
    return _clamped(self, dy, x, values) if x.dim() > 2 else dy


def _site_is_on(n: Notes) -> bool:
    return n.options.state_format is not None


def _state_clamped(self: EagerGDN, ds: Tensor, dvn: Tensor, c: int, n: Notes) -> Tensor:
    found = EagerGDN.state_gradient(self, ds, dvn, c, n)
    saturated = n.raws[c].abs() == n.raws[c].abs().amax((-2, -1), keepdim=True)
    return torch.where(saturated, torch.zeros_like(found), found) if _site_is_on(n) else found


def _dht_rounded(self: EagerGDN, dht: Tensor, n: Notes) -> Tensor:
    options = n.options
    if options.state_format is None:
        return dht
    return self.qdq.state_values(dht, options.state_block_v, options.state_format)


def _dw_rounded(self: EagerGDN, n: Notes) -> Tensor:
    dw = EagerGDN.gradient_of_w(self, n)
    return dw if n.options.w_format is None else self.qdq.w_values(dw, n.options.w_format)


def _dw_clamped(self: EagerGDN, n: Notes) -> Tensor:
    dw = EagerGDN.gradient_of_w(self, n)
    return dw if n.options.w_format is None else torch.where(_largest_of(n.w), torch.zeros_like(dw), dw)


def _at_unrounded_state(self: EagerGDN, n: Notes) -> Tensor:
    return torch.stack(n.raws[: n.at.chunks]) if n.at.chunks else n.states


def _at_unrounded_w(self: EagerGDN, dht: Tensor, n: Notes) -> Tensor:
    n.wq = n.w
    return dht


def _w_rounded_again(self: EagerGDN, dht: Tensor, n: Notes) -> Tensor:
    if n.options.w_format is not None:
        n.wq = self.qdq.groups(n.wq, (-2, -1), n.options.w_format)
    return dht


def _w_of_bf16_parts(self: EagerGDN, dht: Tensor, n: Notes) -> Tensor:
    if n.options.w_format is not None:
        keys = (n.beta * self.decay(n.G))[..., None] * n.k
        w = n.inverse.bfloat16().float() @ keys.bfloat16().float()
        n.wq = self.qdq.w_values(w.to(n.carrier), n.options.w_format).to(self.work)
    return dht


def _rounded_w_in_adjoint(self: EagerGDN, n: Notes) -> Tensor:
    return n.wq


STRAIGHT_THROUGH = (
    Control(
        "qdq_gradient_clamped",
        "straight_through",
        "the clamp stays in the graph and stops the largest element",
        rounding={"gradient": _clamped},
        looks=("qdq",),
    ),
    Control(
        "qdq_gradient_rounded",
        "straight_through",
        "a differentiable cast rounds its gradient as well",
        rounding={"gradient": _rounded},
        looks=("qdq",),
    ),
    Control(
        "qdq_gradient_through_scale",
        "straight_through",
        "the scale is not detached",
        rounding={"gradient": _through_scale},
        looks=("qdq",),
    ),
    Control(
        "state_gradient_clamped",
        "straight_through",
        "the backward stops the gradient of the element that sits at the largest code",
        {"state_gradient": _state_clamped},
        looks=("exact", "smooth"),
    ),
    Control(
        "dht_rounded",
        "straight_through",
        "the gradient of the final state goes through the site's cast",
        {"incoming": _dht_rounded},
        looks=("probe_state", "exact"),
    ),
    Control(
        "dw_rounded",
        "straight_through",
        "the gradient of W goes through the site's cast",
        {"gradient_of_w": _dw_rounded},
        looks=("probe_w", "exact"),
    ),
    Control(
        "dw_clamped",
        "straight_through",
        "the gradient of W stops at the element with the largest code",
        {"gradient_of_w": _dw_clamped},
        looks=("probe_w", "exact"),
    ),
    Control(
        "backward_at_unrounded_state",
        "straight_through",
        "the backward recomputes the states without rounding them",
        {"states_for_backward": _at_unrounded_state},
        looks=("exact", "smooth"),
    ),
    Control(
        "backward_at_unrounded_w",
        "straight_through",
        "the backward recomputes W without rounding it",
        {"incoming": _at_unrounded_w},
        looks=("exact", "smooth"),
    ),
    Control(
        "solve_adjoint_at_rounded_w",
        "straight_through",
        "the adjoint of the solve reads the saved, rounded W",
        {"w_for_adjoint": _rounded_w_in_adjoint},
        looks=("probe_w",),
    ),
    Control(
        "w_rounded_again",
        "straight_through",
        "the backward rounds the saved W once more, with a scale for a whole block",
        {"incoming": _w_rounded_again},
        looks=("exact", "smooth"),
    ),
    Control(
        "w_recomputed_in_bf16",
        "straight_through",
        "the backward rounds a W that it recomputed from bf16 parts",
        {"incoming": _w_of_bf16_parts},
        tier="whole",
        looks=(named_look("backward_at_recomputed_w"),),
        unseen={"bf16": "the forward makes W from the same bf16 parts"},
    ),
    Control(
        "gradient_zero_at_amax_of_a_stack",
        "straight_through",
        "the path for several sequences and heads clamps in the autograd graph, that for a matrix does not",
        rounding={"gradient": _clamped_in_a_stack},
        looks=("qdq_gradient",),
    ),
)
"""Most leave every forward output as it is, bit for bit."""
