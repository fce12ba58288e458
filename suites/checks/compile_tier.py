"""Every kernel, with every launch row, becomes machine code for every architecture, fits, and does not spill.

No GPU is needed. The main build of each row is taken from the record of an earlier run where nothing changed
that it depends on, and compiled otherwise; all builds are compiled by `nox -s compile-tier`.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Mapping

from kernels.compile_tier import ARCHITECTURES, RECORDED, BuildRecord, compile_tier, fault
from kernels.spills import allowance
from qualify.case import Case, CheckOutput
from qualify.checks_table import CheckRow, Constraint, Options
from qualify.records import Comparison, Verdict
from qualify.subjects import Subject

TARGETS: Mapping[str, int] = {f"sm{sm}": sm for sm in ARCHITECTURES}
"""Level of the axis `target` -> SM."""

TIME_LIMIT_S = 600.0
"""Two processors compile all main builds of an SM within a minute; nothing recorded may be of any use."""


def run(case: Case, subject: Subject) -> CheckOutput:
    """Judges the main build of each launch row for one architecture.

    Args:
        case: its level of `target`.
        subject: whose builds.
    """
    records = compile_tier(
        *subject.builds,
        sms=[TARGETS[case.levels["target"]]],
        main_only=True,
        recorded=RECORDED,
        jobs=len(os.sched_getaffinity(0)),
        timeout_s=TIME_LIMIT_S,
    )
    keys = "".join(record.key for record in records)
    return CheckOutput(tuple(map(judged, records)), hashlib.sha256(keys.encode()).hexdigest())


def judged(record: BuildRecord) -> Comparison:
    """A build as a comparison; `derivation` starts with its conversion instructions and a semicolon."""
    allowed, wrong = allowance(record.row, record.sm, record.name), fault(record)
    launchable = record.launchable
    return Comparison(
        tensor=record.name,
        kind="build",
        metric="spilled_bytes",
        error=float(record.stack_bytes) if launchable else math.inf,
        budget=float(allowed.stack_bytes),
        derivation=f"{conversion_of(record)}; {allowed.because}",
        statistics={
            "registers": record.registers,
            "spilled_bytes": record.stack_bytes,
            "shared_bytes": record.shared_bytes,
            "shared_limit_bytes": record.shared_limit_bytes,
        },
        failure=Verdict.ERROR,
        because=wrong,
    )


def conversion_of(record: BuildRecord) -> str:
    """The instructions that convert to E4M3 in a build, or how it does without."""
    rounds = "native" in record.name or "portable" in record.name
    return " ".join(record.of("fp8 conversion")) or ("portable" if rounds else "none")


ROWS = (
    CheckRow(
        "build.launch_rows",
        "suites.checks.compile_tier:run",
        "a configuration that does not fit an architecture, or spills there, is found without owning one",
        needs=("builds",),
        axes={"target": tuple(TARGETS)},
        regimes=("none",),
        constraints=tuple(
            Constraint(
                {"sm": (own,), "target": tuple(other for other in TARGETS if other != own)},
                "a machine with a GPU asks about its own architecture",
            )
            for own in TARGETS
        ),
        strength="all",
        must_run=tuple({"target": target} for target in TARGETS),
        profiles={"cpu": Options("all", time_limit_s=TIME_LIMIT_S)},
    ),
)
