"""The measured part of ``docs/traces.md``, from records; no number in it is typed by hand.

::

    python -m dosa_verify.traces.page docs/evidence docs/traces.md

reads ``pruning_1m.json`` and ``trace_loss_131072.json`` (the model's loss along a pass) and ``trace_hashes.json`` (the
same traces from separate processes) from the folder, and writes what lies between the two marks of the page anew.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from dosa_ref.spec import InvalidProblem
from dosa_verify.traces.model import LOSS_BINS

BEGIN: Final = "<!-- measured: python -m dosa_verify.traces.page docs/evidence docs/traces.md -->"
END: Final = "<!-- end of what is measured -->"
LONG, SHORT, HASHES = "pruning_1m.json", "trace_loss_131072.json", "trace_hashes.json"
SHOWN: Final = (0, 3, 7, 11, 15)
"""Bins that the table shows; the largest difference is over all of them."""

Record = Mapping[str, Any]


def section(records: Mapping[str, Record]) -> str:
    """The part of the page between the marks.

    Args:
        records: by the name of their files.

    Returns:
        Markdown.
    """
    long, short, hashes = (records[name] for name in (LONG, SHORT, HASHES))
    passes = [(SHORT, _of_header(entry["header"])) for entry in short["traces"]]
    passes += [(LONG, text) for text in long["texts"]]
    bins = "".join(f" {place + 1}/{LOSS_BINS} |" for place in SHOWN)
    lines = [
        "Loss in nats per token after everything before a token, less the loss after the trained context alone, by the",
        "place in the pass; both with the frequencies of the pass. The last column is what these frequencies cost by",
        "themselves, against the model's own.",
        "",
        f"| record | text | pass, tokens | YaRN factor |{bins} largest | of the frequencies |",
        "|" + "---|" * (6 + len(SHOWN)),
    ]
    for name, text in passes:
        factor = text["rope_scaling"].split("factor ")[1].split()[0]
        cells = [f"`{name}`", text["domain"], f"{int(text['pass_tokens']):,}", factor]
        if "loss_bins" in text:
            cells += [f"{text['loss_bins'][place][2] - text['loss_bins'][place][3]:+.2f}" for place in SHOWN]
            cells += [f"{float(text['loss_excess']):+.2f}", f"{float(text['loss_of_scaling']):+.2f}"]
        else:
            cells += [text["loss_flat"]] + [""] * (len(SHOWN) + 1)
        lines.append("| " + " | ".join(cells) + " |")
    texts, own = long["texts"], [case["indexer"] for case in long["cases"] if case["own"]]
    kl = [indexer["final_kl"] for indexer in own]
    checked = ", ".join(text["domain"] for text in texts if "loss_bins" in text)
    verdict = "had equal hashes" if hashes["equal"] else "did NOT have equal hashes"
    gpu, other_gpu = (record["environment"]["gpu"]["name"] for record in (long, hashes))
    runs = len(hashes["traces"][0]["sha256"])
    lines += [
        "",
        f"The study of [pruning.md](pruning.md) took {long['time_s']:.0f} s on one {gpu}: {len(texts)} texts of",
        f"{int(texts[0]['pass_tokens']):,} tokens ({checked} through all layers with the loss check), the training of",
        f"its indexers, {own[0]['steps']} steps each (final KL {min(kl):.2f} to {max(kl):.2f} nats, by layer), and",
        "every measurement.",
        "",
        f"Made in {runs} separate processes (`{HASHES}`, {other_gpu}, {hashes['attention']}), these traces {verdict}:",
        "",
    ]
    for trace in hashes["traces"]:
        found = ", ".join(f"`{digest[:16]}`" for digest in dict.fromkeys(trace["sha256"]))
        lines.append(f"- `{trace['file']}`, {trace['bytes']:,} bytes: {found}")
    return "\n".join(lines)


def _of_header(header: Mapping[str, str]) -> Record:
    return {**header, "loss_bins": json.loads(header["loss_bins"])}


def insert(page: str, text: str) -> str:
    """The page with what lies between its marks replaced.

    Raises:
        InvalidProblem: ``page``: it has not both marks once, in order.
    """
    if page.count(BEGIN) != 1 or page.count(END) != 1 or page.index(END) < page.index(BEGIN):
        raise InvalidProblem("page", "other marks", f"{BEGIN} and {END}, once each")
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n{text}\n{END}{rest.split(END)[1]}"


def read(folder: Path) -> dict[str, Record]:
    """The three records of a folder."""
    return {name: json.loads((folder / name).read_text(encoding="utf-8")) for name in (LONG, SHORT, HASHES)}


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line: the folder of the records and the page. Returns the exit code."""
    folder, page = map(Path, sys.argv[1:] if arguments is None else arguments)
    page.write_text(insert(page.read_text(encoding="utf-8"), section(read(folder))), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
