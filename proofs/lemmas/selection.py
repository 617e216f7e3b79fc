"""Selection: threshold from seeds, strict pruning, ties, the shared order, merging of partial top-K lists.

Facts about counts are induction steps over the keys: a counter so far, one more key, the counter after it. The base
case is that both counters are 0.
"""

from __future__ import annotations

from functools import partial

from proofs.encodings import float32_before, maximum, order_code
from proofs.lemma import Constants, Lemma, Mutant, Statement
from proofs.terms import (
    Term,
    bits,
    boolean,
    choose,
    equal,
    every,
    float32_from_bits,
    float_equal,
    float_is_nan,
    float_less,
    iff,
    implies,
    integer,
    negate,
    number,
    real,
    some,
)

THEME = "selection"


def _count(condition: Term, weight: int = 1) -> Term:
    return choose(condition, number(weight, "Int"), 0)


def _threshold(_: Constants, *, distinct: bool = True, genuine: bool = True, enough: bool = True) -> Statement:
    # seeds: seeds so far with seed_score >= tau; above: keys so far with score > kth, the K-th best of all keys.
    seeds, above, topk = integer("seeds"), integer("above"), integer("topk")
    tau, kth, score, seed_score = real("tau"), real("kth"), real("score"), real("seed_score")
    is_seed = boolean("is_seed")
    premises = [tau > kth, seeds <= above, above < topk]
    if genuine:
        premises.append(equal(seed_score, score))
    counted = _count(every(is_seed, seed_score >= tau), 1 if distinct else 2)
    return Statement(
        logic="QF_LIRA",
        premises=tuple(premises),
        claim=every(
            seeds + counted <= above + _count(score > kth),
            # So tau > kth is impossible: at least K seeds reach tau, and fewer than K keys are above the K-th best.
            negate(seeds >= topk if enough else seeds >= topk - 1),
        ),
    )


def _strict_pruning(_: Constants, *, strict: bool = True, covered: bool = True) -> Statement:
    # One pruned key (bound, score, index); reach: keys so far with score >= tau; before: keys so far ahead of it.
    reach, before, topk = integer("reach"), integer("before"), integer("topk")
    score, bound, tau, other = real("score"), real("bound"), real("tau"), real("other")
    index, other_index = integer("index"), integer("other_index")
    premises = [reach <= before, bound < tau if strict else bound <= tau]
    if covered:
        premises.append(bound >= score)
    ahead = some(other > score, every(equal(other, score), other_index < index))
    return Statement(
        logic="QF_LIRA",
        premises=tuple(premises),
        claim=every(reach + _count(other >= tau) <= before + _count(ahead), implies(reach >= topk, before >= topk)),
    )


def _ties_kept(_: Constants, *, prune_equal: bool = False, emit_equal: bool = True) -> Statement:
    # A key that is in the top K: fewer than K keys are ahead of it, while at least K keys reach tau.
    score, bound, tau = real("score"), real("bound"), real("tau")
    reach, before, topk = integer("reach"), integer("before"), integer("topk")
    pruned = bound <= tau if prune_equal else bound < tau
    emitted = score >= tau if emit_equal else score > tau
    return Statement(
        logic="QF_LIRA",
        premises=(
            bound >= score,
            reach >= topk,
            before < topk,
            # strict_pruning, for the score itself: were it below tau, all that reach tau would be ahead.
            implies(score < tau, before >= reach),
        ),
        claim=every(negate(pruned), emitted),
    )


def _tie_break(_: Constants, *, nan: bool = False, distinct: bool = True, strict: bool = True) -> Statement:
    names = "abc"
    scores = [bits(f"score_{n}", 32) for n in names]
    indices = [bits(f"index_{n}", 32) for n in names]
    a, b, c = range(3)

    def before(x: int, y: int) -> Term:
        ahead = float32_before(scores[x], indices[x], scores[y], indices[y])
        if strict:
            return ahead
        tie = every(
            float_equal(float32_from_bits(scores[x]), float32_from_bits(scores[y])), equal(indices[x], indices[y])
        )
        return some(ahead, tie)

    # c may be NaN: nothing is ahead of a NaN and a NaN is ahead of nothing.
    premises = [] if nan else [negate(float_is_nan(float32_from_bits(score))) for score in scores[:2]]
    if distinct:
        premises.append(negate(equal(indices[a], indices[b])))
    return Statement(
        logic="QF_BVFP",
        premises=tuple(premises),
        claim=every(
            iff(before(a, b), negate(before(b, a))),
            negate(before(a, a)),
            implies(every(before(a, b), before(b, c)), before(a, c)),
        ),
    )


