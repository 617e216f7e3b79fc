"""Bound pass: one "may be in the top K" bit for every visible (row, key) pair of a key chunk.

``U = k_scale * (sum_j c_j psi_j + slack * norm)`` with ``psi_j = max(dot_j, 0)``, and ``psi = dot`` for a row's last
column. The key is skipped only if ``U < tau`` holds; a NaN ``U`` keeps it. See ``docs/bound.md``.
"""

import triton
import triton.language as tl

from dosa_gpu.kernels.score import keys_per_program
from dosa_gpu.kernels.words import key_bit, key_order, store_words
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
    "signed_loss",
    "signed_step",
    "shared_signs",
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
    "code_bisection",
    "running_threshold",
    "overflow_rescan",
    "merge_dropped",
    "merge_partial",
    "index_arithmetic",
    "kernel_offsets",
    "row_products",
    "survivor_bits",
    "stride_seeds",
    "disjoint_seeds",
    "tie_rank",
)
"""What the pruned path rests on; ``dosa_gpu.gate`` demands every one of them."""

TILE_COLUMNS = 128
"""Columns of one dot."""
COLUMN_CHOICES = (8, 12, 16, 20, 24, 32)
"""Columns per row that there are tiles for."""
KEYS_PER_PROGRAM = 8192
LANES = 4
"""Lanes of a quad that share a row of the accumulator; one query's columns sit in one lane."""

OPTIONS = {"num_warps": 4, "num_stages": 3, "enable_fp_fusion": False}
"""Compiler options. Fusion of products and sums is written out."""


def dot_columns(columns: int) -> tuple[int, int]:
    """Columns per row of the two dots of a tile. A dot's width is a power of two; the second may be empty."""
    first = 1 << (columns.bit_length() - 1)
    return first, columns - first


def queries_per_tile(columns: int) -> int:
    """Rows whose first columns fill one dot."""
    return TILE_COLUMNS // dot_columns(columns)[0]


@triton.jit
def _dot_columns(first_row, num_rows, before, total, QUERIES: tl.constexpr, COLUMNS: tl.constexpr):
    """Places of the columns of a dot in ``[rows, total]``, of which it takes ``before .. before + COLUMNS``.

    Column ``((group * COLUMNS / 2 + half) * 4 + lane) * 2 + parity`` of the dot is column ``2 * half + parity`` of
    query ``group * 4 + lane``: the tensor core gives one thread the columns ``8 j + 2 lane + parity``, so its columns
    are added inside one thread.
    """
    n = tl.arange(0, QUERIES * COLUMNS)
    query = n // (4 * COLUMNS) * 4 + n // 2 % 4
    column = n // 8 % (COLUMNS // 2) * 2 + n % 2
    return tl.minimum(first_row + query, num_rows - 1).to(tl.int64) * total + before + column


