"""A search in several processes: blocks of cases, each a run with a seed of its own, merged into one report.

What a block holds depends on the search's seed and the block's number alone: the cases are the same for any number of
processes. Processes with a GPU context each take turns on the GPU, so for our own paths a few of them run the cases,
and others prepare these, with what is right for them. As long as new kernels come up often, further processes with a
GPU context share the work of compiling, through Triton's cache.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import multiprocessing
import os
import pickle
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

from dosa_ref.spec import BackendUnavailable, InvalidProblem, UnprovedBound
from dosa_verify.fuzz import families, logits_runner, runner
from dosa_verify.fuzz.report import Failure, Fault, FuzzReport, Mismatch, merge
from dosa_verify.targets import libraries
from dosa_verify.targets import logits as targets
from dosa_verify.targets.dosa import TARGET_NAMES, Device, KernelTarget, connect
from dosa_verify.targets.logits import LogitsTarget

DEFAULT_EXAMPLES = 2000
LOGITS_BLOCK = 1000
"""Cases of one block of a top-K kernel."""
SCORER_BLOCK = 100
"""Cases of one block of a scorer with a top-K kernel."""
MOST_HELPERS = 12
"""Processes that prepare cases for a GPU."""
MOST_WARMERS = 10
"""Further processes with a GPU context while kernels are compiled."""
WARM_AFTER, WARM_BELOW = 1000, 0.01
"""They leave when so many cases in a row brought fewer new kernels per case."""
AHEAD = 3
"""Families that each of them has under way."""
HELPED = (Device.CUDA,)
"""Where they pay: the emulator takes longer to answer a case than to prepare it."""
LONG_ROWS = (131_072, families.MILLION)
"""Lengths of long rows for top-K kernels on a GPU."""

Whole = KernelTarget | libraries.ScorerTarget
"""A target that scores and selects."""

_targets: dict[str, Whole | LogitsTarget] = {}
"""The target of this worker process."""
_checkers: dict[str, logits_runner.IsolatedChecker] = {}
"""Its process, if it is another's function, which may die or hang."""


def make(name: str, device: Device, waived: Sequence[str] = ()) -> Whole | LogitsTarget:
    """Return the target of a name: a whole selection of ours or of others, or a top-K kernel.

    Args:
        name: as on the command line.
        device: where it runs.
        waived: items of a promise that do not count.

    Raises:
        InvalidProblem: no such target, or nothing that could be waived.
        BackendUnavailable: its library or the device is missing.
    """
    if name in TARGET_NAMES:
        if waived:
            raise InvalidProblem("waive", ", ".join(waived), f"nothing: {name} must give every index and score bit")
        connect(device)
        return KernelTarget(name=name, device=device)
    if name.startswith(f"{libraries.SCORER}+"):
        return libraries.scorer(name, device, waived)
    return targets.make(name, device, waived)


def _prepare(name: str, device: Device, waived: Sequence[str]) -> None:
    """Make a worker's target."""
    _targets[name] = make(name, device, waived)
    if ":" in name:
        _checkers[name] = logits_runner.IsolatedChecker(name, device, waived=waived)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Block:
    """Work for one process.

    Attributes:
        name: of the target.
        long: lengths of long rows for a top-K kernel.
        max_keys: most keys of a look.
        directed: run the directed cases, not random ones.
        seed: of this block.
        examples: random cases.
        until: when to start no new case, on the wall clock, or None.
        folder, command: as in `run`.
        looks: file with the family, where it was prepared elsewhere.
    """

    name: str
    long: tuple[int, ...]
    max_keys: int
    directed: bool
    seed: int
    examples: int
    until: float | None
    folder: Path
    command: str
    looks: Path | None = None


def _run_block(block: _Block) -> FuzzReport:
    """Do the work in a worker."""
    target = _targets[block.name]
    common: dict[str, Any] = {
        "seed": block.seed,
        "examples": 0 if block.directed else block.examples,
        "budget_s": None if block.until is None else max(block.until - time.time(), 0.0),
        "folder": block.folder,
        "command": block.command,
    }
    try:
        if not isinstance(target, Whole):
            checker = _checkers.get(block.name)
            return logits_runner.run(
                target, checker=checker, directed=block.directed, long=block.long, drawn=True, **common
            )
        if block.directed or not isinstance(target, KernelTarget):
            return runner.run(target, directed=block.directed, **common)
        prepared = None if block.looks is None else _take(block.looks)
        return families.run(target, max_keys=block.max_keys, prepared=prepared, **common)
    except UnprovedBound as error:
        # Errors with several arguments do not travel between processes.
        raise BackendUnavailable(str(error)) from None


