"""Indices: offsets in 32 and 64 bits, the packing of survivor bits, distinct seeds, numbering over shards."""

from __future__ import annotations

from functools import partial

from proofs.lemma import Constants, Lemma, Mutant, Statement
from proofs.terms import Term, bits, boolean, choose, equal, every, iff, implies, integer, negate, number

THEME = "indices"

KEYS_LIMIT = 2**31 - 2**17
"""The GPU path refuses this many keys and more."""

SPAN = 8192
"""Most keys that one program of a kernel takes, and most lanes of one tile."""

BLOCK_ROWS = 2**20
"""More rows than one launch takes."""

HEADS = 64
"""Most heads of a row, and most columns of a bound."""

INT32_LIMIT = 2**31


def _index_arithmetic(_: Constants, *, bits_in_result: int = 64) -> Statement:
    row, stride, column = integer("row"), integer("stride"), integer("column")
    place = row * stride + column
    return Statement(
        logic="QF_NIA",
        premises=(
            row >= 0,
            row < INT32_LIMIT,
            stride >= 0,
            stride <= INT32_LIMIT,
            column >= 0,
            column < INT32_LIMIT,
        ),
        claim=every(place < 2 ** (bits_in_result - 1), place >= 0),
    )


def _kernel_offsets(_: Constants, *, limit: int = KEYS_LIMIT) -> Statement:
    # offset: program * keys per program; lane: place in a tile that starts at `tile`.
    names = "keys chunk_start chunk_end offset span tile lane"
    keys, chunk_start, chunk_end, offset, span, tile, lane = (integer(name) for name in names.split())
    return Statement(
        logic="QF_LIA",
        premises=(
            keys < limit,
            chunk_end <= keys,
            chunk_start >= 0,
            offset >= 0,
            offset < chunk_end - chunk_start,
            span <= SPAN,
            tile >= chunk_start + offset,
            tile < chunk_start + offset + span,
            lane >= 0,
            lane < SPAN,
        ),
        claim=every(tile + lane >= 0, tile + lane < INT32_LIMIT, chunk_start + offset + span < INT32_LIMIT),
    )


def _row_products(_: Constants, *, rows: int = BLOCK_ROWS) -> Statement:
    # 32-bit products of a row of the block with its heads (or columns), as the kernels form them, against 64-bit ones.
    row, heads, lane = (bits(name, 64) for name in ("row", "heads", "lane"))
    place = row * heads + lane
    return Statement(
        logic="QF_BV",
        premises=(row < rows, heads <= HEADS, lane < 2 * HEADS),
        claim=place < number(INT32_LIMIT, place.sort),
    )


def _survivor_bits(_: Constants, *, clear: bool = True, width: int = 32) -> Statement:
    # word: the bits of a word so far; i: the bit that joins, j: a bit that is read back.
    word, i, j = bits("word", 32), bits("i", 32), bits("j", 32)
    one = number(1, word.sort)
    joined = word + (one << i)
    premises: list[Term] = [j < width]
    if clear:
        premises.append(equal((word >> i) & 1, 0))
    return Statement(
        logic="QF_BV",
        premises=tuple(premises),
        claim=equal((joined >> j) & 1, choose(equal(i, j), one, (word >> j) & 1)),
    )


def _distinct_seeds(_: Constants, *, ascending: bool = True) -> Statement:
    # A sorted list, of which an entry equal to the one before it is dropped. kept: the last entry kept so far, which
    # equals the last entry seen.
    kept, entry = integer("kept"), integer("entry")
    is_kept = negate(equal(entry, kept))
    return Statement(
        logic="QF_LIA",
        premises=(kept <= entry,) if ascending else (),
        claim=every(implies(is_kept, kept < entry), equal(choose(is_kept, entry, kept), entry)),
    )


def _stride_seeds(_: Constants, *, long: bool = True) -> Statement:
    # first, second: floor(i L / n) and floor((i + 1) L / n), the i-th and the next of n seeds spread over L keys;
    # scaled: i L.
    names = "first second scaled length count"
    first, second, scaled, length, count = (integer(name) for name in names.split())
    premises = [
        count >= 1,
        length >= count if long else length >= 1,
        count * first <= scaled,
        scaled + length < count * second + count,
        # i + 1 is at most n.
        scaled + length <= count * length,
    ]
    return Statement(logic="QF_NIA", premises=tuple(premises), claim=every(first < second, first < length))


def _disjoint_seeds(_: Constants, *, filtered: bool = True) -> Statement:
    # The newest `near` keys before `end`, of which place counts back, and a hint or an older key.
    end, near, place, hint = (integer(name) for name in ("end", "near", "place", "hint"))
    return Statement(
        logic="QF_LIA",
        premises=(place < near, *((hint < end - near,) if filtered else (hint < end,))),
        claim=hint < end - 1 - place,
    )


def _shard_indices(_: Constants, *, disjoint: bool = True) -> Statement:
    # Two shards [base, base + size), of which the second lies behind the first; x, z in the first, y in the second.
    names = "base size next_base x y z"
    base, size, next_base, x, y, z = (integer(name) for name in names.split())
    premises: list[Term] = [x < size, y >= 0]
    if disjoint:
        premises.append(next_base >= base + size)
    return Statement(
        logic="QF_LIA",
        premises=tuple(premises),
        claim=every(base + x < next_base + y, iff(x < z, base + x < base + z)),
    )


