"""Properties that any exact selection has, checked without an oracle: a target is compared with itself.

Each property changes a problem in a way whose effect on the answer is known, and asks the target again. They hold for
the computed scores too, bit by bit: a score depends on its key, its query and its weights alone, and a power of two
passes through every rounding as long as nothing under- or overflows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from dosa_ref.problem import PrefillProblem
from dosa_ref.select import exact_topk
from dosa_ref.spec import PAD_INDEX, BackendUnavailable, UnprovedBound
from dosa_verify.fuzz.report import Fault, Mismatch
from dosa_verify.targets.base import RunOptions, Target, TargetResult

Ask = Callable[[PrefillProblem], TargetResult]
Property = Callable[[PrefillProblem, TargetResult, Ask, np.random.Generator], Mismatch | None]

SHIFT = 37
"""Keys put before all others; no multiple of any block."""
GARBAGE_CODE = 0x7E
"""448 in every element: keys that would win if anybody looked."""


def _differs(name: str, first: TargetResult, second: TargetResult, *, rescaled: float = 1.0) -> Mismatch | None:
    """The first place where two answers that must agree do not; scores as bits."""
    expected = (
        (first.scores * np.float32(rescaled)).view(np.uint32) if rescaled != 1.0 else first.scores.view(np.uint32)
    )
    wrong = (first.topk_indices != second.topk_indices) | (expected != second.scores.view(np.uint32))
    if not wrong.any():
        return None
    row, place = (int(axis) for axis in np.argwhere(wrong)[0])
    evidence = {
        "property": name,
        "before": int(first.topk_indices[row, place]),
        "after": int(second.topk_indices[row, place]),
    }
    return Mismatch(variant=name, fault=Fault.PROPERTY, row=row, place=place, evidence=evidence)


def _with_keys(
    problem: PrefillProblem, k: npt.NDArray[np.uint8], k_scale: npt.NDArray[np.float32], **changes: Any
) -> PrefillProblem:
    return dataclasses.replace(problem, k=k.view(problem.k.dtype), k_scale=k_scale, **changes)


def _outside(problem: PrefillProblem) -> npt.NDArray[np.bool_]:
    seen = np.zeros(problem.seq_len_kv, bool)
    for row in range(problem.seq_len):
        start, end = problem.window(row)
        seen[start:end] = True
    return ~seen


def repeat(problem: PrefillProblem, first: TargetResult, ask: Ask, _: np.random.Generator) -> Mismatch | None:
    """Asked again, the same bits."""
    return _differs("repeat", first, ask(problem))


def garbage_outside(problem: PrefillProblem, first: TargetResult, ask: Ask, _: np.random.Generator) -> Mismatch | None:
    """What no row sees does not matter, be it large or NaN."""
    outside = _outside(problem)
    for code, scale in ((GARBAGE_CODE, 1e9), (0x7F, np.nan)):
        k, k_scale = problem.k.view(np.uint8).copy(), problem.k_scale.copy()
        k[outside], k_scale[outside] = code, scale
        mismatch = _differs("garbage_outside", first, ask(_with_keys(problem, k, k_scale)))
        if mismatch is not None:
            return mismatch
    return None


def window_shift(problem: PrefillProblem, first: TargetResult, ask: Ask, _: np.random.Generator) -> Mismatch | None:
    """Keys put before all others, and seen by no row, shift the indices and change nothing else."""
    k = np.concatenate([np.full((SHIFT, problem.k.shape[1]), GARBAGE_CODE, np.uint8), problem.k.view(np.uint8)])
    k_scale = np.concatenate([np.full(SHIFT, 1e9, np.float32), problem.k_scale])
    start = problem.cu_seqlen_ks + np.int32(SHIFT)
    end = np.maximum(problem.cu_seqlen_ke, problem.cu_seqlen_ks) + np.int32(SHIFT)
    got = ask(_with_keys(problem, k, k_scale, cu_seqlen_ks=start, cu_seqlen_ke=end))
    back = np.where(got.topk_indices == PAD_INDEX, PAD_INDEX, got.topk_indices - SHIFT).astype(np.int32)
    return _differs("window_shift", first, dataclasses.replace(got, topk_indices=back))


def batch_position(
    problem: PrefillProblem, first: TargetResult, ask: Ask, random: np.random.Generator
) -> Mismatch | None:
    """Rows in another order, and one row alone, get the same answers."""
    rows = problem.seq_len
    if rows == 0:
        return None
    for order in (random.permutation(rows), random.integers(0, rows, 1)):
        part = dataclasses.replace(
            problem,
            q=problem.q[order],
            weights=problem.weights[order],
            cu_seqlen_ks=problem.cu_seqlen_ks[order],
            cu_seqlen_ke=problem.cu_seqlen_ke[order],
        )
        want = dataclasses.replace(first, topk_indices=first.topk_indices[order], scores=first.scores[order])
        mismatch = _differs("batch_position", want, ask(part))
        if mismatch is not None:
            return mismatch
    return None


def key_permutation(
    problem: PrefillProblem, first: TargetResult, ask: Ask, random: np.random.Generator
) -> Mismatch | None:
    """Keys in another order within a window that all rows share: the same scores, best first."""
    if problem.seq_len == 0:
        return None
    start, end = problem.window(0)
    if any(problem.window(row) != (start, end) for row in range(problem.seq_len)):
        return None
    order = np.arange(problem.seq_len_kv)
    order[start:end] = start + random.permutation(end - start)
    got = ask(_with_keys(problem, problem.k.view(np.uint8)[order], problem.k_scale[order]))
    # Ties may fall on other keys, so the scores are compared, as a sorted list (-0.0 as 0.0).
    before, after = (np.sort(answer.scores + np.float32(0), axis=1) for answer in (first, got))
    wrong = np.argwhere(before.view(np.uint32) != after.view(np.uint32))
    if not len(wrong):
        return None
    return Mismatch(
        variant="key_permutation",
        fault=Fault.PROPERTY,
        row=int(wrong[0][0]),
        evidence={"property": "key_permutation"},
    )


def power_of_two(problem: PrefillProblem, first: TargetResult, ask: Ask, _: np.random.Generator) -> Mismatch | None:
    """All key scales doubled: the same keys, doubled scores. Only where nothing leaves the normal range."""
    magnitude = np.abs(first.scores[first.topk_indices != PAD_INDEX])
    scale = problem.k_scale[np.isfinite(problem.k_scale)]
    usual = (scale >= 2.0**-30).all() and (scale <= 2.0**30).all() and len(scale) == problem.seq_len_kv
    weight = np.abs(problem.weights)
    usual = usual and bool(((weight == 0) | ((weight > 2.0**-60) & (weight < 2.0**30))).all())
    if not usual or not ((magnitude == 0) | ((magnitude > 2.0**-90) & (magnitude < 2.0**120))).all():
        return None
    got = ask(dataclasses.replace(problem, k_scale=problem.k_scale * np.float32(2)))
    return _differs("power_of_two", first, got, rescaled=2.0)


def split_and_merge(
    problem: PrefillProblem, first: TargetResult, ask: Ask, random: np.random.Generator
) -> Mismatch | None:
    """The best of two halves of each window are the best of the window."""
    middle = np.int32(random.integers(0, problem.seq_len_kv + 1))
    ends = np.maximum(problem.cu_seqlen_ke, problem.cu_seqlen_ks)
    low = ask(dataclasses.replace(problem, cu_seqlen_ke=np.minimum(ends, middle)))
    high = ask(dataclasses.replace(problem, cu_seqlen_ks=np.maximum(problem.cu_seqlen_ks, middle), cu_seqlen_ke=ends))
    indices = np.full_like(first.topk_indices, PAD_INDEX)
    scores = np.full_like(first.scores, -np.inf)
    for row in range(problem.seq_len):
        columns = np.concatenate([low.topk_indices[row], high.topk_indices[row]])
        both = np.concatenate([low.scores[row], high.scores[row]])[columns != PAD_INDEX]
        columns = columns[columns != PAD_INDEX]
        chosen = exact_topk(both, problem.topk)
        chosen = chosen[chosen != PAD_INDEX]
        indices[row, : len(chosen)], scores[row, : len(chosen)] = columns[chosen], both[chosen]
    return _differs("split_and_merge", first, dataclasses.replace(first, topk_indices=indices, scores=scores))


PROPERTIES: dict[str, Property] = {
    "repeat": repeat,
    "garbage_outside": garbage_outside,
    "window_shift": window_shift,
    "batch_position": batch_position,
    "key_permutation": key_permutation,
    "power_of_two": power_of_two,
    "split_and_merge": split_and_merge,
}


def check_properties(
    target: Target,
    problem: PrefillProblem,
    variant: str,
    options: RunOptions,
    *,
    seed: int = 0,
    names: tuple[str, ...] = tuple(PROPERTIES),
) -> Mismatch | None:
    """Check properties of one way of running a target.

    Args:
        target: what is tested.
        problem: the input.
        variant: which way.
        options: buffer sizes and layout.
        seed: seed of permutations and splits.
        names: which properties.

    Returns:
        The first that does not hold, with ``variant`` set to its name, or None. A property that a problem does not fit
        (rows with different windows for ``key_permutation``, extreme numbers for ``power_of_two``) is passed over.
    """

    def ask(changed: PrefillProblem) -> TargetResult:
        return target.select(changed, variant, options)

    first = ask(problem)
    for name in names:
        try:
            mismatch = PROPERTIES[name](problem, first, ask, np.random.default_rng(seed))
        except (UnprovedBound, BackendUnavailable):
            raise
        except Exception as error:  # noqa: BLE001 - the first problem was served, so whatever is raised is the finding
            evidence = {"property": name, "error": type(error).__name__, "message": str(error)}
            mismatch = Mismatch(variant=name, fault=Fault.CRASHED, evidence=evidence)
        if mismatch is not None:
            return mismatch
    return None
