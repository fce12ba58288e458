"""How much work a receipt asks of its verifier, told before it is done: a small file must not hang it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from math import comb

from qualify.exclusions import Place, places_of
from qualify.records import EXECUTED
from qualify.skips import KEPT
from reports.cover import REGIME, SM
from reports.model import Body

MAX_STEPS = 300_000_000
"""Of a kind, in loops that take a few of them in a microsecond; a run of 20,000 cases takes 40 million."""

MAX_AXES = 64
"""That tuples are counted over."""


def excessive(body: Body) -> Iterator[str]:
    """What asks for more work than a receipt can have cause for."""
    for what, steps in (
        ("proofs of cover", _cover(body)),
        ("wrong answers", _wrong_answers(body)),
        ("waivers", sum(1 + w.pattern.count("*") for w in body.waivers) * len(body.cases)),
        ("skips", _skips(body)),
    ):
        if steps > MAX_STEPS:
            yield f"its {what} ask for more than {MAX_STEPS:,} steps; this is no receipt of ours"


def _cover(body: Body) -> int:
    """Tuples, and tuples of cells, that counting the proofs again looks at."""
    checks = {check.name: {**check.axes, REGIME: check.regimes} for check in body.plan.checks}
    cells = Counter((case.check, case.levels.get(SM, "")) for case in body.cases)
    steps = len(body.plan.covers) * len(body.plan.constraints)
    for cover in body.plan.covers:
        axes = checks.get(cover.check, {})
        sizes = [len(axes[axis]) for axis in cover.axes if axis in axes]
        if len(sizes) > MAX_AXES:
            return MAX_STEPS + 1
        strength = max(0, min(cover.strength, len(sizes)))
        steps += comb(len(sizes), strength) * cells[cover.check, cover.sm] + _tuples(sizes, strength)
    return steps


def _tuples(sizes: Sequence[int], strength: int) -> int:
    """How many tuples of `strength` axes there are: the elementary symmetric polynomial of their sizes."""
    sums = [1] + [0] * strength
    for size in sizes:
        for i in range(strength, 0, -1):
            sums[i] += sums[i - 1] * size
    return sums[strength]


def _wrong_answers(body: Body) -> int:
    """Cases that are asked whether they rule a wrong answer out at a place."""
    executed = Counter(case.subject for case in body.cases if case.verdict in EXECUTED)
    places: dict[str, set[Place]] = {}
    for case in body.cases:
        if case.verdict in EXECUTED:
            places.setdefault(case.subject, set()).update(places_of(case.levels))
    asked = sum(len(places[subject]) * number for subject, number in executed.items())
    return len(body.subjects) * len(body.cases) + len(body.plan.wrong_answers) * asked


def _skips(body: Body) -> int:
    """Cases that are asked whether a rule can touch them."""
    rules = len({(case.subject, case.requirement) for case in body.cases if case.verdict in KEPT})
    return rules * len(body.cases) + len(body.plan.requirements) * len(body.plan.skip_budgets)
