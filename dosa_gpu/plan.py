"""Which path a call takes, with which sizes: decided before anything runs, and reported."""

from __future__ import annotations

import dataclasses
import enum

from dosa_ref.spec import HEAD_DIM, InvalidProblem, Mode, UnsupportedConfiguration

DEFAULT_WORKSPACE_BYTES = 2 * 1024**3
DEFAULT_COLUMNS = {32: 16, 64: 32}
SUPPORTED_COLUMNS = (8, 16, 32)

FIRST_ROWS = 8
"""Rows of the first block. It has no neighbour's winners as seeds, so it is small; later blocks grow eightfold."""
MAX_ROWS = 4096
KEY_CHUNK = 131072
FIRST_CHUNKS = 6
"""Key chunks for rows without neighbour's winners: their ``tau`` is weak at first and rises from chunk to chunk."""
MIN_KEY_CHUNK = 2048
MIN_CAPACITY = 8192

FIXED_BYTES = 2**20
"""What the small per-call tensors take."""
RESCAN_SHARE = 16
"""One part in so many of the workspace is for rescanning overflowing rows."""
RESCAN_KEYS = 8192
"""Keys that a rescan scores at once."""

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
    DENSE = "dense"
    """Score all keys, exact top-K."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PrefillPlan:
    """Sizes of one call.

    Attributes:
        columns: dot columns per row in the bound pass.
        max_rows: rows that one block of work may hold.
        key_chunk: keys that one pass may cover, a multiple of 64.
        capacity: survivors (and seeds) that one row's buffer holds per chunk.
        seed_budget: seeds per row.
        rescan_rows: overflowing rows that are rescanned at once.
        rescan_keys: keys that a rescan scores at once, a multiple of 64.
        rescan_bytes: buffers of a rescan.
        workspace_bytes: upper limit of what the buffers of one block take.
    """

    columns: int
    max_rows: int
    key_chunk: int
    capacity: int
    seed_budget: int
    rescan_rows: int
    rescan_keys: int
    rescan_bytes: int
    workspace_bytes: int


def bytes_per_row(
    *, num_heads: int, topk: int, columns: int, key_chunk: int, capacity: int, seed_budget: int, mode: Mode | None
) -> int:
    """Upper limit of the buffers that one row needs; ``mode`` None is the dense path."""
    running = 2 * (8 * topk + 4)
    inputs = num_heads * (128 + 4) + 64
    dense = running + inputs + 4 * key_chunk
    if mode is None or mode is Mode.BASE:
        return dense
    # Survivors and emitted keys with scores; the seed list with the int64 temporaries of its sort.
    lists = capacity * (8 + 8) + seed_budget * 72
    bits = key_chunk // 8
    # Query preparation in float64: heads, residuals, prefixes, weighted residuals, their Gram matrix, the projection.
    preparation = 8 * (6 * num_heads * 128 + 3 * num_heads * num_heads + 6 * num_heads * columns + 4 * columns * 128)
    sample = 4 * 64 * (128 + num_heads)
    # Rows that the bound cannot serve are scored densely afterwards, in the same space.
    return max(dense, running + inputs + lists + bits + preparation + sample)


def plan_prefill(
    *,
    num_heads: int,
    num_keys: int,
    topk: int,
    mode: Mode | None,
    columns: int | None,
    workspace_bytes: int,
    survivor_capacity: int | None,
) -> PrefillPlan:
    """Choose the sizes of one call within ``workspace_bytes``.

    Args:
        num_heads: 32 or 64.
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
    if columns is None:
        columns = DEFAULT_COLUMNS[num_heads]
    sizes = {"workspace_bytes": workspace_bytes, "columns": columns, "survivor_capacity": survivor_capacity}
    for field, value in sizes.items():
        is_size = isinstance(value, int) and not isinstance(value, bool) and value > 0
        if not is_size and not (field == "survivor_capacity" and value is None):
            raise InvalidProblem(field, repr(value), "a positive int")
    if columns not in SUPPORTED_COLUMNS:
        raise UnsupportedConfiguration(f"columns: got {columns}, the bound kernel has tiles for {SUPPORTED_COLUMNS}")
    seed_budget = min(max(num_keys // 16, topk + topk // 2 + 1), 6 * topk)
    key_chunk = max(64, min(KEY_CHUNK, -(-num_keys // 64) * 64))
    rescan_row = 2 * (8 * topk + 4) + 4 * RESCAN_KEYS + num_heads * (HEAD_DIM + 4)
    rescan_rows = max(1, workspace_bytes // RESCAN_SHARE // rescan_row)
    while True:
        capacity = survivor_capacity or min(key_chunk, max(MIN_CAPACITY, 8 * topk, key_chunk // 8))
        row = bytes_per_row(
            num_heads=num_heads,
            topk=topk,
            columns=columns,
            key_chunk=key_chunk,
            capacity=capacity,
            seed_budget=seed_budget,
            mode=mode,
        )
        # Norm and scale of every key, and a rescan. Allocations are rounded up; a sixteenth is for that.
        fixed = 8 * num_keys + FIXED_BYTES + rescan_rows * rescan_row
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
        columns=columns,
        max_rows=int(min(rows, MAX_ROWS)),
        key_chunk=key_chunk,
        capacity=capacity,
        seed_budget=seed_budget,
        rescan_rows=rescan_rows,
        rescan_keys=RESCAN_KEYS,
        rescan_bytes=rescan_rows * rescan_row,
        workspace_bytes=workspace_bytes,
    )
