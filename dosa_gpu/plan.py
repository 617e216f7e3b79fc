"""Which path a call takes, with which sizes: decided before anything runs, and reported."""

from __future__ import annotations

import dataclasses
import enum

import numpy as np
import numpy.typing as npt

from dosa_ref.spec import HEAD_DIM, InvalidProblem, Mode, UnsupportedConfiguration

DEFAULT_WORKSPACE_BYTES = 2 * 1024**3
DEFAULT_COLUMNS = {32: 12, 64: 16}
SUPPORTED_COLUMNS = (8, 12, 16, 20, 24, 32)

# Milliseconds on one H200 (docs/performance-notes.md), by number of columns or of heads. They decide between the dense
# path and numbers of columns; a wrong figure costs time only. For 2**29 (query, key) pairs:
BOUND_COST = {8: 1.3, 12: 1.85, 16: 2.35, 20: 3.1, 24: 3.2, 32: 4.2}
RESCORE_COST = {32: 13.0, 64: 16.0}
DENSE_COST = {32: 6.1, 64: 10.2}
# For 4,096 rows:
PREPARE_COST = {
    32: {8: 0.7, 12: 0.75, 16: 0.85, 20: 1.1, 24: 1.2, 32: 1.4},
    64: {8: 1.4, 12: 1.5, 16: 1.7, 20: 2.2, 24: 2.4, 32: 2.9},
}
SAMPLE_COST = {32: 0.6e-4, 64: 1.0e-4}
"""For each key of the sample."""
SELECT_COST = 1.0
"""Ranks in the sample, emit, top-K of what was emitted."""
TRIAL_MS = 2.5
"""For a call: what it takes to find out whether the bound pays."""
LEAST_GAIN = 0.7
"""At best, a call with the bound has to take no more than this share of the dense path for a trial to be worth it."""
TRIAL_COLUMNS = (8, 16, 32)
"""Numbers of columns that a trial measures; survivors of those between are interpolated."""
TRIALS_FROM_PAIRS = 2**28
"""Smaller calls take the default number of columns: a trial would cost more than it saves."""

MAX_ROWS = 4096
KEY_CHUNK = 131072
"""Keys of one bound pass."""
DENSE_CHUNK = 98304
"""Keys whose logits the dense path holds at once."""
MIN_KEY_CHUNK = 2048
MIN_CAPACITY = 8192
CAPACITY_SHARE = 5
"""A row's survivor buffer holds one key in so many of a chunk."""
MIN_LIST = 2048
GROUP_ROWS = 128
"""Rows that share a list of seeds, where there are hints."""
OWN_SHARE = 4
"""Rows with seeds of their own go in blocks of one part in so many of the usual size."""
TRIAL_ROWS = 8
"""Rows on which the number of columns is tried."""

SAMPLE_SHARE = 64
"""Thresholds are guessed from one key in so many, within these limits:"""
LEAST_SAMPLE, MOST_SAMPLE = 256, 16384
MOST_HINTS = 2
"""Hints are taken up to so many times K."""
LEAST_SEEDS = 64
"""Newest keys, and keys of an even sample, that are seeds beside hints at least."""

FIXED_BYTES = 2**20
"""What the small per-call tensors take."""
DENSE_BELOW = 8
"""On the automatic path rows with fewer than this many times ``topk`` visible keys are scored densely."""


GPU_TILE_KEYS = 64
INTERPRETER_TILE_KEYS = 1024


