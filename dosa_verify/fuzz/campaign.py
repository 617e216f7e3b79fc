"""A search in several processes: blocks of cases, each a run with a seed of its own, merged into one report.

What a block holds depends on the search's seed and the block's number alone: the cases are the same for any number of
processes. Processes with a GPU context each take turns on the GPU, so for our own paths there one or two processes do
more than many; others prepare the cases, and what is right for them.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import multiprocessing
import os
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
        looks: the family, where it was prepared elsewhere.
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
    looks: list[families.Look] | None = None


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
            return logits_runner.run(target, directed=block.directed, long=block.long, drawn=True, **common)
        if block.directed or not isinstance(target, KernelTarget):
            return runner.run(target, directed=block.directed, **common)
        return families.run(target, max_keys=block.max_keys, prepared=block.looks, **common)
    except UnprovedBound as error:
        # Errors with several arguments do not travel between processes.
        raise BackendUnavailable(str(error)) from None


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
    preparing: dict[concurrent.futures.Future[Any], _Block] = {}
    running: dict[concurrent.futures.Future[Any], _Block] = {}
    # The children must not inherit a CUDA context, nor this process's choice between interpreter and compiler.
    spawn = multiprocessing.get_context("spawn")
    pool = concurrent.futures.ProcessPoolExecutor(jobs, spawn, initializer=_prepare, initargs=(name, device, waived))
    helpers = None
    ahead = jobs + 1
    if isinstance(target, KernelTarget) and device in HELPED:
        count = max(1, min(MOST_HELPERS, (os.cpu_count() or 1) - jobs))
        helpers = concurrent.futures.ProcessPoolExecutor(count, spawn)
        ahead += AHEAD * count

    def stop() -> bool:
        return any(report.failure is not None for report in reports) or (
            budget_s is not None and time.monotonic() - started > budget_s
        )

    try:
        while (waiting and not stop()) or preparing or running:
            while waiting and not stop() and len(preparing) + len(running) < ahead:
                block = waiting.pop(0)
                if helpers is None or block.directed or not isinstance(target, KernelTarget):
                    running[pool.submit(_run_block, block)] = block
                else:
                    arguments = (block.seed, target.all_variants, block.examples, block.max_keys)
                    preparing[helpers.submit(families.prepare, *arguments)] = block
            finished, _ = concurrent.futures.wait(
                [*preparing, *running], return_when=concurrent.futures.FIRST_COMPLETED
            )
            for future in finished & preparing.keys():
                block = preparing.pop(future)
                if not stop():
                    looked = dataclasses.replace(block, looks=future.result())
                    running[pool.submit(_run_block, looked)] = block
            for future in finished & running.keys():
                report = future.result()
                del running[future]
                reports.append(report)
                done += report.cases
                if on_progress is not None:
                    on_progress(done, examples)
    except BrokenProcessPool:
        reports.append(_died(name, sorted(block.seed for block in running.values()), size, command))
    finally:
        for executor in (pool, helpers):
            if executor is not None:
                executor.shutdown(cancel_futures=True)
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
