"""Every lemma is proved and confirmed; every mutant is refuted by a counterexample that plain Python accepts."""

from __future__ import annotations

from fractions import Fraction

import pytest

from dosa_ref import spec
from proofs import ledger, prover
from proofs.registry import all_lemmas, get_lemma

LEMMAS = all_lemmas()
MUTANTS = [(lemma, mutant) for lemma in LEMMAS for mutant in lemma.mutants]


@pytest.mark.parametrize("lemma", LEMMAS, ids=lambda lemma: lemma.id)
def test_lemma_is_proved_and_confirmed(lemma):
    report = prover.prove_lemma(lemma)
    assert isinstance(report.status, prover.Proved)
    assert report.holds()
    assert report.confirmed_by, "no second solver proved it"


@pytest.mark.parametrize(("lemma", "mutant"), MUTANTS, ids=[f"{lemma.id}-{mutant.id}" for lemma, mutant in MUTANTS])
def test_mutant_is_refuted(lemma, mutant, evaluate, environment_of):
    statement = lemma.mutant_formula(mutant)
    result = prover.prove(statement)
    assert isinstance(result, prover.Refuted)
    values = environment_of(statement, dict(result.model))
    assert all(evaluate(premise.text, values) for premise in statement.premises)
    assert not evaluate(statement.claim.text, values)


@pytest.mark.parametrize(("lemma", "mutant"), MUTANTS, ids=[f"{lemma.id}-{mutant.id}" for lemma, mutant in MUTANTS])
def test_counterexample_of_the_ledger_holds_without_a_solver(lemma, mutant, evaluate, environment_of):
    recorded = ledger.read()["lemmas"][lemma.id]["mutants"]
    (model,) = [entry["counterexample"] for entry in recorded if entry["id"] == mutant.id]
    statement = lemma.mutant_formula(mutant)
    values = environment_of(statement, model)
    assert all(evaluate(premise.text, values) for premise in statement.premises)
    assert not evaluate(statement.claim.text, values)


@pytest.mark.parametrize("lemma", LEMMAS, ids=lambda lemma: lemma.id)
def test_counterexamples_of_mutants_do_not_break_the_lemma(lemma, evaluate, environment_of):
    # The mutants' models satisfy the lemma itself: its claim is true there, or a premise is not.
    statement = lemma.formula()
    names = {name for term in (statement.claim, *statement.premises) for name, _ in term.variables}
    for entry in ledger.read()["lemmas"][lemma.id]["mutants"]:
        if names <= set(entry["counterexample"]):
            values = environment_of(statement, entry["counterexample"])
            broken = not all(evaluate(premise.text, values) for premise in statement.premises)
            assert broken or evaluate(statement.claim.text, values)


@pytest.mark.parametrize(
    ("lemma_id", "constant", "weaker"),
    [
        ("step_sum", "FIRST_STEP_LOSSY", 30),
        ("step_sum", "STEP_LOSSY", 31),
        ("step_sum", "STEP_TERMS", 33),
        ("dot_error", "STEP_LOSSY", 31),
        ("dot_error_total", "STEP_LOSSY", 31),
        ("exponent_vote", "E4M3_MIN_NORMAL", Fraction(1, 2**7)),
        ("head_chain", "HEAD_CHAIN_ULPS", 12),
        ("bound_chain", "BOUND_CHAIN_ULPS", 68),
        ("bound_chain", "MAX_COLUMNS", 76),
        ("float64_slack", "FLOAT64_SLACK_LOG2", -41),
        ("slack_floor", "SLACK_FLOOR_LOG2", -101),
        ("slack_floor", "KEY_SCALE_LOG2_MIN", -80),
        ("no_overflow", "KEY_SCALE_LOG2_MAX", 54),
        ("no_overflow", "ROW_MAGNITUDE_LOG2_MAX", 74),
        ("no_overflow", "HEAD_DIM", 2**40),
        ("no_overflow", "E4M3_MAX", 2**30),
        ("rounding_error", "FLOAT32_UNIT", Fraction(1, 2**25)),
    ],
)
def test_a_changed_constant_changes_the_formula_and_breaks_it(monkeypatch, lemma_id, constant, weaker):
    lemma = get_lemma(lemma_id)
    before = lemma.smt2()
    assert isinstance(prover.prove(lemma.formula()), prover.Proved)
    monkeypatch.setitem(spec.GUARD_CONSTANTS, constant, str(weaker))
    assert lemma.smt2() != before
    assert isinstance(prover.prove(lemma.formula()), prover.Refuted)
