"""The stages of a forward: each rounding is the reference's, given what it rounds; what the backward makes
again is what the forward had; W is quantized once."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernels.gdn import chunk_gated_delta_rule, core, stages
from kernels.gdn.chunks import cut_into_chunks
from kernels.gdn.prepare import prepare_kernel, solve_kernel
from kernels.gdn.stages import by_token
from kernels.options import CHUNK_SIZE
from qualify.problem import Problem
from references.gdn_chunk import gdn_chunk
from references.qdq import qdq_state, qdq_w
from suites.oracle import op_options
from suites.selfcheck.gdn.inputs import exact_problem, random_problem, run

Tensor = torch.Tensor

CELLS = (
    "dtype:bf16,sites:both,block_v:16,packing:empty_middle,length:65,heads:20x24,grouping:hv1,layout:vk",
    "dtype:fp32,sites:both,format:int8,block_v:32,length:65,heads:16x40,grouping:hv1,initial:zero",
)


def stages_of(problem: Problem) -> dict[str, Tensor]:
    return stages(problem.q, problem.k, problem.v, problem.g, problem.beta, **problem.options())


@pytest.mark.parametrize("cell", CELLS)
def test_each_site_gives_the_reference_of_what_it_sees(cell: str) -> None:
    problem = random_problem(cell)
    found = stages_of(problem)
    assert problem.state_format is not None
    rounded = qdq_state(found["state_raw"], block_v=problem.state_block_v, fmt=problem.state_format)
    assert torch.equal(found["state_q"], rounded)
    assert torch.equal(found["w_q"], qdq_w(found["w"]))
    assert not torch.equal(found["state_q"], found["state_raw"])
    assert not torch.equal(found["w_q"], found["w"])
    assert found["w"].dtype == found["w_q"].dtype == problem.carrier
    final = found["state_q"][:, :, -1]
    tensors = (problem.q, problem.k, problem.v, problem.g, problem.beta)
    _, returned = chunk_gated_delta_rule(*tensors, **problem.options())
    assert returned is not None
    assert torch.equal(returned.mT if problem.state_v_first else returned, final)


def test_stages_are_those_of_the_oracle_where_only_the_sites_round() -> None:
    problem = exact_problem(
        "dtype:bf16,sites:both,block_v:16,packing:single,length:65,heads:24x40,grouping:hv1,layout:kv,initial:given"
    )
    found = stages_of(problem)
    expected: dict[str, Tensor] = {}
    gdn_chunk(
        problem.q, problem.k, problem.v, problem.g, problem.beta, problem.initial_state,
        stages=expected, **op_options(problem),
    )  # fmt: skip
    for name, same in {
        "w": "w",
        "w_q": "w_rounded",
        "u": "u",
        "v_new": "v_new",
        "g_cumsum": "g_cumsum",
    }.items():
        assert torch.equal(found[name].double(), expected[same]), name
    assert torch.equal(found["state_q"][:, :, 0].double(), expected["initial_rounded"])
    assert torch.equal(found["state_raw"][:, :, 1:].double(), expected["state_out"].transpose(1, 2))
    assert torch.equal(found["state_q"][:, :, 1:].double(), expected["state_out_rounded"].transpose(1, 2))


class Spy:
    """A kernel that notes the options of its launches."""

    def __init__(self, kernel: Any, launches: list[dict[str, Any]]) -> None:
        self.kernel, self.launches = kernel, launches

    def __getitem__(self, grid: Any) -> Any:
        def launch(*arguments: Any, **options: Any) -> None:
            self.launches.append(options)
            self.kernel[grid](*arguments, **options)

        return launch


def test_w_is_solved_and_quantized_once_and_the_backward_makes_the_states_of_the_forward_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problem = random_problem("dtype:bf16,sites:both,block_v:16,length:65,heads:16x24,grouping:hv1")
    prepared: list[dict[str, Any]] = []
    solved: list[dict[str, Any]] = []
    passes: list[core.StatePass] = []
    given: list[Tensor] = []
    original = core.state_pass

    def noted(call: core.Call, k: Tensor, made: core.Prepared, *rest: Any, **options: Any) -> core.StatePass:
        given.append(made.w)
        passes.append(original(call, k, made, *rest, **options))
        return passes[-1]

    monkeypatch.setattr(core, "prepare_kernel", Spy(prepare_kernel, prepared))
    monkeypatch.setattr(core, "solve_kernel", Spy(solve_kernel, solved))
    monkeypatch.setattr(core, "state_pass", noted)
    run(problem)
    assert [(o["WRITE_W"], o["W_FORMAT"]) for o in prepared] == [(True, "e4m3"), (False, "none")]
    assert len(solved) == 1
    forward, backward = passes
    assert torch.equal(forward.states, backward.states)
    assert torch.equal(forward.v_new, backward.v_new)
    assert torch.equal(given[0], given[1])
    w = stages_of(problem)["w"]
    assert torch.equal(
        by_token(cut_into_chunks(w.shape[0], w.shape[1], None), given[0].mT, w.shape), qdq_w(w)
    )


def test_the_rounded_w_is_what_is_saved_and_nothing_is_saved_of_w_without_its_site() -> None:
    problem = random_problem("dtype:bf16,sites:both,block_v:16,length:17,heads:16x24,grouping:hv1")
    w_q = stages_of(problem)["w_q"]
    chunks = cut_into_chunks(w_q.shape[0], w_q.shape[1], None)
    shape = (chunks.count, w_q.shape[2], CHUNK_SIZE, w_q.shape[3])

    def saved(changed: Problem) -> list[Tensor]:
        kept: list[Tensor] = []

        def pack(x: Tensor) -> Tensor:
            kept.append(x)
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            run(changed)
        inputs = {x.data_ptr() for x in changed.leaves().values()}
        return [x for x in kept if x.shape == shape and x.data_ptr() not in inputs]

    (found,) = saved(problem)
    assert torch.equal(by_token(chunks, found.mT, w_q.shape), w_q)
    assert saved(problem.with_(w_format=None)) == []
