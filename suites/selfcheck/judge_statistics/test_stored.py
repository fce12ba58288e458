"""Results that were cut, or went through the carrier, are told from those that were rounded once."""

from __future__ import annotations

import pytest
import torch

from qualify.budgets import Noise, measure_noise
from qualify.problem import Outcome
from qualify.regimes import build_problem
from suites.checks.evidence import dtype_of, evidence_for
from suites.checks.stored import UNEXPLAINED, bias_of, can_tell, is_narrow, stored

Tensor = torch.Tensor


def noisy(size: float) -> tuple[Tensor, Noise]:
    """Exact values `[1, 64, 2, 32]`, and five noise runs with errors of a relative size."""
    draw = torch.Generator().manual_seed(5)
    exact = torch.randn(1, 64, 2, 32, generator=draw, dtype=torch.float64)
    runs = exact * (1 + size * torch.randn(5, *exact.shape, generator=draw, dtype=torch.float64))
    return exact, measure_noise(exact, runs, dtype=torch.bfloat16)


def cut(x: Tensor) -> Tensor:
    """fp64 to bf16 towards zero."""
    return (x.float().view(torch.int32) & ~0xFFFF).view(torch.float32).to(torch.bfloat16)


@pytest.mark.parametrize("size", [0.0, 2.0**-10, 2.0**-8])
def test_a_cut_is_told_from_a_rounding(size: float) -> None:
    exact, noise = noisy(size)
    actual = exact + noise.errors[0]
    rounded = bias_of(exact, actual.to(torch.bfloat16), noise, torch.bfloat16)
    shortened = bias_of(exact, cut(actual), noise, torch.bfloat16)
    assert rounded is not None
    assert shortened is not None
    assert abs(rounded.mean) < UNEXPLAINED < rounded.limit < -shortened.mean


def test_where_noise_hides_a_cut_nothing_is_judged() -> None:
    exact, noise = noisy(1.0)
    assert bias_of(exact, exact.to(torch.bfloat16), noise, torch.bfloat16) is None
    assert bias_of(exact[:, :1, :1, :2], exact[:, :1, :1, :2], noisy_part(noise), torch.bfloat16) is None


def noisy_part(noise: Noise) -> Noise:
    """The noise of two elements."""
    part = (slice(None), slice(0, 1), slice(0, 1), slice(0, 2))
    sigma, reach, floor = (x[part] for x in (noise.sigma, noise.reach, noise.floor))
    return Noise(noise.errors[(slice(None), *part)], sigma, reach, floor, noise.roundoff)


@pytest.mark.parametrize("carrier", [torch.bfloat16, torch.float16])
def test_fp32_that_went_through_the_carrier_is_seen(carrier: torch.dtype) -> None:
    exact, _ = noisy(0.0)
    assert can_tell(exact, carrier)
    assert is_narrow(exact.to(carrier).float(), carrier)
    assert not is_narrow(exact.float(), carrier)


def test_few_or_short_numbers_say_nothing_about_their_dtype() -> None:
    exact, _ = noisy(0.0)
    assert not can_tell(exact.to(torch.bfloat16).double(), torch.bfloat16)
    assert not can_tell(exact[:, :1, :1], torch.bfloat16)


@pytest.mark.parametrize(("carrier", "arithmetic"), [("fp32", "ieee"), ("fp32", "tf32"), ("fp16", "fp16")])
def test_gates_narrower_than_the_carrier_are_judged_in_their_own_dtype(carrier: str, arithmetic: str) -> None:
    levels = {"dtype": carrier, "scalars": "bf16", "packing": "single", "length": "257", "heads": "16x16"}
    problem = build_problem({**levels, "grouping": "hv2", "sites": "none"}, "random", 7)
    evidence = evidence_for(problem, arithmetic)
    exact = evidence.tensors()
    rounded = {name: x.to(dtype_of(problem, name)) for name, x in exact.items()}
    assert rounded["dbeta"].dtype is torch.bfloat16
    assert all(c.passed for c in stored(evidence, Outcome({**rounded})))
    shortened = stored(evidence, Outcome({**rounded, "dbeta": cut(exact["dbeta"])}))
    told = arithmetic == "ieee"  # operands that are cut leave as much
    assert [c.tensor for c in shortened if not c.passed] == ["dbeta.rounding"] * told
