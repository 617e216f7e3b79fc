"""What the FP8 tensor cores lose: alignment of 32 products, the cut of the sum, and their total over one dot.

Magnitudes are integers in units of the step, ``2^(E - FRACTION_BITS)`` with ``E`` the largest exponent of the step; a
sign in front changes nothing, because everything is cut towards zero. Sums over steps are real induction steps.
"""

from __future__ import annotations

from fractions import Fraction
from functools import partial

from proofs.encodings import (
    E4M3_SIGNIFICAND_BITS,
    PRODUCT_FRACTION_BITS,
    PRODUCT_MAX,
    absolute,
    align_accumulator,
    align_product,
    cut_to_fraction_bits,
    e4m3_biased_exponent,
    e4m3_float32_bits,
    e4m3_is_nan,
    e4m3_significand,
    maximum,
    relu,
)
from proofs.lemma import Constants, Lemma, Mutant, Statement
from proofs.terms import (
    FLOAT32,
    bits,
    boolean,
    choose,
    equal,
    every,
    float32_from_bits,
    float_equal,
    float_multiply,
    float_round,
    implies,
    negate,
    number,
    real,
    reals,
    some,
    total,
)

THEME = "tensorcore"
WIDTH = 64
"""Bits of the integers here: room for every shift below."""

SHIFT_MAX = 48
"""Exponents of products are at least -12 and those of accumulators at most 25, so no shift exceeds 48."""

FLOAT16 = "(_ FloatingPoint 5 11)"


def _fraction_bits(constants: Constants) -> int:
    return int(constants["FRACTION_BITS"])


def _e4m3_products_exact(_: Constants, *, sort: str = FLOAT32, nan: bool = False) -> Statement:
    a, b = bits("a", 8), bits("b", 8)
    x, y = (float32_from_bits(e4m3_float32_bits(code)) for code in (a, b))
    if sort != FLOAT32:
        x, y = float_round(x, sort, "RNE"), float_round(y, sort, "RNE")
    finite = () if nan else (negate(e4m3_is_nan(a)), negate(e4m3_is_nan(b)))
    # A product that is not exact has a neighbour below and another above.
    return Statement(
        logic="QF_BVFP",
        premises=finite,
        claim=float_equal(float_multiply(x, y, "RTP"), float_multiply(x, y, "RTN")),
    )


def _exponent_vote(constants: Constants, *, raised: bool = True) -> Statement:
    # In units of the smallest subnormal, 2^-9: a magnitude is significand << (biased - 1); covers are those of x~.
    smallest_normal = constants["E4M3_MIN_NORMAL"] / constants["E4M3_MIN_SUBNORMAL"]
    magnitudes, covers, votes, premises = [], [], [], []
    for name in ("a", "b"):
        code = bits(name, 8)
        significand, biased = e4m3_significand(code, WIDTH), e4m3_biased_exponent(code, WIDTH)
        magnitude = significand << (biased - 1)
        magnitudes.append(magnitude)
        raised_magnitude = choose(magnitude < smallest_normal, number(smallest_normal, magnitude.sort), magnitude)
        covers.append(choose(equal(significand, 0), magnitude, raised_magnitude))
        votes.append(number(1, magnitude.sort) << (biased - 1 + E4M3_SIGNIFICAND_BITS))
        premises.append(negate(equal(significand, 0)))
    bounds = covers if raised else magnitudes
    return Statement(
        logic="QF_BV",
        premises=tuple(premises),
        claim=every(votes[0] <= bounds[0], magnitudes[0] <= bounds[0], votes[0] * votes[1] <= bounds[0] * bounds[1]),
    )


