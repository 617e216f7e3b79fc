"""Proving as the tool does it: run the prover, judge lemmas, mutants and the ledger, and say it in JSON."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from dosa_ref.spec import BackendUnavailable, InvalidProblem
from proofs import ledger, prover, registry
from proofs.ledger import status_word
from proofs.prover import LemmaReport

SCHEMA = "dosa.prove/1"
PROVED, REFUTED, UNKNOWN = "proved", "refuted", "unknown"
SOLVERS = ("z3", "cvc5", "bitwuzla")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProveReport:
    """Verdict over a set of lemmas.

    Attributes:
        lemmas: the prover's reports, in order.
        solver: solver that must have proved every lemma besides z3, or None.
        stale: where the shipped ledger disagrees with the lemmas of this code; empty if it is up to date.
        time_s: seconds.
    """

    lemmas: Sequence[LemmaReport]
    solver: str | None
    stale: Sequence[str]
    time_s: float

    @property
    def outcome(self) -> str:
        """``refuted`` if a lemma is false or a mutant holds, ``unknown`` if anything is open, else ``proved``."""
        lemmas = {status_word(lemma.status) for lemma in self.lemmas}
        mutants = {status_word(status) for lemma in self.lemmas for _, status in lemma.mutants}
        if REFUTED in lemmas or PROVED in mutants:
            return REFUTED
        return UNKNOWN if UNKNOWN in lemmas | mutants or self.stale or self._unconfirmed() else PROVED

    def failures(self) -> list[str]:
        """Return one line for everything that keeps the outcome from being ``proved``."""
        lines = []
        for lemma in self.lemmas:
            word = status_word(lemma.status)
            if isinstance(lemma.status, prover.Refuted):
                model = ", ".join(f"{name} = {value}" for name, value in lemma.status.model)
                lines.append(f"lemma {lemma.lemma_id}: refuted by {model}; dosa prove {lemma.lemma_id}")
            elif isinstance(lemma.status, prover.Unknown):
                lines.append(f"lemma {lemma.lemma_id}: {word}, {lemma.status.reason}; dosa prove {lemma.lemma_id}")
            lines += [
                f"mutant {mutant} of lemma {lemma.lemma_id}: {status_word(status)}, expected refuted"
                for mutant, status in lemma.mutants
                if status_word(status) != REFUTED
            ]
        real = " (it reads bit-vectors and floats, not real numbers)" if self.solver == "bitwuzla" else ""
        lines += [f"lemma {name}: not confirmed by {self.solver}{real}" for name in self._unconfirmed()]
        return lines + [f"ledger, {line}; python -m proofs.ledger" for line in self.stale]

    def to_json(self) -> dict[str, object]:
        """Return the report as JSON values, schema ``dosa.prove/1``."""
        return {
            "schema": SCHEMA,
            "outcome": self.outcome,
            "time_s": self.time_s,
            "ledger_stale": list(self.stale),
            "lemmas": [
                {
                    "id": lemma.lemma_id,
                    "status": status_word(lemma.status),
                    "mutants": [{"id": mutant, "status": status_word(status)} for mutant, status in lemma.mutants],
                    "confirmed_by": list(lemma.confirmed_by),
                    "time_s": round(lemma.time_s, 3),
                }
                for lemma in self.lemmas
            ],
        }

    def _unconfirmed(self) -> list[str]:
        if self.solver in (None, SOLVERS[0]):
            return []
        return [lemma.lemma_id for lemma in self.lemmas if self.solver not in lemma.confirmed_by]


def run(
    lemma_ids: Sequence[str] = (),
    *,
    solver: str | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> ProveReport:
    """Prove lemmas and refute their mutants.

    Args:
        lemma_ids: which lemmas; empty for all, and then the ledger is compared too.
        solver: None: z3 decides and every other installed solver confirms what it can. ``z3``: no confirmation.
            ``cvc5``, ``bitwuzla``: each lemma must be confirmed by that solver.
        on_progress: called with (lemmas done, lemmas).

    Returns:
        The report.

    Raises:
        InvalidProblem: unknown lemma (names close matches) or solver.
        BackendUnavailable: z3, or the solver that was asked for, is not installed.
    """
    if solver is not None and solver not in SOLVERS:
        raise InvalidProblem("--solver", solver, f"one of {', '.join(SOLVERS)}")
    lemmas = [registry.get_lemma(name) for name in lemma_ids] or list(registry.all_lemmas())
    if solver is not None and solver not in prover.solver_versions():
        raise BackendUnavailable(f"{solver} is not installed: `make setup` installs it")
    started = time.monotonic()

    def progress(_lemma: str, done: int, total: int) -> None:
        if on_progress is not None:
            on_progress(done, total)

    reports = prover.prove_all(lemmas, confirm=solver != SOLVERS[0], on_progress=progress)
    if on_progress is not None:
        on_progress(len(lemmas), len(lemmas))
    stale = () if lemma_ids else _stale()
    return ProveReport(lemmas=reports, solver=solver, stale=stale, time_s=round(time.monotonic() - started, 3))


def export(folder: Path, lemma_ids: Sequence[str] = ()) -> list[Path]:
    """Write the SMT-LIB script of each lemma into a folder; see `run` for ``lemma_ids``."""
    return prover.export(folder, [registry.get_lemma(name) for name in lemma_ids] or None)


def _stale() -> list[str]:
    if not ledger.LEDGER.is_file():
        return ["there is no ledger.json"]
    return ledger.stale(ledger.read())
