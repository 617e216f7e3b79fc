"""Indexers of the DSA kind: architecture, warm-up training, and preparation of FP8 queries and keys.

Per layer, with ``x`` the state behind the layer's attention norm::

    q_h = rope(W_q x)_h        k = rope(LayerNorm(W_k x))        w = (W_w x) H^-0.5
    score(t, s) = sum_h w_h(t) relu(q_h(t) . k(s)) 128^-0.5

``rope`` turns the first 64 of 128 numbers. The training minimises the KL divergence from the layer's attention
distribution, averaged over its heads, to ``softmax(score)``: the dense warm-up of DeepSeek-V3.2.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Final

import torch
from scipy.linalg import hadamard
from torch import nn
from torch.nn import functional

from dosa_ref.spec import E4M3_MAX, HEAD_DIM
from dosa_verify.traces.model import Rotary

ROPE_DIM: Final = 64
SCORE_SCALE: Final[float] = HEAD_DIM**-0.5
AMAX_FLOOR: Final = 1e-4
"""Smallest amax of a token: keeps the scale of a zero row away from zero."""

ROWS: Final = 256
"""Query rows of one training step."""
LEARNING_RATE: Final = 1e-3
WARM_UP_STEPS: Final = 50
FINAL_SHARE: Final = 0.2
"""Share of the steps at the end that run at a tenth of the learning rate."""
EAGER_STEPS: Final = 3
"""Steps before a CUDA graph is captured: libraries allocate and choose kernels in them."""
LOSS_MEAN: Final = 50
"""Steps over which the reported losses are averaged."""
HIDDEN: Final = -1e30
"""Logit of a key that a query does not see."""


class Indexer(nn.Module):
    """An indexer of one layer.

    Args:
        width: size of a hidden state.
        num_heads: heads, 32 or 64 in production.
        generator: of the initial weights, normal with deviation 0.02; on the CPU, so that every device starts alike.
    """

    def __init__(self, width: int, num_heads: int, generator: torch.Generator) -> None:
        super().__init__()
        self.num_heads = num_heads

        def matrix(rows: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(rows, width, generator=generator) * 0.02)

        self.q_weight = matrix(num_heads * HEAD_DIM)
        self.k_weight = matrix(HEAD_DIM)
        self.head_weight = matrix(num_heads)
        self.k_norm = nn.LayerNorm(HEAD_DIM, eps=1e-6)

    def queries(
        self, x: torch.Tensor, positions: torch.Tensor | slice, rope: Rotary
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries ``[n, H, 128]`` and head weights ``[n, H]`` of states ``[n, width]`` at ``positions``."""
        q = functional.linear(x, self.q_weight.to(x.dtype)).unflatten(-1, (self.num_heads, HEAD_DIM))
        w = functional.linear(x, self.head_weight.to(x.dtype)).float() * self.num_heads**-0.5
        return _turn(q, positions, rope), w

    def keys(self, x: torch.Tensor, positions: torch.Tensor | slice, rope: Rotary) -> torch.Tensor:
        """Keys ``[n, 128]`` in float32 of states ``[n, width]`` at ``positions``."""
        k = self.k_norm(functional.linear(x, self.k_weight.to(x.dtype)).float())
        return _turn(k.unsqueeze(-2), positions, rope).squeeze(-2)


def _turn(x: torch.Tensor, positions: torch.Tensor | slice, rope: Rotary) -> torch.Tensor:
    return torch.cat([rope(x[..., :ROPE_DIM], positions), x[..., ROPE_DIM:]], dim=-1)


# ---------------------------------------------------------------------------------------------------------------------
# Training


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Windows:
    """Training texts of one layer, all of one length, positions from 0.

    Attributes:
        x: the indexer's input, ``[windows, n, width]``.
        q: rotated queries of the layer's attention, ``[windows, heads, n, head_dim]``.
        k: rotated keys, ``[windows, kv_heads, n, head_dim]``.
        logit_factor: of the attention's logits, beside ``head_dim^-0.5``.
    """

    x: torch.Tensor
    q: torch.Tensor
    k: torch.Tensor
    logit_factor: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """How a training went.

    Attributes:
        steps: optimiser steps.
        first_kl: mean loss of the first steps, nats; NaN without training.
        last_kl: mean loss of the last steps.
    """

    steps: int
    first_kl: float
    last_kl: float


