"""The QDQ benchmark measures what it says, with the clock replaced."""

from __future__ import annotations

import itertools

import pytest
import torch

from kernels.bench import qdq as bench
from kernels.bench import timing


class Clock:
    """Events one millisecond apart."""

    ticks = itertools.count()

    def record(self) -> None:
        self.at = next(self.ticks)

    def elapsed_time(self, later: Clock) -> float:
        return float(later.at - self.at)


@pytest.fixture
def no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "event", Clock)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)


@pytest.mark.usefixtures("no_device")
def test_each_fitting_row_is_measured_and_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    w, _, state = bench.subjects(total_bytes=2**13, states=1)
    rows = bench.measure(w, repeats=2, device="cpu")
    assert [r["launch_row"] for r in rows if r["default"]] == ["qdq_rows:e1024-w2"]
    assert all(r["ratio_to_copy"] == 1.0 for r in rows)
    assert rows[0]["gigabytes_per_s"] == pytest.approx(2 * 2**13 / 1e6)
    tiles = bench.measure(state, repeats=2, device="cpu")
    assert {r["launch_row"] for r in tiles} == {"qdq_tiles:w8", "qdq_tiles:w16", "qdq_tiles:w4-large"}


def test_sizes_are_those_of_the_target() -> None:
    w16, w32, state = bench.subjects(total_bytes=2**31, states=8192)
    assert w16.shape == (2**23, 128)
    assert w32.shape == (2**22, 128)
    assert state.shape == (8192, 128, 128)


def test_percentiles_are_of_the_series() -> None:
    figures = timing.summary_ms([float(n) for n in range(1, 12)])
    assert figures["median_ms"] == 6.0
    assert figures["p10_ms"] < 3 < 9 < figures["p90_ms"]


def test_without_a_gpu_it_says_so(tmp_path: object, capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    assert bench.main(["--out", str(tmp_path)]) == 2
    assert "CUDA device" in capsys.readouterr().err


@pytest.mark.usefixtures("no_device")
def test_it_prints_and_writes_and_fails_below_the_target(
    monkeypatch: pytest.MonkeyPatch, tmp_path: object, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {
        "subject": "w", "launch_row": "r", "default": True, "conversion": "native", "ratio_to_copy": 0.9,
        "gigabytes_per_s": 90.0, "copy_gigabytes_per_s": 100.0,
    }  # fmt: skip
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a device")
    monkeypatch.setattr(bench, "measure", lambda subject, repeats: [row])
    assert bench.main(["--out", str(tmp_path)]) == 1
    assert "0.900 of copy_ (90 of 100 GB/s) default" in capsys.readouterr().out
    monkeypatch.setattr(bench, "measure", lambda subject, repeats: [row | {"ratio_to_copy": 0.96}])
    assert bench.main(["--out", str(tmp_path)]) == 0
