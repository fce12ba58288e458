"""What a subject must leave as it found it: torch's switches, random seeds and functions."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

from qualify.records import Comparison, Verdict


def _set_deterministic(value: tuple[bool, bool]) -> None:
    torch.use_deterministic_algorithms(value[0], warn_only=value[1])


def _set_backend(path: str, name: str) -> Callable[[Any], None]:
    return lambda value: setattr(_backend(path), name, value)


def _backend(path: str) -> Any:
    found: Any = torch.backends
    for part in path.split("."):
        found = getattr(found, part)
    return found


_BACKENDS = (
    ("cuda.matmul", "allow_tf32"),
    ("cuda.matmul", "fp32_precision"),  # after the older name, which moves it when it is put back
    ("cuda.matmul", "allow_bf16_reduced_precision_reduction"),
    ("cuda.matmul", "allow_fp16_reduced_precision_reduction"),
    ("cudnn", "allow_tf32"),
    ("cudnn", "benchmark"),
    ("cudnn", "deterministic"),
)


def _read_backend(path: str, name: str) -> Callable[[], Any]:
    def read() -> Any:
        try:
            return getattr(_backend(path), name, "absent")
        except RuntimeError:
            return "set through two interfaces at once"

    return read


def _read_precision() -> str:
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return "set through two interfaces at once"


def _set_device(value: torch.device) -> None:
    torch.set_default_device(None if value == torch.device("cpu") else value)


def _set_flush(value: bool) -> None:
    torch.set_flush_denormal(value)


def _flushes() -> bool:
    tiny = torch.full((1,), 2.0**-126, dtype=torch.float32, device="cpu")
    return bool((tiny * 0.5 == 0).item())


SWITCHES: Mapping[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {
    **{
        f"backends.{path}.{name}": (_read_backend(path, name), _set_backend(path, name))
        for path, name in _BACKENDS
    },
    "default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "default device": (torch.get_default_device, _set_device),
    "grad mode": (torch.is_grad_enabled, lambda value: torch._C._set_grad_enabled(value)),
    "autocast on cpu": (
        lambda: torch.is_autocast_enabled("cpu"),
        lambda value: torch.set_autocast_enabled("cpu", value),
    ),
    "autocast on cuda": (
        lambda: torch.is_autocast_enabled("cuda"),
        lambda value: torch.set_autocast_enabled("cuda", value),
    ),
    "float32 matmul precision": (_read_precision, torch.set_float32_matmul_precision),
    "deterministic algorithms": (
        lambda: (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        _set_deterministic,
    ),
    "threads": (torch.get_num_threads, torch.set_num_threads),
    "flush of subnormals": (_flushes, _set_flush),
    "seed": (torch.initial_seed, lambda value: None),
}
"""Name -> (read, restore). Random generators are restored as a whole, beyond the seed."""

WATCHED: tuple[Any, ...] = (torch, torch.Tensor, torch.nn.functional, torch.linalg, torch.autograd)
"""Namespaces whose functions a subject must not replace."""


class Switches:
    """The state of every switch and function when it was built."""

    def __init__(self) -> None:
        self.values = {name: read() for name, (read, _) in SWITCHES.items()}
        self.functions = [dict(vars(space)) for space in WATCHED]
        self.generators = (torch.get_rng_state(), random.getstate(), np.random.get_state())

    def restore(self) -> list[str]:
        """Puts everything back; returns what had been changed, in words."""
        changed = self._restore_functions()
        for name, (read, _) in SWITCHES.items():
            if (after := read()) != self.values[name]:
                changed.append(f"{name} from {self.values[name]} to {after}")
        for _ in range(2):  # some switches are two names of one thing, and writing one moves the other
            for name, (read, write) in SWITCHES.items():
                if read() != self.values[name]:
                    write(self.values[name])
        torch.set_rng_state(self.generators[0])
        random.setstate(self.generators[1])
        np.random.set_state(self.generators[2])
        return changed

    def _restore_functions(self) -> list[str]:
        changed = []
        for space, before in zip(WATCHED, self.functions, strict=True):
            now = vars(space)
            for name, value in before.items():
                found = now.get(name, _GONE)
                if found is not value and _is_function(name, value) and not _wrapped_by_torch(found, value):
                    changed.append(f"{getattr(space, '__name__', space)}.{name} was replaced")
                    setattr(space, name, value)
            for name in [n for n in now if n not in before and _shadows(space, n)]:
                changed.append(f"{getattr(space, '__name__', space)}.{name} was replaced")
                delattr(space, name)
        return changed


_GONE = object()


def _wrapped_by_torch(found: object, before: object) -> bool:
    """Whether torch itself wrapped a function, as it does when a part of it is first imported."""
    code = getattr(found, "__code__", None)
    inside = code is not None and Path(code.co_filename).is_relative_to(Path(torch.__file__).parent)
    return inside and getattr(found, "__wrapped__", None) is before


def _is_function(name: str, value: object) -> bool:
    return (
        callable(value) and not isinstance(value, type) and (not name.startswith("_") or name.endswith("__"))
    )


def _shadows(space: Any, name: str) -> bool:
    """Whether a new attribute of a class hides one that it inherits."""
    bases = space.__mro__[1:] if isinstance(space, type) else ()
    return any(name in vars(base) for base in bases)


@contextmanager
def lent_streams() -> Iterator[None]:
    """Lends standard output and error to a subject as objects that it may close, and restores its folder."""
    own, folder = (sys.stdout, sys.stderr), os.getcwd()
    sys.stdout, sys.stderr = (
        os.fdopen(os.dup(number), "w", encoding="utf-8", errors="replace") for number in (1, 2)
    )
    lent = (sys.stdout, sys.stderr)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = own
        os.chdir(folder)
        for stream in lent:
            with suppress(OSError, ValueError):
                stream.close()


@contextmanager
def unchanged(changes: list[str]) -> Iterator[None]:
    """Restores every switch on leaving, however that happens, and adds what had changed to `changes`."""
    before = Switches()
    try:
        yield
    finally:
        changes.extend(before.restore())


def changed_state(changes: list[str]) -> Comparison:
    """The failing comparison that stands for global state which a subject changed."""
    return Comparison(
        tensor="global_state",
        kind="property",
        metric="changes",
        error=float(len(changes)),
        budget=0.0,
        derivation="a call leaves torch's switches, seeds and functions as it found them",
        failure=Verdict.FAILED_NUMERIC,
        because="; ".join(changes)[:400],
    )
