"""Rounding: float32 to nearest and directed, chains of roundings, underflow, overflow, the sum of the guard."""

from __future__ import annotations

from fractions import Fraction
from functools import partial

from dosa_ref.spec import SM90_NUM_HEADS
from proofs.encodings import absolute, float32_successor, round_nearest_even
from proofs.lemma import Constants, Lemma, Mutant, Statement
from proofs.terms import (
    FLOAT32,
    FLOAT64,
    Term,
    bits,
    choose,
    concat,
    equal,
    every,
    extract,
    float32_from_bits,
    float64_from_bits,
    float_equal,
    float_is_nan,
    float_less,
    float_less_equal,
    float_multiply,
    float_round,
    implies,
    negate,
    number,
    real,
    reals,
    some,
    widen,
)

THEME = "rounding"
HEADS = max(SM90_NUM_HEADS)
VECTORS = HEADS + 1
"""Vectors under the root of the residuals: one for each head, and the rounding error of the linear column."""
HEAD_ROUNDINGS = HEADS // 8 + 4
"""Roundings between a dot and the score: ``HEADS / 8`` heads of a chain, two chains, the key scale, two sums."""

FLOAT32_SPACING = Fraction(1, 2**23)
"""Distance of neighbouring float32 values in [1, 2)."""

HALF_SUBNORMAL = Fraction(1, 2**150)
"""Largest error of one float32 rounding that underflows."""

FLOAT64_UNIT = Fraction(1, 2**53)
FLOAT64_ROUNDINGS = VECTORS * VECTORS + 4 * 128
"""Longest chain of float64 roundings on the query side: a sum over all pairs of vectors, of dots of 128, with room."""

FLOAT32_LIMIT = 2**127
"""No float32 result of a magnitude below this overflows."""


def _nearest_even(constants: Constants, *, share: int = 1) -> Statement:
    # value: an exact magnitude of up to 64 bits, drop: the bits below its 24 leading ones.
    value, drop = bits("value", 64), bits("drop", 64)
    one = number(1, value.sort)
    rounded = round_nearest_even(value, drop)
    distance = choose(rounded >= value, rounded - value, value - rounded)
    units = int(1 / constants["FLOAT32_UNIT"])
    return Statement(
        logic="QF_BV",
        premises=(drop >= 1, drop <= 38, value < (one << (drop + 24))),
        claim=every(
            distance <= (one << (drop - 1)),
            implies(value >= (one << (drop + 23)), share * distance * units <= value),
            equal((rounded >> drop) << drop, rounded),
        ),
    )


def _rounding_error(constants: Constants, *, subnormal: bool = False) -> Statement:
    # power <= |exact|: the power of two below it; spacing: the distance of neighbouring float32 values there.
    exact, rounded, power, spacing = reals("exact rounded power spacing")
    premises = (
        some(equal(spacing, FLOAT32_SPACING * power), equal(spacing, 2 * HALF_SUBNORMAL)),
        some(power <= absolute(exact), equal(spacing, 2 * HALF_SUBNORMAL)),
        2 * absolute(rounded - exact) <= spacing,
    )
    error = constants["FLOAT32_UNIT"] * absolute(exact)
    return Statement(
        logic="QF_LRA",
        premises=premises,
        claim=absolute(rounded - exact) <= (error if subnormal else error + HALF_SUBNORMAL),
    )


def _rounding_monotone(_: Constants, *, strict: bool = False) -> Statement:
    x, y = (float64_from_bits(bits(name, 64)) for name in ("x", "y"))
    less = float_less if strict else float_less_equal
    claims = [less(*(float_round(value, FLOAT32, mode) for value in (x, y))) for mode in ("RNE", "RTZ", "RTP")]
    return Statement(logic="QF_BVFP", premises=(less(x, y),), claim=every(*claims))


