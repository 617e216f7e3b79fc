"""Fuzz cases: a small descriptor, and the arrays that it stands for.

A descriptor is a handful of enums and numbers. It can be drawn, shrunk, printed and stored; `build` turns it into a
`PrefillProblem` with NumPy, always the same one. What each enum member is there for stands beside it.
"""

from __future__ import annotations

import dataclasses
import enum
import json

import ml_dtypes
import numpy as np
import numpy.typing as npt

from dosa_ref.problem import PrefillProblem
from dosa_ref.spec import HEAD_DIM, InvalidProblem

FP8 = np.dtype(ml_dtypes.float8_e4m3fn)
Codes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int32]

NAN_CODE = 0x7F
FINITE_MAGNITUDES = 0x7F
"""Codes 0x00 to 0x7e are the finite magnitudes."""


class Values(enum.Enum):
    """What queries and keys are made of. Ordered from plain to nasty: shrinking goes to the front."""

    NORMAL = "normal"
    """Independent normal numbers: nearly everything survives the bound."""
    LEARNED = "learned"
    """Heads of low rank and keys around a mean direction, like a trained indexer: most keys are pruned."""
    FEW_KEYS = "few_keys"
    """A handful of distinct keys, repeated: ties everywhere, also across place K."""
    NEAR_EQUAL = "near_equal"
    """One key everywhere, with a last bit flipped here and there: scores a rounding apart."""
    ZERO_FLOOD = "zero_flood"
    """Nearly all dots negative: scores of exactly zero, a tie decided by index."""
    CONSTANT = "constant"
    """All keys equal: one tie over the whole row."""
    WIDE = "wide"
    """Every finite FP8 pattern equally likely: cancellation and lost terms in the accumulator."""
    SUBNORMAL = "subnormal"
    """Subnormal FP8 values and zeros of both signs only."""


class Weights(enum.Enum):
    """The head weights."""

    MIXED = "mixed"
    POSITIVE = "positive"
    NEGATIVE = "negative"
    """No positive head: ``tau <= 0`` in every row."""
    ZERO = "zero"
    """Zeros of both signs: every score is zero."""
    TINY = "tiny"
    """Subnormal float32 weights: underflow in the head chain."""
    HUGE = "huge"
    """Around 2^100: scores overflow to Inf, the bound must not be trusted."""


class Scales(enum.Enum):
    """The key scales."""

    ONE = "one"
    POWERS = "powers"
    """Powers of two as in production."""
    FLOATS = "floats"
    """Any positive float32 of moderate size."""
    EXTREME = "extreme"
    """From subnormal to 2^60: some are outside the range in which the bound is proved."""


class Windows(enum.Enum):
    """The visible keys of each row."""

    FULL = "full"
    CAUSAL = "causal"
    """Row i sees all but the last ``rows - 1 - i`` keys."""
    RAGGED = "ragged"
    """Independent starts and ends, none aligned to any block."""
    SHORT = "short"
    """Lengths around the edges: 0, 1, K - 1, K, K + 1, 2 K."""
    INVERTED = "inverted"
    """Every second row ends before it starts, and so is empty."""


class Hints(enum.Enum):
    """What the target is told about likely winners; the selection must not depend on it."""

    NONE = "none"
    LIKELY = "likely"
    """The best keys of one row by its plain float32 scores, as a preceding query's winners would be."""
    RANDOM = "random"
    """Any keys, some twice."""
    ONE = "one"
    """One key, many times."""
    OUTSIDE = "outside"
    """Columns below 0 and beyond the last key, the ends of int32 among them, and a few keys."""


