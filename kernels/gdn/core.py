"""The chunk form on plain tensors: which kernels run, on what, in which order; forward and backward.

Nothing is checked and nothing is differentiated here; `op.py` does the first before and the second around it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
import triton
import triton.language as tl

from kernels.gdn import launch_table as launch_table  # registers the rows
from kernels.gdn.chunks import Chunks, cut_into_chunks
from kernels.gdn.gradients import outer_gradient_kernel
from kernels.gdn.output import local_gradient_kernel, output_kernel
from kernels.gdn.prepare import prepare_kernel, solve_kernel
from kernels.gdn.solve_gradient import gate_gradient_kernel, solve_gradient_kernel
from kernels.gdn.state import state_gradient_kernel, state_pass_kernel
from kernels.launch import LaunchRow, row_for
from kernels.options import CHUNK_SIZE, choose_conversion
from kernels.qdq.host import device_of, sm_of

Tensor = torch.Tensor

SMALLEST_TILE = 64
"""The smallest padded K and V. Multiplying one left operand by bf16 tiles of 64 or more and of 32 columns in
one kernel came out wrong on SM 9.0 with Triton 3.6.0 (K = 128, V = 32: U; K = 64, V = 32: dV), and so did
tiles of 16."""

SOLVE_PRECISION = {"tf32": "tf32x3", "ieee": "ieee"}
"""Input precision -> precision of the products inside the triangular inverse: always that of fp32."""

OPERANDS = {
    torch.bfloat16: ("bf16", tl.bfloat16, torch.bfloat16),
    torch.float16: ("fp32", tl.float32, torch.float32),
    torch.float32: ("fp32", tl.float32, torch.float32),
}
"""Carrier -> matmul operands: name in the launch table, Triton dtype, the dtype in which they are stored.

fp16 widens to fp32 (TF32 holds it exactly): a state, V' or gradient of theirs may exceed the range of fp16.
"""


@dataclass(frozen=True)
class Settings:
    """What is computed, beyond the tensors.

    Attributes:
        scale: multiplies q.
        state_v_first: whether states are `[N, HV, V, K]`.
        state_format, w_format: formats of the two sites, or None.
        state_block_v: columns of S that share a scale.
        input_precision: `tf32` or `ieee`, of matmuls with fp32 operands.
    """

    scale: float
    state_v_first: bool = False
    state_format: str | None = None
    state_block_v: int = 64
    w_format: str | None = None
    input_precision: str = "tf32"


@cache
def padded(size: int) -> int:
    """The extent of a tile that holds `size` columns."""
    return max(SMALLEST_TILE, int(triton.next_power_of_2(size)))


def ceil_div(a: int, b: int) -> int:
    """a / b rounded up."""
    return -(-a // b)


@cache
def side_stream(device: int | None) -> torch.cuda.Stream:
    """The second stream of a device, on which the backward makes the states again."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class Fork:
    """Two streams of one device, or none in the interpreter; `side` waits at `part`, `main` at `join`."""

    main: torch.cuda.Stream | None = None
    side: torch.cuda.Stream | None = None

    @staticmethod
    def at(x: Tensor) -> Fork:
        """The current stream of a tensor's device and the one beside it."""
        if x.device.type != "cuda":
            return Fork()
        return Fork(torch.cuda.current_stream(x.device), side_stream(x.device.index))

    def part(self) -> None:
        """What is launched on the side from now on may read all that was launched before."""
        if self.main is not None and self.side is not None:
            self.side.wait_stream(self.main)

    def join(self) -> None:
        """What is launched from now on may read what was launched on the side."""
        if self.main is not None and self.side is not None:
            self.main.wait_stream(self.side)


_AHEAD: ContextVar[bool] = ContextVar("compiling_ahead", default=False)
_COMPILED: set[Hashable] = set()


def launch(kernel: Any, programs: int, *arguments: Any, **constants: Any) -> None:
    """Launches a kernel on a grid of one axis; where kernels are compiled ahead, only has it compiled."""
    if _AHEAD.get():
        kernel.warmup(*arguments, grid=(programs,), **constants)
    else:
        kernel[(programs,)](*arguments, **constants)


