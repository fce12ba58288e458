"""The pytest plugin: the cases of a plan are pytest items; pytest-xdist spreads them over workers.

    python -m pytest -p qualify.plugin -n 2 RUN_FOLDER/plan.json

Each worker takes a slot of its own (a GPU, where the run has some), records its environment and the subjects
as it imported them, and appends `started` and `finished` lines to the log. The worker that dies under a case
is replaced, and its death noted in the log.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

from qualify.blank import blank
from qualify.log import LOG_NAME, LogWriter
from qualify.plan import PLAN_NAME, Plan, PlannedCase, plan_from_json
from qualify.records import CaseRecord, Verdict

DEVICES_VARIABLE = "QUALIFY_DEVICES"
"""GPUs that the run was given, separated by commas; each worker takes one of them."""

SHARD_VARIABLE = "QUALIFY_SHARD"
PARENT_VARIABLE = "QUALIFY_PARENT"
"""The process that watches the run; what it started ends with it."""

PR_SET_PDEATHSIG = 1
SELECTED_NAME = "selected.txt"
STOPPED_FOLDER = "stopped"


class CaseFailedError(Exception):
    """A case has a verdict other than a pass; the message is its reason."""


def pytest_configure(config: pytest.Config) -> None:
    """In a worker: takes a slot before anything touches a GPU."""
    folder = _run_folder(config)
    if folder is None:
        return
    _end_with_parent()
    worker = Worker(folder, os.environ.get("PYTEST_XDIST_WORKER", "main"))
    config.stash[_WORKER] = worker
    if "PYTEST_XDIST_WORKER" in os.environ:
        atexit.register(_leave)
    config.pluginmanager.register(Deaths(worker.log), "qualify-deaths")


def _end_with_parent() -> None:
    """Ends this process when what started it is killed: nobody would end a case that hangs."""
    watcher = os.environ.get(PARENT_VARIABLE)
    if watcher is None or sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if "PYTEST_XDIST_WORKER" not in os.environ and os.getppid() != int(watcher):
        os._exit(1)  # it was killed before the call


def _leave() -> None:
    """Ends a worker that has nothing left to do: taking torch and all evidence apart would take seconds."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # of a subject that has closed it
            stream.flush()
    os._exit(0)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Sends cases that share evidence to the same worker."""
    from qualify.affinity import Together, groups_of

    folder = _run_folder(config)
    return None if folder is None else Together(config, log, groups_of(_plan(folder)))


def _plan(folder: Path) -> Plan:
    return plan_from_json((folder / PLAN_NAME).read_text())


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    """A plan is collected as its cases."""
    if file_path.name == PLAN_NAME:
        return PlanFile.from_parent(parent, path=file_path)
    return None


def _run_folder(config: pytest.Config) -> Path | None:
    plans = [Path(arg) for arg in config.args if Path(arg).name == PLAN_NAME]
    return plans[0].parent if plans else None


class Deaths:
    """Notes in the log under which case a worker died; whoever watches the log makes a record of it."""

    def __init__(self, log: LogWriter) -> None:
        self._log = log

    @pytest.hookimpl(optionalhook=True)
    def pytest_handlecrashitem(self, crashitem: str) -> None:
        """Called by pytest-xdist in the controlling process."""
        self._log.write("died", case_id=crashitem.partition("::")[2])


class PlanFile(pytest.File):
    """The selected cases of a plan that have no result yet."""

    def collect(self) -> Iterator[pytest.Item]:
        """An item for each case that is to be run."""
        plan = _plan(self.path.parent)
        for case_id in (self.path.parent / SELECTED_NAME).read_text().splitlines():
            yield CaseItem.from_parent(self, name=case_id, planned=plan.by_id[case_id], plan=plan)


class CaseItem(pytest.Item):
    """One case."""

    def __init__(self, *, planned: PlannedCase, plan: Plan, **more: Any) -> None:
        super().__init__(**more)
        self.planned = planned
        self.plan = plan

    def runtest(self) -> None:
        """Runs the case and logs its record.

        Raises:
            CaseFailedError: the case did not pass.
        """
        worker = self.config.stash[_WORKER]
        verdict, reason = worker.run(self.plan, self.planned)
        if verdict != "passed":
            raise CaseFailedError(f"{verdict}: {reason}")

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> str:
        """The reason alone: the record has the rest."""
        if isinstance(excinfo.value, CaseFailedError):
            return str(excinfo.value)
        return str(super().repr_failure(excinfo))

    def reportinfo(self) -> tuple[Path, int | None, str]:
        """The case's id."""
        return self.path, None, self.name


