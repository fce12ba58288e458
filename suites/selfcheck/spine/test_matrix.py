"""The matrix covers what it claims, and the counter that says so is right and independent."""

from __future__ import annotations

from itertools import combinations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qualify.cover import prove
from qualify.matrix import Cell, cells, proofs

SPACE = {
    "dtype": ("fp32", "bf16", "fp16"),
    "sites": ("none", "state", "w", "both"),
    "format": ("e4m3", "int8"),
    "block_v": ("16", "64"),
    "length": ("1", "64", "65"),
}
NUMERICAL = ("dtype", "sites", "format", "block_v")
FORBIDDEN = [
    {"sites": ("none", "w"), "format": ("int8",)},
    {"sites": ("none", "w"), "block_v": ("16",)},
]

LEVELS = st.integers(1, 3)


@st.composite
def spaces(draw: st.DrawFn) -> tuple[dict[str, tuple[str, ...]], list[dict[str, tuple[str, ...]]]]:
    """Small spaces with rules that forbid parts of them."""
    sizes = draw(st.lists(LEVELS, min_size=2, max_size=4))
    space = {f"a{i}": tuple(f"v{j}" for j in range(size)) for i, size in enumerate(sizes)}
    rules: list[dict[str, tuple[str, ...]]] = []
    for _ in range(draw(st.integers(0, 3))):
        axes = draw(st.lists(st.sampled_from(sorted(space)), min_size=2, max_size=3, unique=True))
        rules.append({axis: (draw(st.sampled_from(space[axis])),) for axis in axes})
    return space, rules


def every_valid(space: dict[str, tuple[str, ...]], rules: list[dict[str, tuple[str, ...]]]) -> list[Cell]:
    """Brute force: all cells that break no rule."""
    made = [dict(zip(space, levels, strict=True)) for levels in product(*space.values())]
    return [c for c in made if not any(all(c[a] in lv for a, lv in rule.items()) for rule in rules)]


@settings(max_examples=40, deadline=None)
@given(spaces())
def test_counter_agrees_with_brute_force(
    made: tuple[dict[str, tuple[str, ...]], list[dict[str, tuple[str, ...]]]],
) -> None:
    space, rules = made
    valid = every_valid(space, rules)
    for strength in (1, 2, 3):
        groups = list(combinations(space, min(strength, len(space))))
        possible = sum(len({tuple(c[a] for a in group) for c in valid}) for group in groups)
        proof = prove(space, rules, valid, strength)
        assert (proof.possible, proof.covered) == (possible, possible)


@settings(max_examples=30, deadline=None)
@given(spaces())
def test_cells_are_valid_and_cover_every_pair(
    made: tuple[dict[str, tuple[str, ...]], list[dict[str, tuple[str, ...]]]],
) -> None:
    space, rules = made
    if not every_valid(space, rules):
        return
    assert prove(space, rules, cells(space, rules, "pairs"), 2).complete


@pytest.mark.parametrize(("strength", "tuples"), [("each", [1]), ("pairs", [2]), ("triples", [2, 3])])
def test_strength_covers_what_it_says(strength: str, tuples: list[int]) -> None:
    made = cells(SPACE, FORBIDDEN, strength, NUMERICAL)  # type: ignore[arg-type]
    found = proofs(SPACE, FORBIDDEN, made, strength, NUMERICAL)  # type: ignore[arg-type]
    assert [p.strength for p in found] == tuples
    assert all(p.complete for p in found)
    assert len(made) < len(every_valid(SPACE, FORBIDDEN))


def test_all_is_every_valid_cell() -> None:
    made = cells(SPACE, FORBIDDEN, "all")
    assert made == every_valid(SPACE, FORBIDDEN)


def test_counter_sees_one_missing_cell() -> None:
    made = cells(SPACE, FORBIDDEN, "pairs")
    shortened = [prove(SPACE, FORBIDDEN, made[:i] + made[i + 1 :], 2) for i in range(len(made))]
    assert any(not p.complete and p.missing for p in shortened)


def test_counter_sees_an_invalid_cell() -> None:
    bad = {"dtype": "fp32", "sites": "w", "format": "int8", "block_v": "64", "length": "1"}
    assert prove(SPACE, FORBIDDEN, [*cells(SPACE, FORBIDDEN, "pairs"), bad], 2).invalid == 1


def test_presets_come_first_and_impossible_ones_are_left_out() -> None:
    wanted = {"dtype": "fp16", "sites": "both", "length": "65"}
    made = cells(SPACE, FORBIDDEN, "each", presets=[wanted, {"sites": "w", "format": "int8"}])
    assert wanted.items() <= made[0].items()
    assert not any(c["sites"] == "w" and c["format"] == "int8" for c in made)


def test_cells_are_the_same_every_time() -> None:
    assert cells(SPACE, FORBIDDEN, "triples", NUMERICAL) == cells(SPACE, FORBIDDEN, "triples", NUMERICAL)
