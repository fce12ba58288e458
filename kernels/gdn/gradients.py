"""Gradients of one chunk with respect to what the output and the state update read.

    dP = tril(scale exp(G_i - G_j) dO V'^T)
    dQ = scale exp(G) dO S^T + dP K                dK = exp(G_last - G) V' dS'^T + dP^T Q        dW = -dV' S^T
    M = dP * Q K^T
    r = k . exp(G_last - G) V' dS'^T
    dG = rows(M) - columns(M) + q . scale exp(G) dO S^T - r        dG_last += exp(G_last) <S, dS'> + sum(r)

Most of M cancels between its row and its column sums, all of it under strong gates. So both are sums of one
fp32 matrix: q . dP K - k . dP^T Q is the same for less work, and leaves the rounding of its operands behind.
dP^T is made as V' dO^T, never as the transpose of an accumulator. A program takes one K tile and adds the
value heads of its q/k head in order, so grouped heads need neither copies nor atomics. Each program stores
its share of dG without r, and of r: dg, the sum of dG from its token on, needs the r of the tokens before it,
and would keep the rounding of all if the sum of all were taken back. The share of M is stored by the first.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

from kernels.gdn.device import (
    CHUNK,
    bound,
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
        v_tile = operand(load_matrix(v_new, channels, rows, V, CHUNK), MMA)
        dp += matmul(do_tile, v_tile, PRECISION)
        dp_transposed += matmul(tl.trans(v_tile), tl.trans(do_tile), PRECISION)
    return dp, dp_transposed


@triton.jit
def score_products(
    q, k, rows, n_rows, H, K: tl.constexpr, BKT: tl.constexpr, MMA: tl.constexpr, PRECISION: tl.constexpr
):
    """Q K^T of a chunk."""
    scores = tl.zeros((CHUNK, CHUNK), tl.float32)
    for start in range(0, K, BKT):
        part = start + tl.arange(0, BKT)
        q_part = operand(load_tile(q, H * K, rows, part, n_rows, K), MMA)
        k_part = operand(load_tile(k, H * K, rows, part, n_rows, K), MMA)
        scores += matmul(q_part, tl.trans(k_part), PRECISION)
    return scores


@triton.jit
def through_entry(
    do, dv_new, states, rows, columns, n_rows, HV, K: tl.constexpr, V: tl.constexpr, BKT: tl.constexpr,
    BV: tl.constexpr, MMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dO S^T and dV' S^T."""
    dq_state = tl.zeros((CHUNK, BKT), tl.float32)
    dw_tile = tl.zeros((CHUNK, BKT), tl.float32)
    for start in range(0, V, BV):
        channels = start + tl.arange(0, BV)
        do_tile = operand(load_tile(do, HV * V, rows, channels, n_rows, V), MMA)
        dv_tile = operand(load_matrix(dv_new, channels, rows, V, CHUNK), MMA)
        s = operand(load_matrix(states, channels, columns, V, K), MMA)
        dq_state += matmul(do_tile, s, PRECISION)
        dw_tile += matmul(tl.trans(dv_tile), s, PRECISION)
    return dq_state, dw_tile


