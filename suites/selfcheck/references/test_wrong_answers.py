"""Named wrong answers depart from the contract where they say, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch

from references.formats import grid_named
from references.gdn_chunk import gdn_chunk
from references.semantics import CONTRACT, Semantics
from references.wrong_answers import TENSORS, WRONG_ANSWERS, Setting, applies, setting_of
from suites.selfcheck.references.inputs import boundaries, make_inputs, relative

Tensor = torch.Tensor

FINE = frozenset(
    f"{site}_{suffix}"
    for site in ("state", "w")
    for suffix in ("ties_away", "through_fp16", "reciprocal", "bf16_amax")
)
"""Wrong answers that only some data show: ties, near-ties, scales that round differently."""


@dataclass(frozen=True)
class Example:
    """A call: how its inputs are made, its options, which incoming gradients it has."""

    inputs: Callable[[], list[Tensor]]
    options: dict[str, Any]
    initial: bool = True
    do: bool = True
    dht: bool = True

    def arguments(self) -> tuple[list[Tensor], dict[str, Tensor]]:
        inputs = self.inputs()
        draw = torch.Generator().manual_seed(7)
        options = {key: value for key, value in self.options.items() if key == "cu_seqlens"}
        o, final_state = gdn_chunk(*inputs, **options)
        incoming = {"do": o, "dht": final_state}
        asked = {"do": self.do, "dht": self.dht}
        incoming = {
            name: torch.randn(y.shape, dtype=torch.float64, generator=draw)
            for name, y in incoming.items()
            if asked[name]
        }
        return inputs if self.initial else inputs[:5], incoming

    def answer(self, op: Callable[..., tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
        inputs, incoming = self.arguments()
        outputs = dict(zip(("do", "dht"), op(*inputs, **self.options), strict=True))
        tensors = {"o": outputs["do"].detach(), "final_state": outputs["dht"].detach()}
        if incoming:
            found = torch.autograd.grad(
                [outputs[name] for name in incoming], inputs, list(incoming.values()), allow_unused=True
            )
            for name, leaf, dx in zip(TENSORS[2:], inputs, found, strict=False):
                tensors[name] = torch.zeros_like(leaf) if dx is None else dx
        return tensors

    def setting(self) -> Setting:
        inputs, incoming = self.arguments()
        keywords: dict[str, Any] = {**incoming, **self.options}
        q, k, v, g, beta, *initial = inputs
        return setting_of(q, k, v, g, beta, *initial, **keywords)


def packed(N: int = 5, **sizes: Any) -> list[Tensor]:
    """Documents of 0, 9, 0, 50 and 41 tokens."""
    return make_inputs(T=100, N=N, **{"H": 2, "HV": 4, "K": 24, "V": 24, **sizes})


def tied() -> list[Tensor]:
    """A state and keys that sit on the ties of the grid."""
    inputs = packed()
    with torch.no_grad():
        grid = torch.tensor([1.0625, 1.1875, 9.5, 3.375, 0.578125, 448.0], dtype=torch.float64)
        draw = torch.Generator().manual_seed(0)
        inputs[5][:] = grid[torch.randint(6, inputs[5].shape, generator=draw)]
        inputs[1][:] = grid[torch.randint(6, inputs[1].shape, generator=draw)] / 448.0
        inputs[1][..., 0] = 1.0
        inputs[3].zero_()
        inputs[4].fill_(1.0)
    return inputs


def huge() -> list[Tensor]:
    """A state beyond the range of fp16."""
    inputs = packed()
    with torch.no_grad():
        inputs[5].mul_(1e5)
    return inputs


DOCUMENTS = boundaries(0, 9, 0, 50, 41)
SITES = {"state_format": "e4m3", "w_format": "e4m3", "state_block_v": 16, "chunk_size": 16}
EXAMPLES = {
    "documents": Example(packed, {"cu_seqlens": DOCUMENTS, "w_dtype": torch.bfloat16, **SITES}),
    "int8": Example(
        packed, {"cu_seqlens": DOCUMENTS, "w_dtype": torch.float32, **SITES, "state_format": "int8"}
    ),
    "tied": Example(tied, {"cu_seqlens": DOCUMENTS, "w_dtype": torch.float32, **SITES}),
    "huge": Example(huge, {"cu_seqlens": DOCUMENTS, "w_dtype": torch.bfloat16, **SITES}),
    "batch": Example(lambda: make_inputs(B=2, T=70, H=4, HV=4, K=16, V=24), {**SITES}, dht=False),
    "off": Example(lambda: make_inputs(T=40, H=1, HV=2, K=16, V=24), {"chunk_size": 16}),
    "chunk": Example(lambda: make_inputs(T=16, K=16, V=24), {**SITES}, initial=False),
    "final only": Example(lambda: make_inputs(T=33, K=16, V=24), {**SITES}, do=False),
    "forward": Example(lambda: make_inputs(T=33, K=16, V=24), {**SITES}, do=False, dht=False),
    "token": Example(lambda: make_inputs(T=1, K=16, V=40), {**SITES}),
    "first token": Example(lambda: make_inputs(T=1, K=16, V=40), {**SITES}, initial=False),
}


@cache
def contract(example: str) -> dict[str, Tensor]:
    return EXAMPLES[example].answer(gdn_chunk)


@cache
def setting(example: str) -> Setting:
    return EXAMPLES[example].setting()


@cache
def changed(name: str, example: str, tolerance: float = 0.0) -> set[str]:
    """The tensors that are not the contract's: bit for bit, or by more than a relative tolerance."""
    actual = EXAMPLES[example].answer(WRONG_ANSWERS[name].run)
    expected = contract(example)
    return {key for key, value in expected.items() if not relative(actual[key], value) <= tolerance}


