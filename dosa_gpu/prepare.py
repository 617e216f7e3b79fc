"""Query-side preparation of the bound: columns, coefficients, ``rho`` and the guard, rounded outward.

Batched over rows in float64 (torch); ``docs/bound.md`` has the mathematics, term by term. What is chosen here (which
heads to keep, the projection, the aggregate) decides how much is pruned, never whether the bound holds.
"""

from __future__ import annotations

import dataclasses

import torch

from dosa_ref import spec

PROJECTION_STEPS = 24
ACTIVE_SHARE = 0.5
"""Negative heads active on at least this share of the sample join the aggregate."""
MAX_EXPONENT = 100
"""Synthetic vectors are scaled by ``2**m`` with ``|m|`` at most this, so that ``2**-m`` stays a normal float32."""

_UNIT = float(spec.FLOAT32_UNIT)
_SMALLEST_NORMAL = float(spec.E4M3_MIN_NORMAL)
_FLOAT64_SLACK = 2.0**spec.FLOAT64_SLACK_LOG2
_OUTWARD = 1.0 + 2.0**spec.OUTWARD_LOG2
_FLOOR = 2.0**spec.SLACK_FLOOR_LOG2
_MAGNITUDE_MAX = 2.0**spec.ROW_MAGNITUDE_LOG2_MAX


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
        retained: ``[rows, M]`` int64, head of a retained column, -1 elsewhere.
        projection: ``[rows, H, M - 1]`` float64, multiplier of retained column j for omitted head g.
        aggregate: ``[rows, H]`` float64, multiplier of an aggregated head, 0 elsewhere.
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


def dot_error(vectors: torch.Tensor) -> torch.Tensor:
    """``D(v)``: the computed dot with any key is within ``D(v) * ||k~||`` of the real one.

    Args:
        vectors: ``[..., 128]`` float64, E4M3 values.

    Returns:
        ``[...]`` float64.
    """
    blocks = vectors.unflatten(-1, (spec.STEPS, spec.STEP_TERMS))
    magnitude = blocks.abs()
    largest = torch.where(magnitude > 0, magnitude.clamp(min=_SMALLEST_NORMAL), magnitude).amax(-1)
    prefix = blocks.square().sum(-1).cumsum(-1).sqrt()
    later = torch.maximum(largest[..., 1:], prefix[..., :-1]).sum(-1)
    aligned = spec.FIRST_STEP_LOSSY * largest[..., 0] + spec.STEP_LOSSY * later
    return (aligned + prefix.sum(-1)) * 2.0**-spec.FRACTION_BITS


def project(targets: torch.Tensor, basis: torch.Tensor) -> torch.Tensor:
    """Non-negative least squares by accelerated projected gradients, a fixed number of steps, in float32.

    Args:
        targets: ``[rows, H, 128]`` float64.
        basis: ``[rows, m, 128]`` float64; zero vectors get the multiplier 0.

    Returns:
        ``[rows, H, m]`` float64, all >= 0. Any such value is sound; a better fit prunes more.
    """
    vectors = basis.to(torch.float32)
    gram = vectors @ vectors.transpose(1, 2)
    wanted = targets.to(torch.float32) @ vectors.transpose(1, 2)
    # Unit vectors: the step size then depends on the angles only.
    diagonal = gram.diagonal(dim1=1, dim2=2)
    shrink = torch.where(diagonal > 0, diagonal.clamp(min=1e-30).rsqrt(), 0.0)
    gram = gram * shrink[:, :, None] * shrink[:, None, :]
    wanted = wanted * shrink[:, None, :]
    # The largest row sum bounds the largest eigenvalue.
    step = 1.0 / gram.abs().sum(-1).amax(-1).clamp(min=1.0)[:, None, None]
    multiplier = torch.zeros_like(wanted)
    point, momentum = multiplier, 1.0
    for _ in range(PROJECTION_STEPS):
        moved = (point - (point @ gram - wanted) * step).clamp(min=0.0)
        following = (1.0 + (1.0 + 4.0 * momentum * momentum) ** 0.5) / 2.0
        point = moved + (moved - multiplier) * ((momentum - 1.0) / following)
        multiplier, momentum = moved, following
    return (multiplier * shrink[:, None, :]).double()


def round_up(value: torch.Tensor) -> torch.Tensor:
    """Smallest float32 that is at least the float64 value."""
    nearest = value.to(torch.float32)
    return torch.where(nearest.double() < value, torch.nextafter(nearest, torch.full_like(nearest, torch.inf)), nearest)


