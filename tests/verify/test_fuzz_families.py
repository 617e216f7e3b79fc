"""Families share the reference's scores, yet every look is judged as the reference would; searches in processes."""

import concurrent.futures
import dataclasses
import functools
import json
import os
import pickle
import subprocess
import sys
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import ClassVar

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


class Threads(concurrent.futures.ThreadPoolExecutor):
    """Threads in the place of processes, which see what a test has changed."""

    made: ClassVar[list] = []

    def __init__(self, count, _context, **options):
        super().__init__(count, **options)
        self.work = []
        self.made.append(self)

    def submit(self, work, *arguments):
        self.work.append(work)
        return super().submit(work, *arguments)


@pytest.fixture
def threads(monkeypatch):
    monkeypatch.setattr(concurrent.futures, "ProcessPoolExecutor", Threads)
    monkeypatch.setattr(Threads, "made", [])
    return Threads.made


@pytest.mark.parametrize("fault", [None, loses_the_last_place])
def test_helpers_and_warmers_change_nothing_but_who_does_it(monkeypatch, tmp_path, threads, fault):
    """With processes that prepare cases, and more that run them while the kernels are cold, the same report."""
    cases = list(runner.directed_cases())[:3]
    monkeypatch.setattr(runner, "directed_cases", lambda: iter(cases if fault is None else ()))
    monkeypatch.setattr(KernelTarget, "select", Reference(fault).select)
    monkeypatch.setattr(families, "SHRINK_SECONDS", 0.0)
    monkeypatch.setattr(families, "LOOKS", 3)
    reports, handed = [], []
    for helped, warm_after in (((), 0), ((Device.CPU,), 10**9), ((Device.CPU,), 0)):
        monkeypatch.setattr(campaign, "HELPED", helped)
        monkeypatch.setattr(campaign, "WARM_AFTER", warm_after)
        plain = campaign._take
        monkeypatch.setattr(campaign, "_take", lambda file, plain=plain: handed.append(file) or plain(file))
        threads.clear()
        reports.append(campaign.run("dense", Device.CPU, jobs=1, examples=40, seed=5, folder=tmp_path))
        if helped:
            pool, helpers, warmers = (executor.work for executor in threads)
            assert set(helpers) == {campaign._prepare_family}
            assert set(pool) | set(warmers) == {campaign._run_block}
            assert warmers or fault or not warm_after
    assert handed
    assert not any(file.exists() or file.parent.exists() for file in handed)
    if fault is None:
        assert reports[0].cases == 3 + 40
        assert reports[0].failure is None
        assert len({json.dumps({**report.to_json(), "time_s": 0}) for report in reports}) == 1
    else:
        assert all(report.failure.mismatch.fault is Fault.WRONG_INDEX for report in reports)


def test_a_search_is_warm_when_new_kernels_are_rare():
    warmth = campaign._Warmth()
    assert [warmth.is_cold(cases, kernels) for cases, kernels in ((0, 0), (500, 200), (999, 250))] == [True] * 3
    assert warmth.is_cold(1000, 300)
    assert warmth.is_cold(1600, 310)  # 110 since the 500th
    assert warmth.is_cold(2000, 311)
    assert not warmth.is_cold(2650, 320)  # 10 since the 1600th
    assert not warmth.is_cold(2650, 320)
    assert warmth.is_cold(3700, 400)


def test_kernels_are_counted_where_triton_keeps_them(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    assert campaign._compiled() == 0
    (tmp_path / "cache" / "one").mkdir(parents=True)
    assert campaign._compiled() == 1


MODULE = """
import os, signal, time
from dosa_ref.select import exact_topk

print("hello")

def dies(logits, topk):
    if logits.shape[1] > 20:
        os.kill(os.getpid(), signal.SIGKILL)
    return exact_topk(logits, topk)

def hangs(logits, topk):
    if logits.shape[1] > 20:
        time.sleep(1000)
    return exact_topk(logits, topk)

def talks(logits, topk):
    print("hello again")
    return exact_topk(logits, topk)

def promises(logits, topk):
    return exact_topk(logits, topk)

promises.promise = {"ties": "any"}
"""


@pytest.fixture
def planted(monkeypatch, tmp_path):
    """A module of another in the working directory."""
    (tmp_path / "planted.py").write_text(MODULE, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    sys.modules.pop("planted", None)


def test_a_function_that_dies_is_found_by_several_processes_too(planted, tmp_path):
    report = campaign.run("planted:dies", Device.CPU, jobs=1, examples=10, seed=3, command="dosa fuzz it")
    assert report.failure.mismatch.fault is Fault.DIED
    assert report.failure.mismatch.evidence == {"exit_code": -9}
    assert report.failure.reproducer == f"dosa fuzz it --replay {report.failure.file}"


def test_a_function_that_hangs_is_found_by_several_processes_too(planted, threads, monkeypatch):
    checker = logits_runner.IsolatedChecker
    impatient = functools.partial(checker, timeout_s=3.0)
    monkeypatch.setattr(logits_runner, "IsolatedChecker", impatient)
    report = campaign.run("planted:hangs", Device.CPU, jobs=1, examples=0)
    assert report.failure.mismatch.fault is Fault.HUNG


def test_what_a_function_prints_does_not_mix_with_the_result(planted):
    # Its module prints when it is imported, and the function at each call, in this process and in others.
    for more in ([], ["--jobs", "1"]):
        done = subprocess.run(
            [sys.executable, "-m", "dosa_verify", "fuzz", "planted:talks", "--json", "--examples", "3", *more],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "PYTHONPATH": str(Path(campaign.__file__).parents[2])},
        )
        assert json.loads(done.stdout)["outcome"] == "exact", done.stderr
        assert {"hello", "hello again"} <= set(done.stderr.splitlines())


def test_a_promise_that_is_none_is_refused(planted):
    with pytest.raises(InvalidProblem, match="promise that is dict"):
        campaign.make("planted:promises", Device.CPU)


@pytest.mark.parametrize("text", ["def f(:", "raise RuntimeError('no')", "import sys; sys.exit(0)", "1 / 0"])
def test_a_module_that_cannot_be_imported_is_the_callers_fault(planted, dosa, text):
    Path("planted.py").write_text(text, encoding="utf-8")
    code, out, err = dosa("fuzz", "planted:f")
    assert (code, out) == (2, "")
    assert "module:callable that can be imported" in err


def test_a_process_that_dies_is_a_fault(monkeypatch, tmp_path):
    class Dying(concurrent.futures.Executor):
        def __init__(self, *_arguments, **_options):
            pass

        def submit(self, *_):
            future = concurrent.futures.Future()
            future.set_exception(BrokenProcessPool("planted"))
            return future

    monkeypatch.setattr(concurrent.futures, "ProcessPoolExecutor", Dying)
    report = campaign.run("numpy.argpartition", Device.CPU, jobs=1, examples=10, seed=3, command="dosa fuzz it")
    assert report.failure.mismatch.fault is Fault.DIED
    assert report.failure.mismatch.evidence == {"seeds_under_way": [3, 3]}
    assert report.failure.reproducer.startswith("dosa fuzz it --jobs 1 --examples ")


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
