"""Records: what a run leaves behind. Frozen, true when built, free of torch.

A record refuses to exist in a state that would be a lie: a case that PASSED carries at least one comparison,
and every comparison that it carries holds. Numbers are plain Python numbers; tensors never enter a record.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any


class Verdict(StrEnum):
    """The closed set of results that one case can have."""

    PASSED = "passed"
    FAILED_NUMERIC = "failed_numeric"
    FAILED_SHAPE = "failed_shape"
    FAILED_NONFINITE = "failed_nonfinite"
    FAILED_NONDETERMINISTIC = "failed_nondeterministic"
    ERROR = "error"
    CRASH = "crash"
    HANG = "hang"
    UNSUPPORTED = "unsupported"  # the subject does not offer what the case needs
    SKIPPED = "skipped"  # the machine does not meet a requirement of the case
    EXCLUDED = "excluded"  # left out by the user's selection
    WAIVED = "waived"
    STALE_WAIVER = "stale_waiver"
    NOT_RUN = "not_run"


FAILURES = frozenset(
    {
        Verdict.FAILED_NUMERIC,
        Verdict.FAILED_SHAPE,
        Verdict.FAILED_NONFINITE,
        Verdict.FAILED_NONDETERMINISTIC,
        Verdict.ERROR,
        Verdict.CRASH,
        Verdict.HANG,
        Verdict.STALE_WAIVER,
    }
)
EXECUTED = FAILURES - {Verdict.STALE_WAIVER} | {Verdict.PASSED, Verdict.WAIVED}


class Overall(StrEnum):
    """The verdict of a whole receipt."""

    QUALIFIED = "QUALIFIED"
    QUALIFIED_WITH_WAIVERS = "QUALIFIED_WITH_WAIVERS"
    NOT_QUALIFIED = "NOT_QUALIFIED"
    INCOMPLETE = "INCOMPLETE"


@dataclass(frozen=True)
class Worst:
    """The element that disagrees most, and where it sits.

    `place` maps coordinate names (`sequence`, `head`, `chunk`, `token`, `channel`, ...) to indices.
    """

    place: Mapping[str, int]
    expected: float
    actual: float


@dataclass(frozen=True)
class Comparison:
    """One tensor (or one property) held against what is expected.

    Attributes:
        tensor: name of the tensor (`o`, `final_state`, `dq`, ..., a stage) or of the property judged.
        kind: `exact` (bits; error counts differing elements), `budget` (error measured in `metric` against
            `budget`), `filter` (matched filter against a named wrong answer), `relation`, `property`, `build`
            (a kernel compiled for the SM of the axis `target`: `tensor` is `kernel:variant`, `derivation`
            starts with its conversion instructions and a semicolon).
        metric: what `error` measures: `bits`, `rel_l2`, `worst_head_rel_l2`, `worst_chunk_rel_l2`,
            `max_over_scale`, `projection`, `grid`, ...
        error: the measured figure, in units of `metric`.
        budget: the largest error that passes; 0 for exact comparisons.
        derivation: how the budget came about, in words with numbers.
        passed: `error <= budget` for every kind; NaN never passes.
        statistics: further figures (`max_abs`, `p99_abs`, `rel_l2`, `ulps_max`, `grid_steps_max`, ...).
        nonfinite: counts of non-finite elements of `actual` by class (`nan`, `posinf`, `neginf`).
        worst: the worst element, where there is one.
        discrimination: named wrong answer -> its distance from the oracle / budget (or filter separation);
            above 1 the comparison would have caught it.
        excluded: names of wrong answers that this comparison rules out for this subject.
        failure: the verdict that a failing comparison stands for.
        looks_like: the named wrong answer that a failing comparison fits best, if one fits.
        because: one line on what went wrong, for a failing property.
    """

    tensor: str
    kind: str
    metric: str
    error: float
    budget: float
    derivation: str
    statistics: Mapping[str, float] = field(default_factory=dict)
    nonfinite: Mapping[str, int] = field(default_factory=dict)
    worst: Worst | None = None
    discrimination: Mapping[str, float] = field(default_factory=dict)
    excluded: tuple[str, ...] = ()
    failure: Verdict = Verdict.FAILED_NUMERIC
    looks_like: str | None = None
    because: str = ""

    def __post_init__(self) -> None:
        if self.failure not in FAILURES:
            raise ValueError(
                f"failure must be a failing verdict, got {self.failure!r}; choose one of FAILURES"
            )
        if not (self.budget >= 0.0 and math.isfinite(self.budget)):
            raise ValueError(f"budget must be finite and not negative, got {self.budget}; derive it first")
        if self.kind == "exact" and self.budget != 0.0:
            raise ValueError(f"an exact comparison has budget 0, got {self.budget}; use kind='budget'")

    @property
    def passed(self) -> bool:
        """Whether the error is within the budget; a NaN error never is."""
        return self.error <= self.budget

    @property
    def margin(self) -> float:
        """Error / budget: at most 1 passes. An exact comparison has 0 when equal, infinity when not."""
        if self.budget > 0.0:
            return self.error / self.budget
        return 0.0 if self.error == 0.0 else math.inf


@dataclass(frozen=True)
class CaseRecord:
    """What became of one planned case.

    `reason` says, for anything but a pass, in one line why: a requirement with the value seen, an exception,
    the first comparison that failed. `launch` maps kernel names to the launch configuration that really ran.
    `gpu` is the UUID of the GPU that the case ran on, read in its worker; empty on a CPU.
    """

    case_id: str
    check: str
    subject: str
    levels: Mapping[str, str]
    regime: str
    seed: int
    verdict: Verdict
    reason: str = ""
    requirement: str = ""
    value_seen: str = ""
    input_digest: str = ""
    comparisons: tuple[Comparison, ...] = ()
    launch: Mapping[str, str] = field(default_factory=dict)
    duration_s: float = 0.0
    peak_memory_bytes: int = 0
    worker: str = ""
    gpu: str = ""
    command: str = ""
    must_run: bool = False

    def __post_init__(self) -> None:
        failing = [c for c in self.comparisons if not c.passed]
        if self.verdict is Verdict.PASSED and not self.comparisons:
            raise ValueError(
                f"case {self.case_id} cannot pass without a comparison; record what was compared"
            )
        if self.verdict is Verdict.PASSED and failing:
            raise ValueError(f"case {self.case_id} cannot pass: {failing[0].tensor} exceeds its budget")
        if self.verdict not in (Verdict.PASSED, Verdict.WAIVED) and not self.reason:
            raise ValueError(f"case {self.case_id} is {self.verdict} without a reason; say why")

    def to_json(self) -> dict[str, Any]:
        """This record as plain JSON values; non-finite numbers become strings, see `jsonable`."""
        body: dict[str, Any] = jsonable(asdict(self))
        for comparison, row in zip(self.comparisons, body["comparisons"], strict=True):
            row["passed"] = comparison.passed
            row["margin"] = jsonable(comparison.margin)
        return body


def jsonable(value: Any) -> Any:
    """A value with every mapping, sequence, enum and non-finite number turned into strict JSON."""
    if isinstance(value, StrEnum):
        return str(value)
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
    if isinstance(value, Mapping):
        return {str(k): jsonable(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(v) for v in value]
    return value


def number(value: float | str) -> float:
    """The inverse of `jsonable` for numbers: reads `NaN`, `Infinity` and `-Infinity` back."""
    return float(value)


def comparison_from_json(row: Mapping[str, Any]) -> Comparison:
    """A comparison read back from JSON; `passed` and `margin` are derived again, never trusted."""
    worst = row.get("worst")
    return Comparison(
        tensor=row["tensor"],
        kind=row["kind"],
        metric=row["metric"],
        error=number(row["error"]),
        budget=number(row["budget"]),
        derivation=row["derivation"],
        statistics={k: number(v) for k, v in row["statistics"].items()},
        nonfinite=dict(row["nonfinite"]),
        worst=Worst(worst["place"], number(worst["expected"]), number(worst["actual"])) if worst else None,
        discrimination={k: number(v) for k, v in row["discrimination"].items()},
        excluded=tuple(row["excluded"]),
        failure=Verdict(row["failure"]),
        looks_like=row["looks_like"],
        because=row["because"],
    )


def case_record_from_json(row: Mapping[str, Any]) -> CaseRecord:
    """A case record read back from `CaseRecord.to_json`."""
    known = CaseRecord.__dataclass_fields__.keys() - {"comparisons", "verdict"}
    fields = {name: row[name] for name in known if name in row}
    return CaseRecord(
        **fields,
        verdict=Verdict(row["verdict"]),
        comparisons=tuple(comparison_from_json(c) for c in row["comparisons"]),
    )
