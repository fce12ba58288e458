"""A problem: the inputs of one op call, its options and incoming gradients; and how a subject runs on it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

Tensor = torch.Tensor

CARRIERS: dict[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

TENSORS = ("o", "final_state", "dq", "dk", "dv", "dg", "dbeta", "dh0")
"""The eight tensors of a whole-op case, in the order in which they are reported."""


@dataclass(frozen=True)
class Problem:
    """One call of `chunk_gated_delta_rule` with everything that it depends on.

    Attributes:
        q, k: `[B, T, H, K]` in the carrier dtype.
        v: `[B, T, HV, V]` in the carrier dtype.
        g, beta: `[B, T, HV]`, any float dtype (natural log of the decay; write strength).
        initial_state: `[N, HV, K, V]` fp32 (`[N, HV, V, K]` when `state_v_first`), or None.
        cu_seqlens: `[N + 1]` int64 or int32, or None.
        do: incoming gradient of `o`, its shape and dtype; None means no gradient arrives there.
        dht: incoming gradient of `final_state`, fp32; None likewise.
        A_log: `[HV]` fp32 and dt_bias: `[HV]` fp32, only with `use_gate_in_kernel`.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    initial_state: Tensor | None = None
    do: Tensor | None = None
    dht: Tensor | None = None
    cu_seqlens: Tensor | None = None
    scale: float | None = None
    output_final_state: bool = True
    state_v_first: bool = False
    use_qk_l2norm_in_kernel: bool = False
    use_beta_sigmoid_in_kernel: bool = False
    allow_neg_eigval: bool = False
    use_gate_in_kernel: bool = False
    A_log: Tensor | None = None
    dt_bias: Tensor | None = None
    state_format: str | None = None
    state_block_v: int = 64
    w_format: str | None = None

    @property
    def carrier(self) -> torch.dtype:
        """The dtype of q, k, v, o and W."""
        return self.k.dtype

    def options(self) -> dict[str, Any]:
        """The keyword arguments of the call, beyond `q, k, v, g, beta`."""
        return {
            "scale": self.scale,
            "initial_state": self.initial_state,
            "output_final_state": self.output_final_state,
            "use_qk_l2norm_in_kernel": self.use_qk_l2norm_in_kernel,
            "use_beta_sigmoid_in_kernel": self.use_beta_sigmoid_in_kernel,
            "allow_neg_eigval": self.allow_neg_eigval,
            "state_v_first": self.state_v_first,
            "cu_seqlens": self.cu_seqlens,
            "use_gate_in_kernel": self.use_gate_in_kernel,
            "A_log": self.A_log,
            "dt_bias": self.dt_bias,
            "state_format": self.state_format,
            "state_block_v": self.state_block_v,
            "w_format": self.w_format,
        }

    def with_(self, **changes: Any) -> Problem:
        """This problem with some fields replaced."""
        return replace(self, **changes)

    def leaves(self) -> dict[str, Tensor]:
        """The differentiable inputs by the name of their gradient (`dq`, ..., `dh0`, `dA_log`, ...)."""
        named = {
            "dq": self.q,
            "dk": self.k,
            "dv": self.v,
            "dg": self.g,
            "dbeta": self.beta,
            "dh0": self.initial_state,
            "dA_log": self.A_log,
            "ddt_bias": self.dt_bias,
        }
        return {name: leaf for name, leaf in named.items() if leaf is not None}


@dataclass(frozen=True)
class Outcome:
    """What a call gave: tensors by name (`o`, `final_state`, gradients). A missing gradient is None."""

    tensors: dict[str, Tensor | None] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Tensor | None:
        return self.tensors.get(name)


def run_op(op: Callable[..., tuple[Tensor, Tensor | None]], problem: Problem) -> Outcome:
    """Runs forward and, when an incoming gradient is given, backward; returns every output and gradient.

    The inputs handed over are fresh leaves that share the problem's storage and strides, so a subject that
    writes into its inputs writes into the problem's: digest before and after to see it.

    Raises:
        Whatever the op raises.
    """
    fresh = {
        name: leaf.detach().requires_grad_(problem.do is not None or problem.dht is not None)
        for name, leaf in problem.leaves().items()
    }
    options = problem.options()
    options["initial_state"] = fresh.get("dh0")
    options["A_log"], options["dt_bias"] = fresh.get("dA_log"), fresh.get("ddt_bias")
    o, final_state = op(fresh["dq"], fresh["dk"], fresh["dv"], fresh["dg"], fresh["dbeta"], **options)
    tensors: dict[str, Tensor | None] = {"o": o, "final_state": final_state}
    pairs = [
        (y, dy) for y, dy in ((o, problem.do), (final_state, problem.dht)) if dy is not None and y is not None
    ]
    if pairs:
        gradients = torch.autograd.grad(
            [y for y, _ in pairs], list(fresh.values()), [dy for _, dy in pairs], allow_unused=True
        )
        tensors.update(zip(fresh, gradients, strict=True))
    return Outcome({k: v.detach() if v is not None else None for k, v in tensors.items()})
