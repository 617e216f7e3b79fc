"""What a fresh clone relies on: pins for everything that set-up installs, and a set-up that does nothing twice."""

import importlib.util
import os
import re
import stat
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import dosa_verify

ROOT = Path(dosa_verify.__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def canonical(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def pins():
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return {canonical(line.partition("==")[0]) for line in lines if "==" in line}


def requirements():
    project = PROJECT["project"]
    lists = [
        project["dependencies"],
        *project["optional-dependencies"].values(),
        *PROJECT["dependency-groups"].values(),
        PROJECT["build-system"]["requires"],
    ]
    written = [entry for entries in lists for entry in entries if isinstance(entry, str)]
    return {canonical(re.match(r"[A-Za-z0-9_.-]+", entry)[0]) for entry in written}


@pytest.fixture
def bootstrap():
    spec = importlib.util.spec_from_file_location("bootstrap", ROOT / "tools" / "bootstrap.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_requirement_is_pinned():
    assert requirements() - pins() == set()
    assert {"torch", "triton", "pip"} <= pins()


def test_the_version_is_written_once():
    assert PROJECT["project"]["dynamic"] == ["version"]
    assert re.fullmatch(r"\d+\.\d+\.\d+", dosa_verify.__version__)


def test_set_up_does_nothing_twice(bootstrap, tmp_path, monkeypatch):
    environment = tmp_path / ".venv"
    environment.mkdir()
    (environment / ".stamp").write_text(bootstrap.fingerprint(), encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["bootstrap.py", "--venv", str(environment)])
    monkeypatch.setattr(bootstrap, "Pip", None)
    monkeypatch.setattr(bootstrap.venv, "create", None)
    bootstrap.main()
    assert [file.name for file in environment.iterdir()] == [".stamp"]


def test_the_stamp_follows_the_pins(bootstrap, tmp_path, monkeypatch):
    for name in bootstrap.INPUTS:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    monkeypatch.setattr(bootstrap, "ROOT", tmp_path)
    before = bootstrap.fingerprint()
    with (tmp_path / "constraints.txt").open("a", encoding="utf-8") as stream:
        stream.write("another==1.0\n")
    assert bootstrap.fingerprint() != before


def test_another_index_asks_for_set_up_again(bootstrap):
    assert bootstrap.fingerprint("pypi") != bootstrap.fingerprint("")


def test_an_environment_of_another_python_is_recognised(bootstrap, tmp_path):
    bootstrap.venv.create(tmp_path / "own")
    assert bootstrap.made_by_this_python(tmp_path / "own")
    text = (tmp_path / "own" / "pyvenv.cfg").read_text(encoding="utf-8")
    (tmp_path / "own" / "pyvenv.cfg").write_text(text.replace("home = /", "home = /elsewhere/"), encoding="utf-8")
    assert not bootstrap.made_by_this_python(tmp_path / "own")


class FakePip:
    """Records installations; those whose last word is in ``missing`` fail."""

    def __init__(self, missing=()):
        self.calls = []
        self.missing = missing

    def install(self, *arguments):
        self.calls.append(arguments)
        return arguments not in self.missing

    def require(self, *arguments):
        assert self.install(*arguments)


@pytest.mark.parametrize(
    ("index", "missing", "calls"),
    [
        ("", [], [("torch==9.9+cpu",)]),
        (
            "",
            [("torch==9.9+cpu",)],
            [("torch==9.9+cpu",), ("--extra-index-url", "https://download.pytorch.org/whl/cpu", "torch==9.9+cpu")],
        ),
        ("pypi", [], [("torch==9.9",)]),
        ("https://wheels.example", [], [("--extra-index-url", "https://wheels.example", "torch==9.9")]),
    ],
    ids=["configured", "official-index", "pypi", "other-index"],
)
def test_where_torch_comes_from(bootstrap, monkeypatch, index, missing, calls):
    monkeypatch.setattr(bootstrap.sys, "platform", "linux")
    monkeypatch.setattr(bootstrap.platform, "machine", lambda: "x86_64")
    pip = FakePip(missing)
    bootstrap.install_cpu_torch(pip, "9.9", index)
    assert pip.calls == calls


def test_without_any_cpu_torch_the_set_up_says_what_to_do(bootstrap, monkeypatch):
    monkeypatch.setattr(bootstrap.sys, "platform", "linux")
    monkeypatch.setattr(bootstrap.platform, "machine", lambda: "x86_64")
    pip = FakePip()
    pip.install = lambda *_arguments: False
    with pytest.raises(SystemExit, match="TORCH_INDEX"):
        bootstrap.install_cpu_torch(pip, "9.9", "")


def test_an_old_python_is_refused(bootstrap, monkeypatch):
    monkeypatch.setattr(bootstrap.sys, "argv", ["bootstrap.py"])
    monkeypatch.setattr(bootstrap.sys, "version_info", (3, 10, 0))
    with pytest.raises(SystemExit, match=r"3\.11"):
        bootstrap.main()


def test_ci_runs_the_readme_command():
    script = ROOT / ".ci" / "run"
    assert script.stat().st_mode & stat.S_IXUSR
    assert "make test" in script.read_text(encoding="utf-8")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "make verify" in readme
    assert "make test" in readme
    assert "unrelated package of that name" in readme


def test_make_knows_the_documented_variables():
    done = subprocess.run(
        ["make", "--dry-run", "--always-make", "verify", "PYTHON=somepython", "TORCH_INDEX=pypi", "ARGS=--seed 4"],
        check=True,
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if not name.startswith("MAKE")},
    )
    assert 'somepython tools/bootstrap.py --venv .venv --torch-index "pypi"' in done.stdout
    assert "dosa verify --seed 4" in done.stdout