class LoadingPool(ThreadPoolExecutor):
    """Threads that compile kernels and load each onto a device; Triton then builds its launcher, in C."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device

    def submit(self, compile_kernel: Callable[[], Any]) -> Future[Any]:  # type: ignore[override]
        """The kernel that Triton compiles, once it can be launched."""
        return super().submit(self.compile_and_load, compile_kernel)

    def compile_and_load(self, compile_kernel: Callable[[], Any]) -> Any:
        """A kernel is loaded when the function that launches it is first asked for."""
        with torch.cuda.device(self.device):
            kernel = compile_kernel()
            _ = kernel.run
        return kernel


def compile_ahead(x: Tensor, keys: set[Hashable], launches: Callable[[], object]) -> None:
    """Has all kernels of some launches compiled and loaded at the same time, when one of their keys is new.

    Without this it is done for one after the other, each when it is first launched.
    """
    if x.device.type != "cuda" or keys <= _COMPILED or not hasattr(triton, "AsyncCompileMode"):
        return
    _COMPILED.update(keys)
    token = _AHEAD.set(True)
    try:
        with LoadingPool(x.device) as pool, triton.AsyncCompileMode(pool):
            launches()
    finally:
        _AHEAD.reset(token)


def launched_on(stream: torch.cuda.Stream | None) -> AbstractContextManager[object]:
    """Launches go to this stream while the context lasts; None: to the current one."""
    return nullcontext() if stream is None else torch.cuda.stream(stream)


@dataclass(frozen=True)
class Call:
    """One call's shapes and settings, and the arguments that its kernels share."""

    settings: Settings
    chunks: Chunks
    sm: int
    carrier: torch.dtype
    H: int
    HV: int
    K: int
    V: int

    @staticmethod
    def of(q: Tensor, v: Tensor, cu_seqlens: Tensor | None, settings: Settings) -> Call:
        """The call on these tensors."""
        batch, length, h, k = q.shape
        chunks = cut_into_chunks(batch, length, cu_seqlens)
        return Call(settings, chunks, sm_of(q), q.dtype, h, v.shape[2], k, v.shape[3])

    @property
    def operand_dtype(self) -> torch.dtype:
        """The dtype in which intermediate matmul operands are stored."""
        return OPERANDS[self.carrier][2]

    def row(self, kernel: str, **facts: object) -> LaunchRow:
        """The launch row of a kernel for this call."""
        shape = {"K": padded(self.K), "V": padded(self.V)}
        return row_for(kernel, self.sm, operand=OPERANDS[self.carrier][0], **shape, **facts)

    def state_row(self, kernel: str, grouped: bool) -> tuple[LaunchRow, int]:
        """The launch row and V tile of a pass over the state; `grouped` when a tile is a scale group."""
        tile = min(self.settings.state_block_v, padded(self.V)) if grouped else 0
        row = self.row(kernel, tile=tile)
        return row, tile or min(row.meta["BV"], padded(self.V))

    def shape(self) -> tuple[int, int, int, int]:
        """T, chunks per sequence, H and HV, as the kernels take them."""
        return self.chunks.length, self.chunks.per_sequence, self.H, self.HV

    def state_strides(self) -> tuple[int, int]:
        """Strides of a state along K and V, in elements."""
        return (1, self.K) if self.settings.state_v_first else (self.V, 1)

    def state_shape(self) -> tuple[int, ...]:
        """Shape of initial and final state."""
        inner = (self.V, self.K) if self.settings.state_v_first else (self.K, self.V)
        return (self.chunks.sequences, self.HV, *inner)

    def constants(self) -> dict[str, Any]:
        """The constexprs that every kernel with matmuls takes."""
        return {
            "K": self.K,
            "V": self.V,
            "MMA": OPERANDS[self.carrier][1],
            "PRECISION": self.settings.input_precision,
            "PACKED": self.chunks.packed,
        }

    def key(self, *more: Hashable) -> Hashable:
        """What the kernels of this call are compiled for, but for the device and alignments."""
        return (self.settings, self.carrier, self.K, self.V, self.chunks.packed, *more)

    def backward(self) -> Call:
        """The call of the backward: it makes no W that is rounded, but reads the one that was."""
        return replace(self, settings=replace(self.settings, w_format=None))

    def backward_key(
        self, beta: Tensor, initial_state: Tensor | None, rounds_w: bool, has_final: bool
    ) -> Hashable:
        """What the kernels of the backward are compiled for."""
        return self.key("backward", initial_state is None, rounds_w, has_final, beta.dtype)

    def conversion(self, fmt: str | None) -> str:
        """How codes are computed here."""
        return choose_conversion(self.sm, fmt) if fmt else "portable"

    def tiles(self, row: LaunchRow) -> dict[str, int]:
        """The K and V tiles of a row, no larger than K and V need."""
        sizes = {"BKT": padded(self.K), "BV": padded(self.V)}
        return {name: min(row.meta[name], size) for name, size in sizes.items() if name in row.meta}

    def chunk_values(self, like: Tensor) -> Tensor:
        """Memory for values of every token, `[chunks, HV, V, 64]`: the order in which the state is held."""
        return self.empty(like, self.chunks.count, self.HV, self.V, CHUNK_SIZE)

    def empty(self, like: Tensor, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Memory for a result."""
        return torch.empty(shape, dtype=dtype or self.operand_dtype, device=like.device)


@dataclass(frozen=True)
class Prepared:
    """What a chunk is reduced to, padded to 64 rows.

    Attributes:
        gates: `[chunks, HV, 2, 64]` fp32, its cumulative gate G, and exp(G_last - G).
        inverse: `[chunks, HV, 64, 64]`, X = (I + L)^-1.
        w: `[chunks, HV, 64, K]`, W, rounded when its site is on.
        u: `[chunks, HV, V, 64]`, U transposed, as the state is.
    """

    gates: Tensor
    inverse: Tensor
    w: Tensor
    u: Tensor


def solve(call: Call, k: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """The gates and X of every chunk."""
    c = call.chunks
    gates = call.empty(k, c.count, call.HV, 2, CHUNK_SIZE, dtype=torch.float32)
    inverse = call.empty(k, c.count, call.HV, CHUNK_SIZE, CHUNK_SIZE)
    scratch = call.empty(k, c.count, call.HV, CHUNK_SIZE, CHUNK_SIZE, dtype=torch.float32)
    row = call.row("gdn_solve")
    constants = {name: value for name, value in call.constants().items() if name != "V"}
    if c.count * call.HV:
        launch(
            solve_kernel, c.count * call.HV,
            k, g, beta, gates, inverse, scratch, c.table, c.cu_seqlens, *call.shape(),
            SOLVE_PRECISION=SOLVE_PRECISION[call.settings.input_precision],
            **call.tiles(row), **constants, **row.options(),
        )  # fmt: skip
    return gates, inverse


def prepare(
    call: Call, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, w_format: str | None,
    saved: tuple[Tensor, Tensor, Tensor | None] | None = None, stream: torch.cuda.Stream | None = None,
) -> Prepared:  # fmt: skip
    """Solves every chunk; or, from the saved gates, X and perhaps W, makes U (and W) again."""
    c = call.chunks
    gates, inverse, w = saved if saved is not None else (*solve(call, k, g, beta), None)
    write_w = w is None
    w = call.empty(k, c.count, call.HV, CHUNK_SIZE, call.K, dtype=call.carrier) if w is None else w
    u = call.chunk_values(k)
    row = call.row("gdn_prepare")
    if c.count * call.HV:
        with launched_on(stream):
            launch(
                prepare_kernel, c.count * call.HV,
                k, v, beta, gates, inverse, w, u, c.table, c.cu_seqlens, *call.shape(),
                BK=padded(call.K), WRITE_W=write_w, W_FORMAT=w_format or "none",
                CONVERSION=call.conversion(w_format), **call.tiles(row), **call.constants(), **row.options(),
            )  # fmt: skip
    return Prepared(gates, inverse, w, u)


@dataclass(frozen=True)
class StatePass:
    """What the pass over the state leaves: S at the entry of each chunk (rounded, `[chunks, HV, V, K]`), V',
    the final state or None, and S' before rounding or None."""

    states: Tensor
    v_new: Tensor
    final_state: Tensor | None
    raw_states: Tensor | None


def state_pass(
    call: Call, k: Tensor, prepared: Prepared, initial_state: Tensor | None, *,
    write_final: bool, write_raw: bool = False, stream: torch.cuda.Stream | None = None,
) -> StatePass:  # fmt: skip
    """Runs the recurrence over the chunks of every sequence; with `write_raw`, states are written as fp32."""
    c, s = call.chunks, call.settings
    row, tile = call.state_row("gdn_state", grouped=s.state_format is not None)
    states = call.empty(k, c.count, call.HV, call.V, call.K, dtype=torch.float32 if write_raw else None)
    v_new = call.chunk_values(k)
    final = call.empty(k, *call.state_shape(), dtype=torch.float32) if write_final else None
    raw = call.empty(k, *states.shape, dtype=torch.float32) if write_raw else None
    programs = c.sequences * call.HV * ceil_div(call.V, tile)
    if programs:
        with launched_on(stream):
            launch(
                state_pass_kernel, programs,
                k, prepared.w, prepared.u, prepared.gates, initial_state, states, v_new, final, raw,
                c.offsets, c.cu_seqlens, *call.shape(), *call.state_strides(),
                BK=padded(call.K), BV=tile, HALVES=row.meta.get("HALVES", 1),
                STATE_FORMAT=s.state_format or "none", CONVERSION=call.conversion(s.state_format),
                HAS_INITIAL=initial_state is not None, WRITE_FINAL=write_final, WRITE_RAW=write_raw,
                **call.constants(), **row.options(),
            )  # fmt: skip
    return StatePass(states, v_new, final, raw)


def output(call: Call, q: Tensor, k: Tensor, gates: Tensor, passed: StatePass) -> Tensor:
    """The output of every chunk, in the carrier dtype."""
    c = call.chunks
    o = call.empty(q, *q.shape[:2], call.HV, call.V, dtype=call.carrier)
    row = call.row("gdn_output")
    tiles = call.tiles(row)
    programs = c.count * call.HV * ceil_div(call.V, tiles["BV"])
    if programs:
        launch(
            output_kernel, programs,
            q, k, passed.v_new, gates, passed.states, o, c.table, c.cu_seqlens, call.settings.scale,
            *call.shape(), **tiles, **call.constants(), **row.options(),
        )  # fmt: skip
    return o


@dataclass(frozen=True)
class Forward:
    """Results of the forward and what the backward needs of it; `w` is None unless its site is on."""

    o: Tensor
    final_state: Tensor | None
    gates: Tensor
    inverse: Tensor
    w: Tensor | None


def forward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor | None,
    cu_seqlens: Tensor | None, settings: Settings, *, write_final: bool,
) -> Forward:  # fmt: skip
    """The chunk form, forward. All tensors are contiguous and have been checked."""
    call = Call.of(q, v, cu_seqlens, settings)
    inputs = (q, k, v, g, beta, initial_state)
    with device_of(q):
        differentiated = any(x is not None and x.requires_grad for x in inputs)
        compile_forward(call, *inputs, write_final=write_final, differentiated=differentiated)
        return forward_launches(call, *inputs, write_final)


