"""The page ``docs/performance.md`` and its pictures, from files of ``dosa bench prefill``; no number typed by hand."""

from __future__ import annotations

import collections
import dataclasses
import importlib.util
import math
import os
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import jinja2

from dosa_gpu.plan import DEFAULT_WORKSPACE_BYTES
from dosa_ref.spec import BackendUnavailable, InvalidProblem, Mode, Outcome
from dosa_verify.bench import cells
from dosa_verify.bench.cells import CellResult, format_size, growth
from dosa_verify.bench.contestants import SCORE_PATH, SCORER
from dosa_verify.bench.prefill import COMPLETE, SCORES, SELECTION

SPEEDUP_PICTURE, TIME_PICTURE, STAGES_PICTURE = "bench_speedup.svg", "bench_time.svg", "bench_stages.svg"
STITCH_LIMIT = 0.03
"""Files whose calibration cells differ by more than this are not stitched."""
MILLION = 2**20
LATE_LAYERS = (6, 12, 17)
AUTO, DENSE, LITETOPK = "auto", "dense", "litetopk"
BOTH = f"dosa.{Mode.BOTH.value}"

Size = tuple[int, int, int]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """One line of what must be true.

    Attributes:
        text: the line.
        holds: whether the files show it, show that it is false, or (None) do not tell.
        figures: what they show.
    """

    text: str
    holds: bool | None
    figures: str

    @property
    def word(self) -> str:
        """The verdict."""
        return {True: "shown", False: "**not met**", None: "not in these files"}[self.holds]


class Results:
    """Results by scope, contestant and size, with the best peer of each size.

    Args:
        results: merged results.
    """

    def __init__(self, results: Sequence[CellResult]) -> None:
        self.all = list(results)
        self._places: dict[tuple[str, str, Size, str], CellResult] = {}
        for found in results:
            self._places[found.scope, found.contestant, self.size(found), found.domain] = found
        self.domains = sorted({found.domain for found in results}, key=_domain_order)

    @staticmethod
    def size(found: CellResult) -> Size:
        """Heads, keys, queries."""
        return found.num_heads, found.num_keys, found.num_queries

    def cells(self, scope: str, contestant: str) -> list[CellResult]:
        """All cells of a contestant, by heads, keys, queries, text."""
        found = [one for one in self.all if (one.scope, one.contestant) == (scope, contestant)]
        return sorted(found, key=lambda one: (*self.size(one), _domain_order(one.domain)))

    def contestants(self, scope: str) -> list[str]:
        """Names, in the order of the files."""
        return list(dict.fromkeys(one.contestant for one in self.all if one.scope == scope))

    def time(self, scope: str, contestant: str, size: Size, domain: str) -> CellResult | None:
        """A contestant on a cell; one whose time depends on the size alone may have been timed on another text."""
        own = self._places.get((scope, contestant, size, domain))
        if own is not None:
            return own
        others = [one for one in self.cells(scope, contestant) if one.data_independent and self.size(one) == size]
        # The fastest: what stands in for a measurement must not favour us.
        return min(others, key=lambda one: one.ms.median, default=None)

    def best_peer(self, scope: str, size: Size) -> CellResult | None:
        """The fastest peer of a size."""
        found = [one for one in self.all if one.scope == scope and one.peer and self.size(one) == size]
        return min(found, key=lambda one: one.ms.median, default=None)

    def ratios(self, slow: str, fast: str, scope: str = SELECTION) -> list[tuple[CellResult, float]]:
        """Per cell of ``fast``: how many times as long ``slow`` takes."""
        pairs = []
        for one in self.cells(scope, fast):
            other = self.time(scope, slow, self.size(one), one.domain)
            if other is not None:
                pairs.append((one, other.ms.median / one.ms.median))
        return pairs

    def speedups(self, scope: str = SELECTION, layers: Iterable[int] | None = None) -> list[tuple[CellResult, float]]:
        """Per cell of the automatic path: how many times as long the best peer takes.

        Args:
            scope: of the cells.
            layers: average over these only; cells without one of them are left out.
        """
        pairs = []
        for one in self.cells(scope, AUTO):
            peer = self.best_peer(scope, self.size(one))
            mine = one if layers is None else one.only(layers)
            if peer is not None and mine is not None:
                pairs.append((one, peer.ms.median / mine.ms.median))
        return pairs


