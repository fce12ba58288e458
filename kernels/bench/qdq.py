"""Bytes per second of the QDQ kernels against `Tensor.copy_` on the same tensor in the same run.

    python -m kernels.bench.qdq --out DIR

Each table row is one launch row with one conversion; both move every byte once in and once out, so the ratio
of times is the ratio of bandwidths. The row that `row_for` would choose is marked `default`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton

from kernels.bench.timing import interleaved_ms, summary_ms
from kernels.launch import LaunchRow, force_launch_row, row_for, rows_of
from kernels.qdq.host import available_conversions, launch_rows, launch_tiles, sm_of

Tensor = torch.Tensor

TARGET = 0.95
"""Ratio that the native conversion has to reach on an H200 with its default rows."""


@dataclass(frozen=True)
class Subject:
    """One tensor to move: its name, shape and dtype, and how a kernel moves it.

    Attributes:
        facts: what the launch table is asked with.
    """

    name: str
    kernel: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    facts: dict[str, object]

    def launch(self, x: Tensor, y: Tensor, conversion: str) -> None:
        """Rounds x into y."""
        if self.kernel == "qdq_rows":
            launch_rows(x, y, "e4m3", conversion)
        else:
            launch_tiles(x, y, 64, "e4m3", conversion)


def subjects(total_bytes: int, states: int) -> tuple[Subject, ...]:
    """W rows of 128 in two carriers, and fp32 states of 128 x 128 in tiles of 64."""
    rows = {dtype: total_bytes // (128 * dtype.itemsize) for dtype in (torch.bfloat16, torch.float32)}
    w = {"interpreter": False}
    return (
        Subject("w bf16", "qdq_rows", (rows[torch.bfloat16], 128), torch.bfloat16, {**w, "carrier": "bf16"}),
        Subject("w fp32", "qdq_rows", (rows[torch.float32], 128), torch.float32, {**w, "carrier": "fp32"}),
        Subject(
            "state fp32",
            "qdq_tiles",
            (states, 128, 128),
            torch.float32,
            {"carrier": "fp32", "tile": 128 * 64},
        ),
    )


def candidates(
    subject: Subject, x: Tensor, y: Tensor, sm: int
) -> Iterator[tuple[LaunchRow, str, Callable[[], None]]]:
    """Every launch row that fits, with every conversion, and the call that runs it."""

    def forced(row: LaunchRow, conversion: str) -> Callable[[], None]:
        def call() -> None:
            with force_launch_row(row.name):
                subject.launch(x, y, conversion)

        return call

    for row in rows_of(subject.kernel):
        if row.fits(sm, subject.facts):
            for conversion in available_conversions():
                yield row, conversion, forced(row, conversion)


def measure(subject: Subject, repeats: int, device: str = "cuda") -> list[dict[str, Any]]:
    """One dictionary for each launch row and conversion, with its bandwidth and its ratio to a copy."""
    x = torch.randn(subject.shape, device=device, dtype=subject.dtype)
    y = torch.empty_like(x)
    sm = sm_of(x)
    default = row_for(subject.kernel, sm, **subject.facts).name
    runs = {f"{row.name} {conv}": (row, conv, call) for row, conv, call in candidates(subject, x, y, sm)}
    calls: dict[str, Callable[[], Any]] = {name: call for name, (_, _, call) in runs.items()}
    times = interleaved_ms({"copy": lambda: y.copy_(x), **calls}, repeats)
    copy = summary_ms(times.pop("copy"))
    moved = 2 * x.numel() * x.element_size()
    results = []
    for name, series in times.items():
        row, conversion, _ = runs[name]
        figures = summary_ms(series)
        results.append(
            {
                "subject": subject.name,
                "shape": list(subject.shape),
                "launch_row": row.name,
                "default": row.name == default,
                "conversion": conversion,
                "ratio_to_copy": copy["median_ms"] / figures["median_ms"],
                "gigabytes_per_s": moved / figures["median_ms"] / 1e6,
                "copy_gigabytes_per_s": moved / copy["median_ms"] / 1e6,
                **figures,
            }
        )
    return results


def environment() -> dict[str, str]:
    """What was measured on."""
    return {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": str(torch.version.cuda),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, prints, writes `qdq.json`; 1 when a native default row misses the target, 2 without a GPU."""
    parser = argparse.ArgumentParser(prog="python -m kernels.bench.qdq", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for qdq.json")
    parser.add_argument("--bytes", type=int, default=2**31, help="size of W (default 2^31)")
    parser.add_argument("--states", type=int, default=8192, help="number of states (default 8192)")
    parser.add_argument("--repeats", type=int, default=50, help="timed calls of each candidate")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("the benchmark needs a CUDA device, found none; run it on a GPU machine", file=sys.stderr)
        return 2
    results = []
    for subject in subjects(options.bytes, options.states):
        results += measure(subject, options.repeats)
        torch.cuda.empty_cache()
    options.out.mkdir(parents=True, exist_ok=True)
    body = {"environment": environment(), "target": TARGET, "results": results}
    (options.out / "qdq.json").write_text(json.dumps(body, indent=1))
    for row in results:
        mark = "default" if row["default"] else ""
        print(
            f"{row['subject']:12} {row['launch_row']:22} {row['conversion']:9} {row['ratio_to_copy']:.3f} of "
            f"copy_ ({row['gigabytes_per_s']:.0f} of {row['copy_gigabytes_per_s']:.0f} GB/s) {mark}"
        )
    judged = [row["ratio_to_copy"] for row in results if row["default"] and row["conversion"] == "native"]
    return 0 if all(ratio >= TARGET for ratio in judged) else 1


if __name__ == "__main__":
    sys.exit(main())
