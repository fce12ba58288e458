"""A receipt verified offline: nothing in the file is trusted but what follows from the rest of it.

Every step says what it found. The verdict is derived again from the cases by the code that derives it for a
run; the cover is counted again; every digest, the schema and the signature are checked.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime
from pathlib import Path
from typing import Any

from qualify.canonical import canonical_bytes, digest, digest_bytes
from qualify.packing import packed, written
from qualify.records import EXECUTED, CaseRecord, Verdict
from qualify.tables import Tables
from qualify.toml_file import TomlFile
from qualify.verdicts import of_comparisons
from qualify.waivers import waivers_in
from reports import cover, effort, gates, gating, page, parts, rederive, replan, schema, signing
from reports.identities import Identity
from reports.model import Body, Evidence, Receipt, from_json
from reports.reading import ReceiptError, parse_json, read_bytes, read_packed_bytes, short, without_collector

WITHOUT_COMPARISON = frozenset({Verdict.ERROR, Verdict.CRASH, Verdict.HANG})
SIGNED = "filter"
"""The kind of comparison whose figure may be below zero: a projection."""

MAX_NAMED = 3


@dataclass(frozen=True)
class Finding:
    """One step of the verification and what it found."""

    step: str
    passed: bool
    found: str


@dataclass(frozen=True)
class Verification:
    """All findings; a receipt is verified when every step passed."""

    receipt: Receipt | None
    findings: tuple[Finding, ...]

    @property
    def passed(self) -> bool:
        """Whether every step passed."""
        return bool(self.findings) and all(f.passed for f in self.findings)


def verify(
    path: Path,
    envelope: Path | None = None,
    trusted: Sequence[Path] | Identity = (),
    wheels: Sequence[Path] = (),
    policy: TomlFile | None = None,
    waivers: TomlFile | None = None,
    tables: Tables | None = None,
    shown: Path | None = None,
) -> Verification:
    """Verifies a receipt and, when an envelope is given, its signature.

    Args:
        path: `receipt.json`.
        envelope: the DSSE envelope beside it.
        trusted: public keys, or an identity that sigstore certifies; the latter is not checked offline.
        wheels: what is about to be released; each must be what was signed for.
        policy, waivers: files that must be those that were applied.
        tables: what the plan must follow from.
        shown: a page that must be the one that this version makes of the receipt.
    """
    with without_collector():
        receipt, findings = _opened(path)
        if receipt is None:
            return Verification(None, tuple(findings))
        findings.append(_finding("its size is that of a receipt", _size, receipt))
        if not all(finding.passed for finding in findings):
            return Verification(receipt, tuple(findings))
        findings += [_finding(step, check, receipt) for step, check in STEPS]
        if tables is not None:
            findings.append(_finding("the tables given", lambda r: replan.differences(r, tables), receipt))
        if policy is not None:
            findings.append(_finding("the policy given", lambda r: _is_policy(r, policy), receipt))
        if waivers is not None:
            findings.append(_finding("the waivers given", lambda r: _are_waivers(r, waivers), receipt))
        if shown is not None:
            findings.append(_finding("the page given", lambda r: _page(r, shown), receipt))
        findings.append(_finding("files of the manifest", lambda r: _manifest(r, path.parent), receipt))
        if envelope is not None:
            findings.append(_signature(receipt, envelope, trusted, wheels))
    return Verification(receipt, tuple(findings))


def _opened(path: Path) -> tuple[Receipt | None, list[Finding]]:
    """The receipt read from its bytes, as far as that goes; held against the schema and its one text."""
    step = "the file is canonical, byte for byte, and its id is the digest of its body"
    try:
        data = read_packed_bytes(path)
        value = parse_json(data, path.name)
        receipt = from_json(value, path.name, data)
    except ReceiptError as error:
        return None, [Finding(step, False, str(error))]
    return receipt, [
        Finding(step, True, receipt.id),
        _finding("the published schema allows it", lambda _: _schema(value), receipt),
        _finding("nothing is said twice or in another order", lambda r: _said_once(r, data), receipt),
    ]


def _schema(value: Any) -> Iterator[str]:
    schema.published()(value, "receipt")
    yield from ()


def _said_once(receipt: Receipt, data: bytes) -> Iterator[str]:
    """What the file means has one text: nothing is said twice, in another order or in other words."""
    if written(canonical_bytes(packed(receipt.raw))) != data:
        yield "another text with the same content"


def _size(receipt: Receipt) -> Iterator[str]:
    yield from effort.excessive(receipt.body)


def _finding(step: str, check: Callable[[Receipt], Iterator[str]], receipt: Receipt) -> Finding:
    wrong = []
    try:
        for problem in check(receipt):
            wrong.append(problem)
            if len(wrong) > MAX_NAMED:
                break
    except (ReceiptError, ValueError, KeyError, TypeError, ArithmeticError) as error:
        wrong.append(short(error, 300))
    more = " and more" if len(wrong) > MAX_NAMED else ""
    return Finding(step, not wrong, "; ".join(wrong[:MAX_NAMED]) + more if wrong else "holds")


def _cases(receipt: Receipt) -> Iterator[str]:
    """Each case has its own id, and its verdict before any waiver is what its comparisons say."""
    seen: set[str] = set()
    for case in rederive.as_run(receipt.body.cases, receipt.body.waivers):
        if case.case_id in seen:
            yield f"{case.case_id} occurs twice"
        seen.add(case.case_id)
        yield from _case(case)


def _case(case: CaseRecord) -> Iterator[str]:
    expected = of_comparisons(case.comparisons)[0]
    if case.verdict in EXECUTED - WITHOUT_COMPARISON - {Verdict.WAIVED} and case.verdict is not expected:
        yield f"{case.case_id} is {case.verdict}, its comparisons say {expected}"
    if case.verdict not in EXECUTED and case.comparisons:
        yield f"{case.case_id} is {case.verdict} and yet compared something"
    for c in case.comparisons:
        if (c.error < 0 and c.kind != SIGNED) or c.error == -math.inf:
            yield f"{case.case_id}: {c.tensor} has an error of {c.error}"


def _plan(receipt: Receipt) -> Iterator[str]:
    """Nothing planned is missing: the plan's digest is that of the cases."""
    plan, cases = receipt.body.plan, receipt.body.cases
    header = receipt.body.header
    if header.profile != plan.profile:
        yield f"the header says profile {header.profile!r}, the plan {plan.profile!r}"
    if header.shard is not None:
        yield f"this is shard {header.shard.index + 1} of {header.shard.count}; merge them all first"
        return
    must_run = sorted(c.case_id for c in cases if c.must_run)
    if (len(cases), len(must_run)) != (plan.cases, plan.must_run):
        yield (
            f"{plan.cases} cases with {plan.must_run} that must run were planned, "
            f"{len(cases)} with {len(must_run)} are recorded"
        )
    if plan_digest(plan.profile, plan.axes, cases) != plan.digest:
        yield "the cases are not those of the plan's digest"


