"""`qdq_state` and `qdq_w`: round a tensor to a low-precision grid and back, with the identity as gradient."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import triton

from kernels.launch import INTERPRETER, row_for
from kernels.options import check_block_v, check_format, choose_conversion, conversions_on
from kernels.qdq import launch_table as launch_table  # registers the rows
from kernels.qdq.device import INTERPRET
from kernels.qdq.kernels import qdq_rows_kernel, qdq_tiles_kernel

Tensor = torch.Tensor

CARRIERS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
MAX_OUTER = 3  # leading dimensions that the kernels index themselves
MAX_K = 4096  # a [K, 128] tile of it is the largest that Triton's limit of 2^20 elements leaves room for
MAX_GRID_X = 1 << 30  # CUDA allows 2^31 - 1 programs on the first axis and 65535 on the second


def qdq_state(
    state: Tensor, *, block_v: int = 64, fmt: str = "e4m3", conversion: str | None = None
) -> Tensor:
    """Rounds each `[K, block_v]` tile of a state to `fmt` with one scale, and back; gradient: the identity.

    Args:
        state: `[..., K, V]`, fp32, bf16 or fp16, any strides; the last tile may be partial.
        block_v: columns that share a scale: 16, 32, 64 or 128.
        fmt: `e4m3` or `int8`.
        conversion: `native` (SM 9.0 and newer, e4m3) or `portable`; None takes the best one here.

    Returns:
        A new tensor of the same shape and dtype: exactly code * scale, rounded to the dtype.

    Raises:
        TypeError: not a tensor, or not of a carrier dtype.
        ValueError: another argument breaks a rule; the message names rule, value and remedy.

    Source: the numerical contract (scale amax / 448 or amax / 127, IEEE division, round to nearest even).
    """
    check_tensor("state", state, dimensions=2, k=-2)
    check_format("state", fmt)
    check_block_v(block_v)
    chosen = choose_conversion(sm_of(state), fmt, conversion)
    return straight_through(state, lambda x, y: launch_tiles(x, y, block_v, fmt, chosen))


def qdq_w(w: Tensor, *, fmt: str = "e4m3", conversion: str | None = None) -> Tensor:
    """Rounds each row of a WY activation to `fmt` with one scale, and back; gradient: the identity.

    Args:
        w: `[..., K]`, fp32, bf16 or fp16, any strides.
        fmt: `e4m3`.
        conversion: `native` (SM 9.0 and newer) or `portable`; None takes the best one here.

    Returns:
        A new tensor of the same shape and dtype: exactly code * scale, rounded to the dtype.

    Raises:
        TypeError: not a tensor, or not of a carrier dtype.
        ValueError: another argument breaks a rule; the message names rule, value and remedy.

    Source: the numerical contract (scale amax / 448, IEEE division, round to nearest even).
    """
    check_tensor("w", w, dimensions=1, k=-1)
    check_format("w", fmt)
    chosen = choose_conversion(sm_of(w), fmt, conversion)
    return straight_through(w, lambda x, y: launch_rows(x, y, fmt, chosen))


def available_conversions(fmt: str = "e4m3", device: torch.device | str | None = None) -> tuple[str, ...]:
    """The conversions that can be selected on a device (default: the present one), best first.

    Empty where no kernel of this project can run.
    """
    if INTERPRET:
        return conversions_on(INTERPRETER, fmt)
    if not torch.cuda.is_available():
        return ()
    major, minor = torch.cuda.get_device_capability(device)
    return conversions_on(10 * major + minor, fmt)


def check_tensor(name: str, x: Any, dimensions: int, k: int) -> None:
    """Refuses what is not a tensor `[..., K, V]` or `[..., K]` of a carrier dtype, `k` the place of K."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}; convert it first")
    if x.dtype not in CARRIERS:
        raise TypeError(f"{name} must be fp32, bf16 or fp16, got {x.dtype}; cast it first")
    if x.ndim < dimensions:
        raise ValueError(f"{name} must have at least {dimensions} dimension(s), got shape {tuple(x.shape)}; "
                         f"its last ones are {'[K, V]' if dimensions == 2 else '[K]'}")  # fmt: skip
    if x.shape[k] > MAX_K:
        raise ValueError(f"K of {name} must be at most {MAX_K}, got {x.shape[k]}; split the heads")


def sm_of(x: Tensor) -> int:
    """90 for a tensor on SM 9.0, `INTERPRETER` in the interpreter.

    Raises:
        ValueError: the tensor is on a device that no kernel runs on.
    """
    if INTERPRET:
        return INTERPRETER
    if x.device.type != "cuda":
        raise ValueError(
            f"the tensor must be on a CUDA device, got {x.device}; move it there, or set TRITON_INTERPRET=1 "
            f"before the first import to run on a CPU"
        )
    major, minor = torch.cuda.get_device_capability(x.device)
    return 10 * major + minor


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, launch: Callable[[Tensor, Tensor], None]) -> Tensor:
        y = torch.empty_like(x)
        if x.numel():
            launch(x, y)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return dy, None


