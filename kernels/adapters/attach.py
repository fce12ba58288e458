"""Puts the policy on a module and the fused op in the place of its kernel, reversibly.

A converted module gets a child, `gdn_policy`, that says what it does, is saved with it and restored with it.
Its kernel is replaced by a `SiteRule`, which calls the very original kernel while both sites are off and the
fused op otherwise. Every method that calls the kernel is watched: one that ends without having called it
while a site is on raises, so that rounding cannot drop out unseen.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from contextvars import ContextVar
from copy import deepcopy
from typing import Any

import torch

from kernels.adapters.checks import check_can_round
from kernels.adapters.layouts import Layout, kernel_name, layout_of
from kernels.policy import OFF, Resolved, resolved_from_json

logger = logging.getLogger(__name__)

CHILD = "gdn_policy"
"""The name of the child that holds the policy of a converted module."""


def fused_op() -> Callable[..., Any]:
    """The op that rounds; imported when the first site is on, so that nothing else needs Triton."""
    from kernels.gdn import chunk_gated_delta_rule

    op: Callable[..., Any] = chunk_gated_delta_rule
    return op


class SitePolicy(torch.nn.Module):
    """What a module does, as a child of it: readable, editable, saved and restored with it.

    Attributes:
        resolved: the policy in force; assign to it to edit.
    """

    def __init__(self, owner: torch.nn.Module, family: str, resolved: Resolved = OFF) -> None:
        super().__init__()
        self._owner = (owner,)  # in a tuple, so that the parent does not become a child of its child
        self.family = family
        self._restore_hook: Any = owner.register_load_state_dict_pre_hook(  # type: ignore[no-untyped-call]
            restore_without_policy
        )
        self._resolved = OFF
        self.resolved = resolved

    @property
    def owner(self) -> torch.nn.Module:
        """The converted module."""
        return self._owner[0]

    @property
    def resolved(self) -> Resolved:
        """The policy in force."""
        return self._resolved

    @resolved.setter
    def resolved(self, resolved: Resolved) -> None:
        if not resolved.off:
            check_can_round(self.owner, self.family, original_kernel(self.owner))
        self._resolved = resolved

    def get_extra_state(self) -> torch.Tensor:
        """The policy as JSON in bytes, under `gdn_policy._extra_state`: some formats store tensors only."""
        return torch.frombuffer(bytearray(self.resolved.to_json(), "utf-8"), dtype=torch.uint8)

    def set_extra_state(self, state: torch.Tensor | str) -> None:
        """Puts a saved policy in force."""
        text = state if isinstance(state, str) else bytes(state.cpu().tolist()).decode("utf-8", "replace")
        self.resolved = resolved_from_json(text)

    def sharded_state_dict(self, prefix: str = "", *_: Any, **__: Any) -> dict[str, Any]:
        """The policy for Megatron's distributed checkpoint, in the part that every rank shares.

        A checkpoint without it can then be loaded into a converted model, which a sharded object would not
        allow.

        Raises:
            NotImplementedError: pipeline parallelism, where that part holds the first stage only.
        """
        stages = pipeline_stages()
        if stages > 1 and not self.resolved.off:
            raise NotImplementedError(
                f"a policy can be saved with one pipeline stage, got {stages}; "
                f"switch the sites off or use pipeline size 1"
            )
        return {prefix + "_extra_state": self.resolved.to_json()}

    def extra_repr(self) -> str:
        """Shown where the model is printed."""
        sites = self.resolved.sites
        return f"state={sites.state}, w={sites.w}, block_v={self.resolved.policy.state_block_v}"


def restore_without_policy(module: torch.nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Before a module is restored: a checkpoint that holds it but no policy of it switches both sites off."""
    key = f"{prefix}{CHILD}._extra_state"
    if key not in state_dict and any(name.startswith(prefix) for name in state_dict):
        if not policy_of(module).resolved.off:
            logger.warning("%s: the checkpoint holds no policy, both sites are off now", prefix.rstrip("."))
        state_dict[key] = OFF.to_json()


def pipeline_stages() -> int:
    """Megatron's pipeline size; 1 where Megatron is not running."""
    state = sys.modules.get("megatron.core.parallel_state")
    if state is None or not state.model_parallel_is_initialized():
        return 1
    return int(state.get_pipeline_model_parallel_world_size())


_ACTIVE: ContextVar[SiteRule | None] = ContextVar("_ACTIVE", default=None)
"""The rule of the converted module whose method is running."""


class SiteRule:
    """A gated delta rule that calls the original kernel, or the fused op while a site is on.

    Attributes:
        original: the kernel that it stands in for.
        rounded_calls: how often the fused op was called.
    """

    def __init__(self, original: Callable[..., Any], policy: SitePolicy) -> None:
        self.original = original
        self.policy = policy
        self.rounded_calls = 0
        self._checked = OFF

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Whatever the original takes and returns."""
        resolved = self.policy.resolved
        token = _ACTIVE.set(None)  # what runs now may itself use the framework's kernel
        try:
            if resolved.off:
                return self.original(*args, **kwargs)
            self.check(resolved)
            self.rounded_calls += 1
            return fused_op()(*args, **kwargs, **resolved.options())
        finally:
            _ACTIVE.reset(token)

    def check(self, resolved: Resolved) -> None:
        """Refuses what the module cannot do; looked at again only when the policy changes."""
        if resolved != self._checked:
            check_can_round(self.policy.owner, self.policy.family, self.original)
            self._checked = resolved

    def __deepcopy__(self, memo: dict[int, Any]) -> SiteRule:
        """A copy for a copied module: the same kernel, the copied policy."""
        return SiteRule(self.original, deepcopy(self.policy, memo))


class NamedKernel:
    """Stands under a module-level kernel name; calls the rule of the converted module that runs, if any.

    Attributes:
        original: the kernel that the name stood for.
        users: how many converted modules rely on it.
    """

    def __init__(self, original: Callable[..., Any]) -> None:
        self.original = original
        self.users = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Whatever the original takes and returns."""
        rule = _ACTIVE.get()
        if rule is None:
            check_not_by_a_converted_module(sys._getframe(1).f_locals.get("self"))
            return self.original(*args, **kwargs)
        return rule(*args, **kwargs)


