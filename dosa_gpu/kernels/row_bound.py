"""The bound of one row: columns, coefficients and slack from the chosen heads and multipliers, rounded outward."""

import triton
import triton.language as tl

from dosa_gpu.kernels.head_terms import CUT, decode, harms, later_steps, step_norms, vector_terms
from dosa_ref import spec

NON_FINITE = 1
TOO_LARGE = 2
_NON_FINITE = tl.constexpr(NON_FINITE)
_TOO_LARGE = tl.constexpr(TOO_LARGE)
_MAX_EXPONENT = tl.constexpr(100)
_E4M3_MAX = tl.constexpr(float(spec.E4M3_MAX))
_HEAD_ULPS = tl.constexpr(spec.HEAD_CHAIN_ULPS * float(spec.FLOAT32_UNIT))
_BOUND_ULPS = tl.constexpr(spec.BOUND_CHAIN_ULPS * float(spec.FLOAT32_UNIT))
_FLOAT64_SLACK = tl.constexpr(2.0**spec.FLOAT64_SLACK_LOG2)
_OUTWARD = tl.constexpr(1.0 + 2.0**spec.OUTWARD_LOG2)
_FLOOR = tl.constexpr(2.0**spec.SLACK_FLOOR_LOG2)
_MAGNITUDE_MAX = tl.constexpr(2.0**spec.ROW_MAGNITUDE_LOG2_MAX)


@triton.jit
def round_up(value):
    """Smallest float32 that is at least the float64 ``value`` (NaN stays NaN)."""
    nearest = value.to(tl.float32)
    bits = nearest.to(tl.int32, bitcast=True)
    above = tl.where(bits >= 0, bits + 1, tl.where(bits == -2147483648, 1, bits - 1))
    return tl.where(nearest.to(tl.float64) < value, above.to(tl.float32, bitcast=True), nearest)


@triton.jit
def _power_of_two(exponent):
    return ((exponent.to(tl.int64) + 1023) << 52).to(tl.float64, bitcast=True)


@triton.jit
def _round_to_fp8(vector):
    """``vector = scale y + e``, ``scale`` a power of two: y as float8 and as float64, ``scale``, e, ``||e||^2``."""
    largest = tl.max(tl.abs(vector), axis=0)
    bits = largest.to(tl.int64, bitcast=True)
    exponent = ((bits >> 52) & 0x7FF) - 1022
    # 448 = 0.875 * 2^9: the largest element may just reach it.
    power = tl.where((bits & 0xFFFFFFFFFFFFF) <= 0xC000000000000, 9 - exponent, 8 - exponent)
    power = tl.minimum(tl.maximum(power, -_MAX_EXPONENT), _MAX_EXPONENT)
    scale = _power_of_two(-power)
    scaled = (vector * _power_of_two(power)).to(tl.float32)
    scaled = tl.minimum(tl.maximum(scaled, -_E4M3_MAX), _E4M3_MAX)
    y = scaled.to(tl.float8e4nv)
    value = y.to(tl.float32).to(tl.float64)
    rest = vector - scale * value
    return y, value, scale, rest, tl.sum(rest * rest, axis=0)


