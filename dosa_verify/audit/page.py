"""The page ``docs/arithmetic.md`` and its two pictures, from recorded audits; no number in them is typed by hand.

``python -m dosa_verify.audit.page docs/evidence docs/arithmetic.md`` reads ``audit_fp8.json``,
``audit_accumulation.json`` and ``audit_scorer.json`` from the folder and writes the page, and with matplotlib
(extra ``report``) ``audit_errors.svg`` and ``audit_casts.svg`` into the folder.
"""

from __future__ import annotations

import collections
import importlib.util
import itertools
import math
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2

from dosa_ref.spec import BackendUnavailable, DosaError
from dosa_verify.audit import accumulation, evidence, fp8, scorer

RECORDS = {
    "fp8": ("audit_fp8.json", fp8.SCHEMA),
    "accumulation": ("audit_accumulation.json", accumulation.SCHEMA),
    "scorer": ("audit_scorer.json", scorer.SCHEMA),
}
ERRORS_PICTURE, CASTS_PICTURE = "audit_errors.svg", "audit_casts.svg"
COMMAND = "python -m dosa_verify.audit.page docs/evidence docs/arithmetic.md"

Record = Mapping[str, Any]


def read_records(folder: Path) -> dict[str, dict[str, Any]]:
    """Read the three records of a folder.

    Raises:
        InvalidProblem: one is of another kind.
    """
    return {name: evidence.read(folder / file, schema) for name, (file, schema) in RECORDS.items()}


def cast_rows(audit: Record) -> list[dict[str, object]]:
    """One row per part, implementation and class of an FP8 audit: count and first example."""
    rows = []
    for part in audit["parts"]:
        counts: dict[tuple[str, str], int] = collections.Counter()
        first: dict[tuple[str, str], Record] = {}
        for item in part["disagreements"]:
            key = (item["implementation"], item["kind"])
            counts[key] += item["count"]
            first.setdefault(key, item)
        equal = [who for who in part["implementations"][1:] if not any(who == other for other, _ in counts)]
        if equal:
            rows.append({"part": part["name"], "inputs": part["inputs"], "who": ", ".join(equal), "kind": "all equal"})
        for (who, kind), count in counts.items():
            example = first[who, kind]
            rows.append(
                {
                    "part": part["name"],
                    "inputs": part["inputs"],
                    "who": who,
                    "kind": kind,
                    "count": count,
                    "example": f"{example['first']['bits']} ({example['first']['decimal']}): "
                    f"{example['reference']['decimal']} / {example['got']['decimal']}",
                }
            )
    return rows


def classes(audit: Record) -> dict[str, str]:
    """The known classes that occur in an FP8 audit, each with what it means."""
    seen = {item["kind"] for part in audit["parts"] for item in part["disagreements"]}
    return {kind: meaning for kind, meaning in fp8.KNOWN_CLASSES.items() if kind in seen}


def family_rows(audit: Record) -> list[dict[str, object]]:
    """One row per family of an accumulation audit: dots and differences over the counted instructions, errors."""
    rows = []
    for errors in audit["errors"]:
        found = [
            item
            for instruction in audit["instructions"]
            for item in instruction["families"]
            if item["pairs"] == errors["family"]
        ]
        rows.append(
            {
                "family": errors["family"],
                "dots": [item["dots"] for item in found],
                "differences": [item["differences"] for item in found],
                "exact": errors["exact"] / errors["dots"] if errors["dots"] else 0.0,
                "largest": errors["largest"],
            }
        )
    return rows


def probe_rows(audit: Record) -> list[dict[str, object]]:
    """One row per model: differences of every instruction, and the smallest counterexample of the first one."""
    rows = []
    for place, model in enumerate(audit["models"]):
        found = [instruction["probe"][place] for instruction in audit["instructions"]]
        rows.append(
            {
                "model": model,
                "differences": [item["differences"] for item in found],
                "example": found[0]["counterexample"],
            }
        )
    return rows


