"""What a call has compiled ahead is what it launches; the backward's kernels come with the forward's."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import pytest
import torch

from kernels.gdn import core
from suites.selfcheck.gdn.inputs import random_problem, run

Build = tuple[str, tuple[tuple[str, str], ...]]

CELL = "dtype:bf16,sites:{sites},block_v:16,length:17,heads:20x24,grouping:hv1,fused:all,final:{final}"


class Recorder:
    """Stands in for the compiler: notes which builds are asked for ahead, and which are launched."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ahead: list[set[Build]] = []
        self.launched: set[Build] = set()
        self.seen: set[Build] | None = None
        self.launch = core.launch
        self.compiled: set[Hashable] = set()
        monkeypatch.setattr(core, "launch", self.note)
        monkeypatch.setattr(core, "compile_ahead", self.compile)

    def note(self, kernel: Any, programs: int, *arguments: Any, **constants: Any) -> None:
        build = (kernel.fn.__name__, tuple(sorted((name, str(x)) for name, x in constants.items())))
        if self.seen is not None:
            self.seen.add(build)
        else:
            self.launched.add(build)
            self.launch(kernel, programs, *arguments, **constants)

    def compile(self, x: torch.Tensor, keys: set[Hashable], launches: Callable[[], object]) -> None:
        if keys <= self.compiled:
            return
        self.compiled |= keys
        self.seen = set()
        launches()
        self.ahead.append(self.seen)
        self.seen = None


@pytest.mark.parametrize("final", ["kept", "dropped"])
@pytest.mark.parametrize("sites", ["none", "state", "w", "both"])
def test_a_differentiated_call_has_its_kernels_compiled_once_and_launches_no_others(
    monkeypatch: pytest.MonkeyPatch, sites: str, final: str
) -> None:
    recorder = Recorder(monkeypatch)
    run(random_problem(CELL.format(sites=sites, final=final)))
    assert len(recorder.ahead) == 1
    assert recorder.ahead[0] == recorder.launched
    assert {name for name, _ in recorder.launched} >= {"state_pass_kernel", "state_gradient_kernel"}


def test_a_call_without_gradients_has_no_kernel_of_the_backward_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recorder = Recorder(monkeypatch)
    problem = random_problem(CELL.format(sites="both", final="kept"))
    with torch.no_grad():
        core.forward(
            problem.q, problem.k, problem.v, problem.g, problem.beta, None, None,
            core.Settings(scale=1.0, w_format="e4m3"), write_final=False,
        )  # fmt: skip
    assert recorder.ahead == [recorder.launched]
    assert not [name for name, _ in recorder.launched if "gradient" in name]
