"""What the guard costs in survivors, and what other guards would cost: measured on traces, in exact arithmetic.

::

    python -m dosa_verify.guard_study --traces DIR --out docs/evidence/guard_study.json
    python -m dosa_verify.guard_study --page docs/soundness.md --out docs/evidence/guard_study.json

The first form measures (schema ``dosa.guard_study/1``); the second writes the tables of a record into a page, between
two comments. Columns, coefficients and certificates are those of the reference's recipe. Every guard is put on the
same exact bound ``sum_j c_j psi_j``, so that the guard is the only difference:

``none``           residual and rounding of the synthetic columns only: what real numbers need
``observed``       every dot errs by the largest error seen in this study, relative to the norms
``proved``         the guard of ``docs/bound.md``: errors that do harm, a key's element having one sign for all vectors
``each``           the sum of ``D`` of each vector, errors of both directions
``query_joint``    both directions, from the query alone: accumulators of all vectors together, by their Gram matrices
``call_prefixes``  from the query and, for all keys of a call, the largest ``|k~_t|_inf / n`` and ``||k~_<=t|| / n``
``call_joint``     both of these
``key_prefixes``   per key four prefix norms beside ``n``: ``max(|k~_t|_inf, ||k~_<t||)`` in the place of ``n``
``joint_two``      per key ``n`` and ``|k~|_inf``: products by ``|k~|_inf``, accumulators together
``joint_blocks``   the same with the prefix norms ``||k~_<=t||``

``tau`` is the K-th best exact score of the row. All after ``proved`` count errors of both directions. The last three
need one multiplication per pair of query and key for every further number of a key, the others nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dosa_ref.bound import build_row_bound, key_norms
from dosa_ref.guard import GuardTerms, dot_error, e4m3_float64
from dosa_ref.spec import (
    E4M3_MIN_NORMAL,
    FIRST_STEP_LOSSY,
    FRACTION_BITS,
    STEP_LOSSY,
    STEP_TERMS,
    STEPS,
)
from dosa_ref.tensorcore import dots
from dosa_ref.trace import load_trace
from dosa_verify.environment import environment

SCHEMA: Final = "dosa.guard_study/1"
ROWS: Final = (8, 24, 40, 56)
TOPK: Final = (256, 2048)
COLUMNS: Final = {32: (16,), 64: (16, 32)}
"""Column budgets by head count."""

HALF_SAMPLE: Final = 32
HARD_RANKS: Final = 4
"""The choice of columns sees so many keys of the ranks K to ``HARD_RANKS`` K, and so many of all keys."""

OTHERS: Final = ("each", "query_joint", "call_prefixes", "call_joint", "key_prefixes", "joint_two", "joint_blocks")
GUARDS: Final = ("none", "observed", "proved", *OTHERS)
BEGIN, END = "<!-- guard study: begin -->", "<!-- guard study: end -->"

Floats = npt.NDArray[np.float64]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KeySide:
    """Exact numbers of the keys of a trace.

    Attributes:
        codes: E4M3 ``[keys, 128]``.
        values: float64 ``[keys, 128]``.
        scale: float64 ``[keys]``.
        norm: ``n``, float64 ``[keys]``.
        largest: ``|k~|_inf``, float64 ``[keys]``.
        prefixes: ``||k~_<=t||``, float64 ``[keys, 4]``.
        steps: largest magnitude that takes part in step t, ``max(|k~_t|_inf, ||k~_<t||)``, float64 ``[keys, 4]``.
    """

    codes: npt.NDArray[Any]
    values: Floats
    scale: Floats
    norm: Floats
    largest: Floats
    prefixes: Floats
    steps: Floats


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One row under one column budget and one ``topk``.

    Attributes:
        trace, num_heads, columns, topk, row: which.
        tau: the K-th best exact score.
        main: ``s sum_j c_j psi_j`` of the visible keys, exact up to float64.
        slacks: per guard but ``observed``, what is added to ``main``.
        terms: the terms of the guard in use.
        weighted_norms: ``sum_i v_i ||y_i||`` over all vectors whose dots may err.
        scaled_norm: ``s n`` of the visible keys.
        largest_error: largest ``|computed - real| / (||y|| n)`` over heads and synthetic columns.
    """

    trace: str
    num_heads: int
    columns: int
    topk: int
    row: int
    tau: float
    main: Floats
    slacks: Mapping[str, Floats]
    terms: GuardTerms
    weighted_norms: float
    scaled_norm: Floats
    largest_error: float


# ---------------------------------------------------------------------------------------------------------------------
# Guards


