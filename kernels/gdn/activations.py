"""The activations that the op can apply to its inputs, differentiable, in fp32.

Source: the gated delta rule's layer (Yang et al., Gated Delta Networks, 2024); Mamba2's gate for A_log and
dt_bias.
"""

from __future__ import annotations

import torch

Tensor = torch.Tensor

NORM_EPSILON = 1e-6
"""Added to the sum of squares before the root, as in FLA."""


def l2norm(x: Tensor) -> Tensor:
    """Rows of unit length: `x / sqrt(sum(x^2) + 1e-6)` over the last axis, in the dtype of x.

    Args:
        x: `[..., K]`.
    """
    wide = x.float()
    return (wide * (wide.square().sum(-1, keepdim=True) + NORM_EPSILON).rsqrt()).to(x.dtype)


def gate(g: Tensor, A_log: Tensor, dt_bias: Tensor | None) -> Tensor:
    """The log decay `-exp(A_log) * softplus(g + dt_bias)`, fp32; softplus is exact for any argument.

    Args:
        g: `[B, T, HV]`, any float dtype.
        A_log, dt_bias: HV values, any float dtype.
    """
    raw = g.float()
    if dt_bias is not None:
        raw = raw + dt_bias.float().reshape(-1)
    return -A_log.float().reshape(-1).exp() * torch.logaddexp(raw, torch.zeros_like(raw))


def write_strength(beta: Tensor, allow_neg_eigval: bool) -> Tensor:
    """`sigmoid(beta)`, or twice that so that an eigenvalue of the transition can be negative, fp32.

    Args:
        beta: `[B, T, HV]`, any float dtype.
    """
    strength = beta.float().sigmoid()
    return 2.0 * strength if allow_neg_eigval else strength
