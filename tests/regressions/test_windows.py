"""Windows, short and empty rows, shapes, strides, padding."""

import dataclasses

import numpy as np
import pytest

from dosa_ref.select import exact_topk, select_dense
from dosa_ref.spec import InvalidProblem, UnsupportedConfiguration
from dosa_ref.trace import LogitsProblem
from dosa_verify.fuzz.logits import lift
from dosa_verify.targets.base import RunOptions
from dosa_verify.targets.dosa import KernelTarget, to_torch

FIELDS = ("q", "k", "k_scale", "weights", "cu_seqlen_ks", "cu_seqlen_ke")


def lifted(rows, topk, start=None, end=None):
    rows = np.asarray(rows, np.float32)
    start = np.zeros(len(rows), np.int32) if start is None else np.asarray(start, np.int32)
    end = np.full(len(rows), rows.shape[1], np.int32) if end is None else np.asarray(end, np.int32)
    return lift(LogitsProblem(logits=rows, row_start=start, row_end=end, topk=topk))


def test_b41_the_causal_limit(kernel):
    """huggingface/transformers#45820."""
    got = kernel([[1, 2, 3, 4]] * 4, 2, end=[1, 2, 3, 4])
    assert got.tolist() == [[0, -1], [0, 1], [1, 2], [2, 3]]


def test_b47_more_wanted_than_there_are(selects):
    """radixark/miles#1122, NVIDIA-NeMo/Automodel#3035, ByteDance-Seed/VeOmni#912."""
    selects([3, 1, 2, 5, 4], 16, range(5), whole=True)


def test_b50_windows_that_do_not_start_at_zero(kernel):
    """ROCm/aiter#2901, #1567."""
    t = np.arange(4500)
    row = np.full(12000, 1e6)
    row[5000:9500] = (997 * t) % 4500
    got = kernel([row], 2048, [5000], [9500])[0]
    assert got.tolist() == (5000 + t[(997 * t) % 4500 >= 2452]).tolist()


def test_b51_negative_lengths(kernel, every_path):
    """vllm-project/vllm#51593, sgl-project/sglang#31123, flashinfer-ai/flashinfer#5395."""
    rows = [[4, 3, 2, 1, 9, 8, 7, 6]] * 4
    want = [[0, 4, 5, 6], [-1] * 4, [-1] * 4, [0, 1, 2, -1]]
    assert kernel(rows, 4, end=[7, -1, 0, 3]).tolist() == want
    problem = lifted(rows, 4, end=[7, 0, 0, 3])
    ke = problem.cu_seqlen_ke.copy()
    ke[1] = -1
    indices, _ = every_path(dataclasses.replace(problem, cu_seqlen_ke=ke))
    assert indices[1:3] == want[1:3]
    assert [indices[0], [index - 24 for index in indices[3][:3]]] == [want[0], [0, 1, 2]]


def test_b52_whole_batches_of_empty_rows(kernel):
    """deepseek-ai/DeepGEMM#354, #344, #399, NVIDIA/TensorRT-LLM#14940, vllm-project/vllm#51182."""
    assert (kernel(np.ones((32, 8)), 4, end=np.zeros(32)) == -1).all()
    got = kernel(np.tile(np.arange(8), (96, 1)), 4, end=[0] * 95 + [8])
    assert (got[:95] == -1).all()
    assert got[95].tolist() == [4, 5, 6, 7]


def test_b55_no_rows_no_keys(every_path, make_problem):
    """vllm-project/vllm-xpu-kernels#609, sgl-project/sglang#39899, #29798."""
    problem = make_problem(np.ones((3, 1, 1)), np.ones((100, 1)), np.ones((3, 1)), 8)
    assert every_path(problem.rows(0, 0))[0] == []
    zero = np.zeros(3, np.int32)
    no_keys = dataclasses.replace(problem, k=problem.k[:0], k_scale=problem.k_scale[:0], cu_seqlen_ke=zero)
    assert every_path(no_keys)[0] == [[-1] * 8] * 3
    assert every_path(no_keys.rows(0, 0))[0] == []


