"""The question that every target answers, and the shape of the answer."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from dosa_ref.problem import PrefillProblem


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """How a target is asked to run; nothing here may change what is selected.

    Attributes:
        columns: dot columns per row in the bound pass, or None for the target's default.
        survivor_capacity: entries of the survivor buffer per row, or None for the target's default.
        strided: hand over tensors whose innermost rows are padded, so that nothing is contiguous.
        tight_workspace: allow the target no more memory than it needs, so that it works in many small steps.
        hints: key columns said to be likely winners, right or wrong, in range or not; None for no hint.
    """

    columns: int | None = None
    survivor_capacity: int | None = None
    strided: bool = False
    tight_workspace: bool = False
    hints: tuple[int, ...] | None = None

    def to_json(self) -> dict[str, object]:
        """Return the options as plain JSON values."""
        return {**dataclasses.asdict(self), "hints": None if self.hints is None else list(self.hints)}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TargetResult:
    """One selection as a target gives it.

    Attributes:
        topk_indices: int32 ``[rows, topk]``, ascending columns, -1 tail.
        scores: float32 ``[rows, topk]``, same order, -Inf tail.
        row_pruned: per row, whether the bound pass decided anything.
        prune_rate: 1 - rescored pairs / visible pairs.
        fallback: reason -> rows.
    """

    topk_indices: npt.NDArray[np.int32]
    scores: npt.NDArray[np.float32]
    row_pruned: Sequence[bool] = ()
    prune_rate: float = 0.0
    fallback: Mapping[str, Sequence[int]] = dataclasses.field(default_factory=dict)


class Target(Protocol):
    """An implementation under test."""

    @property
    def name(self) -> str:
        """What the command line calls it."""

    @property
    def variants(self) -> tuple[str, ...]:
        """Ways to run it that must all select the same keys, e.g. the four modes."""

    def select(self, problem: PrefillProblem, variant: str, options: RunOptions) -> TargetResult:
        """Select the top keys of every row.

        Args:
            problem: the input.
            variant: one of ``variants``.
            options: buffer sizes and tensor layout.

        Raises:
            DosaError: the problem is invalid or not served.
        """
