"""Readers under damaged files: what a judge of its own says that a file holds, and what the reader says.

A receipt and an envelope have one text, so that every other text is damage. A policy or a file of waivers
that was changed may still be one; whether it is, the published JSON Schema says, by the library that checks
those. What still is one must be read as exactly what it says; everything else must be refused. Under a digest
that was written down, every change is refused.
"""

from __future__ import annotations

import json
import random
import time
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import date, timedelta
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema

import qualify
import reports
from qualify.canonical import canonical_bytes, digest_bytes
from qualify.errors import UsageError
from qualify.records import jsonable
from qualify.toml_file import MAX_DOTS, read_toml
from qualify.waivers import MAX_DAYS, Waiver, waivers_in
from reports import signing
from reports.gates import rules_in
from reports.model import load
from reports.reading import ReceiptError
from suites.selfcheck.reports import edits, synthetic

TODAY = date(2026, 11, 30)
MAX_MESSAGE = 1000
POLICY_SCHEMA = Path(reports.__file__).with_name("policy.schema.json")
WAIVERS_SCHEMA = Path(qualify.__file__).with_name("waivers.schema.json")
ASKED_ANYWAY = {"verdict": ["QUALIFIED", "QUALIFIED_WITH_WAIVERS"]}
POLICY = b"""# what a release must show
verdict = ["QUALIFIED"]
max_margin = 0.97
max_waivers = 0
no_loosening = true
max_skipped.sm.sm100 = 300

[min_executed.dtype]
bf16 = 3
"""
WAIVERS = b"""# known to the driver's maker
[[waiver]]
cases = "kernels/op.whole[*dtype:fp16*]*"
owner = "kim"
issue = "GQ-12"
reason = "the driver rounds twice"
expires = 2027-01-31
driver = ">=570,<580"
versions.triton = "3.6"
verdicts = ["failed_numeric"]
"""


@dataclass(frozen=True)
class Reader:
    """A reader, a file that it reads, and who judges what a changed file says.

    Attributes:
        judged: what the bytes of a file say; None when they say nothing, and the file must be refused.
        pinned: reads a file under the digest of the sound one, where there is such a way.
    """

    name: str
    sound: bytes
    read: Callable[[Path], Any]
    judged: Callable[[bytes], Any]
    damage: Callable[[bytes, random.Random], bytes]
    pinned: Callable[[Path], Any] | None = None


@dataclass
class Tally:
    """What a reader made of the files that were drawn for it."""

    damaged: int = 0
    refused: int = 0
    valid: int = 0
    as_it_says: int = 0
    refused_under_digest: int = 0
    slowest_s: float = 0.0
    wrong: list[bytes] = field(default_factory=list)

    @property
    def drawn(self) -> int:
        """All files."""
        return self.damaged + self.valid

    def holds(self, reader: Reader) -> bool:
        """Whether all that is damaged was refused, and all else read as what it says."""
        pinned = reader.pinned is None or self.refused_under_digest == self.drawn
        return pinned and not self.wrong and (self.refused, self.as_it_says) == (self.damaged, self.valid)


def fuzzed(reader: Reader, damaged: int, folder: Path, seed: int = 2026) -> Tally:
    """Draws files until so many are damaged, and reads each; whatever a reader must not raise is raised."""
    rng, tally, path = random.Random(seed), Tally(), folder / "drawn"
    while tally.damaged < damaged:
        data = reader.damage(reader.sound, rng)
        if data == reader.sound:
            continue
        path.write_bytes(data)
        said = reader.judged(data)
        start = time.perf_counter()
        found = _read(reader.read, path)
        tally.slowest_s = max(tally.slowest_s, time.perf_counter() - start)
        tally.damaged += said is None
        tally.refused += said is None and found is None
        tally.valid += said is not None
        tally.as_it_says += said is not None and found == said
        if found != said:
            tally.wrong.append(data)
        if reader.pinned is not None:
            tally.refused_under_digest += _read(reader.pinned, path) is None
    return tally


