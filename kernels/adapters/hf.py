"""Hugging Face: `convert` puts the sites into FLA's `GatedDeltaNet` layers and into Qwen3-Next's.

    from kernels.adapters import hf
    rules = [{"module_name": "model.layers.*", "cfg": {}}]
    hf.convert(model, {"quant_cfg": [...], "linear_attention": rules})

The same configuration and the same rules as for Megatron. Sites act in chunk mode: a forward pass that
would take a recurrent kernel instead (a short sequence in evaluation mode, or decoding from a cache) raises.
The policy is a child, `gdn_policy`, in the model's `state_dict`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from kernels.adapters.attach import policy_of
from kernels.adapters.convert import Conversion, convert_model, revert_model

FAMILY = ("fla", "transformers")

__all__ = ["convert", "policy_of", "revert"]


def convert(model: torch.nn.Module, config: Mapping[str, Any], *, verbose: bool = True) -> Conversion:
    """Gives every FLA `GatedDeltaNet` layer and every Qwen3-Next gated delta net of a model its policy.

    Args:
        model: a built model.
        config: `quant_cfg` and `linear_attention`, see `kernels.policy`.
        verbose: print the resolved policies.

    Returns:
        The resolved policies, the layouts that were found and the versions of the packages.

    Raises:
        ValueError, TypeError: the configuration is wrong or matches nothing.
        NotImplementedError: an unknown layout or kernel, or, with a site on, a GPU that is too old.
    """
    return convert_model(model, config, FAMILY, verbose=verbose)


def revert(model: torch.nn.Module) -> None:
    """Makes a converted model what it was, down to the identity of its kernels."""
    revert_model(model, FAMILY)
