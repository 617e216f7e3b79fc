"""The fuzzer of top-K kernels: planted faults of every kind are found, honest kernels pass, crashes are survived."""

import dataclasses
import json
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dosa_ref.scorer import scores_sm90
from dosa_ref.select import exact_topk
from dosa_ref.spec import BackendUnavailable, InvalidProblem
from dosa_ref.trace import LogitsProblem, load_logits, save_logits
from dosa_verify.fuzz import logits, logits_runner
from dosa_verify.fuzz.logits import LogitsCase, Planted, RowWindows, Scores, build, lift
from dosa_verify.fuzz.runner import Fault
from dosa_verify.targets import logits as targets
from dosa_verify.targets.dosa import Device
from dosa_verify.targets.logits import FunctionTarget, NaNs, Order, Promise, Ties


def by_row(choose):
    """A kernel from a function of one row."""

    def kernel(rows, topk):
        out = np.full((len(rows), topk), -1, np.int32)
        for row, scores in enumerate(rows):
            chosen = choose(scores, topk)
            out[row, : len(chosen)] = chosen
        return out

    return kernel


def best(scores, topk):
    chosen = exact_topk(scores, topk)
    return chosen[chosen >= 0]


def stable(scores, topk):
    return np.argsort(-scores, kind="stable")[:topk]


def high_index(scores, topk):
    return np.sort(len(scores) - 1 - best(scores[::-1].copy(), topk))


def strictly_above(scores, topk):
    """Drops ties at the K-th score."""
    chosen = best(scores, topk)
    return chosen[scores[chosen] > scores[chosen].min()] if len(chosen) == topk and topk else chosen


def small_buffer(scores, topk):
    """Keeps at most 2 K candidates of the top bin of half-precision keys, first come."""
    half = scores.astype(np.float16)
    cut = half[best(half.astype(np.float32), topk)].min() if len(best(half.astype(np.float32), topk)) else 0
    candidates = np.flatnonzero(half >= cut)[: 2 * topk]
    return candidates[best(scores[candidates], topk)]


def signed_zeros(scores, topk):
    """Puts -0.0 below +0.0, as radix keys do."""
    code = scores.view(np.int32).astype(np.int64)
    order = np.where(code < 0, -(code & 0x7FFFFFFF) - 1, code)
    valid = np.flatnonzero(~np.isnan(scores))
    return np.sort(valid[np.argsort(-order[valid], kind="stable")[:topk]])


def forgets_infinity(scores, topk):
    finite = np.flatnonzero(np.isfinite(scores))
    return finite[best(scores[finite], topk)]


def repeats(scores, topk):
    chosen = best(scores, topk)
    return np.repeat(chosen[:1], len(chosen)) if len(chosen) > 1 else chosen


def out_of_row(scores, topk):
    chosen = best(scores, topk)
    return np.where(chosen == len(scores) - 1, len(scores), chosen)


def holes(rows, topk):
    out = by_row(best)(rows, topk)
    return np.ascontiguousarray(out[:, ::-1])


def wide(rows, topk):
    return by_row(best)(rows, topk).astype(np.int64)


def writes_input(rows, topk):
    out = by_row(best)(rows, topk)
    for row in range(len(rows)):
        rows[row][out[row][out[row] >= 0]] = -np.inf
    return out


def fails_on_nothing(rows, topk):
    if rows.shape[1] == 0:
        raise ZeroDivisionError("empty row")
    return by_row(best)(rows, topk)


class Flips:
    """Takes the other end of a tie on every second call."""

    def __init__(self):
        self.calls = 0

    def __call__(self, rows, topk):
        self.calls += 1
        return by_row(best if self.calls % 2 else high_index)(rows, topk)