def compile_forward(
    call: Call, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor | None, *,
    write_final: bool, differentiated: bool,
) -> None:  # fmt: skip
    """Has the kernels of the forward compiled; where it is `differentiated` also those of the backward, for a
    gradient of the final state when there is one."""
    inputs = (q, k, v, g, beta, initial_state)
    keys = {call.key("forward", initial_state is None, write_final, g.dtype, beta.dtype)}
    if not differentiated:
        compile_ahead(q, keys, partial(forward_launches, call, *inputs, write_final))
        return
    rounds_w = call.settings.w_format is not None
    after = call.backward()

    def launches() -> None:
        done = forward_launches(call, *inputs, write_final)
        saved = (done.gates, done.inverse, done.w)
        backward_launches(after, *inputs, saved, torch.empty_like(done.o), done.final_state)

    keys.add(after.backward_key(beta, initial_state, rounds_w, write_final))
    compile_ahead(q, keys, launches)


def forward_launches(
    call: Call, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor | None,
    write_final: bool,
) -> Forward:  # fmt: skip
    """The kernels of the forward, in their order."""
    prepared = prepare(call, k, v, g, beta, call.settings.w_format)
    passed = state_pass(call, k, prepared, initial_state, write_final=write_final)
    o = output(call, q, k, prepared.gates, passed)
    w = prepared.w if call.settings.w_format else None
    return Forward(o, passed.final_state, prepared.gates, prepared.inverse, w)


