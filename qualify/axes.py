"""Types of the tables of axes and profiles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from qualify.checks_table import Strength

Kind = Literal["numerical", "inputs", "shape", "layout", "machine"]

SM_AXIS = "sm"
REGIME_AXIS = "regime"


@dataclass(frozen=True)
class Axis:
    """A dimension of the matrix.

    Attributes:
        name: as it appears in case ids.
        levels: every level that any row may use.
        kind: `numerical` axes are covered in triples where a row asks for triples; all others in pairs.
        because: why the dimension can hide a fault.
    """

    name: str
    levels: tuple[str, ...]
    kind: Kind
    because: str


@dataclass(frozen=True)
class SkipBudget:
    """How large a share of the cases that a rule can touch it may keep from running.

    Attributes:
        requirement: the rule, as skips name it; `*` stands for every rule that no earlier row names.
        share: from 0 (none) to 1 (all).
        because: why so many.
    """

    requirement: str
    share: float
    because: str


@dataclass(frozen=True)
class Profile:
    """A named part of the matrix.

    Attributes:
        name: what `--profile` takes.
        sm: the SM that the profile qualifies; its cells are the ones that must run.
        because: what a receipt of this profile is for.
        elsewhere: how the cells of the other SMs are covered. They are planned and recorded as skipped.
        other_sms: the other SMs whose cells are planned.
        time_limit_s: a case that runs longer hangs.
        interpreted_limit_s: the same, at least, where kernels are interpreted.
        import_limit_s: a subject that takes longer to import hangs.
        workers: how many processes run cases on a machine without a GPU.
        workers_per_gpu: how many share one GPU at most; never more in all than the machine has cores. Cases
            are small, and most of their time is compilation and the oracle's launches.
        controls: whether the planted faults run.
        wrong_answers: whether every named wrong answer has to be excluded.
        skip_budgets: how many cases each rule may keep from running; the run is incomplete beyond.
    """

    name: str
    sm: str
    because: str
    elsewhere: Strength = "each"
    other_sms: tuple[str, ...] = ()
    time_limit_s: float = 60.0
    interpreted_limit_s: float = 60.0
    import_limit_s: float = 60.0
    workers: int = 2
    workers_per_gpu: int = 1
    controls: bool = True
    wrong_answers: bool = True
    skip_budgets: tuple[SkipBudget, ...] = ()
