"""The processes that run scenarios: started once for all of one size, read while they run.

A case takes its result as soon as its scenario is done, so that whatever is finished is in the log, however a
run ends. Processes that end early, or whose scenario takes too long, cost the scenario that was running; the
others are started again.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from qualify.plugin import DEVICES_VARIABLE
from suites.megatron.tuning import FORGET

LIMIT_S = 400.0
"""A scenario that takes longer has failed; the first of a size also starts its processes."""

POLL_S = 0.2
GRACE_S = 30.0
LINES = 6
"""How much of a failed process's output is kept."""

Request = Mapping[str, Any]
Result = Mapping[str, Any]


class Processes:
    """The ranks of one size, and the requests that they work through in order.

    Attributes:
        ranks: how many.
        pending: keys of the requests that have no result yet, in order.
        gave_up: whether the last result is an error, after which several ranks end by themselves.
    """

    def __init__(self, requests: Sequence[Request], ranks: str) -> None:
        self.ranks = ranks
        self.gave_up = False
        self.pending = [key_of(request, ranks) for request in requests]
        self._folder = tempfile.TemporaryDirectory()
        folder = Path(self._folder.name)
        self._out, self._output = folder / "found.json", folder / "output.txt"
        (folder / "requests.json").write_text(json.dumps([dict(request) for request in requests]))
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks]
        command += ["-m", "suites.megatron.world", "--tensor-parallel", ranks]
        command += ["--requests", str(folder / "requests.json"), "--out", str(self._out)]
        with self._output.open("wb") as output:
            self._process = subprocess.Popen(
                command, env=environment(int(ranks)), stdout=output, stderr=output, stdin=subprocess.DEVNULL
            )
        self._taken = 0

    def results(self) -> dict[str, Result]:
        """The results that are new since the last call, by key."""
        if not self._out.exists():
            return {}
        found = json.loads(self._out.read_text())
        rows = found["results"][self._taken :]
        self._taken += len(rows)
        new: dict[str, Result] = {}
        new |= {key: {**row, "facts": found["facts"]} for key, row in zip(self.pending, rows, strict=False)}
        self.pending = self.pending[len(rows) :]
        self.gave_up = bool(rows[-1]["error"]) if rows else self.gave_up
        return new

    @property
    def ended(self) -> bool:
        """Whether they have ended, by themselves or not."""
        return self._process.poll() is not None

    @property
    def started(self) -> bool:
        """Whether the ranks got as far as their first request."""
        return self._out.exists()

    def reason(self) -> str:
        """Why they ended early."""
        said = reason(self._output.read_text(errors="replace"))
        return f"ranks must write results, ended with {self._process.returncode}: {said}"

    def stop(self) -> None:
        """Ends them; what they wrote stays read."""
        for end in (self._process.terminate, self._process.kill):
            if not self.ended:
                end()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(GRACE_S)
        self._folder.cleanup()


class Results:
    """Results by size and request, for the life of a process; runs what is asked for and not there."""

    def __init__(self) -> None:
        self._known: dict[str, Result] = {}
        self._running: Processes | None = None

    def __call__(self, request: Request, ranks: str, others: Sequence[Request]) -> Result:
        """The result of a request.

        Args:
            request: what is asked for.
            ranks: how many ranks share a layer.
            others: requests of the same size that are worth running in the same processes.

        Raises:
            RuntimeError: the scenario or its processes failed.
        """
        key = key_of(request, ranks)
        while key not in self._known:
            if self._running is None or key not in self._running.pending:
                self._start(request, ranks, others)
            self._wait(key)
        found = self._known[key]
        if found["error"]:
            raise RuntimeError(found["error"])
        return found

    def _start(self, request: Request, ranks: str, others: Sequence[Request]) -> None:
        """Starts processes with a request first, and after it those that are still without a result."""
        self._stop()
        queue = [request, *(o for o in others if o != request)]
        self._running = Processes([r for r in queue if key_of(r, ranks) not in self._known], ranks)

    def _stop(self) -> None:
        if self._running is not None:
            self._running.stop()
            self._running = None

    def _wait(self, key: str) -> None:
        """Takes results until the one of a key is there or the processes have come to an end."""
        running, since = self._running, time.monotonic()
        while running is not None and key in running.pending:
            ended = running.ended  # before reading: what they wrote last is then read
            new = running.results()
            self._known.update(new)
            for done in new:
                since = time.monotonic()
                note(done, self._known[done])
            if key in running.pending and (ended or time.monotonic() - since > LIMIT_S):
                self._blame(running, ended)
                return
            if not new:
                time.sleep(POLL_S)

    def _blame(self, running: Processes, ended: bool) -> None:
        """Records the failure of the request that was running, or of all where none could be started."""
        if ended and running.gave_up:
            self._stop()
            return
        why = running.reason() if ended else f"the scenario must end within {LIMIT_S:g} s, it did not"
        for key in running.pending[: 1 if running.started else None]:
            self._known[key] = {"error": why, "findings": [], "unsupported": "", "facts": {}}
        self._stop()


def note(key: str, found: Result) -> None:
    """Says on standard error what a scenario took."""
    ranks, request = json.loads(key)
    told = " ".join(f"{name}={value}" for name, value in request.items() if name != "scenario")
    ended = found["error"] or found["unsupported"] or f"{len(found['findings'])} findings"
    seconds = found.get("seconds", 0.0)
    print(f"{request['scenario']} tp={ranks} {told}: {seconds:.1f} s, {ended}", file=sys.stderr, flush=True)


def key_of(request: Request, ranks: str) -> str:
    """A request and its size as text."""
    return json.dumps([ranks, dict(request)], sort_keys=True)


def environment(ranks: int) -> dict[str, str]:
    """The environment of the processes: as many GPUs of the run as there are ranks, and no compiler.

    Megatron fuses small functions with torch.compile; what is qualified is not among them, and without it a
    process starts in seconds.
    """
    devices = list(dict.fromkeys(d for d in os.environ.get(DEVICES_VARIABLE, "").split(",") if d))
    chosen = {"CUDA_VISIBLE_DEVICES": ",".join(devices[:ranks])} if devices else {}
    paths = os.pathsep.join(p or os.getcwd() for p in sys.path)
    fixed = {**FORGET, "TORCHDYNAMO_DISABLE": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}  # Megatron asks for it
    return {**os.environ, **chosen, **fixed, "PYTHONPATH": paths}


def reason(output: str) -> str:
    """The lines of a failed process that say why: its last exception, or its last lines."""
    lines = [line for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line and "torch.distributed.elastic" not in line]
    return " | ".join(errors[:1] or lines[-LINES:])[:600]
