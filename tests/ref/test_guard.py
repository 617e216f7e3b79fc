"""The guard: the dot error on constructed worst cases, and the float64 budget against two independent exact routes."""

from __future__ import annotations

import math
from fractions import Fraction

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dosa_ref import guard
from dosa_ref.guard import GuardTerms, dot_error, dot_error_exact, guard_enclosure, guard_terms, sqrt_down, sqrt_up
from dosa_ref.spec import FRACTION_BITS
from dosa_ref.tensorcore import dot_scalar, dots
from tests.ref.conftest import FAMILIES, encode, form_bound, make_problem, random_codes, some_form

TERMS = [name for name in GuardTerms.__slots__ if name != "float64"]


def exact_dot(q: np.ndarray, k: np.ndarray) -> Fraction:
    return sum(
        (Fraction(x) * Fraction(y) for x, y in zip(guard.e4m3_float64(q).tolist(), guard.e4m3_float64(k).tolist())),
        Fraction(0),
    )


def raised_norm(k: np.ndarray) -> Fraction:
    """``||k~||``, rounded up a little."""
    values = [abs(Fraction(x)) for x in guard.e4m3_float64(k).tolist()]
    return sqrt_up(sum((max(v, Fraction(1, 64)) ** 2 for v in values if v), Fraction(0)))


def lossy_pair(big: float, small_q: float, small_k: float, blocks: int = 4) -> tuple[np.ndarray, np.ndarray]:
    """One large product first, then products that lie just below the unit of every step."""
    q = [big] + [small_q] * (32 * blocks - 1) + [0.0] * (128 - 32 * blocks)
    k = [big] + [small_k] * (32 * blocks - 1) + [0.0] * (128 - 32 * blocks)
    return encode(q), encode(k)


CONSTRUCTED = [
    lossy_pair(256, 1.875, 4),
    lossy_pair(256, -1.875, 4),
    lossy_pair(256, 1.875, 4, blocks=1),
    lossy_pair(256, 1.875, 4, blocks=2),
    lossy_pair(448, 1.875, 4),
    lossy_pair(2.0**-6, 2.0**-9, 2.0**-6),
    lossy_pair(2.0**-9, 2.0**-9, 2.0**-9),
    lossy_pair(2.0**-2, 2.0**-9 * 7, 2.0**-9 * 7),
    (encode([1.875] * 96 + [256] + [1.875] * 31), encode([4] * 96 + [256] + [4] * 31)),
    (encode([256, -256] + [1.875] * 126), encode([256, 256] + [4] * 126)),
    (encode([2.0**-9] * 64 + [448] * 64), encode([448] * 64 + [2.0**-9] * 64)),
]


@pytest.mark.parametrize("pair", CONSTRUCTED, ids=range(len(CONSTRUCTED)))
def test_dot_error_covers_constructed_pairs(pair):
    for q, k in (pair, pair[::-1]):
        error = abs(Fraction(float(dot_scalar(q, k))) - exact_dot(q, k))
        assert error <= dot_error_exact(q.view(np.uint8)) * raised_norm(k)


@given(seed=st.integers(0, 2**32 - 1), families=st.tuples(st.sampled_from(FAMILIES[1:]), st.sampled_from(FAMILIES[1:])))
@settings(max_examples=60, deadline=None)
def test_dot_error_covers_random_pairs(seed, families):
    rng = np.random.default_rng(seed)
    q, k = random_codes(rng, (6, 128), families[0]), random_codes(rng, (6, 128), families[1])
    computed = dots(q, k)
    for i in range(6):
        allowed = dot_error_exact(q[i])
        for j in range(6):
            error = abs(Fraction(float(computed[i, j])) - exact_dot(q[i], k[j]))
            assert error <= allowed * raised_norm(k[j])


def test_a_dot_error_one_seventh_smaller_is_refuted():
    """The constructed pair uses 88 % of the budget: no constant in it has much to give."""
    q, k = CONSTRUCTED[0]
    error = abs(Fraction(float(dot_scalar(q, k))) - exact_dot(q, k))
    budget = dot_error_exact(q.view(np.uint8), sqrt_down) * raised_norm(k)
    assert budget * 6 / 7 < error <= budget


def test_norm_without_raising_is_refuted():
    """Subnormals vote with 2^-6: with the plain key norm the budget would be too small."""
    q = encode([2.0**-9] * 128)
    k = encode([2.0**-9] * 128)
    plain = sqrt_up(exact_dot(k, k))
    raised = raised_norm(k)
    assert raised == 8 * plain
    # The worst unit of such a pair is 2^(-12-13), far above what plain magnitudes suggest.
    unit = Fraction(1, 2 ** (12 + FRACTION_BITS))
    assert max(Fraction(1, 2**9), Fraction(1, 2**9)) ** 2 * Fraction(1, 2**FRACTION_BITS) < unit
    assert dot_error_exact(q.view(np.uint8)) * raised >= unit


