"""Gated DeltaNet token by token: the definition of the op, and the first of two independent references.

Per sequence and value head, with the state `S` of shape `[K, V]`:

    R_t = exp(g_t) S_{t-1}      u_t = beta_t (v_t - k_t^T R_t)
    S_t = R_t + k_t u_t^T       o_t = scale q_t^T S_t

Source: Yang et al., Gated Delta Networks (2024), equation 10.
"""

from __future__ import annotations

import torch

from references.recurrence import run_tokens

Tensor = torch.Tensor


def gdn_recurrent(
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
    """Computes the recurrence exactly, in fp64; the state is rounded where the chunk form rounds it.

    Args:
        q, k: `[B, T, H, K]`, any float dtype.
        v: `[B, T, HV, V]`, `HV % H == 0`; value head j uses q/k head `j // (HV // H)`.
        g: `[B, T, HV]`, natural log of the decay.
        beta: `[B, T, HV]`, write strength.
        initial_state: `[N, HV, K, V]` (`[N, HV, V, K]` when `state_v_first`); None means zero.
        scale: multiplies q; default `K ** -0.5`.
        cu_seqlens: `[N + 1]` boundaries of packed sequences, with B = 1.
        state_v_first: layout of the given and the returned state.
        state_format: format of the state site: rounds on entry, after every `chunk_size` tokens of a sequence
            and at its end; None leaves it off.
        state_block_v: width of a state tile.
        chunk_size: tokens between two roundings.

    Returns:
        o: `[B, T, HV, V]` and the final state, shaped as the initial one, both fp64.
    """
    return run_tokens(
        q,
        k,
        v,
        g.to(torch.float64).exp().unsqueeze(-1),
        beta,
        initial_state,
        scale=scale,
        cu_seqlens=cu_seqlens,
        state_v_first=state_v_first,
        state_format=state_format,
        state_block_v=state_block_v,
        chunk_size=chunk_size,
    )
