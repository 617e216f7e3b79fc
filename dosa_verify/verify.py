"""The main job: everything that the promise of exactness rests on, in one run, with one record.

Four parts: the lemmas are proved and their mutants refuted; the FP8 formats are audited; the kernels are fuzzed against
the reference; and the rows of a bundled real trace are selected in all four modes and checked. A part that cannot run
here is undecided, and then the whole job is: nothing is skipped in silence.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from dosa_ref.spec import (
    BackendUnavailable,
    DosaError,
    Fallback,
    Mode,
    Outcome,
    SolverUnknown,
    UnprovedBound,
    UnsupportedConfiguration,
)
from dosa_verify import proving, selection
from dosa_verify.audit import interpreter
from dosa_verify.audit.fp8 import audit_fp8
from dosa_verify.environment import environment
from dosa_verify.fuzz import runner
from dosa_verify.targets.dosa import Device, KernelTarget, connect

SCHEMA = "dosa.report/1"
EXACT, COUNTEREXAMPLE, UNDECIDED = "exact", "counterexample", "undecided"
BUNDLED_TRACE = Path(__file__).resolve().parent / "data" / "en_layer06_h64_cut.safetensors"
PRUNED_SHARE = 0.9
"""Share of the bundled trace's rows that must take the pruned path: an exact result from the dense path alone would
prove nothing about pruning."""

Progress = Callable[[str], AbstractContextManager[Callable[[int, int], None] | None]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One part of the job.

    Attributes:
        name: ``prove``, ``audit_fp8``, ``fuzz`` or ``select_<mode>``.
        outcome: ``exact``, ``counterexample`` or ``undecided``.
        did: what was done, for the table.
        failures: one line for each thing that does not hold, with a reproducer where there is one.
        record: the same JSON that the verb prints; for ``select_<mode>`` a pair of select and check; None if it did not
            run.
        time_s: seconds.
    """

    name: str
    outcome: str
    did: str
    failures: Sequence[str]
    record: dict[str, object] | None
    time_s: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """The whole job.

    Attributes:
        device: where the kernels ran.
        parts: in order.
        environment: schema ``dosa.env/1``.
        started: ISO 8601, UTC.
        time_s: seconds.
    """

    device: Device
    parts: Sequence[Part]
    environment: dict[str, object]
    started: str
    time_s: float

    @property
    def outcome(self) -> str:
        """The worst of the parts: a counterexample, else undecided, else exact."""
        outcomes = {part.outcome for part in self.parts}
        return next((word for word in (COUNTEREXAMPLE, UNDECIDED) if word in outcomes), EXACT)

    def to_json(self) -> dict[str, object]:
        """Return the report as JSON values, schema ``dosa.report/1``."""
        return {
            "schema": SCHEMA,
            "outcome": self.outcome,
            "device": self.device.value,
            "started": self.started,
            "time_s": self.time_s,
            "environment": self.environment,
            "parts": {
                part.name: {
                    "outcome": part.outcome,
                    "did": part.did,
                    "failures": list(part.failures),
                    "time_s": part.time_s,
                    "record": part.record,
                }
                for part in self.parts
            },
        }


def run(
    device: Device,
    *,
    progress: Progress,
    examples: int | None = None,
    seed: int = 0,
    trace: Path = BUNDLED_TRACE,
) -> VerifyReport:
    """Do the main job.

    Args:
        device: where the kernels run.
        progress: opens a progress display for a title, as `dosa_verify.terminal.progress` does.
        examples: random fuzz cases besides the directed ones, or None for the default.
        seed: seed of the fuzzer.
        trace: the trace to select on.

    Returns:
        The report.
    """
    started, clock = dt.datetime.now(dt.UTC), time.monotonic()
    parts = [
        _attempt("prove", lambda: _prove(progress)),
        _attempt("audit_fp8", lambda: _audit(progress)),
        _attempt("fuzz", lambda: _fuzz(device, progress, examples, seed)),
    ]
    with tempfile.TemporaryDirectory(prefix="dosa-verify-") as folder:
        parts += [
            _attempt(f"select_{mode.value}", lambda mode=mode: _select(trace, mode, device, progress, Path(folder)))  # type: ignore[misc]
            for mode in Mode
        ]
    return VerifyReport(
        device=device,
        parts=parts,
        environment=environment(),
        started=started.isoformat(timespec="seconds"),
        time_s=round(time.monotonic() - clock, 1),
    )


