"""The specialisations of the kernels of the chunk form that are compiled for every architecture.

One `Shape` is what launches differ in. Every launch row is built with the shapes that it is for, and each
shape with the row that `row_for` would choose.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from kernels.compile_tier import ARCHITECTURES, Build
from kernels.gdn import launch_table as launch_table  # registers the rows
from kernels.gdn.core import OPERANDS, SOLVE_PRECISION, padded
from kernels.gdn.validate import LESS_MEMORY, WIDEST_THERE
from kernels.launch import LaunchRow, rows_of
from kernels.options import CONVERSIONS

CARRIERS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

INTEGERS = ("T", "chunks_per_sequence", "H", "HV", "n_tokens", "state_stride_k", "state_stride_v")


@dataclass(frozen=True)
class Shape:
    """What launches of one kernel differ in.

    Attributes:
        carrier: `bf16`, `fp16` or `fp32`.
        K, V: head sizes.
        block_v: the scale group's width, 0 with the state site off.
        sites: whether both sites are on.
        packed: whether `cu_seqlens` is given.
    """

    carrier: str
    K: int
    V: int
    block_v: int = 64
    sites: bool = True
    packed: bool = False

    @property
    def label(self) -> str:
        """Short and unique."""
        site = f"bv{self.block_v}" if self.sites else "off"
        return f"{self.carrier},K{self.K},V{self.V},{site}" + (",packed" if self.packed else "")


SHAPES = (
    Shape("bf16", 128, 128),
    Shape("bf16", 128, 128, sites=False),
    Shape("bf16", 128, 128, packed=True),
    Shape("bf16", 128, 128, block_v=128),
    Shape("bf16", 64, 64),
    Shape("bf16", 16, 16, block_v=16),
    Shape("bf16", 100, 48, block_v=32),
    Shape("bf16", 256, 256, block_v=128),
    Shape("bf16", 256, 256, sites=False),
    Shape("fp16", 128, 128),
    Shape("fp32", 128, 128),
    Shape("fp32", 64, 64),
    Shape("fp32", 16, 16, block_v=16),
    Shape("fp32", 128, 128, block_v=128, packed=True),
    Shape("fp32", 256, 256, block_v=128),
    Shape("fp32", 256, 256, block_v=64),
    Shape("fp32", 256, 256, sites=False),
)


@dataclass(frozen=True)
class Kernel:
    """How one kernel is called: its entry and the types of its pointers.

    `c` is the carrier, `m` the dtype of stored operands, `f` fp32, `i` int32, `-` a pointer that is absent.
    """

    entry: str
    pointers: str
    switches: tuple[str, ...] = ()
    backward: bool = False


KERNELS = {
    "gdn_solve": Kernel("prepare:solve_kernel", "k:c g:f beta:f gates:f inverse:m scratch:f"),
    "gdn_prepare": Kernel("prepare:prepare_kernel", "k:c v:c beta:f gates:f inverse:m w:c u:m"),
    "gdn_state": Kernel(
        "state:state_pass_kernel",
        "k:c w:c u:m gates:f initial_state:f states:m v_new:m final_state:f raw_states:-",
    ),
    "gdn_output": Kernel("output:output_kernel", "q:c k:c v_new:m gates:f states:m o:c"),
    "gdn_local_gradient": Kernel("output:local_gradient_kernel", "q:c k:c do:c gates:f dv_new:m do_scaled:m"),
    "gdn_state_gradient": Kernel(
        "state:state_gradient_kernel",
        "q:c k:c w:c gates:f do_scaled:m d_final_state:f d_states:m dv_new:m d_initial_state:f",
    ),
    "gdn_outer_gradient": Kernel(
        "gradients:outer_gradient_kernel",
        "q:c k:c v_new:m gates:f do:c dv_new:m states:m d_states:m dq:c dk:f dw:m d_gate_sums:f d_to_end:f",
    ),
    "gdn_solve_gradient": Kernel(
        "solve_gradient:solve_gradient_kernel",
        "k:c v:c beta:f gates:f inverse:m dw:m dv_new:m dk_partial:f dk:c dv:c d_gate_sums:f d_beta:f",
    ),
    "gdn_gate_gradient": Kernel(
        "solve_gradient:gate_gradient_kernel",
        "d_gate_outer:f d_to_end:f d_gate_solve:f d_beta_shares:f dg:f dbeta:f",
    ),
}


def facts_of(kernel: str, shape: Shape) -> dict[str, object]:
    """The facts that the host would ask `row_for` with."""
    operand = OPERANDS[CARRIERS[shape.carrier]][0]
    facts: dict[str, object] = {"operand": operand, "K": padded(shape.K), "V": padded(shape.V)}
    if kernel == "gdn_state":
        facts["tile"] = min(shape.block_v, padded(shape.V)) if shape.sites else 0
    if kernel == "gdn_state_gradient":
        facts["tile"] = 0
    return facts


def constants_of(kernel: str, row: LaunchRow, shape: Shape, conversion: str) -> dict[str, Any]:
    """Every constexpr that the kernel might take."""
    tile = int(str(facts_of(kernel, shape).get("tile", 0)))
    sizes = {"BKT": padded(shape.K), "BV": padded(shape.V)}
    tiles = {name: min(size, row.meta.get(name, size)) for name, size in sizes.items()}
    if tile:
        tiles["BV"] = tile
    shares = -(-padded(shape.K) // 64)
    return tiles | {
        "K": shape.K,
        "V": shape.V,
        "BK": padded(shape.K),
        "BH": row.meta.get("BH", 0),
        "HALVES": row.meta.get("HALVES", 1),
        "CHAINED": bool(row.meta.get("CHAINED", 0)),
        "MMA": OPERANDS[CARRIERS[shape.carrier]][1],
        "PRECISION": "tf32",
        "SOLVE_PRECISION": SOLVE_PRECISION["tf32"],
        "WRITE_W": True,
        "W_FORMAT": "e4m3" if shape.sites else "none",
        "STATE_FORMAT": "e4m3" if shape.sites else "none",
        "CONVERSION": conversion,
        "HAS_INITIAL": True,
        "HAS_FINAL": True,
        "WRITE_FINAL": True,
        "WRITE_RAW": False,
        "PACKED": shape.packed,
        "OUTER_TILES": shares,
        "SOLVE_TILES": shares,
    }


def build_of(kernel: str, row: LaunchRow, shape: Shape, conversion: str) -> Build:
    """The build of one kernel with one row and shape."""
    described = KERNELS[kernel]
    carrier = shape.carrier
    types = {"c": carrier, "m": OPERANDS[CARRIERS[carrier]][0], "f": "fp32"}
    pointers = dict(part.split(":") for part in described.pointers.split())
    arguments = {name: f"*{types[kind]}" for name, kind in pointers.items() if kind != "-"}
    absent: dict[str, Any] = {name: None for name, kind in pointers.items() if kind == "-"}
    metadata = {"chunk_table": "*i32", "chunk_offsets": "*i32", "cu_seqlens": "*i64"}
    if shape.packed:
        arguments |= metadata
    else:
        absent |= dict.fromkeys(metadata)
    arguments |= dict.fromkeys(INTEGERS, "i32") | {"scale": "fp32"}
    constants = {**constants_of(kernel, row, shape, conversion), **absent}
    names = argument_names(described.entry)
    return Build(
        kernel=kernel,
        row=row.name,
        entry=f"kernels.gdn.{described.entry}",
        arguments={name: kind for name, kind in arguments.items() if name in names},
        constexprs={name: value for name, value in constants.items() if name in names},
        divisible=tuple(name for name, kind in arguments.items() if kind.startswith("*") and name in names),
        label=f"{shape.label},{conversion}" if rounds(kernel, shape) else shape.label,
        min_sm=CONVERSIONS[conversion].min_sm,
        not_on=refusing(shape) or too_small(row, facts_of(kernel, shape)),
    )


def refusing(shape: Shape) -> tuple[int, ...]:
    """The architectures on which the host refuses a shape."""
    wide = shape.K > WIDEST_THERE and shape.carrier != "bf16"
    return tuple(sm for sm in ARCHITECTURES if wide and any(sm in sms for sms in LESS_MEMORY))


def too_small(row: LaunchRow, facts: Mapping[str, object]) -> tuple[int, ...]:
    """The architectures that have a row of their own for a launch that does not fit them with this one."""
    whole = row.name == "gdn_state:bf16-w8" and (facts["K"], facts["tile"]) == (256, 128)
    return (86, 89) if whole else ()


def argument_names(entry: str) -> tuple[str, ...]:
    """The argument names of a kernel."""
    module, _, function = entry.partition(":")
    return tuple(getattr(importlib.import_module(f"kernels.gdn.{module}"), function).arg_names)


def rounds(kernel: str, shape: Shape) -> bool:
    """Whether this build holds a rounding site."""
    return shape.sites and kernel in ("gdn_prepare", "gdn_state")


def all_builds() -> list[Build]:
    """Every launch row with every shape that it is for, and with every conversion where it rounds."""
    return [
        build_of(kernel, row, shape, conversion)
        for kernel in KERNELS
        for row in rows_of(kernel)
        for shape in SHAPES
        if row.fits(row.sm[0], facts_of(kernel, shape))
        for conversion in (CONVERSIONS if rounds(kernel, shape) else ("portable",))
    ]


BUILDS = tuple(all_builds())
