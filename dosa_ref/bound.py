"""The bound: a few columns per query whose combination is at least the computed score of every key.

::

    U = s * (sum_j c_j psi_j + G * n)          psi_j = max(d_j, 0) for a relu column, d_j for a linear one

with ``d_j`` the computed dot of column ``j`` and the key, ``s`` the key's scale and ``n`` its norm. ``docs/bound.md``
fixes the mathematics. Two forms of one bound:

- *rounded* (:class:`RowBound`): FP8 columns, float32 coefficients, the guard inside ``G``. This is what a kernel runs.
- *exact* (:class:`ExactBound`): rational columns and coefficients, no guard. It bounds the exact score; only rho is
left as slack.

Which heads to retain, how to project and what to aggregate is a heuristic that steers speed. That any such choice is
sound is what :func:`check_row_bound` recomputes in rationals, whoever made it.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Final

import ml_dtypes
import numpy as np
import numpy.typing as npt
from scipy.optimize import nnls

from dosa_ref.formats import encode_e4m3_array, float_evidence, is_e4m3_nan
from dosa_ref.guard import (
    BoundCertificate,
    GuardTerms,
    Lattice,
    dot_error,
    e4m3_float64,
    e4m3_lattice,
    float_lattice,
    guard_enclosure,
    guard_terms,
    magnitude,
    magnitude_exact,
    residual_lattice,
    sqrt_up,
    synthetic_vector,
)
from dosa_ref.spec import (
    BOUND_CHAIN_ULPS,
    E4M3_MAX,
    E4M3_MIN_NORMAL,
    FLOAT32_UNIT,
    HEAD_DIM,
    KEY_SCALE_LOG2_MAX,
    KEY_SCALE_LOG2_MIN,
    MAX_COLUMNS,
    ROW_MAGNITUDE_LOG2_MAX,
    InvalidProblem,
)
from dosa_ref.tensorcore import WGMMA_E4M3, dots

RESIDUAL_SHARE: Final = 0.7
"""Share of the residual's norm bound that a hard key is taken to lose, in the choice between positive and negative."""

_SYNTHETIC_LOG2_LIMIT: Final = 100
"""``2^-m`` of a synthetic column keeps ``|m|`` at most this, so that it is a normal float32."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowBound:
    """The rounded bound of one query row.

    Attributes:
        columns: float8_e4m3fn ``[M, 128]``.
        coefficients: float32 ``[M]``.
        linear: bool ``[M]``; the others are relu columns.
        slack: ``G``, float32, factor of the key norm.
        certificate: the multipliers that justify the four fields above.
        terms: the parts of ``G``.
    """

    columns: npt.NDArray[Any]
    coefficients: npt.NDArray[np.float32]
    linear: npt.NDArray[np.bool_]
    slack: np.float32
    certificate: BoundCertificate
    terms: GuardTerms


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExactBound:
    """The exact bound of one query row: ``U = s (sum_j c_j psi_j + rho ||k||)`` in real numbers.

    Attributes:
        columns: the vectors, M lattices ``[128]``.
        coefficients: M rationals.
        linear: whether a column is linear, M flags.
        rho_squared: square of the residual term.
    """

    columns: tuple[Lattice, ...]
    coefficients: tuple[Fraction, ...]
    linear: tuple[bool, ...]
    rho_squared: Fraction


class Coverage(enum.Enum):
    """What :func:`check_row_bound` found."""

    COVERED = "covered"
    """Every inequality of ``docs/bound.md`` holds for these numbers."""
    SLACK_TOO_SMALL = "slack_too_small"
    """``slack`` is below what the columns need, coefficients that are too small included."""
    BAD_CERTIFICATE = "bad_certificate"
    """The multipliers are outside their ranges, or do not belong to these columns."""
    ROW_MAGNITUDE = "row_magnitude"
    """The row's absolute sums are too large: the bound could overflow, the row must take the dense path."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundVerdict:
    """Verdict of :func:`check_row_bound`.

    Attributes:
        coverage: the finding.
        required_slack: the slack that these columns need (upper end of the enclosure), None where the check stopped
            before.
        evidence: details, ready for JSON; floats as bits and decimal.
    """

    coverage: Coverage
    required_slack: Fraction | None
    evidence: Mapping[str, object]


