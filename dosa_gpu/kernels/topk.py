"""Exact, deterministic top-K of two consecutive segments per row, with ascending output, and the K-th score alone.

Segment A is a list of at most ``topk`` entries, segment B a longer list or a row of logits. All keys of A are smaller
than all keys of B and both ascend, so the order of the entries is the order of the keys: among equal scores the first
entries win, which is the shared tie-break.

A program streams its part of a row once, in order, into a buffer that takes only scores which may still win. A full
buffer is cut down to its best ``topk`` entries, or a few more; what all of them reach, a later entry must exceed. For a
long row of which nothing is known, a sample says where to start; if too few scores reach that guess, the row is
streamed again without it. Rows too few to fill the GPU are divided into parts, whose winners the same kernel merges.

The threshold of a cut is found by halving a range of order-preserving codes of float32, counting scores in registers:
at least ``topk`` scores reach its lower end, fewer lie above its upper end.
"""

import torch
import triton
import triton.language as tl

GPU_TILE = 1024
INTERPRETER_TILE = 4096
OPTIONS = {"num_warps": 8, "maxnreg": 80}
"""Compiler options: three programs fit a multiprocessor."""
GPU_PROGRAMS = 396
"""Three for each multiprocessor of an H200. Each has a buffer of its own."""
INTERPRETER_PROGRAMS = 2
MIN_PART = 16384
"""Places of B that are worth a program of their own."""
MAX_KTH_WIDTH = 32768
"""Scores that one program of ``launch_kth`` can hold."""
SCORES_PER_WARP = 1024
"""Scores that a warp of ``launch_kth`` holds in its registers."""
MINUS_INFINITY = tl.constexpr(0x00800000)
"""Order code of -Inf: every score but NaN reaches it."""


