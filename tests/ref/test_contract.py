"""The judge of selections: every kind of fault, by construction and by random perturbation of right answers."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dosa_ref.contract import Fault, check_rows, check_selection
from dosa_ref.scorer import score_row
from dosa_ref.select import select_dense
from dosa_ref.spec import Contract, InvalidProblem, Outcome
from tests.ref.conftest import make_problem

PROBLEM = make_problem(seed=1, rows=4, keys=60, topk=8, windows=[(0, 60), (10, 55), (20, 24), (5, 5)])
RIGHT = select_dense(PROBLEM)


def with_row(row: int, values: list[int]) -> np.ndarray:
    indices = RIGHT.topk_indices.copy()
    indices[row] = values
    return indices


def left_out(row: int, count: int = 1) -> list[int]:
    ks, ke = PROBLEM.window(row)
    return [i for i in range(ks, ke) if i not in RIGHT.topk_indices[row]][:count]


def test_right_answers_are_exact():
    verdict = check_selection(PROBLEM, RIGHT.topk_indices, RIGHT.scores)
    assert verdict.outcome is Outcome.EXACT
    assert verdict.row is None
    assert verdict.fault is None
    assert check_selection(PROBLEM, RIGHT.topk_indices).outcome is Outcome.EXACT


ROW1 = RIGHT.topk_indices[1].tolist()
FAULTS = {
    "below_the_window": (1, [9, *ROW1[1:]], Outcome.INVALID_INDEX, Fault.OUT_OF_WINDOW),
    "beyond_the_window": (1, [*ROW1[:-1], 55], Outcome.INVALID_INDEX, Fault.OUT_OF_WINDOW),
    "negative": (1, [-2, *ROW1[1:]], Outcome.INVALID_INDEX, Fault.OUT_OF_WINDOW),
    "huge": (1, [*ROW1[:-1], 2**31 - 1], Outcome.INVALID_INDEX, Fault.OUT_OF_WINDOW),
    "index_in_an_empty_row": (3, [5] + [-1] * 7, Outcome.INVALID_INDEX, Fault.OUT_OF_WINDOW),
    "duplicate": (1, [ROW1[0], *ROW1[:-1]], Outcome.INVALID_INDEX, Fault.DUPLICATE),
    "one_missing": (1, [*ROW1[:-1], -1], Outcome.WRONG_SET, Fault.COUNT),
    "short_row_one_missing": (2, [20, 21, 22] + [-1] * 5, Outcome.WRONG_SET, Fault.COUNT),
    "worse_key": (1, sorted([*ROW1[:-1], *left_out(1)]), Outcome.WRONG_SET, Fault.BETTER_KEY_LEFT_OUT),
    "reversed": (1, ROW1[::-1], Outcome.WRONG_ORDER, Fault.NOT_ASCENDING),
    "two_swapped": (1, [*ROW1[:-2], ROW1[-1], ROW1[-2]], Outcome.WRONG_ORDER, Fault.NOT_ASCENDING),
    "padding_in_front": (2, [-1] * 4 + [20, 21, 22, 23], Outcome.WRONG_ORDER, Fault.NOT_ASCENDING),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_by_construction(name):
    row, values, outcome, fault = FAULTS[name]
    verdict = check_selection(PROBLEM, with_row(row, values))
    assert (verdict.outcome, verdict.fault, verdict.row) == (outcome, fault, row)
    assert verdict.evidence["fault"] == fault.value
    json.dumps(verdict.evidence, allow_nan=False)


def test_evidence_says_where_and_what():
    def evidence(row, values):
        return check_selection(PROBLEM, with_row(row, values)).evidence

    for name, position, index in (("below_the_window", 0, 9), ("beyond_the_window", 7, 55), ("negative", 0, -2)):
        row, values, _, fault = FAULTS[name]
        assert evidence(row, values) == {"fault": fault.value, "position": position, "index": index, "window": [10, 55]}
    # The duplicated index itself: not the first that was chosen, and twice is enough.
    assert evidence(1, [*ROW1[:-1], ROW1[3]]) == {"fault": "duplicate", "index": ROW1[3]}
    assert evidence(2, [20, 21, 22] + [-1] * 5) == {"fault": "count", "selected": 3, "expected": 4}
    row, values, _, fault = FAULTS["two_swapped"]
    assert evidence(row, values) == {"fault": fault.value, "position": 6, "index": ROW1[-1], "expected": ROW1[-2]}


def test_evidence_names_the_worst_key():
    worse = left_out(1)[0]
    # Not the first in the list: the selected key with the lowest score.
    verdict = check_selection(PROBLEM, with_row(1, sorted([*ROW1[:-1], worse])))
    assert verdict.evidence["selected"]["index"] == worse
    late = next(key for key in left_out(1, 99) if key > ROW1[0])
    assert check_selection(PROBLEM, with_row(1, sorted([*ROW1[:-1], late]))).evidence["selected"]["index"] == late


def test_evidence_names_the_better_key():
    verdict = check_selection(PROBLEM, with_row(1, FAULTS["worse_key"][1]))
    scores = score_row(PROBLEM, 1)
    missing = verdict.evidence["left_out"]["index"]
    assert missing == ROW1[-1]
    assert verdict.evidence["left_out"]["score"]["bits"] == f"0x{scores[missing - 10].view(np.uint32):08x}"
    assert verdict.evidence["selected"]["index"] == left_out(1)[0]


def test_the_first_wrong_row_is_reported():
    indices = with_row(2, [20, 21, 22] + [-1] * 5)
    indices[1] = ROW1[::-1]
    assert check_selection(PROBLEM, indices).row == 1


def with_score(row: int, position: int, value: float) -> np.ndarray:
    scores = RIGHT.scores.copy()
    scores[row, position] = value
    return scores


def test_wrong_scores():
    wrong = np.nextafter(RIGHT.scores[1, 3], np.float32(np.inf))
    verdict = check_selection(PROBLEM, RIGHT.topk_indices, with_score(1, 3, wrong))
    assert (verdict.outcome, verdict.fault, verdict.row) == (Outcome.WRONG_SET, Fault.SCORE_BITS, 1)
    assert verdict.evidence["index"] == ROW1[3]
    assert verdict.evidence["got"]["bits"] == f"0x{wrong.view(np.uint32):08x}"
    assert verdict.evidence["expected"]["bits"] == f"0x{RIGHT.scores[1, 3].view(np.uint32):08x}"
    tail = check_selection(PROBLEM, RIGHT.topk_indices, with_score(2, 6, 0.0))
    assert (tail.fault, tail.row) == (Fault.TAIL_SCORE, 2)
    assert verdict.evidence["position"] == 3
    assert tail.evidence == {
        "fault": "tail_score",
        "position": 6,
        "got": {"bits": "0x00000000", "decimal": "0.0"},
        "expected": {"bits": "0xff800000", "decimal": "-inf"},
    }
    assert check_selection(PROBLEM, RIGHT.topk_indices, with_score(3, 0, np.nan)).fault is Fault.TAIL_SCORE


def tied_problem():
    """All scores equal: every choice is a valid set, one is the shared tie-break's."""
    return dataclasses.replace(PROBLEM, weights=np.zeros_like(PROBLEM.weights))


