"""Launch rows of the kernels of the chunk form.

Facts that a row may ask about: `operand` (bf16 or fp32 matmul operands), `K` (padded to a power of two), `tile`
(the V tile of the state: block_v when the state site is on, 0 when the row may choose).
"""

from __future__ import annotations

from kernels.launch import LaunchRow, register

ROWS = register(
    (
        LaunchRow("gdn_prepare", "gdn_prepare:w4", "start", {"BKT": 64, "BV": 64}, 4, 1),
        LaunchRow("gdn_state", "gdn_state:w4", "start", {"BV": 64}, 4, 2),
        LaunchRow("gdn_state_gradient", "gdn_state_gradient:w4", "start", {"BV": 64}, 4, 2),
        LaunchRow("gdn_output", "gdn_output:w4", "start", {"BKT": 64, "BV": 64}, 4, 2),
        LaunchRow("gdn_local_gradient", "gdn_local_gradient:w4", "start", {"BKT": 64, "BV": 64}, 4, 2),
        LaunchRow("gdn_outer_gradient", "gdn_outer_gradient:w4", "start", {"BKT": 64, "BV": 64}, 4, 2),
        LaunchRow("gdn_solve_gradient", "gdn_solve_gradient:w4", "start", {"BKT": 64, "BV": 64}, 4, 2),
        LaunchRow("gdn_gate_gradient", "gdn_gate_gradient:w4", "start", {"BH": 16}, 4, 1),
    )
)

LAUNCH_ROWS = tuple(row.name for row in ROWS)
"""The names of all rows; each can be forced."""
