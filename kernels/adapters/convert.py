"""Converts the modules of a model by one configuration: all of them or, when anything is wrong, none."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import torch

from kernels.adapters.attach import attach, describe, detach, is_converted, original_kernel, policy_of
from kernels.adapters.checks import check_can_round
from kernels.adapters.layouts import FAMILIES, family_of, layout_of
from kernels.policy import Resolved, resolve, table

DISTRIBUTIONS = ("megatron-core", "transformer-engine", "nvidia-modelopt", "flash-linear-attention",
                 "fla-core", "transformers", "torch", "triton")  # fmt: skip
"""Packages whose versions a conversion notes."""


@dataclass(frozen=True)
class Conversion:
    """What a conversion did. As text it is a table, one module a line.

    Attributes:
        resolved: module name -> its policy.
        layouts: module name -> where its kernel was found, and which it was.
        versions: installed package -> version.
    """

    resolved: Mapping[str, Resolved]
    layouts: Mapping[str, str]
    versions: Mapping[str, str]

    def __str__(self) -> str:
        return table(self.resolved, lambda name: self.layouts[name])


def convert_model(
    model: torch.nn.Module,
    config: Mapping[str, Any],
    families: Collection[str],
    *,
    verbose: bool = True,
) -> Conversion:
    """Gives every supported module of a built model its policy, in place; `revert_model` undoes it.

    Converting a converted model replaces the policies.

    Args:
        model: any module; wrappers that only add `module.` to names are seen through.
        config: `quant_cfg` and `linear_attention`, see `kernels.policy`.
        families: which of `FAMILIES` to look for.
        verbose: print the resolved policies as a table on the first rank.

    Raises:
        ValueError, TypeError, NotImplementedError: the model has no supported module, the configuration is
            wrong or matches nothing, or a module cannot do what it asks for; the model is left as it was.
    """
    found = supported_modules(model, families)
    if not found:
        classes = [f"{FAMILIES[f].package}.*.{name}" for f in families for name in FAMILIES[f].classes]
        raise ValueError(f"a model must hold one of {classes} to be converted, got none; build it first")
    resolved = resolve(config, list(found))
    for name, module in found.items():
        layout_of(module)
        if not resolved[name].off:
            check_can_round(module, family_named(module), original_kernel(module))
    for name, module in found.items():
        attach(module, family_named(module))
        policy_of(module).resolved = resolved[name]
    conversion = Conversion(resolved, {n: describe(m) for n, m in found.items()}, versions())
    if verbose and first_rank():
        print(conversion)
    return conversion


def revert_model(model: torch.nn.Module, families: Collection[str]) -> None:
    """Undoes `convert_model` for every converted module."""
    for module in supported_modules(model, families).values():
        if is_converted(module):
            detach(module)


def supported_modules(model: torch.nn.Module, families: Collection[str]) -> dict[str, torch.nn.Module]:
    """Canonical name -> module, for the modules of these families."""
    return {
        canonical(name): module for name, module in model.named_modules() if family_of(module) in families
    }


def canonical(name: str) -> str:
    """A module's name without the `module.` of wrappers around the model."""
    while name.startswith("module."):
        name = name.removeprefix("module.")
    return name


def family_named(module: torch.nn.Module) -> str:
    """The family of a supported module."""
    family = family_of(module)
    if family is None:
        raise ValueError(
            f"{type(module).__name__} must belong to one of {list(FAMILIES)}, it does not; skip it"
        )
    return family


def versions() -> dict[str, str]:
    """Installed package -> version, for those of `DISTRIBUTIONS` that are there."""
    return dict(installed())


def installed() -> Iterator[tuple[str, str]]:
    """Pairs of package and version."""
    for name in DISTRIBUTIONS:
        try:
            yield name, metadata.version(name)
        except metadata.PackageNotFoundError:
            continue


def first_rank() -> bool:
    """Whether this process is the one that prints."""
    distributed = torch.distributed
    return not (distributed.is_available() and distributed.is_initialized()) or distributed.get_rank() == 0
