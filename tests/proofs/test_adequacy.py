"""The encodings are the arithmetic of ``dosa_ref``: compared exhaustively at 8 bits, by Hypothesis at 32 and above."""

from __future__ import annotations

import ast
import itertools
import math
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from dosa_ref import spec
from dosa_ref.bound import key_norms
from dosa_ref.formats import (
    Overflow,
    ceil_ue8m0,
    decode_e4m3,
    encode_e4m3,
    encode_e4m3_array,
    nearest_float32,
    next_up,
    round_down_float32,
    round_up_float32,
)
from dosa_ref.guard import GuardTerms, dot_error_exact, e4m3_float64, magnitude, sqrt_up
from dosa_ref.scorer import fma_float32
from dosa_ref.select import exact_topk
from dosa_ref.tensorcore import dot_scalar, dots
from proofs import encodings
from proofs.encodings import (
    absolute,
    align_accumulator,
    align_product,
    cut_to_fraction_bits,
    e4m3_biased_exponent,
    e4m3_encode,
    e4m3_float32_bits,
    e4m3_is_nan,
    e4m3_significand,
    float32_before,
    float32_successor,
    maximum,
    order_code,
    relu,
    round_nearest_even,
    ue8m0_ceil,
)
from proofs.lemmas import indices
from proofs.registry import get_lemma
from proofs.terms import bits, real
from tests.ref.conftest import FP8, some_form

FINITE = [code for code in range(256) if code & 0x7F != 0x7F]
FRACTIONS = st.fractions(min_value=-1000, max_value=1000)
FLOAT_BITS = st.integers(0, 2**32 - 1)
EDGE_BITS = [
    0,
    1 << 31,
    1,
    0x80000001,
    0x007FFFFF,
    0x00800000,
    0x7F7FFFFF,
    0xFF7FFFFF,
    0x7F800000,
    0xFF800000,
    0x3F800000,
]
CODES = st.lists(st.sampled_from(FINITE), min_size=32, max_size=32)
F = spec.FRACTION_BITS


def as_float32(raw: int) -> np.float32:
    return np.uint32(raw).view(np.float32)


# ---------------------------------------------------------------------------------------------------------------------
# E4M3


@pytest.mark.parametrize("code", range(256))
def test_e4m3_decode(code, evaluate, bits):
    environment = {"code": bits(code, 8)}

    def value(term):
        return evaluate(term.text, environment)

    variable = encodings.Term("(_ BitVec 8)", "code")
    expected = decode_e4m3(code)
    decoded = as_float32(value(e4m3_float32_bits(variable)).value)
    if code & 0x7F == 0x7F:
        assert value(e4m3_is_nan(variable))
        assert math.isnan(expected)
        assert np.isnan(decoded)
        return
    assert not value(e4m3_is_nan(variable))
    assert Fraction(float(decoded)) == expected
    assert np.signbit(decoded) == bool(code & 0x80)
    significand = value(e4m3_significand(variable, 16)).value
    exponent = value(e4m3_biased_exponent(variable, 16)).value - encodings.E4M3_BIAS
    assert significand * Fraction(2) ** (exponent - encodings.E4M3_SIGNIFICAND_BITS) == abs(expected)


def test_every_product_is_exact_in_float32():
    # The exhaustive twin of the lemma e4m3_products_exact.
    values = np.array([float(decode_e4m3(code)) for code in FINITE])
    exact = values[:, None] * values[None, :]
    single = values.astype(np.float32)[:, None] * values.astype(np.float32)[None, :]
    np.testing.assert_array_equal(single.astype(np.float64), exact)


def test_every_encoded_product_is_the_instruction_s(evaluate, bits):
    # e4m3_products_exact, on all 65,536 pairs: significands and exponents of the encodings, multiplied, against the
    # step of the reference in which that product is alone.
    code = encodings.Term("(_ BitVec 8)", "code")
    terms = [e4m3_significand(code, 16).text, e4m3_biased_exponent(code, 16).text, e4m3_is_nan(code).text]
    encoded = [[evaluate(term, {"code": bits(raw, 8)}) for term in terms] for raw in range(256)]
    sign = np.where(np.arange(256) & 0x80, -1, 1)
    significand = np.array([entry[0].value for entry in encoded]) * sign
    exponent = np.array([entry[1].value for entry in encoded]) - encodings.E4M3_BIAS - encodings.E4M3_SIGNIFICAND_BITS
    nan = np.array([entry[2] for entry in encoded])
    products = np.ldexp(
        np.multiply.outer(significand, significand).astype(np.float64), np.add.outer(exponent, exponent)
    )
    products[nan] = products[:, nan] = np.nan
    alone = np.zeros((256, spec.STEP_TERMS), np.uint8)
    alone[:, 5] = np.arange(256)
    np.testing.assert_array_equal(dots(alone, alone).astype(np.float64), products)


