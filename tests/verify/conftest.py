"""The tool's tests run kernels on the GPU where there is one, else under the emulator."""

import importlib.resources
import json

import jsonschema
import pytest
import referencing

from dosa_ref.trace import save_trace
from dosa_verify import cli
from dosa_verify.audit.fp8 import audit_fp8
from dosa_verify.fuzz.cases import Case, Scales, Values, build
from dosa_verify.targets.dosa import Device, connect, cuda_is_available

DEVICE = Device.CUDA if cuda_is_available() else Device.CPU
connect(DEVICE)

SMALL_CASE = Case(seed=21, rows=4, keys=300, topk=5, values=Values.LEARNED, scales=Scales.POWERS, columns=16)


@pytest.fixture(scope="session")
def device():
    return DEVICE


@pytest.fixture(scope="session")
def audit():
    """The FP8 audit of this machine; it takes seconds, so one run serves all tests of a worker."""
    return audit_fp8()


@pytest.fixture
def trace(tmp_path):
    """A small valid trace file."""
    file = tmp_path / "trace.safetensors"
    save_trace(file, build(SMALL_CASE))
    return file


@pytest.fixture
def dosa(capsys):
    """Runs the command line in this process; gives exit code, stdout and stderr."""

    def run(*arguments):
        with pytest.raises(SystemExit) as left:
            cli.main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        return left.value.code or 0, out, err

    return run


@pytest.fixture(scope="session")
def schema_errors():
    """Lists where a record breaks the schema that it names."""
    folder = importlib.resources.files("dosa_verify") / "schemas"
    documents = [json.loads(file.read_text(encoding="utf-8")) for file in folder.iterdir()]
    resources = [(document["$id"], referencing.Resource.from_contents(document)) for document in documents]
    registry = referencing.Registry().with_resources(resources)
    by_name = {document["properties"]["schema"]["const"]: document for document in documents}

    def errors(record):
        validator = jsonschema.Draft202012Validator(by_name[record["schema"]], registry=registry)
        return [f"{error.json_path}: {error.message}" for error in validator.iter_errors(record)]

    return errors
