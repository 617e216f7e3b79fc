"""The command group ``dosa bench``."""

from __future__ import annotations

import enum
import hashlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer
from rich.console import Console
from rich.table import Table

from dosa_gpu.plan import Path as SelectPath
from dosa_ref.spec import BackendUnavailable, DosaError, Mode
from dosa_verify.bench.cells import (
    DOMAINS,
    LAYERS,
    NUM_HEADS,
    NUM_KEYS,
    NUM_QUERIES,
    CellResult,
    format_size,
    parse_size,
)
from dosa_verify.targets.dosa import Device, connect, cuda_is_available

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dosa_verify.bench.inputs import Inputs

bench_app = typer.Typer(no_args_is_help=True, help="Measure the selection on a GPU against other libraries.")

_Item = TypeVar("_Item")


class Scope(enum.Enum):
    """What a timed call does."""

    SELECTION = "selection"
    """From FP8 queries and keys to the selected keys."""
    COMPLETE = "complete"
    """Query and key preparation at a model's real sizes besides."""
    SCORES = "scores"
    """Our scorer and DeepGEMM's alone."""


def _list(text: str, convert: Callable[[str], _Item], option: str) -> list[_Item]:
    """Words with commas between them, at least one."""
    try:
        found = [convert(word) for word in text.split(",") if word]
    except (DosaError, ValueError) as error:
        raise typer.BadParameter(str(error), param_hint=option) from error
    if not found:
        raise typer.BadParameter("at least one", param_hint=option)
    return found


def _words(items: tuple[object, ...]) -> str:
    return ",".join(str(item) for item in items)


@bench_app.command()
def prefill(
    domains: Annotated[str, typer.Option(metavar="NAMES", help="Texts of the pack.")] = _words(DOMAINS),
    keys: Annotated[str, typer.Option(metavar="SIZES", help="Lengths, such as 128K,1M.")] = ",".join(
        map(format_size, NUM_KEYS)
    ),
    queries: Annotated[str, typer.Option(metavar="SIZES", help="Queries of a chunk.")] = ",".join(
        map(format_size, NUM_QUERIES)
    ),
    num_heads: Annotated[str, typer.Option(metavar="NUMBERS", help="Heads.")] = _words(NUM_HEADS),
    layers: Annotated[str, typer.Option(metavar="NUMBERS", help="Layers of the pack; results are their mean.")] = (
        _words(LAYERS)
    ),
    paths: Annotated[
        str, typer.Option(metavar="NAMES", help="Of auto, dense, litetopk, dosa.")
    ] = "auto,litetopk,dense",
    modes: Annotated[
        str, typer.Option(metavar="NAMES", help="Of base, prune, emit, both, for the path dosa.")
    ] = "both",
    peers: Annotated[bool, typer.Option(help="Also DeepGEMM with the exact top-K of the libraries present.")] = True,
    scope: Annotated[Scope, typer.Option(help="What a timed call does.")] = Scope.SELECTION,
    pack: Annotated[
        list[Path] | None,
        typer.Option(
            exists=True, dir_okay=False, help="A pack of `dosa trace pack`, every part; traces are made of it."
        ),
    ] = None,
    trace: Annotated[
        list[Path] | None, typer.Option(exists=True, dir_okay=False, help="Trace files in place of a pack.")
    ] = None,
    synthetic: Annotated[bool, typer.Option(help="Random inputs of low rank: a smoke test, not a result.")] = False,
    topk: Annotated[int, typer.Option(min=1, help="Keys per row.")] = 2048,
    seed: Annotated[int, typer.Option(min=0, help="Of everything drawn.")] = 0,
    reference_rows: Annotated[int, typer.Option(min=0, help="Rows per cell that the reference selects too.")] = 4,
    quick: Annotated[bool, typer.Option(help="Three timed calls in place of 20 (7 of those above 100 ms).")] = False,
    calibration: Annotated[bool, typer.Option(help="Time the calibration cell first: stitched files need it.")] = False,
    out: Annotated[
        Path | None, typer.Option(dir_okay=False, metavar="FILE.jsonl", help="File of results (docs/schemas.md).")
    ] = None,
    commit: Annotated[str, typer.Option(help="Commit of these sources, where they are no git checkout.")] = "",
) -> None:
    """Check every contestant on every cell, then time it: one line per cell and contestant.

    A cell is a text, a number of keys, of queries and of heads, averaged over layers. Contestants whose time depends on
    the size alone are timed on the first text and layer. Exit code 1 if a result differs: of ours by one index or score
    bit, of a peer by more than ties.

    Examples: `dosa bench prefill --pack pack.safetensors --out bench.jsonl --calibration` ·
    `dosa bench prefill --pack pack.safetensors --queries 16K --paths dosa --modes base,prune,emit,both` ·
    `dosa bench prefill --synthetic --keys 128K --queries 4K --quick` ·
    `dosa bench prefill --trace trace.safetensors --keys 24K --queries 64`
    """
    from dosa_verify import terminal
    from dosa_verify.bench import inputs, timing
    from dosa_verify.bench import prefill as benchmark

    wanted_keys, wanted_queries = _list(keys, parse_size, "--keys"), _list(queries, parse_size, "--queries")
    wanted_heads, wanted_layers = _list(num_heads, int, "--num-heads"), _list(layers, int, "--layers")
    wanted_paths, wanted_modes = _list(paths, SelectPath, "--paths"), _list(modes, Mode, "--modes")
    if [bool(pack), bool(trace), synthetic].count(True) != 1:
        raise typer.BadParameter("one of --pack, --trace and --synthetic")
    if max(wanted_queries) > min(wanted_keys):
        raise typer.BadParameter("more queries than keys", param_hint="--queries")
    if out is not None and not out.parent.is_dir():
        raise typer.BadParameter(f"there is no folder {out.parent}", param_hint="--out")
    if not cuda_is_available():
        raise BackendUnavailable("dosa bench measures a GPU, and torch sees none here")
    device = Device.CUDA
    connect(device)
    contestants, versions = benchmark.contestants(wanted_paths, wanted_modes, peers, scope.value)
    for name, version in versions.items():
        if version.startswith(("not ", "cannot ")) and peers:
            terminal.complain(f"{name}: {version}, so there is no such peer")
    options = benchmark.Options(
        num_keys=sorted(wanted_keys),
        num_queries=sorted(wanted_queries),
        contestants=contestants,
        topk=topk,
        scope=scope.value,
        seed=seed,
        reference_rows=reference_rows,
        effort=timing.QUICK if quick else timing.Effort(),
    )

    def source() -> Iterator[Inputs]:
        if pack:
            with terminal.progress("making traces and measuring") as on_progress:
                yield from inputs.learned(
                    pack, domains=_list(domains, str, "--domains"), layers=wanted_layers,
                    num_heads=wanted_heads, num_keys=max(wanted_keys), num_queries=max(wanted_queries), seed=seed,
                    device=device, on_progress=on_progress,
                )  # fmt: skip
        elif trace:
            yield from inputs.from_files(trace, device)
        else:
            for heads in wanted_heads:
                yield inputs.synthetic(
                    num_heads=heads, num_keys=max(wanted_keys), num_queries=max(wanted_queries), seed=seed,
                    device=device,
                )  # fmt: skip

    meter = timing.CudaMeter()
    size = (benchmark.CALIBRATION_HEADS, benchmark.CALIBRATION_KEYS, benchmark.CALIBRATION_QUERIES)
    with timing.sampled_clocks() as clocks:
        calibrated = benchmark.calibrate(meter, device, options.effort, size, topk) if calibration else None
        made_of = "synthetic"
        if pack or trace:
            files = [(file.name, hashlib.sha256(file.read_bytes()).hexdigest()) for file in pack or trace or ()]
            made_of = ("pack " if pack else "trace ") + ", ".join(f"{name} (sha256 {digest})" for name, digest in files)
        first = benchmark.run_record(options, made_of, versions, calibrated, commit)
        results = benchmark.run(
            source(), options, first=first, out=out, meter=meter, clocks=clocks, on_cell=terminal.complain
        )
    _print(results)
    if benchmark.has_fault(results):
        raise typer.Exit(1)


