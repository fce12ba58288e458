"""Named wrong answers: defined departures from the contract, each with its own oracle.

Each is one changed field of `Semantics`, a reason why implementations depart there, the tensors that it can
touch (all others stay bit-equal to the contract's) and what a call must have for it to be visible at all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from references.gdn_chunk import gdn_chunk
from references.semantics import Semantics, SiteRule
from references.setting import NEEDS, Setting, setting_of

Tensor = torch.Tensor

__all__ = ["WRONG_ANSWERS", "Setting", "WrongAnswer", "applies", "setting_of"]

TENSORS = ("o", "final_state", "dq", "dk", "dv", "dg", "dbeta", "dh0")
VALUES = ("o", "final_state", "dq", "dk", "dg", "dbeta")
"""What the value of the state reaches: dv and dh0 do not depend on it."""

BACKWARD = ("dk", "dv", "dg", "dbeta", "dh0")
"""What the backward state pass reaches: everything but dq."""


@dataclass(frozen=True)
class WrongAnswer:
    """A defined departure from the contract.

    Attributes:
        name: what it is called in receipts.
        because: why implementations depart there, in one line.
        semantics: what its oracle computes.
        touches: the tensors that can differ from the contract's; the others are bit-equal.
        needs: names in `NEEDS`, all of which a call must have for it to be visible.
    """

    name: str
    because: str
    semantics: Semantics
    touches: tuple[str, ...] = TENSORS
    needs: tuple[str, ...] = ()

    @property
    def backward_only(self) -> bool:
        """Whether every output of the forward pass is right."""
        return "o" not in self.touches and "final_state" not in self.touches

    def applies(self, setting: Setting) -> bool:
        """Whether a call with this setting can show the departure."""
        return all(NEEDS[need](setting) for need in self.needs)

    def run(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        initial_state: Tensor | None = None,
        **options: Any,
    ) -> tuple[Tensor, Tensor]:
        """`gdn_chunk` with this departure; same arguments, same results."""
        return gdn_chunk(q, k, v, g, beta, initial_state, semantics=self.semantics, **options)


def applies(name: str, **setting: Any) -> bool:
    """Whether a call can show the wrong answer `name`; see `Setting` for the keywords.

    Raises:
        KeyError: for an unknown name.
    """
    return WRONG_ANSWERS[name].applies(Setting(**setting))


def _site_faults() -> Iterator[WrongAnswer]:
    """Faults of a rounding, at either site: (suffix, because, rule, what it needs beyond the site)."""
    values: tuple[tuple[str, str, SiteRule, str], ...] = (
        ("off", "a wrapper that misses the site rounds nothing", SiteRule(active=False), ""),
        ("e5m2", "the gradient format is taken for the forward one", SiteRule(fmt="e5m2"), ""),
        ("truncated", "codes are cut, not rounded", SiteRule(rounding="truncate"), ""),
        ("ties_away", "a software rounding adds half and cuts", SiteRule(rounding="ties_away"), ""),
        (
            "through_fp16",
            "the conversion goes through fp16 and rounds twice",
            SiteRule(rounding="through_fp16"),
            "",
        ),
        (
            "reciprocal",
            "a compiler turns division by a constant into a product",
            SiteRule(scale="reciprocal"),
            "",
        ),
        ("fnuz", "the largest code of the fnuz variant is used", SiteRule(largest=240.0), "_e4m3"),
    )
    for site, label in (("state", "state"), ("w", "w")):
        for suffix, because, rule, extra in values:
            yield _site(site, f"{label}_{suffix}", because, rule, (site + extra,))
    amax = SiteRule(amax="bf16")
    yield _site("state", "state_bf16_amax", "the largest magnitude is taken from bf16 data", amax, ("state",))
    yield _site("w", "w_bf16_amax", "the largest magnitude is taken in bf16", amax, ("w", "w_not_bf16"))
    shared: tuple[tuple[str, str, str, str, SiteRule], ...] = (
        ("state_int8", "state", "state_e4m3", "the integer format is applied", SiteRule(fmt="int8")),
        ("state_e4m3", "state", "state_int8", "the default format is applied", SiteRule(fmt="e4m3")),
        ("w_int8", "w", "w_e4m3", "the integer format is applied", SiteRule(fmt="int8")),
    )
    for name, site, need, because, rule in shared:
        yield _site(site, name, because, rule, (need,))
    scopes: tuple[tuple[str, str, str, SiteRule, str], ...] = (
        (
            "state_half_tile",
            "state",
            "a kernel's own tile becomes the scale group",
            SiteRule(tile=0.5),
            "half_tiles",
        ),
        ("state_double_tile", "state", "block_v is ignored for a wider one", SiteRule(tile=2.0), "tiles"),
        ("state_per_head", "state", "one scale for a whole state", SiteRule(scope="head"), "tiles"),
        ("state_per_tensor", "state", "one scale for all heads", SiteRule(scope="tensor"), "states"),
        ("state_per_row", "state", "one scale for each key channel", SiteRule(scope="row"), "rows"),
        (
            "state_half_keys",
            "state",
            "sub-tiles do not share their largest magnitude",
            SiteRule(scope="half_keys"),
            "even_keys",
        ),
        (
            "w_half_keys",
            "w",
            "sub-tiles do not share their largest magnitude",
            SiteRule(scope="half_keys"),
            "even_keys",
        ),
        ("state_twice", "state", "two layers round, with other tiles", SiteRule(twice=True), "half_tiles"),
        (
            "state_every_second",
            "state",
            "an unrolled loop rounds every second chunk",
            SiteRule(every=2),
            "state",
        ),
        ("w_per_chunk", "w", "one scale for all tokens of a chunk", SiteRule(scope="head"), "pairs"),
        ("w_per_tensor", "w", "one scale for the whole of W", SiteRule(scope="tensor"), "w_rows"),
    )
    for name, site, because, rule, need in scopes:
        yield _site(site, name, because, rule, (site, need))


def _site(site: str, name: str, because: str, rule: SiteRule, needs: tuple[str, ...]) -> WrongAnswer:
    if site == "w":
        return WrongAnswer(name, because, Semantics(w=rule), TENSORS, (*needs, "incoming"))
    return WrongAnswer(name, because, Semantics(state=rule), VALUES, needs)


def _straight_through_faults() -> Iterator[WrongAnswer]:
    rules = (
        ("gradient_clamped", "clamp stays in the graph and stops the largest element", "clamped"),
        ("gradient_through_scale", "the scale is not detached", "through_scale"),
        ("gradient_rounded", "a differentiable cast rounds its gradient as well", "rounded"),
    )
    for suffix, because, gradient in rules:
        rule = SiteRule(gradient=gradient)
        yield WrongAnswer(
            f"state_{suffix}", because, Semantics(state=rule), BACKWARD, ("state", "state_gradient")
        )
        yield WrongAnswer(
            f"w_{suffix}", because, Semantics(w=rule), ("dk", "dg", "dbeta"), ("w", "w_gradient")
        )


@dataclass(frozen=True)
class _Row:
    """A wrong answer whose semantics are the contract's with the given fields changed."""

    name: str
    because: str
    changes: Mapping[str, Any]
    needs: tuple[str, ...]
    touches: tuple[str, ...] = TENSORS


