"""Verification: a sound receipt holds; one that was edited anywhere does not, sealed again or not."""

from __future__ import annotations

import copy
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from qualify.canonical import canonical_bytes, digest
from reports import schema
from reports.model import from_json, load, seal
from reports.reading import ReceiptError
from reports.signing import make_key, sign, statement
from reports.verify import Verification, verify
from suites.selfcheck.reports import edits, synthetic

EDITS = 200


def failed(result: Verification) -> list[str]:
    return [finding.step for finding in result.findings if not finding.passed]


def signed_result(folder: Path) -> Verification:
    return verify(folder / "receipt.json", folder / "receipt.dsse.json", [folder / "key.pub"])


def test_a_signed_receipt_holds(signed: Path) -> None:
    result = signed_result(signed)
    assert failed(result) == []
    assert result.passed


@pytest.mark.parametrize("options", [{"failures": 2}, {"missed": 1}, {"metrics": synthetic.METRICS}])
def test_a_receipt_holds_whatever_its_verdict(tmp_path: Path, options: dict[str, Any]) -> None:
    path = synthetic.write(tmp_path / "receipt.json", synthetic.receipt(40, **options))
    assert failed(verify(path)) == []


def test_every_random_edit_is_refused(signed: Path, sound: dict[str, Any], tmp_path: Path) -> None:
    """Edits of values, ids, verdicts, digests, deleted and repeated cases: 200 of 200."""
    folder = shutil.copytree(signed, tmp_path / "edited")
    rng = random.Random(7)
    candidates = list(edits.places(sound))
    for _ in range(EDITS):
        value, what = edits.edited(sound, rng, candidates)
        path = folder / "receipt.json"
        path.write_bytes(json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode() + b"\n")
        assert not signed_result(folder).passed, what


def test_every_random_edit_is_refused_even_when_sealed_again(
    signed: Path, sound: dict[str, Any], tmp_path: Path
) -> None:
    """Who edits can compute the id again; the signature is over another file then."""
    folder = shutil.copytree(signed, tmp_path / "sealed")
    rng = random.Random(8)
    candidates = list(edits.places(sound["body"]))
    for _ in range(40):
        body, what = edits.edited(sound["body"], rng, candidates)
        synthetic.write(folder / "receipt.json", {**sound, "id": digest(body), "body": body})
        assert not signed_result(folder).passed, what


def first(body: dict[str, Any], **wanted: object) -> dict[str, Any]:
    return next(c for c in body["cases"] if all(c.get(k) == v for k, v in wanted.items()))


def hide_a_failure(body: dict[str, Any]) -> None:
    case = next(c for c in body["cases"] if c["verdict"].startswith("failed"))
    case |= {"verdict": "skipped", "reason": "not here", "comparisons": []}


def waive_without_a_waiver(body: dict[str, Any]) -> None:
    next(c for c in body["cases"] if c["verdict"].startswith("failed"))["verdict"] = "waived"


def delete_a_case(body: dict[str, Any]) -> None:
    del body["cases"][3]


def repeat_a_case(body: dict[str, Any]) -> None:
    body["cases"][3] = copy.deepcopy(body["cases"][4])


def rename_a_case(body: dict[str, Any]) -> None:
    case = body["cases"][3]
    for name in ("check", "subject", "levels", "regime", "seed", "command"):
        del case[name]
    case["case_id"] = case["case_id"].replace("#0", "#1")


def claim_qualified(body: dict[str, Any]) -> None:
    body["header"] |= {"verdict": "QUALIFIED", "reasons": []}


def drop_a_control(body: dict[str, Any]) -> None:
    del body["controls"][0]


def claim_a_control(body: dict[str, Any]) -> None:
    body["controls"][-1]["caught"] = True


def drop_a_wrong_answer(body: dict[str, Any]) -> None:
    del body["discrimination"][0]


def inflate_the_cover(body: dict[str, Any]) -> None:
    body["plan"]["covers"][0]["covered"] += 1
    body["plan"]["covers"][0]["possible"] += 1


def drop_the_proofs(body: dict[str, Any]) -> None:
    body["plan"]["covers"] = []


def skip_what_runs(body: dict[str, Any]) -> None:
    case = next(c for c in body["cases"] if c["verdict"] == "passed" and c["check"].startswith("op"))
    case |= {
        "verdict": "skipped",
        "comparisons": [],
        "reason": "needs sm_number of at least 100, got 90: the cell is one of SM 10",
        "requirement": "sm 10",
        "value_seen": "90",
    }
    next(s for s in body["skips"] if s["requirement"] == "sm 10")["cases"] += 1


