"""The pytest plugin, in tests that pytest runs on tests."""

import importlib.metadata
import subprocess
import sys

import numpy as np
import pytest
import torch

from dosa_ref.select import exact_topk
from dosa_ref.spec import InvalidProblem
from dosa_verify.pytest_plugin import assert_exact_topk
from dosa_verify.targets.logits import Order, Promise

pytest_plugins = ["pytester"]

ROWS = np.array([[1, 3, 3, 2, 0], [5, np.nan, -np.inf, 5, 5]], np.float32)


def test_right_answers_pass_in_numpy_and_torch():
    indices = exact_topk(ROWS, 3)
    assert_exact_topk(ROWS, indices)
    assert_exact_topk(torch.from_numpy(ROWS), torch.from_numpy(indices))
    assert_exact_topk(ROWS, np.array([[2, 3], [3, 4]], np.int32), row_start=[2, 1], row_end=torch.tensor([5, 5]))


@pytest.mark.parametrize(
    ("indices", "fault"),
    [
        ([[1, 2, 0], [0, 3, 4]], "wrong_set in row 0"),
        ([[1, 2, 3], [0, 1, 3]], "wrong_set in row 1"),
        ([[1, 1, 2], [0, 3, 4]], "duplicate in row 0"),
        ([[1, 2, 5], [0, 3, 4]], "invalid_index in row 0"),
        ([[1, 2, -1], [0, 3, 4]], "wrong_count in row 0"),
    ],
)
def test_wrong_answers_fail(indices, fault):
    with pytest.raises(AssertionError, match=fault):
        assert_exact_topk(ROWS, np.array(indices, np.int32))


def test_the_promise_is_what_counts():
    answer = np.array([[1, 2, 3], [4, 3, 0]], np.int32)
    assert_exact_topk(ROWS, answer)
    with pytest.raises(AssertionError, match="wrong_order in row 1"):
        assert_exact_topk(ROWS, answer, promise=Promise(order=Order.ASCENDING_INDEX))
    with pytest.raises(AssertionError, match="wrong_shape"):
        assert_exact_topk(ROWS, answer.astype(np.int64))
    with pytest.raises(InvalidProblem, match="logits"):
        assert_exact_topk(ROWS.astype(np.float64), answer)


SUITE = """
import numpy as np
import pytest
import torch

SEEDS = []

@pytest.mark.parametrize("part", [0, 1])
def test_seed(dosa_seed, dosa_random, part):
    SEEDS.append(dosa_seed)
    assert dosa_random.integers(2**60) == np.random.default_rng(dosa_seed).integers(2**60)

def test_seeds_differ_and_are_kept():
    assert SEEDS == [EXPECTED_0, EXPECTED_1]

@pytest.mark.parametrize("device", [None, "cpu"])
def test_inside(poisoned_output, device):
    out = poisoned_output((3, 4), device=device)
    assert (out < -10**9).all()
    out[:] = 7
    assert poisoned_output((0, 4), "float32", device).shape == (0, 4)

def test_beside(poisoned_output):
    out = poisoned_output((2, 2))
    np.lib.stride_tricks.as_strided(out, (5,), (4,))[4] = 0

def test_before(poisoned_output):
    out = poisoned_output((4,), "float32", device="cpu")
    out.as_strided((1,), (1,), out.storage_offset() - 1).fill_(1.0)
"""


def test_fixtures(pytester):
    import zlib

    file = "test_fixtures.py::test_seed"
    suite = SUITE
    for part in (0, 1):
        suite = suite.replace(f"EXPECTED_{part}", str(zlib.crc32(f"{file}[{part}]".encode())))
    pytester.makepyfile(suite)
    result = pytester.runpytest_inprocess("-p", "dosa_verify.pytest_plugin", "-p", "no:cacheprovider", "-p", "no:cov")
    # The two that write beside their output pass as tests and fail when their outputs are looked at.
    result.assert_outcomes(passed=7, errors=2)
    result.stdout.fnmatch_lines(["*memory beside poisoned output 0 was written*"])


def test_the_plugin_loads_nothing_before_it_is_used():
    script = (
        "import sys, dosa_verify.pytest_plugin; "
        "assert not {'dosa_ref', 'numpy', 'torch', 'triton', 'hypothesis'} & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_pyproject_names_the_entry_point():
    """A checkout that was installed before the entry point existed has none in its metadata; the source counts."""
    import tomllib
    from pathlib import Path

    import dosa_verify

    text = (Path(dosa_verify.__file__).resolve().parent.parent / "pyproject.toml").read_text(encoding="utf-8")
    points = tomllib.loads(text)["project"]["entry-points"]["pytest11"]
    assert points == {"dosa_verify.pytest_plugin": "dosa_verify.pytest_plugin"}
    point = importlib.metadata.EntryPoint("dosa", points["dosa_verify.pytest_plugin"], "pytest11")
    assert point.load().assert_exact_topk is assert_exact_topk


@pytest.mark.parametrize(
    ("logits", "ends", "field"),
    [
        (ROWS[0], None, "logits"),
        (np.float32(1), None, "logits"),
        (ROWS, [2**32 + 5, 5], "row_end"),
        (ROWS, [4.7, 5.0], "row_end"),
        (ROWS, np.array([2**63 + 5, 5], np.uint64), "row_end"),
        (ROWS, ["5", "5"], "row_end"),
        (ROWS, [5], "row_end"),
    ],
    ids=["one row", "a number", "wraps", "is cut", "unsigned", "text", "too few"],
)
def test_inputs_that_are_not_as_described_are_named(logits, ends, field):
    with pytest.raises(InvalidProblem) as caught:
        assert_exact_topk(logits, exact_topk(ROWS, 3), row_end=ends)
    assert caught.value.field == field
