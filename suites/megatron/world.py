"""What happens inside the processes of one case: a scenario on a real model, and what was found.

    python -m torch.distributed.run --standalone --nproc-per-node 1 -m suites.megatron.world \
        --requests requests.json --out found.json

A scenario returns findings; those of all ranks are put together and the first rank writes them. It judges
nothing: the check that started it does. Several scenarios share a process, since starting one costs far more
than a small model.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

import argparse
import functools
import importlib
import importlib.util
import json
import math
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from kernels.policy import OFF, Resolved, policy_from_config
from kernels.quantizers import Sites
from qualify.own_gpu import uuids_in_use
from suites.megatron import model as models
from suites.megatron import storage
from suites.megatron.findings import Finding, apart, differing, holds, relative, same_bits, together
from suites.megatron.parallel import parallel, reshard
from suites.megatron.request import BLOCK_V, Request, configuration, options
from suites.megatron.tuning import take_first_configurations

Tensor = torch.Tensor

STEPS, REPEATS = 20, 3


def branches(model: Any, data: models.Batch) -> tuple[Any, dict[str, Tensor]]:
    """The arguments of every gated delta net, and its output on them."""
    inputs = models.branch_inputs(model, data)
    return inputs, models.branch_outputs(model, inputs)


def wired_by_hand(model: Any, inputs: Any, sites: str, block_v: int = BLOCK_V) -> dict[str, Tensor]:
    """Branch outputs with the fused op put on the modules without any adapter."""
    from kernels.gdn import chunk_gated_delta_rule

    modules = models.gated_delta_nets(model).values()
    before = [module.gated_delta_rule for module in modules]
    for module in modules:
        module.gated_delta_rule = functools.partial(chunk_gated_delta_rule, **options(sites, block_v))
    found = models.branch_outputs(model, inputs)
    for module, kernel in zip(modules, before, strict=True):
        module.gated_delta_rule = kernel
    return found


def sites(request: Request) -> Iterator[Finding]:
    """The sites act, on every layer, exactly as the op itself does; the model trains; undoing undoes."""
    model, data = request.build(), models.batch()
    inputs, off = branches(model, data)
    expected = wired_by_hand(model, inputs, request.sites)
    kernels = {name: module.gated_delta_rule for name, module in models.gated_delta_nets(model).items()}
    request.adapter.convert(model, configuration(request.sites), verbose=False)
    actual = models.branch_outputs(model, inputs)
    for name in off:
        change = apart(off[name], actual[name])
        acts = 1e-4 < change < 0.5
        yield holds(
            f"{name}: the branch output changes", acts, f"relative L2 {change:.3g}, between 1e-4 and 0.5"
        )
        yield same_bits(
            f"{name}: the branch is the op", expected[name], actual[name], "against the op by hand"
        )
    yield from trains(model, data)
    request.adapter.revert(model)
    for name, module in models.gated_delta_nets(model).items():
        same = module.gated_delta_rule is kernels[name]
        yield holds(f"{name}: reverting puts the kernel back", same, "the very object")


def trains(model: Any, data: models.Batch) -> Iterator[Finding]:
    """A step: finite gradients that reach every weight of a branch, and weights that move."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)  # more than a bf16 step of the largest weight
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    try:
        loss = models.loss_of(model, data)
        loss.backward()
    except Exception as error:  # noqa: BLE001  a kernel that was left in place may refuse to train
        yield holds("a step runs", False, f"{type(error).__name__}: {error!s:.200}")
        return
    yield holds("the loss is finite", math.isfinite(float(loss.detach())), f"{float(loss.detach()):.5g}")
    for name, parameter in model.named_parameters():
        if "self_attention" in name:
            norm = float("nan") if parameter.grad is None else float(parameter.grad.double().norm())
            yield holds(f"{name}: has a gradient", 0 < norm < math.inf, f"norm {norm:.3g}")
    optimizer.step()
    moved = [
        n for n, p in model.named_parameters() if "self_attention" in n and not torch.equal(p, before[n])
    ]
    branch = [n for n in before if "self_attention" in n]
    yield holds(
        "a step moves the weights of the branches",
        len(moved) == len(branch),
        f"{len(moved)} of {len(branch)}",
    )


