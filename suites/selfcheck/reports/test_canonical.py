"""Canonical JSON: RFC 8785's own examples and the properties that digests rest on."""

from __future__ import annotations

import json
import math
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qualify.canonical import MAX_DEPTH, canonical_bytes, digest, float_text

# RFC 8785, appendix B: IEEE bits and the text they must give.
NUMBERS = [
    ("0000000000000000", "0"),
    ("8000000000000000", "0"),
    ("0000000000000001", "5e-324"),
    ("8000000000000001", "-5e-324"),
    ("7fefffffffffffff", "1.7976931348623157e+308"),
    ("ffefffffffffffff", "-1.7976931348623157e+308"),
    ("4340000000000000", "9007199254740992"),
    ("c340000000000000", "-9007199254740992"),
    ("4430000000000000", "295147905179352830000"),
    ("44b52d02c7e14af5", "9.999999999999997e+22"),
    ("44b52d02c7e14af6", "1e+23"),
    ("44b52d02c7e14af7", "1.0000000000000001e+23"),
    ("444b1ae4d6e2ef4e", "999999999999999700000"),
    ("444b1ae4d6e2ef4f", "999999999999999900000"),
    ("444b1ae4d6e2ef50", "1e+21"),
    ("3eb0c6f7a0b5ed8c", "9.999999999999997e-7"),
    ("3eb0c6f7a0b5ed8d", "0.000001"),
    ("41b3de4355555553", "333333333.3333332"),
    ("41b3de4355555557", "333333333.33333343"),
    ("becbf647612f3696", "-0.0000033333333333333333"),
    ("43143ff3c1cb0959", "1424953923781206.2"),
]

JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"]), max_size=4), inner, max_size=4)
    ),
    max_leaves=20,
)


@pytest.mark.parametrize(("bits", "text"), NUMBERS)
def test_numbers_are_written_as_the_standard_says(bits: str, text: str) -> None:
    assert float_text(struct.unpack(">d", bytes.fromhex(bits))[0]) == text


def test_the_standards_sorting_example() -> None:
    keys = ["\u20ac", "\r", "\ufb33", "1", "\U0001f600", "\u0080", "\u00f6"]
    assert list(json.loads(canonical_bytes(dict.fromkeys(keys, 0)))) == [
        "\r", "1", "\u0080", "\u00f6", "\u20ac", "\U0001f600", "\ufb33"
    ]  # fmt: skip


def test_the_standards_string_example() -> None:
    assert canonical_bytes("\u20ac$\u000f\u000aA'B\u0022\u005c\\\"/") == (
        '"\u20ac$\\u000f\\nA\'B\\"\\\\\\\\\\"/"'.encode()
    )


@given(JSON_VALUES)
@settings(max_examples=200, deadline=None)
def test_writing_what_was_read_gives_the_same_bytes(value: object) -> None:
    first = canonical_bytes(value)
    assert canonical_bytes(json.loads(first)) == first


@given(st.floats(allow_nan=False, allow_infinity=False))
@settings(max_examples=300, deadline=None)
def test_a_number_survives(value: float) -> None:
    assert float(float_text(value)) == value


def test_an_integer_and_the_equal_float_have_one_text() -> None:
    assert canonical_bytes([1, 1.0, 1e15]) == b"[1,1,1000000000000000]"


def test_the_order_of_keys_does_not_change_the_digest() -> None:
    assert digest({"a": 1, "b": [True, None]}) == digest({"b": [True, None], "a": 1})
    assert digest({}) == "sha256:44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"


@pytest.mark.parametrize(
    "value", [math.nan, math.inf, -math.inf, 2**53 + 1, 10**400, "\ud800", {"a": "\udfff"}]
)
def test_what_json_cannot_hold_exactly_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match=r"must|JSON has no"):
        canonical_bytes(value)


@pytest.mark.parametrize("value", [{1: 2}, b"bytes", {1, 2}, object()])
def test_what_json_does_not_have_is_refused(value: object) -> None:
    with pytest.raises(TypeError):
        canonical_bytes(value)


def test_deep_nesting_is_refused() -> None:
    value: list[object] = []
    for _ in range(MAX_DEPTH + 1):
        value = [value]
    with pytest.raises(ValueError, match="nesting"):
        canonical_bytes(value)
