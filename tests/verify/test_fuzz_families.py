"""Families share the reference's scores, yet every look is judged as the reference would; searches in processes."""

import dataclasses
import pickle
import sys
from pathlib import Path

import numpy as np
import pytest

from dosa_ref.select import exact_topk, select_dense
from dosa_ref.spec import Contract, InvalidProblem
from dosa_verify.fuzz import campaign, families, logits_runner, runner
from dosa_verify.fuzz.cases import Case, Windows, build
from dosa_verify.fuzz.report import Fault
from dosa_verify.targets import logits as targets
from dosa_verify.targets.base import TargetResult
from dosa_verify.targets.dosa import PATHS, TARGET_NAMES, Device, KernelTarget


class Reference:
    """The reference as a target, with its answer changed."""

    name = "planted"
    variants = ("one", "two")

    def __init__(self, change=None):
        self.change = change

    def select(self, problem, variant, options):
        expected = select_dense(problem, Contract.SM90)
        indices, scores = expected.topk_indices.copy(), expected.scores.copy()
        if self.change is not None:
            indices, scores = self.change(problem, indices, scores)
        return TargetResult(topk_indices=indices, scores=scores)


def loses_the_last_place(problem, indices, scores):
    indices[:, -1:], scores[:, -1:] = -1, -np.inf
    return indices, scores


def loses_a_sign(problem, indices, scores):
    return indices, scores + np.float32(0)


def takes_the_wrong_key(problem, indices, scores):
    """Only in rows that start unaligned, as a vector load does."""
    for row in range(len(indices)):
        if problem.cu_seqlen_ks[row] % 4 == 3 and indices.shape[1] and indices[row, 0] > 0:
            indices[row, 0] -= 1
    return indices, scores


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (loses_the_last_place, Fault.WRONG_INDEX),
        (loses_a_sign, Fault.WRONG_SCORE),
        (takes_the_wrong_key, Fault.WRONG_INDEX),
    ],
)
def test_faults_are_found_made_small_and_saved(change, fault, tmp_path, schema_errors):
    report = families.run(Reference(change), examples=20 * families.LOOKS, folder=tmp_path, command="dosa fuzz planted")
    assert report.outcome == "counterexample"
    assert report.failure.mismatch.fault is fault
    assert schema_errors(report.to_json()) == []
    file = report.failure.file
    assert report.failure.reproducer == f"dosa fuzz planted --replay {file}"
    assert runner.replay(Reference(change), Path(file)).failure.mismatch.fault is fault
    assert runner.replay(Reference(), Path(file)).failure is None


def test_an_honest_target_passes_and_everything_is_counted(schema_errors):
    report = families.run(Reference(), examples=3 * families.LOOKS - 5, seed=4)
    assert report.outcome == "exact"
    assert report.cases == report.calls == 3 * families.LOOKS - 5
    assert report.features["variant.one"] + report.features["variant.two"] == report.cases
    assert sum(count for name, count in report.features.items() if name.startswith("property.")) == 3
    assert {f"windows.{kind.value}" for kind in Windows} <= set(report.features)
    assert schema_errors(report.to_json()) == []


def test_it_does_not_matter_who_prepares():
    alone = families.run(Reference(), examples=families.LOOKS, seed=9)
    looks = families.prepare(9, Reference.variants, families.LOOKS, families.SMALL_KEYS)
    helped = families.run(Reference(), examples=families.LOOKS, seed=9, prepared=pickle.loads(pickle.dumps(looks)))
    assert dataclasses.replace(helped, time_s=0) == dataclasses.replace(alone, time_s=0)


def test_looks_at_a_million_keys_are_judged_too(monkeypatch):
    monkeypatch.setattr(families, "MILLION", 20_000)
    monkeypatch.setattr(families, "MEDIUM_KEYS", 9_000)
    sizes = [look.problem.seq_len_kv for look in families.prepare(0, ("one",), families.LOOKS, 20_000)]
    assert 20_000 - 77 <= max(sizes) <= 20_000
    assert any(9_000 - 77 <= size <= 9_000 for size in sizes)
    assert max(families.prepare(0, ("one",), families.LOOKS, 3000), key=lambda look: look.problem.seq_len_kv)


