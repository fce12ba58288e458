"""Device functions that the kernels of the chunk form share: where a chunk lies, its decay, its solve.

Tokens of all sequences form one axis of B * T rows. A chunk is at most 64 consecutive rows of one sequence.
Base offsets are int64, so a tensor may hold more than 2^31 elements; offsets inside a chunk are int32.

Matmul operands have the dtype `MMA`: bf16 for a bf16 carrier, fp32 (taken as TF32 or IEEE) for fp32 and fp16.
An fp16 carrier widens exactly to TF32, and its state, V' and their gradients keep the range of fp32.
"""

# Triton compiles only the taken branch of a constexpr `if`; tiles have no type in Python.
# ruff: noqa: RET505
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

from kernels.qdq.device import (
    INF_BITS,
    INTERPRET,
    TWICE_BIAS,
    divide,
    magnitude_bits,
    narrow,
    round_code,
    scale_of,
    widen,
)

CHUNK: tl.constexpr = tl.constexpr(64)


@triton.jit
def locate_chunk(chunk, chunk_table, cu_seqlens, T, chunks_per_sequence, PACKED: tl.constexpr):
    """The first row of a chunk (int64) and its number of rows, 0 for a padding entry of the chunk table."""
    if PACKED:
        sequence = tl.load(chunk_table + 2 * chunk).to(tl.int64)
        index = tl.load(chunk_table + 2 * chunk + 1).to(tl.int64)
        start = tl.load(cu_seqlens + sequence).to(tl.int64)
        length = tl.load(cu_seqlens + sequence + 1).to(tl.int64) - start
    else:
        sequence = chunk // chunks_per_sequence
        index = chunk % chunks_per_sequence
        start = sequence * T
        length = T + 0 * start
    rows = tl.minimum(length - index * CHUNK, CHUNK).to(tl.int32)
    return start + index * CHUNK, tl.maximum(rows, 0)


@triton.jit
def locate_sequence(sequence, chunk_offsets, cu_seqlens, T, chunks_per_sequence, PACKED: tl.constexpr):
    """The first row of a sequence (int64), its length in rows and the number of its first chunk."""
    if PACKED:
        start = tl.load(cu_seqlens + sequence).to(tl.int64)
        length = (tl.load(cu_seqlens + sequence + 1).to(tl.int64) - start).to(tl.int32)
        first_chunk = tl.load(chunk_offsets + sequence).to(tl.int64)
    else:
        start = sequence * T
        length = (T + 0 * start).to(tl.int32)
        first_chunk = sequence * chunks_per_sequence
    return start, length, first_chunk


@triton.jit
def bound(n):
    """A loop bound. The interpreter's scalars are arrays of one element, not numbers for numpy."""
    if INTERPRET:
        return n.handle.data.item()
    else:
        return n


@triton.jit
def load_vector(pointer, stride, rows, n_rows):
    """fp32 values of a chunk's rows, 0 past its end."""
    return widen(tl.load(pointer + rows * stride, mask=rows < n_rows, other=0.0))


@triton.jit
def inside(rows, columns, n_rows, n_columns: tl.constexpr):
    """Which elements of a tile lie inside; tiles that divide the columns are not asked about them."""
    mask = (rows < n_rows)[:, None]
    if INTERPRET or n_columns % columns.shape[0] != 0:
        mask = mask & (columns < n_columns)[None, :]
    return mask


@triton.jit
def load_tile(pointer, stride, rows, columns, n_rows, n_columns: tl.constexpr):
    """A tile [rows, columns] as it is stored, 0 outside."""
    mask = inside(rows, columns, n_rows, n_columns)
    return tl.load(pointer + rows[:, None] * stride + columns[None, :], mask=mask, other=0.0)


@triton.jit
def store_tile(pointer, value, stride, rows, columns, n_rows, n_columns: tl.constexpr):
    """Stores an fp32 tile [rows, columns], rounded to nearest even, inside its bounds."""
    mask = inside(rows, columns, n_rows, n_columns)
    offsets = rows[:, None] * stride + columns[None, :]
    tl.store(pointer + offsets, narrow(value, pointer.dtype.element_ty), mask=mask)


@triton.jit
def operand(x, MMA: tl.constexpr):
    """A tile as a matmul operand. The interpreter multiplies bf16 as integers, so there it stays in fp32."""
    if INTERPRET:
        wide = widen(x)
        return widen(narrow(wide, MMA)) if tl.bfloat16 == MMA else wide
    elif x.dtype == tl.float32:
        return narrow(x, MMA)
    else:
        return x.to(MMA)


