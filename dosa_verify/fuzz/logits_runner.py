"""Fuzzing a top-K kernel: every row judged by the target's promise, failures shrunk and saved, crashes survived."""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import itertools
import json
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from dosa_ref.spec import BackendUnavailable, DosaError, InvalidProblem
from dosa_ref.trace import LogitsProblem, load_logits, save_logits
from dosa_verify.fuzz.judge import VARIANT, judge, pick, served_rows
from dosa_verify.fuzz.logits import LogitsCase, build, case_from_json, directed_cases, draw_cases, logits_cases
from dosa_verify.fuzz.report import Failure, Fault, FuzzReport, Mismatch
from dosa_verify.fuzz.runner import load_strategies, search
from dosa_verify.targets import logits as targets
from dosa_verify.targets.dosa import Device
from dosa_verify.targets.logits import CanaryOverwritten, LogitsTarget, NaNs, Promise

DEFAULT_EXAMPLES = 200
TIMEOUT_S = 60.0
"""A case in a process of its own that takes longer has hung."""
MARGIN = 3
"""Rows of canaries before and behind the input."""
CANARY = np.uint32(0xDEADBEEF)


def check_logits(target: LogitsTarget, problem: LogitsProblem) -> Mismatch | None:
    """Run a target on the rows that it promises to serve, twice where it promises to repeat itself.

    Args:
        target: what is tested.
        problem: the rows.

    Returns:
        The first fault, or None.

    Raises:
        BackendUnavailable: the target cannot run at all here.
    """
    promise = target.promise
    served = served_rows(problem, promise)
    if not served.any() and (len(served) or not promise.no_rows):
        return None
    problem = pick(problem, served)
    has_nan = np.zeros(len(problem.logits), bool)
    if promise.nans is NaNs.REJECT:
        for row in range(len(has_nan)):
            start, end = problem.window(row)
            has_nan[row] = bool(np.isnan(problem.logits[row, start:end]).any())
    parts = [(pick(problem, ~has_nan), False)] if not has_nan.all() or not len(has_nan) else []
    parts += [(pick(problem, has_nan), True)] if has_nan.any() else []
    for part, must_refuse in parts:
        calls = [part] if promise.windows or _whole_rows(part) else list(_single_rows(part))
        for call in calls:
            mismatch = _check_call(target, call, must_refuse)
            if mismatch is not None:
                return mismatch
    return None


def _whole_rows(problem: LogitsProblem) -> bool:
    return bool((problem.row_start == 0).all() and (problem.row_end == problem.logits.shape[1]).all())


def _single_rows(problem: LogitsProblem) -> Sequence[LogitsProblem]:
    """Each row's window as an array of its own, for a target without windows."""
    singles = []
    for row in range(len(problem.logits)):
        start, end = problem.window(row)
        singles.append(
            LogitsProblem(
                logits=problem.logits[row : row + 1, start:end],
                row_start=np.zeros(1, np.int32),
                row_end=np.full(1, end - start, np.int32),
                topk=problem.topk,
            )
        )
    return singles


def _check_call(target: LogitsTarget, problem: LogitsProblem, must_refuse: bool) -> Mismatch | None:
    promise = target.promise
    rows, columns = problem.logits.shape
    gap = columns % 2 + 3 if promise.strided and not problem.logits.flags.c_contiguous else 0
    buffer = np.full((rows + 2 * MARGIN, columns + gap), CANARY, np.uint32).view(np.float32)
    buffer[MARGIN : MARGIN + rows, :columns] = problem.logits
    guarded = dataclasses.replace(problem, logits=buffer[MARGIN : MARGIN + rows, :columns])
    before = buffer.tobytes()
    answers = []
    for _ in range(2 if promise.repeatable and not must_refuse else 1):
        try:
            answer = target.select(guarded)
        except BackendUnavailable:
            raise
        except CanaryOverwritten as error:
            return Mismatch(variant=VARIANT, fault=Fault.OVERWRITTEN, evidence={"message": str(error)})
        except Exception as error:  # noqa: BLE001 - whatever a target under test raises on served rows is the finding
            if must_refuse:
                return None
            fault = Fault.REFUSED if isinstance(error, DosaError) else Fault.CRASHED
            return Mismatch(
                variant=VARIANT, fault=fault, evidence={"error": type(error).__name__, "message": str(error)}
            )
        if buffer.tobytes() != before:
            return Mismatch(variant=VARIANT, fault=Fault.OVERWRITTEN, evidence={"message": "the input was changed"})
        if must_refuse:
            return Mismatch(variant=VARIANT, fault=Fault.ACCEPTED_NAN, row=0, evidence={})
        mismatch = judge(problem, answer, promise)
        if mismatch is not None:
            return mismatch
        answers.append(answer.copy())
    if len(answers) == 2 and answers[0].tobytes() != answers[1].tobytes():
        return Mismatch(variant=VARIANT, fault=Fault.NONDETERMINISTIC, evidence={})
    return None


