"""Share of sampled keys on which each head is active: what steers the choice of columns."""

import triton
import triton.language as tl


@triton.jit
def _activity_kernel(
    q_ptr,  # [rows, HEADS, 128] e4m3
    k_ptr,  # [num_keys, 128] e4m3
    sample_ptr,  # [rows, SAMPLE] i32
    active_ptr,  # [rows, HEADS] f32
    HEADS: tl.constexpr,
    SAMPLE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    depth = tl.arange(0, 128)
    heads = row * HEADS + tl.arange(0, HEADS)
    q = tl.load(q_ptr + heads[:, None] * 128 + depth[None, :])
    key = tl.load(sample_ptr + row * SAMPLE + tl.arange(0, SAMPLE)).to(tl.int64)
    k = tl.load(k_ptr + key[:, None] * 128 + depth[None, :])
    dot = tl.dot(k, tl.trans(q))
    tl.store(active_ptr + heads, tl.sum((dot > 0).to(tl.float32), axis=0) / SAMPLE)


def launch_activity(q, k, sample, active) -> None:
    """Write, per row and head, the share of the sampled keys with ``q_h . k > 0``.

    Args:
        q: ``[rows, num_heads, 128]`` float8_e4m3fn, contiguous; ``num_heads`` 32 or 64.
        k: ``[num_keys, 128]`` float8_e4m3fn, contiguous.
        sample: ``[rows, n]`` int32 key columns, n a power of two from 64.
        active: ``[rows, num_heads]`` float32, written.

    Exactness: heuristic; it decides how much is pruned, never whether the bound holds.
    """
    rows, heads, _ = q.shape
    _activity_kernel[(rows,)](q, k, sample, active, HEADS=heads, SAMPLE=sample.shape[1], num_warps=4)