# ---------------------------------------------------------------------------------------------------------------------
# Choosing and rounding


def build_row_bound(
    q_row: npt.NDArray[Any],
    w_row: npt.NDArray[np.float32],
    max_columns: int,
    sample: npt.NDArray[Any] | None = None,
) -> RowBound:
    """Choose the columns of one row, round them, and add up the guard.

    All heads with a non-zero weight are retained if they fit. Otherwise ``M - 1`` heads are retained and the last
    column is linear: it holds half of the residuals of the omitted positive heads, less those negative heads that lose
    less when they count linearly than when they count 0. Positive heads are retained in the order of a pivoted Cholesky
    factorisation of their weighted Gram matrix, negative ones by what leaving them out would lose on the sample, and so
    many of either that the expected loss is least. Omitted heads are projected by non-negative least squares with a
    price on each multiplier, the mean magnitude of its column on the sample.

    Args:
        q_row: E4M3 ``[H, 128]`` (uint8 codes or float8_e4m3fn), no NaN.
        w_row: float32 ``[H]``, finite.
        max_columns: column budget M, 1 to ``MAX_COLUMNS``; every kind of column counts.
        sample: E4M3 ``[n, 128]``, n > 0, keys that are hard to prune (scores below ``tau``); None takes every head as
            active on all keys and multipliers as free.

    Returns:
        The bound; its actual number of columns is at most ``max_columns``.

    Raises:
        InvalidProblem: ``max_columns`` is out of range, or the row holds NaN or Inf.

    Exactness: the choice is heuristic, the result is an enclosure for any choice.

    Special values: zero weights and zero queries are fine; a row without a non-zero weight gets one unused column; NaN
        in a sample key counts as 0.

    Source: docs/bound.md, sections "Columns of the bound", "The choice" and "The guard".
    """
    if not 1 <= max_columns <= MAX_COLUMNS:
        raise InvalidProblem("max_columns", max_columns, f"1 to {MAX_COLUMNS}")
    if not row_is_finite(q_row, w_row):
        raise InvalidProblem("q_row, w_row", "NaN or Inf", "finite values (other rows take the dense path)")
    x, w = e4m3_float64(q_row), w_row.astype(np.float64)
    means = _sample_means(x, sample)
    retained = _choose_heads(x, w, dot_error(q_row), max_columns, means)
    left = np.array([h not in retained for h in range(len(w))])
    omitted, with_linear = left & (w > 0), bool((w[left] != 0).any())
    multipliers = np.where(left & (w < 0) & (means.above > means.below), np.abs(w), 0.0)

    kept = len(retained)
    size = max(kept + with_linear, 1)
    projection, aggregate, linear = np.zeros((len(w), size)), np.zeros((size, len(w))), np.zeros(size, np.bool_)
    if kept:
        basis = x[retained]
        price = (means.above + means.below)[retained] / means.norm if sample is not None else np.zeros(kept)
        # A price p on the multipliers is the same as a target that is shorter by t, with basis @ t = p.
        shift = np.linalg.pinv(basis) @ price / 2
        for g in np.flatnonzero(omitted):
            projection[g, :kept] = nnls(basis.T, x[g] - np.linalg.norm(x[g]) * shift)[0]
    if with_linear:
        aggregate[-1], linear[-1] = multipliers, True
    certificate = BoundCertificate(
        retained=np.array([*retained, *[-1] * (size - kept)], np.int64), projection=projection, aggregate=aggregate
    )
    return round_bound(q_row, w_row, linear, certificate)


