"""The tensor-core model: known witnesses, an independent transcription over rationals, scalar form against twin."""

from __future__ import annotations

import dataclasses
import math
import time
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dosa_ref.formats import decode_e4m3
from dosa_ref.spec import InvalidProblem
from dosa_ref.tensorcore import HMMA_F16, MODELS, WGMMA_E4M3, AccumulationModel, dot_scalar, dots
from tests.ref.conftest import FAMILIES, FP8, encode, random_codes


def bits(values: np.ndarray) -> np.ndarray:
    return np.asarray(values, np.float32).view(np.uint32)


def vector(*parts: tuple[list[float], int]) -> np.ndarray:
    """An E4M3 vector of 128 elements made of 32-element blocks: (leading values, number of such blocks)."""
    out: list[float] = []
    for leading, count in parts:
        out += (leading + [0.0] * (32 - len(leading))) * count
    return encode(out + [0.0] * (128 - len(out)))


NON_MONOTONE_Q = vector(([448, 128, -2], 1), ([2] * 32, 1))
NON_MONOTONE_K = vector(([256, 128, 4], 1), ([4] * 32, 1))
LOWERED_TERM_K = vector(([256, 128, 0], 1), ([4] * 32, 1))


@pytest.mark.parametrize(
    ("q", "k", "expected"),
    [
        pytest.param(NON_MONOTONE_Q, NON_MONOTONE_K, 131312.0, id="all_terms"),
        pytest.param(NON_MONOTONE_Q, LOWERED_TERM_K, 131072.0, id="negative_term_removed_and_yet_smaller"),
        pytest.param(encode([256] + [1.875] * 127), encode([256] + [4] * 127), 65536.0, id="127_products_vanish"),
        pytest.param(np.zeros(128, np.uint8), np.full(128, 0x80, np.uint8), 0.0, id="signed_zeros"),
        pytest.param(encode([2.0**-9] * 128), encode([2.0**-9] * 128), 2.0**-11, id="smallest_products"),
        # A subnormal takes part with exponent -6: 2^-9 * 448 aligns at 2^2, so the unit is 2^-11 and 2^-12 is lost.
        pytest.param(encode([2.0**-9, 2.0**-6]), encode([448.0, 2.0**-6]), 0.875, id="subnormal_votes_with_minus_6"),
    ],
)
def test_known_bits(q, k, expected):
    q, k = (np.concatenate([v, np.zeros(128 - len(v), v.dtype)]) for v in (q, k))
    assert bits(dot_scalar(q, k)) == bits(np.float32(expected))
    assert bits(dots(q[None], k[None]))[0, 0] == bits(np.float32(expected))


def test_accumulator_alone_loses_its_low_ten_bits():
    zero = np.zeros(32, np.uint8)
    c = np.uint32(0x3F8FFFFF).view(np.float32)
    assert bits(dot_scalar(zero, zero, c=c)) == 0x3F8FFC00
    assert bits(dots(zero[None], zero[None], c=np.array([[c]])))[0, 0] == 0x3F8FFC00


@pytest.mark.parametrize("c", [np.nan, np.inf, -np.inf])
def test_non_finite_accumulator(c):
    rng = np.random.default_rng(0)
    a, b = random_codes(rng, (2, 32), "finite"), random_codes(rng, (3, 32), "finite")
    a[1, 5] = 0xFF
    got = bits(dots(a, b, c=np.full((2, 3), c, np.float32)))
    expected = 0x7FFFFFFF if np.isnan(c) else bits(np.float32(c))
    assert (got[0] == expected).all()
    assert (got[1] == 0x7FFFFFFF).all()
    assert bits(dot_scalar(a[0], b[0], c=c)) == expected
    assert bits(dot_scalar(a[1], b[0], c=c)) == 0x7FFFFFFF


def test_order_matters_between_blocks_but_not_inside():
    rng = np.random.default_rng(1)
    a, b = random_codes(rng, (200, 128), "gaussian"), random_codes(rng, (200, 128), "gaussian")
    plain = np.diagonal(dots(a, b))
    inside = np.concatenate([rng.permutation(32) + 32 * block for block in range(4)])
    assert (bits(np.diagonal(dots(a[:, inside], b[:, inside]))) == bits(plain)).all()
    rotated = np.roll(np.arange(128), 32)
    assert (bits(np.diagonal(dots(a[:, rotated], b[:, rotated]))) != bits(plain)).mean() > 0.3


def value(code: int) -> Fraction:
    return Fraction(decode_e4m3(code))


def exponent(x: Fraction, least: int) -> int:
    """``max(floor(log2 |x|), least)``."""
    e = least
    while abs(x) >= Fraction(2) ** (e + 1):
        e += 1
    return e


