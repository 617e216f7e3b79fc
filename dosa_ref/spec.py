"""Names, constants and errors that every room of the project shares.

This is a leaf module: it imports nothing but the standard library, so the kernels, the proofs and
the reference can all read it without sharing any arithmetic. A constant that stands in a proof is
listed in ``GUARD_CONSTANTS``; the ledger records the value that was proved and the gate compares.
"""

from __future__ import annotations

import enum
from fractions import Fraction
from typing import Final

PAD_INDEX: Final = -1
"""Index written behind the last selected key of a row."""

HEAD_DIM: Final = 128
"""Size of one indexer head, in elements."""

SM90_NUM_HEADS: Final = (32, 64)
"""Head counts for which the contract ``sm90`` is defined."""

GPU_MAX_TOPK: Final = 2048
"""Largest ``topk`` that the GPU path serves; the reference serves any."""

E4M3_MAX: Final = 448
"""Largest finite E4M3FN value."""

E4M3_MIN_NORMAL: Final = Fraction(1, 2**6)
"""Smallest normal E4M3FN value; subnormals take part in the alignment of a dot with its exponent."""

E4M3_MIN_SUBNORMAL: Final = Fraction(1, 2**9)
"""Smallest positive E4M3FN value."""

STEP_TERMS: Final = 32
"""Products that one FP8 tensor-core step adds."""

STEPS: Final = HEAD_DIM // STEP_TERMS
"""Steps of one dot product, chained through the accumulator."""

FRACTION_BITS: Final = 13
"""Fraction bits that the aligned sum and the accumulator keep; lower bits are cut towards zero."""

FIRST_STEP_LOSSY: Final = 31
"""Terms of the first step that alignment can cut: the largest product loses nothing."""

STEP_LOSSY: Final = 32
"""Terms of a later step that alignment can cut: 32 products and the accumulator, less the largest."""

FLOAT32_UNIT: Final = Fraction(1, 2**24)
"""Unit roundoff of float32, round to nearest."""

HEAD_CHAIN_ULPS: Final = 16
"""Error of the head combination, in units of ``FLOAT32_UNIT * sum |w_h| relu(dot_h)``; 12 roundings at most."""

MAX_COLUMNS: Final = 64
"""Largest number of dot columns per query in the bound pass."""

BOUND_CHAIN_ULPS: Final = 80
"""Error of the computed bound, in units of ``FLOAT32_UNIT`` times its absolute sum; ``MAX_COLUMNS`` + 4 roundings."""

FLOAT64_SLACK_LOG2: Final = -40
"""log2 of the slack, relative to the absolute sum, that covers float64 rounding on the query side."""

OUTWARD_LOG2: Final = -20
"""``x * (1 + 2**OUTWARD_LOG2)`` in float32 absorbs 15 roundings of a normal, non-negative ``x``."""

NORM_OUTWARD_LOG2: Final = -16
"""A float32 key norm is multiplied by ``1 + 2**NORM_OUTWARD_LOG2``: covers the rounding of 128 squares and the root."""

SLACK_FLOOR_LOG2: Final = -70
"""log2 of what is added to every row's slack: covers underflow in the head chain and in the bound."""

KEY_SCALE_LOG2_MIN: Final = -40
KEY_SCALE_LOG2_MAX: Final = 40
"""A key whose scale is outside ``2**MIN .. 2**MAX`` always survives the bound pass."""

ROW_MAGNITUDE_LOG2_MAX: Final = 60
"""A row whose absolute sums exceed ``2**MAX`` takes the dense path: nothing may overflow in the bound."""

