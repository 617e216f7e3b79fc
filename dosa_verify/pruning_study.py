"""How much the bound prunes: its recipe, the published one and ablations of both, at equal numbers of columns.

::

    python -m dosa_verify.pruning_study --traces DIR --topk 256 --topk 2048 --out docs/evidence/pruning_traces.json
    python -m dosa_verify.pruning_study --page docs/pruning.md --out RECORD [--out RECORD ...]

The first form measures all traces of a folder, and random controls (schema ``dosa.pruning_study/1``); the second
renders the page from records. Rounding to FP8 and the guard of ``docs/bound.md`` are in every bound, so that every
variant is one that could prune. ``tau`` is the K-th best score among the winners of the eight rows before. Dots are
float32 sums of exact products, which differ from the tensor core's by less than the guard.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import jinja2
import numpy as np
import numpy.typing as npt
from scipy.optimize import nnls

from dosa_ref.bound import RowBound, build_row_bound, key_norms, round_bound, row_within_magnitude
from dosa_ref.formats import encode_e4m3_array
from dosa_ref.guard import BoundCertificate, GuardTerms, dot_error, e4m3_float64
from dosa_ref.problem import PrefillProblem
from dosa_ref.trace import load_trace
from dosa_verify.environment import environment

SCHEMA: Final = "dosa.pruning_study/1"
COLUMNS: Final = {32: (8, 12, 16, 20, 24), 64: (8, 12, 16, 20, 24, 32)}
"""Column budgets by head count."""
NEIGHBOURS: Final = 8
"""Rows whose winners are the seeds of the next one."""
ROW_STEP: Final = 5
HALF_SAMPLE: Final = 32
"""So many seeds below ``tau``, and so many keys of the window, steer the choice of columns."""
ACTIVE_SHARE: Final = 0.5
"""The published recipe aggregates negative heads that are active on this share of the winners."""
ABLATION_COLUMNS: Final = {32: 12, 64: 20}
CONTROL_KEYS: Final = 16384
LONG_SHARE: Final = 0.3
"""2048 of a million keys are 0.2 %; cases with less than this, in percent, stand for such a context."""
SHARED: Final = ((64, 32), (128, 64))
"""Shared vectors, and the rows of the block that shares them."""

Floats = npt.NDArray[np.float64]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One query row and what a recipe may know of it.

    Attributes:
        q: E4M3 ``[H, 128]``.
        w: float32 ``[H]``.
        sample: E4M3 ``[n, 128]``, seeds below ``tau`` and keys spread over the window.
        winners: E4M3 ``[n, 128]``, some of the K best seeds.
    """

    q: npt.NDArray[Any]
    w: npt.NDArray[np.float32]
    sample: npt.NDArray[Any]
    winners: npt.NDArray[Any]


# ---------------------------------------------------------------------------------------------------------------------
# Variants: each makes a bound of at most M columns


def published(
    row: Row,
    columns: int,
    *,
    negatives: str = "active",
    projected: bool = True,
    geometry: bool = True,
    centred: bool = False,
) -> RowBound:
    """The published recipe: heads by ``|w| ||q||``, one relu aggregate, what is left of the budget to negative heads.

    Args:
        row: the row.
        columns: M.
        negatives: which negative heads are aggregated: ``active`` on half of the winners, ``all`` or ``none``.
        projected: project omitted positive heads on the retained ones.
        geometry: take the residual's root over inner products; else the sum of the residuals' norms.
        centred: spend a column on the linear half of the residual (not published).
    """
    x, w = e4m3_float64(row.q), row.w.astype(np.float64)
    active = (x @ e4m3_float64(row.winners).T > 0).mean(axis=1)
    strength = np.abs(w) * np.linalg.norm(x, axis=1)
    positive = [h for h in np.argsort(-strength, kind="stable").tolist() if w[h] > 0]
    negative = [h for h in np.argsort(-strength * active, kind="stable").tolist() if w[h] < 0]
    if len(positive) + len(negative) <= columns:
        return _bound(row, positive + negative, [], None, projected)
    wanted = {"active": [h for h in negative if active[h] >= ACTIVE_SHARE], "all": negative, "none": []}[negatives]
    room = columns - bool(wanted)
    if len(positive) <= room:
        spare = negative[: room - len(positive)] if negatives != "none" else []
        return _bound(row, positive + spare, [h for h in wanted if h not in spare], None, projected)
    bound = _bound(row, positive[: room - centred], wanted, [] if centred else None, projected)
    if geometry:
        return bound
    return _with_residual(bound, float(np.linalg.norm(_residuals(row, bound), axis=1).sum()))


