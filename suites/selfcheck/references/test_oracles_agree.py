"""Two independent references give one answer: the chunk form against the token recurrence, in fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from references.gdn_chunk import dg_magnitude, gdn_chunk
from references.gdn_recurrent import gdn_recurrent
from references.kda_recurrent import kda_recurrent
from suites.selfcheck.references.inputs import boundaries, make_inputs, relative, run

Tensor = torch.Tensor

TOLERANCE = 1e-12
DOCUMENTS = boundaries(0, 1, 64, 0, 65, 15, 0)


def assert_agree(inputs: list[Tensor], chunk_size: int = 64, **options: Any) -> None:
    """Values and gradients within 1e-12; dg in proportion to the magnitudes that cancel in it."""
    draw = torch.Generator().manual_seed(5)
    o, final_state = gdn_chunk(*inputs, chunk_size=chunk_size, **options)
    do, dht = (torch.randn(y.shape, dtype=torch.float64, generator=draw) for y in (o, final_state))
    actual = run(gdn_chunk, inputs, do=do, dht=dht, chunk_size=chunk_size, **options)
    options.pop("w_dtype", None)
    expected = run(gdn_recurrent, inputs, do=do, dht=dht, chunk_size=chunk_size, **options)
    magnitude = dg_magnitude(*inputs, do=do, dht=dht, chunk_size=chunk_size, **options)
    for name in ("o", "final_state", "dq", "dk", "dv", "dbeta", "dh0"):
        assert relative(actual[name], expected[name]) <= TOLERANCE, name
    assert bool(((actual["dg"] - expected["dg"]).abs() <= TOLERANCE * magnitude).all())
    assert all(bool(x.isfinite().all()) for x in actual.values())


@pytest.mark.parametrize("gate", [0.0, -1e-4, -0.1, -1.0, -20.0, -90.0])
def test_chunk_form_matches_recurrence_at_every_strength_of_gates(gate: float) -> None:
    assert_agree(make_inputs(gate=gate))


def test_chunk_form_matches_recurrence_with_mixed_gates_and_a_spike() -> None:
    inputs = make_inputs(B=2)
    with torch.no_grad():
        inputs[3][:, ::7] = -20.0
        inputs[3][:, 70] = -90.0
        inputs[3][:, 80:100] = 0.0
    assert_agree(inputs)


@pytest.mark.parametrize("chunk_size", [1, 3, 16, 64, 128, 1000])
def test_chunk_form_matches_recurrence_at_any_chunk_size(chunk_size: int) -> None:
    assert_agree(make_inputs(), chunk_size=chunk_size)


@pytest.mark.parametrize("T", [1, 2, 15, 63, 64, 65, 128])
def test_chunk_form_matches_recurrence_at_any_length(T: int) -> None:
    assert_agree(make_inputs(B=2, T=T, H=1, HV=2, K=16, V=24))


@pytest.mark.parametrize("heads", [(1, 1), (1, 8), (2, 4), (4, 4)])
def test_chunk_form_matches_recurrence_for_grouped_heads(heads: tuple[int, int]) -> None:
    assert_agree(make_inputs(T=80, H=heads[0], HV=heads[1], K=16, V=8))


@pytest.mark.parametrize("state_format", [None, "e4m3", "int8"])
@pytest.mark.parametrize("state_v_first", [False, True])
def test_chunk_form_matches_recurrence_for_packed_sequences(
    state_v_first: bool, state_format: str | None
) -> None:
    inputs = make_inputs(N=7)
    if state_v_first:
        inputs[5] = inputs[5].detach().mT.contiguous().requires_grad_()
    options: dict[str, Any] = {
        "cu_seqlens": DOCUMENTS,
        "state_v_first": state_v_first,
        "state_format": state_format,
    }
    assert_agree(inputs, state_block_v=16, **options)


@pytest.mark.parametrize("state_format", ["e4m3", "int8"])
@pytest.mark.parametrize("chunk_size", [16, 64])
def test_the_state_site_acts_at_the_same_tokens_in_both_forms(chunk_size: int, state_format: str) -> None:
    assert_agree(make_inputs(B=2, T=130), chunk_size=chunk_size, state_format=state_format, state_block_v=32)


def test_repeated_keys_do_not_spoil_the_solve() -> None:
    inputs = make_inputs()
    with torch.no_grad():
        inputs[1][:] = inputs[1][:, :1]
        inputs[3].zero_()
        inputs[4].fill_(1.0)
    assert_agree(inputs)


def test_many_short_documents_beside_long_ones_match_the_recurrence() -> None:
    lengths = [1, 0, 3, 70, 1, 8] * 20
    documents = boundaries(*lengths)
    inputs = make_inputs(T=sum(lengths), H=1, HV=2, K=8, V=8, N=len(lengths))
    assert_agree(inputs, cu_seqlens=documents, state_format="e4m3")


def test_no_sequence_and_no_token_at_all_are_answered() -> None:
    inputs = make_inputs(T=0, N=2)
    o, final_state = gdn_chunk(*inputs, cu_seqlens=boundaries(0, 0))
    assert o.shape == (1, 0, 4, 48)
    assert torch.equal(final_state, inputs[5])


def test_a_zero_initial_state_is_the_default() -> None:
    q, k, v, g, beta, state = make_inputs(T=70)
    given = gdn_chunk(q, k, v, g, beta, torch.zeros_like(state))
    absent = gdn_chunk(q, k, v, g, beta)
    by_token = gdn_recurrent(q, k, v, g, beta)
    for x, y, z in zip(given, absent, by_token, strict=True):
        assert torch.equal(x, y)
        assert relative(y, z) <= TOLERANCE


def test_scale_defaults_to_the_inverse_root_of_k() -> None:
    inputs = make_inputs(T=20, K=16)
    assert torch.equal(gdn_chunk(*inputs)[0], gdn_chunk(*inputs, scale=0.25)[0])
    assert relative(gdn_chunk(*inputs, scale=0.5)[0], 2.0 * gdn_chunk(*inputs)[0]) <= TOLERANCE


def test_channel_gates_that_are_equal_are_a_head_gate() -> None:
    inputs = make_inputs(T=90)
    by_channel = [x.detach().clone().requires_grad_() for x in inputs]
    by_channel[3] = inputs[3].detach().unsqueeze(-1).expand(1, 90, 4, 32).contiguous().requires_grad_()
    actual = run(kda_recurrent, by_channel, state_format="e4m3")
    expected = run(gdn_recurrent, inputs, state_format="e4m3")
    actual["dg"] = actual["dg"].sum(-1)
    for name, value in expected.items():
        assert relative(actual[name], value) <= TOLERANCE, name


def test_channel_gates_act_on_their_own_channel() -> None:
    q, k, v, g, beta, state = make_inputs(T=1, H=1, HV=1, K=4, V=3, channel_gates=True)
    _, final_state = kda_recurrent(q, k, v, g, torch.zeros_like(beta), state)
    assert torch.equal(final_state, g[0, 0, :, :, None].exp() * state)
    with pytest.raises(ValueError, match=r"g must have shape \[B, T, HV, 4\]"):
        kda_recurrent(q, k, v, g[..., 0], beta, state)


def test_shapes_that_do_not_fit_are_refused() -> None:
    q, k, v, g, beta, state = make_inputs(T=10)
    with pytest.raises(ValueError, match="initial_state must have shape"):
        gdn_chunk(q, k, v, g, beta, state.mT)
    with pytest.raises(ValueError, match="HV must be a multiple of H"):
        gdn_chunk(q, k, v[:, :, :3], g[:, :, :3], beta[:, :, :3])
    inputs = make_inputs(B=2, T=10)
    with pytest.raises(ValueError, match="cu_seqlens needs B = 1"):
        gdn_chunk(*inputs, cu_seqlens=boundaries(10, 10))
    with pytest.raises(ValueError, match="chunk_size must be at least 1"):
        gdn_chunk(q, k, v, g, beta, chunk_size=0)
