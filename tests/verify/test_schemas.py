"""Every JSON record has a written schema, and the document of schemas names them all."""

import importlib.resources
import json
from pathlib import Path

import jsonschema
import pytest

import dosa_verify
from dosa_verify import environment, proving, selection, verify
from dosa_verify.audit import accumulation, evidence, fp8, scorer
from dosa_verify.bench import cells
from dosa_verify.fuzz import report, runner
from dosa_verify.traces import stats

FOLDER = importlib.resources.files("dosa_verify") / "schemas"
DOCUMENTS = {file.name: json.loads(file.read_text(encoding="utf-8")) for file in FOLDER.iterdir()}
NAMES = {
    environment.SCHEMA,
    proving.SCHEMA,
    fp8.SCHEMA,
    accumulation.SCHEMA,
    scorer.SCHEMA,
    evidence.SCHEMA,
    report.SCHEMA,
    selection.SELECT_SCHEMA,
    selection.CHECK_SCHEMA,
    verify.SCHEMA,
    cells.SCHEMA,
    cells.RUN_SCHEMA,
    stats.SCHEMA,
    "dosa.trace_pack/1",
    "dosa.trace_make/1",
}


@pytest.mark.parametrize("document", DOCUMENTS.values(), ids=DOCUMENTS.keys())
def test_schemas_are_schemas(document):
    jsonschema.Draft202012Validator.check_schema(document)
    assert document["additionalProperties"] is False


def test_each_record_has_a_schema():
    assert {document["properties"]["schema"]["const"] for document in DOCUMENTS.values()} == NAMES


def test_the_document_names_each_schema():
    page = Path(dosa_verify.__file__).resolve().parent.parent / "docs" / "schemas.md"
    text = page.read_text(encoding="utf-8")
    for name in NAMES:
        assert f"`{name}`" in text
    for document in DOCUMENTS.values():
        for field in document["properties"]:
            assert f"`{field}`" in text, f"{document['$id']}: {field} is not described"


def test_a_record_with_a_field_too_many_is_refused(schema_errors):
    record = environment.environment()
    assert schema_errors(record) == []
    assert schema_errors({**record, "extra": 1}) != []
    assert schema_errors({name: value for name, value in record.items() if name != "gate"}) != []


def test_enumerations_agree_with_the_code():
    kinds = DOCUMENTS["audit_fp8.schema.json"]["properties"]["parts"]["items"]["properties"]["disagreements"]
    assert set(kinds["items"]["properties"]["kind"]["enum"]) == {*fp8.KNOWN_CLASSES, fp8.UNEXPLAINED}
    case = DOCUMENTS["fuzz.schema.json"]["properties"]["failure"]["oneOf"][1]["properties"]["case"]["oneOf"][1]
    for name, members in (
        ("values", runner.Values),
        ("weights", runner.Weights),
        ("scales", runner.Scales),
        ("windows", runner.Windows),
        ("hints", runner.Hints),
    ):
        assert set(case["properties"][name]["enum"]) == {member.value for member in members}
    assert set(case["properties"]["specials"]["items"]["enum"]) == {member.value for member in runner.Special}
