"""`stages`: the intermediate tensors of one forward, for a judge that holds each against its own inputs."""

from __future__ import annotations

from typing import Any

import torch

from kernels.gdn import core
from kernels.gdn.chunks import Chunks
from kernels.gdn.op import operator_arguments
from kernels.gdn.validate import check_boundaries
from kernels.options import CHUNK_SIZE
from kernels.qdq.host import device_of

Tensor = torch.Tensor


def stages(*tensors: Any, **options: Any) -> dict[str, Tensor]:
    """The intermediate tensors of `chunk_gated_delta_rule` with the same arguments, made by its own kernels.

    Args:
        tensors, options: the arguments of `chunk_gated_delta_rule`.

    Returns:
        `o`; per token `[B, T, HV, ...]`: `g_cumsum` fp32, `w` and `w_q` in the carrier (before and after its
        site), `u` and `v_new`; `state_raw` and `state_q` `[N, HV, chunks + 1, K, V]` fp32, before and after
        the state site: entry 0 on entry of the first chunk, entry c + 1 after chunk c; a sequence with fewer
        chunks than the longest repeats its final state.

    Raises:
        TypeError, ValueError, NotImplementedError: as the op does.
    """
    with torch.no_grad():
        q, k, v, g, beta, initial, cu_seqlens, scale, _, *rest = operator_arguments(*tensors, **options)
        if cu_seqlens is not None:
            check_boundaries(cu_seqlens, q.shape[1])
        settings = core.Settings(scale, *rest)
        call = core.Call.of(q, v, cu_seqlens, settings)
        with device_of(q):
            plain = core.prepare(call, k, v, g, beta, None)
            prepared = core.prepare(call, k, v, g, beta, settings.w_format)
            passed = core.state_pass(call, k, prepared, initial, write_final=True, write_raw=True)
            o = core.output(call, q, k, prepared.gates, passed)
        k_shape = (*v.shape[:3], call.K)
        entry, last = initial_and_final(call, initial, passed)
        return {
            "o": o,
            "g_cumsum": by_token(call.chunks, prepared.gates[:, :, :1], g.shape),
            "w": by_token(call.chunks, plain.w.mT, k_shape),
            "w_q": by_token(call.chunks, prepared.w.mT, k_shape),
            "u": by_token(call.chunks, prepared.u, v.shape),
            "v_new": by_token(call.chunks, passed.v_new, v.shape),
            "state_raw": raw_states(call.chunks, entry, passed),
            "state_q": rounded_states(call.chunks, last, passed),
        }


def initial_and_final(
    call: core.Call, initial: Tensor | None, passed: core.StatePass
) -> tuple[Tensor, Tensor]:
    """The state as given (zero when it was not) and the final state, `[N, HV, K, V]`."""
    assert passed.final_state is not None
    given = torch.zeros_like(passed.final_state) if initial is None else initial
    both = (given, passed.final_state)
    return (both[0].mT, both[1].mT) if call.settings.state_v_first else both


def by_token(chunks: Chunks, values: Tensor, shape: tuple[int, ...]) -> Tensor:
    """`[B, T, HV, ...]` from `[chunks, HV, ..., 64]`."""
    packed = chunks.cu_seqlens
    lengths = [shape[1]] * shape[0] if packed is None else packed.diff().tolist()
    rows = [
        values[first : first + count].permute(0, 3, 1, 2).flatten(0, 1)[:length]
        for (first, count), length in zip(spans(chunks), lengths, strict=True)
    ]
    return torch.cat(rows).reshape(shape)


def spans(chunks: Chunks) -> list[tuple[int, int]]:
    """First chunk and number of chunks of every sequence."""
    if chunks.cu_seqlens is None or chunks.offsets is None:
        return [(n * chunks.per_sequence, chunks.per_sequence) for n in range(chunks.sequences)]
    counts = (chunks.cu_seqlens.diff() + (CHUNK_SIZE - 1)) // CHUNK_SIZE
    return list(zip(chunks.offsets.tolist(), counts.tolist(), strict=True))


def raw_states(chunks: Chunks, entry: Tensor, passed: core.StatePass) -> Tensor:
    """`[N, HV, chunks + 1, K, V]`: what the state site sees."""
    assert passed.raw_states is not None
    rows = [
        torch.cat((entry[n : n + 1], passed.raw_states[first : first + count].mT))
        for n, (first, count) in enumerate(spans(chunks))
    ]
    return padded(rows)


def rounded_states(chunks: Chunks, last: Tensor, passed: core.StatePass) -> Tensor:
    """`[N, HV, chunks + 1, K, V]`: what the state site gives."""
    rows = [
        torch.cat((passed.states[first : first + count].mT, last[n : n + 1]))
        for n, (first, count) in enumerate(spans(chunks))
    ]
    return padded(rows)


def padded(rows: list[Tensor]) -> Tensor:
    """Sequences of `[chunks + 1, HV, K, V]` side by side; a shorter one repeats its last state."""
    longest = max(len(row) for row in rows)
    filled = [torch.cat((row, row[-1:].expand(longest - len(row), *row.shape[1:]))) for row in rows]
    return torch.stack(filled).transpose(1, 2).contiguous()
