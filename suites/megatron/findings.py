"""What a scenario finds: properties that hold, tensors that agree, and by how much."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

Tensor = torch.Tensor


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at on one rank.

    Attributes:
        what: what was looked at.
        error: how far it is from what is expected.
        budget: the largest error that passes; 0 asks for the same bits.
        because: what it would mean if it did not hold, and the figures.
    """

    what: str
    error: float
    budget: float
    because: str


def differing(expected: Tensor, actual: Tensor) -> float:
    """How many bytes differ."""
    one, two = (x.detach().contiguous().reshape(-1).view(torch.uint8) for x in (expected, actual))
    return float((one != two).sum())


def relative(reference: Tensor, other: Tensor) -> float:
    """Relative L2 distance; NaN where something is not finite."""
    known = reference.detach().double()
    return float((other.detach().double() - known).norm() / known.norm())


def summed(tensor: Tensor) -> Tensor:
    """The sum over all ranks."""
    total = tensor.clone()
    if torch.distributed.is_initialized():
        torch.distributed.all_reduce(total)
    return total


def apart(expected: Tensor, actual: Tensor) -> float:
    """Relative L2 distance of a tensor that lies in parts on the ranks, or whole on each."""
    known = expected.detach().double()
    error, size = (actual.detach().double() - known).square().sum(), known.square().sum()
    both = summed(torch.stack((error, size)))
    return float((both[0] / both[1]).sqrt())


def holds(what: str, condition: bool, because: str) -> Finding:
    """A property that is either so or not."""
    return Finding(what, 0.0 if condition else 1.0, 0.0, because)


def same_bits(what: str, expected: Tensor, actual: Tensor, because: str) -> Finding:
    """Two tensors that must be equal in every bit."""
    return Finding(
        what, differing(expected, actual), 0.0, f"{because}; relative L2 {relative(expected, actual):.3g}"
    )


def together(findings: Sequence[Finding]) -> list[Finding]:
    """The worst of every finding over all ranks, in the first rank's order."""
    every: list[list[Finding]] = [[] for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather_object(every, list(findings))
    worst: dict[str, Finding] = {}
    for rank, found in enumerate(every):
        for finding in found:
            known = worst.setdefault(finding.what, finding)
            if not finding.error - finding.budget <= known.error - known.budget:
                worst[finding.what] = replace(finding, because=f"rank {rank}: {finding.because}")
    return list(worst.values())
