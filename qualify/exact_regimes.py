"""The exact regime: inputs on which all correct implementations, in any order and precision, agree in bits.

Zero gates, keys of one or two elements, write strengths 1/2 and 1, a power of two as scale, and values chosen
so that every intermediate, forward and backward, fits 8 significant bits, while the rounding sites
still move most of what they see: group maxima are 7 * 2^n (E4M3) or 127 * 2^n (INT8), so scales are powers of
two, and the other elements lie beside the grid, ties included. A draft is repaired, element by element, until
the audit (`qualify.exact_audit`) proves it.

The construction chooses the corrected values V' and derives v from them, because V' is what moves the state.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache

import torch

from qualify.exact_audit import (
    Audit,
    Chunk,
    Forward,
    Sites,
    Solved,
    Sum,
    backward_chunk,
    forward_chunk,
    round_state,
    solved_rows,
    sum_group,
)
from qualify.problem import CARRIERS, Problem
from qualify.regimes import Numbers, document_lengths

Tensor = torch.Tensor

CHUNK = 64
HEADS = 2
ROUNDS = 80
"""Repairs before a draft is given up; another follows."""
PATIENCE = 20
"""Repairs of one kind by taking away single elements; then whole heads are emptied."""

DEFAULTS: Mapping[str, str] = {
    "dtype": "bf16",
    "grouping": "hv2",
    "block_v": "16",
    "packing": "single",
    "sites": "both",
    "format": "e4m3",
    "layout": "kv",
    "initial": "given",
    "length": "130",
    "heads": "32x48",
    "gradients": "both",
}
"""The levels of a cell that names none. Other axes change nothing: gates are zero, activations outside."""

GUARD = {"e4m3": 7.0, "int8": 127.0}
"""A group maximum whose quotient by the largest code is a power of two."""


class NotExactError(RuntimeError):
    """No draft of a cell could be repaired into an exact one."""


@dataclass
class Draft:
    """A problem under construction, fp64, tokens flattened, states key-first.

    Attributes:
        spans: first and last token of each sequence.
        q, k: `[tokens, H, K]`; minor: the second element of k's rows, apart, so that it can be taken away.
        beta: `[tokens, HV]`; v, do: `[tokens, HV, V]`.
        wish: `[tokens, HV, V]` what the state's row is to become (or by how much V' is to move it).
        effort: 2 where `wish` is followed, 1 where V' is one small power of two, 0 where it is zero.
        initial, dht: `[N, HV, K, V]`; sign: `[HV, K, V]` of the state's elements.
        guard: `[HV, V]` the group maximum of each tile in the column that holds it, zero elsewhere.
        lean: `[HV, V]` columns that gradients flow through, kept short of bits.
    """

    spans: list[tuple[int, int]]
    sites: Sites
    q: Tensor
    k: Tensor
    minor: Tensor
    beta: Tensor
    wish: Tensor
    effort: Tensor
    initial: Tensor
    sign: Tensor
    guard: Tensor
    lean: Tensor
    do: Tensor
    dht: Tensor
    given: bool
    v: Tensor

    def keys(self) -> Tensor:
        """The rows of k."""
        return self.k + self.minor


def build_exact_problem(levels: Mapping[str, str], seed: int, device: str | torch.device = "cpu") -> Problem:
    """A problem whose eight tensors are the same bits for every correct implementation.

    Args:
        levels: axis -> level of `DEFAULTS`; others are ignored.
        seed: any integer.
        device: where the tensors go.

    Raises:
        NotExactError: no draft could be proved.
    """
    at = {axis: levels.get(axis, level) for axis, level in DEFAULTS.items()}
    draft = _proved(tuple(sorted((a, x) for a, x in at.items() if a not in ("dtype", "layout"))), seed)
    return _problem(draft, at, device)


@lru_cache(maxsize=64)
def _proved(at: tuple[tuple[str, str], ...], seed: int) -> Draft:
    for attempt in range(5):
        draft = _draft(dict(at), Numbers(seed * 5 + attempt))
        numbers = Numbers(seed * 5 + attempt + 1_000_003)
        left = list(range(len(draft.spans)))
        turns = dict.fromkeys(("keys", "values", "gradients"), 0)
        for _ in range(ROUNDS):
            faults = audit_draft(draft, left)
            left = sorted({fault.sequence for fault in faults})
            if not left and not audit_draft(draft):
                return draft
            _repair(draft, faults, numbers, turns)
    raise NotExactError(f"no exact draft of {dict(at)} for seed {seed} in 5 attempts; choose another seed")


# ---- drafting ----


def _draft(at: dict[str, str], numbers: Numbers) -> Draft:
    K, V = (int(n) for n in at["heads"].split("x"))
    HV = HEADS * int(at["grouping"][2:])
    documents = document_lengths(at["packing"], int(at["length"])) or (int(at["length"]),) * (
        2 if at["packing"] == "batch" else 1
    )
    spans, start = [], 0
    for length in documents:
        spans.append((start, start + length))
        start += length
    state_on, w_on = at["sites"] in ("both", "state"), at["sites"] in ("both", "w")
    fmt = at["format"]
    scale = 2.0 ** -float(numbers.pick((1.0, 2.0, 3.0), 1))
    sites = Sites(scale, fmt if state_on else None, int(at["block_v"]), "e4m3" if w_on else None)
    guard, unit, lean = _columns(numbers, HV, V, int(at["block_v"]), fmt)
    N, given = len(spans), at["initial"] == "given"
    sign = numbers.pick((1.0, -1.0), HV, K, V)
    k, minor = _keys(numbers, spans, K, w_on)
    q = _queries(numbers, spans, k, w_on) * numbers.pick((1.0, -1.0), start, HEADS, 1)
    beta = numbers.pick((0.5, 1.0), start, HV)
    wish, effort = _wishes(numbers, (start, HV, V), fmt, lean)
    if w_on:  # what an element between the codes writes in a lean column would cost its pairs too many bits
        odd = (k.abs() == 0.875).any(-1)
        effort[odd.repeat_interleave(HV // HEADS, 1)[..., None] & lean] = 0
    if not given:
        _first_writes(spans, k, minor, beta)
    initial = _initial(numbers, (N, HV, K, V), sign, fmt, w_on, state_on, lean) * unit[None, :, None]
    initial[:, :, 0] = guard
    draft = Draft(
        spans=spans,
        sites=sites,
        q=q,
        k=k,
        minor=minor,
        beta=beta,
        wish=wish * unit,
        effort=effort,
        initial=initial if given else torch.zeros_like(initial),
        sign=sign,
        guard=guard,
        lean=lean,
        do=_one_per_row(numbers, (start, HV), lean, 0.5),
        dht=_one_per_row(numbers, (N, HV, K), lean[:, None].expand(HV, K, V), 0.5) * scale,
        given=given,
        v=torch.zeros(start, HV, V, dtype=torch.float64),
    )
    if w_on:
        rows = WRows.of(K)
        few = numbers.uniform(N, HV, rows.plain - rows.rich, 1) < 0.1
        draft.dht[:, :, rows.rich : rows.plain] *= few.double()
    first_tile = torch.arange(V) < int(at["block_v"])
    draft.dht[:, :, 0] = (first_tile & (guard != 0)).double() * scale  # an amax element has a gradient, too
    if at["gradients"] == "output":
        draft.dht.zero_()
    if at["gradients"] == "state":
        draft.do.zero_()
    return draft


def _columns(numbers: Numbers, HV: int, V: int, block: int, fmt: str) -> tuple[Tensor, Tensor, Tensor]:
    """Guards, units and lean columns `[HV, V]`: every tile has a guard; the first tile's unit is 1."""
    tile = torch.arange(V) // block
    tiles = int(tile[-1]) + 1
    units = numbers.pick((1.0, 0.25, 0.03125, 0.0078125, 4.0), HV, tiles)
    units[:, 0] = 1.0
    unit = units[:, tile]
    guard = torch.zeros(HV, V, dtype=torch.float64)
    size = GUARD[fmt] * numbers.pick((2.0, 4.0, 8.0) if fmt == "e4m3" else (1.0,), HV, tiles)
    for t in range(tiles):
        first, width = t * block, min(block, V - t * block)
        column = first + (numbers.uniform(HV) * width).floor().long()
        guard[torch.arange(HV), column] = (size[:, t] * units[:, t]) * numbers.pick((1.0, -1.0), HV)
    lean = (numbers.uniform(HV, V) < 0.4) & (guard == 0) & (unit == 1.0)
    return guard, unit, lean


