"""ModelOpt: the sites as two quantizers of every gated delta net, beside all others that ModelOpt knows.

    from kernels.adapters import modelopt as mtq
    mtq.quantize(model, {"quant_cfg": [...], "algorithm": None, "linear_attention": [...]})

`quantize` takes ModelOpt's own configuration with one key more. It is this project's and not ModelOpt's entry
because the released one (0.47) refuses keys that it does not know. Every other name of this module is the one
of `modelopt.torch.quantization`. The quantizers `gdn_state_quantizer` and `gdn_w_quantizer` start disabled;
`enable_quantizer`, `disable_quantizer`, calibration, save and restore act on them as on any other. They hold
what is asked for, the fused op does it: ModelOpt's own rounding is never called for them.

Call `install` before a model is restored from a ModelOpt checkpoint. ModelOpt is imported on first use.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import torch

from kernels.adapters.attach import (
    CHILD,
    SitePolicy,
    attach,
    describe,
    is_converted,
    original_kernel,
    policy_of,
)
from kernels.adapters.checks import check_can_round
from kernels.adapters.convert import Conversion, family_named, first_rank, supported_modules, versions
from kernels.adapters.layouts import FAMILIES, family_of, layout_of
from kernels.policy import ExecutionPolicy, Resolved, resolve
from kernels.quantizers import SITES, Sites, default_format, format_of

PLACES = {
    "num_bits": "_num_bits",
    "axis": "_axis",
    "fake_quant": "_fake_quant",
    "unsigned": "_unsigned",
    "narrow_range": "_narrow_range",
    "pass_through_bwd": "_pass_through_bwd",
    "block_sizes": "_block_sizes",
    "bias": "_bias",
    "rotate": "_rotate",
    "backend": "backend",
    "backend_extra_args": "backend_extra_args",
    "use_constant_amax": "_use_constant_amax",
    "constant_amax": "_constant_amax",
}
"""Attribute of a quantizer's configuration -> where a quantizer keeps it."""


def quantize(
    model: torch.nn.Module,
    config: Mapping[str, Any],
    forward_loop: Callable[[torch.nn.Module], Any] | None = None,
    *,
    verbose: bool = True,
) -> torch.nn.Module:
    """`modelopt.torch.quantization.quantize`, which also reads `linear_attention` and sets the sites.

    Args:
        model: a built model; called again, it changes what the configuration names.
        config: ModelOpt's configuration; `linear_attention` is a list of rules, see `kernels.policy`.
        forward_loop: for the calibration of other quantizers.
        verbose: print the resolved policies on the first rank.

    Returns:
        The model, converted in place.

    Raises:
        ValueError, TypeError, NotImplementedError: the configuration is wrong or asks a site for what it
            cannot do; the model is left as it was.
    """
    mtq = install(model)
    normalize = importlib.import_module("modelopt.torch.quantization.config").normalize_quant_cfg_list
    found = supported_modules(model, FAMILIES)
    for name, module in found.items():
        check_not_converted_otherwise(name, module)
    before = {name: policy_of(module).resolved for name, module in found.items() if is_converted(module)}
    entries, rules = normalize(config.get("quant_cfg") or []), config.get("linear_attention")
    resolved = resolve({"quant_cfg": entries, "linear_attention": rules}, list(found), before)
    for name, module in found.items():
        layout_of(module)
        if not resolved[name].off:
            check_can_round(module, family_named(module), original_kernel(module))
    quantized: torch.nn.Module = mtq.quantize(
        model, {key: value for key, value in config.items() if key != "linear_attention"}, forward_loop
    )
    for name, module in found.items():
        policy_of(module).resolved = resolved[name]
    if verbose and found and first_rank():
        print(Conversion(resolved, {n: describe(m) for n, m in found.items()}, versions()))
    return quantized


def install(model: torch.nn.Module | None = None) -> Any:
    """Makes ModelOpt know the gated delta nets, of a model or of Megatron; returns its quantization package.

    Raises:
        ImportError: ModelOpt is not installed.
    """
    mtq = importlib.import_module("modelopt.torch.quantization")
    importlib.import_module("modelopt.torch.quantization.plugins.custom").CUSTOM_MODEL_PLUGINS.add(register)
    classes = {type(m) for m in model.modules() if family_of(m)} if model is not None else set()
    with suppress(Exception):  # a broken Megatron may raise anything, and then there is nothing to add
        classes.add(importlib.import_module("megatron.core.ssm.gated_delta_net").GatedDeltaNet)
    for cls in classes:
        register_class(cls)
    return mtq