def _tie_rank(_: Constants, *, ascending: bool = True) -> Statement:
    # A key x with the K-th code. ranked, smaller: keys so far with that code at places before x, and with smaller keys.
    ranked, smaller, ties = integer("ranked"), integer("smaller"), integer("ties")
    key, other, place, other_place = (integer(name) for name in ("key", "other", "place", "other_place"))
    is_tied = boolean("is_tied")
    earlier = every(is_tied, other_place < place)
    lower = every(is_tied, other < key)
    order = iff(other_place < place, other < key if ascending else key < other)
    next_ranked = ranked + choose(earlier, number(1, "Int"), 0)
    next_smaller = smaller + choose(lower, number(1, "Int"), 0)
    return Statement(
        logic="QF_LIA",
        premises=(equal(ranked, smaller), order),
        claim=every(equal(next_ranked, next_smaller), iff(next_ranked < ties, next_smaller < ties)),
    )


LEMMAS = (
    Lemma(
        id="index_arithmetic",
        statement="row * stride + column fits int64 for up to 2^31 rows, keys and strides.",
        theme=THEME,
        build=_index_arithmetic,
        speaks_of=("dosa_gpu.kernels.bound.launch_bound", "dosa_gpu.kernels.rescore.launch_rescore"),
        mutants=(Mutant(id="int32", broken="computed in int32", build=partial(_index_arithmetic, bits_in_result=32)),),
    ),
    Lemma(
        id="kernel_offsets",
        statement="Below 2^31 - 2^17 keys no int32 key index of a kernel wraps, lanes behind the last key included.",
        theme=THEME,
        build=_kernel_offsets,
        speaks_of=(
            "dosa_gpu.api.select_prefill",
            "dosa_gpu.kernels.bound.KEYS_PER_PROGRAM",
            "dosa_gpu.kernels.score.KEYS_PER_PROGRAM",
            "dosa_gpu.kernels.rescore.MAX_STEP",
            "dosa_gpu.kernels.topk.INTERPRETER_TILE",
        ),
        mutants=(Mutant(id="all_int32", broken="up to 2^31 keys", build=partial(_kernel_offsets, limit=INT32_LIMIT)),),
    ),
    Lemma(
        id="row_products",
        statement="row * heads + lane of a block of at most 2^20 rows fits int32.",
        theme=THEME,
        build=_row_products,
        speaks_of=(
            "dosa_gpu.plan.MAX_ROWS",
            "dosa_gpu.kernels.score.launch_score",
            "dosa_gpu.kernels.bound.launch_bound",
        ),
        mutants=(Mutant(id="many_rows", broken="2^26 rows in a block", build=partial(_row_products, rows=2**26)),),
    ),
    Lemma(
        id="survivor_bits",
        statement="Adding 2^i to a word whose bit i is clear sets that bit and no other; shift and mask read it back.",
        theme=THEME,
        build=_survivor_bits,
        speaks_of=("dosa_gpu.kernels.bound.launch_bound", "dosa_gpu.kernels.compact.launch_compact"),
        mutants=(
            Mutant(id="twice", broken="a key is added twice", build=partial(_survivor_bits, clear=False)),
            Mutant(id="long_word", broken="33 keys in a word", build=partial(_survivor_bits, width=33)),
        ),
    ),
    Lemma(
        id="distinct_seeds",
        statement="Dropping from a sorted list what equals its predecessor leaves every entry once.",
        theme=THEME,
        build=_distinct_seeds,
        speaks_of=("dosa_ref.select.select_prefill", "dosa_ref.select.select_decode"),
        mutants=(
            Mutant(id="unsorted", broken="the list is not sorted", build=partial(_distinct_seeds, ascending=False)),
        ),
    ),
    Lemma(
        id="stride_seeds",
        statement="floor(i L / n) grows with i if L >= n: seeds of an even spread are distinct.",
        theme=THEME,
        build=_stride_seeds,
        speaks_of=("dosa_gpu.seeds.own_seeds",),
        mutants=(Mutant(id="short_row", broken="fewer keys than seeds", build=partial(_stride_seeds, long=False)),),
    ),
    Lemma(
        id="disjoint_seeds",
        statement="Hints and older keys that lie before the newest keys are none of these.",
        theme=THEME,
        build=_disjoint_seeds,
        speaks_of=("dosa_gpu.seeds.own_seeds", "dosa_ref.select.default_seeds"),
        mutants=(
            Mutant(id="any_hint", broken="a hint may be a newest key", build=partial(_disjoint_seeds, filtered=False)),
        ),
        note="So seeds of two kinds are distinct if those of each kind are: hints because repetitions are removed, "
        "older keys by `stride_seeds`.",
    ),
    Lemma(
        id="tie_rank",
        statement="In a list that ascends by key, the first entries among equal scores are those of the smallest keys.",
        theme=THEME,
        build=_tie_rank,
        speaks_of=("dosa_gpu.kernels.topk.launch_topk", "dosa_ref.spec.TieBreak"),
        mutants=(Mutant(id="descending", broken="the list descends", build=partial(_tie_rank, ascending=False)),),
    ),
    Lemma(
        id="shard_indices",
        statement="Adding each shard's first key keeps the order of keys within a shard and between shards.",
        theme=THEME,
        build=_shard_indices,
        speaks_of=("dosa_ref.select.exact_topk",),
        mutants=(Mutant(id="overlapping", broken="shards may overlap", build=partial(_shard_indices, disjoint=False)),),
        note="With it, `merge_dropped` and `merge_partial` make the merge of sharded top-K lists exact.",
    ),
)
