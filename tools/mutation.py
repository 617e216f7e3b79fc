"""Mutation testing of the judge and the selection of ``dosa_ref``: ``python tools/mutation.py [OUT.json]``.

Needs mutmut 3 (``python -m pip install "mutmut>=3.3,<4"``). Mutants are made and tested in a temporary folder. Each
survivor must be one of the kinds below, which say why no test can or should kill it; one that is not ends the run with
exit code 1. Takes about ten minutes on one core; no part of the ordinary tests.
"""

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MODULES = ["dosa_ref/select.py", "dosa_ref/contract.py"]
TESTS = ["tests/ref/test_select.py", "tests/ref/test_contract.py"]
COPIED = ["dosa_ref", "dosa_gpu", "dosa_verify", "proofs", "tests", "pyproject.toml", "README.md", "LICENSE"]

EXPLAINED = {
    # kind: (pattern of a changed line as it was, pattern of what it became, why it survives)
    "same_type": (
        r"np\.(array|full|ones|empty|zeros)\(",
        r", None\)|, \)$|, None,",
        "the type that NumPy infers is the one that was named",
    ),
    "falsy": (r"Verdict \| None = None", r'= ""', "any false value stands for: no verdict yet"),
    "spelling": (r'kind="stable"', r'kind="STABLE"', "NumPy reads the kind of a sort by its first letter, in any case"),
    "nan_spelling": (r"np\.nan", r"None|\)", "None in a float array is NaN"),
    "speed_only": (
        r"sample|seed_scores < tau|columns: int = 16|pruned=False",
        r".",
        "the sample that columns are chosen on, how many there are, or a flag that is false either way",
    ),
    "no_keys": (r"step = max\(1, .* if topk else 1", r"else 2", "with topk 0 there is no older key to take"),
    "assertion_text": (r"^assert .*, \"", r"XX|[A-Z]{4}", "the text of an internal assertion"),
    "reshape": (r"reshape\(-1", r"reshape\(-2", "NumPy takes any negative size for the one to be inferred"),
    "bounds_agree": (
        r"left_out < last_tied",
        r"left_out <= last_tied",
        "the last selected key is not among those left out",
    ),
}


def explain(before: list[str], after: list[str]) -> str | None:
    """The kind of a survivor, or None."""
    for kind, (old, new, _) in EXPLAINED.items():
        if any(re.search(old, line) for line in before) and any(re.search(new, line) for line in after):
            return kind
    return None


def mutmut(folder: Path, *arguments: str) -> str:
    """Run mutmut in a folder; gives what it printed."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    done = subprocess.run(
        [sys.executable, "-m", "mutmut", *arguments],
        cwd=folder,
        env=environment,
        check=True,
        capture_output=True,
        text=True,
    )
    return done.stdout


def main(out: Path | None) -> int:
    """Make and test all mutants; print and record the survivors."""
    with tempfile.TemporaryDirectory(prefix="dosa-mutation-") as name:
        folder = Path(name)
        for item in COPIED:
            if (ROOT / item).is_dir():
                shutil.copytree(ROOT / item, folder / item, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(ROOT / item, folder / item)
        lines = [
            "[mutmut]",
            "source_paths=dosa_ref",
            "only_mutate=", *(f"    {file}" for file in MODULES),
            "pytest_add_cli_args_test_selection=", *(f"    {file}" for file in TESTS),
            "pytest_add_cli_args=", "    -p", "    no:cacheprovider",
            "also_copy=", *(f"    {item}" for item in COPIED if item != "dosa_ref"),
        ]  # fmt: skip
        (folder / "setup.cfg").write_text("\n".join(lines) + "\n", encoding="utf-8")
        mutmut(folder, "run", "--max-children", "1")
        results = mutmut(folder, "results", "--all", "true")
        states = dict(re.findall(r"^\s*(\S+__mutmut_\d+): (.+)$", results, re.MULTILINE))
        survivors = []
        for mutant in sorted(mutant for mutant, state in states.items() if state != "killed"):
            diff = [line for line in mutmut(folder, "show", mutant).splitlines() if re.match(r"[-+](?![-+])", line)]
            before = [line[1:].strip() for line in diff if line[0] == "-"]
            after = [line[1:].strip() for line in diff if line[0] == "+"]
            survivors.append(
                {
                    "mutant": mutant,
                    "state": states[mutant],
                    "before": before,
                    "after": after,
                    "kind": explain(before, after),
                }
            )
    record = {
        "kind": "mutation",
        "command": "python tools/mutation.py",
        "python": platform.python_version(),
        "mutmut": version("mutmut"),
        "numpy": version("numpy"),
        "modules": MODULES,
        "tests": TESTS,
        "mutants": len(states),
        "killed": sum(state == "killed" for state in states.values()),
        "kinds": {kind: reason for kind, (_, _, reason) in EXPLAINED.items()},
        "survivors": survivors,
    }
    if out is not None:
        out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(f"{record['mutants']} mutants, {record['killed']} killed, {len(survivors)} survive")
    for survivor in survivors:
        print(f"{survivor['kind'] or 'NOT EXPLAINED'}: {survivor['mutant']} ({survivor['state']})")
        for sign in ("before", "after"):
            print("   ", sign, *survivor[sign])
    return int(any(survivor["kind"] is None for survivor in survivors))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else None))
