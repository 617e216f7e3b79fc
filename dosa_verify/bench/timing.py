"""How time and memory are measured: CUDA events, contestants in turn, a cold cache, median and spread."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import shutil
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import numpy as np

from dosa_verify.bench.cells import Spread

Call = Callable[[], object]
StagedCall = Callable[[Callable[[str], None]], object]

L2_TIMES = 4
"""Before each timed call so many times the L2 cache are written, so that no call finds its inputs there."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How often a contestant is timed.

    Attributes:
        runs: calls of a contestant.
        long_runs: calls of one whose first call took more than ``long_ms``.
        long_ms: milliseconds.
        stage_runs: calls with a mark at every stage, apart from the timed ones; one of a long call.
    """

    runs: int = 20
    long_runs: int = 7
    long_ms: float = 100.0
    stage_runs: int = 3


QUICK = Effort(runs=3, long_runs=3, stage_runs=1)


class Meter(Protocol):
    """Measures on one device."""

    def mark(self) -> Any:
        """A point in the device's stream of work."""

    def ms(self, start: Any, end: Any) -> float:
        """Milliseconds between two marks; waits for the second."""

    def cool(self) -> None:
        """Drive the inputs out of the cache."""

    def start_memory(self) -> None:
        """Begin to watch memory."""

    def peak_bytes(self) -> int:
        """Most memory held since `start_memory`, beyond what was held then and what is held now (the result)."""


class CudaMeter:
    """CUDA events and torch's allocator statistics on the current GPU."""

    def __init__(self) -> None:
        import torch

        self._torch = torch
        size = L2_TIMES * torch.cuda.get_device_properties(0).L2_cache_size
        self._scratch = torch.empty(size, dtype=torch.uint8, device="cuda")
        self._before = 0

    def mark(self) -> Any:
        """Record an event."""
        event = self._torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def ms(self, start: Any, end: Any) -> float:
        """Wait for the second event; see `Meter`."""
        end.synchronize()
        return float(start.elapsed_time(end))

    def cool(self) -> None:
        """Overwrite more than the L2 cache holds."""
        self._scratch.fill_(1)

    def start_memory(self) -> None:
        """See `Meter`."""
        self._torch.cuda.reset_peak_memory_stats()
        self._before = self._torch.cuda.memory_allocated()

    def peak_bytes(self) -> int:
        """See `Meter`."""
        held = max(self._torch.cuda.memory_allocated(), self._before)
        return int(self._torch.cuda.max_memory_allocated() - held)


@dataclasses.dataclass(slots=True)
class Timed:
    """Calls of one contestant: milliseconds of each, and the peak of memory beyond inputs and results."""

    ms: list[float] = dataclasses.field(default_factory=list)
    peak_bytes: int = 0


def alternate(calls: Mapping[str, Call], meter: Meter, effort: Effort) -> dict[str, Timed]:
    """Time contestants in turn (A B A B), so that a drift of the machine meets all of them.

    Args:
        calls: contestants, already warm.
        meter: of the device.
        effort: how often.

    Returns:
        Times and memory of each.
    """
    found = {name: Timed() for name in calls}
    left = dict.fromkeys(calls, effort.runs)
    while any(left.values()):
        for name, call in calls.items():
            if not left[name]:
                continue
            timed = found[name]
            meter.cool()
            meter.start_memory()
            start = meter.mark()
            result = call()
            timed.ms.append(meter.ms(start, meter.mark()))
            timed.peak_bytes = max(timed.peak_bytes, meter.peak_bytes())
            del result
            left[name] -= 1
            if len(timed.ms) == 1 and timed.ms[0] > effort.long_ms:
                left[name] = effort.long_runs - 1
    return found


def spread(times: list[float]) -> Spread:
    """Median, 10th and 90th percentile."""
    p10, median, p90 = (round(float(x), 5) for x in np.percentile(times, (10, 50, 90)))
    return Spread(median=median, p10=p10, p90=p90)


def stage_times(call: StagedCall, meter: Meter, runs: int) -> dict[str, float]:
    """Milliseconds per stage, median over some calls; stages of one name are added up.

    Args:
        call: takes a function that it calls with a stage's name when the stage starts.
        meter: of the device.
        runs: calls.
    """
    found: dict[str, list[float]] = collections.defaultdict(list)
    for _ in range(runs):
        marks: list[tuple[str, Any]] = []
        meter.cool()

        def on_stage(name: str, marks: list[tuple[str, Any]] = marks) -> None:
            marks.append((name, meter.mark()))

        result = call(on_stage)
        on_stage("")
        total: dict[str, float] = collections.defaultdict(float)
        for (name, start), (_, end) in itertools.pairwise(marks):
            total[name] += meter.ms(start, end)
        for name, value in total.items():
            found[name].append(value)
        del result
    return {name: round(statistics.median(values), 5) for name, values in found.items()}


class Clocks:
    """SM clock of the first GPU, sampled beside the timing."""

    def __init__(self) -> None:
        self._samples: list[tuple[float, int]] = []

    def since(self, moment: float) -> int | None:
        """Median clock in MHz since a ``time.monotonic()``; the last known one if there is none, else None."""
        recent = [clock for when, clock in self._samples if when >= moment] or [c for _, c in self._samples[-1:]]
        return int(statistics.median(recent)) if recent else None

    def read(self, lines: Iterator[str]) -> None:
        """Take in one clock per line."""
        for text in lines:
            if text.strip().isdigit():
                self._samples.append((time.monotonic(), int(text)))


@contextlib.contextmanager
def sampled_clocks() -> Iterator[Clocks]:
    """Sample the clock twice a second while the block runs; without ``nvidia-smi`` there are no samples."""
    clocks = Clocks()
    if shutil.which("nvidia-smi") is None:
        yield clocks
        return
    query = ["nvidia-smi", "--id=0", "--query-gpu=clocks.sm", "--format=csv,noheader,nounits", "--loop-ms=500"]
    with subprocess.Popen(query, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as sampler:
        assert sampler.stdout is not None
        reader = threading.Thread(target=clocks.read, args=(sampler.stdout,), daemon=True)
        reader.start()
        try:
            yield clocks
        finally:
            sampler.terminate()
            reader.join()


def gpu_facts() -> dict[str, str]:
    """Driver, memory, clock and power limits of the first GPU as ``nvidia-smi`` gives them; empty without it."""
    if shutil.which("nvidia-smi") is None:
        return {}
    fields = ("driver_version", "memory.total", "clocks.max.sm", "clocks.max.mem", "power.limit")
    query = ["nvidia-smi", "--id=0", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"]
    done = subprocess.run(query, check=False, capture_output=True, text=True)
    values = [value.strip() for value in done.stdout.strip().split(",")]
    return dict(zip(fields, values, strict=True)) if done.returncode == 0 and len(values) == len(fields) else {}
