"""Registered operator ``torch.ops.dosa.prefill_topk``: the selection as one node of a graph, with a fake for tracing.

Import this module to register it. It has the automatic path and the default sizes; ``dosa_gpu.api`` has the choices.
"""

from __future__ import annotations

import torch

from dosa_gpu.api import select_prefill

_library = torch.library.Library("dosa", "DEF")
_library.define(
    "prefill_topk(Tensor q, Tensor k, Tensor k_scale, Tensor weights, Tensor cu_seqlen_ks, Tensor cu_seqlen_ke,"
    " int topk) -> (Tensor, Tensor)"
)


def _prefill_topk(
    q: torch.Tensor,
    k: torch.Tensor,
    k_scale: torch.Tensor,
    weights: torch.Tensor,
    cu_seqlen_ks: torch.Tensor,
    cu_seqlen_ke: torch.Tensor,
    topk: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    selection = select_prefill(q, k, k_scale, weights, cu_seqlen_ks, cu_seqlen_ke, topk)
    return selection.topk_indices, selection.scores


def _prefill_topk_fake(q: torch.Tensor, *others: object) -> tuple[torch.Tensor, torch.Tensor]:
    # The last argument is topk; only the shape of q matters besides.
    shape = (q.shape[0], others[-1])
    return q.new_empty(shape, dtype=torch.int32), q.new_empty(shape, dtype=torch.float32)


_library.impl("prefill_topk", _prefill_topk, "CPU")
_library.impl("prefill_topk", _prefill_topk, "CUDA")
torch.library.register_fake("dosa::prefill_topk", _prefill_topk_fake, lib=_library)
