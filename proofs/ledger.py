"""The ledger: what was proved, about which text, from which source, by which solvers.

``python -m proofs.ledger`` proves all lemmas and writes ``smt2/`` and ``ledger.json``; ``--check`` proves again and
compares; ``--docs FILE`` writes the list of lemmas for readers. Schema ``dosa.ledger/1``. All paths are relative to
this package's folder, so that the ledger can be read from an installed wheel as well as from a checkout.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import io
import json
import re
import sys
import tokenize
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

from dosa_ref.spec import BackendUnavailable
from proofs import prover
from proofs.lemma import Lemma
from proofs.prover import LemmaReport, ProofResult, Proved, Refuted
from proofs.registry import all_lemmas

SCHEMA: Final = "dosa.ledger/1"
PACKAGE: Final = Path(__file__).parent
LEDGER: Final = PACKAGE / "ledger.json"
CHECKOUT: Final = PACKAGE.parent
SHARED: Final = ("encodings.py", "lemma.py", "prover.py", "terms.py")
"""Sources that no lemma owns: what all statements are made of, and what decides them."""
ABOUT_LEMMAS: Final = ("test_adequacy.py", "test_replay.py", "test_tight.py")
"""Files of ``tests/proofs`` whose tests are about single lemmas."""

Ledger: TypeAlias = dict[str, Any]


def status_word(result: ProofResult) -> str:
    """``proved``, ``refuted`` or ``unknown``: the words of every record."""
    if isinstance(result, Proved):
        return "proved"
    return "refuted" if isinstance(result, Refuted) else "unknown"


def source_path(lemma: Lemma) -> str:
    """Path of the file that holds the lemma, relative to the package."""
    return f"lemmas/{lemma.theme}.py"


def smt2_path(lemma: Lemma) -> str:
    """Path of the exported script, relative to the package."""
    return f"smt2/{lemma.id}.smt2"


def build(lemmas: Sequence[Lemma], reports: Sequence[LemmaReport]) -> Ledger:
    """The ledger of these lemmas and their reports, in the same order.

    Args:
        lemmas: Lemmas.
        reports: What the prover said about each.

    Returns:
        A value that ``json`` can write.
    """
    versions = prover.solver_versions()
    entries = {}
    for lemma, report in zip(lemmas, reports, strict=True):
        result = status_word(report.status)
        solvers = [
            {
                "name": "z3",
                "version": versions["z3"],
                "result": result,
                "time_s": round(report.status.time_s, 3),
                "time_limit_s": prover.TIMEOUT_S,
                "resources": report.status.resources if isinstance(report.status, Proved) else None,
                "resource_limit": prover.RESOURCE_LIMIT,
            }
        ]
        solvers += [
            {
                "name": confirmation.solver,
                "version": versions[confirmation.solver],
                "result": "proved",
                "time_s": round(confirmation.time_s, 3),
                "time_limit_s": prover.CONFIRM_TIMEOUT_S,
            }
            for confirmation in report.confirmations
        ]
        entries[lemma.id] = {
            "statement": lemma.statement,
            "statement_sha256": lemma.statement_sha256(),
            "source": {"path": source_path(lemma), "sha256": _file_sha256(PACKAGE / source_path(lemma))},
            "smt2": {"path": smt2_path(lemma), "sha256": _sha256(lemma.smt2().encode())},
            "constants": lemma.constant_texts(),
            "solvers": solvers,
            "result": result,
            "mutants": [
                {
                    "id": mutant_id,
                    "status": status_word(verdict),
                    "counterexample": dict(verdict.model) if isinstance(verdict, Refuted) else None,
                }
                for mutant_id, verdict in report.mutants
            ],
        }
    return {"schema": SCHEMA, "shared": shared_hashes(), "lemmas": entries}


def shared_hashes(folder: Path | None = None) -> dict[str, str]:
    """Hashes of the sources in `SHARED`, of this package or of a copy in ``folder``."""
    return {name: _file_sha256((folder or PACKAGE) / name) for name in SHARED}


def _shared_faults(recorded: dict[str, str], fresh: dict[str, str]) -> list[str]:
    return [f"{name} differs" for name in sorted({*recorded, *fresh}) if recorded.get(name) != fresh.get(name)]


def write(ledger: Ledger, path: Path = LEDGER) -> None:
    """Write the ledger as JSON."""
    path.write_text(json.dumps(ledger, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def read(path: Path = LEDGER) -> Ledger:
    """Read the ledger of this package, or another one."""
    ledger: Ledger = json.loads(path.read_text(encoding="utf-8"))
    return ledger


def stale(ledger: Ledger, lemmas: Iterable[Lemma] | None = None, folder: Path = PACKAGE) -> list[str]:
    """Where a ledger and the lemmas as they stand now disagree. Needs no solver.

    Args:
        ledger: What `read` returned.
        lemmas: The lemmas to compare with; ``None`` means all that are registered.
        folder: Folder that the paths in the ledger are relative to.

    Returns:
        One line per disagreement; empty if the ledger is up to date.
    """
    chosen = list(all_lemmas() if lemmas is None else lemmas)
    entries = ledger["lemmas"]
    faults = [] if ledger["schema"] == SCHEMA else [f"schema {ledger['schema']}, expected {SCHEMA}"]
    faults += _shared_faults(ledger.get("shared", {}), shared_hashes(folder))
    faults += [f"{name}: in the ledger, but not registered" for name in entries if name not in {x.id for x in chosen}]
    for lemma in chosen:
        entry = entries.get(lemma.id)
        if entry is None:
            faults.append(f"{lemma.id}: not in the ledger")
            continue
        expected = {
            "statement": lemma.statement,
            "statement_sha256": lemma.statement_sha256(),
            "source": {"path": source_path(lemma), "sha256": _file_sha256(folder / source_path(lemma))},
            "smt2": {"path": smt2_path(lemma), "sha256": _file_sha256(folder / smt2_path(lemma))},
            "constants": lemma.constant_texts(),
            "result": "proved",
        }
        faults += [f"{lemma.id}: {key} differs" for key, value in expected.items() if entry[key] != value]
        if _file_sha256(folder / smt2_path(lemma)) != _sha256(lemma.smt2().encode()):
            faults.append(f"{lemma.id}: {smt2_path(lemma)} is not what the lemma exports")
        if [(m["id"], m["status"]) for m in entry["mutants"]] != [(m.id, "refuted") for m in lemma.mutants]:
            faults.append(f"{lemma.id}: mutants differ")
    return faults


def differences(recorded: Ledger, fresh: Ledger) -> list[str]:
    """Where two ledgers differ in more than times.

    Solvers that only one of them knows are left out, and counterexamples are compared only between equal versions of
    z3: another version may find another one.

    Args:
        recorded: The ledger in the package.
        fresh: A ledger made now.

    Returns:
        One line per shared source and per lemma that differs.
    """
    faults = _shared_faults(recorded.get("shared", {}), fresh.get("shared", {}))
    for name in sorted({*recorded["lemmas"], *fresh["lemmas"]}):
        pair = [ledger["lemmas"].get(name) for ledger in (recorded, fresh)]
        if None in pair:
            faults.append(f"{name}: only in {'the new' if pair[0] is None else 'the recorded'} ledger")
            continue
        versions = [{(s["name"], s["version"]) for s in entry["solvers"]} for entry in pair]
        common = versions[0] & versions[1]
        same_z3 = any(solver == "z3" for solver, _ in common)
        if _comparable(pair[0], common, same_z3) != _comparable(pair[1], common, same_z3):
            faults.append(f"{name}: differs from the recorded ledger")
    return faults


def document(ledger: Ledger, lemmas: Iterable[Lemma] | None = None) -> str:
    """Markdown list of the lemmas: statement, assumptions, what it is about, constants, tests, solvers, mutants."""
    chosen = list(all_lemmas() if lemmas is None else lemmas)
    mutants = sum(len(lemma.mutants) for lemma in chosen)
    lines = [
        "# Lemmas",
        "",
        "Generated by `python -m proofs.ledger --docs docs/lemmas.md`; do not edit.",
        "",
        f"{len(chosen)} lemmas, each proved by z3, and {mutants} mutants, each refuted with a counterexample. Names in",
        "capitals are constants of `dosa_ref.spec`; [soundness.md](soundness.md) shows how the lemmas fit together.",
        "Assumptions are SMT-LIB terms over the variables of the script, cut where they are long; without any one of",
        "them its lemma is refuted. `tests/proofs/test_lemmas.py` and `test_premises.py` test every lemma; further",
        "tests that name it are listed with it. Times are seconds of one run. A query may take z3",
        f"{prover.TIMEOUT_S} s and {prover.RESOURCE_LIMIT:,} units of work, others {prover.CONFIRM_TIMEOUT_S} s.",
    ]
    tests = _tests_by_lemma([lemma.id for lemma in chosen])
    theme = ""
    for lemma in chosen:
        entry = ledger["lemmas"][lemma.id]
        if lemma.theme != theme:
            theme = lemma.theme
            lines += ["", f"## {theme}"]
        lines += ["", f"### {lemma.id}", "", lemma.statement, ""]
        if lemma.note:
            lines += [lemma.note, ""]
        premises = [_readable(premise.text) for premise in lemma.formula().premises]
        lines.append(f"- Assumes: {'; '.join(f'`{text}`' for text in dict.fromkeys(premises)) or 'nothing'}")
        lines.append(f"- About: {', '.join(f'`{name}`' for name in lemma.speaks_of)}")
        if lemma.constants:
            lines.append(f"- Constants: {', '.join(f'{k} = {v}' for k, v in lemma.constant_texts().items())}")
        if tests[lemma.id]:
            lines.append(f"- Tests: {', '.join(f'`{name}`' for name in tests[lemma.id])}")
        solvers = ", ".join(f"{s['name']} {s['version']} ({s['time_s']:.2f} s)" for s in entry["solvers"])
        lines.append(
            f"- {entry['result'].capitalize()} by {solvers}: [`{smt2_path(lemma)}`](../proofs/{smt2_path(lemma)})"
        )
        statuses = {mutant["id"]: mutant["status"] for mutant in entry["mutants"]}
        lines += [f"- Mutant `{mutant.id}`: {mutant.broken} ({statuses[mutant.id]})" for mutant in lemma.mutants]
    return "\n".join(lines) + "\n"


def _readable(text: str) -> str:
    """An SMT-LIB term with bit-vector literals as numbers, cut to a line's length."""
    text = re.sub(r"#b([01]+)", lambda match: str(int(match[1], 2)), text)
    return text if len(text) <= 90 else f"{text[:88]} …"