def tile_keys(device_type: str, span: int) -> int:
    """Keys per tile of a kernel: one wgmma row block on a GPU, more under the interpreter.

    The tile's height does not change the bits of a dot. The interpreter pays per operation, not per element, so long
    spans take tall tiles there; short ones keep the GPU's tile, so that its edges are tried on a CPU too.
    """
    if device_type != "cpu":
        return GPU_TILE_KEYS
    return max(GPU_TILE_KEYS, min(INTERPRETER_TILE_KEYS, 2 ** (max(span // 4, 1).bit_length() - 1)))


class Path(enum.Enum):
    """Which way a call goes."""

    AUTO = "auto"
    """DoSA where most rows are long enough to profit, else dense."""
    DOSA = "dosa"
    """The pruned path (what it switches on is the mode)."""
    LITETOPK = "litetopk"
    """Score all keys, keep what reaches a threshold from seeds, exact top-K of that; no logits in memory."""
    DENSE = "dense"
    """Score all keys, exact top-K."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PrefillPlan:
    """Sizes of one call.

    Attributes:
        num_heads: 32 or 64.
        num_keys: keys in the problem.
        topk: keys to select per row.
        column_choices: dot columns per row in the bound pass; with more than one, those that a trial measures.
        max_rows: rows that one block of work may hold.
        key_chunk: keys that one bound pass or filter covers, a multiple of 64.
        dense_chunk: keys whose logits are held at once, for rows that are scored densely.
        capacity: survivors that one row's buffer holds per chunk.
        list_capacity: emitted keys that one row's list holds before they are merged.
        sample: keys from which thresholds are guessed.
        most_hints: hints that are seeds.
        newest, spread: newest keys, and keys of an even sample, that are seeds beside hints.
        own_seeds: seeds of a row that has a list of its own.
        workspace_bytes: upper limit of what the buffers of one block take.
        needed_bytes: what they take at most in this call.
    """

    num_heads: int
    num_keys: int
    topk: int
    column_choices: tuple[int, ...]
    max_rows: int
    key_chunk: int
    dense_chunk: int
    capacity: int
    list_capacity: int
    sample: int
    most_hints: int
    newest: int
    spread: int
    own_seeds: int
    workspace_bytes: int
    needed_bytes: int

    def dense_cost(self) -> float:
        """Expected milliseconds for 4,096 rows on the dense path."""
        return DENSE_COST[self.num_heads] * self.num_keys / 2**17

    def pruned_cost(
        self, columns: int, shares: npt.NDArray[np.float64], peaks: npt.NDArray[np.float64] | None = None
    ) -> float:
        """Expected milliseconds for 4,096 rows with a bound of so many columns.

        Args:
            columns: dot columns per row.
            shares: of some rows, survivors of the bound as a share of their keys.
            peaks: the same in the part of the keys that has most, or None. A row of whose survivors there the buffer
                cannot hold is scored densely afterwards.
        """
        after = RESCORE_COST[self.num_heads] * shares
        if peaks is not None:
            after = np.where(peaks > self.capacity / self.key_chunk, DENSE_COST[self.num_heads], after)
        once = PREPARE_COST[self.num_heads][columns] + SAMPLE_COST[self.num_heads] * self.sample + SELECT_COST
        return float((BOUND_COST[columns] + after.mean()) * self.num_keys / 2**17 + once)

    def may_pay(self, num_rows: int) -> bool:
        """Whether a call of so many rows could profit from the bound, if it prunes as well as any."""
        best = self.pruned_cost(min(self.column_choices), np.array([1.5 * self.topk / max(self.num_keys, 1)]))
        blocks = num_rows / 4096
        return best * blocks + TRIAL_MS < LEAST_GAIN * self.dense_cost() * blocks


TOPK_PROGRAMS = {"cpu": 2}
TOPK_TILE = {"cpu": 4096}


def topk_scratch(device_type: str, topk: int) -> int:
    """Upper limit of what one exact top-K allocates while it runs: the buffers of its programs, winners of parts."""
    programs, tile = TOPK_PROGRAMS.get(device_type, 396), TOPK_TILE.get(device_type, 1024)
    capacity = 2 ** (topk + max(topk, 2 * tile)).bit_length()
    return 8 * programs * (capacity + topk)


def bytes_per_row(
    *, num_heads: int, topk: int, columns: int, key_chunk: int, dense_chunk: int, capacity: int, list_capacity: int,
    seeds: int, own_seeds: int, mode: Mode | None,
) -> int:  # fmt: skip
    """Upper limit of the buffers that one row needs; ``mode`` None is the dense path."""
    running = 2 * (8 * topk + 4)
    inputs = num_heads * (128 + 4) + 64
    dense = running + inputs + 4 * dense_chunk
    if mode is None or mode is Mode.BASE:
        return dense
    bits = key_chunk // 8
    # Query preparation: norms, errors, shares, the projection's multipliers; columns and coefficients.
    preparation = num_heads * (40 + 4 * 32) + columns * (128 + 4) + 1024
    rest = running + inputs + 8 * (capacity + list_capacity) + bits + preparation
    # A row's own list has int64 temporaries. Rows that the bound cannot serve are scored densely, in the same space.
    return max(dense, rest + 4 * seeds, (rest + 48 * own_seeds) // OWN_SHARE)


def plan_prefill(
    *,
    device_type: str,
    num_heads: int,
    num_rows: int,
    num_keys: int,
    topk: int,
    mode: Mode | None,
    columns: int | None,
    workspace_bytes: int,
    survivor_capacity: int | None,
) -> PrefillPlan:
    """Choose the sizes of one call within ``workspace_bytes``.

    Args:
        device_type: ``cuda`` or ``cpu``.
        num_heads: 32 or 64.
        num_rows: rows of the call.
        num_keys: keys in the problem.
        topk: keys to select per row.
        mode: savings that are on; None for the dense path.
        columns: dot columns per row, or None for the default.
        workspace_bytes: limit on the buffers.
        survivor_capacity: entries of a row's survivor buffer, or None.

    Raises:
        InvalidProblem: a size that is not positive.
        UnsupportedConfiguration: columns that the kernel has no tile for, or a workspace too small for one row.
    """
    choices = (columns,)
    if columns is None:
        columns = max(SUPPORTED_COLUMNS)
        choices = TRIAL_COLUMNS if num_rows * num_keys >= TRIALS_FROM_PAIRS else (DEFAULT_COLUMNS[num_heads],)
    sizes = {"workspace_bytes": workspace_bytes, "columns": columns, "survivor_capacity": survivor_capacity}
    for field, value in sizes.items():
        is_size = isinstance(value, int) and not isinstance(value, bool) and value > 0
        if not is_size and not (field == "survivor_capacity" and value is None):
            raise InvalidProblem(field, repr(value), "a positive int")
    if columns not in SUPPORTED_COLUMNS:
        raise UnsupportedConfiguration(f"columns: got {columns}, the bound kernel has tiles for {SUPPORTED_COLUMNS}")
    own_seeds = min(max(num_keys // 16, topk + topk // 2 + 1), 6 * topk)
    newest = max(LEAST_SEEDS, topk // 2)
    most_hints = MOST_HINTS * topk
    sample = max(LEAST_SAMPLE, min(MOST_SAMPLE, -(-num_keys // SAMPLE_SHARE // 64) * 64))
    seeds = max(most_hints + 2 * newest, sample)
    key_chunk = max(64, min(KEY_CHUNK, -(-num_keys // 64) * 64))
    groups = -(-min(max(num_rows, 1), MAX_ROWS) // GROUP_ROWS)
    # Norm and scale of every key, a running top-K.
    fixed = 8 * num_keys + FIXED_BYTES + topk_scratch(device_type, topk)
    if mode is not None and mode is not Mode.BASE:
        # The sample, the groups' seeds as bits and as lists, the trial's bits.
        fixed += sample * (HEAD_DIM + 8) + groups * (num_keys // 8 + 4 * seeds + 64)
        fixed += TRIAL_ROWS * (num_keys // 8 + num_heads * 512)
    while True:
        capacity = survivor_capacity or min(key_chunk, max(MIN_CAPACITY, 4 * topk, key_chunk // CAPACITY_SHARE))
        # A power of two, since a list is cut in one piece.
        list_capacity = max(MIN_LIST, 1 << (4 * topk - 1).bit_length())
        parts = -(-num_keys // min(key_chunk, DENSE_CHUNK)) or 1
        dense_chunk = max(64, -(-num_keys // parts // 64) * 64)
        row = bytes_per_row(
            num_heads=num_heads, topk=topk, columns=columns, key_chunk=key_chunk, dense_chunk=dense_chunk,
            capacity=capacity, list_capacity=list_capacity, seeds=seeds, own_seeds=own_seeds, mode=mode,
        )  # fmt: skip
        # Allocations are rounded up; a sixteenth is for that.
        rows = (workspace_bytes - workspace_bytes // 16 - fixed) // row
        if rows >= 1:
            break
        if key_chunk <= MIN_KEY_CHUNK:
            need = (row + fixed) * 16 // 15 + 1
            raise UnsupportedConfiguration(
                f"workspace_bytes: got {workspace_bytes}, this problem needs at least {need}"
            )
        key_chunk = max(MIN_KEY_CHUNK, -(-key_chunk // 128) * 64)
    return PrefillPlan(
        num_heads=num_heads,
        num_keys=num_keys,
        topk=topk,
        column_choices=choices,
        max_rows=int(min(rows, MAX_ROWS)),
        key_chunk=key_chunk,
        dense_chunk=dense_chunk,
        capacity=capacity,
        list_capacity=list_capacity,
        sample=sample,
        most_hints=most_hints,
        newest=newest,
        spread=newest,
        own_seeds=own_seeds,
        workspace_bytes=workspace_bytes,
        needed_bytes=min(workspace_bytes, (fixed + min(rows, MAX_ROWS, max(num_rows, 1)) * row) * 16 // 15 + 1),
    )
