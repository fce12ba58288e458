"""What happens inside the chunks, for all chunks of all sequences at once: decays, solve, U, W, scores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from references.arithmetic import Arithmetic
from references.gradients import scaled_gradient, straight_through
from references.packing import Packing, Plan, rows
from references.semantics import Semantics
from references.sites import Sites

Tensor = torch.Tensor

LN_2 = 0.6931471805599453


@dataclass(frozen=True)
class Call:
    """What stays the same for all plans of a call."""

    arithmetic: Arithmetic
    semantics: Semantics
    sites: Sites
    scale: float
    chunk_size: int
    packing: Packing
    given: Mapping[str, Tensor]

    def term(self, x: Tensor, name: str) -> Tensor:
        """`x` where it enters the term `name`: without gradient if the backward pass forgets that term."""
        return x.detach() if name in self.semantics.lost else x

    def stage(self, name: str, plan: Plan, computed: Tensor) -> Tensor:
        """A computed stage, or the value that was given for it, with the gradient of the computed one."""
        if name not in self.given:
            return computed
        value = by_chunk(plan, self.given[name].detach().to(computed.dtype))
        return straight_through(computed, value)


class Chunks(NamedTuple):
    """The inputs of all chunks of a plan: `[M, HV, C, ...]`, zeros in empty slots."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor


class Inside(NamedTuple):
    """What each chunk brings to the state pass and the readout.

    Attributes:
        g_cumsum: `[M, HV, C]` cumulative log decay.
        u, w, w_rounded: `[M, HV, C, V]`, `[M, HV, C, K]` twice.
        v_new: V' where it is given, `[M, HV, C, V]`.
        w_backward: the W at which the backward is linearised, None for the rounded one.
        keys: `[M, HV, C, K]`, `exp(G_last - G) K`.
        carry: `[M, HV]`, `exp(G_last)`.
        attention: `[M, HV, C, C]`, `tril(scale Q K^T exp(G_i - G_j))`.
        read: `[M, HV, C]`, `scale exp(G)`.
    """

    g_cumsum: Tensor
    u: Tensor
    w: Tensor
    w_rounded: Tensor
    w_backward: Tensor | None
    v_new: Tensor | None
    keys: Tensor
    carry: Tensor
    attention: Tensor
    read: Tensor


def gather(call: Call, plan: Plan, inputs: list[Tensor]) -> Chunks:
    """The inputs chunk by chunk, q and k repeated to the value heads."""
    arithmetic, semantics = call.arithmetic, call.semantics
    q, k, v, g, beta = inputs
    value_heads = v.shape[2]
    if semantics.gate_dtype == "bf16":
        g = straight_through(g, g.detach().to(torch.bfloat16).to(g.dtype))
    if semantics.gate_heads == "first":
        g = g[:, :, :1].expand(g.shape)
    if not semantics.dq_scale:
        q = scaled_gradient(q, 1.0 / call.scale)
    if q.shape[2] != value_heads:  # the gradients of the value heads are stored before they are summed
        q, k = (_to_value_heads(arithmetic.store(x), value_heads, semantics.heads) for x in (q, k))
    elif semantics.heads == "first":
        q, k = (_to_value_heads(x, value_heads, "first") for x in (q, k))
    q, k, v = (arithmetic.store(x) for x in (q, k, v))
    g, beta = arithmetic.gates(g), arithmetic.gates(beta)
    return Chunks(*(by_chunk(plan, x) for x in (q, k, v, g, beta)))


