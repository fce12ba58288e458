"""The fused op with a solve gradient that is right as written and that Triton 3.6.0 compiles wrong on SM 9.0.

    qualify run --profile h100 --subject reports/examples/h200-chained/subject.py \\
        --select 'op.whole*sm:sm90,dtype:fp32*heads:128x128' --out DIR

Two loops of TF32 products are added up in one accumulator, with 8 warps and tiles of 32 at K = V = 128. In
Triton's interpreter the same source passes. Everything else is `kernels.gdn`.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

from kernels.gdn import chunk_gated_delta_rule, core
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

__all__ = ["chunk_gated_delta_rule"]

SCALARS = ["T", "chunks_per_sequence", "H", "HV", "n_tokens"]


@triton.jit
def gradient_of_inverse(
    k, v, w_gradient, u_gradient, beta, beta_decay, rows, n_rows, H, HV,
    K: tl.constexpr, V: tl.constexpr, BKT: tl.constexpr, BV: tl.constexpr,
    MMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dX = dW (beta exp(G) K)^T + dU (beta V)^T, both loops in one accumulator."""
    dx = tl.zeros((CHUNK, CHUNK), tl.float32)
    for start in range(0, K, BKT):
        columns = start + tl.arange(0, BKT)
        keys = widen(load_tile(k, H * K, rows, columns, n_rows, K))
        dw_tile = operand(load_matrix(w_gradient, rows, columns, CHUNK, K), MMA)
        dx += matmul(dw_tile, tl.trans(operand(beta_decay[:, None] * keys, MMA)), PRECISION)
    for start in range(0, V, BV):
        channels = start + tl.arange(0, BV)
        values = widen(load_tile(v, HV * V, rows, channels, n_rows, V))
        du_tile = operand(load_matrix(u_gradient, channels, rows, V, CHUNK), MMA)
        dx += matmul(tl.trans(du_tile), tl.trans(operand(beta[:, None] * values, MMA)), PRECISION)
    return dx


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
    products = tl.zeros((CHUNK, CHUNK), tl.float32)
    for start in range(0, K, BKT):
        part = operand(load_tile(k + key_offset, H * K, rows, start + tl.arange(0, BKT), n_rows, K), MMA)
        products += matmul(part, tl.trans(part), PRECISION)
    keys = load_tile(k + key_offset, H * K, rows, columns, n_rows, K)
    dk_tile = widen(load_tile(dk_partial + key_offset, H * K, rows, columns, n_rows, K))
    for member in range(bound(HV // H)):
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
            b, beta_decay, rows, n_rows, H, HV, K, V, BKT, BV, MMA, PRECISION,
        )  # fmt: skip
        dx = tl.where(strictly_lower, dx, 0.0)
        half = matmul(x_transposed, operand(dx, MMA), PRECISION)
        dl = -matmul(operand(half, MMA), x_transposed, PRECISION)
        e = dl * decay_between(gate[:, None], gate[None, :], strictly_lower)
        rows_of_n = tl.sum(e * products, axis=1)
        e *= b[:, None]
        columns_of_n = tl.sum(e * products, axis=0)

        dw_tile = operand(load_matrix(w_gradient, rows, columns, CHUNK, K), MMA)
        d_keys = matmul(x_transposed, dw_tile, PRECISION)
        through_keys = tl.sum(d_keys * widen(keys), axis=1)
        symmetric = operand(e + tl.trans(e), MMA)
        dk_tile += beta_decay[:, None] * d_keys + matmul(symmetric, operand(keys, MMA), PRECISION)
        d_gate = beta_decay * through_keys
        d_b = tl.exp(gate) * through_keys
        if tile == 0:
            d_gate += b * rows_of_n - columns_of_n
            d_b += rows_of_n
            for start in range(0, V, BV):
                channels = start + tl.arange(0, BV)
                values = widen(load_tile(v + token_head * V, HV * V, rows, channels, n_rows, V))
                du_tile = operand(load_matrix(u_gradient, channels, rows, V, CHUNK), MMA)
                d_values = matmul(x_transposed, tl.trans(du_tile), PRECISION)
                d_b += tl.sum(d_values * values, axis=1)
                store_tile(dv + token_head * V, b[:, None] * d_values, HV * V, rows, channels, n_rows, V)
        share = tile.to(tl.int64) * n_tokens * HV + token_head
        tl.store(d_gate_sums + share + rows * HV, d_gate, mask=rows < n_rows)
        tl.store(d_beta + share + rows * HV, d_b, mask=rows < n_rows)
    store_tile(dk + key_offset, dk_tile, H * K, rows, columns, n_rows, K)


setattr(core, "solve_gradient_kernel", solve_gradient_kernel)  # noqa: B010  not an export
