"""The exact regime is exact: whatever rounds to 8 bits or more, in any order, gives the oracle's bits."""

from __future__ import annotations

import pytest
import torch

from qualify.exact_audit import SPREAD, Audit, Sum, weight_of
from qualify.exact_regimes import audit_draft, build_exact_problem
from qualify.problem import TENSORS, Outcome, Problem, run_op
from references.arithmetic import Noisy
from references.gdn_recurrent import gdn_recurrent
from references.semantics import Semantics, SiteRule
from suites.checks.exact import exact_of
from suites.oracle import expected
from suites.subjects.eager import EAGER, EagerGDN

CELLS = (
    {"sites": "none", "length": "65", "packing": "docs"},
    {"sites": "state", "format": "int8", "length": "65", "initial": "zero", "layout": "vk"},
    {"sites": "w", "length": "65", "heads": "48x64"},
    {"sites": "both", "length": "129", "heads": "48x64", "grouping": "hv1"},
)
SEED = 7


def cell_name(cell: dict[str, str]) -> str:
    return ",".join(f"{axis}:{level}" for axis, level in cell.items())


@pytest.fixture(params=CELLS, ids=cell_name, scope="module")
def problem(request: pytest.FixtureRequest) -> Problem:
    return build_exact_problem(request.param, SEED)


def different(a: Outcome, b: Outcome) -> list[str]:
    """Names of the tensors that differ once they are in the dtypes of `b`."""
    found = []
    for name in TENSORS:
        x, y = a[name], b[name]
        if x is not None and y is not None and not torch.equal(x.to(y.dtype), y):
            found.append(name)
    return found


class Rounding(Noisy):
    """Rounds operands, stored tensors and fp32 sums; the exponential of zero is one, as on all hardware."""

    def _exponential(self, value: torch.Tensor, exponent: torch.Tensor) -> torch.Tensor:
        assert not bool(exponent[exponent.isfinite()].any())
        return value


@pytest.mark.parametrize("precision", ["bf16", "fp16", "tf32"])
def test_noise_of_any_precision_finds_nothing_to_round(problem: Problem, precision: str) -> None:
    store = "bf16" if precision == "bf16" else "fp16"
    for seed, mode in enumerate(("stochastic", "toward_zero", "nearest")):
        noisy = Rounding(
            operand=precision, store=store, accumulate="exact", solve=precision, seed=seed, mode=mode
        )
        assert different(expected(problem, arithmetic=noisy), expected(problem)) == []