def _directed_rounding(_: Constants, *, spare: int = 0) -> Statement:
    # value: an exact magnitude, as of a float32 product; drop: the bits cut off. Cut towards zero, and stepped up where
    # bits are lost.
    value, drop = bits("value", 48), bits("drop", 48)
    one = number(1, value.sort)
    cut = (value >> drop) << drop
    up = choose(equal(cut, value), cut, cut + (one << drop))
    return Statement(
        logic="QF_BV",
        premises=(drop <= 24, value < one << 47),
        claim=every(
            cut <= value,
            value <= up,
            ((value - cut) << spare) < one << drop,
            ((up - value) << spare) < one << drop,
            equal((up >> drop) << drop, up),
        ),
    )


def _round_up_float32(_: Constants, *, correct: bool = True) -> Statement:
    # The way the code does it: convert to nearest, compare, and step up where the result fell below.
    x = float64_from_bits(bits("x", 64))
    nearest = bits("nearest", 32)
    value = float32_from_bits(nearest)
    below = float_less(float_round(value, FLOAT64, "RNE"), x)
    up = choose(below, float32_successor(nearest), nearest) if correct else nearest
    result = float32_from_bits(up)
    claim = every(
        float_less_equal(x, float_round(result, FLOAT64, "RNE")),
        float_equal(result, float_round(x, FLOAT32, "RTP")),
    )
    return Statement(
        logic="QF_BVFP",
        premises=(negate(float_is_nan(x)), equal(value, float_round(x, FLOAT32, "RNE"))),
        claim=claim,
    )


def _outward_rounding(
    constants: Constants, *, units: int | None = None, normal: bool = True, negative: bool = False
) -> Statement:
    # significand: of a float32 x with 24 bits; the product with 1 + 2^-k is exact here and then rounded to nearest.
    k = -int(constants["OUTWARD_LOG2"])
    unit_bits = int(1 / constants["FLOAT32_UNIT"]).bit_length() - 1
    significand = bits("significand", 64)
    absorbed = 2 ** (unit_bits - k) - 1 if units is None else units
    exact = significand * (2**k + 1)
    one = number(1, significand.sort)
    leading = choose(exact >= 1 << (24 + k), one * (k + 1), one * k)
    result = round_nearest_even(exact, leading)
    in_units = result << (unit_bits - k)
    if negative:
        # For x < 0 the magnitude would have to shrink.
        claim = in_units <= significand * (2**unit_bits - absorbed)
    else:
        claim = in_units >= significand * (2**unit_bits + absorbed)
    return Statement(
        logic="QF_BV",
        premises=(significand >= (1 << 23 if normal else 1), significand < 1 << 24),
        claim=claim,
    )


def _chain_step(constants: Constants, *, grows: bool = True, underflow: bool = True) -> Statement:
    # Two operands s_i of exact value x_i and absolute sum a_i, with |s_i - x_i| <= grown_i - a_i + under_i, where
    # grown_i is growth times a_i; their sum is rounded once. An exact product is an operand with s = x, a = |x| and
    # growth 1, so this is a fused multiply-add too.
    u = constants["FLOAT32_UNIT"]
    rounding, result = reals("rounding result")
    operands = [reals(f"computed_{i} exact_{i} sum_{i} grown_{i} under_{i}") for i in (1, 2)]
    (s_1, x_1, a_1, g_1, h_1), (s_2, x_2, a_2, g_2, h_2) = operands
    premises: list[Term] = []
    for s, x, a, g, h in operands:
        premises += [absolute(x) <= a, absolute(s - x) <= g - a + h]
    premises += [
        absolute(rounding) <= u * absolute(s_1 + s_2) + HALF_SUBNORMAL,
        equal(result, s_1 + s_2 + rounding),
    ]
    under = (1 + u) * (h_1 + h_2) + (HALF_SUBNORMAL if underflow else 0)
    bound = (1 + u if grows else 1) * (g_1 + g_2) - (a_1 + a_2) + under
    return Statement(
        logic="QF_LRA",
        premises=tuple(premises),
        claim=every(absolute(x_1 + x_2) <= a_1 + a_2, absolute(result - (x_1 + x_2)) <= bound),
    )


