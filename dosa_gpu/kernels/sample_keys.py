"""Keys that steer a row's choice of columns: scored ones just below ``tau``, and keys anywhere in its window."""

import triton
import triton.language as tl

TILE = 1024


@triton.jit(do_not_specialize=["width", "score_stride", "rows_per_list"])
def _sample_keys_kernel(
    list_ptr,  # [lists, width] i32
    score_ptr,  # [rows, score_stride] f32
    start_ptr,  # [rows] i32
    end_ptr,  # [rows] i32
    tau_ptr,  # [rows] f32
    hard_ptr,  # [rows] f32
    ks_ptr,  # [rows] i32
    ke_ptr,  # [rows] i32
    sample_ptr,  # [rows, 2 * HALF] i32
    width,
    score_stride,
    rows_per_list,
    HALF: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    low = tl.load(start_ptr + row)
    high = tl.load(end_ptr + row)
    tau = tl.load(tau_ptr + row)
    hard = tl.load(hard_ptr + row)
    score_row = score_ptr + row * score_stride
    list_row = list_ptr + row // rows_per_list * width
    sample_row = sample_ptr + row * 2 * HALF
    total = 0
    for start in range(0, width, TILE):
        place = start + tl.arange(0, TILE)
        score = tl.load(score_row + place, mask=(place >= low) & (place < high), other=float("nan"))
        total += tl.sum(((score < tau) & (score >= hard)).to(tl.int32), axis=0)
    some = tl.maximum(total, 1)
    before = 0
    for start in range(0, width, TILE):
        place = start + tl.arange(0, TILE)
        score = tl.load(score_row + place, mask=(place >= low) & (place < high), other=float("nan"))
        below = ((score < tau) & (score >= hard)).to(tl.int32)
        rank = before + tl.cumsum(below, axis=0) - below
        slot = rank * HALF // some
        # The first of the keys that share a slot.
        chosen = (below == 1) & ((rank == 0) | ((rank - 1) * HALF // some != slot))
        key = tl.load(list_row + place, mask=chosen, other=0)
        tl.store(sample_row + slot, key, mask=chosen)
        before += tl.sum(below, axis=0)
    # Slots that no rank meets stay empty.
    slot = tl.arange(0, HALF)
    rank = (slot * some + HALF - 1) // HALF
    met = (rank < total) & (rank * HALF // some == slot)
    tl.store(sample_row + slot, tl.full((HALF,), -1, dtype=tl.int32), mask=met == 0)
    ks = tl.load(ks_ptr + row)
    span = (tl.load(ke_ptr + row) - ks).to(tl.int64)
    key = tl.where(span > 0, ks + (slot * span // HALF).to(tl.int32), -1)
    tl.store(sample_row + HALF + slot, key)


def launch_sample_keys(lists, score, start, end, tau, hard, ks, ke, rows_per_list: int, sample) -> None:
    """Write an even sample of the listed keys just below ``tau``, in the list's order, and one of the row's window.

    Args:
        lists: ``[ceil(rows / rows_per_list), width]`` int32 key columns, contiguous.
        score: ``[rows, width]`` float32, scores of the list; NaN where there is none.
        start, end: ``[rows]`` int32, places of the list that count.
        tau, hard: ``[rows]`` float32; keys with a score from ``hard`` up to below ``tau`` are taken.
        ks, ke: ``[rows]`` int32.
        rows_per_list: rows that share a list.
        sample: ``[rows, 2 n]`` int32, contiguous, n a power of two, written: listed keys in the first half, then keys
            of the window; -1 for none.

    Exactness: heuristic; the sample steers the choice of columns only.
    """
    rows, width = score.shape
    _sample_keys_kernel[(rows,)](
        lists, score, start, end, tau, hard, ks, ke, sample, width, score.stride(0), rows_per_list,
        HALF=sample.shape[1] // 2, TILE=TILE, num_warps=4,
    )  # fmt: skip
