"""Counterexamples of mutants, replayed through ``dosa_ref``: the code does as the lemma says."""

from __future__ import annotations

import dataclasses
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

from dosa_ref import spec
from dosa_ref.bound import Coverage, check_row_bound, evaluate, key_norms
from dosa_ref.formats import ceil_ue8m0, decode_e4m3, encode_e4m3_array, round_up_float32
from dosa_ref.guard import BoundCertificate, e4m3_float64, guard_enclosure
from dosa_ref.problem import PrefillProblem
from dosa_ref.select import exact_topk, select_dense, select_prefill
from dosa_ref.spec import Mode
from dosa_ref.tensorcore import dot_scalar
from proofs import ledger
from tests.ref.conftest import some_form

LEDGER = ledger.read()["lemmas"]


def counterexample(lemma_id: str, mutant_id: str) -> dict[str, str]:
    """The recorded counterexample of a mutant."""
    (model,) = [m["counterexample"] for m in LEDGER[lemma_id]["mutants"] if m["id"] == mutant_id]
    return model


def float32(text: str) -> np.float32:
    return np.uint32(int(text.removeprefix("#x"), 16)).view(np.float32)


def integer(text: str) -> int:
    return int(text.removeprefix("#x"), 16)


def encode(values: list[float]) -> np.ndarray:
    return encode_e4m3_array(np.array(values, np.float32))


def dot_and_sum(q: list[float], k: list[float]) -> tuple[Fraction, Fraction]:
    """The computed dot and the real one of two lists of at most 128 E4M3 values."""
    q_codes, k_codes = (encode(values + [0.0] * (128 - len(values))) for values in (q, k))
    exact = sum(Fraction(x) * Fraction(y) for x, y in zip(q, k, strict=True))
    return Fraction(float(dot_scalar(q_codes, k_codes))), exact


# ---------------------------------------------------------------------------------------------------------------------
# The tensor core