_STATE_AND_TIME = (
    _Row(
        "initial_unrounded",
        "the given state skips the site",
        {"initial_rounded": False},
        ("state", "initial"),
        VALUES,
    ),
    _Row(
        "final_unrounded",
        "rounding happens on entry of the next chunk, which the last state never sees",
        {"final_rounded": False},
        ("state",),
        ("final_state",),
    ),
    _Row(
        "state_read_before_rounding",
        "V' and O read the register copy from before the rounding",
        {"v_reads": "unrounded", "o_reads": "unrounded"},
        ("state", "incoming"),
        VALUES,
    ),
    _Row(
        "v_reads_unrounded",
        "V' reads the state from before the rounding, O the rounded one",
        {"v_reads": "unrounded"},
        ("state", "incoming"),
        VALUES,
    ),
    _Row(
        "o_reads_unrounded",
        "O reads the state from before the rounding, V' the rounded one",
        {"o_reads": "unrounded"},
        ("state", "incoming"),
        ("o", "dq", "dg"),
    ),
    _Row(
        "update_reads_unrounded",
        "the carried accumulator is never replaced by its rounded value",
        {"update_reads": "unrounded"},
        ("state", "incoming"),
        VALUES,
    ),
    _Row(
        "state_copy_fp16",
        "the state is narrowed to fp16 for a matmul and overflows or vanishes",
        {"state_copy": "fp16"},
        ("beyond_fp16",),
        VALUES,
    ),
    _Row(
        "w_right_side_rounded",
        "the quantizer sits before the solve",
        {"w_rounded": "right_side"},
        ("w", "incoming", "pairs"),
    ),
    _Row("solve_one_term", "the series is cut after I - L", {"solve": "one_term"}, ("pairs",)),
    _Row("solve_two_terms", "the series is cut after L^2", {"solve": "two_terms"}, ("quadruples",)),
    _Row(
        "state_leaks",
        "the accumulator is not reset at a packing boundary",
        {"boundaries": "state_leaks"},
        ("sequences",),
    ),
    _Row(
        "first_initial_state",
        "every sequence is given the first one's initial state",
        {"initial": "first"},
        ("sequences", "initial"),
        (*VALUES, "dh0"),
    ),
    _Row(
        "empty_state_zero",
        "a program without tokens writes zeros",
        {"empty": "zero"},
        ("empty", "initial"),
        ("final_state", "dh0"),
    ),
    _Row(
        "empty_state_unrounded",
        "a program without tokens copies its initial state",
        {"empty": "unrounded"},
        ("empty", "initial", "state"),
        ("final_state",),
    ),
    _Row("first_head", "every value head reads q/k head 0", {"heads": "first"}, ("heads",)),
    _Row("modulo_head", "head j reads j mod H, not j // (HV / H)", {"heads": "modulo"}, ("groups",)),
    _Row(
        "first_gate_head",
        "every head loads head 0's gate",
        {"gate_heads": "first"},
        ("value_heads", "decays", "remembers"),
    ),
    _Row(
        "no_update_decay", "the carried state does not decay", {"update_decay": False}, ("incoming", "decays")
    ),
    _Row(
        "no_read_decay",
        "the readout forgets the decay since the chunk's start",
        {"read_decay": False},
        ("incoming", "decays"),
        ("o", "dq", *BACKWARD),
    ),
    _Row("no_w_decay", "the keys of W do not decay", {"beta_decay": False}, ("incoming", "decays")),
    _Row(
        "last_gate_early",
        "the closing gate is read from the row before the last",
        {"last_gate": 2},
        ("pairs", "decays"),
    ),
    _Row(
        "gate_exclusive",
        "the cumulative sum leaves the token out",
        {"gate": "exclusive"},
        ("decays", "remembers"),
    ),
    _Row(
        "gate_base_two",
        "natural logarithms are taken for binary ones",
        {"gate": "base_two"},
        ("decays", "remembers"),
    ),
    _Row(
        "gate_bf16",
        "the gate is rounded to bf16 on its way in",
        {"gate_dtype": "bf16"},
        ("fine_gates", "remembers"),
    ),
    _Row(
        "causal_exclusive",
        "a token does not read its own write",
        {"causal": "exclusive"},
        (),
        ("o", "dq", *BACKWARD),
    ),
    _Row(
        "initial_transposed",
        "the initial state is read in the other layout",
        {"initial_transposed": True},
        ("square", "initial"),
        (*VALUES, "dh0"),
    ),
    _Row(
        "final_transposed",
        "the final state is written in the other layout",
        {"final_transposed": True},
        ("square",),
        ("final_state", *BACKWARD),
    ),
)

