"""What a scenario is asked for, and the configurations that it uses."""

# mypy: allow-untyped-calls

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from suites.megatron import model as models

BLOCK_V = 32
STATE = {
    "quantizer_name": "*gdn_state_quantizer",
    "cfg": {"num_bits": (4, 3), "type": "dynamic", "axis": (0, 1)},
}
W = {"quantizer_name": "*gdn_w_quantizer", "cfg": {"num_bits": (4, 3), "type": "dynamic", "axis": (0, 1, 2)}}
ENTRIES: Mapping[str, list[dict[str, Any]]] = {"none": [], "state": [STATE], "w": [W], "both": [STATE, W]}
RULES = [{"module_name": "decoder.layers.*.self_attention", "cfg": {"state": {"block_v": BLOCK_V}}}]
FORMATS = {"none": (None, None), "state": ("e4m3", None), "w": (None, "e4m3"), "both": ("e4m3", "e4m3")}


@dataclass(frozen=True)
class Request:
    """What to do: the scenario, and what it varies."""

    scenario: str
    sites: str
    recompute: str
    tensor_parallel: int
    sequence_parallel: bool
    adapter: Any

    def build(self, recompute: str = "none", seed: int = 1234) -> Any:
        """A model of this request."""
        return models.build(self.tensor_parallel, recompute, seed, sequence_parallel=self.sequence_parallel)


def configuration(sites: str) -> dict[str, Any]:
    """The configuration that switches sites on, with a tile that is not the default one."""
    off = {"quantizer_name": "*", "enable": False}
    return {"quant_cfg": [off, *ENTRIES[sites]], "linear_attention": RULES}


def options(sites: str, block_v: int = BLOCK_V) -> dict[str, Any]:
    """What the fused op must be called with under `configuration`."""
    state, w = FORMATS[sites]
    return {"state_format": state, "state_block_v": block_v, "w_format": w}
