"""The bound of the decay covers what fp32 does in any order, and little more."""

from __future__ import annotations

import pytest
import torch

from suites.checks.decay import relative_bound

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