def recipe(row: Row, columns: int) -> RowBound:
    """The recipe of ``docs/bound.md``."""
    return build_row_bound(row.q, row.w, columns, row.sample)


def _without_projection(row: Row, columns: int) -> RowBound:
    bound = recipe(row, columns)
    projection = np.zeros_like(bound.certificate.projection)
    return round_bound(row.q, row.w, bound.linear, dataclasses.replace(bound.certificate, projection=projection))


def _without_price(row: Row, columns: int) -> RowBound:
    certificate = recipe(row, columns).certificate
    heads = [h for h in certificate.retained.tolist() if h >= 0]
    linear = np.flatnonzero(certificate.aggregate.sum(axis=0)).tolist()
    return _bound(row, heads, [], linear if len(heads) < len(certificate.retained) else None, True)


def _by_strength(row: Row, columns: int) -> RowBound:
    certificate = recipe(row, columns).certificate
    heads = [h for h in certificate.retained.tolist() if h >= 0]
    if len(heads) == len(certificate.retained):
        return recipe(row, columns)
    strength = row.w.astype(np.float64) * np.linalg.norm(e4m3_float64(row.q), axis=1)
    kept = sum(row.w[h] > 0 for h in heads)
    heads = np.argsort(-strength, kind="stable")[:kept].tolist() + [h for h in heads if row.w[h] < 0]
    return _bound(row, heads, [], np.flatnonzero(certificate.aggregate.sum(axis=0)).tolist(), True)


def _positive_only(row: Row, columns: int) -> RowBound:
    bound = recipe(row, columns)
    heads = [h for h in bound.certificate.retained.tolist() if h >= 0 and row.w[h] > 0]
    return _bound(row, heads, [], [] if bound.linear.any() else None, True)


def _never_linear(row: Row, columns: int) -> RowBound:
    bound = recipe(row, columns)
    certificate = dataclasses.replace(bound.certificate, aggregate=np.zeros_like(bound.certificate.aggregate))
    return round_bound(row.q, row.w, bound.linear, certificate)


def _apart(row: Row, columns: int) -> RowBound:
    bound = recipe(row, columns)
    if not bound.linear.any():
        return bound
    halves = _residuals(row, bound) / 2
    vector = halves.sum(axis=0) - bound.certificate.aggregate[-1] @ e4m3_float64(row.q)
    error = vector - float(bound.coefficients[-1]) * e4m3_float64(bound.columns[-1])
    apart = np.sqrt(np.abs(halves @ halves.T).sum()) + np.linalg.norm(error)
    return _with_residual(bound, float(apart))


def _each_dot(row: Row, columns: int) -> RowBound:
    bound = recipe(row, columns)
    certificate = bound.certificate
    w = np.where(row.w > 0, row.w, 0.0)
    w[[h for h in certificate.retained.tolist() if h >= 0]] = 0.0
    heads = (w + certificate.aggregate.sum(axis=0)) @ dot_error(row.q)
    factors = np.where(certificate.retained >= 0, w @ certificate.projection, np.abs(bound.coefficients))
    terms = dataclasses.replace(bound.terms, dots=float(heads + factors @ dot_error(bound.columns)))
    return dataclasses.replace(bound, terms=terms, slack=terms.slack())


