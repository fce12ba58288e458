"""Launch rows of the kernels of the chunk form.

Facts that a row may ask about: `operand` (bf16 or fp32 matmul operands), `K` and `V` (padded to powers of
two), `tile` (the V tile of the state: block_v when the state site is on, 0 when the row may choose).

Meta: BKT and BV are tiles of K and V, BH a block of heads, HALVES in how many parts a scale group is worked
on. The first row that fits is taken; the others are for measuring and for a judge that forces every row.
"""

from __future__ import annotations

from collections.abc import Mapping

from kernels.launch import ANY_SM, LaunchRow, register

UP_TO_128 = (64, 128)
BF16: Mapping[str, tuple[object, ...]] = {"operand": ("bf16",)}
FP32: Mapping[str, tuple[object, ...]] = {"operand": ("fp32",)}
WIDE = (0, 32, 64, 128)
WIDE_BF16 = {**BF16, "tile": WIDE}
NARROW_128 = {**BF16, "K": UP_TO_128, "tile": (0, 32, 64)}
HOPPER = (90, 90)
"""Rows with a pipeline need its 227 KB; Triton 3.6.0 cannot build the state's for SM 10.0."""


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
        _row(
            "gdn_solve",
            "bf16-w1",
            "eight programs on a processor: 10 % faster than 2 warps and 168 registers",
            1,
            1,
            {**BF16, "K": UP_TO_128},
            HOPPER,
            BKT=128,
        ),
        _row("gdn_solve", "bf16-w4", "1 warp spills at K = 256", 4, 1, BF16, BKT=128),
        _row("gdn_solve", "fp32-w8", "fewest spills", 8, 1, FP32, BKT=64),
        _row("gdn_prepare", "bf16-w4", "one step for V up to 128", 4, 1, BF16, BV=128),
        _row("gdn_prepare", "fp32-w8", "4 warps spill at K = 256", 8, 1, FP32, BV=64),
        _row(
            "gdn_state",
            "bf16-w4-16",
            "8 warps and 16 columns read outside their memory in TF32",
            4,
            1,
            {**BF16, "tile": (16,)},
            BV=16,
        ),
        _row(
            "gdn_state",
            "fp32-w4-16",
            "8 warps read outside their memory (SM 9.0, Triton 3.6.0)",
            4,
            1,
            {**FP32, "tile": (16,)},
            BV=16,
        ),
        _row("gdn_state", "bf16-w4-s3", "2 stages take 16 % longer", 4, 3, NARROW_128, HOPPER, BV=64),
        _row(
            "gdn_state",
            "bf16-w8-halves",
            "half of 128 KB of shared memory, and of the spills; SM 8.6 and 8.9 have 99",
            8,
            1,
            {**BF16, "K": (256,), "tile": (128,)},
            (86, 89),
            HALVES=2,
            BV=64,
        ),
        _row("gdn_state", "bf16-w8", "least shared memory", 8, 1, WIDE_BF16, BV=64),
        _row(
            "gdn_state",
            "bf16-w8-s2",
            "4 warps spill",
            8,
            2,
            {**WIDE_BF16, "K": UP_TO_128},
            HOPPER,
            False,
            BV=64,
        ),
        _row(
            "gdn_state",
            "fp32-w8-halves",
            "half of 128 KB of shared memory",
            8,
            1,
            {**FP32, "K": (256,), "tile": (128,)},
            HALVES=2,
            BV=64,
        ),
        _row("gdn_state", "fp32-w8", "fewest spills", 8, 1, {**FP32, "tile": (0, 32, 64)}, BV=32),
        _row(
            "gdn_state",
            "fp32-w8-128",
            "a [256, 128] group takes 256 KB of shared memory whole",
            8,
            1,
            {**FP32, "K": UP_TO_128, "tile": (128,)},
            BV=128,
        ),
        _row(
            "gdn_state_gradient",
            "bf16-w4-s2-64",
            "3 stages are no faster",
            4,
            2,
            {**BF16, "K": UP_TO_128},
            HOPPER,
            BV=64,
            CHAINED=1,
        ),
        _row(
            "gdn_state_gradient",
            "bf16-w4-s3",
            "tiles of 32: no faster",
            4,
            3,
            {**BF16, "K": UP_TO_128},
            HOPPER,
            False,
            BV=32,
        ),
        _row("gdn_state_gradient", "bf16-w8", "least shared memory", 8, 1, BF16, BV=64),
        _row(
            "gdn_state_gradient", "fp32-w4", "a third of the shared memory of a tile of 64", 4, 1, FP32, BV=16
        ),
        _row("gdn_output", "bf16-w4-bv128", "one program a chunk: 20 % faster", 4, 3, BF16, BKT=64, BV=128),
        _row("gdn_output", "bf16-w4", "fewest registers", 4, 2, BF16, default=False, BKT=64, BV=64),
        _row("gdn_output", "fp32-w4", "96 KB of shared memory", 4, 1, FP32, BKT=64, BV=64),
        _row("gdn_local_gradient", "bf16-w4", "fewer steps", 4, 3, BF16, BKT=64, BV=128),
        _row("gdn_local_gradient", "fp32-w4", "64 KB of shared memory", 4, 1, FP32, BKT=64, BV=64),
        _row(
            "gdn_outer_gradient",
            "bf16-w8-s3-128",
            "dP is made once: up to 5 % faster than 4 warps and tiles of 64, 20 % than 8 warps and those",
            8,
            3,
            {**BF16, "K": (128,)},
            HOPPER,
            BKT=128,
            BV=64,
        ),
        _row(
            "gdn_outer_gradient",
            "bf16-w4-s3",
            "two programs on a processor: 20 % faster than 8 warps",
            4,
            3,
            {**BF16, "K": UP_TO_128},
            HOPPER,
            BKT=64,
            BV=64,
        ),
        _row("gdn_outer_gradient", "bf16-w8-64x64", "4 warps spill more", 8, 1, BF16, BKT=64, BV=64),
        _row("gdn_outer_gradient", "fp32-w8-32x32", "fewest spills", 8, 1, FP32, BKT=32, BV=32),
        _row(
            "gdn_solve_gradient",
            "bf16-w8-128x128",
            "dX is made once: 18 % faster than tiles of 64",
            8,
            1,
            BF16,
            HOPPER,
            BKT=128,
            BV=128,
        ),
        _row(
            "gdn_solve_gradient",
            "bf16-w4-64x64",
            "fewest spills elsewhere; BV = 32 reads outside its memory",
            4,
            1,
            BF16,
            BKT=64,
            BV=64,
        ),
        _row("gdn_solve_gradient", "fp32-w8-32x32", "56 KB of shared memory", 8, 1, FP32, BKT=32, BV=32),
        _row("gdn_gate_gradient", "w4", "bound by memory", 4, 1, BH=16),
    )
)

LAUNCH_ROWS = tuple(row.name for row in ROWS)
"""The names of all rows; each can be forced."""
