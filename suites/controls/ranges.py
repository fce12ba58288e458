"""Faults of decay, precision, dynamic range and activations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

from suites.controls.control import Control
from suites.subjects.eager import Call, EagerGDN, Notes

Tensor = torch.Tensor


def _read_in_carrier(self: EagerGDN, n: Notes) -> Tensor:
    seen = self.dot(n.q, n.states, n)
    seen = seen.half().float() if n.carrier == torch.float16 else seen
    return (n.options.scale * self.decay(n.G))[..., None] * seen + self.dot(n.p, n.vn, n)


def _bias_written(self: EagerGDN, g: Tensor, A_log: Tensor, dt_bias: Tensor | None) -> Tensor:
    gate = EagerGDN.gate(self, g, A_log, dt_bias)
    for x in (A_log, dt_bias):
        if x is not None:
            x.detach().mul_(1 + 2.0**-4)
    return gate


def _no_update_decay(self: EagerGDN, n: Notes) -> Tensor:
    return torch.ones_like(n.G_last)


def _by_column(self: EagerGDN, state: Tensor, vn: Tensor, c: int, n: Notes) -> Tensor:
    columns = torch.arange(n.V, device=state.device) % 4
    rows = (n.at.C - 1 - 2 * columns).clamp_min(0)
    decay = self.decay(n.G[c][:, rows])[:, None, :]
    return decay * state + self.dot(n.kd[c].mT, vn, n)


def _restarted(self: EagerGDN, g: Tensor, n: Notes) -> Tensor:
    blocks = F.pad(g, (0, -g.shape[-1] % 16)).reshape(*g.shape[:-1], -1, 16)
    return blocks.cumsum(-1).flatten(-2)[..., : g.shape[-1]]


def _factored(self: EagerGDN, G: Tensor, n: Notes) -> Tensor:
    keep = torch.ones(n.at.C, n.at.C, dtype=torch.bool, device=G.device).tril()
    product = self.decay(G)[..., :, None] * self.decay(-G)[..., None, :]
    return torch.where(keep, product, torch.zeros_like(product))


def _masked_after(self: EagerGDN, G: Tensor, n: Notes) -> Tensor:
    difference = G[..., :, None] - G[..., None, :]
    keep = torch.ones(n.at.C, n.at.C, dtype=G.dtype, device=G.device).tril()
    return self.decay(difference) * keep


def _base_two(self: EagerGDN, G: Tensor) -> Tensor:
    return G.exp2()


def _bf16_gate(self: EagerGDN, g: Tensor, n: Notes) -> Tensor:
    return EagerGDN.cumulate(self, g.bfloat16().to(g.dtype), n)


def _bf16_sum(self: EagerGDN, g: Tensor, n: Notes) -> Tensor:
    return EagerGDN.cumulate(self, g, n).bfloat16().to(g.dtype)


def _sum_in_own_dtype(self: EagerGDN, g: Tensor, n: Notes) -> Tensor:
    return EagerGDN.cumulate(self, g, n).to(n.options.g.dtype).to(g.dtype)


def _exclusive(self: EagerGDN, g: Tensor, n: Notes) -> Tensor:
    return EagerGDN.cumulate(self, g, n) - g


def _fp16_state(self: EagerGDN, state: Tensor, c: int, n: Notes) -> Tensor:
    return EagerGDN.corrected(self, state.half().float(), c, n)


def _fp16_state_gradient(self: EagerGDN, ds: Tensor, dvn: Tensor, c: int, n: Notes) -> Tensor:
    return EagerGDN.state_gradient(self, ds.half().float(), dvn, c, n)


def _bf16_state(self: EagerGDN, state: Tensor, vn: Tensor, c: int, n: Notes) -> Tensor:
    return EagerGDN.update(self, state, vn, c, n).bfloat16().to(state.dtype)


def _dg_in_bf16(self: EagerGDN, dcum: Tensor, n: Notes) -> Tensor:
    return EagerGDN.uncumulate(self, dcum.bfloat16().to(dcum.dtype), n)


def _query_clamped(self: EagerGDN, call: Call) -> None:
    call.q = call.q.clamp(-4.0, 4.0)
    EagerGDN.prepare(self, call)


def _root_of_epsilon(self: EagerGDN, x: Tensor) -> Tensor:
    y = x.float()
    length: Tensor = y.square().sum(-1, keepdim=True).sqrt()
    return (y / (length + 1e-6)).to(x.dtype)


def _norm_detached(self: EagerGDN, x: Tensor) -> Tensor:
    y = x.float()
    return (y * (y.square().sum(-1, keepdim=True) + 1e-6).rsqrt().detach()).to(x.dtype)


def _never_negative(self: EagerGDN, beta: Tensor, allow_neg_eigval: bool) -> Tensor:
    return EagerGDN.strength(self, beta, False)


def _bias_behind(self: EagerGDN, g: Tensor, A_log: Tensor, dt_bias: Tensor | None) -> Tensor:
    bias = 0.0 if dt_bias is None else dt_bias.float().reshape(-1)
    return -A_log.float().reshape(-1).exp() * (F.softplus(g.float()) + bias).clamp_min(0.0)


def _gate_detached(self: EagerGDN, g: Tensor, A_log: Tensor, dt_bias: Tensor | None) -> Tensor:
    return EagerGDN.gate(self, g, A_log.detach(), dt_bias)


def _bias_in_dtype_of_gate(self: EagerGDN, g: Tensor, A_log: Tensor, dt_bias: Tensor | None) -> Tensor:
    return EagerGDN.gate(self, g if dt_bias is None else g + dt_bias.to(g.dtype), A_log, None)


def _zero_scale_is_default(self: EagerGDN, call: Call) -> None:
    call.scale = call.scale or call.k.shape[-1] ** -0.5
    EagerGDN.prepare(self, call)


def _short_constant(self: EagerGDN, G: Tensor) -> Tensor:
    return torch.exp2(G * 1.4427)


def _o_cut(self: EagerGDN, n: Notes, v: Tensor) -> tuple[Tensor, Tensor]:
    o, state = EagerGDN.outputs(self, n, v)
    exact = self.scatter(n.o, v.float(), n)
    too_large = o.float().abs() > exact.abs()
    cut = torch.nextafter(o, torch.zeros_like(o))
    return torch.where(too_large, cut, o), state


GRADIENTS = ("dq", "dk", "dv", "dg", "dbeta")
"""What `EagerGDN.results` begins with."""


def _gradient_cut(name: str) -> Callable[..., Any]:
    """Results of which the gradient `name` (of `GRADIENTS`) keeps the upper bits of its sum."""

    def results(self: EagerGDN, n: Notes, inputs: tuple[Tensor | None, ...]) -> Any:
        found: list[Tensor | None] = list(EagerGDN.results(self, n, inputs))
        place = GRADIENTS.index(name)
        rounded = found[place]
        assert rounded is not None
        exact = self.scatter(getattr(n, name), rounded.float(), n)
        cut = torch.nextafter(rounded, torch.zeros_like(rounded))
        found[place] = torch.where(rounded.float().abs() > exact.abs(), cut, rounded)
        return tuple(found)

    return results


def _dbeta_through_carrier(self: EagerGDN, n: Notes, inputs: tuple[Tensor | None, ...]) -> Any:
    dq, dk, dv, dg, dbeta, dh0 = EagerGDN.results(self, n, inputs)
    return dq, dk, dv, dg, dbeta.to(n.carrier).to(dbeta.dtype), dh0


class _SavedShort(torch.autograd.Function):
    """A sigmoid whose result is kept for the backward in 16 bits."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.float().sigmoid()
        ctx.save_for_backward(y.bfloat16())
        ctx.dtype = x.dtype
        return y

    @staticmethod
    def backward(ctx: Any, *dy: Tensor) -> Tensor:
        y = ctx.saved_tensors[0].float()
        dx: Tensor = (dy[0] * y * (1 - y)).to(ctx.dtype)
        return dx


