"""Device functions that round a tile to a low-precision grid and back, for any kernel of this project.

All arithmetic is fp32. The pieces, in the order in which a kernel uses them:

    x = widen(tl.load(...))                      carrier -> fp32, exact
    y = qdq_tile(x, FMT, CONVERSION)             one scale for the whole [K, BV] tile
    y = qdq_rows(x, FMT, CONVERSION)             one scale for each row of [R, K]
    tl.store(..., narrow(y, dtype))              fp32 -> carrier, to nearest even

`FMT` is "e4m3", "int8" or "none" (x comes back as it is). `CONVERSION` is "native" (SM 9.0 and newer: one
rounding from fp32; older ones convert through fp16, which rounds twice) or "portable" (any SM and the
interpreter). Masked elements of x must be 0. The product code * scale is rounded by itself: a compiler that
contracts it into an FMA with a following sum changes bits, so narrow or store it before adding to it.

Non-finite values are found by their bits, because a floating-point maximum drops NaN on every backend. A
group that holds one gets the scale NaN, which makes each of its values NaN. In the interpreter bf16 is
widened and narrowed in integers: there a conversion truncates and loses subnormals.

Source of the arithmetic: OCP 8-bit floating point specification 1.0 (E4M3, saturating); IEEE 754 division and
round to nearest even.
"""

# Triton compiles only the taken branch of a constexpr `if`, so an `else` after `return` is needed here; and
# tiles have no type in Python.
# ruff: noqa: RET505
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

INTERPRET: tl.constexpr = tl.constexpr(bool(triton.knobs.runtime.interpret))
"""Whether the functions of this process run in the interpreter; fixed when they are decorated."""

INF_BITS: tl.constexpr = tl.constexpr(0x7F800000)
NAN_BITS: tl.constexpr = tl.constexpr(0x7FC00000)
MAGNITUDE_BITS: tl.constexpr = tl.constexpr(0x7FFFFFFF)
SMALLEST_NORMAL: tl.constexpr = tl.constexpr(2.0**-126)
E4M3_MAX: tl.constexpr = tl.constexpr(448.0)
INT8_MAX: tl.constexpr = tl.constexpr(127.0)
E4M3_SMALLEST_NORMAL_BITS: tl.constexpr = tl.constexpr((127 - 6) << 23)
TWICE_BIAS: tl.constexpr = tl.constexpr(254 << 23)
"""Exponent fields of 2^e and 2^-e add up to this."""
INTEGER_SHIFTER: tl.constexpr = tl.constexpr(1.5 * 2.0**23)
"""Adding and subtracting this rounds a small fp32 number to an integer: its last bit weighs 1."""
E4M3_SHIFTER_BITS: tl.constexpr = tl.constexpr((20 << 23) | (1 << 22))
"""Added to the exponent field of 2^e it gives 1.5 * 2^(e + 20), whose last bit weighs 2^(e - 3)."""