class Checker(Protocol):
    """Runs one problem through a target."""

    def __call__(self, problem: LogitsProblem) -> Mismatch | None:
        """Return the first fault, or None."""


def _serve(pipe: Connection, name: str, device: Device, waived: Sequence[str]) -> None:
    """Body of the process that holds a target: problems in, mismatches out. What it prints goes to stderr."""
    os.dup2(2, 1)
    target = targets.make(name, device, waived)
    while True:
        try:
            problem = pipe.recv()
        except EOFError:
            return
        pipe.send(check_logits(target, problem))


class IsolatedChecker:
    """Checks a target in a process of its own, which may die or hang; the next case gets a new one.

    Args:
        name: name of the target, as for `dosa_verify.targets.logits.make`.
        device: where it runs.
        timeout_s: a case that takes longer has hung.
        waived: items of its promise that do not count.
    """

    def __init__(self, name: str, device: Device, timeout_s: float = TIMEOUT_S, *, waived: Sequence[str] = ()) -> None:
        self._name, self._device, self._timeout_s, self._waived = name, device, timeout_s, waived
        self._context = multiprocessing.get_context("spawn")
        self._process: Any = None
        self._pipe: Connection | None = None

    def __call__(self, problem: LogitsProblem) -> Mismatch | None:
        """Run one problem; see `check_logits`."""
        if self._pipe is None:
            self._pipe, theirs = self._context.Pipe()
            self._process = self._context.Process(
                target=_serve, args=(theirs, self._name, self._device, self._waived), daemon=True
            )
            self._process.start()
            theirs.close()
        try:
            self._pipe.send(problem)
            if not self._pipe.poll(self._timeout_s):
                self.close()
                return Mismatch(variant=VARIANT, fault=Fault.HUNG, evidence={"seconds": self._timeout_s})
            answer: Mismatch | None = self._pipe.recv()
        except (EOFError, ConnectionError):
            self._process.join()
            code = int(self._process.exitcode)
            self.close()
            return Mismatch(variant=VARIANT, fault=Fault.DIED, evidence={"exit_code": code})
        return answer

    def close(self) -> None:
        """End the process."""
        if self._pipe is not None:
            self._pipe.close()
            self._pipe = None
            self._process.kill()
            self._process.join()


def _sizes(promise: Promise) -> tuple[int, int, int]:
    """Smallest, largest and usual ``topk`` of the cases for a target."""
    least = max(promise.min_topk, 1)
    most = least + 63 if promise.max_topk is None else min(least + 63, promise.max_topk)
    return least, most, min(max(least, 10), most)


