"""Selections: exact top-K against brute force, all modes against dense, every fallback, decode, hashes."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import struct
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dosa_ref import select
from dosa_ref.problem import PagedProblem, PrefillProblem
from dosa_ref.quantize import pack_pages
from dosa_ref.scorer import score_row, score_row_exact
from dosa_ref.select import (
    Selection,
    default_seeds,
    exact_ranks,
    exact_topk,
    result_hash,
    select_decode,
    select_dense,
    select_prefill,
)
from dosa_ref.spec import Contract, Fallback, InvalidProblem, Mode, UnsupportedConfiguration
from tests.ref.conftest import FP8, make_problem


def best_by_brute_force(scores: list[float], topk: int) -> list[int]:
    """Python's own sort on (score descending, index ascending), NaN left out."""
    order = sorted((i for i, s in enumerate(scores) if s == s), key=lambda i: (-scores[i], i))
    chosen = sorted(order[:topk])
    return chosen + [-1] * (topk - len(chosen))


scores_strategy = st.lists(
    st.sampled_from([0.0, -0.0, 1.0, -1.0, math.inf, -math.inf, math.nan, 1e-45, 0.5, math.nextafter(0.5, 1)]),
    max_size=12,
)


@given(scores=scores_strategy, topk=st.integers(0, 14))
@settings(max_examples=300)
def test_exact_topk_is_brute_force(scores, topk):
    array = np.array(scores, np.float32)
    got = exact_topk(array, topk)
    assert got.dtype == np.int32
    assert got.tolist() == best_by_brute_force(array.tolist(), topk)
    assert exact_topk(np.stack([array, array[::-1]]), topk)[0].tolist() == got.tolist()


@pytest.mark.parametrize(
    ("scores", "topk", "expected"),
    [
        pytest.param([0.0] * 5, 3, [0, 1, 2], id="all_equal_smallest_indices"),
        pytest.param([-0.0, 0.0, -0.0], 2, [0, 1], id="signed_zeros_tie"),
        pytest.param([np.nan, -np.inf, np.nan, 1], 3, [1, 3, -1], id="nan_never_inf_yes"),
        pytest.param([1, 2, 2, 2, 3], 3, [1, 2, 4], id="ties_straddle_k"),
        pytest.param([], 2, [-1, -1], id="empty"),
        pytest.param([5.0], 0, [], id="k_zero"),
    ],
)
def test_exact_topk_cases(scores, topk, expected):
    assert exact_topk(np.array(scores, np.float32), topk).tolist() == expected


def test_exact_topk_zero_flood_and_full_range_of_ties():
    """100 winners among 8320 zeros, more ties than any power-of-two buffer: a known fault of bucketed selections."""
    rng = np.random.default_rng(0)
    scores = np.zeros(8420, np.float32)
    winners = np.sort(rng.choice(8420, 100, replace=False))
    scores[winners] = rng.random(100).astype(np.float32) + 1
    got = exact_topk(scores, 2048)
    rest = np.setdiff1d(np.arange(8420), winners)[: 2048 - 100]
    assert got.tolist() == sorted([*winners.tolist(), *rest.tolist()])


def test_exact_topk_refuses():
    with pytest.raises(InvalidProblem) as error:
        exact_topk(np.zeros(3, np.float32), -1)
    assert str(error.value) == "topk: got -1, expected at least 0"
    with pytest.raises(InvalidProblem) as error:
        exact_topk(np.zeros((1, 1, 1), np.float32), 1)
    assert str(error.value) == "scores: got 3 dimensions, expected 1 or 2"
    nothing = exact_topk(np.zeros((0, 5), np.float32), 3)
    assert (nothing.shape, nothing.dtype) == ((0, 3), np.int32)


@given(st.lists(st.one_of(st.fractions(), st.sampled_from([math.inf, -math.inf, math.nan])), max_size=10))
def test_ranks_keep_the_order(scores):
    ranks = exact_ranks(scores)
    for i, a in enumerate(scores):
        assert math.isnan(ranks[i]) == (a != a)
        for j, b in enumerate(scores):
            assert (ranks[i] < ranks[j]) == (a < b)
            assert (ranks[i] == ranks[j]) == (a == b)


# ---------------------------------------------------------------------------------------------------------------------
# Prefill