@triton.jit
def matmul(a, b, PRECISION: tl.constexpr):
    """a @ b accumulated in fp32."""
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def divide_for_code(x, scale):
    """x / scale, near enough to have the code of the rounded quotient; [1, 1] scale, |x| up to 448 times it.

    The scale is brought into [1, 2) by a power of two and its reciprocal r rounded once; q = x r is corrected
    once by its remainder, to q + (x - q d) r (Markstein, 1990). That is not always the rounded quotient, but
    the two never lie on different sides of a tie t between codes, which has at most 8 significant bits. They
    could only where x / d is next to the middle m of t and its neighbour. There, with q in [1, 2), q errs by
    less than q d / 4 + 1/2 < 3/2 ulp, so by 1/2 ulp; then x - q d is exact; and x / d is further from m, by
    2^-23 / d of that, than r errs, by at most 2^-25 d. A quotient too small to matter may lose bits.

    A `div.rn` for each element costs a branch and a call, and the registers that calls clobber. The
    interpreter rounds an fma twice, so there this is a division.
    """
    if INTERPRET:
        return divide(x, scale)
    else:
        power = (TWICE_BIAS - (magnitude_bits(scale) & INF_BITS)).to(tl.float32, bitcast=True)
        one_divisor = scale * power
        one_reciprocal = tl.math.div_rn(tl.full(scale.shape, 1.0, tl.float32), one_divisor)
        minus_divisor = tl.broadcast_to(-one_divisor, x.shape)
        reciprocal = tl.broadcast_to(one_reciprocal, x.shape)
        dividend = x * power
        quotient = dividend * reciprocal
        return tl.fma(tl.fma(quotient, minus_divisor, dividend), reciprocal, quotient)


@triton.jit
def amax_bits_of(x):
    """The `magnitude_bits` of the largest element, [1, 1]."""
    return tl.max(tl.max(magnitude_bits(x), axis=1, keep_dims=True), axis=0, keep_dims=True)


@triton.jit
def round_state(x, amax_bits, FMT: tl.constexpr, CONVERSION: tl.constexpr):
    """A 2-d fp32 tile rounded with the one scale of its group: the bits of `kernels.qdq.device.qdq_tile`."""
    scale = scale_of(amax_bits, FMT)
    return round_code(divide_for_code(x, scale), FMT, CONVERSION) * scale


@triton.jit
def decay_between(later, earlier, mask):
    """exp(later - earlier) where the mask holds, else 0.

    Masked before exp: no positive exponent is formed. The mask leaves out rows past the end of the chunk,
    whose gate reads as 0.
    """
    return tl.where(mask, tl.exp(tl.where(mask, later - earlier, 0.0)), 0.0)


@triton.jit
def invert_diagonal_blocks(lower):
    """The inverses of the 16 x 16 diagonal blocks of I + lower, as one block-diagonal [64, 64] matrix.

    Forward substitution by columns: row i of the inverse loses lower[i, j] times row j, for j = 0..14.
    """
    block = tl.arange(0, 4)
    i = tl.arange(0, 16)
    diagonal = block[:, None, None, None] == block[None, None, :, None]
    blocks = tl.sum(tl.where(diagonal, tl.reshape(lower, (4, 16, 4, 16)), 0.0), axis=2)
    identity = (i[:, None] == i[None, :]).to(tl.float32)
    inverse = tl.broadcast_to(identity[None, :, :], (4, 16, 16))
    for j in range(15):
        column = tl.sum(tl.where((i == j)[None, None, :], blocks, 0.0), axis=2)
        row = tl.sum(tl.where((i == j)[None, :, None], inverse, 0.0), axis=1)
        inverse -= column[:, :, None] * row[:, None, :]
    return tl.reshape(tl.where(diagonal, inverse[:, :, None, :], 0.0), (64, 64))


@triton.jit
def invert_unit_lower(lower, SOLVE_PRECISION: tl.constexpr):
    """(I + lower)^-1 for a strictly lower triangular [64, 64] tile, exact up to fp32 rounding.

    Diagonal blocks by substitution, then [[P, 0], [M, R]]^-1 = [[P', 0], [-R' M P', R']], for 16, then 32.
    """
    i = tl.arange(0, 64)
    inverse = invert_diagonal_blocks(lower)
    within_32 = (i[:, None] // 32 == i[None, :] // 32) & (i[:, None] // 16 != i[None, :] // 16)
    across_32 = i[:, None] // 32 != i[None, :] // 32
    middle = matmul(inverse, tl.where(within_32, lower, 0.0), SOLVE_PRECISION)
    inverse -= matmul(middle, inverse, SOLVE_PRECISION)
    middle = matmul(inverse, tl.where(across_32, lower, 0.0), SOLVE_PRECISION)
    return inverse - matmul(middle, inverse, SOLVE_PRECISION)
