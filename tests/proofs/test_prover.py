"""The prover: what it accepts, what it refuses to call a proof, and how it fails."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest

from dosa_ref.spec import BackendUnavailable
from proofs import prover
from proofs.lemma import Lemma, Mutant, Statement
from proofs.prover import LemmaReport, Proved, Refuted, Unknown
from proofs.registry import get_lemma
from proofs.terms import bits, boolean, float32_from_bits, float_equal, real


def make_lemma(statement: Statement, broken: Statement | None = None) -> Lemma:
    x = real("x")
    false = Statement(logic="QF_LRA", premises=(), claim=x < x)
    return Lemma(
        id="example",
        statement="An example.",
        theme="algebra",
        build=lambda _: statement,
        speaks_of=("dosa_ref.spec",),
        mutants=(Mutant(id="broken", broken="false", build=lambda _: broken or false),),
    )


X, Y = real("x"), real("y")
TRUE = Statement(logic="QF_LRA", premises=(X < Y,), claim=X <= Y)
FALSE = Statement(logic="QF_LRA", premises=(X <= Y,), claim=X < Y)
VACUOUS = Statement(logic="QF_LRA", premises=(X < Y, Y < X), claim=X < X)


def test_a_true_statement_is_proved():
    result = prover.prove(TRUE)
    assert isinstance(result, Proved)
    assert result.solver == "z3"


def test_a_false_statement_is_refuted_with_values():
    result = prover.prove(FALSE)
    assert isinstance(result, Refuted)
    values = dict(result.model)
    assert set(values) == {"x", "y"}
    assert values["x"] == values["y"]


def test_bit_vectors_are_shown_in_full_and_free_variables_marked():
    a, narrow, free = bits("a", 32), bits("narrow", 3), boolean("free")
    value = float32_from_bits(a)
    result = prover.prove(Statement(logic="QF_BVFP", premises=(narrow >= 7, free), claim=float_equal(value, value)))
    assert isinstance(result, Refuted)
    model = dict(result.model)
    assert model["a"].startswith("#x")
    assert len(model["a"]) == 10
    assert model["narrow"] == "#b111"
    assert model["free"] == "true"


def test_a_proof_cannot_be_made_outside_the_prover():
    with pytest.raises(TypeError, match="made by proofs"):
        Proved(solver="z3", time_s=0.0, resources=0, seal=object())
    proof = prover.prove(TRUE)
    with pytest.raises(dataclasses.FrozenInstanceError):
        proof.solver = "me"


def test_unknown_is_no_success(monkeypatch):
    monkeypatch.setattr(prover, "RESOURCE_LIMIT", 1)
    result = prover.prove(get_lemma("nearest_even").formula())
    assert isinstance(result, Unknown)
    assert result.reason.startswith("z3: ")
    report = prover.prove_lemma(get_lemma("nearest_even"))
    assert not report.holds()
    assert isinstance(report.status, Unknown)
    assert report.confirmed_by == ()


def test_a_mutant_that_holds_spoils_the_lemma():
    report = prover.prove_lemma(make_lemma(TRUE, broken=TRUE))
    assert isinstance(report.status, Proved)
    assert not report.holds()


def test_premises_that_cannot_hold_prove_nothing():
    assert isinstance(prover.prove(VACUOUS), Proved)
    report = prover.prove_lemma(make_lemma(VACUOUS))
    assert isinstance(report.status, Unknown)
    assert report.status.reason == "vacuous: the premises are unsat in z3"


def test_a_false_lemma_is_refuted_and_not_confirmed():
    report = prover.prove_lemma(make_lemma(FALSE))
    assert isinstance(report.status, Refuted)
    assert report.confirmed_by == ()
    assert not report.holds()


@pytest.mark.parametrize("lemma_id", ["step_alignment", "relu_subadditive"])
def test_other_solvers_confirm(lemma_id):
    statement = get_lemma(lemma_id).formula()
    expected = {"cvc5": "unsat"} | ({"bitwuzla": "unsat"} if statement.logic == "QF_BV" else {})
    assert {name: verdict for name, verdict, _ in prover._confirmations(statement)} == expected


def test_other_solvers_see_a_false_statement():
    lemma = get_lemma("step_alignment")
    (mutant,) = [mutant for mutant in lemma.mutants if mutant.id == "shift_8"]
    answers = {name: verdict for name, verdict, _ in prover._confirmations(lemma.mutant_formula(mutant))}
    assert answers == {"cvc5": "sat", "bitwuzla": "sat"}


def test_a_contradiction_between_solvers_is_unknown(monkeypatch):
    monkeypatch.setattr(prover, "_ask_cvc5", lambda *_: "sat")
    report = prover.prove_lemma(make_lemma(TRUE))
    assert isinstance(report.status, Unknown)
    assert report.status.reason == "cvc5 contradicts z3"


def test_a_solver_that_gives_up_confirms_nothing(monkeypatch):
    monkeypatch.setattr(prover, "_ask_cvc5", lambda *_: "unknown (TIMEOUT)")
    report = prover.prove_lemma(make_lemma(TRUE))
    assert report.holds()
    assert report.confirmed_by == ()


def test_confirmation_can_be_left_out(monkeypatch):
    monkeypatch.setattr(prover, "_ask_cvc5", lambda *_: pytest.fail("asked"))
    assert prover.prove_lemma(make_lemma(TRUE), confirm=False).confirmed_by == ()


def test_missing_second_solvers_are_no_error(monkeypatch):
    def version(package: str) -> str:
        if package != "z3-solver":
            raise prover.importlib.metadata.PackageNotFoundError(package)
        return "1"

    monkeypatch.setattr(prover.importlib.metadata, "version", version)
    assert prover.solver_versions() == {"z3": "1"}
    assert prover.prove_lemma(make_lemma(TRUE)).confirmed_by == ()


def test_a_model_that_z3_cannot_justify_is_unknown(monkeypatch):
    import z3

    monkeypatch.setattr(z3, "is_true", lambda *_: False)
    result = prover.prove(FALSE)
    assert isinstance(result, Unknown)
    assert "does not satisfy" in result.reason


def test_without_z3_proving_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "z3", None)
    with pytest.raises(BackendUnavailable, match="extra 'prove'"):
        prover.prove(TRUE)


def test_everything_but_proving_works_without_solvers(tmp_path):
    program = f"""
