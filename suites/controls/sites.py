"""Faults in what the two sites round, and when."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from suites.controls.control import Control
from suites.subjects.eager import Call, EagerGDN, EagerQDQ, Notes

Tensor = torch.Tensor


def _state_off(self: EagerGDN, state: Tensor, where: str, n: Notes) -> Tensor:
    return state


def _w_off(self: EagerGDN, w: Tensor, n: Notes) -> Tensor:
    return w


def _initial_unrounded(self: EagerGDN, state: Tensor, where: str, n: Notes) -> Tensor:
    return state if where == "initial" else EagerGDN.round_state(self, state, where, n)


def _left_before_rounding(self: EagerGDN, n: Notes, v: Tensor) -> tuple[Tensor, Tensor]:
    n.final = n.raws[-1] if n.at.chunks else n.final
    return EagerGDN.outputs(self, n, v)


def _read_before_rounding(self: EagerGDN, n: Notes) -> Tensor:
    rounded, n.states = n.states, torch.stack(n.raws[: n.at.chunks]) if n.at.chunks else n.states
    o = EagerGDN.read(self, n)
    n.states = rounded
    return o


def _corrected_before_rounding(self: EagerGDN, state: Tensor, c: int, n: Notes) -> Tensor:
    return EagerGDN.corrected(self, n.raws[-1], c, n)


def _updated_before_rounding(self: EagerGDN, state: Tensor, vn: Tensor, c: int, n: Notes) -> Tensor:
    return EagerGDN.update(self, n.raws[-1], vn, c, n)


def _every_second_chunk(self: EagerGDN, state: Tensor, where: str, n: Notes) -> Tensor:
    return state if where != "initial" and int(where) % 2 else EagerGDN.round_state(self, state, where, n)


def _third_of_many(self: EagerGDN, state: Tensor, where: str, n: Notes) -> Tensor:
    left_out = where == "2" and n.at.chunks > 3
    return state if left_out else EagerGDN.round_state(self, state, where, n)


def _w_of_early_chunks(self: EagerGDN, w: Tensor, n: Notes) -> Tensor:
    return torch.cat([EagerGDN.round_w(self, w, n)[:32], w[32:]])


def _first_head_alone(self: EagerGDN, state: Tensor, where: str, n: Notes) -> Tensor:
    rounded = EagerGDN.round_state(self, state, where, n)
    first = (torch.arange(len(state), device=state.device) % n.HV == 0).view(-1, 1, 1)
    return torch.where(first, rounded, state)


def _before_the_solve(self: EagerGDN, n: Notes, right: Tensor) -> Tensor:
    keys = (n.beta * self.decay(n.G))[..., None] * n.k
    rounds = n.options.w_format is not None and right.shape == keys.shape and torch.equal(right, keys)
    return EagerGDN.solve(self, n, self.qdq.w_values(right, "e4m3") if rounds else right)


def _tile_of_64(self: EagerQDQ, state: Tensor, block_v: int, fmt: str) -> Tensor:
    return EagerQDQ.state_values(self, state, 64, fmt)


def _half_tile(self: EagerQDQ, state: Tensor, block_v: int, fmt: str) -> Tensor:
    return EagerQDQ.state_values(self, state, block_v // 2, fmt)


def _whole_state(self: EagerQDQ, state: Tensor, block_v: int, fmt: str) -> Tensor:
    return EagerQDQ.state_values(self, state, max(1, state.shape[-1]), fmt)


def _per_tensor(self: EagerQDQ, x: Tensor, dim: tuple[int, ...]) -> Tensor:
    amax = EagerQDQ.amax(self, x, dim)
    return amax.amax().expand_as(amax) if amax.numel() else amax


def _per_key_row(self: EagerQDQ, x: Tensor, dim: tuple[int, ...]) -> Tensor:
    return EagerQDQ.amax(self, x, (-1,))


def _always_e4m3(self: EagerQDQ, state: Tensor, block_v: int, fmt: str) -> Tensor:
    return EagerQDQ.state_values(self, state, block_v, "e4m3")


def _w_of_the_chunk(self: EagerGDN, w: Tensor, n: Notes) -> Tensor:
    if n.options.w_format is None:
        return w
    return self.qdq.groups(w, (-2, -1), n.options.w_format).to(w.dtype)


def _w_of_a_group(self: EagerGDN, w: Tensor, n: Notes) -> Tensor:
    if n.options.w_format is None:
        return w
    heads = n.options.k.shape[2]
    by_group = w.reshape(w.shape[0], n.at.N, heads, n.HV // heads, n.at.C, n.K)
    return self.qdq.groups(by_group, (3, 5), n.options.w_format).reshape(w.shape).to(w.dtype)


def _w_of_64_keys(self: EagerQDQ, w: Tensor, fmt: str) -> Tensor:
    blocks = range(0, max(1, w.shape[-1]), 64)
    return torch.cat([EagerQDQ.w_values(self, w[..., i : i + 64], fmt) for i in blocks], -1)


def _amax_of_64_keys(self: EagerQDQ, x: Tensor, dim: tuple[int, ...]) -> Tensor:
    tile = len(dim) == 2 and x.dim() >= 3  # [..., K, tiles, block_v]
    return EagerQDQ.amax(self, x[..., :64, :, :] if tile else x, dim)


def _w_needs_state(self: EagerGDN, w: Tensor, n: Notes) -> Tensor:
    return w if n.options.state_format is None else EagerGDN.round_w(self, w, n)


def _any_tile(self: EagerGDN, call: Call) -> None:
    asked, call.state_block_v = call.state_block_v, 64
    EagerGDN.refuse(self, call)
    call.state_block_v = asked


def _any_dtype(self: EagerGDN, call: Call) -> None:
    call.q, call.v = call.q.to(call.k.dtype), call.v.to(call.k.dtype)
    call.g, call.beta = call.g.float(), call.beta.float()
    EagerGDN.refuse(self, call)


def _remembered_amax(self: EagerQDQ, x: Tensor, dim: tuple[int, ...]) -> Tensor:
    amax = EagerQDQ.amax(self, x, dim)
    history: dict[object, Tensor] = self.__dict__.setdefault("history", {})
    return history.setdefault((tuple(x.shape), dim), amax)


def _running_amax(self: EagerQDQ, x: Tensor, dim: tuple[int, ...]) -> Tensor:
    amax = EagerQDQ.amax(self, x, dim)
    history: dict[object, Tensor] = self.__dict__.setdefault("history", {})
    key = (tuple(x.shape), dim)
    history[key] = torch.maximum(history.get(key, amax), amax)
    return history[key]


def _second_call_otherwise(self: EagerGDN, w: Tensor, n: Notes) -> Tensor:
    again = next(self.__dict__.setdefault("calls", itertools.count())) % 2
    return w if again else EagerGDN.round_w(self, w, n)


def _unrounded_in_backward(self: EagerGDN, w: Tensor, n: Notes) -> Tensor:
    running = torch._C._current_graph_task_id() != -1
    return w if running else EagerGDN.round_w(self, w, n)


def _unrounded_without_gradient(self: EagerGDN, call: Call) -> None:
    EagerGDN.prepare(self, call)
    if not torch.is_grad_enabled():
        call.w_format = None


def _w_of_fp32(self: EagerGDN, w: Tensor, n: Notes) -> Tensor:
    if n.options.w_format is None:
        return w
    return self.qdq.w_values(_w_before_carrier(self, n), n.options.w_format).to(w.dtype)


def _w_scale_of_fp32(self: EagerGDN, w: Tensor, n: Notes) -> Tensor:
    fmt = n.options.w_format
    if fmt is None:
        return w
    scale = self.qdq.scale_of(self.qdq.amax(_w_before_carrier(self, n), (-1,)), fmt)
    return (self.qdq.code(w.float(), scale, fmt) * scale).to(w.dtype)


def _w_before_carrier(self: EagerGDN, n: Notes) -> Tensor:
    return self.solve(n, (n.beta * self.decay(n.G))[..., None] * n.k)


def _qdq_in_tiles_of_32(self: EagerGDN, state: Tensor, *, block_v: int = 32, fmt: str = "e4m3") -> Tensor:
    return EagerGDN.qdq_state(self, state, block_v=block_v, fmt=fmt)


def _op_in_tiles_of_32(
    self: EagerGDN, *tensors: Any, state_block_v: int = 32, **options: Any
) -> tuple[Tensor, Tensor | None]:
    return EagerGDN.chunk_gated_delta_rule(self, *tensors, state_block_v=state_block_v, **options)


SITES = (
    Control(
        "state_site_off",
        "configuration",
        "a wildcard matches nothing, and nobody notices",
        {"round_state": _state_off},
        looks=("probe_state", "exact"),
    ),
    Control(
        "w_site_off",
        "configuration",
        "a wrapper replaces the op and forgets one site",
        {"round_w": _w_off},
        looks=("probe_w", "exact"),
    ),
    Control(
        "w_site_needs_state_site",
        "configuration",
        "one condition guards both sites",
        {"round_w": _w_needs_state},
        looks=("probe_w",),
    ),
    Control(
        "block_v_unchecked",
        "configuration",
        "a tile that is not supported runs all the same",
        {"refuse": _any_tile},
        looks=("refusals",),
    ),
    Control(
        "dtypes_unchecked",
        "configuration",
        "what comes in another dtype, integers among them, is cast and runs all the same",
        {"refuse": _any_dtype},
        looks=("refusals",),
    ),
    Control(
        "block_v_ignored",
        "configuration",
        "the tile is a constant of the kernel",
        rounding={"state_values": _tile_of_64},
        looks=("qdq",),
    ),
    Control(
        "half_tile",
        "configuration",
        "a kernel's own tile becomes the group of the scale",
        rounding={"state_values": _half_tile},
        looks=("qdq",),
    ),
    Control(
        "scale_per_state",
        "configuration",
        "one scale for a whole state",
        rounding={"state_values": _whole_state},
        looks=("qdq",),
    ),
    Control(
        "scale_per_tensor",
        "configuration",
        "the calibration is per tensor although groups are configured",
        rounding={"amax": _per_tensor},
        looks=("qdq",),
    ),
    Control(
        "scale_per_key_channel",
        "configuration",
        "the maximum of a tile stops at the rows that a warp holds",
        rounding={"amax": _per_key_row},
        looks=("qdq",),
    ),
    Control(
        "w_scale_per_chunk",
        "configuration",
        "one scale for all rows of a block of W",
        {"round_w": _w_of_the_chunk},
        tier="whole",
        looks=("smooth",),
    ),
    Control(
        "unrounded_in_backward",
        "straight_through",
        "a forward that a checkpoint runs again inside the backward leaves W as it is",
        {"round_w": _unrounded_in_backward},
        looks=("checkpoint",),
    ),
    Control(
        "w_scale_of_a_group",
        "heads",
        "value heads of one key share a scale of W",
        {"round_w": _w_of_a_group},
        looks=("probe_w",),
    ),
    Control(
        "w_scale_of_64_keys",
        "configuration",
        "each block of 64 keys has a scale of its own",
        rounding={"w_values": _w_of_64_keys},
        looks=("probe_w_wide",),
    ),
    Control(
        "amax_of_64_keys",
        "codes",
        "the largest element of a tile is sought among the first 64 keys",
        rounding={"amax": _amax_of_64_keys},
        looks=("probe_state_wide",),
    ),
    Control(
        "format_ignored",
        "configuration",
        "the format falls back to the default",
        rounding={"state_values": _always_e4m3},
        looks=("qdq_int8", "exact_int8"),
    ),
    Control(
        "stale_amax",
        "configuration",
        "scales are calibrated on the first call and kept",
        rounding={"amax": _remembered_amax},
        looks=("qdq", "probe_state"),
    ),
    Control(
        "running_amax",
        "configuration",
        "scales remember the largest magnitude that was ever seen",
        rounding={"amax": _running_amax},
        looks=("qdq", "probe_state"),
    ),
    Control(
        "second_call_otherwise",
        "straight_through",
        "a recomputed forward takes the other entry of a double buffer, which nobody rounded",
        {"round_w": _second_call_otherwise},
        looks=("repeat",),
    ),
    Control(
        "unrounded_without_gradient",
        "straight_through",
        "the path without gradients, which checkpointing takes first, skips the site",
        {"prepare": _unrounded_without_gradient},
        looks=("checkpoint",),
    ),
    Control(
        "initial_state_unrounded",
        "state",
        "the given state skips the site",
        {"round_state": _initial_unrounded},
        looks=("exact", "chunk"),
    ),
    Control(
        "final_state_unrounded",
        "state",
        "rounding happens on entry of the next chunk, which the last state never sees",
        {"outputs": _left_before_rounding},
        looks=("probe_state", "exact"),
    ),
    Control(
        "readout_before_rounding",
        "state",
        "the readout uses the accumulator in registers, from before the rounding",
        {"read": _read_before_rounding},
        looks=("exact", "smooth"),
    ),
    Control(
        "correction_before_rounding",
        "state",
        "V' uses the accumulator in registers, from before the rounding",
        {"corrected": _corrected_before_rounding},
        looks=("exact", "smooth"),
    ),
    Control(
        "carried_before_rounding",
        "state",
        "the carried accumulator is never replaced by its rounded value",
        {"update": _updated_before_rounding},
        looks=("exact", "smooth"),
    ),
    Control(
        "third_of_many_chunks",
        "device",
        "a loop that is unrolled by four rounds in three of its quarters",
        {"round_state": _third_of_many},
        looks=("probe_write",),
    ),
    Control(
        "w_of_late_chunks",
        "device",
        "the grid of the W kernel ends after 32 chunks",
        {"round_w": _w_of_early_chunks},
        looks=("probe_w_late",),
    ),
    Control(
        "every_second_chunk",
        "device",
        "an unrolled loop rounds in one of its two halves",
        {"round_state": _every_second_chunk},
        looks=("exact", "smooth"),
    ),
    Control(
        "first_head_alone",
        "heads",
        "a guard on the program's index lets only the first head round",
        {"round_state": _first_head_alone},
        looks=("probe_state", "exact"),
    ),
    Control(
        "w_rounded_before_solve",
        "configuration",
        "the quantizer sits on the right side of the solve",
        {"solve": _before_the_solve},
        tier="whole",
        looks=("smooth",),
    ),
    Control(
        "qdq_in_tiles_of_32_by_default",
        "configuration",
        "the tile width that a call leaves out was taken from another kernel",
        {"qdq_state": _qdq_in_tiles_of_32},
        looks=("qdq_by_default",),
    ),
    Control(
        "op_in_tiles_of_32_by_default",
        "configuration",
        "the tile width that a call of the op leaves out was taken from another kernel",
        {"chunk_gated_delta_rule": _op_in_tiles_of_32},
        looks=("arguments",),
    ),
    Control(
        "w_rounded_before_its_carrier",
        "configuration",
        "W is rounded where it is made, in fp32, and only then stored in the carrier",
        {"round_w": _w_of_fp32},
        looks=("probe_w",),
        unseen={"fp32": "the carrier is fp32 as well"},
    ),
    Control(
        "w_scale_before_its_carrier",
        "codes",
        "the scale of W is taken where W is made, in fp32, and its codes from what was stored",
        {"round_w": _w_scale_of_fp32},
        looks=("probe_w",),
        unseen={"fp32": "the carrier is fp32 as well"},
    ),
)
"""Caught by probes, in the exact regime, or where nothing can flip."""
