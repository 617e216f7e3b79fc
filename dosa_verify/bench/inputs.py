"""Inputs of the benchmark on the device: learned traces, trace files, or synthetic ones for smoke tests."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dosa_ref.spec import HEAD_DIM, InvalidProblem
from dosa_ref.trace import load_trace
from dosa_verify.targets.dosa import Device, to_torch

if TYPE_CHECKING:
    import torch

SYNTHETIC = "synthetic"
RANK = 6
"""Dimensions that synthetic queries span; learned heads of one query have an effective rank of 3 to 8."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Inputs:
    """One prefill chunk: the last queries of a text against all its keys, contiguous tensors on the device.

    Attributes:
        domain: text of the trace, ``synthetic``, or the name of a trace file.
        layer: of the model.
        q: float8_e4m3fn ``[num_queries, H, 128]``.
        k: float8_e4m3fn ``[num_keys, 128]``.
        k_scale: float32 ``[num_keys]``.
        weights: float32 ``[num_queries, H]``.
        ks, ke: int32 ``[num_queries]``, windows.
    """

    domain: str
    layer: int
    q: torch.Tensor
    k: torch.Tensor
    k_scale: torch.Tensor
    weights: torch.Tensor
    ks: torch.Tensor
    ke: torch.Tensor

    @property
    def num_heads(self) -> int:
        """Heads of a query."""
        return self.q.shape[1]

    def suffix(self, num_keys: int, num_queries: int) -> Inputs:
        """The last keys and the last queries; windows move along.

        Raises:
            InvalidProblem: there are not so many.
        """
        for field, wanted, here in (("keys", num_keys, len(self.k)), ("queries", num_queries, len(self.q))):
            if wanted > here:
                raise InvalidProblem(field, wanted, f"at most {here}, what {self.domain} layer {self.layer} has")
        gone, rows = len(self.k) - num_keys, slice(len(self.q) - num_queries, None)
        return dataclasses.replace(
            self,
            q=self.q[rows],
            weights=self.weights[rows],
            k=self.k[gone:],
            k_scale=self.k_scale[gone:],
            ks=(self.ks[rows] - gone).clamp(min=0),
            ke=(self.ke[rows] - gone).clamp(min=0),
        )


def synthetic(*, num_heads: int, num_keys: int, num_queries: int, seed: int, device: Device) -> Inputs:
    """Queries of rank 6 and keys around a common direction: something to prune, nothing learned.

    Args:
        num_heads, num_keys, num_queries: size.
        seed: of the draw.
        device: where the tensors lie.
    """
    import torch

    where = torch.device(device.value)
    generator = torch.Generator(device=where).manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=where)

    basis, common = normal(RANK, HEAD_DIM), normal(HEAD_DIM)
    q = torch.empty(num_queries, num_heads, HEAD_DIM, dtype=torch.float8_e4m3fn, device=where)
    heads = normal(num_heads, RANK)
    for start in range(0, num_queries, 4096):
        part = q[start : start + 4096]
        part.copy_(((heads + 0.5 * normal(len(part), num_heads, RANK)) @ basis * 20).clamp(-448, 448))
    k = normal(num_keys, RANK) @ basis + common + 0.1 * normal(num_keys, HEAD_DIM)
    scale = torch.exp2(torch.ceil(torch.log2(k.abs().amax(1) / 448)))
    weights = normal(num_heads) + 0.3 * normal(num_queries, num_heads)
    ke = torch.arange(num_keys - num_queries + 1, num_keys + 1, dtype=torch.int32, device=where)
    return Inputs(
        domain=SYNTHETIC,
        layer=0,
        q=q,
        k=(k / scale[:, None]).to(torch.float8_e4m3fn),
        k_scale=scale,
        weights=weights * HEAD_DIM**-0.5 * num_heads**-0.5,
        ks=torch.zeros_like(ke),
        ke=ke,
    )


def from_files(files: Sequence[Path], device: Device) -> Iterator[Inputs]:
    """Trace files, one after the other on the device.

    Raises:
        InvalidProblem: a damaged or foreign file.
    """
    for file in files:
        found = load_trace(file)
        problem = found.problem
        layer = found.header.get("layer", "0")
        if not (layer.isascii() and layer.isdigit()):
            raise InvalidProblem("layer", repr(layer)[:40], f"a number in the header of {file}")
        yield Inputs(
            domain=found.header.get("domain", file.stem),
            layer=int(layer),
            q=to_torch(problem.q, device),
            k=to_torch(problem.k, device),
            k_scale=to_torch(problem.k_scale, device),
            weights=to_torch(problem.weights, device),
            ks=to_torch(problem.cu_seqlen_ks, device),
            ke=to_torch(problem.cu_seqlen_ke, device),
        )


def learned(
    pack: Sequence[Path],
    *,
    domains: Sequence[str],
    layers: Sequence[int],
    num_heads: Sequence[int],
    num_keys: int,
    num_queries: int,
    seed: int,
    device: Device,
    on_progress: Callable[[int, int], None] | None = None,
) -> Iterator[Inputs]:
    """Traces made in memory from a pack (`dosa_verify.traces.make`), the longest length only; shorter are suffixes.

    Raises:
        InvalidProblem: whatever the pack lacks.
    """
    import torch

    from dosa_verify.traces.make import make
    from dosa_verify.traces.model import load_pack

    traces = make(
        load_pack(list(pack), torch.device(device.value)),
        domain=domains,
        layers=layers,
        num_heads=num_heads,
        num_keys=num_keys,
        num_queries=num_queries,
        seed=seed,
        on_progress=on_progress,
    )
    for trace in traces:
        yield Inputs(
            domain=trace.header["domain"],
            layer=int(trace.header["layer"]),
            q=trace.q,
            k=trace.k,
            k_scale=trace.k_scale,
            weights=trace.weights,
            ks=trace.ks,
            ke=trace.ke,
        )
