"""The bound: at least the computed score on random, adversarial and constructed inputs; the judge of any bound."""

from __future__ import annotations

import dataclasses
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dosa_ref.bound import (
    Coverage,
    RowBound,
    build_row_bound,
    check_row_bound,
    evaluate,
    evaluate_exact,
    exact_form,
    key_norms,
    row_is_finite,
    row_within_magnitude,
)
from dosa_ref.guard import BoundCertificate, e4m3_float64, magnitude
from dosa_ref.scorer import score_scalar_exact, score_scalar_sm90, scores_sm90
from dosa_ref.spec import BOUND_CHAIN_ULPS, FLOAT32_UNIT, InvalidProblem
from dosa_ref.tensorcore import dot_scalar
from tests.ref.conftest import FAMILIES, FP8, encode, form_bound, make_problem, random_codes, some_form


def judge(q: np.ndarray, w: np.ndarray, bound: RowBound, **changes):
    fields = {
        "columns": bound.columns,
        "coefficients": bound.coefficients,
        "linear": bound.linear,
        "slack": bound.slack,
    }
    return check_row_bound(q, w, **{**fields, "certificate": bound.certificate, **changes})


# ---------------------------------------------------------------------------------------------------------------------
# Key norms


def test_key_norms_are_the_smallest_float32_above():
    rng = np.random.default_rng(0)
    for family in FAMILIES[1:]:
        k = random_codes(rng, (30, 128), family)
        for norm, key in zip(key_norms(k, np.ones(30, np.float32)), e4m3_float64(k).tolist()):
            square = sum((max(abs(Fraction(x)), Fraction(1, 64)) ** 2 for x in key if x), Fraction(0))
            assert Fraction(float(norm)) ** 2 >= square
            below = Fraction(float(np.nextafter(norm, np.float32(0))))
            assert norm == 0 or below**2 < square


def test_key_norms_mark_keys_that_always_survive():
    k = np.tile(encode(np.ones(128)), (8, 1))
    k.view(np.uint8)[0, 5] = 0xFF
    k_scale = np.array([1, np.nan, 0, -1, 2.0**-41, 2.0**41, 2.0**-40, 2.0**40], np.float32)
    assert np.isinf(key_norms(k, k_scale)).tolist() == [True] * 6 + [False] * 2
    assert key_norms(np.zeros((1, 128), FP8), np.ones(1, np.float32))[0] == 0
    assert key_norms(np.full((1, 128), 0x80, np.uint8), np.ones(1, np.float32))[0] == 0


# ---------------------------------------------------------------------------------------------------------------------
# Random and adversarial inputs


def assert_sound(q: np.ndarray, w: np.ndarray, bound: RowBound, k: np.ndarray, k_scale: np.ndarray) -> np.ndarray:
    """U - score of each key, checked to be >= 0."""
    u = evaluate(bound, k, k_scale).astype(np.float64)
    score = scores_sm90(q[None], w[None], k, k_scale)[0].astype(np.float64)
    assert not (u < score).any()
    return u - score


@given(
    seed=st.integers(0, 2**32 - 1),
    heads=st.sampled_from([3, 12, 32]),
    columns=st.integers(1, 20),
    sampled=st.sampled_from(["keys", "other", "none"]),
    families=st.tuples(st.sampled_from(["correlated", *FAMILIES[1:]]), st.sampled_from(["correlated", *FAMILIES[1:]])),
    weights=st.sampled_from(["normal", "positive", "negative", "sparse", "tiny", "large", "wide"]),
)
@settings(max_examples=50, deadline=None)
def test_bound_covers_random_inputs(seed, heads, columns, sampled, families, weights):
    rng = np.random.default_rng(seed)
    problem = make_problem(seed=seed % 1000, rows=1, keys=64, heads=heads)
    q = problem.q[0] if families[0] == "correlated" else random_codes(rng, (heads, 128), families[0]).view(FP8)
    k = problem.k if families[1] == "correlated" else random_codes(rng, (64, 128), families[1]).view(FP8)
    w = rng.standard_normal(heads)
    w = {
        "positive": abs(w),
        "negative": -abs(w),
        "sparse": w * (rng.random(heads) < 0.3),
        "tiny": w * 2.0**-147,
        "large": w * 2.0**40,
        "wide": w * np.exp2(rng.integers(-30, 30, heads)),
    }.get(weights, w)
    w = w.astype(np.float32)
    k_scale = np.exp2(rng.integers(-40, 41, 64)).astype(np.float32)
    sample = {"keys": k[:9], "other": random_codes(rng, (4, 128), "all_patterns"), "none": None}[sampled]
    bound = build_row_bound(q, w, columns, sample)
    assert len(bound.coefficients) <= columns
    if row_within_magnitude(q, w, bound):
        assert_sound(q, w, bound, k, k_scale)
        assert judge(q, w, bound).coverage is Coverage.COVERED


