"""What a receipt's cases amount to: counts, tightest margins, failures by cause, tables per tensor.

Pure functions of the records. Everything shown as a number in any form of a receipt is computed here.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from qualify.records import EXECUTED, FAILURES, CaseRecord, Comparison, Verdict
from reports.model import Body, Control, Cover, Discrimination, Environment, Evidence, Plan, Skip

TENSORS = ("o", "final_state", "dq", "dk", "dv", "dg", "dbeta", "dh0")
"""The eight tensors of a whole-op case, in the order in which people know them."""

MEASURED = frozenset({"budget", "relation", "filter"})
"""Kinds of comparison whose error is a size against a budget."""

APART = frozenset({"exact", "control", "build", *MEASURED})
"""Kinds that have tables of their own; every other kind is a property, which holds or does not."""

CASE_AXES = ("check", "regime", "subject", "verdict")
"""What every case has beside its levels; the map can be laid out along these too."""


def judged(plan: Plan, cases: Iterable[CaseRecord]) -> list[CaseRecord]:
    """The cases that judge the subject, without those in which planted faults judge the judge."""
    controls = {check.name for check in plan.checks if check.control}
    return [case for case in cases if case.check not in controls]


def axis_value(case: CaseRecord, axis: str) -> str:
    """Where a case stands on an axis of the plan or on one of CASE_AXES; `–` where it does not vary it."""
    if axis in CASE_AXES:
        return str(getattr(case, axis))
    return case.levels.get(axis, "–")


def places(case: CaseRecord) -> list[tuple[str, str]]:
    """Every axis that a case stands on, CASE_AXES included, with its level."""
    return [*((axis, str(getattr(case, axis))) for axis in CASE_AXES), *case.levels.items()]


def case_margin(case: CaseRecord) -> float | None:
    """The tightest margin of a case; None where nothing was compared."""
    return max((orderable(c.margin) for c in case.comparisons), default=None)


def orderable(value: float) -> float:
    """A margin or error that can be ordered: NaN counts as infinitely bad."""
    return math.inf if math.isnan(value) else value


def composition(cases: Sequence[CaseRecord]) -> list[tuple[Verdict, int]]:
    """How many cases ended with each verdict, in the order of the closed set, zeros left out."""
    counts = Counter(case.verdict for case in cases)
    return [(verdict, counts[verdict]) for verdict in Verdict if counts[verdict]]


@dataclass(frozen=True)
class Tight:
    """A comparison that came close to its budget, or beyond."""

    case: CaseRecord
    comparison: Comparison


def tightest(cases: Iterable[CaseRecord], limit: int = 6) -> list[Tight]:
    """The comparisons of executed cases nearest to their budgets, one for each tensor and metric."""
    best: dict[tuple[str, str], Tight] = {}
    for case in cases:
        for c in case.comparisons:
            if c.budget <= 0:
                continue
            held = best.get((c.tensor, c.metric))
            if held is None or orderable(c.margin) > orderable(held.comparison.margin):
                best[c.tensor, c.metric] = Tight(case, c)
    return sorted(best.values(), key=lambda t: -orderable(t.comparison.margin))[:limit]


@dataclass(frozen=True)
class FailureGroup:
    """Failing cases with one cause: verdict, check, first failing tensor, the fault that it looks like."""

    verdict: Verdict
    check: str
    tensor: str
    looks_like: str
    cases: tuple[CaseRecord, ...]

    @property
    def worst(self) -> CaseRecord:
        """The case farthest outside its budget."""
        return max(self.cases, key=lambda case: case_margin(case) or 0.0)


def failure_groups(cases: Iterable[CaseRecord]) -> list[FailureGroup]:
    """Failures by cause: those that look like a named wrong answer first, then the largest group first."""
    groups: dict[tuple[Verdict, str, str, str], list[CaseRecord]] = defaultdict(list)
    for case in cases:
        if case.verdict in FAILURES:
            first = next((c for c in case.comparisons if not c.passed), None)
            fits = next((c.looks_like for c in case.comparisons if not c.passed and c.looks_like), "")
            groups[case.verdict, case.check, first.tensor if first else "", fits or ""].append(case)
    made = [FailureGroup(*key, tuple(members)) for key, members in groups.items()]
    return sorted(made, key=lambda g: (not g.looks_like, -len(g.cases), g.check, g.tensor))


@dataclass
class Tally:
    """What became of the cases of one cell of the map."""

    planned: int = 0
    executed: int = 0
    failed: int = 0
    waived: int = 0
    margin: float = -1.0

    def add(self, case: CaseRecord) -> None:
        """Counts one case."""
        self.planned += 1
        self.executed += case.verdict in EXECUTED
        self.failed += case.verdict in FAILURES
        self.waived += case.verdict is Verdict.WAIVED
        tight = case_margin(case)
        if tight is not None and case.verdict is Verdict.PASSED:
            self.margin = max(self.margin, tight)

    @property
    def state(self) -> str:
        """The class that colours the cell: `failed`, `waived`, `none` (not executed) or a step of margin."""
        if self.failed:
            return "failed"
        if self.waived:
            return "waived"
        return "none" if not self.executed else f"m{margin_step(self.margin)}"


MARGIN_STEPS = (0.0, 0.25, 0.5, 0.75, 0.9)


def margin_step(value: float) -> int:
    """Which of six steps a passing margin falls in: exact, up to a quarter, a half, three quarters, ..."""
    return sum(value > step for step in MARGIN_STEPS)


@dataclass(frozen=True)
class HeatMap:
    """The matrix seen along two axes; a missing cell was not planned."""

    row_axis: str
    column_axis: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    cells: Mapping[tuple[str, str], Tally]


def dense_axis(cases: Sequence[CaseRecord], plan: Plan) -> str:
    """The axis, of three to eight levels, along which a map of the checks has the fewest holes."""
    best, axis = 0.0, "regime"
    for name in ("dtype", *plan.axes):
        cells = {(case.check, axis_value(case, name)) for case in cases}
        levels = {level for _, level in cells}
        share = len(cells) / max(1, len(levels) * len({check for check, _ in cells}))
        if 3 <= len(levels - {"–"}) <= 8 and "–" not in levels | {""} and share > best:
            best, axis = share, name
    return axis if best else "dtype"


def heat_map(cases: Iterable[CaseRecord], row_axis: str, column_axis: str, plan: Plan) -> HeatMap:
    """Tallies of the cases by two axes, levels in the plan's order."""
    cells: dict[tuple[str, str], Tally] = defaultdict(Tally)
    for case in cases:
        cells[axis_value(case, row_axis), axis_value(case, column_axis)].add(case)
    rows = in_order({row for row, _ in cells}, plan.axes.get(row_axis, ()))
    columns = in_order({column for _, column in cells}, plan.axes.get(column_axis, ()))
    return HeatMap(row_axis, column_axis, rows, columns, dict(cells))


