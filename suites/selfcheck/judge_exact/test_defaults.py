"""A call leaves out what says nothing, and only where the subject's own signature allows it."""

from __future__ import annotations

import inspect
from typing import Any

from suites.checks.defaults import OP_DEFAULTS, optional, shortened
from suites.subjects.eager import EAGER


def op_without_defaults(q: Any, *, scale: Any, state_block_v: Any) -> None:
    """An op that has to be told everything."""


def op_of_anything(*tensors: Any, **options: Any) -> None:
    """An op whose signature shows nothing."""


def test_the_defaults_are_those_of_a_correct_implementation() -> None:
    parameters = inspect.signature(EAGER.chunk_gated_delta_rule).parameters
    assert {n: p.default for n, p in parameters.items() if p.default is not p.empty} == dict(OP_DEFAULTS)


def test_what_has_its_default_is_left_out_and_the_rest_is_said() -> None:
    options = dict(OP_DEFAULTS) | {"scale": 0.5, "state_block_v": 32, "output_final_state": True}
    left = shortened(EAGER.chunk_gated_delta_rule, options)
    assert left == {"scale": 0.5, "state_block_v": 32, "output_final_state": True}


def test_nothing_is_left_out_that_the_signature_gives_no_default() -> None:
    for op in (op_without_defaults, op_of_anything, len):
        assert not optional(op)
        assert shortened(op, OP_DEFAULTS) == dict(OP_DEFAULTS)
