"""The file of a receipt says nothing twice, and unpacks to what was packed."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pandas
import pytest

from qualify.canonical import canonical_bytes
from qualify.case import Case, case_of_id
from qualify.packing import command_of, packed, unpacked
from qualify.progress import explanation
from reports.model import from_json, seal
from suites.selfcheck.reports import synthetic

DOCUMENT = Path(__file__).parents[3] / "docs" / "receipts.md"
OVERHEAD = 60
"""Bytes that a case without a result may take beside its id."""


def size(value: object) -> int:
    return len(canonical_bytes(value))


def test_unpacked_is_what_was_packed() -> None:
    rows = synthetic.records(60, failures=3, metrics=synthetic.METRICS)
    read = from_json(seal(synthetic.body_of(rows))).body.cases
    assert read == tuple(rows)


def test_a_written_case_is_explained_with_its_margins(failing_body: dict[str, Any]) -> None:
    failed = [c for c in failing_body["cases"] if c["verdict"].startswith("failed")]
    case = next(c for c in failed if c["check"].startswith("op"))
    told = "\n".join(explanation(case))
    assert re.search(r"FAILS: rel_l2 .*, margin 3\.7", told)
    assert "budget from: 1.5 x the largest of 8 independent runs" in told


def test_packing_again_changes_nothing(failing: dict[str, Any]) -> None:
    once = json.loads(canonical_bytes(failing["body"]))
    assert canonical_bytes(packed(unpacked(once))) == canonical_bytes(once)


def test_a_case_without_a_result_costs_little_more_than_its_id(sound: dict[str, Any]) -> None:
    idle = [case for case in sound["body"]["cases"] if case["verdict"] == "skipped"]
    assert idle
    assert all(size(case) <= len(case["case_id"]) + OVERHEAD for case in idle)


def test_what_follows_from_an_id_is_not_written(sound: dict[str, Any]) -> None:
    derived = {"check", "subject", "levels", "regime", "seed", "command", "margin", "passed", "derivation"}
    for case in sound["body"]["cases"]:
        assert not derived & set(case)
        assert not any(derived & set(comparison) for comparison in case.get("comparisons", ()))


def test_a_case_that_contradicts_its_id_is_not_packed(sound_body: dict[str, Any]) -> None:
    for name, value in {"regime": "another", "seed": 7, "levels": {}, "command": "rm", "note": "x"}.items():
        body = copy.deepcopy(sound_body)
        body["cases"][0][name] = value
        with pytest.raises(ValueError, match="must be"):
            packed(body)


def test_a_subject_given_by_its_file_is_in_the_command_and_quoted(sound_body: dict[str, Any]) -> None:
    given = "my subjects/it's.py"
    subject = {**sound_body["subjects"][0], "given": given}
    cases = [
        {**c, "command": command_of(c["case_id"], c["subject"], given if c["subject"] == "kernels" else "")}
        for c in sound_body["cases"]
    ]
    read = from_json(seal({**sound_body, "subjects": [subject], "cases": cases})).body.cases
    assert read[0].command.endswith(""" --subject 'my subjects/it'"'"'s.py'""")
    assert "--subject" not in next(c.command for c in read if c.subject == "controls")


@pytest.mark.parametrize(
    "case",
    [
        Case("op.whole", {"sm": "sm90", "heads": "4x2"}, "weak", -3, "kernels"),
        Case("op.whole", {}, "weak", 0, "a.b"),
        Case("c", {"a": "b:c"}, "r", 1, "s"),
    ],
)
def test_an_id_names_its_case(case: Case) -> None:
    assert case_of_id(case.case_id) == case


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a/b",
        "a/b[]c",
        "a/b[x]c#0",
        "a/b[x:1,x:1]c#0",
        "a/b[]c#-0",
        "a/b[]c#1e3",
        "a/b[]c#٣",
        "a/b[]c#0\n",
    ],
)
def test_a_text_that_is_no_id_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="a case id must be"):
        case_of_id(text)


def test_the_documented_ways_of_reading_work(
    sound: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each snippet of the documentation ends in a frame with one row a case and its levels as columns."""
    monkeypatch.chdir(synthetic.write(tmp_path / "receipt.json", sound).parent)
    snippets = re.findall(r"((?:^    .*\n)+)", DOCUMENT.read_text(), re.MULTILINE)
    shown = [re.sub("^    ", "", text, flags=re.MULTILINE) for text in snippets if "frame = " in text]
    assert len(shown) == 2
    for text in shown:
        found: dict[str, Any] = {}
        exec(text, found)
        frame = found["frame"]
        assert isinstance(frame, pandas.DataFrame)
        assert len(frame) == len(sound["body"]["cases"])
        column = "dtype" if "dtype" in frame else "levels.dtype"
        assert set(frame[column].dropna()) == {"bf16", "fp16", "fp32"}