def test_b56_one_order_for_short_and_long_rows(selects):
    """Review of lightseekorg/tokenspeed#573: ascending index, always."""
    selects([1, 9, 5, 7], 8, range(4), whole=True)
    selects([1, 9, 5, 7, 2, 8, 3, 6, 4, 0, 11, 10], 8, {1, 2, 3, 5, 7, 10, 11, 8}, whole=True)


def test_b57_minus_one_only_behind_the_last(kernel):
    """vllm-project/vllm#48364, deepseek-ai/FlashMLA#109."""
    assert kernel([[5, 4, 3, 2, 1]], 32)[0].tolist() == [*range(5), *[-1] * 27]


def test_b61_the_cached_keys_take_part(every_path):
    """hw-native-sys/pypto-lib#592, ml-explore/mlx-lm#1189."""
    row = np.arange(16) / 100
    row[2] = 9
    assert every_path(lifted([row], 2))[0] == [[2, 15]]


def test_b62_a_window_longer_than_the_keys(make_problem):
    """vllm-project/vllm#51252: keys that nobody gathered are an error, never indices."""
    with pytest.raises(InvalidProblem, match="cu_seqlen_ke"):
        make_problem([[[1]]], np.ones((100, 1)), [[1]], 4, ke=[130])


def test_b65_a_long_row_beside_short_ones(device):
    """vllm-project/vllm#41856: floats stored past the context length hit the next row."""
    rows = np.tile(np.arange(1000, dtype=np.float32), (3, 1))
    rows[1, 0] = 5000
    problem = lifted(rows, 3, end=[10, 1000, 10])
    got = KernelTarget(name="dense", device=device).select(problem, "dense", RunOptions())
    assert got.topk_indices.tolist() == [[7, 8, 9], [1000, 1998, 1999], [2007, 2008, 2009]]


def test_b66_b67_each_row_has_its_own_end(kernel):
    """vllm-project/vllm#32175, #55458, deepseek-ai/DeepGEMM#314, ROCm/aiter#4661, as windows of prefill rows."""
    score = np.tile(np.arange(12), (6, 1))
    got = kernel(score, 4, end=[4, 5, 8, 9, 1, 2]).tolist()
    assert got == [[0, 1, 2, 3], [1, 2, 3, 4], [4, 5, 6, 7], [5, 6, 7, 8], [0, -1, -1, -1], [0, 1, -1, -1]]
    assert kernel(score[:4], 2, end=[9, 9, 9, 10]).tolist() == [[7, 8], [7, 8], [7, 8], [8, 9]]


@pytest.mark.parametrize("topk", [1, 3, 64, 705, 2047, 2048])
def test_b71_unusual_k(selects, topk):
    """sgl-project/sglang#39431, NVIDIA/cudnn-frontend#406, triton-lang/triton#11071, #10952, pytorch/pytorch#49205."""
    selects(np.arange(3000), topk, range(3000 - topk, 3000))


def test_b71_k_outside_the_range(every_path, device):
    problem = lifted([np.arange(3000)], 0)
    assert every_path(problem)[0] == [[]]
    for topk in (2049, 2051):
        wide = dataclasses.replace(problem, topk=topk)
        with pytest.raises(UnsupportedConfiguration, match="topk"):
            KernelTarget(name="dosa", device=device).select(wide, "both", RunOptions())
        assert select_dense(wide).topk_indices[0].tolist() == list(range(3000 - topk, 3000))
    with pytest.raises(InvalidProblem, match="topk"):
        dataclasses.replace(problem, topk=-1)
    with pytest.raises(InvalidProblem, match="topk"):
        exact_topk(np.arange(4.0), -1)


