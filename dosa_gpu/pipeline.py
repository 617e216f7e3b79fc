"""The stages of the prefill path, in order, for one call.

Rows go through in blocks, keys in ascending chunks. For each block: seeds and ``tau``, query preparation, then per
chunk the bound pass (or a dense filter), compaction, rescoring, emit, and a merge into the running exact top-K. Rows
that the bound cannot serve are scored densely. ``tau`` may rise between chunks: the running K-th score is a K-th score
of genuine keys too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from dosa_gpu.kernels.append import launch_append
from dosa_gpu.kernels.bound import column_order, launch_bound, queries_per_tile
from dosa_gpu.kernels.compact import launch_compact
from dosa_gpu.kernels.hard_keys import launch_hard_keys
from dosa_gpu.kernels.key_norms import launch_key_norms
from dosa_gpu.kernels.rescore import launch_rescore
from dosa_gpu.kernels.score import launch_score
from dosa_gpu.kernels.score_lists import launch_score_lists
from dosa_gpu.kernels.topk import launch_kth, launch_topk
from dosa_gpu.plan import PrefillPlan
from dosa_gpu.prepare import head_terms, prepare_rows
from dosa_gpu.seeds import group_seeds, own_seeds
from dosa_gpu.workspace import Workspace
from dosa_ref.spec import PAD_INDEX, Fallback, Mode

PRUNING = (Mode.PRUNE, Mode.BOTH)
"""Modes with the bound pass."""
GROUP_ROWS = 128
"""Rows that share a list of seeds; one of them is the group's pilot, scored densely."""
PILOTS_FROM = 8
"""With fewer rows than this a pilot costs more than it saves."""
HALF_SAMPLE = 32
"""Keys just below ``tau``, and keys anywhere, on which the heads of a row are measured."""
TRIAL_ROWS = 8
"""Rows on which the number of columns is tried."""
GIVE_UP_ABOVE = 0.5
"""On the automatic path, share of rescored pairs above which the following rows go without the bound."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Keys:
    """The key side: ``k`` float8 ``[num_keys, 128]``, ``k_scale`` float32, and the bound pass's norm and scale."""

    k: torch.Tensor
    k_scale: torch.Tensor
    norm: torch.Tensor
    scale: torch.Tensor


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """A block of rows, contiguous: ``q`` float8 ``[rows, H, 128]``, ``weights`` ``[rows, H]``, windows int32."""

    q: torch.Tensor
    weights: torch.Tensor
    ks: torch.Tensor
    ke: torch.Tensor

    def pick(self, places: torch.Tensor | slice) -> Rows:
        """The rows at these places."""
        q = self.q.view(torch.uint8)[places].view(torch.float8_e4m3fn)  # torch indexes few FP8 tensors itself
        return Rows(q=q, weights=self.weights[places], ks=self.ks[places], ke=self.ke[places])

    def __len__(self) -> int:
        return self.q.shape[0]


@dataclasses.dataclass(slots=True, kw_only=True)
class RowReport:
    """What happened to the rows of a call, filled block by block (CPU tensors and lists)."""

    pruned: torch.Tensor
    rescored: torch.Tensor
    survivors: torch.Tensor
    fallback: dict[Fallback, list[int]]
    columns: int = 0

    def note(self, reason: Fallback, rows: torch.Tensor) -> None:
        """Count rows (places in the call) under a fallback reason, once each."""
        if rows.numel():
            known = self.fallback.setdefault(reason, [])
            known.extend(row for row in rows.tolist() if row not in known)


class RunningTopK:
    """The exact top-K of the keys seen so far, per row, ordered by key; two sets of buffers that take turns."""

    def __init__(self, workspace: Workspace, rows: int, topk: int) -> None:
        sides = []
        for _ in range(2):
            index = workspace.take((rows, topk), torch.int32)
            score = workspace.take((rows, topk), torch.float32)
            sides.append((index, score, workspace.take((rows,), torch.int32)))
        self.now, self._next = sides
        self.now[2].zero_()

    def merge(
        self, index: torch.Tensor | None, score: torch.Tensor, start: torch.Tensor, end: torch.Tensor, base: int
    ) -> None:
        """Take in the places ``start .. end`` of a list, or of logits whose place 0 is key ``base``."""
        launch_topk(*self.now, index, score, start, end, base, self._next)
        self.now, self._next = self._next, self.now

    def kth(self) -> torch.Tensor:
        """K-th score of each row, -Inf for a row with fewer than K entries."""
        _, score, count = self.now
        return torch.where(count == score.shape[1], score.amin(-1), -torch.inf)


