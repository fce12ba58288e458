"""Faults of packed sequences, of their boundaries and tails, and of heads."""

from __future__ import annotations

import torch

from suites.controls.control import Control
from suites.subjects.eager import Call, EagerGDN, Notes

Tensor = torch.Tensor


def _state_leaks(self: EagerGDN, state: Tensor, n: Notes) -> None:
    EagerGDN.scan(self, state, n)
    if n.options.cu_seqlens is None or n.at.N < 2:
        return
    left = n.final.reshape(n.at.N, n.HV, n.K, n.V)
    given = state.reshape_as(left).clone()
    given[1:] = left[:-1]
    EagerGDN.scan(self, given.flatten(0, 1), n)


def _lose_boundaries_in_inference(self: EagerGDN, call: Call) -> None:
    EagerGDN.prepare(self, call)
    if not torch.is_grad_enabled() and call.h0 is None:
        call.cu_seqlens = None


def _gradient_leaks(self: EagerGDN, ds: Tensor, n: Notes) -> None:
    EagerGDN.scan_back(self, ds, n)
    if n.options.cu_seqlens is None or n.at.N < 2:
        return
    entered = n.dh0.reshape(n.at.N, n.HV, n.K, n.V)
    received = ds.reshape_as(entered).clone()
    received[:-1] += entered[1:]
    EagerGDN.scan_back(self, received.flatten(0, 1), n)