def key_side(k: npt.NDArray[Any], k_scale: npt.NDArray[np.float32]) -> KeySide:
    """Exact norms of keys: codes ``[keys, 128]`` and float32 scales, all usable."""
    values = e4m3_float64(k)
    raised = np.where(values != 0, np.maximum(np.abs(values), float(E4M3_MIN_NORMAL)), 0.0)
    blocks = raised.reshape(-1, STEPS, STEP_TERMS)
    largest, prefixes = blocks.max(axis=-1), np.sqrt(np.cumsum((blocks**2).sum(axis=-1), axis=-1))
    steps = largest.copy()
    steps[:, 1:] = np.maximum(largest[:, 1:], prefixes[:, :-1])
    return KeySide(
        codes=k,
        values=values,
        scale=k_scale.astype(np.float64),
        norm=key_norms(k, k_scale).astype(np.float64),
        largest=raised.max(axis=-1),
        prefixes=prefixes,
        steps=steps,
    )


def step_norms(codes: npt.NDArray[Any]) -> tuple[Floats, Floats]:
    """``|y~_t|_inf`` and ``||y_<=t||`` of E4M3 ``[n, 128]``: two float64 ``[n, 4]``."""
    blocks = e4m3_float64(codes).reshape(-1, STEPS, STEP_TERMS)
    raised = np.where(blocks != 0, np.maximum(np.abs(blocks), float(E4M3_MIN_NORMAL)), 0.0)
    return raised.max(axis=-1), np.sqrt(np.cumsum((blocks**2).sum(axis=-1), axis=-1))


def joint_prefixes(codes: npt.NDArray[Any], factors: Floats) -> Floats:
    """``sqrt(sum_ij v_i v_j |y_i,<=t . y_j,<=t|)``, at least ``sum_i v_i |y_i,<=t . k| / ||k_<=t||``; ``[4]``."""
    blocks = e4m3_float64(codes).reshape(-1, STEPS, STEP_TERMS) * factors[:, None, None]
    gram = np.cumsum(np.einsum("itd,jtd->tij", blocks, blocks), axis=0)
    return np.asarray(np.sqrt(np.abs(gram).sum(axis=(1, 2))))


def dot_guards(codes: npt.NDArray[Any], factors: Floats, keys: KeySide) -> dict[str, Floats]:
    """What ``sum_i v_i |d(y_i, k) - y_i . k|`` may reach, by each proved way; float64 ``[keys]`` each.

    Args:
        codes: E4M3 ``[n, 128]``, the vectors ``y_i``.
        factors: ``v_i >= 0``, float64 ``[n]``.
        keys: the keys.

    Exactness: enclosures in real numbers, up to float64.
    """
    unit = 2.0**-FRACTION_BITS
    largest, prefixes = step_norms(codes)
    before = np.concatenate([np.zeros((len(codes), 1)), prefixes[:, :-1]], axis=1)
    lossy = np.array([FIRST_STEP_LOSSY] + [STEP_LOSSY] * (STEPS - 1), np.float64)
    # Per step: by products or accumulator, vector for vector, and the cut of the sum.
    aligned = lossy * (factors @ np.maximum(largest, before))
    outputs = factors @ prefixes
    products = lossy * (factors @ largest)
    joint = joint_prefixes(codes, factors)
    # An accumulator differs from its exact sum by less than D n.
    error = float(factors @ dot_error(codes))
    accumulators = lossy * np.concatenate([[0.0], joint[:-1]])
    beyond = error * (lossy[1:].sum() + STEPS)
    n, prefix = keys.norm, keys.prefixes
    together = products.sum() * keys.largest + beyond * n

    def from_ratios(largest_share: Floats, step_share: Floats, prefix_share: Floats) -> Floats:
        # Upper limits of |k~|_inf / n, max(|k~_t|_inf, ||k~_<t||) / n and ||k~_<=t|| / n; per step the better way.
        earlier = np.concatenate([[0.0], prefix_share[:-1]])
        lost = np.minimum(aligned * step_share, products * largest_share + accumulators * earlier + lossy * error)
        lost[0] = aligned[0] * step_share[0]  # there is no accumulator yet
        return np.asarray((lost + np.minimum(outputs * prefix_share, joint * prefix_share + error)).sum() * n)

    # A zero key needs no guard: all of its numbers are 0.
    share = [part[n > 0] / n[n > 0, None] for part in (keys.largest[:, None], keys.steps, prefix)]
    product, step, accumulator = (part.max(axis=0) for part in share)
    return {
        "each": unit * (aligned.sum() + outputs.sum()) * n,
        "query_joint": unit * from_ratios(np.ones(1), np.ones(STEPS), np.ones(STEPS)),
        "call_prefixes": unit * (aligned @ step + outputs @ accumulator) * n,
        "call_joint": unit * from_ratios(product, step, accumulator),
        "key_prefixes": unit * (keys.steps @ aligned + prefix @ outputs),
        "joint_two": unit * (together + (accumulators.sum() + joint.sum()) * n),
        "joint_blocks": unit * (together + prefix[:, :-1] @ accumulators[1:] + prefix @ joint),
    }


