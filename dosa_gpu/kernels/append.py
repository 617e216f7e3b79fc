"""Emit: append the rescored survivors whose score reaches ``tau`` to each row's list, in order."""

import triton
import triton.language as tl

TILE = 1024


@triton.jit
def _append_kernel(
    index_ptr,  # [rows, stride] i32
    score_ptr,  # [rows, stride] f32
    count_ptr,  # [rows] i32
    tau_ptr,  # [rows] f32
    list_index_ptr,  # [rows, capacity] i32
    list_score_ptr,  # [rows, capacity] f32
    list_count_ptr,  # [rows] i32
    full_ptr,  # [rows] i32
    any_full_ptr,  # [1] i32
    stride,
    capacity,
    TILE: tl.constexpr,
):
    row = tl.program_id(0)
    count = tl.load(count_ptr + row)
    tau = tl.load(tau_ptr + row)
    source = row.to(tl.int64) * stride
    target = row.to(tl.int64) * capacity
    held = tl.load(list_count_ptr + row)
    kept = 0
    for start in range(0, count, TILE):
        place = start + tl.arange(0, TILE)
        score = tl.load(score_ptr + source + place, mask=place < count, other=float("nan"))
        kept += tl.sum((score >= tau).to(tl.int32), axis=0)
    full = held + kept > capacity
    if full:
        count = 0
    taken = held
    for start in range(0, count, TILE):
        place = start + tl.arange(0, TILE)
        listed = place < count
        key = tl.load(index_ptr + source + place, mask=listed, other=0)
        score = tl.load(score_ptr + source + place, mask=listed, other=float("nan"))
        flag = (score >= tau).to(tl.int32)
        slot = taken + tl.cumsum(flag, axis=0) - flag
        tl.store(list_index_ptr + target + slot, key, mask=flag == 1)
        tl.store(list_score_ptr + target + slot, score, mask=flag == 1)
        taken += tl.sum(flag, axis=0)
    tl.store(list_count_ptr + row, taken)
    tl.store(full_ptr + row, full.to(tl.int32))
    if full:
        tl.store(any_full_ptr, 1)


def launch_append(index, score, count, tau, list_index, list_score, list_count, full, any_full) -> None:
    """Append the entries with ``score >= tau`` of each row, keeping their order. A NaN score is not appended.

    Args:
        index, score: ``[rows, width]`` int32 and float32, contiguous.
        count: ``[rows]`` int32, at most ``width``: entries of each row that count.
        tau: ``[rows]`` float32.
        list_index, list_score: ``[rows, capacity]``, contiguous, appended to.
        list_count: ``[rows]`` int32, entries in the list; raised.
        full: ``[rows]`` int32, written: 1 for a row whose entries do not all fit; nothing of it is appended.
        any_full: ``[1]`` int32, set to 1 if there is such a row.

    Exactness: exact.
    """
    _append_kernel[(index.shape[0],)](
        index, score, count, tau, list_index, list_score, list_count, full, any_full,
        index.stride(0), list_index.stride(0), TILE=TILE, num_warps=4,
    )  # fmt: skip
