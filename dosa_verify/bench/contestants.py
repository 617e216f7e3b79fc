"""Who is timed: our paths, and DeepGEMM's logits with the exact top-K of other libraries.

A peer keeps its logits in pieces of 2 GB, as serving engines do. Libraries that are not installed are left out and
named. Results come as pieces of rows; what a peer returns is taken as it is, unsorted, so that nothing is added to its
time.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from dosa_gpu.plan import Path as SelectPath
from dosa_ref.spec import BackendUnavailable, Mode
from dosa_verify.bench.inputs import Inputs

if TYPE_CHECKING:
    import torch

    from dosa_gpu.api import SelectionStats

LOGITS_BYTES = 2 * 2**30
"""Size of a piece of logits."""
SCORER = "deep_gemm"
SCORE_PATH = "score"
"""Name of our scorer alone, where ``dense`` is scorer and top-K."""

OnStage = Callable[[str], None]
Piece = tuple["torch.Tensor", "torch.Tensor"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Answer:
    """Result of a call.

    Attributes:
        pieces: indices and scores ``[rows, topk]`` of consecutive rows. Of a scorer: nothing.
        stats: of ours, None for a peer.
    """

    pieces: Sequence[Piece]
    stats: SelectionStats | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Contestant:
    """One way to do the work.

    Attributes:
        path: of ours, None for a peer.
        mode: savings of the path ``dosa``, else None.
        peer: name of a peer, None for ours.
        data_independent: whether the time depends on the size alone.
        call: inputs, ``topk`` and a function to call at each stage (or None) to an answer.
    """

    path: str | None
    mode: str | None
    peer: str | None
    data_independent: bool
    call: Callable[[Inputs, int, OnStage | None], Answer]

    @property
    def name(self) -> str:
        """The peer, the path, or ``dosa.<mode>``."""
        return self.peer or (f"{self.path}.{self.mode}" if self.mode else str(self.path))


def ours(path: SelectPath, mode: Mode | None = None) -> Contestant:
    """One of our paths through ``dosa_gpu.api.select_prefill``.

    Args:
        path: which.
        mode: savings of the path ``dosa``; None elsewhere.
    """

    def call(inputs: Inputs, topk: int, on_stage: OnStage | None) -> Answer:
        from dosa_gpu import api

        found = api.select_prefill(
            inputs.q, inputs.k, inputs.k_scale, inputs.weights, inputs.ks, inputs.ke, topk,
            path=path, mode=mode or Mode.BOTH, on_stage=on_stage,
        )  # fmt: skip
        return Answer(pieces=[(found.topk_indices, found.scores)], stats=found.stats)

    return Contestant(
        path=path.value,
        mode=mode.value if mode else None,
        peer=None,
        data_independent=path is SelectPath.DENSE or mode is Mode.BASE,
        call=call,
    )


def rows_per_piece(inputs: Inputs) -> int:
    """Rows whose logits fill a piece."""
    return max(1, LOGITS_BYTES // (4 * max(len(inputs.k), 1)))


def deep_gemm_logits(library: Any, inputs: Inputs, rows: slice, clean: bool) -> torch.Tensor:
    """DeepGEMM's logits of some rows; ``clean`` gives -Inf outside the windows."""
    logits = library.fp8_mqa_logits(
        inputs.q[rows], (inputs.k, inputs.k_scale), inputs.weights[rows], inputs.ks[rows], inputs.ke[rows],
        clean_logits=clean,
    )  # fmt: skip
    return logits[:, : len(inputs.k)]  # type: ignore[no-any-return]


def deep_gemm_with(library: Any, name: str, topk_function: Callable[[torch.Tensor, int], Piece]) -> Contestant:
    """DeepGEMM's logits and a top-K.

    Args:
        library: the module ``deep_gemm``.
        name: of the top-K.
        topk_function: logits ``[rows, num_keys]`` and ``topk`` to indices and scores, in any order.
    """

    def call(inputs: Inputs, topk: int, on_stage: OnStage | None) -> Answer:  # noqa: ARG001 (stages are ours)
        step = rows_per_piece(inputs)
        pieces = []
        for start in range(0, len(inputs.q), step):
            logits = deep_gemm_logits(library, inputs, slice(start, start + step), clean=True)
            pieces.append(topk_function(logits, topk))
            del logits
        return Answer(pieces=pieces)

    return Contestant(path=None, mode=None, peer=f"{SCORER}+{name}", data_independent=True, call=call)


def torch_topk(logits: torch.Tensor, topk: int) -> Piece:
    """``torch.topk``, unsorted; any choice among equal scores."""
    import torch

    scores, indices = torch.topk(logits, topk, dim=-1, sorted=False)
    return indices, scores


def peers() -> tuple[list[Contestant], dict[str, str]]:
    """Peers that can run here, and of each library its version or that it is not installed."""
    modules, versions = {}, {}
    for name, distribution in ((SCORER, "sgl-deep-gemm"), ("flashinfer", "flashinfer-python")):
        try:
            modules[name] = importlib.import_module(name)
            versions[name] = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "unknown version"
        except ImportError as error:
            missing = isinstance(error, ModuleNotFoundError) and error.name == name
            versions[name] = "not installed" if missing else f"cannot be imported ({error})"
    if SCORER not in modules:
        return [], versions
    found = [deep_gemm_with(modules[SCORER], "torch.topk", torch_topk)]
    if "flashinfer" in modules:
        flashinfer: Any = modules["flashinfer"]

        def deterministic(logits: torch.Tensor, topk: int) -> Piece:
            scores, indices = flashinfer.top_k(logits, topk, deterministic=True, tie_break=1)
            return indices, scores

        found.append(deep_gemm_with(modules[SCORER], "flashinfer", deterministic))
    return found, versions


def scorers() -> tuple[Contestant, Contestant]:
    """Our scorer and DeepGEMM's, logits only, in the same pieces.

    Raises:
        BackendUnavailable: DeepGEMM is not installed.
    """
    try:
        library: Any = importlib.import_module(SCORER)
    except ImportError as error:
        raise BackendUnavailable(f"--scope scores compares our scorer with DeepGEMM: {error}") from error

    def our_call(inputs: Inputs, topk: int, on_stage: OnStage | None) -> Answer:  # noqa: ARG001
        for start in range(0, len(inputs.q), rows_per_piece(inputs)):
            our_logits(inputs, start)
        return Answer(pieces=[])

    def their_call(inputs: Inputs, topk: int, on_stage: OnStage | None) -> Answer:  # noqa: ARG001
        step = rows_per_piece(inputs)
        for start in range(0, len(inputs.q), step):
            deep_gemm_logits(library, inputs, slice(start, start + step), clean=False)
        return Answer(pieces=[])

    return (
        Contestant(path=SCORE_PATH, mode=None, peer=None, data_independent=True, call=our_call),
        Contestant(path=None, mode=None, peer=SCORER, data_independent=True, call=their_call),
    )


def our_logits(inputs: Inputs, start: int) -> torch.Tensor:
    """Scores of a piece of rows by our scorer; without meaning outside the windows."""
    import torch

    from dosa_gpu.kernels.score import launch_score

    rows = slice(start, start + rows_per_piece(inputs))
    q = inputs.q[rows]
    out = torch.empty(len(q), len(inputs.k), dtype=torch.float32, device=q.device)
    launch_score(
        q, inputs.k, inputs.k_scale, inputs.weights[rows], inputs.ks[rows], inputs.ke[rows], inputs.k_scale, out, 0,
        len(inputs.k),
    )  # fmt: skip
    return out
