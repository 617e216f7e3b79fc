"""Whether answers are right: our dense path against dosa_ref, every contestant against our dense path."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import importlib
import multiprocessing
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from dosa_gpu.plan import Path as SelectPath
from dosa_ref import scorer, select
from dosa_ref.spec import InvalidProblem, Outcome
from dosa_verify.bench.contestants import SCORER, Answer, deep_gemm_logits, our_logits, ours, rows_per_piece
from dosa_verify.bench.inputs import Inputs

if TYPE_CHECKING:
    import torch

Rescore = Callable[["torch.Tensor", "torch.Tensor"], "torch.Tensor"]

RESCORED_ROWS = 64
KEYS_PER_TASK = 32768
"""Keys that one process scores at once."""


def process_pool() -> concurrent.futures.Executor:
    """One process per core, started afresh: a forked one must not touch the GPU's context."""
    return concurrent.futures.ProcessPoolExecutor(os.cpu_count() or 1, mp_context=multiprocessing.get_context("spawn"))


class Reference:
    """Scores of a few rows by dosa_ref; a key's score does not depend on the length, so all suffixes share them.

    Args:
        inputs: the longest length.
        rows: the rows, counted from the last one (0), which every number of queries shares.
        pool: where the scores are computed while the GPU goes on.
    """

    def __init__(self, inputs: Inputs, rows: list[int], pool: concurrent.futures.Executor) -> None:
        import torch

        self.rows = rows
        places = [len(inputs.q) - 1 - row for row in rows]
        q = inputs.q.view(torch.uint8)[places].cpu().numpy()
        weights = inputs.weights[places].cpu().numpy()
        codes, scale = inputs.k.view(torch.uint8).cpu().numpy(), inputs.k_scale.cpu().numpy()
        tasks = [
            (q, weights, codes[first : first + KEYS_PER_TASK], scale[first : first + KEYS_PER_TASK])
            for first in range(0, len(codes), KEYS_PER_TASK)
        ]
        self._parts = pool.map(scorer.scores_sm90, *zip(*tasks, strict=True))
        self._scores: npt.NDArray[np.float32] | None = None

    @property
    def scores(self) -> npt.NDArray[np.float32]:
        """Scores ``[rows, keys]``; waits for them."""
        if self._scores is None:
            self._scores = np.concatenate(list(self._parts), axis=1)
        return self._scores

    def wrong_rows(self, inputs: Inputs, indices: torch.Tensor, scores: torch.Tensor) -> int:
        """Rows of a selection on a suffix of the keys that are not the reference's, every index and score bit.

        Args:
            inputs: the suffix, with all the selection's rows.
            indices, scores: the selection.
        """
        topk = indices.shape[1]
        all_scores = self.scores[:, self.scores.shape[1] - len(inputs.k) :]
        wrong = 0
        for place, row in enumerate(self.rows):
            here = len(inputs.q) - 1 - row
            start, end = int(inputs.ks[here]), int(inputs.ke[here])
            visible = all_scores[place, start:end]
            chosen = select.exact_topk(visible, topk)
            found = chosen[chosen >= 0]
            want = np.full(topk, -1, np.int32)
            want[: len(found)] = found + start
            bits = np.full(topk, -np.inf, np.float32)
            bits[: len(found)] = visible[found]
            same = np.array_equal(indices[here].cpu().numpy(), want) and np.array_equal(
                scores[here].cpu().numpy().view(np.int32), bits.view(np.int32)
            )
            wrong += not same
        return wrong


