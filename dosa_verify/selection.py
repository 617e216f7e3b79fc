"""Selecting on a trace file and checking a result file: what ``dosa select`` and ``dosa check`` do."""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dosa_ref.contract import check_selection
from dosa_ref.select import result_hash
from dosa_ref.spec import Contract, InvalidProblem, Mode, Outcome
from dosa_ref.trace import load_result, load_trace, save_result
from dosa_verify.environment import invocation
from dosa_verify.targets import dosa as kernels
from dosa_verify.targets.base import RunOptions
from dosa_verify.targets.dosa import Device

SELECT_SCHEMA = "dosa.select/1"
CHECK_SCHEMA = "dosa.check/1"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SelectReport:
    """What a selection did.

    Attributes:
        trace: the trace file.
        trace_sha256: hash of its bytes.
        rows: half-open range of the trace's rows.
        topk: keys per row.
        device: where it ran.
        out: the result file, or None.
        result_sha256: hash of indices and scores (`dosa_ref.select.result_hash`).
        stats: the kernels' account of the path taken (`dosa_gpu.api.SelectionStats`).
        time_s: seconds in the selection.
    """

    trace: str
    trace_sha256: str
    rows: tuple[int, int]
    topk: int
    device: Device
    out: str | None
    result_sha256: str
    stats: Mapping[str, Any]
    time_s: float

    def to_json(self) -> dict[str, object]:
        """Return the report as JSON values, schema ``dosa.select/1``."""
        return {
            "schema": SELECT_SCHEMA,
            **dataclasses.asdict(self),
            "rows": list(self.rows),
            "device": self.device.value,
            "stats": dict(self.stats),
        }


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CheckReport:
    """Verdict over a result file.

    Attributes:
        trace: the trace file.
        result: the result file.
        outcome: of the first row that is not exact, else EXACT.
        rows: half-open range of the trace's rows that the result covers.
        topk: keys per row.
        rows_checked: rows looked at before the verdict stood.
        row: the trace's row that decided the verdict, or None.
        evidence: what was found there; floats as bits and decimal.
        time_s: seconds.
    """

    trace: str
    result: str
    outcome: Outcome
    rows: tuple[int, int]
    topk: int
    rows_checked: int
    row: int | None
    evidence: Mapping[str, Any]
    time_s: float

    def to_json(self) -> dict[str, object]:
        """Return the report as JSON values, schema ``dosa.check/1``."""
        return {
            "schema": CHECK_SCHEMA,
            **dataclasses.asdict(self),
            "outcome": self.outcome.value,
            "rows": list(self.rows),
            "evidence": dict(self.evidence),
            "reproducer": None if self.outcome is Outcome.EXACT else f"{invocation()} check {self.trace} {self.result}",
        }


def parse_rows(text: str | None, seq_len: int, field: str = "--rows") -> tuple[int, int]:
    """Parse a half-open row range ``A:B``.

    Args:
        text: the range; either end may be empty; None for all rows.
        seq_len: rows that there are.
        field: named in the error.

    Returns:
        ``(A, B)`` with ``0 <= A <= B <= seq_len``.

    Raises:
        InvalidProblem: not two plain numbers, or outside the rows.
    """
    expected = f"A:B, half-open, within 0:{seq_len}"
    if text is None:
        return 0, seq_len
    start, colon, stop = text.partition(":")
    if not colon or not all(
        part == "" or (part.isascii() and part.isdigit() and len(part) < 19) for part in (start, stop)
    ):
        raise InvalidProblem(field, repr(text)[:40], expected)
    first, last = int(start or 0), int(stop or seq_len)
    if not first <= last <= seq_len:
        raise InvalidProblem(field, repr(text), expected)
    return first, last


