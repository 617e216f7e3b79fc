"""The fuzzer finds faults: planted ones in a target made from the reference, and planted ones in the kernels."""

import dataclasses
import json

import numpy as np
import pytest

from dosa_ref.problem import PrefillProblem
from dosa_ref.scorer import scores_sm90
from dosa_ref.select import exact_topk, select_dense
from dosa_ref.spec import PAD_INDEX, BackendUnavailable, Contract, InvalidProblem, UnprovedBound
from dosa_ref.trace import load_trace, save_trace
from dosa_verify.fuzz import runner
from dosa_verify.fuzz.cases import (
    Case,
    Hints,
    Scales,
    Special,
    Values,
    Weights,
    Windows,
    build,
    case_from_json,
    draw_hints,
)
from dosa_verify.targets.base import RunOptions, TargetResult
from dosa_verify.targets.dosa import KernelTarget


class ReferenceTarget:
    """A target that scores every key with the reference and then selects, honestly or with a planted fault."""

    name = "planted"
    variants = ("only",)

    def select(self, problem, variant, options):
        indices = np.full((problem.seq_len, problem.topk), PAD_INDEX, np.int32)
        scores = np.full((problem.seq_len, problem.topk), -np.inf, np.float32)
        for row in range(problem.seq_len):
            ks, ke = self.window(problem, row)
            part = problem.rows(row, row + 1)
            found = scores_sm90(part.q, part.weights, problem.k[ks:ke], problem.k_scale[ks:ke])[0]
            chosen = self.choose(found, problem.topk)
            chosen = chosen[chosen >= 0]
            indices[row, : len(chosen)] = chosen + ks
            scores[row, : len(chosen)] = found[chosen]
        return TargetResult(topk_indices=indices, scores=scores)

    def window(self, problem, row):
        return problem.window(row)

    def choose(self, found, topk):
        return exact_topk(found, topk)


class DropsATie(ReferenceTarget):
    """Keeps one key less when there is a tie at the K-th score: the winner with the largest index goes."""

    def choose(self, found, topk):
        chosen = exact_topk(found, topk)
        kept = chosen[chosen >= 0]
        if len(kept) == topk and topk and np.count_nonzero(found == found[kept].min()) > 1:
            return kept[:-1]
        return kept


class LargeIndexWins(ReferenceTarget):
    """Breaks ties towards the larger index."""

    def choose(self, found, topk):
        backwards = exact_topk(found[::-1].copy(), topk)
        return np.sort(len(found) - 1 - backwards[backwards >= 0])


class MissesTheLastKey(ReferenceTarget):
    """Off by one at the end of the window."""

    def window(self, problem, row):
        ks, ke = problem.window(row)
        return ks, max(ks, ke - 1)


class StartsEarly(ReferenceTarget):
    """Looks at one key before the window."""

    def window(self, problem, row):
        ks, ke = problem.window(row)
        return max(0, ks - 1) if ke > ks else ks, ke


class PrunesAtTau(ReferenceTarget):
    """Prunes with a threshold one ulp too high: keys equal to it are lost."""

    def choose(self, found, topk):
        chosen = exact_topk(found, topk)
        kept = chosen[chosen >= 0]
        if len(kept) < topk or not topk:
            return kept
        tau = np.nextafter(found[kept].min(), np.float32(np.inf))
        return kept[found[kept] >= tau]


class SelectsNaN(ReferenceTarget):
    """Takes NaN for the largest score, as a plain sort does."""

    def choose(self, found, topk):
        return exact_topk(np.where(np.isnan(found), np.float32(np.inf), found), topk)


class LosesTheSignOfZero(ReferenceTarget):
    """Gives +0.0 for -0.0: the set is right, one bit is not."""

    def select(self, problem, variant, options):
        result = super().select(problem, variant, options)
        return dataclasses.replace(result, scores=np.where(result.scores == 0, np.float32(0), result.scores))


class WrongDtype(ReferenceTarget):
    """Gives int64 indices."""

    def select(self, problem, variant, options):
        result = super().select(problem, variant, options)
        return dataclasses.replace(result, topk_indices=result.topk_indices.astype(np.int64))


