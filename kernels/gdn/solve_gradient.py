"""Adjoint of the triangular solve and of what it is made from, for one chunk; and the gradient of the gate.

    dX = dW (beta exp(G) K)^T + dV' (beta V)^T      dL = -tril(X^T dX X^T, -1)     (X is unrounded)
    dK~ = X^T dW     dV~ = X^T dV'     E = dL * beta_i exp(G_i - G_j)     N = E * K K^T
    dV = beta dV~    dK += beta exp(G) dK~ + (E + E^T) K
    dbeta = rows(N) / beta + v . dV~ + exp(G) k . dK~      dG += rows(N) - columns(N) + beta exp(G) k . dK~

A program takes one K tile and adds the value heads of its q/k head in order; the V tiles of dV are dealt out
among the programs of a chunk. Each stores its share of dG and dbeta; N's is the first one's.
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
    load_vector,
    locate_chunk,
    matmul,
    operand,
    store_tile,
)
from kernels.qdq.device import widen

SCALARS = ["T", "chunks_per_sequence", "H", "HV", "n_tokens"]


@triton.jit
def gradient_of_inverse(
    k, v, w_gradient, u_gradient, beta, beta_decay, rows, n_rows, H, HV,
    K: tl.constexpr, V: tl.constexpr, STEP: tl.constexpr, MMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dX = dW (beta exp(G) K)^T + dU (beta V)^T.

    Each loop has its own accumulator: two loops of TF32 products chained in one (8 warps, tiles of 32,
    V = 128) come out wrong on SM 9.0 with Triton 3.6.0.
    """
    through_w = tl.zeros((CHUNK, CHUNK), tl.float32)
    for start in range(0, K, STEP):
        columns = start + tl.arange(0, STEP)
        keys = widen(load_tile(k, H * K, rows, columns, n_rows, K))
        dw_tile = operand(load_matrix(w_gradient, rows, columns, CHUNK, K), MMA)
        through_w += matmul(dw_tile, tl.trans(operand(beta_decay[:, None] * keys, MMA)), PRECISION)
    through_u = tl.zeros((CHUNK, CHUNK), tl.float32)
    for start in range(0, V, STEP):
        channels = start + tl.arange(0, STEP)
        values = widen(load_tile(v, HV * V, rows, channels, n_rows, V))
        du_tile = operand(load_matrix(u_gradient, channels, rows, V, CHUNK), MMA)
        through_u += matmul(tl.trans(du_tile), tl.trans(operand(beta[:, None] * values, MMA)), PRECISION)
    return through_w + through_u


@triton.jit
def key_products(
    k, rows, n_rows, H, K: tl.constexpr, STEP: tl.constexpr, MMA: tl.constexpr, PRECISION: tl.constexpr
):
    """K K^T of a chunk."""
    products = tl.zeros((CHUNK, CHUNK), tl.float32)
    for start in range(0, K, STEP):
        part = operand(load_tile(k, H * K, rows, start + tl.arange(0, STEP), n_rows, K), MMA)
        products += matmul(part, tl.trans(part), PRECISION)
    return products


