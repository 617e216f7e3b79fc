"""Dense scoring: every visible key of a key chunk, all heads, as logits or as one "score >= tau" bit per pair."""

import torch
import triton
import triton.language as tl

from dosa_gpu.kernels.combine_heads import combine_heads
from dosa_gpu.machine_code import require_tensor_core_chain
from dosa_gpu.plan import tile_keys

TILE_COLUMNS = 128
KEYS_PER_PROGRAM = 2048

OPTIONS = {"num_warps": 4, "num_stages": 3, "enable_fp_fusion": False}
"""Compiler options: fp fusion off, since the contract says which products are fused."""


@triton.jit
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
    HEADS: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    PER_PROGRAM: tl.constexpr,
    BITS: tl.constexpr,
):
    COLUMNS: tl.constexpr = QUERIES * HEADS
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
    if BITS:
        tau = tl.load(tau_ptr + safe_rows)
    # Tiles start at multiples of KEYS from chunk_start, so that every 32-bit word belongs to one tile.
    start = chunk_start + tl.program_id(1) * PER_PROGRAM
    end = tl.minimum(start + PER_PROGRAM, chunk_end)
    first_visible = tl.min(tl.where(row_ok, ks, chunk_end), axis=0)
    start = tl.maximum(start, chunk_start + (tl.maximum(first_visible, chunk_start) - chunk_start) // KEYS * KEYS)
    end = tl.minimum(end, tl.max(ke, axis=0))
    for tile in tl.range(start, end, KEYS):
        keys = tile + tl.arange(0, KEYS)
        safe_keys = tl.minimum(keys, chunk_end - 1)
        k = tl.load(k_ptr + safe_keys.to(tl.int64)[:, None] * 128 + depth[None, :])
        k_scale = tl.load(k_scale_ptr + safe_keys)
        dot = tl.dot(k, tl.trans(q))
        score = combine_heads(dot, weight, k_scale, KEYS, QUERIES, HEADS)
        visible = (keys[:, None] >= ks[None, :]) & (keys[:, None] < ke[None, :]) & (keys < chunk_end)[:, None]
        if BITS:
            keep = (visible & (score >= tau[None, :])).to(tl.int32)
            bit = tl.reshape(1 << tl.arange(0, 32), (1, 32, 1))
            words = tl.sum(tl.reshape(keep, (KEYS // 32, 32, QUERIES)) * bit, axis=1)
            word = (tile - chunk_start) // 32 + tl.arange(0, KEYS // 32)
            # The last tile may reach beyond the chunk's words.
            inside = (word * 32 < chunk_end - chunk_start)[:, None] & row_ok[None, :]
            tl.store(out_ptr + rows.to(tl.int64)[None, :] * out_stride + word[:, None], words, mask=inside)
        else:
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
            row in the tile's group are written; inside a row's window every logit (bit) is.
        chunk_start, chunk_end: the chunk, in key columns.

    Exactness: model of hardware, contract ``sm90``.
    """
    num_rows, num_heads, _ = q.shape
    queries = TILE_COLUMNS // num_heads
    grid = (triton.cdiv(num_rows, queries), triton.cdiv(chunk_end - chunk_start, KEYS_PER_PROGRAM))
    compiled = _score_kernel[grid](
        q, k, k_scale, weights, ks, ke, tau, out, num_rows, chunk_start, chunk_end, out.stride(0),
        HEADS=num_heads, QUERIES=queries, KEYS=tile_keys(k.device.type, chunk_end - chunk_start),
        PER_PROGRAM=KEYS_PER_PROGRAM, BITS=out.dtype == torch.int32,
        **OPTIONS,
    )  # fmt: skip
    require_tensor_core_chain(compiled)
