"""Formats: every E4M3FN and UE8M0 code, every tie, and float32 rounding against an independent route."""

from __future__ import annotations

import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dosa_ref import formats
from dosa_ref.formats import Overflow
from dosa_ref.spec import InvalidProblem
from tests.ref.conftest import FP8

FINITE = [code for code in range(256) if code & 0x7F != 0x7F]


def test_decode_equals_ml_dtypes_for_every_code():
    for code in range(256):
        expected = float(np.uint8(code).view(FP8))
        got = formats.decode_e4m3(code)
        assert (math.isnan(got) and math.isnan(expected)) or float(got) == expected
        assert math.copysign(1, float(got)) == math.copysign(1, expected) or math.isnan(expected)
    assert formats.decode_e4m3(0x7E) == 448
    assert formats.decode_e4m3(0x01) == Fraction(1, 512)


def test_every_code_survives_a_round_trip():
    for code in FINITE:
        assert formats.encode_e4m3(formats.decode_e4m3(code), Overflow.NAN) == code
        assert formats.encode_e4m3(formats.decode_e4m3(code), Overflow.SATURATE) == code


def boundary_values() -> np.ndarray:
    """All values, all midpoints, their float32 neighbours, and the ends of the range, both signs."""
    values = np.sort(np.arange(0x7F, dtype=np.uint8).view(FP8).astype(np.float32))
    middles = ((values[1:].astype(np.float64) + values[:-1]) / 2).astype(np.float32)
    ends = np.array([464, 465, 480, 1e4, 3e38, 1e-45, 2.0**-10, 1e-40], np.float32)
    points = np.concatenate([values, middles, ends])
    points = np.concatenate([points, np.nextafter(points, np.float32(0)), np.nextafter(points, np.float32(np.inf))])
    return np.unique(np.concatenate([points, -points]))


def test_encode_at_every_tie_and_neighbour():
    values = boundary_values()
    clamped = formats.encode_e4m3_array(values).view(np.uint8)
    with np.errstate(over="ignore"):
        plain = values.astype(FP8).view(np.uint8)
    for x, saturated, unclamped in zip(values.tolist(), clamped.tolist(), plain.tolist()):
        assert (
            formats.encode_e4m3(Fraction(x), Overflow.SATURATE) | (0x80 if x == 0 and saturated & 0x80 else 0)
            == saturated
        )
        assert formats.encode_e4m3(x, Overflow.SATURATE) == saturated
        assert formats.encode_e4m3(x, Overflow.NAN) == unclamped


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16], ids=["bfloat16", "float16"])
def test_encode_every_16_bit_float(dtype):
    values = np.arange(2**16, dtype=np.uint16).view(dtype).astype(np.float32)
    got = formats.encode_e4m3_array(values).view(np.uint8)
    sample = np.random.default_rng(0).choice(2**16, 3000, replace=False)
    for i in sample:
        assert formats.encode_e4m3(float(values[i]), Overflow.SATURATE) == got[i]
    # Independently of both: the nearest of all finite codes, even code on a tie.
    finite = np.isfinite(values)
    table = np.array([float(formats.decode_e4m3(c)) for c in range(0x7F)])
    magnitude = np.minimum(np.abs(values[finite].astype(np.float64)), 448)
    upper = np.clip(np.searchsorted(table, magnitude), 1, 0x7E)
    below, above = magnitude - table[upper - 1], table[upper] - magnitude
    nearest = np.where((below < above) | ((below == above) & (upper % 2 == 1)), upper - 1, upper)
    assert (nearest == (got[finite] & 0x7F)).all()


@pytest.mark.parametrize(
    ("value", "saturate", "nan"),
    [
        (464.0, 0x7E, 0x7E),
        (math.nextafter(464.0, 465), 0x7E, 0x7F),
        (-1e9, 0xFE, 0xFF),
        (math.inf, 0x7E, 0x7F),
        (-math.inf, 0xFE, 0xFF),
        (math.nan, 0x7F, 0x7F),
        (-math.nan, 0xFF, 0xFF),
        (-0.0, 0x80, 0x80),
        (2.0**-10, 0x00, 0x00),
        (1.5 * 2.0**-9, 0x02, 0x02),
        (-(2.0**-11), 0x80, 0x80),
    ],
)
def test_special_values_of_encode(value, saturate, nan):
    assert formats.encode_e4m3(value, Overflow.SATURATE) == saturate
    assert formats.encode_e4m3(value, Overflow.NAN) == nan
    assert int(formats.encode_e4m3_array(np.array([value], np.float32)).view(np.uint8)[0]) == saturate or value > 464


def test_all_products_of_two_codes_are_exact_in_float32():
    codes = np.array(FINITE, np.uint8)
    single = codes.view(FP8).astype(np.float32)
    products = single[:, None] * single
    values = [formats.decode_e4m3(c) for c in FINITE]
    for i in range(0, len(FINITE), 7):
        for j in range(len(FINITE)):
            assert Fraction(float(products[i, j])) == Fraction(values[i]) * Fraction(values[j])
    double = codes.view(FP8).astype(np.float64)
    assert (products.astype(np.float64) == double[:, None] * double).all()


