"""Gated DeltaNet token by token: the definition of the op, and the first of two independent references.

Per sequence and value head, with the state `S` of shape `[K, V]`:

    R_t = exp(g_t) S_{t-1}      u_t = beta_t (v_t - k_t^T R_t)      S_t = R_t + k_t u_t^T      o_t = scale q_t^T S_t

Source: Yang et al., Gated Delta Networks (2024), equation 10.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from references.packing import pack, rows
from references.qdq import qdq_state

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
        q, k: `[B, T, H, K]`.
        v: `[B, T, HV, V]`.
        g: `[B, T, HV]`, natural log of the decay; with a fourth axis `[B, T, HV, K]`, one per key channel.
        beta: `[B, T, HV]`.
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
    batch, length, value_heads, value_dim = v.shape
    key_dim = k.shape[-1]
    scale = key_dim**-0.5 if scale is None else scale
    packing = pack(batch, length, cu_seqlens, 1, q.device, together=True)
    (plan,) = packing.plans
    q, k, v, g, beta = (x.to(torch.float64) for x in (q, k, v, g, beta))
    q, k = (x.repeat_interleave(value_heads // x.shape[2], 2) for x in (q, k))
    decay = torch.exp(g if g.ndim == 4 else g.unsqueeze(-1))
    tokens = [
        rows(x.flatten(0, 1), plan.tokens, plan.slots).split(plan.counts)
        for x in (q * scale, k, v, decay, beta)
    ]

    def rounded(state: Tensor) -> Tensor:
        return state if state_format is None else qdq_state(state, block_v=state_block_v, fmt=state_format)

    state = _initial(
        initial_state, (len(packing.starts) - 1, value_heads, key_dim, value_dim), state_v_first, q
    )
    state = rounded(state.index_select(0, plan.sequences))
    outputs, finals = [], []
    for step, (q_t, k_t, v_t, decay_t, beta_t) in enumerate(zip(*tokens, strict=True)):
        running = q_t.shape[0]
        if running < state.shape[0]:
            finals.append(_ended(state[running:], step, chunk_size, rounded))
            state = state[:running]
        kept = decay_t.unsqueeze(-1) * state
        write = beta_t.unsqueeze(-1) * (v_t - (k_t.unsqueeze(-2) @ kept).squeeze(-2))
        state = kept + k_t.unsqueeze(-1) * write.unsqueeze(-2)
        outputs.append((q_t.unsqueeze(-2) @ state).squeeze(-2))
        if (step + 1) % chunk_size == 0:
            state = rounded(state)
    finals.append(_ended(state, len(outputs), chunk_size, rounded))
    final = torch.cat(finals[::-1]).index_select(0, packing.sequences)
    flat = torch.cat(outputs) if outputs else v.flatten(0, 1)
    o = rows(flat, packing.slots, packing.tokens).unflatten(0, (batch, length))
    return o, final.mT if state_v_first else final


def _ended(state: Tensor, tokens: int, chunk_size: int, rounded: Callable[[Tensor], Tensor]) -> Tensor:
    """The final state after `tokens` tokens: rounded already when the sequence ends with a full chunk, or is empty."""
    return state if tokens % chunk_size == 0 else rounded(state)


def _initial(state: Tensor | None, shape: tuple[int, ...], state_v_first: bool, like: Tensor) -> Tensor:
    if state is None:
        return torch.zeros(shape, dtype=torch.float64, device=like.device)
    state = state.to(torch.float64)
    return state.mT if state_v_first else state
