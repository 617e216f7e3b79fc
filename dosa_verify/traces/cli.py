"""``dosa trace``: make traces of learned indexers on real text, and look at them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dosa_ref.spec import BackendUnavailable, InvalidProblem
from dosa_verify.targets.dosa import Device, cuda_is_available

if TYPE_CHECKING:
    from dosa_verify.traces.pack import PackReport
    from dosa_verify.traces.stats import StatsReport

app = typer.Typer(no_args_is_help=True, help="Traces of learned indexers: pack packages, make traces, measure them.")

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout (docs/schemas.md).")]


def _numbers(text: str, option: str) -> list[int]:
    try:
        return [int(word) for word in text.split(",")]
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} is no list of numbers such as 0,6,12", param_hint=option) from error


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",")]


@app.command()
def pack(
    out: Annotated[Path, typer.Option(dir_okay=False, metavar="FILE.safetensors", help="Where the pack goes.")],
    package_dir: Annotated[
        Path, typer.Option(file_okay=False, help="Where packages lie; missing ones are downloaded to it.")
    ] = Path("packages"),
    domains: Annotated[str, typer.Option(metavar="D,...", help="Texts: en, zh, code.")] = "en,zh,code",
    layers: Annotated[int | None, typer.Option(min=1, help="Whole layers to keep (default 17 of the 30).")] = None,
    tokens: Annotated[int | None, typer.Option(min=1, help="Tokens of each text (default 1,130,496).")] = None,
    part_bytes: Annotated[int | None, typer.Option(min=1, help="Largest size of a part (default 56,000,000).")] = None,
    json_output: Json = False,
) -> None:
    """Put the model's weights and tokenised texts into one small file, or into parts.

    Needs `pip install 'dosa-verify[traces]'`, and apt-get and pip for packages that are not in the folder.

    Examples: `dosa trace pack --out pack.safetensors` · `dosa trace pack --out all.safetensors --layers 30`
    """
    from dosa_verify import terminal
    from dosa_verify.traces import pack as packing

    if not out.parent.is_dir():
        raise typer.BadParameter(f"there is no folder {out.parent}", param_hint="--out")
    package_dir.mkdir(parents=True, exist_ok=True)
    with terminal.progress("packing") as on_progress:
        report = packing.make_pack(
            out,
            package_dir=package_dir,
            domains=_words(domains),
            num_layers=layers or packing.LAYERS,
            num_tokens=tokens or packing.TOKENS,
            part_bytes=part_bytes or packing.PART_BYTES,
            on_progress=on_progress,
        )
    if json_output:
        terminal.print_json(report.to_json())
    else:
        _show_pack(report)


@app.command()
def make(
    files: Annotated[
        list[Path], typer.Argument(metavar="PACK...", exists=True, dir_okay=False, help="The pack: each of its parts.")
    ],
    domain: Annotated[str, typer.Option(metavar="D,...", help="Texts of the pack.")] = "en",
    layers: Annotated[str, typer.Option(metavar="N,...", help="Layers.")] = "0,6,12,17",
    num_heads: Annotated[str, typer.Option(metavar="H,...", help="Heads of the indexers.")] = "32,64",
    keys: Annotated[
        str, typer.Option(metavar="N,...", help="Lengths; the longest is the pass, others are its last keys.")
    ] = "131072",
    queries: Annotated[int, typer.Option(min=0, help="Queries of each trace, the last positions.")] = 64,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the indexers.")] = 0,
    steps: Annotated[int | None, typer.Option(min=0, help="Training steps (default 1500); 0: untrained.")] = None,
    half_split: Annotated[
        bool, typer.Option("--half-split", help="Rotary pairs (i, i + 32), not (2i, 2i + 1).")
    ] = False,
    hadamard: Annotated[bool, typer.Option("--hadamard", help="Rotate queries and keys before rounding.")] = False,
    train_keys: Annotated[int | None, typer.Option(min=1, help="Tokens of a training text (default 16384).")] = None,
    train_windows: Annotated[int | None, typer.Option(min=1, help="Training texts per domain (default 5).")] = None,
    check_loss: Annotated[
        bool, typer.Option("--check-loss", help="Compare the model's loss along the pass; needs all its layers.")
    ] = False,
    topk: Annotated[int, typer.Option(min=0, help="Keys per row, for the header.")] = 2048,
    out: Annotated[Path, typer.Option(exists=True, file_okay=False, help="Folder of the traces.")] = Path(),
    device: Annotated[
        Device | None, typer.Option("--device", help="Default: cuda where torch sees a GPU. cpu is for small ones.")
    ] = None,
    json_output: Json = False,
) -> None:
    """Run the model on a text, train indexers, and write FP8 traces (dosa.trace/1).

    Examples: `dosa trace make pack.safetensors --domain en --layers 0,6,12,17 --keys 1048576` ·
    `dosa trace make all-*.safetensors --domain code --layers 12 --num-heads 64 --check-loss`
    """
    from dosa_verify import terminal
    from dosa_verify.traces import make as making

    chosen = device or (Device.CUDA if cuda_is_available() else Device.CPU)
    if chosen is Device.CUDA and not cuda_is_available():
        raise BackendUnavailable("--device cuda: torch sees no GPU")
    with terminal.progress("making traces") as on_progress:
        traces = making.write(
            files,
            out,
            device=chosen.value,
            topk=topk,
            domain=_words(domain),
            layers=_numbers(layers, "--layers"),
            num_heads=_numbers(num_heads, "--num-heads"),
            num_keys=_numbers(keys, "--keys"),
            num_queries=queries,
            seed=seed,
            steps=making.STEPS if steps is None else steps,
            half_split=half_split,
            hadamard=hadamard,
            train_keys=train_keys or making.TRAIN_KEYS,
            train_windows=train_windows or making.TRAIN_WINDOWS,
            check_loss=check_loss,
            on_progress=on_progress,
        )
        written = list(traces)
    if json_output:
        terminal.print_json({"schema": "dosa.trace_make/1", "traces": [entry.to_json() for entry in written]})
    else:
        for entry in written:
            kl, flat = entry.header["indexer_final_kl"], entry.header["loss_flat"]
            typer.echo(f"{entry.sha256}  {entry.file}  KL {kl}, loss flat: {flat}")


@app.command()
def stats(
    trace: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="A trace file (dosa.trace/1).")],
    topk: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Keys per row; the trace's own if left out.")
    ] = None,
    rows: Annotated[int | None, typer.Option(min=1, help="Rows to measure, the last ones (default 16).")] = None,
    columns: Annotated[str | None, typer.Option(metavar="M,...", help="Column budgets of the bound.")] = None,
    json_output: Json = False,
) -> None:
    """Measure a trace: weights, scores, thresholds by choice of seeds, survivors and slack by column budget.

    Needs no torch. Examples: `dosa trace stats en_layer12_h64.safetensors` · `dosa trace stats t.safetensors --json`
    """
    from dosa_verify import terminal
    from dosa_verify.traces import stats as measuring

    budgets = None if columns is None else _numbers(columns, "--columns")
    if budgets is not None and min(budgets) < 1:
        raise InvalidProblem("columns", budgets, "budgets of at least 1")
    with terminal.progress("measuring") as on_progress:
        report = measuring.measure(
            trace, topk=topk, rows=rows or measuring.ROWS, columns=budgets, on_progress=on_progress
        )
    if json_output:
        terminal.print_json(report.to_json())
    else:
        _show_stats(report)


def _show_pack(report: PackReport) -> None:
    for file, size in zip(report.files, report.bytes):
        typer.echo(f"{file}  {size:,} bytes")
    texts = ", ".join(f"{domain} {count:,}" for domain, count in report.tokens.items())
    typer.echo(f"tokens: {texts}; {report.vocabulary:,} different ones; content {report.content_sha256}")
    for line in report.provenance:
        typer.echo(line)


def _show_stats(report: StatsReport) -> None:
    from rich.console import Console
    from rich.table import Table

    # A pipe has no width of its own; tables stay readable at this one.
    console = Console(soft_wrap=True, highlight=False, width=None if sys.stdout.isatty() else 120)
    console.print(
        f"{report.trace}: rows {report.rows[0]}:{report.rows[1]}, {report.num_heads} heads, {report.num_keys} keys, "
        f"topk {report.topk} ({report.topk_share:.2%} of the visible keys)"
    )
    console.print(
        f"weights negative {report.weights_negative:.1%} ({report.weights_negative_mass:.1%} of their mass), dots "
        f"negative {report.dots_negative:.1%}, scores negative {report.scores_negative:.1%}, exactly zero "
        f"{report.scores_zero:.2%}, rows with K-th score zero {report.plateau_rows}"
    )
    table = Table("tau from", "rows", "seeds", "keys >= tau", "largest", "x top K", "rows tau <= 0")
    for entry in report.tau:
        table.add_row(
            entry.strategy,
            str(entry.rows),
            f"{entry.seeds:.2%}",
            f"{entry.reached:.2%}",
            f"{entry.reached_max:.2%}",
            f"{entry.ratio:.2f}",
            str(entry.not_positive),
        )
    console.print(table)
    table = Table("columns", "pruned", "survivors p50", "p99", "max", "dense rows", "residual", "negative", "guard")
    for line in report.pruning:
        shares = (line.survivors_p50, line.survivors_p99, line.survivors_max)
        slacks = (line.residual, line.negative, line.guard)
        table.add_row(
            str(line.columns),
            f"{line.prune_rate:.2%}",
            *("-" if value is None else f"{value:.2%}" for value in shares),
            str(line.dense_rows),
            *("-" if value is None else f"{value:.3f}" for value in slacks),
        )
    console.print(table)
    console.print("survivors under each row's own K-th score; slacks in units of (tau - mean score)")