def assert_same(got: Selection, expected: Selection) -> None:
    assert (got.topk_indices == expected.topk_indices).all()
    assert (got.scores.view(np.uint32) == expected.scores.view(np.uint32)).all()
    assert result_hash(got.topk_indices, got.scores) == result_hash(expected.topk_indices, expected.scores)


def assert_is_the_contract(problem: PrefillProblem, selection: Selection) -> None:
    """Against the scores and Python's sort, row by row."""
    for row in range(problem.seq_len):
        scores = score_row(problem, row)
        ks, _ = problem.window(row)
        expected = best_by_brute_force(scores.tolist(), problem.topk)
        assert selection.topk_indices[row].tolist() == [i + ks if i >= 0 else -1 for i in expected]
        for position, i in enumerate(expected):
            want = scores[i] if i >= 0 else np.float32(-np.inf)
            assert selection.scores[row, position].view(np.uint32) == want.view(np.uint32)


def spoil(problem: PrefillProblem, kind: str, rng: np.random.Generator) -> PrefillProblem:
    """The same problem with special values of one kind."""
    arrays = {name: getattr(problem, name).copy() for name in ("q", "k", "k_scale", "weights")}
    keys = rng.choice(problem.seq_len_kv, 12, replace=False)
    match kind:
        case "nan_in_keys":
            arrays["k"].view(np.uint8)[keys, rng.integers(0, 128, 12)] = 0x7F
        case "odd_scales":
            odd = [np.nan, np.inf, -np.inf, 0, -1, 2.0**-41, 2.0**41, 1e-45, 2.0**-40, 2.0**40, 3.0, 0.7]
            arrays["k_scale"][keys] = np.array(odd, np.float32)
        case "nan_in_q":
            arrays["q"].view(np.uint8)[1, 3, 5] = 0xFF
        case "nan_in_weights":
            arrays["weights"][1, 2] = np.nan
        case "inf_in_weights":
            arrays["weights"][0, 2], arrays["weights"][1, 1] = np.inf, -np.inf
        case "zero_weights":
            arrays["weights"][:] = 0
        case "negative_weights":
            arrays["weights"][:] = -np.abs(arrays["weights"])
        case "huge_weights":
            arrays["weights"] *= np.float32(2.0**60)
        case "tiny_weights":
            arrays["weights"] *= np.float32(2.0**-146)
        case "all_scales_inf":
            arrays["k_scale"][:] = np.inf
    return dataclasses.replace(problem, **arrays)


KINDS = ("plain", "ties", "nan_in_keys", "odd_scales", "nan_in_q", "nan_in_weights", "inf_in_weights", "zero_weights",
         "negative_weights", "huge_weights", "tiny_weights", "all_scales_inf")  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_all_modes_equal_dense_and_brute_force(kind):
    rng = np.random.default_rng(KINDS.index(kind))
    for seed, heads, topk in [(0, 32, 16), (1, 12, 5), (2, 64, 40)]:
        windows = [(0, 200), (3, 197), (50, 50 + topk), (50, 51 + topk), (50, 49 + topk), (7, 7), (9, 2)]
        problem = make_problem(
            seed=seed, rows=7, keys=200, heads=heads, topk=topk, windows=windows, integer_values=kind == "ties"
        )
        problem = spoil(problem, kind, rng)
        dense = select_dense(problem)
        if seed == 1 or kind in ("ties", "odd_scales"):
            assert_is_the_contract(problem, dense)
        for mode in Mode:
            for columns, capacity in [(7, None), (16, 30)]:
                assert_same(select_prefill(problem, mode, columns=columns, survivor_capacity=capacity), dense)


@given(
    seed=st.integers(0, 2**32 - 1),
    topk=st.integers(0, 30),
    columns=st.integers(1, 16),
    capacity=st.sampled_from([None, 0, 10, 40]),
    mode=st.sampled_from(Mode),
    ties=st.booleans(),
)
@settings(max_examples=25, deadline=None)
def test_random_problems_equal_dense(seed, topk, columns, capacity, mode, ties):
    rng = np.random.default_rng(seed)
    windows = [tuple(rng.integers(0, 81, 2).tolist()) for _ in range(4)]
    problem = make_problem(seed=seed % 997, rows=4, keys=80, heads=12, topk=topk, windows=windows, integer_values=ties)
    seeds = [rng.integers(-5, 90, rng.integers(0, 100)) for _ in range(4)]
    got = select_prefill(problem, mode, columns=columns, seeds=seeds, survivor_capacity=capacity)
    assert_same(got, select_dense(problem))


