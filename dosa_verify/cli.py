"""The command ``dosa``.

Exit codes: 0 exact or proved; 1 a counterexample, printed with a command that reproduces it; 2 wrong usage or bad
input; 3 undecided, unproved, or a backend is not available; 70 a fault of this tool. Results go to stdout, progress and
messages to stderr.

Heavy libraries are imported by the command that needs them: ``env``, ``check`` and ``select`` work without solvers,
``check`` and ``audit`` without torch. Without installation: ``python -m dosa_verify`` in a checkout.
"""

from __future__ import annotations

import contextlib
import enum
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, NoReturn

import typer

import dosa_verify
from dosa_gpu.plan import Path as SelectPath
from dosa_ref.spec import (
    BackendUnavailable,
    DosaError,
    Mode,
    Outcome,
    SolverUnknown,
    UnprovedBound,
)
from dosa_verify.bench.cli import bench_app
from dosa_verify.environment import invocation
from dosa_verify.targets.dosa import Device, connect, cuda_is_available
from dosa_verify.traces.cli import app as trace_app


class Exit(enum.IntEnum):
    """Exit codes of every verb."""

    EXACT = 0
    COUNTEREXAMPLE = 1
    USAGE = 2
    UNDECIDED = 3
    INTERNAL = 70
    """A fault of this tool, with a traceback; says nothing about what was checked."""


app = typer.Typer(
    name="dosa",
    help=__doc__,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
audit_app = typer.Typer(no_args_is_help=True, help="Find out what hardware and libraries compute.")
app.add_typer(audit_app, name="audit")
app.add_typer(bench_app, name="bench")
app.add_typer(trace_app, name="trace")

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout (docs/schemas.md).")]
DeviceOption = Annotated[Device, typer.Option("--device", help="cpu is the emulator (triton >= 3.9).")]
TraceFile = Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="A trace file (dosa.trace/1).")]


@app.command()
def prove(
    lemmas: Annotated[list[str] | None, typer.Argument(metavar="[LEMMA]...", help="Lemma ids; all if none.")] = None,
    json_output: Json = False,
    export: Annotated[
        Path | None, typer.Option(file_okay=False, help="Also write each lemma's SMT-LIB script to this folder.")
    ] = None,
    solver: Annotated[
        str | None,
        typer.Option(
            help="z3: no confirmation. cvc5, bitwuzla: each lemma must be confirmed by it too (bitwuzla cannot read "
            "the lemmas over real numbers). Default: every solver that is installed."
        ),
    ] = None,
) -> None:
    """Prove the lemmas that pruning rests on, and refute their mutants.

    Examples: `dosa prove` · `dosa prove aggregation projection` · `dosa prove --export smt2 --json`
    """
    from dosa_verify import proving, terminal

    if export is not None:
        export.mkdir(parents=True, exist_ok=True)
    with terminal.progress("proving") as on_progress:
        report = proving.run(lemmas or (), solver=solver, on_progress=on_progress)
    if export is not None:
        proving.export(export, lemmas or ())
    if json_output:
        terminal.print_json(report.to_json())
    else:
        terminal.print_prove(report)
    _exit({proving.PROVED: Exit.EXACT, proving.REFUTED: Exit.COUNTEREXAMPLE}.get(report.outcome, Exit.UNDECIDED))


Out = Annotated[
    Path | None, typer.Option(dir_okay=False, metavar="FILE.json", help="Also record the audit with its environment.")
]
Commit = Annotated[str, typer.Option(help="Commit of these sources for the record, where they are no git checkout.")]


@audit_app.command()
def fp8(
    device: Annotated[
        Device, typer.Option("--device", help="cuda adds the GPU and all float32 patterns.")
    ] = Device.CPU,
    out: Out = None,
    commit: Commit = "",
    json_output: Json = False,
) -> None:
    """Audit E4M3FN and UE8M0: every code, every 16-bit input, every product, ties and neighbours, quantised edge rows.

    With `--device cuda` also all 4,294,967,296 float32 bit patterns. Every disagreement between libraries is listed;
    the audit fails on one that no documented difference predicts.

    Examples: `dosa audit fp8` · `dosa audit fp8 --device cuda --json > fp8.json`
    """
    from dosa_verify import terminal
    from dosa_verify.audit import interpreter
    from dosa_verify.audit.fp8 import audit_fp8

    _check_folder(out)
    if device is Device.CUDA:
        connect(device)
    with terminal.progress("auditing") as on_progress:
        report = audit_fp8(device=device.value, interpreter=interpreter.is_available(), on_progress=on_progress)
    _record_audit(report.to_json(), out, commit, json_output, lambda: terminal.print_audit(report))
    _exit(Exit.COUNTEREXAMPLE if report.unexplained else Exit.EXACT)


