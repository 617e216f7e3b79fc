"""Whether a trace comes out the same when it is made again: hashes of files from separate processes.

::

    python -m dosa_verify.traces.repeat PACK... --keys 131072 --layers 6 --steps 300 --out FILE

Each run is a ``dosa trace make`` in a process and a folder of its own; the record (schema ``dosa.trace_repeat/1``)
holds the sha256 of every file of every run, and whether they agree.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from dosa_ref.spec import BackendUnavailable
from dosa_verify.environment import environment

SCHEMA: Final = "dosa.trace_repeat/1"


def repeat(packs: Sequence[Path], runs: int, arguments: Sequence[str]) -> dict[str, Any]:
    """Make traces several times at once, each time in a process of its own.

    Args:
        packs: the pack's parts.
        runs: how often.
        arguments: further ones of ``dosa trace make``.

    Returns:
        ``equal``, ``traces`` (name, bytes and the hashes of all runs), and from the first header ``attention``,
        ``rope_scaling`` and ``pack_sha256``.

    Raises:
        BackendUnavailable: a run failed; the message is its own.
    """
    with tempfile.TemporaryDirectory() as folder:
        started = []
        for run in range(runs):
            out = Path(folder) / str(run)
            out.mkdir()
            command = [sys.executable, "-m", "dosa_verify", "trace", "make", *map(str, packs), *arguments]
            started.append(
                subprocess.Popen(
                    [*command, "--out", str(out), "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
                )
            )
        found: list[list[dict[str, Any]]] = []
        for process in started:
            answer, complaint = process.communicate()
            if process.returncode:
                raise BackendUnavailable(f"dosa trace make: {complaint.strip()}")
            found.append(json.loads(answer)["traces"])
    hashes = [[entry["sha256"] for entry in run] for run in found]
    header = found[0][0]["header"]
    return {
        "equal": all(run == hashes[0] for run in hashes),
        "traces": [
            {"file": Path(entry["file"]).name, "bytes": entry["bytes"], "sha256": [run[place] for run in hashes]}
            for place, entry in enumerate(found[0])
        ],
        **{name: header[name] for name in ("attention", "rope_scaling", "pack_sha256")},
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; arguments that are not listed go to ``dosa trace make``. Exit code 1 if the runs differ."""
    parser = argparse.ArgumentParser(prog="python -m dosa_verify.traces.repeat", description="Make traces twice.")
    parser.add_argument("packs", type=Path, nargs="+", metavar="PACK", help="the pack: each of its parts")
    parser.add_argument("--runs", type=int, default=2, metavar="N", help="processes (default 2)")
    parser.add_argument("--commit", help="of the sources, where they are no git checkout")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="the record")
    options, further = parser.parse_known_args(arguments)
    where = environment()
    if options.commit is not None:
        where["git_commit"] = options.commit
    record = {
        "schema": SCHEMA,
        "environment": where,
        "command": " ".join(["python -m dosa_verify.traces.repeat PACK", f"--runs {options.runs}", *further]),
        **repeat(options.packs, options.runs, further),
    }
    options.out.write_text(json.dumps(record, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    return 0 if record["equal"] else 1


if __name__ == "__main__":
    sys.exit(main())
