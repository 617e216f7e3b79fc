"""A wheel built here and used elsewhere: the package data is in it, the gate and the prover work from it."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import dosa_verify

ROOT = Path(dosa_verify.__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    done = subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)],
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (file,) = folder.glob("dosa_verify-*.whl")
    return file


@pytest.fixture(scope="module")
def unpacked(wheel, tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def run(unpacked, *arguments):
    """Python with the unpacked wheel first, away from the checkout."""
    return subprocess.run(
        [sys.executable, *arguments],
        check=False,
        capture_output=True,
        text=True,
        cwd=unpacked.parent,
        env={**os.environ, "PYTHONPATH": str(unpacked)},
    )


def test_package_data_is_in_the_wheel(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    ledger = json.loads((ROOT / "proofs" / "ledger.json").read_text(encoding="utf-8"))
    wanted = {"proofs/ledger.json", "dosa_verify/data/en_layer06_h64_cut.safetensors"}
    for entry in ledger["lemmas"].values():
        wanted |= {f"proofs/{entry['source']['path']}", f"proofs/{entry['smt2']['path']}"}
    wanted |= {f"{package}/py.typed" for package in ("dosa_ref", "proofs", "dosa_gpu", "dosa_verify")}
    wanted |= {f"dosa_verify/schemas/{file.name}" for file in (ROOT / "dosa_verify" / "schemas").iterdir()}
    wanted |= {"dosa_verify/templates/results.md.j2"}
    assert wanted - names == set()
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert not any(name.startswith(("tests/", "docs/", "tools/")) for name in names)


def test_the_gate_works_from_the_wheel(unpacked):
    script = "import dosa_gpu, dosa_gpu.gate as gate; gate.require_proved(); print(dosa_gpu.__file__)"
    done = run(unpacked, "-c", script)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).is_relative_to(unpacked)


def test_the_gate_refuses_an_edited_lemma_in_the_wheel(unpacked, tmp_path):
    copy = tmp_path / "site"
    copy.mkdir()
    subprocess.run(["cp", "-r", f"{unpacked}/.", str(copy)], check=True)
    source = copy / "proofs" / "lemmas" / "tensorcore.py"
    source.write_text(source.read_text(encoding="utf-8") + "\n# edited\n", encoding="utf-8")
    done = run(copy, "-c", "import dosa_gpu.gate as gate; gate.require_proved()")
    assert done.returncode != 0
    assert "UnprovedBound" in done.stderr
    assert "tensorcore.py was edited" in done.stderr


def test_proving_works_from_the_wheel(unpacked):
    done = run(unpacked, "-m", "dosa_verify.cli", "prove", "relu_lipschitz", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["outcome"] == "proved"


def test_the_environment_of_an_installed_package_has_no_commit(unpacked):
    done = run(unpacked, "-m", "dosa_verify.cli", "env", "--json")
    record = json.loads(done.stdout)
    assert (record["git_commit"], record["gate"]["status"]) == (None, "proved")
