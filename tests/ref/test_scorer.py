"""The score: fused operation, head order, special values, scalar form against twin, one contract against the other."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dosa_ref.formats import nearest_float32
from dosa_ref.scorer import (
    combine_heads_sm90,
    float32_of_exact,
    fma_float32,
    fma_float32_array,
    padded_num_heads,
    score_row,
    score_row_exact,
    score_scalar_exact,
    score_scalar_sm90,
    scores_exact,
    scores_sm90,
)
from dosa_ref.spec import HEAD_CHAIN_ULPS, Contract, UnsupportedConfiguration
from tests.ref.conftest import FAMILIES, encode, make_problem, random_codes

U = Fraction(1, 2**24)


def same(a: np.ndarray, b: np.ndarray) -> bool:
    """Equal bits, any NaN equal to any NaN."""
    a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
    return bool(((a.view(np.uint32) == b.view(np.uint32)) | (np.isnan(a) & np.isnan(b))).all())


def test_fma_rounds_once():
    """``x y`` is just below half a unit of ``z``: float64 loses the difference and then rounds a tie that is none."""
    x, y, z = np.float32(1 + 2.0**-23), np.float32(2.0**-24 * (1 - 2.0**-23)), np.float32(1 + 2.0**-23)
    naive = np.float32(np.float64(x) * np.float64(y) + np.float64(z))
    assert naive == np.float32(1 + 2.0**-22)
    assert fma_float32(x, y, z) == fma_float32_array(x[None], y[None], z[None])[0] == z
    assert nearest_float32(Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))) == z


@pytest.mark.parametrize("family", ["any_bits", "near_midpoint", "subnormal", "cancelling"])
def test_fma_twin_equals_the_rational_form(family):
    rng = np.random.default_rng(FAMILIES.index("finite"))
    n = 1500
    if family == "any_bits":
        x, y, z = (rng.integers(0, 2**32, n, dtype=np.uint32).view(np.float32) for _ in range(3))
    elif family == "near_midpoint":
        # z with an odd or even last bit; x y is half a unit of z, give or take a few 2^-23 and 2^-46 of it.
        z = (rng.choice([-1, 1], n) * (1 + rng.integers(0, 2**23, n) * 2.0**-23)).astype(np.float32)
        x = (2.0**-12 * (1 + rng.integers(-2, 3, n) * 2.0**-23)).astype(np.float32)
        y = (2.0**-12 * (1 + rng.integers(-2, 3, n) * 2.0**-23)).astype(np.float32) * rng.choice([-1, 1], n).astype(
            np.float32
        )
    elif family == "subnormal":
        x = (rng.integers(-(2**12), 2**12, n) * 2.0**-80).astype(np.float32)
        y = (rng.integers(-(2**12), 2**12, n) * 2.0**-80).astype(np.float32)
        z = (rng.integers(-4, 5, n) * 2.0**-149).astype(np.float32)
    else:
        x, y = rng.standard_normal(n).astype(np.float32), rng.standard_normal(n).astype(np.float32)
        z = -(x.astype(np.float64) * y).astype(np.float32)
    expected = [fma_float32(*triple) for triple in zip(x, y, z)]
    with np.errstate(all="ignore"):
        naive = (x.astype(np.float64) * y + z).astype(np.float32)
        assert family != "near_midpoint" or not same(naive, np.array(expected))
        got = fma_float32_array(x, y, z)
    assert same(got, np.array(expected))


SPECIAL = [0.0, -0.0, 1.0, -1.5, np.inf, -np.inf, np.nan, 1e-45, 3e38, -3e38]


def test_fma_special_values():
    x, y, z = (a.ravel() for a in np.meshgrid(*[np.array(SPECIAL, np.float32)] * 3))
    expected = np.array([fma_float32(*triple) for triple in zip(x, y, z)])
    with np.errstate(all="ignore"):
        wide = (x.astype(np.float64) * y + z).astype(np.float32)
        got = fma_float32_array(x, y, z)
    assert same(got, expected)
    exact = ~np.isfinite(x * y.astype(np.float64) + z) | ((x == 0) | (y == 0))
    assert same(got[exact], wide[exact])


def test_head_order_is_the_stated_one():
    """Weights and dots that make every other order, or an unswapped start, give other bits."""
    rng = np.random.default_rng(3)
    heads = 64
    dots = np.abs(rng.standard_normal((1, heads, 50))).astype(np.float32)
    weights = rng.standard_normal((1, heads)).astype(np.float32)
    scale = np.abs(rng.standard_normal(50)).astype(np.float32)
    got = combine_heads_sm90(dots, weights, scale)[0]

    def one(column: int, start: tuple[int, ...]) -> np.float32:
        v = []
        for c in range(4):
            s = []
            for b in range(2):
                h = [8 * j + 2 * c + b for j in start]
                acc = np.float32(dots[0, h[0], column] * weights[0, h[0]])
                for g in h[1:]:
                    acc = fma_float32(dots[0, g, column], weights[0, g], acc)
                s.append(acc)
            v.append(np.float32(np.float32(s[0] + s[1]) * scale[column]))
        return np.float32(np.float32(v[0] + v[1]) + np.float32(v[2] + v[3]))

    stated = np.array([one(i, (1, 0, 2, 3, 4, 5, 6, 7)) for i in range(50)])
    unswapped = np.array([one(i, (0, 1, 2, 3, 4, 5, 6, 7)) for i in range(50)])
    assert same(got, stated)
    assert (got != unswapped).sum() > 5


@given(
    seed=st.integers(0, 2**32 - 1),
    heads=st.sampled_from([1, 7, 32, 33, 64]),
    family=st.sampled_from(FAMILIES),
    numbers=st.sampled_from(["normal", "any_bits", "tiny", "zero"]),
)
@settings(max_examples=40, deadline=None)
def test_sm90_twin_equals_scalar(seed, heads, family, numbers):
    rng = np.random.default_rng(seed)
    q, k = random_codes(rng, (2, heads, 128), family), random_codes(rng, (2, 128), family)
    if numbers == "any_bits":
        w, s = (rng.integers(0, 2**32, n, dtype=np.uint32).view(np.float32) for n in ((2, heads), 2))
    elif numbers == "tiny":
        w, s = (rng.standard_normal((2, heads)) * 2.0**-146).astype(np.float32), np.ones(2, np.float32)
    else:
        w, s = rng.standard_normal((2, heads)).astype(np.float32), rng.choice([-1, 0, 0.5, 3], 2).astype(np.float32)
        w *= numbers != "zero"
    expected = [[score_scalar_sm90(q[i], w[i], k[j], s[j]) for j in range(2)] for i in range(2)]
    assert same(scores_sm90(q, w, k, s), np.array(expected))


@given(seed=st.integers(0, 2**32 - 1), family=st.sampled_from(FAMILIES), any_bits=st.booleans())
@settings(max_examples=30, deadline=None)
def test_exact_twin_equals_scalar(seed, family, any_bits):
    rng = np.random.default_rng(seed)
    q, k = random_codes(rng, (3, 128), family), random_codes(rng, (4, 128), family)
    w, s = rng.standard_normal(3).astype(np.float32), np.abs(rng.standard_normal(4)).astype(np.float32)
    if any_bits:
        w, s = (rng.integers(0, 2**32, n, dtype=np.uint32).view(np.float32) for n in (3, 4))
    got = scores_exact(q, w, k, s)
    expected = [score_scalar_exact(q, w, k[j], s[j]) for j in range(4)]
    for a, b in zip(got, expected):
        assert a == b or (math.isnan(a) and math.isnan(b))
        assert isinstance(a, Fraction) == isinstance(b, Fraction)


def test_sm90_is_near_the_exact_score():
    """Dots of small integers lose nothing: only the float32 chain is left, at most HEAD_CHAIN_ULPS units."""
    rng = np.random.default_rng(4)
    q = encode(rng.integers(0, 2, (64, 128)))
    k = encode(rng.integers(0, 2, (40, 128)))
    w = rng.standard_normal(64).astype(np.float32)
    s = np.exp2(rng.integers(-3, 3, 40)).astype(np.float32)
    computed = scores_sm90(q[None], w[None], k, s)[0]
    exact = scores_exact(q, w, k, s)
    absolute = scores_exact(q, np.abs(w), k, s)
    for c, e, a in zip(computed, exact, absolute):
        assert abs(Fraction(float(c)) - e) <= HEAD_CHAIN_ULPS * U * a
    assert any(Fraction(float(c)) != e for c, e in zip(computed, exact))


def one_key_scores(change) -> tuple[np.ndarray, list]:
    rng = np.random.default_rng(5)
    arrays = {
        "q": random_codes(rng, (32, 128), "gaussian"),
        "w": rng.standard_normal(32).astype(np.float32),
        "k": random_codes(rng, (3, 128), "gaussian"),
        "s": np.array([1, 0.5, 2], np.float32),
    }
    change(arrays)
    q, w, k, s = arrays.values()
    with np.errstate(all="ignore"):
        return scores_sm90(q[None], w[None], k, s)[0], scores_exact(q, w, k, s)


def set_value(name, index, value):
    def change(arrays):
        arrays[name][index] = value

    return change


def test_nan_key_scores_zero():
    computed, exact = one_key_scores(set_value("k", (1, 7), 0x7F))
    assert computed[1] == 0
    assert exact[1] == 0
    assert (computed[[0, 2]] != 0).all()


def test_special_scales():
    plain, _ = one_key_scores(set_value("s", 0, 1))
    nan, exact = one_key_scores(set_value("s", 0, np.nan))
    assert np.isnan(nan[0])
    assert math.isnan(exact[0])
    zero, exact = one_key_scores(set_value("s", 0, 0))
    assert zero[0] == exact[0] == 0
    negated, exact = one_key_scores(set_value("s", 0, -1))
    assert negated[0] == -plain[0]
    assert exact[0] < 0 or exact[0] > 0
    infinite, exact = one_key_scores(set_value("s", 0, np.inf))
    assert not np.isfinite(infinite[0])
    assert math.isinf(exact[0])
    assert same(infinite[1:], plain[1:])


@pytest.mark.parametrize("weight", [np.nan, np.inf, -np.inf])
def test_special_weights(weight):
    computed, exact = one_key_scores(set_value("w", 3, weight))
    assert not np.isfinite(computed).any()
    assert not any(isinstance(score, Fraction) for score in exact)
    if np.isnan(weight):
        assert np.isnan(computed).all()
        assert all(math.isnan(score) for score in exact)


def test_all_heads_inactive_scores_zero():
    q, k = np.full((32, 128), 0x38, np.uint8), np.full((2, 128), 0xB8, np.uint8)
    scores = scores_sm90(q[None], np.ones((1, 32), np.float32), k, np.ones(2, np.float32))
    assert (scores.view(np.uint32) == 0).all()


def test_padding_of_heads():
    assert [padded_num_heads(h) for h in (1, 32, 33, 64)] == [32, 32, 64, 64]
    with pytest.raises(UnsupportedConfiguration, match="65"):
        padded_num_heads(65)


def test_rows_of_a_problem():
    problem = make_problem(rows=3, keys=9000, windows=[(0, 9000), (8190, 8200), (5, 5)])
    for row in range(3):
        ks, ke = problem.window(row)
        scores = score_row(problem, row)
        assert scores.shape == (ke - ks,)
        for i in {0, (ke - ks) // 2, ke - ks - 1} & set(range(ke - ks)):
            expected = score_scalar_sm90(
                problem.q[row], problem.weights[row], problem.k[ks + i], problem.k_scale[ks + i]
            )
            assert same(scores[i], expected)
    exact = score_row_exact(problem, 1)
    assert same(score_row(problem, 1, Contract.EXACT), [float32_of_exact(score) for score in exact])
    assert float32_of_exact(math.inf) == np.inf
