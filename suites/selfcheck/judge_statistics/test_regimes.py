"""Claims about the inputs that regimes give."""

from __future__ import annotations

import itertools

import pytest
import torch

from qualify.problem import CARRIERS
from qualify.regimes import AXES, VALUE_REGIMES, build_problem
from suites.checks.evidence import fresh


def test_the_same_cell_gives_the_same_bits_and_another_seed_others() -> None:
    one, same, other = (build_problem({}, "random", seed) for seed in (3, 3, 4))
    assert torch.equal(one.q, same.q)
    assert not torch.equal(one.q, other.q)


@pytest.mark.parametrize("regime", VALUE_REGIMES)
@pytest.mark.parametrize("dtype", CARRIERS)
def test_every_regime_is_finite_in_every_carrier(regime: str, dtype: str) -> None:
    p = build_problem({"dtype": dtype, "length": "17", "heads": "16x256"}, regime, 1)
    for x in (p.q, p.k, p.v, p.g, p.beta, p.initial_state, p.do, p.dht):
        assert x is not None
        assert torch.isfinite(x).all()


@pytest.mark.parametrize(("axis", "level"), [(a, lv) for a, row in AXES.items() for lv in row.levels])
def test_every_level_builds(axis: str, level: str) -> None:
    p = build_problem({"length": "17", "heads": "16x16", axis: level}, "random", 0)
    assert p.g.max() <= 0 or p.use_gate_in_kernel
    assert p.v.shape[2] % p.q.shape[2] == 0
    if p.cu_seqlens is not None:
        assert int(p.cu_seqlens[-1]) == p.q.shape[1]
    if p.initial_state is not None:
        n = p.q.shape[0] if p.cu_seqlens is None else len(p.cu_seqlens) - 1
        assert p.initial_state.shape[0] == n


def test_heads_and_documents_differ() -> None:
    p = build_problem({"packing": "docs", "grouping": "hv4"}, "random", 0)
    assert p.initial_state is not None
    strength = p.g.mean((0, 1))
    size = p.v.float().std((0, 1, 3))
    documents = p.initial_state.std((1, 2, 3))
    for figures in (strength, size, documents):
        for a, b in itertools.combinations(figures.tolist(), 2):
            assert abs(a - b) > 0.02 * abs(a)


def test_views_hold_the_same_values_in_other_strides() -> None:
    packed = build_problem({}, "random", 0)
    views = build_problem({"strides": "views", "gradients": "strided"}, "random", 0)
    assert packed.do is not None
    assert views.do is not None
    assert views.dht is not None
    for one, other in (
        (packed.q, views.q),
        (packed.v, views.v),
        (packed.g, views.g),
        (packed.beta, views.beta),
        (packed.initial_state, views.initial_state),
        (packed.do, views.do),
        (packed.dht, views.dht),
    ):
        assert one is not None
        assert other is not None
        assert torch.equal(one, other)
        assert other.stride() != one.stride()


def test_an_expanded_gradient_is_one_number_and_stays_so_in_a_copy() -> None:
    p = build_problem({"gradients": "expanded", "packing": "docs", "heads": "16x16"}, "random", 0)
    copy = fresh(p)
    for one, other in ((p.do, copy.do), (p.dht, copy.dht)):
        assert one is not None
        assert other is not None
        assert set(one.stride()) == set(other.stride()) == {0}
        assert torch.equal(one, other)
        assert one.data_ptr() != other.data_ptr()


def test_boundaries_biases_and_rows_of_zeros_follow_their_levels() -> None:
    p = build_problem({"boundaries": "int32", "packing": "docs", "fused": "bare_gate"}, "random", 0)
    assert p.cu_seqlens is not None
    assert p.cu_seqlens.dtype is torch.int32
    assert p.A_log is not None
    assert p.dt_bias is None
    small = build_problem({"fused": "norm"}, "small", 0)
    assert not bool(small.k.any(-1).all())


def test_an_unknown_level_or_regime_is_named() -> None:
    with pytest.raises(ValueError, match="packing must be one of"):
        build_problem({"packing": "loose"}, "random", 0)
    with pytest.raises(ValueError, match="regime must be one of"):
        build_problem({}, "odd", 0)
