"""The log: whole lines survive whatever happens around them."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path

import pytest

from qualify.blank import blank
from qualify.log import LogReader, LogWriter, read_log
from qualify.plan import PlannedSubject
from qualify.planning import make_plan
from qualify.records import Verdict
from suites.selfcheck.spine.trivial import TABLES

PLAN = make_plan(TABLES, "tiny", [PlannedSubject("mine", "mine.py")])


def write_all(path: Path, verdict: Verdict) -> None:
    """Logs a record of every planned case."""
    log = LogWriter(path)
    for planned in PLAN.cases:
        log.finished(blank(planned, verdict, "x" * 5000))


def test_records_come_back_as_written(tmp_path: Path) -> None:
    write_all(tmp_path / "log", Verdict.ERROR)
    log = read_log(tmp_path / "log")
    assert list(log.records) == [p.case_id for p in PLAN.cases]
    assert log.damaged == 0


def test_lines_of_several_processes_do_not_mix(tmp_path: Path) -> None:
    path = tmp_path / "log"
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=write_all, args=(path, Verdict.ERROR)) for _ in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    lines = [line for line in path.read_text().splitlines() if line]
    assert len(lines) == 4 * len(PLAN.cases)
    assert all(json.loads(line)["event"] == "finished" for line in lines)


def test_torn_line_spoils_itself_alone(tmp_path: Path) -> None:
    path = tmp_path / "log"
    write_all(path, Verdict.ERROR)
    whole = path.read_bytes().split(b"\n\n")
    torn = [*whole[:3], whole[3][: len(whole[3]) // 2]]
    path.write_bytes(b"\n\n".join(torn))
    LogWriter(path).finished(blank(PLAN.cases[7], Verdict.ERROR, "later"))
    log = read_log(path)
    assert set(log.records) == {p.case_id for p in (*PLAN.cases[:3], PLAN.cases[7])}
    assert log.damaged == 1


@pytest.mark.parametrize("line", ["[]", "3", '{"event": "party"}', '{"event": "finished"}', "\x00"])
def test_foreign_line_is_counted_and_ignored(tmp_path: Path, line: str) -> None:
    (tmp_path / "log").write_text(line + "\n")
    log = read_log(tmp_path / "log")
    assert (log.damaged, log.records) == (1, {})


def test_first_result_stands(tmp_path: Path) -> None:
    path = tmp_path / "log"
    write_all(path, Verdict.ERROR)
    write_all(path, Verdict.HANG)
    assert {r.verdict for r in read_log(path).records.values()} == {Verdict.ERROR}


def test_reader_waits_for_the_end_of_a_line(tmp_path: Path) -> None:
    path = tmp_path / "log"
    reader = LogReader(path)
    assert reader.poll() == []
    path.write_text('{"event": "died", "case_id": "a"')
    assert reader.poll() == []
    with path.open("a") as file:
        file.write("}\n")
    assert [e["case_id"] for e in reader.poll()] == ["a"]
