"""The table of checks: the rows that the modules of checks propose, in the order in which they run."""

from __future__ import annotations

import importlib

from qualify.checks_table import CheckRow
from suites.tables.trims import trimmed

MODULES: tuple[str, ...] = (
    "qdq",
    "probes",
    "decay",
    "rounding",
    "exact",
    "grid",
    "stages",
    "refusals",
    "launch_rows",
    "arithmetic",
    "chunk",
    "named",
    "controls",
    "whole",
    "dynamic_range",
    "invariants",
    "calls",
    "relations",
    "documents",
    "slope",
    "compile_tier",
)
"""Modules of `suites.checks` with a tuple `ROWS`; the cheapest and sharpest evidence first. Planted faults
are kept together, a carrier on a worker: the many cases after them let all workers end at the same time."""

CHECKS: tuple[CheckRow, ...] = tuple(
    trimmed(row) for name in MODULES for row in importlib.import_module(f"suites.checks.{name}").ROWS
)