def plan_digest(profile: str, axes: Mapping[str, Sequence[str]], cases: Sequence[CaseRecord]) -> str:
    """The digest of a plan, from its cases."""
    return digest(
        {
            "profile": profile,
            "axes": {axis: list(levels) for axis, levels in axes.items()},
            "cases": sorted(c.case_id for c in cases),
            "must_run": sorted(c.case_id for c in cases if c.must_run),
        }
    )


def _cover(receipt: Receipt) -> Iterator[str]:
    for proof, wrong in cover.recounted(receipt.body.plan, receipt.body.cases):
        if wrong:
            yield f"{proof.scope}: {wrong}"
    yield from (
        f"{check} has cases and no proof of cover"
        for check in cover.uncounted(receipt.body.plan, receipt.body.cases)
    )


def _parts(receipt: Receipt) -> Iterator[str]:
    """Controls, wrong answers and skips say what the cases say."""
    body = receipt.body
    if body.controls != parts.controls(body):
        yield "the controls are not those of the cases"
    by_id = {case.case_id: case for case in body.cases}
    required = rederive.excluded(body, body.cases)
    if len(required) != len(body.discrimination):
        yield f"{len(required)} wrong answers had to be ruled out, {len(body.discrimination)} are recorded"
    for found, row in zip(required, body.discrimination, strict=False):
        place = (
            found.subject,
            found.wrong_answer,
            found.dtype,
            found.site,
            found.format,
            bool(found.evidence),
        )
        if place != (row.subject, row.wrong_answer, row.dtype, row.site, row.format, row.excluded):
            yield f"{row.wrong_answer} at {row.dtype} {row.site} {row.format}: the cases say otherwise"
        if len(row.by) != len(found.evidence) or not all(
            _excludes(by_id, e, row.wrong_answer) for e in row.by
        ):
            yield f"{row.wrong_answer} at {row.dtype} {row.site} {row.format}: its evidence is in no case"
    builds = [c for case in body.cases for c in case.comparisons if c.kind == "build"]
    recorded = Counter(
        (f"{c.kernel}:{c.variant}" if c.variant else c.kernel, c.passed) for c in body.compile_tier
    )
    if builds and recorded != Counter((c.tensor, c.passed) for c in builds):
        yield "the compile tier is not that of the cases"
    if body.skips != parts.skips(body):
        yield "the skips are not those of the cases, under the budgets of the plan"