@pytest.mark.parametrize(("shift", "lossless"), [(7, True), (8, False)])
def test_a_product_loses_a_bit_at_shift_eight(shift, lossless):
    # step_alignment, mutant shift_8: a product with all 8 bits in use, 15 * 15, that far below the largest exponent.
    assert integer(counterexample("step_alignment", "shift_8")["shift"]) == 8
    computed, exact = dot_and_sum([1.0, 1.875 * 2.0 ** -(shift // 2)], [1.0, 1.875 * 2.0 ** (shift // 2 - shift)])
    # The sum is cut to 13 bits as well; at shift 7 it has exactly 13.
    assert (computed == exact) == lossless


def test_thirty_one_terms_lose_more_than_thirty_units():
    # step_sum, mutant first_30: 14 * 9 / 64, 14 places below the largest exponent, loses 126/128 of a unit.
    assert "first" in counterexample("step_sum", "first_30")
    computed, exact = dot_and_sum([128.0] + [1.75] * 31, [128.0] + [1.125] * 31)
    unit = Fraction(2) ** (14 - spec.FRACTION_BITS)
    assert 30 * unit < exact - computed <= spec.FIRST_STEP_LOSSY * unit


def test_subnormals_align_with_the_smallest_normal_exponent():
    # exponent_vote, mutant plain_magnitude: with the subnormal's own exponent, -9, no bit of the sum would be lost.
    model = counterexample("exponent_vote", "plain_magnitude")
    assert min(abs(decode_e4m3(integer(model[name]))) for name in ("a", "b")) < spec.E4M3_MIN_NORMAL
    subnormal, other = 2.0**-9, 1.875 * 2.0**-3
    computed, exact = dot_and_sum([subnormal, other], [448.0, other])
    own_unit = Fraction(2) ** (-9 + 8 - spec.FRACTION_BITS)
    assert (exact / own_unit).denominator == 1
    assert computed < exact
    key = np.zeros((1, 128), np.uint8)
    key[0, 0] = 1
    assert key_norms(key, np.ones(1, np.float32))[0] == float(spec.E4M3_MIN_NORMAL)


# ---------------------------------------------------------------------------------------------------------------------
# Rounding and formats


def test_rounding_to_nearest_can_fall_below():
    model = counterexample("round_up_float32", "nearest")
    value = float(np.uint64(integer(model["x"])).view(np.float64))
    assert float(np.float32(value)) < value <= float(round_up_float32(Fraction(value)))
    assert (
        round_up_float32(1 + Fraction(1, 2**40))
        == np.nextafter(np.float32(1), np.float32(2))
        > np.float32(1 + 2.0**-40)
    )


def test_sixteen_units_are_too_many_for_the_outward_factor():
    significand = integer(counterexample("outward_rounding", "units_16")["significand"])
    x = np.float32(significand)
    grown = Fraction(float(x * np.float32(1 + 2.0**spec.OUTWARD_LOG2)))
    assert significand * (1 + 15 * spec.FLOAT32_UNIT) <= grown < significand * (1 + 16 * spec.FLOAT32_UNIT)


def test_ties_go_to_the_even_code():
    value = float32(counterexample("e4m3_nearest", "ties_away")["value"])
    (code,) = encode_e4m3_array(np.array([value])).view(np.uint8)
    others = [c for c in range(0x7F) if c != code]
    distance = {c: abs(decode_e4m3(c) - Fraction(float(value))) for c in (*others, int(code))}
    assert all(distance[code] <= distance[c] for c in others)
    assert all(code % 2 == 0 for c in others if distance[c] == distance[code])


def test_a_scale_is_rounded_up():
    value = float32(counterexample("ue8m0_ceil", "floor")["value"])
    (code,) = ceil_ue8m0(np.array([value], np.float32))
    assert Fraction(2) ** (int(code) - 127) >= Fraction(float(value)) > Fraction(2) ** (int(code) - 128)


def test_a_general_scale_rounds_and_a_power_of_two_does_not():
    model = counterexample("scale_power_of_two", "any_scale")
    x, scale = float32(model["x"]), float32(model["scale"])
    exact = Fraction(float(x)) * Fraction(float(scale))
    assert Fraction(float(x * scale)) != exact
    power = np.ldexp(np.float32(1), int(np.floor(np.log2(scale))))
    assert Fraction(float(x * power)) == Fraction(float(x)) * Fraction(float(power))


# ---------------------------------------------------------------------------------------------------------------------
# NaN and infinities


def test_a_nan_is_not_below_but_not_at_least_either():
    model = counterexample("nan_survives", "at_least")
    bound, tau = float32(model["bound"]), float32(model["tau"])
    assert np.isnan(bound) or np.isnan(tau)
    assert not bound < tau  # the key survives
    assert not bound >= tau  # the mutant drops it


def test_an_unusable_key_needs_an_infinite_norm():
    model = counterexample("unusable_key_survives", "large_norm")
    slack, total, tau = (float32(model[name]) for name in ("slack", "total", "tau"))
    assert slack * np.finfo(np.float32).max + total < tau
    assert not slack * np.float32(np.inf) + total < tau
    q, _, bound = row(8)
    k = q[:4].view(np.uint8).copy()
    k[0, 5] = 0x7F
    k_scale = np.array([1.0, np.nan, 0.0, -1.0], np.float32)
    with np.errstate(invalid="ignore"):
        values = evaluate(bound, k, k_scale)
    assert not (values < np.float32(np.inf)).any()
    assert (key_norms(k, k_scale) == np.inf).all()


# ---------------------------------------------------------------------------------------------------------------------
# The order


def test_signed_zeros_are_one_score():
    model = counterexample("order_code", "signed_zero")
    scores = np.array([float32(model[name]) for name in ("a", "b")], np.float32)
    assert scores.tolist() == [0.0, 0.0]
    assert np.signbit(scores).any()
    for pair in (scores, scores[::-1]):
        assert exact_topk(pair, 1).tolist() == [0]


def test_nan_scores_have_no_place_in_the_order():
    model = counterexample("tie_break_total_order", "nan")
    scores = np.array([float32(model[f"score_{name}"]) for name in "abc"], np.float32)
    assert np.isnan(scores).any()
    chosen = exact_topk(scores, 3)
    assert sorted(chosen[chosen >= 0].tolist()) == np.flatnonzero(~np.isnan(scores)).tolist()


@pytest.fixture(name="problem")
def small_problem():
    generator = np.random.default_rng(7)

    def codes(*shape):
        return encode_e4m3_array(generator.standard_normal(shape).astype(np.float32))

    k = codes(96, 128)
    k[48:] = k[:48]  # every score twice
    return PrefillProblem(
        q=codes(2, 32, 128),
        k=k,
        k_scale=np.ones(96, np.float32),
        weights=generator.standard_normal((2, 32)).astype(np.float32),
        cu_seqlen_ks=np.zeros(2, np.int32),
        cu_seqlen_ke=np.full(2, 96, np.int32),
        topk=9,
    )


@pytest.mark.parametrize("mode", [Mode.PRUNE, Mode.BOTH, Mode.EMIT])
def test_duplicate_seeds_count_once_and_ties_are_kept(problem, mode):
    # threshold, mutant duplicate_seed: were the best seed counted nine times, tau would be its score and eight winners
    # would be lost. ties_kept, mutants prune_equal and emit_above: the ninth winner has the threshold's score.
    assert int(counterexample("threshold", "duplicate_seed")["topk"]) >= 1
    dense = select_dense(problem)
    seeds = np.repeat(dense.topk_indices[:, :1], 40, axis=1).tolist()
    seeds = [np.array([*row, *dense.topk_indices[i]]) for i, row in enumerate(seeds)]
    found = select_prefill(problem, mode, seeds=seeds)
    np.testing.assert_array_equal(found.topk_indices, dense.topk_indices)
    np.testing.assert_array_equal(found.scores.view(np.uint32), dense.scores.view(np.uint32))


# ---------------------------------------------------------------------------------------------------------------------
# Bounds: what a mutant leaves out, the judge of bounds misses


def row(columns: int):
    generator = np.random.default_rng(3)
    q = encode_e4m3_array((generator.standard_normal((32, 128)) * 3).astype(np.float32))
    w = generator.standard_normal(32).astype(np.float32)
    return q, w, some_form(q, w, columns - 2, form=3)


def judge(q, w, bound, **changes):
    parts = {f: getattr(bound, f) for f in ("columns", "coefficients", "linear", "slack", "certificate")}
    return check_row_bound(q, w, **{**parts, **changes})


TERMS = {
    "no_residual": "residual",
    "no_dots": "dots",
    "no_rounding_a": "column_rounding",
    "no_head_chain": "head_chain",
    "no_bound_chain": "bound_chain",
    "no_floor": "floor",
}


@pytest.mark.parametrize(("mutant", "term"), TERMS.items())
def test_a_slack_without_a_term_is_refused(mutant, term):
    assert counterexample("bound_covers_score", mutant)
    q, w, bound = row(8)
    parts = (bound.columns, bound.coefficients, bound.linear, bound.certificate)
    _, needed = guard_enclosure(q, w, *parts)
    # The exact need, without the outward rounding that would hide the smallest terms.
    full = needed.total()
    assert getattr(needed, term) > 0
    assert judge(q, w, bound).coverage is Coverage.COVERED
    if term == "floor":
        return  # 2^-70 is below half a unit of any float32 slack here; test_bound.py needs it where all else is zero
    shortened = np.float32(float(full - getattr(needed, term)))
    assert judge(q, w, bound, slack=shortened).coverage is Coverage.SLACK_TOO_SMALL


def test_multipliers_out_of_range_are_refused():
    q, w, bound = row(8)
    certificate = bound.certificate
    broken = [("aggregation", "uncapped"), ("linear_negative", "uncapped"), ("linear_negative", "wrong_sign")]
    for lemma_id, mutant in [*broken, ("projection", "negative_share")]:
        assert counterexample(lemma_id, mutant)
    above, negative = certificate.aggregate * 1.01, -certificate.projection
    assert above.any()
    assert negative.any()
    for field, value in [("aggregate", above), ("projection", negative), ("aggregate", -certificate.aggregate)]:
        broken = dataclasses.replace(certificate, **{field: value})
        assert judge(q, w, bound, certificate=broken).coverage is Coverage.BAD_CERTIFICATE


def test_the_rounding_of_the_linear_column_stands_under_the_root():
    # linear_column, mutant rounding_not_covered: the root over the residuals alone is too small, and the judge sees it.
    assert counterexample("linear_column", "rounding_not_covered")
    q, w, bound = row(8)
    x, c = e4m3_float64(q), bound.certificate
    omitted = (w > 0) & ~np.isin(np.arange(32), c.retained)
    halves = w[omitted, None] * (x[omitted] - c.projection[omitted] @ e4m3_float64(bound.columns)) / 2
    alone = np.sqrt(np.abs(halves @ halves.T).sum())
    assert alone < 0.999 * bound.terms.residual
    slack = np.float32(float(bound.slack) - bound.terms.residual + alone)
    assert judge(q, w, bound, slack=slack).coverage is Coverage.SLACK_TOO_SMALL


def test_two_aggregates_may_share_a_head_up_to_its_weight():
    # several_aggregates, mutant each_capped: half of each head in either of two aggregates is sound, all of it is not.
    model = counterexample("several_aggregates", "each_capped")
    assert set(model) == {"covered", "magnitude", "multiplier", "spent", "x"}
    q, w, bound = row(8)
    (place,) = np.flatnonzero((bound.certificate.retained < 0) & ~bound.linear)

    def twice(matrix):
        return np.insert(matrix, place, matrix[place], axis=0)

    for share, expected in [(0.5, Coverage.COVERED), (1.0, Coverage.BAD_CERTIFICATE)]:
        certificate = BoundCertificate(
            retained=twice(bound.certificate.retained),
            projection=np.insert(bound.certificate.projection, place, 0.0, axis=1),
            aggregate=twice(bound.certificate.aggregate),
        )
        certificate.aggregate[place : place + 2] *= share
        coefficients = twice(bound.coefficients).copy()
        coefficients[place : place + 2] *= np.float32(share)
        columns = twice(bound.columns.view(np.uint8)).view(ml_dtypes.float8_e4m3fn)
        verdict = judge(
            q,
            w,
            bound,
            columns=columns,
            coefficients=coefficients,
            linear=twice(bound.linear),
            slack=np.float32(bound.slack * np.float32(1.001)),
            certificate=certificate,
        )
        assert verdict.coverage is expected


def test_a_coefficient_rounded_down_must_be_paid_for():
    assert counterexample("coefficient_round_up", "round_down")
    q, w, bound = row(8)
    retained = np.flatnonzero(bound.certificate.retained >= 0)
    lower = bound.coefficients.copy()
    lower[retained] = np.nextafter(lower[retained], np.float32(-np.inf))
    needs = [judge(q, w, bound, coefficients=c).required_slack for c in (bound.coefficients, lower)]
    assert needs[1] > needs[0]


def test_the_norm_of_a_key_must_be_raised_and_rounded_up():
    # column_rounding, mutant small_norm, and key_norm, mutant too_small.
    assert counterexample("column_rounding", "small_norm")
    assert counterexample("key_norm", "too_small")
    generator = np.random.default_rng(11)
    k = generator.integers(0, 0x7F, (64, 128), np.uint8)
    norms = key_norms(k, np.ones(64, np.float32))
    squares = (e4m3_float64(k) ** 2).sum(axis=1)
    plain = np.sqrt(squares).astype(np.float32)
    assert all(Fraction(float(n)) ** 2 >= Fraction(s) for n, s in zip(norms, squares.tolist(), strict=True))
    assert any(Fraction(float(n)) ** 2 < Fraction(s) for n, s in zip(plain, squares.tolist(), strict=True))
