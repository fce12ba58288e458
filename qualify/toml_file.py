"""TOML files of the user, read whole: bounded, strict, and named by the digest of their bytes.

A file that still is a valid one after an edit says something else, and no reader can know that it was not
meant: a digest that was written down elsewhere can.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qualify.canonical import digest_bytes
from qualify.errors import UsageError

MAX_BYTES = 2**20
MAX_DEPTH = 8
MAX_SHOWN = 120
MAX_DOTS = 256
"""In one line: `tomllib` takes time with the square of a key's parts, minutes for one of 64 KiB."""

INTEGERS = range(-(2**63), 2**63)
"""TOML 1.0 asks that integers of 64 bits be kept, and an error for those that are not."""


@dataclass(frozen=True)
class TomlFile:
    """A TOML file that was read.

    Attributes:
        name: the file's own name, without folders.
        where: its path as it was given, for messages.
        digest: of its bytes.
        document: what it holds.
    """

    name: str
    where: str
    digest: str
    document: Mapping[str, Any]


def read_toml(path: Path, pinned: str = "") -> TomlFile:
    """The TOML file at a path.

    Args:
        path: a regular file.
        pinned: the digest that it must have, as `sha256:` and 64 digits; empty: any.

    Raises:
        UsageError: no such file, another digest, no TOML, bottomless nesting, an integer beyond 64 bits.
    """
    data = _bytes(path)
    actual = digest_bytes(data)
    if pinned and actual != expected_digest(pinned):
        raise UsageError(f"{path} must have the digest {pinned}, got {actual}; review it and pin what it has")
    dots = max((line.count(b".") for line in data.split(b"\n")), default=0)
    if dots > MAX_DOTS:
        raise UsageError(f"{path} must hold at most {MAX_DOTS} dots in a line, got {dots}; break the line")
    try:
        document = tomllib.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} must be TOML, got {shown(str(error))}; mend it") from error
    if not _fits(document, MAX_DEPTH):
        raise UsageError(
            f"{path} must hold integers of 64 bits and at most {MAX_DEPTH} levels, got more; mend it"
        )
    return TomlFile(path.name, str(path), actual, document)


def expected_digest(text: str) -> str:
    """A digest that a user wrote down.

    Raises:
        UsageError: it does not read as one.
    """
    if not re.fullmatch(r"sha256:[0-9a-f]{64}", text):
        raise UsageError(
            f"a digest must read sha256: and 64 hexadecimal digits, got {shown(text)!r}; copy it whole"
        )
    return text


def shown(value: object) -> str:
    """A value in a message: on one line, printable, and not endless."""
    text = value if isinstance(value, str) else repr(value)
    text = "".join(c if c.isprintable() else " " for c in text[: MAX_SHOWN + 1])
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 1] + "…"


def _bytes(path: Path) -> bytes:
    try:
        if not path.is_file():
            found = "a folder" if path.is_dir() else "no such file"
            raise UsageError(f"{path} must be a file, got {found}; check the path")
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise UsageError(f"{path} must be at most {MAX_BYTES} bytes, got {size}; split it")
        return path.read_bytes()
    except OSError as error:
        raise UsageError(
            f"{path} must be readable, got {error.strerror or error}; check its rights"
        ) from error


def _fits(value: Any, depth: int) -> bool:
    if isinstance(value, dict | list):
        parts = value.values() if isinstance(value, dict) else value
        return depth > 0 and all(_fits(part, depth - 1) for part in parts)
    return type(value) is not int or value in INTEGERS