def test_every_code_is_encoded_back(evaluate, bits):
    # e4m3_round_trip.
    text = e4m3_encode(bits_term("value", 32)).text
    for code in FINITE:
        # Fractions have no signed zero: code 0x80 is the float -0.0.
        value = np.float32(float(decode_e4m3(code)))
        found = evaluate(text, {"value": bits(int(value.view(np.uint32)), 32)}).value
        assert found == code == int(encode_e4m3_array(np.array([value])).view(np.uint8)[0])


def test_all_ties_between_codes_and_their_neighbours(evaluate, bits):
    # e4m3_nearest.
    text = e4m3_encode(bits_term("value", 32)).text
    values = [float(decode_e4m3(code)) for code in range(0x7F)]
    ties = [(low + high) / 2 for low, high in itertools.pairwise(values)]
    for tie in (*ties, 448.0, 464.0, 1e30):
        for value in (np.float32(tie), np.nextafter(np.float32(tie), 0), np.nextafter(np.float32(tie), np.inf)):
            for signed in (value, -value):
                found = evaluate(text, {"value": bits(int(np.float32(signed).view(np.uint32)), 32)}).value
                assert found == encode_e4m3(Fraction(float(signed)), Overflow.SATURATE)


@settings(max_examples=300, deadline=None)
@given(raw=FLOAT_BITS | st.integers(0x3A000000, 0x44000000))
def test_encoding_of_any_float32(raw, evaluate, bits):
    value = as_float32(raw)
    assume(np.isfinite(value))
    found = evaluate(e4m3_encode(bits_term("value", 32)).text, {"value": bits(raw, 32)}).value
    assert found == encode_e4m3_array(np.array([value])).view(np.uint8)[0]


@settings(max_examples=100, deadline=None)
@given(fraction=st.integers(0, 2**23 - 1))
@example(fraction=0)
@example(fraction=1)
@example(fraction=2**23 - 1)
def test_scales_are_rounded_up_at_every_exponent(fraction, evaluate, bits):
    # ue8m0_ceil.
    text = ue8m0_ceil(bits_term("value", 32)).text
    raws = [field << 23 | fraction for field in range(1, 255)]
    raws = [raw for raw in raws if raw <= 0x7F000000]
    values = np.array(raws, np.uint32).view(np.float32)
    expected = ceil_ue8m0(values).tolist()
    assert [evaluate(text, {"value": bits(raw, 32)}).value for raw in raws[::23]] == expected[::23]


def test_largest_significand_product():
    significands = {code & 7 if code & 0x78 == 0 else 8 + (code & 7) for code in FINITE}
    assert max(significands) ** 2 == encodings.PRODUCT_MAX


# ---------------------------------------------------------------------------------------------------------------------
# The tensor core


def test_all_alignments_of_a_product(evaluate, bits):
    # step_alignment, on 226 products times 32 shifts: the encoding is the cut of the rational, and the claim holds.
    text = align_product(bits_term("product"), bits_term("shift"), F).text
    for product in range(encodings.PRODUCT_MAX + 1):
        for shift in range(32):
            kept = evaluate(text, {"product": bits(product, 64), "shift": bits(shift, 64)}).value
            exact = Fraction(product, 2**encodings.PRODUCT_FRACTION_BITS) * Fraction(2) ** (F - shift)
            assert kept == math.floor(exact)
            assert shift > F - encodings.PRODUCT_FRACTION_BITS or kept == exact


