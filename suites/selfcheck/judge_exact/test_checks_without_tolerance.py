"""Probes, grid, invariants and refusals pass a sound subject and fail one with a single thing wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from qualify.case import Case, CheckOutput
from qualify.subjects import Subject, subject_from_module
from suites.checks import calls, grid, invariants, probes, qdq, refusals, stages
from suites.controls.table import CONTROLS
from suites.subjects.eager import EAGER, Call, EagerGDN, EagerQDQ, Notes

Tensor = torch.Tensor
Run = Callable[[Case, Subject], CheckOutput]

SOUND = subject_from_module(EAGER, "eager")
BASE = {"dtype": "bf16", "format": "e4m3", "block_v": "16", "sites": "both", "layout": "vk", "heads": "32x48"}


def asked(run: Run, subject: Subject, regime: str = "random", **levels: str) -> list[str]:
    """Names of the comparisons that fail."""
    found = run(Case("check", {**BASE, **levels}, regime, 3, subject.name), subject)
    assert found.comparisons
    return [c.tensor for c in found.comparisons if not c.passed]


def with_rounding(**methods: Any) -> Subject:
    gdn = EagerGDN()
    gdn.qdq = type("Rounding", (EagerQDQ,), methods)()
    return subject_from_module(gdn, "faulty")


def with_method(**methods: Any) -> Subject:
    return subject_from_module(type("Faulty", (EagerGDN,), methods)(), "faulty")


STATELESS = {"initial": "zero", "final": "dropped", "packing": "docs"}

CHECKS: dict[str, tuple[Run, dict[str, str]]] = {
    "state_bits": (qdq.run_state_bits, {}),
    "w_bits": (qdq.run_w_bits, {}),
    "state_gradient": (qdq.run_state_gradient, {}),
    "w_gradient": (qdq.run_w_gradient, {}),
    "probe_state": (probes.run_state, {"length": "1", "packing": "docs"}),
    "probe_write": (probes.run_write, {"initial": "given"}),
    "probe_w": (probes.run_w, {}),
    "probe_w_stateless": (probes.run_w, STATELESS),
    "grid": (grid.run, {"packing": "docs", "length": "65", "grouping": "hv2"}),
    "repeat": (invariants.run_repeat, {"packing": "docs", "length": "65", "checkpointing": "on"}),
    "borders": (invariants.run_borders, {"packing": "docs", "length": "65"}),
    "memory": (invariants.run_memory, {"packing": "docs", "length": "65"}),
    "arguments": (invariants.run_arguments, {"packing": "docs", "length": "17"}),
    "calls": (calls.run, {"packing": "docs", "length": "65", "grouping": "hv2"}),
    "refusals": (refusals.run_op, {}),
    "stages": (stages.run, {"packing": "docs", "length": "65"}),
}


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("name", CHECKS)
def test_a_sound_subject_passes(name: str, dtype: str) -> None:
    run, levels = CHECKS[name]
    assert asked(run, SOUND, **levels, dtype=dtype) == []


def ties_away(self: EagerQDQ, y: Tensor, step: Tensor) -> Tensor:
    return torch.sign(y) * torch.floor(y.abs() / step + 0.5) * step


def reciprocal(self: EagerQDQ, x: Tensor, scale: Tensor) -> Tensor:
    return x * (1.0 / scale)


def through_fp16(self: EagerQDQ, x: Tensor, scale: Tensor) -> Tensor:
    return (x / scale).half().float()


@pytest.mark.parametrize("fault", [{"nearest": ties_away}, {"divide": reciprocal}, {"divide": through_fp16}])
@pytest.mark.parametrize("name", ["state_bits", "w_bits", "probe_state", "probe_w"])
def test_roundings_that_differ_in_the_last_bit_fail(name: str, fault: dict[str, Any]) -> None:
    run, levels = CHECKS[name]
    dtype = "fp32" if name.startswith(("state", "probe_state")) else "fp16"
    assert asked(run, with_rounding(**fault), **levels, dtype=dtype)


def test_a_gradient_that_is_rounded_with_its_values_fails() -> None:
    def rounded(self: EagerQDQ, dy: Tensor, x: Tensor, values: Callable[[Tensor], Tensor]) -> Tensor:
        return values(dy)

    assert asked(CHECKS["state_gradient"][0], with_rounding(gradient=rounded)) == GRADIENTS


GRADIENTS = ["gradient", "gradient.stack", "gradient.extreme"]


def test_a_gradient_that_is_lost_in_a_stack_alone_fails() -> None:
    def lost(self: EagerQDQ, dy: Tensor, x: Tensor, values: Callable[[Tensor], Tensor]) -> Tensor:
        return dy if x.dim() == 2 else dy * 0

    assert asked(CHECKS["state_gradient"][0], with_rounding(gradient=lost)) == ["gradient.stack"]


def test_rows_of_w_that_only_a_view_or_a_large_call_rounds_in_another_way_fail() -> None:
    class Floored(EagerQDQ):
        def scale_of(self, amax: Tensor, fmt: str) -> Tensor:
            return super().scale_of(amax, fmt).clamp_min(1e-10)

    def floored(self: EagerQDQ, w: Tensor, fmt: str) -> Tensor:
        return (EagerQDQ() if w.is_contiguous() else Floored()).w_values(w, fmt)

    def cut(self: EagerQDQ, w: Tensor, fmt: str) -> Tensor:
        rounded = EagerQDQ.w_values(self, w, fmt)
        return torch.cat([rounded[:65_535], w[65_535:]])

    strided = asked(CHECKS["w_bits"][0], with_rounding(w_values=floored))
    assert strided
    assert all(name.endswith(".transposed") for name in strided)
    assert asked(qdq.run_w_many, with_rounding(w_values=cut), blocks="65537") == ["many"]


@pytest.mark.parametrize(("block_v", "seen"), [("32", True), ("128", True), ("16", False)])
def test_states_that_only_a_view_rounds_in_another_way_fail(block_v: str, seen: bool) -> None:
    class Floored(EagerQDQ):
        def scale_of(self, amax: Tensor, fmt: str) -> Tensor:
            return super().scale_of(amax, fmt).clamp_min(1e-10)

    def floored(self: EagerGDN, call: Call) -> None:
        self.qdq = EagerQDQ() if call.h0 is None or call.h0.is_contiguous() else Floored()
        EagerGDN.prepare(self, call)

    run, levels = CHECKS["probe_state"]
    assert bool(asked(run, with_method(prepare=floored), **levels, layout="kv", block_v=block_v)) == seen


def test_poison_that_is_laundered_in_a_partial_tile_fails() -> None:
    found = asked(CHECKS["state_bits"][0], CONTROLS["nan_laundered_in_a_partial_tile"].subject())
    assert found
    assert all(name.startswith("poison") for name in found)


def test_w_that_is_rounded_before_its_carrier_fails() -> None:
    run, levels = CHECKS["probe_w"]
    for name in ("w_rounded_before_its_carrier", "w_scale_before_its_carrier"):
        assert asked(run, CONTROLS[name].subject(), **levels, dtype="bf16") == ["sums.final_state"]


def test_a_laundered_nan_fails_both_at_the_function_and_in_the_op() -> None:
    def laundered(self: EagerQDQ, y: Tensor, scale: Tensor) -> Tensor:
        return y.nan_to_num()

    faulty = with_rounding(poison=laundered)
    assert any("poison" in name for name in asked(CHECKS["state_bits"][0], faulty))
    assert "head_poison.appears_in_state" in asked(
        invariants.run_borders, faulty, packing="docs", length="65"
    )


def test_a_nan_that_leaves_the_rest_of_its_tile_alone_fails() -> None:
    faulty = CONTROLS["poison_stays_local"].subject()
    failing = asked(invariants.run_borders, faulty, packing="docs", length="65")
    assert failing == [
        f"state_{value}.fills_its_tile{where}" for value in ("nan", "inf") for where in ("", "_of_o")
    ]


def test_a_floor_under_the_scale_of_w_shows_in_the_op() -> None:
    def floored(self: EagerQDQ, amax: Tensor, fmt: str) -> Tensor:
        return EagerQDQ().scale_of(amax.clamp_min(1e-12), fmt)

    assert asked(probes.run_w, with_rounding(scale_of=floored))


def test_a_tile_of_its_own_leaves_the_grid() -> None:
    def wider(self: EagerQDQ, state: Tensor, block_v: int, fmt: str) -> Tensor:
        return EagerQDQ().state_values(state, 2 * block_v, fmt)

    run, levels = CHECKS["grid"]
    assert asked(run, with_rounding(state_values=wider), **levels) == ["grid.members"]
    coarse = with_rounding(step=lambda self, y, fmt: 2 * EagerQDQ().step(y, fmt))
    assert asked(run, coarse, **levels) == ["grid.mantissas"]


def test_a_leak_over_a_border_fails() -> None:
    def one_sequence(self: EagerGDN, cu: Tensor | None, B: int, T: int) -> list[tuple[int, int]]:
        spans = EagerGDN().boundaries(cu, B, T)
        return [spans[0], *((max(0, a - 1), b) for a, b in spans[1:])]

    failing = asked(invariants.run_borders, with_method(boundaries=one_sequence), packing="docs", length="65")
    assert any(name.startswith("border.") for name in failing)
    assert any(name.startswith("poison_") for name in failing)


def test_writing_into_an_input_fails() -> None:
    def written(self: EagerGDN, x: Tensor, n: Any) -> Tensor:
        found = EagerGDN().gather(x, n)
        if x.shape == (n.B, n.T, n.HV):
            x.detach().numpy()[:] *= 0.5  # as a kernel writes: torch does not see it
        return found

    run, levels = CHECKS["repeat"]
    failing = asked(run, with_method(gather=written), **{**levels, "checkpointing": "off"})
    assert {"input.g", "input.beta"} <= set(failing)


def test_memory_that_is_not_written_fails() -> None:
    def partly(self: EagerGDN, x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        out[..., :-1] = x[..., :-1]
        return out

    run, levels = CHECKS["memory"]
    assert any(name.startswith("dirty_memory.") for name in asked(run, with_method(leave=partly), **levels))


@pytest.mark.parametrize("check", ["repeat", "memory"])
def test_what_is_not_deterministic_is_held_against_the_oracle_where_it_is_declared(check: str) -> None:
    def jittery(size: float) -> Subject:
        def jitter(self: EagerGDN, g: Tensor, n: Any) -> Tensor:
            return g.cumsum(-1) * (1 + size * torch.rand(()))

        return with_method(cumulate=jitter)

    run, levels = CHECKS[check]
    fails = {"repeat": "repeated.", "memory": "guard_zones."}[check]
    assert any(name.startswith(fails) for name in asked(run, jittery(1e-3), **levels))
    assert asked(run, replace(jittery(1e-3), deterministic=False), **levels) == []
    assert any(n.startswith(fails) for n in asked(run, replace(jittery(0.3), deterministic=False), **levels))


@pytest.mark.parametrize(
    ("control", "when"),
    [
        ("states_in_one_buffer", "first_of_two."),
        ("output_in_one_buffer", "first_of_two."),
        ("saved_w_consumed", "once_more."),
        ("boundaries_cached", ("fresh.", "reused.")),
    ],
)
def test_calls_that_share_memory_fail(control: str, when: str | tuple[str, str]) -> None:
    run, levels = CHECKS["calls"]
    failing = asked(run, CONTROLS[control].subject(), **levels)
    assert any(name.startswith(when) for name in failing)


def test_a_graph_that_refuses_a_second_pass_is_no_fault() -> None:
    def once(self: EagerGDN, n: Any) -> None:
        if "spent" in vars(n):
            raise RuntimeError("a second backward pass needs a second forward pass")
        n.spent = True
        EagerGDN().through_solve(n)

    run, levels = CHECKS["calls"]
    assert asked(run, with_method(through_solve=once), **levels) == []


def test_calls_of_a_subject_that_is_not_deterministic_are_held_against_budgets() -> None:
    run, levels = CHECKS["calls"]
    declared = replace(SOUND, deterministic=False)
    assert asked(run, declared, **levels) == []
    faulty = replace(CONTROLS["states_in_one_buffer"].subject(), deterministic=False)
    assert asked(run, faulty, **levels)


def test_a_forward_that_differs_inside_a_backward_fails() -> None:
    run, levels = CHECKS["repeat"]
    failing = asked(run, CONTROLS["unrounded_in_backward"].subject(), **levels)
    assert failing
    assert all(name.startswith("recomputed.") for name in failing)


def test_a_rounding_left_out_in_one_late_chunk_shows_to_the_bit() -> None:
    faulty = CONTROLS["third_of_many_chunks"].subject()
    assert asked(probes.run_write, faulty, initial="given") == ["final_state"]
    late = asked(probes.run_w, CONTROLS["w_of_late_chunks"].subject(), before="2112")
    assert "final_state" in late


def test_a_gradient_that_comes_with_another_only_fails() -> None:
    run, levels = CHECKS["arguments"]
    assert asked(run, CONTROLS["dk_only_beside_dq"].subject(), **levels) == ["only.dk"]


def test_a_scale_of_zero_that_is_taken_for_the_default_fails() -> None:
    run, levels = CHECKS["arguments"]
    assert asked(run, CONTROLS["zero_scale_is_default"].subject(), **levels) == [
        "scale_zero.o",
        "scale_zero.dq",
    ]


def test_a_scale_without_its_sign_fails_and_one_that_is_refused_does_not() -> None:
    def unsigned(*tensors: Any, **options: Any) -> Any:
        scale = options["scale"]
        options["scale"] = None if scale is None else abs(scale)
        return EAGER.chunk_gated_delta_rule(*tensors, **options)

    def positive(*tensors: Any, **options: Any) -> Any:
        if options["scale"] is not None and options["scale"] <= 0:
            raise ValueError("scale must be positive")
        return EAGER.chunk_gated_delta_rule(*tensors, **options)

    run, levels = CHECKS["arguments"]
    assert "scale_negative.o" in asked(run, replace(SOUND, chunk_gated_delta_rule=unsigned), **levels)
    assert asked(run, replace(SOUND, chunk_gated_delta_rule=positive), **levels) == []


@pytest.mark.parametrize(("dtype", "carrier"), [(torch.float64, "bf16"), (torch.float16, "bf16")])
def test_gates_whose_dtype_is_misread_fail_and_a_dtype_that_is_refused_does_not(
    dtype: torch.dtype, carrier: str
) -> None:
    def misread(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **options: Any) -> Any:
        return EAGER.chunk_gated_delta_rule(q, k, v, g / 2 if g.dtype == dtype else g, beta, **options)

    def refused(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **options: Any) -> Any:
        if g.dtype == dtype:
            raise TypeError("gates must be fp32 or bf16")
        return EAGER.chunk_gated_delta_rule(q, k, v, g, beta, **options)

    run, levels = CHECKS["arguments"]
    failing = asked(run, replace(SOUND, chunk_gated_delta_rule=misread), **levels, dtype=carrier)
    assert {name.partition(".")[0] for name in failing} == {f"gates_{str(dtype).removeprefix('torch.')}"}
    assert asked(run, replace(SOUND, chunk_gated_delta_rule=refused), **levels, dtype=carrier) == []


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_a_gradient_of_beta_in_the_dtype_of_narrow_gates_fails(dtype: str) -> None:
    class OfGates(EagerGDN):
        def results(self, n: Notes, inputs: tuple[Tensor | None, ...]) -> Any:
            *found, dbeta, dh0 = super().results(n, inputs)
            assert inputs[3] is not None
            return *found, dbeta.to(inputs[3].dtype), dh0

    run, levels = CHECKS["arguments"]
    faulty = replace(SOUND, chunk_gated_delta_rule=OfGates().chunk_gated_delta_rule)
    assert asked(run, faulty, **levels, dtype=dtype)


def test_a_call_without_tokens_that_loses_its_states_fails() -> None:
    def losing(*tensors: Any, **options: Any) -> Any:
        o, final_state = EAGER.chunk_gated_delta_rule(*tensors, **options)
        return o, final_state * 0 if final_state is not None and not tensors[0].shape[1] else final_state

    run, levels = CHECKS["arguments"]
    assert asked(run, replace(SOUND, chunk_gated_delta_rule=losing), **levels) == [
        "no_tokens.final_state",
        "no_tokens.dh0",
    ]


def test_a_nan_in_a_given_state_that_one_column_alone_reads_fails() -> None:
    class OneColumn(EagerGDN):
        def round_state(self, state: Tensor, where: str, n: Notes) -> Tensor:
            if where != "initial":
                return super().round_state(state, where, n)
            return torch.where(state.isnan(), state, super().round_state(state.nan_to_num(0.0), where, n))

    run, levels = CHECKS["borders"]
    faulty = replace(SOUND, chunk_gated_delta_rule=OneColumn().chunk_gated_delta_rule)
    assert "state_nan.fills_its_tile_of_o" in asked(run, faulty, **levels)


def test_heads_of_one_key_have_scales_of_their_own_in_the_w_probe() -> None:
    faulty = CONTROLS["w_scale_of_a_group"].subject()
    assert asked(probes.run_w, faulty) == ["final_state", "codes.final_state"]


def test_a_w_that_is_left_alone_only_in_calls_without_states_fails() -> None:
    def left_alone(of_views: bool) -> Subject:
        def op(*tensors: Any, **options: Any) -> Any:
            stateless = options["initial_state"] is None and not options["output_final_state"]
            if stateless and not (of_views and tensors[1].is_contiguous()):
                options["w_format"] = None
            return EAGER.chunk_gated_delta_rule(*tensors, **options)

        return replace(SOUND, chunk_gated_delta_rule=op)

    kept = {**STATELESS, "final": "kept"}
    assert asked(probes.run_w, left_alone(of_views=False), **kept) == []
    for of_views in (False, True):
        assert asked(probes.run_w, left_alone(of_views), **STATELESS) == ["o", "sums.o"]
    batch = {**STATELESS, "packing": "batch"}
    assert asked(probes.run_w, left_alone(of_views=False), **batch) == ["o", "sums.o"]


def test_a_call_outside_the_contract_that_goes_through_fails() -> None:
    def lenient(*tensors: Any, **options: Any) -> Any:
        options["state_block_v"] = 16
        return EAGER.chunk_gated_delta_rule(*tensors, **options)

    subject = subject_from_module(SimpleNamespace(chunk_gated_delta_rule=lenient), "lenient")
    assert asked(refusals.run_op, subject) == [
        "refused.block_v_48",
        "refused.block_v_0",
        "refused.block_v_256",
    ]


def test_a_given_state_that_is_written_where_nothing_records_fails() -> None:
    run, levels = CHECKS["repeat"]
    faulty = CONTROLS["state_overwritten_without_gradient"].subject()
    assert asked(run, faulty, **levels) == ["no_grad_input.initial_state"]


def test_a_dtype_outside_the_contract_that_is_cast_fails() -> None:
    assert asked(refusals.run_op, CONTROLS["dtypes_unchecked"].subject()) == [
        "refused.q_of_another_carrier",
        "refused.v_of_another_carrier",
    ]


def test_stages_that_are_another_computation_fail() -> None:
    def shown(*tensors: Tensor, **options: Any) -> dict[str, Tensor]:
        found = EAGER.stages(*tensors, **options)
        return {**found, "w_q": found["w"], "state_q": found["state_raw"]}

    run, levels = CHECKS["stages"]
    failing = asked(run, replace(SOUND, stages=shown), **levels)
    assert failing == ["stage.w_q", "stage.state_q", "stage.final_state"]
