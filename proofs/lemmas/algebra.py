"""Real algebra of the bound: relu, aggregation, projection, Cauchy-Schwarz, residuals.

Facts about sums over heads or dimensions are induction steps: the variables stand for the sums so far and for one more
term, so the fact holds for any number of heads and any dimension. The base case is the empty sum, where all are zero.
"""

from __future__ import annotations

from functools import partial

from proofs.encodings import absolute, maximum, relu
from proofs.lemma import Constants, Lemma, Mutant, Statement
from proofs.terms import Term, boolean, choose, equal, every, iff, number, real, reals

THEME = "algebra"
ZERO = number(0, "Real")


def _relu_subadditive(_: Constants, *, sign: int = 1) -> Statement:
    a, b = reals("a b")
    return Statement(logic="QF_LRA", premises=(), claim=relu(a + b) <= relu(a) + sign * relu(b))


def _relu_homogeneous(_: Constants, *, non_negative: bool = True) -> Statement:
    a, x = reals("a x")
    premises = (a >= 0,) if non_negative else ()
    return Statement(logic="QF_NRA", premises=premises, claim=equal(relu(a * x), a * relu(x)))


def _relu_lipschitz(_: Constants, *, share: int = 1) -> Statement:
    computed, exact, error = reals("computed exact error")
    return Statement(
        logic="QF_LRA",
        premises=(computed - exact <= error, exact - computed <= error),
        claim=every(
            share * relu(computed) <= share * relu(exact) + error, share * relu(exact) <= share * relu(computed) + error
        ),
    )


def _aggregation(_: Constants, *, negative: bool = True, capped: bool = True, same_sign: bool = True) -> Statement:
    # y and signed are the sums so far of lambda_h x_h and of w_h relu(x_h), over any negative heads.
    y, signed, w, multiplier, x = reals("y signed w multiplier x")
    premises: list[Term] = [signed <= -relu(y)]
    premises.append(w <= 0 if negative else w >= 0)
    if same_sign:
        premises.append(multiplier >= 0)
    if capped:
        premises.append(multiplier <= absolute(w))
    return Statement(
        logic="QF_NRA",
        premises=tuple(premises),
        claim=signed + w * relu(x) <= -relu(y + multiplier * x),
    )


def _several_aggregates(_: Constants, *, shared: bool = True) -> Statement:
    # One head, several aggregates. covered, spent: the sums so far of lambda_j relu(x) and of lambda_j.
    covered, spent, multiplier, magnitude, x = reals("covered spent multiplier magnitude x")
    capped = spent + multiplier <= magnitude if shared else every(spent <= magnitude, multiplier <= magnitude)
    together = covered + multiplier * relu(x)
    return Statement(
        logic="QF_NRA",
        premises=(covered <= spent * relu(x), capped),
        claim=every(together <= (spent + multiplier) * relu(x), -(magnitude * relu(x)) <= -together),
    )


def _linear_negative(_: Constants, *, negative: bool = True, capped: bool = True, same_sign: bool = True) -> Statement:
    # y and signed are the sums so far of lambda_h x_h and of w_h relu(x_h), over any negative heads.
    y, signed, w, multiplier, x = reals("y signed w multiplier x")
    premises: list[Term] = [signed <= -y]
    premises.append(w <= 0 if negative else w >= 0)
    if same_sign:
        premises.append(multiplier >= 0)
    if capped:
        premises.append(multiplier <= absolute(w))
    return Statement(logic="QF_NRA", premises=tuple(premises), claim=signed + w * relu(x) <= -(y + multiplier * x))


def _projection(_: Constants, *, non_negative: bool = True) -> Statement:
    # x = (sum so far of a_j x_j) + residual, bound = (sum so far of a_j relu(x_j)) + relu(residual).
    x, bound, a, column = reals("x bound a column")
    premises = (relu(x) <= bound, *((a >= 0,) if non_negative else ()))
    return Statement(
        logic="QF_NRA",
        premises=premises,
        claim=relu(x + a * column) <= bound + a * relu(column),
    )


def _lagrange_identity(_: Constants, *, weight: int = 1) -> Statement:
    x, y, a, b = reals("x y a b")
    left = (x * x + a * a) * (y * y + b * b)
    dot, wedge = x * y + a * b, x * b - a * y
    return Statement(
        logic="QF_NRA", premises=(), claim=every(equal(left, dot * dot + weight * (wedge * wedge)), dot * dot <= left)
    )


