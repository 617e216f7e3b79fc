"""Survivor compaction: from one bit per key to ascending key lists."""

import triton
import triton.language as tl

TILE_WORDS = 32


@triton.jit
def _compact_kernel(
    word_ptr,  # [rows, word_stride] i32
    ks_ptr,  # [rows] i32
    ke_ptr,  # [rows] i32
    index_ptr,  # [rows, capacity] i32
    count_ptr,  # [rows] i32
    chunk_start,
    chunk_end,
    word_stride,
    capacity,
    WORDS: tl.constexpr,
):
    row = tl.program_id(0)
    first = tl.maximum(tl.load(ks_ptr + row), chunk_start) - chunk_start
    last = tl.minimum(tl.load(ke_ptr + row), chunk_end) - chunk_start
    count = 0
    base = row.to(tl.int64)
    for start in range(first // 32, (last + 31) // 32, WORDS):
        word = start + tl.arange(0, WORDS)
        bits = tl.load(word_ptr + base * word_stride + word, mask=word * 32 < last, other=0)
        flag = tl.reshape((bits[:, None] >> tl.arange(0, 32)[None, :]) & 1, (WORDS * 32,))
        place = count + tl.cumsum(flag, axis=0) - flag
        key = chunk_start + start * 32 + tl.arange(0, WORDS * 32)
        tl.store(index_ptr + base * capacity + place, key, mask=(flag == 1) & (place < capacity))
        count += tl.sum(flag, axis=0)
    tl.store(count_ptr + row, count)


def launch_compact(words, ks, ke, index, count, chunk_start: int, chunk_end: int) -> None:
    """List the keys whose bit is set, ascending.

    Args:
        words: ``[rows, >= ceil(chunk / 32)]`` int32 from ``launch_bound`` or ``launch_score``; read inside each row's
            window only.
        ks, ke: ``[rows]`` int32.
        index: ``[rows, capacity]`` int32, written.
        count: ``[rows]`` int32, written: how many bits are set, also beyond ``capacity`` (the caller repairs such a
            row).
        chunk_start, chunk_end: the chunk, in key columns.

    Exactness: exact.
    """
    _compact_kernel[(index.shape[0],)](
        words, ks, ke, index, count, chunk_start, chunk_end, words.stride(0), index.shape[1],
        WORDS=TILE_WORDS, num_warps=4,
    )  # fmt: skip
