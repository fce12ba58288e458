"""Margins over many receipts: where each tensor stood at each run, as small multiples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from qualify.records import EXECUTED, FAILURES, Overall
from reports import figures, text
from reports.model import load
from reports.reading import ReceiptError, short

MAX_RECEIPTS = 400
MAX_FILES = 5000
KINDS = ("*.json", "*.json.gz")


@dataclass(frozen=True)
class Run:
    """What history needs of one receipt: its verdict and the tightest margin of each tensor."""

    id: str
    time: str
    profile: str
    subject: str
    verdict: Overall
    executed: int
    failed: int
    margins: dict[str, float]


@dataclass(frozen=True)
class Mark:
    """One run on a chart: places from 0 to 1, and what it says."""

    x: float
    y: float
    label: str
    beyond: bool


@dataclass(frozen=True)
class Track:
    """The tightest margins of one tensor over the runs of one profile and subject."""

    tensor: str
    marks: tuple[Mark, ...]
    summary: str


@dataclass(frozen=True)
class Line:
    """The runs of one profile and subject, oldest first, and a chart for each tensor."""

    profile: str
    subject: str
    runs: tuple[Run, ...]
    tracks: tuple[Track, ...]


def read_runs(folder: Path) -> tuple[list[Run], list[str]]:
    """The runs of every receipt under a folder by time, and why other JSON files were left out.

    Raises:
        ReceiptError: no folder, or too many files.
    """
    if not folder.is_dir():
        raise ReceiptError(f"{folder}: must be a folder of receipts, got none; check the path")
    paths = sorted(path for kind in KINDS for path in folder.rglob(kind) if path.is_file())
    if len(paths) > MAX_FILES:
        raise ReceiptError(
            f"{folder}: must hold at most {MAX_FILES} JSON files, got {len(paths)}; choose a smaller one"
        )
    runs: dict[str, Run] = {}
    left_out = []
    for path in paths:
        try:
            run = _run(path)
        except ReceiptError as error:
            if "must be a receipt" not in str(error):
                where = "" if str(path) in str(error) else f"{path}: "
                left_out.append(where + short(error, 300))
            continue
        if run is not None:
            runs[run.id] = run
    return sorted(runs.values(), key=lambda run: (run.time, run.id))[-MAX_RECEIPTS:], left_out


def _run(path: Path) -> Run | None:
    """What one receipt amounts to; nothing for that of a shard, which is no whole run."""
    receipt = load(path)
    body = receipt.body
    if body.header.shard is not None:
        return None
    cases = figures.judged(body.plan, body.cases)
    margins: dict[str, float] = {}
    executed = failed = 0
    for case in cases:
        for tensor, comparisons in figures.measured(case):
            budgeted = [figures.orderable(c.margin) for c in comparisons if c.budget > 0]
            if budgeted:
                margins[tensor] = max(margins.get(tensor, 0.0), *budgeted)
        executed += case.verdict in EXECUTED
        failed += case.verdict in FAILURES
    subject = ", ".join(s.name for s in body.subjects)
    return Run(
        receipt.id,
        body.header.time,
        body.header.profile,
        subject,
        body.header.verdict,
        executed,
        failed,
        margins,
    )


def lines(runs: Sequence[Run]) -> list[Line]:
    """The runs by profile and subject, each with its charts."""
    grouped: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        grouped.setdefault((run.profile, run.subject), []).append(run)
    return [Line(*key, tuple(own), tuple(_tracks(own))) for key, own in grouped.items()]


def _tracks(runs: Sequence[Run]) -> list[Track]:
    tensors = sorted({tensor for run in runs for tensor in run.margins}, key=figures.tensor_rank)
    return [_track(tensor, runs) for tensor in tensors]


def _track(tensor: str, runs: Sequence[Run]) -> Track:
    marks = []
    for i, run in enumerate(runs):
        if tensor in run.margins:
            value = run.margins[tensor]
            label = f"{text.when(run.time)}: {text.margin(value)}, {text.OVERALL_WORDS[run.verdict]}"
            marks.append(Mark(i / max(1, len(runs) - 1), min(value, 1.2) / 1.2, label, value > 1))
    held = [run.margins[tensor] for run in runs if tensor in run.margins]
    summary = f"{text.margin(held[0])} to {text.margin(held[-1])} over {text.plural(len(held), 'run')}"
    return Track(tensor, tuple(marks), summary)
