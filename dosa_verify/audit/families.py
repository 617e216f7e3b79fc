"""Families of E4M3 vectors that make tensor-core accumulation models differ, and constructed worst cases.

Every vector of side ``a`` fits every vector of side ``b``: a family is audited over all pairs. Codes are drawn with the
torch generator of the device, so that a seed gives the same vectors again on the same kind of device.
"""

from __future__ import annotations

import enum
import itertools
from typing import TYPE_CHECKING

from dosa_ref.spec import HEAD_DIM, STEP_TERMS, STEPS

if TYPE_CHECKING:
    import torch

NAN_CODE = 0x7F
SIGN = 0x80
MAX_CODE = 0x7E


class Family(enum.Enum):
    """What the vectors of a family are made of."""

    BITS = "random bit patterns"
    NORMAL = "normal values, one scale per vector"
    SPREAD = "wide exponent spread"
    SUBNORMAL = "subnormals"
    CANCEL_IN_STEP = "cancellation inside a step"
    CANCEL_ACROSS_STEPS = "cancellation across steps"
    SPARSE = "sparse"
    SIGNED_ZEROS = "signed zeros"
    HUGE_THEN_TINY = "one huge then tiny"
    NAN = "NaN"


class Draw:
    """Random codes of one device and seed."""

    def __init__(self, seed: int, device: torch.device) -> None:
        import torch

        self._generator = torch.Generator(device=device).manual_seed(seed)
        self._device = device

    def integers(self, low: int, high: int, *shape: int) -> torch.Tensor:
        """Uniform integers in ``[low, high)``, int32."""
        import torch

        return torch.randint(low, high, shape, generator=self._generator, device=self._device, dtype=torch.int32)

    def chance(self, probability: float, *shape: int) -> torch.Tensor:
        """True with a probability."""
        import torch

        return torch.rand(shape, generator=self._generator, device=self._device) < probability

    def normal(self, *shape: int) -> torch.Tensor:
        """Standard normal float32."""
        import torch

        return torch.randn(shape, generator=self._generator, device=self._device)

    def bits(self, *shape: int) -> torch.Tensor:
        """All 254 codes that are not NaN."""
        code = self.integers(0, 254, *shape)
        return code + (code >= NAN_CODE).int()

    def signs(self, *shape: int) -> torch.Tensor:
        """0 or the sign bit."""
        return self.integers(0, 2, *shape) * SIGN

    def between(self, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
        """Signed codes whose exponent field lies between two fields (both clamped to 0..15, inclusive)."""
        low, high = low.clamp(0, 15), high.clamp(0, 15)
        width = (high - low + 1).clamp(min=1)
        field = low + self.integers(0, 1 << 20, *low.shape) % width
        code = (field << 3) | self.integers(0, 8, *low.shape)
        return code.clamp(max=MAX_CODE) | self.signs(*low.shape)

    def perturbed(self, codes: torch.Tensor, places: int) -> torch.Tensor:
        """Replace some random elements of each row by random codes."""
        # Distinct places: what a scatter writes where two meet would not be the same on every run.
        where = self.normal(*codes.shape).argsort(dim=1)[:, :places]
        return codes.scatter(1, where, self.bits(len(codes), places))


def vectors(family: Family, count: int, side: str, draw: Draw) -> torch.Tensor:
    """Draw the vectors of one side of a family.

    Args:
        family: which.
        count: how many.
        side: ``a`` or ``b``; differs where a pair must cancel.
        draw: source of randomness.

    Returns:
        uint8 codes ``[count, 128]``, contiguous; NaN codes in `Family.NAN` only.
    """
    import torch

    return _codes(family, count, side, draw).to(torch.uint8).contiguous()


def _codes(family: Family, count: int, side: str, draw: Draw) -> torch.Tensor:
    import torch

    shape = (count, HEAD_DIM)
    if family is Family.BITS:
        return draw.bits(*shape)
    if family is Family.NORMAL:
        scale = torch.exp2(draw.integers(-5, 7, count, 1).float())
        values = (draw.normal(*shape) * scale).clamp(-448, 448)
        return values.to(torch.float8_e4m3fn).view(torch.uint8).int()
    if family is Family.SPREAD:
        # A window of exponents per step, so that products and accumulator are of very unequal size.
        top = draw.integers(0, 17, count, STEPS, 1).expand(count, STEPS, STEP_TERMS).reshape(shape)
        return draw.between(top - 3, top)
    if family is Family.SUBNORMAL:
        tiny = draw.integers(0, 8, *shape) | draw.signs(*shape)
        mixed = torch.where(draw.chance(0.1, *shape), draw.between(tiny * 0 + 12, tiny * 0 + 15), tiny)
        kind = draw.integers(0, 3, count, 1)
        return torch.where(kind == 0, tiny, torch.where(kind == 1, mixed, draw.between(tiny * 0, tiny * 0 + 2)))
    if family is Family.CANCEL_IN_STEP:
        half = draw.bits(count, STEPS, STEP_TERMS // 2)
        other = half ^ SIGN if side == "a" else half
        return draw.perturbed(torch.cat([half, other], dim=2).reshape(shape), 3)
    if family is Family.CANCEL_ACROSS_STEPS:
        step = draw.bits(count, STEPS // 2, STEP_TERMS)
        other = step ^ SIGN if side == "a" else step
        return draw.perturbed(torch.stack([step, other], dim=2).reshape(shape), 3)
    if family is Family.SPARSE:
        kept = draw.chance(1.0, *shape) & (draw.integers(0, 100, *shape) < draw.integers(1, 25, count, 1))
        return torch.where(kept, draw.bits(*shape), draw.signs(*shape))
    if family is Family.SIGNED_ZEROS:
        few = draw.integers(0, 3, *shape) * 0x1C | draw.signs(*shape)
        return torch.where(draw.chance(0.9, *shape), draw.signs(*shape), few)
    tiny = draw.between(draw.integers(0, 4, count, 1).expand(shape), draw.integers(2, 9, count, 1).expand(shape))
    if family is Family.HUGE_THEN_TINY:
        one_sign = draw.chance(0.5, count, 1)
        tiny = torch.where(one_sign, tiny & NAN_CODE, tiny)
        place = draw.integers(0, HEAD_DIM, count, 1) * draw.integers(0, 2, count, 1)
        huge = draw.between(place * 0 + 14, place * 0 + 15)
        # Vectors of the two sides meet at element 0 half of the time; elsewhere one side is huge alone.
        return tiny.scatter(1, place.long(), huge)
    codes = torch.where(draw.chance(0.5, count, 1), draw.bits(*shape), tiny)
    place = draw.integers(0, HEAD_DIM, count, 1).long()
    nan = NAN_CODE | draw.signs(count, 1)
    return torch.where(draw.chance(0.5, count, 1), codes.scatter(1, place, nan), codes)


def value_table() -> list[float]:
    """Value of each code, from its bits; NaN counts as zero."""
    table = []
    for code in range(256):
        field, fraction = (code >> 3) & 15, code & 7
        value = (8 + fraction) * 2.0 ** (field - 10) if field else fraction * 2.0**-9
        table.append(0.0 if code & NAN_CODE == NAN_CODE else -value if code & SIGN else value)
    return table


def worst_cases() -> tuple[list[list[int]], list[list[int]]]:
    """Constructed queries and keys whose pairs lose much in the alignment.

    The first products are 2^16 (256 times 256), so that every later product is cut at 8; the others have mantissas and
    exponents such that many products stay just below it, each lost whole. Both signs, and heads in every step.

    Returns:
        Codes of the queries and of the keys.
    """

    def code(field: int, fraction: int) -> int:
        return (field << 3) | fraction

    head = code(15, 0)
    tails = [code(field, fraction) for field, fraction in itertools.product(range(5, 12), range(8))]
    sides = []
    for tail in tails:
        plain = [head] + [tail] * (HEAD_DIM - 1)
        negative = [head] + [tail ^ SIGN] * (HEAD_DIM - 1)
        alternating = [head] + [tail if place % 2 else tail ^ SIGN for place in range(1, HEAD_DIM)]
        sides += [plain, negative, alternating]
        for step in range(1, STEPS):
            later = [tail] * HEAD_DIM
            later[step * STEP_TERMS] = head
            sides.append(later)
    return sides, [list(side) for side in sides]
