"""The selection as a whole, through the public entry point: every path and mode against the reference, bit for bit."""

import dataclasses

import numpy as np
import pytest
import torch

from dosa_gpu import api, pipeline, plan
from dosa_gpu.plan import Path
from dosa_ref import select
from dosa_ref.problem import PrefillProblem
from dosa_ref.spec import InvalidProblem, Mode, UnsupportedConfiguration
from dosa_verify.fuzz.cases import Case, Special, Values, Windows, build

PATHS = [(Path.DENSE, Mode.BASE), (Path.LITETOPK, Mode.EMIT), *((Path.DOSA, mode) for mode in Mode)]
PATH_IDS = ["dense", "litetopk", *(mode.value for mode in Mode)]


def tensors(problem, device):
    def fp8(array):
        return torch.from_numpy(np.ascontiguousarray(array).view(np.uint8)).to(device).view(torch.float8_e4m3fn)

    plain = (problem.k_scale, problem.weights, problem.cu_seqlen_ks, problem.cu_seqlen_ke)
    return fp8(problem.q), fp8(problem.k), *(torch.from_numpy(array.copy()).to(device) for array in plain)


def run(problem, device, path=Path.DOSA, mode=Mode.BOTH, **options):
    return api.select_prefill(*tensors(problem, device), problem.topk, path=path, mode=mode, **options)


def assert_equals_reference(selection, problem):
    want = select.select_dense(problem)
    np.testing.assert_array_equal(selection.topk_indices.cpu().numpy(), want.topk_indices)
    got_bits = selection.scores.cpu().numpy().view(np.uint32)
    np.testing.assert_array_equal(got_bits, want.scores.view(np.uint32))


LEARNED = Case(seed=3, num_heads=32, rows=12, keys=1500, topk=20, values=Values.LEARNED, columns=16)


@pytest.mark.parametrize(("path", "mode"), PATHS, ids=PATH_IDS)
class TestAllPaths:
    def test_most_rows_of_a_learned_problem_are_pruned_and_exact(self, path, mode, device):
        problem = build(LEARNED)
        selection = run(problem, device, path, mode, columns=16)
        assert_equals_reference(selection, problem)
        stats = selection.stats
        assert stats.path == path.value
        pruning = path is Path.DOSA and mode in (Mode.PRUNE, Mode.BOTH)
        assert all(stats.row_pruned) == pruning
        assert (stats.prune_rate > 0.3) == pruning, stats.prune_rate
        assert stats.fallback == {}

    @pytest.mark.parametrize("windows", [Windows.RAGGED, Windows.SHORT, Windows.CAUSAL])
    def test_windows(self, path, mode, windows, device):
        case = dataclasses.replace(LEARNED, windows=windows, rows=14, keys=700, num_heads=64)
        problem = build(case)
        assert_equals_reference(run(problem, device, path, mode, columns=8), problem)

    @pytest.mark.parametrize("special", list(Special))
    def test_special_values(self, path, mode, special, device):
        case = dataclasses.replace(LEARNED, specials=(special,), rows=4, keys=400, windows=Windows.RAGGED)
        problem = build(case)
        assert_equals_reference(run(problem, device, path, mode), problem)

    def test_a_full_survivor_buffer_drops_nothing(self, path, mode, device):
        problem = build(dataclasses.replace(LEARNED, values=Values.NORMAL, rows=6))
        selection = run(problem, device, path, mode, survivor_capacity=30)
        assert_equals_reference(selection, problem)
        overflowed = selection.stats.fallback.get("survivor_overflow", [])
        assert (len(overflowed) > 0) == (path is not Path.DENSE and mode is not Mode.BASE)

    def test_few_heads_are_padded(self, path, mode, device):
        problem = build(dataclasses.replace(LEARNED, num_heads=20, rows=3, keys=300))
        assert_equals_reference(run(problem, device, path, mode), problem)

    def test_a_small_workspace_means_more_blocks_not_other_keys(self, path, mode, device):
        problem = build(dataclasses.replace(LEARNED, rows=10, keys=2300))
        # On a GPU a top-K alone takes 13 MB at this K.
        limit = (5 if device == "cpu" else 20) * 2**20
        small = run(problem, device, path, mode, workspace_bytes=limit)
        assert small.stats.workspace_bytes <= limit
        assert_equals_reference(small, problem)

    def test_empty_shapes(self, path, mode, device):
        problem = build(LEARNED)
        none = problem.rows(0, 0)
        assert run(none, device, path, mode).topk_indices.shape == (0, problem.topk)
        zero = dataclasses.replace(problem, topk=0)
        assert run(zero, device, path, mode).topk_indices.shape == (len(problem.q), 0)
        nothing = dataclasses.replace(
            problem, k=problem.k[:0], k_scale=problem.k_scale[:0], cu_seqlen_ke=np.zeros_like(problem.cu_seqlen_ke)
        )
        got = run(nothing, device, path, mode)
        assert (got.topk_indices == -1).all()
        assert (got.scores == -torch.inf).all()

    def test_an_inverted_window_is_an_empty_row(self, path, mode, device):
        problem = build(dataclasses.replace(LEARNED, rows=3, keys=300))
        ks, ke = problem.cu_seqlen_ks.copy(), problem.cu_seqlen_ke.copy()
        ks[1], ke[1] = 200, 100
        problem = dataclasses.replace(problem, cu_seqlen_ks=ks, cu_seqlen_ke=ke)
        assert_equals_reference(run(problem, device, path, mode), problem)

    def test_tensors_that_are_not_contiguous(self, path, mode, device):
        problem = build(dataclasses.replace(LEARNED, rows=4, keys=300))
        strided = []
        for tensor in tensors(problem, device):
            raw = tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor
            wide = torch.full((*raw.shape[:-1], 2 * raw.shape[-1]), 127 if raw.dtype == torch.uint8 else 0).to(raw)
            wide[..., ::2] = raw
            strided.append(
                wide[..., ::2].view(tensor.dtype) if raw.dtype != torch.uint8 else wide.view(tensor.dtype)[..., ::2]
            )
        assert not any(part.is_contiguous() for part in strided)
        selection = api.select_prefill(*strided, problem.topk, path=path, mode=mode)
        assert_equals_reference(selection, problem)


