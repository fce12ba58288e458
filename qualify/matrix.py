"""Cells of a row: as few as cover every wanted tuple of levels, built by covertable."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, product
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
    made = [{axis: str(row[axis]) for axis in space} for row in rows]
    sizes = {1 if strength == "each" else 2: tuple(space)}
    if "sub_models" in options:
        sizes[3] = tuple(inside)
    return _balanced(made, space, rules, sizes, [axis for axis in inside if len(space[axis]) > 1], presets)


def _balanced(
    made: list[Cell],
    space: Space,
    rules: Sequence[Forbidden],
    sizes: Mapping[int, tuple[str, ...]],
    axes: Sequence[str],
    presets: Sequence[Mapping[str, str]],
) -> list[Cell]:
    """The same cover with every level of `axes` met about as often as the others of its axis.

    A cover leaves many levels free, and whoever fills them with the first of an axis runs most cells in one
    dtype. A level is replaced by a rarer one where nothing is lost: no tuple, no preset, no rule.

    Args:
        made: cells, changed in place.
        sizes: size of the tuples that are covered -> their axes.
        axes: what is balanced.
    """
    counts = Counter(t for cell in made for t in _tuples(cell, sizes))
    levels = {axis: Counter(cell[axis] for cell in made) for axis in axes}
    for cell in made:
        if any(preset.items() <= cell.items() for preset in presets):
            continue
        for axis in axes:
            met = levels[axis]
            for level in sorted(space[axis], key=lambda level: met[level]):
                if met[level] + 1 >= met[cell[axis]]:
                    break
                changed = {**cell, axis: level}
                lost = [t for t in _tuples(cell, sizes, axis) if counts[t] == 1]
                if lost or not is_valid(changed, space, rules):
                    continue
                counts.subtract(_tuples(cell, sizes, axis))
                counts.update(_tuples(changed, sizes, axis))
                met[cell[axis]] -= 1
                met[level] += 1
                cell[axis] = level
                break
    return made


def _tuples(
    cell: Cell, sizes: Mapping[int, tuple[str, ...]], among: str | None = None
) -> Iterator[tuple[tuple[str, str], ...]]:
    """The tuples of levels that a cell has, or those of them with the axis `among`."""
    for size, axes in sizes.items():
        for group in combinations(axes, size):
            if among is None or among in group:
                yield tuple((axis, cell[axis]) for axis in group)


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