def _order_code(_: Constants, *, one_zero: bool = True, nan_is_least: bool = True) -> Statement:
    a, b = bits("a", 32), bits("b", 32)
    x, y = float32_from_bits(a), float32_from_bits(b)
    code_a, code_b = order_code(a), order_code(b)
    if not one_zero:
        code_a, code_b = (choose(s >= 1 << 31, ~s, s | (1 << 31)) for s in (a, b))
    ordered = every(iff(code_a < code_b, float_less(x, y)), iff(equal(code_a, code_b), float_equal(x, y)))
    numbers = every(negate(float_is_nan(x)), negate(float_is_nan(y)))
    claims = [implies(numbers, ordered) if nan_is_least else ordered]
    if one_zero:
        claims.append(iff(equal(code_a, 0), float_is_nan(x)))
    return Statement(logic="QF_BVFP", premises=(), claim=every(*claims))


def _code_bisection(_: Constants, *, up: bool = True, equal_counts: bool = True) -> Statement:
    # One step. The K-th largest code lies in low .. high: reached codes, K at least, are low or more; above codes,
    # fewer than K, are more than high. passing: codes that are middle or more, that is, more than middle - 1.
    names = "low high middle topk reached above passing"
    low, high, middle, topk, reached, above, passing = (integer(name) for name in names.split())
    length = high - low + 1 if up else high - low
    enough = passing >= topk if equal_counts else passing > topk
    next_low, next_reached = choose(enough, middle, low), choose(enough, passing, reached)
    next_high, next_above = choose(enough, high, middle - 1), choose(enough, above, passing)
    return Statement(
        logic="QF_LIA",
        premises=(
            low < high,
            # The middle is half the length above low, rounded down.
            2 * (middle - low) <= length,
            length < 2 * (middle - low) + 2,
            reached >= topk,
            above < topk,
        ),
        claim=every(
            next_reached >= topk,
            next_above < topk,
            next_low <= next_high,
            next_high - next_low < high - low,
        ),
    )


def _running_threshold(_: Constants, *, genuine: bool = True) -> Statement:
    # tau: that of the seeds; running: the K-th best of the keys scored so far; kth: the K-th best of all keys.
    tau, running, kth, bound = (real(n) for n in ("tau", "running", "kth", "bound"))
    return Statement(
        logic="QF_LRA",
        premises=(tau <= kth, *((running <= kth,) if genuine else ())),
        claim=every(maximum(tau, running) <= kth, implies(bound < tau, bound < maximum(tau, running))),
    )


def _overflow_rescan(_: Constants, *, emptied: bool = True, rescanned: bool = True) -> Statement:
    # One key of one chunk: how often it enters the row's running top-K.
    winner, survives, emitted, overflow, scanned = (
        boolean(n) for n in ("winner", "survives", "emitted", "overflow", "scanned")
    )
    listed = every(survives, emitted, negate(overflow)) if emptied else every(survives, emitted)
    premises = [implies(winner, every(survives, emitted)), implies(negate(overflow), negate(scanned))]
    if rescanned:
        premises.append(implies(overflow, scanned))
    times = _count(listed) + _count(scanned)
    return Statement(
        logic="QF_LIA", premises=tuple(premises), claim=every(times <= 1, implies(winner, equal(times, 1)))
    )


def _decode_threshold(_: Constants, *, ties: bool = True, enough: bool = True) -> Statement:
    # A key of the top K of a decode step. reach: keys with score >= tau; before: keys ahead of this one.
    score, tau = real("score"), real("tau")
    reach, before, topk = integer("reach"), integer("before"), integer("topk")
    thresholded = boolean("thresholded")
    written = some(negate(thresholded), score >= tau if ties else score > tau)
    return Statement(
        logic="QF_LIRA",
        premises=(
            before < topk,
            implies(thresholded, reach >= topk if enough else reach >= topk - 1),
            # strict_pruning, with the score as its own bound.
            implies(score < tau, before >= reach),
        ),
        claim=written,
    )