def _cauchy_schwarz_step(_: Constants, *, covers: bool = True) -> Statement:
    # norms: X Y, the product of any upper bounds of the norms so far; dot: the inner product so far; added: a b, of
    # one more coordinate; x_square, y_square: X^2 + a^2 and Y^2 + b^2.
    dot, norms, added, x_square, y_square = reals("dot norms added x_square y_square")
    x_next, y_next = reals("x_next y_next")
    reach = norms + added
    return Statement(
        logic="QF_NRA",
        premises=(
            x_next >= 0,
            y_next >= 0,
            dot <= norms,
            x_square >= 0,
            x_next * x_next >= x_square if covers else x_next * x_next <= x_square,
            y_next * y_next >= y_square,
            # lagrange_identity.
            reach * reach <= x_square * y_square,
        ),
        claim=dot + added <= x_next * y_next,
    )


def _active_set_norm(_: Constants, *, positive_part: bool = True, diagonal: bool = True) -> Statement:
    # Adding head g. square: squared norm of the sum of the active R_g' so far; cross: its inner product with R_g;
    # cover, cross_cover: the sums of max(R.R', 0) over all pairs so far, and over the pairs of g with earlier heads.
    square, cover, cross, cross_cover, own = reals("square cover cross cross_cover own")
    inner, coordinate, added = reals("inner coordinate added")
    active, other_active = boolean("active"), boolean("other_active")
    part = maximum(inner, ZERO) if positive_part else inner
    next_cover = cover + 2 * cross_cover + (own if diagonal else ZERO)
    return Statement(
        logic="QF_NRA",
        premises=(square <= cover, cross <= cross_cover, own >= 0, cross_cover >= 0),
        claim=every(
            # One earlier head g' joins the inner product of R_g with the active sum.
            cross + choose(other_active, inner, 0) <= cross_cover + part,
            cross_cover + maximum(inner, ZERO) >= 0,
            # R_g joins the sum itself: |v + R|^2 = |v|^2 + 2 v.R + |R|^2, coordinate by coordinate.
            equal(
                (coordinate + added) * (coordinate + added),
                coordinate * coordinate + 2 * (coordinate * added) + added * added,
            ),
            choose(active, square + 2 * cross + own, square) <= next_cover,
        ),
    )


def _residual_geometry(_: Constants, *, squared: bool = True) -> Statement:
    # part: sum over all heads of relu(R_g . k) so far; active_dot: sum of R_g . k over the active heads so far.
    part, active_dot, dot = reals("part active_dot dot")
    final, key_norm, sum_norm, rho, cover = reals("final key_norm sum_norm rho cover")
    active = boolean("active")
    return Statement(
        logic="QF_NRA",
        premises=(
            equal(part, active_dot),
            iff(active, dot > 0),
            key_norm >= 0,
            rho >= 0,
            final <= key_norm * sum_norm,
            sum_norm * sum_norm <= cover,
            rho * rho >= cover if squared else rho >= cover,
        ),
        claim=every(equal(part + relu(dot), active_dot + choose(active, dot, 0)), final <= key_norm * rho),
    )


def _signed_sum_norm(_: Constants, *, absolute_part: bool = True) -> Statement:
    # The same induction as for the active set, with a sign in front of every head instead of a choice.
    square, cover, cross, cross_cover, own, inner = reals("square cover cross cross_cover own inner")
    sign, other_sign = real("sign"), real("other_sign")
    part = absolute(inner) if absolute_part else maximum(inner, ZERO)
    signs = tuple(equal(absolute(s), 1) for s in (sign, other_sign))
    return Statement(
        logic="QF_NRA",
        premises=(*signs, square <= cover, cross <= cross_cover, -cross <= cross_cover),
        claim=every(
            cross + other_sign * inner <= cross_cover + part,
            -(cross + other_sign * inner) <= cross_cover + part,
            square + 2 * (sign * cross) + sign * sign * own <= cover + 2 * cross_cover + own,
        ),
    )


def _centred_residual(_: Constants, *, halved: bool = True) -> Statement:
    # part, linear, size: sums so far of relu(R_g.k), of R_g.k and of |R_g.k|; signed: that of eps_g R_g.k.
    part, linear, size, signed, dot = reals("part linear size signed dot")
    key_norm, sum_norm, rho, cover, whole, final = reals("key_norm sum_norm rho cover whole final")
    sign = choose(dot >= 0, number(1, "Real"), -1)
    share = 1 if halved else 2
    return Statement(
        logic="QF_NRA",
        premises=(
            equal(2 * part, linear + size),
            equal(size, signed),
            key_norm >= 0,
            rho >= 0,
            whole <= key_norm * sum_norm,
            sum_norm * sum_norm <= cover,
            rho * rho >= cover,
            equal(2 * final, linear + whole),
        ),
        claim=every(
            equal(2 * (part + relu(dot)), (linear + dot) + (size + absolute(dot))),
            equal(size + absolute(dot), signed + sign * dot),
            2 * final <= share * linear + key_norm * rho,
        ),
    )


