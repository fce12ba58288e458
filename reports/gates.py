"""A release policy applied to a receipt: rules as data, each with the value that it saw and its result.

A policy is a TOML file. What it does not name it does not ask, but for the verdict: a policy that names no
verdict asks for a qualified one.

    verdict = ["QUALIFIED", "QUALIFIED_WITH_WAIVERS"]
    max_margin = 0.95
    max_waivers = 2
    max_drift = 0
    subject_clean = true
    waivers_valid = true
    no_loosening = true            # against --baseline, like the next three
    no_growth = true
    no_loss = true
    no_worse = true
    max_skipped_share = 0.6
    [max_skipped.sm]               # axis, then level = most cases that may go without an execution
    sm100 = 300
    [min_executed.dtype]           # axis, then level = fewest cases that must be executed
    bf16 = 100
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import date
from typing import Any

from qualify.canonical import MAX_EXACT_INTEGER
from qualify.errors import UsageError
from qualify.records import EXECUTED, CaseRecord, Overall, Verdict
from qualify.toml_file import TomlFile, shown
from reports import figures, text
from reports.model import Body, ComparisonWithBaseline, Gate
from reports.reading import ReceiptError, short

LOOSENING = ("budget loosened", "comparison vanished", "skip budget")
GROWTH = ("error grew", "errors grew")
LOSS = ("case vanished", "case verdict", "control", "wrong answer")


@dataclass(frozen=True)
class Scene:
    """What rules look at.

    Attributes:
        body: the receipt's body.
        overall: the verdict that follows from its cases and waivers, whatever earlier gates said.
        comparison: what moved since the baseline, if one was named.
        today: the day that waivers must be valid on.
    """

    body: Body
    overall: Overall
    comparison: ComparisonWithBaseline | None
    today: date

    @property
    def judged(self) -> list[CaseRecord]:
        """The cases that judge the subject."""
        return figures.judged(self.body.plan, self.body.cases)


Rule = Callable[[Any, Scene], Iterator[Gate]]


def apply_policy(policy: Mapping[str, Any], scene: Scene) -> list[Gate]:
    """The result of every rule of a policy, in the order of `RULES`.

    Raises:
        ReceiptError: a rule compares with a baseline and there is none.
    """
    return [gate for name, rule in RULES.items() if name in policy for gate in rule(policy[name], scene)]


def rules_in(file: TomlFile) -> dict[str, Any]:
    """The rules of a policy file, see `policy.schema.json`.

    Raises:
        UsageError: an unknown rule, a wrong argument, or no rule at all.
    """
    checked(file.document, file.where)
    return {"verdict": [str(Overall.QUALIFIED), str(Overall.QUALIFIED_WITH_WAIVERS)], **file.document}


def checked(rules: Mapping[str, Any], where: str) -> None:
    """Refuses what is no policy.

    Raises:
        UsageError: as `rules_in`.
    """
    if not rules:
        raise UsageError(f"{where} must hold a rule, got none; a policy without rules gates nothing")
    for name, argument in rules.items():
        if name not in RULES:
            raise UsageError(f"{where}: rules are {', '.join(RULES)}, got {shown(name)!r}; mend it")
        wanted = ARGUMENTS[name]
        if not wanted.holds(argument):
            raise UsageError(f"{where}: {name} must be {wanted.rule}, got {shown(argument)}; mend it")


@dataclass(frozen=True)
class Argument:
    """What a rule takes."""

    rule: str
    holds: Callable[[Any], bool]


def _is_count(value: Any) -> bool:
    whole = type(value) is int or (type(value) is float and value.is_integer())
    return whole and 0 <= value <= MAX_EXACT_INTEGER


def _is_levels(value: Any) -> bool:
    return _is_table(value) and all(
        _is_table(levels) and all(_is_count(n) for n in levels.values()) for levels in value.values()
    )


def _is_table(value: Any) -> bool:
    return isinstance(value, dict) and bool(value)


VERDICTS = Argument(
    f"a list of {', '.join(Overall)}",
    lambda v: isinstance(v, list) and bool(v) and all(isinstance(x, str) and x in set(Overall) for x in v),
)
NUMBER = Argument("a number from 0 to 1", lambda v: type(v) in (int, float) and 0 <= v <= 1)
COUNT = Argument("a count", _is_count)
ASKED = Argument("true", lambda v: v is True)
LEVELS = Argument("tables axis.level = count", _is_levels)


def _verdict(allowed: Any, scene: Scene) -> Iterator[Gate]:
    yield Gate("verdict", str(scene.overall), " or ".join(map(str, allowed)), scene.overall in set(allowed))


def _max_margin(limit: Any, scene: Scene) -> Iterator[Gate]:
    tight = figures.tightest((c for c in scene.judged if c.verdict is Verdict.PASSED), 1)
    worst = tight[0].comparison.margin if tight else 0.0
    where = (
        f"{tight[0].comparison.tensor} {tight[0].comparison.metric} of {tight[0].case.case_id}"
        if tight
        else ""
    )
    yield Gate("max_margin", text.margin(worst), text.figure(float(limit)), worst <= limit, where)


def _max_waivers(limit: Any, scene: Scene) -> Iterator[Gate]:
    waived = sum(case.verdict is Verdict.WAIVED for case in scene.judged)
    yield Gate("max_waivers", text.plural(waived, "waived case"), text.count(int(limit)), waived <= limit)


def _max_drift(limit: Any, scene: Scene) -> Iterator[Gate]:
    drift = figures.drift(scene.body.environments)
    names = ", ".join(fact.name for fact in drift[:6])
    yield Gate(
        "max_drift", text.plural(len(drift), "fact"), text.count(int(limit)), len(drift) <= limit, names
    )


def _subject_clean(_: Any, scene: Scene) -> Iterator[Gate]:
    dirty = [s.name for s in scene.body.subjects if s.dirty or not s.commit]
    found = ", ".join(dirty) or "committed"
    yield Gate(
        "subject_clean", found, "committed", not dirty, "uncommitted or unknown state" if dirty else ""
    )


def _waivers_valid(_: Any, scene: Scene) -> Iterator[Gate]:
    bad = [
        f"{w.pattern} {'expired ' + w.expires if w.state == 'used' else w.state}"
        for w in scene.body.waivers
        if w.state != "used" or not _valid(w.expires, scene.today)
    ]
    yield Gate("waivers_valid", text.plural(len(bad), "bad waiver"), "0", not bad, short("; ".join(bad)))


def _valid(expires: str, today: date) -> bool:
    try:
        return date.fromisoformat(expires) >= today
    except ValueError:
        return False


def _against_baseline(name: str, kinds: tuple[str, ...] | None) -> Rule:
    def rule(_: Any, scene: Scene) -> Iterator[Gate]:
        if scene.comparison is None:
            raise ReceiptError(
                f"rule {name} compares with an earlier receipt, got none; name one with --baseline"
            )
        bad = [m for m in scene.comparison.moved if m.worse and (kinds is None or m.kind in kinds)]
        first = f"{bad[0].kind}: {bad[0].what}" if bad else ""
        yield Gate(name, text.plural(len(bad), "change"), "0", not bad, short(first, 300))

    return rule


def _max_skipped_share(limit: Any, scene: Scene) -> Iterator[Gate]:
    cases = scene.judged
    idle = sum(case.verdict not in EXECUTED for case in cases)
    share = idle / len(cases) if cases else 1.0
    value = f"{share:.3f} ({idle:,} of {len(cases):,})"
    yield Gate("max_skipped_share", value, text.figure(float(limit)), share <= limit)


def _by_level(name: str, executed: bool) -> Rule:
    def rule(axes: Any, scene: Scene) -> Iterator[Gate]:
        planned = Counter(place for case in scene.judged for place in figures.places(case))
        found = Counter(
            place
            for case in scene.judged
            if (case.verdict in EXECUTED) is executed
            for place in figures.places(case)
        )
        for axis, levels in sorted(axes.items()):
            for level, limit in sorted(levels.items()):
                number = found[axis, level]
                enough = number >= limit if executed else number <= limit
                because = "" if planned[axis, level] else "no planned case is on this level"
                passed = enough and not because
                yield Gate(
                    f"{name} {axis}:{level}", text.count(number), text.count(int(limit)), passed, because
                )

    return rule


RULES: Mapping[str, Rule] = {
    "verdict": _verdict,
    "max_margin": _max_margin,
    "max_waivers": _max_waivers,
    "max_drift": _max_drift,
    "subject_clean": _subject_clean,
    "waivers_valid": _waivers_valid,
    "no_loosening": _against_baseline("no_loosening", LOOSENING),
    "no_growth": _against_baseline("no_growth", GROWTH),
    "no_loss": _against_baseline("no_loss", LOSS),
    "no_worse": _against_baseline("no_worse", None),
    "max_skipped_share": _max_skipped_share,
    "max_skipped": _by_level("max_skipped", executed=False),
    "min_executed": _by_level("min_executed", executed=True),
}
ARGUMENTS: Mapping[str, Argument] = {
    "verdict": VERDICTS,
    "max_margin": NUMBER,
    "max_waivers": COUNT,
    "max_drift": COUNT,
    "subject_clean": ASKED,
    "waivers_valid": ASKED,
    "no_loosening": ASKED,
    "no_growth": ASKED,
    "no_loss": ASKED,
    "no_worse": ASKED,
    "max_skipped_share": NUMBER,
    "max_skipped": LEVELS,
    "min_executed": LEVELS,
}