@triton.jit
def _row_bound_kernel(
    code_ptr,  # [rows, HEADS, 128] u8
    weight_ptr,  # [rows, HEADS] f32
    norm_ptr,  # [rows, HEADS] f64
    error_ptr,  # [rows, HEADS] f64
    head_ptr,  # [rows, SLOTS] i32, -1 for an unused slot
    share_ptr,  # [rows, HEADS] f32, weight of an omitted head, else 0
    multiplier_ptr,  # [rows, HEADS] f32, multiplier of a negative head in the linear column, else 0
    projection_ptr,  # [rows, HEADS, SLOTS] f32
    unusable_ptr,  # [rows] i32
    column_ptr,  # [rows, COLUMNS, 128] e4m3
    column_code_ptr,  # the same memory as u8
    coefficient_ptr,  # [rows, COLUMNS] f32
    slack_ptr,  # [rows] f32
    state_ptr,  # [rows] i32
    HEADS: tl.constexpr,
    SLOTS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    depth = tl.arange(0, 128)
    heads = row * HEADS + tl.arange(0, HEADS)
    x = decode(tl.load(code_ptr + heads[:, None] * 128 + depth[None, :]))
    weight = tl.load(weight_ptr + heads)
    finite = (weight == weight) & (tl.abs(weight) < float("inf"))
    w = tl.where(finite, weight, 0.0).to(tl.float64)
    norm = tl.load(norm_ptr + heads)
    error = tl.load(error_ptr + heads)
    share = tl.load(share_ptr + heads).to(tl.float64)
    multiplier = tl.load(multiplier_ptr + heads).to(tl.float64)

    # Retained heads one by one: their column, their coefficient, and their part of every projection.
    residual = x
    # Factors of the heads whose computed dot does harm when it comes out too small.
    lowered = multiplier
    zero = tl.sum(share * 0.0, axis=0)
    column_sum = zero
    projected_magnitude = zero
    for slot in range(COLUMNS - 1):
        head = tl.load(head_ptr + row * SLOTS + slot)
        used = head >= 0
        place = row * HEADS + tl.maximum(head, 0)
        code = tl.where(used, tl.load(code_ptr + place * 128 + depth), 0).to(tl.uint8)
        tl.store(column_code_ptr + (row * COLUMNS + slot) * 128 + depth, code)
        a = tl.where(used, tl.load(projection_ptr + heads * SLOTS + slot), 0.0).to(tl.float64)
        residual -= a[:, None] * decode(code)[None, :]
        projected = tl.sum(share * a, axis=0)
        # Exact: one head's weight and zeros.
        own = tl.sum(tl.where(tl.arange(0, HEADS) == head, w, 0.0), axis=0)
        coefficient = round_up(own + projected)
        tl.store(coefficient_ptr + row * COLUMNS + slot, coefficient)
        own_magnitude = tl.load(norm_ptr + place) + tl.load(error_ptr + place)
        column_sum += tl.abs(coefficient.to(tl.float64)) * own_magnitude
        lowered += tl.where(tl.arange(0, HEADS) == head, projected, 0.0)
        projected_magnitude += projected * own_magnitude

    # The linear column: half of the residuals, less the negative heads without a column.
    residual = share[:, None] * residual
    vector = tl.sum(residual, axis=0) / 2.0 - tl.sum(multiplier[:, None] * x, axis=0)
    y, value, scale, rest, rest_square = _round_to_fp8(vector)
    line = tl.reshape(value, (1, 128))
    y_norm, y_error = vector_terms(line, 1)
    y_error = tl.sum(y_error, axis=0)
    last = row * COLUMNS + COLUMNS - 1
    tl.store(column_ptr + last * 128 + depth, y)
    tl.store(coefficient_ptr + last, scale.to(tl.float32))
    column_sum += scale * (tl.sum(y_norm, axis=0) + y_error)

    # rho: the Gram matrix of the halved residuals and the rounding error of the linear column.
    gram = tl.dot(residual, tl.trans(residual), out_dtype=tl.float64)
    along = tl.sum(tl.abs(tl.sum(residual * rest[None, :], axis=1)), axis=0)
    rho = tl.sqrt(tl.sum(tl.sum(tl.abs(gram), axis=1), axis=0) / 4.0 + along + rest_square)

    # Dots: each vector's own error, or what all of them can do wrong with one sign per key element.
    alone = tl.sum((share + lowered) * error, axis=0) + scale * y_error
    # Read again: kept in registers since the first time it would spill.
    x = decode(tl.load(code_ptr + heads[:, None] * 128 + depth[None, :]))
    reach, prefix = step_norms(x, HEADS)
    positive, negative = harms(x, reach, lowered, share, HEADS)
    others = tl.sum((share + lowered) * later_steps(reach, prefix), axis=0)
    reach, prefix = step_norms(line, 1)
    only = tl.full((1,), 1.0, dtype=tl.float64) * scale
    line_positive, line_negative = harms(line, reach, only, only * 0.0, 1)
    others += tl.sum(only * later_steps(reach, prefix), axis=0)
    worse = tl.maximum(positive + line_positive, negative + line_negative)
    joint = (tl.sum(tl.sum(worse, axis=1), axis=0) + others) * CUT

    head_sum = tl.sum(tl.abs(w) * (norm + error), axis=0)
    terms = rho + tl.minimum(alone, joint) + _HEAD_ULPS * head_sum
    terms += _BOUND_ULPS * (column_sum + terms)
    terms += _FLOAT64_SLACK * (head_sum + column_sum + terms + projected_magnitude)
    slack = round_up((terms + _FLOOR) * _OUTWARD)
    tl.store(slack_ptr + row, slack)
    total = head_sum + column_sum + slack.to(tl.float64)
    # "not at most": a NaN total is too large as well.
    too_large = tl.where(total <= _MAGNITUDE_MAX, 0, _TOO_LARGE)
    tl.store(state_ptr + row, tl.where(tl.load(unusable_ptr + row) != 0, _NON_FINITE, too_large))


def launch_row_bound(
    code, weights, norm, error, head, share, multiplier, projection, unusable, columns: int, out
) -> None:
    """Write the bound of each row.

    Args:
        code: ``[rows, num_heads, 128]`` uint8 E4M3 codes, contiguous.
        weights: ``[rows, num_heads]`` float32.
        norm, error: ``[rows, num_heads]`` float64, from ``launch_head_terms``.
        head: ``[rows, slots]`` int32, retained head per slot, -1 for an unused one.
        share, multiplier: ``[rows, num_heads]`` float32, from ``launch_choose_heads``.
        projection: ``[rows, num_heads, slots]`` float32, from ``launch_project``.
        unusable: ``[rows]`` int32, 1 for NaN or Inf in the row's query or weights.
        columns: M, at most ``slots``; the last one is the linear column.
        out: (columns ``[rows, M, 128]`` float8_e4m3fn, coefficients ``[rows, M]`` float32, slack ``[rows]`` float32,
            state ``[rows]`` int32: 0, ``NON_FINITE`` or ``TOO_LARGE``), written. A row with a state must not be pruned.

    Exactness: enclosure. Source: ``docs/bound.md``.
    """
    rows, heads, _ = code.shape
    column, coefficient, slack, state = out
    _row_bound_kernel[(rows,)](
        code, weights, norm, error, head, share, multiplier, projection, unusable,
        column, column.view(code.dtype), coefficient, slack, state,
        HEADS=heads, SLOTS=head.shape[1], COLUMNS=columns, num_warps=4,
    )  # fmt: skip
