"""The command line: one line for each mistake, and the right exit code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from qualify.cli import main
from suites.selfcheck.reports import synthetic
from suites.selfcheck.spine.trivial import HERE

TABLES = ["--tables", f"{HERE}:TABLES"]


@pytest.fixture
def subject(tmp_path: Path) -> list[str]:
    """Options that name a subject."""
    path = tmp_path / "good.py"
    path.write_text("def qdq_w(w, *, fmt='e4m3'): return 2 * w")
    return ["--subject", str(path)]


def ended(*words: str) -> int:
    """The exit code of a command."""
    with pytest.raises(SystemExit) as raised:
        main(words)
    return int(raised.value.code or 0)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--profile", "nightly"], "profile must be one of tiny, got 'nightly'"),
        (["--select", "nothing-like-it"], "got 'nothing-like-it'"),
        (["--workers", "0"], "--workers must be at least 1, got 0"),
        (["--workers", "many"], "--workers"),
        (["--shard", "3/2"], "--shard must read INDEX/COUNT"),
        (["--shard", "half"], "--shard must read INDEX/COUNT"),
        (["--subject", "no_such_module_anywhere"], "got 'no_such_module_anywhere'"),
        (["--subject", "no/such/file.py"], "subject must be a file that exists"),
        (["--subject", ""], "subject must be"),
        (["--nonsense"], "nonsense"),
    ],
)
def test_mistake_is_one_line_and_exit_code_2(
    words: list[str], message: str, subject: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = ["--out", str(tmp_path / "out")]
    assert ended("run", "--profile", "tiny", *TABLES, *subject, *out, *words) == 2
    error = capsys.readouterr().err.strip()
    assert message in error
    assert len(error.splitlines()) == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("tables", ["no.such.module", f"{HERE}:NOTHING", f"{HERE}:HERE"])
def test_unknown_tables_are_a_mistake(
    tables: str, subject: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert ended("plan", "--profile", "tiny", "--tables", tables, *subject) == 2
    assert "tables must be" in capsys.readouterr().err


def test_two_subjects_of_one_name_are_a_mistake(
    subject: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert ended("plan", "--profile", "tiny", *TABLES, *subject, *subject) == 2
    assert "name of its own" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["plan.json", "cases.jsonl", "receipt.json"])
def test_folder_with_another_run_is_refused(
    name: str, subject: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / name).write_text("{}")
    assert ended("run", "--profile", "tiny", *TABLES, *subject, "--out", str(tmp_path / "out")) == 2
    assert "must not hold another run" in capsys.readouterr().err
    assert (tmp_path / "out" / name).read_text() == "{}"


def test_folder_that_cannot_be_written_is_refused(
    subject: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert ended("run", "--profile", "tiny", *TABLES, *subject, "--out", str(tmp_path / "file" / "out")) == 2
    assert "must be a folder that can be written" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"schema": "other"}', '{"schema": "gdn-qualify/receipt"}', "\x00"]
)
@pytest.mark.parametrize("command", [("explain", "some/case[]x#0", "--receipt"), ("render",)])
def test_corrupt_receipt_is_refused(
    command: tuple[str, ...], text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "receipt.json").write_text(text)
    assert ended(*command, str(tmp_path / "receipt.json")) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


def test_folder_without_a_run_cannot_be_rendered(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ended("render", str(tmp_path)) == 2
    assert "plan.json" in capsys.readouterr().err


def test_the_folder_of_a_merge_is_rendered_from_its_receipt(tmp_path: Path) -> None:
    synthetic.write(tmp_path / "receipt.json", synthetic.receipt(30))
    assert ended("render", str(tmp_path)) == 0
    assert (tmp_path / "receipt.html").is_file()


def test_a_run_is_resumed_in_a_folder_that_is_named(
    subject: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert ended("run", "--profile", "tiny", "--resume", *TABLES, *subject) == 2
    assert "name it with --out" in capsys.readouterr().err


def test_plan_shows_cover_skips_and_cases(subject: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert ended("plan", "--profile", "tiny", *TABLES, *subject) == 0
    text = capsys.readouterr().out
    assert "12 cases, 8 run here, 4 do not" in text
    assert "cover  double: 14 of 14 tuples of 2" in text
    assert "skipped: needs sm to be sm90, got cpu" in text
    assert "good/double[sm:cpu,number:2,colour:red]ordinary#0" in text


def test_plan_as_json_names_every_case(subject: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert ended("plan", "--profile", "tiny", *TABLES, *subject, "--json", "--select", "number:2") == 0
    assert len(json.loads(capsys.readouterr().out)["cases"]) == 3


def test_env_is_json_on_request(capsys: pytest.CaptureFixture[str]) -> None:
    assert ended("env", "--json") == 0
    assert json.loads(capsys.readouterr().out)["facts"]["sm"]


def test_unknown_case_is_a_mistake(subject: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert ended("rerun", "good/double[sm:cpu,number:9,colour:red]ordinary#0", *TABLES, *subject) == 2
    assert "number:9" in capsys.readouterr().err
