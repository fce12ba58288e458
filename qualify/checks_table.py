"""Rows of the table of checks: what is asked, of which cells, in which profiles, and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Strength = Literal["each", "pairs", "triples", "all"]
"""How much of a row's space its cells cover: every level once, every pair, every triple of the numerical axes
(and every pair of the others), or every valid cell."""


@dataclass(frozen=True)
class Constraint:
    """Cells that are meaningless on any machine: those in which *every* named axis is on a named level.

    Attributes:
        forbid: axis -> levels. A row that does not vary one of the axes is not touched.
        because: why such a cell says nothing.
    """

    forbid: Mapping[str, tuple[str, ...]]
    because: str


@dataclass(frozen=True)
class Options:
    """How one profile takes a row.

    Attributes:
        strength: overrides the row's.
        seeds: each cell is run once for each.
        axes: axis -> levels that this profile keeps; an axis that is not named keeps the row's levels. Holds
            for every SM, so write what differs between the CPU and GPUs as constraints on `sm`.
        regimes: overrides the row's.
        must_run: whether the row's must-run cells bind this profile.
        time_limit_s: a case that runs longer hangs; None: the profile's limit.
        interpreted: on a CPU, what is left for subjects whose kernels run in an interpreter, where one call
            takes seconds: fewer levels and regimes, another strength, other seeds. `LEFT_OUT`: nothing;
            None: everything. Cells of other SMs stay planned.
    """

    strength: Strength | None = None
    seeds: tuple[int, ...] = (0,)
    axes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    regimes: tuple[str, ...] | None = None
    must_run: bool = True
    time_limit_s: float | None = None
    interpreted: Options | None = None


LEFT_OUT = Options(seeds=())
"""No case at all."""


@dataclass(frozen=True)
class CheckRow:
    """One check and the part of the matrix that it is asked on.

    Attributes:
        name: the check's name in case ids: `area.what`.
        run: dotted path of `run(case, subject) -> CheckOutput`, written `package.module:function`.
        because: why the check exists.
        needs: what the subject must offer, all of them: `chunk_gated_delta_rule`, `qdq_state`, `qdq_w`,
            `stages`, `launch_rows`, `builds`. A subject without one is recorded as unsupported.
        axes: axis -> levels that the check varies, a subset of the table of axes (or an axis of the check's
            own, whose levels only it knows). The axis `sm` is added to every row: each SM of the profile gets
            its own cover, and `case.levels["sm"]` says where the case runs (`cpu`, `sm80`, ...). `regime` is
            an axis too: it is covered against the others and arrives as `case.regime`.
        regimes: names of input distributions.
        constraints: beyond those of the table of axes.
        strength: how much of the row's space is covered.
        must_run: partial cells; each is completed to at least one cell on every SM of the profile, and the
            profile is not qualified without it.
        profiles: profile -> how it takes the row. A profile that is not named leaves the row out.
        control: the row judges the judge. Its cases belong to no subject; each level of its axis `fault` is a
            planted fault, run in every dtype of the row; `run` receives `subject=None` semantics through a
            subject that offers nothing, and returns one comparison of kind `control` whose tensor is the
            fault's name, error 0 when it was caught and 1 when it was missed, and whose derivation says what
            caught it (`op.whole: dk projection 0.97`). A missed control makes the verdict INCOMPLETE.
    """

    name: str
    run: str
    because: str
    needs: tuple[str, ...] = ()
    axes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    regimes: tuple[str, ...] = ("ordinary",)
    constraints: tuple[Constraint, ...] = ()
    strength: Strength = "pairs"
    must_run: tuple[Mapping[str, str], ...] = ()
    profiles: Mapping[str, Options] = field(default_factory=dict)
    control: bool = False
