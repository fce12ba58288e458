"""Gradients of one chunk with respect to what the output and the state update read.

    dP = tril(scale exp(G_i - G_j) dO V'^T)
    dQ = scale exp(G) dO S^T + dP K                dK = exp(G_last - G) V' dS'^T + dP^T Q        dW = -dV' S^T
    M = dP * Q K^T
    dG = rows(M) - columns(M) + q . scale exp(G) dO S^T - k . exp(G_last - G) V' dS'^T
    dG_last += exp(G_last) <S, dS'> + sum(k . exp(G_last - G) V' dS'^T)

Most of M cancels between its row and its column sums, all of it under strong gates. So both are sums of one
fp32 matrix: q . dP K - k . dP^T Q is the same for less work, and leaves the rounding of its operands behind.
dP^T is made as V' dO^T, never as the transpose of an accumulator. A program takes one K tile and adds the
value heads of its q/k head in order, so grouped heads need neither copies nor atomics. Each program stores
its share of dG; the one of M is stored by the first.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

from kernels.gdn.device import (
    CHUNK,
    bound,
    decay_between,
    load_tile,
    load_vector,
    locate_chunk,
    matmul,
    operand,
    store_tile,
)
from kernels.qdq.device import widen

SCALARS = ["T", "chunks_per_sequence", "H", "HV", "n_tokens"]


@triton.jit
def score_gradients(
    do, v_new, rows, n_rows, HV, V: tl.constexpr, BV: tl.constexpr, MMA: tl.constexpr, PRECISION: tl.constexpr
):
    """dO V'^T and its transpose, each made by its own products."""
    dp = tl.zeros((CHUNK, CHUNK), tl.float32)
    dp_transposed = tl.zeros((CHUNK, CHUNK), tl.float32)
    for start in range(0, V, BV):
        channels = start + tl.arange(0, BV)
        do_tile = operand(load_tile(do, HV * V, rows, channels, n_rows, V), MMA)
        v_tile = operand(load_tile(v_new, HV * V, rows, channels, n_rows, V), MMA)
        dp += matmul(do_tile, tl.trans(v_tile), PRECISION)
        dp_transposed += matmul(v_tile, tl.trans(do_tile), PRECISION)
    return dp, dp_transposed