@triton.jit
def widen(x):
    """A tile of any carrier as fp32, exactly."""
    if INTERPRET and x.dtype == tl.bfloat16:
        return (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@triton.jit
def narrow(x, dtype: tl.constexpr):
    """An fp32 tile in a carrier dtype, rounded to nearest even."""
    if INTERPRET and dtype == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        magnitude = bits & MAGNITUDE_BITS
        magnitude = tl.where(magnitude > INF_BITS, NAN_BITS, magnitude)
        rounded = (magnitude + 0x7FFF + ((magnitude >> 16) & 1)) >> 16
        return (rounded | ((bits >> 16) & 0x8000)).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(dtype)


@triton.jit
def magnitude_bits(x):
    """The bits of |x| as int32: ordered like |x|, with infinity and then NaN above every number."""
    return x.to(tl.int32, bitcast=True) & MAGNITUDE_BITS


@triton.jit
def scale_of(amax_bits, FMT: tl.constexpr):
    """The fp32 scale of groups whose largest `magnitude_bits` are given.

    amax / largest code; 1 where that is below 2^-126; NaN where the group holds a non-finite value.
    """
    tl.static_assert(FMT == "e4m3" or FMT == "int8", "FMT must be e4m3 or int8")
    largest: tl.constexpr = E4M3_MAX if FMT == "e4m3" else INT8_MAX
    amax = amax_bits.to(tl.float32, bitcast=True)
    scale = tl.math.div_rn(amax, tl.full(amax.shape, largest, tl.float32))
    scale = tl.where(scale < SMALLEST_NORMAL, 1.0, scale)
    return tl.where(amax_bits >= INF_BITS, float("nan"), scale)


@triton.jit
def round_code(y, FMT: tl.constexpr, CONVERSION: tl.constexpr):
    """y = x / scale clamped to the largest code and rounded to nearest even on the grid; fp32 in and out.

    The code of a NaN is unspecified: its scale is NaN already.
    """
    if FMT == "e4m3":
        if CONVERSION == "native":
            return y.to(tl.float8e4nv).to(tl.float32)  # this conversion saturates by itself
        else:
            tl.static_assert(CONVERSION == "portable", "CONVERSION must be native or portable")
            y = tl.minimum(tl.maximum(y, -E4M3_MAX), E4M3_MAX)
            exponent = tl.maximum(magnitude_bits(y) & INF_BITS, E4M3_SMALLEST_NORMAL_BITS)
            shifter = (exponent + E4M3_SHIFTER_BITS).to(tl.float32, bitcast=True)
            return (y + shifter) - shifter
    else:
        tl.static_assert(FMT == "int8", "FMT must be e4m3 or int8")
        y = tl.minimum(tl.maximum(y, -INT8_MAX), INT8_MAX)
        return (y + INTEGER_SHIFTER) - INTEGER_SHIFTER


@triton.jit
def divide(x, scale):
    """x / scale rounded once, with the scale broadcast to x."""
    return tl.math.div_rn(x, tl.broadcast_to(scale, x.shape))


@triton.jit
def divide_for_code(x, scale):
    """x / scale, near enough to have the code of the rounded quotient; |x| is at most 448 times the scale.

    The scale is brought into [1, 2) by a power of two and its reciprocal r rounded once; q = x r is corrected
    once by its remainder, to q + (x - q d) r (Markstein, 1990). That is not always the rounded quotient, but
    the two never lie on different sides of a tie t between codes, which has at most 8 significant bits. They
    could only where x / d is next to the middle m of t and its neighbour. There, with q in [1, 2), q errs by
    less than q d / 4 + 1/2 < 3/2 ulp, so by 1/2 ulp; then x - q d is exact; and x / d is further from m, by
    2^-23 / d of that, than r errs, by at most 2^-25 d. A quotient too small to matter may lose bits.

    A `div.rn` for each element costs a branch and a call, and the registers that calls clobber. The
    interpreter rounds an fma twice, so there this is a division.
    """
    if INTERPRET:
        return divide(x, scale)
    else:
        power = (TWICE_BIAS - (magnitude_bits(scale) & INF_BITS)).to(tl.float32, bitcast=True)
        one_divisor = scale * power
        one_reciprocal = tl.math.div_rn(tl.full(scale.shape, 1.0, tl.float32), one_divisor)
        minus_divisor = tl.broadcast_to(-one_divisor, x.shape)
        reciprocal = tl.broadcast_to(one_reciprocal, x.shape)
        dividend = x * power
        quotient = dividend * reciprocal
        return tl.fma(tl.fma(quotient, minus_divisor, dividend), reciprocal, quotient)


@triton.jit
def qdq_scaled(x, scale, FMT: tl.constexpr, CONVERSION: tl.constexpr):
    """code * scale, with the scale broadcast to x."""
    return round_code(divide(x, scale), FMT, CONVERSION) * scale


@triton.jit
def qdq_tile(x, FMT: tl.constexpr, CONVERSION: tl.constexpr):
    """A 2-d fp32 tile rounded with one scale for all of it."""
    if FMT == "none":
        return x
    else:
        amax_bits = tl.max(tl.max(magnitude_bits(x), axis=1, keep_dims=True), axis=0, keep_dims=True)
        return qdq_scaled(x, scale_of(amax_bits, FMT), FMT, CONVERSION)


@triton.jit
def qdq_rows(x, FMT: tl.constexpr, CONVERSION: tl.constexpr, SHORT: tl.constexpr = False):
    """A 2-d fp32 tile [R, K] rounded with one scale for each row; SHORT when x was widened from 16 bits."""
    if FMT == "none":
        return x
    else:
        amax_bits = tl.max(magnitude_bits(x), axis=1, keep_dims=True)
        scale = scale_of(amax_bits, FMT)
        if SHORT:
            return round_code(divide_for_code(x, scale), FMT, CONVERSION) * scale
        else:
            return qdq_scaled(x, scale, FMT, CONVERSION)
