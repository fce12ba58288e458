"""A proof that no rounding happens: the op's graph in exact dyadic arithmetic, with the size of every sum.

A sum of products is carried as three tensors: its value, the sum of the magnitudes of its terms, and the
exponent of the lowest bit that any of its terms has. Where the magnitudes stay within 2^bits times that
lowest bit, every partial sum, in every order, is a number of at most `bits` significant bits. What a correct
implementation may store in the carrier has to fit 8 bits (bf16; fp16 and TF32 have 11), what it accumulates
in fp32 has to fit 24.

The graph is walked forward and backward in the forms that implementations use: substitution and explicit
inverse, V' through W and V' through the residual v - k S, the adjoint of the solve through the solution and
through the inverse, gradients per value head and summed over the group.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch

Tensor = torch.Tensor

CARRIER_BITS = 8
ACCUMULATOR_BITS = 24
LARGEST = 2.0**15
"""Magnitudes stay below this, so that fp16 holds them."""
SMALLEST = -24.0
"""Lowest bits stay at or above this exponent, so that fp16's subnormals hold them."""
SPREAD = 16
"""The lowest bit of a sum is found by adding up 2^(-SPREAD * exponent) of its terms: up to 2^SPREAD terms
cannot mislead it."""

MANTISSA = 2**52 - 1
"""The bits of an fp64 number that are its mantissa."""

Largest = {"e4m3": 448.0, "int8": 127.0}


def weight_of(x: Tensor) -> Tensor:
    """`2^(-SPREAD * e)` for the exponent e of the lowest set bit of each fp64 number, 0 for zero."""
    bits = x.contiguous().view(torch.int64)
    rest = (bits & (bits - 1)).view(torch.float64)  # without the lowest bit of the mantissa, where it has one
    lowest = torch.where(bits & MANTISSA == 0, x, x - rest)
    inverse = lowest.reciprocal_()
    for _ in range(4):  # to the power of SPREAD
        inverse *= inverse
    return inverse.masked_fill(x == 0, 0.0)


def low_exponent(weight: Tensor) -> Tensor:
    """The exponent of the lowest bit from a sum of weights; meaningless where the sum is empty."""
    return -torch.floor((torch.frexp(weight).exponent.double() - 1) / SPREAD)


@dataclass(frozen=True)
class Sum:
    """Sums of products.

    Attributes:
        value: the sum.
        size: the sum of the magnitudes of its terms.
        weight: the sum of the weights of its terms, 0 where there is none.
    """

    value: Tensor
    size: Tensor
    weight: Tensor

    @staticmethod
    def of(x: Tensor) -> Sum:
        """Numbers as sums of one term."""
        return Sum(x, x.abs(), weight_of(x))

    def __matmul__(self, other: Sum) -> Sum:
        return Sum(self.value @ other.value, self.size @ other.size, self.weight @ other.weight)

    def __add__(self, other: Sum) -> Sum:
        return Sum(self.value + other.value, self.size + other.size, self.weight + other.weight)

    def __neg__(self) -> Sum:
        return Sum(-self.value, self.size, self.weight)

    def __sub__(self, other: Sum) -> Sum:
        return self + -other

    def __mul__(self, other: Sum) -> Sum:
        return Sum(self.value * other.value, self.size * other.size, self.weight * other.weight)

    @property
    def mT(self) -> Sum:  # noqa: N802
        """The transpose of the last two axes."""
        return Sum(self.value.mT, self.size.mT, self.weight.mT)

    def lower(self, diagonal: int = 0) -> Sum:
        """The lower triangle."""
        return Sum(self.value.tril(diagonal), self.size.tril(diagonal), self.weight.tril(diagonal))

    def sum(self, *dim: int) -> Sum:
        """The sum over some axes."""
        return Sum(self.value.sum(dim), self.size.sum(dim), self.weight.sum(dim))


@dataclass
class Audit:
    """Collects what does not fit. `faults` maps a name to a mask of the elements that need too many bits."""

    faults: dict[str, Tensor] = field(default_factory=dict)
    checked: int = 0

    def _fits(self, name: str, x: Sum, bits: int) -> None:
        low = low_exponent(x.weight)
        bad = x.size > torch.exp2(bits + low)
        if bits == CARRIER_BITS:
            bad = bad | (x.size > LARGEST) | (low < SMALLEST)
        bad = bad & (x.size > 0)
        self.checked += x.size.numel()
        if bool(bad.any()):
            self.faults[name] = bad

    def stored(self, name: str, x: Sum) -> Sum:
        """A tensor that may be stored in the carrier; from here on its value is one term."""
        self._fits(name, x, CARRIER_BITS)
        return Sum.of(x.value)

    def accumulated(self, name: str, x: Sum) -> Sum:
        """A tensor that is accumulated and kept in fp32."""
        self._fits(name, x, ACCUMULATOR_BITS)
        return Sum.of(x.value)

    def rounded(self, name: str, x: Tensor, dim: tuple[int, ...], fmt: str | None) -> Tensor:
        """`x` rounded with one scale per group spanning `dim`; what comes out must fit the carrier again."""
        if fmt is None:
            return x
        value = round_fp32(x, dim, fmt)
        self._fits(name, Sum.of(value), CARRIER_BITS)
        return value


