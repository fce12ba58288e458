"""ModelOpt's configuration, switches, calibration, save and restore act on the sites."""

# mypy: disable-error-code="no-any-return, union-attr, index, arg-type, operator, assignment, misc"
# mypy: allow-untyped-calls

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch

from kernels.adapters import megatron
from kernels.adapters import modelopt as mtq
from kernels.adapters.attach import policy_of
from kernels.policy import OFF, Resolved, policy_from_config
from kernels.quantizers import Sites
from suites.selfcheck.adapters.conftest import Op
from suites.selfcheck.adapters.standins import Dense, Held, Model, Named, some_other_kernel
from suites.selfcheck.adapters.test_policy import ALL_OFF, E4M3_STATE, INT8_STATE, STATE_ON, W_ON, rule

pytest.importorskip(
    "modelopt.torch.quantization", reason="nvidia-modelopt is not installed", exc_type=ImportError
)

Tensor = torch.Tensor

BOTH = {
    "quant_cfg": [ALL_OFF, STATE_ON, W_ON],
    "algorithm": None,
    "linear_attention": [
        rule(
            "decoder.layers.*.self_attention", chunk_size=64, state={"block_v": 32}, solve={"method": "exact"}
        )
    ],
}


def quantize(model: torch.nn.Module, config: dict[str, Any], loop: Any = None) -> torch.nn.Module:
    return mtq.quantize(model, config, loop, verbose=False)


def policies(model: torch.nn.Module) -> list[Resolved]:
    return [policy_of(layer.self_attention).resolved for layer in model.decoder.layers]


def sites(model: torch.nn.Module) -> list[Sites]:
    return [found.sites for found in policies(model)]


def test_the_configuration_of_the_guide_switches_both_sites_on(op: Op, x: Tensor) -> None:
    model = Model(Held(), Named())
    before = model(x)
    quantize(model, BOTH)
    assert not torch.equal(model(x), before)
    assert [(o["state_format"], o["state_block_v"], o["w_format"]) for o in op.options] == [
        ("e4m3", 32, "e4m3")
    ] * 2


def test_quantizers_start_disabled_and_off_is_the_original(op: Op, x: Tensor) -> None:
    model = Model(Held(), Named())
    before = model(x)
    quantize(model, {"quant_cfg": [ALL_OFF], "algorithm": None})
    assert sites(model) == [Sites(), Sites()]
    assert torch.equal(model(x), before)
    assert op.options == []


@pytest.mark.parametrize(
    "preset", ["FP8_DEFAULT_CFG", "INT8_DEFAULT_CFG", "MXFP8_DEFAULT_CFG", "NVFP4_DEFAULT_CFG"]
)
def test_standard_recipes_leave_both_sites_off(preset: str) -> None:
    config = getattr(mtq, preset)
    model = Model(Held(), Named())
    quantize(model, {**config, "algorithm": None})
    assert sites(model) == [Sites(), Sites()]
    assert model.decoder.layers[0].self_attention.in_proj.weight_quantizer.is_enabled


def test_a_wildcard_does_not_switch_sites_on() -> None:
    model = Model(Held())
    quantize(
        model,
        {"quant_cfg": [{"quantizer_name": "*", "cfg": {"num_bits": 8, "axis": None}}], "algorithm": None},
    )
    assert sites(model) == [Sites()]


def test_modelopt_switches_act_on_the_sites(op: Op, x: Tensor) -> None:
    model = Model(Held())
    quantize(model, BOTH)
    mtq.disable_quantizer(model, "*gdn_w_quantizer")
    assert sites(model) == [Sites("e4m3", None)]
    mtq.disable_quantizer(model, "*")
    model(x)
    assert op.options == []
    mtq.enable_quantizer(model, "*gdn_*_quantizer")
    assert sites(model) == [Sites("e4m3", "e4m3")]
    model(x)
    assert len(op.options) == 1


def test_a_quantizer_enabled_without_attributes_has_the_default_format() -> None:
    model = Model(Held())
    quantize(model, {"quant_cfg": [ALL_OFF], "algorithm": None})
    mtq.enable_quantizer(model, "*gdn_*_quantizer")
    assert sites(model) == [Sites("e4m3", "e4m3")]


def test_int8_state() -> None:
    model = Model(Held())
    quantize(model, {"quant_cfg": [ALL_OFF, STATE_ON | {"cfg": INT8_STATE}], "algorithm": None})
    assert sites(model) == [Sites("int8", None)]


def test_policies_and_sites_survive_calibration_of_other_quantizers(op: Op, x: Tensor) -> None:
    model = Model(Held(), Named())
    config = {**BOTH, "quant_cfg": [*mtq.FP8_DEFAULT_CFG["quant_cfg"], STATE_ON, W_ON], "algorithm": "max"}
    quantize(model, config, lambda m: m(x))
    assert op.options == []  # sites are paused while statistics are taken, like every quantizer
    assert sites(model) == [Sites("e4m3", "e4m3")] * 2
    assert {p.policy.state_block_v for p in policies(model)} == {32}
    assert model.decoder.layers[0].self_attention.in_proj.input_quantizer.amax is not None
    model(x)
    assert len(op.options) == 2