def _queries(numbers: Numbers, spans: list[tuple[int, int]], keys: Tensor, w_on: bool) -> Tensor:
    """Rows with one element 1, `[tokens, H, K]`; seldom where W's second elements have many bits.

    With the W site on, two later tokens of its chunk read the seven of each key that has one: through them
    the gradient of its V', and with it the rounded row of W, is seen.
    """
    tokens, _, K = keys.shape
    where = (numbers.uniform(tokens, HEADS) * K).floor().long()
    if w_on:
        rows = WRows.of(K)
        moved = (where >= rows.rich) & (where < rows.plain) & (numbers.uniform(tokens, HEADS) < 0.9)
        where = torch.where(moved, where - rows.rich + 1, where)
        draws = numbers.uniform(tokens, HEADS, 2)
        for first, size in _chunks(spans):
            sevens = keys[first : first + size].abs() == 0.875
            for t, head, row in sevens.nonzero().tolist():
                later = (t + (draws[first + t, head] * (size - t)).floor().long() + first).tolist()
                where[later, head] = row
    return torch.nn.functional.one_hot(where, K).double()


@dataclass(frozen=True)
class WRows:
    """How the keys share the coordinates with the W site on: 0 guards, sevens, seconds, and the others.

    Most keys are one-hot: their rows of W have one element, a power of two, which E4M3 gives back. The others
    have their largest element, 7/8, at a coordinate of their own, where the state is mostly empty, so seven
    meets little, and beside it a second element that lies between the codes.
    """

    rich: int
    plain: int

    @staticmethod
    def of(K: int) -> WRows:
        """The shares for K coordinates."""
        sevens = max(1, (K - 1) // 6)
        return WRows(1 + sevens, 1 + 2 * sevens)


def _spread(
    numbers: Numbers, spans: list[tuple[int, int]], K: int, low: int, high: int, times: int
) -> Tensor:
    """One-element rows `[tokens, H, K]`; a chunk uses a coordinate of `[low, high)` at most `times` times."""
    out = torch.zeros(spans[-1][1], HEADS, K, dtype=torch.float64)
    for first, size in _chunks(spans):
        for head in range(HEADS):
            pool = torch.arange(low, high).repeat(times)
            pool = pool[numbers.uniform(len(pool)).argsort()][:size]
            rows = numbers.uniform(size).argsort()[: len(pool)]
            out[first + rows, head, pool] = 1.0
    return out


def _keys(numbers: Numbers, spans: list[tuple[int, int]], K: int, w_on: bool) -> tuple[Tensor, Tensor]:
    """Keys of one element (and sometimes a second, apart), coordinate 0 left to the guards."""
    tokens = spans[-1][1]
    sign = numbers.pick((1.0, -1.0), tokens, HEADS, 2)
    first = WRows.of(K).plain if w_on else 1
    major = _spread(numbers, spans, K, first, K, 2 if K - first < 60 else 1)
    second = (numbers.uniform(tokens, HEADS, 1) < 0.15) & (major != 0).any(-1, keepdim=True)
    minor = _spread(numbers, spans, K, first, K, 1) * second
    minor = torch.where(major != 0, 0.0, minor)
    if w_on:
        for head in range(HEADS):
            for start, end in spans:
                _rich_keys(numbers, major[start:end, head], minor[start:end, head])
    return major * sign[..., :1], minor * sign[..., 1:]


def _rich_keys(numbers: Numbers, major: Tensor, minor: Tensor) -> None:
    """Turns some of one sequence's keys `[length, K]` into a seven and a second between the codes."""
    length, K = major.shape
    rows = WRows.of(K)
    count = min(length, rows.rich - 1)
    at = numbers.uniform(length).argsort()[:count]
    major[at], minor[at] = 0.0, 0.0
    major[at, 1 + numbers.uniform(rows.rich - 1).argsort()[:count]] = 0.875
    seconds = rows.rich + numbers.uniform(rows.plain - rows.rich).argsort()[:count]
    minor[at, seconds] = numbers.pick(RICH_SECONDS, count)


def _chunks(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """First token and size of every chunk of every sequence."""
    return [(a, min(CHUNK, end - a)) for start, end in spans for a in range(start, end, CHUNK)]


RICH_MINORS = tuple(n / 64 for n in (17, 19, 21, 23, 25, 27, 29, 31, 33, 34, 35, 37, 38))
"""Second elements of W rows that lie between the codes, ties among them, beside a largest element of 7/8."""


RICH_SECONDS = tuple(n / 64 for n in (17, 19, 21, 23, 25, 27, 29, 31, 33, 34, 35, 37, 38))
"""Second elements that lie between the codes, ties among them, beside a largest element of 7/8."""


def _first_writes(spans: list[tuple[int, int]], k: Tensor, minor: Tensor, beta: Tensor) -> None:
    """The first token of every sequence writes the guards into a state that starts from zero."""
    for start, end in spans:
        if end > start:
            k[start], minor[start] = 0.0, 0.0
            k[start, :, 0] = 1.0
            beta[start] = 1.0


def _wishes(numbers: Numbers, shape: tuple[int, int, int], fmt: str, lean: Tensor) -> tuple[Tensor, Tensor]:
    """The magnitude that each token wants a state row to have, and whether it gets its way."""
    rich = tuple(4 + n / 16 for n in range(64)) if fmt == "e4m3" else tuple(8 + n / 4 for n in range(88))
    few = tuple((4 if fmt == "e4m3" else 1) + n / 4 for n in range(16))
    wish = torch.where(lean, numbers.pick(few, *shape), numbers.pick(rich, *shape))
    followed = numbers.uniform(*shape) < torch.where(lean, 0.4, 0.8).double()
    return wish, followed.long() * 2


def _initial(
    numbers: Numbers,
    shape: tuple[int, int, int, int],
    sign: Tensor,
    fmt: str,
    w_on: bool,
    state_on: bool,
    lean: Tensor,
) -> Tensor:
    """Magnitudes near the grid; with the state site on, off it by anything that fp32 holds."""
    coarse = tuple(4 + n / 2 for n in range(8)) if fmt == "e4m3" else tuple(float(n) for n in range(8, 31))
    size = torch.where(
        lean[:, None], numbers.pick((4.0, 5.0, 6.0, 7.0), *shape), numbers.pick(coarse, *shape)
    )
    present = numbers.uniform(*shape) < torch.where(lean[:, None], 0.5, 0.8)
    if w_on:
        rows = WRows.of(shape[2])
        size[:, :, 1 : rows.plain] = 4.0
        present[:, :, 1 : rows.rich] &= numbers.uniform(*shape)[:, :, 1 : rows.rich] < 0.15
    if state_on:
        step = 2.0 ** (torch.frexp(size).exponent.double() - 4) if fmt == "e4m3" else torch.ones_like(size)
        fraction = numbers.pick((0.0, 0.5, -0.5, 0.25, -0.25, 0.4375, -0.4375, 0.375), *shape)
        aside = fraction + numbers.pick((0.0, 2.0**-9, -(2.0**-9)), *shape) * (fraction.abs() < 0.5)
        size = torch.where(size > 4, size + step * aside, size + step * aside.abs())
    return size * sign * present


def _one_per_row(numbers: Numbers, rows: tuple[int, ...], lean: Tensor, share: float) -> Tensor:
    """Rows with at most one element, 1 or 2 in magnitude, in a lean column: `[*rows, V]`."""
    V = lean.shape[-1]
    score = numbers.uniform(*rows, V) + lean.double()
    where = torch.nn.functional.one_hot(score.argmax(-1), V).double() * lean
    value = numbers.pick((1.0, -1.0, 2.0, -2.0), *rows, 1)
    return where * value * (numbers.uniform(*rows, 1) < share)


# ---- proving ----


@dataclass(frozen=True)
class Fault:
    """What does not fit in one chunk.

    Attributes:
        name: the tensor.
        sequence, start: where the chunk is.
        bad: the elements, `[HV, C]`, `[HV, C, x]` or, for states, `[HV, K, V]`.
        notes: the chunk's forward; None for the state on entry of a sequence.
    """

    name: str
    sequence: int
    start: int
    bad: Tensor
    notes: Forward | None


def audit_draft(draft: Draft, sequences: Iterable[int] | None = None) -> list[Fault]:
    """Everything in a draft that needs more bits than it may; derives v on the way. Empty means proved.

    Args:
        sequences: which to look at; None is all of them.
    """
    chosen = range(len(draft.spans)) if sequences is None else sequences
    return [fault for number in chosen for fault in _audit_sequence(draft, number, *draft.spans[number])]


def _audit_sequence(draft: Draft, number: int, start: int, end: int) -> list[Fault]:
    solved, faults = _audit_keys(draft, number, start, end)
    if faults:
        return faults  # values and gradients of keys that will change say nothing yet
    group = draft.beta.shape[1] // HEADS
    audit = Audit()
    state = round_state(audit, "initial", draft.initial[number], draft.sites)
    faults = _faults(audit, draft, number, start, None)
    walked: list[tuple[int, Chunk, Forward]] = []
    for first, rows in zip(range(start, end, CHUNK), solved, strict=True):
        audit, last = Audit(), min(first + CHUNK, end)
        q, k = (x[first:last].repeat_interleave(group, 1).transpose(0, 1) for x in (draft.q, draft.keys()))
        beta = draft.beta[first:last].T.contiguous()
        v = _derive_v(draft, k, beta, rows, state, first, last)
        draft.v[first:last] = v.transpose(0, 1)
        chunk = Chunk(q, k, v, beta, draft.do[first:last].transpose(0, 1))
        notes, raw = forward_chunk(audit, chunk, rows, state, draft.sites)
        state = round_state(audit, "state", raw, draft.sites)
        faults += _faults(audit, draft, number, first, notes)
        walked.append((first, chunk, notes))
    if faults:
        return faults  # gradients of values that will change say nothing yet
    return _audit_backward(draft, number, walked)


def _audit_keys(draft: Draft, number: int, start: int, end: int) -> tuple[list[Solved], list[Fault]]:
    """What follows from the keys of each chunk of a sequence, and what of it does not fit."""
    solved: list[Solved] = []
    faults: list[Fault] = []
    group = draft.beta.shape[1] // HEADS
    for first in range(start, end, CHUNK):
        audit, last = Audit(), min(first + CHUNK, end)
        k = draft.keys()[first:last].repeat_interleave(group, 1).transpose(0, 1)
        solved.append(solved_rows(audit, k, draft.beta[first:last].T.contiguous()))
        audit.rounded("w_scale", solved[-1].w.value, (-1,), draft.sites.w_format)
        faults += _faults(audit, draft, number, first, None)
    return solved, faults


def _audit_backward(draft: Draft, number: int, walked: list[tuple[int, Chunk, Forward]]) -> list[Fault]:
    faults: list[Fault] = []
    audit = Audit()
    ds = audit.stored("dht", Sum.of(draft.dht[number])).value
    for first, chunk, notes in reversed(walked):
        audit = Audit()
        gradients = backward_chunk(audit, chunk, notes, ds, draft.sites)
        for name in ("dq", "dk"):
            sum_group(audit, name, gradients[name], HEADS)
        ds = gradients["dstate"].value
        faults += _faults(audit, draft, number, first, notes)
    return faults


def _derive_v(
    draft: Draft, k: Tensor, beta: Tensor, solved: Solved, state: Tensor, first: int, last: int
) -> Tensor:
    """The v `[HV, C, V]` for which V' is what the draft wishes, given the rounded incoming state."""
    vn = _wished(draft, k, state, first, last)
    wq = Audit().rounded("w_scale", solved.w.value, (-1,), draft.sites.w_format)
    u = vn + wq @ state
    lower = (beta[..., None] * solved.kk.value).tril(-1)
    return (u + lower @ u) / beta[..., None]


def _wished(draft: Draft, k: Tensor, state: Tensor, first: int, last: int) -> Tensor:
    starts = {a for a, b in draft.spans if b > a}
    vn = _targeted(draft, k, state, first, last)
    if not draft.given and first in starts:
        vn[:, 0] = draft.guard / k[:, 0, :1]
    return vn


def _targeted(draft: Draft, k: Tensor, state: Tensor, first: int, last: int) -> Tensor:
    """V' `[HV, C, V]` that turns the row of a one-element key into its wish; others move it a little."""
    wish, effort = draft.wish[first:last], draft.effort[first:last].transpose(0, 1)
    size = (wish.abs().log2().floor().exp2() / 16).transpose(0, 1)
    heads, row = torch.arange(k.shape[0]), k.abs().argmax(-1)
    entry = k.gather(-1, row[..., None])
    target = draft.sign[heads[:, None], row] * wish.transpose(0, 1)
    small, divisor = torch.sign(target) * size, torch.where(entry == 0, 1.0, entry)
    sharp = ((k != 0).sum(-1) == 1) & (torch.frexp(k.abs().amax(-1)).mantissa == 0.5)
    followed, moves = sharp[..., None] & (effort > 1), (effort > 0) & (entry != 0)
    running, rows = state.clone(), []
    for t in range(last - first):
        exact = (target[:, t] - running[heads, row[:, t]]) / divisor[:, t]
        vn = torch.where(followed[:, t], exact, small[:, t]) * moves[:, t]
        running = running + k[:, t, :, None] * vn[:, None]
        rows.append(vn)
    return torch.stack(rows, 1)


def _faults(audit: Audit, draft: Draft, number: int, start: int, notes: Forward | None) -> list[Fault]:
    HV = draft.beta.shape[1]
    return [
        Fault(name, number, start, bad.repeat_interleave(HV // bad.shape[0], 0), notes)
        for name, bad in audit.faults.items()
    ]


# ---- repairing ----

KEYS = frozenset(["kk", "lower", "inverse", "w", "beta_k", "w_scale", "qk", "p"])
STATES = frozenset(["initial", "state", "state_raw"])
VALUES = frozenset(
    ["beta_v", "u", "ws", "v_new", "residual", "ks", "v_new_residual", "o", "o_state", "o_chunk"]
)
"""Tensors by what is to blame for them; all others are gradients."""
SUMMARIES = frozenset(["dg", "dbeta"])
"""Gradients that blame a whole head; what made them wide is blamed first."""


def _kind(fault: Fault) -> str:
    if fault.name in KEYS:
        return "keys"
    return "values" if fault.name in STATES | VALUES else "gradients"


def _repair(draft: Draft, faults: list[Fault], numbers: Numbers, turns: dict[str, int]) -> None:
    """Takes away something, at random, from what does not fit: keys first, then values, then gradients."""
    kind = next(kind for kind in turns if any(_kind(fault) == kind for fault in faults))
    if any(fault.name not in SUMMARIES for fault in faults):
        faults = [fault for fault in faults if fault.name not in SUMMARIES]
    for fault in faults:
        if _kind(fault) != kind:
            continue
        if kind == "keys":
            _drop_keys(draft, fault, numbers, turns[kind])
        elif kind == "gradients":
            _drop_gradients(draft, fault, numbers, turns[kind])
        elif fault.name in STATES:
            _drop_rows(draft, fault, numbers)
        else:
            _drop_values(draft, fault, numbers, turns[kind])
    turns[kind] += 1


def _coins(numbers: Numbers, mask: Tensor, share: float = 0.5) -> Tensor:
    return mask & (numbers.uniform(*mask.shape) < share)


def _reached(matrix: Tensor, tokens: Tensor) -> Tensor:
    """Which tokens `[HV, C]` have a nonzero element in a row of `matrix` whose column is marked."""
    return ((matrix != 0).double() @ tokens.double()[..., None]).squeeze(-1) > 0


def _chunk_rows(draft: Draft, start: int, size: int) -> Tensor:
    """Where the keys of a chunk's tokens, repeated to the value heads, are not zero: `[HV, C, K]`."""
    group = draft.beta.shape[1] // HEADS
    return (draft.keys()[start : start + size] != 0).repeat_interleave(group, 1).transpose(0, 1)


def _drop_keys(draft: Draft, fault: Fault, numbers: Numbers, turn: int) -> None:
    tokens = fault.bad.flatten(2).any(-1)
    size = tokens.shape[1]
    chosen = _coins(numbers, tokens.reshape(HEADS, -1, size).any(1)).T
    here = slice(fault.start, fault.start + size)
    draft.minor[here][chosen] = 0.0
    if turn > 3:
        draft.k[here][chosen] = 0.0


def _drop_rows(draft: Draft, fault: Fault, numbers: Numbers) -> None:
    """Stops writes to elements `[HV, K, V]` of the state, and what they held at first, up to this chunk."""
    chosen = _coins(numbers, fault.bad)
    chosen[:, 0] = False
    draft.initial[fault.sequence][chosen] = 0.0
    first = draft.spans[fault.sequence][0]
    size = fault.start - first + (0 if fault.notes is None else fault.notes.p.value.shape[1])
    hit = torch.einsum("hck,hkv->chv", _chunk_rows(draft, first, size).double(), chosen.double()) > 0
    draft.effort[first : first + size][hit] = 0


def _drop_values(draft: Draft, fault: Fault, numbers: Numbers, turn: int) -> None:
    """Turns off writes that meet in a value; later also the rows of the state that they meet."""
    notes, bad = fault.notes, fault.bad
    assert notes is not None
    through = notes.p.size if fault.name.startswith("o") else notes.paths.size
    meeting = ((through > 0).double().mT @ bad.double()) > 0
    if turn > PATIENCE:
        draft.effort[slice(*draft.spans[fault.sequence]), bad.flatten(1).any(1)] = 0
    off = _coins(numbers, meeting | bad, min(1.0, 0.5 + turn / 8)).transpose(0, 1)
    here = slice(fault.start, fault.start + bad.shape[1])
    draft.effort[here][off] = 0
    if turn > 2:
        rows = _chunk_rows(draft, fault.start, bad.shape[1])
        group = bad.shape[0] // HEADS
        if fault.name.startswith("o"):
            rows = rows | (draft.q[here] != 0).repeat_interleave(group, 1).transpose(0, 1)
        met = torch.einsum("hck,hcv->hkv", rows.double(), (meeting | bad).double()) > 0
        earlier = Fault("state", fault.sequence, fault.start, met, None)
        _drop_rows(draft, earlier, numbers)


def _drop_gradients(draft: Draft, fault: Fault, numbers: Numbers, turn: int) -> None:
    """Thins out incoming gradients that meet in a gradient, and the values that they meet there."""
    notes, bad = fault.notes, fault.bad
    if turn > PATIENCE:
        heads, span = bad.flatten(1).any(1), slice(*draft.spans[fault.sequence])
        draft.do[span, heads] = 0.0
        draft.dht[fault.sequence][heads] = 0.0
        return
    if notes is None:
        draft.dht[fault.sequence][_coins(numbers, bad)] = 0.0
        return
    size = notes.p.value.shape[1]
    here = slice(fault.start, fault.start + size)
    keys = _chunk_rows(draft, fault.start, size)
    tokens = _blamed(draft, fault, keys, turn)
    share = 0.5 if int(fault.bad.sum()) < 20 else min(1.0, 0.3 + turn / 40)
    chosen = _coins(numbers, tokens, share + 0.1)
    if turn % 2 == 0 or turn > 8:
        tired = _coins(numbers, chosen, 0.4).T[..., None] & draft.lean & (draft.effort[here] > 0)
        draft.effort[here] -= tired.long()
    chained = _reached(notes.paths.size, chosen) | chosen
    readers = _reached(notes.p.size, chained) | chosen
    rows = torch.einsum("hck,hc->hk", keys.double(), chained.double()) > 0
    if bad.dim() == 3 and bad.shape[1:] == rows.shape[1:] + draft.guard.shape[1:]:
        rows = rows | bad.any(-1)
    elif bad.dim() == 3 and bad.shape[-1] == rows.shape[-1]:
        rows = rows | bad.any(1)
    if turn % 2 or turn > 8:
        draft.do[here][_coins(numbers, readers, share).T] = 0.0
        draft.dht[fault.sequence][_coins(numbers, rows, share)] = 0.0
    if turn % 4 == 3 or turn > 12:
        _drop_later(draft, fault.sequence, fault.start + size, rows, numbers, share)
    if turn % 6 == 5:
        meeting = (rows[..., None] & draft.lean[:, None]).contiguous()
        _drop_rows(draft, Fault("state", fault.sequence, fault.start, meeting, None), numbers)


def _blamed(draft: Draft, fault: Fault, keys: Tensor, turn: int) -> Tensor:
    """The tokens `[HV, C]` of its chunk that a gradient that does not fit belongs to."""
    bad, size = fault.bad, keys.shape[1]
    meeting = keys.double()
    if fault.name in ("dstate", "dstate_residual"):
        group = draft.beta.shape[1] // HEADS
        queries = (draft.q[fault.start : fault.start + size] != 0).repeat_interleave(group, 1).transpose(0, 1)
        return torch.einsum("hck,hk->hc", meeting + queries, bad.any(-1).double()) > 0
    if bad.dim() == 1:
        return bad[:, None].expand(-1, size)
    if bad.dim() == 2:
        return bad
    tokens = bad.any(-1)
    if bad.shape[-1] == size and fault.name in PAIRS:
        return tokens | bad.any(-2) if turn % 2 else tokens
    if bad.shape[-1] == keys.shape[-1] and turn > 5:
        return tokens | (torch.einsum("hck,hk->hc", meeting, bad.any(1).double()) > 0)
    return tokens


PAIRS = frozenset(["dinverse", "dinverse_half", "dlower_inverse", "dlower", "dkk", "dp", "flow"])
"""Gradients of one token's meeting another."""


def _drop_later(
    draft: Draft, sequence: int, start: int, rows: Tensor, numbers: Numbers, share: float
) -> None:
    """Thins out incoming gradients of later chunks that reach rows `[HV, K]` of the state, also by W."""
    end = draft.spans[sequence][1]
    group = draft.beta.shape[1] // HEADS
    keys = _chunk_rows(draft, start, end - start).double()
    queries = (draft.q[start:end] != 0).repeat_interleave(group, 1).double()
    writing = torch.einsum("hck,hk->hc", keys, rows.double()) > 0
    rows = rows | (torch.einsum("hck,hc->hk", keys, writing.double()) > 0)
    reaching = torch.einsum("chk,hk->ch", queries, rows.double()) > 0
    draft.do[start:end][_coins(numbers, reaching, share)] = 0.0
    draft.dht[sequence][_coins(numbers, rows, share)] = 0.0


# ---- the problem ----


def _problem(draft: Draft, at: Mapping[str, str], device: str | torch.device) -> Problem:
    carrier = CARRIERS[at["dtype"]]
    batch = len(draft.spans) if at["packing"] == "batch" else 1
    v_first = at["layout"] == "vk"

    def tokens(x: Tensor, dtype: torch.dtype) -> Tensor:
        return x.reshape(batch, -1, *x.shape[1:]).to(dtype).to(device)

    def states(x: Tensor) -> Tensor:
        return (x.mT if v_first else x).float().contiguous().to(device)

    packed = document_lengths(at["packing"], int(at["length"])) is not None
    bounds = torch.tensor([0, *(end for _, end in draft.spans)], dtype=torch.int64)
    return Problem(
        q=tokens(draft.q, carrier),
        k=tokens(draft.keys(), carrier),
        v=tokens(draft.v, carrier),
        g=torch.zeros_like(tokens(draft.beta, torch.float32)),
        beta=tokens(draft.beta, torch.float32),
        initial_state=states(draft.initial) if draft.given else None,
        do=tokens(draft.do, carrier) if at["gradients"] != "state" else None,
        dht=states(draft.dht) if at["gradients"] != "output" else None,
        cu_seqlens=bounds.to(device) if packed else None,
        scale=draft.sites.scale,
        state_v_first=v_first,
        state_format=draft.sites.state_format,
        state_block_v=draft.sites.block_v,
        w_format=draft.sites.w_format,
    )
