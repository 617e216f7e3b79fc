"""Triton kernels of the audits: a bare tensor-core dot, the audit's own integer model of it, and a bare cast.

Like every kernel module it is bound to the interpreter or to the compiler when it is imported: call
``dosa_verify.targets.dosa.connect`` first. Nothing here is shared with ``dosa_ref`` or ``dosa_gpu``.
"""

from typing import Any

import torch
import triton
import triton.language as tl

OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}
NO_DIFFERENCE = tl.constexpr(2**62)
"""What ``first`` holds as long as nothing differs."""


@triton.jit
def _dot_kernel(
    a_ptr,  # [m, 128] e4m3
    b_ptr,  # [n, 128] e4m3
    out_ptr,  # [m, n] f32
    m,
    n,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
):
    rows = tl.program_id(0) * TILE_M + tl.arange(0, TILE_M)
    columns = tl.program_id(1) * TILE_N + tl.arange(0, TILE_N)
    depth = tl.arange(0, 128)
    a = tl.load(a_ptr + tl.minimum(rows, m - 1).to(tl.int64)[:, None] * 128 + depth[None, :])
    b = tl.load(b_ptr + tl.minimum(columns, n - 1).to(tl.int64)[:, None] * 128 + depth[None, :])
    dot = tl.dot(a, tl.trans(b))
    inside = (rows < m)[:, None] & (columns < n)[None, :]
    tl.store(out_ptr + rows.to(tl.int64)[:, None] * n + columns[None, :], dot, mask=inside)


def launch_dots(a: torch.Tensor, b: torch.Tensor, *, tile_m: int, tile_n: int, warps: int) -> tuple[torch.Tensor, Any]:
    """All dots of the rows of two matrices by ``tl.dot``; which instruction that becomes is the tile's doing.

    Args:
        a: uint8 codes ``[m, 128]``, contiguous.
        b: uint8 codes ``[n, 128]``, contiguous.
        tile_m, tile_n: the tile of one program.
        warps: warps of one program.

    Returns:
        float32 ``[m, n]``, and Triton's compiled kernel (None under the interpreter).
    """
    m, n = a.shape[0], b.shape[0]
    out = torch.empty((m, n), dtype=torch.float32, device=a.device)
    grid = (triton.cdiv(m, tile_m), triton.cdiv(n, tile_n))
    compiled = _dot_kernel[grid](
        a.view(torch.float8_e4m3fn), b.view(torch.float8_e4m3fn), out, m, n,
        TILE_M=tile_m, TILE_N=tile_n, num_warps=warps, enable_fp_fusion=False,
    )  # fmt: skip
    return out, compiled


@triton.jit
def _significand_and_exponent(code, NORMALIZE: tl.constexpr):
    """Signed significand ``s`` and exponent ``e`` of a code, value ``s * 2^(e - 3)``; zero has exponent -64."""
    field = (code >> 3) & 15
    fraction = code & 7
    significand = tl.where(field > 0, fraction | 8, fraction)
    exponent = tl.maximum(field, 1) - 7
    if NORMALIZE:
        up = (significand < 8).to(tl.int32) + (significand < 4).to(tl.int32) + (significand < 2).to(tl.int32)
        significand = significand << up
        exponent = exponent - up
    exponent = tl.where(significand == 0, -64, exponent)
    return tl.where((code & 128) != 0, -significand, significand), exponent


@triton.jit
def _align(magnitude, right, NEAREST: tl.constexpr):
    """``magnitude * 2^-right``, cut towards zero, or rounded to nearest with ties to even."""
    kept = magnitude >> right
    if NEAREST:
        # Half a unit, less one where the kept part is even; nothing where nothing is shifted out.
        half = ((1 << right) >> 1).to(magnitude.dtype)
        kept = tl.where(right > 0, (magnitude + half - 1 + (kept & 1)) >> right, magnitude)
    return kept


@triton.jit
def _power_of_two(exponent):
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _load_codes(ptr, lines, step, TERMS: tl.constexpr):
    """Codes ``[lines, TERMS]`` of one step."""
    return tl.load(ptr + lines.to(tl.int64)[:, None] * 128 + step + tl.arange(0, TERMS)[None, :]).to(tl.int32)


