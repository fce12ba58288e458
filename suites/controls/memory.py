"""Faults of indices, strides and masks, of what is written, and of what compilers and schedules do."""

from __future__ import annotations

import copy
import itertools

import torch

from suites.controls.control import Control
from suites.subjects.eager import Call, EagerGDN, EagerQDQ, Notes, Place

Tensor = torch.Tensor


def _as_if_contiguous(x: Tensor) -> Tensor:
    """The first elements of a tensor's memory, read in the order of a contiguous one."""
    if x.is_contiguous():
        return x
    strides = torch.empty(x.shape, device="meta").stride()
    return x.as_strided(x.shape, strides, x.storage_offset())


def _strides_ignored(self: EagerGDN, x: Tensor, n: Notes) -> Tensor:
    return EagerGDN.gather(self, _as_if_contiguous(x.detach()), n)


def _state_gradient_misread(self: EagerGDN, n: Notes, do: Tensor, dht: Tensor) -> None:
    EagerGDN.backward(self, n, do, _as_if_contiguous(dht))


def _writes_q(self: EagerGDN, call: Call) -> None:
    EagerGDN.prepare(self, call)
    call.q.detach().mul_(0.5)


def _writes_do(self: EagerGDN, n: Notes, do: Tensor, dht: Tensor) -> None:
    EagerGDN.backward(self, n, do, dht)
    dht.detach().zero_()


def _behind_the_end(self: EagerGDN, x: Tensor, n: Notes) -> Tensor:
    gathered = EagerGDN.gather(self, x, n)
    end = x.storage_offset() + x.numel()
    if not x.is_contiguous() or x.untyped_storage().nbytes() // x.element_size() <= end:
        return gathered
    return gathered + 0.0 * x.detach().as_strided((1,), (1,), end).to(self.work)


def _masked_by_product(self: EagerGDN, x: Tensor, n: Notes) -> Tensor:
    mask = n.at.valid.transpose(0, 1).repeat_interleave(n.HV, 1)
    everywhere = Place(**{**vars(n.at), "valid": torch.ones_like(n.at.valid)})
    gathered = EagerGDN.gather(self, x, Notes(**{**vars(n), "at": everywhere}))
    return gathered * mask.view(*mask.shape, *[1] * (gathered.dim() - 3))


def _nan_becomes_zero(self: EagerGDN, n: Notes) -> Tensor:
    return torch.nan_to_num(EagerGDN.read(self, n))


def _poison_stays_local(self: EagerQDQ, x: Tensor, dim: tuple[int, ...], fmt: str) -> Tensor:
    sound = EagerQDQ.groups(self, torch.where(x.isfinite(), x, torch.zeros_like(x)), dim, fmt)
    return torch.where(x.isfinite(), sound, torch.full_like(sound, torch.nan))


def _unwritten_tail(self: EagerGDN, y: Tensor, like: Tensor, n: Notes) -> Tensor:
    written = EagerGDN.scatter(self, y, like, n)
    out = torch.empty_like(written)
    tokens = written.shape[1] // 16 * 16
    out[:, :tokens] = written[:, :tokens]
    return out


def _dq_tile_missing(self: EagerGDN, n: Notes) -> None:
    EagerGDN.through_attention(self, n)
    n.dq = torch.cat([n.dq[..., :32], torch.zeros_like(n.dq[..., 32:])], -1)


def _keys_beyond_tile(self: EagerGDN, n: Notes) -> Tensor:
    whole = n.K // 16 * 16 or n.K
    n.kk = self.dot(n.k[..., :whole], n.k[..., :whole].mT, n)
    return (n.beta[..., None] * n.kk * n.gam).tril(-1)


def _empty_after_empty(self: EagerGDN, state: Tensor, n: Notes) -> None:
    EagerGDN.scan(self, state, n)
    final = n.final.reshape(n.at.N, n.HV, n.K, n.V).clone()
    for i in range(1, n.at.N):
        if not n.at.valid[i - 1 : i + 1].any():
            final[i] = final[i - 1]
    n.final = final.flatten(0, 1)


