"""The op gives the contract's values and gradients: in every bit where nothing but the sites rounds, and
within budgets that are measured with the oracle where everything rounds."""

from __future__ import annotations

import pytest
import torch

from kernels.gdn import chunk_gated_delta_rule
from suites.selfcheck.gdn.inputs import (
    beyond_budget,
    exact_problem,
    random_problem,
    run,
    wrong_bits,
)

EXACT = (
    "dtype:bf16,sites:both,block_v:16,packing:single,length:65,heads:24x40,grouping:hv1,layout:kv,initial:given",
    "dtype:fp32,sites:both,block_v:32,packing:unequal,length:33,heads:32x48,grouping:hv1,layout:vk,initial:given",
    "dtype:fp16,sites:both,format:int8,block_v:128,packing:batch,length:33,heads:40x136,grouping:hv1,layout:vk",
    "dtype:fp16,sites:state,format:int8,block_v:64,packing:empty_first,length:65,heads:32x72,grouping:hv1,"
    "initial:zero",
    "dtype:fp32,sites:none,packing:one_token,length:2,heads:16x16,grouping:hv2,gradients:state",
    "dtype:bf16,sites:w,packing:empty_last,length:65,heads:40x24,grouping:hv1,initial:zero,gradients:output",
)
"""Every carrier, site, format, block_v, layout and kind of packing; groups of one and two value heads; whole
and partial tiles and chunks; incoming gradients of both outputs and of each alone."""


@pytest.mark.parametrize("cell", EXACT)
def test_only_the_sites_round_and_every_bit_is_right(cell: str) -> None:
    problem = exact_problem(cell)
    assert wrong_bits(problem, run(problem)) == []


BUDGETED = {
    # every fused activation with all gradients, strided inputs, several K tiles, gates in the carrier's dtype
    "dtype:bf16,sites:both,fused:all,strides:views,scalars:carrier,gradients:strided,heads:72x20,length:65,"
    "grouping:hv1,block_v:16": False,
    # exp(-90) at every token: nothing overflows, nothing is NaN
    "dtype:fp32,sites:state,gates:extreme,heads:20x24,length:65,grouping:hv1,block_v:16": False,
    # one chunk from a given state, decay between 1 and exp(-90), four value heads to a key head
    "dtype:fp16,sites:state,gates:mixed,fused:neg,heads:16x40,length:17,grouping:hv4,block_v:32,"
    "scalars:mixed": True,
    # no site rounds: the unrounded op
    "dtype:fp32,sites:none,gates:ordinary,heads:40x24,length:65,grouping:hv1,initial:zero": True,
}
"""Cell -> whether no rounding but that of the final state can flip a code."""


@pytest.mark.parametrize("cell", BUDGETED)
def test_values_and_gradients_are_within_their_budgets(cell: str) -> None:
    problem = random_problem(cell)
    assert beyond_budget(problem, run(problem), smooth=BUDGETED[cell]) == []


def test_ieee_products_are_held_to_ieee_budgets() -> None:
    problem = random_problem("dtype:fp32,sites:none,gates:ordinary,heads:16x16,length:17,grouping:hv1")
    actual = run(problem, input_precision="ieee")
    assert beyond_budget(problem, actual, arithmetic="ieee", smooth=True) == []
    assert actual["dq"] is not None
    actual.tensors["dq"] = actual["dq"] * (1.0 + 2.0**-11)  # as wrong as one TF32 operand
    wrong = beyond_budget(problem, actual, arithmetic="ieee", smooth=True)
    assert [line.partition(":")[0] for line in wrong] == ["dq"]


def test_what_is_not_asked_for_or_does_not_arrive_changes_nothing_else() -> None:
    problem = exact_problem("dtype:bf16,sites:both,block_v:16,length:17,heads:24x40,grouping:hv1")
    dropped = problem.with_(output_final_state=False, dht=None)
    actual = run(dropped)
    assert actual["final_state"] is None
    assert wrong_bits(dropped, actual) == []
    only_final = problem.with_(do=None)
    assert wrong_bits(only_final, run(only_final)) == []


def test_empty_sequences_alone_return_their_rounded_initial_states() -> None:
    problem = exact_problem("dtype:bf16,sites:both,block_v:16,length:17,heads:24x40,grouping:hv1")
    assert problem.initial_state is not None
    nothing = {name: getattr(problem, name)[:, :0] for name in ("q", "k", "v", "g", "beta", "do")}
    empty = problem.with_(**nothing, cu_seqlens=torch.zeros(2, dtype=torch.int32))
    assert wrong_bits(empty, run(empty)) == []


def test_float64_gates_are_taken_and_their_gradients_returned_as_such() -> None:
    problem = exact_problem("dtype:bf16,sites:both,block_v:16,length:17,heads:24x40,grouping:hv1")
    wide = problem.with_(g=problem.g.double(), beta=problem.beta.double())
    actual = run(wide)
    assert wrong_bits(wide, actual) == []
    assert actual["dg"] is not None
    assert actual["dg"].dtype == torch.float64


def test_a_forward_without_gradients_gives_the_same_output() -> None:
    problem = exact_problem("dtype:bf16,sites:both,block_v:16,length:17,heads:24x40,grouping:hv1")
    o, final_state = chunk_gated_delta_rule(
        problem.q, problem.k, problem.v, problem.g, problem.beta, **problem.options()
    )
    forward_only = problem.with_(do=None, dht=None)
    assert wrong_bits(forward_only, type(run(forward_only))({"o": o, "final_state": final_state})) == []
