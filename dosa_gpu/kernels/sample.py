"""A sample of the keys that all rows of a block share, and which score of it should be each row's threshold.

Place ``i`` of ``count`` lies in the ``i``-th of equal stretches of the span, where a hash chooses: whatever the order
of the keys and its periods, only chance makes it a bad sample. Of the ``m`` places in a row's window the K best of its
``n`` keys are expected to hold ``m K / n``, with the spread of a draw without replacement; the rank is some spreads
more, so that a key with this score or a better one is nearly never among the best K - 1. If it is, the row has fewer
than K keys at its threshold, which the end of the block notices.
"""

import triton
import triton.language as tl

SPREADS = 4.5
"""Standard deviations between the expected rank and the one that is taken."""
MORE = 2.0
"""Ranks more, since small counts are skewed."""
TILE_KEYS = 64
TILE_ROWS = 128


@triton.jit
def _place(i, low, span, count):
    first = low + (i.to(tl.int64) * span // count).to(tl.int32)
    following = low + ((i.to(tl.int64) + 1) * span // count).to(tl.int32)
    return first + ((i.to(tl.uint32) * 2654435761) >> 16).to(tl.int32) % tl.maximum(following - first, 1)


@triton.jit
def _places_before(key, low, span, count):
    """How many places are smaller than ``key``, for a key from ``low`` to ``low + span``."""
    stretch = ((key - low).to(tl.int64) * count // span).to(tl.int32)
    return stretch + ((stretch < count) & (_place(stretch, low, span, count) < key)).to(tl.int32)


@triton.jit(do_not_specialize=["low", "span", "count"])
def _gather_kernel(
    k_ptr,  # [num_keys, 128] u8
    k_scale_ptr,  # [num_keys] f32
    place_ptr,  # [count] i32
    sample_ptr,  # [count, 128] u8
    sample_scale_ptr,  # [count] f32
    low,
    span,
    count,
    TILE: tl.constexpr,
):
    i = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = i < count
    key = tl.where(inside, _place(i, low, span, count), low)
    depth = tl.arange(0, 128)
    code = tl.load(k_ptr + key.to(tl.int64)[:, None] * 128 + depth[None, :])
    tl.store(sample_ptr + i[:, None] * 128 + depth[None, :], code, mask=inside[:, None])
    tl.store(sample_scale_ptr + i, tl.load(k_scale_ptr + key), mask=inside)
    tl.store(place_ptr + i, key, mask=inside)


@triton.jit(do_not_specialize=["num_rows", "low", "span", "count", "topk"])
def _rank_kernel(
    ks_ptr,  # [rows] i32
    ke_ptr,  # [rows] i32
    start_ptr,  # [rows] i32
    end_ptr,  # [rows] i32
    rank_ptr,  # [rows] i32
    num_rows,
    low,
    span,
    count,
    topk,
    spreads,
    more,
    TILE: tl.constexpr,
):
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = row < num_rows
    ks = tl.load(ks_ptr + row, mask=inside, other=0)
    ke = tl.load(ke_ptr + row, mask=inside, other=0)
    first = tl.minimum(tl.maximum(ks, low), low + span)
    last = tl.minimum(tl.maximum(ke, first), low + span)
    start = _places_before(first, low, span, count)
    end = _places_before(last, low, span, count)
    keys = tl.maximum(last - first, 1).to(tl.float32)
    drawn = (end - start).to(tl.float32)
    expected = drawn * topk / keys
    left = tl.maximum(1.0 - drawn / keys, 0.0)
    rank = tl.ceil(expected + spreads * tl.sqrt(expected * left) + more * left).to(tl.int32)
    # All keys of the window: nothing is left to chance.
    rank = tl.where(end - start == last - first, topk, tl.maximum(rank, 1))
    tl.store(start_ptr + row, start, mask=inside)
    tl.store(end_ptr + row, end, mask=inside)
    tl.store(rank_ptr + row, rank, mask=inside)


def launch_sample(k, k_scale, ks, ke, low: int, high: int, topk: int, sample, windows) -> None:
    """Draw a sample of the keys ``[low, high)``.

    Args:
        k: ``[num_keys, 128]`` uint8 codes, contiguous.
        k_scale: ``[num_keys]`` float32.
        ks, ke: ``[rows]`` int32, windows in ``[low, high]``.
        low, high: the span, not empty.
        topk: K.
        sample: (key columns ``[count]`` int32, ascending and distinct; their codes ``[count, 128]`` uint8; their scales
            ``[count]`` float32), written; ``count`` at most ``high - low``.
        windows: (first place of the sample in each row's window, end, rank), each ``[rows]`` int32, written. The
            rank-th best score of these places is the row's guess; where they are all keys of the window, it is K.

    Exactness: heuristic but for places and windows; a guess is good if K keys reach it, which has to be checked.
    """
    place, codes, scale = sample
    count, rows = place.shape[0], ks.shape[0]
    assert 0 < count <= high - low, f"{count} of {high - low} keys cannot be drawn"
    _gather_kernel[(triton.cdiv(count, TILE_KEYS),)](
        k, k_scale, place, codes, scale, low, high - low, count, TILE=TILE_KEYS, num_warps=4
    )
    _rank_kernel[(triton.cdiv(rows, TILE_ROWS),)](
        ks, ke, *windows, rows, low, high - low, count, topk, SPREADS, MORE, TILE=TILE_ROWS, num_warps=4
    )
