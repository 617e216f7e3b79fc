"""The fuzzer: directed cases first, then Hypothesis; a failure is shrunk, saved and comes with its reproducer.

Every variant of the target must give the reference's indices and score bits. There is no tolerance and no sampling of
rows: one wrong bit in one row is a counterexample.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import hashlib
import importlib
import json
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

from dosa_ref.formats import float_evidence
from dosa_ref.problem import PrefillProblem
from dosa_ref.select import select_dense
from dosa_ref.spec import BackendUnavailable, Contract, DosaError, Fallback, InvalidProblem, UnprovedBound
from dosa_ref.trace import load_trace, save_trace
from dosa_verify.fuzz.cases import Case, Scales, Special, Values, Weights, Windows, build, case_from_json
from dosa_verify.fuzz.logits import LogitsCase
from dosa_verify.targets.base import RunOptions, Target, TargetResult

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

AnyCase = TypeVar("AnyCase")

SCHEMA = "dosa.fuzz/1"
DEFAULT_EXAMPLES = 40
SHRINK_SECONDS = 90.0
"""Shrinking stops after this long; the smallest failing case so far is reported."""


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
            "rows": self.rows,
            "rows_pruned": self.rows_pruned,
            "fallback": dict(self.fallback),
            "features": dict(self.features),
            "time_s": self.time_s,
            "budget_spent": self.budget_spent,
            "failure": failure,
            "promise": None if self.promise is None else dict(self.promise),
        }


def directed_cases() -> Iterator[Case]:
    """Yield one case for each thing that must not depend on luck: every input kind, every edge of a size."""
    base = Case(seed=1, rows=3, keys=440, topk=5, values=Values.LEARNED, scales=Scales.POWERS, columns=16)
    change = dataclasses.replace
    for values in Values:
        yield change(base, seed=2, values=values, windows=Windows.CAUSAL)
    for weights in Weights:
        if weights is not base.weights:
            yield change(base, seed=3, weights=weights)
    # All heads inactive and all weights negative: every score is -0.0.
    yield change(base, seed=3, values=Values.ZERO_FLOOD, weights=Weights.NEGATIVE)
    yield change(base, seed=4, scales=Scales.FLOATS, columns=32)
    yield change(base, seed=5, scales=Scales.EXTREME, columns=8)
    yield change(base, seed=6, windows=Windows.RAGGED, strided=True, specials=(Special.POISON,))
    yield change(base, seed=7, windows=Windows.SHORT, rows=12)
    for special in Special:
        if special is not Special.POISON:
            yield change(base, seed=8, specials=(special,))
    # NaN keys score 0, which wins where tau is negative.
    yield change(base, seed=8, topk=200, specials=(Special.NAN_KEY,))
    # Survivors beyond the buffer, and a tie that no buffer holds.
    yield change(base, seed=9, values=Values.NORMAL, keys=600, topk=8, columns=8, survivor_capacity=16)
    yield change(base, seed=10, values=Values.CONSTANT, keys=600, topk=8, survivor_capacity=16)
    yield change(base, seed=11, num_heads=64, windows=Windows.RAGGED, columns=32)
    yield change(base, seed=12, num_heads=20)
    # More rows than the first block holds, then more keys than one chunk, none a multiple of any block.
    yield change(base, seed=13, rows=10)
    yield change(base, seed=14, rows=2, keys=13001, topk=40, windows=Windows.CAUSAL)
    yield change(base, seed=15, rows=0)
    yield change(base, seed=16, keys=0)
    yield change(base, seed=17, topk=0)


def compare(
    result: TargetResult, indices: npt.NDArray[np.int32], scores: npt.NDArray[np.float32], variant: str
) -> Mismatch | None:
    """Compare one answer with the reference.

    Args:
        result: what the target gave.
        indices: the reference's int32 ``[rows, topk]``.
        scores: the reference's float32 ``[rows, topk]``.
        variant: named in the mismatch.

    Returns:
        The first difference by row and place, or None. Scores are compared as bits.

    Special values: -0.0 differs from 0.0; NaN never occurs in a correct answer.
    """
    got, got_scores = result.topk_indices, result.scores
    if (
        got.shape != indices.shape
        or got.dtype != np.int32
        or got_scores.shape != scores.shape
        or got_scores.dtype != np.float32
    ):
        return Mismatch(
            variant=variant,
            fault=Fault.WRONG_SHAPE,
            evidence={
                "got": f"{got.dtype} {list(got.shape)}, {got_scores.dtype} {list(got_scores.shape)}",
                "expected": f"int32 {list(indices.shape)}, float32 {list(scores.shape)}",
            },
        )
    for fault, different in (
        (Fault.WRONG_INDEX, got != indices),
        (Fault.WRONG_SCORE, got_scores.view(np.uint32) != scores.view(np.uint32)),
    ):
        if different.any():
            row, place = (int(axis) for axis in np.argwhere(different)[0])
            return Mismatch(
                variant=variant,
                fault=fault,
                row=row,
                place=place,
                evidence={
                    "got_index": int(got[row, place]),
                    "expected_index": int(indices[row, place]),
                    "got_score": float_evidence(got_scores[row, place]),
                    "expected_score": float_evidence(scores[row, place]),
                },
            )
    return None


@dataclasses.dataclass(slots=True)
class _Tally:
    """Counts over a run."""

    cases: int = 0
    rows: int = 0
    rows_pruned: int = 0
    fallback: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    features: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)

    def add(self, result: TargetResult) -> None:
        self.rows += len(result.topk_indices)
        self.rows_pruned += sum(result.row_pruned)
        for reason, rows in result.fallback.items():
            self.fallback[reason] += len(rows)

    def describe(self, case: Case) -> None:
        self.cases += 1
        for kind in (case.values, case.weights, case.scales, case.windows, *case.specials):
            self.features[f"{type(kind).__name__.lower()}.{kind.value}"] += 1
        self.features[f"num_heads.{case.num_heads}"] += 1
        if case.strided:
            self.features["strided"] += 1


def check_problem(
    target: Target,
    problem: PrefillProblem,
    options: RunOptions,
    on_result: Callable[[TargetResult], None] | None = None,
) -> Mismatch | None:
    """Run every variant of a target on a problem and compare each with the reference.

    Args:
        target: what is tested.
        problem: the input.
        options: buffer sizes and layout.
        on_result: called with each answer.

    Returns:
        The first mismatch, or None.

    Raises:
        UnprovedBound, BackendUnavailable: the target cannot run at all here; nothing was decided.
    """
    expected = select_dense(problem, Contract.SM90)
    for variant in target.variants:
        try:
            result = target.select(problem, variant, options)
        except (UnprovedBound, BackendUnavailable):
            raise
        except Exception as error:  # noqa: BLE001 - whatever a target under test raises on a valid problem is the finding
            fault = Fault.REFUSED if isinstance(error, DosaError) else Fault.CRASHED
            return Mismatch(
                variant=variant, fault=fault, evidence={"error": type(error).__name__, "message": str(error)}
            )
        if on_result is not None:
            on_result(result)
        mismatch = compare(result, expected.topk_indices, expected.scores, variant) or _unsound(result, variant)
        if mismatch is not None:
            return mismatch
    return None


def _unsound(result: TargetResult, variant: str) -> Mismatch | None:
    """A row that had to be recomputed because its K-th score fell below ``tau`` betrays a bound below a score."""
    rows = result.fallback.get(Fallback.THRESHOLD_NOT_MET.value, ())
    if not rows:
        return None
    return Mismatch(
        variant=variant, fault=Fault.UNSOUND, row=rows[0], evidence={Fallback.THRESHOLD_NOT_MET.value: list(rows)}
    )


def options_of(case: Case) -> RunOptions:
    """Return the run options that a descriptor asks for."""
    return RunOptions(columns=case.columns, survivor_capacity=case.survivor_capacity, strided=case.strided)


class _Found(Exception):
    """Carries a mismatch through Hypothesis."""


def run(
    target: Target,
    *,
    examples: int = DEFAULT_EXAMPLES,
    seed: int = 0,
    budget_s: float | None = None,
    folder: Path = Path(),
    command: str = "dosa fuzz",
    directed: bool = True,
    on_progress: Callable[[int, int], None] | None = None,
) -> FuzzReport:
    """Fuzz a target.

    Args:
        target: what is tested.
        examples: cases for Hypothesis to draw, beyond the directed ones.
        seed: seed of the search; the same seed and versions give the same cases.
        budget_s: start no new case after this many seconds, or None.
        folder: where a failing case is saved.
        command: beginning of the reproducer, e.g. ``dosa fuzz dosa --device cpu``.
        directed: run `directed_cases` first.
        on_progress: called with (cases done, cases planned).

    Returns:
        The report; ``failure`` holds the smallest counterexample found.

    Raises:
        BackendUnavailable: Hypothesis is not installed, or the target cannot run here.
        UnprovedBound: the target's pruned path is refused.
    """
    started = time.monotonic()
    tally = _Tally()
    planned = list(directed_cases()) if directed else []
    total = len(planned) + examples
    failure: tuple[Case, Mismatch] | None = None
    directed_run = 0

    def over_budget() -> bool:
        return budget_s is not None and time.monotonic() - started > budget_s

    def check(case: Case) -> Mismatch | None:
        tally.describe(case)
        mismatch = check_problem(target, build(case), options_of(case), tally.add)
        if on_progress is not None:
            on_progress(tally.cases, total)
        return mismatch

    for case in planned:
        if over_budget():
            break
        mismatch = check(case)
        directed_run += 1
        if mismatch is not None:
            failure = (case, mismatch)
            break
    if failure is None and examples > 0 and not over_budget():
        strategies = load_strategies()
        failure = search(
            strategies.cases(),
            check,
            lambda case: check_problem(target, build(case), options_of(case)),
            examples=examples,
            seed=seed,
            over_budget=over_budget,
        )
    return FuzzReport(
        target=target.name,
        variants=target.variants,
        seed=seed,
        examples=examples,
        directed=directed_run,
        cases=tally.cases,
        rows=tally.rows,
        rows_pruned=tally.rows_pruned,
        fallback=dict(sorted(tally.fallback.items())),
        features=dict(sorted(tally.features.items())),
        time_s=round(time.monotonic() - started, 3),
        budget_spent=failure is None and tally.cases < total and over_budget(),
        failure=None if failure is None else _report_failure(*failure, folder=folder, command=command),
    )


def load_strategies() -> ModuleType:
    """Import the strategies.

    Raises:
        BackendUnavailable: Hypothesis is not installed.
    """
    try:
        return importlib.import_module("dosa_verify.fuzz.strategies")
    except ImportError as error:
        raise BackendUnavailable("hypothesis is not installed: `make setup` installs it") from error


def search(
    strategy: SearchStrategy[AnyCase],
    check: Callable[[AnyCase], Mismatch | None],
    recheck: Callable[[AnyCase], Mismatch | None],
    *,
    examples: int,
    seed: int,
    over_budget: Callable[[], bool],
) -> tuple[AnyCase, Mismatch] | None:
    """Let Hypothesis draw cases, and shrink the first that fails.

    Args:
        strategy: draws descriptors.
        check: runs and counts a case.
        recheck: runs a case of the shrinker, which is not counted.
        examples: cases to draw.
        seed: seed of the search.
        over_budget: says when to start no new case.

    Returns:
        The smallest failing case and its mismatch, or None.
    """
    import hypothesis

    smallest: tuple[AnyCase, Mismatch] | None = None
    shrink_until = float("inf")

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=examples,
        database=None,
        deadline=None,
        print_blob=False,
        report_multiple_bugs=False,
        phases=[hypothesis.Phase.generate, hypothesis.Phase.shrink],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(strategy)
    def one_case(case: AnyCase) -> None:
        nonlocal smallest, shrink_until
        if smallest is None:
            if over_budget():
                return
            mismatch = check(case)
            shrink_until = time.monotonic() + SHRINK_SECONDS
        elif case == smallest[0]:
            mismatch = smallest[1]
        elif time.monotonic() > shrink_until:
            return
        else:
            mismatch = recheck(case)
        if mismatch is not None:
            smallest = (case, mismatch)
            # One place to raise: Hypothesis tells bugs apart by where they are raised.
            raise _Found

    try:
        one_case()
    except (_Found, hypothesis.errors.Flaky):
        # Flaky: the shrinker's time ran out between two looks at the same case. The recorded one did fail.
        if smallest is None:
            raise
    return smallest


def _report_failure(case: Case, mismatch: Mismatch, *, folder: Path, command: str) -> Failure:
    digest = hashlib.sha256(case.describe().encode()).hexdigest()[:8]
    file = folder / f"case-{digest}.safetensors"
    save_trace(file, build(case), {"kind": "problem", "case": case.describe(), "variant": mismatch.variant})
    return Failure(case=case, mismatch=mismatch, file=str(file), reproducer=f"{command} --replay {file}")


def replay(target: Target, file: Path, *, command: str = "dosa fuzz") -> FuzzReport:
    """Run a saved case again.

    Args:
        target: what is tested.
        file: a file that `run` saved, or any trace file (it then runs with the target's defaults).
        command: beginning of the reproducer.

    Returns:
        A report of one case.

    Raises:
        InvalidProblem: the file is not a trace, or its descriptor is damaged.
    """
    started = time.monotonic()
    trace = load_trace(file)
    case = _saved_case(trace.header)
    tally = _Tally()
    if case is not None:
        tally.describe(case)
    options = RunOptions() if case is None else options_of(case)
    mismatch = check_problem(target, trace.problem, options, tally.add)
    failure = None
    if mismatch is not None:
        failure = Failure(case=case, mismatch=mismatch, file=str(file), reproducer=f"{command} --replay {file}")
    return FuzzReport(
        target=target.name,
        variants=target.variants,
        seed=0,
        examples=0,
        directed=0,
        cases=1,
        rows=tally.rows,
        rows_pruned=tally.rows_pruned,
        fallback=dict(sorted(tally.fallback.items())),
        features=dict(sorted(tally.features.items())),
        time_s=round(time.monotonic() - started, 3),
        budget_spent=False,
        failure=failure,
    )


def _saved_case(header: Mapping[str, str]) -> Case | None:
    text = header.get("case")
    if text is None:
        return None
    try:
        plain = json.loads(text)
    except ValueError as error:
        raise InvalidProblem("case", repr(text[:60]), "a case descriptor in JSON") from error
    return case_from_json(plain)
