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
    INTERPRET,
    divide_for_code,
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
def within(rows, columns, N_ROWS: tl.constexpr, N_COLUMNS: tl.constexpr):
    """Which elements of a tile lie inside a matrix [N_ROWS, N_COLUMNS]."""
    return (rows < N_ROWS)[:, None] & (columns < N_COLUMNS)[None, :]


@triton.jit
def load_matrix(pointer, rows, columns, N_ROWS: tl.constexpr, N_COLUMNS: tl.constexpr):
    """A tile of a contiguous matrix as it is stored, 0 outside; without a mask where tiles divide it."""
    tile = pointer + rows[:, None] * N_COLUMNS + columns[None, :]
    if not INTERPRET and N_ROWS % rows.shape[0] == 0 and N_COLUMNS % columns.shape[0] == 0:
        return tl.load(tile)
    else:
        return tl.load(tile, mask=within(rows, columns, N_ROWS, N_COLUMNS), other=0.0)


@triton.jit
def store_matrix(pointer, value, rows, columns, N_ROWS: tl.constexpr, N_COLUMNS: tl.constexpr):
    """Stores a tile into a contiguous matrix inside its bounds; fp32 is rounded to nearest even."""
    tile = pointer + rows[:, None] * N_COLUMNS + columns[None, :]
    if value.dtype == tl.float32:
        value = narrow(value, pointer.dtype.element_ty)
    if not INTERPRET and N_ROWS % rows.shape[0] == 0 and N_COLUMNS % columns.shape[0] == 0:
        tl.store(tile, value)
    else:
        tl.store(tile, value, mask=within(rows, columns, N_ROWS, N_COLUMNS))


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
def cut(x):
    """The 11 leading bits of fp32, which TF32 holds; of the 13 of the rest, x - cut(x), it loses 2."""
    return (x.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)


@triton.jit
def matmul_of_parts(a, b, SOLVE_PRECISION: tl.constexpr):
    """a @ b nearly as exact as in fp32: three TF32 products of leading bits and rests, the smallest first."""
    if SOLVE_PRECISION == "ieee":
        return matmul(a, b, "ieee")
    else:
        tl.static_assert(SOLVE_PRECISION == "tf32x3", "SOLVE_PRECISION must be tf32x3 or ieee")
        a_high, b_high = cut(a), cut(b)
        result = matmul(a_high, b - b_high, "tf32")
        result += matmul(a - a_high, b_high, "tf32")
        result += matmul(a_high, b_high, "tf32")
        return result


@triton.jit
def amax_bits_of(x):
    """The `magnitude_bits` of the largest element, [1, 1].

    Never a scalar: that a scale is the same in every layout lets Triton move codes between layouts and scale
    them there, and codes that moved came out wrong (initial states; SM 9.0, Triton 3.6.0).
    """
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
