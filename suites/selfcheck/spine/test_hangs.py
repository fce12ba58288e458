"""When a case hangs, and when it is only late: on a busy machine, or waiting for a compiler."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from qualify.hangs import IDLE_SHARE, LOOK_S, PATIENCE, Deadline, descendants_seconds, own_seconds
from qualify.receipt import read_receipt_file
from suites.selfcheck.spine.test_run import command, tally

BUSY = "print(flush=True)\nimport time\nend = time.time() + {seconds}\nwhile time.time() < end: pass"
IDLE = "print(flush=True)\nimport time\ntime.sleep({seconds})"
SUBJECT = """
import subprocess, sys
started = []
def qdq_w(w, *, fmt='e4m3'):
    if not started:
        started.append(subprocess.run([sys.executable, '-c', {code!r}]))
    return 2 * w
"""
START, USED, LIMIT = 5000.0, 100.0, 10.0


def deadline() -> Deadline:
    """Of a case that has just started."""
    return Deadline({"time": START, "pid": os.getpid(), "limit_s": LIMIT, "cpu_s": USED})


def hangs_after(
    own: Callable[[float], float], below: Callable[[float], float | None], until: float = 200.0
) -> float | None:
    """Seconds after which a case hangs, from the processor times at each moment; None if it never does."""
    case = deadline()
    for step in range(int(until * 10)):
        wall_s = step / 10
        if case.passed(START + wall_s, USED + own(wall_s), lambda: below(wall_s)):  # noqa: B023
            return wall_s
    return None


@pytest.mark.parametrize(
    ("wall_s", "cpu_s", "late"),
    [
        (9.0, 9.0, False),
        (11.0, 11.0, True),
        (11.0, 0.1, True),
        (30.0, 7.0, False),
        (60.0, 10.5, True),
        (81.0, 8.0, True),
        (11.0, None, True),
        (9.0, None, False),
    ],
)
def test_time_limit_counts_the_time_that_a_case_was_given(
    wall_s: float, cpu_s: float | None, late: bool
) -> None:
    used = None if cpu_s is None else USED + cpu_s
    assert deadline().passed(START + wall_s, used, lambda: None) is late


def test_a_case_that_waits_for_nothing_hangs_at_its_limit() -> None:
    assert hangs_after(lambda _: 0.0, lambda _: None) == pytest.approx(LIMIT + 0.1)


def test_a_case_whose_process_waits_too_hangs_soon() -> None:
    assert hangs_after(lambda _: 0.0, lambda _: 3.0) == pytest.approx(LIMIT + LOOK_S, abs=0.3)


def test_after_a_compiler_a_case_has_its_limit_anew() -> None:
    compiler: Callable[[float], float | None] = lambda t: t if t < 30 else None  # noqa: E731
    assert hangs_after(lambda t: max(0.0, min(t - 30.0, 8.0)), compiler, until=38.0) is None
    assert hangs_after(lambda _: 0.0, compiler) == pytest.approx(30.0 + LIMIT, abs=LOOK_S)


def test_patience_has_an_end() -> None:
    assert hangs_after(lambda _: 0.0, lambda t: t) == pytest.approx(PATIENCE * LIMIT, abs=0.2)


def test_a_compiler_in_a_machine_that_is_busy_is_at_work() -> None:
    slow: Callable[[float], float | None] = lambda t: 2 * IDLE_SHARE * t  # noqa: E731
    assert hangs_after(lambda _: 0.0, slow) == pytest.approx(PATIENCE * LIMIT, abs=0.2)


@pytest.mark.parametrize(("code", "works"), [(BUSY, True), (IDLE, False)])
def test_processor_times_of_children_are_seen(code: str, works: bool) -> None:
    with subprocess.Popen([sys.executable, "-c", code.format(seconds=60)], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        seen, before = own_seconds(child.pid), descendants_seconds(os.getpid())
        time.sleep(LOOK_S)
        after = descendants_seconds(os.getpid())
        child.kill()
    assert before is not None
    assert after is not None
    assert seen is not None
    assert seen <= before
    assert (after - before > IDLE_SHARE * LOOK_S) is works


def test_a_process_without_children_has_none_at_work() -> None:
    alone = subprocess.Popen([sys.executable, "-c", IDLE.format(seconds=60)], stdout=subprocess.DEVNULL)
    assert descendants_seconds(alone.pid) is None
    alone.kill()
    alone.wait()
    assert own_seconds(alone.pid) is None


def test_a_first_call_may_compile_for_longer_than_a_case(tmp_path: Path) -> None:
    subject = tmp_path / "mine.py"
    subject.write_text(SUBJECT.format(code=BUSY.format(seconds=5.0)))
    subprocess.run(command("--subject", subject, folder=tmp_path / "out"), capture_output=True, check=False)
    assert tally(read_receipt_file(tmp_path / "out" / "receipt.json"))["mine"] == {"passed": 8}


COMPILES = """
import pathlib, time
kept = pathlib.Path({folder!r})
def qdq_w(w, *, fmt='e4m3'):
    name = kept / str(len(list(kept.iterdir())))
    if len(list(kept.iterdir())) < {times}:
        end = time.time() + {seconds}
        while time.time() < end: pass
        name.touch()
    return 2 * w
"""


def test_a_process_may_compile_in_itself_for_longer_than_a_case(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    subject = tmp_path / "mine.py"
    subject.write_text(COMPILES.format(folder=str(kept), seconds=3.0, times=2))
    words = command("--subject", subject, "--workers", "1", folder=tmp_path / "out")
    subprocess.run(words, capture_output=True, check=False)
    assert tally(read_receipt_file(tmp_path / "out" / "receipt.json"))["mine"] == {"passed": 8}


def test_an_endless_loop_hangs_and_ends_the_run(tmp_path: Path) -> None:
    subject = tmp_path / "mine.py"
    subject.write_text("def qdq_w(w, *, fmt='e4m3'):\n    while True: pass\n")
    subprocess.run(command("--subject", subject, folder=tmp_path / "out"), capture_output=True, check=False)
    found = tally(read_receipt_file(tmp_path / "out" / "receipt.json"))["mine"]
    assert found["hang"] == 2
    assert found["not_run"] == 6
