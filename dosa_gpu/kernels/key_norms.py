"""Key preparation: the norm and the scale that the bound pass reads for each key."""

import torch
import triton
import triton.language as tl

from dosa_gpu.plan import tile_keys
from dosa_ref import spec


@triton.jit
def _key_norms_kernel(
    code_ptr,  # [num_keys, 128] u8, E4M3 codes
    k_scale_ptr,  # [num_keys] f32
    norm_ptr,  # [num_keys] f32
    scale_ptr,  # [num_keys] f32
    num_keys,
    SCALE_MIN: tl.constexpr,
    SCALE_MAX: tl.constexpr,
    OUTWARD: tl.constexpr,
    KEYS: tl.constexpr,
):
    keys = tl.program_id(0) * KEYS + tl.arange(0, KEYS)
    inside = keys < num_keys
    safe_keys = tl.minimum(keys, num_keys - 1)
    code = tl.load(code_ptr + safe_keys.to(tl.int64)[:, None] * 128 + tl.arange(0, 128)[None, :]).to(tl.int32) & 0x7F
    # float32 bits of the magnitude: exponent bias 7 -> 127, three mantissa bits to the top; subnormals are raised to
    # 2^-6.
    bits = tl.where(code == 0, 0, tl.where(code < 8, (127 - 6) << 23, (code << 20) + ((127 - 7) << 23)))
    magnitude = bits.to(tl.float32, bitcast=True)
    # 128 squares: at most 128 float32 roundings, then one square root; OUTWARD covers them (the sum is never
    # subnormal).
    norm = tl.sqrt_rn(tl.sum(magnitude * magnitude, axis=1)) * OUTWARD
    k_scale = tl.load(k_scale_ptr + safe_keys)
    has_nan = tl.max((code == 0x7F).to(tl.int32), axis=1) == 1
    usable = (k_scale >= SCALE_MIN) & (k_scale <= SCALE_MAX) & (has_nan == 0)
    tl.store(norm_ptr + keys, tl.where(usable, norm, float("inf")), mask=inside)
    tl.store(scale_ptr + keys, tl.where(usable, k_scale, 1.0), mask=inside)


def launch_key_norms(k, k_scale, norm, scale) -> None:
    """Write ``norm >= ||k~||`` and the scale of each key; +Inf and 1 for a key that must always survive.

    ``k~`` has each non-zero magnitude raised to at least 2^-6. A key must survive if it holds a NaN code or its scale
    is not in ``2**KEY_SCALE_LOG2_MIN .. 2**KEY_SCALE_LOG2_MAX`` (NaN, Inf, zero and negative scales included).

    Args:
        k: ``[num_keys, 128]`` float8_e4m3fn, contiguous.
        k_scale: ``[num_keys]`` float32.
        norm, scale: ``[num_keys]`` float32, written.

    Exactness: enclosure (128 roundings of 2^-24 and an outward factor, lemma ``key_norm``).
    """
    num_keys = k.shape[0]
    keys = tile_keys(k.device.type, num_keys)
    _key_norms_kernel[(triton.cdiv(num_keys, keys),)](
        k.view(torch.uint8), k_scale, norm, scale, num_keys,
        SCALE_MIN=2.0**spec.KEY_SCALE_LOG2_MIN, SCALE_MAX=2.0**spec.KEY_SCALE_LOG2_MAX,
        OUTWARD=1.0 + 2.0**spec.NORM_OUTWARD_LOG2,
        KEYS=keys, num_warps=4,
    )  # fmt: skip