def products(counterexample: Record) -> str:
    """The non-zero products of a counterexample, ``element: q k``, in E4M3 codes."""
    q, k = bytes.fromhex(counterexample["q"]), bytes.fromhex(counterexample["k"])
    used = [place for place in range(len(q)) if q[place] & 0x7F and k[place] & 0x7F]
    return ", ".join(f"{place}: {q[place]:02x} {k[place]:02x}" for place in used)


def render(records: Mapping[str, Record], pictures: str) -> str:
    """Return the page.

    Args:
        records: from `read_records`.
        pictures: path from the page to the folder of the pictures.
    """
    templates = jinja2.Environment(
        loader=jinja2.PackageLoader("dosa_verify"),
        undefined=jinja2.StrictUndefined,
        autoescape=False,  # noqa: S701 - the output is Markdown made from our own records
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters["cell"] = lambda text: str(text).replace("|", "\\|")
    return templates.get_template("arithmetic.md.j2").render(
        command=COMMAND,
        records=records,
        fp8=records["fp8"]["audit"],
        accumulation=records["accumulation"]["audit"],
        scorer=records["scorer"]["audit"],
        casts=cast_rows(records["fp8"]["audit"]),
        classes=classes(records["fp8"]["audit"]),
        families=family_rows(records["accumulation"]["audit"]),
        probe=probe_rows(records["accumulation"]["audit"]),
        products=products,
        pictures=pictures,
        errors_picture=ERRORS_PICTURE,
        casts_picture=CASTS_PICTURE,
    )


# Pictures


def _figure(width: float, height: float) -> Any:
    """A figure whose file does not change from run to run."""
    if importlib.util.find_spec("matplotlib") is None:
        raise BackendUnavailable("pictures need matplotlib (extra `report`)")
    import matplotlib as mpl
    from matplotlib.figure import Figure

    mpl.rcParams["svg.hashsalt"] = "dosa"
    return Figure(figsize=(width, height), layout="constrained")


def _save(figure: Any, path: Path) -> None:
    figure.savefig(path, metadata={"Date": None})
    if path.suffix == ".svg":
        lines = path.read_text(encoding="utf-8").splitlines()
        path.write_text("\n".join(line.rstrip() for line in lines) + "\n", encoding="utf-8")


def draw_errors(audit: Record, path: Path) -> None:
    """Picture: for each family the share of dots whose error reaches a part of the proved bound.

    Raises:
        BackendUnavailable: matplotlib is not installed.
    """
    figure = _figure(8, 4.6)
    axes = figure.add_subplot()
    for errors in audit["errors"]:
        counts = errors["counts"]
        reached = [sum(counts[place:]) / max(errors["dots"], 1) for place in range(len(counts))]
        points = [(errors["first_log2"] + place, share) for place, share in enumerate(reached) if share > 0]
        if points:
            axes.plot(*zip(*points, strict=True), drawstyle="steps-post", label=errors["family"], linewidth=1.3)
    search = audit["search"]
    axes.axvline(0, color="black", linewidth=1.6, label="proved bound")
    axes.set_yscale("log")
    if search["tightness"] > 0:
        label = f"worst dot found: {search['tightness']:.4f} of it"
        place = (math.log2(search["tightness"]), axes.get_ylim()[0])
        axes.plot(*place, marker="*", color="red", markersize=11, linestyle="none", clip_on=False, label=label)
    axes.set_xlim(-26, 1)
    axes.set_xlabel("log2 of |computed - exact| / (D(q) ||k~||)")
    axes.set_ylabel("share of dots at or above")
    axes.set_title(f"Error of a computed dot against its proved bound ({audit['instructions'][0]['instruction']})")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7, loc="lower left")
    _save(figure, path)