def test_pruning_prunes_and_is_counted():
    problem = make_problem(seed=3, rows=4, keys=600, topk=16)
    winners = select_dense(problem).topk_indices
    both = select_prefill(problem, Mode.BOTH, seeds=winners)
    assert both.row_pruned.all()
    assert both.fallback == (None,) * 4
    assert (both.survivors < both.visible).all()
    assert (both.survivors >= problem.topk).all()
    assert (both.rescored >= both.survivors).all()
    assert both.prune_rate == 1 - both.rescored.sum() / both.visible.sum() > 0.7
    for mode in (Mode.BASE, Mode.EMIT):
        plain = select_prefill(problem, mode)
        assert not plain.row_pruned.any()
        assert plain.prune_rate == 0
    assert select_dense(problem).prune_rate == 0


def test_ties_with_tau_survive_the_strict_test(monkeypatch):
    """Under the tightest bound there is (U = score) every key that equals tau must stay: it may win by its index."""
    problem = make_problem(seed=4, rows=6, keys=150, topk=20, integer_values=True)
    dense = select_dense(problem)
    scores = [score_row(problem, row) for row in range(6)]
    # Seeds are the other end of the tie: the same scores, the largest indices. So tau is the K-th score itself.
    seeds = [149 - exact_topk(row[::-1], 20) for row in scores]
    assert all((np.sort(row[s]) == np.sort(row[d])).all() for row, s, d in zip(scores, seeds, dense.topk_indices))
    assert any(set(s.tolist()) != set(d.tolist()) for s, d in zip(seeds, dense.topk_indices))
    rows = iter(scores)
    monkeypatch.setattr(select, "evaluate", lambda *_: next(rows))
    got = select_prefill(problem, Mode.BOTH, seeds=seeds)
    assert_same(got, dense)
    assert got.row_pruned.all()


def test_a_nan_bound_keeps_the_key(monkeypatch):
    problem = make_problem(seed=3, rows=2, keys=100, topk=16)
    monkeypatch.setattr(select, "evaluate", lambda _, k, __: np.full(len(k), np.nan, np.float32))
    got = select_prefill(problem, Mode.PRUNE)
    assert got.survivors.tolist() == [100, 100]
    assert_same(got, select_dense(problem))


def test_a_bound_below_the_score_would_lose_keys(monkeypatch):
    """The comparison with dense can fail: a thousandth of the true bound breaks the selection."""
    problem = make_problem(seed=3, rows=4, keys=600, topk=16)
    honest = select.evaluate
    monkeypatch.setattr(select, "evaluate", lambda *arguments: honest(*arguments) * np.float32(1e-3))
    got = select_prefill(problem, Mode.BOTH, columns=32)
    assert (got.topk_indices != select_dense(problem).topk_indices).any()


def one_row(**changes) -> PrefillProblem:
    return dataclasses.replace(make_problem(seed=5, rows=1, keys=100, topk=10), **changes)


def reason(problem: PrefillProblem, mode: Mode = Mode.BOTH, **options) -> Fallback | None:
    selection = select_prefill(problem, mode, **options)
    assert_same(selection, select_dense(problem))
    if selection.fallback[0] is not None:
        assert not selection.row_pruned[0]
        assert selection.rescored[0] == selection.survivors[0] == selection.visible[0]
    return selection.fallback[0]


def test_every_fallback_has_its_reason():
    plain = one_row()
    nan_q = plain.q.copy()
    nan_q.view(np.uint8)[0, 0, 0] = 0x7F
    assert reason(plain) is None
    assert reason(one_row(topk=100)) is Fallback.SHORT_ROW
    assert reason(one_row(topk=99)) is None
    assert reason(one_row(topk=0)) is None
    assert reason(one_row(q=nan_q)) is Fallback.NON_FINITE_ROW
    assert reason(one_row(k_scale=np.full(100, np.inf, np.float32), weights=np.ones((1, 32), np.float32))) in (
        Fallback.NON_FINITE_ROW,
        Fallback.TOO_FEW_SEEDS,
    )
    assert reason(one_row(k_scale=np.full(100, np.nan, np.float32))) is Fallback.TOO_FEW_SEEDS
    assert reason(plain, seeds=np.arange(9)) is Fallback.TOO_FEW_SEEDS
    assert reason(plain, seeds=np.array([*range(9), 8, -1, 100, 3])) is Fallback.TOO_FEW_SEEDS
    assert reason(plain, seeds=np.arange(10)) is None
    heavy = one_row(weights=plain.weights * np.float32(2.0**55))
    assert reason(heavy) is Fallback.ROW_MAGNITUDE
    assert reason(heavy, Mode.EMIT) is None
    assert reason(plain, survivor_capacity=9) is Fallback.SURVIVOR_OVERFLOW
    assert reason(plain, Mode.EMIT, survivor_capacity=9) is Fallback.SURVIVOR_OVERFLOW
    assert reason(plain, Mode.EMIT, survivor_capacity=99) is None
    assert reason(plain, Mode.BASE, survivor_capacity=0) is None


