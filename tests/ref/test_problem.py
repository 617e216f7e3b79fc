"""Validation of inputs: each broken field is named, each odd but legal input passes."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from dosa_ref.problem import IndexerConfig, PagedProblem, PrefillProblem
from dosa_ref.quantize import pack_pages
from dosa_ref.spec import InvalidProblem
from tests.ref.conftest import FP8


def prefill(**changes) -> PrefillProblem:
    fields = {
        "q": np.zeros((2, 32, 128), FP8),
        "k": np.zeros((5, 128), FP8),
        "k_scale": np.ones(5, np.float32),
        "weights": np.ones((2, 32), np.float32),
        "cu_seqlen_ks": np.array([0, 3], np.int32),
        "cu_seqlen_ke": np.array([5, 1], np.int32),
        "topk": 4,
    }
    return PrefillProblem(**{**fields, **changes})


@pytest.mark.parametrize(
    ("field", "changed"),
    [
        ("q", np.zeros((2, 32, 128), np.uint8)),
        ("q", np.zeros((2, 32, 64), FP8)),
        ("q", np.zeros((32, 128), FP8)),
        ("q", np.zeros((2, 0, 128), FP8)),
        ("q", [[0.0]]),
        ("k", np.zeros((5, 127), FP8)),
        ("k", np.zeros((5, 128), np.float32)),
        ("k_scale", np.ones(4, np.float32)),
        ("k_scale", np.ones(5)),
        ("weights", np.ones((2, 31), np.float32)),
        ("weights", np.ones((2, 32), np.float16)),
        ("cu_seqlen_ks", np.array([0, 3], np.int64)),
        ("cu_seqlen_ks", np.array([0, -1], np.int32)),
        ("cu_seqlen_ke", np.array([5, 6], np.int32)),
        ("cu_seqlen_ke", np.array([5], np.int32)),
        ("topk", -1),
        ("topk", 2.0),
        ("topk", True),
    ],
)
def test_prefill_names_the_field(field, changed):
    with pytest.raises(InvalidProblem, match=field) as caught:
        prefill(**{field: changed})
    assert caught.value.field == field


def test_too_many_keys_for_an_index():
    many = np.broadcast_to(np.zeros(128, FP8), (2**31, 128))
    with pytest.raises(InvalidProblem, match="int32"):
        prefill(k=many)


def test_legal_oddities():
    problem = prefill()
    assert [problem.window(row) for row in (0, 1)] == [(0, 5), (3, 3)]
    assert (problem.seq_len, problem.seq_len_kv, problem.num_heads) == (2, 5, 32)
    assert problem.config == IndexerConfig(num_heads=32, topk=4)
    prefill(topk=np.int64(3))
    prefill(k=np.zeros((128, 5), FP8).T)
    prefill(k_scale=np.full(5, np.nan, np.float32))
    nothing = prefill(
        q=np.zeros((0, 1, 128), FP8),
        weights=np.zeros((0, 1), np.float32),
        cu_seqlen_ks=np.zeros(0, np.int32),
        cu_seqlen_ke=np.zeros(0, np.int32),
        k=np.zeros((0, 128), FP8),
        k_scale=np.zeros(0, np.float32),
        topk=0,
    )
    assert nothing.seq_len == nothing.seq_len_kv == 0


def test_inputs_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        prefill().topk = 3


def test_rows_are_views():
    problem = prefill()
    part = problem.rows(1, 2)
    assert part.seq_len == 1
    assert part.window(0) == (3, 3)
    assert np.shares_memory(part.q, problem.q)
    for start, stop in [(-1, 1), (0, 3), (2, 1)]:
        with pytest.raises(InvalidProblem, match="rows"):
            problem.rows(start, stop)


@pytest.mark.parametrize(
    ("field", "arguments"),
    [
        ("num_heads", {"num_heads": 0, "topk": 1}),
        ("topk", {"num_heads": 1, "topk": -1}),
        ("head_dim", {"num_heads": 1, "topk": 1, "head_dim": 64}),
    ],
)
def test_config_names_the_field(field, arguments):
    with pytest.raises(InvalidProblem) as caught:
        IndexerConfig(**arguments)
    assert caught.value.field == field


def paged(**changes) -> PagedProblem:
    fields = {
        "q": np.zeros((2, 1, 32, 128), FP8),
        "weights": np.ones((2, 1, 32), np.float32),
        "k_pages": pack_pages(np.zeros((8, 128), FP8), np.ones(8, np.float32), 4),
        "page_table": np.array([[1, 0], [0, -9]], np.int32),
        "context_lens": np.array([7, 4], np.int32),
        "page_size": 4,
        "topk": 3,
    }
    return PagedProblem(**{**fields, **changes})


@pytest.mark.parametrize(
    ("field", "changed"),
    [
        ("q", np.zeros((2, 32, 128), FP8)),
        ("q", np.zeros((2, 1, 0, 128), FP8)),
        ("weights", np.ones((2, 2, 32), np.float32)),
        ("k_pages", np.zeros((2, 4 * 132), np.int8)),
        ("k_pages", np.zeros((2, 4 * 131), np.uint8)),
        ("page_table", np.array([[1, 0], [2, 0]], np.int32)),
        ("page_table", np.array([[1, -1], [0, 0]], np.int32)),
        ("page_table", np.array([1, 0], np.int32)),
        ("context_lens", np.array([9, 4], np.int32)),
        ("context_lens", np.array([-1, 4], np.int32)),
        ("context_lens", np.array([7, 4], np.int64)),
        ("page_size", 0),
        ("topk", -2),
    ],
)
def test_paged_names_the_field(field, changed):
    with pytest.raises(InvalidProblem) as caught:
        paged(**{field: changed})
    assert caught.value.field == field


def test_unused_page_entries_may_be_anything():
    assert paged().page_table[1, 1] == -9
    assert paged(context_lens=np.array([0, 0], np.int32)).topk == 3
