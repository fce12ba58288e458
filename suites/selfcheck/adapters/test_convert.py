"""Conversion finds the kernel of each layout, rounds exactly where the policy says, and can be undone."""

# mypy: disable-error-code="no-any-return, union-attr, index, arg-type, operator, assignment, misc"
# mypy: allow-untyped-calls

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from kernels.adapters import attach, checks, hf, megatron
from kernels.adapters.attach import SitePolicy, is_converted, original_kernel, policy_of
from kernels.adapters.convert import convert_model, supported_modules
from kernels.adapters.layouts import layout_of
from kernels.policy import OFF, Resolved
from kernels.quantizers import Sites
from suites.selfcheck.adapters import standins
from suites.selfcheck.adapters.conftest import Op
from suites.selfcheck.adapters.standins import Dense, Held, HeldSplit, Model, Named, NamedSplit
from suites.selfcheck.adapters.test_policy import ALL_OFF, STATE_ON, W_ON, rule

Tensor = torch.Tensor

LAYOUTS = {
    "held": Held,
    "held, split": HeldSplit,
    "named": Named,
    "named, split": NamedSplit,
}
ON = {"quant_cfg": [ALL_OFF, STATE_ON, W_ON]}


def convert(model: torch.nn.Module, config: dict[str, Any] = ON) -> Any:
    return megatron.convert(model, config, verbose=False)


