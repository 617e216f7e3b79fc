"""What a fuzz run found and did, as values: faults, mismatches, counterexamples, counts, the report."""

from __future__ import annotations

import collections
import dataclasses
import enum
from collections.abc import Mapping, Sequence
from typing import Any

from dosa_verify.fuzz.cases import Case
from dosa_verify.fuzz.logits import LogitsCase
from dosa_verify.targets.base import TargetResult

SCHEMA = "dosa.fuzz/1"


class Fault(enum.Enum):
    """What was wrong with a target's answer."""

    WRONG_INDEX = "wrong_index"
    WRONG_SCORE = "wrong_score"
    WRONG_SHAPE = "wrong_shape"
    REFUSED = "refused"
    """The target raised one of this project's errors on a valid problem."""
    CRASHED = "crashed"
    """The target raised something else."""
    UNSOUND = "unsound"
    """The answer is right, but only after the target noticed that its own bound had pruned a winner."""
    INVALID_INDEX = "invalid_index"
    """An index that is neither -1 nor in the row's window."""
    DUPLICATE = "duplicate"
    WRONG_COUNT = "wrong_count"
    """Not as many keys as the row has, up to ``topk``."""
    WRONG_SET = "wrong_set"
    """Other keys, or other scores where the target promises no tie rule."""
    WRONG_ORDER = "wrong_order"
    NONDETERMINISTIC = "nondeterministic"
    """Another answer on a second call."""
    ACCEPTED_NAN = "accepted_nan"
    """A target that promises to refuse NaN did not."""
    OVERWRITTEN = "overwritten"
    """The input, or memory beside input or output, was written."""
    DIED = "died"
    """The process ended: a signal, an illegal access."""
    HUNG = "hung"
    """No answer in time; the process was ended."""
    PROPERTY = "property"
    """Two answers of the target that must agree do not."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """The first place where a variant differs from the reference.

    Attributes:
        variant: which way of running the target.
        fault: what kind of difference.
        row: the row, or None where the fault is not one row's.
        place: position in the row's output, or None.
        evidence: got and expected; floats as bits and decimal.
    """

    variant: str
    fault: Fault
    row: int | None = None
    place: int | None = None
    evidence: Mapping[str, Any]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A counterexample.

    Attributes:
        case: the smallest failing descriptor that was found; None for a replayed trace that has none.
        mismatch: what was wrong there.
        file: trace file that holds the case.
        reproducer: command that shows the mismatch again.
    """

    case: Case | LogitsCase | None
    mismatch: Mismatch
    file: str
    reproducer: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FuzzReport:
    """What a run did.

    Attributes:
        target: name of the target.
        variants: the ways it was run; each case ran all of them.
        seed: seed of the search.
        examples: cases asked for beyond the directed ones.
        directed: directed cases run.
        cases: distinct cases run, directed ones included, cases of the shrinker not.
        calls: answers of the target that were compared with the oracle; those asked for by properties not counted.
        rows: rows compared, over all cases and variants.
        rows_pruned: of these, rows in which the bound pass decided something.
        fallback: reason -> rows that took it.
        features: input kind -> cases that had it.
        time_s: seconds.
        budget_spent: whether the time budget ended the search early.
        failure: the counterexample, or None.
        promise: by what a top-K kernel was judged; None for whole selections, which must give every index and bit.
    """

    target: str
    variants: tuple[str, ...]
    seed: int
    examples: int
    directed: int
    cases: int
    calls: int
    rows: int
    rows_pruned: int
    fallback: Mapping[str, int]
    features: Mapping[str, int]
    time_s: float
    budget_spent: bool
    failure: Failure | None
    promise: Mapping[str, object] | None = None

    @property
    def outcome(self) -> str:
        """``exact`` or ``counterexample``; ``undecided`` if the budget let no case run."""
        if self.failure is not None:
            return "counterexample"
        return "exact" if self.cases else "undecided"

    def to_json(self) -> dict[str, object]:
        """Return the report as JSON values, schema ``dosa.fuzz/1``."""
        failure = None
        if self.failure is not None:
            mismatch = self.failure.mismatch
            failure = {
                "case": None if self.failure.case is None else self.failure.case.to_json(),
                "variant": mismatch.variant,
                "fault": mismatch.fault.value,
                "row": mismatch.row,
                "place": mismatch.place,
                "evidence": dict(mismatch.evidence),
                "file": self.failure.file,
                "reproducer": self.failure.reproducer,
            }
        return {
            "schema": SCHEMA,
            "outcome": self.outcome,
            "target": self.target,
            "variants": list(self.variants),
            "seed": self.seed,
            "examples": self.examples,
            "directed": self.directed,
            "cases": self.cases,
            "calls": self.calls,
            "rows": self.rows,
            "rows_pruned": self.rows_pruned,
            "fallback": dict(self.fallback),
            "features": dict(self.features),
            "time_s": self.time_s,
            "budget_spent": self.budget_spent,
            "failure": failure,
            "promise": None if self.promise is None else dict(self.promise),
        }


@dataclasses.dataclass(slots=True)
class Tally:
    """Counts over a run; names as in `FuzzReport`."""

    cases: int = 0
    calls: int = 0
    rows: int = 0
    rows_pruned: int = 0
    fallback: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    features: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)

    def add(self, result: TargetResult) -> None:
        """Count an answer."""
        self.calls += 1
        self.rows += len(result.topk_indices)
        self.rows_pruned += sum(result.row_pruned)
        for reason, rows in result.fallback.items():
            self.fallback[reason] += len(rows)

    def describe(self, case: Case) -> None:
        """Count a case and what it has."""
        self.cases += 1
        for kind in (case.values, case.weights, case.scales, case.windows, case.hints, *case.specials):
            self.features[f"{type(kind).__name__.lower()}.{kind.value}"] += 1
        self.features[f"num_heads.{case.num_heads}"] += 1
        for flag in ("strided", "tight_workspace"):
            self.features[flag] += getattr(case, flag)


def merge(reports: Sequence[FuzzReport], *, seed: int, examples: int, time_s: float, complete: bool) -> FuzzReport:
    """One report of several runs of the same target.

    Args:
        reports: at least one.
        seed: seed of the whole search.
        examples: random cases asked for in all.
        time_s: seconds in all.
        complete: whether all that was asked for ran.

    Returns:
        Counts added; the first failure.
    """
    fallback: collections.Counter[str] = collections.Counter()
    features: collections.Counter[str] = collections.Counter()
    for report in reports:
        fallback.update(report.fallback)
        features.update(report.features)
    failures = [report.failure for report in reports if report.failure is not None]
    return dataclasses.replace(
        reports[0],
        seed=seed,
        examples=examples,
        directed=sum(report.directed for report in reports),
        cases=sum(report.cases for report in reports),
        calls=sum(report.calls for report in reports),
        rows=sum(report.rows for report in reports),
        rows_pruned=sum(report.rows_pruned for report in reports),
        fallback=dict(sorted(fallback.items())),
        features=dict(sorted(features.items())),
        time_s=round(time_s, 3),
        budget_spent=not failures and not complete,
        failure=failures[0] if failures else None,
    )
