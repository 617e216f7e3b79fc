"""The guard: everything that rounding, FP8 and accumulation can add between the bound and the computed score.

All terms are per unit of the key norm ``n`` and belong to one query row. With ``mag(y) = ||y|| + D(y)``, ``R_g = w_g
r_g``, ``v`` a synthetic vector before rounding and ``e = v - |c| y`` its rounding error (``docs/bound.md`` derives
each line):

===================  ===================================================================================================
``residual``         ``sqrt(sum |V . V'|)`` over all pairs of the ``R_g / 2`` and the linear column's ``e``; without a
linear column ``sqrt(sum max(R_g . R_g', 0))``
``dots``             ``min(sum_v f_v D(v), J)`` over the vectors ``v`` whose dots may err, ``J`` their joint error
``column_rounding``  ``sum_{synthetic relu} ||e||``
``head_chain``       ``HEAD_CHAIN_ULPS u sum_h |w_h| mag(q_h)``
``bound_chain``      ``BOUND_CHAIN_ULPS u (sum_j |c_j| mag(y_j) + all terms above)``
``float64``          ``2^FLOAT64_SLACK_LOG2 (sum_h |w_h| mag(q_h) + sum_j |c_j| mag(y_j) + all terms above + sum w_g
a_gj mag(q_j))``
``floor``            ``2^SLACK_FLOOR_LOG2``
===================  ===================================================================================================

Two forms. :func:`guard_terms` works in float64, whose roundings the term ``float64`` pays for.
:func:`guard_enclosure` works in rationals, with square roots rounded outward; it has no ``float64`` term because
there is nothing to pay.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from fractions import Fraction
from typing import Any, Final, NamedTuple

import ml_dtypes
import numpy as np
import numpy.typing as npt

from dosa_ref.formats import round_up_float32
from dosa_ref.spec import (
    BOUND_CHAIN_ULPS,
    E4M3_MIN_NORMAL,
    FIRST_STEP_LOSSY,
    FLOAT32_UNIT,
    FLOAT64_SLACK_LOG2,
    FRACTION_BITS,
    HEAD_CHAIN_ULPS,
    OUTWARD_LOG2,
    SLACK_FLOOR_LOG2,
    STEP_LOSSY,
    STEP_TERMS,
    STEPS,
)

E4M3_LATTICE_LOG2: Final = -9
"""Every finite E4M3 value is a multiple of ``2^-9``."""
_SQRT_BITS: Final = 192


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BoundCertificate:
    """The multipliers that make a bound sound; ``docs/bound.md`` allows any that fit the ranges given here.

    Attributes:
        retained: for each of the M columns the head whose query it is, -1 for a synthetic or unused column; int64
            ``[M]``.
        projection: ``a_gj >= 0``, share of retained column ``j`` in omitted head ``g``; float64 ``[H, M]``, zero
            elsewhere.
        aggregate: ``lambda_jh >= 0``, share of negative head ``h`` in synthetic column ``j`` (relu or linear), adding
            up to at most ``|w_h|`` over the columns; float64 ``[M, H]``, zero elsewhere.
    """

    retained: npt.NDArray[np.int64]
    projection: npt.NDArray[np.float64]
    aggregate: npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardTerms:
    """The error budget of one row, term by term, in float64; the module docstring defines each."""

    residual: float
    dots: float
    column_rounding: float
    head_chain: float
    bound_chain: float
    float64: float
    floor: float

    def total(self) -> float:
        """The sum of all terms."""
        return math.fsum(getattr(self, field.name) for field in fields(self))

    def slack(self) -> np.float32:
        """``G``: the sum times ``1 + 2^OUTWARD_LOG2``, rounded up to float32; +Inf or NaN if the terms are."""
        outward = self.total() * (1.0 + 2.0**OUTWARD_LOG2)
        return round_up_float32(Fraction(outward)) if math.isfinite(outward) else np.float32(outward)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactGuardTerms:
    """The error budget of one row as rationals, every square root rounded one way; fields as in :class:`GuardTerms`."""

    residual: Fraction
    dots: Fraction
    column_rounding: Fraction
    head_chain: Fraction
    bound_chain: Fraction
    floor: Fraction

    def total(self) -> Fraction:
        """The sum of all terms."""
        return sum((getattr(self, field.name) for field in fields(self)), Fraction(0))


# ---------------------------------------------------------------------------------------------------------------------
# float64


def dot_error(codes: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """``D(y)``: the computed dot of ``y`` with any key ``k`` is within ``D(y) * ||k~||`` of the real one.

    ``2^-13 (31 |y~_1|_inf + sum_{t=2..4} 32 max(|y~_t|_inf, ||y_{<t}||) + sum_{t=1..4} ||y_{<=t}||)``, where ``y_t``
    is the t-th block of 32 elements and ``~`` raises non-zero magnitudes to at least 2^-6.

    Args:
        codes: E4M3 ``[..., 128]`` (uint8 codes or float8_e4m3fn), no NaN.

    Returns:
        float64 ``[...]``, rounded to nearest a few times; the term ``float64`` of the guard covers that.

    Exactness: enclosure of the hardware model, up to float64 rounding.

    Source: docs/bound.md, lemma ``dot_error``.
    """
    reach, prefix = _step_norms(codes)
    aligned = FIRST_STEP_LOSSY * reach[..., 0] + STEP_LOSSY * reach[..., 1:].sum(axis=-1)
    return np.asarray((aligned + prefix.sum(axis=-1)) * 2.0**-FRACTION_BITS)


def joint_error(codes: npt.NDArray[Any], factors: npt.NDArray[np.float64], upward: npt.NDArray[np.bool_]) -> float:
    """``J``: the wrong-way errors of the computed dots of several vectors with one key, weighted, are within ``J n``.

    Truncation is towards zero: a negative product can only raise a sum, a positive one only lower it, and the sign of
    the key's element is the same for all vectors. So of the two sets of vectors that element ``i`` can harm, one at a
    time counts::

        J = 2^-13 (sum_i max(P_i, N_i) + sum_v f_v (sum_{t>1} m_vt + sum_t ||v_{<=t}||))
        P_i = sum of f_v m_vt over downward v with v_i > 0 and upward v with v_i < 0; N_i the other way round

    with ``m_v1 = |v~_1|_inf`` and ``m_vt = max(|v~_t|_inf, ||v_{<t}||)``.

    Args:
        codes: E4M3 ``[n, 128]``, the vectors; no NaN.
        factors: ``f_v >= 0``, float64 ``[n]``.
        upward: bool ``[n]``; True where a computed dot above the real one does harm, False where one below does.

    Returns:
        ``J``, rounded to nearest a few times; the term ``float64`` of the guard covers that.

    Exactness: enclosure of the hardware model, up to float64 rounding.

    Source: docs/bound.md, lemmas ``signed_loss``, ``signed_step``, ``shared_signs``.
    """
    reach, prefix = _step_norms(codes)
    harm = np.sign(e4m3_float64(codes)) * np.where(upward, -1.0, 1.0)[:, None]
    unit = np.repeat(factors[:, None] * reach, STEP_TERMS, axis=1)
    elements = np.maximum((unit * (harm > 0)).sum(axis=0), (unit * (harm < 0)).sum(axis=0)).sum()
    rest = (factors * (reach[:, 1:].sum(axis=1) + prefix.sum(axis=1))).sum()
    return float((elements + rest) * 2.0**-FRACTION_BITS)


def _step_norms(codes: npt.NDArray[Any]) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Per step the alignment's reach ``max(|y~_t|_inf, ||y_{<t}||)`` and the norm ``||y_{<=t}||``: ``[..., 4]``."""
    blocks = e4m3_float64(codes)
    blocks = blocks.reshape(*blocks.shape[:-1], STEPS, STEP_TERMS)
    reach = np.abs(_raised(blocks)).max(axis=-1)
    prefix = np.sqrt(np.cumsum((blocks * blocks).sum(axis=-1), axis=-1))
    reach[..., 1:] = np.maximum(reach[..., 1:], prefix[..., :-1])
    return reach, prefix


