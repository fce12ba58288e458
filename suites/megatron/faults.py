"""Adapters with one fault each: what the suite must catch."""

# mypy: allow-untyped-calls

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from kernels.adapters import megatron
from kernels.adapters.attach import detach, policy_of
from kernels.adapters.convert import supported_modules
from kernels.policy import Resolved
from kernels.quantizers import Sites
from suites.megatron import model as models


class Adapter:
    """The real adapter; each fault changes one thing."""

    policy_of = staticmethod(policy_of)

    def convert(self, model: Any, config: Mapping[str, Any], *, verbose: bool = True) -> Any:
        """Converts the model."""
        return megatron.convert(model, config, verbose=verbose)

    def revert(self, model: Any) -> None:
        """Undoes it."""
        megatron.revert(model)


class WrapsNothing(Adapter):
    """Reports success and leaves every module as it is."""

    def convert(self, model: Any, config: Mapping[str, Any], *, verbose: bool = True) -> Any:
        """Does nothing."""


class WrapsOneOfTwo(Adapter):
    """Converts the model and forgets a layer."""

    def convert(self, model: Any, config: Mapping[str, Any], *, verbose: bool = True) -> Any:
        """Undoes the last layer."""
        done = super().convert(model, config, verbose=verbose)
        detach(list(supported_modules(model, megatron.FAMILY).values())[-1])
        return done


class ForgetsOnRestore(Adapter):
    """Saves policies and never reads them."""

    def convert(self, model: Any, config: Mapping[str, Any], *, verbose: bool = True) -> Any:
        """Makes every policy deaf to a checkpoint."""
        done = super().convert(model, config, verbose=verbose)
        for module in supported_modules(model, megatron.FAMILY).values():
            policy_of(module).__dict__["set_extra_state"] = lambda state: None
        return done


class DropsRules(Adapter):
    """Switches the sites on and loses the execution rules."""

    def convert(self, model: Any, config: Mapping[str, Any], *, verbose: bool = True) -> Any:
        """Converts with default tiles."""
        return super().convert(model, {"quant_cfg": config["quant_cfg"]}, verbose=verbose)


class RoundsWhenOff(Adapter):
    """Leaves the state site on when it should be off."""

    def convert(self, model: Any, config: Mapping[str, Any], *, verbose: bool = True) -> Any:
        """Adds the state site to whatever was asked for."""
        state = {"quantizer_name": "*gdn_state_quantizer", "enable": True}
        return super().convert(model, {**config, "quant_cfg": [*config["quant_cfg"], state]}, verbose=verbose)


class LastRankLeavesTheState(Adapter):
    """Switches the state site off on the last of several ranks."""

    def convert(self, model: Any, config: Mapping[str, Any], *, verbose: bool = True) -> Any:
        """Converts the model; one rank forgets half of what it was told."""
        done = super().convert(model, config, verbose=verbose)
        change_on_last_rank(model, lambda resolved: replace(resolved, sites=Sites(None, resolved.sites.w)))
        return done


class LastRankHasAnotherTile(Adapter):
    """Scales of the last of several ranks span twice the columns that they should."""

    def convert(self, model: Any, config: Mapping[str, Any], *, verbose: bool = True) -> Any:
        """Converts the model; one rank doubles its tile."""
        done = super().convert(model, config, verbose=verbose)
        change_on_last_rank(model, wider)
        return done


def change_on_last_rank(model: Any, change: Callable[[Resolved], Resolved]) -> None:
    """Changes the policy of every module on the last rank, where several share a layer."""
    if models.ranks() > 1 and models.rank() == models.ranks() - 1:
        for module in supported_modules(model, megatron.FAMILY).values():
            policy_of(module).resolved = change(policy_of(module).resolved)


def wider(resolved: Resolved) -> Resolved:
    """A policy with twice the tile."""
    tile = 2 * resolved.policy.state_block_v
    return replace(resolved, policy=replace(resolved.policy, state_block_v=tile))


FAULTS: Mapping[str, tuple[str, Adapter]] = {
    "wraps_nothing": ("sites", WrapsNothing()),
    "wraps_one_of_two": ("sites", WrapsOneOfTwo()),
    "drops_rules": ("sites", DropsRules()),
    "forgets_on_restore": ("checkpoint", ForgetsOnRestore()),
    "rounds_when_off": ("off", RoundsWhenOff()),
    "last_rank_leaves_the_state": ("parallel", LastRankLeavesTheState()),
    "last_rank_has_another_tile": ("parallel", LastRankHasAnotherTile()),
}
"""Fault -> the scenario that must catch it, and the adapter that has it."""

AMONG_RANKS = tuple(name for name, (scenario, _) in FAULTS.items() if scenario == "parallel")
"""Faults that take two ranks to show."""

(
    wraps_nothing,
    wraps_one_of_two,
    drops_rules,
    forgets_on_restore,
    rounds_when_off,
    last_rank_leaves_the_state,
    last_rank_has_another_tile,
) = (adapter for _, adapter in FAULTS.values())