def class_shares(part: Record, implementation: str, width: int) -> dict[str, list[float]]:
    """Per class the share of disagreeing bit patterns in each exponent of each sign.

    Args:
        part: a part of an FP8 audit whose inputs are the bit patterns of a format with 8 exponent bits, in order.
        implementation: whose disagreements.
        width: bits of the format.

    Returns:
        Class to 512 shares: negative numbers from the largest exponent down, then positive ones upward.
    """
    step = 1 << (width - 9)
    shares: dict[str, list[float]] = {}
    for item in part["disagreements"]:
        if item["implementation"] != implementation:
            continue
        first, last = (int(item[end]["bits"], 16) for end in ("first", "last"))
        row = shares.setdefault(item["kind"], [0.0] * 512)
        for cell in range(first // step, last // step + 1):
            inside = min(last, (cell + 1) * step - 1) - max(first, cell * step) + 1
            row[256 + cell if cell < 256 else 511 - cell] += inside / step
    return shares


def draw_casts(audit: Record, path: Path) -> None:
    """Picture: where, along the float32 and bfloat16 numbers, each cast disagrees with the reference, and how.

    Raises:
        BackendUnavailable: matplotlib is not installed.
    """
    parts = {part["name"]: part for part in audit["parts"]}
    rows = []
    for name, width in (("encode all float32 bit patterns", 32), ("encode all bfloat16", 16)):
        if name in parts:
            who = parts[name]["implementations"][1:]
            rows += [(f"{one}, {name.removeprefix('encode ')}", class_shares(parts[name], one, width)) for one in who]
    kinds = list(dict.fromkeys(kind for _, shares in rows for kind in shares))
    figure = _figure(9, 1.4 + 0.34 * max(len(rows), 1))
    from matplotlib.patches import Patch

    axes = figure.add_subplot()
    colours = {kind: f"C{place}" for place, kind in enumerate(kinds)}
    for place, (_, shares) in enumerate(rows):
        axes.broken_barh([(0, 512)], (place - 0.4, 0.8), facecolor="0.93")
        for kind, cells in shares.items():
            for share, group in itertools.groupby(range(512), key=cells.__getitem__):
                span = list(group)
                if share:
                    # A cell shows at least a hair line, however few of its patterns disagree.
                    height = 0.8 * max(min(share, 1.0), 0.08)
                    axes.broken_barh([(span[0], len(span))], (place - 0.4, height), facecolor=colours[kind])
    axes.set_yticks(range(len(rows)), [label for label, _ in rows], fontsize=7)
    axes.invert_yaxis()
    ticks = {0: "-Inf, NaN", 256 - 136: "-448", 256: "0", 256 + 136: "448", 511: "Inf, NaN"}
    axes.set_xticks(list(ticks), list(ticks.values()), fontsize=8)
    axes.set_xlim(0, 512)
    axes.set_xlabel("input, by sign and exponent")
    axes.set_title("Where casts to E4M3FN disagree with the saturating reference")
    axes.legend(
        handles=[Patch(color=colours[kind], label=kind) for kind in kinds], fontsize=8, loc="upper center", ncols=4
    )
    _save(figure, path)


def main(arguments: list[str]) -> None:
    """Write the page, and the pictures where matplotlib is installed.

    Args:
        arguments: folder of the records and the page.
    """
    if len(arguments) != 2:
        sys.exit(f"usage: {COMMAND}")
    folder, page = map(Path, arguments)
    try:
        records = read_records(folder)
        draw_errors(records["accumulation"]["audit"], folder / ERRORS_PICTURE)
        draw_casts(records["fp8"]["audit"], folder / CASTS_PICTURE)
        page.write_text(render(records, Path(os.path.relpath(folder, page.parent)).as_posix()), encoding="utf-8")
    except BackendUnavailable as error:
        sys.stderr.write(f"page: {error}\n")
        sys.exit(3)
    except (OSError, ValueError, DosaError) as error:
        sys.exit(f"page: {error}")


if __name__ == "__main__":
    main(sys.argv[1:])