@dataclass(frozen=True)
class Gradients:
    """Gradients of the inputs; `initial_state` is None when there was none."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    initial_state: Tensor | None


def backward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor | None,
    cu_seqlens: Tensor | None, saved: tuple[Tensor, Tensor, Tensor | None], do: Tensor, dht: Tensor | None,
    settings: Settings,
) -> Gradients:  # fmt: skip
    """The gradients at the rounded W and S. U, V' and the states are made again by the forward's kernels."""
    call = Call.of(q, v, cu_seqlens, settings)
    work = partial(backward_launches, call, q, k, v, g, beta, initial_state, saved, do, dht)
    with device_of(q):
        key = call.backward_key(beta, initial_state, saved[2] is not None, dht is not None)
        compile_ahead(q, {key}, work)
        return work()


def backward_launches(
    call: Call, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor | None,
    saved: tuple[Tensor, Tensor, Tensor | None], do: Tensor, dht: Tensor | None,
) -> Gradients:  # fmt: skip
    """The kernels of the backward, in their order.

    The pass over the states and that over their gradients do not read each other's results, and each leaves
    half the processors of a GPU idle: they run side by side, on two streams. All memory is the current one's.
    """
    fork = Fork.at(q)
    if saved[2] is None:  # W is made here, and the gradient of the state reads it too
        prepared = prepare(call, k, v, g, beta, None, saved)
        fork.part()
    else:
        fork.part()
        prepared = prepare(call, k, v, g, beta, None, saved, fork.side)
    passed = state_pass(call, k, prepared, initial_state, write_final=False, stream=fork.side)
    dv_new, do_scaled = local_gradient(call, q, k, do, prepared.gates)
    d_states, d_initial = state_gradient(call, q, k, do_scaled, prepared, dv_new, initial_state, dht)
    fork.join()
    outer = outer_gradient(call, q, k, do, prepared, passed, dv_new, d_states)
    dk, dv, d_solve, d_beta = solve_gradient(call, k, v, beta, prepared, outer.w, dv_new, outer.k)
    dg, dbeta = gate_gradient(call, g, beta, outer, d_solve, d_beta)
    return Gradients(outer.q, dk, dv, dg, dbeta, d_initial)


def local_gradient(call: Call, q: Tensor, k: Tensor, do: Tensor, gates: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient that V' gets from the output of its own chunk; and dO as the state sees it."""
    c = call.chunks
    dv_new, do_scaled = call.chunk_values(do), call.empty(do, c.count, call.HV, CHUNK_SIZE, call.V)
    row = call.row("gdn_local_gradient")
    if c.count * call.HV:
        launch(
            local_gradient_kernel, c.count * call.HV,
            q, k, do, gates, dv_new, do_scaled, c.table, c.cu_seqlens, call.settings.scale, *call.shape(),
            **call.tiles(row), **call.constants(), **row.options(),
        )  # fmt: skip
    return dv_new, do_scaled