def key_side(k: torch.Tensor, k_scale: torch.Tensor) -> Keys:
    """Key preparation: norms rounded up beside the keys."""
    norm = torch.empty_like(k_scale)
    scale = torch.empty_like(k_scale)
    if k.shape[0]:
        launch_key_norms(k, k_scale, norm, scale)
    return Keys(k=k, k_scale=k_scale, norm=norm, scale=scale)


def _score_dense(rows: Rows, keys: Keys, running: RunningTopK, low: int, high: int, logits: torch.Tensor) -> None:
    """Score all visible keys of ``[low, high)`` and merge them, as many at a time as ``logits`` has columns."""
    width = logits.shape[1]
    for start in range(low, high, width):
        end = min(start + width, high)
        launch_score(
            rows.q, keys.k, keys.k_scale, rows.weights, rows.ks, rows.ke, keys.k_scale, logits[: len(rows)], start, end
        )
        first = (rows.ks.clamp(min=start) - start).to(torch.int32)
        running.merge(None, logits, first, torch.maximum(rows.ke.clamp(max=end) - start, first), start)


def dense_rows(rows: Rows, keys: Keys, topk: int, chunk: int, workspace: Workspace) -> RunningTopK:
    """Exact top-K of a block of rows from all their keys."""
    running = RunningTopK(workspace, len(rows), topk)
    low, high = int(rows.ks.min()), int(rows.ke.max())
    if low < high:
        logits = workspace.take((len(rows), min(chunk, high - low)), torch.float32)
        _score_dense(rows, keys, running, low, high, logits)
    return running


def _rescan(
    rows: Rows, keys: Keys, running: RunningTopK, places: torch.Tensor, low: int, high: int, plan: PrefillPlan
) -> None:
    """Score ``[low, high)`` densely for the rows at ``places``, a few at a time, into their running top-K."""
    topk = running.now[0].shape[1]
    for some in places.split(plan.rescan_rows):
        part = rows.pick(some)
        space = Workspace(places.device, plan.rescan_bytes)
        inner = RunningTopK(space, len(part), topk)
        for inside, outside in zip(inner.now, running.now, strict=True):
            inside.copy_(outside[some])
        logits = space.take((len(part), min(plan.rescan_keys, high - low)), torch.float32)
        _score_dense(part, keys, inner, low, high, logits)
        for inside, outside in zip(inner.now, running.now, strict=True):
            outside[some] = inside


