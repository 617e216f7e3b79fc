"""Non-negative projection of every head on its row's retained heads."""

import triton
import triton.language as tl

STEPS = 24
"""Accelerated projected gradient steps. Any multipliers >= 0 are sound; a better fit prunes more."""


@triton.jit
def _project_kernel(
    q_ptr,  # [rows, HEADS, 128] e4m3
    head_ptr,  # [rows, SLOTS] i32, -1 for an unused slot
    share_ptr,  # [rows, HEADS] f32, 0 for a head that is not omitted
    out_ptr,  # [rows, HEADS, SLOTS] f32
    HEADS: tl.constexpr,
    SLOTS: tl.constexpr,
    STEPS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    depth = tl.arange(0, 128)
    heads = tl.arange(0, HEADS)
    slots = tl.arange(0, SLOTS)
    head = tl.load(head_ptr + row * SLOTS + slots)
    used = head >= 0
    safe = tl.maximum(head, 0)
    x = tl.load(q_ptr + (row * HEADS + heads)[:, None] * 128 + depth[None, :]).to(tl.float32)
    basis = tl.load(q_ptr + (row * HEADS + safe)[:, None] * 128 + depth[None, :]).to(tl.float32)
    # A row with a NaN code is not pruned; here it only must not spread.
    x = tl.where(x == x, x, 0.0)
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
    multiplier = tl.zeros((HEADS, SLOTS), dtype=tl.float32)
    point = multiplier
    momentum = step * 0.0 + 1.0
    for _ in range(STEPS):
        moved = tl.maximum(point - (tl.dot(point, gram) - wanted) * step, 0.0)
        following = (1.0 + tl.sqrt(1.0 + 4.0 * momentum * momentum)) / 2.0
        point = moved + (moved - multiplier) * ((momentum - 1.0) / following)
        multiplier = moved
        momentum = following
    omitted = tl.load(share_ptr + row * HEADS + heads) > 0
    multiplier = tl.where(omitted[:, None], multiplier * shrink[None, :], 0.0)
    tl.store(out_ptr + (row * HEADS + heads)[:, None] * SLOTS + slots[None, :], multiplier)


def launch_project(q, head, share, out) -> None:
    """Write ``a_gj >= 0`` with ``q_g`` near ``sum_j a_gj q_head(j)`` for each omitted head g, 0 for the others.

    Args:
        q: ``[rows, num_heads, 128]`` float8_e4m3fn, contiguous.
        head: ``[rows, slots]`` int32, the retained head of each slot, -1 for an unused one; slots a power of two
            from 16.
        share: ``[rows, num_heads]`` float32, above 0 for an omitted head.
        out: ``[rows, num_heads, slots]`` float32, written; 0 in unused slots.

    Exactness: heuristic. Any multipliers >= 0 are sound.
    """
    rows, heads, _ = q.shape
    _project_kernel[(rows,)](q, head, share, out, HEADS=heads, SLOTS=head.shape[1], STEPS=STEPS, num_warps=4)