def _column_rounding(_: Constants, *, own_error: bool = True, norm_covers: bool = True) -> Statement:
    # v = scale * y + e. exact, column: v.k and y.k; rounding: a bound of ||e||; computed: the FP8 dot of y and k.
    exact, column, computed, scale = reals("exact column computed scale")
    rounding, key_norm, n, dot_error = reals("rounding key_norm n dot_error")
    slack = scale * dot_error + rounding if own_error else rounding
    return Statement(
        logic="QF_NRA",
        premises=(
            scale > 0,
            rounding >= 0,
            key_norm <= n if norm_covers else n >= 0,
            absolute(exact - scale * column) <= rounding * key_norm,
            dot_error * n >= 0,
            computed - column <= dot_error * n,
        ),
        claim=-relu(exact) <= -(scale * relu(computed)) + slack * n,
    )


def _linear_column(
    _: Constants, *, own_error: bool = True, norm_covers: bool = True, rounding_covered: bool = True
) -> Statement:
    # v = scale * y + e. exact, column, error: v.k, y.k and e.k; computed: the FP8 dot of y and k, at most lowered below
    # the real one; size: the sum of |R_g.k| / 2; whole: the sum of |V.k| over all V, that is all R_g / 2 and e; rho:
    # the root over all of them.
    exact, column, error, computed, scale, lowered = reals("exact column error computed scale lowered")
    size, whole, rho, key_norm, n = reals("size whole rho key_norm n")
    return Statement(
        logic="QF_NRA",
        premises=(
            scale > 0,
            rho >= 0,
            key_norm <= n if norm_covers else n >= 0,
            equal(exact, scale * column + error),
            column - computed <= lowered,
            equal(whole, size + absolute(error) if rounding_covered else size),
            # signed_sum_norm and residual_geometry, for all V.
            whole <= key_norm * rho,
        ),
        claim=exact + size <= scale * (computed + lowered if own_error else computed) + rho * n,
    )


def _column_rounding_step(_: Constants, *, added: bool = True) -> Statement:
    # difference: v.k - scale * y.k so far, equal to e.k so far; one more coordinate.
    difference, y, e, k, scale = reals("difference y e k scale")
    v = scale * y + e if added else scale * y - e
    return Statement(logic="QF_NRA", premises=(), claim=equal(difference + v * k - scale * (y * k), difference + e * k))


def _scale_monotone(_: Constants, *, positive: bool = True) -> Statement:
    scale, bound, value = reals("scale bound value")
    premises = (scale > 0 if positive else scale < 0, bound >= value)
    return Statement(logic="QF_NRA", premises=premises, claim=scale * bound >= scale * value)


def _coefficient_round_up(_: Constants, *, up: bool = True) -> Statement:
    # A retained column: its activation is the same computed number in the score and in the bound.
    weight, share, coefficient, activation = reals("weight share coefficient activation")
    exact = weight + share
    return Statement(
        logic="QF_NRA",
        premises=(activation >= 0, coefficient >= exact if up else coefficient <= exact),
        claim=coefficient * activation >= weight * activation + share * activation,
    )


