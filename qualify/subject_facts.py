"""What a receipt says about a subject: which files were really imported, of which version and commit."""

from __future__ import annotations

import hashlib
import importlib.metadata
import subprocess
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from qualify.canonical import digest_bytes
from qualify.guard import lent_streams
from qualify.probe import guarded
from qualify.subject_files import PREFIX, lies_in
from qualify.subjects import Subject, load_subject, offers

MAX_FILES = 400


def load_and_describe(name: str, origin: str) -> tuple[Subject, dict[str, Any]]:
    """Imports a subject and describes what that brought in.

    Args:
        name: how ids call it.
        origin: where it is loaded from.
    """
    before = dict(sys.modules)
    with lent_streams():
        subject = load_subject(name, origin)
    return subject, facts(subject, {n for n, m in sys.modules.items() if before.get(n) is not m})


def facts(subject: Subject, imported: set[str]) -> dict[str, Any]:
    """The subject's part of a receipt.

    Args:
        subject: as loaded.
        imported: names of the modules that its import brought in.
    """
    module = subject.module
    home = _folder(module)
    package = (getattr(module, "PACKAGE", None) or (module.__name__ if module else "")).partition(".")[0]
    distribution, version = _distribution(package)
    commit, dirty, diff = _commit(home)
    return {
        "name": subject.name,
        "origin": _shown(subject.origin),
        "package": distribution or package,
        "version": str(getattr(module, "__version__", "") or version),
        "commit": commit,
        "dirty": dirty,
        "diff_digest": diff,
        "files": files(module, imported),
        "backend": str(getattr(module, "BACKEND", "")),
        "offers": list(offers(subject)),
        "capabilities": {str(k): _text(v) for k, v in subject.capabilities.items()},
        "arithmetic": {str(k): str(v) for k, v in subject.arithmetic.items()},
        "deterministic": subject.deterministic,
        "import_error": subject.import_error,
    }


def files(module: ModuleType | None, imported: set[str]) -> dict[str, str]:
    """Path -> digest of the subject's own file and of the files that its import brought in from its packages.

    Packages: those of the module itself, what lies beside its file, and those that it names in `PACKAGES`.
    Paths are relative to the folder that holds the package, so that they read the same on every machine.
    """
    if module is None:
        return {}
    roots = {module.__name__.partition(".")[0], *map(str, getattr(module, "PACKAGES", ()))}
    names = {n for n in {*imported, *sys.modules} if n.partition(".")[0] in roots} | {module.__name__}
    home = _folder(module) if module.__name__.startswith(PREFIX) else None
    if home is not None:
        names |= {n for n in imported if lies_in(home, sys.modules.get(n))}
    found: dict[str, str] = {}
    for name in sorted(names)[:MAX_FILES]:
        path = Path(str(getattr(sys.modules.get(name), "__file__", None)))
        data, _ = guarded(path.read_bytes)
        if data is not None:
            found[_module_path(name, path)] = digest_bytes(data)
    return found


def _module_path(name: str, path: Path) -> str:
    if name.startswith(PREFIX):
        name = name.partition(".")[2] or name
    if name == path.stem or "." not in name:
        return path.name
    folders = name.split(".") if path.stem == "__init__" else name.split(".")[:-1]
    return "/".join([*folders, path.name])


def _text(value: Any) -> Any:
    if isinstance(value, str | bool | int | float) or value is None:
        return value
    if isinstance(value, Mapping):
        return {str(k): _text(v) for k, v in value.items()}
    shown, _ = guarded(lambda: sorted(str(v) for v in value))
    return shown if shown is not None else str(value)[:200]


def _shown(origin: str) -> str:
    """A file as its name alone: receipts speak of no folder of the machine."""
    return Path(origin).name if origin.endswith(".py") else origin


def _folder(module: ModuleType | None) -> Path | None:
    path = getattr(module, "__file__", None)
    return Path(path).parent if path else None


def _distribution(package: str) -> tuple[str, str]:
    names, _ = guarded(lambda: importlib.metadata.packages_distributions()[package])
    name = (names or [""])[0]
    version, _ = guarded(partial(importlib.metadata.version, name)) if name else ("", "")
    return name, version or ""


def commit_of(folder: Path) -> tuple[str, bool, str]:
    """Commit, dirty flag and digest of the difference to it, of the checkout that a folder is in."""
    return _commit(folder)


def _commit(folder: Path | None) -> tuple[str, bool, str]:
    if folder is None:
        return "", False, ""
    commit, _ = guarded(lambda: _git(folder, "rev-parse", "HEAD").decode().strip())
    if not commit:
        return "", False, ""
    diff, _ = guarded(lambda: _git(folder, "diff", "HEAD"))
    return commit, bool(diff), f"sha256:{hashlib.sha256(diff).hexdigest()}" if diff else ""


def _git(folder: Path, *arguments: str) -> bytes:
    return subprocess.run(
        ["git", "-C", str(folder), *arguments], capture_output=True, timeout=20, check=True
    ).stdout
