"""The state from chunk to chunk, and its readout."""

from __future__ import annotations

from typing import NamedTuple

import torch

from references.chunk_inside import Call, Chunks, Inside
from references.gradients import straight_through
from references.packing import Plan

Tensor = torch.Tensor


class State(NamedTuple):
    """A state before and after its rounding, one tensor twice where nothing rounds."""

    raw: Tensor
    rounded: Tensor

    def pick(self, which: str) -> Tensor:
        """The `rounded` or the `unrounded` value; the gradient goes through the rounding either way."""
        if which == "rounded" or self.raw is self.rounded:
            return self.rounded
        return straight_through(self.rounded, self.raw.detach())

    def first(self, count: int) -> State:
        """The states of the first `count` sequences."""
        rounded = self.rounded[:count]
        return State(rounded if self.raw is self.rounded else self.raw[:count], rounded)


class Passed(NamedTuple):
    """What the state pass leaves.

    Attributes:
        v_new: `[M, HV, C, V]`, V'.
        entry, out: `[M, HV, K, V]`, the incoming and the outgoing state of each chunk.
        final: `[n, HV, K, V]`, in the order of the plan.
    """

    v_new: Tensor
    entry: State
    out: State
    final: Tensor


def step(call: Call, entry: State, chunk: Inside) -> tuple[Tensor, Tensor]:
    """V' and the outgoing state, not yet rounded, of chunks whose incoming states are given."""
    arithmetic, semantics, term = call.arithmetic, call.semantics, call.term
    at = entry.raw.detach() if semantics.backward_state == "unrounded" else None
    incoming = term(_copied(entry.pick(semantics.v_reads), semantics.state_copy), "dstate.write")
    v_new = arithmetic.store(chunk.u - arithmetic.matmul(chunk.w_rounded, incoming, chunk.w_backward, at))
    if chunk.v_new is not None:
        v_new = straight_through(v_new, chunk.v_new)
    carried = term(entry.pick(semantics.update_reads), "dstate.carry")
    kept = arithmetic.scaled(chunk.carry[..., None, None], carried, at, copies=True)
    added = arithmetic.matmul(chunk.keys.mT, term(v_new, "dv_new.update"))
    return v_new, arithmetic.accumulator(kept + added)


def passed_on(call: Call, name: int, plan: Plan, inner: Inside, start: State) -> Passed:
    """Passes the state from chunk to chunk; sequences that have ended leave the running prefix."""
    state, entries, outs, values, finals = start, [], [], [], []
    for number, part in enumerate(_split(inner, plan.counts)):
        running = part.u.shape[0]
        if running < state.raw.shape[0]:
            finals.append(_final(call, state, running))
            state = state.first(running)
        entries.append(state)
        v_new, raw = step(call, state, part)
        state = State(raw, call.sites.state(raw, number + 1, (name, number)))
        outs.append(state)
        values.append(v_new)
    finals.append(_final(call, state, 0))
    return Passed(
        _cat(values, inner.u), _joined(entries, start), _joined(outs, start), torch.cat(finals[::-1])
    )


def forced(call: Call, name: int, plan: Plan, inner: Inside, start: State, given: Tensor) -> Passed:
    """Computes every chunk from the incoming state that is given for it, all at once."""
    entry = State(given, given)
    v_new, raw = step(call, entry, inner)
    out = State(raw, call.sites.state(raw, 1, (name, "forced")))
    last = torch.full((len(plan.sequences),), len(raw), dtype=torch.int64, device=raw.device)
    position = inverse_permutation(plan.sequences, call.packing.sequences.shape[0])[plan.sequence_of]
    last[position] = torch.arange(len(raw), device=raw.device)  # chunks of later steps come later
    final = torch.cat([out.rounded, start.rounded])
    last = torch.where(last == len(raw), len(raw) + torch.arange(len(last), device=raw.device), last)
    return Passed(v_new, entry, out, final.index_select(0, last))


