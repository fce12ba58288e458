"""The specialisations of the QDQ kernels that are compiled for every architecture.

Contiguous tensors and heads of 128, the widest tile, and a strided view: what launches differ in.
"""

from __future__ import annotations

from typing import Any

from kernels.compile_tier import Build
from kernels.launch import rows_of
from kernels.options import CONVERSIONS, FORMATS
from kernels.qdq import launch_table as launch_table  # registers the rows

OUTER_DENSE = {"N1": 1, "N2": 1, "xs1": 0, "xs2": 0, "ys1": 0, "ys2": 0, "OUTER": 1}
DENSE_ARGUMENTS = {"xs0": "i32", "ys0": "i32"}
STRIDED_ARGUMENTS = dict.fromkeys(("N1", "N2", "xs0", "xs1", "xs2", "ys0", "ys1", "ys2", "xsk", "ysk"), "i64")


def rows_build(row: str, elements: int, carrier: str, conversion: str, strided: bool = False) -> Build:
    """The rows kernel on W with K = 128, dense or with three leading dimensions and a stride along K."""
    arguments = {"X": f"*{carrier}", "Y": f"*{carrier}", "rows": "i32"}
    constexprs: dict[str, Any] = {"K": 128, "BLOCK_K": 128, "BLOCK_R": elements // 128, "FMT": "e4m3"}
    if strided:
        arguments |= STRIDED_ARGUMENTS
        constexprs |= {"OUTER": 3}
    else:
        arguments |= DENSE_ARGUMENTS
        constexprs |= OUTER_DENSE | {"xsk": 1, "ysk": 1}
    return Build(
        kernel="qdq_rows",
        row=row,
        entry="kernels.qdq.kernels:qdq_rows_kernel",
        arguments=arguments,
        constexprs=constexprs | {"CONVERSION": conversion},
        divisible=("X", "Y") if strided else ("X", "Y", "rows", "xs0", "ys0"),
        label=f"{carrier},{conversion}" + (",strided" if strided else ""),
        min_sm=CONVERSIONS[conversion].min_sm,
    )


def tiles_build(row: str, K: int, block_v: int, carrier: str, fmt: str, conversion: str) -> Build:
    """The tiles kernel on contiguous states."""
    return Build(
        kernel="qdq_tiles",
        row=row,
        entry="kernels.qdq.kernels:qdq_tiles_kernel",
        arguments={"X": f"*{carrier}", "Y": f"*{carrier}", "tiles": "i32", "tiles_v": "i32", "V": "i32"}
        | DENSE_ARGUMENTS
        | {"xsk": "i32", "ysk": "i32"},
        constexprs=OUTER_DENSE
        | {
            "xsv": 1,
            "ysv": 1,
            "K": K,
            "BLOCK_K": K,
            "BLOCK_V": block_v,
            "FMT": fmt,
            "CONVERSION": conversion,
        },
        divisible=("X", "Y", "V", "xs0", "ys0", "xsk", "ysk"),
        label=f"K{K},bv{block_v},{carrier},{fmt},{conversion}",
        min_sm=CONVERSIONS[conversion].min_sm,
    )


def all_builds() -> list[Build]:
    """Rows: each launch row, carrier and conversion. Tiles: each launch row, format and conversion."""
    builds = [
        rows_build(row.name, row.meta["ELEMENTS"], carrier, conversion)
        for row in rows_of("qdq_rows")
        if "interpreter" not in row.where
        for carrier in ("fp32", "bf16", "fp16")
        for conversion in CONVERSIONS
    ]
    builds += [rows_build("qdq_rows:e4096-w4", 4096, "bf16", "portable", strided=True)]
    shapes = {
        "qdq_tiles:w1": (16, 64),
        "qdq_tiles:w4": (64, 64),
        "qdq_tiles:w8": (128, 64),
        "qdq_tiles:w4-large": (128, 64),
        "qdq_tiles:w16": (128, 128),
        "qdq_tiles:w32": (256, 128),
    }
    builds += [
        tiles_build(row, K, block_v, "fp32", fmt, conversion)
        for row, (K, block_v) in shapes.items()
        for fmt in FORMATS
        for conversion in FORMATS[fmt].conversions
    ]
    return builds


BUILDS = tuple(all_builds())
