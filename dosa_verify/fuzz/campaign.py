"""A search in several processes: blocks of cases, each a run with a seed of its own, merged into one report.

What a block holds depends on the search's seed and the block's number alone (and on Hypothesis, for top-K kernels): the
cases are the same for any number of processes. Processes with a GPU context each take turns on the GPU, so a few that
helpers keep busy do more than many.
"""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import time
from collections.abc import Callable, Sequence
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

from dosa_ref.spec import BackendUnavailable, InvalidProblem, UnprovedBound
from dosa_verify.fuzz import families, logits_runner, runner
from dosa_verify.fuzz.report import Failure, Fault, FuzzReport, Mismatch, merge
from dosa_verify.targets import libraries
from dosa_verify.targets import logits as targets
from dosa_verify.targets.dosa import TARGET_NAMES, Device, KernelTarget, connect
from dosa_verify.targets.logits import LogitsTarget

DEFAULT_EXAMPLES = 2000
BLOCK = 1024
"""Cases of one block of our own paths: whole families."""
LOGITS_BLOCK = 250
"""Cases of one block of a top-K kernel."""
HELPERS = 2
"""Processes beside each one that runs our paths on a GPU; they prepare its cases."""
LONG_ROWS = (131_072, families.MILLION)
"""Lengths of long rows for top-K kernels on a GPU."""

Whole = KernelTarget | libraries.ScorerTarget
"""A target that scores and selects."""

_targets: dict[str, Whole | LogitsTarget] = {}
"""The target of this worker process."""
_helpers: list[concurrent.futures.Executor] = []
"""The helpers of this worker process."""


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
    if name in TARGET_NAMES and device is Device.CUDA:
        spawn = multiprocessing.get_context("spawn")
        _helpers.append(concurrent.futures.ProcessPoolExecutor(HELPERS, spawn))


def _block(
    name: str, device: Device, number: int | None, seed: int, examples: int, folder: Path, command: str
) -> FuzzReport:
    """Run the directed cases (``number`` None) or a block in a worker."""
    try:
        return _run_block(name, device, number, seed, examples, folder, command)
    except UnprovedBound as error:
        # Errors with several arguments do not travel between processes.
        raise BackendUnavailable(str(error)) from None


def _run_block(
    name: str, device: Device, number: int | None, seed: int, examples: int, folder: Path, command: str
) -> FuzzReport:
    target = _targets[name]
    if isinstance(target, Whole):
        if number is None:
            return runner.run(target, examples=0, seed=seed, folder=folder, command=command)
        if not isinstance(target, KernelTarget):
            return runner.run(
                target, examples=examples, seed=seed + number, folder=folder, command=command, directed=False
            )
        max_keys = families.MILLION if device is Device.CUDA else families.SMALL_KEYS
        return families.run(
            target,
            examples=examples,
            seed=_first_seed(name, seed, number),
            max_keys=max_keys,
            folder=folder,
            command=command,
            helpers=_helpers[0] if _helpers else None,
            ahead=HELPERS * families.AHEAD,
        )
    return logits_runner.run(
        target,
        examples=0 if number is None else examples,
        seed=seed if number is None else seed + number,
        folder=folder,
        command=command,
        directed=number is None,
        long=LONG_ROWS if device is Device.CUDA else (),
    )


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
        budget_s: start no new block after this many seconds, or None.
        folder: where a failing case is saved.
        command: beginning of the reproducer.
        on_progress: called with (cases done, random cases planned).

    Returns:
        The merged report; a process that died is the fault `Fault.DIED`, with the blocks that were under way.

    Raises:
        DosaError: the target does not exist or cannot run here.
    """
    started = time.monotonic()
    make(name, device, waived)  # says here, not in a worker, what is wrong with it
    size = BLOCK if name in TARGET_NAMES else LOGITS_BLOCK
    blocks: list[int | None] = [None, *range(-(-examples // size))]
    reports: list[FuzzReport] = []
    pending: dict[concurrent.futures.Future[FuzzReport], int | None] = {}
    done = 0
    # The children must not inherit a CUDA context, nor this process's choice between interpreter and compiler.
    pool = concurrent.futures.ProcessPoolExecutor(
        jobs, multiprocessing.get_context("spawn"), initializer=_prepare, initargs=(name, device, waived)
    )
    try:
        while True:
            stop = any(report.failure is not None for report in reports) or (
                budget_s is not None and time.monotonic() - started > budget_s
            )
            while blocks and not stop and len(pending) <= jobs:
                number = blocks.pop(0)
                count = 0 if number is None else min(size, examples - number * size)
                pending[pool.submit(_block, name, device, number, seed, count, folder, command)] = number
            if not pending:
                break
            finished, _ = concurrent.futures.wait(pending, return_when=concurrent.futures.FIRST_COMPLETED)
            for future in finished:
                report = future.result()
                del pending[future]
                reports.append(report)
                done += report.cases
                if on_progress is not None:
                    on_progress(done, examples)
    except BrokenProcessPool:
        seeds = [_first_seed(name, seed, number) for number in pending.values() if number is not None]
        reports.append(_died(name, seeds, size, command))
    finally:
        pool.shutdown(cancel_futures=True)
    return merge(reports, seed=seed, examples=examples, time_s=time.monotonic() - started, complete=not blocks)


def _first_seed(name: str, seed: int, number: int) -> int:
    """The seed with which a search begins with this block."""
    return seed + (number * BLOCK // families.LOOKS if name in TARGET_NAMES else number)


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
