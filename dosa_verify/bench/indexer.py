"""The rest of an indexer at the models' real sizes: what happens to hidden states before keys are selected.

GEMMs in bfloat16, RoPE on half of each vector, Hadamard rotation, FP8 with UE8M0 scales. The weights are random: only
the time counts. The selection that follows takes the trace's tensors, because random ones say nothing about pruning.
Every contestant does this same work; all of it is plain torch.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from dosa_ref.spec import E4M3_MAX, HEAD_DIM, InvalidProblem

if TYPE_CHECKING:
    import torch

ROPE_DIM = 64
ROW_BLOCK = 4096
"""Rows prepared at once; float32 temporaries of all of them would take gigabytes."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Of a model's indexer: hidden width, rank of the query latent, heads."""

    model: str
    hidden: int
    q_rank: int


MODELS = {
    32: Sizes(model="GLM-5.2", hidden=6144, q_rank=2048),
    64: Sizes(model="DeepSeek-V3.2", hidden=7168, q_rank=1536),
}
"""Sizes by the number of heads."""


class Preparation:
    """Query and key preparation of one chunk.

    Args:
        num_heads: a key of `MODELS`, unless ``sizes`` are given.
        num_queries: tokens of the chunk; each gives a query and a new key.
        device: where.
        seed: of the random weights and hidden states.
        sizes: of the model.

    Raises:
        InvalidProblem: no model has so many heads.
    """

    def __init__(
        self, num_heads: int, num_queries: int, device: torch.device, seed: int, sizes: Sizes | None = None
    ) -> None:
        import torch

        if sizes is None and num_heads not in MODELS:
            raise InvalidProblem("num_heads", num_heads, f"one of {sorted(MODELS)} for --scope complete")
        self.sizes = sizes or MODELS[num_heads]
        self.num_heads = num_heads
        generator = torch.Generator(device=device).manual_seed(seed)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)

        hidden, rank = self.sizes.hidden, self.sizes.q_rank
        self.hidden, self.q_latent = normal(num_queries, hidden), normal(num_queries, rank)
        self.wq_b = normal(num_heads * HEAD_DIM, rank) * rank**-0.5
        self.wk = normal(HEAD_DIM, hidden) * hidden**-0.5
        self.weights_proj = normal(num_heads, hidden) * hidden**-0.5
        position = torch.arange(num_queries, device=device, dtype=torch.float32)
        angle = position[:, None] * 10000.0 ** (-torch.arange(0, ROPE_DIM, 2, device=device) / ROPE_DIM)
        self.turn = torch.polar(torch.ones_like(angle), angle)
        rotation = torch.ones(1, 1, device=device)
        while len(rotation) < HEAD_DIM:
            rotation = torch.cat([torch.cat([rotation, rotation], 1), torch.cat([rotation, -rotation], 1)])
        self.rotation = (rotation * HEAD_DIM**-0.5).bfloat16()

    def __call__(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Prepare the chunk.

        Returns:
            ``q`` float8_e4m3fn ``[rows, H, 128]``, ``k`` float8_e4m3fn ``[rows, 128]``, ``k_scale`` float32 ``[rows]``
            and ``weights`` float32 ``[rows, H]``.
        """
        import torch
        from torch.nn import functional

        rows = len(self.hidden)
        q = torch.empty(rows, self.num_heads, HEAD_DIM, dtype=torch.float8_e4m3fn, device=self.hidden.device)
        weights = torch.empty(rows, self.num_heads, device=self.hidden.device)
        for start in range(0, rows, ROW_BLOCK):
            part = slice(start, start + ROW_BLOCK)
            heads = functional.linear(self.q_latent[part], self.wq_b).view(-1, self.num_heads, HEAD_DIM)
            q[part], q_scale = self._finish(heads, self.turn[part, None])
            gates = functional.linear(self.hidden[part], self.weights_proj).float()
            weights[part] = gates * q_scale * (HEAD_DIM**-0.5 * self.num_heads**-0.5)
        keys = functional.layer_norm(functional.linear(self.hidden, self.wk), (HEAD_DIM,))
        k, k_scale = self._finish(keys, self.turn)
        return q, k, k_scale, weights

    def _finish(self, x: torch.Tensor, turn: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """RoPE, Hadamard, FP8: codes and scales of the vectors along the last axis."""
        import torch

        pairs = torch.view_as_complex(x[..., :ROPE_DIM].float().unflatten(-1, (-1, 2)))
        turned = torch.view_as_real(pairs * turn).flatten(-2).to(x.dtype)
        x = (torch.cat([turned, x[..., ROPE_DIM:]], -1) @ self.rotation).float()
        scale = torch.exp2(torch.ceil(torch.log2(x.abs().amax(-1).clamp(min=1e-4) / E4M3_MAX)))
        return (x / scale[..., None]).to(torch.float8_e4m3fn), scale