def _merge_dropped(_: Constants, *, kept: int = 0) -> Statement:
    # A key that its part dropped: in_part and in_all count the keys so far ahead of it, in its part and anywhere.
    in_part, in_all, topk = integer("in_part"), integer("in_all"), integer("topk")
    same_part, ahead = boolean("same_part"), boolean("ahead")
    return Statement(
        logic="QF_LIA",
        premises=(in_part <= in_all,),
        claim=every(
            in_part + _count(every(same_part, ahead)) <= in_all + _count(ahead),
            implies(in_part >= topk - kept, in_all >= topk),
        ),
    )


def _merge_partial(_: Constants, *, all_winners: bool = True) -> Statement:
    # One kept key x. winners: members of the union's top K so far; kept_ahead, ahead: kept keys and keys ahead of x.
    winners, kept_ahead, ahead, topk = (integer(n) for n in ("winners", "kept_ahead", "ahead", "topk"))
    is_winner, is_kept, is_ahead = boolean("is_winner"), boolean("is_kept"), boolean("is_ahead")
    x_is_winner = boolean("x_is_winner")
    premises = [
        kept_ahead <= ahead,
        implies(negate(x_is_winner), winners <= kept_ahead),
        # The order is total: a winner is ahead of every key that is none.
        implies(every(is_winner, negate(x_is_winner)), is_ahead),
        iff(x_is_winner, ahead < topk),
    ]
    if all_winners:
        premises.append(implies(is_winner, is_kept))
    next_kept = kept_ahead + _count(every(is_kept, is_ahead))
    return Statement(
        logic="QF_LIA",
        premises=tuple(premises),
        claim=every(
            next_kept <= ahead + _count(is_ahead),
            implies(negate(x_is_winner), winners + _count(is_winner) <= next_kept),
            # So x is among the K best of the kept keys exactly if it is among the K best of all.
            implies(x_is_winner, kept_ahead < topk),
            implies(every(negate(x_is_winner), winners >= topk), kept_ahead >= topk),
        ),
    )


