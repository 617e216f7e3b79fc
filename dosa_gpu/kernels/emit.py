"""Emit: keep the rescored survivors whose score reaches ``tau``, in order."""

import triton
import triton.language as tl

TILE = 1024


@triton.jit
def _emit_kernel(
    index_ptr,  # [rows, stride] i32
    score_ptr,  # [rows, stride] f32
    count_ptr,  # [rows] i32
    tau_ptr,  # [rows] f32
    out_index_ptr,  # [rows, stride] i32
    out_score_ptr,  # [rows, stride] f32
    out_count_ptr,  # [rows] i32
    stride,
    TILE: tl.constexpr,
):
    row = tl.program_id(0)
    count = tl.load(count_ptr + row)
    tau = tl.load(tau_ptr + row)
    base = row.to(tl.int64) * stride
    kept = 0
    for start in range(0, count, TILE):
        place = start + tl.arange(0, TILE)
        listed = place < count
        key = tl.load(index_ptr + base + place, mask=listed, other=0)
        score = tl.load(score_ptr + base + place, mask=listed, other=0.0)
        flag = (listed & (score >= tau)).to(tl.int32)
        target = kept + tl.cumsum(flag, axis=0) - flag
        tl.store(out_index_ptr + base + target, key, mask=flag == 1)
        tl.store(out_score_ptr + base + target, score, mask=flag == 1)
        kept += tl.sum(flag, axis=0)
    tl.store(out_count_ptr + row, kept)


def launch_emit(index, score, count, tau, out_index, out_score, out_count) -> None:
    """Copy the entries with ``score >= tau`` of each row's list, keeping their order. A NaN score is not copied.

    Args:
        index, score: ``[rows, capacity]`` int32 and float32.
        count: ``[rows]`` int32, at most ``capacity``.
        tau: ``[rows]`` float32.
        out_index, out_score, out_count: like the inputs, written; they must not overlap them.

    Exactness: exact.
    """
    _emit_kernel[(index.shape[0],)](
        index, score, count, tau, out_index, out_score, out_count, index.stride(0), TILE=TILE, num_warps=4
    )