def test_evaluate_is_the_formula():
    """Every column and the slack, term by term in rationals; only float32 rounding may separate the two."""
    problem = make_problem(seed=6, rows=1, keys=20, heads=16)
    bound = build_row_bound(problem.q[0], problem.weights[0], 6)
    assert bound.linear.tolist() == [False] * 5 + [True]
    norms = key_norms(problem.k, problem.k_scale)
    negative = 0
    for key, scale, norm, u in zip(problem.k, problem.k_scale, norms, evaluate(bound, problem.k, problem.k_scale)):
        terms = [Fraction(float(bound.slack)) * Fraction(float(norm))]
        for y, c, is_linear in zip(bound.columns, bound.coefficients, bound.linear):
            dot = Fraction(float(dot_scalar(y, key)))
            negative += is_linear and dot < 0
            terms.append(Fraction(float(c)) * (dot if is_linear else max(dot, Fraction(0))))
        exact, absolute = sum(terms) * Fraction(float(scale)), sum(map(abs, terms)) * Fraction(float(scale))
        assert abs(Fraction(float(u)) - exact) <= BOUND_CHAIN_ULPS * FLOAT32_UNIT * absolute
    assert negative


def adversarial_keys(q: np.ndarray, w: np.ndarray, bound: RowBound, rng: np.random.Generator) -> np.ndarray:
    """Keys along every direction that the slack pays for, at sizes from subnormal to largest, and mixtures of them."""
    x, y = e4m3_float64(q), e4m3_float64(bound.columns)
    c, certificate = bound.coefficients.astype(np.float64), bound.certificate
    omitted = (w > 0) & ~np.isin(np.arange(len(w)), certificate.retained)
    residuals = np.where(omitted[:, None], w[:, None] * (x - certificate.projection @ y), 0)
    vectors = certificate.aggregate @ x
    vectors[bound.linear] = residuals.sum(axis=0) / 2 - vectors[bound.linear]
    rounding = vectors - np.where(bound.linear, c, np.abs(c))[:, None] * y
    gram = residuals @ residuals.T
    _, vectors = np.linalg.eigh(residuals.T @ residuals)
    directions = [
        *residuals,
        residuals.sum(0),
        *rounding,
        *-rounding,
        *x,
        *-x,
        *vectors[:, -3:].T,
        gram.sum(0) @ residuals,
    ]
    directions = [d / np.abs(d).max() for d in directions if np.abs(d).max() > 0]
    directions += [
        sum(rng.standard_normal() * directions[i] for i in rng.integers(0, len(directions), 3)) for _ in range(60)
    ]
    keys = [d / max(np.abs(d).max(), 1e-9) * size for d in directions for size in (448.0, 1.0, 2.0**-7)]
    return encode(np.array(keys))


