"""Seeds and hard keys: distinct, visible, spread; and the lists that emitted keys wait in."""

import numpy as np
import pytest
import torch

from dosa_gpu import seeds
from dosa_gpu.kernels import append, hard_keys


def test_a_groups_list_is_distinct_and_holds_winners_newest_and_spread(random, device):
    winners = torch.from_numpy(np.stack([random.permutation(900)[:40] for _ in range(3)]).astype(np.int32)).to(device)
    winners[2, 35:] = -1
    pilot = torch.tensor([0, 1, 1], device=device)
    ks, ke = torch.tensor([0, 100, 870], device=device), torch.tensor([1000, 300, 880], device=device)
    lists = seeds.group_seeds(winners, pilot, ks, ke, 2, 25, 16)
    assert lists.shape == (3, 2 * 40 + 25 + 16)
    assert lists.dtype == torch.int32
    for group in range(3):
        found = lists[group][lists[group] >= 0].tolist()
        assert found == sorted(set(found))
        near = winners[pilot[group] : pilot[group] + 2].flatten().tolist()
        start, end = ks[group].item(), ke[group].item()
        newest = set(range(max(start, end - 25), end))
        spread = {start + place * (end - start) // 16 for place in range(16)}
        assert set(found) == {key for key in near if key >= 0} | newest | spread


def test_a_rows_own_seeds_are_distinct_visible_and_enough(device):
    ks = torch.tensor([0, 5, 100, 40, 0], dtype=torch.int32, device=device)
    ke = torch.tensor([1000, 65, 161, 40, 61], dtype=torch.int32, device=device)
    lists = seeds.own_seeds(ks, ke, 60)
    for row in range(5):
        found = lists[row][lists[row] >= 0].tolist()
        assert len(found) == len(set(found)) == min(60, max(ke[row] - ks[row], 0))
        assert all(ks[row] <= key < ke[row] for key in found)


@pytest.mark.parametrize("below", [0, 1, 5, 16, 17, 1500])
def test_hard_keys_are_an_even_sample_of_what_lies_below_tau(below, random, device):
    width = 3000
    lists = torch.from_numpy(random.permutation(10**6)[: 2 * width].astype(np.int32).reshape(2, width)).to(device)
    score = torch.full((3, width), 2.0, device=device)
    score[:, ::7] = torch.nan
    places = np.sort(random.permutation(np.setdiff1d(np.arange(width), np.arange(0, width, 7)))[:below])
    score[2, torch.from_numpy(places).to(device)] = 0.5
    sample = torch.full((3, 16), -1, dtype=torch.int32, device=device)
    hard_keys.launch_hard_keys(lists, score, torch.full((3,), 1.0, device=device), 2, sample)
    assert (sample[:2] == -1).all()
    want = [lists[1, places[-(-slot * below // 16)]].item() for slot in range(16) if below >= 16]
    got = sample[2].tolist()
    if below >= 16:
        assert got == want
    else:
        assert sorted(key for key in got if key >= 0) == sorted(lists[1, torch.from_numpy(places)].tolist())


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
    append.launch_append(index, score, count, tau, *lists)
    assert lists[3].tolist() == [0, 0, 0, 1]
    for row in range(3):
        keys = torch.nonzero(score[row, : count[row]] >= tau[row]).flatten().tolist()
        assert lists[2][row] == 10 + len(keys)
        assert lists[0][row, 10 : 10 + len(keys)].tolist() == keys
        assert torch.equal(lists[1][row, 10 : 10 + len(keys)], score[row, keys])
        assert (lists[0][row, 10 + len(keys) :] == -7).all()
    assert lists[2][3] == 10
    assert (lists[0][3] == -7).all()
