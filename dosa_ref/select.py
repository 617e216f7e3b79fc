"""Selections: exact top-K, DoSA prefill with its four modes, and decode, as short reference code.

The order among keys is (score descending, key index ascending); -0.0 and +0.0 are one score, a NaN score is never
selected, -Inf is an ordinary lowest score. Indices come out ascending by key index, with -1 behind the last. A
prefill row runs through four steps:

1. *seeds*: score at least ``topk`` visible keys; ``tau`` is the ``topk``-th best of them.
2. *bound*: drop a key only if ``U < tau``, strictly (modes ``prune`` and ``both``).
3. *rescore* every survivor with the original scorer.
4. *emit* survivors with ``score >= tau`` (modes ``emit`` and ``both``); the exact top-K of seeds and emitted keys is
the result.

A row that does not fit takes the dense path instead, alone, and says why; the selection is the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dosa_ref.bound import build_row_bound, evaluate, row_is_finite, row_within_magnitude
from dosa_ref.problem import PagedProblem, PrefillProblem
from dosa_ref.quantize import unpack_pages
from dosa_ref.scorer import float32_of_exact, score_row, score_row_exact, scores_sm90
from dosa_ref.spec import HEAD_DIM, PAD_INDEX, Contract, Fallback, InvalidProblem, Mode, UnsupportedConfiguration

HALF_SAMPLE: Final = 32
"""So many seeds below ``tau``, and so many keys of the window, steer the choice of columns, and nothing else."""

Indices = npt.NDArray[np.int32]
Scores = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Selection:
    """The selected keys and how each row came to them.

    Attributes:
        topk_indices: absolute key columns, int32 ``[rows, topk]``, ascending, -1 behind the last.
        scores: score of each, float32 ``[rows, topk]``, same order, -Inf behind the last; bits kept (-0.0 stays).
        row_pruned: whether the row went through the bound pass to the end, bool ``[rows]``.
        survivors: keys that the bound did not drop, int64 ``[rows]``; all visible keys where there was no bound.
        rescored: distinct keys scored by the original scorer, seeds included, int64 ``[rows]``.
        visible: visible keys, int64 ``[rows]``.
        fallback: why a row left the intended path, or None; one per row.
    """

    topk_indices: Indices
    scores: Scores
    row_pruned: npt.NDArray[np.bool_]
    survivors: npt.NDArray[np.int64]
    rescored: npt.NDArray[np.int64]
    visible: npt.NDArray[np.int64]
    fallback: tuple[Fallback | None, ...]

    @property
    def prune_rate(self) -> float:
        """1 - rescored pairs / visible pairs; 0 if nothing is visible."""
        pairs = int(self.visible.sum())
        return 1.0 - int(self.rescored.sum()) / pairs if pairs else 0.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DecodeSelection:
    """The selected keys of a decode step.

    Attributes:
        topk_indices: positions within the request's context, int32 ``[batch, next_n, topk]``, ascending, -1 behind
            the last.
        scores: float32 ``[batch, next_n, topk]``, same order, -Inf behind the last.
        tau: threshold of each query, float32 ``[batch, next_n]``; -Inf where there was none.
        written: keys that reached the final top-K, int64 ``[batch, next_n]``.
    """

    topk_indices: Indices
    scores: Scores
    tau: Scores
    written: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Row:
    """One finished row: chosen columns relative to ``ks``, their scores, and its statistics."""

    chosen: npt.NDArray[np.int64]
    scores: Scores
    pruned: bool
    survivors: int
    rescored: int
    fallback: Fallback | None


# ---------------------------------------------------------------------------------------------------------------------
# Exact top-K


def exact_topk(scores: npt.NDArray[np.floating[Any]], topk: int) -> Indices:
    """Indices of the ``topk`` best scores, ascending by index.

    Args:
        scores: float32 (or float64) ``[n]`` or ``[rows, n]``.
        topk: how many, at least 0.

    Returns:
        int32 ``[topk]`` or ``[rows, topk]``: the chosen indices ascending, -1 behind the last where fewer than
        ``topk`` scores are not NaN.

    Raises:
        InvalidProblem: ``topk`` is negative or the array has another number of dimensions.

    Exactness: exact; among equal scores the smaller index wins.

    Special values: NaN is never selected, -0.0 equals +0.0, -Inf is selectable.
    """
    if topk < 0:
        raise InvalidProblem("topk", topk, "at least 0")
    if scores.ndim not in (1, 2):
        raise InvalidProblem("scores", f"{scores.ndim} dimensions", "1 or 2")
    if scores.ndim == 2:
        rows = [exact_topk(row, topk) for row in scores]
        return np.stack(rows) if rows else np.empty((0, topk), np.int32)
    out = np.full(topk, PAD_INDEX, np.int32)
    chosen = _best(scores, topk)
    out[: len(chosen)] = chosen
    return out


def _best(scores: npt.NDArray[np.floating[Any]], topk: int) -> npt.NDArray[np.int64]:
    """Ascending indices of the at most ``topk`` best scores."""
    candidates = np.flatnonzero(~np.isnan(scores))
    # A stable sort keeps equal scores (-0.0 and +0.0 compare equal) in index order.
    order = np.argsort(-scores[candidates], kind="stable")
    return np.sort(candidates[order[:topk]])


def exact_ranks(scores: Sequence[Fraction | float]) -> npt.NDArray[np.float64]:
    """Numbers in the order of some exact scores: equal for equal scores, NaN for NaN; float64 ``[n]``.

    Lets :func:`exact_topk` select under the ``exact`` contract without rounding a score.
    """
    values = sorted({score for score in scores if score == score})
    rank = {value: float(position) for position, value in enumerate(values)}
    return np.array([rank.get(score, np.nan) for score in scores], np.float64)


# ---------------------------------------------------------------------------------------------------------------------
# Prefill


def select_dense(problem: PrefillProblem, contract: Contract = Contract.SM90) -> Selection:
    """Select by scoring every visible key of every row.

    Args:
        problem: the inputs.
        contract: whose score; ``EXACT`` compares rationals (small inputs) and reports each score rounded once to
            float32.

    Returns:
        The selection; no row is pruned.

    Raises:
        UnsupportedConfiguration: more than 64 heads under ``SM90``.

    Exactness: exact with respect to the contract's score.

    Special values: module docstring; an empty row is all -1, ``topk = 0`` gives shape ``[rows, 0]``.
    """
    return _collect(problem, [_dense_row(problem, row, None, contract) for row in range(problem.seq_len)])


def default_seeds(ks: int, ke: int, topk: int) -> npt.NDArray[np.int64]:
    """Seeds that need no history: the most recent ``topk`` visible keys and a stride sample of ``topk`` older ones.

    Args:
        ks: first visible key.
        ke: end of the visible keys.
        topk: keys to select.

    Returns:
        Distinct absolute columns, ascending, int64; at least ``min(topk, ke - ks)`` of them.
    """
    recent = np.arange(max(ks, ke - topk), ke)
    older = max(ks, ke - topk) - ks
    step = max(1, -(-older // topk)) if topk else 1
    return np.concatenate([np.arange(ks, ks + older, step), recent])


def select_prefill(
    problem: PrefillProblem,
    mode: Mode,
    contract: Contract = Contract.SM90,
    columns: int = 16,
    seeds: Sequence[npt.NDArray[np.integer[Any]]] | npt.NDArray[np.integer[Any]] | None = None,
    survivor_capacity: int | None = None,
) -> Selection:
    """DoSA prefill: prune, rescore, emit. All modes select what :func:`select_dense` selects.

    Args:
        problem: the inputs.
        mode: which of the two savings are on.
        contract: ``SM90``; the bound is made for that score.
        columns: column budget M of the bound.
        seeds: absolute key columns per row, a sequence of ``rows`` integer arrays or one array ``[rows, any]``, or
            one array ``[any]`` shared by all rows. Columns outside a row's window, and repetitions, are ignored.
            None: :func:`default_seeds`.
        survivor_capacity: keys that a row may hand to the next step, after the bound and after the filter; None is
            unlimited. A row that exceeds it is recomputed from all its keys; nothing is dropped.

    Returns:
        The selection with its statistics.

    Raises:
        UnsupportedConfiguration: contract ``EXACT``, or more than 64 heads.
        InvalidProblem: ``columns``, ``seeds`` or ``survivor_capacity`` out of range.

    Exactness: exact; the indices and score bits of the dense selection.

    Special values: NaN or Inf in a row's q, weights or ``tau`` sends that row to the dense path; a key with NaN or a
        scale outside the bound's range always survives; ``tau <= 0`` needs nothing special.

    Source: DoSA, prefill algorithm.
    """
    if contract is not Contract.SM90:
        raise UnsupportedConfiguration(
            f"the bound is made for the sm90 score, not for {contract.value}: select densely"
        )
    if survivor_capacity is not None and survivor_capacity < 0:
        raise InvalidProblem("survivor_capacity", survivor_capacity, "at least 0, or None")
    rows = []
    for row in range(problem.seq_len):
        row_seeds = _row_seeds(problem, row, seeds)
        rows.append(_prefill_row(problem, row, mode, columns, row_seeds, survivor_capacity))
    return _collect(problem, rows)


def _row_seeds(
    problem: PrefillProblem,
    row: int,
    seeds: Sequence[npt.NDArray[np.integer[Any]]] | npt.NDArray[np.integer[Any]] | None,
) -> npt.NDArray[np.int64]:
    """The row's distinct visible seeds, relative to ``ks``, ascending."""
    ks, ke = problem.window(row)
    if seeds is None:
        return default_seeds(ks, ke, problem.topk) - ks
    shared = isinstance(seeds, np.ndarray) and seeds.ndim == 1
    if not shared and len(seeds) != problem.seq_len:
        raise InvalidProblem("seeds", f"{len(seeds)} rows", f"{problem.seq_len}, or one array shared by all rows")
    given = np.asarray(seeds if shared else seeds[row]).astype(np.int64)
    return np.unique(given[(given >= ks) & (given < ke)]) - ks


