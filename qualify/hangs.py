"""When a case hangs: it has had its time, and no process that it waits for is at work."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

PATIENCE = 8.0
"""A case is never left alone for longer than so many limits."""

IDLE_SHARE = 0.05
"""A process that uses less of the time than this waits for something that does not come."""

LOOK_S = 1.0
"""Seconds between two looks at other processes, whose times the system counts in hundredths of a second."""

TICKS = os.sysconf("SC_CLK_TCK")


class Deadline:
    """When a running case has had its time.

    On a machine that is busy with other things a case takes longer without hanging: what counts is the time
    that its process was given, unless it asked for none. Nor does it hang while processes that it has started
    are at work, compilers that is: it has its limit anew once they have ended.
    """

    def __init__(self, event: Mapping[str, Any]) -> None:
        """Starts with the case.

        Args:
            event: the log's `started` event, with `time` in seconds since the epoch, `limit_s`, the worker's
                `pid`, and `cpu_s`, the processor time that this had used up to then.
        """
        self.pid, self.limit_s = int(event["pid"]), float(event["limit_s"])
        self._start, self._used = float(event["time"]), float(event["cpu_s"])
        self._waited = (self._start, self._used)
        """Clock and the worker's processor time when something that it waits for was last seen at work."""
        self.busy = False
        """Whether the time was over while the case, or what it waits for, was still at work."""
        self._look: tuple[float, float | None, bool | None] | None = None

    def passed(self, now: float, used: float | None, below: Callable[[], float | None]) -> bool:
        """Whether the case hangs.

        Args:
            now: the clock, in seconds since the epoch.
            used: processor time of the worker; None where that is not known, and the clock alone decides.
            below: tells the processor time of the processes that the worker has started, None where none
                lives; asked once the limit is over, and not more often than every second.
        """
        wall_s = now - self._start
        if wall_s <= self.limit_s:
            return False
        if used is None:
            return True
        if used - self._used > self.limit_s or wall_s > PATIENCE * self.limit_s:
            self.busy = True
            return True
        at_work = self._at_work(now, below)
        if at_work:
            self._waited = (now, used)
        if at_work is not False:
            return False
        idle_s = now - self._waited[0]
        return idle_s > self.limit_s and used - self._waited[1] < IDLE_SHARE * idle_s

    def _at_work(self, now: float, below: Callable[[], float | None]) -> bool | None:
        """Whether what the worker has started used processor time between two looks; None after one look."""
        if self._look is not None and now - self._look[0] < LOOK_S:
            return self._look[2]
        seconds, at_work = below(), None
        if seconds is None:
            at_work = False
        elif self._look is not None:
            before = self._look[1] if self._look[1] is not None else seconds
            at_work = seconds - before > IDLE_SHARE * (now - self._look[0])
        self._look = (now, seconds, at_work)
        return at_work


class _Times(NamedTuple):
    parent: int
    own: int
    ended: int


def own_seconds(pid: int) -> float | None:
    """Processor time that a process has used, all threads together; None where that is not known."""
    times = _times(Path(f"/proc/{pid}/stat"))
    return None if times is None else times.own / TICKS


def descendants_seconds(pid: int) -> float | None:
    """Processor time of all processes that descend from one, ended ones included; None where none lives."""
    every: dict[int, _Times] = {}
    children: defaultdict[int, list[int]] = defaultdict(list)
    for path in Path("/proc").glob("[0-9]*/stat"):
        times = _times(path)
        if times is not None:
            every[int(path.parent.name)] = times
            children[times.parent].append(int(path.parent.name))
    living, todo = [], [*children[pid]]
    while todo:
        living.append(todo.pop())
        todo += children[living[-1]]
    if not living:
        return None
    awaited = every[pid].ended if pid in every else 0
    return (sum(every[n].own + every[n].ended for n in living) + awaited) / TICKS


def _times(path: Path) -> _Times | None:
    """What Linux says of a process: its parent, and ticks that it and its ended, awaited children used."""
    try:
        fields = path.read_text().rpartition(")")[2].split()
        return _Times(int(fields[1]), sum(map(int, fields[11:13])), sum(map(int, fields[13:15])))
    except (OSError, ValueError, IndexError):
        return None
