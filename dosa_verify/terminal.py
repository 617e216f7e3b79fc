"""What people see: tables on stdout, progress on stderr and only on a terminal, JSON where it was asked for."""

from __future__ import annotations

import collections
import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from dosa_ref.spec import Outcome

if TYPE_CHECKING:
    # Each verb imports its own library; showing one must not load the others.
    from dosa_verify.audit.accumulation import AccumulationReport
    from dosa_verify.audit.fp8 import AuditReport
    from dosa_verify.audit.scorer import ScorerReport
    from dosa_verify.fuzz.report import Failure, FuzzReport
    from dosa_verify.proving import ProveReport
    from dosa_verify.selection import CheckReport, SelectReport
    from dosa_verify.verify import VerifyReport

PIPE_WIDTH = 150

OnProgress = Callable[[int, int], None]


def print_json(record: Mapping[str, object]) -> None:
    """Write one JSON document to stdout, and nothing else."""
    text = json.dumps(record, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    with _reader_may_leave():
        sys.stdout.write(text)


def complain(text: str) -> None:
    """Write one message to stderr."""
    sys.stderr.write(f"dosa: {text}\n")


@contextlib.contextmanager
def progress(title: str) -> Iterator[OnProgress | None]:
    """Show a bar on stderr while the block runs; without a terminal there, one line at its start and one at its end.

    Args:
        title: what is going on.

    Yields:
        A callback for (done, total), or None.
    """
    if not sys.stderr.isatty():
        started = time.monotonic()
        complain(f"{title} ...")
        yield None
        complain(f"{title}: done after {time.monotonic() - started:.0f} s")
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=None)

        def update(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        yield update


@contextlib.contextmanager
def _reader_may_leave() -> Iterator[None]:
    """A reader that has seen enough (``| head``) must not change the exit code, which says what was found."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        _discard_stdout()


def _discard_stdout() -> None:
    with open(os.devnull, "w", encoding="utf-8") as nowhere:  # noqa: PTH123 - a device, not a path of ours
        os.dup2(nowhere.fileno(), sys.stdout.fileno())


class _Console(Console):
    """Prints text as it is: names of targets and files are no markup."""

    def on_broken_pipe(self) -> None:
        """Go on without the reader; the library would end the process with exit code 1."""
        _discard_stdout()


def _print(item: object) -> None:
    # A pipe has no width of its own; tables stay readable at this one.
    width = None if sys.stdout.isatty() else PIPE_WIDTH
    with _reader_may_leave():
        _Console(soft_wrap=True, highlight=False, markup=False, emoji=False, width=width).print(item)


def print_prove(report: ProveReport) -> None:
    """Show lemmas, mutants and confirmations."""
    table = Table("lemma", "status", "mutants refuted", "confirmed by", "seconds")
    for lemma in report.lemmas:
        words = [type(status).__name__.lower() for status in (lemma.status, *(result for _, result in lemma.mutants))]
        table.add_row(
            lemma.lemma_id,
            words[0],
            f"{words[1:].count('refuted')} of {len(lemma.mutants)}",
            ", ".join(lemma.confirmed_by),
            f"{lemma.time_s:.2f}",
        )
    _print(table)
    for line in report.failures():
        _print(line)
    _print(f"{report.outcome}: {len(report.lemmas)} lemmas in {report.time_s:.1f} s")


def print_audit(report: AuditReport) -> None:
    """Show each part with its disagreements by class, and what the classes mean; the full list is in the JSON."""
    from dosa_verify.audit.fp8 import KNOWN_CLASSES

    table = Table("part", "inputs", "implementation", "class", "inputs that differ", "first")
    for part in report.parts:
        groups: dict[tuple[str, str], list[int]] = collections.defaultdict(list)
        first: dict[tuple[str, str], str] = {}
        for item in part.disagreements:
            key = (item.implementation, item.kind)
            groups[key].append(item.count)
            answers = f"{item.reference['decimal']} / {item.got['decimal']}"
            first.setdefault(key, f"{item.first['bits']} ({item.first['decimal']}): {answers}")
        if not groups:
            table.add_row(part.name, str(part.inputs), ", ".join(part.implementations), "all equal", "0", "")
        for (who, kind), counts in groups.items():
            table.add_row(part.name, str(part.inputs), who, kind, str(sum(counts)), first[who, kind])
    _print(table)
    seen = {item.kind for part in report.parts for item in part.disagreements}
    for kind, meaning in KNOWN_CLASSES.items():
        if kind in seen:
            _print(f"{kind}: {meaning}")
    for part in report.parts:
        for item in part.disagreements:
            if item.kind == "unexplained":
                _print(f"unexplained: {part.name}, {item.implementation}, input {item.first}")
                _print(f"  reference {item.reference}, got {item.got}")
    _print_not_checked(report.not_checked)
    _print(f"{report.outcome}: {report.unexplained} unexplained disagreements in {report.time_s:.1f} s")


def _print_not_checked(lines: tuple[str, ...]) -> None:
    for line in lines:
        _print(f"not checked: {line}")


def print_accumulation(report: AccumulationReport) -> None:
    """Show which models fit, what was counted, and the errors against the bound."""
    table = Table("instruction", "compiled to", "model", "pairs", "dots", "differences", "smallest counterexample")
    for found in report.instructions:
        compiled = ", ".join(found.mnemonics) or "-"
        for item in (*found.probe, *found.families):
            example = item.counterexample
            words = ""
            if example is not None:
                words = f"{example.terms} terms: {example.instruction['decimal']}, model {example.model['decimal']}"
            table.add_row(
                found.instruction, compiled, item.model, item.pairs, f"{item.dots:,}", f"{item.differences:,}", words
            )
    _print(table)
    for found in report.instructions:
        _print(f"{found.instruction}: {', '.join(found.fits) or 'no entry of the model table fits'}")
    for errors in report.errors:
        _print(f"largest error, {errors.family}: {errors.largest:.5f} of the proved bound ({errors.dots:,} dots)")
    search = report.search
    _print(
        f"search over {search.pairs:,} pairs: {search.tightness:.5f} of the proved bound "
        f"(constructed alone {search.constructed:.5f}), {search.norm_share:.5f} of the norms"
    )
    for line in report.failures:
        _print(f"counterexample: {line}")
    _print_not_checked(report.not_checked)
    _print(f"{report.outcome} in {report.time_s:.1f} s")


def print_scorer(report: ScorerReport) -> None:
    """Show each peer against the judge, and the orders that fit where one differs."""
    table = Table("peer", "inputs", "heads", "scores", "differences", "first")
    for found in report.comparisons:
        first = ""
        if found.first is not None:
            peer, judge = found.first.peer, found.first.judge
            first = f"row {found.first.row}, key {found.first.key}: {peer['bits']} instead of {judge['bits']}"
        table.add_row(
            found.peer, found.inputs, str(found.num_heads), f"{found.scores:,}", f"{found.differences:,}", first
        )
    _print(table)
    _print(f"order of the contract: {report.contract}")
    for found in report.comparisons:
        if found.differences and not found.orders:
            _print(f"{found.peer}, {found.num_heads} heads, {found.inputs}: no order of operations tried fits")
        for order in found.orders:
            _print(f"{found.peer}, {found.num_heads} heads, {found.inputs}: fits {found.sample} scores: {order}")
    _print_not_checked(report.not_checked)
    _print(f"{report.outcome} in {report.time_s:.1f} s")


def print_fuzz(report: FuzzReport) -> None:
    """Show what was run, and the counterexample with its reproducer."""
    _print(
        f"{report.target}: {report.cases} cases ({report.directed} directed) x {len(report.variants)} variants, "
        f"{report.rows} rows compared, {report.rows_pruned} of them pruned, {report.time_s:.1f} s, seed {report.seed}"
    )
    if report.fallback:
        _print("fallback rows: " + ", ".join(f"{reason} {count}" for reason, count in report.fallback.items()))
    if report.budget_spent:
        _print("the time budget was spent before all cases ran")
    if report.outcome == "undecided":
        _print("undecided: not one case ran")
    elif report.failure is None:
        if report.promise is None:
            _print("exact: every index and every score bit of these cases equals the reference")
        else:
            promise = ", ".join(f"{name} {value}" for name, value in report.promise.items() if value is not None)
            _print(f"no fault under what it promises: {promise}")
    else:
        print_failure(report.failure)


def print_failure(failure: Failure) -> None:
    """Show a fuzz counterexample."""
    mismatch = failure.mismatch
    where = "" if mismatch.row is None else f", row {mismatch.row}"
    _print(f"counterexample: {mismatch.fault.value} in variant {mismatch.variant}{where}")
    for name, value in mismatch.evidence.items():
        _print(f"  {name}: {value}")
    if failure.case is not None:
        _print(f"  case: {failure.case.describe()}")
    _print(f"reproduce: {failure.reproducer}")


def print_select(report: SelectReport) -> None:
    """Show the path taken, its cost and the result's hash."""
    stats = report.stats
    pruned = sum(stats["row_pruned"])
    table = Table(show_header=False)
    table.add_row("rows", f"{report.rows[0]}:{report.rows[1]} of {report.trace}, topk {report.topk}")
    table.add_row(
        "path", f"{stats['path']}, mode {stats['mode']}, device {report.device.value}, contract {stats['contract']}"
    )
    table.add_row("rows pruned", f"{pruned} of {report.rows[1] - report.rows[0]}")
    table.add_row("prune rate", f"{stats['prune_rate']:.4f}")
    table.add_row("columns", str(stats["columns"]))
    for reason, rows in stats["fallback"].items():
        table.add_row(f"fallback {reason}", f"{len(rows)} rows")
    table.add_row("workspace", f"{stats['workspace_bytes']} bytes")
    table.add_row("sha256", report.result_sha256)
    table.add_row("written", str(report.out))
    table.add_row("seconds", f"{report.time_s:.2f}")
    _print(table)


def print_check(report: CheckReport) -> None:
    """Show the verdict, with evidence if it is not exact."""
    _print(
        f"{report.outcome.value}: {report.rows_checked} rows ({report.rows[0]}:{report.rows[1]}, topk {report.topk}) "
        f"of {report.result} against the contract sm90, {report.time_s:.1f} s"
    )
    if report.outcome is not Outcome.EXACT:
        _print(f"row {report.row}")
        for name, value in report.evidence.items():
            _print(f"  {name}: {value}")
        _print(f"reproduce: {report.to_json()['reproducer']}")


def print_environment(record: Mapping[str, object]) -> None:
    """Show the environment as a table."""
    table = Table(show_header=False)
    for name, value in record.items():
        if isinstance(value, dict):
            for inner, text in value.items():
                table.add_row(f"{name}.{inner}", str(text))
        else:
            table.add_row(name, str(value))
    _print(table)


def print_verify(report: VerifyReport, file: Path) -> None:
    """Show the main job's table and where its record lies."""
    table = Table("part", "what was done", "outcome", "seconds")
    for part in report.parts:
        table.add_row(part.name, part.did, part.outcome, f"{part.time_s:.1f}")
    _print(table)
    for part in report.parts:
        for line in part.failures:
            _print(f"{part.name}: {line}")
        not_checked = (part.record or {}).get("not_checked")
        for line in not_checked if isinstance(not_checked, list) else ():
            _print(f"{part.name} did not check: {line}")
    _print(f"{report.outcome} on {report.device.value} in {report.time_s:.0f} s; full record in {file}")
