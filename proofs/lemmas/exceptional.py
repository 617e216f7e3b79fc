"""NaN, infinities and zeros in the bound pass: none of them prunes a key wrongly.

These are statements about IEEE comparisons and operations, in float32 as the kernels compute (row sums in float64).
"""

from __future__ import annotations

from functools import partial

from proofs.lemma import Constants, Lemma, Mutant, Statement
from proofs.terms import (
    Term,
    bits,
    bitvec_sort,
    every,
    float32_from_bits,
    float64_from_bits,
    float_add,
    float_equal,
    float_fma,
    float_is_infinite,
    float_is_nan,
    float_less,
    float_less_equal,
    float_multiply,
    iff,
    negate,
    number,
    some,
)

THEME = "exceptional"
INFINITY = 0x7F800000
MINUS_INFINITY = 0xFF800000
LARGEST = 0x7F7FFFFF
ONE = 0x3F800000


def _constant(pattern: int) -> Term:
    return float32_from_bits(number(pattern, bitvec_sort(32)))


def _finite(value: Term) -> Term:
    return negate(some(float_is_nan(value), float_is_infinite(value)))


def _nan_survives(_: Constants, *, negated: bool = True) -> Statement:
    bound, tau = (float32_from_bits(bits(name, 32)) for name in ("bound", "tau"))
    # A key is skipped exactly if this holds.
    skipped = float_less(bound, tau) if negated else negate(float_less_equal(tau, bound))
    harmless = some(
        float_is_nan(bound),
        float_is_nan(tau),
        float_equal(bound, _constant(INFINITY)),
        float_equal(tau, _constant(MINUS_INFINITY)),
    )
    return Statement(logic="QF_BVFP", premises=(harmless,), claim=negate(skipped))


def _unusable_key_survives(
    _: Constants, *, norm: int = INFINITY, non_negative: bool = True, scale: int = ONE
) -> Statement:
    # total: whatever the columns add up to for a key with NaN codes or with a scale out of range, NaN and Inf included.
    slack, total, tau = (float32_from_bits(bits(name, 32)) for name in ("slack", "total", "tau"))
    n, unit = _constant(norm), _constant(scale)
    fused = float_multiply(unit, float_fma(slack, n, total, "RNE"), "RNE")
    apart = float_multiply(unit, float_add(total, float_multiply(slack, n, "RNE"), "RNE"), "RNE")
    return Statement(
        logic="QF_BVFP",
        premises=(negate(float_less(slack, _constant(0))),) if non_negative else (),
        claim=negate(some(float_less(fused, tau), float_less(apart, tau))),
    )


def _zero_key(_: Constants, *, finite_slack: bool = True, zero_norm: bool = True) -> Statement:
    slack, total, norm, scale = (float32_from_bits(bits(name, 32)) for name in ("slack", "total", "norm", "scale"))
    zero = _constant(0)
    premises = [float_equal(total, zero), _finite(scale)]
    if finite_slack:
        premises.append(_finite(slack))
    if zero_norm:
        premises.append(float_equal(norm, zero))
    fused = float_multiply(float_fma(slack, norm, total, "RNE"), scale, "RNE")
    apart = float_multiply(float_add(total, float_multiply(slack, norm, "RNE"), "RNE"), scale, "RNE")
    return Statement(
        logic="QF_BVFP", premises=tuple(premises), claim=every(float_equal(fused, zero), float_equal(apart, zero))
    )


def _row_check(constants: Constants, *, negated: bool = True) -> Statement:
    # heads, columns: float64 sums of magnitudes; slack: G. None of them is negative; NaN and Inf are possible.
    names = ("heads", "columns", "slack")
    sums = [float64_from_bits(bits(name, 64)) for name in names]
    zero = float64_from_bits(number(0, bitvec_sort(64)))
    power = int(constants["ROW_MAGNITUDE_LOG2_MAX"])
    limit = float64_from_bits(number((1023 + power) << 52, bitvec_sort(64)))
    total = float_add(float_add(sums[0], sums[1], "RNE"), sums[2], "RNE")
    accepted = float_less_equal(total, limit) if negated else negate(float_less(limit, total))
    return Statement(
        logic="QF_BVFP",
        premises=(*(negate(float_less(value, zero)) for value in sums), accepted),
        claim=every(*(float_less_equal(value, limit) for value in sums)),
    )


