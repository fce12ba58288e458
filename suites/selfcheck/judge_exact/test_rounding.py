"""The probe of how results are written sees a cut in every 16-bit carrier, and takes every correct one."""

from __future__ import annotations

import pytest
import torch

from qualify.case import Case
from qualify.problem import CARRIERS
from qualify.subjects import subject_from_module
from suites.checks.rounding import gradients, outputs, run, run_strength, states
from suites.controls.table import CONTROLS
from suites.good.table import GOOD
from suites.oracle import expected
from suites.subjects.eager import EagerGDN, Notes

Tensor = torch.Tensor

JUDGED = ["o", "dbeta", "keys.dq", "keys.dk", "state.dv", "state.dg"]


def case(dtype: str, sites: str = "none", heads: str = "16x16", packing: str = "docs") -> Case:
    levels = {"dtype": dtype, "sites": sites, "heads": heads, "packing": packing, "scalars": "carrier"}
    return Case("probe.rounding", levels, "probe", 5, "any")


class ThroughBfloat16(EagerGDN):
    """Rounds twice, the first time to fewer bits than fp16 has."""

    def scatter(self, y: Tensor, like: Tensor, n: Notes) -> Tensor:
        """Of rounded results."""
        return super().scatter(y.bfloat16().float(), like, n)


class ThroughNineBits(EagerGDN):
    """Rounds to one bit more than a carrier of eight has."""

    def scatter(self, y: Tensor, like: Tensor, n: Notes) -> Tensor:
        """Of rounded results."""
        mantissa, exponent = torch.frexp(y)
        return super().scatter(torch.ldexp(torch.round(mantissa * 2**9) / 2**9, exponent), like, n)


@pytest.mark.parametrize("dtype", CARRIERS)
@pytest.mark.parametrize("name", GOOD)
def test_a_correct_implementation_writes_the_expected_bits(name: str, dtype: str) -> None:
    for sites, heads, packing in (("none", "16x16", "docs"), ("both", "64x64", "batch")):
        found = run(case(dtype, sites, heads, packing), GOOD[name].subject())
        assert [c.tensor for c in found.comparisons if not c.passed] == []
        assert [c.tensor for c in found.comparisons] == JUDGED


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_most_elements_are_longer_than_the_carrier(dtype: str) -> None:
    for exact in (outputs(case(dtype)), gradients(case(dtype)), states(case(dtype))):
        found = expected(exact.problem)
        for name in exact.parts:
            x = found[name]
            assert x is not None
            long = x != x.to(CARRIERS[dtype]).double()
            assert float(long.double().mean()) > 0.5, name


@pytest.mark.parametrize("faulty", [ThroughBfloat16, ThroughNineBits])
def test_a_result_that_is_rounded_twice_fails(faulty: type[EagerGDN]) -> None:
    dtype = "fp16" if faulty is ThroughBfloat16 else "bf16"
    found = run(case(dtype), subject_from_module(faulty(), "faulty"))
    assert [c.tensor for c in found.comparisons if not c.passed] == JUDGED


@pytest.mark.parametrize("dtype", CARRIERS)
@pytest.mark.parametrize("fused", ["sigmoid", "neg"])
@pytest.mark.parametrize("scalars", ["fp32", "bf16"])
def test_the_slope_of_a_sigmoid_is_within_its_bound(dtype: str, fused: str, scalars: str) -> None:
    levels = {**case(dtype).levels, "fused": fused, "scalars": scalars}
    asked = Case("probe.strength", levels, "probe", 5, "any")
    for name in ("eager", "plain", "own_totals", "recomputed"):
        (found,) = run_strength(asked, GOOD[name].subject()).comparisons
        assert found.error < (0.3 if scalars == "fp32" else 0.6)  # a rounding to bf16 takes its half
    (missed,) = run_strength(asked, CONTROLS["sigmoid_saved_in_bf16"].subject()).comparisons
    assert missed.error > 100
