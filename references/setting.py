"""What a call has, as far as it decides which wrong answers can show in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any

import torch

Tensor = torch.Tensor


@dataclass(frozen=True)
class Setting:
    """What a call has, as far as it decides which wrong answers can show in it.

    Attributes:
        state_format, w_format: formats of the sites, None for off.
        state_block_v: width of a state tile.
        key_dim, value_dim: K and V.
        heads, value_heads: H and HV.
        sequences: sequences that hold tokens.
        empty_sequences: sequences that hold none.
        longest: tokens in the longest sequence.
        partial: whether some sequence ends with a partial chunk.
        initial: whether an initial state is given.
        do, dht: whether incoming gradients of o and of the final state are given.
        packed: whether sequences are packed.
        decays: whether some gate is not zero.
        gates_fit_bf16: whether every gate is a bf16 number.
        beyond_fp16: whether the initial state holds a magnitude above the largest fp16 number.
        w_dtype: the dtype in which W is materialised, the carrier.
        chunk_size: C.
    """

    state_format: str | None = None
    w_format: str | None = None
    state_block_v: int = 64
    key_dim: int = 64
    value_dim: int = 64
    heads: int = 2
    value_heads: int = 4
    sequences: int = 1
    empty_sequences: int = 0
    longest: int = 145
    partial: bool = True
    initial: bool = True
    do: bool = True
    dht: bool = True
    packed: bool = False
    decays: bool = True
    gates_fit_bf16: bool = False
    beyond_fp16: bool = False
    w_dtype: torch.dtype = torch.bfloat16
    chunk_size: int = 64

    @property
    def chunks(self) -> bool:
        """Whether a state passes from one chunk to another."""
        return self.longest > self.chunk_size

    @property
    def incoming(self) -> bool:
        """Whether some chunk starts from a state that is not zero."""
        return self.initial or self.chunks

    @property
    def outgoing(self) -> bool:
        """Whether some chunk's outgoing state receives a gradient."""
        return self.dht or (self.do and self.chunks)

    @property
    def state_gradient(self) -> bool:
        """Whether a gradient that passes a rounded state arrives at some input."""
        return self.outgoing or (self.do and self.initial)

    @property
    def backward(self) -> bool:
        """Whether there is a backward pass."""
        return self.do or self.dht


Need = Callable[[Setting], bool]

NEEDS: Mapping[str, Need] = MappingProxyType(
    {
        "state": lambda s: s.state_format is not None,
        "state_e4m3": lambda s: s.state_format == "e4m3",
        "state_int8": lambda s: s.state_format == "int8",
        "w": lambda s: s.w_format is not None,
        "w_e4m3": lambda s: s.w_format == "e4m3",
        "tiles": lambda s: s.value_dim > s.state_block_v,
        "half_tiles": lambda s: s.value_dim > s.state_block_v // 2,
        "states": lambda s: s.value_dim > s.state_block_v or s.value_heads > 1 or s.sequences > 1,
        "rows": lambda s: s.key_dim > 1,
        "w_rows": lambda s: s.longest > 1 or s.value_heads > 1 or s.sequences > 1,
        "chunks": lambda s: s.chunks,
        "initial": lambda s: s.initial,
        "incoming": lambda s: s.incoming,
        "outgoing": lambda s: s.outgoing,
        "state_gradient": lambda s: s.state_gradient,
        "backward": lambda s: s.backward,
        "w_gradient": lambda s: s.incoming and s.backward,
        "do": lambda s: s.do,
        "dht": lambda s: s.dht,
        "pairs": lambda s: s.longest > 1,
        "quadruples": lambda s: s.longest > 3,
        "partial": lambda s: s.partial,
        "sequences": lambda s: s.packed and s.sequences > 1,
        "empty": lambda s: s.empty_sequences > 0,
        "heads": lambda s: s.heads > 1,
        "value_heads": lambda s: s.value_heads > 1,
        "groups": lambda s: s.heads > 1 and s.value_heads > s.heads,
        "decays": lambda s: s.decays,
        "fine_gates": lambda s: not s.gates_fit_bf16,
        "remembers": lambda s: s.incoming or s.longest > 1,
        "even_keys": lambda s: s.key_dim % 2 == 0,
        "w_not_bf16": lambda s: s.w_dtype != torch.bfloat16,
        "beyond_fp16": lambda s: s.beyond_fp16 and s.w_dtype != torch.float16,
        "square": lambda s: s.key_dim == s.value_dim and s.key_dim > 1,
    }
)
"""What a call can have: name -> predicate."""


def setting_of(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    *,
    do: Tensor | None = None,
    dht: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    w_dtype: torch.dtype | None = None,
    chunk_size: int = 64,
    **options: Any,
) -> Setting:
    """The setting of a call with these arguments; further options of `gdn_chunk` are read if they matter."""
    batch, length = v.shape[:2]
    lengths = [length] * batch if cu_seqlens is None else cu_seqlens.detach().cpu().diff().tolist()
    known = {field.name for field in fields(Setting)}
    return Setting(
        key_dim=k.shape[-1],
        value_dim=v.shape[-1],
        heads=k.shape[2],
        value_heads=v.shape[2],
        sequences=sum(n > 0 for n in lengths),
        empty_sequences=sum(n == 0 for n in lengths),
        longest=max(lengths, default=0),
        partial=any(n % chunk_size for n in lengths),
        initial=initial_state is not None and bool((initial_state != 0).any()),
        do=do is not None,
        dht=dht is not None,
        packed=cu_seqlens is not None,
        decays=bool((g != 0).any()),
        gates_fit_bf16=bool((g.detach().to(torch.bfloat16).to(g.dtype) == g).all()),
        beyond_fp16=initial_state is not None and bool((initial_state.abs() > 65504.0).any()),
        w_dtype=w_dtype or k.dtype,
        chunk_size=chunk_size,
        **{key: value for key, value in options.items() if key in known},
    )