def test_all_roundings_of_small_formats(evaluate, bits):
    # nearest_even, directed_rounding and output_cut: every value below 2^9 at every number of bits dropped, to nearest
    # even, towards zero, and to a leading bit.
    nearest = round_nearest_even(bits_term("value"), bits_term("drop")).text
    cut = cut_to_fraction_bits(bits_term("value"), bits_term("exponent"), 3).text
    for value in range(1 << 9):
        for drop in range(1, 9):
            rounded = evaluate(nearest, {"value": bits(value, 64), "drop": bits(drop, 64)}).value
            assert rounded == round(Fraction(value, 1 << drop)) << drop
        if value:
            leading = value.bit_length() - 1
            kept = evaluate(cut, {"value": bits(value, 64), "exponent": bits(leading, 64)}).value
            unit = 1 << max(leading - 3, 0)
            assert kept == value // unit * unit


def bits_term(name: str, width: int = 64) -> encodings.Term:
    return bits(name, width)


def encoded_step(evaluate, make, q, k, accumulator):
    """One step put together from the encodings: significand and exponent of the result."""

    def run(term, **values):
        return evaluate(term.text, {name: make(value, width) for name, (value, width) in values.items()}).value

    code, a, b = bits("code", 8), bits_term("a"), bits_term("b")
    terms, exponents = [], []
    for x, y in zip(q, k, strict=True):
        significand, exponent = 1, 0
        for c in (x, y):
            significand *= run(e4m3_significand(code, 16), code=(c, 8))
            exponent += run(e4m3_biased_exponent(code, 16), code=(c, 8)) - encodings.E4M3_BIAS
        if significand:
            terms.append((-1 if (x ^ y) & 0x80 else 1, significand, exponent))
            exponents.append(exponent)
    mantissa, acc_exponent = 0, 0
    if accumulator:
        raw = int(accumulator.view(np.uint32))
        mantissa, acc_exponent = raw & 0x7FFFFF | 0x800000, (raw >> 23 & 255) - 127
        exponents.append(acc_exponent)
    if not exponents:
        return np.float32(0)
    largest = max(exponents)
    total = sum(
        sign * run(align_product(a, b, F), a=(significand, 64), b=(largest - exponent, 64))
        for sign, significand, exponent in terms
    )
    if mantissa:
        kept = run(align_accumulator(a, b, F), a=(mantissa, 64), b=(largest - acc_exponent, 64))
        total += -kept if accumulator < 0 else kept
    if not total:
        return np.float32(0)
    leading = abs(total).bit_length() - 1
    cut = run(cut_to_fraction_bits(a, b, F), a=(abs(total), 64), b=(leading, 64))
    return np.float32(math.copysign(math.ldexp(cut, largest - F), total))


@settings(max_examples=40, deadline=None)
@given(first=st.tuples(CODES, CODES), second=st.tuples(CODES, CODES))
@example(first=([0x7E] * 32, [0xFE] * 32), second=([0x01] * 32, [0x01] * 32))
@example(first=([0] * 32, [0] * 32), second=([0x01] * 32, [0x81] * 32))
@example(first=([0x38] + [1] * 31, [0x38] + [1] * 31), second=([0xB8] + [1] * 31, [0x38] + [9] * 31))
def test_two_steps_of_the_tensor_core(first, second, evaluate, bits):
    accumulator = encoded_step(evaluate, bits, *first, np.float32(0))
    result = encoded_step(evaluate, bits, *second, accumulator)
    q, k = (np.array(a + b, np.uint8) for a, b in zip(first, second, strict=True))
    expected = dot_scalar(q, k)
    assert result.view(np.uint32) == expected.view(np.uint32)


def test_accumulators_are_normal_and_shifts_are_small():
    # The note of exponent_vote, and SHIFT_MAX of the alignment lemma.
    from proofs.lemmas import tensorcore

    smallest, largest = min(abs(decode_e4m3(c)) for c in FINITE if c & 0x7F), spec.E4M3_MAX
    grid = Fraction(2) ** (2 * -6 - F)
    assert grid >= Fraction(2) ** -126
    assert smallest * smallest >= grid
    top = math.floor(math.log2(spec.HEAD_DIM * largest * largest))
    assert top + 2 * 6 <= tensorcore.SHIFT_MAX
    assert top - math.log2(grid) <= tensorcore.SHIFT_MAX + 2


