"""Packed sequences are the sequences one by one, whatever their lengths."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from references.gdn_chunk import gdn_chunk
from references.gdn_recurrent import gdn_recurrent
from references.packing import MANY, pack
from suites.selfcheck.references.inputs import boundaries, make_inputs, relative, run

Tensor = torch.Tensor

LENGTHS = [
    pytest.param([0, 70, 1, 0, 65, 3, 0], id="empty-and-short"),
    pytest.param([64, 64, 128], id="multiples"),
    pytest.param([1, 1, 200] + [0, 1, 5] * 40, id="many-short"),
]


def separately(
    op: Callable[..., Any], inputs: list[Tensor], lengths: list[int], **options: Any
) -> dict[str, Tensor]:
    """Runs each sequence by itself and joins the results."""
    q, k, v, g, beta, state = inputs
    start, outputs, finals = 0, [], []
    for index, length in enumerate(lengths):
        piece = slice(start, start + length)
        o, final_state = op(*(x[:, piece] for x in (q, k, v, g, beta)), state[index : index + 1], **options)
        outputs.append(o)
        finals.append(final_state)
        start += length
    return run(lambda *_: (torch.cat(outputs, 1), torch.cat(finals)), inputs)


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("op", [gdn_chunk, gdn_recurrent])
def test_packed_equals_separate(op: Callable[..., Any], lengths: list[int]) -> None:
    inputs = make_inputs(T=sum(lengths), H=1, HV=2, K=8, V=24, N=len(lengths))
    options: dict[str, Any] = {"state_format": "e4m3", "state_block_v": 16}
    if op is gdn_chunk:
        options["w_format"] = "e4m3"
    packed = run(op, inputs, cu_seqlens=boundaries(*lengths), **options)
    expected = separately(op, inputs, lengths, **options)
    for name, value in expected.items():
        assert relative(packed[name], value) <= 1e-13, name


def test_sequences_of_a_batch_are_packed_sequences() -> None:
    batch = make_inputs(B=3, T=70)
    packed = [x.detach().flatten(0, 1)[None].requires_grad_() for x in batch[:5]] + batch[5:]
    expected = run(gdn_chunk, batch, w_format="e4m3", state_format="int8")
    do, dht = (torch.randn(*shape, dtype=torch.float64) for shape in ((3, 70, 4, 48), (3, 4, 32, 48)))
    expected = run(gdn_chunk, batch, do=do, dht=dht, w_format="e4m3", state_format="int8")
    options: dict[str, Any] = {
        "cu_seqlens": boundaries(70, 70, 70),
        "w_format": "e4m3",
        "state_format": "int8",
    }
    actual = run(gdn_chunk, packed, do=do.flatten(0, 1)[None], dht=dht, **options)
    for name, value in expected.items():
        assert torch.equal(actual[name].reshape(value.shape), value), name


def test_no_gradient_crosses_a_boundary() -> None:
    inputs = make_inputs(T=140, N=2)
    options: dict[str, Any] = {"cu_seqlens": boundaries(70, 70), "state_format": "e4m3", "w_format": "e4m3"}
    do = torch.zeros(1, 140, 4, 48, dtype=torch.float64)
    do[:, 70:] = 1.0
    gradients = run(gdn_chunk, inputs, do=do, dht=torch.zeros(2, 4, 32, 48, dtype=torch.float64), **options)
    for name in ("dq", "dk", "dv", "dg", "dbeta"):
        assert not bool(gradients[name][:, :70].any()), name
        assert bool(gradients[name][:, 70:].any()), name
    assert not bool(gradients["dh0"][0].any())


def test_every_token_has_one_slot_and_every_chunk_one_place() -> None:
    lengths = [0, 1, 130, 5, 0, 64] + [1] * MANY
    packing = pack(1, sum(lengths), boundaries(*lengths), 64, torch.device("cpu"))
    assert len(packing.plans) == 2
    assert torch.equal(packing.tokens[packing.slots], torch.arange(sum(lengths)))
    assert packing.chunks.sort().values.tolist() == list(range(sum(-(-n // 64) for n in lengths)))
    assert torch.cat([plan.sequences for plan in packing.plans])[packing.sequences].tolist() == list(
        range(70)
    )
    for plan in packing.plans:
        assert list(plan.counts) == sorted(plan.counts, reverse=True)


def test_thousands_of_one_token_documents_take_no_loop() -> None:
    inputs = make_inputs(T=4096, H=1, HV=2, K=16, V=16, N=4096)
    begin = time.process_time()
    run(gdn_chunk, inputs, cu_seqlens=torch.arange(4097), state_format="e4m3", w_format="e4m3")
    assert time.process_time() - begin < 5.0  # one after the other they take a minute