def _domain_order(domain: str) -> tuple[int, str]:
    return (cells.DOMAINS.index(domain) if domain in cells.DOMAINS else len(cells.DOMAINS), domain)


def _place(found: CellResult) -> str:
    size = f"{format_size(found.num_queries)} x {format_size(found.num_keys)}"
    return f"{found.domain}, {size}, H = {found.num_heads}"


def _extremes(pairs: Sequence[tuple[CellResult, float]]) -> str:
    """Least and largest ratio, with their cells."""
    (low, least), (high, most) = (choose(pairs, key=lambda pair: pair[1]) for choose in (min, max))
    return f"{least:.2f}x ({_place(low)}) to {most:.2f}x ({_place(high)}) over {len(pairs)} cells"


def _grid(domains: Sequence[str] = cells.DOMAINS) -> int:
    return len(domains) * len(cells.NUM_KEYS) * len(cells.NUM_QUERIES) * len(cells.NUM_HEADS)


def claims(results: Results) -> list[Claim]:
    """What the speed issue demands, each line with what the files show."""
    return [
        _no_cell_slower(results),
        _geometric_mean(results),
        *(_at_a_million(results, heads, floor) for heads, floor in ((64, 2.4), (32, 2.0))),
        *_savings(results),
        _checked(results),
        _order(results, "`litetopk` faster than the dense path from 128K keys up", DENSE, LITETOPK,
               lambda one: one.num_keys >= cells.NUM_KEYS[0]),
        _dosa_before_litetopk(results),
        _scorer(results),
        _workspace(results),
    ]  # fmt: skip


def _learned(pairs: Iterable[tuple[CellResult, float]]) -> list[tuple[CellResult, float]]:
    """Without inputs that stand for no text."""
    return [pair for pair in pairs if pair[0].domain in cells.DOMAINS]


def _verdict(met: bool, complete: bool) -> bool | None:
    """A failure stands; success needs all cells."""
    return False if not met else (True if complete else None)


def _coverage(count: int) -> str:
    return "" if count == _grid() else f"; {count} of {_grid()} cells are here"


def _no_cell_slower(results: Results) -> Claim:
    text = "No cell more than 3 % slower than the best peer (automatic path)"
    pairs = _learned(results.speedups())
    if not pairs:
        return Claim(text=text, holds=None, figures="")
    met = min(ratio for _, ratio in pairs) >= 1 / 1.03
    holds = _verdict(met, len(pairs) == _grid())
    return Claim(text=text, holds=holds, figures=_extremes(pairs) + _coverage(len(pairs)))


def _geometric_mean(results: Results) -> Claim:
    text = "Geometric mean at least 1.8x over all cells"
    pairs = _learned(results.speedups())
    if not pairs:
        return Claim(text=text, holds=None, figures="")
    mean = statistics.geometric_mean(ratio for _, ratio in pairs)
    complete = len(pairs) == _grid()
    return Claim(text=text, holds=(mean >= 1.8) if complete else None, figures=f"{mean:.2f}x{_coverage(len(pairs))}")


def _at_a_million(results: Results, heads: int, floor: float) -> Claim:
    text = f"At 1M keys at least {floor}x for H = {heads} on layers 6, 12, 17"
    pairs = [
        pair
        for pair in _learned(results.speedups(layers=LATE_LAYERS))
        if pair[0].num_keys == MILLION and pair[0].num_heads == heads
    ]
    if not pairs:
        return Claim(text=text, holds=None, figures="")
    met = min(ratio for _, ratio in pairs) >= floor
    return Claim(
        text=text,
        holds=_verdict(met, len(pairs) == len(cells.DOMAINS) * len(cells.NUM_QUERIES)),
        figures=_extremes(pairs),
    )


