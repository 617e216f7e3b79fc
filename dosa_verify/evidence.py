"""Evidence that two machines give the same bits: what the reference expects, what the emulator and a GPU gave.

Three commands write one JSON file each (schema ``dosa.evidence/1``)::

    python -m dosa_verify.evidence reference --traces DIR --out docs/evidence/reference.json
    python -m dosa_verify.evidence emulator  --traces DIR --out docs/evidence/emulator.json
    python -m dosa_verify.evidence h200      --traces DIR --out docs/evidence/h200.json

``reference`` needs NumPy only. The other two run the kernels, compare with the hashes of ``reference.json`` and exit 1
on any difference. ``h200`` also compares every score bit with DeepGEMM where its wheel is importable, and records the
machine code.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import importlib.util
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import numpy.typing as npt
import typer

from dosa_ref import scorer, select, trace
from dosa_ref.problem import PrefillProblem
from dosa_ref.spec import SM90_NUM_HEADS, Mode
from dosa_verify import environment
from dosa_verify.fuzz.cases import Case, Scales, Special, Values, Weights, Windows, build, case_from_json
from dosa_verify.targets.base import RunOptions
from dosa_verify.targets.dosa import DENSE, MODES, Device, KernelTarget, connect, to_torch

if TYPE_CHECKING:
    import torch

SCHEMA = "dosa.evidence/1"
TRACE_TOPKS = (2048, 256)
EMULATED_ROWS = slice(48, 52)
"""Rows of each trace that the emulator selects; a GPU selects all."""
RANDOM_ROWS, RANDOM_KEYS = 4096, 131072
"""Random problem on which score bits are compared with DeepGEMM, beside the traces."""
LONG_ROWS, LONG_KEYS = 70, 2**20 + 37
"""Random problem of a million keys; neither number is a multiple of any tile."""

Commit = Annotated[str, typer.Option(help="Commit of these sources, where the folder is not a git checkout.")]

app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__)


def suite() -> list[Case]:
    """The cases whose hashes are compared: every kind of value, weight, scale, window and special value, mixed."""
    values, weights, scales, specials = list(Values), list(Weights), list(Scales), list(Special)
    # Inverted windows came after the hashes were recorded.
    windows = [window for window in Windows if window is not Windows.INVERTED]
    return [
        Case(
            seed=1000 + number,
            num_heads=SM90_NUM_HEADS[number % 2],
            rows=3 + number % 4,
            keys=150 + 97 * (number % 5),
            topk=(5, 16, 33, 64)[number % 4],
            values=values[number % len(values)],
            weights=weights[(number // 3) % len(weights)],
            scales=scales[(number // 2) % len(scales)],
            windows=windows[(number // 5) % len(windows)],
            specials=(specials[number % len(specials)],) if number % 3 else (),
            columns=(8, 16, 32)[number % 3],
            survivor_capacity=(None, 64)[number % 2],
        )
        for number in range(48)
    ]


def problem_hash(problem: PrefillProblem) -> str:
    """sha256 over the bits of all input arrays and ``topk``."""
    digest = hashlib.sha256(str(problem.topk).encode())
    for array in (problem.q, problem.k, problem.k_scale, problem.weights, problem.cu_seqlen_ks, problem.cu_seqlen_ke):
        digest.update(np.ascontiguousarray(array).view(np.uint8).tobytes())
    return digest.hexdigest()


def expected(
    problem: PrefillProblem, topks: Sequence[int]
) -> dict[int, tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]]:
    """Selection of the reference per ``topk``: all scores of a row by the bit model, then its exact top-K."""
    indices = {topk: np.full((len(problem.q), topk), -1, np.int32) for topk in topks}
    scores = {topk: np.full((len(problem.q), topk), -np.inf, np.float32) for topk in topks}
    for row in range(len(problem.q)):
        start = int(problem.cu_seqlen_ks[row])
        logits = scorer.score_row(problem, row)
        for topk in topks:
            chosen = select.exact_topk(logits, topk)
            found = chosen[chosen >= 0]
            indices[topk][row, : len(found)] = found + start
            scores[topk][row, : len(found)] = logits[found]
    return {topk: (indices[topk], scores[topk]) for topk in topks}


def trace_files(folder: Path) -> Iterator[tuple[str, PrefillProblem]]:
    """(name, problem) of every trace in a folder."""
    for file in sorted(folder.glob("*.safetensors")):
        yield file.stem, trace.load_trace(file).problem


def _record(path: Path, kind: str, commit: str, body: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    where = environment.environment()
    header = {
        "schema": SCHEMA,
        "kind": kind,
        "environment": {**where, "git_commit": where["git_commit"] or commit or None},
    }
    path.write_text(json.dumps({**header, **body}, indent=1) + "\n", encoding="utf-8")
    typer.echo(str(path), err=True)


def _expected_record(name: str, problem: PrefillProblem, topks: Sequence[int], rows: slice) -> dict[str, Any]:
    selections = expected(problem, topks)
    return {
        "name": name,
        "input_sha256": problem_hash(problem),
        "results": {
            str(topk): {
                "all_rows": select.result_hash(indices, scores),
                "emulated_rows": select.result_hash(indices[rows], scores[rows]),
            }
            for topk, (indices, scores) in selections.items()
        },
    }


@app.command()
def reference(
    traces: Annotated[Path, typer.Option(help="Folder of trace files.")],
    out: Annotated[Path, typer.Option(help="File to write.")],
    commit: Commit = "",
) -> None:
    """Hashes that the reference expects, for the case suite and for all rows of the traces."""
    cases = []
    for case in suite():
        record = _expected_record(case.describe(), build(case), (case.topk,), slice(None))
        cases.append({"case": case.to_json(), **record})
    found = [_expected_record(name, problem, TRACE_TOPKS, EMULATED_ROWS) for name, problem in trace_files(traces)]
    _record(out, "reference", commit, {"cases": cases, "traces": found})


def run_variant(
    problem: PrefillProblem, variant: str, device: Device, columns: int | None, capacity: int | None
) -> tuple[str, dict[str, Any]]:
    """Select once; the result's hash and what the run reported."""
    target = KernelTarget(name="dosa", device=device)
    start = time.perf_counter()
    result = target.select(problem, variant, RunOptions(columns=columns, survivor_capacity=capacity))
    note = {
        "seconds": round(time.perf_counter() - start, 3),
        "rows": len(problem.q),
        "rows_pruned": sum(result.row_pruned),
        "prune_rate": round(result.prune_rate, 4),
        "fallback": {reason: len(rows) for reason, rows in result.fallback.items()},
    }
    return select.result_hash(result.topk_indices, result.scores), note


