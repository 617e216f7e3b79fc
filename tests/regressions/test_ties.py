"""Ties, repeatability, independence of slices and hints."""

import dataclasses

import numpy as np
import pytest

from dosa_ref.spec import Mode
from dosa_ref.trace import LogitsProblem
from dosa_verify.fuzz import logits_runner
from dosa_verify.fuzz.cases import Case, Scales, Values, Windows, build
from dosa_verify.fuzz.logits import lift
from dosa_verify.targets import logits as targets
from dosa_verify.targets.base import RunOptions
from dosa_verify.targets.dosa import Device, KernelTarget, to_torch


def structural_zeros():
    """Zeros as ReLU makes them, with 1500 positive scores between them."""
    scores = np.zeros(5000, np.float32)
    scores[0:4500:3] = 1 + np.arange(1500)
    others = [j for j in range(5000) if scores[j] == 0]
    return scores, [*range(0, 4500, 3), *others[:548]]


def test_b26_the_same_set_every_time_and_in_every_batch(selects, kernel):
    """sgl-project/sglang#24654, #31115, flashinfer-ai/flashinfer#2584, jundot/omlx#2243, ROCm/aiter#4415."""
    scores, stated = structural_zeros()
    selects(scores, 2048, stated)
    for batch in (1, 4, 4):
        got = kernel(np.tile(scores, (batch, 1)), 2048)
        assert (got == np.sort(np.array(stated))).all()


def test_b27_slices_of_the_queries(kernel):
    """vllm-project/vllm-ascend#15053: the whole chunk, slices, and one row at a time."""
    i, j = np.arange(24)[:, None], np.arange(500)
    scores = np.where((i + j) % 7 < 3, 0, (i * j) % 3)
    whole = kernel(scores, 200).tolist()
    assert [row for part in (0, 8, 16) for row in kernel(scores[part : part + 8], 200).tolist()] == whole
    assert [kernel(scores[row : row + 1], 200)[0].tolist() for row in range(24)] == whole


def test_b30_ten_equal_scores(selects):
    """flashinfer-ai/flashinfer#3095, #4295: the smaller index wins; there is no other flag here."""
    selects([1.5] * 10, 4, {0, 1, 2, 3}, whole=True)


def test_b31_the_cut_inside_a_block_of_copies(selects):
    """ggml-org/llama.cpp#28497."""
    selects([2, 2, 2, 2, 9, 9, 9, 9, 5, 5, 5, 5], 6, {4, 5, 6, 7, 8, 9}, whole=True)
    block = np.random.default_rng(31).permutation(700)
    chosen = [j for j in range(2800) if block[j // 4] >= 189]
    tied = [4 * int(np.flatnonzero(block == 188)[0]) + copy for copy in range(3)]
    selects(np.repeat(block, 4), 2047, [*chosen, *tied])


def test_b32_prefilled_and_resumed_positions(device):
    """JustVugg/colibri#1554: the same rows in one call, in two, and one by one."""
    case = Case(seed=32, rows=8, keys=60, topk=4, values=Values.FEW_KEYS, scales=Scales.POWERS, windows=Windows.CAUSAL)
    problem = build(case)
    target = KernelTarget(name="dosa", device=device)

    def answer(*sizes):
        rows, start = [], 0
        for size in sizes:
            part = target.select(problem.rows(start, start + size), Mode.BOTH.value, RunOptions(columns=8))
            rows += part.topk_indices.tolist()
            start += size
        return rows

    whole = answer(8)
    assert answer(6, 2) == answer(5, 3) == answer(*[1] * 8) == whole


def test_b90_hints_change_nothing(selects, device):
    """NVIDIA/TensorRT-LLM#18338, #18339: previous indices that are zero, random, right, or out of range."""
    from dosa_gpu import api, plan

    j = np.arange(20000)
    scores = (j * 7919) % 8
    selects(scores, 1024, j[scores == 7][:1024])

    row = ((np.arange(1200) * 7919) % 8).astype(np.float32)
    want = np.flatnonzero(row == 7)[:50]
    problem = lift(
        LogitsProblem(logits=row[None], row_start=np.zeros(1, np.int32), row_end=np.array([1200], np.int32), topk=50)
    )
    arrays = [getattr(problem, name) for name in ("q", "k", "k_scale", "weights", "cu_seqlen_ks", "cu_seqlen_ke")]
    tensors = [to_torch(array, device) for array in arrays]
    random = np.random.default_rng(90).integers(0, 1200, 100)
    for hint in (np.zeros(100), random, want, np.arange(5000, 5100), np.full(9, -1)):
        hints = to_torch(hint.astype(np.int32), device)
        got = api.select_prefill(*tensors, 50, path=plan.Path.DOSA, hint_indices=hints)
        assert got.topk_indices.cpu().numpy()[0].tolist() == want.tolist()


def test_b101_every_index_once(selects):
    """sony/nnabla#1204, vllm-project/vllm#56254."""
    selects([2, 2, 2, 3, 4], 3, {3, 4, 0}, whole=True)


def test_b107_partial_sorts_are_no_oracle():
    """numpy/numpy#26716, #24842, #12802: right scores, but not the lowest indices."""
    scores, stated = structural_zeros()
    problem = LogitsProblem(
        logits=scores[None], row_start=np.zeros(1, np.int32), row_end=np.array([5000], np.int32), topk=2048
    )
    partition = targets.make("numpy.argpartition", Device.CPU)
    assert logits_runner.check_logits(partition, problem) is None
    strict = dataclasses.replace(partition, promise=targets.Promise())
    assert logits_runner.check_logits(strict, problem).fault is logits_runner.Fault.WRONG_SET
    assert sorted(np.argsort(-scores, kind="stable")[:2048].tolist()) == sorted(stated)


@pytest.mark.parametrize("wrong", [[], [0]])
def test_stated_answers_are_checked(selects, wrong):
    with pytest.raises(AssertionError, match="the stated answer"):
        selects([1.0, 2.0], 1, wrong)