def test_infinite_tau_takes_the_dense_path():
    problem = make_problem(seed=5, rows=1, keys=100, topk=3)
    k, k_scale = problem.k.copy(), problem.k_scale.copy()
    k[-5:] = problem.q[0, int(np.argmax(problem.weights[0]))]
    k_scale[-5:] = 3e38
    weights = np.abs(problem.weights) + np.float32(1e3)
    spoiled = dataclasses.replace(problem, k=k, k_scale=k_scale, weights=weights)
    assert np.isposinf(score_row(spoiled, 0)[-5:]).all()
    assert reason(spoiled) is Fallback.NON_FINITE_ROW


def test_overflow_is_per_row():
    problem = make_problem(seed=6, rows=6, keys=400, topk=16, rank=4)
    free = select_prefill(problem, Mode.BOTH)
    capacity = int(np.sort(free.survivors)[2])
    got = select_prefill(problem, Mode.BOTH, survivor_capacity=capacity)
    assert [f is Fallback.SURVIVOR_OVERFLOW for f in got.fallback] == (free.survivors > capacity).tolist()
    assert 0 < got.row_pruned.sum() < 6
    assert_same(got, free)


def test_empty_shapes():
    problem = make_problem(rows=2, keys=20, topk=4)
    for part in (problem.rows(0, 0), dataclasses.replace(problem, topk=0)):
        for mode in Mode:
            selection = select_prefill(part, mode)
            assert selection.topk_indices.shape == selection.scores.shape == (part.seq_len, part.topk)
    no_keys = dataclasses.replace(
        problem,
        k=np.zeros((0, 128), FP8),
        k_scale=np.zeros(0, np.float32),
        cu_seqlen_ks=np.zeros(2, np.int32),
        cu_seqlen_ke=np.zeros(2, np.int32),
    )
    selection = select_prefill(no_keys, Mode.BOTH)
    assert (selection.topk_indices == -1).all()
    assert np.isneginf(selection.scores).all()
    assert selection.prune_rate == 0


@given(ks=st.integers(0, 50), visible=st.integers(0, 60), topk=st.integers(0, 70))
def test_default_seeds(ks, visible, topk):
    seeds = default_seeds(ks, ks + visible, topk)
    assert (np.diff(seeds) > 0).all()
    assert ((seeds >= ks) & (seeds < ks + visible)).all()
    assert min(topk, visible) <= len(seeds)
    if topk:
        assert len(seeds) <= 2 * topk


def test_default_seeds_take_every_older_key_where_there_are_few():
    assert default_seeds(3, 20, 10).tolist() == list(range(3, 20))


def test_results_have_their_types_and_count_from_the_windows_start():
    problem = make_problem(seed=7, rows=3, keys=90, topk=8, windows=[(40, 90), (5, 5), (88, 90)])
    types = {
        "topk_indices": np.int32,
        "scores": np.float32,
        "row_pruned": np.bool_,
        "survivors": np.int64,
        "rescored": np.int64,
        "visible": np.int64,
    }
    for part in (problem, problem.rows(0, 0)):
        for selection in (
            select_prefill(part, Mode.BOTH),
            select_dense(part),
            select_dense(dataclasses.replace(part, q=part.q[:, :2], weights=part.weights[:, :2]), Contract.EXACT),
        ):
            for field, dtype in types.items():
                assert getattr(selection, field).dtype == dtype, field
    assert select_prefill(problem, Mode.BOTH).visible.tolist() == [50, 0, 2]


