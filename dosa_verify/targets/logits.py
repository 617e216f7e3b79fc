"""Top-K kernels as targets: ``logits -> indices``, each with the promise by which it is judged.

Libraries are imported when a target is made, never before; one that is missing raises `BackendUnavailable`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from dosa_ref.spec import GPU_MAX_TOPK, PAD_INDEX, InvalidProblem
from dosa_ref.trace import LogitsProblem
from dosa_verify.fuzz.logits import PAD, POISON_SCORE, lift
from dosa_verify.targets.base import RunOptions
from dosa_verify.targets.dosa import MODES, PATHS, TARGET_NAMES, Device, KernelTarget, connect, to_torch

if TYPE_CHECKING:
    import torch

Indices = npt.NDArray[np.int32]


class Order(enum.Enum):
    """Order of a row's output that a target promises."""

    SET = "set"
    """Any order."""
    ASCENDING_INDEX = "ascending_index"
    DESCENDING_SCORE = "descending_score"
    """Equal scores among themselves in any order."""


class Ties(enum.Enum):
    """Which of several keys with the K-th score a target promises to select."""

    LOWEST_INDEX = "lowest_index"
    ANY = "any"
    """Some valid choice: the selected scores are right as a multiset."""


class NaNs(enum.Enum):
    """What a target promises about NaN scores."""

    DROP = "drop"
    """Never selected, and not counted."""
    REJECT = "reject"
    """A row with a NaN is refused with an error."""
    UNDEFINED = "undefined"
    """Only that indices are valid and distinct."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Promise:
    """What a target says about itself; it is judged by that and by nothing more.

    Attributes:
        order: of a row's output.
        ties: which keys among equal scores.
        nans: treatment of NaN scores.
        signed_zeros: whether -0.0 equals 0.0 where ties go to the lowest index; otherwise it ranks below.
        infinities: whether +Inf and -Inf are ordinary scores; otherwise no case has them.
        windows: whether the target takes a start and an end per row; otherwise it gets each row's window as an array.
        no_rows: whether a call may have no rows at all.
        short_rows: whether a row may have fewer than ``topk`` keys (-1 behind the last).
        strided: whether logits need not be contiguous along rows.
        repeatable: whether two calls give the same bits.
        min_topk, max_topk: range of ``topk``.
        max_row_length: longest row, or None.
    """

    order: Order = Order.SET
    ties: Ties = Ties.LOWEST_INDEX
    nans: NaNs = NaNs.DROP
    signed_zeros: bool = True
    infinities: bool = True
    windows: bool = False
    no_rows: bool = True
    short_rows: bool = True
    strided: bool = True
    repeatable: bool = True
    min_topk: int = 0
    max_topk: int | None = None
    max_row_length: int | None = None

    def to_json(self) -> dict[str, object]:
        """Return the promise as plain JSON values."""
        plain = dataclasses.asdict(self)
        return {name: value.value if isinstance(value, enum.Enum) else value for name, value in plain.items()}


WAIVED: dict[str, Any] = {
    "order": Order.SET,
    "ties": Ties.ANY,
    "nans": NaNs.UNDEFINED,
    "signed_zeros": False,
    "infinities": False,
    "no_rows": False,
    "short_rows": False,
    "strided": False,
    "repeatable": False,
}
"""What is left of a promise's item when it is waived."""


def waive(promise: Promise, items: Sequence[str]) -> Promise:
    """Return a promise without some of its items, to go on beyond a known fault.

    Args:
        promise: as declared.
        items: keys of `WAIVED`.

    Raises:
        InvalidProblem: there is no such item.
    """
    for item in items:
        if item not in WAIVED:
            raise InvalidProblem("waive", item, f"one of {', '.join(WAIVED)}")
    return dataclasses.replace(promise, **{item: WAIVED[item] for item in items})


class LogitsTarget(Protocol):
    """A top-K kernel under test."""

    @property
    def name(self) -> str:
        """What the command line calls it."""

    @property
    def promise(self) -> Promise:
        """By what it is judged."""

    def select(self, problem: LogitsProblem) -> Indices:
        """Select the top keys of every row.

        Args:
            problem: rows of scores; without ``promise.windows`` every window is the whole row.

        Returns:
            int32 ``[rows, topk]``, columns of ``problem.logits``, -1 behind the last.
        """


