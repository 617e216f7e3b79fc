"""The stages of the prefill path, in order, for one call.

Rows go through in blocks, keys in ascending chunks. For each block: seeds and ``tau``, query preparation, then per
chunk the bound pass (or a dense filter), compaction, rescoring and emit; at the end the exact top-K of what was
emitted. Rows that the bound cannot serve are scored densely. ``tau`` may rise between chunks: the running K-th score
is a K-th score of genuine keys too.

Launches cost as much as small kernels, so whatever is known about windows is worked out on the CPU, once a call.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from dosa_gpu.kernels.append import launch_append
from dosa_gpu.kernels.bound import launch_bound
from dosa_gpu.kernels.compact import launch_compact
from dosa_gpu.kernels.finish import THRESHOLD_NOT_MET, TOO_FEW_SEEDS, launch_finish
from dosa_gpu.kernels.key_norms import launch_key_norms
from dosa_gpu.kernels.mark_seeds import launch_mark_seeds
from dosa_gpu.kernels.rescore import launch_rescore
from dosa_gpu.kernels.row_bound import NON_FINITE, TOO_LARGE
from dosa_gpu.kernels.sample_keys import launch_sample_keys
from dosa_gpu.kernels.score import launch_score
from dosa_gpu.kernels.score_lists import launch_score_lists
from dosa_gpu.kernels.topk import launch_kth, launch_topk, scratch_bytes
from dosa_gpu.plan import GROUP_ROWS, OWN_SHARE, TRIAL_ROWS, PrefillPlan, topk_scratch
from dosa_gpu.prepare import head_terms, prepare_rows
from dosa_gpu.seeds import own_seeds
from dosa_gpu.workspace import Workspace
from dosa_ref.spec import PAD_INDEX, Fallback, Mode

PRUNING = (Mode.PRUNE, Mode.BOTH)
"""Modes with the bound pass."""
PILOTS_FROM = 3
"""With fewer rows than this a pilot costs more than it saves."""
HALF_SAMPLE = 32
"""Keys just below ``tau``, and keys anywhere, on which the heads of a row are measured."""
GIVE_UP_ABOVE = 0.5
"""On the automatic path, share of rescored pairs above which the following rows go without the bound."""

REASONS = {
    NON_FINITE: Fallback.NON_FINITE_ROW,
    TOO_LARGE: Fallback.ROW_MAGNITUDE,
    TOO_FEW_SEEDS: Fallback.TOO_FEW_SEEDS,
    THRESHOLD_NOT_MET: Fallback.THRESHOLD_NOT_MET,
}
"""What a row's state means."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Keys:
    """The key side: ``k`` float8 ``[num_keys, 128]``, ``k_scale`` float32, and the bound pass's norm and scale."""

    k: torch.Tensor
    k_scale: torch.Tensor
    norm: torch.Tensor
    scale: torch.Tensor


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """A block of rows, contiguous.

    Attributes:
        q: float8 ``[rows, H, 128]``.
        weights: float32 ``[rows, H]``.
        ks, ke: int32 ``[rows]``, windows on the device.
        first, last: int64 ``[rows]``, the same windows on the CPU; ``last >= first``.
    """

    q: torch.Tensor
    weights: torch.Tensor
    ks: torch.Tensor
    ke: torch.Tensor
    first: torch.Tensor
    last: torch.Tensor

    def pick(self, places: torch.Tensor) -> Rows:
        """The rows at these places (int64 on the CPU, ascending); consecutive ones are not copied."""
        low, high = int(places[0]), int(places[-1]) + 1
        if high - low == len(places):
            where: torch.Tensor | slice = slice(low, high)
        else:
            where = places.to(self.q.device)
        # torch indexes few FP8 tensors itself.
        q = self.q.view(torch.uint8)[where].view(torch.float8_e4m3fn)
        return Rows(
            q=q, weights=self.weights[where], ks=self.ks[where], ke=self.ke[where],
            first=self.first[places], last=self.last[places],
        )  # fmt: skip

    def span(self) -> tuple[int, int]:
        """From the first to the last key that a row sees."""
        return int(self.first.min()), int(self.last.max())

    def visible(self) -> torch.Tensor:
        """Keys that each row sees, int64 on the CPU."""
        return self.last - self.first

    def __len__(self) -> int:
        return self.q.shape[0]


