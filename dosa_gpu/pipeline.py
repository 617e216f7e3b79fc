"""The stages of the prefill path, in order, for one call.

Rows go through in blocks, keys in ascending chunks. For each block: thresholds ``tau`` guessed from a sample of the
keys, query preparation, then per chunk the bound pass (or a dense filter), compaction, rescoring and emit; at the end
the exact top-K of what was emitted. A guess is good if K keys reach it, which the end of the block checks. Rows that
this does not serve (short ones, unusable ones, ones whose survivors did not fit or whose guess was too high) are scored
densely at the end of the call. ``tau`` may rise between chunks to the K-th best score of what was emitted.

The host does not wait for the device inside a block: it reads what became of a block's rows while the next block runs.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
import torch

from dosa_gpu.kernels.append import OVERFLOW, launch_append
from dosa_gpu.kernels.bound import launch_bound
from dosa_gpu.kernels.compact import SEGMENT_WORDS, launch_compact, launch_count
from dosa_gpu.kernels.finish import THRESHOLD_NOT_MET, TOO_FEW_SEEDS, launch_finish
from dosa_gpu.kernels.key_norms import launch_key_norms
from dosa_gpu.kernels.mark_seeds import launch_mark_seeds
from dosa_gpu.kernels.open_rows import launch_open_rows
from dosa_gpu.kernels.rescore import launch_rescore
from dosa_gpu.kernels.row_bound import NON_FINITE, TOO_LARGE
from dosa_gpu.kernels.sample import launch_sample
from dosa_gpu.kernels.sample_keys import launch_sample_keys
from dosa_gpu.kernels.score import launch_score
from dosa_gpu.kernels.score_lists import launch_score_lists
from dosa_gpu.kernels.topk import launch_kth, launch_topk, launch_trim, scratch_bytes
from dosa_gpu.plan import GROUP_ROWS, OWN_SHARE, SUPPORTED_COLUMNS, TRIAL_ROWS, PrefillPlan
from dosa_gpu.prepare import head_terms, prepare_rows
from dosa_gpu.seeds import own_seeds
from dosa_gpu.workspace import Workspace
from dosa_ref.spec import Fallback, Mode

PRUNING = (Mode.PRUNE, Mode.BOTH)
"""Modes with the bound pass."""
HALF_SAMPLE = 32
"""Keys just below ``tau``, and keys anywhere, on which the heads of a row are measured."""
HARD_RANKS = 4
"""Keys just below ``tau`` are those of up to so many times its rank."""
GIVE_UP_ABOVE = 0.5
"""On the automatic path, share of rescored pairs above which the following rows go without the bound."""

REASONS = {
    NON_FINITE: Fallback.NON_FINITE_ROW,
    TOO_LARGE: Fallback.ROW_MAGNITUDE,
    TOO_FEW_SEEDS: Fallback.TOO_FEW_SEEDS,
    THRESHOLD_NOT_MET: Fallback.THRESHOLD_NOT_MET,
    OVERFLOW: Fallback.SURVIVOR_OVERFLOW,
}
"""What a row's state means."""

