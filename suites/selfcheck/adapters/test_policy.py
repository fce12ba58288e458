"""Rules and quantizer entries resolve to what each module does, or to an error that says what to do."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from kernels.policy import (
    OFF,
    ExecutionPolicy,
    Resolved,
    policy_from_config,
    resolve,
    resolved_from_json,
    table,
)
from kernels.quantizers import Sites, entries_from, format_of, sites_of

NAMES = [f"decoder.layers.{n}.self_attention" for n in range(3)]
E4M3_STATE = {"num_bits": (4, 3), "type": "dynamic", "axis": (0, 1)}
E4M3_W = {"num_bits": (4, 3), "type": "dynamic", "axis": (0, 1, 2)}
INT8_STATE = {"num_bits": 8, "type": "dynamic", "axis": (0, 1), "narrow_range": True}
ALL_OFF = {"quantizer_name": "*", "enable": False}
STATE_ON = {"quantizer_name": "*gdn_state_quantizer", "cfg": E4M3_STATE}
W_ON = {"quantizer_name": "*gdn_w_quantizer", "cfg": E4M3_W}


def rule(pattern: str, **cfg: Any) -> dict[str, Any]:
    return {"module_name": pattern, "cfg": cfg}


def resolved(quant_cfg: list[Any], *rules: dict[str, Any]) -> list[Resolved]:
    found = resolve({"quant_cfg": quant_cfg, "linear_attention": list(rules), "algorithm": None}, NAMES)
    return [found[name] for name in NAMES]


def test_an_empty_configuration_leaves_everything_off() -> None:
    assert resolve({}, NAMES) == dict.fromkeys(NAMES, OFF)


def test_defaults_are_the_contract() -> None:
    assert ExecutionPolicy().to_config() == {
        "schema_version": 1,
        "backend": "fla",
        "chunk_size": 64,
        "state": {"mode": "chunk", "block_v": 64, "quantize_initial": True},
        "solve": {"method": "exact"},
    }


def test_the_last_matching_rule_replaces_the_whole_policy() -> None:
    first, second, third = resolved(
        [STATE_ON],
        rule("*", state={"block_v": 32}),
        rule("*.1.*", chunk_size=64),
        rule("*.2.*", state={"block_v": 128}),
    )
    assert first.policy.state_block_v == 32
    assert second.policy.state_block_v == 64  # back to the default: nothing is merged
    assert third.policy.state_block_v == 128


def test_order_decides_not_how_narrow_a_pattern_is() -> None:
    policies = resolved([], rule("*.1.*", state={"block_v": 16}), rule("decoder*", state={"block_v": 128}))
    assert {p.policy.state_block_v for p in policies} == {128}


def test_the_written_out_policy_reads_back() -> None:
    policy = policy_from_config({"state": {"block_v": 16}})
    assert policy_from_config(policy.to_config()) == policy


def test_sites_are_switched_one_by_one() -> None:
    only_state, both = resolved([STATE_ON])[0], resolved([STATE_ON, W_ON])[0]
    assert only_state.sites == Sites("e4m3", None)
    assert both.sites == Sites("e4m3", "e4m3")
    assert both.options() == {"state_format": "e4m3", "state_block_v": 64, "w_format": "e4m3"}


def test_int8_is_a_format_of_the_state_only() -> None:
    assert resolved([STATE_ON | {"cfg": INT8_STATE}])[0].sites.state == "int8"
    with pytest.raises(ValueError, match="num_bits of gdn_w_quantizer"):
        resolved([W_ON | {"cfg": INT8_STATE | {"axis": (0, 1, 2)}}])


@pytest.mark.parametrize(
    ("entries", "state"),
    [
        ([STATE_ON, ALL_OFF], None),
        ([ALL_OFF, STATE_ON], "e4m3"),
        ([{"quantizer_name": "*", "cfg": {"num_bits": 8, "axis": None}}], None),
        ([{"quantizer_name": "*", "enable": True}], None),
        ([{"quantizer_name": "*_quantizer", "cfg": E4M3_STATE}], None),
        ([{"quantizer_name": "*gdn_state_quantizer", "enable": True}], "e4m3"),
        ([STATE_ON, {"quantizer_name": "*gdn*", "enable": False}], None),
        (
            [STATE_ON | {"cfg": INT8_STATE}, {"quantizer_name": "*gdn_state_quantizer", "enable": True}],
            "int8",
        ),
        ([STATE_ON | {"cfg": INT8_STATE, "enable": False}], None),
        ([STATE_ON | {"cfg": INT8_STATE, "enable": False}, STATE_ON | {"cfg": E4M3_STATE}], "e4m3"),
    ],
)
def test_entries_act_in_their_order_and_only_when_they_name_a_site(
    entries: list[Any], state: str | None
) -> None:
    assert resolved(entries)[0].sites.state == state


def test_an_entry_reaches_the_modules_that_it_names() -> None:
    on = resolved([{"quantizer_name": "*layers.1.*gdn_state_quantizer", "cfg": E4M3_STATE}])
    assert [r.sites.state for r in on] == [None, "e4m3", None]


WRONG_POLICIES: dict[str, tuple[Any, str]] = {
    "chunk_size": ({"chunk_size": 128}, "chunk_size must be one of .64., got 128"),
    "block_v": ({"state": {"block_v": 48}}, "got 48; choose the next smaller tile"),
    "block_v as text": ({"state": {"block_v": "64"}}, "got '64'"),
    "quantize_initial": ({"state": {"quantize_initial": False}}, "got False"),
    "quantize_initial as 1": ({"state": {"quantize_initial": 1}}, "got 1"),
    "mode": ({"state": {"mode": "token"}}, "state.mode"),
    "solve": ({"solve": {"method": "neumann"}}, "solve.method"),
    "version": ({"schema_version": 2}, "version 1 only"),
    "backend": ({"backend": "torch"}, "backend"),
    "unknown field": ({"blockv": 64}, "unknown field"),
    "unknown inner field": ({"state": {"blockv": 64}}, "state.blockv"),
    "flat state": ({"state": 64}, "state must be a mapping"),
    "not a mapping": ([], "must be a mapping"),
}


@pytest.mark.parametrize("what", WRONG_POLICIES)
def test_a_wrong_policy_is_refused(what: str) -> None:
    cfg, words = WRONG_POLICIES[what]
    with pytest.raises((ValueError, TypeError), match=words):
        resolve({"linear_attention": [{"module_name": "*", "cfg": cfg}]}, NAMES)


WRONG_CONFIGURATIONS: dict[str, tuple[dict[str, Any], str]] = {
    "rule that matches nothing": (
        {"linear_attention": [rule("decoder.layers.9.*")]},
        "must match a supported",
    ),
    "rule without a name": ({"linear_attention": [{"cfg": {}}]}, "module_name"),
    "rule with another key": ({"linear_attention": [rule("*") | {"enable": True}]}, "enable"),
    "rule that is text": ({"linear_attention": ["*"]}, "mapping"),
    "unknown key": ({"quantizers": []}, "quantizers"),
    "entries in a mapping": ({"quant_cfg": {"*": {}}}, "list of entries"),
    "entry that is text": ({"quant_cfg": ["*"]}, "mapping"),
    "entry without effect": ({"quant_cfg": [{"quantizer_name": "*"}]}, "cfg or enable"),
    "entry that matches nothing": (
        {"quant_cfg": [{"quantizer_name": "*gdn_s_quantizer", "enable": True}]},
        "none of",
    ),
}


@pytest.mark.parametrize("what", WRONG_CONFIGURATIONS)
def test_a_wrong_configuration_is_refused(what: str) -> None:
    config, words = WRONG_CONFIGURATIONS[what]
    with pytest.raises((ValueError, TypeError), match=words):
        resolve(config, NAMES)


WRONG_QUANTIZERS: dict[str, tuple[dict[str, Any], str]] = {
    "static": ({"type": "static"}, "type"),
    "static by default": ({"type": None}, "type"),
    "clipped gradient": ({"pass_through_bwd": False}, "identity"),
    "blocks": ({"block_sizes": {-1: 32}}, "block_sizes"),
    "rotated": ({"rotate": True}, "rotation"),
    "rotated by a mapping": ({"rotate": {"enable": True}}, "rotation"),
    "custom backend": ({"backend": "mine"}, "backend"),
    "custom arguments": ({"backend_extra_args": {"a": 1}}, "backend_extra_args"),
    "custom calibrator": ({"calibrator": "histogram"}, "calibrator"),
    "constant amax": ({"constant_amax": 448.0}, "constant_amax"),
    "pinned amax": ({"use_constant_amax": True}, "use_constant_amax"),
    "learned": ({"learn_amax": True}, "learn_amax"),
    "biased": ({"bias": {"enable": True}}, "symmetric"),
    "unsigned": ({"unsigned": True}, "signed"),
    "compressed": ({"fake_quant": False}, "emulated"),
    "other axis": ({"axis": (0,)}, "axis"),
    "no axis": ({"axis": None}, "axis"),
    "e5m2": ({"num_bits": (5, 2)}, "num_bits"),
    "4 bits": ({"num_bits": 4}, "num_bits"),
    "wide int8": ({"num_bits": 8}, "narrow_range"),
    "unknown": ({"scale": 1.0}, "scale"),
}


@pytest.mark.parametrize("what", WRONG_QUANTIZERS)
def test_a_wrong_quantizer_is_refused(what: str) -> None:
    change, words = WRONG_QUANTIZERS[what]
    with pytest.raises(ValueError, match=words):
        resolved([STATE_ON | {"cfg": E4M3_STATE | change}])


def test_several_quantizers_in_a_row_are_refused() -> None:
    with pytest.raises(TypeError, match="one set of attributes"):
        resolved([STATE_ON | {"cfg": [E4M3_STATE, E4M3_STATE]}])


def test_lists_are_read_as_tuples_and_harmless_attributes_are_ignored() -> None:
    cfg = {
        "num_bits": [4, 3],
        "type": "dynamic",
        "axis": [0, 1],
        "rotate": {"enable": False},
        "effective_bits": 8,
    }
    assert format_of("state", cfg) == "e4m3"


def test_a_resolved_policy_round_trips_through_json() -> None:
    found = Resolved(Sites("int8", "e4m3"), policy_from_config({"state": {"block_v": 128}}))
    assert resolved_from_json(found.to_json()) == found
    assert "128" in found.scales()["state"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "null",
        "{}",
        OFF.to_json().replace('"block_v": 64', '"block_v": 48'),
        OFF.to_json().replace('"token, head"', '"token"'),
        OFF.to_json().replace('"state": null', '"state": "e5m2"'),
        OFF.to_json().replace('"sites": {', '"sites": {"q": null, '),
    ],
)
def test_a_stored_policy_that_is_not_one_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="stored policy"):
        resolved_from_json(text)


def test_the_table_has_a_line_for_each_module() -> None:
    found = resolve({"quant_cfg": [STATE_ON]}, NAMES)
    lines = table(found, lambda name: "held").splitlines()
    assert len(lines) == 4
    assert lines[1].split() == [NAMES[0], "e4m3", "64", "off", "held"]


def test_entries_and_sites_work_alone() -> None:
    assert sites_of(entries_from([]), ["a"]) == {"a": Sites()}


def test_the_policy_needs_neither_torch_nor_triton() -> None:
    code = (
        "import sys; sys.modules.update({'torch': None, 'triton': None}); "
        "from kernels.policy import resolve; print(resolve({}, ['a'])['a'].off)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True"