def _chain_scale(constants: Constants, *, positive: bool = True, rounded: bool = True) -> Statement:
    # One operand as in chain_step, multiplied by a positive key scale and rounded once.
    u = constants["FLOAT32_UNIT"]
    computed, exact, magnitude, grown, under, scale, result = reals("computed exact magnitude grown under scale result")
    product = scale * computed
    unit = u if rounded else Fraction(0)
    return Statement(
        logic="QF_NRA",
        premises=(
            absolute(exact) <= magnitude,
            absolute(computed - exact) <= grown - magnitude + under,
            scale > 0 if positive else scale < 0,
            absolute(result - product) <= u * absolute(product) + HALF_SUBNORMAL,
        ),
        claim=absolute(result - scale * exact)
        <= (1 + unit) * (scale * (grown + under)) - scale * magnitude + HALF_SUBNORMAL,
    )


def _scale_power_of_two(_: Constants, *, any_scale: bool = False) -> Statement:
    # Exponent fields of a normal x and of the scale, ten bits wide; product: x with the sum of the exponents.
    x, scale = bits("x", 32), bits("scale", 32)
    field = widen(extract(x, 30, 23), 10)
    scale_field = widen(extract(scale, 30, 23), 10)
    total = field + scale_field
    product = concat(concat(extract(x, 31, 31), extract(total - 127, 7, 0)), extract(x, 22, 0))
    premises = [
        equal(extract(scale, 31, 31), 0),
        scale_field >= 1,
        scale_field <= 254,
        field >= 1,
        field <= 254,
        total >= 128,
        total <= 127 + 254,
    ]
    if not any_scale:
        premises.append(equal(extract(scale, 22, 0), 0))
    return Statement(
        logic="QF_BVFP",
        premises=tuple(premises),
        claim=float_equal(
            float_multiply(float32_from_bits(x), float32_from_bits(scale), "RNE"), float32_from_bits(product)
        ),
    )


def _positive_sum(constants: Constants, *, same_sign: bool = True) -> Statement:
    # Two sums so far of squares, computed_i >= share * exact_i, with share = (1 - u)^count; one more addition. No
    # underflow: a square of a raised E4M3 value is at least 2^-12.
    u = constants["FLOAT32_UNIT"]
    share, count, result = reals("share count result")
    (s_1, part_1), (s_2, part_2) = (reals(f"computed_{i} shared_{i}") for i in (1, 2))
    rounded = result >= (1 - u) * (s_1 + s_2) if same_sign else result >= (s_1 + s_2) - u
    return Statement(
        logic="QF_LRA",
        premises=(
            s_1 >= part_1,
            s_2 >= part_2,
            rounded,
            count >= 0,
            share >= 1 - u * count,
        ),
        claim=every(result >= (1 - u) * (part_1 + part_2), (1 - u) * share >= 1 - u * (count + 1)),
    )


def _chain(constants: Constants, roundings: int, limit: Fraction) -> Statement:
    u = constants["FLOAT32_UNIT"]
    growth, power = real("growth"), number(1, "Real")
    for _ in range(roundings):
        power = (1 + u) * power
    return Statement(logic="QF_LRA", premises=(equal(growth, power),), claim=growth - 1 <= limit)


def _head_chain(constants: Constants, *, roundings: int = HEAD_ROUNDINGS) -> Statement:
    return _chain(constants, roundings, constants["HEAD_CHAIN_ULPS"] * constants["FLOAT32_UNIT"])


def _bound_chain(constants: Constants, *, extra: int = 4) -> Statement:
    # gamma (1 + budget) <= budget: the budget also covers the rounding of the guard term that holds it.
    budget = constants["BOUND_CHAIN_ULPS"] * constants["FLOAT32_UNIT"]
    return _chain(constants, int(constants["MAX_COLUMNS"]) + extra, budget / (1 + budget))