# ---------------------------------------------------------------------------------------------------------------------
# Measuring


def measure_trace(path: Path) -> list[Measured]:
    """All rows, column budgets and K of one trace."""
    problem = load_trace(path).problem
    keys = key_side(problem.k, problem.k_scale)
    found = []
    for row in (r for r in ROWS if r < problem.seq_len):
        q, w = problem.q[row], problem.weights[row]
        ks, ke = problem.window(row)
        real = e4m3_float64(q) @ keys.values.T  # exact: all partial sums are multiples of 2^-18 below 2^35
        head_error = largest_error(q, real, keys)
        scores = keys.scale * (w.astype(np.float64) @ np.maximum(real, 0.0))
        for topk in (k for k in TOPK if k < ke - ks):
            ranked = ks + np.argsort(-scores[ks:ke], kind="stable")
            tau = float(scores[ranked[topk - 1]])
            # Hard keys: an even sample of those that come next, and one of all keys.
            after = ranked[topk : topk * HARD_RANKS]
            places = [part[np.linspace(0, len(part) - 1, HALF_SAMPLE).astype(np.int64)] for part in (after, ranked)]
            sample = problem.k[np.concatenate(places)]
            found += [
                _measure(path.stem, row, topk, columns, q, w, sample, tau, keys, slice(ks, ke), head_error)
                for columns in COLUMNS[len(w)]
            ]
    return found


def largest_error(codes: npt.NDArray[Any], real: Floats, keys: KeySide) -> float:
    """Largest ``|computed - real| / (||y|| n)`` of vectors ``[n, 128]`` whose real dots are ``[n, keys]``."""
    norms = np.sqrt((e4m3_float64(codes) ** 2).sum(axis=-1))[:, None] * keys.norm
    error = np.abs(dots(codes, keys.codes).astype(np.float64) - real)
    return float(np.divide(error, norms, out=np.zeros_like(error), where=norms > 0).max())


def _measure(
    trace: str,
    row: int,
    topk: int,
    columns: int,
    q: npt.NDArray[Any],
    w: npt.NDArray[np.float32],
    sample: npt.NDArray[Any],
    tau: float,
    keys: KeySide,
    visible: slice,
    head_error: float,
) -> Measured:
    bound = build_row_bound(q, w, columns, sample)
    certificate, terms, linear = bound.certificate, bound.terms, bound.linear
    vectors, retained = bound.columns.view(np.uint8), certificate.retained

    c = bound.coefficients.astype(np.float64)
    omitted = (w > 0) & ~np.isin(np.arange(len(w)), retained)
    share = np.where(omitted, w, 0.0).astype(np.float64)
    codes = np.concatenate([q.view(np.uint8), vectors])
    heads, retained_share = share + certificate.aggregate.sum(axis=0), share @ certificate.projection
    factors = np.concatenate([heads, np.where(retained >= 0, retained_share, np.abs(c))])
    real = e4m3_float64(vectors) @ keys.values.T
    synthetic = retained < 0
    errors = [head_error, largest_error(vectors[synthetic], real[synthetic], keys)]
    main = c @ np.where(linear[:, None], real, np.maximum(real, 0.0))
    kept = terms.residual + terms.column_rounding
    chains = terms.head_chain + terms.bound_chain + terms.float64 + terms.floor
    guards = dot_guards(codes, factors, keys)
    slacks = {name: (kept + chains) * keys.norm + value for name, value in guards.items()}
    slacks["proved"] = float(bound.slack) * keys.norm
    slacks["none"] = kept * keys.norm
    return Measured(
        trace=trace,
        num_heads=len(w),
        columns=columns,
        topk=topk,
        row=row,
        tau=tau,
        main=(keys.scale * main)[visible],
        slacks={name: (keys.scale * value)[visible] for name, value in slacks.items()},
        terms=terms,
        weighted_norms=float(factors @ np.sqrt((e4m3_float64(codes) ** 2).sum(axis=-1))),
        scaled_norm=(keys.scale * keys.norm)[visible],
        largest_error=max(errors),
    )


def survivors(measured: Measured, guard: str, error: float) -> float:
    """Visible keys that a guard keeps, in percent; ``error`` is the dot error of the guard ``observed``."""
    if guard == "observed":
        kept = measured.terms.residual + measured.terms.column_rounding
        chains = measured.terms.head_chain + measured.terms.bound_chain + measured.terms.float64 + measured.terms.floor
        slack = (kept + chains + error * measured.weighted_norms) * measured.scaled_norm
    else:
        slack = measured.slacks[guard]
    return 100.0 * float((measured.main + slack >= measured.tau).mean())