def round_bound(
    q_row: npt.NDArray[Any],
    w_row: npt.NDArray[np.float32],
    linear: npt.NDArray[np.bool_],
    certificate: BoundCertificate,
) -> RowBound:
    """The rounded bound that a certificate stands for: FP8 columns, float32 coefficients and the guard.

    Args:
        q_row: E4M3 ``[H, 128]`` (uint8 codes or float8_e4m3fn), no NaN.
        w_row: float32 ``[H]``, finite.
        linear: bool ``[M]``; True for the linear column, of which there is at most one, and none that is retained.
        certificate: the multipliers.

    Returns:
        The bound; a synthetic relu column that aggregates nothing is an unused column.

    Exactness: enclosure, for any multipliers in the ranges that :class:`BoundCertificate` gives.

    Source: docs/bound.md, sections "Columns of the bound" and "The guard".
    """
    x, w = e4m3_float64(q_row), w_row.astype(np.float64)
    retained = certificate.retained
    omitted = (w > 0) & ~np.isin(np.arange(len(w)), retained)
    columns = np.where(retained[:, None] >= 0, q_row.view(np.uint8)[retained], np.uint8(0))
    coefficients = np.zeros(len(retained), np.float32)
    shares = np.where(omitted[:, None], w[:, None] * certificate.projection, 0.0)
    vectors = certificate.aggregate @ x
    residuals = np.where(omitted[:, None], w[:, None] * (x - certificate.projection @ e4m3_float64(columns)), 0.0)
    for j, head in enumerate(retained.tolist()):
        if head >= 0:
            coefficients[j] = _round_up(w[head] + shares[:, j].sum())
        elif linear[j]:
            columns[j], coefficients[j] = _round_to_fp8(residuals.sum(axis=0) / 2 - vectors[j])
        elif certificate.aggregate[j].any():
            columns[j], scale = _round_to_fp8(vectors[j])
            coefficients[j] = -scale
    terms = guard_terms(q_row, w_row, columns, coefficients, linear, certificate)
    return RowBound(
        columns=columns.view(ml_dtypes.float8_e4m3fn),
        coefficients=coefficients,
        linear=linear,
        slack=terms.slack(),
        certificate=certificate,
        terms=terms,
    )


def row_is_finite(q_row: npt.NDArray[Any], w_row: npt.NDArray[np.float32]) -> bool:
    """Whether a row has neither NaN codes in ``q`` nor NaN or Inf among its weights."""
    return not is_e4m3_nan(q_row).any() and bool(np.isfinite(w_row).all())


def row_within_magnitude(q_row: npt.NDArray[Any], w_row: npt.NDArray[np.float32], bound: RowBound) -> bool:
    """The premise ``sum |w_h| mag(q_h) + sum |c_j| mag(y_j) + G <= 2^ROW_MAGNITUDE_LOG2_MAX``; False also for NaN."""
    heads = (np.abs(w_row.astype(np.float64)) * magnitude(q_row)).sum()
    columns = (np.abs(bound.coefficients.astype(np.float64)) * magnitude(bound.columns)).sum()
    return bool(heads + columns + float(bound.slack) <= 2.0**ROW_MAGNITUDE_LOG2_MAX)


@dataclass(frozen=True, slots=True, kw_only=True)
class _SampleMeans:
    """What the heads do on the sample: means of ``relu(x_h)`` and ``relu(-x_h)``, ``[H]``, and of the key norm."""

    above: npt.NDArray[np.float64]
    below: npt.NDArray[np.float64]
    norm: float


def _sample_means(x: npt.NDArray[np.float64], sample: npt.NDArray[Any] | None) -> _SampleMeans:
    if sample is None:
        return _SampleMeans(above=np.sqrt((x * x).sum(axis=-1)), below=np.zeros(len(x)), norm=1.0)
    keys = np.nan_to_num(e4m3_float64(sample))
    dot = x @ keys.T
    norm = float(np.sqrt((keys * keys).sum(axis=-1)).mean())
    # A sample of zero keys says nothing; any positive norm will do.
    return _SampleMeans(
        above=np.maximum(dot, 0.0).mean(axis=-1), below=np.maximum(-dot, 0.0).mean(axis=-1), norm=norm or 1.0
    )


