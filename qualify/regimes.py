"""Regimes: from the levels of a cell, a named input distribution and a seed to the inputs of one op call.

Values come from uniform numbers of a CPU generator, combined by sums, products and square roots alone, so
they are the same bits everywhere; only then do they move to a device. Heads and documents always differ in
scale and in gate, so that an index that is off by one cannot hide.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from qualify.problem import CARRIERS, Problem

Tensor = torch.Tensor


@dataclass(frozen=True)
class Axis:
    """One axis that a problem is built from: its levels, the default first, and why it exists."""

    levels: tuple[str, ...]
    because: str


LENGTHS = (1, 15, 16, 17, 63, 64, 65, 127, 129, 145, 192, 257, 512)

AXES: Mapping[str, Axis] = MappingProxyType(
    {
        "dtype": Axis(("fp32", "bf16", "fp16"), "each carrier has its own kernels and its own noise"),
        "grouping": Axis(
            ("hv1", "hv2", "hv3", "hv4", "hv8", "hv32", "h1", "h3", "h1hv3"),
            "value heads that share a q/k head are easily mixed up; a head may be the only one, or a third",
        ),
        "block_v": Axis(
            ("64", "16", "32", "128"), "the state's scale belongs to a tile of this many columns"
        ),
        "packing": Axis(
            (
                "single",
                "batch",
                "batch5",
                "docs",
                "one_doc",
                "many",
                "unequal",
                "one_token",
                "empty_first",
                "empty_middle",
                "empty_last",
            ),
            "state must not leak over a boundary, wherever it falls, nor an index be made for few sequences",
        ),
        "sites": Axis(("both", "state", "w", "none"), "each rounding site can be on alone"),
        "format": Axis(("e4m3", "int8"), "the grid of the state site"),
        "layout": Axis(("kv", "vk"), "states are stored key-first or value-first"),
        "initial": Axis(("given", "zero"), "a given state is rounded on entry and has a gradient"),
        "final": Axis(("kept", "dropped"), "a final state that nobody asks for must not change the rest"),
        "length": Axis(tuple(str(n) for n in (129, *LENGTHS)), "tails, whole chunks and boundaries of tiles"),
        "heads": Axis(
            (
                "32x48",
                "16x16",
                "16x40",
                "16x48",
                "128x32",
                "32x32",
                "48x64",
                "60x40",
                "64x64",
                "96x48",
                "100x72",
                "128x128",
                "64x128",
                "256x16",
                "16x256",
            ),
            "K x V: a dimension that is no power of two, and K other than V",
        ),
        "gates": Axis(
            ("ordinary", "zero", "weak", "strong", "extreme", "mixed", "spike"),
            "decay hides boundary faults; no decay hides faults of the decay",
        ),
        "fused": Axis(
            ("none", "norm", "sigmoid", "neg", "gate", "bare_gate", "all"),
            "each in-kernel activation has a backward of its own, and a gate may come without a bias",
        ),
        "gradients": Axis(
            ("both", "output", "state", "strided", "expanded", "tiny"),
            "each incoming gradient alone, as a view, and as one number (what a sum hands back)",
        ),
        "scalars": Axis(
            ("fp32", "carrier", "mixed", "bf16"),
            "g and beta may have a dtype of their own, narrower or wider than the carrier",
        ),
        "strides": Axis(
            ("packed", "views", "slices"),
            "inputs are transposed after a convolution, as a state may be, or slices of one projection",
        ),
        "scale": Axis(
            ("default", "given"), "a given scale is another one in the forward and in the backward"
        ),
        "boundaries": Axis(("int64", "int32"), "frameworks differ in the integers of cu_seqlens"),
    }
)

# heads of q and k, and of v: two of the former where a wrong head map has to show
_HEADS_OF = {
    "hv1": (2, 2),
    "hv2": (2, 4),
    "hv3": (2, 6),
    "hv4": (2, 8),
    "hv8": (2, 16),
    "hv32": (2, 64),
    "h1": (1, 1),
    "h1hv3": (1, 3),
    "h3": (3, 6),
}
_SCALARS = {
    "fp32": ("fp32", "fp32"),
    "carrier": ("carrier", "carrier"),
    "mixed": ("fp32", "carrier"),
    "bf16": ("bf16", "bf16"),
}
GIVEN_SCALE = 0.7
"""A given scale over the default one: another number, and no power of two."""
NOTHING_WRITTEN = 0.15
"""Share of tokens that write nothing, where gates are mixed."""
_GATE_SIZE = {"weak": 1e-4, "ordinary": 0.1, "strong": 20.0, "extreme": 90.0}


_BATCHES = {"batch": 2, "batch5": 5}


def document_lengths(packing: str, length: int) -> tuple[int, ...] | None:
    """How long the packed documents are; None where the batch is not packed.

    Args:
        packing: a level of the axis.
        length: tokens of the longest document.
    """
    table: dict[str, tuple[int, ...]] = {
        "docs": (length, 37, 64),
        "one_doc": (length,),
        "many": (64, length, 1, 66, 0, 70, 17, 128, 3),
        "unequal": (3, length, 1),
        "one_token": (1,) * min(length, 12),
        "empty_first": (0, 0, length, 7),
        "empty_middle": (7, 0, length),
        "empty_last": (length, 7, 0, 0, 0),  # boundaries that are padded to a fixed number
    }
    return table.get(packing)


class Numbers:
    """Random numbers that are the same bits on every machine."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed % (2**63 - 1))

    def uniform(self, *shape: int, low: float = 0.0, high: float = 1.0) -> Tensor:
        """fp64 uniform in [low, high)."""
        u = torch.rand(*shape, generator=self._generator, dtype=torch.float64)
        return low + u * (high - low)

    def bell(self, *shape: int) -> Tensor:
        """fp64 with mean 0 and variance 1: the sum of four uniforms."""
        u = self.uniform(4, *shape)
        return ((u[0] + u[1]) + (u[2] + u[3]) - 2.0) * math.sqrt(3.0)

    def pick(self, choices: tuple[float, ...], *shape: int) -> Tensor:
        """fp64 drawn from a list."""
        index = (self.uniform(*shape) * len(choices)).floor().long()
        return torch.tensor(choices, dtype=torch.float64)[index]