LEMMAS = (
    Lemma(
        id="threshold",
        statement="The K-th best of at least K distinct genuine seeds never exceeds the K-th best of all keys.",
        theme=THEME,
        build=_threshold,
        speaks_of=("dosa_ref.select.select_prefill",),
        mutants=(
            Mutant(id="duplicate_seed", broken="one key is two seeds", build=partial(_threshold, distinct=False)),
            Mutant(
                id="foreign_score", broken="a seed's score is not its key's", build=partial(_threshold, genuine=False)
            ),
            Mutant(id="too_few", broken="K - 1 seeds reach tau", build=partial(_threshold, enough=False)),
        ),
    ),
    Lemma(
        id="strict_pruning",
        statement="A key with score <= U < tau has at least K keys ahead of it, whatever the ties.",
        theme=THEME,
        build=_strict_pruning,
        speaks_of=("dosa_ref.select.select_prefill", "dosa_ref.bound.evaluate"),
        mutants=(
            Mutant(id="not_strict", broken="U <= tau prunes", build=partial(_strict_pruning, strict=False)),
            Mutant(id="not_covered", broken="U may be below the score", build=partial(_strict_pruning, covered=False)),
        ),
    ),
    Lemma(
        id="ties_kept",
        statement="A member of the top K is never pruned and always emitted, also if its score or bound equals tau.",
        theme=THEME,
        build=_ties_kept,
        speaks_of=("dosa_ref.select.select_prefill",),
        mutants=(
            Mutant(id="prune_equal", broken="U <= tau prunes", build=partial(_ties_kept, prune_equal=True)),
            Mutant(id="emit_above", broken="only score > tau is emitted", build=partial(_ties_kept, emit_equal=False)),
        ),
    ),
    Lemma(
        id="tie_break_total_order",
        statement="(score descending, index ascending) is a strict total order, with -0 equal to +0 and no NaN.",
        theme=THEME,
        build=_tie_break,
        speaks_of=("dosa_ref.select.exact_topk", "dosa_ref.spec.TieBreak"),
        mutants=(
            Mutant(id="nan", broken="NaN scores allowed", build=partial(_tie_break, nan=True)),
            Mutant(id="same_index", broken="two keys share an index", build=partial(_tie_break, distinct=False)),
            Mutant(id="not_strict", broken="<= between indices", build=partial(_tie_break, strict=False)),
        ),
    ),
    Lemma(
        id="order_code",
        statement="The 32-bit code of a float32 sorts as its value; -0 and +0 share one, and only NaN has the code 0.",
        theme=THEME,
        build=_order_code,
        speaks_of=("dosa_gpu.kernels.topk.launch_topk", "dosa_ref.select.exact_topk"),
        mutants=(
            Mutant(id="signed_zero", broken="-0 has a code of its own", build=partial(_order_code, one_zero=False)),
            Mutant(id="nan", broken="NaN scores take part", build=partial(_order_code, nan_is_least=False)),
        ),
    ),
    Lemma(
        id="code_bisection",
        statement="Halving a range of codes by counting keeps the K-th largest code in it, and the range shrinks.",
        theme=THEME,
        build=_code_bisection,
        speaks_of=("dosa_gpu.kernels.topk.launch_topk", "dosa_gpu.kernels.topk.launch_kth"),
        mutants=(
            Mutant(id="rounded_down", broken="the middle may be low", build=partial(_code_bisection, up=False)),
            Mutant(id="exactly_k", broken="K codes are too few", build=partial(_code_bisection, equal_counts=False)),
        ),
        note="In the end low = high is the K-th code: K codes reach it, fewer are above it; which of the equal ones is "
        "`tie_rank`. An entry that K others are ahead of is dropped by `merge_dropped`, what lies below a code that K "
        "entries reach by `strict_pruning`.",
    ),
    Lemma(
        id="running_threshold",
        statement="The larger of two valid thresholds is valid, and skips whatever the smaller one skips.",
        theme=THEME,
        build=_running_threshold,
        speaks_of=("dosa_gpu.pipeline.pruned_rows",),
        mutants=(
            Mutant(
                id="foreign_list", broken="the list is of another row", build=partial(_running_threshold, genuine=False)
            ),
        ),
        note="That the K-th best of the keys scored so far is valid is `threshold`, with those keys as the seeds.",
    ),
    Lemma(
        id="overflow_rescan",
        statement="Whether a chunk's list fits or the chunk is rescanned, a winner is merged once and no key twice.",
        theme=THEME,
        build=_overflow_rescan,
        speaks_of=("dosa_gpu.pipeline.pruned_rows",),
        mutants=(
            Mutant(
                id="list_kept", broken="the full list is merged too", build=partial(_overflow_rescan, emptied=False)
            ),
            Mutant(
                id="cut", broken="the list is cut, nothing rescanned", build=partial(_overflow_rescan, rescanned=False)
            ),
        ),
    ),
    Lemma(
        id="decode_threshold",
        statement="With K recent keys that reach tau, or without a threshold, every member of the top K is written.",
        theme=THEME,
        build=_decode_threshold,
        speaks_of=("dosa_ref.select.select_decode",),
        mutants=(
            Mutant(id="above_only", broken="only score > tau is written", build=partial(_decode_threshold, ties=False)),
            Mutant(id="too_few", broken="K - 1 recent keys", build=partial(_decode_threshold, enough=False)),
        ),
    ),
    Lemma(
        id="merge_dropped",
        statement="A key outside the top K of its part is outside the top K of the union.",
        theme=THEME,
        build=_merge_dropped,
        speaks_of=("dosa_ref.select.exact_topk",),
        mutants=(Mutant(id="short_part", broken="parts keep K - 1", build=partial(_merge_dropped, kept=1)),),
    ),
    Lemma(
        id="merge_partial",
        statement="The top K of the kept keys of all parts is the top K of the union.",
        theme=THEME,
        build=_merge_partial,
        speaks_of=("dosa_ref.select.exact_topk", "dosa_ref.select.select_prefill"),
        mutants=(
            Mutant(id="lost_winner", broken="a winner is not kept", build=partial(_merge_partial, all_winners=False)),
        ),
    ),
)
