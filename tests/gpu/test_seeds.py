"""Seeds, sampled keys, the lists that emitted keys wait in, and the last check of a row."""

import numpy as np
import pytest
import torch

from dosa_gpu import seeds
from dosa_gpu.kernels import append, finish, mark_seeds, open_rows, sample, sample_keys


def test_a_groups_bits_are_hints_newest_and_spread_inside_its_span(random, device):
    hints = random.permutation(900)[:40].astype(np.int32)
    ks = torch.tensor([0, 9, 5, 0, 100, 120, 0, 300, 870], dtype=torch.int32, device=device)
    ke = torch.tensor([999, 1000, 990, 0, 280, 300, 0, 200, 880], dtype=torch.int32, device=device)
    words = torch.zeros(3, 40, dtype=torch.int32, device=device)
    start, end = (torch.empty(3, dtype=torch.int32, device=device) for _ in range(2))
    mark_seeds.launch_mark_seeds(torch.from_numpy(hints).to(device), ks, ke, 25, 16, 4, words, start, end)
    spans = [(0, 1000), (100, 300), (870, 880)]
    assert list(zip(start.tolist(), end.tolist(), strict=True)) == spans
    bits = np.unpackbits(words.cpu().numpy().view(np.uint8), axis=1, bitorder="little")
    for group, (low, high) in enumerate(spans):
        wanted = {key for key in hints.tolist() if low <= key < high} | set(range(max(low, high - 25), high))
        wanted |= {low + place * (high - low) // 16 for place in range(16)}
        assert set(np.flatnonzero(bits[group])) == wanted


@pytest.mark.parametrize(("low", "high", "count"), [(0, 1000, 64), (70, 1070, 333), (5, 105, 100), (3, 4, 1)])
def test_a_sample_is_spread_over_the_span_and_windows_count_its_places(low, high, count, random, device):
    keys, rows = 1100, 140
    k = torch.from_numpy(random.integers(0, 127, (keys, 128), dtype=np.uint8)).to(device)
    scale = torch.from_numpy(random.uniform(0.5, 2, keys).astype(np.float32)).to(device)
    ks = random.integers(low, high + 1, rows).astype(np.int32)
    ke = np.maximum(ks, random.integers(low, high + 1, rows)).astype(np.int32)
    ks[:2], ke[:2] = low, high
    place = torch.full((count,), -9, dtype=torch.int32, device=device)
    codes, scales = torch.empty(count, 128, dtype=torch.uint8, device=device), torch.empty(count, device=device)
    windows = [torch.full((rows + 1,), -9, dtype=torch.int32, device=device) for _ in range(3)]
    given = [torch.from_numpy(part).to(device) for part in (ks, ke)]
    parts = [part[:rows] for part in windows]
    sample.launch_sample(k, scale, *given, low, high, 20, (place, codes, scales), parts)
    drawn = place.cpu().numpy()
    # One key in each stretch.
    edges = low + np.arange(count + 1) * (high - low) // count
    assert ((drawn >= edges[:-1]) & (drawn < edges[1:])).all()
    assert torch.equal(codes, k[place.long()])
    assert torch.equal(scales, scale[place.long()])
    start, end, rank = (part.cpu().numpy() for part in windows)
    assert (start[-1], end[-1], rank[-1]) == (-9, -9, -9)
    np.testing.assert_array_equal(start[:rows], np.searchsorted(drawn, ks))
    np.testing.assert_array_equal(end[:rows], np.searchsorted(drawn, ke))
    drawn, visible = (end - start)[:rows].astype(np.float64), np.maximum(ke - ks, 1)
    expected, left = drawn * 20 / visible, 1 - drawn / visible
    want = np.ceil(expected + sample.SPREADS * np.sqrt(expected * np.maximum(left, 0)) + sample.MORE * left)
    want = np.where(drawn == ke - ks, 20, want)
    # float32 may round a rank up that lies at a whole number.
    assert (np.abs(rank[:rows] - want) <= (np.abs(want - np.rint(want)) < 1e-3)).all()


def test_the_study_guesses_as_the_kernels_do():
    from dosa_verify import pruning_study

    assert (pruning_study.GUESS_SPREADS, pruning_study.GUESS_MORE) == (sample.SPREADS, sample.MORE)


def test_a_guess_is_rarely_too_high_and_not_far_too_low(random, device):
    keys, rows, topk, count = 40_000, 400, 640, 1024
    ks, ke = (torch.full((rows,), value, dtype=torch.int32, device=device) for value in (0, keys))
    place = torch.empty(count, dtype=torch.int32, device=device)
    codes, scales = torch.empty(count, 128, dtype=torch.uint8, device=device), torch.empty(count, device=device)
    windows = [torch.empty(rows, dtype=torch.int32, device=device) for _ in range(3)]
    k, scale = torch.zeros(keys, 128, dtype=torch.uint8, device=device), torch.ones(keys, device=device)
    sample.launch_sample(k, scale, ks, ke, 0, keys, topk, (place, codes, scales), windows)
    score = random.normal(0, 1, (rows, keys)).astype(np.float32)
    score[::2] = np.sort(score[::2], axis=1)
    score[::8, ::2] -= 50
    guessed = -np.sort(-score[:, place.cpu().numpy()], axis=1)[:, int(windows[2][0]) - 1]
    reached = (score >= guessed[:, None]).sum(1)
    assert (reached >= topk).all()
    assert reached.mean() < 3.2 * topk


def test_rows_that_cannot_be_served_are_closed(random, device):
    rows = 300
    tau = random.normal(0, 1, rows).astype(np.float32)
    tau[[3, 299]] = np.nan
    ks = random.integers(0, 50, rows).astype(np.int32)
    ke = ks + random.integers(0, 50, rows).astype(np.int32)
    bound_state = np.where(np.arange(rows) % 7 == 2, 2, 0).astype(np.int32)
    for given in (bound_state, None):
        out = [torch.full((rows + 1,), -9, dtype=dtype, device=device) for dtype in (torch.int32,) * 2]
        out += [torch.full((rows + 1,), -9.0, device=device)]
        out += [torch.full((rows + 1,), -9, dtype=torch.int32, device=device) for _ in range(3)]
        arrays = [None if array is None else torch.from_numpy(array).to(device) for array in (tau, ks, ke, given)]
        open_rows.launch_open_rows(*arrays, *(part[:rows] for part in out))
        state, end, raised, *zeros = (part.cpu().numpy() for part in out)
        want = np.zeros(rows, np.int32) if given is None else given
        np.testing.assert_array_equal(state[:rows], want)
        np.testing.assert_array_equal(end[:rows], np.where(np.isnan(tau) | (want != 0), ks, ke))
        np.testing.assert_array_equal(raised[:rows].view(np.int32), tau.view(np.int32))
        assert all((part[:rows] == 0).all() for part in zeros)
        assert all(part[rows] == -9 for part in (state, end, raised, *zeros))


def test_a_rows_own_seeds_are_distinct_visible_and_enough(device):
    ks = torch.tensor([0, 5, 100, 40, 0], dtype=torch.int32, device=device)
    ke = torch.tensor([1000, 65, 161, 40, 61], dtype=torch.int32, device=device)
    lists = seeds.own_seeds(ks, ke, 60)
    for row in range(5):
        found = lists[row][lists[row] >= 0].tolist()
        assert len(found) == len(set(found)) == min(60, max(ke[row] - ks[row], 0))
        assert all(ks[row] <= key < ke[row] for key in found)


@pytest.mark.parametrize("below", [0, 1, 5, 16, 17, 1500])
def test_sampled_keys_lie_evenly_below_tau_and_in_the_window(below, random, device):
    width = 3000
    lists = torch.from_numpy(random.permutation(10**6)[: 2 * width].astype(np.int32).reshape(2, width)).to(device)
    score = torch.full((3, width), 2.0, device=device)
    score[:, ::7] = torch.nan
    places = np.sort(random.permutation(np.setdiff1d(np.arange(width), np.arange(0, width, 7)))[:below])
    score[2, torch.from_numpy(places).to(device)] = 0.5
    # Too low, and outside the places that count.
    score[2, 7] = 0.25
    start, end = (torch.tensor(part, dtype=torch.int32, device=device) for part in ([0, 0, 1], [width] * 3))
    score[2, 0] = 0.5
    hard = torch.full((3,), 0.3, device=device)
    found = torch.full((3, 32), -559038737, dtype=torch.int32, device=device)
    ks = torch.tensor([0, 7, 2**31 - 5], dtype=torch.int32, device=device)
    ke = torch.tensor([2**31 - 1, 7, 2**31 - 1], dtype=torch.int32, device=device)
    tau = torch.full((3,), 1.0, device=device)
    sample_keys.launch_sample_keys(lists, score, start, end, tau, hard, ks, ke, 2, found)
    assert (found[:2, :16] == -1).all()
    got = found[2, :16].tolist()
    if below >= 16:
        assert got == [lists[1, places[-(-slot * below // 16)]].item() for slot in range(16)]
    else:
        assert sorted(key for key in got if key >= 0) == sorted(lists[1, torch.from_numpy(places)].tolist())
        assert got.count(-1) == 16 - below
    assert found[0, 16:].tolist() == [place * (2**31 - 1) // 16 for place in range(16)]
    assert (found[1, 16:] == -1).all()
    assert found[2, 16:].tolist() == [2**31 - 5 + place * 4 // 16 for place in range(16)]


@pytest.mark.parametrize("topk", [1, 5, 64])
def test_finish_writes_good_rows_with_tails_and_marks_the_others(topk, random, device):
    count = torch.tensor([topk, topk - 1, topk, topk, 0], dtype=torch.int32, device=device)
    index = torch.from_numpy(np.sort(random.integers(0, 10**6, (5, topk)), axis=1).astype(np.int32)).to(device)
    score = torch.from_numpy(random.normal(0, 1, (5, topk)).astype(np.float32)).to(device)
    score[2, 0] = -torch.inf
    tau = score.amin(1)
    tau[1] = -torch.inf  # so low that fewer than K scores reach it
    tau[3] = torch.nextafter(tau[3], torch.full_like(tau[3], torch.inf))
    tau[4] = torch.nan
    state = torch.tensor([0, 0, 2, 0, 0], dtype=torch.int32, device=device)
    rows = torch.tensor([8, 1, 2, 5, 0], device=device)
    out_index = torch.full((9, topk), -9, dtype=torch.int32, device=device)
    out_score = torch.full((9, topk), 9.0, device=device)
    finish.launch_finish(index, score, count, tau, state, rows, out_index, out_score)
    assert state.tolist() == [0, 0, 2, finish.THRESHOLD_NOT_MET, finish.TOO_FEW_SEEDS]
    assert torch.equal(out_index[8], index[0])
    assert torch.equal(out_score[8], score[0])
    assert torch.equal(out_index[1, : topk - 1], index[1, : topk - 1])
    assert out_index[1, topk - 1] == -1
    assert out_score[1, topk - 1] == -torch.inf
    assert (out_index[[0, 2, 3, 4, 5, 6, 7]] == -9).all()
    finish.launch_finish(index, score, count, None, None, rows, out_index, out_score)
    assert (out_index[0] == -1).all()
    assert (out_score[0] == -torch.inf).all()
    assert torch.equal(out_score[2].view(torch.int32), score[2].view(torch.int32))


def test_append_keeps_order_and_refuses_what_does_not_fit(random, device):
    width, capacity = 2100, 600
    score = torch.from_numpy(random.normal(0, 1, (6, width)).astype(np.float32)).to(device)
    score[:, 3] = torch.nan
    score[:, 5] = 1.0
    index = torch.arange(width, dtype=torch.int32, device=device).expand(6, -1).contiguous()
    count = torch.tensor([width, 1030, 0, width, width + 1, width + 1], dtype=torch.int32, device=device)
    tau = torch.tensor([1.0, 1.0, 1.0, -9.0, 9.0, 9.0], device=device)
    lists = [
        torch.full((6, capacity), -7, dtype=torch.int32, device=device),
        torch.full((6, capacity), torch.nan, device=device),
        torch.tensor([10] * 6, dtype=torch.int32, device=device),
    ]
    state = torch.tensor([2, 0, 0, 0, 0, 2], dtype=torch.int32, device=device)
    survivors = torch.full((6,), 5, dtype=torch.int32, device=device)
    append.launch_append(index, score, count, tau, *lists, state, survivors)
    assert torch.equal(survivors, count + 5)
    assert state.tolist() == [2, 0, 0, append.OVERFLOW, append.OVERFLOW, 2]
    for row in range(3):
        keys = torch.nonzero(score[row, : count[row]] >= tau[row]).flatten().tolist()
        assert lists[2][row] == 10 + len(keys)
        assert lists[0][row, 10 : 10 + len(keys)].tolist() == keys
        assert torch.equal(lists[1][row, 10 : 10 + len(keys)], score[row, keys])
        assert (lists[0][row, 10 + len(keys) :] == -7).all()
    assert lists[2][3:].tolist() == [10] * 3
    assert (lists[0][3:] == -7).all()
