"""What moved between two receipts: verdicts, errors, budgets, evidence, machines; each thing worse or not.

An error has grown when it grew by more than the noise between the two runs, which is measured on the runs
themselves: the spread (median absolute deviation, scaled to a standard deviation) of the logarithm of the
ratio, over all cases of one check and carrier that compare the same tensor in the same metric.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from statistics import median

from qualify.records import EXECUTED, FAILURES, CaseRecord, Comparison, Overall, Verdict
from reports import figures, text
from reports.model import Body, ComparisonWithBaseline, Moved, Receipt
from reports.reading import without_collector

GROWTH = math.log(1.25)
"""An error must at least have grown by a quarter."""

SPREADS = 5.0
"""And by this many standard deviations of the ratio between the runs."""

SHIFT = math.log(1.10)
"""All errors of a tensor together have grown when their median ratio is beyond a tenth."""

SHIFT_CASES = 8
LOOSER = 1.02
"""A budget has loosened when it is larger by more than two hundredths."""

BETTER_FIRST = (Overall.QUALIFIED, Overall.QUALIFIED_WITH_WAIVERS, Overall.INCOMPLETE, Overall.NOT_QUALIFIED)
MAX_ROWS = 2000

Key = tuple[str, str]
"""Tensor and metric."""

Family = tuple[str, str, str, str]
"""Check, carrier, tensor and metric: comparisons whose errors are alike."""


def compare(before: Receipt, after: Receipt) -> ComparisonWithBaseline:
    """Everything that moved from one receipt to the next, the worse things first."""
    with without_collector():
        moved = [*_moved(before.body, after.body)]
    moved.sort(key=lambda m: not m.worse)
    return ComparisonWithBaseline(before.id, before.body.header.time, tuple(moved[:MAX_ROWS]))


def _moved(before: Body, after: Body) -> Iterator[Moved]:
    old = {case.case_id: case for case in before.cases}
    new = {case.case_id: case for case in after.cases}
    both = [(old[case_id], new[case_id]) for case_id in old if case_id in new]
    yield from _overall(before, after)
    yield from _vanished(old, new)
    yield from _verdicts(both)
    yield from _comparisons(both)
    yield from _evidence(before, after)
    yield from _skip_budgets(before, after)
    yield from _waivers(before, after)
    yield from _policy(before, after)
    yield from _subjects(before, after)
    yield from _environments(before, after)
    yield from _launches(both)


def _overall(before: Body, after: Body) -> Iterator[Moved]:
    a, b = before.header.verdict, after.header.verdict
    if a is not b:
        worse = BETTER_FIRST.index(b) > BETTER_FIRST.index(a)
        yield Moved("verdict of the run", after.header.profile, str(a), str(b), worse)
    if before.plan.profile != after.plan.profile:
        yield Moved("profile", "of the plan", before.plan.profile, after.plan.profile, False)
    if before.plan.digest != after.plan.digest:
        yield Moved("plan", "digest", text.brief(before.plan.digest), text.brief(after.plan.digest), False)


def _vanished(old: Mapping[str, CaseRecord], new: Mapping[str, CaseRecord]) -> Iterator[Moved]:
    for case_id, case in old.items():
        if case_id not in new:
            yield Moved("case vanished", case_id, str(case.verdict), "not planned", case.verdict in EXECUTED)
    appeared = [case for case_id, case in new.items() if case_id not in old]
    if appeared:
        by_check: dict[str, int] = defaultdict(int)
        for case in appeared:
            by_check[case.check] += 1
        for check, number in by_check.items():
            yield Moved("cases appeared", check, "not planned", text.plural(number, "case"), False)


def _verdicts(both: Sequence[tuple[CaseRecord, CaseRecord]]) -> Iterator[Moved]:
    for a, b in both:
        if a.verdict is not b.verdict:
            failed = b.verdict in FAILURES and a.verdict not in FAILURES
            lost = a.verdict in EXECUTED and b.verdict not in EXECUTED
            excused = b.verdict is Verdict.WAIVED and a.verdict is Verdict.PASSED
            yield Moved("case verdict", a.case_id, str(a.verdict), str(b.verdict), failed or lost or excused)


def _comparisons(both: Sequence[tuple[CaseRecord, CaseRecord]]) -> Iterator[Moved]:
    """Errors that grew, budgets that loosened, comparisons that are no longer made."""
    grown: dict[Family, list[tuple[float, CaseRecord, Comparison, Comparison]]] = defaultdict(list)
    looser: dict[tuple[str, str, str], list[tuple[float, CaseRecord, Comparison, Comparison]]] = defaultdict(
        list
    )
    gone: dict[tuple[str, str, str], list[CaseRecord]] = defaultdict(list)
    for a, b in both:
        if not a.comparisons or not b.comparisons:
            continue
        kept = {_key(c): c for c in b.comparisons}
        for c in a.comparisons:
            d = kept.get(_key(c))
            if d is None:
                gone[a.check, c.tensor, c.metric].append(a)
                continue
            if c.error > 0 and d.error > 0 and math.isfinite(c.error) and math.isfinite(d.error):
                grown[b.check, b.levels.get("dtype", ""), *_key(c)].append(
                    (math.log(d.error / c.error), b, c, d)
                )
            if d.budget > c.budget * LOOSER:
                ratio = d.budget / c.budget if c.budget else math.inf
                looser[a.check, c.tensor, c.metric].append((ratio, b, c, d))
    yield from _grown(grown)
    for (check, tensor, metric), rows in looser.items():
        ratio, case, c, d = max(rows, key=lambda row: row[0])
        what = f"{check}: {tensor} {metric}, {text.plural(len(rows), 'case')}, most at {case.case_id}"
        yield Moved(
            "budget loosened", what, text.figure(c.budget), f"{text.figure(d.budget)} (x {ratio:.3g})", True
        )
    for (check, tensor, metric), cases in gone.items():
        what = f"{check}: {tensor} {metric}, {text.plural(len(cases), 'case')}, first {cases[0].case_id}"
        yield Moved("comparison vanished", what, "compared", "not compared", True)


def _key(comparison: Comparison) -> Key:
    return comparison.tensor, comparison.metric


def _grown(
    ratios: Mapping[Family, list[tuple[float, CaseRecord, Comparison, Comparison]]],
) -> Iterator[Moved]:
    for (check, dtype, tensor, metric), rows in ratios.items():
        middle = median(row[0] for row in rows)
        spread = 1.4826 * median(abs(row[0] - middle) for row in rows)
        if middle > SHIFT and len(rows) >= SHIFT_CASES:
            family = f"{tensor} {metric} of {check} {dtype}".strip()
            what = f"{family}, median of {text.plural(len(rows), 'case')}"
            yield Moved("errors grew", what, "1", f"x {math.exp(middle):.3g}", True)
        for ratio, case, c, d in rows:
            if ratio - max(middle, 0.0) > max(GROWTH, SPREADS * spread) and d.budget > 0:
                what = f"{tensor} {metric} of {case.case_id}"
                after = f"{text.figure(d.error)} (margin {text.margin(d.margin)})"
                yield Moved("error grew", what, text.figure(c.error), after, True)


def _evidence(before: Body, after: Body) -> Iterator[Moved]:
    """Planted faults that are no longer caught, wrong answers that are no longer ruled out."""
    caught = {(c.name, c.dtype): c.caught for c in after.controls}
    for control in before.controls:
        if control.caught and not caught.get((control.name, control.dtype), False):
            now = "missed" if (control.name, control.dtype) in caught else "not planted"
            yield Moved(
                "control", f"{control.fault or control.name} {control.dtype}".strip(), "caught", now, True
            )
    ruled = {(d.wrong_answer, d.subject, d.dtype, d.site, d.format): d.excluded for d in after.discrimination}
    for d in before.discrimination:
        place = (d.wrong_answer, d.subject, d.dtype, d.site, d.format)
        if d.excluded and not ruled.get(place, False):
            what = " ".join(filter(None, place))
            now = "not ruled out" if place in ruled else "not asked about"
            yield Moved("wrong answer", what, "ruled out", now, True)


def _skip_budgets(before: Body, after: Body) -> Iterator[Moved]:
    """Shares of cases that rules may keep from running, where they grew or vanished."""
    new = {row.requirement: row.share for row in after.plan.skip_budgets}
    for row in before.plan.skip_budgets:
        share = new.get(row.requirement)
        if share != row.share:
            now = "no budget" if share is None else text.figure(share)
            worse = share is None or share > row.share
            yield Moved("skip budget", row.requirement, text.figure(row.share), now, worse)


def _waivers(before: Body, after: Body) -> Iterator[Moved]:
    old, new = ({(w.pattern, w.issue): w for w in body.waivers} for body in (before, after))
    for key, waiver in new.items():
        if key not in old:
            yield Moved(
                "waiver", f"{waiver.pattern} ({waiver.issue})", "none", f"until {waiver.expires}", True
            )
        elif waiver.expires > old[key].expires:
            what = f"{waiver.pattern} ({waiver.issue})"
            yield Moved("waiver", what, f"until {old[key].expires}", f"until {waiver.expires}", True)


def _policy(before: Body, after: Body) -> Iterator[Moved]:
    a, b = before.policy, after.policy
    if a and b and a.digest != b.digest:
        yield Moved("policy", b.name, text.brief(a.digest), text.brief(b.digest), False)


def _subjects(before: Body, after: Body) -> Iterator[Moved]:
    old = {s.name: s for s in before.subjects}
    for s in after.subjects:
        a = old.get(s.name)
        for name in ("version", "commit", "backend", "diff_digest"):
            if a and getattr(a, name) != getattr(s, name):
                then, now = (text.brief(str(getattr(x, name))) or "–" for x in (a, s))
                yield Moved("subject", f"{s.name} {name.replace('_', ' ')}", then, now, False)


def _environments(before: Body, after: Body) -> Iterator[Moved]:
    old, new = ({(f.section, f.name): f for f in figures.facts(b.environments)} for b in (before, after))
    for key in dict.fromkeys((*old, *new)):
        then, now = (
            " | ".join(dict.fromkeys(side[key].values)) if key in side else "–" for side in (old, new)
        )
        if then != now and key[1] not in figures.PER_DEVICE:
            yield Moved("environment", f"{key[0]}: {key[1]}", then, now, False)


def _launches(both: Sequence[tuple[CaseRecord, CaseRecord]]) -> Iterator[Moved]:
    changed: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for a, b in both:
        for kernel in dict.fromkeys((*a.launch, *b.launch)):
            rows = a.launch.get(kernel, "–"), b.launch.get(kernel, "–")
            if rows[0] != rows[1] and a.launch and b.launch:
                changed[kernel, *rows].append(a.case_id)
    for (kernel, old, new), cases in changed.items():
        yield Moved(
            "launch", f"{kernel}, {text.plural(len(cases), 'case')}, first {cases[0]}", old, new, False
        )