def unit_rows(x: Tensor) -> Tensor:
    """`[..., K]` scaled to norm 1, summed in a fixed order."""
    total = torch.zeros_like(x[..., 0])
    for column in x.unbind(-1):
        total = total + column * column
    return x / total.clamp_min(1e-300).sqrt().unsqueeze(-1)


@dataclass
class Draft:
    """The inputs in fp64, before a regime has its say and before they are rounded to their dtypes."""

    numbers: Numbers
    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    state: Tensor
    block_v: int
    carrier: str
    fmt: str


def _dyadic(d: Draft) -> None:
    d.v, d.state = (d.v * 8).round() / 8, (d.state * 8).round() / 8
    d.q, d.k = (d.q * 64).round() / 64, (d.k * 64).round() / 64
    d.beta = (d.beta * 8).ceil() / 8


def _near_tie(d: Draft) -> None:
    """State elements just beside the middle between two neighbouring codes."""
    top = 448.0 if d.fmt == "e4m3" else 127.0
    code = d.numbers.pick(tuple(1.0625 + i / 8 for i in range(8)), *d.state.shape)
    code = code * d.numbers.pick((1.0, 2.0, 4.0, 8.0, 32.0), *d.state.shape)
    if d.fmt == "int8":
        code = code.floor() + 0.5
    aside = 1.0 + d.numbers.pick((-1e-4, 1e-4, -2e-6, 2e-6), *d.state.shape)
    d.state = code * aside * d.numbers.pick((1.0, -1.0), *d.state.shape) / 64
    d.state[..., 0, :: d.block_v] = top / 64


def _huge(d: Draft) -> None:
    """One element of every tile a thousand times the others."""
    rows = d.state.shape[-2]
    for tile, column in enumerate(range(0, d.state.shape[-1], d.block_v)):
        d.state[..., tile % rows, column] = 1000.0 if tile % 2 else -1000.0


