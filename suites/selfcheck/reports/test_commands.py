"""The commands about receipts: what they write, what they say, and their exit codes."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from qualify.canonical import digest_bytes
from reports import commands
from reports.model import load
from suites.selfcheck.reports import synthetic

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def app() -> typer.Typer:
    made = typer.Typer()
    commands.register(made)
    return made


def call(app: typer.Typer, *arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    said = result.output + (
        f"{type(result.exception).__name__}: {result.exception}" if result.exception else ""
    )
    return result.exit_code, said


def run_folder(folder: Path, **options: Any) -> Path:
    folder.mkdir()
    synthetic.write(folder / "receipt.json", synthetic.receipt(40, **options))
    return folder


def test_sign_verify_and_an_edit_in_between(app: typer.Typer, tmp_path: Path) -> None:
    pytest.importorskip("securesystemslib", reason="the extra `sign` is not installed")
    folder = run_folder(tmp_path / "run")
    key = tmp_path / "key.pem"
    assert call(app, "keygen", key)[0] == 0
    assert call(app, "sign", folder, "--key", key)[0] == 0
    code, said = call(app, "verify", folder, "--key", f"{key}.pub")
    assert code == 0
    assert "verified: QUALIFIED" in said
    path = folder / "receipt.json"
    path.write_bytes(path.read_bytes().replace(b"NVIDIA H200", b"NVIDIA H100"))
    code, said = call(app, "verify", folder, "--key", f"{key}.pub")
    assert code == 1
    assert "it was edited" in said
    code, said = call(app, "sign", folder, "--key", key)
    assert code == 1
    assert "only a receipt that holds is signed" in said


def test_verify_without_a_key_says_that_no_signature_was_checked(app: typer.Typer, tmp_path: Path) -> None:
    code, said = call(app, "verify", run_folder(tmp_path / "run", failures=1))
    assert code == 0
    assert "no signature was checked" in said
    assert "verified: NOT_QUALIFIED" in said


def test_diff_exits_by_what_is_worse(app: typer.Typer, tmp_path: Path) -> None:
    good, bad = run_folder(tmp_path / "a"), run_folder(tmp_path / "b", failures=2)
    assert call(app, "diff", good, good)[0] == 0
    code, said = call(app, "diff", good, bad, "--html", tmp_path / "diff.html")
    assert code == 1
    assert "QUALIFIED -> NOT_QUALIFIED" in said
    assert "Nothing is worse" not in (tmp_path / "diff.html").read_text()
    assert call(app, "diff", bad, good)[0] == 0


def test_merge_writes_everything_and_exits_with_the_verdict(app: typer.Typer, tmp_path: Path) -> None:
    for i, value in enumerate(synthetic.shards(40, 2, failures=1)):
        (tmp_path / str(i)).mkdir()
        synthetic.write(tmp_path / str(i) / "receipt.json", value)
    code, said = call(app, "merge", tmp_path / "0", tmp_path / "1", "--out", tmp_path / "whole")
    assert code == 1
    assert "NOT_QUALIFIED" in said
    names = {path.name for path in (tmp_path / "whole").iterdir()}
    assert names == {"receipt.json", "receipt.html", "junit.xml", "ctrf.json", "summary.md"}
    code, said = call(app, "merge", tmp_path / "0", tmp_path / "1", "--out", tmp_path / "whole")
    assert "must hold no receipt yet" in said


def test_gate_stores_its_results_and_exits_by_them(app: typer.Typer, tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run")
    policy = tmp_path / "policy.toml"
    policy.write_text("max_margin = 0.99\nno_worse = true\n")
    code, said = call(app, "gate", folder, "--policy", policy, "--baseline", folder)
    assert code == 0, said
    body = load(folder / "receipt.json").body
    assert [gate.rule for gate in body.gates] == ["verdict", "max_margin", "no_worse"]
    assert body.comparison is not None
    assert "Gates" in (folder / "receipt.html").read_text()
    policy.write_text("max_margin = 0.01\n")
    code, said = call(app, "gate", folder, "--policy", policy, "--out", tmp_path / "other.json")
    assert code == 1
    assert load(tmp_path / "other.json").body.header.verdict == "NOT_QUALIFIED"
    assert load(folder / "receipt.json").body.header.verdict == "QUALIFIED"


def test_a_policy_under_its_digest_is_that_policy_or_refused(app: typer.Typer, tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run")
    policy, waivers = tmp_path / "policy.toml", tmp_path / "waivers.toml"
    policy.write_text("max_margin = 0.99\n")
    waivers.write_text("# none\n")
    pins = ["--policy-digest", digest_bytes(policy.read_bytes())]
    pins += ["--waivers-digest", digest_bytes(waivers.read_bytes())]
    line = ["gate", folder, "--policy", policy, "--waivers", waivers, *pins]
    for file in (policy, waivers):
        sound = file.read_bytes()
        file.write_bytes(sound + b"\n")
        code, said = call(app, *line)
        assert code == 1
        assert "must have the digest" in said
        assert not load(folder / "receipt.json").body.gates
        file.write_bytes(sound)
    code, said = call(app, *line)
    assert code == 0, said
    code, said = call(app, "gate", folder, "--policy", policy, "--waivers-digest", pins[-1])
    assert "--waivers" in said


def test_verify_tells_whose_policy_it_was(app: typer.Typer, tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run")
    assert "no policy was applied" in call(app, "verify", folder)[1]
    policy, other = tmp_path / "policy.toml", tmp_path / "other.toml"
    policy.write_text("max_margin = 0.99\n")
    other.write_text("max_margin = 0.999\n")
    code, said = call(app, "verify", folder, "--policy", policy)
    assert code == 1
    assert "FAILED  the policy given: no policy was applied" in said
    assert call(app, "gate", folder, "--policy", policy)[0] == 0
    code, said = call(app, "verify", folder)
    assert code == 0
    assert digest_bytes(policy.read_bytes()) in said
    assert call(app, "verify", folder, "--policy", policy)[0] == 0
    code, said = call(app, "verify", folder, "--policy", other)
    assert code == 1
    assert digest_bytes(other.read_bytes()) in said
    code, said = call(app, "verify", folder, "--policy", policy, "--waivers", other)
    assert code == 1
    assert "no waivers were applied" in said


def test_a_page_that_says_something_else_is_refused(app: typer.Typer, tmp_path: Path) -> None:
    """The receipt is sound; the page beside it was edited, or shows another receipt."""
    folder, other = run_folder(tmp_path / "run", failures=1), run_folder(tmp_path / "other")
    page = folder / "receipt.html"
    assert call(app, "export", folder, "--html", page)[0] == 0
    assert call(app, "verify", folder, "--page", page)[0] == 0
    page.write_text(page.read_text().replace("Not qualified", "Qualified"))
    code, said = call(app, "verify", folder, "--page", page)
    assert code == 1
    assert "FAILED  the page given: receipt.html is another page" in said
    assert call(app, "export", other, "--html", page)[0] == 0
    assert call(app, "verify", folder, "--page", page)[0] == 1


def test_history_and_export_write_what_they_are_asked_for(app: typer.Typer, tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run")
    assert call(app, "history", tmp_path, "--out", tmp_path / "history.html")[0] == 0
    assert (tmp_path / "history.html").read_text().startswith("<!doctype html>")
    assert call(app, "export", folder, "--markdown", tmp_path / "s.md")[0] == 0
    assert (tmp_path / "s.md").read_text().startswith("## Qualified")
    code, said = call(app, "export", folder)
    assert code == 1
    assert "a form must be asked for" in said


@pytest.mark.parametrize(
    "line",
    [
        "verify nowhere",
        "diff nowhere nowhere",
        "merge nowhere --out x",
        "history nowhere",
        "sign nowhere --key nokey",
    ],
)
def test_what_is_not_there_is_one_line(app: typer.Typer, line: str) -> None:
    code, said = call(app, *line.split())
    assert code != 0
    assert len(said.strip().splitlines()) == 1


def documented() -> list[str]:
    """Every command about receipts that the documentation and the workflow show."""
    names = {
        c.__name__.rstrip("_") for c in (commands.verify_, commands.sign, commands.keygen, commands.diff)
    }
    names |= {
        c.__name__.rstrip("_") for c in (commands.merge_, commands.gate, commands.history_, commands.export)
    }
    texts = [ROOT / "docs" / "receipts.md", ROOT / ".github" / "workflows" / "qualify.yml"]
    shown = re.compile(rf"(?:^|[\s&|])qualify ((?:{'|'.join(names)}) [^&|#`]+)")
    found = [m[1] for path in texts for line in path.read_text().splitlines() for m in shown.finditer(line)]
    assert len(found) > 10
    return found


@pytest.mark.parametrize("line", documented())
def test_documented_commands_have_the_options_that_are_shown(app: typer.Typer, line: str) -> None:
    name, *words = shlex.split(line)
    _, shown = call(app, name, "--help")
    known = set(re.findall(r"--[a-z][a-z-]*", shown))
    assert {word for word in words if word.startswith("--")} <= known
