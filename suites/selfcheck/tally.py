"""The tally: over many seeds, is every planted fault caught and every correct implementation let through?

    python -m suites.selfcheck.tally --seeds 50

A seed changes every input of every look. Each seed takes its turn at one part of the named wrong answers.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from qualify.case import Case
from qualify.records import Verdict
from qualify.run_case import nothing
from suites.checks.controls import LOOKS, look_at, run
from suites.checks.named import PARTS
from suites.checks.rows import DTYPES
from suites.controls.table import CONTROLS
from suites.good.table import GOOD


@dataclass(frozen=True)
class Result:
    """What became of one planted fault or one correct implementation on one seed.

    Attributes:
        kind: `control` or `good`.
        name: whose.
        dtype, seed: where.
        right: caught, or let through.
        why: what caught it, what was missed, or what accused it.
        asked: how many looks were taken.
    """

    kind: str
    name: str
    dtype: str
    seed: int
    right: bool
    why: str = ""
    asked: int = 1


def controls(seed: int, dtypes: Sequence[str] = DTYPES, names: Iterable[str] = CONTROLS) -> Iterator[Result]:
    """Every planted fault on one seed, in every dtype in which it changes anything."""
    for dtype in dtypes:
        for name in names:
            if dtype in CONTROLS[name].unseen:
                continue
            levels = {"sm": "cpu", "dtype": dtype, "fault": name}
            (found,) = run(
                Case("control.fault", levels, "planted", seed, "tally"), nothing("tally")
            ).comparisons
            yield Result("control", name, dtype, seed, found.passed, found.derivation)


def good(
    seed: int, dtypes: Sequence[str] = DTYPES, names: Iterable[str] = GOOD, looks: Sequence[str] = ()
) -> Iterator[Result]:
    """Every correct implementation on one seed.

    Args:
        seed: any integer.
        dtypes: carriers.
        names: rows of `GOOD`.
        looks: names of looks; none: all of them, of the named wrong answers the part whose turn it is.
    """
    chosen = looks or [n for n in LOOKS if not n.startswith("named_") or n == f"named_{seed % PARTS}"]
    for dtype in dtypes:
        for name in names:
            subject = GOOD[name].subject()
            records = {look: look_at(look, subject, dtype, seed) for look in chosen}
            accused = [
                f"{look}: {r.verdict}, {r.reason}"
                for look, r in records.items()
                if r.verdict is not Verdict.PASSED
                and not (r.verdict is Verdict.UNSUPPORTED and not subject.deterministic)
            ]
            yield Result("good", name, dtype, seed, not accused, "; ".join(accused), len(chosen))


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints every mistake as it is made, then the tally. Exit code 1 when there was one."""
    parser = argparse.ArgumentParser(prog="tally", description=__doc__)
    parser.add_argument("--seeds", type=int, default=50, help="how many seeds")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--dtypes", default=",".join(DTYPES), help="carriers, separated by commas")
    parser.add_argument("--only", choices=("control", "good"), help="one half of the tally")
    chosen = parser.parse_args(arguments)
    if chosen.seeds < 1:
        parser.error(f"--seeds must be at least 1, got {chosen.seeds}; nothing would be tallied")
    torch.set_num_threads(1)
    start, results = time.process_time(), []
    for seed in range(chosen.first, chosen.first + chosen.seeds):
        for dtype in chosen.dtypes.split(","):  # both halves, while the evidence of a dtype is kept
            for half, ask in (("control", controls), ("good", good)):
                for result in ask(seed, [dtype]) if chosen.only in (None, half) else ():
                    results.append(result)
                    if not result.right:
                        print(_line(result), flush=True)
    print(table(results, time.process_time() - start))
    return 0 if all(result.right for result in results) else 1


def table(results: Sequence[Result], seconds: float) -> str:
    """The tally in a few lines, and what caught the faults how often."""
    lines = []
    for kind, right in (("control", "caught"), ("good", "qualified")):
        own = [r for r in results if r.kind == kind]
        if own:
            seeds = len({r.seed for r in own})
            names = len({r.name for r in own})
            held = sum(r.right for r in own)
            lines.append(f"{kind:8} {names:4} x {seeds} seeds: {held} of {len(own)} {right}")
            wrong = Counter(f"{r.name} ({r.dtype})" for r in own if not r.right)
            lines += [f"    {name}: wrong on {times} seeds" for name, times in wrong.most_common()]
    caught = Counter(r.why.partition(" ")[0] for r in results if r.kind == "control" and r.right)
    lines += [f"    {check:18} caught {times}" for check, times in caught.most_common()]
    looks = sum(r.asked for r in results if r.kind == "good")
    return "\n".join([*lines, f"{looks} looks at correct implementations; {seconds:.0f} s of CPU"])


def _line(result: Result) -> str:
    mistake = "missed" if result.kind == "control" else "accused"
    return f"{mistake} {result.name} {result.dtype} seed {result.seed}: {result.why}"


if __name__ == "__main__":
    sys.exit(main())
