"""Set up ``.venv/`` for ``make verify`` and ``make test``. Standard library only; run it as often as you like.

The rules, in order:

1. Where the starting Python already has a CUDA build of torch >= 2.11, the environment sees the system packages and
   torch and triton are left alone.
2. Else the CPU build of torch (pinned in ``constraints.txt``) is installed: from the pip configuration in force if that
   knows a CPU wheel, else from ``--torch-index``. On Linux x86-64 PyPI's own torch wheel brings gigabytes of CUDA
   libraries, so it is taken only when ``--torch-index=pypi`` asks for it.
3. The project goes in editable, with the extras that the main job and the tests need.
4. A second Triton, the release of our GPU machine, is unpacked beside the environment for the ahead-of-time test.
"""

from __future__ import annotations

import argparse
import hashlib
import platform
import shutil
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MIN_PYTHON = (3, 11)
MIN_CUDA_TORCH = (2, 11)
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
SECOND_TRITON = "3.6.0"
EXTRAS = "prove,fuzz,gpu"
INPUTS = ("constraints.txt", "pyproject.toml", "tools/bootstrap.py")

TORCH_PROBE = """
import sys
try:
    import torch
except ImportError:
    sys.exit(1)
version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
sys.exit(0 if torch.version.cuda and version >= {minimum} else 1)
"""


def say(text: str) -> None:
    """Print one line of progress on stderr."""
    print(f"set-up: {text}", file=sys.stderr, flush=True)


def fingerprint(torch_index: str = "") -> str:
    """Return a hash over the files that decide what is installed, the starting Python and the asked index."""
    digest = hashlib.sha256(f"{sys.version_info[:2]}{sys.prefix}{torch_index}".encode())
    for name in INPUTS:
        digest.update((ROOT / name).read_bytes())
    return digest.hexdigest()


def made_by_this_python(environment: Path) -> bool:
    """Say whether an environment was made by the Python that runs this."""
    lines = (environment / "pyvenv.cfg").read_text(encoding="utf-8").splitlines()
    recorded = dict(line.split(" = ", 1) for line in lines if " = " in line)
    same_version = recorded.get("version", "").split(".")[:2] == [str(part) for part in sys.version_info[:2]]
    return (
        same_version and Path(recorded.get("home", "")) == Path(getattr(sys, "_base_executable", sys.executable)).parent
    )


def has_cuda_torch() -> bool:
    """Say whether the starting Python has a CUDA build of torch that is new enough."""
    probe = TORCH_PROBE.format(minimum=MIN_CUDA_TORCH)
    return subprocess.run([sys.executable, "-c", probe], check=False, stderr=subprocess.DEVNULL).returncode == 0


def pinned(constraints: Path, name: str) -> str:
    """Return the pinned version of one distribution."""
    for line in constraints.read_text(encoding="utf-8").splitlines():
        if line.startswith(f"{name}=="):
            return line.partition("==")[2].strip()
    raise SystemExit(f"set-up: {constraints} does not pin {name}")


class Pip:
    """The environment's pip with the constraints in force."""

    def __init__(self, python: Path, constraints: Path) -> None:
        self._command = [str(python), "-m", "pip", "--disable-pip-version-check"]
        self._constraints = constraints

    def install(self, *arguments: str, constrained: bool = True) -> bool:
        """Run ``pip install``; return whether it succeeded."""
        command = [*self._command, "install", "--quiet"]
        if constrained:
            command += ["--constraint", str(self._constraints)]
        return subprocess.run([*command, *arguments], check=False, cwd=ROOT).returncode == 0

    def require(self, *arguments: str, constrained: bool = True) -> None:
        """Run ``pip install`` and stop the set-up if it fails."""
        if not self.install(*arguments, constrained=constrained):
            raise SystemExit(
                f"set-up: pip install {' '.join(arguments)} failed.\n"
                "On a machine that cannot install, run from the checkout: python3 -m dosa_verify --help"
            )


def install_cpu_torch(pip: Pip, version: str, index: str) -> None:
    """Install the CPU build of torch.

    Args:
        pip: the environment's pip.
        version: pinned release without a local label.
        index: empty for the rule of this module, ``pypi`` for the index in force, else the address of a wheel index.
    """
    if index == "pypi":
        pip.require(f"torch=={version}")
        return
    if index:
        pip.require("--extra-index-url", index, f"torch=={version}")
        return
    if not (sys.platform == "linux" and platform.machine() == "x86_64"):
        pip.require(f"torch=={version}")  # PyPI's wheel is the CPU build here
        return
    cpu = f"torch=={version}+cpu"
    if pip.install(cpu):
        return
    say(f"no CPU wheel of torch in the pip configuration in force, trying {CPU_INDEX}")
    if not pip.install("--extra-index-url", CPU_INDEX, cpu):
        raise SystemExit(
            f"set-up: no CPU build of torch {version} could be installed. Name another wheel index with\n"
            "  make verify TORCH_INDEX=ADDRESS\nor accept PyPI's CUDA build (gigabytes) with TORCH_INDEX=pypi"
        )


def main() -> None:
    """Bring ``.venv/`` up to date."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv")
    parser.add_argument("--torch-index", default="", help="wheel index for torch; 'pypi' for the index in force")
    options = parser.parse_args()
    if sys.version_info < MIN_PYTHON:
        raise SystemExit(f"set-up: Python {platform.python_version()} is too old, 3.11 is the oldest that works")

    environment: Path = options.venv.resolve()
    stamp = environment / ".stamp"
    wanted = fingerprint(options.torch_index)
    if stamp.exists() and stamp.read_text(encoding="utf-8") == wanted:
        stamp.touch()
        return

    cuda = has_cuda_torch()
    python = environment / "bin" / "python"
    if python.exists() and not made_by_this_python(environment):
        say(f"{environment} was made by another Python, making it anew")
        shutil.rmtree(environment)
    if not python.exists():
        say(f"creating {environment}" + (" over the system's CUDA torch" if cuda else ""))
        venv.create(environment, with_pip=True, system_site_packages=cuda)

    constraints = ROOT / "constraints.txt"
    torch_version = pinned(constraints, "torch")
    if cuda:
        kept = [
            line
            for line in constraints.read_text(encoding="utf-8").splitlines()
            if not line.startswith(("torch==", "triton=="))
        ]
        constraints = environment / "constraints.txt"
        constraints.write_text("\n".join(kept) + "\n", encoding="utf-8")
    pip = Pip(python, constraints)
    say("pip and build back end")
    pip.require("--upgrade", "pip", "setuptools")
    pip.require("hatchling", "editables")
    if not cuda:
        say("torch, CPU build")
        install_cpu_torch(pip, torch_version, options.torch_index)
    say("project, solvers, test tools")
    extras = EXTRAS.replace(",gpu", "") if cuda else EXTRAS
    pip.require("--no-build-isolation", "--editable", f".[{extras}]", "--group", "dev")
    second = environment / f"triton-{SECOND_TRITON}"
    if sys.platform == "linux" and not second.exists():
        say(f"triton {SECOND_TRITON} for the ahead-of-time compile test")
        staging = environment / f"triton-{SECOND_TRITON}.part"
        pip.require("--no-deps", "--upgrade", "--target", str(staging), f"triton=={SECOND_TRITON}", constrained=False)
        staging.replace(second)
    stamp.write_text(wanted, encoding="utf-8")
    say("done")


if __name__ == "__main__":
    main()
