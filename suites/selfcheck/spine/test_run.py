"""Runs from end to end: whatever subjects do, every case has a true result and the run ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from qualify.log import LOG_NAME, read_log
from qualify.packing import packed
from qualify.receipt import SCHEMA_FILE, assemble, read_receipt_file
from suites.selfcheck.spine.trivial import HERE, STUCK

SUBJECTS: Mapping[str, str] = {
    "good": "def qdq_w(w, *, fmt='e4m3'): return 2 * w",
    "wrong": "def qdq_w(w, *, fmt='e4m3'): return 2 * w + (w == 4)",
    "dies": "import os\ndef qdq_w(w, *, fmt='e4m3'): os._exit(0)",
    "hangs": "import time\ndef qdq_w(w, *, fmt='e4m3'): time.sleep(1000)",
    "leaves": "import sys\ndef qdq_w(w, *, fmt='e4m3'): sys.exit(0)",
    "prints": (
        "import os, sys\n"
        "def qdq_w(w, *, fmt='e4m3'):\n"
        "    print('{' * 10000); os.write(1, bytes(1000)); sys.stdout.close(); sys.stderr.close()\n"
        "    return 2 * w"
    ),
    "absent": "import nothing_like_this",
    "empty": "X = 1",
    "refuses": "def qdq_w(w, *, fmt='e4m3'): raise NotImplementedError('not today')",
    "declines": "CAPABILITIES = {'devices': ['cuda']}\ndef qdq_w(w, *, fmt='e4m3'): return 2 * w",
}


def command(*words: object, folder: Path) -> list[str]:
    """A `qualify run` of the tiny profile."""
    fixed = ["run", "--profile", "tiny", "--tables", f"{HERE}:TABLES", "--out", str(folder)]
    return [sys.executable, "-m", "qualify", *fixed, *map(str, words)]


def written(folder: Path, *names: str) -> list[str]:
    """Options that name subjects, written as files."""
    words = []
    for name in names:
        (folder / f"{name}.py").write_text(SUBJECTS[name])
        words += ["--subject", str(folder / f"{name}.py")]
    return words


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int, dict[str, Any]]:
    """A run of every subject above: its folder, its exit code and its receipt."""
    base = tmp_path_factory.mktemp("run")
    words = written(base, *SUBJECTS)
    done = subprocess.run(command(*words, folder=base / "out"), capture_output=True, text=True, check=False)
    return base / "out", done.returncode, read_receipt_file(base / "out" / "receipt.json")


def tally(receipt: dict[str, Any]) -> dict[str, dict[str, int]]:
    """Subject -> verdict -> cases, skips left out."""
    found: dict[str, Counter[str]] = {}
    for case in receipt["body"]["cases"]:
        if case["verdict"] != "skipped":
            found.setdefault(case["subject"], Counter())[case["verdict"]] += 1
    return {name: dict(counts) for name, counts in found.items()}


def test_every_subject_gets_what_it_deserves(finished: tuple[Path, int, dict[str, Any]]) -> None:
    found = tally(finished[2])
    for name, verdict, least in (("dies", "crash", 4), ("hangs", "hang", 2)):
        counts = found.pop(name)
        assert set(counts) == {verdict, "not_run"}
        assert least <= counts[verdict] <= least + 1  # the other worker may be at it already
    assert found == {
        "good": {"passed": 8},
        "wrong": {"passed": 6, "failed_numeric": 2},
        "leaves": {"error": 8},
        "prints": {"passed": 8},
        "absent": {"error": 8},
        "empty": {"unsupported": 8},
        "refuses": {"unsupported": 8},
        "declines": {"unsupported": 8},
    }


def test_cases_that_are_given_up_name_no_worker_and_workers_their_machine(
    finished: tuple[Path, int, dict[str, Any]],
) -> None:
    body = finished[2]["body"]
    given_up = [c for c in body["cases"] if c["verdict"] == "not_run"]
    assert given_up
    assert not [c["case_id"] for c in given_up if c.get("worker")]
    assert {c["worker"] for c in body["cases"] if c.get("worker")} <= {
        e["worker"] for e in body["environments"]
    }


def test_run_with_failures_is_not_qualified(finished: tuple[Path, int, dict[str, Any]]) -> None:
    _, code, receipt = finished
    reasons = "\n".join(receipt["body"]["header"]["reasons"])
    assert (code, receipt["body"]["header"]["verdict"]) == (1, "NOT_QUALIFIED")
    for words in (
        "absent could not be imported",
        "empty offers neither",
        "must run and unsupported",
        "hang",
        "crash",
    ):
        assert words in reasons


def test_receipt_keeps_to_its_schema(finished: tuple[Path, int, dict[str, Any]]) -> None:
    jsonschema.Draft202012Validator(json.loads(SCHEMA_FILE.read_text())).validate(
        json.loads((finished[0] / "receipt.json").read_text())
    )


def test_skips_have_requirement_value_and_reason(finished: tuple[Path, int, dict[str, Any]]) -> None:
    skips = {row["requirement"]: row for row in finished[2]["body"]["skips"]}
    assert skips["on sm90"]["value_seen"] == "cpu"
    assert skips["on sm90"]["cases"] == 4 * len(SUBJECTS)
    assert skips["offers"]["cases"] == 8


def test_receipt_follows_from_plan_and_log_alone(finished: tuple[Path, int, dict[str, Any]]) -> None:
    made, written = assemble(finished[0]), json.loads((finished[0] / "receipt.json").read_text())
    assert {**made, "body": packed(made["body"])} == written


def test_subject_is_described_by_its_file(finished: tuple[Path, int, dict[str, Any]]) -> None:
    subject = next(s for s in finished[2]["body"]["subjects"] if s["name"] == "good")
    assert list(subject["files"]) == ["good.py"]
    assert subject["offers"] == ["qdq_w"]
    assert subject["import_error"] == ""


@pytest.fixture(scope="module")
def qualified(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that qualified."""
    base = tmp_path_factory.mktemp("qualified")
    done = subprocess.run(
        command(*written(base, "good"), folder=base / "out"), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return base / "out"


def copy_without(source: Path, target: Path, case_id: str) -> Path:
    """A run's folder whose log lacks the result of one case."""
    target.mkdir()
    (target / "plan.json").write_text((source / "plan.json").read_text())
    lines = (source / LOG_NAME).read_text().splitlines()
    kept = [line for line in lines if not ('"finished"' in line and json.dumps(case_id)[1:-1] in line)]
    assert len(kept) < len(lines)
    (target / LOG_NAME).write_text("\n".join(kept) + "\n")
    return target


def test_case_deleted_from_the_log_makes_the_run_incomplete(qualified: Path, tmp_path: Path) -> None:
    for number, case_id in enumerate(read_log(qualified / LOG_NAME).records):
        body = assemble(copy_without(qualified, tmp_path / str(number), case_id))["body"]
        assert body["header"]["verdict"] == "INCOMPLETE"
        assert case_id in "\n".join(body["header"]["reasons"])


def test_resumed_run_runs_what_is_left(qualified: Path, tmp_path: Path) -> None:
    case_id = "good/double[sm:cpu,number:2,colour:red]ordinary#0"
    folder = copy_without(qualified, tmp_path / "half", case_id)
    words = [*written(tmp_path, "good"), "--resume"]
    done = subprocess.run(command(*words, folder=folder), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    started = [line for line in (folder / LOG_NAME).read_text().splitlines() if '"started"' in line]
    assert (
        len(started)
        > len([line for line in (qualified / LOG_NAME).read_text().splitlines() if '"started"' in line]) - 1
    )


def alive(word: str) -> list[str]:
    """Command lines of processes that name a folder and are no zombies."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            line = (entry / "cmdline").read_bytes().decode(errors="replace")
        except OSError:
            continue
        found += [line] if word in line else []
    return found


def test_what_a_killed_run_started_ends_with_it_and_nobody_joins_a_run_at_work(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    words = command(*written(tmp_path, "hangs"), folder=folder)
    running = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until = time.monotonic() + 60
        while not (log := folder / LOG_NAME).exists() or '"started"' not in log.read_text():
            assert time.monotonic() < until, "the run never began"
            time.sleep(0.1)
        second = subprocess.run([*words, "--resume"], capture_output=True, text=True, check=False)
        assert second.returncode == 2
        assert "no run at work" in second.stderr
    finally:
        running.kill()
        running.wait()
    until = time.monotonic() + 20
    while (left := alive(str(folder))) and time.monotonic() < until:
        time.sleep(0.1)
    assert left == []


def test_planted_fault_that_hangs_is_run_once_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(STUCK, str(tmp_path))
    words = [*written(tmp_path, "good"), "--tables", f"{HERE}:WITH_CONTROLS"]
    done = subprocess.run(
        command(*words, folder=tmp_path / "out"), capture_output=True, text=True, check=False, timeout=120
    )
    receipt = read_receipt_file(tmp_path / "out" / "receipt.json")
    assert (done.returncode, receipt["body"]["header"]["verdict"]) == (3, "INCOMPLETE"), done.stdout
    verdicts = {
        c["levels"]["fault"]: c["verdict"] for c in receipt["body"]["cases"] if "fault" in c["levels"]
    }
    assert verdicts == {"0 times": "passed", "1 time": "passed", "2 times": "hang"}
    runs = {name: len((tmp_path / name).read_text()) for name in verdicts}
    assert runs == {"0 times": 1, "1 time": 2, "2 times": 2}
    assert tally(receipt)["good"] == {"passed": 8}


def test_worker_that_runs_planted_faults_alone_says_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(STUCK, str(tmp_path))
    words = [*written(tmp_path, "good"), "--tables", f"{HERE}:WITH_CONTROLS", "--select", "stuck*0 times*"]
    subprocess.run(command(*words, folder=tmp_path / "out"), capture_output=True, check=False, timeout=120)
    body = read_receipt_file(tmp_path / "out" / "receipt.json")["body"]
    workers = {c["worker"] for c in body["cases"] if c.get("worker")}
    assert workers
    assert workers <= {e["worker"] for e in body["environments"]}


def test_interrupted_run_keeps_what_was_finished(tmp_path: Path) -> None:
    words = written(tmp_path, "good", "hangs")
    process = subprocess.Popen(command(*words, folder=tmp_path / "out"), stdout=subprocess.PIPE, text=True)
    wait_for(tmp_path / "out" / LOG_NAME, '"passed"')
    process.send_signal(signal.SIGINT)
    text, _ = process.communicate(timeout=60)
    assert process.returncode in (1, 3), text
    assert "interrupted" in text
    verdicts = tally(read_receipt_file(tmp_path / "out" / "receipt.json"))
    assert verdicts["good"]["passed"] >= 1
    assert verdicts["hangs"]["not_run"] >= 6


def test_full_disk_ends_the_run_and_spares_what_was_finished(tmp_path: Path) -> None:
    words = command(*written(tmp_path, "good"), folder=tmp_path / "out")[3:]
    limited = (
        "import resource, runpy, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (9000, 9000)); "
        f"sys.argv = {['qualify', *words]!r}; runpy.run_module('qualify', run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-c", limited], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 3, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.startswith("error: ")
    assert len(read_log(tmp_path / "out" / LOG_NAME).records) >= 4


def wait_for(path: Path, text: str) -> None:
    """Waits until a file holds a text."""
    for _ in range(600):
        if path.exists() and text in path.read_text():
            return
        time.sleep(0.1)
    raise AssertionError(f"{path} never held {text}")


def test_processes_end_with_the_run(finished: tuple[Path, int, dict[str, Any]]) -> None:
    pids = {
        json.loads(line)["pid"]
        for line in (finished[0] / LOG_NAME).read_text().splitlines()
        if '"pid"' in line
    }
    assert len(pids) > 2
    assert not [pid for pid in pids if is_worker_of(pid, finished[0])]


def is_worker_of(pid: int, folder: Path) -> bool:
    """Whether a process is alive and was started for a run."""
    try:
        return str(folder).encode() in Path(f"/proc/{pid}/cmdline").read_bytes() or str(os.getpid()) == str(
            pid
        )
    except OSError:
        return False
