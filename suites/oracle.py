"""The expected outcome of a problem: the fp64 chunk oracle, in-kernel activations and gradients included."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch

from qualify.problem import Outcome, Problem
from references.arithmetic import Arithmetic
from references.gdn_chunk import gdn_chunk
from references.semantics import Semantics

Tensor = torch.Tensor

NORM_EPSILON = 1e-6
"""Added to the sum of squares before the root, as in FLA's l2norm."""


def expected(
    problem: Problem,
    *,
    semantics: Semantics | None = None,
    arithmetic: Arithmetic | None = None,
    stages: dict[str, Tensor] | None = None,
    op: Callable[..., tuple[Tensor, Tensor]] = gdn_chunk,
    gradients: Collection[str] | None = None,
    **options: Any,
) -> Outcome:
    """What the contract (or a departure from it) gives for a problem, in fp64.

    Args:
        problem: inputs, options and incoming gradients.
        semantics: a named wrong answer's fields; None is the contract.
        arithmetic: declared precision; None is exact.
        stages: receives the oracle's intermediate tensors, detached.
        op: the oracle.
        gradients: names of those that are wanted; None is all. The others are left out.
        options: further options of the oracle (`offsets`, `entry_states`, ...).

    Returns:
        The eight tensors and, with the fused gate, `dA_log` and `ddt_bias`; fp64, in the problem's layouts.
        `final_state` is None when the problem does not ask for it. A gradient is None when neither incoming
        gradient is given or the input is absent.
    """
    wanted = problem.leaves().keys() if gradients is None else set(gradients)
    leaves = {n: x.detach().double().requires_grad_(n in wanted) for n, x in problem.leaves().items()}
    with torch.enable_grad():
        q, k, g, beta = activated(problem, leaves)
        o, final_state = op(
            q,
            k,
            leaves["dv"],
            g,
            beta,
            leaves.get("dh0"),
            **op_options(problem),
            **_given(semantics=semantics, arithmetic=arithmetic, stages=stages),
            **options,
        )
    if stages is not None:
        stages.update({name: x.detach() for name, x in stages.items()})
    tensors: dict[str, Tensor | None] = {
        "o": o.detach(),
        "final_state": final_state.detach() if problem.output_final_state else None,
    }
    tensors.update(_gradients(problem, leaves, o, final_state))
    return Outcome(tensors)


def op_options(problem: Problem) -> dict[str, Any]:
    """The oracle's keyword arguments for a problem, its activations already taken care of."""
    return {
        "scale": problem.scale,
        "cu_seqlens": problem.cu_seqlens,
        "state_v_first": problem.state_v_first,
        "state_format": problem.state_format,
        "state_block_v": problem.state_block_v,
        "w_format": problem.w_format,
        "w_dtype": problem.carrier,
    }


def activated(problem: Problem, leaves: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, g and beta after the activations that the problem asks the op to do, in the leaves' precision."""
    q, k, g, beta = (leaves[name] for name in ("dq", "dk", "dg", "dbeta"))
    if problem.use_qk_l2norm_in_kernel:
        q, k = (x * (x.square().sum(-1, keepdim=True) + NORM_EPSILON).rsqrt() for x in (q, k))
    if problem.use_gate_in_kernel:
        raw = g + leaves["ddt_bias"].reshape(-1) if "ddt_bias" in leaves else g
        g = -leaves["dA_log"].reshape(-1).exp() * softplus(raw)
    if problem.use_beta_sigmoid_in_kernel:
        beta = beta.sigmoid() * (2.0 if problem.allow_neg_eigval else 1.0)
    return q, k, g, beta


def softplus(x: Tensor) -> Tensor:
    """`log(1 + exp(x))` without a threshold above which it turns linear."""
    return torch.logaddexp(x, torch.zeros_like(x))


def _gradients(
    problem: Problem, leaves: dict[str, Tensor], o: Tensor, final_state: Tensor
) -> dict[str, Tensor | None]:
    dht = problem.dht if problem.output_final_state else None
    leaves = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
    given = [(y, dy) for y, dy in ((o, problem.do), (final_state, dht)) if dy is not None]
    pairs = [(y, dy.double()) for y, dy in given if y.requires_grad]
    if not pairs:
        return dict.fromkeys(leaves)
    found = torch.autograd.grad(
        [y for y, _ in pairs], list(leaves.values()), [dy for _, dy in pairs], allow_unused=True
    )
    return {
        name: torch.zeros_like(leaf) if dx is None else dx
        for (name, leaf), dx in zip(leaves.items(), found, strict=True)
    }


def _given(**options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}
