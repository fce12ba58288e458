"""Untrusted JSON turned into typed records: bounded, strict on types, never surprising.

A file is hostile until read: it is limited in size and depth, holds no key twice and no number that is not a
finite double, and every value has the type that its record declares. What fails says where and why.
"""

from __future__ import annotations

import gc
import json
import math
import types
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, fields, is_dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

MAX_BYTES = 160 * 2**20
"""A larger file is refused unread: 20,000 whole-op cases take about 115 MB."""

GZIP_MAGIC, GZIP_FORMAT = b"\x1f\x8b", 31

Reader = Callable[[Any, str], Any]
NONFINITE: Mapping[str, float] = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class ReceiptError(ValueError):
    """A file is not what it claims to be; the message names the place, the value and the remedy."""


@contextmanager
def without_collector() -> Iterator[None]:
    """Pauses the cyclic collector: building millions of objects that all stay makes it walk in vain."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def read_bytes(path: Path, limit: int = MAX_BYTES) -> bytes:
    """The bytes of a regular file of bounded size.

    Raises:
        ReceiptError: no such file, no regular file, or one that is too large.
    """
    try:
        if not path.is_file():
            raise ReceiptError(
                f"{path}: must be a file, got {'a folder' if path.is_dir() else 'nothing'}; check the path"
            )
        size = path.stat().st_size
        if size > limit:
            raise ReceiptError(
                f"{path}: must be at most {limit} bytes, got {size}; this is no receipt of ours"
            )
        return path.read_bytes()
    except OSError as error:
        raise ReceiptError(
            f"{path}: could not be read ({error.strerror or error}); check the path and its rights"
        ) from error


def read_packed_bytes(path: Path, limit: int = MAX_BYTES) -> bytes:
    """The bytes of a file of bounded size, or what is in it when it is a gzip file; that is bounded as well.

    Raises:
        ReceiptError: as `read_bytes`; or what is packed is larger, cut short, or followed by something.
    """
    data = read_bytes(path, limit)
    if not data.startswith(GZIP_MAGIC):
        return data
    unpack = zlib.decompressobj(GZIP_FORMAT)
    try:
        found = unpack.decompress(data, limit + 1)
    except zlib.error as error:
        raise ReceiptError(f"{path}: must be a sound gzip file ({short(error)}); fetch it again") from error
    if len(found) > limit:
        raise ReceiptError(f"{path}: must hold at most {limit} bytes, got more; this is no receipt of ours")
    if not unpack.eof or unpack.unused_data:
        raise ReceiptError(f"{path}: must be one whole gzip file, got a part or more; fetch it again")
    return found


def parse_json(data: bytes, name: str) -> Any:
    """A JSON value from bytes: UTF-8, no duplicate keys, no non-finite literals, no bottomless nesting.

    Raises:
        ReceiptError: anything else.
    """
    try:
        return json.loads(data.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant)
    except RecursionError:
        raise ReceiptError(f"{name}: is nested too deeply; this is no file of ours") from None
    except ValueError as error:
        raise ReceiptError(
            f"{name}: is not strict JSON ({short(error)}); it may be truncated or edited"
        ) from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("a key occurs twice in one object")
    return made


def _no_constant(text: str) -> float:
    raise ValueError(f"{text} is not JSON; non-finite numbers are strings")


def short(value: object, limit: int = 120) -> str:
    """Text of a value, cut to a length that fits on a line of an error message."""
    text = " ".join(str(value).split())
    return text if len(text) <= limit else text[: limit - 1] + "…"


def refused(where: str, rule: str, value: object) -> ReceiptError:
    """The error that names place, rule and value."""
    return ReceiptError(
        f"{where}: must be {rule}, got {short(repr(value))}; the file was edited or is foreign"
    )


def read_text(value: Any, where: str) -> str:
    """A string."""
    if type(value) is not str:
        raise refused(where, "text", value)
    return value


def read_integer(value: Any, where: str) -> int:
    """An integer (a boolean is none), or a float without a fraction."""
    if type(value) is float and value.is_integer():
        return int(value)
    if type(value) is not int:
        raise refused(where, "an integer", value)
    return value


def read_boolean(value: Any, where: str) -> bool:
    """True or False."""
    if type(value) is not bool:
        raise refused(where, "true or false", value)
    return value


def read_number(value: Any, where: str) -> float:
    """A finite number, or one of the strings NaN, Infinity and -Infinity."""
    kind = type(value)
    if kind is float:
        if value - value != 0.0:
            raise refused(where, "a finite double", value)
        return value  # type: ignore[no-any-return]
    if kind is int:
        if abs(value) >= 2**1023:
            raise refused(where, "a finite double", "a huge integer")
        return float(value)
    if kind is not str or value not in NONFINITE:
        raise refused(where, "a number", value)
    return NONFINITE[value]


def read_anything(value: Any, where: str) -> Any:
    """A JSON value as it is, for parts whose content only needs to be shown."""
    return value


LEAVES: Mapping[Any, Reader] = {
    str: read_text,
    int: read_integer,
    bool: read_boolean,
    float: read_number,
    Any: read_anything,
}


@cache
def reader(kind: Any) -> Reader:
    """The function that reads a JSON value as `kind`.

    Args:
        kind: a leaf type, a StrEnum, `X | None`, `tuple[X, ...]`, `Mapping[str, X]` or a dataclass of these.

    Raises:
        TypeError: a type that has no reading.
    """
    if kind in LEAVES:
        return LEAVES[kind]
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType) and len(arguments) == 2 and type(None) in arguments:
        return _optional(reader(next(a for a in arguments if a is not type(None))))
    if origin is tuple and len(arguments) == 2 and arguments[1] is ...:
        return _sequence(reader(arguments[0]))
    if origin is Mapping:
        return _mapping(reader(arguments[1]))
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        return _choice(kind)
    if is_dataclass(kind) and isinstance(kind, type):
        return _record(kind)
    raise TypeError(f"no reading is known for {kind!r}; add one to LEAVES")


def _optional(inner: Reader) -> Reader:
    return lambda value, where: None if value is None else inner(value, where)


def _sequence(inner: Reader) -> Reader:
    def read(value: Any, where: str) -> tuple[Any, ...]:
        if type(value) is not list:
            raise refused(where, "a list", value)
        return tuple([inner(item, where) for item in value])

    return read


def _mapping(inner: Reader) -> Reader:
    def read(value: Any, where: str) -> Mapping[str, Any]:
        if type(value) is not dict:
            raise refused(where, "an object", value)
        return {key: inner(item, where) for key, item in value.items()}

    return read


def _choice(kind: type[StrEnum]) -> Reader:
    known = {str(member): member for member in kind}

    def read(value: Any, where: str) -> StrEnum:
        if type(value) is not str or value not in known:
            raise refused(where, f"one of {', '.join(known)}", value)
        return known[value]

    return read


def _record(kind: type) -> Reader:
    hints = get_type_hints(kind)
    columns = [
        (
            f.name,
            reader(hints[f.name]),
            f.default is MISSING and f.default_factory is MISSING,
            f"{kind.__name__}.{f.name}",
        )
        for f in fields(kind)
        if f.init
    ]

    def read(value: Any, where: str) -> Any:
        if type(value) is not dict:
            raise refused(where, "an object", value)
        made: dict[str, Any] = {}
        for name, inner, required, place in columns:
            if name in value:
                made[name] = inner(value[name], place)
            elif required:
                raise ReceiptError(
                    f"{where}: must have `{name}`, got none; the file was edited or is foreign"
                )
        try:
            return kind(**made)
        except ValueError as error:
            raise ReceiptError(f"{where}: contradicts itself: {short(error, 240)}") from error

    return read