def train(
    windows: Windows,
    indexers: Sequence[Indexer],
    rope: Rotary,
    *,
    steps: int,
    seed: int,
    on_step: Callable[[], None] | None = None,
) -> list[Training]:
    """Train indexers of one layer side by side: each step shows all of them the same query rows.

    AdamW, learning rate 1e-3 after a short warm-up and a tenth of it over the last fifth, gradient norm at most 1.

    Args:
        windows: the training texts.
        indexers: on the device of the texts; changed in place.
        rope: tables of the indexer's rotation.
        steps: optimiser steps; 0 leaves the indexers untrained.
        seed: of the choice of windows and rows.
        on_step: called after each step.

    Returns:
        One report per indexer.
    """
    if steps == 0:
        return [Training(steps=0, first_kl=torch.nan, last_kl=torch.nan) for _ in indexers]
    device = windows.x.device
    count, length = windows.x.shape[:2]
    generator = torch.Generator().manual_seed(seed)
    all_windows = torch.randint(count, (steps, 1), generator=generator).to(device)
    all_rows = torch.randint(length, (steps, min(ROWS, length)), generator=generator).to(device)
    window, rows = all_windows[0].clone(), all_rows[0].clone()
    rate = torch.tensor(LEARNING_RATE, device=device)
    on_gpu = device.type == "cuda"
    optimisers = [
        torch.optim.AdamW(
            indexer.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.0, capturable=on_gpu, foreach=on_gpu
        )
        for indexer in indexers
    ]
    positions = slice(0, length)
    losses = torch.zeros(len(indexers), device=device)
    history = torch.empty(steps, len(indexers), device=device)

    def step() -> None:
        x = windows.x.index_select(0, window)[0]
        with torch.no_grad():
            q, k = (part.index_select(0, window)[0] for part in (windows.q, windows.k))
            hidden = torch.arange(length, device=device) > rows[:, None]
            target = attention_target(q[:, rows], k, hidden, windows.logit_factor)
            log_target = torch.log(target + 1e-9)
        for i, (indexer, optimiser) in enumerate(zip(indexers, optimisers)):
            optimiser.zero_grad(set_to_none=True)
            score = _scores(indexer, x, rows, positions, rope).masked_fill(hidden, HIDDEN)
            loss = (target * (log_target - torch.log_softmax(score, dim=-1))).sum(-1).mean()
            loss.backward()
            nn.utils.clip_grad_norm_(indexer.parameters(), 1.0)
            optimiser.step()
            losses[i] = loss.detach()

    def load(index: int) -> None:
        window.copy_(all_windows[index])
        rows.copy_(all_rows[index])
        final = 0.1 if index >= steps * (1 - FINAL_SHARE) else 1.0
        rate.fill_(LEARNING_RATE * min(1.0, (index + 1) / WARM_UP_STEPS) * final)

    graph = None
    for index in range(steps):
        load(index)
        if on_gpu and index == EAGER_STEPS:
            # The launches of a step take longer than its arithmetic: record them once.
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                step()
        if graph is not None:
            graph.replay()
        elif on_gpu:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                step()
            torch.cuda.current_stream().wait_stream(side)
        else:
            step()
        history[index] = losses
        if on_step is not None:
            on_step()
    first, last = history[:LOSS_MEAN].mean(0).tolist(), history[-LOSS_MEAN:].mean(0).tolist()
    return [Training(steps=steps, first_kl=a, last_kl=b) for a, b in zip(first, last)]


