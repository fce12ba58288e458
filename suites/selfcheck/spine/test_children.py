"""A case that waits for a process of its own that works does not hang; one whose process waits too, does."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from qualify.children import LOOK_S, Children, descendants_seconds
from qualify.execute import waiting
from qualify.receipt import read_receipt_file
from suites.selfcheck.spine.test_run import command, tally

BUSY = "import time\nend = time.time() + {seconds}\nwhile time.time() < end: pass"
IDLE = "import time\ntime.sleep({seconds})"
SUBJECT = """
import subprocess, sys
started = []
def qdq_w(w, *, fmt='e4m3'):
    if not started:
        started.append(subprocess.run([sys.executable, '-c', {code!r}]))
    return 2 * w
"""


@pytest.fixture
def child(request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[bytes]]:
    """A process that runs the code of the parameter."""
    process = subprocess.Popen([sys.executable, "-c", request.param.format(seconds=60)])
    yield process
    process.kill()
    process.wait()


@pytest.mark.parametrize(("child", "works"), [(BUSY, True), (IDLE, False)], indirect=["child"])
def test_a_child_that_works_is_told_from_one_that_waits(child: object, works: bool) -> None:
    children = Children()
    time.sleep(1.0)  # the interpreter's start is work
    assert children.at_work(os.getpid())
    time.sleep(LOOK_S + 0.2)
    assert children.at_work(os.getpid()) is works


def test_without_children_nobody_works() -> None:
    alone = subprocess.Popen([sys.executable, "-c", IDLE.format(seconds=60)])
    assert descendants_seconds(alone.pid) is None
    assert not Children().at_work(alone.pid)
    alone.kill()
    alone.wait()


@pytest.mark.parametrize(
    ("wall_s", "cpu_s", "waits"), [(9, 0, False), (11, 1, True), (11, 11, False), (81, 1, False)]
)
def test_waiting_has_an_end(wall_s: float, cpu_s: float, waits: bool) -> None:
    assert waiting({"limit_s": 10.0, "cpu_s": 5.0}, wall_s, 5.0 + cpu_s) is waits


def test_a_first_call_may_compile_for_longer_than_a_case(tmp_path: Path) -> None:
    subject = tmp_path / "mine.py"
    subject.write_text(SUBJECT.format(code=BUSY.format(seconds=5.0)))
    subprocess.run(command("--subject", subject, folder=tmp_path / "out"), capture_output=True, check=False)
    assert tally(read_receipt_file(tmp_path / "out" / "receipt.json"))["mine"] == {"passed": 8}
