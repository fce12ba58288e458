"""Subjects in files are kept apart from one another and from the harness, with what lies beside them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kernels
from qualify.subject_facts import load_and_describe
from qualify.subjects import Subject, load_subject, resolve_subject


@pytest.fixture(autouse=True)
def undisturbed() -> Iterator[None]:
    """The process's own modules and path, whatever a test imports."""
    modules, path, finders = dict(sys.modules), [*sys.path], [*sys.meta_path]
    yield
    assert sys.meta_path == finders
    for name in set(sys.modules) - set(modules):
        del sys.modules[name]
    sys.modules.update(modules)
    sys.path[:] = path


def written(folder: Path, **files: str) -> str:
    """Writes `name.py` files; returns the path of `mine.py`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        path = folder / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return str(folder / "mine.py")


def value(subject: Subject) -> Any:
    assert subject.qdq_w is not None, subject.import_error
    return subject.qdq_w(3)


OP = "def qdq_w(w, *, fmt='e4m3'): return op(w)"


@pytest.mark.parametrize("helper", ["helper", "kernels", "reports"])
def test_two_releases_have_a_helper_of_one_name_each(tmp_path: Path, helper: str) -> None:
    subjects = []
    for number in (10, 20, 30):
        path = written(
            tmp_path / str(number),
            mine=f"from {helper} import op\n{OP}",
            **{helper: f"def op(w): return {number} + w"},
        )
        subjects.append(load_subject(str(number), path))
    assert [value(subject) for subject in subjects] == [13, 23, 33]
    assert sys.modules["kernels"] is kernels
    assert not hasattr(sys.modules.get("reports"), "op")


@pytest.mark.parametrize("init", [True, False])
def test_a_package_named_as_one_of_the_harness_is_the_subjects_own(tmp_path: Path, init: bool) -> None:
    files = {"kernels____init__": ""} if init else {}
    path = written(
        tmp_path, mine=f"from kernels.fast import op\n{OP}", kernels__fast="def op(w): return 7 * w", **files
    )
    assert value(load_subject("mine", path)) == 21
    assert sys.modules["kernels"] is kernels
    assert "kernels.fast" not in sys.modules


def test_installed_packages_come_before_what_lies_beside_a_subject(tmp_path: Path) -> None:
    path = written(
        tmp_path, mine=f"import json, torch\ndef op(w): return torch.ones(w).sum()\n{OP}", torch="1/0"
    )
    assert value(load_subject("mine", path)) == 3


def test_a_subject_may_use_this_project_from_its_own_folder() -> None:
    root = Path(kernels.__file__).parents[1]
    file = root / "suites" / "subjects" / "kernels.py"
    assert load_subject("mine", str(file)).import_error == ""
    assert sys.modules["kernels"] is kernels


@pytest.mark.parametrize("helper", ["helper", "kernels"])
def test_what_is_imported_from_beside_a_subject_is_digested(tmp_path: Path, helper: str) -> None:
    found = []
    for number in (1, 2):
        path = written(
            tmp_path / str(number),
            mine=f"from {helper} import op\n{OP}",
            **{helper: f"def op(w): return {number}"},
        )
        found.append(load_and_describe("mine", path)[1]["files"])
    assert [{*files} for files in found] == [{"mine.py", f"{helper}.py"}] * 2
    assert found[0][f"{helper}.py"] != found[1][f"{helper}.py"]


def test_an_object_in_a_module_is_a_subject(tmp_path: Path) -> None:
    written(
        tmp_path,
        release_of_mine="class Release:\n    @staticmethod\n    def qdq_w(w, *, fmt='e4m3'): return 5 * w\n",
    )
    sys.path.insert(0, str(tmp_path))
    subject = load_subject("mine", "release_of_mine:Release")
    assert value(subject) == 15
    assert subject.module is sys.modules["release_of_mine"]
    assert "AttributeError" in load_subject("mine", "release_of_mine:Nothing").import_error


def test_a_module_that_is_named_with_an_object_is_looked_for() -> None:
    assert resolve_subject("suites.subjects.eager:EAGER", {}) == "suites.subjects.eager:EAGER"
