"""Autograd's gradients of every oracle are the derivatives of its values, both sites on."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from references.fused import l2_normalized, log_decay, write_strength
from references.gdn_chunk import gdn_chunk
from references.gdn_recurrent import gdn_recurrent
from references.kda_recurrent import kda_recurrent
from references.sites import Offsets
from suites.selfcheck.references.inputs import boundaries, make_inputs, relative, run

Tensor = torch.Tensor

SMALL: dict[str, Any] = {"T": 11, "H": 1, "HV": 2, "K": 3, "V": 5}


def gradcheck(op: Callable[..., Any], inputs: list[Tensor]) -> bool:
    return bool(torch.autograd.gradcheck(op, tuple(inputs), eps=1e-6, atol=1e-7, rtol=1e-5, fast_mode=True))


@pytest.mark.parametrize("op", [gdn_recurrent, gdn_chunk])
@pytest.mark.parametrize("cu_seqlens", [None, boundaries(1, 0, 6, 4)], ids=["batch", "packed"])
@pytest.mark.parametrize("state_v_first", [False, True])
def test_unrounded_forms_pass_gradcheck(
    op: Callable[..., Any], cu_seqlens: Tensor | None, state_v_first: bool
) -> None:
    inputs = make_inputs(**SMALL, N=None if cu_seqlens is None else 4)
    if state_v_first:
        inputs[5] = inputs[5].detach().mT.contiguous().requires_grad_()
    options: dict[str, Any] = {"cu_seqlens": cu_seqlens, "state_v_first": state_v_first, "chunk_size": 4}
    assert gradcheck(lambda *x: op(*x, **options), inputs)


def test_channel_gates_pass_gradcheck() -> None:
    assert gradcheck(lambda *x: kda_recurrent(*x), make_inputs(**SMALL, channel_gates=True))


@pytest.mark.parametrize("state_format", ["e4m3", "int8"])
@pytest.mark.parametrize("w_dtype", [torch.float64, torch.bfloat16])
def test_both_sites_pass_gradcheck_through_frozen_offsets(w_dtype: torch.dtype, state_format: str) -> None:
    inputs = make_inputs(**SMALL)
    options: dict[str, Any] = {
        "state_format": state_format,
        "w_format": "e4m3",
        "w_dtype": w_dtype,
        "state_block_v": 16,
        "chunk_size": 4,
    }
    rounded = run(gdn_chunk, inputs, **options)
    options["offsets"] = Offsets()
    gdn_chunk(*inputs, **options)
    options["offsets"].freeze()
    assert gradcheck(lambda *x: gdn_chunk(*x, **options), inputs)
    replayed = run(gdn_chunk, inputs, **options)
    for name, value in rounded.items():  # the graph that was checked is that of the rounded run
        assert relative(replayed[name], value) <= 1e-14, name


def test_offsets_are_frozen_after_a_run_and_only_for_that_call() -> None:
    offsets = Offsets()
    with pytest.raises(ValueError, match="must be recorded before they are frozen"):
        offsets.freeze()
    inputs = make_inputs(**SMALL)
    gdn_chunk(*inputs, state_format="e4m3", chunk_size=4, offsets=offsets)
    offsets.freeze()
    with pytest.raises(KeyError, match="record the same call first"):
        gdn_chunk(*inputs, state_format="e4m3", chunk_size=2, offsets=offsets)


def test_fused_activations_pass_gradcheck() -> None:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, 4, dtype=torch.float64, generator=draw).requires_grad_()
    a_log, bias = (torch.randn(4, dtype=torch.float64, generator=draw).requires_grad_() for _ in range(2))
    assert gradcheck(lambda y: l2_normalized(y), [x])
    assert gradcheck(lambda y: write_strength(y, allow_neg_eigval=True), [x])
    assert gradcheck(lambda y, a, b: log_decay(y, a, b), [x, a_log, bias])


def test_fused_activations_have_their_known_values() -> None:
    zero = torch.zeros(1, 1, 2, dtype=torch.float64)
    assert write_strength(zero).flatten().tolist() == [0.5, 0.5]
    assert write_strength(zero, allow_neg_eigval=True).flatten().tolist() == [1.0, 1.0]
    assert log_decay(zero, zero[0, 0]).flatten().tolist() == [-math.log(2.0)] * 2
    assert log_decay(zero + 100.0, zero[0, 0], zero[0, 0] - 50.0).flatten().tolist() == [-50.0] * 2
    assert torch.equal(l2_normalized(zero), zero)
    assert float(l2_normalized(zero + 1.0)[0, 0, 0]) == pytest.approx((2.0 + 1e-6) ** -0.5, rel=1e-15)
