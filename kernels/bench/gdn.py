"""The fused op against an fp64 oracle, against unquantized FLA, and launch row against launch row.

    python -m kernels.bench.gdn --smoke                  every kind of call once, error of each tensor
    python -m kernels.bench.gdn --rows                   every launch row forced: time and error
    python -m kernels.bench.gdn --out DIR                the table of times, with the error of each timed call

The oracle is named, not imported: `--oracle module:function`, called as the op is, then differentiated.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import triton

from kernels.bench.timing import interleaved_ms, recorded, summary_ms
from kernels.gdn import LAUNCH_ROWS, chunk_gated_delta_rule
from kernels.launch import force_launch_row, rows_of

Tensor = torch.Tensor
Op = Callable[..., tuple[Tensor, Tensor | None]]

TENSORS = ("o", "ht", "dq", "dk", "dv", "dg", "db", "dh0")
ORACLE = "references.gdn_chunk:gdn_chunk"
WORST = {"bf16": 0.03, "fp16": 0.01, "fp32": 0.01}
"""Relative L2 error above which the smoke test marks a line; the judge has derived budgets, this has not."""


@dataclass(frozen=True)
class Config:
    """One call.

    Attributes:
        lengths: of packed sequences; None for B sequences of T tokens.
        decay: g is uniform in [-decay, 0].
        sites: whether both sites round to E4M3; `state` and `w` name formats one by one.
    """

    name: str
    dtype: torch.dtype = torch.bfloat16
    B: int = 1
    T: int = 300
    H: int = 2
    HV: int = 4
    K: int = 128
    V: int = 128
    lengths: tuple[int, ...] | None = None
    v_first: bool = False
    initial: bool = True
    state: str | None = None
    w: str | None = None
    block_v: int = 64
    decay: float = 0.1
    precision: str = "tf32"

    def with_sites(self) -> Config:
        """This call with both sites on."""
        return replace(self, state="e4m3", w="e4m3")

    @property
    def carrier(self) -> str:
        """Short name of the dtype."""
        return {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}[self.dtype]

    def options(self) -> dict[str, Any]:
        """Keyword arguments of op and oracle alike."""
        return {
            "state_v_first": self.v_first,
            "state_format": self.state,
            "state_block_v": self.block_v,
            "w_format": self.w,
        }


@dataclass(frozen=True)
class Inputs:
    """The tensors of a call."""

    leaves: dict[str, Tensor]
    cu_seqlens: Tensor | None
    do: Tensor
    dht: Tensor


def make_inputs(config: Config, device: str = "cuda", seed: int = 0) -> Inputs:
    """Seeded inputs; keys have unit length."""
    random = torch.Generator(device).manual_seed(seed)
    c = config

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random, device=device)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(shape, generator=random, device=device)

    cu, sequences = None, c.B
    if c.lengths is not None:
        ends = torch.tensor(c.lengths).cumsum(0)
        cu = torch.cat((torch.zeros(1, dtype=ends.dtype), ends)).to(device)
        sequences = len(c.lengths)
    inner = (c.V, c.K) if c.v_first else (c.K, c.V)
    state = (sequences, c.HV, *inner)
    key = torch.nn.functional.normalize(normal(c.B, c.T, c.H, c.K), dim=-1)
    leaves = {
        "q": normal(c.B, c.T, c.H, c.K).to(c.dtype),
        "k": key.to(c.dtype),
        "v": normal(c.B, c.T, c.HV, c.V).to(c.dtype),
        "g": -c.decay * uniform(c.B, c.T, c.HV),
        "beta": uniform(c.B, c.T, c.HV),
    }
    if c.initial:
        leaves["initial_state"] = normal(*state)
    return Inputs(leaves, cu, normal(c.B, c.T, c.HV, c.V).to(c.dtype), normal(*state))


def run(op: Op, x: Inputs, **options: Any) -> list[Tensor]:
    """o, the final state and the gradients of all inputs, for incoming gradients of both outputs."""
    wide = options.pop("wide", False)
    leaves = {n: (t.double() if wide else t.detach()).requires_grad_() for n, t in x.leaves.items()}
    o, final = op(**leaves, cu_seqlens=x.cu_seqlens, **options)
    assert final is not None
    incoming = [d.double() if wide else d for d in (x.do, x.dht)]
    gradients = torch.autograd.grad([o, final], list(leaves.values()), incoming)
    return [o.detach(), final.detach(), *gradients]


def errors(config: Config, oracle: Op, device: str = "cuda") -> dict[str, float]:
    """Relative L2 error of every tensor against the oracle in fp64."""
    x = make_inputs(config, device)
    actual = run(
        chunk_gated_delta_rule,
        x,
        output_final_state=True,
        input_precision=config.precision,
        **config.options(),
    )
    expected = run(oracle, x, wide=True, w_dtype=config.dtype, **config.options())
    return {
        name: float((a.double() - e).norm() / e.norm().clamp_min(1e-30))
        for name, a, e in zip(TENSORS, actual, expected, strict=False)
    }


def smoke_configs() -> list[Config]:
    """Each kind of call once; both carriers that differ; sites on and off."""
    bf16, fp32, fp16 = torch.bfloat16, torch.float32, torch.float16
    plain = [
        Config("plain"),
        Config("plain", fp32),
        Config("plain", fp16),
        Config("ieee", fp32, precision="ieee"),
    ]
    sizes = [Config(f"{k}x{v}", d, K=k, V=v) for d in (bf16, fp32) for k, v in
             ((16, 16), (32, 64), (64, 32), (64, 64), (64, 128), (100, 48), (128, 32), (128, 256), (192, 64),
              (256, 128))]  # fmt: skip
    tails = [Config(f"T{t}", T=t, HV=2, K=64, V=64) for t in (1, 15, 63, 64, 65, 129, 145)]
    packed = [
        Config("packed", d, T=400, lengths=(1, 0, 64, 130, 5, 200), K=64, V=64, v_first=v)
        for d, v in ((bf16, False), (fp32, True))
    ]
    many = [Config("3000 documents", T=3000, lengths=(1,) * 3000, K=32, V=32, H=1, HV=2)]
    decays = [Config(f"decay {d:g}", T=200, decay=d) for d in (0.0, 1.0, 20.0, 90.0)]
    kinds = [*plain, *sizes, *tails, *packed, *many, *decays, Config("B3 no h0", B=3, initial=False),
             Config("HV=H", H=4), Config("HV=8H", H=1, HV=8), Config("v first", v_first=True)]  # fmt: skip
    tiles = [Config(f"block_v {b}", d, T=200, V=96, block_v=b).with_sites() for d in (bf16, fp32)
             for b in (16, 32, 64, 128)]  # fmt: skip
    int8 = [replace(Config("int8", d), state="int8") for d in (bf16, fp32)]
    return kinds + [config.with_sites() for config in kinds] + tiles + int8


def line(config: Config, label: str, found: dict[str, float]) -> str:
    """One line of a table of errors."""
    site = f"{config.state or '-'}/{config.w or '-'}"
    worst = max(found.values())
    mark = "" if worst <= WORST[config.carrier] else " <<<"
    body = " ".join(f"{name} {value:.1e}" for name, value in found.items())
    return f"{label:26} {config.carrier} {site:10} {body}{mark}"


def last_lines(error: BaseException, count: int = 3) -> str:
    """The end of a traceback, on one line."""
    text = "".join(traceback.format_exception(error)).strip().splitlines()
    return " | ".join(part.strip()[:200] for part in text[-count:])


def smoke(oracle: Op, device: str = "cuda") -> int:
    """Prints one line for each kind of call; 1 when one failed or looks wrong."""
    start, bad = time.perf_counter(), 0
    for config in smoke_configs():
        try:
            text = line(config, config.name, errors(config, oracle, device))
        except Exception as error:  # noqa: BLE001  the next kind of call must still run
            text = (
                f"{config.name:26} {config.carrier} {config.state}/{config.w} RAISED <<< {last_lines(error)}"
            )
        bad += "<<<" in text
        print(text, flush=True)
    bad += not repeats_are_equal(device)
    print(f"{bad} marked, {time.perf_counter() - start:.0f} s", flush=True)
    return int(bad > 0)


def repeats_are_equal(device: str) -> bool:
    """Whether three runs give the same bits, and the recomputed states those of the forward."""
    config = Config("repeat", T=1000).with_sites()
    x = make_inputs(config, device)
    runs = [run(chunk_gated_delta_rule, x, output_final_state=True, **config.options()) for _ in range(3)]
    equal = all(torch.equal(a, b) for other in runs[1:] for a, b in zip(runs[0], other, strict=True))
    print(f"{'repeats':26} bit-equal: {equal}{'' if equal else ' <<<'}", flush=True)
    return equal


def whole() -> Config:
    """The first shape of the table."""
    return Config("T8192", T=8192, H=16, HV=32, initial=False)


def packed_whole() -> Config:
    """The second: 32768 tokens in 8 documents."""
    lengths = (1024, 2048, 3072, 4096, 4096, 5120, 6144, 7168)
    return Config("T32768 in 8", T=32768, H=16, HV=32, lengths=lengths, initial=False)


def calls(op: Op, config: Config, x: Inputs, **options: Any) -> dict[str, Callable[[], Any]]:
    """The forward alone, and forward with backward, as closures to be timed."""
    leaves = {name: t.detach().requires_grad_() for name, t in x.leaves.items()}

    def forward() -> Any:
        with torch.no_grad():
            return op(**leaves, cu_seqlens=x.cu_seqlens, **options)

    def both() -> Any:
        o, _ = op(**leaves, cu_seqlens=x.cu_seqlens, **options)
        return torch.autograd.grad(o, list(leaves.values()), x.do)

    return {"forward": forward, "forward+backward": both}


def call_s(call: Callable[[], Any]) -> float:
    """Seconds of one call by the clock, with all that it compiles."""
    _ = triton.runtime.driver.active.utils  # built once for all kernels of a machine
    torch.cuda.synchronize()
    begin = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - begin


def first_calls(config: Config) -> None:
    """Prints the seconds of first calls, forward and backward; tells nothing where Triton's cache is full."""
    for judged in (config.with_sites(), config, replace(config, dtype=torch.float32).with_sites()):
        both = calls(chunk_gated_delta_rule, judged, make_inputs(judged), **judged.options())
        name = f"{judged.name} {judged.carrier} sites {'on' if judged.w else 'off'}"
        print(f"first call {name}: {call_s(both['forward+backward']):.1f} s", flush=True)