def _step_alignment(
    constants: Constants, *, extra_shift: int = 0, away: int = 0, short_accumulator: bool = True
) -> Statement:
    fraction_bits = _fraction_bits(constants)
    product, shift, accumulator, gap = (bits(n, WIDTH) for n in ("product", "shift", "accumulator", "gap"))
    one = number(1, product.sort)
    kept = align_product(product, shift, fraction_bits) + away
    whole = product << (fraction_bits - PRODUCT_FRACTION_BITS)
    kept_accumulator = align_accumulator(accumulator, gap, fraction_bits)
    drop = gap + (23 - fraction_bits)
    # The limits keep every integer below inside its 64 bits.
    premises = [product <= PRODUCT_MAX, shift <= SHIFT_MAX, gap <= SHIFT_MAX - 24, accumulator < 1 << 24]
    if short_accumulator:
        premises.append(equal(accumulator & ((1 << (23 - fraction_bits)) - 1), 0))
    return Statement(
        logic="QF_BV",
        premises=tuple(premises),
        claim=every(
            equal(whole >> (fraction_bits - PRODUCT_FRACTION_BITS), product),
            kept < 1 << (fraction_bits + 2),
            kept_accumulator < 1 << (fraction_bits + 1),
            (kept << shift) <= whole,
            whole - (kept << shift) < (one << shift),
            implies(shift <= fraction_bits - PRODUCT_FRACTION_BITS + extra_shift, equal(kept << shift, whole)),
            (kept_accumulator << drop) <= accumulator,
            accumulator - (kept_accumulator << drop) < (one << drop),
            implies(equal(gap, 0), equal(kept_accumulator << drop, accumulator)),
        ),
    )


def _step_sum(constants: Constants, *, one_is_exact: bool = True) -> Statement:
    # loss_i: what the cut of term i loses, in units of the step; the last one is the accumulator's.
    terms = int(constants["STEP_TERMS"])
    losses = [real(f"loss_{i:02d}") for i in range(terms)]
    accumulator_loss, first = real("loss_accumulator"), boolean("first")
    everything = [*losses, accumulator_loss]
    premises = [every(loss <= 1, -loss <= 1) for loss in everything]
    premises.append(implies(first, equal(accumulator_loss, 0)))
    if one_is_exact:
        exact_product = some(*(equal(loss, 0) for loss in losses))
        premises.append(choose(first, exact_product, some(exact_product, equal(accumulator_loss, 0))))
    lossy = choose(first, number(constants["FIRST_STEP_LOSSY"], "Real"), constants["STEP_LOSSY"])
    return Statement(
        logic="QF_LRA",
        premises=tuple(premises),
        claim=every(total(everything) <= lossy, -total(everything) <= lossy),
    )


def _output_cut(constants: Constants, *, spare: int = 0, away: int = 0, exact_bits: int = 0) -> Statement:
    fraction_bits = _fraction_bits(constants)
    magnitude, exponent = bits("magnitude", WIDTH), bits("exponent", WIDTH)
    one = number(1, magnitude.sort)
    cut = cut_to_fraction_bits(magnitude, exponent, fraction_bits) + away
    largest = (int(constants["STEP_TERMS"]) + 1) << (fraction_bits + 2)
    unit = choose(exponent <= fraction_bits, number(0, magnitude.sort), exponent - fraction_bits)
    return Statement(
        logic="QF_BV",
        premises=(magnitude <= largest, equal(magnitude >> exponent, 1)),
        claim=every(
            magnitude < 1 << 24,
            cut <= magnitude,
            ((magnitude - cut) << (fraction_bits + spare)) < (one << exponent),
            (one << exponent) <= magnitude,
            implies(exponent <= fraction_bits + exact_bits, equal(cut, magnitude)),
            equal((cut >> unit) << unit, cut),
        ),
    )


def _accumulator_magnitude(_: Constants, *, towards_zero: bool = True) -> Statement:
    # One more addend of a step: its cut value against the exact product; and the cut of the finished sum.
    sum_so_far, bound, cut, product, result = reals("sum bound cut product result")
    term = absolute(cut) <= absolute(product) if towards_zero else absolute(cut) <= absolute(product) + 1
    return Statement(
        logic="QF_LRA",
        premises=(absolute(sum_so_far) <= bound, term, absolute(result) <= absolute(sum_so_far + cut)),
        claim=every(
            absolute(sum_so_far + cut) <= bound + absolute(product), absolute(result) <= bound + absolute(product)
        ),
    )