def _keys_beyond_128(self: EagerGDN, n: Notes) -> None:
    before = n.dk
    EagerGDN.through_attention(self, n)
    n.dk[..., 128:] = before[..., 128:]


def _half_chunks(self: EagerGDN, spans: list[tuple[int, int]], device: torch.device) -> Place:
    short = copy.copy(self)
    short.chunk_size = 32 if max((b - a for a, b in spans), default=0) < self.chunk_size else self.chunk_size
    return EagerGDN.place(short, spans, device)


def _wide_keys(self: EagerGDN, n: Notes) -> None:
    EagerGDN.through_attention(self, n)
    if n.K < 64 or n.at.C < 32:
        return
    pair = self.dot(n.do, n.vn.mT, n).tril() * n.gam * n.options.scale
    lost = torch.zeros_like(pair)
    lost[..., 16:32, :16] = pair[..., 16:32, :16] - pair[..., 16:32, :16].mT
    n.dk = n.dk - self.dot(lost.mT, n.q, n)


def _square_misread(self: EagerGDN, h0: Tensor | None, n: Notes) -> Tensor:
    state = EagerGDN.entry(self, h0, n)
    return state.mT if n.K == n.V and n.options.state_v_first else state


def _square_miswritten(self: EagerGDN, n: Notes, v: Tensor) -> tuple[Tensor, Tensor]:
    o, final = EagerGDN.outputs(self, n, v)
    return o, final.mT.contiguous() if n.K == n.V else final


def _later_chunks(self: EagerGDN, state: Tensor, c: int, n: Notes) -> Tensor:
    vn = EagerGDN.corrected(self, state, c, n)
    return vn if c == 0 else vn * (1.0 + 2.0**-7)


def _one_element(self: EagerGDN, n: Notes) -> Tensor:
    o = EagerGDN.read(self, n)
    flat = o.view(-1)
    largest = flat.abs().argmax()
    flat[largest] *= 1.01
    return o


def _blocks_from_1024(self: EagerGDN, n: Notes) -> Tensor:
    o = EagerGDN.read(self, n)
    o.flatten(0, 1)[1024:] = torch.nan
    return o


def _chunks_wrap_at_32(self: EagerGDN, n: Notes) -> Tensor:
    decay = EagerGDN.over_chunk(self, n)
    return decay[torch.arange(len(decay), device=decay.device) % 32]


def _final_state_in_bf16(self: EagerGDN, n: Notes, v: Tensor) -> tuple[Tensor, Tensor]:
    o, final = EagerGDN.outputs(self, n, v)
    return o, final.bfloat16()


def _o_in_fp64(self: EagerGDN, n: Notes, v: Tensor) -> tuple[Tensor, Tensor]:
    o, final = EagerGDN.outputs(self, n, v)
    return o.double(), final


def _any_order(self: EagerGDN, a: Tensor, b: Tensor, n: Notes) -> Tensor:
    if "turn" not in vars(n):
        n.turn = next(self.__dict__.setdefault("calls", itertools.count())) % 2
    return EagerGDN.dot(self, a.flip(-1), b.flip(-2), n) if n.turn else EagerGDN.dot(self, a, b, n)


def _race(self: EagerGDN, n: Notes) -> Tensor:
    o = EagerGDN.read(self, n)
    if next(self.__dict__.setdefault("calls", itertools.count())) % 2 and o.numel():
        o[..., -1, :] *= 1.0 + 2.0**-7
    return o


def _fast_mode(self: EagerGDN, call: Call) -> None:
    EagerGDN.prepare(self, call)
    torch.backends.cuda.matmul.allow_tf32 = not torch.backends.cuda.matmul.allow_tf32


def _advances_given_state(self: EagerGDN, state: Tensor, n: Notes) -> None:
    EagerGDN.scan(self, state, n)
    given = n.options.h0
    if given is not None and not given.requires_grad:
        final = n.final.reshape(n.at.N, n.HV, n.K, n.V)
        given.copy_(final.mT if n.options.state_v_first else final)


