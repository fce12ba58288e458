"""Every launch row can be forced, really runs, and gives the same bits where the order of sums is free."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from itertools import zip_longest

import pytest

from kernels.gdn import LAUNCH_ROWS, force_launch_row
from kernels.gdn.builds import BUILDS, KERNELS, SHAPES, Shape, facts_of
from kernels.gdn.launch_table import ROWS
from kernels.launch import INTERPRETER, LaunchRow, recorded_launches, row_for
from suites.selfcheck.gdn.inputs import exact_problem, levels_of, run, wrong_bits

PROBLEMS = (
    # several tiles of K and V, the last ones partial; the state site is off, so V tiles are the row's
    "dtype:bf16,sites:w,length:17,heads:72x136,grouping:hv1",
    "dtype:fp16,sites:w,length:17,heads:72x136,grouping:hv1",
    "dtype:bf16,sites:both,length:17,heads:24x40,grouping:hv1,block_v:32",
    "dtype:bf16,sites:both,length:17,heads:24x40,grouping:hv1,block_v:16",
    "dtype:fp32,sites:both,length:17,heads:24x40,grouping:hv1,block_v:16",
    "dtype:fp32,sites:state,length:17,heads:24x136,grouping:hv1,block_v:128",
    # a scale group that is too large to be worked on whole
    "dtype:fp32,sites:state,length:17,heads:136x136,grouping:hv1,block_v:128",
    "dtype:bf16,sites:state,length:17,heads:136x136,grouping:hv1,block_v:128",
)


def shape_of(cell: str) -> Shape:
    """What the launch of a problem depends on."""
    at = levels_of(cell)
    K, V = (int(size) for size in at["heads"].split("x"))
    return Shape(at["dtype"], K, V, int(at.get("block_v", "64")), at["sites"] != "w")


def fitting(row: LaunchRow) -> list[str]:
    """The problems that a row is for."""
    return [cell for cell in PROBLEMS if row.fits(INTERPRETER, facts_of(row.kernel, shape_of(cell)))]


def sets() -> Iterator[tuple[str, tuple[str, ...]]]:
    """Problems, each with rows to force at once, one for each kernel; together they hold every row."""
    chosen: dict[tuple[str, str], list[str]] = {}
    for row in ROWS:
        cells = fitting(row)
        if cells:
            cell = min(cells, key=lambda cell: len(chosen.get((cell, row.kernel), ())))
            chosen.setdefault((cell, row.kernel), []).append(row.name)
    for cell in PROBLEMS:
        lists = [chosen.get((cell, kernel), []) for kernel in KERNELS]
        for names in zip_longest(*lists):
            yield cell, tuple(name for name in names if name is not None)


SETS = tuple(sets())


@pytest.mark.parametrize(("cell", "names"), SETS)
def test_every_row_runs_when_it_is_forced_and_every_bit_is_right(cell: str, names: tuple[str, ...]) -> None:
    problem = exact_problem(cell)
    with ExitStack() as stack, recorded_launches() as launches:
        for name in names:
            stack.enter_context(force_launch_row(name))
        actual = run(problem)
    assert set(names) <= set(launches.values())
    assert wrong_bits(problem, actual) == []


def test_these_problems_are_enough_for_every_row() -> None:
    assert {name for _, names in SETS for name in names} == set(LAUNCH_ROWS)
    assert {row.name for row in ROWS} == set(LAUNCH_ROWS)
    assert all(row.because for row in ROWS)


@pytest.mark.parametrize("sm", [80, 86, 89, 90, 100, 120])
def test_every_architecture_has_a_row_for_every_launch(sm: int) -> None:
    for kernel in KERNELS:
        for shape in SHAPES:
            row = row_for(kernel, sm, **facts_of(kernel, shape))
            assert row.default
            assert row.fits(sm, facts_of(kernel, shape))


def test_builds_hold_every_row_and_no_argument_twice() -> None:
    assert {build.row for build in BUILDS} == set(LAUNCH_ROWS)
    assert len({build.name for build in BUILDS}) == len(BUILDS)
    for build in BUILDS:
        assert not build.arguments.keys() & build.constexprs.keys()