def straight_through(x: Tensor, launch: Callable[[Tensor, Tensor], None]) -> Tensor:
    """A new tensor that `launch(x, new)` fills; the gradient at x is exactly the incoming one."""
    y: Tensor = _StraightThrough.apply(x, launch)  # type: ignore[no-untyped-call]
    return y


@dataclass(frozen=True)
class Outer:
    """Leading dimensions of a pair of tensors, merged as far as the strides of both allow."""

    sizes: tuple[int, ...]
    x_strides: tuple[int, ...]
    y_strides: tuple[int, ...]

    @property
    def count(self) -> int:
        """How many leading indices there are."""
        product = 1
        for size in self.sizes:
            product *= size
        return product

    def arguments(self) -> tuple[int, int, tuple[int, ...], tuple[int, ...]]:
        """N1, N2 and both stride triples, filled up for a kernel."""
        fill = MAX_OUTER - len(self.sizes)
        _, n1, n2 = self.sizes + (1,) * fill
        return n1, n2, self.x_strides + (0,) * fill, self.y_strides + (0,) * fill


def merge_outer(sizes: tuple[int, ...], x_strides: tuple[int, ...], y_strides: tuple[int, ...]) -> Outer:
    """Merges neighbouring dimensions that both tensors walk with one stride; at least one is left."""
    merged: list[tuple[int, int, int]] = []
    for size, sx, sy in zip(sizes, x_strides, y_strides, strict=True):
        if size == 1:
            continue
        if merged and merged[-1][1] == size * sx and merged[-1][2] == size * sy:
            size *= merged.pop()[0]
        merged.append((size, sx, sy))
    columns = tuple(zip(*(merged or [(1, 0, 0)]), strict=True))
    return Outer(*columns)


def split_outer(x: Tensor, y: Tensor, inner: int) -> list[tuple[Tensor, Tensor, Outer]]:
    """Pieces of both tensors with at most `MAX_OUTER` leading dimensions left after merging.

    Only a view with four or more unmergeable ones has several pieces; nothing is copied.
    """
    lead = x.ndim - inner
    outer = merge_outer(x.shape[:lead], x.stride()[:lead], y.stride()[:lead])
    if len(outer.sizes) <= MAX_OUTER:
        return [(x, y, outer)]
    pairs = zip(x.unbind(0), y.unbind(0), strict=True)
    return [piece for a, b in pairs for piece in split_outer(a, b, inner)]


def grid_of(programs: int) -> tuple[int, int]:
    """A two-dimensional grid of at least so many programs."""
    x = min(programs, MAX_GRID_X)
    return x, triton.cdiv(programs, x)


def launch_rows(x: Tensor, y: Tensor, fmt: str, conversion: str) -> None:
    """Fills y with the rounded rows of x."""
    K = x.shape[-1]
    block_k = triton.next_power_of_2(K)
    row = row_for("qdq_rows", sm_of(x), carrier=CARRIERS[x.dtype], interpreter=INTERPRET)
    block_r = max(1, row.meta["ELEMENTS"] // block_k)
    with device_of(x):
        for a, b, outer in split_outer(x, y, inner=1):
            n1, n2, xs, ys = outer.arguments()
            if INTERPRET:
                block_r = min(block_r, triton.next_power_of_2(outer.count))
            qdq_rows_kernel[grid_of(triton.cdiv(outer.count, block_r))](
                a, b, outer.count, n1, n2, *xs, a.stride(-1), *ys, b.stride(-1),
                K=K, BLOCK_R=block_r, BLOCK_K=block_k, OUTER=len(outer.sizes), FMT=fmt, CONVERSION=conversion,
                **row.options(),
            )  # fmt: skip


def launch_tiles(x: Tensor, y: Tensor, block_v: int, fmt: str, conversion: str) -> None:
    """Fills y with the rounded tiles of x."""
    K, V = x.shape[-2:]
    block_k = triton.next_power_of_2(K)
    tiles_v = triton.cdiv(V, block_v)
    row = row_for("qdq_tiles", sm_of(x), carrier=CARRIERS[x.dtype], tile=block_k * block_v)
    with device_of(x):
        for a, b, outer in split_outer(x, y, inner=2):
            n1, n2, xs, ys = outer.arguments()
            tiles = outer.count * tiles_v
            qdq_tiles_kernel[grid_of(tiles)](
                a, b, tiles, tiles_v, V, n1, n2,
                *xs, a.stride(-2), a.stride(-1), *ys, b.stride(-2), b.stride(-1),
                K=K, BLOCK_K=block_k, BLOCK_V=block_v, OUTER=len(outer.sizes), FMT=fmt, CONVERSION=conversion,
                **row.options(),
            )  # fmt: skip


def device_of(x: Tensor) -> AbstractContextManager[Any]:
    """A context in which launches go to the tensor's own device."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()