def select_trace(
    trace: Path,
    *,
    path: str,
    mode: Mode,
    device: Device,
    rows: str | None = None,
    topk: int | None = None,
    out: Path | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> SelectReport:
    """Select the top keys of rows of a trace, and write them.

    Args:
        trace: a trace file.
        path: ``auto``, ``dosa`` or ``dense``.
        mode: savings that are on.
        device: where to run.
        rows: half-open range ``A:B``, or None for all.
        topk: keys per row, or None for the trace's own.
        out: result file, written atomically after the selection succeeded; None writes nothing.
        on_progress: called with (rows done, rows).

    Returns:
        The report.

    Raises:
        DosaError: bad input, an unsupported size, a missing backend or an unproved bound. Nothing is written then.
    """
    problem = load_trace(trace, topk).problem
    if out is not None and out.exists() and out.samefile(trace):
        raise InvalidProblem("--out", str(out), "another file than the trace")
    first, last = parse_rows(rows, problem.seq_len)
    kernels.connect(device)
    started = time.monotonic()
    selection = kernels.select(
        problem.rows(first, last),
        path=path,
        mode=mode,
        device=device,
        options=RunOptions(),
        on_progress=on_progress,
    )
    indices, scores = kernels.arrays(selection)
    elapsed = round(time.monotonic() - started, 3)
    digest = _sha256(trace)
    stats = {
        name: value.tolist() if isinstance(value, np.ndarray) else value
        for name, value in dataclasses.asdict(selection.stats).items()
    }
    if out is not None:
        header = {
            "rows": f"{first}:{last}",
            "topk": str(problem.topk),
            "trace_sha256": digest,
            "path": stats["path"],
            "mode": stats["mode"],
            "device": device.value,
        }
        save_result(out, indices, scores, header)
    return SelectReport(
        trace=str(trace),
        trace_sha256=digest,
        rows=(first, last),
        topk=problem.topk,
        device=device,
        out=None if out is None else str(out),
        result_sha256=result_hash(indices, scores),
        stats=stats,
        time_s=elapsed,
    )


def check_result(trace: Path, result: Path, *, on_progress: Callable[[int, int], None] | None = None) -> CheckReport:
    """Check a result file against the reference, row by row. Needs neither torch nor Triton.

    Args:
        trace: a trace file.
        result: a result file; its header says which rows of the trace it covers (all, if it does not say).
        on_progress: called with (rows done, rows).

    Returns:
        The report; the first row that is not exact decides.

    Raises:
        InvalidProblem: a file is damaged or foreign, or the result was made from another trace.
    """
    started = time.monotonic()
    saved = load_result(result)
    count, topk = saved.topk_indices.shape
    claimed = saved.header.get("topk", str(topk))
    if claimed != str(topk):
        raise InvalidProblem("topk_indices", f"{topk} columns", f"{claimed}, the topk of the result's header")
    problem = load_trace(trace, topk).problem
    recorded = saved.header.get("trace_sha256")
    if recorded is not None and recorded != _sha256(trace):
        raise InvalidProblem("trace_sha256", recorded[:16], f"that of {trace}: the result belongs to another trace")
    first, last = parse_rows(saved.header.get("rows"), problem.seq_len, field="rows (result header)")
    if last - first != count:
        raise InvalidProblem("topk_indices", f"{count} rows", f"{last - first}, the rows {first}:{last} of the trace")
    outcome, row, evidence, checked = Outcome.EXACT, None, {}, 0
    for offset in range(count):
        verdict = check_selection(
            problem.rows(first + offset, first + offset + 1),
            saved.topk_indices[offset : offset + 1],
            saved.scores[offset : offset + 1],
            Contract.SM90,
        )
        checked += 1
        if on_progress is not None:
            on_progress(checked, count)
        if verdict.outcome is not Outcome.EXACT:
            outcome, row, evidence = verdict.outcome, first + offset, dict(verdict.evidence)
            break
    return CheckReport(
        trace=str(trace),
        result=str(result),
        outcome=outcome,
        rows=(first, last),
        topk=topk,
        rows_checked=checked,
        row=row,
        evidence=evidence,
        time_s=round(time.monotonic() - started, 3),
    )


def _sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()
