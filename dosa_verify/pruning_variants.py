"""Ways to make a bound of a row, all of them sound: the recipe, the published one, ablations and other forms of both.

What :mod:`dosa_verify.pruning_study` compares. Rounding to FP8 and the guard of ``docs/bound.md`` are in every one, and
every column counts.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from scipy.optimize import nnls

from dosa_ref.bound import RowBound, build_row_bound, round_bound, row_within_magnitude
from dosa_ref.formats import encode_e4m3_array
from dosa_ref.guard import BoundCertificate, dot_error, e4m3_float64, magnitude
from dosa_ref.spec import BOUND_CHAIN_ULPS, E4M3_MAX, FLOAT32_UNIT, FLOAT64_SLACK_LOG2, STEP_TERMS, STEPS

COLUMNS: Final = {32: (8, 12, 16, 20, 24), 64: (8, 12, 16, 20, 24, 32)}
"""Column budgets by head count."""
ABLATION_COLUMNS: Final = {32: 12, 64: 20}
ACTIVE_SHARE: Final = 0.5
"""The published recipe aggregates negative heads that are active on this share of the winners."""

Floats = npt.NDArray[np.float64]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Row:
    """One query row and what a recipe may know of it.

    Attributes:
        q: E4M3 ``[H, 128]``.
        w: float32 ``[H]``.
        sample: E4M3 ``[n, 128]``, seeds below ``tau`` and keys spread over the window.
        winners: E4M3 ``[n, 128]``, some of the K best seeds.
    """

    q: npt.NDArray[Any]
    w: npt.NDArray[np.float32]
    sample: npt.NDArray[Any]
    winners: npt.NDArray[Any]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Form:
    """A bound as the study evaluates it: ``U = s (sum_j c_j psi_j + min(G n, rest n + sum_b rho_b n_b))``.

    Attributes:
        columns: float32 ``[M, 128]``, E4M3 values.
        coefficients: float32 ``[M]``.
        linear: bool ``[M]``.
        slack: ``G``.
        blocks: ``rho_b`` of each block of 32 elements and ``rest``, float32 ``[5]``; None: ``G n`` alone.
        usable: whether the row is within the magnitudes of ``docs/bound.md``; else every key survives.
        residual, dots: shares of these two terms in ``G``.
    """

    columns: npt.NDArray[np.float32]
    coefficients: npt.NDArray[np.float32]
    linear: npt.NDArray[np.bool_]
    slack: np.float32
    blocks: npt.NDArray[np.float32] | None
    usable: bool
    residual: float
    dots: float


Maker = Callable[[Row, int], RowBound]


def build(row: Row, wanted: Sequence[tuple[str, int]]) -> list[Form]:
    """Bounds of one row.

    Args:
        row: the row.
        wanted: names of makers and numbers of columns.

    Returns:
        One form for each.
    """
    return [form_of(row, MAKERS[name](row, columns), name == BLOCK_NORMS) for name, columns in wanted]


def form_of(row: Row, bound: RowBound, by_blocks: bool = False) -> Form:
    """What the study needs of a bound."""
    total = bound.terms.total()
    return Form(
        columns=e4m3_float64(bound.columns).astype(np.float32),
        coefficients=bound.coefficients,
        linear=bound.linear,
        slack=bound.slack,
        blocks=_block_residuals(row, bound) if by_blocks else None,
        usable=row_within_magnitude(row.q, row.w, bound),
        residual=bound.terms.residual / total,
        dots=bound.terms.dots / total,
    )


def published(
    row: Row,
    columns: int,
    *,
    negatives: str = "active",
    projected: bool = True,
    geometry: bool = True,
    centred: bool = False,
    aggregates: int = 1,
) -> RowBound:
    """The published recipe: heads by ``|w| ||q||``, one relu aggregate, what is left of the budget to negative heads.

    Args:
        row: the row.
        columns: M.
        negatives: which negative heads are aggregated: ``active`` on half of the winners, ``hard``: on half of the
            sample, ``all`` or ``none``.
        projected: project omitted positive heads on the retained ones.
        geometry: take the residual's root over inner products; else the sum of the residuals' norms.
        centred: spend a column on the linear half of the residual (not published).
        aggregates: relu columns that share the aggregated heads, clustered by direction (published: one).
    """
    x, w = e4m3_float64(row.q), row.w.astype(np.float64)
    active = (x @ e4m3_float64(row.sample if negatives == "hard" else row.winners).T > 0).mean(axis=1)
    strength = np.abs(w) * np.linalg.norm(x, axis=1)
    positive = [h for h in np.argsort(-strength, kind="stable").tolist() if w[h] > 0]
    negative = [h for h in np.argsort(-strength * active, kind="stable").tolist() if w[h] < 0]
    if len(positive) + len(negative) <= columns:
        return _bound(row, positive + negative, [], None, projected)
    if negatives in ("active", "hard"):
        wanted = [h for h in negative if active[h] >= ACTIVE_SHARE]
    else:
        wanted = negative if negatives == "all" else []
    groups = _clustered(x, w, wanted, aggregates)
    room = columns - len(groups)
    if len(positive) <= room:
        spare = negative[: room - len(positive)] if negatives != "none" else []
        rest = [left for group in groups if (left := [h for h in group if h not in spare])]
        return _bound(row, positive + spare, rest, None, projected)
    bound = _bound(row, positive[: room - centred], groups, [] if centred else None, projected)
    if geometry:
        return bound
    return _with_residual(bound, float(np.linalg.norm(_residuals(row, bound), axis=1).sum()))


def _clustered(x: Floats, w: Floats, heads: list[int], count: int) -> list[list[int]]:
    """Heads in at most ``count`` groups of like directions; no group is empty."""
    if count == 1 or len(heads) <= 1:
        return [heads] if heads else []
    unit = x[heads] / np.maximum(np.linalg.norm(x[heads], axis=1), 1e-300)[:, None]
    nearest = (unit @ centres(np.abs(w[heads])[:, None] * x[heads], count).T).argmax(axis=1)
    groups = ([h for h, near in zip(heads, nearest) if near == place] for place in range(count))
    return [group for group in groups if group]


@functools.lru_cache(maxsize=16)  # the ablations of a row start from one recipe
def recipe(row: Row, columns: int) -> RowBound:
    """The recipe of ``docs/bound.md``."""
    return build_row_bound(row.q, row.w, columns, row.sample)


def _without_projection(row: Row, columns: int) -> RowBound:
    bound = recipe(row, columns)
    projection = np.zeros_like(bound.certificate.projection)
    return round_bound(row.q, row.w, bound.linear, dataclasses.replace(bound.certificate, projection=projection))


def _without_price(row: Row, columns: int) -> RowBound:
    certificate = recipe(row, columns).certificate
    heads = [h for h in certificate.retained.tolist() if h >= 0]
    linear = np.flatnonzero(certificate.aggregate.sum(axis=0)).tolist()
    return _bound(row, heads, [], linear if len(heads) < len(certificate.retained) else None, True)


def _ordered(row: Row, columns: int, strength: Floats) -> RowBound:
    """The recipe with as many positive heads, but the first by another order."""
    certificate = recipe(row, columns).certificate
    heads = [h for h in certificate.retained.tolist() if h >= 0]
    if len(heads) == len(certificate.retained):
        return recipe(row, columns)
    kept = sum(row.w[h] > 0 for h in heads)
    heads = np.argsort(-strength, kind="stable")[:kept].tolist() + [h for h in heads if row.w[h] < 0]
    return _bound(row, heads, [], np.flatnonzero(certificate.aggregate.sum(axis=0)).tolist(), True)


def _by_strength(row: Row, columns: int) -> RowBound:
    return _ordered(row, columns, row.w.astype(np.float64) * np.linalg.norm(e4m3_float64(row.q), axis=1))


def _by_zonotope(row: Row, columns: int) -> RowBound:
    """Positive heads in the order in which a zonotope keeps its generators (Girard): ``|w x|_1 - |w x|_inf``."""
    x = np.abs(e4m3_float64(row.q))
    return _ordered(row, columns, row.w.astype(np.float64) * (x.sum(axis=1) - x.max(axis=1)))


def _relu_beside_linear(row: Row, columns: int) -> RowBound:
    """The negative heads of the linear column in a relu column of their own, chosen on the sample as ever."""
    bound = recipe(row, max(columns - 1, 1))
    heads = [h for h in bound.certificate.retained.tolist() if h >= 0]
    negative = np.flatnonzero(bound.certificate.aggregate.sum(axis=0)).tolist()
    if not negative or columns < 2:
        return recipe(row, columns)
    aggregate = np.insert(np.zeros_like(bound.certificate.aggregate), len(heads), 0.0, axis=0)
    aggregate[len(heads)] = bound.certificate.aggregate[-1]
    certificate = BoundCertificate(
        retained=np.array([*heads, -1, -1], np.int64),
        projection=np.insert(bound.certificate.projection, len(heads), 0.0, axis=1),
        aggregate=aggregate,
    )
    linear = np.arange(len(heads) + 2) == len(heads) + 1
    return round_bound(row.q, row.w, linear, certificate)


def _high_and_low(row: Row, columns: int) -> RowBound:
    """The linear column as two FP8 columns: what the first cannot hold is rounded once more, into the second.

    The low column's dot is one more that may come out too small: its ``2^-m D(y)`` goes to the guard by itself, and so
    does what it adds to the two chains. ``certificate`` is that of the bound without the low column.
    """
    if columns < 2:
        return recipe(row, columns)
    bound = recipe(row, columns - 1)
    if not bound.linear.any():
        return recipe(row, columns)
    halves, rest = _halves(row, bound)
    largest = float(np.abs(rest).max())
    power = int(np.clip(np.floor(np.log2(float(E4M3_MAX) / largest)), -100, 100)) if largest > 0 else 0
    low, factor = encode_e4m3_array(np.ldexp(rest, power).astype(np.float32))[None], 2.0**-power
    rest = rest - factor * e4m3_float64(low)[0]
    vectors = np.concatenate([halves, rest[None]])
    raised, size = factor * float(dot_error(low)[0]), factor * float(magnitude(low)[0])
    chain = BOUND_CHAIN_ULPS * float(FLOAT32_UNIT) * (size + raised)
    terms = dataclasses.replace(
        bound.terms,
        residual=float(np.sqrt(np.abs(vectors @ vectors.T).sum())),
        dots=bound.terms.dots + raised,
        bound_chain=bound.terms.bound_chain + chain,
        float64=bound.terms.float64 + 2.0**FLOAT64_SLACK_LOG2 * (size + raised + chain),
    )
    return dataclasses.replace(
        bound,
        columns=np.concatenate([bound.columns, low.view(bound.columns.dtype)]),
        coefficients=np.append(bound.coefficients, np.float32(factor)),
        linear=np.append(bound.linear, True),
        terms=terms,
        slack=terms.slack(),
    )


def _positive_only(row: Row, columns: int) -> RowBound:
    bound = recipe(row, columns)
    heads = [h for h in bound.certificate.retained.tolist() if h >= 0 and row.w[h] > 0]
    return _bound(row, heads, [], [] if bound.linear.any() else None, True)


def _never_linear(row: Row, columns: int) -> RowBound:
    bound = recipe(row, columns)
    certificate = dataclasses.replace(bound.certificate, aggregate=np.zeros_like(bound.certificate.aggregate))
    return round_bound(row.q, row.w, bound.linear, certificate)


def _apart(row: Row, columns: int) -> RowBound:
    bound = recipe(row, columns)
    if not bound.linear.any():
        return bound
    halves, error = _halves(row, bound)
    apart = np.sqrt(np.abs(halves @ halves.T).sum()) + np.linalg.norm(error)
    return _with_residual(bound, float(apart))


def _each_dot(row: Row, columns: int) -> RowBound:
    bound = recipe(row, columns)
    certificate = bound.certificate
    w = np.where(row.w > 0, row.w, 0.0)
    w[[h for h in certificate.retained.tolist() if h >= 0]] = 0.0
    heads = (w + certificate.aggregate.sum(axis=0)) @ dot_error(row.q)
    factors = np.where(certificate.retained >= 0, w @ certificate.projection, np.abs(bound.coefficients))
    terms = dataclasses.replace(bound.terms, dots=float(heads + factors @ dot_error(bound.columns)))
    return dataclasses.replace(bound, terms=terms, slack=terms.slack())


VARIANTS: Final[Mapping[str, Maker]] = {
    "published": published,
    "published, centred": lambda row, columns: published(row, columns, centred=True),
    "recipe": recipe,
}
ABLATIONS: Final[Mapping[str, Maker]] = {
    "published: no aggregate": lambda row, columns: published(row, columns, negatives="none"),
    "published: all negative heads aggregated": lambda row, columns: published(row, columns, negatives="all"),
    "published: no residual geometry": lambda row, columns: published(row, columns, geometry=False),
    "published: no projection": lambda row, columns: published(row, columns, projected=False),
    "recipe: negative heads count 0": _positive_only,
    "recipe: no negative head in the linear column": _never_linear,
    "recipe: no projection": _without_projection,
    "recipe: multipliers without a price": _without_price,
    "recipe: positive heads by weight and norm": _by_strength,
    "recipe: rounding beside the root": _apart,
    "recipe: every dot's own error": _each_dot,
    "recipe: winners as the sample": lambda row, columns: build_row_bound(row.q, row.w, columns, row.winners),
    "recipe: no sample": lambda row, columns: build_row_bound(row.q, row.w, columns),
}
BLOCK_NORMS: Final = "recipe: block norms"
FORMS: Final[Mapping[str, Maker]] = {
    "published: two aggregates": lambda row, columns: published(row, columns, aggregates=2),
    "published: three aggregates": lambda row, columns: published(row, columns, aggregates=3),
    "published: aggregate chosen on hard keys": lambda row, columns: published(row, columns, negatives="hard"),
    "recipe: negative heads in a relu column beside the linear one": _relu_beside_linear,
    "recipe: linear column as high and low": _high_and_low,
    BLOCK_NORMS: recipe,
    "recipe: positive heads in a zonotope's order": _by_zonotope,
}
"""Further forms; a pair of high and low columns counts two."""
MAKERS: Final[Mapping[str, Maker]] = {**VARIANTS, **ABLATIONS, **FORMS}


def _bound(row: Row, retained: list[int], relu: list[list[int]], linear: list[int] | None, projected: bool) -> RowBound:
    """Retained heads, groups of negative heads in a relu column each, and some in a linear column (if there is one)."""
    x, heads = e4m3_float64(row.q), len(retained)
    size = max(heads + len(relu) + (linear is not None), 1)
    projection, aggregate, flags = np.zeros((len(x), size)), np.zeros((size, len(x))), np.zeros(size, np.bool_)
    for g in np.flatnonzero(row.w > 0).tolist():
        if projected and heads and g not in retained:
            projection[g, :heads] = nnls(x[retained].T, x[g])[0]
    for place, group in enumerate(relu, start=heads):
        aggregate[place, group] = -row.w[group].astype(np.float64)
    if linear is not None:
        aggregate[-1, linear], flags[-1] = -row.w[linear].astype(np.float64), True
    places = np.array([*retained, *[-1] * (size - heads)], np.int64)
    return round_bound(
        row.q, row.w, flags, BoundCertificate(retained=places, projection=projection, aggregate=aggregate)
    )


def _residuals(row: Row, bound: RowBound) -> Floats:
    """``w_g r_g`` of the omitted positive heads, ``[n, 128]``."""
    x, certificate = e4m3_float64(row.q), bound.certificate
    omitted = (row.w > 0) & ~np.isin(np.arange(len(x)), certificate.retained)
    rest = x[omitted] - certificate.projection[omitted] @ e4m3_float64(bound.columns)
    return np.asarray(row.w[omitted, None] * rest)


def _with_residual(bound: RowBound, residual: float) -> RowBound:
    terms = dataclasses.replace(bound.terms, residual=residual)
    return dataclasses.replace(bound, terms=terms, slack=terms.slack())


def _halves(row: Row, bound: RowBound) -> tuple[Floats, Floats]:
    """The vectors whose signed sum is the residual: ``R_g / 2``, ``[n, 128]``, and the linear column's ``e``."""
    halves = _residuals(row, bound) / 2
    vector = halves.sum(axis=0) - bound.certificate.aggregate[-1] @ e4m3_float64(row.q)
    return halves, vector - float(bound.coefficients[-1]) * e4m3_float64(bound.columns[-1])


