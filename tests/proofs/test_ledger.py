"""The ledger in the package is up to date, and every way of falling behind is noticed."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
import re
import shutil

import pytest

from dosa_ref import spec
from dosa_ref.spec import BackendUnavailable
from proofs import ledger, prover
from proofs.prover import LemmaReport, Unknown
from proofs.registry import all_lemmas, get_lemma


@pytest.fixture(name="recorded")
def recorded_ledger():
    return ledger.read()


@pytest.fixture(name="folder")
def package_copy(tmp_path):
    """A copy of the files that the ledger speaks of."""
    for name in ("lemmas", "smt2"):
        shutil.copytree(ledger.PACKAGE / name, tmp_path / name)
    for name in ledger.SHARED:
        shutil.copy(ledger.PACKAGE / name, tmp_path / name)
    return tmp_path


@pytest.fixture(scope="module", name="small")
def small_ledger():
    """Two lemmas, their reports and their ledger."""
    lemmas = [get_lemma("relu_subadditive"), get_lemma("step_alignment")]
    reports = prover.prove_all(lemmas)
    return lemmas, reports, ledger.build(lemmas, reports)


def test_ledger_is_up_to_date(recorded):
    assert ledger.stale(recorded) == []


def test_every_lemma_is_proved_and_confirmed_by_another_solver(recorded):
    assert recorded["schema"] == "dosa.ledger/1"
    assert list(recorded["lemmas"]) == [lemma.id for lemma in all_lemmas()]
    for entry in recorded["lemmas"].values():
        assert entry["result"] == "proved"
        assert {solver["result"] for solver in entry["solvers"]} == {"proved"}
        assert len(entry["solvers"]) >= 2
        assert all(mutant["status"] == "refuted" and mutant["counterexample"] for mutant in entry["mutants"])


def test_the_documents_are_up_to_date(recorded):
    path = ledger.PACKAGE.parent / "docs" / "lemmas.md"
    assert path.read_text(encoding="utf-8") == ledger.document(recorded)


def test_no_foreign_scripts():
    assert {path.stem for path in (ledger.PACKAGE / "smt2").iterdir()} == {lemma.id for lemma in all_lemmas()}


def test_paths_are_relative_and_hashes_are_of_the_files(recorded):
    for entry in recorded["lemmas"].values():
        for part in ("source", "smt2"):
            data = (ledger.PACKAGE / entry[part]["path"]).read_bytes()
            assert entry[part]["sha256"] == hashlib.sha256(data).hexdigest()


def test_a_changed_constant_makes_the_ledger_stale(recorded, monkeypatch):
    monkeypatch.setitem(spec.GUARD_CONSTANTS, "HEAD_CHAIN_ULPS", "15")
    faults = ledger.stale(recorded)
    assert "head_chain: constants differs" in faults
    assert "head_chain: statement_sha256 differs" in faults
    assert not any(fault.startswith("aggregation") for fault in faults)


def test_an_edited_source_file_is_noticed(recorded, folder):
    path = folder / "lemmas" / "selection.py"
    path.write_text(path.read_text().replace("bound < tau if strict", "bound <= tau if strict"))
    faults = ledger.stale(recorded, folder=folder)
    assert "strict_pruning: source differs" in faults
    assert not any(fault.startswith("aggregation") for fault in faults)


@pytest.mark.parametrize("name", ledger.SHARED)
def test_an_edit_of_what_all_statements_are_made_of_is_noticed(recorded, folder, name):
    path = folder / name
    path.write_text(path.read_text() + "# edited\n")
    assert ledger.stale(recorded, folder=folder) == [f"{name} differs"]
    path.unlink()
    assert ledger.stale(recorded, folder=folder) == [f"{name} differs"]


def test_ledgers_that_speak_of_other_shared_sources_differ(recorded):
    fewer = {name: text for name, text in recorded["shared"].items() if name != "terms.py"}
    for other in ({**recorded, "shared": fewer}, {**recorded, "shared": {**recorded["shared"], "terms.py": "0"}}):
        assert ledger.stale(other) == ledger.differences(recorded, other) == ["terms.py differs"]


def test_an_edited_or_missing_script_is_noticed(recorded, folder):
    path = folder / "smt2" / "strict_pruning.smt2"
    path.write_text(path.read_text().replace("(< bound tau)", "(<= bound tau)"))
    (folder / "smt2" / "aggregation.smt2").unlink()
    faults = ledger.stale(recorded, folder=folder)
    assert "strict_pruning: smt2 differs" in faults
    assert "strict_pruning: smt2/strict_pruning.smt2 is not what the lemma exports" in faults
    assert "aggregation: smt2 differs" in faults


def test_missing_foreign_and_reworded_entries_are_noticed(recorded):
    edited = copy.deepcopy(recorded)
    edited["schema"] = "dosa.ledger/0"
    edited["lemmas"]["stranger"] = edited["lemmas"].pop("aggregation")
    edited["lemmas"]["threshold"]["statement"] = "Anything."
    edited["lemmas"]["threshold"]["result"] = "unknown"
    edited["lemmas"]["projection"]["mutants"][0]["status"] = "proved"
    assert set(ledger.stale(edited)) == {
        "schema dosa.ledger/0, expected dosa.ledger/1",
        "stranger: in the ledger, but not registered",
        "aggregation: not in the ledger",
        "threshold: statement differs",
        "threshold: result differs",
        "projection: mutants differ",
    }


def test_build_records_what_the_prover_said(small, recorded):
    lemmas, _, fresh = small
    assert list(fresh["lemmas"]) == [lemma.id for lemma in lemmas]
    for name, entry in fresh["lemmas"].items():
        assert {k: v for k, v in entry.items() if k != "solvers"} == {
            k: v for k, v in recorded["lemmas"][name].items() if k != "solvers"
        }
    json.dumps(fresh)


def test_a_result_that_is_unknown_is_recorded_as_such(small):
    lemmas, reports, _ = small
    unknown = Unknown(reason="z3: timeout", time_s=1.0)
    spoiled = dataclasses.replace(reports[0], status=unknown, mutants=(("wrong_sign", unknown),), confirmations=())
    entry = ledger.build(lemmas[:1], [spoiled])["lemmas"]["relu_subadditive"]
    assert entry["result"] == "unknown"
    assert entry["mutants"] == [{"id": "wrong_sign", "status": "unknown", "counterexample": None}]
    assert "relu_subadditive: result differs" in ledger.stale(
        {"schema": ledger.SCHEMA, "lemmas": {lemmas[0].id: entry}}
    )


def test_differences_ignore_times_only(small):
    _, _, fresh = small
    other = copy.deepcopy(fresh)
    other["lemmas"]["step_alignment"]["solvers"][0]["time_s"] = 99.0
    assert ledger.differences(fresh, other) == []
    other["lemmas"]["step_alignment"]["mutants"][0]["counterexample"] = {}
    assert ledger.differences(fresh, other) == ["step_alignment: differs from the recorded ledger"]
    # Another version of z3 may find another counterexample, and another solver may be missing.
    other["lemmas"]["step_alignment"]["solvers"] = [{**fresh["lemmas"]["step_alignment"]["solvers"][0], "version": "0"}]
    assert ledger.differences(fresh, other) == []
    other["lemmas"]["step_alignment"]["result"] = "refuted"
    assert ledger.differences(fresh, other) == ["step_alignment: differs from the recorded ledger"]
    del other["lemmas"]["step_alignment"]
    assert ledger.differences(fresh, other) == ["step_alignment: only in the recorded ledger"]
    assert ledger.differences(other, fresh) == ["step_alignment: only in the new ledger"]


@pytest.fixture(name="package")
def package_with_two_lemmas(small, folder, monkeypatch):
    """The command line, working on two lemmas in a copy of the package."""
    lemmas, reports, _ = small
    monkeypatch.setattr(ledger, "PACKAGE", folder)
    monkeypatch.setattr(ledger, "all_lemmas", lambda: tuple(lemmas))
    monkeypatch.setattr(ledger, "read", lambda: json.loads((folder / "ledger.json").read_text()))
    monkeypatch.setattr(ledger, "write", lambda value: (folder / "ledger.json").write_text(json.dumps(value)))
    monkeypatch.setattr(ledger, "stale", lambda *_: [])
    monkeypatch.setattr(prover, "prove_all", lambda *_: list(reports))
    return folder


def test_command_writes_then_checks(package, capsys):
    assert ledger.main([]) == 0
    assert {path.name for path in (package / "smt2").iterdir()} == {"relu_subadditive.smt2", "step_alignment.smt2"}
    assert ledger.main(["--check"]) == 0
    assert ledger.main(["--docs", str(package / "lemmas.md")]) == 0
    assert "### step_alignment" in (package / "lemmas.md").read_text()
    (package / "ledger.json").write_text(json.dumps({"schema": ledger.SCHEMA, "lemmas": {}}))
    assert ledger.main(["--check"]) == 1
    assert "step_alignment: only in the new ledger" in capsys.readouterr().err


def test_command_writes_nothing_that_does_not_hold(package, small, monkeypatch, capsys):
    _, reports, _ = small
    unknown = Unknown(reason="z3: timeout", time_s=1.0)
    proof = reports[1].status
    spoiled = [
        dataclasses.replace(reports[0], status=unknown),
        dataclasses.replace(reports[1], mutants=(*reports[1].mutants[:2], ("long_accumulator", proof))),
    ]
    monkeypatch.setattr(prover, "prove_all", lambda *_: spoiled)
    assert ledger.main([]) == 1
    assert not (package / "ledger.json").exists()
    errors = capsys.readouterr().err
    assert "relu_subadditive: unknown z3: timeout" in errors
    assert "step_alignment: mutant long_accumulator is proved" in errors


def test_command_without_a_solver(package, monkeypatch, capsys):
    def unavailable(chosen):
        raise BackendUnavailable("proving needs z3")

    monkeypatch.setattr(prover, "prove_all", unavailable)
    assert ledger.main(["--check"]) == 3
    assert "needs z3" in capsys.readouterr().err


def test_ledger_can_be_written_and_read(tmp_path, small):
    _, _, fresh = small
    ledger.write(fresh, tmp_path / "ledger.json")
    assert ledger.read(tmp_path / "ledger.json") == fresh


def test_report_type_is_frozen(small):
    _, reports, _ = small
    assert isinstance(reports[0], LemmaReport)
    with pytest.raises(dataclasses.FrozenInstanceError):
        reports[0].status = None


def test_no_proof_comes_near_its_limits(recorded):
    for name, entry in recorded["lemmas"].items():
        for solver in entry["solvers"]:
            assert 2 * solver["time_s"] <= solver["time_limit_s"], name
        decided = entry["solvers"][0]
        assert 0 < 2 * decided["resources"] <= decided["resource_limit"], name


def test_every_solver_answers_and_most_lemmas_have_two(recorded):
    solvers = [{solver["name"] for solver in entry["solvers"]} for entry in recorded["lemmas"].values()]
    assert all("z3" in names for names in solvers)
    assert sum(len(names) >= 2 for names in solvers) >= 0.8 * len(solvers)
    assert sum(len(names) == 3 for names in solvers) >= 15


def test_the_argument_names_every_lemma_and_no_other():
    text = (ledger.PACKAGE.parent / "docs" / "soundness.md").read_text(encoding="utf-8")
    names = {lemma.id for lemma in all_lemmas()}
    quoted = set(re.findall(r"`([a-z0-9_]+)`", text))
    assert names - quoted == set()
    # Every other quoted word is a term of the guard, a name of this page's tables, or plain mathematics.
    terms = {"residual", "dots", "each", "head_chain", "bound_chain"}
    assert quoted - names - terms <= {"code", "tau", "topk", "e", "n", "u", "y", "sm90", "en_layer06_h64", "float64"}
