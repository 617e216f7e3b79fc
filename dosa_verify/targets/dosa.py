"""The kernels of this repository as targets: the pruned path in its four modes, and every other path.

Importing this module imports no kernel and no torch. That happens in `connect`, because Triton decides when a kernel is
defined whether it will be interpreted or compiled.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from dosa_gpu.plan import DEFAULT_WORKSPACE_BYTES, Path
from dosa_ref.problem import PrefillProblem
from dosa_ref.spec import BackendUnavailable, InvalidProblem, Mode, UnsupportedConfiguration
from dosa_verify.targets.base import RunOptions, TargetResult

if TYPE_CHECKING:
    import torch

    from dosa_gpu.api import Selection

DENSE, AUTO = Path.DENSE.value, Path.AUTO.value
MODES = tuple(mode.value for mode in Mode)
"""Variants that are modes of the pruned path."""
PATHS = tuple(path.value for path in Path if path is not Path.DOSA)
"""Variants that are other paths."""
TARGET_NAMES = ("dosa", *PATHS)
SMALLEST_WORKSPACE = 2**20
PAD = 16
"""Elements between two rows of a strided tensor; they hold garbage."""


class Device(enum.Enum):
    """Where kernels run."""

    CPU = "cpu"
    """Triton's interpreter with the tensor core's arithmetic (`dosa_verify.emulator`)."""
    CUDA = "cuda"
    """The GPU."""


def cuda_is_available() -> bool:
    """Say whether torch is installed and sees a GPU."""
    try:
        import torch
    except ImportError:
        return False
    return bool(torch.cuda.is_available())


def connect(device: Device) -> None:
    """Make ``dosa_gpu`` usable on a device. Call it before anything imports a kernel.

    Args:
        device: where kernels will run in this process.

    Raises:
        BackendUnavailable: torch, Triton or the GPU is missing, or this process already runs kernels the other way.
    """
    try:
        import torch  # noqa: F401
    except ImportError as error:
        raise BackendUnavailable("torch is not installed: `make setup`, or run where torch is") from error
    if device is Device.CUDA:
        if not cuda_is_available():
            raise BackendUnavailable("--device cuda: torch sees no GPU here; --device cpu runs the emulator")
        return
    from dosa_verify import emulator

    emulator.install()


def to_torch(array: npt.NDArray[np.generic], device: Device, *, strided: bool = False) -> torch.Tensor:
    """Copy a NumPy array to a tensor of the same bits.

    Args:
        array: float8_e4m3fn, float32 or int32, any strides.
        device: where the tensor goes.
        strided: leave garbage between the rows of the last axis, so that the tensor is not contiguous.

    Returns:
        A tensor of the same shape; FP8 arrays become torch.float8_e4m3fn.
    """
    import torch

    is_fp8 = array.dtype.name == "float8_e4m3fn"
    bits = np.ascontiguousarray(array)
    tensor = torch.from_numpy((bits.view(np.uint8) if is_fp8 else bits).copy()).to(device.value)
    if strided:
        garbage = 0x7F if is_fp8 else -1 if array.dtype == np.int32 else float("nan")
        padded = torch.full(
            (*tensor.shape[:-1], tensor.shape[-1] + PAD), garbage, dtype=tensor.dtype, device=tensor.device
        )
        if tensor.dim() == 1:
            # A vector has no rows to pad: take every second element.
            padded = torch.full((2 * tensor.shape[0] + 1,), garbage, dtype=tensor.dtype, device=tensor.device)
            padded[1::2] = tensor
            tensor = padded[1::2]
        else:
            padded[..., : tensor.shape[-1]] = tensor
            tensor = padded[..., : tensor.shape[-1]]
    return tensor.view(torch.float8_e4m3fn) if is_fp8 else tensor


def select(
    problem: PrefillProblem,
    *,
    path: str,
    mode: Mode,
    device: Device,
    options: RunOptions,
    on_progress: Callable[[int, int], None] | None = None,
) -> Selection:
    """Run ``dosa_gpu.api.select_prefill`` on NumPy inputs.

    Args:
        problem: the input.
        path: value of a ``dosa_gpu.plan.Path``.
        mode: savings that are on; without meaning on the dense path.
        device: where to run; `connect` must have been called.
        options: buffer sizes and tensor layout.
        on_progress: called with (done, total).

    Raises:
        DosaError: whatever the API refuses.
    """
    from dosa_gpu import api

    def tensor(array: npt.NDArray[np.generic]) -> torch.Tensor:
        return to_torch(array, device, strided=options.strided)

    q, k, k_scale, weights = map(tensor, (problem.q, problem.k, problem.k_scale, problem.weights))
    start, end = tensor(problem.cu_seqlen_ks), tensor(problem.cu_seqlen_ke)
    hints = None if options.hints is None else to_torch(np.array(options.hints, np.int32), device)
    workspace_bytes = SMALLEST_WORKSPACE if options.tight_workspace else DEFAULT_WORKSPACE_BYTES
    while True:
        try:
            return api.select_prefill(
                q,
                k,
                k_scale,
                weights,
                start,
                end,
                problem.topk,
                path=Path(path),
                mode=mode,
                columns=options.columns,
                workspace_bytes=workspace_bytes,
                survivor_capacity=options.survivor_capacity,
                hint_indices=hints,
                on_progress=on_progress,
            )
        except UnsupportedConfiguration as error:
            # A tight workspace is the smallest power of two that is accepted.
            if "workspace_bytes" not in str(error) or workspace_bytes >= DEFAULT_WORKSPACE_BYTES:
                raise
            workspace_bytes *= 2


def arrays(selection: Selection) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
    """Return the indices and scores of a selection as NumPy arrays."""
    return selection.topk_indices.cpu().numpy(), selection.scores.cpu().numpy()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KernelTarget:
    """The kernels behind ``dosa_gpu.api``.

    Attributes:
        name: ``dosa`` (four modes of the pruned path, then every other path) or one other path alone.
        device: where they run.
    """

    name: str
    device: Device

    def __post_init__(self) -> None:
        if self.name not in TARGET_NAMES:
            raise InvalidProblem("target", self.name, f"one of {', '.join(TARGET_NAMES)}")

    @property
    def variants(self) -> tuple[str, ...]:
        """The modes and the other paths that choose for themselves, or the one path."""
        return tuple(path for path in (*MODES, *PATHS) if path != AUTO) if self.name == "dosa" else (self.name,)

    @property
    def all_variants(self) -> tuple[str, ...]:
        """These, and the automatic path, which takes one of them."""
        return (*self.variants, AUTO) if self.name == "dosa" else self.variants

    def select(self, problem: PrefillProblem, variant: str, options: RunOptions) -> TargetResult:
        """Select on the device; see `dosa_verify.targets.base.Target`."""
        selection = select(
            problem,
            path="dosa" if variant in MODES else variant,
            mode=Mode(variant) if variant in MODES else Mode.BOTH,
            device=self.device,
            options=options,
        )
        indices, scores = arrays(selection)
        return TargetResult(
            topk_indices=indices,
            scores=scores,
            row_pruned=tuple(selection.stats.row_pruned.tolist()),
            prune_rate=selection.stats.prune_rate,
            fallback=selection.stats.fallback,
        )
