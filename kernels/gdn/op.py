"""`chunk_gated_delta_rule`: the op as a user calls it, and the opaque operators that torch sees.

Two operators are registered: the forward, and the backward that is its derivative. The compiler,
checkpointing and autocast see them as they see any other operator; a CUDA graph records their launches.
"""

from __future__ import annotations

from typing import Any

import torch

from kernels.gdn import core
from kernels.gdn.activations import gate, l2norm, write_strength
from kernels.gdn.chunks import count_chunks
from kernels.gdn.validate import check_boundaries, check_options, check_sites, check_tensors
from kernels.options import CHUNK_SIZE

Tensor = torch.Tensor


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    state_format: str | None = None,
    state_block_v: int = 64,
    w_format: str | None = None,
    input_precision: str = "tf32",
) -> tuple[Tensor, Tensor | None]:
    """The gated delta rule in chunks of 64 tokens, with the state and W rounded where a format is given.

    Args:
        q, k: `[B, T, H, K]`, fp32, bf16 or fp16; K from 16 to 256.
        v: `[B, T, HV, V]`, q's dtype; V from 16 to 256; value head j uses q/k head `j // (HV // H)`.
        g: `[B, T, HV]`, natural log of the decay, at most 0, any float dtype.
        beta: `[B, T, HV]`, write strength, any float dtype.
        scale: multiplies q; default `K ** -0.5`.
        initial_state: `[N, HV, K, V]` fp32 (`[N, HV, V, K]` when `state_v_first`); None means zero.
        output_final_state: whether the final state is returned.
        use_qk_l2norm_in_kernel: normalise q and k over K first.
        use_beta_sigmoid_in_kernel: take `sigmoid(beta)`; with `allow_neg_eigval`, twice that.
        cu_seqlens: `[N + 1]` int32 or int64 boundaries of packed sequences, with B = 1.
        use_gate_in_kernel: take `-exp(A_log) * softplus(g + dt_bias)` for g; `A_log`, `dt_bias`: `[HV]`.
        state_format: `e4m3`, `int8` or None: rounds S on entry of the first chunk and after every chunk, one
            scale for each `[K, state_block_v]` tile.
        w_format: `e4m3` or None: rounds W, one scale for each token and head.
        input_precision: `tf32` or `ieee`, of matmuls with fp32 and fp16 inputs.

    Returns:
        o: `[B, T, HV, V]` in q's dtype; and the final state, fp32, shaped as the initial one, or None.

    Raises:
        TypeError, ValueError, NotImplementedError: an argument breaks a rule; nothing was launched.

    Source: Yang et al., Gated Delta Networks (2024), section 3.3; rounding: the numerical contract.
    """
    o, final_state, *_ = chunk_forward(
        *operator_arguments(
            q, k, v, g, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel,
            use_beta_sigmoid_in_kernel, allow_neg_eigval, state_v_first, cu_seqlens,
            use_gate_in_kernel=use_gate_in_kernel, A_log=A_log, dt_bias=dt_bias, state_format=state_format,
            state_block_v=state_block_v, w_format=w_format, input_precision=input_precision,
        )
    )  # fmt: skip
    return o, final_state if output_final_state else None


def operator_arguments(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float | None = None,
    initial_state: Tensor | None = None, output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False, use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False, state_v_first: bool = False, cu_seqlens: Tensor | None = None, *,
    use_gate_in_kernel: bool = False, A_log: Tensor | None = None, dt_bias: Tensor | None = None,
    state_format: str | None = None, state_block_v: int = 64, w_format: str | None = None,
    input_precision: str = "tf32",
) -> tuple[Any, ...]:  # fmt: skip
    """Checks a call of the op and applies the activations; returns the arguments of the forward operator."""
    check_tensors(q, k, v, g, beta, initial_state, cu_seqlens, state_v_first)
    check_sites(state_format, state_block_v, w_format)
    check_options(
        scale, input_precision, allow_neg_eigval, use_beta_sigmoid_in_kernel, use_gate_in_kernel, A_log,
        dt_bias, g,
    )  # fmt: skip
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if use_qk_l2norm_in_kernel:
        q, k = l2norm(q), l2norm(k)
    if A_log is not None:
        g = gate(g, A_log, dt_bias)
    if use_beta_sigmoid_in_kernel:
        beta = write_strength(beta, allow_neg_eigval)
    tensors = (x.contiguous() for x in (q, k, v, g, beta))
    initial_state = None if initial_state is None else initial_state.contiguous()
    return (
        *tensors, initial_state, cu_seqlens, float(scale), output_final_state, state_v_first, state_format,
        state_block_v, w_format, input_precision,
    )  # fmt: skip


