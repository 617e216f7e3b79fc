"""Buffers of one block of rows, counted against the caller's limit."""

from __future__ import annotations

import math

import torch


class Workspace:
    """Hands out uninitialised buffers and counts their bytes.

    Args:
        device: where the buffers lie.
        limit: bytes that may be in use at once.
    """

    def __init__(self, device: torch.device, limit: int) -> None:
        self.device = device
        self.limit = limit
        self.used_bytes = 0
        self.peak_bytes = 0

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised tensor; its bytes count until ``reset``."""
        self.used_bytes += math.prod(shape) * dtype.itemsize
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)
        assert self.used_bytes <= self.limit, f"the plan's sizes exceed the workspace: {self.used_bytes} > {self.limit}"
        return torch.empty(shape, dtype=dtype, device=self.device)

    def lend(self, count: int) -> None:
        """Count bytes that a launcher allocates and frees itself, on top of what is in use."""
        self.peak_bytes = max(self.peak_bytes, self.used_bytes + count)
        assert self.used_bytes + count <= self.limit, "a launcher's scratch exceeds the workspace"

    def reset(self) -> None:
        """Forget the buffers of a finished block; the caller must no longer use them."""
        self.used_bytes = 0
