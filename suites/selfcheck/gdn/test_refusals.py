"""What the contract refuses is refused before anything is launched; the error says rule, value and remedy."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from kernels.gdn import chunk_gated_delta_rule, core, stages
from kernels.gdn.validate import check_tensors
from kernels.launch import recorded_launches
from kernels.options import CHUNK_SIZE

B, T, H, HV, K, V = 1, 5, 2, 4, 16, 24


def arguments() -> dict[str, Any]:
    """A call that is allowed."""
    return {
        "q": torch.zeros(B, T, H, K),
        "k": torch.zeros(B, T, H, K),
        "v": torch.zeros(B, T, HV, V),
        "g": torch.zeros(B, T, HV),
        "beta": torch.zeros(B, T, HV),
        "initial_state": torch.zeros(B, HV, K, V),
    }


Refusal = tuple[Mapping[str, Any], type[Exception], str]

REFUSED: Mapping[str, Refusal] = {
    "not a tensor": ({"g": 0.5}, TypeError, "g must be a torch.Tensor, got float"),
    "another device": ({"k": torch.zeros(B, T, H, K, device="meta")}, ValueError, "k must be on the device"),
    "fp64 carrier": ({"q": torch.zeros(B, T, H, K).double()}, TypeError, "q must be fp32, bf16 or fp16"),
    "two carriers": ({"k": torch.zeros(B, T, H, K).bfloat16()}, TypeError, "k must have the dtype of q"),
    "integer gates": ({"g": torch.zeros(B, T, HV).long()}, TypeError, "g must have a float dtype"),
    "bf16 state": ({"initial_state": torch.zeros(B, HV, K, V).bfloat16()}, TypeError, "must be fp32"),
    "float boundaries": ({"cu_seqlens": torch.tensor([0.0, T])}, TypeError, "must be int32 or int64"),
    "head first without sequences": (
        {"q": torch.zeros(T, H, K)},
        ValueError,
        r"must be \[B, T, heads, size\]",
    ),
    "k of another shape": ({"k": torch.zeros(B, T, H, K + 1)}, ValueError, "k must have the shape of q"),
    "v of another length": ({"v": torch.zeros(B, T + 1, HV, V)}, ValueError, "v must have q's B and T"),
    "heads that do not group": (
        {"v": torch.zeros(B, T, 3, V), "initial_state": None},
        ValueError,
        "HV must be a positive multiple of H, got HV = 3, H = 2",
    ),
    "gates per channel": ({"g": torch.zeros(B, T, HV, K)}, ValueError, r"g must be \[B, T, HV\]"),
    "small K": (
        {"q": torch.zeros(B, T, H, 8), "k": torch.zeros(B, T, H, 8)},
        ValueError,
        "K must be from 16 to 256, got 8",
    ),
    "large V": ({"v": torch.zeros(B, T, HV, 257)}, ValueError, "V must be from 16 to 256, got 257"),
    "state of another layout": (
        {"state_v_first": True},
        ValueError,
        r"initial_state must be \[N, HV, V, K\] = \(1, 4, 24, 16\), got \(1, 4, 16, 24\)",
    ),
    "a state for each of three sequences": (
        {"cu_seqlens": torch.tensor([0, 1, 2, T])},
        ValueError,
        r"initial_state must be \[N, HV, K, V\] = \(3,",
    ),
    "boundaries of nothing": ({"cu_seqlens": torch.tensor([0])}, ValueError, "N >= 1"),
    "packed batch": (
        {name: torch.zeros(2, *x.shape[1:]) for name, x in arguments().items()}
        | {"cu_seqlens": torch.tensor([0, T])},
        ValueError,
        "cu_seqlens needs B = 1, got B = 2",
    ),
    "boundaries from 1": ({"cu_seqlens": torch.tensor([1, T])}, ValueError, "must start at 0, got 1"),
    "boundaries that leave tokens out": (
        {"cu_seqlens": torch.tensor([0, T - 1])},
        ValueError,
        "must end at T = 5, got 4",
    ),
    "falling boundaries": (
        {"cu_seqlens": torch.tensor([0, 3, 2, T]), "initial_state": None},
        ValueError,
        "must not fall, got 3 then 2 at 1",
    ),
    "state format": (
        {"state_format": "e5m2"},
        ValueError,
        "format of the state site must be one of .*'e5m2'",
    ),
    "w format": ({"w_format": "int8"}, ValueError, "format of the w site must be one of .*'int8'"),
    "block_v": ({"state_block_v": 48}, ValueError, "block_v must be one of .*, got 48"),
    "block_v of True": ({"state_block_v": True}, ValueError, "block_v must be one of .*, got True"),
    "scale": ({"scale": float("inf")}, ValueError, "scale must be a finite number, got inf"),
    "scale that is a tensor": ({"scale": torch.ones(())}, ValueError, "scale must be a finite number"),
    "precision": ({"input_precision": "bf16"}, ValueError, "input_precision must be one of .*, got 'bf16'"),
    "negative eigenvalues alone": (
        {"allow_neg_eigval": True},
        ValueError,
        "needs use_beta_sigmoid_in_kernel",
    ),
    "gate without A_log": ({"use_gate_in_kernel": True}, ValueError, "needs A_log, got None"),
    "A_log without gate": ({"A_log": torch.zeros(HV)}, ValueError, "A_log needs use_gate_in_kernel"),
    "integer dt_bias": (
        {"use_gate_in_kernel": True, "A_log": torch.zeros(HV), "dt_bias": torch.zeros(HV).int()},
        TypeError,
        "dt_bias must be a float tensor, got torch.int32",
    ),
    "A_log of q/k heads": (
        {"use_gate_in_kernel": True, "A_log": torch.zeros(H)},
        ValueError,
        "A_log must hold HV = 4 values",
    ),
}


@pytest.mark.parametrize("op", [chunk_gated_delta_rule, stages])
@pytest.mark.parametrize("what", REFUSED)
def test_refusals_name_rule_value_and_remedy_and_launch_nothing(what: str, op: Any) -> None:
    change, error, message = REFUSED[what]
    with recorded_launches() as launches, pytest.raises(error, match=message) as raised:
        op(**(arguments() | dict(change)))
    assert launches == {}
    assert re.search(r"\b(must|needs)\b.*\bgot\b.*; \w+", str(raised.value), re.DOTALL)


@pytest.mark.parametrize(
    "option", ["chunk_size", "solve", "gradient_rule", "static_scale", "quantize_initial"]
)
def test_rules_that_the_op_does_not_have_are_no_arguments_of_it(option: str) -> None:
    assert CHUNK_SIZE == 64
    with pytest.raises(TypeError, match=option):
        chunk_gated_delta_rule(**(arguments() | {option: 32}))


def test_an_older_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kernels.gdn.validate.sm_of", lambda x: 75)
    a = arguments()
    with pytest.raises(NotImplementedError, match=r"needs SM 8.0 or newer, got SM 7.5; use another device"):
        check_tensors(a["q"], a["k"], a["v"], a["g"], a["beta"], a["initial_state"], None, False)


@pytest.mark.parametrize(
    ("sm", "carrier", "K"), [(86, "float32", 144), (89, "float16", 256), (121, "float32", 256)]
)
def test_more_fp32_operands_than_shared_memory_holds_are_refused(
    monkeypatch: pytest.MonkeyPatch, sm: int, carrier: str, K: int
) -> None:
    monkeypatch.setattr("kernels.gdn.validate.sm_of", lambda x: sm)
    a = arguments()
    wide = a["q"].new_zeros(*a["q"].shape[:3], K).to(getattr(torch, carrier))
    others = (a["v"].to(wide.dtype), a["g"], a["beta"], None, None, False)
    with pytest.raises(NotImplementedError, match=f"K must be at most 128 .* got K = {K}; use bf16"):
        check_tensors(wide, wide, *others)
    monkeypatch.setattr("kernels.gdn.validate.sm_of", lambda x: 90)
    check_tensors(wide, wide, *others)


def test_boundaries_are_read_again_after_they_were_changed_in_place() -> None:
    a = arguments() | {"initial_state": None}
    bounds = torch.tensor([0, T])
    chunk_gated_delta_rule(**a, cu_seqlens=bounds)
    bounds[1] = T - 1
    with pytest.raises(ValueError, match="must end at T = 5, got 4"):
        chunk_gated_delta_rule(**a, cu_seqlens=bounds)


def test_no_launch_row_for_a_device_is_an_error() -> None:
    a = arguments()
    call = core.Call.of(a["q"], a["v"], None, core.Settings(scale=1.0))
    with pytest.raises(ValueError, match="has no launch row"):
        call.row("gdn_no_such_kernel")