def by_chunk(plan: Plan, x: Tensor) -> Tensor:
    """`[B, T, HV, ...]` as `[M, HV, C, ...]`."""
    slots = rows(x.flatten(0, 1), plan.tokens, plan.slots)
    return slots.view(len(slots) // plan.width, plan.width, *x.shape[2:]).transpose(1, 2)


def _to_value_heads(x: Tensor, value_heads: int, mapping: str) -> Tensor:
    heads = x.shape[2]
    if mapping == "grouped":
        return x.repeat_interleave(value_heads // heads, 2) if value_heads != heads else x
    index = torch.arange(value_heads, device=x.device) % heads
    return x.index_select(2, index if mapping == "modulo" else torch.zeros_like(index))


def inside(call: Call, name: int, plan: Plan, chunks: Chunks) -> Inside:
    """Computes everything that does not depend on the state; `name` tells the plans of a call apart."""
    arithmetic, semantics, term = call.arithmetic, call.semantics, call.term
    q, k, v, g, beta = chunks
    cumulative = _cumulative_gate(call, plan, g)
    last = term(arithmetic.total(_last_gate(call, plan, cumulative)), "dg.last")
    lower = torch.ones(plan.width, plan.width, dtype=torch.bool, device=k.device).tril()
    gamma = arithmetic.decay(cumulative.unsqueeze(-1), cumulative.unsqueeze(-2), lower)
    from_start = arithmetic.decay(cumulative)
    to_end = arithmetic.decay(last.unsqueeze(-1), cumulative)

    system_keys = term(k, "dk.system")
    kk = arithmetic.matmul(system_keys, system_keys.mT)
    system = (kk * term(gamma, "dg.system") * term(beta, "dbeta.system").unsqueeze(-1)).tril(-1)
    u_right = arithmetic.scaled(term(beta, "dbeta.u").unsqueeze(-1), v)
    w_decay = term(from_start, "dg.w") if semantics.beta_decay else torch.ones_like(from_start)
    w_right = arithmetic.scaled((term(beta, "dbeta.w") * w_decay).unsqueeze(-1), term(k, "dk.w"))
    if semantics.w_rounded == "right_side":
        w_right = call.sites.w(w_right, (name, "right"))
    inverse = _inverse(call, system)
    u, w = _solve(call, name, inverse, system, u_right, w_right)
    u, w = call.stage("u", plan, u), call.stage("w", plan, w)
    w_rounded = w if semantics.w_rounded == "right_side" else call.sites.w(w, name)

    scores = arithmetic.matmul(term(q, "dq.attention"), term(k, "dk.attention").mT)
    visible = term(gamma, "dg.attention")
    visible = visible if semantics.causal == "inclusive" else visible.tril(-1)
    read = term(from_start, "dg.read") if semantics.read_decay else torch.ones_like(from_start)
    carry = term(arithmetic.decay(last), "dg.carry")
    return Inside(
        g_cumsum=cumulative,
        u=u,
        w=w,
        w_rounded=call.stage("w_rounded", plan, w_rounded),
        w_backward=_backward_w(call, name, inverse, w, w_right),
        v_new=by_chunk(plan, call.given["v_new"].detach().to(u.dtype)) if "v_new" in call.given else None,
        keys=arithmetic.scaled(term(to_end, "dg.update").unsqueeze(-1), term(k, "dk.update")),
        carry=carry if semantics.update_decay else torch.ones_like(carry),
        attention=scores * visible * call.scale,
        read=read * call.scale,
    )


def _cumulative_gate(call: Call, plan: Plan, g: Tensor) -> Tensor:
    semantics = call.semantics
    if semantics.dg_tail == "dropped":
        partial = (plan.lengths < call.chunk_size)[:, None, None]
        is_last = torch.arange(plan.width, device=g.device) == (plan.lengths - 1)[:, None, None]
        g = scaled_gradient(g, (~(partial & is_last)).to(g.dtype))
    cumulative = call.arithmetic.cumsum(g)
    if semantics.gate == "exclusive":
        return cumulative - g
    return cumulative * LN_2 if semantics.gate == "base_two" else cumulative


def _last_gate(call: Call, plan: Plan, cumulative: Tensor) -> Tensor:
    """The cumulative gate that closes each chunk, `[M, HV]`; empty slots add nothing to it."""
    semantics = call.semantics
    last = cumulative[..., -1]
    if semantics.last_gate != 1 or semantics.gate == "exclusive":
        row = (plan.lengths - semantics.last_gate).clamp_min(0)[:, None, None]
        last = cumulative.gather(-1, row.expand(*cumulative.shape[:-1], 1)).squeeze(-1)
    if semantics.dg_tail == "no_last":
        full = (plan.lengths == call.chunk_size)[:, None]
        return scaled_gradient(last, full.to(last.dtype))
    return last


def _inverse(call: Call, system: Tensor) -> Tensor:
    if call.semantics.solve == "exact":
        return call.arithmetic.inverse(system)
    series = torch.eye(system.shape[-1], dtype=system.dtype, device=system.device) - system
    return series if call.semantics.solve == "one_term" else series + system @ system


def _solve(
    call: Call, name: int, inverse: Tensor, system: Tensor, u_right: Tensor, w_right: Tensor
) -> tuple[Tensor, Tensor]:
    arithmetic = call.arithmetic
    if call.semantics.solve_adjoint == "unrounded":
        both = arithmetic.store(arithmetic.matmul(inverse, torch.cat([u_right, w_right], -1)))
        u, w = torch.split(both, [u_right.shape[-1], w_right.shape[-1]], -1)
        return u, w
    with torch.no_grad():
        value = arithmetic.store(arithmetic.matmul(inverse, w_right))
        rounded = call.sites.w(value, (name, "adjoint"))
        right = rounded + system @ rounded  # the right side whose exact solution is the rounded W
    u = arithmetic.store(arithmetic.matmul(inverse, u_right))
    w = arithmetic.store(arithmetic.matmul(inverse, w_right, right=right))
    return u, straight_through(w, value)


def _backward_w(call: Call, name: int, inverse: Tensor, w: Tensor, w_right: Tensor) -> Tensor | None:
    if call.semantics.backward_w == "rounded":
        return None
    if call.semantics.backward_w == "unrounded":
        return w.detach()
    with torch.no_grad():
        inverse, w_right = (x.to(torch.bfloat16).to(x.dtype) for x in (inverse, w_right))
        return call.sites.w(inverse @ w_right, (name, "recomputed"))