@triton.jit
def through_exit(
    v_new, states, d_states, rows, columns, n_rows, HV, K: tl.constexpr, V: tl.constexpr, BKT: tl.constexpr,
    BV: tl.constexpr, MMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """V' dS'^T, and the row sums of S * dS'."""
    dk_state = tl.zeros((CHUNK, BKT), tl.float32)
    state_product = tl.zeros((BV,), tl.float32)
    for start in range(0, V, BV):
        channels = start + tl.arange(0, BV)
        v_tile = operand(load_matrix(v_new, channels, rows, V, CHUNK), MMA)
        s = load_matrix(states, channels, columns, V, K)
        ds = load_matrix(d_states, channels, columns, V, K)
        dk_state += matmul(tl.trans(v_tile), operand(ds, MMA), PRECISION)
        state_product += tl.sum(widen(s) * widen(ds), axis=1)
    return dk_state, state_product


@triton.jit(do_not_specialize=SCALARS)
def outer_gradient_kernel(
    q, k, v_new, gates, do, dv_new, states, d_states, dq, dk, dw, d_gate_sums, d_to_end, chunk_table,
    cu_seqlens, scale, T, chunks_per_sequence, H, HV, n_tokens,
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
    key_offset = (first * H + key_head) * K
    dq_tile = tl.zeros((CHUNK, BKT), tl.float32)
    dk_tile = tl.zeros((CHUNK, BKT), tl.float32)
    # masks and offsets that are kept through this loop cost a hundred registers
    for member in tl.range(0, bound(HV // H), num_stages=1, disable_licm=True):
        head = key_head * (HV // H) + member
        token_head = first * HV + head
        values = token_head * V
        value_chunk = chunk * HV + head
        chunk_values = value_chunk * (CHUNK * V)
        state_offset = value_chunk * (K * V)
        gate = tl.load(gates + value_chunk * (2 * CHUNK) + rows)
        gate_last = tl.load(gates + value_chunk * (2 * CHUNK) + (CHUNK - 1))
        queries = load_tile(q + key_offset, H * K, rows, columns, n_rows, K)
        keys = load_tile(k + key_offset, H * K, rows, columns, n_rows, K)

        dq_state, dw_tile = through_entry(
            do + values, dv_new + chunk_values, states + state_offset, rows, columns, n_rows, HV,
            K, V, BKT, BV, MMA, PRECISION,
        )  # fmt: skip
        store_matrix(dw + value_chunk * (CHUNK * K), -dw_tile, rows, columns, CHUNK, K)
        dq_state *= (scale * tl.exp(gate))[:, None]
        d_gate = tl.sum(dq_state * widen(queries), axis=1)
        dq_tile += dq_state

        dk_state, state_product = through_exit(
            v_new + chunk_values, states + state_offset, d_states + state_offset, rows, columns, n_rows, HV,
            K, V, BKT, BV, MMA, PRECISION,
        )  # fmt: skip
        dk_state *= tl.where(rows < n_rows, tl.exp(gate_last - gate), 0.0)[:, None]
        to_end = tl.sum(dk_state * widen(keys), axis=1)
        d_last = tl.exp(gate_last) * tl.sum(state_product, axis=0)
        d_gate += tl.where(rows == n_rows - 1, d_last, 0.0)
        dk_tile += dk_state

        dp, dp_transposed = score_gradients(
            do + values, v_new + chunk_values, rows, n_rows, HV, V, BV, MMA, PRECISION
        )
        upper = (rows[:, None] <= rows[None, :]) & (rows < n_rows)[None, :]
        dp_transposed *= scale * decay_between(gate[None, :], gate[:, None], upper)
        dk_tile += matmul(operand(dp_transposed, MMA), operand(queries, MMA), PRECISION)
        lower = (rows[:, None] >= rows[None, :]) & (rows < n_rows)[:, None]
        dp *= scale * decay_between(gate[:, None], gate[None, :], lower)
        if tile == 0:
            m = dp * score_products(q + key_offset, k + key_offset, rows, n_rows, H, K, BKT, MMA, PRECISION)
            d_gate += tl.sum(m, axis=1) - tl.sum(m, axis=0)
        dq_tile += matmul(operand(dp, MMA), operand(keys, MMA), PRECISION)
        share = tile.to(tl.int64) * n_tokens * HV + token_head
        tl.store(d_gate_sums + share + rows * HV, d_gate, mask=rows < n_rows)
        tl.store(d_to_end + share + rows * HV, to_end, mask=rows < n_rows)
    store_tile(dq + key_offset, dq_tile, H * K, rows, columns, n_rows, K)
    store_tile(dk + key_offset, dk_tile, H * K, rows, columns, n_rows, K)
