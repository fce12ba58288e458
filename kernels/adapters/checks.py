"""What a module, its framework and its machine must be for a site to be switched on; one row each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from kernels.adapters.layouts import FAMILIES, kernel_name
from kernels.options import CONVERSIONS

HEAD_SIZES = (16, 256)
"""Smallest and largest head that the op takes."""

CARRIERS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Module:
    """What is known about a module when a site is to be switched on."""

    module: torch.nn.Module
    family: str
    kernel: Callable[..., Any]

    def config(self, name: str) -> Any:
        """A field of the framework's configuration object; None where there is none."""
        return getattr(getattr(self.module, "config", None), name, None)

    def tensors(self) -> list[torch.Tensor]:
        """The module's floating-point parameters."""
        return [p for p in self.module.parameters() if p.is_floating_point()]


@dataclass(frozen=True)
class Check:
    """A rule, what was found against it (None where it holds), and what to do."""

    rule: str
    found: Callable[[Module], str | None]
    remedy: str
    error: type[Exception] = NotImplementedError


def unknown_kernel(m: Module) -> str | None:
    """The kernel's name, where the fused op does not stand in for it."""
    name = kernel_name(m.kernel)
    if m.family == "megatron" and name.startswith("torch_"):
        return None  # the next row says it better
    return None if name in FAMILIES[m.family].kernels else name


def deterministic(m: Module) -> str | None:
    """Megatron's torch kernel, which deterministic mode chooses."""
    if m.family == "megatron" and (
        m.config("deterministic_mode") or kernel_name(m.kernel).startswith("torch_")
    ):
        return f"deterministic_mode {m.config('deterministic_mode')} and kernel {kernel_name(m.kernel)}"
    return None


def context_parallel(m: Module) -> str | None:
    """A context-parallel size above 1."""
    size = getattr(m.module, "cp_size", None) or m.config("context_parallel_size") or 1
    return None if size == 1 else f"context-parallel size {size}"


def head_size(m: Module) -> str | None:
    """Heads that the op does not take."""
    names = ("key_head_dim", "value_head_dim", "head_k_dim", "head_v_dim")
    sizes = {
        name: getattr(m.module, name) for name in names if isinstance(getattr(m.module, name, None), int)
    }
    smallest, largest = HEAD_SIZES
    others = {name: size for name, size in sizes.items() if not smallest <= size <= largest}
    return str(others) if others else None


def dtype(m: Module) -> str | None:
    """Parameters that no kernel computes with."""
    others = {str(t.dtype) for t in m.tensors() if t.dtype not in CARRIERS}
    return ", ".join(sorted(others)) or None


def old_sm(m: Module) -> str | None:
    """A GPU older than the kernels are for."""
    oldest = min(row.min_sm for row in CONVERSIONS.values())
    for device in {t.device for t in m.tensors() if t.is_cuda}:
        major, minor = torch.cuda.get_device_capability(device)
        if 10 * major + minor < oldest:
            return f"SM {major}.{minor}"
    return None


CHECKS = (
    Check("the kernel must be one that the op replaces", unknown_kernel, "use the framework's FLA kernel"),
    Check("deterministic mode has a torch kernel without sites", deterministic, "switch it off"),
    Check("the context-parallel size must be 1", context_parallel, "rounding across ranks is undefined"),
    Check("heads must be 16 to 256 wide", head_size, "use such heads", ValueError),
    Check("parameters must be fp32, bf16 or fp16", dtype, "cast the module", TypeError),
    Check("the GPU must be SM 8.0 or newer", old_sm, "use a newer one"),
)  # fmt: skip


def check_can_round(module: torch.nn.Module, family: str, kernel: Callable[..., Any]) -> None:
    """Refuses to switch a site on where it would not be the contract's rounding.

    Raises:
        NotImplementedError, ValueError, TypeError: the first check that does not hold.
    """
    facts = Module(module, family, kernel)
    for check in CHECKS:
        found = check.found(facts)
        if found is not None:
            raise check.error(f"{check.rule}, got {found} in {type(module).__name__}; {check.remedy}")
