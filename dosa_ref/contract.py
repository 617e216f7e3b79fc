"""Judging a selection: is it the one that the contract defines, and if not, where and how does it differ?

A row is judged in time linear in its keys, without sorting and without making a selection of one's own: a set of
``m`` keys is a top-m set if and only if its worst member is at least as good as every key outside it. The worst score
is the certificate; the shared tie-break is one more comparison among the keys that have exactly that score.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

from dosa_ref.formats import float_evidence
from dosa_ref.problem import PrefillProblem
from dosa_ref.scorer import float32_of_exact, score_row, score_row_exact
from dosa_ref.select import exact_ranks
from dosa_ref.spec import PAD_INDEX, Contract, InvalidProblem, Outcome


class Fault(enum.Enum):
    """What is wrong with a row, one step finer than :class:`~dosa_ref.spec.Outcome`."""

    OUT_OF_WINDOW = "out_of_window"
    """An index that is neither -1 nor in ``[ks, ke)``: ``INVALID_INDEX``."""
    DUPLICATE = "duplicate"
    """A key selected twice: ``INVALID_INDEX``."""
    COUNT = "count"
    """Not ``min(topk, keys whose score is not NaN)`` keys: ``WRONG_SET``."""
    NAN_SELECTED = "nan_selected"
    """A key with a NaN score was selected: ``WRONG_SET``."""
    BETTER_KEY_LEFT_OUT = "better_key_left_out"
    """A key outside the set beats one inside it: ``WRONG_SET``."""
    NOT_ASCENDING = "not_ascending"
    """The right set, but not ascending with -1 behind: ``WRONG_ORDER``."""
    SCORE_BITS = "score_bits"
    """The right keys, but a reported score differs in a bit: ``WRONG_SET``, since the set of (key, score) pairs is
    wrong."""
    TAIL_SCORE = "tail_score"
    """The right keys, but a score behind the last is not -Inf: ``WRONG_SET`` likewise."""
    TIE_CHOICE = "tie_choice"
    """A valid set, but among equal scores not the smallest indices: ``TIE_EQUIVALENT``."""


_OUTCOMES = {
    Fault.OUT_OF_WINDOW: Outcome.INVALID_INDEX,
    Fault.DUPLICATE: Outcome.INVALID_INDEX,
    Fault.COUNT: Outcome.WRONG_SET,
    Fault.NAN_SELECTED: Outcome.WRONG_SET,
    Fault.BETTER_KEY_LEFT_OUT: Outcome.WRONG_SET,
    Fault.NOT_ASCENDING: Outcome.WRONG_ORDER,
    Fault.SCORE_BITS: Outcome.WRONG_SET,
    Fault.TAIL_SCORE: Outcome.WRONG_SET,
    Fault.TIE_CHOICE: Outcome.TIE_EQUIVALENT,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Verdict of a check.

    Attributes:
        outcome: the finding; ``EXACT`` only if every row is.
        row: the first wrong row, or the first row that is only tie-equivalent; None for ``EXACT``.
        fault: the fault of that row, None for ``EXACT``.
        evidence: details, ready for JSON; floats as bits and decimal, key columns absolute. For ``EXACT`` it is empty.
    """

    outcome: Outcome
    row: int | None
    fault: Fault | None
    evidence: Mapping[str, object]


EXACT_VERDICT = Verdict(outcome=Outcome.EXACT, row=None, fault=None, evidence={})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _RowScores:
    """Scores of one row's visible keys: numbers to compare, float32 to report, and how to show one as evidence."""

    order: npt.NDArray[np.floating[Any]]
    reported: npt.NDArray[np.float32]
    exact: Sequence[Fraction | float] | None

    def show(self, key: int) -> dict[str, str]:
        """Evidence of one key's score."""
        shown = float_evidence(self.reported[key])
        return shown if self.exact is None else {**shown, "exact": str(self.exact[key])}


def check_selection(
    problem: PrefillProblem,
    topk_indices: npt.NDArray[np.int32],
    scores: npt.NDArray[np.float32] | None = None,
    contract: Contract = Contract.SM90,
) -> Verdict:
    """Check a selection of all rows of a problem, scoring every visible key anew.

    Args:
        problem: the inputs.
        topk_indices: int32 ``[rows, topk]``, absolute columns.
        scores: float32 ``[rows, topk]`` to be checked bit by bit too, or None.
        contract: whose score decides.

    Returns:
        The verdict on the first row that is wrong; failing that, the first that chose other keys among ties; failing
        that, EXACT.

    Raises:
        InvalidProblem: ``topk_indices`` or ``scores`` have another shape or dtype.
        UnsupportedConfiguration: more than 64 heads under ``SM90``.

    Exactness: exact, no tolerance.

    Special values: -1 is the tail; a NaN score must not be selected; -0.0 and +0.0 tie but are different score bits.
    """
    return check_rows(problem, range(problem.seq_len), topk_indices, scores, contract)


