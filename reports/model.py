"""The receipt as typed records, read from `receipt.json` without torch.

`header`, `subjects`, `plan`, `environments` and `cases` are always there; the other parts may be absent. A
receipt of a newer schema is refused rather than half understood.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qualify.axes import SkipBudget
from qualify.canonical import canonical_bytes, digest, digest_bytes
from qualify.packing import SCHEMA, SCHEMA_VERSION, packed, unpacked, written
from qualify.records import CaseRecord, Overall
from qualify.tables import WrongAnswerRow
from reports.reading import ReceiptError, parse_json, read_packed_bytes, reader, short, without_collector


@dataclass(frozen=True)
class Harness:
    """The judge itself: its version, its commit and a digest over its files."""

    name: str
    version: str
    commit: str = ""
    dirty: bool = False
    digest: str = ""


@dataclass(frozen=True)
class Shard:
    """One of `count` parts of a run; `id` and `cases` are set where a merged receipt lists it."""

    index: int
    count: int = 0
    id: str = ""
    cases: int = 0


@dataclass(frozen=True)
class Header:
    """When, how and by what the run was made, and what came of it."""

    time: str
    harness: Harness
    command: str
    profile: str
    verdict: Overall
    reasons: tuple[str, ...] = ()
    duration_s: float = 0.0
    shard: Shard | None = None
    shards: tuple[Shard, ...] = ()


@dataclass(frozen=True)
class SubjectFacts:
    """What was judged: where it came from and the digests of the files that were really imported."""

    name: str
    origin: str = ""
    package: str = ""
    version: str = ""
    commit: str = ""
    dirty: bool = False
    diff_digest: str = ""
    files: Mapping[str, str] = field(default_factory=dict)
    backend: str = ""
    offers: tuple[str, ...] = ()
    capabilities: Mapping[str, Any] = field(default_factory=dict)
    arithmetic: Mapping[str, str] = field(default_factory=dict)
    deterministic: bool = True
    import_error: str = ""
    given: str = ""
    interpreted: bool = False


@dataclass(frozen=True)
class ConstraintFacts:
    """A rule that removed cells which are meaningless on any machine: those on all the forbidden levels."""

    name: str
    because: str = ""
    removed: int = 0
    forbid: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    check: str = ""


@dataclass(frozen=True)
class Cover:
    """How many of the possible level tuples of some axes the cells cover, by the independent counter."""

    scope: str
    axes: tuple[str, ...]
    strength: int
    covered: int
    possible: int
    check: str = ""
    sm: str = ""
    seeds: tuple[int, ...] = ()


@dataclass(frozen=True)
class CheckFacts:
    """One row of the table of checks: what it asks, why it exists, and the axes that it varies."""

    name: str
    run: str = ""
    because: str = ""
    needs: tuple[str, ...] = ()
    axes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    regimes: tuple[str, ...] = ()
    strength: Any = None
    control: bool = False


@dataclass(frozen=True)
class RequirementFacts:
    """What a machine must have to run the cells that stand on the levels of `when`."""

    name: str
    when: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    fact: str = ""
    test: str = ""
    value: Any = None
    because: str = ""


@dataclass(frozen=True)
class Plan:
    """What was to be run."""

    profile: str
    digest: str
    cases: int
    axes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    constraints: tuple[ConstraintFacts, ...] = ()
    covers: tuple[Cover, ...] = ()
    must_run: int = 0
    wrong_answers: tuple[WrongAnswerRow, ...] = ()
    seed: int = 0
    sm: str = ""
    checks: tuple[CheckFacts, ...] = ()
    requirements: tuple[RequirementFacts, ...] = ()
    skip_budgets: tuple[SkipBudget, ...] = ()


@dataclass(frozen=True)
class Software:
    """An installed version, or the reason why there is none."""

    version: str | None = None
    reason: str = ""


@dataclass(frozen=True)
class Environment:
    """What one worker read about its machine from inside."""

    worker: str
    shard: int = 0
    gpu: Mapping[str, str] = field(default_factory=dict)
    software: Mapping[str, Software] = field(default_factory=dict)
    switches: Mapping[str, Any] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)
    system: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Evidence:
    """The comparison of one case that caught or excluded something."""

    case_id: str
    tensor: str
    kind: str = ""
    value: float = 0.0


@dataclass(frozen=True)
class Control:
    """A planted fault and what caught it."""

    name: str
    fault: str
    caught: bool
    caught_by: tuple[Evidence, ...] = ()
    because: str = ""
    dtype: str = ""


@dataclass(frozen=True)
class Discrimination:
    """A named wrong answer and the evidence that the subject does not give it."""

    wrong_answer: str
    excluded: bool
    best: float = 0.0
    by: tuple[Evidence, ...] = ()
    because: str = ""
    subject: str = ""
    dtype: str = ""
    site: str = ""
    format: str = ""


@dataclass(frozen=True)
class Skip:
    """Planned cases that one rule kept from running on one value seen; `budget` is that of the whole rule."""

    requirement: str
    value_seen: str
    reason: str
    cases: int
    budget: int | None = None


@dataclass(frozen=True)
class WaiverFacts:
    """A documented exception and what became of it: `used`, `unused`, `expired` or `stale`."""

    pattern: str
    owner: str
    issue: str
    reason: str
    expires: str
    state: str
    scope: Mapping[str, str] = field(default_factory=dict)
    cases: tuple[str, ...] = ()


@dataclass(frozen=True)
class Gate:
    """A rule of the release policy with the value that it saw."""

    rule: str
    value: str
    limit: str
    passed: bool
    because: str = ""


@dataclass(frozen=True)
class WaiverFile:
    """The file that the waivers came from, by the digest of its bytes, and the day they were judged on."""

    name: str
    digest: str
    day: str


@dataclass(frozen=True)
class PolicyFacts:
    """The policy whose results the gates are: its file, the day it was applied on, and its rules."""

    name: str
    digest: str
    day: str
    rules: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Moved:
    """One thing that differs from an earlier receipt; `worse` things need an answer."""

    kind: str
    what: str
    before: str
    after: str
    worse: bool


@dataclass(frozen=True)
class ComparisonWithBaseline:
    """What moved since a named earlier receipt."""

    baseline_id: str
    baseline_time: str
    moved: tuple[Moved, ...] = ()


@dataclass(frozen=True)
class Compiled:
    """One kernel compiled for one architecture, judged without running it."""

    kernel: str
    sm: str
    variant: str = ""
    registers: int = 0
    spills: int = 0
    shared_bytes: int = 0
    conversion: str = ""
    passed: bool = True
    because: str = ""


@dataclass(frozen=True)
class Body:
    """Everything that the receipt's id is the digest of."""

    header: Header
    subjects: tuple[SubjectFacts, ...]
    plan: Plan
    environments: tuple[Environment, ...]
    cases: tuple[CaseRecord, ...]
    controls: tuple[Control, ...] = ()
    discrimination: tuple[Discrimination, ...] = ()
    skips: tuple[Skip, ...] = ()
    waivers: tuple[WaiverFacts, ...] = ()
    waiver_file: WaiverFile | None = None
    gates: tuple[Gate, ...] = ()
    policy: PolicyFacts | None = None
    comparison: ComparisonWithBaseline | None = None
    compile_tier: tuple[Compiled, ...] = ()
    manifest: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Receipt:
    """A receipt that was read: its id holds for its body.

    Attributes:
        raw: the body as plain JSON values, every case whole, for those who write a new receipt from it.
        file_digest: digest of the bytes of the file, unpacked.
    """

    id: str
    body: Body
    raw: Mapping[str, Any] = field(repr=False)
    file_digest: str = ""


