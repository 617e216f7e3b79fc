"""What each head does on a sample of keys: mean positive and mean negative dot. It steers the choice of columns."""

import triton
import triton.language as tl


@triton.jit
def _head_means_kernel(
    q_ptr,  # [rows, HEADS, 128] e4m3
    k_ptr,  # [num_keys, 128] e4m3
    norm_ptr,  # [num_keys] f32
    sample_ptr,  # [rows, SAMPLE] i32
    above_ptr,  # [rows, HEADS] f32
    below_ptr,  # [rows, HEADS] f32
    mean_norm_ptr,  # [rows] f32
    HEADS: tl.constexpr,
    SAMPLE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    depth = tl.arange(0, 128)
    heads = row * HEADS + tl.arange(0, HEADS)
    q = tl.load(q_ptr + heads[:, None] * 128 + depth[None, :])
    key = tl.load(sample_ptr + row * SAMPLE + tl.arange(0, SAMPLE))
    norm = tl.load(norm_ptr + tl.maximum(key, 0))
    # An unusable key has an infinite norm.
    listed = (key >= 0) & (norm < float("inf"))
    k = tl.load(k_ptr + tl.maximum(key, 0).to(tl.int64)[:, None] * 128 + depth[None, :])
    dot = tl.dot(k, tl.trans(q))
    dot = tl.where(listed[:, None] & (dot == dot), dot, 0.0)
    count = tl.maximum(tl.sum(listed.to(tl.float32), axis=0), 1.0)
    tl.store(above_ptr + heads, tl.sum(tl.maximum(dot, 0.0), axis=0) / count)
    tl.store(below_ptr + heads, tl.sum(tl.maximum(-dot, 0.0), axis=0) / count)
    tl.store(mean_norm_ptr + row, tl.sum(tl.where(listed, norm, 0.0), axis=0) / count)


def launch_head_means(q, k, norm, sample, above, below, mean_norm) -> None:
    """Write, per row, ``mean relu(q_h . k)``, ``mean relu(-q_h . k)`` and the mean norm over the sampled keys.

    Args:
        q: ``[rows, num_heads, 128]`` float8_e4m3fn, contiguous; ``num_heads`` 32 or 64.
        k: ``[num_keys, 128]`` float8_e4m3fn, contiguous.
        norm: ``[num_keys]`` float32, +Inf for an unusable key.
        sample: ``[rows, n]`` int32 key columns, -1 for none; n a power of two from 64.
        above, below: ``[rows, num_heads]`` float32, written.
        mean_norm: ``[rows]`` float32, written; 0 without a usable key.

    Exactness: heuristic; it decides how much is pruned, never whether the bound holds.
    """
    rows, heads, _ = q.shape
    _head_means_kernel[(rows,)](
        q, k, norm, sample, above, below, mean_norm, HEADS=heads, SAMPLE=sample.shape[1], num_warps=4
    )
