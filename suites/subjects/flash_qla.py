"""FlashQLA as installed: both sites off."""

from __future__ import annotations

from flash_qla import chunk_gated_delta_rule as _installed

from suites.subjects.foreign import adapted

PACKAGE = "flash_qla"
PACKAGES = ("flash_qla",)
CAPABILITIES = {"devices": ["cuda"], "dtypes": ["bf16", "fp16"], "min_sm": 90}

chunk_gated_delta_rule = adapted(_installed, "FlashQLA")
