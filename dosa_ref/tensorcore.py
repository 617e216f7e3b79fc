"""What the tensor cores compute: accumulation models of one matrix-multiply instruction.

A dot product of ``K`` elements runs as ``K / terms_per_step`` steps, chained through the accumulator. One step::

    e(x)  = max(floor(log2 |x|), operand_min_exponent)          for a non-zero operand
    E     = max(e(q_i) + e(k_i) over the non-zero products, e(acc) if acc != 0)          (products are not renormalised)
    unit  = 2^(E - fraction_bits)
    sum   = sum_i trunc(q_i k_i / unit) + trunc(acc / unit)      each term cut towards zero, then added exactly
    acc   = sum * unit, cut towards zero to output_fraction_bits fraction bits

Parameter table:

==============  =====  =============  ===================  ================  =======================================
model           terms  fraction_bits  output              operand_min       instruction
==============  =====  =============  ===================  ================  =======================================
``WGMMA_E4M3``  32     13             13 bits (E8M13), RZ  -6                sm_90 ``wgmma m64nNk32 e4m3 -> f32``
``HMMA_F16``    16     25             23 bits (float32),   -14               sm_90 ``mma m16n8k16 f16 -> f32`` after
                                      RZ                                     a cast of both operands from E4M3
==============  =====  =============  ===================  ================  =======================================

(``terms`` = ``terms_per_step``, ``output`` = ``output_fraction_bits``, ``operand_min`` = ``operand_min_exponent``.)

``docs/arithmetic.md`` reports how both were compared with an H200, bit by bit. ``HMMA_F16`` is what a compiler falls
back to when a tile does not fit ``wgmma``; it is here to recognise that case, not to score with. Which elements share
one of its steps is the compiler's choice, here consecutive ones (Triton on an H200 takes elements 0 and 1 of every four
of a block of 32 in one step, 2 and 3 in the next).

Two forms: :func:`dot_scalar` is integer arithmetic, term by term; :func:`dots` is the vectorised twin.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import ml_dtypes
import numpy as np
import numpy.typing as npt

from dosa_ref.spec import FRACTION_BITS, STEP_TERMS, InvalidProblem

FLOAT32_MIN_EXPONENT: Final = -126
FLOAT32_FRACTION_BITS: Final = 23
NAN_BITS: Final = 0x7FFFFFFF
"""The one NaN that the tensor cores write."""

_E4M3_FRACTION_BITS: Final = 3
_ZERO_EXPONENT: Final = -64
"""Exponent of a zero operand: the sum with any other exponent stays below every real product's and fits int8."""
_NO_PRODUCT_EXPONENT: Final = -40
"""Largest product exponents at or below this mean that all products of the step are zero (real ones are >= -28)."""
_SMALLEST_SCALED_EXPONENT: Final = -100
"""Alignment exponents below this one occur only where the accumulator is alone."""
_BLOCK_PAIRS: Final = 8192
"""Pairs of one block: 32 x 8192 float32 products fill 1 MiB, which stays in a core's L2 cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AccumulationModel:
    """Parameters of one instruction's accumulation; the module docstring gives the formula.

    Attributes:
        name: the identifier used in reports.
        terms_per_step: products that one step aligns and adds.
        fraction_bits: fraction bits kept below the largest exponent while adding.
        output_fraction_bits: fraction bits of the normalised result of a step.
        operand_min_exponent: exponent at which subnormal operands take part in the alignment.
        notes: where the figures come from and what is not known.
    """

    name: str
    terms_per_step: int
    fraction_bits: int
    output_fraction_bits: int
    operand_min_exponent: int
    notes: str


WGMMA_E4M3: Final = AccumulationModel(
    name="wgmma_e4m3",
    terms_per_step=STEP_TERMS,
    fraction_bits=FRACTION_BITS,
    output_fraction_bits=FRACTION_BITS,
    operand_min_exponent=-6,
    notes="measured on an H200: 0 differences in 83,886,080 dots over all bit patterns and constructed families",
)

HMMA_F16: Final = AccumulationModel(
    name="hmma_f16",
    terms_per_step=16,
    fraction_bits=25,
    output_fraction_bits=FLOAT32_FRACTION_BITS,
    operand_min_exponent=-14,
    notes="published model of sm_90 f16 mma; the assignment of elements to steps is the compiler's, consecutive here",
)

MODELS: Final[tuple[AccumulationModel, ...]] = (WGMMA_E4M3, HMMA_F16)


# ---------------------------------------------------------------------------------------------------------------------
# The scalar form


def _operand(code: int, model: AccumulationModel) -> tuple[int, int]:
    """Signed significand ``m`` and exponent ``e`` of a finite E4M3 code: the value is ``m * 2^(e - 3)``."""
    biased, fraction = (code >> 3) & 15, code & 7
    significand, exponent = (8 + fraction, biased - 7) if biased else (fraction, -6)
    while significand and significand < 8 and exponent > model.operand_min_exponent:
        significand, exponent = significand << 1, exponent - 1
    return (-significand if code & 0x80 else significand), exponent


def _shift_towards_zero(significand: int, left: int) -> int:
    """``trunc(significand * 2^left)``."""
    magnitude = abs(significand) << left if left >= 0 else abs(significand) >> -left
    return -magnitude if significand < 0 else magnitude


def _accumulator(value: np.float32) -> tuple[int, int]:
    """Signed significand ``m`` and exponent ``e`` of a finite float32: the value is ``m * 2^(e - 23)``."""
    bits = int(np.float32(value).view(np.uint32))
    biased, fraction = (bits >> 23) & 255, bits & 0x7FFFFF
    significand, exponent = (fraction | 0x800000, biased - 127) if biased else (fraction, FLOAT32_MIN_EXPONENT)
    return (-significand if bits >> 31 else significand), exponent


def _step(products: list[tuple[int, int]], acc: tuple[int, int], model: AccumulationModel) -> tuple[int, int]:
    """One step: ``products`` are (significand, exponent) with value ``m * 2^(e - 6)``, ``acc`` as `_accumulator`."""
    exponents = [exponent for significand, exponent in products if significand]
    if acc[0]:
        exponents.append(acc[1])
    if not exponents:
        return 0, 0
    largest = max(exponents)
    unit = largest - model.fraction_bits  # log2 of the unit
    total = sum(_shift_towards_zero(m, e - 2 * _E4M3_FRACTION_BITS - unit) for m, e in products if m)
    total += _shift_towards_zero(acc[0], acc[1] - FLOAT32_FRACTION_BITS - unit)
    # Normalise: the leading bit has exponent `leading`; below the float32 range the exponent stops falling.
    leading = max(unit + abs(total).bit_length() - 1, FLOAT32_MIN_EXPONENT)
    last = leading - model.output_fraction_bits
    kept = _shift_towards_zero(total, unit - last)
    return _shift_towards_zero(kept, FLOAT32_FRACTION_BITS - model.output_fraction_bits), leading


def dot_scalar(
    q_codes: npt.NDArray[Any],
    k_codes: npt.NDArray[Any],
    model: AccumulationModel = WGMMA_E4M3,
    c: float | np.float32 = 0.0,
) -> np.float32:
    """The dot product of two E4M3 vectors as the instruction computes it, in integers.

    Args:
        q_codes: E4M3 codes ``[K]``, uint8 or float8_e4m3fn; K is a multiple of ``model.terms_per_step``.
        k_codes: E4M3 codes ``[K]``.
        model: the accumulation model.
        c: the accumulator before the first step, any float32.

    Returns:
        The accumulator after the last step.

    Raises:
        InvalidProblem: K is not a multiple of ``terms_per_step``, or the shapes differ.

    Exactness: model of hardware.

    Special values: a NaN operand or a NaN ``c`` gives the NaN 0x7fffffff; an infinite ``c`` is returned as it is; a
        zero result is +0 whatever the signs; zero operands do not take part in the alignment, subnormal ones do with
        ``operand_min_exponent``.

    Source: module docstring.
    """
    q, k = _codes(q_codes, "q_codes", 1), _codes(k_codes, "k_codes", 1)
    _check_inner(q.shape[0], k.shape[0], model)
    start = np.float32(c)
    pairs = [(int(x), int(y)) for x, y in zip(q, k, strict=True)]
    if np.isnan(start) or any(x & 0x7F == 0x7F or y & 0x7F == 0x7F for x, y in pairs):
        return np.uint32(NAN_BITS).view(np.float32)
    if np.isinf(start):
        return start
    acc = _accumulator(start)
    for first in range(0, len(pairs), model.terms_per_step):
        products = []
        for x, y in pairs[first : first + model.terms_per_step]:
            (mx, ex), (my, ey) = _operand(x, model), _operand(y, model)
            products.append((mx * my, ex + ey))
        acc = _step(products, acc, model)
    significand, exponent = acc
    return np.float32(np.ldexp(np.float64(significand), exponent - FLOAT32_FRACTION_BITS))


# ---------------------------------------------------------------------------------------------------------------------
# The vectorised twin


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tables:
    """Per-code operand values (NaN counts 0 here) and exponents of one model, in the dtype it is computed with."""

    values: npt.NDArray[Any]
    exponents: npt.NDArray[np.int8]


def _working_dtype(model: AccumulationModel) -> type[np.float32] | type[np.float64]:
    """float32 where every sum of a step, in units, is an integer below 2^24 (so that float32 adds it exactly)."""
    largest_sum = (model.terms_per_step + 1) * 4 << model.fraction_bits
    return np.float32 if largest_sum <= 1 << 24 else np.float64


def _make_tables(model: AccumulationModel) -> _Tables:
    codes = np.arange(256, dtype=np.uint8)
    values = codes.view(ml_dtypes.float8_e4m3fn).astype(_working_dtype(model))
    values[np.isnan(values)] = 0
    _, exponents = np.frexp(values)
    exponents = np.maximum(exponents - 1, model.operand_min_exponent)
    exponents[values == 0] = _ZERO_EXPONENT
    return _Tables(values=values, exponents=exponents.astype(np.int8))


_TABLES: Final = {model: _make_tables(model) for model in MODELS}


def dots(
    a_codes: npt.NDArray[Any],
    b_codes: npt.NDArray[Any],
    model: AccumulationModel = WGMMA_E4M3,
    c: npt.NDArray[np.float32] | None = None,
) -> npt.NDArray[np.float32]:
    """All dot products of the rows of two E4M3 matrices, as the instruction computes them.

    Args:
        a_codes: E4M3 codes ``[m, K]``, uint8 or float8_e4m3fn, any strides; K is a multiple of
            ``model.terms_per_step``.
        b_codes: E4M3 codes ``[n, K]``.
        model: the accumulation model.
        c: accumulators before the first step, float32 ``[m, n]``; None means zero.

    Returns:
        float32 ``[m, n]``, the bits of :func:`dot_scalar` for each pair.

    Raises:
        InvalidProblem: shapes do not fit, or a dtype is neither uint8 nor float8_e4m3fn.

    Exactness: model of hardware; every floating-point operation in here is exact. With ``P = q k`` (8 bits) and ``E``
        per pair and step, ``trunc(P * 2^(F - E))`` is an integer of at most ``F + 2`` bits, and so are the sums.

    Special values: as :func:`dot_scalar`. ``m``, ``n`` or ``K`` may be 0.

    Source: module docstring.
    """
    a, b = _codes(a_codes, "a_codes", 2), _codes(b_codes, "b_codes", 2)
    _check_inner(a.shape[1], b.shape[1], model)
    shape = (a.shape[0], b.shape[0])
    if c is not None and (c.shape != shape or c.dtype != np.float32):
        raise InvalidProblem("c", f"{c.dtype} {list(c.shape)}", f"float32 {list(shape)}")
    if a.shape[0] > b.shape[0]:  # the long axis goes innermost; a product does not care which factor comes first
        return np.ascontiguousarray(dots(b, a, model, None if c is None else c.T).T)
    out = np.zeros(shape, np.float32) if c is None else np.array(c, np.float32, order="C")
    tables = _tables(model)
    a_values, a_exponents = _operands(a, tables)
    b_values, b_exponents = _operands(b, tables)
    columns = min(max(b.shape[0], 1), 1024)
    rows = max(1, _BLOCK_PAIRS * STEP_TERMS // (model.terms_per_step * columns))
    for i in range(0, shape[0], rows):
        for j in range(0, shape[1], columns):
            block = out[i : i + rows, j : j + columns]
            block[...] = _block(
                a_values[:, i : i + rows, None],
                a_exponents[:, i : i + rows, None],
                b_values[:, None, j : j + columns],
                b_exponents[:, None, j : j + columns],
                None if c is None else block,
                model,
            )
    nan = np.uint32(NAN_BITS).view(np.float32)
    out[(a & 0x7F == 0x7F).any(axis=1)] = nan
    out[:, (b & 0x7F == 0x7F).any(axis=1)] = nan
    return out


def _tables(model: AccumulationModel) -> _Tables:
    return _TABLES[model] if model in _TABLES else _make_tables(model)


def _operands(codes: npt.NDArray[np.uint8], tables: _Tables) -> tuple[npt.NDArray[Any], npt.NDArray[np.int8]]:
    """Values and exponents with the inner axis first, so that one step is a contiguous slab."""
    transposed = np.ascontiguousarray(codes.T)
    return tables.values[transposed], tables.exponents[transposed]


def _power_of_two(exponent: npt.NDArray[Any], dtype: type[np.float32] | type[np.float64]) -> npt.NDArray[Any]:
    """``2^exponent``, written into the exponent field."""
    if dtype is np.float32:
        return ((exponent.astype(np.int32) + 127) << 23).view(np.float32)
    return ((exponent.astype(np.int64) + 1023) << 52).view(np.float64)


def _cut(values: npt.NDArray[Any], fraction_bits: int) -> npt.NDArray[Any]:
    """Normal values (and float32 subnormals) cut towards zero to ``fraction_bits`` fraction bits; -0 becomes +0."""
    if values.dtype == np.float32:
        bits, dropped = values.view(np.int32), 23 - fraction_bits
        return (bits & np.int32(-1 << dropped)).view(np.float32) + np.float32(0)
    wide, dropped = values.view(np.int64), 52 - fraction_bits
    return (wide & np.int64(-1 << dropped)).view(np.float64) + np.float64(0)


def _block(
    a_values: npt.NDArray[Any],
    a_exponents: npt.NDArray[np.int8],
    b_values: npt.NDArray[Any],
    b_exponents: npt.NDArray[np.int8],
    c: npt.NDArray[np.float32] | None,
    model: AccumulationModel,
) -> npt.NDArray[np.float32]:
    """One block of :func:`dots`: operands ``[K, m, 1]`` and ``[K, 1, n]``, NaN operands already replaced by 0."""
    dtype = _working_dtype(model)
    steps, shape = model.terms_per_step, (a_values.shape[1], b_values.shape[2])
    products = np.empty((steps, *shape), dtype)
    exponents = np.empty((steps, *shape), np.int8)
    acc = None if c is None else np.where(np.isfinite(c), c, np.float32(0)).astype(dtype)
    for first in range(0, a_values.shape[0], steps):
        step = slice(first, first + steps)
        np.add(a_exponents[step], b_exponents[step], out=exponents)
        largest = np.maximum.reduce(exponents, axis=0).astype(np.int16)
        no_product = largest <= _NO_PRODUCT_EXPONENT
        if acc is not None:
            _, acc_exponent = np.frexp(acc)
            np.maximum(largest, acc_exponent - 1, out=largest, where=acc != 0, casting="same_kind")
        # Where all products are zero the accumulator is alone: it is only cut (below). Keep 2^(F - E) finite there.
        np.maximum(largest, _SMALLEST_SCALED_EXPONENT, out=largest)
        np.multiply(a_values[step], b_values[step], out=products)
        scale = _power_of_two(model.fraction_bits - largest, dtype)
        np.multiply(products, scale, out=products)
        np.trunc(products, out=products)
        total = np.add.reduce(products, axis=0)
        if acc is not None:
            total += np.trunc(acc * scale)
        result = _cut(total * _power_of_two(largest - model.fraction_bits, dtype), model.output_fraction_bits)
        if acc is None:
            acc = result  # zero where there is no product
        else:
            alone = _cut(acc.astype(np.float32), min(model.fraction_bits, model.output_fraction_bits))
            acc = np.where(no_product, alone, result)
    if acc is None:
        return np.zeros(shape, np.float32)
    out = acc.astype(np.float32) + np.float32(0)
    return out if c is None else np.where(np.isfinite(c), out, np.where(np.isnan(c), _nan(), c))


def _nan() -> np.float32:
    return np.uint32(NAN_BITS).view(np.float32)


def _codes(array: npt.NDArray[Any], field: str, ndim: int) -> npt.NDArray[np.uint8]:
    """The E4M3 codes of ``array`` as uint8, without a copy."""
    if array.ndim != ndim:
        raise InvalidProblem(field, f"{array.ndim} dimensions", f"{ndim}")
    if array.dtype == np.uint8:
        return array
    if array.dtype == ml_dtypes.float8_e4m3fn:
        return array.view(np.uint8)
    raise InvalidProblem(field, array.dtype, "uint8 or float8_e4m3fn")


def _check_inner(a: int, b: int, model: AccumulationModel) -> None:
    if a != b or a % model.terms_per_step:
        raise InvalidProblem("K", f"{a} and {b}", f"equal and a multiple of {model.terms_per_step}")
