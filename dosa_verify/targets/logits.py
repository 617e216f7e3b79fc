"""Top-K kernels as targets: ``logits -> indices``, each with the promise by which it is judged.

Libraries are imported when a target is made, never before; one that is missing raises `BackendUnavailable`.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import importlib
import os
import sys
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from dosa_ref.spec import GPU_MAX_TOPK, PAD_INDEX, BackendUnavailable, InvalidProblem
from dosa_ref.trace import LogitsProblem
from dosa_verify.fuzz.logits import PAD, POISON_SCORE, lift
from dosa_verify.targets.base import RunOptions
from dosa_verify.targets.dosa import DENSE, MODES, Device, KernelTarget, connect

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
        infinities: whether +Inf and -Inf are ordinary scores; otherwise no case has them.
        windows: whether the target takes a start and an end per row; otherwise it gets each row's window as an array.
        short_rows: whether a row may have fewer than ``topk`` keys (-1 behind the last).
        strided: whether logits need not be contiguous along rows.
        repeatable: whether two calls give the same bits.
        min_topk, max_topk: range of ``topk``.
        max_row_length: longest row, or None.
    """

    order: Order = Order.SET
    ties: Ties = Ties.LOWEST_INDEX
    nans: NaNs = NaNs.DROP
    infinities: bool = True
    windows: bool = False
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
        from dosa_verify.targets.dosa import to_torch

        rows, topk = len(problem.logits), problem.topk
        place = self.device.value
        if rows == 0:
            return np.empty((0, topk), np.int32)
        # Between rows lies a score that would win; a NaN there would be dropped and hide a read.
        gap = 0 if problem.logits.flags.c_contiguous else PAD
        pitched = torch.full((rows, problem.logits.shape[1] + gap), float(POISON_SCORE), device=place)
        logits = pitched[:, : problem.logits.shape[1]]
        logits.copy_(to_torch(problem.logits, self.device))
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
        for part in guarded:
            if bool((part[:margin] != CANARY).any()) or bool((part[-margin:] != CANARY).any()):
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


def _torch_topk(device: Device) -> FunctionTarget:
    connect(device)
    import torch

    def call(logits: npt.NDArray[np.float32], topk: int) -> Any:
        values = torch.from_numpy(np.array(logits)).to(device.value)
        return torch.topk(values, topk, dim=-1).indices.to(torch.int32)

    promise = Promise(order=Order.DESCENDING_SCORE, ties=Ties.ANY, nans=NaNs.UNDEFINED, short_rows=False)
    return FunctionTarget(name="torch.topk", function=call, promise=promise)


def _numpy_argpartition(device: Device) -> FunctionTarget:
    if device is not Device.CPU:
        raise BackendUnavailable("numpy.argpartition runs on the CPU: --device cpu")

    def call(logits: npt.NDArray[np.float32], topk: int) -> Any:
        if topk == 0:
            return np.empty((len(logits), 0), np.int32)
        return np.argpartition(-logits, topk - 1, axis=-1)[:, :topk].astype(np.int32)

    promise = Promise(ties=Ties.ANY, nans=NaNs.UNDEFINED, short_rows=False)
    return FunctionTarget(name="numpy.argpartition", function=call, promise=promise)


def _library(module: str, device: Device, name: str) -> Any:
    """A GPU library, or why it cannot be used."""
    if device is not Device.CUDA:
        raise BackendUnavailable(f"{name} has GPU kernels only: --device cuda")
    connect(device)
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise BackendUnavailable(f"{name}: {module} is not installed") from error


def _flashinfer(device: Device) -> FunctionTarget:
    library = _library("flashinfer", device, "flashinfer")
    import torch

    def call(logits: npt.NDArray[np.float32], topk: int) -> Any:
        _, indices = library.top_k(torch.from_numpy(np.array(logits)).to(device.value), topk)
        return indices.to(torch.int32)

    promise = Promise(ties=Ties.ANY, nans=NaNs.UNDEFINED, short_rows=False, repeatable=False, min_topk=1)
    return FunctionTarget(name="flashinfer", function=call, promise=promise)


def _sgl_kernel(device: Device) -> FunctionTarget:
    library = _library("sgl_kernel", device, "sgl_kernel")
    import torch

    def call(logits: npt.NDArray[np.float32], topk: int) -> Any:
        values = torch.from_numpy(np.array(logits)).to(device.value)
        lengths = torch.full((len(logits),), logits.shape[1], dtype=torch.int32, device=device.value)
        return library.fast_topk_v2(values, lengths, topk)

    promise = Promise(ties=Ties.ANY, nans=NaNs.UNDEFINED, repeatable=False, min_topk=2048, max_topk=2048)
    return FunctionTarget(name="sgl_kernel", function=call, promise=promise)


def _own_kernel(device: Device) -> LogitsTarget:
    connect(device)
    return TopKKernelTarget(device=device)


def _lifted(variant: str, device: Device) -> LogitsTarget:
    connect(device)
    return LiftedTarget(variant=variant, device=device)


BUILT_IN: dict[str, Callable[[Device], LogitsTarget]] = {
    "topk": _own_kernel,
    "torch.topk": _torch_topk,
    "numpy.argpartition": _numpy_argpartition,
    "flashinfer": _flashinfer,
    "sgl_kernel": _sgl_kernel,
    **{f"lifted.{variant}": functools.partial(_lifted, variant) for variant in (*MODES, DENSE)},
}
"""Targets by name. The calls of FlashInfer and sgl-kernel follow their published signatures."""


def user_function(name: str) -> FunctionTarget:
    """Return the target behind ``module:callable``; the working directory is searched first.

    A ``promise`` attribute of the callable, if it is a `Promise`, replaces the default one.

    Args:
        name: ``module:callable``, dotted on both sides if need be.

    Raises:
        InvalidProblem: there is no such module or callable.
    """
    module_name, _, path = name.partition(":")
    here = os.getcwd()  # noqa: PTH109 - sys.path holds text
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        found: Any = importlib.import_module(module_name)
        for part in path.split("."):
            found = getattr(found, part)
    except (ImportError, ValueError, AttributeError) as error:
        raise InvalidProblem("target", f"{name} ({error})", "module:callable that can be imported") from error
    if not callable(found):
        raise InvalidProblem("target", f"{name}, which is {type(found).__name__}", "a callable f(logits, topk)")
    promise = getattr(found, "promise", None)
    return FunctionTarget(name=name, function=found, promise=promise if isinstance(promise, Promise) else Promise())


def make(name: str, device: Device) -> LogitsTarget:
    """Return the target of this name.

    Args:
        name: a key of ``BUILT_IN``, or ``module:callable``.
        device: where it runs (a user function decides for itself).

    Raises:
        InvalidProblem: no such target.
        BackendUnavailable: its library or the device is missing.
    """
    if ":" in name:
        return user_function(name)
    if name not in BUILT_IN:
        raise InvalidProblem("target", name, f"dosa, dense, {', '.join(BUILT_IN)} or module:callable")
    return BUILT_IN[name](device)
