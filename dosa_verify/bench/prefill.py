"""``dosa bench prefill``: check each contestant on each cell, then time it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import random
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from dosa_gpu.plan import Path as SelectPath
from dosa_ref.spec import Mode, Outcome
from dosa_verify.audit.evidence import plain, this_command
from dosa_verify.bench import cells
from dosa_verify.bench.cells import CellResult, LayerResult, Spread
from dosa_verify.bench.contestants import SCORE_PATH, SCORER, Answer, Contestant, ours, peers, scorers
from dosa_verify.bench.indexer import Preparation
from dosa_verify.bench.inputs import Inputs, synthetic
from dosa_verify.bench.judge import Judge, Reference, differing_score_rows, process_pool
from dosa_verify.bench.timing import Clocks, Effort, Meter, alternate, gpu_facts, spread, stage_times
from dosa_verify.environment import environment
from dosa_verify.targets.dosa import Device

CALIBRATION_HEADS, CALIBRATION_KEYS, CALIBRATION_QUERIES = 64, 131072, 4096
"""The calibration cell: our dense path on synthetic inputs, whose time depends on the size alone."""

SELECTION, COMPLETE, SCORES = "selection", "complete", "scores"
SCOPES = (SELECTION, COMPLETE, SCORES)

OnCell = Callable[[str], None]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What is measured on each layer's inputs.

    Attributes:
        num_keys, num_queries: sizes, each with each.
        contestants: who.
        topk: keys per row.
        scope: ``selection``, ``complete`` or ``scores``.
        seed: of the rows that dosa_ref selects, and of the preparation's random weights.
        reference_rows: rows that dosa_ref selects.
        effort: how often a contestant is timed.
    """

    num_keys: Sequence[int]
    num_queries: Sequence[int]
    contestants: Sequence[Contestant]
    topk: int
    scope: str
    seed: int
    reference_rows: int
    effort: Effort


def contestants(
    paths: Sequence[SelectPath], modes: Sequence[Mode], with_peers: bool, scope: str
) -> tuple[list[Contestant], dict[str, str]]:
    """Contestants by name, and each library's version or that it is not installed.

    Raises:
        BackendUnavailable: scope ``scores`` without DeepGEMM.
    """
    theirs, versions = peers()
    if scope == SCORES:
        return list(scorers()), versions
    own = [
        one
        for path in paths
        for one in ([ours(path, mode) for mode in modes] if path is SelectPath.DOSA else [ours(path)])
    ]
    return [*own, *(theirs if with_peers else ())], versions


def calibrate(meter: Meter, device: Device, effort: Effort, size: tuple[int, int, int], topk: int) -> Spread:
    """Time the calibration cell.

    Args:
        meter: of the device.
        device: where.
        effort: how often.
        size: heads, keys, queries.
        topk: keys per row.
    """
    heads, keys, queries = size
    inputs = synthetic(num_heads=heads, num_keys=keys, num_queries=queries, seed=0, device=device)
    dense = ours(SelectPath.DENSE)

    def call() -> Answer:
        return dense.call(inputs, topk, None)

    call()
    return spread(alternate({dense.name: call}, meter, effort)[dense.name].ms)


def run_record(
    options: Options, inputs: str, versions: dict[str, str], calibration: Spread | None, commit: str
) -> dict[str, Any]:
    """The first line of a file, schema ``dosa.bench_run/1``; ``inputs`` says what they are made of."""
    where = environment()
    record = {
        "schema": cells.RUN_SCHEMA,
        "command": this_command(),
        "environment": {**where, "git_commit": where["git_commit"] or commit or None},
        "gpu": gpu_facts(),
        "inputs": inputs,
        "peers": versions,
        "scope": options.scope,
        "seed": options.seed,
        "topk": options.topk,
        "effort": dataclasses.asdict(options.effort),
        "calibration_ms": dataclasses.asdict(calibration) if calibration else None,
    }
    return plain(record)  # type: ignore[no-any-return]


def measure(
    inputs: Inputs,
    options: Options,
    meter: Meter,
    clocks: Clocks,
    timed: set[cells.Key],
    pool: Executor,
    on_cell: OnCell,
) -> Iterable[CellResult]:
    """Check and time every cell of one layer's inputs.

    Args:
        inputs: with at least the largest numbers of keys and queries.
        options: what to measure.
        meter: of the device.
        clocks: sampled in the meantime.
        timed: sizes at which data-independent contestants were timed already; grows.
        pool: where dosa_ref computes, never while something is timed.
        on_cell: called with a line of text before each cell.

    Yields:
        One result per cell and contestant.
    """
    longest = inputs.suffix(max(options.num_keys), max(options.num_queries))
    draw = random.Random(options.seed)
    shared = min(options.num_queries)
    count = min(options.reference_rows, shared)
    # The last row and some others of those that every number of queries has.
    rows = [0, *draw.sample(range(1, shared), count - 1)] if count else []
    lengths = [longest.suffix(num_keys, len(longest.q)) for num_keys in options.num_keys]
    judges: list[Judge] = []
    if options.scope != SCORES:
        reference = Reference(longest, rows, pool) if rows else None
        judges = [Judge(length, options.topk) for length in lengths]
        if reference is not None:
            for judge in judges:
                judge.be_judged(reference)
    for place, (num_keys, length) in enumerate(zip(options.num_keys, lengths, strict=True)):
        judge_here = judges[place] if judges else None
        for num_queries in options.num_queries:
            cell = length.suffix(num_keys, num_queries)
            size = (inputs.num_heads, num_keys, num_queries)
            due = [one for one in options.contestants if (one.name, *size) not in timed]
            timed |= {(one.name, *size) for one in due if one.data_independent}
            if not due:
                continue
            text = f"{cells.format_size(num_queries)} x {cells.format_size(num_keys)}, H = {inputs.num_heads}"
            on_cell(f"{inputs.domain} layer {inputs.layer}, {text}: {', '.join(one.name for one in due)}")
            yield from _cell(cell, due, judge_here, options, meter, clocks)


