"""A control: the eager implementation with one method replaced."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from qualify.subjects import Subject, subject_from_module
from references.wrong_answers import WRONG_ANSWERS
from suites.checks.named import PARTS
from suites.subjects.eager import EagerGDN, EagerQDQ

Kind = Literal[
    "codes",
    "straight_through",
    "configuration",
    "state",
    "terms",
    "packing",
    "heads",
    "range",
    "memory",
    "device",
]
Tier = Literal["exact", "stages", "relations", "whole"]

KINDS: Mapping[Kind, str] = MappingProxyType(
    {
        "codes": "arithmetic of codes and scales",
        "straight_through": "gradients of the rounding, and what the backward recomputes",
        "configuration": "what is rounded at all, with which tile, format and history",
        "state": "initial and final state, hand-over, layout",
        "terms": "terms of the forward and the backward that have nothing to do with rounding",
        "packing": "packed sequences, boundaries, tails",
        "heads": "grouped heads, gates by head",
        "range": "precision and dynamic range of state, gates and norms",
        "memory": "indices, strides, masks, what is written and what is not",
        "device": "what compilers, schedules and races do",
    }
)
"""Kind of defect -> what it is about."""

TIERS: Mapping[Tier, str] = MappingProxyType(
    {
        "exact": "bits, without a tolerance",
        "stages": "one stage, given the one before",
        "relations": "two runs of the same subject",
        "whole": "the whole op, within a budget or along a filter",
    }
)
"""Strength of evidence, the strongest first -> what it rests on."""


@dataclass(frozen=True)
class Control:
    """A planted fault that every qualification has to catch.

    Attributes:
        name: a level of the axis `fault`.
        kind: what kind of defect it stands for.
        because: how real implementations come by it.
        replaces: method of `EagerGDN` -> what stands in its place.
        rounding: the same for methods of `EagerQDQ`.
        tier: the strongest evidence that is expected to catch it.
        looks: names of looks (`suites.checks.controls.LOOKS`) to begin with; the others follow.
        unseen: carrier -> why the fault changes nothing there.
    """

    name: str
    kind: Kind
    because: str
    replaces: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    rounding: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    tier: Tier = "exact"
    looks: tuple[str, ...] = ()
    unseen: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for base, methods in ((EagerGDN, self.replaces), (EagerQDQ, self.rounding)):
            for method in methods:
                if not callable(getattr(base, method, None)):
                    raise ValueError(
                        f"{self.name} must replace a method of {base.__name__}, got {method!r}; rename it"
                    )
        if len(self.replaces) + len(self.rounding) == 0:
            raise ValueError(f"{self.name} must replace a method, got none; plant a fault")

    def implementation(self) -> EagerGDN:
        """The eager implementation with the fault, in a state of its own."""
        gdn = type("Faulty", (EagerGDN,), dict(self.replaces))()
        gdn.qdq = type("FaultyRounding", (EagerQDQ,), dict(self.rounding))()
        return gdn  # type: ignore[no-any-return]

    def subject(self) -> Subject:
        """The fault as a subject, as any other that is plugged in."""
        return subject_from_module(self.implementation(), self.name, f"control:{self.name}")


def named_look(wrong_answer: str) -> str:
    """The look that projects onto a named wrong answer."""
    return f"named_{list(WRONG_ANSWERS).index(wrong_answer) % PARTS}"