def _choose_heads(
    x: npt.NDArray[np.float64],
    w: npt.NDArray[np.float64],
    error: npt.NDArray[np.float64],
    max_columns: int,
    means: _SampleMeans,
) -> list[int]:
    """Retained heads, in column order; ``error`` is ``D(q_h)``."""
    order, residual = _pivots(x, w, error)
    # Counted 0, a negative head loses its positive part; counted linearly, its negative part and a dot error.
    linear = means.above > means.below
    lost = np.abs(w) * np.where(linear, means.below + error * means.norm, means.above)
    negative = [h for h in np.argsort(-lost, kind="stable").tolist() if w[h] < 0]
    if len(order) + len(negative) <= max_columns:
        return order + negative
    budget = max_columns - 1

    def cost(positive: int) -> float:
        left_out = negative[budget - positive :]
        return RESIDUAL_SHARE * means.norm * residual[positive] + float(lost[left_out].sum())

    best = min(range(min(budget, len(order)) + 1), key=cost)
    return order[:best] + negative[: budget - best]


def _pivots(
    x: npt.NDArray[np.float64], w: npt.NDArray[np.float64], error: npt.NDArray[np.float64]
) -> tuple[list[int], list[float]]:
    """Positive heads in the order of a pivoted Cholesky factorisation of the Gram matrix of ``w_h q_h``.

    Beside each number of retained heads what the others cost per unit of the key norm: half the root of what is left of
    the matrix, and their dot errors, once as omitted and about once as projected.
    """
    left = np.flatnonzero(w > 0).tolist()
    weighted = np.where(w > 0, w, 0.0)[:, None] * x
    gram = weighted @ weighted.T
    order: list[int] = []
    residual = []
    while True:
        residual.append(math.sqrt(np.abs(gram[np.ix_(left, left)]).sum()) / 2 + 2 * float((w * error)[left].sum()))
        if not left:
            return order, residual
        pivot = max(left, key=lambda h: gram[h, h])
        if gram[pivot, pivot] > 0:
            gram = gram - np.outer(gram[:, pivot], gram[pivot]) / gram[pivot, pivot]
        order.append(pivot)
        left.remove(pivot)


def _round_up(value: np.float64) -> np.float32:
    """The smallest float32 that is at least a float64 value."""
    with np.errstate(over="ignore"):
        nearest = np.float32(value)
    return nearest if np.float64(nearest) >= value else np.float32(np.nextafter(nearest, np.float32(np.inf)))


def _round_to_fp8(vector: npt.NDArray[np.float64]) -> tuple[npt.NDArray[np.uint8], np.float32]:
    """Codes of ``y`` and the float32 ``2^-m`` with ``v = 2^-m y + e``, ``m`` as large as the largest element allows."""
    largest = float(np.abs(vector).max())
    power = 0
    if 0 < largest < math.inf:
        _, exponent = math.frexp(largest)
        power = 9 - exponent if math.ldexp(largest, 9 - exponent) <= E4M3_MAX else 8 - exponent
        power = max(-_SYNTHETIC_LOG2_LIMIT, min(power, _SYNTHETIC_LOG2_LIMIT))
    codes = encode_e4m3_array(np.clip(np.ldexp(vector, power), -E4M3_MAX, E4M3_MAX).astype(np.float32)).view(np.uint8)
    return codes, np.float32(2.0**-power)


# ---------------------------------------------------------------------------------------------------------------------
# Evaluating


