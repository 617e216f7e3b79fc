"""The page ``docs/pruning.md`` and its pictures, from records of :mod:`dosa_verify.pruning_study`.

No number in them is typed by hand.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import jinja2
import numpy as np

from dosa_ref.spec import BackendUnavailable
from dosa_verify.pruning_variants import ABLATION_COLUMNS, ABLATIONS, COLUMNS, FORMS, VARIANTS

LONG_SHARE: Final = 0.3
"""2048 of a million keys are 0.2 %; cases with less than this, in percent, stand for such a context."""

COLUMNS_PICTURE, LENGTHS_PICTURE = "pruning_columns.svg", "pruning_lengths.svg"
AIM_LAYERS: Final = (6, 12, 17)
AIM: Final = 5.0
"""Percent of the keys that may survive at a million keys."""
SEED_COST: Final = 2.0
"""Percent of a full scan that seeds may cost."""
SEED_RATIO: Final = 1.5
"""How many times the true share of the top K may reach a threshold."""


def page(records: Mapping[str, Mapping[str, Any]]) -> str:
    """The page as Markdown.

    Args:
        records: by the name of their files.
    """
    templates = jinja2.Environment(
        loader=jinja2.PackageLoader("dosa_verify"),
        undefined=jinja2.StrictUndefined,
        autoescape=False,  # noqa: S701 - the output is Markdown made from our own records
        trim_blocks=True,
        lstrip_blocks=True,
    )
    cases = [case for record in records.values() for case in record["cases"]]
    short = [case for case in cases if "indexer" not in case]
    main = main_records(records)
    long = [case for record in main for case in record["cases"]]
    longest = max((case["keys"] for case in long), default=0)
    own = [case for case in long if case["own"]]

    bounds = _bound_seeds([case for case in cases if case.get("own")])

    def at(num_heads: int, layer: int, keys: int) -> list[Mapping[str, Any]]:
        return [c for c in own if (c["num_heads"], c["layer"], c["keys"]) == (num_heads, layer, keys)]

    return templates.get_template("pruning.md.j2").render(
        records=records,
        traces=[case for case in short if not case["trace"].startswith("random_")],
        controls=[case for case in short if case["trace"].startswith("random_")],
        budgets=COLUMNS,
        ablation_columns=ABLATION_COLUMNS,
        ablations=list(ABLATIONS),
        ablations_published=[name for name in ABLATIONS if name.startswith("published")],
        ablations_recipe=[name for name in ABLATIONS if name.startswith("recipe")],
        forms=list(FORMS),
        targets=_targets(short),
        aim=_aim([case for case in own if case["keys"] == longest]),
        texts=[text for record in main for text in record["texts"]],
        own=own,
        at=at,
        longest=longest,
        shorter_rows=min((case["rows"] for case in own), default=0),
        layers=sorted({case["layer"] for case in own}),
        lengths=sorted({case["keys"] for case in long}),
        others=_others([case for case in long if not case["own"]]),
        pictures=(COLUMNS_PICTURE, LENGTHS_PICTURE),
        seeds=_seeds([case for case in own if case["layer"] in AIM_LAYERS]),
        seed_layers=[
            {**entry, "layer": layer}
            for layer in sorted({case["layer"] for case in own})
            for entry in _seeds([case for case in own if case["layer"] == layer and case["keys"] == longest])
            if entry["kernels"]
        ],
        guessed=any(entry["strategy"].startswith("guess") for case in own for entry in case["seeds"]),
        bounds=bounds,
        bound_worst=max((entry["seeds"]["4"]["worst"] for entry in bounds), default=None),
        bound_aim=all(b["seeds"]["4"]["ratio"] <= SEED_RATIO and b["seeds"]["4"]["cost"] <= SEED_COST for b in bounds),
        short_ratio=max(
            (
                entry["seeds"]["4"]["worst"]
                for case in short
                for entry in case.get("bound_seeds", ())
                if entry["columns"] == ABLATION_COLUMNS[case["num_heads"]] and not case["trace"].startswith("random_")
            ),
            default=None,
        ),
        seed_share=_seed_share,
        seed_cost=SEED_COST,
        seed_ratio=SEED_RATIO,
        mean=_mean,
        mean_of=_mean_of,
        worst=_worst,
        gain=_gain,
    )


def main_records(records: Mapping[str, Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The records of long traces with the longest pass; others show one thing only, and are not mixed with these."""
    reach = {name: max((case["keys"] for case in record["cases"] if case.get("own")), default=0)
             for name, record in records.items()}  # fmt: skip
    longest = max(reach.values(), default=0)
    return [record for name, record in records.items() if longest and reach[name] == longest]


