"""What a second worker is worth: the same cases with one worker and with two, by the clock and bit for bit.

    python -m suites.scaling --out DIR [--profile h100] [--select PATTERN]... [--least 1.8]

Runs the profile three times: first with as many workers as fit, to compile what is to be compiled, then with
one worker and with `--workers`, one GPU each. Verdicts, figures and a digest of every tensor that the subject
gave must be the same; the ratio of the wall times must be at least `--least`. Ends with 1 where one of these
is not so.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from qualify.receipt import read_receipt_file
from suites.subjects.digested import DIGEST

SUBJECT = "suites.subjects.digested"


@dataclass(frozen=True)
class Scaling:
    """How two runs of the same cases compare.

    Attributes:
        cases: executed in both.
        verdicts: ids of cases whose verdicts differ, or that only one run executed.
        figures: ids of cases whose comparisons differ in a number.
        tensors: ids of cases whose output digests differ.
        digests: how many cases have one.
        gpus: UUIDs that the records of the two runs name.
        seconds: wall time of the two runs.
    """

    cases: int
    verdicts: tuple[str, ...]
    figures: tuple[str, ...]
    tensors: tuple[str, ...]
    digests: int
    gpus: tuple[tuple[str, ...], tuple[str, ...]]
    seconds: tuple[float, float]

    @property
    def ratio(self) -> float:
        """How many times faster the second run was."""
        return self.seconds[0] / self.seconds[1]

    def problems(self, workers: int, least: float) -> list[str]:
        """What is not as it should be, in words.

        Args:
            workers: of the second run.
            least: the ratio that is asked for.
        """
        found = [
            f"{len(ids)} cases differ in {what}, first {ids[0]}"
            for what, ids in (("verdict", self.verdicts), ("figures", self.figures), ("bits", self.tensors))
            if ids
        ]
        if not self.digests:
            found.append("no case has a digest of its outputs; select cases that call the subject")
        if any(self.gpus) and [len(names) for names in self.gpus] != [1, workers]:
            found.append(f"the runs must use 1 and {workers} GPUs, their records name {self.gpus}")
        if self.ratio < least:
            found.append(f"the ratio must be at least {least:g}, it is {self.ratio:.2f}")
        return found


def compared(one: Mapping[str, Any], several: Mapping[str, Any]) -> Scaling:
    """Compares the bodies of two receipts, the first of one worker."""
    left, right = executed(one), executed(several)
    both = [case_id for case_id in left if case_id in right]
    digests = [(left[i].get("launch", {}).get(DIGEST), right[i].get("launch", {}).get(DIGEST)) for i in both]
    return Scaling(
        cases=len(both),
        verdicts=(
            *(i for i in both if left[i]["verdict"] != right[i]["verdict"]),
            *sorted(left.keys() ^ right.keys()),
        ),
        figures=tuple(i for i in both if figures(left[i]) != figures(right[i])),
        tensors=tuple(i for i, (a, b) in zip(both, digests, strict=True) if a != b),
        digests=sum(a is not None for a, _ in digests),
        gpus=(gpus(left), gpus(right)),
        seconds=(one["header"]["duration_s"], several["header"]["duration_s"]),
    )


def executed(body: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Case id -> case, of those that a worker ran."""
    return {case["case_id"]: case for case in body["cases"] if case.get("worker")}


def figures(case: Mapping[str, Any]) -> list[tuple[Any, ...]]:
    """What a case measured."""
    return [(c["tensor"], c["error"], c["budget"], c.get("statistics")) for c in case.get("comparisons", ())]


def gpus(cases: Mapping[str, Mapping[str, Any]]) -> tuple[str, ...]:
    """UUIDs that records name."""
    return tuple(sorted({str(case["gpu"]) for case in cases.values() if case.get("gpu")}))


def run(folder: Path, workers: int | None, words: Sequence[str]) -> Mapping[str, Any]:
    """Runs the profile into a folder and returns the body of its receipt.

    Raises:
        RuntimeError: there is no receipt.
    """
    command = [
        sys.executable,
        "-m",
        "qualify",
        "run",
        "--out",
        str(folder),
        *(() if workers is None else ("--workers", str(workers))),
        *words,
    ]
    done = subprocess.run(command, check=False, stdout=subprocess.PIPE, text=True)
    if not (folder / "receipt.json").exists():
        raise RuntimeError(f"qualify run must write a receipt, ended with {done.returncode}: {done.stdout}")
    body: Mapping[str, Any] = read_receipt_file(folder / "receipt.json")["body"]
    return body


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs, compares and prints; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m suites.scaling", description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--profile", default="h100")
    parser.add_argument("--subject", default=SUBJECT, help="one that records digests")
    parser.add_argument("--select", action="append", default=[], help="as for qualify run")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--least", type=float, default=1.8)
    parser.add_argument("--warm", action="store_true", help="everything is compiled: leave the first run out")
    given = parser.parse_args(arguments)
    words = ["--profile", given.profile, "--subject", given.subject]
    words += [word for pattern in given.select for word in ("--select", pattern)]
    if not given.warm:
        run(given.out / "warm", None, words)
    one, several = (run(given.out / f"workers-{n}", n, words) for n in (1, given.workers))
    found = compared(one, several)
    problems = found.problems(given.workers, given.least)
    report = {**asdict(found), "ratio": found.ratio, "workers": given.workers, "problems": problems}
    (given.out / "scaling.json").write_text(json.dumps(report, indent=1) + "\n")
    for count, seconds, names in zip((1, given.workers), found.seconds, found.gpus, strict=True):
        print(f"workers {count}: {seconds:.1f} s on {', '.join(names) or 'the CPU'}")
    print(f"{found.cases} cases, {found.digests} with a digest of their outputs; ratio {found.ratio:.2f}")
    for problem in problems or ["same verdicts, same figures, same bits"]:
        print(problem)
    return 1 if problems else 0


if __name__ == "__main__":
    raise SystemExit(main())
