"""The pruned path runs only on proofs of this very code, on a device that computes the proved arithmetic."""

import ast
import json
import shutil

import numpy as np
import pytest
import torch

from dosa_gpu import api, gate
from dosa_gpu.kernels import bound
from dosa_gpu.plan import Path
from dosa_ref import spec
from dosa_ref.spec import BackendUnavailable, UnprovedBound


@pytest.fixture(scope="module")
def shared_copy(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gate") / "proofs"
    shutil.copytree(gate.ledger_folder(), folder, ignore=shutil.ignore_patterns("__pycache__"))
    return folder, {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.fixture
def copy(shared_copy):
    """A copy of the proofs to spoil; what a test changes is put back, which is quicker than another copy."""
    folder, contents = shared_copy
    yield folder
    for file, data in contents.items():
        if not file.is_file() or file.read_bytes() != data:
            file.write_bytes(data)
    assert {file for file in folder.rglob("*") if file.is_file()} == contents.keys()


def check(folder, **changed):
    gate.check_ledger(folder, bound.LEMMAS, {**spec.GUARD_CONSTANTS, **changed})


def edit_ledger(folder, change):
    file = folder / "ledger.json"
    ledger = json.loads(file.read_text(encoding="utf-8"))
    change(ledger)
    file.write_text(json.dumps(ledger), encoding="utf-8")


def test_the_committed_ledger_passes(copy):
    check(copy)


@pytest.mark.parametrize("name", sorted(spec.GUARD_CONSTANTS))
def test_any_changed_constant_is_refused_naming_a_lemma_about_it(copy, name):
    with pytest.raises(UnprovedBound, match=name) as refusal:
        check(copy, **{name: "12345"})
    assert refusal.value.lemma in bound.LEMMAS


@pytest.mark.parametrize("lemma", bound.LEMMAS)
def test_an_edited_lemma_is_refused_by_name(copy, lemma):
    entry = json.loads((copy / "ledger.json").read_text(encoding="utf-8"))["lemmas"][lemma]
    file = copy / entry["smt2"]["path"]
    file.write_text(file.read_text(encoding="utf-8") + "; edited\n", encoding="utf-8")
    with pytest.raises(UnprovedBound, match=f"lemma {lemma}: .*edited"):
        check(copy)


def test_an_edited_source_file_is_refused(copy):
    file = copy / "lemmas" / "algebra.py"
    file.write_text(file.read_text(encoding="utf-8").replace("<=", "<", 1), encoding="utf-8")
    with pytest.raises(UnprovedBound, match=r"lemmas/algebra\.py was edited"):
        check(copy)


@pytest.mark.parametrize("name", gate.SHARED_SOURCES)
def test_an_edit_of_what_all_statements_are_made_of_is_refused(copy, name):
    file = copy / name
    text = file.read_text(encoding="utf-8")
    file.write_text(text + "# edited\n", encoding="utf-8")
    with pytest.raises(UnprovedBound, match=rf"{name} was edited \(or is missing\)"):
        check(copy)
    file.unlink()
    with pytest.raises(UnprovedBound, match=rf"{name} was edited \(or is missing\)"):
        check(copy)
    file.write_text(text, encoding="utf-8")
    check(copy)
    for change in (lambda shared: shared.pop(name), lambda shared: shared.update({"other.py": "0"})):
        edit_ledger(copy, lambda ledger, change=change: change(ledger["shared"]))
        with pytest.raises(UnprovedBound, match="does not speak of the sources"):
            check(copy)


def test_shared_sources_are_all_that_a_lemma_imports():
    folder = gate.ledger_folder()
    imported = {"prover.py"}  # decides, and is imported by no lemma
    for file in (folder / "lemmas").glob("*.py"):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        imported |= {f"{module.removeprefix('proofs.')}.py" for module in modules if module.startswith("proofs")}
        assert not any(isinstance(node, ast.Import) for node in ast.walk(tree))
    assert imported == set(gate.SHARED_SOURCES)


@pytest.mark.parametrize("result", ["refuted", "unknown"])
def test_a_lemma_that_is_not_proved_is_refused(copy, result):
    edit_ledger(copy, lambda ledger: ledger["lemmas"]["dot_error"].update(result=result))
    with pytest.raises(UnprovedBound, match=f"lemma dot_error: the ledger says {result}"):
        check(copy)


def test_a_missing_lemma_file_or_entry_is_refused(copy):
    (copy / "smt2" / "aggregation.smt2").unlink()
    with pytest.raises(UnprovedBound, match=r"lemma aggregation: smt2/aggregation\.smt2 was edited \(or is missing\)"):
        check(copy)
    edit_ledger(copy, lambda ledger: ledger["lemmas"].pop("aggregation"))
    with pytest.raises(UnprovedBound, match="lemma aggregation: not in the ledger"):
        check(copy)


DAMAGE = {
    "no table": list,
    "entry is a list": lambda lemmas: {**lemmas, "dot_error": []},
    "entry without constants": lambda lemmas: without(lemmas, "constants"),
    "constants emptied": lambda lemmas: {name: {**entry, "constants": {}} for name, entry in lemmas.items()},
    "another statement": lambda lemmas: changed(lemmas, statement="Everything is bounded."),
    "another statement hash": lambda lemmas: changed(lemmas, statement_sha256="0" * 64),
    "no solver": lambda lemmas: changed(lemmas, solvers=[]),
    "a solver disagrees": lambda lemmas: changed(lemmas, solvers=[{"name": "z3", "result": "proved"}, REFUTES]),
    "no mutant": lambda lemmas: changed(lemmas, mutants=[]),
    "a mutant that was proved": lambda lemmas: changed(lemmas, mutants=[{"id": "m", "status": "proved"}]),
    "another lemma's script": lambda lemmas: changed(lemmas, smt2=lemmas["aggregation"]["smt2"]),
}
REFUTES = {"name": "cvc5", "result": "refuted"}


def changed(lemmas, **fields):
    return {**lemmas, "dot_error": {**lemmas["dot_error"], **fields}}


def without(lemmas, field):
    entry = {name: value for name, value in lemmas["dot_error"].items() if name != field}
    return {**lemmas, "dot_error": entry}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_weakened_or_malformed_ledger_is_refused(copy, damage):
    def weaken(ledger):
        ledger["lemmas"] = DAMAGE[damage](ledger["lemmas"])

    edit_ledger(copy, weaken)
    with pytest.raises(UnprovedBound):
        check(copy)


@pytest.mark.parametrize("text", ["", "[" * 100_000, "[]", '{"schema": "other/1"}'])
def test_a_broken_or_foreign_ledger_is_refused(copy, text):
    (copy / "ledger.json").write_text(text, encoding="utf-8")
    with pytest.raises(UnprovedBound, match="ledger"):
        check(copy)


def small_problem(device):
    q = torch.ones(2, 32, 128).to(torch.float8_e4m3fn).to(device)
    k = torch.ones(20, 128).to(torch.float8_e4m3fn).to(device)
    ks = torch.zeros(2, dtype=torch.int32, device=device)
    return q, k, torch.ones(20, device=device), torch.ones(2, 32, device=device), ks, ks + 20


class TestPath:
    """The gate stands in the public entry point, not only beside it."""

    @pytest.fixture(autouse=True)
    def fresh(self):
        gate.require_proved.cache_clear()
        yield
        gate.require_proved.cache_clear()

    def test_a_changed_constant_stops_all_but_the_dense_path(self, device, monkeypatch):
        monkeypatch.setattr(spec, "BOUND_CHAIN_ULPS", 8)
        for path in (Path.DOSA, Path.LITETOPK):
            with pytest.raises(UnprovedBound, match="BOUND_CHAIN_ULPS = 80, the kernels use 8"):
                api.select_prefill(*small_problem(device), 3, path=path)
        dense = api.select_prefill(*small_problem(device), 3, path=Path.DENSE)
        np.testing.assert_array_equal(dense.topk_indices.cpu(), [[0, 1, 2]] * 2)

    def test_a_device_with_other_bits_is_refused(self, device, monkeypatch):
        wrong = (*gate.WITNESSES[:2], (*gate.WITNESSES[2][:2], 66488.5))
        monkeypatch.setattr(gate, "WITNESSES", wrong)
        gate._cuda_faults.cache_clear()
        with pytest.raises(UnprovedBound, match=r"constructed dot 2: computed 65536\.0"):
            gate.require_contract(gate.device_faults(torch.device(device)))
        if device == "cpu":
            with pytest.raises(BackendUnavailable, match=r"emulator\.install.*constructed dot 2"):
                api.select_prefill(*small_problem(device), 3, path=Path.DENSE)
        else:
            assert api.select_prefill(*small_problem(device), 3, path=Path.DENSE).stats.contract == "unverified"
        gate._cuda_faults.cache_clear()

    def test_another_gpu_architecture_is_refused(self, monkeypatch):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (10, 0))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "some GPU")
        gate._cuda_faults.cache_clear()
        with pytest.raises(UnprovedBound, match=r"some GPU has compute capability 10\.0"):
            gate.require_contract(gate.device_faults(torch.device("cuda", 0)))
        gate._cuda_faults.cache_clear()
