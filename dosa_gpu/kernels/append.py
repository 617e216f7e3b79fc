"""Emit: append the rescored survivors whose score reaches ``tau`` to each row's list, in order."""

import triton
import triton.language as tl

TILE = 1024
OVERFLOW = 16
"""State of a row whose survivors or emitted keys did not fit; it has to be selected another way."""
_OVERFLOW = tl.constexpr(OVERFLOW)


@triton.jit(do_not_specialize=["stride", "capacity"])
def _append_kernel(
    index_ptr,  # [rows, stride] i32
    score_ptr,  # [rows, stride] f32
    count_ptr,  # [rows] i32
    tau_ptr,  # [rows] f32
    list_index_ptr,  # [rows, capacity] i32
    list_score_ptr,  # [rows, capacity] f32
    list_count_ptr,  # [rows] i32
    state_ptr,  # [rows] i32
    survivors_ptr,  # [rows] i32
    stride,
    capacity,
    TILE: tl.constexpr,
):
    row = tl.program_id(0)
    count = tl.load(count_ptr + row)
    tl.store(survivors_ptr + row, tl.load(survivors_ptr + row) + count)
    tau = tl.load(tau_ptr + row)
    source = row.to(tl.int64) * stride
    target = row.to(tl.int64) * capacity
    held = tl.load(list_count_ptr + row)
    full = count > stride
    if full:
        count = 0
    kept = 0
    for start in range(0, count, TILE):
        place = start + tl.arange(0, TILE)
        score = tl.load(score_ptr + source + place, mask=place < count, other=float("nan"))
        kept += tl.sum((score >= tau).to(tl.int32), axis=0)
    full |= held + kept > capacity
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
    if full:
        state = tl.load(state_ptr + row)
        tl.store(state_ptr + row, tl.where(state == 0, _OVERFLOW, state))


def launch_append(index, score, count, tau, list_index, list_score, list_count, state, survivors) -> None:
    """Append the entries with ``score >= tau`` of each row, keeping their order. A NaN score is not appended.

    Args:
        index, score: ``[rows, width]`` int32 and float32, contiguous.
        count: ``[rows]`` int32: entries of each row; more than ``width`` means that some are missing.
        tau: ``[rows]`` float32.
        list_index, list_score: ``[rows, capacity]``, contiguous, appended to.
        list_count: ``[rows]`` int32, entries in the list; raised.
        state: ``[rows]`` int32: of a row whose entries are not all there, or do not all fit, nothing is appended, and
            its state becomes ``OVERFLOW`` if it was 0.
        survivors: ``[rows]`` int32, raised by ``count``.

    Exactness: exact.
    """
    _append_kernel[(index.shape[0],)](
        index, score, count, tau, list_index, list_score, list_count, state, survivors,
        index.stride(0), list_index.stride(0), TILE=TILE, num_warps=4,
    )  # fmt: skip
