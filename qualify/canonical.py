"""Canonical JSON (RFC 8785) and digests: the same content has the same bytes, and so the same name.

Numbers are written as ECMAScript writes an IEEE double (RFC 8785, section 3.2.2.3), keys are ordered by
their UTF-16 code units (section 3.2.3), strings escape only what they must (section 3.2.2.2). JSON has no
non-finite numbers: `qualify.records.jsonable` turns them into the strings `NaN`, `Infinity` and `-Infinity`
first, and a float that is still non-finite here is refused.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from json.encoder import encode_basestring
from typing import Any

MAX_EXACT_INTEGER = 2**53
"""Beyond this not every integer is a double, and readers of JSON may change the others."""

MAX_DEPTH = 64
"""Deeper nesting than this is no receipt."""

_quote: Callable[[str], str] = encode_basestring


def canonical_bytes(value: Any) -> bytes:
    """The one UTF-8 text that RFC 8785 gives to a JSON value.

    Args:
        value: None, bool, int, finite float, str, a sequence or a mapping with string keys, nested.

    Raises:
        TypeError: a value that JSON does not have, or a key that is no string.
        ValueError: a non-finite float, an integer that is no double, a lone surrogate, nesting too deep.
    """
    out: list[str] = []
    _write(value, out.append, MAX_DEPTH)
    try:
        return "".join(out).encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"a string must be valid Unicode, got a lone surrogate ({error.reason}); clean it"
        ) from error


def digest(value: Any) -> str:
    """`sha256:` and the hexadecimal SHA-256 of the canonical bytes of a JSON value."""
    return digest_bytes(canonical_bytes(value))


def digest_bytes(data: bytes) -> str:
    """`sha256:` and the hexadecimal SHA-256 of some bytes."""
    return "sha256:" + hashlib.sha256(data).hexdigest()


def _write(value: Any, put: Callable[[str], None], depth: int) -> None:
    leaf = _LEAVES.get(type(value))
    if leaf is not None:
        put(leaf(value))
    elif depth == 0:
        raise ValueError(f"nesting must not exceed {MAX_DEPTH} levels, got more; flatten the value")
    elif type(value) is list:
        _write_sequence(value, put, depth)
    elif type(value) is dict or isinstance(value, Mapping):
        _write_mapping(value, put, depth)
    elif isinstance(value, str):
        put(_quote(str(value)))
    elif isinstance(value, int):
        put(_integer_text(int(value)))
    elif isinstance(value, float):
        put(float_text(float(value)))
    elif isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        _write_sequence(value, put, depth)
    else:
        raise TypeError(f"a JSON value was expected, got {type(value).__name__}; convert it first")


def _write_mapping(value: Mapping[str, Any], put: Callable[[str], None], depth: int) -> None:
    for opening, key in _ordered(tuple(value)):
        item = value[key]
        leaf = _LEAVES.get(type(item))
        if leaf is not None:
            put(opening + leaf(item))
        else:
            put(opening)
            _write(item, put, depth - 1)
    put("}" if value else "{}")


def _write_sequence(value: Sequence[Any], put: Callable[[str], None], depth: int) -> None:
    opening = "["
    for item in value:
        leaf = _LEAVES.get(type(item))
        if leaf is not None:
            put(opening + leaf(item))
        else:
            put(opening)
            _write(item, put, depth - 1)
        opening = ","
    put("]" if value else "[]")


@lru_cache(maxsize=4096)
def _ordered(keys: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    """Keys in canonical order, each with the text that comes before its value."""
    for key in keys:
        if not isinstance(key, str):
            raise TypeError(f"a key of a JSON object must be a string, got {key!r}; convert it first")
    ordered = sorted(keys, key=lambda key: key.encode("utf-16-be", "surrogatepass"))
    return tuple((("," if i else "{") + _quote(key) + ":", key) for i, key in enumerate(ordered))


def _integer_text(value: int) -> str:
    if -MAX_EXACT_INTEGER <= value <= MAX_EXACT_INTEGER:
        return int.__repr__(value)
    text = int.__repr__(value) if value.bit_length() <= 1023 else ""
    if text and float_text(float(value)) == text:
        return text
    raise ValueError(
        f"an integer beyond 2^53 must be what a double prints, got one of {value.bit_length()} bits; "
        "write it as a string"
    )


def float_text(value: float) -> str:
    """A finite double as ECMAScript's Number::toString writes it.

    Python's `repr` yields the same shortest digits; only the place of the point and the exponent differ.

    Raises:
        ValueError: NaN or an infinity.
    """
    text = float.__repr__(value)
    if "e" not in text and "n" not in text:
        return (text[:-2] if value else "0") if text.endswith(".0") else text
    if not math.isfinite(value):
        raise ValueError(f"JSON has no {text}; write it as a string (qualify.records.jsonable)")
    mantissa, exponent_text = text.split("e")
    sign, mantissa = ("-", mantissa[1:]) if mantissa.startswith("-") else ("", mantissa)
    whole, _, fraction = mantissa.partition(".")
    digits, exponent = whole + fraction, int(exponent_text)
    if 0 <= exponent < 21:
        return sign + digits.ljust(exponent + 1, "0")
    if -7 < exponent < 0:
        return f"{sign}0.{'0' * (-exponent - 1)}{digits}"
    return f"{sign}{whole}{'.' + fraction if fraction else ''}e{'+' if exponent > 0 else '-'}{abs(exponent)}"


_LEAVES: Mapping[type, Callable[[Any], str]] = {
    str: _quote,
    float: float_text,
    int: _integer_text,
    bool: lambda value: "true" if value else "false",
    type(None): lambda value: "null",
}
"""How values without parts are written, by their exact type."""