def _excludes(cases: Mapping[str, CaseRecord], evidence: Evidence, wrong_answer: str) -> bool:
    """Whether a passing comparison of a passing case tells the wrong answer apart, as the evidence says.

    Which of several is named is not asked: figures are recorded with few digits, and near ones may swap.
    """
    case = cases.get(evidence.case_id)
    return (
        case is not None
        and case.verdict is Verdict.PASSED
        and any(
            (c.tensor, c.kind) == (evidence.tensor, evidence.kind)
            and c.passed
            and (wrong_answer in c.excluded or c.discrimination.get(wrong_answer, 0.0) > 1.0)
            for c in case.comparisons
        )
    )


def _skips(receipt: Receipt) -> Iterator[str]:
    """A skip holds in the recorded environment: its rule is in the plan, its value is what was seen there."""
    known = {row.name: row for row in receipt.body.plan.requirements}
    machines = {e.gpu.get("sm", "") for e in receipt.body.environments}
    seen = {"sm_number": {str(_sm_number(sm)) for sm in machines}}
    for case in receipt.body.cases:
        if case.verdict is not Verdict.SKIPPED:
            continue
        row = known.get(case.requirement)
        if row is None:
            if known:
                yield f"{case.case_id}: no requirement {case.requirement!r} is planned"
            continue
        levels = {**case.levels, "regime": case.regime}
        if not all(levels.get(axis) in wanted for axis, wanted in row.when.items()):
            yield f"{case.case_id}: {case.requirement} does not touch its levels"
        if case.value_seen not in seen.get(row.fact, {case.value_seen}):
            yield f"{case.case_id}: no recorded environment has {row.fact} {case.value_seen}"
        if _meets(row.test, str(row.value), case.value_seen):
            yield f"{case.case_id}: {case.value_seen} meets {case.requirement}, and yet it was skipped"


def _machines(receipt: Receipt) -> Iterator[str]:
    """Every case ran in a worker and on a GPU whose environment is recorded.

    One that crashed may not have got as far as to say where. Parts of a GPU go by names of their own.
    """
    environments = receipt.body.environments
    workers = {e.worker for e in environments}
    if len(workers) != len(environments):
        yield "a worker has two environments"
    gpus = {e.gpu["uuid"] for e in environments if e.gpu.get("uuid")}
    whole = gpus and not any(e.gpu.get("mig") == "True" for e in environments)
    for case in receipt.body.cases:
        ran = case.verdict in (Verdict.PASSED, Verdict.STALE_WAIVER)
        if case.worker not in workers and (ran or case.worker):
            yield f"{case.case_id} ran in {case.worker or 'no worker'}, which no recorded environment is of"
        if whole and case.gpu and case.gpu not in gpus:
            yield f"{case.case_id} ran on {case.gpu}, which no recorded environment has"


def _shards(receipt: Receipt) -> Iterator[str]:
    """The shards that a merged receipt lists hold its cases, each once."""
    shards = receipt.body.header.shards
    if shards and [shard.index for shard in shards] != list(range(len(shards))):
        yield "a shard is missing or listed twice"
    if shards and sum(shard.cases for shard in shards) != len(receipt.body.cases):
        yield "the shards do not add up to the cases"


def _sm_number(text: str) -> int:
    major, _, minor = text.partition(".")
    return int(major) * 10 + int(minor or 0) if major.isdecimal() and (minor or "0").isdecimal() else 0


def _meets(test: str, wanted: str, seen: str) -> bool:
    if test == "is":
        return seen == wanted
    try:
        return float(seen) >= float(wanted)
    except ValueError:
        return False


def _waivers(receipt: Receipt) -> Iterator[str]:
    """Waived and stale cases are what the recorded waivers make of the cases as they were run."""
    body = receipt.body
    if body.waiver_file is None:
        if body.waivers:
            yield "waivers are recorded without the file that they came from"
        touched = (Verdict.WAIVED, Verdict.STALE_WAIVER)
        yield from (f"{c.case_id} is {c.verdict} by no waiver" for c in body.cases if c.verdict in touched)
        return
    day = date.fromisoformat(body.waiver_file.day)
    if day < _day(body.header.time):
        yield f"the waivers were judged on {day}, before the run"
    run = rederive.as_run(body.cases, body.waivers)
    yield from (f"{c.case_id} is waived by no waiver" for c in run if c.verdict is Verdict.WAIVED)
    records, results = gating.applied([rederive.waiver_of(w) for w in body.waivers], receipt, run, day)
    for recorded, derived in zip(body.cases, records, strict=True):
        if recorded != derived:
            yield f"{recorded.case_id} is {recorded.verdict}, the waivers make it {derived.verdict}"
    for waiver, result in zip(body.waivers, results, strict=False):
        if (waiver.state, waiver.cases) != (result.state, result.cases):
            yield f"waiver {waiver.pattern} is {waiver.state}, the cases make it {result.state}"
    if len(results) != len(body.waivers):
        yield "a waiver is recorded that belongs to another profile"


