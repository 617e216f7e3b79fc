"""Ledger of known faults of other libraries' top-K kernels: inputs on which they must still fail.

Each entry is a strict expectation. One that no longer fails means that the library was mended (or that this kit no
longer sees the fault): the entry then has to go, and what was waived for it with it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from dosa_ref.trace import LogitsProblem
from dosa_verify.fuzz.logits import LogitsCase, Planted, Scores, build
from dosa_verify.fuzz.logits_runner import IsolatedChecker, check_logits
from dosa_verify.fuzz.report import Fault, Mismatch
from dosa_verify.targets import logits as targets
from dosa_verify.targets.dosa import Device
from dosa_verify.targets.logits import Promise


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KnownFault:
    """One known fault.

    Attributes:
        name: what goes wrong, in a few words.
        target: name of the target.
        issue: where it was reported, or a report of the same kind of fault elsewhere.
        seen: version with which this kit saw it, or empty: the library has not been run here.
        build: the input.
        faults: how it may show.
        demand: items of the promise in place of the target's own, where the library promises less.
        isolated: run it in a process of its own, which it may take down.
    """

    name: str
    target: str
    issue: str
    seen: str = ""
    build: Callable[[], LogitsProblem]
    faults: frozenset[Fault]
    demand: dict[str, object] = dataclasses.field(default_factory=dict)
    isolated: bool = False


def row(scores: npt.NDArray[Any], topk: int) -> LogitsProblem:
    """One whole row of scores."""
    logits = scores.astype(np.float32)[None]
    return LogitsProblem(
        logits=logits, row_start=np.zeros(1, np.int32), row_end=np.full(1, len(scores), np.int32), topk=topk
    )


def _half_precision_ties() -> LogitsProblem:
    place = np.arange(5096)
    return row(np.where(place < 4096, 1 + place * 2.0**-19, 2.0), 2048)


def _mostly_nan() -> LogitsProblem:
    place = np.arange(3000)
    return row(np.where(place % 6 == 0, place, np.nan), 2048)


WRONG_CHOICE = frozenset({Fault.WRONG_SET, Fault.WRONG_COUNT})

KNOWN_FAULTS = (
    KnownFault(
        name="negative_zero_below_zero",
        target="flashinfer",
        issue="https://github.com/NVIDIA/cub/pull/218",
        seen="0.6.9",
        build=lambda: row(np.array([-0.0, -0.0, -0.0, 0.0, 0.0, 0.0]), 2),
        faults=WRONG_CHOICE,
    ),
    KnownFault(
        name="no_rows",
        target="flashinfer",
        issue="https://github.com/vllm-project/vllm-xpu-kernels/issues/609",
        seen="0.6.9",
        build=lambda: build(LogitsCase(rows=0, columns=93, topk=10)),
        faults=frozenset({Fault.CRASHED}),
    ),
    KnownFault(
        name="candidate_buffer_of_4096",
        target="sgl_kernel",
        issue="https://github.com/sgl-project/sglang/issues/36807",
        build=lambda: row(1 + np.arange(8192) * 2.0**-15, 2048),
        faults=WRONG_CHOICE,
    ),
    KnownFault(
        name="half_precision_ties",
        target="sgl_kernel",
        issue="https://github.com/sgl-project/sglang/issues/35257",
        build=_half_precision_ties,
        faults=WRONG_CHOICE,
    ),
    KnownFault(
        name="equal_leading_22_bits",
        target="tilelang",
        issue="https://github.com/tile-ai/tilelang/issues/1351",
        build=lambda: build(LogitsCase(seed=1, rows=1, columns=32768, topk=2048, scores=Scores.EQUAL_22)),
        faults=frozenset({*WRONG_CHOICE, Fault.CRASHED, Fault.DIED, Fault.INVALID_INDEX, Fault.DUPLICATE}),
        isolated=True,
    ),
    KnownFault(
        name="unwritten_places_among_nan",
        target="vllm",
        issue="https://github.com/vllm-project/vllm/issues/49896",
        build=_mostly_nan,
        faults=frozenset({*WRONG_CHOICE, Fault.INVALID_INDEX, Fault.DUPLICATE}),
    ),
    KnownFault(
        name="no_order_among_ties",
        target="numpy.argpartition",
        issue="https://github.com/numpy/numpy/issues/12802",
        seen="2.4",
        build=lambda: build(LogitsCase(seed=1, rows=1, columns=93, topk=10, scores=Scores.TIE_AT_K)),
        faults=WRONG_CHOICE,
        demand={"ties": targets.Ties.LOWEST_INDEX},
    ),
    KnownFault(
        name="nan_ranks_first",
        target="torch.topk",
        issue="https://github.com/pytorch/pytorch/issues/16762",
        seen="2.13",
        build=lambda: build(LogitsCase(seed=3, rows=1, columns=93, topk=10, planted=(Planted.NAN,))),
        faults=WRONG_CHOICE,
        demand={"nans": targets.NaNs.DROP},
    ),
)


def reproduce(known: KnownFault, device: Device) -> Mismatch | None:
    """Run a known fault's input; gives how it fails now, or None if it does not.

    Args:
        known: an entry of the ledger.
        device: where the library runs.

    Raises:
        BackendUnavailable: the library or the device is missing.
    """
    target = targets.make(known.target, device)
    if known.isolated:
        checker = IsolatedChecker(known.target, device)
        try:
            return checker(known.build())
        finally:
            checker.close()
    promise: Promise = dataclasses.replace(target.promise, **known.demand)  # type: ignore[arg-type]
    return check_logits(dataclasses.replace(target, promise=promise), known.build())  # type: ignore[type-var]
