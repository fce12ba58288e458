"""Files are hostile until read: none crashes, hangs or is half believed."""

from __future__ import annotations

import gzip
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from qualify.canonical import canonical_bytes, digest
from qualify.errors import UsageError
from qualify.packing import SCHEMA, SCHEMA_VERSION
from qualify.receipt import read_receipt_file
from reports.model import from_json, load, seal
from reports.reading import MAX_BYTES, ReceiptError, parse_json, read_packed_bytes
from reports.verify import verify
from suites.selfcheck.reports import synthetic


def sealed_again(body: dict[str, Any]) -> dict[str, Any]:
    """A receipt around a body that was edited as it is written."""
    return {"schema": SCHEMA, "schema_version": SCHEMA_VERSION, "id": digest(body), "body": body}


HOSTILE = {
    "not text": b"\xff\xfe\x00",
    "empty": b"",
    "truncated": b'{"schema": "gdn-qualify/receipt", "body": {',
    "deep lists": b"[" * 200_000,
    "deep objects": b'{"a":' * 200_000,
    "nan literal": b'{"schema": NaN}',
    "infinity literal": b'{"schema": -Infinity}',
    "a key twice": b'{"schema": "gdn-qualify/receipt", "schema": "other"}',
    "a number of a million digits": b'{"schema": ' + b"9" * 1_000_000 + b"}",
    "another document": b'{"version": 3, "runs": []}',
    "a list": b"[]",
    "null": b"null",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_foreign_file_is_refused_at_once_in_one_line(name: str, tmp_path: Path) -> None:
    path = tmp_path / "receipt.json"
    path.write_bytes(HOSTILE[name])
    start = time.process_time()
    with pytest.raises(ReceiptError) as caught:
        load(path)
    assert time.process_time() - start < 5
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


def test_a_huge_file_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "receipt.json"
    with path.open("wb") as file:
        file.truncate(200 * 2**20)
    start = time.process_time()
    with pytest.raises(ReceiptError, match=f"at most {MAX_BYTES} bytes"):
        load(path)
    assert time.process_time() - start < 0.5


LIMIT = 2**20


def test_a_receipt_packed_with_gzip_reads_as_the_same(tmp_path: Path, sound: dict[str, Any]) -> None:
    path = synthetic.write(tmp_path / "receipt.json", sound)
    packed = tmp_path / "receipt.json.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert load(packed).file_digest == load(path).file_digest
    assert verify(packed).passed


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (lambda data: data[:-9], "one whole gzip file"),
        (lambda data: data + data, "one whole gzip file"),
        (lambda data: data[:40] + b"\xff\xff\xff\xff" + data[44:], "sound gzip file"),
        (lambda data: gzip.compress(bytes(LIMIT + 1)), f"at most {LIMIT} bytes"),
    ],
)
def test_a_gzip_file_that_is_not_whole_or_grows_without_bound_is_refused(
    tmp_path: Path, sound: dict[str, Any], change: Callable[[bytes], bytes], rule: str
) -> None:
    packed = tmp_path / "receipt.json.gz"
    packed.write_bytes(change(gzip.compress(canonical_bytes(sound) + b"\n")))
    with pytest.raises(ReceiptError, match=rule):
        read_packed_bytes(packed, LIMIT)


def test_a_folder_and_a_missing_file_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(ReceiptError, match="a folder"):
        load(tmp_path)
    with pytest.raises(ReceiptError, match="nothing"):
        load(tmp_path / "receipt.json")


def test_a_newer_schema_is_refused_with_the_remedy(sound: dict[str, Any]) -> None:
    with pytest.raises(ReceiptError, match="newer than 2; update gdn-qualify"):
        from_json({**sound, "schema_version": 3})


def test_an_older_schema_is_refused_with_the_remedy(sound: dict[str, Any]) -> None:
    with pytest.raises(ReceiptError, match="schema version 2, got 1; run it again"):
        from_json({**sound, "schema_version": 1})