def peak_mib(call: Callable[[], Any]) -> float:
    """Peak memory of a call above what was allocated before it."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    kept = call()
    torch.cuda.synchronize()
    del kept
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def fla_op() -> Op:
    """FLA's own Triton kernels, its refusal of Hopper with Triton 3.4 and newer switched off."""
    os.environ.setdefault("FLA_TILELANG", "0")
    module = importlib.import_module("fla.ops.gated_delta_rule")
    guarded: Any = importlib.import_module("fla.ops.common.chunk_o")
    guarded.TRITON_ABOVE_3_4_0 = False

    def op(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **options: Any) -> Any:
        return module.chunk_gated_delta_rule(q=q, k=k, v=v, g=g, beta=beta, **options)

    return op


def flash_qla_op() -> Op:
    """FlashQLA's TileLang kernels."""
    call: Op = importlib.import_module("flash_qla").chunk_gated_delta_rule
    return call


PEERS = {"FLA Triton, unquantized": fla_op, "FlashQLA, unquantized": flash_qla_op}
"""What the table compares with: rows that say so where a package is missing."""


def subjects(config: Config) -> Iterator[tuple[str, Callable[[], Op], dict[str, Any], Config]]:
    """Name, loader, options and judged configuration of each row of the table."""
    sites = config.with_sites()
    fp32 = replace(config, dtype=torch.float32)
    yield "sites on", lambda: chunk_gated_delta_rule, sites.options(), sites
    yield "sites off", lambda: chunk_gated_delta_rule, config.options(), config
    yield (
        "fp32, sites on",
        lambda: chunk_gated_delta_rule,
        sites.options(),
        replace(sites, dtype=torch.float32),
    )
    yield "fp32, sites off", lambda: chunk_gated_delta_rule, fp32.options(), fp32
    for name, load in PEERS.items():
        yield name, load, {}, config