def run(
    target: LogitsTarget,
    *,
    checker: Checker | None = None,
    examples: int = DEFAULT_EXAMPLES,
    seed: int = 0,
    budget_s: float | None = None,
    folder: Path = Path(),
    command: str = "dosa fuzz",
    directed: bool = True,
    long: tuple[int, ...] = (),
    drawn: bool = False,
    on_progress: Callable[[int, int], None] | None = None,
) -> FuzzReport:
    """Fuzz a top-K kernel.

    Args:
        target: what is tested.
        checker: runs a problem, e.g. an `IsolatedChecker`; None runs it in this process.
        examples: cases for Hypothesis to draw, beyond the directed ones.
        seed: seed of the search.
        budget_s: start no new case after this many seconds, or None.
        folder: where a failing case is saved.
        command: beginning of the reproducer.
        directed: run `directed_cases` first.
        long: lengths of long rows among these.
        drawn: take the random cases from `draw_cases`, not from Hypothesis: many more a second.
        on_progress: called with (cases done, cases planned).

    Returns:
        The report; ``failure`` holds the smallest counterexample found.

    Raises:
        BackendUnavailable: Hypothesis is not installed, or the target cannot run here.
    """
    started = time.monotonic()
    check_one: Checker = checker or (lambda problem: check_logits(target, problem))
    least, most, usual = _sizes(target.promise)
    planned = list(directed_cases(usual, long=long)) if directed else []
    total = len(planned) + examples
    cases = calls = rows = directed_run = 0
    features: collections.Counter[str] = collections.Counter()

    def over_budget() -> bool:
        return budget_s is not None and time.monotonic() - started > budget_s

    def check(case: LogitsCase) -> Mismatch | None:
        nonlocal cases, calls, rows
        problem = build(case)
        cases += 1
        served = int(served_rows(problem, target.promise).sum())
        rows += served
        calls += served > 0
        features["without_a_served_row"] += served == 0
        for kind in (case.scores, case.windows, *case.planted):
            features[f"{type(kind).__name__.lower()}.{kind.value}"] += 1
        mismatch = check_one(problem)
        if on_progress is not None:
            on_progress(cases, total)
        return mismatch

    failure: tuple[LogitsCase, Mismatch] | None = None
    random = draw_cases(seed, examples, min_topk=least, max_topk=most) if drawn else ()
    for case in itertools.chain(planned, random):
        if over_budget():
            break
        mismatch = check(case)
        directed_run += cases <= len(planned)
        if mismatch is not None:
            failure = (case, mismatch)
            break
    if failure is None and examples > 0 and not drawn and not over_budget():
        load_strategies()
        failure = search(
            logits_cases(columns=max(700, 3 * least), min_topk=least, max_topk=most),
            check,
            lambda case: check_one(build(case)),
            examples=examples,
            seed=seed,
            over_budget=over_budget,
        )
    elif failure is not None and examples > 0:
        failure = _shrink(failure, check_one)
    report = None
    if failure is not None:
        case, mismatch = failure
        digest = hashlib.sha256(case.describe().encode()).hexdigest()[:8]
        file = folder / f"logits-{digest}.safetensors"
        save_logits(file, build(case), {"case": case.describe()})
        report = Failure(case=case, mismatch=mismatch, file=str(file), reproducer=f"{command} --replay {file}")
    return FuzzReport(
        target=target.name,
        variants=(VARIANT,),
        seed=seed,
        examples=examples,
        directed=directed_run,
        cases=cases,
        calls=calls,
        rows=rows,
        rows_pruned=0,
        fallback={},
        features=dict(sorted(features.items())),
        time_s=round(time.monotonic() - started, 3),
        budget_spent=failure is None and cases < total and over_budget(),
        failure=report,
        promise=target.promise.to_json(),
    )


def _shrink(failure: tuple[LogitsCase, Mismatch], check: Checker) -> tuple[LogitsCase, Mismatch]:
    """Make a failing directed case smaller: halve sizes, drop what is not needed, as long as it still fails."""
    case, mismatch = failure
    again = True
    while again:
        again = False
        for smaller in _smaller(case):
            found = check(build(smaller))
            if found is not None and found.fault is mismatch.fault:
                case, mismatch, again = smaller, found, True
                break
    return case, mismatch


def _smaller(case: LogitsCase) -> Iterator[LogitsCase]:
    """Cases a step simpler than this one, the boldest first."""
    change = dataclasses.replace
    for place in range(len(case.planted)):
        yield change(case, planted=case.planted[:place] + case.planted[place + 1 :])
    if case.strided:
        yield change(case, strided=False)
    for rows in sorted({1, case.rows - 1}):
        if 1 <= rows < case.rows:
            yield change(case, rows=rows)
    for columns in sorted({case.columns // 2, case.columns * 3 // 4, case.columns - 1}):
        if 0 <= columns < case.columns:
            yield change(case, columns=columns)
    for topk in sorted({1, case.topk // 2, case.topk - 1}):
        if 1 <= topk < case.topk:
            yield change(case, topk=topk)


def replay(
    target: LogitsTarget, file: Path, *, checker: Checker | None = None, command: str = "dosa fuzz"
) -> FuzzReport:
    """Run a saved case again.

    Args:
        target: what is tested.
        file: a file that `run` saved, or any logits file.
        checker: as in `run`.
        command: beginning of the reproducer.

    Raises:
        InvalidProblem: the file is no logits file, or its descriptor is damaged.
    """
    started = time.monotonic()
    problem, header = load_logits(file)
    case = None
    if "case" in header:
        try:
            plain = json.loads(header["case"])
        except ValueError as error:
            raise InvalidProblem("case", repr(header["case"][:60]), "a case descriptor in JSON") from error
        case = case_from_json(plain)
    mismatch = checker(problem) if checker is not None else check_logits(target, problem)
    failure = None
    if mismatch is not None:
        failure = Failure(case=case, mismatch=mismatch, file=str(file), reproducer=f"{command} --replay {file}")
    return FuzzReport(
        target=target.name,
        variants=(VARIANT,),
        seed=0,
        examples=0,
        directed=0,
        cases=1,
        calls=1,
        rows=int(served_rows(problem, target.promise).sum()),
        rows_pruned=0,
        fallback={},
        features={},
        time_s=round(time.monotonic() - started, 3),
        budget_spent=False,
        failure=failure,
        promise=target.promise.to_json(),
    )