@pytest.mark.parametrize("version", [0, "2", 1.5, None, True, [1]])
def test_a_version_that_is_none_is_refused(sound: dict[str, Any], version: object) -> None:
    with pytest.raises(ReceiptError, match="schema version"):
        from_json({**sound, "schema_version": version})


JUDGED = next(i for i, case in enumerate(synthetic.receipt(60)["body"]["cases"]) if "excluded" in str(case))
"""A case with everything that a case can have."""

WRONG_TYPES: list[tuple[tuple[Any, ...], Any]] = [
    (("header", "profile"), 3),
    (("header", "verdict"), "FINE"),
    (("header", "duration_s"), "quick"),
    (("header", "harness"), None),
    (("subjects",), {}),
    (("subjects", 0, "files"), ["a"]),
    (("plan", "cases"), True),
    (("plan", "axes"), []),
    (("environments", 0, "worker"), 7),
    (("environments", 0, "gpu"), "H200"),
    (("cases", 0, "verdict"), "perfect"),
    (("cases",), {}),
    (("cases", 0), "kernels/op.whole[]x#0"),
    (("cases", 0, "case_id"), 7),
    (("cases", 0, "case_id"), "kernels/op.whole"),
    (("cases", 0, "case_id"), "kernels/op.whole[a:1,a:1]x#0"),
    (("cases", 0, "case_id"), "kernels/op.whole[]x#007"),
    (("cases", 0, "comparisons"), {}),
    (("cases", JUDGED, "launch"), -1),
    (("cases", JUDGED, "launch"), True),
    (("cases", JUDGED, "why"), 10**6),
    (("cases", JUDGED, "comparisons", 0), []),
    (("cases", JUDGED, "comparisons", 0, "rule"), -1),
    (("cases", JUDGED, "comparisons", 0, "rule"), 10**6),
    (("cases", JUDGED, "comparisons", 0, "rule"), None),
    (("cases", JUDGED, "comparisons", 0, "excluded"), 0.0),
    (("cases", JUDGED, "comparisons", 0, "statistics"), [1, 2]),
    (("cases", JUDGED, "comparisons", 0, "worst"), [1]),
    (("tables",), []),
    (("tables", "rules"), {}),
    (("tables", "rules", 0), None),
    (("tables", "rules", 0, "statistics"), ["a", "a"]),
    (("tables", "rules", 0, "kind"), 3),
    (("tables", "reasons"), None),
    (("controls", 0, "caught"), "yes"),
    (("gates",), None),
]


@pytest.mark.parametrize(("place", "value"), WRONG_TYPES)
def test_a_wrong_type_is_refused_by_its_place(
    sound: dict[str, Any], place: tuple[Any, ...], value: object
) -> None:
    body = json.loads(canonical_bytes(sound["body"]))
    node = body
    for step in place[:-1]:
        node = node[step]
    node[place[-1]] = value
    with pytest.raises(ReceiptError, match=r"must be|must have"):
        from_json(sealed_again(body))


@pytest.mark.parametrize("part", ["header", "subjects", "plan", "environments", "cases"])
def test_a_missing_part_is_refused(sound: dict[str, Any], part: str) -> None:
    body = {name: value for name, value in sound["body"].items() if name != part}
    with pytest.raises(ReceiptError, match=part):
        from_json(sealed_again(body))


def test_optional_parts_may_be_absent(sound: dict[str, Any]) -> None:
    needed = ("header", "subjects", "plan", "environments", "cases", "tables")
    assert from_json(sealed_again({name: sound["body"][name] for name in needed})).body.controls == ()


def test_a_pass_that_contradicts_its_comparisons_cannot_be_read(sound: dict[str, Any]) -> None:
    body = json.loads(canonical_bytes(sound["body"]))
    case = next(c for c in body["cases"] if c["verdict"] == "passed")
    case["comparisons"][0]["error"] = 1e6
    with pytest.raises(ReceiptError, match="contradicts itself"):
        from_json(sealed_again(body))


