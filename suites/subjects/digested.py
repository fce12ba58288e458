"""This project's kernels, with a digest of every tensor that they give in the record of each case.

For comparing runs bit for bit (`suites.scaling`). Outputs count, and the gradients of inputs as the op gives
them; not their order, which autograd's threads decide.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch

from suites.subjects import kernels
from suites.subjects.kernels import (
    BACKEND,
    BUILDS,
    CAPABILITIES,
    LAUNCH_ROWS,
    PACKAGE,
    PACKAGES,
    force_launch_row,
)

DIGEST = "output digest"
"""The name under which the digest stands beside the launch configurations of a case."""

_SEEN: list[bytes] = []
"""Digests of the tensors of the case that is running."""


def note(tensor: torch.Tensor) -> None:
    """Adds a tensor to the digest of its case: dtype, shape and bits."""
    held = tensor.detach().contiguous().cpu()
    told = f"{held.dtype} {tuple(held.shape)}".encode()
    _SEEN.append(hashlib.sha256(told + held.reshape(-1).view(torch.uint8).numpy().tobytes()).digest())


def watched(value: Any) -> Any:
    """An argument whose gradient, as the op gives it, will be noted."""
    if not (isinstance(value, torch.Tensor) and value.requires_grad and torch.is_grad_enabled()):
        return value
    own = value.view_as(value)
    own.register_hook(note)  # type: ignore[no-untyped-call]
    return own


def digested(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function whose outputs, and the gradients of whose inputs, are noted."""

    @wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        found = function(*map(watched, arguments), **{name: watched(v) for name, v in options.items()})
        every = (
            found.values() if isinstance(found, Mapping) else found if isinstance(found, tuple) else (found,)
        )
        for tensor in every:
            if isinstance(tensor, torch.Tensor):
                note(tensor)
        return found

    return call


@contextmanager
def recorded_launches() -> Iterator[dict[str, str]]:
    """The kernels' own record, and on leaving it the digest of whatever was noted meanwhile."""
    _SEEN.clear()
    with kernels.recorded_launches() as launches:
        yield launches
    if _SEEN:
        launches[DIGEST] = hashlib.sha256(b"".join(sorted(_SEEN))).hexdigest()


chunk_gated_delta_rule = digested(kernels.chunk_gated_delta_rule)
qdq_state = digested(kernels.qdq_state)
qdq_w = digested(kernels.qdq_w)
stages = digested(kernels.stages)

__all__ = [
    "BACKEND",
    "BUILDS",
    "CAPABILITIES",
    "LAUNCH_ROWS",
    "PACKAGE",
    "PACKAGES",
    "chunk_gated_delta_rule",
    "force_launch_row",
    "qdq_state",
    "qdq_w",
    "recorded_launches",
    "stages",
]
