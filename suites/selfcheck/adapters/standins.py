"""Modules with the kernel where each release of a framework keeps it, small enough for a CPU."""

# mypy: disable-error-code="no-any-return, union-attr, index, arg-type, operator, assignment, misc"
# mypy: allow-untyped-calls

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

Tensor = torch.Tensor


def chunk_gated_delta_rule(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, None]:
    """The framework's kernel: any function of its inputs will do."""
    return (q + k).sum(-1, keepdim=True) * v, None


def torch_chunk_gated_delta_rule(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, None]:
    """The framework's deterministic kernel."""
    return (q + k).sum(-1, keepdim=True) * v, None


def some_other_kernel(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, None]:
    """A kernel that nothing is known about."""
    return (q + k).sum(-1, keepdim=True) * v, None


class Base(torch.nn.Module):
    """What the stand-ins share: a projection before and after the kernel, and a configuration."""

    def __init__(
        self, deterministic_mode: bool = False, cp_size: int = 1, heads: int = 2, size: int = 16
    ) -> None:
        super().__init__()
        self.config = SimpleNamespace(deterministic_mode=deterministic_mode, context_parallel_size=cp_size)
        self.cp_size = cp_size
        self.heads, self.key_head_dim, self.value_head_dim = heads, size, size
        self.in_proj = torch.nn.Linear(heads * size, 3 * heads * size)
        self.out_proj = torch.nn.Linear(heads * size, heads * size)

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        """q, k, v as `[B, T, heads, size]`."""
        return self.in_proj(x).unflatten(-1, (3, self.heads, -1)).unbind(2)


def megatron(cls: type) -> type:
    """Makes a class look like Megatron's."""
    cls.__module__ = "megatron.core.ssm.gated_delta_net"
    cls.__name__ = "GatedDeltaNet"
    return cls


@megatron
class Held(Base):
    """0.18 and 0.19: the kernel is an attribute, called in `forward`."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.setup()

    def setup(self) -> None:
        """Chooses the kernel, as the frameworks do."""
        if self.config.deterministic_mode:
            self.gated_delta_rule = torch_chunk_gated_delta_rule
        else:
            self.gated_delta_rule = chunk_gated_delta_rule

    def forward(self, x: Tensor) -> Tensor:
        """A layer."""
        q, k, v = self.project(x)
        o, _ = self.gated_delta_rule(q, k, v, g=None, beta=None, cu_seqlens=None)
        return self.out_proj(o.flatten(-2))


@megatron
class HeldSplit(Held):
    """The older split layout: the kernel is called in a method of its own."""

    def forward(self, x: Tensor) -> Tensor:
        """A layer."""
        return self.out_proj(self.forward_pre_attn_and_core_attn(x))

    def forward_pre_attn_and_core_attn(self, x: Tensor) -> Tensor:
        """The part before the output projection."""
        q, k, v = self.project(x)
        return self.gated_delta_rule(q, k, v, g=None, beta=None)[0].flatten(-2)


@megatron
class Named(Base):
    """0.16 and 0.17: the kernel is a name of the source file."""

    def forward(self, x: Tensor) -> Tensor:
        """A layer."""
        q, k, v = self.project(x)
        if self.config.deterministic_mode:
            o, _ = torch_chunk_gated_delta_rule(q, k, v)
        else:
            o, _ = chunk_gated_delta_rule(q, k, v, g=None, beta=None)
        return self.out_proj(o.flatten(-2))


@megatron
class NamedSplit(Base):
    """The split layout with a module-level name."""

    def forward(self, x: Tensor) -> Tensor:
        """A layer."""
        return self.out_proj(self.forward_pre_attn_and_core_attn(x))

    def forward_pre_attn_and_core_attn(self, x: Tensor) -> Tensor:
        """The part before the output projection."""
        q, k, v = self.project(x)
        return chunk_gated_delta_rule(q, k, v, g=None, beta=None)[0].flatten(-2)


class FlaLayer(Base):
    """FLA's layer: a module-level name, and another kernel for short sequences in evaluation."""

    def forward(self, x: Tensor) -> Tensor:
        """A layer."""
        q, k, v = self.project(x)
        if self.training or x.shape[1] > 64:
            o, _ = chunk_gated_delta_rule(q=q, k=k, v=v, g=None, beta=None)
        else:
            o, _ = some_other_kernel(q, k, v)
        return self.out_proj(o.flatten(-2))


FlaLayer.__module__, FlaLayer.__name__ = "fla.layers.gated_deltanet", "GatedDeltaNet"


class Qwen3NextLayer(Base):
    """transformers' layer: two held kernels, one of them for a cache."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.chunk_gated_delta_rule = torch_chunk_gated_delta_rule
        self.recurrent_gated_delta_rule = some_other_kernel

    def forward(self, x: Tensor, cached: bool = False) -> Tensor:
        """A layer."""
        q, k, v = self.project(x)
        kernel = self.recurrent_gated_delta_rule if cached else self.chunk_gated_delta_rule
        return self.out_proj(kernel(q, k, v, g=None, beta=None)[0].flatten(-2))


Qwen3NextLayer.__module__ = "transformers.models.qwen3_next.modeling_qwen3_next"
Qwen3NextLayer.__name__ = "Qwen3NextGatedDeltaNet"


@megatron
class Both(Held):
    """A layout that no release has: both ways at once."""

    def forward(self, x: Tensor) -> Tensor:
        """A layer."""
        q, k, v = self.project(x)
        o = self.gated_delta_rule(q, k, v)[0] + chunk_gated_delta_rule(q, k, v)[0]
        return self.out_proj(o.flatten(-2))


@megatron
class Neither(Base):
    """A layout with no kernel to be found."""

    def forward(self, x: Tensor) -> Tensor:
        """A layer."""
        return self.out_proj(x)


@megatron
class Missing(Base):
    """A layout whose kernel was not installed."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.gated_delta_rule = None

    def forward(self, x: Tensor) -> Tensor:
        """A layer."""
        return self.out_proj(self.gated_delta_rule(x)[0])


class Dense(torch.nn.Module):
    """A dense attention layer, which no rule touches."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        """A layer."""
        return self.linear(x)


class Layer(torch.nn.Module):
    """A transformer layer around an attention of any kind."""

    def __init__(self, self_attention: torch.nn.Module) -> None:
        super().__init__()
        self.self_attention = self_attention

    def forward(self, x: Tensor) -> Tensor:
        """A residual step."""
        return x + self.self_attention(x)


class Model(torch.nn.Module):
    """`decoder.layers.N.self_attention`, as in Megatron."""

    def __init__(self, *attentions: torch.nn.Module) -> None:
        super().__init__()
        self.decoder = torch.nn.Module()
        self.decoder.layers = torch.nn.ModuleList(Layer(attention) for attention in attentions)

    def forward(self, x: Tensor) -> Tensor:
        """All layers."""
        for layer in self.decoder.layers:
            x = layer(x)
        return x
