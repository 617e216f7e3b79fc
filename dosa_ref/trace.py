"""Trace and result files: safetensors with a text header.

``dosa.trace/1``: tensors ``q`` F8_E4M3 ``[seq_len, H, 128]``, ``k`` F8_E4M3 ``[seq_len_kv, 128]``, ``k_scale`` F32
``[seq_len_kv]``, ``weights`` F32 ``[seq_len, H]``, ``cu_seqlen_ks`` and ``cu_seqlen_ke`` I32 ``[seq_len]``; the
header has ``schema`` and ``topk`` and says how the trace was made.

``dosa.result/1``: tensors ``topk_indices`` I32 ``[rows, topk]`` and ``scores`` F32 ``[rows, topk]``.

``dosa.logits/1``: tensors ``logits`` F32 ``[rows, n]``, ``row_start`` and ``row_end`` I32 ``[rows]``; the header has
``schema``, ``kind`` (``logits``) and ``topk``. It is the input of a top-K kernel alone.

A file is read whole and checked before anything is believed; a file is written to a temporary neighbour and renamed,
so that no half-written file ever carries the final name.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import ml_dtypes
import numpy as np
import numpy.typing as npt
import safetensors
import safetensors.numpy

from dosa_ref.problem import PrefillProblem
from dosa_ref.spec import InvalidProblem

TRACE_SCHEMA: Final = "dosa.trace/1"
RESULT_SCHEMA: Final = "dosa.result/1"
LOGITS_SCHEMA: Final = "dosa.logits/1"

_TRACE_TENSORS: Final = {
    "q": "F8_E4M3",
    "k": "F8_E4M3",
    "k_scale": "F32",
    "weights": "F32",
    "cu_seqlen_ks": "I32",
    "cu_seqlen_ke": "I32",
}
_RESULT_TENSORS: Final = {"topk_indices": "I32", "scores": "F32"}
_LOGITS_TENSORS: Final = {"logits": "F32", "row_start": "I32", "row_end": "I32"}
_DTYPES: Final[dict[str, Any]] = {
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F32": np.dtype("<f4"),
    "I32": np.dtype("<i4"),
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trace:
    """A trace file in memory.

    Attributes:
        problem: the validated inputs.
        header: the file's text header, ``schema`` and ``topk`` included.
    """

    problem: PrefillProblem
    header: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SavedResult:
    """A result file in memory.

    Attributes:
        topk_indices: int32 ``[rows, topk]``, columns of the trace, ascending, -1 behind the last.
        scores: float32 ``[rows, topk]`` in the same order, -Inf behind the last.
        header: the file's text header.
    """

    topk_indices: npt.NDArray[np.int32]
    scores: npt.NDArray[np.float32]
    header: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LogitsProblem:
    """Rows of scores from which a top-K kernel selects.

    Attributes:
        logits: float32 ``[rows, n]``, any strides; NaN and Inf are data.
        row_start: first visible column of each row, int32 ``[rows]``.
        row_end: end (exclusive) of each row's visible columns, int32 ``[rows]``; ``end <= start`` is an empty row.
        topk: columns to select per row.

    Raises:
        InvalidProblem: naming the field.
    """

    logits: npt.NDArray[np.float32]
    row_start: npt.NDArray[np.int32]
    row_end: npt.NDArray[np.int32]
    topk: int

    def __post_init__(self) -> None:
        for field, array, dtype, rank in (
            ("logits", self.logits, np.float32, 2),
            ("row_start", self.row_start, np.int32, 1),
            ("row_end", self.row_end, np.int32, 1),
        ):
            if array.dtype != dtype or array.ndim != rank:
                raise InvalidProblem(field, f"{array.dtype}, {array.ndim} dimensions", f"{dtype.__name__}, {rank}")
        rows, columns = self.logits.shape
        if self.row_start.shape != (rows,) or (self.row_start < 0).any():
            raise InvalidProblem("row_start", self.row_start.tolist()[:8], f"{rows} columns, at least 0")
        if self.row_end.shape != (rows,) or (self.row_end > columns).any():
            raise InvalidProblem("row_end", self.row_end.tolist()[:8], f"{rows} columns, at most {columns}")
        if self.topk < 0:
            raise InvalidProblem("topk", self.topk, "at least 0")

    def window(self, row: int) -> tuple[int, int]:
        """Visible columns ``[start, end)`` of a row; an empty row gives ``(start, start)``."""
        start = int(self.row_start[row])
        return start, max(start, int(self.row_end[row]))


def load_logits(path: str | os.PathLike[str]) -> tuple[LogitsProblem, Mapping[str, str]]:
    """Read a logits file.

    Args:
        path: the file.

    Returns:
        The problem and the file's text header.

    Raises:
        InvalidProblem: naming ``file``, ``schema``, ``topk`` or a tensor.
    """
    tensors, header = _read(path, LOGITS_SCHEMA, _LOGITS_TENSORS)
    return LogitsProblem(**tensors, topk=_header_topk(header)), header


def save_logits(path: str | os.PathLike[str], problem: LogitsProblem, header: Mapping[str, str] | None = None) -> None:
    """Write a logits file atomically.

    Args:
        path: the file; replaced if it exists.
        problem: the rows, any strides.
        header: more text for the header; ``schema``, ``kind`` and ``topk`` are set here.

    Raises:
        InvalidProblem: ``file`` cannot be written.
    """
    text = {**(header or {}), "schema": LOGITS_SCHEMA, "kind": "logits", "topk": str(problem.topk)}
    _write(path, {name: getattr(problem, name) for name in _LOGITS_TENSORS}, text)


def load_trace(path: str | os.PathLike[str], topk: int | None = None) -> Trace:
    """Read a trace file.

    Args:
        path: the file.
        topk: overrides the header's ``topk``.

    Returns:
        The trace, validated.

    Raises:
        InvalidProblem: naming the field: ``file`` (unreadable, truncated, foreign), ``schema``, ``topk``, a tensor's
            name (missing, wrong dtype, wrong shape), or whatever :class:`~dosa_ref.problem.PrefillProblem` refuses.

    Special values: NaN and Inf are data and pass.
    """
    tensors, header = _read(path, TRACE_SCHEMA, _TRACE_TENSORS)
    if topk is None:
        topk = _header_topk(header)
    return Trace(problem=PrefillProblem(**tensors, topk=topk), header=header)


def save_trace(path: str | os.PathLike[str], problem: PrefillProblem, header: Mapping[str, str] | None = None) -> None:
    """Write a trace file atomically.

    Args:
        path: the file; replaced if it exists.
        problem: the inputs, any strides.
        header: more text for the header; ``schema``, ``topk`` and ``num_heads`` are set from the problem.

    Raises:
        InvalidProblem: ``file`` cannot be written.
    """
    text = {
        **(header or {}),
        "schema": TRACE_SCHEMA,
        "topk": str(problem.topk),
        "num_heads": str(problem.num_heads),
    }
    _write(path, {name: getattr(problem, name) for name in _TRACE_TENSORS}, text)


def load_result(path: str | os.PathLike[str]) -> SavedResult:
    """Read a result file.

    Args:
        path: the file.

    Returns:
        The result; the shapes agree, the contents are not judged (:func:`dosa_ref.contract.check_selection` does).

    Raises:
        InvalidProblem: naming ``file``, ``schema`` or the tensor.
    """
    tensors, header = _read(path, RESULT_SCHEMA, _RESULT_TENSORS)
    indices, scores = tensors["topk_indices"], tensors["scores"]
    if indices.ndim != 2:
        raise InvalidProblem("topk_indices", f"{indices.ndim} dimensions", "2")
    if scores.shape != indices.shape:
        raise InvalidProblem("scores", list(scores.shape), f"the shape of topk_indices, {list(indices.shape)}")
    return SavedResult(topk_indices=indices, scores=scores, header=header)


def save_result(
    path: str | os.PathLike[str],
    topk_indices: npt.NDArray[np.int32],
    scores: npt.NDArray[np.float32],
    header: Mapping[str, str] | None = None,
) -> None:
    """Write a result file atomically.

    Args:
        path: the file; replaced if it exists.
        topk_indices: int32 ``[rows, topk]``.
        scores: float32 ``[rows, topk]``.
        header: more text for the header; ``schema`` is set here.

    Raises:
        InvalidProblem: wrong dtype or shape, ``file`` cannot be written.
    """
    if topk_indices.dtype != np.int32 or topk_indices.ndim != 2:
        raise InvalidProblem("topk_indices", f"{topk_indices.dtype} {list(topk_indices.shape)}", "int32 [rows, topk]")
    if scores.dtype != np.float32 or scores.shape != topk_indices.shape:
        raise InvalidProblem("scores", f"{scores.dtype} {list(scores.shape)}", f"float32 {list(topk_indices.shape)}")
    _write(path, {"topk_indices": topk_indices, "scores": scores}, {**(header or {}), "schema": RESULT_SCHEMA})


def _header_topk(header: Mapping[str, str]) -> int:
    text = header.get("topk")
    # Nine digits hold every key count; longer ones are no number that anybody meant.
    if text is None or not text.isascii() or not text.isdigit() or len(text) > 9:
        raise InvalidProblem("topk", repr(text)[:40], "a non-negative integer in the header (or an explicit topk)")
    return int(text)


def _read(
    path: str | os.PathLike[str], schema: str, wanted: Mapping[str, str]
) -> tuple[dict[str, npt.NDArray[Any]], dict[str, str]]:
    """The wanted tensors and the header of a file."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise InvalidProblem("file", f"{path}: {error.strerror}", "a readable file") from error
    try:
        tensors = dict(safetensors.deserialize(data))  # type: ignore[no-untyped-call]
    except safetensors.SafetensorError as error:
        raise InvalidProblem("file", f"{path}: {error}", "a complete safetensors file") from error
    # The library checked the header's length and syntax, but does not hand out its text part.
    length = int.from_bytes(data[:8], "little")
    metadata: dict[str, str] | None = json.loads(data[8 : 8 + length]).get("__metadata__")
    header = metadata or {}
    if header.get("schema") != schema:
        raise InvalidProblem("schema", repr(header.get("schema")), repr(schema))
    arrays = {}
    for name, dtype in wanted.items():
        if name not in tensors:
            raise InvalidProblem(name, "no such tensor", f"{dtype} in {path}")
        found = tensors[name]
        if found["dtype"] != dtype:
            raise InvalidProblem(name, found["dtype"], dtype)
        try:
            arrays[name] = np.frombuffer(found["data"], _DTYPES[dtype]).reshape(found["shape"])
        except ValueError as error:
            raise InvalidProblem(
                name, f"shape {str(found['shape'])[:80]}: {error}", "a shape that NumPy holds"
            ) from error
    return arrays, header