@settings(max_examples=60, deadline=None)
@given(codes=st.lists(st.sampled_from(FINITE), min_size=128, max_size=128))
def test_the_summed_error_is_the_reference_s(codes, evaluate):
    # The right side of the claim of dot_error_total is D(q): with the error a hair above it the claim is false.
    array = np.array(codes, np.uint8)
    values = [Fraction(decode_e4m3(code)) for code in codes]
    environment, square = {}, Fraction(0)
    for t in range(spec.STEPS):
        block = values[t * 32 : t * 32 + 32]
        raised = max((max(abs(x), spec.E4M3_MIN_NORMAL) for x in block if x), default=Fraction(0))
        environment[f"loss_{t}"] = max(raised, sqrt_up(square)) if t else raised
        square += sum(x * x for x in block)
        environment[f"output_{t}"] = sqrt_up(square)
    claim = get_lemma("dot_error_total").formula().claim.text
    error = dot_error_exact(array)
    last = f"error_{spec.STEPS - 1}"
    assert evaluate(claim, {**environment, last: error})
    assert not evaluate(claim, {**environment, last: error + Fraction(1, 2**60)})


@settings(max_examples=60, deadline=None)
@given(q=CODES, k=CODES)
def test_the_vote_of_an_exponent_is_covered_by_the_stored_norm(q, k):
    # exponent_vote and key_norm: key_norms raises subnormals as exponent_vote demands: |k~|_inf <= n.
    key = np.zeros((1, 128), np.uint8)
    key[0, :32] = k
    n = Fraction(float(key_norms(key, np.ones(1, np.float32))[0]))
    assert all(max(abs(decode_e4m3(c)), spec.E4M3_MIN_NORMAL) <= n for c in k if c & 0x7F)
    assert n * n >= sum(max(abs(decode_e4m3(c)), spec.E4M3_MIN_NORMAL) ** 2 for c in k if c & 0x7F)


# ---------------------------------------------------------------------------------------------------------------------
# Reals and rounding


@settings(deadline=None)
@given(a=FRACTIONS, b=FRACTIONS)
def test_relu_maximum_absolute(a, b, evaluate):
    x, y = real("x"), real("y")
    environment = {"x": a, "y": b}
    assert evaluate(relu(x).text, environment) == max(a, 0)
    assert evaluate(maximum(x, y).text, environment) == max(a, b)
    assert evaluate(absolute(x).text, environment) == abs(a)


@settings(deadline=None)
@given(value=st.integers(1, 2**62 - 1))
@example(value=(1 << 25) | 1)
@example(value=(1 << 25) | 2)
@example(value=(1 << 25) | 6)
@example(value=(1 << 26) - 1)
def test_round_nearest_even(value, evaluate, bits):
    drop = max(value.bit_length() - 24, 1)
    text = round_nearest_even(bits_term("value"), bits_term("drop")).text
    if value.bit_length() >= 25:
        rounded = evaluate(text, {"value": bits(value, 64), "drop": bits(drop, 64)}).value
        assert rounded == Fraction(float(nearest_float32(Fraction(value))))


@settings(max_examples=200, deadline=None)
@given(a=FLOAT_BITS, b=FLOAT_BITS, c=FLOAT_BITS)
def test_fused_multiply_add_meets_the_premises_of_rounding_error(a, b, c, evaluate):
    x, y, z = (as_float32(raw) for raw in (a, b, c))
    assume(all(map(np.isfinite, (x, y, z))))
    exact = Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
    with np.errstate(over="ignore"):
        result = fma_float32(x, y, z)
    assume(np.isfinite(result))
    exponent = math.floor(math.log2(abs(exact))) if abs(exact) >= Fraction(2) ** -126 else -126
    power = Fraction(2) ** exponent
    power = power / 2 if power > abs(exact) and exponent > -126 else power
    environment = {
        "exact": exact,
        "rounded": Fraction(float(result)),
        "power": power,
        "spacing": max(power / 2**23, Fraction(1, 2**149)),
    }
    statement = get_lemma("rounding_error").formula()
    assert all(evaluate(premise.text, environment) for premise in statement.premises)
    assert evaluate(statement.claim.text, environment)