def test_b75_keys_that_start_unaligned(device, make_problem):
    """ROCm/aiter#2954: rows of 132 bytes, as a fused page of one key has; a shifted read loses a score."""
    from dosa_gpu import api, plan

    keys = np.eye(16)[np.arange(33) % 16]
    problem = make_problem([[(np.arange(16) + 1) / 16]], keys, [[1]], 33)
    q, k, *rest = (to_torch(getattr(problem, name), device) for name in FIELDS)
    import torch

    pages = torch.full((33, 132), 0x7E, dtype=torch.uint8, device=device.value)
    pages[:, :128] = k.view(torch.uint8)
    shifted = pages[:, :128].view(torch.float8_e4m3fn)
    assert shifted.stride(0) == 132
    for path in (plan.Path.DENSE, plan.Path.DOSA):
        got = api.select_prefill(q, shifted, *rest, 33, path=path)
        assert got.scores.cpu().numpy()[0].tolist() == [((t % 16) + 1) / 16 for t in range(33)]


def test_b76_a_layers_scales_are_a_view(device, make_problem):
    """ROCm/ATOM#1466: a view that loses its offset reads layer 0."""
    import torch

    from dosa_gpu import api, plan

    keys = (np.arange(20) % 7 + 1)[:, None]
    problem = make_problem([[[1]]], keys, [[1]], 5)
    layers = torch.tensor([1.0, 2.0, 4.0], device=device.value)[:, None].repeat(1, 20)
    q, k, _, *rest = (to_torch(getattr(problem, name), device) for name in FIELDS)
    for path in (plan.Path.DENSE, plan.Path.DOSA):
        first, last = (api.select_prefill(q, k, layers[layer], *rest, 5, path=path) for layer in (0, 2))
        assert (first.topk_indices == last.topk_indices).all()
        assert (last.scores == 4 * first.scores).all()
        assert last.topk_indices.tolist() == [[5, 6, 12, 13, 19]]


def test_b95_padded_row_pitch(device):
    """vllm-project/vllm#42169, #42684: 1000 columns in rows of 1024, the padding full of a better score."""
    from dosa_verify.targets.logits import TopKKernelTarget

    buffer = np.full((4, 1024), 1e9, np.float32)
    buffer[:, :1000] = 0
    buffer[np.arange(4), np.arange(4) + 1] = 5
    rows = buffer[:, :1000]
    problem = LogitsProblem(logits=rows, row_start=np.zeros(4, np.int32), row_end=np.full(4, 1000, np.int32), topk=1)
    assert TopKKernelTarget(device=device).select(problem).tolist() == [[1], [2], [3], [4]]


def test_b96_more_rows_than_heads(every_path, make_problem):
    """ROCm/aiter#1815: a wrong stride that shows only when rows exceed heads."""
    rows, keys = 5, 64
    q = [[[row + 1, 0], [0, 1]] for row in range(rows)]
    k = [[key % 9, (key * 5) % 16] for key in range(keys)]
    indices, _ = every_path(make_problem(q, k, [[1, -1]] * rows, 6))
    want = []
    for row in range(rows):
        score = [(row + 1) * (key % 9) - (key * 5) % 16 for key in range(keys)]
        want.append(sorted(sorted(range(keys), key=lambda key, score=score: (-score[key], key))[:6]))
    assert indices == want


def test_b97_transposed_keys_and_strided_windows(device, make_problem):
    """FlagGems#5725, lightseekorg/tokenspeed#634, vllm-project/vllm#40987."""
    import torch

    from dosa_gpu import api, plan

    problem = make_problem(np.ones((3, 1, 4)), (np.arange(80).reshape(20, 4) * 7) % 16, np.ones((3, 1)), 4)
    q, k, k_scale, weights, ks, ke = (to_torch(getattr(problem, name), device) for name in FIELDS)
    transposed = k.view(torch.uint8).T.contiguous().T.view(torch.float8_e4m3fn)
    big = torch.full((6,), 99, dtype=torch.int32, device=device.value)
    big[::2] = ke
    want = select_dense(problem).topk_indices.tolist()
    for path in (plan.Path.DENSE, plan.Path.DOSA):
        got = api.select_prefill(q, transposed, k_scale, weights, ks, big[::2], 4, path=path)
        assert got.topk_indices.tolist() == want


def test_b100_every_slot_is_written(selects):
    """Review of sgl-project/sglang#23761: half of the output was left as it was (here: canaries)."""
    selects(np.arange(5000), 2048, range(2952, 5000))
