"""Inputs of a selection: frozen, and validated once when they are made.

Everything downstream may rely on what is checked here: shapes, dtypes and windows. NaN, Inf, zero and negative
*values* are allowed; what they mean is the contract's business, not an error.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import ml_dtypes
import numpy as np
import numpy.typing as npt

from dosa_ref.spec import HEAD_DIM, InvalidProblem

E4M3_DTYPE: Final = np.dtype(ml_dtypes.float8_e4m3fn)
_MAX_KEYS: Final = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexerConfig:
    """Sizes of an indexer.

    Attributes:
        num_heads: query heads, at least 1.
        head_dim: elements of a head; only 128 is defined.
        topk: keys to select per query, at least 0.

    Raises:
        InvalidProblem: a field is out of range.
    """

    num_heads: int
    topk: int
    head_dim: int = HEAD_DIM

    def __post_init__(self) -> None:
        _check_count("num_heads", self.num_heads, 1)
        _check_count("topk", self.topk, 0)
        if self.head_dim != HEAD_DIM:
            raise InvalidProblem("head_dim", self.head_dim, str(HEAD_DIM))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PrefillProblem:
    """One prefill selection: many queries against one run of keys.

    Arrays are kept as given (no copy; any strides) and must not be changed afterwards.

    Attributes:
        q: queries, float8_e4m3fn ``[seq_len, num_heads, 128]``.
        k: keys shared by all heads, float8_e4m3fn ``[seq_len_kv, 128]``.
        k_scale: scale of each key, float32 ``[seq_len_kv]``.
        weights: signed head weights with the query scale folded in, float32 ``[seq_len, num_heads]``.
        cu_seqlen_ks: first visible key of each row, int32 ``[seq_len]``; per row, not cumulative.
        cu_seqlen_ke: end (exclusive) of each row's visible keys, int32 ``[seq_len]``.
        topk: keys to select per row.

    Raises:
        InvalidProblem: naming the field: wrong type, dtype or shape, ``ks < 0``, ``ke > seq_len_kv``, ``topk < 0``.

    Special values: ``ke <= ks`` is an empty row; 0 rows and 0 keys are allowed.
    """

    q: npt.NDArray[Any]
    k: npt.NDArray[Any]
    k_scale: npt.NDArray[np.float32]
    weights: npt.NDArray[np.float32]
    cu_seqlen_ks: npt.NDArray[np.int32]
    cu_seqlen_ke: npt.NDArray[np.int32]
    topk: int

    def __post_init__(self) -> None:
        _check_array("q", self.q, E4M3_DTYPE, (None, None, HEAD_DIM))
        _check_array("k", self.k, E4M3_DTYPE, (None, HEAD_DIM))
        rows, heads, keys = self.q.shape[0], self.q.shape[1], self.k.shape[0]
        if heads < 1:
            raise InvalidProblem("q", f"{heads} heads", "at least 1")
        if keys > _MAX_KEYS:
            raise InvalidProblem("k", f"{keys} keys", f"at most {_MAX_KEYS} (indices are int32)")
        _check_array("k_scale", self.k_scale, np.dtype(np.float32), (keys,))
        _check_array("weights", self.weights, np.dtype(np.float32), (rows, heads))
        _check_array("cu_seqlen_ks", self.cu_seqlen_ks, np.dtype(np.int32), (rows,))
        _check_array("cu_seqlen_ke", self.cu_seqlen_ke, np.dtype(np.int32), (rows,))
        _check_windows(self.cu_seqlen_ks, self.cu_seqlen_ke, keys)
        _check_count("topk", self.topk, 0)

    @property
    def seq_len(self) -> int:
        """Number of query rows."""
        return int(self.q.shape[0])

    @property
    def seq_len_kv(self) -> int:
        """Number of keys."""
        return int(self.k.shape[0])

    @property
    def num_heads(self) -> int:
        """Number of query heads."""
        return int(self.q.shape[1])

    @property
    def config(self) -> IndexerConfig:
        """The sizes of the indexer."""
        return IndexerConfig(num_heads=self.num_heads, topk=self.topk)

    def window(self, row: int) -> tuple[int, int]:
        """Visible keys ``[ks, ke)`` of a row; an empty row gives ``(ks, ks)``."""
        ks, ke = int(self.cu_seqlen_ks[row]), int(self.cu_seqlen_ke[row])
        return ks, max(ks, ke)

    def rows(self, start: int, stop: int) -> PrefillProblem:
        """The sub-problem of rows ``[start, stop)``, all keys, as views.

        Raises:
            InvalidProblem: the range does not lie inside ``[0, seq_len]``.
        """
        if not 0 <= start <= stop <= self.seq_len:
            raise InvalidProblem("rows", f"{start}:{stop}", f"a half-open range within 0:{self.seq_len}")
        return PrefillProblem(
            q=self.q[start:stop],
            k=self.k,
            k_scale=self.k_scale,
            weights=self.weights[start:stop],
            cu_seqlen_ks=self.cu_seqlen_ks[start:stop],
            cu_seqlen_ke=self.cu_seqlen_ke[start:stop],
            topk=self.topk,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PagedProblem:
    """One decode selection: a few queries per request against that request's paged key cache.

    Attributes:
        q: queries, float8_e4m3fn ``[batch, next_n, num_heads, 128]``.
        weights: float32 ``[batch, next_n, num_heads]``.
        k_pages: fused pages, uint8 ``[num_pages, page_size * 132]`` (see :mod:`dosa_ref.quantize`).
        page_table: page of each ``page_size`` keys of a request, int32 ``[batch, max_pages]``; unused entries may be
            anything.
        context_lens: keys of each request including the ``next_n`` new ones, int32 ``[batch]``.
        page_size: keys of one page.
        topk: keys to select per query.

    Query ``j`` of a request sees the first ``context_lens - next_n + j + 1`` keys.

    Raises:
        InvalidProblem: naming the field: wrong dtype or shape, a context longer than its pages, a page that does not
            exist.

    Special values: ``context_lens`` may be 0 or less than ``next_n``: such queries see no key.
    """

    q: npt.NDArray[Any]
    weights: npt.NDArray[np.float32]
    k_pages: npt.NDArray[np.uint8]
    page_table: npt.NDArray[np.int32]
    context_lens: npt.NDArray[np.int32]
    page_size: int
    topk: int

    def __post_init__(self) -> None:
        _check_array("q", self.q, E4M3_DTYPE, (None, None, None, HEAD_DIM))
        batch, next_n, heads = self.q.shape[:3]
        if heads < 1:
            raise InvalidProblem("q", f"{heads} heads", "at least 1")
        _check_count("page_size", self.page_size, 1)
        _check_count("topk", self.topk, 0)
        _check_array("weights", self.weights, np.dtype(np.float32), (batch, next_n, heads))
        _check_array("k_pages", self.k_pages, np.dtype(np.uint8), (None, self.page_size * (HEAD_DIM + 4)))
        _check_array("page_table", self.page_table, np.dtype(np.int32), (batch, None))
        _check_array("context_lens", self.context_lens, np.dtype(np.int32), (batch,))
        room = self.page_table.shape[1] * self.page_size
        for request, length in enumerate(self.context_lens.tolist()):
            if not 0 <= length <= room:
                raise InvalidProblem("context_lens", f"{length} (request {request})", f"0 to {room}")
            used = self.page_table[request, : -(-length // self.page_size)]
            wrong = used[(used < 0) | (used >= self.k_pages.shape[0])]
            if wrong.size:
                raise InvalidProblem(
                    "page_table", f"page {wrong[0]} (request {request})", f"0 to {self.k_pages.shape[0] - 1}"
                )


def _check_array(field: str, array: object, dtype: np.dtype[Any], shape: tuple[int | None, ...]) -> None:
    """Type, dtype and shape of an array; None in ``shape`` accepts any length."""
    wanted = f"{dtype} [{', '.join('any' if size is None else str(size) for size in shape)}]"
    if not isinstance(array, np.ndarray):
        raise InvalidProblem(field, type(array).__name__, f"a NumPy array, {wanted}")
    fits = array.ndim == len(shape) and all(w is None or w == g for w, g in zip(shape, array.shape, strict=True))
    if array.dtype != dtype or not fits:
        raise InvalidProblem(field, f"{array.dtype} {list(array.shape)}", wanted)


def _check_windows(ks: npt.NDArray[np.int32], ke: npt.NDArray[np.int32], keys: int) -> None:
    below, beyond = np.flatnonzero(ks < 0), np.flatnonzero(ke > keys)
    if below.size:
        raise InvalidProblem("cu_seqlen_ks", f"{ks[below[0]]} (row {below[0]})", "at least 0")
    if beyond.size:
        raise InvalidProblem("cu_seqlen_ke", f"{ke[beyond[0]]} (row {beyond[0]})", f"at most {keys}")


def _check_count(field: str, value: object, least: int) -> None:
    if not isinstance(value, (int, np.integer)) or isinstance(value, bool) or value < least:
        raise InvalidProblem(field, repr(value), f"an integer, at least {least}")