def test_numbers_that_are_not_finite_are_read_back() -> None:
    body = synthetic.body(6, failures=1)
    case = next(c for c in body["cases"] if c["verdict"].startswith("failed"))
    case["comparisons"][0]["error"] = "NaN"
    read = from_json(seal(body)).body
    comparison = next(c for c in read.cases if c.verdict == case["verdict"]).comparisons[0]
    assert comparison.error != comparison.error
    assert not comparison.passed


@pytest.mark.parametrize("number", ["1e999", "-1e999"])
def test_a_number_beyond_double_precision_is_refused(sound: dict[str, Any], number: str) -> None:
    text = canonical_bytes(sound).decode().replace('"duration_s":312.4', f'"duration_s":{number}')
    with pytest.raises(ReceiptError):
        from_json(parse_json(text.encode(), "receipt"))


def test_an_edit_is_refused_by_the_id(tmp_path: Path, sound: dict[str, Any]) -> None:
    path = synthetic.write(tmp_path / "receipt.json", sound)
    assert load(path).id == sound["id"]
    path.write_bytes(path.read_bytes().replace(b'"profile":"h100"', b'"profile":"b200"', 1))
    with pytest.raises(ReceiptError, match="it was edited"):
        load(path)


SAME_CONTENT: dict[str, Callable[[bytes], bytes]] = {
    "indented": lambda data: json.dumps(json.loads(data), indent=1).encode() + b"\n",
    "in another order": lambda data: (
        json.dumps(
            dict(reversed(json.loads(data).items())), separators=(",", ":"), ensure_ascii=False
        ).encode()
        + b"\n"
    ),
    "without its newline": lambda data: data[:-1],
    "with two newlines": lambda data: data + b"\n",
    "with a carriage return": lambda data: data[:-1] + b"\r\n",
    "with a space": lambda data: data.replace(b":", b": ", 1),
    "with an escape": lambda data: data.replace(b'"body"', b'"\\u0062ody"', 1),
    "with a number in other words": lambda data: data.replace(b'"strength":1', b'"strength":1.0', 1),
    "with an exponent": lambda data: data.replace(b'"duration_s":312.4', b'"duration_s":3.124e2', 1),
    "with a mark of byte order": lambda data: b"\xef\xbb\xbf" + data,
}


@pytest.mark.parametrize("change", SAME_CONTENT)
def test_the_same_content_in_other_bytes_is_refused(
    tmp_path: Path, sound: dict[str, Any], change: str
) -> None:
    path = synthetic.write(tmp_path / "receipt.json", sound)
    data = path.read_bytes()
    path.write_bytes(SAME_CONTENT[change](data))
    assert path.read_bytes() != data
    with pytest.raises(ReceiptError, match=r"canonical JSON .* fetch it again|is not strict JSON"):
        load(path)
    assert not verify(path).passed
    with pytest.raises(UsageError, match="must be a receipt"):
        read_receipt_file(path)


def test_the_first_other_byte_is_named(tmp_path: Path, sound: dict[str, Any]) -> None:
    path = synthetic.write(tmp_path / "receipt.json", sound)
    data = path.read_bytes()
    for at in (1, data.index(b'"plan"'), len(data)):
        path.write_bytes(data[:at] + b" " + data[at:])
        with pytest.raises(ReceiptError, match=f"from byte {at} on"):
            load(path)


@pytest.mark.parametrize("data", [b"[" * 200_000, b"null", b"\xff", b'{"schema":"gdn-qualify/receipt"}'])
def test_looking_a_case_up_in_a_foreign_file_is_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "receipt.json"
    path.write_bytes(data)
    with pytest.raises(UsageError, match="must be a receipt"):
        read_receipt_file(path)
