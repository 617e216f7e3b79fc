"""Number formats: E4M3FN, UE8M0 and float32, decoded, encoded and rounded exactly.

The scalar functions work on integers and rationals and state the format; the array twins call ml_dtypes and are
tested equal to them, exhaustively where the format allows.

==========  =========================  ==========  ============================  =================  =====
format      bits                       bias        largest                       smallest           NaN
==========  =========================  ==========  ============================  =================  =====
E4M3FN      1 sign, 4 exponent, 3      7           448 (0x7E); no Inf            2^-9 (subnormal)   0x7F, 0xFF
UE8M0       8 exponent, no sign        127         2^127                         2^-127             0xFF
float32     1 sign, 8 exponent, 23     127         (2 - 2^-23) 2^127             2^-149             many
==========  =========================  ==========  ============================  =================  =====
"""

from __future__ import annotations

import enum
import math
from fractions import Fraction
from typing import Any, Final

import ml_dtypes
import numpy as np
import numpy.typing as npt

from dosa_ref.spec import E4M3_MAX, InvalidProblem

E4M3_NAN_CODE: Final = 0x7F
E4M3_MAX_CODE: Final = 0x7E
UE8M0_NAN_CODE: Final = 0xFF
FLOAT32_MAX: Final = Fraction((2**24 - 1) * 2**104)

_FLOAT32_MIN_LAST: Final = -149  # log2 of the smallest float32 subnormal


class Overflow(enum.Enum):
    """What an E4M3FN encoder does with a value that rounds beyond 448."""

    SATURATE = "saturate"
    """+-448, also for Inf: the GPU's saturating cast, and what clamping first gives."""
    NAN = "nan"
    """NaN of the value's sign: ml_dtypes and older torch."""


