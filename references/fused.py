"""What the op can be asked to fuse, done outside it: normalisation of q and k, sigmoid of beta, the gate.

All in fp64 with autograd. Source: flash-linear-attention 0.5.1, the arguments `use_qk_l2norm_in_kernel`,
`use_beta_sigmoid_in_kernel`, `allow_neg_eigval` and `use_gate_in_kernel` of `chunk_gated_delta_rule`.
"""

from __future__ import annotations

import torch

Tensor = torch.Tensor

NORM_EPSILON = 1e-6
"""Added to the sum of squares, under the root."""


def l2_normalized(x: Tensor) -> Tensor:
    """`x / sqrt(sum(x^2) + 1e-6)` over the last axis, fp64."""
    x = x.to(torch.float64)
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + NORM_EPSILON)


def write_strength(logits: Tensor, *, allow_neg_eigval: bool = False) -> Tensor:
    """`sigmoid(logits)`, twice that when `allow_neg_eigval`, fp64."""
    strength = torch.sigmoid(logits.to(torch.float64))
    return 2.0 * strength if allow_neg_eigval else strength


def log_decay(g: Tensor, A_log: Tensor, dt_bias: Tensor | None = None) -> Tensor:
    """`-exp(A_log) * softplus(g + dt_bias)`, fp64.

    Args:
        g: `[B, T, HV]`, raw gate.
        A_log: `[HV]`.
        dt_bias: `[HV]`; None means zero.
    """
    g = g.to(torch.float64)
    if dt_bias is not None:
        g = g + dt_bias.to(torch.float64)
    return -torch.exp(A_log.to(torch.float64)) * torch.logaddexp(g, torch.zeros_like(g))
