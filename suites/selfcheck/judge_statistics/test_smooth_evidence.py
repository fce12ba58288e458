"""Claims about problems on which nothing flips, and about final states judged code by code."""

from __future__ import annotations

import pytest
import torch

from qualify.compare import layout_of
from qualify.problem import Problem
from qualify.regimes import build_problem
from references.arithmetic import Noisy
from references.formats import all_codes, grid_named
from references.qdq import qdq_state, state_codes, w_codes
from suites.checks.evidence import evidence_for, fresh, is_one_chunk, noise_runs
from suites.checks.final_state import codes_apart, judge_final_state, rounded_state
from suites.checks.tie_free import tie_free
from suites.oracle import expected

Tensor = torch.Tensor

CELL = {
    "dtype": "bf16",
    "grouping": "hv1",
    "heads": "16x40",
    "block_v": "16",
    "length": "145",
    "gates": "weak",
}


def codes_of(problem: Problem, seed: int) -> tuple[Tensor, Tensor]:
    """The codes of W and of every carried state in one noisy run."""
    stages: dict[str, Tensor] = {}
    arithmetic = Noisy(operand="bf16", store="bf16", seed=seed)
    expected(problem.with_(do=None, dht=None), arithmetic=arithmetic, stages=stages)
    carried = stages["state_out"][:, :-1].float()
    return w_codes(stages["w"].to(torch.bfloat16)).codes, state_codes(carried, block_v=16).codes


@pytest.mark.parametrize("gates", ["zero", "weak"])
def test_no_bf16_noise_moves_a_code_of_a_tie_free_problem(gates: str) -> None:
    ordinary = build_problem({**CELL, "gates": gates}, "random", 0)
    flips = []
    for problem in (ordinary, tie_free(ordinary)):
        w, state = codes_of(problem, 1)
        others = [codes_of(problem, seed) for seed in (2, 3, 4)]
        flips.append(sum(int((w != a).sum()) + int((state != b).sum()) for a, b in others))
    assert flips[0] > 100
    assert flips[1] == 0


def test_a_tie_free_problem_still_needs_its_rounding() -> None:
    problem = tie_free(build_problem(CELL, "random", 0))
    rounded = expected(problem)["o"]
    plain = expected(problem.with_(state_format=None, w_format=None))["o"]
    assert rounded is not None
    assert plain is not None
    assert (rounded - plain).norm() > 5e-3 * rounded.norm()


def test_grouped_heads_have_no_tie_free_w() -> None:
    with pytest.raises(ValueError, match="hv1"):
        tie_free(build_problem({**CELL, "grouping": "hv2"}, "random", 0))


def test_one_chunk_without_w_is_smooth() -> None:
    levels = {"sites": "state", "length": "64", "heads": "16x16"}
    assert is_one_chunk(build_problem(levels, "random", 0))
    assert not is_one_chunk(build_problem({**levels, "length": "65"}, "random", 0))
    assert not is_one_chunk(build_problem({**levels, "sites": "both"}, "random", 0))


@pytest.mark.parametrize("layout", ["kv", "vk"])
@pytest.mark.parametrize("fmt", ["e4m3", "int8"])
def test_a_final_state_is_judged_code_by_code(fmt: str, layout: str) -> None:
    levels = {
        "sites": "state",
        "length": "17",
        "heads": "16x40",
        "block_v": "16",
        "format": fmt,
        "layout": layout,
    }
    problem = build_problem(levels, "random", 3)
    evidence = evidence_for(problem, "tf32", smooth=True)
    raw, width = evidence.raw_state, evidence.state_width
    assert raw is not None
    assert width is not None
    names = layout_of("final_state")

    def violations(state: Tensor) -> float:
        return judge_final_state(state.float(), raw, width, problem, names).error

    right = rounded_state(raw, problem)
    assert violations(right) == 0
    key_first = raw.mT if layout == "vk" else raw
    wrong_tile = qdq_state(key_first.float(), block_v=32, fmt=fmt)
    truncated = torch.trunc(right / 1e-3) * 1e-3
    for state in (raw, wrong_tile.mT if layout == "vk" else wrong_tile, truncated, right * 1.01, 0.0 * right):
        assert violations(state) > 10
    for member in noise_runs(problem, "tf32", 3, seed=99):
        final = member["final_state"]
        assert final is not None
        assert violations(final) == 0