def _read(read: Callable[[Path], Any], path: Path) -> Any:
    """What a reader makes of a file; None when it refuses it as it should, in one line."""
    try:
        return read(path)
    except (ReceiptError, UsageError) as error:
        message = str(error)
    if "\n" in message or len(message) > MAX_MESSAGE:
        raise AssertionError(
            f"a refusal must be one line of {MAX_MESSAGE} characters, got {message[:2000]!r}"
        )
    return None


def readers(folder: Path) -> list[Reader]:
    """All readers of files that come from outside."""
    receipt = synthetic.receipt(6)
    path = synthetic.write(folder / "sound.json", receipt)
    signing.make_key(folder / "key", folder / "key.pub")
    envelope, key = signing.sign(load(path), folder / "key"), folder / "key.pub"
    return [
        Reader("receipts", path.read_bytes(), lambda p: load(p).id, _never, _changed_json),
        Reader("envelopes", envelope, lambda p: signing.verify_envelope(p, [key]), _never, _changed_json),
        *toml_readers(),
    ]


def toml_readers() -> list[Reader]:
    """The readers of policies and waivers."""
    return [
        Reader(
            "policies",
            POLICY,
            lambda p: rules_in(read_toml(p)),
            policy_says,
            edits.damaged,
            lambda p: rules_in(read_toml(p, digest_bytes(POLICY))),
        ),
        Reader(
            "waivers",
            WAIVERS,
            lambda p: [told(w) for w in waivers_in(read_toml(p), TODAY)],
            waivers_say,
            edits.damaged,
            lambda p: waivers_in(read_toml(p, digest_bytes(WAIVERS)), TODAY),
        ),
    ]


def _never(data: bytes) -> None:
    """A file that has one text says nothing in any other."""


def _changed_json(data: bytes, rng: random.Random) -> bytes:
    return (edits.respelled if rng.random() < 0.5 else edits.damaged)(data, rng)


def policy_says(data: bytes) -> Mapping[str, Any] | None:
    """The rules in the bytes of a file that the published schema allows."""
    document = parsed(data)
    if document is None or not _validator(POLICY_SCHEMA).is_valid(jsonable(document)):
        return None
    return {**ASKED_ANYWAY, **document}


def waivers_say(data: bytes) -> list[dict[str, Any]] | None:
    """The waivers in the bytes of a file that the published schema allows, each for a year at most."""
    document = parsed(data)
    if document is None or not _validator(WAIVERS_SCHEMA).is_valid(jsonable(document)):
        return None
    rows: list[dict[str, Any]] = document.get("waiver", [])
    last = (TODAY + timedelta(days=MAX_DAYS)).isoformat()
    return rows if all(row["expires"] <= last for row in rows) else None


def told(waiver: Waiver) -> dict[str, Any]:
    """A waiver as its file says it."""
    row = {name: value for name, value in asdict(waiver).items() if value}
    row["expires"] = waiver.expires.isoformat()
    return {**row, **({"verdicts": [str(v) for v in waiver.verdicts]} if waiver.verdicts else {})}


def parsed(data: bytes) -> dict[str, Any] | None:
    """What TOML makes of some bytes, with days as text; None when it is none that is documented."""
    if any(line.count(b".") > MAX_DOTS for line in data.split(b"\n")):
        return None
    try:
        document = tomllib.loads(data.decode("utf-8"))
        canonical_bytes(json.loads(json.dumps(document, default=_day)))
        return _days_as_text(document)  # type: ignore[no-any-return]
    except (ValueError, TypeError, RecursionError):
        return None


def _day(value: Any) -> str:
    if type(value) is date:
        return value.isoformat()
    raise TypeError("a time is nothing that a file of ours holds")


def _days_as_text(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _days_as_text(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_days_as_text(item) for item in value]
    return value.isoformat() if type(value) is date else value


@cache
def _validator(path: Path) -> Any:
    kind = jsonschema.Draft202012Validator
    return kind(json.loads(path.read_text("utf-8")), format_checker=kind.FORMAT_CHECKER)
