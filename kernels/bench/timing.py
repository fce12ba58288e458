"""Device time of launches, measured with events, candidates interleaved in one run."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from typing import Any

import torch


def interleaved_ms(
    candidates: Mapping[str, Callable[[], Any]], repeats: int = 50, warmup: int = 5
) -> dict[str, list[float]]:
    """Milliseconds of each call of each candidate, round robin, so that drifting clocks hit all alike.

    The working set of a candidate must be far larger than the L2 cache; nothing is flushed between calls.

    Args:
        candidates: name -> a call that launches work on the current CUDA device.
        repeats: timed calls of each.
        warmup: untimed calls of each, which also compile.
    """
    for call in candidates.values():
        for _ in range(warmup):
            call()
    torch.cuda.synchronize()
    events: dict[str, list[tuple[Any, Any]]] = {name: [] for name in candidates}
    for _ in range(repeats):
        for name, call in candidates.items():
            start, end = event(), event()
            start.record()
            call()
            end.record()
            events[name].append((start, end))
    torch.cuda.synchronize()
    return {name: [float(a.elapsed_time(b)) for a, b in pairs] for name, pairs in events.items()}


def recorded(call: Callable[[], Any]) -> Callable[[], Any]:
    """The launches of a call as one CUDA graph: a replay takes the time of the device, not of the host."""
    before: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    before.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(before):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(before)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    replay: Callable[[], Any] = graph.replay
    return replay


def event() -> Any:
    """A CUDA event that keeps its time."""
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def summary_ms(times: list[float]) -> dict[str, float]:
    """Median, and the 10th and 90th percentile, of a list of milliseconds."""
    deciles = statistics.quantiles(times, n=10)
    return {"median_ms": statistics.median(times), "p10_ms": deciles[0], "p90_ms": deciles[-1]}
