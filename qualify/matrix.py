"""Cells of a row: as few as cover every wanted tuple of levels, built by covertable."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import covertable

from qualify.checks_table import Strength
from qualify.cover import Proof, completions, is_valid, prove

Cell = dict[str, str]
Space = Mapping[str, tuple[str, ...]]
Forbidden = Mapping[str, tuple[str, ...]]


def cells(
    space: Space,
    forbidden: Sequence[Forbidden],
    strength: Strength,
    numerical: Sequence[str] = (),
    presets: Sequence[Mapping[str, str]] = (),
) -> list[Cell]:
    """Valid cells that cover the space to `strength`; the completed presets come first.

    Args:
        space: axis -> levels.
        forbidden: see `qualify.cover.prove`.
        strength: `each`, `pairs`, `triples` (of the numerical axes, pairs of all) or `all`.
        numerical: the axes whose triples count.
        presets: partial cells that must be among the result. One that no valid cell contains is left out.
    """
    rules = [rule for rule in forbidden if all(axis in space for axis in rule)]
    possible = [p for p in presets if set(p) <= set(space) and fits(p, space, rules)]
    if strength == "all" or len(space) == 1:
        made = _every(space, rules)
    else:
        made = _covering(space, rules, strength, numerical, possible)
    return _order(made, possible, space, rules)


def fits(partial: Mapping[str, str], space: Space, rules: Sequence[Forbidden]) -> bool:
    """Whether some valid cell contains the partial cell."""
    known = all(axis in space and level in space[axis] for axis, level in partial.items())
    return known and next(completions(partial, space, rules), None) is not None


def proofs(
    space: Space,
    forbidden: Sequence[Forbidden],
    made: Sequence[Cell],
    strength: Strength,
    numerical: Sequence[str] = (),
) -> list[Proof]:
    """What the cells cover, by the independent counter: a proof for each strength that was asked for."""
    inside = [axis for axis in space if axis in numerical]
    if strength == "all":
        return [prove(space, forbidden, made, len(space))]
    wanted = [prove(space, forbidden, made, 1 if strength == "each" else 2)]
    if strength == "triples" and len(inside) >= 3:
        wanted.append(prove(space, forbidden, made, 3, inside))
    return wanted


def _every(space: Space, rules: Sequence[Forbidden]) -> list[Cell]:
    found = (dict(zip(space, levels, strict=True)) for levels in product(*space.values()))
    return [cell for cell in found if is_valid(cell, space, rules)]


def _covering(
    space: Space,
    rules: Sequence[Forbidden],
    strength: Strength,
    numerical: Sequence[str],
    presets: Sequence[Mapping[str, str]],
) -> list[Cell]:
    options: dict[str, Any] = {}
    inside = [axis for axis in space if axis in numerical]
    if strength == "triples" and len(inside) >= 3:
        options["sub_models"] = [{"fields": inside, "strength": 3}]
    if rules:
        options["constraints"] = [_condition(rule) for rule in rules]
    if presets:
        options["presets"] = [dict(p) for p in presets]
    factors = {axis: list(levels) for axis, levels in space.items()}
    rows = covertable.make(factors, strength=1 if strength == "each" else 2, **options)
    return [{axis: str(row[axis]) for axis in space} for row in rows]


def _condition(rule: Forbidden) -> dict[str, Any]:
    inside = [{"operator": "in", "left": axis, "values": list(levels)} for axis, levels in rule.items()]
    return {"operator": "not", "condition": {"operator": "and", "conditions": inside}}


def _order(
    made: list[Cell], presets: Sequence[Mapping[str, str]], space: Space, rules: Sequence[Forbidden]
) -> list[Cell]:
    """The cells without repetition, those that complete a preset first; a preset that none has is added."""
    first: list[Cell] = []
    for preset in presets:
        held = next((cell for cell in made if preset.items() <= cell.items()), None)
        first.append(held or _complete(preset, space, rules))
    unique: dict[tuple[str, ...], Cell] = {tuple(cell.values()): cell for cell in [*first, *made]}
    return list(unique.values())


def _complete(preset: Mapping[str, str], space: Space, rules: Sequence[Forbidden]) -> Cell:
    found = next(completions(preset, space, rules))
    return {axis: found.get(axis, space[axis][0]) for axis in space}