@pytest.mark.parametrize("carrier", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_eager_subject_agrees_in_every_carrier(problem: Problem, carrier: torch.dtype) -> None:
    cast = {
        n: getattr(problem, n).to(carrier) for n in ("q", "k", "v", "do") if getattr(problem, n) is not None
    }
    assert different(expected(problem), run_op(EAGER.chunk_gated_delta_rule, problem.with_(**cast))) == []


def test_the_token_recurrence_agrees_where_the_chunk_has_no_w_site() -> None:
    for cell in CELLS[:2]:
        problem = build_exact_problem(cell, SEED)
        options = {"scale", "cu_seqlens", "state_v_first", "state_format", "state_block_v"}

        def recurrent(*tensors: torch.Tensor, **given: object) -> tuple[torch.Tensor, torch.Tensor]:
            return gdn_recurrent(*tensors, **{k: v for k, v in given.items() if k in options})  # type: ignore[arg-type] # noqa: B023

        assert different(expected(problem), expected(problem, op=recurrent)) == []


def test_a_single_wrong_bit_anywhere_is_seen() -> None:
    exact = exact_of({**CELLS[3], "dtype": "bf16"}, SEED, "cpu")
    sound = run_op(EAGER.chunk_gated_delta_rule, exact.problem)
    assert all(c.passed for c in exact.judge(sound))
    for name in TENSORS:
        if name == "dg":
            continue  # fp32 factors that are no powers of two: a claim of its own
        tensors = dict(sound.tensors)
        changed = tensors[name]
        assert changed is not None
        changed = changed.clone()
        flat = changed.view(-1)
        place = int(flat.abs().argmax())
        flat[place] = torch.nextafter(flat[place].float(), torch.tensor(torch.inf)).to(flat.dtype)
        if flat[place] == sound.tensors[name].view(-1)[place]:  # type: ignore[union-attr]
            flat[place] *= 1.0 + torch.finfo(flat.dtype).eps
        tensors[name] = changed
        failing = [c.tensor for c in exact.judge(Outcome(tensors)) if not c.passed]
        assert failing == [name]


def test_the_sites_move_most_of_what_they_see() -> None:
    problem = build_exact_problem(CELLS[3], SEED)
    plain = expected(problem)
    for site in ("state", "w"):
        off = expected(problem, semantics=Semantics(**{site: SiteRule(active=False)}))  # type: ignore[arg-type]
        assert {"o", "final_state", "dq", "dk"} <= set(different(off, plain)), site


def test_a_fault_is_named_when_it_is_a_known_one() -> None:
    class Truncating(EagerGDN):
        def incoming(self, dht: torch.Tensor, n: object) -> torch.Tensor:
            return torch.zeros_like(dht)

    exact = exact_of({**CELLS[1], "dtype": "fp32"}, SEED, "cpu")
    found = exact.judge(run_op(Truncating().chunk_gated_delta_rule, exact.problem))
    assert {c.looks_like for c in found if not c.passed} == {"dht_ignored"}


def test_the_weight_of_a_number_tells_its_lowest_bit() -> None:
    odd = torch.tensor([1, -1, 3, -5, 2**52 + 1, 2**53 - 1], dtype=torch.float64)
    exponents = torch.arange(-60, 60, dtype=torch.float64)
    weights = weight_of(odd[:, None] * torch.exp2(exponents))
    assert torch.equal(weights, torch.exp2(-SPREAD * exponents).expand_as(weights))
    assert torch.equal(weight_of(torch.tensor([0.0, -0.0], dtype=torch.float64)), torch.zeros(2).double())


def test_sums_that_need_more_bits_are_found() -> None:
    audit = Audit()
    row = Sum.of(torch.full((1, 3), 1.0, dtype=torch.float64))
    fits = Sum.of(torch.tensor([[128.0], [127.0], [1.0]], dtype=torch.float64))
    audit.stored("fits", row @ fits)
    assert audit.faults == {}
    audit.stored("wide", row @ Sum.of(torch.tensor([[128.0], [-128.0], [1.0]], dtype=torch.float64)))
    assert set(audit.faults) == {"wide"}, "a sum that cancels needs its terms' bits all the same"


def test_a_spoilt_draft_is_not_proved() -> None:
    from qualify import exact_regimes

    at = tuple(
        sorted(
            (axis, CELLS[0].get(axis, level))
            for axis, level in exact_regimes.DEFAULTS.items()
            if axis not in ("dtype", "layout")
        )
    )
    draft = exact_regimes._proved(at, SEED)
    assert audit_draft(draft) == []
    draft.initial[0, 0, 1, 1] += 2.0**-9
    try:
        assert audit_draft(draft) != []
    finally:
        exact_regimes._proved.cache_clear()


@pytest.mark.parametrize(("factor", "passes"), [(1.0 + 2.0**-23, True), (1.0 + 2.0**-19, False)])
def test_dg_alone_may_be_a_few_fp32_roundings_off(factor: float, passes: bool) -> None:
    exact = exact_of({"dtype": "bf16", "sites": "none", "length": "65"}, SEED, "cpu")
    outcome = run_op(EAGER.chunk_gated_delta_rule, exact.problem)
    dg, dbeta = outcome["dg"], outcome["dbeta"]
    assert dg is not None
    assert dbeta is not None
    failing = [c.tensor for c in exact.judge(Outcome({**outcome.tensors, "dg": dg * factor})) if not c.passed]
    assert failing == ([] if passes else ["dg"])
    others = exact.judge(Outcome({**outcome.tensors, "dbeta": dbeta * (1.0 + 2.0**-23)}))
    assert [c.tensor for c in others if not c.passed] == ["dbeta"]
