"""Where a result was made: versions, device, commit, interpreter state and the gate's word."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import dosa_verify

SCHEMA = "dosa.env/1"
PACKAGES = (
    "torch",
    "triton",
    "numpy",
    "scipy",
    "mpmath",
    "ml_dtypes",
    "safetensors",
    "z3-solver",
    "cvc5",
    "bitwuzla",
    "hypothesis",
)


def environment() -> dict[str, object]:
    """Return what a reader needs to repeat a result, as JSON values (schema ``dosa.env/1``).

    Returns:
        Versions of this tool, Python and every library that can change a result (None: not installed); CPU and GPU; the
        git commit of a checkout, with ``-dirty`` if tracked files differ; whether Triton interprets; the gate's status.
    """
    return {
        "schema": SCHEMA,
        "dosa_verify": dosa_verify.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu_count": os.cpu_count(),
        "packages": {name: _version(name) for name in PACKAGES},
        "gpu": _gpu(),
        "git_commit": _git_commit(),
        "triton_interpreter": os.environ.get("TRITON_INTERPRET") == "1",
        "gate": _gate(),
    }


def invocation() -> str:
    """How this process was started, as the beginning of a command to paste: ``dosa`` with its path, or a module."""
    program = Path(sys.argv[0])
    return str(program) if program.name == "dosa" else f"{sys.executable} -m dosa_verify"


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _gpu() -> dict[str, str] | None:
    """Name, compute capability and driver side of the first GPU, None without one."""
    if _version("torch") is None:
        return None
    import torch

    if not torch.cuda.is_available():
        return None
    major, minor = torch.cuda.get_device_capability(0)
    return {
        "name": torch.cuda.get_device_name(0),
        "compute_capability": f"{major}.{minor}",
        "cuda": str(torch.version.cuda),
    }


def _git_commit() -> str | None:
    """Commit of the checkout that this code runs from, None for an installed package."""
    root = Path(dosa_verify.__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return None
    try:
        commit = _git(root, "rev-parse", "HEAD")
        changed = _git(root, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.CalledProcessError):
        # No git program, or a repository that refuses this user: the commit stays unknown.
        return None
    return commit + ("-dirty" if changed else "")


def _git(root: Path, *arguments: str) -> str:
    return subprocess.run(
        ["git", "-C", str(root), *arguments], check=True, capture_output=True, text=True
    ).stdout.strip()


_GATE_PROBE = """
import json
from dosa_ref.spec import UnprovedBound
status = {"status": "proved", "lemma": None, "reason": None}
try:
    from dosa_gpu import gate
    gate.require_proved()
except UnprovedBound as error:
    status = {"status": "refused", "lemma": error.lemma, "reason": str(error)}
except ImportError as error:
    status = {"status": "unavailable", "lemma": None, "reason": str(error)}
print(json.dumps(status))
"""


def _gate() -> dict[str, str | None]:
    """Whether the pruned path may run as far as lemmas go; the device is judged when it is used.

    In a process of its own: asking imports a kernel, and that would decide for this process between interpreter and
    compiler.
    """
    root = Path(dosa_verify.__file__).resolve().parent.parent
    path = os.pathsep.join(filter(None, (str(root), os.environ.get("PYTHONPATH"))))
    answer = subprocess.run(
        [sys.executable, "-c", _GATE_PROBE],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    status: dict[str, str | None] = json.loads(answer.stdout)
    return status
