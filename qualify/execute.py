"""Runs a plan: spawns pytest, watches the log, kills what hangs, and loses nothing that was finished."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from qualify.blank import blank
from qualify.errors import UsageError
from qualify.hangs import Deadline, descendants_seconds, own_seconds
from qualify.log import LOG_NAME, LogReader, LogWriter, read_log
from qualify.plan import PLAN_NAME, Plan, PlannedCase, plan_from_json, plan_to_json
from qualify.plugin import DEVICES_VARIABLE, PARENT_VARIABLE, SELECTED_NAME, SHARD_VARIABLE, STOPPED_FOLDER
from qualify.records import CaseRecord, Verdict
from qualify.requirements import Requirement, unmet

OUTPUT_NAME = "output.txt"
RECEIPT_NAME = "receipt.json"
HANGS_ALLOWED = 1
"""After one more than this the rest of the subject's cases is not run."""

CRASHES_ALLOWED = 3
CHUNK = 16
"""Cases that a worker is sent at once: so few that none is left with work when the others have ended."""

MEMORY: Mapping[str, str] = {
    "MALLOC_MMAP_THRESHOLD_": str(32 * 2**20),
    "MALLOC_TRIM_THRESHOLD_": str(2**30),
}
"""What glibc is told: the next case wants the memory that one gives back, and having it anew takes a tenth of
the time of a run on a CPU."""

POLL_S = 0.1
GRACE_S = 5.0


class Watcher(Protocol):
    """Who is told how a run goes."""

    def case(self, record: CaseRecord) -> None:
        """A case has a record."""


@dataclass(frozen=True)
class Run:
    """How a plan is run.

    Attributes:
        folder: where plan, log and output go.
        workers: processes that run cases.
        devices: GPUs that the run was given; empty on a CPU.
        facts: what requirements look at.
        requirements: the table of them.
        selected: ids that the user chose.
        shard: (index, count) of this part of the plan.
        command: the command line, for the receipt.
        harness: what the receipt says of the judge.
    """

    folder: Path
    workers: int
    devices: tuple[str, ...]
    facts: Mapping[str, str]
    requirements: tuple[Requirement, ...]
    selected: frozenset[str]
    shard: tuple[int, int] = (0, 1)
    command: str = ""
    harness: Mapping[str, Any] = field(default_factory=dict)


def prepare_folder(folder: Path, plan: Plan, *, resume: bool = False) -> None:
    """Makes a folder ready for a run: new, empty, or holding the same plan when resuming.

    Raises:
        UsageError: it holds something else, or cannot be written.
    """
    held = [name for name in (PLAN_NAME, LOG_NAME, RECEIPT_NAME) if (folder / name).exists()]
    if held and not resume:
        raise UsageError(
            f"--out must not hold another run, got {folder} with {held[0]}; choose another or --resume"
        )
    if resume and read_plan(folder).digest != plan.digest:
        raise UsageError(f"--resume needs the same plan, got another in {folder}; run it into a new folder")
    try:
        (folder / STOPPED_FOLDER).mkdir(parents=True, exist_ok=True)
        (folder / PLAN_NAME).write_text(plan_to_json(plan))
    except OSError as error:
        raise UsageError(
            f"--out must be a folder that can be written, got {folder} ({error.strerror})"
        ) from error


