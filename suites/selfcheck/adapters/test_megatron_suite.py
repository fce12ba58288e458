"""The Megatron suite plans what it says, and its scenarios catch every planted fault, here on stand-ins."""

# mypy: disable-error-code="no-any-return, union-attr, index, arg-type, operator, assignment, misc"
# mypy: allow-untyped-calls

from __future__ import annotations

import json
import math
import os
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from triton.runtime.autotuner import Autotuner

import kernels.gdn
from kernels.adapters import attach, megatron
from kernels.policy import OFF
from qualify.case import Case
from qualify.plan import PlannedSubject
from qualify.planning import make_plan
from qualify.plugin import DEVICES_VARIABLE
from qualify.records import Comparison
from qualify.requirements import unmet
from qualify.subjects import Subject, load_subject
from qualify.tables import load_tables
from suites.megatron import checks, findings, model, parallel, processes, run, storage, tuning, world
from suites.megatron.faults import AMONG_RANKS, FAULTS
from suites.megatron.findings import Finding
from suites.megatron.request import Request
from suites.megatron.tables import CELLS, SCOPE, TABLES
from suites.selfcheck.adapters import standins
from suites.selfcheck.adapters.standins import Held, Model, chunk_gated_delta_rule

Tensor = torch.Tensor


def op(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, None]:
    """Stands in for the fused op: what it returns depends on every option of a site."""
    o, _ = chunk_gated_delta_rule(q, k, v)
    factor = 1 + (options["state_format"] is not None) * options["state_block_v"] / 1000
    return o * factor * (1.1 if options["w_format"] else 1.0), None


