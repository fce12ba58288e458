"""What a terminal shows of a run: a bar on a terminal, plain lines elsewhere; and a case in words."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from qualify.blank import blank
from qualify.errors import Exit
from qualify.execute import Watcher
from qualify.log import read_log
from qualify.plan import PlannedCase
from qualify.records import FAILURES, CaseRecord, Verdict

LINE_EVERY = 50


class Silent:
    """Says nothing."""

    def case(self, record: CaseRecord) -> None:
        """Says nothing."""


class Failures:
    """Failures in one line each; what a subject failed of before, word for word, is not said again."""

    def __init__(self) -> None:
        self._said: set[tuple[str, str]] = set()

    def line(self, record: CaseRecord) -> str:
        """What to say of a record; empty where there is nothing new."""
        told = (record.subject, record.reason)
        if record.verdict not in FAILURES or told in self._said:
            return ""
        self._said.add(told)
        return f"{record.verdict}: {record.case_id}: {record.reason}"


class Lines:
    """One line for each new failure and for every fiftieth case."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._failures = Failures()
        self._counts: Counter[str] = Counter()

    def case(self, record: CaseRecord) -> None:
        """Takes note of a record."""
        self._counts[str(record.verdict)] += 1
        done = self._counts.total()
        if line := self._failures.line(record):
            print(line, flush=True)
        if done % LINE_EVERY == 0 or done == self._total:
            print(f"{done}/{self._total}: {words(self._counts)}", flush=True)


class Bar:
    """A progress bar with the tally of verdicts."""

    def __init__(self, progress: Progress, total: int) -> None:
        self._progress = progress
        self._failures = Failures()
        self._task = progress.add_task("cases", total=total, tally="")
        self._counts: Counter[str] = Counter()

    def case(self, record: CaseRecord) -> None:
        """Takes note of a record."""
        self._counts[str(record.verdict)] += 1
        if line := self._failures.line(record):
            self._progress.console.print(line, markup=False)
        self._progress.update(self._task, advance=1, tally=words(self._counts))


def words(counts: Mapping[str, int]) -> str:
    """A tally in words."""
    return ", ".join(f"{number} {verdict}" for verdict, number in counts.items())


@contextmanager
def watcher(total: int) -> Iterator[Watcher]:
    """A bar when standard error is a terminal, lines when it is not."""
    if not sys.stderr.isatty():
        yield Lines(total)
        return
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[tally]}", markup=False),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        yield Bar(progress, total)


def only_case(log: Path, planned: PlannedCase) -> dict[str, Any]:
    """The one case of a run, as JSON."""
    record = read_log(log).records.get(planned.case_id) or blank(
        planned, Verdict.NOT_RUN, "the run ended before the case did"
    )
    return record.to_json()


def exit_of(case: Mapping[str, Any]) -> Exit:
    """The exit code that stands for one case."""
    if case["verdict"] == Verdict.PASSED:
        return Exit.QUALIFIED
    failed = case["verdict"] in {str(v) for v in FAILURES}
    return Exit.NOT_QUALIFIED if failed else Exit.INCOMPLETE


def explanation(case: Mapping[str, Any]) -> list[str]:
    """A case in words: verdict, budgets with their derivation (those that failed first), command."""
    lines = [case["case_id"], f"  verdict   {case['verdict']}"]
    for name in ("reason", "requirement", "value_seen", "duration_s", "input_digest", "command"):
        if case.get(name):
            lines.append(f"  {name:9s} {case[name]}")
    for kernel, row in case.get("launch", {}).items():
        lines.append(f"  launch    {kernel}: {row}")
    for comparison in sorted(case.get("comparisons", ()), key=lambda row: bool(row["passed"])):
        lines += _comparison(comparison)
    return lines


def _comparison(row: Mapping[str, Any]) -> list[str]:
    mark = "passes" if row["passed"] else "FAILS"
    lines = [
        f"  {row['tensor']} ({row['kind']}) {mark}: {row['metric']} {_figure(row['error'])}, "
        f"budget {_figure(row['budget'])}, margin {_figure(row['margin'])}",
        f"      budget from: {row['derivation']}",
    ]
    if row.get("worst"):
        place = ", ".join(f"{k} {v}" for k, v in row["worst"]["place"].items())
        lines.append(
            f"      worst at {place}: expected {row['worst']['expected']}, actual {row['worst']['actual']}"
        )
    told = sorted(row.get("discrimination", {}).items(), key=lambda pair: -float(pair[1]))
    if told:
        lines.append("      tells apart: " + ", ".join(f"{name} {_figure(value)}" for name, value in told))
    for name in ("excluded", "statistics", "nonfinite", "looks_like", "because"):
        if row.get(name):
            lines.append(f"      {name.replace('_', ' ')}: {_words(row[name])}")
    return lines


def _words(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{k} {_figure(v)}" for k, v in value.items())
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _figure(value: Any) -> str:
    return f"{float(value):.4g}"
