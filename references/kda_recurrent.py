"""Kimi Delta Attention token by token: the delta rule with one decay per key channel.

Per sequence and value head, with the state `S` of shape `[K, V]` and `D_t = diag(exp(g_t))`:

    R_t = D_t S_{t-1}           u_t = beta_t (v_t - k_t^T R_t)
    S_t = R_t + k_t u_t^T       o_t = scale q_t^T S_t

Source: Kimi Team, Kimi Linear (2025), equation 1.
"""

from __future__ import annotations

import torch

from references.recurrence import run_tokens

Tensor = torch.Tensor


def kda_recurrent(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    *,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    state_v_first: bool = False,
    state_format: str | None = None,
    state_block_v: int = 64,
    chunk_size: int = 64,
) -> tuple[Tensor, Tensor]:
    """Computes the recurrence exactly, in fp64.

    Args:
        g: `[B, T, HV, K]`, natural log of the decay of each key channel.
        q, k, v, beta, initial_state and options: as in `gdn_recurrent`.

    Returns:
        o: `[B, T, HV, V]` and the final state, shaped as the initial one, both fp64.

    Raises:
        ValueError: when `g` has no channel axis.
    """
    if g.ndim != 4 or g.shape[-1] != k.shape[-1]:
        raise ValueError(
            f"g must have shape [B, T, HV, {k.shape[-1]}], got {tuple(g.shape)}; use gdn_recurrent"
        )
    return run_tokens(
        q,
        k,
        v,
        g.to(torch.float64).exp(),
        beta,
        initial_state,
        scale=scale,
        cu_seqlens=cu_seqlens,
        state_v_first=state_v_first,
        state_format=state_format,
        state_block_v=state_block_v,
        chunk_size=chunk_size,
    )
