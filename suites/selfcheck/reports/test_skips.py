"""Skips are budgeted: what a profile does not allow makes a run incomplete, and is told."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from qualify.axes import SkipBudget
from qualify.records import CaseRecord, Verdict
from qualify.skips import allowed, overrun, tallies
from qualify.verdicts import LACKS
from reports import page
from reports.model import from_json, seal
from reports.parts import rebuilt
from reports.verify import verify
from suites.selfcheck.reports import synthetic
from suites.tables import TABLES

BUDGETS = (
    SkipBudget("memory", 0.5, "some machines are small"),
    SkipBudget("refused", 0.25, "most must be tried"),
    SkipBudget("*", 0.0, "nothing else"),
)
WHEN = {"memory": {"dtype": ["fp32"]}}


def kept(records: list[CaseRecord], number: int, requirement: str, **levels: str) -> list[CaseRecord]:
    """The same records with some kept from running by a rule: those on the levels, up to a number."""
    made = []
    for record in records:
        if number and record.verdict is Verdict.PASSED and levels.items() <= record.levels.items():
            number -= 1
            record = replace(
                record,
                verdict=Verdict.UNSUPPORTED,
                reason="declined",
                requirement=requirement,
                comparisons=(),
            )
        made.append(record)
    assert number == 0
    return made


@pytest.fixture(scope="module")
def passed() -> list[CaseRecord]:
    return [r for r in synthetic.records(120) if r.verdict is Verdict.PASSED]


def test_a_share_is_one_of_the_cases_that_the_rule_can_touch(passed: list[CaseRecord]) -> None:
    touched = sum(r.levels["dtype"] == "fp32" for r in passed)
    (tally,) = tallies(kept(passed, 3, "memory", dtype="fp32"), BUDGETS, WHEN, "sm90")
    assert (tally.cases, tally.budget) == (3, touched // 2)


def test_what_a_subject_declines_is_held_against_the_cells_of_the_profile(passed: list[CaseRecord]) -> None:
    own = sum(r.levels["sm"] == "sm90" for r in passed)
    for number, over in ((own // 4, False), (own // 4 + 1, True)):
        found = tallies(kept(passed, number, "refused", sm="sm90"), BUDGETS, WHEN, "sm90")
        assert allowed(found) == {"refused": own // 4}
        assert bool(overrun(found)) is over


def test_each_subject_has_budgets_of_its_own(passed: list[CaseRecord]) -> None:
    """A second subject that declines nothing does not lend its share."""
    own = sum(r.levels["sm"] == "sm90" for r in passed)
    other = [replace(r, subject="other") for r in passed]
    found = tallies([*kept(passed, own // 2, "refused", sm="sm90"), *other], BUDGETS, WHEN, "sm90")
    assert [t.subject for t in found if t.over] == ["kernels"]


def test_a_rule_without_a_row_falls_under_the_last(passed: list[CaseRecord]) -> None:
    found = tallies(kept(passed, 1, "another"), BUDGETS, WHEN, "sm90")
    assert overrun(found) == ["1 case of kernels kept from running by 'another', 0 are allowed: nothing else"]
    assert overrun(tallies(kept(passed, 1, "another"), (), WHEN, "sm90")) == []


def test_skips_beyond_their_budget_make_the_run_incomplete_and_stand_out(tmp_path: Any) -> None:
    rows = synthetic.records(120)
    more = [replace(r, must_run=False) for r in kept(rows, 12, "refused", sm="sm90")]
    body = synthetic.body_of([*more, *(synthetic.control(fault, True) for fault in synthetic.CONTROLS)])
    assert body["header"]["verdict"] == "INCOMPLETE"
    assert any("12 cases of kernels kept from running by 'refused'" in r for r in body["header"]["reasons"])
    written = synthetic.write(tmp_path / "receipt.json", seal(body))
    assert [f.step for f in verify(written).findings if not f.passed] == []
    made = page.render(from_json(seal(body)))
    assert '<td class="n fail">2</td>' in made


def test_a_shard_is_not_held_to_the_budgets_of_the_whole(tmp_path: Any) -> None:
    """Budgets are counted again over what is merged; nothing is added up."""
    body = synthetic.body(60)
    half = rebuilt({**body, "cases": body["cases"][::2]})
    whole = {row["requirement"]: row["budget"] for row in body["skips"]}
    part = {row["requirement"]: row["budget"] for row in half["skips"]}
    assert 0 < part["sm 10"] < whole["sm 10"]


@pytest.mark.parametrize("profile", TABLES.profiles, ids=lambda p: p.name)
def test_every_rule_of_the_tables_has_a_budget_in_every_profile(profile: Any) -> None:
    named = {row.requirement: row for row in profile.skip_budgets}
    assert {requirement.name for requirement in TABLES.requirements} <= set(named)
    assert {LACKS, "capabilities", "refused", "*"} <= set(named)
    assert all(0 <= row.share <= 1 and row.because for row in profile.skip_budgets)
    assert named[f"on {profile.sm}"].share == 0