@dataclasses.dataclass(slots=True, kw_only=True)
class RowReport:
    """What happened to the rows of a call, filled block by block (CPU tensors and lists).

    ``columns`` is the number of dot columns of the bound pass, 0 before there was one.
    """

    pruned: torch.Tensor
    rescored: torch.Tensor
    survivors: torch.Tensor
    fallback: dict[Fallback, list[int]]
    columns: int = 0

    def note(self, reason: Fallback, rows: torch.Tensor) -> None:
        """Count rows (places in the call, on the CPU) under a fallback reason, once each."""
        if rows.numel():
            known = self.fallback.setdefault(reason, [])
            before = set(known)
            known.extend(row for row in rows.tolist() if row not in before)


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
        self._workspace = workspace

    def merge(
        self, index: torch.Tensor | None, score: torch.Tensor, start: torch.Tensor, end: torch.Tensor, base: int
    ) -> None:
        """Take in the places ``start .. end`` of a list, or of logits whose place 0 is key ``base``."""
        rows, topk = self.now[0].shape
        self._workspace.lend(scratch_bytes(score.device.type, rows, topk, score.shape[1]))
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
        if start == 0 and end >= int(rows.last.max()):
            first, last = rows.ks, rows.ke
        else:
            first = (rows.ks.clamp(min=start) - start).to(torch.int32)
            last = torch.maximum(rows.ke.clamp(max=end) - start, first)
        running.merge(None, logits, first, last, start)


def dense_rows(rows: Rows, keys: Keys, topk: int, chunk: int, workspace: Workspace) -> RunningTopK:
    """Exact top-K of a block of rows from all their keys, ``chunk`` keys at a time."""
    running = RunningTopK(workspace, len(rows), topk)
    low, high = rows.span()
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
        there = some.to(part.q.device)
        space = Workspace(part.q.device, plan.rescan_bytes + topk_scratch(part.q.device.type, topk))
        inner = RunningTopK(space, len(part), topk)
        for inside, outside in zip(inner.now, running.now, strict=True):
            inside.copy_(outside[there])
        logits = space.take((len(part), min(plan.rescan_keys, high - low)), torch.float32)
        _score_dense(part, keys, inner, low, high, logits)
        for inside, outside in zip(inner.now, running.now, strict=True):
            outside[there] = inside


@dataclasses.dataclass(slots=True, kw_only=True)
class Seeded:
    """Seeds of a block of rows with their scores.

    Attributes:
        lists: ``[ceil(rows / rows_per_list), n]`` int32, distinct keys, -1 where there is none.
        score: ``[rows, n]`` float32, NaN where there is no seed.
        rows_per_list: consecutive rows that share a list.
        tau: ``[rows]`` float32, the K-th best score; NaN for a row with fewer seeds.
        sample: ``[rows, 2 * HALF_SAMPLE]`` int32, keys that steer the choice of columns, -1 for none.
        count: ``[rows]`` int32, seeds with a score.
        pilots: int64 on the CPU, places of rows that were scored densely for their winners.
    """

    lists: torch.Tensor
    score: torch.Tensor
    rows_per_list: int
    tau: torch.Tensor
    sample: torch.Tensor
    count: torch.Tensor
    pilots: torch.Tensor


def _seeded(
    rows: Rows, lists: torch.Tensor, score: torch.Tensor, rows_per_list: int, topk: int, pilots: torch.Tensor
) -> Seeded:
    tau = torch.empty(len(rows), dtype=torch.float32, device=score.device)
    launch_kth(score, topk, tau)
    sample = torch.empty(len(rows), 2 * HALF_SAMPLE, dtype=torch.int32, device=score.device)
    count = torch.empty(len(rows), dtype=torch.int32, device=score.device)
    launch_sample_keys(lists, score, tau, rows.ks, rows.ke, rows_per_list, sample, count)
    return Seeded(
        lists=lists, score=score, rows_per_list=rows_per_list, tau=tau, sample=sample, count=count, pilots=pilots
    )


