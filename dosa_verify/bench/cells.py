"""Cells of the benchmark and their results: one JSON line per cell and contestant (``dosa.bench/1``).

A file starts with a line ``dosa.bench_run/1``: what made it, where. Lines are written as they are measured, one layer
each; when the run ends, the lines of a cell and contestant become one, averaged over the layers. Both forms can be
read, alone or stitched from several files.
"""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dosa_ref.spec import InvalidProblem, Outcome
from dosa_verify.audit.evidence import plain

SCHEMA = "dosa.bench/1"
RUN_SCHEMA = "dosa.bench_run/1"

DOMAINS = ("en", "zh", "code")
NUM_KEYS = (131072, 262144, 524288, 786432, 1048576)
NUM_QUERIES = (4096, 8192, 16384, 32768)
NUM_HEADS = (32, 64)
LAYERS = (0, 6, 12, 17)

Key = tuple[object, ...]


def parse_size(text: str) -> int:
    """Read ``4096``, ``4K`` or ``1M`` (binary).

    Raises:
        InvalidProblem: no positive whole number.
    """
    unit = {"K": 2**10, "M": 2**20}.get(text[-1:].upper(), 1)
    digits = text[:-1] if unit > 1 else text
    if not (digits.isascii() and digits.isdigit() and 0 < len(digits) < 10 and int(digits)):
        raise InvalidProblem("size", repr(text)[:40], "a positive whole number, also with K or M")
    return int(digits) * unit


def format_size(size: int) -> str:
    """Write a size as ``128K`` or ``1M`` where it is a whole one."""
    for unit, letter in ((2**20, "M"), (2**10, "K")):
        if size % unit == 0:
            return f"{size // unit}{letter}"
    return str(size)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Times of one contestant in milliseconds."""

    median: float
    p10: float
    p90: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LayerResult:
    """One contestant on one cell of one layer.

    Attributes:
        layer: of the model that gave the inputs.
        ms: time of a call.
        runs: calls timed.
        taken: path that the call went; None for other libraries.
        prune_rate: 1 - rescored pairs / visible pairs.
        survivors: ``p50``, ``p99`` and ``max`` over the rows; None without a filter.
        fallback: reason to number of rows.
        workspace_bytes: measured peak of device memory beyond inputs and outputs.
        stated_workspace_bytes: what the call said of its buffers, or None.
        outcome: against our dense path, all rows; ``exact`` also needs that path to agree with dosa_ref.
        rows_checked: rows compared.
        differing_rows: rows with another set (or, of ours, another index or score bit).
        reference_rows: rows of the dense path that were compared with dosa_ref.
        stages_ms: time per stage, empty where stages are not told apart.
        sm_clock_mhz: median clock while the cell was timed, or None.
    """

    layer: int
    ms: Spread
    runs: int
    taken: str | None
    prune_rate: float
    survivors: Mapping[str, int] | None
    fallback: Mapping[str, int]
    workspace_bytes: int
    stated_workspace_bytes: int | None
    outcome: str
    rows_checked: int
    differing_rows: int
    reference_rows: int
    stages_ms: Mapping[str, float]
    sm_clock_mhz: int | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CellResult:
    """One contestant on one cell: layers side by side, and their mean.

    Attributes:
        domain: text of the trace, ``synthetic``, or the name of a trace file.
        num_heads, num_keys, num_queries, topk: size.
        path: of ours, ``score`` for the scorer alone, None for a peer.
        mode: savings of the path ``dosa``, None elsewhere.
        peer: ``scorer+top-K`` of other libraries, None for ours.
        scope: ``selection``, ``complete`` (with query and key preparation) or ``scores`` (scorer alone).
        data_independent: whether one domain and layer stand for all.
        by_layer: what was measured, in the order of the layers.
    """

    domain: str
    num_heads: int
    num_keys: int
    num_queries: int
    topk: int
    path: str | None
    mode: str | None
    peer: str | None
    scope: str
    data_independent: bool
    by_layer: tuple[LayerResult, ...]

    @property
    def key(self) -> Key:
        """What tells this cell and contestant from all others."""
        return (
            self.domain, self.num_heads, self.num_keys, self.num_queries, self.topk, self.path, self.mode, self.peer,
            self.scope,
        )  # fmt: skip

    @property
    def contestant(self) -> str:
        """The peer, the path, or ``dosa.<mode>``."""
        return self.peer or (f"{self.path}.{self.mode}" if self.mode else str(self.path))

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers averaged over."""
        return tuple(result.layer for result in self.by_layer)

    @property
    def equal_to_reference(self) -> bool:
        """Whether every layer's result was exact."""
        return all(result.outcome == Outcome.EXACT.value for result in self.by_layer)

    def only(self, layers: Iterable[int]) -> CellResult | None:
        """The same with some of the layers, None if one of them was not measured."""
        wanted = set(layers)
        kept = tuple(result for result in self.by_layer if result.layer in wanted)
        return dataclasses.replace(self, by_layer=kept) if {result.layer for result in kept} == wanted else None

    @property
    def ms(self) -> Spread:
        """Mean over the layers of each figure."""
        figures = {
            field.name: round(statistics.fmean(getattr(result.ms, field.name) for result in self.by_layer), 5)
            for field in dataclasses.fields(Spread)
        }
        return Spread(**figures)

    @property
    def prune_rate(self) -> float:
        """Mean over the layers."""
        return round(statistics.fmean(result.prune_rate for result in self.by_layer), 6)

    def to_json(self) -> dict[str, object]:
        """Return the line, schema ``dosa.bench/1``."""
        fields = dataclasses.asdict(self)
        by_layer = fields.pop("by_layer")
        record = {
            "schema": SCHEMA,
            **fields,
            "layers": self.layers,
            "ms": dataclasses.asdict(self.ms),
            "runs": min(result.runs for result in self.by_layer),
            "prune_rate": self.prune_rate,
            "fallback_rows": sum(sum(result.fallback.values()) for result in self.by_layer),
            "workspace_bytes": max(result.workspace_bytes for result in self.by_layer),
            "equal_to_reference": self.equal_to_reference,
            "by_layer": by_layer,
        }
        return plain(record)  # type: ignore[no-any-return]