def study(folder: Path) -> dict[str, object]:
    """Measure all traces of a folder.

    Args:
        folder: holds ``*.safetensors`` (``dosa.trace/1``) with 32 or 64 heads.

    Returns:
        The record, schema ``dosa.guard_study/1``.
    """
    started = time.monotonic()
    measured = [entry for path in sorted(folder.glob("*.safetensors")) for entry in measure_trace(path)]
    error = max(entry.largest_error for entry in measured)
    cases: list[dict[str, object]] = []
    for trace, columns, topk in dict.fromkeys((m.trace, m.columns, m.topk) for m in measured):
        rows = [m for m in measured if (m.trace, m.columns, m.topk) == (trace, columns, topk)]
        slack = [m.terms.total() for m in rows]
        cases.append(
            {
                "trace": trace,
                "num_heads": rows[0].num_heads,
                "columns": columns,
                "topk": topk,
                "rows": [m.row for m in rows],
                "visible": [len(m.main) for m in rows],
                "tau": [float(f"{m.tau:.6g}") for m in rows],
                "survivors": {name: [round(survivors(m, name, error), 4) for m in rows] for name in GUARDS},
                "guard_share": {
                    field.name: _mean([getattr(m.terms, field.name) / s for m, s in zip(rows, slack, strict=True)])
                    for field in dataclasses.fields(GuardTerms)
                },
                "guard_ratio": {name: _mean([_dots_ratio(m, name) for m in rows]) for name in OTHERS},
            }
        )
    return {
        "schema": SCHEMA,
        "environment": environment(),
        "largest_error": float(f"{error:.4g}"),
        "time_s": round(time.monotonic() - started, 1),
        "cases": cases,
    }


def _mean(values: Sequence[float]) -> float:
    return float(f"{sum(values) / len(values):.4g}")


def _dots_ratio(measured: Measured, guard: str) -> float:
    """The dot term of another guard over that of the proved one, mean over keys."""
    terms = measured.terms
    rest = (terms.total() - terms.dots) * measured.scaled_norm
    proved = terms.dots * measured.scaled_norm
    return float(np.mean((measured.slacks[guard] - rest)[proved > 0] / proved[proved > 0]))


# ---------------------------------------------------------------------------------------------------------------------
# Reading a record


def tables(record: Mapping[str, Any]) -> str:
    """The record as Markdown: survivors by guard, and the parts of the guard; means over the rows of a case."""
    heads = ["trace, M, K", *(name.replace("_", " ") for name in GUARDS), "proved / none", "observed / none"]
    lines = [
        f"Largest error of a dot in this study: {100 * record['largest_error']:.3f} % of `||y|| ||k~||`.",
        "",
        "Survivors in %, mean over the rows:",
        "",
        _line(heads),
        _line(["---"] * len(heads)),
    ]
    for case in record["cases"]:
        kept = {name: sum(values) / len(values) for name, values in case["survivors"].items()}
        ratios = [f"{100 * (kept[name] / kept['none'] - 1):+.1f} %" for name in ("proved", "observed")]
        lines.append(_line([_name(case), *(f"{kept[name]:.2f}" for name in GUARDS), *ratios]))
    terms = [field.name for field in dataclasses.fields(GuardTerms)]
    heads = ["trace, M, K", *(f"`{name}`" for name in terms if name != "floor"), *(n.replace("_", " ") for n in OTHERS)]
    lines += [
        "",
        "Parts of `G` in %, and the dot terms of the other guards over `dots`:",
        "",
        _line(heads),
        _line(["---"] * len(heads)),
    ]
    for case in record["cases"]:
        parts = [f"{100 * case['guard_share'][name]:.2g}" for name in terms if name != "floor"]
        lines.append(_line([_name(case), *parts, *(f"{case['guard_ratio'][name]:.2f}" for name in OTHERS)]))
    return "\n".join(lines)


def write_page(record: Mapping[str, Any], page: Path) -> None:
    """Replace what lies between the two comments of a page by the tables of a record."""
    text = page.read_text(encoding="utf-8")
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    page.write_text(f"{head}{BEGIN}\n\n{tables(record)}\n\n{END}{tail}", encoding="utf-8")


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _name(case: Mapping[str, Any]) -> str:
    return f"{case['trace']}, {case['columns']}, {case['topk']}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; see the module's docstring. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m dosa_verify.guard_study", description="What the guard costs.")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--traces", type=Path, metavar="DIR", help="measure the traces in this folder")
    source.add_argument("--page", type=Path, metavar="FILE", help="write the tables of the record into this page")
    parser.add_argument("--out", type=Path, metavar="FILE", required=True, help="the record")
    options = parser.parse_args(arguments)
    if options.page is not None:
        write_page(json.loads(options.out.read_text(encoding="utf-8")), options.page)
        return 0
    record = study(options.traces)
    options.out.write_text(json.dumps(record, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