def off(request: Request) -> Iterator[Finding]:
    """A converted model with both sites off is the original, bit for bit, forward and backward."""
    model, data = request.build(), models.batch()
    inputs, before = branches(model, data)
    request.adapter.convert(model, configuration("none"), verbose=False)
    after = models.branch_outputs(model, inputs)
    for name in before:
        yield same_bits(f"{name}: off is the original", before[name], after[name], "the same inputs")
    request.adapter.revert(model)
    kernel = trainable(model, data)
    runs = [models.loss_and_gradients(model, data) for _ in range(REPEATS)]
    request.adapter.convert(model, configuration("none"), verbose=False)
    yield from same_step(f"off is the original, {kernel}", runs, models.loss_and_gradients(model, data))


def trainable(model: Any, data: models.Batch) -> str:
    """Says which kernel a model trains with; where its own refuses, the op without rounding takes its place.

    FLA's backward refuses Hopper with some releases of Triton unless TileLang is installed.
    """
    from kernels.gdn import chunk_gated_delta_rule

    try:
        models.loss_and_gradients(model, data)
    except Exception as error:  # noqa: BLE001  a refusal may be any exception
        for module in models.gated_delta_nets(model).values():
            module.gated_delta_rule = chunk_gated_delta_rule
        return f"with the op unrounded as its kernel (its own: {type(error).__name__}: {error!s:.120})"
    return "with its own kernel"


def same_step(what: str, runs: Sequence[models.Step], other: models.Step) -> Iterator[Finding]:
    """A step must be what repeated runs of a reference are: the same bits, unless those differ themselves.

    Where a gradient of the reference differs from run to run, noise may reach every gradient: each may then
    be four times as far as the most that any differed.
    """
    loss, gradients = runs[0]
    yield same_bits(f"loss: {what}", loss, other[0], f"{float(loss):.6g}")
    yield holds(f"gradients: {what}", set(other[1]) == set(gradients), f"of {len(other[1])} weights")
    noise = max(relative(gradients[name], again[name]) for _, again in runs[1:] for name in gradients)
    for name in gradients:
        distance = relative(gradients[name], other[1][name]) if name in other[1] else math.nan
        yield Finding(f"{name}: gradient, {what}", distance, 4 * noise, f"runs differ by at most {noise:.3g}")


def recompute(request: Request) -> Iterator[Finding]:
    """A forward pass that runs again in the backward pass rounds to the same codes."""
    data = models.batch()
    plain, again = request.build(), request.build(request.recompute)
    for model in (plain, again):
        request.adapter.convert(model, configuration(request.sites), verbose=False)
    runs = [models.loss_and_gradients(plain, data) for _ in range(REPEATS)]
    other = models.loss_and_gradients(again, data)
    yield from same_step(f"recompute {request.recompute} changes nothing", runs, other)
    calls = [module.gated_delta_rule.rounded_calls for module in models.gated_delta_nets(again).values()]
    expected = 2 if request.recompute == "full" else 1
    yield holds("the forward pass ran as often as asked", set(calls) == {expected}, f"rounded calls {calls}")


def checkpoint(request: Request) -> Iterator[Finding]:
    """An edited policy is restored from a distributed checkpoint; an older one switches both sites off."""
    data = models.batch()
    saved = request.build()
    inputs = models.branch_inputs(saved, data)
    with storage.shared_folder() as old:
        storage.save(saved, old)
        late = request.build(seed=99)
        request.adapter.convert(late, configuration("both"), verbose=False)
        yield from storage.restored(late, old)
        yield holds(
            "a checkpoint without policies switches both sites off",
            all(request.adapter.policy_of(m).resolved == OFF for m in models.gated_delta_nets(late).values()),
            "every module",
        )
        yield from equal_branches("restored without policies", saved, late, inputs)
    request.adapter.convert(saved, configuration("both"), verbose=False)
    edited = Resolved(Sites("int8", None), policy_from_config({"state": {"block_v": 16}}))
    first, *_ = models.gated_delta_nets(saved).values()
    request.adapter.policy_of(first).resolved = edited
    with storage.shared_folder() as new:
        storage.save(saved, new)
        fresh = request.build(seed=98)
        request.adapter.convert(fresh, configuration("none"), verbose=False)
        yield from storage.restored(fresh, new)
    for (name, a), b in zip(
        models.gated_delta_nets(saved).items(), models.gated_delta_nets(fresh).values(), strict=True
    ):
        want, got = request.adapter.policy_of(a).resolved, request.adapter.policy_of(b).resolved
        yield holds(f"{name}: the policy is restored", want == got, f"{got.to_json()}")
    yield from equal_branches("restored with an edited policy", saved, fresh, inputs)