def key_norms(k: npt.NDArray[Any], k_scale: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """``n = ||k~||`` of each key, rounded up to float32; +Inf for a key that must always survive.

    Args:
        k: E4M3 ``[n, 128]`` (uint8 codes or float8_e4m3fn).
        k_scale: float32 ``[n]``.

    Returns:
        float32 ``[n]``.

    Exactness: the smallest float32 that is not below the real ``||k~||``. The sum of squares is exact in float64 (a
        multiple of 2^-18 below 2^25), and so is the square of a float32.

    Special values: +Inf where the key holds a NaN or its scale is outside ``2^-40 .. 2^40`` (NaN, zero and negative
        included); 0 for a zero key.
    """
    values = e4m3_float64(k)
    raised = np.where(values != 0, np.maximum(np.abs(values), float(E4M3_MIN_NORMAL)), 0.0)
    square = (raised * raised).sum(axis=-1)
    norm = np.sqrt(square).astype(np.float32)
    with np.errstate(invalid="ignore"):
        # Rounded down: the next float32 is the smallest above the root.
        too_small = norm.astype(np.float64) ** 2 < square
        usable = (k_scale >= 2.0**KEY_SCALE_LOG2_MIN) & (k_scale <= 2.0**KEY_SCALE_LOG2_MAX)
    norm = np.where(too_small, np.nextafter(norm, np.float32(np.inf)), norm)
    return np.where(usable & ~is_e4m3_nan(k).any(axis=-1), norm, np.float32(np.inf)).astype(np.float32)


def evaluate(bound: RowBound, k: npt.NDArray[Any], k_scale: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """``U`` of one row for some keys, in float32.

    Args:
        bound: the row's bound.
        k: E4M3 ``[n, 128]`` (uint8 codes or float8_e4m3fn).
        k_scale: float32 ``[n]``.

    Returns:
        float32 ``[n]``; at least the computed score of each key. The order of additions is NumPy's; the guard covers
        every order.

    Exactness: enclosure of the ``sm90`` score, provided the premises of ``docs/bound.md`` hold for the row.

    Special values: +Inf or NaN where :func:`key_norms` is +Inf, so that ``not (U < tau)`` keeps the key.
    """
    n = key_norms(k, k_scale)
    scale = np.where(np.isinf(n), np.float32(1), k_scale)
    dot = dots(bound.columns, k, WGMMA_E4M3)
    psi = np.where(bound.linear[:, None], dot, np.fmax(dot, np.float32(0)))
    total = (bound.coefficients[:, None] * psi).sum(axis=0, dtype=np.float32)
    return np.asarray(scale * (total + bound.slack * n))


# ---------------------------------------------------------------------------------------------------------------------
# The exact form, and judging a bound that somebody else made


def exact_form(
    q_row: npt.NDArray[Any],
    w_row: npt.NDArray[np.float32],
    columns: npt.NDArray[Any],
    linear: npt.NDArray[np.bool_],
    certificate: BoundCertificate,
) -> ExactBound:
    """The exact bound that a certificate stands for.

    Args:
        q_row: E4M3 ``[H, 128]``, no NaN.
        w_row: float32 ``[H]``, finite.
        columns: E4M3 ``[M, 128]``; only retained ones are read.
        linear: bool ``[M]``.
        certificate: the multipliers.

    Returns:
        The exact bound. Synthetic columns are the unrounded vectors with coefficient +1 (linear) or -1 (aggregate).

    Exactness: exact.
    """
    omitted, residuals = residual_lattice(q_row, w_row, columns, certificate)
    gram = residuals.values @ residuals.values.T
    unit = Fraction(2) ** (2 * residuals.exponent)
    centred, plain = int(np.abs(gram).sum()) * unit / 4, int(np.maximum(gram, 0).sum()) * unit
    vectors, coefficients = [], []
    for j, head in enumerate(certificate.retained.tolist()):
        if head >= 0:
            shares = float_lattice(certificate.projection[omitted, j]).fractions()
            weights = [Fraction(float(w_row[g])) for g in omitted]
            vectors.append(e4m3_lattice(columns[j]))
            coefficients.append(
                Fraction(float(w_row[head])) + sum((w * a for w, a in zip(weights, shares)), Fraction(0))
            )
        else:
            vectors.append(synthetic_vector(q_row, residuals, certificate, bool(linear[j]), j))
            coefficients.append(Fraction(1 if linear[j] else -1))
    return ExactBound(
        columns=tuple(vectors),
        coefficients=tuple(coefficients),
        linear=tuple(bool(flag) for flag in linear),
        rho_squared=centred if linear.any() else plain,
    )


def evaluate_exact(bound: ExactBound, k: npt.NDArray[Any], k_scale: np.float32 | float) -> Fraction:
    """The exact bound for one key: at least its exact score, and above it by what ``sqrt_up`` rounds, at most.

    Args:
        bound: the exact bound.
        k: E4M3 ``[128]``, no NaN.
        k_scale: positive and finite.

    Returns:
        A rational that is not below ``s (sum_j c_j psi_j + rho ||k||)``, and above it by less than ``2^-190`` of the
        last term.

    Exactness: enclosure, from above.
    """
    key = e4m3_lattice(k)
    total = Fraction(0)
    for vector, coefficient, is_linear in zip(bound.columns, bound.coefficients, bound.linear, strict=True):
        dot = int(vector.values @ key.values) * Fraction(2) ** (vector.exponent + key.exponent)
        total += coefficient * (dot if is_linear else max(dot, Fraction(0)))
    norm_squared = int(key.values @ key.values) * Fraction(2) ** (2 * key.exponent)
    return (total + sqrt_up(bound.rho_squared * norm_squared)) * Fraction(float(k_scale))


def check_row_bound(
    q_row: npt.NDArray[Any],
    w_row: npt.NDArray[np.float32],
    columns: npt.NDArray[Any],
    coefficients: npt.NDArray[np.float32],
    linear: npt.NDArray[np.bool_],
    slack: np.float32 | float,
    certificate: BoundCertificate,
) -> BoundVerdict:
    """Judge a bound that anybody made: does ``slack`` cover what ``docs/bound.md`` asks of its columns?

    Everything is recomputed in rationals from the certificate. The check does not ask how the columns were chosen;
    the term ``float64`` of the guard and the outward factor pay for the maker's own rounding and are not asked for.

    Args:
        q_row: E4M3 ``[H, 128]`` (uint8 codes or float8_e4m3fn).
        w_row: float32 ``[H]``.
        columns: E4M3 ``[M, 128]``.
        coefficients: float32 ``[M]``.
        linear: bool ``[M]``.
        slack: ``G``.
        certificate: the multipliers.

    Returns:
        The verdict, with the first fault found.

    Raises:
        InvalidProblem: shapes or dtypes do not fit together.

    Exactness: exact; COVERED is only said when the upper end of the enclosure is covered.
    """
    _check_shapes(q_row, w_row, columns, coefficients, linear, certificate)
    fault = _certificate_fault(q_row, w_row, columns, coefficients, linear, slack, certificate)
    if fault:
        return BoundVerdict(coverage=Coverage.BAD_CERTIFICATE, required_slack=None, evidence=fault)
    exact = exact_form(q_row, w_row, columns, linear, certificate)
    lower, upper = guard_enclosure(q_row, w_row, columns, coefficients, linear, certificate)
    column_magnitude = [magnitude_exact(y) for y in columns]
    # A coefficient that is too small by d loses at most d * mag(y) * n, if somebody pays for it.
    deficit = Fraction(0)
    for j in np.flatnonzero(certificate.retained >= 0):
        missing = exact.coefficients[j] - Fraction(float(coefficients[j]))
        deficit += max(missing, Fraction(0)) * column_magnitude[j]
    required = upper.total() + deficit * (1 + BOUND_CHAIN_ULPS * FLOAT32_UNIT)
    given = Fraction(float(slack))
    evidence = {
        "slack": float_evidence(slack),
        "required": _decimal(required),
        "required_without_deficit_at_least": _decimal(lower.total()),
        "coefficient_deficit": _decimal(deficit),
        "terms": {name: _decimal(getattr(upper, name)) for name in upper.__slots__},
    }
    if given < required:
        return BoundVerdict(coverage=Coverage.SLACK_TOO_SMALL, required_slack=required, evidence=evidence)
    heads = sum((abs(Fraction(float(w))) * magnitude_exact(q) for w, q in zip(w_row, q_row)), Fraction(0))
    sums = sum((abs(Fraction(float(c))) * m for c, m in zip(coefficients, column_magnitude)), Fraction(0))
    if heads + sums + given > Fraction(2) ** ROW_MAGNITUDE_LOG2_MAX:
        evidence = {**evidence, "row_magnitude": _decimal(heads + sums + given)}
        return BoundVerdict(coverage=Coverage.ROW_MAGNITUDE, required_slack=required, evidence=evidence)
    return BoundVerdict(coverage=Coverage.COVERED, required_slack=required, evidence=evidence)


def _check_shapes(
    q_row: npt.NDArray[Any],
    w_row: npt.NDArray[np.float32],
    columns: npt.NDArray[Any],
    coefficients: npt.NDArray[np.float32],
    linear: npt.NDArray[np.bool_],
    certificate: BoundCertificate,
) -> None:
    heads, size = q_row.shape[0], columns.shape[0]
    wanted: list[tuple[str, npt.NDArray[Any], tuple[int, ...]]] = [
        ("q_row", q_row, (heads, HEAD_DIM)),
        ("w_row", w_row, (heads,)),
        ("columns", columns, (size, HEAD_DIM)),
        ("coefficients", coefficients, (size,)),
        ("linear", linear, (size,)),
        ("retained", certificate.retained, (size,)),
        ("projection", certificate.projection, (heads, size)),
        ("aggregate", certificate.aggregate, (size, heads)),
    ]
    for field, array, shape in wanted:
        if array.shape != shape:
            raise InvalidProblem(field, list(array.shape), str(list(shape)))


def _certificate_fault(
    q_row: npt.NDArray[Any],
    w_row: npt.NDArray[np.float32],
    columns: npt.NDArray[Any],
    coefficients: npt.NDArray[np.float32],
    linear: npt.NDArray[np.bool_],
    slack: np.float32 | float,
    certificate: BoundCertificate,
) -> dict[str, object] | None:
    """The first way in which a certificate is out of its ranges or does not belong to the columns, or None."""
    retained, projection, aggregate = certificate.retained, certificate.projection, certificate.aggregate
    finite = row_is_finite(q_row, w_row) and not is_e4m3_nan(columns).any()
    finite = finite and all(
        bool(np.isfinite(a).all()) for a in (coefficients, projection, aggregate, np.float64(slack))
    )
    if not finite:
        return {"reason": "NaN or Inf in the row, its columns, its multipliers or its slack"}
    heads = [h for h in retained.tolist() if h >= 0]
    if len(set(heads)) != len(heads) or any(h >= len(w_row) for h in heads) or (retained < -1).any():
        return {"reason": "retained heads must be distinct head numbers, or -1", "retained": retained.tolist()}
    for j, h in enumerate(retained.tolist()):
        if h >= 0 and (columns.view(np.uint8)[j] != q_row.view(np.uint8)[h]).any():
            return {"reason": "a retained column is not its head's query", "column": j, "head": h}
    if (linear & (retained >= 0)).any() or linear.sum() > 1:
        return {"reason": "at most one linear column, and not a retained one", "linear": linear.tolist()}
    is_omitted = (w_row > 0) & ~np.isin(np.arange(len(w_row)), retained)
    if (projection < 0).any() or projection[~is_omitted].any() or projection[:, retained < 0].any():
        return {"reason": "projection must be >= 0, of omitted positive heads on retained columns"}
    is_aggregated = (w_row < 0) & ~np.isin(np.arange(len(w_row)), retained)
    synthetic = retained < 0
    if (aggregate < 0).any() or aggregate[:, ~is_aggregated].any() or aggregate[~synthetic].any():
        return {"reason": "aggregate must be >= 0, of negative heads that are not retained, in synthetic columns"}
    shares = float_lattice(aggregate)
    totals = Lattice(shares.values.sum(axis=0), shares.exponent).fractions()
    for h, total in enumerate(totals):
        if total > abs(Fraction(float(w_row[h]))):
            return {"reason": "aggregate exceeds |w|", "head": h, "total": _decimal(total)}
    if (coefficients[synthetic & ~linear] > 0).any():
        return {"reason": "the coefficient of an aggregate must not be positive"}
    return None


def _decimal(value: Fraction) -> str:
    """A rational in decimal, for reading."""
    return f"{float(value):.17g}"