def _dot_error(
    constants: Constants, *, output: bool = True, raised_norm: bool = True, accumulator_votes: bool = True
) -> Statement:
    # One step. accumulator, following: c_(t-1) and c_t; exact: the real sum so far; products: the step's exact sum.
    accumulator, following, exact, products = reals("accumulator following exact products")
    # prefix, prefix_next: ||q_<t||, ||q_<=t||; block: |q~_t|_inf; key_max: |k~|_inf; n: the stored ||k~||.
    prefix, prefix_next, block, key_max, n, error = reals("prefix prefix_next block key_max n error")
    # step_power, output_power: 2^E_t and 2^eo_t.
    step_power, output_power = reals("step_power output_power")
    unit = Fraction(1, 2 ** _fraction_bits(constants))
    vote = maximum(block * key_max, absolute(accumulator))
    largest = maximum(block, prefix) if accumulator_votes else block
    next_error = error + constants["STEP_LOSSY"] * unit * largest
    if output:
        next_error = next_error + unit * prefix_next
    loss = absolute(following - (accumulator + products))
    return Statement(
        logic="QF_NRA",
        premises=(
            block >= 0,
            n >= 0,
            key_max <= n if raised_norm else key_max <= 2 * n,
            absolute(accumulator) <= prefix * n,
            step_power <= vote,
            output_power <= prefix_next * n,
            loss <= unit * constants["STEP_TERMS"] * step_power + unit * output_power,
            absolute(accumulator - exact) <= error * n,
        ),
        claim=absolute(following - (exact + products)) <= next_error * n,
    )


def _dot_error_total(constants: Constants, *, skipped: int = -1) -> Statement:
    # Per unit of n. error_t: |c_t - exact|; loss_t: the largest magnitude in step t; output_t: ||q_<=t||.
    unit = Fraction(1, 2 ** _fraction_bits(constants))
    steps, terms = int(constants["STEPS"]), constants["STEP_TERMS"]
    error, premises, parts = number(0, "Real"), [], []
    for t in range(steps):
        loss, output, after = reals(f"loss_{t} output_{t} error_{t}")
        lossy = terms - 1 if t == 0 else terms
        premises.append(after <= error + unit * (lossy * loss + output))
        error = after
        budget = constants["FIRST_STEP_LOSSY"] if t == 0 else constants["STEP_LOSSY"]
        if t != skipped:
            parts += [budget * loss, output]
    return Statement(logic="QF_LRA", premises=tuple(premises), claim=error <= unit * total(parts))


def _signed_loss(_: Constants, *, towards_zero: bool = True) -> Statement:
    # One term of a step: product, and what alignment leaves of it. total, exact: the sums so far; raised, lowered: so
    # many units, as a magnitude, as terms so far could raise or lower the total.
    product, cut, unit, total_sum, exact, raised, lowered = reals("product cut unit total exact raised lowered")
    kept = every(
        implies(product >= 0, every(cut >= 0, cut <= product)), implies(product <= 0, every(cut <= 0, cut >= product))
    )
    return Statement(
        logic="QF_LRA",
        premises=(
            *((kept,) if towards_zero else ()),
            absolute(product - cut) <= unit,
            total_sum - exact <= raised,
            exact - total_sum <= lowered,
        ),
        claim=every(
            (total_sum + cut) - (exact + product) <= raised + choose(product < 0, unit, 0),
            (exact + product) - (total_sum + cut) <= lowered + choose(product > 0, unit, 0),
        ),
    )


