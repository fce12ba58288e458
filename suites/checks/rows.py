"""What the rows of several checks share."""

from __future__ import annotations

from collections.abc import Mapping

from qualify.checks_table import Options, Strength
from qualify.regimes import AXES

GPU = ("sm86", "sm89", "h100", "b200")
"""Profiles that need a GPU."""

OP = ("chunk_gated_delta_rule",)
"""What a subject must offer to be run as a whole."""

DTYPES = ("fp32", "bf16", "fp16")

GROUPINGS = ("hv1", "hv2", "hv3", "hv4", "hv8", "h1hv3")
"""Levels of the axis `grouping` but for that of very many heads, which has a row of its own."""


def levels(*axes: str) -> dict[str, tuple[str, ...]]:
    """Every level of the named axes, once each."""
    return {axis: tuple(dict.fromkeys(AXES[axis].levels)) for axis in axes}


def profiles(
    cpu: Strength = "pairs",
    gpu: Strength = "triples",
    *,
    quick: Mapping[str, tuple[str, ...]] | None = None,
    quick_strength: Strength = "each",
    cpu_axes: Mapping[str, tuple[str, ...]] | None = None,
) -> dict[str, Options]:
    """How the profiles take a row.

    Args:
        cpu, gpu: strength of the cover.
        quick: axes that the quick profile keeps, and their levels; None leaves the row out of it.
        quick_strength: strength of the quick cover.
        cpu_axes: levels that the CPU profile keeps.
    """
    found = {"cpu": Options(cpu, axes=cpu_axes or {})} | {name: Options(gpu) for name in GPU}
    if quick is not None:
        found["quick"] = Options(quick_strength, axes=quick)
    return found