class Special(enum.Enum):
    """Values that do not fit the happy path, planted into a few places."""

    NAN_KEY = "nan_key"
    NAN_SCALE = "nan_scale"
    INF_SCALE = "inf_scale"
    ZERO_SCALE = "zero_scale"
    NEGATIVE_SCALE = "negative_scale"
    NAN_QUERY = "nan_query"
    NAN_WEIGHT = "nan_weight"
    INF_WEIGHT = "inf_weight"
    SIGNED_ZERO = "signed_zero"
    """Keys of zeros with random signs."""
    POISON = "poison"
    """NaN keys and Inf scales wherever no row looks."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Descriptor of one fuzz case.

    Attributes:
        seed: seed of everything random in `build`.
        num_heads: 32 or 64.
        rows: queries, 0 or more.
        keys: keys, 0 or more.
        topk: keys to select.
        values: queries and keys.
        weights: head weights.
        scales: key scales.
        windows: visible keys.
        specials: planted special values.
        strided: hand the target tensors that are not contiguous.
        columns: dot columns of the bound pass.
        survivor_capacity: entries of the survivor buffer, small enough to overflow, or None.
        tight_workspace: allow no more memory than is needed.
        hints: what is said about likely winners.
    """

    seed: int = 0
    num_heads: int = 32
    rows: int = 1
    keys: int = 1
    topk: int = 1
    values: Values = Values.NORMAL
    weights: Weights = Weights.MIXED
    scales: Scales = Scales.ONE
    windows: Windows = Windows.FULL
    specials: tuple[Special, ...] = ()
    strided: bool = False
    columns: int = 8
    survivor_capacity: int | None = None
    tight_workspace: bool = False
    hints: Hints = Hints.NONE

    def to_json(self) -> dict[str, object]:
        """Return the descriptor as plain JSON values."""
        plain: dict[str, object] = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, enum.Enum):
                value = value.value
            elif isinstance(value, tuple):
                value = [item.value for item in value]
            plain[field.name] = value
        return plain

    def describe(self) -> str:
        """Return the descriptor as one line of JSON."""
        return json.dumps(self.to_json(), sort_keys=True)


def case_from_json(plain: object) -> Case:
    """Return the descriptor that `Case.to_json` wrote.

    Args:
        plain: what was read from a file; not trusted.

    Raises:
        InvalidProblem: a field is unknown, missing or of the wrong kind.
    """
    if not isinstance(plain, dict):
        raise InvalidProblem("case", type(plain).__name__, "a JSON object")
    kinds: dict[str, type[enum.Enum]] = {
        "values": Values,
        "weights": Weights,
        "scales": Scales,
        "windows": Windows,
        "hints": Hints,
    }
    known = {field.name for field in dataclasses.fields(Case)}
    fields: dict[str, object] = {}
    for name, value in plain.items():
        try:
            if name not in known:
                raise InvalidProblem(f"case.{name}", value, f"one of {', '.join(sorted(known))}")
            if name in kinds:
                fields[name] = kinds[name](value)
            elif name == "specials":
                fields[name] = tuple(Special(item) for item in value)
            elif name in ("strided", "tight_workspace"):
                fields[name] = bool(value)
            else:
                fields[name] = None if value is None else int(value)
        except (TypeError, ValueError) as error:
            if isinstance(error, InvalidProblem):
                raise
            raise InvalidProblem(f"case.{name}", repr(value), "a value that a case descriptor can have") from error
    return Case(**fields)  # type: ignore[arg-type]


def build(case: Case) -> PrefillProblem:
    """Return the problem that a descriptor stands for.

    Args:
        case: the descriptor.

    Returns:
        A valid problem; the same descriptor always gives the same bits.

    Exactness: exact; NumPy's PCG64 and ml_dtypes' cast of clamped numbers are the only sources of bits.
    """
    random = np.random.Generator(np.random.PCG64(case.seed))
    q, k = _values(case, random)
    weights = _weights(case, random)
    k_scale = _scales(case, random)
    ks, ke = draw_windows(case, random)
    for special in case.specials:
        _plant(special, random, q=q, k=k, k_scale=k_scale, weights=weights, ks=ks, ke=ke)
    return PrefillProblem(
        q=q.view(FP8),
        k=k.view(FP8),
        k_scale=k_scale,
        weights=weights,
        cu_seqlen_ks=ks,
        cu_seqlen_ke=ke,
        topk=case.topk,
    )


def _encode(values: npt.NDArray[np.float64]) -> Codes:
    return np.clip(values, -448.0, 448.0).astype(np.float32).astype(FP8).view(np.uint8)


