"""Where a module of a framework keeps its gated delta rule, read from the module's own code.

A module either holds its kernel in an attribute and calls that, or it calls a name of its source file. Both
are found by looking at what the methods load, so that a method that a newer release added, or an older one
split off, is not missed. A module that does both, or neither, is refused.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any

import torch

NAMES = ("gated_delta_rule", "chunk_gated_delta_rule")
"""The names under which frameworks hold or import the kernel."""


@dataclass(frozen=True)
class Family:
    """The modules of one framework that can be converted.

    Attributes:
        package: the top package of the class.
        classes: the names of the classes.
        kernels: names of the kernels that the fused op stands in for, each with why.
    """

    package: str
    classes: tuple[str, ...]
    kernels: Mapping[str, str]


FAMILIES: Mapping[str, Family] = {
    "megatron": Family(
        package="megatron",
        classes=("GatedDeltaNet",),
        kernels={"chunk_gated_delta_rule": "FLA's call, which the fused op extends"},
    ),
    "fla": Family(
        package="fla",
        classes=("GatedDeltaNet",),
        kernels={"chunk_gated_delta_rule": "FLA's call, which the fused op extends"},
    ),
    "transformers": Family(
        package="transformers",
        classes=("Qwen3NextGatedDeltaNet",),
        kernels={
            "chunk_gated_delta_rule": "FLA's call, which the fused op extends",
            "torch_chunk_gated_delta_rule": "the same function in torch, for machines without FLA",
        },
    ),
}


@dataclass(frozen=True)
class Layout:
    """Where one module keeps its kernel.

    Attributes:
        attribute: the name by which the kernel is called.
        callers: the methods that call it.
        namespace: the globals that hold the name; None where the module holds it itself.
    """

    attribute: str
    callers: tuple[str, ...]
    namespace: dict[str, Any] | None

    @property
    def held(self) -> bool:
        """Whether the module itself holds the kernel."""
        return self.namespace is None

    def __str__(self) -> str:
        holder = f"self.{self.attribute}" if self.held else f"module-level {self.attribute}"
        return f"{holder} in {', '.join(self.callers)}"


def family_of(module: torch.nn.Module) -> str | None:
    """The name of the family that a module belongs to, by its class and those that it derives from."""
    for cls in type(module).__mro__:
        for name, family in FAMILIES.items():
            if cls.__name__ in family.classes and cls.__module__.split(".")[0] == family.package:
                return name
    return None


def layout_of(module: torch.nn.Module) -> Layout:
    """Where a module keeps its kernel.

    Raises:
        NotImplementedError: the module calls the kernel in no way, or in more than one way.
    """
    held: dict[str, list[str]] = {}
    named: dict[str, list[str]] = {}
    namespaces: list[dict[str, Any]] = []
    for method, function in methods_of(type(module)):
        loads = loads_of(function.__code__)
        if loads.stored:
            continue  # this one sets the attribute up, it does not call it
        for name in loads.attributes:
            held.setdefault(name, []).append(method)
        for name in loads.names:
            named.setdefault(name, []).append(method)
            if not any(function.__globals__ is known for known in namespaces):
                namespaces.append(function.__globals__)
    found = f"attributes {held or 'none'} and names {named or 'none'}"
    if len(held) + len(named) != 1 or len(namespaces) > 1:
        raise NotImplementedError(
            f"{type(module).__name__} must call its kernel in exactly one way, found {found}; "
            f"this layout is not known, use a supported release"
        )
    if named:
        ((attribute, callers),) = named.items()
        layout = Layout(attribute, tuple(callers), namespaces[0])
        present = callable(namespaces[0].get(attribute))
    else:
        ((attribute, callers),) = held.items()
        layout = Layout(attribute, tuple(callers), None)
        present = callable(module.__dict__.get(attribute))
    if not present:
        raise NotImplementedError(
            f"{type(module).__name__} calls {layout}, which must be a kernel, found none there; "
            f"install the package that brings it"
        )
    return layout


@dataclass(frozen=True)
class Loads:
    """Which of `NAMES` a function loads from objects and from its globals, and which it stores on objects."""

    attributes: tuple[str, ...]
    names: tuple[str, ...]
    stored: tuple[str, ...]


def loads_of(code: CodeType) -> Loads:
    """Reads the byte code of a function and of the functions inside it."""
    seen: dict[str, set[str]] = {"attributes": set(), "names": set(), "stored": set()}
    for inner in codes_in(code):
        for instruction in dis.get_instructions(inner):
            if instruction.argval not in NAMES:
                continue
            if instruction.opname in ("LOAD_ATTR", "LOAD_METHOD"):
                seen["attributes"].add(instruction.argval)
            elif instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                seen["names"].add(instruction.argval)
            elif instruction.opname == "STORE_ATTR":
                seen["stored"].add(instruction.argval)
    return Loads(*(tuple(sorted(seen[kind])) for kind in ("attributes", "names", "stored")))


def codes_in(code: CodeType) -> Iterator[CodeType]:
    """A code object and every code object inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes_in(constant)


def methods_of(cls: type) -> Iterator[tuple[str, FunctionType]]:
    """The methods that instances of a class really have, without those of `torch.nn.Module`."""
    for name in dir(cls):
        if hasattr(torch.nn.Module, name) and name != "forward":
            continue
        method = inspect.unwrap(inspect.getattr_static(cls, name), stop=lambda f: not callable(f))
        if isinstance(method, FunctionType):
            yield name, method


def kernel_name(kernel: Callable[..., Any]) -> str:
    """The name that a kernel was defined under, below its decorators."""
    inner = inspect.unwrap(kernel)
    return str(getattr(inner, "__name__", type(inner).__name__))