GUARD_CONSTANTS: Final[dict[str, str]] = {
    "HEAD_DIM": str(HEAD_DIM),
    "E4M3_MAX": str(E4M3_MAX),
    "E4M3_MIN_NORMAL": str(E4M3_MIN_NORMAL),
    "E4M3_MIN_SUBNORMAL": str(E4M3_MIN_SUBNORMAL),
    "STEP_TERMS": str(STEP_TERMS),
    "STEPS": str(STEPS),
    "FRACTION_BITS": str(FRACTION_BITS),
    "FIRST_STEP_LOSSY": str(FIRST_STEP_LOSSY),
    "STEP_LOSSY": str(STEP_LOSSY),
    "FLOAT32_UNIT": str(FLOAT32_UNIT),
    "HEAD_CHAIN_ULPS": str(HEAD_CHAIN_ULPS),
    "MAX_COLUMNS": str(MAX_COLUMNS),
    "BOUND_CHAIN_ULPS": str(BOUND_CHAIN_ULPS),
    "FLOAT64_SLACK_LOG2": str(FLOAT64_SLACK_LOG2),
    "OUTWARD_LOG2": str(OUTWARD_LOG2),
    "NORM_OUTWARD_LOG2": str(NORM_OUTWARD_LOG2),
    "SLACK_FLOOR_LOG2": str(SLACK_FLOOR_LOG2),
    "KEY_SCALE_LOG2_MIN": str(KEY_SCALE_LOG2_MIN),
    "KEY_SCALE_LOG2_MAX": str(KEY_SCALE_LOG2_MAX),
    "ROW_MAGNITUDE_LOG2_MAX": str(ROW_MAGNITUDE_LOG2_MAX),
}
"""Constants that lemmas use, as exact decimal or rational text. The gate compares them with the ledger."""


class TieBreak(enum.Enum):
    """Order among equal scores."""

    SMALL_INDEX = "small_index"
    """The smaller key index wins: the shared tie-break of this repository."""


class Contract(enum.Enum):
    """Whose arithmetic defines "the score"."""

    EXACT = "exact"
    """Real numbers: the score is an exact rational."""
    SM90 = "sm90"
    """FP8 wgmma on Hopper with the head order of DeepGEMM ``fp8_mqa_logits``."""


class Mode(enum.Enum):
    """Which of the two savings of the prefill path are on. All four select the same keys."""

    BASE = "base"
    PRUNE = "prune"
    EMIT = "emit"
    BOTH = "both"


class Fallback(enum.Enum):
    """Why a row did not go through the bound pass, or not all the way."""

    SHORT_ROW = "short_row"
    """At most ``topk`` visible keys: all are scored, no bound is needed."""
    NON_FINITE_ROW = "non_finite_row"
    """NaN or Inf in the query, its weights or its bound constants."""
    ROW_MAGNITUDE = "row_magnitude"
    """The row's absolute sums are so large that the bound could overflow."""
    TOO_FEW_SEEDS = "too_few_seeds"
    """Fewer than ``topk`` distinct seeds with a score that is not NaN."""
    SURVIVOR_OVERFLOW = "survivor_overflow"
    """More survivors or emitted keys than the buffers hold: the row (in the reference, the chunk) was scored again."""
    GUESS_TOO_HIGH = "guess_too_high"
    """Fewer than ``topk`` keys reach the threshold that was guessed from a sample: the row was scored densely."""
    SLACK_BOUND = "slack_bound"
    """Automatic path only: the rows before this one had most of their keys rescored, so this one was scored densely."""
    THRESHOLD_NOT_MET = "threshold_not_met"
    """Too few keys were found at a ``tau`` that K keys do reach: an internal fault. The row was scored again."""


class Outcome(enum.Enum):
    """Verdict of a check of one selection."""

    EXACT = "exact"
    TIE_EQUIVALENT = "tie_equivalent"
    WRONG_SET = "wrong_set"
    WRONG_ORDER = "wrong_order"
    INVALID_INDEX = "invalid_index"
    NONDETERMINISTIC = "nondeterministic"
    UNDECIDED = "undecided"


class DosaError(Exception):
    """Base of every error that this project raises on purpose."""


class InvalidProblem(DosaError, ValueError):
    """An input is outside the contract. The message names the field, what came and what was expected."""

    def __init__(self, field: str, got: object, expected: str) -> None:
        super().__init__(f"{field}: got {got}, expected {expected}")
        self.field = field


class UnsupportedConfiguration(DosaError):
    """A valid problem that this path or machine does not serve."""


class BackendUnavailable(DosaError):
    """A library or device that was asked for is not here."""


class UnprovedBound(DosaError):
    """The pruned path was refused: a lemma that it rests on does not hold for this code."""

    def __init__(self, lemma: str, reason: str) -> None:
        super().__init__(f"lemma {lemma}: {reason}")
        self.lemma = lemma


class SolverUnknown(DosaError):
    """A solver gave up; nothing was decided."""