Places = npt.NDArray[np.int64]
"""Rows of the call, ascending, on the CPU."""


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
        first, last: the same windows on the CPU; ``last >= first``.
    """

    q: torch.Tensor
    weights: torch.Tensor
    ks: torch.Tensor
    ke: torch.Tensor
    first: Places
    last: Places

    def pick(self, places: Places) -> Rows:
        """The rows at these places; consecutive ones are not copied."""
        low, high = int(places[0]), int(places[-1]) + 1
        if high - low == len(places):
            where: torch.Tensor | slice = slice(low, high)
        else:
            where = torch.from_numpy(places).to(self.q.device)
        # torch indexes few FP8 tensors itself.
        q = self.q.view(torch.uint8)[where].view(torch.float8_e4m3fn)
        return Rows(
            q=q, weights=self.weights[where], ks=self.ks[where], ke=self.ke[where],
            first=self.first[places], last=self.last[places],
        )  # fmt: skip

    def span(self) -> tuple[int, int]:
        """From the first to the last key that a row sees."""
        return int(self.first.min()), int(self.last.max())

    def visible(self) -> Places:
        """Keys that each row sees."""
        return self.last - self.first

    def __len__(self) -> int:
        return self.q.shape[0]


@dataclasses.dataclass(slots=True, kw_only=True)
class RowReport:
    """What happened to the rows of a call, filled block by block.

    Attributes:
        pruned: bool ``[rows]``, whether the bound pass served the row.
        rescored, survivors: int64 ``[rows]``, pairs that were scored, and keys that passed the bound or the filter.
        fallback: reason to rows, each once.
        columns: dot columns of the bound pass, 0 before there was one.
    """

    pruned: npt.NDArray[np.bool_]
    rescored: Places
    survivors: Places
    fallback: dict[Fallback, list[int]]
    columns: int = 0

    def note(self, reason: Fallback, rows: Places) -> None:
        """Count rows under a fallback reason."""
        if len(rows):
            self.fallback[reason] = sorted({*self.fallback.get(reason, ()), *rows.tolist()})


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


@dataclasses.dataclass(slots=True, kw_only=True)
class Seeded:
    """Thresholds of a block of rows, and the scored keys that they come from.

    Attributes:
        lists: ``[ceil(rows / rows_per_list), n]`` int32, distinct keys.
        rows_per_list: consecutive rows that share a list.
        score: ``[rows, n]`` float32, scores in the places ``start .. end`` (NaN: none), anything elsewhere.
        start, end: ``[rows]`` int32.
        tau: ``[rows]`` float32; NaN for a row with too few scores.
        hard: ``[rows]`` float32, a score somewhat below ``tau``.
        count: ``[rows]`` int32, keys with a score.
        guessed: whether it is left to chance that K keys reach ``tau``; else the K best of the scored keys do.
    """

    lists: torch.Tensor
    rows_per_list: int
    score: torch.Tensor
    start: torch.Tensor
    end: torch.Tensor
    tau: torch.Tensor
    hard: torch.Tensor
    count: torch.Tensor
    guessed: bool

    def sample(self, rows: Rows) -> torch.Tensor:
        """Keys that steer the choice of columns, int32 ``[rows, 2 * HALF_SAMPLE]``, -1 for none."""
        sample = torch.empty(len(rows), 2 * HALF_SAMPLE, dtype=torch.int32, device=self.score.device)
        launch_sample_keys(
            self.lists, self.score, self.start, self.end, self.tau, self.hard, rows.ks, rows.ke, self.rows_per_list,
            sample,
        )  # fmt: skip
        return sample


def _seeded(
    lists: torch.Tensor, rows_per_list: int, score: torch.Tensor, windows: tuple[torch.Tensor, ...], *, guessed: bool
) -> Seeded:
    start, end, rank = windows
    tau, hard = (torch.empty(len(score), dtype=torch.float32, device=score.device) for _ in range(2))
    count = torch.empty(len(score), dtype=torch.int32, device=score.device)
    launch_kth(score, start, end, rank, HARD_RANKS, tau, hard, count)
    return Seeded(
        lists=lists, rows_per_list=rows_per_list, score=score, start=start, end=end, tau=tau, hard=hard, count=count,
        guessed=guessed,
    )  # fmt: skip


def _whole(score: torch.Tensor, topk: int) -> tuple[torch.Tensor, ...]:
    """All places of the lists count, and the K-th score is wanted."""
    start, end, rank = (
        torch.full((len(score),), value, dtype=torch.int32, device=score.device) for value in (0, score.shape[1], topk)
    )
    return start, end, rank


def guess(rows: Rows, keys: Keys, topk: int, plan: PrefillPlan, workspace: Workspace) -> Seeded:
    """Guess thresholds from a sample of the keys that all rows share."""
    low, high = rows.span()
    count = min(plan.sample, high - low)
    place = workspace.take((count,), torch.int32)
    code = workspace.take((count, keys.k.shape[1]), torch.uint8)
    scale = workspace.take((count,), torch.float32)
    windows = tuple(torch.empty_like(rows.ks) for _ in range(3))
    launch_sample(
        keys.k.view(torch.uint8), keys.k_scale, rows.ks, rows.ke, low, high, topk, (place, code, scale), windows
    )
    score = workspace.take((len(rows), count), torch.float32)
    start, end, _ = windows
    launch_score(rows.q, code.view(keys.k.dtype), scale, rows.weights, start, end, scale, score, 0, count)
    return _seeded(place[None], len(rows), score, windows, guessed=count < high - low)


def seed_groups(
    rows: Rows, keys: Keys, topk: int, plan: PrefillPlan, hints: torch.Tensor, workspace: Workspace
) -> Seeded:
    """Seeds shared by groups of rows: the hints, the newest keys, an even sample."""
    device, total = rows.q.device, len(rows)
    groups = -(-total // GROUP_ROWS)
    hints = hints[: plan.most_hints]
    _, high = rows.span()
    width = len(hints) + plan.newest + plan.spread
    words = workspace.take((groups, -(-high // 32)), torch.int32).zero_()
    start, end, listed = (torch.empty(groups, dtype=torch.int32, device=device) for _ in range(3))
    launch_mark_seeds(hints, rows.ks, rows.ke, plan.newest, plan.spread, GROUP_ROWS, words, start, end)
    lists = workspace.take((groups, width), torch.int32)
    launch_compact(words, start, end, lists, listed, 0, high)
    score = workspace.take((total, width), torch.float32)
    launch_score_lists(rows.q, keys.k, keys.k_scale, rows.weights, rows.ks, rows.ke, lists, listed, GROUP_ROWS, score)
    return _seeded(lists, GROUP_ROWS, score, _whole(score, topk), guessed=False)


def seed_rows(rows: Rows, keys: Keys, topk: int, plan: PrefillPlan, workspace: Workspace) -> Seeded:
    """Seeds of each row's own: its newest keys and an even sample of the others."""
    seed = own_seeds(rows.ks, rows.ke, plan.own_seeds)
    score = workspace.take(tuple(seed.shape), torch.float32)
    start, end, rank = _whole(score, topk)
    launch_rescore(rows.q, keys.k, keys.k_scale, rows.weights, seed.clamp(min=0), end, score)
    score.masked_fill_(seed < 0, torch.nan)
    return _seeded(seed, 1, score, (start, end, rank), guessed=False)