def _signed_step(constants: Constants, *, accumulator_cut: bool = True, output: bool = True) -> Statement:
    # One step, one direction. wrong: what the step's products may raise, per unit of n: the sum of m_t over those that
    # are negative. reach: m_t; prefix_next: ||q_<=t||; before: the error so far; the other names as in dot_error.
    accumulator, aligned, following, exact, products, cut = reals("accumulator aligned following exact products cut")
    before, wrong, reach, prefix_next, n, step_power, output_power = reals(
        "before wrong reach prefix_next n step_power output_power"
    )
    unit = Fraction(1, 2 ** _fraction_bits(constants))
    after = before + unit * wrong
    if accumulator_cut:
        after = after + unit * reach
    if output:
        after = after + unit * prefix_next
    return Statement(
        logic="QF_NRA",
        premises=(
            accumulator - exact <= before * n,
            # signed_loss, with units of at most 2^-13 m_t n.
            cut - products <= unit * (wrong * n),
            # step_alignment, output_cut; the largest magnitude as in dot_error.
            aligned - accumulator <= unit * step_power,
            step_power <= reach * n,
            following - (aligned + cut) <= unit * output_power,
            output_power <= prefix_next * n,
        ),
        claim=following - (exact + products) <= after * n,
    )


def _shared_signs(_: Constants, *, larger: bool = True) -> Statement:
    # Element i of all vectors and of one key. harm: the sum so far of f_v m_vt over the vectors whose product is
    # negative; plus, minus: those with a negative and with a positive element. One more vector, with share = f_v m_vt.
    harm, plus, minus, share, element, key = reals("harm plus minus share element key")
    zero = number(0, "Real")
    plus_next, minus_next = plus + choose(element < 0, share, zero), minus + choose(element > 0, share, zero)
    reached = maximum(plus_next, minus_next) if larger else Fraction(1, 2) * (plus_next + minus_next)
    met = harm + choose(element * key < 0, share, zero)
    return Statement(
        logic="QF_NRA",
        premises=(
            share >= 0,
            plus >= 0,
            harm <= choose(key > 0, plus, choose(key < 0, minus, zero)),
        ),
        claim=every(met <= choose(key > 0, plus_next, choose(key < 0, minus_next, zero)), met <= reached),
    )


def _computed_dots(_: Constants, *, negative: bool = True, projected: bool = True) -> Statement:
    # computed and exact dot of one head: at most raised above it, at most lowered below it.
    computed, exact, raised, lowered = reals("computed exact raised lowered")
    weight, share, multiplier = reals("weight share multiplier")
    return Statement(
        logic="QF_NRA",
        premises=(
            raised >= 0,
            lowered >= 0,
            computed - exact <= raised,
            exact - computed <= lowered,
            share >= 0,
            multiplier >= 0,
            weight >= multiplier if negative else weight <= multiplier,
        ),
        claim=every(
            weight * relu(computed) <= weight * relu(exact) + weight * raised,
            share * relu(exact) <= share * relu(computed) + (share if projected else number(0, "Real")) * lowered,
            -(weight * relu(computed)) <= -(multiplier * relu(exact)) + multiplier * lowered,
        ),
    )


def _dot_magnitude(_: Constants, *, own_error: bool = True) -> Statement:
    # vector_norm, key_norm: ||y|| and ||k||; exact and computed dot of y and k; error: D(y).
    exact, computed, vector_norm, key_norm, n, error = reals("exact computed vector_norm key_norm n error")
    magnitude = vector_norm + error if own_error else vector_norm
    return Statement(
        logic="QF_NRA",
        premises=(
            vector_norm >= 0,
            key_norm <= n,
            absolute(exact) <= vector_norm * key_norm,
            absolute(computed - exact) <= error * n,
        ),
        claim=every(absolute(computed) <= magnitude * n, relu(computed) <= magnitude * n),
    )