def test_is_nan():
    assert formats.is_e4m3_nan(np.arange(256, dtype=np.uint8)).nonzero()[0].tolist() == [0x7F, 0xFF]


def test_ue8m0_decode():
    assert formats.decode_ue8m0(127) == 1
    assert formats.decode_ue8m0(0) == Fraction(1, 2**127)
    assert math.isnan(formats.decode_ue8m0(255))
    codes = np.arange(256, dtype=np.uint8)
    values = formats.ue8m0_to_float32(codes)
    for code in range(255):
        assert Fraction(float(values[code])) == formats.decode_ue8m0(code)
    assert np.isnan(values[255])


def test_ue8m0_ceil_at_every_power_of_two():
    powers = np.exp2(np.arange(-126, 128)).astype(np.float32)
    assert (formats.ceil_ue8m0(powers) == np.arange(1, 255)).all()
    above = np.nextafter(powers, np.float32(np.inf))
    assert (formats.ceil_ue8m0(above) == np.arange(2, 256)).all()
    below = np.nextafter(powers[1:], np.float32(0))
    assert (formats.ceil_ue8m0(below) == np.arange(2, 255)).all()
    special = np.array([0, 1e-45, 2.0**-127, np.inf, np.nan], np.float32)
    assert formats.ceil_ue8m0(special).tolist() == [1, 1, 1, 255, 255]


@given(st.floats(width=32, min_value=2.0**-126, max_value=2.0**126, allow_subnormal=False))
def test_ue8m0_ceil_is_the_smallest_power_not_below(x):
    code = int(formats.ceil_ue8m0(np.array([x], np.float32))[0])
    assert formats.decode_ue8m0(code - 1) < Fraction(x) <= formats.decode_ue8m0(code)


fractions = st.one_of(
    st.fractions(),
    st.builds(lambda n, e: Fraction(n) * Fraction(2) ** e, st.integers(-(2**60), 2**60), st.integers(-220, 90)),
)
LARGEST = float(np.finfo(np.float32).max)
HALF_SMALLEST = Fraction(1, 2**150)


@given(fractions)
@example(Fraction(0))
@example(HALF_SMALLEST)
@example(-HALF_SMALLEST)
@example(HALF_SMALLEST * Fraction(3))
@example(HALF_SMALLEST + Fraction(1, 2**400))
@example(Fraction(LARGEST))
@example(Fraction(2**128) - Fraction(2**103))
@example(Fraction(2**128) - Fraction(2**103) - Fraction(1, 3))
@example(Fraction(1) + Fraction(1, 2**24))
@example(Fraction(1) + Fraction(3, 2**24))
@example(-(Fraction(2) ** 200))
def test_float32_rounding(value):
    up, down, nearest = (
        formats.round_up_float32(value),
        formats.round_down_float32(value),
        formats.nearest_float32(value),
    )
    # Characterised by order alone, with NumPy's neighbours.
    if np.isfinite(up):
        assert Fraction(float(up)) >= value
    previous = np.nextafter(up, np.float32(-np.inf))
    assert np.isneginf(previous) or Fraction(float(previous)) < value or (value == 0 and up == 0)
    if np.isfinite(down):
        assert Fraction(float(down)) <= value
    following = np.nextafter(down, np.float32(np.inf))
    assert np.isposinf(following) or Fraction(float(following)) > value or (value == 0 and down == 0)
    assert np.signbit(nearest) == (value < 0)
    if np.isfinite(up) and np.isfinite(down):
        to_up, to_down = Fraction(float(up)) - value, value - Fraction(float(down))
        even = up if int(up.view(np.uint32)) % 2 == 0 else down
        assert nearest == (up if to_up < to_down else down if to_down < to_up else even)
    else:
        # Beyond the largest float32, nearest overflows from half a unit above it on.
        limit = Fraction(2**128) - Fraction(2**103)
        assert float(nearest) == math.copysign(math.inf if abs(value) >= limit else LARGEST, value)


def test_successors():
    one = np.float32(1)
    assert formats.next_up(one) == one + np.finfo(np.float32).eps
    assert formats.next_down(one) == one - np.finfo(np.float32).epsneg
    assert formats.next_up(np.float32(-0.0)) == formats.next_up(np.float32(0.0)) == np.float32(1e-45)
    assert np.isposinf(formats.next_up(np.float32(LARGEST)))
    assert np.isneginf(formats.next_down(np.float32(-np.inf)))


def test_evidence_shows_bits_and_decimal():
    assert formats.float_evidence(np.float32(-0.0)) == {"bits": "0x80000000", "decimal": "-0.0"}
    assert formats.float_evidence(np.inf) == {"bits": "0x7f800000", "decimal": "inf"}


@pytest.mark.parametrize("decode", [formats.decode_e4m3, formats.decode_ue8m0])
@pytest.mark.parametrize("code", [-1, 256])
def test_codes_out_of_range(decode, code):
    with pytest.raises(InvalidProblem, match="code"):
        decode(code)