@contextmanager
def folder_of(path: Path) -> Iterator[str]:
    path.mkdir()
    yield str(path)


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Scenarios on stand-in models, files instead of distributed checkpoints, and no ranks."""

    def build(
        tensor_parallel: int, recompute: str = "none", seed: int = 1, *, sequence_parallel: bool = False
    ) -> Model:
        torch.manual_seed(seed)
        return Model(Held(), Held())

    sharing = [True]

    @contextmanager
    def one_rank() -> Iterator[None]:
        sharing[0] = False
        yield
        sharing[0] = True

    folders = iter(tmp_path / str(n) for n in range(20))
    monkeypatch.setattr(model, "one_rank", one_rank)
    monkeypatch.setattr(model, "ranks", lambda: 2 if sharing[0] else 1)
    monkeypatch.setattr(model, "rank", lambda: int(sharing[0]))
    monkeypatch.setattr(model, "build", build)
    monkeypatch.setattr(
        model, "batch", lambda: torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(1))
    )
    monkeypatch.setattr(model, "loss_of", lambda net, data: net(data).square().mean())
    monkeypatch.setattr(attach, "fused_op", lambda: op)
    monkeypatch.setattr(kernels.gdn, "chunk_gated_delta_rule", op)
    monkeypatch.setattr(storage, "shared_folder", lambda: folder_of(next(folders)))
    monkeypatch.setattr(storage, "save", lambda net, folder: torch.save(net.state_dict(), f"{folder}/state"))
    monkeypatch.setattr(storage, "restored", restored)


def restored(net: Model, folder: str) -> Iterator[Finding]:
    result = net.load_state_dict(torch.load(f"{folder}/state"), strict=False)
    yield findings.holds("the checkpoint restores every weight", not result.missing_keys, "")


def failing(scenario: str, adapter: Any, sites: str = "both", recompute: str = "none") -> list[str]:
    request = Request(scenario, sites, recompute, 2, False, adapter)
    return [f.what for f in world.SCENARIOS[scenario](request) if not f.error <= f.budget]


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("sites", ["state", "w", "both"])
@pytest.mark.parametrize("scenario", ["sites", "off", "checkpoint", "refusals", "parallel", "reshard"])
def test_the_real_adapter_passes(scenario: str, sites: str) -> None:
    assert failing(scenario, megatron, sites) == []


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("fault", FAULTS)
def test_every_planted_fault_is_caught(fault: str) -> None:
    scenario, adapter = FAULTS[fault]
    assert failing(scenario, adapter)
    assert failing(scenario, megatron) == []


def spoiled(change: Callable[[Model], None]) -> Callable[[Model, str], Iterator[Finding]]:
    """Restoring that changes what it restored, where ranks share a model."""

    def restore(net: Model, folder: str) -> Iterator[Finding]:
        yield from restored(net, folder)
        if model.ranks() > 1:
            with torch.no_grad():
                change(net)

    return restore


def swap_shards(net: Model) -> None:
    weight = net.decoder.layers[0].self_attention.in_proj.weight
    weight.copy_(weight.roll(weight.shape[0] // 2, 0))


def nudge_a_weight(net: Model) -> None:
    weight = net.decoder.layers[1].self_attention.out_proj.weight.view(-1)
    weight[3] = torch.nextafter(weight[3], weight[3] + 1)


def lose_a_policy(net: Model) -> None:
    megatron.policy_of(net.decoder.layers[0].self_attention).resolved = OFF


@pytest.mark.usefixtures("stand_ins")
def test_a_swapped_shard_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "restored", spoiled(swap_shards))
    found = failing("parallel", megatron)
    assert "decoder.layers.0.self_attention: 2 ranks give what one gives" in found
    assert any("gradient" in what for what in found)


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("change", [swap_shards, nudge_a_weight, lose_a_policy])
def test_a_checkpoint_that_means_something_else_to_more_ranks_is_caught(
    change: Callable[[Model], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "restored", spoiled(change))
    assert len(failing("reshard", megatron)) == 1


def test_sums_in_parts_are_rounded_as_ranks_round_them() -> None:
    exact = torch.randn(4000, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    found = [
        findings.relative(exact, parallel.in_parts(exact, ranks, torch.Generator().manual_seed(2)))
        for ranks in (2, 8)
    ]
    assert 2**-10 < found[0] < found[1] < 2**-6
    assert findings.relative(exact, parallel.in_parts(exact, 1, torch.Generator())) == 0


def test_cutting_a_sum_leaves_the_gradient_of_everything_behind_it_alone() -> None:
    layer = standins.Layer(Held())
    x = torch.randn(1, 3, 32, requires_grad=True)
    layer(x).sum().backward()
    whole, weight = x.grad.clone(), layer.self_attention.out_proj.weight.grad.clone()
    x.grad = None
    layer.zero_grad()
    with parallel.sums_in_parts(layer, 2, torch.Generator().manual_seed(1)):
        layer(x).sum().backward()
    assert 0 < findings.relative(whole, x.grad) < 1e-6
    assert findings.relative(weight, layer.self_attention.out_proj.weight.grad) == 0
    x.grad = None
    layer(x).sum().backward()
    assert torch.equal(x.grad, whole)


def test_budgets_follow_the_runs_and_mistrust_lucky_ones() -> None:
    def run(loss: float, change: float) -> parallel.Measured:
        return parallel.Measured({"loss": torch.tensor(loss)}, {"w": torch.ones(100) + change})

    runs = [run(1 + 1e-3 * (n % 4), 1e-2) for n in range(parallel.RUNS)]
    budgets = parallel.budgets_of(run(1.0, 0.0), runs)
    assert budgets["w"] == pytest.approx(parallel.SLACK * 1e-2, rel=1e-3)
    assert budgets["loss"] > 2.5 * 3e-3


def test_a_distance_is_of_the_whole_tensor_and_sums_are_over_all_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda tensor: tensor.add_(torch.ones_like(tensor)))
    assert findings.apart(torch.tensor([3.0]), torch.tensor([3.0])) == pytest.approx(0.1**0.5)
    assert findings.summed(torch.tensor([3.0])).item() == 4


def test_each_rank_has_its_own_tokens_and_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "ranks", lambda: 2)
    monkeypatch.setattr(model, "rank", lambda: 1)
    tokens, heads = torch.arange(4.0)[:, None], torch.arange(4.0)[None, None]
    shared = Request("parallel", "both", "none", 2, True, megatron)
    assert parallel.own_part(tokens, shared).flatten().tolist() == [2, 3]
    assert parallel.own_part(tokens, replace(shared, sequence_parallel=False)) is tokens
    assert parallel.own_heads({"g": heads, "cu_seqlens": None})["g"].flatten().tolist() == [2, 3]


def test_an_autotuned_kernel_takes_its_first_configuration_that_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried: list[str] = []

    def measure(self: Autotuner, *args: Any, config: str, **options: Any) -> list[float]:
        tried.append(config)
        if config == "too large":
            return [math.inf] * 3
        return self.do_bench(lambda: tried.append("ran"), quantiles=(0.5,))

    monkeypatch.setattr(Autotuner, "_bench", measure)
    monkeypatch.setattr(Autotuner, "do_bench", Autotuner.__dict__["do_bench"])
    for name in tuning.FORGET:
        monkeypatch.setenv(name, "1")
    tuning.take_first_configurations()
    tuner = Autotuner.__new__(Autotuner)
    for _ in range(2):
        tuner.nargs = {}
        timings = {name: tuner._bench(config=name) for name in ("too large", "fits", "better")}
        assert min(timings, key=timings.__getitem__) == "fits"
    assert tried == ["too large", "fits", "ran"] * 2
    assert {os.environ[name] for name in tuning.FORGET} == {"0"}


@pytest.mark.usefixtures("stand_ins")
def test_off_is_judged_where_the_frameworks_own_backward_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: Tensor) -> None:
        raise RuntimeError("not on this GPU")

    def refusing(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, None]:
        o, _ = chunk_gated_delta_rule(q, k, v)
        if o.requires_grad:
            o.register_hook(refuse)
        return o, None

    def unrounded(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, None]:
        return chunk_gated_delta_rule(q, k, v)

    refusing.__name__ = unrounded.__name__ = "chunk_gated_delta_rule"
    monkeypatch.setattr(standins, "chunk_gated_delta_rule", refusing)
    monkeypatch.setattr(kernels.gdn, "chunk_gated_delta_rule", unrounded)
    found = list(world.off(Request("off", "none", "none", 1, False, megatron)))
    assert [f.what for f in found if not f.error <= f.budget] == []
    assert any("RuntimeError: not on this GPU" in f.what for f in found)
    _, adapter = FAULTS["rounds_when_off"]
    assert any("gradient" in what for what in failing("off", adapter))


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("fault", ["wraps_nothing", "wraps_one_of_two"])
def test_a_layer_left_to_a_kernel_that_refuses_to_train_is_caught(
    monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    def refusing(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, None]:
        o, _ = chunk_gated_delta_rule(q, k, v)
        if o.requires_grad:
            raise RuntimeError("not on this GPU")
        return o, None

    refusing.__name__ = "chunk_gated_delta_rule"
    monkeypatch.setattr(standins, "chunk_gated_delta_rule", refusing)
    found = failing("sites", FAULTS[fault][1])
    assert "a step runs" in found
    assert any("the branch output changes" in what for what in found)


@pytest.mark.usefixtures("stand_ins")
def test_a_recompute_that_rounds_otherwise_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    assert failing("recompute", megatron, recompute="selective") == []
    assert failing("recompute", megatron, recompute="full") == ["the forward pass ran as often as asked"]
    calls = iter(range(100))
    monkeypatch.setattr(
        attach, "fused_op", lambda: lambda *a, **k: (op(*a, **k)[0] * (1 + next(calls)), None)
    )
    assert "loss: recompute selective changes nothing" in failing(
        "recompute", megatron, recompute="selective"
    )


def test_gradients_may_differ_only_as_much_as_the_reference_itself() -> None:
    loss, one = torch.tensor(1.0), {"w": torch.tensor([1.0, 1.0])}
    near, far = {"w": torch.tensor([1.0, 1.001])}, {"w": torch.tensor([1.0, 1.1])}
    quiet, noisy = [(loss, one), (loss, one)], [(loss, one), (loss, near)]
    assert [f.error <= f.budget for f in world.same_step("s", quiet, (loss, one))] == [True] * 3
    assert [f.error <= f.budget for f in world.same_step("s", quiet, (loss, near))] == [True, True, False]
    assert [f.error <= f.budget for f in world.same_step("s", noisy, (loss, near))] == [True] * 3
    assert [f.error <= f.budget for f in world.same_step("s", noisy, (loss, far))] == [True, True, False]
    assert [f.error <= f.budget for f in world.same_step("s", noisy, (loss + 1, {}))] == [False] * 3


def test_distances_see_a_bit_and_a_nan() -> None:
    x = torch.tensor([1.0, 2.0], dtype=torch.bfloat16)
    assert findings.differing(x, x.clone()) == 0
    assert findings.differing(x, torch.nextafter(x, x + 1)) == 2
    assert not findings.relative(x, x * float("nan")) <= 1.0
    assert findings.same_bits("x", x, -x, "").error == 2


def test_a_worse_rank_speaks_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    other = [Finding("a", 0.0, 0.0, "fine"), Finding("b", float("nan"), 1.0, "lost")]

    def gather(every: list[Any], mine: list[Finding]) -> None:
        every[:] = [mine, other]

    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    found = findings.together([Finding("a", 3.0, 0.0, "bad"), Finding("b", 0.5, 1.0, "good")])
    assert [f.because for f in found] == ["bad", "rank 1: lost"]


def test_a_scenario_that_raises_is_a_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "unsupported", lambda recompute: "")
    row = checks.request("sites", {}, "kernels.no_such_adapter")
    found = world.result(row, 1)
    assert found["findings"] == []
    assert "ModuleNotFoundError" in found["error"]
    monkeypatch.setattr(model, "unsupported", lambda recompute: "not here")
    assert world.result(row, 1)["unsupported"] == "not here"


def test_megatrons_own_limits_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "parts", lambda: "local")
    assert "Transformer Engine" in model.unsupported("gdn_norm_out")
    assert model.unsupported("full") == ""
    monkeypatch.setattr(model, "parts", lambda: "transformer_engine")
    assert model.unsupported("gdn_norm_out") == ""


def test_a_norm_that_sees_some_tokens_is_marked_and_stays_so() -> None:
    norm = model.MarkedNorm(SimpleNamespace(sequence_parallel=True), hidden_size=8, eps=1e-5)
    assert isinstance(norm.to(torch.bfloat16), torch.nn.RMSNorm)
    assert getattr(norm.weight, model.SPLIT_TOKENS)


def test_adapters_load_from_modules_objects_and_files(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def convert(): pass\ndef revert(): pass\n")
    assert world.load_adapter("kernels.adapters.megatron") is megatron
    assert world.load_adapter("suites.megatron.faults:drops_rules") is FAULTS["drops_rules"][1]
    assert callable(world.load_adapter(str(file)).convert)
    assert checks.adapter_of(load_subject("mine", str(file))) == str(file)
    assert (
        checks.adapter_of(load_subject("megatron", "suites.megatron.subject")) == "kernels.adapters.megatron"
    )
    assert checks.adapter_of(Subject("none", "none")) == ""


def plan() -> Any:
    return make_plan(
        load_tables("suites.megatron.tables:TABLES"), "megatron", [PlannedSubject("megatron", "m")]
    )


def test_the_plan_has_every_cell_and_one_rank_must_run() -> None:
    cases = [p.case for p in plan().cases]
    planned = [
        (c.check.partition(".")[2], {a: v for a, v in c.levels.items() if a != "sm"})
        for c in cases
        if c.check not in ("megatron.controls", "megatron.scope")
    ]
    assert sorted(map(str, planned)) == sorted(map(str, CELLS))
    must = [c for c in cases if c.must_run]
    assert {c.levels["tp"] for c in must} == {"1"}
    assert {c.check for c in must} == {f"megatron.{n}" for n, levels in CELLS if levels["tp"] == "1"}
    faults = {c.levels["fault"]: c.levels["tp"] for c in cases if c.check == "megatron.controls"}
    assert faults == {name: "2" if name in AMONG_RANKS else "1" for name in FAULTS}


def test_all_of_one_size_comes_before_any_of_the_next() -> None:
    sizes = [int(p.case.levels["tp"]) for p in plan().cases if "tp" in p.case.levels]
    assert sizes == sorted(sizes)
    assert set(sizes) == {1, 2, 4, 8}


def test_what_is_not_qualified_is_skipped_with_its_reason_on_any_machine() -> None:
    facts = {"sm": "sm90", "gpus": "8"}
    for scope, because in SCOPE.items():
        found = unmet({"scope": scope, "sm": "sm90"}, facts, TABLES.requirements)
        assert found is not None
        assert because in found.reason
    assert unmet({"tp": "8", "sm": "sm90"}, facts, TABLES.requirements) is None
    found = unmet({"tp": "2", "sm": "sm90"}, facts | {"gpus": "1"}, TABLES.requirements)
    assert found is not None
    assert found.requirement == "2 GPUs"


GOOD = {"findings": [asdict(Finding("x", 0.0, 0.0, "so"))], "unsupported": "", "error": "", "seconds": 1.5}
BAD = {**GOOD, "findings": [asdict(Finding("x", 2.0, 1.0, "off by 2"))]}


class Ranks:
    """Stands in for `subprocess.Popen`: answers each request as `answer` says, and remembers.

    An answer of None ends the processes; one of "forever" keeps them busy.
    """

    def __init__(self, answer: Callable[[dict[str, Any]], dict[str, Any] | str | None]) -> None:
        self.answer = answer
        self.asked: list[list[dict[str, Any]]] = []
        self.environments: list[dict[str, str]] = []
        self.stopped = 0

    def __call__(self, command: Sequence[str], env: dict[str, str], stdout: Any, **_: Any) -> Any:
        rows = json.loads(Path(command[command.index("--requests") + 1]).read_text())
        self.asked.append(rows)
        self.environments.append(env)
        results: list[dict[str, Any]] = []
        made: dict[str, Any] | str | None = "none asked"
        for row in rows:
            made = self.answer(row)
            if not isinstance(made, dict):
                break
            results.append(made)
            if made["error"] and command[command.index("--nproc-per-node") + 1] != "1":
                break
        if results or made == "forever":
            out = Path(command[command.index("--out") + 1])
            out.write_text(json.dumps({"facts": {"torch": "2"}, "results": results}))
        stdout.write(b"W0 noise\nValueError: it broke\nmore")
        return Process(self, running=made == "forever")


class Process:
    """What `Ranks` starts."""

    returncode = 1

    def __init__(self, ranks: Ranks, running: bool) -> None:
        self.ranks = ranks
        self.running = running

    def poll(self) -> int | None:
        return None if self.running else self.returncode

    def terminate(self) -> None:
        self.running = False
        self.ranks.stopped += 1

    kill = terminate

    def wait(self, timeout: float) -> int:
        return self.returncode


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ranks]:
    """Installs a `Ranks` and forgets earlier results."""

    def install(answer: Callable[[dict[str, Any]], dict[str, Any] | str | None]) -> Ranks:
        made = Ranks(answer)
        monkeypatch.setattr(subprocess, "Popen", made)
        monkeypatch.setattr(checks, "result_of", processes.Results())
        return made

    return install


def case(check: str, **levels: str) -> Case:
    return Case(f"megatron.{check}", {"sm": "sm90", **levels}, "ordinary", 0, "megatron")


SUBJECT = load_subject("megatron", "suites.megatron.subject")


def test_cells_of_one_size_share_their_processes(ranks: Callable[..., Ranks]) -> None:
    started = ranks(lambda row: BAD if row["scenario"] == "off" else GOOD)
    first = checks.run(case("sites", tp="1", sites="both", sequence="off"), SUBJECT)
    second = checks.run(case("off", tp="1"), SUBJECT)
    caught = checks.control(case("controls", tp="1", fault="rounds_when_off"), SUBJECT)
    missed = checks.control(case("controls", tp="1", fault="wraps_nothing"), SUBJECT)
    assert len(started.asked) == 1
    alone = len(FAULTS) - len(AMONG_RANKS)
    assert len(started.asked[0]) == len([1 for _, levels in CELLS if levels["tp"] == "1"]) + alone
    assert started.asked[0][0]["sites"] == "both"
    assert first.comparisons[0].passed
    assert first.launch == {"torch": "2", "seconds": "1.5"}
    assert not second.comparisons[0].passed
    assert "off by 2" in second.comparisons[0].because
    assert control_of(caught) == (0.0, "caught by megatron.off: x")
    assert control_of(missed) == (1.0, "caught by nothing")
    checks.run(case("off", tp="2"), SUBJECT)
    checks.control(case("controls", tp="2", fault="last_rank_leaves_the_state"), SUBJECT)
    assert len(started.asked) == 2
    assert "suites.megatron.faults:wraps_nothing" not in str(started.asked[1])


def control_of(output: Any) -> tuple[float, str]:
    (comparison,) = output.comparisons
    assert isinstance(comparison, Comparison)
    assert comparison.kind == "control"
    return comparison.error, comparison.derivation


def test_processes_that_end_early_cost_only_what_was_running(ranks: Callable[..., Ranks]) -> None:
    started = ranks(lambda row: None if row["scenario"] == "off" else GOOD)
    assert checks.run(case("sites", tp="1", sites="both", sequence="off"), SUBJECT).comparisons[0].passed
    with pytest.raises(RuntimeError, match="ended with 1: ValueError: it broke"):
        checks.run(case("off", tp="1"), SUBJECT)
    assert checks.run(case("checkpoint", tp="1"), SUBJECT).comparisons[0].passed
    assert len(started.asked) == 2
    assert "off" not in [row["scenario"] for row in started.asked[1] if "faults" not in row["adapter"]]
    assert "sites" not in [row["scenario"] for row in started.asked[1] if row["sites"] == "both"][:1]


def test_a_failure_that_several_ranks_report_costs_no_other_scenario(ranks: Callable[..., Ranks]) -> None:
    started = ranks(lambda row: {**GOOD, "error": "KeyError: 'x'"} if row["scenario"] == "off" else GOOD)
    with pytest.raises(RuntimeError, match="KeyError"):
        checks.run(case("off", tp="2"), SUBJECT)
    assert checks.run(case("checkpoint", tp="2"), SUBJECT).comparisons[0].passed
    assert len(started.asked) == 2


def test_a_scenario_that_does_not_end_is_stopped(
    ranks: Callable[..., Ranks], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "LIMIT_S", 0.05)
    monkeypatch.setattr(processes, "POLL_S", 0.01)
    started = ranks(lambda row: "forever" if row["scenario"] == "off" else GOOD)
    assert checks.run(case("sites", tp="1", sites="both", sequence="off"), SUBJECT).comparisons[0].passed
    with pytest.raises(RuntimeError, match=r"must end within 0\.05 s"):
        checks.run(case("off", tp="1"), SUBJECT)
    assert started.stopped == 1
    assert checks.run(case("checkpoint", tp="1"), SUBJECT).comparisons[0].passed


def test_processes_that_cannot_start_are_not_started_again(ranks: Callable[..., Ranks]) -> None:
    started = ranks(lambda row: None)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="ValueError: it broke"):
            checks.run(case("off", tp="1"), SUBJECT)
    with pytest.raises(RuntimeError, match="ValueError: it broke"):
        checks.run(case("checkpoint", tp="1"), SUBJECT)
    assert len(started.asked) == 1


def test_what_a_scenario_took_is_said(
    ranks: Callable[..., Ranks], capsys: pytest.CaptureFixture[str]
) -> None:
    ranks(lambda row: GOOD)
    checks.run(case("off", tp="1"), SUBJECT)
    assert "off tp=1" in capsys.readouterr().err.splitlines()[0]


def test_what_cannot_run_here_is_unsupported(ranks: Callable[..., Ranks]) -> None:
    ranks(lambda row: {**GOOD, "unsupported": "no engine"})
    assert checks.run(case("off", tp="1"), SUBJECT).unsupported == "no engine"
    assert "neither ADAPTER" in checks.run(case("off", tp="1"), Subject("none", "none")).unsupported
    assert "pipeline" in checks.out_of_scope(case("scope", scope="pipeline-parallelism"), SUBJECT).unsupported


def test_each_rank_gets_a_gpu_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DEVICES_VARIABLE, "4,4,5,5,6,6,7,7")
    assert processes.environment(2)["CUDA_VISIBLE_DEVICES"] == "4,5"
    monkeypatch.setenv(DEVICES_VARIABLE, "")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert processes.environment(1)["CUDA_VISIBLE_DEVICES"] == "3"


def test_the_command_is_qualify_run_with_this_suites_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []
    monkeypatch.setattr(run, "qualify", seen.append)
    monkeypatch.setattr("sys.argv", ["run"])
    run.main(["--out", "somewhere"])
    run.main(["--profile", "megatron-sm80"])
    assert seen[0][:5] == ["run", "--tables", run.TABLES, "--profile", "megatron"]
    assert seen[1].count("--profile") == 1
