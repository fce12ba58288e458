"""What a call may leave out: options for which a subject's own signature has a default."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

OP_DEFAULTS: Mapping[str, Any] = MappingProxyType(
    {
        "scale": None,
        "initial_state": None,
        "output_final_state": False,
        "use_qk_l2norm_in_kernel": False,
        "use_beta_sigmoid_in_kernel": False,
        "allow_neg_eigval": False,
        "state_v_first": False,
        "cu_seqlens": None,
        "use_gate_in_kernel": False,
        "A_log": None,
        "dt_bias": None,
        "state_format": None,
        "state_block_v": 64,
        "w_format": None,
    }
)
"""Option of the op -> the value that the interface gives it where a call says nothing."""


def optional(function: Callable[..., Any]) -> frozenset[str]:
    """The parameters of a function that its signature gives a default; none where it shows no signature."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return frozenset()
    return frozenset(p.name for p in parameters if p.default is not p.empty)


def shortened(function: Callable[..., Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of an op call without those that say what leaving them out says.

    Args:
        function: the op of a subject; only what its signature gives a default is left out.
        options: option -> value.
    """
    may = optional(function)
    return {name: value for name, value in options.items() if name not in may or not _is_default(name, value)}


def _is_default(name: str, value: Any) -> bool:
    default = OP_DEFAULTS[name]
    return value is default if default is None else type(value) is type(default) and bool(value == default)
