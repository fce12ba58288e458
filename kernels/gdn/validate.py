"""What the op refuses, before anything is launched. Each message names the rule, the value and the remedy."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from kernels.launch import INTERPRETER
from kernels.options import check_block_v, check_format
from kernels.qdq.host import CARRIERS, sm_of

Tensor = torch.Tensor

SIZES = (16, 256)
"""Smallest and largest K and V."""

MIN_SM = 80

LESS_MEMORY = (range(86, 90), range(120, 130))
"""SMs whose blocks have 99 KB of shared memory; the backward of wide fp32 operands takes 132."""

WIDEST_THERE = 128

PRECISIONS = ("tf32", "ieee")

_CHECKED_BOUNDARIES: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""cu_seqlens -> (its version, T) when its values were last read."""


def check_tensors(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor | None,
    cu_seqlens: Tensor | None, state_v_first: bool,
) -> None:  # fmt: skip
    """Refuses wrong types, dtypes, devices and shapes.

    Raises:
        TypeError: not a tensor, or a dtype that is not allowed.
        ValueError: a shape or device that does not fit the others.
        NotImplementedError: a device older than SM 8.0.
    """
    required = {"q": q, "k": k, "v": v, "g": g, "beta": beta}
    optional = {"initial_state": initial_state, "cu_seqlens": cu_seqlens}
    given = required | {name: x for name, x in optional.items() if x is not None}
    for name, x in given.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}; convert it first")
        if x.device != q.device:
            raise ValueError(f"{name} must be on the device of q ({q.device}), got {x.device}; move it there")
    check_dtypes(required, initial_state, cu_seqlens)
    check_shapes(q, k, v, g, beta)
    sequences = q.shape[0]
    if cu_seqlens is not None:
        if cu_seqlens.ndim != 1 or cu_seqlens.numel() < 2:
            raise ValueError(f"cu_seqlens must be [N + 1] with N >= 1, got shape {tuple(cu_seqlens.shape)}; "
                             f"start with 0 and append the end of each sequence")  # fmt: skip
        if q.shape[0] != 1:
            raise ValueError(f"cu_seqlens needs B = 1, got B = {q.shape[0]}; concatenate along T")
        sequences = cu_seqlens.numel() - 1
    if initial_state is not None:
        inner = (v.shape[3], q.shape[3]) if state_v_first else (q.shape[3], v.shape[3])
        expected = (sequences, v.shape[2], *inner)
        if tuple(initial_state.shape) != expected:
            raise ValueError(f"initial_state must be {'[N, HV, V, K]' if state_v_first else '[N, HV, K, V]'} "
                             f"= {expected}, got {tuple(initial_state.shape)}; one a sequence")  # fmt: skip
    sm = sm_of(q)
    if sm != INTERPRETER and sm < MIN_SM:
        raise NotImplementedError(f"the op needs SM 8.0 or newer, got SM {sm / 10}; use another device")
    check_memory(q, sm)


def check_memory(q: Tensor, sm: int) -> None:
    """Refuses what does not fit a block's shared memory.

    Raises:
        NotImplementedError: fp32 operands (of fp32 and fp16 carriers) with many keys, where there is little.
    """
    wide = q.shape[3] > WIDEST_THERE and q.dtype != torch.bfloat16
    if wide and any(sm in sms for sms in LESS_MEMORY):
        raise NotImplementedError(
            f"K must be at most {WIDEST_THERE} with {q.dtype} on SM {sm / 10}, whose shared memory holds no "
            f"more fp32 operands, got K = {q.shape[3]}; use bf16, or split the heads"
        )


def check_dtypes(
    required: Mapping[str, Tensor], initial_state: Tensor | None, cu_seqlens: Tensor | None
) -> None:
    """Refuses dtypes: one carrier for q, k and v; any float for g and beta; fp32 states; int boundaries."""
    q = required["q"]
    if q.dtype not in CARRIERS:
        raise TypeError(f"q must be fp32, bf16 or fp16, got {q.dtype}; cast it first")
    for name in ("k", "v"):
        if required[name].dtype != q.dtype:
            raise TypeError(
                f"{name} must have the dtype of q ({q.dtype}), got {required[name].dtype}; cast it"
            )
    for name in ("g", "beta"):
        if not required[name].is_floating_point():
            raise TypeError(f"{name} must have a float dtype, got {required[name].dtype}; cast it first")
    if initial_state is not None and initial_state.dtype != torch.float32:
        raise TypeError(f"initial_state must be fp32, got {initial_state.dtype}; cast it first")
    if cu_seqlens is not None and cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"cu_seqlens must be int32 or int64, got {cu_seqlens.dtype}; cast it first")


