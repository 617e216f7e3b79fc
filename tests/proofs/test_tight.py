"""Which constants are tight: one unit less, or one unit more of absorption, is refuted; the others have this room."""

from __future__ import annotations

from fractions import Fraction

import pytest

from dosa_ref import spec
from proofs.lemma import Lemma
from proofs.prover import Proved, Refuted, prove
from proofs.registry import get_lemma

# Lemma, constant, tightest value that is proved, next value, which is refuted. The values in use are in dosa_ref.spec.
TIGHTEST = [
    ("step_sum", "FIRST_STEP_LOSSY", 31, 30),
    ("step_sum", "STEP_LOSSY", 32, 31),
    ("dot_error", "STEP_LOSSY", 32, 31),
    ("dot_error_total", "FIRST_STEP_LOSSY", 31, 30),
    ("dot_error_total", "STEP_LOSSY", 32, 31),
    ("exponent_vote", "E4M3_MIN_NORMAL", Fraction(1, 64), Fraction(1, 128)),
    ("float64_slack", "FLOAT64_SLACK_LOG2", -40, -41),
    ("gram_rounding", "FLOAT64_SLACK_LOG2", -40, -41),
    ("nearest_even", "FLOAT32_UNIT", Fraction(1, 2**24), Fraction(1, 2**25)),
    ("rounding_error", "FLOAT32_UNIT", Fraction(1, 2**24), Fraction(1, 2**25)),
    # Not claimed to be tight: the values in use are 16, 80, -16, -70, 40 and 60. They are bounds of float32 work, five
    # orders of magnitude below the other terms, with room for another order of operations.
    ("head_chain", "HEAD_CHAIN_ULPS", 13, 12),
    ("bound_chain", "BOUND_CHAIN_ULPS", 69, 68),
    ("key_norm", "NORM_OUTWARD_LOG2", -17, -18),
    ("slack_floor", "SLACK_FLOOR_LOG2", -99, -100),
    ("slack_floor", "KEY_SCALE_LOG2_MIN", -69, -70),
    ("no_overflow", "KEY_SCALE_LOG2_MAX", 53, 54),
    ("no_overflow", "ROW_MAGNITUDE_LOG2_MAX", 73, 74),
]
IN_USE = {"HEAD_CHAIN_ULPS", "BOUND_CHAIN_ULPS", "NORM_OUTWARD_LOG2", "SLACK_FLOOR_LOG2", "KEY_SCALE_LOG2_MIN"}
IN_USE |= {"KEY_SCALE_LOG2_MAX", "ROW_MAGNITUDE_LOG2_MAX"}

# Lemma and the mutant in which a claim is one unit, or one bit, stronger than it is.
ABSORPTION = [
    ("step_alignment", "shift_8"),
    ("output_cut", "exact_15_bits"),
    ("output_cut", "half_loss"),
    ("directed_rounding", "half_unit"),
    ("outward_rounding", "units_16"),
    ("kernel_offsets", "all_int32"),
    ("survivor_bits", "long_word"),
]


def with_constant(lemma: Lemma, name: str, value: int | Fraction):
    constants = {key: Fraction(text) for key, text in lemma.constant_texts().items()}
    return prove(lemma.build({**constants, name: Fraction(value)}))


@pytest.mark.parametrize(("lemma_id", "name", "tightest", "next_value"), TIGHTEST)
def test_one_unit_less_is_refuted(lemma_id, name, tightest, next_value):
    lemma = get_lemma(lemma_id)
    assert isinstance(with_constant(lemma, name, tightest), Proved)
    assert isinstance(with_constant(lemma, name, next_value), Refuted)
    if name not in IN_USE:
        assert spec.GUARD_CONSTANTS[name] == str(tightest)


@pytest.mark.parametrize(("lemma_id", "mutant_id"), ABSORPTION)
def test_one_unit_more_is_refuted(lemma_id, mutant_id):
    lemma = get_lemma(lemma_id)
    (mutant,) = [mutant for mutant in lemma.mutants if mutant.id == mutant_id]
    assert isinstance(prove(lemma.formula()), Proved)
    assert isinstance(prove(lemma.mutant_formula(mutant)), Refuted)


@pytest.mark.parametrize(("units", "verdict"), [(14, Proved), (15, Proved), (16, Refuted)])
def test_outward_rounding_absorbs_fifteen_units(units, verdict):
    from proofs.lemmas import rounding

    lemma = get_lemma("outward_rounding")
    constants = {key: Fraction(text) for key, text in lemma.constant_texts().items()}
    assert isinstance(prove(rounding._outward_rounding(constants, units=units)), verdict)


@pytest.mark.parametrize(("shift", "verdict"), [(0, Proved), (1, Refuted)])
def test_a_product_is_lossless_up_to_shift_seven(shift, verdict):
    from proofs.lemmas import tensorcore

    lemma = get_lemma("step_alignment")
    constants = {key: Fraction(text) for key, text in lemma.constant_texts().items()}
    assert isinstance(prove(tensorcore._step_alignment(constants, extra_shift=shift)), verdict)
