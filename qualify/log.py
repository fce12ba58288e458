"""The case log: append-only lines of JSON, so that a run that is killed loses nothing that was finished.

Every writer appends whole lines with one write to a file opened for appending; each line starts with a line
feed of its own, so that a line that a full disk cut short spoils itself alone. A line that cannot be read is
counted and otherwise ignored: its case then has no result.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qualify.records import CaseRecord, case_record_from_json, jsonable

LOG_NAME = "cases.jsonl"


class LogWriter:
    """Appends events to a log file; safe to use from several processes at once.

    The file is opened for each line, so that nothing that a subject does to open files can reach it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, event: str, **fields: Any) -> None:
        """Appends one event.

        Raises:
            OSError: the line could not be written whole (a full disk, a closed file).
        """
        body = {"event": event, "time": time.time(), **jsonable(fields)}
        line = b"\n" + json.dumps(body, separators=(",", ":"), allow_nan=False).encode() + b"\n"
        file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            written = os.write(file, line)
        finally:
            os.close(file)
        if written != len(line):
            raise OSError(28, f"only {written} of {len(line)} bytes of a log line were written")

    def finished(self, record: CaseRecord) -> None:
        """Appends the record of a finished case."""
        self.write("finished", record=record.to_json())


@dataclass
class Log:
    """What a log says, read in order.

    Attributes:
        runs: the `run` events: one for each time that the run was started or resumed.
        records: case id -> the first record that was finished.
        started: case id -> the last `started` event of a case.
        environments: worker -> what it read about its machine.
        subjects: subject -> the facts that the first worker read about it.
        died: ids of cases under which a worker died.
        repeated: case -> why it is run once more.
        stopped: subject -> why the rest of its cases is not run.
        damaged: lines that could not be read.
    """

    runs: list[dict[str, Any]] = field(default_factory=list)
    records: dict[str, CaseRecord] = field(default_factory=dict)
    started: dict[str, dict[str, Any]] = field(default_factory=dict)
    environments: dict[str, dict[str, Any]] = field(default_factory=dict)
    subjects: dict[str, dict[str, Any]] = field(default_factory=dict)
    died: dict[str, None] = field(default_factory=dict)
    repeated: dict[str, str] = field(default_factory=dict)
    stopped: dict[str, str] = field(default_factory=dict)
    ended: list[dict[str, Any]] = field(default_factory=list)
    damaged: int = 0

    def add(self, event: Mapping[str, Any]) -> None:
        """Takes one event in.

        Raises:
            KeyError, TypeError, ValueError: the event is not one of ours.
        """
        kind = event["event"]
        if kind == "finished":
            record = case_record_from_json(event["record"])
            self.records.setdefault(record.case_id, record)
        elif kind == "started":
            self.started[event["case_id"]] = dict(event)
        elif kind == "environment":
            self.environments.setdefault(event["worker"], dict(event["environment"]))
        elif kind == "subject":
            self.subjects.setdefault(event["facts"]["name"], dict(event["facts"]))
        elif kind == "stopped":
            self.stopped.setdefault(event["subject"], event["reason"])
        elif kind == "died":
            self.died.setdefault(event["case_id"], None)
        elif kind == "repeated":
            self.repeated.setdefault(event["case_id"], event["reason"])
        elif kind in ("run", "ended"):
            (self.runs if kind == "run" else self.ended).append(dict(event))
        else:
            raise ValueError(f"event must be one that the log knows, got {kind!r}")


class LogReader:
    """Follows a log file while it grows."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self.log = Log()

    def poll(self) -> list[dict[str, Any]]:
        """Takes in the whole lines that were added since the last call, and returns their events."""
        return list(self._take(self._new_lines(whole=True)))

    def finish(self) -> Log:
        """Takes in what is left, a line without an end included."""
        list(self._take(self._new_lines(whole=False)))
        return self.log

    def _new_lines(self, *, whole: bool) -> list[bytes]:
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        end = data.rfind(b"\n") + 1 if whole else len(data)
        self._offset += end
        return [line for line in data[:end].splitlines() if line.strip()]

    def _take(self, lines: list[bytes]) -> Iterator[dict[str, Any]]:
        for line in lines:
            try:
                event = json.loads(line)
                self.log.add(event)
            except (ValueError, KeyError, TypeError, AttributeError):
                self.log.damaged += 1
                continue
            yield event


def read_log(path: Path) -> Log:
    """Everything that a log file says."""
    return LogReader(path).finish()
