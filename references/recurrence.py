"""The token loop that both recurrences share; they differ in the shape of their decay alone."""

from __future__ import annotations

import torch

from references.packing import pack, rows
from references.qdq import qdq_state

Tensor = torch.Tensor


def run_tokens(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    beta: Tensor,
    initial_state: Tensor | None,
    *,
    scale: float | None,
    cu_seqlens: Tensor | None,
    state_v_first: bool,
    state_format: str | None,
    state_block_v: int,
    chunk_size: int,
) -> tuple[Tensor, Tensor]:
    """Runs all sequences and heads side by side, token by token, in fp64.

    Args:
        q, k: `[B, T, H, K]`; `q` is multiplied by `scale`, by default `K ** -0.5`.
        v: `[B, T, HV, V]`.
        decay: `[B, T, HV, K]` or `[B, T, HV, 1]`, what multiplies the rows of the state.
        beta: `[B, T, HV]`.
        initial_state: `[N, HV, K, V]` (`[N, HV, V, K]` when `state_v_first`); None means zero.
        cu_seqlens: `[N + 1]` boundaries of packed sequences, with B = 1.
        state_format: format of the state site: rounds on entry, after every `chunk_size` tokens of a sequence
            and at its end; None leaves it off.
        state_block_v: width of a state tile.

    Returns:
        o: `[B, T, HV, V]` and the final state, shaped as the initial one, both fp64.
    """
    batch, length, value_heads, value_dim = v.shape
    key_dim = k.shape[-1]
    scale = key_dim**-0.5 if scale is None else scale
    packing = pack(batch, length, cu_seqlens, 1, q.device, together=True)
    (plan,) = packing.plans
    q, k = (x.repeat_interleave(value_heads // x.shape[2], 2) for x in (q, k))
    inputs = (x.to(torch.float64).flatten(0, 1) for x in (q, k, v, decay, beta))
    tokens = [torch.split(rows(x, plan.tokens, plan.slots), list(plan.counts)) for x in inputs]

    def rounded(state: Tensor) -> Tensor:
        return state if state_format is None else qdq_state(state, block_v=state_block_v, fmt=state_format)

    def ended(state: Tensor, after: int) -> Tensor:  # a full last chunk, or no token, is rounded already
        return state if after % chunk_size == 0 else rounded(state)

    shape = (len(packing.starts) - 1, value_heads, key_dim, value_dim)
    state = _initial(initial_state, shape, state_v_first, q.device).index_select(0, plan.sequences)
    state = rounded(state)
    outputs, finals = [], []
    for after, (q_t, k_t, v_t, decay_t, beta_t) in enumerate(zip(*tokens, strict=True)):
        running = q_t.shape[0]
        if running < state.shape[0]:
            finals.append(ended(state[running:], after))
            state = state[:running]
        kept = decay_t.unsqueeze(-1) * state
        write = beta_t.unsqueeze(-1) * (v_t - (k_t.unsqueeze(-2) @ kept).squeeze(-2))
        state = kept + k_t.unsqueeze(-1) * write.unsqueeze(-2)
        outputs.append((scale * q_t.unsqueeze(-2) @ state).squeeze(-2))
        if (after + 1) % chunk_size == 0:
            state = rounded(state)
    finals.append(ended(state, len(outputs)))
    final = torch.cat(finals[::-1]).index_select(0, packing.sequences)
    flat = torch.cat(outputs) if outputs else v.to(torch.float64).flatten(0, 1)
    o = rows(flat, packing.slots, packing.tokens).view(v.shape)
    return o, final.mT if state_v_first else final


def _initial(
    state: Tensor | None, shape: tuple[int, ...], state_v_first: bool, device: torch.device
) -> Tensor:
    if state is None:
        return torch.zeros(shape, dtype=torch.float64, device=device)
    return (state.mT if state_v_first else state).to(torch.float64)
