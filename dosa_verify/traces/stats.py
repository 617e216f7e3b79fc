"""What a trace holds: weights, scores, thresholds by choice of seeds, and how far the bound narrows it.

Scores, bounds and thresholds are computed in float64 from the FP8 numbers: the contract's own bits, and those of the
bound pass, differ from these by less than the guard, so that a count of keys may differ from a kernel's by a few. The
bound is the reference's (:func:`dosa_ref.bound.build_row_bound`), guard included.
"""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dosa_ref.bound import RowBound, build_row_bound, key_norms, row_is_finite, row_within_magnitude
from dosa_ref.guard import e4m3_float64
from dosa_ref.problem import PrefillProblem
from dosa_ref.spec import InvalidProblem
from dosa_ref.trace import load_trace

SCHEMA: Final = "dosa.trace_stats/1"
COLUMNS: Final = {32: (8, 12, 16, 20), 64: (12, 16, 20, 24, 32)}
"""Column budgets by head count; other head counts get a quarter and a half of their heads."""
ROWS: Final = 16
"""Rows that are measured, the last ones; those before them are their history."""
UNION: Final = 8
VOTERS: Final = 32
"""Rows before a row whose winners are joined, or vote."""
VOTED: Final = 6
"""Keys that the votes choose, in units of ``topk``."""
RECENT: Final = 8192
HALF_SAMPLE: Final = 32
"""Keys below ``tau``, and keys anywhere, that steer the choice of columns."""
BLOCK: Final = 65_536
"""Keys that are multiplied at once."""

Floats = npt.NDArray[np.float64]
Keys = npt.NDArray[np.int64]
OnProgress = Callable[[int, int], None]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TauQuality:
    """What one choice of seeds gives.

    Attributes:
        strategy: which choice.
        rows: rows that it could serve.
        seeds: seeds per row as a share of the visible keys, mean.
        reached: share of the visible keys whose score is at least ``tau``: mean and largest over the rows.
        ratio: ``reached`` over the share of the top K, mean.
        not_positive: rows whose ``tau`` is at most 0.
    """

    strategy: str
    rows: int
    seeds: float
    reached: float
    reached_max: float
    ratio: float
    not_positive: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Pruning:
    """How far the bound narrows the keys under the best possible ``tau``, each row's own K-th score.

    Attributes:
        columns: column budget.
        rows: rows with a bound.
        dense_rows: rows that must be scored densely: too short, or outside the bound's premises.
        prune_rate: ``1 - survivors / visible`` over all rows, dense ones keep everything; seeds are not counted.
        survivors_p50, survivors_p99, survivors_max: survivors of the rows with a bound, as a share of their keys.
        residual, negative, guard: mean of the three slacks over all keys, in units of the distance between a row's
            mean score and its ``tau``: what omitted positive heads add, what the subtraction for the negative heads
            lacks, what rounding and accumulation may add.
    """

    columns: int
    rows: int
    dense_rows: int
    prune_rate: float
    survivors_p50: float | None
    survivors_p99: float | None
    survivors_max: float | None
    residual: float | None
    negative: float | None
    guard: float | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StatsReport:
    """One trace.

    Attributes:
        trace: the file.
        trace_sha256: of the file.
        num_heads, num_keys, topk: of the problem.
        rows: rows measured, half-open.
        topk_share: ``min(topk, visible) / visible``, mean over the rows.
        weights_negative: share of the weights that are negative.
        weights_negative_mass: share of ``sum |w|`` that is negative.
        dots_negative: share of the dots ``q_h . k`` that are negative.
        scores_zero: share of the scores that are exactly zero.
        scores_negative: share of the scores that are negative.
        plateau_rows: rows whose K-th score is exactly zero: a tie decided by the key's index.
        tau: per choice of seeds.
        pruning: per column budget.
        header: the file's text header.
        time_s: seconds.
    """

    trace: Path
    trace_sha256: str
    num_heads: int
    num_keys: int
    topk: int
    rows: tuple[int, int]
    topk_share: float
    weights_negative: float
    weights_negative_mass: float
    dots_negative: float
    scores_zero: float
    scores_negative: float
    plateau_rows: int
    tau: tuple[TauQuality, ...]
    pruning: tuple[Pruning, ...]
    header: Mapping[str, str]
    time_s: float

    def to_json(self) -> dict[str, object]:
        """The record (schema ``dosa.trace_stats/1``)."""
        record = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {
            "schema": SCHEMA,
            **record,
            "trace": str(self.trace),
            "rows": list(self.rows),
            "tau": [dataclasses.asdict(entry) for entry in self.tau],
            "pruning": [dataclasses.asdict(entry) for entry in self.pruning],
            "header": dict(self.header),
        }