@contextlib.contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Within it, no other run works in the folder.

    Raises:
        UsageError: one does.
    """
    held = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise UsageError(
            f"--out must have no run at work in it, got {folder}; wait for it or end it"
        ) from error
    except OSError:
        pass  # a file system without locks
    try:
        yield
    finally:
        os.close(held)


def read_plan(folder: Path) -> Plan:
    """The plan of a run.

    Raises:
        UsageError: the folder holds none.
    """
    try:
        return plan_from_json((folder / PLAN_NAME).read_text())
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"a run's folder holds a readable {PLAN_NAME}, got {folder} ({error}); check the path"
        ) from error


def in_shard(plan: Plan, shard: tuple[int, int]) -> list[PlannedCase]:
    """The planned cases that belong to a shard, dealt out one by one."""
    index, count = shard
    return [planned for i, planned in enumerate(plan.cases) if i % count == index]


def execute(plan: Plan, run: Run, watcher: Watcher) -> bool:
    """Runs what is left of a plan in a prepared folder.

    Returns:
        Whether it ran to its end: False after an interruption.

    Raises:
        OSError: the log cannot be written.
    """
    log = LogWriter(run.folder / LOG_NAME)
    facts = {"facts": dict(run.facts), "harness": dict(run.harness), "shard": list(run.shard)}
    log.write("run", plan=plan.digest, command=run.command, **facts)
    done = read_log(run.folder / LOG_NAME).records
    left = [p for p in in_shard(plan, run.shard) if p.case_id not in done]
    todo = []
    for planned in left:
        record = _unreachable(planned, run)
        if record is None:
            todo.append(planned)
        else:
            log.finished(record)
            watcher.case(record)
    ended = _Session(plan, run, log, watcher).run(todo) if todo else True
    log.write("ended", complete=ended)
    return ended


def _unreachable(planned: PlannedCase, run: Run) -> CaseRecord | None:
    """The record of a case that is decided before anything starts: a skip or an exclusion."""
    case = planned.case
    missing = unmet({**case.levels, "regime": case.regime}, run.facts, run.requirements)
    if missing is not None:
        seen = {"requirement": missing.requirement, "value_seen": missing.value_seen}
        return blank(planned, Verdict.SKIPPED, missing.reason, **seen)
    if planned.case_id not in run.selected:
        return blank(planned, Verdict.EXCLUDED, "left out by --select", requirement="selection")
    return None


@dataclass
class _Session:
    """Pytest with its workers, watched until every case has a record; started again should it end before."""

    plan: Plan
    run_: Run
    log: LogWriter
    watcher: Watcher
    hangs: Counter[str] = field(default_factory=Counter)
    crashes: Counter[str] = field(default_factory=Counter)
    running: dict[str, dict[str, Any]] = field(default_factory=dict)
    recorded: set[str] = field(default_factory=set)
    killed: set[str] = field(default_factory=set)
    deadlines: dict[str, Deadline] = field(default_factory=dict)

    def run(self, todo: Sequence[PlannedCase]) -> bool:
        """Runs cases to their records; returns False after an interruption.

        A subject may bring pytest itself down. As long as each start of it adds a record, it is started again
        for what is left.
        """
        self.reader = LogReader(self.run_.folder / LOG_NAME)
        self.reader.poll()
        left = list(todo)
        while left:
            if not self.spawn(left):
                return False
            before, left = left, [p for p in left if p.case_id not in self.recorded]
            if len(left) == len(before) and not self.killed:
                break
        return True

    def spawn(self, todo: Sequence[PlannedCase]) -> bool:
        """Runs pytest once on some cases; returns False after an interruption."""
        self.killed.clear()
        folder = self.run_.folder
        (folder / SELECTED_NAME).write_text("".join(f"{p.case_id}\n" for p in todo))
        with (folder / OUTPUT_NAME).open("ab") as output:
            process = subprocess.Popen(
                _command(folder, min(self.run_.workers, len(todo))),
                stdout=output,
                stderr=output,
                stdin=subprocess.DEVNULL,
                env=_environment(self.run_),
                start_new_session=True,
            )
        try:
            while process.poll() is None:
                self.step()
                time.sleep(POLL_S)
            self.step()
            self.sweep()
            return True
        except KeyboardInterrupt:
            return False
        finally:
            _end_group(process)
            self.step()

    def step(self) -> None:
        """Takes in what the workers logged, and kills the worker of a case that runs too long."""
        for event in self.reader.poll():
            handler = _HANDLERS.get(event["event"])
            if handler is not None:
                handler(self, event)
        for case_id, event in list(self.running.items()):
            pid = int(event["pid"])
            if self.deadlines[case_id].passed(
                time.time(), own_seconds(pid), partial(descendants_seconds, pid)
            ):
                self.hang(case_id, event)

    def hang(self, case_id: str, event: Mapping[str, Any]) -> None:
        """Kills a worker and records that its case hung.

        Who was at work when the time was over may have compiled, and a planted fault is the project's own and
        says nothing of whoever is judged: the first time, these are run once more when the others have ended.
        """
        with contextlib.suppress(ProcessLookupError):
            os.kill(event["pid"], signal.SIGKILL)
        importing = event.get("importing")
        what = f"importing {importing}" if importing else "it"
        reason = f"{what} did not end within {event['limit_s']:g} s"
        if self.may_repeat(case_id) and not importing:
            self.killed.add(case_id)
            self.running.pop(case_id, None)
            self.log.write("repeated", case_id=case_id, reason=reason)
            return
        self.record(case_id, Verdict.HANG, reason, event)
        subject = self.plan.by_id[case_id].case.subject
        self.hangs[subject] += 1 + HANGS_ALLOWED * bool(importing)
        if self.hangs[subject] > HANGS_ALLOWED:
            hung = f"importing {subject}" if importing else f"{self.hangs[subject]} cases of {subject}"
            self.stop(subject, f"not run: {hung} hung")

    def may_repeat(self, case_id: str) -> bool:
        """Whether a case that had its time is run once more: a planted fault, and a few that were at work."""
        planned, repeated = self.plan.by_id[case_id], self.reader.log.repeated
        if planned.control or case_id in repeated:
            return case_id not in repeated
        subject = planned.case.subject
        before = sum(self.plan.by_id[other].case.subject == subject for other in repeated)
        return self.deadlines[case_id].busy and before <= HANGS_ALLOWED

    def crash(self, case_id: str, event: Mapping[str, Any]) -> None:
        """Records that a worker died under a case, unless it has a record or is to be run once more."""
        if case_id not in self.recorded | self.killed and case_id in self.plan.by_id:
            self.record(case_id, Verdict.CRASH, "the process ended while the case ran; see output.txt", event)

    def finished(self, record: CaseRecord) -> None:
        """Takes note of a record in the log."""
        self.running.pop(record.case_id, None)
        if record.case_id in self.recorded:
            return
        self.recorded.add(record.case_id)
        self.watcher.case(record)
        if record.verdict is Verdict.CRASH:
            self.crashes[record.subject] += 1
            if self.crashes[record.subject] > CRASHES_ALLOWED:
                self.stop(
                    record.subject,
                    f"not run: {self.crashes[record.subject]} cases of {record.subject} crashed",
                )

    def record(self, case_id: str, verdict: Verdict, reason: str, event: Mapping[str, Any]) -> None:
        """Logs a record that no worker could write."""
        started = self.running.pop(case_id, event)
        more = {name: started.get(name, "") for name in ("worker", "gpu")}
        more |= {"duration_s": round(time.time() - started["time"], 3)}
        record = blank(self.plan.by_id[case_id], verdict, reason, **more)
        self.log.finished(record)
        self.finished(record)

    def stop(self, subject: str, reason: str) -> None:
        """Tells workers not to run the rest of a subject's cases."""
        (self.run_.folder / STOPPED_FOLDER / subject).write_text(reason)
        self.log.write("stopped", subject=subject, reason=reason)

    def sweep(self) -> None:
        """After pytest's end: a case that was started and never finished crashed with its worker."""
        for case_id, event in list(self.running.items()):
            self.crash(case_id, event)


