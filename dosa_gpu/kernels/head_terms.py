"""Norm and dot error of every query head, in float64."""

import triton
import triton.language as tl

from dosa_ref import spec

_STEPS = tl.constexpr(spec.STEPS)
_STEP_TERMS = tl.constexpr(spec.STEP_TERMS)
_FIRST_LOSSY = tl.constexpr(float(spec.FIRST_STEP_LOSSY))
_LOSSY = tl.constexpr(float(spec.STEP_LOSSY))
CUT = tl.constexpr(2.0**-spec.FRACTION_BITS)
_SMALLEST_NORMAL = tl.constexpr(float(spec.E4M3_MIN_NORMAL))


@triton.jit
def step_norms(x, COUNT: tl.constexpr):
    """Reach ``max(|x~_t|_inf, ||x_{<t}||)`` and norm ``||x_{<=t}||`` per step, ``[COUNT, 4]``, of ``[COUNT, 128]``.

    Squares of E4M3 values and their sums are exact in float64, so prefixes may be had by subtraction.
    """
    blocks = tl.reshape(x, (COUNT, _STEPS, _STEP_TERMS))
    magnitude = tl.abs(blocks)
    largest = tl.max(tl.where(magnitude > 0, tl.maximum(magnitude, _SMALLEST_NORMAL), magnitude), axis=2)
    square = tl.sum(blocks * blocks, axis=2)
    total = tl.cumsum(square, axis=1)
    return tl.maximum(largest, tl.sqrt(total - square)), tl.sqrt(total)


@triton.jit
def vector_terms(x, COUNT: tl.constexpr):
    """``||x||`` and ``D(x)`` of ``[COUNT, 128]`` float64 E4M3 values (``docs/bound.md``)."""
    reach, prefix = step_norms(x, COUNT)
    step = tl.arange(0, _STEPS)[None, :]
    error = tl.sum(tl.where(step == 0, _FIRST_LOSSY, _LOSSY) * reach + prefix, axis=1) * CUT
    return tl.sum(tl.where(step == _STEPS - 1, prefix, 0.0), axis=1), error


@triton.jit
def harms(x, reach, lowered, raised, COUNT: tl.constexpr):
    """What the cuts of each step can do wrong with a positive and with a negative key element, ``[4, 32]`` each.

    ``lowered`` and ``raised`` ``[COUNT]``: factors of vectors whose dots do harm when they come out too small, or too
    large. A positive product can only lower a dot, a negative one only raise it.
    """
    blocks = tl.reshape(x, (COUNT, _STEPS, _STEP_TERMS))
    low = (lowered[:, None] * reach)[:, :, None]
    high = (raised[:, None] * reach)[:, :, None]
    positive = tl.sum(tl.where(blocks > 0, low, tl.where(blocks < 0, high, 0.0)), axis=0)
    negative = tl.sum(tl.where(blocks < 0, low, tl.where(blocks > 0, high, 0.0)), axis=0)
    return positive, negative


@triton.jit
def later_steps(reach, prefix):
    """What a vector's dot can lose beside its products: the accumulator's cuts and the output's, ``[COUNT]``."""
    step = tl.arange(0, _STEPS)[None, :]
    return tl.sum(tl.where(step == 0, 0.0, reach) + prefix, axis=1)


@triton.jit
def decode(code):
    """Float64 values of E4M3 codes (uint8); a NaN code counts as 0."""
    code = code.to(tl.int32)
    exponent = (code >> 3) & 0xF
    fraction = code & 7
    # Exact in float32: (8 + fraction) * 2^(exponent - 10), subnormals fraction * 2^-9.
    power = ((exponent + 117) << 23).to(tl.float32, bitcast=True)
    value = tl.where(exponent == 0, fraction.to(tl.float32) * 0.001953125, (fraction + 8).to(tl.float32) * power)
    value = tl.where((code & 0x7F) == 0x7F, 0.0, tl.where(code >= 128, -value, value))
    return value.to(tl.float64)


@triton.jit
def _head_terms_kernel(
    code_ptr,  # [heads, 128] u8, E4M3 codes
    norm_ptr,  # [heads] f64
    error_ptr,  # [heads] f64
    nan_ptr,  # [heads] i32
    num_heads,
    COUNT: tl.constexpr,
):
    head = tl.program_id(0).to(tl.int64) * COUNT + tl.arange(0, COUNT)
    inside = head < num_heads
    code = tl.load(code_ptr + head[:, None] * 128 + tl.arange(0, 128)[None, :], mask=inside[:, None], other=0)
    norm, error = vector_terms(decode(code), COUNT)
    tl.store(norm_ptr + head, norm, mask=inside)
    tl.store(error_ptr + head, error, mask=inside)
    tl.store(nan_ptr + head, tl.max(((code & 0x7F) == 0x7F).to(tl.int32), axis=1), mask=inside)


def launch_head_terms(code, norm, error, nan) -> None:
    """Write ``||q_h||``, ``D(q_h)`` and whether a NaN code is in ``q_h``, for all heads of all rows.

    Args:
        code: ``[..., 128]`` uint8 E4M3 codes, contiguous; a NaN code counts as 0 in norm and error.
        norm, error: ``[...]`` float64, written.
        nan: ``[...]`` int32, written, 1 or 0.

    Exactness: float64 roundings of the formulas in ``docs/bound.md``; the guard's ``float64`` term covers them.
    """
    heads = norm.numel()
    count = 32 if code.device.type != "cpu" else 1024
    _head_terms_kernel[(triton.cdiv(heads, count),)](code, norm, error, nan, heads, COUNT=count, num_warps=4)
