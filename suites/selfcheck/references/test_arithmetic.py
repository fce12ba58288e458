"""Declared arithmetic: what it rounds, how much, and that correct low-precision runs look like members."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import pytest
import torch

from references.arithmetic import BLOCK, EXACT, MAGNITUDES, MODES, PRECISIONS, Noisy
from references.gdn_chunk import dg_magnitude, gdn_chunk
from references.qdq import qdq_state
from references.sites import Observed, Offsets, Tipped
from suites.selfcheck.references.inputs import boundaries, make_inputs, relative, run

Tensor = torch.Tensor

CASTS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "ieee": torch.float32}
SITES: dict[str, Any] = {
    "state_format": "e4m3",
    "w_format": "e4m3",
    "state_block_v": 16,
    "w_dtype": torch.bfloat16,
}


def numbers(count: int = 20_000) -> Tensor:
    draw = torch.Generator().manual_seed(0)
    spread = torch.randint(-12, 12, (count,), generator=draw).to(torch.float64)
    return torch.randn(count, dtype=torch.float64, generator=draw) * 2.0**spread


@pytest.mark.parametrize("precision", CASTS)
def test_nearest_rounding_is_the_cast(precision: str) -> None:
    x = torch.cat([numbers(), numbers() * 2.0**-16, torch.tensor([0.0, -0.0, 2.0**-24, 3 * 2.0**-25])])
    x = x.to(torch.float32).to(torch.float64)  # from fp64, torch would round twice
    cast = x.to(CASTS[precision]).to(torch.float64)
    assert torch.equal(Noisy(mode="nearest").round(x, precision), cast)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_stochastic_rounding_picks_a_neighbour_and_is_unbiased(precision: str) -> None:
    x = numbers()
    noisy = Noisy(seed=1)
    down = Noisy(mode="toward_zero").round(x, precision)
    step = 2.0 ** (torch.frexp(x)[1] - 1 - PRECISIONS[precision].mantissa_bits)
    if PRECISIONS[precision].min_exponent is not None:
        step = step.clamp_min(2.0 ** (PRECISIONS[precision].min_exponent or 0) * 2.0**-10)
    share = ((x - down).abs() / step).clamp(0.0, 1.0)
    assert bool((share < 1.0).all())
    up = torch.stack([noisy.round(x, precision) != down for _ in range(20)]).to(torch.float64)
    rounded = noisy.round(x, precision)
    assert bool(((rounded == down) | ((rounded - down).abs() == step)).all())
    deviation = float((up.mean(0) - share).mean()) * (20 * len(x)) ** 0.5
    assert abs(deviation) < 3.0  # in units of a standard deviation of at most 1/2


@pytest.mark.parametrize("mode", MODES)
def test_representable_numbers_stay(mode: str) -> None:
    x = numbers().to(torch.bfloat16).to(torch.float64)
    assert torch.equal(Noisy(mode=mode).round(x, "bf16"), x)
    assert torch.equal(Noisy(mode=mode).round(x, "fp32"), x)


def test_a_seed_names_one_member_of_the_family() -> None:
    inputs = make_inputs(T=70)
    first, again, other = (run(gdn_chunk, inputs, arithmetic=Noisy(seed=s), **SITES) for s in (1, 1, 2))
    for name, value in first.items():
        assert torch.equal(value, again[name]), name
        assert not torch.equal(value, other[name]), name


@pytest.mark.parametrize(
    ("operand", "store", "low", "high"),
    [
        ("bf16", "bf16", 2.0**-9, 2.0**-6),
        ("fp16", "fp16", 2.0**-12, 2.0**-9),
        ("tf32", "fp32", 2.0**-12, 2.0**-9),
        ("ieee", "fp32", 2.0**-23, 2.0**-18),
    ],
)
def test_noise_is_of_the_size_of_the_declared_precision(
    operand: str, store: str, low: float, high: float
) -> None:
    inputs = make_inputs(T=145)
    exact = run(gdn_chunk, inputs)
    noisy = run(gdn_chunk, inputs, arithmetic=Noisy(operand=operand, store=store))
    for name, value in exact.items():
        assert low < relative(noisy[name], value) < high, name


def test_accumulation_noise_alone_is_that_of_fp32() -> None:
    inputs = [x.detach().to(torch.bfloat16).to(torch.float64) for x in make_inputs(T=16)]
    q, k = inputs[0][0, :, 0], inputs[1][0, :, 0]
    exact = q @ k.mT
    assert torch.equal(Noisy(accumulate="exact").matmul(q, k.mT), exact)
    distance = (Noisy().matmul(q, k.mT) - exact).abs().max()
    assert 0.0 < float(distance) < 2.0**-18


def kernel_like(inputs: list[Tensor], do: Tensor, dht: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    """A correct low-precision implementation of its own: operands and stored tensors cast, fp32 sums."""

    def low(x: Tensor) -> Tensor:
        return x.to(dtype).to(torch.float32)

    q, k, v, g, beta, state = (x.detach().to(torch.float32).requires_grad_() for x in inputs)
    repeat = v.shape[2] // q.shape[2]
    qh, kh = (low(x).repeat_interleave(repeat, 2).transpose(1, 2) for x in (q, k))
    vh, gh, bh = low(v).transpose(1, 2), g.transpose(1, 2), beta.transpose(1, 2)
    outputs, current = [], state
    for start in range(0, v.shape[1], 64):
        piece = slice(start, start + 64)
        qc, kc, vc, bc = qh[:, :, piece], kh[:, :, piece], vh[:, :, piece], bh[:, :, piece, None]
        total = gh[:, :, piece].cumsum(-1)
        gamma = torch.exp((total[..., :, None] - total[..., None, :]).tril()).tril()
        system = (bc * (kc @ kc.mT) * gamma).tril(-1) + torch.eye(kc.shape[2])
        inverse = low(
            torch.linalg.solve_triangular(system, torch.eye(kc.shape[2]).expand_as(system), upper=False)
        )
        u = low(inverse @ low(bc * vc))
        w = low(inverse @ low(bc * total.exp()[..., None] * kc))
        new = low(u - w @ low(current))
        attention = low((qc @ kc.mT) * gamma * 32**-0.5)
        outputs.append(low(32**-0.5 * total.exp()[..., None] * (qc @ low(current)) + attention @ new))
        keys = low((total[..., -1:] - total).exp()[..., None] * kc)
        current = total[..., -1:].exp()[..., None] * current + keys.mT @ new
    o = torch.cat(outputs, 2).transpose(1, 2)
    found = torch.autograd.grad([o, current], [q, k, v, g, beta, state], [do.float(), dht.float()])
    named = dict(zip(("dq", "dk", "dv", "dg", "dbeta", "dh0"), found, strict=True))
    return {
        name: x.detach().to(torch.float64) for name, x in {"o": o, "final_state": current, **named}.items()
    }


@pytest.mark.parametrize(("dtype", "name"), [(torch.bfloat16, "bf16"), (torch.float16, "fp16")])
@pytest.mark.parametrize("gate", [-1e-4, -0.1, -1.0])
def test_a_correct_low_precision_run_looks_like_a_member(dtype: torch.dtype, name: str, gate: float) -> None:
    exact_inputs = make_inputs(gate=gate)
    inputs = [
        x.detach().to(dtype).to(torch.float64).requires_grad_() for x in exact_inputs[:3]
    ] + exact_inputs[3:]
    draw = torch.Generator().manual_seed(3)
    do = torch.randn(1, 145, 4, 48, generator=draw).to(dtype).to(torch.float64)
    dht = torch.randn(1, 4, 32, 48, generator=draw).to(torch.float64)
    exact = run(gdn_chunk, inputs, do=do, dht=dht)
    members = [
        run(gdn_chunk, inputs, do=do, dht=dht, arithmetic=Noisy(operand=name, store=name, seed=s))
        for s in range(3)
    ]
    actual = kernel_like(inputs, do, dht, dtype)
    for tensor, value in exact.items():
        family = max(relative(member[tensor], value) for member in members)
        assert 0.2 * family < relative(actual[tensor], value) < 1.2 * family, tensor


def test_frozen_offsets_make_a_noisy_run_smooth() -> None:
    inputs = make_inputs()
    offsets = Offsets()
    exact = run(gdn_chunk, inputs, offsets=offsets, **SITES)
    offsets.freeze()
    smooth = run(gdn_chunk, inputs, offsets=offsets, arithmetic=Noisy(seed=1), **SITES)
    rough = run(gdn_chunk, inputs, arithmetic=Noisy(seed=1), **SITES)
    unrounded = relative(
        run(gdn_chunk, inputs, arithmetic=Noisy(seed=1))["final_state"], run(gdn_chunk, inputs)["final_state"]
    )
    assert relative(smooth["final_state"], exact["final_state"]) < 1.5 * unrounded
    assert relative(rough["final_state"], exact["final_state"]) > 2.0 * unrounded


@pytest.mark.parametrize("cu_seqlens", [None, boundaries(0, 70, 1, 74)], ids=["batch", "packed"])
@pytest.mark.parametrize("many", [False, True])
def test_chunks_computed_from_the_oracles_own_states_are_the_oracle(
    cu_seqlens: Tensor | None, many: bool
) -> None:
    if cu_seqlens is not None and many:
        cu_seqlens = torch.cat([cu_seqlens, cu_seqlens[-1] + torch.arange(1, 71)])
    length = 145 if cu_seqlens is None else int(cu_seqlens[-1])
    number = None if cu_seqlens is None else len(cu_seqlens) - 1
    inputs = make_inputs(T=length, K=16, N=number)
    options = {"cu_seqlens": cu_seqlens, **SITES}
    stages: dict[str, Tensor] = {}
    o, final_state = gdn_chunk(*inputs, stages=stages, **options)
    forced: dict[str, Tensor] = {}
    entries = stages["state_in"].detach()
    o_forced, final_forced = gdn_chunk(*inputs, stages=forced, entry_states=entries, **options)
    assert torch.equal(o_forced, o)
    assert torch.equal(final_forced, final_state)
    for name in ("state_out", "state_out_rounded", "v_new"):
        assert torch.equal(forced[name], stages[name]), name


def test_stages_are_what_their_names_say() -> None:
    inputs = make_inputs(T=100)
    stages: dict[str, Tensor] = {}
    _, final_state = gdn_chunk(*inputs, stages=stages, **SITES)
    shapes = {name: tuple(x.shape) for name, x in stages.items()}
    by_chunk = (1, 2, 4, 32, 48)
    assert shapes == {
        "g_cumsum": (1, 100, 4),
        "w": (1, 100, 4, 32),
        "w_rounded": (1, 100, 4, 32),
        "u": (1, 100, 4, 48),
        "v_new": (1, 100, 4, 48),
        "initial_rounded": (1, 4, 32, 48),
        "state_in": by_chunk,
        "state_out": by_chunk,
        "state_out_rounded": by_chunk,
    }
    assert torch.equal(stages["state_in"][:, 0], stages["initial_rounded"])
    assert torch.equal(stages["state_in"][:, 1], stages["state_out_rounded"][:, 0])
    assert torch.equal(stages["state_out_rounded"], qdq_state(stages["state_out"], block_v=16))
    assert torch.equal(stages["state_out_rounded"][:, -1], final_state)
    new = stages["u"] - torch.einsum(
        "bthk,bthkv->bthv", stages["w_rounded"], stages["state_in"].repeat_interleave(64, 1)[:, :100]
    )
    assert relative(stages["v_new"], new) < 1e-14


def test_given_stages_replace_the_computed_ones() -> None:
    inputs = make_inputs(T=100)
    stages: dict[str, Tensor] = {}
    o, final_state = gdn_chunk(*inputs, stages=stages, **SITES)
    for name in ("u", "w", "w_rounded", "v_new"):
        same = gdn_chunk(*inputs, given={name: stages[name]}, **SITES)
        assert torch.equal(same[0], o)
        other: dict[str, Tensor] = {}
        changed = gdn_chunk(*inputs, given={name: 2.0 * stages[name]}, stages=other, **SITES)
        assert relative(changed[0], o) > 1e-2
        if name != "v_new":
            assert torch.equal(other[name], 2.0 * stages[name])
    assert torch.equal(gdn_chunk(*inputs, given={"v_new": stages["v_new"]}, **SITES)[1], final_state)
    with pytest.raises(ValueError, match="given stages must be among"):
        gdn_chunk(*inputs, given={"o": o})


def test_magnitudes_bound_dg_and_leave_values_alone() -> None:
    inputs = make_inputs(gate=-1.0)
    do, dht = (torch.randn(*shape, dtype=torch.float64) for shape in ((1, 145, 4, 48), (1, 4, 32, 48)))
    dg = run(gdn_chunk, inputs, do=do, dht=dht, **SITES)["dg"]
    magnitude = dg_magnitude(*inputs, do=do, dht=dht, **SITES)
    assert magnitude.shape == dg.shape
    assert bool((magnitude >= dg.abs() * (1.0 - 1e-12)).all())
    assert float((magnitude / dg.abs()).median()) < 1e3
    assert not bool(dg_magnitude(*inputs, **SITES).any())


def test_unknown_precisions_are_refused() -> None:
    with pytest.raises(ValueError, match="operand must be one of ieee, fp32, tf32, bf16, fp16, got 'fp8'"):
        Noisy(operand="fp8")
    with pytest.raises(ValueError, match="accumulate must be fp32 or exact"):
        Noisy(accumulate="bf16")
    with pytest.raises(ValueError, match="mode must be one of"):
        Noisy(mode="up")
    assert EXACT.store(torch.ones(1)) == 1.0


def test_large_tensors_are_rounded_with_draws_of_their_own() -> None:
    x = torch.full((1_200_000,), 1.0 + 2.0**-9, dtype=torch.float64)
    rounded = Noisy(seed=4).round(x, "bf16")
    assert torch.equal(rounded, Noisy(seed=4).round(x, "bf16"))
    assert not torch.equal(rounded, Noisy(seed=5).round(x, "bf16"))
    up = (rounded > 1.0).to(torch.float64).mean()  # a quarter of a step above 1
    assert abs(float(up) - 0.25) < 0.01


def test_without_accumulation_noise_only_operands_and_stores_round() -> None:
    inputs = make_inputs(T=70)
    exact, quiet, noisy = (
        run(gdn_chunk, inputs, arithmetic=arithmetic)
        for arithmetic in (
            EXACT,
            Noisy(operand="ieee", store="fp32", accumulate="exact"),
            Noisy(operand="ieee", store="fp32"),
        )
    )
    for name, value in exact.items():
        assert 0.0 < relative(quiet[name], value) < relative(noisy[name], value), name


def test_the_gradient_of_a_factor_is_made_of_copies_only_where_asked() -> None:
    draw = torch.Generator().manual_seed(5)
    x, dy = (torch.randn(4, 300, dtype=torch.float64, generator=draw) for _ in range(2))
    factor = torch.rand(4, 1, dtype=torch.float64, generator=draw).requires_grad_()
    found: list[Tensor] = []
    for copies in (False, True):
        y = Noisy(store="bf16", accumulate="exact", mode="nearest").scaled(factor, x, copies=copies)
        found += torch.autograd.grad(y, factor, dy)
    exact = (dy * x).sum(-1, keepdim=True)
    rounded = (dy.bfloat16().double() * x.bfloat16().double()).sum(-1, keepdim=True)
    assert torch.equal(found[0], exact)
    assert torch.equal(found[1], rounded)
    assert not torch.equal(found[0], found[1])


def test_magnitudes_count_every_term_of_a_factor_s_gradient() -> None:
    x = torch.tensor([[1.0, -1.0, 2.0, -2.0]], dtype=torch.float64)
    factor = torch.ones(1, 1, dtype=torch.float64, requires_grad=True)
    (exact,) = torch.autograd.grad(EXACT.scaled(factor, x).sum(), factor)
    (sizes,) = torch.autograd.grad(MAGNITUDES.scaled(factor, x).sum(), factor)
    assert (float(exact), float(sizes)) == (0.0, 6.0)


@pytest.mark.parametrize("size", [1, BLOCK, 17, 40, 63, 64, 100])
def test_an_inverse_by_blocks_is_the_inverse_to_the_precision_of_its_products(size: int) -> None:
    draw = torch.Generator().manual_seed(size)
    lower = 0.3 * torch.randn(3, size, size, dtype=torch.float64, generator=draw).tril(-1)
    exact = torch.linalg.inv(torch.eye(size, dtype=torch.float64) + lower)
    errors = [relative(Noisy(solve=solve, seed=1)._solve(lower), exact) for solve in ("tf32", "fp32")]
    assert errors[1] < 1e-6
    assert size == 1 or 1e-5 < errors[0] < 0.05


def test_tipped_codes_change_an_outcome_by_more_than_noise_of_their_reach() -> None:
    inputs = make_inputs(T=130)
    reach = 2.0**-10
    exact = run(gdn_chunk, inputs, **SITES)
    tipped = run(gdn_chunk, inputs, offsets=Tipped(reach), **SITES)
    far = {name: relative(tipped[name], exact[name]) for name in exact}
    members = [
        run(gdn_chunk, inputs, arithmetic=Noisy("tf32", store="fp32", seed=s), **SITES) for s in range(3)
    ]
    for name in exact:
        assert far[name] > max(relative(member[name], exact[name]) for member in members)
        assert far[name] < 0.2
    off = run(gdn_chunk, inputs, offsets=Tipped(reach))
    assert all(torch.equal(off[name], x) for name, x in run(gdn_chunk, inputs).items())


def test_sites_are_tipped_as_far_as_the_noise_of_their_chunk_where_that_is_further() -> None:
    inputs = make_inputs(T=130)
    exact = run(gdn_chunk, inputs, **SITES)
    assert torch.equal(run(gdn_chunk, inputs, offsets=Tipped(0.0), **SITES)["o"], exact["o"])
    noise: dict[Hashable, Tensor] = {("state", (0, 0)): torch.tensor(1e9, dtype=torch.float64)}
    moved = (run(gdn_chunk, inputs, offsets=Tipped(0.0, noise), **SITES)["o"] != exact["o"]).any(-1)
    assert not bool(moved[:, :64].any())
    assert bool(moved[:, 64:].all())


def test_what_sites_are_given_differs_by_noise_alone_where_offsets_are_replayed() -> None:
    inputs = make_inputs(T=130)
    exact = Observed(Offsets())
    run(gdn_chunk, inputs, offsets=exact, **SITES)
    noisy = Observed(exact.offsets.freeze())
    run(gdn_chunk, inputs, arithmetic=Noisy("ieee", store="fp32", seed=1), offsets=noisy, **SITES)
    assert noisy.given.keys() == exact.given.keys()
    far = {key: relative(x, exact.given[key]) for key, x in noisy.given.items()}
    assert far.pop(("state", (0, "entry"))) == 0.0
    assert max(far.values()) < 1e-5
    assert min(far.values()) > 1e-9
