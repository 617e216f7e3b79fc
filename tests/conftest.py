"""What holds for all tests: which of them coverage is measured over."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parent
MEASURED = (ROOT / "ref", ROOT / "proofs")
"""The tests of the packages that coverage is demanded of. The others run kernels in Triton's interpreter, which tracing
makes more than twice as slow, and would hide what the packages' own tests leave out."""


def pytest_collection_modifyitems(items):
    for item in items:
        if not any(item.path.is_relative_to(folder) for folder in MEASURED):
            item.add_marker(pytest.mark.no_cover)
