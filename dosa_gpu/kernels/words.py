"""One bit per (row, key) pair, packed to words: bit ``i`` of a row's word is key ``first + i``. For two kernels.

A span of ``2 * KEYS`` keys is worked on as two tiles. Row ``r`` of tile ``half`` holds key ``32 (r // 16) + 16 half +
r % 16`` of the span: the 32 keys of a word then lie in the same 16 rows of both tiles. One warp owns these rows of the
tensor core's result, so a word is put together inside a warp.
"""

import triton
import triton.language as tl


@triton.jit
def key_order(KEYS: tl.constexpr):
    """Key of each row of the first tile, from the start of the span; int32 ``[KEYS]``. The second tile adds 16."""
    row = tl.arange(0, KEYS)
    return row // 16 * 32 + row % 16


@triton.jit
def key_bit(KEYS: tl.constexpr):
    """Bit of each row of the first tile; int32 ``[KEYS, 1]``. The second tile shifts it by 16."""
    return (1 << (tl.arange(0, KEYS) % 16))[:, None]


@triton.jit
def _lowest(count):
    return tl.where(count >= 32, -1, (1 << tl.minimum(tl.maximum(count, 0), 31)) - 1)


@triton.jit
def store_words(
    bits, out_ptr, out_stride, rows, num_rows, ks_ptr, ke_ptr, span, chunk_start, chunk_end, all_visible,
    KEYS: tl.constexpr, QUERIES: tl.constexpr,
):  # fmt: skip
    """Add the bits ``[KEYS, QUERIES]`` of both tiles up to words, clear those outside the windows, and store them."""
    words = tl.sum(tl.reshape(bits, (KEYS // 16, 16, QUERIES)), axis=1)
    word = tl.arange(0, KEYS // 16)
    first = (span + word * 32)[:, None]
    if not all_visible:
        safe_rows = tl.minimum(rows, num_rows - 1)
        ks = tl.load(ks_ptr + safe_rows)[None, :]
        ke = tl.minimum(tl.load(ke_ptr + safe_rows), chunk_end)[None, :]
        words = words & _lowest(ke - first) & ~_lowest(ks - first)
    place = rows.to(tl.int64)[None, :] * out_stride + ((span - chunk_start) // 32 + word)[:, None]
    # The last span may reach beyond the chunk's words.
    tl.store(out_ptr + place, words, mask=(first < chunk_end) & (rows < num_rows)[None, :])
