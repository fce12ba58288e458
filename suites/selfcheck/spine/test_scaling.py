"""Two runs of the same cases are told apart by a verdict, a figure, a bit, a GPU, or too little speed."""

from __future__ import annotations

import gzip
import json
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from qualify.receipt import read_receipt_file
from suites import scaling
from suites.subjects import digested

KEPT = Path(__file__).parents[3] / "reports" / "examples" / "h200-scaling"
"""Runs of one H200 and of two."""

Row = dict[str, Any]
Tensor = torch.Tensor


def body(seconds: float, *gpus: str, **changes: Any) -> Row:
    """Three executed cases and a skipped one; `changes` replace fields of the second."""
    comparison = {"tensor": "o", "error": 0.25, "budget": 1.0, "statistics": {"p99": 0.125}}
    cases: list[Row] = [
        {"case_id": f"s/c[n:{n}]r#0", "verdict": "passed", "worker": f"gw{n % len(gpus)}",
         "gpu": gpus[n % len(gpus)], "launch": {digested.DIGEST: f"d{n}"}, "comparisons": [comparison]}
        for n in range(3)
    ]  # fmt: skip
    cases[1] |= changes
    return {"header": {"duration_s": seconds}, "cases": [*cases, {"case_id": "skip", "verdict": "skipped"}]}


def test_equal_runs_at_twice_the_speed_are_as_they_should_be() -> None:
    found = scaling.compared(body(100.0, "GPU-a"), body(52.0, "GPU-b", "GPU-a"))
    assert found.problems(2, 1.8) == []
    assert (found.cases, found.digests, round(found.ratio, 2)) == (3, 3, 1.92)
    assert found.gpus == (("GPU-a",), ("GPU-a", "GPU-b"))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"verdict": "failed_numeric"}, "1 cases differ in verdict, first s/c"),
        ({"worker": ""}, "1 cases differ in verdict"),
        ({"launch": {digested.DIGEST: "other"}}, "1 cases differ in bits"),
        ({"launch": {}}, "1 cases differ in bits"),
        ({"comparisons": []}, "1 cases differ in figures"),
        ({"gpu": "GPU-b"}, "must use 1 and 2 GPUs"),
    ],
)
def test_any_difference_between_the_runs_is_said(changes: Row, words: str) -> None:
    found = scaling.compared(body(100.0, "GPU-a"), body(52.0, "GPU-b", "GPU-a", **changes))
    assert any(words in problem for problem in found.problems(2, 1.8))


def test_too_little_speed_and_runs_without_digests_are_problems() -> None:
    slow = scaling.compared(body(100.0, "GPU-a"), body(60.0, "GPU-a", "GPU-b"))
    assert slow.problems(2, 1.8) == ["the ratio must be at least 1.8, it is 1.67"]
    one, two = body(100.0, "GPU-a"), body(50.0, "GPU-a", "GPU-b")
    for row in (*one["cases"], *two["cases"]):
        row.pop("launch", None)
    assert "no case has a digest" in scaling.compared(one, two).problems(2, 1.8)[0]


def test_the_command_warms_up_compares_and_says_what_it_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[tuple[str, int | None]] = []

    def run(folder: Path, workers: int | None, words: Sequence[str]) -> Mapping[str, Any]:
        folder.mkdir(parents=True)
        ran.append((folder.name, workers))
        assert words == ["--profile", "h100", "--subject", scaling.SUBJECT, "--select", "op"]
        return body(100.0, "GPU-a") if workers == 1 else body(50.0, "GPU-a", "GPU-b")

    monkeypatch.setattr(scaling, "run", run)
    assert scaling.main(["--out", str(tmp_path), "--select", "op"]) == 0
    assert ran == [("warm", None), ("workers-1", 1), ("workers-2", 2)]
    told = capsys.readouterr().out
    assert "ratio 2.00" in told
    assert "same verdicts, same figures, same bits" in told
    assert json.loads((tmp_path / "scaling.json").read_text())["ratio"] == 2.0
    assert scaling.main(["--out", str(tmp_path / "b"), "--select", "op", "--warm", "--least", "2.5"]) == 1


@pytest.mark.parametrize(("workers", "words"), [(None, []), (2, ["--workers", "2"])])
def test_a_run_names_its_workers_only_where_a_number_is_asked_for(
    workers: int | None, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[list[str]] = []

    def started(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        ran.append(command)
        return subprocess.CompletedProcess(command, 2, "said why")

    monkeypatch.setattr(subprocess, "run", started)
    with pytest.raises(RuntimeError, match="ended with 2: said why"):
        scaling.run(tmp_path, workers, ["--profile", "h100"])
    assert ran[0][1:] == ["-m", "qualify", "run", "--out", str(tmp_path), *words, "--profile", "h100"]


def test_the_kept_runs_compare_as_their_report_says(tmp_path: Path) -> None:
    bodies = []
    for packed in sorted(KEPT.glob("workers-*/receipt.json.gz")):
        plain = tmp_path / "receipt.json"
        plain.write_bytes(gzip.decompress(packed.read_bytes()))
        bodies.append(read_receipt_file(plain)["body"])
    found = scaling.compared(*bodies)
    assert found.problems(2, 1.8) == []
    report = json.loads((KEPT / "scaling.json").read_text())
    assert (report["cases"], report["digests"], report["ratio"]) == (388, found.digests, found.ratio)


def digest_of(op: Callable[..., Any], change: float = 0.0) -> str:
    x = torch.arange(6.0).reshape(2, 3).requires_grad_()
    with digested.recorded_launches() as launches:
        o, state = digested.digested(op)(x, options=None)
        assert state is None
        (o.sum() * (1 + change)).backward()
    assert x.grad is not None
    return launches[digested.DIGEST]


def test_a_digest_sees_outputs_and_gradients_and_leaves_them_alone() -> None:
    def op(x: Tensor, options: None) -> tuple[Tensor, None]:
        return 2 * x, None

    def other(x: Tensor, options: None) -> tuple[Tensor, None]:
        return 2 * x + 2.0**-20, None

    def detached(x: Tensor, options: None) -> tuple[Tensor, None]:
        return 2 * x.detach() + 0 * x, None

    found = digest_of(op)
    assert found == digest_of(op)
    assert len({found, digest_of(other), digest_of(detached), digest_of(op, 2.0**-20)}) == 4


def test_a_case_that_gives_no_tensor_has_no_digest() -> None:
    with digested.recorded_launches() as launches:
        pass
    assert digested.DIGEST not in launches
