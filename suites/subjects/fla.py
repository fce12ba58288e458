"""flash-linear-attention as installed: both sites off."""

from __future__ import annotations

from fla.ops.gated_delta_rule import chunk_gated_delta_rule as _installed

from suites.subjects.foreign import adapted

PACKAGE = "fla"
PACKAGES = ("fla",)
CAPABILITIES = {"devices": ["cuda"]}

chunk_gated_delta_rule = adapted(_installed, "flash-linear-attention")
