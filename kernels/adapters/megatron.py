"""Megatron: `convert` puts the sites into every `GatedDeltaNet` of a built model, in place and reversibly.

    from kernels.adapters import megatron
    rules = [{"module_name": "decoder.layers.*.self_attention", "cfg": {"state": {"block_v": 64}}}]
    sites = [{"quantizer_name": "*gdn_state_quantizer", "cfg": {...}}]
    megatron.convert(model, {"quant_cfg": sites, "linear_attention": rules})

The kernel is found where the release keeps it: held as `self.gated_delta_rule` (0.18 and 0.19), or a
module-level name (0.16 and 0.17), called in `forward` or in a method split off from it. The policy is a
child, `gdn_policy`, saved in and restored from the distributed checkpoint by Megatron's own calls. Needs no
Megatron to be imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from kernels.adapters.attach import policy_of
from kernels.adapters.convert import Conversion, convert_model, revert_model

FAMILY = ("megatron",)

__all__ = ["convert", "policy_of", "revert"]


def convert(model: torch.nn.Module, config: Mapping[str, Any], *, verbose: bool = True) -> Conversion:
    """Gives every `GatedDeltaNet` of a Megatron model its policy.

    Args:
        model: a built model, or one pipeline stage of it.
        config: `quant_cfg` and `linear_attention`, see `kernels.policy`.
        verbose: print the resolved policies on the first rank.

    Returns:
        The resolved policies, the layouts that were found and the versions of the packages.

    Raises:
        ValueError, TypeError: the configuration is wrong or matches nothing.
        NotImplementedError: an unknown layout or kernel; or, with a site on, context parallelism,
            deterministic mode, or a GPU that is too old.
    """
    return convert_model(model, config, FAMILY, verbose=verbose)


def revert(model: torch.nn.Module) -> None:
    """Makes a converted Megatron model what it was, down to the identity of its kernels."""
    revert_model(model, FAMILY)