def compare(
    known: dict[str, Any], traces: Path, device: Device
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], list[str]]:
    """Run the case suite and the traces on a device against the hashes of ``reference.json``.

    Returns:
        Records of the cases, records of the traces, and one line per difference.
    """
    faults: list[str] = []
    variants = (*MODES, DENSE)

    def one(
        name: str, problem: PrefillProblem, want: str, variant: str, columns: int | None, capacity: int | None
    ) -> dict[str, Any]:
        got, note = run_variant(problem, variant, device, columns, capacity)
        if got != want:
            faults.append(f"{name} topk={problem.topk} {variant}: hash {got}, the reference says {want}")
        return {"topk": problem.topk, "variant": variant, "sha256": got, "equal": got == want, **note}

    cases = []
    for entry in known["cases"]:
        case = case_from_json(entry["case"])
        problem = build(case)
        if problem_hash(problem) != entry["input_sha256"]:
            faults.append(f"{case.describe()}: this machine builds other inputs")
            continue
        want = entry["results"][str(case.topk)]["all_rows"]
        runs = [one(case.describe(), problem, want, v, case.columns, case.survivor_capacity) for v in variants]
        cases.append({"case": entry["case"], "runs": runs})
    found = []
    by_name = {entry["name"]: entry for entry in known["traces"]}
    rows, which = (slice(None), "all_rows") if device is Device.CUDA else (EMULATED_ROWS, "emulated_rows")
    for name, problem in trace_files(traces):
        entry = by_name[name]
        if problem_hash(problem) != entry["input_sha256"]:
            faults.append(f"{name}: not the trace of reference.json")
            continue
        chosen = problem.rows(*rows.indices(len(problem.q))[:2])
        runs = []
        for topk in TRACE_TOPKS:
            part = dataclasses.replace(chosen, topk=topk)
            runs += [one(name, part, entry["results"][str(topk)][which], v, None, None) for v in variants]
        found.append({"name": name, "runs": runs})
    return cases, found, faults