def _float64_slack(constants: Constants, *, roundings: int = FLOAT64_ROUNDINGS) -> Statement:
    # After i roundings growth <= 1 + i v c with c = 1 + 2^-10; i is an integer of at most `roundings`.
    v, c = FLOAT64_UNIT, 1 + Fraction(1, 2**10)
    growth, count = reals("growth count")
    slack = Fraction(2) ** int(constants["FLOAT64_SLACK_LOG2"])
    return Statement(
        logic="QF_LRA",
        premises=(count <= roundings, growth <= 1 + v * c * count),
        claim=every(growth + v * growth <= 1 + v * c * (count + 1), growth - 1 <= slack),
    )


def _norm_sum(_: Constants, *, one_more: int = 1) -> Statement:
    # norms, squares: sums of ||V|| and of ||V||^2 over the vectors so far, of which there are count.
    norms, squares, count, own = reals("norms squares count own")
    return Statement(
        logic="QF_NRA",
        premises=(count >= 1, norms * norms <= count * squares),
        claim=(norms + own) * (norms + own) <= (count + one_more) * (squares + own * own),
    )


def _gram_rounding(constants: Constants, *, diagonal: bool = True) -> Statement:
    # cover: the sum of |V . V'| in real numbers, of which the squares ||V||^2 are a part; computed: in float64,
    # each inner product within 128 roundings of the product of the norms, then summed over all pairs.
    norms, squares, cover, computed, rho, root = reals("norms squares cover computed rho root")
    v = FLOAT64_UNIT * (1 + Fraction(1, 2**10))
    premises = [
        root >= 0,
        norms * norms <= VECTORS * squares,
        computed >= cover - constants["HEAD_DIM"] * v * (norms * norms) - VECTORS * VECTORS * v * cover,
        root * root >= (1 - 4 * v) * computed,
        rho * rho <= cover,
    ]
    if diagonal:
        premises.append(squares <= cover)
    slack = Fraction(2) ** int(constants["FLOAT64_SLACK_LOG2"])
    return Statement(logic="QF_NRA", premises=tuple(premises), claim=rho <= root + slack * root)


def _underflow_total(constants: Constants, scale: Term) -> Term:
    # Every product may lose half a subnormal before the key scale multiplies it, the later ones after it. The
    # growth of these losses through later roundings is below 2.
    products = HEADS + int(constants["MAX_COLUMNS"]) + 1
    return 2 * HALF_SUBNORMAL * (products * scale + 5)


def _key_norm(constants: Constants) -> Statement:
    # squares: the exact sum of 128 squares, each exact in float32; total: their float32 sum in any order; root: its
    # rounded root; norm: that times the outward factor.
    squares, total, root, norm = reals("squares total root norm")
    u = constants["FLOAT32_UNIT"]
    outward = 1 + Fraction(2) ** int(constants["NORM_OUTWARD_LOG2"])
    return Statement(
        logic="QF_NRA",
        premises=(
            root >= 0,
            total >= (1 - constants["HEAD_DIM"] * u) * squares,
            root * root >= (1 - u) * (1 - u) * total,
            norm >= (1 - u) * outward * root,
        ),
        claim=norm * norm >= squares,
    )


def _slack_floor(constants: Constants, *, bounded_scale: bool = True) -> Statement:
    scale, n = reals("scale n")
    floor = Fraction(2) ** int(constants["SLACK_FLOOR_LOG2"])
    least = Fraction(2) ** int(constants["KEY_SCALE_LOG2_MIN"])
    return Statement(
        logic="QF_NRA",
        premises=(n >= constants["E4M3_MIN_NORMAL"], scale >= (least if bounded_scale else Fraction(1, 2**126))),
        claim=2 * _underflow_total(constants, scale) <= floor * n * scale,
    )


