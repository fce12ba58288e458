"""One case in a worker: guarded, timed, and always a record."""

from __future__ import annotations

import importlib
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from qualify.blank import blank
from qualify.capabilities import ruled_out
from qualify.case import Case, CheckOutput
from qualify.guard import changed_state, lent_streams, unchanged
from qualify.plan import PlannedCase
from qualify.records import CaseRecord, Comparison, Verdict
from qualify.subjects import Subject, describe
from qualify.verdicts import LACKS, of_comparisons

Check = Callable[[Case, Subject], CheckOutput]


class PoisonedWorkerError(RuntimeError):
    """The device can no longer be used by this process; the record that says so is attached."""

    def __init__(self, record: CaseRecord) -> None:
        super().__init__(record.reason)
        self.record = record


def load_check(path: str) -> Check:
    """The function at `package.module:function`.

    Raises:
        ImportError, AttributeError: there is none.
    """
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)  # type: ignore[no-any-return]


def declined(planned: PlannedCase, subject: Subject) -> CaseRecord | None:
    """The record of a case that a subject does not offer or rules out; None when it has to run."""
    if planned.control:
        return None
    if subject.import_error:
        reason = f"the subject could not be imported: {subject.import_error}"
        return blank(planned, Verdict.ERROR, reason)
    lacking = [name for name in planned.needs if not getattr(subject, name)]
    if lacking:
        reason = f"the subject does not offer {', '.join(lacking)}"
        return blank(planned, Verdict.UNSUPPORTED, reason, requirement=LACKS, value_seen="absent")
    reason = ruled_out(subject.capabilities, planned.case.levels)
    if reason:
        return blank(planned, Verdict.UNSUPPORTED, reason, requirement="capabilities", value_seen="ruled out")
    return None


def run_case(planned: PlannedCase, subject: Subject, worker: str = "") -> CaseRecord:
    """Runs one case, whatever the subject does short of ending the process.

    Raises:
        PoisonedWorkerError: the device failed in a way that spoils whatever this process does next.
    """
    record = declined(planned, subject)
    if record is not None:
        return record
    start = time.perf_counter()
    on_gpu = planned.case.levels.get("sm", "cpu") != "cpu" and torch.cuda.is_available()
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    changes: list[str] = []
    record = _guarded(planned, subject, changes)
    memory = torch.cuda.max_memory_allocated() if on_gpu and record.verdict is not Verdict.CRASH else 0
    timed: dict[str, Any] = {
        "duration_s": round(time.perf_counter() - start, 4),
        "peak_memory_bytes": memory,
        "worker": worker,
    }
    record = replace(record, **timed)
    if record.verdict is Verdict.CRASH:
        raise PoisonedWorkerError(record)
    return record


def _guarded(planned: PlannedCase, subject: Subject, changes: list[str]) -> CaseRecord:
    try:
        with lent_streams(), unchanged(changes), _launches(subject) as launches:
            output = load_check(planned.run)(planned.case, subject)
        return _from_output(planned, output, changes, launches)
    except BaseException as error:  # noqa: BLE001 - SystemExit and KeyboardInterrupt of a subject are its errors
        return _from_error(planned, error)


@contextmanager
def _launches(subject: Subject) -> Iterator[Mapping[str, str]]:
    """What the subject says that it launched, where it says so."""
    if subject.recorded_launches is None:
        yield {}
        return
    with subject.recorded_launches() as launches:
        yield launches


def _from_output(
    planned: PlannedCase, output: CheckOutput, changes: list[str], launches: Mapping[str, str]
) -> CaseRecord:
    if output.unsupported:
        return blank(planned, Verdict.UNSUPPORTED, output.unsupported, requirement="refused")
    extra: tuple[Comparison, ...] = (changed_state(changes),) if changes else ()
    comparisons = (*output.comparisons, *extra)
    verdict, reason = of_comparisons(comparisons)
    return blank(
        planned,
        verdict,
        reason,
        comparisons=comparisons,
        input_digest=output.input_digest,
        launch={str(k): str(v) for k, v in {**launches, **output.launch}.items()},
    )


def _from_error(planned: PlannedCase, error: BaseException) -> CaseRecord:
    text = f"{describe(error)}{_place(error)}"
    if isinstance(error, NotImplementedError):
        return blank(
            planned, Verdict.UNSUPPORTED, text, requirement="refused", value_seen="NotImplementedError"
        )
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return blank(planned, Verdict.NOT_RUN, f"out of memory: {text}")
    if _spoils_device(error):
        return blank(planned, Verdict.CRASH, text)
    return blank(planned, Verdict.ERROR, text)


def _spoils_device(error: BaseException) -> bool:
    """Whether CUDA will refuse whatever this process asks next (an illegal access, a failed assertion)."""
    accelerator_error = getattr(torch, "AcceleratorError", ())
    return isinstance(error, accelerator_error) or "CUDA error" in describe(error)


def _place(error: BaseException) -> str:
    """Where an exception came from: the innermost frame outside installed packages, or the innermost."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if "site-packages" not in f.filename and "<frozen" not in f.filename]
    chosen = (own or list(frames))[-1:]
    return "".join(f" ({Path(f.filename).name}:{f.lineno} in {f.name})" for f in chosen)


def nothing(name: str) -> Subject:
    """The subject that control cases are handed: it offers nothing."""
    return Subject(name=name, origin=sys.modules[__name__].__name__)
