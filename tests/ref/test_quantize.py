"""Quantisation and the page layout, against a rational transcription and byte by byte."""

from __future__ import annotations

import struct
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dosa_ref.formats import Overflow, encode_e4m3, nearest_float32
from dosa_ref.quantize import ScaleFormat, dequantize_tokens, pack_pages, quantize_tokens, unpack_pages
from dosa_ref.spec import InvalidProblem
from tests.ref.conftest import FP8, random_codes


def row_by_rationals(row: np.ndarray, scale_format: ScaleFormat) -> tuple[list[int], float]:
    """The documented formula, one operation at a time, each rounded once to float32."""
    floor = Fraction(float(np.float32(1e-4)))
    amax = max([floor] + [abs(Fraction(float(x))) for x in row])
    scale = Fraction(float(nearest_float32(amax / 448)))
    if scale_format is ScaleFormat.UE8M0:
        power = Fraction(1, 2**126)
        while power < scale:
            power *= 2
        scale = power
    codes = []
    for x in row:
        quotient = nearest_float32(Fraction(float(x)) / scale)
        clamped = min(max(float(quotient), -448.0), 448.0)
        codes.append(encode_e4m3(-0.0 if x == 0 and np.signbit(x) else clamped, Overflow.NAN))
    return codes, float(scale)


@pytest.mark.parametrize("scale_format", ScaleFormat)
@given(
    row=st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=6),
    shift=st.integers(-130, 0),
)
def test_a_row_follows_the_formula(scale_format, row, shift):
    x = np.ldexp(np.array(row, np.float32), shift).astype(np.float32)
    codes, scale = quantize_tokens(x[None], scale_format)
    expected_codes, expected_scale = row_by_rationals(x, scale_format)
    assert float(scale[0]) == expected_scale
    assert codes.view(np.uint8)[0].tolist() == expected_codes


@pytest.mark.parametrize("scale_format", ScaleFormat)
def test_special_rows(scale_format):
    x = np.zeros((6, 128), np.float32)
    x[1] = 1e-41
    x[2, 3], x[3, 3], x[4, 3] = np.nan, np.inf, -np.inf
    x[5] = -0.0
    codes, scale = quantize_tokens(x, scale_format)
    assert (codes.view(np.uint8)[0] == 0).all()
    assert (codes.view(np.uint8)[1] == 0).all()
    assert (codes.view(np.uint8)[5] == 0x80).all()
    assert scale[0] == scale[1] == scale[5] > 0
    for row in (2, 3, 4):
        assert np.isnan(scale[row])
        assert (codes.view(np.uint8)[row] == 0x7F).all()
    if scale_format is ScaleFormat.UE8M0:
        assert scale[0] == np.float32(2.0**-22)


def test_scales_are_tight_powers_of_two():
    x = np.random.default_rng(0).standard_normal((200, 128)).astype(np.float32)
    codes, scale = quantize_tokens(x)
    mantissa, _ = np.frexp(scale)
    assert (mantissa == 0.5).all()
    largest = np.abs(codes.astype(np.float32)).max(axis=1)
    assert ((largest > 208) & (largest <= 448)).all()
    assert np.abs(dequantize_tokens(codes, scale) - x).max() < np.abs(x).max() / 16


@pytest.mark.parametrize("x", [np.zeros((2, 3)), np.zeros(3, np.float32), np.zeros((2, 0), np.float32)])
def test_quantize_refuses(x):
    with pytest.raises(InvalidProblem, match="float32"):
        quantize_tokens(x)


@pytest.mark.parametrize(("keys", "page_size"), [(0, 64), (1, 64), (64, 64), (130, 64), (5, 2)])
def test_pages_byte_by_byte(keys, page_size):
    rng = np.random.default_rng(keys)
    k = random_codes(rng, (keys, 128), "all_patterns").view(FP8)
    k_scale = rng.integers(0, 2**32, keys, dtype=np.uint32).view(np.float32)
    pages = pack_pages(k, k_scale, page_size)
    assert pages.shape == (-(-keys // page_size), page_size * 132)
    for i in range(keys):
        page, slot = pages[i // page_size].tobytes(), i % page_size
        assert page[slot * 128 : slot * 128 + 128] == k[i].tobytes()
        start = page_size * 128 + 4 * slot
        assert page[start : start + 4] == struct.pack("<I", int(k_scale[i].view(np.uint32)))
    back, back_scale = unpack_pages(pages, page_size)
    assert back.reshape(-1, 128)[:keys].tobytes() == k.tobytes()
    assert back_scale.reshape(-1)[:keys].tobytes() == k_scale.tobytes()
    assert not back.reshape(-1, 128)[keys:].view(np.uint8).any()


@pytest.mark.parametrize(
    ("field", "call"),
    [
        ("page_size", lambda k, s: pack_pages(k, s, 0)),
        ("k", lambda k, s: pack_pages(k[:, :64], s)),
        ("k", lambda k, s: pack_pages(k.view(np.uint8), s)),
        ("k_scale", lambda k, s: pack_pages(k, s[1:])),
        ("k_scale", lambda k, s: pack_pages(k, s.astype(np.float64))),
        ("k_pages", lambda k, s: unpack_pages(pack_pages(k, s), 32)),
        ("k_pages", lambda k, s: unpack_pages(pack_pages(k, s).view(np.int8))),
    ],
)
def test_pages_refuse(field, call):
    with pytest.raises(InvalidProblem) as caught:
        call(np.zeros((3, 128), FP8), np.ones(3, np.float32))
    assert caught.value.field == field
