"""The fused op of these tests: it remembers its options, and its answer is not the original's."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernels.adapters import attach
from suites.selfcheck.adapters import standins


class Op:
    """Stands in for the fused op."""

    def __init__(self) -> None:
        self.options: list[dict[str, Any]] = []

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any
    ) -> tuple[torch.Tensor, None]:
        self.options.append(options)
        o, _ = standins.chunk_gated_delta_rule(q, k, v)
        return o * 1.25, None


@pytest.fixture
def op(monkeypatch: pytest.MonkeyPatch) -> Op:
    """The op that a site calls."""
    stand_in = Op()
    monkeypatch.setattr(attach, "fused_op", lambda: stand_in)
    return stand_in


@pytest.fixture
def x() -> torch.Tensor:
    """Hidden states `[B, T, hidden]`."""
    return torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def kernel_names_are_put_back() -> Any:
    """A test that fails half-way must not leave a replaced module-level name behind."""
    before = standins.chunk_gated_delta_rule
    yield
    standins.chunk_gated_delta_rule = before
