"""Trace and result files: round trips, and every way in which a file can be wrong."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from dosa_ref.select import result_hash, select_dense
from dosa_ref.spec import InvalidProblem
from dosa_ref.trace import load_result, load_trace, save_result, save_trace, write_whole
from tests.ref.conftest import make_problem

FIELDS = ("q", "k", "k_scale", "weights", "cu_seqlen_ks", "cu_seqlen_ke")


def test_trace_round_trip(tmp_path):
    problem = make_problem(rows=2, keys=30, windows=[(3, 30), (0, 7)])
    path = tmp_path / "a.safetensors"
    save_trace(path, problem, {"text": "made up", "topk": "overwritten"})
    trace = load_trace(path)
    assert trace.header == {"text": "made up", "schema": "dosa.trace/1", "topk": "16", "num_heads": "32"}
    assert trace.problem.topk == 16
    for field in FIELDS:
        assert getattr(trace.problem, field).tobytes() == getattr(problem, field).tobytes()
    assert load_trace(str(path), topk=5).problem.topk == 5
    assert [p.name for p in tmp_path.iterdir()] == ["a.safetensors"]


def test_strided_arrays_are_written_in_order(tmp_path):
    problem = make_problem(rows=4, keys=20)
    part = problem.rows(1, 3)
    save_trace(tmp_path / "a", part)
    assert load_trace(tmp_path / "a").problem.q.tobytes() == np.ascontiguousarray(part.q).tobytes()


def test_result_round_trip(tmp_path):
    selection = select_dense(make_problem(rows=2, keys=10))
    path = tmp_path / "r.safetensors"
    save_result(path, selection.topk_indices, selection.scores, {"mode": "both"})
    result = load_result(path)
    assert result_hash(result.topk_indices, result.scores) == result_hash(selection.topk_indices, selection.scores)
    assert result.header == {"mode": "both", "schema": "dosa.result/1"}


def rewrite(path: Path, header=None, **tensors) -> None:
    """The same file with other header entries or tensors (None removes)."""
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    metadata = json.loads(raw[8 : 8 + length])["__metadata__"]
    trace = load_trace(path).problem
    arrays = {field: getattr(trace, field) for field in FIELDS}
    arrays = {name: array for name, array in {**arrays, **tensors}.items() if array is not None}
    metadata = {key: value for key, value in {**metadata, **(header or {})}.items() if value is not None}
    safetensors.numpy.save_file(arrays, path, metadata or None)


@pytest.mark.parametrize(
    ("field", "header", "tensors"),
    [
        ("schema", {"schema": "dosa.trace/2"}, {}),
        ("schema", {"schema": None}, {}),
        ("schema", {"schema": None, "topk": None, "num_heads": None}, {}),
        ("topk", {"topk": None}, {}),
        ("topk", {"topk": "-3"}, {}),
        ("topk", {"topk": "many"}, {}),
        ("topk", {"topk": "²"}, {}),
        ("k_scale", {}, {"k_scale": None}),
        ("k", {}, {"k": np.zeros((30, 128), np.float32)}),
        ("weights", {}, {"weights": np.zeros((3, 31), np.float32)}),
        ("cu_seqlen_ke", {}, {"cu_seqlen_ke": np.array([31, 1, 1], np.int32)}),
        ("cu_seqlen_ks", {}, {"cu_seqlen_ks": np.array([-1, 1, 1], np.int32)}),
    ],
)
def test_a_wrong_trace_names_the_field(tmp_path, field, header, tensors):
    path = tmp_path / "a.safetensors"
    save_trace(path, make_problem(rows=3, keys=30))
    rewrite(path, header, **tensors)
    with pytest.raises(InvalidProblem) as caught:
        load_trace(path)
    assert caught.value.field == field


@pytest.mark.parametrize("cut", [0, 4, 100, 600, -1])
def test_truncated_files(tmp_path, cut):
    path = tmp_path / "a.safetensors"
    save_trace(path, make_problem(keys=30))
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(InvalidProblem, match="safetensors") as caught:
        load_trace(path)
    assert caught.value.field == "file"


def test_foreign_files(tmp_path):
    text, arrays = tmp_path / "a.txt", tmp_path / "b.safetensors"
    text.write_text("this is no trace, and it is long enough to look like a header")
    safetensors.numpy.save_file({"x": np.ones(3, np.float32)}, arrays)
    for path, field in [(text, "file"), (arrays, "schema"), (tmp_path / "absent", "file"), (tmp_path, "file")]:
        with pytest.raises(InvalidProblem) as caught:
            load_trace(path)
        assert caught.value.field == field
    header = b'{"__metadata__":null,"x":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}'
    arrays.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(InvalidProblem, match="schema"):
        load_trace(arrays)


def test_a_trace_is_no_result(tmp_path):
    save_trace(tmp_path / "a", make_problem(keys=30))
    with pytest.raises(InvalidProblem, match="schema"):
        load_result(tmp_path / "a")


@pytest.mark.parametrize(
    ("field", "indices", "scores"),
    [
        ("topk_indices", np.zeros(3, np.int32), np.zeros(3, np.float32)),
        ("scores", np.zeros((2, 3), np.int32), np.zeros((3, 2), np.float32)),
        ("scores", np.zeros((2, 3), np.int32), np.zeros((2, 3))),
        ("topk_indices", np.zeros((2, 3), np.int64), np.zeros((2, 3), np.float32)),
    ],
)
def test_wrong_results(tmp_path, field, indices, scores):
    path = tmp_path / "r"
    with pytest.raises(InvalidProblem) as caught:
        save_result(path, indices, scores)
    assert caught.value.field == field
    assert not path.exists()
    safetensors.numpy.save_file({"topk_indices": indices, "scores": scores}, path, {"schema": "dosa.result/1"})
    with pytest.raises(InvalidProblem) as caught:
        load_result(path)
    assert caught.value.field == field


def test_a_failed_write_leaves_nothing(tmp_path):
    problem = make_problem(keys=30)
    with pytest.raises(InvalidProblem, match="file"):
        save_trace(tmp_path / "no" / "such" / "folder" / "a", problem)
    target = tmp_path / "occupied"
    target.mkdir()
    (target / "x").write_text("kept")
    with pytest.raises(InvalidProblem, match="file"):
        save_trace(target, problem)
    assert [p.name for p in tmp_path.iterdir()] == ["occupied"]
    save_trace(tmp_path / "a", problem)
    before = (tmp_path / "a").read_bytes()
    save_trace(tmp_path / "a", problem)
    assert (tmp_path / "a").read_bytes() == before


@pytest.mark.parametrize("umask", [0o022, 0o027, 0o077, 0o002], ids=oct)
def test_a_file_has_the_permissions_of_any_new_file(tmp_path, umask):
    before = os.umask(umask)
    try:
        save_trace(tmp_path / "trace", make_problem(keys=30))
        save_result(tmp_path / "result", np.zeros((1, 2), np.int32), np.zeros((1, 2), np.float32))
        (tmp_path / "plain").touch()
    finally:
        os.umask(before)
    assert {file.stat().st_mode & 0o777 for file in tmp_path.iterdir()} == {0o666 & ~umask}


def test_a_write_that_is_interrupted_leaves_the_old_file(tmp_path, monkeypatch):
    write_whole(tmp_path / "file", b"old")

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(type(tmp_path), "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_whole(tmp_path / "file", b"new")
    assert [(file.name, file.read_bytes()) for file in tmp_path.iterdir()] == [("file", b"old")]
