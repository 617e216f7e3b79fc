"""The only caller of a solver. A proof is a value that only this module makes.

Every solver reads the same SMT-LIB text, the one that is exported and hashed. z3 decides; cvc5 and bitwuzla, where
installed, confirm it on their own. A confirming solver that gives up takes nothing away; one that contradicts z3 makes
the result `Unknown`.
"""

from __future__ import annotations

import importlib.metadata
import re
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeAlias

from dosa_ref.spec import BackendUnavailable
from proofs.lemma import Lemma, Statement
from proofs.registry import all_lemmas

RESOURCE_LIMIT: Final = 200_000_000
"""z3's own deterministic measure of work, per query; hundreds of times what the hardest lemma takes."""

TIMEOUT_S: Final = 60
"""Wall-clock limit per query, for a machine so slow that the resource limit does not bite first."""

CONFIRM_TIMEOUT_S: Final = 30
"""Wall-clock limit per query of a confirming solver."""

SEED: Final = 0

_SEAL: Final = object()


@dataclass(frozen=True, slots=True, kw_only=True)
class Proved:
    """The negated claim has no model. Only the prover can make this value.

    Args:
        solver: Name of the deciding solver.
        time_s: Wall-clock seconds of the decision.
        resources: What it took of `RESOURCE_LIMIT`.
    """

    solver: str
    time_s: float
    resources: int
    seal: object = field(repr=False, compare=False)

    def __post_init__(self) -> None:
        """Refuse to be made elsewhere."""
        if self.seal is not _SEAL:
            raise TypeError("a proof is made by proofs.prover only")


@dataclass(frozen=True, slots=True, kw_only=True)
class Refuted:
    """The claim is false: ``model`` holds the premises and not the claim.

    Args:
        solver: Name of the deciding solver.
        time_s: Wall-clock seconds of the decision.
        model: Pairs (variable, value), sorted by name; values in SMT-LIB syntax.
    """

    solver: str
    time_s: float
    model: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Unknown:
    """Nothing was decided. This is not a success.

    Args:
        reason: Why, for a person.
        time_s: Wall-clock seconds spent.
    """

    reason: str
    time_s: float


ProofResult: TypeAlias = Proved | Refuted | Unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class Confirmation:
    """Another solver's proof of a lemma that z3 proved.

    Args:
        solver: Its name.
        time_s: Wall-clock seconds it took of `CONFIRM_TIMEOUT_S`.
    """

    solver: str
    time_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LemmaReport:
    """What the solvers said about one lemma and its mutants.

    Args:
        lemma_id: Id of the lemma.
        status: Result for the lemma. A refuted premise set and a contradiction between solvers are `Unknown`.
        mutants: Pairs (mutant id, result); a sound lemma has only `Refuted` here.
        confirmations: The other solvers that proved it too.
        time_s: Wall-clock seconds for lemma, premises, mutants and confirmations.
    """

    lemma_id: str
    status: ProofResult
    mutants: tuple[tuple[str, ProofResult], ...]
    confirmations: tuple[Confirmation, ...]
    time_s: float

    @property
    def confirmed_by(self) -> tuple[str, ...]:
        """Names of the other solvers that proved the lemma too."""
        return tuple(confirmation.solver for confirmation in self.confirmations)

    def holds(self) -> bool:
        """True if the lemma is proved and every mutant refuted."""
        return isinstance(self.status, Proved) and all(isinstance(r, Refuted) for _, r in self.mutants)


def solver_versions() -> dict[str, str]:
    """Names and versions of the installed solvers, z3 first."""
    packages = {"z3": "z3-solver", "cvc5": "cvc5", "bitwuzla": "bitwuzla"}
    versions = {}
    for name, package in packages.items():
        try:
            versions[name] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def prove(statement: Statement) -> ProofResult:
    """Decide a statement with z3.

    Args:
        statement: Premises and claim.

    Returns:
        `Proved`, `Refuted` with a checked counterexample, or `Unknown`.

    Raises:
        BackendUnavailable: if z3 is not installed.
    """
    start = time.perf_counter()
    verdict, model, resources = _ask_z3(statement.refutation())
    elapsed = time.perf_counter() - start
    if verdict == "unsat":
        return Proved(solver="z3", time_s=elapsed, resources=resources, seal=_SEAL)
    if verdict == "sat":
        return Refuted(solver="z3", time_s=elapsed, model=model)
    return Unknown(reason=f"z3: {verdict}", time_s=elapsed)


def prove_lemma(lemma: Lemma, *, confirm: bool = True) -> LemmaReport:
    """Decide a lemma, that its premises can hold, and that each mutant fails.

    Args:
        lemma: The lemma.
        confirm: Ask the other installed solvers too.

    Returns:
        The report.

    Raises:
        BackendUnavailable: if z3 is not installed.
    """
    start = time.perf_counter()
    statement = lemma.formula()
    status = prove(statement)
    confirmed: list[Confirmation] = []
    if isinstance(status, Proved):
        premises, _, _ = _ask_z3(statement.satisfiability())
        if premises != "sat":
            status = Unknown(reason=f"vacuous: the premises are {premises} in z3", time_s=status.time_s)
    if isinstance(status, Proved) and confirm:
        for name, verdict, time_s in _confirmations(statement):
            if verdict == "unsat":
                confirmed.append(Confirmation(solver=name, time_s=time_s))
            elif verdict == "sat":
                status = Unknown(reason=f"{name} contradicts z3", time_s=time.perf_counter() - start)
                break
    mutants = tuple((mutant.id, prove(lemma.mutant_formula(mutant))) for mutant in lemma.mutants)
    return LemmaReport(
        lemma_id=lemma.id,
        status=status,
        mutants=mutants,
        confirmations=tuple(confirmed),
        time_s=time.perf_counter() - start,
    )


