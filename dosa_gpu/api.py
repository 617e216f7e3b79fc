"""Prefill selection on a GPU (or under the emulator): the public entry point."""

from __future__ import annotations

import dataclasses
import enum
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import numpy.typing as npt

from dosa_gpu.plan import DEFAULT_WORKSPACE_BYTES, DENSE_BELOW, Path, PrefillPlan, plan_prefill
from dosa_ref.spec import (
    GPU_MAX_TOPK,
    HEAD_DIM,
    SM90_NUM_HEADS,
    BackendUnavailable,
    Fallback,
    InvalidProblem,
    Mode,
    UnsupportedConfiguration,
)

if TYPE_CHECKING:
    import torch


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SelectionStats:
    """How a selection was made.

    Attributes:
        path: ``dosa`` or ``dense``, what was taken.
        mode: savings that were on (``base`` on the dense path).
        contract: ``sm90``, or ``unverified`` for a dense selection on a device that no proved contract describes.
        columns: dot columns per row of the bound pass, 0 if there was none.
        row_pruned: bool ``[rows]``, whether the row went through the bound pass to the end.
        prune_rate: 1 - rescored pairs / visible pairs, over the call; seeds count as rescored, dense rows as all.
        row_prune_rate: float64 ``[rows]``, the same per row (0 for a row without keys).
        survivors: int64 ``[rows]``, keys that passed the bound (or the filter); all visible keys on the dense path.
        fallback: reason to rows.
        workspace_bytes: bytes of buffers that the largest block took.
    """

    path: str
    mode: str
    contract: str
    columns: int
    row_pruned: npt.NDArray[np.bool_]
    prune_rate: float
    row_prune_rate: npt.NDArray[np.float64]
    survivors: npt.NDArray[np.int64]
    fallback: dict[str, list[int]]
    workspace_bytes: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The selected keys.

    Attributes:
        topk_indices: int32 ``[rows, topk]``, key columns, ascending, -1 behind the last.
        scores: float32 ``[rows, topk]``, the contract's score of each, same order, -Inf behind the last.
        stats: how it was made.
    """

    topk_indices: torch.Tensor
    scores: torch.Tensor
    stats: SelectionStats


NEEDS_EMULATOR = (
    "tensors on the CPU: call dosa_verify.emulator.install() before anything imports a kernel, or move them to a GPU;"
    " Triton's plain interpreter has other bits"
)


def _require(condition: bool, field: str, got: object, expected: str) -> None:
    if not condition:
        raise InvalidProblem(field, got, expected)


_Choice = TypeVar("_Choice", bound=enum.Enum)


def _choice(kind: type[_Choice], field: str, value: _Choice | str) -> _Choice:
    """The member that a text or a member names."""
    try:
        return kind(value)
    except ValueError:
        raise InvalidProblem(field, repr(value), " or ".join(member.value for member in kind)) from None


def validate(
    q: torch.Tensor,
    k: torch.Tensor,
    k_scale: torch.Tensor,
    weights: torch.Tensor,
    cu_seqlen_ks: torch.Tensor,
    cu_seqlen_ke: torch.Tensor,
    topk: int,
) -> npt.NDArray[np.int64]:
    """Check types, shapes, devices and windows of a prefill problem.

    Returns:
        ``[2, rows]``: the windows.

    Raises:
        InvalidProblem: names the field.
    """
    import torch

    fields = {
        "q": (q, torch.float8_e4m3fn, 3),
        "k": (k, torch.float8_e4m3fn, 2),
        "k_scale": (k_scale, torch.float32, 1),
        "weights": (weights, torch.float32, 2),
        "cu_seqlen_ks": (cu_seqlen_ks, torch.int32, 1),
        "cu_seqlen_ke": (cu_seqlen_ke, torch.int32, 1),
    }
    for name, (value, dtype, rank) in fields.items():
        _require(isinstance(value, torch.Tensor), name, type(value).__name__, "a torch tensor")
        _require(value.dtype == dtype, name, value.dtype, str(dtype))
        _require(value.dim() == rank, name, f"shape {list(value.shape)}", f"{rank} dimensions")
        _require(value.device == q.device, name, f"device {value.device}", f"device {q.device}, that of q")
    rows, heads, head_dim = q.shape
    keys = k.shape[0]
    _require(head_dim == HEAD_DIM, "q", f"head size {head_dim}", str(HEAD_DIM))
    _require(heads >= 1, "q", "0 heads", "at least one head")
    _require(k.shape[1] == HEAD_DIM, "k", f"head size {k.shape[1]}", str(HEAD_DIM))
    _require(k_scale.shape[0] == keys, "k_scale", f"shape {list(k_scale.shape)}", f"[{keys}]")
    _require(tuple(weights.shape) == (rows, heads), "weights", f"shape {list(weights.shape)}", f"[{rows}, {heads}]")
    for name in ("cu_seqlen_ks", "cu_seqlen_ke"):
        length = fields[name][0].shape[0]
        _require(length == rows, name, f"shape [{length}]", f"[{rows}]")
    _require(isinstance(topk, int) and not isinstance(topk, bool), "topk", type(topk).__name__, "an int")
    _require(topk >= 0, "topk", topk, "0 or more")
    windows: npt.NDArray[np.int64] = torch.stack([cu_seqlen_ks, cu_seqlen_ke]).cpu().numpy().astype(np.int64)
    if rows:
        lowest, highest = int(windows[0].min()), int(windows[1].max())
        _require(lowest >= 0, "cu_seqlen_ks", lowest, "0 or more")
        _require(highest <= keys, "cu_seqlen_ke", highest, f"at most the number of keys, {keys}")
    return windows


def _savings(path: Path, mode: Mode) -> Mode | None:
    """Savings that a path has on, None for the dense path; the automatic path counts as the pruned one."""
    return {Path.DENSE: None, Path.LITETOPK: Mode.EMIT}.get(path, mode)


def _padded_heads(heads: int) -> int:
    """Heads of the contract that so many are padded to."""
    if not 0 < heads <= max(SM90_NUM_HEADS):
        raise UnsupportedConfiguration(
            f"num_heads: got {heads}, the contract sm90 is defined for at most {max(SM90_NUM_HEADS)}"
        )
    return next(size for size in SM90_NUM_HEADS if size >= heads)


def workspace_size(
    *,
    num_rows: int,
    num_heads: int,
    num_keys: int,
    topk: int,
    path: Path | str = Path.DOSA,
    mode: Mode | str = Mode.BOTH,
    columns: int | None = None,
    workspace_bytes: int = DEFAULT_WORKSPACE_BYTES,
    device_type: str = "cuda",
) -> int:
    """Bytes of device memory that ``select_prefill`` takes at most beside its inputs and outputs.

    Args:
        num_rows, num_heads, num_keys, topk: sizes of the call.
        path, mode, columns, workspace_bytes: as for ``select_prefill``; ``auto`` takes no more than ``dosa``.
        device_type: ``cuda``, or ``cpu`` under the emulator.

    Returns:
        At most ``workspace_bytes``.

    Raises:
        InvalidProblem, UnsupportedConfiguration: as ``select_prefill``.
    """
    path, mode = _choice(Path, "path", path), _choice(Mode, "mode", mode)
    return plan_prefill(
        device_type=device_type,
        num_heads=_padded_heads(num_heads),
        num_rows=num_rows,
        num_keys=num_keys,
        topk=topk,
        mode=_savings(path, mode),
        columns=columns,
        workspace_bytes=workspace_bytes,
        survivor_capacity=None,
    ).needed_bytes


def select_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    k_scale: torch.Tensor,
    weights: torch.Tensor,
    cu_seqlen_ks: torch.Tensor,
    cu_seqlen_ke: torch.Tensor,
    topk: int,
    *,
    path: Path | str = Path.AUTO,
    mode: Mode | str = Mode.BOTH,
    columns: int | None = None,
    workspace_bytes: int = DEFAULT_WORKSPACE_BYTES,
    survivor_capacity: int | None = None,
    hint_indices: torch.Tensor | None = None,
    on_progress: Callable[[int, int], None] | None = None,
    on_stage: Callable[[str], None] | None = None,
) -> Selection:
    """Per row the ``topk`` best visible keys by (score descending, key ascending), in ascending key order.

    ``score(i) = k_scale_i * sum_h w_h * relu(q_h . k_i)`` in the arithmetic of the contract ``sm90``, for ``i`` in
    ``[ks, ke)``.

    Args:
        q: ``[rows, num_heads, 128]`` float8_e4m3fn; fewer than 64 heads are padded to 32 or 64 with zero weights.
        k: ``[num_keys, 128]`` float8_e4m3fn.
        k_scale: ``[num_keys]`` float32.
        weights: ``[rows, num_heads]`` float32, signed, query scale folded in.
        cu_seqlen_ks, cu_seqlen_ke: ``[rows]`` int32, each row's window ``[ks, ke)``; ``ke <= ks`` is an empty row.
        topk: keys per row, 0 to 2048.
        path: ``Path`` of ``dosa_gpu.plan`` or its text. ``auto`` chooses by the size of the call, the rows' lengths
            and how much the first rows were pruned; ``dosa``, ``litetopk`` and ``dense`` do what they say.
        mode: ``Mode`` of ``dosa_ref.spec`` or its text: savings of the ``dosa`` path.
        columns: dot columns per row in the bound pass, one of ``SUPPORTED_COLUMNS`` of ``dosa_gpu.plan``; None leaves
            it to a trial on a few rows of the call.
        workspace_bytes: limit on the buffers of one block of rows.
        survivor_capacity: entries of a row's survivor buffer per key chunk; a row that needs more is scored densely,
            never cut.
        hint_indices: key columns likely to win (such as the winners of the preceding query), int32 or int64 of any
            shape, for the first rows' seeds; columns outside a row's window are passed over.
        on_progress: called with (rows done, rows) after each block.
        on_stage: called with a stage's name when it starts, for timing.

    Returns:
        Selection.

    Raises:
        InvalidProblem: an argument is outside the contract; the message names it.
        UnsupportedConfiguration: ``topk`` above 2048, more than 64 heads, or compiled code other than the proved
            instructions.
        UnprovedBound: the pruned path was asked for, and a lemma is not proved for this code or this device.
        BackendUnavailable: the tensors lie on the CPU and the emulator is not installed in this process.

    Exactness: model of hardware, contract ``sm90``; every index and score bit. On a device that no contract describes
        only ``DENSE`` runs, and ``stats.contract`` says ``unverified``.
    Special values: a NaN score is never selected; -0.0 ties with +0.0; -Inf is selectable. A NaN in a key counts 0 in
        each head, a NaN weight makes its row empty. Empty windows, and the places behind the last key, give -1, -Inf.
    """
    import torch

    first, last = validate(q, k, k_scale, weights, cu_seqlen_ks, cu_seqlen_ke, topk)
    rows, heads, _ = q.shape
    if topk > GPU_MAX_TOPK:
        raise UnsupportedConfiguration(f"topk: got {topk}, the GPU path serves at most {GPU_MAX_TOPK}")
    padded = _padded_heads(heads)
    if k.shape[0] >= 2**31 - 2**17:
        raise UnsupportedConfiguration(f"k: {k.shape[0]} keys, key columns are int32")
    path, mode = _choice(Path, "path", path), _choice(Mode, "mode", mode)
    hints = None
    if hint_indices is not None:
        _require(isinstance(hint_indices, torch.Tensor), "hint_indices", type(hint_indices).__name__, "a torch tensor")
        _require(hint_indices.dtype in (torch.int32, torch.int64), "hint_indices", hint_indices.dtype, "int32 or int64")
        inside = hint_indices[(hint_indices >= 0) & (hint_indices < k.shape[0])]
        hints = inside.to(device=q.device, dtype=torch.int32).unique()
    visible = np.maximum(last - first, 0)
    taken = path
    if path is Path.AUTO:
        long_rows = int((visible >= DENSE_BELOW * topk).sum())
        taken = Path.DOSA if topk and 2 * long_rows >= rows and rows else Path.DENSE

    def plan_for(savings: Mode | None) -> PrefillPlan:
        return plan_prefill(
            device_type=q.device.type,
            num_heads=padded,
            num_rows=rows,
            num_keys=k.shape[0],
            topk=topk,
            mode=savings,
            columns=columns,
            workspace_bytes=workspace_bytes,
            survivor_capacity=survivor_capacity,
        )

    savings = _savings(taken, mode)
    plan = plan_for(savings)
    if path is Path.AUTO and taken is Path.DOSA and columns is None and not plan.may_pay(rows):
        taken, savings = Path.DENSE, None
        plan = plan_for(savings)
    if q.device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise BackendUnavailable(NEEDS_EMULATOR)
    # Imported here: the kernels bind to the compiler or to the interpreter when they are imported.
    from dosa_gpu import gate, pipeline
    from dosa_gpu.workspace import Workspace

    faults = gate.device_faults(q.device)
    if faults and q.device.type == "cpu":
        raise BackendUnavailable(f"{NEEDS_EMULATOR} ({faults[0]})")
    # Whatever skips keys by a threshold rests on the lemmas and on the contract.
    if taken is not Path.DENSE:
        gate.require_proved()
        gate.require_contract(faults)
    workspace = Workspace(q.device, workspace_bytes)
    survivors, rescored = visible, visible
    row_pruned = np.zeros(rows, np.bool_)
    fallback: dict[Fallback, list[int]] = {}
    bound_columns = 0
    if rows and topk and k.shape[0]:
        # Zero heads with zero weights add +0 to every chain: the contract's own padding.
        q8 = (
            torch.nn.functional.pad(q.view(torch.uint8), (0, 0, 0, padded - heads))
            if padded != heads
            else q.view(torch.uint8)
        )
        w = torch.nn.functional.pad(weights, (0, padded - heads)) if padded != heads else weights
        if (last < first).any() or (first > k.shape[0]).any():
            # An empty row may start anywhere, also behind the last key: no kernel must look there.
            empty = cu_seqlen_ke <= cu_seqlen_ks
            cu_seqlen_ks, cu_seqlen_ke = cu_seqlen_ks.masked_fill(empty, 0), cu_seqlen_ke.masked_fill(empty, 0)
            first, last = np.where(visible == 0, 0, first), np.where(visible == 0, 0, last)
        batch = pipeline.Rows(
            q=q8.contiguous().view(torch.float8_e4m3fn),
            weights=w.contiguous(),
            ks=cu_seqlen_ks.contiguous(),
            ke=cu_seqlen_ke.contiguous(),
            first=first,
            last=last,
        )
        keys = pipeline.key_side(k.view(torch.uint8).contiguous().view(torch.float8_e4m3fn), k_scale.contiguous())
        index, scores, report = pipeline.run(
            batch,
            keys,
            topk,
            savings,
            plan,
            hints,
            workspace,
            may_give_up=path is Path.AUTO,
            on_progress=on_progress,
            on_stage=on_stage or (lambda _: None),
        )
        bound_columns = report.columns
        survivors, rescored, row_pruned, fallback = report.survivors, report.rescored, report.pruned, report.fallback
    else:
        index = torch.full((rows, topk), -1, dtype=torch.int32, device=q.device)
        scores = torch.full((rows, topk), -torch.inf, dtype=torch.float32, device=q.device)
    pairs = int(visible.sum())
    rates = np.where(visible > 0, 1.0 - rescored / np.maximum(visible, 1), 0.0)
    return Selection(
        topk_indices=index,
        scores=scores,
        stats=SelectionStats(
            path=taken.value,
            mode=(savings or Mode.BASE).value,
            contract="unverified" if faults else "sm90",
            columns=bound_columns,
            row_pruned=row_pruned,
            prune_rate=1.0 - int(rescored.sum()) / pairs if pairs else 0.0,
            row_prune_rate=rates,
            survivors=survivors,
            fallback={reason.value: fallback[reason] for reason in Fallback if reason in fallback},
            workspace_bytes=workspace.peak_bytes,
        ),
    )