def in_order(values: Iterable[str], known: Sequence[str]) -> tuple[str, ...]:
    """Levels in the order in which the plan names them, others after them in natural order."""
    place = {level: i for i, level in enumerate(known)}
    return tuple(sorted(values, key=lambda v: (place.get(v, len(place)), v == "–", _natural(v))))


def _natural(text: str) -> list[tuple[int, int, str]]:
    parts = re.findall(r"\d{1,18}|\D+", text)
    return [(0, int(p), "") if p[0].isdecimal() and p.isascii() else (1, 0, p) for p in parts]


@dataclass(frozen=True)
class ControlRow:
    """One planted fault in every carrier that it was planted in."""

    name: str
    fault: str
    states: Mapping[str, str]
    by: Evidence | None
    because: str

    @property
    def caught(self) -> bool:
        """Whether it was caught wherever it was planted."""
        return set(self.states.values()) == {"caught"}


def control_rows(body: Body) -> tuple[list[str], list[ControlRow]]:
    """The carriers, and each planted fault with its state in each; the open ones first."""
    ran = {
        (case.levels.get("fault", case.check), case.levels.get("dtype", ""))
        for case in body.cases
        if case.verdict in EXECUTED
    }
    grouped: dict[str, list[Control]] = defaultdict(list)
    for control in body.controls:
        grouped[control.name].append(control)
    rows = [
        ControlRow(
            name,
            next((c.fault for c in controls if c.fault), ""),
            {
                c.dtype: "caught" if c.caught else "missed" if (name, c.dtype) in ran else "not run"
                for c in controls
            },
            next((e for c in controls for e in c.caught_by), None),
            next((c.because for c in controls if not c.caught), ""),
        )
        for name, controls in grouped.items()
    ]
    dtypes = sorted({c.dtype for c in body.controls})
    return dtypes, sorted(rows, key=lambda r: (r.caught, "missed" not in r.states.values()))


