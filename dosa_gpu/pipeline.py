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

from dosa_gpu.kernels.activity import launch_activity
from dosa_gpu.kernels.bound import column_order, launch_bound, queries_per_tile
from dosa_gpu.kernels.compact import launch_compact
from dosa_gpu.kernels.emit import launch_emit
from dosa_gpu.kernels.key_norms import launch_key_norms
from dosa_gpu.kernels.rescore import launch_rescore
from dosa_gpu.kernels.score import launch_score
from dosa_gpu.kernels.topk import launch_topk
from dosa_gpu.plan import FIRST_CHUNKS, FIRST_ROWS, MIN_KEY_CHUNK, PrefillPlan
from dosa_gpu.prepare import prepare_rows
from dosa_gpu.workspace import Workspace
from dosa_ref.spec import PAD_INDEX, Fallback, Mode

NEIGHBOUR_ROWS = 8
"""Winners of this many preceding rows vote for the seeds of the next block."""
ACTIVITY_SAMPLE = 64
"""Seeds per row on which the heads' activity is measured."""
GIVE_UP_ABOVE = 0.5
"""On the automatic path, share of rescored pairs above which the following rows are scored densely."""


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


def choose_seeds(
    ks: torch.Tensor, ke: torch.Tensor, budget: int, hints: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Distinct visible keys per row: neighbours' winners and the newest keys, or the newest keys and a stride sample.

    Args:
        ks, ke: ``[rows]`` int32.
        budget: seeds per row.
        hints: distinct key columns, best first, or None.

    Returns:
        ``[rows, budget]`` int32 in any order, and bool of that shape: which places hold a seed (the others hold key 0).
        A row whose window is no longer than the budget gets all its keys. Exactness: heuristic; the choice changes
        speed only.
    """
    start = ks.long().unsqueeze(1)
    end = torch.maximum(ke.long().unsqueeze(1), start)
    length = end - start
    place = torch.arange(budget, device=ks.device)
    newest = budget - budget // 2
    # Newest half, then an even sample of what lies before it; distinct by construction.
    older = (place - newest).clamp(min=0) * (length - newest).clamp(min=0) // max(budget // 2, 1)
    seed = torch.where(place < newest, end - 1 - place, start + older)
    if hints is not None:
        hints = hints[: budget - budget // 4].to(device=ks.device, dtype=torch.int64)
        near = budget - len(hints)
        hinted = torch.cat([hints.expand(len(ks), -1), end - 1 - place[:near]], dim=1)
        # A hint among the newest keys is there already.
        fits = (hinted >= start) & (hinted < torch.where(place < len(hints), end - near, end))
        # Hints of another sequence may leave a row nearly without seeds; such a row keeps the plain choice.
        enough = (fits.sum(1, keepdim=True) * 4 >= budget * 3) & (length > budget)
        seed = torch.where(enough, hinted, seed)
        fits = fits | ~enough
    else:
        fits = torch.ones_like(seed, dtype=torch.bool)
    short = length <= budget
    seed = torch.where(short, start + place, seed)
    fits = torch.where(short, place < length, fits)
    return torch.where(fits, seed, 0).to(torch.int32), fits


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
class Pruned:
    """Outcome of ``pruned_rows``: the top-K, which rows must be recomputed and why, the work done per row."""

    running: RunningTopK
    failed: dict[Fallback, torch.Tensor]
    overflowed: torch.Tensor
    rescored: torch.Tensor
    survivors: torch.Tensor


def pruned_rows(
    rows: Rows, keys: Keys, topk: int, mode: Mode, plan: PrefillPlan, hints: torch.Tensor | None, workspace: Workspace
) -> Pruned:
    """Exact top-K of a block of rows with more than ``topk`` visible keys each, skipping what ``mode`` allows.

    Rows under ``failed`` hold no result. ``overflowed`` rows do: the chunk that did not fit was rescanned.
    """
    device = rows.q.device
    count_rows = len(rows)
    shared = (rows.q, keys.k, keys.k_scale, rows.weights)
    visible = (rows.ke - rows.ks).long()

    # Seeds, their scores with the original scorer, tau.
    seed, is_seed = choose_seeds(rows.ks, rows.ke, plan.seed_budget, hints)
    seed_score = workspace.take((count_rows, plan.seed_budget), torch.float32)
    zero = torch.zeros_like(rows.ks)
    every = torch.full_like(rows.ks, plan.seed_budget)
    launch_rescore(*shared, seed, every, seed_score, plan.seed_budget)
    # The list is not ordered by key, which decides among ties only: the K-th score is the same.
    best = RunningTopK(workspace, count_rows, topk)
    best.merge(seed, seed_score.masked_fill_(~is_seed, torch.nan), zero, every, 0)
    too_few = best.now[2] < topk
    tau = best.kth()
    seed_tau = tau
    rescored = is_seed.sum(1)

    pruning = mode in (Mode.PRUNE, Mode.BOTH)
    unusable = torch.zeros_like(too_few)
    failed = {}
    if pruning:
        # Activity of the heads on the best seeds.
        places = torch.linspace(0, topk - 1, ACTIVITY_SAMPLE, dtype=torch.float64, device=device).long()
        sample = torch.where(too_few[:, None], 0, best.now[0][:, places]).to(torch.int32)
        activity = torch.empty_like(rows.weights)
        launch_activity(rows.q, keys.k, sample, activity)
        constants = prepare_rows(rows.q, rows.weights, activity, plan.columns)
        failed[Fallback.NON_FINITE_ROW] = constants.non_finite
        failed[Fallback.ROW_MAGNITUDE] = constants.too_large
        unusable = constants.non_finite | constants.too_large
        column, coefficient, floor = _tile_columns(constants.columns, constants.coefficients, constants.linear)
    failed[Fallback.TOO_FEW_SEEDS] = too_few & ~unusable
    unusable = unusable | too_few
    # Rows that fail are not looked at by any later stage.
    ke = torch.where(unusable, rows.ks, rows.ke)

    running = RunningTopK(workspace, count_rows, topk)
    survivors = torch.zeros(count_rows, dtype=torch.int64, device=device)
    overflowed = torch.zeros_like(unusable)
    low, high = int(rows.ks.min()), int(ke.max())
    chunk = plan.key_chunk
    if hints is None:
        chunk = min(chunk, max(MIN_KEY_CHUNK, -(-(high - low) // FIRST_CHUNKS // 64) * 64))
    words = workspace.take((count_rows, -(-chunk // 32)), torch.int32)
    index = workspace.take((count_rows, plan.capacity), torch.int32)
    score = workspace.take((count_rows, plan.capacity), torch.float32)
    count = workspace.take((count_rows,), torch.int32)
    emitting = mode is Mode.BOTH
    if emitting:
        emitted_index, emitted_score, emitted_count = map(
            workspace.take,
            (index.shape, score.shape, count.shape),
            (torch.int32, torch.float32, torch.int32),
        )
    for start in range(low, high, chunk):
        end = min(start + chunk, high)
        if pruning:
            launch_bound(
                column, coefficient, floor, constants.slack, tau, keys.k, keys.norm, keys.scale, rows.ks, ke, words,
                plan.columns, start, end,
            )  # fmt: skip
        else:
            launch_score(*shared, rows.ks, ke, tau, words, start, end)
        launch_compact(words, rows.ks, ke, index, count, start, end)
        survivors += count
        overflow = count > plan.capacity
        held = torch.where(overflow, 0, count).to(torch.int32)
        launch_rescore(*shared, index, held, score, int(held.max()))
        rescored += held
        if emitting:
            launch_emit(index, score, held, tau, emitted_index, emitted_score, emitted_count)
            running.merge(emitted_index, emitted_score, zero, emitted_count, 0)
        else:
            running.merge(index, score, zero, held, 0)
        if overflow.any():
            overflowed |= overflow
            rescored += torch.where(overflow, (ke.clamp(max=end) - rows.ks.clamp(min=start)).long(), 0)
            _rescan(rows, keys, running, overflow.nonzero().flatten(), start, end, plan)
        tau = torch.maximum(tau, running.kth())
    # All keys include the seeds: a K-th score below the seeds' can only come from a fault.
    failed[Fallback.THRESHOLD_NOT_MET] = ~unusable & (running.kth() < seed_tau)
    if not pruning:
        rescored = visible
    return Pruned(running=running, failed=failed, overflowed=overflowed, rescored=rescored, survivors=survivors)


def _tile_columns(
    columns: torch.Tensor, coefficients: torch.Tensor, linear: torch.Tensor
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
    floor = torch.where(linear.flatten()[place], -torch.inf, 0.0).to(torch.float32)
    return codes.view(torch.float8_e4m3fn), coefficient, floor


def vote(index: torch.Tensor, count: torch.Tensor, limit: int) -> torch.Tensor | None:
    """Keys most often among the winners of the last rows, best first; None if there are none."""
    last = index[-NEIGHBOUR_ROWS:]
    chosen = last[torch.arange(last.shape[1], device=last.device) < count[-NEIGHBOUR_ROWS:, None]]
    if chosen.numel() == 0:
        return None
    key, votes = chosen.unique(return_counts=True)
    return key[votes.argsort(descending=True, stable=True)][:limit]


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
) -> tuple[torch.Tensor, torch.Tensor, RowReport]:
    """Select for all rows; ``mode`` None is the dense path.

    With ``may_give_up`` the rest of the call goes densely once a block had most of its pairs rescored.

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
    sparse = mode is not None and mode is not Mode.BASE

    def finish(places: torch.Tensor, running: RunningTopK, good: torch.Tensor) -> None:
        index, score, count = running.now
        filled = torch.arange(topk, device=device) < count[:, None]
        out_index[places[good]] = torch.where(filled, index, PAD_INDEX)[good]
        out_score[places[good]] = torch.where(filled, score, -torch.inf)[good]

    done = 0
    size = FIRST_ROWS if sparse and hints is None else plan.max_rows
    while done < total:
        block = torch.arange(done, min(done + min(size, plan.max_rows), total), device=device)
        long_enough = visible[block] > topk
        if sparse:
            report.note(Fallback.SHORT_ROW, block[~long_enough & (visible[block] > 0)])
        dense = block[~long_enough] if sparse else block
        candidates = block[long_enough] if sparse else block[:0]
        if len(candidates):
            assert mode is not None
            workspace.reset()
            result = pruned_rows(rows.pick(candidates), keys, topk, mode, plan, hints, workspace)
            bad = torch.zeros(len(candidates), dtype=torch.bool, device=device)
            for reason, which in result.failed.items():
                report.note(reason, candidates[which])
                bad |= which
            report.note(Fallback.SURVIVOR_OVERFLOW, candidates[result.overflowed & ~bad])
            finish(candidates, result.running, ~bad)
            kept = candidates[~bad].cpu()
            report.rescored[kept] = torch.minimum(result.rescored, visible[candidates].long())[~bad].cpu()
            report.survivors[kept] = result.survivors[~bad].cpu()
            report.pruned[kept] = mode in (Mode.PRUNE, Mode.BOTH)
            slack = report.rescored[candidates.cpu()].sum() > GIVE_UP_ABOVE * visible[candidates].sum().item()
            if may_give_up and mode in (Mode.PRUNE, Mode.BOTH) and slack:
                sparse = False
                report.note(Fallback.SLACK_BOUND, torch.arange(int(block[-1]) + 1, total))
            dense = torch.cat([dense, candidates[bad]])
        if len(dense):
            workspace.reset()
            running = dense_rows(rows.pick(dense), keys, topk, plan.key_chunk, workspace)
            finish(dense, running, torch.ones(len(dense), dtype=torch.bool, device=device))
        if sparse and len(candidates):
            counted = (out_index[block] != PAD_INDEX).sum(1)
            hints = vote(out_index[block], counted, plan.seed_budget) if counted.any() else hints
        done += len(block)
        size *= FIRST_ROWS
        if on_progress is not None:
            on_progress(done, total)
    return out_index, out_score, report