class Crashes(ReferenceTarget):
    """Fails on an empty window."""

    def select(self, problem, variant, options):
        if any(problem.window(row)[0] == problem.window(row)[1] for row in range(problem.seq_len)):
            raise IndexError("reduction over nothing")
        return super().select(problem, variant, options)


class Refuses(ReferenceTarget):
    """Calls a valid problem invalid."""

    def select(self, problem, variant, options):
        if problem.seq_len == 0:
            raise InvalidProblem("q", "0 rows", "at least 1")
        return super().select(problem, variant, options)


def test_an_honest_target_passes(tmp_path):
    report = runner.run(ReferenceTarget(), examples=30, seed=3, folder=tmp_path)
    assert report.failure is None
    assert report.outcome == "exact"
    assert report.cases == report.directed + 30
    assert list(tmp_path.iterdir()) == []


def test_directed_cases_cover_every_kind_of_input():
    cases = list(runner.directed_cases())
    assert {case.values for case in cases} == set(Values)
    assert {case.weights for case in cases} == set(Weights)
    assert {case.scales for case in cases} >= {Scales.POWERS, Scales.FLOATS, Scales.EXTREME}
    assert {case.windows for case in cases} == set(Windows)
    assert {special for case in cases for special in case.specials} == set(Special)
    assert {case.hints for case in cases} == set(Hints)
    assert {case.tight_workspace for case in cases} == {True, False}
    assert {case.num_heads for case in cases} >= {20, 32, 64}
    assert {case.columns for case in cases} == {8, 16, 32}
    lengths = {end - start for case in cases for start, end in map(build(case).window, range(case.rows))}
    assert lengths >= {0, 1, 4, 5, 6, 10}  # topk is 5 where windows are short


@pytest.mark.parametrize("directed", [True, False], ids=["directed", "search"])
@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        (DropsATie, runner.Fault.WRONG_INDEX),
        (LargeIndexWins, runner.Fault.WRONG_INDEX),
        (MissesTheLastKey, runner.Fault.WRONG_INDEX),
        (PrunesAtTau, runner.Fault.WRONG_INDEX),
        (StartsEarly, runner.Fault.WRONG_INDEX),
        (SelectsNaN, runner.Fault.WRONG_INDEX),
        (LosesTheSignOfZero, runner.Fault.WRONG_SCORE),
        (WrongDtype, runner.Fault.WRONG_SHAPE),
        (Crashes, runner.Fault.CRASHED),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_planted_faults_are_found(fault, kind, directed, tmp_path):
    examples = 0 if directed else 400
    report = runner.run(fault(), examples=examples, seed=5, folder=tmp_path, directed=directed)
    assert report.outcome == "counterexample"
    if report.failure.mismatch.fault is runner.Fault.PROPERTY:
        # Garbage before a window is seen before a case in which the key there would win.
        assert fault is StartsEarly
        kind = runner.Fault.PROPERTY
    assert report.failure.mismatch.fault is kind
    # The saved file alone shows the fault again, and an honest target passes on it.
    file = report.failure.file
    assert runner.replay(fault(), file).failure.mismatch.fault is kind
    assert runner.replay(ReferenceTarget(), file).failure is None


def test_a_refused_valid_problem_is_a_fault(tmp_path):
    report = runner.run(Refuses(), examples=0, folder=tmp_path)
    assert report.failure.mismatch.fault is runner.Fault.REFUSED


def test_failures_shrink(tmp_path):
    report = runner.run(MissesTheLastKey(), examples=200, seed=1, folder=tmp_path, directed=False)
    case = report.failure.case
    assert (case.rows, case.keys) == (1, 1)
    assert case.specials == ()


def test_the_search_repeats_itself(tmp_path):
    first, second = (
        runner.run(LargeIndexWins(), examples=100, seed=9, folder=tmp_path, directed=False) for _ in range(2)
    )
    assert first.failure.case == second.failure.case


def test_a_spent_budget_is_reported(tmp_path):
    report = runner.run(ReferenceTarget(), examples=50, budget_s=0.0, folder=tmp_path)
    assert report.budget_spent
    assert report.cases == 0


