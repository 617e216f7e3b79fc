"""Query and key preparation: per-token scales, rounding to E4M3, and the fused page layout of the key cache.

A token is one row of 128 numbers with one scale::

    amax  = max(max_i |x_i|, 1e-4)
    scale = 2^ceil(log2(amax / 448))   (UE8M0)      or      amax / 448   (LINEAR)
    code  = E4M3(clamp(x / scale, -448, 448))       round to nearest, ties to even

``amax / 448``, ``x / scale`` and the clamp are float32 operations; the division by a power of two is exact (up to
underflow).

A fused page of ``page_size`` keys is ``page_size * 128`` code bytes followed by ``page_size`` little-endian float32
scales.
"""

from __future__ import annotations

import enum
from typing import Any, Final

import ml_dtypes
import numpy as np
import numpy.typing as npt

from dosa_ref.formats import E4M3_NAN_CODE, ceil_ue8m0, encode_e4m3_array, ue8m0_to_float32
from dosa_ref.spec import E4M3_MAX, HEAD_DIM, InvalidProblem

AMAX_FLOOR: Final = np.float32(1e-4)
"""Smallest amax: keeps the scale of a zero row away from zero."""

PAGE_SIZE: Final = 64
"""Keys of one page in production."""


class ScaleFormat(enum.Enum):
    """How a token's scale is stored."""

    UE8M0 = "ue8m0"
    """A power of two, rounded up: production's format."""
    LINEAR = "linear"
    """Any float32: ``amax / 448``."""


def quantize_tokens(
    x: npt.NDArray[np.float32], scale_format: ScaleFormat = ScaleFormat.UE8M0
) -> tuple[npt.NDArray[Any], npt.NDArray[np.float32]]:
    """Quantise rows to E4M3 with one scale each; the module docstring gives the formula.

    Args:
        x: float32 ``[n, d]``, ``d >= 1``.
        scale_format: the kind of scale.

    Returns:
        Codes as float8_e4m3fn ``[n, d]`` and scales as float32 ``[n]``: ``x`` is about ``codes * scale``.

    Raises:
        InvalidProblem: ``x`` is not float32 ``[n, d]``.

    Exactness: exact, every rounding as stated.

    Special values: a zero row, and a row so small (denormals included) that amax is below 1e-4, gets the scale of
        amax = 1e-4, so its codes are 0 or small; zeros keep their sign. A row that holds a NaN or an Inf gets a NaN
        scale and NaN codes (0x7F) throughout: it cannot be represented, and every later stage recognises it.

    Source: DeepSeek-V3.2 indexer, ``act_quant``; libraries differ on NaN and Inf rows, the rule here is this project's.
    """
    if x.dtype != np.float32 or x.ndim != 2 or x.shape[1] < 1:
        raise InvalidProblem("x", f"{x.dtype} {list(x.shape)}", "float32 [n, d] with d >= 1")
    finite = np.asarray(np.isfinite(x).all(axis=1))
    clean = np.where(finite[:, None], x, np.float32(0))
    amax = np.maximum(np.abs(clean).max(axis=1), AMAX_FLOOR)
    scale = amax / np.float32(E4M3_MAX)
    if scale_format is ScaleFormat.UE8M0:
        scale = ue8m0_to_float32(ceil_ue8m0(scale))
    codes = encode_e4m3_array(clean / scale[:, None])
    codes.view(np.uint8)[~finite] = E4M3_NAN_CODE
    return codes, np.where(finite, scale, np.float32(np.nan))


def dequantize_tokens(codes: npt.NDArray[Any], scale: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """``codes * scale`` in float32, for codes float8_e4m3fn ``[n, d]`` and scales float32 ``[n]``."""
    return np.asarray(codes.astype(np.float32) * scale[:, None])


def pack_pages(
    k: npt.NDArray[Any], k_scale: npt.NDArray[np.float32], page_size: int = PAGE_SIZE
) -> npt.NDArray[np.uint8]:
    """Lay keys out in fused pages, in order.

    Args:
        k: float8_e4m3fn ``[n, 128]``.
        k_scale: float32 ``[n]``.
        page_size: keys of one page, at least 1.

    Returns:
        uint8 ``[ceil(n / page_size), page_size * 132]``; the rest of the last page is zero.

    Raises:
        InvalidProblem: a shape or ``page_size`` is wrong.

    Exactness: exact, a copy of bytes.
    """
    if page_size < 1:
        raise InvalidProblem("page_size", page_size, "at least 1")
    if k.ndim != 2 or k.shape[1] != HEAD_DIM or k.dtype != ml_dtypes.float8_e4m3fn:
        raise InvalidProblem("k", f"{k.dtype} {list(k.shape)}", f"float8_e4m3fn [n, {HEAD_DIM}]")
    if k_scale.shape != (k.shape[0],) or k_scale.dtype != np.float32:
        raise InvalidProblem("k_scale", f"{k_scale.dtype} {list(k_scale.shape)}", f"float32 [{k.shape[0]}]")
    pages = -(-k.shape[0] // page_size)
    codes = np.zeros((pages * page_size, HEAD_DIM), np.uint8)
    codes[: k.shape[0]] = k.view(np.uint8)
    scales = np.zeros(pages * page_size, np.dtype("<f4"))
    scales[: k.shape[0]] = k_scale
    scale_bytes = scales.view(np.uint8).reshape(pages, page_size * 4)
    return np.concatenate([codes.reshape(pages, page_size * HEAD_DIM), scale_bytes], axis=1)


def unpack_pages(
    k_pages: npt.NDArray[np.uint8], page_size: int = PAGE_SIZE
) -> tuple[npt.NDArray[Any], npt.NDArray[np.float32]]:
    """Read fused pages; the inverse of :func:`pack_pages` up to the padding of the last page.

    Args:
        k_pages: uint8 ``[pages, page_size * 132]``.
        page_size: keys of one page.

    Returns:
        Keys float8_e4m3fn ``[pages, page_size, 128]`` and scales float32 ``[pages, page_size]``.

    Raises:
        InvalidProblem: the array is not uint8 or its rows have another length.

    Exactness: exact, a copy of bytes.
    """
    row = page_size * (HEAD_DIM + 4)
    if k_pages.dtype != np.uint8 or k_pages.ndim != 2 or k_pages.shape[1] != row:
        raise InvalidProblem("k_pages", f"{k_pages.dtype} {list(k_pages.shape)}", f"uint8 [pages, {row}]")
    codes = np.ascontiguousarray(k_pages[:, : page_size * HEAD_DIM]).view(ml_dtypes.float8_e4m3fn)
    scales = np.ascontiguousarray(k_pages[:, page_size * HEAD_DIM :]).view(np.dtype("<f4"))
    return codes.reshape(-1, page_size, HEAD_DIM), scales.reshape(-1, page_size)