def _savings(results: Results) -> list[Claim]:
    alone = []
    for mode in (Mode.PRUNE, Mode.EMIT):
        alone += results.ratios(f"dosa.{mode.value}", BOTH)
    first = "`both` beats `prune` and `emit` alone"
    second = "`both` beats `base` at least 1.90x at 1M keys"
    base = [pair for pair in results.ratios(f"dosa.{Mode.BASE.value}", BOTH) if pair[0].num_keys == MILLION]
    return [
        Claim(
            text=first,
            holds=min(ratio for _, ratio in alone) > 1 if alone else None,
            figures=_extremes(alone) if alone else "",
        ),
        Claim(
            text=second,
            holds=min(ratio for _, ratio in base) >= 1.9 if base else None,
            figures=_extremes(base) if base else "",
        ),
    ]


def _checked(results: Results) -> Claim:
    parts = [part for one in results.all if one.scope != SCORES and one.peer is None for part in one.by_layer]
    text = "All rows of every cell equal to the dense path, at least 4 rows of it to dosa_ref"
    if not parts:
        return Claim(text=text, holds=None, figures="")
    wrong = sum(part.outcome != Outcome.EXACT.value for part in parts)
    rows, least = sum(part.rows_checked for part in parts), min(part.reference_rows for part in parts)
    figures = (
        f"{wrong} wrong of {len(parts)} results, {rows:,} rows compared, at least {least} rows by dosa_ref in each"
    )
    return Claim(text=text, holds=wrong == 0 and least >= 4, figures=figures)


def _order(
    results: Results, text: str, slow: str, fast: str, wanted: Callable[[CellResult], bool], pairs: Any = None
) -> Claim:
    pairs = [pair for pair in (results.ratios(slow, fast) if pairs is None else pairs) if wanted(pair[0])]
    if not pairs:
        return Claim(text=text, holds=None, figures="")
    return Claim(text=text, holds=min(ratio for _, ratio in pairs) > 1, figures=_extremes(pairs))


def _dosa_before_litetopk(results: Results) -> Claim:
    text = "`dosa` faster than `litetopk` in every cell where at least 90 % is pruned"
    fast = BOTH if results.cells(SELECTION, BOTH) else AUTO
    return _order(results, text, LITETOPK, fast, lambda one: one.prune_rate >= 0.9)


def _scorer(results: Results) -> Claim:
    text = "Full scorer at most 1.05x DeepGEMM's time, with equal bits"
    ours = results.cells(SCORES, SCORE_PATH)
    pairs = [(one, results.time(SCORES, SCORER, results.size(one), one.domain)) for one in ours]
    ratios = [(one, one.ms.median / other.ms.median) for one, other in pairs if other is not None]
    if not ratios:
        return Claim(text=text, holds=None, figures="")
    equal = all(one.equal_to_reference for one, _ in ratios)
    holds = equal and max(ratio for _, ratio in ratios) <= 1.05
    return Claim(text=text, holds=holds, figures=f"{_extremes(ratios)}; bits {'equal' if equal else 'differ'}")


def _workspace(results: Results) -> Claim:
    text = "Workspace at 1M keys at most 2 GiB, never above what was allowed"
    own = [one for one in results.all if one.peer is None and one.scope == SELECTION and one.num_keys == MILLION]
    parts = [part for one in own for part in one.by_layer]
    if not parts:
        return Claim(text=text, holds=None, figures="")
    most = max(part.workspace_bytes for part in parts)
    figures = f"measured peak {most / 2**30:.2f} GiB beyond inputs and outputs"
    return Claim(text=text, holds=most <= DEFAULT_WORKSPACE_BYTES, figures=figures)


def calibration_spread(runs: Sequence[dict[str, Any]]) -> float | None:
    """Largest difference of the files' calibration cells, as a share; None for one file.

    Raises:
        InvalidProblem: a file of several has no calibration, or they differ by more than `STITCH_LIMIT`.
    """
    if len(runs) < 2:
        return None
    times = [run["calibration_ms"]["median"] if run["calibration_ms"] else None for run in runs]
    known = [time for time in times if time is not None]
    if len(known) < len(times):
        raise InvalidProblem("files", "one without a calibration cell", "`dosa bench prefill --calibration` in each")
    off = max(known) / min(known) - 1
    if off > STITCH_LIMIT:
        raise InvalidProblem(
            "files", f"calibration cells {100 * off:.1f} % apart", f"at most {100 * STITCH_LIMIT:.0f} %: run them again"
        )
    return float(off)


