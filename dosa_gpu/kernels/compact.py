"""Survivor compaction: from one bit per key to ascending key lists.

A row's words are divided into segments. One kernel counts the bits of each segment; in the other each segment starts
where those before it end. There one warp lists the keys of its words' lowest bits, then of the next ones, until no
word has a bit left: the work grows with the survivors, not with the keys.
"""

import torch
import triton
import triton.language as tl

TILE_WORDS = 256
SEGMENT_WORDS = 2048


@triton.jit
def _segment(ks_ptr, ke_ptr, row, segment, chunk_start, chunk_end, SEGMENT: tl.constexpr):
    """First and last + 1 of the words of a segment that lie in the row's window."""
    first = tl.maximum(tl.load(ks_ptr + row), chunk_start) - chunk_start
    last = tl.minimum(tl.load(ke_ptr + row), chunk_end) - chunk_start
    return tl.maximum(first // 32, segment * SEGMENT), tl.minimum((last + 31) // 32, segment * SEGMENT + SEGMENT)


@triton.jit
def _load_words(word_ptr, start, first, last, ALIGNED: tl.constexpr, WORDS: tl.constexpr):
    """uint32 words from ``start`` on, 0 outside ``[first, last)``."""
    word = start + tl.arange(0, WORDS)
    limit = last
    if ALIGNED:
        limit = (last + 3) // 4 * 4
    bits = tl.load(word_ptr + word, mask=word < limit, other=0)
    return tl.where((word >= first) & (word < last), bits, 0).to(tl.uint32, bitcast=True)


@triton.jit
def _ones(bits):
    """How many bits of a uint32 are set: sums of 2, 4 and 8 neighbours in place, then of the four bytes."""
    pairs = bits - ((bits >> 1) & 0x55555555)
    fours = (pairs & 0x33333333) + ((pairs >> 2) & 0x33333333)
    eights = (fours + (fours >> 4)) & 0x0F0F0F0F
    sixteens = eights + (eights >> 8)
    return ((sixteens + (sixteens >> 16)) & 0x3F).to(tl.int32)


@triton.jit(do_not_specialize=["chunk_start", "chunk_end"])
def _count_kernel(
    word_ptr,  # [rows, word_stride] i32
    ks_ptr,  # [rows] i32
    ke_ptr,  # [rows] i32
    part_ptr,  # [rows, segments] i32
    chunk_start,
    chunk_end,
    word_stride,
    ALIGNED: tl.constexpr,
    SEGMENT: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    segment = tl.program_id(1)
    first, last = _segment(ks_ptr, ke_ptr, row, segment, chunk_start, chunk_end, SEGMENT)
    bits = _load_words(word_ptr + row * word_stride, segment * SEGMENT, first, last, ALIGNED, SEGMENT)
    tl.store(part_ptr + row * tl.num_programs(1) + segment, tl.sum(_ones(bits), axis=0))


@triton.jit(do_not_specialize=["chunk_start", "chunk_end", "index_stride", "capacity"])
def _list_kernel(
    word_ptr,  # [rows, word_stride] i32
    ks_ptr,  # [rows] i32
    ke_ptr,  # [rows] i32
    part_ptr,  # [rows, segments] i32
    index_ptr,  # [rows, index_stride] i32
    count_ptr,  # [rows] i32
    chunk_start,
    chunk_end,
    word_stride,
    index_stride,
    capacity,
    ALIGNED: tl.constexpr,
    SEGMENT: tl.constexpr,
    SEGMENTS: tl.constexpr,
    WORDS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    segment = tl.program_id(1)
    segments = tl.num_programs(1)
    lane = tl.arange(0, SEGMENTS)
    parts = tl.load(part_ptr + row * segments + lane, mask=lane < segments, other=0)
    held = tl.sum(tl.where(lane < segment, parts, 0), axis=0)
    here = tl.sum(tl.where(lane == segment, parts, 0), axis=0)
    if segment == 0:
        tl.store(count_ptr + row, tl.sum(parts, axis=0))
    first, last = _segment(ks_ptr, ke_ptr, row, segment, chunk_start, chunk_end, SEGMENT)
    # A segment without bits, or beyond the capacity, is not read again.
    last = tl.where((here > 0) & (held < capacity), last, first)
    for start in range(first // 4 * 4, last, WORDS):
        bits = _load_words(word_ptr + row * word_stride, start, first, last, ALIGNED, WORDS)
        ones = _ones(bits)
        place = held + tl.cumsum(ones, axis=0) - ones
        key = chunk_start + (start + tl.arange(0, WORDS)) * 32
        for _ in range(tl.max(ones, axis=0)):
            lowest = bits & (~bits + 1)
            # A power of two up to 2^31 is exact in float32; its exponent is the bit's number.
            number = (lowest.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127
            inside = (bits != 0) & (place < capacity)
            tl.store(index_ptr + row * index_stride + place, key + number, mask=inside)
            bits = bits ^ lowest
            place += 1
        held += tl.sum(ones, axis=0)


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

    It allocates 4 bytes for each segment of ``SEGMENT_WORDS`` words of each row. Exactness: exact.
    """
    rows, capacity = index.shape
    segments = max(1, triton.cdiv(triton.cdiv(chunk_end - chunk_start, 32), SEGMENT_WORDS))
    part = torch.empty((rows, segments), dtype=torch.int32, device=words.device)
    # Four words may be loaded at once if the last four of a row are its own.
    aligned = words.shape[1] % 4 == 0 and words.stride(0) % 4 == 0 and words.data_ptr() % 16 == 0
    sizes = {"ALIGNED": aligned, "SEGMENT": SEGMENT_WORDS}
    grid = (rows, segments)
    _count_kernel[grid](words, ks, ke, part, chunk_start, chunk_end, words.stride(0), **sizes, num_warps=4)
    _list_kernel[grid](
        words, ks, ke, part, index, count, chunk_start, chunk_end, words.stride(0), index.stride(0), capacity,
        SEGMENTS=triton.next_power_of_2(segments), WORDS=TILE_WORDS, **sizes, num_warps=1,
    )  # fmt: skip