def load(path: Path) -> Receipt:
    """The receipt in a file, which may be packed with gzip: canonical, its id that of its body.

    Raises:
        ReceiptError: no receipt, a newer schema, a wrong type, an id that is not the digest of the body, or
            other bytes than the canonical ones of what it holds.
    """
    data = read_packed_bytes(path)
    with without_collector():
        return from_json(parse_json(data, str(path)), str(path), data)


def from_json(value: Any, name: str = "receipt", data: bytes | None = None) -> Receipt:
    """The receipt in a parsed JSON value.

    Args:
        value: what was parsed.
        name: of the file, for messages.
        data: the bytes that it was parsed from, where they are a file's.

    Raises:
        ReceiptError: as `load`.
    """
    body = check_envelope(value, name)
    try:
        text = canonical_bytes(body)
    except (ValueError, TypeError) as error:
        raise ReceiptError(f"{name}: has no canonical form: {short(error)}") from error
    actual = digest_bytes(text)
    if actual != value["id"]:
        raise ReceiptError(
            f"{name}: its id must be the digest of its body, got {short(value['id'])} for {actual}; "
            "it was edited"
        )
    if data is not None and data != (canonical := written(text)):
        raise ReceiptError(
            f"{name}: must be the canonical JSON of what it holds and one newline, got other bytes from "
            f"byte {_first_difference(data, canonical)} on; it was edited or formatted: fetch it again"
        )
    return _receipt(actual, body, name, digest_bytes(data) if data is not None else "")


def _first_difference(a: bytes, b: bytes) -> int:
    """The length of the longest common start, found by halves: the files may be large."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if a[low:middle] == b[low:middle] else (low, middle - 1)
    return low


def _receipt(receipt_id: str, body: Mapping[str, Any], name: str, file_digest: str) -> Receipt:
    try:
        raw = unpacked(body)
    except (ValueError, TypeError, ArithmeticError) as error:
        raise ReceiptError(f"{name}: {short(error, 240)}") from error
    return Receipt(receipt_id, reader(Body)(raw, name), raw, file_digest)


def check_envelope(value: Any, name: str) -> Mapping[str, Any]:
    """The body of a receipt whose schema this version understands.

    Raises:
        ReceiptError: a foreign file, a newer schema, or an envelope with missing or additional keys.
    """
    if not isinstance(value, dict) or value.get("schema") != SCHEMA:
        raise ReceiptError(
            f"{name}: must be a receipt (schema {SCHEMA!r}), got something else; check the path"
        )
    version = value.get("schema_version")
    if type(version) is int and version > SCHEMA_VERSION:
        raise ReceiptError(
            f"{name}: has schema version {short(version)}, newer than {SCHEMA_VERSION}; "
            "update gdn-qualify to read it"
        )
    if version != SCHEMA_VERSION or type(version) is not int:
        raise ReceiptError(
            f"{name}: must have schema version {SCHEMA_VERSION}, got {short(version)}; run it again"
        )
    if set(value) != {"schema", "schema_version", "id", "body"} or not isinstance(value["body"], dict):
        raise ReceiptError(f"{name}: must hold schema, schema_version, id and body alone; it was edited")
    return value["body"]


def seal(body: Mapping[str, Any]) -> dict[str, Any]:
    """A receipt as it is written, around a body whose cases are whole; its id is the digest of that.

    Raises:
        ValueError, TypeError, KeyError: as `qualify.packing.packed`.
    """
    written = packed(body)
    return {"schema": SCHEMA, "schema_version": SCHEMA_VERSION, "id": digest(written), "body": written}
