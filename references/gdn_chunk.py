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

from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch

from references.arithmetic import EXACT, MAGNITUDES, Arithmetic
from references.packing import Packing, Plan, pack, rows
from references.qdq import straight_through
from references.semantics import CONTRACT, Semantics
from references.sites import Offsets, Sites

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
    offsets: Offsets | None = None,
    entry_states: Tensor | None = None,
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
        offsets: records the rounding offsets of this run, or replays frozen ones.
        entry_states: `[B, chunks, HV, K, V]`, the rounded state at the start of every chunk. Each chunk is
            then computed from its own, and the state does not pass from chunk to chunk.

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
    number = len(packing.starts) - 1
    initial = _initial(initial_state, (number, value_heads, key_dim, value_dim), state_v_first, q, semantics)
    sites = Sites(state_format, state_block_v, w_format, w_dtype or k.dtype, semantics, offsets)
    call = _Call(
        arithmetic=arithmetic,
        semantics=semantics,
        sites=sites,
        scale=key_dim**-0.5 if scale is None else scale,
        chunk_size=chunk_size,
        packing=packing,
        shape=(batch, length),
    )
    inputs = [x.to(torch.float64) for x in (q, k, v, g, beta)]
    entries = None if entry_states is None else entry_states.to(torch.float64).flatten(0, 1)
    results = [_run(call, name, plan, inputs, initial, entries) for name, plan in enumerate(packing.plans)]
    outcome = {key: [result[key] for result in results] for key in results[0]}
    if stages is not None:
        stages.update({key: call.assemble(key, pieces) for key, pieces in outcome.items()})
    o = call.assemble("o", outcome["o"])
    final = call.assemble("final_state", outcome["final_state"])
    final = final if semantics.dht else _scaled_gradient(final, 0.0)
    return o, final.mT if state_v_first != semantics.final_transposed else final


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


