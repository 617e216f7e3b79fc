"""Seeds of a group of rows as bits: winners of pilots near the group, its newest keys, an even sample."""

import triton
import triton.language as tl

TILE = 1024


@triton.jit
def _mark_seeds_kernel(
    winner_ptr,  # [pilots, winners] i32
    count_ptr,  # [pilots] i32 with COUNTED, else unused
    ks_ptr,  # [rows] i32
    ke_ptr,  # [rows] i32
    word_ptr,  # [groups, word_stride] i32, zeroed
    start_ptr,  # [groups] i32
    end_ptr,  # [groups] i32
    num_rows,
    pilots,
    winners,
    near,
    newest,
    spread,
    word_stride,
    COUNTED: tl.constexpr,
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
    count = near * winners
    # The pilots nearest to the group; winners of the near ones lie one after another.
    first = tl.minimum(tl.maximum(group - near // 2, 0), pilots - near)
    is_won = item < count
    if COUNTED:
        is_won &= item % winners < tl.load(count_ptr + first + item // winners, mask=is_won, other=0)
    won = tl.load(winner_ptr + first.to(tl.int64) * winners + item, mask=is_won, other=-1)
    late = end - 1 - (item - count)
    step = (item - count - newest).to(tl.int64)
    even = (start + step * (end - start) // tl.maximum(spread, 1)).to(tl.int32)
    key = tl.where(item < count, won, tl.where(item < count + newest, late, even))
    good = (item < count + newest + spread) & (key >= start) & (key < end)
    word = group.to(tl.int64) * word_stride + key // 32
    tl.atomic_or(word_ptr + word, 1 << (key % 32), mask=good, sem="relaxed")


def launch_mark_seeds(
    winners, count, ks, ke, near: int, newest: int, spread: int, rows_per_group: int, words, start, end
) -> None:
    """Set one bit per seed and group; a key is a seed once, however often it is named.

    Args:
        winners: ``[pilots, n]`` int32 key columns, contiguous, of a pilot for each group, or of one for all.
        count: ``[pilots]`` int32, winners of each pilot that count; None if all do.
        ks, ke: ``[rows]`` int32.
        near: pilots whose winners a group takes, the nearest ones; at most their number.
        newest: newest keys of the group's windows.
        spread: keys spread evenly over them.
        rows_per_group: rows of a group, a power of two.
        words: ``[groups, >= ceil(num_keys / 32)]`` int32, zeroed by the caller; bit ``i % 32`` of word ``i // 32`` is
            key ``i``.
        start, end: ``[groups]`` int32, written: the span of the group's windows. Seeds lie inside.

    Exactness: exact; which keys are seeds changes speed only.
    """
    pilots, each = winners.shape
    items = near * each + newest + spread
    _mark_seeds_kernel[(start.shape[0], triton.cdiv(items, TILE))](
        winners, winners if count is None else count, ks, ke, words, start, end,
        ks.shape[0], pilots, each, near, newest, spread, words.stride(0),
        COUNTED=count is not None, GROUP=rows_per_group, TILE=TILE, num_warps=4,
    )  # fmt: skip