@dataclass(frozen=True)
class WrongAnswerGroup:
    """One named wrong answer over every place at which it had to be ruled out."""

    name: str
    subject: str
    because: str
    ruled_out: int
    places: int
    still_open: tuple[str, ...]
    weakest: float
    approach: float | None
    by: Evidence | None


def approaches(cases: Iterable[CaseRecord]) -> dict[tuple[str, str], float]:
    """(wrong answer, subject) -> the largest projection of an error onto it: 1 would be the fault."""
    found: dict[tuple[str, str], float] = {}
    for case in cases:
        for c in case.comparisons:
            for name, value in c.statistics.items() if c.kind == "filter" else ():
                if name.startswith("c."):
                    key = name.removeprefix("c."), case.subject
                    found[key] = max(found.get(key, -math.inf), orderable(value))
    return found


def wrong_answer_groups(body: Body) -> list[WrongAnswerGroup]:
    """Named wrong answers, those that are still open somewhere first."""
    grouped: dict[tuple[str, str], list[Discrimination]] = defaultdict(list)
    for row in body.discrimination:
        grouped[row.wrong_answer, row.subject].append(row)
    reasons = {row.name: row.because for row in body.plan.wrong_answers}
    nearest = approaches(judged(body.plan, body.cases))
    made = [
        WrongAnswerGroup(
            name,
            subject,
            reasons.get(name, ""),
            sum(row.excluded for row in rows),
            len(rows),
            tuple(" ".join(filter(None, (r.dtype, r.site, r.format))) for r in rows if not r.excluded),
            min((row.best for row in rows if row.excluded), default=0.0),
            nearest.get((name, subject)),
            next((e for row in rows for e in row.by), None),
        )
        for (name, subject), rows in grouped.items()
    ]
    return sorted(made, key=lambda g: (g.ruled_out == g.places, g.name))


@dataclass
class TensorRow:
    """The errors of one tensor in one carrier, over all executed cases."""

    tensor: str
    dtype: str
    cases: int = 0
    compared: int = 0
    failed: int = 0
    margins: list[float] = field(default_factory=list)
    statistics: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    nonfinite: Counter[str] = field(default_factory=Counter)
    tight: Tight | None = None
    discrimination: dict[str, float] = field(default_factory=dict)

    def add(self, case: CaseRecord, comparisons: Sequence[Comparison]) -> None:
        """Takes in what one case measured on this tensor."""
        worst = max(comparisons, key=lambda c: orderable(c.margin))
        self.cases += 1
        self.compared += len(comparisons)
        self.failed += not worst.passed
        self.margins.append(orderable(worst.margin))
        if self.tight is None or orderable(worst.margin) > orderable(self.tight.comparison.margin):
            self.tight = Tight(case, worst)
        for c in comparisons:
            for name, value in c.statistics.items():
                self.statistics[name].append(orderable(value))
            _keep_largest(self.discrimination, c.discrimination)
        self.nonfinite.update(max((c.nonfinite for c in comparisons), key=lambda n: sum(n.values())))

    @property
    def median_margin(self) -> float:
        """The median over cases of the tightest margin."""
        return middle(self.margins)

    def typical(self, name: str) -> float | None:
        """The median over cases of a figure; None where no case has it."""
        return middle(self.statistics[name]) if name in self.statistics else None

    def largest(self, name: str) -> float | None:
        """The largest of a figure over all cases; None where no case has it."""
        return max(self.statistics[name]) if name in self.statistics else None


def middle(values: Sequence[float]) -> float:
    """The upper median of some values."""
    return sorted(values)[len(values) // 2]


def _keep_largest(held: dict[str, float], new: Mapping[str, float]) -> None:
    for name, value in new.items():
        held[name] = max(held.get(name, 0.0), orderable(value))


def family(tensor: str) -> str:
    """The name of a tensor without the shape that some checks put behind it: `codes[2x128]` is `codes`."""
    return tensor.partition("[")[0] or tensor


STEPS_APART = ("0", "1", "2", "more")
"""By how many steps of the grid codes are apart, as statistics count them: `codes_apart_0`, ..."""


@dataclass
class StepRow:
    """Elements of a rounded tensor by the steps between actual and expected code, over all cases."""

    tensor: str
    dtype: str
    format: str
    cases: int = 0
    elements: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STEPS_APART, 0.0))
    largest: float = 0.0

    def add(self, statistics: Mapping[str, float]) -> None:
        """Takes in what one comparison counted."""
        self.cases += 1
        for apart in STEPS_APART:
            self.elements[apart] += orderable(statistics.get(f"codes_apart_{apart}", 0.0))
        self.largest = max(self.largest, orderable(statistics.get("grid_steps_max", 0.0)))


