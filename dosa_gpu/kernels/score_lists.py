"""Dense scoring of key lists that groups of rows share: seeds."""

import triton
import triton.language as tl

from dosa_gpu.kernels.combine_heads import combine_heads
from dosa_gpu.machine_code import require_tensor_core_chain
from dosa_gpu.plan import tile_keys

TILE_COLUMNS = 128
TILES_PER_PROGRAM = 32

OPTIONS = {"num_warps": 4, "num_stages": 3, "enable_fp_fusion": False}
"""Compiler options: fp fusion off, since the contract says which products are fused."""


@triton.jit(do_not_specialize=["num_rows", "width", "score_stride"])
def _score_lists_kernel(
    q_ptr,  # [rows, HEADS, 128] e4m3
    k_ptr,  # [num_keys, 128] e4m3
    k_scale_ptr,  # [num_keys] f32
    weights_ptr,  # [rows, HEADS] f32
    ks_ptr,  # [rows] i32
    ke_ptr,  # [rows] i32
    list_ptr,  # [lists, width] i32
    listed_ptr,  # [lists] i32
    score_ptr,  # [rows, score_stride] f32
    num_rows,
    width,
    score_stride,
    rows_per_list,
    HEADS: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    PER_PROGRAM: tl.constexpr,
):
    COLUMNS: tl.constexpr = QUERIES * HEADS
    first_row = tl.program_id(0) * QUERIES
    rows = first_row + tl.arange(0, QUERIES)
    row_ok = rows < num_rows
    safe_rows = tl.minimum(rows, num_rows - 1)
    ks = tl.load(ks_ptr + safe_rows)
    ke = tl.load(ke_ptr + safe_rows)
    columns = tl.minimum(first_row * HEADS + tl.arange(0, COLUMNS), num_rows * HEADS - 1)
    depth = tl.arange(0, 128)
    q = tl.load(q_ptr + columns.to(tl.int64)[:, None] * 128 + depth[None, :])
    weight = tl.load(weights_ptr + columns)
    group = (first_row // rows_per_list).to(tl.int64)
    listed = tl.load(listed_ptr + group)
    start = tl.program_id(1) * PER_PROGRAM
    for tile in tl.range(start, tl.minimum(start + PER_PROGRAM, width), KEYS):
        place = tile + tl.arange(0, KEYS)
        inside = place < width
        key = tl.load(list_ptr + group * width + place, mask=place < listed, other=-1)
        safe_key = tl.maximum(key, 0)
        k = tl.load(k_ptr + safe_key.to(tl.int64)[:, None] * 128 + depth[None, :])
        k_scale = tl.load(k_scale_ptr + safe_key)
        dot = tl.dot(k, tl.trans(q))
        score = combine_heads(dot, weight, k_scale, KEYS, QUERIES, HEADS)
        visible = (key[:, None] >= ks[None, :]) & (key[:, None] < ke[None, :]) & (key >= 0)[:, None]
        target = rows.to(tl.int64)[None, :] * score_stride + place[:, None]
        tl.store(score_ptr + target, tl.where(visible, score, float("nan")), mask=inside[:, None] & row_ok[None, :])


def launch_score_lists(q, k, k_scale, weights, ks, ke, lists, listed, rows_per_list: int, score) -> None:
    """Score each row on the keys of its group's list.

    Args:
        q, k, k_scale, weights, ks, ke: as in ``launch_score``.
        lists: ``[ceil(rows / rows_per_list), width]`` int32 key columns, contiguous.
        listed: ``[lists]`` int32, keys in each list.
        rows_per_list: consecutive rows that share a list, a multiple of 4.
        score: ``[rows, width]`` float32, written; NaN where the list has no key or the key is outside the row's window.

    Exactness: model of hardware, contract ``sm90``; the bits of ``launch_score``.
    """
    num_rows, num_heads, _ = q.shape
    queries = TILE_COLUMNS // num_heads
    width = lists.shape[1]
    keys = tile_keys(k.device.type, width)
    per_program = keys * TILES_PER_PROGRAM
    compiled = _score_lists_kernel[(triton.cdiv(num_rows, queries), triton.cdiv(width, per_program))](
        q, k, k_scale, weights, ks, ke, lists, listed, score, num_rows, width, score.stride(0), rows_per_list,
        HEADS=num_heads, QUERIES=queries, KEYS=keys, PER_PROGRAM=per_program,
        **OPTIONS,
    )  # fmt: skip
    require_tensor_core_chain(compiled)
