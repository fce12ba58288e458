"""Cases whose answer is known by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from references.gdn_chunk import gdn_chunk
from references.gdn_recurrent import gdn_recurrent
from references.qdq import qdq_state, qdq_w
from suites.selfcheck.references.inputs import boundaries, make_inputs, relative

Tensor = torch.Tensor

BOTH = pytest.mark.parametrize("op", [gdn_recurrent, gdn_chunk])
Op = Callable[..., tuple[Tensor, Tensor]]


@BOTH
def test_zero_beta_leaves_the_state_to_its_decay(op: Op) -> None:
    q, k, v, g, beta, state = make_inputs(T=100, H=4)
    o, final_state = op(q, k, v, g, torch.zeros_like(beta), state)
    decay = g.cumsum(1).exp()
    assert relative(final_state, decay[:, -1, :, None, None] * state) <= 1e-13
    read = 32**-0.5 * torch.einsum("bthk,bhkv->bthv", q, state) * decay.unsqueeze(-1)
    assert relative(o, read) <= 1e-13


@BOTH
def test_zero_gates_and_zero_beta_keep_the_state_bit_for_bit(op: Op) -> None:
    q, k, v, g, beta, state = make_inputs(T=100)
    _, final_state = op(q, k, v, torch.zeros_like(g), torch.zeros_like(beta), state)
    assert torch.equal(final_state, state)


@BOTH
def test_one_hot_keys_overwrite_rows(op: Op) -> None:
    q, _, v, g, beta, _ = make_inputs(T=100, H=1, HV=1, K=8, V=5)
    slot = torch.arange(100) * 5 % 8
    keys = torch.nn.functional.one_hot(slot, 8).to(torch.float64)[None, :, None]
    o, final_state = op(q, keys, v, torch.zeros_like(g), torch.ones_like(beta), scale=1.0)
    last_write = torch.tensor([int(torch.nonzero(slot == row).max()) for row in range(8)])
    assert relative(final_state[0, 0], v[0, last_write, 0]) <= 1e-14
    at = 60
    before = [max((t for t in range(at + 1) if slot[t] == row), default=0) for row in range(8)]
    assert relative(o[0, at, 0], q[0, at, 0] @ v[0, before, 0]) <= 1e-14


@BOTH
def test_one_token_is_one_delta_step(op: Op) -> None:
    q, k, v, g, beta, state = make_inputs(T=1, H=1, HV=1, K=4, V=3)
    o, final_state = op(q, k, v, g, beta, state)
    decayed = g.exp()[0, 0, 0] * state[0, 0]
    key = k[0, 0, 0]
    write = beta[0, 0, 0] * (v[0, 0, 0] - decayed.mT @ key)
    expected = decayed + torch.outer(key, write)
    assert relative(final_state[0, 0], expected) <= 1e-15
    assert relative(o[0, 0, 0], 0.5 * expected.mT @ q[0, 0, 0]) <= 1e-15


@BOTH
@pytest.mark.parametrize("fmt", ["e4m3", "int8"])
def test_without_writes_and_decay_the_final_state_is_the_rounded_initial_one(op: Op, fmt: str) -> None:
    q, k, v, g, beta, state = make_inputs(T=1, V=80)
    _, final_state = op(q, k, v, g * 0.0, beta * 0.0, state, state_format=fmt, state_block_v=32)
    assert torch.equal(final_state, qdq_state(state, block_v=32, fmt=fmt))


def test_an_identity_state_shows_the_rounded_row_of_w() -> None:
    draw = torch.Generator().manual_seed(3)
    keys = torch.rand(1, 1, 1, 32, generator=draw).to(torch.bfloat16).to(torch.float64)
    keys[..., 0] = 1.0
    q, _, v, g, beta, _ = make_inputs(T=1, H=1, HV=1, V=32)
    identity = torch.eye(32, dtype=torch.float64)[None, None]
    options: dict[str, Any] = {"w_format": "e4m3", "w_dtype": torch.bfloat16}
    _, final_state = gdn_chunk(q, keys, v * 0.0, g * 0.0, torch.ones_like(beta), identity, **options)
    rounded = qdq_w(keys.to(torch.bfloat16)).to(torch.float64)[0, 0, 0]
    assert torch.equal(final_state[0, 0, 0], identity[0, 0, 0] - rounded)


@BOTH
def test_an_empty_sequence_returns_its_initial_state_rounded(op: Op) -> None:
    inputs = make_inputs(T=70, N=3)
    documents = boundaries(0, 70, 0)
    _, unrounded = op(*inputs, cu_seqlens=documents)
    _, rounded = op(*inputs, cu_seqlens=documents, state_format="e4m3")
    for empty in (0, 2):
        assert torch.equal(unrounded[empty], inputs[5][empty])
        assert torch.equal(rounded[empty], qdq_state(inputs[5][empty]))


def test_w_is_materialised_in_its_dtype_with_its_site_off() -> None:
    inputs = make_inputs()
    stages: dict[str, Tensor] = {}
    gdn_chunk(*inputs, w_dtype=torch.bfloat16, stages=stages)
    w, materialised = stages["w"], stages["w_rounded"]
    assert torch.equal(materialised, w.to(torch.bfloat16).to(torch.float64))
    assert not torch.equal(materialised, w)
    by_dtype: dict[str, Tensor] = {}
    gdn_chunk(*(x.to(torch.bfloat16) for x in inputs[:5]), stages=by_dtype)
    assert torch.equal(by_dtype["w_rounded"], by_dtype["w"].to(torch.bfloat16).to(torch.float64))
