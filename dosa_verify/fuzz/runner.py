"""The fuzzer: directed cases first, then Hypothesis; a failure is shrunk, saved and comes with its reproducer.

Every variant of the target must give the reference's indices and score bits. There is no tolerance and no sampling of
rows: one wrong bit in one row is a counterexample.
"""

from __future__ import annotations

import dataclasses
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
from dosa_ref.scorer import score_row
from dosa_ref.select import select_dense
from dosa_ref.spec import BackendUnavailable, Contract, DosaError, Fallback, InvalidProblem, UnprovedBound
from dosa_ref.trace import LogitsProblem, load_trace, save_trace
from dosa_verify.fuzz.cases import (
    Case,
    Hints,
    Scales,
    Special,
    Values,
    Weights,
    Windows,
    build,
    case_from_json,
    draw_hints,
)
from dosa_verify.fuzz.judge import judge, pick, served_rows
from dosa_verify.fuzz.properties import PROPERTIES, check_properties
from dosa_verify.fuzz.report import Failure, Fault, FuzzReport, Mismatch, Tally
from dosa_verify.targets.base import RunOptions, Target, TargetResult
from dosa_verify.targets.logits import NaNs, Promise, Ties

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

AnyCase = TypeVar("AnyCase")

DEFAULT_EXAMPLES = 40
SHRINK_SECONDS = 90.0
"""Shrinking stops after this long; the smallest failing case so far is reported."""


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
    yield change(base, seed=9, values=Values.LEARNED, keys=600, topk=8, tight_workspace=True)
    # Rows of a group share seeds, and some of them see only part of these.
    yield change(base, seed=18, windows=Windows.RAGGED, hints=Hints.LIKELY)
    yield change(base, seed=19, rows=5, windows=Windows.RAGGED, hints=Hints.RANDOM)
    yield change(base, seed=20, windows=Windows.INVERTED, hints=Hints.ONE)
    yield change(base, seed=22, windows=Windows.RAGGED, hints=Hints.OUTSIDE)
    # Hints, and no row that is long enough to use them.
    yield change(base, seed=23, rows=1, keys=1, topk=1, hints=Hints.ONE)
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


def check_problem(
    target: Target,
    problem: PrefillProblem,
    options: RunOptions,
    on_result: Callable[[TargetResult], None] | None = None,
    variants: tuple[str, ...] | None = None,
) -> Mismatch | None:
    """Run every variant of a target on a problem and compare each with the reference.

    Args:
        target: what is tested.
        problem: the input.
        options: buffer sizes and layout.
        on_result: called with each answer.
        variants: which, or None for the target's own.

    Returns:
        The first mismatch, or None.

    Raises:
        UnprovedBound, BackendUnavailable: the target cannot run at all here; nothing was decided.
    """
    promise: Promise | None = getattr(target, "promise", None)
    if promise is not None:
        return _check_promise(target, promise, problem, options, on_result)
    expected = select_dense(problem, Contract.SM90)
    for variant in target.variants if variants is None else variants:
        mismatch = check_call(target, problem, variant, options, expected.topk_indices, expected.scores, on_result)
        if mismatch is not None:
            return mismatch
    return None


def check_call(
    target: Target,
    problem: PrefillProblem,
    variant: str,
    options: RunOptions,
    indices: npt.NDArray[np.int32],
    scores: npt.NDArray[np.float32],
    on_result: Callable[[TargetResult], None] | None = None,
) -> Mismatch | None:
    """Run one variant of a target on a problem and compare it with what is right.

    Args:
        target: what is tested.
        problem: the input.
        variant: which way.
        options: buffer sizes and layout.
        indices: the right int32 ``[rows, topk]``.
        scores: the right float32 ``[rows, topk]``.
        on_result: called with the answer.

    Returns:
        The mismatch, or None.

    Raises:
        UnprovedBound, BackendUnavailable: the target cannot run at all here; nothing was decided.
    """
    result = _ask(target, problem, variant, options)
    if isinstance(result, Mismatch):
        return result
    if on_result is not None:
        on_result(result)
    return compare(result, indices, scores, variant) or _unsound(result, variant)


def _ask(target: Target, problem: PrefillProblem, variant: str, options: RunOptions) -> TargetResult | Mismatch:
    """The answer of a target, or the mismatch that it raised an error."""
    try:
        return target.select(problem, variant, options)
    except (UnprovedBound, BackendUnavailable):
        raise
    except Exception as error:  # noqa: BLE001 - whatever a target under test raises on a valid problem is the finding
        fault = Fault.REFUSED if isinstance(error, DosaError) else Fault.CRASHED
        return Mismatch(variant=variant, fault=fault, evidence={"error": type(error).__name__, "message": str(error)})


def _check_promise(
    target: Target,
    promise: Promise,
    problem: PrefillProblem,
    options: RunOptions,
    on_result: Callable[[TargetResult], None] | None,
) -> Mismatch | None:
    """Judge the indices of a target by its promise, on the reference's scores of the rows that it serves."""
    logits = np.full((problem.seq_len, problem.seq_len_kv), np.nan, np.float32)
    for row in range(problem.seq_len):
        start, end = problem.window(row)
        logits[row, start:end] = score_row(problem, row, Contract.SM90)
    scored = LogitsProblem(
        logits=logits, row_start=problem.cu_seqlen_ks, row_end=problem.cu_seqlen_ke, topk=problem.topk
    )
    served = served_rows(scored, promise)
    if not served.any():
        return None
    for variant in target.variants:
        result = _ask(target, problem, variant, options)
        if isinstance(result, Mismatch):
            return result
        if on_result is not None:
            on_result(result)
        mismatch = judge(pick(scored, served), result.topk_indices[served], promise)
        if mismatch is not None:
            return dataclasses.replace(mismatch, variant=variant)
    return None