@triton.jit
def _order_code(score):
    """uint32 that orders like the score; -0.0 and +0.0 agree, NaN gives 0, every other score more than 0."""
    bits = score.to(tl.uint32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    negative = (bits >> 31) == 1
    code = tl.where(negative & (magnitude != 0), 0x80000000 - magnitude, magnitude + 0x80000000)
    return tl.where(magnitude > 0x7F800000, 0, code).to(tl.uint32)


@triton.jit
def _score_of(code):
    """The score that has this code: +0.0 of the zeros, NaN (which no score reaches) where there is none."""
    bits = tl.where(code >= 0x80000000, code - 0x80000000, 0x80000000 - code + 0x80000000)
    return bits.to(tl.uint32).to(tl.float32, bitcast=True)


@triton.jit
def _threshold(score, count, low, topk, enough):
    """Code of the K-th largest score, or of a smaller one that at most ``enough`` scores reach.

    Args:
        score: scores; NaN does not count.
        count: how many of them are no NaN.
        low: a code that all of them reach.
        topk, enough: K, and how many scores may reach the code; at least K.

    Returns:
        The code, how many scores reach it, and how many are above it, which counts only if more than ``enough`` reach
        it: then it is the K-th. With fewer than ``topk`` scores it is ``low``.
    """
    high = _order_code(tl.max(tl.where(score == score, score, float("-inf")), axis=0))
    reached = count
    above = 0
    # At least topk scores reach low (if there are as many), fewer than topk are above high.
    while (low < high) & (reached > enough):
        middle = low + (high - low + 1) // 2
        passing = tl.sum((score >= _score_of(middle)).to(tl.int32), axis=0)
        if passing >= topk:
            low = middle
            reached = passing
        else:
            high = (middle - 1).to(tl.uint32)
            above = passing
    return low, reached, above


@triton.jit
def _load(score_ptr, tile, limit, TILE: tl.constexpr):
    """Scores from place ``tile`` on; with a ``limit`` that is known to be a multiple of 4, four at a time."""
    place = tile + tl.arange(0, TILE)
    return tl.load(score_ptr + place, mask=place < limit, other=float("nan"))


@triton.jit
def _quads(tile, TILE: tl.constexpr):
    """Elements 0, 1, 2 and 3 of every four neighbours. A thread holds four neighbours, so nothing moves."""
    even, odd = tl.split(tl.reshape(tile, (TILE // 4, 2, 2)))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def _store_chosen(score_ptr, index_ptr, score, key, target, c0, c1, c2, c3, TILE: tl.constexpr):
    """Store the chosen elements (1, others 0) of every four neighbours one after another from ``target`` on."""
    s0, s1, s2, s3 = _quads(score, TILE)
    k0, k1, k2, k3 = _quads(key, TILE)
    tl.store(score_ptr + target, s0, mask=c0 == 1)
    tl.store(index_ptr + target, k0, mask=c0 == 1)
    target += c0
    tl.store(score_ptr + target, s1, mask=c1 == 1)
    tl.store(index_ptr + target, k1, mask=c1 == 1)
    target += c1
    tl.store(score_ptr + target, s2, mask=c2 == 1)
    tl.store(index_ptr + target, k2, mask=c2 == 1)
    target += c2
    tl.store(score_ptr + target, s3, mask=c3 == 1)
    tl.store(index_ptr + target, k3, mask=c3 == 1)


@triton.jit
def _copy_selected(
    score_ptr, index_ptr, out_score_ptr, out_index_ptr, count, limit, threshold, ties, TILE: tl.constexpr
):  # fmt: skip
    """Copy the entries above ``threshold`` and the first ``ties`` at it, in order; the output may be the input."""
    passed = 0
    tied = 0
    for tile in range(0, count, TILE):
        place = tile + tl.arange(0, TILE)
        score = tl.where(place < count, _load(score_ptr, tile, limit, TILE), float("nan"))
        key = tl.load(index_ptr + place, mask=place < limit, other=0)
        a0, a1, a2, a3 = _quads((score > threshold).to(tl.int32), TILE)
        e0, e1, e2, e3 = _quads((score == threshold).to(tl.int32), TILE)
        # Both counts in one scan: a tile has less than 2^15 elements.
        both = (a0 + a1 + a2 + a3) + ((e0 + e1 + e2 + e3) << 16)
        before = tl.cumsum(both, axis=0) - both
        rank = tied + (before >> 16)
        target = passed + (before & 0xFFFF) + tl.minimum(rank, ties)
        c0 = a0 + e0 * (rank < ties)
        c1 = a1 + e1 * (rank + e0 < ties)
        c2 = a2 + e2 * (rank + e0 + e1 < ties)
        c3 = a3 + e3 * (rank + e0 + e1 + e2 < ties)
        # Every thread has read before any writes, and what is written lies within the part that was read.
        tl.debug_barrier()
        _store_chosen(out_score_ptr, out_index_ptr, score, key, target, c0, c1, c2, c3, TILE)
        total = tl.sum(both, axis=0)
        passed += total & 0xFFFF
        tied += total >> 16
    return passed + tl.minimum(tied, ties)


@triton.jit
def _select(
    score_ptr, index_ptr, out_score_ptr, out_index_ptr, held, nans, low, topk, enough,
    CAPACITY: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Copy the best ``topk`` of a buffer's ``held`` entries, or up to ``enough`` that contain them.

    ``nans`` of the entries are NaN, the others reach the code ``low``. Returns how many were copied, and the code that
    all of them reach; a later entry must exceed it if they are at least ``topk``.
    """
    tl.debug_barrier()
    # The buffer's size is a multiple of 4.
    limit = (held + 3) // 4 * 4
    score = tl.where(tl.arange(0, CAPACITY) < held, _load(score_ptr, 0, limit, CAPACITY), float("nan"))
    code, reached, above = _threshold(score, held - nans, low, topk, enough)
    ties = tl.where(reached > enough, topk - above, CAPACITY)
    taken = _copy_selected(
        score_ptr, index_ptr, out_score_ptr, out_index_ptr, held, limit, _score_of(code), ties, TILE
    )  # fmt: skip
    tl.debug_barrier()
    return taken, code


@triton.jit
def _guess(score_ptr, start, end, topk, SAMPLE: tl.constexpr):
    """A code that more than ``topk`` of the scores probably reach, but not many more, from a sample of them.

    The sample is four neighbours at a place in each of SAMPLE / 4 equal stretches, which a hash chooses: whatever the
    order of the scores and its periods, only chance makes it a bad one. A NaN in it counts as least.
    """
    place = tl.arange(0, SAMPLE)
    quad = place // 4
    stretch = (end - start) // SAMPLE * 4
    offset = (((quad.to(tl.uint32) * 2654435761) >> 16).to(tl.int32) % (stretch // 4)) * 4
    score = tl.load(score_ptr + start // 4 * 4 + quad * stretch + offset + place % 4)
    score = tl.where(score == score, score, float("-inf"))
    wanted = topk * SAMPLE // (end - start) * 7 // 4 + 16
    code, _, _ = _threshold(score, SAMPLE, tl.full((), MINUS_INFINITY, tl.uint32), wanted, wanted + wanted // 8)
    return code


@triton.jit(do_not_specialize=["rows", "parts", "part_size", "index_base", "topk", "enough"])
def _topk_kernel(
    a_index_ptr,  # [rows, topk] i32
    a_score_ptr,  # [rows, topk] f32
    a_count_ptr,  # [rows] i32
    b_index_ptr,  # [rows, b_stride] i32 with LISTED, else unused
    b_score_ptr,  # [rows, b_stride] f32
    b_start_ptr,  # [rows] i32
    b_end_ptr,  # [rows] i32
    tau_ptr,  # [rows] f32 with TAU, else unused
    buffer_index_ptr,  # [programs, CAPACITY] i32
    buffer_score_ptr,  # [programs, CAPACITY] f32
    out_index_ptr,  # [rows, parts, topk] i32
    out_score_ptr,  # [rows, parts, topk] f32
    out_count_ptr,  # [rows] i32, unused with PART
    rows,
    parts,
    part_size,
    b_stride,
    index_base,
    topk,
    enough,
    LISTED: tl.constexpr,
    TAU: tl.constexpr,
    PART: tl.constexpr,
    ALIGNED: tl.constexpr,
    FIRST: tl.constexpr,
    CAPACITY: tl.constexpr,
    TILE: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    index = buffer_index_ptr + program * CAPACITY
    score = buffer_score_ptr + program * CAPACITY
    lane = tl.arange(0, TILE)
    for item in range(tl.program_id(0), rows * parts, tl.num_programs(0)):
        part = item % parts
        row = tl.zeros((), tl.int64) + item // parts
        a_count = tl.load(a_count_ptr + row)
        b_start = tl.load(b_start_ptr + row)
        b_end = tl.load(b_end_ptr + row)
        if PART:
            b_start = tl.maximum(b_start, part * part_size)
            b_end = tl.minimum(b_end, part * part_size + part_size)
        b_score = b_score_ptr + row * b_stride
        b_index = b_index_ptr + row * b_stride
        # A goes into the buffer first. If it is full, a later entry must exceed its least score.
        place = tl.arange(0, FIRST)
        a_score = _load(a_score_ptr + row * topk, 0, a_count, FIRST)
        known = _order_code(tl.min(tl.where(a_score == a_score, a_score, float("inf")), axis=0))
        scores = tl.sum((a_score == a_score).to(tl.int32), axis=0)
        held = a_count
        nans = a_count - scores
        if PART:
            held = 0
            nans = 0
        else:
            key = tl.load(a_index_ptr + row * topk + place, mask=place < a_count, other=0)
            tl.store(score + place, a_score, mask=place < a_count)
            tl.store(index + place, key, mask=place < a_count)
        floor = tl.where(scores == topk, known + 1, MINUS_INFINITY).to(tl.uint32)
        if TAU:
            floor = tl.maximum(floor, _order_code(tl.load(tau_ptr + row)))
        # All scores in the buffer reach this code.
        known = tl.minimum(known, floor)
        reach = floor
        tries = 1
        if (scores < topk) & (b_end - b_start >= 8 * CAPACITY):
            reach = tl.maximum(floor, _guess(b_score, b_start, b_end, topk, CAPACITY))
            tries = 2
        first = b_start // 4 * 4
        limit = b_end
        if ALIGNED:
            limit = (b_end + 3) // 4 * 4
        # An empty part may start behind the row's memory.
        limit = tl.where(b_end > b_start, limit, 0)
        while tries > 0:
            found = 0
            # Two tiles a step; those of the next step are loaded before this one's are used.
            next0 = _load(b_score, first, limit, TILE)
            next1 = _load(b_score, first + TILE, limit, TILE)
            for tile in range(first, b_end, 2 * TILE):
                now0, now1 = next0, next1
                next0 = _load(b_score, tile + 2 * TILE, limit, TILE)
                next1 = _load(b_score, tile + 3 * TILE, limit, TILE)
                place0 = tile + lane
                place1 = place0 + TILE
                if (tile < b_start) | (tile + 2 * TILE > b_end):
                    now0 = tl.where((place0 >= b_start) & (place0 < b_end), now0, float("nan"))
                    now1 = tl.where(place1 < b_end, now1, float("nan"))
                least = _score_of(reach)
                passes0 = now0 >= least
                passes1 = now1 >= least
                c0, c1, c2, c3 = _quads(passes0.to(tl.int32), TILE)
                d0, d1, d2, d3 = _quads(passes1.to(tl.int32), TILE)
                # Both tiles in one scan.
                both = (c0 + c1 + c2 + c3) + ((d0 + d1 + d2 + d3) << 16)
                before = tl.cumsum(both, axis=0) - both
                total = tl.sum(both, axis=0)
                passed0 = total & 0xFFFF
                passed = passed0 + (total >> 16)
                if held + passed > CAPACITY:
                    held, known = _select(
                        score, index, score, index, held, nans, known, topk, enough, CAPACITY, TILE
                    )  # fmt: skip
                    nans = 0
                    reach = tl.where(held >= topk, tl.maximum(reach, known + 1), reach).to(tl.uint32)
                if LISTED:
                    key0 = tl.load(b_index + place0, mask=passes0, other=0)
                    key1 = tl.load(b_index + place1, mask=passes1, other=0)
                else:
                    key0 = index_base + place0
                    key1 = index_base + place1
                _store_chosen(score, index, now0, key0, held + (before & 0xFFFF), c0, c1, c2, c3, TILE)
                _store_chosen(score, index, now1, key1, held + passed0 + (before >> 16), d0, d1, d2, d3, TILE)
                held += passed
                found += passed
            tries -= 1
            if (tries > 0) & (found >= topk):
                tries = 0
            # A bad guess: once more without. The buffer was never full, A is where it was.
            if tries > 0:
                reach = floor
                held = a_count
                if PART:
                    held = 0
        out_index = out_index_ptr + (row * parts + part) * topk
        out_score = out_score_ptr + (row * parts + part) * topk
        if held <= CAPACITY // 2:
            taken, _ = _select(
                score, index, out_score, out_index, held, nans, known, topk, topk, CAPACITY // 2, TILE
            )  # fmt: skip
        else:
            taken, _ = _select(score, index, out_score, out_index, held, nans, known, topk, topk, CAPACITY, TILE)
        if PART:
            for tile in range(taken, topk, TILE):
                tl.store(out_score + tile + lane, float("nan"), mask=tile + lane < topk)
        else:
            tl.store(out_count_ptr + row, taken)


@triton.jit
def _kth(score, count, rank):
    """The ``rank``-th largest of the ``count`` scores that are no NaN; NaN if there are fewer."""
    low = _order_code(tl.min(tl.where(score == score, score, float("inf")), axis=0))
    code, reached, _ = _threshold(score, count, low, rank, rank)
    # If exactly rank scores reach the code, it may lie below the least of them.
    kth = _order_code(tl.min(tl.where(score >= _score_of(code), score, float("inf")), axis=0))
    return tl.where(reached >= rank, _score_of(kth), float("nan"))


@triton.jit(do_not_specialize=["width"])
def _kth_kernel(
    score_ptr,  # [rows, stride] f32
    start_ptr,  # [rows] i32
    end_ptr,  # [rows] i32
    rank_ptr,  # [rows] i32
    out_ptr,  # [rows] f32
    hard_ptr,  # [rows] f32
    count_ptr,  # [rows] i32
    stride,
    width,
    hard_ranks,
    ALIGNED: tl.constexpr,
    WIDTH: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    limit = width
    if ALIGNED:
        limit = (width + 3) // 4 * 4
    score = _load(score_ptr + row * stride, 0, limit, WIDTH)
    place = tl.arange(0, WIDTH)
    inside = (place >= tl.load(start_ptr + row)) & (place < tl.load(end_ptr + row))
    score = tl.where(inside, score, float("nan"))
    count = tl.sum((score == score).to(tl.int32), axis=0)
    rank = tl.load(rank_ptr + row)
    tl.store(count_ptr + row, count)
    tl.store(out_ptr + row, _kth(score, count, rank))
    tl.store(hard_ptr + row, _kth(score, count, tl.minimum(rank * hard_ranks, tl.maximum(count, 1))))


@triton.jit(do_not_specialize=["topk"])
def _trim_kernel(
    index_ptr,  # [rows, CAPACITY] i32
    score_ptr,  # [rows, CAPACITY] f32
    count_ptr,  # [rows] i32
    tau_ptr,  # [rows] f32
    topk,
    CAPACITY: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    held = tl.load(count_ptr + row)
    if held > topk + topk // 4:
        index = index_ptr + row * CAPACITY
        score = score_ptr + row * CAPACITY
        low = tl.full((), MINUS_INFINITY, tl.uint32)
        held, code = _select(score, index, score, index, held, 0, low, topk, topk, CAPACITY, TILE)
        tl.store(count_ptr + row, held)
        tau = tl.load(tau_ptr + row)
        tl.store(tau_ptr + row, tl.maximum(tau, _score_of(code)))


def _tile(device_type: str, width: int) -> int:
    """Places per tile: short rows keep small tiles under the interpreter, so that a CPU meets every edge too."""
    if device_type != "cpu":
        return GPU_TILE
    return max(256, min(INTERPRETER_TILE, 2 ** (max(width // 8, 1).bit_length() - 1)))


def _sizes(device_type: str, rows: int, topk: int, width: int) -> tuple[int, int, int, int]:
    """Places per tile, entries of a buffer, parts per row, programs."""
    tile = _tile(device_type, width)
    programs, least = (INTERPRETER_PROGRAMS, tile) if device_type == "cpu" else (GPU_PROGRAMS, MIN_PART)
    parts = max(1, min(programs // rows, triton.cdiv(width, least)))
    return tile, triton.next_power_of_2(topk + max(topk, 2 * tile) + 1), parts, min(programs, rows * parts)


def scratch_bytes(device_type: str, rows: int, topk: int, width: int) -> int:
    """Bytes that ``launch_topk`` allocates while it runs: buffers of the programs, winners of the parts of rows."""
    _, capacity, parts, programs = _sizes(device_type, rows, topk, width)
    return 8 * (programs * capacity + (rows * parts * topk if parts > 1 else 0))


def _aligned(matrix) -> bool:
    """Whether four neighbours may be loaded at once, the last of a row with what follows it."""
    return matrix.shape[1] % 4 == 0 and matrix.stride(0) % 4 == 0 and matrix.data_ptr() % 16 == 0


def launch_topk(
    a_index, a_score, a_count, b_index, b_score, b_start, b_end, index_base: int, out, *, tau=None
) -> None:  # fmt: skip
    """Write the exact top-K of segments A and B by (score descending, key ascending), ordered by key.

    Args:
        a_index, a_score, a_count: ``[rows, topk]`` int32 and float32, ``[rows]`` int32: the entries found so far.
        b_index: ``[rows, capacity]`` int32 key columns, or None: then the key of place ``i`` is ``index_base + i``.
        b_score: ``[rows, capacity]`` float32.
        b_start, b_end: ``[rows]`` int32: the part of each row of B that counts.
        index_base: key column of B's place 0 (only without ``b_index``).
        out: (index, score, count) like A, written up to ``count``; it must not overlap A.
        tau: ``[rows]`` float32, entries of B below it are left out; or None.

    It allocates ``scratch_bytes``. Exactness: exact. Special values: NaN is never selected; -0.0 ties with +0.0 and
    keeps its bits; -Inf is selectable; a NaN as ``tau`` leaves nothing out.
    """
    rows, topk = a_index.shape
    width = b_score.shape[1]
    if rows == 0:
        return
    device = a_score.device
    tile, capacity, parts, programs = _sizes(device.type, rows, topk, width)
    buffer_index = torch.empty((programs, capacity), dtype=torch.int32, device=device)
    buffer_score = torch.empty((programs, capacity), dtype=torch.float32, device=device)
    # A cut leaves between topk and enough entries: room for a tile, and few steps of the search.
    enough = topk + (capacity - 2 * tile - topk) // 8
    held = (a_index, a_score, a_count)
    common = {"FIRST": triton.next_power_of_2(topk), "CAPACITY": capacity, "TILE": tile, **OPTIONS}

    def launch(segment, ranges, target, count, parts, **constants):
        index, score = segment
        part_size = triton.cdiv(triton.cdiv(width, parts), 64) * 64
        _topk_kernel[(programs if parts > 1 else min(programs, rows),)](
            *held, score if index is None else index, score, *ranges, score if tau is None else tau,
            buffer_index, buffer_score, *target, count, rows, parts, part_size, score.stride(0), index_base,
            topk, enough, LISTED=index is not None, ALIGNED=_aligned(score), **constants, **common,
        )  # fmt: skip

    out_index, out_score, out_count = out
    if parts > 1:
        index = torch.empty((rows, parts * topk), dtype=torch.int32, device=device)
        score = torch.empty((rows, parts * topk), dtype=torch.float32, device=device)
        launch((b_index, b_score), (b_start, b_end), (index, score), out_count, parts, TAU=tau is not None, PART=True)
        b_index, b_score, b_start = index, score, torch.zeros_like(a_count)
        b_end = torch.full_like(a_count, parts * topk)
    launch((b_index, b_score), (b_start, b_end), (out_index, out_score), out_count, 1, TAU=tau is not None, PART=False)


def launch_kth(score, start, end, rank, hard_ranks: int, out, hard, count) -> None:
    """Write two order statistics of a part of each row, and how many scores it has.

    Args:
        score: ``[rows, width]`` float32, ``width`` at most ``MAX_KTH_WIDTH``; a NaN counts as absent.
        start, end: ``[rows]`` int32, the part ``[start, end)``.
        rank: ``[rows]`` int32, at least 1.
        hard_ranks: at least 1.
        out: ``[rows]`` float32, written: the ``rank``-th largest score; NaN if there are fewer.
        hard: ``[rows]`` float32, written: the ``hard_ranks * rank``-th largest, or the least if there are fewer; NaN
            without a score.
        count: ``[rows]`` int32, written: scores that are no NaN.

    Exactness: exact. Special values: -0.0 ties with +0.0, and a zero is written as +0.0; -Inf is a score.
    """
    rows, width = score.shape
    assert 1 <= width <= MAX_KTH_WIDTH, f"launch_kth holds at most {MAX_KTH_WIDTH} scores, got {width}"
    if rows == 0:
        return
    tile = max(triton.next_power_of_2(width), 128)
    _kth_kernel[(rows,)](
        score, start, end, rank, out, hard, count, score.stride(0), width, hard_ranks,
        ALIGNED=_aligned(score), WIDTH=tile, num_warps=max(4, min(tile // SCORES_PER_WARP, 32)),
    )  # fmt: skip


def launch_trim(index, score, count, topk: int, tau) -> None:
    """Cut lists that exceed ``topk`` by more than a quarter down to their best ``topk`` entries, in place and in order.

    A list that long shows that ``tau`` is low; the K-th score so far is a better one.

    Args:
        index, score: ``[rows, capacity]`` int32 key columns, ascending, and float32 without a NaN, contiguous;
            ``capacity`` a power of two, at least ``topk``.
        count: ``[rows]`` int32, entries of each list; lowered.
        topk: K, at least 1.
        tau: ``[rows]`` float32, raised for a list that was cut to a score that its K entries reach.

    Exactness: exact: of equal scores the first entries stay.
    """
    rows, capacity = index.shape
    if rows == 0:
        return
    _trim_kernel[(rows,)](
        index, score, count, tau, topk, CAPACITY=capacity, TILE=min(_tile(index.device.type, capacity), capacity),
        **OPTIONS,
    )  # fmt: skip
