"""Damaged files are refused by their readers, and what still is a policy or a waiver is read as it says."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from qualify.canonical import digest_bytes
from qualify.errors import UsageError
from qualify.records import FAILURES, Overall, Verdict
from qualify.toml_file import MAX_BYTES, read_toml
from qualify.waivers import OPTIONS, RESERVED, TEXTS, waivers_in
from reports import gates
from reports.gates import rules_in
from reports.reading import ReceiptError, parse_json
from suites.selfcheck.reports import fuzz

DAMAGED, FEW = 300, 150
ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("name", ["receipts", "envelopes", "policies", "waivers"])
def test_damage_is_refused_and_all_else_is_read_as_it_says(name: str, tmp_path: Path) -> None:
    pytest.importorskip("securesystemslib", reason="the extra `sign` is not installed")
    (reader,) = (r for r in fuzz.readers(tmp_path) if r.name == name)
    tally = fuzz.fuzzed(reader, DAMAGED, tmp_path)
    assert tally.holds(reader), tally.wrong[:3]
    assert tally.refused == DAMAGED
    assert tally.slowest_s < 5


def lenient_json(path: Path) -> str:
    return str(parse_json(path.read_bytes(), path.name)["id"])


def lenient_toml(path: Path) -> Mapping[str, Any]:
    rules = read_toml(path).document
    return {**fuzz.ASKED_ANYWAY, **rules}


def forgetful_toml(path: Path) -> Mapping[str, Any]:
    """A reader that keeps to the usual whatever a valid file says."""
    rules = rules_in(read_toml(path))
    return fuzz.policy_says(fuzz.POLICY) or rules


@pytest.mark.parametrize(
    ("name", "read"),
    [("receipts", lenient_json), ("policies", lenient_toml), ("policies", forgetful_toml)],
)
def test_a_reader_that_is_too_lenient_is_noticed(name: str, read: Any, tmp_path: Path) -> None:
    pytest.importorskip("securesystemslib", reason="the extra `sign` is not installed")
    (reader,) = (r for r in fuzz.readers(tmp_path) if r.name == name)
    careless = replace(reader, read=read)
    assert not fuzz.fuzzed(careless, FEW, tmp_path).holds(careless)


def test_a_pin_that_lets_another_file_pass_is_noticed(tmp_path: Path) -> None:
    for reader in fuzz.toml_readers():
        careless = replace(reader, pinned=reader.read)
        assert not fuzz.fuzzed(careless, FEW, tmp_path).holds(careless)


POLICIES = {
    "max_margin = 1": True,
    "max_margin = 1.0": True,
    "max_margin = 1.01": False,
    "max_margin = -0.1": False,
    "max_margin = nan": False,
    "max_margin = true": False,
    'max_margin = "0.9"': False,
    "max_waivers = 3": True,
    "max_waivers = 3.0": True,
    "max_waivers = 3.5": False,
    "max_waivers = inf": False,
    "max_waivers = 9007199254740992": True,
    "max_waivers = 9007199254740993": False,
    "max_waivers = -1": False,
    "max_waivers = false": False,
    "max_drift = 0": True,
    "subject_clean = true": True,
    "subject_clean = false": False,
    "subject_clean = 1": False,
    "no_worse = true\nno_loss = true\nno_growth = true\nno_loosening = true": True,
    'verdict = ["INCOMPLETE"]': True,
    'verdict = ["QUALIFIED", "QUALIFIED"]': True,
    'verdict = "QUALIFIED"': False,
    "verdict = []": False,
    'verdict = ["qualified"]': False,
    "max_skipped.sm.sm100 = 3": True,
    "[max_skipped.sm]\nsm100 = 3\n[min_executed.dtype]\nbf16 = 2": True,
    "max_skipped.sm = 3": False,
    "max_skipped = {}": False,
    "max_skipped.sm = {}": False,
    "max_skipped.sm.sm100 = 2027-01-01": False,
    "max_skipped_share = 0.5": True,
    "waivers_valid = true": True,
    "waiver_valid = true": False,
    "": False,
}


@pytest.mark.parametrize("text", POLICIES)
def test_reader_and_schema_agree_on_a_policy(text: str, tmp_path: Path) -> None:
    path = tmp_path / "policy.toml"
    path.write_text(text)
    said = fuzz.policy_says(text.encode())
    assert (said is not None) is POLICIES[text]
    if POLICIES[text]:
        assert rules_in(read_toml(path)) == said
    else:
        with pytest.raises(UsageError):
            rules_in(read_toml(path))


WAIVER = """[[waiver]]
cases = "kernels/op*"
owner = "kim"
issue = "GQ-1"
reason = "known"
expires = 2027-01-31
"""
ENTRIES = {
    "": True,
    'profile = "h100"': True,
    'profile = ""': False,
    'sm = "9.0"': True,
    'sm = " >= 9 , < 10 "': True,
    'sm = "9."': False,
    'sm = "9.0\\n"': False,
    'sm = "~9"': False,
    "sm = 9.0": False,
    'driver = ">=570,<580"': True,
    'driver = ">=570,"': False,
    'driver = "\\u0663"': False,
    'driver = "1234567890"': False,
    'versions.triton = "3.6"': True,
    'versions."a b" = "3.6"': True,
    'versions.sm = "3.6"': False,
    "versions = {}": False,
    'versions = "3.6"': False,
    'verdicts = ["crash", "hang"]': True,
    'verdicts = ["passed"]': False,
    'verdicts = ["stale_waiver"]': False,
    "verdicts = []": False,
    'note = "more"': False,
    '[[waiver]]\ncases = "x"': False,
    "[extra]": False,
}


@pytest.mark.parametrize("text", ENTRIES)
def test_reader_and_schema_agree_on_a_waiver(text: str, tmp_path: Path) -> None:
    agree(WAIVER + text, ENTRIES[text], tmp_path)


CHANGES = {
    ('"kernels/op*"', '"*?*"'): False,
    ('"kernels/op*"', '" * "'): False,
    ('"kernels/op*"', '"?x"'): True,
    ('"kim"', '" "'): False,
    ('"kim"', '"\\u00a0"'): False,
    ('"kim"', "7"): False,
    ("2027-01-31", '"2027-01-31"'): True,
    ("2027-01-31", '"20270131"'): False,
    ("2027-01-31", '"2027-W04-7"'): False,
    ("2027-01-31", '"2027-02-30"'): False,
    ("2027-01-31", '"2027-01-31\\n"'): False,
    ("2027-01-31", "2027-01-31T00:00:00"): False,
    ("2027-01-31", "2027-12-01"): True,
    ("2027-01-31", "2027-12-02"): False,
    ("2027-01-31", "1979-05-27"): True,
    ("[[waiver]]", "[waiver]"): False,
    ("[[waiver]]", "[[waivers]]"): False,
    ("issue", "#"): False,
}


@pytest.mark.parametrize("change", CHANGES)
def test_reader_and_schema_agree_on_a_changed_waiver(change: tuple[str, str], tmp_path: Path) -> None:
    agree(WAIVER.replace(*change), CHANGES[change], tmp_path)


def agree(text: str, valid: bool, folder: Path) -> None:
    path = folder / "waivers.toml"
    path.write_text(text)
    said = fuzz.waivers_say(text.encode())
    assert (said is not None) is valid
    if valid:
        assert [fuzz.told(w) for w in waivers_in(read_toml(path), fuzz.TODAY)] == said
    else:
        with pytest.raises(UsageError):
            waivers_in(read_toml(path), fuzz.TODAY)


def test_the_schemas_name_what_the_readers_know() -> None:
    policy, waivers = (json.loads(p.read_text()) for p in (fuzz.POLICY_SCHEMA, fuzz.WAIVERS_SCHEMA))
    for schema in (policy, waivers):
        jsonschema.Draft202012Validator.check_schema(schema)
    assert set(policy["properties"]) == set(gates.RULES) == set(gates.ARGUMENTS)
    assert policy["properties"]["verdict"]["items"]["enum"] == [str(v) for v in Overall]
    waiver = waivers["$defs"]["waiver"]["properties"]
    assert set(waiver) == {*TEXTS, "expires", *OPTIONS}
    assert waiver["verdicts"]["items"]["enum"] == sorted(FAILURES - {Verdict.STALE_WAIVER})
    assert waiver["versions"]["propertyNames"]["not"]["enum"] == sorted(RESERVED)


def test_the_policy_and_the_waiver_that_are_shown_are_valid() -> None:
    release = ROOT / "reports" / "policies" / "release.toml"
    assert fuzz.policy_says(release.read_bytes()) == rules_in(read_toml(release))
    (example,) = re.findall(
        r"(?:^    .*\n)*^    \[\[waiver\]\]\n(?:^    .*\n)+", receipts_page(), re.MULTILINE
    )
    assert fuzz.waivers_say("\n".join(line[4:] for line in example.splitlines()).encode())


def receipts_page() -> str:
    return (ROOT / "docs" / "receipts.md").read_text()


HOSTILE = {
    "a key of a million parts": b"a." * 400_000 + b"b = 1",
    "a header of a million parts": b"[" + b"a." * 400_000 + b"b]",
    "lists without a bottom": b"verdict = " + b"[" * 500_000,
    "tables without a bottom": b"waiver = " + b"{a=" * 200_000,
    "an integer of 400,000 digits": b"max_waivers = 0x" + b"f" * 400_000,
    "an owner of 400,000 digits": WAIVER.replace('"kim"', "0x" + "f" * 400_000).encode(),
    "levels of parts": b"max_skipped." + b"a." * 200 + b"b = 1",
    "a lone carriage return": WAIVER.replace("\n", "\r").encode(),
    "no Unicode": b"\xff\xfe",
    "too large": b"#" * (MAX_BYTES + 1),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_refused_at_once_in_one_line(name: str, tmp_path: Path) -> None:
    path = tmp_path / "hostile.toml"
    path.write_bytes(HOSTILE[name])
    start = time.process_time()
    for read in (rules_in, lambda file: waivers_in(file, fuzz.TODAY)):
        with pytest.raises(UsageError) as caught:
            read(read_toml(path))
        assert len(str(caught.value)) < 600
        assert str(caught.value).isprintable()
    assert time.process_time() - start < 5


def test_what_is_no_file_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (pipe, Path("/dev/zero"), tmp_path, tmp_path / "nothing"):
        with pytest.raises(UsageError, match="must be a file"):
            read_toml(path)


def test_a_pin_that_reads_as_no_digest_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "policy.toml"
    path.write_bytes(fuzz.POLICY)
    whole = digest_bytes(fuzz.POLICY)
    assert read_toml(path, whole).digest == whole
    for pin in (whole[:-1], whole.removeprefix("sha256:"), whole.upper(), whole + "\n"):
        with pytest.raises(UsageError, match="64 hexadecimal digits"):
            read_toml(path, pin)


def test_messages_about_a_file_do_not_reach_the_terminal_as_commands(tmp_path: Path) -> None:
    path = tmp_path / "policy.toml"
    path.write_text('"\\u001b[31m\\nx" = 1\n')
    with pytest.raises(UsageError) as caught:
        rules_in(read_toml(path))
    assert str(caught.value).isprintable()
    assert not isinstance(caught.value, ReceiptError)