class TestPlan:
    @pytest.mark.parametrize("num_keys", [16448, 64064, 131071, 500])
    @pytest.mark.parametrize("workspace_bytes", [9458176, 12 * 2**20, 64 * 2**20])
    def test_chunks_are_whole_tiles_and_rows_fit_either_way(self, num_keys, workspace_bytes):
        sizes = plan.plan_prefill(
            device_type="cpu", num_heads=32, num_rows=9, num_keys=num_keys, topk=4, mode=Mode.BOTH, columns=8,
            workspace_bytes=workspace_bytes, survivor_capacity=1,
        )  # fmt: skip
        assert sizes.key_chunk % 64 == sizes.dense_chunk % 64 == 0
        dense = 4 * sizes.dense_chunk + 2 * (8 * 4 + 4) + 32 * 132
        assert sizes.max_rows * dense <= workspace_bytes

    @pytest.mark.parametrize(("path", "mode"), PATHS, ids=PATH_IDS)
    def test_a_call_keeps_within_the_stated_size(self, path, mode, device):
        problem = build(dataclasses.replace(LEARNED, rows=20, keys=3000, topk=5))
        sizes = {"num_rows": 20, "num_heads": 32, "num_keys": 3000, "topk": 5, "path": path, "mode": mode}
        stated = api.workspace_size(**sizes, device_type=device)
        assert run(problem, device, path, mode).stats.workspace_bytes <= stated < 2**28
        assert api.workspace_size(**sizes, device_type=device, workspace_bytes=64 * 2**20) <= 64 * 2**20

    @pytest.mark.parametrize(("path", "mode"), PATHS, ids=PATH_IDS)
    def test_the_devices_memory_stays_within_the_stated_size(self, path, mode, device):
        if device == "cpu":
            pytest.skip("memory is measured on a GPU only")
        problem = build(dataclasses.replace(LEARNED, rows=300, keys=9000, topk=50))
        given = tensors(problem, device)
        stated = api.workspace_size(num_rows=300, num_heads=32, num_keys=9000, topk=50, path=path, mode=mode)
        api.select_prefill(*given, 50, path=path, mode=mode)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        selection = api.select_prefill(*given, 50, path=path, mode=mode)
        torch.cuda.synchronize()
        outputs = torch.cuda.memory_allocated() - before
        assert outputs >= selection.scores.nbytes + selection.topk_indices.nbytes
        assert torch.cuda.max_memory_allocated() - before - outputs <= stated

    def test_sizes_at_a_million_keys(self):
        sizes = {"num_rows": 32768, "num_heads": 64, "num_keys": 2**20, "topk": 2048}
        for path in Path:
            assert 2**30 < api.workspace_size(**sizes, path=path) <= 2**31
        with pytest.raises(UnsupportedConfiguration, match="num_heads: got 65"):
            api.workspace_size(**{**sizes, "num_heads": 65})

    def test_the_plan_counts_the_scratch_of_a_top_k(self):
        from dosa_gpu.kernels import topk as kernel

        for kind in ("cpu", "cuda"):
            for topk in (1, 20, 255, 256, 2048):
                stated = plan.topk_scratch(kind, topk)
                sizes = [kernel.scratch_bytes(kind, rows, topk, width)
                         for rows in (1, 7, 300, 396, 4096) for width in (10, 2000, 20000, 10**6)]  # fmt: skip
                assert stated / 4 < max(sizes) <= stated

    def test_rows_that_fall_back_keep_within_the_workspace(self, device):
        problem = build(dataclasses.replace(LEARNED, rows=20, keys=4000, topk=1))
        problem = dataclasses.replace(problem, weights=np.full_like(problem.weights, np.nan))
        hints = torch.arange(8, dtype=torch.int32, device=device)
        limit = (11 if device == "cpu" else 30) * 2**20
        selection = run(problem, device, workspace_bytes=limit, survivor_capacity=1, columns=8, hint_indices=hints)
        assert selection.stats.workspace_bytes <= limit
        assert (selection.topk_indices == -1).all()