def _cell(
    inputs: Inputs, due: Sequence[Contestant], judge: Judge | None, options: Options, meter: Meter, clocks: Clocks
) -> Iterable[CellResult]:
    topk, queries = options.topk, len(inputs.q)
    prepare = None
    if options.scope == COMPLETE:
        prepare = Preparation(inputs.num_heads, queries, inputs.q.device, options.seed)

    def calls(one: Contestant, on_stage: Callable[[str], None] | None = None) -> Answer:
        if prepare is not None:
            if on_stage is not None:
                on_stage("projections")
            prepare()
        return one.call(inputs, topk, on_stage)

    stats, verdicts = {}, {}
    for one in due:
        answer = calls(one)
        if judge is None:
            differing = differing_score_rows(inputs)
            verdicts[one.name] = (Outcome.WRONG_SET if differing else Outcome.EXACT), differing
        else:
            verdicts[one.name] = judge.verdict(answer, queries)
        stats[one.name] = answer.stats
        del answer
    started = time.monotonic()
    times = alternate({one.name: functools.partial(calls, one) for one in due}, meter, options.effort)
    clock = clocks.since(started)
    for one in due:
        stages: dict[str, float] = {}
        if one.peer is None and one.path != SCORE_PATH:
            is_long = times[one.name].ms[0] > options.effort.long_ms
            stages = stage_times(functools.partial(calls, one), meter, 1 if is_long else options.effort.stage_runs)
        found = stats[one.name]
        outcome, differing = verdicts[one.name]
        result = LayerResult(
            layer=inputs.layer,
            ms=spread(times[one.name].ms),
            runs=len(times[one.name].ms),
            taken=found.path if found else None,
            prune_rate=round(found.prune_rate, 6) if found else 0.0,
            survivors=_survivors(found.survivors) if found and not one.data_independent else None,
            fallback={reason: len(rows) for reason, rows in found.fallback.items()} if found else {},
            workspace_bytes=times[one.name].peak_bytes,
            stated_workspace_bytes=found.workspace_bytes if found else None,
            outcome=outcome.value,
            rows_checked=queries,
            differing_rows=differing,
            reference_rows=judge.reference_rows if judge else 0,
            stages_ms=stages,
            sm_clock_mhz=clock,
        )
        yield CellResult(
            domain=inputs.domain,
            num_heads=inputs.num_heads,
            num_keys=len(inputs.k),
            num_queries=queries,
            topk=topk,
            path=one.path,
            mode=one.mode,
            peer=one.peer,
            scope=options.scope,
            data_independent=one.data_independent,
            by_layer=(result,),
        )


def _survivors(counts: npt.NDArray[np.int64]) -> dict[str, int]:
    p50, p99, most = np.percentile(counts, (50, 99, 100)) if len(counts) else (0, 0, 0)
    return {"p50": int(p50), "p99": int(p99), "max": int(most)}


def run(
    source: Iterable[Inputs],
    options: Options,
    *,
    first: dict[str, Any],
    out: Path | None,
    meter: Meter,
    clocks: Clocks,
    on_cell: OnCell,
) -> list[CellResult]:
    """Measure all inputs and write the file.

    Each result is written when it is there, so that a run that is cut short leaves what it had; a run that ends joins
    the layers of each cell.

    Args:
        source: inputs, one layer each.
        options: what to measure.
        first: the file's first line (`run_record`).
        out: the file, or None.
        meter, clocks, on_cell: see `measure`.

    Returns:
        The results, layers joined.
    """
    results: list[CellResult] = []
    timed: set[cells.Key] = set()
    with process_pool() as pool, contextlib.ExitStack() as stack:
        file = None if out is None else stack.enter_context(out.open("w", encoding="utf-8"))
        _write(file, first)
        for inputs in source:
            for result in measure(inputs, options, meter, clocks, timed, pool, on_cell):
                results.append(result)
                _write(file, result.to_json())
    joined = cells.merge(results)
    if out is not None:
        text = cells.line(first) + "".join(cells.line(result.to_json()) for result in joined)
        partial = out.with_name(f".{out.name}.partial")
        partial.write_text(text, encoding="utf-8")
        partial.replace(out)
    return joined


def _write(file: IO[str] | None, record: dict[str, Any]) -> None:
    if file is not None:
        file.write(cells.line(record))
        file.flush()


def has_fault(results: Sequence[CellResult]) -> bool:
    """Whether a result differs: any of ours, or a peer's in more than ties."""
    for result in results:
        allowed = {Outcome.EXACT.value} | (
            {Outcome.TIE_EQUIVALENT.value} if result.peer not in (None, SCORER) else set()
        )
        if any(part.outcome not in allowed for part in result.by_layer):
            return True
    return False
