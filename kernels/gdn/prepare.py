"""One chunk of one value head: cumulative gate, triangular solve, and the WY activations W and U.

    G = cumsum(g)      L = tril(beta_i (k_i . k_j) exp(G_i - G_j), -1)      X = (I + L)^-1
    W = X (beta exp(G) K), rounded where it is made when the W site is on      U = X (beta V)

Two kernels: X goes through memory, where the backward finds it to make U again by the same arithmetic. U is
stored as the state is held, V first: a chunk of it is [V, 64].
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
    load_vector,
    locate_chunk,
    matmul,
    matmul_of_parts,
    operand,
    store_matrix,
)
from kernels.qdq.device import narrow, qdq_rows, widen

HALF: tl.constexpr = tl.constexpr(32)
SCALARS = ["T", "chunks_per_sequence", "H", "HV"]


@triton.jit
def load_block(scratch, row: tl.constexpr, column: tl.constexpr, SIZE: tl.constexpr):
    """A block [SIZE, SIZE] of a 64 x 64 matrix in memory."""
    i = tl.arange(0, SIZE)
    return tl.load(scratch + (i + row)[:, None] * CHUNK + (i + column)[None, :])


@triton.jit
def invert_diagonal_blocks(scratch, SIZE: tl.constexpr):
    """Puts the inverses of the diagonal blocks of I + L in the place of those of L.

    A lane owns one column of one block and substitutes forward: each element of L that it needs is one
    address for all columns of the block, and its own earlier rows are registers.
    """
    lane = tl.arange(0, CHUNK)
    column = lane % SIZE
    block = scratch + (lane - column) * (CHUNK + 1)
    x = (tl.where(column == 0, 1.0, 0.0),)
    for i in tl.static_range(1, SIZE):
        row = tl.where(column == i, 1.0, 0.0)
        for j in tl.static_range(i):
            row -= tl.load(block + (i * CHUNK + j)) * x[j]
        x = x + (row,)  # type: ignore[assignment]  # noqa: RUF005  Triton knows no starred tuples
    tl.debug_barrier()  # L has been read before it is overwritten
    for i in tl.static_range(SIZE):
        tl.store(block + (i * CHUNK + column), x[i])
    tl.debug_barrier()


@triton.jit
def invert_pair(scratch, start: tl.constexpr, SIZE: tl.constexpr, SOLVE_PRECISION: tl.constexpr):
    """P', R' and -R' M P' of [[P, 0], [M, R]], whose inverses P' and R' and whose M are in memory."""
    first = load_block(scratch, start, start, SIZE)
    second = load_block(scratch, start + SIZE, start + SIZE, SIZE)
    below = load_block(scratch, start + SIZE, start, SIZE)
    middle = matmul_of_parts(second, below, SOLVE_PRECISION)
    return first, second, -matmul_of_parts(middle, first, SOLVE_PRECISION)


@triton.jit
def invert_unit_lower(scratch, SOLVE_PRECISION: tl.constexpr):
    """The blocks [32, 32] of (I + L)^-1 for a strictly lower triangular L [64, 64] in memory, exact up to
    fp32 rounding: the first and the second on the diagonal and the one below. L is overwritten.

    Diagonal blocks of 16 by substitution, then [[P, 0], [M, R]]^-1 = [[P', 0], [-R' M P', R']] for 16 and 32.
    """
    invert_diagonal_blocks(scratch, 16)
    i = tl.arange(0, 16)
    for start in tl.static_range(0, 64, 32):
        _, _, below = invert_pair(scratch, start, 16, SOLVE_PRECISION)
        tl.store(scratch + (start + 16 + i)[:, None] * CHUNK + (start + i)[None, :], below)
    tl.debug_barrier()
    return invert_pair(scratch, 0, 32, SOLVE_PRECISION)


@triton.jit
def at(x, index, place):
    """The element of a vector whose index is `place`, 0 if there is none."""
    return tl.sum(tl.where(index == place, x, 0.0), axis=0)


@triton.jit
def store_system(scratch, products, b, gate, other_gate, row: tl.constexpr, column: tl.constexpr):
    """Stores a block of L: beta_i (k_i . k_j) exp(G_i - G_j) below the diagonal of the chunk, 0 elsewhere."""
    i = tl.arange(0, HALF)
    below = (i + row)[:, None] > (i + column)[None, :]
    block = b[:, None] * products * decay_between(gate[:, None], other_gate[None, :], below)
    tl.store(scratch + (i + row)[:, None] * CHUNK + (i + column)[None, :], block)


@triton.jit(do_not_specialize=SCALARS)
def solve_kernel(
    k, g, beta, gates, inverse, scratch, chunk_table, cu_seqlens, T, chunks_per_sequence, H, HV,
    K: tl.constexpr, BKT: tl.constexpr, MMA: tl.constexpr, PRECISION: tl.constexpr,
    SOLVE_PRECISION: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Grid: (chunks * HV,). `scratch` is `[chunks, HV, 64, 64]` fp32: what no program but its own reads.

    Past the end of a chunk beta reads as 0: X is the identity there. The gate stays what it was, to the bit:
    what a sum of zeros is depends on the order in which a scan adds. Strong gates have large sums and small
    differences, so both are fp64.
    The chunk is worked on in halves of 32 rows: what lies above the diagonal is not made.
    """
    program = tl.program_id(0).to(tl.int64)
    chunk, head = program // HV, program % HV
    first, n_rows = locate_chunk(chunk, chunk_table, cu_seqlens, T, chunks_per_sequence, PACKED)
    if n_rows <= 0:
        return
    i = tl.arange(0, HALF)
    token_head = first * HV + head
    k += (first * H + head // (HV // H)) * K
    scratch += program * (CHUNK * CHUNK)
    upper_beta = load_vector(beta + token_head, HV, i, n_rows)
    lower_beta = load_vector(beta + token_head, HV, i + HALF, n_rows)
    upper_gate = load_vector(g + token_head, HV, i, n_rows)
    lower_gate = load_vector(g + token_head, HV, i + HALF, n_rows)
    upper = tl.zeros((HALF, HALF), tl.float32)
    below = tl.zeros((HALF, HALF), tl.float32)
    lower = tl.zeros((HALF, HALF), tl.float32)
    for start in range(0, K, BKT):
        columns = start + tl.arange(0, BKT)
        upper_keys = operand(load_tile(k, H * K, i, columns, n_rows, K), MMA)
        lower_keys = operand(load_tile(k, H * K, i + HALF, columns, n_rows, K), MMA)
        upper += matmul(upper_keys, tl.trans(upper_keys), PRECISION)
        below += matmul(lower_keys, tl.trans(upper_keys), PRECISION)
        lower += matmul(lower_keys, tl.trans(lower_keys), PRECISION)
    upper_sum = tl.cumsum(upper_gate.to(tl.float64), axis=0)
    lower_sum = tl.cumsum(lower_gate.to(tl.float64), axis=0) + at(upper_sum, i, HALF - 1)
    last = at(upper_sum, i, n_rows - 1) + at(lower_sum, i + HALF, n_rows - 1)
    upper_sum = tl.where(i < n_rows, upper_sum, last)
    lower_sum = tl.where(i + HALF < n_rows, lower_sum, last)
    upper_gate, lower_gate = upper_sum.to(tl.float32), lower_sum.to(tl.float32)
    gates += program * (2 * CHUNK)
    tl.store(gates + i, upper_gate)
    tl.store(gates + i + HALF, lower_gate)
    tl.store(gates + i + CHUNK, tl.exp((last - upper_sum).to(tl.float32)))
    tl.store(gates + i + (CHUNK + HALF), tl.exp((last - lower_sum).to(tl.float32)))
    store_system(scratch, upper, upper_beta, upper_gate, upper_gate, 0, 0)
    store_system(scratch, below, lower_beta, lower_gate, upper_gate, 32, 0)
    store_system(scratch, lower, lower_beta, lower_gate, lower_gate, 32, 32)
    tl.debug_barrier()
    upper, lower, below = invert_unit_lower(scratch, SOLVE_PRECISION)
    inverse += program * (CHUNK * CHUNK)
    store_matrix(inverse, upper, i, i, CHUNK, CHUNK)
    store_matrix(inverse, tl.zeros((HALF, HALF), tl.float32), i, i + HALF, CHUNK, CHUNK)
    store_matrix(inverse, below, i + HALF, i, CHUNK, CHUNK)
    store_matrix(inverse, lower, i + HALF, i + HALF, CHUNK, CHUNK)


@triton.jit(do_not_specialize=SCALARS)
def prepare_kernel(
    k, v, beta, gates, inverse, w, u, chunk_table, cu_seqlens, T, chunks_per_sequence, H, HV,
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
    x = operand(load_matrix(inverse + program * (CHUNK * CHUNK), rows, rows, CHUNK, CHUNK), MMA)
    if WRITE_W:
        gate = tl.load(gates + program * (2 * CHUNK) + rows)
        columns = tl.arange(0, BK)
        keys = widen(load_tile(k, H * K, rows, columns, n_rows, K))
        tile = matmul(x, operand((b * tl.exp(gate))[:, None] * keys, MMA), PRECISION)
        materialised = widen(narrow(tile, w.dtype.element_ty))
        rounded = qdq_rows(materialised, W_FORMAT, CONVERSION, w.dtype.element_ty != tl.float32)
        store_matrix(w + program * (CHUNK * K), rounded, rows, columns, CHUNK, K)
    for start in range(0, V, BV):
        channels = start + tl.arange(0, BV)
        values = widen(load_tile(v, HV * V, rows, channels, n_rows, V))
        u_tile = matmul(x, operand(b[:, None] * values, MMA), PRECISION)
        u_tile = tl.trans(narrow(u_tile, u.dtype.element_ty))
        store_matrix(u + program * (CHUNK * V), u_tile, channels, rows, V, CHUNK)
