"""The two rounding sites of an oracle: with the contract's rule or a departure from it, fresh or replayed.

`Offsets` keeps, for every site and chunk, what rounding added in one run, and adds the same again in later
runs. The graph is then smooth in its inputs: finite differences and noisy runs do not cross a rounding edge.
`Observed` notes what is rounded there: between runs that replay the same offsets it differs by noise alone.
`Tipped` does the opposite: whatever noise could round to another code is rounded to it, all at once.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, Protocol

import torch

from references.faulty_qdq import faulty_qdq
from references.formats import grid_named
from references.gradients import straight_through
from references.qdq import from_tiles, qdq_state, qdq_w, state_tiles, tip
from references.semantics import Semantics, SiteRule

Tensor = torch.Tensor


class Rounding(Protocol):
    """A site's rounding of `x`; with a reach, codes that near a boundary are those beyond it."""

    def __call__(self, reach: Tensor | None = None) -> Tensor:
        """The rounded tensor, attached to the graph of `x`."""


class AtSites(Protocol):
    """What a run does at its sites beside rounding: record, replay, take notes or take sides."""

    def apply(self, key: Hashable, x: Tensor, rounded: Rounding) -> Tensor:
        """What stands for the rounded `x` at the site and chunk of `key`."""


class Offsets:
    """Rounding offsets, recorded in the first run that sees this object and replayed after `freeze()`."""

    def __init__(self) -> None:
        self._recorded: dict[Hashable, Tensor] = {}
        self.frozen = False

    def freeze(self) -> Offsets:
        """From now on the recorded offsets are added and nothing is rounded; returns itself."""
        if not self._recorded:
            raise ValueError(
                "offsets must be recorded before they are frozen, got none; run the oracle with them first"
            )
        self.frozen = True
        return self

    def apply(self, key: Hashable, x: Tensor, rounded: Rounding) -> Tensor:
        """`rounded()`, recorded; or, once frozen, `x` plus what was recorded under `key`."""
        if not self.frozen:
            value = rounded()
            self._recorded[key] = (value - x).detach()
            return value
        if key not in self._recorded or self._recorded[key].shape != x.shape:
            raise KeyError(
                f"no offset of shape {tuple(x.shape)} was recorded for {key}; record the same call first"
            )
        return straight_through(x, (x + self._recorded[key]).detach())


class Observed:
    """Notes what every site and chunk is given, while offsets are recorded or replayed.

    Args:
        offsets: what is recorded into or replayed from.
    """

    def __init__(self, offsets: Offsets) -> None:
        self.offsets = offsets
        self.given: dict[Hashable, Tensor] = {}

    def apply(self, key: Hashable, x: Tensor, rounded: Rounding) -> Tensor:
        """What the offsets make of `x`."""
        self.given[key] = x.detach()
        return self.offsets.apply(key, x, rounded)


class Tipped:
    """Rounds every element that lies near a boundary between two codes to the one beyond it.

    Args:
        reach: how near, relative to the element. An initial state is an input, has no noise, and keeps its
            codes.
        noise: how near by site and chunk, in units of the element, where that is further; its shape or one
            that broadcasts against it.
    """

    def __init__(self, reach: float, noise: Mapping[Hashable, Tensor] | None = None) -> None:
        self.reach, self.noise = reach, noise or {}

    def apply(self, key: Hashable, x: Tensor, rounded: Rounding) -> Tensor:
        """`rounded` with this reach."""
        reach = self.reach * x.detach().abs()
        return rounded(torch.maximum(reach, self.noise[key]) if key in self.noise else reach)


class Sites:
    """Both sites of one call.

    Args:
        state_format, state_block_v, w_format: the options of the call; None is a site that is off.
        w_dtype: the dtype in which W is materialised before the W site sees it.
        semantics: the rules.
        offsets: what to record into or replay from, what tips codes over, or None.
    """

    def __init__(
        self,
        state_format: str | None,
        state_block_v: int,
        w_format: str | None,
        w_dtype: torch.dtype,
        semantics: Semantics,
        offsets: AtSites | None,
    ) -> None:
        self.state_format = state_format if semantics.state.active else None
        self.w_format = w_format if semantics.w.active else None
        self.block_v, self.w_dtype = state_block_v, w_dtype
        self.rules, self.offsets = semantics, offsets

    def state(self, state: Tensor, occasion: int, key: Hashable) -> Tensor:
        """The state `[..., K, V]` after its site; `occasion` counts the roundings of a sequence from 0."""
        if self.state_format is None or not self._due(self.rules.state, occasion):
            return state
        fmt, rule = self.state_format, self.rules.state

        def rounded(reach: Tensor | None = None) -> Tensor:
            if reach is not None and occasion and rule.is_contract:
                near = state_tiles(reach.expand_as(state), self.block_v)
                tiles = tip(state_tiles(state, self.block_v), near, grid_named(fmt), (-3, -1))
                return straight_through(state, from_tiles(tiles, state.shape[-1]).to(state.dtype))
            if rule.is_contract:
                return qdq_state(state, block_v=self.block_v, fmt=fmt)
            return faulty_qdq(state, rule, fmt, self.block_v)

        return self._apply(("state", key), state, rounded)

    def w(self, w: Tensor, key: Hashable) -> Tensor:
        """W `[..., K]` as it is materialised, and after its site when that is on."""
        fmt, rule = self.w_format, self.rules.w
        if fmt is None and self.w_dtype == w.dtype:
            return w

        def rounded(reach: Tensor | None = None) -> Tensor:
            materialised = straight_through(w, w.detach().to(self.w_dtype).to(w.dtype))
            if fmt is None:
                return materialised
            if reach is not None and rule.is_contract:
                tipped = tip(materialised, reach, grid_named(fmt)).to(self.w_dtype)
                return straight_through(w, tipped.to(w.dtype))
            if rule.is_contract:
                in_carrier = qdq_w(materialised.detach().to(self.w_dtype), fmt=fmt)
                return straight_through(w, in_carrier.to(w.dtype))
            quantized = faulty_qdq(materialised, rule, fmt, None)
            return straight_through(quantized, quantized.detach().to(self.w_dtype).to(w.dtype))

        return self._apply(("w", key), w, rounded)

    def _apply(self, key: Any, x: Tensor, rounded: Rounding) -> Tensor:
        return rounded() if self.offsets is None else self.offsets.apply(key, x, rounded)

    @staticmethod
    def _due(rule: SiteRule, occasion: int) -> bool:
        return occasion % rule.every == 0
