"""Cases for top-K kernels alone: descriptors of score rows, their arrays, Hypothesis strategies, and the lift to FP8.

Public: use `logits_cases` and `build` in your own tests. A descriptor always gives the same bits.
"""

from __future__ import annotations

import dataclasses
import enum
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from dosa_ref.problem import PrefillProblem
from dosa_ref.spec import HEAD_DIM, SM90_NUM_HEADS, InvalidProblem
from dosa_ref.trace import LogitsProblem

if TYPE_CHECKING:
    from hypothesis import strategies as st

Floats = npt.NDArray[np.float32]

POISON_SCORE = np.float32(1e9)
"""Stands wherever no row looks; with a NaN in every second place."""
PAD = 5
"""Columns behind a strided row; odd, so that rows start unaligned."""
_FP8 = np.dtype(ml_dtypes.float8_e4m3fn)
_ONE, _MINUS_ONE = 0x38, 0xB8
"""E4M3 codes of 1 and -1."""


class Scores(enum.Enum):
    """What the rows are made of. Ordered from plain to nasty: shrinking goes to the front."""

    NORMAL = "normal"
    ASCENDING = "ascending"
    DESCENDING = "descending"
    CONSTANT = "constant"
    """One tie over the whole row."""
    FEW_VALUES = "few_values"
    """Four values: ties everywhere."""
    TIE_AT_K = "tie_at_k"
    """About half of ``topk`` distinct best keys, then one score at about ``topk`` places, then worse ones."""
    ZERO_FLOOD = "zero_flood"
    """Nine keys of ten score exactly zero, as ReLU makes them."""
    SIGNED_ZERO = "signed_zero"
    """Zeros of both signs, which tie, across place K, and a few other numbers."""
    EQUAL_10 = "equal_10"
    """Float32 numbers with equal leading 10 bits: one bin of a 10-bit histogram."""
    EQUAL_12 = "equal_12"
    EQUAL_22 = "equal_22"
    """Only the last ten bits differ."""
    HALF_BIN = "half_bin"
    """Distinct numbers that half precision cannot tell apart."""
    SUBNORMAL = "subnormal"
    BITS = "bits"
    """Every finite bit pattern equally likely: the whole range of float32."""


class RowWindows(enum.Enum):
    """The visible columns of each row."""

    FULL = "full"
    CAUSAL = "causal"
    RAGGED = "ragged"
    SHORT = "short"
    """Lengths 0, 1, K - 1, K, K + 1, 2 K."""