@dataclasses.dataclass(slots=True, kw_only=True)
class Seeded:
    """Seeds of a block of rows with their scores.

    Attributes:
        lists: ``[ceil(rows / rows_per_list), n]`` int32, distinct keys, -1 where there is none.
        score: ``[rows, n]`` float32, NaN where there is no seed.
        rows_per_list: consecutive rows that share a list.
        tau: ``[rows]`` float32, the K-th best score; NaN for a row with fewer seeds.
    """

    lists: torch.Tensor
    score: torch.Tensor
    rows_per_list: int
    tau: torch.Tensor

    def pick(self, places: torch.Tensor) -> Seeded:
        """The seeds of the rows at these places."""
        return Seeded(
            lists=self.lists[places // self.rows_per_list],
            score=self.score[places],
            rows_per_list=1,
            tau=self.tau[places],
        )


def sample_keys(seeded: Seeded, ks: torch.Tensor, ke: torch.Tensor) -> torch.Tensor:
    """Keys that steer the choice of columns: seeds just below ``tau``, and an even sample of each row's window.

    Returns:
        ``[rows, 2 * HALF_SAMPLE]`` int32, -1 where there is none.
    """
    sample = torch.full((len(ks), 2 * HALF_SAMPLE), PAD_INDEX, dtype=torch.int32, device=ks.device)
    launch_hard_keys(seeded.lists, seeded.score, seeded.tau, seeded.rows_per_list, sample[:, :HALF_SAMPLE])
    place = torch.arange(HALF_SAMPLE, device=ks.device)
    sample[:, HALF_SAMPLE:] = ks[:, None] + place * (ke - ks).long()[:, None] // HALF_SAMPLE
    return sample


def kth_best(score: torch.Tensor, topk: int) -> torch.Tensor:
    """K-th largest score of each row, NaN with fewer than K scores."""
    tau = torch.empty(len(score), dtype=torch.float32, device=score.device)
    launch_kth(score, topk, tau)
    return tau


def seed_groups(
    rows: Rows, keys: Keys, topk: int, plan: PrefillPlan, hints: torch.Tensor | None, workspace: Workspace
) -> tuple[Seeded, torch.Tensor]:
    """Score seeds shared by groups of rows: winners of pilot rows (or the hints), the newest keys, an even sample.

    Pilots are single rows that are scored densely, one in the middle of each group. They are not needed with hints.

    Returns:
        the seeds, and the places of the pilots among the rows.
    """
    device, total = rows.q.device, len(rows)
    groups = -(-total // GROUP_ROWS)
    first = torch.arange(groups, device=device) * GROUP_ROWS
    last = (first + GROUP_ROWS).clamp(max=total) - 1
    if hints is None:
        pilots = (first + last) // 2
        near = min(plan.pilots_near, groups)
        winners = dense_rows(rows.pick(pilots), keys, topk, plan.key_chunk, workspace).now[0]
        nearest = (torch.arange(groups, device=device) - near // 2).clamp(0, groups - near)
    else:
        pilots = first[:0]
        near = 1
        winners = hints[None, : plan.pilots_near * topk].to(device=device, dtype=torch.int32)
        nearest = torch.zeros_like(first)
    padded = groups * GROUP_ROWS - total
    lowest = torch.nn.functional.pad(rows.ks, (0, padded), value=2**31 - 1).view(groups, -1).amin(1)
    highest = torch.nn.functional.pad(rows.ke, (0, padded)).view(groups, -1).amax(1)
    lists = group_seeds(winners, nearest, lowest.long(), highest.long(), near, plan.newest, plan.spread)
    score = workspace.take((total, lists.shape[1]), torch.float32)
    launch_score_lists(rows.q, keys.k, keys.k_scale, rows.weights, rows.ks, rows.ke, lists, GROUP_ROWS, score)
    return Seeded(lists=lists, score=score, rows_per_list=GROUP_ROWS, tau=kth_best(score, topk)), pilots


def seed_rows(rows: Rows, keys: Keys, topk: int, plan: PrefillPlan, workspace: Workspace) -> Seeded:
    """Score seeds of each row's own: its newest keys and an even sample of the others."""
    seed = own_seeds(rows.ks, rows.ke, plan.own_seeds)
    score = workspace.take(tuple(seed.shape), torch.float32)
    every = torch.full_like(rows.ks, seed.shape[1])
    launch_rescore(
        rows.q, keys.k, keys.k_scale, rows.weights, seed.clamp(min=0), every, score, seed.shape[1]
    )
    score.masked_fill_(seed < 0, torch.nan)
    return Seeded(lists=seed, score=score, rows_per_list=1, tau=kth_best(score, topk))


def choose_columns(
    rows: Rows, keys: Keys, seeded: Seeded, plan: PrefillPlan, workspace: Workspace, *, may_filter: bool
) -> int:
    """Columns with the least expected time, from a trial on a few rows; 0 if a filter without the bound is faster.

    Exactness: heuristic; the choice changes speed only.
    """
    if len(plan.column_choices) == 1:
        return plan.column_choices[0]
    some = torch.linspace(0, len(rows) - 1, min(TRIAL_ROWS, len(rows)), dtype=torch.float64, device=rows.q.device)
    some = some.long()
    few, seeded = rows.pick(some), seeded.pick(some)
    heads = head_terms(few.q, keys.k, keys.norm, sample_keys(seeded, few.ks, few.ke))
    ke = torch.where(seeded.tau.isnan(), few.ks, few.ke)
    words = workspace.take((len(few), plan.key_chunk // 32), torch.int32)
    index = workspace.take((len(few), 1), torch.int32)
    count = workspace.take((len(few),), torch.int32)
    low, high = int(few.ks.min()), int(ke.max())
    found = torch.zeros(len(plan.column_choices), dtype=torch.int64, device=rows.q.device)
    for place, columns in enumerate(plan.column_choices):
        constants = prepare_rows(few.q, few.weights, heads, columns)
        tiled = _tile_columns(constants.columns, constants.coefficients)
        for start in range(low, high, plan.key_chunk):
            end = min(start + plan.key_chunk, high)
            launch_bound(
                *tiled, constants.slack, seeded.tau, keys.k, keys.norm, keys.scale, few.ks, ke, words,
                columns, start, end,
            )  # fmt: skip
            launch_compact(words, few.ks, ke, index, count, start, end)
            found[place] += count.sum()
    visible = max(int((ke - few.ks).sum()), 1)
    return plan.cheapest_columns([survivors / visible for survivors in found.tolist()], may_filter=may_filter)


@dataclasses.dataclass(slots=True, kw_only=True)
class Pruned:
    """Outcome of ``pruned_rows``: the top-K, which rows must be recomputed and why, the work done per row."""

    running: RunningTopK
    failed: dict[Fallback, torch.Tensor]
    overflowed: torch.Tensor
    rescored: torch.Tensor
    survivors: torch.Tensor


class Emitted:
    """Scored keys that reached ``tau``, waiting to be merged into the running top-K."""

    def __init__(self, workspace: Workspace, rows: int, capacity: int, running: RunningTopK) -> None:
        self.running = running
        self._index = workspace.take((rows, capacity), torch.int32)
        self._score = workspace.take((rows, capacity), torch.float32)
        self._count = workspace.take((rows,), torch.int32)
        self._full = workspace.take((rows,), torch.int32)
        self._zero = torch.zeros_like(self._count)
        self._count.zero_()

    def append(self, index: torch.Tensor, score: torch.Tensor, count: torch.Tensor, tau: torch.Tensor) -> torch.Tensor:
        """Take in the entries that reach ``tau``; bool per row: its entries do not fit, and none was taken."""
        launch_append(index, score, count, tau, self._index, self._score, self._count, self._full)
        return self._full != 0

    def flush(self) -> None:
        """Merge what is waiting."""
        self.running.merge(self._index, self._score, self._zero, self._count, 0)
        self._count.zero_()


def pruned_rows(
    rows: Rows,
    keys: Keys,
    topk: int,
    mode: Mode,
    plan: PrefillPlan,
    columns: int,
    seeded: Seeded,
    workspace: Workspace,
    on_stage: Callable[[str], None],
) -> Pruned:
    """Exact top-K of a block of rows with more than ``topk`` visible keys each, skipping what ``mode`` allows.

    Rows under ``failed`` hold no result. ``overflowed`` rows do: the chunk that did not fit was rescanned.
    """
    device = rows.q.device
    count_rows = len(rows)
    shared = (rows.q, keys.k, keys.k_scale, rows.weights)
    visible = (rows.ke - rows.ks).long()

    tau = seeded.tau
    too_few = tau.isnan()
    seed_tau = tau
    rescored = (~seeded.score.isnan()).sum(1)

    pruning = mode in PRUNING
    unusable = torch.zeros_like(too_few)
    failed = {}
    if pruning:
        on_stage("prepare")
        heads = head_terms(rows.q, keys.k, keys.norm, sample_keys(seeded, rows.ks, rows.ke))
        constants = prepare_rows(rows.q, rows.weights, heads, columns)
        failed[Fallback.NON_FINITE_ROW] = constants.non_finite
        failed[Fallback.ROW_MAGNITUDE] = constants.too_large
        unusable = constants.non_finite | constants.too_large
        column, coefficient, floor = _tile_columns(constants.columns, constants.coefficients)
    failed[Fallback.TOO_FEW_SEEDS] = too_few & ~unusable
    unusable = unusable | too_few
    # Rows that fail are not looked at by any later stage.
    ke = torch.where(unusable, rows.ks, rows.ke)

    running = RunningTopK(workspace, count_rows, topk)
    survivors = torch.zeros(count_rows, dtype=torch.int64, device=device)
    overflowed = torch.zeros_like(unusable)
    low, high = int(rows.ks.min()), int(ke.max())
    words = workspace.take((count_rows, plan.key_chunk // 32), torch.int32)
    index = workspace.take((count_rows, plan.capacity), torch.int32)
    score = workspace.take((count_rows, plan.capacity), torch.float32)
    count = workspace.take((count_rows,), torch.int32)
    zero = torch.zeros_like(rows.ks)
    emitted = None
    if mode is not Mode.PRUNE:
        emitted = Emitted(workspace, count_rows, plan.list_capacity, running)
    for start in range(low, high, plan.key_chunk):
        end = min(start + plan.key_chunk, high)
        if pruning:
            on_stage("bound")
            launch_bound(
                column, coefficient, floor, constants.slack, tau, keys.k, keys.norm, keys.scale, rows.ks, ke, words,
                columns, start, end,
            )  # fmt: skip
        else:
            on_stage("filter")
            launch_score(*shared, rows.ks, ke, tau, words, start, end)
        on_stage("compact")
        launch_compact(words, rows.ks, ke, index, count, start, end)
        survivors += count
        overflow = count > plan.capacity
        held = torch.where(overflow, 0, count).to(torch.int32)
        longest, most = torch.stack([held.amax(), count.amax()]).tolist()
        on_stage("rescore")
        launch_rescore(*shared, index, held, score, longest)
        rescored += held
        on_stage("emit")
        if emitted is None:
            running.merge(index, score, zero, held, 0)
        else:
            full = emitted.append(index, score, held, tau)
            if full.any():
                # Make room; tau may rise by that, and fewer keys reach it.
                emitted.flush()
                tau = torch.maximum(tau, running.kth())
                overflow |= emitted.append(index, score, torch.where(full, held, 0), tau)
        if most > plan.capacity or overflow.any():
            if emitted is not None:
                emitted.flush()
            overflowed |= overflow
            rescored += torch.where(overflow, (ke.clamp(max=end) - rows.ks.clamp(min=start)).long(), 0)
            _rescan(rows, keys, running, overflow.nonzero().flatten(), start, end, plan)
        if emitted is None:
            tau = torch.maximum(tau, running.kth())
    if emitted is not None:
        on_stage("select")
        emitted.flush()
    # All keys include the seeds: a K-th score below the seeds' can only come from a fault.
    failed[Fallback.THRESHOLD_NOT_MET] = ~unusable & ~(running.kth() >= seed_tau)
    if not pruning:
        rescored = visible
    return Pruned(running=running, failed=failed, overflowed=overflowed, rescored=rescored, survivors=survivors)


def _tile_columns(
    columns: torch.Tensor, coefficients: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Columns, coefficients and floors in the bound kernel's order, rows padded to whole tiles with zero columns."""
    rows, num_columns, _ = columns.shape
    queries = queries_per_tile(num_columns)
    tiles = -(-rows // queries)
    order = torch.tensor(
        [query * num_columns + column for query, column in column_order(num_columns)], device=columns.device
    )
    place = (torch.arange(tiles, device=columns.device)[:, None] * (queries * num_columns) + order).flatten()
    inside = place < rows * num_columns
    place = torch.where(inside, place, 0)
    codes = columns.reshape(rows * num_columns, -1).view(torch.uint8)[place] * inside[:, None]
    coefficient = torch.where(inside, coefficients.flatten()[place], 0.0)
    floor = torch.where(place % num_columns == num_columns - 1, -torch.inf, 0.0).to(torch.float32)
    return codes.view(torch.float8_e4m3fn), coefficient, floor


def run(
    rows: Rows,
    keys: Keys,
    topk: int,
    mode: Mode | None,
    plan: PrefillPlan,
    hints: torch.Tensor | None,
    workspace: Workspace,
    *,
    may_give_up: bool,
    on_progress: Callable[[int, int], None] | None,
    on_stage: Callable[[str], None],
) -> tuple[torch.Tensor, torch.Tensor, RowReport]:
    """Select for all rows; ``mode`` None is the dense path.

    With ``may_give_up`` the rest of the call goes without the bound once a block had most of its pairs rescored.

    Returns:
        ``topk_indices`` int32 and ``scores`` float32 ``[rows, topk]`` in ascending key order with -1 and -Inf tails,
        and the report.
    """
    total = len(rows)
    device = rows.q.device
    out_index = torch.full((total, topk), PAD_INDEX, dtype=torch.int32, device=device)
    out_score = torch.full((total, topk), -torch.inf, dtype=torch.float32, device=device)
    visible = (rows.ke - rows.ks).clamp(min=0)
    report = RowReport(
        pruned=torch.zeros(total, dtype=torch.bool),
        rescored=visible.long().cpu(),
        survivors=visible.long().cpu(),
        fallback={},
    )
    def finish(places: torch.Tensor, running: RunningTopK, good: torch.Tensor) -> None:
        index, score, count = running.now
        filled = torch.arange(topk, device=device) < count[:, None]
        out_index[places[good]] = torch.where(filled, index, PAD_INDEX)[good]
        out_score[places[good]] = torch.where(filled, score, -torch.inf)[good]

    def skip(places: torch.Tensor, *, own: bool) -> torch.Tensor:
        """Select for these rows, skipping what the mode allows.

        ``own``: with seeds of each row's own, not of its group. Returns, per row, 0 if it was served, 1 if it had too
        few seeds, 2 if it could not be served otherwise.
        """
        nonlocal mode
        workspace.reset()
        part = rows.pick(places)
        on_stage("seeds")
        pilots = places[:0]
        if own:
            seeded = seed_rows(part, keys, topk, plan, workspace)
        else:
            seeded, pilots = seed_groups(part, keys, topk, plan, hints, workspace)
        if mode in PRUNING and report.columns == 0:
            on_stage("columns")
            report.columns = choose_columns(
                part, keys, seeded, plan, workspace, may_filter=may_give_up and mode is Mode.BOTH
            )
            if report.columns == 0:
                mode = Mode.EMIT
                report.note(Fallback.SLACK_BOUND, places)
        result = pruned_rows(part, keys, topk, mode, plan, report.columns, seeded, workspace, on_stage)
        bad = torch.stack(list(result.failed.values())).any(0)
        for reason, which in result.failed.items():
            if own or reason is not Fallback.TOO_FEW_SEEDS:
                report.note(reason, places[which])
        report.note(Fallback.SURVIVOR_OVERFLOW, places[result.overflowed & ~bad])
        finish(places, result.running, ~bad)
        seen = visible[places].long()
        # Pilots were scored densely too.
        result.rescored[pilots] = seen[pilots]
        good = places[~bad].cpu()
        report.rescored[good] = torch.minimum(result.rescored, seen)[~bad].cpu()
        report.survivors[good] = result.survivors[~bad].cpu()
        report.pruned[good] = mode in PRUNING
        return torch.where(result.failed[Fallback.TOO_FEW_SEEDS], 1, bad.to(torch.int32) * 2)

    for start in range(0, total, plan.max_rows):
        block = torch.arange(start, min(start + plan.max_rows, total), device=device)
        dense = block
        if mode is not None and mode is not Mode.BASE:
            is_long = visible[block] > topk
            report.note(Fallback.SHORT_ROW, block[~is_long & (visible[block] > 0)])
            dense, candidates = block[~is_long], block[is_long]
            if len(candidates):
                grouped = hints is not None or len(candidates) >= PILOTS_FROM
                again = candidates
                if grouped:
                    state = skip(candidates, own=False)
                    again = candidates[state == 1]
                    dense = torch.cat([dense, candidates[state == 2]])
                if len(again):
                    state = skip(again, own=True)
                    dense = torch.cat([dense, again[state != 0]])
                rescored = int(report.rescored[candidates.cpu()].sum())
                if may_give_up and mode is Mode.BOTH and rescored > GIVE_UP_ABOVE * int(visible[candidates].sum()):
                    mode = Mode.EMIT
                    report.note(Fallback.SLACK_BOUND, torch.arange(start + len(block), total))
        if len(dense):
            workspace.reset()
            on_stage("dense")
            running = dense_rows(rows.pick(dense), keys, topk, plan.key_chunk, workspace)
            finish(dense, running, torch.ones(len(dense), dtype=torch.bool, device=device))
        if on_progress is not None:
            on_progress(start + len(block), total)
    return out_index, out_score, report