def _no_overflow(constants: Constants) -> Statement:
    # partial: any partial sum of the bound or of the score before the key scale, rounded.
    scale, n, magnitude, partial_sum = reals("scale n magnitude partial")
    square = constants["HEAD_DIM"] * constants["E4M3_MAX"] * constants["E4M3_MAX"]
    return Statement(
        logic="QF_NRA",
        premises=(
            scale <= Fraction(2) ** int(constants["KEY_SCALE_LOG2_MAX"]),
            n >= 0,
            n * n <= 2 * square,
            magnitude <= Fraction(2) ** int(constants["ROW_MAGNITUDE_LOG2_MAX"]),
            absolute(partial_sum) <= 2 * magnitude * n,
        ),
        claim=every(absolute(partial_sum) < FLOAT32_LIMIT, scale * absolute(partial_sum) < FLOAT32_LIMIT),
    )


def _bound_covers_score(constants: Constants, *, left_out: str = "") -> Statement:
    # Everything per unit of s n, which is positive. Names as in the table of docs/bound.md.
    u = constants["FLOAT32_UNIT"]
    score, bound = reals("score bound")
    retained, omitted, omitted_exact, negative, aggregate_exact, negative_exact = reals(
        "retained omitted omitted_exact negative aggregate_exact negative_exact"
    )
    projected_exact, projected, residual_exact = reals("projected_exact projected residual_exact")
    columns, linear, aggregate, exact_bound = reals("columns linear aggregate exact_bound")
    names = "residual dots rounding_a float64"
    term = dict(zip(names.split(), reals(names), strict=True))
    # What computed dots lose, summed over the vectors of each kind.
    lost_omitted, lost_projected, lost_negative, lost_linear, lost_aggregate = reals(
        "lost_omitted lost_projected lost_negative lost_linear lost_aggregate"
    )
    heads, absolutes, guard, score_underflow, bound_underflow = reals(
        "heads absolutes guard score_underflow bound_underflow"
    )
    floor = Fraction(2) ** int(constants["SLACK_FLOOR_LOG2"])
    head_chain = constants["HEAD_CHAIN_ULPS"] * u * heads
    budget = constants["BOUND_CHAIN_ULPS"] * u
    part = {**term, "head_chain": head_chain, "floor": number(floor, "Real")}
    del part["float64"]
    others = [value for name, value in part.items() if name != "floor"]
    slack = sum((value for name, value in part.items() if name != left_out), number(0, "Real"))
    bound_chain = budget * (absolutes + sum(others, number(0, "Real")))
    full = slack + term["float64"] + (number(0, "Real") if left_out == "bound_chain" else bound_chain)
    gamma = budget / (1 + budget)
    return Statement(
        logic="QF_LRA",
        premises=(
            term["float64"] >= 0,
            # slack_floor.
            2 * (score_underflow + bound_underflow) <= floor,
            # head_chain: the computed score against the sum of the computed head terms.
            score <= retained + omitted - negative + head_chain + score_underflow,
            # dot_error_total or shared_signs, for all vectors together.
            lost_omitted + lost_projected + lost_negative + lost_linear + lost_aggregate <= term["dots"],
            # computed_dots, projection, linear_column, aggregation, linear_negative, column_rounding.
            omitted <= omitted_exact + lost_omitted,
            omitted_exact <= projected_exact + residual_exact,
            projected_exact <= projected + lost_projected,
            residual_exact - negative_exact <= linear + lost_linear + term["residual"],
            -negative <= -aggregate_exact - negative_exact + lost_negative,
            -aggregate_exact <= -aggregate + lost_aggregate + term["rounding_a"],
            # coefficient_round_up: the columns of the bound against the terms that they stand for.
            columns >= retained + projected + linear - aggregate,
            guard >= full,
            equal(exact_bound, columns + guard),
            # bound_chain: the computed bound against its exact value.
            bound >= exact_bound - gamma * (absolutes + guard) - bound_underflow,
        ),
        claim=bound >= score,
    )