def dot_rational(q: np.ndarray, k: np.ndarray, model: AccumulationModel, c: float) -> float:
    """The module docstring's formula, word for word, over rationals."""
    acc = Fraction(c)
    for first in range(0, len(q), model.terms_per_step):
        pairs = [(value(int(x)), value(int(y))) for x, y in zip(q, k)][first : first + model.terms_per_step]
        aligned = [
            exponent(x, model.operand_min_exponent) + exponent(y, model.operand_min_exponent) for x, y in pairs if x * y
        ]
        if acc:
            aligned.append(exponent(acc, -126))
        unit = Fraction(2) ** (max(aligned, default=0) - model.fraction_bits)
        total = unit * sum([math.trunc(x * y / unit) for x, y in pairs] + [math.trunc(acc / unit)])
        last = Fraction(2) ** (exponent(total, -126) - model.output_fraction_bits)
        acc = math.trunc(total / last) * last
    return float(acc)


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
@pytest.mark.parametrize("family", FAMILIES[1:])
def test_scalar_is_the_documented_formula(model, family):
    rng = np.random.default_rng(2)
    for c in (0.0, 1.0 + 2.0**-23, -3e-5, 2.0**-140, -(2.0**100)):
        q, k = random_codes(rng, (64,), family), random_codes(rng, (64,), family)
        got = dot_scalar(q, k, model, c)
        assert bits(got) == bits(np.float32(dot_rational(q, k, model, float(np.float32(c)))) + np.float32(0))


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
@given(
    seed=st.integers(0, 2**32 - 1),
    families=st.tuples(st.sampled_from(FAMILIES), st.sampled_from(FAMILIES)),
    accumulator=st.sampled_from(["none", "any_bits", "moderate", "subnormal"]),
    steps=st.integers(0, 3),
)
@settings(max_examples=60, deadline=None)
def test_array_twin_equals_scalar(model, seed, families, accumulator, steps):
    rng = np.random.default_rng(seed)
    inner = 32 * steps
    a, b = random_codes(rng, (3, max(inner, 32)), families[0]), random_codes(rng, (4, max(inner, 32)), families[1])
    a, b = a[:, :inner], b[:, :inner]
    shape = (3, 4)
    c = {
        "none": None,
        "any_bits": rng.integers(0, 2**32, shape, dtype=np.uint32).view(np.float32),
        "moderate": (rng.standard_normal(shape) * 2.0 ** rng.integers(-30, 20, shape)).astype(np.float32),
        "subnormal": rng.integers(0, 2**24, shape, dtype=np.uint32).view(np.float32),
    }[accumulator]
    got = dots(a, b, model, c)
    expected = [
        [dot_scalar(x, y, model, 0 if c is None else c[i, j]) for j, y in enumerate(b)] for i, x in enumerate(a)
    ]
    assert (bits(got) == bits(np.array(expected))).all()


def test_blocks_strides_dtypes_and_orientation():
    rng = np.random.default_rng(3)
    a, b = random_codes(rng, (37, 128), "finite"), random_codes(rng, (2500, 128), "finite")
    whole = dots(a, b)
    assert whole.shape == (37, 2500)
    assert whole.flags.c_contiguous
    assert (bits(dots(b, a)) == bits(whole.T)).all()
    assert dots(b, a).flags.c_contiguous
    assert (bits(dots(a.view(FP8), b.view(FP8))) == bits(whole)).all()
    spread = np.zeros((37, 256), np.uint8)
    spread[:, ::2] = a
    assert (bits(dots(spread[:, ::2], b)) == bits(whole)).all()
    for i, j in [(0, 0), (36, 2499), (8, 1024), (7, 1023)]:
        assert bits(whole[i, j]) == bits(dot_scalar(a[i], b[j]))


def test_a_model_outside_the_table():
    wide = dataclasses.replace(WGMMA_E4M3, name="wide", fraction_bits=20, output_fraction_bits=18)
    rng = np.random.default_rng(4)
    a, b = random_codes(rng, (4, 64), "finite"), random_codes(rng, (5, 64), "gaussian")
    c = rng.standard_normal((4, 5)).astype(np.float32)
    expected = [[dot_scalar(x, y, wide, c[i, j]) for j, y in enumerate(b)] for i, x in enumerate(a)]
    assert (bits(dots(a, b, wide, c)) == bits(np.array(expected))).all()


def test_models_differ():
    rng = np.random.default_rng(5)
    a, b = random_codes(rng, (50, 128), "gaussian"), random_codes(rng, (50, 128), "gaussian")
    assert (bits(dots(a, b)) != bits(dots(a, b, HMMA_F16))).mean() > 0.9


def test_empty_sizes():
    assert dots(np.zeros((0, 128), np.uint8), np.zeros((3, 128), np.uint8)).shape == (0, 3)
    assert dots(np.zeros((2, 128), np.uint8), np.zeros((0, 128), np.uint8)).shape == (2, 0)
    assert (bits(dots(np.zeros((2, 0), np.uint8), np.zeros((3, 0), np.uint8))) == 0).all()


@pytest.mark.parametrize(
    ("field", "arguments"),
    [
        ("K", (np.zeros((1, 33), np.uint8), np.zeros((1, 33), np.uint8))),
        ("K", (np.zeros((1, 32), np.uint8), np.zeros((1, 64), np.uint8))),
        ("a_codes", (np.zeros(32, np.uint8), np.zeros((1, 32), np.uint8))),
        ("b_codes", (np.zeros((1, 32), np.uint8), np.zeros((1, 32), np.float32))),
        ("c", (np.zeros((1, 32), np.uint8), np.zeros((1, 32), np.uint8), WGMMA_E4M3, np.zeros((1, 2), np.float32))),
        ("c", (np.zeros((1, 32), np.uint8), np.zeros((1, 32), np.uint8), WGMMA_E4M3, np.zeros((1, 1)))),
    ],
)
def test_bad_arguments(field, arguments):
    with pytest.raises(InvalidProblem) as caught:
        dots(*arguments)
    assert caught.value.field == field


def test_two_million_dots_a_second():
    rng = np.random.default_rng(6)
    a, b = random_codes(rng, (64, 128), "gaussian"), random_codes(rng, (4096, 128), "gaussian")
    dots(a, b)
    best = math.inf
    for _ in range(5):
        start = time.perf_counter()
        dots(a, b)
        best = min(best, time.perf_counter() - start)
    assert a.shape[0] * b.shape[0] / best > 2e6