def round_fp32(x: Tensor, dim: tuple[int, ...], fmt: str) -> Tensor:
    """QDQ in the contract's own fp32 steps, each IEEE, on numbers that fp32 holds.

    Args:
        x: fp64, any shape.
        dim: the axes that share a scale.
        fmt: `e4m3` or `int8`.
    """
    narrow = x.float()
    amax = narrow.abs().amax(dim, keepdim=True)
    scale = torch.where(amax == 0, 1.0, amax / torch.full_like(amax, Largest[fmt]))
    y = (narrow / scale).clamp(-Largest[fmt], Largest[fmt])
    step = torch.ones_like(y)
    if fmt == "e4m3":
        step = torch.exp2(torch.frexp(y).exponent.float().clamp_min(-5) - 4)
    return (torch.round(y / step) * step * scale).double()


def state_tiles(state: Tensor, block_v: int) -> Tensor:
    """`[..., K, V]` as `[..., K, tiles, block_v]`, zeros in the last tile's missing columns."""
    missing = -state.shape[-1] % block_v
    padded = torch.nn.functional.pad(state, (0, missing))
    return padded.reshape(*padded.shape[:-1], -1, block_v)


@dataclass(frozen=True)
class Chunk:
    """The inputs of one chunk, heads repeated: q, k `[HV, C, K]`, v and do `[HV, C, V]`, beta `[HV, C]`."""

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor
    do: Tensor


@dataclass(frozen=True)
class Sites:
    """The options of the rounding sites and the readout."""

    scale: float
    state_format: str | None
    block_v: int
    w_format: str | None


@dataclass
class Forward:
    """What the forward of one chunk leaves for its backward."""

    paths: Sum
    w: Sum
    wq: Sum
    u: Sum
    vn: Sum
    kk: Sum
    p: Sum
    state: Sum


def round_state(audit: Audit, name: str, state: Tensor, sites: Sites) -> Tensor:
    """The state site on `[HV, K, V]`."""
    if sites.state_format is None:
        audit.stored(name, Sum.of(state))
        return state
    tiles = state_tiles(state, sites.block_v)
    rounded = audit.rounded(name, tiles, (-3, -1), sites.state_format)
    if name in audit.faults:
        audit.faults[name] = audit.faults[name].flatten(-2)[..., : state.shape[-1]]
    return rounded.flatten(-2)[..., : state.shape[-1]]


def solve_paths(lower: Tensor) -> Sum:
    """`(I + L)^-1` as a sum over all chains of collisions."""
    eye = torch.eye(lower.shape[-1], dtype=lower.dtype, device=lower.device)

    def resolvent(x: Tensor) -> Tensor:
        solved: Tensor = torch.linalg.solve_triangular(
            eye - x, eye.expand_as(x).contiguous(), upper=False, unitriangular=True
        )
        return solved

    return Sum(resolvent(-lower), resolvent(lower.abs()), resolvent(weight_of(lower)))


class Solved(NamedTuple):
    """What follows from the keys of a chunk alone: `k k^T`, the chains of the inverse and W."""

    kk: Sum
    paths: Sum
    w: Sum


def solved_rows(audit: Audit, k: Tensor, beta: Tensor) -> Solved:
    """Solves the system of a chunk's keys."""
    key = Sum.of(k)
    kk = audit.stored("kk", (key @ key.mT).lower(-1))
    lower = audit.stored("lower", (Sum.of(beta[..., None]) * kk).lower(-1))
    paths = solve_paths(lower.value)
    audit.stored("inverse", paths)
    w = audit.stored("w", paths @ audit.stored("beta_k", Sum.of(beta[..., None] * k)))
    return Solved(kk, paths, w)