_BACKWARD_ROWS = (
    _Row(
        "backward_at_unrounded_state",
        "the backward recomputes the states without rounding them",
        {"backward_state": "unrounded"},
        ("state", "incoming", "backward"),
        ("dq", "dk", "dg", "dbeta"),
    ),
    _Row(
        "backward_at_unrounded_w",
        "the backward recomputes W without rounding it",
        {"backward_w": "unrounded"},
        ("w", "incoming", "backward"),
        BACKWARD,
    ),
    _Row(
        "backward_at_recomputed_w",
        "the backward rounds a W that it recomputed in bf16",
        {"backward_w": "recomputed"},
        ("w", "incoming", "backward", "w_not_bf16"),
        BACKWARD,
    ),
    _Row(
        "solve_adjoint_at_rounded_w",
        "the adjoint of the solve reads the saved, rounded W",
        {"solve_adjoint": "rounded"},
        ("w", "w_gradient", "pairs"),
        ("dk", "dg", "dbeta"),
    ),
    _Row("dht_ignored", "the backward state pass starts from zero", {"dht": False}, ("dht",), BACKWARD),
    _Row(
        "dh0_missing",
        "the initial state's gradient is never written",
        {"dh0": False},
        ("initial", "backward"),
        ("dh0",),
    ),
    _Row(
        "gradient_leaks",
        "the backward state pass is not reset at a packing boundary",
        {"boundaries": "gradient_leaks"},
        ("sequences", "backward"),
        BACKWARD,
    ),
    _Row("dq_unscaled", "the scale is missing in dq", {"dq_scale": False}, ("do",), ("dq",)),
    _Row(
        "dg_tail_dropped",
        "dg of the last token of a partial chunk is lost",
        {"dg_tail": "dropped"},
        ("partial", "backward", "remembers"),
        ("dg",),
    ),
    _Row(
        "dg_tail_without_last",
        "the closing gate's gradient goes to a row that a partial chunk does not have",
        {"dg_tail": "no_last"},
        ("partial", "dht"),
        ("dg",),
    ),
)

