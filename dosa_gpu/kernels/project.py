"""Non-negative projection of omitted heads on their row's retained heads."""

import triton
import triton.language as tl

STEPS = 24
"""Accelerated proximal gradient steps. Any multipliers >= 0 are sound; a better fit prunes more."""


@triton.jit
def _project_kernel(
    q_ptr,  # [rows, HEADS, 128] e4m3
    head_ptr,  # [rows, SLOTS] i32, -1 for an unused slot
    share_ptr,  # [rows, HEADS] f32, 0 for a head that is not omitted
    above_ptr,  # [rows, HEADS] f32
    below_ptr,  # [rows, HEADS] f32
    mean_norm_ptr,  # [rows] f32
    out_ptr,  # [rows, HEADS, SLOTS] f32
    HEADS: tl.constexpr,
    SLOTS: tl.constexpr,
    STEPS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    depth = tl.arange(0, 128)
    heads = row * HEADS + tl.arange(0, HEADS)
    slots = tl.arange(0, SLOTS)
    head = tl.load(head_ptr + row * SLOTS + slots)
    used = head >= 0
    own = row * HEADS + tl.maximum(head, 0)
    # A row with a NaN code is not pruned; here it only must not spread.
    x = tl.load(q_ptr + heads[:, None] * 128 + depth[None, :]).to(tl.float32)
    x = tl.where(x == x, x, 0.0)
    basis = tl.load(q_ptr + own[:, None] * 128 + depth[None, :]).to(tl.float32)
    basis = tl.where(used[:, None] & (basis == basis), basis, 0.0)
    wanted = tl.dot(x, tl.trans(basis))
    gram = tl.dot(basis, tl.trans(basis))
    # Unit vectors: the step size then depends on the angles only.
    diagonal = tl.sum(tl.where(slots[:, None] == slots[None, :], gram, 0.0), axis=0)
    shrink = tl.where(diagonal > 0, tl.rsqrt(tl.maximum(diagonal, 1e-30)), 0.0)
    gram = gram * shrink[:, None] * shrink[None, :]
    wanted = wanted * shrink[None, :]
    # The largest row sum bounds the largest eigenvalue.
    step = 1.0 / tl.maximum(tl.max(tl.sum(tl.abs(gram), axis=1), axis=0), 1.0)
    # A multiplier costs what its column's relu adds on the sampled keys; a shorter residual saves its norm.
    mean_norm = tl.load(mean_norm_ptr + row)
    mean_size = tl.load(above_ptr + own) + tl.load(below_ptr + own)
    price = mean_size / tl.maximum(mean_norm, 1e-30) * shrink
    threshold = 0.5 * tl.sqrt(tl.sum(x * x, axis=1))[:, None] * price[None, :] * step
    multiplier = tl.zeros((HEADS, SLOTS), dtype=tl.float32)
    point = multiplier
    momentum = step * 0.0 + 1.0
    for _ in range(STEPS):
        moved = tl.maximum(point - (tl.dot(point, gram) - wanted) * step - threshold, 0.0)
        following = (1.0 + tl.sqrt(1.0 + 4.0 * momentum * momentum)) / 2.0
        point = moved + (moved - multiplier) * ((momentum - 1.0) / following)
        multiplier = moved
        momentum = following
    omitted = tl.load(share_ptr + heads) > 0
    multiplier = tl.where(omitted[:, None], multiplier * shrink[None, :], 0.0)
    tl.store(out_ptr + heads[:, None] * SLOTS + slots[None, :], multiplier)


def launch_project(q, head, share, above, below, mean_norm, out) -> None:
    """Write ``a_gj >= 0`` with ``q_g`` near ``sum_j a_gj q_head(j)`` for each omitted head g, 0 for the others.

    Least squares with a price on each multiplier, ``||q_g|| / 2 sum_j a_gj mean|q_head(j) . k| / mean ||k||`` with
    means over the sampled keys: a retained head's relu adds to the bound of every key, a residual only its norm.

    Args:
        q: ``[rows, num_heads, 128]`` float8_e4m3fn, contiguous.
        head: ``[rows, slots]`` int32, the retained head of each slot, -1 for an unused one; slots a power of two
            from 16.
        share: ``[rows, num_heads]`` float32, above 0 for an omitted head.
        above, below, mean_norm: from ``launch_head_means``.
        out: ``[rows, num_heads, slots]`` float32, written; 0 in unused slots.

    Exactness: heuristic. Any multipliers >= 0 are sound.
    """
    rows, heads, _ = q.shape
    _project_kernel[(rows,)](
        q, head, share, above, below, mean_norm, out,
        HEADS=heads, SLOTS=head.shape[1], STEPS=STEPS, num_warps=4,
    )  # fmt: skip