def _values(case: Case, random: np.random.Generator) -> tuple[Codes, Codes]:
    """Codes of the queries ``[rows, num_heads, 128]`` and the keys ``[keys, 128]``."""
    q_shape = (case.rows, case.num_heads, HEAD_DIM)
    k_shape = (case.keys, HEAD_DIM)
    match case.values:
        case Values.NORMAL:
            return _encode(random.normal(0, 16, q_shape)), _encode(random.normal(0, 16, k_shape))
        case Values.LEARNED:
            # Three directions carry the heads, a fourth is common to all keys; key norms spread over a decade.
            # Matrix products of multiples of 1/16 are exact, so that every BLAS builds the same case.
            basis = _sixteenths(random, (3, HEAD_DIM))
            common = random.normal(0, 1, HEAD_DIM)
            heads = _sixteenths(random, (case.num_heads, 3)) @ basis
            spread = np.ldexp(1.0, np.rint(random.normal(0, 1, (case.keys, 1))).astype(np.int64))
            parts = _sixteenths(random, (case.keys, 3)) @ basis
            noise_q, noise_k = random.normal(0, 1, q_shape), random.normal(0, 1, k_shape)
            return _encode(20 * heads + noise_q), _encode(12 * common + 16 * spread * parts + 2 * noise_k)
        case Values.FEW_KEYS:
            pool = _encode(random.normal(0, 16, (5, HEAD_DIM)))
            return _encode(random.normal(0, 16, q_shape)), pool[random.integers(0, 5, case.keys)]
        case Values.NEAR_EQUAL:
            same: Codes = np.broadcast_to(_encode(random.normal(0, 16, (1, HEAD_DIM))), k_shape)
            flips = (random.random(k_shape) < 0.01) & ((same & 0x7F) < FINITE_MAGNITUDES - 1)
            return _encode(random.normal(0, 16, q_shape)), same ^ flips.astype(np.uint8)
        case Values.ZERO_FLOOD:
            positive = _encode(np.abs(random.normal(0, 16, q_shape)))
            sign = np.where(random.random((case.keys, 1)) < 0.05, 1.0, -1.0)
            return positive, _encode(sign * np.abs(random.normal(0, 16, k_shape)))
        case Values.CONSTANT:
            return _encode(random.normal(0, 16, q_shape)), np.tile(
                _encode(random.normal(0, 16, (1, HEAD_DIM))), (case.keys, 1)
            )
        case Values.WIDE:
            return _patterns(random, q_shape, FINITE_MAGNITUDES), _patterns(random, k_shape, FINITE_MAGNITUDES)
        case Values.SUBNORMAL:
            return _patterns(random, q_shape, 8), _patterns(random, k_shape, 8)


def _sixteenths(random: np.random.Generator, shape: tuple[int, ...]) -> npt.NDArray[np.float64]:
    """Standard normal numbers rounded to multiples of 1/16."""
    return np.rint(random.normal(0, 16, shape)) / 16


def _patterns(random: np.random.Generator, shape: tuple[int, ...], magnitudes: int) -> Codes:
    """Codes below ``magnitudes`` with random signs."""
    magnitude = random.integers(0, magnitudes, shape, dtype=np.uint8)
    sign = random.integers(0, 2, shape, dtype=np.uint8)
    return (magnitude | (sign << 7)).astype(np.uint8)


def _weights(case: Case, random: np.random.Generator) -> Floats:
    shape = (case.rows, case.num_heads)
    normal = random.normal(0, 0.02, shape)
    match case.weights:
        case Weights.MIXED:
            return normal.astype(np.float32)
        case Weights.POSITIVE:
            return np.abs(normal).astype(np.float32)
        case Weights.NEGATIVE:
            return (-np.abs(normal)).astype(np.float32)
        case Weights.ZERO:
            return np.copysign(0.0, normal).astype(np.float32)
        case Weights.TINY:
            return (normal * 2.0**-125).astype(np.float32)
        case Weights.HUGE:
            return (normal * 2.0**106).astype(np.float32)


def _scales(case: Case, random: np.random.Generator) -> Floats:
    match case.scales:
        case Scales.ONE:
            return np.ones(case.keys, np.float32)
        case Scales.POWERS:
            return np.exp2(random.integers(-8, 3, case.keys)).astype(np.float32)
        case Scales.FLOATS:
            return np.exp2(random.uniform(-8, 3, case.keys)).astype(np.float32)
        case Scales.EXTREME:
            return np.exp2(random.uniform(-148, 60, case.keys)).astype(np.float32)