def test_another_choice_among_ties():
    problem = tied_problem()
    right = select_dense(problem)
    assert right.topk_indices[0].tolist() == list(range(8))
    indices = right.topk_indices.copy()
    indices[0] = range(1, 9)
    verdict = check_selection(problem, indices, right.scores)
    assert (verdict.outcome, verdict.fault, verdict.row) == (Outcome.TIE_EQUIVALENT, Fault.TIE_CHOICE, 0)
    assert verdict.evidence["left_out"]["index"] == 0
    assert verdict.evidence["selected"]["index"] == 8
    # A real fault in a later row outranks it, and so does one in the same row.
    indices[1, ::] = right.topk_indices[1][::-1]
    assert check_selection(problem, indices).row == 1
    indices[0] = list(range(8, 0, -1))
    assert check_selection(problem, indices).fault is Fault.NOT_ASCENDING


def test_signed_zeros_tie_but_are_different_bits():
    problem = dataclasses.replace(tied_problem(), k_scale=np.where(np.arange(60) % 2, -1, 1).astype(np.float32))
    right = select_dense(problem)
    assert right.topk_indices[0].tolist() == list(range(8))
    assert np.signbit(right.scores[0]).any()
    assert check_selection(problem, right.topk_indices, right.scores).outcome is Outcome.EXACT
    assert check_selection(problem, right.topk_indices, np.abs(right.scores)).fault in (
        Fault.SCORE_BITS,
        Fault.TAIL_SCORE,
    )


def test_nan_keys():
    k_scale = PROBLEM.k_scale.copy()
    k_scale[[20, 22, 40]] = np.nan
    problem = dataclasses.replace(PROBLEM, k_scale=k_scale)
    right = select_dense(problem)
    assert right.topk_indices[2].tolist() == [21, 23] + [-1] * 6
    assert check_selection(problem, right.topk_indices, right.scores).outcome is Outcome.EXACT
    indices = right.topk_indices.copy()
    indices[2] = [20, 21, 23] + [-1] * 5
    verdict = check_selection(problem, indices)
    assert (verdict.outcome, verdict.fault) == (Outcome.WRONG_SET, Fault.NAN_SELECTED)
    assert verdict.evidence["index"] == 20
    # The selected NaN, not the first NaN and not the first selected key.
    indices[2] = [21, 22, 23] + [-1] * 5
    assert check_selection(problem, indices).evidence["index"] == 22
    all_nan = dataclasses.replace(PROBLEM, k_scale=np.full(60, np.nan, np.float32))
    assert check_selection(all_nan, np.full((4, 8), -1, np.int32)).outcome is Outcome.EXACT


def test_minus_infinity_is_selectable():
    problem = dataclasses.replace(
        PROBLEM, weights=-np.ones_like(PROBLEM.weights), k_scale=np.full(60, np.inf, np.float32)
    )
    right = select_dense(problem)
    assert np.isneginf(score_row(problem, 0)).any()
    assert check_selection(problem, right.topk_indices, right.scores).outcome is Outcome.EXACT