def is_e4m3_nan(codes: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Which E4M3FN values (uint8 codes or float8_e4m3fn, any shape) are NaN."""
    return np.asarray((codes.view(np.uint8) & 0x7F) == E4M3_NAN_CODE)


def decode_e4m3(code: int) -> Fraction | float:
    """The value of an E4M3FN code.

    ``(-1)^s * 2^(e - 7) * (1 + f/8)`` for ``e > 0``, ``(-1)^s * 2^-6 * f/8`` for ``e = 0``.

    Args:
        code: 0 to 255.

    Returns:
        The exact value as a Fraction; the float ``-0.0`` for code 0x80 (Fraction has no signed zero); the float NaN
        for NaN codes.

    Raises:
        InvalidProblem: ``code`` is not in 0..255.

    Exactness: exact.

    Special values: 0x7F and 0xFF are NaN; there is no Inf.

    Source: OCP 8-bit floating point specification, E4M3.
    """
    if not 0 <= code <= 255:
        raise InvalidProblem("code", code, "0 to 255")
    exponent, fraction = (code >> 3) & 15, code & 7
    if code & 0x7F == E4M3_NAN_CODE:
        return math.nan
    magnitude = Fraction(8 + fraction, 8) * Fraction(2) ** (exponent - 7) if exponent else Fraction(fraction, 2**9)
    if code & 0x80:
        return -magnitude if magnitude else -0.0
    return magnitude


def encode_e4m3(value: Fraction | float, overflow: Overflow) -> int:
    """The E4M3FN code nearest to ``value``, ties to the even code.

    Args:
        value: an exact rational or a float (which may be NaN, Inf or -0.0).
        overflow: what becomes of values that round beyond 448 (from 464 on: 464 itself is a tie and goes to 448).

    Returns:
        The code, 0 to 255.

    Exactness: exact, round to nearest, ties to even.

    Special values: NaN gives 0x7F, or 0xFF when its sign is set; -0.0 and negative values that round to zero give
        0x80; Inf overflows.

    Source: OCP 8-bit floating point specification, E4M3; ``overflow`` names its two conversion modes.
    """
    if isinstance(value, float) and not math.isfinite(value):
        sign = 0x80 if math.copysign(1.0, value) < 0 else 0
        if math.isnan(value) or overflow is Overflow.NAN:
            return sign | E4M3_NAN_CODE
        return sign | E4M3_MAX_CODE
    negative = value < 0 or (isinstance(value, float) and math.copysign(1.0, value) < 0)
    sign, magnitude = (0x80 if negative else 0), abs(Fraction(value))
    # Codes of one sign are ordered like their values, spaced 2^(e - 3) inside a binade: round in units of that spacing.
    exponent = max(_floor_log2(magnitude), -6) if magnitude else -6
    units = round(magnitude / Fraction(2) ** (exponent - 3))  # Python rounds a Fraction's ties to even
    code = (exponent + 6) * 8 + units  # units = 8..16 in a normal binade, 0..8 below it; a carry enters the next binade
    if code > E4M3_MAX_CODE:
        return sign | (E4M3_MAX_CODE if overflow is Overflow.SATURATE else E4M3_NAN_CODE)
    return sign | code


def encode_e4m3_array(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Array twin of :func:`encode_e4m3` with ``Overflow.SATURATE``: clamp to +-448, then round to nearest even.

    Args:
        values: float32 (or narrower), any shape.

    Returns:
        float8_e4m3fn, same shape.

    Exactness: exact, round to nearest, ties to even.

    Special values: NaN stays NaN with its sign (the payload is lost), Inf becomes +-448, -0.0 stays.

    Source: the clamp makes every library agree; without it they differ on overflow.
    """
    return np.asarray(np.clip(values, -E4M3_MAX, E4M3_MAX).astype(ml_dtypes.float8_e4m3fn))


def decode_ue8m0(code: int) -> Fraction | float:
    """The value of a UE8M0 code: ``2^(code - 127)``.

    Args:
        code: 0 to 255.

    Returns:
        The exact power of two, or the float NaN for 255.

    Raises:
        InvalidProblem: ``code`` is not in 0..255.

    Exactness: exact.

    Source: OCP microscaling formats, E8M0.
    """
    if not 0 <= code <= 255:
        raise InvalidProblem("code", code, "0 to 255")
    return math.nan if code == UE8M0_NAN_CODE else Fraction(2) ** (code - 127)


def ceil_ue8m0(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
    """UE8M0 codes of the smallest powers of two that are not below ``values``, from the bits of the float32.

    ``exponent field + (fraction != 0)``, at least 1: production's bit trick, which no rounding of a logarithm can
    upset.

    Args:
        values: float32, any shape, positive.

    Returns:
        uint8 codes, same shape, 1 to 255.

    Exactness: exact for ``2^-126 <= value <= 2^127``.

    Special values: positive values below ``2^-126`` (zero included) give code 1; values above ``2^127``, Inf and NaN
        give 255 (NaN). The sign is not looked at.

    Source: DeepGEMM ``ceil_to_ue8m0``, without its upper clamp.
    """
    bits = np.asarray(values, np.float32).view(np.uint32)
    exponent, fraction = (bits >> np.uint32(23)) & np.uint32(255), bits & np.uint32(0x7FFFFF)
    code = exponent + (fraction != 0)
    return np.asarray(np.clip(code, 1, UE8M0_NAN_CODE), np.uint8)


def ue8m0_to_float32(codes: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    """float32 values of UE8M0 codes (uint8, any shape); 0 is the subnormal 2^-127 and 255 NaN."""
    values = np.ldexp(np.float32(1), codes.astype(np.int32) - 127).astype(np.float32)
    return np.where(codes == UE8M0_NAN_CODE, np.float32(np.nan), values).astype(np.float32)


def next_up(value: np.float32) -> np.float32:
    """The smallest float32 above ``value``; +Inf and NaN stay, the successor of -0.0 is that of +0.0."""
    return np.float32(np.nextafter(np.float32(value), np.float32(np.inf)))


def next_down(value: np.float32) -> np.float32:
    """The largest float32 below ``value``; -Inf and NaN stay."""
    return np.float32(np.nextafter(np.float32(value), np.float32(-np.inf)))


def nearest_float32(value: Fraction) -> np.float32:
    """The float32 nearest to an exact rational, ties to even.

    Args:
        value: any rational.

    Returns:
        The rounded value.

    Exactness: exact, one rounding, subnormals included.

    Special values: 0 gives +0.0, a negative value that rounds to zero gives -0.0; overflow gives +-Inf, as IEEE 754
        does (from the midpoint between the largest float32 and 2^128 on).
    """
    magnitude = abs(value)
    last = _float32_last(magnitude)
    rounded = round(magnitude / Fraction(2) ** last) * Fraction(2) ** last
    return _signed_float32(rounded, value < 0)


def round_up_float32(value: Fraction) -> np.float32:
    """The smallest float32 that is not below an exact rational.

    Exactness: exact (round towards +Inf).

    Special values: 0 gives +0.0; a negative value between zero and the smallest subnormal gives -0.0; above the
        largest float32, +Inf; below the most negative one, that one.
    """
    if value < 0:
        return np.float32(-round_down_float32(-value))
    last = _float32_last(value)
    return _signed_float32(math.ceil(value / Fraction(2) ** last) * Fraction(2) ** last, negative=False)


def round_down_float32(value: Fraction) -> np.float32:
    """The largest float32 that is not above an exact rational; mirror image of :func:`round_up_float32`."""
    if value < 0:
        return np.float32(-round_up_float32(-value))
    value = min(value, FLOAT32_MAX)
    last = _float32_last(value)
    return _signed_float32(math.floor(value / Fraction(2) ** last) * Fraction(2) ** last, negative=False)


def float_evidence(value: np.float32 | float) -> dict[str, str]:
    """A float32 as evidence: its bits and its shortest decimal form, both text (JSON has no NaN and no Inf)."""
    single = np.float32(value)
    return {"bits": f"0x{int(single.view(np.uint32)):08x}", "decimal": str(single)}


def _floor_log2(value: Fraction) -> int:
    """``floor(log2(value))`` of a positive rational."""
    guess = value.numerator.bit_length() - value.denominator.bit_length()
    return guess if Fraction(2) ** guess <= value else guess - 1


def _float32_last(magnitude: Fraction) -> int:
    """log2 of the spacing of float32 numbers around ``magnitude``."""
    if magnitude == 0:
        return _FLOAT32_MIN_LAST
    return max(_floor_log2(magnitude) - 23, _FLOAT32_MIN_LAST)


def _signed_float32(magnitude: Fraction, negative: bool) -> np.float32:
    """A magnitude that float32 holds exactly (or an overflow), with its sign."""
    single = np.float32(np.inf) if magnitude > FLOAT32_MAX else np.float32(float(magnitude))
    return np.float32(-single) if negative else single
