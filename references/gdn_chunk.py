"""Gated DeltaNet in chunk form with both rounding sites: the oracle that the fused op is judged against.

Per chunk, with `G` the cumulative sum of `g` and `L = tril(beta_i (k_i . k_j) exp(G_i - G_j), -1)`:

    U = (I + L)^-1 (beta V)        W = (I + L)^-1 (beta exp(G) K)        V' = U - W S
    O = scale exp(G) Q S + tril(scale Q K^T exp(G_i - G_j)) V'
    S' = exp(G_last) S + (exp(G_last - G) K)^T V'

Everything inside a chunk is computed for all chunks of all sequences at once; only the state passes from one
chunk to the next. The gradient is autograd's, with straight-through rounding.

Source: Yang et al., Gated Delta Networks (2024), section 3.3; the WY form of Bischof and Van Loan (1987).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from references.arithmetic import EXACT, MAGNITUDES, Arithmetic
from references.chunk_inside import Call, gather, inside
from references.chunk_pass import State, forced, inverse_permutation, leaking, passed_on, read
from references.gradients import scaled_gradient
from references.packing import Packing, Plan, pack, rows
from references.semantics import CONTRACT, Semantics
from references.sites import AtSites, Sites

Tensor = torch.Tensor


def gdn_chunk(
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
    w_format: str | None = None,
    w_dtype: torch.dtype | None = None,
    chunk_size: int = 64,
    arithmetic: Arithmetic = EXACT,
    semantics: Semantics = CONTRACT,
    stages: dict[str, Tensor] | None = None,
    offsets: AtSites | None = None,
    entry_states: Tensor | None = None,
    given: Mapping[str, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Computes the chunk form exactly, or as `arithmetic` and `semantics` say.

    Args:
        q, k: `[B, T, H, K]`, any float dtype; computed in fp64.
        v: `[B, T, HV, V]`, `HV % H == 0`; value head j uses q/k head `j // (HV // H)`.
        g: `[B, T, HV]`, natural log of the decay, at most 0.
        beta: `[B, T, HV]`, write strength.
        initial_state: `[N, HV, K, V]` (`[N, HV, V, K]` when `state_v_first`); None means zero.
        scale: multiplies q; default `K ** -0.5`.
        cu_seqlens: `[N + 1]` boundaries of packed sequences, with B = 1.
        state_v_first: layout of the given and the returned state.
        state_format, w_format: formats of the sites; None leaves a site off.
        state_block_v: width of a state tile.
        w_dtype: the dtype in which W is materialised; default k's.
        chunk_size: C, any positive number.
        arithmetic: exact, or a declared precision.
        semantics: the contract, or a named departure.
        stages: receives intermediate tensors, attached to the graph: per token `[B, T, HV, ...]` `g_cumsum`,
            `w`, `w_rounded`, `u`, `v_new`; per chunk `[B, chunks, HV, K, V]` (B = 1 and all sequences' chunks
            in order when packed) `state_in` (what the chunk reads), `state_out` (before its rounding),
            `state_out_rounded`; `initial_rounded` `[N, HV, K, V]`; always key first.
        offsets: records the rounding offsets of this run, replays frozen ones, or tips codes over.
        entry_states: `[B, chunks, HV, K, V]`, the rounded state at the start of every chunk. Each chunk is
            then computed from its own, and the state does not pass from chunk to chunk.
        given: values that replace `u`, `w`, `w_rounded` or `v_new` where they are computed, in the layout of
            `stages`; what follows is computed from them, and gradients pass as if they had been computed.

    Returns:
        o: `[B, T, HV, V]` and the final state, shaped as the initial one, both fp64.

    Raises:
        ValueError: for shapes that do not fit one another.
    """
    _check(q, k, v, g, beta, initial_state, cu_seqlens, state_v_first, chunk_size)
    batch, length, value_heads, value_dim = v.shape
    key_dim = k.shape[-1]
    together = semantics.boundaries != "reset"
    packing = pack(batch, length, cu_seqlens, chunk_size, q.device, together=together)
    shape = (len(packing.starts) - 1, value_heads, key_dim, value_dim)
    initial = _initial(initial_state, shape, state_v_first, q.device, semantics)
    sites = Sites(state_format, state_block_v, w_format, w_dtype or k.dtype, semantics, offsets)
    call = Call(
        arithmetic=arithmetic,
        semantics=semantics,
        sites=sites,
        scale=key_dim**-0.5 if scale is None else scale,
        chunk_size=chunk_size,
        packing=packing,
        given=_known_stages(given or {}),
    )
    inputs = [x.to(torch.float64) for x in (q, k, v, g, beta)]
    entries = None if entry_states is None else entry_states.to(torch.float64).flatten(0, 1)
    results = [_run(call, name, plan, inputs, initial, entries) for name, plan in enumerate(packing.plans)]
    outcome = {key: [result[key] for result in results] for key in results[0]}
    o = _by_token(packing, outcome.pop("o")).view(v.shape)
    final = torch.cat(outcome.pop("final_state")).index_select(0, packing.sequences)
    if stages is not None:
        stages.update(_stages(packing, outcome, (batch, length)))
    final = final if semantics.dht else scaled_gradient(final, 0.0)
    return o, final.mT if state_v_first != semantics.final_transposed else final