def _boundaries_consumed(self: EagerGDN, cu_seqlens: Tensor | None, B: int, T: int) -> list[tuple[int, int]]:
    spans = EagerGDN.boundaries(self, cu_seqlens, B, T)
    if cu_seqlens is not None:
        cu_seqlens[-1] += 0 if len(spans) < 2 else 1
    return spans


def _buffer(self: EagerGDN, name: str, x: Tensor) -> Tensor:
    """`x` in a buffer that every call of its shape shares."""
    buffers: dict[object, Tensor] = self.__dict__.setdefault("buffers", {})
    return buffers.setdefault((name, x.shape, x.dtype), torch.empty_like(x)).copy_(x)


def _states_in_one_buffer(self: EagerGDN, state: Tensor, n: Notes) -> None:
    EagerGDN.scan(self, state, n)
    n.states = _buffer(self, "states", n.states)


def _output_in_one_buffer(self: EagerGDN, n: Notes, v: Tensor) -> tuple[Tensor, Tensor]:
    o, final = EagerGDN.outputs(self, n, v)
    return _buffer(self, "o", o).detach(), final


def _boundaries_cached(self: EagerGDN, cu: Tensor | None, B: int, T: int) -> list[tuple[int, int]]:
    if cu is None:
        return EagerGDN.boundaries(self, cu, B, T)
    known: dict[object, list[tuple[int, int]]] = self.__dict__.setdefault("known", {})
    return known.setdefault((cu.data_ptr(), len(cu), T), EagerGDN.boundaries(self, cu, B, T))


def _saved_w_consumed(self: EagerGDN, n: Notes) -> None:
    EagerGDN.through_solve(self, n)
    n.wq *= 0.5


def _dk_only_beside_dq(self: EagerGDN, call: Call) -> tuple[Tensor, Tensor]:
    if not call.q.requires_grad:
        call.k = call.k.detach()
    return EagerGDN.rule(self, call)


