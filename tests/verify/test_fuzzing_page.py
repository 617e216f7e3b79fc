"""docs/fuzzing.md: the worked example passes on random rows, the tool finds its fault, tables are those of records."""

import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest

import dosa_verify
from dosa_ref.spec import InvalidProblem
from dosa_verify.fuzz import page
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


EVIDENCE = PAGE.parent / "evidence"


def records():
    return {file.name: json.loads(file.read_text(encoding="utf-8")) for file in sorted(EVIDENCE.glob("fuzz_*.json"))}


def test_the_tables_are_those_of_the_records():
    text = PAGE.read_text(encoding="utf-8")
    assert page.build(text, EVIDENCE) == text


def test_a_counterexample_stands_in_the_table():
    found = records()
    table = page.render_runs(found)
    for name, record in found.items():
        row = next(line for line in table.splitlines() if f"`{record['command']}`" in line)
        assert (record["audit"]["failure"] is None) == row.endswith(("exact |", "went) |")), name
        assert f"{record['audit']['cases']:,}" in row


def test_records_that_prove_nothing_are_refused():
    with pytest.raises(InvalidProblem, match="fuzz_x"):
        page.render_runs({"fuzz_x.json": {"audit": {"schema": "dosa.audit_fp8/1"}}})
    mutation = json.loads((EVIDENCE / "mutation.json").read_text(encoding="utf-8"))
    mutation["survivors"][0]["kind"] = None
    with pytest.raises(InvalidProblem, match="mutation"):
        page.render_mutation(mutation)
    mutants = json.loads((EVIDENCE / "mutants.json").read_text(encoding="utf-8"))
    next(iter(mutants["mutants"].values()))["directed"] = None
    with pytest.raises(InvalidProblem, match="mutants"):
        page.render_mutants(mutants)
    with pytest.raises(InvalidProblem, match="marker"):
        page.refresh("no markers", page.RUNS, "")


def test_every_mutant_is_recorded():
    recorded = json.loads((EVIDENCE / "mutants.json").read_text(encoding="utf-8"))["mutants"]
    text = (Path(__file__).parent / "test_mutants.py").read_text(encoding="utf-8")
    table = text[text.index("MUTANTS = {") : text.index("def find(")]
    assert set(re.findall(r'^    "(\w+)": \(', table, re.MULTILINE)) == set(recorded)
