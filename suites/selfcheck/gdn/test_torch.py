"""The op inside torch: repeatable, checkpointed, compiled, under autocast, on views; no second derivative."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from kernels.gdn import chunk_gated_delta_rule
from qualify.problem import Outcome, Problem, run_op
from suites.selfcheck.gdn.inputs import different_bits, random_problem, run, same

Tensor = torch.Tensor

CELL = "dtype:bf16,sites:both,block_v:16,length:17,heads:20x24,grouping:hv1,fused:all"


@cache
def baseline() -> tuple[Problem, Outcome]:
    problem = random_problem(CELL)
    return problem, run(problem)


def test_repeated_calls_are_bit_equal_and_leave_their_inputs_as_they_were() -> None:
    problem, once = baseline()
    before = {name: x.clone() for name, x in vars(problem).items() if isinstance(x, Tensor)}
    assert different_bits(run(problem), once) == []
    assert all(torch.equal(getattr(problem, name), x) for name, x in before.items())


def test_checkpointing_changes_no_bit() -> None:
    problem, once = baseline()

    def op(*tensors: Tensor, **options: Any) -> tuple[Tensor, Tensor | None]:
        made: tuple[Tensor, Tensor | None] = checkpoint(
            partial(chunk_gated_delta_rule, **options), *tensors, use_reentrant=False
        )
        return made

    assert different_bits(run_op(op, problem), once) == []


def compiled(problem: Problem) -> Outcome:
    """The outcome of the op compiled as one graph."""
    return run_op(torch.compile(chunk_gated_delta_rule, backend="aot_eager", fullgraph=True), problem)


def test_a_compiled_call_is_one_graph_with_the_same_bits() -> None:
    torch.compiler.reset()
    problem, once = baseline()
    assert different_bits(compiled(problem), once) == []


def test_a_compiled_call_is_compiled_again_for_other_sizes_and_without_what_is_optional() -> None:
    torch.compiler.reset()
    cell = "dtype:fp32,sites:none,packing:one_token,initial:zero,final:dropped,grouping:hv1"
    for sizes in ("length:1,heads:16x16", "length:2,heads:20x24"):
        problem = random_problem(f"{cell},{sizes}")
        assert different_bits(compiled(problem), run(problem)) == []


def test_fake_tensors_have_the_shapes_and_dtypes_of_real_ones() -> None:
    problem, _ = baseline()
    state = problem.initial_state
    assert state is not None
    tensors = (problem.q, problem.k, problem.v, problem.g.float(), problem.beta.float(), state)
    options = (None, 1.0, True, False, "e4m3", 16, "e4m3", "tf32")
    fake = torch.ops.gdn_qualify.chunk_forward(*(x.to("meta") for x in tensors), *options)
    real = torch.ops.gdn_qualify.chunk_forward(*tensors, *options)
    assert [(x.shape, x.dtype) for x in fake] == [(x.shape, x.dtype) for x in real]


def test_autocast_changes_no_bit() -> None:
    problem, once = baseline()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert different_bits(run(problem), once) == []


def test_views_with_other_strides_change_no_bit() -> None:
    problem, once = baseline()

    def spread(x: Tensor) -> Tensor:
        return torch.stack((x, x + 1), -1)[..., 0]

    names = ("q", "k", "v", "g", "beta", "initial_state", "do", "dht")
    views = {name: spread(getattr(problem, name)) for name in names}
    assert not any(x.is_contiguous() for x in views.values())
    assert different_bits(run(problem.with_(**views)), once) == []


def test_a_second_derivative_is_refused_and_a_first_is_not() -> None:
    problem, _ = baseline()
    v = problem.v.detach().requires_grad_()
    o, _ = chunk_gated_delta_rule(problem.q, problem.k, v, problem.g.float(), problem.beta.float())
    (dv,) = torch.autograd.grad(o.float().sum(), v, create_graph=True)
    with pytest.raises(
        NotImplementedError, match="first-order gradients only, got a request for a second-order"
    ):
        torch.autograd.grad(dv.float().square().sum(), v)


def test_inputs_that_need_no_gradient_get_none() -> None:
    problem, once = baseline()
    v = problem.v.detach().requires_grad_()
    o, final = chunk_gated_delta_rule(problem.q, problem.k, v, problem.g, problem.beta, **problem.options())
    assert final is not None
    assert problem.do is not None
    assert problem.dht is not None
    torch.autograd.backward([o, final], [problem.do, problem.dht])
    assert same(v.grad, once["dv"])
    assert problem.q.grad is None