def test_seed_forms():
    problem = make_problem(seed=7, rows=3, keys=90, topk=8)
    expected = select_prefill(problem, Mode.BOTH, seeds=[np.arange(30)] * 3)
    for seeds in (np.arange(30), np.tile(np.arange(30, dtype=np.int32), (3, 1)), np.append(np.arange(30), [-1, -1])):
        got = select_prefill(problem, Mode.BOTH, seeds=seeds)
        assert (got.survivors == expected.survivors).all()
        assert_same(got, expected)
    with pytest.raises(InvalidProblem) as error:
        select_prefill(problem, Mode.BOTH, seeds=[np.arange(30)] * 2)
    assert str(error.value) == "seeds: got 2 rows, expected 3, or one array shared by all rows"
    with pytest.raises(InvalidProblem) as error:
        select_prefill(problem, Mode.BOTH, survivor_capacity=-1)
    assert str(error.value) == "survivor_capacity: got -1, expected at least 0, or None"
    with pytest.raises(UnsupportedConfiguration, match="sm90"):
        select_prefill(problem, Mode.BOTH, contract=Contract.EXACT)


def test_exact_contract_selects_by_rationals():
    problem = make_problem(seed=8, rows=2, keys=40, heads=4, topk=9, windows=[(0, 40), (5, 11)])
    k_scale = problem.k_scale.copy()
    k_scale[7] = np.nan
    problem = dataclasses.replace(problem, k_scale=k_scale)
    selection = select_dense(problem, Contract.EXACT)
    for row in range(2):
        exact = score_row_exact(problem, row)
        ks, _ = problem.window(row)
        expected = [i + ks if i >= 0 else -1 for i in best_by_brute_force(exact, 9)]
        assert selection.topk_indices[row].tolist() == expected
        for score, index in zip(selection.scores[row], expected):
            if index >= 0:
                assert abs(Fraction(float(score)) - exact[index - ks]) <= abs(exact[index - ks]) / 2**24


def test_contracts_may_disagree():
    """Two keys whose exact order is the reverse of the computed one: the contract decides."""
    q = np.zeros((1, 32, 128), FP8)
    q[0, 0] = np.array([256] + [1.875] * 127)
    k = np.zeros((2, 128), FP8)
    k[0, 0] = 256
    k[1] = np.array([256] + [4] * 127)
    k_scale = np.array([1 + 2.0**-10, 1], np.float32)
    problem = PrefillProblem(
        q=q,
        k=k,
        k_scale=k_scale,
        weights=np.eye(1, 32, dtype=np.float32),
        cu_seqlen_ks=np.zeros(1, np.int32),
        cu_seqlen_ke=np.full(1, 2, np.int32),
        topk=1,
    )
    assert select_dense(problem, Contract.SM90).topk_indices.tolist() == [[0]]
    assert select_dense(problem, Contract.EXACT).topk_indices.tolist() == [[1]]


# ---------------------------------------------------------------------------------------------------------------------
# Decode


