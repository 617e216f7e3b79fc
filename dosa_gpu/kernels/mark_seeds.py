"""Seeds of a group of rows as bits: hints, its newest keys, an even sample."""

import triton
import triton.language as tl

TILE = 1024


@triton.jit(do_not_specialize=["num_rows", "hints", "newest", "spread", "word_stride"])
def _mark_seeds_kernel(
    hint_ptr,  # [hints] i32
    ks_ptr,  # [rows] i32
    ke_ptr,  # [rows] i32
    word_ptr,  # [groups, word_stride] i32, zeroed
    start_ptr,  # [groups] i32
    end_ptr,  # [groups] i32
    num_rows,
    hints,
    newest,
    spread,
    word_stride,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
):
    group = tl.program_id(0)
    row = group * GROUP + tl.arange(0, GROUP)
    ks = tl.load(ks_ptr + row, mask=row < num_rows, other=0)
    ke = tl.load(ke_ptr + row, mask=row < num_rows, other=0)
    seen = ke > ks
    end = tl.max(tl.where(seen, ke, 0), axis=0)
    start = tl.minimum(tl.min(tl.where(seen, ks, 2147483647), axis=0), end)
    if tl.program_id(1) == 0:
        tl.store(start_ptr + group, start)
        tl.store(end_ptr + group, end)
    item = tl.program_id(1) * TILE + tl.arange(0, TILE)
    hint = tl.load(hint_ptr + item, mask=item < hints, other=-1)
    late = end - 1 - (item - hints)
    step = (item - hints - newest).to(tl.int64)
    even = (start + step * (end - start) // tl.maximum(spread, 1)).to(tl.int32)
    key = tl.where(item < hints, hint, tl.where(item < hints + newest, late, even))
    good = (item < hints + newest + spread) & (key >= start) & (key < end)
    word = group.to(tl.int64) * word_stride + key // 32
    tl.atomic_or(word_ptr + word, 1 << (key % 32), mask=good, sem="relaxed")


def launch_mark_seeds(hint, ks, ke, newest: int, spread: int, rows_per_group: int, words, start, end) -> None:
    """Set one bit per seed and group; a key is a seed once, however often it is named.

    Args:
        hint: ``[n]`` int32 key columns for all groups.
        ks, ke: ``[rows]`` int32.
        newest: newest keys of the group's windows.
        spread: keys spread evenly over them.
        rows_per_group: rows of a group, a power of two.
        words: ``[groups, >= ceil(num_keys / 32)]`` int32, zeroed by the caller; bit ``i % 32`` of word ``i // 32`` is
            key ``i``.
        start, end: ``[groups]`` int32, written: the span of the group's windows. Seeds lie inside.

    Exactness: exact; which keys are seeds changes speed only.
    """
    hints = hint.shape[0]
    _mark_seeds_kernel[(start.shape[0], triton.cdiv(hints + newest + spread, TILE))](
        hint, ks, ke, words, start, end, ks.shape[0], hints, newest, spread, words.stride(0),
        GROUP=rows_per_group, TILE=TILE, num_warps=4,
    )  # fmt: skip