def _saved_short(self: EagerGDN, beta: Tensor, allow_neg_eigval: bool) -> Tensor:
    y: Tensor = _SavedShort.apply(beta)  # type: ignore[no-untyped-call]
    return y * (2.0 if allow_neg_eigval else 1.0)


RANGES = (
    Control(
        "no_update_decay",
        "terms",
        "the carried state does not decay",
        {"over_chunk": _no_update_decay},
        tier="whole",
        looks=("decay",),
    ),
    Control(
        "decay_by_column",
        "device",
        "the decay of a chunk is looked up at a row that depends on the thread",
        {"update": _by_column},
        tier="whole",
        looks=("decay",),
    ),
    Control(
        "sum_restarted",
        "terms",
        "the running sum of gates starts again with every block of 16 rows",
        {"cumulate": _restarted},
        tier="whole",
        looks=("decay",),
    ),
    Control(
        "factored_decay",
        "range",
        "exp(G_i - G_j) is made of two factors, one of which overflows",
        {"relative_decay": _factored},
        tier="whole",
        looks=("strong_gates",),
    ),
    Control(
        "masked_after_exp",
        "range",
        "the mask comes after the exponential, and infinity times zero is NaN",
        {"relative_decay": _masked_after},
        tier="whole",
        looks=("strong_gates",),
    ),
    Control(
        "base_two",
        "terms",
        "natural logarithms are taken for binary ones",
        {"decay": _base_two},
        tier="whole",
        looks=("decay",),
    ),
    Control(
        "gate_exclusive",
        "terms",
        "the running sum leaves the token's own gate out",
        {"cumulate": _exclusive},
        tier="whole",
        looks=("decay",),
    ),
    Control(
        "gate_in_bf16",
        "range",
        "the gate arrives in bf16",
        {"cumulate": _bf16_gate},
        tier="whole",
        looks=("decay",),
    ),
    Control(
        "gate_sum_in_bf16",
        "range",
        "the running sum of gates is stored in bf16",
        {"cumulate": _bf16_sum},
        tier="whole",
        looks=("decay",),
    ),
    Control(
        "gate_sum_in_own_dtype",
        "range",
        "gates that are given in the carrier are summed in it",
        {"cumulate": _sum_in_own_dtype},
        tier="whole",
        looks=("decay_carrier",),
        unseen={"fp32": "the carrier is fp32"},
    ),
    Control(
        "state_through_fp16",
        "range",
        "the state is narrowed to fp16 in front of a matmul and overflows",
        {"corrected": _fp16_state},
        tier="whole",
        looks=("large_state",),
    ),
    Control(
        "state_gradient_through_fp16",
        "range",
        "a tiny gradient of the state is narrowed to fp16 and vanishes",
        {"state_gradient": _fp16_state_gradient},
        tier="whole",
        looks=("tiny_dht",),
    ),
    Control(
        "state_carried_in_bf16",
        "range",
        "the state between chunks is kept in bf16",
        {"update": _bf16_state},
        looks=("probe_write", "plain"),
    ),
    Control(
        "dg_summed_in_bf16",
        "range",
        "what cancels in dg passes through a bf16 buffer",
        {"uncumulate": _dg_in_bf16},
        tier="whole",
        looks=("strong_gates",),
    ),
    Control(
        "norm_epsilon",
        "range",
        "epsilon is added to the norm, not to its square",
        {"normalise": _root_of_epsilon},
        tier="whole",
        looks=("small", "fused"),
    ),
    Control(
        "norm_gradient_missing",
        "terms",
        "the norm is taken for a constant in the backward",
        {"normalise": _norm_detached},
        tier="whole",
        looks=("fused",),
    ),
    Control(
        "negative_eigenvalues_ignored",
        "configuration",
        "the option is accepted and nothing happens",
        {"strength": _never_negative},
        tier="whole",
        looks=("fused",),
    ),
    Control(
        "bias_behind_softplus",
        "terms",
        "the gate's bias is added after the softplus",
        {"gate": _bias_behind},
        tier="whole",
        looks=("fused",),
    ),
    Control(
        "a_log_gradient_missing",
        "terms",
        "a parameter behind the gate is detached",
        {"gate": _gate_detached},
        tier="whole",
        looks=("fused",),
    ),
    Control(
        "output_cut",
        "range",
        "the carrier's upper bits are taken as they are, instead of rounding to it",
        {"outputs": _o_cut},
        looks=("rounding",),
        unseen={"fp32": "what is computed in fp32 is stored as it is"},
    ),
    Control(
        "key_gradient_cut",
        "range",
        "the gradient of a key keeps the carrier's upper bits of its fp32 sum",
        {"results": _gradient_cut("dk")},
        looks=("rounding",),
        unseen={"fp32": "what is computed in fp32 is stored as it is"},
    ),
    Control(
        "gate_gradient_cut",
        "range",
        "the gradient of a narrow gate keeps the upper bits of its fp32 sum",
        {"results": _gradient_cut("dg")},
        looks=("rounding",),
        unseen={"fp32": "gates as wide as the sum store it as it is"},
    ),
    Control(
        "value_gradient_cut",
        "range",
        "the gradient of a value keeps the carrier's upper bits of its fp32 sum",
        {"results": _gradient_cut("dv")},
        looks=("rounding",),
        unseen={"fp32": "what is computed in fp32 is stored as it is"},
    ),
    Control(
        "sigmoid_saved_in_bf16",
        "range",
        "what a sigmoid of beta gave is kept for the backward in the carrier",
        {"strength": _saved_short},
        looks=("strength",),
    ),
    Control(
        "dbeta_through_carrier",
        "range",
        "the gradient of an fp32 beta is made in a buffer of the carrier",
        {"results": _dbeta_through_carrier},
        tier="whole",
        looks=("plain",),
        unseen={"fp32": "the carrier is fp32 as well"},
    ),
    Control(
        "short_log2_of_e",
        "range",
        "the exponential is one of base two, and the constant of the base has five digits",
        {"decay": _short_constant},
        looks=("decay",),
    ),
    Control(
        "bias_added_in_dtype_of_gate",
        "range",
        "the gate's bias is cast to the dtype of a raw gate, and the sum is rounded to it",
        {"gate": _bias_in_dtype_of_gate},
        looks=("gate_carrier",),
        unseen={"fp32": "the carrier is fp32 as well"},
    ),
    Control(
        "zero_scale_is_default",
        "configuration",
        "a scale of zero is taken for one that was left out",
        {"prepare": _zero_scale_is_default},
        looks=("arguments",),
    ),
    Control(
        "query_clamped",
        "range",
        "a clamp that normalised queries never meet",
        {"prepare": _query_clamped},
        tier="whole",
        looks=("large_query",),
    ),
    Control(
        "read_in_fp16",
        "range",
        "what is read from a state is narrowed to an fp16 carrier before it is scaled",
        {"read": _read_in_carrier},
        tier="whole",
        looks=("large_read",),
        unseen={"fp32": "the carrier holds it", "bf16": "the carrier has the range of fp32"},
    ),
    Control(
        "gate_parameters_written",
        "memory",
        "parameters behind the gate are initialised again where they lie",
        {"gate": _bias_written},
        looks=("repeat",),
    ),
)
"""Gates, large and small numbers, activations bring them out."""