@given(seed=st.integers(0, 2**32 - 1), ties=st.booleans(), special=st.booleans())
@settings(max_examples=60, deadline=None)
def test_random_perturbations_against_brute_force(seed, ties, special):
    """One position of a right answer is changed at random; sorting decides what the verdict must be."""
    rng = np.random.default_rng(seed)
    problem = make_problem(seed=seed % 50, rows=1, keys=20, heads=4, topk=6, integer_values=ties)
    if special:
        k_scale = problem.k_scale.copy()
        k_scale[rng.integers(0, 20, 6)] = [np.nan, np.inf, -1, 0, np.nan, -np.inf]
        problem = dataclasses.replace(problem, k_scale=k_scale)
    right = select_dense(problem).topk_indices[0]
    changed = right.copy()
    changed[rng.integers(0, 6)] = rng.integers(-2, 21)
    if rng.random() < 0.5:
        changed = (
            rng.permutation(changed)
            if rng.random() < 0.3
            else np.array(sorted(changed, key=lambda i: (i < 0, i)), np.int32)
        )
    scores = score_row(problem, 0)
    chosen = changed[changed != -1]
    valid = ((chosen >= 0) & (chosen < 20)).all() and len(set(chosen.tolist())) == len(chosen)
    if not valid:
        expected = Outcome.INVALID_INDEX
    elif np.isnan(scores[chosen]).any() or not np.array_equal(
        np.sort(scores[chosen]), np.sort(scores[right[right >= 0]])
    ):
        expected = Outcome.WRONG_SET
    elif changed.tolist() != sorted(chosen.tolist()) + [-1] * (6 - len(chosen)):
        expected = Outcome.WRONG_ORDER
    elif changed.tolist() != right.tolist():
        expected = Outcome.TIE_EQUIVALENT
    else:
        expected = Outcome.EXACT
    assert check_selection(problem, changed[None].astype(np.int32)).outcome is expected


def test_some_rows_with_known_scores():
    rows = [2, 0]
    known = [score_row(PROBLEM, row) for row in rows]
    indices, scores = RIGHT.topk_indices[rows], RIGHT.scores[rows]
    assert check_rows(PROBLEM, rows, indices, scores).outcome is Outcome.EXACT
    assert check_rows(PROBLEM, rows, indices, scores, row_scores=known).outcome is Outcome.EXACT
    # The known scores are what is judged by: other ones give another verdict, on the problem's row number.
    verdict = check_rows(PROBLEM, rows, indices, scores, row_scores=[known[0], -known[1]])
    assert (verdict.outcome, verdict.row) == (Outcome.WRONG_SET, 0)


def test_exact_contract():
    problem = make_problem(seed=2, rows=2, keys=30, heads=3, topk=5)
    right = select_dense(problem, Contract.EXACT)
    assert check_selection(problem, right.topk_indices, right.scores, Contract.EXACT).outcome is Outcome.EXACT
    indices = right.topk_indices.copy()
    indices[1, 0] = next(i for i in range(30) if i not in indices[1])
    verdict = check_selection(problem, np.sort(indices, axis=1), contract=Contract.EXACT)
    assert verdict.fault is Fault.BETTER_KEY_LEFT_OUT
    assert (
        "/" in verdict.evidence["left_out"]["score"]["exact"]
        or verdict.evidence["left_out"]["score"]["exact"].isdigit()
    )
    with pytest.raises(InvalidProblem) as caught:
        check_rows(problem, [0], right.topk_indices[:1], contract=Contract.EXACT, row_scores=[np.zeros(30, np.float32)])
    assert str(caught.value) == "row_scores: got float32 scores, expected None under the exact contract"


@pytest.mark.parametrize(
    ("field", "indices", "scores"),
    [
        ("topk_indices", RIGHT.topk_indices[:, :7], None),
        ("topk_indices", RIGHT.topk_indices.astype(np.int64), None),
        ("topk_indices", RIGHT.topk_indices.tolist(), None),
        ("scores", RIGHT.topk_indices, RIGHT.scores[:3]),
        ("scores", RIGHT.topk_indices, RIGHT.scores.astype(np.float64)),
    ],
)
def test_results_of_another_shape(field, indices, scores):
    with pytest.raises(InvalidProblem) as caught:
        check_selection(PROBLEM, indices, scores)
    assert caught.value.field == field
    given = indices if field == "topk_indices" else scores
    got = f"{given.dtype} {list(given.shape)}" if isinstance(given, np.ndarray) else "list"
    expected = f"{'int32' if field == 'topk_indices' else 'float32'} [4, 8]"
    if got == "list":
        expected = f"a NumPy array, {expected}"
    assert str(caught.value) == f"{field}: got {got}, expected {expected}"


def test_known_scores_of_another_shape():
    with pytest.raises(InvalidProblem) as caught:
        check_rows(PROBLEM, [0], RIGHT.topk_indices[:1], row_scores=[np.zeros(3, np.float32)])
    assert str(caught.value) == "row_scores: got float32 [3], expected float32 [60]"