class Judge:
    """The selection of our dense path on one length, by which every contestant there is judged.

    Args:
        inputs: one length with all its queries.
        topk: keys per row.
    """

    def __init__(self, inputs: Inputs, topk: int) -> None:
        self._inputs = inputs
        [(self.indices, self.scores)] = ours(SelectPath.DENSE).call(inputs, topk, None).pieces
        self.reference_rows = self.reference_wrong = 0

    def be_judged(self, reference: Reference) -> None:
        """Compare the dense path itself with dosa_ref."""
        self.reference_rows = len(reference.rows)
        self.reference_wrong = reference.wrong_rows(self._inputs, self.indices, self.scores)

    def verdict(self, answer: Answer, num_queries: int) -> tuple[Outcome, int]:
        """Judge an answer for the last queries: outcome and how many rows differ.

        The outcome is not exact either if the dense path differs from dosa_ref.
        """
        import torch

        part = self._inputs.suffix(len(self._inputs.k), num_queries)

        def rescore(rows: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
            some = dataclasses.replace(
                part, q=part.q.view(torch.uint8)[rows].view(part.q.dtype), weights=part.weights[rows], ks=part.ks[rows],
                ke=part.ke[rows],
            )  # fmt: skip
            visible = (keys >= some.ks[:, None]) & (keys < some.ke[:, None])
            return torch.where(visible, our_logits(some, 0).gather(1, keys.long()), torch.nan)

        outcome, differing = compare(answer, self.indices[-num_queries:], self.scores[-num_queries:], rescore)
        return (Outcome.WRONG_SET if self.reference_wrong else outcome), differing


def differing_score_rows(inputs: Inputs) -> int:
    """Rows in which a visible score of ours has another bit than DeepGEMM's."""
    import torch

    library = importlib.import_module(SCORER)
    step = rows_per_piece(inputs)
    column = torch.arange(len(inputs.k), dtype=torch.int32, device=inputs.q.device)
    count = 0
    for start in range(0, len(inputs.q), step):
        rows = slice(start, start + step)
        mine = our_logits(inputs, start).view(torch.int32)
        theirs = deep_gemm_logits(library, inputs, rows, clean=False)
        # A few rows at a time: the masks are as large as the logits.
        for first in range(0, len(mine), 64):
            some = slice(first, first + 64)
            low, high = inputs.ks[rows][some, None], inputs.ke[rows][some, None]
            different = mine[some] != theirs[some].contiguous().view(torch.int32)
            count += int((different & (column >= low) & (column < high)).any(1).sum())
    return count


def compare(answer: Answer, indices: torch.Tensor, scores: torch.Tensor, rescore: Rescore) -> tuple[Outcome, int]:
    """Judge an answer by the indices (ascending, -1 behind the last) and scores of our dense path.

    Ours must have the same indices and the same score bits. A peer must have the same set in every row; rows with
    another set of equally good keys, by our scores of them, are ties settled otherwise.

    Args:
        answer: of a contestant.
        indices, scores: of our dense path.
        rescore: rows and keys to our scores of these keys.

    Returns:
        The verdict and how many rows differ.

    Raises:
        InvalidProblem: the answer has another number of rows or columns.
    """
    import torch

    row, differing, wrong = 0, 0, 0
    for index, score in answer.pieces:
        rows = slice(row, row + len(index))
        row += len(index)
        if index.shape[1] != indices.shape[1] or row > len(indices):
            raise InvalidProblem("answer", f"shape {list(index.shape)} at row {rows.start}", f"{list(indices.shape)}")
        if answer.stats is not None:
            other = index != indices[rows]
            other |= score.view(torch.int32) != scores[rows].view(torch.int32)
            count = int(other.any(1).sum())
            differing, wrong = differing + count, wrong + count
            continue
        # Behind the last visible key a peer lists keys whose logit is -Inf; they sort behind all others.
        last = torch.iinfo(torch.int32).max
        found = torch.where(score == -torch.inf, last, index.to(torch.int32)).sort(1).values
        want = torch.where(indices[rows] < 0, last, indices[rows])
        places = (found != want).any(1).nonzero().flatten()
        differing += len(places)
        # A few rows at a time: each is scored against all keys.
        for some in places.split(RESCORED_ROWS) if len(places) else ():
            keys = found[some]
            twice = ((keys[:, 1:] == keys[:, :-1]) & (keys[:, 1:] != last)).any(1)
            real = rescore(rows.start + some, torch.where(keys == last, 0, keys))
            real = torch.where(keys == last, -torch.inf, real).sort(1).values
            # -0.0 and +0.0 are the same score, and compare equal.
            wrong += int((twice | (real != scores[rows][some].sort(1).values).any(1)).sum())
    if row != len(indices):
        raise InvalidProblem("answer", f"{row} rows", f"{len(indices)}")
    if not differing:
        return Outcome.EXACT, 0
    return (Outcome.WRONG_SET if wrong else Outcome.TIE_EQUIVALENT), differing
