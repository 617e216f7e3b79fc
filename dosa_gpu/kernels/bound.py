"""Bound pass: one "may be in the top K" bit for every visible (row, key) pair of a key chunk.

``U = k_scale * (sum_j c_j psi_j + slack * norm)`` with ``psi_j = max(dot_j, floor_j)`` (floor 0 for a relu column, -Inf
for a linear one). The key is skipped only if ``U < tau`` holds; a NaN ``U`` keeps it. See ``docs/bound.md``.
"""

import triton
import triton.language as tl

from dosa_gpu.machine_code import require_tensor_core_chain
from dosa_gpu.plan import tile_keys

LEMMAS = (
    "relu_subadditive",
    "relu_homogeneous",
    "relu_lipschitz",
    "aggregation",
    "linear_negative",
    "projection",
    "lagrange_identity",
    "cauchy_schwarz_step",
    "active_set_norm",
    "residual_geometry",
    "signed_sum_norm",
    "centred_residual",
    "column_rounding_step",
    "column_rounding",
    "linear_column",
    "coefficient_round_up",
    "scale_monotone",
    "e4m3_products_exact",
    "exponent_vote",
    "step_alignment",
    "step_sum",
    "output_cut",
    "accumulator_magnitude",
    "dot_error",
    "dot_error_total",
    "dot_magnitude",
    "computed_dots",
    "nearest_even",
    "rounding_error",
    "rounding_monotone",
    "directed_rounding",
    "round_up_float32",
    "outward_rounding",
    "chain_step",
    "chain_scale",
    "head_chain",
    "bound_chain",
    "float64_slack",
    "norm_sum",
    "gram_rounding",
    "positive_sum",
    "key_norm",
    "slack_floor",
    "no_overflow",
    "bound_covers_score",
    "nan_survives",
    "unusable_key_survives",
    "zero_key",
    "row_check",
    "emit_comparison",
    "threshold",
    "strict_pruning",
    "ties_kept",
    "tie_break_total_order",
    "order_code",
    "radix_select",
    "running_threshold",
    "overflow_rescan",
    "merge_dropped",
    "merge_partial",
    "index_arithmetic",
    "kernel_offsets",
    "row_products",
    "survivor_bits",
    "distinct_seeds",
    "stride_seeds",
    "disjoint_seeds",
    "tie_rank",
)
"""What the pruned path rests on; ``dosa_gpu.gate`` demands every one of them."""

TILE_COLUMNS = 128
KEYS_PER_PROGRAM = 4096
LANES = 4
"""Lanes of a quad that share a row of the accumulator; one query's columns sit in one lane."""


def queries_per_tile(columns: int) -> int:
    """Rows whose ``columns`` columns fill one tile."""
    return TILE_COLUMNS // columns


