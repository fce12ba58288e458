"""Whether a subject has Triton kernels of its own, which run in an interpreter where there is no GPU.

A call of such a kernel takes seconds there, so less is asked of it. That is found in the subject's text: a
plan is made before anything of a subject is imported.
"""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from qualify.subject_files import INSTALLED

TRITON = "triton"
OTHERS = frozenset({*sys.stdlib_module_names, TRITON, "torch", "numpy", "jax", "transformers"})
"""What a subject imports and what says nothing of its kernels."""

DOTTED = re.compile(r"\.*[A-Za-z_]\w*(\.\w+)*")

MAX_FILES = 400
"""More files are not read."""


def defines_kernels(origin: str) -> bool:
    """Whether a subject's file or module defines a Triton kernel, or what it imports of its own does.

    Its own is what lies beside the file or beside the module's top-level package, and each package that the
    file or module itself imports; of an installed package, that one alone.

    Args:
        origin: a `.py` file, or a dotted module with or without an object behind a colon.
    """
    if origin.endswith(".py"):
        todo, first = [(Path(origin).parent, "", Path(origin))], {Path(origin)}
    else:
        todo = _module(origin.partition(":")[0].split("."))
        first = {file for *_, file in todo}
    seen: set[Path] = set()
    while todo and len(seen) < MAX_FILES:
        home, only, file = todo.pop()
        if file in seen:
            continue
        seen.add(file)
        try:
            tree = ast.parse(file.read_bytes())
        except (OSError, SyntaxError, ValueError, RecursionError):
            continue
        if _has_kernel(tree):
            return True
        package = _package(home, file)
        named = (p for p in _named(tree, package) if file in first or p[:1] == package[:1])
        for parts in [*_imports(tree, package), *named]:
            beside = _files(home, parts) if only in ("", *parts[:1]) else []
            todo += [(home, only, found) for found in beside]
        if file in first:
            others = (p for p in _imports(tree, package) if p[0] not in OTHERS and not _files(home, p))
            todo += [found for parts in others for found in _module(parts)]
    return False


def _module(parts: Sequence[str]) -> list[tuple[Path, str, Path]]:
    """The files of a module as (folder of its top-level package, that package's name if it is installed,
    file)."""
    home = _folder_of(parts[0])
    if home is None:
        return []
    return [(home, parts[0] if INSTALLED & {*home.parts} else "", file) for file in _files(home, parts)]


def _folder_of(root: str) -> Path | None:
    """The folder that holds a top-level module; None where there is none."""
    try:
        spec = importlib.util.find_spec(root) if root else None
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        return None
    places = [*map(Path, spec.submodule_search_locations or ())] or [Path(spec.origin or "")]
    return places[0].parent


def _files(home: Path, parts: Sequence[str]) -> list[Path]:
    """The files that importing `a.b.c` from a folder would run; `c` may be a name inside `b`."""
    found = []
    for length in range(1, len(parts) + 1):
        place = home.joinpath(*parts[:length])
        found += [file for file in (place.with_suffix(".py"), place / "__init__.py") if file.is_file()]
    return found


def _package(home: Path, file: Path) -> list[str]:
    """The package that a file's relative imports are relative to, as parts below a folder."""
    return [*file.parent.relative_to(home).parts]


def _imports(tree: ast.AST, package: Sequence[str]) -> Iterator[list[str]]:
    """Every module, and every name that may be one, that a text imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = [*package[: len(package) - node.level + 1]] if node.level else []
            module = above + (node.module.split(".") if node.module else [])
            yield from ([*module, alias.name] for alias in node.names)


def _named(tree: ast.AST, package: Sequence[str]) -> Iterator[list[str]]:
    """Every dotted name in a string: a package may import its parts by name when they are asked for."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and DOTTED.fullmatch(node.value):
            name = node.value.lstrip(".")
            level = len(node.value) - len(name)
            yield [*(package[: len(package) - level + 1] if level else ()), *name.split(".")]


def _has_kernel(tree: ast.AST) -> bool:
    """Whether a text uses `triton.jit`, under whatever name."""
    modules: set[str] = set()
    by_name = False
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            named = (alias for alias in node.names if alias.name.split(".")[0] == TRITON)
            modules |= {alias.asname or TRITON for alias in named}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == TRITON:
            by_name = by_name or any(alias.name == "jit" for alias in node.names)
    return by_name or any(
        isinstance(node, ast.Attribute)
        and node.attr == "jit"
        and isinstance(node.value, ast.Name)
        and node.value.id in modules
        for node in ast.walk(tree)
    )
