"""Properties without an oracle: they hold for the reference and for our kernels, and planted faults break each."""

import dataclasses

import numpy as np
import pytest

from dosa_ref.select import select_dense
from dosa_verify.fuzz.cases import Case, Scales, Special, Values, Windows, build
from dosa_verify.fuzz.properties import PROPERTIES, check_properties
from dosa_verify.fuzz.runner import Fault
from dosa_verify.targets.base import RunOptions, TargetResult
from dosa_verify.targets.dosa import KernelTarget

BASE = Case(seed=51, rows=3, keys=180, topk=6, values=Values.LEARNED, scales=Scales.POWERS, columns=8)
CASES = [
    BASE,
    dataclasses.replace(BASE, seed=52, values=Values.FEW_KEYS, windows=Windows.RAGGED),
    dataclasses.replace(BASE, seed=53, windows=Windows.SHORT, rows=6, specials=(Special.NAN_SCALE,)),
]


class Reference:
    """The reference as a target, with a fault on top."""

    name = "reference"
    variants = ("only",)

    def __init__(self, fault=None):
        self.fault, self.calls = fault, 0

    def select(self, problem, variant, options):
        self.calls += 1
        seen = problem if self.fault is None else self.fault(self, problem)
        got = select_dense(seen)
        return TargetResult(topk_indices=got.topk_indices, scores=got.scores)


def changed(problem, field, change):
    array = getattr(problem, field).copy()
    change(array)
    return dataclasses.replace(problem, **{field: array})


def every_second_call(self, problem):
    return changed(problem, "k_scale", lambda scale: scale.__setitem__(slice(None), scale * 3 ** (self.calls % 2)))


def looks_around(self, problem):
    """Row 0 sees one key more at its end."""
    if not problem.seq_len or problem.cu_seqlen_ke[0] >= problem.seq_len_kv:
        return problem
    return changed(problem, "cu_seqlen_ke", lambda end: end.__setitem__(0, end[0] + 1))


def first_key_is_special(self, problem):
    """Key column 10 is never found, wherever the window lies."""
    return changed(problem, "k_scale", lambda scale: scale.__setitem__(slice(10, 11), np.nan))


def first_row_is_special(self, problem):
    return changed(problem, "weights", lambda weights: weights.__setitem__(slice(0, 1), weights[:1] * 1.5))


def scores_are_clipped(self, problem):
    return changed(problem, "k_scale", lambda scale: np.minimum(scale, 1.0, out=scale))


def drops_the_last_key(self, problem):
    return changed(problem, "cu_seqlen_ke", lambda end: np.subtract(end, 1, out=end))


FAULTS = {
    "repeat": every_second_call,
    "garbage_outside": looks_around,
    "window_shift": first_key_is_special,
    "batch_position": first_row_is_special,
    "key_permutation": first_key_is_special,
    "power_of_two": scores_are_clipped,
    "split_and_merge": drops_the_last_key,
}


def problem_for(name, seed):
    case = dataclasses.replace(BASE, seed=seed, topk=40)
    if name == "garbage_outside":
        case = dataclasses.replace(case, rows=1, windows=Windows.RAGGED)
    return build(case)


@pytest.mark.parametrize("name", PROPERTIES)
def test_each_property_is_broken_by_a_fault(name):
    found = [
        check_properties(Reference(FAULTS[name]), problem_for(name, seed), "only", RunOptions(), names=(name,))
        for seed in range(60, 66)
    ]
    faults = [mismatch for mismatch in found if mismatch is not None]
    assert faults
    assert all((mismatch.fault, mismatch.variant) == (Fault.PROPERTY, name) for mismatch in faults)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"seed{case.seed}")
def test_the_reference_has_them(case):
    assert check_properties(Reference(), build(case), "only", RunOptions()) is None


@pytest.mark.parametrize("variant", ["both", "dense"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"seed{case.seed}")
def test_our_kernels_have_them(case, variant, device):
    target = KernelTarget(name="dosa", device=device)
    assert check_properties(target, build(case), variant, RunOptions(columns=8)) is None