@torch.library.custom_op("gdn_qualify::chunk_forward", mutates_args=())
def chunk_forward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor | None,
    cu_seqlens: Tensor | None, scale: float, output_final_state: bool, state_v_first: bool,
    state_format: str | None, state_block_v: int, w_format: str | None, input_precision: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """o, the final state, and for the backward: gates, X, rounded W. What is not wanted is empty."""
    if cu_seqlens is not None:
        check_boundaries(cu_seqlens, q.shape[1])
    settings = core.Settings(scale, state_v_first, state_format, state_block_v, w_format, input_precision)
    done = core.forward(q, k, v, g, beta, initial_state, cu_seqlens, settings, write_final=output_final_state)
    absent = q.new_empty(0)
    final = absent if done.final_state is None else done.final_state
    w = q.new_empty(0) if done.w is None else done.w
    return done.o, final, done.gates, done.inverse, w


@chunk_forward.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor | None,
    cu_seqlens: Tensor | None, scale: float, output_final_state: bool, state_v_first: bool,
    state_format: str | None, state_block_v: int, w_format: str | None, input_precision: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    batch, length, value_heads, value_dim = v.shape
    key_dim = q.shape[-1]
    sequences = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
    inner = (value_dim, key_dim) if state_v_first else (key_dim, value_dim)
    final = (
        q.new_empty((sequences, value_heads, *inner), dtype=torch.float32)
        if output_final_state
        else q.new_empty(0)
    )
    operand = core.OPERANDS[q.dtype][2]
    chunk_heads = (count_chunks(batch, length, cu_seqlens), value_heads)
    return (
        torch.empty_like(v),
        final,
        q.new_empty((*chunk_heads, 2, CHUNK_SIZE), dtype=torch.float32),
        q.new_empty((*chunk_heads, CHUNK_SIZE, CHUNK_SIZE), dtype=operand),
        q.new_empty((*chunk_heads, CHUNK_SIZE, key_dim)) if w_format else q.new_empty(0),
    )


@torch.library.custom_op("gdn_qualify::chunk_backward", mutates_args=())
def chunk_backward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor | None,
    cu_seqlens: Tensor | None, gates: Tensor, inverse: Tensor, w: Tensor | None, do: Tensor,
    dht: Tensor | None, scale: float, state_v_first: bool, state_format: str | None, state_block_v: int,
    input_precision: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk, dv, dg, dbeta and dh0 (empty without an initial state)."""
    settings = core.Settings(scale, state_v_first, state_format, state_block_v, None, input_precision)
    saved = (gates, inverse, w)
    d = core.backward(q, k, v, g, beta, initial_state, cu_seqlens, saved, do, dht, settings)
    return d.q, d.k, d.v, d.g, d.beta, q.new_empty(0) if d.initial_state is None else d.initial_state


@chunk_backward.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor | None,
    cu_seqlens: Tensor | None, gates: Tensor, inverse: Tensor, w: Tensor | None, do: Tensor,
    dht: Tensor | None, scale: float, state_v_first: bool, state_format: str | None, state_block_v: int,
    input_precision: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    d_initial = q.new_empty(0) if initial_state is None else torch.empty_like(initial_state)
    dq, dk, dv, dg, dbeta = (torch.empty_like(x) for x in (q, k, v, g, beta))
    return dq, dk, dv, dg, dbeta, d_initial


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    """Keeps what the backward needs; everything else is made again there."""
    *tensors, scale, _, state_v_first, state_format, state_block_v, w_format, input_precision = inputs
    _, _, gates, inverse, w = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(gates, inverse, w)
    ctx.save_for_backward(*tensors, gates, inverse, w if w_format else None)
    ctx.options = (scale, state_v_first, state_format, state_block_v, input_precision)


def _differentiate(ctx: Any, do: Tensor | None, dht: Tensor | None, *_: Any) -> tuple[Any, ...]:
    """The gradients of the forward operator's arguments."""
    *tensors, gates, inverse, w = ctx.saved_tensors
    v, initial_state = tensors[2], tensors[5]
    do = torch.zeros_like(v) if do is None else do.contiguous()
    dht = None if dht is None or dht.numel() == 0 else dht.contiguous()
    *gradients, d_initial = chunk_backward(*tensors, gates, inverse, w, do, dht, *ctx.options)
    return (*gradients, None if initial_state is None else d_initial, *(None,) * 8)


def _refuse_second_order(ctx: Any, *_: Any) -> None:
    raise NotImplementedError(
        "chunk_gated_delta_rule has first-order gradients only, got a request for a second-order one; leave "
        "create_graph out, or use a reference implementation"
    )


chunk_forward.register_autograd(_differentiate, setup_context=_save)
chunk_backward.register_autograd(_refuse_second_order)
