"""Inputs shared by the tests of the reference: small descriptions in, arrays out."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from scipy.optimize import nnls

from dosa_ref.bound import RowBound, build_row_bound, round_bound
from dosa_ref.guard import BoundCertificate, e4m3_float64
from dosa_ref.problem import PrefillProblem

FP8 = ml_dtypes.float8_e4m3fn


def encode(values: Any) -> np.ndarray:
    """E4M3 array of values that are clamped first."""
    return np.clip(np.asarray(values, np.float32), -448, 448).astype(FP8)


def random_codes(rng: np.random.Generator, shape: tuple[int, ...], family: str) -> np.ndarray:
    """uint8 E4M3 codes of one of the families that tell accumulation models apart."""
    codes = rng.integers(0, 256, shape, dtype=np.uint8)
    if family == "all_patterns":
        return codes
    codes[(codes & 0x7F) == 0x7F] = 0x3C
    match family:
        case "finite":
            return codes
        case "subnormal":
            return codes & 0x87
        case "sparse":
            return np.where(rng.random(shape) < 0.9, codes & 0x80, codes)
        case "gaussian":
            return encode(rng.standard_normal(shape) * 2.0 ** rng.integers(-3, 6)).view(np.uint8)
        case "one_huge":
            small = encode(rng.standard_normal(shape) * 0.1).view(np.uint8)
            small[..., rng.integers(0, shape[-1])] = 0x7E
            return small
        case "cancelling":
            half = codes[..., : shape[-1] // 2]
            return np.concatenate([half, half ^ 0x80], axis=-1)
    raise AssertionError(family)


FAMILIES = ("all_patterns", "finite", "subnormal", "sparse", "gaussian", "one_huge", "cancelling")


def make_problem(
    seed: int = 0,
    rows: int = 3,
    keys: int = 200,
    heads: int = 32,
    topk: int = 16,
    rank: int = 6,
    windows: list[tuple[int, int]] | None = None,
    integer_values: bool = False,
) -> PrefillProblem:
    """A problem with correlated heads and keys, so that bounds have something to bite on."""
    rng = np.random.default_rng(seed)
    basis = rng.standard_normal((rank, 128))
    q = rng.standard_normal((rows, heads, rank)) @ basis + 0.2 * rng.standard_normal((rows, heads, 128))
    k = rng.standard_normal((keys, rank)) @ basis + 0.3 * rng.standard_normal((keys, 128))
    k_scale = np.exp2(rng.integers(-3, 2, keys)).astype(np.float32)
    weights = rng.standard_normal((rows, heads)).astype(np.float32)
    if integer_values:  # few distinct scores: many ties
        q, k = np.sign(q) * (rng.random(q.shape) < 0.05), np.sign(k) * (rng.random(k.shape) < 0.05)
        k_scale = np.ones(keys, np.float32)
        weights = np.round(weights).astype(np.float32)
    if windows is None:
        windows = [(0, keys)] * rows
    return PrefillProblem(
        q=encode(8 * q if not integer_values else q),
        k=encode(8 * k if not integer_values else k),
        k_scale=k_scale,
        weights=weights,
        cu_seqlen_ks=np.array([w[0] for w in windows], np.int32),
        cu_seqlen_ke=np.array([w[1] for w in windows], np.int32),
        topk=topk,
    )


def form_bound(
    q: np.ndarray, w: np.ndarray, retained: list[int], relu: list[int], linear: list[int] | None
) -> RowBound:
    """A bound of any allowed form: retained heads, negative heads aggregated in a relu column and in a linear one.

    ``relu`` may be empty and ``linear`` None; there is no such column then.
    """
    x, size = e4m3_float64(q), len(retained) + bool(relu) + (linear is not None)
    projection, aggregate, is_linear = np.zeros((len(w), size)), np.zeros((size, len(w))), np.zeros(size, bool)
    for g in np.flatnonzero(w > 0):
        if g not in retained and retained:
            projection[g, : len(retained)] = nnls(x[retained].T, x[g])[0]
    if relu:
        aggregate[len(retained), relu] = -w[relu].astype(np.float64)
    if linear is not None:
        aggregate[-1, linear], is_linear[-1] = -w[linear].astype(np.float64), True
    certificate = BoundCertificate(
        retained=np.array([*retained, *[-1] * (size - len(retained))], np.int64),
        projection=projection,
        aggregate=aggregate,
    )
    return round_bound(q, w, is_linear, certificate)


def some_form(q: np.ndarray, w: np.ndarray, kept: int, form: int) -> RowBound:
    """One of four forms: the recipe's, or ``kept`` positive heads and an aggregate, a linear column, or both."""
    if form == 0:
        return build_row_bound(q, w, kept + 1)
    positive, negative = np.flatnonzero(w > 0).tolist(), np.flatnonzero(w < 0).tolist()
    relu, linear = {1: (negative, None), 2: ([], negative), 3: (negative[::2], negative[1::2])}[form]
    return form_bound(q, w, positive[:kept], relu, linear)
