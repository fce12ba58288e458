"""A policy and waivers are in the receipt with what came of them: whoever edits one is seen, or named."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from qualify.canonical import digest_bytes
from qualify.records import Verdict
from qualify.toml_file import TomlFile, read_toml
from reports import rederive
from reports.gating import gated, waived
from reports.model import from_json, load, seal
from reports.parts import rebuilt, write_receipt
from reports.reading import ReceiptError
from reports.signing import statement
from reports.verify import Verification, verify
from suites.selfcheck.reports import synthetic

TODAY = date(2026, 11, 30)
POLICY = """
max_margin = 0.99
max_waivers = 2
waivers_valid = true
no_loosening = true
max_skipped.sm.sm100 = 60
min_executed.dtype.bf16 = 3
"""
WAIVER = """
[[waiver]]
cases = "{cases}"
owner = "kim"
issue = "GQ-1"
reason = "known"
expires = 2027-01-31
sm = "9.0"
versions.triton = "3.6"
verdicts = ["{verdict}"]
"""

Body = dict[str, Any]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Body, TomlFile, TomlFile]:
    """The body of a receipt that was waived and gated, its policy and its waivers."""
    folder = tmp_path_factory.mktemp("gating")
    body = synthetic.body(60, failures=2)
    failed = [c for c in body["cases"] if c["verdict"] == Verdict.FAILED_NUMERIC]
    failed[1] |= {"verdict": "crash", "reason": "signal 11", "comparisons": []}
    body = rebuilt(body)
    (folder / "waivers.toml").write_text(
        "".join(WAIVER.format(cases=c["case_id"], verdict=c["verdict"]) for c in failed)
    )
    (folder / "policy.toml").write_text(POLICY)
    policy, waivers = read_toml(folder / "policy.toml"), read_toml(folder / "waivers.toml")
    raw = waived(from_json(seal(body)), waivers, TODAY)
    made, _ = gated(raw, policy, from_json(synthetic.receipt(60, failures=2)), "sha256:x", TODAY)
    return made, policy, waivers


def checked(
    body: Body, folder: Path, policy: TomlFile | None = None, waivers: TomlFile | None = None
) -> Verification:
    path = folder / "receipt.json"
    write_receipt(path, body)
    return verify(path, policy=policy, waivers=waivers)


def wrong(result: Verification) -> list[str]:
    return [f"{f.step}: {f.found}" for f in result.findings if not f.passed]


def test_a_receipt_holds_under_its_own_policy_and_waivers(files: Any, tmp_path: Path) -> None:
    body, policy, waivers = files
    assert body["header"]["verdict"] == "QUALIFIED_WITH_WAIVERS"
    assert wrong(checked(body, tmp_path, policy=policy, waivers=waivers)) == []
    assert body["policy"]["digest"] == digest_bytes(POLICY.encode())
    assert body["waiver_file"] == {"name": "waivers.toml", "digest": waivers.digest, "day": "2026-11-30"}


def test_cases_are_found_again_as_they_were_run(files: Any) -> None:
    body = from_json(seal(files[0])).body
    run = rederive.as_run(body.cases, body.waivers)
    assert [c.verdict for c in run if c.verdict.startswith(("failed", "crash"))] == [
        "failed_numeric",
        "crash",
    ]
    assert {c.reason for c in run if c.verdict is Verdict.CRASH} == {"signal 11"}


def drop_a_gate(body: Body) -> None:
    del body["gates"][2]


def pass_a_gate(body: Body) -> None:
    body["gates"][1] |= {"value": "0.50"}


def raise_a_limit(body: Body) -> None:
    next(g for g in body["gates"] if g["rule"] == "max_waivers")["limit"] = "5"


def invent_a_gate(body: Body) -> None:
    body["gates"].append({"rule": "no_worse", "value": "0 changes", "limit": "0", "passed": True})


def repeat_a_gate(body: Body) -> None:
    body["gates"].append(dict(body["gates"][0]))


def forget_the_policy(body: Body) -> None:
    body["policy"] = None


def apply_no_rule(body: Body) -> None:
    body["policy"]["rules"] = {}


def apply_an_unknown_rule(body: Body) -> None:
    body["policy"]["rules"]["always"] = True


def apply_it_before_the_run(body: Body) -> None:
    body["policy"]["day"] = "2026-11-01"


def apply_it_on_no_day(body: Body) -> None:
    body["policy"]["day"] = "2026-02-31"


def forget_the_comparison(body: Body) -> None:
    body["comparison"] = None


def forget_the_waiver_file(body: Body) -> None:
    body["waiver_file"] = None


def move_a_waiver_to_other_machines(body: Body) -> None:
    body["waivers"][0]["scope"]["sm"] = "8.9"


def move_a_waiver_to_other_failures(body: Body) -> None:
    body["waivers"][1]["scope"]["verdicts"] = "hang"


def judge_waivers_before_they_expired(body: Body) -> None:
    body["waivers"][0]["expires"] = "2026-11-29"
    body["waiver_file"]["day"] = "2026-11-28"


def let_a_waiver_expire(body: Body) -> None:
    body["waivers"][0]["expires"] = "2026-11-29"


def widen_a_waiver_onto_what_passes(body: Body) -> None:
    body["waivers"][0]["pattern"] = "kernels/op*"


def drop_a_waiver(body: Body) -> None:
    del body["waivers"][0]


def say_that_another_waived(body: Body) -> None:
    case = next(c for c in body["cases"] if c["verdict"] == "waived")
    case["reason"] = case["reason"].replace("kim", "nobody")


def call_a_crash_a_small_error(body: Body) -> None:
    case = next(c for c in body["cases"] if c["verdict"] == "waived" and not c["comparisons"])
    case["reason"] = case["reason"].replace("crash: signal 11", "failed_numeric: o is 0.0031, allowed 0.003")
    body["waivers"][1]["scope"]["verdicts"] = "failed_numeric"


def waive_a_pass(body: Body) -> None:
    case = next(c for c in body["cases"] if c["verdict"] == "passed" and c["check"].startswith("op"))
    case |= {"verdict": "waived", "reason": "waived by kim (GQ-1): failed_numeric: small"}
    body["waivers"][0]["cases"].append(case["case_id"])


FORGERIES: list[Callable[[Body], None]] = [
    drop_a_gate,
    pass_a_gate,
    raise_a_limit,
    invent_a_gate,
    repeat_a_gate,
    forget_the_policy,
    apply_no_rule,
    apply_an_unknown_rule,
    apply_it_before_the_run,
    apply_it_on_no_day,
    forget_the_comparison,
    forget_the_waiver_file,
    move_a_waiver_to_other_machines,
    move_a_waiver_to_other_failures,
    judge_waivers_before_they_expired,
    let_a_waiver_expire,
    widen_a_waiver_onto_what_passes,
    drop_a_waiver,
    say_that_another_waived,
    call_a_crash_a_small_error,
    waive_a_pass,
]


@pytest.mark.parametrize("forge", FORGERIES)
def test_a_forgery_is_seen_without_a_signature(
    files: Any, tmp_path: Path, forge: Callable[[Body], None]
) -> None:
    """Whatever follows from the rest is stated anew after the edit, as a forger would."""
    body = copy.deepcopy(files[0])
    forge(body)
    body = rederive.restated(body, from_json(seal(body)).body)
    assert wrong(checked(body, tmp_path))


def loosen_the_policy(body: Body) -> None:
    """The recorded digest stays."""
    body["policy"]["rules"]["max_waivers"] = 9
    next(g for g in body["gates"] if g["rule"] == "max_waivers")["limit"] = "9"


def apply_another_policy(body: Body) -> None:
    body["policy"] |= {"digest": "sha256:" + "0" * 64}


def strike_the_policy(body: Body) -> None:
    body |= {"policy": None, "gates": [], "comparison": None}


def reword_a_waiver(body: Body) -> None:
    body["waivers"][0]["reason"] = "harmless"


def widen_a_scope(body: Body) -> None:
    del body["waivers"][0]["scope"]["sm"]


def prolong_a_waiver(body: Body) -> None:
    body["waivers"][0]["expires"] = "2027-11-01"


def apply_another_file(body: Body) -> None:
    body["waiver_file"] |= {"digest": "sha256:" + "0" * 64}


WHOLE_STORIES: dict[Callable[[Body], None], str] = {
    loosen_the_policy: "the policy given",
    apply_another_policy: "the policy given",
    strike_the_policy: "the policy given",
    reword_a_waiver: "the waivers given",
    widen_a_scope: "the waivers given",
    prolong_a_waiver: "the waivers given",
    apply_another_file: "the waivers given",
}


@pytest.mark.parametrize("tell", WHOLE_STORIES)
def test_a_whole_other_story_is_seen_by_who_has_the_files(
    files: Any, tmp_path: Path, tell: Callable[[Body], None]
) -> None:
    """Nothing in the receipt contradicts it; the policy and the waivers at hand do."""
    original, policy, waivers = files
    body = copy.deepcopy(original)
    tell(body)
    assert wrong(checked(body, tmp_path)) == []
    found = checked(body, tmp_path, policy=policy, waivers=waivers)
    assert [f.step for f in found.findings if not f.passed] == [WHOLE_STORIES[tell]]


def test_every_other_policy_and_waiver_file_is_refused(files: Any, tmp_path: Path) -> None:
    """A file that was changed in any way, valid or not, is not the one that was applied."""
    body, policy, waivers = files
    other = digest_bytes(b"another")
    assert wrong(checked(body, tmp_path, replace(policy, digest=other), waivers))
    assert wrong(checked(body, tmp_path, policy, replace(waivers, digest=other)))


def test_the_signed_statement_names_policy_and_waivers(files: Any, tmp_path: Path) -> None:
    body, policy, waivers = files
    write_receipt(tmp_path / "receipt.json", body)
    configuration = statement(load(tmp_path / "receipt.json"))["predicate"]["configuration"]
    named = {row["name"]: "sha256:" + row["digest"]["sha256"] for row in configuration}
    assert (named["policy"], named["waivers"]) == (policy.digest, waivers.digest)


def test_what_earlier_gates_said_is_no_change_since_the_baseline(tmp_path: Path) -> None:
    """A run that a strict policy failed is compared, under the next policy, by what its cases say."""
    strict, other = tmp_path / "strict.toml", tmp_path / "other.toml"
    strict.write_text("max_margin = 0.1")
    other.write_text("no_worse = true")
    baseline = from_json(synthetic.receipt(60))
    failed, _ = gated(baseline.raw, read_toml(strict), None, "sha256:x", TODAY)
    assert failed["header"]["verdict"] == "NOT_QUALIFIED"
    again, results = gated(failed, read_toml(other), baseline, "sha256:x", TODAY)
    assert [gate.rule for gate in results if not gate.passed] == []
    assert again["header"]["verdict"] == "QUALIFIED"
    assert wrong(checked(again, tmp_path)) == []


def test_waivers_of_another_profile_are_applied_once_too(files: Any, tmp_path: Path) -> None:
    path = tmp_path / "waivers.toml"
    path.write_text(WAIVER.format(cases="kernels/op*", verdict="crash") + 'profile = "b200"\n')
    receipt = from_json(synthetic.receipt(60))
    body = waived(receipt, read_toml(path), TODAY)
    assert body["waivers"] == []
    assert wrong(checked(body, tmp_path, waivers=read_toml(path))) == []
    with pytest.raises(ReceiptError, match="applied to this receipt already"):
        waived(from_json(seal(body)), read_toml(path), TODAY)
