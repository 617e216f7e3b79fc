"""Dense scoring: every visible key of a key chunk, all heads, as logits or as one "score >= tau" bit per pair."""

import torch
import triton
import triton.language as tl

from dosa_gpu.kernels.combine_heads import combine_heads
from dosa_gpu.kernels.words import key_bit, key_order, store_words
from dosa_gpu.machine_code import require_tensor_core_chain
from dosa_gpu.plan import tile_keys

TILE_COLUMNS = 128
KEYS_PER_PROGRAM = 8192
PROGRAMS = 1024
"""Programs that keep a GPU busy. With fewer tiles of rows a program gets fewer keys."""

OPTIONS = {"num_warps": 4, "num_stages": 3, "enable_fp_fusion": False}
"""Compiler options: fp fusion off, since the contract says which products are fused."""


def keys_per_program(tiles: int, span: int, step: int, most: int) -> int:
    """Keys of one program, a power of two times ``step``: the most that still gives ``PROGRAMS`` programs, if any does.

    Args:
        tiles: tiles of rows; each is a program of its own.
        span: keys of the launch.
        step: keys of one turn of the kernel's loop.
        most: upper limit, at least ``step``.
    """
    keys = step
    while 2 * keys <= most and tiles * triton.cdiv(span, 2 * keys) >= PROGRAMS:
        keys *= 2
    return keys


@triton.jit
def _scores(
    q, weight, k_ptr, k_scale_ptr, keys, chunk_end, KEYS: tl.constexpr, QUERIES: tl.constexpr, HEADS: tl.constexpr
):
    safe_keys = tl.minimum(keys, chunk_end - 1)
    k = tl.load(k_ptr + safe_keys.to(tl.int64)[:, None] * 128 + tl.arange(0, 128)[None, :])
    k_scale = tl.load(k_scale_ptr + safe_keys)
    return combine_heads(tl.dot(k, tl.trans(q)), weight, k_scale, KEYS, QUERIES, HEADS)


