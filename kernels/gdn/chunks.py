"""How sequences are cut into chunks, as the kernels read it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.options import CHUNK_SIZE

Tensor = torch.Tensor


@dataclass(frozen=True)
class Chunks:
    """The sequences of a call and their chunks.

    Attributes:
        sequences: how many there are (N).
        count: how many entries the chunk table has; packed, an upper bound known without reading the device.
        tokens: B * T.
        length: T, the length of every sequence when they are not packed.
        per_sequence: chunks of every sequence when they are not packed.
        cu_seqlens: `[N + 1]` boundaries, or None.
        table: `[count, 2]` int32 (sequence, chunk inside it), or None. An entry past the last chunk of the
            last sequence names a chunk without rows.
        offsets: `[N]` int32, number of each sequence's first chunk, or None.
    """

    sequences: int
    count: int
    tokens: int
    length: int
    per_sequence: int
    cu_seqlens: Tensor | None = None
    table: Tensor | None = None
    offsets: Tensor | None = None

    @property
    def packed(self) -> bool:
        """Whether the boundaries are read from `cu_seqlens`."""
        return self.cu_seqlens is not None


def count_chunks(batch: int, length: int, cu_seqlens: Tensor | None) -> int:
    """Entries of the chunk table: every packed sequence has at most one partial chunk, so these suffice."""
    if cu_seqlens is None:
        return batch * -(-length // CHUNK_SIZE)
    return length // CHUNK_SIZE + cu_seqlens.shape[0] - 1


def cut_into_chunks(batch: int, length: int, cu_seqlens: Tensor | None) -> Chunks:
    """The chunks of B sequences of one length, or of packed sequences; never waits for the device.

    Args:
        batch, length: B and T.
        cu_seqlens: `[N + 1]` int, on the device of the inputs, or None.
    """
    per_sequence = -(-length // CHUNK_SIZE)
    if cu_seqlens is None:
        return Chunks(batch, count_chunks(batch, length, None), batch * length, length, per_sequence)
    boundaries = cu_seqlens.contiguous()
    n = boundaries.numel() - 1
    count = count_chunks(batch, length, cu_seqlens)
    per = (boundaries.diff() + (CHUNK_SIZE - 1)) // CHUNK_SIZE
    ends = per.cumsum(0)
    offsets = ends - per
    entries = torch.arange(count, device=boundaries.device, dtype=ends.dtype)
    sequence = torch.searchsorted(ends, entries, right=True).clamp_(max=n - 1)
    table = torch.stack((sequence, entries - offsets[sequence]), dim=1).to(torch.int32)
    return Chunks(n, count, length, length, per_sequence, boundaries, table, offsets.to(torch.int32))
