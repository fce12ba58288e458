"""Claims about comparisons."""

from __future__ import annotations

import math

import pytest
import torch

from qualify.compare import (
    Layout,
    Limits,
    block_norms,
    compare_budget,
    compare_exact,
    holds,
    layout_of,
    mismatch,
    statistics,
    ulp,
)
from qualify.records import Verdict

NAN, INF = math.nan, math.inf


def flat_limits(x: torch.Tensor, size: float, layout: Layout) -> Limits:
    """The same budget in every metric."""
    norms = torch.ones_like(block_norms(x, layout)) * size
    return Limits(size, norms[0], norms, torch.full_like(x, size), "typed in for a test")


def test_equal_bits_pass_and_one_flipped_bit_fails() -> None:
    x = torch.randn(3, 5)
    y = x.clone()
    assert compare_exact("x", x, y).passed
    y[1, 2] = torch.nextafter(y[1, 2], torch.tensor(9.0))
    found = compare_exact("x", x, y)
    assert not found.passed
    assert found.error == 1
    assert found.worst is not None
    assert dict(found.worst.place) == {"axis0": 1, "axis1": 2}


def test_nan_equals_nan_only_when_declared() -> None:
    x = torch.tensor([1.0, NAN])
    assert compare_exact("x", x, x.clone()).failure is Verdict.FAILED_NONFINITE
    assert not compare_exact("x", x, x.clone()).passed
    assert compare_exact("x", x, x.clone(), nan_equal=True).passed
    assert not compare_exact("x", x, torch.tensor([1.0, 2.0]), nan_equal=True).passed


def test_the_sign_of_a_zero_is_free_unless_asked_for() -> None:
    x, y = torch.tensor([0.0]), torch.tensor([-0.0])
    assert compare_exact("x", x, y).passed
    assert not compare_exact("x", x, y, signed_zero=True).passed


@pytest.mark.parametrize("actual", [None, (1, 2), torch.zeros(2, 3), torch.zeros(3, 2, dtype=torch.bfloat16)])
def test_wrong_type_shape_or_dtype_is_a_shape_failure(actual: object) -> None:
    found = mismatch("o", actual, shape=(3, 2), dtype=torch.float32, device=torch.device("cpu"))
    assert found is not None
    assert not found.passed
    assert found.failure is Verdict.FAILED_SHAPE
    assert "expected" in found.because


def test_an_empty_comparison_is_an_error() -> None:
    empty = torch.zeros(0, 3)
    for compare in (lambda: compare_exact("x", empty, empty), lambda: statistics(empty, empty)):
        with pytest.raises(ValueError, match="at least one element"):
            compare()
    with pytest.raises(ValueError, match="property of nothing"):
        holds("x", 0, 0)


def test_a_packed_element_is_told_by_its_document_and_chunk() -> None:
    layout = Layout(("sequence", "token", "head", "channel"), (0, 3, 3, 70, 140))
    assert layout.place((0, 139, 1, 7)) == {"sequence": 3, "token": 69, "head": 1, "channel": 7, "chunk": 1}
    assert layout.place((0, 3, 0, 0))["sequence"] == 2
    assert layout.block_of_token(140)[68:72] == [2, 2, 3, 3]
    assert layout.block_place(4, 140) == {"sequence": 3, "chunk": 1}


def test_block_norms_add_up_to_the_whole() -> None:
    x = torch.randn(1, 140, 2, 5, dtype=torch.float64)
    layout = layout_of("o", torch.tensor([0, 3, 3, 70, 140]))
    norms = block_norms(x, layout)
    assert norms.shape == (5, 2)
    assert torch.allclose(norms.square().sum(), x.square().sum())
    assert torch.allclose(norms[0], x[0, :3].square().sum((0, 2)).sqrt())


def test_a_budget_sees_one_wrong_head_one_wrong_chunk_and_one_wrong_element() -> None:
    layout = layout_of("o")
    expected = torch.randn(1, 130, 4, 8, dtype=torch.float64)
    limits = Limits(
        3.0, torch.full((4,), 1.0), torch.full((3, 4), 0.5), torch.full_like(expected, 0.1), "test"
    )
    actual = expected.clone()
    actual[0, 129, 2, 5] += 0.2
    found = compare_budget("o", expected, actual, limits, layout)
    assert not found.passed
    assert found.metric == "max_over_scale"
    assert found.worst is not None
    assert dict(found.worst.place) == {"sequence": 0, "token": 129, "head": 2, "channel": 5, "chunk": 2}
    actual = expected.clone()
    actual[0, :64, 1] += 0.03
    found = compare_budget("o", expected, actual, limits, layout)
    assert not found.passed
    assert found.metric == "worst_chunk_rel_l2"
    assert found.worst is not None
    assert found.worst.place["chunk"] == 0
    assert found.worst.place["head"] == 1
    actual = expected.clone()
    actual[:, :, 3] += 0.02
    limits = Limits(
        3.0, torch.full((4,), 0.5), torch.full((3, 4), 0.49), torch.full_like(expected, 0.1), "test"
    )
    assert compare_budget("o", expected, actual, limits, layout).metric == "worst_head_rel_l2"


@pytest.mark.parametrize("poison", [NAN, INF, -INF])
def test_a_nonfinite_element_never_passes_a_budget(poison: float) -> None:
    layout = layout_of("dg", dims=3)
    expected = torch.randn(1, 5, 2, dtype=torch.float64)
    actual = expected.float()
    actual[0, 1, 1] = poison
    found = compare_budget(
        "dg", expected, actual, flat_limits(expected, 1e9, layout), layout, dtype=torch.float32
    )
    assert not found.passed
    assert found.failure is Verdict.FAILED_NONFINITE
    assert sum(found.nonfinite.values()) == 1


def test_a_zero_budget_passes_equal_tensors_only() -> None:
    layout = layout_of("o")
    expected = torch.randn(1, 5, 2, 3, dtype=torch.float64)
    limits = flat_limits(expected, 0.0, layout)
    assert compare_budget("o", expected, expected.clone(), limits, layout).passed
    assert not compare_budget("o", expected, expected + 1e-12, limits, layout).passed


def test_an_ulp_is_the_distance_to_the_next_number() -> None:
    x = torch.tensor([1.0, 1.5, -2.0, 3e-39, 7.25], dtype=torch.float64)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        y = x.abs().to(dtype)
        gap = torch.nextafter(y, torch.full_like(y, INF)).double() - y.double()
        assert torch.equal(ulp(x, dtype), gap)