VARIANTS: Final[Mapping[str, Callable[[Row, int], RowBound]]] = {
    "published": published,
    "published, centred": lambda row, columns: published(row, columns, centred=True),
    "recipe": recipe,
}
ABLATIONS: Final[Mapping[str, Callable[[Row, int], RowBound]]] = {
    "published: no aggregate": lambda row, columns: published(row, columns, negatives="none"),
    "published: all negative heads aggregated": lambda row, columns: published(row, columns, negatives="all"),
    "published: no residual geometry": lambda row, columns: published(row, columns, geometry=False),
    "published: no projection": lambda row, columns: published(row, columns, projected=False),
    "recipe: negative heads count 0": _positive_only,
    "recipe: no negative head in the linear column": _never_linear,
    "recipe: no projection": _without_projection,
    "recipe: multipliers without a price": _without_price,
    "recipe: positive heads by weight and norm": _by_strength,
    "recipe: rounding beside the root": _apart,
    "recipe: every dot's own error": _each_dot,
    "recipe: winners as the sample": lambda row, columns: build_row_bound(row.q, row.w, columns, row.winners),
    "recipe: no sample": lambda row, columns: build_row_bound(row.q, row.w, columns),
}


def _bound(row: Row, retained: list[int], relu: list[int], linear: list[int] | None, projected: bool) -> RowBound:
    """Retained heads, negative heads in a relu column (if any) and in a linear column (if any column)."""
    x, heads = e4m3_float64(row.q), len(retained)
    size = max(heads + bool(relu) + (linear is not None), 1)
    projection, aggregate, flags = np.zeros((len(x), size)), np.zeros((size, len(x))), np.zeros(size, np.bool_)
    for g in np.flatnonzero(row.w > 0).tolist():
        if projected and heads and g not in retained:
            projection[g, :heads] = nnls(x[retained].T, x[g])[0]
    if relu:
        aggregate[heads, relu] = -row.w[relu].astype(np.float64)
    if linear is not None:
        aggregate[-1, linear], flags[-1] = -row.w[linear].astype(np.float64), True
    places = np.array([*retained, *[-1] * (size - heads)], np.int64)
    return round_bound(
        row.q, row.w, flags, BoundCertificate(retained=places, projection=projection, aggregate=aggregate)
    )


def _residuals(row: Row, bound: RowBound) -> Floats:
    """``w_g r_g`` of the omitted positive heads, ``[n, 128]``."""
    x, certificate = e4m3_float64(row.q), bound.certificate
    omitted = (row.w > 0) & ~np.isin(np.arange(len(x)), certificate.retained)
    rest = x[omitted] - certificate.projection[omitted] @ e4m3_float64(bound.columns)
    return np.asarray(row.w[omitted, None] * rest)


def _with_residual(bound: RowBound, residual: float) -> RowBound:
    terms = dataclasses.replace(bound.terms, residual=residual)
    return dataclasses.replace(bound, terms=terms, slack=terms.slack())