def exponents(results: Results) -> list[dict[str, Any]]:
    """Growth of time per contestant and heads: over keys at 16K queries (or the most), over queries at most keys."""
    rows = []
    for contestant in results.contestants(SELECTION):
        found = results.cells(SELECTION, contestant)
        for heads in sorted({one.num_heads for one in found}):
            mine = [one for one in found if one.num_heads == heads]
            queries = sorted({one.num_queries for one in mine})
            at = 16384 if 16384 in queries else queries[-1]
            most = max(one.num_keys for one in mine)
            over_keys = growth((one.num_keys, one.ms.median) for one in mine if one.num_queries == at)
            over_queries = growth((one.num_queries, one.ms.median) for one in mine if one.num_keys == most)
            if over_keys is not None or over_queries is not None:
                rows.append(
                    {
                        "contestant": contestant,
                        "heads": heads,
                        "queries": format_size(at),
                        "over_keys": over_keys,
                        "length": format_size(most),
                        "over_queries": over_queries,
                    }
                )
    return rows


def render(runs: Sequence[dict[str, Any]], results: Results, files: Sequence[Path], pictures: str, page: str) -> str:
    """Return the page.

    Args:
        runs: first lines of the files.
        results: their cells.
        files: their names.
        pictures: path from the page to the folder of the pictures.
        page: the page's own path, for the command.
    """
    templates = jinja2.Environment(
        loader=jinja2.PackageLoader("dosa_verify"),
        undefined=jinja2.StrictUndefined,
        autoescape=False,  # noqa: S701 - the output is Markdown made from our own records
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters["size"] = format_size
    templates.filters["gib"] = lambda count: f"{count / 2**30:.2f}"
    scopes = [scope for scope in (SELECTION, COMPLETE, SCORES) if results.contestants(scope)]
    return templates.get_template("performance.md.j2").render(
        command=f"dosa bench page {' '.join(file.as_posix() for file in files)} --out {page}",
        runs=list(zip(files, runs, strict=True)),
        spread=calibration_spread(runs),
        claims=claims(results),
        scopes=scopes,
        results=results,
        speedups={scope: results.speedups(scope) for scope in scopes},
        exponents=exponents(results),
        staged=[one for one in results.cells(SELECTION, AUTO) if one.by_layer[0].stages_ms],
        stages=stages,
        synthetic=[domain for domain in results.domains if domain not in cells.DOMAINS],
        pictures=pictures,
        picture_names=(SPEEDUP_PICTURE, TIME_PICTURE, STAGES_PICTURE),
    )


def stages(found: CellResult) -> dict[str, float]:
    """Mean time of each stage over the layers; a layer without the stage counts 0."""
    total: dict[str, float] = collections.defaultdict(float)
    for part in found.by_layer:
        for name, time in part.stages_ms.items():
            total[name] += time / len(found.by_layer)
    return dict(total)


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
    lines = path.read_text(encoding="utf-8").splitlines()
    path.write_text("\n".join(line.rstrip() for line in lines) + "\n", encoding="utf-8")


def _key_axis(axes: Any, sizes: Iterable[int]) -> None:
    ticks = sorted(set(sizes))
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [format_size(tick) for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel("keys")
    axes.grid(alpha=0.3)


def draw_speedup(results: Results, path: Path) -> None:
    """Picture: times of the best peer over ours, per text and number of heads; a band spans the numbers of queries.

    Raises:
        BackendUnavailable: matplotlib is not installed.
    """
    pairs = results.speedups()
    heads = sorted({one.num_heads for one, _ in pairs})
    figure = _figure(4.2 * max(len(heads), 1), 3.6)
    for place, count in enumerate(heads):
        axes = figure.add_subplot(1, len(heads), place + 1)
        for domain in results.domains:
            by_keys: dict[int, list[float]] = collections.defaultdict(list)
            for one, ratio in pairs:
                if (one.num_heads, one.domain) == (count, domain):
                    by_keys[one.num_keys].append(ratio)
            if by_keys:
                keys = sorted(by_keys)
                [line] = axes.plot(keys, [statistics.geometric_mean(by_keys[k]) for k in keys], "o-", label=domain)
                low, high = ([choose(by_keys[k]) for k in keys] for choose in (min, max))
                axes.fill_between(keys, low, high, color=line.get_color(), alpha=0.15)
        axes.axhline(1, color="black", linewidth=1)
        axes.set_ylim(bottom=0)
        axes.set_title(f"H = {count}")
        axes.set_ylabel("best peer's time / automatic path's")
        _key_axis(axes, (one.num_keys for one, _ in pairs))
        axes.legend(fontsize=8)
    _save(figure, path)


def draw_time(results: Results, path: Path) -> None:
    """Picture: time over keys, every contestant, at 16K queries or the most; a bar spans the 10th to 90th percentile.

    Raises:
        BackendUnavailable: matplotlib is not installed.
    """
    found = [one for one in results.all if one.scope == SELECTION]
    heads = sorted({one.num_heads for one in found})
    queries = {one.num_queries for one in found}
    at = 16384 if 16384 in queries else max(queries, default=0)
    figure = _figure(4.2 * max(len(heads), 1), 3.8)
    for place, count in enumerate(heads):
        axes = figure.add_subplot(1, len(heads), place + 1)
        for name in results.contestants(SELECTION):
            mine = [one for one in results.cells(SELECTION, name) if (one.num_heads, one.num_queries) == (count, at)]
            keys = sorted({one.num_keys for one in mine})
            if not keys:
                continue
            groups = [[one.ms for one in mine if one.num_keys == key] for key in keys]
            middle = [statistics.fmean(ms.median for ms in group) for group in groups]
            low = [y - min(ms.p10 for ms in group) for y, group in zip(middle, groups, strict=True)]
            high = [max(ms.p90 for ms in group) - y for y, group in zip(middle, groups, strict=True)]
            axes.errorbar(keys, middle, yerr=[_positive(low), _positive(high)], marker="o", markersize=3, label=name)
        axes.set_yscale("log")
        axes.set_title(f"{format_size(at)} queries, H = {count}")
        axes.set_ylabel("ms, mean of texts")
        _key_axis(axes, (one.num_keys for one in found))
        axes.legend(fontsize=7)
    _save(figure, path)


def _positive(values: Iterable[float]) -> list[float]:
    return [max(value, 0.0) for value in values]


def draw_stages(results: Results, path: Path) -> None:
    """Picture: where the automatic path's time goes, at 16K queries or the most, per length and heads.

    Raises:
        BackendUnavailable: matplotlib is not installed.
    """
    found = [one for one in results.cells(SELECTION, AUTO) if one.by_layer[0].stages_ms]
    queries = {one.num_queries for one in found}
    at = 16384 if 16384 in queries else max(queries, default=0)
    found = [one for one in found if one.num_queries == at]
    names = list(dict.fromkeys(name for one in found for name in stages(one)))
    figure = _figure(8, 1.6 + 0.22 * max(len(found), 1))
    axes = figure.add_subplot()
    left = [0.0] * len(found)
    for name in names:
        share = [stages(one).get(name, 0.0) / max(math.fsum(stages(one).values()), 1e-9) for one in found]
        axes.barh(range(len(found)), share, left=left, label=name)
        left = [a + b for a, b in zip(left, share, strict=True)]
    axes.set_yticks(range(len(found)), [_place(one) for one in found], fontsize=7)
    axes.invert_yaxis()
    axes.set_xlim(0, 1)
    axes.set_xlabel("share of the call's time")
    if names:
        figure.legend(fontsize=7, ncols=5, loc="outside lower center")
    _save(figure, path)


def write(files: Sequence[Path], page: Path) -> list[Path]:
    """Write the page, and its pictures beside the first file.

    Args:
        files: of ``dosa bench prefill``.
        page: the page.

    Returns:
        The files written.

    Raises:
        InvalidProblem: a damaged file, or files that cannot be stitched.
        BackendUnavailable: matplotlib is not installed.
    """
    runs, found = cells.read(files)
    results = Results(found)
    folder = files[0].parent
    text = render(runs, results, files, Path(os.path.relpath(folder, page.parent)).as_posix(), page.as_posix())
    pictures = ((SPEEDUP_PICTURE, draw_speedup), (TIME_PICTURE, draw_time), (STAGES_PICTURE, draw_stages))
    for name, draw in pictures:
        draw(results, folder / name)
    page.write_text(text, encoding="utf-8")
    return [page, *(folder / name for name, _ in pictures)]
