"""Launch rows of the two QDQ kernels.

ELEMENTS is the size of one program's tile; the rows kernel takes ELEMENTS // BLOCK_K rows of W at a time.
"""

from __future__ import annotations

from kernels.launch import LaunchRow, register

POWERS = tuple(2**n for n in range(21))

ROWS = register(
    [
        LaunchRow(
            "qdq_rows",
            "qdq_rows:interpreter",
            "the interpreter pays for programs, not for elements",
            {"ELEMENTS": 1 << 17},
            where={"interpreter": (True,)},
        ),
        LaunchRow(
            "qdq_rows",
            "qdq_rows:e1024-w2",
            "16 elements a thread: two (bf16) or four (fp32) 16-byte loads; the fastest here on an H200",
            {"ELEMENTS": 1024},
            num_warps=2,
        ),
        LaunchRow(
            "qdq_rows",
            "qdq_rows:e4096-w4",
            "32 elements a thread; for the benchmark to compare",
            {"ELEMENTS": 4096},
            default=False,
        ),
        LaunchRow(
            "qdq_rows",
            "qdq_rows:e2048-w4",
            "half the registers of the default, twice the programs; for the benchmark to compare",
            {"ELEMENTS": 2048},
            default=False,
        ),
        LaunchRow(
            "qdq_rows",
            "qdq_rows:e1024-w4",
            "8 elements a thread: one (bf16) or two (fp32) 16-byte loads; for the benchmark to compare",
            {"ELEMENTS": 1024},
            default=False,
        ),
        LaunchRow(
            "qdq_rows",
            "qdq_rows:e2048-w8",
            "8 elements a thread in larger programs; for the benchmark to compare",
            {"ELEMENTS": 2048},
            num_warps=8,
            default=False,
        ),
        LaunchRow(
            "qdq_rows",
            "qdq_rows:e8192-w8",
            "larger programs with the loads of the default; for the benchmark to compare",
            {"ELEMENTS": 8192},
            num_warps=8,
            default=False,
        ),
        LaunchRow(
            "qdq_tiles",
            "qdq_tiles:w1",
            "up to 1024 elements: at most 32 a thread in one warp, so the maximum needs no shared memory",
            num_warps=1,
            where={"tile": tuple(p for p in POWERS if p <= 1024)},
        ),
        LaunchRow(
            "qdq_tiles",
            "qdq_tiles:w4",
            "up to 4096 elements: at most 32 a thread",
            num_warps=4,
            where={"tile": (2048, 4096)},
        ),
        LaunchRow(
            "qdq_tiles",
            "qdq_tiles:w8",
            "8192 elements ([128, 64]): 32 a thread",
            num_warps=8,
            where={"tile": (8192,)},
        ),
        LaunchRow(
            "qdq_tiles",
            "qdq_tiles:w16",
            "16384 elements ([128, 128]): 32 a thread; for the benchmark to compare at 8192",
            num_warps=16,
            where={"tile": (8192, 16384)},
        ),
        LaunchRow(
            "qdq_tiles",
            "qdq_tiles:w32",
            "from 32768 elements ([256, 128]): 32 a thread and more; 16 warps spill there",
            num_warps=32,
            where={"tile": tuple(p for p in POWERS if p >= 32768)},
        ),
        LaunchRow(
            "qdq_tiles",
            "qdq_tiles:w4-large",
            "64 elements a thread in tiles of 8192; for the benchmark to compare",
            num_warps=4,
            where={"tile": (8192,)},
            default=False,
        ),
    ]
)
