"""Cases that share evidence are kept together, every case runs once, and workers end without delay."""

from __future__ import annotations

import subprocess
import sys
from collections import defaultdict
from types import SimpleNamespace
from typing import Any, cast

import pytest

from qualify.affinity import Together

GROUPS = {f"fault{i}": f"carrier{i // 12}" for i in range(36)}
PLAIN = [f"case{i}" for i in range(40)]


class Worker:
    """A worker that keeps what it is sent."""

    def __init__(self, name: str) -> None:
        self.gateway = SimpleNamespace(id=name)
        self.shutting_down = False
        self.sent: list[int] = []

    def send_runtest_some(self, indices: list[int]) -> None:
        self.sent += indices

    def shutdown(self) -> None:
        self.shutting_down = True


def scheduled(names: list[str], *workers: Worker, chunk: int = 6) -> Any:
    """A scheduler that has sent each worker its first cases."""
    options = {"tx": ["popen"] * len(workers), "maxschedchunk": chunk}
    config = SimpleNamespace(getvalue=options.get, getoption=options.get)
    log = SimpleNamespace(loadsched=lambda *words: None)
    made: Any = Together(cast(pytest.Config, config), cast(Any, log), GROUPS)
    for worker in workers:
        made.add_node(worker)
    for worker in workers:
        made.add_node_collection(worker, [f"../out/plan.json::{name}" for name in names])
    made.schedule()
    return made


def run(scheduler: Any, names: list[str], *workers: Worker) -> dict[str, list[str]]:
    """Lets the workers finish one case each in turn to the end; worker -> what it ran."""
    ran: dict[str, list[str]] = defaultdict(list)
    while scheduler.has_pending:
        for worker in workers:
            pending = scheduler.node2pending[worker]
            if len(pending) > 1 or (pending and worker.shutting_down):
                ran[worker.gateway.id].append(names[pending[0]])
                scheduler.mark_test_complete(worker, pending[0], 0.2)
    return ran


def begun(ran: dict[str, list[str]]) -> int:
    """How often a worker had to begin a group."""
    return sum(len({GROUPS[name] for name in names if name in GROUPS}) for names in ran.values())


def test_every_case_runs_once_and_a_group_on_one_worker_while_there_is_other_work() -> None:
    names = [*PLAIN[:10], *GROUPS, *PLAIN[10:]]
    workers = (Worker("gw0"), Worker("gw1"))
    ran = run(scheduled(names, *workers), names, *workers)
    assert sorted(name for found in ran.values() for name in found) == sorted(names)
    assert begun(ran) == 3
    assert abs(len(ran["gw0"]) - len(ran["gw1"])) <= 2


def test_a_worker_that_has_nothing_else_helps_with_what_another_has_begun() -> None:
    names = [name for name, group in GROUPS.items() if group == "carrier0"]
    workers = (Worker("gw0"), Worker("gw1"))
    ran = run(scheduled(names, *workers, chunk=2), names, *workers)
    assert min(len(found) for found in ran.values()) >= len(names) // 2 - 1


def test_what_a_dead_worker_had_begun_is_free_again() -> None:
    names = [*GROUPS, *PLAIN]
    first, second, third = Worker("gw0"), Worker("gw1"), Worker("gw2")
    scheduler = scheduled(names, first, second)
    scheduler.remove_node(first)
    scheduler.add_node(third)
    scheduler.add_node_collection(third, scheduler.collection)
    scheduler.schedule()
    assert GROUPS[names[third.sent[0]]] == "carrier0"


def test_a_worker_leaves_what_it_holds_to_the_system_and_loses_no_output() -> None:
    text = (
        "import atexit; from qualify.plugin import _leave; atexit.register(_leave)\n"
        "class Held:\n"
        "    def __del__(self): print('taken apart')\n"
        "held = Held(); print('said', end='')"
    )
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    assert done.stdout == "said"