@audit_app.command()
def accumulation(
    device: DeviceOption = Device.CPU,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the vectors.")] = 0,
    out: Out = None,
    commit: Commit = "",
    json_output: Json = False,
) -> None:
    """Find which accumulation model the tensor cores follow, and how near errors come to the proved bound.

    Vectors of families in which models differ: wide exponents, cancellation, subnormals, NaN and others.

    Examples: `dosa audit accumulation` · `dosa audit accumulation --device cuda`
    """
    from dosa_verify import terminal

    _check_folder(out)
    connect(device)
    from dosa_verify.audit.accumulation import audit_accumulation

    with terminal.progress("auditing") as on_progress:
        report = audit_accumulation(device=device.value, seed=seed, on_progress=on_progress)
    _record_audit(report.to_json(), out, commit, json_output, lambda: terminal.print_accumulation(report))
    _exit(Exit.COUNTEREXAMPLE if report.failures else Exit.EXACT)


class ScorerPeer(enum.Enum):
    """Whose scores are audited."""

    OURS = "ours"
    DEEP_GEMM = "deep_gemm"


@audit_app.command()
def scorer(
    peer: Annotated[
        ScorerPeer, typer.Option(help="deep_gemm adds DeepGEMM (prefill and paged) to our kernels.")
    ] = ScorerPeer.OURS,
    device: Annotated[
        Device | None, typer.Option("--device", help="Default: cpu for ours, cuda for deep_gemm.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the problems.")] = 0,
    out: Out = None,
    commit: Commit = "",
    json_output: Json = False,
) -> None:
    """Compare whole scores with an arithmetic written apart, every bit; on a difference, find the order of operations.

    Examples: `dosa audit scorer --peer ours` · `dosa audit scorer --peer deep_gemm`
    """
    from dosa_verify import terminal

    _check_folder(out)
    chosen = device or (Device.CPU if peer is ScorerPeer.OURS else Device.CUDA)
    if peer is ScorerPeer.DEEP_GEMM and chosen is Device.CPU:
        raise BackendUnavailable("--peer deep_gemm has GPU kernels only: --device cuda")
    connect(chosen)
    from dosa_verify.audit import scorer as audit

    peers = audit.ours() if peer is ScorerPeer.OURS else (*audit.deep_gemm(), *audit.ours())
    with terminal.progress("auditing") as on_progress:
        report = audit.audit_scorer(device=chosen.value, peers=peers, seed=seed, on_progress=on_progress)
    _record_audit(report.to_json(), out, commit, json_output, lambda: terminal.print_scorer(report))
    _exit(Exit.EXACT if report.outcome == "exact" else Exit.COUNTEREXAMPLE)


def _check_folder(out: Path | None, option: str = "--out") -> None:
    if out is not None and not out.parent.is_dir():
        raise typer.BadParameter(f"there is no folder {out.parent}", param_hint=option)


def _record_audit(
    record: dict[str, object], out: Path | None, commit: str, json_output: bool, show: Callable[[], None]
) -> None:
    """Print an audit as JSON or as tables, and record it where asked to."""
    from dosa_verify import terminal
    from dosa_verify.audit import evidence

    if out is not None:
        evidence.write(evidence.evidence(record, evidence.this_command(), commit), out)
    if json_output:
        terminal.print_json(record)
    else:
        show()


def _seconds(text: str) -> float:
    """Seconds from ``90``, ``90s``, ``5m`` or ``1h``."""
    unit = {"s": 1.0, "m": 60.0, "h": 3600.0}.get(text[-1:], 0.0)
    try:
        seconds = float(text[:-1]) * unit if unit else float(text)
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} is no duration such as 90, 90s, 5m or 1h") from error
    if not 0 <= seconds < float("inf"):
        raise typer.BadParameter(f"{text!r} is not a finite duration of at least 0")
    return seconds