TopK = Callable[[npt.NDArray[np.float32], int], Any]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FunctionTarget:
    """A function ``f(logits, topk) -> indices``.

    Attributes:
        name: what the command line calls it.
        function: takes float32 ``[rows, n]`` and ``topk``, gives int32 ``[rows, topk]`` with a -1 tail; a torch tensor
            is taken for its values.
        promise: by what it is judged.
    """

    name: str
    function: TopK
    promise: Promise = Promise()

    def select(self, problem: LogitsProblem) -> Indices:
        """Call the function; see `LogitsTarget`."""
        answer = self.function(problem.logits, problem.topk)
        if hasattr(answer, "cpu"):
            answer = answer.cpu().numpy()
        return np.asarray(answer)


WindowsTopK = Callable[["torch.Tensor", "torch.Tensor", "torch.Tensor", int], "torch.Tensor"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WindowsTarget:
    """A function ``f(logits, row_start, row_end, topk) -> indices`` of torch tensors, with a window per row.

    Attributes:
        name: what the command line calls it.
        function: takes float32 ``[rows, n]``, a gap behind each row, and int32 ``[rows]``; gives int32 ``[rows, topk]``
            with a -1 tail.
        relative: whether indices count from the row's start.
        device: where the tensors lie.
        promise: by what it is judged.
    """

    name: str
    function: WindowsTopK
    relative: bool
    device: Device
    promise: Promise

    def select(self, problem: LogitsProblem) -> Indices:
        """Call the function; see `LogitsTarget`."""
        logits = to_pitched(problem, self.device)
        start, end = to_torch(problem.row_start, self.device), to_torch(problem.row_end, self.device)
        answer: Indices = self.function(logits, start, end, problem.topk).cpu().numpy()
        if self.relative:
            answer = np.where(answer == PAD_INDEX, PAD_INDEX, answer + problem.row_start[:, None]).astype(np.int32)
        return answer


def to_pitched(problem: LogitsProblem, device: Device) -> torch.Tensor:
    """Copy logits to a device; between strided rows lies a score that would win (a NaN would be dropped)."""
    import torch

    rows, columns = problem.logits.shape
    gap = 0 if problem.logits.flags.c_contiguous else PAD
    pitched = torch.full((rows, columns + gap), float(POISON_SCORE), device=device.value)
    logits = pitched[:, :columns]
    logits.copy_(to_torch(problem.logits, device))
    return logits


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TopKKernelTarget:
    """The final top-K kernel of this repository (``launch_topk``), outputs between canaries.

    Attributes:
        device: where it runs; `dosa_verify.targets.dosa.connect` must have been called.
        name: what the command line calls it.
        promise: everything: windows, ties, NaN, Inf, ascending order.
    """

    device: Device
    name: str = "topk"
    promise: Promise = Promise(order=Order.ASCENDING_INDEX, windows=True, min_topk=1, max_topk=GPU_MAX_TOPK)

    def select(self, problem: LogitsProblem) -> Indices:
        """Launch the kernel; see `LogitsTarget`.

        Raises:
            CanaryOverwritten: memory beside an output was written.
        """
        import torch

        from dosa_gpu.kernels import topk as kernel

        rows, topk = len(problem.logits), problem.topk
        place = self.device.value
        if rows == 0:
            return np.empty((0, topk), np.int32)
        logits = to_pitched(problem, self.device)
        start = to_torch(problem.row_start, self.device)
        end = to_torch(np.maximum(problem.row_end, problem.row_start), self.device)
        sizes = (rows * topk, rows * topk, rows)
        # A row that copies all its columns stays within the canaries.
        margin = CANARIES + problem.logits.shape[1]
        guarded = [torch.full((size + 2 * margin,), CANARY, dtype=torch.int32, device=place) for size in sizes]
        index, score, count = (part[margin : margin + size] for part, size in zip(guarded, sizes, strict=True))
        none = torch.zeros(rows, dtype=torch.int32, device=place)
        empty_index = torch.zeros((rows, topk), dtype=torch.int32, device=place)
        out = (index.view(rows, topk), score.view(torch.float32).view(rows, topk), count)
        kernel.launch_topk(empty_index, empty_index.float(), none, None, logits, start, end, 0, out)
        beside = torch.cat([edge for part in guarded for edge in (part[:margin], part[-margin:])])
        if bool((beside != CANARY).any()):
            raise CanaryOverwritten("memory beside an output of launch_topk was written")
        filled = torch.arange(topk, device=place) < count[:, None]
        answer: Indices = torch.where(filled, out[0], PAD_INDEX).cpu().numpy()
        return answer


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LiftedTarget:
    """The whole selection as a top-K kernel: score rows go in as FP8 inputs with exactly these scores.

    Attributes:
        variant: a mode, or ``dense``.
        device: where it runs.
        promise: NaN and Inf cannot be lifted.
    """

    variant: str
    device: Device
    promise: Promise = Promise(
        order=Order.ASCENDING_INDEX, nans=NaNs.REJECT, infinities=False, windows=True, max_topk=GPU_MAX_TOPK
    )

    @property
    def name(self) -> str:
        """``lifted.<variant>``."""
        return f"lifted.{self.variant}"

    def select(self, problem: LogitsProblem) -> Indices:
        """Lift and select; see `LogitsTarget`."""
        target = KernelTarget(name="dosa", device=self.device)
        result = target.select(lift(problem), self.variant, RunOptions(columns=8))
        offset = np.arange(len(problem.logits), dtype=np.int32)[:, None] * np.int32(problem.logits.shape[1])
        return np.where(result.topk_indices == PAD_INDEX, PAD_INDEX, result.topk_indices - offset).astype(np.int32)


CANARY = -559038737
CANARIES = 64
"""Words on each side of an output, besides one for every column."""


class CanaryOverwritten(Exception):
    """A target wrote outside its output."""


def _own_kernel(device: Device) -> LogitsTarget:
    connect(device)
    return TopKKernelTarget(device=device)


def _lifted(variant: str, device: Device) -> LogitsTarget:
    connect(device)
    return LiftedTarget(variant=variant, device=device)


OURS: dict[str, Callable[[Device], LogitsTarget]] = {
    "topk": _own_kernel,
    **{f"lifted.{variant}": functools.partial(_lifted, variant) for variant in (*MODES, *PATHS)},
}
"""Targets of this repository by name; those of others are in `dosa_verify.targets.libraries`."""


def user_function(name: str) -> FunctionTarget:
    """Return the target behind ``module:callable``; the working directory is searched first.

    A ``promise`` attribute of the callable replaces the default one. What the module prints goes to stderr.

    Args:
        name: ``module:callable``, dotted on both sides if need be.

    Raises:
        InvalidProblem: there is no such module or callable, its import fails, or its promise is no `Promise`.
    """
    module_name, _, path = name.partition(":")
    here = os.getcwd()  # noqa: PTH109 - sys.path holds text
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            found: Any = importlib.import_module(module_name)
        for part in path.split("."):
            found = getattr(found, part)
    except (Exception, SystemExit) as error:  # whatever its module raises, the target is at fault
        words = f"{name} ({type(error).__name__}: {error})"
        raise InvalidProblem("target", words, "module:callable that can be imported") from error
    if not callable(found):
        raise InvalidProblem("target", f"{name}, which is {type(found).__name__}", "a callable f(logits, topk)")
    promise = getattr(found, "promise", Promise())
    if not isinstance(promise, Promise):
        # To judge it by another promise than it meant to give would be wrong in silence.
        raise InvalidProblem(
            "target", f"{name} with a promise that is {type(promise).__name__}", "dosa_verify.targets.logits.Promise"
        )
    return FunctionTarget(name=name, function=found, promise=promise)


def make(name: str, device: Device, waived: Sequence[str] = ()) -> LogitsTarget:
    """Return the target of this name.

    Args:
        name: a key of ``OURS`` or of `dosa_verify.targets.libraries.TOPK`, or ``module:callable``.
        device: where it runs (a user function decides for itself).
        waived: items of its promise that do not count, keys of `WAIVED`.

    Raises:
        InvalidProblem: no such target, or no such item.
        BackendUnavailable: its library or the device is missing.
    """
    from dosa_verify.targets import libraries

    known = {**OURS, **libraries.TOPK}
    if ":" in name:
        target: Any = user_function(name)
    elif name in known:
        target = known[name](device)
    else:
        words = ", ".join((*TARGET_NAMES, *known, f"{libraries.SCORER}+(one of these)"))
        raise InvalidProblem("target", name, f"{words} or module:callable")
    made: LogitsTarget = dataclasses.replace(target, promise=waive(target.promise, waived))
    return made
