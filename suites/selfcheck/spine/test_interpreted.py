"""Subjects that define Triton kernels are known by their text; others are not taken for such."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from qualify.interpreted import defines_kernels
from suites.tables import TABLES

KERNELS = (
    "import triton\n@triton.jit\ndef f(): pass",
    "import triton as t\n@t.autotune([], [])\n@t.jit\ndef f(): pass",
    "from triton import jit as compiled\n@compiled\ndef f(): pass",
    "import triton.language as tl, triton\nf = triton.jit(print)",
    "from triton.runtime.jit import jit\ndef make():\n    return jit(print)",
    "def later():\n    import triton\n    return triton.jit(print)",
)
NONE = (
    "import triton\nprint(triton.__version__)",
    "import jax\n@jax.jit\ndef f(): pass",
    "text = '@triton.jit'",
    "def f(:",
)


@pytest.mark.parametrize(("text", "found"), [*((t, True) for t in KERNELS), *((t, False) for t in NONE)])
def test_a_text_that_uses_jit_is_told_from_one_that_names_triton(
    tmp_path: Path, text: str, found: bool
) -> None:
    file = tmp_path / "mine.py"
    file.write_text(text)
    assert defines_kernels(str(file)) is found


@pytest.mark.parametrize(
    "line",
    [
        "import fast",
        "from fast import row",
        "import fast.row",
        "from fast.row import kernel",
        "import importlib\nrow = importlib.import_module('fast.row')",
    ],
)
def test_kernels_in_a_helper_count(tmp_path: Path, line: str) -> None:
    (tmp_path / "fast").mkdir()
    (tmp_path / "fast" / "__init__.py").write_text("from . import row")
    (tmp_path / "fast" / "row.py").write_text(KERNELS[0])
    (tmp_path / "mine.py").write_text(line)
    assert defines_kernels(str(tmp_path / "mine.py"))
    (tmp_path / "fast" / "row.py").write_text("import mine\nimport fast")
    assert not defines_kernels(str(tmp_path / "mine.py"))


def test_of_installed_packages_those_count_that_the_subject_imports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "site-packages"
    home.mkdir()
    (home / "their_kernels.py").write_text(KERNELS[0])
    (home / "a_framework.py").write_text("import their_kernels")
    (tmp_path / "adapter.py").write_text("from their_kernels import op")
    (tmp_path / "mine.py").write_text("import a_framework, torch")
    monkeypatch.setattr(sys, "path", [str(home), *sys.path])
    assert defines_kernels("their_kernels:object")
    assert defines_kernels(str(tmp_path / "adapter.py"))
    assert not defines_kernels(str(tmp_path / "mine.py"))


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("from kernels import chunk_gated_delta_rule", True),
        ("from kernels.gdn import op", True),
        ("from references.gdn_chunk import gdn_chunk", False),
        ("from suites.good.table import GOOD", False),
    ],
)
def test_a_wrapper_around_this_project(tmp_path: Path, line: str, found: bool) -> None:
    (tmp_path / "mine.py").write_text(line)
    assert defines_kernels(str(tmp_path / "mine.py")) is found


@pytest.mark.parametrize(
    ("spec", "found"),
    [("kernels", True), ("kernels.qdq", True), ("eager", False), ("nothing_like_this", False), ("", False)],
)
def test_built_in_subjects(spec: str, found: bool) -> None:
    assert defines_kernels(TABLES.subjects.get(spec, spec)) is found


def test_nothing_is_imported(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("raise SystemExit(1)\n" + KERNELS[0])
    before = set(sys.modules)
    assert defines_kernels(str(tmp_path / "mine.py"))
    assert set(sys.modules) == before
