"""Proving as the tool does it: run the prover, judge lemmas and mutants, and say it in JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from proofs.prover import LemmaReport

SCHEMA = "dosa.prove/1"
PROVED, REFUTED, UNKNOWN = "proved", "refuted", "unknown"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProveReport:
    """Verdict over a set of lemmas.

    Attributes:
        lemmas: the prover's reports, in order.
        time_s: seconds.
    """

    lemmas: Sequence[LemmaReport]
    time_s: float

    @property
    def outcome(self) -> str:
        """``refuted`` if a lemma is false or a mutant holds, ``unknown`` if anything is undecided, else ``proved``."""
        lemmas = {_word(lemma.status) for lemma in self.lemmas}
        mutants = {_word(status) for lemma in self.lemmas for _, status in lemma.mutants}
        if REFUTED in lemmas or PROVED in mutants:
            return REFUTED
        return UNKNOWN if UNKNOWN in lemmas | mutants else PROVED

    def failures(self) -> list[str]:
        """Return one line for each lemma that is not proved and each mutant that is not refuted."""
        lines = []
        for lemma in self.lemmas:
            if _word(lemma.status) != PROVED:
                lines.append(f"lemma {lemma.lemma_id}: {lemma.status}")
            lines += [
                f"mutant {mutant} of lemma {lemma.lemma_id}: {_word(status)}, expected refuted"
                for mutant, status in lemma.mutants
                if _word(status) != REFUTED
            ]
        return lines

    def to_json(self) -> dict[str, object]:
        """Return the report as JSON values, schema ``dosa.prove/1``."""
        return {
            "schema": SCHEMA,
            "outcome": self.outcome,
            "time_s": self.time_s,
            "lemmas": [
                {
                    "id": lemma.lemma_id,
                    "status": _word(lemma.status),
                    "mutants": [{"id": mutant, "status": _word(status)} for mutant, status in lemma.mutants],
                    "confirmed_by": list(lemma.confirmed_by),
                    "time_s": round(lemma.time_s, 3),
                }
                for lemma in self.lemmas
            ],
        }


def _word(status: object) -> str:
    """``proved``, ``refuted`` or ``unknown`` for one of the prover's values."""
    return type(status).__name__.lower()
