"""The examples: one command signs, verifies, renders and pictures them, and stops where one does not hold."""

from __future__ import annotations

import gzip
import shutil
from pathlib import Path

import pytest

from reports.model import load
from reports.reading import ReceiptError
from reports.verify import verify
from suites.selfcheck.reports import examples, synthetic

EXAMPLE_BYTES = 1_000_000
PNG = b"\x89PNG"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two examples, one of them packed."""
    pytest.importorskip("securesystemslib", reason="the extra `sign` is not installed")
    for name, options in {"good": {}, "bad": {"failures": 2}}.items():
        (tmp_path / name).mkdir()
        synthetic.write(tmp_path / name / "receipt.json", synthetic.receipt(30, **options))
    plain = tmp_path / "bad" / "receipt.json"
    plain.with_name("receipt.json.gz").write_bytes(gzip.compress(plain.read_bytes()))
    plain.unlink()
    return tmp_path


def test_every_example_is_signed_verified_and_shown(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    examples.main(["--folder", str(folder)])
    told = capsys.readouterr().out
    public = folder / examples.PUBLIC_KEY
    for name, file, verdict in (
        ("good", "receipt.json", "QUALIFIED"),
        ("bad", "receipt.json.gz", "NOT_QUALIFIED"),
    ):
        assert verify(folder / name / file, folder / name / "receipt.dsse.json", [public]).passed
        assert (folder / name / "receipt.html").read_text().startswith("<!doctype html>")
        assert (folder / name / "summary.md").is_file()
        assert f"verified: {verdict}" in told
    assert "PRIVATE" not in public.read_text()
    assert not list(folder.rglob("*.pem"))


def test_an_example_that_does_not_hold_is_not_signed(folder: Path) -> None:
    path = folder / "good" / "receipt.json"
    path.write_bytes(path.read_bytes().replace(b'"verdict":"passed"', b'"verdict":"waived"', 1))
    with pytest.raises(examples.StepError, match="sign must end with 0"):
        examples.main(["--folder", str(folder)])
    assert not (folder / "good" / "receipt.dsse.json").exists()


def test_a_folder_without_examples_is_refused(tmp_path: Path) -> None:
    with pytest.raises(examples.StepError, match="must hold folders"):
        examples.main(["--folder", str(tmp_path)])


def test_pictures_are_taken_and_bounded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("suites.selfcheck.reports.test_browser", reason="no browser to take pictures with")
    if shutil.which("pdftoppm") is None:
        pytest.skip("pdftoppm is not installed")
    page = folder / "good" / "receipt.html"
    examples.sign(folder / "good", *_keys(folder))
    monkeypatch.setattr(examples, "MAX_IMAGE_BYTES", 1000)
    with pytest.raises(examples.StepError, match="pictures must have"):
        examples.picture(page, folder / "images")
    names = {path.name for path in (folder / "images").iterdir()}
    assert names == {"light.png", "dark.png", "print.png", "errors.png"}
    assert all(path.read_bytes().startswith(PNG) for path in (folder / "images").iterdir())


def _keys(folder: Path) -> tuple[Path, Path]:
    examples.qualify("keygen", folder / "key")
    return folder / "key", folder / "key.pub"


def kept() -> list[Path]:
    """The receipts that are kept as examples."""
    found = sorted(examples.EXAMPLES.glob("*/receipt.json*"))
    assert found, "no example is kept"
    return found


@pytest.mark.parametrize("path", kept(), ids=lambda path: path.parent.name)
def test_a_kept_example_is_small_signed_and_holds(path: Path) -> None:
    pytest.importorskip("securesystemslib", reason="the extra `sign` is not installed")
    assert path.stat().st_size < EXAMPLE_BYTES
    result = verify(path, path.with_name("receipt.dsse.json"), [examples.EXAMPLES / examples.PUBLIC_KEY])
    assert [f"{f.step}: {f.found}" for f in result.findings if not f.passed] == []


@pytest.mark.parametrize("path", kept(), ids=lambda path: path.parent.name)
def test_the_page_of_a_kept_example_is_of_that_receipt(path: Path) -> None:
    try:
        assert load(path).id in path.with_name("receipt.html").read_text()
    except ReceiptError as error:
        pytest.fail(str(error))