# ---------------------------------------------------------------------------------------------------------------------
# Measuring


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One row of a trace under one K: its place and ``tau``, its visible keys and what is known of them."""

    place: int
    row: Row
    tau: float
    seed_share: float
    keys: npt.NDArray[np.float32]
    norm: npt.NDArray[np.float32]
    scale: npt.NDArray[np.float32]

    def survivors(self, columns: Floats, coefficients: Floats, linear: npt.NDArray[np.bool_], slack: float) -> float:
        """Share of the visible keys that the bound keeps, in percent."""
        dot = self.keys @ columns.astype(np.float32).T
        psi = np.where(linear, dot, np.maximum(dot, 0))
        upper = self.scale * (psi @ coefficients.astype(np.float32) + np.float32(slack) * self.norm)
        return 100.0 * float((~(upper < self.tau)).mean())


def tasks_of(problem: PrefillProblem, topk: int) -> list[Task]:
    """Every ``ROW_STEP``-th row that has eight rows before it and more than ``topk`` visible keys."""
    keys = e4m3_float64(problem.k).astype(np.float32)
    norms = key_norms(problem.k, problem.k_scale)

    def scores(row: int) -> npt.NDArray[np.float32]:
        dots = keys @ e4m3_float64(problem.q[row]).astype(np.float32).T
        found = (np.maximum(dots, 0) @ problem.weights[row]) * problem.k_scale
        ks, ke = problem.window(row)
        outside = np.ones(len(keys), np.bool_)
        outside[ks:ke] = False
        return np.where(outside, -np.inf, found).astype(np.float32)

    winners: dict[int, npt.NDArray[np.int64]] = {}
    tasks = []
    for row in range(NEIGHBOURS, problem.seq_len, ROW_STEP):
        ks, ke = problem.window(row)
        if ke - ks <= topk:
            continue
        for earlier in range(row - NEIGHBOURS, row):
            if earlier not in winners:
                winners[earlier] = np.argpartition(-scores(earlier), topk)[:topk]
        own = scores(row)
        seeds = np.unique(np.concatenate([winners[r] for r in range(row - NEIGHBOURS, row)]))
        seeds = seeds[np.argsort(-own[seeds], kind="stable")]
        tau = float(own[seeds[topk - 1]])
        below = seeds[topk:] if len(seeds) > topk else seeds
        spread = np.linspace(ks, ke - 1, HALF_SAMPLE).astype(np.int64)
        some = np.linspace(0, len(below) - 1, HALF_SAMPLE).astype(np.int64)
        best = seeds[np.linspace(0, topk - 1, 2 * HALF_SAMPLE).astype(np.int64)]
        tasks.append(
            Task(
                place=row,
                row=Row(
                    q=problem.q[row],
                    w=problem.weights[row],
                    sample=problem.k[np.concatenate([below[some], spread])],
                    winners=problem.k[best],
                ),
                tau=tau,
                seed_share=100.0 * float((own[ks:ke] >= tau).mean()),
                keys=keys[ks:ke],
                norm=norms[ks:ke],
                scale=problem.k_scale[ks:ke],
            )
        )
    return tasks


def measure(problem: PrefillProblem, topk: int) -> dict[str, Any]:
    """One trace under one K: survivors in percent by variant and columns, row by row, and the parts of the slack."""
    tasks = tasks_of(problem, topk)
    budgets = COLUMNS[problem.num_heads]
    found: dict[str, dict[str, list[float]]] = {}
    parts: dict[str, dict[str, float]] = {}

    def kept(task: Task, bound: RowBound) -> float:
        if not row_within_magnitude(task.row.q, task.row.w, bound):
            return 100.0
        columns = e4m3_float64(bound.columns)
        return task.survivors(columns, bound.coefficients.astype(np.float64), bound.linear, float(bound.slack))

    for name, make in [*VARIANTS.items(), *ABLATIONS.items()]:
        for columns in budgets if name in VARIANTS else (ABLATION_COLUMNS[problem.num_heads],):
            bounds = [make(task.row, columns) for task in tasks]
            survivors = [round(kept(task, bound), 3) for task, bound in zip(tasks, bounds, strict=True)]
            found.setdefault(name, {})[str(columns)] = survivors
            if name == "recipe":
                parts[str(columns)] = _shares([bound.terms for bound in bounds])
    return {
        "topk": topk,
        "top_share": round(100.0 * topk * len(tasks) / sum(len(task.keys) for task in tasks), 4),
        "seed_share": round(float(np.mean([task.seed_share for task in tasks])), 4),
        "positive_tau": round(float(np.mean([task.tau > 0 for task in tasks])), 4),
        "rows": len(tasks),
        "survivors": found,
        "slack": parts,
        "shared": [shared_survivors(problem, tasks, size, block) for size, block in SHARED],
    }


def _shares(terms: Sequence[GuardTerms]) -> dict[str, float]:
    """Mean share of residual, dots and float32 chains in the slack."""
    residual, dot = (float(np.mean([getattr(t, name) / t.total() for t in terms])) for name in ("residual", "dots"))
    return {"residual": round(residual, 4), "dots": round(dot, 4), "rest": round(1 - residual - dot, 4)}


# ---------------------------------------------------------------------------------------------------------------------
# A form that was tried and did not pay: relu columns shared by a block of rows


def shared_survivors(problem: PrefillProblem, tasks: Sequence[Task], size: int, block: int) -> dict[str, Any]:
    """Relu columns that a block of rows shares, one linear column for each row.

    ``size`` FP8 vectors are the weighted cluster centres of the block's positive heads. Every positive head is
    projected on them (a second matrix product applies the coefficients, with relu values rounded to float16); a
    negative head counts linearly or 0. The price is ``size / block + size / 64 + 1`` columns per row: products, float16
    product, own column.

    Args:
        problem: the trace.
        tasks: the rows that are measured.
        size: shared vectors.
        block: rows that share them.

    Returns:
        Survivors in percent and the price in columns.
    """
    survivors: list[float] = []
    for start in range(0, problem.seq_len, block):
        some = [task for task in tasks if start <= task.place < start + block]
        w_block, q_block = problem.weights[start : start + block], e4m3_float64(problem.q[start : start + block])
        weighted = (w_block[..., None] * q_block)[w_block > 0]
        shared = encode_e4m3_array((256 * _centres(weighted, size)).astype(np.float32))
        vectors = e4m3_float64(shared)
        for task in some:
            x, w = e4m3_float64(task.row.q), task.row.w.astype(np.float64)
            positive = np.flatnonzero(w > 0)
            shares = np.zeros((len(w), len(vectors)))
            for g in positive:
                shares[g] = nnls(vectors.T, x[g])[0]
            residuals = w[positive, None] * (x[positive] - shares[positive] @ vectors)
            dot = x @ e4m3_float64(task.row.sample).T
            linear = np.where((w < 0) & (dot.mean(axis=1) > 0), -w, 0.0)
            vector = residuals.sum(axis=0) / 2 - linear @ x
            unit = float(np.abs(vector).max() / 448 or 1.0)
            own = encode_e4m3_array((vector / unit).astype(np.float32))
            rest = np.concatenate([residuals / 2, (vector - unit * e4m3_float64(own))[None]])
            factors = w[positive] @ shares[positive]
            error = dot_error(task.row.q)
            slack = np.sqrt(np.abs(rest @ rest.T).sum()) + (np.maximum(w, 0) + linear) @ error
            slack += factors @ (dot_error(shared) + 2.0**-10 * np.linalg.norm(vectors, axis=1))
            slack += unit * float(dot_error(own))
            columns = np.concatenate([vectors, e4m3_float64(own)[None]])
            flags = np.arange(len(columns)) == len(vectors)
            survivors.append(task.survivors(columns, np.append(factors, unit), flags, float(slack)))
    return {
        "vectors": size,
        "rows": block,
        "price": size / block + size / 64 + 1,
        "survivors": round(float(np.mean(survivors)), 3),
    }


def _centres(vectors: Floats, count: int, rounds: int = 10) -> Floats:
    """Unit centres of a spherical clustering that weighs vectors by their norms."""
    norms = np.linalg.norm(vectors, axis=1)
    vectors, norms = vectors[norms > 0], norms[norms > 0]
    unit = vectors / norms[:, None]
    centres = unit[np.random.default_rng(0).permutation(len(unit))[:count]]
    for _ in range(rounds):
        nearest = (unit @ centres.T).argmax(axis=1)
        sums = np.zeros_like(centres)
        np.add.at(sums, nearest, vectors)
        length = np.linalg.norm(sums, axis=1)
        centres = np.where(length[:, None] > 0, sums / np.maximum(length, 1e-300)[:, None], centres)
    return np.asarray(centres)


def control(num_heads: int) -> PrefillProblem:
    """Random normal queries, keys and weights: nothing that a bound could use."""
    generator = np.random.default_rng(0)
    rows = NEIGHBOURS + 1 + 3 * ROW_STEP
    return PrefillProblem(
        q=encode_e4m3_array(16 * generator.standard_normal((rows, num_heads, 128), np.float32)),
        k=encode_e4m3_array(16 * generator.standard_normal((CONTROL_KEYS, 128), np.float32)),
        k_scale=np.ones(CONTROL_KEYS, np.float32),
        weights=generator.standard_normal((rows, num_heads), np.float32),
        cu_seqlen_ks=np.zeros(rows, np.int32),
        cu_seqlen_ke=np.full(rows, CONTROL_KEYS, np.int32),
        topk=CONTROL_KEYS // 128,
    )


def study(folder: Path, topk: Sequence[int]) -> dict[str, Any]:
    """Measure all traces of a folder under each K, and the controls.

    Args:
        folder: holds ``*.safetensors`` (``dosa.trace/1``) with 32 or 64 heads.
        topk: the K.

    Returns:
        The record, schema ``dosa.pruning_study/1``.
    """
    started = time.monotonic()
    cases: list[dict[str, Any]] = []
    for path in sorted(folder.glob("*.safetensors")):
        trace = load_trace(path)
        head = {"trace": path.stem, "num_heads": trace.problem.num_heads, "keys": len(trace.problem.k)}
        cases += [{**head, **measure(trace.problem, k)} for k in topk]
    for num_heads in COLUMNS:
        problem = control(num_heads)
        head = {"trace": f"random_h{num_heads}", "num_heads": num_heads, "keys": len(problem.k)}
        cases.append({**head, **measure(problem, problem.topk)})
    return {
        "schema": SCHEMA,
        "environment": environment(),
        "command": " ".join(["python -m dosa_verify.pruning_study --traces DIR", *(f"--topk {k}" for k in topk)]),
        "time_s": round(time.monotonic() - started, 1),
        "cases": cases,
    }


# ---------------------------------------------------------------------------------------------------------------------
# The page


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
    return templates.get_template("pruning.md.j2").render(
        records=records,
        traces=[case for case in cases if not case["trace"].startswith("random_")],
        controls=[case for case in cases if case["trace"].startswith("random_")],
        budgets=COLUMNS,
        ablation_columns=ABLATION_COLUMNS,
        ablations=list(ABLATIONS),
        targets=_targets(cases),
        mean=_mean,
        worst=_worst,
        gain=_gain,
    )


def _mean(case: Mapping[str, Any], variant: str, columns: int) -> float:
    values = case["survivors"][variant][str(columns)]
    return float(np.mean(values))


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
                kept = float(np.mean([_mean(case, "recipe", columns) for case in layer]))
                names = sorted({f"{case['trace']} ({case['keys']:,} keys)" for case in layer})
                found.append({"num_heads": num_heads, "columns": columns, "traces": names, "survivors": kept})
    return found


def _gain(cases: Sequence[Mapping[str, Any]], over: str, variant: str, columns: int) -> float:
    """Geometric mean over cases of the survivors of one variant over another's, less 1, in percent."""
    ratios = [_mean(case, variant, columns) / _mean(case, over, columns) for case in cases]
    return 100.0 * float(np.exp(np.mean(np.log(ratios))) - 1)


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; see the module's docstring. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m dosa_verify.pruning_study", description="How much bounds prune.")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--traces", type=Path, metavar="DIR", help="measure the traces in this folder")
    source.add_argument("--page", type=Path, metavar="FILE", help="write this page from the records")
    parser.add_argument("--topk", type=int, action="append", metavar="K", help="keys to select, may be repeated")
    parser.add_argument(
        "--out", type=Path, action="append", metavar="FILE", required=True, help="the record, or records"
    )
    options = parser.parse_args(arguments)
    if options.page is not None:
        records = {path.name: json.loads(path.read_text(encoding="utf-8")) for path in options.out}
        options.page.write_text(page(records), encoding="utf-8")
        return 0
    record = study(options.traces, options.topk or (256, 2048))
    options.out[0].write_text(json.dumps(record, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
