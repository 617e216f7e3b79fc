"""Gathered scoring: listed keys of each row, all heads, the dense scorer's bits. Serves seeds and survivors."""

import triton
import triton.language as tl

from dosa_gpu.kernels.combine_heads import combine_heads
from dosa_gpu.machine_code import require_tensor_core_chain
from dosa_gpu.plan import tile_keys

PROGRAMS = 8192
"""Programs that a launch is divided into, as far as there are tiles for them."""
MAX_STEP = 8192
"""Most keys between two tiles of a program: what the lemma on offsets allows beyond the end of a list."""

OPTIONS = {"num_warps": 4, "num_stages": 2, "enable_fp_fusion": False}
"""Compiler options: fp fusion off, since the contract says which products are fused."""


@triton.jit(do_not_specialize=["stride"])
def _rescore_kernel(
    q_ptr,  # [rows, HEADS, 128] e4m3
    k_ptr,  # [num_keys, 128] e4m3
    k_scale_ptr,  # [num_keys] f32
    weights_ptr,  # [rows, HEADS] f32
    index_ptr,  # [rows, stride] i32
    count_ptr,  # [rows] i32
    score_ptr,  # [rows, stride] f32
    stride,
    HEADS: tl.constexpr,
    KEYS: tl.constexpr,
):
    row = tl.program_id(0)
    count = tl.load(count_ptr + row)
    count = tl.where(count > stride, 0, count)
    start = tl.program_id(1) * KEYS
    if start < count:
        heads = row * HEADS + tl.arange(0, HEADS)
        depth = tl.arange(0, 128)
        q = tl.load(q_ptr + heads.to(tl.int64)[:, None] * 128 + depth[None, :])
        weight = tl.load(weights_ptr + heads)
        base = row.to(tl.int64) * stride
        for tile in tl.range(start, count, tl.num_programs(1) * KEYS):
            place = tile + tl.arange(0, KEYS)
            listed = place < count
            key = tl.load(index_ptr + base + place, mask=listed, other=0)
            k = tl.load(k_ptr + key.to(tl.int64)[:, None] * 128 + depth[None, :])
            k_scale = tl.load(k_scale_ptr + key)
            dot = tl.dot(k, tl.trans(q))
            score = combine_heads(dot, weight, k_scale, KEYS, 1, HEADS)
            tl.store(score_ptr + base + place, tl.reshape(score, (KEYS,)), mask=listed)


def launch_rescore(q, k, k_scale, weights, index, count, score) -> None:
    """Score the first ``count[row]`` keys of each row's list.

    Args:
        q, k, k_scale, weights: as in ``launch_score``.
        index: ``[rows, capacity]`` int32 key columns, contiguous.
        count: ``[rows]`` int32; a row with more than ``capacity`` is passed over.
        score: ``[rows, capacity]`` float32, written at the listed places only.

    The programs of a row take its tiles in turn, so that the launch need not know how long the lists are.

    Exactness: model of hardware, contract ``sm90``; the bits of ``launch_score``.
    """
    num_rows, num_heads, _ = q.shape
    capacity = index.shape[1]
    keys = tile_keys(k.device.type, capacity)
    programs = max(1, min(triton.cdiv(capacity, keys), PROGRAMS // max(num_rows, 1), MAX_STEP // keys))
    compiled = _rescore_kernel[(num_rows, programs)](
        q, k, k_scale, weights, index, count, score, index.stride(0),
        HEADS=num_heads, KEYS=keys,
        **OPTIONS,
    )  # fmt: skip
    require_tensor_core_chain(compiled)