def _on_the_gpu(problem: PrefillProblem) -> tuple[torch.Tensor, ...]:
    """The six input arrays, in the order of `dosa_gpu.api.select_prefill`."""
    parts = (problem.q, problem.k, problem.k_scale, problem.weights, problem.cu_seqlen_ks, problem.cu_seqlen_ke)
    return tuple(to_torch(array, Device.CUDA) for array in parts)


def deep_gemm_differences(traces: Path) -> list[dict[str, Any]] | None:
    """Score bits of the dense kernel against DeepGEMM ``fp8_mqa_logits``; None if its wheel is not importable."""
    import torch

    if importlib.util.find_spec("deep_gemm") is None:
        return None
    deep_gemm = importlib.import_module("deep_gemm")
    from dosa_gpu.kernels.score import launch_score

    def differences(
        name: str,
        q: torch.Tensor,
        k: torch.Tensor,
        scale: torch.Tensor,
        w: torch.Tensor,
        ks: torch.Tensor,
        ke: torch.Tensor,
    ) -> dict[str, Any]:
        keys = len(k)
        ours = torch.full((len(q), keys), float("nan"), device="cuda")
        launch_score(q, k, scale, w, ks, ke, scale, ours, 0, keys)
        theirs = deep_gemm.fp8_mqa_logits(q, (k, scale), w, ks, ke, clean_logits=True)[:, :keys].contiguous()
        column = torch.arange(keys, device="cuda", dtype=torch.int32)
        visible = (column >= ks[:, None]) & (column < ke[:, None])
        different = (ours.view(torch.int32) != theirs.view(torch.int32)) & visible
        return {
            "name": name,
            "num_heads": q.shape[1],
            "scores": int(visible.sum()),
            "different_bits": int(different.sum()),
        }

    found = []
    for name, problem in trace_files(traces):
        found.append(differences(name, *_on_the_gpu(problem)))
    generator = torch.Generator(device="cuda").manual_seed(0)
    for heads in SM90_NUM_HEADS:
        q = torch.randn(RANDOM_ROWS, heads, 128, device="cuda", generator=generator).to(torch.float8_e4m3fn)
        k = torch.randn(RANDOM_KEYS, 128, device="cuda", generator=generator).to(torch.float8_e4m3fn)
        scale = torch.rand(RANDOM_KEYS, device="cuda", generator=generator) + 0.5
        w = torch.randn(RANDOM_ROWS, heads, device="cuda", generator=generator)
        ks = torch.zeros(RANDOM_ROWS, dtype=torch.int32, device="cuda")
        found.append(differences(f"random normal, seed 0, H={heads}", q, k, scale, w, ks, ks + RANDOM_KEYS))
    return found


def workspace_use(traces: Path) -> list[dict[str, Any]]:
    """Peak device memory of a selection against its ``workspace_bytes`` argument, inputs and outputs apart."""
    import torch

    from dosa_gpu import api, plan

    name, problem = next(trace_files(traces))
    q, k, scale, w, ks, ke = _on_the_gpu(problem)
    found = []
    for limit in (2**24, 2**26, 2**30):
        for path in (plan.Path.DENSE, plan.Path.DOSA):
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            selection = api.select_prefill(q, k, scale, w, ks, ke, problem.topk, path=path, workspace_bytes=limit)
            peak = torch.cuda.max_memory_allocated() - before
            outputs = 8 * selection.topk_indices.numel()
            found.append(
                {
                    "trace": name,
                    "path": path.value,
                    "workspace_bytes": limit,
                    "peak_bytes": peak,
                    "output_bytes": outputs,
                    "within": peak <= limit + outputs,
                }
            )
    return found