def _dense_row(
    problem: PrefillProblem, row: int, fallback: Fallback | None, contract: Contract = Contract.SM90
) -> _Row:
    """One row, all visible keys scored."""
    if contract is Contract.EXACT:
        exact = score_row_exact(problem, row)
        chosen = _best(exact_ranks(exact), problem.topk)
        scores = np.array([float32_of_exact(exact[i]) for i in chosen], np.float32)
        visible = len(exact)
    else:
        all_scores = score_row(problem, row)
        chosen = _best(all_scores, problem.topk)
        scores, visible = all_scores[chosen], len(all_scores)
    return _Row(chosen=chosen, scores=scores, pruned=False, survivors=visible, rescored=visible, fallback=fallback)


def _prefill_row(
    problem: PrefillProblem,
    row: int,
    mode: Mode,
    columns: int,
    seeds: npt.NDArray[np.int64],
    survivor_capacity: int | None,
) -> _Row:
    """One row through seeds, bound, rescoring and emission; anything that does not fit ends in the dense path."""
    ks, ke = problem.window(row)
    topk, visible = problem.topk, ke - ks
    q, w = problem.q[row], problem.weights[row]
    k, k_scale = problem.k[ks:ke], problem.k_scale[ks:ke]
    if topk == 0:
        return _dense_row(problem, row, None)  # no K-th score, so nothing to prune against
    if visible <= topk:
        return _dense_row(problem, row, Fallback.SHORT_ROW)
    if not row_is_finite(q, w):
        return _dense_row(problem, row, Fallback.NON_FINITE_ROW)

    # 1. Seeds.
    seed_scores = scores_sm90(q[None], w[None], k[seeds], k_scale[seeds])[0]
    genuine = np.sort(seed_scores[~np.isnan(seed_scores)])
    if len(genuine) < topk:
        return _dense_row(problem, row, Fallback.TOO_FEW_SEEDS)
    tau = genuine[-topk]
    if not np.isfinite(tau):
        return _dense_row(problem, row, Fallback.NON_FINITE_ROW)

    # 2. Bound.
    pruning = mode in (Mode.PRUNE, Mode.BOTH)
    alive = np.ones(visible, np.bool_)
    if pruning:
        below = seeds[seed_scores < tau]
        sample = np.concatenate([keys[:: max(1, len(keys) // HALF_SAMPLE)] for keys in (k[below], k)])
        bound = build_row_bound(q, w, columns, sample)
        if not row_within_magnitude(q, w, bound):
            return _dense_row(problem, row, Fallback.ROW_MAGNITUDE)
        # Written so that a NaN bound keeps the key.
        alive = ~(evaluate(bound, k, k_scale) < tau)
    survivors = np.flatnonzero(alive)
    if pruning and _exceeds(survivors, survivor_capacity):
        return _dense_row(problem, row, Fallback.SURVIVOR_OVERFLOW)

    # 3. Rescore, 4. emit.
    scores = np.full(visible, np.nan, np.float32)
    scores[survivors] = scores_sm90(q[None], w[None], k[survivors], k_scale[survivors])[0]
    if mode in (Mode.EMIT, Mode.BOTH):
        kept = survivors[scores[survivors] >= tau]
        if _exceeds(kept, survivor_capacity):
            return _dense_row(problem, row, Fallback.SURVIVOR_OVERFLOW)
        dropped = np.setdiff1d(survivors, kept)
        scores[dropped] = np.nan
    scores[seeds] = seed_scores

    chosen = _best(scores, topk)
    assert len(chosen) == topk, "the seeds alone fill the row"
    assert scores[chosen].min() >= tau, "the seeds alone reach tau"
    rescored = len(np.union1d(survivors, seeds))
    return _Row(
        chosen=chosen,
        scores=scores[chosen],
        pruned=pruning,
        survivors=len(survivors),
        rescored=rescored,
        fallback=None,
    )


def _exceeds(keys: npt.NDArray[np.int64], capacity: int | None) -> bool:
    return capacity is not None and len(keys) > capacity


def _collect(problem: PrefillProblem, rows: Sequence[_Row]) -> Selection:
    """Finished rows as one result: columns made absolute, tails filled."""
    indices = np.full((problem.seq_len, problem.topk), PAD_INDEX, np.int32)
    scores = np.full((problem.seq_len, problem.topk), -np.inf, np.float32)
    windows = [problem.window(row) for row in range(problem.seq_len)]
    for row, (ks, _) in enumerate(windows):
        count = len(rows[row].chosen)
        indices[row, :count] = rows[row].chosen + ks
        scores[row, :count] = rows[row].scores
    return Selection(
        topk_indices=indices,
        scores=scores,
        row_pruned=np.array([row.pruned for row in rows], np.bool_),
        survivors=np.array([row.survivors for row in rows], np.int64),
        rescored=np.array([row.rescored for row in rows], np.int64),
        visible=np.array([ke - ks for ks, ke in windows], np.int64),
        fallback=tuple(row.fallback for row in rows),
    )


# ---------------------------------------------------------------------------------------------------------------------
# Decode


def select_decode(problem: PagedProblem, recent: npt.NDArray[np.integer[Any]] | None = None) -> DecodeSelection:
    """Select the keys of a decode step: all heads, all keys, no bound; recent winners only thin out what is written.

    Recently selected keys that are distinct and still visible are scored under the *current* query; if at least
    ``topk`` of the scores are not NaN, ``tau`` is the ``topk``-th best, and only keys with ``score >= tau`` are
    handed to the final top-K.

    Args:
        problem: the inputs.
        recent: positions selected in recent steps, integers ``[batch, next_n, any]``; entries that are not visible
            (-1 too) are ignored. None: no threshold.

    Returns:
        The selection.

    Raises:
        InvalidProblem: ``recent`` has another shape.
        UnsupportedConfiguration: more than 64 heads.

    Exactness: exact with respect to the ``sm90`` score.

    Special values: as the prefill selection; a query that sees no key gets -1 throughout.

    Source: DoSA, decode algorithm.
    """
    batch, next_n = problem.q.shape[:2]
    if recent is not None and (recent.ndim != 3 or recent.shape[:2] != (batch, next_n)):
        raise InvalidProblem("recent", list(recent.shape), f"[{batch}, {next_n}, any]")
    pages, page_scales = unpack_pages(problem.k_pages, problem.page_size)
    indices = np.full((batch, next_n, problem.topk), PAD_INDEX, np.int32)
    scores = np.full((batch, next_n, problem.topk), -np.inf, np.float32)
    taus = np.full((batch, next_n), -np.inf, np.float32)
    written = np.zeros((batch, next_n), np.int64)
    for request in range(batch):
        context = int(problem.context_lens[request])
        table = problem.page_table[request, : -(-context // problem.page_size)]
        k = pages[table].reshape(-1, HEAD_DIM)[:context]
        k_scale = page_scales[table].reshape(-1)[:context]
        for j in range(next_n):
            visible = max(0, context - next_n + j + 1)
            q, w = problem.q[request, j], problem.weights[request, j]
            all_scores = scores_sm90(q[None], w[None], k[:visible], k_scale[:visible])[0]
            if recent is not None:
                taus[request, j] = _decode_tau(all_scores, recent[request, j], problem.topk)
            keys = np.flatnonzero(all_scores >= taus[request, j])
            chosen = keys[_best(all_scores[keys], problem.topk)]
            indices[request, j, : len(chosen)] = chosen
            scores[request, j, : len(chosen)] = all_scores[chosen]
            written[request, j] = len(keys)
    return DecodeSelection(topk_indices=indices, scores=scores, tau=taus, written=written)


def _decode_tau(scores: Scores, recent: npt.NDArray[np.integer[Any]], topk: int) -> np.float32:
    """The ``topk``-th best score of the recent keys that are visible, or -Inf if there are not that many."""
    seeds = np.unique(recent[(recent >= 0) & (recent < len(scores))]).astype(np.int64)
    genuine = np.sort(scores[seeds][~np.isnan(scores[seeds])])
    return np.float32(genuine[-topk]) if 0 < topk <= len(genuine) else np.float32(-np.inf)


# ---------------------------------------------------------------------------------------------------------------------


def result_hash(topk_indices: Indices, scores: Scores) -> str:
    """Hash of a result: sha256 over the little-endian int32 indices followed by the float32 scores.

    Args:
        topk_indices: int32, any shape.
        scores: float32, same shape; bits count (-0.0 differs from +0.0).

    Returns:
        64 hexadecimal digits.
    """
    digest = hashlib.sha256(np.ascontiguousarray(topk_indices, "<i4").tobytes())
    digest.update(np.ascontiguousarray(scores, "<f4").tobytes())
    return digest.hexdigest()