def step_rows(cases: Iterable[CaseRecord]) -> list[StepRow]:
    """The distribution of grid steps, wherever codes were counted."""
    rows: dict[tuple[str, str, str], StepRow] = {}
    for case in cases:
        for c in case.comparisons:
            if f"codes_apart_{STEPS_APART[0]}" in c.statistics:
                key = (family(c.tensor), case.levels.get("dtype", ""), case.levels.get("format", ""))
                rows.setdefault(key, StepRow(*key)).add(c.statistics)
    return sorted(rows.values(), key=lambda r: (tensor_rank(r.tensor), r.dtype, r.format))


def measured(case: CaseRecord) -> Iterator[tuple[str, list[Comparison]]]:
    """The comparisons of a case against a budget, by tensor."""
    by_tensor: dict[str, list[Comparison]] = defaultdict(list)
    for c in case.comparisons:
        if c.kind in MEASURED:
            by_tensor[family(c.tensor)].append(c)
    yield from by_tensor.items()


@dataclass
class HeldRow:
    """Comparisons without a budget: one name that failed somewhere, or all names of a check that held."""

    check: str
    names: list[str]
    compared: int = 0
    failed: int = 0
    elements: float = 0.0
    differing: float = 0.0

    def add(self, other: HeldRow) -> None:
        """Takes in another row of the check."""
        self.names += other.names
        self.compared += other.compared
        self.elements += other.elements


def held_rows(cases: Iterable[CaseRecord], wanted: Callable[[Comparison], bool]) -> list[HeldRow]:
    """What holds or does not: names that failed one by one and first, all that held in one row a check."""
    single: dict[tuple[str, str], HeldRow] = {}
    for case in cases:
        for c in case.comparisons:
            if wanted(c):
                name = family(c.tensor)
                row = single.setdefault((case.check, name), HeldRow(case.check, [name]))
                row.compared += 1
                row.failed += not c.passed
                row.elements += c.statistics.get("elements", 0.0)
                row.differing += orderable(c.error)
    held: dict[str, HeldRow] = {}
    for row in sorted(single.values(), key=lambda r: (r.check, tensor_rank(r.names[0]))):
        if not row.failed:
            held.setdefault(row.check, HeldRow(row.check, [])).add(row)
    failed = sorted(
        (row for row in single.values() if row.failed), key=lambda r: (-r.failed, r.check, r.names)
    )
    return [*failed, *held.values()]


def is_exact(comparison: Comparison) -> bool:
    """Whether bits were compared."""
    return comparison.kind == "exact"


def is_property(comparison: Comparison) -> bool:
    """Whether something was asserted that has no size."""
    return comparison.kind not in APART


def tensor_rows(cases: Iterable[CaseRecord]) -> list[TensorRow]:
    """One row for each tensor and carrier, the eight tensors first."""
    rows: dict[tuple[str, str], TensorRow] = {}
    for case in cases:
        dtype = case.levels.get("dtype", "–")
        for tensor, comparisons in measured(case):
            row = rows.setdefault((tensor, dtype), TensorRow(tensor, dtype))
            row.add(case, comparisons)
    return sorted(rows.values(), key=lambda r: (tensor_rank(r.tensor), r.dtype))


def tensor_rank(tensor: str) -> tuple[int, str]:
    """Sorts the eight tensors first, in their order, and stages after them by name."""
    return (TENSORS.index(tensor), "") if tensor in TENSORS else (len(TENSORS), tensor)


def discrimination_matrix(rows: Iterable[TensorRow]) -> tuple[list[str], dict[tuple[str, str], float]]:
    """Tensors, and for (wrong answer, tensor) the largest distance over budget that any case measured."""
    best: dict[tuple[str, str], float] = {}
    tensors: dict[str, None] = {}
    for row in rows:
        for name, value in row.discrimination.items():
            tensors[row.tensor] = None
            best[name, row.tensor] = max(best.get((name, row.tensor), 0.0), value)
    return sorted(tensors, key=tensor_rank), best


