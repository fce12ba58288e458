"""Which GPU a worker computes on: the one that it was told to use, out of those that the run was given."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from qualify.probe import guarded, uuid_of


def uuids_in_use() -> list[str]:
    """UUIDs of the GPUs that this process's torch can compute on."""
    import torch

    every = [str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())]
    return [f"GPU-{uuid.removeprefix('GPU-')}" for uuid in every]


def own_gpu(
    told: str,
    given: Sequence[str],
    *,
    named: Callable[[str], str] = uuid_of,
    in_use: Callable[[], list[str]] = uuids_in_use,
) -> str:
    """The UUID of the one GPU that this process computes on, read from the process itself.

    Args:
        told: the worker's GPU, as `CUDA_VISIBLE_DEVICES` has it.
        given: the run's GPUs; empty where nobody dealt any out: the first that is in use, if any, counts.
        named: the driver's UUID of a GPU.
        in_use: UUIDs of the GPUs that this process sees.

    Raises:
        RuntimeError: the worker was told to use a GPU that the run was not given, or it does not see the one
            that it was told to use, or it sees another.
    """
    if not given:
        return next(iter(in_use()), "")
    if told not in given:
        raise RuntimeError(
            f"a worker must use a GPU that the run was given ({', '.join(given)}), it was told to use "
            f"{told or 'none'}; leave CUDA_VISIBLE_DEVICES of workers to the run"
        )
    seen = in_use()
    wanted, reason = guarded(lambda: named(told))
    anyone = told.startswith("MIG-") or (told.isdigit() and not wanted)  # no UUID of CUDA's to compare with
    if len(seen) != 1 or not (anyone or seen[0].startswith(wanted or told)):
        raise RuntimeError(
            f"a worker must see the GPU that it was told to use ({told}, {wanted or reason}) and no other, "
            f"it sees {', '.join(seen) or 'none'}; let nothing touch CUDA before the worker starts"
        )
    return seen[0]
