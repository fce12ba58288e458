"""What an exact problem leaves out when it asks for wrong answers changes nothing that it says of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch

from qualify.problem import Outcome
from qualify.regimes import Numbers
from references.wrong_answers import WRONG_ANSWERS
from suites.checks import probes
from suites.checks.bits import Exact, unnamed
from suites.checks.exact import exact_of
from suites.oracle import expected

LEVELS: Mapping[str, str] = {
    "dtype": "bf16",
    "format": "e4m3",
    "block_v": "16",
    "sites": "both",
    "layout": "vk",
    "heads": "32x48",
    "length": "65",
    "packing": "docs",
    "grouping": "hv2",
}

EXACTS: Mapping[str, Callable[[], Exact]] = {
    "state": lambda: probes._state_probe({**LEVELS, "heads": "16x32"}, 8, Numbers(4)),
    "w": lambda: probes._w_probe({**LEVELS, "heads": "32x32"}, 8, Numbers(4)),
    "whole": lambda: exact_of({**LEVELS, "gradients": "output"}, 4, "cpu"),
}


def in_full(exact: Exact, wrong: str | None = None) -> Outcome:
    """All tensors of a problem, right or wrong."""
    return expected(exact.problem, semantics=None if wrong is None else WRONG_ANSWERS[wrong].semantics)


@pytest.mark.parametrize("name", EXACTS)
def test_every_wrong_answer_is_the_one_that_all_tensors_of_the_oracle_give(name: str) -> None:
    exact = EXACTS[name]()
    asked = exact.candidates_kept
    assert len(asked) > 20
    for wrong in asked[::5]:
        whole, answer = exact._parts_of(in_full(exact, wrong)), exact.answer(wrong)
        assert answer.keys() == whole.keys()
        assert all(torch.equal(answer[t], whole[t]) for t in whole), wrong


@pytest.mark.parametrize("name", ["state", "w"])
def test_wrong_answers_that_are_not_asked_for_do_not_differ(name: str) -> None:
    exact = EXACTS[name]()
    left = [n for n in WRONG_ANSWERS if n not in exact.candidates_kept]
    assert "lost_dq_state" in left
    for wrong in left[::4]:
        whole = exact._parts_of(in_full(exact, wrong))
        assert all(torch.equal(whole[t], exact.expected[t]) for t in whole), wrong


@pytest.mark.parametrize("wrong", [None, "state_leaks"])
def test_comparisons_without_names_pass_and_fail_as_those_with_names(wrong: str | None) -> None:
    exact = EXACTS["whole"]()
    outcome = Outcome(dict(exact.expected if wrong is None else exact.answer(wrong)))
    named = exact.judge(outcome)
    with unnamed():
        bare = exact.judge(outcome)
    assert [(c.tensor, c.error, c.passed) for c in named] == [(c.tensor, c.error, c.passed) for c in bare]
    assert all(c.passed for c in bare) == (wrong is None)
    assert not any(c.excluded or c.looks_like for c in bare)
    assert any(c.excluded or c.looks_like == wrong for c in named)
