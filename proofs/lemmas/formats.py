"""Formats of the inputs: rounding to E4M3, reading it back, and power-of-two scales."""

from __future__ import annotations

from functools import partial

from proofs.encodings import (
    e4m3_biased_exponent,
    e4m3_encode,
    e4m3_float32_bits,
    e4m3_is_nan,
    e4m3_significand,
    ue8m0_ceil,
)
from proofs.lemma import Constants, Lemma, Mutant, Statement
from proofs.terms import (
    Term,
    bits,
    choose,
    equal,
    every,
    extract,
    float32_from_bits,
    float_less,
    float_less_equal,
    implies,
    negate,
    widen,
)

THEME = "formats"
WIDTH = 64
E4M3_MAX_BITS = 0x43E00000
"""448 as float32."""

FIXED_FIELD = 110
"""Magnitudes are compared in units of 2^(110 - 150) = 2^-40; those below 2^-17 count as 0, to which they round."""


def _e4m3_round_trip(_: Constants, *, nan: bool = False) -> Statement:
    code = bits("code", 8)
    return Statement(
        logic="QF_BV",
        premises=() if nan else (negate(e4m3_is_nan(code)),),
        claim=equal(e4m3_encode(e4m3_float32_bits(code)), code),
    )


def _fixed(code: Term) -> Term:
    # The magnitude of a code in units of 2^-40: significand * 2^(biased - 1) of 2^-9.
    return (e4m3_significand(code, WIDTH) << (e4m3_biased_exponent(code, WIDTH) - 1)) << 31


def _distance(a: Term, b: Term) -> Term:
    return choose(a >= b, a - b, b - a)


def _e4m3_nearest(_: Constants, *, away: bool = False, saturated: bool = True) -> Statement:
    # other: any other magnitude that the format has.
    value, other = bits("value", 32), bits("other", 8)
    field = widen(value >> 23, WIDTH)
    fixed = widen((value & 0x7FFFFF) | 0x800000, WIDTH) << (field - FIXED_FIELD)
    code = e4m3_encode(value)
    if away:
        # Half a unit is added and the rest cut off, as a conversion without ties to even would do.
        code = extract((value + (1 << 19)) >> 20, 7, 0) - ((127 - 7) << 3)
    distance, other_distance = _distance(fixed, _fixed(code)), _distance(fixed, _fixed(other))
    even = equal(extract(code, 0, 0), 0)
    return Statement(
        logic="QF_BV",
        premises=(*((value <= E4M3_MAX_BITS,) if saturated else ()), other < 0x7F),
        claim=every(
            distance <= other_distance,
            implies(every(equal(distance, other_distance), negate(equal(code, other))), even),
        ),
    )


def _ue8m0_ceil(_: Constants, *, up: bool = True) -> Statement:
    value = bits("value", 32)
    field = ue8m0_ceil(value) if up else value >> 23
    least, below = (float32_from_bits(f << 23) for f in (field, field - 1))
    number_value = float32_from_bits(value)
    return Statement(
        logic="QF_BVFP",
        premises=(value >= 0x00800000, value <= 0x7F000000),
        claim=every(field >= 1, float_less_equal(number_value, least), float_less(below, number_value)),
    )


LEMMAS = (
    Lemma(
        id="e4m3_round_trip",
        statement="Encoding the float32 value of an E4M3 code gives the code back, the sign of zero included.",
        theme=THEME,
        build=_e4m3_round_trip,
        speaks_of=("dosa_ref.formats.encode_e4m3_array", "dosa_ref.formats.decode_e4m3"),
        mutants=(Mutant(id="nan", broken="NaN codes allowed", build=partial(_e4m3_round_trip, nan=True)),),
    ),
    Lemma(
        id="e4m3_nearest",
        statement="The E4M3 code of a value in 0 .. 448 is the nearest of all codes, and of two nearest the even one.",
        theme=THEME,
        build=_e4m3_nearest,
        speaks_of=("dosa_ref.formats.encode_e4m3", "dosa_ref.formats.encode_e4m3_array"),
        mutants=(
            Mutant(id="ties_away", broken="ties go away from zero", build=partial(_e4m3_nearest, away=True)),
            Mutant(
                id="unbounded",
                broken="values beyond 448 in the units of 2^-40",
                build=partial(_e4m3_nearest, saturated=False),
            ),
        ),
        note="Negative values mirror positive ones. Soundness of the bound does not rest on this: a column may be any "
        "E4M3 vector (`column_rounding`).",
    ),
    Lemma(
        id="ue8m0_ceil",
        statement="The exponent field, plus one unless the fraction is 0, is the least power of two >= value.",
        theme=THEME,
        build=_ue8m0_ceil,
        speaks_of=("dosa_ref.formats.ceil_ue8m0", "dosa_ref.quantize.quantize_tokens"),
        mutants=(Mutant(id="floor", broken="the exponent field alone", build=partial(_ue8m0_ceil, up=False)),),
    ),
)