REPLACEABLE = ("u", "w", "w_rounded", "v_new")
"""The stages that `gdn_chunk` can be given."""


def dg_magnitude(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    *,
    do: Tensor | None = None,
    dht: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """The sum of the magnitudes that cancel in each element of dg, `[B, T, HV]`, fp64.

    dg is a cumulative sum, from the end of each chunk, of differences between what a token's decay does to
    later and to earlier tokens. Under strong gates it is a small difference of large terms, and its rounding
    error is in proportion to those terms, not to dg.

    Args:
        do, dht: incoming gradients of `o` and of the final state; None means that none arrives.
        options: the options of `gdn_chunk`.
    """
    leaf = g.detach().to(torch.float64).requires_grad_()
    with torch.enable_grad():
        initial = None if initial_state is None else initial_state.detach()
        options.setdefault("w_dtype", k.dtype)
        outputs = gdn_chunk(
            q.detach(), k.detach(), v.detach(), leaf, beta.detach(), initial, arithmetic=MAGNITUDES, **options
        )
        pairs = [
            (y, dy.to(torch.float64)) for y, dy in zip(outputs, (do, dht), strict=True) if dy is not None
        ]
        grads = torch.autograd.grad([y for y, _ in pairs], leaf, [dy for _, dy in pairs], allow_unused=True)
    return torch.zeros_like(leaf) if grads[0] is None else grads[0].detach()


def _known_stages(given: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    unknown = set(given) - set(REPLACEABLE)
    if unknown:
        names = ", ".join(REPLACEABLE)
        raise ValueError(f"given stages must be among {names}, got {sorted(unknown)}; drop the others")
    return given


def _run(
    call: Call, name: int, plan: Plan, inputs: list[Tensor], initial: Tensor, entries: Tensor | None
) -> dict[str, Tensor]:
    """All that a plan gives: per token `[slots, HV, ...]`, per chunk `[M, ...]`, per sequence `[n, ...]`."""
    chunks = gather(call, plan, inputs)
    inner = inside(call, name, plan, chunks)
    own = initial.index_select(0, plan.sequences)
    start = State(own, call.sites.state(own, 0, (name, "entry")) if call.semantics.initial_rounded else own)
    if entries is not None:
        given = entries.index_select(0, _chunks_of(call.packing, name))
        passed = forced(call, name, plan, inner, start, given)
    elif call.semantics.boundaries == "reset":
        passed = passed_on(call, name, plan, inner, start)
    else:
        passed = leaking(call, name, plan, inner, start)
    by_token = {
        "o": read(call, chunks, inner, passed),
        "g_cumsum": inner.g_cumsum,
        "w": inner.w,
        "w_rounded": inner.w_rounded,
        "u": inner.u,
        "v_new": passed.v_new,
    }
    return {key: x.transpose(1, 2).flatten(0, 1) for key, x in by_token.items()} | {
        "final_state": _with_empty(call.semantics.empty, plan, start, passed.final),
        "initial_rounded": start.rounded,
        "state_in": passed.entry.rounded,
        "state_out": passed.out.raw,
        "state_out_rounded": passed.out.rounded,
    }


def _chunks_of(packing: Packing, name: int) -> Tensor:
    """The place, in sequence order, of each chunk of a plan."""
    before = sum(len(plan.sequence_of) for plan in packing.plans[:name])
    return inverse_permutation(packing.chunks)[before : before + len(packing.plans[name].sequence_of)]


def _with_empty(what: str, plan: Plan, start: State, final: Tensor) -> Tensor:
    """The final states, those of empty sequences (the last of a plan) replaced where semantics say so."""
    if what == "initial":
        return final
    running = plan.counts[0] if plan.counts else 0
    empty = start.raw[running:] if what == "unrounded" else torch.zeros_like(start.raw[running:])
    return torch.cat([final[:running], empty])


def _by_token(packing: Packing, pieces: list[Tensor]) -> Tensor:
    """`[B * T, HV, ...]` from the slots of all plans."""
    return rows(torch.cat(pieces), packing.slots, packing.tokens)


def _stages(packing: Packing, pieces: dict[str, list[Tensor]], shape: tuple[int, int]) -> dict[str, Tensor]:
    """The intermediate tensors in the layouts that `gdn_chunk` documents."""
    stages = {}
    for name, parts in pieces.items():
        if name == "initial_rounded":
            stages[name] = torch.cat(parts).index_select(0, packing.sequences)
        elif name.startswith("state"):
            chunks = torch.cat(parts).index_select(0, packing.chunks)
            stages[name] = chunks.view(shape[0], len(chunks) // shape[0], *chunks.shape[1:])
        else:
            flat = _by_token(packing, parts)
            stages[name] = flat.view(*shape, *flat.shape[1:])
    return stages


def _initial(
    state: Tensor | None,
    shape: tuple[int, ...],
    state_v_first: bool,
    device: torch.device,
    semantics: Semantics,
) -> Tensor:
    """The initial state, key first, fp64."""
    if state is None:
        return torch.zeros(shape, dtype=torch.float64, device=device)
    state = state.to(torch.float64)
    state = state.mT if state_v_first != semantics.initial_transposed else state
    state = state[:1].expand(shape) if semantics.initial == "first" else state
    return state if semantics.dh0 else scaled_gradient(state, 0.0)


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    state_v_first: bool,
    chunk_size: int,
) -> None:
    batch, length, heads, key_dim = k.shape
    value_heads, value_dim = v.shape[2:]
    number = batch if cu_seqlens is None else len(cu_seqlens) - 1
    tail = (value_dim, key_dim) if state_v_first else (key_dim, value_dim)
    wanted: dict[str, tuple[Tensor | None, tuple[int, ...]]] = {
        "q": (q, (batch, length, heads, key_dim)),
        "v": (v, (batch, length, value_heads, value_dim)),
        "g": (g, (batch, length, value_heads)),
        "beta": (beta, (batch, length, value_heads)),
        "initial_state": (initial_state, (number, value_heads, *tail)),
    }
    for name, (tensor, shape) in wanted.items():
        if tensor is not None and tuple(tensor.shape) != shape:
            raise ValueError(f"{name} must have shape {shape}, got {tuple(tensor.shape)}; match k and v")
    if value_heads % heads:
        raise ValueError(f"HV must be a multiple of H, got HV={value_heads}, H={heads}; repeat or drop heads")
    if chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1, got {chunk_size}; the contract's is 64")
    if cu_seqlens is not None and batch != 1:
        raise ValueError(f"cu_seqlens needs B = 1, got B = {batch}; flatten the batch")
