"""The table of controls."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from suites.controls.codes import CODES
from suites.controls.control import Control
from suites.controls.memory import MEMORY
from suites.controls.ranges import RANGES
from suites.controls.sequences import SEQUENCES
from suites.controls.sites import SITES
from suites.controls.straight_through import STRAIGHT_THROUGH
from suites.controls.terms import TERMS

CONTROLS: Mapping[str, Control] = MappingProxyType(
    {
        control.name: control
        for control in (*CODES, *SITES, *STRAIGHT_THROUGH, *TERMS, *SEQUENCES, *RANGES, *MEMORY)
    }
)
"""Every planted fault by name."""
