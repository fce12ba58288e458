"""The tables of controls, looks and correct implementations hold together."""

from __future__ import annotations

from collections import Counter

import pytest

from qualify.cover import is_valid
from suites.checks.controls import LOOKS, ROWS
from suites.controls.control import KINDS, TIERS, Control
from suites.controls.table import CONTROLS
from suites.good.table import GOOD
from suites.subjects.eager import EagerGDN, EagerQDQ
from suites.tables import TABLES


def test_every_kind_of_defect_has_several_controls() -> None:
    kinds = Counter(control.kind for control in CONTROLS.values())
    assert set(kinds) == set(KINDS)
    assert min(kinds.values()) >= 5
    assert {control.tier for control in CONTROLS.values()} <= set(TIERS)


def test_no_name_is_given_twice() -> None:
    from suites.controls import codes, memory, ranges, sequences, sites, straight_through, terms

    rows = [
        *codes.CODES,
        *sites.SITES,
        *straight_through.STRAIGHT_THROUGH,
        *terms.TERMS,
        *sequences.SEQUENCES,
        *ranges.RANGES,
        *memory.MEMORY,
    ]
    assert len(rows) == len(CONTROLS) >= 30


@pytest.mark.parametrize("name", CONTROLS)
def test_control_replaces_one_method_and_begins_with_a_known_look(name: str) -> None:
    control = CONTROLS[name]
    assert len(control.replaces) + len(control.rounding) == 1
    assert control.looks
    assert set(control.looks) <= set(LOOKS)
    assert len(control.because) > 15


def test_a_control_that_replaces_nothing_cannot_be_built() -> None:
    with pytest.raises(ValueError, match="must replace a method"):
        Control("idle", "codes", "nothing is changed")
    with pytest.raises(ValueError, match="method of EagerQDQ"):
        Control("misspelt", "codes", "nothing is changed", rounding={"neares": EagerQDQ.nearest})


def test_two_subjects_of_a_control_share_no_history() -> None:
    one, two = (CONTROLS["stale_amax"].implementation() for _ in "12")
    assert one.qdq is not two.qdq
    assert type(one).__mro__[1] is EagerGDN


@pytest.mark.parametrize("name", LOOKS)
def test_look_is_a_valid_cell_of_its_row(name: str) -> None:
    look = LOOKS[name]
    row = TABLES.check(look.check)
    cell = {axis: look.levels.get(axis, levels[0]) for axis, levels in row.axes.items()}
    cell |= {"regime": look.regime or row.regimes[0], "sm": "cpu"}
    assert set(look.levels) <= set(row.axes)
    space = {axis: (*levels,) for axis, levels in row.axes.items()} | {"regime": row.regimes, "sm": ("cpu",)}
    rules = [c.forbid for c in (*TABLES.constraints, *row.constraints) if set(c.forbid) <= set(space)]
    assert is_valid(cell, space, rules)


def test_controls_run_in_every_profile_and_dtype() -> None:
    (row,) = ROWS
    assert row.control
    assert set(row.profiles) == {profile.name for profile in TABLES.profiles}
    assert row.axes["fault"] == tuple(CONTROLS)


def test_there_are_enough_correct_implementations() -> None:
    assert len(GOOD) >= 8