def seed_groups(
    rows: Rows, keys: Keys, topk: int, plan: PrefillPlan, hints: torch.Tensor | None, workspace: Workspace
) -> Seeded:
    """Seeds shared by groups of rows: winners of pilot rows (or the hints), the newest keys, an even sample.

    Pilots are single rows that are scored densely, one in the middle of each group. They are not needed with hints.
    """
    device, total = rows.q.device, len(rows)
    groups = -(-total // GROUP_ROWS)
    first = torch.arange(groups) * GROUP_ROWS
    if hints is None:
        pilots = (first + (first + GROUP_ROWS).clamp(max=total) - 1) // 2
        near = min(plan.pilots_near, groups)
        winners, _, count = dense_rows(rows.pick(pilots), keys, topk, plan.pilot_chunk, workspace).now
        winners.masked_fill_(torch.arange(topk, device=device) >= count[:, None], PAD_INDEX)
        nearest = (torch.arange(groups) - near // 2).clamp(0, groups - near)
    else:
        pilots = first[:0]
        near = 1
        winners = hints[None, : plan.pilots_near * topk]
        nearest = torch.zeros_like(first)
    _, high = rows.span()
    width = near * winners.shape[1] + plan.newest + plan.spread
    words = workspace.take((groups, -(-high // 32)), torch.int32).zero_()
    start, end = (torch.empty(groups, dtype=torch.int32, device=device) for _ in range(2))
    launch_mark_seeds(
        winners, nearest.to(device=device, dtype=torch.int32), rows.ks, rows.ke, near, plan.newest, plan.spread,
        GROUP_ROWS, words, start, end,
    )  # fmt: skip
    lists = workspace.take((groups, width), torch.int32).fill_(PAD_INDEX)
    launch_compact(words, start, end, lists, torch.empty_like(start), 0, high)
    score = workspace.take((total, width), torch.float32)
    launch_score_lists(rows.q, keys.k, keys.k_scale, rows.weights, rows.ks, rows.ke, lists, GROUP_ROWS, score)
    return _seeded(rows, lists, score, GROUP_ROWS, topk, pilots)


def seed_rows(rows: Rows, keys: Keys, topk: int, plan: PrefillPlan, workspace: Workspace) -> Seeded:
    """Seeds of each row's own: its newest keys and an even sample of the others."""
    seed = own_seeds(rows.ks, rows.ke, plan.own_seeds)
    score = workspace.take(tuple(seed.shape), torch.float32)
    every = torch.full_like(rows.ks, seed.shape[1])
    launch_rescore(rows.q, keys.k, keys.k_scale, rows.weights, seed.clamp(min=0), every, score, seed.shape[1])
    score.masked_fill_(seed < 0, torch.nan)
    return _seeded(rows, seed, score, 1, topk, torch.empty(0, dtype=torch.int64))


def choose_columns(
    rows: Rows, keys: Keys, seeded: Seeded, plan: PrefillPlan, workspace: Workspace, *, may_filter: bool
) -> int:
    """Columns with the least expected time, from a trial on a few rows; 0 if a filter without the bound is faster.

    Choices are tried upwards until one costs more than the one before.

    Exactness: heuristic; the choice changes speed only.
    """
    if len(plan.column_choices) == 1:
        return plan.column_choices[0]
    some = torch.linspace(0, len(rows) - 1, min(TRIAL_ROWS, len(rows)), dtype=torch.float64).long()
    few = rows.pick(some)
    there = some.to(rows.q.device)
    tau = seeded.tau[there]
    heads = head_terms(few.q, keys.k, keys.norm, seeded.sample[there])
    low, high = few.span()
    words = workspace.take((len(few), -(-(high - low) // 32)), torch.int32)
    index = workspace.take((len(few), 1), torch.int32)
    count = torch.empty(len(few), dtype=torch.int32, device=rows.q.device)
    visible = max(int(few.visible().sum()), 1)
    best, least = 0, plan.expected_cost(0, 0.0) if may_filter else float("inf")
    before = float("inf")
    for columns in plan.column_choices:
        constants = prepare_rows(few.q, few.weights, heads, columns)
        launch_bound(
            constants.columns, constants.coefficients, constants.slack, tau,
            keys.k, keys.norm, keys.scale, few.ks, few.ke, words, low, high,
        )  # fmt: skip
        launch_compact(words, few.ks, few.ke, index, count, low, high)
        cost = plan.expected_cost(columns, int(count.sum()) / visible)
        if cost < least:
            best, least = columns, cost
        if cost > before:
            break
        before = cost
    return best


class Emitted:
    """Scored keys that reached ``tau``, waiting to be merged into the running top-K."""

    def __init__(self, workspace: Workspace, rows: int, capacity: int, running: RunningTopK) -> None:
        self.running = running
        self._index = workspace.take((rows, capacity), torch.int32)
        self._score = workspace.take((rows, capacity), torch.float32)
        self._count, self._zero, self._any_full = torch.zeros(3, rows, dtype=torch.int32, device=self._index.device)
        self.full = workspace.take((rows,), torch.int32)

    def append(self, index: torch.Tensor, score: torch.Tensor, count: torch.Tensor, tau: torch.Tensor) -> bool:
        """Take in the entries that reach ``tau``; whether some row's do not fit. ``full`` says which; none is taken."""
        launch_append(index, score, count, tau, self._index, self._score, self._count, self.full, self._any_full)
        if not self._any_full[:1].item():
            return False
        self._any_full.zero_()
        return True

    def flush(self) -> None:
        """Merge what is waiting."""
        self.running.merge(self._index, self._score, self._zero, self._count, 0)
        self._count.zero_()


@dataclasses.dataclass(slots=True, kw_only=True)
class Pruned:
    """Outcome of ``pruned_rows``.

    Attributes:
        running: the top-K.
        state: ``[rows]`` int32 on the device: 0, ``NON_FINITE`` or ``TOO_LARGE``.
        survivors: ``[rows]`` int64 on the device, keys that passed the bound or the filter.
        rescanned: pairs that were scored again by row, int64 on the CPU; above 0 for a row that overflowed.
    """

    running: RunningTopK
    state: torch.Tensor
    survivors: torch.Tensor
    rescanned: torch.Tensor


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
    """Top-K of a block of rows with more than ``topk`` visible keys each, skipping what ``mode`` allows.

    Rows with a state, and rows whose ``tau`` is NaN, hold no result. A chunk in which a row's survivors or emitted keys
    did not fit was rescanned for that row.
    """
    shared = (rows.q, keys.k, keys.k_scale, rows.weights)
    tau = seeded.tau
    pruning = mode in PRUNING
    if pruning:
        on_stage("prepare")
        heads = head_terms(rows.q, keys.k, keys.norm, seeded.sample)
        constants = prepare_rows(rows.q, rows.weights, heads, columns)
        state = constants.state
    else:
        state = torch.zeros_like(rows.ks)
    # Rows that cannot be served are not looked at by any later stage.
    ke = torch.where(tau.isnan() | (state != 0), rows.ks, rows.ke)

    running = RunningTopK(workspace, len(rows), topk)
    survivors = torch.zeros(len(rows), dtype=torch.int64, device=rows.q.device)
    rescanned = torch.zeros(len(rows), dtype=torch.int64)
    words = workspace.take((len(rows), plan.key_chunk // 32), torch.int32)
    index = workspace.take((len(rows), plan.capacity), torch.int32)
    score = workspace.take((len(rows), plan.capacity), torch.float32)
    count = workspace.take((len(rows),), torch.int32)
    zero = torch.zeros_like(rows.ks)
    emitted = None
    if mode is not Mode.PRUNE:
        emitted = Emitted(workspace, len(rows), plan.list_capacity, running)
    low, high = rows.span()
    for start in range(low, high, plan.key_chunk):
        end = min(start + plan.key_chunk, high)
        if pruning:
            on_stage("bound")
            launch_bound(
                constants.columns, constants.coefficients, constants.slack, tau, keys.k, keys.norm, keys.scale,
                rows.ks, ke, words, start, end,
            )  # fmt: skip
        else:
            on_stage("filter")
            launch_score(*shared, rows.ks, ke, tau, words, start, end)
        on_stage("compact")
        launch_compact(words, rows.ks, ke, index, count, start, end)
        survivors += count
        most = int(count.amax())
        held = count
        overflow = None
        if most > plan.capacity:
            overflow = count > plan.capacity
            held = torch.where(overflow, 0, count)
        on_stage("rescore")
        launch_rescore(*shared, index, held, score, min(most, plan.capacity))
        on_stage("emit")
        if emitted is None:
            running.merge(index, score, zero, held, 0)
        elif emitted.append(index, score, held, tau):
            # Make room; tau may rise by that, and fewer keys reach it.
            again = torch.where(emitted.full != 0, held, 0)
            emitted.flush()
            tau = torch.maximum(tau, running.kth())
            if emitted.append(index, score, again, tau):
                full = emitted.full != 0
                overflow = full if overflow is None else overflow | full
        if overflow is not None:
            on_stage("rescan")
            if emitted is not None:
                emitted.flush()
            places = overflow.cpu().nonzero().flatten()
            rescanned[places] += (rows.last.clamp(max=end) - rows.first.clamp(min=start))[places]
            _rescan(rows, keys, running, places, start, end, plan)
        if emitted is None:
            tau = torch.maximum(tau, running.kth())
    if emitted is not None:
        on_stage("select")
        emitted.flush()
    return Pruned(running=running, state=state, survivors=survivors, rescanned=rescanned)


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
    out_index = torch.empty((total, topk), dtype=torch.int32, device=device)
    out_score = torch.empty((total, topk), dtype=torch.float32, device=device)
    visible = rows.visible()
    report = RowReport(
        pruned=torch.zeros(total, dtype=torch.bool), rescored=visible.clone(), survivors=visible.clone(), fallback={}
    )

    def skip(places: torch.Tensor, *, own: bool) -> torch.Tensor:
        """Select for these rows, skipping what the mode allows; the rows' states, 0 for a row that was served.

        ``own``: with seeds of each row's own, not of its group.
        """
        nonlocal mode
        assert mode is not None
        workspace.reset()
        part = rows.pick(places)
        on_stage("seeds")
        if own:
            seeded = seed_rows(part, keys, topk, plan, workspace)
        else:
            seeded = seed_groups(part, keys, topk, plan, hints, workspace)
        if mode in PRUNING and report.columns == 0:
            on_stage("columns")
            report.columns = choose_columns(
                part, keys, seeded, plan, workspace, may_filter=may_give_up and mode is Mode.BOTH
            )
            if report.columns == 0:
                mode = Mode.EMIT
                report.note(Fallback.SLACK_BOUND, places)
        result = pruned_rows(part, keys, topk, mode, plan, report.columns, seeded, workspace, on_stage)
        launch_finish(*result.running.now, seeded.tau, result.state, places.to(device), out_index, out_score)
        state, seeds, survivors = torch.stack([result.state, seeded.count, result.survivors]).cpu()
        for code, reason in REASONS.items():
            if own or code != TOO_FEW_SEEDS:
                report.note(reason, places[state == code])
        report.note(Fallback.SURVIVOR_OVERFLOW, places[(result.rescanned > 0) & (state == 0)])
        rescored = seeds + survivors + result.rescanned if mode in PRUNING else part.visible()
        # Pilots were scored densely too.
        rescored[seeded.pilots] = part.visible()[seeded.pilots]
        good = state == 0
        report.rescored[places[good]] = torch.minimum(rescored, part.visible())[good]
        report.survivors[places[good]] = survivors[good]
        report.pruned[places[good]] = mode in PRUNING
        return state

    for start in range(0, total, plan.max_rows):
        block = torch.arange(start, min(start + plan.max_rows, total))
        dense = block
        if mode is not None and mode is not Mode.BASE:
            is_long = visible[block] > topk
            report.note(Fallback.SHORT_ROW, block[~is_long & (visible[block] > 0)])
            dense, again = block[~is_long], block[is_long]
            candidates = again
            if len(candidates) and (hints is not None or len(candidates) >= PILOTS_FROM):
                state = skip(candidates, own=False)
                again = candidates[state == TOO_FEW_SEEDS]
                dense = torch.cat([dense, candidates[(state != 0) & (state != TOO_FEW_SEEDS)]])
            # Lists of a row's own take more room.
            for some in again.split(max(plan.max_rows // OWN_SHARE, 1)) if len(again) else ():
                state = skip(some, own=True)
                dense = torch.cat([dense, some[state != 0]])
            rescored = int(report.rescored[candidates].sum())
            if may_give_up and mode is Mode.BOTH and rescored > GIVE_UP_ABOVE * int(visible[candidates].sum()):
                mode = Mode.EMIT
                report.note(Fallback.SLACK_BOUND, torch.arange(start + len(block), total))
        if len(dense):
            workspace.reset()
            on_stage("dense")
            dense = dense.sort().values
            running = dense_rows(rows.pick(dense), keys, topk, plan.dense_chunk, workspace)
            launch_finish(*running.now, None, None, dense.to(device), out_index, out_score)
        if on_progress is not None:
            on_progress(start + len(block), total)
    return out_index, out_score, report