def test_a_second_configuration_changes_what_it_names(op: Op) -> None:
    model = Model(Held(), Held())
    quantize(model, BOTH)
    quantize(
        model, {"quant_cfg": [{"quantizer_name": "*1.*gdn_w_quantizer", "enable": False}], "algorithm": None}
    )
    assert sites(model) == [Sites("e4m3", "e4m3"), Sites("e4m3", None)]
    assert {p.policy.state_block_v for p in policies(model)} == {32}


def test_saving_and_restoring_with_modelopt(op: Op, x: Tensor) -> None:
    import modelopt.torch.opt as mto

    model = Model(Held(), Named())
    quantize(model, BOTH)
    edited = Resolved(Sites("int8", None), policy_from_config({"state": {"block_v": 128}}))
    policy_of(model.decoder.layers[1].self_attention).resolved = edited
    mtq.disable_quantizer(model, "*layers.0.*gdn_w_quantizer")
    file = io.BytesIO()
    mto.save(model, file)
    file.seek(0)
    mtq.install()
    fresh = mto.restore(Model(Held(), Named()), file)
    assert policies(fresh) == policies(model)
    assert policies(fresh)[1] == edited
    assert torch.equal(fresh(x), model(x))


def test_a_checkpoint_from_before_switches_the_quantizers_off() -> None:
    model = Model(Held())
    quantize(model, BOTH)
    model.load_state_dict(Model(Held()).state_dict())
    assert policies(model) == [OFF]
    assert not model.decoder.layers[0].self_attention.gdn_state_quantizer.is_enabled


def test_a_copied_model_reads_its_own_quantizers(op: Op, x: Tensor) -> None:
    model = Model(Held(), Named())
    quantize(model, BOTH)
    twin = copy.deepcopy(model)
    mtq.disable_quantizer(model, "*")
    twin(x)
    assert len(op.options) == 2
    model(x)
    assert len(op.options) == 2


def test_dense_layers_are_ignored_and_a_model_of_them_is_modelopts_alone() -> None:
    model = Model(Dense())
    quantize(model, {"quant_cfg": [ALL_OFF], "algorithm": None})
    with pytest.raises(ValueError, match="must match"):
        quantize(Model(Dense()), BOTH)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "static": (E4M3_STATE | {"type": "static"}, "type"),
    "clipped gradient": (E4M3_STATE | {"pass_through_bwd": False}, "identity"),
    "blocks": (
        {"num_bits": (4, 3), "type": "dynamic", "block_sizes": {-1: 32, "type": "dynamic"}},
        "block_sizes",
    ),
    "rotated": (E4M3_STATE | {"rotate": True}, "rotat"),
    "custom": (E4M3_STATE | {"backend": "mine"}, "backend"),
    "wide int8": (INT8_STATE | {"narrow_range": False}, "narrow_range"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_quantizer_that_a_site_cannot_be_is_refused_before_anything_changes(what: str) -> None:
    cfg, words = REFUSED[what]
    model = Model(Held())
    with pytest.raises((ValueError, TypeError), match=words):
        quantize(model, {"quant_cfg": [STATE_ON | {"cfg": cfg}], "algorithm": None})
    assert type(model.decoder.layers[0].self_attention) is Held


@pytest.mark.parametrize("what", ["static", "clipped gradient", "rotated"])
def test_a_quantizer_that_was_changed_behind_our_back_is_refused_at_the_call(
    what: str, op: Op, x: Tensor
) -> None:
    cfg, words = REFUSED[what]
    model = Model(Held())
    quantize(model, BOTH)
    mtq.set_quantizer_by_cfg(model, [STATE_ON | {"cfg": cfg}])
    with pytest.raises(ValueError, match=words):
        model(x)


def test_a_smoothed_quantizer_is_refused_at_the_call(op: Op, x: Tensor) -> None:
    model = Model(Held())
    quantize(model, BOTH)
    model.decoder.layers[0].self_attention.gdn_w_quantizer.pre_quant_scale = torch.ones(4)
    with pytest.raises(ValueError, match="pre_quant_scale"):
        model(x)


def test_several_quantizers_in_a_row_are_refused_at_the_call(op: Op, x: Tensor) -> None:
    model = Model(Held())
    quantize(model, BOTH)
    mtq.set_quantizer_by_cfg(model, [STATE_ON | {"cfg": [E4M3_STATE, E4M3_STATE]}])
    with pytest.raises(TypeError, match="one quantizer"):
        model(x)


def test_a_module_that_cannot_round_is_refused() -> None:
    for module in (Held(cp_size=2), Held(deterministic_mode=True)):
        with pytest.raises(NotImplementedError):
            quantize(Model(module), BOTH)
    unknown = Held()
    unknown.gated_delta_rule = some_other_kernel
    with pytest.raises(NotImplementedError, match="some_other_kernel"):
        quantize(Model(unknown), BOTH)


def test_a_model_converted_by_another_adapter_is_refused() -> None:
    model = Model(Held())
    megatron.convert(model, {"quant_cfg": [STATE_ON]}, verbose=False)
    with pytest.raises(ValueError, match="call revert first"):
        quantize(model, BOTH)
    megatron.revert(model)
    quantize(model, BOTH)


def test_the_table_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    mtq.quantize(Model(Held()), BOTH)
    assert "decoder.layers.0.self_attention  e4m3   32       e4m3" in capsys.readouterr().out