LEMMAS = (
    Lemma(
        id="nearest_even",
        statement="Rounding an exact magnitude to 24 bits, ties to even, changes it by at most 2^-24 of itself.",
        theme=THEME,
        build=_nearest_even,
        constants=("FLOAT32_UNIT",),
        speaks_of=("dosa_ref.scorer.score_scalar_sm90", "dosa_ref.spec.FLOAT32_UNIT"),
        mutants=(
            Mutant(id="half_unit", broken="at most 2^-25", build=partial(_nearest_even, share=2)),
            Mutant(id="unit_2_25", broken="the unit taken as 2^-25", constants={"FLOAT32_UNIT": Fraction(1, 2**25)}),
        ),
    ),
    Lemma(
        id="rounding_error",
        statement="A float32 result nearest to x differs from it by at most u |x| + 2^-150, overflow aside.",
        theme=THEME,
        build=_rounding_error,
        constants=("FLOAT32_UNIT",),
        speaks_of=("dosa_ref.scorer.score_scalar_sm90",),
        mutants=(
            Mutant(id="no_underflow", broken="the 2^-150 left out", build=partial(_rounding_error, subnormal=True)),
        ),
    ),
    Lemma(
        id="rounding_monotone",
        statement="x <= y gives float32(x) <= float32(y): to nearest, towards zero and upward, from float64.",
        theme=THEME,
        build=_rounding_monotone,
        speaks_of=("dosa_ref.bound.evaluate",),
        mutants=(
            Mutant(
                id="strict",
                broken="< for <=",
                build=partial(_rounding_monotone, strict=True),
            ),
        ),
    ),
    Lemma(
        id="directed_rounding",
        statement="Cutting towards zero, or stepping up, changes a magnitude by less than one unit of its last bit.",
        theme=THEME,
        build=_directed_rounding,
        speaks_of=("dosa_ref.formats.round_up_float32", "dosa_ref.formats.round_down_float32"),
        mutants=(
            Mutant(id="half_unit", broken="by less than half a unit", build=partial(_directed_rounding, spare=1)),
        ),
    ),
    Lemma(
        id="round_up_float32",
        statement="Converting to nearest and stepping up where the result fell below is the upward rounding.",
        theme=THEME,
        build=_round_up_float32,
        speaks_of=("dosa_ref.bound.key_norms", "dosa_ref.bound.build_row_bound"),
        mutants=(Mutant(id="nearest", broken="no step up", build=partial(_round_up_float32, correct=False)),),
    ),
    Lemma(
        id="outward_rounding",
        statement="x (1 + 2^-20), rounded to nearest, is at least x (1 + 15 * 2^-24) for a normal x >= 0.",
        theme=THEME,
        build=_outward_rounding,
        constants=("OUTWARD_LOG2", "FLOAT32_UNIT"),
        speaks_of=("dosa_ref.guard", "dosa_ref.spec.OUTWARD_LOG2"),
        mutants=(
            Mutant(id="units_16", broken="absorbs 16 units", build=partial(_outward_rounding, units=16)),
            Mutant(id="negative", broken="x < 0", build=partial(_outward_rounding, negative=True)),
            Mutant(id="subnormal", broken="x subnormal", build=partial(_outward_rounding, normal=False)),
        ),
    ),
    Lemma(
        id="chain_step",
        statement="One more rounding multiplies the relative error of a chain by 1 + u, and adds 2^-150 for underflow.",
        theme=THEME,
        build=_chain_step,
        constants=("FLOAT32_UNIT",),
        speaks_of=("dosa_ref.scorer.score_scalar_sm90", "dosa_ref.bound.evaluate"),
        mutants=(
            Mutant(
                id="no_growth",
                broken="the sum is not rounded",
                build=partial(_chain_step, grows=False),
            ),
            Mutant(id="no_underflow", broken="the 2^-150 left out", build=partial(_chain_step, underflow=False)),
        ),
        note="Holds for additions in any order and for fused multiply-add; multiplying by the key scale on the way is "
        "`chain_scale`.",
    ),
    Lemma(
        id="chain_scale",
        statement="Multiplying by a key scale s > 0 is one more rounding of the chain: s times its error, times 1 + u.",
        theme=THEME,
        build=_chain_scale,
        constants=("FLOAT32_UNIT",),
        speaks_of=("dosa_ref.scorer.score_scalar_sm90", "dosa_ref.bound.evaluate"),
        mutants=(
            Mutant(id="negative_scale", broken="s < 0", build=partial(_chain_scale, positive=False)),
            Mutant(id="exact_product", broken="the product is not rounded", build=partial(_chain_scale, rounded=False)),
        ),
    ),
    Lemma(
        id="scale_power_of_two",
        statement="Multiplying a normal float32 by a power of two is exact while the product is normal.",
        theme=THEME,
        build=_scale_power_of_two,
        speaks_of=("dosa_ref.scorer.score_scalar_sm90", "dosa_ref.formats.ue8m0_to_float32"),
        mutants=(
            Mutant(
                id="any_scale", broken="any scale of that exponent", build=partial(_scale_power_of_two, any_scale=True)
            ),
        ),
        note="Production's key scales are such powers; the guard does not count on it (`chain_scale`).",
    ),
    Lemma(
        id="head_chain",
        statement="The 12 roundings of the head combination stay within HEAD_CHAIN_ULPS = 16 units.",
        theme=THEME,
        build=_head_chain,
        constants=("FLOAT32_UNIT", "HEAD_CHAIN_ULPS"),
        speaks_of=("dosa_ref.scorer.score_scalar_sm90", "dosa_ref.guard"),
        mutants=(
            Mutant(id="too_small", broken="11 units", constants={"HEAD_CHAIN_ULPS": Fraction(11)}),
            Mutant(id="more_roundings", broken="17 roundings", build=partial(_head_chain, roundings=17)),
        ),
    ),
    Lemma(
        id="bound_chain",
        statement="MAX_COLUMNS + 4 roundings stay within BOUND_CHAIN_ULPS = 80 units, with room for that term's own.",
        theme=THEME,
        build=_bound_chain,
        constants=("FLOAT32_UNIT", "MAX_COLUMNS", "BOUND_CHAIN_ULPS"),
        speaks_of=("dosa_ref.bound.evaluate", "dosa_ref.guard"),
        mutants=(
            Mutant(id="too_small", broken="67 units", constants={"BOUND_CHAIN_ULPS": Fraction(67)}),
            Mutant(id="more_columns", broken="80 columns", constants={"MAX_COLUMNS": Fraction(80)}),
        ),
    ),
    Lemma(
        id="float64_slack",
        statement="The float64 roundings of the query side stay within 2^FLOAT64_SLACK_LOG2 of the absolute sum.",
        theme=THEME,
        build=_float64_slack,
        constants=("FLOAT64_SLACK_LOG2",),
        speaks_of=("dosa_ref.guard",),
        mutants=(
            Mutant(id="too_small", broken="2^-42", constants={"FLOAT64_SLACK_LOG2": Fraction(-42)}),
            Mutant(id="longer_sums", broken="sums of 16,384 terms", build=partial(_float64_slack, roundings=16384)),
        ),
    ),
    Lemma(
        id="norm_sum",
        statement="(sum of n norms)^2 <= n times the sum of their squares (induction over vectors).",
        theme=THEME,
        build=_norm_sum,
        speaks_of=("dosa_ref.guard.guard_terms",),
        mutants=(Mutant(id="same_count", broken="n not increased", build=partial(_norm_sum, one_more=0)),),
    ),
    Lemma(
        id="gram_rounding",
        statement="The residual's root of summed inner products, computed in float64, is within 2^FLOAT64_SLACK_LOG2.",
        theme=THEME,
        build=_gram_rounding,
        constants=("HEAD_DIM", "FLOAT64_SLACK_LOG2"),
        speaks_of=("dosa_ref.guard.guard_terms",),
        mutants=(
            Mutant(id="too_small", broken="2^-42", constants={"FLOAT64_SLACK_LOG2": Fraction(-42)}),
            Mutant(id="no_diagonal", broken="cover without the squares", build=partial(_gram_rounding, diagonal=False)),
        ),
        note="Inner products may cancel; `norm_sum` and the diagonal of the Gram matrix bound them all the same.",
    ),
    Lemma(
        id="positive_sum",
        statement="A float32 sum of n + 1 squares, in any order, is at least 1 - n u of the real one (induction).",
        theme=THEME,
        build=_positive_sum,
        constants=("FLOAT32_UNIT",),
        speaks_of=("dosa_gpu.kernels.key_norms.launch_key_norms",),
        mutants=(
            Mutant(
                id="absolute_error", broken="each rounding loses up to u", build=partial(_positive_sum, same_sign=False)
            ),
        ),
    ),
    Lemma(
        id="key_norm",
        statement="The float32 norm of a key, times 1 + 2^NORM_OUTWARD_LOG2, is at least ||k~||.",
        theme=THEME,
        build=_key_norm,
        constants=("FLOAT32_UNIT", "HEAD_DIM", "NORM_OUTWARD_LOG2"),
        speaks_of=("dosa_ref.bound.key_norms", "dosa_gpu.kernels.key_norms.launch_key_norms"),
        mutants=(Mutant(id="too_small", broken="2^-19", constants={"NORM_OUTWARD_LOG2": Fraction(-19)}),),
    ),
    Lemma(
        id="slack_floor",
        statement="Twice all that underflow can cost in score and bound is at most 2^SLACK_FLOOR_LOG2 n s.",
        theme=THEME,
        build=_slack_floor,
        constants=("SLACK_FLOOR_LOG2", "KEY_SCALE_LOG2_MIN", "MAX_COLUMNS", "E4M3_MIN_NORMAL"),
        speaks_of=("dosa_ref.guard", "dosa_ref.bound.key_norms"),
        mutants=(
            Mutant(id="too_small", broken="floor 2^-110", constants={"SLACK_FLOOR_LOG2": Fraction(-110)}),
            Mutant(id="tiny_scale", broken="any normal key scale", build=partial(_slack_floor, bounded_scale=False)),
        ),
    ),
    Lemma(
        id="no_overflow",
        statement="Under the premises on key scale and row magnitude no partial sum reaches 2^127.",
        theme=THEME,
        build=_no_overflow,
        constants=("HEAD_DIM", "E4M3_MAX", "KEY_SCALE_LOG2_MAX", "ROW_MAGNITUDE_LOG2_MAX"),
        speaks_of=("dosa_ref.bound.evaluate", "dosa_ref.bound.key_norms"),
        mutants=(
            Mutant(id="large_scale", broken="key scales up to 2^60", constants={"KEY_SCALE_LOG2_MAX": Fraction(60)}),
            Mutant(id="large_row", broken="rows up to 2^80", constants={"ROW_MAGNITUDE_LOG2_MAX": Fraction(80)}),
        ),
    ),
    Lemma(
        id="bound_covers_score",
        statement="With the guard of docs/bound.md the computed bound is at least the computed score.",
        theme=THEME,
        build=_bound_covers_score,
        constants=("FLOAT32_UNIT", "HEAD_CHAIN_ULPS", "BOUND_CHAIN_ULPS", "SLACK_FLOOR_LOG2"),
        speaks_of=("dosa_ref.guard", "dosa_ref.bound.evaluate", "dosa_ref.bound.build_row_bound"),
        mutants=tuple(
            Mutant(
                id=f"no_{name}",
                broken=f"the term {name} left out of the guard",
                build=partial(_bound_covers_score, left_out=name),
            )
            for name in (
                "residual",
                "dots",
                "rounding_a",
                "head_chain",
                "bound_chain",
                "floor",
            )
        ),
        note="The premises are the claims of the other lemmas, summed over heads and columns; a zero key, for which "
        "n = 0, has score = 0 = bound.",
    ),
)
