"""Launch configurations are rows: looked up by kernel, SM and facts, forced by name, recorded when they run.

A kernel file owns a tuple of `LaunchRow` and registers it once with `register`. The host code asks `row_for`
and passes `row.meta` and `row.options()` to the launch. Nothing is tuned at run time, so two runs of one case
are the same launch. Needs neither torch nor triton.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType

INTERPRETER = 0
"""The SM of a launch that runs in Triton's interpreter: every row fits it, whatever its SM range."""

ANY_SM = (80, 999)
"""The SM range of a row that no architecture is known to need otherwise."""


@dataclass(frozen=True)
class LaunchRow:
    """One launch configuration of one kernel, with where it applies and why it is what it is.

    Attributes:
        kernel: the kernel's name, as `row_for` is asked for it.
        name: unique in the process; what receipts store and `force_launch_row` takes.
        because: one line: what was measured or which limit binds.
        meta: constexpr tile sizes of the launch.
        num_warps: warps per program, 32 threads each.
        num_stages: software pipelining depth.
        sm: smallest and largest SM (90 is SM 9.0) that the row is for, both included.
        where: fact -> the values that it may have (such as `{"carrier": ("fp32",)}`); no entry: any value.
        default: whether `row_for` may choose it; a row that is not is only ever forced.
    """

    kernel: str
    name: str
    because: str
    meta: Mapping[str, int] = field(default_factory=dict)
    num_warps: int = 4
    num_stages: int = 2
    sm: tuple[int, int] = ANY_SM
    where: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    default: bool = True

    def __post_init__(self) -> None:
        if self.num_warps not in (1, 2, 4, 8, 16, 32):
            raise ValueError(
                f"num_warps must be a power of two up to 32, got {self.num_warps} in row {self.name!r}"
            )
        if not self.because:
            raise ValueError(
                f"launch row {self.name!r} has no because; say what was measured or which limit binds"
            )
        object.__setattr__(self, "meta", MappingProxyType(dict(self.meta)))
        object.__setattr__(self, "where", MappingProxyType(dict(self.where)))

    def fits(self, sm: int, facts: Mapping[str, object]) -> bool:
        """Whether the row is for this SM (any, in the interpreter) and for a launch with these facts."""
        in_range = sm == INTERPRETER or self.sm[0] <= sm <= self.sm[1]
        return in_range and all(facts.get(fact) in allowed for fact, allowed in self.where.items())

    def options(self) -> dict[str, int]:
        """The keyword arguments of a Triton launch that are not constexprs of the kernel."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages}


_ROWS: dict[str, LaunchRow] = {}
_CHOSEN: dict[tuple[object, ...], LaunchRow] = {}
_FORCED: dict[str, LaunchRow] = {}
_RECORDINGS: list[dict[str, str]] = []
_LOCK = threading.Lock()  # backward kernels are launched from autograd's own threads


def register(rows: Iterable[LaunchRow]) -> tuple[LaunchRow, ...]:
    """Adds rows to the one table of the process and returns them.

    Raises:
        ValueError: another row has the same name.
    """
    rows = tuple(rows)
    for row in rows:
        if _ROWS.setdefault(row.name, row) != row:
            raise ValueError(f"launch row names must be unique, got {row.name!r} twice; rename one")
    _CHOSEN.clear()
    return rows


def rows_of(kernel: str | None = None) -> tuple[LaunchRow, ...]:
    """Every registered row, or those of one kernel, in the order of registration."""
    return tuple(row for row in _ROWS.values() if kernel in (None, row.kernel))


def row_for(kernel: str, sm: int, **facts: object) -> LaunchRow:
    """The forced row of this kernel, else the first that fits; `recorded_launches` notes it.

    Args:
        kernel: the kernel's name.
        sm: 90 for SM 9.0; `INTERPRETER` in the interpreter.
        **facts: what `LaunchRow.where` may ask about, such as `carrier="bf16"`, `K=128`.

    Raises:
        ValueError: no row fits, or the forced row does not.
    """
    row = _FORCED.get(kernel)
    if row is not None and not row.fits(sm, facts):
        raise ValueError(f"forced launch row {row.name!r} must fit SM {sm} and {facts}, it is for SM "
                         f"{row.sm} and {dict(row.where)}; force another row")  # fmt: skip
    if row is None:
        asked = (kernel, sm, *facts.items())
        row = _CHOSEN.get(asked) or first_that_fits(kernel, sm, facts)
        if row is not None:
            _CHOSEN[asked] = row
    if row is None:
        raise ValueError(f"kernel {kernel!r} has no launch row for SM {sm} and {facts}; add one to its table")
    with _LOCK:
        for recording in _RECORDINGS:
            recording[kernel] = row.name
    return row


def first_that_fits(kernel: str, sm: int, facts: Mapping[str, object]) -> LaunchRow | None:
    """The first default row for a kernel, an SM and facts, or None."""
    fitting = (r for r in _ROWS.values() if r.kernel == kernel and r.default and r.fits(sm, facts))
    return next(fitting, None)


@contextmanager
def force_launch_row(name: str) -> Iterator[LaunchRow]:
    """Makes a kernel use one named row while the context lasts, in every thread.

    Raises:
        ValueError: no row has that name.
    """
    if name not in _ROWS:
        raise ValueError(f"a launch row must be registered, got {name!r}; choose one of {sorted(_ROWS)}")
    row = _ROWS[name]
    before = _FORCED.get(row.kernel)
    _FORCED[row.kernel] = row
    try:
        yield row
    finally:
        if before is None:
            del _FORCED[row.kernel]
        else:
            _FORCED[row.kernel] = before


@contextmanager
def recorded_launches() -> Iterator[dict[str, str]]:
    """Collects kernel -> name of the row that was really launched while the context lasts."""
    recording: dict[str, str] = {}
    with _LOCK:
        _RECORDINGS.append(recording)
    try:
        yield recording
    finally:
        with _LOCK:
            _RECORDINGS[:] = [r for r in _RECORDINGS if r is not recording]
