"""The two QDQ kernels: rows with a scale each, and tiles with a scale each.

Both walk a strided tensor with up to three leading dimensions (outer sizes N0, N1, N2; unused ones are 1 with
stride 0). Programs are numbered over a two-dimensional grid, and all offsets are 64-bit.
"""

# ruff: noqa: RET505
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

from kernels.qdq.device import narrow, qdq_rows, qdq_tile, widen


@triton.jit
def program_index():
    """The program's number over both grid axes, as int64."""
    return tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)


@triton.jit
def outer_offset(index, N1, N2, s0, s1, s2, OUTER: tl.constexpr):
    """The element offset of leading index `index` (int64, row-major) under strides s0, s1, s2."""
    if OUTER == 1:
        return index * s0
    elif OUTER == 2:
        return (index // N1) * s0 + (index % N1) * s1
    else:
        tl.static_assert(OUTER == 3, "OUTER must be 1, 2 or 3")
        rest = index // N2
        return (rest // N1) * s0 + (rest % N1) * s1 + (index % N2) * s2


@triton.jit
def qdq_rows_kernel(
    X, Y, rows, N1, N2, xs0, xs1, xs2, xsk, ys0, ys1, ys2, ysk,
    K: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
    OUTER: tl.constexpr, FMT: tl.constexpr, CONVERSION: tl.constexpr,
):  # fmt: skip
    """Each row of K values rounded with its own scale; a program takes BLOCK_R rows."""
    row = program_index() * BLOCK_R + tl.arange(0, BLOCK_R)
    k = tl.arange(0, BLOCK_K)
    keep = (row < rows)[:, None] & (k < K)[None, :]
    column = k[None, :].to(tl.int64)
    x_offset = outer_offset(row, N1, N2, xs0, xs1, xs2, OUTER)[:, None] + column * xsk
    y_offset = outer_offset(row, N1, N2, ys0, ys1, ys2, OUTER)[:, None] + column * ysk
    x = widen(tl.load(X + x_offset, mask=keep, other=0.0))
    y = qdq_rows(x, FMT, CONVERSION, X.dtype.element_ty.primitive_bitwidth == 16)
    tl.store(Y + y_offset, narrow(y, Y.dtype.element_ty), mask=keep)


@triton.jit
def qdq_tiles_kernel(
    X, Y, tiles, tiles_v, V, N1, N2, xs0, xs1, xs2, xsk, xsv, ys0, ys1, ys2, ysk, ysv,
    K: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    OUTER: tl.constexpr, FMT: tl.constexpr, CONVERSION: tl.constexpr,
):  # fmt: skip
    """Each [K, BLOCK_V] tile of a [K, V] matrix rounded with its own scale; a program takes one tile."""
    index = program_index()
    inside = index < tiles  # the grid is a rectangle, so its last row may hold more programs than tiles
    outer = index // tiles_v
    k = tl.arange(0, BLOCK_K)[:, None]
    v = (index % tiles_v) * BLOCK_V + tl.arange(0, BLOCK_V)[None, :]
    keep = (k < K) & (v < V) & inside
    row = k.to(tl.int64)
    x_offset = outer_offset(outer, N1, N2, xs0, xs1, xs2, OUTER) + row * xsk + v * xsv
    y_offset = outer_offset(outer, N1, N2, ys0, ys1, ys2, OUTER) + row * ysk + v * ysv
    x = widen(tl.load(X + x_offset, mask=keep, other=0.0))
    y = qdq_tile(x, FMT, CONVERSION)
    tl.store(Y + y_offset, narrow(y, Y.dtype.element_ty), mask=keep)
