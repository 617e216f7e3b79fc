"""What a lemma is: a statement in words, the same statement as terms, and what must not be provable."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TypeAlias

from dosa_ref import spec
from proofs.terms import BOOL, Term, negate

Constants: TypeAlias = Mapping[str, Fraction]


@dataclass(frozen=True, slots=True, kw_only=True)
class Statement:
    """``premises`` imply ``claim``, for all values of the variables.

    Args:
        logic: SMT-LIB name of a logic that contains the terms.
        premises: Truth-valued terms, all assumed.
        claim: The truth-valued term that follows.
    """

    logic: str
    premises: tuple[Term, ...]
    claim: Term

    def __post_init__(self) -> None:
        """Refuse terms that are not truth values."""
        for term in (*self.premises, self.claim):
            if term.sort != BOOL:
                raise TypeError(f"{term.text} is a {term.sort}, not a truth value")

    def refutation(self) -> str:
        """SMT-LIB script that is unsatisfiable exactly if the statement holds: premises and negated claim."""
        return self._script(*self.premises, negate(self.claim))

    def satisfiability(self) -> str:
        """SMT-LIB script that is satisfiable exactly if the premises can hold together."""
        return self._script(*self.premises)

    def _script(self, *assertions: Term) -> str:
        variables = frozenset().union(self.claim.variables, *(t.variables for t in self.premises))
        lines = [f"(set-logic {self.logic})"]
        lines += [f"(declare-const {name} {sort})" for name, sort in sorted(variables)]
        lines += [f"(assert {term.text})" for term in assertions]
        return "\n".join([*lines, "(check-sat)"]) + "\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """A lemma broken on purpose. A prover that cannot tell it from the lemma proves nothing.

    Args:
        id: Short name, unique within its lemma.
        broken: What was broken, in words.
        build: Builds the broken statement; ``None`` takes the lemma's own, with ``constants`` changed.
        constants: Values that replace the proved ones.
    """

    id: str
    broken: str
    build: Callable[[Constants], Statement] | None = None
    constants: Constants = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lemma:
    """One proved fact that the pruned path rests on.

    Args:
        id: Name in the ledger, in ``smt2/`` and in the documents.
        statement: The fact in words, one line.
        theme: Name of the file under ``lemmas/`` that holds it, without suffix.
        build: Builds the fact from the exact values of ``constants``, and of no others.
        constants: Names out of ``dosa_ref.spec.GUARD_CONSTANTS`` that the fact depends on.
        speaks_of: Dotted names of the functions and constants of ``dosa_ref`` and ``dosa_gpu`` that the fact is about.
        mutants: At least one broken form.
        note: What the formula leaves to the reader, for the documents; empty if nothing.
    """

    id: str
    statement: str
    theme: str
    build: Callable[[Constants], Statement]
    constants: tuple[str, ...] = ()
    speaks_of: tuple[str, ...]
    mutants: tuple[Mutant, ...]
    note: str = ""

    def constant_texts(self) -> dict[str, str]:
        """Names and exact texts of the constants in the fact, as the specification has them now."""
        return {name: spec.GUARD_CONSTANTS[name] for name in self.constants}

    def formula(self) -> Statement:
        """The fact, for the constants of the specification."""
        return self.build(self._values())

    def mutant_formula(self, mutant: Mutant) -> Statement:
        """The broken statement of one of this lemma's mutants."""
        return (mutant.build or self.build)({**self._values(), **mutant.constants})

    def smt2(self) -> str:
        """Text of the exported script: a head for readers and the refutation."""
        head = [f"; {self.id}: {self.statement}", "; The negated claim: unsat means proved."]
        head += [f"; {name} = {value}" for name, value in self.constant_texts().items()]
        return "\n".join(head) + "\n" + self.formula().refutation()

    def statement_sha256(self) -> str:
        """Hash of the words and of the formula, without the head of the script."""
        return hashlib.sha256(f"{self.statement}\n{self.formula().refutation()}".encode()).hexdigest()

    def _values(self) -> dict[str, Fraction]:
        return {name: Fraction(text) for name, text in self.constant_texts().items()}
