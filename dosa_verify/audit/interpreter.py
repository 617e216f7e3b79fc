"""Triton's interpreter as it is, without the emulator's repairs: its own casts to and from E4M3FN.

Kernels of a process are interpreted or compiled, repaired or not, once and for all; so this runs in a process of its
own: ``python -m dosa_verify.audit.interpreter`` reads float32 from stdin and writes their codes, then the float32
values of all 256 codes.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import dosa_verify
from dosa_ref.spec import BackendUnavailable


def is_available() -> bool:
    """Say whether what `interpreted_casts` needs is installed."""
    return all(importlib.util.find_spec(module) for module in ("torch", "triton"))


def interpreted_casts(values: npt.NDArray[np.float32]) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.float32]]:
    """Run the interpreter's casts in a process of their own.

    Args:
        values: float32, one-dimensional.

    Returns:
        The uint8 code of each value, and the float32 value of each of the 256 codes.

    Raises:
        BackendUnavailable: torch or Triton is missing, or the interpreter does not run.
    """
    root = Path(dosa_verify.__file__).resolve().parent.parent
    path = os.pathsep.join(filter(None, (str(root), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, "-m", "dosa_verify.audit.interpreter"],
        check=False,
        input=values.tobytes(),
        capture_output=True,
        env={**os.environ, "PYTHONPATH": path, "TRITON_INTERPRET": "1"},
    )
    if done.returncode:
        raise BackendUnavailable(f"Triton's interpreter does not run: {done.stderr.decode().strip().splitlines()[-1]}")
    answer = np.frombuffer(done.stdout, np.uint8)
    return answer[: len(values)], answer[len(values) :].copy().view(np.float32)


def predicted_codes(values: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """What the interpreter's cast from float32 gives, bit by bit: the documented difference, not a reference.

    It rounds half-way cases away from zero, before it shifts subnormal results, whose lower bits are dropped; a carry
    out of the fraction is ORed into the exponent, where it is lost if the exponent is odd; the exponent stops at 15, so
    that overflow, Inf and NaN keep their fraction; the fraction of a float32 subnormal becomes the code's.

    Args:
        values: float32.

    Returns:
        uint8 codes.
    """
    bits = values.view(np.uint32).astype(np.int64)
    sign, field, fraction = bits >> 31, (bits >> 23) & 255, bits & 0x7FFFFF
    # A float32 subnormal's fraction is first moved left until its leading bit falls out.
    lead = np.floor(np.log2(np.maximum(fraction, 1))).astype(np.int64)
    fraction = np.where(field == 0, (fraction << (23 - lead)) & 0x7FFFFF, fraction)
    rounded = (fraction >> 20) + ((fraction >> 19) & 1)
    exponent = np.clip(field - 120, 0, 15)
    shift = np.clip(121 - field, 0, 8)
    hidden = np.where(shift <= 3, 1 << np.maximum(3 - shift, 0), 0)
    small = np.where(field == 0, rounded, (rounded >> shift) | hidden)
    exponent, low = np.where(exponent == 0, 0, exponent), np.where(exponent == 0, small, rounded)
    return ((sign << 7) | (exponent << 3) | low).astype(np.uint8)


def main() -> None:
    """Read float32 from stdin, write codes and decoded codes to stdout."""
    import torch

    from dosa_verify.audit import kernels

    values = np.frombuffer(sys.stdin.buffer.read(), np.float32)
    codes = kernels.launch_cast(torch.from_numpy(values.copy())).numpy()
    decoded = kernels.launch_decode(torch.arange(256, dtype=torch.uint8)).numpy()
    sys.stdout.buffer.write(codes.tobytes() + decoded.tobytes())


if __name__ == "__main__":
    main()
