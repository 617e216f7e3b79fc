"""All lemmas, in the order in which one rests on another."""

from __future__ import annotations

import difflib

from dosa_ref.spec import InvalidProblem
from proofs.lemma import Constants, Lemma, Mutant, Statement
from proofs.lemmas import algebra, exceptional, formats, indices, rounding, selection, tensorcore

__all__ = ["THEMES", "Constants", "Lemma", "Mutant", "Statement", "all_lemmas", "get_lemma"]

THEMES = (algebra, formats, tensorcore, rounding, exceptional, selection, indices)
"""Modules that hold lemmas, each in its tuple ``LEMMAS``."""


def all_lemmas() -> tuple[Lemma, ...]:
    """Every registered lemma."""
    return tuple(lemma for theme in THEMES for lemma in theme.LEMMAS)


def get_lemma(lemma_id: str) -> Lemma:
    """The lemma with this id.

    Args:
        lemma_id: Exact id, as in the ledger.

    Returns:
        The lemma.

    Raises:
        InvalidProblem: if there is none; the message names close matches.
    """
    lemmas = {lemma.id: lemma for lemma in all_lemmas()}
    if lemma_id not in lemmas:
        close = difflib.get_close_matches(lemma_id, lemmas) or sorted(lemmas)
        raise InvalidProblem("lemma", lemma_id, f"one of {', '.join(close)}")
    return lemmas[lemma_id]
