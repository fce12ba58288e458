"""How much a thread may spill to memory: a table of launch rows and architectures, each with its reason.

A row that is not named here must not spill at all.
"""

from __future__ import annotations

from dataclasses import dataclass

from kernels.launch import ANY_SM


@dataclass(frozen=True)
class Spill:
    """What a launch row may spill on some architectures.

    Attributes:
        row: the row's name.
        stack_bytes: the most stack of one thread, in any build of the row.
        because: why a launch that spills this much is taken.
        sm: smallest and largest SM, both included.
        build: part of the name of the builds that the entry is for; empty: all of the row.
    """

    row: str
    stack_bytes: int
    because: str
    sm: tuple[int, int] = ANY_SM
    build: str = ""


SPILLS: tuple[Spill, ...] = (
    Spill("gdn_outer_gradient:bf16-w4-s3", 288, "18 % faster on an H200 than 8 warps"),
    Spill(
        "gdn_outer_gradient:bf16-w8-64x64",
        696,
        "4 warps spill too; most where operands are in registers",
    ),
    Spill("gdn_outer_gradient:bf16-w8-s3-128", 664, "fastest on an H200; 24 B where K and V are 128"),
    Spill("gdn_outer_gradient:fp32-w8-32x32", 616, "fewest spills of the tiles that were tried"),
    Spill(
        "gdn_output:bf16-w4-bv128", 16, "20 % faster on an H200 than tiles of 64, and spills nothing there"
    ),
    Spill("gdn_output:fp32-w4", 96, "none on an H200; smaller tiles read Q and K more often"),
    Spill("gdn_local_gradient:bf16-w4", 16, "none where K and V are powers of two"),
    Spill("gdn_prepare:bf16-w4", 48, "one step for V up to 128; none up to K = 128", build="K256"),
    Spill("gdn_prepare:fp32-w8", 16, "4 warps spill more", build="K256"),
    Spill("gdn_solve:fp32-w8", 40, "fewest spills of the rows that were tried", build="K256"),
    Spill("gdn_solve_gradient:bf16-w4-64x64", 1000, "half the time of 8 warps with these tiles on an H200"),
    Spill(
        "gdn_solve_gradient:bf16-w8-128x128",
        432,
        "18 % faster on an H200 than tiles of 64; 8 B up to K = 128",
    ),
    Spill("gdn_solve_gradient:fp32-w8-32x32", 800, "X, dX and their products are 64 x 64 whatever the tile"),
    Spill("gdn_state:bf16-w4-16", 8, "16 columns are the smallest tile that there is"),
    Spill("gdn_state:bf16-w4-s3", 48, "8 warps take 16 % longer on an H200"),
    Spill(
        "gdn_state:bf16-w8-halves",
        688,
        "a [256, 128] group in fp32 is 128 registers of each of 256 threads; 1,088 B whole",
    ),
    Spill(
        "gdn_state:bf16-w8",
        1344,
        "a [256, 128] group in fp32 is 128 registers of each of 256 threads; most on SM 8.0",
        build="K256",
    ),
    Spill("gdn_state:bf16-w8", 352, "a [128, 128] group is 64 registers of each thread; most on SM 8.0"),
    Spill(
        "gdn_state:fp32-w8", 400, "a tile of 32 columns is taken where the group is not wider", build="K256"
    ),
    Spill("gdn_state:fp32-w8", 56, "fewest spills of the tiles that were tried"),
    Spill("gdn_state:fp32-w8-128", 392, "a [128, 128] group is 64 registers of each thread; most on SM 8.0"),
    Spill(
        "gdn_state:fp32-w8-halves",
        3072,
        "a [256, 128] group in fp32 is 128 registers of each of 256 threads; only K = 256 takes this row",
    ),
    Spill("gdn_state_gradient:bf16-w4-s3", 128, "only for measuring, and none where K and V are 128"),
    Spill("gdn_state_gradient:bf16-w4-s2-64", 152, "8 warps take 70 % longer on an H200"),
    Spill(
        "gdn_state_gradient:bf16-w8",
        464,
        "a [256, 64] tile, its keys, queries and W: 168 B on SM 9.0; fewer columns were not tried",
        build="K256",
    ),
    Spill("gdn_state_gradient:bf16-w8", 40, "4 warps spill too with this tile"),
    Spill(
        "gdn_state_gradient:fp32-w4",
        1544,
        "a tile of 16 columns is the smallest that there is; 464 B on SM 9.0, most on SM 8.0",
        build="K256",
    ),
    Spill("gdn_state_gradient:fp32-w4", 128, "a tile of 16 columns is the smallest that there is"),
)


def allowance(row: str, sm: int, build: str) -> Spill:
    """The first entry of the table for a build of a row on an SM; nothing may be spilled where there is none.

    Args:
        row: the launch row's name.
        sm: 90 for SM 9.0.
        build: the build's name.
    """
    found = (s for s in SPILLS if s.row == row and s.sm[0] <= sm <= s.sm[1] and s.build in build)
    return next(found, Spill(row, 0, "no spill is justified"))