def test_evidence_shows_bits_and_decimal(tmp_path, schema_errors):
    report = runner.run(LosesTheSignOfZero(), examples=0, folder=tmp_path, command="dosa fuzz planted")
    evidence = report.failure.mismatch.evidence
    assert evidence["expected_score"] == {"bits": "0x80000000", "decimal": "-0.0"}
    assert evidence["got_score"] == {"bits": "0x00000000", "decimal": "0.0"}
    assert report.failure.reproducer == f"dosa fuzz planted --replay {report.failure.file}"
    assert schema_errors(report.to_json()) == []


@pytest.mark.parametrize("error", [UnprovedBound("dot_error", "planted"), BackendUnavailable("planted")])
def test_a_target_that_cannot_run_decides_nothing(error, tmp_path):
    class Unavailable(ReferenceTarget):
        def select(self, problem, variant, options):
            raise error

    with pytest.raises(type(error)):
        runner.run(Unavailable(), examples=1, folder=tmp_path)


def test_descriptors_survive_json():
    for case in runner.directed_cases():
        assert case_from_json(json.loads(case.describe())) == case


@pytest.mark.parametrize(
    "plain",
    [[], {"seeds": 1}, {"values": "odd"}, {"rows": "x"}, {"specials": 3}, {"specials": ["no"]}, {"rows": []}],
    ids=str,
)
def test_damaged_descriptors_name_the_field(plain):
    with pytest.raises(InvalidProblem, match="case"):
        case_from_json(plain)


def test_a_damaged_descriptor_in_a_file(tmp_path, trace):
    file = tmp_path / "case.safetensors"
    save_trace(file, load_trace(trace).problem, {"case": "{"})
    with pytest.raises(InvalidProblem, match="case"):
        runner.replay(ReferenceTarget(), file)


def test_properties_are_part_of_a_run(tmp_path):
    class ChangesItsMind(ReferenceTarget):
        """Right the first time a problem is asked."""

        asked = None

        def select(self, problem, variant, options):
            again = self.asked is not None and self.asked is problem
            self.asked = problem
            result = super().select(problem, variant, options)
            return dataclasses.replace(result, scores=result.scores * np.float32(0)) if again else result

    report = runner.run(ChangesItsMind(), examples=0, folder=tmp_path)
    assert report.failure.mismatch.fault is runner.Fault.PROPERTY
    assert runner.replay(ChangesItsMind(), report.failure.file).failure.mismatch.fault is runner.Fault.PROPERTY
    honest = runner.run(ReferenceTarget(), examples=0, folder=tmp_path)
    asked = sum(count for name, count in honest.features.items() if name.startswith("property."))
    assert asked == sum(case.seed % 4 == 1 for case in runner.directed_cases()) > 3


def test_saved_options_are_used_again(tmp_path):
    class Remembers(ReferenceTarget):
        seen = None

        def select(self, problem, variant, options):
            self.seen = options
            return super().select(problem, variant, options)

    file = tmp_path / "case.safetensors"
    options = RunOptions(columns=16, strided=True, tight_workspace=True, hints=(3, -1))
    save_trace(file, build(Case(rows=1, keys=9, topk=2)), {"options": json.dumps(options.to_json())})
    target = Remembers()
    assert runner.replay(target, file).failure is None
    assert target.seen == options
    for damaged in ("{", "[]", '{"hints": 3}', '{"hints": null, "columms": 3}'):
        save_trace(file, build(Case(rows=1, keys=9, topk=2)), {"options": damaged})
        with pytest.raises(InvalidProblem, match="options"):
            runner.replay(target, file)


def test_the_same_descriptor_gives_the_same_bits():
    for case in (Case(seed=4, rows=3, keys=50, values=Values.WIDE), Case(seed=4, keys=9, specials=(Special.NAN_KEY,))):
        first, second = build(case), build(case)
        for field in dataclasses.fields(PrefillProblem):
            one, two = getattr(first, field.name), getattr(second, field.name)
            if field.name == "topk":
                assert one == two
            else:
                assert one.tobytes() == two.tobytes()