def equal_branches(when: str, one: Any, two: Any, inputs: Any) -> Iterator[Finding]:
    """Two models whose branches must be equal in every bit on the same inputs."""
    expected, actual = models.branch_outputs(one, inputs), models.branch_outputs(two, inputs)
    for name in expected:
        yield same_bits(f"{name}: {when}", expected[name], actual[name], "the branch output")


def packed(request: Request) -> Iterator[Finding]:
    """Packed sequences reach the op: it is the op by hand, and no document sees another."""
    from megatron.core.packed_seq_params import PackedSeqParams

    model = request.build()
    boundary = models.TOKENS // 3 + 1  # inside a chunk
    ends = torch.tensor([0, boundary, models.TOKENS], dtype=torch.int32, device=models.device())
    longest = models.TOKENS - boundary
    parameters = PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=longest, max_seqlen_kv=longest
    )
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(models.TOKENS, 1, models.HIDDEN, generator=generator).to(
        models.device(), torch.bfloat16
    )
    changed = hidden.clone()
    changed[:boundary] *= -1.5
    inputs = {n: ((hidden, None), {"packed_seq_params": parameters}) for n in models.gated_delta_nets(model)}
    expected = wired_by_hand(model, inputs, request.sites)
    request.adapter.convert(model, configuration(request.sites), verbose=False)
    actual = models.branch_outputs(model, inputs)
    moved = models.branch_outputs(
        model, {n: ((changed, None), options) for n, (_, options) in inputs.items()}
    )
    for name in expected:
        yield same_bits(f"{name}: the packed branch is the op", expected[name], actual[name], "by hand")
        yield same_bits(
            f"{name}: a document does not see another",
            actual[name][boundary:],
            moved[name][boundary:],
            "the second document with two different first ones",
        )
        yield holds(
            f"{name}: a document sees itself",
            differing(actual[name][:boundary], moved[name][:boundary]) > 0,
            "the first document changed",
        )


def refusals(request: Request) -> Iterator[Finding]:
    """What cannot be rounded is refused, and the model is left as it was."""
    model = request.build()
    module = next(iter(models.gated_delta_nets(model).values()))
    kernel = module.gated_delta_rule

    def other_kernel(*args: Any, **kwargs: Any) -> Any:
        return kernel(*args, **kwargs)

    other_kernel.__name__ = "other_kernel"
    wrong = {**configuration("both"), "linear_attention": [{"module_name": "decoder.layers.9.*", "cfg": {}}]}
    cases: list[tuple[str, Callable[[], None], dict[str, Any]]] = [
        ("context parallelism", lambda: setattr(module, "cp_size", 2), configuration("both")),
        (
            "an unknown kernel",
            lambda: setattr(module, "gated_delta_rule", other_kernel),
            configuration("both"),
        ),
        (
            "deterministic mode",
            lambda: setattr(module.config, "deterministic_mode", True),
            configuration("both"),
        ),
        ("a rule that matches nothing", lambda: None, wrong),
    ]
    for what, spoil, config in cases:
        spoil()
        refused = refusal(functools.partial(request.adapter.convert, model, config, verbose=False))
        module.cp_size, module.config.deterministic_mode = 1, False
        untouched = module.gated_delta_rule in (kernel, other_kernel)
        module.gated_delta_rule = kernel
        yield holds(f"{what} is refused", bool(refused) and untouched, refused or "was accepted")


