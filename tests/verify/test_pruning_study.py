"""The study of pruning: every bound that it compares is a sound one, and the page shows the recorded numbers."""

import dataclasses
import importlib.resources
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

import dosa_verify
from dosa_ref.bound import Coverage, check_row_bound
from dosa_ref.trace import load_trace
from dosa_verify import pruning_study

ROOT = Path(dosa_verify.__file__).resolve().parent.parent
RECORDS = sorted((ROOT / "docs" / "evidence").glob("pruning_*.json"))
BUNDLED = importlib.resources.files("dosa_verify") / "data" / "en_layer06_h64_cut.safetensors"
MAKERS = {**pruning_study.VARIANTS, **pruning_study.ABLATIONS}


@pytest.fixture(scope="module")
def task():
    (only,) = pruning_study.tasks_of(load_trace(BUNDLED).problem, 256)[:1]
    return only


def judge(row, bound):
    parts = (bound.columns, bound.coefficients, bound.linear, bound.slack, bound.certificate)
    return check_row_bound(row.q, row.w, *parts).coverage


@pytest.mark.parametrize("name", MAKERS)
def test_every_variant_is_a_sound_bound_within_its_budget(name, task):
    bound = MAKERS[name](task.row, 12)
    assert len(bound.coefficients) <= 12
    assert judge(task.row, bound) is Coverage.COVERED
    less = dataclasses.replace(bound, slack=np.float32(bound.slack * np.float32(0.8)))
    loose = name in (
        "published: no residual geometry",
        "recipe: rounding beside the root",
        "recipe: every dot's own error",
    )
    assert loose or judge(task.row, less) is Coverage.SLACK_TOO_SMALL


def test_variants_differ_from_what_they_are_compared_with(task):
    slacks = {
        name: (float(make(task.row, 12).slack), make(task.row, 12).coefficients.sum()) for name, make in MAKERS.items()
    }
    assert len(set(slacks.values())) == len(slacks)
    assert slacks["recipe"][0] < slacks["recipe: every dot's own error"][0]
    assert slacks["recipe"][0] < slacks["recipe: rounding beside the root"][0]
    assert slacks["published"][0] < slacks["published: no residual geometry"][0]


def test_survivors_hold_every_key_that_reaches_tau(task):
    bound = pruning_study.recipe(task.row, 12)
    columns, coefficients = bound.columns.astype(np.float64), bound.coefficients.astype(np.float64)
    kept = task.survivors(columns, coefficients, bound.linear, float(bound.slack))
    assert task.seed_share <= kept < 100
    assert task.survivors(columns, coefficients, bound.linear, np.inf) == 100
    assert task.survivors(columns, coefficients, bound.linear, -10 * float(bound.slack)) < task.seed_share


def test_shared_columns_keep_every_key_that_reaches_tau(task):
    problem = load_trace(BUNDLED).problem
    found = pruning_study.shared_survivors(problem, [task], 64, 32)
    assert found["price"] == 64 / 32 + 64 / 64 + 1
    assert task.seed_share <= found["survivors"] <= 100


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.name)
def test_no_recorded_bound_skips_what_reaches_tau(path):
    for case in json.loads(path.read_text(encoding="utf-8"))["cases"]:
        assert case["top_share"] <= case["seed_share"] + 1e-3
        for variant in MAKERS:
            for kept in case["survivors"][variant].values():
                assert len(kept) == case["rows"]
                assert float(np.mean(kept)) >= case["seed_share"] - 1e-3


def test_the_page_shows_the_records():
    page = (ROOT / "docs" / "pruning.md").read_text(encoding="utf-8")
    names = [name for name in page.split("`")[1].split() if name.endswith(".json")]
    records = {path.name: json.loads(path.read_text(encoding="utf-8")) for path in (ROOT / name for name in names)}
    assert set(records) == {path.name for path in RECORDS}
    assert page == pruning_study.page(records)
    changed = json.loads(json.dumps(records))
    changed[RECORDS[0].name]["cases"][0]["survivors"]["recipe"]["12"][0] += 7.0
    assert page != pruning_study.page(changed)


@pytest.mark.slow
def test_a_record_of_one_trace(tmp_path, monkeypatch):
    shutil.copy(BUNDLED, tmp_path / "cut.safetensors")
    monkeypatch.setattr(pruning_study, "COLUMNS", {64: (8, 20)})
    out, page = tmp_path / "study.json", tmp_path / "page.md"
    assert pruning_study.main(["--traces", str(tmp_path), "--topk", "256", "--out", str(out)]) == 0
    record = json.loads(out.read_text())
    assert record["schema"] == pruning_study.SCHEMA
    assert [(case["trace"], case["topk"]) for case in record["cases"]] == [("cut", 256), ("random_h64", 128)]
    assert pruning_study.main(["--page", str(page), "--out", str(out)]) == 0
    kept = np.mean(record["cases"][0]["survivors"]["recipe"]["8"])
    assert f"**{kept:.2f}**" in page.read_text()