def see_another_machine(body: dict[str, Any]) -> None:
    first(body, verdict="skipped")["value_seen"] = "80"


def run_on_another_gpu(body: dict[str, Any]) -> None:
    first(body, verdict="passed")["gpu"] = "GPU-0"


def grant_more_skips(body: dict[str, Any]) -> None:
    body["skips"][0]["budget"] += 100


def name_another_profile(body: dict[str, Any]) -> None:
    body["header"]["profile"] = "b200"


def invent_a_key(body: dict[str, Any]) -> None:
    body["header"]["note"] = "trust me"


def rename_a_fault(body: dict[str, Any]) -> None:
    body["controls"][0]["fault"] = "nothing much"


def reword_a_skip(body: dict[str, Any]) -> None:
    body["skips"][0]["reason"] = "not needed"


def err_below_zero(body: dict[str, Any]) -> None:
    case = next(c for c in body["cases"] if c["verdict"] == "passed" and c["check"].startswith("op"))
    case["comparisons"][0]["error"] = -1e6


def run_in_an_unknown_worker(body: dict[str, Any]) -> None:
    first(body, verdict="passed")["worker"] = "gw77"


def run_in_no_worker(body: dict[str, Any]) -> None:
    first(body, verdict="passed")["worker"] = ""


def give_a_worker_two_machines(body: dict[str, Any]) -> None:
    other = copy.deepcopy(body["environments"][0])
    other["gpu"]["sm"] = "10.0"
    body["environments"].append(other)


def lose_a_shard(body: dict[str, Any]) -> None:
    half = len(body["cases"]) // 2
    body["header"]["shards"] = [
        {"index": 0, "id": "a", "cases": half},
        {"index": 2, "id": "b", "cases": half},
    ]


def pad_a_shard(body: dict[str, Any]) -> None:
    body["header"]["shards"] = [{"index": 0, "id": "a", "cases": len(body["cases"]) + 1}]


FORGERIES: list[Callable[[dict[str, Any]], None]] = [
    hide_a_failure,
    waive_without_a_waiver,
    delete_a_case,
    repeat_a_case,
    rename_a_case,
    claim_qualified,
    drop_a_control,
    claim_a_control,
    drop_a_wrong_answer,
    inflate_the_cover,
    drop_the_proofs,
    skip_what_runs,
    see_another_machine,
    run_on_another_gpu,
    grant_more_skips,
    name_another_profile,
    invent_a_key,
    rename_a_fault,
    reword_a_skip,
    err_below_zero,
    run_in_an_unknown_worker,
    run_in_no_worker,
    give_a_worker_two_machines,
    lose_a_shard,
    pad_a_shard,
]


@pytest.mark.parametrize("forge", FORGERIES)
def test_a_forgery_is_seen_without_a_signature(
    tmp_path: Path, failing_body: dict[str, Any], forge: Callable[[dict[str, Any]], None]
) -> None:
    """The id is computed again after the edit: only what follows from the rest gives it away."""
    body = copy.deepcopy(failing_body)
    forge(body)
    result = verify(synthetic.write(tmp_path / "receipt.json", seal(body)))
    assert not result.passed
    assert len(failed(result)) < 7, "one edit must not be blamed on everything"


def record_a_margin(body: dict[str, Any]) -> None:
    next(c for c in body["cases"] if "comparisons" in c)["comparisons"][0]["margin"] = 0.001


def say_other_levels(body: dict[str, Any]) -> None:
    body["cases"][3]["levels"] = {"sm": "sm90"}


def say_a_zero(body: dict[str, Any]) -> None:
    next(c for c in body["cases"] if "must_run" not in c)["must_run"] = False


def swap_two_rules(body: dict[str, Any]) -> None:
    rules = body["tables"]["rules"]
    rules[0], rules[1] = rules[1], rules[0]


def keep_a_rule_twice(body: dict[str, Any]) -> None:
    body["tables"]["rules"].append(body["tables"]["rules"][0])


def keep_a_reason_for_nothing(body: dict[str, Any]) -> None:
    body["tables"]["reasons"].append({"reason": "none"})


def call_a_failure_a_crash(body: dict[str, Any]) -> None:
    body["tables"]["rules"][0]["failure"] = "crash"


def see_another_machine_everywhere(body: dict[str, Any]) -> None:
    next(r for r in body["tables"]["reasons"] if r.get("requirement") == "sm 10")["value_seen"] = "80"


PACKED_FORGERIES: list[Callable[[dict[str, Any]], None]] = [
    record_a_margin,
    say_other_levels,
    say_a_zero,
    swap_two_rules,
    keep_a_rule_twice,
    keep_a_reason_for_nothing,
    call_a_failure_a_crash,
    see_another_machine_everywhere,
]