def _zero_tile(d: Draft) -> None:
    """One tile that is zero on entry and stays so."""
    d.state[..., : d.block_v] = 0.0
    d.v[..., : d.block_v] = 0.0


def _subnormal(d: Draft) -> None:
    """One tile so small that its scale is 1 and its codes are 0, and small numbers in v."""
    d.state[..., : d.block_v] *= 1e-38
    d.v[..., : d.block_v] *= 0.0
    d.v[..., d.block_v :] *= 2.0**-20 if d.carrier == "fp16" else 2.0**-110
    d.state[..., d.block_v :] *= 2.0**-110


def _saturating(d: Draft) -> None:
    """Large amplitudes, far below overflow of the carrier."""
    factor = 2.0**5 if d.carrier == "fp16" else 2.0**50
    d.v, d.state = d.v * factor, d.state * factor


def _repeated(d: Draft) -> None:
    """Nearly the same key at every token: an ill-conditioned solve."""
    d.k = unit_rows(d.k[:, :1] + 0.05 * d.k)
    d.beta = 0.75 + 0.24 * d.beta


def _small(d: Draft) -> None:
    """Amplitudes down to 1e-4 before the in-kernel normalisation, and rows of zeros as padding has them."""
    size = d.numbers.pick((0.0, 1e-4, 1e-3, 1e-2, 1.0), *d.k.shape[:3]).unsqueeze(-1)
    d.q, d.k = d.q * size, d.k * size


VALUE_REGIMES: Mapping[str, tuple[Callable[[Draft], None] | None, str]] = MappingProxyType(
    {
        "random": (None, "what training looks like"),
        "dyadic": (_dyadic, "short significands: rounding differences of a correct kernel are small"),
        "near_tie": (_near_tie, "the entry rounding is decided by the last bits of a scale"),
        "huge": (_huge, "one element owns the scale of its tile"),
        "zero_tile": (_zero_tile, "a tile of zeros has scale 1"),
        "subnormal": (_subnormal, "a tile below the smallest normal scale"),
        "saturating": (_saturating, "amplitudes that leave the range of narrower formats"),
        "repeated": (_repeated, "the triangular solve is ill-conditioned"),
        "small": (_small, "normalisation of tiny rows meets its epsilon"),
    }
)


def check_levels(levels: Mapping[str, str], regime: str) -> dict[str, str]:
    """The levels completed with defaults.

    Raises:
        ValueError: an unknown axis, level or regime.
    """
    for axis, level in levels.items():
        if axis in AXES and level not in AXES[axis].levels and axis not in ("length", "heads"):
            raise ValueError(f"{axis} must be one of {', '.join(AXES[axis].levels)}, got {level!r}")
    if regime not in VALUE_REGIMES:
        raise ValueError(f"regime must be one of {', '.join(VALUE_REGIMES)}, got {regime!r}")
    return {axis: levels.get(axis, row.levels[0]) for axis, row in AXES.items()}


