"""What an oracle computes, as data: the defaults are the contract, a changed field is a named departure.

One field per place where an implementation may depart. A departure in a field leaves everything else intact:
a fault of the backward pass changes no output, bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class SiteRule:
    """How one of the two sites rounds.

    Attributes:
        active: whether the site rounds at all.
        fmt: another format than the one asked for.
        tile: factor on the width of a state tile.
        scope: what shares a scale: `group` (the contract's tile or row), `head` (all tiles of a state; all
            tokens of a chunk and head), `tensor` (everything), `row` (one key channel of a state),
            `half_keys` (half of the keys).
        rounding: `nearest_even`, `truncate`, `ties_away`, `through_fp16`.
        scale: `divide` or `reciprocal` (codes by multiplying with the reciprocal scale, and amax likewise).
        amax: `fp32`, or `bf16` where the largest magnitude is rounded before it is used.
        largest: another largest code, such as 240 of the fnuz variant.
        gradient: `identity`, `clamped` (none where a code saturates), `through_scale` (the scale is
            differentiated), `rounded` (the gradient goes through the format, as through a framework's cast).
        twice: also round with tiles half as wide.
        every: round on every n-th occasion only.
    """

    active: bool = True
    fmt: str | None = None
    tile: float = 1.0
    scope: str = "group"
    rounding: str = "nearest_even"
    scale: str = "divide"
    amax: str = "fp32"
    largest: float | None = None
    gradient: str = "identity"
    twice: bool = False
    every: int = 1

    @property
    def is_contract(self) -> bool:
        """Whether the value and the gradient are the contract's."""
        return self == SiteRule(every=self.every)


GRADIENT_TERMS = (
    "dq.state",
    "dq.attention",
    "dk.attention",
    "dk.system",
    "dk.w",
    "dk.update",
    "dbeta.system",
    "dbeta.u",
    "dbeta.w",
    "dg.system",
    "dg.attention",
    "dg.w",
    "dg.read",
    "dg.update",
    "dg.carry",
    "dg.last",
    "dstate.write",
    "dstate.read",
    "dstate.carry",
    "dv_new.read",
    "dv_new.update",
)
"""The terms that a backward pass adds up, `<gradient>.<the place in the forward that it comes from>`.

`system` is the matrix that is inverted, `attention` the masked score matrix, `w` and `u` the right sides of
the solve, `read` the readout of the state, `write` V' = U - W S, `update` what is added to the state, `carry`
the decay of the state over a chunk, `last` everything through the chunk's last cumulative gate.
"""


@dataclass(frozen=True)
class Semantics:
    """What `gdn_chunk` computes. Every default is the contract's.

    Attributes:
        state, w: how the sites round.
        initial_rounded, final_rounded: whether the first and the last state are rounded.
        v_reads, o_reads, update_reads: which incoming state V', O and S' read, `rounded` or `unrounded`.
        state_copy: dtype of the copy of the incoming state that V' and O read: None or `fp16`.
        w_rounded: what the W site sees: `solution`, or `right_side` (beta exp(G) K, before the solve).
        backward_state, backward_w: the values at which the backward is linearised: `rounded`, `unrounded`,
            and for W `recomputed` (from an inverse and a right side in bf16).
        solve_adjoint: the solution that the adjoint of the solve uses, `unrounded` or `rounded`.
        solve: `exact`, or a truncated Neumann series of `one_term` or `two_terms`.
        dht, dh0: whether these gradients are taken and given.
        boundaries: `reset`, `state_leaks` (a sequence starts from the state that the one before it left),
            `gradient_leaks` (a sequence receives the initial-state gradient of the next).
        initial: `own`, or `first` where every sequence starts from the first sequence's initial state.
        empty: what an empty sequence leaves: `initial` (rounded), `unrounded` or `zero`.
        heads: `grouped`, `first` (every value head reads head 0), `modulo` (head j reads j mod H).
        gate_heads: `own`, or `first` where every head decays like head 0.
        update_decay, read_decay, beta_decay: whether the decay acts on the state that is carried, at the
            readout, and on the keys of W.
        last_gate: row whose cumulative gate closes a chunk, counted from the end.
        gate: `inclusive`, `exclusive` (the cumulative sum without the token's own gate), `base_two`.
        gate_dtype: None, or `bf16` where g is rounded first.
        causal: `inclusive`, `exclusive` (a token does not read its own write).
        initial_transposed, final_transposed: a square state read or written in the other layout.
        dq_scale: whether dq has the scale.
        dg_tail: what dg of a partial chunk has: `kept`, `dropped` (that of its last token is lost), `no_last`
            (its term through the last cumulative gate is lost).
        lost: the terms of `GRADIENT_TERMS` that the backward pass forgets.
    """

    state: SiteRule = field(default_factory=SiteRule)
    w: SiteRule = field(default_factory=SiteRule)
    initial_rounded: bool = True
    final_rounded: bool = True
    v_reads: str = "rounded"
    o_reads: str = "rounded"
    update_reads: str = "rounded"
    state_copy: str | None = None
    w_rounded: str = "solution"
    backward_state: str = "rounded"
    backward_w: str = "rounded"
    solve_adjoint: str = "unrounded"
    solve: str = "exact"
    dht: bool = True
    dh0: bool = True
    boundaries: str = "reset"
    initial: str = "own"
    empty: str = "initial"
    heads: str = "grouped"
    gate_heads: str = "own"
    update_decay: bool = True
    read_decay: bool = True
    beta_decay: bool = True
    last_gate: int = 1
    gate: str = "inclusive"
    gate_dtype: str | None = None
    causal: str = "inclusive"
    initial_transposed: bool = False
    final_transposed: bool = False
    dq_scale: bool = True
    dg_tail: str = "kept"
    lost: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        unknown = self.lost - set(GRADIENT_TERMS)
        if unknown:
            raise ValueError(
                f"lost terms must be in GRADIENT_TERMS, got {sorted(unknown)}; choose listed terms"
            )


CONTRACT = Semantics()
"""The contract."""