def _tests_by_lemma(names: Sequence[str]) -> dict[str, list[str]]:
    """Test functions of this checkout that name a lemma in a string or a comment, as ``file::function``."""
    found: dict[str, list[str]] = {name: [] for name in names}
    for path in (CHECKOUT / "tests" / "proofs" / file for file in ABOUT_LEMMAS):
        text = path.read_text(encoding="utf-8")
        functions = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]
        spoken: dict[str, set[str]] = {node.name: set() for node in functions if node.name.startswith("test_")}
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type in (tokenize.STRING, tokenize.COMMENT):
                inside = [f.name for f in functions if f.lineno <= token.start[0] <= (f.end_lineno or 0)]
                for name in spoken.keys() & inside:
                    spoken[name] |= set(re.findall(r"\w+", token.string))
        for test, words in spoken.items():
            for name in found.keys() & words:
                found[name].append(f"{path.name}::{test}")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line.

    Args:
        arguments: Words after the program's name; ``None`` means those of this process.

    Returns:
        0 if all is proved and up to date, 1 if not, 3 if no solver is installed.
    """
    parser = argparse.ArgumentParser(prog="python -m proofs.ledger", description="Write or check the ledger of lemmas.")
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--check", action="store_true", help="prove again and compare with ledger.json; write nothing")
    action.add_argument("--docs", type=Path, metavar="FILE", help="write the list of lemmas from ledger.json")
    options = parser.parse_args(arguments)
    if options.docs is not None:
        options.docs.write_text(document(read()), encoding="utf-8")
        return 0
    lemmas = all_lemmas()
    try:
        reports = prover.prove_all(lemmas)
    except BackendUnavailable as error:
        sys.stderr.write(f"{error}\n")
        return 3
    fresh = build(lemmas, reports)
    faults = [f"{report.lemma_id}: {_complaint(report)}" for report in reports if not report.holds()]
    if options.check:
        recorded = read()
        faults += stale(recorded, lemmas) + differences(recorded, fresh)
    elif not faults:
        # A ledger that does not hold is never written: the gate would have nothing to trust.
        prover.export(PACKAGE / "smt2", lemmas)
        for path in (PACKAGE / "smt2").glob("*.smt2"):
            if path.stem not in fresh["lemmas"]:
                path.unlink()
        write(fresh)
    for fault in faults:
        sys.stderr.write(f"{fault}\n")
    return 1 if faults else 0


def _complaint(report: LemmaReport) -> str:
    wrong = [f"mutant {name} is {status_word(result)}" for name, result in report.mutants]
    wrong = [text for text, (_, result) in zip(wrong, report.mutants, strict=True) if not isinstance(result, Refuted)]
    reason = getattr(report.status, "reason", "")
    head = [] if isinstance(report.status, Proved) else [f"{status_word(report.status)} {reason}".strip()]
    return "; ".join([*head, *wrong])


def _comparable(entry: dict[str, Any], solvers: set[tuple[str, str]], counterexamples: bool) -> dict[str, Any]:
    mutants = [{k: v for k, v in m.items() if counterexamples or k != "counterexample"} for m in entry["mutants"]]
    kept = [
        {k: v for k, v in solver.items() if k not in ("time_s", "resources")}
        for solver in entry["solvers"]
        if (solver["name"], solver["version"]) in solvers
    ]
    return {**entry, "mutants": mutants, "solvers": kept}


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _file_sha256(path: Path) -> str:
    return _sha256(path.read_bytes()) if path.is_file() else "missing"


if __name__ == "__main__":
    sys.exit(main())