def _on_started(session: _Session, event: Mapping[str, Any]) -> None:
    if event["case_id"] not in session.recorded:
        given = dict(event)
        if event["case_id"] in session.reader.log.repeated:
            given["limit_s"] += session.plan.profile.import_limit_s
        session.running[event["case_id"]] = given
        session.deadlines[event["case_id"]] = Deadline(given)


def _on_finished(session: _Session, event: Mapping[str, Any]) -> None:
    record = session.reader.log.records.get(event["record"]["case_id"])
    if record is not None:
        session.finished(record)


def _on_died(session: _Session, event: Mapping[str, Any]) -> None:
    session.crash(event["case_id"], event)


_HANDLERS: Mapping[str, Callable[[_Session, Mapping[str, Any]], None]] = {
    "started": _on_started,
    "finished": _on_finished,
    "died": _on_died,
}


def _command(folder: Path, workers: int) -> list[str]:
    return [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "xdist",
        "-p",
        "qualify.plugin",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:unraisableexception",
        "-c",
        os.devnull,
        f"--rootdir={folder}",
        "--capture=no",
        "-q",
        "--tb=no",
        "--no-header",
        f"-n{workers}",
        "--max-worker-restart=1000",
        f"--maxschedchunk={CHUNK}",
        str(folder / PLAN_NAME),
    ]


def _environment(run: Run) -> dict[str, str]:
    """The workers' environment: no pytest options from outside; on a CPU, Triton is interpreted."""
    kept = {**MEMORY, **{k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}}
    paths = [p if p else os.getcwd() for p in sys.path]
    kept |= {
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "PYTHONPATH": os.pathsep.join(dict.fromkeys([os.getcwd(), *paths])),
        SHARD_VARIABLE: str(run.shard[0]),
        DEVICES_VARIABLE: ",".join(run.devices),
        PARENT_VARIABLE: str(os.getpid()),
    }
    if not run.devices:
        kept |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    if "OMP_NUM_THREADS" not in os.environ:
        kept["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // run.workers))
    return kept


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """Ends pytest and every process of its session, gently first."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
            return


@contextlib.contextmanager
def terminated_as_interrupted() -> Iterator[None]:
    """Within it, a request to terminate ends the run as Ctrl-C does: nothing finished is lost."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
