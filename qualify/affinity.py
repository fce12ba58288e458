"""Which worker runs which case: those that share evidence go where it has been made already."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScheduling
from xdist.workermanage import WorkerController

from qualify.plan import Plan


def groups_of(plan: Plan) -> dict[str, str]:
    """Case id -> group, for the planted faults: those of one carrier are looked for on the same problems."""
    return {p.case_id: p.case.levels.get("dtype", "") for p in plan.cases if p.control}


class Together(LoadScheduling):  # type: ignore[misc] # pytest-xdist is not typed
    """Spreads cases as pytest-xdist does, but a worker ends the group it has begun, and others take it last.

    Args:
        config, log: as pytest-xdist gives them.
        groups: case id -> group; cases without one go anywhere.
    """

    def __init__(self, config: pytest.Config, log: Producer, groups: Mapping[str, str]) -> None:
        super().__init__(config, log)
        self._groups = groups
        self._begun: dict[WorkerController, set[str]] = {}

    def _send_tests(self, node: WorkerController, num: int) -> None:
        own = self._begun.setdefault(node, set())
        elsewhere = {group for other in self.nodes for group in self._begun.get(other, ())} - own
        self.pending.sort(key=lambda i: (self._group(i) in elsewhere, self._group(i) not in own, i))
        own.update(group for index in self.pending[:num] if (group := self._group(index)) is not None)
        super()._send_tests(node, num)

    def _group(self, index: int) -> str | None:
        assert self.collection is not None
        return self._groups.get(self.collection[index].partition("::")[2])