class Worker:
    """What a process needs to run cases: its log, its slot, its subjects. Built on first use."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder = folder
        self.name = name
        self.log = LogWriter(folder / LOG_NAME)
        self._subjects: dict[str, Any] = {}
        self._begun: set[str] = set()
        self._described = False
        if "PYTEST_XDIST_WORKER" in os.environ:
            _take_device(folder)

    def run(self, plan: Plan, planned: PlannedCase) -> tuple[str, str]:
        """Runs a case to a record in the log, and returns its verdict and reason."""
        from qualify.run_case import PoisonedWorkerError, run_case

        stopped = self.stopped(planned.case.subject)
        if stopped:
            return self._recorded(blank(planned, Verdict.NOT_RUN, stopped))  # by no worker
        if not self._described:  # also where a worker runs nothing but planted faults, or has another's GPU
            self._log_environment()
            self._described = True
        try:
            own = self.gpu
        except RuntimeError as error:
            return self._recorded(blank(planned, Verdict.ERROR, str(error), worker=self.name))
        first = planned.case.subject not in self._begun
        subject = self._subject(plan, planned)
        self._begun.add(planned.case.subject)
        # what compiles as it goes does so in its first call, often for longer than a case may take
        allowance = plan.profile.import_limit_s if first and not planned.control else 0.0
        self._note_start(planned, planned.time_limit_s + allowance)
        try:
            record = run_case(planned, subject, self.name)
        except PoisonedWorkerError as poisoned:
            self.log.finished(replace(poisoned.record, gpu=own))
            os._exit(70)
        return self._recorded(replace(record, gpu=own))

    @cached_property
    def gpu(self) -> str:
        """UUID of the GPU that this process computes on; empty on a CPU.

        Raises:
            RuntimeError: it is not the one that the worker was told to use.
        """
        from qualify.own_gpu import own_gpu

        return own_gpu(os.environ.get("CUDA_VISIBLE_DEVICES", ""), given())

    def _note_start(self, planned: PlannedCase, limit_s: float, **more: str) -> None:
        used = sum(os.times()[:2])
        fields = {"worker": self.name, "gpu": self.gpu, "pid": os.getpid(), "limit_s": limit_s, "cpu_s": used}
        fields |= more
        self.log.write("started", case_id=planned.case_id, **fields)

    def stopped(self, subject: str) -> str:
        """Why the rest of a subject's cases is not run; empty while it is."""
        path = self.folder / STOPPED_FOLDER / subject
        return path.read_text() if path.exists() else ""

    def _recorded(self, record: CaseRecord) -> tuple[str, str]:
        self.log.finished(record)
        return str(record.verdict), record.reason

    def _subject(self, plan: Plan, planned: PlannedCase) -> Any:
        """The subject of a case, imported once for each worker and described in the log."""
        from qualify.run_case import nothing
        from qualify.subject_facts import load_and_describe

        name = planned.case.subject
        if planned.control:
            return nothing(name)
        if name not in self._subjects:
            origin = next(s.spec for s in plan.subjects if s.name == name)
            self._note_start(planned, plan.profile.import_limit_s, importing=name)
            subject, facts = load_and_describe(name, origin)
            self.log.write("subject", worker=self.name, facts=facts)
            self._subjects[name] = subject
        return self._subjects[name]

    def _log_environment(self) -> None:
        from qualify.probe import environment

        shard = int(os.environ.get(SHARD_VARIABLE, "0"))
        self.log.write("environment", worker=self.name, environment=environment(self.name, shard=shard))


_WORKER = pytest.StashKey[Worker]()
_SLOTS: list[int] = []
"""Open lock files; held until the process ends."""


def given() -> list[str]:
    """The GPUs that the run was given, a GPU once for each worker that may use it."""
    return [device for device in os.environ.get(DEVICES_VARIABLE, "").split(",") if device]


def _take_device(folder: Path) -> None:
    """Takes the first free GPU of the run for this process alone; a replaced worker's GPU becomes free.

    Raises:
        RuntimeError: every GPU of the run is taken.
    """
    devices = given()
    if not devices:
        return
    for index, device in enumerate(devices):
        file = os.open(folder / f"slot{index}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(file)
            continue
        _SLOTS.append(file)
        os.environ |= {"CUDA_VISIBLE_DEVICES": device, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}  # as NVML counts
        return
    raise RuntimeError(
        f"a worker needs a GPU of its own, got {','.join(devices)}, all taken; use fewer workers"
    )