def dot_error_interval(codes: np.ndarray) -> tuple[Fraction, Fraction]:
    """``D`` transcribed from the page into interval arithmetic of another library."""
    iv = mpmath.ctx_iv.MPIntervalContext()
    iv.prec = 120
    values = [abs(x) for x in guard.e4m3_float64(codes).tolist()]
    blocks = [values[i : i + 32] for i in range(0, 128, 32)]
    total, square = iv.mpf(0), iv.mpf(0)
    for t, block in enumerate(blocks):
        largest = iv.mpf(max((max(v, 2.0**-6) for v in block if v), default=0.0))
        before = iv.sqrt(square)
        for v in block:
            square += iv.mpf(v) ** 2
        if t == 0:
            total += 31 * largest
        else:
            total += 32 * iv.mpf([max(largest.a, before.a), max(largest.b, before.b)])
        total += iv.sqrt(square)
    total /= 2**13
    return to_fraction(total.a), to_fraction(total.b)


def to_fraction(end) -> Fraction:
    """An interval end as a rational."""
    numerator, denominator = mpmath.libmp.to_rational(end._mpi_[0])
    return Fraction(int(numerator), int(denominator))


@pytest.mark.parametrize("family", FAMILIES[1:])
def test_three_routes_to_the_dot_error_agree(family):
    rng = np.random.default_rng(0)
    for codes in random_codes(rng, (5, 128), family):
        low, high = dot_error_interval(codes)
        down, up = dot_error_exact(codes, sqrt_down), dot_error_exact(codes, sqrt_up)
        assert down <= high
        assert low <= up
        assert high - low <= high * Fraction(1, 2**100)
        assert up - down <= up * Fraction(1, 2**180)
        assert abs(Fraction(float(dot_error(codes))) - up) <= up * Fraction(1, 2**45)


@given(st.fractions(min_value=0), st.integers(-300, 300))
def test_square_roots_enclose(value, shift):
    value *= Fraction(2) ** shift
    low, high = sqrt_down(value), sqrt_up(value)
    assert low * low <= value <= high * high
    assert (high - low) * 2**180 <= high


@given(
    seed=st.integers(0, 2**32 - 1),
    kept=st.integers(0, 19),
    form=st.integers(0, 3),
    weights=st.sampled_from(["normal", "positive", "negative", "huge", "tiny"]),
    family=st.sampled_from(["correlated", *FAMILIES[1:]]),
)
@settings(max_examples=30, deadline=None)
def test_float64_budget_lies_on_the_exact_one(seed, kept, form, weights, family):
    rng = np.random.default_rng(seed)
    q = make_problem(seed=seed % 1000, rows=1, keys=1, heads=12).q[0]
    if family != "correlated":
        q = random_codes(rng, (12, 128), family)
    w = rng.standard_normal(12)
    w = {"positive": abs(w), "negative": -abs(w), "huge": w * 2.0**90, "tiny": w * 2.0**-140}.get(weights, w)
    w = w.astype(np.float32)
    bound = some_form(q, w, kept, form)
    arguments = (q, w, bound.columns, bound.coefficients, bound.linear, bound.certificate)
    lower, upper = guard_enclosure(*arguments)
    terms = guard_terms(*arguments)
    # What the float64 term pays for, as an absolute amount.
    paid = Fraction(terms.float64)
    for name in TERMS:
        low, high = getattr(lower, name), getattr(upper, name)
        assert low <= high
        assert low - paid <= Fraction(getattr(terms, name)) <= high + paid
    assert abs(Fraction(terms.total()) - upper.total()) <= 2 * paid + upper.total() / 2**50
    if np.isfinite(terms.slack()):
        assert Fraction(float(terms.slack())) >= upper.total()


def test_slack_is_rounded_up_and_keeps_non_finite_sums():
    zero = dict.fromkeys(GuardTerms.__slots__, 0.0)
    terms = GuardTerms(**{**zero, "residual": 1.0, "floor": 2.0**-30})
    assert float(terms.slack()) == 1 + 2.0**-20 + 2.0**-23
    assert np.isposinf(GuardTerms(**{**zero, "residual": math.inf}).slack())
    assert np.isnan(GuardTerms(**{**zero, "residual": math.nan}).slack())
    assert np.isposinf(GuardTerms(**{**zero, "residual": 1e39}).slack())