LEMMAS = (
    Lemma(
        id="relu_subadditive",
        statement="relu(a + b) <= relu(a) + relu(b).",
        theme=THEME,
        build=_relu_subadditive,
        speaks_of=("dosa_ref.bound.build_row_bound",),
        mutants=(Mutant(id="wrong_sign", broken="minus for plus", build=partial(_relu_subadditive, sign=-1)),),
    ),
    Lemma(
        id="relu_homogeneous",
        statement="relu(a x) = a relu(x) for a >= 0.",
        theme=THEME,
        build=_relu_homogeneous,
        speaks_of=("dosa_ref.bound.build_row_bound",),
        mutants=(
            Mutant(id="any_factor", broken="a may be negative", build=partial(_relu_homogeneous, non_negative=False)),
        ),
    ),
    Lemma(
        id="relu_lipschitz",
        statement="If |d - x| <= e then |relu(d) - relu(x)| <= e.",
        theme=THEME,
        build=_relu_lipschitz,
        speaks_of=("dosa_ref.guard.dot_error",),
        mutants=(Mutant(id="half_error", broken="half the error is enough", build=partial(_relu_lipschitz, share=2)),),
    ),
    Lemma(
        id="aggregation",
        statement="For any w_h <= 0 and 0 <= lambda_h <= |w_h|: sum w_h relu(x_h) <= -relu(sum lambda_h x_h).",
        theme=THEME,
        build=_aggregation,
        speaks_of=("dosa_ref.bound.build_row_bound",),
        mutants=(
            Mutant(id="positive_head", broken="a positive head", build=partial(_aggregation, negative=False)),
            Mutant(id="uncapped", broken="lambda_h may exceed |w_h|", build=partial(_aggregation, capped=False)),
            Mutant(id="wrong_sign", broken="lambda_h may be negative", build=partial(_aggregation, same_sign=False)),
        ),
    ),
    Lemma(
        id="several_aggregates",
        statement="If sum_j lambda_j <= |w| then -|w| relu(x) <= -sum_j lambda_j relu(x): any number of aggregates.",
        theme=THEME,
        build=_several_aggregates,
        speaks_of=("dosa_ref.bound.check_row_bound", "dosa_ref.guard.guard_terms"),
        mutants=(
            Mutant(
                id="each_capped",
                broken="each lambda_j alone at most |w|",
                build=partial(_several_aggregates, shared=False),
            ),
        ),
        note="Each aggregate is then `aggregation` or `linear_negative` with the weight -lambda_j.",
    ),
    Lemma(
        id="linear_negative",
        statement="For any w_h <= 0 and 0 <= lambda_h <= |w_h|: sum w_h relu(x_h) <= -sum lambda_h x_h.",
        theme=THEME,
        build=_linear_negative,
        speaks_of=("dosa_ref.bound.build_row_bound",),
        mutants=(
            Mutant(id="positive_head", broken="a positive head", build=partial(_linear_negative, negative=False)),
            Mutant(id="uncapped", broken="lambda_h may exceed |w_h|", build=partial(_linear_negative, capped=False)),
            Mutant(
                id="wrong_sign", broken="lambda_h may be negative", build=partial(_linear_negative, same_sign=False)
            ),
        ),
    ),
    Lemma(
        id="projection",
        statement="If x = sum a_j x_j + r with a_j >= 0 then relu(x) <= sum a_j relu(x_j) + relu(r).",
        theme=THEME,
        build=_projection,
        speaks_of=("dosa_ref.bound.build_row_bound",),
        mutants=(
            Mutant(id="negative_share", broken="a_j may be negative", build=partial(_projection, non_negative=False)),
        ),
    ),
    Lemma(
        id="lagrange_identity",
        statement="(x^2 + a^2)(y^2 + b^2) = (xy + ab)^2 + (xb - ay)^2, hence (xy + ab)^2 <= (x^2 + a^2)(y^2 + b^2).",
        theme=THEME,
        build=_lagrange_identity,
        speaks_of=("dosa_ref.guard.dot_error",),
        mutants=(
            Mutant(id="wrong_sign", broken="the square is subtracted", build=partial(_lagrange_identity, weight=-1)),
        ),
    ),
    Lemma(
        id="cauchy_schwarz_step",
        statement="If s <= XY, X'^2 >= X^2 + a^2 and Y'^2 >= Y^2 + b^2 then s + ab <= X'Y' (any dimension).",
        theme=THEME,
        build=_cauchy_schwarz_step,
        speaks_of=("dosa_ref.bound.key_norms", "dosa_ref.guard.dot_error"),
        mutants=(
            Mutant(
                id="norm_rounded_down",
                broken="the stored norm may be too small",
                build=partial(_cauchy_schwarz_step, covers=False),
            ),
        ),
    ),
    Lemma(
        id="active_set_norm",
        statement="||sum_{g in S} R_g||^2 <= sum_{g,g'} max(R_g . R_g', 0) for any set S (induction over heads).",
        theme=THEME,
        build=_active_set_norm,
        speaks_of=("dosa_ref.bound.build_row_bound",),
        mutants=(
            Mutant(
                id="plain_products",
                broken="negative inner products may reduce the cover",
                build=partial(_active_set_norm, positive_part=False),
            ),
            Mutant(id="no_diagonal", broken="||R_g||^2 left out", build=partial(_active_set_norm, diagonal=False)),
        ),
    ),
    Lemma(
        id="residual_geometry",
        statement="sum_g relu(R_g . k) <= ||k|| sqrt(sum_{g,g'} max(R_g . R_g', 0)).",
        theme=THEME,
        build=_residual_geometry,
        speaks_of=("dosa_ref.bound.build_row_bound",),
        mutants=(
            Mutant(
                id="no_root", broken="rho >= cover for rho^2 >= cover", build=partial(_residual_geometry, squared=False)
            ),
        ),
        note="Uses `cauchy_schwarz_step` (final <= ||k|| ||sum_S R_g||) and `active_set_norm` as premises.",
    ),
    Lemma(
        id="signed_sum_norm",
        statement="||sum_g eps_g R_g||^2 <= sum_{g,g'} |R_g . R_g'| for any signs eps_g (induction over heads).",
        theme=THEME,
        build=_signed_sum_norm,
        speaks_of=("dosa_ref.bound.build_row_bound",),
        mutants=(
            Mutant(
                id="positive_part_only",
                broken="max(R.R', 0) for |R.R'|",
                build=partial(_signed_sum_norm, absolute_part=False),
            ),
        ),
    ),
    Lemma(
        id="centred_residual",
        statement="sum_g relu(R_g . k) <= (sum_g R_g / 2) . k + ||k||/2 sqrt(sum_{g,g'} |R_g . R_g'|).",
        theme=THEME,
        build=_centred_residual,
        speaks_of=("dosa_ref.bound.build_row_bound",),
        mutants=(
            Mutant(
                id="whole_sum", broken="the linear column is not halved", build=partial(_centred_residual, halved=False)
            ),
        ),
        note="Uses `cauchy_schwarz_step` and `signed_sum_norm` as premises.",
    ),
    Lemma(
        id="column_rounding_step",
        statement="If v = 2^-m y + e then v.k - 2^-m y.k = e.k (any dimension, by induction).",
        theme=THEME,
        build=_column_rounding_step,
        speaks_of=("dosa_ref.bound.build_row_bound",),
        mutants=(
            Mutant(
                id="wrong_sign",
                broken="error of the other sign",
                build=partial(_column_rounding_step, added=False),
            ),
        ),
    ),
    Lemma(
        id="column_rounding",
        statement="For v = 2^-m y + e, an FP8 relu column: -relu(v.k) <= -2^-m relu(d_y) + (2^-m D(y) + ||e||) n.",
        theme=THEME,
        build=_column_rounding,
        speaks_of=("dosa_ref.bound.build_row_bound", "dosa_ref.guard.dot_error"),
        mutants=(
            Mutant(
                id="no_dot_error",
                broken="the column's own D(y) left out",
                build=partial(_column_rounding, own_error=False),
            ),
            Mutant(id="small_norm", broken="n may be below ||k||", build=partial(_column_rounding, norm_covers=False)),
        ),
    ),
    Lemma(
        id="linear_column",
        statement="For L = 2^-m y + e and y.k <= d_y + l: L.k + sum_g |R_g.k| / 2 <= 2^-m (d_y + l) + "
        "sqrt(sum |V.V'|) n, the V being all R_g / 2 and e.",
        theme=THEME,
        build=_linear_column,
        speaks_of=("dosa_ref.bound.build_row_bound", "dosa_ref.guard.guard_terms"),
        mutants=(
            Mutant(
                id="rounding_not_covered",
                broken="the root over the R_g/2 only",
                build=partial(_linear_column, rounding_covered=False),
            ),
            Mutant(
                id="no_dot_error",
                broken="the column's own D(y) left out",
                build=partial(_linear_column, own_error=False),
            ),
            Mutant(id="small_norm", broken="n may be below ||k||", build=partial(_linear_column, norm_covers=False)),
        ),
        note="Uses `column_rounding_step` and, for all V, `signed_sum_norm` and `residual_geometry` as premises; the "
        "halves are those of `centred_residual`.",
    ),
    Lemma(
        id="coefficient_round_up",
        statement="A coefficient rounded up never lowers its term, because the activation is >= 0.",
        theme=THEME,
        build=_coefficient_round_up,
        speaks_of=("dosa_ref.bound.build_row_bound",),
        mutants=(Mutant(id="round_down", broken="rounded down", build=partial(_coefficient_round_up, up=False)),),
    ),
    Lemma(
        id="scale_monotone",
        statement="For a key scale s > 0: B >= b gives s B >= s b.",
        theme=THEME,
        build=_scale_monotone,
        speaks_of=("dosa_ref.bound.evaluate",),
        mutants=(Mutant(id="negative_scale", broken="s < 0", build=partial(_scale_monotone, positive=False)),),
    ),
)
