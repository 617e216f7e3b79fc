"""Survivor compaction: from one bit per key to ascending key lists.

A row's words are divided into segments. One kernel counts the bits of each segment; in the other each segment starts
where those before it end. There one warp takes some words at a time and works by place of the list, not by key: each
lane finds its place's word among the running counts, then its bit, and neighbours are written together.
"""

import torch
import triton
import triton.language as tl

TILE_WORDS = 128
"""Four words for each lane of a warp."""
SEGMENT_WORDS = 2048
GPU_PLACES = 32
INTERPRETER_PLACES = 4096


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
    words = tl.load(word_ptr + word, mask=word < limit, other=0)
    return tl.where((word >= first) & (word < last), words, 0).to(tl.uint32, bitcast=True)


@triton.jit
def _counts(bits):
    """How many bits of a uint32 are set, in each 2, 4 and 8 neighbours (in place) and in the lower 16."""
    pairs = bits - ((bits >> 1) & 0x55555555)
    fours = (pairs & 0x33333333) + ((pairs >> 2) & 0x33333333)
    eights = (fours + (fours >> 4)) & 0x0F0F0F0F
    return pairs, fours, eights, (eights + (eights >> 8)) & 0x1F


@triton.jit
def _ones(bits):
    """How many bits of a uint32 are set."""
    _, _, eights, lower = _counts(bits)
    return (lower + (((eights >> 16) + (eights >> 24)) & 0x1F)).to(tl.int32)


@triton.jit
def _descend(counts, rank, bit, width):
    """One halving of the search for a bit: on to the upper half if the lower one has no more than ``rank`` ones."""
    upper = rank >= counts
    return rank - tl.where(upper, counts, 0), bit + tl.where(upper, width, 0)


@triton.jit
def _bit_number(bits, rank):
    """Number of the set bit of a uint32 below which ``rank`` others are set."""
    pairs, fours, eights, lower = _counts(bits)
    rank, bit = _descend(lower.to(tl.int32), rank, tl.zeros_like(rank), 16)
    rank, bit = _descend(((eights >> bit.to(tl.uint32)) & 0xF).to(tl.int32), rank, bit, 8)
    rank, bit = _descend(((fours >> bit.to(tl.uint32)) & 0x7).to(tl.int32), rank, bit, 4)
    rank, bit = _descend(((pairs >> bit.to(tl.uint32)) & 0x3).to(tl.int32), rank, bit, 2)
    rank, bit = _descend(((bits >> bit.to(tl.uint32)) & 0x1).to(tl.int32), rank, bit, 1)
    return bit


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
    LEVELS: tl.constexpr,
    PLACES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    segment = tl.program_id(1)
    segments = tl.num_programs(1)
    other = tl.arange(0, SEGMENTS)
    parts = tl.load(part_ptr + row * segments + other, mask=other < segments, other=0)
    held = tl.sum(tl.where(other < segment, parts, 0), axis=0)
    here = tl.sum(tl.where(other == segment, parts, 0), axis=0)
    if segment == 0:
        tl.store(count_ptr + row, tl.sum(parts, axis=0))
    first, last = _segment(ks_ptr, ke_ptr, row, segment, chunk_start, chunk_end, SEGMENT)
    # A segment without bits, or beyond the capacity, is not read again.
    last = tl.where((here > 0) & (held < capacity), last, 0)
    row_words = word_ptr + row * word_stride
    for start in range(first // 4 * 4, last, WORDS):
        bits = _load_words(row_words, start, first, last, ALIGNED, WORDS)
        ones = tl.reshape(_ones(bits), (WORDS // 4, 4))
        # Ones of each four words, of all fours before, and of the first one, two and three words in a byte each.
        four = tl.sum(ones, axis=1)
        before = tl.cumsum(four, axis=0) - four
        inner = tl.sum(tl.cumsum(ones, axis=1) << (tl.arange(0, 4) * 8)[None, :], axis=1)
        total = tl.sum(four, axis=0)
        for block in range(0, total, PLACES):
            place = block + tl.arange(0, PLACES)
            # The last four words before which no more than "place" ones lie.
            lane = tl.zeros_like(place)
            step: tl.constexpr = WORDS // 8
            for level in tl.static_range(LEVELS):
                further = lane + (step >> level)
                lane = tl.where(tl.gather(before, further, axis=0) <= place, further, lane)
            rank = place - tl.gather(before, lane, axis=0)
            sums = tl.gather(inner, lane, axis=0)
            first1, first2, first3 = sums & 0xFF, (sums >> 8) & 0xFF, (sums >> 16) & 0xFF
            number = (rank >= first1).to(tl.int32) + (rank >= first2).to(tl.int32) + (rank >= first3).to(tl.int32)
            skipped = tl.where(rank >= first3, first3, tl.where(rank >= first2, first2, first1))
            rank -= tl.where(rank >= first1, skipped, 0)
            word = start + lane * 4 + number
            inside = (place < total) & (held + place < capacity)
            found = tl.load(row_words + word, mask=inside, other=0).to(tl.uint32, bitcast=True)
            key = chunk_start + word * 32 + _bit_number(found, rank)
            tl.store(index_ptr + row * index_stride + held + place, key, mask=inside)
        held += total


def _aligned(words) -> bool:
    """Whether four words may be loaded at once: if the last four of a row are its own."""
    return words.shape[1] % 4 == 0 and words.stride(0) % 4 == 0 and words.data_ptr() % 16 == 0


def launch_count(words, ks, ke, chunk_start: int, chunk_end: int) -> torch.Tensor:
    """How many bits are set in each segment of ``32 * SEGMENT_WORDS`` keys, int32 ``[rows, segments]``.

    Args:
        words, ks, ke, chunk_start, chunk_end: as for ``launch_compact``.

    Exactness: exact.
    """
    rows = words.shape[0]
    segments = max(1, triton.cdiv(triton.cdiv(chunk_end - chunk_start, 32), SEGMENT_WORDS))
    part = torch.empty((rows, segments), dtype=torch.int32, device=words.device)
    _count_kernel[(rows, segments)](
        words, ks, ke, part, chunk_start, chunk_end, words.stride(0),
        ALIGNED=_aligned(words), SEGMENT=SEGMENT_WORDS, num_warps=4,
    )  # fmt: skip
    return part


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
    part = launch_count(words, ks, ke, chunk_start, chunk_end)
    segments = part.shape[1]
    _list_kernel[(rows, segments)](
        words, ks, ke, part, index, count, chunk_start, chunk_end, words.stride(0), index.stride(0), capacity,
        SEGMENTS=triton.next_power_of_2(segments), WORDS=TILE_WORDS, LEVELS=(TILE_WORDS // 4).bit_length() - 1,
        PLACES=INTERPRETER_PLACES if words.device.type == "cpu" else GPU_PLACES,
        ALIGNED=_aligned(words), SEGMENT=SEGMENT_WORDS, num_warps=1,
    )  # fmt: skip