@settings(max_examples=200, deadline=None)
@given(a=FLOAT_BITS, b=FLOAT_BITS, c=FLOAT_BITS)
@example(a=0x3F800000, b=0x80000000, c=0x80000000)
@example(a=0x3F800001, b=0x3F800001, c=0xBF800002)
@example(a=0x7F7FFFFF, b=0x40000000, c=0xFF800000)
def test_the_judge_of_counterexamples_computes_floats_as_the_reference(a, b, c, evaluate):
    x, y, z = (as_float32(raw) for raw in (a, b, c))
    values = {"x": x, "y": y, "z": z}
    with np.errstate(all="ignore"):
        expected = {"(fp.fma RNE x y z)": fma_float32(x, y, z), "(fp.add RNE x z)": x + z, "(fp.mul RNE x y)": x * y}
    for text, value in expected.items():
        found = evaluate(text, values)
        assert np.isnan(found) == np.isnan(value)
        assert np.isnan(value) or np.float32(found).view(np.uint32) == np.float32(value).view(np.uint32)


@settings(deadline=None)
@given(value=st.floats(allow_nan=False, allow_infinity=False, width=64, min_value=-1e39, max_value=1e39))
@example(value=1 + 2.0**-24)
@example(value=-1 - 3 * 2.0**-24)
@example(value=2.0**-150)
def test_the_judge_of_counterexamples_rounds_as_the_reference(value, evaluate):
    # rounding_monotone and round_up_float32 convert from float64 in these modes.
    exact = Fraction(value)
    towards_zero = round_down_float32(exact) if value > 0 else round_up_float32(exact)
    expected = {"RNE": nearest_float32(exact), "RTP": round_up_float32(exact), "RTN": round_down_float32(exact)}
    for mode, rounded in {**expected, "RTZ": towards_zero}.items():
        assert evaluate(f"((_ to_fp 8 24) {mode} x)", {"x": np.float64(value)}) == rounded


@settings(deadline=None)
@given(raw=FLOAT_BITS)
def test_successor(raw, evaluate, bits):
    for pattern in (raw, *EDGE_BITS):
        value = as_float32(pattern)
        if np.isnan(value) or value == np.inf:
            continue
        found = as_float32(evaluate(float32_successor(bits_term("v", 32)).text, {"v": bits(pattern, 32)}).value)
        expected = next_up(value)
        assert found == expected
        assert found > value


@settings(deadline=None)
@given(value=st.floats(allow_nan=False, allow_infinity=False, width=64, min_value=-3e38, max_value=3e38))
def test_round_up_float32_meets_the_lemma(value, evaluate, bits):
    # The reference's own upward rounding is the `up` of the lemma.
    nearest = np.float32(value)
    environment = {
        "x": bits(int(np.float64(value).view(np.uint64)), 64),
        "nearest": bits(int(nearest.view(np.uint32)), 32),
    }
    statement = get_lemma("round_up_float32").formula()
    assert all(evaluate(premise.text, environment) for premise in statement.premises)
    stepped = nearest if float(nearest) >= value else next_up(nearest)
    assert round_up_float32(Fraction(value)) == stepped


@settings(deadline=None)
@given(raw=st.integers(0x00800000, 0x7F000000))
@example(raw=0x00800000)
@example(raw=0x3FFFFFFF)
def test_outward_rounding_is_the_float32_product(raw, evaluate, bits):
    x = as_float32(raw)
    grown = x * np.float32(1 + 2.0**spec.OUTWARD_LOG2)
    assert Fraction(float(grown)) >= Fraction(float(x)) * (1 + 15 * spec.FLOAT32_UNIT)
    significand = raw & 0x7FFFFF | 0x800000
    exact = significand * (2**-spec.OUTWARD_LOG2 + 1)
    drop = exact.bit_length() - 24
    text = round_nearest_even(bits_term("value"), bits_term("drop")).text
    rounded = evaluate(text, {"value": bits(exact, 64), "drop": bits(drop, 64)}).value
    scale = Fraction(float(x)) / significand
    assert Fraction(float(grown)) == rounded * scale * Fraction(2) ** spec.OUTWARD_LOG2