def _day(text: str) -> date:
    return datetime.fromisoformat(text).date()


def _gates(receipt: Receipt) -> Iterator[str]:
    """The results of the recorded policy are those that follow from the rest."""
    body = receipt.body
    if body.policy is None:
        if body.gates or body.comparison:
            yield "results are recorded without the policy that they are of; gate again"
        return
    if date.fromisoformat(body.policy.day) < _day(body.header.time):
        yield f"the policy was applied on {body.policy.day}, before the run"
    recorded, derived = Counter(body.gates), Counter(gating.results_of(body))
    for found in recorded - derived:
        yield f"{found.rule} is recorded as {found.value}, asked: {found.limit}; it does not follow"
    yield from (f"{gate.rule} is not recorded" for gate in derived - recorded)


def _is_policy(receipt: Receipt, file: TomlFile) -> Iterator[str]:
    """The file is the policy that was applied, by its digest and by its rules."""
    found = receipt.body.policy
    if found is None:
        yield "no policy was applied"
    elif found.digest != file.digest:
        yield f"{found.name} with {found.digest} was applied, {file.name} has {file.digest}"
    elif canonical_bytes(gates.rules_in(file)) != canonical_bytes(found.rules):
        yield f"the recorded rules are not those of {file.name}"


def _are_waivers(receipt: Receipt, file: TomlFile) -> Iterator[str]:
    """The file holds the waivers that were applied, by its digest and row by row."""
    body = receipt.body
    found = body.waiver_file
    if found is None:
        yield "no waivers were applied"
    elif found.digest != file.digest:
        yield f"{found.name} with {found.digest} was applied, {file.name} has {file.digest}"
    else:
        own = [
            w for w in waivers_in(file, date.fromisoformat(found.day)) if w.profile in ("", body.plan.profile)
        ]
        if own != [rederive.waiver_of(row) for row in body.waivers]:
            yield f"the recorded waivers are not those of {file.name}"


def _verdict(receipt: Receipt) -> Iterator[str]:
    """The verdict and its reasons are those that follow."""
    found = rederive.judgement(receipt.body)
    header = receipt.body.header
    if found.overall is not header.verdict:
        why = f" ({found.reasons[0]})" if found.reasons else ""
        yield f"recorded {header.verdict}, what follows is {found.overall}{why}"
    elif found.reasons != header.reasons:
        yield "the recorded reasons are not those that follow"


STEPS: Sequence[tuple[str, Callable[[Receipt], Iterator[str]]]] = (
    ("every case agrees with itself", _cases),
    ("nothing planned is missing", _plan),
    ("the cover, counted again", _cover),
    ("controls, wrong answers and skips follow from the cases", _parts),
    ("every skip holds", _skips),
    ("every case ran on a recorded machine", _machines),
    ("the shards of the run", _shards),
    ("waivers, applied again", _waivers),
    ("the policy, applied again", _gates),
    ("the verdict, derived again", _verdict),
)


def _page(receipt: Receipt, path: Path) -> Iterator[str]:
    """The page says what the receipt says, letter for letter as this version writes it."""
    if page.render(receipt, disagreement(receipt.body)).encode("utf-8", "replace") != read_bytes(path):
        yield f"{path.name} is another page than this version makes of the receipt; render your own"


def _manifest(receipt: Receipt, folder: Path) -> Iterator[str]:
    """Every file of the manifest lies beside the receipt, unaltered."""
    for name, wanted in receipt.body.manifest.items():
        path = folder / name
        if Path(name).is_absolute() or ".." in Path(name).parts:
            yield f"{name} lies outside the receipt's folder"
        elif not path.is_file():
            yield f"{name} is missing"
        elif digest_bytes(read_bytes(path)) != wanted:
            yield f"{name} was altered"


def _signature(
    receipt: Receipt, envelope: Path, trusted: Sequence[Path] | Identity, wheels: Sequence[Path]
) -> Finding:
    step = "the signature"
    try:
        if not trusted:
            raise ReceiptError(
                "a signature is worth whom you trust; give a public key with --key or a --sigstore-identity"
            )
        made = signing.verify_envelope(envelope, trusted)
        digests = {wheel.name: digest_bytes(read_bytes(wheel, limit=2**32)) for wheel in wheels}
        wrong = signing.agrees(made.statement, receipt, digests)
    except ReceiptError as error:
        return Finding(step, False, str(error))
    return Finding(step, not wrong, wrong or f"by {made.by}, over this very file")


def disagreement(body: Body) -> str:
    """Why the recorded verdict does not follow from the rest, for the page; empty when it does."""
    for problem in effort.excessive(body):
        return problem
    found = rederive.judgement(body)
    return "" if found.overall is body.header.verdict else f"it would be {found.overall}"