def test_lattices_are_exact():
    values = np.array([[0.1, -3.0], [2.0**-1074, 1e300]])
    lattice = guard.float_lattice(values)
    assert lattice.fractions() == [[Fraction(x) for x in row] for row in values.tolist()]
    codes = np.arange(0x7F, dtype=np.uint8)
    assert guard.e4m3_lattice(codes).fractions() == [Fraction(x) for x in guard.e4m3_float64(codes).tolist()]
    assert guard.float_lattice(np.zeros((0, 3))).values.shape == (0, 3)


# ---------------------------------------------------------------------------------------------------------------------
# The joint error of several dots


def harm(codes: np.ndarray, factors: np.ndarray, upward: np.ndarray, k: np.ndarray) -> Fraction:
    """What the computed dots of vectors with one key err the wrong way, weighted."""
    errors = [Fraction(float(dot_scalar(q.view(np.uint8), k))) - exact_dot(q, k) for q in codes]
    wrong = [max(e if up else -e, Fraction(0)) for e, up in zip(errors, upward)]
    return sum((Fraction(f) * e for f, e in zip(factors.tolist(), wrong)), Fraction(0))


@given(
    seed=st.integers(0, 2**32 - 1),
    families=st.tuples(st.sampled_from(FAMILIES[1:]), st.sampled_from(FAMILIES[1:])),
    direction=st.sampled_from(["up", "down", "mixed"]),
)
@settings(max_examples=40, deadline=None)
def test_joint_error_covers_random_vectors(seed, families, direction):
    rng = np.random.default_rng(seed)
    q, k = random_codes(rng, (5, 128), families[0]), random_codes(rng, (4, 128), families[1])
    factors = rng.random(5)
    upward = {"up": np.ones(5, bool), "down": np.zeros(5, bool), "mixed": rng.random(5) < 0.5}[direction]
    joint = guard.joint_error_exact(q, [Fraction(f) for f in factors.tolist()], upward.tolist())
    assert abs(Fraction(guard.joint_error(q, factors, upward)) - joint) <= joint / 2**45
    for key in k:
        assert harm(q, factors, upward, key) <= joint * raised_norm(key)


@pytest.mark.parametrize("pair", CONSTRUCTED, ids=range(len(CONSTRUCTED)))
@pytest.mark.parametrize("sign", [1, -1])
def test_joint_error_covers_constructed_pairs_of_either_sign(pair, sign):
    q, k = pair
    values = guard.e4m3_float64(q)
    both = encode(np.stack([values, sign * values]))
    for upward in ([True, True], [True, False], [False, False]):
        joint = guard.joint_error_exact(both.view(np.uint8), [Fraction(1), Fraction(1)], upward)
        assert harm(both, np.ones(2), np.array(upward), k.view(np.uint8)) <= joint * raised_norm(k)


def test_opposite_signs_cannot_both_do_harm():
    """One vector up and down at once: half of each error counts, and a key that loses all of one shows it is needed."""
    q, k = CONSTRUCTED[0]
    twice = encode(np.stack([guard.e4m3_float64(q)] * 2)).view(np.uint8)
    one = [Fraction(1), Fraction(1)]
    same, opposite = (guard.joint_error_exact(twice, one, upward) for upward in ([False, False], [True, False]))
    assert Fraction(50, 100) * same < opposite < Fraction(56, 100) * same
    lost = harm(twice[:1], np.ones(1), np.array([False]), k.view(np.uint8))
    assert Fraction(80, 100) * opposite * raised_norm(k) < lost <= opposite * raised_norm(k)


def test_the_guard_takes_the_smaller_of_both_errors():
    x = encode([[0] * 128, [4] * 128])
    # A negative head and the linear column, which is its opposite: of each element one of the two counts.
    pair = form_bound(x, np.array([1, -1], np.float32), [0], [], [1])
    codes = np.concatenate([x.view(np.uint8)[1:], pair.columns.view(np.uint8)[-1:]])
    factors, upward = np.array([1.0, float(pair.coefficients[-1])]), np.array([False, False])
    assert pair.terms.dots == pytest.approx(guard.joint_error(codes, factors, upward), rel=1e-12)
    assert pair.terms.dots < 0.6 * float(factors @ dot_error(codes))
    # One omitted head alone: the largest of its 33 terms loses nothing, which the joint error does not see.
    alone = form_bound(x, np.array([1, 1], np.float32), [0], [], None)
    assert alone.terms.dots == pytest.approx(float(dot_error(x[1])), rel=1e-12)
    assert alone.terms.dots < guard.joint_error(x[1:].view(np.uint8), np.ones(1), np.array([True]))