@pytest.mark.parametrize("forge", PACKED_FORGERIES)
def test_a_forgery_of_what_is_written_is_seen_without_a_signature(
    tmp_path: Path, failing: dict[str, Any], forge: Callable[[dict[str, Any]], None]
) -> None:
    """What is written has one form; the id is computed again after the edit."""
    body = copy.deepcopy(failing["body"])
    forge(body)
    written = {**failing, "id": digest(body), "body": body}
    assert not verify(synthetic.write(tmp_path / "receipt.json", written)).passed


def test_the_manifest_is_checked_against_the_files_beside(tmp_path: Path, sound_body: dict[str, Any]) -> None:
    (tmp_path / "log.txt").write_text("a log")
    body = {**sound_body, "manifest": {"log.txt": "sha256:" + "0" * 64, "../key": "sha256:" + "0" * 64}}
    found = {f.step: f.found for f in verify(synthetic.write(tmp_path / "receipt.json", seal(body))).findings}
    assert "log.txt was altered" in found["files of the manifest"]
    assert "../key lies outside" in found["files of the manifest"]


def test_another_key_is_refused(signed: Path, tmp_path: Path) -> None:
    make_key(tmp_path / "other", tmp_path / "other.pub")
    result = verify(signed / "receipt.json", signed / "receipt.dsse.json", [tmp_path / "other.pub"])
    assert failed(result) == ["the signature"]


def test_a_signature_without_a_trusted_key_is_worth_nothing(signed: Path) -> None:
    assert failed(verify(signed / "receipt.json", signed / "receipt.dsse.json")) == ["the signature"]


def test_a_swapped_receipt_is_refused(signed: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(signed, tmp_path / "swapped")
    synthetic.write(folder / "receipt.json", synthetic.receipt(61))
    assert failed(signed_result(folder)) == ["the signature"]


def test_every_edit_of_the_envelope_is_refused(signed: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(signed, tmp_path / "envelope")
    path = folder / "receipt.dsse.json"
    whole = path.read_bytes()
    rng = random.Random(9)
    for _ in range(60):
        at = rng.randrange(len(whole) - 1)
        path.write_bytes(whole[:at] + bytes([whole[at] ^ (1 << rng.randrange(7))]) + whole[at + 1 :])
        assert not signed_result(folder).passed


def test_a_release_must_be_what_was_signed_for(signed: Path, tmp_path: Path) -> None:
    wheel, other = tmp_path / "a.whl", tmp_path / "b.whl"
    wheel.write_bytes(b"wheel")
    other.write_bytes(b"another")
    envelope = tmp_path / "envelope.json"
    receipt = signed / "receipt.json"
    envelope.write_bytes(sign(load(receipt), signed / "key", [wheel]))
    assert verify(receipt, envelope, [signed / "key.pub"], [wheel]).passed
    assert failed(verify(receipt, envelope, [signed / "key.pub"], [other])) == ["the signature"]


def test_only_qualified_is_signed_as_passed() -> None:
    results = {}
    for name, options in {"sound": {}, "failing": {"failures": 1}, "open": {"missed": 1}}.items():
        receipt = synthetic.receipt(40, **options)
        read = from_json(receipt, "receipt", canonical_bytes(receipt) + b"\n")
        results[name] = statement(read)["predicate"]["result"]
    assert results == {"sound": "PASSED", "failing": "FAILED", "open": "FAILED"}


def test_a_private_key_is_written_for_its_owner_alone_and_never_over_another(tmp_path: Path) -> None:
    make_key(tmp_path / "key", tmp_path / "key.pub")
    assert (tmp_path / "key").stat().st_mode & 0o077 == 0
    with pytest.raises(ReceiptError, match="new file"):
        make_key(tmp_path / "key", tmp_path / "other.pub")


def test_the_compiled_schema_agrees_with_the_library(failing: dict[str, Any]) -> None:
    """On a sound receipt and on random edits, both say the same."""
    document = json.loads(schema.SCHEMA_FILE.read_text())
    library = jsonschema.Draft202012Validator(document)
    check = schema.compiled(document)
    small = copy.deepcopy(failing)
    small["body"]["cases"] = small["body"]["cases"][:6]
    rng = random.Random(10)
    candidates = list(edits.places(small))
    for turn in range(60):
        value = json.loads(canonical_bytes(small)) if turn == 0 else edits.edited(small, rng, candidates)[0]
        try:
            check(value, "receipt")
            ours = True
        except ReceiptError:
            ours = False
        assert ours == library.is_valid(value)
