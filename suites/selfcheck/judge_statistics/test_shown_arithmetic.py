"""The precision that a subject shows counts for the path that shows it, and errors are no precision."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from qualify.case import Case
from qualify.subjects import Subject, subject_from_module
from suites.checks import arithmetic
from suites.good.variants import Ieee, OtherPath
from suites.subjects.eager import EagerGDN, Notes

Tensor = torch.Tensor


def shown(subject: Subject, sites: str, heads: str = "32x48") -> str | None:
    """What a case with these levels is judged in, of a subject that declares nothing."""
    levels = {"sm": "cpu", "dtype": "fp32", "sites": sites, "heads": heads}
    return arithmetic.measured_arithmetic(Case("op.chunk", levels, "random", 0, subject.name), subject)


def verdict(subject: Subject) -> bool:
    """Whether the declaration of a subject is let through."""
    case = Case("op.arithmetic", {"sm": "cpu", "dtype": "fp32", "sites": "none"}, "random", 0, subject.name)
    found = arithmetic.run(case, subject).comparisons
    return next(c.passed for c in found if c.tensor == "declared_and_measured_arithmetic")


def test_full_precision_counts_on_every_path() -> None:
    subject = subject_from_module(Ieee(), "ieee")
    assert shown(subject, "none") == shown(subject, "state") == "ieee"


def test_another_kernel_with_a_site_on_is_judged_as_what_it_is() -> None:
    subject = subject_from_module(OtherPath(), "other_path")
    assert shown(subject, "none") == "ieee"
    assert shown(subject, "state") is None


def test_larger_heads_on_a_matrix_unit_are_judged_as_what_they_are() -> None:
    subject = subject_from_module(BySize(), "by_size")
    assert shown(subject, "state") == "ieee"
    assert shown(subject, "state", "64x64") is None


def test_a_fault_of_a_site_is_not_taken_for_a_coarser_precision() -> None:
    subject = subject_from_module(UnroundedBackward(), "unrounded_backward")
    assert shown(subject, "state") == "ieee"


def test_a_declaration_holds_where_one_path_needs_it() -> None:
    assert verdict(declared(BySize(), "declared_by_size"))
    assert verdict(declared(OtherPath(), "declared_other_path"))
    assert not verdict(declared(Ieee(), "declared_looser"))


def declared(implementation: EagerGDN, name: str) -> Subject:
    """A subject that declares TF32 in so many words, under a name that no other one has."""
    module = ModuleType(name)
    vars(module).update(
        chunk_gated_delta_rule=implementation.chunk_gated_delta_rule, ARITHMETIC={torch.float32: "tf32"}
    )
    return subject_from_module(module, name)


class BySize(EagerGDN):
    """Full fp32 for small heads."""

    def operand(self, x: Tensor, n: Notes) -> Tensor:
        """Rounded for heads of 64 keys and more."""
        return x if n.K < 64 else super().operand(x, n)


class UnroundedBackward(Ieee):
    """Linearised at the states before their rounding."""

    def states_for_backward(self, n: Notes) -> Tensor:
        """The wrong ones."""
        raws: Any = n.raws[: n.at.chunks]
        return torch.stack(raws)
