"""Which heads of a row keep a column, are projected, or join the linear column."""

import triton
import triton.language as tl

RESIDUAL_SHARE = 0.7
"""Share of the residual's norm bound that a hard key is taken to lose, in the choice between positive and negative."""


@triton.jit
def _choose_heads_kernel(
    q_ptr,  # [rows, HEADS, 128] e4m3
    weight_ptr,  # [rows, HEADS] f32
    error_ptr,  # [rows, HEADS] f64
    nan_ptr,  # [rows, HEADS] i32
    above_ptr,  # [rows, HEADS] f32
    below_ptr,  # [rows, HEADS] f32
    mean_norm_ptr,  # [rows] f32
    head_ptr,  # [rows, SLOTS] i32
    share_ptr,  # [rows, HEADS] f32
    multiplier_ptr,  # [rows, HEADS] f32
    unusable_ptr,  # [rows] i32
    budget,
    residual_share,
    HEADS: tl.constexpr,
    SLOTS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, HEADS)
    slot = tl.arange(0, SLOTS)
    place = row * HEADS + head
    weight = tl.load(weight_ptr + place)
    finite = (weight == weight) & (tl.abs(weight) < float("inf"))
    w = tl.where(finite, weight, 0.0)
    error = tl.load(error_ptr + place).to(tl.float32)
    above = tl.load(above_ptr + place)
    below = tl.load(below_ptr + place)
    mean_norm = tl.load(mean_norm_ptr + row)

    # Positive heads in the order of a pivoted Cholesky factorisation of their weighted Gram matrix. What is left of the
    # matrix after p pivots tells how long the residuals will be with p retained heads.
    x = tl.load(q_ptr + place[:, None] * 128 + tl.arange(0, 128)[None, :]).to(tl.float32)
    positive = tl.where(w > 0, w, 0.0)
    x = tl.where(x == x, x, 0.0) * positive[:, None]
    gram = tl.dot(x, tl.trans(x))
    alive = w > 0
    dot_loss = positive * error
    left_dot = tl.sum(dot_loss, axis=0)
    order = tl.full((HEADS,), 1 << 20, dtype=tl.int32)
    residual = tl.zeros((SLOTS,), dtype=tl.float32)
    for step in range(budget + 1):
        both = alive[:, None] & alive[None, :]
        rest = tl.sqrt(tl.sum(tl.sum(tl.where(both, tl.abs(gram), 0.0), axis=1), axis=0)) * 0.5
        residual = tl.where(slot == step, rest + 2.0 * left_dot, residual)
        diagonal = tl.sum(tl.where(head[:, None] == head[None, :], gram, 0.0), axis=0)
        diagonal = tl.where(alive, diagonal, float("-inf"))
        largest = tl.max(diagonal, axis=0)
        # No head is the pivot when none is left.
        pivot = tl.min(tl.where(alive & (diagonal == largest), head, HEADS), axis=0)
        order = tl.where(head == pivot, step, order)
        left_dot -= tl.sum(tl.where(head == pivot, dot_loss, 0.0), axis=0)
        column = tl.sum(tl.where(head[None, :] == pivot, gram, 0.0), axis=1)
        factor = tl.where(largest > 0, 1.0 / tl.maximum(largest, 1e-30), 0.0)
        gram -= column[:, None] * column[None, :] * factor
        alive = alive & (head != pivot)

    # What leaving out a negative head loses: the smaller of counting it 0 and counting it linearly.
    negative = tl.where(w < 0, -w, 0.0)
    linear = above > below
    loss = negative * (tl.minimum(above, below) + tl.where(linear, error * mean_norm, 0.0))
    loss = tl.where(w < 0, loss, -1.0)
    ahead = (loss[None, :] > loss[:, None]) | ((loss[None, :] == loss[:, None]) & (head[None, :] < head[:, None]))
    rank = tl.sum(ahead.to(tl.int32), axis=1)
    left_out = rank[None, :] >= (budget - slot)[:, None]
    negative_loss = tl.sum(tl.where(left_out, tl.maximum(loss, 0.0)[None, :], 0.0), axis=1)
    cost = residual_share * mean_norm * residual + negative_loss
    count = tl.sum((w > 0).to(tl.int32), axis=0)
    cost = tl.where((slot <= budget) & (slot <= count), cost, float("inf"))
    least = tl.min(cost, axis=0)
    kept = tl.min(tl.where(cost == least, slot, SLOTS), axis=0)
    kept = tl.minimum(kept, tl.minimum(budget, count))

    retained_positive = (w > 0) & (order < kept)
    retained_negative = (w < 0) & (rank < budget - kept)
    own_slot = tl.where(retained_positive, order, tl.where(retained_negative, kept + rank, -1))
    here = own_slot[None, :] == slot[:, None]
    tl.store(head_ptr + row * SLOTS + slot, tl.sum(tl.where(here, head[None, :] + 1, 0), axis=1) - 1)
    tl.store(share_ptr + place, tl.where((w > 0) & (retained_positive == 0), w, 0.0))
    tl.store(multiplier_ptr + place, tl.where((w < 0) & (retained_negative == 0) & linear, -w, 0.0))
    unusable = tl.where(finite, tl.load(nan_ptr + place), 1)
    tl.store(unusable_ptr + row, tl.max(unusable, axis=0))


def launch_choose_heads(
    q, weights, error, nan, above, below, mean_norm, budget: int, head, share, multiplier, unusable
) -> None:
    """Give each row's ``budget`` relu columns to heads; the other heads are projected or counted linearly.

    Positive heads are taken in the order of a pivoted Cholesky factorisation of the weighted Gram matrix, negative ones
    by what leaving them out would lose on the sampled keys. Their numbers are those with the least expected loss.

    Args:
        q: ``[rows, num_heads, 128]`` float8_e4m3fn, contiguous; a NaN counts as 0.
        weights: ``[rows, num_heads]`` float32; NaN and Inf count as 0.
        error: ``[rows, num_heads]`` float64, ``D(q_h)``.
        nan: ``[rows, num_heads]`` int32, 1 for a head with a NaN code.
        above, below, mean_norm: from ``launch_head_means``.
        budget: relu columns, less than ``slots``.
        head: ``[rows, slots]`` int32, written: retained head per slot, -1 for none; slots a power of two.
        share: ``[rows, num_heads]`` float32, written: the weight of an omitted positive head, else 0.
        multiplier: ``[rows, num_heads]`` float32, written: ``|w|`` of a negative head in the linear column, else 0.
        unusable: ``[rows]`` int32, written: 1 for NaN or Inf in the row's query or weights.

    Exactness: heuristic; every choice is sound.
    """
    rows, heads = weights.shape
    _choose_heads_kernel[(rows,)](
        q, weights, error, nan, above, below, mean_norm, head, share, multiplier, unusable, budget, RESIDUAL_SHARE,
        HEADS=heads, SLOTS=head.shape[1], num_warps=1,
    )  # fmt: skip
