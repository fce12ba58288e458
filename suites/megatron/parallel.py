"""The same weights on one rank and on several: nothing may differ but the rounding of sums that ranks share.

Both sizes run in the same processes: first every rank holds a whole model, then the ranks share one that is
restored from its checkpoint. How far they may be apart is measured, not typed in. Where ranks share a layer,
each rounds its part of a sum to the carrier before the parts are added: the output of a row-parallel
projection, the gradient of the input of a column-parallel one, the gradient of a weight that every rank has
whole. The whole model is run several times with exactly these sums cut at random into as many parts as there
are ranks, each part rounded and then added. The distances of these runs are a sample of what correct ranks
give. The budget of a tensor is `SLACK` times the largest of them, or their mean and `DEVIATIONS` standard
deviations where that is more: few runs of few numbers, a loss or the decays of a few heads, can all come out
lucky. The op itself splits no sum: on its own heads each rank must give the bits that one rank gives.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

import functools
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from kernels.policy import Resolved, policy_from_config
from kernels.quantizers import Sites
from suites.megatron import model as models
from suites.megatron import storage
from suites.megatron.findings import Finding, apart, holds, relative, same_bits, summed
from suites.megatron.request import Request, configuration

Tensor = torch.Tensor

RUNS = 16
"""Runs with sums cut at random."""

SLACK = 2.0
"""For what a sample does not show: two ranks of a small model came within 1.1 times its largest."""

DEVIATIONS = 8.0
"""One in a million draws is further from the mean of sixteen (Student's t, 15 degrees of freedom, 7.6)."""

SUMMED = ("out_proj", "linear_fc2")
"""Modules whose output is a sum over the ranks."""

SHARED = ("in_proj", "linear_fc1", "output_layer")
"""Modules whose input is the same on every rank, so that its gradient is a sum over them."""

WHOLE = ("out_norm.weight",)
"""Weights that every rank has whole and uses for its own heads: the gradient is a sum over the ranks."""


def in_parts(exact: Tensor, ranks: int, generator: torch.Generator) -> Tensor:
    """A sum as ranks make it: cut at random into parts, each rounded to the carrier, added in the carrier.

    The parts have the size that partial sums of independent terms have.

    Args:
        exact: any shape; the sum.
        ranks: how many parts.
        generator: of the parts, on the CPU.
    """
    wide = exact.float()
    size = wide.square().mean().sqrt() / ranks**0.5
    parts = [size * torch.randn(wide.shape, generator=generator).to(wide.device) for _ in range(1, ranks)]
    rest = functools.reduce(torch.sub, parts, wide)
    total: Tensor = functools.reduce(torch.add, [part.to(exact.dtype) for part in (*parts, rest)])
    return total


class Instead(torch.autograd.Function):
    """Another value with the gradient of the first."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, other: Tensor) -> Tensor:
        """The other value."""
        return other

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """The gradient, to the first."""
        return gradients[0], None


@contextmanager
def sums_in_parts(model: Any, ranks: int, generator: torch.Generator) -> Iterator[None]:
    """Within it, the sums that ranks would share are made in parts."""

    def forward(_: Any, __: Any, output: Any) -> Any:
        value, *rest = (output,) if isinstance(output, Tensor) else output
        cut = Instead.apply(value, in_parts(value.detach(), ranks, generator))
        return (cut, *rest) if rest else cut

    def backward(_: Any, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        own = arguments[0].view_as(arguments[0])  # its gradient is this module's alone
        if own.requires_grad:
            own.register_hook(lambda gradient: in_parts(gradient, ranks, generator))
        return own, *arguments[1:]

    hooks = []
    for name, module in model.named_modules():
        last = name.rpartition(".")[2]
        if last in SUMMED:
            hooks.append(module.register_forward_hook(forward))
        if last in SHARED:
            hooks.append(module.register_forward_pre_hook(backward))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@dataclass(frozen=True)
class Measured:
    """What a model gives on one batch.

    Attributes:
        branches: the loss, and the output of every gated delta net on given inputs.
        gradients: of every weight.
    """

    branches: Mapping[str, Tensor]
    gradients: Mapping[str, Tensor]

    def tensors(self) -> dict[str, Tensor]:
        """All of them."""
        return {**self.branches, **self.gradients}


def measured(model: Any, data: models.Batch, inputs: Any) -> Measured:
    """Loss, branch outputs and gradients of a model."""
    loss, gradients = models.loss_and_gradients(model, data)
    return Measured({"loss": loss, **models.branch_outputs(model, inputs)}, gradients)


def in_random_parts(model: Any, data: models.Batch, inputs: Any, ranks: int, seed: int) -> Measured:
    """The same, with the sums that ranks would share made in parts."""
    generator = torch.Generator().manual_seed(seed)
    with sums_in_parts(model, ranks, generator):
        found = measured(model, data, inputs)
    gradients = {
        name: in_parts(gradient, ranks, generator) if name.endswith(WHOLE) else gradient
        for name, gradient in found.gradients.items()
    }
    return Measured(found.branches, gradients)


def budgets_of(expected: Measured, runs: Sequence[Measured]) -> dict[str, float]:
    """Name of a tensor -> the largest distance that passes, from its distances among the runs."""
    found = {}
    for name, tensor in expected.tensors().items():
        distances = [relative(tensor, run.tensors()[name]) for run in runs]
        spread = statistics.mean(distances) + DEVIATIONS * statistics.stdev(distances)
        found[name] = max(SLACK * max(distances), spread)
    return found


@dataclass(frozen=True)
class Call:
    """A call of an op: positional arguments, options, and its output `[B, T, heads, V]`."""

    arguments: tuple[Any, ...]
    options: Mapping[str, Any]
    output: Tensor


def op_calls(model: Any, inputs: Any) -> dict[str, Call]:
    """Name of each gated delta net -> the call of its op on given arguments."""
    found = {}
    for name, net in models.gated_delta_nets(model).items():
        op = net.gated_delta_rule
        seen: list[Call] = []

        def watched(*arguments: Any, op: Any = op, seen: list[Call] = seen, **options: Any) -> Any:
            output = op(*arguments, **options)
            seen.append(Call(arguments, options, output[0]))
            return output

        net.gated_delta_rule = watched
        arguments, options = inputs[name]
        with torch.no_grad():
            net(*arguments, **options)
        net.gated_delta_rule = op
        (found[name],) = seen
    return found


def own_heads(value: Any) -> Any:
    """The heads of this rank, of a tensor `[B, T, heads, ...]` or of every tensor among options."""
    if isinstance(value, Mapping):
        return {name: own_heads(held) for name, held in value.items()}
    if not (isinstance(value, Tensor) and value.dim() > 2):
        return value
    return value.chunk(models.ranks(), dim=2)[models.rank()].contiguous()


@dataclass(frozen=True)
class Whole:
    """What one rank alone gives, and how far several may be from it.

    Attributes:
        inputs: the arguments of every gated delta net.
        expected: what the model gives.
        budgets: tensor -> largest relative L2 distance that passes.
        calls: gated delta net -> what its op was called with, and what it gave.
    """

    inputs: Any
    expected: Measured
    budgets: Mapping[str, float]
    calls: Mapping[str, Call]


def whole_model(request: Request, data: models.Batch, weights: str, slopes: str) -> Whole:
    """Measures the model on one rank; leaves its weights and its gradients as checkpoints in two folders."""
    with models.one_rank():
        model = models.build(1)
        storage.save(model, weights)
        inputs = models.branch_inputs(model, data)
        request.adapter.convert(model, configuration(request.sites), verbose=False)
        expected = measured(model, data, inputs)
        ranks = request.tensor_parallel
        runs = [in_random_parts(model, data, inputs, ranks, seed) for seed in range(RUNS)]
        calls = op_calls(model, inputs)
        request.adapter.revert(model)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(expected.gradients[name])
        storage.save(model, slopes)
    return Whole(inputs, expected, budgets_of(expected, runs), calls)


@contextmanager
def products_summed_in_fp32() -> Iterator[None]:
    """Within it, a matrix product that one GPU makes in parts adds them in fp32: only ranks round parts."""
    switches = torch.backends.cuda.matmul
    before = switches.allow_bf16_reduced_precision_reduction
    switches.allow_bf16_reduced_precision_reduction = False
    try:
        yield
    finally:
        switches.allow_bf16_reduced_precision_reduction = before


def parallel(request: Request) -> Iterator[Finding]:
    """Several ranks give what one gives with the same weights: loss, branch outputs, gradients."""
    with products_summed_in_fp32():
        yield from compared(request)


def compared(request: Request) -> Iterator[Finding]:
    """The findings of `parallel`."""
    data = models.batch()
    with storage.shared_folder() as weights, storage.shared_folder() as slopes:
        whole = whole_model(request, data, weights, slopes)
        model, gradients = request.build(seed=97), request.build(seed=96)
        yield from storage.restored(model, weights)
        yield from storage.restored(gradients, slopes)
    request.adapter.convert(model, configuration(request.sites), verbose=False)
    own = {name: own_part(tensor, request) for name, tensor in whole.expected.branches.items()}
    inputs = {name: ((own_part(first, request), *more), options) for name, ((first, *more), options) in
              whole.inputs.items()}  # fmt: skip
    actual, budgets = measured(model, data, inputs), whole.budgets
    ranks = f"{request.tensor_parallel} ranks give what one gives"
    for name, tensor in actual.branches.items():
        yield close(f"{name}: {ranks}", relative(own[name], tensor), budgets[name])
    for name, net in models.gated_delta_nets(model).items():
        call = whole.calls[name]
        heads = net.gated_delta_rule(*map(own_heads, call.arguments), **own_heads(call.options))[0]
        yield same_bits(f"{name}: the op on a rank's heads", own_heads(call.output), heads, "as on one rank")
    expected = dict(gradients.named_parameters())
    for name, parameter in model.named_parameters():
        gradient = actual.gradients[name]
        if name.endswith(WHOLE) or (
            request.sequence_parallel and getattr(parameter, models.SPLIT_TOKENS, False)
        ):
            gradient = summed(gradient.float())
        distance = apart(expected[name], gradient)
        yield close(f"{name}: gradient, {ranks}", distance, budgets[name])


def own_part(tensor: Tensor, request: Request) -> Tensor:
    """The tokens of a tensor `[T, ...]` that this rank has: all, but for sequence parallelism."""
    if not (request.sequence_parallel and tensor.dim()):
        return tensor
    return tensor.chunk(models.ranks())[models.rank()].contiguous()


def close(what: str, distance: float, budget: float) -> Finding:
    """A distance that is within its budget."""
    because = f"relative L2 {distance:.3g}, budget {budget:.3g} from {RUNS} runs with sums in parts"
    return Finding(what, distance, budget, because)


def reshard(request: Request) -> Iterator[Finding]:
    """Weights and edited policies pass from one rank to several and back through a checkpoint, unchanged."""
    first = Resolved(Sites("int8", None), policy_from_config({"state": {"block_v": 16}}))
    last = Resolved(Sites(None, "e4m3"), policy_from_config({"state": {"block_v": 128}}))
    policy_of = request.adapter.policy_of
    with storage.shared_folder() as there, storage.shared_folder() as back:
        with models.one_rank():
            before = converted(request, models.build(1), "both")
            policy_of(nets(before)[0]).resolved = first
            storage.save(before, there)
        shared = converted(request, request.build(seed=95), "none")
        yield from storage.restored(shared, there)
        got = [policy_of(net).resolved for net in nets(shared)]
        want = [policy_of(net).resolved for net in nets(before)]
        yield holds("policies pass from one rank to several", got == want, f"{[p.to_json() for p in got]}")
        policy_of(nets(shared)[-1]).resolved = last
        storage.save(shared, back)
        with models.one_rank():
            after = converted(request, models.build(1, seed=94), "none")
            yield from storage.restored(after, back)
    got = [policy_of(net).resolved for net in nets(after)]
    want = [policy_of(net).resolved for net in nets(shared)]
    yield holds("policies pass from several ranks to one", got == want, f"{[p.to_json() for p in got]}")
    weights = dict(after.named_parameters())
    for name, parameter in before.named_parameters():
        yield same_bits(f"{name}: to {request.tensor_parallel} ranks and back", parameter, weights[name], "")


def nets(model: Any) -> list[Any]:
    """The gated delta nets of a model."""
    return list(models.gated_delta_nets(model).values())


def converted(request: Request, model: Any, sites: str) -> Any:
    """A model that was converted."""
    request.adapter.convert(model, configuration(sites), verbose=False)
    return model