def prove_all(
    lemmas: Iterable[Lemma] | None = None,
    *,
    confirm: bool = True,
    on_progress: Callable[[str, int, int], None] | None = None,
) -> list[LemmaReport]:
    """Decide lemmas one after another.

    Args:
        lemmas: Which; ``None`` means all that are registered.
        confirm: Ask the other installed solvers too.
        on_progress: Called before each lemma with its id, how many are done, and how many there are.

    Returns:
        One report per lemma, in order.

    Raises:
        BackendUnavailable: if z3 is not installed.
    """
    chosen = list(all_lemmas() if lemmas is None else lemmas)
    reports = []
    for done, lemma in enumerate(chosen):
        if on_progress is not None:
            on_progress(lemma.id, done, len(chosen))
        reports.append(prove_lemma(lemma, confirm=confirm))
    return reports


def export(directory: Path | str, lemmas: Iterable[Lemma] | None = None) -> list[Path]:
    """Write one ``.smt2`` file per lemma. Needs no solver.

    Args:
        directory: Folder, made if missing.
        lemmas: Which; ``None`` means all that are registered.

    Returns:
        The files written, in order.
    """
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for lemma in all_lemmas() if lemmas is None else lemmas:
        path = folder / f"{lemma.id}.smt2"
        path.write_text(lemma.smt2(), encoding="utf-8")
        written.append(path)
    return written


def _ask_z3(script: str) -> tuple[str, tuple[tuple[str, str], ...], int]:
    try:
        import z3
    except ImportError as error:
        raise BackendUnavailable("proving needs z3: install the extra 'prove' (z3-solver, cvc5, bitwuzla)") from error
    # A context of its own keeps the answer independent of what was asked before.
    context = z3.Context()
    logic = _logic(script)
    solver = z3.SolverFor(logic, ctx=context)
    solver.set("random_seed", SEED)
    solver.set("rlimit", RESOURCE_LIMIT)
    solver.set("timeout", TIMEOUT_S * 1000)
    solver.from_string(script)
    verdict = str(solver.check())
    resources = next((int(value) for name, value in solver.statistics() if name == "rlimit count"), 0)
    if verdict != "sat":
        return (verdict if verdict == "unsat" else solver.reason_unknown()), (), resources
    model = solver.model()
    if not all(z3.is_true(model.eval(a, model_completion=True)) for a in solver.assertions()):
        return "a model that does not satisfy the assertions", (), resources
    names = re.findall(r"^\(declare-const (\S+) (.*)\)$", script, re.MULTILINE)
    values = {d.name(): model[d] for d in model.decls()}
    model_values = tuple((name, _value_text(values[name]) if name in values else "any") for name, _ in names)
    return verdict, model_values, resources


def _value_text(value: Any) -> str:
    import z3

    if z3.is_bv_value(value) and value.size() % 4 == 0:
        return f"#x{value.as_long():0{value.size() // 4}x}"
    return " ".join(str(value.sexpr()).split())


def _confirmations(statement: Statement) -> Iterator[tuple[str, str, float]]:
    """Name, answer and seconds of every other installed solver that knows the theories of the statement."""
    script = statement.refutation()
    installed = solver_versions()
    solvers = {"cvc5": _ask_cvc5}
    # Bitwuzla knows bit-vectors and floats only.
    if statement.logic in ("QF_BV", "QF_BVFP"):
        solvers["bitwuzla"] = _ask_bitwuzla
    for name in (known for known in solvers if known in installed):
        start = time.perf_counter()
        verdict = solvers[name](script)
        yield name, verdict, time.perf_counter() - start


def _ask_cvc5(script: str) -> str:
    import cvc5

    solver = cvc5.Solver(cvc5.TermManager())
    solver.setOption("tlimit-per", str(CONFIRM_TIMEOUT_S * 1000))
    solver.setOption("seed", str(SEED))
    parser = cvc5.InputParser(solver)
    parser.setStringInput(cvc5.InputLanguage.SMT_LIB_2_6, script, "lemma")
    symbols = parser.getSymbolManager()
    answer = ""
    while not (command := parser.nextCommand()).isNull():
        answer += str(command.invoke(solver, symbols))
    return answer.strip()


def _ask_bitwuzla(script: str) -> str:
    import bitwuzla

    options = bitwuzla.Options()
    options.set(bitwuzla.Option.TIME_LIMIT_PER, CONFIRM_TIMEOUT_S * 1000)
    options.set(bitwuzla.Option.SEED, SEED)
    parser = bitwuzla.Parser(bitwuzla.TermManager(), options)
    # The answer comes from the solver object below, not from the script's own (check-sat), which would print it.
    parser.parse(script.replace("(check-sat)\n", ""), parse_only=False, parse_file=False)
    return str(parser.bitwuzla().check_sat()).lower().rpartition(".")[2]


def _logic(script: str) -> str:
    match = re.search(r"^\(set-logic (\w+)\)$", script, re.MULTILINE)
    assert match is not None
    return match[1]
