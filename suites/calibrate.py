"""Calibration: how near correct implementations come to their budgets, over the cells of a profile.

    python -m suites.calibrate --profile cpu --seeds 0 1 2 --share 4
    python -m suites.calibrate --receipt reports/examples/h200-kernels/receipt.json.gz

prints, for each check and tensor, the largest margin of any correct subject (above 1 it would be accused),
and for each matched filter kind how far along the way to an accusation a correct subject came; with
--receipt of the subjects of a run that was made elsewhere, such as on a GPU.
"""

from __future__ import annotations

import argparse
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch

from qualify.plan import PlannedCase, PlannedSubject, select
from qualify.planning import make_plan
from qualify.records import CaseRecord, Comparison, Verdict
from qualify.run_case import run_case
from qualify.subjects import Subject
from reports import figures
from reports.model import load
from suites.good.table import GOOD
from suites.tables import TABLES


def planned_cases(profile: str, seed: int, share: int, patterns: Sequence[str] = ()) -> Iterator[PlannedCase]:
    """The op's cases and probes of a profile on its own machine, every `share`-th of them.

    Args:
        profile: its name.
        seed: added to the seeds of the tables; another one also picks other cases.
        share: one case in so many.
        patterns: parts of case ids, with * and ?; none is all.
    """
    plan = make_plan(TABLES, profile, [PlannedSubject("good", "good")], seed=seed)
    own, selected = TABLES.profile(profile).sm, select(plan, patterns)
    for planned in plan.cases:
        case = planned.case
        chosen = case.case_id in selected and zlib.crc32(case.case_id.encode()) % share == seed % share
        of_the_op = case.check.startswith(("op.", "probe.")) and not planned.control
        if chosen and of_the_op and case.levels.get("sm") == own:
            yield planned


def judged(
    subjects: Mapping[str, Subject], planned: Iterable[PlannedCase]
) -> Iterator[tuple[str, CaseRecord]]:
    """Every subject's record on every case; the evidence of a case is made once for all of them."""
    for one in planned:
        for name, subject in subjects.items():
            yield name, run_case(one, subject)


def nearness(comparison: Comparison) -> float:
    """How far along the way to a failure a comparison is: 1 fails."""
    return comparison.margin if comparison.kind in figures.MEASURED else float(not comparison.passed)


def accusation(name: str, record: CaseRecord) -> str:
    """What a correct subject was accused of, in one line; empty when it was not."""
    wrong = [c for c in record.comparisons if not c.passed]
    if not wrong and record.verdict not in (Verdict.ERROR, Verdict.CRASH):
        return ""
    return f"FAILED {name}: {record.case_id}: {record.reason}"


def largest_nearness(records: Iterable[CaseRecord]) -> dict[tuple[str, str, str], float]:
    """The largest nearness by check, carrier and tensor."""
    largest: dict[tuple[str, str, str], float] = defaultdict(float)
    for record in records:
        for comparison in (c for c in record.comparisons if c.kind in figures.MEASURED):
            key = (record.check, record.levels.get("dtype", ""), comparison.tensor)
            largest[key] = max(largest[key], nearness(comparison))
    return dict(largest)


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table; the exit code is 1 when a correct subject fails.

    Args:
        arguments: of the command line; None takes the process's own.
    """
    parser = argparse.ArgumentParser(prog="python -m suites.calibrate")
    parser.add_argument("--receipt", type=Path, help="read the cases of a run instead of running any")
    parser.add_argument("--profile", default="cpu")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--share", type=int, default=8)
    parser.add_argument("--select", nargs="*", default=[], help="parts of case ids, with * and ?")
    parser.add_argument("--subjects", nargs="*", default=list(GOOD))
    options = parser.parse_args(arguments)
    if options.receipt:
        body = load(options.receipt).body
        recorded = figures.judged(body.plan, body.cases)
        return report(recorded, sum(bool(accusation(case.subject, case)) for case in recorded))
    torch.set_num_threads(1)
    subjects = {name: GOOD[name].subject() for name in options.subjects}
    records: list[CaseRecord] = []
    accused = 0
    for seed in options.seeds:
        cells = planned_cases(options.profile, seed, options.share, options.select)
        for name, record in judged(subjects, cells):
            records.append(record)
            line = accusation(name, record)
            accused += bool(line)
            if line:
                print(line, flush=True)
    return report(records, accused)


def report(records: Sequence[CaseRecord], accused: int) -> int:
    """Prints the largest nearness of each check, carrier and tensor; returns the exit code.

    Args:
        records: of every case that ran.
        accused: how many of them failed.
    """
    for (check, dtype, tensor), value in sorted(largest_nearness(records).items()):
        print(f"{check:18} {dtype:5} {tensor:14} {value:.2f}")
    ran = sum(bool(record.comparisons) for record in records)
    print(f"{ran} cases, {accused} failed")
    return int(bool(accused) or not ran)


if __name__ == "__main__":
    raise SystemExit(main())
