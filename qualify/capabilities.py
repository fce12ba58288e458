"""What a subject declares that it can do, read leniently, held against a cell."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

CARRIERS: Mapping[str, str] = {
    "float32": "fp32",
    "float": "fp32",
    "f32": "fp32",
    "bfloat16": "bf16",
    "float16": "fp16",
    "half": "fp16",
    "f16": "fp16",
}
"""Other spellings of the levels of the axis `dtype`."""

FORMATS: Mapping[str, str] = {
    "float8_e4m3fn": "e4m3",
    "float8_e4m3": "e4m3",
    "e4m3fn": "e4m3",
    "fp8": "e4m3",
    "fp8_e4m3": "e4m3",
    "float8e4nv": "e4m3",
}
"""Other spellings of the levels of the axis `format`."""

DEVICES: Mapping[str, str] = {"gpu": "cuda", "nvidia": "cuda"}
STATE_SITES = ("state", "both")
ROUNDED_SITES = ("state", "w", "both")


def carrier_name(value: Any) -> str:
    """`fp32`, `bf16` or `fp16` for a torch dtype or any usual spelling; other text in lower case."""
    text = str(value).lower().removeprefix("torch.")
    return CARRIERS.get(text, text)


def ruled_out(capabilities: Mapping[str, Any], levels: Mapping[str, str]) -> str:
    """Why a subject's declaration rules a cell out, in one line; empty when it does not.

    A key that is absent or cannot be read rules nothing out: then the call itself decides.

    Args:
        capabilities: `devices`, `dtypes`, `formats`, `block_v` (collections), `min_sm` (a number such as
            80 or 9.0, a name such as `sm89`, or a pair), `features` (a mapping: False rules the feature out).
        levels: the cell.
    """
    declared = {str(key).lower(): value for key, value in capabilities.items()}
    sites = levels.get("sites", "both")
    questions: list[tuple[str, str | None, Callable[[Any], str], bool]] = [
        ("devices", "cpu" if levels.get("sm", "cpu") == "cpu" else "cuda", _device, True),
        ("dtypes", levels.get("dtype"), carrier_name, True),
        ("formats", levels.get("format"), _format, sites in ROUNDED_SITES),
        ("block_v", levels.get("block_v"), str, sites in STATE_SITES),
    ]
    for key, level, read, applies in questions:
        allowed = _collection(declared.get(key))
        if applies and level is not None and allowed is not None:
            names = [read(item) for item in allowed]
            if level not in names:
                return f"CAPABILITIES: {key} must hold {level}, got {', '.join(names) or 'nothing'}"
    return _below_minimum(declared.get("min_sm", declared.get("minimum_sm")), levels) or _missing_feature(
        declared.get("features"), levels
    )


def _collection(value: Any) -> list[Any] | None:
    if value is None or isinstance(value, Mapping):
        return None
    if isinstance(value, str) or not isinstance(value, Iterable):
        return [value]
    return list(value)


def _device(value: Any) -> str:
    text = str(value).lower().partition(":")[0]
    return DEVICES.get(text, text)


def _format(value: Any) -> str:
    text = str(value).lower().removeprefix("torch.")
    return FORMATS.get(text, text)


def _below_minimum(value: Any, levels: Mapping[str, str]) -> str:
    level = levels.get("sm", "cpu")
    minimum = _sm_number(value)
    if minimum is None or level == "cpu" or int(level.removeprefix("sm")) >= minimum:
        return ""
    return f"CAPABILITIES: min_sm must be at most {level}, got {value}"


def _sm_number(value: Any) -> int | None:
    """80, 8.0, "8.0", "sm80" and (8, 0) all read as 80."""
    if isinstance(value, tuple | list) and len(value) == 2:
        return int(value[0]) * 10 + int(value[1])
    match = re.search(r"\d+(\.\d+)?", str(value)) if value is not None else None
    if match is None:
        return None
    number = float(match.group())
    return round(number * 10) if number < 20 else round(number)


def _missing_feature(value: Any, levels: Mapping[str, str]) -> str:
    """A feature is named by its level, `axis:level` or `level`; only an explicit False rules it out."""
    if not isinstance(value, Mapping):
        return ""
    for axis, level in levels.items():
        for name in (f"{axis}:{level}", level):
            if value.get(name) is False:
                return f"CAPABILITIES: feature {name} must not be ruled out, got False"
    return ""
