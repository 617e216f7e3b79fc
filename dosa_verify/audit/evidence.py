"""Recorded audits: what was found, by which command, on which machine (schema ``dosa.audit_evidence/1``)."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dosa_ref.spec import InvalidProblem
from dosa_ref.trace import write_whole
from dosa_verify.environment import environment

SCHEMA = "dosa.audit_evidence/1"


def evidence(audit: Mapping[str, object], command: str, commit: str = "") -> dict[str, object]:
    """Return an audit's record with the command and the environment that made it.

    Args:
        audit: the record of an audit verb.
        command: what a reader types to repeat it.
        commit: of these sources, where they do not lie in a git checkout.
    """
    where = environment()
    return {
        "schema": SCHEMA,
        "command": command,
        "environment": {**where, "git_commit": where["git_commit"] or commit or None},
        "audit": dict(audit),
    }


def plain(record: object) -> Any:
    """Return a record of dataclass fields with lists in place of tuples, as JSON gives it back."""
    if isinstance(record, Mapping):
        return {name: plain(value) for name, value in record.items()}
    if isinstance(record, list | tuple):
        return [plain(value) for value in record]
    return record


def this_command(arguments: Sequence[str] | None = None) -> str:
    """Return the command line of this process as a reader would type it, without the recording options' values."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    kept = []
    skip = False
    for word in words:
        if skip:
            skip = False
        elif word in ("--out", "--record", "--commit"):
            skip = True
        elif not word.startswith(("--out=", "--record=", "--commit=")):
            kept.append(word)
    return " ".join(["dosa", *kept])


def write(record: Mapping[str, object], path: Path) -> None:
    """Write a record to a file that appears whole or not at all."""
    text = json.dumps(record, ensure_ascii=False, allow_nan=False, separators=(",", ":")) + "\n"
    write_whole(path, text.encode())


def read(path: Path, audit_schema: str) -> dict[str, Any]:
    """Read a record and demand the kind of audit.

    Raises:
        InvalidProblem: not such a record.
    """
    record = json.loads(path.read_text(encoding="utf-8"))
    found = record.get("audit", {}).get("schema") if record.get("schema") == SCHEMA else record.get("schema")
    if found != audit_schema:
        raise InvalidProblem("schema", repr(found), repr(audit_schema))
    return dict(record)