@triton.jit
def _model_kernel(
    a_ptr,  # [m, 128] codes, uint8
    b_ptr,  # [n, 128] codes, uint8
    got_ptr,  # COMPARE: [m, n] bits to compare with, i32; else where the model's bits go
    count_ptr,  # COMPARE: i64, differing elements
    first_ptr,  # COMPARE: i64, smallest differing place
    m,
    n,
    row_offset,
    TERMS: tl.constexpr,
    FRACTION: tl.constexpr,
    OUTPUT: tl.constexpr,
    NORMALIZE: tl.constexpr,
    NEAREST: tl.constexpr,
    PROMOTE: tl.constexpr,
    WIDE: tl.constexpr,
    COMPARE: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
):
    INT: tl.constexpr = tl.int64 if WIDE else tl.int32
    rows = tl.program_id(0) * TILE_M + tl.arange(0, TILE_M)
    columns = tl.program_id(1) * TILE_N + tl.arange(0, TILE_N)
    a_lines = tl.minimum(rows, m - 1)
    b_lines = tl.minimum(columns, n - 1)
    nan = tl.zeros((TILE_M, TILE_N), tl.int32)
    # The accumulator is acc * 2^(acc_exponent - OUTPUT); no dot of E4M3 values from zero reaches float32's subnormals.
    acc = tl.zeros((TILE_M, TILE_N), INT)
    acc_exponent = tl.zeros((TILE_M, TILE_N), tl.int32)
    promoted = tl.zeros((TILE_M, TILE_N), tl.float32)
    for step in range(0, 128, TERMS):
        a_code = _load_codes(a_ptr, a_lines, step, TERMS)
        b_code = _load_codes(b_ptr, b_lines, step, TERMS)
        a_nan = tl.max(((a_code & 127) == 127).to(tl.int32), axis=1)
        b_nan = tl.max(((b_code & 127) == 127).to(tl.int32), axis=1)
        nan = nan | a_nan[:, None] | b_nan[None, :]
        a_value, a_exponent = _significand_and_exponent(a_code, NORMALIZE)
        b_value, b_exponent = _significand_and_exponent(b_code, NORMALIZE)
        exponents = a_exponent[:, None, :] + b_exponent[None, :, :]
        products = a_value[:, None, :] * b_value[None, :, :]
        largest = tl.maximum(tl.max(exponents, axis=2), tl.where(acc != 0, acc_exponent, -128))
        if OUTPUT >= FRACTION:
            magnitude = _align(tl.abs(acc), tl.minimum(largest - acc_exponent + (OUTPUT - FRACTION), 30), NEAREST)
        else:
            up = tl.abs(acc) << (FRACTION - OUTPUT)
            magnitude = _align(up, tl.minimum(largest - acc_exponent, 30), NEAREST)
        total = tl.where(acc < 0, -magnitude, magnitude)
        right = tl.minimum(largest[:, :, None] - exponents, 30)
        magnitudes = _align(tl.abs(products).to(INT) << (FRACTION - 6), right, NEAREST)
        total += tl.sum(tl.where(products < 0, -magnitudes, magnitudes), axis=2)
        # Position of the leading bit: the conversions are exact (below 2^24, below 2^53).
        magnitude = tl.abs(total)
        if WIDE:
            leading = (magnitude.to(tl.float64).to(tl.int64, bitcast=True) >> 52).to(tl.int32) - 1023
        else:
            leading = (magnitude.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127
        excess = leading - OUTPUT
        down = _align(magnitude, tl.maximum(excess, 0), NEAREST)
        kept = tl.where(excess > 0, down, magnitude << tl.maximum(tl.minimum(-excess, OUTPUT), 0))
        exponent = largest - FRACTION + leading
        if NEAREST:
            carried = kept == (2 << OUTPUT)
            kept = tl.where(carried, kept >> 1, kept)
            exponent = tl.where(carried, exponent + 1, exponent)
        acc_exponent = tl.where(total == 0, 0, exponent)
        acc = tl.where(total < 0, -kept, tl.where(total == 0, 0, kept)).to(INT)
        if PROMOTE:
            promoted += acc.to(tl.float32) * _power_of_two(acc_exponent - OUTPUT)
            acc = tl.zeros((TILE_M, TILE_N), INT)
    value = promoted if PROMOTE else acc.to(tl.float32) * _power_of_two(acc_exponent - OUTPUT)
    # A sum of zero is +0 (promoted: an exact cancellation gives +0 as well).
    bits = tl.where(nan != 0, 0x7FFFFFFF, (value + 0.0).to(tl.int32, bitcast=True))
    inside = (rows < m)[:, None] & (columns < n)[None, :]
    place = rows.to(tl.int64)[:, None] * n + columns[None, :]
    if COMPARE:
        got = tl.load(got_ptr + place, mask=inside, other=0)
        different = (got != bits) & inside
        number = tl.sum(tl.sum(different.to(tl.int32), axis=1), axis=0)
        if number > 0:
            where = tl.where(different, place + row_offset.to(tl.int64) * n, NO_DIFFERENCE)
            tl.atomic_add(count_ptr, number.to(tl.int64))
            tl.atomic_min(first_ptr, tl.min(tl.min(where, axis=1), axis=0))
    else:
        tl.store(got_ptr + place, bits, mask=inside)


def _launch_model(
    a: torch.Tensor,
    b: torch.Tensor,
    got: torch.Tensor,
    count: torch.Tensor,
    first: torch.Tensor,
    row_offset: int,
    parameters: dict[str, Any],
    compare: bool,
) -> None:
    m, n = a.shape[0], b.shape[0]
    # The interpreter pays per operation, not per element: larger tiles there.
    tile = (16, 16) if a.is_cuda else (64, 64 if n > 16 else 16)
    grid = (triton.cdiv(m, tile[0]), triton.cdiv(n, tile[1]))
    _model_kernel[grid](
        a.contiguous(), b.contiguous(), got, count, first, m, n, row_offset,
        **parameters, COMPARE=compare, TILE_M=tile[0], TILE_N=tile[1], **OPTIONS,
    )  # fmt: skip


def launch_model(a: torch.Tensor, b: torch.Tensor, parameters: dict[str, Any]) -> torch.Tensor:
    """The integer model's dots of the rows of two matrices.

    Args:
        a: uint8 codes ``[m, 128]``, elements in the order in which the steps take them.
        b: uint8 codes ``[n, 128]``.
        parameters: the kernel's upper-case constants but COMPARE and the tile.

    Returns:
        float32 ``[m, n]``.
    """
    bits = torch.empty((a.shape[0], b.shape[0]), dtype=torch.int32, device=a.device)
    _launch_model(a, b, bits, bits, bits, 0, parameters, compare=False)
    return bits.view(torch.float32)


def launch_compare(
    a: torch.Tensor,
    b: torch.Tensor,
    got: torch.Tensor,
    count: torch.Tensor,
    first: torch.Tensor,
    row_offset: int,
    parameters: dict[str, Any],
) -> None:
    """Compare dots with the integer model, every bit.

    Args:
        a, b: as in ``launch_model``.
        got: float32 ``[m, n]``, contiguous.
        count: int64 ``[1]``, the number of differences is added to it.
        first: int64 ``[1]``, lowered to the smallest ``(row_offset + i) * n + j`` of a differing element.
        row_offset: number of the first row of ``a``.
        parameters: as in ``launch_model``.
    """
    _launch_model(a, b, got.view(torch.int32), count, first, row_offset, parameters, compare=True)


@triton.jit
def _cast_kernel(x_ptr, code_ptr, n, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < n
    tl.store(code_ptr + place, tl.load(x_ptr + place, mask=inside, other=0.0).to(tl.float8e4nv), mask=inside)


def launch_cast(values: torch.Tensor) -> torch.Tensor:
    """Triton's own cast to E4M3FN.

    Args:
        values: float32, bfloat16 or float16, one-dimensional.

    Returns:
        uint8 codes of the same shape.
    """
    codes = torch.empty(values.shape, dtype=torch.float8_e4m3fn, device=values.device)
    block = 1024 if values.is_cuda else 65536
    _cast_kernel[(triton.cdiv(values.numel(), block),)](values, codes, values.numel(), BLOCK=block, **OPTIONS)
    return codes.view(torch.uint8)


@triton.jit
def _decode_kernel(code_ptr, value_ptr, n, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < n
    tl.store(value_ptr + place, tl.load(code_ptr + place, mask=inside, other=0.0).to(tl.float32), mask=inside)


def launch_decode(codes: torch.Tensor) -> torch.Tensor:
    """Triton's own cast from E4M3FN to float32.

    Args:
        codes: uint8, one-dimensional.

    Returns:
        float32 of the same shape.
    """
    values = torch.empty(codes.shape, dtype=torch.float32, device=codes.device)
    _decode_kernel[(triton.cdiv(codes.numel(), 256),)](
        codes.view(torch.float8_e4m3fn), values, codes.numel(), BLOCK=256, **OPTIONS
    )
    return values