def test_bound_covers_adversarial_keys():
    """The keys come close: they use far more of the slack than random ones, and still do not pass it."""
    used = {"random": 0.0, "adversarial": 0.0}
    for seed in range(12):
        rng = np.random.default_rng(seed)
        heads = (4, 8, 32)[seed % 3]
        problem = make_problem(seed=seed, rows=1, keys=200, heads=heads, rank=12)
        q, w = problem.q[0], problem.weights[0]
        bound = some_form(q, w, heads // 3, seed // 3)
        for kind, k in [("random", problem.k), ("adversarial", adversarial_keys(q, w, bound, rng))]:
            scale = np.ones(len(k), np.float32)
            gap = assert_sound(q, w, bound, k, scale)
            norm = key_norms(k, scale).astype(np.float64) * float(bound.slack)
            used[kind] = max(used[kind], float((1 - gap[norm > 0] / norm[norm > 0]).max()))
    assert used["adversarial"] > 0.9
    assert used["adversarial"] > used["random"]


@given(seed=st.integers(0, 2**32 - 1), kept=st.integers(0, 11), form=st.integers(0, 3))
@settings(max_examples=12, deadline=None)
def test_exact_form_covers_the_exact_score(seed, kept, form):
    rng = np.random.default_rng(seed)
    problem = make_problem(seed=seed % 1000, rows=1, keys=6, heads=12)
    q, w = problem.q[0], problem.weights[0]
    bound = some_form(q, w, kept, form)
    exact = exact_form(q, w, bound.columns, bound.linear, bound.certificate)
    keys = np.concatenate([problem.k, adversarial_keys(q, w, bound, rng)[::17]])
    for key in keys:
        u = evaluate_exact(exact, key, 0.5)
        assert u >= score_scalar_exact(q, w, key, 0.5)


def test_all_heads_retained_is_the_score():
    problem = make_problem(seed=1, rows=1, keys=50, heads=32)
    q, w = problem.q[0], problem.weights[0]
    bound = build_row_bound(q, w, 32)
    gap = assert_sound(q, w, bound, problem.k, problem.k_scale)
    score = scores_sm90(q[None], np.abs(w)[None], problem.k, problem.k_scale)[0]
    assert gap.max() <= 1e-3 * score.max()
    assert bound.terms.residual == bound.terms.dots == bound.terms.column_rounding == 0
    exact = exact_form(q, w, bound.columns, bound.linear, bound.certificate)
    assert evaluate_exact(exact, problem.k[3], 1.0) == score_scalar_exact(q, w, problem.k[3], 1.0)


# ---------------------------------------------------------------------------------------------------------------------
# Each mechanism that the guard pays for, alone: without its terms the bound is broken, with them it holds


def head(first: float, others: float) -> np.ndarray:
    return np.array([first] + [others] * 127)


ZERO = np.zeros(128)
AXIS = np.eye(128)

# q, w, key, retained heads, heads of the relu and of the linear column, and the terms whose absence must show. Products
# of 5 with 1.25 lie just below the unit of a step that holds 256 * 256, products of 5 with 1.875 just above it.
LOSSY_HEADS = [ZERO, head(256, 1.25), head(128, 0.625)]
LOSSY_SUM = [ZERO, head(384, -1.875), ZERO]
MECHANISMS = {
    "residual": ([AXIS[0] * 2, AXIS[1]], [1, 1], AXIS[1], [0], [], None, {"residual"}),
    "centred_residual": ([AXIS[0] * 4, AXIS[1], AXIS[2]], [1, 1, 1], AXIS[1], [0], [], [], {"residual"}),
    "omitted_dot": ([head(384, -1.875), head(256, -1.25)], [1, 1], head(256, 5), [0], [], None, {"dots"}),
    "projected_dot": ([head(256, 1.25), head(384, 1.875)], [2, 1], head(256, 5), [0], [], None, {"dots"}),
    "aggregated_dot": (LOSSY_HEADS, [1, -1, -1], head(256, 5), [0], [1, 2], None, {"dots"}),
    "linear_negative_dot": (LOSSY_HEADS, [1, -1, -1], head(256, 5), [0], [], [1, 2], {"dots"}),
    "column_dot": (LOSSY_SUM, [1, -2 / 3, -1], head(256, 5), [0], [1, 2], None, {"dots"}),
    "linear_column_dot": (LOSSY_SUM, [1, -2 / 3, -1], head(256, 5), [0], [], [1, 2], {"dots"}),
    "column_rounding": ([ZERO, np.ones(128)], [1, -0.73], np.ones(128), [0], [1], None, {"column_rounding"}),
    "linear_negative_rounding": ([ZERO, np.ones(128)], [1, -0.73], np.ones(128), [0], [], [1], {"residual"}),
    "linear_column_rounding": (
        [AXIS[0] * 4, AXIS[1] + AXIS[2] * 1.625, AXIS[1] + AXIS[2] * 1.625],
        [1, 1.0, 0.21],
        AXIS[2],
        [0],
        [],
        [],
        {"residual"},
    ),
}


@pytest.mark.parametrize("name", MECHANISMS)
def test_each_mechanism_breaks_a_bound_without_its_terms(name):
    vectors, weights, key, retained, relu, linear, needed = MECHANISMS[name]
    q, w, k = encode(vectors), np.array(weights, np.float32), encode(key)
    bound = form_bound(q, w, retained, relu, linear)
    score = score_scalar_sm90(q, w, k, 1.0)
    assert evaluate(bound, k[None], np.ones(1, np.float32))[0] >= score
    planted = dataclasses.replace(bound.terms, **dict.fromkeys(needed, 0.0))
    broken = dataclasses.replace(bound, slack=planted.slack())
    assert evaluate(broken, k[None], np.ones(1, np.float32))[0] < score
    # Every needed term has something in it, and the judge sees the planted slack for what it is.
    assert all(getattr(bound.terms, term) > 0 for term in needed)
    assert judge(q, w, broken).coverage is Coverage.SLACK_TOO_SMALL
    assert judge(q, w, bound).coverage is Coverage.COVERED


def test_float32_chains_need_their_terms():
    """All heads retained: only roundings separate U from the score, and without slack they show on both sides."""
    problem = make_problem(seed=2, rows=1, keys=300, heads=32)
    q, w = problem.q[0], problem.weights[0]
    bound = build_row_bound(q, w, 32)
    score = scores_sm90(q[None], w[None], problem.k, problem.k_scale)[0]
    bare = evaluate(dataclasses.replace(bound, slack=np.float32(0)), problem.k, problem.k_scale)
    assert (bare < score).any()
    assert (bare > score).any()
    assert_sound(q, w, bound, problem.k, problem.k_scale)


def test_underflow_needs_the_floor():
    """Two products of half a subnormal unit: fused they carry, alone they vanish."""
    q = np.zeros((32, 128), FP8)
    q[8, 0], q[0, 0] = 1, 0.5
    w = np.zeros(32, np.float32)
    w[[0, 8]] = 2.0**-149
    k = encode(AXIS[0])
    bound = build_row_bound(q, w, 2)
    score = score_scalar_sm90(q, w, k, 1.0)
    assert float(score) == 2.0**-148
    bare = dataclasses.replace(bound, slack=np.float32(0))
    assert float(evaluate(bare, k[None], np.ones(1, np.float32))[0]) == 2.0**-149
    assert evaluate(bound, k[None], np.ones(1, np.float32))[0] >= score


# ---------------------------------------------------------------------------------------------------------------------
# Choosing


def test_budget_goes_to_positive_heads_then_to_negative_ones():
    q = encode(AXIS[:8] * np.arange(1, 9)[:, None])
    w = np.array([1, 2, 3, 4, -1, -2, -3, -4], np.float32)
    full = build_row_bound(q, w, 8)
    assert full.certificate.retained.tolist() == [3, 2, 1, 0, 7, 6, 5, 4]
    assert not full.linear.any()
    # Without a sample every head is active on all keys: a negative head loses nothing but dot errors when it is linear.
    seven = build_row_bound(q, w, 7)
    assert seven.certificate.retained.tolist() == [3, 2, 1, 0, 7, 6, -1]
    assert seven.linear.tolist() == [False] * 6 + [True]
    assert seven.certificate.aggregate[-1].tolist() == [0, 0, 0, 0, 1, 2, 0, 0]
    three = build_row_bound(q, w, 3)
    assert three.certificate.retained.tolist() == [3, 2, -1]
    assert three.certificate.aggregate[-1].tolist() == [0, 0, 0, 0, 1, 2, 3, 4]
    assert build_row_bound(q, w, 1).certificate.retained.tolist() == [-1]
    assert not build_row_bound(q, np.abs(w), 8).linear.any()


def test_the_sample_decides_between_heads():
    q = encode(AXIS[:8] * np.arange(1, 9)[:, None])
    w = np.array([1, 2, 3, 4, -1, -2, -3, -4], np.float32)
    # Keys on which head 7 changes sign, head 6 is negative, head 5 positive and head 4 nearly idle.
    keys = encode([[0, 0, 0, 0.5, 0.1, 8, -8, sign * 16, *[0] * 120] for sign in (1, -1)])
    for columns, retained in [(2, [7, -1]), (3, [3, 7, -1]), (4, [3, 2, 7, -1])]:
        certificate = build_row_bound(q, w, columns, keys).certificate
        assert certificate.retained.tolist() == retained
        assert certificate.aggregate[-1].tolist() == [0, 0, 0, 0, 1, 2, 0, 0]


def test_pivots_skip_what_retained_heads_already_span():
    # The second strongest head is twice the strongest one's direction; the third points elsewhere.
    q = encode([AXIS[0] * 8, AXIS[0] * 7, AXIS[1] * 2, AXIS[2]])
    assert build_row_bound(q, np.ones(4, np.float32), 3).certificate.retained.tolist() == [0, 2, -1]


def test_the_price_shortens_multipliers():
    q = encode([AXIS[0] * 8, AXIS[0] * 4 + AXIS[1], AXIS[2]])
    w = np.ones(3, np.float32)
    free = build_row_bound(q, w, 2)
    assert free.certificate.retained.tolist() == [0, -1]
    # scipy's float64 least squares; the certificate is judged exactly elsewhere, whatever its last bits.
    np.testing.assert_allclose(free.certificate.projection[1, 0], 0.5)
    # Mean |x| per key norm is 4 for half of the keys along the head: p = 4 sqrt(17) / 2, and 0.5 - p / 64 is left.
    priced = build_row_bound(q, w, 2, encode([AXIS[0], AXIS[5]]))
    assert priced.certificate.retained.tolist() == [0, -1]
    np.testing.assert_allclose(priced.certificate.projection[1, 0], 0.5 - np.sqrt(17) * 2 / 64)


def test_rows_without_anything_to_bound():
    q = encode(np.ones((4, 128)))
    bound = build_row_bound(q, np.zeros(4, np.float32), 3)
    assert bound.coefficients.tolist() == [0]
    assert evaluate(bound, q, np.ones(4, np.float32)).min() >= 0
    weightless = np.zeros(4, np.float32)
    assert judge(q, weightless, bound).coverage is Coverage.COVERED
    # Nothing but the floor is asked for, and exactly the floor is enough.
    assert judge(q, weightless, bound, slack=2.0**-70).coverage is Coverage.COVERED
    assert judge(q, weightless, bound, slack=np.nextafter(2.0**-70, 0)).coverage is Coverage.SLACK_TOO_SMALL
    silent, negative = encode(np.zeros((4, 128))), np.full(4, -1, np.float32)
    bound = build_row_bound(silent, negative, 2)
    assert bound.certificate.retained.tolist() == [0, -1]
    assert not bound.columns.astype(np.float32).any()
    assert judge(silent, negative, bound).coverage is Coverage.COVERED


@pytest.mark.parametrize("columns", [0, 65])
def test_column_budget_is_checked(columns):
    with pytest.raises(InvalidProblem, match="max_columns"):
        build_row_bound(encode(np.ones((4, 128))), np.ones(4, np.float32), columns)


def test_non_finite_rows_are_refused():
    q, w = encode(np.ones((4, 128))), np.ones(4, np.float32)
    broken = q.copy()
    broken.view(np.uint8)[2, 7] = 0x7F
    for bad_q, bad_w in [
        (broken, w),
        (q, np.array([1, np.nan, 1, 1], np.float32)),
        (q, np.full(4, np.inf, np.float32)),
    ]:
        assert not row_is_finite(bad_q, bad_w)
        with pytest.raises(InvalidProblem, match="dense"):
            build_row_bound(bad_q, bad_w, 2)


@pytest.mark.parametrize("weight", [3e38, 2.0**50])
def test_huge_rows_are_outside_the_premises(weight):
    problem = make_problem(seed=3, rows=1, keys=4, heads=12)
    w = np.float32(weight) * np.sign(problem.weights[0])
    for columns in (3, 12):
        bound = build_row_bound(problem.q[0], w, columns)
        assert not row_within_magnitude(problem.q[0], w, bound)
    if weight < 1e38:
        assert judge(problem.q[0], w, bound).coverage is Coverage.ROW_MAGNITUDE


def test_columns_count_in_the_row_magnitude():
    """Heads alone below 2^60, heads and columns together above."""
    problem = make_problem(seed=3, rows=1, keys=4, heads=12)
    q, w = problem.q[0], problem.weights[0].astype(np.float64)
    for share, inside in [(0.45, True), (0.55, False)]:
        scaled = (w * share * 2.0**60 / (np.abs(w) * magnitude(q)).sum()).astype(np.float32)
        bound = build_row_bound(q, scaled, 12)
        assert row_within_magnitude(q, scaled, bound) is inside
        assert judge(q, scaled, bound).coverage is (Coverage.COVERED if inside else Coverage.ROW_MAGNITUDE)


# ---------------------------------------------------------------------------------------------------------------------
# Judging


@pytest.fixture(scope="module")
def row() -> tuple[np.ndarray, np.ndarray, RowBound]:
    problem = make_problem(seed=4, rows=1, keys=1, heads=16)
    q, w = problem.q[0], problem.weights[0]
    positive, negative = np.flatnonzero(w > 0).tolist(), np.flatnonzero(w < 0).tolist()
    bound = form_bound(q, w, positive[:4], negative[::2], negative[1::2])
    assert bound.certificate.projection.any()
    assert bound.certificate.aggregate.any(axis=1).tolist() == [False] * 4 + [True, True]
    return q, w, bound


def test_slack_is_judged_to_the_last_bit(row):
    q, w, bound = row
    required = judge(q, w, bound).required_slack
    tight = np.float32(float(required))
    if Fraction(float(tight)) < required:
        tight = np.nextafter(tight, np.float32(np.inf))
    assert judge(q, w, bound, slack=tight).coverage is Coverage.COVERED
    below = judge(q, w, bound, slack=np.nextafter(tight, np.float32(0)))
    assert below.coverage is Coverage.SLACK_TOO_SMALL
    assert below.required_slack == required
    assert set(below.evidence["terms"]) == {name for name in bound.terms.__slots__ if name != "float64"}


def test_a_coefficient_that_is_too_small_must_be_paid_for(row):
    q, w, bound = row
    coefficients = bound.coefficients.copy()
    coefficients[0] -= np.float32(0.25)
    verdict = judge(q, w, bound, coefficients=coefficients)
    assert verdict.coverage is Coverage.SLACK_TOO_SMALL
    assert float(verdict.evidence["coefficient_deficit"]) > 0.2
    assert judge(
        q, w, bound, coefficients=coefficients, slack=np.float32(float(verdict.required_slack) * 1.01)
    ).coverage is (Coverage.COVERED)


def changed(array: np.ndarray, index, value) -> np.ndarray:
    copy = array.copy()
    copy[index] = value
    return copy


def test_certificates_out_of_range_are_named(row):
    q, w, bound = row
    c = bound.certificate
    kept = int((c.retained >= 0).sum())
    linear, aggregate = int(np.flatnonzero(bound.linear)[0]), int(np.flatnonzero(c.aggregate.any(axis=1))[0])
    omitted = int(np.flatnonzero(c.projection.any(axis=1))[0])
    in_aggregate = int(np.flatnonzero(c.aggregate[aggregate])[0])
    positive = int(np.flatnonzero(w > 0)[0])

    def certificate(**fields) -> dict:
        return {"certificate": dataclasses.replace(c, **fields)}

    wrong_column = bound.columns.copy()
    wrong_column.view(np.uint8)[0, 0] ^= 1
    nan_column = bound.columns.copy()
    nan_column.view(np.uint8)[linear, 0] = 0x7F
    cases = {
        "NaN": {"slack": np.float32(np.nan)},
        "Inf": {"coefficients": changed(bound.coefficients, 0, np.inf)},
        "its columns": {"columns": nan_column},
        "distinct": certificate(retained=changed(c.retained, 1, c.retained[0])),
        "head numbers": certificate(retained=changed(c.retained, 0, len(w))),
        "or -1": certificate(retained=changed(c.retained, 0, -2)),
        "not its head's query": {"columns": wrong_column},
        "at most one linear": {"linear": changed(bound.linear, aggregate, True)},
        "not a retained one": {"linear": changed(changed(bound.linear, linear, False), 0, True)},
        "projection must be >= 0": certificate(projection=changed(c.projection, (omitted, 0), -1e-9)),
        "of omitted positive heads": certificate(projection=changed(c.projection, (in_aggregate, 0), 0.5)),
        "on retained columns": certificate(projection=changed(c.projection, (omitted, kept), 0.5)),
        "aggregate must be >= 0": certificate(aggregate=changed(c.aggregate, (aggregate, in_aggregate), -1e-9)),
        "of negative heads": certificate(aggregate=changed(c.aggregate, (aggregate, positive), 1e-9)),
        "in synthetic columns": certificate(aggregate=changed(c.aggregate, (0, in_aggregate), 1e-9)),
        "exceeds |w|": certificate(aggregate=changed(c.aggregate, (linear, in_aggregate), 1e-9)),
        "exceeds": certificate(
            aggregate=changed(c.aggregate, (aggregate, in_aggregate), np.nextafter(-np.float64(w[in_aggregate]), 9e9))
        ),
        "must not be positive": {"coefficients": changed(bound.coefficients, aggregate, 0.5)},
    }
    for words, change in cases.items():
        verdict = judge(q, w, bound, **change)
        assert verdict.coverage is Coverage.BAD_CERTIFICATE, words
        assert words in verdict.evidence["reason"], words
        assert verdict.required_slack is None


def test_any_multipliers_are_sound_and_judged(row):
    """Another projection and a partial aggregate: worse, still sound once the slack is what the judge asks for."""
    q, w, bound = row
    rng = np.random.default_rng(0)
    certificate = BoundCertificate(
        retained=bound.certificate.retained,
        projection=bound.certificate.projection * rng.random(bound.certificate.projection.shape),
        aggregate=bound.certificate.aggregate * rng.random(bound.certificate.aggregate.shape),
    )
    coefficients = np.where(bound.certificate.retained >= 0, bound.coefficients, bound.coefficients * np.float32(0.5))
    needed = judge(q, w, bound, certificate=certificate, coefficients=coefficients).required_slack
    other = dataclasses.replace(
        bound, certificate=certificate, coefficients=coefficients, slack=np.float32(float(needed) * (1 + 2.0**-20))
    )
    assert judge(q, w, other).coverage is Coverage.COVERED
    assert other.slack > bound.slack
    k = np.concatenate([adversarial_keys(q, w, other, rng), make_problem(seed=9, keys=100).k])
    assert_sound(q, w, other, k, np.ones(len(k), np.float32))


@pytest.mark.parametrize("field", ["columns", "coefficients", "linear"])
def test_shapes_that_do_not_fit(row, field):
    q, w, bound = row
    with pytest.raises(InvalidProblem):
        judge(q, w, bound, **{field: getattr(bound, field)[:-1]})
