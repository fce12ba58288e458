"""The fused op: the gated delta rule in chunk form, with the state and W rounded where a format is given."""

from kernels.gdn.launch_table import LAUNCH_ROWS
from kernels.gdn.op import chunk_gated_delta_rule
from kernels.gdn.stages import stages
from kernels.launch import force_launch_row

CAPABILITIES = {
    "devices": ("cuda", "cpu-interpreter"),
    "dtypes": ("fp32", "bf16", "fp16"),
    "state_formats": ("e4m3", "int8"),
    "w_formats": ("e4m3",),
    "block_v": (16, 32, 64, 128),
    "min_sm": 80,
}

ARITHMETIC = {"fp32": "tf32", "bf16": "bf16", "fp16": "tf32"}
"""Carrier -> precision of matmul operands."""

__all__ = [
    "ARITHMETIC",
    "CAPABILITIES",
    "LAUNCH_ROWS",
    "chunk_gated_delta_rule",
    "force_launch_row",
    "stages",
]
