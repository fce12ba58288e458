"""One correction by the remainder is enough for a code: shown in exact arithmetic, where it is hardest."""

from __future__ import annotations

import random
from collections.abc import Iterator
from fractions import Fraction

ULP = Fraction(1, 2**23)
"""Of fp32 in [1, 2)."""

TIES = [Fraction(2 * n + 1, 2 ** ((2 * n + 1).bit_length() - 1)) for n in range(128)]
"""Halfway points between neighbouring codes of INT8, those of E4M3 among them, brought into [1, 2)."""


def fp32(x: Fraction) -> Fraction:
    """The nearest number of 24 bits, ties to even; no number here leaves the range of fp32."""
    if not x:
        return x
    exponent = abs(x).numerator.bit_length() - abs(x).denominator.bit_length()
    exponent -= abs(x) < Fraction(2) ** exponent
    ulp = Fraction(2) ** (exponent - 23)
    return round(x / ulp) * ulp


def corrected_once(x: Fraction, divisor: Fraction) -> Fraction:
    """What `kernels.qdq.device.divide_for_code` computes, from the scaled dividend and divisor on."""
    reciprocal = fp32(1 / divisor)
    quotient = fp32(x * reciprocal)
    return fp32(quotient + fp32(x - quotient * divisor) * reciprocal)


def hardest(count: int) -> Iterator[tuple[Fraction, Fraction, Fraction]]:
    """Dividend, divisor in [1, 2) and tie, the quotient next to the middle of the tie and its neighbour.

    A quotient can come nearest to such a middle where the divisor is near a fraction of few bits.
    """
    rng = random.Random(0)
    for _ in range(count):
        tie, side = rng.choice(TIES), rng.choice((-1, 1))
        size = rng.choice((8, 16, 64, 128, 2**23))
        divisor = Fraction(rng.randrange(size, 2 * size), size) + rng.randrange(0, 8) * ULP
        if divisor < 2:
            x = fp32((tie + side * ULP / 2) * divisor)
            yield x + rng.randrange(-1, 2) * ULP * (1 if x < 2 else 2), divisor, tie


def test_a_quotient_that_is_corrected_once_lies_on_the_side_of_a_tie_of_the_rounded_quotient() -> None:
    for x, divisor, tie in hardest(3000):
        expected, actual = fp32(x / divisor), corrected_once(x, divisor)
        assert (actual > tie, actual < tie) == (expected > tie, expected < tie), (x, divisor, tie)


def test_a_quotient_that_is_not_corrected_crosses_ties() -> None:
    crossed = sum(
        (fp32(x * fp32(1 / divisor)) > tie) != (fp32(x / divisor) > tie) for x, divisor, tie in hardest(3000)
    )
    assert crossed > 100