PARTS = ("forward", "forward+backward", "forward with host", "forward+backward with host")
"""What is timed: CUDA graphs that are replayed, so device time alone; and the calls as a user makes them."""

NOT_TIMED = {"median_ms": float("nan")}


def measure(config: Config, oracle: Op, repeats: int, only: Sequence[str] = ()) -> list[dict[str, Any]]:
    """One dictionary for each subject on one shape: errors first, then times, interleaved, and memory.

    Args:
        config: the shape.
        oracle: what this project's own op is held against.
        repeats: timed calls of each candidate.
        only: parts of the names of the subjects that are measured; none: all.
    """
    results: list[dict[str, Any]] = []
    timed: dict[str, Callable[[], Any]] = {}
    for name, load, options, judged in subjects(config):
        if only and not any(part in name for part in only):
            continue
        row: dict[str, Any] = {"shape": config.name, "subject": name}
        results.append(row)
        try:
            op = load()
            x = make_inputs(judged)
            parts = calls(op, judged, x, **options)
            row["first_call_s"] = call_s(parts["forward+backward"])
            row["peak_mib"] = peak_mib(parts["forward+backward"])
            if op is chunk_gated_delta_rule:
                row["errors"] = errors(judged, oracle)
            timed |= {f"{name}/{part} with host": call for part, call in parts.items()}
            try:
                timed |= {f"{name}/{part}": recorded(call) for part, call in parts.items()}
            except Exception as error:  # noqa: BLE001  a call that waits for the device is no graph
                row["not_recorded"] = last_lines(error)
        except Exception as error:  # noqa: BLE001  a subject that cannot run is a row that says so
            row["error"] = last_lines(error)
        torch.cuda.empty_cache()
    times = interleaved_ms(timed, repeats)
    for row in results:
        for part in PARTS:
            if (key := f"{row['subject']}/{part}") in times:
                row[part] = summary_ms(times[key])
    return results


