"""One chunk of one value head: cumulative gate, triangular solve, and the WY activations W and U.

    G = cumsum(g)      L = tril(beta_i (k_i . k_j) exp(G_i - G_j), -1)      X = (I + L)^-1
    W = X (beta exp(G) K), rounded where it is made when the W site is on      U = X (beta V)

Two kernels: X goes through memory, where the backward finds it to make U again by the same arithmetic.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

from kernels.gdn.device import (
    CHUNK,
    decay_between,
    invert_unit_lower,
    load_tile,
    load_vector,
    locate_chunk,
    matmul,
    operand,
    store_tile,
)
from kernels.qdq.device import narrow, qdq_rows, widen

SCALARS = ["T", "chunks_per_sequence", "H", "HV"]


@triton.jit
def solve_chunk(
    k, beta, gate, rows, n_rows, H,
    K: tl.constexpr, BKT: tl.constexpr, MMA: tl.constexpr,
    PRECISION: tl.constexpr, SOLVE_PRECISION: tl.constexpr,
):  # fmt: skip
    """X = (I + L)^-1 of a chunk whose keys start at `k`."""
    products = tl.zeros((CHUNK, CHUNK), tl.float32)
    for start in range(0, K, BKT):
        tile = operand(load_tile(k, H * K, rows, start + tl.arange(0, BKT), n_rows, K), MMA)
        products += matmul(tile, tl.trans(tile), PRECISION)
    strictly_lower = rows[:, None] > rows[None, :]
    decay = decay_between(gate[:, None], gate[None, :], strictly_lower)
    return invert_unit_lower(beta[:, None] * products * decay, SOLVE_PRECISION)


@triton.jit(do_not_specialize=SCALARS)
def solve_kernel(
    k, g, beta, gate_sums, inverse, chunk_table, cu_seqlens, T, chunks_per_sequence, H, HV,
    K: tl.constexpr, BKT: tl.constexpr, MMA: tl.constexpr, PRECISION: tl.constexpr,
    SOLVE_PRECISION: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Grid: (chunks * HV,)."""
    program = tl.program_id(0).to(tl.int64)
    chunk, head = program // HV, program % HV
    first, n_rows = locate_chunk(chunk, chunk_table, cu_seqlens, T, chunks_per_sequence, PACKED)
    if n_rows <= 0:
        return
    rows = tl.arange(0, CHUNK)
    token_head = first * HV + head
    k += (first * H + head // (HV // H)) * K
    b = load_vector(beta + token_head, HV, rows, n_rows)
    gate = tl.cumsum(load_vector(g + token_head, HV, rows, n_rows), axis=0)
    tl.store(gate_sums + token_head + rows * HV, gate, mask=rows < n_rows)
    x = solve_chunk(k, b, gate, rows, n_rows, H, K, BKT, MMA, PRECISION, SOLVE_PRECISION)
    store_tile(inverse + token_head * CHUNK, x, HV * CHUNK, rows, rows, n_rows, CHUNK)


@triton.jit(do_not_specialize=SCALARS)
def prepare_kernel(
    k, v, beta, gate_sums, inverse, w, u, chunk_table, cu_seqlens, T, chunks_per_sequence, H, HV,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    MMA: tl.constexpr, PRECISION: tl.constexpr,
    WRITE_W: tl.constexpr, W_FORMAT: tl.constexpr, CONVERSION: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Grid: (chunks * HV,)."""
    program = tl.program_id(0).to(tl.int64)
    chunk, head = program // HV, program % HV
    first, n_rows = locate_chunk(chunk, chunk_table, cu_seqlens, T, chunks_per_sequence, PACKED)
    if n_rows <= 0:
        return
    rows = tl.arange(0, CHUNK)
    token_head = first * HV + head
    k += (first * H + head // (HV // H)) * K
    v += token_head * V
    b = load_vector(beta + token_head, HV, rows, n_rows)
    x = operand(load_tile(inverse + token_head * CHUNK, HV * CHUNK, rows, rows, n_rows, CHUNK), MMA)
    if WRITE_W:
        gate = load_vector(gate_sums + token_head, HV, rows, n_rows)
        columns = tl.arange(0, BK)
        keys = widen(load_tile(k, H * K, rows, columns, n_rows, K))
        tile = matmul(x, operand((b * tl.exp(gate))[:, None] * keys, MMA), PRECISION)
        materialised = widen(narrow(tile, w.dtype.element_ty))
        rounded = qdq_rows(materialised, W_FORMAT, CONVERSION, w.dtype.element_ty != tl.float32)
        store_tile(w + token_head * K, rounded, HV * K, rows, columns, n_rows, K)
    for start in range(0, V, BV):
        channels = start + tl.arange(0, BV)
        values = widen(load_tile(v, HV * V, rows, channels, n_rows, V))
        u_tile = matmul(x, operand(b[:, None] * values, MMA), PRECISION)
        store_tile(u + token_head * V, u_tile, HV * V, rows, channels, n_rows, V)
