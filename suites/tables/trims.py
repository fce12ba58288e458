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

QUICK_FAULTS = tuple({control.kind: control.name for control in reversed(list(CONTROLS.values()))}.values())
"""One planted fault of each kind."""

_SMALL = {"heads": ("16x16", "32x48"), "length": ("17", "65"), "grouping": ("hv1", "hv2")}
_ONE_CARRIER = {"dtype": ("bf16",), "format": ("e4m3",)}

INTERPRETED: Mapping[str, Options] = {
    "probe.state": Options("each", axes={**_ONE_CARRIER, "length": ("1",), "heads": ("16x16",)}),
    "probe.w": Options("each", axes={"dtype": ("bf16",), "heads": ("32x32",), "packing": ("batch",)}),
    "op.chunk": Options("each", axes={**_ONE_CARRIER, **_SMALL}),
    "op.named": Options("each", axes=_ONE_CARRIER),
    "op.whole": Options("each", axes={**_ONE_CARRIER, **_SMALL}),
    "op.refusals": Options("each", axes={"dtype": ("bf16",)}),
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
    "control.fault": "each",
    "op.absent": "each",
    "op.dynamic_range": "each",
    "op.relations": "each",
}
"""Check -> strength in `cpu`. A planted fault runs in one carrier; the session `controls` runs it in all."""


def trimmed(row: CheckRow) -> CheckRow:
    """A row with what the CPU profiles leave out."""
    profiles = dict(row.profiles)
    if "cpu" in profiles:
        strength = CPU_STRENGTH.get(row.name, profiles["cpu"].strength)
        profiles["cpu"] = replace(
            profiles["cpu"], strength=strength, interpreted=_left(row, "cpu", INTERPRETED)
        )
    if "quick" in profiles:
        profiles["quick"] = replace(profiles["quick"], interpreted=_left(row, "quick", QUICK_INTERPRETED))
        if row.control:
            axes = {**profiles["quick"].axes, "fault": QUICK_FAULTS}
            profiles["quick"] = replace(profiles["quick"], axes=axes)
    return replace(row, profiles=profiles)


def _left(row: CheckRow, profile: str, table: Mapping[str, Options]) -> Options | None:
    """What is left of a row for interpreted subjects; rows that do not run the op are cheap, and whole."""
    if not set(OP) & set(row.needs):
        return None
    less, options = table.get(row.name, LEFT_OUT), row.profiles[profile]
    whole = {axis: options.axes.get(axis, levels) for axis, levels in row.axes.items()}
    kept = {a: tuple(x for x in whole[a] if x in levels) for a, levels in less.axes.items() if a in whole}
    return replace(less, axes=kept)
