"""The bound of the decay covers what fp32 does in any order, and little more."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from qualify.regimes import build_problem
from qualify.subjects import subject_from_module
from suites.checks.decay import judge, relative_bound, silent
from suites.checks.evidence import outcome_of
from suites.subjects.eager import EagerGDN

Tensor = torch.Tensor


def gates(tokens: int, size: float) -> Tensor:
    """Log decays `[2, tokens, 3]` in fp32."""
    draw = torch.Generator().manual_seed(tokens)
    return -size * torch.rand(2, tokens, 3, generator=draw)


def by_chunk(g: Tensor) -> Tensor:
    """A product over chunks of exponentials of sums, one gate after the other, in base two."""
    log2_of_e = torch.tensor(1.4426950408889634)
    total = torch.ones_like(g[:, 0])
    for chunk in torch.split(g * log2_of_e, 64, 1):
        running = torch.zeros_like(total)
        for gate in chunk.unbind(1):
            running = running + gate
        total = total * torch.exp2(running)
    return total


def by_token(g: Tensor) -> Tensor:
    """A product of the exponentials of single gates."""
    total = torch.ones_like(g[:, 0])
    for gate in g.unbind(1):
        total = total * gate.exp()
    return total


def short_constant(g: Tensor) -> Tensor:
    """A base of five digits."""
    return torch.exp2(g.double().sum(1) * 1.4427).float()


@pytest.mark.parametrize("size", [1e-4, 0.1, 0.5])
@pytest.mark.parametrize("tokens", [1, 64, 145])
def test_fp32_in_either_form_is_far_within_the_bound(tokens: int, size: float) -> None:
    g = gates(tokens, size)
    exact = g.double().sum(1).exp()
    for form in (by_chunk, by_token):
        assert bool(((form(g).double() / exact - 1).abs() < relative_bound(g) / 2).all())


def test_a_base_of_five_digits_and_a_gate_of_eight_bits_are_outside() -> None:
    g = gates(65, 0.3)
    exact, bound = g.double().sum(1).exp(), relative_bound(g)
    assert bool(((short_constant(g).double() / exact - 1).abs() > bound).all())
    assert bool(((by_chunk(g.bfloat16().float()).double() / exact - 1).abs() > bound).any())


LEVELS = {"packing": "batch", "sites": "none", "length": "65", "heads": "16x16", "grouping": "hv2"}


class BinaryGate(EagerGDN):
    """A gate whose logarithm is a binary one, off by as much as a GPU's, and linear from 20 on."""

    def gate(self, g: Tensor, A_log: Tensor, dt_bias: Tensor | None) -> Tensor:
        raw = g.float() if dt_bias is None else g.float() + dt_bias
        log = (torch.log2(1 + torch.exp2(raw * 1.442695)) + 2.0**-22) * 0.6931472
        return -torch.exp2(A_log * 1.442695) * torch.where(raw < 20, log, raw)


class LinearFromEight(EagerGDN):
    """A gate whose softplus is linear from 8 on."""

    def gate(self, g: Tensor, A_log: Tensor, dt_bias: Tensor | None) -> Tensor:
        raw = g.float() if dt_bias is None else g.float() + dt_bias
        return -A_log.exp() * F.softplus(raw, threshold=8.0)


def shares(op: Any, **levels: str) -> list[float]:
    """The shares of their bounds that the states of a subject take."""
    problem = silent(build_problem(LEVELS | levels, "random", 0, "cpu"))
    return [float(c.error or 0) for c in judge(problem, outcome_of(subject_from_module(op, "op"), problem))]


@pytest.mark.parametrize("fused", ["gate", "bare_gate"])
@pytest.mark.parametrize("scalars", ["fp32", "carrier"])
def test_a_gate_made_in_fp32_is_far_within_the_bound(fused: str, scalars: str) -> None:
    for op in (EagerGDN(), BinaryGate()):
        assert max(shares(op, dtype="bf16", fused=fused, scalars=scalars)) < 0.5


def test_a_softplus_that_turns_linear_too_early_is_outside() -> None:
    assert min(shares(LinearFromEight(), dtype="bf16", fused="gate", scalars="fp32")) > 1.0
