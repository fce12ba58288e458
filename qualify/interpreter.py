"""Triton's interpreter, made to compute with narrow floats as a GPU does.

It keeps bf16 as 16-bit integers. Casts from fp32 cut instead of rounding, subnormals come out wrong, FP8 is
rounded without its carry and its ties, and sums, products and dots of bf16 are those of the integers. A
kernel that is right on a GPU would fail here for that, and one that cuts would pass.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from typing import Any

import torch

FLOATS: dict[str, torch.dtype] = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp8e4nv": torch.float8_e4m3fn,
    "fp8e5": torch.float8_e5m2,
}
"""Triton's names of the floats that are converted here; others stay the interpreter's own."""

REPLACED = ("binary_op", "unary_op", "create_fma", "create_dot")
"""Methods of the interpreter's builder that compute with the integers of bf16."""

INTEGERS = {1: torch.uint8, 2: torch.uint16, 4: torch.int32, 8: torch.int64}
"""Bytes of an element -> the integer whose bits it has."""


def interprets() -> bool:
    """Whether Triton's kernels are interpreted in this process."""
    return os.environ.get("TRITON_INTERPRET", "") == "1"


def correct_interpreter() -> None:
    """Replaces conversions, elementwise arithmetic and dots of narrow floats in the interpreter, once.

    Without Triton, or with an interpreter that is built in another way, nothing is done.
    """
    try:
        own = importlib.import_module("triton.runtime.interpreter")
        builder, convert = own.InterpreterBuilder, own._convert_float
        binary, unary, fma, dot = (getattr(builder, name) for name in REPLACED)
    except (ImportError, AttributeError):
        return
    if getattr(convert, "corrected", False):
        return

    def converted(data: Any, source: Any, target: Any, rounding: Any) -> Any:
        if source.name not in FLOATS or target.name not in FLOATS:
            return convert(data, source, target, rounding)
        return convert_bits(data, source.name, target.name, cut=str(rounding).endswith("RTZ"))

    converted.corrected = True  # type: ignore[attr-defined]

    def wide(handle: Any) -> Any:
        kind = handle.dtype.scalar
        if kind.name not in ("bf16", "fp8e4nv", "fp8e5"):
            return handle
        fp32 = own.tl.float32
        return own.TensorHandle(converted(handle.data, kind, fp32, None).view("float32"), fp32)

    def narrow(handle: Any, kind: Any) -> Any:
        if handle.data.dtype.kind == "b":  # of a comparison
            return handle
        return own.TensorHandle(converted(handle.data, own.tl.float32, kind, None), kind)

    def computed(function: Callable[..., Any], count: int) -> Callable[..., Any]:
        def call(self: Any, *arguments: Any) -> Any:
            handles, rest = arguments[:count], arguments[count:]
            kind = handles[0].dtype.scalar
            if kind.name != "bf16":
                return function(self, *arguments)
            return narrow(function(self, *map(wide, handles), *rest), kind)

        return call

    own._convert_float = converted  # type: ignore[attr-defined]
    builder.binary_op, builder.unary_op = computed(binary, 2), computed(unary, 1)
    builder.create_fma = computed(fma, 3)
    builder.create_dot = lambda self, a, b, d, *rest: dot(self, wide(a), wide(b), d, *rest)


def convert_bits(data: Any, source: str, target: str, *, cut: bool = False) -> Any:
    """Numbers as the conversion instructions of a GPU make them: to nearest even, FP8 within its range.

    Args:
        data: numpy array; floats, or integers with the bits of narrow ones.
        source, target: keys of `FLOATS`.
        cut: towards zero instead.

    Returns:
        The numbers' bits, as unsigned integers of the target's width.
    """
    x, to = torch.from_numpy(data.copy()), FLOATS[target]
    x = x.view(INTEGERS[x.element_size()]).view(FLOATS[source])
    kept = x.double() if source == "fp64" else x.float()
    if to.itemsize == 1:
        largest = torch.finfo(to).max
        kept = kept.clamp(-largest, largest)
    y = kept.to(to)
    bits = y.view(INTEGERS[to.itemsize])
    if cut and to.itemsize < 4:
        beyond = y.to(kept.dtype).abs() > kept.abs()
        wide = bits.to(torch.int32)
        bits = torch.where(beyond, wide - 1, wide).to(bits.dtype)
    return bits.numpy().view(f"uint{8 * to.itemsize}")