def _print(results: Sequence[CellResult]) -> None:
    """Show one line per cell and contestant."""
    names = ("text", "layers", "queries x keys", "H", "contestant", "ms", "p10 to p90", "pruned", "workspace", "equal")
    table = Table(*names)
    for found in results:
        table.add_row(
            found.domain,
            _words(found.layers),
            f"{format_size(found.num_queries)} x {format_size(found.num_keys)}",
            str(found.num_heads),
            found.contestant,
            f"{found.ms.median:.3f}",
            f"{found.ms.p10:.3f} to {found.ms.p90:.3f}",
            f"{100 * found.prune_rate:.1f} %" if found.prune_rate else "",
            f"{max(part.workspace_bytes for part in found.by_layer) / 2**30:.2f} GiB",
            ", ".join(sorted({part.outcome for part in found.by_layer})),
        )
    # A pipe has no width of its own.
    Console(soft_wrap=True, highlight=False, width=None if sys.stdout.isatty() else 150).print(table)


@bench_app.command()
def page(
    files: Annotated[
        list[Path],
        typer.Argument(exists=True, dir_okay=False, metavar="FILE.jsonl...", help="Files of `bench prefill`."),
    ],
    out: Annotated[Path, typer.Option(dir_okay=False, help="The page; pictures go beside the first file.")],
) -> None:
    """Make the page of results, tables and pictures, from files of `dosa bench prefill`.

    Example: `dosa bench page docs/evidence/bench_*.jsonl --out docs/performance.md`
    """
    from dosa_verify.bench import page as pages

    if not out.parent.is_dir():
        raise typer.BadParameter(f"there is no folder {out.parent}", param_hint="--out")
    for written in pages.write(files, out):
        sys.stderr.write(f"{written}\n")
