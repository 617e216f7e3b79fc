"""Top-K kernels and scorers of other libraries as targets, each with what its documentation promises.

A library is imported when its target is made, never before; one that is missing raises `BackendUnavailable`.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from dosa_ref.problem import PrefillProblem
from dosa_ref.scorer import padded_num_heads
from dosa_ref.spec import PAD_INDEX, BackendUnavailable
from dosa_ref.trace import LogitsProblem
from dosa_verify.targets import logits as targets
from dosa_verify.targets.base import RunOptions, TargetResult
from dosa_verify.targets.dosa import Device, connect, to_torch
from dosa_verify.targets.logits import FunctionTarget, LogitsTarget, NaNs, Order, Promise, Ties, WindowsTarget

if TYPE_CHECKING:
    import torch

SCORER = "deep_gemm"
"""Name of the scorer; with ``+`` and a top-K kernel's name it is a whole selection."""


def _library(module: str, device: Device, name: str) -> Any:
    """A GPU library, or why it cannot be used."""
    if device is not Device.CUDA:
        raise BackendUnavailable(f"{name} has GPU kernels only: --device cuda")
    connect(device)
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise BackendUnavailable(f"{name}: {module} is not installed") from error


def _torch_topk(device: Device) -> LogitsTarget:
    connect(device)
    import torch

    def call(logits: npt.NDArray[np.float32], topk: int) -> Any:
        values = torch.from_numpy(np.array(logits)).to(device.value)
        return torch.topk(values, topk, dim=-1).indices.to(torch.int32)

    promise = Promise(order=Order.DESCENDING_SCORE, ties=Ties.ANY, nans=NaNs.UNDEFINED, short_rows=False)
    return FunctionTarget(name="torch.topk", function=call, promise=promise)


def _numpy_argpartition(device: Device) -> LogitsTarget:
    if device is not Device.CPU:
        raise BackendUnavailable("numpy.argpartition runs on the CPU: --device cpu")

    def call(logits: npt.NDArray[np.float32], topk: int) -> Any:
        if topk == 0:
            return np.empty((len(logits), 0), np.int32)
        return np.argpartition(-logits, topk - 1, axis=-1)[:, :topk].astype(np.int32)

    promise = Promise(ties=Ties.ANY, nans=NaNs.UNDEFINED, short_rows=False)
    return FunctionTarget(name="numpy.argpartition", function=call, promise=promise)


def _flashinfer(device: Device) -> LogitsTarget:
    """``top_k`` in deterministic mode: "prefer smaller indices" among equal values, repeatable."""
    library = _library("flashinfer", device, "flashinfer")
    import torch

    def call(logits: npt.NDArray[np.float32], topk: int) -> Any:
        values = torch.from_numpy(np.array(logits)).to(device.value)
        _, indices = library.top_k(values, topk, deterministic=True, tie_break=1)
        return indices.to(torch.int32)

    promise = Promise(nans=NaNs.UNDEFINED, short_rows=False, min_topk=1)
    return FunctionTarget(name="flashinfer", function=call, promise=promise)


def _flashinfer_ragged(device: Device) -> LogitsTarget:
    """``top_k_ragged_transform``, the form that sparse attention calls: a length per row, -1 behind the last."""
    library = _library("flashinfer", device, "flashinfer.ragged")
    import torch

    def call(logits: torch.Tensor, start: torch.Tensor, end: torch.Tensor, topk: int) -> torch.Tensor:
        lengths = (end - start).clamp(min=0)
        # The function has no start per row: each window is moved to the front.
        column = (start[:, None].long() + torch.arange(logits.shape[1], device=logits.device)).clamp(
            max=max(logits.shape[1] - 1, 0)
        )
        moved = logits.gather(1, column) if logits.numel() else logits
        found = library.top_k_ragged_transform(
            moved.contiguous(), torch.zeros_like(lengths), lengths, topk, deterministic=True, tie_break=1
        )
        return found.to(torch.int32)  # type: ignore[no-any-return]

    promise = Promise(nans=NaNs.UNDEFINED, windows=True, strided=False, min_topk=1)
    return WindowsTarget(name="flashinfer.ragged", function=call, relative=True, device=device, promise=promise)


def _sgl_kernel(device: Device) -> LogitsTarget:
    """``fast_topk_v2`` of sgl-kernel (also published as sglang-kernel)."""
    library = _library("sgl_kernel", device, "sgl_kernel")
    import torch

    def call(logits: torch.Tensor, start: torch.Tensor, end: torch.Tensor, topk: int) -> torch.Tensor:
        lengths = (end - start).clamp(min=0).to(torch.int32)
        return library.fast_topk_v2(logits, lengths, topk, row_starts=start)  # type: ignore[no-any-return]

    promise = Promise(ties=Ties.ANY, nans=NaNs.UNDEFINED, windows=True, repeatable=False, min_topk=2048, max_topk=2048)
    return WindowsTarget(name="sgl_kernel", function=call, relative=True, device=device, promise=promise)


def _vllm(device: Device) -> LogitsTarget:
    """``top_k_per_row_prefill`` of vLLM's compiled operators."""
    _library("vllm._custom_ops", device, "vllm")  # loads the operators
    import torch

    operator = getattr(torch.ops._C, "top_k_per_row_prefill", None)
    if operator is None:
        raise BackendUnavailable("vllm: this version has no operator top_k_per_row_prefill")

    def call(logits: torch.Tensor, start: torch.Tensor, end: torch.Tensor, topk: int) -> torch.Tensor:
        rows = len(logits)
        out = torch.full((rows, topk), PAD_INDEX, dtype=torch.int32, device=logits.device)
        operator(logits, start, torch.maximum(start, end), out, rows, logits.stride(0), logits.stride(1), topk)
        return out

    promise = Promise(ties=Ties.ANY, nans=NaNs.UNDEFINED, windows=True, repeatable=False, min_topk=1, max_topk=2048)
    return WindowsTarget(name="vllm", function=call, relative=True, device=device, promise=promise)


