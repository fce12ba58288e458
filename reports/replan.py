"""The plan made again from tables at hand: what a receipt says of its own plan, it says of itself."""

from __future__ import annotations

from collections.abc import Iterator

from qualify.canonical import canonical_bytes
from qualify.plan import PlannedSubject
from qualify.planning import make_plan
from qualify.receipt import plan_part
from qualify.records import jsonable
from qualify.tables import Tables
from reports.model import Receipt


def differences(receipt: Receipt, tables: Tables) -> Iterator[str]:
    """What the recorded plan has other than the plan that these tables make for its profile and subjects.

    Raises:
        UsageError: the tables have no such profile, or make no plan for it.
    """
    plan = receipt.body.plan
    subjects = [PlannedSubject(s.name, s.origin, s.given, s.interpreted) for s in receipt.body.subjects]
    made = jsonable(plan_part(make_plan(tables, plan.profile, subjects, seed=plan.seed)))
    recorded = receipt.raw["plan"]
    for name in sorted({*made, *recorded}):
        if canonical_bytes(made.get(name)) != canonical_bytes(recorded.get(name)):
            yield f"the tables make another {name.replace('_', ' ')}"