def _block_residuals(row: Row, bound: RowBound) -> npt.NDArray[np.float32] | None:
    """``rho_b`` of each block of 32 elements and the rest of the guard, rounded up; None without a linear column.

    ::

        sum_V |V . k| <= sum_b sum_V |V_b . k_b| <= sum_b ||k_b|| sqrt(sum_{V,V'} |V_b . V'_b|)

    The four products and sums more than those of ``G n`` cost a few units in the last place, paid for by ``2^-20``.
    """
    if not bound.linear.any():
        return None
    halves, error = _halves(row, bound)
    blocks = np.concatenate([halves, error[None]]).reshape(-1, STEPS, STEP_TERMS)
    roots = [float(np.sqrt(np.abs(blocks[:, b] @ blocks[:, b].T).sum())) for b in range(STEPS)]
    rest = float(dataclasses.replace(bound.terms, residual=0.0).slack())
    values = np.array([*roots, rest]) * (1 + 2.0**-20)
    return np.nextafter(values.astype(np.float32), np.float32(np.inf))


def centres(vectors: Floats, count: int, rounds: int = 10) -> Floats:
    """Unit centres of a spherical clustering that weighs vectors by their norms."""
    norms = np.linalg.norm(vectors, axis=1)
    vectors, norms = vectors[norms > 0], norms[norms > 0]
    unit = vectors / norms[:, None]
    found = unit[np.random.default_rng(0).permutation(len(unit))[:count]]
    for _ in range(rounds):
        nearest = (unit @ found.T).argmax(axis=1)
        sums = np.zeros_like(found)
        np.add.at(sums, nearest, vectors)
        length = np.linalg.norm(sums, axis=1)
        found = np.where(length[:, None] > 0, sums / np.maximum(length, 1e-300)[:, None], found)
    return np.asarray(found)
