"""The Megatron suite plans what it says, and its scenarios catch every planted fault, here on stand-ins."""

# mypy: disable-error-code="no-any-return, union-attr, index, arg-type, operator, assignment, misc"
# mypy: allow-untyped-calls

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import kernels.gdn
from kernels.adapters import attach, megatron
from qualify.case import Case
from qualify.plan import PlannedSubject
from qualify.planning import make_plan
from qualify.plugin import DEVICES_VARIABLE
from qualify.records import Comparison
from qualify.requirements import unmet
from qualify.subjects import Subject, load_subject
from qualify.tables import load_tables
from suites.megatron import checks, model, run, world
from suites.megatron.faults import FAULTS
from suites.megatron.tables import CELLS, SCOPE, TABLES
from suites.megatron.world import Finding, Request
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
        tensor_parallel: int, recompute: str = "none", seed: int = 1, *, sequence_parallel: bool
    ) -> Model:
        torch.manual_seed(seed)
        return Model(Held(), Held())

    folders = iter(tmp_path / str(n) for n in range(9))
    monkeypatch.setattr(model, "build", build)
    monkeypatch.setattr(
        model, "batch", lambda: torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(1))
    )
    monkeypatch.setattr(model, "loss_of", lambda net, data: net(data).square().mean())
    monkeypatch.setattr(attach, "fused_op", lambda: op)
    monkeypatch.setattr(kernels.gdn, "chunk_gated_delta_rule", op)
    monkeypatch.setattr(world, "shared_folder", lambda: folder_of(next(folders)))
    monkeypatch.setattr(world, "save", lambda net, folder: torch.save(net.state_dict(), f"{folder}/state"))
    monkeypatch.setattr(world, "restored", restored)


def restored(net: Model, folder: str) -> Iterator[Finding]:
    result = net.load_state_dict(torch.load(f"{folder}/state"), strict=False)
    yield world.holds("the checkpoint restores every weight", not result.missing_keys, "")


def failing(scenario: str, adapter: Any, sites: str = "both", recompute: str = "none") -> list[str]:
    request = Request(scenario, sites, recompute, 1, False, adapter)
    return [f.what for f in world.SCENARIOS[scenario](request) if not f.error <= f.budget]


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("sites", ["state", "w", "both"])
@pytest.mark.parametrize("scenario", ["sites", "off", "checkpoint", "refusals"])
def test_the_real_adapter_passes(scenario: str, sites: str) -> None:
    assert failing(scenario, megatron, sites) == []


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("fault", FAULTS)
def test_every_planted_fault_is_caught(fault: str) -> None:
    scenario, adapter = FAULTS[fault]
    assert failing(scenario, adapter)
    assert failing(scenario, megatron) == []


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
    assert world.differing(x, x.clone()) == 0
    assert world.differing(x, torch.nextafter(x, x + 1)) == 2
    assert not world.relative(x, x * float("nan")) <= 1.0
    assert world.same_bits("x", x, -x, "").error == 2


def test_a_worse_rank_speaks_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    other = [Finding("a", 0.0, 0.0, "fine"), Finding("b", float("nan"), 1.0, "lost")]

    def gather(every: list[Any], mine: list[Finding]) -> None:
        every[:] = [mine, other]

    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    found = world.together([Finding("a", 3.0, 0.0, "bad"), Finding("b", 0.5, 1.0, "good")])
    assert [f.because for f in found] == ["bad", "rank 1: lost"]


def test_a_scenario_that_raises_is_a_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "unsupported", lambda recompute, sequence: "")
    row = checks.request("sites", {}, "kernels.no_such_adapter")
    found = world.result(row, 1)
    assert found["findings"] == []
    assert "ModuleNotFoundError" in found["error"]
    monkeypatch.setattr(model, "unsupported", lambda recompute, sequence: "not here")
    assert world.result(row, 1)["unsupported"] == "not here"


def test_megatrons_own_limits_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "parts", lambda: "local")
    assert "Transformer Engine" in model.unsupported("gdn_norm_out", False)
    assert "sequence" in model.unsupported("none", True)
    assert model.unsupported("full", False) == ""
    monkeypatch.setattr(model, "parts", lambda: "transformer_engine")
    assert model.unsupported("gdn_norm_out", True) == ""


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
    assert {c.check for c in must} == {f"megatron.{name}" for name, _ in CELLS}
    assert {c.levels["fault"] for c in cases if c.check == "megatron.controls"} == set(FAULTS)


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


GOOD = {"findings": [asdict(Finding("x", 0.0, 0.0, "so"))], "unsupported": "", "error": ""}
BAD = {"findings": [asdict(Finding("x", 2.0, 1.0, "off by 2"))], "unsupported": "", "error": ""}