def _to_fp8(vector: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """``v = 2**-m y + e`` for ``[rows, 128]`` float64: y (float8), its value, ``2**-m`` and ``||e||`` (float64)."""
    mantissa, exponent = torch.frexp(vector.abs().amax(-1))
    # 448 = 0.875 * 2^9: the largest element may just reach it.
    power = torch.where(mantissa <= 0.875, 9 - exponent, 8 - exponent).clamp(-MAX_EXPONENT, MAX_EXPONENT)
    scale = torch.ldexp(torch.ones_like(mantissa), -power)
    limit = float(spec.E4M3_MAX)
    y = (vector / scale.unsqueeze(-1)).clamp(-limit, limit).to(torch.float32).to(torch.float8_e4m3fn)
    value = y.to(torch.float32).double()
    error = (vector - scale.unsqueeze(-1) * value).norm(dim=-1)
    return y, value, scale, error


def prepare_rows(q: torch.Tensor, weights: torch.Tensor, activity: torch.Tensor, num_columns: int) -> RowConstants:
    """Choose and round the bound of each row.

    Slots ``0 .. M-3`` hold retained heads (positive heads by ``w ||q||``, then negative ones by ``|w| ||q||
    activity``); slot ``M-2`` one more head, or the linear column if a positive head is left out; slot ``M-1`` the
    aggregate.

    Args:
        q: ``[rows, H, 128]`` float8_e4m3fn.
        weights: ``[rows, H]`` float32.
        activity: ``[rows, H]`` float64, share of sampled keys with a positive dot; steers the choice only.
        num_columns: M.

    Returns:
        RowConstants; rows marked ``non_finite`` or ``too_large`` hold no usable bound.

    Exactness: enclosure. Source: docs/bound.md.
    """
    finite_code = (q.view(torch.uint8) & 0x7F) != 0x7F
    non_finite = ~(finite_code.all(-1).all(-1) & weights.isfinite().all(-1))
    w = torch.where(non_finite[:, None], 0.0, weights.double())
    x = torch.where(non_finite[:, None, None], 0.0, q.to(torch.float32).double())
    norm = x.norm(dim=-1)
    error = dot_error(x)
    magnitude = norm + error

    strength = w.abs() * norm
    relative = strength / strength.amax(-1, keepdim=True).clamp(min=1e-300)
    rank = torch.where(w > 0, 2.0 + relative, torch.where(w < 0, relative * activity, -1.0))
    slots = num_columns - 1
    best, head = rank.topk(min(slots, w.shape[1]), dim=-1)
    needs_linear = (w > 0).sum(-1) > slots
    used = best >= 0
    used[:, slots - 1 :] &= ~needs_linear[:, None]
    retained = torch.zeros_like(w, dtype=torch.bool).scatter_(1, head, used)
    omitted = (w > 0) & ~retained
    aggregated = (w < 0) & ~retained & (activity >= ACTIVE_SHARE)

    basis = x.gather(1, head.unsqueeze(-1).expand(-1, -1, x.shape[-1])) * used.unsqueeze(-1)
    projection = project(x, basis) * omitted.unsqueeze(-1)
    share = torch.where(omitted, w, 0.0)
    projected = (share.unsqueeze(-1) * projection).sum(1)
    residual = share.unsqueeze(-1) * (x - projection @ basis)
    rho = (residual @ residual.transpose(1, 2)).abs().sum((1, 2)).sqrt() / 2.0
    multiplier = torch.where(aggregated, w.abs(), 0.0)

    linear_y, linear_value, linear_scale, linear_rounding = _to_fp8(residual.sum(1) / 2.0)
    aggregate_y, aggregate_value, aggregate_scale, aggregate_rounding = _to_fp8((multiplier.unsqueeze(-1) * x).sum(1))

    columns = q.view(torch.uint8).gather(1, head.unsqueeze(-1).expand(-1, -1, q.shape[-1])) * used.unsqueeze(-1)
    columns = torch.cat([columns, aggregate_y.view(torch.uint8).unsqueeze(1)], dim=1)
    columns[:, slots - 1] = torch.where(needs_linear[:, None], linear_y.view(torch.uint8), columns[:, slots - 1])
    slot_weight = torch.where(used, w.gather(1, head) + projected, 0.0)
    coefficient = torch.cat([slot_weight, -aggregate_scale.unsqueeze(1)], dim=1)
    coefficient[:, slots - 1] = torch.where(needs_linear, linear_scale, coefficient[:, slots - 1])
    linear = torch.zeros_like(coefficient, dtype=torch.bool)
    linear[:, slots - 1] = needs_linear
    rounded = round_up(coefficient)

    # Per slot: ||y|| + D(y) of the vector that the scan multiplies.
    synthetic = torch.stack([linear_value, aggregate_value], dim=1)
    synthetic_error = dot_error(synthetic)
    synthetic_magnitude = synthetic.norm(dim=-1) + synthetic_error
    slot_error = torch.where(used, error.gather(1, head), 0.0)
    slot_magnitude = torch.where(used, magnitude.gather(1, head), 0.0)
    column_magnitude = torch.cat([slot_magnitude, synthetic_magnitude[:, 1:]], dim=1)
    column_magnitude[:, slots - 1] = torch.where(
        needs_linear, synthetic_magnitude[:, 0], column_magnitude[:, slots - 1]
    )
    column_sum = (rounded.double().abs() * column_magnitude).sum(-1)
    head_sum = (w.abs() * magnitude).sum(-1)

    # Without an omitted head the linear column is not there, and its terms are zero: the residual sum is the zero
    # vector.
    terms = (
        rho
        + (share * error).sum(-1)
        + (projected * slot_error).sum(-1)
        + (multiplier * error).sum(-1)
        + linear_scale * synthetic_error[:, 0]
        + aggregate_scale * synthetic_error[:, 1]
        + linear_rounding
        + aggregate_rounding
        + spec.HEAD_CHAIN_ULPS * _UNIT * head_sum
    )
    terms = terms + spec.BOUND_CHAIN_ULPS * _UNIT * (column_sum + terms)
    terms = terms + _FLOAT64_SLACK * (head_sum + column_sum + terms + (projected * slot_magnitude).sum(-1))
    slack = round_up((terms + _FLOOR) * _OUTWARD)
    total = head_sum + column_sum + slack.double()
    retained_head = torch.full_like(rounded, -1, dtype=torch.int64)
    retained_head[:, : head.shape[1]] = torch.where(used, head, -1)
    return RowConstants(
        columns=columns.view(torch.float8_e4m3fn),
        coefficients=rounded,
        linear=linear,
        slack=slack,
        non_finite=non_finite,
        too_large=~non_finite & ~(total <= _MAGNITUDE_MAX),
        retained=retained_head,
        projection=projection,
        aggregate=multiplier,
    )
