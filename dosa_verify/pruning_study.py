"""How much the bound prunes: its recipe, the published one and ablations of both, at equal numbers of columns.

::

    python -m dosa_verify.pruning_study --traces DIR --topk 256 --topk 2048 --out docs/evidence/pruning_traces.json
    python -m dosa_verify.pruning_study --pack PACK [--pack PACK ...] --device cuda --jobs 16 --out RECORD
    python -m dosa_verify.pruning_study --page docs/pruning.md --pictures docs/evidence --out RECORD [--out RECORD ...]

The first form measures all traces of a folder, and random controls; the second makes long traces in memory
(:mod:`dosa_verify.traces.make`) and measures them, with other seeds, untrained indexers, pairings and rotations as
controls (both schema ``dosa.pruning_study/2``); the third renders the page and its pictures from records. Bounds come
from :mod:`dosa_verify.pruning_variants`. ``tau`` is the K-th best score among the winners of the eight rows before.
Dots are float32 sums of exact products, which differ from the tensor core's by less than the guard; scores, ``tau`` and
survivors are computed on any device, and differ between devices by the order of these sums alone.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import math
import multiprocessing
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from scipy.optimize import nnls

from dosa_gpu.plan import plan_prefill
from dosa_ref.formats import encode_e4m3_array
from dosa_ref.guard import dot_error, e4m3_float64
from dosa_ref.problem import PrefillProblem
from dosa_ref.spec import (
    E4M3_MIN_NORMAL,
    HEAD_DIM,
    KEY_SCALE_LOG2_MAX,
    KEY_SCALE_LOG2_MIN,
    STEPS,
    InvalidProblem,
)
from dosa_ref.trace import load_trace
from dosa_verify import terminal
from dosa_verify.environment import environment
from dosa_verify.pruning_page import draw, page
from dosa_verify.pruning_variants import (
    ABLATION_COLUMNS,
    ABLATIONS,
    COLUMNS,
    FORMS,
    VARIANTS,
    Form,
    Row,
    build,
    centres,
)
from dosa_verify.traces import make as making
from dosa_verify.traces.model import load_pack

SCHEMA: Final = "dosa.pruning_study/2"
NEIGHBOURS: Final = 8
"""Rows whose winners are the seeds of the next one."""
ROW_STEP: Final = 5
HALF_SAMPLE: Final = 32
"""So many seeds below ``tau``, and so many keys of the window, steer the choice of columns."""
CONTROL_KEYS: Final = 16384
SHARED: Final = ((64, 32), (128, 64))
"""Shared vectors, and the rows of the block that shares them."""

TOPK: Final = 2048
LAYERS: Final = (0, 6, 12, 17)
LENGTHS: Final = (131_072, 262_144, 524_288, 786_432, 1_048_576)
QUERIES: Final = 1024
"""Queries of a long trace: eight groups that share seeds."""
ROWS: Final = 8
"""Rows measured at the longest length; half of them at shorter ones and in the controls."""
SEED_LAYERS: Final = (6, 17)
"""Layers whose indexers are trained a second time."""
CONTROL_LAYERS: Final = (12,)
"""Of the untrained indexer, of the other rotary pairs and of the Hadamard rotation."""
BOUND_SEEDS: Final = (1, 2, 4)
"""Keys of the largest bounds that are scored first, in units of K."""
NEAR: Final = (1, 2, 4, 8)
"""Pilots whose winners a group of rows takes as seeds."""
PILOT_ROWS: Final = 128
"""Rows of a group, one of which is its pilot."""
GUESS_SPREADS: Final = 4.5
GUESS_MORE: Final = 2.0

Floats = npt.NDArray[np.float64]
Bounds = Callable[[], list[Form]]
Submit = Callable[[Row, Sequence[tuple[str, int]]], Bounds]


@contextlib.contextmanager
def builders(jobs: int) -> Iterator[Submit]:
    """A function that starts to build the bounds of a row, in ``jobs`` processes or, with 1, when they are asked for.

    The function takes a row and what :func:`dosa_verify.pruning_variants.build` is to make of it, and returns a
    function that waits for the bounds.
    """
    if jobs == 1:
        yield lambda row, wanted: functools.partial(build, row, wanted)
        return
    # A bound is small: one thread for each process. Libraries read this when they are loaded.
    names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(dict.fromkeys(names, "1"))
    try:
        pool = multiprocessing.get_context("spawn").Pool(jobs)
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
    try:
        yield lambda row, wanted: pool.apply_async(build, (row, wanted)).get
    finally:
        pool.terminate()
        pool.join()


# ---------------------------------------------------------------------------------------------------------------------
# Scores and survivors, on a device


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Scene:
    """A problem as the study uses it: rows in host memory, keys on a device.

    Attributes:
        q: E4M3 ``[rows, H, 128]``.
        weights: float32 ``[rows, H]``.
        ks, ke: windows of the rows, int ``[rows]``.
        codes: E4M3 codes uint8 ``[n, 128]``, on the device.
        keys: their values, float32 ``[n, 128]``.
        scale: float32 ``[n]``.
        norm: float32 ``[n]``, as :func:`dosa_ref.bound.key_norms` has them.
        blocks: float32 ``[n, 4]``, the same of each block of 32 elements.
    """

    q: npt.NDArray[Any]
    weights: npt.NDArray[np.float32]
    ks: npt.NDArray[np.int64]
    ke: npt.NDArray[np.int64]
    codes: torch.Tensor
    keys: torch.Tensor
    scale: torch.Tensor
    norm: torch.Tensor
    blocks: torch.Tensor

    @property
    def num_heads(self) -> int:
        """Heads of a row."""
        return int(self.q.shape[1])

    def scores(self, row: int) -> torch.Tensor:
        """Scores ``[ke - ks]`` of the visible keys of a row, float32."""
        seen = slice(int(self.ks[row]), int(self.ke[row]))
        q = torch.from_numpy(e4m3_float64(self.q[row]).astype(np.float32)).to(self.keys.device)
        w = torch.from_numpy(np.ascontiguousarray(self.weights[row])).to(self.keys.device)
        return (self.keys[seen] @ q.T).relu_() @ w * self.scale[seen]

    def survivors(self, row: int, tau: float, form: Form) -> float:
        """Share of the visible keys of a row that a bound keeps, in percent."""
        if not form.usable:
            return 100.0
        upper = self.upper(row, form)
        # Not `upper >= tau`: a bound of NaN keeps its key.
        return 100.0 * float((~(upper < tau)).double().mean())

    def upper(self, row: int, form: Form) -> torch.Tensor:
        """``U`` of the visible keys of a row, float32 ``[ke - ks]``."""
        seen, device = slice(int(self.ks[row]), int(self.ke[row])), self.keys.device
        columns, coefficients, linear = (
            torch.from_numpy(np.ascontiguousarray(part)).to(device)
            for part in (form.columns, form.coefficients, form.linear)
        )
        dot = self.keys[seen] @ columns.T
        psi = torch.where(linear, dot, dot.clamp(min=0))
        room = float(form.slack) * self.norm[seen]
        if form.blocks is not None:
            *roots, rest = (float(value) for value in form.blocks)
            by_blocks = rest * self.norm[seen] + self.blocks[seen] @ torch.tensor(roots, device=device)
            room = torch.minimum(room, by_blocks)
        return self.scale[seen] * (psi @ coefficients + room)


def scene_of(problem: PrefillProblem, device: torch.device) -> Scene:
    """The scene of a problem in host memory."""
    k = torch.from_numpy(np.ascontiguousarray(problem.k.view(np.uint8))).to(device)
    scale = torch.from_numpy(np.ascontiguousarray(problem.k_scale)).to(device)
    ks, ke = (problem.cu_seqlen_ks, problem.cu_seqlen_ke)
    return _scene(problem.q, problem.weights, ks.astype(np.int64), ke.astype(np.int64), k, scale)


def scene_of_tensors(trace: making.TraceTensors) -> Scene:
    """The scene of a trace on a device; its keys stay there."""
    q = trace.q.view(torch.uint8).cpu().numpy()
    ks, ke = (part.cpu().numpy().astype(np.int64) for part in (trace.ks, trace.ke))
    return _scene(q, trace.weights.cpu().numpy(), ks, ke, trace.k.view(torch.uint8), trace.k_scale)


def _scene(
    q: npt.NDArray[Any],
    weights: npt.NDArray[np.float32],
    ks: npt.NDArray[np.int64],
    ke: npt.NDArray[np.int64],
    codes: torch.Tensor,
    scale: torch.Tensor,
) -> Scene:
    keys = codes.view(torch.float8_e4m3fn).float()
    return Scene(
        q=q, weights=weights, ks=ks, ke=ke, codes=codes, keys=keys, scale=scale,
        norm=norms(keys[:, None], scale)[:, 0],
        blocks=norms(keys.unflatten(1, (STEPS, -1)), scale),
    )  # fmt: skip


def norms(parts: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Norms of parts of keys, rounded up to float32; +Inf for keys that must always survive.

    Args:
        parts: E4M3 values, float32 ``[n, parts, elements]``.
        scale: float32 ``[n]``.

    Returns:
        float32 ``[n, parts]``.

    Exactness: the smallest float32 that is not below the real norm of the part with its non-zero magnitudes raised to
        at least 2^-6; :func:`dosa_ref.bound.key_norms` says why.
    """
    out = torch.empty(parts.shape[:2], device=parts.device)
    for a in range(0, len(parts), 1 << 18):
        wide = parts[a : a + (1 << 18)].double()
        raised = torch.where(wide != 0, wide.abs().clamp(min=float(E4M3_MIN_NORMAL)), wide)
        square = raised.square().sum(-1)
        norm = square.sqrt().float()
        up = torch.nextafter(norm, torch.full_like(norm, torch.inf))
        out[a : a + (1 << 18)] = torch.where(norm.double().square() < square, up, norm)
    good = (scale >= 2.0**KEY_SCALE_LOG2_MIN) & (scale <= 2.0**KEY_SCALE_LOG2_MAX)
    return out.masked_fill(~good[:, None] | out.isnan().any(1, keepdim=True), torch.inf)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Task:
    """One row of a scene under one K.

    Attributes:
        place: which row.
        row: the row and what a recipe may know of it.
        tau: the threshold.
        visible: its visible keys.
        seed_share: share of them that reaches ``tau``, percent.
    """

    place: int
    row: Row
    tau: float
    visible: int
    seed_share: float


