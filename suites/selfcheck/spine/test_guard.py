"""One case: whatever a subject does short of ending the process, there is a true record and a clean torch."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from qualify.guard import SWITCHES, unchanged
from qualify.plan import PlannedSubject
from qualify.planning import make_plan
from qualify.records import CaseRecord, Verdict
from qualify.run_case import PoisonedWorkerError, run_case
from qualify.subjects import Subject, load_subject, resolve_subject, subject_name
from suites.selfcheck.spine.trivial import TABLES

PLANNED = make_plan(TABLES, "tiny", [PlannedSubject("mine", "mine.py")]).cases[0]


def run(qdq_w: Callable[..., Any], **more: Any) -> CaseRecord:
    """The record of the first case for a subject with this function."""
    return run_case(PLANNED, Subject("mine", "mine.py", qdq_w=qdq_w, **more))


def raising(error: BaseException) -> Callable[..., Any]:
    """A function that raises."""

    def qdq_w(w: float, *, fmt: str = "e4m3") -> float:
        raise error

    return qdq_w


class SilentError(Exception):
    """Its own message cannot be read."""

    def __str__(self) -> str:
        raise ValueError("no message")


@pytest.mark.parametrize(
    ("error", "verdict"),
    [
        (RuntimeError("boom"), Verdict.ERROR),
        (SystemExit(0), Verdict.ERROR),
        (KeyboardInterrupt(), Verdict.ERROR),
        (GeneratorExit(), Verdict.ERROR),
        (SilentError(), Verdict.ERROR),
        (ValueError("a" * 10000), Verdict.ERROR),
        (NotImplementedError("not here"), Verdict.UNSUPPORTED),
        (MemoryError(), Verdict.NOT_RUN),
        (torch.OutOfMemoryError("CUDA out of memory"), Verdict.NOT_RUN),
    ],
)
def test_whatever_is_raised_is_a_record(error: BaseException, verdict: Verdict) -> None:
    record = run(raising(error))
    assert record.verdict is verdict
    assert type(error).__name__ in record.reason
    assert len(record.reason) < 1000


def test_spoilt_device_ends_the_worker_with_a_crash() -> None:
    with pytest.raises(PoisonedWorkerError) as raised:
        run(raising(RuntimeError("CUDA error: an illegal memory access was encountered")))
    assert raised.value.record.verdict is Verdict.CRASH


def set_dtype() -> None:
    torch.set_default_dtype(torch.float64)


def set_device() -> None:
    torch.set_default_device("meta")


def set_grad() -> None:
    torch.set_grad_enabled(False)


def set_seed() -> None:
    torch.manual_seed(0)


def set_precision() -> None:
    torch.set_float32_matmul_precision("medium")


def set_precision_anew() -> None:
    torch.backends.cuda.matmul.fp32_precision = "tf32"


def set_older_name() -> None:
    torch.backends.cuda.matmul.allow_tf32 = not torch.backends.cuda.matmul.allow_tf32


def set_flag() -> None:
    torch.backends.cudnn.allow_tf32 = not torch.backends.cudnn.allow_tf32


def set_deterministic() -> None:
    torch.use_deterministic_algorithms(True)


def set_flush() -> None:
    torch.set_flush_denormal(True)


def replace_function() -> None:
    setattr(torch, "allclose", lambda *a, **k: True)  # noqa: B010


def replace_method() -> None:
    setattr(torch.Tensor, "abs", lambda self: self)  # noqa: B010


def set_autocast() -> None:
    torch.set_autocast_enabled("cpu", True)


@pytest.mark.parametrize(
    "change",
    [
        set_dtype,
        set_device,
        set_grad,
        set_seed,
        set_precision,
        set_precision_anew,
        set_older_name,
        set_flag,
        set_deterministic,
        set_flush,
        replace_function,
        replace_method,
        set_autocast,
    ],
)
def test_changed_state_fails_the_case_and_is_put_back(change: Callable[[], None]) -> None:
    def qdq_w(w: float, *, fmt: str = "e4m3") -> float:
        change()
        return 2 * w

    before, function, method = torch.get_default_dtype(), torch.allclose, torch.Tensor.abs
    switches = {name: read() for name, (read, _) in SWITCHES.items()}
    record = run(qdq_w)
    assert {name: read() for name, (read, _) in SWITCHES.items()} == switches
    assert record.verdict is Verdict.FAILED_NUMERIC
    assert [c.tensor for c in record.comparisons if not c.passed] == ["global_state"]
    changes: list[str] = []
    with unchanged(changes):
        assert torch.get_default_dtype() is before
        assert (torch.allclose, torch.Tensor.abs) == (function, method)
        assert torch.is_grad_enabled()
    assert changes == []
    assert run(lambda w, fmt="e4m3": 2 * w).verdict is Verdict.PASSED


def test_drawing_random_numbers_changes_nothing() -> None:
    def qdq_w(w: float, *, fmt: str = "e4m3") -> float:
        torch.rand(3)
        return 2 * w

    state = torch.get_rng_state()
    assert run(qdq_w).verdict is Verdict.PASSED
    assert torch.equal(torch.get_rng_state(), state)


def test_streams_and_folder_are_lent() -> None:
    def qdq_w(w: float, *, fmt: str = "e4m3") -> float:
        sys.stdout.close()
        setattr(sys, "stderr", None)  # noqa: B010
        os.chdir("/")
        return 2 * w

    folder, streams = os.getcwd(), (sys.stdout, sys.stderr)
    assert run(qdq_w).verdict is Verdict.PASSED
    assert (os.getcwd(), (sys.stdout, sys.stderr)) == (folder, streams)


def test_missing_function_is_unsupported_for_lack_of_an_offer() -> None:
    record = run_case(PLANNED, Subject("mine", "mine.py"))
    assert (record.verdict, record.requirement) == (Verdict.UNSUPPORTED, "offers")


def test_ruled_out_cell_is_unsupported_by_declaration() -> None:
    record = run(lambda w, fmt="e4m3": 2 * w, capabilities={"devices": ["cuda"]})
    assert (record.verdict, record.requirement) == (Verdict.UNSUPPORTED, "capabilities")


def test_import_error_fails_each_case() -> None:
    record = run_case(PLANNED, Subject("mine", "mine.py", import_error="OSError: libz3.so"))
    assert record.verdict is Verdict.ERROR
    assert "libz3.so" in record.reason


@pytest.mark.parametrize(
    "text", ["import sys\nsys.exit(0)", "raise KeyboardInterrupt", "1/0", "def f(:", "CAPABILITIES = 3"]
)
def test_subject_that_does_not_import_says_why(tmp_path: Any, text: str) -> None:
    path = tmp_path / "broken one.py"
    path.write_text(text)
    subject = load_subject(subject_name(str(path)), resolve_subject(str(path), {}))
    assert subject.name == "broken_one"
    assert subject.import_error
    assert subject.qdq_w is None


def test_a_wrapper_that_torch_puts_around_a_function_is_not_held_against_a_subject() -> None:
    before = torch.manual_seed
    try:
        changes: list[str] = []
        with unchanged(changes):
            torch.manual_seed = vars(torch)["_disable_dynamo"](
                before
            )  # as the first activation checkpoint does
        assert changes == []
        with unchanged(changes):
            setattr(torch, "manual_seed", lambda seed: before(seed))  # noqa: B010
        assert len(changes) == 1
    finally:
        torch.manual_seed = before