def choose_columns(
    rows: Rows, keys: Keys, seeded: Seeded, sample: torch.Tensor, plan: PrefillPlan, workspace: Workspace
) -> tuple[int, float]:
    """Columns with the least expected time, from a trial of some numbers on a few rows, and that time.

    Returns:
        The columns, and the time as ``plan.pruned_cost`` has it (0 if there was but one choice, and no trial).

    Exactness: heuristic; the choice changes speed only.
    """
    if len(plan.column_choices) == 1:
        return plan.column_choices[0], 0.0
    some = np.linspace(0, len(rows) - 1, min(TRIAL_ROWS, len(rows))).astype(np.int64)
    few = rows.pick(some)
    there = torch.from_numpy(some).to(rows.q.device)
    tau = seeded.tau[there]
    heads = head_terms(few.q, keys.k, keys.norm, sample[there])
    low, high = few.span()
    words = workspace.take((len(few), -(-(high - low) // 32)), torch.int32)
    counts = []
    for columns in plan.column_choices:
        constants = prepare_rows(few.q, few.weights, heads, columns)
        launch_bound(
            constants.columns, constants.coefficients, constants.slack, tau,
            keys.k, keys.norm, keys.scale, few.ks, few.ke, words, low, high,
        )  # fmt: skip
        counts.append(launch_count(words, few.ks, few.ke, low, high))
    survivors = torch.stack(counts).cpu().numpy()
    shares = survivors.sum(-1) / np.maximum(few.visible(), 1)
    peaks = survivors.max(-1) / min(32 * SEGMENT_WORDS, max(high - low, 1))
    tried = np.array(plan.column_choices)
    choices = [columns for columns in SUPPORTED_COLUMNS if tried[0] <= columns <= tried[-1]]
    between = [(_between(tried, shares, columns), _between(tried, peaks, columns)) for columns in choices]
    costs = [plan.pruned_cost(columns, *rates) for columns, rates in zip(choices, between, strict=True)]
    best = int(np.argmin(costs))
    return choices[best], costs[best]


def _between(tried: npt.NDArray[np.int64], rates: npt.NDArray[np.float64], columns: int) -> npt.NDArray[np.float64]:
    """Rates ``[rows]`` at a number of columns from those ``[tried, rows]``, linear in logarithms between neighbours."""
    logs = np.log(np.maximum(rates, 1e-9))
    high = max(int(np.searchsorted(tried, columns)), 1)
    low = high - 1
    part = (columns - tried[low]) / (tried[high] - tried[low])
    return np.asarray(np.exp(logs[low] * (1 - part) + logs[high] * part))


@dataclasses.dataclass(slots=True, kw_only=True)
class Flight:
    """A block of rows on its way through the device, which the host has not read yet.

    Attributes:
        places: its rows.
        own: whether each row had seeds of its own.
        guesses: ``[rows]`` float32, their thresholds if these were guesses, else None.
        pruning: whether the bound pass looked at them.
        numbers: int32 ``[3, >= rows]`` in host memory, on its way: state, seeds with a score, survivors.
        landed: after which ``numbers`` may be read, or None.
    """

    places: Places
    own: bool
    guesses: torch.Tensor | None
    pruning: bool
    numbers: torch.Tensor
    landed: torch.cuda.Event | None

    def read(self) -> npt.NDArray[np.int32]:
        """The numbers; waits for them."""
        if self.landed is not None:
            self.landed.synchronize()
        return self.numbers.numpy()[:, : len(self.places)]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Landed:
    """Rows of a block that were not served.

    Attributes:
        poor: those that want seeds of their own.
        dense: those to be scored densely.
        high: the same, since too few of their keys seemed to reach a guess.
        tau: guesses of these, float32 on the device; None if there are none.
    """

    poor: Places
    dense: Places
    high: Places
    tau: torch.Tensor | None


def _send_home(numbers: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event | None]:
    """Start to copy to the host; the copy, and the event after which it is there."""
    if numbers.device.type == "cpu":
        return numbers, None
    there = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
    there.copy_(numbers, non_blocking=True)
    landed = torch.cuda.Event()
    landed.record()
    return there, landed


def pruned_rows(
    rows: Rows,
    keys: Keys,
    topk: int,
    mode: Mode,
    plan: PrefillPlan,
    columns: int,
    seeded: Seeded,
    sample: torch.Tensor | None,
    state: torch.Tensor,
    survivors: torch.Tensor,
    workspace: Workspace,
    on_stage: Callable[[str], None],
) -> RunningTopK:
    """Top-K of a block of rows with more than ``topk`` visible keys each, skipping what ``mode`` allows.

    Rows with a state, and rows whose ``tau`` is NaN, hold no result.

    Args:
        rows, keys, topk, mode, plan: of the call.
        columns: dot columns of the bound pass, if ``mode`` has one.
        seeded: the rows' seeds.
        sample: keys that steer the choice of columns, if ``mode`` has a bound pass.
        state: ``[rows]`` int32, written: 0, ``NON_FINITE``, ``TOO_LARGE`` or ``OVERFLOW``.
        survivors: ``[rows]`` int32, written: keys that passed the bound or the filter.
        workspace: for the buffers.
        on_stage: called with each stage's name.
    """
    shared = (rows.q, keys.k, keys.k_scale, rows.weights)
    if sample is not None:
        on_stage("prepare")
        heads = head_terms(rows.q, keys.k, keys.norm, sample)
        constants = prepare_rows(rows.q, rows.weights, heads, columns)
    # Rows that cannot be served are not looked at by any later stage. The seeds' own tau is needed at the end.
    ke, emitted, zero = (workspace.take((len(rows),), torch.int32) for _ in range(3))
    tau = workspace.take((len(rows),), torch.float32)
    bound_state = None if sample is None else constants.state
    launch_open_rows(seeded.tau, rows.ks, rows.ke, bound_state, state, ke, tau, survivors, emitted, zero)
    running = RunningTopK(workspace, len(rows), topk)
    words = workspace.take((len(rows), plan.key_chunk // 32), torch.int32)
    index = workspace.take((len(rows), plan.capacity), torch.int32)
    score = workspace.take((len(rows), plan.capacity), torch.float32)
    count = workspace.take((len(rows),), torch.int32)
    emits = mode is not Mode.PRUNE
    if emits:
        emitted_index = workspace.take((len(rows), plan.list_capacity), torch.int32)
        emitted_score = workspace.take((len(rows), plan.list_capacity), torch.float32)
    low, high = rows.span()
    for start in range(low, high, plan.key_chunk):
        end = min(start + plan.key_chunk, high)
        if sample is not None:
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
        on_stage("rescore")
        launch_rescore(*shared, index, count, score)
        on_stage("emit")
        if emits:
            launch_append(index, score, count, tau, emitted_index, emitted_score, emitted, state, survivors)
            if end < high:
                launch_trim(emitted_index, emitted_score, emitted, topk, tau)
        else:
            survivors += count
            full = count > plan.capacity
            state.masked_fill_(full & (state == 0), OVERFLOW)
            running.merge(index, score, zero, count.masked_fill_(full, 0), 0)
            tau = torch.maximum(tau, running.kth())
    if emits:
        on_stage("select")
        running.merge(emitted_index, emitted_score, zero, emitted, 0)
    return running


class _Call:
    """One call: what is common to its blocks, and what became of its rows."""

    def __init__(
        self,
        rows: Rows,
        keys: Keys,
        topk: int,
        mode: Mode | None,
        plan: PrefillPlan,
        hints: torch.Tensor | None,
        workspace: Workspace,
        may_give_up: bool,
        on_stage: Callable[[str], None],
    ) -> None:
        self.rows, self.keys, self.topk, self.mode = rows, keys, topk, mode
        self.plan, self.hints, self.workspace = plan, hints, workspace
        self.may_give_up, self.on_stage = may_give_up, on_stage
        self.visible = rows.visible()
        shape, device = (len(rows), topk), rows.q.device
        self.out_index = torch.empty(shape, dtype=torch.int32, device=device)
        self.out_score = torch.empty(shape, dtype=torch.float32, device=device)
        self.report = RowReport(
            pruned=np.zeros(len(rows), np.bool_),
            rescored=self.visible.copy(),
            survivors=self.visible.copy(),
            fallback={},
        )

    def launch(self, places: Places, *, own: bool) -> Flight | None:
        """Start to select for these rows, skipping what the mode allows; ``own``: with seeds of each row's own.

        Returns:
            The flight, or None if the bound is not expected to pay: nothing is on its way, and the mode is over.
        """
        mode, plan, workspace = self.mode, self.plan, self.workspace
        assert mode is not None
        workspace.reset()
        part = self.rows.pick(places)
        self.on_stage("seeds")
        if own:
            seeded = seed_rows(part, self.keys, self.topk, plan, workspace)
        elif self.hints is not None:
            seeded = seed_groups(part, self.keys, self.topk, plan, self.hints, workspace)
        else:
            seeded = guess(part, self.keys, self.topk, plan, workspace)
        sample = None
        if mode in PRUNING:
            sample = seeded.sample(part)
            if self.report.columns == 0:
                self.on_stage("columns")
                columns, cost = choose_columns(part, self.keys, seeded, sample, plan, workspace)
                if self.may_give_up and cost > plan.dense_cost():
                    self.give_up()
                    return None
                self.report.columns = columns
        # Each line starts at a multiple of 16 bytes, whatever the number of rows: kernels are compiled for that.
        numbers = torch.empty(3, -(-len(part) // 4) * 4, dtype=torch.int32, device=part.q.device)
        state, seeds, survivors = numbers[:, : len(part)]
        seeds.copy_(seeded.count)
        running = pruned_rows(
            part, self.keys, self.topk, mode, plan, self.report.columns, seeded, sample, state, survivors, workspace,
            self.on_stage,
        )  # fmt: skip
        self._finish(running, seeded.tau, state, places)
        there, landed = _send_home(numbers)
        return Flight(
            places=places, own=own, guesses=seeded.tau if seeded.guessed else None, pruning=sample is not None,
            numbers=there, landed=landed,
        )  # fmt: skip

    def settle(self, flight: Flight) -> Landed:
        """Read what became of a block."""
        places, report = flight.places, self.report
        state, seeds, survivors = flight.read()
        good = state == 0
        visible = self.visible[places]
        rescored = seeds.astype(np.int64) + survivors if flight.pruning else visible.copy()
        served = places[good]
        report.rescored[served] = np.minimum(rescored, visible)[good]
        report.survivors[served] = survivors[good]
        report.pruned[served] = flight.pruning
        did_not_pay = report.rescored[places].sum() > GIVE_UP_ABOVE * visible.sum()
        if self.may_give_up and self.mode is Mode.BOTH and did_not_pay:
            self.give_up()
        nothing = np.zeros_like(good)
        high = state == THRESHOLD_NOT_MET if flight.guesses is not None else nothing
        poor = nothing if flight.own else state == TOO_FEW_SEEDS
        rest = ~(good | high | poor)
        for code, reason in REASONS.items() if rest.any() else ():
            report.note(reason, places[rest & (state == code)])
        tau = None
        if flight.guesses is not None and high.any():
            tau = flight.guesses[torch.from_numpy(high).to(flight.guesses.device)]
        return Landed(poor=places[poor], dense=places[rest], high=places[high], tau=tau)

    def give_up(self) -> None:
        """Go on without the bound: it does not pay on these rows."""
        self.mode = None

    def dense(self, places: Places, guesses: torch.Tensor | None = None) -> None:
        """Select for these rows from all their keys.

        Args:
            places: the rows.
            guesses: ``[rows]`` float32, thresholds that too few keys seemed to reach. Where K keys do reach one, a
                stage lost keys, which is a fault and reported as such.
        """
        self.workspace.reset()
        self.on_stage("dense")
        # Few rows take longer chunks in the same room, and fewer launches.
        chunk = self.plan.dense_chunk * max(min(self.plan.max_rows, len(self.rows)) // len(places), 1)
        running = dense_rows(self.rows.pick(places), self.keys, self.topk, chunk, self.workspace)
        self._finish(running, None, None, places)
        if guesses is not None:
            lost = (running.kth() >= guesses).cpu().numpy()
            self.report.note(Fallback.THRESHOLD_NOT_MET, places[lost])
            self.report.note(Fallback.GUESS_TOO_HIGH, places[~lost])

    def _finish(
        self, running: RunningTopK, tau: torch.Tensor | None, state: torch.Tensor | None, places: Places
    ) -> None:
        low, high = int(places[0]), int(places[-1]) + 1
        if high - low == len(places):
            there = torch.arange(low, high, device=self.out_index.device)
        else:
            there = torch.from_numpy(places).to(self.out_index.device)
        launch_finish(*running.now, tau, state, there, self.out_index, self.out_score)


def _split(places: Places, size: int) -> Iterator[Places]:
    for start in range(0, len(places), size):
        yield places[start : start + size]


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

    With ``may_give_up`` the call goes on densely when a trial expects the bound not to pay, or when a block had most of
    its pairs rescored.

    Returns:
        ``topk_indices`` int32 and ``scores`` float32 ``[rows, topk]`` in ascending key order with -1 and -Inf tails,
        and the report.
    """
    call = _Call(rows, keys, topk, mode, plan, hints, workspace, may_give_up, on_stage)
    total, visible = len(rows), call.visible
    done = 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        if on_progress is not None and count:
            on_progress(done, total)

    poor: list[Places] = []
    dense: list[Places] = []
    guesses: list[tuple[Places, torch.Tensor]] = []
    flights: collections.deque[Flight] = collections.deque()

    def settle() -> None:
        flight = flights.popleft()
        landed = call.settle(flight)
        poor.append(landed.poor)
        dense.append(landed.dense)
        if landed.tau is not None:
            guesses.append((landed.high, landed.tau))
        advance(len(flight.places) - len(landed.poor) - len(landed.dense) - len(landed.high))

    everything = np.arange(total)
    for block in _split(everything, plan.max_rows) if mode not in (None, Mode.BASE) else ():
        # One block may be on its way while the next is launched.
        while len(flights) > 1:
            settle()
        is_long = visible[block] > topk
        call.report.note(Fallback.SHORT_ROW, block[~is_long & (visible[block] > 0)])
        dense.append(block[~is_long])
        block = block[is_long]
        if call.mode is not None and len(block):
            flight = call.launch(block, own=False)
            if flight is not None:
                flights.append(flight)
                continue
        call.report.note(Fallback.SLACK_BOUND, block)
        dense.append(block)
    while flights:
        settle()
    if mode in (None, Mode.BASE):
        dense.append(everything)
    # Lists of a row's own take more room.
    for some in _split(np.concatenate([everything[:0], *poor]), max(plan.max_rows // OWN_SHARE, 1)):
        flight = call.launch(some, own=True) if call.mode is not None else None
        if flight is None:
            call.report.note(Fallback.SLACK_BOUND, some)
            dense.append(some)
            continue
        flights.append(flight)
        settle()
    for some in _split(np.sort(np.concatenate(dense)), plan.max_rows):
        call.dense(some)
        advance(len(some))
    for some, tau in guesses:
        call.dense(some, tau)
        advance(len(some))
    return call.out_index, call.out_score, call.report
