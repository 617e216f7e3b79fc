"""The worked example of docs/fuzzing.md: the printed kernel passes on random rows, and the tool finds its fault."""

import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest

import dosa_verify
from dosa_verify.pytest_plugin import assert_exact_topk

PAGE = Path(dosa_verify.__file__).resolve().parent.parent / "docs" / "fuzzing.md"


@pytest.fixture
def example(tmp_path, monkeypatch):
    code = re.search(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE).group(1)
    (tmp_path / "mykernel.py").write_text(code, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("mykernel", None)
    sys.path[:] = [place for place in sys.path if place != str(tmp_path)]


def test_the_example_agrees_on_random_rows(example):
    import mykernel

    random = np.random.default_rng(0)
    for length in (1, 50, 5000):
        logits = random.normal(size=(3, length)).astype(np.float32)
        assert_exact_topk(logits, mykernel.topk(logits, 40))


def test_the_tool_finds_the_printed_fault(example, dosa):
    code, out, _ = dosa("fuzz", "mykernel:topk", "--json")
    assert code == 1
    failure = json.loads(out)["failure"]
    assert (failure["fault"], failure["evidence"]["missing"]) == ("wrong_set", 1024)
    page = PAGE.read_text(encoding="utf-8")
    assert json.dumps(failure["case"], sort_keys=True) in page
    assert failure["file"] in page
    assert dosa("fuzz", "mykernel:topk", "--replay", failure["file"])[0] == 1
