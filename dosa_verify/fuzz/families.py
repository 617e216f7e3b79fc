"""Many calls a second: families of cases that share the reference's scores.

A score depends on its query, its key and that key's scale alone. So the reference scores a *pool* of queries and keys
once, and each case of the family is a *look* at it: some rows, some keys in some order and as often as it likes (up
to a million), windows, ``topk``, a variant of the target, buffer sizes and hints. What is right for a look follows from
the pool's scores by `dosa_ref.select.exact_topk`. The first look of each family, and every mismatch, is scored by the
reference again, as it stands.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from dosa_gpu.plan import SUPPORTED_COLUMNS
from dosa_ref.problem import PrefillProblem
from dosa_ref.scorer import score_row
from dosa_ref.select import exact_topk, select_dense
from dosa_ref.spec import PAD_INDEX, SM90_NUM_HEADS, Contract
from dosa_ref.trace import save_trace
from dosa_verify.fuzz.cases import (
    NAN_CODE,
    Case,
    Hints,
    Scales,
    Special,
    Values,
    Weights,
    Windows,
    build,
    draw_hints,
    draw_windows,
)
from dosa_verify.fuzz.properties import GARBAGE_CODE, PROPERTIES, check_properties
from dosa_verify.fuzz.report import Failure, Fault, FuzzReport, Mismatch, Tally
from dosa_verify.fuzz.runner import SHRINK_SECONDS, all_variants, check_call
from dosa_verify.targets.base import RunOptions, Target

LOOKS = 32
"""Looks at one family."""
POOL_ROWS = 8
SMALL_KEYS = 3000
"""Most keys of an ordinary look."""
MEDIUM_KEYS = 140_000
MILLION = 1_048_576
MEDIUM_EVERY, MILLION_EVERY = 4, 16
"""One family in so many has a look at this many keys."""

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A pool and its scores.

    Attributes:
        case: descriptor of the pool.
        pool: its queries, keys, scales and weights; windows and ``topk`` have no meaning.
        scores: the reference's, float32 ``[rows, keys]``.
    """

    case: Case
    pool: PrefillProblem
    scores: Floats


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """One case of a family.

    Attributes:
        problem: the input.
        options: buffer sizes, layout and hints.
        variant: way to run the target.
        indices: the right int32 ``[rows, topk]``.
        scores: the right float32 ``[rows, topk]``.
        features: what the case has, for the report.
    """

    problem: PrefillProblem
    options: RunOptions
    variant: str
    indices: npt.NDArray[np.int32]
    scores: Floats
    features: tuple[str, ...]


def draw_family(seed: int) -> Family:
    """Return the family of a seed; the same one always."""
    random = np.random.default_rng([seed, 0])

    planted = random.integers(0, 3) if random.random() < 0.5 else 0
    specials = [special for special in Special if special is not Special.POISON]
    case = Case(
        seed=int(random.integers(2**31)),
        num_heads=int(random.choice([*SM90_NUM_HEADS, SM90_NUM_HEADS[0], 20])),
        rows=POOL_ROWS,
        keys=int(random.integers(64, 1500)),
        # Often like a trained indexer, so that the bound has something to prune.
        values=Values.LEARNED if random.random() < 0.4 else list(Values)[random.integers(len(Values))],
        weights=Weights.MIXED if random.random() < 0.4 else list(Weights)[random.integers(len(Weights))],
        scales=list(Scales)[random.integers(len(Scales))],
        specials=tuple(specials[place] for place in random.permutation(len(specials))[:planted]),
    )
    pool = build(case)
    scores = np.stack([score_row(pool, row, Contract.SM90) for row in range(pool.seq_len)])
    return Family(case=case, pool=pool, scores=scores)