def e4m3_float64(codes: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """Values of E4M3 codes (uint8 or float8_e4m3fn, any shape) as float64."""
    return np.asarray(codes.view(ml_dtypes.float8_e4m3fn).astype(np.float64))


def magnitude(codes: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """``mag(y) = ||y|| + D(y)`` of E4M3 ``[..., 128]``: a computed dot with a key is at most ``mag(y) * ||k~||``."""
    return np.asarray(np.sqrt((e4m3_float64(codes) ** 2).sum(axis=-1)) + dot_error(codes))


def guard_terms(
    q_row: npt.NDArray[Any],
    w_row: npt.NDArray[np.float32],
    columns: npt.NDArray[Any],
    coefficients: npt.NDArray[np.float32],
    linear: npt.NDArray[np.bool_],
    certificate: BoundCertificate,
) -> GuardTerms:
    """The error budget of one row, in float64.

    Args:
        q_row: E4M3 ``[H, 128]`` (uint8 codes or float8_e4m3fn), no NaN.
        w_row: float32 ``[H]``, finite.
        columns: E4M3 ``[M, 128]``, the FP8 vectors of the bound.
        coefficients: float32 ``[M]``.
        linear: bool ``[M]``; True for the linear column, of which there is at most one.
        certificate: the multipliers.

    Returns:
        The terms.

    Exactness: enclosure (of what ``docs/bound.md`` asks for), the float64 roundings included.
    """
    x, y = e4m3_float64(q_row), e4m3_float64(columns)
    w, c = w_row.astype(np.float64), coefficients.astype(np.float64)
    synthetic = certificate.retained < 0
    omitted = (w > 0) & ~np.isin(np.arange(len(w)), certificate.retained)
    shares = np.where(omitted[:, None], w[:, None] * certificate.projection, 0.0)
    projected = shares.sum(axis=0)
    residuals = np.where(omitted[:, None], w[:, None] * (x - certificate.projection @ y), 0.0)
    vectors = certificate.aggregate @ x
    vectors[linear] = residuals.sum(axis=0) / 2 - vectors[linear]
    rounding = vectors - np.where(linear, c, np.abs(c))[:, None] * y
    if linear.any():
        together = np.concatenate([residuals / 2, rounding[linear]])
        residual = math.sqrt(np.abs(together @ together.T).sum())
    else:
        residual = math.sqrt(np.maximum(residuals @ residuals.T, 0.0).sum())
    column_magnitude = magnitude(columns)
    head_sum = float((np.abs(w) * magnitude(q_row)).sum())
    column_sum = float((np.abs(c) * column_magnitude).sum())
    # Harm is done by an omitted head and a relu aggregate whose dot comes out too large, and by a negative head, a
    # projected share and a linear column whose dot comes out too small.
    codes = np.concatenate([q_row.view(np.uint8), columns.view(np.uint8)])
    head_factors = np.where(omitted, w, certificate.aggregate.sum(axis=0))
    factors = np.concatenate([head_factors, np.where(synthetic, np.abs(c), projected)])
    upward = np.concatenate([omitted, synthetic & ~(linear & (c > 0))])
    terms = {
        "residual": residual,
        "dots": min(float(factors @ dot_error(codes)), joint_error(codes, factors, upward)),
        "column_rounding": float(np.sqrt((rounding[synthetic & ~linear] ** 2).sum(axis=-1)).sum()),
        "head_chain": HEAD_CHAIN_ULPS * float(FLOAT32_UNIT) * head_sum,
    }
    terms["bound_chain"] = BOUND_CHAIN_ULPS * float(FLOAT32_UNIT) * (column_sum + sum(terms.values()))
    projected_sum = float((projected * column_magnitude).sum())
    terms["float64"] = 2.0**FLOAT64_SLACK_LOG2 * (head_sum + column_sum + sum(terms.values()) + projected_sum)
    return GuardTerms(**terms, floor=2.0**SLACK_FLOOR_LOG2)


def _raised(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """``y~`` up to sign: magnitudes of non-zero elements raised to the smallest normal number."""
    return np.where(values != 0, np.maximum(np.abs(values), float(E4M3_MIN_NORMAL)), 0.0)


# ---------------------------------------------------------------------------------------------------------------------
# Rationals


Sqrt = Callable[[Fraction], Fraction]


def sqrt_up(value: Fraction) -> Fraction:
    """A rational at least ``sqrt(value)``, too large by less than ``2^-190`` of it; ``value >= 0``."""
    return _sqrt(value, 1)


def sqrt_down(value: Fraction) -> Fraction:
    """A rational at most ``sqrt(value)``, too small by less than ``2^-190`` of it; ``value >= 0``."""
    return _sqrt(value, 0)


def _sqrt(value: Fraction, add: int) -> Fraction:
    if value == 0:
        return Fraction(0)
    # floor(sqrt(value * 4^shift)) has about _SQRT_BITS bits: an error of one unit there is relative 2^-191.
    shift = _SQRT_BITS + (value.denominator.bit_length() - value.numerator.bit_length()) // 2
    scaled = value * Fraction(4) ** shift
    return Fraction(math.isqrt(math.floor(scaled)) + add) / Fraction(2) ** shift


class Lattice(NamedTuple):
    """Rationals ``values * 2^exponent``; values are Python integers (object dtype), so that sums are exact."""

    values: npt.NDArray[Any]
    exponent: int

    def fractions(self) -> list[Any]:
        """Nested lists of Fractions."""
        scale = Fraction(2) ** self.exponent
        return np.frompyfunc(lambda value: value * scale, 1, 1)(self.values).tolist()  # type: ignore[no-any-return]


def e4m3_lattice(codes: npt.NDArray[Any]) -> Lattice:
    """Values of E4M3 codes without NaN, as multiples of ``2^-9``."""
    integers = np.ldexp(e4m3_float64(codes), -E4M3_LATTICE_LOG2).astype(np.int64)
    return Lattice(integers.astype(object), E4M3_LATTICE_LOG2)


def float_lattice(values: npt.NDArray[Any]) -> Lattice:
    """Finite float32 or float64 values as integers on their finest common power of two."""
    ratios = [value.as_integer_ratio() for value in values.astype(np.float64).ravel().tolist()]
    finest = max((denominator.bit_length() - 1 for _, denominator in ratios), default=0)
    integers = np.empty(len(ratios), object)
    integers[:] = [(n << finest) // d for n, d in ratios]
    return Lattice(integers.reshape(values.shape), -finest)


def residual_lattice(
    q_row: npt.NDArray[Any], w_row: npt.NDArray[np.float32], columns: npt.NDArray[Any], certificate: BoundCertificate
) -> tuple[list[int], Lattice]:
    """The omitted heads and their exact weighted residuals ``R_g = w_g (q_g - sum_j a_gj q_j)``.

    Args:
        q_row: E4M3 ``[H, 128]``.
        w_row: float32 ``[H]``.
        columns: E4M3 ``[M, 128]``; retained ones are used.
        certificate: the multipliers.

    Returns:
        Head numbers (``O`` of them) and the vectors, ``[O, 128]``.
    """
    retained = set(certificate.retained.tolist())
    omitted = [h for h in range(len(w_row)) if w_row[h] > 0 and h not in retained]
    a, w = float_lattice(certificate.projection[omitted]), float_lattice(w_row[omitted])
    x, y = e4m3_lattice(q_row[omitted]), e4m3_lattice(columns)
    # Both parts on the lattice 2^(a.exponent - 9); a.exponent <= 0.
    difference = x.values * (1 << -a.exponent) - a.values @ y.values
    return omitted, Lattice(w.values[:, None] * difference, w.exponent + a.exponent + E4M3_LATTICE_LOG2)


def dot_error_exact(codes: npt.NDArray[Any], sqrt: Sqrt = sqrt_up) -> Fraction:
    """``D(y)`` of one E4M3 vector ``[128]`` in rationals, on the side of the real one that ``sqrt`` errs to."""
    reach, prefix = _step_norms_exact(codes, sqrt)
    aligned = FIRST_STEP_LOSSY * reach[0] + STEP_LOSSY * sum(reach[1:], Fraction(0))
    return (aligned + sum(prefix, Fraction(0))) / 2**FRACTION_BITS


def joint_error_exact(
    codes: npt.NDArray[Any], factors: Sequence[Fraction], upward: Sequence[bool], sqrt: Sqrt = sqrt_up
) -> Fraction:
    """``J`` of :func:`joint_error` in rationals, on the side of the real one that ``sqrt`` errs to."""
    units, rest = [], Fraction(0)
    for code, factor in zip(codes, factors, strict=True):
        reach, prefix = _step_norms_exact(code, sqrt)
        rest += factor * (sum(reach[1:], Fraction(0)) + sum(prefix, Fraction(0)))
        units.append([factor * r for r in reach])
    # Dyadic rationals, all of them: integers on their finest common power of two add faster.
    finest = max(u.denominator.bit_length() - 1 for unit in units for u in unit)
    integers = np.array([[int(u * 2**finest) for u in unit] for unit in units], object)
    harm = np.sign(e4m3_float64(codes)).astype(np.int64) * np.where(upward, -1, 1)[:, None]
    each = np.repeat(integers, STEP_TERMS, axis=1)
    elements = np.maximum((each * (harm > 0)).sum(axis=0), (each * (harm < 0)).sum(axis=0)).sum()
    return (Fraction(int(elements), 2**finest) + rest) / 2**FRACTION_BITS


def _step_norms_exact(codes: npt.NDArray[Any], sqrt: Sqrt) -> tuple[tuple[Fraction, ...], tuple[Fraction, ...]]:
    return _step_norms_of(codes.tobytes(), sqrt)


@functools.lru_cache(maxsize=1024)  # a verdict needs those of every vector several times
def _step_norms_of(codes: bytes, sqrt: Sqrt) -> tuple[tuple[Fraction, ...], tuple[Fraction, ...]]:
    values = [Fraction(value) for value in e4m3_float64(np.frombuffer(codes, np.uint8)).tolist()]
    reach: list[Fraction] = []
    prefix: list[Fraction] = []
    square = Fraction(0)
    for step in range(STEPS):
        block = values[step * STEP_TERMS : (step + 1) * STEP_TERMS]
        largest = max((max(abs(v), E4M3_MIN_NORMAL) for v in block if v), default=Fraction(0))
        reach.append(max(largest, prefix[-1]) if prefix else largest)
        square += sum((v * v for v in block), Fraction(0))
        prefix.append(sqrt(square))
    return tuple(reach), tuple(prefix)


def magnitude_exact(codes: npt.NDArray[Any], sqrt: Sqrt = sqrt_up) -> Fraction:
    """``mag(y) = ||y|| + D(y)`` of one E4M3 vector ``[128]`` in rationals."""
    return _step_norms_exact(codes, sqrt)[1][-1] + dot_error_exact(codes, sqrt)


def _exact_terms(
    q_row: npt.NDArray[Any],
    w_row: npt.NDArray[np.float32],
    columns: npt.NDArray[Any],
    coefficients: npt.NDArray[np.float32],
    linear: npt.NDArray[np.bool_],
    certificate: BoundCertificate,
    sqrt: Sqrt,
) -> ExactGuardTerms:
    """The budget with every square root rounded by ``sqrt``; each term grows with each of its roots."""
    w, c = [Fraction(float(value)) for value in w_row], [Fraction(float(value)) for value in coefficients]
    head_sum = _dot([abs(value) for value in w], [magnitude_exact(code, sqrt) for code in q_row])
    column_sum = _dot([abs(value) for value in c], [magnitude_exact(code, sqrt) for code in columns])
    omitted, residuals = residual_lattice(q_row, w_row, columns, certificate)
    synthetic = [j for j in range(len(c)) if certificate.retained[j] < 0]
    shares = float_lattice(certificate.projection[omitted]).fractions()
    projected = [_dot([w[g] for g in omitted], [share[j] for share in shares]) for j in range(len(c))]
    multipliers = float_lattice(certificate.aggregate)
    rounding, linear_error = Fraction(0), None
    for j in synthetic:
        vector = synthetic_vector(q_row, residuals, certificate, bool(linear[j]), j)
        factor = coefficients[j] if linear[j] else np.abs(coefficients[j])
        error = _difference(vector, factor, e4m3_lattice(columns[j]))
        if linear[j]:
            linear_error = error
        else:
            rounding += sqrt(_inner(error, error))
    residual = sqrt(_residual_square(residuals, linear_error))
    aggregated = Lattice(multipliers.values.sum(axis=0), multipliers.exponent).fractions()
    codes = np.concatenate([q_row.view(np.uint8), columns.view(np.uint8)])
    factors = [w[h] if h in omitted else aggregated[h] for h in range(len(w))]
    factors += [abs(c[j]) if j in synthetic else projected[j] for j in range(len(c))]
    upward = [h in omitted for h in range(len(w))]
    upward += [j in synthetic and not (linear[j] and c[j] > 0) for j in range(len(c))]
    joint = joint_error_exact(codes, factors, upward, sqrt)
    terms = {
        "residual": residual,
        "dots": min(_dot(factors, [dot_error_exact(code, sqrt) for code in codes]), joint),
        "column_rounding": rounding,
        "head_chain": HEAD_CHAIN_ULPS * FLOAT32_UNIT * head_sum,
    }
    bound_chain = BOUND_CHAIN_ULPS * FLOAT32_UNIT * (column_sum + sum(terms.values(), Fraction(0)))
    return ExactGuardTerms(**terms, bound_chain=bound_chain, floor=Fraction(2) ** SLACK_FLOOR_LOG2)


def _difference(vector: Lattice, factor: np.float32, column: Lattice) -> Lattice:
    """``vector - factor * column``, exactly."""
    scale = float_lattice(np.asarray(factor))
    exponent = min(vector.exponent, scale.exponent + column.exponent)
    left = vector.values * (1 << vector.exponent - exponent)
    right = scale.values * column.values * (1 << scale.exponent + column.exponent - exponent)
    return Lattice(left - right, exponent)


def _inner(left: Lattice, right: Lattice) -> Fraction:
    """Inner product of two vectors."""
    return int(left.values @ right.values) * Fraction(2) ** (left.exponent + right.exponent)


def _residual_square(residuals: Lattice, linear_error: Lattice | None) -> Fraction:
    """What stands under the root of ``residual``; ``linear_error`` is the ``e`` of the linear column, None without."""
    gram = residuals.values @ residuals.values.T
    unit = Fraction(2) ** (2 * residuals.exponent)
    if linear_error is None:
        return int(np.maximum(gram, 0).sum()) * unit
    # |R/2 . R'/2| over all pairs, |R/2 . e| twice, and e . e.
    along = int(np.abs(residuals.values @ linear_error.values).sum()) * Fraction(2) ** (
        residuals.exponent + linear_error.exponent
    )
    return int(np.abs(gram).sum()) * unit / 4 + along + _inner(linear_error, linear_error)


def synthetic_vector(
    q_row: npt.NDArray[Any], residuals: Lattice, certificate: BoundCertificate, is_linear: bool, column: int
) -> Lattice:
    """The exact vector ``v [128]`` of a synthetic column: an aggregate, or half the sum of the residuals less that."""
    multipliers, x = float_lattice(certificate.aggregate[column]), e4m3_lattice(q_row)
    aggregate = Lattice(multipliers.values @ x.values, multipliers.exponent + x.exponent)
    if not is_linear:
        return aggregate
    half = Lattice(residuals.values.sum(axis=0) + np.zeros(q_row.shape[-1], object), residuals.exponent - 1)
    return _difference(half, np.float32(1), aggregate)


def guard_enclosure(
    q_row: npt.NDArray[Any],
    w_row: npt.NDArray[np.float32],
    columns: npt.NDArray[Any],
    coefficients: npt.NDArray[np.float32],
    linear: npt.NDArray[np.bool_],
    certificate: BoundCertificate,
) -> tuple[ExactGuardTerms, ExactGuardTerms]:
    """The error budget of one row in rationals: lower and upper ends of every term.

    Args:
        q_row: E4M3 ``[H, 128]`` (uint8 codes or float8_e4m3fn), no NaN.
        w_row: float32 ``[H]``, finite.
        columns: E4M3 ``[M, 128]``.
        coefficients: float32 ``[M]``.
        linear: bool ``[M]``.
        certificate: the multipliers.

    Returns:
        Terms with all square roots rounded down, and with all rounded up; they differ by about ``2^-190`` relatively.

    Exactness: enclosure.

    Source: docs/bound.md, section "The guard".
    """
    arguments = (q_row, w_row, columns, coefficients, linear, certificate)
    return _exact_terms(*arguments, sqrt=sqrt_down), _exact_terms(*arguments, sqrt=sqrt_up)


def _dot(left: Sequence[Fraction], right: Sequence[Fraction]) -> Fraction:
    return sum((x * y for x, y in zip(left, right, strict=True)), Fraction(0))