@pytest.mark.parametrize("layout", ["kv", "vk"])
@pytest.mark.parametrize("fmt", ["e4m3", "int8"])
def test_codes_are_counted_by_the_steps_that_lie_between_them(fmt: str, layout: str) -> None:
    """Every code of the grid in one tile: moving each to a neighbour is one step, wherever it is."""
    problem = build_problem(
        {"sites": "state", "heads": "16x40", "block_v": "128", "format": fmt, "layout": layout}, "random", 0
    )
    codes = all_codes(grid_named(fmt))
    inner = torch.stack([codes[i : i + codes.numel() - 3] for i in range(4)])
    top = torch.full((4, 1), float(codes.max()), dtype=torch.float64)
    tile = torch.cat([inner, top], 1)  # the largest code keeps the scale where it is
    columns = -(-tile.shape[1] // 4)
    padded = torch.nn.functional.pad(tile, (0, 4 * columns - tile.shape[1])).view(4, 4, columns) * 0.37
    states = [row[None, None] if layout == "kv" else row.mT[None, None] for row in padded]
    number = inner.shape[1]
    for moved in range(4):
        found = codes_apart(states[0], states[moved], problem)
        near = {f"codes_apart_{moved}" if moved < 3 else "codes_apart_more": number}
        same = 4 * columns - (number if moved else 0)
        assert {k: v for k, v in found.items() if v and k != "codes_apart_0"} == (
            {**near, "grid_steps_max": moved} if moved else {}
        )
        assert found["codes_apart_0"] == same


def test_a_judged_final_state_tells_how_many_codes_flipped() -> None:
    problem = build_problem(
        {"sites": "state", "length": "17", "heads": "16x40", "block_v": "16"}, "random", 3
    )
    evidence = evidence_for(problem, "tf32", smooth=True)
    raw, width = evidence.raw_state, evidence.state_width
    assert raw is not None
    assert width is not None
    right = rounded_state(raw, problem)
    told = judge_final_state(right.float(), raw, width, problem, layout_of("final_state")).statistics
    assert told["codes_apart_0"] == told["elements"] == raw.numel()
    assert told["grid_steps_max"] == 0
    wrong = judge_final_state((right * 1.2).float(), raw, width, problem, layout_of("final_state")).statistics
    assert wrong["codes_apart_0"] == raw.numel()  # its scale is wrong, its codes are not
    zeros = judge_final_state(0.0 * right.float(), raw, width, problem, layout_of("final_state")).statistics
    assert zeros["codes_apart_more"] > 0.9 * raw.numel()


def test_a_copy_for_a_subject_shares_nothing_and_keeps_strides() -> None:
    problem = build_problem({"strides": "views", "gradients": "strided", "heads": "16x16"}, "random", 0)
    copy = fresh(problem)
    before = problem.v.clone()
    copy.v.zero_()
    assert torch.equal(problem.v, before)
    assert copy.v.stride() == problem.v.stride()
    assert copy.do is not None
    assert problem.do is not None
    assert copy.do.stride() == problem.do.stride()


def test_a_copy_for_a_subject_holds_what_lies_between_the_values_of_a_view() -> None:
    problem = build_problem({"strides": "views", "heads": "16x16"}, "random", 0)
    copy = fresh(problem)
    assert not problem.g.is_contiguous()
    heads = problem.g.shape[-1]
    assert torch.equal(_between(copy.g), _between(problem.g))
    assert _between(copy.g).numel() == (problem.g.shape[0] * problem.g.shape[1] - 1) * 2 * heads
    empty = fresh(problem.with_(g=problem.g[:, :0])).g
    assert (empty.shape, empty.stride()) == (problem.g[:, :0].shape, problem.g.stride())


def _between(view: torch.Tensor) -> torch.Tensor:
    """What lies between the rows `[..., HV]` of a view, up to its last row."""
    heads, step = view.shape[-1], view.stride(-2)
    rows = view.numel() // heads - 1
    return view.as_strided((rows, step), (step, 1))[:, heads:].flatten()


def test_a_tile_far_below_its_noise_is_judged_on_the_scale_that_it_has() -> None:
    levels = {
        "dtype": "fp16",
        "sites": "state",
        "length": "1",
        "heads": "32x32",
        "block_v": "16",
        "format": "int8",
    }
    problem = build_problem(levels, "subnormal", 5)
    evidence = evidence_for(problem, "fp16", smooth=True)
    assert evidence.raw_state is not None
    assert evidence.state_width is not None
    right = rounded_state(evidence.raw_state, problem).float()
    found = judge_final_state(
        right, evidence.raw_state, evidence.state_width, problem, layout_of("final_state")
    )
    assert found.error == 0
