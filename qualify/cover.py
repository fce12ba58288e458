"""The proof of a cover: counts level tuples on its own, whatever chose the cells."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product

Space = Mapping[str, Sequence[str]]
Forbidden = Mapping[str, Sequence[str]]
Cell = Mapping[str, str]


@dataclass(frozen=True)
class Proof:
    """How many of the level tuples that some valid cell has are met by the cells given.

    Attributes:
        axes: the axes whose tuples were counted.
        strength: how many axes a tuple spans.
        possible: tuples that at least one valid cell has.
        covered: those of them that the given cells have.
        missing: some that they lack, for the message.
        invalid: cells that break a constraint or stand on an unknown level.
    """

    axes: tuple[str, ...]
    strength: int
    possible: int
    covered: int
    missing: tuple[tuple[tuple[str, str], ...], ...] = ()
    invalid: int = 0

    @property
    def complete(self) -> bool:
        """Whether nothing possible is missing and no cell is invalid."""
        return self.possible == self.covered and not self.invalid


def prove(
    space: Space,
    forbidden: Sequence[Forbidden],
    cells: Sequence[Cell],
    strength: int,
    axes: Sequence[str] | None = None,
    steps: Iterator[int] | None = None,
) -> Proof:
    """Counts possible and covered tuples of `strength` axes.

    Args:
        space: axis -> levels.
        forbidden: each maps axes to levels; a cell with all of them on a named level is invalid.
        cells: what is planned.
        strength: axes in a tuple; cut to the number of axes.
        axes: count tuples of these axes only (default: all).
        steps: one is taken for every partial cell that is looked at (default: without end). Whether a tuple
            can be completed under the rules of a stranger may take forever to find out.

    Raises:
        ValueError: the steps did not suffice.
    """
    chosen = tuple(axes if axes is not None else space)
    strength = min(strength, len(chosen))
    rules = [rule for rule in forbidden if all(axis in space for axis in rule)]
    possible = covered = 0
    missing: list[tuple[tuple[str, str], ...]] = []
    for group in combinations(chosen, strength):
        met = {tuple(cell[axis] for axis in group) for cell in cells}
        for levels in product(*(space[axis] for axis in group)):
            if not extendable(dict(zip(group, levels, strict=True)), space, rules, steps):
                continue
            possible += 1
            if levels in met:
                covered += 1
            elif len(missing) < 5:
                missing.append(tuple(zip(group, levels, strict=True)))
    invalid = sum(not is_valid(cell, space, rules) for cell in cells)
    return Proof(chosen, strength, possible, covered, tuple(missing), invalid)


def is_valid(cell: Cell, space: Space, rules: Sequence[Forbidden]) -> bool:
    """Whether a cell has one known level on each axis and breaks no rule."""
    known = set(cell) == set(space) and all(cell[axis] in space[axis] for axis in space)
    return known and not any(_breaks(cell, rule) for rule in rules)


def extendable(
    partial: Cell, space: Space, rules: Sequence[Forbidden], steps: Iterator[int] | None = None
) -> bool:
    """Whether some valid cell contains these levels."""
    return next(completions(partial, space, rules, steps), None) is not None


def completions(
    partial: Cell, space: Space, rules: Sequence[Forbidden], steps: Iterator[int] | None = None
) -> Iterator[dict[str, str]]:
    """The ways to fill the axes that some rule names, so that no rule is broken; other axes are free."""
    if steps is not None and next(steps, None) is None:
        raise ValueError("a cover must be counted in bounded time, got rules that take longer; simplify them")
    if any(_breaks(partial, rule) for rule in rules):
        return
    axis = next((a for rule in rules for a in rule if a not in partial), None)
    if axis is None:
        yield dict(partial)
        return
    for level in space[axis]:
        yield from completions({**partial, axis: level}, space, rules, steps)


def _breaks(cell: Cell, rule: Forbidden) -> bool:
    return all(cell.get(axis) in levels for axis, levels in rule.items())
