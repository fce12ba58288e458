"""Launch rows of the kernels of the chunk form.

Facts that a row may ask about: `operand` (bf16 or fp32 matmul operands), `K` (padded to a power of two), `tile`
(the V tile of the state: block_v when the state site is on, 0 when the row may choose).

Meta: BKT and BV are tiles of K and V, BH a block of heads. The first row that fits is taken; the others are
for measuring and for a judge that forces every row.
"""

from __future__ import annotations

from collections.abc import Mapping

from kernels.launch import ANY_SM, LaunchRow, register

SMALL_K = (16, 32, 64)
UP_TO_128 = (*SMALL_K, 128)
BF16: Mapping[str, tuple[object, ...]] = {"operand": ("bf16",)}
FP32: Mapping[str, tuple[object, ...]] = {"operand": ("fp32",)}
ROOMY_SM = (90, 109)
"""SM 9.0 and 10.0: 227 KB of shared memory for a block; the others have 99 KB, SM 8.0 has 163 KB."""


def _row(
    kernel: str, label: str, because: str, num_warps: int, num_stages: int,
    where: Mapping[str, tuple[object, ...]] | None = None, sm: tuple[int, int] = ANY_SM, default: bool = True,
    **meta: int,
) -> LaunchRow:  # fmt: skip
    return LaunchRow(
        kernel=kernel,
        name=f"{kernel}:{label}",
        because=because,
        meta=meta,
        num_warps=num_warps,
        num_stages=num_stages,
        sm=sm,
        where=where or {},
        default=default,
    )


ROWS = register(
    (
        _row("gdn_prepare", "bf16-w4", "255 registers without a spill", 4, 1, BF16, BKT=64, BV=64),
        _row("gdn_prepare", "bf16-w8", "half the registers", 8, 1, BF16, BKT=64, BV=64, default=False),
        _row("gdn_prepare", "fp32-w8", "4 warps spill at K = 256", 8, 1, FP32, BKT=64, BV=64),
        _row("gdn_state", "bf16-w8", "4 warps spill with a tile of 64", 8, 1, BF16, BV=64),
        _row("gdn_state", "bf16-w4", "one warpgroup", 4, 1, {**BF16, "K": UP_TO_128}, BV=32, default=False),
        _row(
            "gdn_state",
            "bf16-w4-s2",
            "loads of the next chunk overlap",
            4,
            2,
            {**BF16, "K": UP_TO_128},
            BV=32,
            default=False,
        ),
        _row(
            "gdn_state",
            "bf16-w8-s2",
            "loads of the next chunk overlap",
            8,
            2,
            {**BF16, "K": UP_TO_128},
            BV=64,
            default=False,
        ),
        _row("gdn_state", "fp32-w8", "fewest spills", 8, 1, FP32, BV=32),
        _row("gdn_state_gradient", "bf16-w8", "4 warps spill with a tile of 64", 8, 1, BF16, BV=64),
        _row("gdn_state_gradient", "bf16-w4", "no spill, more programs", 4, 1, BF16, BV=32, default=False),
        _row(
            "gdn_state_gradient",
            "bf16-w4-s2",
            "loads of the next chunk overlap",
            4,
            2,
            {**BF16, "K": UP_TO_128},
            BV=32,
            default=False,
        ),
        _row(
            "gdn_state_gradient", "fp32-w4", "a third of the shared memory of a tile of 64", 4, 1, FP32, BV=16
        ),
        _row("gdn_output", "bf16-w4", "135 registers", 4, 2, BF16, BKT=64, BV=64),
        _row("gdn_output", "bf16-w4-bv128", "one program a chunk", 4, 2, BF16, BKT=64, BV=128, default=False),
        _row("gdn_output", "bf16-w8-bv128", "one program a chunk", 8, 2, BF16, BKT=64, BV=128, default=False),
        _row("gdn_output", "fp32-w4", "96 KB of shared memory", 4, 1, FP32, BKT=64, BV=64),
        _row("gdn_local_gradient", "bf16-w4", "111 registers", 4, 2, BF16, BKT=64, BV=64),
        _row("gdn_local_gradient", "bf16-w4-bv128", "fewer steps", 4, 2, BF16, BKT=64, BV=128, default=False),
        _row("gdn_local_gradient", "fp32-w4", "64 KB of shared memory", 4, 1, FP32, BKT=64, BV=64),
        _row("gdn_outer_gradient", "bf16-w8-64x64", "fewest spills", 8, 2, BF16, BKT=64, BV=64),
        _row("gdn_outer_gradient", "bf16-w4-64x32", "small", 4, 1, BF16, BKT=64, BV=32, default=False),
        _row("gdn_outer_gradient", "bf16-w8-128x32", "one K tile", 8, 1, BF16, BKT=128, BV=32, default=False),
        _row("gdn_outer_gradient", "fp32-w8-32x32", "fewest spills", 8, 1, FP32, BKT=32, BV=32),
        _row("gdn_solve_gradient", "bf16-w8-64x64", "fewest spills", 8, 1, BF16, BKT=64, BV=64),
        _row(
            "gdn_solve_gradient",
            "bf16-w4-64x64",
            "two programs an SM",
            4,
            1,
            BF16,
            BKT=64,
            BV=64,
            default=False,
        ),
        _row("gdn_solve_gradient", "bf16-w8-128x64", "one K tile", 8, 1, BF16, BKT=128, BV=64, default=False),
        _row("gdn_solve_gradient", "fp32-w8-32x32", "56 KB of shared memory", 8, 1, FP32, BKT=32, BV=32),
        _row("gdn_gate_gradient", "w4", "bound by memory", 4, 1, BH=16),
    )
)

LAUNCH_ROWS = tuple(row.name for row in ROWS)
"""The names of all rows; each can be forced."""
