"""Query-side preparation of the bound: columns, coefficients, ``rho`` and the guard, rounded outward.

What is chosen here (which heads to keep, the projection, the aggregate) decides how much is pruned, never whether the
bound holds; ``docs/bound.md`` has the mathematics, term by term.
"""

from __future__ import annotations

import dataclasses

import torch

from dosa_gpu.kernels.head_terms import launch_head_terms
from dosa_gpu.kernels.project import launch_project
from dosa_gpu.kernels.row_bound import launch_row_bound

ACTIVE_SHARE = 0.5
"""Negative heads active on at least this share of the sample join the aggregate."""
SMALLEST_TILE = 16
"""The projection's slots are padded to this or to twice this: what a matrix product takes."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RowConstants:
    """What the bound pass needs of each row, and the multipliers that certify it.

    Attributes:
        columns: ``[rows, M, 128]`` float8_e4m3fn.
        coefficients: ``[rows, M]`` float32.
        linear: ``[rows, M]`` bool; the others are relu columns.
        slack: ``[rows]`` float32, coefficient of the key norm.
        non_finite: ``[rows]`` bool; the row must not be pruned (NaN or Inf in q or weights).
        too_large: ``[rows]`` bool; the row must not be pruned (the bound could overflow).
        retained: ``[rows, M]`` int32, head of a retained column, -1 elsewhere.
        projection: ``[rows, H, M - 1]`` float32, multiplier of retained column j for omitted head g.
        aggregate: ``[rows, H]`` float32, multiplier of an aggregated head, 0 elsewhere.
    """

    columns: torch.Tensor
    coefficients: torch.Tensor
    linear: torch.Tensor
    slack: torch.Tensor
    non_finite: torch.Tensor
    too_large: torch.Tensor
    retained: torch.Tensor
    projection: torch.Tensor
    aggregate: torch.Tensor


def prepare_rows(q: torch.Tensor, weights: torch.Tensor, activity: torch.Tensor, num_columns: int) -> RowConstants:
    """Choose and round the bound of each row.

    Slots ``0 .. M-3`` hold retained heads (positive heads by ``w ||q||``, then negative ones by ``|w| ||q||
    activity``); slot ``M-2`` one more head, or the linear column if a positive head is left out; slot ``M-1`` the
    aggregate.

    Args:
        q: ``[rows, H, 128]`` float8_e4m3fn, contiguous; H 32 or 64.
        weights: ``[rows, H]`` float32, contiguous.
        activity: ``[rows, H]``, share of sampled keys with a positive dot; steers the choice only.
        num_columns: M.

    Returns:
        RowConstants; rows marked ``non_finite`` or ``too_large`` hold no usable bound.

    Exactness: enclosure. Source: docs/bound.md.
    """
    rows, heads, _ = q.shape
    code = q.view(torch.uint8)
    norm = torch.empty(rows, heads, dtype=torch.float64, device=q.device)
    error = torch.empty_like(norm)
    nan = torch.empty(rows, heads, dtype=torch.int32, device=q.device)
    launch_head_terms(code, norm, error, nan)
    finite_weights = weights.isfinite()
    non_finite = (nan != 0).any(-1) | ~finite_weights.all(-1)
    w = torch.where(finite_weights, weights, 0.0)

    strength = w.double().abs() * norm
    relative = strength / strength.amax(-1, keepdim=True).clamp(min=1e-300)
    rank = torch.where(w > 0, 2.0 + relative, torch.where(w < 0, relative * activity, -1.0))
    slots = num_columns - 1
    best, head = rank.topk(min(slots, heads), dim=-1)
    needs_linear = (w > 0).sum(-1) > slots
    used = best >= 0
    used[:, slots - 1 :] &= ~needs_linear[:, None]
    retained = torch.zeros_like(w, dtype=torch.bool).scatter_(1, head, used)
    share = torch.where((w > 0) & ~retained, w, 0.0)
    multiplier = torch.where((w < 0) & ~retained & (activity >= ACTIVE_SHARE), -w, 0.0)

    padded = SMALLEST_TILE if slots <= SMALLEST_TILE else 2 * SMALLEST_TILE
    slot_head = torch.full((rows, padded), -1, dtype=torch.int32, device=q.device)
    slot_head[:, : head.shape[1]] = torch.where(used, head, -1)
    projection = torch.empty(rows, heads, padded, dtype=torch.float32, device=q.device)
    launch_project(q, slot_head, share, projection)

    columns = torch.empty(rows, num_columns, q.shape[2], dtype=torch.uint8, device=q.device).view(q.dtype)
    coefficients = torch.empty(rows, num_columns, dtype=torch.float32, device=q.device)
    slack = torch.empty(rows, dtype=torch.float32, device=q.device)
    too_large = torch.empty(rows, dtype=torch.int32, device=q.device)
    launch_row_bound(
        code, weights, norm, error, slot_head, share, multiplier, projection, needs_linear.to(torch.int32), num_columns,
        (columns, coefficients, slack, too_large),
    )  # fmt: skip
    linear = torch.zeros_like(coefficients, dtype=torch.bool)
    linear[:, slots - 1] = needs_linear
    return RowConstants(
        columns=columns,
        coefficients=coefficients,
        linear=linear,
        slack=slack,
        non_finite=non_finite,
        too_large=~non_finite & (too_large != 0),
        retained=torch.nn.functional.pad(slot_head[:, :slots], (0, 1), value=-1),
        projection=projection[:, :, :slots],
        aggregate=multiplier,
    )
