"""Imports a subject out of a file, with the helpers that lie beside it, apart from what else a worker holds.

A worker may judge two releases of one thing, each with a `helper.py` of its own, and a kernel repository may
have a folder `kernels` as the harness has. So while such a file is imported, a name that lies beside it and
that is a part of the harness, or was loaded from beside another subject, is looked for beside it first.
Installed packages come before what lies beside it, as they do without this.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import re
import sys
from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

HARNESS = frozenset({"qualify", "kernels", "references", "suites", "reports"})
"""Top-level packages of this project."""

INSTALLED = frozenset({"site-packages", "dist-packages"})
"""Folders of packages that are installed side by side."""

PREFIX = "gdn_qualify_subject_"
"""How the names of modules begin that came from a file."""

_folders: list[Path] = []
"""Folders of the subjects that were imported."""


def import_file(path: str) -> ModuleType:
    """A module out of a file, under a name of its own.

    Args:
        path: of a `.py` file; its folder stays importable, the last subject's before those of others.

    Raises:
        ImportError: it is no Python file.
        Exception: whatever its code raises.
    """
    name = PREFIX + re.sub(r"\W", "_", path)
    found = importlib.util.spec_from_file_location(name, path)
    if found is None or found.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module
    with _beside(Path(path), name):
        found.loader.exec_module(module)
    return module


@contextmanager
def _beside(file: Path, name: str) -> Iterator[None]:
    """Within it, names that others took are those beside a file; afterwards the harness has its own back.

    Args:
        file: the subject's.
        name: of its module; what it imports under a name of the harness is kept as a part of that.
    """
    folder, others = file.parent, [other for other in _folders if other != file.parent]
    sys.path[:] = [p for p in sys.path if Path(p) not in others]
    sys.path += [p for p in map(str, (folder, *others)) if p not in sys.path]
    _folders[:] = [folder, *others]

    shared = {n for n in HARNESS - {file.stem} if _is_another(n, folder)}
    stale = {
        n for n, m in sys.modules.items() if any(lies_in(o, m) for o in others) and _spec(_root(n), folder)
    }
    taken = shared | {_root(n) for n in stale} - {file.stem}
    displaced = {n: sys.modules.pop(n) for n in [*sys.modules] if _root(n) in taken}
    finder = _Finder(folder, taken)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for own in [n for n in sys.modules if _root(n) in shared]:
            sys.modules[f"{name}.{own}"] = sys.modules.pop(own)
        sys.modules.update({n: m for n, m in displaced.items() if _root(n) in shared})


def _is_another(name: str, folder: Path) -> bool:
    """Whether a folder has a module of a name, other than the one that would be imported without it."""
    own = _spec(name, folder)
    try:
        usual = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        usual = None
    return own is not None and (usual is None or _places(own) != _places(usual))


def lies_in(folder: Path, module: ModuleType | None) -> bool:
    """Whether a module came from a folder, and not from an environment that lies in there as well."""
    found = getattr(module, "__file__", None) or next(iter(getattr(module, "__path__", ())), None)
    path = Path(str(found))
    return path.is_relative_to(folder) and not INSTALLED & {*path.parts}


def _places(spec: ModuleSpec) -> list[Path]:
    """Where a module that is found in this way has its file, or its folders where it has none."""
    return [Path(spec.origin)] if spec.origin else [*map(Path, spec.submodule_search_locations or ())]


class _Finder(MetaPathFinder):
    """Finds some top-level names in one folder."""

    def __init__(self, folder: Path, names: Set[str]) -> None:
        self._folder, self._names = folder, names

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The folder's module of a name; None leaves it to those that find others."""
        return _spec(fullname, self._folder) if fullname in self._names else None


def _spec(name: str, folder: Path) -> ModuleSpec | None:
    return importlib.machinery.PathFinder.find_spec(name, [str(folder)])


def _root(name: str) -> str:
    return name.partition(".")[0]