def test_hints_are_right_wrong_and_out_of_range():
    problem = build(Case(seed=8, rows=3, keys=80, topk=6, windows=Windows.CAUSAL))
    drawn = {kind: draw_hints(kind, problem, seed=1) for kind in Hints}
    assert drawn[Hints.NONE] is None
    winners = set(select_dense(problem, Contract.SM90).topk_indices[0].tolist())
    assert winners <= set(drawn[Hints.LIKELY])
    assert len(drawn[Hints.ONE]) > len(set(drawn[Hints.ONE])) == 1
    assert all(0 <= key < 80 for key in drawn[Hints.RANDOM])
    assert {-(2**31), -1, 80, 2**31 - 1} <= set(drawn[Hints.OUTSIDE])


def test_inverted_windows_are_empty_rows():
    problem = build(Case(seed=8, rows=4, keys=80, topk=6, windows=Windows.INVERTED))
    assert (problem.cu_seqlen_ke[::2] < problem.cu_seqlen_ks[::2]).any()
    assert [end > start for start, end in map(problem.window, range(4))] == [False, True, False, True]


def test_poison_lies_outside_every_window_only():
    case = Case(seed=6, rows=2, keys=60, topk=3, windows=Windows.RAGGED, specials=(Special.POISON,))
    problem = build(case)
    visible = np.zeros(60, bool)
    for row in range(2):
        start, end = problem.window(row)
        visible[start:end] = True
    assert 0 < visible.sum() < 60
    assert np.isinf(problem.k_scale[~visible]).all()
    assert np.isfinite(problem.k_scale[visible]).all()


# The kernels


def test_kernels_agree_on_a_few_cases(device):
    cases = [
        Case(
            seed=31,
            rows=2,
            keys=300,
            topk=5,
            values=Values.LEARNED,
            scales=Scales.POWERS,
            columns=16,
            hints=Hints.OUTSIDE,
            tight_workspace=True,
        ),
        Case(seed=32, rows=2, keys=200, topk=40, values=Values.FEW_KEYS, strided=True, windows=Windows.RAGGED),
    ]
    pruned = 0
    for case in cases:
        results = []
        target = KernelTarget(name="dosa", device=device)
        problem = build(case)
        assert runner.check_problem(target, problem, runner.options_of(case, problem), results.append) is None
        pruned += sum(result.prune_rate > 0 for result in results)
    assert pruned == 2  # prune and both, in the first case


@pytest.mark.parametrize("fault", ["survivors_lost", "bound_too_small"])
def test_planted_faults_in_the_pruned_path_are_found(monkeypatch, device, fault):
    """Only the pruned variants are wrong, and the comparison says so."""
    from dosa_gpu import pipeline

    if fault == "survivors_lost":
        plain = pipeline.launch_compact

        def compact(words, ks, ke, index, count, start, end):
            plain(words, ks, ke, index, count, start, end)
            count.floor_divide_(2)

        monkeypatch.setattr(pipeline, "launch_compact", compact)
    else:
        bound = pipeline.launch_bound

        def too_low(column, coefficient, slack, *rest):
            bound(column, coefficient * 0.01, slack * 0.01, *rest)

        monkeypatch.setattr(pipeline, "launch_bound", too_low)
    case = Case(seed=33, rows=3, keys=440, topk=5, values=Values.LEARNED, scales=Scales.POWERS, columns=8)
    target = KernelTarget(name="dosa", device=device)
    problem = build(case)
    mismatch = runner.check_problem(target, problem, runner.options_of(case, problem))
    assert mismatch is not None
    assert mismatch.variant in ("prune", "emit", "both")
    dense = KernelTarget(name="dense", device=device)
    assert runner.check_problem(dense, build(case), RunOptions()) is None


def test_the_reference_agrees_with_the_honest_target():
    """The oracle of this file and the oracle of the fuzzer are two ways through the reference."""
    problem = build(Case(seed=41, rows=3, keys=90, topk=7, windows=Windows.RAGGED, specials=(Special.NAN_SCALE,)))
    expected = select_dense(problem, Contract.SM90)
    result = ReferenceTarget().select(problem, "only", RunOptions())
    assert np.array_equal(result.topk_indices, expected.topk_indices)
