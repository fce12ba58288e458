"""Megatron's distributed checkpoint, in folders that every rank sees."""

# mypy: allow-untyped-calls

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from typing import Any

import torch

from suites.megatron.findings import Finding, holds


class shared_folder:  # noqa: N801  used as a function
    """A folder that every rank of this host sees, made by the first one and removed by it."""

    def __enter__(self) -> str:
        names = [tempfile.mkdtemp() if torch.distributed.get_rank() == 0 else ""]
        torch.distributed.broadcast_object_list(names)
        self.name = str(names[0])
        return self.name

    def __exit__(self, *_: object) -> None:
        torch.distributed.barrier()
        if torch.distributed.get_rank() == 0:
            shutil.rmtree(self.name, ignore_errors=True)


def save(model: Any, folder: str) -> None:
    """Writes Megatron's distributed checkpoint."""
    from megatron.core import dist_checkpointing

    dist_checkpointing.save(model.sharded_state_dict(), folder)


def restored(model: Any, folder: str) -> Iterator[Finding]:
    """Loads Megatron's distributed checkpoint, strictly."""
    from megatron.core import dist_checkpointing

    state = dist_checkpointing.load(model.sharded_state_dict(), folder)
    known = {key for key in state if key in model.state_dict()}
    result = model.load_state_dict({key: state[key] for key in known}, strict=False)
    missing = [key for key in result.missing_keys if not key.endswith("_extra_state")]
    yield holds("the checkpoint restores every weight", not missing, f"missing: {missing or 'none'}")
