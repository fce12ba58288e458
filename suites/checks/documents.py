"""Very many documents: grids with more blocks than an index, a counter or a launch dimension holds.

Each document has one token. The block counts are those at which kernels were seen to fail: around 1,024
blocks, above 65,535 of them, and at 70,000 documents.
"""

from __future__ import annotations

import torch

from qualify.budgets import judged_arithmetic
from qualify.case import Case, CheckOutput
from qualify.checks_table import CheckRow, Options
from qualify.problem import CARRIERS, Problem
from qualify.regimes import Numbers, unit_rows
from qualify.subjects import Subject
from suites.checks.evidence import device_of, evidence_for, remembered
from suites.checks.rows import DTYPES, GPU, OP
from suites.checks.whole import judged

SIZE = 16
RUNS = 4
"""Noise runs: fewer than elsewhere, since so many blocks hold thousands of samples."""


def run(case: Case, subject: Subject) -> CheckOutput:
    """Judges every output and gradient of a pack of one-token documents.

    Args:
        case: the axis `blocks` says how many documents times value heads; `dtype`, `sites`.
        subject: what is judged.
    """
    carrier = case.levels.get("dtype", "fp32")
    arithmetic = judged_arithmetic(subject.arithmetic, carrier)
    blocks, device = int(case.levels["blocks"]), device_of(case)
    evidence = remembered(
        ("documents", carrier, blocks, case.levels["sites"], case.seed, device, arithmetic),
        lambda: evidence_for(
            build(carrier, blocks, case.levels["sites"], case.seed, device),
            arithmetic,
            smooth=True,
            runs=RUNS,
        ),
    )
    return judged(case, subject, evidence, ())


def build(carrier: str, blocks: int, sites: str, seed: int, device: str) -> Problem:
    """A pack of `blocks` one-token documents with one head, each with numbers of its own.

    Args:
        carrier: `fp32`, `bf16` or `fp16`.
        blocks: documents.
        sites: `state` or `none`.
        seed: any integer.
        device: where the tensors go.
    """
    numbers, dtype = Numbers(seed), CARRIERS[carrier]
    own = 0.5 + numbers.uniform(1, blocks, 1, 1)
    q, k = (unit_rows(numbers.bell(1, blocks, 1, SIZE)).to(dtype).to(device) for _ in range(2))
    state_size = own.reshape(blocks, 1, 1, 1)
    return Problem(
        q=q,
        k=k,
        v=(numbers.bell(1, blocks, 1, SIZE) * own).to(dtype).to(device),
        g=-numbers.uniform(1, blocks, 1, high=0.5).float().to(device),
        beta=numbers.uniform(1, blocks, 1, low=0.1, high=0.9).to(dtype).to(device),
        initial_state=(numbers.bell(blocks, 1, SIZE, SIZE) * state_size).float().to(device),
        do=numbers.bell(1, blocks, 1, SIZE).to(dtype).to(device),
        dht=numbers.bell(blocks, 1, SIZE, SIZE).float().to(device),
        cu_seqlens=torch.arange(blocks + 1, dtype=torch.int64, device=device),
        state_format="e4m3" if sites == "state" else None,
        state_block_v=16,
    )


ROWS = (
    CheckRow(
        "op.documents",
        "suites.checks.documents:run",
        "grids around 1,024 blocks, and beyond what a launch dimension or an index holds",
        needs=OP,
        axes={
            "dtype": DTYPES,
            "sites": ("state", "none"),
            "blocks": ("1023", "1024", "1025", "65535", "65537", "70000"),
        },
        regimes=("random",),
        profiles={"cpu": Options("each", axes={"blocks": ("1023", "1024", "1025")})}
        | {name: Options("pairs") for name in GPU},
    ),
)
