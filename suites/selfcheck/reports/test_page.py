"""The page and the other forms: complete, self-contained, and safe whatever the receipt says."""

from __future__ import annotations

import json
import re
import time
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from qualify.records import EXECUTED, FAILURES, Comparison, Verdict
from qualify.verdicts import LACKS
from reports import exports, figures, page, text
from reports.model import Receipt, from_json, seal
from suites.selfcheck.reports import hostile, synthetic


class Outline(HTMLParser):
    """Elements, attributes and visible text of a page."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.feed(source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text.append(data)

    def count(self, tag: str) -> int:
        return sum(t == tag for t, _ in self.elements)


@pytest.fixture(scope="module")
def failing_page(failing_receipt: Receipt) -> str:
    return page.render(failing_receipt)


@pytest.fixture(scope="module")
def hostile_receipt() -> Receipt:
    return from_json(hostile.receipt())


ANSWERS = (
    "Not qualified",
    "kernels 0.1.0",
    "NVIDIA H200",
    "driver 570.124.06",
    "torch 2.11.0+cu130",
    "3 cases of",
    "planted faults caught",
    "missed: dg of the last",
    "wrong answers ruled out",
    "No earlier receipt was named",
    "sm 10",
)
ATTRIBUTES = """
class id href lang charset name content http-equiv scope aria-label role aria-labelledby aria-hidden tabindex
hidden type viewbox preserveaspectratio x y width height d r cx cy text-anchor data-check data-subject
"""


def test_the_first_screen_answers_the_first_questions(failing_page: str) -> None:
    first = " ".join(Outline(failing_page.partition('<div class="sheet">')[0]).text)
    for answer in ANSWERS:
        assert answer in re.sub(r"\s+", " ", first), answer


def test_every_failure_has_its_cause_and_a_command_that_repeats_it(
    failing_page: str, failing_receipt: Receipt
) -> None:
    shown = " ".join(Outline(failing_page).text)
    for case in failing_receipt.body.cases:
        if case.verdict in FAILURES and case.check != synthetic.CONTROL_CHECK:
            assert case.command in shown
    assert "looks like “state_off”" in shown


def test_without_scripts_every_case_is_on_the_page(failing_page: str, failing_receipt: Receipt) -> None:
    registers = re.findall(r'<pre class="register"[^>]*>(.*?)</pre>', failing_page, re.DOTALL)
    lines = [line for block in registers for line in block.splitlines()[1:] if line]
    assert len(lines) == len(failing_receipt.body.cases)


def test_the_page_asks_nothing_of_the_network(failing_page: str) -> None:
    outline = Outline(failing_page)
    for tag, attributes in outline.elements:
        assert tag not in {
            "link",
            "img",
            "iframe",
            "object",
            "embed",
            "base",
            "form",
            "video",
            "audio",
            "source",
        }
        for name in ("src", "href", "action", "xlink:href", "data"):
            value = attributes.get(name)
            assert value is None or value.startswith("#"), (tag, name, value)
    assert not re.search(r"url\(|@import|https?://", failing_page)


def test_the_policy_of_the_page_lets_its_own_script_run_and_no_other(failing_page: str) -> None:
    scripts = re.findall(r"<script>(.*?)</script>", failing_page, re.DOTALL)
    assert len(scripts) == 1
    policy = next(
        a["content"] for t, a in Outline(failing_page).elements if t == "meta" and "http-equiv" in a
    )
    assert policy is not None
    assert policy.startswith("default-src 'none'")
    assert page.script_hash(scripts[0]) in policy


def test_hostile_text_never_becomes_an_element(hostile_receipt: Receipt) -> None:
    """The elements of the hostile page are those of the templates, each attribute known."""
    made = page.render(hostile_receipt, "<script>window.owned=1</script>")
    outline = Outline(made)
    assert outline.count("script") == 2
    assert outline.count("style") == 1
    assert outline.count("img") == 0
    assert {name for _, attributes in outline.elements for name in attributes} <= set(ATTRIBUTES.split())
    block = re.search(r'<script type="application/json" id="figures">(.*?)</script>', made, re.DOTALL)
    assert block is not None
    assert "<" not in block[1]
    json.loads(block[1])


def test_hostile_text_breaks_no_other_form(hostile_receipt: Receipt) -> None:
    tree = ElementTree.fromstring(exports.junit(hostile_receipt))
    assert len(tree.findall(".//testcase")) == len(hostile_receipt.body.cases)
    tests = json.loads(exports.ctrf(hostile_receipt))["results"]["tests"]
    assert len(tests) == len(hostile_receipt.body.cases)
    summary = exports.markdown(hostile_receipt)
    outside = re.sub(r"^(`{3,})\n.*?\n\1$", "", summary, flags=re.DOTALL | re.MULTILINE)
    assert "<" not in outside.replace("&lt;", "")
    assert not re.search(r"(?<!\\)[\[\]@]|(?<!\\)!\[", outside)
    assert all(c.isprintable() or c == "\n" for c in summary)


def test_extreme_numbers_are_shown_and_break_nothing() -> None:
    body = synthetic.body(30, failures=3)
    failing = [c for c in body["cases"] if c["verdict"].startswith("failed")]
    for case, error in zip(failing, ("NaN", "Infinity", 1.7e308), strict=True):
        case["comparisons"][0]["error"] = error
        case["comparisons"][0]["statistics"] = {
            "max_abs": "NaN",
            "grid_steps_max": "Infinity",
            "codes_apart_0": "NaN",
            "ulps_max": 1e300,
        }
        case["comparisons"][0]["nonfinite"] = {"nan": 10**15}
    body["header"]["duration_s"] = 1e300
    body["header"]["time"] = "not a time"
    receipt = from_json(seal(body))
    made = page.render(receipt)
    assert "NaN" in made
    for write in (exports.junit, exports.ctrf, exports.markdown):
        assert write(receipt)


def test_a_thousand_causes_and_failures_stay_a_page() -> None:
    rows = [
        synthetic.broken(r, looks_like=f"fault_{i}") if r.comparisons else r
        for i, r in enumerate(synthetic.records(1500))
    ]
    receipt = from_json(seal(synthetic.body_of(rows)))
    start = time.process_time()
    made = page.render(receipt)
    assert time.process_time() - start < 8
    assert len(made.encode()) < 6e6


def test_the_counts_of_every_form_agree(failing_receipt: Receipt) -> None:
    cases = failing_receipt.body.cases
    failed = sum(c.verdict in FAILURES for c in cases)
    junit = ElementTree.fromstring(exports.junit(failing_receipt))
    assert int(junit.attrib["failures"]) + int(junit.attrib["errors"]) == failed
    summary = json.loads(exports.ctrf(failing_receipt))["results"]["summary"]
    assert summary["failed"] == failed
    assert sum(summary[s] for s in ("passed", "failed", "skipped", "pending", "other")) == len(cases)
    judged = figures.judged(failing_receipt.body.plan, cases)
    executed = sum(c.verdict in EXECUTED for c in judged)
    assert f"| {len(judged):,} | {executed:,} | 3 |" in exports.markdown(failing_receipt)


def test_the_map_counts_every_case_along_any_axes(failing_receipt: Receipt) -> None:
    body = failing_receipt.body
    for row in ("check", "regime", "dtype", "sm"):
        for column in ("heads", "verdict", "subject"):
            cells = figures.heat_map(body.cases, row, column, body.plan).cells
            assert sum(tally.planned for tally in cells.values()) == len(body.cases)


def test_grid_steps_are_counted_over_all_cases(failing_receipt: Receipt, failing_page: str) -> None:
    rows = figures.step_rows(failing_receipt.body.cases)
    told = [
        c for case in failing_receipt.body.cases for c in case.comparisons if "codes_apart_0" in c.statistics
    ]
    assert sum(row.cases for row in rows) == len(told) > 0
    for apart in ("0", "1", "2", "more"):
        counted = sum(c.statistics.get(f"codes_apart_{apart}", 0.0) for c in told)
        assert sum(row.elements[apart] for row in rows) == counted
    assert f"{rows[0].elements['0']:,.0f}" in failing_page


def test_what_is_read_at_a_moment_is_no_drift() -> None:
    first, second = synthetic.environment(), synthetic.environment("gw1")
    for name, value in {"temperature_c": "34", "sm_clock_mhz": "345", "uuid": "GPU-0"}.items():
        second["gpu"][name] = value
    body = {**synthetic.body(12), "environments": [first, second]}
    assert figures.drift(from_json(seal(body)).body.environments) == []
    second["gpu"]["driver"] = "1"
    assert [f.name for f in figures.drift(from_json(seal(body)).body.environments)] == ["driver"]


def test_a_proof_that_says_the_same_of_several_machines_is_one_row(failing_receipt: Receipt) -> None:
    covers = failing_receipt.body.plan.covers
    rows = figures.cover_rows(covers)
    assert len(rows) <= len(covers)
    assert sorted((row.check, sm) for row in rows for sm in row.sms) == sorted(
        (c.check, c.sm) for c in covers
    )


def test_many_names_that_held_are_counted() -> None:
    rows = synthetic.records(1)
    many = [Comparison(f"name_{i}", "property", "violations", 0, 0, "none") for i in range(40)]
    record = replace(next(r for r in synthetic.records(40) if r.comparisons), comparisons=tuple(many))
    assert "and 24 more" in page.render(from_json(seal(synthetic.body_of([*rows, record]))))


def test_what_the_subject_does_not_offer_is_told_apart_from_what_must_run() -> None:
    rows = synthetic.records(60)
    lacking = [
        replace(r, verdict=Verdict.UNSUPPORTED, reason="not offered", requirement=LACKS, comparisons=())
        if r.check.startswith("op") and r.verdict is Verdict.PASSED
        else r
        for r in rows
    ]
    number = sum(r.requirement == LACKS for r in lacking)
    told = page.sentence(lacking)
    assert f"{number} cases ask for what the subject does not offer" in told
    assert "that must run did not" not in told
    shown = page.render(from_json(seal(synthetic.body_of(lacking))))
    assert "not offered by the subject" in shown
    assert "offers chunk_gated_delta_rule" in shown


def test_a_level_that_was_never_executed_stands_out(failing_receipt: Receipt, failing_page: str) -> None:
    body = failing_receipt.body
    missing = figures.never_executed(body.plan, body.cases)
    assert ("sm", "sm100") in {(axis, level) for axis, level, _ in missing}
    assert "sm100 (not executed)" in failing_page


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (0.00342, "3.42e-3"),
        (0.0, "0"),
        (12.0, "12"),
        (123456.0, "123,456"),
        (0.5, "0.5"),
        (float("inf"), "∞"),
    ],
)
def test_numbers_are_told_with_three_digits(value: float, told: str) -> None:
    assert text.figure(value) == told


def test_what_a_subject_is_made_of_is_on_the_page(failing_receipt: Receipt) -> None:
    subject = failing_receipt.body.subjects[0]
    told = dict(page.subject_facts(subject))
    assert (told["deterministic"], told["arithmetic"]) == ("yes", "bf16: bf16, fp16: fp16, fp32: tf32")
    assert "kernels" not in told
    other = dict(page.subject_facts(replace(subject, interpreted=True, deterministic=False)))
    assert other["kernels"].startswith("in Triton")
    assert other["deterministic"] == "declares that it is not"


def test_a_failing_margin_never_reads_as_one() -> None:
    assert text.margin(1.0001) == "1.01"
    assert text.margin(1.0) == "1.00"
    assert text.margin(0.0001) == "0.01"
