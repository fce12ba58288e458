"""The attention inside a chunk: the output, and the gradient that it sends to V'.

    O = scale exp(G) Q S + P V'        P = tril(scale Q K^T exp(G_i - G_j))        dV'_local = P^T dO

V' and its gradient are stored as the state is held, V first: a chunk of them is [V, 64].
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

from kernels.gdn.device import (
    CHUNK,
    decay_between,
    load_matrix,
    load_tile,
    locate_chunk,
    matmul,
    operand,
    store_matrix,
    store_tile,
)
from kernels.qdq.device import widen

SCALARS = ["T", "chunks_per_sequence", "H", "HV"]


@triton.jit(do_not_specialize=SCALARS)
def output_kernel(
    q, k, v_new, gates, states, o, chunk_table, cu_seqlens, scale, T, chunks_per_sequence, H, HV,
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
        s = operand(load_matrix(states, channels, columns, V, K), MMA)
        from_state += matmul(queries, tl.trans(s), PRECISION)
        scores += matmul(queries, tl.trans(keys), PRECISION)
    gate = tl.load(gates + chunk_head * (2 * CHUNK) + rows)
    causal = (rows[:, None] >= rows[None, :]) & (rows < n_rows)[:, None]
    scores *= decay_between(gate[:, None], gate[None, :], causal)
    values = operand(load_matrix(v_new + chunk_head * (CHUNK * V), channels, rows, V, CHUNK), MMA)
    result = from_state * tl.exp(gate)[:, None] + matmul(operand(scores, MMA), tl.trans(values), PRECISION)
    store_tile(o + token_head * V, scale * result, HV * V, rows, channels, n_rows, V)


@triton.jit(do_not_specialize=SCALARS)
def local_gradient_kernel(
    q, k, do, gates, dv_new, do_scaled, chunk_table, cu_seqlens, scale, T, chunks_per_sequence, H, HV,
    K: tl.constexpr, V: tl.constexpr, BKT: tl.constexpr, BV: tl.constexpr,
    MMA: tl.constexpr, PRECISION: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Grid: (chunks * HV,). `do_scaled` is scale exp(G) dO, of which dS is made."""
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
        scores += matmul(queries, tl.trans(keys), PRECISION)
    gate = tl.load(gates + program * (2 * CHUNK) + rows)
    causal = (rows[:, None] >= rows[None, :]) & (rows < n_rows)[:, None]
    scores *= scale * decay_between(gate[:, None], gate[None, :], causal)
    attention = operand(scores, MMA)
    to_state = (scale * tl.exp(gate))[:, None]
    for start in range(0, V, BV):
        channels = start + tl.arange(0, BV)
        do_tile = load_tile(do + token_head * V, HV * V, rows, channels, n_rows, V)
        dv = matmul(tl.trans(operand(do_tile, MMA)), attention, PRECISION)
        store_matrix(dv_new + program * (CHUNK * V), dv, channels, rows, V, CHUNK)
        scaled = widen(do_tile) * to_state
        store_matrix(do_scaled + program * (CHUNK * V), scaled, rows, channels, CHUNK, V)