def check_shapes(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> None:
    """Refuses shapes of the token tensors that do not fit one another."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 4:
            raise ValueError(f"{name} must be [B, T, heads, size], got shape {tuple(x.shape)}; reshape it")
    if k.shape != q.shape:
        raise ValueError(f"k must have the shape of q {tuple(q.shape)}, got {tuple(k.shape)}; align them")
    if v.shape[:2] != q.shape[:2]:
        raise ValueError(
            f"v must have q's B and T {tuple(q.shape[:2])}, got {tuple(v.shape[:2])}; align them"
        )
    heads, value_heads = q.shape[2], v.shape[2]
    if heads == 0 or value_heads == 0 or value_heads % heads:
        raise ValueError(f"HV must be a positive multiple of H, got HV = {value_heads}, H = {heads}; "
                         f"value head j uses q/k head j // (HV // H)")  # fmt: skip
    for name, x in (("g", g), ("beta", beta)):
        if x.shape != v.shape[:3]:
            raise ValueError(
                f"{name} must be [B, T, HV] = {tuple(v.shape[:3])}, got {tuple(x.shape)}; align it"
            )
    for name, size in (("K", q.shape[3]), ("V", v.shape[3])):
        if not SIZES[0] <= size <= SIZES[1]:
            raise ValueError(
                f"{name} must be from {SIZES[0]} to {SIZES[1]}, got {size}; pad or split the heads"
            )


def check_sites(state_format: str | None, state_block_v: int, w_format: str | None) -> None:
    """Refuses formats and tiles that the contract does not know."""
    if state_format is not None:
        check_format("state", state_format)
    if w_format is not None:
        check_format("w", w_format)
    check_block_v(state_block_v)


def check_options(
    scale: float | None, input_precision: str, allow_neg_eigval: bool, use_beta_sigmoid_in_kernel: bool,
    use_gate_in_kernel: bool, A_log: Tensor | None, dt_bias: Tensor | None, g: Tensor,
) -> None:  # fmt: skip
    """Refuses options that contradict one another.

    Raises:
        ValueError: a value outside its set, or options that need or exclude one another.
        TypeError: `A_log` or `dt_bias` is not a float tensor.
    """
    if scale is not None and not is_finite_number(scale):
        raise ValueError(f"scale must be a finite number, got {scale!r}; leave it out for K ** -0.5")
    if input_precision not in PRECISIONS:
        raise ValueError(f"input_precision must be one of {PRECISIONS}, got {input_precision!r}; choose one")
    if allow_neg_eigval and not use_beta_sigmoid_in_kernel:
        raise ValueError("allow_neg_eigval needs use_beta_sigmoid_in_kernel, got it False; set it, or double "
                         "beta outside the op")  # fmt: skip
    if use_gate_in_kernel and A_log is None:
        raise ValueError("use_gate_in_kernel needs A_log, got None; give [HV] values")
    for name, x in (("A_log", A_log), ("dt_bias", dt_bias)):
        if x is None:
            continue
        if not use_gate_in_kernel:
            raise ValueError(f"{name} needs use_gate_in_kernel, got it False; set it, or leave {name} out")
        if not isinstance(x, Tensor) or not x.is_floating_point():
            raise TypeError(
                f"{name} must be a float tensor, got {getattr(x, 'dtype', type(x).__name__)}; cast it"
            )
        if x.numel() != g.shape[2] or x.device != g.device:
            raise ValueError(f"{name} must hold HV = {g.shape[2]} values on {g.device}, got shape "
                             f"{tuple(x.shape)} on {x.device}; align it")  # fmt: skip


def is_finite_number(value: object) -> bool:
    """Whether a value is an int or a float, neither infinite nor NaN; a bool is none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def check_boundaries(cu_seqlens: Tensor, tokens: int) -> None:
    """Refuses boundaries that do not start at 0, end at T and never fall.

    The values are read from the device once for each tensor and version of it; in a CUDA graph capture they
    cannot be read, so the tensor must have been seen by a call before.

    Raises:
        ValueError: a rule is broken, or a capture meets a tensor that was never read.
    """
    seen = (None if cu_seqlens.is_inference() else cu_seqlens._version, tokens)
    if _CHECKED_BOUNDARIES.get(cu_seqlens) == seen:  # type: ignore[no-untyped-call]
        return
    if cu_seqlens.is_cuda and torch.cuda.is_current_stream_capturing():
        raise ValueError("cu_seqlens must have been read before a CUDA graph is captured, got a new tensor; "
                         "call the op once with it outside the capture")  # fmt: skip
    values = cu_seqlens.tolist()
    if values[0] != 0:
        raise ValueError(f"cu_seqlens must start at 0, got {values[0]}; prepend 0")
    if values[-1] != tokens:
        raise ValueError(f"cu_seqlens must end at T = {tokens}, got {values[-1]}; cover every token")
    for index, (a, b) in enumerate(pairwise(values)):
        if b < a:
            raise ValueError(f"cu_seqlens must not fall, got {a} then {b} at {index}; sort the boundaries")
    _CHECKED_BOUNDARIES[cu_seqlens] = seen
