"""The passes over the chunks of a sequence: the state forward, its gradient backward.

A program owns one V tile of one head of one sequence and keeps S, V first as [BV, BK], in fp32 registers. So
S and V' are left operands of their products, which the matrix unit of Hopper takes from registers. With the
state site on, the V tile is the scale group.

    V' = U - W S                S' = exp(G_last) S + (exp(G_last - G) K)^T V'

Gradient at the rounded S and W; the rounding passes it on unchanged:

    dV' = dV'_local + exp(G_last - G) K dS'       dS = exp(G_last) dS' + (scale exp(G) Q)^T dO - W^T dV'
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

from kernels.gdn.device import (
    CHUNK,
    amax_bits_of,
    bound,
    load_matrix,
    load_tile,
    locate_sequence,
    matmul,
    operand,
    round_state,
    store_matrix,
)
from kernels.qdq.device import narrow, widen

SCALARS = ["T", "chunks_per_sequence", "H", "HV", "state_stride_k", "state_stride_v"]


@triton.jit
def load_state(pointer, stride_k, stride_v, columns, channels, K: tl.constexpr, V: tl.constexpr):
    """S, [BV, BK] fp32, from either layout."""
    mask = (channels < V)[:, None] & (columns < K)[None, :]
    offsets = channels[:, None] * stride_v + columns[None, :] * stride_k
    return tl.load(pointer + offsets, mask=mask, other=0.0)


@triton.jit
def store_state(pointer, value, stride_k, stride_v, columns, channels, K: tl.constexpr, V: tl.constexpr):
    """Stores S into either layout."""
    mask = (channels < V)[:, None] & (columns < K)[None, :]
    offsets = channels[:, None] * stride_v + columns[None, :] * stride_k
    tl.store(pointer + offsets, narrow(value, pointer.dtype.element_ty), mask=mask)


@triton.jit
def advance(
    s, k, w, u, gates, states, v_new, raw_states, rows, columns, channels, n_rows, H,
    K: tl.constexpr, V: tl.constexpr, MMA: tl.constexpr, PRECISION: tl.constexpr, WRITE_RAW: tl.constexpr,
):  # fmt: skip
    """S' of one chunk, unrounded, from S; stores S and V'."""
    gate_last = tl.load(gates + (CHUNK - 1))  # early: it is not prefetched, and its way is long
    store_matrix(states, s, channels, columns, V, K)
    w_tile = operand(load_matrix(w, rows, columns, CHUNK, K), MMA)
    product = matmul(operand(s, MMA), tl.trans(w_tile), PRECISION)
    v_tile = widen(load_matrix(u, channels, rows, V, CHUNK)) - product
    store_matrix(v_new, v_tile, channels, rows, V, CHUNK)
    to_end = tl.load(gates + CHUNK + rows)
    keys = operand(load_tile(k, H * K, rows, columns, n_rows, K), MMA)
    s *= tl.exp(gate_last)
    s += matmul(operand(v_tile * to_end[None, :], MMA), keys, PRECISION)
    if WRITE_RAW:
        store_matrix(raw_states, s, channels, columns, V, K)
    return s


@triton.jit(do_not_specialize=SCALARS)
def state_pass_kernel(
    k, w, u, gates, initial_state, states, v_new, final_state, raw_states, chunk_offsets, cu_seqlens,
    T, chunks_per_sequence, H, HV, state_stride_k, state_stride_v,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, HALVES: tl.constexpr,
    MMA: tl.constexpr, PRECISION: tl.constexpr, STATE_FORMAT: tl.constexpr, CONVERSION: tl.constexpr,
    HAS_INITIAL: tl.constexpr, WRITE_FINAL: tl.constexpr, WRITE_RAW: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    """Grid: (sequences * HV * V tiles,). `states` holds S at the entry of every chunk.

    With HALVES 2 the tile is worked on as two, one after the other, that share their scale: half the shared
    memory. W and K are then read twice.
    """
    program = tl.program_id(0).to(tl.int64)
    tiles: tl.constexpr = (V + BV - 1) // BV
    width: tl.constexpr = BV // HALVES
    tile, sequence_head = (program % tiles).to(tl.int32), program // tiles
    sequence, head = sequence_head // HV, sequence_head % HV
    start, length, chunk = locate_sequence(
        sequence, chunk_offsets, cu_seqlens, T, chunks_per_sequence, PACKED
    )
    rows = tl.arange(0, CHUNK)
    columns = tl.arange(0, BK)
    channels = tile * BV + tl.arange(0, width)
    chunk_head = chunk * HV + head
    k += (start * H + head // (HV // H)) * K
    w += chunk_head * (CHUNK * K)
    u += chunk_head * (CHUNK * V)
    v_new += chunk_head * (CHUNK * V)
    gates += chunk_head * (2 * CHUNK)
    states += chunk_head * (K * V)
    if WRITE_RAW:
        raw_states += chunk_head * (K * V)

    s = tl.zeros((width, BK), tl.float32)
    if HAS_INITIAL:
        initial_state += sequence_head * (K * V)
        s = load_state(initial_state, state_stride_k, state_stride_v, columns, channels, K, V)
    if HALVES == 2:
        other = tl.zeros((width, BK), tl.float32)
        if HAS_INITIAL:
            other = load_state(initial_state, state_stride_k, state_stride_v, columns, channels + width, K, V)
    if STATE_FORMAT != "none":
        amax_bits = amax_bits_of(s)
        if HALVES == 2:
            amax_bits = tl.maximum(amax_bits, amax_bits_of(other))
            other = round_state(other, amax_bits, STATE_FORMAT, CONVERSION)
        s = round_state(s, amax_bits, STATE_FORMAT, CONVERSION)
    # offsets and masks that are kept through the loop spill
    for row in tl.range(0, bound(length), CHUNK, disable_licm=True):
        n_rows = tl.minimum(length - row, CHUNK)
        s = advance(
            s, k, w, u, gates, states, v_new, raw_states, rows, columns, channels, n_rows, H, K, V,
            MMA, PRECISION, WRITE_RAW,
        )  # fmt: skip
        if HALVES == 2:
            other = advance(
                other, k, w, u, gates, states, v_new, raw_states, rows, columns, channels + width, n_rows, H,
                K, V, MMA, PRECISION, WRITE_RAW,
            )  # fmt: skip
        if STATE_FORMAT != "none":
            amax_bits = amax_bits_of(s)
            if HALVES == 2:
                amax_bits = tl.maximum(amax_bits, amax_bits_of(other))
                other = round_state(other, amax_bits, STATE_FORMAT, CONVERSION)
            s = round_state(s, amax_bits, STATE_FORMAT, CONVERSION)
        k += CHUNK * H * K
        w += HV * (CHUNK * K)
        u += HV * (CHUNK * V)
        v_new += HV * (CHUNK * V)
        gates += HV * (2 * CHUNK)
        states += HV * (K * V)
        if WRITE_RAW:
            raw_states += HV * (K * V)
    if WRITE_FINAL:
        final_state += sequence_head * (K * V)
        store_state(final_state, s, state_stride_k, state_stride_v, columns, channels, K, V)
        if HALVES == 2:
            store_state(final_state, other, state_stride_k, state_stride_v, columns, channels + width, K, V)


@triton.jit(do_not_specialize=SCALARS)
def state_gradient_kernel(
    q, k, w, gates, do_scaled, d_final_state, d_states, dv_new, d_initial_state, chunk_offsets,
    cu_seqlens, T, chunks_per_sequence, H, HV, state_stride_k, state_stride_v,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    MMA: tl.constexpr, PRECISION: tl.constexpr, CHAINED: tl.constexpr,
    HAS_INITIAL: tl.constexpr, HAS_FINAL: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Grid: (sequences * HV * V tiles,). `dv_new` holds dV'_local and is completed; `d_states` is dS'.

    CHAINED is for bf16: the matrix unit adds both products to dS, which saves the registers of two; two TF32
    products chained like that came out wrong in another kernel.
    """
    program = tl.program_id(0).to(tl.int64)
    tiles: tl.constexpr = (V + BV - 1) // BV
    tile, sequence_head = (program % tiles).to(tl.int32), program // tiles
    sequence, head = sequence_head // HV, sequence_head % HV
    start, length, chunk = locate_sequence(
        sequence, chunk_offsets, cu_seqlens, T, chunks_per_sequence, PACKED
    )
    rows = tl.arange(0, CHUNK)
    columns = tl.arange(0, BK)
    channels = tile * BV + tl.arange(0, BV)
    n_chunks = (length + CHUNK - 1) // CHUNK

    ds = tl.zeros((BV, BK), tl.float32)
    if HAS_FINAL:
        ds = load_state(
            d_final_state + sequence_head * (K * V), state_stride_k, state_stride_v, columns, channels, K, V
        )
    for step in tl.range(0, bound(n_chunks), disable_licm=True):
        index = (n_chunks - 1 - step).to(tl.int64)
        row = start + index * CHUNK
        n_rows = tl.minimum(length - (n_chunks - 1 - step) * CHUNK, CHUNK)
        chunk_head = (chunk + index) * HV + head
        key_head = (row * H + head // (HV // H)) * K
        store_matrix(d_states + chunk_head * (K * V), ds, channels, columns, V, K)
        gate = gates + chunk_head * (2 * CHUNK)
        decay = tl.exp(tl.load(gate + (CHUNK - 1)))
        to_end = tl.load(gate + CHUNK + rows)
        keys = operand(load_tile(k + key_head, H * K, rows, columns, n_rows, K), MMA)
        dv = matmul(operand(ds, MMA), tl.trans(keys), PRECISION) * to_end[None, :]
        dv_pointer = dv_new + chunk_head * (CHUNK * V)
        dv += widen(load_matrix(dv_pointer, channels, rows, V, CHUNK))
        store_matrix(dv_pointer, dv, channels, rows, V, CHUNK)
        do_tile = operand(load_matrix(do_scaled + chunk_head * (CHUNK * V), rows, channels, CHUNK, V), MMA)
        queries = operand(load_tile(q + key_head, H * K, rows, columns, n_rows, K), MMA)
        w_tile = operand(load_matrix(w + chunk_head * (CHUNK * K), rows, columns, CHUNK, K), MMA)
        if CHAINED:
            ds *= decay
            ds += matmul(tl.trans(do_tile), queries, PRECISION)
            ds += matmul(operand(-dv, MMA), w_tile, PRECISION)
        else:
            through_output = matmul(tl.trans(do_tile), queries, PRECISION)
            through_w = matmul(operand(dv, MMA), w_tile, PRECISION)
            ds = ds * decay + (through_output - through_w)
    if HAS_INITIAL:
        store_state(
            d_initial_state + sequence_head * (K * V), ds, state_stride_k, state_stride_v, columns, channels,
            K, V,
        )  # fmt: skip
