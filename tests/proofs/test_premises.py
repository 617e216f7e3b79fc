"""No lemma assumes more than it needs: without any one premise it is refuted, by values that plain Python accepts."""

from __future__ import annotations

import dataclasses

import pytest

from proofs import prover
from proofs.lemma import Statement
from proofs.registry import all_lemmas, get_lemma
from proofs.terms import real

LEMMAS = all_lemmas()


def weakened(statement: Statement) -> list[Statement]:
    """The statement without each of its premises."""
    kept = [statement.premises[:i] + statement.premises[i + 1 :] for i in range(len(statement.premises))]
    return [dataclasses.replace(statement, premises=premises) for premises in kept]


def superfluous(statement: Statement) -> list[str]:
    """Premises without which the statement still holds."""
    return [
        premise.text
        for premise, weaker in zip(statement.premises, weakened(statement), strict=True)
        if isinstance(prover.prove(weaker), prover.Proved)
    ]


@pytest.mark.parametrize("lemma", LEMMAS, ids=lambda lemma: lemma.id)
def test_every_premise_is_needed(lemma, evaluate, environment_of):
    for weaker in weakened(lemma.formula()):
        result = prover.prove(weaker)
        assert isinstance(result, prover.Refuted)
        values = environment_of(weaker, dict(result.model))
        assert all(evaluate(premise.text, values) for premise in weaker.premises)
        assert not evaluate(weaker.claim.text, values)


def test_a_superfluous_premise_is_noticed():
    statement = get_lemma("scale_monotone").formula()
    assert superfluous(statement) == []
    idle = real("bound") <= real("bound")
    assert superfluous(dataclasses.replace(statement, premises=(*statement.premises, idle))) == [idle.text]