def check_not_by_a_converted_module(caller: Any) -> None:
    """Refuses a call by a module that should round, but whose watched method something else has replaced.

    Raises:
        RuntimeError: the caller has a site on.
    """
    if isinstance(caller, torch.nn.Module) and is_converted(caller) and not policy_of(caller).resolved.off:
        raise RuntimeError(
            f"{type(caller).__name__} must call its kernel through the method that conversion put there, got "
            f"another; convert the model after every tool that replaces methods"
        )


class WatchedMethod:
    """A method that calls the kernel, with the rule of its module in force, and proof that it was called."""

    def __init__(self, owner: torch.nn.Module, name: str, rule: SiteRule) -> None:
        self.owner = (owner,)
        self.name = name
        self.rule = rule
        self.inner = owner.__dict__.get(name)  # another tool may have put its own method on the module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The method that it stands for.

        Raises:
            RuntimeError: it ended without a rounded call while a site was on.
        """
        owner, before = self.owner[0], self.rule.rounded_calls
        token = _ACTIVE.set(self.rule)
        try:
            if self.inner is not None:
                result = self.inner(*args, **kwargs)
            else:
                result = getattr(type(owner), self.name)(owner, *args, **kwargs)
        finally:
            _ACTIVE.reset(token)
        if not self.rule.policy.resolved.off and self.rule.rounded_calls == before:
            raise RuntimeError(
                f"{type(owner).__name__}.{self.name} must call its gated delta rule while a site is on, got "
                f"none; sites act in chunk mode only: train, or evaluate without a recurrent kernel or cache"
            )
        return result


def is_converted(module: torch.nn.Module) -> bool:
    """Whether a module has a policy."""
    return isinstance(module._modules.get(CHILD), SitePolicy)


def policy_of(module: torch.nn.Module) -> SitePolicy:
    """The policy child of a converted module.

    Raises:
        ValueError: the module is not converted.
    """
    child = module._modules.get(CHILD)
    if not isinstance(child, SitePolicy):
        raise ValueError(
            f"{type(module).__name__} must be converted to have a policy, it is not; call convert first"
        )
    return child


def original_kernel(module: torch.nn.Module) -> Callable[..., Any]:
    """The kernel that the framework put there, whether or not the module is converted."""
    layout = layout_of(module)
    holder = module.__dict__ if layout.namespace is None else layout.namespace
    kernel: Callable[..., Any] = holder[layout.attribute]
    return kernel.original if isinstance(kernel, SiteRule | NamedKernel) else kernel


def attach(module: torch.nn.Module, family: str, policy: SitePolicy | None = None) -> Layout:
    """Converts one module with both sites off, or with a policy of the caller's; once is enough.

    Args:
        module: a module of one of `FAMILIES`.
        family: its name there.
        policy: the child to add; None makes a plain one.

    Raises:
        NotImplementedError: the module's layout is not known.
    """
    layout = layout_of(module)
    if is_converted(module):
        return layout
    policy = policy if policy is not None else SitePolicy(module, family)
    rule = SiteRule(original_kernel(module), policy)
    if layout.namespace is None:
        module.__dict__[layout.attribute] = rule
    else:
        name_kernel(layout.namespace, layout.attribute).users += 1
    for caller in layout.callers:
        module.__dict__[caller] = WatchedMethod(module, caller, rule)
    module.add_module(CHILD, policy)
    return layout


def name_kernel(namespace: dict[str, Any], attribute: str) -> NamedKernel:
    """The `NamedKernel` under a module-level name, put there if need be."""
    if not isinstance(namespace[attribute], NamedKernel):
        namespace[attribute] = NamedKernel(namespace[attribute])
    kernel: NamedKernel = namespace[attribute]
    return kernel


def detach(module: torch.nn.Module) -> None:
    """Undoes `attach`: the module is what it was, down to the identity of its kernel."""
    policy = policy_of(module)
    layout = layout_of(module)
    original = original_kernel(module)
    if layout.namespace is None:
        module.__dict__[layout.attribute] = original
    else:
        kernel = name_kernel(layout.namespace, layout.attribute)
        kernel.users -= 1
        if kernel.users == 0:
            layout.namespace[layout.attribute] = original
    policy._restore_hook.remove()
    for caller in layout.callers:
        inner = module.__dict__.pop(caller).inner
        if inner is not None:
            module.__dict__[caller] = inner
    del module._modules[CHILD]


def describe(module: torch.nn.Module) -> str:
    """The layout and the kernel of a module, for tables."""
    return f"{layout_of(module)}, {kernel_name(original_kernel(module))}"
