"""The tables that the matrix is made of."""

from __future__ import annotations

from collections.abc import Mapping

from qualify.tables import Tables
from suites.tables.axes import AXES, CONSTRAINTS, REQUIREMENTS
from suites.tables.checks import CHECKS
from suites.tables.profiles import PROFILES
from suites.tables.wrong_answers import ROWS

SUBJECTS: Mapping[str, str] = {
    "kernels": "suites.subjects.kernels",
    "eager": "suites.subjects.eager",
    "fla": "suites.subjects.fla",
    "flash_qla": "suites.subjects.flash_qla",
}
"""Built-in subjects."""

TABLES = Tables(
    axes=AXES,
    constraints=CONSTRAINTS,
    requirements=REQUIREMENTS,
    profiles=PROFILES,
    checks=CHECKS,
    wrong_answers=ROWS,
    subjects=SUBJECTS,
    default_subjects=("kernels",),
)