def measure(
    path: Path,
    *,
    topk: int | None = None,
    rows: int = ROWS,
    columns: Sequence[int] | None = None,
    on_progress: OnProgress | None = None,
) -> StatsReport:
    """Measure a trace.

    Args:
        path: a trace file.
        topk: overrides the trace's.
        rows: how many rows to measure, the last ones; at most as many as there are.
        columns: column budgets; None takes :data:`COLUMNS`.
        on_progress: called with (done, total) rows.

    Returns:
        The report.

    Raises:
        InvalidProblem: the file, or ``rows``.
    """
    started = time.monotonic()
    trace = load_trace(path, topk)
    problem = trace.problem
    if rows < 1 or not problem.seq_len:
        raise InvalidProblem("rows", min(rows, problem.seq_len), "at least one row")
    first = max(0, problem.seq_len - rows)
    budgets = tuple(columns) if columns is not None else COLUMNS.get(problem.num_heads, _budgets(problem.num_heads))
    keys = e4m3_float64(problem.k).astype(np.float32)
    history: dict[int, Keys] = {}
    scores_of: dict[int, Floats] = {}
    dots_negative = []
    begin = max(0, first - VOTERS)
    for row in range(begin, problem.seq_len):
        scores, negative = _scores(problem, keys, row)
        history[row] = _winners(scores, problem.topk) + int(problem.cu_seqlen_ks[row])
        if row >= first:
            scores_of[row] = scores
            dots_negative.append(negative)
        if on_progress is not None:
            on_progress(row - begin + 1, 2 * (problem.seq_len - begin))
    tau = _tau_quality(problem, scores_of, history)
    norms = key_norms(problem.k, problem.k_scale).astype(np.float64)
    pruning = []
    for done, budget in enumerate(budgets, start=1):
        pruning.append(_pruning(problem, keys, norms, scores_of, budget))
        if on_progress is not None:
            half = problem.seq_len - begin
            on_progress(half + done * half // len(budgets), 2 * half)
    all_scores = np.concatenate(list(scores_of.values()))
    weights = problem.weights[first:].astype(np.float64)
    mass = np.abs(weights).sum()
    return StatsReport(
        trace=path,
        trace_sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
        num_heads=problem.num_heads,
        num_keys=problem.seq_len_kv,
        topk=problem.topk,
        rows=(first, problem.seq_len),
        topk_share=_mean([min(problem.topk, len(s)) / len(s) for s in scores_of.values() if len(s)]),
        weights_negative=_mean(weights < 0),
        weights_negative_mass=float(-weights[weights < 0].sum() / mass) if mass else 0.0,
        dots_negative=_mean(dots_negative),
        scores_zero=_mean(all_scores == 0),
        scores_negative=_mean(all_scores < 0),
        plateau_rows=sum(_kth(scores, problem.topk) == 0 for scores in scores_of.values()),
        tau=tau,
        pruning=tuple(pruning),
        header=trace.header,
        time_s=time.monotonic() - started,
    )


def _budgets(num_heads: int) -> tuple[int, ...]:
    return tuple(sorted({max(2, num_heads // 4), max(2, num_heads // 2)}))


def _mean(values: npt.ArrayLike) -> float:
    array = np.asarray(values, np.float64)
    return float(array.mean()) if array.size else 0.0


def _window(problem: PrefillProblem, row: int) -> slice:
    low = int(problem.cu_seqlen_ks[row])
    return slice(low, max(low, int(problem.cu_seqlen_ke[row])))


def _scores(problem: PrefillProblem, keys: npt.NDArray[np.float32], row: int) -> tuple[Floats, float]:
    """Scores of the visible keys, and the share of negative dots."""
    q, w = e4m3_float64(problem.q[row]), problem.weights[row].astype(np.float64)
    visible = _window(problem, row)
    out = np.empty(visible.stop - visible.start)
    negative = 0
    for a in range(visible.start, visible.stop, BLOCK):
        part = slice(a, min(a + BLOCK, visible.stop))
        dots = keys[part].astype(np.float64) @ q.T
        negative += int((dots < 0).sum())
        np.maximum(dots, 0.0, out=dots)
        out[part.start - visible.start : part.stop - visible.start] = dots @ w * problem.k_scale[part]
    return out, negative / (out.size * len(w)) if out.size else 0.0


def _winners(scores: Floats, topk: int) -> Keys:
    """Places of the ``topk`` best scores, in no order."""
    if len(scores) <= topk:
        return np.arange(len(scores))
    return np.argpartition(-scores, topk - 1)[:topk] if topk else np.empty(0, np.int64)


def _kth(scores: Floats, topk: int) -> float:
    """The K-th best score, NaN if there are fewer."""
    if not 0 < topk <= len(scores):
        return float("nan")
    return float(np.partition(scores, len(scores) - topk)[len(scores) - topk])


# ---------------------------------------------------------------------------------------------------------------------
# Seeds


def _strategies(
    problem: PrefillProblem, row: int, scores: Floats, history: Mapping[int, Keys]
) -> dict[str, Keys | None]:
    """Seeds by strategy, absolute keys; None where the rows before are not in the trace."""
    visible, topk = _window(problem, row), problem.topk
    every = np.arange(visible.start, visible.stop)

    def winners(count: int) -> Keys | None:
        before = [history[r] for r in range(row - count, row) if r in history]
        return np.concatenate(before) if len(before) == count else None

    previous, several, voters = winners(1), winners(UNION), winners(VOTERS)
    voted = None
    if voters is not None:
        names, votes = np.unique(voters, return_counts=True)
        voted = names[np.argsort(-votes, kind="stable")[: VOTED * topk]]
    step = max(1, len(every) // max(1, 2 * topk))
    return {
        "best": every[_winners(scores, topk)],
        "previous": previous,
        f"union_{UNION}": several,
        f"votes_{VOTERS}": voted,
        f"recent_{RECENT}": every[-max(RECENT, topk) :],
        "stride": every[::step],
    }


def _tau_quality(
    problem: PrefillProblem, scores_of: Mapping[int, Floats], history: Mapping[int, Keys]
) -> tuple[TauQuality, ...]:
    found: dict[str, list[tuple[float, float, float, bool]]] = {}
    for row, scores in scores_of.items():
        visible = _window(problem, row)
        for strategy, seeds in _strategies(problem, row, scores, history).items():
            entries = found.setdefault(strategy, [])
            if seeds is None:
                continue
            seeds = np.unique(seeds)
            seeds = seeds[(seeds >= visible.start) & (seeds < visible.stop)]
            tau = _kth(scores[seeds - visible.start], problem.topk)
            if np.isnan(tau):
                continue
            reached = _mean(scores >= tau)
            share = problem.topk / len(scores)
            entries.append((len(seeds) / len(scores), reached, reached / share, tau <= 0))
    return tuple(
        TauQuality(
            strategy=strategy,
            rows=len(entries),
            seeds=_mean([entry[0] for entry in entries]),
            reached=_mean([entry[1] for entry in entries]),
            reached_max=max((entry[1] for entry in entries), default=0.0),
            ratio=_mean([entry[2] for entry in entries]),
            not_positive=sum(entry[3] for entry in entries),
        )
        for strategy, entries in found.items()
    )


# ---------------------------------------------------------------------------------------------------------------------
# The bound


def _pruning(
    problem: PrefillProblem,
    keys: npt.NDArray[np.float32],
    norms: Floats,
    scores_of: Mapping[int, Floats],
    columns: int,
) -> Pruning:
    shares, slacks = [], []
    kept = visible_pairs = 0
    for row, scores in scores_of.items():
        visible_pairs += len(scores)
        tau = _kth(scores, problem.topk)
        bound = None
        if len(scores) > problem.topk > 0 and row_is_finite(problem.q[row], problem.weights[row]):
            bound = build_row_bound(problem.q[row], problem.weights[row], columns, _sample(problem, row, scores))
        if bound is None or not row_within_magnitude(problem.q[row], problem.weights[row], bound):
            kept += len(scores)
            continue
        upper, parts = _upper(problem, keys, norms, row, scores, bound)
        survive = int((~(upper < tau)).sum())
        kept += survive
        shares.append(survive / len(scores))
        room = tau - float(scores.mean())
        if room > 0 and np.isfinite(parts).all():
            slacks.append(parts / room)
    quantile = [float(np.quantile(shares, at)) for at in (0.5, 0.99, 1.0)] if shares else [None, None, None]
    mean: list[Any] = np.mean(slacks, axis=0).tolist() if slacks else [None, None, None]
    return Pruning(
        columns=columns,
        rows=len(shares),
        dense_rows=len(scores_of) - len(shares),
        prune_rate=1.0 - kept / visible_pairs if visible_pairs else 0.0,
        survivors_p50=quantile[0],
        survivors_p99=quantile[1],
        survivors_max=quantile[2],
        residual=mean[0],
        negative=mean[1],
        guard=mean[2],
    )


def _sample(problem: PrefillProblem, row: int, scores: Floats) -> npt.NDArray[Any]:
    """Keys that steer the choice of columns: half just below the K-th score, half anywhere in the window."""
    order = np.argsort(-scores, kind="stable")[problem.topk : 4 * problem.topk]
    hard = order[np.linspace(0, len(order) - 1, min(HALF_SAMPLE, len(order))).astype(np.int64)]
    spread = np.arange(HALF_SAMPLE) * len(scores) // HALF_SAMPLE
    keys: npt.NDArray[Any] = problem.k[np.concatenate([hard, spread]) + _window(problem, row).start]
    return keys


def _upper(
    problem: PrefillProblem,
    keys: npt.NDArray[np.float32],
    norms: Floats,
    row: int,
    scores: Floats,
    bound: RowBound,
) -> tuple[Floats, Floats]:
    """The bound of the visible keys, and the means of its three slacks: residual, negative heads, guard.

    ``U = s (sum_j c_j psi_j + G n)``. Of the linear column ``- sum lambda_h x_h`` belongs to the negative heads, the
    rest to the residuals; the positive part of the sum is compared with ``sum_P w relu``, the negative part with
    ``sum_N |w| relu``.
    """
    q, w = e4m3_float64(problem.q[row]), problem.weights[row].astype(np.float64)
    vectors, c = e4m3_float64(bound.columns), bound.coefficients.astype(np.float64)
    subtracts = ~bound.linear & (c < 0)
    visible = _window(problem, row)
    upper = np.empty(len(scores))
    sums = np.zeros(3)
    residual = bound.terms.residual
    multipliers = bound.certificate.aggregate.sum(axis=0)
    for a in range(visible.start, visible.stop, BLOCK):
        part = slice(a, min(a + BLOCK, visible.stop))
        key = keys[part].astype(np.float64)
        psi = key @ vectors.T
        psi = np.where(bound.linear, psi, np.maximum(psi, 0.0))
        added, taken = psi @ np.where(subtracts, 0.0, c), psi @ np.where(subtracts, c, 0.0)
        scale, norm = problem.k_scale[part].astype(np.float64), norms[part]
        with np.errstate(invalid="ignore"):
            upper[part.start - visible.start : part.stop - visible.start] = scale * (
                added + taken + float(bound.slack) * norm
            )
            dots = key @ q.T
            heads, line = np.maximum(dots, 0.0), dots @ multipliers
            sums += (
                (scale * (added + line + residual * norm - heads @ np.maximum(w, 0.0))).sum(),
                (scale * (taken - line - heads @ np.minimum(w, 0.0))).sum(),
                (scale * (float(bound.slack) - residual) * norm).sum(),
            )
    # A key that must always survive has an infinite norm: a bound of NaN keeps it, as in the scan.
    return upper, sums / len(scores)