def draw_windows(case: Case, random: np.random.Generator) -> tuple[Ints, Ints]:
    """Return a start and an end per row, int32, for a case's ``rows``, ``keys``, ``topk`` and ``windows``."""
    match case.windows:
        case Windows.FULL:
            ks = np.zeros(case.rows, np.int64)
            ke = np.full(case.rows, case.keys)
        case Windows.CAUSAL:
            ks = np.zeros(case.rows, np.int64)
            ke = np.maximum(case.keys - np.arange(case.rows - 1, -1, -1), 0)
        case Windows.RAGGED:
            ends = np.sort(random.integers(0, case.keys + 1, (case.rows, 2)), axis=1)
            ks, ke = ends[:, 0], ends[:, 1]
        case Windows.SHORT:
            lengths = np.array([0, 1, case.topk - 1, case.topk, case.topk + 1, 2 * case.topk])
            length = np.clip(lengths[np.arange(case.rows) % len(lengths)], 0, case.keys)
            ks = random.integers(0, case.keys - length + 1)
            ke = ks + length
        case Windows.INVERTED:
            ends = np.sort(random.integers(0, case.keys + 1, (case.rows, 2)), axis=1)
            ends[::2] = ends[::2, ::-1].copy()
            ks, ke = ends[:, 0], ends[:, 1]
    return np.asarray(ks, np.int32).reshape(case.rows), np.asarray(ke, np.int32).reshape(case.rows)


def _plant(
    special: Special,
    random: np.random.Generator,
    *,
    q: Codes,
    k: Codes,
    k_scale: Floats,
    weights: Floats,
    ks: Ints,
    ke: Ints,
) -> None:
    """Write one kind of special value into the arrays."""
    keys, rows = len(k), len(q)
    some_keys = random.random(keys) < 0.05
    if keys:
        some_keys[random.integers(keys)] = True
    row = int(random.integers(rows)) if rows else 0
    head = int(random.integers(q.shape[1]))
    sign = np.uint8(0x80 if random.random() < 0.5 else 0)
    match special:
        case Special.NAN_KEY:
            k[some_keys, random.integers(HEAD_DIM)] = NAN_CODE | sign
        case Special.NAN_SCALE:
            k_scale[some_keys] = np.nan
        case Special.INF_SCALE:
            k_scale[some_keys] = np.inf
        case Special.ZERO_SCALE:
            k_scale[some_keys] = 0.0
        case Special.NEGATIVE_SCALE:
            k_scale[some_keys] *= -1.0
        case Special.NAN_QUERY:
            q[row : row + 1, head, random.integers(HEAD_DIM)] = NAN_CODE | sign
        case Special.NAN_WEIGHT:
            weights[row : row + 1, head] = np.nan
        case Special.INF_WEIGHT:
            weights[row : row + 1, head] = -np.inf if sign else np.inf
        case Special.SIGNED_ZERO:
            k[some_keys] = _patterns(random, (int(some_keys.sum()), HEAD_DIM), 1)
        case Special.POISON:
            visible = np.zeros(keys, bool)
            for start, end in zip(ks, ke, strict=True):
                visible[start:end] = True
            k[~visible] = NAN_CODE
            k_scale[~visible] = np.inf


def draw_hints(kind: Hints, problem: PrefillProblem, seed: int) -> tuple[int, ...] | None:
    """Return key columns for a target's hint.

    Args:
        kind: how right they are.
        problem: what the hint is about.
        seed: of the random ones.

    Exactness: heuristic; a hint may be anything.
    """
    random = np.random.Generator(np.random.PCG64(seed))
    keys = problem.seq_len_kv
    count = min(keys, 2 * problem.topk)
    match kind:
        case Hints.NONE:
            return None
        case Hints.LIKELY:
            if problem.seq_len == 0:
                return ()
            with np.errstate(all="ignore"):
                dots = problem.q[0].astype(np.float32) @ problem.k.astype(np.float32).T
                score = problem.k_scale * (problem.weights[0] @ np.maximum(dots, 0))
            return tuple(np.argsort(-score, kind="stable")[:count].tolist())
        case Hints.RANDOM:
            return tuple(random.integers(0, keys, count).tolist()) if keys else ()
        case Hints.ONE:
            return (keys // 2,) * count
        case Hints.OUTSIDE:
            ends = (-1, keys, keys + 1, -(2**31), 2**31 - 1)
            return (*ends, *range(min(keys, 3)), *ends)
