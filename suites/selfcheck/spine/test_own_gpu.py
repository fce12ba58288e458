"""A record names the GPU that its case ran on, as the worker found it; any but the given one is an error."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from qualify.log import LOG_NAME, read_log
from qualify.own_gpu import own_gpu
from qualify.packing import packed, unpacked
from qualify.plan import PlannedSubject
from qualify.planning import make_plan
from qualify.plugin import DEVICES_VARIABLE, Worker, _take_device
from qualify.receipt import compact
from qualify.records import Verdict, case_record_from_json
from suites.selfcheck.spine.trivial import TABLES

UUIDS = {"0": "GPU-aaa-1", "1": "GPU-bbb-2", "GPU-bbb": "GPU-bbb-2", "MIG-7": "MIG-7"}


def seen(*uuids: str) -> Callable[[], list[str]]:
    return lambda: list(uuids)


def test_a_worker_names_the_gpu_that_it_computes_on() -> None:
    assert own_gpu("1", ["0", "1"], named=UUIDS.__getitem__, in_use=seen("GPU-bbb-2")) == "GPU-bbb-2"
    assert own_gpu("GPU-bbb", ["GPU-bbb"], named=UUIDS.__getitem__, in_use=seen("GPU-bbb-2")) == "GPU-bbb-2"
    assert own_gpu("MIG-7", ["MIG-7"], named=UUIDS.__getitem__, in_use=seen("GPU-aaa-1")) == "GPU-aaa-1"
    assert own_gpu("", [], named=UUIDS.__getitem__, in_use=seen("GPU-aaa-1", "GPU-bbb-2")) == "GPU-aaa-1"
    assert own_gpu("", [], named=UUIDS.__getitem__, in_use=seen()) == ""


@pytest.mark.parametrize(
    ("told", "found", "words"),
    [
        ("2", seen("GPU-ccc-3"), "was told to use 2"),
        ("", seen("GPU-aaa-1"), "was told to use none"),
        ("1", seen("GPU-aaa-1"), "sees GPU-aaa-1"),
        ("1", seen("GPU-aaa-1", "GPU-bbb-2"), "sees GPU-aaa-1, GPU-bbb-2"),
        ("1", seen(), "sees none"),
    ],
)
def test_any_other_gpu_than_the_given_one_is_an_error(
    told: str, found: Callable[[], list[str]], words: str
) -> None:
    with pytest.raises(RuntimeError, match=words):
        own_gpu(told, ["0", "1"], named=UUIDS.__getitem__, in_use=found)


def test_a_gpu_that_the_driver_cannot_name_is_checked_as_far_as_can_be() -> None:
    with pytest.raises(RuntimeError, match="KeyError"):
        own_gpu("GPU-x", ["GPU-x"], named=UUIDS.__getitem__, in_use=seen("GPU-aaa-1"))
    with pytest.raises(RuntimeError, match="sees none"):
        own_gpu("9", ["9"], named=UUIDS.__getitem__, in_use=seen())
    assert own_gpu("9", ["9"], named=UUIDS.__getitem__, in_use=seen("GPU-aaa-1")) == "GPU-aaa-1"  # no NVML


def first_case(tmp_path: Path) -> tuple[Worker, Any, Any]:
    subject = tmp_path / "good.py"
    subject.write_text("def qdq_w(w, *, fmt='e4m3'): return 2 * w")
    plan = make_plan(TABLES, "tiny", [PlannedSubject("good", str(subject))])
    return Worker(tmp_path, "gw0"), plan, plan.cases[0]


def test_a_worker_without_its_gpu_runs_nothing_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(DEVICES_VARIABLE, "GPU-not-there")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-not-there")
    worker, plan, case = first_case(tmp_path)
    verdict, reason = worker.run(plan, case)
    assert verdict == "error"
    assert "must see the GPU that it was told to use" in reason
    assert read_log(tmp_path / LOG_NAME).records[case.case_id].verdict is Verdict.ERROR


def test_every_record_names_the_gpu_and_keeps_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker, plan, case = first_case(tmp_path)
    monkeypatch.setattr("qualify.own_gpu.own_gpu", lambda told, given: "GPU-aaa-1")
    assert worker.run(plan, case) == ("passed", "")
    log = read_log(tmp_path / LOG_NAME)
    record = log.records[case.case_id]
    assert record.gpu == log.started[case.case_id]["gpu"] == "GPU-aaa-1"
    assert case_record_from_json(record.to_json()).gpu == "GPU-aaa-1"
    body = {"subjects": [], "cases": [compact(record), compact(record)]}
    lying = packed(body)
    assert lying["tables"]["gpus"] == ["GPU-aaa-1"]
    assert [row["gpu"] for row in unpacked(lying)["cases"]] == ["GPU-aaa-1"] * 2


def test_each_worker_takes_another_gpu_and_one_too_many_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(DEVICES_VARIABLE, "4,GPU-bbb")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "FASTEST_FIRST")
    taken: list[int] = []
    monkeypatch.setattr("qualify.plugin._SLOTS", taken)
    told = []
    for _ in range(2):
        _take_device(tmp_path)
        told.append(os.environ["CUDA_VISIBLE_DEVICES"])
    assert told == ["4", "GPU-bbb"]
    assert os.environ["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    with pytest.raises(RuntimeError, match="all taken"):
        _take_device(tmp_path)
    os.close(taken.pop())
    _take_device(tmp_path)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "GPU-bbb"
    for file in taken:
        os.close(file)
