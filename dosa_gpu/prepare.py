"""Query-side preparation of the bound: columns, coefficients, ``rho`` and the guard, rounded outward.

What is chosen here (which heads to keep, the projection, the linear column) decides how much is pruned, never whether
the bound holds; ``docs/bound.md`` has the mathematics, term by term.
"""

from __future__ import annotations

import dataclasses

import torch

from dosa_gpu.kernels.choose_heads import launch_choose_heads
from dosa_gpu.kernels.head_means import launch_head_means
from dosa_gpu.kernels.head_terms import launch_head_terms
from dosa_gpu.kernels.project import launch_project
from dosa_gpu.kernels.row_bound import launch_row_bound

SMALLEST_TILE = 16
"""Slots are padded to this or to twice this: what a matrix product takes."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RowConstants:
    """What the bound pass needs of each row, and the multipliers that certify it.

    Attributes:
        columns: ``[rows, M, 128]`` float8_e4m3fn; the last one is linear, the others are relu columns.
        coefficients: ``[rows, M]`` float32.
        slack: ``[rows]`` float32, coefficient of the key norm.
        state: ``[rows]`` int32: 0, or why the row must not be pruned: ``NON_FINITE`` (NaN or Inf in q or weights) or
            ``TOO_LARGE`` (the bound could overflow).
        head: ``[rows, slots >= M - 1]`` int32, head of a retained column, -1 elsewhere.
        projection: ``[rows, H, slots]`` float32, multiplier of retained column j for omitted head g.
        multiplier: ``[rows, H]`` float32, multiplier of a negative head in the linear column, 0 elsewhere.
    """

    columns: torch.Tensor
    coefficients: torch.Tensor
    slack: torch.Tensor
    state: torch.Tensor
    head: torch.Tensor
    projection: torch.Tensor
    multiplier: torch.Tensor


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """What the preparation needs of each head, whatever the number of columns.

    Attributes:
        norm: ``[rows, H]`` float64, ``||q_h||``.
        error: ``[rows, H]`` float64, ``D(q_h)``.
        nan: ``[rows, H]`` int32, 1 for a head with a NaN code.
        above, below: ``[rows, H]`` float32, mean of ``relu(q_h . k)`` and of ``relu(-q_h . k)`` on sampled keys.
        mean_norm: ``[rows]`` float32, mean norm of the sampled keys.
    """

    norm: torch.Tensor
    error: torch.Tensor
    nan: torch.Tensor
    above: torch.Tensor
    below: torch.Tensor
    mean_norm: torch.Tensor


def head_terms(q: torch.Tensor, k: torch.Tensor, key_norm: torch.Tensor, sample: torch.Tensor) -> Heads:
    """Norms and errors of the heads, and what they do on a sample of keys.

    Args:
        q: ``[rows, H, 128]`` float8_e4m3fn, contiguous.
        k, key_norm: the keys and their norms.
        sample: ``[rows, n]`` int32, keys near ``tau``; they steer the choice of columns only.
    """
    rows, num_heads, _ = q.shape
    norm, error = (torch.empty(rows, num_heads, dtype=torch.float64, device=q.device) for _ in range(2))
    nan = torch.empty(rows, num_heads, dtype=torch.int32, device=q.device)
    above, below = (torch.empty(rows, num_heads, dtype=torch.float32, device=q.device) for _ in range(2))
    mean_norm = torch.empty(rows, dtype=torch.float32, device=q.device)
    launch_head_terms(q.view(torch.uint8), norm, error, nan)
    launch_head_means(q, k, key_norm, sample, above, below, mean_norm)
    return Heads(norm=norm, error=error, nan=nan, above=above, below=below, mean_norm=mean_norm)


def prepare_rows(q: torch.Tensor, weights: torch.Tensor, heads: Heads, num_columns: int) -> RowConstants:
    """Choose and round the bound of each row: ``M - 1`` relu columns of heads, and one linear column.

    Args:
        q: ``[rows, H, 128]`` float8_e4m3fn, contiguous; H 32 or 64.
        weights: ``[rows, H]`` float32, contiguous.
        heads: ``head_terms(q, ...)``.
        num_columns: M, 2 to 32.

    Returns:
        RowConstants; rows with a state hold no usable bound.

    Exactness: enclosure. Source: docs/bound.md.
    """
    rows, num_heads, _ = q.shape
    slots = SMALLEST_TILE if num_columns <= SMALLEST_TILE else 2 * SMALLEST_TILE

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=q.device)

    head = empty(rows, slots, dtype=torch.int32)
    share, multiplier, projection = empty(rows, num_heads), empty(rows, num_heads), empty(rows, num_heads, slots)
    unusable, state = empty(rows, dtype=torch.int32), empty(rows, dtype=torch.int32)
    columns = empty(rows, num_columns, q.shape[2], dtype=torch.uint8).view(q.dtype)
    coefficients, slack = empty(rows, num_columns), empty(rows)
    steering = (heads.above, heads.below, heads.mean_norm)
    launch_choose_heads(
        q, weights, heads.error, heads.nan, *steering, num_columns - 1, head, share, multiplier, unusable
    )
    launch_project(q, head, share, *steering, projection)
    launch_row_bound(
        q.view(torch.uint8), weights, heads.norm, heads.error, head, share, multiplier, projection, unusable,
        num_columns, (columns, coefficients, slack, state),
    )  # fmt: skip
    return RowConstants(
        columns=columns,
        coefficients=coefficients,
        slack=slack,
        state=state,
        head=head,
        projection=projection,
        multiplier=multiplier,
    )
