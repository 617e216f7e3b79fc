"""Exact, deterministic top-K of two consecutive segments per row, with ascending output.

Segment A is a list of at most ``topk`` entries, segment B a longer list or a row of logits. All keys of A are smaller
than all
keys of B and both ascend, so the order of the entries is the order of the keys: among equal scores the first entries
win, which is the shared tie-break. The K-th score is found by four radix passes over an order-preserving image of
float32.
"""

import triton
import triton.language as tl

GPU_TILE = 1024
INTERPRETER_TILE = 8192


@triton.jit
def _order_code(score):
    """uint32 that orders like the score; -0.0 and +0.0 agree, NaN gives 0, every other score more than 0."""
    bits = score.to(tl.uint32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    negative = (bits >> 31) == 1
    code = tl.where(negative & (magnitude != 0), 0x80000000 - magnitude, magnitude + 0x80000000)
    return tl.where(magnitude > 0x7F800000, 0, code).to(tl.uint32)


@triton.jit
def _tile_codes(score_ptr, start, end, TILE: tl.constexpr):
    place = start + tl.arange(0, TILE)
    inside = place < end
    score = tl.load(score_ptr + place, mask=inside, other=float("nan"))
    return _order_code(score), score, place


@triton.jit
def _digit_counts(score_ptr, start, end, prefix, SHIFT: tl.constexpr, TILE: tl.constexpr):
    """Histogram of the 8-bit digit at ``SHIFT`` over the codes whose higher bits equal ``prefix``; NaN is left out."""
    counts = tl.zeros((256,), dtype=tl.int32)
    for tile in range(start, end, TILE):
        code, _, _ = _tile_codes(score_ptr, tile, end, TILE)
        if SHIFT == 24:
            matches = code != 0
        else:
            matches = (code != 0) & ((code >> (SHIFT + 8)) == prefix)
        counts += tl.histogram(((code >> SHIFT) & 0xFF).to(tl.int32), 256, mask=matches)
    return counts


@triton.jit
def _next_digit(a_ptr, a_count, b_ptr, b_start, b_end, prefix, wanted, SHIFT: tl.constexpr, TILE: tl.constexpr):
    """``prefix`` extended by the digit of the ``wanted``-th largest code, and what is still wanted at it."""
    counts = _digit_counts(a_ptr, 0, a_count, prefix, SHIFT, TILE)
    counts += _digit_counts(b_ptr, b_start, b_end, prefix, SHIFT, TILE)
    at_least = tl.sum(counts, axis=0) - tl.cumsum(counts, axis=0) + counts
    # at_least never grows with the digit, so the digits that still reach "wanted" are 0 .. digit.
    digit = tl.maximum(tl.sum((at_least >= wanted).to(tl.int32), axis=0) - 1, 0)
    above = tl.sum(tl.where(tl.arange(0, 256) > digit, counts, 0), axis=0)
    return ((prefix << 8) | digit.to(tl.uint32)).to(tl.uint32), wanted - above


@triton.jit
def _copy_selected(
    score_ptr, index_ptr, out_score_ptr, out_index_ptr, start, end, index_base, threshold, ties, taken, tied,
    LISTED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    for tile in range(start, end, TILE):
        code, score, place = _tile_codes(score_ptr, tile, end, TILE)
        equal = ((code == threshold) & (code != 0)).to(tl.int32)
        rank = tied + tl.cumsum(equal, axis=0) - equal
        chosen = ((code > threshold) | ((equal == 1) & (rank < ties))).to(tl.int32)
        target = taken + tl.cumsum(chosen, axis=0) - chosen
        if LISTED:
            key = tl.load(index_ptr + place, mask=chosen == 1, other=0)
        else:
            key = index_base + place
        tl.store(out_score_ptr + target, score, mask=chosen == 1)
        tl.store(out_index_ptr + target, key, mask=chosen == 1)
        taken += tl.sum(chosen, axis=0)
        tied += tl.sum(equal, axis=0)
    return taken, tied


@triton.jit
def _topk_kernel(
    a_index_ptr,  # [rows, topk] i32
    a_score_ptr,  # [rows, topk] f32
    a_count_ptr,  # [rows] i32
    b_index_ptr,  # [rows, b_stride] i32 with LISTED, else unused
    b_score_ptr,  # [rows, b_stride] f32
    b_start_ptr,  # [rows] i32
    b_end_ptr,  # [rows] i32
    out_index_ptr,  # [rows, topk] i32
    out_score_ptr,  # [rows, topk] f32
    out_count_ptr,  # [rows] i32
    b_stride,
    index_base,
    topk,
    LISTED: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    a_count = tl.load(a_count_ptr + row)
    b_start = tl.load(b_start_ptr + row)
    b_end = tl.load(b_end_ptr + row)
    a_index = a_index_ptr + row * topk
    a_score = a_score_ptr + row * topk
    b_index = b_index_ptr + row * b_stride
    b_score = b_score_ptr + row * b_stride
    prefix = tl.full((), 0, dtype=tl.uint32)
    wanted = topk
    prefix, wanted = _next_digit(a_score, a_count, b_score, b_start, b_end, prefix, wanted, 24, TILE)
    prefix, wanted = _next_digit(a_score, a_count, b_score, b_start, b_end, prefix, wanted, 16, TILE)
    prefix, wanted = _next_digit(a_score, a_count, b_score, b_start, b_end, prefix, wanted, 8, TILE)
    prefix, wanted = _next_digit(a_score, a_count, b_score, b_start, b_end, prefix, wanted, 0, TILE)
    # With fewer than topk scores every digit came out as 0: all codes are above the threshold 0.
    out_index = out_index_ptr + row * topk
    out_score = out_score_ptr + row * topk
    taken = 0
    tied = 0
    taken, tied = _copy_selected(
        a_score, a_index, out_score, out_index, 0, a_count, 0, prefix, wanted, taken, tied, True, TILE
    )
    taken, tied = _copy_selected(
        b_score, b_index, out_score, out_index, b_start, b_end, index_base, prefix, wanted, taken, tied, LISTED, TILE
    )
    tl.store(out_count_ptr + row, taken)


def launch_topk(a_index, a_score, a_count, b_index, b_score, b_start, b_end, index_base: int, out) -> None:
    """Write the exact top-K of segments A and B by (score descending, key ascending), ordered by key.

    Args:
        a_index, a_score, a_count: ``[rows, topk]`` int32 and float32, ``[rows]`` int32: the entries found so far.
        b_index: ``[rows, capacity]`` int32 key columns, or None: then the key of place ``i`` is ``index_base + i``.
        b_score: ``[rows, capacity]`` float32.
        b_start, b_end: ``[rows]`` int32: the part of each row of B that counts.
        index_base: key column of B's place 0 (only without ``b_index``).
        out: (index, score, count) like A, written up to ``count``; it must not overlap A.

    Exactness: exact. Special values: NaN is never selected; -0.0 ties with +0.0 and keeps its bits; -Inf is selectable.
    """
    out_index, out_score, out_count = out
    rows, topk = a_index.shape
    _topk_kernel[(rows,)](
        a_index, a_score, a_count, b_score if b_index is None else b_index, b_score, b_start, b_end,
        out_index, out_score, out_count, b_score.stride(0), index_base, topk,
        LISTED=b_index is not None, TILE=INTERPRETER_TILE if a_score.device.type == "cpu" else GPU_TILE, num_warps=4,
    )  # fmt: skip
