"""Waivers: they excuse a failure and nothing else, and are red when they are not needed."""

from __future__ import annotations

import time
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from qualify.errors import UsageError
from qualify.records import CaseRecord, Verdict
from qualify.toml_file import read_toml
from qualify.waivers import Waiver, apply_waivers, glob, satisfies, waivers_in
from suites.selfcheck.reports import synthetic

TODAY = date(2026, 11, 30)
TEXT = """
[[waiver]]
cases = "kernels/op.whole[*dtype:fp16*]*"
owner = "kim"
issue = "GQ-12"
reason = "the driver rounds twice"
expires = 2027-01-31
driver = ">=570,<580"
versions.triton = "3.6"
"""


def waiver(cases: str, **more: Any) -> Waiver:
    return Waiver(cases=cases, owner="kim", issue="GQ-12", reason="known", expires=date(2027, 1, 31), **more)


def applied(
    *waivers: Waiver, failures: int = 2, today: date = TODAY, **more: Any
) -> tuple[list[CaseRecord], Any]:
    rows = synthetic.records(40, failures=failures)
    environments = [synthetic.environment()]
    return apply_waivers(waivers, rows, environments, profile="h100", today=today, **more)


def failing_id(index: int = 0) -> str:
    rows = synthetic.records(40, failures=2)
    return [r.case_id for r in rows if r.verdict is Verdict.FAILED_NUMERIC][index]


def test_a_failing_case_is_waived_and_keeps_its_evidence() -> None:
    rows, (result,) = applied(waiver(failing_id()))
    (case,) = [r for r in rows if r.verdict is Verdict.WAIVED]
    assert result.state == "used"
    assert result.cases == (case.case_id,)
    assert case.comparisons
    assert case.reason.startswith("waived by kim (GQ-12): failed_numeric: ")


def test_a_passing_case_makes_the_waiver_stale() -> None:
    passing = next(r.case_id for r in synthetic.records(40) if r.verdict is Verdict.PASSED)
    rows, (result,) = applied(waiver(passing), failures=0)
    assert result.state == "stale"
    assert [r.verdict for r in rows if r.case_id == passing] == [Verdict.STALE_WAIVER]


def test_a_waiver_that_matches_nothing_executed_is_unused() -> None:
    rows, results = applied(waiver("kernels/nothing*"), waiver("*sm:sm100*"))
    assert [r.state for r in results] == ["unused", "unused"]
    assert not any(r.verdict is Verdict.WAIVED for r in rows)


def test_an_expired_waiver_excuses_nothing() -> None:
    last, after = date(2027, 1, 31), date(2027, 2, 1)
    assert [applied(waiver(failing_id()), today=day)[1][0].state for day in (last, after)] == [
        "used",
        "expired",
    ]
    rows, _ = applied(waiver(failing_id()), today=after)
    assert not any(r.verdict is Verdict.WAIVED for r in rows)


@pytest.mark.parametrize(
    ("scope", "state"),
    [
        ({"sm": "9.0"}, "used"),
        ({"sm": "8.9"}, "unused"),
        ({"driver": ">=570,<580"}, "used"),
        ({"driver": "<570"}, "unused"),
        ({"versions": {"triton": "3.6"}}, "used"),
        ({"versions": {"triton": ">3.6"}}, "unused"),
        ({"versions": {"fla": "0.5"}}, "unused"),
        ({"verdicts": (Verdict.FAILED_NUMERIC,)}, "used"),
        ({"verdicts": (Verdict.CRASH,)}, "unused"),
    ],
)
def test_a_waiver_holds_where_its_scope_says(scope: dict[str, Any], state: str) -> None:
    assert applied(waiver(failing_id(), **scope))[1][0].state == state


def test_a_waiver_of_another_profile_is_not_looked_at() -> None:
    assert applied(waiver(failing_id(), profile="b200"))[1] == []


def test_no_waiver_reaches_a_planted_fault() -> None:
    missed = synthetic.control("ties rounded away", caught=False)
    rows, (result,) = apply_waivers(
        [waiver("controls/*")],
        [missed],
        [synthetic.environment()],
        profile="h100",
        today=TODAY,
        control_checks=frozenset({synthetic.CONTROL_CHECK}),
    )
    assert rows == [missed]
    assert result.state == "unused"


def test_a_file_is_read_as_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "waivers.toml"
    path.write_text(TEXT)
    (found,) = waivers_in(read_toml(path), TODAY)
    assert found.expires == date(2027, 1, 31)
    assert found.scope() == {"driver": ">=570,<580", "triton": "3.6"}


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (("owner =", "# owner ="), "owner"),
        (('issue = "GQ-12"', 'issue = " "'), "issue"),
        (("expires = 2027-01-31", ""), "expires"),
        (("2027-01-31", "2028-01-31"), "within 366 days"),
        (("2027-01-31", '"soon"'), "expires"),
        (('"kernels/op.whole[*dtype:fp16*]*"', '"**"'), "narrow"),
        ((">=570,<580", "new enough"), "driver must read like"),
        (("reason =", 'excuse = "x"\nreason ='), "excuse"),
        (("[[waiver]]", "[waiver]"), "waiver"),
        (("owner =", "owner"), "TOML"),
        (('driver = ">=570,<580"', 'driver = ""'), "driver"),
        (('driver = ">=570,<580"', 'driver = "\\u0663"'), "driver"),
        (('driver = ">=570,<580"', "verdicts = []"), "verdicts"),
        (('driver = ">=570,<580"', 'profile = " "'), "profile"),
        (("versions.triton", "versions.sm"), "table of software"),
        (('versions.triton = "3.6"', "versions = {}"), "table of software"),
        (("2027-01-31", '"20270131"'), "expires"),
        (("2027-01-31", "2027-01-31T00:00:00Z"), "expires"),
    ],
)
def test_a_waiver_that_says_too_little_or_too_much_is_refused(
    tmp_path: Path, change: tuple[str, str], rule: str
) -> None:
    path = tmp_path / "waivers.toml"
    path.write_text(TEXT.replace(*change))
    with pytest.raises(UsageError, match=rule):
        waivers_in(read_toml(path), TODAY)


@pytest.mark.parametrize(
    ("pattern", "text", "matches"),
    [
        ("a*c", "abbc", True),
        ("a*c", "abbd", False),
        ("a?c", "abc", True),
        ("a?c", "ac", False),
        ("*b*b*", "bb", True),
        ("*b*b", "b", False),
        ("a[b]c", "a[b]c", True),
        ("ab", "abc", False),
        ("*", "", True),
        ("a*a", "a", False),
    ],
)
def test_a_pattern_matches_the_whole_id(pattern: str, text: str, matches: bool) -> None:
    assert glob(pattern, text) is matches


def test_a_pattern_of_many_stars_does_not_hang() -> None:
    start = time.process_time()
    assert not glob("*a" * 400 + "b", "a" * 20_000)
    assert time.process_time() - start < 1


@pytest.mark.parametrize(
    ("seen", "spec", "holds"),
    [
        ("570.124.06", ">=570,<580", True),
        ("2.11.0+cu130", "==2.11", True),
        ("2.11.0", "2.1", False),
        ("9.0", "9", True),
        ("", ">=1", False),
        ("unknown", "!=1", False),
        ("3.6.0", "<=3.6", True),
    ],
)
def test_versions_are_compared_as_numbers(seen: str, spec: str, holds: bool) -> None:
    assert satisfies(seen, spec) is holds
