"""Subjects: the implementations that are judged, loaded from a module, a file or an entry point.

A subject is a namespace. It offers some of

    chunk_gated_delta_rule(q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False,
        use_qk_l2norm_in_kernel=False, use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False,
        state_v_first=False, cu_seqlens=None, *, use_gate_in_kernel=False, A_log=None, dt_bias=None,
        state_format=None, state_block_v=64, w_format=None) -> (o, final_state or None)
    qdq_state(state, *, block_v=64, fmt="e4m3")      qdq_w(w, *, fmt="e4m3")
    stages(...)             same arguments as the op; returns {stage name: tensor}
    LAUNCH_ROWS             names of launch configurations; force_launch_row(name) is a context manager
    CAPABILITIES            devices, dtypes, formats, block_v, min_sm, features; absent means: try everything
    ARITHMETIC              carrier -> precision of matmul operands: ieee, tf32, bf16, fp16; absent: the usual one
    DETERMINISTIC           False when repeated calls may differ
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

USUAL_ARITHMETIC: Mapping[str, str] = {"fp32": "tf32", "bf16": "bf16", "fp16": "fp16"}
"""What a carrier's matmul operands are rounded to when the subject declares nothing."""


@dataclass(frozen=True)
class Subject:
    """An implementation under judgement; `None` where it does not offer a function.

    Attributes:
        name: how the subject is called in ids and receipts.
        origin: where it was loaded from (module, file or entry point), for a worker to load it again.
        capabilities: what it declares; an absent key means that everything is tried.
        arithmetic: carrier -> declared precision of matmul operands, completed with the usual one.
        import_error: why it could not be loaded; then it offers nothing.
    """

    name: str
    origin: str
    chunk_gated_delta_rule: Callable[..., Any] | None = None
    qdq_state: Callable[..., Any] | None = None
    qdq_w: Callable[..., Any] | None = None
    stages: Callable[..., Any] | None = None
    launch_rows: tuple[str, ...] = ()
    force_launch_row: Callable[[str], Any] | None = None
    capabilities: Mapping[str, Any] = field(default_factory=dict)
    arithmetic: Mapping[str, str] = field(default_factory=lambda: dict(USUAL_ARITHMETIC))
    deterministic: bool = True
    import_error: str = ""
    module: ModuleType | None = field(default=None, compare=False, repr=False)


def subject_from_module(module: ModuleType | Any, name: str, origin: str = "") -> Subject:
    """Reads what a namespace offers into a `Subject`.

    Args:
        module: a module, or any object with the attributes named above.
        name: the subject's name.
        origin: where it can be loaded from again.
    """
    return Subject(
        name=name,
        origin=origin or name,
        chunk_gated_delta_rule=getattr(module, "chunk_gated_delta_rule", None),
        qdq_state=getattr(module, "qdq_state", None),
        qdq_w=getattr(module, "qdq_w", None),
        stages=getattr(module, "stages", None),
        launch_rows=tuple(getattr(module, "LAUNCH_ROWS", ())),
        force_launch_row=getattr(module, "force_launch_row", None),
        capabilities=dict(getattr(module, "CAPABILITIES", {}) or {}),
        arithmetic={**USUAL_ARITHMETIC, **(getattr(module, "ARITHMETIC", {}) or {})},
        deterministic=bool(getattr(module, "DETERMINISTIC", True)),
        module=module if isinstance(module, ModuleType) else None,
    )