@pytest.mark.parametrize("example", EXAMPLES)
def test_wrong_answers_that_apply_are_visible_and_touch_only_what_they_declare(example: str) -> None:
    invisible, strays = [], {}
    for name, wrong in WRONG_ANSWERS.items():
        if not wrong.applies(setting(example)):
            continue
        touched = changed(name, example)
        if not touched and name not in FINE:
            invisible.append(name)
        if touched - set(wrong.touches):
            strays[name] = touched - set(wrong.touches)
    assert not invisible
    assert not strays


def test_every_wrong_answer_is_visible_in_some_example() -> None:
    unseen = [
        name
        for name, wrong in WRONG_ANSWERS.items()
        if not any(
            wrong.applies(setting(key)) and changed(name, key)
            for key in ("documents", "int8", "tied", "huge")
        )
    ]
    assert not unseen


@pytest.mark.parametrize("example", ["off", "chunk", "first token", "forward"])
def test_what_does_not_apply_for_want_of_data_is_invisible(example: str) -> None:
    # Visible but meaningless: another format's code, the other layout of a state that is not square, and what
    # a correct implementation may do in low precision while the site is off.
    meaningless = {"state_e4m3", "state_int8", "state_fnuz", "initial_transposed", "final_transposed"}
    meaningless |= {"state_copy_fp16", "backward_at_recomputed_w"}
    seen = [
        name
        for name, wrong in WRONG_ANSWERS.items()
        if name not in meaningless and not wrong.applies(setting(example)) and changed(name, example, 1e-12)
    ]
    assert not seen


def test_every_wrong_answer_has_a_reason_and_a_departure() -> None:
    assert len(WRONG_ANSWERS) >= 90
    assert len({wrong.semantics for wrong in WRONG_ANSWERS.values()}) == len(WRONG_ANSWERS)
    for name, wrong in WRONG_ANSWERS.items():
        assert wrong.name == name
        assert wrong.semantics != CONTRACT
        assert len(wrong.because) > 10
        assert wrong.touches
        assert wrong.backward_only == (not {"o", "final_state"} & set(wrong.touches))


def test_applies_answers_by_name_and_keywords() -> None:
    assert applies("state_off", state_format="int8")
    assert not applies("state_off", state_format=None)
    assert not applies("state_double_tile", state_format="e4m3", value_dim=64, state_block_v=64)
    with pytest.raises(KeyError):
        applies("no_such_answer")
    with pytest.raises(ValueError, match="lost terms must be in GRADIENT_TERMS"):
        Semantics(lost=frozenset({"dq.nothing"}))


def test_departures_combine_with_frozen_formats_of_the_contract() -> None:
    # A wrong answer reads the same options as the oracle, so an unknown format is refused by both.
    with pytest.raises(ValueError, match="format must be one of"):
        WRONG_ANSWERS["dht_ignored"].run(*make_inputs(T=4), state_format="fp4")
    assert grid_named("e4m3").largest == 448.0