@triton.jit(do_not_specialize=["num_rows", "chunk_start", "chunk_end", "out_stride"])
def _score_kernel(
    q_ptr,  # [rows, HEADS, 128] e4m3
    k_ptr,  # [num_keys, 128] e4m3
    k_scale_ptr,  # [num_keys] f32
    weights_ptr,  # [rows, HEADS] f32
    ks_ptr,  # [rows] i32
    ke_ptr,  # [rows] i32
    tau_ptr,  # [rows] f32, read only with BITS
    out_ptr,  # BITS: [rows, out_stride] i32 words; else [rows, out_stride] f32 logits; column 0 is key chunk_start
    num_rows,
    chunk_start,
    chunk_end,
    out_stride,
    per_program,  # keys, a multiple of KEYS, with BITS of 2 * KEYS
    HEADS: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    BITS: tl.constexpr,
):
    COLUMNS: tl.constexpr = QUERIES * HEADS
    STEP: tl.constexpr = 2 * KEYS if BITS else KEYS
    first_row = tl.program_id(0) * QUERIES
    rows = first_row + tl.arange(0, QUERIES)
    row_ok = rows < num_rows
    safe_rows = tl.minimum(rows, num_rows - 1)
    ks = tl.load(ks_ptr + safe_rows)
    ke = tl.where(row_ok, tl.load(ke_ptr + safe_rows), 0)
    columns = first_row * HEADS + tl.arange(0, COLUMNS)
    columns = tl.minimum(columns, num_rows * HEADS - 1)
    depth = tl.arange(0, 128)
    q = tl.load(q_ptr + columns.to(tl.int64)[:, None] * 128 + depth[None, :])
    weight = tl.load(weights_ptr + columns)
    # Steps start at multiples of STEP from chunk_start, so that every 32-bit word belongs to one of them.
    start = chunk_start + tl.program_id(1) * per_program
    end = tl.minimum(start + per_program, chunk_end)
    first_visible = tl.min(tl.where(row_ok, ks, chunk_end), axis=0)
    start = tl.maximum(start, chunk_start + (tl.maximum(first_visible, chunk_start) - chunk_start) // STEP * STEP)
    end = tl.minimum(end, tl.max(ke, axis=0))
    if BITS:
        tau = tl.load(tau_ptr + safe_rows)[None, :]
        all_start = tl.max(ks, axis=0)
        all_end = tl.minimum(tl.min(ke, axis=0), chunk_end)
        order = key_order(KEYS)
        bit = key_bit(KEYS)
    for tile in tl.range(start, end, STEP):
        if BITS:
            score = _scores(q, weight, k_ptr, k_scale_ptr, tile + order, chunk_end, KEYS, QUERIES, HEADS)
            bits = tl.where(score >= tau, bit, 0)
            score = _scores(q, weight, k_ptr, k_scale_ptr, tile + 16 + order, chunk_end, KEYS, QUERIES, HEADS)
            bits += tl.where(score >= tau, bit << 16, 0)
            all_visible = (tile >= all_start) & (tile + STEP <= all_end)
            store_words(
                bits, out_ptr, out_stride, rows, num_rows, ks_ptr, ke_ptr, tile, chunk_start, chunk_end, all_visible,
                KEYS, QUERIES,
            )  # fmt: skip
        else:
            keys = tile + tl.arange(0, KEYS)
            score = _scores(q, weight, k_ptr, k_scale_ptr, keys, chunk_end, KEYS, QUERIES, HEADS)
            visible = (keys[:, None] >= ks[None, :]) & (keys[:, None] < ke[None, :]) & (keys < chunk_end)[:, None]
            place = rows.to(tl.int64)[None, :] * out_stride + (keys - chunk_start)[:, None]
            tl.store(out_ptr + place, score, mask=visible)


def launch_score(q, k, k_scale, weights, ks, ke, tau, out, chunk_start: int, chunk_end: int) -> None:
    """Score the keys ``[chunk_start, chunk_end)`` for every row.

    Args:
        q: ``[rows, num_heads, 128]`` float8_e4m3fn, contiguous; ``num_heads`` 32 or 64.
        k: ``[num_keys, 128]`` float8_e4m3fn, contiguous.
        k_scale: ``[num_keys]`` float32.
        weights: ``[rows, num_heads]`` float32, contiguous.
        ks, ke: ``[rows]`` int32, each row's window.
        tau: ``[rows]`` float32; read only when ``out`` holds bits.
        out: float32 ``[rows, >= chunk]`` for logits, or int32 ``[rows, >= ceil(chunk / 32)]`` for one bit per key
            (bit ``i % 32`` of word ``i // 32``). Column 0 is key ``chunk_start``. Only tiles that meet the window of a
            row in the tile's group are written; inside a row's window every logit is, and every word as a whole, with 0
            for keys outside the window.
        chunk_start, chunk_end: the chunk, in key columns.

    Exactness: model of hardware, contract ``sm90``.
    """
    num_rows, num_heads, _ = q.shape
    queries = TILE_COLUMNS // num_heads
    bits = out.dtype == torch.int32
    keys = tile_keys(k.device.type, chunk_end - chunk_start)
    tiles = triton.cdiv(num_rows, queries)
    per_program = keys_per_program(tiles, chunk_end - chunk_start, 2 * keys if bits else keys, KEYS_PER_PROGRAM)
    compiled = _score_kernel[(tiles, triton.cdiv(chunk_end - chunk_start, per_program))](
        q, k, k_scale, weights, ks, ke, tau, out, num_rows, chunk_start, chunk_end, out.stride(0), per_program,
        HEADS=num_heads, QUERIES=queries, KEYS=keys, BITS=bits,
        **OPTIONS,
    )  # fmt: skip
    require_tensor_core_chain(compiled)
