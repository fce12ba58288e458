"""The attention inside a chunk: the output, and the gradient that it sends to V'.

    O = scale exp(G) Q S + P V'        P = tril(scale Q K^T exp(G_i - G_j))        dV'_local = P^T dO

P^T is made as K Q^T, never as the transpose of an accumulator.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

from kernels.gdn.device import (
    CHUNK,
    decay_between,
    load_tile,
    load_vector,
    locate_chunk,
    matmul,
    operand,
    store_tile,
)

SCALARS = ["T", "chunks_per_sequence", "H", "HV"]


@triton.jit(do_not_specialize=SCALARS)
def output_kernel(
    q, k, v_new, gate_sums, states, o, chunk_table, cu_seqlens, scale, T, chunks_per_sequence, H, HV,
    K: tl.constexpr, V: tl.constexpr, BKT: tl.constexpr, BV: tl.constexpr,
    MMA: tl.constexpr, PRECISION: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Grid: (chunks * HV * V tiles,)."""
    program = tl.program_id(0).to(tl.int64)
    tiles: tl.constexpr = (V + BV - 1) // BV
    tile, chunk_head = (program % tiles).to(tl.int32), program // tiles
    chunk, head = chunk_head // HV, chunk_head % HV
    first, n_rows = locate_chunk(chunk, chunk_table, cu_seqlens, T, chunks_per_sequence, PACKED)
    if n_rows <= 0:
        return
    rows = tl.arange(0, CHUNK)
    channels = tile * BV + tl.arange(0, BV)
    token_head = first * HV + head
    key_head = (first * H + head // (HV // H)) * K
    q += key_head
    k += key_head
    states += chunk_head * (K * V)
    from_state = tl.zeros((CHUNK, BV), tl.float32)
    scores = tl.zeros((CHUNK, CHUNK), tl.float32)
    for start in range(0, K, BKT):
        columns = start + tl.arange(0, BKT)
        queries = operand(load_tile(q, H * K, rows, columns, n_rows, K), MMA)
        keys = operand(load_tile(k, H * K, rows, columns, n_rows, K), MMA)
        s = operand(load_tile(states, V, columns, channels, K, V), MMA)
        from_state += matmul(queries, s, PRECISION)
        scores += matmul(queries, tl.trans(keys), PRECISION)
    gate = load_vector(gate_sums + token_head, HV, rows, n_rows)
    causal = (rows[:, None] >= rows[None, :]) & (rows < n_rows)[:, None]
    scores *= decay_between(gate[:, None], gate[None, :], causal)
    values = operand(load_tile(v_new + token_head * V, HV * V, rows, channels, n_rows, V), MMA)
    result = from_state * tl.exp(gate)[:, None] + matmul(operand(scores, MMA), values, PRECISION)
    store_tile(o + token_head * V, scale * result, HV * V, rows, channels, n_rows, V)


@triton.jit(do_not_specialize=SCALARS)
def local_gradient_kernel(
    q, k, do, gate_sums, dv_new, chunk_table, cu_seqlens, scale, T, chunks_per_sequence, H, HV,
    K: tl.constexpr, V: tl.constexpr, BKT: tl.constexpr, BV: tl.constexpr,
    MMA: tl.constexpr, PRECISION: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Grid: (chunks * HV,)."""
    program = tl.program_id(0).to(tl.int64)
    chunk, head = program // HV, program % HV
    first, n_rows = locate_chunk(chunk, chunk_table, cu_seqlens, T, chunks_per_sequence, PACKED)
    if n_rows <= 0:
        return
    rows = tl.arange(0, CHUNK)
    token_head = first * HV + head
    key_head = (first * H + head // (HV // H)) * K
    scores = tl.zeros((CHUNK, CHUNK), tl.float32)
    for start in range(0, K, BKT):
        columns = start + tl.arange(0, BKT)
        queries = operand(load_tile(q + key_head, H * K, rows, columns, n_rows, K), MMA)
        keys = operand(load_tile(k + key_head, H * K, rows, columns, n_rows, K), MMA)
        scores += matmul(keys, tl.trans(queries), PRECISION)
    gate = load_vector(gate_sums + token_head, HV, rows, n_rows)
    causal = (rows[:, None] <= rows[None, :]) & (rows < n_rows)[None, :]
    scores *= scale * decay_between(gate[None, :], gate[:, None], causal)
    transposed = operand(scores, MMA)
    for start in range(0, V, BV):
        channels = start + tl.arange(0, BV)
        do_tile = operand(load_tile(do + token_head * V, HV * V, rows, channels, n_rows, V), MMA)
        dv = matmul(transposed, do_tile, PRECISION)
        store_tile(dv_new + token_head * V, dv, HV * V, rows, channels, n_rows, V)