import sys
for name in ("z3", "cvc5", "bitwuzla"):
    sys.modules[name] = None
from proofs import ledger, prover, registry
assert len(prover.export({str(tmp_path)!r})) == len(registry.all_lemmas())
assert ledger.stale(ledger.read()) == []
"""
    subprocess.run([sys.executable, "-c", program], check=True, cwd=prover.__file__.rpartition("/proofs/")[0])


def test_importing_the_registry_loads_no_solver():
    program = "import sys, proofs.registry, proofs.prover; sys.exit(len({'z3', 'cvc5', 'bitwuzla'} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", program], check=True, cwd=prover.__file__.rpartition("/proofs/")[0])


def test_prove_all_reports_in_order_and_tells_progress():
    lemmas = [get_lemma("relu_homogeneous"), get_lemma("threshold")]
    seen = []
    reports = prover.prove_all(iter(lemmas), confirm=False, on_progress=lambda *step: seen.append(step))
    assert seen == [("relu_homogeneous", 0, 2), ("threshold", 1, 2)]
    assert [report.lemma_id for report in reports] == ["relu_homogeneous", "threshold"]
    assert all(isinstance(report, LemmaReport) and report.holds() for report in reports)


def test_prove_all_takes_every_registered_lemma_by_default(monkeypatch):
    monkeypatch.setattr(prover, "all_lemmas", lambda: (make_lemma(TRUE),))
    assert [report.lemma_id for report in prover.prove_all()] == ["example"]


def test_export_writes_what_solvers_read(tmp_path):
    lemma = get_lemma("order_code")
    (path,) = prover.export(tmp_path / "new", [lemma])
    text = path.read_text()
    assert text == lemma.smt2()
    assert prover._ask_cvc5(text) == "unsat"
    assert prover._ask_bitwuzla(text) == "unsat"


def test_no_script_holds_what_other_solvers_reject():
    for path in (prover.Path(prover.__file__).parent / "smt2").glob("*.smt2"):
        formula = [line for line in path.read_text().splitlines() if not line.startswith(";")]
        assert not any("^" in line for line in formula), path.name
