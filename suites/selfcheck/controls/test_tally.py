"""On a few seeds: every planted fault is caught, every correct implementation is let through."""

from __future__ import annotations

import pytest

from qualify.case import Case
from qualify.run_case import nothing
from suites.checks import controls as check
from suites.controls.control import Control
from suites.controls.table import CONTROLS
from suites.good.table import GOOD
from suites.selfcheck import tally
from suites.subjects.eager import EagerGDN

SEEDS = {"fp32": 11, "bf16": 12, "fp16": 13}
"""dtype -> seed, with a third of the faults; the session `controls` takes all of them on many seeds."""

LOOKS = ("qdq", "probe_state", "exact", "repeat", "stages", "plain", "smooth")
"""Looks at correct implementations: what rounds, and what has a budget."""


@pytest.mark.parametrize("dtype", SEEDS)
def test_every_planted_fault_is_caught(dtype: str) -> None:
    names = list(CONTROLS)[SEEDS[dtype] % 3 :: 3]
    results = list(tally.controls(SEEDS[dtype], [dtype], names))
    assert len(results) >= 30
    assert [r.name for r in results if not r.right] == []


@pytest.mark.parametrize("dtype", SEEDS)
def test_every_correct_implementation_qualifies(dtype: str) -> None:
    results = list(tally.good(SEEDS[dtype], [dtype], looks=LOOKS))
    assert len(results) == len(GOOD)
    assert [(r.name, r.why) for r in results if not r.right] == []


def asked(name: str) -> Case:
    """A case of the control check."""
    return Case("control.fault", {"sm": "cpu", "dtype": "bf16", "fault": name}, "planted", 0, "tally")


def test_a_fault_that_changes_nothing_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    idle = Control("idle", "codes", "the same arithmetic", {"read": EagerGDN.read}, looks=("qdq",))
    monkeypatch.setattr(check, "CONTROLS", {"idle": idle})
    monkeypatch.setattr(check, "LOOKS", {name: check.LOOKS[name] for name in ("qdq", "chunk")})
    (found,) = check.run(asked("idle"), nothing("tally")).comparisons
    assert not found.passed
    assert found.error == 1.0


def test_a_fault_that_breaks_down_is_not_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("this is no comparison")

    control = Control("broken", "codes", "raises wherever it is asked", {"read": broken}, looks=("chunk",))
    monkeypatch.setattr(check, "CONTROLS", {"broken": control})
    monkeypatch.setattr(check, "LOOKS", {"chunk": check.LOOKS["chunk"]})
    (found,) = check.run(asked("broken"), nothing("tally")).comparisons
    assert not found.passed


def test_a_look_that_fails_the_sound_implementation_catches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "_sound_passes", lambda *_: False)
    monkeypatch.setattr(check, "LOOKS", {n: check.LOOKS[n] for n in ("qdq", "exact")})
    (found,) = check.run(asked("ties_away"), nothing("tally")).comparisons
    assert not found.passed


def test_the_tally_counts_mistakes_and_fails_on_them() -> None:
    results = [
        tally.Result("control", "a", "bf16", 0, True, "op.exact (exact): o"),
        tally.Result("control", "b", "bf16", 0, False, "none"),
        tally.Result("good", "c", "bf16", 0, True, asked=3),
    ]
    text = tally.table(results, 1.0)
    assert "1 of 2 caught" in text
    assert "b (bf16): wrong on 1 seeds" in text
    assert "3 looks at correct implementations" in text


def test_no_seed_at_all_is_a_usage_error() -> None:
    with pytest.raises(SystemExit) as stopped:
        tally.main(["--seeds", "0"])
    assert stopped.value.code == 2
