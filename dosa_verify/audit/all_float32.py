"""The cast to E4M3FN over all 4,294,967,296 float32 bit patterns: a reference in integers, compared on the device.

The reference here works on bit patterns in torch and shares nothing with ``dosa_ref.formats``; the tests compare the
two. Chunks of patterns are compared on the device, and only the ends of runs of disagreeing inputs come back.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

PATTERNS = 2**32
CHUNK = 2**26
LISTED = 256
"""Runs listed one by one per implementation and class; the rest becomes one record, with its full count."""

KINDS = ("unexplained", "overflow", "infinity", "nan_bits")

_AGREE = -1
_INF = 0x7F800000
_OVERFLOW_ABOVE = 0x43E80000
"""Bits of 464, the tie that still goes to 448."""
_MAX_CODE, _NAN_CODE, _SIGN = 0x7E, 0x7F, 0x80


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Cast:
    """A cast to E4M3FN on the device.

    Attributes:
        name: who does it.
        cast: float32 ``[n]`` to uint8 codes ``[n]``, both on the device.
    """

    name: str
    cast: Callable[[torch.Tensor], torch.Tensor]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Neighbouring bit patterns on which a cast gives the same other code than the reference.

    Attributes:
        kind: one of `KINDS`.
        first, last: bit patterns.
        count: patterns that disagree; less than ``last - first + 1`` only in a record of many runs.
        reference, got: codes at the first pattern.
    """

    kind: str
    first: int
    last: int
    count: int
    reference: int
    got: int


def encode(bits: torch.Tensor) -> torch.Tensor:
    """Codes of float32 bit patterns: round to nearest even, saturating, NaN to the NaN of its sign.

    Args:
        bits: int32 bit patterns.

    Returns:
        int32 codes.

    Exactness: exact, in integers.
    """
    import torch

    magnitude = bits & 0x7FFFFFFF
    # Normal results: the exponent field and three fraction bits, rounded in place; a carry moves on by itself.
    even = (magnitude >> 20) & 1
    normal = ((magnitude + 0x7FFFF + even) >> 20) - (120 << 3)
    # Subnormal results are multiples of 2^-9.
    field = magnitude >> 23
    significand = (magnitude & 0x7FFFFF) | 0x800000
    shift = (141 - field).clamp(21, 30)
    kept = significand >> shift
    one = torch.ones_like(shift)
    half = torch.bitwise_left_shift(one, shift - 1)
    small = (significand + (half - 1) + (kept & 1)) >> shift
    code = torch.where(field >= 121, normal, torch.where(field == 0, torch.zeros_like(small), small))
    code = torch.where(magnitude > _INF, torch.full_like(code, _NAN_CODE), code.clamp(max=_MAX_CODE))
    return torch.where(bits < 0, code | _SIGN, code)


def _kinds(bits: torch.Tensor, reference: torch.Tensor, got: torch.Tensor) -> torch.Tensor:
    """Place in `KINDS` of each disagreement; every class predicts the other answer exactly."""
    import torch

    magnitude, sign = bits & 0x7FFFFFFF, torch.where(bits < 0, _SIGN, 0)
    saturated = (reference == (sign | _MAX_CODE)) & (got == (sign | _NAN_CODE))
    both_nan = ((reference & _NAN_CODE) == _NAN_CODE) & ((got & _NAN_CODE) == _NAN_CODE)
    kind = torch.where(saturated & (magnitude > _OVERFLOW_ABOVE) & (magnitude < _INF), 1, 0)
    kind = torch.where(saturated & (magnitude == _INF), 2, kind)
    return torch.where(both_nan, 3, kind)


def sweep(
    casts: Sequence[Cast],
    device: torch.device,
    *,
    start: int = 0,
    end: int = PATTERNS,
    chunk: int = CHUNK,
    on_chunk: Callable[[], None] | None = None,
) -> dict[str, list[Run]]:
    """Compare casts with the reference on a range of bit patterns.

    Args:
        casts: what is compared.
        device: where.
        start, end: patterns, as unsigned integers, half-open.
        chunk: patterns at a time.
        on_chunk: called after each chunk.

    Returns:
        Per cast its runs in ascending order, the first `LISTED` of each class one by one.
    """
    import torch

    found: dict[str, _Collector] = {cast.name: _Collector() for cast in casts}
    for first in range(start, end, chunk):
        last = min(first + chunk, end)
        patterns = torch.arange(first, last, dtype=torch.int64, device=device)
        bits = torch.where(patterns >= 2**31, patterns - 2**32, patterns).to(torch.int32)
        del patterns
        reference = encode(bits)
        for cast in casts:
            got = cast.cast(bits.view(torch.float32)).int()
            keys = reference | (got << 8) | (_kinds(bits, reference, got) << 16)
            keys = torch.where(got == reference, torch.full_like(keys, _AGREE), keys)
            edges = (torch.nonzero(keys[1:] != keys[:-1]).ravel() + 1).tolist()
            values = keys[torch.tensor([0, *edges], device=device)].tolist()
            for begin, stop, key in zip([0, *edges], [*edges, last - first], values, strict=True):
                if key != _AGREE:
                    found[cast.name].add(first + begin, first + stop - 1, key)
        if on_chunk is not None:
            on_chunk()
    return {name: collector.runs() for name, collector in found.items()}


class _Collector:
    """Joins runs across chunks and keeps the list short without losing a count."""

    def __init__(self) -> None:
        self._open: tuple[int, int, int] | None = None
        self._runs: list[Run] = []
        self._listed = dict.fromkeys(KINDS, 0)
        self._rest: dict[str, Run] = {}

    def add(self, first: int, last: int, key: int) -> None:
        if self._open is not None and self._open[1] + 1 == first and self._open[2] == key:
            self._open = (self._open[0], last, key)
            return
        self._close()
        self._open = (first, last, key)

    def _close(self) -> None:
        if self._open is None:
            return
        first, last, key = self._open
        kind = KINDS[key >> 16]
        run = Run(kind=kind, first=first, last=last, count=last - first + 1, reference=key & 255, got=(key >> 8) & 255)
        self._open = None
        if self._listed[kind] < LISTED:
            self._listed[kind] += 1
            self._runs.append(run)
        elif kind in self._rest:
            rest = self._rest[kind]
            self._rest[kind] = dataclasses.replace(rest, last=last, count=rest.count + run.count)
        else:
            self._rest[kind] = run

    def runs(self) -> list[Run]:
        self._close()
        return [*self._runs, *self._rest.values()]
