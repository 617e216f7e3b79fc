"""What holds for all tests: over which of them coverage is measured."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent
MEASURED = (ROOT / "ref", ROOT / "proofs")
"""The tests of the packages that coverage is demanded of. The others run kernels in Triton's interpreter, which tracing
makes more than twice as slow, and would hide what the packages' own tests leave out."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """Lift the tracer of coverage from all other tests; ``no_cover`` of pytest-cov does not reach workers of xdist."""
    tracer = sys.gettrace()
    if not type(tracer).__module__.startswith("coverage") or any(map(item.path.is_relative_to, MEASURED)):
        return (yield)
    sys.settrace(None)
    try:
        return (yield)
    finally:
        sys.settrace(tracer)