@app.command()
def fuzz(
    target: Annotated[
        str,
        typer.Argument(help="dosa, dense, topk, lifted.both, torch.topk, ... or module:callable (docs/fuzzing.md)."),
    ] = "dosa",
    examples: Annotated[int | None, typer.Option(min=0, help="Random cases, besides the directed ones.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the search.")] = 0,
    budget: Annotated[
        float | None, typer.Option(parser=_seconds, metavar="TIME", help="Start no new case after it: 90, 90s, 5m, 1h.")
    ] = None,
    device: DeviceOption = Device.CPU,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Search in so many processes, in blocks with seeds of their own.")
    ] = None,
    waive: Annotated[
        list[str] | None,
        typer.Option(metavar="ITEM", help="Go on beyond a known fault: without this item of the target's promise."),
    ] = None,
    replay: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="Run one saved case instead of searching.")
    ] = None,
    out: Annotated[Path, typer.Option(exists=True, file_okay=False, help="Folder for a failing case.")] = Path(),
    record: Annotated[
        Path | None, typer.Option(dir_okay=False, metavar="FILE.json", help="Also record the run with its environment.")
    ] = None,
    commit: Commit = "",
    json_output: Json = False,
) -> None:
    """Compare kernels with the reference on nasty problems.

    `dosa` and `dense` are whole selections, every index and every score bit. The others are top-K kernels, logits in,
    indices out, judged by what they promise; `module:callable` is yours: `f(logits, topk) -> indices`, NumPy float32
    [rows, n] in, int32 [rows, topk] out, -1 behind the last. It runs in a process of its own, so that it may crash.

    With `--jobs` random cases of our own paths come in families, which share the reference's scores: many more cases a
    second, up to a million keys on a GPU.

    Examples: `dosa fuzz` · `dosa fuzz dosa --examples 500 --seed 7` · `dosa fuzz mykernel:topk --budget 5m` ·
    `dosa fuzz dosa --device cuda --jobs 2 --examples 100000` · `dosa fuzz dosa --replay case-3f2a91c0.safetensors`
    """
    from dosa_verify import terminal
    from dosa_verify.fuzz import campaign, logits_runner, runner

    _check_folder(record, "--record")
    command = " ".join(
        [f"{invocation()} fuzz {target} --device {device.value}", *(f"--waive {item}" for item in waive or ())]
    )
    made = campaign.make(target, device, waive or ())
    with terminal.progress("fuzzing") as on_progress, contextlib.ExitStack() as stack:
        checker = None
        if ":" in target:
            isolated = logits_runner.IsolatedChecker(target, device, waived=waive or ())
            checker = stack.enter_context(contextlib.closing(isolated))
        if replay is not None:
            if isinstance(made, campaign.Whole):
                report = runner.replay(made, replay, command=command)
            else:
                report = logits_runner.replay(made, replay, checker=checker, command=command)
        elif jobs is not None:
            report = campaign.run(
                target,
                device,
                waived=waive or (),
                jobs=jobs,
                examples=campaign.DEFAULT_EXAMPLES if examples is None else examples,
                seed=seed,
                budget_s=budget,
                folder=out,
                command=command,
                on_progress=on_progress,
            )
        elif isinstance(made, campaign.Whole):
            report = runner.run(
                made,
                examples=runner.DEFAULT_EXAMPLES if examples is None else examples,
                seed=seed,
                budget_s=budget,
                folder=out,
                command=command,
                on_progress=on_progress,
            )
        else:
            report = logits_runner.run(
                made,
                checker=checker,
                examples=logits_runner.DEFAULT_EXAMPLES if examples is None else examples,
                seed=seed,
                budget_s=budget,
                folder=out,
                command=command,
                on_progress=on_progress,
            )
    _record_audit(report.to_json(), record, commit, json_output, lambda: terminal.print_fuzz(report))
    outcomes = {"exact": Exit.EXACT, "counterexample": Exit.COUNTEREXAMPLE}
    _exit(outcomes.get(report.outcome, Exit.UNDECIDED))


@app.command()
def select(
    trace: TraceFile,
    path: Annotated[SelectPath, typer.Option(help="Which way: auto decides by the rows' lengths.")] = SelectPath.AUTO,
    mode: Annotated[
        Mode | None, typer.Option(help="Savings of the pruned path (default both); not with --path dense.")
    ] = None,
    rows: Annotated[
        str | None, typer.Option(metavar="A:B", help="Rows of the trace, half-open; all if left out.")
    ] = None,
    topk: Annotated[int | None, typer.Option(metavar="N", help="Keys per row; the trace's own if left out.")] = None,
    device: DeviceOption = Device.CPU,
    out: Annotated[
        Path | None, typer.Option(dir_okay=False, metavar="FILE.safetensors", help="Result file (dosa.result/1).")
    ] = None,
    json_output: Json = False,
) -> None:
    """Select the top keys of rows of a trace.

    Writes `topk_indices` int32 [rows, topk] (columns of the trace, ascending, -1 tail) and `scores` float32 in the same
    order, to a file that appears whole or not at all.

    Examples: `dosa select trace.safetensors --topk 256 --rows 0:8 --out result.safetensors` ·
    `dosa select trace.safetensors --path dense --device cuda --json`
    """
    from dosa_verify import selection, terminal

    if mode is not None and path is SelectPath.DENSE:
        raise typer.BadParameter("the dense path has no modes", param_hint="--mode")
    _check_folder(out)
    with terminal.progress("selecting") as on_progress:
        report = selection.select_trace(
            trace,
            path=path.value,
            mode=mode or Mode.BOTH,
            device=device,
            rows=rows,
            topk=topk,
            out=out,
            on_progress=on_progress,
        )
    if json_output:
        terminal.print_json(report.to_json())
    else:
        terminal.print_select(report)


