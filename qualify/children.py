"""Whether the processes that a worker has started are at work: compilers, while the worker waits for them."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from pathlib import Path

LOOK_S = 1.0
"""Seconds between two looks at processor times, which the system counts in hundredths of a second."""

IDLE_SHARE = 0.05
"""Processes that use less of the time than this wait for something that does not come."""


class Children:
    """Looks at the descendants of processes from time to time."""

    def __init__(self) -> None:
        self._looks: dict[int, tuple[float, float, bool]] = {}

    def at_work(self, pid: int) -> bool:
        """Whether descendants of a process used processor time between the last two looks at them.

        A first look finds them at work where there are any: the next one tells.
        """
        now, last = time.monotonic(), self._looks.get(pid)
        if last is not None and now - last[0] < LOOK_S:
            return last[2]
        used = descendants_seconds(pid)
        if used is None:
            return False
        busy = last is None or now - last[0] > 10 * LOOK_S or used - last[1] > IDLE_SHARE * (now - last[0])
        self._looks[pid] = (now, used, busy)
        return busy


def descendants_seconds(pid: int) -> float | None:
    """Processor time of all processes that descend from one, ended ones included; None where none lives."""
    children: defaultdict[int, list[int]] = defaultdict(list)
    own: dict[int, int] = {}
    ended: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            number, fields = int(path.parent.name), path.read_text().rpartition(")")[2].split()
            children[int(fields[1])].append(number)
            own[number], ended[number] = sum(map(int, fields[11:13])), sum(map(int, fields[13:15]))
        except (OSError, ValueError, IndexError):
            continue
    living = _below(pid, children)
    if not living:
        return None
    ticks = sum(own[n] + ended[n] for n in living) + ended.get(pid, 0)
    return ticks / os.sysconf("SC_CLK_TCK")


def _below(pid: int, children: defaultdict[int, list[int]]) -> list[int]:
    found, todo = [], [*children[pid]]
    while todo:
        found.append(todo.pop())
        todo += children[found[-1]]
    return found