def _mean(case: Mapping[str, Any], variant: str, columns: int) -> float:
    values = case["survivors"][variant][str(columns)]
    return float(np.mean(values))


def _mean_of(cases: Sequence[Mapping[str, Any]], variant: str, columns: int) -> float:
    """Mean over cases, each with the same weight."""
    return float(np.mean([_mean(case, variant, columns) for case in cases]))


def _seed_share(cases: Sequence[Mapping[str, Any]]) -> float:
    return float(np.mean([case["seed_share"] for case in cases]))


def _others(cases: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Cases of other indexers by number of heads, layer and kind."""
    found: dict[tuple[int, int, str], list[Mapping[str, Any]]] = {}
    for case in cases:
        indexer = case["indexer"]
        words = [] if indexer["seed"] == 0 else [f"seed {indexer['seed']}"]
        words += [] if indexer["steps"] else ["untrained"]
        words += ["Hadamard rotation"] if indexer["hadamard"] else []
        words += [] if indexer["pairs"] == "interleaved" else ["half-split pairs"]
        found.setdefault((case["num_heads"], case["layer"], ", ".join(words)), []).append(case)
    return [
        {"num_heads": num_heads, "layer": layer, "words": words, "cases": group}
        for (num_heads, layer, words), group in sorted(found.items())
    ]


def _worst(case: Mapping[str, Any], variant: str, columns: int) -> float:
    return float(max(case["survivors"][variant][str(columns)]))


def _targets(cases: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Mean survivors of the recipe where the top K is as small a share as 2048 of a million keys, layer 0 apart."""
    found = []
    for num_heads, columns in ABLATION_COLUMNS.items():
        fitting = [c for c in cases if c["num_heads"] == num_heads and c["top_share"] < LONG_SHARE]
        for first in (False, True):
            layer = [c for c in fitting if ("layer00" in c["trace"]) == first]
            if layer:
                kept = _mean_of(layer, "recipe", columns)
                names = sorted({f"{case['trace']} ({case['keys']:,} keys)" for case in layer})
                found.append({"num_heads": num_heads, "columns": columns, "traces": names, "survivors": kept})
    return found


def _aim(cases: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Survivors of the variants at the aim's columns, averaged over texts and the aim's layers, and of layer 0.

    Where the recipe misses the aim: the fewest columns with which it is reached, if any.
    """
    found = []
    for num_heads, columns in ABLATION_COLUMNS.items():
        for layers in (AIM_LAYERS, (0,)):
            some = [c for c in cases if c["num_heads"] == num_heads and c["layer"] in layers]
            if not some:
                continue
            means = {m: _mean_of(some, "recipe", m) for m in COLUMNS[num_heads]}
            slack = [case["slack"][str(columns)] for case in some]
            found.append(
                {
                    "num_heads": num_heads,
                    "columns": columns,
                    "layers": sorted({case["layer"] for case in some}),
                    "domains": sorted({case["domain"] for case in some}),
                    "cases": len(some),
                    "rows": sum(case["rows"] for case in some),
                    "seed_share": _seed_share(some),
                    "survivors": {name: _mean_of(some, name, columns) for name in VARIANTS},
                    "worst_case": max(_mean(case, "recipe", columns) for case in some),
                    "reached": means[columns] <= AIM,
                    "enough": next((m for m, kept in means.items() if kept <= AIM), None),
                    "best": min(means.values()),
                    "residual": float(np.mean([part["residual"] for part in slack])),
                    "dots": float(np.mean([part["dots"] for part in slack])),
                }
            )
    return found


def _seeds(cases: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Quality of the seeds by length and strategy: means over cases, and the largest ratio."""
    found = []
    for keys in sorted({case["keys"] for case in cases}):
        some = [case for case in cases if case["keys"] == keys]
        for name in dict.fromkeys(entry["strategy"] for case in some for entry in case["seeds"]):
            entries = [entry for case in some for entry in case["seeds"] if entry["strategy"] == name]
            found.append(
                {
                    "keys": keys,
                    "strategy": name,
                    "kernels": any(entry["kernels"] for entry in entries),
                    "cases": len(entries),
                    **{
                        field: float(np.mean([entry[field] for entry in entries]))
                        for field in ("cost", "reached", "ratio")
                    },
                    "worst": max(entry["worst"] for entry in entries),
                }
            )
    return found


def _bound_seeds(cases: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Cases whose thresholds from the bound were measured, at the aim's columns."""
    found: list[dict[str, Any]] = []
    for case in cases:
        columns = ABLATION_COLUMNS[case["num_heads"]]
        (kernels,) = [entry for entry in case["seeds"] if entry["kernels"]]
        more = {
            "case": case,
            "before": case["seed_share"] / case["top_share"],
            "recipe": _mean(case, "recipe", columns),
            "kernels": kernels,
        }
        found += [
            {**entry, **more, "second": entry["seeds"]["4"]["survivors"]}
            for entry in case.get("bound_seeds", ())
            if entry["columns"] == columns
        ]
    return found


def _gain(cases: Sequence[Mapping[str, Any]], over: str, variant: str, columns: int) -> float:
    """Geometric mean over cases of the survivors of one variant over another's, less 1, in percent."""
    ratios = [_mean(case, variant, columns) / _mean(case, over, columns) for case in cases]
    return 100.0 * float(np.exp(np.mean(np.log(ratios))) - 1)


def draw(records: Mapping[str, Mapping[str, Any]], folder: Path) -> None:
    """Draw the two pictures of the long traces: survivors by columns, and by length.

    Args:
        records: by the name of their files.
        folder: where the pictures go.

    Raises:
        BackendUnavailable: matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise BackendUnavailable("pictures need matplotlib (extra `report`)")
    import matplotlib as mpl
    from matplotlib.figure import Figure

    # The file must not change from run to run, and text stays text.
    mpl.rcParams |= {"svg.hashsalt": "dosa", "svg.fonttype": "none"}
    own = [case for record in main_records(records) for case in record["cases"] if case["own"]]
    longest = max(case["keys"] for case in own)
    lengths = sorted({case["keys"] for case in own})
    layers = sorted({case["layer"] for case in own})
    figures = {}
    for name in (COLUMNS_PICTURE, LENGTHS_PICTURE):
        figure = Figure(figsize=(9, 3.8), layout="constrained")
        panels = figure.subplots(1, len(COLUMNS), sharey=True)
        for axes, (num_heads, budgets) in zip(np.atleast_1d(panels), COLUMNS.items(), strict=True):
            columns = ABLATION_COLUMNS[num_heads]
            for place, layer in enumerate(layers):
                some = [case for case in own if case["num_heads"] == num_heads and case["layer"] == layer]
                if not some:
                    continue
                if name == COLUMNS_PICTURE:
                    here = [case for case in some if case["keys"] == longest]
                    for variant, style in (("published", ":"), ("recipe", "-")):
                        values = [_mean_of(here, variant, m) for m in budgets]
                        axes.plot(budgets, values, style, color=f"C{place}", label=f"layer {layer}, {variant}")
                else:
                    at = [[case for case in some if case["keys"] == keys] for keys in lengths]
                    values = [_mean_of(here, "recipe", columns) for here in at]
                    axes.plot(lengths, values, "-o", color=f"C{place}", label=f"layer {layer}, recipe")
                    reached = [_seed_share(here) for here in at]
                    axes.plot(lengths, reached, ":", color=f"C{place}", label=f"layer {layer}, at least tau")
            axes.axhline(AIM, color="black", linewidth=0.8)
            axes.set_yscale("log")
            axes.grid(alpha=0.3)
            if name == COLUMNS_PICTURE:
                axes.set_title(f"H = {num_heads}, {longest:,} keys")
                axes.set_xlabel("columns")
            else:
                axes.set_xscale("log", base=2)
                axes.set_title(f"H = {num_heads}, M = {columns}")
                axes.set_xlabel("keys")
        first = np.atleast_1d(panels)[0]
        first.set_ylabel("survivors, % of the keys, mean over texts")
        first.legend(fontsize=6, loc="upper right" if name == COLUMNS_PICTURE else "lower left")
        figures[name] = figure
    for name, figure in figures.items():
        path = folder / name
        figure.savefig(path, metadata={"Date": None})
        lines = path.read_text(encoding="utf-8").splitlines()
        path.write_text("\n".join(line.rstrip() for line in lines) + "\n", encoding="utf-8")
