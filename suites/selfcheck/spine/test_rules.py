"""Requirements and capabilities: what a machine or a subject cannot run, and why."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from qualify.capabilities import carrier_name, ruled_out
from qualify.requirements import Requirement, unmet
from suites.tables.axes import REQUIREMENTS

CELL = {"sm": "sm90", "dtype": "bf16", "sites": "both", "format": "int8", "block_v": "32"}


def test_skip_names_requirement_and_value_seen() -> None:
    found = unmet({"sm": "sm90"}, {"sm": "cpu"}, REQUIREMENTS)
    assert found is not None
    assert (found.requirement, found.value_seen) == ("on sm90", "cpu")
    assert "needs sm to be sm90, got cpu" in found.reason


@pytest.mark.parametrize(
    ("facts", "met"),
    [({"memory": "80"}, True), ({"memory": "79.9"}, False), ({}, False), ({"memory": "much"}, False)],
)
def test_at_least_compares_numbers_and_a_missing_fact_meets_nothing(facts: dict[str, str], met: bool) -> None:
    row = Requirement("memory", {"length": ("huge",)}, "memory", "at_least", "80", "it is large")
    assert (unmet({"length": "huge"}, facts, [row]) is None) is met
    assert unmet({"length": "64"}, facts, [row]) is None


@pytest.mark.parametrize("sm", ["sm80", "sm86", "sm89"])
def test_native_conversion_needs_sm_90(sm: str) -> None:
    facts = {"sm": sm, "sm_number": sm.removeprefix("sm")}
    assert unmet({"sm": sm, "conversion": "native"}, facts, REQUIREMENTS) is not None
    assert unmet({"sm": sm, "conversion": "portable"}, facts, REQUIREMENTS) is None


@pytest.mark.parametrize(
    "capabilities",
    [
        {},
        {"dtypes": [torch.bfloat16, "float32"]},
        {"dtypes": {"bfloat16"}, "formats": ("int8",), "block_v": {16, 32}},
        {"dtypes": "torch.bfloat16"},
        {"devices": ["cuda:0"], "min_sm": 80},
        {"devices": "gpu", "min_sm": "sm90"},
        {"min_sm": 9.0, "features": ["grouped heads"]},
        {"min_sm": (9, 0), "formats": None, "block_v": 32},
        {"formats": [None, "int8"], "min_sm": "hopper"},
    ],
)
def test_lenient_spellings_rule_nothing_out(capabilities: dict[str, Any]) -> None:
    assert ruled_out(capabilities, CELL) == ""


@pytest.mark.parametrize(
    ("capabilities", "word"),
    [
        ({"dtypes": ["fp32"]}, "dtypes"),
        ({"formats": ["float8_e4m3fn"]}, "formats"),
        ({"block_v": [64]}, "block_v"),
        ({"devices": ["cpu"]}, "devices"),
        ({"min_sm": 100}, "min_sm"),
        ({"min_sm": "10.0"}, "min_sm"),
        ({"features": {"sites:both": False}}, "feature"),
    ],
)
def test_declaration_rules_a_cell_out(capabilities: dict[str, Any], word: str) -> None:
    assert word in ruled_out(capabilities, CELL)


def test_format_and_tile_matter_only_where_their_site_is_on() -> None:
    assert ruled_out({"block_v": [64]}, {**CELL, "sites": "w"}) == ""
    assert ruled_out({"formats": ["e4m3"]}, {**CELL, "sites": "none"}) == ""


@pytest.mark.parametrize("spelling", [torch.float16, "half", "Float16", "torch.float16", "fp16"])
def test_carrier_spellings_agree(spelling: object) -> None:
    assert carrier_name(spelling) == "fp16"
