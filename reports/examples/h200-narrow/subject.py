"""The fused op with its launches forced onto narrow tiles, which Triton 3.6.0 compiles wrong for SM 9.0.

    qualify run --profile h100 --subject reports/examples/h200-narrow/subject.py \\
        --select 'op.*sm:sm90,dtype:bf16*heads:128x32' --out DIR

One left operand is multiplied by bf16 tiles of 64 columns and of 32 in one kernel. `kernels.gdn` pads K and V
to 64, so that this does not happen; here they are padded to 16. In Triton's interpreter the same passes.
"""

from __future__ import annotations

from kernels.gdn import chunk_gated_delta_rule, core

__all__ = ["chunk_gated_delta_rule"]

core.SMALLEST_TILE = 16