def from_json(record: Mapping[str, Any]) -> CellResult:
    """Read a line back.

    Raises:
        InvalidProblem: another schema, or means that do not follow from the layers.
    """
    if record.get("schema") != SCHEMA:
        raise InvalidProblem("schema", repr(record.get("schema")), repr(SCHEMA))
    try:
        by_layer = tuple(LayerResult(**{**part, "ms": Spread(**part["ms"])}) for part in record["by_layer"])
        fields = {field.name: record[field.name] for field in dataclasses.fields(CellResult)}
        result = CellResult(**{**fields, "by_layer": by_layer})
    except (KeyError, TypeError) as error:
        raise InvalidProblem("line", str(error), f"the fields of {SCHEMA}") from error
    if not by_layer or result.to_json() != dict(record):
        raise InvalidProblem("line", f"{result.contestant} {result.key}", "means that follow from its layers")
    return result


def merge(results: Iterable[CellResult]) -> list[CellResult]:
    """Join the layers of each cell and contestant, in the order in which cells first appear.

    Raises:
        InvalidProblem: a layer was measured twice.
    """
    joined: dict[Key, CellResult] = {}
    for result in results:
        before = joined.get(result.key)
        if before is None:
            joined[result.key] = result
            continue
        twice = set(before.layers) & set(result.layers)
        if twice:
            raise InvalidProblem("cell", f"{result.contestant} {result.key}, layers {sorted(twice)} twice", "once")
        layers = sorted((*before.by_layer, *result.by_layer), key=lambda part: part.layer)
        joined[result.key] = dataclasses.replace(before, by_layer=tuple(layers))
    return list(joined.values())


def read(files: Sequence[Path]) -> tuple[list[dict[str, Any]], list[CellResult]]:
    """Read runs and stitch them.

    Returns:
        The run lines, one per file, and the merged cells.

    Raises:
        InvalidProblem: a foreign or damaged file, or a cell measured twice.
    """
    runs, results = [], []
    for file in files:
        lines = file.read_text(encoding="utf-8").splitlines()
        try:
            records = [json.loads(line) for line in lines]
        except json.JSONDecodeError as error:
            raise InvalidProblem("file", f"{file}: {error}", "JSON lines") from error
        if not records or records[0].get("schema") != RUN_SCHEMA:
            raise InvalidProblem("file", str(file), f"a first line {RUN_SCHEMA}")
        runs.append(records[0])
        results += [from_json(record) for record in records[1:]]
    return runs, merge(results)


def line(record: Mapping[str, object]) -> str:
    """One record as a line of text."""
    return json.dumps(record, ensure_ascii=False, allow_nan=False, separators=(",", ":")) + "\n"


def growth(points: Iterable[tuple[int, float]]) -> float | None:
    """Exponent ``a`` of ``time ~ size^a``: least squares on logarithms, None with fewer than two sizes."""
    pairs = [(math.log(size), math.log(time)) for size, time in points]
    if len({x for x, _ in pairs}) < 2:
        return None
    return statistics.linear_regression(*zip(*pairs, strict=True)).slope