def write(report: VerifyReport, file: Path) -> None:
    """Write the report as JSON; the file appears whole or not at all."""
    text = json.dumps(report.to_json(), indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    part = file.with_name(file.name + ".part")
    part.write_text(text, encoding="utf-8")
    part.replace(file)


def _attempt(name: str, work: Callable[[], Part]) -> Part:
    """Run a part; what cannot run here is undecided and says why."""
    clock = time.monotonic()
    try:
        part = work()
    except (BackendUnavailable, UnprovedBound, SolverUnknown, UnsupportedConfiguration) as error:
        part = _undecided(name, error)
    return dataclasses.replace(part, time_s=round(time.monotonic() - clock, 1))


def _undecided(name: str, error: DosaError) -> Part:
    return Part(name=name, outcome=UNDECIDED, did="did not run", failures=[str(error)], record=None, time_s=0.0)


def _prove(progress: Progress) -> Part:
    with progress("proving") as on_progress:
        report = proving.run(on_progress=on_progress)
    mutants = sum(len(lemma.mutants) for lemma in report.lemmas)
    confirmed = sum(bool(lemma.confirmed_by) for lemma in report.lemmas)
    words = {proving.PROVED: EXACT, proving.REFUTED: COUNTEREXAMPLE, proving.UNKNOWN: UNDECIDED}
    return Part(
        name="prove",
        outcome=words[report.outcome],
        did=f"{len(report.lemmas)} lemmas, {mutants} mutants, {confirmed} lemmas confirmed by a second solver",
        failures=report.failures(),
        record=report.to_json(),
        time_s=0.0,
    )


def _audit(progress: Progress) -> Part:
    with progress("auditing") as on_progress:
        report = audit_fp8(interpreter=interpreter.is_available(), on_progress=on_progress)
    inputs, known = sum(part.inputs for part in report.parts), sum(part.count() for part in report.parts)
    return Part(
        name="audit_fp8",
        outcome=report.outcome,
        did=f"{inputs} inputs in {len(report.parts)} parts, {known - report.unexplained} differences of known classes",
        failures=[f"{report.unexplained} unexplained disagreements; dosa audit fp8"] if report.unexplained else [],
        record=report.to_json(),
        time_s=0.0,
    )


def _fuzz(device: Device, progress: Progress, examples: int | None, seed: int) -> Part:
    connect(device)
    with progress("fuzzing") as on_progress:
        report = runner.run(
            KernelTarget(name="dosa", device=device),
            examples=runner.DEFAULT_EXAMPLES if examples is None else examples,
            seed=seed,
            command=f"dosa fuzz dosa --device {device.value}",
            on_progress=on_progress,
        )
    failures = []
    if report.failure is not None:
        mismatch = report.failure.mismatch
        failures = [f"{mismatch.fault.value} in {mismatch.variant}, row {mismatch.row}; {report.failure.reproducer}"]
    return Part(
        name="fuzz",
        outcome=report.outcome,
        did=f"{report.cases} cases x {len(report.variants)} variants, {report.rows} rows, {report.rows_pruned} pruned",
        failures=failures,
        record=report.to_json(),
        time_s=0.0,
    )


def _select(trace: Path, mode: Mode, device: Device, progress: Progress, folder: Path) -> Part:
    out = folder / f"{mode.value}.safetensors"
    with progress(f"selecting, mode {mode.value}") as on_progress:
        selected = selection.select_trace(
            trace, path="dosa", mode=mode, device=device, out=out, on_progress=on_progress
        )
    with progress(f"checking, mode {mode.value}") as on_progress:
        checked = selection.check_result(trace, out, on_progress=on_progress)
    reproducer = f"dosa select {trace} --path dosa --mode {mode.value} --device {device.value} --out result.safetensors"
    failures, outcome = [], EXACT
    if checked.outcome is Outcome.UNDECIDED:
        outcome = UNDECIDED
        failures.append(f"row {checked.row} is undecided: {dict(checked.evidence)}; {reproducer}")
    elif checked.outcome is not Outcome.EXACT:
        outcome = COUNTEREXAMPLE
        failures.append(
            f"{checked.outcome.value} in row {checked.row}: {dict(checked.evidence)}; "
            f"{reproducer} && dosa check {trace} result.safetensors"
        )
    rows = selected.rows[1] - selected.rows[0]
    pruned = sum(selected.stats["row_pruned"])
    unsound = selected.stats["fallback"].get(Fallback.THRESHOLD_NOT_MET.value, [])
    if unsound:
        outcome = COUNTEREXAMPLE
        failures.append(f"the bound pruned winners of the rows {unsound}, which were recomputed; {reproducer}")
    must_prune = mode in (Mode.PRUNE, Mode.BOTH)
    if must_prune and not (pruned >= PRUNED_SHARE * rows and selected.stats["prune_rate"] > 0):
        # The selection may be right, but this run is no evidence about pruning.
        outcome = outcome if outcome == COUNTEREXAMPLE else UNDECIDED
        failures.append(f"only {pruned} of {rows} rows were pruned: this run says little about pruning; {reproducer}")
    return Part(
        name=f"select_{mode.value}",
        outcome=outcome,
        did=f"{rows} rows, topk {selected.topk}, {pruned} rows pruned, prune rate {selected.stats['prune_rate']:.1%}",
        failures=failures,
        record={"select": selected.to_json(), "check": checked.to_json()},
        time_s=0.0,
    )
