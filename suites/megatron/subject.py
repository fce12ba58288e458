"""This project's Megatron adapter, with the op that it wires in."""

from __future__ import annotations

from suites.subjects.kernels import (
    BACKEND,
    CAPABILITIES,
    LAUNCH_ROWS,
    PACKAGE,
    PACKAGES,
    chunk_gated_delta_rule,
)

ADAPTER = "kernels.adapters.megatron"

__all__ = [
    "ADAPTER",
    "BACKEND",
    "CAPABILITIES",
    "LAUNCH_ROWS",
    "PACKAGE",
    "PACKAGES",
    "chunk_gated_delta_rule",
]
