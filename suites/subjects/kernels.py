"""This project's kernels: QDQ and the fused op, native on a GPU and interpreted on a CPU."""

from __future__ import annotations

from kernels import launch
from kernels.gdn.op import chunk_gated_delta_rule
from kernels.gdn.stages import stages
from kernels.launch import force_launch_row, recorded_launches
from kernels.qdq import qdq_state, qdq_w

PACKAGE = "kernels"
PACKAGES = ("kernels",)
BACKEND = "triton"
CAPABILITIES = {
    "devices": ["cpu", "cuda"],
    "dtypes": ["fp32", "bf16", "fp16"],
    "formats": ["e4m3", "int8"],
    "block_v": [16, 32, 64, 128],
    "min_sm": 80,
}
LAUNCH_ROWS = tuple(row.name for row in launch.rows_of())
BUILDS = ("kernels.qdq.builds", "kernels.gdn.builds")

__all__ = [
    "chunk_gated_delta_rule",
    "force_launch_row",
    "qdq_state",
    "qdq_w",
    "recorded_launches",
    "stages",
]
