"""Judging an answer of a top-K kernel by what the kernel promises."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from dosa_ref.formats import float_evidence
from dosa_ref.select import exact_topk
from dosa_ref.spec import PAD_INDEX
from dosa_ref.trace import LogitsProblem
from dosa_verify.fuzz.report import Fault, Mismatch
from dosa_verify.targets.logits import NaNs, Order, Promise, Ties

VARIANT = "topk"
TINY = 2.0**-1000
"""Below every float32 number."""


def _is_negative_zero(scores: npt.NDArray[np.float32]) -> npt.NDArray[np.bool_]:
    zero: npt.NDArray[np.bool_] = (scores == 0) & np.signbit(scores)
    return zero


def judge(problem: LogitsProblem, indices: object, promise: Promise) -> Mismatch | None:
    """Judge an answer by a promise.

    Args:
        problem: the rows.
        indices: the answer, int32 ``[rows, topk]``.
        promise: what the target promises.

    Returns:
        The first fault by row, or None.

    Exactness: exact; scores are compared as numbers (-0.0 equals 0.0), never with a tolerance.

    Special values: with ``NaNs.UNDEFINED`` a row with a NaN must only have valid, distinct indices.
    """
    shape = (len(problem.logits), problem.topk)
    if not isinstance(indices, np.ndarray) or indices.dtype != np.int32 or indices.shape != shape:
        got = f"{indices.dtype} {list(indices.shape)}" if isinstance(indices, np.ndarray) else type(indices).__name__
        evidence = {"got": got, "expected": f"int32 {list(shape)}"}
        return Mismatch(variant=VARIANT, fault=Fault.WRONG_SHAPE, evidence=evidence)
    for row in range(len(problem.logits)):
        found = _judge_row(problem, row, indices[row].astype(np.int64), promise)
        if found is not None:
            fault, evidence = found
            return Mismatch(variant=VARIANT, fault=fault, row=row, evidence=evidence)
    return None


def _judge_row(
    problem: LogitsProblem, row: int, columns: npt.NDArray[np.int64], promise: Promise
) -> tuple[Fault, dict[str, Any]] | None:
    start, end = problem.window(row)
    scores = problem.logits[row, start:end]
    outside = (columns != PAD_INDEX) & ((columns < start) | (columns >= end))
    if outside.any():
        place = int(np.argmax(outside))
        return Fault.INVALID_INDEX, {"place": place, "index": int(columns[place]), "window": [start, end]}
    filled = columns != PAD_INDEX
    chosen = columns[filled] - start
    values, counts = np.unique(chosen, return_counts=True)
    if (counts > 1).any():
        return Fault.DUPLICATE, {"index": int(values[np.argmax(counts > 1)]) + start}
    if promise.nans is NaNs.UNDEFINED and np.isnan(scores).any():
        return None
    # A target that tells zeros apart ranks -0.0 just below 0.0.
    ranked = scores if promise.signed_zeros else np.where(_is_negative_zero(scores), -TINY, scores.astype(np.float64))
    best = exact_topk(ranked, problem.topk)
    best = best[best != PAD_INDEX].astype(np.int64)
    if len(chosen) != len(best):
        return Fault.WRONG_COUNT, {"selected": len(chosen), "expected": len(best)}
    missing, extra = np.setdiff1d(best, chosen), np.setdiff1d(chosen, best)
    by_score = np.array_equal(np.sort(scores[chosen]), np.sort(scores[best]))
    if missing.size and (promise.ties is Ties.LOWEST_INDEX or not by_score):
        return Fault.WRONG_SET, {
            "missing": int(missing[0]) + start,
            "missing_score": float_evidence(scores[missing[0]]),
            "instead": int(extra[0]) + start,
            "instead_score": float_evidence(scores[extra[0]]),
            "differing": int(missing.size),
        }
    in_order = filled[: len(chosen)].all()
    if promise.order is Order.ASCENDING_INDEX:
        in_order = in_order and (np.diff(chosen) > 0).all()
    if promise.order is Order.DESCENDING_SCORE:
        ordered = scores[chosen]
        in_order = in_order and (ordered[1:] <= ordered[:-1]).all()
    if not in_order:
        return Fault.WRONG_ORDER, {"indices": columns[:32].tolist(), "order": promise.order.value}
    return None


def pick(problem: LogitsProblem, rows: npt.NDArray[np.bool_]) -> LogitsProblem:
    """The problem of the rows that are marked."""
    return LogitsProblem(
        logits=problem.logits[rows],
        row_start=problem.row_start[rows],
        row_end=problem.row_end[rows],
        topk=problem.topk,
    )


def served_rows(problem: LogitsProblem, promise: Promise) -> npt.NDArray[np.bool_]:
    """Say which rows are inside the limits of a promise, bool ``[rows]``."""
    served = np.ones(len(problem.logits), bool)
    if problem.topk < promise.min_topk or (promise.max_topk is not None and problem.topk > promise.max_topk):
        return ~served
    for row in range(len(served)):
        start, end = problem.window(row)
        length = end - start
        served[row] = (
            (promise.short_rows or length >= problem.topk)
            and (promise.max_row_length is None or length <= promise.max_row_length)
            and (promise.infinities or not np.isinf(problem.logits[row, start:end]).any())
        )
    return served
