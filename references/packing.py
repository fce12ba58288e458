"""Where each token of each sequence sits when the op is computed chunk by chunk, all sequences side by side.

Chunks are laid out *step-major*: first chunk 0 of every sequence, then chunk 1, and so on, sequences sorted
by falling number of chunks. The sequences that are still running at a step are then a prefix of those of the
step before, so that sequences of any lengths need neither masks nor padding chunks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch

Tensor = torch.Tensor

SHORT = 8
"""Sequences up to this length are computed apart from longer ones when there are many of them."""

MANY = 64
"""How many short sequences make a group of their own worth while."""


@dataclass(frozen=True)
class Plan:
    """The layout of some sequences in step-major chunks.

    Attributes:
        sequences: `[n]` indices of the sequences, in the order in which they run.
        counts: how many sequences are running at each step; falling.
        tokens: `[chunks * C]` flat token index of each slot, `B * T` where a slot is empty.
        slots: `[B * T]` slot of each token, `chunks * C` for a token of another plan.
        width: C, the slots of a chunk.
        sequence_of: `[chunks]` sequence of each chunk.
        step_of: `[chunks]` chunk number inside its sequence.
        lengths: `[chunks]` tokens in each chunk.
    """

    sequences: Tensor
    counts: tuple[int, ...]
    tokens: Tensor
    slots: Tensor
    width: int
    sequence_of: Tensor
    step_of: Tensor
    lengths: Tensor


@dataclass(frozen=True)
class Packing:
    """All plans of a call, and the way back from chunk slots to tokens.

    Attributes:
        plans: one plan, or two when many short sequences are kept apart.
        slots: `[B * T]` index of each token in the slots of all plans, one after the other.
        tokens: the way back: flat token index of each slot of all plans.
        sequences: `[N]` index of each sequence in the sequences of all plans.
        chunks: `[total]` index, in the chunks of all plans, of the chunks in sequence order.
        starts: `[N + 1]` first token of each sequence, the total at the end.
    """

    plans: tuple[Plan, ...]
    slots: Tensor
    tokens: Tensor
    sequences: Tensor
    chunks: Tensor
    starts: Tensor


def pack(
    batch: int,
    length: int,
    cu_seqlens: Tensor | None,
    chunk_size: int,
    device: torch.device,
    *,
    together: bool = False,
) -> Packing:
    """Lays out `batch` sequences of `length` tokens, or the packed sequences of `cu_seqlens`, in chunks.

    `together` keeps all sequences in one plan, whatever their lengths.
    """
    if cu_seqlens is None:
        starts = torch.arange(batch + 1) * length
    else:
        starts = cu_seqlens.detach().to("cpu", torch.int64)
    lengths = starts.diff()
    total = batch * length
    plans = tuple(_plan(starts, members, chunk_size, total, device) for members in _groups(lengths, together))
    tokens = torch.cat([plan.tokens for plan in plans])
    sequences = torch.cat([plan.sequences for plan in plans])
    keys = torch.cat([plan.sequence_of * (total + 1) + plan.step_of for plan in plans])
    return Packing(
        plans, _inverse(tokens, total), tokens, _inverse(sequences, len(lengths)), keys.argsort(), starts
    )


def _groups(lengths: Tensor, together: bool) -> list[Tensor]:
    everyone = torch.arange(len(lengths))
    short = lengths <= SHORT
    if together or int(short.sum()) < MANY or bool(short.all()):
        return [everyone]
    return [everyone[short], everyone[~short]]


def _plan(starts: Tensor, members: Tensor, chunk_size: int, total: int, device: torch.device) -> Plan:
    lengths = starts[members + 1] - starts[members]
    width = max(1, min(chunk_size, int(lengths.max()) if len(lengths) else 1))
    numbers = (lengths + width - 1) // width
    order = numbers.argsort(descending=True, stable=True)
    members, lengths, numbers = members[order], lengths[order], numbers[order]
    steps = int(numbers[0]) if len(numbers) else 0
    counts = (numbers[None, :] > torch.arange(steps)[:, None]).sum(1)
    step_of = torch.repeat_interleave(torch.arange(steps), counts)
    rank = torch.arange(len(step_of)) - torch.repeat_interleave(counts.cumsum(0) - counts, counts)
    slot = step_of[:, None] * width + torch.arange(width)
    valid = slot < lengths[rank][:, None]
    tokens = torch.where(valid, starts[members[rank]][:, None] + slot, total).flatten()
    return Plan(
        sequences=members.to(device),
        counts=tuple(counts.tolist()),
        tokens=tokens.to(device),
        slots=_inverse(tokens, total).to(device),
        width=width,
        sequence_of=members[rank].to(device),
        step_of=step_of.to(device),
        lengths=valid.sum(1).to(device),
    )


def _inverse(index: Tensor, size: int) -> Tensor:
    """Where each of `0 .. size - 1` sits in `index`, `len(index)` if nowhere; larger entries are ignored."""
    inverse = torch.full((size + 1,), len(index), dtype=torch.int64, device=index.device)
    inverse[index] = torch.arange(len(index), device=index.device)
    return inverse[:size]


class _Rows(torch.autograd.Function):
    """Rows of `x` by index, where each row is used at most once: the gradient is a look-up, not a scatter."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return _take(x, index)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return _take(grads[0], inverse), None, None


def rows(x: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
    """`x[index]` for an index without repetitions; an index equal to `len(x)` gives a row of zeros.

    Args:
        x: `[n, ...]`.
        index: `[m]`, each value below n at most once.
        inverse: `[n]`, the place of each row of `x` in `index`, `m` where it is not used.
    """
    return cast(Tensor, _Rows.apply(x, index, inverse))  # type: ignore[no-untyped-call]


def _take(x: Tensor, index: Tensor) -> Tensor:
    """`x[index]`, zeros where the index is one past the end."""
    if x.shape[0] == 0:
        return x.new_zeros(len(index), *x.shape[1:])
    empty = index == x.shape[0]
    taken = x.index_select(0, index.clamp_max(x.shape[0] - 1))
    if bool(empty.any()):
        taken[empty] = 0.0
    return taken
