"""The passes over the chunks of a sequence: the state forward, its gradient backward.

A program owns one V tile of one head of one sequence and keeps S, [BK, BV], in fp32 registers; as an operand
it goes through shared memory in the order in which it is held, and no accumulator is transposed. With the
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
    load_tile,
    load_vector,
    locate_sequence,
    matmul,
    operand,
    round_state,
    store_tile,
)
from kernels.qdq.device import narrow, widen

SCALARS = ["T", "chunks_per_sequence", "H", "HV", "state_stride_k", "state_stride_v"]


@triton.jit
def load_state(pointer, stride_k, stride_v, columns, channels, K: tl.constexpr, V: tl.constexpr):
    """S, [BK, BV] fp32, from either layout."""
    mask = (columns < K)[:, None] & (channels < V)[None, :]
    offsets = columns[:, None] * stride_k + channels[None, :] * stride_v
    return tl.load(pointer + offsets, mask=mask, other=0.0)


@triton.jit
def store_state(pointer, value, stride_k, stride_v, columns, channels, K: tl.constexpr, V: tl.constexpr):
    """Stores S into either layout."""
    mask = (columns < K)[:, None] & (channels < V)[None, :]
    offsets = columns[:, None] * stride_k + channels[None, :] * stride_v
    tl.store(pointer + offsets, narrow(value, pointer.dtype.element_ty), mask=mask)


@triton.jit
def advance(
    s, k, w, u, gate_sums, states, v_new, raw_states, rows, columns, channels, n_rows, H, HV,
    K: tl.constexpr, V: tl.constexpr, MMA: tl.constexpr, PRECISION: tl.constexpr, WRITE_RAW: tl.constexpr,
):  # fmt: skip
    """S' of one chunk, unrounded, from S; stores S and V'."""
    store_state(states, s, V, 1, columns, channels, K, V)
    w_tile = operand(load_tile(w, HV * K, rows, columns, n_rows, K), MMA)
    product = matmul(w_tile, operand(s, MMA), PRECISION)
    v_tile = widen(load_tile(u, HV * V, rows, channels, n_rows, V)) - product
    store_tile(v_new, v_tile, HV * V, rows, channels, n_rows, V)
    gate = load_vector(gate_sums, HV, rows, n_rows)
    gate_last = tl.load(gate_sums + (n_rows - 1) * HV)
    to_end = tl.where(rows < n_rows, tl.exp(gate_last - gate), 0.0)
    keys = operand(load_tile(k, H * K, rows, columns, n_rows, K), MMA)
    s *= tl.exp(gate_last)
    s += matmul(tl.trans(keys), operand(v_tile * to_end[:, None], MMA), PRECISION)
    if WRITE_RAW:
        store_state(raw_states, s, V, 1, columns, channels, K, V)
    return s


@triton.jit(do_not_specialize=SCALARS)
def state_pass_kernel(
    k, w, u, gate_sums, initial_state, states, v_new, final_state, raw_states, chunk_offsets, cu_seqlens,
    T, chunks_per_sequence, H, HV, state_stride_k, state_stride_v,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, HALVES: tl.constexpr,
    MMA: tl.constexpr, PRECISION: tl.constexpr, STATE_FORMAT: tl.constexpr, CONVERSION: tl.constexpr,
    HAS_INITIAL: tl.constexpr, WRITE_FINAL: tl.constexpr, WRITE_RAW: tl.constexpr, PACKED: tl.constexpr,
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
    token_head = start * HV + head
    k += (start * H + head // (HV // H)) * K
    w += token_head * K
    u += token_head * V
    v_new += token_head * V
    gate_sums += token_head
    states += (chunk * HV + head) * (K * V)
    if WRITE_RAW:
        raw_states += (chunk * HV + head) * (K * V)

    s = tl.zeros((BK, width), tl.float32)
    if HAS_INITIAL:
        initial_state += sequence_head * (K * V)
        s = load_state(initial_state, state_stride_k, state_stride_v, columns, channels, K, V)
    if HALVES == 2:
        other = tl.zeros((BK, width), tl.float32)
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
            s, k, w, u, gate_sums, states, v_new, raw_states, rows, columns, channels, n_rows, H, HV, K, V,
            MMA, PRECISION, WRITE_RAW,
        )  # fmt: skip
        if HALVES == 2:
            other = advance(
                other, k, w, u, gate_sums, states, v_new, raw_states, rows, columns, channels + width, n_rows,
                H, HV, K, V, MMA, PRECISION, WRITE_RAW,
            )  # fmt: skip
        if STATE_FORMAT != "none":
            amax_bits = amax_bits_of(s)
            if HALVES == 2:
                amax_bits = tl.maximum(amax_bits, amax_bits_of(other))
                other = round_state(other, amax_bits, STATE_FORMAT, CONVERSION)
            s = round_state(s, amax_bits, STATE_FORMAT, CONVERSION)
        k += CHUNK * H * K
        w += CHUNK * HV * K
        u += CHUNK * HV * V
        v_new += CHUNK * HV * V
        gate_sums += CHUNK * HV
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
    q, k, w, gate_sums, do, d_final_state, d_states, dv_new, d_initial_state, chunk_offsets, cu_seqlens,
    scale, T, chunks_per_sequence, H, HV, state_stride_k, state_stride_v,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    MMA: tl.constexpr, PRECISION: tl.constexpr, CHAINED: tl.constexpr,
    HAS_INITIAL: tl.constexpr, HAS_FINAL: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Grid: (sequences * HV * V tiles,). `dv_new` holds dV'_local and is completed; `d_states` is dS'.

    CHAINED is for 8 warps and bf16. The matrix unit adds both products to dS, which saves the registers of
    two; two TF32 products chained like that came out wrong in another kernel. And K dS' is made in a branch,
    which is always taken: where Triton sees a second product that depends on the first, it gives all 64 rows
    to each half of the warps, and does the work twice.
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
    d_states += (chunk * HV + head) * (K * V)

    ds = tl.zeros((BK, BV), tl.float32)
    if HAS_FINAL:
        ds = load_state(
            d_final_state + sequence_head * (K * V), state_stride_k, state_stride_v, columns, channels, K, V
        )
    for step in tl.range(0, bound(n_chunks), disable_licm=True):
        index = (n_chunks - 1 - step).to(tl.int64)
        row = start + index * CHUNK
        n_rows = tl.minimum(length - (n_chunks - 1 - step) * CHUNK, CHUNK)
        token_head = row * HV + head
        key_head = (row * H + head // (HV // H)) * K
        store_state(d_states + index * HV * (K * V), ds, V, 1, columns, channels, K, V)
        gate = load_vector(gate_sums + token_head, HV, rows, n_rows)
        gate_last = tl.load(gate_sums + token_head + (n_rows - 1) * HV)
        to_end = tl.where(rows < n_rows, tl.exp(gate_last - gate), 0.0)
        keys = operand(load_tile(k + key_head, H * K, rows, columns, n_rows, K), MMA)
        if CHAINED:
            dv = tl.zeros((CHUNK, BV), tl.float32)
            if n_rows > 0:
                dv = matmul(keys, operand(ds, MMA), PRECISION)
        else:
            dv = matmul(keys, operand(ds, MMA), PRECISION)
        dv *= to_end[:, None]
        dv += widen(load_tile(dv_new + token_head * V, HV * V, rows, channels, n_rows, V))
        store_tile(dv_new + token_head * V, dv, HV * V, rows, channels, n_rows, V)
        do_tile = widen(load_tile(do + token_head * V, HV * V, rows, channels, n_rows, V))
        do_scaled = operand(do_tile * (scale * tl.exp(gate))[:, None], MMA)
        queries = operand(load_tile(q + key_head, H * K, rows, columns, n_rows, K), MMA)
        w_tile = operand(load_tile(w + token_head * K, HV * K, rows, columns, n_rows, K), MMA)
        if CHAINED:
            ds *= tl.exp(gate_last)
            ds += matmul(tl.trans(queries), do_scaled, PRECISION)
            ds += matmul(tl.trans(w_tile), operand(-dv, MMA), PRECISION)
        else:
            through_output = matmul(tl.trans(queries), do_scaled, PRECISION)
            through_w = matmul(tl.trans(w_tile), operand(dv, MMA), PRECISION)
            ds = ds * tl.exp(gate_last) + (through_output - through_w)
    if HAS_INITIAL:
        store_state(
            d_initial_state + sequence_head * (K * V), ds, state_stride_k, state_stride_v, columns, channels,
            K, V,
        )  # fmt: skip