FAULTS = {
    "high_index": (by_row(high_index), Promise(), Fault.WRONG_SET),
    "ties_dropped": (by_row(strictly_above), Promise(), Fault.WRONG_COUNT),
    "small_buffer": (by_row(small_buffer), Promise(nans=NaNs.UNDEFINED, infinities=False), Fault.WRONG_SET),
    "nan_first": (by_row(stable), Promise(), Fault.WRONG_COUNT),
    "signed_zeros": (by_row(signed_zeros), Promise(), Fault.WRONG_SET),
    "forgets_infinity": (by_row(forgets_infinity), Promise(), (Fault.WRONG_SET, Fault.WRONG_COUNT)),
    "repeats": (by_row(repeats), Promise(), Fault.DUPLICATE),
    "out_of_row": (by_row(out_of_row), Promise(), Fault.INVALID_INDEX),
    "padding_first": (holes, Promise(), Fault.WRONG_ORDER),
    "not_ascending": (by_row(stable), Promise(order=Order.ASCENDING_INDEX, nans=NaNs.UNDEFINED), Fault.WRONG_ORDER),
    "not_by_score": (by_row(best), Promise(order=Order.DESCENDING_SCORE), Fault.WRONG_ORDER),
    "int64": (wide, Promise(), Fault.WRONG_SHAPE),
    "writes_input": (writes_input, Promise(), Fault.OVERWRITTEN),
    "fails_on_nothing": (fails_on_nothing, Promise(), Fault.CRASHED),
    "flips": (Flips(), Promise(ties=Ties.ANY), Fault.NONDETERMINISTIC),
    "accepts_nan": (by_row(best), Promise(nans=NaNs.REJECT), Fault.ACCEPTED_NAN),
}


@pytest.mark.parametrize("directed", [True, False], ids=["directed", "search"])
@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults_are_found(name, directed, tmp_path, schema_errors):
    function, promise, faults = FAULTS[name]
    target = FunctionTarget(name=name, function=function, promise=promise)
    if name == "small_buffer" and not directed:
        pytest.skip("needs the long rows of the directed cases")
    report = logits_runner.run(target, examples=0 if directed else 400, seed=2, folder=tmp_path, directed=directed)
    assert report.failure is not None
    assert report.failure.mismatch.fault in (faults if isinstance(faults, tuple) else (faults,))
    assert schema_errors(report.to_json()) == []
    assert logits_runner.replay(target, report.failure.file).failure.mismatch.fault is report.failure.mismatch.fault
    honest = FunctionTarget(name="honest", function=by_row(best))
    assert logits_runner.replay(honest, report.failure.file).failure is None


@pytest.mark.parametrize(
    "promise",
    [Promise(), Promise(order=Order.ASCENDING_INDEX), Promise(ties=Ties.ANY), Promise(short_rows=False, min_topk=7)],
    ids=["set", "ascending", "any", "limits"],
)
def test_an_honest_kernel_passes(promise, tmp_path, schema_errors):
    target = FunctionTarget(name="honest", function=by_row(best), promise=promise)
    report = logits_runner.run(target, examples=120, folder=tmp_path)
    assert report.outcome == "exact"
    assert report.cases == report.directed + 120
    assert schema_errors(report.to_json()) == []
    assert list(tmp_path.iterdir()) == []


def test_a_promise_of_any_tie_is_no_promise_of_any_score(tmp_path):
    """High indices among ties pass without a tie rule; a worse score does not."""
    promise = Promise(ties=Ties.ANY)
    target = FunctionTarget(name="high", function=by_row(high_index), promise=promise)
    assert logits_runner.run(target, examples=60, folder=tmp_path).failure is None

    def worse(scores, topk):
        chosen = best(scores, topk)
        left = np.setdiff1d(np.flatnonzero(~np.isnan(scores)), chosen)
        return np.append(chosen[:-1], left[-1]) if len(chosen) and len(left) else chosen

    target = FunctionTarget(name="worse", function=by_row(worse), promise=promise)
    assert logits_runner.run(target, examples=60, folder=tmp_path).failure.mismatch.fault is Fault.WRONG_SET


def test_refusing_nan_keeps_the_promise(tmp_path):
    def kernel(rows, topk):
        if np.isnan(rows).any():
            raise ValueError("NaN")
        return by_row(best)(rows, topk)

    target = FunctionTarget(name="strict", function=kernel, promise=Promise(nans=NaNs.REJECT))
    assert logits_runner.run(target, examples=60, folder=tmp_path).failure is None


def test_failures_of_directed_cases_shrink(tmp_path):
    target = FunctionTarget(name="high", function=by_row(high_index))
    case = logits_runner.run(target, examples=1, folder=tmp_path).failure.case
    assert (case.rows, case.columns, case.topk) == (1, 2, 1)


def test_public_libraries_keep_their_promises(tmp_path):
    for name in ("torch.topk", "numpy.argpartition"):
        report = logits_runner.run(targets.make(name, Device.CPU), examples=60, folder=tmp_path)
        assert report.failure is None, report.failure
        # By the shared tie-break they would fail.
        strict = dataclasses.replace(targets.make(name, Device.CPU), promise=Promise(short_rows=False))
        assert logits_runner.run(strict, examples=60, folder=tmp_path).failure is not None


