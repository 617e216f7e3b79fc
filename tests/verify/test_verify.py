"""The main job: what it runs, how parts add up, what it writes."""

import contextlib
import dataclasses
import json

import pytest

from dosa_ref.spec import Mode, UnprovedBound
from dosa_ref.trace import Trace, load_trace, save_trace
from dosa_verify import proving, selection, verify
from dosa_verify.audit import fp8
from dosa_verify.data.cut import cut
from dosa_verify.fuzz import runner
from dosa_verify.fuzz.cases import Case, Windows, build
from dosa_verify.report import render


@contextlib.contextmanager
def silent(_title):
    yield None


@pytest.fixture(scope="module")
def small_trace(tmp_path_factory):
    """Four rows and 2,500 keys of the bundled trace."""
    whole = load_trace(verify.BUNDLED_TRACE)
    keys = whole.problem.seq_len_kv
    part = cut(whole, (12, 16), (keys - 2500, keys), 24)
    file = tmp_path_factory.mktemp("trace") / "small.safetensors"
    save_trace(file, part.problem, part.header)
    return file


@pytest.fixture
def light(monkeypatch, audit):
    """The same job with two lemmas, two fuzz cases and an audit made before."""
    prove, cases = proving.run, list(runner.directed_cases())
    monkeypatch.setattr(proving, "run", lambda **rest: prove(["relu_lipschitz", "threshold"], **rest))
    monkeypatch.setattr(runner, "directed_cases", lambda: iter([cases[1], cases[-1]]))
    monkeypatch.setattr(verify, "audit_fp8", lambda **_options: audit)


def test_the_whole_job(light, small_trace, device, tmp_path, schema_errors):
    report = verify.run(device, progress=silent, examples=0, trace=small_trace)
    record = report.to_json()
    assert report.outcome == "exact", [part.failures for part in report.parts]
    assert schema_errors(record) == []
    assert list(record["parts"]) == [
        "prove", "audit_fp8", "fuzz", "select_base", "select_prune", "select_emit", "select_both",
    ]  # fmt: skip
    for mode in ("prune", "both"):
        stats = record["parts"][f"select_{mode}"]["record"]["select"]["stats"]
        assert all(stats["row_pruned"])
        assert stats["prune_rate"] > 0
    hashes = {
        record["parts"][f"select_{m}"]["record"]["select"]["result_sha256"] for m in ("base", "prune", "emit", "both")
    }
    assert len(hashes) == 1
    file = tmp_path / "report.json"
    verify.write(report, file)
    assert json.loads(file.read_text()) == json.loads(json.dumps(record))
    assert list(tmp_path.iterdir()) == [file]
    page = render(record)
    assert "select_both" in page
    assert "4 rows, topk 24, 4 rows pruned" in page


def test_a_part_that_cannot_run_is_undecided(light, small_trace, device, monkeypatch, schema_errors):
    def refuse(*_arguments, **_options):
        raise UnprovedBound("dot_error", "planted")

    monkeypatch.setattr(selection, "select_trace", refuse)
    report = verify.run(device, progress=silent, examples=0, trace=small_trace)
    assert report.outcome == "undecided"
    outcomes = {part.name: part.outcome for part in report.parts}
    assert outcomes["fuzz"] == "exact"
    assert outcomes["select_both"] == "undecided"
    assert "dot_error" in report.parts[-1].failures[0]
    assert schema_errors(report.to_json()) == []


def test_a_wrong_selection_is_a_counterexample(light, small_trace, device, monkeypatch):
    from dosa_verify.targets import dosa

    plain = dosa.arrays

    def wrong(selected):
        indices, scores = plain(selected)
        scores = scores.copy()
        scores[1, 0] += 1
        return indices, scores

    monkeypatch.setattr(selection.kernels, "arrays", wrong)
    report = verify.run(device, progress=silent, examples=0, trace=small_trace)
    assert report.outcome == "counterexample"
    failure = report.parts[-1].failures[0]
    assert "row 1" in failure
    assert "dosa select" in failure
    assert "dosa check" in failure


def test_a_healed_unsound_bound_is_a_counterexample(small_trace, device, monkeypatch, tmp_path):
    """The selection is right because the row was recomputed; the bound that made it necessary is still wrong."""
    plain = selection.select_trace

    def healed(*arguments, **options):
        report = plain(*arguments, **options)
        return dataclasses.replace(report, stats={**report.stats, "fallback": {"threshold_not_met": [2]}})

    monkeypatch.setattr(selection, "select_trace", healed)
    part = verify._select(small_trace, Mode.BOTH, device, silent, tmp_path)
    assert part.outcome == "counterexample"
    assert "[2]" in part.failures[0]