@app.command()
def check(
    trace: TraceFile,
    result: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="A result file (dosa.result/1).")],
    json_output: Json = False,
) -> None:
    """Check a result against the reference: set, order and score bits of every row. Needs no torch.

    Example: `dosa check trace.safetensors result.safetensors`
    """
    from dosa_verify import selection, terminal

    with terminal.progress("checking") as on_progress:
        report = selection.check_result(trace, result, on_progress=on_progress)
    if json_output:
        terminal.print_json(report.to_json())
    else:
        terminal.print_check(report)
    _exit({Outcome.EXACT: Exit.EXACT, Outcome.UNDECIDED: Exit.UNDECIDED}.get(report.outcome, Exit.COUNTEREXAMPLE))


@app.command()
def env(json_output: Json = False) -> None:
    """Show versions, device, commit, interpreter state and whether the gate lets the pruned path run.

    Example: `dosa env --json`
    """
    from dosa_verify import terminal
    from dosa_verify.environment import environment

    record = environment()
    if json_output:
        terminal.print_json(record)
    else:
        terminal.print_environment(record)


@app.command()
def verify(
    device: Annotated[
        Device | None, typer.Option("--device", help="Default: cuda where torch sees a GPU, else cpu.")
    ] = None,
    examples: Annotated[int | None, typer.Option(min=0, help="Random fuzz cases, besides the directed ones.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the fuzzer.")] = 0,
    report: Annotated[Path, typer.Option(dir_okay=False, help="Where the full record goes.")] = Path("report.json"),
    json_output: Json = False,
) -> None:
    """The main job: prove, audit, fuzz, and select a bundled real trace in all four modes.

    Prints one table, writes report.json (dosa.report/1), and exits 0 only if everything holds.

    Examples: `dosa verify` · `dosa verify --device cuda --examples 400`
    """
    from dosa_verify import terminal
    from dosa_verify import verify as main_job

    _check_folder(report, "--report")
    chosen = device or (Device.CUDA if cuda_is_available() else Device.CPU)
    record = main_job.run(chosen, examples=examples, seed=seed, progress=terminal.progress)
    main_job.write(record, report)
    if json_output:
        terminal.print_json(record.to_json())
    else:
        terminal.print_verify(record, report)
    _exit({"exact": Exit.EXACT, "counterexample": Exit.COUNTEREXAMPLE}.get(record.outcome, Exit.UNDECIDED))


def _show_version(value: bool) -> None:
    if value:
        typer.echo(dosa_verify.__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show it.")] = False,
) -> None:
    """Options before the verb."""


def _exit(code: Exit) -> NoReturn:
    raise typer.Exit(int(code))


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run the command line and leave with its exit code.

    Args:
        arguments: words after the program's name; None for those of this process.

    Raises:
        SystemExit: always. An error of this project or of the file system becomes one line on stderr; any other
            exception is a bug of ours, keeps its traceback and exits 70.
    """
    # Problems with NaN, Inf and overflow are our business; NumPy inside Triton's interpreter need not report each.
    for text in ("invalid value", "overflow", "divide by zero"):
        warnings.filterwarnings("ignore", message=f"{text} encountered", category=RuntimeWarning)
    try:
        app(args=arguments, prog_name="dosa")
    except DosaError as error:
        sys.stderr.write(f"dosa: {error}\n")
        undecided = isinstance(error, BackendUnavailable | UnprovedBound | SolverUnknown)
        sys.exit(int(Exit.UNDECIDED if undecided else Exit.USAGE))
    except OSError as error:
        sys.stderr.write(f"dosa: {error}\n")
        sys.exit(int(Exit.USAGE))
    except Exception:  # noqa: BLE001 (a fault of ours must not look like a counterexample)
        traceback.print_exc()
        sys.exit(int(Exit.INTERNAL))
    raise AssertionError("typer leaves by SystemExit")


if __name__ == "__main__":
    main()
