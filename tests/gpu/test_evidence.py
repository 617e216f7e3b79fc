"""The same bits on two machines: the committed hashes of the reference, met by the kernels wherever this runs."""

import json
from pathlib import Path

import pytest

from dosa_ref import select
from dosa_verify import evidence
from dosa_verify.fuzz.cases import build, case_from_json
from dosa_verify.targets.dosa import DENSE, MODES

FOLDER = Path(__file__).parents[2] / "docs" / "evidence"
KNOWN = json.loads((FOLDER / "reference.json").read_text(encoding="utf-8"))
EVERY_SIXTH = KNOWN["cases"][::6]


@pytest.mark.parametrize("entry", EVERY_SIXTH, ids=lambda entry: f"seed{entry['case']['seed']}")
def test_a_case_has_the_hash_that_the_reference_gave(entry, device):
    case = case_from_json(entry["case"])
    problem = build(case)
    assert evidence.problem_hash(problem) == entry["input_sha256"]
    want = entry["results"][str(case.topk)]["all_rows"]
    for variant in (*MODES, DENSE):
        got, _ = evidence.run_variant(problem, variant, evidence.Device(device), case.columns, case.survivor_capacity)
        assert got == want, variant


def test_the_reference_still_gives_its_own_hashes():
    for entry in EVERY_SIXTH:
        case = case_from_json(entry["case"])
        (indices, scores), *_ = evidence.expected(build(case), (case.topk,)).values()
        assert select.result_hash(indices, scores) == entry["results"][str(case.topk)]["all_rows"]


def test_the_suite_is_the_one_that_was_recorded():
    assert evidence.suite() == [case_from_json(entry["case"]) for entry in KNOWN["cases"]]


@pytest.mark.parametrize("name", ["emulator", "h200"])
def test_the_committed_runs_met_every_hash(name):
    """Not only do the files say "no faults": every case and every trace is in them, with the reference's hash."""
    run = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    assert run["faults"] == []
    variants = len(MODES) + 1
    wanted = {json.dumps(entry["case"]): entry for entry in KNOWN["cases"]}
    assert {json.dumps(entry["case"]) for entry in run["cases"]} == set(wanted)
    for entry in run["cases"]:
        want = wanted[json.dumps(entry["case"])]["results"][str(entry["case"]["topk"])]["all_rows"]
        assert [found["sha256"] for found in entry["runs"]] == [want] * variants
    which = "all_rows" if name == "h200" else "emulated_rows"
    for trace in KNOWN["traces"]:
        runs = next(entry for entry in run["traces"] if entry["name"] == trace["name"])["runs"]
        assert len(runs) == variants * len(evidence.TRACE_TOPKS)
        assert all(found["sha256"] == trace["results"][str(found["topk"])][which] for found in runs)
