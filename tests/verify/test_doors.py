"""Who may load what, seen in fresh processes; import-linter checks the same statically."""

import subprocess
import sys
from pathlib import Path

import pytest

import dosa_verify

ROOT = Path(dosa_verify.__file__).resolve().parent.parent

REFERENCE = [
    f"dosa_ref.{name}"
    for name in (
        "problem",
        "formats",
        "quantize",
        "tensorcore",
        "scorer",
        "bound",
        "guard",
        "select",
        "contract",
        "trace",
    )
]


def loaded(modules):
    """Top-level names in sys.modules after importing modules in a fresh process."""
    script = f"import sys, {', '.join(modules)}\nprint(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True, cwd=ROOT)
    return set(done.stdout.split())


@pytest.mark.parametrize(
    ("modules", "absent"),
    [
        (
            REFERENCE,
            {"torch", "triton", "z3", "cvc5", "bitwuzla", "typer", "rich", "proofs", "dosa_gpu", "dosa_verify"},
        ),
        (["dosa_ref.spec"], {"numpy", "scipy", "mpmath", "ml_dtypes"}),
        (["proofs.registry", "proofs.prover", "proofs.ledger"], {"z3", "cvc5", "bitwuzla", "torch", "dosa_gpu"}),
        (["dosa_gpu", "dosa_gpu.api", "dosa_gpu.gate"], {"torch", "triton", "proofs", "dosa_verify", "z3"}),
        (["dosa_verify.cli"], {"torch", "triton", "z3", "cvc5", "bitwuzla", "hypothesis", "scipy", "proofs"}),
        (["dosa_verify.selection", "dosa_verify.audit.fp8", "dosa_verify.environment"], {"torch", "z3", "proofs"}),
    ],
    ids=["reference", "spec", "proofs", "kernels", "command", "check-and-audit"],
)
def test_imports_stay_light(modules, absent):
    assert loaded(modules) & absent == set()
