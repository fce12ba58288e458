"""A policy is saved and restored with its module; a checkpoint without one switches both sites off."""

# mypy: disable-error-code="no-any-return, union-attr, index, arg-type, operator, assignment, misc"
# mypy: allow-untyped-calls

from __future__ import annotations

import io
import logging
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kernels.adapters import megatron
from kernels.adapters.attach import policy_of
from kernels.policy import OFF, Resolved, policy_from_config
from kernels.quantizers import Sites
from suites.selfcheck.adapters.standins import Held, Model, Named
from suites.selfcheck.adapters.test_policy import ALL_OFF, STATE_ON, W_ON, rule

EDITED = Resolved(Sites("int8", "e4m3"), policy_from_config({"state": {"block_v": 128}}))
KEY = "decoder.layers.0.self_attention.gdn_policy._extra_state"


def converted(*entries: dict[str, Any]) -> Model:
    model = Model(Held(), Named())
    rules = [rule("*", state={"block_v": 32})]
    megatron.convert(model, {"quant_cfg": list(entries), "linear_attention": rules}, verbose=False)
    return model


def policies(model: Model) -> list[Resolved]:
    return [policy_of(layer.self_attention).resolved for layer in model.decoder.layers]


def through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded


def test_a_policy_edited_after_conversion_is_restored() -> None:
    saved, fresh = converted(STATE_ON), converted(ALL_OFF)
    policy_of(saved.decoder.layers[0].self_attention).resolved = EDITED
    fresh.load_state_dict(through_a_file(saved.state_dict()))
    assert policies(fresh) == policies(saved)
    assert policies(fresh)[0] == EDITED
    assert policies(fresh)[1].policy.state_block_v == 32


def test_restoring_sites_that_were_off_switches_them_off() -> None:
    saved, fresh = converted(ALL_OFF), converted(STATE_ON, W_ON)
    fresh.load_state_dict(through_a_file(saved.state_dict()))
    assert [p.off for p in policies(fresh)] == [True, True]


def test_a_checkpoint_from_before_restores_with_both_sites_off(caplog: pytest.LogCaptureFixture) -> None:
    old, fresh = Model(Held(), Named()), converted(STATE_ON, W_ON)
    with caplog.at_level(logging.WARNING):
        fresh.load_state_dict(through_a_file(old.state_dict()), strict=True)
    assert policies(fresh) == [OFF, OFF]
    assert caplog.text.count("both sites are off now") == 2


def test_loading_something_else_leaves_the_policy_alone() -> None:
    fresh = converted(STATE_ON)
    before = policies(fresh)
    fresh.load_state_dict({}, strict=False)
    only_first = {k: v for k, v in fresh.state_dict().items() if "layers.0" in k and "gdn_policy" not in k}
    fresh.load_state_dict(only_first, strict=False)
    assert policies(fresh) == [OFF, before[1]]


def test_a_checkpoint_with_a_policy_needs_a_converted_model() -> None:
    with pytest.raises(RuntimeError, match="gdn_policy"):
        Model(Held(), Named()).load_state_dict(converted(STATE_ON).state_dict())


def test_a_damaged_policy_is_refused_and_the_old_one_stays() -> None:
    fresh = converted(STATE_ON)
    before = policies(fresh)
    state = fresh.state_dict()
    state[KEY] = torch.tensor([255, 254], dtype=torch.uint8)
    with pytest.raises(ValueError, match="stored policy"):
        fresh.load_state_dict(state)
    assert policies(fresh) == before


def test_a_policy_that_the_module_cannot_run_is_refused_on_restore() -> None:
    saved = converted(STATE_ON)
    fresh = Model(Held(cp_size=2), Named())
    megatron.convert(fresh, {"quant_cfg": [ALL_OFF]}, verbose=False)
    with pytest.raises(NotImplementedError, match="context-parallel"):
        fresh.load_state_dict(saved.state_dict())


def test_the_distributed_checkpoint_gets_text_that_every_rank_shares() -> None:
    saved, fresh = converted(STATE_ON, W_ON), converted(ALL_OFF)
    child = policy_of(saved.decoder.layers[0].self_attention)
    state = child.sharded_state_dict(KEY.removesuffix("_extra_state"), (), {"dp_cp_group": None})
    assert state == {KEY: child.resolved.to_json()}
    fresh.load_state_dict(fresh.state_dict() | state)
    assert policies(fresh)[0] == child.resolved


@pytest.mark.parametrize(
    ("initialized", "stages", "refused"), [(True, 2, True), (True, 1, False), (False, 2, False)]
)
def test_pipeline_stages_cannot_save_a_policy(
    monkeypatch: pytest.MonkeyPatch, initialized: bool, stages: int, refused: bool
) -> None:
    state = SimpleNamespace(
        model_parallel_is_initialized=lambda: initialized,
        get_pipeline_model_parallel_world_size=lambda: stages,
    )
    monkeypatch.setitem(sys.modules, "megatron.core.parallel_state", state)
    on = policy_of(converted(STATE_ON).decoder.layers[0].self_attention)
    off = policy_of(converted(ALL_OFF).decoder.layers[0].self_attention)
    assert off.sharded_state_dict("p.")
    if refused:
        with pytest.raises(NotImplementedError, match="pipeline"):
            on.sharded_state_dict("p.")
    else:
        assert on.sharded_state_dict("p.")
