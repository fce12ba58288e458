"""The tables that a matrix is made of, and where they are loaded from."""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from qualify.axes import REGIME_AXIS, SM_AXIS, Axis, Profile
from qualify.checks_table import CheckRow, Constraint
from qualify.errors import UsageError
from qualify.requirements import Requirement

DEFAULT_TABLES = "suites.tables:TABLES"


@dataclass(frozen=True)
class WrongAnswerRow:
    """A named wrong answer that every qualified subject has to be told apart from.

    Attributes:
        name: as comparisons name it in `excluded` and `discrimination`.
        sites: it must be excluded for each of these sites that a profile executes; empty: whenever the op
            runs at all, whatever its sites.
        formats: only where one of these formats is executed; empty: any.
        dtypes: only in these carriers, where it can differ from the contract at all; empty: any.
        because: what the fault is.
    """

    name: str
    because: str
    sites: tuple[str, ...] = ()
    formats: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Tables:
    """Everything that a plan is made from.

    Attributes:
        axes: every dimension of the matrix.
        constraints: cells that are meaningless on any machine, for every check.
        requirements: what machines must have.
        profiles: the named parts of the matrix.
        checks: what is asked.
        wrong_answers: what must be excluded, for subjects that offer the op.
        subjects: built-in subjects by name: where each is loaded from.
        default_subjects: what is judged when none is named.
        sweep: an axis whose levels are run one after the other, every check of a level together, so that a
            run that is cut short has whole levels; empty: the cases come check by check.
    """

    axes: tuple[Axis, ...]
    constraints: tuple[Constraint, ...]
    requirements: tuple[Requirement, ...]
    profiles: tuple[Profile, ...]
    checks: tuple[CheckRow, ...]
    wrong_answers: tuple[WrongAnswerRow, ...] = ()
    subjects: Mapping[str, str] = field(default_factory=dict)
    default_subjects: tuple[str, ...] = ()
    sweep: str = ""

    def profile(self, name: str) -> Profile:
        """The profile of a name.

        Raises:
            UsageError: there is none.
        """
        found = next((p for p in self.profiles if p.name == name), None)
        if found is None:
            known = ", ".join(p.name for p in self.profiles)
            raise UsageError(f"profile must be one of {known}, got {name!r}; choose one of them")
        return found

    def check(self, name: str) -> CheckRow:
        """The row of a check.

        Raises:
            UsageError: there is none.
        """
        found = next((row for row in self.checks if row.name == name), None)
        if found is None:
            raise UsageError(f"check must be a row of the table of checks, got {name!r}; see `qualify plan`")
        return found

    def validated(self) -> Tables:
        """These tables, once every name that one of them uses is known to the others.

        Raises:
            UsageError: a row names an axis level, profile or check that does not exist, or one twice.
        """
        levels = {axis.name: set(axis.levels) for axis in self.axes}
        profiles = {profile.name for profile in self.profiles}
        problems = [f"check {n} is there twice" for n in _twice(row.name for row in self.checks)]
        for row in self.checks:
            problems += [
                f"{row.name}: axis {axis} has no level {level!r}"
                for axis, used in row.axes.items()
                for level in used
                if axis in levels and level not in levels[axis]
            ]
            problems += [
                f"{row.name}: axis {a} is added by the plan" for a in row.axes if a in (SM_AXIS, REGIME_AXIS)
            ]
            problems += [f"{row.name}: no profile {name!r}" for name in row.profiles if name not in profiles]
            problems += [
                f"{row.name}: {name} keeps unknown level {axis}:{level}"
                for name, options in row.profiles.items()
                for axis, used in options.axes.items()
                for level in used
                if level not in row.axes.get(axis, ())
            ]
            problems += [
                f"{row.name}: {name} interprets unknown level {axis}:{level}"
                for name, options in row.profiles.items()
                for axis, used in (options.interpreted or options).axes.items()
                for level in used
                if level not in options.axes.get(axis, row.axes.get(axis, ()))
            ]
            problems += [
                f"{row.name}: must-run cell has unknown {axis}:{level}"
                for cell in row.must_run
                for axis, level in cell.items()
                if level not in {**row.axes, REGIME_AXIS: row.regimes}.get(axis, ())
            ]
        if problems:
            raise UsageError(f"the tables contradict themselves: {'; '.join(problems[:5])}; mend the rows")
        return self


def load_tables(path: str = DEFAULT_TABLES) -> Tables:
    """The tables at a dotted path, `package.module:name`.

    Raises:
        UsageError: there are none, or they contradict themselves.
    """
    module, _, name = path.partition(":")
    try:
        found = getattr(importlib.import_module(module), name or "TABLES")
    except (ImportError, AttributeError) as error:
        raise UsageError(
            f"tables must be importable as module:name, got {path!r} ({error}); install them"
        ) from error
    if not isinstance(found, Tables):
        raise UsageError(
            f"tables must be a Tables, got {type(found).__name__} at {path!r}; see qualify/tables.py"
        )
    return found.validated()


def _twice(names: Iterable[str]) -> list[str]:
    return [name for name, times in Counter(names).items() if times > 1]