MEMORY = (
    Control(
        "strides_ignored",
        "memory",
        "a view is read as if it were contiguous",
        {"gather": _strides_ignored},
        tier="whole",
        looks=("plain",),
    ),
    Control(
        "strides_of_dht_ignored",
        "memory",
        "a strided incoming gradient is read as if it were contiguous",
        {"backward": _state_gradient_misread},
        tier="whole",
        looks=("plain",),
    ),
    Control(
        "q_overwritten",
        "memory",
        "a prologue scales q in place",
        {"prepare": _writes_q},
        looks=("repeat",),
    ),
    Control(
        "dht_overwritten",
        "memory",
        "the backward uses the incoming gradient as its workspace",
        {"backward": _writes_do},
        looks=("repeat",),
    ),
    Control(
        "state_overwritten_without_gradient",
        "memory",
        "a forward that records nothing advances the given state in place, as a decoder does",
        {"scan": _advances_given_state},
        looks=("repeat",),
    ),
    Control(
        "boundaries_overwritten",
        "memory",
        "the offsets are changed in place",
        {"boundaries": _boundaries_consumed},
        looks=("repeat",),
    ),
    Control(
        "states_in_one_buffer",
        "memory",
        "layers of one shape save their states in the same workspace",
        {"scan": _states_in_one_buffer},
        looks=("calls",),
    ),
    Control(
        "output_in_one_buffer",
        "memory",
        "the output is returned in a buffer that the next call writes into",
        {"outputs": _output_in_one_buffer},
        looks=("calls",),
    ),
    Control(
        "boundaries_cached",
        "packing",
        "the chunk table is cached by the address of the boundaries",
        {"boundaries": _boundaries_cached},
        looks=("calls",),
    ),
    Control(
        "saved_w_consumed",
        "memory",
        "the backward uses a saved tensor as its workspace, and a second pass reads what is left",
        {"through_solve": _saved_w_consumed},
        looks=("calls",),
    ),
    Control(
        "dk_only_beside_dq",
        "memory",
        "a kernel that gives dq and dk is not launched where q is frozen",
        {"rule": _dk_only_beside_dq},
        tier="whole",
        looks=("arguments",),
    ),
    Control(
        "tail_unwritten",
        "memory",
        "tokens beyond the last whole tile are never written",
        {"scatter": _unwritten_tail},
        looks=("exact",),
    ),
    Control(
        "reads_behind_the_end",
        "memory",
        "a masked load without a mask multiplies what lies behind the tensor by zero",
        {"gather": _behind_the_end},
        looks=("memory",),
    ),
    Control(
        "masked_by_product",
        "packing",
        "tokens beyond a boundary are multiplied by zero, and zero times NaN is NaN",
        {"gather": _masked_by_product},
        looks=("borders",),
    ),
    Control(
        "nan_becomes_zero",
        "range",
        "outputs are cleaned of NaN, and a broken run looks healthy",
        {"read": _nan_becomes_zero},
        looks=("borders",),
    ),
    Control(
        "poison_stays_local",
        "range",
        "a maximum that drops NaN leaves the rest of its group as if nothing had happened",
        rounding={"groups": _poison_stays_local},
        looks=("borders",),
    ),
    Control(
        "dq_tile_missing",
        "memory",
        "the grid is too small for the last tile of dq",
        {"through_attention": _dq_tile_missing},
        looks=("exact_wide", "plain"),
    ),
    Control(
        "keys_beyond_tile_dropped",
        "memory",
        "the loop over keys ends with the last whole tile",
        {"interaction": _keys_beyond_tile},
        tier="whole",
        looks=("odd",),
    ),
    Control(
        "empty_after_empty",
        "packing",
        "boundaries are padded to a fixed number, and of the empty sequences in a row the first one counts",
        {"scan": _empty_after_empty},
        tier="whole",
        looks=("padded",),
    ),
    Control(
        "third_tile_of_keys_dropped",
        "memory",
        "a kernel of the backward has two tiles of 64 keys, and what the readout gives to a third is lost",
        {"through_attention": _keys_beyond_128},
        tier="whole",
        looks=("sizes",),
    ),
    Control(
        "half_chunks_of_short_sequences",
        "state",
        "a launch for short sequences has chunks of 32, and the state is rounded between them",
        {"place": _half_chunks},
        looks=("probe_write_short",),
    ),
    Control(
        "wide_keys_mistransposed",
        "device",
        "the tile of 64 keys alone takes an untransposed block",
        {"through_attention": _wide_keys},
        looks=("odd",),
    ),
    Control(
        "square_state_misread",
        "state",
        "the layout of a square state is not noticed",
        {"entry": _square_misread},
        looks=("square",),
    ),
    Control(
        "square_state_miswritten",
        "state",
        "a square final state is written in the other layout",
        {"outputs": _square_miswritten},
        looks=("square",),
    ),
    Control(
        "later_chunks",
        "device",
        "one bit is lost in every chunk but the first",
        {"corrected": _later_chunks},
        looks=("exact",),
    ),
    Control(
        "one_element",
        "device",
        "one element in thousands is off by 1 %",
        {"read": _one_element},
        looks=("exact",),
    ),
    Control(
        "blocks_from_1024",
        "device",
        "blocks from the 1,024th on fail on one architecture",
        {"read": _blocks_from_1024},
        tier="whole",
        looks=("documents",),
    ),
    Control(
        "chunks_wrap_at_32",
        "device",
        "a table of 32 chunks is read again from its start in long sequences",
        {"over_chunk": _chunks_wrap_at_32},
        tier="whole",
        looks=("long",),
    ),
    Control(
        "final_state_in_bf16",
        "state",
        "the final state has another dtype",
        {"outputs": _final_state_in_bf16},
        looks=("probe_state",),
    ),
    Control(
        "o_in_fp64",
        "memory",
        "the output has another dtype",
        {"outputs": _o_in_fp64},
        looks=("probe_state",),
    ),
    Control(
        "race",
        "device",
        "two writers of one row, now and then",
        {"read": _race},
        looks=("repeat",),
    ),
    Control(
        "any_order",
        "device",
        "sums are taken in an order that changes from call to call",
        {"dot": _any_order},
        looks=("repeat",),
    ),
    Control(
        "global_switch",
        "device",
        "a numeric switch of the process is changed and left so",
        {"prepare": _fast_mode},
        looks=("exact",),
    ),
)
"""Each leaves most of the answer as it should be."""
