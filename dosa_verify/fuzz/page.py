"""The tables of docs/fuzzing.md from recorded runs: ``python -m dosa_verify.fuzz.page`` in a checkout.

Recorded runs are ``docs/evidence/fuzz_*.json`` (``dosa fuzz --record``), ``mutants.json`` (``python -m
tests.verify.test_mutants``) and ``mutation.json`` (``python tools/mutation.py``). Nothing between the page's marker
lines is typed by hand.
"""

from __future__ import annotations

import collections
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

from dosa_ref.spec import InvalidProblem
from dosa_verify.fuzz.report import SCHEMA

RUNS, MUTANTS, MUTATION = "runs", "mutants", "mutation"


def _template(name: str) -> jinja2.Template:
    return jinja2.Environment(
        loader=jinja2.PackageLoader("dosa_verify"),
        undefined=jinja2.StrictUndefined,
        autoescape=False,  # noqa: S701 - the output is Markdown made from our own records
    ).get_template(name)


def render_runs(records: Mapping[str, Mapping[str, Any]]) -> str:
    """Return recorded runs as a Markdown table, and where each was made.

    Args:
        records: file name to its content.

    Raises:
        InvalidProblem: a record is none of `dosa fuzz`.
    """
    runs, machines = [], collections.Counter[str]()
    for name, record in records.items():
        run = record.get("audit", {})
        if run.get("schema") != SCHEMA:
            raise InvalidProblem(name, repr(run.get("schema")), repr(SCHEMA))
        outcome = run["outcome"]
        if run["failure"] is not None:
            outcome = f"{run['failure']['fault']}: {run['failure']['evidence']}"
        elif run["budget_spent"]:
            outcome += " (as far as the budget went)"
        runs.append({**run, "command": record["command"], "outcome": outcome})
        where = record["environment"]
        gpu, packages = where["gpu"], where["packages"]
        machines[
            f"{gpu['name'] if gpu else 'Emulator'}, torch {packages['torch']}, triton {packages['triton']}, "
            f"kernels of commit {(where['git_commit'] or 'unknown')[:7]}"
        ] += 1
    lines = [f"{machine}: {count} of these runs." for machine, count in machines.items()]
    return _template("fuzz_runs.md.j2").render(runs=runs, machines=lines)


def render_mutants(record: Mapping[str, Any]) -> str:
    """Return how soon each seeded mutant of the kernels is found.

    Raises:
        InvalidProblem: the directed cases do not find one of them.
    """
    for name, mutant in record["mutants"].items():
        if mutant["directed"] is None or mutant["directed"] > record["budget"]:
            raise InvalidProblem("mutants.json", f"{name}: {mutant['directed']}", f"at most {record['budget']} cases")

    def median(counts: Sequence[int | None]) -> str:
        # A search without success counts as longer than all others.
        middle = sorted(float("inf") if count is None else count for count in counts)[(len(counts) - 1) // 2]
        return "–" if middle == float("inf") else str(int(middle))

    mutants = record["mutants"].values()
    searches = [count for mutant in mutants for count in mutant["searches"]]
    rows = [
        (name, mutant["directed"], ", ".join("–" if count is None else str(count) for count in mutant["searches"]))
        for name, mutant in record["mutants"].items()
    ]
    return _template("mutants.md.j2").render(
        record=record,
        rows=rows,
        directed=median([mutant["directed"] for mutant in mutants]),
        searched=median(searches),
        found=sum(count is not None for count in searches),
        searches=len(searches),
        commit=(record["environment"]["git_commit"] or "unknown")[:7],
    )


def render_mutation(record: Mapping[str, Any]) -> str:
    """Return the record of ``tools/mutation.py`` as Markdown.

    Raises:
        InvalidProblem: a survivor has no explanation.
    """
    unexplained = [survivor["mutant"] for survivor in record["survivors"] if survivor["kind"] is None]
    if unexplained:
        raise InvalidProblem("mutation.json", unexplained[0], "a kind for each survivor")
    kinds = collections.Counter(survivor["kind"] for survivor in record["survivors"])
    return _template("mutation.md.j2").render(record=record, kinds=dict(kinds.most_common()))


def refresh(page: str, name: str, text: str) -> str:
    """Return a page with the text between ``<!-- name -->`` and ``<!-- /name -->`` replaced.

    Raises:
        InvalidProblem: the marker lines are missing.
    """
    before, begin, rest = page.partition(f"<!-- {name} -->")
    _, end, after = rest.partition(f"<!-- /{name} -->")
    if not (begin and end):
        raise InvalidProblem("page", "no marker lines", f"<!-- {name} --> and <!-- /{name} -->")
    return f"{before}{begin}\n{text.strip()}\n{end}{after}"


def build(page: str, evidence: Path) -> str:
    """Return the page with its tables made anew.

    Args:
        page: text of docs/fuzzing.md.
        evidence: folder of the records.
    """
    files = sorted(evidence.glob("fuzz_*.json"))
    records = {file.name: json.loads(file.read_text(encoding="utf-8")) for file in files}
    page = refresh(page, RUNS, render_runs(records))
    mutants = json.loads((evidence / "mutants.json").read_text(encoding="utf-8"))
    page = refresh(page, MUTANTS, render_mutants(mutants))
    mutation = json.loads((evidence / "mutation.json").read_text(encoding="utf-8"))
    return refresh(page, MUTATION, render_mutation(mutation))


def main() -> None:
    """Refresh docs/fuzzing.md of the checkout in the working directory."""
    page = Path("docs/fuzzing.md")
    try:
        page.write_text(build(page.read_text(encoding="utf-8"), Path("docs/evidence")), encoding="utf-8")
    except (OSError, ValueError) as error:
        sys.exit(f"page: {error}")


if __name__ == "__main__":
    main()
