"""A recorded run as a table for people: ``python -m dosa_verify.report report.json README.md`` refreshes the README's.

The table stands between the lines ``<!-- results -->`` and ``<!-- /results -->``; nothing in it is typed by hand.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2

from dosa_ref.spec import DosaError, InvalidProblem
from dosa_verify.verify import SCHEMA

BEGIN, END = "<!-- results -->", "<!-- /results -->"


def render(record: Mapping[str, Any]) -> str:
    """Return a ``dosa.report/1`` record as a Markdown table and one line about the machine."""
    templates = jinja2.Environment(
        loader=jinja2.PackageLoader("dosa_verify"),
        undefined=jinja2.StrictUndefined,
        autoescape=False,  # noqa: S701 - the output is Markdown made from our own record
    )
    environment = record["environment"]
    where = environment["gpu"]["name"] if environment["gpu"] else f"{environment['cpu_count']} CPU cores (emulator)"
    return templates.get_template("results.md.j2").render(report=record, where=where, packages=environment["packages"])


def refresh(page: str, table: str) -> str:
    """Return a page with the text between the two marker lines replaced.

    Raises:
        InvalidProblem: the markers are missing or in the wrong order.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise InvalidProblem("page", "no marker lines", f"{BEGIN} and {END}")
    return f"{before}{BEGIN}\n{table.strip()}\n{END}{after}"


def main(arguments: list[str]) -> None:
    """Refresh the table of a page from a recorded run.

    Args:
        arguments: record and page.
    """
    if len(arguments) != 2:
        sys.exit("usage: python -m dosa_verify.report report.json README.md")
    source, page = map(Path, arguments)
    try:
        record = json.loads(source.read_text(encoding="utf-8"))
        if record.get("schema") != SCHEMA:
            raise InvalidProblem("schema", repr(record.get("schema")), repr(SCHEMA))
        page.write_text(refresh(page.read_text(encoding="utf-8"), render(record)), encoding="utf-8")
    except (OSError, ValueError, DosaError) as error:
        sys.exit(f"report: {error}")


if __name__ == "__main__":
    main(sys.argv[1:])