def table(results: list[dict[str, Any]]) -> str:
    """The results as text."""
    lines = [
        f"{'shape':12} {'subject':26} {'forward ms':>10} {'fwd+bwd ms':>10} "
        f"{'with host':>10} {'with host':>10} {'first s':>8} {'peak MiB':>9}  worst"
    ]
    for row in results:
        if "error" in row:
            lines.append(f"{row['shape']:12} {row['subject']:26} {row['error']}")
            continue
        worst = max(row.get("errors", {"-": float("nan")}).items(), key=lambda item: item[1])
        lines.append(
            f"{row['shape']:12} {row['subject']:26} "
            + "".join(f"{row.get(part, NOT_TIMED)['median_ms']:10.3f} " for part in PARTS)
            + f"{row['first_call_s']:8.1f} "
            f"{row['peak_mib']:9.0f}  {worst[0]} {worst[1]:.1e}"
        )
    return "\n".join(lines)


def kernel_times_ms(call: Callable[[], Any], repeats: int = 10) -> dict[str, float]:
    """Mean device time of each kernel in a call, from the profiler."""
    call()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(repeats):
            call()
        torch.cuda.synchronize()
    found = {
        event.key: event.self_device_time_total / 1e3 / repeats
        for event in profile.key_averages()
        if event.self_device_time_total > 0
    }
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def breakdown(config: Config) -> None:
    """Prints the device time of each kernel of forward with backward, sites on and off."""
    for judged in (config.with_sites(), config):
        x = make_inputs(judged)
        call = calls(chunk_gated_delta_rule, judged, x, **judged.options())["forward+backward"]
        print(f"{judged.name}, sites {'on' if judged.w else 'off'}, ms by kernel")
        for name, ms in kernel_times_ms(call).items():
            print(f"  {ms:8.4f} {name[:80]}")