class TestOddButValid:
    def test_an_empty_row_may_start_behind_the_last_key(self, device):
        problem = build(dataclasses.replace(LEARNED, rows=3, keys=300))
        ks, ke = problem.cu_seqlen_ks.copy(), problem.cu_seqlen_ke.copy()
        ks[1], ke[1] = 2**31 - 1, 0
        problem = dataclasses.replace(problem, cu_seqlen_ks=ks, cu_seqlen_ke=ke)
        for path, mode in PATHS:
            assert_equals_reference(run(problem, device, path, mode), problem)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
    def test_torchs_default_dtype_does_not_matter(self, dtype, device):
        problem = build(dataclasses.replace(LEARNED, rows=2, keys=900, topk=515))
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            for path, mode in PATHS:
                selection = run(problem, device, path, mode)
                assert selection.scores.dtype == torch.float32
                assert_equals_reference(selection, problem)
        finally:
            torch.set_default_dtype(before)

    def test_more_rows_than_keys(self, device):
        problem = build(dataclasses.replace(LEARNED, rows=18, keys=12, topk=4))
        assert_equals_reference(run(problem, device), problem)


class TestStats:
    def test_short_rows_are_scored_densely_and_say_so(self, device):
        problem = build(dataclasses.replace(LEARNED, windows=Windows.SHORT, rows=6, keys=400))
        stats = run(problem, device).stats
        length = problem.cu_seqlen_ke - problem.cu_seqlen_ks
        assert stats.fallback["short_row"] == np.flatnonzero((length > 0) & (length <= 20)).tolist()
        assert [row for row in range(6) if stats.row_pruned[row]] == np.flatnonzero(length > 20).tolist()

    def test_rows_that_the_bound_cannot_serve(self, device):
        problem = build(dataclasses.replace(LEARNED, rows=4))
        q, weights, scale = problem.q.copy(), problem.weights.copy(), problem.k_scale.copy()
        q.view(np.uint8)[0, 3, 9] = 0x7F
        weights[1] *= np.float32(2.0**80)
        problem = dataclasses.replace(problem, q=q, weights=weights, k_scale=scale)
        selection = run(problem, device)
        assert_equals_reference(selection, problem)
        assert selection.stats.fallback == {"non_finite_row": [0], "row_magnitude": [1]}
        assert selection.stats.row_prune_rate[:2].tolist() == [0.0, 0.0]

    def test_all_keys_nan_leaves_no_seed(self, device):
        problem = build(dataclasses.replace(LEARNED, rows=2, keys=200))
        problem = dataclasses.replace(problem, k_scale=np.full_like(problem.k_scale, np.nan))
        selection = run(problem, device)
        assert (selection.topk_indices == -1).all()
        assert selection.stats.fallback == {"too_few_seeds": [0, 1]}

    def test_rates_count_the_sample_as_rescored(self, device):
        problem = build(LEARNED)
        stats = run(problem, device, columns=16).stats
        rescored = np.rint(1500 * (1 - stats.row_prune_rate)).astype(np.int64)
        # A row sees nearly all of the 256 keys that are drawn.
        assert (rescored - stats.survivors <= 256).all()
        assert (rescored - stats.survivors >= 200).all()
        # Quotients in float64; the sums behind them are exact.
        np.testing.assert_allclose(stats.prune_rate, np.mean(stats.row_prune_rate), rtol=1e-12)