def column_order(columns: int) -> list[tuple[int, int]]:
    """(query in the tile, column of that query) for each of the tile's 128 columns.

    Tile column ``((group * columns / 2 + half) * 4 + lane) * 2 + parity`` holds column ``2 * half + parity`` of query
    ``group * 4 + lane``: the tensor core gives one thread the columns ``8 j + 2 lane + parity``, so a query's columns
    are added inside one thread.
    """
    return [
        (group * LANES + lane, 2 * half + parity)
        for group in range(TILE_COLUMNS // (columns * LANES))
        for half in range(columns // 2)
        for lane in range(LANES)
        for parity in range(2)
    ]


OPTIONS = {"num_warps": 4, "num_stages": 3, "enable_fp_fusion": False}
"""Compiler options: fp fusion off, since the contract says which products are fused."""


@triton.jit
def _bound_kernel(
    column_ptr,  # [tiles * 128, 128] e4m3, in column_order
    coefficient_ptr,  # [tiles * 128] f32
    floor_ptr,  # [tiles * 128] f32, 0 or -Inf
    slack_ptr,  # [rows] f32
    tau_ptr,  # [rows] f32
    k_ptr,  # [num_keys, 128] e4m3
    norm_ptr,  # [num_keys] f32, +Inf for a key that must survive
    scale_ptr,  # [num_keys] f32, 1 for a key that must survive
    ks_ptr,  # [rows] i32
    ke_ptr,  # [rows] i32
    out_ptr,  # [rows, out_stride] i32 words
    num_rows,
    chunk_start,
    chunk_end,
    out_stride,
    COLUMNS: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    PER_PROGRAM: tl.constexpr,
):
    WIDTH: tl.constexpr = COLUMNS * QUERIES
    GROUPS: tl.constexpr = QUERIES // 4
    rows = tl.program_id(0) * QUERIES + tl.arange(0, QUERIES)
    row_ok = rows < num_rows
    safe_rows = tl.minimum(rows, num_rows - 1)
    ks = tl.load(ks_ptr + safe_rows)
    ke = tl.where(row_ok, tl.load(ke_ptr + safe_rows), 0)
    slack = tl.load(slack_ptr + safe_rows)
    tau = tl.load(tau_ptr + safe_rows)
    place = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    depth = tl.arange(0, 128)
    column = tl.load(column_ptr + place.to(tl.int64)[:, None] * 128 + depth[None, :])
    coefficient = tl.load(coefficient_ptr + place)
    floor = tl.load(floor_ptr + place)
    start = chunk_start + tl.program_id(1) * PER_PROGRAM
    end = tl.minimum(start + PER_PROGRAM, chunk_end)
    first_visible = tl.min(tl.where(row_ok, ks, chunk_end), axis=0)
    start = tl.maximum(start, chunk_start + (tl.maximum(first_visible, chunk_start) - chunk_start) // KEYS * KEYS)
    end = tl.minimum(end, tl.max(ke, axis=0))
    for tile in tl.range(start, end, KEYS):
        keys = tile + tl.arange(0, KEYS)
        safe_keys = tl.minimum(keys, chunk_end - 1)
        k = tl.load(k_ptr + safe_keys.to(tl.int64)[:, None] * 128 + depth[None, :])
        norm = tl.load(norm_ptr + safe_keys)
        scale = tl.load(scale_ptr + safe_keys)
        dot = tl.dot(k, tl.trans(column))
        term = tl.maximum(dot, floor[None, :]) * coefficient[None, :]
        term = tl.reshape(term, (KEYS, GROUPS, COLUMNS // 2, 4, 2))
        total = tl.reshape(tl.sum(tl.sum(term, axis=4), axis=2), (KEYS, QUERIES))
        bound = tl.fma(tl.broadcast_to(slack[None, :], total.shape), tl.broadcast_to(norm[:, None], total.shape), total)
        bound = bound * scale[:, None]
        visible = (keys[:, None] >= ks[None, :]) & (keys[:, None] < ke[None, :]) & (keys < chunk_end)[:, None]
        # "not below" rather than "at least": a NaN bound keeps the key.
        below = bound < tau[None, :]
        keep = tl.where(visible & (below == 0), 1, 0)
        bit = tl.reshape(1 << tl.arange(0, 32), (1, 32, 1))
        words = tl.sum(tl.reshape(keep, (KEYS // 32, 32, QUERIES)) * bit, axis=1)
        word = (tile - chunk_start) // 32 + tl.arange(0, KEYS // 32)
        # The last tile may reach beyond the chunk's words.
        inside = (word * 32 < chunk_end - chunk_start)[:, None] & row_ok[None, :]
        tl.store(out_ptr + rows.to(tl.int64)[None, :] * out_stride + word[:, None], words, mask=inside)


def launch_bound(
    column, coefficient, floor, slack, tau, k, norm, scale, ks, ke, out, columns: int, chunk_start: int, chunk_end: int
) -> None:
    """Write the survivor bits of the keys ``[chunk_start, chunk_end)``.

    Args:
        column: ``[tiles * 128, 128]`` float8_e4m3fn, the rows' columns in ``column_order``.
        coefficient, floor: ``[tiles * 128]`` float32, beside ``column``.
        slack, tau: ``[rows]`` float32.
        k: ``[num_keys, 128]`` float8_e4m3fn.
        norm, scale: ``[num_keys]`` float32, from ``launch_key_norms``.
        ks, ke: ``[rows]`` int32.
        out: ``[rows, >= ceil(chunk / 32)]`` int32; bit ``i % 32`` of word ``i // 32`` is key ``chunk_start + i``.
            Inside a row's window every word is written, with 0 for keys outside the window.
        columns: columns per row; 8, 16 or 32.
        chunk_start, chunk_end: the chunk, in key columns.

    Exactness: enclosure; a cleared bit inside the window proves ``score < tau``.
    """
    num_rows = slack.shape[0]
    queries = queries_per_tile(columns)
    compiled = _bound_kernel[(triton.cdiv(num_rows, queries), triton.cdiv(chunk_end - chunk_start, KEYS_PER_PROGRAM))](
        column, coefficient, floor, slack, tau, k, norm, scale, ks, ke, out,
        num_rows, chunk_start, chunk_end, out.stride(0),
        COLUMNS=columns, QUERIES=queries, KEYS=tile_keys(k.device.type, chunk_end - chunk_start),
        PER_PROGRAM=KEYS_PER_PROGRAM,
        **OPTIONS,
    )  # fmt: skip
    require_tensor_core_chain(compiled)