def test_an_exact_result_without_pruning_is_not_enough(light, device, tmp_path):
    # topk is nearly the number of keys: seeds alone are more than the row, nothing is pruned.
    whole = load_trace(verify.BUNDLED_TRACE)
    keys = whole.problem.seq_len_kv
    part = cut(whole, (14, 16), (keys - 300, keys), 290)
    file = tmp_path / "flat.safetensors"
    save_trace(file, part.problem, part.header)
    report = verify.run(device, progress=silent, examples=0, trace=file)
    outcomes = {part.name: part.outcome for part in report.parts}
    assert outcomes["select_base"] == "exact"
    assert outcomes["select_both"] == "undecided"
    assert report.outcome == "undecided"


@pytest.mark.parametrize("available", [True, False])
def test_the_audit_of_the_main_job_has_the_interpreter_where_it_is(audit, monkeypatch, available):
    asked = {}
    monkeypatch.setattr(verify.interpreter, "is_available", lambda: available)
    monkeypatch.setattr(verify, "audit_fp8", lambda **options: asked.update(options) or audit)
    verify._audit(silent)
    assert asked["interpreter"] is available


def test_an_unexplained_audit_is_a_counterexample(audit, monkeypatch):
    broken = fp8.AuditPart(
        name="planted",
        inputs=1,
        implementations=("reference", "other"),
        disagreements=(
            fp8.Disagreement(
                implementation="other", kind="unexplained", count=1,
                first={"bits": "0x0", "decimal": "0"}, last={"bits": "0x0", "decimal": "0"},
                reference={"bits": "0x0", "decimal": "0"}, got={"bits": "0x1", "decimal": "1"},
            ),
        ),
    )  # fmt: skip
    report = fp8.AuditReport(parts=(*audit.parts, broken), time_s=0.0)
    monkeypatch.setattr(verify, "audit_fp8", lambda **_options: report)
    part = verify._audit(silent)
    assert part.outcome == "counterexample"
    assert part.failures == ["1 unexplained disagreements; dosa audit fp8"]


@pytest.mark.parametrize(
    ("outcomes", "expected"),
    [
        (["exact", "exact"], "exact"),
        (["exact", "undecided"], "undecided"),
        (["undecided", "counterexample", "exact"], "counterexample"),
        (["counterexample", "undecided"], "counterexample"),
    ],
)
def test_the_worst_part_decides(outcomes, expected, device):
    parts = [verify.Part(name="p", outcome=word, did="", failures=[], record=None, time_s=0.0) for word in outcomes]
    report = verify.VerifyReport(device=device, parts=parts, environment={}, started="", time_s=0.0)
    assert report.outcome == expected


def test_the_bundled_trace_is_small_and_real():
    trace = load_trace(verify.BUNDLED_TRACE)
    assert verify.BUNDLED_TRACE.stat().st_size <= 3 * 2**20
    assert trace.header["text"] == "Jane Austen novels (public domain)"
    assert (trace.problem.seq_len, trace.problem.seq_len_kv, trace.problem.num_heads) == (16, 16384, 64)


def test_a_cut_changes_no_value():
    problem = build(Case(seed=5, rows=9, keys=2000, topk=4, windows=Windows.RAGGED))
    trace = Trace(problem=problem, header={"first_key_position": "70", "first_query_position": "800"})
    part = cut(trace, (3, 9), (500, 1500), 9)
    assert part.problem.topk == 9
    assert part.problem.q.tobytes() == problem.q[3:9].tobytes()
    assert part.problem.k.tobytes() == problem.k[500:1500].tobytes()
    assert part.problem.k_scale.tobytes() == problem.k_scale[500:1500].tobytes()
    windows = [part.problem.window(row) for row in range(6)]
    for row, (start, end) in enumerate(windows):
        visible = set(range(*problem.window(row + 3))) & set(range(500, 1500))
        assert {key + 500 for key in range(start, end)} == visible
    assert any(0 < start < end < 1000 for start, end in windows)
    assert (part.header["first_key_position"], part.header["first_query_position"]) == ("570", "803")