def _emit_comparison(_: Constants, *, ordered: bool = True) -> Statement:
    score, tau = (float32_from_bits(bits(name, 32)) for name in ("score", "tau"))
    emitted = float_less_equal(tau, score) if ordered else negate(float_less(score, tau))
    return Statement(
        logic="QF_BVFP",
        premises=(negate(float_is_nan(tau)),),
        claim=iff(emitted, every(negate(float_is_nan(score)), negate(float_less(score, tau)))),
    )


LEMMAS = (
    Lemma(
        id="nan_survives",
        statement="A bound that is NaN or +Inf, or a threshold that is NaN or -Inf, never skips a key (U < tau skips).",
        theme=THEME,
        build=_nan_survives,
        speaks_of=("dosa_ref.select.select_prefill", "dosa_gpu.kernels.bound.launch_bound"),
        mutants=(
            Mutant(id="at_least", broken="kept only if U >= tau holds", build=partial(_nan_survives, negated=False)),
        ),
    ),
    Lemma(
        id="unusable_key_survives",
        statement="With norm +Inf, scale 1 and G >= 0 (or NaN) a key survives, whatever its dots are.",
        theme=THEME,
        build=_unusable_key_survives,
        speaks_of=(
            "dosa_ref.bound.evaluate",
            "dosa_ref.bound.key_norms",
            "dosa_gpu.kernels.key_norms.launch_key_norms",
            "dosa_gpu.kernels.bound.launch_bound",
        ),
        mutants=(
            Mutant(
                id="large_norm",
                broken="the largest float32 for +Inf",
                build=partial(_unusable_key_survives, norm=LARGEST),
            ),
            Mutant(id="negative_slack", broken="G < 0", build=partial(_unusable_key_survives, non_negative=False)),
            Mutant(
                id="negative_scale",
                broken="the key's own scale, -1",
                build=partial(_unusable_key_survives, scale=0xBF800000),
            ),
        ),
        note="Both forms of the last additions: fused, and a product added.",
    ),
    Lemma(
        id="zero_key",
        statement="For a zero key, whose dots, norm and score are 0, a finite row computes U = 0.",
        theme=THEME,
        build=_zero_key,
        speaks_of=("dosa_ref.bound.evaluate", "dosa_gpu.kernels.bound.launch_bound"),
        mutants=(
            Mutant(id="infinite_slack", broken="G may be Inf or NaN", build=partial(_zero_key, finite_slack=False)),
            Mutant(id="any_norm", broken="the norm is not 0", build=partial(_zero_key, zero_norm=False)),
        ),
    ),
    Lemma(
        id="row_check",
        statement="A row that passes sum <= 2^ROW_MAGNITUDE_LOG2_MAX has no NaN, no Inf and no larger part in its sum.",
        theme=THEME,
        build=_row_check,
        constants=("ROW_MAGNITUDE_LOG2_MAX",),
        speaks_of=("dosa_ref.bound.row_within_magnitude", "dosa_gpu.prepare.prepare_rows"),
        mutants=(
            Mutant(id="not_above", broken="accepted unless sum > limit", build=partial(_row_check, negated=False)),
        ),
    ),
    Lemma(
        id="emit_comparison",
        statement="score >= tau holds exactly for the scores that are not NaN and not below tau.",
        theme=THEME,
        build=_emit_comparison,
        speaks_of=("dosa_ref.select.select_prefill", "dosa_gpu.kernels.append.launch_append"),
        mutants=(
            Mutant(id="not_below", broken="emitted unless score < tau", build=partial(_emit_comparison, ordered=False)),
        ),
        note="tau is never NaN: it is the score of a selected entry (`order_code`) or -Inf.",
    ),
)
