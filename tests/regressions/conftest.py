"""Public fault reports of other top-K selections, as tests of ours. Right answers come from Python's own sort.

Tests are named after the entries, ``b01`` to ``b107``; ``test_index.py`` lists those that wait. Where a recipe needs
2048 keys or long rows, the top-K kernel gets it; smaller ones go through the whole selection as FP8 inputs (`lift`).
"""

import ml_dtypes
import numpy as np
import pytest

from dosa_ref.problem import PrefillProblem
from dosa_ref.select import select_dense
from dosa_ref.trace import LogitsProblem
from dosa_verify.fuzz.logits import lift
from dosa_verify.targets.base import RunOptions
from dosa_verify.targets.dosa import Device, KernelTarget, connect, cuda_is_available
from dosa_verify.targets.logits import TopKKernelTarget

DEVICE = Device.CUDA if cuda_is_available() else Device.CPU
connect(DEVICE)
FP8 = np.dtype(ml_dtypes.float8_e4m3fn)


def python_sort(scores, topk):
    """The right answer, exact and slow: Python compares floats as numbers, and its sort is stable."""
    numbers = [float(score) for score in scores]
    order = sorted((j for j, s in enumerate(numbers) if s == s), key=lambda j: -numbers[j])
    return sorted(order[:topk])


def padded(chosen, topk):
    return [*chosen, *[-1] * (topk - len(chosen))]


@pytest.fixture
def device():
    return DEVICE


@pytest.fixture
def kernel():
    """Runs the top-K kernel on rows and windows; gives the indices."""

    def run(rows, topk, start=None, end=None):
        rows = np.asarray(rows, np.float32)
        start = np.zeros(len(rows), np.int32) if start is None else np.asarray(start, np.int32)
        end = np.full(len(rows), rows.shape[1], np.int32) if end is None else np.asarray(end, np.int32)
        problem = LogitsProblem(logits=rows, row_start=start, row_end=end, topk=topk)
        return TopKKernelTarget(device=DEVICE).select(problem)

    return run


@pytest.fixture
def selects(kernel):
    """Asserts what is selected from one row: the stated set is right, and the kernel gives it, whatever lies around."""

    def check(scores, topk, stated, *, whole=False):
        scores = np.asarray(scores, np.float32)
        assert python_sort(scores, topk) == sorted(stated), "the stated answer"
        want = padded(sorted(stated), topk)
        for poison in (1e9, np.nan):
            around = np.full((2, len(scores) + 8), poison, np.float32)
            around[:, 3 : 3 + len(scores)] = scores
            got = kernel(around, topk, [3, 3], [3 + len(scores)] * 2)
            for row in got.tolist():
                assert [index if index == -1 else index - 3 for index in row] == want
        if whole:
            problem = LogitsProblem(
                logits=scores[None],
                row_start=np.zeros(1, np.int32),
                row_end=np.array([len(scores)], np.int32),
                topk=topk,
            )
            variants = ("both", "dense") if len(scores) > 1000 else KernelTarget(name="dosa", device=DEVICE).variants
            for variant in variants:
                assert select(lift(problem), variant).topk_indices[0].tolist() == want

    return check


def select(problem, variant):
    return KernelTarget(name="dosa", device=DEVICE).select(problem, variant, RunOptions())


@pytest.fixture
def every_path():
    """Selects in every mode and densely, demands the reference's indices and score bits; gives both."""

    def run(problem):
        want = select_dense(problem)
        for variant in KernelTarget(name="dosa", device=DEVICE).variants:
            got = select(problem, variant)
            assert got.topk_indices.tolist() == want.topk_indices.tolist(), variant
            assert got.scores.tobytes() == want.scores.tobytes(), variant
        return want.topk_indices.tolist(), want.scores

    return run


@pytest.fixture
def make_problem():
    """A problem from short vectors of exact FP8 numbers; heads and dimensions are filled up with zeros."""

    def make(q, k, weights, topk, *, k_scale=None, ks=None, ke=None):
        q, k, weights = np.asarray(q, np.float32), np.asarray(k, np.float32), np.asarray(weights, np.float32)
        rows, heads, size = q.shape
        full_q, full_k = np.zeros((rows, 32, 128), np.float32), np.zeros((len(k), 128), np.float32)
        full_q[:, :heads, :size], full_k[:, : k.shape[1]] = q, k
        full_w = np.zeros((rows, 32), np.float32)
        full_w[:, :heads] = weights
        q8, k8 = full_q.astype(FP8), full_k.astype(FP8)
        assert (q8.astype(np.float32) == full_q).all()
        assert (k8.astype(np.float32) == full_k).all()
        return PrefillProblem(
            q=q8,
            k=k8,
            k_scale=np.ones(len(k), np.float32) if k_scale is None else np.asarray(k_scale, np.float32),
            weights=full_w,
            cu_seqlen_ks=np.zeros(rows, np.int32) if ks is None else np.asarray(ks, np.int32),
            cu_seqlen_ke=np.full(rows, len(k), np.int32) if ke is None else np.asarray(ke, np.int32),
            topk=topk,
        )

    return make
