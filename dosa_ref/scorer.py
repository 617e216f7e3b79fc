"""The original score of a (query, key) pair, under each contract.

``exact``: the real number ``k_scale * sum_h w_h * relu(q_h . k)``, as a rational.

``sm90``: the float32 that DeepGEMM's ``fp8_mqa_logits`` computes on Hopper, for 32 or 64 heads. Dots come from
:data:`dosa_ref.tensorcore.WGMMA_E4M3`; head ``h = 8 j + 2 c + b`` with ``c`` in 0..3, ``b`` in 0..1, ``J = H / 8``;
every operation is float32, round to nearest even; ``r_h = max(dot_h, 0)``, where NaN gives 0::

    s(c,b) = r_{j=1} * w_{j=1};  then fma(r_{j=0}, w_{j=0}, s);  then fma(r_j, w_j, s) for j = 2 .. J-1
    v(c)   = (s(c,0) + s(c,1)) * k_scale
    score  = (v(0) + v(1)) + (v(2) + v(3))

The first two terms are swapped because the compiler fused the first product into the second addition. Fewer heads are
padded up to 32 or 64 with ``w = 0, q = 0``; more than 64 are not served by that kernel.

Special values, both contracts: a NaN in a key makes all its head terms 0; a NaN weight makes the row NaN;
``k_scale`` NaN gives NaN, 0 gives 0, a negative one negates.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any, Final

import ml_dtypes
import numpy as np
import numpy.typing as npt

from dosa_ref.formats import is_e4m3_nan, nearest_float32
from dosa_ref.problem import PrefillProblem
from dosa_ref.spec import HEAD_DIM, SM90_NUM_HEADS, Contract, UnsupportedConfiguration
from dosa_ref.tensorcore import WGMMA_E4M3, dot_scalar, dots

LANES: Final = 8
"""Independent chains of the head sum: 4 threads times 2 registers."""

_KEY_BLOCK: Final = 8192


def padded_num_heads(num_heads: int) -> int:
    """The head count that the ``sm90`` kernel runs with: ``num_heads`` padded up to 32 or 64.

    Raises:
        UnsupportedConfiguration: more heads than the largest kernel has.
    """
    for size in SM90_NUM_HEADS:
        if num_heads <= size:
            return size
    raise UnsupportedConfiguration(f"contract sm90 serves at most {SM90_NUM_HEADS[-1]} heads, got {num_heads}")


# ---------------------------------------------------------------------------------------------------------------------
# Scalar forms


def fma_float32(x: np.float32, y: np.float32, z: np.float32) -> np.float32:
    """``x * y + z`` in float32 with one rounding (to nearest, ties to even).

    Exactness: exact: the sum is formed as a rational.

    Special values: as IEEE 754 (NaN and Inf propagate, an exact zero has the sign IEEE gives it).
    """
    wide = float(x) * float(y)  # exact in float64 unless it underflows there, which leaves the sign right
    if not (math.isfinite(float(x)) and math.isfinite(float(y)) and math.isfinite(float(z))):
        return np.float32(wide + float(z))
    total = Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
    return nearest_float32(total) if total else np.float32(wide + float(z))


def score_scalar_sm90(
    q_row: npt.NDArray[Any], w_row: npt.NDArray[np.float32], k: npt.NDArray[Any], k_scale: np.float32 | float
) -> np.float32:
    """The ``sm90`` score of one query row and one key, term by term.

    Args:
        q_row: E4M3 ``[num_heads, 128]`` (uint8 codes or float8_e4m3fn).
        w_row: float32 ``[num_heads]``.
        k: E4M3 ``[128]``.
        k_scale: float32.

    Returns:
        The float32 score.

    Raises:
        UnsupportedConfiguration: more than 64 heads.

    Exactness: model of hardware.

    Special values: module docstring.

    Source: bits compared with DeepGEMM on an H200.
    """
    heads = padded_num_heads(len(w_row))
    zero, scale = np.float32(0), np.float32(k_scale)
    relu, w = [zero] * heads, [zero] * heads
    for h in range(len(w_row)):
        dot = dot_scalar(q_row[h], k, WGMMA_E4M3)
        relu[h] = dot if dot > 0 else zero
        w[h] = np.float32(w_row[h])
    with np.errstate(all="ignore"):
        v = []
        for c in range(4):
            s = []
            for b in range(2):
                chain = [8 * j + 2 * c + b for j in range(heads // LANES)]
                acc = np.float32(relu[chain[1]] * w[chain[1]])
                for h in [chain[0], *chain[2:]]:
                    acc = fma_float32(relu[h], w[h], acc)
                s.append(acc)
            v.append(np.float32((s[0] + s[1]) * scale))
        return np.float32((v[0] + v[1]) + (v[2] + v[3]))


def score_scalar_exact(
    q_row: npt.NDArray[Any], w_row: npt.NDArray[np.float32], k: npt.NDArray[Any], k_scale: np.float32 | float
) -> Fraction | float:
    """The ``exact`` score of one query row and one key.

    Args:
        q_row: E4M3 ``[num_heads, 128]`` (uint8 codes or float8_e4m3fn).
        w_row: float32 ``[num_heads]``.
        k: E4M3 ``[128]``.
        k_scale: float32.

    Returns:
        The exact rational; a float (NaN or +-Inf) where a weight or the scale is not finite.

    Exactness: exact.

    Special values: a NaN in the key or in a head makes that head's relu 0; non-finite weights and scales follow the
        rules of IEEE 754 on the extended reals (``0 * Inf`` is NaN, and so is ``Inf - Inf``).
    """
    relu = [_relu_dot_exact(q_head, k) for q_head in q_row]
    return _combine_exact(relu, w_row, k_scale)


def _relu_dot_exact(q_head: npt.NDArray[Any], k: npt.NDArray[Any]) -> Fraction:
    if is_e4m3_nan(q_head).any() or is_e4m3_nan(k).any():
        return Fraction(0)
    q_values, k_values = (x.view(ml_dtypes.float8_e4m3fn).astype(np.float64).tolist() for x in (q_head, k))
    return max(
        Fraction(0), sum((Fraction(x) * Fraction(y) for x, y in zip(q_values, k_values, strict=True)), Fraction(0))
    )


def _combine_exact(
    relu: list[Fraction], w_row: npt.NDArray[np.float32], k_scale: np.float32 | float
) -> Fraction | float:
    weights, scale = [float(w) for w in w_row], float(k_scale)
    if all(math.isfinite(w) for w in weights):
        total: Fraction | float = sum((Fraction(w) * r for w, r in zip(weights, relu, strict=True)), Fraction(0))
    else:
        # Only the signs and zeros of the other terms matter next to Inf and NaN.
        total = sum((w * _sign(r) for w, r in zip(weights, relu, strict=True) if not math.isfinite(w)), 0.0)
    if isinstance(total, Fraction) and math.isfinite(scale):
        return total * Fraction(scale)
    return (float(_sign(total)) if isinstance(total, Fraction) else total) * scale


def _sign(value: Fraction) -> int:
    return (value > 0) - (value < 0)


# ---------------------------------------------------------------------------------------------------------------------
# Vectorised twins


def fma_float32_array(
    x: npt.NDArray[np.float32], y: npt.NDArray[np.float32], z: npt.NDArray[np.float32]
) -> npt.NDArray[np.float32]:
    """Array twin of :func:`fma_float32`.

    The product of two float32 is exact in float64. The float64 sum is turned into the sum *rounded to odd* with the
    error that Knuth's two-sum gives; rounding a 53-bit odd-rounded value to 24 bits is the same as rounding the exact
    value once.

    Args:
        x: float32, any shape.
        y: float32, broadcastable with ``x``.
        z: float32, broadcastable with ``x``.

    Returns:
        float32, the broadcast shape.

    Exactness: exact, one rounding, provided no product underflows float64 (``|x y| >= 2^-298`` always holds for
        float32).

    Special values: as IEEE 754.
    """
    product = np.multiply(x, y, dtype=np.float64)
    addend = z.astype(np.float64)
    total = product + addend
    tail = total - product
    error = (product - (total - tail)) + (addend - tail)
    bits = total.view(np.int64)
    inexact = (error != 0) & np.isfinite(total) & ((bits & 1) == 0)
    # The exact sum lies on the error's side of an even total: go to the odd neighbour on that side.
    outward = (error > 0) == (total > 0)
    odd = np.where(inexact, bits + np.where(outward, 1, -1), bits).view(np.float64)
    return np.asarray(odd.astype(np.float32))


def combine_heads_sm90(
    head_dots: npt.NDArray[np.float32], weights: npt.NDArray[np.float32], k_scale: npt.NDArray[np.float32]
) -> npt.NDArray[np.float32]:
    """The head combination of contract ``sm90``, given the dots.

    Args:
        head_dots: float32 ``[rows, H, n]`` with ``H`` = 32 or 64, as the tensor cores give them.
        weights: float32 ``[rows, H]``.
        k_scale: float32 ``[n]``.

    Returns:
        float32 ``[rows, n]``.

    Exactness: model of hardware.

    Special values: module docstring.
    """
    rows, heads, keys = head_dots.shape
    relu = np.fmax(head_dots, np.float32(0)).reshape(rows, heads // LANES, LANES, keys)
    w = weights.reshape(rows, heads // LANES, LANES, 1)
    with np.errstate(all="ignore"):
        s = relu[:, 1] * w[:, 1]
        for j in [0, *range(2, heads // LANES)]:
            s = fma_float32_array(relu[:, j], w[:, j], s)
        v = (s[:, 0::2] + s[:, 1::2]) * k_scale
        score: npt.NDArray[np.float32] = (v[:, 0] + v[:, 1]) + (v[:, 2] + v[:, 3])
        return score


def scores_sm90(
    q: npt.NDArray[Any], weights: npt.NDArray[np.float32], k: npt.NDArray[Any], k_scale: npt.NDArray[np.float32]
) -> npt.NDArray[np.float32]:
    """All ``sm90`` scores of some query rows against some keys; array twin of :func:`score_scalar_sm90`.

    Args:
        q: E4M3 ``[rows, num_heads, 128]`` (uint8 codes or float8_e4m3fn).
        weights: float32 ``[rows, num_heads]``.
        k: E4M3 ``[n, 128]``.
        k_scale: float32 ``[n]``.

    Returns:
        float32 ``[rows, n]``.

    Raises:
        UnsupportedConfiguration: more than 64 heads.

    Exactness: model of hardware, every bit.

    Special values: module docstring. ``rows`` and ``n`` may be 0.

    Source: bits compared with DeepGEMM on an H200.
    """
    rows, num_heads = weights.shape
    heads = padded_num_heads(num_heads)
    padded_q = np.zeros((rows, heads, HEAD_DIM), np.uint8)
    padded_q[:, :num_heads] = q.view(np.uint8)
    padded_w = np.zeros((rows, heads), np.float32)
    padded_w[:, :num_heads] = weights
    codes = k.view(np.uint8)
    out = np.empty((rows, k.shape[0]), np.float32)
    for row in range(rows):
        for first in range(0, k.shape[0], _KEY_BLOCK):
            keys = slice(first, first + _KEY_BLOCK)
            head_dots = dots(padded_q[row], codes[keys], WGMMA_E4M3)
            out[row, keys] = combine_heads_sm90(head_dots[None], padded_w[row : row + 1], k_scale[keys])[0]
    return out


def scores_exact(
    q_row: npt.NDArray[Any], w_row: npt.NDArray[np.float32], k: npt.NDArray[Any], k_scale: npt.NDArray[np.float32]
) -> list[Fraction | float]:
    """The ``exact`` scores of one query row against some keys; twin of :func:`score_scalar_exact`.

    Args:
        q_row: E4M3 ``[num_heads, 128]`` (uint8 codes or float8_e4m3fn).
        w_row: float32 ``[num_heads]``.
        k: E4M3 ``[n, 128]``.
        k_scale: float32 ``[n]``.

    Returns:
        One rational (or non-finite float) per key.

    Exactness: exact. The dots are: a product of two E4M3 values is a multiple of 2^-18 below 2^18, so 128 of them add
        exactly in float64.

    Special values: as :func:`score_scalar_exact`.
    """
    q_values, k_values = (x.view(ml_dtypes.float8_e4m3fn).astype(np.float64) for x in (q_row, k))
    with np.errstate(invalid="ignore"):
        relu = np.fmax(q_values @ k_values.T, 0.0)
    columns = [[Fraction(x) for x in column] for column in relu.T.tolist()]
    return [_combine_exact(column, w_row, scale) for column, scale in zip(columns, k_scale, strict=True)]


def score_row(problem: PrefillProblem, row: int, contract: Contract = Contract.SM90) -> npt.NDArray[np.float32]:
    """Scores of all visible keys of one row.

    Args:
        problem: the problem.
        row: row index.
        contract: ``SM90``, or ``EXACT`` (each exact score rounded once to float32: for show, never to compare with).

    Returns:
        float32 ``[ke - ks]``, empty for an empty row.

    Raises:
        UnsupportedConfiguration: more than 64 heads under ``SM90``.
    """
    if contract is Contract.EXACT:
        return np.array([float32_of_exact(score) for score in score_row_exact(problem, row)], np.float32)
    ks, ke = problem.window(row)
    q, w = problem.q[row : row + 1], problem.weights[row : row + 1]
    scores: npt.NDArray[np.float32] = scores_sm90(q, w, problem.k[ks:ke], problem.k_scale[ks:ke])[0]
    return scores


def score_row_exact(problem: PrefillProblem, row: int) -> list[Fraction | float]:
    """Exact scores of all visible keys of one row; see :func:`scores_exact`."""
    ks, ke = problem.window(row)
    return scores_exact(problem.q[row], problem.weights[row], problem.k[ks:ke], problem.k_scale[ks:ke])


def float32_of_exact(score: Fraction | float) -> np.float32:
    """An exact score rounded once to float32; NaN and Inf stay."""
    return nearest_float32(score) if isinstance(score, Fraction) else np.float32(score)
