"""What this project ships and qualifies: QDQ, the fused GDN op, the execution policy, the adapters.

Names are imported when they are asked for, so that the policy can be read without torch and triton.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    "chunk_gated_delta_rule": "kernels.gdn",
    "stages": "kernels.gdn",
    "force_launch_row": "kernels.launch",
    "recorded_launches": "kernels.launch",
    "qdq_state": "kernels.qdq",
    "qdq_w": "kernels.qdq",
}
"""Name -> the module that defines it."""

__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"kernels must have the name, got {name!r}; choose one of {list(_HOMES)}")
    return getattr(importlib.import_module(_HOMES[name]), name)
