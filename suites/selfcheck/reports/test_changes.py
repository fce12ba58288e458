"""Comparison, merge, gates and history of receipts."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from qualify.errors import UsageError
from qualify.packing import unpacked
from qualify.records import Overall
from qualify.toml_file import read_toml
from reports import history, page
from reports.changes import compare
from reports.gates import rules_in
from reports.gating import gated, waived
from reports.merge import merge
from reports.model import Moved, from_json, seal
from reports.parts import rebuilt
from reports.reading import ReceiptError
from reports.verify import verify
from suites.selfcheck.reports import synthetic

TODAY = date(2026, 11, 30)


def moved(before: dict[str, Any], after: dict[str, Any]) -> tuple[Moved, ...]:
    return compare(from_json(seal(before)), from_json(seal(after))).moved


def changed(body: dict[str, Any], change: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    made = copy.deepcopy(body)
    change(made)
    return made


def judged(body: dict[str, Any]) -> list[dict[str, Any]]:
    return [c for c in body["cases"] if c["verdict"] == "passed" and c["check"] == "op.whole"]


def test_nothing_moves_between_a_receipt_and_itself(sound_body: dict[str, Any]) -> None:
    assert moved(sound_body, sound_body) == ()


def grow_one_error(body: dict[str, Any]) -> None:
    comparison = judged(body)[0]["comparisons"][0]
    comparison["error"], comparison["budget"] = comparison["error"] * 1.4, comparison["budget"] * 1.0


def loosen_a_budget(body: dict[str, Any]) -> None:
    judged(body)[0]["comparisons"][0]["budget"] *= 1.5


def drop_a_comparison(body: dict[str, Any]) -> None:
    del judged(body)[0]["comparisons"][2]


def drop_a_passing_case(body: dict[str, Any]) -> None:
    body["cases"].remove(judged(body)[0])


def skip_a_passing_case(body: dict[str, Any]) -> None:
    judged(body)[0].update(verdict="skipped", reason="not today", comparisons=[])


def miss_a_control(body: dict[str, Any]) -> None:
    body["controls"][0]["caught"] = False


def admit_a_wrong_answer(body: dict[str, Any]) -> None:
    body["discrimination"][0]["excluded"] = False


def grant_more_skips(body: dict[str, Any]) -> None:
    body["plan"]["skip_budgets"][1]["share"] = 0.5


WORSE = [
    (grow_one_error, "error grew"),
    (loosen_a_budget, "budget loosened"),
    (drop_a_comparison, "comparison vanished"),
    (drop_a_passing_case, "case vanished"),
    (skip_a_passing_case, "case verdict"),
    (miss_a_control, "control"),
    (admit_a_wrong_answer, "wrong answer"),
    (grant_more_skips, "skip budget"),
]


@pytest.mark.parametrize(("change", "kind"), WORSE)
def test_what_got_worse_is_told_and_nothing_else_is(
    sound_body: dict[str, Any], change: Callable[[dict[str, Any]], None], kind: str
) -> None:
    found = moved(sound_body, changed(sound_body, change))
    assert {m.kind for m in found if m.worse} == {kind}
    back = moved(changed(sound_body, change), sound_body)
    assert not [m for m in back if m.worse]


def test_noise_alone_is_no_growth() -> None:
    """Every error moves by a random twentieth: an ordinary second run."""
    rng = random.Random(4)

    def shake(body: dict[str, Any]) -> None:
        for case in judged(body):
            for c in case["comparisons"]:
                c["error"] *= rng.lognormvariate(0, 0.05)

    before = synthetic.body(300, metrics=synthetic.METRICS)
    assert not [m for m in moved(before, changed(before, shake)) if m.worse]


def test_a_common_shift_of_a_tensor_is_growth() -> None:
    def shift(body: dict[str, Any]) -> None:
        for case in judged(body):
            for c in case["comparisons"]:
                c["error"] *= 1.15 if c["tensor"] == "dg" else 1.0

    before = synthetic.body(300)
    found = [m for m in moved(before, changed(before, shift)) if m.worse]
    assert {m.kind for m in found} == {"errors grew"}
    assert {m.what.split(",")[0] for m in found} <= {
        f"dg rel_l2 of op.whole {d}" for d in ("bf16", "fp16", "fp32")
    }


def test_a_new_driver_and_launch_are_told_and_not_blamed(sound_body: dict[str, Any]) -> None:
    def update(body: dict[str, Any]) -> None:
        body["environments"] = [synthetic.environment(driver="580.65.06")]
        judged(body)[0]["launch"] = {"gdn_chunk_forward": "block_v=32"}

    found = moved(sound_body, changed(sound_body, update))
    assert {m.kind for m in found} == {"environment", "launch"}
    assert not any(m.worse for m in found)


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("shards")
    made = synthetic.shards(60, 4)
    return [synthetic.write(folder / f"{i}.json", value) for i, value in enumerate(made)]


def test_merged_shards_are_the_whole_run(shards: list[Path], tmp_path: Path) -> None:
    body = merge([shards[i] for i in (2, 0, 3, 1)])
    whole = synthetic.body(60)
    assert [c["case_id"] for c in body["cases"]] == [c["case_id"] for c in whole["cases"]]
    assert body["header"]["verdict"] == "QUALIFIED"
    assert [s["index"] for s in body["header"]["shards"]] == [0, 1, 2, 3]
    result = verify(synthetic.write(tmp_path / "receipt.json", seal(body)))
    assert [f.step for f in result.findings if not f.passed] == []
    assert "570.124.06" in page.render(from_json(seal(body)))
    assert "They differ in" in page.render(from_json(seal(body)))


def test_the_receipt_of_a_shard_is_incomplete(shards: list[Path]) -> None:
    assert verify(shards[0]).receipt.body.header.verdict is Overall.INCOMPLETE  # type: ignore[union-attr]
    assert not verify(shards[0]).passed


def rewritten(path: Path, folder: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    body = unpacked(json.loads(path.read_bytes())["body"])
    change(body)
    return synthetic.write(folder / path.name, seal(body))


def rename_the_first_case(body: dict[str, Any]) -> None:
    body["cases"][0] = {"case_id": "x/y[]z#0", "verdict": "not_run", "reason": "another"}


REFUSED: dict[str, tuple[Callable[[list[Path], Path], list[Path]], str]] = {
    "missing": (lambda s, d: s[:3], "missing"),
    "given twice": (lambda s, d: [*s, s[1]], "twice"),
    "another plan": (
        lambda s, d: [*s[:3], rewritten(s[3], d, lambda b: b["plan"].update(digest="sha256:" + "0" * 64))],
        "same plan",
    ),
    "a case cut": (lambda s, d: [*s[:3], rewritten(s[3], d, lambda b: b["cases"].pop())], "altered"),
    "a case changed": (
        lambda s, d: [*s[:3], rewritten(s[3], d, rename_the_first_case)],
        "altered",
    ),
    "other code": (
        lambda s, d: [*s[:3], rewritten(s[3], d, lambda b: b["subjects"][0].update(commit="f" * 40))],
        "subjects' code",
    ),
    "another judge": (
        lambda s, d: [*s[:3], rewritten(s[3], d, lambda b: b["header"]["harness"].update(version="9"))],
        "harness",
    ),
    "a whole run": (lambda s, d: [*s[:3], synthetic.write(d / "w.json", synthetic.receipt(60))], "whole run"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_shards_that_do_not_fit_are_refused(shards: list[Path], tmp_path: Path, name: str) -> None:
    choose, rule = REFUSED[name]
    with pytest.raises(ReceiptError, match=rule):
        merge(choose(shards, tmp_path))


def test_an_altered_shard_is_refused(shards: list[Path], tmp_path: Path) -> None:
    data = shards[3].read_bytes()
    altered = tmp_path / "3.json"
    altered.write_bytes(data.replace(b'"verdict":"passed"', b'"verdict":"waived"', 1))
    with pytest.raises(ReceiptError, match="edited"):
        merge([*shards[:3], altered])


POLICY = """
max_margin = 0.97
max_waivers = 0
max_drift = 0
subject_clean = true
waivers_valid = true
no_loosening = true
no_growth = true
no_loss = true
max_skipped_share = 0.7
max_skipped.sm.sm100 = 60
min_executed.dtype.bf16 = 3
"""


def results(
    body: dict[str, Any], policy: str, tmp_path: Path, baseline: dict[str, Any] | None = None
) -> dict[str, bool]:
    path = tmp_path / "policy.toml"
    path.write_text(policy)
    earlier = from_json(seal(baseline)) if baseline else None
    _, gates = gated(body, read_toml(path), earlier, "sha256:x", TODAY)
    return {gate.rule: gate.passed for gate in gates}


def test_a_sound_receipt_passes_its_policy(sound_body: dict[str, Any], tmp_path: Path) -> None:
    found = results(sound_body, POLICY, tmp_path, sound_body)
    assert len(found) == 12
    assert all(found.values())


@pytest.mark.parametrize(
    ("policy", "rule"),
    [
        ("max_margin = 0.5", "max_margin"),
        ("max_skipped.sm.sm100 = 3", "max_skipped sm:sm100"),
        ("max_skipped_share = 0.1", "max_skipped_share"),
        ("min_executed.dtype.bf16 = 1000", "min_executed dtype:bf16"),
        ("min_executed.dtype.fp8 = 1", "min_executed dtype:fp8"),
        ("min_executed.dtype.fp8 = 0", "min_executed dtype:fp8"),
        ("max_skipped.sm.sm123 = 60", "max_skipped sm:sm123"),
        ('verdict = ["INCOMPLETE"]', "verdict"),
    ],
)
def test_a_rule_that_is_broken_is_red_and_so_is_the_receipt(
    sound_body: dict[str, Any], tmp_path: Path, policy: str, rule: str
) -> None:
    (tmp_path / "p.toml").write_text(policy)
    body, gates = gated(sound_body, read_toml(tmp_path / "p.toml"), None, "sha256:x", TODAY)
    assert [g.rule for g in gates if not g.passed] == [rule]
    assert body["header"]["verdict"] == "NOT_QUALIFIED"
    written = synthetic.write(tmp_path / "receipt.json", seal(body))
    assert [f.step for f in verify(written).findings if not f.passed] == []


def test_a_policy_without_a_verdict_asks_for_a_qualified_one(
    failing_body: dict[str, Any], tmp_path: Path
) -> None:
    assert results(failing_body, "max_waivers = 0", tmp_path)["verdict"] is False


def test_loosened_budgets_and_lost_cases_break_the_rules_that_name_them(
    sound_body: dict[str, Any], tmp_path: Path
) -> None:
    looser = rebuilt(changed(sound_body, loosen_a_budget))
    fewer = rebuilt(changed(sound_body, skip_a_passing_case))
    assert results(looser, POLICY, tmp_path, sound_body)["no_loosening"] is False
    assert results(fewer, POLICY, tmp_path, sound_body)["no_loss"] is False


def test_gating_twice_judges_the_cases_and_not_the_gates(sound_body: dict[str, Any], tmp_path: Path) -> None:
    for policy, verdict in (("max_margin = 0.1", "NOT_QUALIFIED"), ("max_margin = 0.99", "QUALIFIED")):
        (tmp_path / "p.toml").write_text(policy)
        body, _ = gated(sound_body, read_toml(tmp_path / "p.toml"), None, "sha256:x", TODAY)
        assert body["header"]["verdict"] == verdict


BAD_POLICIES = {
    "": "a rule",
    "max_marjin = 1": "max_marjin",
    "max_margin = 7": "0 to 1",
    "max_margin = nan": "0 to 1",
    'max_margin = "1"': "0 to 1",
    "max_waivers = -1": "count",
    "subject_clean = false": "true",
    'verdict = ["FINE"]': "QUALIFIED",
    "verdict = []": "QUALIFIED",
    "max_skipped.sm = 3": "axis.level",
    "max_skipped = {}": "axis.level",
    "max_skipped.sm = {}": "axis.level",
    "max_waivers = 0x7fffffffffffffff": "count",
    "max_waivers = 1.5": "count",
    "min_executed.dtype.bf16 = true": "axis.level",
    "a = [": "TOML",
}


@pytest.mark.parametrize("text", BAD_POLICIES)
def test_a_policy_that_cannot_be_meant_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "policy.toml"
    path.write_text(text)
    with pytest.raises(UsageError, match=BAD_POLICIES[text]):
        rules_in(read_toml(path))


def test_a_rule_without_its_baseline_is_refused(sound_body: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ReceiptError, match="--baseline"):
        results(sound_body, "no_loosening = true", tmp_path)


WAIVER = """
[[waiver]]
cases = "{cases}"
owner = "kim"
issue = "GQ-1"
reason = "known"
expires = 2027-01-31
"""


def test_waivers_lead_from_failure_to_qualified_with_waivers_and_hold(
    tmp_path: Path,
) -> None:
    value = synthetic.receipt(60, failures=2)
    receipt = from_json(value)
    ids = [c.case_id for c in receipt.body.cases if c.verdict.startswith("failed")]
    path = tmp_path / "waivers.toml"
    path.write_text("\n".join(WAIVER.format(cases=i) for i in ids))
    body = waived(receipt, read_toml(path), TODAY)
    assert body["header"]["verdict"] == "QUALIFIED_WITH_WAIVERS"
    written = synthetic.write(tmp_path / "receipt.json", seal(body))
    assert [f.step for f in verify(written).findings if not f.passed] == []


@pytest.mark.parametrize("cases", ["kernels/none*", "kernels/op.whole*"])
def test_a_waiver_that_is_unused_or_stale_makes_the_run_red(
    sound_receipt: Any, tmp_path: Path, cases: str
) -> None:
    path = tmp_path / "waivers.toml"
    path.write_text(WAIVER.format(cases=cases))
    body = waived(sound_receipt, read_toml(path), TODAY)
    assert body["header"]["verdict"] == "NOT_QUALIFIED"
    written = synthetic.write(tmp_path / "receipt.json", seal(body))
    assert [f.step for f in verify(written).findings if not f.passed] == []


def test_history_orders_runs_by_time_and_leaves_out_what_is_no_whole_run(
    tmp_path: Path, shards: list[Path]
) -> None:
    for day in (3, 1, 2):
        synthetic.write(tmp_path / f"{day}.json", synthetic.receipt(30, time=f"2026-11-0{day}T00:00:00Z"))
    (tmp_path / "shard.json").write_bytes(shards[0].read_bytes())
    (tmp_path / "other.json").write_text("{}")
    (tmp_path / "broken.json").write_bytes(shards[1].read_bytes()[:-40])
    runs, left_out = history.read_runs(tmp_path)
    assert [run.time[8:10] for run in runs] == ["01", "02", "03"]
    assert len(left_out) == 1
    assert "broken.json" in left_out[0]
    assert "dbeta" in page.render_history(history.lines(runs))
