"""NaN, Inf, signed zeros, the whole range of float32."""

import os
import subprocess
import sys

import numpy as np
import pytest

from dosa_ref.select import exact_topk


def test_b11_infinite_scores_are_the_best(selects):
    """Review of flashinfer-ai/flashinfer#4811."""
    j = np.arange(4096)
    scores = np.where(j % 8 == 3, np.inf, j / 4096)
    selects(scores, 2048, [*j[j % 8 == 3], *j[j % 8 != 3][-1536:]])


def test_b12_a_row_that_spans_float32(selects):
    """Review of NVIDIA/TensorRT-LLM#16424: (value - low) * scale overflows."""
    scores = [3e38, -3e38, 0.5, 0.25, 0.75, 0.001]
    selects(scores, 4, {0, 4, 2, 3}, whole=True)
    selects([*scores, *[3.3e38] * 2044], 2048, [0, 4, 2, 3, *range(6, 2050)])


@pytest.mark.parametrize("finite", [0, 1, 1024, 2047, 2048])
def test_b15_fewer_finite_scores_than_k(selects, finite):
    """flashinfer-ai/flashinfer#4123."""
    scores = np.full(4096, -np.inf)
    scores[4096 - finite :] = np.arange(1, finite + 1)
    selects(scores, 2048, [*range(4096 - finite, 4096), *range(2048 - finite)])


def test_b16_masks_of_the_lowest_finite_number(kernel):
    """Review of NVIDIA-NeMo/Automodel#2633: masked columns are outside the window, whatever they hold."""
    row = np.array([1, 2, 3, 4, *[np.finfo(np.float32).min] * 4], np.float32)
    assert kernel([row], 6, [0], [4]).tolist() == [[0, 1, 2, 3, -1, -1]]


def test_b17_rows_mostly_of_nan(selects):
    """vllm-project/vllm#49896, #50201, #49666: slots that no comparison fills."""
    j = np.arange(3000)
    selects(np.where(j % 6 == 0, j, np.nan), 2048, j[j % 6 == 0])
    selects(np.full(3000, np.nan), 2048, [])


def test_b20_nan_between_the_numbers(selects):
    """microsoft/onnxruntime#32404, microsoft/onnxruntime-genai#2195: duplicates, padding used as an address."""
    j = np.arange(96)
    selects(np.where(j % 3 == 1, np.nan, j), 32, j[j % 3 != 1][-32:])


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_b25_the_oracle_sorts_nan_and_inf_together(dtype):
    """numpy/numpy#21867, #16006, numpy/x86-simd-sort#178, #36."""
    scores = np.array([np.inf, np.nan, 1, -np.inf, np.nan, 2, np.inf], dtype)
    assert exact_topk(scores, 3).tolist() == [0, 5, 6]


def test_b25_the_oracle_without_simd():
    script = (
        "import numpy as np; from dosa_ref.select import exact_topk; "
        "print(exact_topk(np.array([np.inf, np.nan, 1, -np.inf, np.nan, 2, np.inf], np.float32), 3).tolist())"
    )
    features = "AVX2 AVX512F AVX512_SKX AVX512_SPR X86_V3 X86_V4"
    environment = {**os.environ, "NPY_DISABLE_CPU_FEATURES": features}
    command = [sys.executable, "-W", "ignore", "-c", script]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    assert done.stdout.strip() == "[0, 5, 6]"


def test_b35_zeros_of_both_signs_tie(selects, every_path, make_problem):
    """NVIDIA/cub#218, review of PTO-ISA/SuperNPUBench#78."""
    selects([-0.0, -0.0, -0.0, 0.0, 0.0, 0.0], 2, {0, 1})
    keys = [[-1.0]] * 3 + [[1.0]] * 3
    indices, scores = every_path(make_problem([[[1], [-1]]], keys, [[1, -1]], 2, k_scale=[0] * 6))
    assert indices == [[0, 1]]
    assert (scores == 0).all()


def test_b37_negative_head_weights(every_path, make_problem):
    """Nearest: huggingface/transformers#44690, NVIDIA/cudnn-frontend#446. Scores are -3, 0, 0, -5, 0."""
    keys = [[3], [-2], [0], [5], [-7]]
    assert every_path(make_problem([[[1]]], keys, [[-1]], 3))[0] == [[1, 2, 4]]
    assert every_path(make_problem([[[1]]], keys, [[-1]], 4))[0] == [[0, 1, 2, 4]]


def test_b87_scores_that_half_precision_rounds(selects):
    """vllm-project/vllm#52696, #53459."""
    selects([4096, 4097, 4098, 4099], 2, {3, 2}, whole=True)
