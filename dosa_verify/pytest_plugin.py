"""pytest plugin: exact checks of top-K results, seeds from the test's id, outputs between canaries.

Installed with the distribution (entry point ``pytest11``). It imports nothing of the tool before it is used. Strategies
for Hypothesis are `dosa_verify.fuzz.logits.logits_cases` and `dosa_verify.fuzz.strategies.cases`.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    import numpy as np

    from dosa_verify.targets.logits import Promise

CANARY = 0xA5
"""Byte around and inside a poisoned output: a negative index far outside every row, a float that no kernel gives."""
MARGIN = 256
"""Bytes of canaries on each side."""


def _numpy(array: Any) -> np.ndarray[Any, Any]:
    """A NumPy array of a NumPy array or of a torch tensor on any device."""
    import numpy as np

    return np.asarray(array.detach().cpu().numpy() if hasattr(array, "detach") else array)


def _window(field: str, values: Any) -> np.ndarray[Any, Any]:
    """Ends of windows as int32; no number is cut or wrapped to fit."""
    import numpy as np

    from dosa_ref.spec import InvalidProblem

    given = _numpy(values)
    exact = given.astype(np.int32) if given.dtype.kind in "iu" else None
    if exact is None or (exact != given).any():
        raise InvalidProblem(field, f"{given.dtype} {given.ravel()[:8].tolist()}", "integers that int32 holds")
    return exact


def assert_exact_topk(
    logits: Any,
    indices: Any,
    *,
    row_start: Any = None,
    row_end: Any = None,
    promise: Promise | None = None,
) -> None:
    """Assert that a top-K result is right, with no tolerance.

    Args:
        logits: float32 ``[rows, n]``, NumPy or torch.
        indices: int32 ``[rows, topk]``, columns of ``logits``, -1 behind the last.
        row_start, row_end: integers ``[rows]``, each row's half-open window; None: the whole row.
        promise: what to judge by; None: the set of the best scores, ties to the lowest index, NaN never selected.

    Raises:
        AssertionError: the first fault, with row and evidence.
        InvalidProblem: ``logits`` or a window is not as described.
    """
    __tracebackhide__ = True
    import numpy as np

    from dosa_ref.spec import InvalidProblem
    from dosa_ref.trace import LogitsProblem
    from dosa_verify.fuzz.judge import judge
    from dosa_verify.targets.logits import Promise as DefaultPromise

    rows, found = _numpy(logits), _numpy(indices)
    if rows.ndim != 2:
        raise InvalidProblem("logits", f"{rows.dtype}, shape {list(rows.shape)}", "float32, [rows, n]")
    count, columns = rows.shape
    start = np.zeros(count, np.int32) if row_start is None else _window("row_start", row_start)
    end = np.full(count, columns, np.int32) if row_end is None else _window("row_end", row_end)
    topk = found.shape[-1] if found.ndim else 0
    problem = LogitsProblem(logits=rows, row_start=start, row_end=end, topk=topk)
    mismatch = judge(problem, found, promise or DefaultPromise())
    if mismatch is not None:
        evidence = ", ".join(f"{name} {value}" for name, value in mismatch.evidence.items())
        where = "" if mismatch.row is None else f" in row {mismatch.row}"
        raise AssertionError(f"top-K: {mismatch.fault.value}{where}: {evidence}")


@pytest.fixture
def dosa_seed(request: pytest.FixtureRequest) -> int:
    """A seed made from the test's id: every test and every parameter has its own, and keeps it."""
    return zlib.crc32(request.node.nodeid.encode())


@pytest.fixture
def dosa_random(dosa_seed: int) -> np.random.Generator:
    """A NumPy generator seeded by the test's id."""
    import numpy as np

    return np.random.default_rng(dosa_seed)


@pytest.fixture
def poisoned_output() -> Iterator[Callable[..., Any]]:
    """Makes outputs full of garbage, between canaries that must be intact when the test ends.

    Call it with ``(shape, dtype="int32", device=None)``: a NumPy array, or with a device a torch tensor there.
    """
    buffers: list[Any] = []

    def make(shape: tuple[int, ...], dtype: str = "int32", device: str | None = None) -> Any:
        import numpy as np

        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        if device is None:
            buffer: Any = np.full(size + 2 * MARGIN, CANARY, np.uint8)
            output: Any = buffer[MARGIN : MARGIN + size].view(dtype).reshape(shape)
        else:
            import torch

            buffer = torch.full((size + 2 * MARGIN,), CANARY, dtype=torch.uint8, device=device)
            output = buffer[MARGIN : MARGIN + size].view(getattr(torch, dtype)).reshape(shape)
        buffers.append(buffer)
        return output

    yield make
    for number, buffer in enumerate(buffers):
        bytes_now = _numpy(buffer)
        intact = (bytes_now[:MARGIN] == CANARY).all() and (bytes_now[-MARGIN:] == CANARY).all()
        assert intact, f"memory beside poisoned output {number} was written"
