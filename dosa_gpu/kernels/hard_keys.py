"""Hard keys of each row: seeds whose scores lie below ``tau``, an even sample of them."""

import triton
import triton.language as tl

TILE = 1024


@triton.jit
def _hard_keys_kernel(
    list_ptr,  # [lists, width] i32
    score_ptr,  # [rows, score_stride] f32
    tau_ptr,  # [rows] f32
    sample_ptr,  # [rows, sample_stride] i32
    width,
    score_stride,
    sample_stride,
    rows_per_list,
    SAMPLE: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    tau = tl.load(tau_ptr + row)
    score_row = score_ptr + row * score_stride
    list_row = list_ptr + row // rows_per_list * width
    total = 0
    for start in range(0, width, TILE):
        place = start + tl.arange(0, TILE)
        score = tl.load(score_row + place, mask=place < width, other=float("nan"))
        total += tl.sum((score < tau).to(tl.int32), axis=0)
    total = tl.maximum(total, 1)
    before = 0
    for start in range(0, width, TILE):
        place = start + tl.arange(0, TILE)
        inside = place < width
        score = tl.load(score_row + place, mask=inside, other=float("nan"))
        below = (score < tau).to(tl.int32)
        rank = before + tl.cumsum(below, axis=0) - below
        slot = rank * SAMPLE // total
        # The first of the keys that share a slot.
        chosen = (below == 1) & ((rank == 0) | ((rank - 1) * SAMPLE // total != slot))
        key = tl.load(list_row + place, mask=chosen, other=0)
        tl.store(sample_ptr + row * sample_stride + slot, key, mask=chosen)
        before += tl.sum(below, axis=0)


def launch_hard_keys(lists, score, tau, rows_per_list: int, sample) -> None:
    """Write an even sample of the seeds below ``tau``, in the order of the list.

    Args:
        lists: ``[ceil(rows / rows_per_list), width]`` int32 key columns, contiguous.
        score: ``[rows, width]`` float32, scores of the list; NaN where there is no seed.
        tau: ``[rows]`` float32.
        rows_per_list: rows that share a list.
        sample: ``[rows, n]`` int32, rows contiguous, filled with -1 by the caller; places without a key keep that.

    Exactness: heuristic; the sample steers the choice of columns only.
    """
    rows, width = score.shape
    _hard_keys_kernel[(rows,)](
        lists, score, tau, sample, width, score.stride(0), sample.stride(0), rows_per_list,
        SAMPLE=sample.shape[1], TILE=TILE, num_warps=4,
    )  # fmt: skip