def register(model: torch.nn.Module) -> None:
    """ModelOpt calls this before it converts a model: every gated delta net class in it becomes known."""
    for cls in {type(m) for m in model.modules() if family_of(m)}:
        register_class(cls)


def register_class(cls: type[torch.nn.Module]) -> None:
    """Tells ModelOpt how to convert one class, once."""
    nn = importlib.import_module("modelopt.torch.quantization.nn")
    if cls in nn.QuantModuleRegistry or issubclass(cls, nn.QuantModule):
        return

    class QuantGatedDeltaNet(nn.QuantModule):  # type: ignore[misc, name-defined]
        """A gated delta net with a quantizer for each site."""

        def _setup(self) -> None:
            check_not_converted_otherwise(type(self).__name__, self)
            for site, row in SITES.items():
                quantizer = nn.TensorQuantizer()
                set_format(quantizer, site, default_format(site))
                quantizer.disable()
                setattr(self, row.quantizer, quantizer)
            family = family_named(self)
            attach(self, family, QuantizerPolicy(self, family))

    nn.QuantModuleRegistry.register({cls: f"{cls.__module__}.{cls.__qualname__}"})(QuantGatedDeltaNet)


class QuantizerPolicy(SitePolicy):
    """The policy of a module whose sites are quantizers: what they say at this moment is what holds."""

    def __init__(self, owner: torch.nn.Module, family: str) -> None:
        self._execution = ExecutionPolicy()
        super().__init__(owner, family)

    @property
    def resolved(self) -> Resolved:
        """The quantizers' formats and the module's execution policy."""
        return Resolved(Sites(**{site: site_format(self.owner, site) for site in SITES}), self._execution)

    @resolved.setter
    def resolved(self, resolved: Resolved) -> None:
        if not resolved.off:
            check_can_round(self.owner, self.family, original_kernel(self.owner))
        for site in SITES:
            quantizer = quantizer_of(self.owner, site)
            fmt = getattr(resolved.sites, site)
            if fmt is None:
                quantizer.disable()
            elif site_format(self.owner, site) != fmt:
                set_format(quantizer, site, fmt)
        self._execution = resolved.policy


def quantizer_of(module: torch.nn.Module, site: str) -> Any:
    """The quantizer of a site.

    Raises:
        TypeError: several in a row have been put in its place.
    """
    quantizer = getattr(module, SITES[site].quantizer)
    if not hasattr(quantizer, "_num_bits"):
        raise TypeError(
            f"{SITES[site].quantizer} must be one quantizer, got {type(quantizer).__name__}; "
            f"give one set of attributes"
        )
    return quantizer


def site_format(module: torch.nn.Module, site: str) -> str | None:
    """The format that a site's quantizer asks for now; None while it is disabled or calibration pauses it.

    Raises:
        ValueError, TypeError: it asks for what the site cannot do.
    """
    quantizer = quantizer_of(module, site)
    if quantizer._disabled or not quantizer._if_quant:
        return None
    attributes = {
        name: getattr(quantizer, place) for name, place in PLACES.items() if hasattr(quantizer, place)
    }
    if getattr(quantizer, "pre_quant_scale", None) is not None:
        raise ValueError(
            f"{SITES[site].quantizer} must have no pre_quant_scale, got one; exclude it from the algorithm"
        )
    return format_of(site, {**attributes, "type": "dynamic" if quantizer._dynamic else "static"})


def set_format(quantizer: Any, site: str, fmt: str) -> None:
    """Enables a quantizer with the attributes that mean a format at a site, and defaults for all others."""
    config = importlib.import_module("modelopt.torch.quantization.config").QuantizerAttributeConfig
    row = SITES[site]
    bits = next(bits for bits, name in row.formats.items() if name == fmt)
    quantizer.set_from_attribute_config(
        config(num_bits=bits, type="dynamic", axis=row.axis, narrow_range=fmt == "int8", enable=True)
    )


def check_not_converted_otherwise(name: str, module: torch.nn.Module) -> None:
    """Refuses a module that another adapter has converted: ModelOpt would take its methods away from it.

    Raises:
        ValueError: it has a policy that is not one of quantizers.
    """
    child = module._modules.get(CHILD)
    if child is not None and not isinstance(child, QuantizerPolicy):
        raise ValueError(
            f"{name} must not be converted before ModelOpt quantizes it, it is; call revert first"
        )


def __getattr__(name: str) -> Any:
    """Every other name of `modelopt.torch.quantization`."""
    if name.startswith("__"):
        raise AttributeError(name)
    return getattr(importlib.import_module("modelopt.torch.quantization"), name)
