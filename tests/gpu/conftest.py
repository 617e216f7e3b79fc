"""Kernels run on the GPU where there is one, else under the emulator: the same tests, the same expected bits."""

import zlib

import numpy as np
import pytest
import torch

from dosa_verify.targets.dosa import Device, connect, cuda_is_available

DEVICE = Device.CUDA if cuda_is_available() else Device.CPU
connect(DEVICE)

# Uninitialised memory must look uninitialised: integers and floats that no result may contain.
POISON = {torch.int32: -559038737, torch.float32: float("nan")}


@pytest.fixture
def device():
    return DEVICE.value


@pytest.fixture(autouse=True)
def poisoned_buffers(monkeypatch):
    plain = torch.empty

    def empty(*args, **kwargs):
        buffer = plain(*args, **kwargs)
        return buffer.fill_(POISON[buffer.dtype]) if buffer.dtype in POISON else buffer

    monkeypatch.setattr(torch, "empty", empty)


@pytest.fixture
def random(request):
    """A generator seeded by the test's id, so that every test and every parameter has its own numbers."""
    return np.random.default_rng(zlib.crc32(request.node.nodeid.encode()))
