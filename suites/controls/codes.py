"""Faults in the arithmetic of codes and scales."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

from suites.controls.control import Control
from suites.subjects.eager import SMALLEST_NORMAL, EagerGDN, EagerQDQ

Tensor = torch.Tensor


def _ties_away(self: EagerQDQ, y: Tensor, step: Tensor) -> Tensor:
    return torch.floor((y / step).abs() + 0.5) * step * y.sign()


class _HalvesAwayInW(EagerQDQ):
    """Another rounding of W than of states."""

    def w_values(self, w: Tensor, fmt: str) -> Tensor:
        away = type("HalvesAway", (EagerQDQ,), {"nearest": _ties_away})()
        values: Tensor = away.w_values(w, fmt)
        return values


def _other_w_without_states(self: EagerGDN, *tensors: Any, **options: Any) -> tuple[Tensor, Tensor | None]:
    stateless = options.get("initial_state") is None and not options.get("output_final_state", False)
    self.qdq = _HalvesAwayInW() if stateless else EagerQDQ()
    return EagerGDN.chunk_gated_delta_rule(self, *tensors, **options)


def _truncated(self: EagerQDQ, y: Tensor, step: Tensor) -> Tensor:
    return torch.trunc(y / step) * step


def _through_fp16(self: EagerQDQ, x: Tensor, scale: Tensor) -> Tensor:
    return EagerQDQ.divide(self, x, scale).half().float()


def _by_reciprocal(self: EagerQDQ, x: Tensor, scale: Tensor) -> Tensor:
    return x * (1.0 / scale)


def _scale_by_reciprocal(self: EagerQDQ, amax: Tensor, fmt: str) -> Tensor:
    quotient = amax * (1.0 / torch.full_like(amax, self.largest(fmt)))
    return torch.where(quotient < SMALLEST_NORMAL, torch.ones_like(quotient), quotient)


def _bf16_amax(self: EagerQDQ, x: Tensor, dim: tuple[int, ...]) -> Tensor:
    return EagerQDQ.amax(self, x, dim).bfloat16().float()


def _fnuz_largest(self: EagerQDQ, fmt: str) -> float:
    return 240.0 if fmt == "e4m3" else EagerQDQ.largest(self, fmt)


def _int8_largest(self: EagerQDQ, fmt: str) -> float:
    return 128.0 if fmt == "int8" else EagerQDQ.largest(self, fmt)


def _floored_scale(self: EagerQDQ, amax: Tensor, fmt: str) -> Tensor:
    return EagerQDQ.scale_of(self, amax, fmt).clamp_min(1e-10)


def _power_of_two_scale(self: EagerQDQ, amax: Tensor, fmt: str) -> Tensor:
    exact = EagerQDQ.scale_of(self, amax, fmt)
    return torch.ldexp(torch.ones_like(exact), torch.frexp(exact).exponent)


def _zero_scale(self: EagerQDQ, amax: Tensor, fmt: str) -> Tensor:
    return amax / torch.full_like(amax, self.largest(fmt))


def _no_subnormals(self: EagerQDQ, y: Tensor, step: Tensor) -> Tensor:
    rounded = EagerQDQ.nearest(self, y, step)
    return torch.where(rounded.abs() < 2.0**-6, torch.zeros_like(rounded), rounded)


def _nan_laundered(self: EagerQDQ, y: Tensor, scale: Tensor) -> Tensor:
    return torch.nan_to_num(y, nan=0.0)


def _nan_stays_local(self: EagerQDQ, x: Tensor, dim: tuple[int, ...]) -> Tensor:
    return EagerQDQ.amax(self, torch.nan_to_num(x, nan=0.0), dim)


def _lanes_of_ones(self: EagerQDQ, w: Tensor, fmt: str) -> Tensor:
    lanes = w.shape[-1]
    padded = F.pad(w, (0, 2 ** (lanes - 1).bit_length() - lanes), value=1.0)
    return EagerQDQ.w_values(self, padded, fmt)[..., :lanes]


def _signed_amax(self: EagerQDQ, x: Tensor, dim: tuple[int, ...]) -> Tensor:
    return x.amax(dim, keepdim=True).abs()


class _Floored(EagerQDQ):
    scale_of = _floored_scale


def _floored_through_strides(self: EagerQDQ, state: Tensor, block_v: int, fmt: str) -> Tensor:
    path = EagerQDQ() if state.is_contiguous() else _Floored()
    return path.state_values(state, block_v, fmt)


def _partial_tile_laundered(self: EagerQDQ, state: Tensor, block_v: int, fmt: str) -> Tensor:
    rounded = EagerQDQ.state_values(self, state, block_v, fmt)
    whole = state.shape[-1] // block_v * block_v
    return torch.cat([rounded[..., :whole], torch.nan_to_num(rounded[..., whole:])], -1)


def _states_beyond_a_grid(self: EagerQDQ, state: Tensor, block_v: int, fmt: str) -> Tensor:
    rounded = EagerQDQ.state_values(self, state, block_v, fmt)
    if state.dim() == 3 and state.shape[0] > 1024:
        rounded[1024:] = state[1024:]
    return rounded


CODES = (
    Control(
        "ties_away",
        "codes",
        "a software rounding adds half and cuts",
        rounding={"nearest": _ties_away},
        looks=("qdq", "exact"),
    ),
    Control(
        "w_ties_away_without_states",
        "codes",
        "the kernel of calls that keep no states has a rounding of W of its own",
        {"chunk_gated_delta_rule": _other_w_without_states},
        looks=("probe_w_stateless",),
    ),
    Control(
        "truncated",
        "codes",
        "both sides of a parity test cut instead of rounding",
        rounding={"nearest": _truncated},
        looks=("qdq", "exact"),
    ),
    Control(
        "through_fp16",
        "codes",
        "the conversion goes through fp16 and rounds twice, as on SM 8.9",
        rounding={"divide": _through_fp16},
        looks=("qdq",),
    ),
    Control(
        "codes_by_reciprocal",
        "codes",
        "a division by the scale becomes a product with its reciprocal",
        rounding={"divide": _by_reciprocal},
        looks=("qdq",),
    ),
    Control(
        "scale_by_reciprocal",
        "codes",
        "a division by a constant becomes a product on a GPU",
        rounding={"scale_of": _scale_by_reciprocal},
        looks=("qdq",),
    ),
    Control(
        "bf16_amax",
        "codes",
        "the largest magnitude is kept in bf16",
        rounding={"amax": _bf16_amax},
        looks=("probe_state",),
    ),
    Control(
        "fnuz_largest",
        "codes",
        "the largest code of the fnuz variant is used",
        rounding={"largest": _fnuz_largest},
        looks=("qdq", "exact"),
    ),
    Control(
        "int8_largest_128",
        "codes",
        "the asymmetric range of int8 is used",
        rounding={"largest": _int8_largest},
        looks=("qdq_int8", "qdq", "exact_int8"),
    ),
    Control(
        "floored_scale",
        "codes",
        "one of two code paths keeps scales above 1e-10",
        rounding={"scale_of": _floored_scale},
        looks=("qdq",),
    ),
    Control(
        "floored_scale_through_strides",
        "codes",
        "the path for tensors that are not contiguous keeps scales above 1e-10",
        rounding={"state_values": _floored_through_strides},
        looks=("qdq",),
        unseen={"fp16": "its smallest number over 448 is above 1e-10"},
    ),
    Control(
        "power_of_two_scale",
        "codes",
        "scales are rounded up to a power of two, as in block formats",
        rounding={"scale_of": _power_of_two_scale},
        looks=("qdq",),
    ),
    Control(
        "zero_group_scale",
        "codes",
        "a group of zeros has scale zero, and zero over zero is NaN",
        rounding={"scale_of": _zero_scale},
        looks=("qdq",),
    ),
    Control(
        "subnormal_codes_flushed",
        "codes",
        "codes below the normal range of the grid become zero",
        rounding={"nearest": _no_subnormals},
        looks=("qdq",),
    ),
    Control(
        "nan_laundered",
        "codes",
        "a saturating conversion makes numbers of NaN",
        rounding={"poison": _nan_laundered},
        looks=("qdq",),
    ),
    Control(
        "nan_laundered_in_a_partial_tile",
        "codes",
        "what stores the columns behind the last whole tile makes numbers of NaN",
        rounding={"state_values": _partial_tile_laundered},
        looks=("qdq",),
    ),
    Control(
        "states_beyond_a_grid",
        "codes",
        "a launch has a largest number of blocks, and what lies beyond is never rounded",
        rounding={"state_values": _states_beyond_a_grid},
        looks=("qdq_many",),
    ),
    Control(
        "nan_stays_local",
        "codes",
        "a hardware maximum drops NaN, so the rest of the group survives",
        rounding={"amax": _nan_stays_local},
        looks=("qdq",),
    ),
    Control(
        "amax_of_padded_lanes",
        "codes",
        "masked lanes of a width that is no power of two enter the maximum",
        rounding={"w_values": _lanes_of_ones},
        looks=("qdq_w",),
    ),
    Control(
        "amax_without_magnitude",
        "codes",
        "the largest value is taken for the largest magnitude",
        rounding={"amax": _signed_amax},
        looks=("qdq", "exact"),
    ),
)
"""Caught in the QDQ functions, bit by bit, or at the op's sites through probes."""