def paged(problem: PrefillProblem, next_n: int, page_size: int, contexts: list[int], seed: int = 0) -> PagedProblem:
    """Requests over one shuffled pool of pages that holds the problem's keys once per request."""
    rng = np.random.default_rng(seed)
    batch = len(contexts)
    per_request = -(-problem.seq_len_kv // page_size)
    pages = np.concatenate([pack_pages(problem.k, problem.k_scale, page_size)] * batch)
    order = rng.permutation(len(pages))
    table = np.argsort(order).reshape(batch, per_request).astype(np.int32)
    return PagedProblem(
        q=problem.q[: batch * next_n].reshape(batch, next_n, -1, 128),
        weights=problem.weights[: batch * next_n].reshape(batch, next_n, -1),
        k_pages=pages[order],
        page_table=table,
        context_lens=np.array(contexts, np.int32),
        page_size=page_size,
        topk=problem.topk,
    )


@pytest.mark.parametrize("with_recent", [False, True])
def test_decode_equals_dense_prefill(with_recent):
    problem = make_problem(seed=9, rows=6, keys=150, topk=12)
    k_scale = problem.k_scale.copy()
    k_scale[[3, 70]] = np.nan
    problem = dataclasses.replace(problem, k_scale=k_scale)
    contexts, next_n = [150, 1, 77], 2
    decode = paged(problem, next_n, 64, contexts)
    ends = [max(0, c - next_n + j + 1) for c in contexts for j in range(next_n)]
    same = dataclasses.replace(problem, cu_seqlen_ks=np.zeros(6, np.int32), cu_seqlen_ke=np.array(ends, np.int32))
    dense = select_dense(same)
    recent = None
    if with_recent:
        # The winners of the step before, repeated, with padding and with keys that are not visible any more.
        recent = np.concatenate([dense.topk_indices, dense.topk_indices, np.full((6, 2), 10**6)], axis=1)
        recent[0, :3] = [3, 70, -7]
        recent = recent.reshape(3, 2, -1)
    got = select_decode(decode, recent)
    assert (got.topk_indices.reshape(6, -1) == dense.topk_indices).all()
    assert (got.scores.reshape(6, -1).view(np.uint32) == dense.scores.view(np.uint32)).all()
    if with_recent:
        assert np.isfinite(got.tau[0]).all()
        assert (got.written[0] < 30).all()
        assert np.isneginf(got.tau[1]).all()
    else:
        assert np.isneginf(got.tau).all()
        assert got.written[0, 1] == 148


def test_decode_ties_with_tau_are_written():
    problem = make_problem(seed=10, rows=2, keys=150, topk=12, integer_values=True)
    dense = select_dense(problem)
    got = select_decode(paged(problem, 1, 64, [150, 150]), dense.topk_indices.reshape(2, 1, -1)[:, :, ::-1])
    assert (got.topk_indices.reshape(2, -1) == dense.topk_indices).all()
    for row in range(2):
        assert got.written[row, 0] == (score_row(problem, row) >= got.tau[row, 0]).sum() > 12


def test_decode_threshold_counts_visible_keys_once():
    """The first and the last visible key count as seeds, the one behind does not, and a repeated key counts once."""
    problem = make_problem(seed=10, rows=1, keys=150, topk=3)
    scores = score_row(problem, 0)
    decode = paged(problem, 1, 32, [150])  # a page size that is not the default

    def tau(*recent):
        got = select_decode(decode, np.array(recent, np.int64).reshape(1, 1, -1))
        assert (got.topk_indices.reshape(1, -1) == select_dense(problem).topk_indices).all()
        assert (got.tau.dtype, got.written.dtype, got.scores.dtype) == (np.float32, np.int64, np.float32)
        assert got.topk_indices.dtype == np.int32
        return got.tau[0, 0]

    assert tau(0, 149, 5) == np.sort(scores[[0, 149, 5]])[0]
    assert tau(0, 149, 5, 6) == np.sort(scores[[0, 149, 5, 6]])[-3]
    assert np.isneginf(tau(149, 5, 150))
    assert np.isneginf(tau(149, 5, 5))
    one = dataclasses.replace(decode, topk=1)
    assert select_decode(one, np.array([[[5]]])).tau[0, 0] == scores[5]
    none = select_decode(dataclasses.replace(decode, topk=0), np.array([[[5]]]))
    assert np.isneginf(none.tau[0, 0])


def test_decode_refuses_other_shapes():
    decode = paged(make_problem(seed=9, rows=2, keys=70), 1, 64, [70, 70])
    with pytest.raises(InvalidProblem) as error:
        select_decode(decode, np.zeros((2, 5), np.int32))
    assert str(error.value) == "recent: got [2, 5], expected [2, 1, any]"
    for shape in ((2, 2, 5), (1, 1, 5), (2, 1, 5, 1)):
        with pytest.raises(InvalidProblem, match="recent"):
            select_decode(decode, np.zeros(shape, np.int32))
    assert select_decode(dataclasses.replace(decode, topk=0)).topk_indices.shape == (2, 1, 0)


# ---------------------------------------------------------------------------------------------------------------------


def test_hash_is_over_little_endian_bytes():
    indices, scores = np.array([[3, -1]], np.int32), np.array([[-0.0, -np.inf]], np.float32)
    raw = struct.pack("<ii", 3, -1) + struct.pack("<ff", -0.0, -math.inf)
    assert result_hash(indices, scores) == hashlib.sha256(raw).hexdigest()
    assert result_hash(indices, np.abs(scores)) != result_hash(indices, scores)
    assert result_hash(indices.astype(">i4"), scores.astype(">f4")) == result_hash(indices, scores)
    wide = np.zeros((1, 4), np.int32)
    wide[:, ::2] = indices
    assert result_hash(wide[:, ::2], scores) == result_hash(indices, scores)