def test_our_top_k_kernel(device, tmp_path):
    target = targets.make("topk", device)
    for case in list(logits.directed_cases(7))[::3]:
        problem = build(case)
        assert logits_runner.check_logits(target, problem) is None, case


def test_a_store_beyond_the_output_is_seen(device, monkeypatch):
    from dosa_gpu.kernels import topk as kernel

    plain = kernel.launch_topk

    def beyond(*arguments):
        plain(*arguments)
        arguments[-1][0].as_strided((1,), (1,), arguments[-1][0].storage_offset() - 1).fill_(0)

    monkeypatch.setattr(kernel, "launch_topk", beyond)
    mismatch = logits_runner.check_logits(targets.make("topk", device), build(LogitsCase(columns=20, topk=3)))
    assert mismatch.fault is Fault.OVERWRITTEN


@pytest.mark.parametrize("scores", [kind for kind in Scores if kind is not Scores.BITS])
def test_lifted_rows_have_their_scores_bit_by_bit(scores):
    problem = build(LogitsCase(seed=9, rows=3, columns=50, topk=5, scores=scores, windows=RowWindows.RAGGED))
    lifted = lift(problem)
    for row in range(3):
        start, end = problem.window(row)
        ks, ke = lifted.window(row)
        assert (ks, ke) == (row * 50 + start, row * 50 + end)
        part = lifted.rows(row, row + 1)
        got = scores_sm90(part.q, part.weights, lifted.k[ks:ke], lifted.k_scale[ks:ke])[0]
        want = problem.logits[row, start:end] + np.float32(0)  # -0.0 is lifted to +0.0
        assert got.tobytes() == want.tobytes()


def test_nan_cannot_be_lifted():
    with pytest.raises(InvalidProblem, match="logits"):
        lift(build(LogitsCase(columns=9, planted=(Planted.NAN,))))


@pytest.mark.parametrize("variant", ["both", "dense"])
def test_the_whole_selection_on_lifted_rows(device, variant):
    target = targets.make(f"lifted.{variant}", device)
    for scores in (Scores.TIE_AT_K, Scores.EQUAL_22, Scores.SUBNORMAL):
        case = LogitsCase(seed=3, rows=2, columns=90, topk=7, scores=scores, windows=RowWindows.CAUSAL)
        assert logits_runner.check_logits(target, build(case)) is None
    assert logits_runner.check_logits(target, build(dataclasses.replace(case, planted=(Planted.NAN,)))) is None


