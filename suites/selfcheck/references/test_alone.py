"""The oracles know no kernel: they import and answer where triton cannot be imported."""

from __future__ import annotations

import subprocess
import sys

ALONE = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("triton", "kernels", "qualify", "suites", "fla"):
            raise ImportError(f"{name} must not be needed")

sys.meta_path.insert(0, Refuse())
import torch
from references.gdn_chunk import gdn_chunk
from references.gdn_recurrent import gdn_recurrent
from references import fused, kda_recurrent, wrong_answers
from references.arithmetic import Noisy

draw = torch.Generator().manual_seed(0)
q, k, v = (torch.randn(1, 70, 2, 16, dtype=torch.float64, generator=draw) for _ in range(3))
g, beta = -torch.rand(1, 70, 2, generator=draw), torch.rand(1, 70, 2, generator=draw)
k = fused.l2_normalized(k)
expected, _ = gdn_recurrent(q, k, v, g, beta, state_format="e4m3")
actual, _ = gdn_chunk(q, k, v, g, beta, state_format="e4m3")
assert float((actual - expected).norm() / expected.norm()) < 1e-13
noisy, _ = gdn_chunk(q, k, v, g, beta, state_format="e4m3", w_format="e4m3", arithmetic=Noisy())
assert bool(noisy.isfinite().all())
assert not any(name.split(".")[0] in ("triton", "kernels", "qualify", "suites") for name in sys.modules)
print("alone")
"""


def test_the_oracles_answer_in_a_process_without_triton() -> None:
    done = subprocess.run(
        [sys.executable, "-c", ALONE], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.stdout.strip() == "alone", done.stderr