def attention_target(q: torch.Tensor, k: torch.Tensor, hidden: torch.Tensor, logit_factor: float) -> torch.Tensor:
    """The attention of a layer, averaged over its heads.

    Args:
        q: rotated queries ``[heads, rows, head_dim]``.
        k: rotated keys ``[kv_heads, n, head_dim]``.
        hidden: bool ``[rows, n]``, keys that a row does not see.
        logit_factor: of the logits, beside ``head_dim^-0.5``.

    Returns:
        float32 ``[rows, n]``; each row sums to 1.
    """
    group = q.shape[0] // k.shape[0]
    grouped = q.float().unflatten(0, (k.shape[0], group))
    total: torch.Tensor = torch.zeros(hidden.shape, device=q.device)
    for heads, key in zip(grouped, k.float()):
        logits = heads @ key.T * (logit_factor * q.shape[-1] ** -0.5)
        total += torch.softmax(logits.masked_fill(hidden, HIDDEN), dim=-1).sum(0)
    return total / q.shape[0]


def _scores(indexer: Indexer, x: torch.Tensor, rows: torch.Tensor, positions: slice, rope: Rotary) -> torch.Tensor:
    """Scores ``[rows, n]`` of some rows of a text, in float32."""
    q, w = indexer.queries(x[rows], rows, rope)
    k = indexer.keys(x, positions, rope).to(q.dtype)
    dots = functional.linear(q.flatten(0, 1), k).relu_().unflatten(0, q.shape[:2])
    return torch.bmm(w.to(q.dtype).unsqueeze(1), dots).squeeze(1).float() * SCORE_SCALE


# ---------------------------------------------------------------------------------------------------------------------
# FP8 queries and keys


def quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round tokens to E4M3 with a power-of-two scale each, as production does.

    ::

        amax = max(max_i |x_i|, 1e-4)        scale = 2^ceil(log2(amax / 448))        code = E4M3(clamp(x / scale))

    Args:
        x: ``[..., d]`` of any floating dtype, finite.

    Returns:
        float8_e4m3fn ``[..., d]`` and float32 ``[...]``.

    Exactness: exact up to the rounding of ``amax / 448`` and of the codes; equal to ``dosa_ref.quantize``.

    Special values: NaN and Inf are not expected here; the reference says what they would give.
    """
    wide = x.float()
    ratio = wide.abs().amax(-1).clamp(min=AMAX_FLOOR) / float(E4M3_MAX)
    # The next power of two, by its bits: log2 of a float32 may be off by a whole step.
    scale = ((ratio.view(torch.int32) + 0x007F_FFFF) & 0x7F80_0000).view(torch.float32)
    limit = float(E4M3_MAX)
    return (wide / scale.unsqueeze(-1)).clamp(-limit, limit).to(torch.float8_e4m3fn), scale


def hadamard_matrix(device: torch.device) -> torch.Tensor:
    """The orthogonal Hadamard matrix of 128 rows, float32."""
    matrix: torch.Tensor = torch.from_numpy(hadamard(HEAD_DIM)).to(device, torch.float32)
    return matrix * SCORE_SCALE


@torch.no_grad()
def prepare_queries(
    indexer: Indexer, x: torch.Tensor, positions: slice, rope: Rotary, rotation: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """FP8 queries and the weights that hold every factor.

    Args:
        indexer: of the layer.
        x: states ``[n, width]``.
        positions: theirs, a slice of ``n``.
        rope: tables of the indexer's rotation.
        rotation: orthogonal ``[128, 128]`` that queries and keys go through, or None.

    Returns:
        float8_e4m3fn ``[n, H, 128]`` and float32 ``[n, H]``: ``w * q_scale * 128^-0.5``, ``H^-0.5`` inside ``w``.
    """
    q, w = indexer.queries(x, positions, rope)
    codes, scale = quantize(q if rotation is None else q.float() @ rotation)
    return codes, w * scale * SCORE_SCALE


@torch.no_grad()
def prepare_keys(
    indexer: Indexer, x: torch.Tensor, positions: slice, rope: Rotary, rotation: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """FP8 keys float8_e4m3fn ``[n, 128]`` and their scales float32 ``[n]``; arguments as in :func:`prepare_queries`."""
    k = indexer.keys(x, positions, rope)
    return quantize(k if rotation is None else k @ rotation)


IndexerKey = tuple[int, int]
"""Layer and number of heads."""
