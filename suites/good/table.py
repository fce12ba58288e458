"""The table of correct implementations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from qualify.subjects import Subject, subject_from_module
from suites.good.plain import Plain, PlainInDouble, PlainInPowersOfTwo, TokenByToken
from suites.good.variants import (
    BinaryExponentials,
    CarrierGroups,
    Cast,
    ExplicitInverse,
    Ieee,
    InverseAdjoint,
    Merged,
    OnePass,
    OtherPath,
    OtherStrides,
    OwnTotals,
    OwnTotalsIeee,
    Recomputed,
    ReversedSums,
    SplitSums,
    StateCopies,
    Substitution,
    Tf32Everywhere,
    TruncatedTf32,
    Unordered,
    WholeChunks,
)
from suites.subjects.eager import EagerGDN


@dataclass(frozen=True)
class Good:
    """A correct implementation that computes in another way.

    Attributes:
        name: as tallies show it.
        make: builds it.
        because: what in it a strict judge might take for a fault.
        declares: attributes of the subject beside its functions (`ARITHMETIC`, `DETERMINISTIC`).
    """

    name: str
    make: Callable[[], EagerGDN]
    because: str
    declares: Mapping[str, object] = field(default_factory=dict)

    def subject(self) -> Subject:
        """As any other subject that is plugged in."""
        implementation = self.make()
        vars(implementation).update(self.declares)
        return subject_from_module(implementation, self.name, f"good:{self.name}")


_IEEE = {"ARITHMETIC": {"fp32": "ieee"}}

_ROWS = (
    Good("eager", EagerGDN, "rounds operands as a GPU does"),
    Good("plain", Plain, "autograd, full fp32, no inverse", _IEEE),
    Good("plain_undeclared", Plain, "more precise than it says"),
    Good("plain_in_double", PlainInDouble, "rounds to fp32 at the sites and at the end alone"),
    Good("plain_in_powers_of_two", PlainInPowersOfTwo, "dg is a few fp32 roundings off", _IEEE),
    Good("token_by_token", TokenByToken, "no chunk form where W has no site"),
    Good("ieee", Ieee, "keeps all operands in fp32"),
    Good("truncated_tf32", TruncatedTf32, "errors of operands all point one way"),
    Good("tf32_everywhere", Tf32Everywhere, "bf16 carriers with finer intermediates"),
    Good("other_path", OtherPath, "keeps operands in fp32 with both sites off alone"),
    Good("own_totals", OwnTotals, "sums of gates in other orders"),
    Good("own_totals_ieee", OwnTotalsIeee, "sums of gates in other orders, and nothing else rounded", _IEEE),
    Good("substitution", Substitution, "solves without an inverse"),
    Good("explicit_inverse", ExplicitInverse, "an inverse by a general factorisation"),
    Good("merged", Merged, "an inverse merged from blocks of 16 rows"),
    Good("inverse_adjoint", InverseAdjoint, "saves the rounded W alone, and differentiates the inverse"),
    Good("state_copies", StateCopies, "bf16 copies of the states for readout and backward"),
    Good("reversed_sums", ReversedSums, "another order of summation"),
    Good("split_sums", SplitSums, "sums in slices"),
    Good("other_strides", OtherStrides, "results are not contiguous"),
    Good("recomputed", Recomputed, "the backward runs the forward again"),
    Good("binary_exponentials", BinaryExponentials, "exp2 of scaled gates"),
    Good("carrier_groups", CarrierGroups, "heads of a group are rounded before they are summed"),
    Good("whole_chunks", WholeChunks, "packed sequences are padded inside"),
    Good("one_pass", OnePass, "refuses a second backward pass through a graph"),
    Good("cast", Cast, "codes come from the framework"),
    Good("unordered", Unordered, "not deterministic, and declared so", {"DETERMINISTIC": False}),
)

GOOD: Mapping[str, Good] = MappingProxyType({row.name: row for row in _ROWS})
"""Every correct implementation by name."""