def refusal(call: Callable[[], Any]) -> str:
    """The message of the refusal that a call ends in; empty when it is accepted."""
    try:
        call()
    except (ValueError, TypeError, NotImplementedError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def modelopt(request: Request) -> Iterator[Finding]:
    """The configuration of the guide trains a model for twenty steps with both sites on."""
    import modelopt.torch.quantization as standard

    from kernels.adapters import modelopt as mtq
    from kernels.adapters.attach import policy_of
    from suites.megatron.example import CONFIG, train

    plain = request.build()
    mtq.quantize(plain, {**standard.FP8_DEFAULT_CFG, "algorithm": None}, verbose=False)
    on = [n for n, m in models.gated_delta_nets(plain).items() if not policy_of(m).resolved.off]
    yield holds("a standard recipe leaves the sites off", not on, f"on: {on or 'none'}")
    model, data = request.build(), models.batch()
    inputs, before = branches(model, data)
    expected = wired_by_hand(model, inputs, "both", block_v=64)
    mtq.quantize(model, CONFIG, verbose=False)
    actual = models.branch_outputs(model, inputs)
    for name in before:
        change = apart(before[name], actual[name])
        yield holds(f"{name}: the branch output changes", 1e-4 < change < 0.5, f"relative L2 {change:.3g}")
        yield same_bits(
            f"{name}: the branch is the op", expected[name], actual[name], "against the op by hand"
        )
    losses = train(model, data, STEPS)
    calls = [m.gated_delta_rule.rounded_calls for m in models.gated_delta_nets(model).values()]
    yield holds("every step rounds in every layer", min(calls) >= STEPS, f"rounded calls {calls}")
    finite = all(math.isfinite(loss) for loss in losses)
    yield holds(
        "the loss goes down", finite and losses[-1] < 0.9 * losses[0], f"{losses[0]:.4g} to {losses[-1]:.4g}"
    )
    mtq.disable_quantizer(model, "*gdn_*_quantizer")
    off = [m for m in models.gated_delta_nets(model).values() if policy_of(m).resolved.off]
    yield holds("disable_quantizer switches the sites off", len(off) == models.LAYERS, f"{len(off)} off")


SCENARIOS: Mapping[str, Callable[[Request], Iterator[Finding]]] = {
    f.__name__: f for f in (sites, off, recompute, checkpoint, parallel, reshard, packed, refusals, modelopt)
}


def facts() -> dict[str, str]:
    """What ran: versions, and which parts the model was made of."""
    from kernels.adapters.convert import versions

    own = models.device()
    gpu = uuids_in_use()[own.index] if own.type == "cuda" else "none"
    every: list[str] = [""] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(every, gpu)
    return {
        **versions(),
        "model parts": models.parts(),
        "autotuning": "first configuration that runs",
        "ranks": str(len(every)),
        "GPUs": ", ".join(every),
    }


def load_adapter(path: str) -> Any:
    """A module, a `.py` file, or `module:name` of an object in a module."""
    if path.endswith(".py"):
        found = importlib.util.spec_from_file_location("gdn_qualify_adapter", path)
        if found is None or found.loader is None:
            raise ImportError(f"{path} is no Python file")
        loaded = importlib.util.module_from_spec(found)
        found.loader.exec_module(loaded)
        return loaded
    module, _, name = path.partition(":")
    held = importlib.import_module(module)
    return getattr(held, name) if name else held


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs scenarios one after the other; writes `{facts, results}` as JSON after each.

    A result is `{findings, unsupported, error}`. With several ranks the first error ends the process, since
    the others may wait for the one that failed; what was finished stays written.
    """
    parser = argparse.ArgumentParser(prog="python -m suites.megatron.world", description=__doc__)
    parser.add_argument("--requests", type=Path, required=True, help="JSON list of scenarios")
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args(arguments)
    take_first_configurations()
    models.start(asked.tensor_parallel)
    results: list[dict[str, Any]] = []
    known = facts()
    write(asked.out, known, results)
    for row in json.loads(asked.requests.read_text()):
        start = time.perf_counter()
        results.append({**result(row, asked.tensor_parallel), "seconds": time.perf_counter() - start})
        write(asked.out, known, results)
        if results[-1]["error"] and torch.distributed.get_world_size() > 1:
            return 1
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    return 0


def write(path: Path, known: Mapping[str, str], results: Sequence[Mapping[str, Any]]) -> None:
    """Writes what is known, on the first rank: whole or not at all, since it is read meanwhile."""
    if torch.distributed.get_rank() == 0:
        draft = path.with_suffix(".part")
        draft.write_text(json.dumps({"facts": known, "results": results}, indent=1))
        draft.replace(path)


def result(row: Mapping[str, Any], tensor_parallel: int) -> dict[str, Any]:
    """What one scenario found, why Megatron cannot run it here, or how it failed."""
    unsupported = models.unsupported(row["recompute"])
    found: dict[str, Any] = {"findings": [], "unsupported": unsupported, "error": ""}
    if unsupported:
        return found
    try:
        request = Request(**{**row, "adapter": load_adapter(row["adapter"])}, tensor_parallel=tensor_parallel)
        found["findings"] = [asdict(f) for f in together(list(SCENARIOS[request.scenario](request)))]
    except Exception as error:  # noqa: BLE001  whatever a scenario raises is its result
        found["error"] = f"{type(error).__name__}: {error} {place(error)}"
        print(found["error"], file=sys.stderr, flush=True)
    return found


def place(error: BaseException) -> str:
    """The innermost frames of an exception."""
    frames = traceback.extract_tb(error.__traceback__)[-3:]
    return "(" + ", ".join(f"{Path(f.filename).name}:{f.lineno} in {f.name}" for f in frames) + ")"


if __name__ == "__main__":
    raise SystemExit(main())
