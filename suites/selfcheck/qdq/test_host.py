"""What the host side of QDQ promises: gradients, refusals, launches."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from kernels.launch import INTERPRETER, force_launch_row, recorded_launches
from kernels.options import BLOCK_V, CONVERSIONS, FORMATS, choose_conversion, conversions_on
from kernels.qdq import available_conversions, host, qdq_state, qdq_w
from references import qdq as reference
from suites.selfcheck.qdq.inputs import assert_same_bits

Tensor = torch.Tensor


@pytest.mark.parametrize("dtype", host.CARRIERS, ids=str)
@pytest.mark.parametrize("call", [qdq_state, qdq_w])
def test_gradient_is_the_incoming_one_at_every_element(
    call: Callable[[Tensor], Tensor], dtype: torch.dtype
) -> None:
    x = torch.randn(2, 3, 16, 24).to(dtype).requires_grad_()
    dy = torch.randn(2, 3, 16, 24).to(dtype) * 1e-4
    (dx,) = torch.autograd.grad(call(x), x, dy)
    assert torch.equal(dx, dy)


def test_gradient_survives_poison_and_saturation() -> None:
    x = torch.tensor([[float("nan"), 1.0], [1e30, 1e-30]], requires_grad=True)
    (dx,) = torch.autograd.grad(qdq_w(x), x, torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    assert dx.tolist() == [[1.0, 2.0], [3.0, 4.0]]


def test_result_is_a_new_tensor_and_the_input_is_left_alone() -> None:
    x = torch.randn(4, 16, 16)
    before = x.clone()
    y = qdq_state(x)
    assert y.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
    assert torch.equal(x, before)
    assert not torch.equal(y, x)


def test_rounding_twice_is_rounding_once_where_the_scale_is_a_power_of_two() -> None:
    x = torch.randn(5, 32).clamp(-400, 400)
    x[:, 0] = 448.0
    once = qdq_w(x)
    assert torch.equal(qdq_w(once), once)


def test_second_call_is_bit_equal() -> None:
    x = torch.randn(3, 40, 50)
    assert torch.equal(qdq_state(x, block_v=16), qdq_state(x, block_v=16))


REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "not a tensor": (lambda: qdq_w([1.0]), TypeError, "torch.Tensor"),  # type: ignore[arg-type]
    "fp64": (lambda: qdq_state(torch.zeros(2, 2, dtype=torch.float64)), TypeError, "float64"),
    "integers": (lambda: qdq_w(torch.zeros(2, dtype=torch.int32)), TypeError, "int32"),
    "a scalar w": (lambda: qdq_w(torch.tensor(1.0)), ValueError, "dimension"),
    "a vector state": (lambda: qdq_state(torch.zeros(4)), ValueError, "dimension"),
    "block_v 48": (lambda: qdq_state(torch.zeros(4, 4), block_v=48), ValueError, "48"),
    "block_v True": (lambda: qdq_state(torch.zeros(4, 4), block_v=True), ValueError, "True"),
    "unknown format": (lambda: qdq_state(torch.zeros(4, 4), fmt="e5m2"), ValueError, "e5m2"),
    "int8 w": (lambda: qdq_w(torch.zeros(4, 4), fmt="int8"), ValueError, "int8"),
    "native here": (lambda: qdq_w(torch.zeros(4), conversion="native"), ValueError, "interpreter"),
    "no such conversion": (lambda: qdq_w(torch.zeros(4), conversion="fast"), ValueError, "fast"),
    "native int8": (
        lambda: qdq_state(torch.zeros(4, 4), fmt="int8", conversion="native"),
        ValueError,
        "native",
    ),
    "K of 5000": (lambda: qdq_w(torch.zeros(5000)), ValueError, "5000"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refuses(what: str) -> None:
    call, error, words = REFUSED[what]
    with pytest.raises(error, match=words):
        call()


def test_refuses_a_cpu_tensor_outside_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "INTERPRET", False)
    with pytest.raises(ValueError, match="CUDA device, got cpu"):
        qdq_w(torch.zeros(4))


def test_conversions_follow_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    assert available_conversions() == ("portable",)
    assert conversions_on(89) == ("portable",)
    assert conversions_on(90) == ("native", "portable")
    assert conversions_on(120, "int8") == ("portable",)
    assert conversions_on(75) == ()
    assert choose_conversion(90, "e4m3") == "native"
    assert choose_conversion(89, "e4m3") == "portable"
    with pytest.raises(ValueError, match=r"SM 8\.9"):
        choose_conversion(89, "e4m3", "native")
    monkeypatch.setattr(host, "INTERPRET", False)
    if not torch.cuda.is_available():
        assert available_conversions() == ()


@pytest.mark.parametrize(
    ("capability", "expected"), [((9, 0), ("native", "portable")), ((8, 6), ("portable",))]
)
def test_conversions_are_read_from_the_device(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], expected: tuple[str, ...]
) -> None:
    monkeypatch.setattr(host, "INTERPRET", False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    assert available_conversions() == expected


def test_tables_agree() -> None:
    assert all(set(row.conversions) <= set(CONVERSIONS) for row in FORMATS.values())
    assert all(conversions_on(INTERPRETER, fmt) for fmt in FORMATS)
    assert list(BLOCK_V) == sorted(BLOCK_V)


@pytest.mark.parametrize("name", ["qdq_rows:e2048-w4", "qdq_rows:e4096-w4", "qdq_rows:e8192-w8"])
def test_every_row_can_be_forced_and_gives_the_same_bits(name: str) -> None:
    w = torch.randn(300, 48)
    with force_launch_row(name), recorded_launches() as ran:
        forced = qdq_w(w)
    assert ran == {"qdq_rows": name}
    assert_same_bits(forced, reference.qdq_w(w))


@pytest.mark.parametrize("name", ["qdq_tiles:w8", "qdq_tiles:w16", "qdq_tiles:w4-large"])
def test_every_row_for_large_tiles_can_be_forced(name: str) -> None:
    state = torch.randn(128, 64)
    with force_launch_row(name), recorded_launches() as ran:
        forced = qdq_state(state)
    assert ran == {"qdq_tiles": name}
    assert_same_bits(forced, reference.qdq_state(state))


def test_a_forced_row_that_does_not_fit_is_refused() -> None:
    with force_launch_row("qdq_tiles:w1"), pytest.raises(ValueError, match="must fit"):
        qdq_state(torch.zeros(128, 64))


@pytest.mark.parametrize("programs", [1, 7, 2**30, 2**30 + 1, 2**33 + 5])
def test_grids_hold_any_number_of_programs(programs: int) -> None:
    x, y = host.grid_of(programs)
    assert programs <= x * y < programs + x
    assert x < 2**31
    assert y < 2**16


def test_a_folded_grid_reaches_every_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "MAX_GRID_X", 3)
    state = torch.randn(5, 16, 20)
    assert_same_bits(qdq_state(state, block_v=16), reference.qdq_state(state, block_v=16))
    with force_launch_row("qdq_rows:e2048-w4"):
        w = torch.randn(40, 2048)
        assert_same_bits(qdq_w(w), reference.qdq_w(w))


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))), ids=str)
def test_merging_keeps_every_offset(order: tuple[int, ...]) -> None:
    x = torch.zeros(2, 3, 1, 4).permute(order)
    y = torch.zeros(x.shape)
    outer = host.merge_outer(x.shape, x.stride(), y.stride())
    for strides, tensor in ((outer.x_strides, x), (outer.y_strides, y)):
        walked = [
            sum(i * s for i, s in zip(index, strides, strict=True))
            for index in itertools.product(*map(range, outer.sizes))
        ]
        expected = [
            sum(i * s for i, s in zip(index, tensor.stride(), strict=True))
            for index in itertools.product(*map(range, tensor.shape))
        ]
        assert walked == expected