def state_gradient(
    call: Call, q: Tensor, k: Tensor, do_scaled: Tensor, prepared: Prepared, dv_new: Tensor,
    initial_state: Tensor | None, dht: Tensor | None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Completes dV' in place; returns the gradient of S' of each chunk and that of the initial state."""
    c = call.chunks
    row, tile = call.state_row("gdn_state_gradient", grouped=False)
    d_states = call.empty(k, c.count, call.HV, call.V, call.K)
    d_initial = None if initial_state is None else torch.empty_like(initial_state)
    programs = c.sequences * call.HV * ceil_div(call.V, tile)
    if programs:
        launch(
            state_gradient_kernel, programs,
            q, k, prepared.w, prepared.gates, do_scaled, dht, d_states, dv_new, d_initial, c.offsets,
            c.cu_seqlens, *call.shape(), *call.state_strides(),
            BK=padded(call.K), BV=tile, CHAINED=bool(row.meta.get("CHAINED", 0)),
            HAS_INITIAL=initial_state is not None, HAS_FINAL=dht is not None,
            **call.constants(), **row.options(),
        )  # fmt: skip
    return d_states, d_initial


@dataclass(frozen=True)
class Outer:
    """dq, the part of dk that does not come through the solve (fp32), dW, and shares by K tile: of dG without
    what goes to the end of the chunk, and of that."""

    q: Tensor
    k: Tensor
    w: Tensor
    gate: Tensor
    to_end: Tensor


def outer_gradient(
    call: Call, q: Tensor, k: Tensor, do: Tensor, prepared: Prepared, passed: StatePass, dv_new: Tensor,
    d_states: Tensor,
) -> Outer:  # fmt: skip
    """The gradients through the output and the state update."""
    c = call.chunks
    row = call.row("gdn_outer_gradient")
    tiles = call.tiles(row)
    shares = ceil_div(call.K, tiles["BKT"])
    dq = torch.empty_like(q)
    dk = torch.empty_like(k, dtype=torch.float32)
    dw = call.empty(k, c.count, call.HV, CHUNK_SIZE, call.K)
    d_gate = call.empty(k, shares, *k.shape[:2], call.HV, dtype=torch.float32)
    to_end = torch.empty_like(d_gate)
    if c.count * call.H:
        launch(
            outer_gradient_kernel, c.count * call.H * shares,
            q, k, passed.v_new, prepared.gates, do, dv_new, passed.states, d_states, dq, dk, dw, d_gate,
            to_end, c.table, c.cu_seqlens, call.settings.scale, *call.shape(), c.tokens,
            **tiles, **call.constants(), **row.options(),
        )  # fmt: skip
    return Outer(dq, dk, dw, d_gate, to_end)


def solve_gradient(
    call: Call, k: Tensor, v: Tensor, beta: Tensor, prepared: Prepared, dw: Tensor, dv_new: Tensor,
    dk_partial: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """dk, dv, and shares of dG and dbeta by K tile."""
    c = call.chunks
    row = call.row("gdn_solve_gradient")
    tiles = call.tiles(row)
    shares = ceil_div(call.K, tiles["BKT"])
    dk, dv = torch.empty_like(k), torch.empty_like(v)
    d_gate = call.empty(k, shares, *k.shape[:2], call.HV, dtype=torch.float32)
    d_beta = torch.empty_like(d_gate)
    if c.count * call.H:
        launch(
            solve_gradient_kernel, c.count * call.H * shares,
            k, v, beta, prepared.gates, prepared.inverse, dw, dv_new, dk_partial, dk, dv, d_gate, d_beta,
            c.table, c.cu_seqlens, *call.shape(), c.tokens, **tiles, **call.constants(), **row.options(),
        )  # fmt: skip
    return dk, dv, d_gate, d_beta


def gate_gradient(
    call: Call, g: Tensor, beta: Tensor, outer: Outer, d_solve: Tensor, d_beta: Tensor
) -> tuple[Tensor, Tensor]:
    """dg and dbeta, each in the dtype of its input."""
    c = call.chunks
    row = call.row("gdn_gate_gradient")
    heads = row.meta["BH"]
    dg = torch.empty(g.shape, dtype=torch.float32, device=g.device)
    dbeta = torch.empty_like(dg)
    if c.count * call.HV:
        launch(
            gate_gradient_kernel, c.count * ceil_div(call.HV, heads),
            outer.gate, outer.to_end, d_solve, d_beta, dg, dbeta, c.table, c.cu_seqlens, *call.shape(),
            c.tokens, OUTER_TILES=outer.gate.shape[0], SOLVE_TILES=d_solve.shape[0], BH=heads,
            PACKED=c.packed, **row.options(),
        )  # fmt: skip
    return dg.to(g.dtype), dbeta.to(beta.dtype)