MODULE = """
import os, signal, time
import numpy as np
from dosa_ref.select import exact_topk

def honest(logits, topk):
    return exact_topk(logits, topk)

def dies(logits, topk):
    if logits.shape[1] > 20:
        os.kill(os.getpid(), signal.SIGSEGV)
    return exact_topk(logits, topk)

def hangs(logits, topk):
    time.sleep(60)

number = 3
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "planted_kernels.py").write_text(MODULE, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    yield "planted_kernels"
    sys.modules.pop("planted_kernels", None)
    sys.path[:] = [place for place in sys.path if place != str(tmp_path)]


def test_the_command_line_fuzzes_a_users_function(module, dosa, schema_errors):
    code, out, _ = dosa("fuzz", f"{module}:honest", "--examples", 5, "--budget", "5m", "--json")
    assert code == 0
    record = json.loads(out)
    assert schema_errors(record) == []
    assert record["promise"]["ties"] == "lowest_index"


def test_a_kernel_that_dies_is_reported_not_lost(module, dosa):
    code, out, _ = dosa("fuzz", f"{module}:dies", "--examples", 0, "--json")
    assert code == 1
    failure = json.loads(out)["failure"]
    assert (failure["fault"], failure["evidence"]) == ("died", {"exit_code": -11})
    assert dosa("fuzz", f"{module}:dies", "--replay", failure["file"])[0] == 1
    assert dosa("fuzz", f"{module}:honest", "--replay", failure["file"])[0] == 0


def test_a_kernel_that_hangs_is_ended(module):
    checker = logits_runner.IsolatedChecker(f"{module}:hangs", Device.CPU, timeout_s=1.0)
    assert checker(build(LogitsCase(columns=5))).fault is Fault.HUNG


@pytest.mark.parametrize("name", ["{}:nothing", "no_such_module:f", "{}:number", "nobody"])
def test_targets_that_are_none_are_refused(module, name, dosa):
    assert dosa("fuzz", name.format(module))[0] == 2


@pytest.mark.parametrize("budget", ["x", "-1", "5y", "inf"])
def test_durations_that_are_none_are_refused(budget, dosa):
    assert dosa("fuzz", "numpy.argpartition", f"--budget={budget}")[0] == 2


@pytest.mark.parametrize("name", ["flashinfer", "sgl_kernel"])
def test_gpu_libraries_are_unavailable_on_a_cpu(name):
    with pytest.raises(BackendUnavailable, match=name):
        targets.make(name, Device.CPU)


def test_drawn_cases_have_every_kind_and_find_faults(tmp_path):
    cases = list(logits.draw_cases(3, 400, min_topk=5, max_topk=30))
    assert cases == list(logits.draw_cases(3, 400, min_topk=5, max_topk=30))
    assert {case.scores for case in cases} == set(Scores)
    assert {case.windows for case in cases} == set(RowWindows)
    assert {kind for case in cases for kind in case.planted} == set(Planted)
    assert {case.columns - case.topk for case in cases} >= {-1, 0, 1}
    assert {case.topk for case in cases} <= set(range(5, 31))
    target = FunctionTarget(name="high", function=by_row(high_index))
    report = logits_runner.run(target, examples=200, folder=tmp_path, directed=False, drawn=True)
    assert report.failure.mismatch.fault is Fault.WRONG_SET
    assert (report.failure.case.rows, report.failure.case.topk) == (1, 1)
    honest = FunctionTarget(name="best", function=by_row(best))
    report = logits_runner.run(honest, examples=200, directed=False, drawn=True)
    assert (report.cases, report.directed, report.failure) == (200, 0, None)


def test_descriptors_survive_json():
    for case in logits.directed_cases(10):
        assert logits.case_from_json(json.loads(case.describe())) == case


@pytest.mark.parametrize("plain", [[], {"keys": 1}, {"scores": "odd"}, {"rows": "x"}, {"planted": 3}], ids=str)
def test_damaged_descriptors_name_the_field(plain):
    with pytest.raises(InvalidProblem, match="case"):
        logits.case_from_json(plain)


def test_directed_cases_cover_every_kind():
    cases = list(logits.directed_cases(10))
    assert {case.scores for case in cases} == set(Scores)
    assert {case.windows for case in cases} == set(RowWindows)
    assert {kind for case in cases for kind in case.planted} == set(Planted)


@settings(max_examples=60, deadline=None, database=None)
@given(logits.logits_cases(rows=3, columns=80, max_topk=12), st.data())
def test_what_no_row_sees_is_poison_and_bits_repeat(case, data):
    problem, again = build(case), build(case)
    assert problem.logits.tobytes() == again.logits.tobytes()
    for row in range(case.rows):
        start, end = problem.window(row)
        outside = np.delete(problem.logits[row], slice(start, end))
        assert (np.isnan(outside) | (outside == logits.POISON_SCORE)).all()


def test_leading_bits_are_equal_as_named():
    for kind, bits in ((Scores.EQUAL_10, 10), (Scores.EQUAL_12, 12), (Scores.EQUAL_22, 22)):
        row = build(LogitsCase(seed=1, columns=500, scores=kind)).logits[0]
        assert len(np.unique(row.view(np.uint32) >> (32 - bits))) == 1
        assert len(np.unique(row)) > 100
    half = build(LogitsCase(seed=1, columns=500, scores=Scores.HALF_BIN)).logits[0]
    assert (len(np.unique(half)), len(np.unique(half.astype(np.float16)))) == (500, 1)


def test_logits_files(tmp_path, trace):
    problem = build(LogitsCase(seed=2, rows=3, columns=9, topk=2, strided=True, planted=(Planted.NAN,)))
    file = tmp_path / "rows.safetensors"
    save_logits(file, problem, {"note": "x"})
    again, header = load_logits(file)
    assert (header["kind"], header["note"], again.topk) == ("logits", "x", 2)
    assert again.logits.tobytes() == np.ascontiguousarray(problem.logits).tobytes()
    with pytest.raises(InvalidProblem, match="schema"):
        load_logits(trace)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("logits", np.zeros((1, 3), np.float64)),
        ("row_start", np.array([-1], np.int32)),
        ("row_end", np.array([4], np.int32)),
        ("row_end", np.array([1, 1], np.int32)),
        ("topk", -1),
    ],
)
def test_damaged_rows_name_the_field(field, value):
    good = build(LogitsCase(columns=3))
    with pytest.raises(InvalidProblem, match=field):
        LogitsProblem(**{name: value if name == field else getattr(good, name) for name in LogitsProblem.__slots__})
