"""Builds that cannot become machine code."""

from dataclasses import replace

from kernels.qdq.builds import rows_build

GOOD = rows_build("qdq_rows:e4096-w4", 4096, "bf16", "portable")
UNREGISTERED = replace(GOOD, row="qdq_rows:none")
BUILDS = (
    replace(GOOD, label="no such function", constexprs={**GOOD.constexprs, "FMT": "e9m9"}),
    replace(GOOD, label="too early for native", constexprs={**GOOD.constexprs, "CONVERSION": "native"}),
)