def test_scores_that_are_not_the_references_are_noticed(monkeypatch):
    monkeypatch.setattr(families, "exact_topk", lambda scores, topk: exact_topk(-scores, topk))
    with pytest.raises(AssertionError):
        families.prepare(2, ("one",), 1, 3000)


@pytest.mark.parametrize("windows", Windows)
def test_without_keys_takes_them_from_the_windows(windows):
    problem = build(Case(seed=3, rows=9, keys=40, topk=4, windows=windows))
    marked = np.arange(40, dtype=np.float32) + 1
    problem = dataclasses.replace(problem, k_scale=marked)
    for start, end in ((0, 7), (12, 30), (33, 40), (0, 40)):
        smaller = families.without_keys(problem, start, end)
        for row in range(9):
            before = problem.k_scale[slice(*problem.window(row))]
            after = smaller.k_scale[slice(*smaller.window(row))]
            assert after.tolist() == [mark for mark in before if not start < mark <= end]


def test_our_targets_follow_the_paths():
    assert ("dosa", *PATHS) == TARGET_NAMES
    assert {"auto", "dense"} <= set(PATHS)
    every = KernelTarget(name="dosa", device=Device.CPU).all_variants
    assert set(every) >= {"base", "both", *PATHS}
    assert set(every) - set(KernelTarget(name="dosa", device=Device.CPU).variants) == {"auto"}
    assert all(KernelTarget(name=path, device=Device.CPU).variants == (path,) for path in PATHS)


def test_our_kernels_on_a_family(device):
    report = families.run(KernelTarget(name="dosa", device=device), examples=3, seed=2, max_keys=300)
    assert report.failure is None, report.failure
    assert report.cases == 3


# Several processes


def test_the_number_of_processes_does_not_matter(monkeypatch, tmp_path):
    monkeypatch.setattr(campaign, "LOGITS_BLOCK", 40)
    one, two = (
        campaign.run("numpy.argpartition", Device.CPU, jobs=jobs, examples=100, seed=5, folder=tmp_path)
        for jobs in (1, 2)
    )
    assert one.failure is None
    assert one.cases == one.directed + 100
    assert dataclasses.replace(one, time_s=0) == dataclasses.replace(two, time_s=0)


MODULE = """
import os, signal
from dosa_ref.select import exact_topk

def dies(logits, topk):
    if logits.shape[1] > 20:
        os.kill(os.getpid(), signal.SIGKILL)
    return exact_topk(logits, topk)
"""


def test_a_process_that_dies_is_a_fault(monkeypatch, tmp_path, dosa):
    (tmp_path / "planted_deaths.py").write_text(MODULE, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    report = campaign.run("planted_deaths:dies", Device.CPU, jobs=1, examples=10, seed=3, command="dosa fuzz it")
    assert report.failure.mismatch.fault is Fault.DIED
    assert report.failure.reproducer.startswith("dosa fuzz it --jobs 1 --examples ")
    sys.modules.pop("planted_deaths", None)
    sys.path[:] = [place for place in sys.path if place != str(tmp_path)]


def test_whole_selections_have_nothing_to_waive(dosa):
    assert dosa("fuzz", "dosa", "--waive", "ties", "--examples", 0)[0] == 2
    assert dosa("fuzz", "numpy.argpartition", "--waive", "everything")[0] == 2
    with pytest.raises(InvalidProblem, match="waive"):
        campaign.make("dense", Device.CPU, ("nans",))


def test_a_waived_item_does_not_count(tmp_path):
    target = targets.make("numpy.argpartition", Device.CPU)
    strict = dataclasses.replace(target, promise=dataclasses.replace(target.promise, ties=targets.Ties.LOWEST_INDEX))
    assert logits_runner.run(strict, examples=0, folder=tmp_path).failure is not None
    waived = dataclasses.replace(strict, promise=targets.waive(strict.promise, ("ties",)))
    assert logits_runner.run(waived, examples=0, folder=tmp_path).failure is None
