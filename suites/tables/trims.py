"""What the CPU profiles leave out, so that they end in time.

Two processors have 180 seconds of work in them before a full CPU run is too slow to be used, and 40 before a
quick one is. A call of a kernel in Triton's interpreter takes two to five of them, a call of anything else a
tenth of one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from qualify.checks_table import LEFT_OUT, CheckRow, Options, Strength
from suites.checks.rows import OP
from suites.controls.table import CONTROLS


def _of_each_kind(number: int, *named: str) -> tuple[str, ...]:
    """Names of the first planted faults of each kind, and the named ones."""
    kinds = {control.kind for control in CONTROLS.values()}
    firsts = [[n for n, c in CONTROLS.items() if c.kind == kind][:number] for kind in kinds]
    return tuple(n for n in CONTROLS if n in named or any(n in names for names in firsts))


QUICK_FAULTS = _of_each_kind(1)
CPU_FAULTS = _of_each_kind(
    3, "solve_adjoint_at_rounded_w", "states_in_one_buffer", "dk_only_beside_dq", "w_scale_of_a_group"
)
"""Planted faults of the CPU profiles, in every carrier; GPU profiles and the session `controls` run all."""

_SMALL = {"heads": ("16x16", "32x48"), "length": ("17", "65"), "grouping": ("hv1", "hv2")}
_ONE_CARRIER = {"dtype": ("bf16",), "format": ("e4m3",)}
_PLAIN = {
    "gates": ("ordinary", "strong", "zero"),
    "fused": ("none", "all"),
    "gradients": ("both", "strided"),
    "packing": ("single", "docs", "empty_middle", "one_token"),
}

INTERPRETED: Mapping[str, Options] = {
    "probe.state": Options("each", axes={**_ONE_CARRIER, "length": ("1",), "heads": ("16x16",)}),
    "probe.w": Options(
        "each",
        axes={
            "dtype": ("bf16",),
            "heads": ("32x32",),
            "packing": ("batch",),
            "before": ("0",),
            "initial": ("given",),
        },
        time_limit_s=60.0,
    ),
    "op.chunk": Options(
        "each",
        axes={**_ONE_CARRIER, **_SMALL, **_PLAIN},
        regimes=("random", "near_tie"),
        time_limit_s=60.0,
    ),
    "op.named": Options("each", axes=_ONE_CARRIER, time_limit_s=60.0),
    "op.whole": Options(
        "each",
        axes={**_ONE_CARRIER, **_SMALL, **_PLAIN},
        regimes=("random", "huge"),
        time_limit_s=60.0,
    ),
    "op.dynamic_range": Options(
        "each", axes={"dtype": ("bf16",), "extreme": ("large_state",), "heads": ("32x32",)}, time_limit_s=60.0
    ),
    "probe.decay": Options(
        "each",
        axes={"dtype": ("bf16",), "packing": ("batch",), "sites": ("none",), "scalars": ("fp32",)},
        time_limit_s=60.0,
    ),
    "probe.rounding": Options(
        "each",
        axes={
            **_ONE_CARRIER,
            "heads": ("16x16",),
            "packing": ("batch",),
            "sites": ("both",),
            "scalars": ("carrier",),
        },
        time_limit_s=60.0,
    ),
    "op.refusals": Options("each", axes={"dtype": ("bf16",)}),
    "qdq.state_many": LEFT_OUT,
    "qdq.w_many": LEFT_OUT,
}
"""Check of the op -> what is left of it in `cpu` where kernels are interpreted: one carrier and format, small
shapes. Every kernel runs, forward and backward; the GPU profiles ask for the rest, and the tests hold the QDQ
kernels and every stage against the oracle besides."""

QUICK_INTERPRETED: Mapping[str, Options] = {
    "op.whole": Options(
        "each",
        regimes=("random",),
        axes={
            "dtype": ("bf16",),
            "heads": ("32x48",),
            "length": ("65",),
            "packing": ("docs", "single"),
            "sites": ("both",),
            "block_v": ("16", "32"),
            "gates": ("ordinary",),
            "fused": ("none",),
            "gradients": ("both",),
            "scalars": ("fp32", "carrier"),
        },
    )
}
"""The same for `quick`: two calls with both sites on."""

CPU_STRENGTH: Mapping[str, Strength] = {
    "op.absent": "each",
    "op.chunk": "each",
    "op.dynamic_range": "each",
    "op.relations": "each",
    "op.smooth": "each",
}
"""Check -> strength in `cpu`; its neighbours cover the same axes in pairs."""


def trimmed(row: CheckRow) -> CheckRow:
    """A row with what the CPU profiles leave out."""
    profiles = dict(row.profiles)
    for name, faults, left in (("quick", QUICK_FAULTS, QUICK_INTERPRETED), ("cpu", CPU_FAULTS, INTERPRETED)):
        options = profiles.get(name)
        if options is None:
            continue
        strength = CPU_STRENGTH.get(row.name, options.strength) if name == "cpu" else options.strength
        axes = {**options.axes, "fault": faults} if row.control else options.axes
        profiles[name] = replace(options, strength=strength, axes=axes, interpreted=_left(row, name, left))
    return replace(row, profiles=profiles)


def _left(row: CheckRow, profile: str, table: Mapping[str, Options]) -> Options | None:
    """What is left of a row for interpreted subjects; unless it is named, a row without the op is whole."""
    if not set(OP) & set(row.needs):
        return table.get(row.name)
    less, options = table.get(row.name, LEFT_OUT), row.profiles[profile]
    whole = {axis: options.axes.get(axis, levels) for axis, levels in row.axes.items()}
    kept = {a: tuple(x for x in whole[a] if x in levels) for a, levels in less.axes.items() if a in whole}
    return replace(less, axes=kept)