class Ranks:
    """Stands in for `subprocess.run`: writes a result for each request, as `answer` says, and remembers."""

    def __init__(self, answer: Callable[[dict[str, Any]], dict[str, Any] | None]) -> None:
        self.answer = answer
        self.asked: list[list[dict[str, Any]]] = []
        self.environments: list[dict[str, str]] = []

    def __call__(self, command: Sequence[str], env: dict[str, str], **_: Any) -> Any:
        rows = json.loads(Path(command[command.index("--requests") + 1]).read_text())
        self.asked.append(rows)
        self.environments.append(env)
        results: list[dict[str, Any]] = []
        for row in rows:
            made = self.answer(row)
            if made is None:
                break
            results.append(made)
        if results:
            out = Path(command[command.index("--out") + 1])
            out.write_text(json.dumps({"facts": {"torch": "2"}, "results": results}))
        return SimpleNamespace(returncode=0, stderr="W0 noise\nValueError: it broke\nmore")


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ranks]:
    """Installs a `Ranks` and forgets earlier results."""

    def install(answer: Callable[[dict[str, Any]], dict[str, Any] | None]) -> Ranks:
        made = Ranks(answer)
        monkeypatch.setattr(subprocess, "run", made)
        monkeypatch.setattr(checks, "_RESULTS", {})
        monkeypatch.setattr(checks, "_BATCHED", set())
        return made

    return install


def case(check: str, **levels: str) -> Case:
    return Case(f"megatron.{check}", {"sm": "sm90", **levels}, "ordinary", 0, "megatron")


SUBJECT = load_subject("megatron", "suites.megatron.subject")


def test_cells_of_one_size_share_their_processes(ranks: Callable[..., Ranks]) -> None:
    started = ranks(lambda row: BAD if row["scenario"] == "off" else GOOD)
    first = checks.run(case("sites", tp="1", sites="both", sequence="off"), SUBJECT)
    second = checks.run(case("off", tp="1"), SUBJECT)
    caught = checks.control(case("controls", fault="rounds_when_off"), SUBJECT)
    missed = checks.control(case("controls", fault="wraps_nothing"), SUBJECT)
    assert len(started.asked) == 1
    assert len(started.asked[0]) == len([1 for _, levels in CELLS if levels["tp"] == "1"]) + len(FAULTS)
    assert first.comparisons[0].passed
    assert first.launch == {"torch": "2"}
    assert not second.comparisons[0].passed
    assert "off by 2" in second.comparisons[0].because
    assert control_of(caught) == (0.0, "caught by megatron.off: x")
    assert control_of(missed) == (1.0, "caught by nothing")
    checks.run(case("off", tp="2"), SUBJECT)
    assert len(started.asked) == 2
    assert "suites.megatron.faults:wraps_nothing" not in str(started.asked[1])


def control_of(output: Any) -> tuple[float, str]:
    (comparison,) = output.comparisons
    assert isinstance(comparison, Comparison)
    assert comparison.kind == "control"
    return comparison.error, comparison.derivation


def test_a_cell_that_the_batch_did_not_reach_is_run_alone(ranks: Callable[..., Ranks]) -> None:
    started: Ranks = ranks(lambda row: GOOD if len(started.asked) > 1 or row["scenario"] == "sites" else None)
    assert checks.run(case("off", tp="1"), SUBJECT).comparisons[0].passed
    assert [len(rows) for rows in started.asked][1:] == [1]
    assert checks.run(case("checkpoint", tp="1"), SUBJECT).comparisons[0].passed
    assert len(started.asked) == 3


def test_failures_are_errors_with_their_reason(ranks: Callable[..., Ranks]) -> None:
    ranks(lambda row: None)
    with pytest.raises(RuntimeError, match="ValueError: it broke"):
        checks.run(case("off", tp="1"), SUBJECT)
    ranks(lambda row: {**GOOD, "error": "KeyError: 'x'"})
    with pytest.raises(RuntimeError, match="KeyError"):
        checks.run(case("off", tp="1"), SUBJECT)


def test_what_cannot_run_here_is_unsupported(ranks: Callable[..., Ranks]) -> None:
    ranks(lambda row: {**GOOD, "unsupported": "no engine"})
    assert checks.run(case("off", tp="1"), SUBJECT).unsupported == "no engine"
    assert "neither ADAPTER" in checks.run(case("off", tp="1"), Subject("none", "none")).unsupported
    assert "pipeline" in checks.out_of_scope(case("scope", scope="pipeline-parallelism"), SUBJECT).unsupported


def test_each_rank_gets_a_gpu_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DEVICES_VARIABLE, "4,5,6,7")
    assert checks.environment(2)["CUDA_VISIBLE_DEVICES"] == "4,5"
    monkeypatch.setenv(DEVICES_VARIABLE, "")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert checks.environment(1)["CUDA_VISIBLE_DEVICES"] == "3"


def test_the_command_is_qualify_run_with_this_suites_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []
    monkeypatch.setattr(run, "qualify", seen.append)
    monkeypatch.setattr("sys.argv", ["run"])
    run.main(["--out", "somewhere"])
    run.main(["--profile", "megatron-sm80"])
    assert seen[0][:5] == ["run", "--tables", run.TABLES, "--profile", "megatron"]
    assert seen[1].count("--profile") == 1