def every_fifth(seq_len: int) -> range:
    """Every ``ROW_STEP``-th row that has eight rows before it."""
    return range(NEIGHBOURS, seq_len, ROW_STEP)


def spread_rows(seq_len: int, count: int) -> list[int]:
    """``count`` rows with eight rows before them, spread evenly, the last one among them."""
    return sorted(set(np.linspace(NEIGHBOURS, seq_len - 1, count).astype(int).tolist()))


def tasks_of(scene: Scene, topk: int, places: Sequence[int]) -> list[Task]:
    """The rows with more than ``topk`` visible keys among some places."""
    winners: dict[int, torch.Tensor] = {}
    tasks = []
    for row in places:
        ks, ke = int(scene.ks[row]), int(scene.ke[row])
        if ke - ks <= topk:
            continue
        for earlier in range(row - NEIGHBOURS, row):
            if earlier not in winners:
                winners[earlier] = _winners(scene, earlier, topk)
        own = scene.scores(row)
        seeds = torch.unique(torch.cat([winners[r] for r in range(row - NEIGHBOURS, row)]))
        seeds = seeds[(seeds >= ks) & (seeds < ke)]
        values, order = own[seeds - ks].sort(descending=True, stable=True)
        if len(seeds) < topk:
            continue
        seeds = seeds[order]
        tau = float(values[topk - 1])
        below = seeds[topk:] if len(seeds) > topk else seeds
        spread = np.linspace(ks, ke - 1, HALF_SAMPLE).astype(np.int64)
        some = np.linspace(0, len(below) - 1, HALF_SAMPLE).astype(np.int64)
        best = np.linspace(0, topk - 1, 2 * HALF_SAMPLE).astype(np.int64)
        sample = np.concatenate([_at(below, some), spread])
        tasks.append(
            Task(
                place=row,
                row=Row(
                    q=scene.q[row],
                    w=scene.weights[row],
                    sample=_keys_at(scene, sample),
                    winners=_keys_at(scene, _at(seeds, best)),
                ),
                tau=tau,
                visible=ke - ks,
                seed_share=100.0 * float((own >= tau).double().mean()),
            )
        )
    return tasks