def _rounded_up(self: EagerGDN, cu_seqlens: Tensor | None, B: int, T: int) -> list[tuple[int, int]]:
    spans = EagerGDN.boundaries(self, cu_seqlens, B, T)
    return [(a, min(a + (b - a + 63) // 64 * 64, T)) for a, b in spans] if cu_seqlens is not None else spans


def _document_modulo(self: EagerGDN, h0: Tensor | None, n: Notes) -> Tensor:
    state = EagerGDN.entry(self, h0, n)
    return state[torch.arange(len(state), device=state.device) % 1024]


def _empty_is_zero(self: EagerGDN, n: Notes, v: Tensor) -> tuple[Tensor, Tensor]:
    empty = ~n.at.whole.any(1).repeat_interleave(n.HV)
    n.final = torch.where(empty.view(-1, 1, 1), torch.zeros_like(n.final), n.final)
    return EagerGDN.outputs(self, n, v)


def _last_row(n: Notes) -> Tensor:
    """`[chunks, M, C]`: the last token of a partial chunk."""
    last = n.at.valid & ~torch.nn.functional.pad(n.at.valid[..., 1:], (0, 1), value=True)
    return last.transpose(0, 1).repeat_interleave(n.HV, 1)


def _dg_tail_dropped(self: EagerGDN, dcum: Tensor, n: Notes) -> Tensor:
    dg = EagerGDN.uncumulate(self, dcum, n)
    return torch.where(_last_row(n), torch.zeros_like(dg), dg)


def _w_tail_dropped(self: EagerGDN, w: Tensor, n: Notes) -> Tensor:
    w = torch.where(_last_row(n)[..., None], torch.zeros_like(w), w)
    return EagerGDN.round_w(self, w, n)


def _tail_not_masked(self: EagerGDN, n: Notes) -> Tensor:
    length = n.at.valid.sum(-1).T.repeat_interleave(n.HV, 1)
    at = (length - 2).clamp_min(0)[..., None]
    return self.decay(n.G.gather(-1, at) - n.G)


def _first_head(self: EagerGDN, n: Notes) -> Tensor:
    heads = torch.arange(n.k.shape[1], device=n.k.device)
    n.q = n.q[:, heads // n.HV * n.HV]
    return EagerGDN.attention(self, n)


def _head_modulo(self: EagerGDN, n: Notes) -> Tensor:
    heads = torch.arange(n.k.shape[1], device=n.k.device)
    H = n.options.k.shape[2]
    own = heads // n.HV * n.HV + heads % n.HV % H * (n.HV // H)
    n.k = n.k[:, own]
    return EagerGDN.interaction(self, n)


def _gate_of_head_0_backward(self: EagerGDN, ds: Tensor, n: Notes) -> None:
    last = n.G_last
    heads = torch.arange(last.shape[1], device=last.device)
    n.G_last = last[:, heads // n.HV * n.HV]
    EagerGDN.scan_back(self, ds, n)
    n.G_last = last


def _first_of_group(self: EagerGDN, per_value_head: Tensor) -> Tensor:
    return per_value_head[:, :, 0]


def _mean_of_group(self: EagerGDN, per_value_head: Tensor) -> Tensor:
    return per_value_head.mean(2)


def _third_head_as_first(self: EagerGDN, per_value_head: Tensor) -> Tensor:
    found = per_value_head.sum(2)
    return found[:, torch.arange(found.shape[1], device=found.device) % 2]


def _only_head_keeps(self: EagerGDN, n: Notes) -> Tensor:
    found = EagerGDN.over_chunk(self, n)
    return torch.ones_like(found) if n.HV == 1 else found


def _four_sequences_go_on(self: EagerGDN, c: int, n: Notes) -> Tensor:
    found = EagerGDN.alive(self, c, n)
    first = torch.arange(len(found), device=found.device).view(-1, 1, 1) < 4 * n.HV
    return found & first if c else found


def _entry_of_a_pair(self: EagerGDN, h0: Tensor | None, n: Notes) -> Tensor:
    found = EagerGDN.entry(self, h0, n)
    return found if n.at.N == 1 else found[torch.arange(len(found), device=found.device) % (2 * n.HV)]


def _aligned_boundary_not_seen(self: EagerGDN, state: Tensor, n: Notes) -> None:
    EagerGDN.scan(self, state, n)
    starts = [] if n.options.cu_seqlens is None else n.options.cu_seqlens[1:-1].tolist()
    at = next((i for i, start in enumerate(starts, 1) if start and start % self.chunk_size == 0), 0)
    if at and n.options.h0 is None:
        leaked = state.clone()
        leaked[at * n.HV : (at + 1) * n.HV] = n.final[(at - 1) * n.HV : at * n.HV]
        EagerGDN.scan(self, leaked, n)


SEQUENCES = (
    Control(
        "state_leaks",
        "packing",
        "the accumulator is not reset at a packing boundary",
        {"scan": _state_leaks},
        looks=("exact_docs", "exact_empty"),
    ),
    Control(
        "gradient_leaks",
        "packing",
        "the backward state pass is not reset at a packing boundary",
        {"scan_back": _gradient_leaks},
        looks=("exact_docs", "exact_empty"),
    ),
    Control(
        "boundaries_rounded_up",
        "packing",
        "a chunk that starts in one document reads on into the next",
        {"boundaries": _rounded_up},
        looks=("exact_docs", "plain"),
    ),
    Control(
        "document_modulo",
        "packing",
        "an index over documents and heads is folded into what a launch dimension holds",
        {"entry": _document_modulo},
        tier="whole",
        looks=("documents",),
    ),
    Control(
        "empty_state_zero",
        "packing",
        "a program without tokens writes zeros",
        {"outputs": _empty_is_zero},
        looks=("exact_empty",),
    ),
    Control(
        "dg_tail_dropped",
        "packing",
        "dg of the last token of a partial chunk is lost",
        {"uncumulate": _dg_tail_dropped},
        looks=("exact", "plain"),
    ),
    Control(
        "w_tail_dropped",
        "packing",
        "the last row of W of a partial chunk is masked away",
        {"round_w": _w_tail_dropped},
        looks=("exact", "smooth"),
    ),
    Control(
        "closing_gate_early",
        "packing",
        "the gate that closes a chunk is read from the row before the last",
        {"to_end": _tail_not_masked},
        tier="whole",
        looks=("plain",),
    ),
    Control(
        "first_head_of_q",
        "heads",
        "every value head reads the first q head",
        {"attention": _first_head},
        looks=("exact",),
    ),
    Control(
        "head_modulo",
        "heads",
        "head j reads j mod H, not j // (HV / H)",
        {"interaction": _head_modulo},
        looks=("exact",),
    ),
    Control(
        "gate_of_head_0_backward",
        "heads",
        "the backward state pass loads the first head's gate for all",
        {"scan_back": _gate_of_head_0_backward},
        tier="whole",
        looks=("decay",),
    ),
    Control(
        "first_of_group",
        "heads",
        "the gradients of a group's heads overwrite one another",
        {"sum_group": _first_of_group},
        looks=("exact",),
    ),
    Control(
        "mean_of_group",
        "heads",
        "the gradients of a group's heads are averaged over a sharded dimension",
        {"sum_group": _mean_of_group},
        looks=("exact",),
    ),
    Control(
        "head_of_a_pair",
        "heads",
        "the index of a q/k head wraps at two: a third one gets the gradient of the first",
        {"sum_group": _third_head_as_first},
        tier="whole",
        looks=("three_heads",),
    ),
    Control(
        "only_head_does_not_decay",
        "heads",
        "an axis of one head is squeezed away, and the decay over a chunk with it",
        {"over_chunk": _only_head_keeps},
        tier="whole",
        looks=("one_head",),
    ),
    Control(
        "four_sequences_go_on",
        "packing",
        "a table of chunks holds four sequences: later ones end after their first chunk",
        {"alive": _four_sequences_go_on},
        tier="whole",
        looks=("many",),
    ),
    Control(
        "initial_state_of_a_pair",
        "state",
        "the index of a sequence wraps at two where its initial state is read",
        {"entry": _entry_of_a_pair},
        tier="whole",
        looks=("batch5",),
    ),
    Control(
        "aligned_boundary_not_seen",
        "packing",
        "a document that starts on the chunk grid goes on from the one before, unless a state is given",
        {"scan": _aligned_boundary_not_seen},
        tier="whole",
        looks=("many_from_zero",),
    ),
    Control(
        "boundaries_lost_in_inference",
        "packing",
        "a fallback for calls without gradient and without states knows no packed sequences",
        {"prepare": _lose_boundaries_in_inference},
        looks=("repeat",),
    ),
)
"""Boundaries off the chunk grid, and heads that differ, bring them out."""