@settings(max_examples=60, deadline=None)
@given(q=CODES, k=CODES)
def test_products_of_one_sign_err_in_one_direction(q, k, evaluate):
    # signed_loss: cuts are towards zero, whatever the step's exponent is.
    text = get_lemma("signed_loss").formula().claim.text
    for sign in (0, 0x80):
        left = np.array([code & 0x7F for code in q] * 4, np.uint8)
        right = np.array([code & 0x7F | sign for code in k] * 4, np.uint8)
        exact = sum(
            (Fraction(a) * Fraction(b) for a, b in zip(e4m3_float64(left).tolist(), e4m3_float64(right).tolist())),
            Fraction(0),
        )
        computed = Fraction(float(dot_scalar(left, right)))
        assert computed >= exact if sign else computed <= exact
        # The whole dot as one term: its sign tells which way it may err.
        whole = {"product": exact, "cut": computed, "unit": abs(exact - computed)}
        assert evaluate(text, {**whole, **dict.fromkeys(("total", "exact", "raised", "lowered"), Fraction(0))})


# ---------------------------------------------------------------------------------------------------------------------
# The guard


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), kept=st.integers(0, 31), form=st.integers(0, 3))
def test_the_guard_of_the_reference_meets_the_premise_of_bound_covers_score(seed, kept, form, evaluate):
    generator = np.random.default_rng(seed)
    q = generator.integers(0, 0x7F, (32, 128), np.uint8) | (generator.integers(0, 2, (32, 128), np.uint8) << 7)
    w = generator.standard_normal(32).astype(np.float32)
    bound = some_form(q.view(FP8), w, kept, form)
    terms: GuardTerms = bound.terms
    environment = {
        "residual": Fraction(terms.residual),
        "dots": Fraction(terms.dots),
        "rounding_a": Fraction(terms.column_rounding),
        "float64": Fraction(0),
        "heads": Fraction(float((np.abs(w.astype(np.float64)) * magnitude(q)).sum())),
        "absolutes": Fraction(float((np.abs(bound.coefficients.astype(np.float64)) * magnitude(bound.columns)).sum())),
    }
    (premise,) = [p.text for p in get_lemma("bound_covers_score").formula().premises if p.text.startswith("(>= guard ")]
    slack = Fraction(float(bound.slack))
    assert evaluate(premise, {**environment, "guard": slack})
    # The inequality is tight but for the outward rounding and the float64 term: a thousandth less does not meet it.
    assert not evaluate(premise, {**environment, "guard": slack * Fraction(999, 1000)})


def test_row_magnitude_names_the_same_sums():
    q = np.full((32, 128), 0x38, np.uint8)
    assert magnitude(q)[0] >= math.sqrt((e4m3_float64(q[0]) ** 2).sum())


# ---------------------------------------------------------------------------------------------------------------------
# The order


@settings(deadline=None)
@given(a=FLOAT_BITS, b=FLOAT_BITS)
def test_order_code_sorts_as_the_value(a, b, evaluate, bits):
    # order_code.
    text = order_code(bits_term("s", 32)).text
    for x, y in [(a, b), *((a, edge) for edge in EDGE_BITS), (0, 1 << 31)]:
        if np.isnan(as_float32(x)) or np.isnan(as_float32(y)):
            continue
        key_x, key_y = (evaluate(text, {"s": bits(raw, 32)}).value for raw in (x, y))
        assert (key_x < key_y) == bool(as_float32(x) < as_float32(y))
        assert (key_x == key_y) == bool(as_float32(x) == as_float32(y))


@settings(deadline=None)
@given(scores=st.lists(st.sampled_from(EDGE_BITS) | FLOAT_BITS, min_size=1, max_size=12), topk=st.integers(0, 14))
@example(scores=[1 << 31, 0, 1 << 31, 0], topk=2)
def test_exact_topk_follows_the_encoded_order(scores, topk, evaluate, bits):
    # tie_break_total_order.
    text = float32_before(*(bits_term(name, 32) for name in ("s", "i", "t", "j"))).text
    candidates = [i for i, raw in enumerate(scores) if not np.isnan(as_float32(raw))]

    def ahead(i, j):
        environment = {"s": scores[i], "i": i, "t": scores[j], "j": j}
        return evaluate(text, {name: bits(value, 32) for name, value in environment.items()})

    winners = [j for j in candidates if sum(ahead(i, j) for i in candidates) < topk]
    expected = [*winners, *[spec.PAD_INDEX] * (topk - len(winners))]
    assert exact_topk(np.array(scores, np.uint32).view(np.float32), topk).tolist() == expected