def looks(family: Family, variants: tuple[str, ...], *, seed: int, count: int, max_keys: int) -> Iterator[Look]:
    """Yield looks at a family, the same ones always.

    Args:
        family: the pool.
        variants: of the target.
        seed: of everything random.
        count: how many.
        max_keys: most keys of a look; from `MILLION` on some families have looks at a million keys.
    """
    random = np.random.default_rng([seed, 1])
    for number in range(count):
        size = SMALL_KEYS
        if max_keys >= MILLION and number == count - 1 and seed % MILLION_EVERY == 0:
            size = MILLION
        elif max_keys >= MEDIUM_KEYS and number == count // 2 and seed % MEDIUM_EVERY == 0:
            size = MEDIUM_KEYS
        yield _look(family, variants, random, min(size, max_keys), whole=number == 0)


def _look(family: Family, variants: tuple[str, ...], random: np.random.Generator, size: int, *, whole: bool) -> Look:
    pool = family.pool
    small = size <= SMALL_KEYS
    most_rows = int(random.choice([1, 4, 20, 70], p=[0.4, 0.4, 0.15, 0.05])) if small else 3
    rows = random.integers(0, pool.seq_len, int(random.integers(1, most_rows + 1)))
    if not small:
        # Sizes just below and at the largest: no multiple of any tile, and exactly one.
        key = random.integers(0, pool.seq_len_kv, size - int(random.choice([0, 1, 77])))
    elif whole or random.random() < 0.7:
        start, end = np.sort(random.integers(0, pool.seq_len_kv + 1, 2))
        key = np.arange(start, end)
    else:
        key = random.integers(0, pool.seq_len_kv, int(random.integers(1, size + 1)))
    topk = int(random.choice([1, 2, 5, 16, 64, 300, 2048], p=[0.1, 0.1, 0.2, 0.3, 0.2, 0.07, 0.03]))
    case = dataclasses.replace(
        family.case,
        seed=int(random.integers(2**31)),
        rows=len(rows),
        keys=len(key),
        topk=topk if small else int(random.choice([5, 300, 2048])),
        windows=list(Windows)[random.integers(len(Windows))],
        strided=bool(random.random() < 0.3),
        columns=int(random.choice(SUPPORTED_COLUMNS)),
        survivor_capacity=[None, 64, 128][random.integers(3)] if small else None,
        tight_workspace=bool(random.random() < 0.2) and small,
        hints=list(Hints)[random.integers(len(Hints))] if random.random() < 0.5 else Hints.NONE,
    )
    ks, ke = draw_windows(case, np.random.default_rng(case.seed))
    k, k_scale = pool.k.view(np.uint8)[key], pool.k_scale[key]
    poison = random.random() < 0.25
    if poison:
        seen = np.zeros(len(key), bool)
        for first, last in zip(ks, ke, strict=True):
            seen[first:last] = True
        code, scale = ((NAN_CODE, np.nan), (GARBAGE_CODE, np.float32(1e9)))[random.integers(2)]
        k[~seen], k_scale[~seen] = code, scale
    problem = PrefillProblem(
        q=pool.q[rows],
        k=k.view(pool.k.dtype),
        k_scale=k_scale,
        weights=pool.weights[rows],
        cu_seqlen_ks=ks,
        cu_seqlen_ke=ke,
        topk=case.topk,
    )
    indices = np.full((len(rows), case.topk), PAD_INDEX, np.int32)
    scores = np.full((len(rows), case.topk), -np.inf, np.float32)
    for place, row in enumerate(rows):
        first, last = problem.window(place)
        found = family.scores[row, key[first:last]]
        chosen = exact_topk(found, case.topk)
        chosen = chosen[chosen != PAD_INDEX]
        indices[place, : len(chosen)], scores[place, : len(chosen)] = chosen + first, found[chosen]
    if case.hints is Hints.LIKELY:
        # The winners themselves, which need no second scoring here.
        hints: tuple[int, ...] | None = tuple(indices[0][indices[0] != PAD_INDEX].tolist())
    else:
        hints = draw_hints(case.hints, problem, case.seed)
    variant = variants[random.integers(len(variants))]
    columns = case.columns if random.random() < 0.7 else None
    longest = max(len(key), 1)
    features = (
        f"variant.{variant}",
        f"topk.{case.topk}",
        f"columns.{'default' if columns is None else columns}",
        f"keys.up_to_{10 ** len(str(longest - 1)) if longest < MILLION - 100 else MILLION}",
        f"rows.{'1' if len(rows) == 1 else 'several'}",
        *(["poison"] if poison else []),
    )
    options = RunOptions(
        columns=columns,
        survivor_capacity=case.survivor_capacity,
        strided=case.strided,
        tight_workspace=case.tight_workspace,
        hints=hints,
    )
    return Look(
        problem=problem,
        options=options,
        variant=variant,
        indices=indices,
        scores=scores,
        features=(*features, *features_of(case)),
    )