@triton.jit(do_not_specialize=SCALARS)
def outer_gradient_kernel(
    q, k, v_new, gate_sums, do, dv_new, states, d_states, dq, dk, dw, d_gate_sums, chunk_table, cu_seqlens,
    scale, T, chunks_per_sequence, H, HV, n_tokens,
    K: tl.constexpr, V: tl.constexpr, BKT: tl.constexpr, BV: tl.constexpr,
    MMA: tl.constexpr, PRECISION: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Grid: (chunks * H * K tiles,). `dk` is fp32 and lacks what comes through W and U."""
    program = tl.program_id(0).to(tl.int64)
    tiles: tl.constexpr = (K + BKT - 1) // BKT
    tile, chunk_head = (program % tiles).to(tl.int32), program // tiles
    chunk, key_head = chunk_head // H, chunk_head % H
    first, n_rows = locate_chunk(chunk, chunk_table, cu_seqlens, T, chunks_per_sequence, PACKED)
    if n_rows <= 0:
        return
    rows = tl.arange(0, CHUNK)
    columns = tile * BKT + tl.arange(0, BKT)
    lower = (rows[:, None] >= rows[None, :]) & (rows < n_rows)[:, None]
    upper = (rows[:, None] <= rows[None, :]) & (rows < n_rows)[None, :]
    key_offset = (first * H + key_head) * K
    queries = load_tile(q + key_offset, H * K, rows, columns, n_rows, K)
    keys = load_tile(k + key_offset, H * K, rows, columns, n_rows, K)
    scores = tl.zeros((CHUNK, CHUNK), tl.float32)
    if tile == 0:
        for start in range(0, K, BKT):
            part = start + tl.arange(0, BKT)
            q_part = operand(load_tile(q + key_offset, H * K, rows, part, n_rows, K), MMA)
            k_part = operand(load_tile(k + key_offset, H * K, rows, part, n_rows, K), MMA)
            scores += matmul(q_part, tl.trans(k_part), PRECISION)
    dq_tile = tl.zeros((CHUNK, BKT), tl.float32)
    dk_tile = tl.zeros((CHUNK, BKT), tl.float32)
    for member in range(bound(HV // H)):
        head = key_head * (HV // H) + member
        token_head = first * HV + head
        gate = load_vector(gate_sums + token_head, HV, rows, n_rows)
        gate_last = tl.load(gate_sums + token_head + (n_rows - 1) * HV)
        dp, dp_transposed = score_gradients(
            do + token_head * V, v_new + token_head * V, rows, n_rows, HV, V, BV, MMA, PRECISION
        )
        dp *= scale * decay_between(gate[:, None], gate[None, :], lower)
        dp_transposed *= scale * decay_between(gate[None, :], gate[:, None], upper)
        m = dp * scores
        d_gate = tl.sum(m, axis=1) - tl.sum(m, axis=0)
        dq_member = matmul(operand(dp, MMA), operand(keys, MMA), PRECISION)
        dk_member = matmul(operand(dp_transposed, MMA), operand(queries, MMA), PRECISION)

        state_offset = (chunk * HV + head) * (K * V)
        dq_state = tl.zeros((CHUNK, BKT), tl.float32)
        dk_state = tl.zeros((CHUNK, BKT), tl.float32)
        dw_tile = tl.zeros((CHUNK, BKT), tl.float32)
        state_product = tl.zeros((BKT,), tl.float32)
        for start in range(0, V, BV):
            channels = start + tl.arange(0, BV)
            do_tile = operand(load_tile(do + token_head * V, HV * V, rows, channels, n_rows, V), MMA)
            v_tile = operand(load_tile(v_new + token_head * V, HV * V, rows, channels, n_rows, V), MMA)
            dv_tile = operand(load_tile(dv_new + token_head * V, HV * V, rows, channels, n_rows, V), MMA)
            s = operand(load_tile(states + state_offset, V, columns, channels, K, V), MMA)
            ds = operand(load_tile(d_states + state_offset, V, columns, channels, K, V), MMA)
            dq_state += matmul(do_tile, tl.trans(s), PRECISION)
            dk_state += matmul(v_tile, tl.trans(ds), PRECISION)
            dw_tile += matmul(dv_tile, tl.trans(s), PRECISION)
            state_product += tl.sum(s.to(tl.float32) * ds.to(tl.float32), axis=1)
        store_tile(dw + token_head * K, -dw_tile, HV * K, rows, columns, n_rows, K)
        dk_state *= tl.where(rows < n_rows, tl.exp(gate_last - gate), 0.0)[:, None]
        dq_state *= (scale * tl.exp(gate))[:, None]
        dq_member += dq_state
        dk_member += dk_state
        d_gate += tl.sum(dq_state * widen(queries) - dk_state * widen(keys), axis=1)
        through_keys = tl.sum(
            dk_state * widen(keys)
        )  # in one: Triton 3.6.0 fails on a sum of sums for SM 10.0
        d_last = tl.exp(gate_last) * tl.sum(state_product, axis=0) + through_keys
        d_gate += tl.where(rows == n_rows - 1, d_last, 0.0)
        share = d_gate_sums + tile.to(tl.int64) * n_tokens * HV + token_head
        tl.store(share + rows * HV, d_gate, mask=rows < n_rows)
        dq_tile += dq_member
        dk_tile += dk_member
    store_tile(dq + key_offset, dq_tile, H * K, rows, columns, n_rows, K)
    store_tile(dk + key_offset, dk_tile, H * K, rows, columns, n_rows, K)
