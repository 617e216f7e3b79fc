"""Scores: ReLU, NaN keys, formats, casts, the accumulator."""

import ml_dtypes
import numpy as np
import pytest

from dosa_ref.formats import decode_e4m3, encode_e4m3_array, is_e4m3_nan
from dosa_ref.quantize import quantize_tokens
from dosa_ref.select import select_dense
from dosa_ref.spec import Contract


def test_b21_slots_that_nobody_wrote(every_path, make_problem):
    """Preemo-Inc/text-generation-inference#11, pytorch/FBGEMM#3723: NaN keys and scales behind the window."""
    scale = np.full(64, np.nan)
    scale[:10] = 1 + np.arange(10)
    problem = make_problem([[[1], [1]]], np.ones((64, 1)), [[1, 0]], 16, k_scale=scale, ke=[10])
    problem.k.view(np.uint8)[10:] = 0x7F
    indices, scores = every_path(problem)
    assert indices == [[*range(10), *[-1] * 6]]
    assert scores[0, :10].tolist() == [1.0 + t for t in range(10)]


def test_b22_nan_bytes_are_nan(every_path, make_problem):
    """ml-explore/mlx#4164, review of intel/intel-xpu-backend-for-triton#7029: 0x7F is not 480."""
    problem = make_problem([[[1]]], [[448], [0]], [[1]], 1)
    problem.k.view(np.uint8)[1, 0] = 0x7F
    assert every_path(problem)[0] == [[0]]
    values = [decode_e4m3(code) for code in range(256)]
    assert [code for code in range(256) if values[code] != values[code]] == [0x7F, 0xFF]
    assert is_e4m3_nan(np.arange(256, dtype=np.uint8)).sum() == 2


def test_b36_relu_before_the_sum(every_path, make_problem):
    """huggingface/transformers#44398, #44690, ml-explore/mlx-lm#531: without it the scores are 0 and 1."""
    indices, scores = every_path(make_problem([[[1, 0], [0, 1]]], [[6, -6], [1, 0]], [[1, 1]], 1))
    assert indices == [[0]]
    assert scores.tolist() == [[6.0]]


def test_b45_equal_dots_in_all_heads(every_path, make_problem):
    """ml-explore/mlx#3784, mlx-lm#1454, jundot/omlx#2502: here with few rows; their size waits for a GPU."""
    keys = np.ones((300, 1))
    keys[3] = 2
    indices, scores = every_path(make_problem(np.ones((3, 32, 1)), keys, np.ones((3, 32)), 1))
    assert indices == [[3]] * 3
    assert (scores == 64).all()


CASTS = [126.24, 4.25, 4.75, 2.0**-10, 1.5 * 2.0**-9, 2.0**-9, (0.5 + 1e-7) * 2.0**-9, 7.5 * 2.0**-9]
CAST_TO = [128, 4, 5, 0, 2.0**-8, 2.0**-9, 2.0**-9, 2.0**-6]


def test_b80_casts_round_to_nearest_even():
    """triton-lang/triton#11897, #8322, jax-ml/ml_dtypes#221, review of PTO-ISA/SuperNPUBench#49."""
    codes = encode_e4m3_array(np.array(CASTS, np.float32)).view(np.uint8)
    assert [decode_e4m3(int(code)) for code in codes] == CAST_TO


@pytest.mark.parametrize("length", range(1, 34))
def test_b81_subnormals_in_vectors_of_any_length(length):
    """pytorch/pytorch#177870, #177769: wrong only in odd lanes."""
    values = np.resize(np.arange(8) * 2.0**-9, length).astype(np.float32)
    want = np.resize(np.arange(8), length).tolist()
    assert encode_e4m3_array(values).view(np.uint8).tolist() == want
    import torch

    assert torch.from_numpy(values).to(torch.float8_e4m3fn).view(torch.uint8).tolist() == want


def test_b82_a_key_of_zeros(every_path, make_problem):
    """huggingface/kernels-community#681, pytorch/ao#4713, ROCm/aiter#4289, lmdeploy#3652, Model-Optimizer#1397."""
    tokens = np.zeros((4, 128), np.float32)
    tokens[:, 0] = [1, 0, -1, 2]
    codes, scale = quantize_tokens(tokens)
    assert not codes.view(np.uint8)[1].any()
    assert np.isfinite(scale).all()
    problem = make_problem([[[1]]], codes.astype(np.float32)[:, :1], [[1]], 3, k_scale=scale)
    indices, scores = every_path(problem)
    assert indices == [[0, 1, 3]]
    assert scores.tolist() == [[1.0, 0.0, 2.0]]


def test_b85_fn_is_not_fnuz():
    """vllm-project/vllm#46730, triton-lang/triton#3634, review of ROCm/triton#357."""
    codes = np.array([0x38, 0x80, 0x7F, 0x7E], np.uint8)
    assert [str(float(decode_e4m3(int(code)))) for code in codes] == ["1.0", "-0.0", "nan", "448.0"]
    other = codes.view(ml_dtypes.float8_e4m3fnuz).astype(np.float32)
    assert [str(value) for value in other.tolist()] == ["0.5", "nan", "240.0", "224.0"]


def large_product(place):
    """A product of 448 * 448 at one place, then none, 100 and 127 products of 1."""
    q, k = np.ones((1, 1, 128)), np.zeros((3, 128))
    q[0, 0, place] = k[:, place] = 448
    others = [i for i in range(128) if i != place]
    k[1, others[:100]] = 1
    k[2, others] = 1
    return q, k


@pytest.mark.parametrize(
    ("place", "scores"),
    [(0, [200704, 200704, 200704]), (127, [200704, 200800, 200800])],
    ids=["large first", "large last"],
)
def test_b86_an_accumulator_of_fourteen_bits(every_path, make_problem, place, scores):
    """deepseek-ai/DeepGEMM#37, #50, DeepSeek-V3#197, SageAttention#287, triton#8056, #2300, cutlass#1329, #3149.

    With the large product last, the first three steps have added 96 ones exactly, and only the last 31 are cut.
    """
    q, k = large_product(place)
    for topk in (1, 2):
        problem = make_problem(q, k, [[1]], topk)
        exact = select_dense(problem, Contract.EXACT)
        assert exact.topk_indices.tolist() == [[2], [1, 2]][topk - 1 : topk]
        indices, got = every_path(problem)
        order = sorted(range(3), key=lambda key: (-scores[key], key))[:topk]
        assert indices == [sorted(order)]
        assert got[0].tolist() == [scores[key] for key in sorted(order)]