@triton.jit
def _by_query(x, ROWS: tl.constexpr, QUERIES: tl.constexpr, COLUMNS: tl.constexpr):
    """``[ROWS, QUERIES, COLUMNS]`` from the columns of a dot."""
    x = tl.reshape(x, (ROWS, QUERIES // 4, COLUMNS // 2, 4, 2))
    return tl.reshape(tl.permute(x, (0, 1, 3, 2, 4)), (ROWS, QUERIES, COLUMNS))


@triton.jit
def _add_columns(
    dot, coefficient, total,
    KEYS: tl.constexpr, QUERIES: tl.constexpr, COLUMNS: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    """``total + sum c psi`` over the columns ``[.., COLUMNS]``, one after another.

    ``FIRST``: there is no total yet. ``LAST``: the last column is linear.

    Halves are taken apart down to single columns, which costs nothing: they lie in registers of their own.
    """
    if COLUMNS == 1:
        dot = tl.reshape(dot, (KEYS, QUERIES))
        coefficient = tl.broadcast_to(tl.reshape(coefficient, (1, QUERIES)), dot.shape)
        psi = dot if LAST else tl.maximum(dot, 0.0)
        return psi * coefficient if FIRST else tl.fma(psi, coefficient, total)
    else:
        HALF: tl.constexpr = COLUMNS // 2
        dot_low, dot_high = tl.split(tl.permute(tl.reshape(dot, (KEYS, QUERIES, 2, HALF)), (0, 1, 3, 2)))
        low, high = tl.split(tl.permute(tl.reshape(coefficient, (1, QUERIES, 2, HALF)), (0, 1, 3, 2)))
        total = _add_columns(dot_low, low, total, KEYS, QUERIES, HALF, FIRST, False)
        return _add_columns(dot_high, high, total, KEYS, QUERIES, HALF, False, LAST)


@triton.jit
def _below_tau(
    k_ptr, norm_ptr, scale_ptr, keys, chunk_end, column, coefficient, more_column, more_coefficient, slack, tau,
    KEYS: tl.constexpr, QUERIES: tl.constexpr, COLUMNS: tl.constexpr, MORE: tl.constexpr,
):  # fmt: skip
    """``U < tau``, bool ``[KEYS, QUERIES]``; False for a NaN."""
    safe_keys = tl.minimum(keys, chunk_end - 1)
    k = tl.load(k_ptr + safe_keys.to(tl.int64)[:, None] * 128 + tl.arange(0, 128)[None, :])
    norm = tl.load(norm_ptr + safe_keys)
    scale = tl.load(scale_ptr + safe_keys)
    dot = _by_query(tl.dot(k, tl.trans(column)), KEYS, QUERIES, COLUMNS)
    total = _add_columns(dot, coefficient, 0.0, KEYS, QUERIES, COLUMNS, True, MORE == 0)
    if MORE > 0:
        dot = _by_query(tl.dot(k, tl.trans(more_column)), KEYS, QUERIES, MORE)
        total = _add_columns(dot, more_coefficient, total, KEYS, QUERIES, MORE, False, True)
    # The norm comes last: it is still on its way when the dot is done.
    total = tl.fma(tl.broadcast_to(slack[None, :], total.shape), tl.broadcast_to(norm[:, None], total.shape), total)
    return total * scale[:, None] < tau[None, :]


@triton.jit(do_not_specialize=["num_rows", "chunk_start", "chunk_end", "out_stride"])
def _bound_kernel(
    column_ptr,  # [rows, COLUMNS + MORE, 128] e4m3
    coefficient_ptr,  # [rows, COLUMNS + MORE] f32
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
    per_program,  # keys, a multiple of 2 * KEYS
    COLUMNS: tl.constexpr,
    MORE: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
):
    SPAN: tl.constexpr = 2 * KEYS
    query = tl.arange(0, QUERIES)
    rows = tl.program_id(0) * QUERIES + query
    row_ok = rows < num_rows
    safe_rows = tl.minimum(rows, num_rows - 1)
    ks = tl.load(ks_ptr + safe_rows)
    ke = tl.where(row_ok, tl.load(ke_ptr + safe_rows), 0)
    slack = tl.load(slack_ptr + safe_rows)
    tau = tl.load(tau_ptr + safe_rows)
    depth = tl.arange(0, 128)
    first_row = tl.program_id(0) * QUERIES
    place = _dot_columns(first_row, num_rows, 0, COLUMNS + MORE, QUERIES, COLUMNS)
    column = tl.load(column_ptr + place[:, None] * 128 + depth[None, :])
    coefficient = _by_query(tl.load(coefficient_ptr + place), 1, QUERIES, COLUMNS)
    more_column = column
    more_coefficient = coefficient
    if MORE > 0:
        place = _dot_columns(first_row, num_rows, COLUMNS, COLUMNS + MORE, QUERIES, MORE)
        more_column = tl.load(column_ptr + place[:, None] * 128 + depth[None, :])
        more_coefficient = _by_query(tl.load(coefficient_ptr + place), 1, QUERIES, MORE)
    start = chunk_start + tl.program_id(1) * per_program
    end = tl.minimum(start + per_program, chunk_end)
    first_visible = tl.min(tl.where(row_ok, ks, chunk_end), axis=0)
    start = tl.maximum(start, chunk_start + (tl.maximum(first_visible, chunk_start) - chunk_start) // SPAN * SPAN)
    end = tl.minimum(end, tl.max(ke, axis=0))
    all_start = tl.max(ks, axis=0)
    all_end = tl.minimum(tl.min(ke, axis=0), chunk_end)
    order = key_order(KEYS)
    bit = key_bit(KEYS)
    for span in tl.range(start, end, SPAN):
        below = _below_tau(
            k_ptr, norm_ptr, scale_ptr, span + order, chunk_end, column, coefficient, more_column, more_coefficient,
            slack, tau, KEYS, QUERIES, COLUMNS, MORE,
        )  # fmt: skip
        bits = tl.where(below, 0, bit)
        below = _below_tau(
            k_ptr, norm_ptr, scale_ptr, span + 16 + order, chunk_end, column, coefficient, more_column,
            more_coefficient, slack, tau, KEYS, QUERIES, COLUMNS, MORE,
        )  # fmt: skip
        bits += tl.where(below, 0, bit << 16)
        all_visible = (span >= all_start) & (span + SPAN <= all_end)
        store_words(
            bits, out_ptr, out_stride, rows, num_rows, ks_ptr, ke_ptr, span, chunk_start, chunk_end, all_visible,
            KEYS, QUERIES,
        )  # fmt: skip


def launch_bound(
    column, coefficient, slack, tau, k, norm, scale, ks, ke, out, chunk_start: int, chunk_end: int
) -> None:
    """Write the survivor bits of the keys ``[chunk_start, chunk_end)``.

    Args:
        column: ``[rows, M, 128]`` float8_e4m3fn, contiguous, M one of ``COLUMN_CHOICES``; each row's last column is
            linear, the others are relu columns.
        coefficient: ``[rows, M]`` float32, contiguous.
        slack, tau: ``[rows]`` float32.
        k: ``[num_keys, 128]`` float8_e4m3fn.
        norm, scale: ``[num_keys]`` float32, from ``launch_key_norms``.
        ks, ke: ``[rows]`` int32.
        out: ``[rows, >= ceil(chunk / 32)]`` int32; bit ``i % 32`` of word ``i // 32`` is key ``chunk_start + i``.
            Inside a row's window every word is written, with 0 for keys outside the window.
        chunk_start, chunk_end: the chunk, in key columns.

    Exactness: enclosure; a cleared bit inside the window proves ``score < tau``.
    """
    num_rows, columns, _ = column.shape
    queries = queries_per_tile(columns)
    first, more = dot_columns(columns)
    keys = tile_keys(k.device.type, chunk_end - chunk_start)
    tiles = triton.cdiv(num_rows, queries)
    per_program = keys_per_program(tiles, chunk_end - chunk_start, 2 * keys, KEYS_PER_PROGRAM)
    compiled = _bound_kernel[(tiles, triton.cdiv(chunk_end - chunk_start, per_program))](
        column, coefficient, slack, tau, k, norm, scale, ks, ke, out,
        num_rows, chunk_start, chunk_end, out.stride(0), per_program,
        COLUMNS=first, MORE=more, QUERIES=queries, KEYS=keys,
        **OPTIONS,
    )  # fmt: skip
    require_tensor_core_chain(compiled)
