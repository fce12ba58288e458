"""Claims about budgets that come from noise."""

from __future__ import annotations

import os

import pytest
import torch

from qualify.budgets import (
    SLACK,
    declaration_holds,
    derive_limits,
    few_draws,
    judged_arithmetic,
    measure_noise,
)
from qualify.compare import Layout, Limits, compare_budget, layout_of
from qualify.subjects import USUAL_ARITHMETIC

Tensor = torch.Tensor
SHAPE = (1, 130, 3, 16)


def sample(runs: int, size: float, seed: int = 0) -> tuple[Tensor, Tensor, Layout]:
    """An answer, runs around it, and its layout."""
    generator = torch.Generator().manual_seed(seed)
    expected = torch.randn(SHAPE, generator=generator, dtype=torch.float64)
    errors = torch.randn(runs, *SHAPE, generator=generator, dtype=torch.float64) * size
    return expected, expected + errors, layout_of("o")


def limits_of(expected: Tensor, runs: Tensor, layout: Layout) -> Limits:
    """The budget that these runs give."""
    noise = measure_noise(expected, runs, dtype=torch.float32, roundoff=0.0)
    return derive_limits(expected, noise, layout, source="test")


def test_other_members_of_the_family_pass() -> None:
    expected, runs, layout = sample(6, 1e-3)
    limits = limits_of(expected, runs, layout)
    generator = torch.Generator().manual_seed(1)
    worst = 0.0
    for _ in range(100):
        actual = (expected + torch.randn(SHAPE, generator=generator, dtype=torch.float64) * 1e-3).float()
        worst = max(worst, compare_budget("o", expected, actual, limits, layout, dtype=torch.float32).margin)
    assert worst < 0.9


@pytest.mark.parametrize("factor", [1.1, 2.0])
def test_noise_beyond_the_slack_fails(factor: float) -> None:
    expected, runs, layout = sample(6, 1e-3)
    limits = limits_of(expected, runs, layout)
    actual = (expected + (runs[0] - expected) * SLACK * factor * 1.2).float()
    assert not compare_budget("o", expected, actual, limits, layout, dtype=torch.float32).passed


def test_a_budget_is_never_below_the_rounding_of_the_output() -> None:
    expected, _, layout = sample(1, 0.0)
    exact = expected.unsqueeze(0).repeat(4, 1, 1, 1, 1)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        noise = measure_noise(expected, exact, dtype=dtype)
        limits = derive_limits(expected, noise, layout)
        assert compare_budget("o", expected, expected.to(dtype), limits, layout, dtype=dtype).passed


def test_few_runs_reach_further_than_many() -> None:
    factors = [few_draws(n) for n in (4, 6, 8, 16)]
    assert factors == sorted(factors, reverse=True)
    assert factors[-1] < 1.3


def test_terms_that_cancel_widen_the_budget_of_their_sum() -> None:
    expected, runs, layout = sample(4, 0.0)
    large = torch.full_like(expected, 1e6)
    plain = limits_of(expected, runs, layout)
    noise = measure_noise(expected, runs, dtype=torch.float32, magnitude=large)
    assert derive_limits(expected, noise, layout).total > 1e3 * plain.total


def test_one_flip_of_a_rounded_state_is_within_its_budget() -> None:
    state = torch.ones(2, 3, 8, 8, dtype=torch.float64)
    layout = layout_of("final_state")
    noise = measure_noise(state, state.unsqueeze(0).repeat(4, 1, 1, 1, 1), dtype=torch.float32)
    step = torch.full_like(state, 0.125)
    actual = state.clone()
    actual[1, 2, 3, 4] += 0.125
    found = [
        compare_budget(
            "final_state",
            state,
            actual.float(),
            derive_limits(state, noise, layout, step=s),
            layout,
            dtype=torch.float32,
        ).passed
        for s in (step, None)
    ]
    assert found == [True, False]


def test_a_flip_that_noise_allows_is_within_the_budget_though_no_run_made_it() -> None:
    expected, runs, layout = sample(6, 1e-6)
    noise = measure_noise(expected, runs, dtype=torch.float32)
    flipped = torch.zeros_like(expected)
    flipped[0, 70, 1] = 1e-3
    flipped[0, 10, 2, 3] = 1e-3
    found = [
        compare_budget(
            "o",
            expected,
            (expected + change).float(),
            derive_limits(expected, noise, layout, tipped=tipped),
            layout,
            dtype=torch.float32,
        ).passed
        for change, tipped in ((flipped, flipped), (flipped, None), (2.0 * flipped, flipped))
    ]
    assert found == [True, False, False]


@pytest.mark.parametrize(
    ("declared", "carrier", "holds"),
    [
        ("tf32", "fp32", True),
        ("ieee", "fp32", True),
        ("bf16", "fp32", False),
        ("bf16", "bf16", True),
        ("bf16", "fp16", False),
        ("fp8", "bf16", False),
    ],
)
def test_a_declared_arithmetic_buys_no_room(declared: str, carrier: str, holds: bool) -> None:
    declaration = {**USUAL_ARITHMETIC, carrier: declared}
    assert declaration_holds(declaration, carrier).passed is holds
    judged = judged_arithmetic(declaration, carrier)
    assert judged in (declared, USUAL_ARITHMETIC[carrier])
    assert holds or judged == USUAL_ARITHMETIC[carrier]


def test_a_measured_arithmetic_tightens_and_never_loosens() -> None:
    assert judged_arithmetic({"fp32": "tf32"}, "fp32", "ieee") == "ieee"
    assert judged_arithmetic({"fp32": "ieee"}, "fp32", "tf32") == "ieee"


def test_no_environment_variable_reaches_a_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    expected, runs, layout = sample(4, 1e-3)
    before = limits_of(expected, runs, layout)
    for name in ("CI", "GITHUB_ACTIONS", "FLA_CI_ENV", "QUALIFY_TOLERANCE", "PYTEST_CURRENT_TEST"):
        monkeypatch.setitem(os.environ, name, "1")
    after = limits_of(expected, runs, layout)
    assert before.total == after.total
    assert torch.equal(before.element, after.element)
