"""The page and its pictures say what the records say; the committed page is the one that the records give."""

import copy
import importlib.util
import json
from pathlib import Path

import pytest

import dosa_verify
from dosa_ref.spec import BackendUnavailable, InvalidProblem
from dosa_verify.audit import evidence, page

DOCS = Path(dosa_verify.__file__).resolve().parent.parent / "docs"


@pytest.fixture(scope="module")
def records():
    return page.read_records(DOCS / "evidence")


def test_the_committed_page_is_up_to_date(records):
    assert page.render(records, "evidence") == (DOCS / "arithmetic.md").read_text(encoding="utf-8")


def test_the_records_have_their_schema_and_come_from_an_h200(records, schema_errors):
    for record in records.values():
        assert schema_errors(record) == []
        assert record["environment"]["gpu"]["compute_capability"] == "9.0"
        assert record["audit"]["outcome"] == "exact"
        assert record["audit"]["device"] == "cuda"


def test_the_recorded_counts_are_what_was_promised(records):
    audit = records["accumulation"]["audit"]
    for instruction in audit["instructions"][:2]:
        assert all(found["dots"] >= 10**9 and found["differences"] == 0 for found in instruction["families"])
        assert len(instruction["families"]) == len(audit["errors"])
    assert audit["vectors"] >= 10**4
    for found in records["scorer"]["audit"]["comparisons"]:
        assert found["scores"] >= 10**8 or found["inputs"] == "special values"
    whole = [part for part in records["fp8"]["audit"]["parts"] if part["inputs"] == 2**32]
    assert len(whole) == 1


def test_the_page_follows_the_records(records):
    changed = copy.deepcopy(records)
    comparison = changed["scorer"]["audit"]["comparisons"][0]
    comparison.update(differences=41, orders=["h = 8j + 2c + b, steps downward"], sample=4096)
    changed["accumulation"]["audit"]["instructions"][0]["fits"] = []
    text = page.render(changed, "evidence")
    assert "| 41 | h = 8j + 2c + b, steps downward (4,096 scores) |" in text
    assert "| nothing |" in text


def test_shares_count_every_pattern():
    item = {
        "implementation": "x", "kind": "overflow", "count": 5,
        "first": {"bits": "0x43e9", "decimal": ""}, "last": {"bits": "0x43ed", "decimal": ""},
    }  # fmt: skip
    negative = {**item, "first": {"bits": "0xff80", "decimal": ""}, "last": {"bits": "0xffff", "decimal": ""}}
    part = {"disagreements": [item, {**negative, "kind": "nan_bits"}, {**item, "implementation": "y"}]}
    shares = page.class_shares(part, "x", 16)
    assert set(shares) == {"overflow", "nan_bits"}
    assert sum(shares["overflow"]) * 128 == pytest.approx(5)
    assert shares["overflow"][256 + 0x87] == pytest.approx(5 / 128)
    assert shares["nan_bits"][0] == 1.0
    assert sum(shares["nan_bits"]) == 1.0


def test_a_foreign_record_is_refused(tmp_path):
    (tmp_path / "audit_fp8.json").write_text(json.dumps({"schema": "dosa.env/1"}))
    with pytest.raises(InvalidProblem, match="schema"):
        page.read_records(tmp_path)
    with pytest.raises(SystemExit) as left:
        page.main([str(tmp_path), str(tmp_path / "page.md")])
    assert "schema" in str(left.value.code)
    assert not (tmp_path / "page.md").exists()


def test_the_command_a_record_names(monkeypatch):
    words = ["audit", "fp8", "--device", "cuda", "--out", "x.json", "--commit=abc"]
    assert evidence.this_command(words) == "dosa audit fp8 --device cuda"


def test_a_record_appears_whole_or_not_at_all(tmp_path):
    with pytest.raises(ValueError, match="JSON compliant"):
        evidence.write({"x": float("nan")}, tmp_path / "record.json")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="folder"):
        evidence.write({"x": 1}, tmp_path / "folder")
    assert [file.name for file in tmp_path.iterdir()] == ["folder"]


def test_pictures(records, tmp_path, monkeypatch):
    """Where matplotlib is, the same records give the same files; elsewhere the pictures are refused by name."""
    errors, casts = records["accumulation"]["audit"], records["fp8"]["audit"]
    if importlib.util.find_spec("matplotlib") is None:
        with pytest.raises(BackendUnavailable, match="matplotlib"):
            page.draw_errors(errors, tmp_path / "errors.svg")
        return
    for name in ("a", "b"):
        page.draw_errors(errors, tmp_path / f"{name}_errors.svg")
        page.draw_casts(casts, tmp_path / f"{name}_casts.svg")
    for picture in ("errors.svg", "casts.svg"):
        assert (tmp_path / f"a_{picture}").read_bytes() == (tmp_path / f"b_{picture}").read_bytes()
        assert (tmp_path / f"a_{picture}").stat().st_size > 10_000