LEMMAS = (
    Lemma(
        id="e4m3_products_exact",
        statement="The product of two E4M3 values is a float32 value.",
        theme=THEME,
        build=_e4m3_products_exact,
        speaks_of=("dosa_ref.tensorcore.dot_scalar", "dosa_ref.tensorcore.dots"),
        mutants=(
            Mutant(
                id="float16",
                broken="the product is kept in float16",
                build=partial(_e4m3_products_exact, sort=FLOAT16),
            ),
            Mutant(id="nan", broken="NaN codes allowed", build=partial(_e4m3_products_exact, nan=True)),
        ),
    ),
    Lemma(
        id="exponent_vote",
        statement="The exponent e(x) that x brings to the alignment satisfies 2^e(x) <= max(|x|, smallest normal).",
        theme=THEME,
        build=_exponent_vote,
        constants=("E4M3_MIN_NORMAL", "E4M3_MIN_SUBNORMAL"),
        speaks_of=("dosa_ref.tensorcore.dot_scalar", "dosa_ref.guard.dot_error", "dosa_ref.bound.key_norms"),
        mutants=(
            Mutant(
                id="plain_magnitude",
                broken="subnormals vote with their own magnitude",
                build=partial(_exponent_vote, raised=False),
            ),
            Mutant(
                id="small_floor",
                broken="floor of half the smallest normal",
                constants={"E4M3_MIN_NORMAL": Fraction(1, 128)},
            ),
        ),
        note="An accumulator is a multiple of 2^-25 (products vote with at least -12), so it is a normal float32 and "
        "votes with the exponent of its own leading bit.",
    ),
    Lemma(
        id="step_alignment",
        statement="Aligning a term cuts less than one unit and never grows it; a product loses nothing up to shift 7, "
        "an accumulator nothing at shift 0.",
        theme=THEME,
        build=_step_alignment,
        constants=("FRACTION_BITS",),
        speaks_of=("dosa_ref.tensorcore.dot_scalar", "dosa_ref.guard.dot_error"),
        mutants=(
            Mutant(id="shift_8", broken="no loss up to shift 8", build=partial(_step_alignment, extra_shift=1)),
            Mutant(id="away_from_zero", broken="cut away from zero", build=partial(_step_alignment, away=1)),
            Mutant(
                id="long_accumulator",
                broken="an accumulator of 24 bits loses nothing",
                build=partial(_step_alignment, short_accumulator=False),
            ),
        ),
    ),
    Lemma(
        id="step_sum",
        statement="The cuts of one step lose at most 31 units without an accumulator and 32 with one.",
        theme=THEME,
        build=_step_sum,
        constants=("STEP_TERMS", "FIRST_STEP_LOSSY", "STEP_LOSSY"),
        speaks_of=("dosa_ref.guard.dot_error",),
        mutants=(
            Mutant(id="first_30", broken="30 units in the first step", constants={"FIRST_STEP_LOSSY": Fraction(30)}),
            Mutant(id="later_31", broken="31 units in a later step", constants={"STEP_LOSSY": Fraction(31)}),
            Mutant(id="all_lossy", broken="every term may lose", build=partial(_step_sum, one_is_exact=False)),
        ),
    ),
    Lemma(
        id="output_cut",
        statement="Cutting the sum to 13 fraction bits loses less than 2^(eo - 13), nothing below 2^14; 2^eo <= |sum|.",
        theme=THEME,
        build=_output_cut,
        constants=("FRACTION_BITS", "STEP_TERMS"),
        speaks_of=("dosa_ref.tensorcore.dot_scalar", "dosa_ref.guard.dot_error"),
        mutants=(
            Mutant(id="half_loss", broken="loss below 2^(eo - 14)", build=partial(_output_cut, spare=1)),
            Mutant(id="away_from_zero", broken="cut away from zero", build=partial(_output_cut, away=1)),
            Mutant(id="exact_15_bits", broken="15 bits survive", build=partial(_output_cut, exact_bits=1)),
        ),
    ),
    Lemma(
        id="accumulator_magnitude",
        statement="The accumulator never exceeds the sum of the products' magnitudes (induction over addends).",
        theme=THEME,
        build=_accumulator_magnitude,
        speaks_of=("dosa_ref.guard.dot_error",),
        mutants=(
            Mutant(
                id="grows", broken="a cut may grow a term", build=partial(_accumulator_magnitude, towards_zero=False)
            ),
        ),
    ),
    Lemma(
        id="dot_error",
        statement="One step adds at most 2^-13 (32 max(|q~_t|_inf, ||q_<t||) + ||q_<=t||) n to the error of the dot.",
        theme=THEME,
        build=_dot_error,
        constants=("FRACTION_BITS", "STEP_TERMS", "STEP_LOSSY"),
        speaks_of=("dosa_ref.guard.dot_error",),
        mutants=(
            Mutant(id="no_output_cut", broken="the cut of the sum left out", build=partial(_dot_error, output=False)),
            Mutant(id="plain_norm", broken="n may be below |k~|_inf", build=partial(_dot_error, raised_norm=False)),
            Mutant(
                id="products_only",
                broken="the accumulator does not vote",
                build=partial(_dot_error, accumulator_votes=False),
            ),
            Mutant(id="later_31", broken="31 units in a later step", constants={"STEP_LOSSY": Fraction(31)}),
        ),
    ),
    Lemma(
        id="dot_error_total",
        statement="Over the four steps the errors add up to D(q) n.",
        theme=THEME,
        build=_dot_error_total,
        constants=("FRACTION_BITS", "STEPS", "STEP_TERMS", "FIRST_STEP_LOSSY", "STEP_LOSSY"),
        speaks_of=("dosa_ref.guard.dot_error",),
        mutants=(
            Mutant(id="no_last_step", broken="the last step left out", build=partial(_dot_error_total, skipped=3)),
            Mutant(id="first_30", broken="30 units in the first step", constants={"FIRST_STEP_LOSSY": Fraction(30)}),
        ),
    ),
    Lemma(
        id="signed_loss",
        statement="A term cut towards zero raises a sum only if it is negative, lowers it only if positive, by a unit.",
        theme=THEME,
        build=_signed_loss,
        speaks_of=("dosa_ref.tensorcore.dot_scalar", "dosa_ref.guard.joint_error"),
        mutants=(
            Mutant(id="rounded", broken="rounded to either side", build=partial(_signed_loss, towards_zero=False)),
        ),
        note="`step_alignment` gives the unit; zero products lose nothing.",
    ),
    Lemma(
        id="signed_step",
        statement="One step raises a dot by at most 2^-13 (m_t times its negative products, m_t, ||q_<=t||) n in all; "
        "likewise lowers.",
        theme=THEME,
        build=_signed_step,
        constants=("FRACTION_BITS",),
        speaks_of=("dosa_ref.guard.joint_error",),
        mutants=(
            Mutant(
                id="no_accumulator",
                broken="cut of the accumulator left out",
                build=partial(_signed_step, accumulator_cut=False),
            ),
            Mutant(id="no_output_cut", broken="cut of the sum left out", build=partial(_signed_step, output=False)),
        ),
        note="m_t = max(|q~_t|_inf, ||q_<t||) as in `dot_error`; the first step has no accumulator. Lowering is the "
        "same with all signs changed.",
    ),
    Lemma(
        id="shared_signs",
        statement="Vectors with a negative product at element i weigh at most max(P_i, N_i): a key has one sign there.",
        theme=THEME,
        build=_shared_signs,
        speaks_of=("dosa_ref.guard.joint_error",),
        mutants=(Mutant(id="mean", broken="their mean for the larger", build=partial(_shared_signs, larger=False)),),
        note="For a vector that errs downward the signs of its elements are changed.",
    ),
    Lemma(
        id="dot_magnitude",
        statement="A computed dot has |d_y| <= mag(y) n with mag(y) = ||y|| + D(y), and so has its relu.",
        theme=THEME,
        build=_dot_magnitude,
        speaks_of=("dosa_ref.guard.magnitude",),
        mutants=(Mutant(id="norm_only", broken="mag(y) = ||y||", build=partial(_dot_magnitude, own_error=False)),),
    ),
    Lemma(
        id="computed_dots",
        statement="With x - l <= d <= x + r: w relu(d) <= w (relu(x) + r), a relu(x) <= a (relu(d) + l) and "
        "-|w| relu(d) <= -lambda relu(x) + lambda l.",
        theme=THEME,
        build=_computed_dots,
        speaks_of=("dosa_ref.guard.dot_error",),
        mutants=(
            Mutant(id="lambda_above", broken="lambda above |w|", build=partial(_computed_dots, negative=False)),
            Mutant(id="no_projected", broken="projected_dot left out", build=partial(_computed_dots, projected=False)),
        ),
    ),
)