def long_context(topk: int = 2048) -> list[dict[str, Any]]:
    """A million keys: every path and mode against torch's stable sort of the dense logits, which is no code of ours."""
    import torch

    from dosa_gpu import api, plan
    from dosa_gpu.kernels.score import launch_score

    rows, keys = LONG_ROWS, LONG_KEYS
    generator = torch.Generator(device="cuda").manual_seed(1)
    found = []
    for heads in SM90_NUM_HEADS:
        # Heads of rank 4 and keys around a common direction, so that the bound has something to prune.
        basis = torch.randn(4, 128, device="cuda", generator=generator)
        common = torch.randn(128, device="cuda", generator=generator)
        q = torch.randn(rows, heads, 4, device="cuda", generator=generator) @ basis
        k = torch.randn(keys, 4, device="cuda", generator=generator) @ basis + common
        k = k + 0.1 * torch.randn(keys, 128, device="cuda", generator=generator)
        q8, k8 = (q * 20).clamp(-448, 448).to(torch.float8_e4m3fn), (k * 20).clamp(-448, 448).to(torch.float8_e4m3fn)
        scale = torch.exp2(torch.randint(-3, 2, (keys,), device="cuda", generator=generator).float())
        w = torch.randn(rows, heads, device="cuda", generator=generator)
        ks = torch.arange(rows, dtype=torch.int32, device="cuda") * 3
        ke = keys - torch.arange(rows, dtype=torch.int32, device="cuda").flip(0)
        logits = torch.full((rows, keys), -torch.inf, device="cuda")
        launch_score(q8, k8, scale, w, ks, ke, scale, logits, 0, keys)
        # -0.0 + 0.0 is +0.0: the sort must not tell them apart.
        order = (logits + 0.0).sort(dim=1, descending=True, stable=True).indices[:, :topk].sort(1).values
        want = order.to(torch.int32)
        bits = logits.gather(1, order).view(torch.int32)
        runs = [(plan.Path.DENSE, Mode.BASE), *((plan.Path.DOSA, mode) for mode in Mode)]
        for path, mode in runs:
            got = api.select_prefill(q8, k8, scale, w, ks, ke, topk, path=path, mode=mode)
            equal = torch.equal(got.topk_indices, want) and torch.equal(got.scores.view(torch.int32), bits)
            found.append(
                {
                    "num_heads": heads,
                    "rows": rows,
                    "keys": keys,
                    "topk": topk,
                    "path": path.value,
                    "mode": mode.value,
                    "equal": equal,
                    "prune_rate": round(got.stats.prune_rate, 4),
                    "rows_pruned": int(got.stats.row_pruned.sum()),
                    "fallback": {reason: len(which) for reason, which in got.stats.fallback.items()},
                }
            )
    return found


@app.command()
def emulator(
    traces: Annotated[Path, typer.Option(help="Folder of trace files.")],
    out: Annotated[Path, typer.Option(help="File to write.")],
    known: Annotated[Path, typer.Option("--reference", help="File of the reference command.")] = Path(
        "docs/evidence/reference.json"
    ),
    commit: Commit = "",
) -> None:
    """Case suite and four rows of each trace under the emulator, against the reference's hashes."""
    connect(Device.CPU)
    cases, found, faults = compare(json.loads(known.read_text(encoding="utf-8")), traces, Device.CPU)
    _record(out, "emulator", commit, {"faults": faults, "cases": cases, "traces": found})
    raise typer.Exit(1 if faults else 0)


@app.command()
def h200(
    traces: Annotated[Path, typer.Option(help="Folder of trace files.")],
    out: Annotated[Path, typer.Option(help="File to write.")],
    known: Annotated[Path, typer.Option("--reference", help="File of the reference command.")] = Path(
        "docs/evidence/reference.json"
    ),
    commit: Commit = "",
) -> None:
    """All of it on a GPU: case suite, all rows of the traces, DeepGEMM's bits, machine code, workspace."""
    connect(Device.CUDA)
    import torch

    from dosa_gpu import ahead_of_time, gate

    faults = [f"device: {fault}" for fault in gate.device_faults(torch.device("cuda"))]
    code = list(ahead_of_time.report())
    faults += [f"{record['kernel']}: {fault}" for record in code for fault in record["faults"]]
    cases, found, different = compare(json.loads(known.read_text(encoding="utf-8")), traces, Device.CUDA)
    peers = deep_gemm_differences(traces)
    faults += different + [
        f"DeepGEMM {peer['name']}: {peer['different_bits']} different" for peer in peers or () if peer["different_bits"]
    ]
    memory = workspace_use(traces)
    million = long_context()
    faults += [f"a million keys: {run}" for run in million if not run["equal"]]
    faults += [f"workspace: {use}" for use in memory if not use["within"]]
    body = {
        "faults": faults,
        "machine_code": code,
        "deep_gemm": peers,
        "workspace": memory,
        "long_context": million,
        "cases": cases,
        "traces": found,
    }
    _record(out, "h200", commit, body)
    for fault in faults:
        typer.echo(fault, err=True)
    raise typer.Exit(1 if faults else 0)


if __name__ == "__main__":
    app()
