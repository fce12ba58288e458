"""Tables with one trivial check, for tests of the spine alone."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

from qualify.axes import Axis, Profile
from qualify.case import Case, CheckOutput
from qualify.checks_table import CheckRow, Options
from qualify.records import Comparison
from qualify.requirements import Requirement
from qualify.subjects import Subject
from qualify.tables import Tables

HERE = "suites.selfcheck.spine.trivial"


def doubles(case: Case, subject: Subject) -> CheckOutput:
    """The subject's `qdq_w` doubles a number."""
    assert subject.qdq_w is not None
    number = float(case.levels["number"])
    actual = float(subject.qdq_w(number))
    comparison = Comparison("double", "exact", "differences", float(actual != 2 * number), 0.0, "exact")
    return CheckOutput((comparison,), input_digest=f"{number}")


def stuck(case: Case, subject: Subject) -> CheckOutput:
    """A planted fault that hangs as often as its level says, counted in a file, and is caught then."""
    counted = Path(os.environ[STUCK]) / case.levels["fault"]
    with counted.open("a") as file:
        file.write("x")
    if counted.stat().st_size <= int(case.levels["fault"].partition(" ")[0]):
        time.sleep(1000)
    return CheckOutput((Comparison(case.levels["fault"], "control", "missed", 0.0, 0.0, "waiting"),))


STUCK = "STUCK"
"""The environment variable that names the folder of `stuck`."""

TABLES = Tables(
    axes=(
        Axis("sm", ("cpu", "sm90"), "machine", "where"),
        Axis("number", ("1", "2", "3", "4"), "numerical", "what is doubled"),
        Axis("colour", ("red", "blue"), "shape", "what does not matter"),
    ),
    constraints=(),
    requirements=(
        Requirement("on sm90", {"sm": ("sm90",)}, "sm", "is", "sm90", "the cell is of that SM"),
        Requirement("on cpu", {"sm": ("cpu",)}, "sm", "is", "cpu", "the cell is of the CPU"),
    ),
    profiles=(
        Profile(
            "tiny",
            "cpu",
            "tests of the spine",
            other_sms=("sm90",),
            time_limit_s=2.0,
            import_limit_s=5.0,
        ),
    ),
    checks=(
        CheckRow(
            "double",
            f"{HERE}:doubles",
            "numbers can be doubled",
            needs=("qdq_w",),
            axes={"number": ("1", "2", "3", "4"), "colour": ("red", "blue")},
            must_run=({"number": "2"},),
            profiles={"tiny": Options()},
        ),
    ),
)

WITH_CONTROLS = replace(
    TABLES,
    profiles=(replace(TABLES.profiles[0], controls=True),),
    checks=(
        *TABLES.checks,
        CheckRow(
            "stuck",
            f"{HERE}:stuck",
            "a planted fault may hang",
            axes={"fault": ("0 times", "1 time", "2 times")},
            profiles={"tiny": Options()},
            control=True,
        ),
    ),
)
"""The same with planted faults."""