class TestChunks:
    @pytest.mark.parametrize("mode", [Mode.PRUNE, Mode.EMIT, Mode.BOTH])
    @pytest.mark.parametrize("values", [Values.LEARNED, Values.FEW_KEYS])
    def test_lists_fill_up_over_many_chunks(self, mode, values, device, monkeypatch):
        problem = build(dataclasses.replace(LEARNED, values=values, rows=7, keys=1400, topk=9))
        monkeypatch.setattr(plan, "KEY_CHUNK", 128)
        monkeypatch.setattr(plan, "MIN_LIST", 64)
        plain, trimmed = pipeline.launch_trim, []

        def trim(index, score, count, topk, tau):
            trimmed.append(int((count > topk + topk // 4).sum()))
            plain(index, score, count, topk, tau)

        def low_tau(score, start, end, rank, hard_ranks, tau, hard, count):
            plain_kth(score, start, end, rank, hard_ranks, tau, hard, count)
            tau -= tau.abs() * 0.75

        # Guesses that are worth little: most keys of the first chunks reach their tau.
        plain_kth = pipeline.launch_kth
        monkeypatch.setattr(pipeline, "launch_kth", low_tau)
        monkeypatch.setattr(pipeline, "launch_trim", trim)
        assert_equals_reference(run(problem, device, mode=mode, columns=8), problem)
        assert (sum(trimmed) > 0) == (mode is not Mode.PRUNE)

    def test_blocks_land_in_order_whatever_becomes_of_their_rows(self, device, monkeypatch):
        problem = build(dataclasses.replace(LEARNED, windows=Windows.SHORT, rows=29, keys=700))
        monkeypatch.setattr(plan, "MAX_ROWS", 4)
        seen = []
        selection = run(problem, device, columns=8, on_progress=lambda done, rows: seen.append((done, rows)))
        assert_equals_reference(selection, problem)
        assert seen == sorted(set(seen))
        assert seen[-1] == (29, 29)


class TestFaultsInside:
    """What the pipeline does when a stage goes wrong: the row is recomputed, never a key lost."""

    @pytest.mark.parametrize(("hints", "reason"), [(None, "guess_too_high"), ([3, 700], "threshold_not_met")])
    def test_tau_too_high_is_noticed_and_the_row_recomputed(self, hints, reason, device, monkeypatch):
        problem = build(LEARNED)
        plain = pipeline.launch_kth

        def too_high(score, start, end, rank, hard_ranks, tau, hard, count):
            plain(score, start, end, rank, hard_ranks, tau, hard, count)
            tau += tau.abs() * 100

        monkeypatch.setattr(pipeline, "launch_kth", too_high)
        given = None if hints is None else torch.tensor(hints, device=device)
        selection = run(problem, device, hint_indices=given)
        assert_equals_reference(selection, problem)
        assert selection.stats.fallback == {reason: list(range(12))}

    def test_lost_keys_are_told_from_a_guess_that_is_too_high(self, device, monkeypatch):
        problem = build(LEARNED)
        plain = pipeline.launch_bound

        def too_low(column, coefficient, slack, *rest):
            plain(column, coefficient * 0.01, slack * 0.01, *rest)

        monkeypatch.setattr(pipeline, "launch_bound", too_low)
        selection = run(problem, device, columns=8)
        assert_equals_reference(selection, problem)
        # A row that kept K of its best keys by luck is right, and not counted.
        assert set(selection.stats.fallback) == {"threshold_not_met"}
        assert len(selection.stats.fallback["threshold_not_met"]) > 6

    def test_a_threshold_from_all_keys_is_no_guess(self, device, monkeypatch):
        problem = build(dataclasses.replace(LEARNED, keys=250))
        plain = pipeline.launch_kth
        assert run(problem, device).stats.fallback == {}

        def too_high(score, start, end, rank, hard_ranks, tau, hard, count):
            plain(score, start, end, rank, hard_ranks, tau, hard, count)
            tau += tau.abs() * 100

        monkeypatch.setattr(pipeline, "launch_kth", too_high)
        assert run(problem, device).stats.fallback == {"threshold_not_met": list(range(12))}

    def test_a_bound_too_low_for_some_keys_loses_them(self, device, monkeypatch):
        # The mutant that the whole guard is for: if this passed, the tests above would prove nothing. tau is lowered,
        # so that enough other keys reach it and nothing looks wrong inside.
        problem = build(LEARNED)
        plain_bound, plain_kth = pipeline.launch_bound, pipeline.launch_kth

        def too_low(*arguments):
            arguments = list(arguments)
            arguments[6] = arguments[6].clone()
            arguments[6][:200] = 0.0
            plain_bound(*arguments)

        def low_tau(score, start, end, rank, hard_ranks, tau, hard, count):
            plain_kth(score, start, end, rank, hard_ranks, tau, hard, count)
            tau -= tau.abs() * 0.75

        monkeypatch.setattr(pipeline, "launch_bound", too_low)
        monkeypatch.setattr(pipeline, "launch_kth", low_tau)
        selection = run(problem, device)
        assert selection.stats.fallback == {}
        assert selection.topk_indices.tolist() != select.select_dense(problem).topk_indices.tolist()


class TestChoices:
    def test_texts_are_as_good_as_members(self, device):
        problem = build(LEARNED)
        stats = run(problem, device, "dosa", "prune").stats
        assert (stats.path, stats.mode, all(stats.row_pruned)) == ("dosa", "prune", True)

    def test_odd_hints_change_nothing(self, device):
        problem = build(LEARNED).rows(0, 9)
        odd = torch.tensor([[5, 5, -7], [2**40, 1499, 1499]], device=device)
        assert_equals_reference(run(problem, device, hint_indices=odd), problem)

    def test_hints_for_rows_that_need_no_bound(self, device):
        problem = dataclasses.replace(build(dataclasses.replace(LEARNED, rows=2, keys=30)), topk=40)
        assert_equals_reference(run(problem, device, hint_indices=torch.tensor([3, 5], device=device)), problem)

    @pytest.fixture
    def any_size_pays(self, monkeypatch):
        monkeypatch.setattr(plan, "TRIAL_MS", 0.0)
        monkeypatch.setattr(plan, "LEAST_GAIN", 1e9)

    def test_automatic_path(self, device, any_size_pays):
        long_rows = build(LEARNED)
        assert run(long_rows, device, Path.AUTO).stats.path == "dosa"
        short_rows = dataclasses.replace(long_rows, topk=400)
        selection = run(short_rows, device, Path.AUTO)
        assert selection.stats.path == "dense"
        assert_equals_reference(selection, short_rows)

    def test_a_small_call_is_not_worth_a_trial_unless_the_columns_are_given(self, device):
        problem = build(LEARNED)
        selection = run(problem, device, Path.AUTO)
        assert selection.stats.path == "dense"
        assert_equals_reference(selection, problem)
        assert run(problem, device, Path.AUTO, columns=8).stats.path == "dosa"

    @pytest.mark.parametrize(
        ("rows", "keys", "pays"), [(4096, 2**17, False), (4096, 2**20, True), (16384, 2**18, True)]
    )
    def test_large_calls_may_pay(self, rows, keys, pays):
        sizes = plan.plan_prefill(
            device_type="cuda", num_heads=32, num_rows=rows, num_keys=keys, topk=2048, mode=Mode.BOTH, columns=None,
            workspace_bytes=2**31, survivor_capacity=None,
        )  # fmt: skip
        assert sizes.may_pay(rows) == pays

    def test_automatic_path_gives_up_on_a_slack_bound(self, device, monkeypatch, any_size_pays):
        problem = build(dataclasses.replace(LEARNED, values=Values.NORMAL, keys=900))
        # What became of the first block is read when the third is due.
        monkeypatch.setattr(plan, "MAX_ROWS", 4)
        selection = run(problem, device, Path.AUTO)
        assert selection.stats.fallback["slack_bound"] == [8, 9, 10, 11]
        assert_equals_reference(selection, problem)
        assert "slack_bound" not in run(problem, device, Path.DOSA).stats.fallback

    def test_a_trial_chooses_the_columns(self, device, monkeypatch, any_size_pays):
        monkeypatch.setattr(plan, "TRIALS_FROM_PAIRS", 1)
        monkeypatch.setattr(plan, "TRIAL_COLUMNS", (8, 16))
        problem = build(dataclasses.replace(LEARNED, rows=3))
        seen = []
        plain = plan.PrefillPlan.pruned_cost

        def note(self, columns, shares, peaks=None):
            if peaks is not None:
                seen.append((columns, shares.mean()))
                assert (peaks <= 1).all()
                # Here all keys lie in one part.
                np.testing.assert_allclose(peaks, shares)
            return plain(self, columns, shares, peaks)

        monkeypatch.setattr(plan.PrefillPlan, "pruned_cost", note)
        # Columns for nothing: the most are taken.
        costs = dict.fromkeys(plan.SUPPORTED_COLUMNS, 0.0)
        monkeypatch.setattr(plan, "BOUND_COST", costs)
        monkeypatch.setattr(plan, "PREPARE_COST", {32: costs})
        selection = run(problem, device, Path.DOSA)
        assert_equals_reference(selection, problem)
        assert [columns for columns, _ in seen] == [8, 12, 16]
        assert 1 > seen[0][1] > seen[1][1] > seen[2][1] > 0
        assert selection.stats.columns == 16
        # Dear columns: the fewest.
        monkeypatch.setattr(plan, "BOUND_COST", {columns: 1e5 * columns for columns in plan.SUPPORTED_COLUMNS})
        assert run(problem, device, Path.DOSA).stats.columns == 8
        # Dearer than scoring every pair once.
        dense = run(problem, device, Path.AUTO)
        assert_equals_reference(dense, problem)
        assert dense.stats.columns == 0
        assert dense.stats.fallback["slack_bound"] == [0, 1, 2]

    def test_rates_between_two_numbers_of_columns(self):
        tried, rates = np.array([8, 16, 32]), np.array([[0.5, 0.0], [0.125, 0.0], [0.0078125, 1e-9]])
        for columns, want in ((8, 0.5), (12, 0.25), (16, 0.125), (24, 0.03125), (32, 0.0078125)):
            # Logarithms in float64.
            np.testing.assert_allclose(pipeline._between(tried, rates, columns), [want, 1e-9], rtol=1e-12)

    def test_a_row_that_overflows_costs_a_dense_one_more(self):
        sizes = plan.plan_prefill(
            device_type="cuda", num_heads=32, num_rows=9, num_keys=2**17, topk=2048, mode=Mode.BOTH, columns=8,
            workspace_bytes=2**31, survivor_capacity=None,
        )  # fmt: skip
        held = sizes.capacity / sizes.key_chunk
        costs = [sizes.pruned_cost(8, np.array([0.0]), np.array([peak])) for peak in (0.0, held, 1.01 * held)]
        assert costs[0] == costs[1] == pytest.approx(costs[2] - sizes.dense_cost())

    def test_hints_raise_tau_and_change_nothing_else(self, device):
        problem = build(LEARNED).rows(0, 1)
        plain = run(problem, device)
        winners = plain.topk_indices[0][plain.topk_indices[0] >= 0]
        more = torch.cat([winners, torch.tensor([1499, 1498, 7], dtype=torch.int32, device=device)])
        hinted = run(problem, device, hint_indices=more)
        assert_equals_reference(hinted, problem)
        # Hints outside the window must not be used.
        outside = torch.arange(1500, dtype=torch.int32, device=device)
        moved = dataclasses.replace(problem, cu_seqlen_ks=np.array([900], np.int32))
        assert_equals_reference(run(moved, device, hint_indices=outside), moved)

    def test_progress_ends_at_the_number_of_rows(self, device):
        seen = []
        run(build(LEARNED), device, on_progress=lambda done, rows: seen.append((done, rows)))
        assert seen == [(12, 12)]

    def test_the_registered_operator(self, device):
        from dosa_gpu import ops  # noqa: F401

        problem = build(LEARNED).rows(0, 3)
        indices, scores = torch.ops.dosa.prefill_topk(*tensors(problem, device), problem.topk)
        assert_equals_reference(
            api.Selection(topk_indices=indices, scores=scores, stats=run(problem, device).stats), problem
        )
        with torch._subclasses.FakeTensorMode() as fake:
            shaped = [fake.from_tensor(part) for part in tensors(problem, "cpu")]
            index, score = torch.ops.dosa.prefill_topk(*shaped, problem.topk)
        assert (index.shape, index.dtype, score.dtype) == ((3, 20), torch.int32, torch.float32)

    def test_the_same_bits_every_time_and_at_any_place_in_a_batch(self, device):
        problem = build(dataclasses.replace(LEARNED, values=Values.FEW_KEYS, keys=500))
        first, second = run(problem, device), run(problem, device)
        assert torch.equal(first.topk_indices, second.topk_indices)
        alone = run(problem.rows(10, 11), device)
        assert torch.equal(alone.topk_indices[0], first.topk_indices[10])


BAD = {
    "q": lambda p: {"q": p.q.astype(np.float32)},
    "weights": lambda p: {"weights": p.weights[:, :-1]},
    "k": lambda p: {"k": p.k[:, :64]},
    "k_scale": lambda p: {"k_scale": p.k_scale[:-1]},
    "cu_seqlen_ks": lambda p: {"cu_seqlen_ks": p.cu_seqlen_ks - 1},
    "cu_seqlen_ke": lambda p: {"cu_seqlen_ke": p.cu_seqlen_ke + 1},
}


class TestBadInput:
    @pytest.mark.parametrize("field", BAD)
    def test_names_the_field(self, field, device):
        problem = build(dataclasses.replace(LEARNED, rows=2, keys=100))
        arrays = {name: getattr(problem, name) for name in PrefillProblem.__dataclass_fields__ if name != "topk"}
        arrays.update(BAD[field](problem))
        given = {}
        for name, array in arrays.items():
            bits = torch.from_numpy(
                np.ascontiguousarray(array).view(np.uint8) if array.dtype == problem.q.dtype else array
            )
            given[name] = (
                bits.to(device).view(torch.float8_e4m3fn) if array.dtype == problem.q.dtype else bits.to(device)
            )
        with pytest.raises(InvalidProblem) as error:
            api.select_prefill(**given, topk=5)
        assert error.value.field == field

    @pytest.mark.parametrize(
        ("options", "error", "words"),
        [
            ({"topk": -1}, InvalidProblem, "topk: got -1"),
            ({"topk": 2049}, UnsupportedConfiguration, "at most 2048"),
            ({"topk": 2.5}, InvalidProblem, "topk"),
            ({"columns": 13}, UnsupportedConfiguration, "columns"),
            ({"workspace_bytes": 0}, InvalidProblem, "workspace_bytes"),
            ({"workspace_bytes": 4096}, UnsupportedConfiguration, "needs at least"),
            ({"survivor_capacity": 0}, InvalidProblem, "survivor_capacity"),
            ({"survivor_capacity": True}, InvalidProblem, "survivor_capacity: got True"),
            ({"columns": 16.0}, InvalidProblem, "columns: got 16.0"),
            ({"workspace_bytes": "2G"}, InvalidProblem, "workspace_bytes: got '2G'"),
            ({"hint_indices": torch.ones(3)}, InvalidProblem, "hint_indices"),
            ({"hint_indices": [1, 2]}, InvalidProblem, "hint_indices: got list, expected a torch tensor"),
            ({"mode": "junk"}, InvalidProblem, "mode: got 'junk', expected base or prune or emit or both"),
            ({"path": "fast"}, InvalidProblem, "path: got 'fast'"),
        ],
    )
    def test_options(self, options, error, words, device):
        problem = build(dataclasses.replace(LEARNED, rows=2, keys=100))
        topk = options.pop("topk", 5) if "topk" in options else 5
        with pytest.raises(error, match=words):
            api.select_prefill(*tensors(problem, device), topk, **{"path": Path.DOSA, **options})

    def test_too_many_heads(self, device):
        problem = build(dataclasses.replace(LEARNED, rows=1, keys=50))
        _, k, scale, _, ks, ke = tensors(problem, device)
        many = torch.zeros(1, 65, 128).to(torch.float8_e4m3fn).to(device)
        with pytest.raises(UnsupportedConfiguration, match="num_heads: got 65"):
            api.select_prefill(many, k, scale, torch.zeros(1, 65, device=device), ks, ke, 5)

    def test_what_is_not_a_tensor(self, device):
        with pytest.raises(InvalidProblem, match="q: got list, expected a torch tensor"):
            api.select_prefill([1], *tensors(build(LEARNED), device)[1:], 5)
