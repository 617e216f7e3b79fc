"""The head combination of the contract ``sm90``, as a device function for the two scoring kernels.

Head ``h = 8j + 2c + b`` (``c`` in 0..3, ``b`` in 0..1, ``J = H / 8``), ``r = max(dot, 0)``, all float32, round to
nearest even::

    s(c, b) = round(r_{j=1} w_{j=1}); s = fma(r_{j=0}, w_{j=0}, s); s = fma(r_j, w_j, s) for j = 2 .. J - 1
    v(c)    = round(round(s(c, 0) + s(c, 1)) * k_scale)
    score   = round(round(v(0) + v(1)) + round(v(2) + v(3)))

The kernels that call it must be compiled with ``enable_fp_fusion=False``: the one product that stands alone must be
rounded.
"""

import triton
import triton.language as tl


@triton.jit
def _quarters(x):
    """Four tensors along the last two axes, both of length 2; element ``2 * last + second_last`` has that place."""
    low, high = tl.split(x)
    x0, x1 = tl.split(low)
    x2, x3 = tl.split(high)
    return x0, x1, x2, x3


@triton.jit
def _accumulate(relu, weight, total):
    return tl.fma(relu, tl.broadcast_to(weight, relu.shape), total)


@triton.jit
def combine_heads(dot, weight, k_scale, KEYS: tl.constexpr, QUERIES: tl.constexpr, HEADS: tl.constexpr):
    """Scores ``[KEYS, QUERIES]`` from dots ``[KEYS, QUERIES * HEADS]``, weights and scales.

    A NaN dot counts 0 (``max(NaN, 0) = 0``); NaN and Inf in weights and scales go through the arithmetic.
    """
    tl.static_assert(HEADS == 32 or HEADS == 64, "the contract sm90 is defined for 32 and 64 heads")
    relu = tl.maximum(dot, 0.0)
    if HEADS == 64:
        # [keys, queries, j / 4, j / 2 % 2, j % 2, lane and parity]; the three bits of j go last, the highest outermost.
        relu = tl.permute(tl.reshape(relu, (KEYS, QUERIES, 2, 2, 2, 8)), (0, 1, 5, 4, 3, 2))
        weight = tl.permute(tl.reshape(weight, (1, QUERIES, 2, 2, 2, 8)), (0, 1, 5, 4, 3, 2))
        relu_low, relu_high = tl.split(relu)
        weight_low, weight_high = tl.split(weight)
    else:
        relu_low = tl.permute(tl.reshape(relu, (KEYS, QUERIES, 2, 2, 8)), (0, 1, 4, 3, 2))
        weight_low = tl.permute(tl.reshape(weight, (1, QUERIES, 2, 2, 8)), (0, 1, 4, 3, 2))
    r0, r1, r2, r3 = _quarters(relu_low)
    w0, w1, w2, w3 = _quarters(weight_low)
    total = r1 * w1
    total = _accumulate(r0, w0, total)
    total = _accumulate(r2, w2, total)
    total = _accumulate(r3, w3, total)
    if HEADS == 64:
        r4, r5, r6, r7 = _quarters(relu_high)
        w4, w5, w6, w7 = _quarters(weight_high)
        total = _accumulate(r4, w4, total)
        total = _accumulate(r5, w5, total)
        total = _accumulate(r6, w6, total)
        total = _accumulate(r7, w7, total)
    even, odd = tl.split(tl.reshape(total, (KEYS, QUERIES, 4, 2)))
    lane = (even + odd) * tl.reshape(k_scale, (KEYS, 1, 1))
    # A sum over an axis of length 2 has one order only: (v0 + v1) + (v2 + v3).
    pair = tl.sum(tl.reshape(lane, (KEYS, QUERIES, 2, 2)), axis=3)
    return tl.sum(pair, axis=2)