def skip_rows(cases: Iterable[CaseRecord], recorded: Iterable[Skip] = ()) -> list[tuple[Verdict, Skip]]:
    """Cases not executed by verdict and rule, counted again from the cases; budgets from the record."""
    counts: Counter[tuple[Verdict, str, str, str]] = Counter()
    for case in cases:
        if case.verdict not in EXECUTED and case.verdict is not Verdict.STALE_WAIVER:
            counts[case.verdict, case.requirement, case.value_seen, case.reason] += 1
    budgets = {s.requirement: s.budget for s in recorded}
    rows = [
        (verdict, Skip(rule, seen, reason, number, budgets.get(rule)))
        for (verdict, rule, seen, reason), number in counts.items()
    ]
    return sorted(rows, key=lambda row: -row[1].cases)


def never_executed(plan: Plan, cases: Iterable[CaseRecord]) -> list[tuple[str, str, int]]:
    """(axis, level, planned cases) of every level of the plan that no executed case stands on."""
    planned: Counter[tuple[str, str]] = Counter()
    executed: Counter[tuple[str, str]] = Counter()
    for case in cases:
        stands = [*case.levels.items(), ("regime", case.regime)]
        planned.update(stands)
        if case.verdict in EXECUTED:
            executed.update(stands)
    levels = {(axis, level) for axis, named in plan.axes.items() for level in named} | set(planned)
    missing = [(axis, level, planned[axis, level]) for axis, level in levels if not executed[axis, level]]
    return sorted(missing, key=lambda row: (row[0], _natural(row[1])))


def launches(cases: Iterable[CaseRecord]) -> list[tuple[str, str, int]]:
    """(kernel, launch configuration, executed cases) that really ran."""
    counts = Counter((kernel, row) for case in cases for kernel, row in case.launch.items())
    return [(kernel, row, number) for (kernel, row), number in sorted(counts.items())]


@dataclass(frozen=True)
class Fact:
    """One fact about the machines: its value, by worker where they differ."""

    section: str
    name: str
    values: tuple[str, ...]

    @property
    def drifts(self) -> bool:
        """Whether the workers do not agree."""
        return len(set(self.values)) > 1


PER_DEVICE = frozenset({"uuid", "index", "pci", "serial", "CUDA_VISIBLE_DEVICES"})
"""Facts that tell devices apart; they differ by nature and are no drift."""


def facts(environments: Sequence[Environment]) -> list[Fact]:
    """Every fact of every section with its value in each environment; `–` where one lacks it."""
    flat = [dict(_flatten(e)) for e in environments]
    names = {key: None for environment in flat for key in environment}
    return [Fact(section, name, tuple(f.get((section, name), "–") for f in flat)) for section, name in names]


def _flatten(environment: Environment) -> Iterator[tuple[tuple[str, str], str]]:
    for section in ("gpu", "software", "switches", "variables", "system"):
        for name, value in getattr(environment, section).items():
            if section == "software":
                yield (section, name), value.version or f"absent: {value.reason or 'not installed'}"
            else:
                yield (section, name), str(value)


READINGS = frozenset({"sm_clock_mhz", "memory_clock_mhz", "temperature_c"})
"""Facts that were true for a moment; they are shown and are no drift."""


def drift(environments: Sequence[Environment]) -> list[Fact]:
    """Facts on which the environments differ and should not."""
    return [f for f in facts(environments) if f.drifts and f.name not in PER_DEVICE | READINGS]


@dataclass(frozen=True)
class CoverRow:
    """The proofs of one check that say the same of several SMs."""

    check: str
    sms: tuple[str, ...]
    proof: Cover


def cover_rows(covers: Iterable[Cover]) -> list[CoverRow]:
    """Proofs of cover, those that differ in their SM alone in one row."""
    grouped: dict[tuple[object, ...], list[Cover]] = defaultdict(list)
    for c in covers:
        grouped[c.check or c.scope, c.axes, c.strength, c.covered, c.possible].append(c)
    return [
        CoverRow(found[0].check or found[0].scope, tuple(c.sm for c in found), found[0])
        for found in grouped.values()
    ]
