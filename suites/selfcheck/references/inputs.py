"""Inputs for the oracles: small, fp64, seeded."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

Tensor = torch.Tensor

GRADIENTS = ("dq", "dk", "dv", "dg", "dbeta", "dh0")


def make_inputs(
    *,
    B: int = 1,
    T: int = 145,
    H: int = 2,
    HV: int = 4,
    K: int = 32,
    V: int = 48,
    N: int | None = None,
    gate: float = -0.1,
    seed: int = 0,
    channel_gates: bool = False,
) -> list[Tensor]:
    """`[q, k, v, g, beta, initial_state]`, fp64 leaves; gates uniform in `[2 gate, 0]`, keys normalised."""
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=draw)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, dtype=torch.float64, generator=draw)

    gates = (B, T, HV, K) if channel_gates else (B, T, HV)
    inputs = [
        normal(B, T, H, K),
        torch.nn.functional.normalize(normal(B, T, H, K), dim=-1),
        normal(B, T, HV, V),
        2.0 * gate * uniform(*gates),
        uniform(B, T, HV),
        normal(B if N is None else N, HV, K, V),
    ]
    return [x.requires_grad_() for x in inputs]


def run(
    op: Callable[..., tuple[Tensor, Tensor]],
    inputs: Sequence[Tensor],
    *,
    do: Tensor | None = None,
    dht: Tensor | None = None,
    **options: Any,
) -> dict[str, Tensor]:
    """Outputs and gradients by name, for seeded incoming gradients unless others are given."""
    o, final_state = op(*inputs, **options)
    draw = torch.Generator().manual_seed(99)
    do = torch.randn(o.shape, dtype=o.dtype, generator=draw) if do is None else do
    dht = torch.randn(final_state.shape, dtype=o.dtype, generator=draw) if dht is None else dht
    found = torch.autograd.grad([o, final_state], list(inputs), [do, dht])
    return {
        "o": o.detach(),
        "final_state": final_state.detach(),
        **{name: dx.detach() for name, dx in zip(GRADIENTS, found, strict=True)},
    }


def relative(actual: Tensor, expected: Tensor) -> float:
    """The relative L2 distance; 0 for equal tensors, infinite from zero."""
    distance = float((actual - expected).detach().norm())
    size = float(expected.detach().norm())
    return 0.0 if distance == 0.0 else distance / size if size else math.inf


def boundaries(*lengths: int) -> Tensor:
    """`cu_seqlens` of sequences with these lengths."""
    return torch.tensor([0, *lengths]).cumsum(0)
