"""Arithmetic of the algorithm as solver terms, written from the formats' definitions and not from ``dosa_ref``.

``tests/proofs/test_adequacy.py`` compares each of these with the function of ``dosa_ref`` that it stands for.
"""

from __future__ import annotations

from typing import Final

from proofs.terms import (
    Term,
    bitvec_sort,
    choose,
    concat,
    equal,
    every,
    extract,
    float32_from_bits,
    float_equal,
    float_less,
    negate,
    number,
    some,
    widen,
)

E4M3_SIGNIFICAND_BITS: Final = 3
"""Bits of an E4M3 significand behind its leading bit."""

E4M3_BIAS: Final = 7
"""Exponent field of an E4M3 value in [1, 2)."""

PRODUCT_FRACTION_BITS: Final = 2 * E4M3_SIGNIFICAND_BITS
"""Fraction bits of a product of two E4M3 significands, each in [0, 2)."""

PRODUCT_MAX: Final = 15 * 15
"""Largest product of two E4M3 significands, as integers."""


def relu(x: Term) -> Term:
    """``max(x, 0)`` of a real."""
    return choose(x > 0, x, 0)


def maximum(a: Term, b: Term) -> Term:
    """The larger of two reals."""
    return choose(a >= b, a, b)


def absolute(x: Term) -> Term:
    """``|x|`` of a real."""
    return choose(x >= 0, x, -x)


def e4m3_is_nan(code: Term) -> Term:
    """True of the two NaN codes, ``S.1111.111``."""
    return equal(extract(code, 6, 0), 0x7F)


def e4m3_significand(code: Term, width: int) -> Term:
    """Significand of a code as an integer of 0 to 15: the magnitude is ``significand * 2**(exponent - 3)``."""
    fraction = widen(extract(code, 2, 0), width)
    return choose(equal(extract(code, 6, 3), 0), fraction, fraction + 8)


def e4m3_biased_exponent(code: Term, width: int) -> Term:
    """Exponent of a code plus 7: 1 to 15. Subnormals have that of the smallest normal number, 1."""
    exponent = widen(extract(code, 6, 3), width)
    return choose(equal(exponent, 0), number(1, exponent.sort), exponent)


def e4m3_float32_bits(code: Term) -> Term:
    """The float32 encoding of a code; NaN becomes the quiet NaN of the same sign."""
    field, fraction = extract(code, 6, 3), extract(code, 2, 0)
    normal = concat(widen(field, 8) + (127 - E4M3_BIAS), concat(fraction, number(0, bitvec_sort(20))))
    # A subnormal is fraction * 2**-9: its leading bit becomes the hidden one.
    small = choose(
        equal(extract(fraction, 2, 2), 1),
        concat(number(120, bitvec_sort(8)), concat(extract(fraction, 1, 0), number(0, bitvec_sort(21)))),
        choose(
            equal(extract(fraction, 1, 1), 1),
            concat(number(119, bitvec_sort(8)), concat(extract(fraction, 0, 0), number(0, bitvec_sort(22)))),
            choose(equal(fraction, 1), number(118 << 23, bitvec_sort(31)), number(0, bitvec_sort(31))),
        ),
    )
    magnitude = choose(e4m3_is_nan(code), number(0x7FC00000, small.sort), choose(equal(field, 0), small, normal))
    return concat(extract(code, 7, 7), magnitude)


def align_product(product: Term, shift: Term, fraction_bits: int) -> Term:
    """Magnitude of a product, in units of the step, cut towards zero.

    ``product`` has 6 fraction bits against its own exponent, which is ``shift`` below the step's.
    """
    return (product << (fraction_bits - PRODUCT_FRACTION_BITS)) >> shift


def align_accumulator(significand: Term, shift: Term, fraction_bits: int) -> Term:
    """Magnitude of a float32 accumulator (24-bit ``significand``), in units of the step, cut towards zero."""
    return (significand >> (23 - fraction_bits)) >> shift


def cut_to_fraction_bits(magnitude: Term, exponent: Term, fraction_bits: int) -> Term:
    """``magnitude`` with leading bit ``exponent``, cut towards zero below ``fraction_bits`` fraction bits."""
    drop = exponent - fraction_bits
    return choose(exponent <= fraction_bits, magnitude, (magnitude >> drop) << drop)


def round_nearest_even(value: Term, drop: Term) -> Term:
    """``value`` rounded to a multiple of ``2**drop``, ties to even; ``drop >= 1``."""
    one = number(1, value.sort)
    quotient = value >> drop
    remainder = value - (quotient << drop)
    half = one << (drop - 1)
    up = some(remainder > half, every(equal(remainder, half), equal(quotient & 1, 1)))
    return choose(up, quotient + 1, quotient) << drop


def float32_before(score: Term, index: Term, other_score: Term, other_index: Term) -> Term:
    """The shared order: the larger float32 score first (bits given), the smaller index among equal scores."""
    a, b = float32_from_bits(score), float32_from_bits(other_score)
    return some(float_less(b, a), every(float_equal(a, b), index < other_index))


def order_code(score: Term) -> Term:
    """Unsigned 32-bit code of a float32 (bits given) that sorts as its value; NaN has 0, -0 and +0 share a code."""
    sign = number(1 << 31, score.sort)
    magnitude = score & 0x7FFFFFFF
    below_zero = every(equal(score >> 31, 1), negate(equal(magnitude, 0)))
    return choose(magnitude > 0x7F800000, number(0, score.sort), choose(below_zero, sign - magnitude, magnitude + sign))


def e4m3_encode(value: Term) -> Term:
    """The 8-bit code nearest to a float32 (bits given, not NaN), ties to even; beyond 448 the largest."""
    sign, magnitude = extract(value, 31, 31), value & 0x7FFFFFFF
    largest = number(0x43E00000, value.sort)
    magnitude = choose(magnitude > largest, largest, magnitude)
    # From 2^-6 on: the float32 encoding itself, rounded at bit 20, with the exponent field counted from -7.
    normal = (round_nearest_even(magnitude, number(20, value.sort)) >> 20) - ((127 - E4M3_BIAS) << 3)
    # Below: the significand in units of 2^-9. From 40 places on it is below half a unit by far.
    significand = (magnitude & 0x7FFFFF) | 0x800000
    places = number(141, value.sort) - (magnitude >> 23)
    wide, drop = widen(significand, 64), widen(choose(places > 40, number(40, value.sort), places), 64)
    small = extract(round_nearest_even(wide, drop) >> drop, 31, 0)
    return concat(sign, extract(choose(magnitude >= 0x3C800000, normal, small), 6, 0))


def ue8m0_ceil(value: Term) -> Term:
    """Exponent field, 32 bits wide, of the smallest power of two that is not below a float32 (bits given, normal)."""
    field = value >> 23
    return choose(equal(value & 0x7FFFFF, 0), field, field + 1)


def float32_successor(value: Term) -> Term:
    """Bits of the next float32 above (bits given, not NaN and not +Inf)."""
    sign = 1 << 31
    above_zero = equal(value & (sign - 1), 0)
    negative = equal(extract(value, 31, 31), 1)
    return choose(above_zero, number(1, value.sort), choose(negative, value - 1, value + 1))