def leaking(call: Call, name: int, plan: Plan, inner: Inside, start: State) -> Passed:
    """Runs sequences one after the other and lets the state, or its gradient, cross their boundaries."""
    order = call.packing.chunks.tolist()
    parts = _split(inner, (1,) * len(order))
    own = {sequence: row for row, sequence in enumerate(plan.sequences.tolist())}
    finals = {
        sequence: State(start.raw[row : row + 1], start.rounded[row : row + 1])
        for sequence, row in own.items()
    }
    sequence_of, step_of = plan.sequence_of.tolist(), plan.step_of.tolist()
    entries, outs, values = ([start] * len(order) for _ in range(3))
    before: State | None = None
    for chunk in order:
        sequence, number = sequence_of[chunk], step_of[chunk]
        state = finals[sequence]
        if number == 0 and before is not None:
            state = _leak(state, before, call.semantics.boundaries)
        entries[chunk] = state
        v_new, raw = step(call, state, parts[chunk])
        before = State(raw, call.sites.state(raw, number + 1, (name, sequence, number)))
        outs[chunk], values[chunk] = before, State(v_new, v_new)
        finals[sequence] = before
    return Passed(
        _cat([x.raw for x in values], inner.u),
        _joined(entries, start),
        _joined(outs, start),
        torch.cat([finals[sequence].rounded for sequence in own]),
    )


def _leak(own: State, before: State, what: str) -> State:
    if what == "state_leaks":
        return before
    return State(*(x + (y - y.detach()) for x, y in zip(own, before, strict=True)))


def read(call: Call, chunks: Chunks, inner: Inside, passed: Passed) -> Tensor:
    """O, `[M, HV, C, V]`, of all chunks at once."""
    arithmetic, semantics, term = call.arithmetic, call.semantics, call.term
    at = passed.entry.raw.detach() if semantics.backward_state == "unrounded" else None
    incoming = term(_copied(passed.entry.pick(semantics.o_reads), semantics.state_copy), "dstate.read")
    q = term(chunks.q, "dq.state")
    from_state = arithmetic.matmul(q, incoming, right=at)
    read_at = None if at is None else q @ at
    inner_part = arithmetic.matmul(inner.attention, term(passed.v_new, "dv_new.read"))
    return arithmetic.store(arithmetic.scaled(inner.read.unsqueeze(-1), from_state, read_at) + inner_part)


def _copied(state: Tensor, dtype: str | None) -> Tensor:
    if dtype is None:
        return state
    return straight_through(state, state.detach().to(torch.float16).to(state.dtype))


def _final(call: Call, state: State, running: int) -> Tensor:
    return (state.rounded if call.semantics.final_rounded else state.raw)[running:]


def _split(inner: Inside, counts: tuple[int, ...]) -> list[Inside]:
    """The chunks of each step; one split of the whole, so that its gradient is one concatenation."""
    needed = {"u", "w_rounded", "w_backward", "v_new", "keys", "carry"}
    columns = [
        torch.split(x, list(counts)) if key in needed and x is not None else (None,) * len(counts)
        for key, x in inner._asdict().items()
    ]
    return [Inside(*column) for column in zip(*columns, strict=True)]


def _cat(pieces: list[Tensor], like: Tensor) -> Tensor:
    return torch.cat(pieces) if pieces else torch.zeros_like(like)


def _joined(states: list[State], start: State) -> State:
    """States of all steps, one after the other; `raw` and `rounded` stay one tensor where they are one."""
    if not states:
        return State(start.raw[:0], start.rounded[:0])
    rounded = torch.cat([x.rounded for x in states])
    if all(x.raw is x.rounded for x in states):
        return State(rounded, rounded)
    return State(torch.cat([x.raw for x in states]), rounded)


def inverse_permutation(index: Tensor, size: int | None = None) -> Tensor:
    """Where each of `0 .. size - 1` sits in `index`."""
    inverse = torch.empty(size or len(index), dtype=torch.int64, device=index.device)
    inverse[index] = torch.arange(len(index), device=index.device)
    return inverse