def forward_chunk(
    audit: Audit, c: Chunk, solved: Solved, state: Tensor, sites: Sites
) -> tuple[Forward, Tensor]:
    """One chunk from its rounded incoming state; returns what the backward needs and the raw S'."""
    kk, paths, w = solved
    wq = Sum.of(audit.rounded("w_scale", w.value, (-1,), sites.w_format))
    s, k, beta = Sum.of(state), Sum.of(c.k), Sum.of(c.beta[..., None])
    bv = audit.stored("beta_v", beta * Sum.of(c.v))
    u = audit.stored("u", paths @ bv)
    ws = audit.stored("ws", wq @ s)
    vn = audit.stored("v_new", u - ws)
    if sites.w_format is None:
        residual = audit.stored("residual", Sum.of(c.v) - audit.stored("ks", k @ s))
        audit.stored("v_new_residual", paths @ (beta * residual))
    q = Sum.of(c.q * sites.scale)
    audit.stored("qk", (Sum.of(c.q) @ k.mT).lower())
    p = audit.stored("p", (q @ k.mT).lower())
    audit.stored("o_state", q @ s)
    audit.stored("o_chunk", p @ vn)
    audit.stored("o", (q @ s) + (p @ vn))
    raw = audit.accumulated("state_raw", s + (k.mT @ vn))
    return Forward(paths, w, wq, u, vn, kk, p, s), raw.value


def backward_chunk(audit: Audit, c: Chunk, n: Forward, ds: Tensor, sites: Sites) -> dict[str, Sum]:
    """One chunk's gradients per value head, from the gradient of the state that it leaves."""
    q, k, v, do = Sum.of(c.q * sites.scale), Sum.of(c.k), Sum.of(c.v), Sum.of(c.do)
    beta, out = Sum.of(c.beta[..., None]), Sum.of(ds)
    dvn = audit.stored("dv_new", (n.p.mT @ do) + (k @ out))
    before = audit.stored("dstate", out + (q.mT @ do) - (n.wq.mT @ dvn))
    dw = audit.stored("dw", -(dvn @ n.state.mT))
    du, dr = audit.stored("du", n.paths.mT @ dvn), audit.stored("dr", n.paths.mT @ dw)
    bk, bv = beta * k, beta * v
    if sites.w_format is None:
        audit.stored("dstate_residual", out + (q.mT @ do) - (bk.mT @ du))
        audit.stored("dr_residual", du @ n.state.mT)
    x = audit.stored("dinverse", ((dvn @ bv.mT) + (dw @ bk.mT)).lower(-1))
    half = audit.stored("dinverse_half", n.paths.mT @ x)
    audit.stored("dlower_inverse", half @ n.paths.mT)
    dlower = audit.stored("dlower", -((du @ n.u.mT) + (dr @ n.w.mT)).lower(-1))
    pair = audit.stored("dkk", beta * dlower)
    dp = audit.stored("dp", (do @ n.vn.mT).lower())
    scale = Sum.of(torch.full_like(c.beta[..., None], sites.scale))
    dqk = scale * dp
    read = audit.stored("dq_state", scale * (do @ n.state.mT))
    written = audit.stored("dk_state", n.vn @ out.mT)
    terms = {"dk_w": beta * dr, "dk_solve": (pair @ k) + (pair.mT @ k), "dk_read": dqk.mT @ Sum.of(c.q)}
    for name, term in terms.items():
        audit.stored(name, term)
    dk = terms["dk_w"] + terms["dk_solve"] + terms["dk_read"] + (n.vn @ out.mT)
    dq = (scale * (do @ n.state.mT)) + (dqk @ k)
    dv = audit.stored("dv", beta * du)
    dbeta = (du * v).sum(-1) + (dr * k).sum(-1) + (dlower * n.kk).sum(-1)
    flows = (dlower * n.kk * beta, dp * n.p)
    audit.stored("flow", flows[0] + flows[1])
    cum = sum(
        ((flow.sum(-1) + flow.sum(-2)) for flow in flows),
        start=(beta * dr * k).sum(-1) + (read * Sum.of(c.q)).sum(-1) + (written * k).sum(-1),
    )
    last = (n.state * out).sum(-1, -2)
    audit.accumulated("dbeta", dbeta)
    audit.accumulated("dg", cum.sum(-1) + cum.sum(-1) + last)  # twice: from both ends of the chunk
    audit.stored("dk_head", dk)
    audit.stored("dq_head", dq)
    return {"dk": dk, "dq": dq, "dv": dv, "dstate": before}


def sum_group(audit: Audit, name: str, x: Sum, heads: int) -> None:
    """A gradient of q or k summed over the value heads `[HV, C, K]` of each of `heads` heads."""
    shape = (heads, -1, *x.value.shape[1:])
    grouped = Sum(x.value.reshape(shape), x.size.reshape(shape), x.weight.reshape(shape))
    audit.stored(name, grouped.sum(1))