_LOST_TERMS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("dq.state", "dq has no term from the state", ("do", "incoming")),
    ("dq.attention", "dq has no term from inside the chunk", ("do",)),
    ("dk.attention", "dk has no term from the scores", ("do",)),
    ("dk.system", "dk has no term from the inverted matrix", ("backward", "pairs")),
    ("dk.w", "dk has no term from W", ("w_gradient",)),
    ("dk.update", "dk has no term from the state update", ("outgoing",)),
    ("dbeta.system", "dbeta has no term from the inverted matrix", ("backward", "pairs")),
    ("dbeta.u", "dbeta has no term from U", ("backward",)),
    ("dbeta.w", "dbeta has no term from W", ("w_gradient",)),
    ("dg.system", "dg has no term from the inverted matrix", ("backward", "pairs")),
    ("dg.attention", "dg has no term from the scores", ("do", "pairs")),
    ("dg.w", "dg has no term from W", ("w_gradient",)),
    ("dg.read", "dg has no term from the readout", ("do", "incoming")),
    ("dg.update", "dg has no term from the keys of the update", ("outgoing", "pairs")),
    ("dg.carry", "dg has no term from the carried state", ("outgoing", "incoming")),
    ("dg.last", "dg has no term from the closing gate", ("outgoing",)),
    ("dstate.write", "the state's gradient has no term from V'", ("state_gradient", "incoming")),
    ("dstate.read", "the state's gradient has no term from the readout", ("do", "incoming")),
    ("dstate.carry", "the state's gradient does not pass over a chunk", ("outgoing", "incoming")),
    ("dv_new.read", "the gradient of V' has no term from the readout", ("do",)),
    ("dv_new.update", "the gradient of V' has no term from the state update", ("outgoing",)),
)

_REACHES: Mapping[str, tuple[str, ...]] = {"dstate": BACKWARD, "dv_new": BACKWARD}


def _wrong_answers() -> Iterator[WrongAnswer]:
    yield from _site_faults()
    yield from _straight_through_faults()
    for row in (*_STATE_AND_TIME, *_BACKWARD_ROWS):
        yield WrongAnswer(row.name, row.because, Semantics(**row.changes), row.touches, row.needs)
    for term, because, needs in _LOST_TERMS:
        gradient = term.split(".")[0]
        yield WrongAnswer(
            f"lost_{term.replace('.', '_')}",
            because,
            Semantics(lost=frozenset({term})),
            _REACHES.get(gradient, (gradient,)),
            needs,
        )


WRONG_ANSWERS: Mapping[str, WrongAnswer] = MappingProxyType({wrong.name: wrong for wrong in _wrong_answers()})
"""Every named wrong answer, by name."""