def _with_sorted_header(data: bytes) -> bytes:
    """The same file with its header in a fixed order: the library writes the text part in a random one."""
    length = int.from_bytes(data[:8], "little")
    header = json.dumps(json.loads(data[8 : 8 + length]), sort_keys=True, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header + data[8 + length :]


def _write(path: str | os.PathLike[str], tensors: Mapping[str, npt.NDArray[Any]], header: Mapping[str, str]) -> None:
    """Write a file under a temporary name beside ``path`` and rename it."""
    target = Path(path)
    if target.exists() and not target.is_file():
        raise InvalidProblem("file", f"{path}, which is no regular file", "a path that may be replaced")
    contiguous = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
    try:
        write_whole(target, _with_sorted_header(safetensors.numpy.save(contiguous, dict(header))))
    except OSError as error:
        raise InvalidProblem("file", f"{path}: {error.strerror}", "a writable path") from error


def write_whole(path: Path, data: bytes) -> None:
    """Write a file that appears whole or not at all, with the permissions that any new file of this process gets.

    Args:
        path: where; a file that is there is replaced.
        data: all of it.

    Raises:
        OSError: it cannot be written; nothing is left behind.
    """
    # Not from tempfile, whose files are private to their maker whatever the umask says.
    temporary = path.with_name(f".{path.name[:200]}.{secrets.token_hex(8)}")
    try:
        with temporary.open("xb") as stream:
            stream.write(data)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