@triton.jit(do_not_specialize=SCALARS)
def solve_gradient_kernel(
    k, v, beta, gates, inverse, dw, dv_new, dk_partial, dk, dv, d_gate_sums, d_beta, chunk_table,
    cu_seqlens, T, chunks_per_sequence, H, HV, n_tokens,
    K: tl.constexpr, V: tl.constexpr, BKT: tl.constexpr, BV: tl.constexpr,
    MMA: tl.constexpr, PRECISION: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Grid: (chunks * H * K tiles,)."""
    program = tl.program_id(0).to(tl.int64)
    tiles: tl.constexpr = (K + BKT - 1) // BKT
    tile, chunk_head = (program % tiles).to(tl.int32), program // tiles
    chunk, key_head = chunk_head // H, chunk_head % H
    first, n_rows = locate_chunk(chunk, chunk_table, cu_seqlens, T, chunks_per_sequence, PACKED)
    if n_rows <= 0:
        return
    rows = tl.arange(0, CHUNK)
    columns = tile * BKT + tl.arange(0, BKT)
    strictly_lower = (rows[:, None] > rows[None, :]) & (rows < n_rows)[:, None]
    key_offset = (first * H + key_head) * K
    step: tl.constexpr = BKT if BKT < CHUNK else CHUNK
    keys = load_tile(k + key_offset, H * K, rows, columns, n_rows, K)
    share_of_n = tl.where(tile == 0, 1.0, 0.0)
    dk_tile = widen(load_tile(dk_partial + key_offset, H * K, rows, columns, n_rows, K))
    e_sum = tl.zeros((CHUNK, CHUNK), tl.float32)
    # masks and offsets that are kept through this loop cost registers, and so do the products of the keys
    for member in tl.range(0, bound(HV // H), num_stages=1, disable_licm=True):
        head = key_head * (HV // H) + member
        token_head = first * HV + head
        value_chunk = chunk * HV + head
        w_gradient = dw + value_chunk * (CHUNK * K)
        u_gradient = dv_new + value_chunk * (CHUNK * V)
        b = load_vector(beta + token_head, HV, rows, n_rows)
        gate = tl.load(gates + value_chunk * (2 * CHUNK) + rows)
        beta_decay = b * tl.exp(gate)
        # X is read transposed: neither X nor an accumulator is transposed in registers
        x_offsets = value_chunk * (CHUNK * CHUNK) + rows[None, :] * CHUNK + rows[:, None]
        x_transposed = operand(tl.load(inverse + x_offsets), MMA)
        dx = gradient_of_inverse(
            k + key_offset, v + token_head * V, w_gradient, u_gradient,
            b, beta_decay, rows, n_rows, H, HV, K, V, step, MMA, PRECISION,
        )  # fmt: skip
        dx = tl.where(strictly_lower, dx, 0.0)
        half = matmul(x_transposed, operand(dx, MMA), PRECISION)
        dl = -matmul(operand(half, MMA), x_transposed, PRECISION)
        e = dl * decay_between(gate[:, None], gate[None, :], strictly_lower)
        n = e * key_products(k + key_offset, rows, n_rows, H, K, step, MMA, PRECISION)
        rows_of_n = share_of_n * tl.sum(n, axis=1)
        columns_of_n = share_of_n * tl.sum(n * b[:, None], axis=0)
        e_sum += e * b[:, None]

        dw_tile = operand(load_matrix(w_gradient, rows, columns, CHUNK, K), MMA)
        d_keys = matmul(x_transposed, dw_tile, PRECISION)
        through_keys = tl.sum(d_keys * widen(keys), axis=1)
        dk_tile += beta_decay[:, None] * d_keys
        d_gate = beta_decay * through_keys + b * rows_of_n - columns_of_n
        d_b = tl.exp(gate) * through_keys + rows_of_n
        for start in range(bound(tile * BV), V, tiles * BV):
            channels = start + tl.arange(0, BV)
            values = widen(load_tile(v + token_head * V, HV * V, rows, channels, n_rows, V))
            du_tile = operand(load_matrix(u_gradient, channels, rows, V, CHUNK), MMA)
            d_values = matmul(x_transposed, tl.trans(du_tile), PRECISION)
            d_b += tl.sum(d_values * values, axis=1)
            store_tile(dv + token_head * V, b[:, None] * d_values, HV * V, rows, channels, n_rows, V)
        share = tile.to(tl.int64) * n_tokens * HV + token_head
        tl.store(d_gate_sums + share + rows * HV, d_gate, mask=rows < n_rows)
        tl.store(d_beta + share + rows * HV, d_b, mask=rows < n_rows)
    symmetric = operand(e_sum + tl.trans(e_sum), MMA)
    dk_tile += matmul(symmetric, operand(keys, MMA), PRECISION)
    store_tile(dk + key_offset, dk_tile, H * K, rows, columns, n_rows, K)


@triton.jit(do_not_specialize=SCALARS)
def gate_gradient_kernel(
    d_gate_outer, d_to_end, d_gate_solve, d_beta_shares, dg, dbeta, chunk_table, cu_seqlens,
    T, chunks_per_sequence, H, HV, n_tokens,
    OUTER_TILES: tl.constexpr, SOLVE_TILES: tl.constexpr, BH: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """dg = sum of dG from a token on, and of r before it, inside the chunk. Grid: (chunks * head blocks,).

    Shares are added in order.
    """
    program = tl.program_id(0).to(tl.int64)
    blocks = (HV + BH - 1) // BH
    chunk, block = program // blocks, program % blocks
    first, n_rows = locate_chunk(chunk, chunk_table, cu_seqlens, T, chunks_per_sequence, PACKED)
    if n_rows <= 0:
        return
    rows = tl.arange(0, CHUNK)
    heads = block * BH + tl.arange(0, BH)
    offsets = first * HV + rows[:, None] * HV + heads[None, :]
    mask = (rows < n_rows)[:, None] & (heads < HV)[None, :]
    stride = n_tokens.to(tl.int64) * HV
    d_gate = tl.zeros((CHUNK, BH), tl.float32)
    before = tl.zeros((CHUNK, BH), tl.float32)
    d_b = tl.zeros((CHUNK, BH), tl.float32)
    for tile in tl.static_range(OUTER_TILES):
        d_gate += tl.load(d_gate_outer + tile * stride + offsets, mask=mask, other=0.0)
        earlier = mask & (rows > 0)[:, None]
        before += tl.load(d_to_end + tile * stride + offsets - HV, mask=earlier, other=0.0)
    for tile in tl.static_range(SOLVE_TILES):
        d_gate += tl.load(d_gate_solve + tile * stride + offsets, mask=mask, other=0.0)
        d_b += tl.load(d_beta_shares + tile * stride + offsets, mask=mask, other=0.0)
    from_here = tl.cumsum(d_gate, axis=0, reverse=True)
    tl.store(dg + offsets, from_here + tl.cumsum(before, axis=0), mask=mask)
    tl.store(dbeta + offsets, d_b, mask=mask)