class Planted(enum.Enum):
    """Special scores in a few places."""

    PLUS_INF = "plus_inf"
    MINUS_INF = "minus_inf"
    NAN = "nan"
    """Of both signs and several payloads."""
    NAN_ROW = "nan_row"
    """A row without a number."""
    INF_FLOOD = "inf_flood"
    """Three scores of four are -Inf, as masks make them."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LogitsCase:
    """Descriptor of one case for a top-K kernel.

    Attributes:
        seed: seed of everything random in `build`.
        rows: rows, 0 or more.
        columns: columns, 0 or more.
        topk: columns to select.
        scores: what the rows are made of.
        windows: visible columns.
        planted: special scores.
        strided: leave a gap between rows.
    """

    seed: int = 0
    rows: int = 1
    columns: int = 1
    topk: int = 1
    scores: Scores = Scores.NORMAL
    windows: RowWindows = RowWindows.FULL
    planted: tuple[Planted, ...] = ()
    strided: bool = False

    def to_json(self) -> dict[str, object]:
        """Return the descriptor as plain JSON values."""
        plain = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {
            name: value.value
            if isinstance(value, enum.Enum)
            else [item.value for item in value]
            if isinstance(value, tuple)
            else value
            for name, value in plain.items()
        }

    def describe(self) -> str:
        """Return the descriptor as one line of JSON."""
        return json.dumps(self.to_json(), sort_keys=True)


def build(case: LogitsCase) -> LogitsProblem:
    """Return the score rows that a descriptor stands for; what no row sees is poison.

    Exactness: exact; the same descriptor always gives the same bits.
    """
    random = np.random.Generator(np.random.PCG64(case.seed))
    pitch = case.columns + (PAD if case.strided else 0)
    buffer = np.full((case.rows, pitch), POISON_SCORE, np.float32)
    buffer[:, 1::2] = np.nan
    start, end = _windows(case, random)
    for row in range(case.rows):
        scores = _scores(case, random)
        for kind in case.planted:
            _plant(kind, random, scores, row)
        visible = slice(int(start[row]), max(int(start[row]), int(end[row])))
        buffer[row, visible] = scores[visible]
    return LogitsProblem(logits=buffer[:, : case.columns], row_start=start, row_end=end, topk=case.topk)


def _scores(case: LogitsCase, random: np.random.Generator) -> Floats:
    n, topk = case.columns, case.topk
    match case.scores:
        case Scores.NORMAL:
            return random.normal(0, 1, n).astype(np.float32)
        case Scores.ASCENDING:
            return np.arange(n, dtype=np.float32) - np.float32(n // 2)
        case Scores.DESCENDING:
            return np.float32(n // 2) - np.arange(n, dtype=np.float32)
        case Scores.CONSTANT:
            return np.full(n, random.normal(), np.float32)
        case Scores.FEW_VALUES:
            return np.array([-1.5, 0.0, 0.25, 2.0], np.float32)[random.integers(0, 4, n)]
        case Scores.TIE_AT_K:
            scores = -1 - np.abs(random.normal(0, 1, n)).astype(np.float32)
            place = random.permutation(n)
            best = min(n, topk // 2)
            scores[place[:best]] = 1 + np.arange(best, dtype=np.float32)
            scores[place[best : best + topk + 1]] = 0.5
            return scores
        case Scores.ZERO_FLOOD:
            values = random.normal(0, 1, n)
            return np.where(random.random(n) < 0.9, 0.0, values).astype(np.float32)
        case Scores.SIGNED_ZERO:
            scores = np.array([-0.0, 0.0, -0.0, 0.0, -1.0], np.float32)[random.integers(0, 5, n)]
            scores[random.permutation(n)[: topk // 2]] = 1
            return scores
        case Scores.EQUAL_10:
            return _low_bits(random, n, 22)
        case Scores.EQUAL_12:
            return _low_bits(random, n, 20)
        case Scores.EQUAL_22:
            return _low_bits(random, n, 10)
        case Scores.HALF_BIN:
            return (1 + random.permutation(n) * 2.0**-20).astype(np.float32)
        case Scores.SUBNORMAL:
            bits = random.integers(0, 2**23, n).astype(np.uint32) | (random.integers(0, 2, n).astype(np.uint32) << 31)
            return bits.view(np.float32)
        case Scores.BITS:
            bits = random.integers(0, 0x7F800000, n).astype(np.uint32)
            return (bits | (random.integers(0, 2, n).astype(np.uint32) << 31)).view(np.float32)


def _low_bits(random: np.random.Generator, n: int, free: int) -> Floats:
    """Numbers near 2.5 (or -2.5) of which only the ``free`` lowest bits differ."""
    base = 0x40200000 if random.random() < 0.7 else 0xC0200000
    base = base >> free << free
    return (np.uint32(base) | random.integers(0, 2**free, n).astype(np.uint32)).view(np.float32)


def _windows(case: LogitsCase, random: np.random.Generator) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    rows, n = case.rows, case.columns
    match case.windows:
        case RowWindows.FULL:
            start, end = np.zeros(rows, np.int64), np.full(rows, n)
        case RowWindows.CAUSAL:
            start, end = np.zeros(rows, np.int64), np.maximum(n - np.arange(rows - 1, -1, -1), 0)
        case RowWindows.RAGGED:
            ends = np.sort(random.integers(0, n + 1, (rows, 2)), axis=1)
            start, end = ends[:, 0], ends[:, 1]
        case RowWindows.SHORT:
            lengths = np.array([0, 1, case.topk - 1, case.topk, case.topk + 1, 2 * case.topk])
            length = np.clip(lengths[np.arange(rows) % 6], 0, n)
            start = random.integers(0, n - length + 1)
            end = start + length
    return np.asarray(start, np.int32).reshape(rows), np.asarray(end, np.int32).reshape(rows)


def _plant(kind: Planted, random: np.random.Generator, scores: Floats, row: int) -> None:
    n = len(scores)
    some = random.random(n) < 0.1
    if n:
        some[random.integers(n)] = True
    payloads = np.array([0x7FC00000, 0xFFC00000, 0x7F800001, 0xFFFFFFFF], np.uint32).view(np.float32)
    match kind:
        case Planted.PLUS_INF:
            scores[some] = np.inf
        case Planted.MINUS_INF:
            scores[some] = -np.inf
        case Planted.NAN:
            scores[some] = payloads[random.integers(0, 4, int(some.sum()))]
        case Planted.NAN_ROW:
            if row % 2 == 0:
                scores[:] = payloads[random.integers(0, 4, n)]
        case Planted.INF_FLOOD:
            scores[random.random(n) < 0.75] = -np.inf


def case_from_json(plain: object) -> LogitsCase:
    """Return the descriptor that `LogitsCase.to_json` wrote.

    Raises:
        InvalidProblem: a field is unknown or of the wrong kind.
    """
    if not isinstance(plain, dict):
        raise InvalidProblem("case", type(plain).__name__, "a JSON object")
    makers: dict[str, Any] = {
        "scores": Scores,
        "windows": RowWindows,
        "planted": lambda items: tuple(Planted(item) for item in items),
        "strided": bool,
        **dict.fromkeys(("seed", "rows", "columns", "topk"), int),
    }
    fields: dict[str, Any] = {}
    for name, value in plain.items():
        if name not in makers:
            raise InvalidProblem(f"case.{name}", value, f"one of {', '.join(makers)}")
        try:
            fields[name] = makers[name](value)
        except (TypeError, ValueError) as error:
            raise InvalidProblem(f"case.{name}", repr(value), "a value that a case descriptor can have") from error
    return LogitsCase(**fields)


def directed_cases(topk: int, *, long: tuple[int, ...] = ()) -> Iterator[LogitsCase]:
    """Yield one case for each thing that must not depend on luck.

    Args:
        topk: columns to select in most of them.
        long: lengths of long rows; each gets one of every kind of score.
    """
    n = 8 * topk + 13
    change = dataclasses.replace
    base = LogitsCase(seed=1, rows=2, columns=n, topk=topk)
    for scores in Scores:
        yield change(base, scores=scores)
    for windows in RowWindows:
        yield change(base, seed=2, rows=6, scores=Scores.FEW_VALUES, windows=windows, strided=True)
    # Rows that start aligned and end anywhere: a load of four reaches behind some of them.
    yield change(base, seed=11, rows=8, columns=8 * topk + 16, scores=Scores.FEW_VALUES, windows=RowWindows.RAGGED)
    for planted in Planted:
        yield change(base, seed=3, planted=(planted,))
    yield change(base, seed=4, planted=(Planted.PLUS_INF, Planted.MINUS_INF, Planted.NAN), windows=RowWindows.RAGGED)
    for columns in (0, 1, topk - 1, topk, topk + 1):
        yield change(base, seed=5, columns=max(columns, 0), scores=Scores.FEW_VALUES)
    yield change(base, seed=6, rows=0)
    # Longer than the candidate buffers and the tiles in use: everything in one coarse bin.
    yield change(base, seed=7, rows=1, columns=9001, scores=Scores.HALF_BIN)
    yield change(base, seed=8, rows=1, columns=9001, scores=Scores.EQUAL_22)
    for columns in long:
        for scores in Scores:
            yield change(base, seed=9, rows=1, columns=columns, scores=scores)
            yield change(base, seed=10, rows=2, columns=columns, scores=scores, windows=RowWindows.RAGGED)


def draw_cases(seed: int, count: int, *, min_topk: int = 1, max_topk: int = 64) -> Iterator[LogitsCase]:
    """Yield random cases without Hypothesis, which takes longer to draw one than a GPU to answer it.

    Args:
        seed: of the cases; the same ones always.
        count: how many.
        min_topk, max_topk: range of ``topk``.
    """
    random = np.random.default_rng(seed)
    for _ in range(count):
        topk = int(random.integers(min_topk, (max_topk if random.random() < 0.5 else min(max_topk, min_topk + 7)) + 1))
        # Mostly rows longer than topk, which every kernel serves; one in ten around it.
        columns = topk + int(random.integers(0, 700) if random.random() < 0.9 else random.integers(-1, 2))
        planted = random.permutation(len(Planted))[: random.choice([0, 1, 2], p=[0.7, 0.2, 0.1])]
        yield LogitsCase(
            seed=int(random.integers(2**31)),
            rows=int(random.integers(1, 6)),
            columns=columns,
            topk=topk,
            scores=list(Scores)[random.integers(len(Scores))],
            windows=RowWindows.FULL if random.random() < 0.6 else list(RowWindows)[random.integers(len(RowWindows))],
            planted=tuple(list(Planted)[place] for place in planted),
            strided=bool(random.random() < 0.5),
        )


def logits_cases(
    *, rows: int = 5, columns: int = 700, min_topk: int = 1, max_topk: int = 64
) -> st.SearchStrategy[LogitsCase]:
    """Hypothesis strategy for cases.

    Args:
        rows: most rows.
        columns: most columns.
        min_topk, max_topk: range of ``topk``.

    Returns:
        A strategy that shrinks to one row, one column, plain scores.
    """
    from hypothesis import strategies as st

    @st.composite
    def one(draw: st.DrawFn) -> LogitsCase:
        topk = draw(st.one_of(st.integers(min_topk, min(max_topk, min_topk + 7)), st.integers(min_topk, max_topk)))
        near = st.integers(-1, 1).map(lambda step: max(topk + step, 0))
        return LogitsCase(
            seed=draw(st.integers(0, 2**16 - 1)),
            rows=draw(st.integers(1, rows)),
            columns=draw(st.one_of(st.integers(0, columns), near)),
            topk=topk,
            scores=draw(st.sampled_from(Scores)),
            windows=draw(st.sampled_from(RowWindows)),
            planted=tuple(draw(st.lists(st.sampled_from(Planted), max_size=2, unique=True))),
            strided=draw(st.booleans()),
        )

    return one()


def lift(problem: LogitsProblem, num_heads: int = SM90_NUM_HEADS[0]) -> PrefillProblem:
    """Return FP8 inputs whose ``sm90`` scores are exactly the given score rows.

    Key ``j`` is the unit vector with the sign of its score, its scale the magnitude; head 0 sees it with weight 1, head
    1 sees its negation with weight -1, the other heads are zero. Each row gets keys of its own: row ``r`` column ``j``
    is key ``r * columns + j``.

    Args:
        problem: finite scores inside the windows.
        num_heads: 32 or 64.

    Returns:
        The problem. Its dots, products and sums are exact, so the scores come back bit by bit (-0.0 as +0.0).

    Raises:
        InvalidProblem: a visible score is NaN or Inf: these cannot be lifted.
    """
    rows, columns = problem.logits.shape
    column = np.arange(columns)
    visible = (column >= problem.row_start[:, None]) & (column < problem.row_end[:, None])
    if not np.isfinite(problem.logits[visible]).all():
        raise InvalidProblem("logits", "NaN or Inf", "finite scores, to be lifted to FP8")
    scores = np.where(visible, problem.logits, POISON_SCORE).reshape(-1)
    k = np.zeros((rows * columns, HEAD_DIM), np.uint8)
    k[scores > 0, 0] = _ONE
    k[scores < 0, 0] = _MINUS_ONE
    q = np.zeros((rows, num_heads, HEAD_DIM), np.uint8)
    q[:, 0, 0], q[:, 1, 0] = _ONE, _MINUS_ONE
    weights = np.zeros((rows, num_heads), np.float32)
    weights[:, 0], weights[:, 1] = 1, -1
    offset = np.arange(rows, dtype=np.int32) * np.int32(columns)
    return PrefillProblem(
        q=q.view(_FP8),
        k=k.view(_FP8),
        k_scale=np.where(scores == 0, np.float32(1), np.abs(scores)).astype(np.float32),
        weights=weights,
        cu_seqlen_ks=offset + problem.row_start,
        cu_seqlen_ke=offset + np.maximum(problem.row_end, problem.row_start),
        topk=problem.topk,
    )
