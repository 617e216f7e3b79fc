"""Hypothesis strategies for fuzz cases. Public: use them in your own tests of a selection kernel."""

from __future__ import annotations

import dataclasses

from hypothesis import strategies as st

from dosa_gpu.plan import SUPPORTED_COLUMNS
from dosa_ref.spec import SM90_NUM_HEADS
from dosa_verify.fuzz.cases import Case, Hints, Scales, Special, Values, Weights, Windows


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Sizes that a case may have.

    Attributes:
        rows: most queries.
        keys: most keys.
        topk: largest ``topk``.
        num_heads: head counts to draw from.
        columns: column counts to draw from.
        survivor_capacity: survivor buffers to draw from; small ones overflow.
    """

    rows: int = 6
    keys: int = 600
    topk: int = 64
    num_heads: tuple[int, ...] = (*SM90_NUM_HEADS, 20)
    columns: tuple[int, ...] = SUPPORTED_COLUMNS
    survivor_capacity: tuple[int | None, ...] = (None, 64, 128)


@st.composite
def cases(draw: st.DrawFn, limits: Limits = Limits()) -> Case:
    """Draw a case: sizes around each other's edges, one choice per kind of input, up to two planted specials.

    Args:
        draw: given by Hypothesis.
        limits: sizes that a case may have.

    Returns:
        A descriptor; `dosa_verify.fuzz.cases.build` makes the arrays. It shrinks to one row, one key, plain values.
    """
    # Small topk leaves room for pruning, large topk for ties across place K.
    topk = draw(st.one_of(st.integers(1, min(8, limits.topk)), st.integers(1, limits.topk)))
    keys = draw(st.one_of(st.integers(0, limits.keys), st.integers(-1, 1).map(lambda step: max(topk + step, 0))))
    return Case(
        seed=draw(st.integers(0, 2**16 - 1)),
        num_heads=draw(st.sampled_from(limits.num_heads)),
        rows=draw(st.integers(1, limits.rows)),
        keys=keys,
        topk=topk,
        values=draw(st.sampled_from(Values)),
        weights=draw(st.sampled_from(Weights)),
        scales=draw(st.sampled_from(Scales)),
        windows=draw(st.sampled_from(Windows)),
        specials=tuple(draw(st.lists(st.sampled_from(Special), max_size=2, unique=True))),
        strided=draw(st.booleans()),
        columns=draw(st.sampled_from(limits.columns)),
        survivor_capacity=draw(st.sampled_from(limits.survivor_capacity)),
        tight_workspace=draw(st.booleans()),
        hints=draw(st.sampled_from(Hints)),
    )
