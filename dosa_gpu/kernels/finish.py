"""Results of a block of rows: the running top-K into the call's outputs, and a last check of each row."""

import triton
import triton.language as tl

TOO_FEW_SEEDS = 4
THRESHOLD_NOT_MET = 8
_TOO_FEW_SEEDS = tl.constexpr(TOO_FEW_SEEDS)
_THRESHOLD_NOT_MET = tl.constexpr(THRESHOLD_NOT_MET)


@triton.jit(do_not_specialize=["topk"])
def _finish_kernel(
    index_ptr,  # [rows, topk] i32
    score_ptr,  # [rows, topk] f32
    count_ptr,  # [rows] i32
    tau_ptr,  # [rows] f32, with CHECK
    state_ptr,  # [rows] i32, with CHECK
    row_ptr,  # [rows] i64
    out_index_ptr,  # [all rows, topk] i32
    out_score_ptr,  # [all rows, topk] f32
    topk,
    CHECK: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    count = tl.load(count_ptr + row)
    place = tl.arange(0, TILE)
    filled = place < count
    index = tl.load(index_ptr + row * topk + place, mask=filled, other=-1)
    score = tl.load(score_ptr + row * topk + place, mask=filled, other=float("-inf"))
    wanted = place < topk
    if CHECK:
        tau = tl.load(tau_ptr + row)
        state = tl.load(state_ptr + row)
        # The K-th score: of fewer than K entries it is -Inf. All keys include the seeds, so it reaches tau.
        least = tl.min(tl.where(wanted, score, float("inf")), axis=0)
        last = tl.where(tau != tau, _TOO_FEW_SEEDS, tl.where(least >= tau, 0, _THRESHOLD_NOT_MET))
        state = tl.where(state == 0, last, state)
        tl.store(state_ptr + row, state)
        wanted = place < tl.where(state == 0, topk, 0)
    target = tl.load(row_ptr + row) * topk + place
    tl.store(out_index_ptr + target, index, mask=wanted)
    tl.store(out_score_ptr + target, score, mask=wanted)


def launch_finish(index, score, count, tau, state, rows, out_index, out_score) -> None:
    """Write ``topk_indices`` and ``scores`` of a block, with -1 and -Inf behind the last key.

    Args:
        index, score, count: ``[rows, topk]`` int32 and float32, ``[rows]`` int32: each row's top-K.
        tau: ``[rows]`` float32, the seeds' threshold, or None for rows that need no check.
        state: ``[rows]`` int32 or None: rows with a state are not written. A row without one gets ``TOO_FEW_SEEDS`` if
            its ``tau`` is NaN, ``THRESHOLD_NOT_MET`` if its K-th score is below ``tau``, and is not written then.
        rows: ``[rows]`` int64, places in the outputs.
        out_index, out_score: ``[all rows, topk]``, written.

    Exactness: exact.
    """
    count_rows, topk = index.shape
    _finish_kernel[(count_rows,)](
        index, score, count, score if tau is None else tau, count if state is None else state, rows,
        out_index, out_score, topk,
        CHECK=tau is not None, TILE=triton.next_power_of_2(topk), num_warps=4,
    )  # fmt: skip
