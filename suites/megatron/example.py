"""Quantization-aware training of a Megatron model with both sites on, by ModelOpt's configuration.

    torchrun --standalone --nproc-per-node 1 -m suites.megatron.example

Builds a two-layer model with gated delta nets, quantizes it after it is built, and trains it for twenty
steps.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

import os
from typing import Any

import torch

from suites.megatron import model as models

CONFIG: dict[str, Any] = {
    "quant_cfg": [
        {"quantizer_name": "*", "enable": False},
        {
            "quantizer_name": "*gdn_state_quantizer",
            "cfg": {"num_bits": (4, 3), "type": "dynamic", "axis": (0, 1)},
        },
        {
            "quantizer_name": "*gdn_w_quantizer",
            "cfg": {"num_bits": (4, 3), "type": "dynamic", "axis": (0, 1, 2)},
        },
    ],
    "algorithm": None,
    "linear_attention": [
        {
            "module_name": "decoder.layers.*.self_attention",
            "cfg": {"chunk_size": 64, "state": {"block_v": 64}, "solve": {"method": "exact"}},
        }
    ],
}


def train(model: Any, data: models.Batch, steps: int) -> list[float]:
    """Trains on one batch; the loss before each step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad(set_to_none=True)
        loss = models.loss_of(model, data)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def main() -> None:
    """Builds, quantizes and trains; prints the policies and the loss of every step."""
    from kernels.adapters import modelopt as mtq

    ranks = int(os.environ["WORLD_SIZE"])
    models.start(tensor_parallel=ranks)
    model = models.build(tensor_parallel=ranks)
    mtq.quantize(model, CONFIG)
    for step, loss in enumerate(train(model, models.batch(), steps=20)):
        print(f"step {step:2}  loss {loss:.4f}")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
