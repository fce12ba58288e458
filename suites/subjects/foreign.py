"""Calls of other packages as subjects: only what the installed version takes is handed over."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

Tensor = torch.Tensor
Op = Callable[..., tuple[Tensor, Tensor | None]]

DEFAULTS: Mapping[str, Any] = {
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
    "w_format": None,
}
"""Options of the call whose default changes nothing."""


def adapted(call: Op, name: str) -> Op:
    """The op of another package behind this project's signature.

    Options on their defaults are not handed over; `state_block_v` says nothing while the state site is off.

    Args:
        call: `chunk_gated_delta_rule` of a package, of whatever version is installed.
        name: the package, for messages.
    """
    parameters = inspect.signature(call).parameters
    takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())

    def chunk_gated_delta_rule(
        q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        """The package's call.

        Raises:
            NotImplementedError: an option that the installed version does not have.
        """
        options.pop("state_block_v", None)
        asked = {key: value for key, value in options.items() if value is not DEFAULTS.get(key)}
        for site in ("state_format", "w_format"):
            if site in asked:
                raise NotImplementedError(f"{site} must be None, got {asked[site]!r}; {name} rounds nothing")
        unknown = [key for key in asked if key not in parameters and not takes_all]
        if unknown:
            raise NotImplementedError(f"{name} takes no {', '.join(unknown)}; install a version that does")
        return call(q, k, v, g, beta, **asked)

    return chunk_gated_delta_rule