def features_of(case: Case) -> tuple[str, ...]:
    """What a descriptor has, as `Tally.describe` counts it."""
    tally = Tally()
    tally.describe(case)
    return tuple(name for name, count in tally.features.items() if count)


def prepare(seed: int, variants: tuple[str, ...], count: int, max_keys: int) -> list[Look]:
    """Return the looks at the family of a seed; arguments as in `looks`.

    Raises:
        AssertionError: what is right for a look is not what the reference says of it: a fault of this module.
    """
    prepared = list(looks(draw_family(seed), variants, seed=seed, count=count, max_keys=max_keys))
    _assert_right(prepared[0])
    return prepared


def run(
    target: Target,
    *,
    examples: int,
    seed: int = 0,
    max_keys: int = SMALL_KEYS,
    budget_s: float | None = None,
    folder: Path = Path(),
    command: str = "dosa fuzz",
    prepared: Sequence[Look] | None = None,
) -> FuzzReport:
    """Fuzz a target with the families of ``seed``, ``seed + 1`` and so on, `LOOKS` cases each.

    Args:
        target: what is tested.
        examples: cases.
        seed: of the first family.
        max_keys: most keys of a case.
        budget_s: start no new case after this many seconds, or None.
        folder: where a failing case is saved.
        command: beginning of the reproducer.
        prepared: what `prepare` gave for ``seed``, so that this process only runs the target; at most one family.

    Returns:
        The report; each case is one call, and its ``failure`` was shrunk. One case of each family is also asked for a
        property.

    Raises:
        BackendUnavailable, UnprovedBound: the target cannot run here.
        AssertionError: the pool's scores are not the reference's of a look: a fault of this module.
    """
    started = time.monotonic()
    tally = Tally()
    failure = None
    spent = False
    counts = {seed + start // LOOKS: min(LOOKS, examples - start) for start in range(0, examples, LOOKS)}
    for family_seed, count in counts.items():
        looks_here = prepare(family_seed, all_variants(target), count, max_keys) if prepared is None else prepared
        for number, look in enumerate(looks_here):
            if budget_s is not None and time.monotonic() - started > budget_s:
                spent = True
                break
            tally.cases += 1
            tally.features.update(look.features)
            mismatch = check_call(
                target, look.problem, look.variant, look.options, look.indices, look.scores, tally.add
            )
            if mismatch is None and number == 1:
                name = tuple(PROPERTIES)[family_seed % len(PROPERTIES)]
                tally.features[f"property.{name}"] += 1
                mismatch = check_properties(
                    target, look.problem, look.variant, look.options, seed=family_seed, names=(name,)
                )
            if mismatch is not None:
                failure = _report(target, look, mismatch, folder=folder, command=command)
                break
        if spent or failure is not None:
            break
    return FuzzReport(
        target=target.name,
        variants=target.variants,
        seed=seed,
        examples=examples,
        directed=0,
        cases=tally.cases,
        calls=tally.calls,
        rows=tally.rows,
        rows_pruned=tally.rows_pruned,
        fallback=dict(sorted(tally.fallback.items())),
        features=dict(sorted(tally.features.items())),
        time_s=round(time.monotonic() - started, 3),
        budget_spent=spent,
        failure=failure,
    )


def _assert_right(look: Look) -> None:
    expected = select_dense(look.problem, Contract.SM90)
    assert np.array_equal(expected.topk_indices, look.indices)
    assert np.array_equal(expected.scores.view(np.uint32), look.scores.view(np.uint32))


def _report(target: Target, look: Look, mismatch: Mismatch, *, folder: Path, command: str) -> Failure:
    """Confirm a mismatch with the whole reference, make its problem smaller, save it."""
    problem, options = look.problem, look.options
    if mismatch.fault is not Fault.PROPERTY:
        _assert_right(look)
        problem, mismatch = shrink(
            problem, mismatch, lambda smaller: check_variant(target, smaller, look.variant, options)
        )
    text = json.dumps(options.to_json(), sort_keys=True)
    digest = hashlib.sha256(problem.k.tobytes() + problem.q.tobytes() + text.encode()).hexdigest()[:8]
    file = folder / f"case-{digest}.safetensors"
    save_trace(file, problem, {"kind": "problem", "options": text, "variant": look.variant})
    return Failure(case=None, mismatch=mismatch, file=str(file), reproducer=f"{command} --replay {file}")


def check_variant(target: Target, problem: PrefillProblem, variant: str, options: RunOptions) -> Mismatch | None:
    """Check one variant of a target against the reference, or None."""
    expected = select_dense(problem, Contract.SM90)
    return check_call(target, problem, variant, options, expected.topk_indices, expected.scores)


def shrink(
    problem: PrefillProblem, mismatch: Mismatch, check: Callable[[PrefillProblem], Mismatch | None]
) -> tuple[PrefillProblem, Mismatch]:
    """Drop rows and keys of a failing problem, and lower ``topk``, as long as it fails in the same way.

    Args:
        problem: fails.
        mismatch: how.
        check: says how a smaller one fails.

    Returns:
        The smallest problem that was found within `SHRINK_SECONDS`, and its mismatch.
    """
    until = time.monotonic() + SHRINK_SECONDS
    again = True
    while again:
        again = False
        for smaller in _smaller(problem):
            if time.monotonic() > until:
                return problem, mismatch
            found = check(smaller)
            if found is not None and found.fault is mismatch.fault:
                problem, mismatch, again = smaller, found, True
                break
    return problem, mismatch


def _smaller(problem: PrefillProblem) -> Iterator[PrefillProblem]:
    """Problems a step simpler than this one, the boldest first."""
    rows, keys = problem.seq_len, problem.seq_len_kv
    if rows > 1:
        yield problem.rows(0, rows // 2)
        yield problem.rows(rows // 2, rows)
    part = keys
    while part > 1:
        part = -(-part // 2)
        for start in range(0, keys, part):
            yield without_keys(problem, start, min(start + part, keys))
    for topk in sorted({1, problem.topk // 2, problem.topk - 1}):
        if 1 <= topk < problem.topk:
            yield dataclasses.replace(problem, topk=topk)


def without_keys(problem: PrefillProblem, start: int, end: int) -> PrefillProblem:
    """The problem without the keys ``[start, end)``; windows lose them too."""
    kept = np.r_[0:start, end : problem.seq_len_kv]

    def moved(place: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        return np.where(place <= start, place, np.maximum(place - (end - start), start)).astype(np.int32)

    return dataclasses.replace(
        problem,
        k=problem.k.view(np.uint8)[kept].view(problem.k.dtype),
        k_scale=problem.k_scale[kept],
        cu_seqlen_ks=moved(problem.cu_seqlen_ks),
        cu_seqlen_ke=moved(problem.cu_seqlen_ke),
    )