def attention(model: Model, layer: int = 0) -> torch.nn.Module:
    found: torch.nn.Module = model.decoder.layers[layer].self_attention
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_site_that_is_on_calls_the_op_with_its_options(layout: str, op: Op, x: Tensor) -> None:
    model = Model(LAYOUTS[layout]())
    before = model(x)
    convert(model, {**ON, "linear_attention": [rule("decoder*", state={"block_v": 32})]})
    assert not torch.equal(model(x), before)
    (options,) = op.options
    assert options["state_format"] == "e4m3"
    assert options["state_block_v"] == 32
    assert options["w_format"] == "e4m3"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_off_calls_the_very_original_kernel(
    layout: str, op: Op, x: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[dict[str, Any]] = []
    plain = standins.chunk_gated_delta_rule

    def chunk_gated_delta_rule(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, None]:
        calls.append(options)
        return plain(q, k, v)

    monkeypatch.setattr(standins, "chunk_gated_delta_rule", chunk_gated_delta_rule)
    model = Model(LAYOUTS[layout]())
    before = model(x)
    convert(model, {"quant_cfg": [ALL_OFF]})
    assert original_kernel(attention(model)) is chunk_gated_delta_rule
    assert torch.equal(model(x), before)
    assert len(calls) == 2
    assert calls[0] == calls[1]
    assert op.options == []


@pytest.mark.parametrize("layout", LAYOUTS)
def test_reverting_restores_the_module_itself(layout: str, op: Op, x: Tensor) -> None:
    kernel = standins.chunk_gated_delta_rule
    model = Model(LAYOUTS[layout](), LAYOUTS[layout]())
    attributes = [dict(attention(model, n).__dict__) for n in range(2)]
    keys, before = list(model.state_dict()), model(x)
    convert(model)
    assert standins.chunk_gated_delta_rule is kernel or "named" in layout
    megatron.revert(model)
    assert [dict(attention(model, n).__dict__) for n in range(2)] == attributes
    assert standins.chunk_gated_delta_rule is kernel
    assert list(model.state_dict()) == keys
    assert torch.equal(model(x), before)
    megatron.revert(model)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_module_has_its_own_policy(layout: str, op: Op, x: Tensor) -> None:
    model = Model(LAYOUTS[layout](), Dense(), LAYOUTS[layout]())
    convert(model, {"quant_cfg": [STATE_ON | {"quantizer_name": "*layers.2.*gdn_state_quantizer"}]})
    model(x)
    assert [o["state_format"] for o in op.options] == ["e4m3"]
    assert policy_of(attention(model, 0)).resolved == OFF
    assert policy_of(attention(model, 2)).resolved.sites == Sites("e4m3", None)
    assert not is_converted(attention(model, 1))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_flow_and_recompute_gives_the_same(layout: str, op: Op, x: Tensor) -> None:
    model = Model(LAYOUTS[layout]())
    convert(model)
    gradients = []
    for call in (model, lambda y: checkpoint(model, y, use_reentrant=False)):
        leaf = x.clone().requires_grad_()
        call(leaf).square().sum().backward()
        gradients.append(leaf.grad)
    assert torch.equal(gradients[0], gradients[1])
    assert len(op.options) == 3


def test_names_are_seen_through_wrappers(op: Op) -> None:
    wrapped = torch.nn.Module()
    wrapped.module = torch.nn.Module()
    wrapped.module.module = Model(Held())
    found = convert(wrapped, {"linear_attention": [rule("decoder.layers.*.self_attention")]})
    assert list(found.resolved) == ["decoder.layers.0.self_attention"]


def test_converting_again_replaces_the_policies(op: Op, x: Tensor) -> None:
    model = Model(Held(), Named())
    convert(model)
    rules = [attention(model).gated_delta_rule]
    convert(model, {"quant_cfg": [W_ON]})
    assert [attention(model).gated_delta_rule] == rules
    model(x)
    assert [(o["state_format"], o["w_format"]) for o in op.options] == [(None, "e4m3")] * 2


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_copied_model_has_policies_of_its_own(layout: str, op: Op, x: Tensor) -> None:
    model = Model(LAYOUTS[layout]())
    convert(model)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        attention(twin).out_proj.weight.zero_()
        attention(twin).out_proj.bias.zero_()
    assert torch.equal(twin(x), x)
    policy_of(attention(model)).resolved = OFF
    assert not policy_of(attention(twin)).resolved.off
    op.options.clear()
    model(x)
    assert op.options == []
    twin(x)
    assert len(op.options) == 1


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_method_that_ends_without_rounding_is_an_error(layout: str, op: Op, x: Tensor) -> None:
    model = Model(LAYOUTS[layout]())
    convert(model)
    module = attention(model)
    if "named" in layout:
        standins.chunk_gated_delta_rule = original_kernel(module)
    else:
        module.gated_delta_rule = original_kernel(module)
    with pytest.raises(RuntimeError, match="must call its gated delta rule"):
        model(x)


@pytest.mark.parametrize("layout", ["named", "named, split"])
def test_a_watched_method_that_another_tool_replaced_is_an_error(layout: str, op: Op, x: Tensor) -> None:
    model = Model(LAYOUTS[layout]())
    convert(model)
    module = attention(model)
    for caller in layout_of(module).callers:
        module.__dict__[caller] = getattr(type(module), caller).__get__(module)
    with pytest.raises(RuntimeError, match="replaces methods"):
        model(x)
    policy_of(module).resolved = OFF
    model(x)


def test_a_method_that_another_tool_put_on_a_module_is_kept(op: Op, x: Tensor) -> None:
    model = Model(Named())
    module = attention(model)
    seen = []

    def forward(y: Tensor) -> Tensor:
        seen.append(y)
        return type(module).forward(module, y)

    module.forward = forward
    convert(model)
    model(x)
    assert len(seen) == len(op.options) == 1
    megatron.revert(model)
    assert module.__dict__["forward"] is forward


REFUSED_LAYOUTS = {
    "two ways at once": standins.Both,
    "no way at all": standins.Neither,
    "a kernel that is not there": standins.Missing,
}


@pytest.mark.parametrize("what", REFUSED_LAYOUTS)
def test_an_unknown_layout_is_refused_and_nothing_is_wrapped(what: str) -> None:
    model = Model(Held(), REFUSED_LAYOUTS[what]())
    with pytest.raises(NotImplementedError, match="kernel"):
        convert(model)
    assert not is_converted(attention(model))


def deterministic() -> torch.nn.Module:
    return Held(deterministic_mode=True)


def unknown_kernel() -> torch.nn.Module:
    module = Held()
    module.gated_delta_rule = standins.some_other_kernel
    return module


REFUSED_MODULES: dict[str, tuple[Callable[[], torch.nn.Module], type[Exception], str]] = {
    "context parallelism": (lambda: Held(cp_size=2), NotImplementedError, "context-parallel size 2"),
    "context parallelism, named": (lambda: Named(cp_size=4), NotImplementedError, "context-parallel size 4"),
    "deterministic mode": (deterministic, NotImplementedError, "deterministic"),
    "deterministic mode, named": (
        lambda: Named(deterministic_mode=True),
        NotImplementedError,
        "deterministic",
    ),
    "unknown kernel": (unknown_kernel, NotImplementedError, "some_other_kernel"),
    "wide heads": (lambda: Held(size=512, heads=1), ValueError, "512"),
    "narrow heads": (lambda: Held(size=8), ValueError, "8"),
    "fp64": (lambda: Held().double(), TypeError, "float64"),
}


@pytest.mark.parametrize("what", REFUSED_MODULES)
def test_a_module_that_cannot_round_is_refused_with_a_site_on_only(what: str) -> None:
    make, error, words = REFUSED_MODULES[what]
    model = Model(Held(), make())
    with pytest.raises(error, match=words):
        convert(model)
    assert not is_converted(attention(model))
    convert(model, {"quant_cfg": [ALL_OFF]})
    with pytest.raises(error, match=words):
        policy_of(attention(model, 1)).resolved = Resolved(Sites("e4m3"))
    assert policy_of(attention(model, 1)).resolved == OFF


def test_a_module_that_changed_after_conversion_is_refused_at_the_call(op: Op, x: Tensor) -> None:
    model = Model(Held())
    convert(model)
    attention(model).cp_size = 2
    with pytest.raises(NotImplementedError, match="context-parallel"):
        model(x)


def test_an_old_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class OnGpu:
        is_cuda, dtype, device = True, torch.bfloat16, torch.device("cuda", 0)

    monkeypatch.setattr(checks.Module, "tensors", lambda self: [OnGpu()])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    with pytest.raises(NotImplementedError, match=r"SM 7\.5"):
        convert(Model(Held()))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    convert(Model(Held()))


def test_a_model_without_supported_modules_is_refused() -> None:
    with pytest.raises(ValueError, match="GatedDeltaNet"):
        convert(Model(Dense()))
    with pytest.raises(ValueError, match="got none"):
        convert_model(Model(standins.FlaLayer()), {}, ("megatron",))


def test_a_rule_that_reaches_dense_modules_only_is_refused() -> None:
    model = Model(Dense(), Held())
    convert(model, {"linear_attention": [rule("decoder.layers.*.self_attention")]})
    with pytest.raises(ValueError, match="must match a supported module"):
        convert(model, {"linear_attention": [rule("decoder.layers.0.self_attention")]})


def test_a_module_without_a_policy_says_so() -> None:
    with pytest.raises(ValueError, match="must be converted"):
        policy_of(Held())


def test_the_table_is_printed_once_for_a_reader(capsys: pytest.CaptureFixture[str]) -> None:
    found = megatron.convert(Model(Held(), Named()), ON)
    assert capsys.readouterr().out == f"{found}\n"
    assert "self.gated_delta_rule in forward" in str(found)
    assert "module-level chunk_gated_delta_rule in forward" in str(found)
    assert found.versions["torch"] == torch.__version__.split("+")[0] or "torch" in found.versions
    convert(Model(Held()))
    assert capsys.readouterr().out == ""


def test_the_policy_is_shown_where_the_model_is_printed() -> None:
    model = Model(Held())
    convert(model)
    assert "state=e4m3, w=e4m3, block_v=64" in repr(model)


def test_fla_and_qwen3_next_layers_round_in_chunk_mode(op: Op, x: Tensor) -> None:
    model = Model(standins.FlaLayer(), standins.Qwen3NextLayer())
    found = hf.convert(model, ON, verbose=False)
    model(x)
    assert len(op.options) == len(found.resolved) == 2
    assert str(layout_of(attention(model, 1))) == "self.chunk_gated_delta_rule in forward"
    hf.revert(model)
    assert attention(model, 1).chunk_gated_delta_rule is standins.torch_chunk_gated_delta_rule


def test_a_recurrent_kernel_with_a_site_on_is_an_error(op: Op, x: Tensor) -> None:
    model = Model(standins.FlaLayer(), standins.Qwen3NextLayer())
    hf.convert(model, ON, verbose=False)
    with pytest.raises(RuntimeError, match="chunk mode only"):
        model.eval()(x)
    with pytest.raises(RuntimeError, match="chunk mode only"):
        attention(model, 1)(x, cached=True)
    model(torch.randn(1, 65, 32))


def test_megatron_modules_are_not_touched_by_the_other_adapter() -> None:
    assert list(supported_modules(Model(Held(), standins.FlaLayer()), hf.FAMILY)) == [
        "decoder.layers.1.self_attention"
    ]


def test_the_child_of_a_module_is_not_its_parent() -> None:
    module = Held()
    attach.attach(module, "megatron")
    assert isinstance(module.gdn_policy, SitePolicy)
    assert module.gdn_policy.owner is module
    assert [name for name, _ in module.named_modules()] == ["", "in_proj", "out_proj", "gdn_policy"]
    assert attach.attach(module, "megatron") == layout_of(module)


def test_adapters_import_without_any_framework() -> None:
    blocked = ("fla", "megatron", "modelopt", "tilelang", "triton", "transformers")
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({blocked!r})); "
        "import kernels.adapters.megatron, kernels.adapters.hf, kernels.adapters.modelopt; print('imported')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "imported"