def _prepare_family(file: Path, seed: int, variants: tuple[str, ...], count: int, max_keys: int) -> Path:
    """Prepare a family in a helper; gives the file, so that its arrays pass through no pipe and no third process."""
    with file.open("wb") as stream:
        pickle.dump(families.prepare(seed, variants, count, max_keys), stream, protocol=pickle.HIGHEST_PROTOCOL)
    return file


def _take(file: Path) -> list[families.Look]:
    """Read what a helper of this run prepared, and remove it."""
    with file.open("rb") as stream:
        looks: list[families.Look] = pickle.load(stream)  # noqa: S301 - written by our own process a moment ago
    file.unlink()
    return looks


def _compiled() -> int:
    """Kernels in Triton's cache on this machine."""
    folder = Path(os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache")
    return sum(1 for _ in folder.iterdir()) if folder.is_dir() else 0


@dataclasses.dataclass(slots=True)
class _Warmth:
    """Says when the kernels of a search are compiled.

    Attributes:
        seen: (cases done, kernels in the cache), the oldest first.
    """

    seen: list[tuple[int, int]] = dataclasses.field(default_factory=list)

    def is_cold(self, cases: int, kernels: int) -> bool:
        """Take note of the state; say whether new kernels still come up often."""
        if not self.seen or self.seen[-1][0] < cases:
            self.seen.append((cases, kernels))
        while len(self.seen) > 1 and self.seen[1][0] <= cases - WARM_AFTER:
            del self.seen[0]
        before, known = self.seen[0]
        return cases - before < WARM_AFTER or kernels - known > WARM_BELOW * (cases - before)


class _Workers:
    """The processes of a search.

    Attributes:
        ahead: blocks that should be under way.
        preparing, running: futures of blocks under way.
    """

    def __init__(
        self, target: Whole | LogitsTarget, name: str, device: Device, waived: Sequence[str], jobs: int
    ) -> None:
        # The children must not inherit a CUDA context, nor this process's choice between interpreter and compiler.
        spawn = multiprocessing.get_context("spawn")

        def with_target(count: int) -> concurrent.futures.ProcessPoolExecutor:
            return concurrent.futures.ProcessPoolExecutor(
                count, spawn, initializer=_prepare, initargs=(name, device, waived)
            )

        self.preparing: dict[concurrent.futures.Future[Any], _Block] = {}
        self.running: dict[concurrent.futures.Future[Any], _Block] = {}
        self.ahead = jobs + 1
        self._jobs = jobs
        self._pool = with_target(jobs)
        self._helpers: concurrent.futures.ProcessPoolExecutor | None = None
        self._warmers: concurrent.futures.ProcessPoolExecutor | None = None
        self._warming: set[concurrent.futures.Future[Any]] = set()
        self._warmth = _Warmth()
        # In memory where there is such a place: a look at a million keys is 134 MB.
        memory = Path("/dev/shm")  # noqa: S108 - a folder of our own is made in it
        self._handed = tempfile.TemporaryDirectory(prefix="dosa-fuzz-", dir=memory if memory.is_dir() else None)
        if isinstance(target, KernelTarget) and device in HELPED:
            self._variants = target.all_variants
            others = max(1, (os.cpu_count() or 1) - jobs)
            self._helpers = concurrent.futures.ProcessPoolExecutor(min(MOST_HELPERS, others), spawn)
            self._warmers = with_target(min(MOST_WARMERS, others))
            self.ahead += AHEAD * min(MOST_HELPERS, others) + min(MOST_WARMERS, others)

    def start(self, block: _Block) -> None:
        """Begin a block: its preparation where there are helpers for that, else its cases."""
        if self._helpers is None or block.directed:
            self.running[self._pool.submit(_run_block, block)] = block
            return
        file = Path(self._handed.name) / str(block.seed)
        arguments = (file, block.seed, self._variants, block.examples, block.max_keys)
        self.preparing[self._helpers.submit(_prepare_family, *arguments)] = block

    def run_prepared(self, block: _Block) -> None:
        """Begin the cases of a block that was prepared."""
        busy = len(self.running) - len(self._warming & self.running.keys())
        if self._warmers is not None and busy > self._jobs:
            future = self._warmers.submit(_run_block, block)
            self._warming.add(future)
        else:
            future = self._pool.submit(_run_block, block)
        self.running[future] = block

    def take_note(self, cases: int) -> None:
        """Send the processes away that help to compile, once there is little to compile."""
        if self._warmers is not None and not self._warmth.is_cold(cases, _compiled()):
            self._warmers.shutdown(wait=False)
            self._warmers = None

    def close(self) -> None:
        """End all processes; blocks that did not start are dropped."""
        for executor in (self._pool, self._helpers, self._warmers):
            if executor is not None:
                executor.shutdown(cancel_futures=True)
        self._handed.cleanup()


def run(
    name: str,
    device: Device,
    *,
    waived: Sequence[str] = (),
    jobs: int,
    examples: int,
    seed: int = 0,
    budget_s: float | None = None,
    folder: Path = Path(),
    command: str = "dosa fuzz",
    on_progress: Callable[[int, int], None] | None = None,
) -> FuzzReport:
    """Fuzz a target in several processes. Random cases of our own paths come in families.

    Args:
        name: of the target.
        device: where it runs.
        waived: items of its promise that do not count.
        jobs: processes.
        examples: random cases in all, beyond the directed ones.
        seed: of the first block.
        budget_s: start no new case after this many seconds, or None.
        folder: where a failing case is saved.
        command: beginning of the reproducer.
        on_progress: called with (cases done, random cases planned).

    Returns:
        The merged report; a process that died is the fault `Fault.DIED`, with the blocks that were under way.

    Raises:
        DosaError: the target does not exist or cannot run here.
    """
    started = time.monotonic()
    target = make(name, device, waived)  # says here, not in a worker, what is wrong with it
    size = SCORER_BLOCK if isinstance(target, libraries.ScorerTarget) else LOGITS_BLOCK
    if isinstance(target, KernelTarget):
        size = families.LOOKS
    common: dict[str, Any] = {
        "name": name,
        "long": LONG_ROWS if device is Device.CUDA else (),
        "max_keys": families.MILLION if device is Device.CUDA else families.SMALL_KEYS,
        "until": None if budget_s is None else time.time() + budget_s,
        "folder": folder,
        "command": command,
    }
    waiting = [_Block(directed=True, seed=seed, examples=0, **common)]
    for number, start in enumerate(range(0, examples, size)):
        waiting.append(_Block(directed=False, seed=seed + number, examples=min(size, examples - start), **common))
    reports: list[FuzzReport] = []
    done = 0
    workers = _Workers(target, name, device, waived, jobs)

    def stop() -> bool:
        return any(report.failure is not None for report in reports) or (
            budget_s is not None and time.monotonic() - started > budget_s
        )

    try:
        while (waiting and not stop()) or workers.preparing or workers.running:
            while waiting and not stop() and len(workers.preparing) + len(workers.running) < workers.ahead:
                workers.start(waiting.pop(0))
            finished, _ = concurrent.futures.wait(
                [*workers.preparing, *workers.running], return_when=concurrent.futures.FIRST_COMPLETED
            )
            for future in finished & workers.preparing.keys():
                block = workers.preparing.pop(future)
                if not stop():
                    workers.run_prepared(dataclasses.replace(block, looks=future.result()))
            for future in finished & workers.running.keys():
                report = future.result()
                del workers.running[future]
                reports.append(report)
                done += report.cases
                if on_progress is not None:
                    on_progress(done, examples)
            workers.take_note(done)
    except BrokenProcessPool:
        reports.append(_died(name, sorted(block.seed for block in workers.running.values()), size, command))
    finally:
        workers.close()
    complete = not waiting and not any(report.budget_spent for report in reports)
    return merge(reports, seed=seed, examples=examples, time_s=time.monotonic() - started, complete=complete)


def _died(name: str, seeds: list[int], size: int, command: str) -> FuzzReport:
    reproducer = f"{command} --jobs 1 --examples {size} --seed {min(seeds, default=0)}"
    mismatch = Mismatch(variant=name, fault=Fault.DIED, evidence={"seeds_under_way": sorted(seeds)})
    return FuzzReport(
        target=name,
        variants=(name,),
        seed=0,
        examples=0,
        directed=0,
        cases=0,
        calls=0,
        rows=0,
        rows_pruned=0,
        fallback={},
        features={},
        time_s=0.0,
        budget_spent=False,
        failure=Failure(case=None, mismatch=mismatch, file="", reproducer=reproducer),
    )