def _unsound(result: TargetResult, variant: str) -> Mismatch | None:
    """A row that had to be recomputed because its K-th score fell below ``tau`` betrays a bound below a score."""
    rows = result.fallback.get(Fallback.THRESHOLD_NOT_MET.value, ())
    if not rows:
        return None
    return Mismatch(
        variant=variant, fault=Fault.UNSOUND, row=rows[0], evidence={Fallback.THRESHOLD_NOT_MET.value: list(rows)}
    )


def options_of(case: Case, problem: PrefillProblem) -> RunOptions:
    """Return the run options that a descriptor asks for.

    Args:
        case: the descriptor.
        problem: what `build` made of it.
    """
    return RunOptions(
        columns=case.columns,
        survivor_capacity=case.survivor_capacity,
        strided=case.strided,
        tight_workspace=case.tight_workspace,
        hints=draw_hints(case.hints, problem, case.seed),
    )


def all_variants(target: Target) -> tuple[str, ...]:
    """A target's variants, and those that only choose among them."""
    found: tuple[str, ...] = getattr(target, "all_variants", target.variants)
    return found


def check_case(
    target: Target, case: Case, tally: Tally | None = None, problem: PrefillProblem | None = None
) -> Mismatch | None:
    """Check every variant of a target on a case; of one case in four the automatic path too, of another a property.

    The case's seed says which, and which property of which variant.

    A target without a tie rule or a NaN rule may give other answers that are right, so it has no properties.

    Args:
        target: what is tested.
        case: the descriptor.
        tally: where answers are counted.
        problem: what was saved with the descriptor; None builds it.

    Returns:
        The first mismatch, or None.
    """
    problem = problem or build(case)
    options = options_of(case, problem)
    variants = target.variants if case.seed % 4 else all_variants(target)
    mismatch = check_problem(target, problem, options, None if tally is None else tally.add, variants)
    if mismatch is not None or case.seed % 4 != 1:
        return mismatch
    promise: Promise | None = getattr(target, "promise", None)
    if promise is not None and (promise.ties is Ties.ANY or promise.nans is not NaNs.DROP):
        return None  # two right answers may differ
    name = tuple(PROPERTIES)[case.seed // 4 % len(PROPERTIES)]
    variant = target.variants[case.seed // 4 // len(PROPERTIES) % len(target.variants)]
    if tally is not None:
        tally.features[f"property.{name}"] += 1
    return check_properties(target, problem, variant, options, seed=case.seed, names=(name,))


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
    tally = Tally()
    planned = list(directed_cases()) if directed else []
    total = len(planned) + examples
    failure: tuple[Case, Mismatch] | None = None
    directed_run = 0

    def over_budget() -> bool:
        return budget_s is not None and time.monotonic() - started > budget_s

    def check(case: Case) -> Mismatch | None:
        tally.describe(case)
        mismatch = check_case(target, case, tally)
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
            lambda case: check_case(target, case),
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
        calls=tally.calls,
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
        file: a file that a search saved, or any trace file (it then runs with the target's defaults).
        command: beginning of the reproducer.

    Returns:
        A report of one case.

    Raises:
        InvalidProblem: the file is not a trace, or its descriptor or options are damaged.
    """
    started = time.monotonic()
    trace = load_trace(file)
    case = _saved_case(trace.header)
    tally = Tally()
    if case is not None:
        tally.describe(case)
    if case is not None:
        mismatch = check_case(target, case, tally, trace.problem)
    else:
        mismatch = check_problem(target, trace.problem, _saved_options(trace.header), tally.add)
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
        calls=tally.calls,
        rows=tally.rows,
        rows_pruned=tally.rows_pruned,
        fallback=dict(sorted(tally.fallback.items())),
        features=dict(sorted(tally.features.items())),
        time_s=round(time.monotonic() - started, 3),
        budget_spent=False,
        failure=failure,
    )


def _saved_case(header: Mapping[str, str]) -> Case | None:
    plain = _saved_json(header, "case")
    return None if plain is None else case_from_json(plain)


def _saved_options(header: Mapping[str, str]) -> RunOptions:
    plain = _saved_json(header, "options")
    if plain is None:
        return RunOptions()
    try:
        hints = plain["hints"]
        return RunOptions(**{**plain, "hints": None if hints is None else tuple(map(int, hints))})
    except (TypeError, KeyError, ValueError) as error:
        raise InvalidProblem("options", repr(header["options"][:60]), "run options as the fuzzer saves them") from error


def _saved_json(header: Mapping[str, str], field: str) -> Any:
    """A header's field as JSON, None without it."""
    if field not in header:
        return None
    try:
        return json.loads(header[field])
    except ValueError as error:
        raise InvalidProblem(field, repr(header[field][:60]), "JSON") from error
