"""Shards merged into one receipt: the same plan, every shard once, nothing altered; or refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

from reports.model import Body, Receipt, Shard, load
from reports.parts import rebuilt
from reports.reading import ReceiptError, reader, short, without_collector
from reports.verify import plan_digest

LATER = ("waivers", "waiver_file", "gates", "policy", "comparison")


def merge(paths: Sequence[Path]) -> dict[str, Any]:
    """The body of the receipt of all shards.

    Raises:
        ReceiptError: a file is no shard's receipt, plans or subjects differ, a shard is missing, given twice
            or altered, or the cases are not those of the plan.
    """
    with without_collector():
        shards = [(path, load(path)) for path in paths]
        ordered = _ordered(shards)
        _agree(ordered)
        first = ordered[0]
        plan = first.body.plan
        records = [case for receipt in ordered for case in receipt.body.cases]
        if len(records) != plan.cases or plan_digest(plan.profile, plan.axes, records) != plan.digest:
            raise ReceiptError(
                f"the shards must hold the {plan.cases} cases of the plan, got {len(records)} or others; "
                "a shard was cut or altered: run it again"
            )
        raw = {
            **first.raw,
            "header": _header(ordered),
            "environments": list(chain.from_iterable(_environments(r) for r in ordered)),
            "cases": _interleaved([list(_cases(r)) for r in ordered]),
            "compile_tier": _unique(chain.from_iterable(r.raw.get("compile_tier", ()) for r in ordered)),
        }
        empty = reader(Body)({**raw, "cases": []}, "the merged receipt")
        return rebuilt(raw, replace(empty, cases=tuple(_interleaved([r.body.cases for r in ordered]))))


def _ordered(shards: Sequence[tuple[Path, Receipt]]) -> list[Receipt]:
    """The receipts by the index of their shard, each there once."""
    places = [(path, _shard(path, receipt)) for path, receipt in shards]
    counts = {shard.count for _, shard in places}
    if len(counts) != 1:
        raise ReceiptError(
            f"the shards must be of one run, got runs of {sorted(counts)} shards; choose one run"
        )
    (count,) = counts
    seen = Counter(shard.index for _, shard in places)
    twice = [index for index, number in seen.items() if number > 1]
    missing = [index for index in range(count) if index not in seen]
    if twice or missing or any(not 0 <= index < count for index in seen):
        raise ReceiptError(
            f"each of the shards 1 to {count} must be given once, got {_numbers(twice)} twice and "
            f"{_numbers(missing)} missing; give every shard's receipt"
        )
    by_index = {shard.index: receipt for (_, receipt), (_, shard) in zip(shards, places, strict=True)}
    return [by_index[index] for index in range(count)]


def _numbers(indices: Sequence[int]) -> str:
    return short(", ".join(str(index + 1) for index in indices) or "none")


def _shard(path: Path, receipt: Receipt) -> Shard:
    if receipt.body.header.shard is None:
        raise ReceiptError(f"{path}: must be the receipt of a shard, got that of a whole run; leave it out")
    done = [part for part in LATER if receipt.raw.get(part)]
    if done:
        raise ReceiptError(f"{path}: must hold no {done[0]} yet, got some; merge first, then waive and gate")
    return receipt.body.header.shard


AGREED: Mapping[str, Callable[[Receipt], object]] = {
    "plan": lambda r: r.body.plan,
    "harness": lambda r: r.body.header.harness,
    "subjects' code": lambda r: [
        (s.name, s.version, s.commit, s.diff_digest, s.files) for s in r.body.subjects
    ],
}


def _agree(ordered: Sequence[Receipt]) -> None:
    """Everything that must not differ from shard to shard does not."""
    for name, read in AGREED.items():
        for i, receipt in enumerate(ordered):
            if read(receipt) != read(ordered[0]):
                raise ReceiptError(
                    f"shard {i + 1}: must have the same {name} as shard 1, got another; use one state"
                )


def _header(ordered: Sequence[Receipt]) -> dict[str, Any]:
    first = ordered[0].raw["header"]
    headers = [receipt.body.header for receipt in ordered]
    return {
        **first,
        "time": min(header.time for header in headers),
        "duration_s": max(header.duration_s for header in headers),
        "shard": None,
        "shards": [
            {"index": i, "id": receipt.id, "cases": len(receipt.body.cases)}
            for i, receipt in enumerate(ordered)
        ],
    }


def _cases(receipt: Receipt) -> Iterator[dict[str, Any]]:
    """The cases of a shard, their workers named after it."""
    assert receipt.body.header.shard is not None
    index = receipt.body.header.shard.index
    for case in receipt.raw["cases"]:
        yield {**case, "worker": _worker(index, case["worker"])} if case.get("worker") else case


def _environments(receipt: Receipt) -> Iterator[dict[str, Any]]:
    assert receipt.body.header.shard is not None
    index = receipt.body.header.shard.index
    for row in receipt.raw["environments"]:
        yield {**row, "shard": index, "worker": _worker(index, row["worker"])}


def _worker(index: int, name: str) -> str:
    return f"shard{index + 1}.{name}"


def _interleaved(parts: Sequence[Sequence[Any]]) -> list[Any]:
    """The cases in plan order: a plan is dealt out to its shards one by one."""
    return [case for row in zip_longest(*parts) for case in row if case is not None]


def _unique(rows: Iterator[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    made: list[Mapping[str, Any]] = []
    for row in rows:
        if row not in made:
            made.append(row)
    return made