@dataclass(frozen=True)
class _Call:
    """What stays the same for all plans of a call."""

    arithmetic: Arithmetic
    semantics: Semantics
    sites: Sites
    scale: float
    chunk_size: int
    packing: Packing
    shape: tuple[int, int]

    def assemble(self, name: str, pieces: list[Tensor]) -> Tensor:
        """A tensor in the layout of its kind, from the pieces of all plans."""
        joined = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        if name in ("final_state", "initial_rounded"):
            return joined.index_select(0, self.packing.sequences)
        if name.startswith("state"):
            chunks = joined.index_select(0, self.packing.chunks)
            batch = self.shape[0]
            return chunks.unflatten(0, (batch, len(chunks) // batch) if batch else (0, 0))
        return rows(joined, self.packing.slots, self.packing.tokens).unflatten(0, self.shape)


class _Chunks(NamedTuple):
    """The inputs of all chunks of a plan: `[M, HV, C, ...]`; `G` is the cumulative log decay."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor


class _Intra(NamedTuple):
    """What a chunk needs to pass the state on, for all chunks at once."""

    u: Tensor
    w: Tensor
    w_rounded: Tensor
    w_backward: Tensor | None
    keys: Tensor
    carry: Tensor
    attention: Tensor
    read: Tensor


class _State(NamedTuple):
    """A state before and after its rounding."""

    raw: Tensor
    rounded: Tensor

    def pick(self, which: str) -> Tensor:
        return self.raw if which == "unrounded" else self.rounded


def _run(
    call: _Call, name: int, plan: Plan, inputs: list[Tensor], initial: Tensor, entries: Tensor | None
) -> dict[str, Tensor]:
    chunks = _gather(call, plan, inputs)
    cumulative, intra = _intra(call, name, plan, chunks)
    own = initial.index_select(0, plan.sequences)
    start = _State(own, call.sites.state(own, 0, (name, "entry")) if call.semantics.initial_rounded else own)
    if entries is not None:
        chunk_ids = _inverse_permutation(call.packing.chunks)
        offset = sum(len(p.sequence_of) for p in call.packing.plans[:name])
        given = entries.index_select(0, chunk_ids[offset : offset + len(plan.sequence_of)])
        passed = _pass_forced(call, name, plan, intra, start, given)
    elif call.semantics.boundaries == "reset":
        passed = _pass(call, name, plan, intra, start)
    else:
        passed = _pass_leaking(call, name, plan, intra, start)
    o = _read(call, chunks, intra, passed)
    by_token = {
        "o": o,
        "g_cumsum": cumulative,
        "w": intra.w,
        "w_rounded": intra.w_rounded,
        "u": intra.u,
        "v_new": passed.v_new,
    }
    return {key: x.transpose(1, 2).flatten(0, 1) for key, x in by_token.items()} | {
        "final_state": passed.final,
        "initial_rounded": start.rounded,
        "state_in": passed.entry,
        "state_out": passed.out.raw,
        "state_out_rounded": passed.out.rounded,
    }


def _gather(call: _Call, plan: Plan, inputs: list[Tensor]) -> _Chunks:
    """The inputs chunk by chunk, `[M, HV, C, ...]`, zeros in empty slots, q and k repeated to the value heads."""
    arithmetic, semantics = call.arithmetic, call.semantics
    q, k, v, g, beta = inputs
    if semantics.gate_dtype == "bf16":
        g = straight_through(g, g.detach().to(torch.bfloat16).to(g.dtype))
    if not semantics.dq_scale:
        q = _scaled_gradient(q, 1.0 / call.scale)
    value_heads = v.shape[2]
    q, k = (_to_value_heads(arithmetic.store(x), value_heads, semantics.heads) for x in (q, k))
    stored = [
        arithmetic.store(q),
        arithmetic.store(k),
        arithmetic.store(v),
        arithmetic.gates(g),
        arithmetic.gates(beta),
    ]
    gathered = []
    for x in stored:
        flat = rows(x.flatten(0, 1), plan.tokens, plan.slots)
        gathered.append(flat.unflatten(0, (-1, plan.width) if len(flat) else (0, plan.width)).transpose(1, 2))
    return _Chunks(*gathered)


def _to_value_heads(x: Tensor, value_heads: int, mapping: str) -> Tensor:
    heads = x.shape[2]
    if mapping == "grouped":
        return x.repeat_interleave(value_heads // heads, 2) if value_heads != heads else x
    index = torch.arange(value_heads, device=x.device) % heads
    return x.index_select(2, index if mapping == "modulo" else torch.zeros_like(index))


def _intra(call: _Call, name: int, plan: Plan, chunks: _Chunks) -> tuple[Tensor, _Intra]:
    arithmetic, semantics = call.arithmetic, call.semantics
    q, k, v, g, beta = chunks
    cumulative = _cumulative_gate(call, plan, g)
    width = plan.width
    index = torch.arange(width, device=k.device)
    lower = index[:, None] >= index
    gamma = arithmetic.decay(cumulative.unsqueeze(-1), cumulative.unsqueeze(-2), lower)
    from_start = arithmetic.decay(cumulative)
    last = _last_gate(call, plan, cumulative)
    to_end = arithmetic.decay(last.unsqueeze(-1), cumulative)
    carry = arithmetic.decay(last)

    kk = arithmetic.matmul(k, k.mT)
    system = (kk * gamma * beta.unsqueeze(-1)).tril(-1)
    inverse = _inverse(call, system)
    key_beta = beta if semantics.dbeta_of_w else beta.detach()
    key_factor = key_beta * from_start if semantics.beta_decay else key_beta
    w_right = key_factor.unsqueeze(-1) * k
    if semantics.w_rounded == "right_side":
        w_right = call.sites.w(w_right, (name, "right"))
    u, w = _solve(call, name, inverse, system, v * beta.unsqueeze(-1), w_right)
    w_rounded = w if semantics.w_rounded == "right_side" else call.sites.w(w, name)

    update_keys = k if semantics.dk_update else k.detach()
    visible = gamma if semantics.causal == "inclusive" else gamma.tril(-1)
    attention = arithmetic.matmul(q, k.mT) * visible * call.scale
    read = from_start * call.scale if semantics.read_decay else torch.full_like(from_start, call.scale)
    intra = _Intra(
        u=u,
        w=w,
        w_rounded=w_rounded,
        w_backward=_backward_w(call, name, inverse, w, w_right),
        keys=update_keys * to_end.unsqueeze(-1),
        carry=carry if semantics.update_decay else torch.ones_like(carry),
        attention=attention,
        read=read,
    )
    return cumulative, intra


def _cumulative_gate(call: _Call, plan: Plan, g: Tensor) -> Tensor:
    semantics = call.semantics
    if semantics.dg_tail == "dropped":
        partial = (plan.lengths < call.chunk_size)[:, None, None]
        is_last = torch.arange(plan.width, device=g.device) == (plan.lengths - 1)[:, None, None]
        g = _scaled_gradient(g, (~(partial & is_last)).to(g.dtype))
    cumulative = call.arithmetic.cumsum(g)
    if semantics.gate == "exclusive":
        return cumulative - g
    return cumulative * _LN_2 if semantics.gate == "base_two" else cumulative


_LN_2 = 0.6931471805599453


def _last_gate(call: _Call, plan: Plan, cumulative: Tensor) -> Tensor:
    """The cumulative gate that closes each chunk, `[M, HV]`: empty slots have no gate, so it is the last slot's."""
    semantics = call.semantics
    last = cumulative[..., -1]
    if semantics.last_gate != 1 or semantics.gate == "exclusive":
        row = (plan.lengths - semantics.last_gate).clamp_min(0)[:, None, None]
        last = cumulative.gather(-1, row.expand(*cumulative.shape[:-1], 1)).squeeze(-1)
    if not semantics.dg_last:
        return last.detach()
    if semantics.dg_tail == "no_last":
        full = (plan.lengths == call.chunk_size)[:, None]
        return _scaled_gradient(last, full.to(last.dtype))
    return last


def _inverse(call: _Call, system: Tensor) -> Tensor:
    if call.semantics.solve == "exact":
        return call.arithmetic.inverse(system)
    series = torch.eye(system.shape[-1], dtype=system.dtype, device=system.device) - system
    return series if call.semantics.solve == "one_term" else series + system @ system


def _solve(
    call: _Call, name: int, inverse: Tensor, system: Tensor, u_right: Tensor, w_right: Tensor
) -> tuple[Tensor, Tensor]:
    arithmetic = call.arithmetic
    if call.semantics.solve_adjoint == "unrounded":
        both = arithmetic.store(arithmetic.matmul(inverse, torch.cat([u_right, w_right], -1)))
        u, w = both.split([u_right.shape[-1], w_right.shape[-1]], -1)
        return u, w
    with torch.no_grad():  # the right side whose exact solution is the rounded W
        rounded = call.sites.w(arithmetic.store(arithmetic.matmul(inverse, w_right)), (name, "adjoint"))
        right = rounded + system @ rounded
    u = arithmetic.store(arithmetic.matmul(inverse, u_right))
    return u, arithmetic.store(arithmetic.matmul(inverse, w_right, right=right))


def _backward_w(call: _Call, name: int, inverse: Tensor, w: Tensor, w_right: Tensor) -> Tensor | None:
    if call.semantics.backward_w == "rounded":
        return None
    if call.semantics.backward_w == "unrounded":
        return w.detach()
    with torch.no_grad():
        inverse, w_right = (x.to(torch.bfloat16).to(x.dtype) for x in (inverse, w_right))
        return call.sites.w(inverse @ w_right, (name, "recomputed"))


class _Passed(NamedTuple):
    """What the state pass leaves: per chunk `v_new`, the incoming and the outgoing states; the final states."""

    v_new: Tensor
    entry: _State
    out: _State
    final: Tensor


def _step(call: _Call, entry: _State, intra: _Intra) -> tuple[Tensor, Tensor]:
    """V' and the outgoing state, not yet rounded, of some chunks whose incoming states are given."""
    arithmetic, semantics = call.arithmetic, call.semantics
    at_raw = semantics.backward_state == "unrounded"
    incoming = _copied(entry.pick(semantics.v_reads), semantics.state_copy)
    right = entry.raw.detach() if at_raw else None
    v_new = arithmetic.store(intra.u - arithmetic.matmul(intra.w_rounded, incoming, intra.w_backward, right))
    carried = entry.pick(semantics.update_reads)
    kept = _times(intra.carry[..., None, None], carried, entry.raw if at_raw else None)
    return v_new, arithmetic.accumulator(kept + arithmetic.matmul(intra.keys.mT, v_new))


def _pass(call: _Call, name: int, plan: Plan, intra: _Intra, start: _State) -> _Passed:
    """Passes the state from chunk to chunk; sequences that have ended leave the running prefix."""
    state, entries, outs, values, finals = start, [], [], [], []
    for step, part in enumerate(_split(intra, plan.counts)):
        running = part.u.shape[0]
        finals.append(_final(call, state, running))
        state = _State(state.raw[:running], state.rounded[:running])
        entries.append(state)
        v_new, raw = _step(call, state, part)
        state = _State(raw, call.sites.state(raw, step + 1, (name, step)))
        outs.append(state)
        values.append(v_new)
    finals.append(_final(call, state, 0))
    return _Passed(
        _cat(values, intra.u), _joined(entries, start), _joined(outs, start), torch.cat(finals[::-1])
    )


def _pass_forced(call: _Call, name: int, plan: Plan, intra: _Intra, start: _State, given: Tensor) -> _Passed:
    """Computes every chunk from the incoming state that is given for it, all at once."""
    entry = _State(given, given)
    v_new, raw = _step(call, entry, intra)
    out = _State(raw, call.sites.state(raw, 1, (name, "forced")))
    last = torch.full((len(plan.sequences),), len(raw), dtype=torch.int64, device=raw.device)
    position = _inverse_permutation(plan.sequences, call.packing.sequences.shape[0])[plan.sequence_of]
    last[position] = torch.arange(len(raw), device=raw.device)  # chunks of later steps come later
    final = torch.cat([out.rounded, start.rounded])
    last = torch.where(last == len(raw), len(raw) + torch.arange(len(last), device=raw.device), last)
    return _Passed(v_new, entry, out, final.index_select(0, last))


def _pass_leaking(call: _Call, name: int, plan: Plan, intra: _Intra, start: _State) -> _Passed:
    """Runs the sequences one after the other and lets the state, or only its gradient, cross their boundaries."""
    order = call.packing.chunks.tolist()
    parts = _split(intra, (1,) * len(order))
    own = {sequence: row for row, sequence in enumerate(plan.sequences.tolist())}
    finals = {
        sequence: _State(start.raw[row : row + 1], start.rounded[row : row + 1])
        for sequence, row in own.items()
    }
    sequence_of, step_of = plan.sequence_of.tolist(), plan.step_of.tolist()
    entries, outs, values = ([start] * len(order) for _ in range(3))
    before: _State | None = None
    for chunk in order:
        sequence, step = sequence_of[chunk], step_of[chunk]
        state = finals[sequence]
        if step == 0 and before is not None:
            state = _leak(state, before, call.semantics.boundaries)
        entries[chunk] = state
        v_new, raw = _step(call, state, parts[chunk])
        before = _State(raw, call.sites.state(raw, step + 1, (name, sequence, step)))
        outs[chunk], values[chunk] = before, _State(v_new, v_new)
        finals[sequence] = before
    return _Passed(
        _cat([x.raw for x in values], intra.u),
        _joined(entries, start),
        _joined(outs, start),
        torch.cat([finals[sequence].rounded for sequence in own]),
    )


def _leak(own: _State, before: _State, what: str) -> _State:
    if what == "state_leaks":
        return before
    return _State(*(x + (y - y.detach()) for x, y in zip(own, before, strict=True)))


def _read(call: _Call, chunks: _Chunks, intra: _Intra, passed: _Passed) -> Tensor:
    arithmetic, semantics = call.arithmetic, call.semantics
    at_raw = semantics.backward_state == "unrounded"
    incoming = _copied(passed.entry.pick(semantics.o_reads), semantics.state_copy)
    right = passed.entry.raw.detach() if at_raw else None
    from_state = arithmetic.matmul(chunks.q, incoming, right=right)
    unrounded = chunks.q @ passed.entry.raw if at_raw else None
    values = passed.v_new if semantics.dv_read else passed.v_new.detach()
    read = _times(intra.read.unsqueeze(-1), from_state, unrounded)
    return arithmetic.store(read + arithmetic.matmul(intra.attention, values))


def _times(factor: Tensor, x: Tensor, at: Tensor | None) -> Tensor:
    """`factor * x`; the gradient of the factor is taken at `at` where that is given."""
    if at is None:
        return factor * x
    return factor.detach() * x + (factor - factor.detach()) * at.detach()


def _copied(state: Tensor, dtype: str | None) -> Tensor:
    if dtype is None:
        return state
    return straight_through(state, state.detach().to(torch.float16).to(state.dtype))


def _final(call: _Call, state: _State, running: int) -> Tensor:
    return (state.rounded if call.semantics.final_rounded else state.raw)[running:]


def _split(intra: _Intra, counts: tuple[int, ...]) -> list[_Intra]:
    """The chunks of each step; one split of the whole, so that its gradient is one concatenation."""
    needed = {"u", "w_rounded", "w_backward", "keys", "carry"}
    columns = [
        x.split(counts) if key in needed and x is not None else (None,) * len(counts)
        for key, x in intra._asdict().items()
    ]
    return [_Intra(*column) for column in zip(*columns, strict=True)]


def _cat(pieces: list[Tensor], like: Tensor) -> Tensor:
    return torch.cat(pieces) if pieces else torch.zeros_like(like)


def _joined(states: list[_State], start: _State) -> _State:
    """States of all steps, one after the other; `raw` and `rounded` stay one tensor where they are one."""
    if not states:
        return _State(start.raw[:0], start.rounded[:0])
    rounded = torch.cat([x.rounded for x in states])
    if all(x.raw is x.rounded for x in states):
        return _State(rounded, rounded)
    return _State(torch.cat([x.raw for x in states]), rounded)


class _ScaledGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: Any) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] * ctx.factor, None


def _scaled_gradient(x: Tensor, factor: Tensor | float) -> Tensor:
    """`x` unchanged; its gradient times `factor`."""
    return cast(Tensor, _ScaledGradient.apply(x, factor))  # type: ignore[no-untyped-call]


def _inverse_permutation(index: Tensor, size: int | None = None) -> Tensor:
    inverse = torch.empty(size or len(index), dtype=torch.int64, device=index.device)
    inverse[index] = torch.arange(len(index), device=index.device)
    return inverse


def _initial(
    state: Tensor | None, shape: tuple[int, ...], state_v_first: bool, like: Tensor, semantics: Semantics
) -> Tensor:
    """The initial state, key first, fp64."""
    if state is None:
        return torch.zeros(shape, dtype=torch.float64, device=like.device)
    state = state.to(torch.float64)
    state = state.mT if state_v_first != semantics.initial_transposed else state
    return state if semantics.dh0 else state.detach()


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
