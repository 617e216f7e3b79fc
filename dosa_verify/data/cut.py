"""Cut rows and keys out of a trace file.

The bundled trace was made from a trace of 64 queries and 24,576 keys (its header says of what) with::

    python -m dosa_verify.data.cut en_layer06_h64.safetensors en_layer06_h64_cut.safetensors
        --rows 48:64 --keys 8192:24576 --topk 128

Cutting changes no value: it keeps the last rows and keys, shifts each row's window, and lowers ``topk`` so that it
stays a small share of the keys.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from dosa_ref.problem import PrefillProblem
from dosa_ref.spec import DosaError
from dosa_ref.trace import Trace, load_trace, save_trace
from dosa_verify.selection import parse_rows


def cut(trace: Trace, rows: tuple[int, int], keys: tuple[int, int], topk: int) -> Trace:
    """Return a part of a trace.

    Args:
        trace: what to cut.
        rows: half-open range of its rows.
        keys: half-open range of its keys; windows are clipped to it.
        topk: keys per row of the new trace.

    Returns:
        The part; the header keeps how the trace was made, with the positions moved and ``cut`` added.

    Raises:
        InvalidProblem: a range lies outside the trace.
    """
    whole = trace.problem.rows(*rows)
    first, last = keys
    problem = PrefillProblem(
        q=whole.q,
        k=whole.k[first:last],
        k_scale=whole.k_scale[first:last],
        weights=whole.weights,
        cu_seqlen_ks=np.clip(whole.cu_seqlen_ks - first, 0, last - first).astype(np.int32),
        cu_seqlen_ke=np.clip(whole.cu_seqlen_ke - first, 0, last - first).astype(np.int32),
        topk=topk,
    )
    header = {**trace.header, "cut": f"rows {rows[0]}:{rows[1]}, keys {first}:{last}, topk {topk}"}
    for name, offset in (("first_query_position", rows[0]), ("first_key_position", first)):
        if name in header:
            header[name] = str(int(header[name]) + offset)
    return dataclasses.replace(trace, problem=problem, header=header)


def _command(
    source: Annotated[Path, typer.Argument(exists=True, dir_okay=False)],
    target: Annotated[Path, typer.Argument(dir_okay=False)],
    rows: Annotated[str, typer.Option(metavar="A:B")],
    keys: Annotated[str, typer.Option(metavar="A:B")],
    topk: Annotated[int, typer.Option(min=0)],
) -> None:
    """Cut rows and keys out of a trace file."""
    trace = load_trace(source)
    row_range = parse_rows(rows, trace.problem.seq_len)
    key_range = parse_rows(keys, trace.problem.seq_len_kv, field="--keys")
    part = cut(trace, row_range, key_range, topk)
    save_trace(target, part.problem, part.header)


if __name__ == "__main__":
    try:
        typer.run(_command)
    except DosaError as error:
        sys.exit(f"cut: {error}")