def _winners(scene: Scene, row: int, topk: int) -> torch.Tensor:
    """Keys of the ``topk`` best scores of a row, or all visible ones, in no order."""
    scores = scene.scores(row)
    return scores.topk(min(topk, len(scores)), sorted=False).indices + int(scene.ks[row])


def _at(values: torch.Tensor, places: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    found: npt.NDArray[np.int64] = values[torch.from_numpy(places).to(values.device)].cpu().numpy()
    return found


def _keys_at(scene: Scene, places: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
    found: npt.NDArray[Any] = scene.codes[torch.from_numpy(places).to(scene.codes.device)].cpu().numpy()
    return found


# ---------------------------------------------------------------------------------------------------------------------
# Seeds


def guess_rank(drawn: int, visible: int, topk: int) -> int:
    """Rank in a sample whose score is taken as ``tau``, as in ``dosa_gpu.kernels.sample``.

    It is the expected rank of the K-th best key, and ``GUESS_SPREADS`` standard deviations more.
    """
    if drawn == visible:
        return topk
    expected, left = drawn * topk / visible, 1 - drawn / visible
    return math.ceil(expected + GUESS_SPREADS * math.sqrt(expected * left) + GUESS_MORE * left)


def seed_quality(scene: Scene, topk: int, places: Sequence[int]) -> list[dict[str, Any]]:
    """What share of the keys reaches ``tau``, and at what cost, by the choice of seeds.

    A group of ``PILOT_ROWS`` rows shares the winners of some pilots, single rows in the middle of the groups nearest to
    it that are scored densely, its newest keys and an even sample of the others. A guess is the score of a rank in a
    random sample of the keys; it is too high (``failed``, and not counted elsewhere) if fewer than ``topk`` keys reach
    it. The cost is in dense scans of the row's keys: what a row pays of its group's pilot, and its seeds.

    Args:
        scene: the problem.
        topk: K.
        places: rows to measure.

    Returns:
        Per strategy means over the rows: ``cost`` and ``reached`` in percent of the visible keys, ``ratio`` to the
        share of the top K and its largest, ``worst``; ``failed`` guesses; ``kernels`` marks what the kernels do.
    """
    total, length = len(scene.q), len(scene.keys)
    first = np.arange(0, total, PILOT_ROWS)
    middles = (first + np.minimum(first + PILOT_ROWS, total) - 1) // 2
    pilots = [_winners(scene, row, topk) for row in middles.tolist()]
    plan = plan_prefill(
        device_type="cuda", num_heads=scene.num_heads, num_rows=4096, num_keys=length, topk=topk, mode=None,
        columns=None, workspace_bytes=2**34, survivor_capacity=None,
    )  # fmt: skip

    def shared(row: int, near: int, newest: int, spread: int) -> torch.Tensor:
        group = row // PILOT_ROWS
        rows = slice(group * PILOT_ROWS, min(total, (group + 1) * PILOT_ROWS))
        low, high = int(scene.ks[rows].min()), int(scene.ke[rows].max())
        start = min(max(group - near // 2, 0), len(pilots) - near)
        late = torch.arange(high - newest, high)
        even = low + torch.arange(spread) * (high - low) // max(spread, 1)
        return torch.cat([*pilots[start : start + near], torch.cat([late, even]).to(scene.keys.device)])

    strategies: dict[str, tuple[Callable[[int], torch.Tensor], float]] = {}
    for near in NEAR:
        if near > len(pilots):
            continue
        words = f"winners of {near} pilot{'s' if near > 1 else ''}"
        for newest, spread in ((0, 0), (plan.newest, plan.spread)):
            name = f"{words}, {newest} newest, {spread} spread" if newest else words
            choose: Callable[[int], torch.Tensor] = functools.partial(shared, near=near, newest=newest, spread=spread)
            strategies[name] = (choose, 1 / PILOT_ROWS)
    several = 4 * topk
    strategies[f"{several} newest"] = (lambda row: torch.arange(scene.ke[row] - several, scene.ke[row]), 0.0)
    strategies[f"even sample of {several}"] = (
        lambda row: scene.ks[row] + torch.arange(several) * int(scene.ke[row] - scene.ks[row]) // several,
        0.0,
    )
    kernels = f"guess from a sample of {min(plan.sample, length)}"
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in (*strategies, kernels)}
    failed = 0
    for row in places:
        ks, ke = int(scene.ks[row]), int(scene.ke[row])
        if ke - ks <= topk:
            continue
        own = scene.scores(row)
        for name, (choose, pilot) in strategies.items():
            seeds = torch.unique(choose(row).to(own.device))
            seeds = seeds[(seeds >= ks) & (seeds < ke)]
            if len(seeds) < topk:
                continue
            tau = own[seeds - ks].topk(topk).values[-1]
            reached = float((own >= tau).double().mean())
            found[name].append((pilot + len(seeds) / len(own), reached, reached * len(own) / topk))
        drawn = min(plan.sample, len(own))
        some = np.random.default_rng(row).permutation(len(own))[:drawn]
        rank = guess_rank(drawn, len(own), topk)
        if rank <= drawn:
            tau = own[torch.from_numpy(some).to(own.device)].topk(rank).values[-1]
            reached = float((own >= tau).double().mean())
            if reached * len(own) < topk:
                failed += 1
            else:
                found[kernels].append((drawn / len(own), reached, reached * len(own) / topk))
    return [
        {
            "strategy": name,
            "kernels": name == kernels,
            "rows": len(entries),
            "cost": round(100 * float(np.mean([entry[0] for entry in entries])), 3),
            "reached": round(100 * float(np.mean([entry[1] for entry in entries])), 4),
            "ratio": round(float(np.mean([entry[2] for entry in entries])), 3),
            "worst": round(max(entry[2] for entry in entries), 3),
            **({"failed": failed} if name == kernels else {}),
        }
        for name, entries in found.items()
        if entries
    ]


# ---------------------------------------------------------------------------------------------------------------------
# Measuring


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pending:
    """A case whose bounds are being built.

    Attributes:
        scene: the problem.
        topk: K.
        tasks: its rows.
        wanted: names of makers and numbers of columns.
        bounds: waits for a row's bounds, by row.
        more: further fields of the case.
    """

    scene: Scene
    topk: int
    tasks: Sequence[Task]
    wanted: Sequence[tuple[str, int]]
    bounds: Sequence[Bounds]
    more: Mapping[str, Any]

    def finish(self) -> dict[str, Any]:
        """The case: survivors in percent by variant and columns, row by row, and the parts of the slack."""
        built = [bounds() for bounds in self.bounds]
        found: dict[str, dict[str, list[float]]] = {}
        parts: dict[str, dict[str, float]] = {}
        for place, (name, columns) in enumerate(self.wanted):
            forms = [forms[place] for forms in built]
            found.setdefault(name, {})[str(columns)] = [
                round(self.scene.survivors(task.place, task.tau, form), 3)
                for task, form in zip(self.tasks, forms, strict=True)
            ]
            if name == "recipe":
                parts[str(columns)] = _shares(forms)
        tasks = self.tasks
        return {
            "topk": self.topk,
            "top_share": round(100.0 * self.topk * len(tasks) / sum(task.visible for task in tasks), 4),
            "seed_share": round(float(np.mean([task.seed_share for task in tasks])), 4),
            "positive_tau": round(float(np.mean([task.tau > 0 for task in tasks])), 4),
            "rows": len(tasks),
            "survivors": found,
            "slack": parts,
            "bound_seeds": [
                bound_seeds(self.scene, self.topk, tasks, [forms[place] for forms in built], columns)
                for place, (name, columns) in enumerate(self.wanted)
                if name == "recipe"
            ],
            **self.more,
        }


def bound_seeds(scene: Scene, topk: int, tasks: Sequence[Task], forms: Sequence[Form], columns: int) -> dict[str, Any]:
    """A threshold from the bound itself: the keys of the largest ``U`` are scored first.

    A row has ``U`` of the keys that its first threshold did not prune. Their largest ones are scored, the K-th best of
    these scores is a second threshold, and only keys whose ``U`` reaches it need to be scored too. It is sound, being
    the K-th best of genuine scores, and costs its seeds: the bound is there anyway.

    Args:
        scene: the problem.
        topk: K.
        tasks: rows.
        forms: their bounds.
        columns: M.

    Returns:
        ``columns``; by seeds in units of K (:data:`BOUND_SEEDS`) means over the rows of ``cost``, ``reached`` and
        ``survivors``, in percent of the visible keys, ``ratio`` to the share of the top K and its largest, ``worst``;
        and ``best``, the survivors under each row's own K-th score, the least that any threshold allows. Rows outside
        the bound's magnitudes count as if everything survived.
    """
    found: dict[int, list[tuple[float, float, float, float]]] = {times: [] for times in BOUND_SEEDS}
    best = []
    for task, form in zip(tasks, forms, strict=True):
        own, upper = scene.scores(task.place), scene.upper(task.place, form)
        keys = upper.topk(min(max(BOUND_SEEDS) * topk, len(own)), sorted=True).indices
        for times, entries in found.items():
            tau = float(own[keys[: times * topk]].topk(topk).values[-1])
            seeds = min(times * topk, len(own)) / len(own)
            reached = float((own >= tau).double().mean())
            entries.append((seeds, reached, scene.survivors(task.place, tau, form), reached * len(own) / topk))
        best.append(scene.survivors(task.place, float(own.topk(topk).values[-1]), form))
    return {
        "columns": columns,
        "seeds": {
            str(times): {
                "cost": round(100 * float(np.mean([entry[0] for entry in entries])), 3),
                "reached": round(100 * float(np.mean([entry[1] for entry in entries])), 4),
                "survivors": round(float(np.mean([entry[2] for entry in entries])), 3),
                "ratio": round(float(np.mean([entry[3] for entry in entries])), 3),
                "worst": round(max(entry[3] for entry in entries), 3),
            }
            for times, entries in found.items()
        },
        "best": round(float(np.mean(best)), 3),
    }


def begin(
    scene: Scene, topk: int, places: Sequence[int], submit: Submit, *, whole: bool, more: Mapping[str, Any]
) -> Pending:
    """Find a scene's thresholds and start to build its bounds.

    Args:
        scene: the problem.
        topk: K.
        places: rows to measure.
        submit: from :func:`builders`.
        whole: with the ablations and the further forms; else the variants alone.
        more: further fields of the case.

    Returns:
        The case on its way.

    Raises:
        InvalidProblem: ``rows``: none of them sees more than K keys and has K seeds.
    """
    tasks = tasks_of(scene, topk, places)
    if not tasks:
        raise InvalidProblem("rows", list(places), f"at least one with more than {topk} visible keys")
    wanted = [(name, columns) for name in VARIANTS for columns in COLUMNS[scene.num_heads]]
    if whole:
        wanted += [(name, ABLATION_COLUMNS[scene.num_heads]) for name in (*ABLATIONS, *FORMS)]
    bounds = [submit(task.row, wanted) for task in tasks]
    return Pending(scene=scene, topk=topk, tasks=tasks, wanted=wanted, bounds=bounds, more=more)


def _shares(forms: Sequence[Form]) -> dict[str, float]:
    """Mean share of residual, dots and float32 chains in the slack."""
    residual, dot = (float(np.mean([getattr(form, name) for form in forms])) for name in ("residual", "dots"))
    return {"residual": round(residual, 4), "dots": round(dot, 4), "rest": round(1 - residual - dot, 4)}


# ---------------------------------------------------------------------------------------------------------------------
# A form that was tried and did not pay: relu columns shared by a block of rows


def shared_survivors(scene: Scene, tasks: Sequence[Task], size: int, block: int) -> dict[str, Any]:
    """Relu columns that a block of rows shares, one linear column for each row.

    ``size`` FP8 vectors are the weighted cluster centres of the block's positive heads. Every positive head is
    projected on them (a second matrix product applies the coefficients, with relu values rounded to float16); a
    negative head counts linearly or 0. The price is ``size / block + size / 64 + 1`` columns per row: products, float16
    product, own column.

    Args:
        scene: the trace.
        tasks: the rows that are measured.
        size: shared vectors.
        block: rows that share them.

    Returns:
        Survivors in percent and the price in columns.
    """
    survivors: list[float] = []
    for start in range(0, len(scene.q), block):
        some = [task for task in tasks if start <= task.place < start + block]
        w_block, q_block = scene.weights[start : start + block], e4m3_float64(scene.q[start : start + block])
        weighted = (w_block[..., None] * q_block)[w_block > 0]
        shared = encode_e4m3_array((256 * centres(weighted, size)).astype(np.float32))
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
            form = Form(
                columns=columns.astype(np.float32), coefficients=np.append(factors, unit).astype(np.float32),
                linear=flags, slack=np.float32(slack), blocks=None, usable=True, residual=0.0, dots=0.0,
            )  # fmt: skip
            survivors.append(scene.survivors(task.place, task.tau, form))
    return {
        "vectors": size,
        "rows": block,
        "price": size / block + size / 64 + 1,
        "survivors": round(float(np.mean(survivors)), 3),
    }


def control(num_heads: int) -> PrefillProblem:
    """Random normal queries, keys and weights: nothing that a bound could use."""
    generator = np.random.default_rng(0)
    rows = NEIGHBOURS + 1 + 3 * ROW_STEP
    return PrefillProblem(
        q=encode_e4m3_array(16 * generator.standard_normal((rows, num_heads, HEAD_DIM), np.float32)),
        k=encode_e4m3_array(16 * generator.standard_normal((CONTROL_KEYS, HEAD_DIM), np.float32)),
        k_scale=np.ones(CONTROL_KEYS, np.float32),
        weights=generator.standard_normal((rows, num_heads), np.float32),
        cu_seqlen_ks=np.zeros(rows, np.int32),
        cu_seqlen_ke=np.full(rows, CONTROL_KEYS, np.int32),
        topk=CONTROL_KEYS // 128,
    )


def study(folder: Path, topk: Sequence[int], device: torch.device, submit: Submit) -> list[dict[str, Any]]:
    """Measure all traces of a folder under each K, and the controls.

    Args:
        folder: holds ``*.safetensors`` (``dosa.trace/1``) with 32 or 64 heads.
        topk: the K.
        device: where scores and survivors are computed.
        submit: from :func:`builders`.

    Returns:
        The cases.
    """
    cases = []

    def measure(name: str, problem: PrefillProblem, k: int) -> None:
        scene = scene_of(problem, device)
        head = {"trace": name, "num_heads": problem.num_heads, "keys": len(problem.k)}
        pending = begin(scene, k, every_fifth(problem.seq_len), submit, whole=True, more={})
        shared = [shared_survivors(scene, pending.tasks, size, block) for size, block in SHARED]
        cases.append({**head, **pending.finish(), "shared": shared})

    for path in sorted(folder.glob("*.safetensors")):
        problem = load_trace(path).problem
        for k in topk:
            measure(path.stem, problem, k)
    for num_heads in COLUMNS:
        problem = control(num_heads)
        measure(f"random_h{num_heads}", problem, problem.topk)
    return cases


# ---------------------------------------------------------------------------------------------------------------------
# Long traces, made in memory


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What the study of long traces measures.

    Attributes:
        domains: texts.
        layers, num_heads, lengths: of the traces; the longest length is the length of the pass.
        seed_layers: layers that are trained with a second seed.
        control_layers: of the untrained indexer, of the other rotary pairs and of the Hadamard rotation.
        queries: queries of a trace.
        rows: rows measured at the longest length.
        steps: training steps.
        check_loss: texts whose loss is checked.
        topk: K.
        train_keys: tokens of a training text.
        train_windows: training texts per domain.
    """

    domains: Sequence[str] = ("en", "zh", "code")
    layers: Sequence[int] = LAYERS
    num_heads: Sequence[int] = tuple(COLUMNS)
    lengths: Sequence[int] = LENGTHS
    seed_layers: Sequence[int] = SEED_LAYERS
    control_layers: Sequence[int] = CONTROL_LAYERS
    queries: int = QUERIES
    rows: int = ROWS
    steps: int = making.STEPS
    check_loss: Sequence[str] = ()
    topk: int = TOPK
    train_keys: int = making.TRAIN_KEYS
    train_windows: int = making.TRAIN_WINDOWS

    def requests(self) -> list[making.Request]:
        """The traces of each text; the first request is the study's own, the others are compared with it."""
        own = making.Options(steps=self.steps, train_keys=self.train_keys, train_windows=self.train_windows)
        longest = [max(self.lengths)]

        def request(layers: Sequence[int], heads: Sequence[int], **change: Any) -> making.Request:
            options = dataclasses.replace(own, **change)
            return making.Request(options=options, layers=layers, num_heads=heads, num_keys=longest)

        found = [
            making.Request(options=own, layers=self.layers, num_heads=self.num_heads, num_keys=sorted(self.lengths))
        ]
        if self.seed_layers:
            found.append(request(self.seed_layers, self.num_heads, seed=1))
        if self.control_layers:
            found.append(request(self.control_layers, self.num_heads, steps=0))
            found.append(request(self.control_layers, self.num_heads, hadamard=True))
            found.append(request(self.control_layers, self.num_heads[:1], half_split=True))
        return found


def study_long(
    files: Sequence[Path],
    sizes: Sizes,
    device: torch.device,
    submit: Submit,
    on_text: Callable[[list[dict[str, Any]], list[dict[str, Any]]], None],
    on_progress: Callable[[int, int], None] | None = None,
) -> None:
    """Make long traces in memory, text by text, and measure them.

    Args:
        files: the pack's parts.
        sizes: what to measure.
        device: where everything but the bounds is computed.
        submit: from :func:`builders`.
        on_text: called after each text with all cases so far, and a description of each text so far.
        on_progress: called with (done, total) of the making of the traces.
    """
    started = time.monotonic()
    pack = load_pack(files, device)
    requests = sizes.requests()
    per_text = sum(len(r.layers) * len(r.num_heads) * len(r.num_keys) for r in requests)
    cases: list[dict[str, Any]] = []
    texts: list[dict[str, Any]] = []
    pending: list[Pending] = []
    traces = making.make_requests(
        pack, requests, domains=sizes.domains, num_queries=sizes.queries, check_loss=sizes.check_loss, topk=sizes.topk,
        on_progress=on_progress,
    )  # fmt: skip
    made: list[float] = []
    for trace in traces:
        made.append(time.monotonic() - started)
        pending.append(_begin_long(trace, sizes, submit))
        if len(pending) < per_text:
            continue
        cases += [entry.finish() for entry in pending]
        pending = []
        kept = ("domain", "text", "pass_tokens", "rope_scaling", "attention", "pack_sha256")
        loss = {name: json.loads(text) if name == "loss_bins" else text for name, text in trace.header.items()
                if name.startswith("loss_")}  # fmt: skip
        seconds = {"first_trace_s": made[0], "last_trace_s": made[-1], "measured_s": time.monotonic() - started}
        made.clear()
        texts.append(
            {
                **{name: trace.header[name] for name in kept},
                **loss,
                **{name: round(value, 1) for name, value in seconds.items()},
            }
        )
        on_text(cases, texts)


def _begin_long(trace: making.TraceTensors, sizes: Sizes, submit: Submit) -> Pending:
    """Start to measure one long trace; at the longest length of the study's own indexers with everything."""
    header, keys = trace.header, len(trace.k)
    indexer = {
        "seed": int(header["indexer_seed"]),
        "steps": int(header["indexer_steps"]),
        "pairs": header["rope"],
        "hadamard": header["hadamard"] == "true",
        "final_kl": None if header["indexer_steps"] == "0" else float(header["indexer_final_kl"]),
    }
    own = indexer["seed"] == 0 and indexer["steps"] and not indexer["hadamard"] and indexer["pairs"] == "interleaved"
    whole = bool(own) and keys == max(sizes.lengths)
    places = spread_rows(len(trace.q), sizes.rows if whole else max(1, sizes.rows // 2))
    scene = scene_of_tensors(trace)
    more = {
        "trace": f"{header['domain']}_layer{int(header['layer']):02d}_h{header['num_heads']}",
        "num_heads": int(header["num_heads"]),
        "keys": keys,
        "domain": header["domain"],
        "layer": int(header["layer"]),
        "indexer": indexer,
        "own": bool(own),
        "shared": [],
        "seeds": seed_quality(scene, sizes.topk, places) if own else [],
    }
    return begin(scene, sizes.topk, places, submit, whole=whole, more=more)


# ---------------------------------------------------------------------------------------------------------------------
# Command line


def _write(path: Path, record: Mapping[str, Any]) -> None:
    """Write a record, lists of numbers on one line each."""
    text = json.dumps(record, indent=1, allow_nan=False)
    text = re.sub(r"\[[^\[\]{}\"]*\]", lambda found: f"[{' '.join(found.group()[1:-1].split())}]", text)
    path.write_text(text + "\n", encoding="utf-8")


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(word) for word in text.split(",")) if text else ()


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split(",")) if text else ()


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; see the module's docstring. Returns the exit code."""
    started = time.monotonic()
    parser = argparse.ArgumentParser(prog="python -m dosa_verify.pruning_study", description="How much bounds prune.")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--traces", type=Path, metavar="DIR", help="measure the traces in this folder")
    source.add_argument("--pack", type=Path, action="append", metavar="PACK", help="make long traces: a pack's part")
    source.add_argument("--page", type=Path, metavar="FILE", help="write this page from the records")
    parser.add_argument("--topk", type=int, action="append", metavar="K", help="keys to select, may be repeated")
    parser.add_argument("--device", default="cpu", help="of scores and survivors (default cpu)")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes that build bounds (default 1)")
    parser.add_argument("--commit", help="of the sources, where they are no git checkout")
    parser.add_argument("--pictures", type=Path, metavar="DIR", help="with --page: draw the pictures into this folder")
    long = parser.add_argument_group("long traces (defaults: the study of the page)")
    for name, kind in (
        ("domains", _words),
        ("layers", _numbers),
        ("num-heads", _numbers),
        ("lengths", _numbers),
        ("seed-layers", _numbers),
        ("check-loss", _words),
        ("control-layers", _numbers),
        ("queries", int),
        ("rows", int),
        ("steps", int),
        ("train-keys", int),
        ("train-windows", int),
    ):
        long.add_argument(f"--{name}", type=kind, metavar="N,..." if kind is _numbers else "X")
    parser.add_argument(
        "--out", type=Path, action="append", metavar="FILE", required=True, help="the record, or records"
    )
    options = parser.parse_args(arguments)
    if options.page is not None:
        records = {path.name: json.loads(path.read_text(encoding="utf-8")) for path in options.out}
        options.page.write_text(page(records), encoding="utf-8")
        if options.pictures is not None:
            draw(records, options.pictures)
        return 0
    device = torch.device(options.device)
    where = environment()
    if options.commit is not None:
        where["git_commit"] = options.commit
    typed = list(sys.argv[1:] if arguments is None else arguments)
    record = {
        "schema": SCHEMA,
        "environment": where,
        "command": _command(typed),
        "time_s": 0.0,
    }

    def write(cases: list[dict[str, Any]], **more: Any) -> None:
        seconds = round(time.monotonic() - started, 1)
        _write(options.out[0], {**record, "time_s": seconds, **more, "cases": cases})

    with builders(options.jobs) as submit:
        if options.traces is not None:
            write(study(options.traces, options.topk or (256, TOPK), device, submit))
        else:
            names = {field.name for field in dataclasses.fields(Sizes)}
            given = {name: value for name, value in vars(options).items() if name in names and value is not None}
            given["topk"] = options.topk[0] if options.topk else TOPK
            with terminal.progress("making traces") as on_progress:
                study_long(
                    options.pack,
                    Sizes(**given),
                    device,
                    submit,
                    lambda cases, texts: write(cases, texts=texts),
                    on_progress,
                )
    return 0


def _command(words: Sequence[str]) -> str:
    """The command as a reader would type it: folders and packs by a word, without what only says where results go."""
    kept = ["python -m dosa_verify.pruning_study"]
    places = {"--traces": "DIR", "--pack": "PACK", "--out": None, "--commit": None}
    for place, word in enumerate(words):
        before = words[place - 1] if place else ""
        if word in places:
            kept += [word] if places[word] is not None else []
        elif before in places:
            kept += [places[before] or ""] if places[before] is not None else []
        else:
            kept.append(word)
    return " ".join(kept)


if __name__ == "__main__":
    sys.exit(main())