def _tilelang(device: Device) -> LogitsTarget:
    """``tl_topk`` of TileLang's example ``topk_selector.py``, which must be importable; places beyond a row stay 0."""
    _library("tilelang", device, "tilelang")
    library = _library("topk_selector", device, "tilelang")

    def call(logits: torch.Tensor, start: torch.Tensor, end: torch.Tensor, topk: int) -> torch.Tensor:
        return library.tl_topk(logits, start, end, topk)  # type: ignore[no-any-return]

    promise = Promise(
        ties=Ties.ANY,
        nans=NaNs.UNDEFINED,
        windows=True,
        short_rows=False,
        strided=False,
        repeatable=False,
        min_topk=1,
        max_topk=2048,
    )
    return WindowsTarget(name="tilelang", function=call, relative=False, device=device, promise=promise)


TOPK: dict[str, Callable[[Device], LogitsTarget]] = {
    "torch.topk": _torch_topk,
    "numpy.argpartition": _numpy_argpartition,
    "flashinfer": _flashinfer,
    "flashinfer.ragged": _flashinfer_ragged,
    "sgl_kernel": _sgl_kernel,
    "vllm": _vllm,
    "tilelang": _tilelang,
}
"""Top-K kernels of others by name."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ScorerTarget:
    """DeepGEMM's ``fp8_mqa_logits``, then a top-K kernel: how a serving engine selects.

    Attributes:
        topk: the top-K kernel.
        device: where both run.
    """

    topk: LogitsTarget
    device: Device

    @property
    def name(self) -> str:
        """``deep_gemm+<name of the top-K kernel>``."""
        return f"{SCORER}+{self.topk.name}"

    @property
    def variants(self) -> tuple[str, ...]:
        """One way."""
        return (SCORER,)

    @property
    def promise(self) -> Promise:
        """Of the top-K kernel, given the contract's scores; rows that it does not serve take all their keys."""
        return dataclasses.replace(self.topk.promise, short_rows=True, order=Order.SET)

    def select(self, problem: PrefillProblem, variant: str, options: RunOptions) -> TargetResult:  # noqa: ARG002
        """Score and select; see `dosa_verify.targets.base.Target`."""
        scores = deep_gemm_scores(problem, self.device, strided=options.strided)
        indices = np.full((problem.seq_len, problem.topk), PAD_INDEX, np.int32)
        chosen_scores = np.full((problem.seq_len, problem.topk), -np.inf, np.float32)
        for row in range(problem.seq_len):
            start, end = problem.window(row)
            if not self.topk.promise.short_rows and end - start < problem.topk:
                chosen = np.arange(end - start)
            else:
                whole = np.array([0], np.int32), np.array([end - start], np.int32)
                part = LogitsProblem(
                    logits=np.ascontiguousarray(scores[row : row + 1, start:end]),
                    row_start=whole[0],
                    row_end=whole[1],
                    topk=problem.topk,
                )
                chosen = self.topk.select(part)[0]
                chosen = chosen[chosen != PAD_INDEX]
            indices[row, : len(chosen)] = chosen + start
            inside = chosen[(chosen >= 0) & (chosen < end - start)]
            chosen_scores[row, : len(inside)] = scores[row, start + inside]
        return TargetResult(topk_indices=indices, scores=chosen_scores)


def deep_gemm_scores(problem: PrefillProblem, device: Device, *, strided: bool = False) -> npt.NDArray[np.float32]:
    """Return DeepGEMM's scores, float32 ``[rows, keys]``; what lies outside a row's window has no meaning.

    Raises:
        BackendUnavailable: the library or the GPU is missing.
    """
    library = _library("deep_gemm", device, SCORER)

    rows, keys = problem.seq_len, problem.seq_len_kv
    if not rows or not keys:
        return np.zeros((rows, keys), np.float32)
    missing = padded_num_heads(problem.q.shape[1]) - problem.q.shape[1]
    q = np.pad(problem.q.view(np.uint8), ((0, 0), (0, missing), (0, 0))).view(problem.q.dtype)
    weights = np.pad(problem.weights, ((0, 0), (0, missing)))

    def tensor(array: npt.NDArray[np.generic]) -> torch.Tensor:
        return to_torch(array, device, strided=strided).contiguous()

    logits = library.fp8_mqa_logits(
        tensor(q),
        (tensor(problem.k), tensor(problem.k_scale)),
        tensor(weights),
        tensor(problem.cu_seqlen_ks),
        tensor(np.maximum(problem.cu_seqlen_ks, problem.cu_seqlen_ke)),
        clean_logits=False,
    )
    scores: npt.NDArray[np.float32] = logits[:, :keys].cpu().numpy()
    return scores


def scorer(name: str, device: Device, waived: Sequence[str] = ()) -> ScorerTarget:
    """Return the target ``deep_gemm+NAME``.

    Args:
        name: the whole name.
        device: where it runs.
        waived: items of the top-K kernel's promise that do not count.

    Raises:
        InvalidProblem: there is no such top-K kernel.
        BackendUnavailable: a library or the device is missing.
    """
    topk = targets.make(name.removeprefix(f"{SCORER}+"), device, waived)
    _library("deep_gemm", device, SCORER)
    return ScorerTarget(topk=topk, device=device)