def gates(numbers: Numbers, regime: str, batch: int, tokens: int, heads: int) -> Tensor:
    """Log decays `[B, T, HV]`, fp64, at most 0; every head has its own strength.

    Args:
        numbers: the source.
        regime: a level of the axis `gates`.
        batch, tokens, heads: the shape.
    """
    own = (1.0 + torch.arange(heads, dtype=torch.float64) * 0.25) / (1.0 + 0.125 * heads)
    u = numbers.uniform(batch, tokens, heads)
    if regime == "zero":
        return torch.zeros_like(u)
    if regime == "mixed":
        return -numbers.pick((0.0, 1e-4, 1e-4, 0.02, 0.02, 0.1, 0.1, 1.0, 20.0, 90.0), *u.shape) * (0.5 + u)
    if regime == "spike":
        g = -0.01 * u * own
        g[:, tokens // 2] = -40.0 * own
        return g
    return -_GATE_SIZE[regime] * (0.25 + 1.5 * u) * own


def build_problem(
    levels: Mapping[str, str], regime: str, seed: int, device: str | torch.device = "cpu"
) -> Problem:
    """The inputs of one call, decided by levels, regime and seed alone.

    Args:
        levels: axis -> level; axes that are not named take the first level of `AXES`. Unknown axes are
            somebody else's business and change nothing.
        regime: a key of `VALUE_REGIMES`.
        seed: any integer.
        device: where the tensors go at the end.

    Raises:
        ValueError: an unknown level or regime.
    """
    at = check_levels(levels, regime)
    key_size, value_size = (int(n) for n in at["heads"].split("x"))
    documents = document_lengths(at["packing"], int(at["length"]))
    tokens = sum(documents) if documents else int(at["length"])
    batch = _BATCHES.get(at["packing"], 1)
    sequences = len(documents) if documents else batch
    draft = _draft(at, seed, (batch, tokens, sequences), key_size, value_size, regime)
    change = VALUE_REGIMES[regime][0]
    if change is not None:
        change(draft)
    return _problem(at, draft, documents, regime, device)


def _draft(
    at: Mapping[str, str],
    seed: int,
    extent: tuple[int, int, int],
    key_size: int,
    value_size: int,
    regime: str,
) -> Draft:
    numbers = Numbers(seed)
    batch, tokens, sequences = extent
    heads, value_heads = _HEADS_OF[at["grouping"]]
    normalised = at["fused"] in ("norm", "all") or regime == "small"
    q, k = (numbers.bell(batch, tokens, heads, key_size) for _ in range(2))
    if not normalised:
        q, k = unit_rows(q), unit_rows(k)
    own = 0.5 + torch.arange(value_heads, dtype=torch.float64) * (2.0 / value_heads)
    drift = 0.75 + 0.5 * numbers.uniform(batch, tokens, 1, 1)
    documents = 0.5 + torch.arange(sequences, dtype=torch.float64) * (1.0 / sequences)
    return Draft(
        numbers=numbers,
        q=q,
        k=k,
        v=numbers.bell(batch, tokens, value_heads, value_size) * own.view(-1, 1) * drift,
        g=gates(numbers, at["gates"], batch, tokens, value_heads),
        beta=numbers.uniform(batch, tokens, value_heads, low=0.1, high=0.95),
        state=numbers.bell(sequences, value_heads, key_size, value_size)
        * own.view(-1, 1, 1)
        * documents.view(-1, 1, 1, 1),
        block_v=int(at["block_v"]),
        carrier=at["dtype"],
        fmt=at["format"],
    )


def _problem(
    at: Mapping[str, str],
    d: Draft,
    documents: tuple[int, ...] | None,
    regime: str,
    device: str | torch.device,
) -> Problem:
    carrier = CARRIERS[at["dtype"]]
    g_dtype, beta_dtype = (CARRIERS.get(own, carrier) for own in _SCALARS[at["scalars"]])
    value_heads = d.v.shape[2]
    fused = at["fused"]
    raw_gate = fused in ("gate", "bare_gate", "all")
    raw_beta = fused in ("sigmoid", "neg", "all")
    if at["gates"] == "mixed":  # as tokens of padding have
        d.beta = torch.where(d.numbers.uniform(*d.beta.shape) < NOTHING_WRITTEN, 0.0, d.beta)
    size = {"zero": 1e-6, "mixed": 1.0, "spike": 0.1}.get(at["gates"]) or _GATE_SIZE[at["gates"]]
    heads = torch.arange(value_heads, dtype=torch.float64)
    if raw_gate:
        d.g = d.numbers.bell(*d.g.shape)
    if raw_beta:
        d.beta = d.numbers.bell(*d.beta.shape) * 1.5

    do = d.numbers.bell(*d.v.shape) * (0.5 + heads.view(-1, 1) / value_heads)
    dht = d.numbers.bell(*d.state.shape) * (1.5 - heads.view(-1, 1, 1) / value_heads) * 0.5
    if at["gradients"] == "tiny":
        do, dht = do * 2.0**-20, dht * 2.0**-25
    if at["gradients"] == "expanded":
        do, dht = torch.full_like(do, 0.75), torch.full_like(dht, -0.375)
    v_first = at["layout"] == "vk"

    def state(x: Tensor) -> Tensor:
        return x.transpose(-1, -2).contiguous() if v_first else x

    views = at["strides"] == "views"
    of_heads, of_values = _ARRANGED[at["strides"]]
    scalar = _slice if at["strides"] != "packed" else _as_it_is
    arranged = {"strided": _in_other_order, "expanded": _expanded}.get(at["gradients"], _as_it_is)
    integers = torch.int32 if at["boundaries"] == "int32" else torch.int64
    q, k, v = (x.to(carrier).to(device) for x in (d.q, d.k, d.v))
    initial = state(d.state).float().to(device)
    return Problem(
        q=of_heads(q),
        k=of_heads(k),
        v=of_values(v),
        g=scalar(d.g.to(g_dtype).to(device)),
        beta=scalar(d.beta.to(beta_dtype).to(device)),
        initial_state=None if at["initial"] != "given" else initial.mT.contiguous().mT if views else initial,
        do=None if at["gradients"] == "state" else arranged(do.to(carrier).to(device)),
        dht=None
        if at["gradients"] == "output" or at["final"] == "dropped"
        else arranged(state(dht).float().to(device)),
        cu_seqlens=None
        if documents is None
        else torch.tensor([0, *torch.tensor(documents).cumsum(0).tolist()], dtype=integers, device=device),
        scale=None if at["scale"] == "default" else GIVEN_SCALE * q.shape[-1] ** -0.5,
        output_final_state=at["final"] == "kept",
        state_v_first=v_first,
        use_qk_l2norm_in_kernel=fused in ("norm", "all") or regime == "small",
        use_beta_sigmoid_in_kernel=raw_beta,
        allow_neg_eigval=fused in ("neg", "all"),
        use_gate_in_kernel=raw_gate,
        A_log=(math.log(size) + 0.25 * heads).float().to(device) if raw_gate else None,
        dt_bias=(0.5 - 0.125 * heads).float().to(device) if raw_gate and fused != "bare_gate" else None,
        state_format=at["format"] if at["sites"] in ("both", "state") else None,
        state_block_v=int(at["block_v"]),
        w_format="e4m3" if at["sites"] in ("both", "w") else None,
    )


def _as_it_is(x: Tensor) -> Tensor:
    return x


def _in_other_order(x: Tensor) -> Tensor:
    """The same values as a slice of a larger tensor that is stored in another order."""
    shape = list(x.shape)
    shape[1], shape[2] = shape[2], shape[1]
    shape[-1] += 3
    larger = torch.full(shape, 3.0, dtype=x.dtype, device=x.device)
    view = larger[..., :-3].transpose(1, 2)
    view.copy_(x)
    return view


def tokens_innermost(x: Tensor) -> Tensor:
    """`[B, T, ...]` as a convolution over tokens leaves it: neighbours in memory are tokens."""
    return x.movedim(1, -1).contiguous().movedim(-1, 1)


def _expanded(x: Tensor) -> Tensor:
    """The first element in the shape of `x`, with strides of zero: the gradient of a sum."""
    return x.flatten()[:1].clone().expand(x.shape) if x.numel() else x


def _slice_of_heads(x: Tensor) -> Tensor:
    """`[B, T, H, K]` as the middle of the rows of one projection, neighbours in memory as ever."""
    return _slice(x.flatten(2)).view(x.shape)


def _slice(x: Tensor) -> Tensor:
    """`[B, T, HV]` as the middle of wider rows."""
    heads = x.shape[-1]
    wider = torch.full((*x.shape[:-1], 3 * heads), 3.0, dtype=x.dtype, device=x.device)
    view = wider[..., heads : 2 * heads]
    view.copy_(x)
    return view


_ARRANGED: Mapping[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = MappingProxyType(
    {
        "packed": (_as_it_is, _as_it_is),
        "views": (_in_other_order, tokens_innermost),
        "slices": (_slice_of_heads, _slice_of_heads),
    }
)
"""How queries and keys, and values, lie in memory."""