# ---------------------------------------------------------------------------------------------------------------------
# The kernels

SOURCES = Path(spec.__file__).parent.parent / "dosa_gpu"


def assigned(file: str, name: str) -> object:
    """The literal that a module of the kernels assigns to a name, read without importing it."""
    for node in ast.parse((SOURCES / file).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and any(getattr(target, "id", "") == name for target in node.targets):
            return ast.literal_eval(node.value)
    raise AttributeError(name)


def test_index_lemmas_speak_of_the_sizes_of_the_kernels():
    # kernel_offsets and row_products.
    assert assigned("kernels/bound.py", "KEYS_PER_PROGRAM") <= indices.SPAN
    assert assigned("kernels/score.py", "KEYS_PER_PROGRAM") <= indices.SPAN
    assert assigned("kernels/rescore.py", "MAX_STEP") <= indices.SPAN
    assert assigned("kernels/topk.py", "GPU_TILE") <= assigned("kernels/topk.py", "INTERPRETER_TILE") <= indices.SPAN
    assert assigned("kernels/append.py", "TILE") <= indices.SPAN
    assert assigned("kernels/compact.py", "TILE_WORDS") * 32 <= indices.SPAN
    assert assigned("plan.py", "MAX_ROWS") <= indices.BLOCK_ROWS
    assert assigned("kernels/bound.py", "TILE_COLUMNS") <= 2 * indices.HEADS
    assert max(*spec.SM90_NUM_HEADS, *assigned("plan.py", "SUPPORTED_COLUMNS")) <= min(indices.HEADS, spec.MAX_COLUMNS)


def test_the_gpu_path_refuses_what_kernel_offsets_does_not_cover():
    # kernel_offsets.
    tree = ast.parse((SOURCES / "api.py").read_text(encoding="utf-8"))
    (refused,) = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test).startswith("k.shape[0] >= ")
    ]
    assert isinstance(refused.body[0], ast.Raise)
    assert ast.unparse(refused.test) == "k.shape[0] >= 2 ** 31 - 2 ** 17"
    assert indices.KEYS_LIMIT == 2**31 - 2**17


CODE_KERNEL = """
import sys
import numpy as np
import torch
from dosa_verify.targets.dosa import Device, connect
connect(Device.CPU)
from dosa_gpu.kernels import topk
patterns = np.fromstring(sys.argv[1], dtype=np.int64, sep=",")
rows = len(patterns)
score = torch.from_numpy(patterns.astype(np.uint32).view(np.int32).copy()).view(torch.float32)
count = torch.zeros(1, dtype=torch.int32)
empty = (torch.zeros(1, rows, dtype=torch.int32), torch.zeros(1, rows), count.clone())
for k in range(1, rows + 1):
    held = tuple(part[:, :k].contiguous() if part.dim() == 2 else part for part in empty)
    out = tuple(torch.full_like(part, -1) for part in held)
    topk.launch_topk(*held, None, score[None].contiguous(), count, count + rows, 0, out)
    print(*sorted(out[0][0, : int(out[2])].tolist()))
"""


def test_the_kernel_s_order_is_that_of_order_code(evaluate, bits):
    # order_code, code_bisection and tie_rank, in the interpreted kernel: for every K the K best of the encoded order.
    pytest.importorskip("triton", minversion="3.9", reason="the emulator needs it")
    patterns = [*EDGE_BITS, *EDGE_BITS, 0x7FC00000, 0xFFFFFFFF, 0x3F800001, 0xBF800000, 0xBF7FFFFF]
    text = order_code(bits_term("s", 32)).text
    codes = [evaluate(text, {"s": bits(raw, 32)}).value for raw in patterns]
    order = sorted((i for i, code in enumerate(codes) if code), key=lambda i: (-codes[i], i))
    run = [sys.executable, "-c", CODE_KERNEL, ",".join(map(str, patterns))]
    output = subprocess.run(run, check=True, capture_output=True, text=True, cwd=SOURCES.parent).stdout.splitlines()
    assert len(output) == len(patterns)
    for k, line in enumerate(output, 1):
        assert [int(word) for word in line.split()] == sorted(order[:k])
