"""Seeds, sampled keys, the lists that emitted keys wait in, and the last check of a row."""

import numpy as np
import pytest
import torch

from dosa_gpu import seeds
from dosa_gpu.kernels import append, finish, mark_seeds, sample_keys


def test_a_groups_bits_are_winners_newest_and_spread_inside_its_span(random, device):
    winners = torch.from_numpy(np.stack([random.permutation(900)[:40] for _ in range(3)]).astype(np.int32)).to(device)
    winners[2, 35:] = -559038737
    pilot = torch.tensor([0, 1, 1], dtype=torch.int32, device=device)
    ks = torch.tensor([0, 9, 5, 0, 100, 120, 0, 300, 870], dtype=torch.int32, device=device)
    ke = torch.tensor([999, 1000, 990, 0, 280, 300, 0, 200, 880], dtype=torch.int32, device=device)
    words = torch.zeros(3, 40, dtype=torch.int32, device=device)
    start, end = (torch.empty(3, dtype=torch.int32, device=device) for _ in range(2))
    mark_seeds.launch_mark_seeds(winners, pilot, ks, ke, 2, 25, 16, 4, words, start, end)
    spans = [(0, 1000), (100, 300), (870, 880)]
    assert list(zip(start.tolist(), end.tolist(), strict=True)) == spans
    bits = np.unpackbits(words.cpu().numpy().view(np.uint8), axis=1, bitorder="little")
    for group, (first, last) in enumerate(spans):
        near = winners[pilot[group] : pilot[group] + 2].flatten().tolist()
        wanted = {key for key in near if first <= key < last} | set(range(max(first, last - 25), last))
        wanted |= {first + place * (last - first) // 16 for place in range(16)}
        assert set(np.flatnonzero(bits[group])) == wanted


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
    sample = torch.full((3, 32), -559038737, dtype=torch.int32, device=device)
    seeds = torch.full((3,), -559038737, dtype=torch.int32, device=device)
    ks = torch.tensor([0, 7, 2**31 - 5], dtype=torch.int32, device=device)
    ke = torch.tensor([2**31 - 1, 7, 2**31 - 1], dtype=torch.int32, device=device)
    sample_keys.launch_sample_keys(lists, score, torch.full((3,), 1.0, device=device), ks, ke, 2, sample, seeds)
    assert seeds.tolist() == [width - len(range(0, width, 7))] * 3
    assert (sample[:2, :16] == -1).all()
    got = sample[2, :16].tolist()
    if below >= 16:
        assert got == [lists[1, places[-(-slot * below // 16)]].item() for slot in range(16)]
    else:
        assert sorted(key for key in got if key >= 0) == sorted(lists[1, torch.from_numpy(places)].tolist())
        assert got.count(-1) == 16 - below
    assert sample[0, 16:].tolist() == [place * (2**31 - 1) // 16 for place in range(16)]
    assert (sample[1, 16:] == -1).all()
    assert sample[2, 16:].tolist() == [2**31 - 5 + place * 4 // 16 for place in range(16)]


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
    score = torch.from_numpy(random.normal(0, 1, (4, width)).astype(np.float32)).to(device)
    score[:, 3] = torch.nan
    score[:, 5] = 1.0
    index = torch.arange(width, dtype=torch.int32, device=device).expand(4, -1).contiguous()
    count = torch.tensor([width, 1030, 0, width], dtype=torch.int32, device=device)
    tau = torch.tensor([1.0, 1.0, 1.0, -9.0], device=device)
    lists = [
        torch.full((4, capacity), -7, dtype=torch.int32, device=device),
        torch.full((4, capacity), torch.nan, device=device),
        torch.tensor([10, 10, 10, 10], dtype=torch.int32, device=device),
        torch.full((4,), -7, dtype=torch.int32, device=device),
    ]
    any_full = torch.zeros(1, dtype=torch.int32, device=device)
    append.launch_append(index, score, count, tau, *lists, any_full)
    assert any_full.item() == 1
    assert lists[3].tolist() == [0, 0, 0, 1]
    for row in range(3):
        keys = torch.nonzero(score[row, : count[row]] >= tau[row]).flatten().tolist()
        assert lists[2][row] == 10 + len(keys)
        assert lists[0][row, 10 : 10 + len(keys)].tolist() == keys
        assert torch.equal(lists[1][row, 10 : 10 + len(keys)], score[row, keys])
        assert (lists[0][row, 10 + len(keys) :] == -7).all()
    assert lists[2][3] == 10
    assert (lists[0][3] == -7).all()