def sweep(oracle: Op) -> int:
    """Forces each launch row that fits the first shape: error of all tensors, device time of its kernel."""
    shape = whole()
    small = replace(shape, T=1000, H=2, HV=4, initial=True).with_sites()
    bad = 0
    for judged, where in ((small, "bf16"), (replace(small, dtype=torch.float32), "fp32")):
        x = make_inputs(replace(shape, dtype=judged.dtype).with_sites())
        for name in LAUNCH_ROWS:
            row = next(r for r in rows_of() if r.name == name)
            if row.where.get("operand", (where,)) != (where,):
                continue
            try:
                with force_launch_row(name):
                    found = errors(judged, oracle)
                    call = calls(chunk_gated_delta_rule, judged, x, **judged.options())["forward+backward"]
                    times = kernel_times_ms(call, 5)
                total = sum(times.values())
                text = (
                    line(judged, name, found)
                    + f"  total {total:.3f} ms: "
                    + " ".join(
                        f"{kernel.split('_kernel')[0]} {ms:.3f}" for kernel, ms in times.items() if ms > 0.02
                    )
                )
            except Exception as error:  # noqa: BLE001  the next row must still run
                text = f"{name:26} RAISED <<< {last_lines(error)}"
            bad += "<<<" in text
            print(text, flush=True)
    return int(bad > 0)


def environment() -> dict[str, str]:
    """What was measured on."""
    return {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": str(torch.version.cuda),
    }


def write(folder: Path, results: list[dict[str, Any]]) -> None:
    """The results as `gdn.json`, with the environment, and as `gdn.txt`."""
    body = {"environment": environment(), "results": results}
    (folder / "gdn.json").write_text(json.dumps(body, indent=1) + "\n")
    (folder / "gdn.txt").write_text(table(results) + "\n")


def named(reference: str) -> Op:
    """The function that `module:function` names."""
    module, _, function = reference.partition(":")
    found: Op = getattr(importlib.import_module(module), function)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Does what the options say; 1 when something is marked, 2 without a GPU."""
    parser = argparse.ArgumentParser(prog="python -m kernels.bench.gdn", description=__doc__)
    parser.add_argument("--out", type=Path, help="folder for gdn.json and gdn.txt: the table of times")
    parser.add_argument("--smoke", action="store_true", help="errors of every kind of call")
    parser.add_argument("--rows", action="store_true", help="time and error of every launch row")
    parser.add_argument("--first", action="store_true", help="seconds of first calls, with an empty cache")
    parser.add_argument("--kernels", action="store_true", help="device time of each kernel")
    parser.add_argument("--repeats", type=int, default=30, help="timed calls of each candidate")
    parser.add_argument("--only", action="append", default=[], help="part of a name in the table; repeatable")
    parser.add_argument("--oracle", default=ORACLE, help="module:function of the fp64 oracle")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("the benchmark needs a CUDA device, found none; run it on a GPU machine", file=sys.stderr)
        return 2
    oracle = named(options.oracle)
    status = 0
    if options.smoke:
        status |= smoke(oracle)
    if options.first:
        first_calls(whole())
    if options.rows:
        status |= sweep(oracle)
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        results: list[dict[str, Any]] = []
        for config in (whole(), packed_whole()):
            results += measure(config, oracle, options.repeats, options.only)
            write(options.out, results)  # tuning the next shape of FLA takes minutes
        print(table(results))
        status |= any("error" in row and row["subject"] not in PEERS for row in results)
    if options.kernels:
        breakdown(whole())
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
