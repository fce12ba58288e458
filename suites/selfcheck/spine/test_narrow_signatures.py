"""Subjects as their authors write them: fewer arguments, other names of precisions."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from qualify.problem import Problem
from qualify.subjects import OPTIONS, declared_arithmetic, subject_from_module
from suites.subjects import eager


def narrow(q: float, k: float, v: float, g: float, beta: float, scale: float | None = None) -> Any:
    """An op that knows one option."""
    return q + k + v + g + beta, scale


def taking_any(*tensors: float, **options: Any) -> Any:
    """An op that takes whatever comes."""
    return sum(tensors), options


def op_of(function: Any) -> Any:
    """The op that a judge calls."""
    return subject_from_module(SimpleNamespace(chunk_gated_delta_rule=function), "s").chunk_gated_delta_rule


def test_an_option_at_its_default_needs_no_argument() -> None:
    assert op_of(narrow)(1, 2, 3, 4, 5, **{**OPTIONS, "scale": 0.5}) == (15, 0.5)


class Layer(torch.nn.Module):
    """An op as a layer, whose call shows no signature."""

    def forward(self, *tensors: float, scale: float | None = None) -> Any:
        return narrow(*tensors, scale=scale)  # type: ignore[misc]


def test_what_a_wrapper_passes_on_to_a_narrow_op_is_left_out() -> None:
    def wrapped(*tensors: Any, **options: Any) -> Any:
        return narrow(*tensors, **options)

    for op in (op_of(wrapped), op_of(Layer())):
        for _ in range(2):
            assert op(1, 2, 3, 4, 5, **{**OPTIONS, "scale": 0.5}) == (15, 0.5)
        with pytest.raises(NotImplementedError, match="w_format must stay at None, got 'e4m3'"):
            op(1, 2, 3, 4, 5, **{**OPTIONS, "w_format": "e4m3"})


@pytest.mark.parametrize(
    ("option", "value"),
    [("state_v_first", True), ("state_block_v", 32), ("w_format", "e4m3"), ("cu_seqlens", torch.zeros(2))],
)
def test_an_option_that_an_op_does_not_take_is_declined(option: str, value: object) -> None:
    with pytest.raises(NotImplementedError, match=f"{option} must stay at .*add it"):
        op_of(narrow)(1, 2, 3, 4, 5, **{**OPTIONS, option: value})


def test_a_rounding_function_may_know_one_format() -> None:
    subject = subject_from_module(
        SimpleNamespace(qdq_w=lambda w: w, qdq_state=lambda s, block_v: block_v), "s"
    )
    assert subject.qdq_w is not None
    assert subject.qdq_state is not None
    assert subject.qdq_w(2.0, fmt="e4m3") == 2.0
    assert subject.qdq_state(2.0, block_v=16, fmt="e4m3") == 16
    with pytest.raises(NotImplementedError, match="fmt must stay at 'e4m3', got 'int8'"):
        subject.qdq_state(2.0, block_v=16, fmt="int8")


def test_a_mistake_inside_an_op_stays_a_mistake() -> None:
    def mistaken(q: float, **options: Any) -> Any:
        return narrow(q, 2, 3, 4, 5, size=1)  # type: ignore[call-arg]

    with pytest.raises(TypeError, match="size"):
        op_of(mistaken)(1, **OPTIONS)


def test_an_op_that_takes_everything_is_handed_everything() -> None:
    assert op_of(taking_any)(1, 2, **OPTIONS) == (3, dict(OPTIONS))
    assert op_of(eager.chunk_gated_delta_rule) == eager.chunk_gated_delta_rule


def test_the_options_are_those_of_a_problem() -> None:
    x = torch.zeros(1, 1, 1, 1)
    assert set(Problem(x, x, x, x[0], x[0], scale=1.0).options()) == set(OPTIONS)


def test_precisions_have_other_names() -> None:
    declared = {torch.float32: "TF32x3", "bfloat16": torch.bfloat16, "half": "float32"}
    assert declared_arithmetic(SimpleNamespace(ARITHMETIC=declared)) == {
        "fp32": "ieee",
        "bf16": "bf16",
        "fp16": "ieee",
    }
