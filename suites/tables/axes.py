"""Axes, constraints and requirements of the matrix."""

from __future__ import annotations

from collections.abc import Mapping

from qualify.axes import SM_AXIS, Axis, Kind
from qualify.checks_table import Constraint
from qualify.regimes import AXES as PROBLEM_AXES
from qualify.requirements import Requirement

SMS: Mapping[str, str] = {
    "cpu": "Triton under its interpreter, torch on a CPU: every CI machine",
    "sm80": "A100: no FP8 conversion in hardware",
    "sm86": "RTX 30, A10: less shared memory, no FP8 conversion",
    "sm89": "Ada: converts fp32 to FP8 through fp16, which rounds twice",
    "sm90": "Hopper: native conversion, warp-group matmuls",
    "sm100": "Blackwell: native conversion, tensor memory",
    "sm120": "Blackwell workstation: native conversion, less shared memory",
}
"""Level of the axis `sm` -> what is particular about it. SM 10.x and 12.x count as one level each."""

GPU_SMS = tuple(sm for sm in SMS if sm != "cpu")

KINDS: Mapping[str, Kind] = {
    "dtype": "numerical",
    "grouping": "numerical",
    "block_v": "numerical",
    "packing": "numerical",
    "sites": "numerical",
    "format": "numerical",
    "initial": "numerical",
    "final": "numerical",
    "gates": "numerical",
    "gradients": "inputs",
    "fused": "inputs",
    "conversion": "numerical",
    "checkpointing": "numerical",
    "layout": "layout",
    "strides": "layout",
    "boundaries": "inputs",
    "scalars": "inputs",
    "scale": "inputs",
    "length": "shape",
    "heads": "shape",
}
"""What each axis is: triples are counted over the numerical ones."""

OWN_AXES: tuple[Axis, ...] = (
    Axis(
        SM_AXIS,
        tuple(SMS),
        "machine",
        "every architecture has its own instructions, and its own compiler faults",
    ),
    Axis(
        "conversion",
        ("portable", "native"),
        "numerical",
        "FP8 codes come from hardware or from arithmetic; the two must agree in every bit",
    ),
    Axis(
        "checkpointing",
        ("off", "on"),
        "numerical",
        "a forward that runs again in the backward pass must round to the same codes",
    ),
)
"""Axes that do not shape the inputs of a call."""

MORE_LEVELS: Mapping[str, tuple[str, ...]] = {
    "heads": ("16x40", "16x48", "256x208", "128x32", "256x256"),
    "length": ("193", "2113"),
}
"""Levels of single rows, beyond those that every problem may take."""

AXES: tuple[Axis, ...] = (
    *OWN_AXES,
    *(
        Axis(
            name, tuple(dict.fromkeys((*axis.levels, *MORE_LEVELS.get(name, ())))), KINDS[name], axis.because
        )
        for name, axis in PROBLEM_AXES.items()
    ),
)

CONSTRAINTS: tuple[Constraint, ...] = (
    Constraint(
        {"sites": ("none", "w"), "format": ("int8",)},
        "the format is that of the state site, which is off; W is rounded to E4M3 alone",
    ),
    Constraint(
        {"final": ("dropped",), "gradients": ("state",)},
        "a final state that is not asked for receives no gradient",
    ),
    Constraint({"dtype": ("bf16",), "scalars": ("bf16",)}, "this is what `carrier` says"),
)
"""Cells that are meaningless on any machine, whatever the check."""

REQUIREMENTS: tuple[Requirement, ...] = (
    *(Requirement(f"on {sm}", {SM_AXIS: (sm,)}, "sm", "is", sm, f"the cell is about {sm}") for sm in SMS),
    Requirement(
        "native conversion",
        {"conversion": ("native",)},
        "sm_number",
        "at_least",
        "90",
        "below SM 9.0 there is no conversion from fp32 to E4M3 that rounds once",
    ),
)
