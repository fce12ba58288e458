"""Black-box probes: small calls of the op that lay a rounding site bare, so that it is judged bit by bit.

`state`: no token writes (beta = 0): the final state is the initial one, rounded on entry and after each
chunk. `write`: each token writes a row of its own (one-hot keys, beta = 1), so the state after each chunk is
known to the last bit, with scales of any size. `w`: from an identity state with v = 0 and a key that begins
with 1, the row of that 1 in the final state is the identity's minus the rounded row of W. Where a call keeps
no states, queries behind the tokens read the rows instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch

from qualify.case import Case, CheckOutput
from qualify.checks_table import CheckRow, Constraint
from qualify.problem import CARRIERS, Problem
from qualify.regimes import Numbers, tokens_innermost
from qualify.subjects import Subject
from references.formats import grid_named, round_to_grid
from suites.checks.bits import Exact, Part, judged, remembered
from suites.checks.evidence import device_of, output_of
from suites.checks.rows import DTYPES, OP, levels, profiles

Tensor = torch.Tensor

OPERAND_BITS: Mapping[str, int] = MappingProxyType({"ieee": 24, "tf32": 11, "fp16": 11, "bf16": 8})
"""Significant bits that a matmul operand keeps."""

CARRIER_BITS: Mapping[str, int] = MappingProxyType({"fp32": 24, "fp16": 11, "bf16": 8})

HEADS, VALUE_HEADS = 2, 4


def run_state(case: Case, subject: Subject) -> CheckOutput:
    """Judges the state site where nothing else happens: values, and the gradient that passes it.

    Args:
        case: levels of dtype, format, block_v, layout and length.
        subject: what is judged.
    """
    return _run(case, subject, {"": _state_probe})


def run_write(case: Case, subject: Subject) -> CheckOutput:
    """Judges the state site after every chunk, by what one-hot keys write.

    Args:
        case: levels of dtype, format, block_v, layout and initial.
        subject: what is judged.
    """
    return _run(case, subject, {"": _write_probe})


def run_w(case: Case, subject: Subject) -> CheckOutput:
    """Judges the W site by the row of the state that it moves alone, and its gradient by dk.

    Args:
        case: levels of dtype.
        subject: what is judged.
    """
    probes = {"": _w_probe, "codes.": _w_codes_probe}
    if case.levels.get("final", "kept") == "kept":
        probes["adjoint."] = _adjoint_probe
    if _reads_carrier(case, subject):
        probes["sums."] = _w_sums_probe
    return _run(case, subject, probes)


def _reads_carrier(case: Case, subject: Subject) -> bool:
    """Whether W is narrower than fp32, and a matmul operand keeps all of it."""
    dtype = case.levels["dtype"]
    return dtype != "fp32" and _operand_bits(case, subject) >= CARRIER_BITS[dtype]


Probe = Callable[[Mapping[str, str], int, Numbers], Exact]
"""Makes an exact problem from levels and the bits that a matmul operand keeps."""


def _run(case: Case, subject: Subject, probes: Mapping[str, Probe]) -> CheckOutput:
    bits = min(_operand_bits(case, subject), CARRIER_BITS[case.levels["dtype"]])
    exacts = [(prefix, _made(case, bits, probe)) for prefix, probe in probes.items()]
    return output_of(judged(subject, exacts), *(exact.problem for _, exact in exacts))


def _operand_bits(case: Case, subject: Subject) -> int:
    dtype = case.levels["dtype"]
    declared = OPERAND_BITS.get(subject.arithmetic.get(dtype, "bf16"), 8)
    return min(declared, OPERAND_BITS["tf32"]) if dtype in subject.split else declared


def _made(case: Case, bits: int, probe: Probe) -> Exact:
    key = (probe.__name__, tuple(sorted(case.levels.items())), case.seed, device_of(case), bits)

    def make() -> Exact:
        exact = probe(case.levels, bits, Numbers(case.seed + 71))
        exact.problem = moved_to(device_of(case), exact.problem)
        long = _silent(case.levels) or case.levels.get("initial") == "zero"
        if long or case.levels["heads"] in LARGE:
            exact.wrong = ()  # each would cost what the oracle does
        return exact

    return remembered(key, make)


def moved_to(device: str, problem: Problem) -> Problem:
    """The problem with all its tensors on a device."""
    moved = {n: x.to(device) for n, x in vars(problem).items() if isinstance(x, Tensor)}
    return problem.with_(**moved)


# ---- state: nothing is written ----


def _state_probe(at: Mapping[str, str], bits: int, numbers: Numbers) -> Exact:
    carrier, fmt, block = CARRIERS[at["dtype"]], at["format"], int(at["block_v"])
    K, V = (int(n) for n in at["heads"].split("x"))
    length = int(at["length"])
    states = torch.stack(
        [
            torch.stack([pattern(numbers, K, V, block, fmt) for _ in range(VALUE_HEADS)])
            for pattern in PATTERNS.values()
        ]
    ).float()
    N = len(states)
    dht = numbers.pick(GRADIENTS, *states.shape).float()
    problem = Problem(
        q=torch.zeros(N, length, HEADS, K).to(carrier),
        k=numbers.pick((0.5, -0.5, 0.0, 0.25), N, length, HEADS, K).to(carrier),
        v=numbers.pick((1.0, -2.0, 0.0, 3.0), N, length, VALUE_HEADS, V).to(carrier),
        g=torch.zeros(N, length, VALUE_HEADS),
        beta=torch.zeros(N, length, VALUE_HEADS),
        initial_state=states,
        do=torch.zeros(N, length, VALUE_HEADS, V).to(carrier),
        dht=dht,
        scale=1.0,
        state_format=fmt,
        state_block_v=block,
    )
    problem = _laid_out(packed(problem, at), at)
    if block in VIEWED and problem.initial_state is not None:
        problem = problem.with_(initial_state=problem.initial_state.mT.contiguous().mT)
    return Exact(
        problem,
        {"final_state": None, "dh0": None},
        "no token writes (beta = 0) and nothing decays: the final state is the initial one, rounded, and its "
        "gradient passes unchanged",
    )


VIEWED = (32, 128)
"""Widths of tiles whose states are given as transposed views: other code may read those."""

GRADIENTS = (1.1, -3e-4, 1000.0, 2.0**-25, -(2.0**-60), 0.0, -7.3)
"""Incoming gradients, some that a narrow format would lose."""


def _random(numbers: Numbers, K: int, V: int, block: int, fmt: str) -> Tensor:
    own = torch.exp2(numbers.uniform(math.ceil(V / block), low=-6, high=6)).repeat_interleave(block)[:V]
    return numbers.bell(K, V) * own


def _codes(numbers: Numbers, K: int, V: int, fmt: str) -> Tensor:
    """Codes over the whole grid, with a sign."""
    if fmt == "int8":
        size = (numbers.uniform(K, V) * 127).floor()
    else:
        exponent = (numbers.uniform(K, V) * 17).floor() - 9
        size = (1 + (numbers.uniform(K, V) * 8).floor() / 8) * torch.exp2(exponent)
        size = size.clamp_max(416.0)
    return size * numbers.pick((1.0, -1.0), K, V)


def _middles(codes: Tensor, fmt: str) -> Tensor:
    """The middle between each code and the next larger one."""
    if fmt == "int8":
        return codes + torch.sign(codes) * 0.5
    step = torch.exp2(torch.frexp(codes).exponent.double().clamp_min(-5) - 4)
    return codes + torch.where(codes < 0, -step, step) / 2


def _crowned(x: Tensor, block: int, top: Tensor) -> Tensor:
    """`x` with `top` `[tiles]` as the largest element of each tile, each in another row, late ones first."""
    x = x.clone()
    for tile, start in enumerate(range(0, x.shape[1], block)):
        x[-1 - (53 * tile + 5) % x.shape[0], start + tile % min(block, x.shape[1] - start)] = top[tile]
    return x


def _tops(numbers: Numbers, V: int, block: int, fmt: str, exact: bool) -> tuple[Tensor, Tensor]:
    """Largest elements and scales `[V]` of each tile: powers of two, or any fp32 number."""
    tiles = math.ceil(V / block)
    largest = grid_named(fmt).largest
    if exact:
        scale = torch.exp2(numbers.pick((-7.0, -3.0, 0.0, 2.0, 5.0), tiles))
        return scale * largest, scale.repeat_interleave(block)[:V]
    top = torch.exp2(numbers.uniform(tiles, low=-5, high=5)).float()
    scale = top / torch.full_like(top, largest)
    return top.double(), scale.double().repeat_interleave(block)[:V]


def _ties(numbers: Numbers, K: int, V: int, block: int, fmt: str) -> Tensor:
    top, scale = _tops(numbers, V, block, fmt, exact=True)
    return _crowned(_middles(_codes(numbers, K, V, fmt), fmt) * scale, block, top)


def _near_ties(numbers: Numbers, K: int, V: int, block: int, fmt: str) -> Tensor:
    top, scale = _tops(numbers, V, block, fmt, exact=True)
    aside = 1 + numbers.pick((1, -1, 2, -2, 64, -64, 2048, -2048), K, V) * 2.0**-23
    return _crowned(_middles(_codes(numbers, K, V, fmt), fmt) * aside * scale, block, top)


def _generic_ties(numbers: Numbers, K: int, V: int, block: int, fmt: str) -> Tensor:
    """Beside the middles under scales of 24 bits: the last bit of the quotient decides."""
    top, scale = _tops(numbers, V, block, fmt, exact=False)
    aside = 1 + numbers.pick((0, 1, -1, 2, -2, 3, -3), K, V) * 2.0**-23
    return _crowned(_middles(_codes(numbers, K, V, fmt), fmt) * scale * aside, block, top)


def _about_the_edge(
    numbers: Numbers, K: int, V: int, block: int, fmt: str, factors: tuple[float, ...]
) -> Tensor:
    """Tiles whose scale is the smallest normal number times one of `factors`, and one that is zero."""
    tiles = math.ceil(V / block)
    top = 2.0**-126 * grid_named(fmt).largest * numbers.pick(factors, tiles)
    x = _codes(numbers, K, V, fmt).sign() * numbers.uniform(K, V) * top.repeat_interleave(block)[:V] * 0.99
    x = _crowned(x, block, top)
    x[:, :block] *= 1.0 if tiles == 1 else 0.0
    return x


def _tiny(numbers: Numbers, K: int, V: int, block: int, fmt: str) -> Tensor:
    return _about_the_edge(numbers, K, V, block, fmt, (1.0, 1.0 + 2.0**-20, 3.0))


def _vanishing(numbers: Numbers, K: int, V: int, block: int, fmt: str) -> Tensor:
    return _about_the_edge(numbers, K, V, block, fmt, (1.0 - 2.0**-20, 0.25, 2.0**-10))


def _huge(numbers: Numbers, K: int, V: int, block: int, fmt: str) -> Tensor:
    """One element of each tile far above the rest, which falls on subnormal codes or on zero."""
    tiles = math.ceil(V / block)
    top = numbers.pick((3e3, -2e4, 1e4), tiles)
    return _crowned(numbers.bell(K, V) * numbers.pick((1.0, 0.05), K, V), block, top)


PATTERNS: Mapping[str, Callable[[Numbers, int, int, int, str], Tensor]] = MappingProxyType(
    {
        "random": _random,
        "ties": _ties,
        "near_ties": _near_ties,
        "generic_ties": _generic_ties,
        "tiny": _tiny,
        "vanishing": _vanishing,
        "huge": _huge,
    }
)
"""Initial states `[K, V]` by what is hard about them."""


# ---- write: every token writes a row of its own ----


def _write_probe(at: Mapping[str, str], bits: int, numbers: Numbers) -> Exact:
    carrier, fmt, block = CARRIERS[at["dtype"]], at["format"], int(at["block_v"])
    K, V = (int(n) for n in at["heads"].split("x"))
    N, length = (2 if _silent(at) else 3), int(at.get("written", WRITTEN[0]))
    given = at["initial"] == "given"
    free = torch.stack([torch.stack([numbers.uniform(K).argsort() for _ in range(HEADS)]) for _ in range(N)])
    kept = K // 4 if given else 0
    writers = free[..., kept : kept + length]  # rows that the initial state leaves empty, each written once
    at_token = (numbers.uniform(N, HEADS, length).argsort(-1)[..., : writers.shape[-1]]).sort(-1).values
    k = torch.zeros(N, length, HEADS, K, dtype=torch.float64)
    for n in range(N):
        for h in range(HEADS):
            k[n, at_token[n, h], h, writers[n, h]] = 1.0
    growth = torch.linspace(0, 4, length, dtype=torch.float64).view(-1, 1, 1)  # a new maximum in each chunk
    size = torch.exp2(numbers.uniform(N, length, 1, 1) + growth)
    v = short(numbers.bell(N, length, VALUE_HEADS, V) * size, bits)
    initial = numbers.bell(N, VALUE_HEADS, K, V) * torch.exp2(numbers.uniform(N, VALUE_HEADS, 1, 1, high=3))
    for n in range(N):
        for h in range(VALUE_HEADS):
            initial[n, h, writers[n, h * HEADS // VALUE_HEADS]] = 0.0
    problem = Problem(
        q=torch.zeros(N, length, HEADS, K).to(carrier),
        k=k.to(carrier),
        v=short(v, bits).to(carrier),
        g=torch.zeros(N, length, VALUE_HEADS),
        beta=torch.ones(N, length, VALUE_HEADS),
        initial_state=initial.float() if given else None,
        scale=1.0,
        state_format=fmt,
        state_block_v=block,
    )
    return Exact(
        _laid_out(packed(_behind(problem, at), at), at),
        {"final_state": None},
        "each token writes a row that was zero (one-hot keys, beta = 1): no product has to be rounded, and "
        "the state after each chunk is the rounded one before it with v in the rows written",
    )


WRITTEN = (str(6 * 64 - 5), "50")
"""Tokens of the write probe: five whole chunks and a partial one, or a partial one alone, which a kernel may
have a path of its own for."""

SOME = "100"
"""Silent tokens in front of a probe: what it shows happens in a second chunk that is no whole one."""

MANY = "2112"
"""The same for a late chunk: 33 of silent tokens stand in front."""


def _silent(at: Mapping[str, str]) -> int:
    return int(at.get("before", "0"))


def _behind(problem: Problem, at: Mapping[str, str]) -> Problem:
    """The batch behind as many tokens that neither read, nor write, nor decay as the cell says."""
    silent = _silent(at)
    if silent == 0:
        return problem

    def later(x: Tensor) -> Tensor:
        return torch.cat([x.new_zeros(x.shape[0], silent, *x.shape[2:]), x], 1)

    return problem.with_(**{name: later(getattr(problem, name)) for name in ("q", "k", "v", "g", "beta")})


def _from_zero(problem: Problem, at: Mapping[str, str]) -> Problem:
    """From no state, behind whole chunks that write the identity: one-hot keys with values of their own."""
    if at.get("initial", "given") == "given":
        return problem
    (N, _, _, K), V = problem.k.shape, problem.v.shape[3]
    length = -(-K // 64) * 64
    eye = torch.zeros(length, max(K, V)).fill_diagonal_(1.0)

    def rows(x: Tensor, size: int) -> Tensor:
        return eye[:, None, :size].to(x).expand(N, length, x.shape[2], size)

    ahead = {
        "q": torch.zeros_like(rows(problem.q, K)),
        "k": rows(problem.k, K),
        "v": rows(problem.v, V),
        "g": problem.g.new_zeros(N, length, problem.v.shape[2]),
        "beta": problem.beta.new_ones(N, length, problem.v.shape[2]),
    }
    later = {name: torch.cat([x, getattr(problem, name)], 1) for name, x in ahead.items()}
    return problem.with_(**later, initial_state=None)


def short(x: Tensor, bits: int) -> Tensor:
    """`x` (fp64) rounded to `bits` significant bits."""
    mantissa, exponent = torch.frexp(x)
    return torch.ldexp(torch.round(mantissa * 2.0**bits) / 2.0**bits, exponent)


# ---- w: one row of W in one row of the state ----

TOKENS = 4
"""Tokens of one chunk with keys of disjoint supports: each has its own scale, none sees another."""

STRENGTHS = (1.0, 2.0, 1.0, 1.5)
"""beta of each value head: heads that share a key have scales of their own, the last two other codes too."""

SPARE_BITS = (0, 2)
"""Bits that the keys of a q/k head leave to the beta of its value heads (a power of two needs none)."""


def _w_probe(at: Mapping[str, str], bits: int, numbers: Numbers) -> Exact:
    # where the carrier holds more bits than an operand, W is read exactly only if its scale is short as well
    narrow = bits < CARRIER_BITS[at["dtype"]]
    problem, rows = _w_problem(at, bits, 7 if narrow else bits, numbers)
    return _w_exact(
        problem,
        at,
        {
            "final_state": lambda x: x[:, :, :TOKENS],
            "dk": lambda x: _own_keys(x.reshape(len(rows), -1, *rows.shape[2:])[:, -TOKENS:]),
        },
        "from an identity state, with v = 0 and keys that begin with 1 and do not overlap, the row of that 1 "
        "is the identity's minus the rounded row of W, a key times its head's beta; dk beside the 1 is minus "
        "the incoming gradient",
    )


def _w_codes_probe(at: Mapping[str, str], bits: int, numbers: Numbers) -> Exact:
    """As `_w_probe` with scales of any size; codes of W are read: they survive an operand's rounding."""
    problem, rows = _w_problem(at, bits, bits, numbers)
    scale = rows.abs().amax(-1).float() / torch.full((), grid_named("e4m3").largest)  # [N, TOKENS, H]
    scale = scale.transpose(1, 2).repeat_interleave(VALUE_HEADS // HEADS, 1)[..., None]
    scale = scale * _strengths(at).T[None, :, :, None]

    def codes(final_state: Tensor) -> Tensor:
        identity = torch.eye(TOKENS, final_state.shape[-1], device=final_state.device)
        w = identity - final_state[:, :, :TOKENS].float()
        return round_to_grid((w / scale.to(w.device)).contiguous(), grid_named("e4m3"))

    return _w_exact(
        problem,
        at,
        {"final_state": codes},
        "as the row of W itself, but only codes are read: neighbours differ by a sixteenth at least, and an "
        "operand is rounded by less than a two-hundredth",
    )


def _strengths(at: Mapping[str, str]) -> Tensor:
    """beta `[TOKENS, HV]`; that of the last token is so small that a floor under the scale would show."""
    strengths = torch.tensor(STRENGTHS).repeat(TOKENS, 1)
    if at["dtype"] != "fp16":  # whose W would be zero
        strengths[-1] *= 2.0**-60
    return strengths


def _w_problem(at: Mapping[str, str], bits: int, scale_bits: int, numbers: Numbers) -> tuple[Problem, Tensor]:
    """The problem and its keys `[N, TOKENS, H, K]`."""
    carrier = CARRIERS[at["dtype"]]
    K = int(at["heads"].split("x")[0])
    N = 2 if _silent(at) or at["heads"] in LARGE else 8
    k = torch.zeros(N, TOKENS, HEADS, K, dtype=torch.float64)
    for t in range(TOKENS):
        for h, spare in enumerate(SPARE_BITS):
            rows = _w_rows(numbers, (N, 1, K // TOKENS), bits - spare, scale_bits - spare)
            k[:, t, h, t::TOKENS] = rows[:, 0]
    dht = torch.zeros(N, VALUE_HEADS, K, K)
    groups = slice(0, None, VALUE_HEADS // HEADS)  # one value head of each group: a sum would be rounded
    dht[:, groups, :TOKENS] = short(numbers.pick(W_GRADIENTS, N, HEADS, TOKENS, K), 8).float()
    problem = Problem(
        q=torch.zeros(N, TOKENS, HEADS, K).to(carrier),
        k=k.to(carrier),
        v=torch.zeros(N, TOKENS, VALUE_HEADS, K).to(carrier),
        g=torch.zeros(N, TOKENS, VALUE_HEADS),
        beta=_strengths(at).expand(N, TOKENS, VALUE_HEADS).contiguous(),
        initial_state=torch.eye(K).expand(N, VALUE_HEADS, K, K).contiguous(),
        dht=dht,
        scale=1.0,
        w_format="e4m3",
    )
    return problem, k


def _w_exact(
    problem: Problem,
    at: Mapping[str, str],
    parts: Mapping[str, Part],
    derivation: str,
    wrong: tuple[str, ...] | None = None,
) -> Exact:
    """The exact problem of a call that keeps states, or of one that is given none and returns none.

    Args:
        problem: from an identity state.
        at: the levels; where `final` is `dropped`, queries read every row behind the tokens, and what was the
            final state's gradient is theirs.
        parts: of the final state, and of gradients at the problem's own tokens, which are the last.
        derivation: why there is no tolerance.
        wrong: as for `Exact`.
    """
    problem = _from_zero(_behind(problem, at), at)
    if at.get("final", "kept") == "kept":
        return Exact(packed(problem, at), {**parts}, derivation, wrong)
    (N, _, HV, V), K = problem.v.shape, problem.k.shape[3]

    def read(x: Tensor) -> Tensor:
        return x.reshape(N, -1, HV, V)[:, -K:].transpose(1, 2)

    def rows(part: Part) -> Part:
        # beside the diagonal, where 1 minus an element of W may be longer than the carrier
        return lambda o: part(read(o) * (1 - torch.eye(K, V, dtype=o.dtype, device=o.device)))

    def before_queries(part: Part) -> Part:
        return lambda x: part(x.reshape(N, -1, *x.shape[2:])[:, :-K])

    own = {name: before_queries(part) for name, part in parts.items() if name != "final_state"}
    own["o"] = rows(parts["final_state"])
    return Exact(_as_views(packed(_with_queries(problem), at), at), {**own}, derivation, wrong)


def _with_queries(problem: Problem) -> Problem:
    """The batch with a query for every row of the state behind it, and without a state at its end."""
    N, K = problem.q.shape[0], problem.q.shape[3]

    def longer(x: Tensor, more: Tensor | None = None) -> Tensor:
        return torch.cat([x, x.new_zeros(N, K, *x.shape[2:]) if more is None else more.to(x)], 1)

    queries = torch.eye(K)[None, :, None].expand(N, K, problem.q.shape[2], K)
    tokens = {name: longer(getattr(problem, name)) for name in ("k", "v", "g", "beta")}
    arriving = (
        None if problem.dht is None else longer(torch.zeros_like(problem.v), problem.dht.transpose(1, 2))
    )
    return problem.with_(
        **tokens, q=longer(problem.q, queries), do=arriving, dht=None, output_final_state=False
    )


def _as_views(problem: Problem, at: Mapping[str, str]) -> Problem:
    """Packed calls with tokens as the innermost dimension in memory: other code may read those."""
    if at.get("packing", "batch") != "docs":
        return problem
    return problem.with_(**{n: tokens_innermost(getattr(problem, n)) for n in ("q", "k", "v", "g", "beta")})


W_GRADIENTS = (1.1015625, -0.000301361083984375, 40.0, -0.15625, 3.015625, 2.0**-12)


def _own_keys(dk: Tensor) -> Tensor:
    """Of each token's dk `[N, TOKENS, H, K]` the elements in its own support but the first."""
    return torch.stack([dk[:, t, :, t::TOKENS][..., 1:] for t in range(TOKENS)], 1)


def _w_rows(numbers: Numbers, shape: tuple[int, int, int], bits: int, scale_bits: int) -> Tensor:
    """Rows `[N, H, support]` that begin with 1 and have their largest element anywhere behind it.

    A third has any values, a third lies on ties, under scales that are and are not powers of two, and a third
    as close beside ties as `bits` bits allow, where a second rounding or another scale shows.
    """
    largest = grid_named("e4m3").largest
    kind = numbers.uniform(*shape[:2], 1) * 3
    any_values = numbers.bell(*shape) * torch.exp2(numbers.uniform(*shape[:2], 1, high=3))
    scale = numbers.pick((1.0, 1.25, 1.5, 1.75), *shape[:2], 1) * torch.exp2(
        numbers.pick((-7.0, -6.0), *shape[:2], 1)
    )
    codes = _codes(numbers, shape[0] * shape[1], shape[2], "e4m3")
    ties = _middles(codes, "e4m3").reshape(shape) * scale
    smallest = numbers.pick(AT_THE_SMALLEST_CODE, *shape) * numbers.pick((1.0, -1.0), *shape) * scale
    ties = torch.where(numbers.uniform(*shape) < 0.15, smallest, ties)
    top = torch.where(kind < 1, any_values.abs().amax(-1, keepdim=True).clamp_min(1.25), largest * scale)
    top = torch.where(kind < 2, top, largest / 128 * (1 + numbers.uniform(*shape[:2], 1)))
    top = short(top / largest, scale_bits) * largest if scale_bits < bits else short(top, bits)
    beside = _beside_ties(numbers, top / largest, shape[2], bits)
    rows = torch.where(kind < 1, short(any_values, bits), torch.where(kind < 2, short(ties, bits), beside))
    rows = torch.where(rows.abs() > top, top, rows)
    rows[..., 0] = 1.0
    place = 1 + (numbers.uniform(*shape[:2], 1) * (shape[2] - 1)).floor().long()
    return rows.scatter(-1, place, top)


AT_THE_SMALLEST_CODE = (1.25 * 2.0**-10, 2.0**-9, 2.75 * 2.0**-10)
"""Quotients that become the smallest code."""


def _beside_ties(numbers: Numbers, scale: Tensor, count: int, bits: int) -> Tensor:
    """Numbers of `bits` bits (12 at most) whose quotients by `scale` `[..., 1]` nearly are ties."""
    steps = 2 ** (min(bits, 12) - 1)
    mantissas = 1 + torch.arange(steps, dtype=torch.float64) / steps
    values = torch.cat([mantissas * 2.0**e for e in range(-4, 1)])
    quotient = values / scale
    step = torch.exp2(torch.frexp(quotient).exponent.double().clamp_min(-5) - 4)
    aside = (torch.remainder(quotient / step, 1.0) - 0.5).abs() * (step / quotient)
    aside = torch.where((aside == 0) | (quotient > 400), torch.inf, aside)
    nearest = aside.topk(count, largest=False).indices
    return values[nearest] * numbers.pick((1.0, -1.0), *nearest.shape)


# ---- w: the adjoint of the solve, at a W that rounding moves by as much as it is ----


def _adjoint_probe(at: Mapping[str, str], bits: int, numbers: Numbers) -> Exact:
    """Two keys that meet in one coordinate; of W's first row an element is read that rounding moves far.

    With `k0 = a e_A + s e_B` and `k1 = e_A / 64 + e_X`, an initial state that passes B on to one column, and
    an incoming gradient d of the final state in row X of that column, the gradient of `L_10` is `d W_0[B]`,
    up to its sign, and nothing but what it adds to k1 arrives at A.
    """
    carrier = CARRIERS[at["dtype"]]
    K = int(at["heads"].split("x")[0])
    N, V = 6, 16
    k = torch.zeros(N, 2, HEADS, K, dtype=torch.float64)
    state = torch.zeros(N, VALUE_HEADS, K, V)
    dht = torch.zeros(N, VALUE_HEADS, K, V)
    group = VALUE_HEADS // HEADS
    A = torch.zeros(N, HEADS, dtype=torch.long)
    for n in range(N):
        for h in range(HEADS):
            a, b, x = numbers.uniform(K).argsort()[:3].tolist()
            A[n, h] = a
            k[n, 0, h, a] = float(numbers.pick((64.0, -64.0), 1))
            k[n, 0, h, b] = float(numbers.pick(BELOW_THE_CODES, 1)) * 64.0 / 448.0 * 2.0**-9
            k[n, 1, h, a], k[n, 1, h, x] = 1.0 / 64.0, 1.0
            for j in range(h * group, (h + 1) * group):
                column = int(numbers.uniform(1) * V)
                state[n, j, b, column] = 1.0
                if j == h * group:  # one value head of each group: a sum would be rounded
                    dht[n, j, x, column] = float(numbers.pick((1.0, -1.5, 3.0, 0.625), 1))
    problem = Problem(
        q=torch.zeros(N, 2, HEADS, K).to(carrier),
        k=short(k, min(bits, 3)).to(carrier),
        v=torch.zeros(N, 2, VALUE_HEADS, V).to(carrier),
        g=torch.zeros(N, 2, VALUE_HEADS),
        beta=torch.ones(N, 2, VALUE_HEADS),
        initial_state=state,
        dht=dht,
        scale=1.0,
        w_format="e4m3",
    )

    def where_they_meet(dk: Tensor) -> Tensor:
        return dk.reshape(N, -1, HEADS, K)[:, -1].gather(-1, A.to(dk.device)[..., None])

    return Exact(
        packed(_behind(problem, at), at),
        {"dk": where_they_meet},
        "the adjoint of the solve is linearised at the unrounded W: where two keys meet, dk of the second is "
        "the incoming gradient times an element of W that rounding takes to another number, times the first",
        wrong=(),
    )


BELOW_THE_CODES = (0.3125, 0.4375, 0.75, 1.5, 1.25)
"""Quotients by the smallest code that rounding moves by a fifth at least."""


# ---- w: a row that is a sum, and has more bits than the carrier ----

SUM_PAIRS = 14
"""Pairs of coordinates in which two keys meet: few enough that every order of their sum is exact."""


def _w_sums_probe(at: Mapping[str, str], bits: int, numbers: Numbers) -> Exact:
    """Two keys with a product of a power of two, c: the second row of W is `k1 - c k0`, exact in fp32."""
    carrier, K, N = CARRIERS[at["dtype"]], int(at["heads"].split("x")[0]), 2
    k = torch.zeros(N, 2, HEADS, K, dtype=torch.float64)
    for n in range(N):
        for h in range(HEADS):
            k[n, :, h] = _meeting_keys(numbers, K, at["dtype"], crowned=n % 2 == 0)
    problem = Problem(
        q=torch.zeros(N, 2, HEADS, K).to(carrier),
        k=k.to(carrier),
        v=torch.zeros(N, 2, VALUE_HEADS, K).to(carrier),
        g=torch.zeros(N, 2, VALUE_HEADS),
        beta=torch.ones(N, 2, VALUE_HEADS),
        initial_state=torch.eye(K).expand(N, VALUE_HEADS, K, K).contiguous(),
        scale=1.0,
        w_format="e4m3",
    )
    return _w_exact(
        problem,
        at,
        {"final_state": lambda x: x[:, :, 0]},
        "from an identity state, with v = 0 and a coordinate in which the second of two keys is 1 and the "
        "first is 0, the row of that coordinate is the identity's minus the second row of W: the difference "
        "of two short rows, rounded to the carrier and then to codes",
        wrong=(),
    )


def _meeting_keys(numbers: Numbers, K: int, dtype: str, *, crowned: bool) -> Tensor:
    """Two keys `[2, K]`; where they are `crowned` the scale is a power of two, else their sums make it.

    They meet in pairs of coordinates, (x, x) and (y, -y), whose products cancel, and in one more.
    """
    carrier, c = CARRIERS[dtype], 2.0 ** (5 - CARRIER_BITS[dtype])
    mantissas = 1 + torch.arange(128, dtype=torch.float64) / 128
    x, y = mantissas.view(-1, 1, 1), mantissas.view(-1, 1) * torch.tensor((0.25, 0.5, 1.0)).double()
    row = torch.stack([y - c * x, -y - c * x])  # [2, x, mantissa of y, its exponent]
    kept, grid, top = row.to(carrier).double(), grid_named("e4m3"), 3.5
    scale = top / grid.largest
    moved = round_to_grid(row / scale, grid) != round_to_grid(kept / scale, grid)
    moved = moved.any(0) if crowned else (row != kept).all(0)
    found = moved.nonzero()[(numbers.uniform(int(moved.sum()))).argsort()[: min(SUM_PAIRS, (K - 3) // 2)]]
    xs, ys = mantissas[found[:, 0]], y[found[:, 1], found[:, 2]]
    if not crowned:
        ys[0] = 2 * mantissas[found[0, 1]]
    keys = torch.zeros(2, K, dtype=torch.float64)
    keys[1, 0], keys[0, 1], keys[1, 1] = 1.0, 1.0, c
    keys[1, 2] = top if crowned else 0.0
    keys[0, 3 : 3 + 2 * len(xs)] = xs.repeat_interleave(2)
    keys[1, 3 : 3 + 2 * len(xs)] = torch.stack([ys, -ys], 1).flatten()
    return keys


# ---- layouts ----


def packed(problem: Problem, at: Mapping[str, str]) -> Problem:
    """The batch as packed sequences, when the cell says so."""
    if at.get("packing", "batch") != "docs":
        return problem
    N, length = problem.k.shape[:2]
    tokens = [n for n in ("q", "k", "v", "g", "beta", "do") if getattr(problem, n) is not None]
    flat = {n: getattr(problem, n).flatten(0, 1)[None] for n in tokens}
    return problem.with_(**flat, cu_seqlens=torch.arange(N + 1, dtype=torch.int64) * length)


def _laid_out(problem: Problem, at: Mapping[str, str]) -> Problem:
    """States value-first, when the cell says so."""
    if at.get("layout", "kv") != "vk":
        return problem
    states = [n for n in ("initial_state", "dht") if getattr(problem, n) is not None]
    turned = {n: getattr(problem, n).mT.contiguous() for n in states}
    return problem.with_(**turned, state_v_first=True)


_STATE_AXES = levels("dtype", "format", "block_v", "layout") | {
    "sites": ("state",),
    "packing": ("batch", "docs"),
}

LARGE = ("256x16", "16x256", "256x208", "256x256")
"""Most keys of a tile, and most tiles, whole ones and a partial one of every width: what a loop leaves out
beyond its first turns shows, and a tile of the next power of two."""

SECONDS = "seconds on a CPU for no new path"

_QUICK = {
    "dtype": ("bf16",),
    "heads": ("32x48",),
    "block_v": ("16",),
    "packing": ("docs",),
    "layout": ("vk",),
}

ROWS = (
    CheckRow(
        "probe.state",
        "suites.checks.probes:run_state",
        "the state site alone, with ties, near-ties, tiny and huge tiles, and the gradient that passes it",
        needs=OP,
        axes=_STATE_AXES
        | {"length": ("1", "65"), "heads": ("32x48", "16x16", "32x32", *LARGE[:3], "128x128")},
        regimes=("probe",),
        constraints=(
            Constraint(
                {"sm": ("cpu",), "length": ("65",), "heads": LARGE},
                SECONDS,
            ),
            Constraint(
                {"heads": ("256x208",), "block_v": ("16", "32")},
                "a tile that is wide in both is what it is for",
            ),
        ),
        must_run=(
            *({"dtype": dtype, "format": fmt} for dtype in DTYPES for fmt in ("e4m3", "int8")),
            {"heads": "32x32", "block_v": "16", "layout": "vk"},
        ),
        profiles=profiles(
            "pairs",
            "triples",
            quick=_QUICK | {"length": ("1",)},
            cpu_axes={"heads": ("32x48", "16x16", "32x32", *LARGE[:3])},
        ),
    ),
    CheckRow(
        "probe.write",
        "suites.checks.probes:run_write",
        "the state after every chunk to the last bit, under scales of any size",
        needs=OP,
        axes=_STATE_AXES
        | {
            "initial": ("given", "zero"),
            "heads": ("32x48", "48x64", "128x32", "128x128", "256x16"),
            "before": ("0", MANY),
            "written": WRITTEN,
        },
        regimes=("probe",),
        constraints=(
            Constraint({"sm": ("cpu",), "before": (MANY,), "heads": ("48x64", "128x32", "256x16")}, SECONDS),
            Constraint({"before": (MANY,), "written": WRITTEN[1:]}, "a sequence of many chunks is not short"),
            Constraint({"heads": ("256x16",), "written": WRITTEN[1:]}, "many keys are asked for over chunks"),
        ),
        must_run=tuple({"dtype": dtype, "format": fmt} for dtype in DTYPES for fmt in ("e4m3", "int8")),
        profiles=profiles(
            "each",
            "pairs",
            quick=_QUICK | {"initial": ("given",), "before": ("0",), "written": WRITTEN[:1]},
            cpu_axes={"heads": ("32x48", "48x64", "128x32", "256x16")},
        ),
    ),
    CheckRow(
        "probe.w",
        "suites.checks.probes:run_w",
        "single rows of W as they are rounded, and the gradient that passes the rounding",
        needs=OP,
        axes=levels("dtype")
        | {"sites": ("w",), "packing": ("batch", "docs"), "heads": ("32x32", "64x64", "128x128", "256x256")}
        | {"before": ("0", SOME, MANY), "initial": ("given", "zero"), "final": ("kept", "dropped")},
        regimes=("probe",),
        constraints=(
            Constraint({"initial": ("given",), "final": ("dropped",)}, "what is left of states is asked for"),
            Constraint({"sm": ("cpu",), "final": ("dropped",), "heads": ("128x128", "256x256")}, SECONDS),
            Constraint({"final": ("dropped",), "before": (MANY,)}, "late chunks are asked for with states"),
            Constraint(
                {"sm": ("cpu",), "before": (SOME, MANY), "heads": ("64x64", "128x128", "256x256")}, SECONDS
            ),
            Constraint({"sm": ("cpu",), "before": (MANY,), "initial": ("zero",)}, SECONDS),
        ),
        strength="all",
        must_run=tuple({"dtype": dtype} for dtype in DTYPES),
        profiles=profiles(
            "pairs",
            "all",
            quick={"dtype": ("bf16",), "heads": ("32x32",), "before": ("0",), "initial": ("given",)},
            cpu_axes={"heads": ("32x32", "128x128", "256x256")},
        ),
    ),
)