def check_rows(
    problem: PrefillProblem,
    rows: Sequence[int],
    topk_indices: npt.NDArray[np.int32],
    scores: npt.NDArray[np.float32] | None = None,
    contract: Contract = Contract.SM90,
    row_scores: Sequence[npt.NDArray[np.float32]] | None = None,
) -> Verdict:
    """Check the selection of some rows; as :func:`check_selection` otherwise.

    Args:
        problem: the inputs.
        rows: row numbers of the problem, one per line of ``topk_indices``.
        topk_indices: int32 ``[len(rows), topk]``.
        scores: float32 ``[len(rows), topk]`` or None.
        contract: whose score decides.
        row_scores: known ``SM90`` scores of each row's visible keys, float32 ``[ke - ks]`` each, to save computing
            them; trusted.

    Returns:
        The verdict; ``row`` is a row number of the problem.

    Raises:
        InvalidProblem: a shape or dtype is wrong, or ``row_scores`` comes with the ``EXACT`` contract.
    """
    _check_result("topk_indices", topk_indices, np.dtype(np.int32), (len(rows), problem.topk))
    if scores is not None:
        _check_result("scores", scores, np.dtype(np.float32), (len(rows), problem.topk))
    if row_scores is not None and contract is Contract.EXACT:
        raise InvalidProblem("row_scores", "float32 scores", "None under the exact contract")
    tie: Verdict | None = None
    for line, row in enumerate(rows):
        ks, ke = problem.window(row)
        if row_scores is not None:
            _check_result("row_scores", row_scores[line], np.dtype(np.float32), (ke - ks,))
            known = _RowScores(order=row_scores[line], reported=row_scores[line], exact=None)
        else:
            known = _score(problem, row, contract)
        verdict = _check_row(row, ks, ke, known, topk_indices[line], None if scores is None else scores[line])
        if verdict.fault is Fault.TIE_CHOICE:
            tie = tie or verdict
        elif verdict.fault is not None:
            return verdict
    return tie or EXACT_VERDICT


def _score(problem: PrefillProblem, row: int, contract: Contract) -> _RowScores:
    if contract is Contract.EXACT:
        exact = score_row_exact(problem, row)
        reported = np.array([float32_of_exact(score) for score in exact], np.float32)
        return _RowScores(order=exact_ranks(exact), reported=reported, exact=exact)
    scores = score_row(problem, row)
    return _RowScores(order=scores, reported=scores, exact=None)


def _check_row(
    row: int,
    ks: int,
    ke: int,
    known: _RowScores,
    indices: npt.NDArray[np.int32],
    scores: npt.NDArray[np.float32] | None,
) -> Verdict:
    """Verdict on one row: ``EXACT_VERDICT`` or its first fault, the worst kind first."""

    def found(fault: Fault, **evidence: object) -> Verdict:
        return Verdict(outcome=_OUTCOMES[fault], row=row, fault=fault, evidence={"fault": fault.value, **evidence})

    def key(index: int) -> dict[str, object]:
        return {"index": int(index) + ks, "score": known.show(int(index))}

    topk, columns = len(indices), indices.astype(np.int64)
    outside = np.flatnonzero((columns != PAD_INDEX) & ((columns < ks) | (columns >= ke)))
    if outside.size:
        position = int(outside[0])
        return found(Fault.OUT_OF_WINDOW, position=position, index=int(columns[position]), window=[ks, ke])
    chosen = columns[columns != PAD_INDEX] - ks
    times = np.bincount(chosen, minlength=ke - ks)
    if (times > 1).any():
        return found(Fault.DUPLICATE, index=int(np.argmax(times > 1)) + ks)

    order, is_chosen = known.order, times > 0
    is_nan = np.isnan(order)
    if (is_nan & is_chosen).any():
        return found(Fault.NAN_SELECTED, **key(int(np.argmax(is_nan & is_chosen))))
    expected = min(topk, int((~is_nan).sum()))
    if len(chosen) != expected:
        return found(Fault.COUNT, selected=len(chosen), expected=expected)
    left_out = np.flatnonzero(~is_chosen & ~is_nan)
    tied: Verdict | None = None
    if chosen.size and left_out.size:
        threshold = order[chosen].min()
        best = left_out[np.argmax(order[left_out])]
        if order[best] > threshold:
            worst = chosen[np.argmin(order[chosen])]
            return found(Fault.BETTER_KEY_LEFT_OUT, left_out=key(best), selected=key(worst))
        last_tied = chosen[order[chosen] == threshold].max()
        earlier = left_out[(order[left_out] == threshold) & (left_out < last_tied)]
        if earlier.size:
            tied = found(Fault.TIE_CHOICE, left_out=key(earlier[0]), selected=key(last_tied))

    ascending = np.concatenate([np.sort(chosen) + ks, np.full(topk - len(chosen), PAD_INDEX)])
    wrong = np.flatnonzero(columns != ascending)
    if wrong.size:
        position = int(wrong[0])
        return found(
            Fault.NOT_ASCENDING, position=position, index=int(columns[position]), expected=int(ascending[position])
        )
    if scores is not None:
        verdict = _check_scores(known, np.sort(chosen), scores, found, ks)
        if verdict is not None:
            return verdict
    return tied or EXACT_VERDICT


def _check_scores(
    known: _RowScores, chosen: npt.NDArray[np.int64], scores: npt.NDArray[np.float32], found: Any, ks: int
) -> Verdict | None:
    """The first reported score whose bits are not the key's (or not -Inf, in the tail)."""
    expected = np.full(len(scores), -np.inf, np.float32)
    expected[: len(chosen)] = known.reported[chosen]
    wrong = np.flatnonzero(np.ascontiguousarray(scores).view(np.uint32) != expected.view(np.uint32))
    if not wrong.size:
        return None
    position = int(wrong[0])
    evidence = {"position": position, "got": float_evidence(scores[position])}
    if position >= len(chosen):
        verdict: Verdict = found(Fault.TAIL_SCORE, **evidence, expected=float_evidence(np.float32(-np.inf)))
    else:
        index = int(chosen[position])
        verdict = found(Fault.SCORE_BITS, **evidence, index=index + ks, expected=known.show(index))
    return verdict


def _check_result(field: str, array: object, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
    if not isinstance(array, np.ndarray):
        raise InvalidProblem(field, type(array).__name__, f"a NumPy array, {dtype} {list(shape)}")
    if array.dtype != dtype or array.shape != shape:
        raise InvalidProblem(field, f"{array.dtype} {list(array.shape)}", f"{dtype} {list(shape)}")
