"""The language model whose activations the traces come from: a Llama-type decoder, read from a pack.

Only what a trace needs: hidden states of whole texts, up to a million tokens in one pass with YaRN's rotary frequencies
for that length, and a check of what the length does to the model's predictions. Weights stay in the blocks of the GGUF
file until they reach the device.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import safetensors
import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from dosa_ref.spec import InvalidProblem

PACK_SCHEMA: Final = "dosa.pack/1"
DTYPE: Final = torch.bfloat16
"""Of weights and activations; norms, rotations and softmax are computed in float32."""

CHUNK: Final = 131_072
"""Tokens that go through the position-wise parts of a layer at once: bounds the memory of a long pass."""

YARN_SLOW: Final = 1.0
"""A pair that turns at most so often in the trained context is slowed down by the whole stretch (YaRN's alpha)."""
YARN_FAST: Final = 32.0
"""A pair that turns at least so often there is left alone (YaRN's beta); between the two lies a linear ramp."""
YARN_TEMPERATURE: Final = 0.1
"""Attention logits are multiplied by ``(YARN_TEMPERATURE ln(stretch) + 1)^2``."""

LOSS_BINS: Final = 16
LOSS_WINDOWS: Final = 2
"""Windows per bin whose tokens are predicted twice: after everything before them, and after the window alone."""
LOSS_SAMPLES: Final = 1024
"""Predicted tokens per window, evenly spaced over its second half."""
FLAT_LIMIT: Final = 0.1
"""Nats per token by which the long context may predict worse than the short one before a trace says so."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Sizes of the model, as its GGUF file states them.

    Attributes:
        name: the model's name.
        width: size of a hidden state.
        num_heads: attention heads.
        num_kv_heads: key and value heads; ``num_heads`` is a multiple of it.
        head_dim: size of an attention head.
        rope_base: base of the rotary embedding.
        norm_eps: epsilon of the RMS norms.
        context_length: tokens that the model was trained for.
        model_layers: layers of the model.
        pack_layers: layers that the pack holds whole, the first ones.
    """

    name: str
    width: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_base: float
    norm_eps: float
    context_length: int
    model_layers: int
    pack_layers: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Pack:
    """A pack in memory.

    Attributes:
        config: sizes of the model.
        weights: tensors by GGUF name, on one device: matrices in ``DTYPE`` ``[out, in]``, norms in float32; the rows of
            ``token_embd.weight`` are the tokens in use.
        tokens: per domain the text, int64 ``[n]``, as rows of the embedding.
        header: the pack's text header.
    """

    config: ModelConfig
    weights: Mapping[str, torch.Tensor]
    tokens: Mapping[str, torch.Tensor]
    header: Mapping[str, str]


def load_pack(paths: Path | Sequence[Path], device: torch.device) -> Pack:
    """Read the part or the parts of a pack and decode its weights.

    Args:
        paths: the file, or every part in any order.
        device: where the tensors go.

    Returns:
        The pack.

    Raises:
        InvalidProblem: ``pack``: a file is unreadable, of another kind, of another pack, or a part is missing.
    """
    files = [paths] if isinstance(paths, Path) else list(paths)
    streams: dict[str, npt.NDArray[np.uint8]] = {}
    headers = []
    for file in files:
        try:
            with safetensors.safe_open(file, "numpy") as stream:
                headers.append(dict(stream.metadata() or {}))
                streams |= {name: stream.get_tensor(name) for name in stream.keys()}  # noqa: SIM118 (no mapping)
        except (OSError, safetensors.SafetensorError) as error:
            raise InvalidProblem("pack", f"{file}: {error}", "a readable safetensors file") from error
    if not headers or any(header.get("schema") != PACK_SCHEMA for header in headers):
        raise InvalidProblem("pack", [header.get("schema") for header in headers], f"files of {PACK_SCHEMA!r}")
    header = headers[0]
    if any(other["content_sha256"] != header["content_sha256"] for other in headers):
        raise InvalidProblem("pack", [str(file) for file in files], "parts of one pack")
    described: dict[str, dict[str, Any]] = json.loads(header["tensors"])
    if missing := sorted(described.keys() - streams.keys()):
        raise InvalidProblem("pack", f"no tensor {missing[0]} in {[str(file) for file in files]}", "every part")
    weights, tokens = {}, {}
    for name, about in described.items():
        try:
            # A bytearray, since torch wants memory that it may write to.
            data = np.frombuffer(bytearray(zlib.decompress(streams[name].tobytes())), about["dtype"]).reshape(
                about["shape"]
            )
        except (zlib.error, ValueError) as error:
            raise InvalidProblem("pack", f"{name}: {error}", f"{about}") from error
        if about["kind"] == "tokens":
            tokens[name.removeprefix("tokens.")] = torch.from_numpy(data.astype(np.int64)).to(device)
        else:
            value = dequantize(torch.from_numpy(data).to(device), about["kind"])
            weights[name] = value if value.ndim == 1 else value.to(DTYPE)
    config = ModelConfig(**json.loads(header["model"]))
    return Pack(config=config, weights=weights, tokens=tokens, header=header)


def dequantize(blocks: torch.Tensor, kind: str) -> torch.Tensor:
    """Decode GGUF blocks to float32.

    ``Q4_1`` holds 32 weights as float16 ``d``, float16 ``m`` and 16 bytes of codes, the low halves first:
    ``code * d + m``. ``Q8_0`` holds 32 weights as float16 ``d`` and 32 signed bytes: ``code * d``.

    Args:
        blocks: uint8 ``[rows, bytes]``, or float32 of any shape for ``F32``.
        kind: ``F32``, ``Q4_1`` or ``Q8_0``.

    Returns:
        float32 ``[rows, weights]``.

    Raises:
        InvalidProblem: another kind.

    Exactness: the product is rounded to float32 once, and so is the sum.
    """
    if kind == "F32":
        return blocks
    if kind == "Q8_0":
        rows = blocks.unflatten(-1, (-1, 34))
        scale = rows[..., :2].contiguous().view(torch.float16).float()
        return torch.flatten(rows[..., 2:].contiguous().view(torch.int8).float() * scale, -2)
    if kind == "Q4_1":
        rows = blocks.unflatten(-1, (-1, 20))
        scale, least = (rows[..., a : a + 2].contiguous().view(torch.float16).float() for a in (0, 2))
        codes = rows[..., 4:]
        return torch.flatten(torch.cat([codes & 15, codes >> 4], dim=-1).float() * scale + least, -2)
    raise InvalidProblem("kind", kind, "F32, Q4_1 or Q8_0")


# ---------------------------------------------------------------------------------------------------------------------
# Rotary embedding


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rotary:
    """Cosines and sines of a rotary embedding, and the factor of the attention logits that goes with them.

    Attributes:
        cos, sin: float32 ``[positions, d / 2]``.
        half_split: whether a pair is ``(i, i + d/2)``; otherwise ``(2 i, 2 i + 1)``.
        logit_factor: what the logits of an attention with these rotations are multiplied by, beside ``d^-0.5``.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    half_split: bool = False
    logit_factor: float = 1.0

    def __call__(self, x: torch.Tensor, positions: torch.Tensor | slice) -> torch.Tensor:
        """Rotate ``x`` ``[..., positions, heads, d]``; computed in float32, returned in the dtype of ``x``."""
        cos, sin = self.cos[positions].unsqueeze(-2), self.sin[positions].unsqueeze(-2)
        wide = x.float()
        if self.half_split:
            a, b = wide.chunk(2, dim=-1)
            return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1).to(x.dtype)
        a, b = wide[..., 0::2], wide[..., 1::2]
        return torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1).flatten(-2).to(x.dtype)


def rotary(
    length: int,
    dim: int,
    base: float,
    device: torch.device,
    half_split: bool = False,
    *,
    context: int | None = None,
) -> Rotary:
    """Tables for positions ``0 .. length-1`` of a rotation of ``dim`` numbers: ``angle = position f_i``.

    Args:
        length: positions.
        dim: numbers that are rotated, two to a frequency.
        base: of the frequencies, ``f_i = base^(-2i/dim)``.
        device: of the tables.
        half_split: see :class:`Rotary`.
        context: tokens that the frequencies were trained for. Where the length is larger, they are YaRN's
            (:func:`yarn_frequencies`), and so is the factor of the logits. None leaves them as they are.

    Returns:
        The tables.

    Exactness: angles and functions in float64, rounded to float32 once.
    """
    stretch = 1.0 if context is None else max(1.0, length / context)
    frequency = base ** (-torch.arange(0, dim, 2, dtype=torch.float64, device=device) / dim)
    if context is not None:
        frequency = yarn_frequencies(frequency, context, stretch)
    cos, sin = (torch.empty(length, dim // 2, device=device) for _ in range(2))
    for a in range(0, length, CHUNK):
        # float64: a float32 angle of a million radians is off by 0.06.
        angle = torch.arange(a, min(a + CHUNK, length), dtype=torch.float64, device=device)[:, None] * frequency
        cos[a : a + CHUNK], sin[a : a + CHUNK] = angle.cos(), angle.sin()
    return Rotary(cos=cos, sin=sin, half_split=half_split, logit_factor=yarn_logit_factor(stretch))


def yarn_frequencies(frequency: torch.Tensor, context: int, stretch: float) -> torch.Tensor:
    """Frequencies for ``stretch`` times the trained context, by parts: fast ones stay, slow ones are slowed down.

    ::

        r = context f / (2 pi)        g = clamp((r - YARN_SLOW) / (YARN_FAST - YARN_SLOW), 0, 1)
        f' = f g + f / stretch (1 - g)

    Args:
        frequency: ``f``, float64 ``[n]``, radians per position.
        context: tokens that they were trained for.
        stretch: at least 1; 1 gives ``f`` back.

    Returns:
        ``f'``, float64 ``[n]``.

    Source: YaRN (arXiv 2309.00071), "NTK-by-parts" interpolation with alpha = 1 and beta = 32.
    """
    turns = context * frequency / (2 * math.pi)
    kept = ((turns - YARN_SLOW) / (YARN_FAST - YARN_SLOW)).clamp(0, 1)
    return frequency * kept + frequency / stretch * (1 - kept)


def yarn_logit_factor(stretch: float) -> float:
    """``(YARN_TEMPERATURE ln(stretch) + 1)^2``, 1 where nothing is stretched.

    YaRN scales queries and keys by the root each.
    """
    return (YARN_TEMPERATURE * math.log(stretch) + 1) ** 2


# ---------------------------------------------------------------------------------------------------------------------
# The pass


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LayerInput:
    """What enters a layer.

    Attributes:
        layer: which.
        state: the hidden state before the layer, ``[batch, n, width]``.
        x: the state behind the layer's attention norm, ``[batch, n, width]``: the indexer's input.
        q: rotated queries of the layer's attention, ``[batch, num_heads, n, head_dim]``.
        k: rotated keys, ``[batch, num_kv_heads, n, head_dim]``.
    """

    layer: int
    state: torch.Tensor
    x: torch.Tensor
    q: torch.Tensor
    k: torch.Tensor


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight``, computed in float32, in the dtype of ``x``."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight).to(x.dtype)


@torch.no_grad()
def run_layers(pack: Pack, tokens: torch.Tensor, last: int, rope: Rotary) -> Iterator[LayerInput]:
    """Yield the inputs of layers ``0 .. last`` for some texts; the attention is causal.

    Args:
        pack: the model.
        tokens: int64 ``[batch, n]``.
        last: the last layer whose input is wanted, at most the number of layers in the pack; behind the model's last
            layer there is only ``state``, the others are empty.
        rope: tables for at least ``n`` positions, and the factor of the logits.

    Yields:
        The inputs, in order. The ``state`` of one is overwritten when the next is asked for.
    """
    config, weights = pack.config, pack.weights
    batch, length = tokens.shape
    backend = attention_backend(tokens.device, config.head_dim)
    state = torch.empty(batch, length, config.width, dtype=DTYPE, device=tokens.device)
    for part in _parts(length):
        state[:, part] = weights["token_embd.weight"][tokens[:, part]]
    empty = state[:, :0]
    for layer in range(last + 1):
        if layer == config.model_layers:
            yield LayerInput(layer=layer, state=state, x=empty, q=empty, k=empty)
            return

        def weight(name: str, layer: int = layer) -> torch.Tensor:
            return weights[f"blk.{layer}.{name}.weight"]

        x = torch.empty_like(state)
        q, k = (
            torch.empty(batch, n, length, config.head_dim, dtype=DTYPE, device=x.device)
            for n in (config.num_heads, config.num_kv_heads)
        )
        for part in _parts(length):
            x[:, part] = rms_norm(state[:, part], weight("attn_norm"), config.norm_eps)
            for out, name in ((q, "attn_q"), (k, "attn_k")):
                heads = functional.linear(x[:, part], weight(name)).unflatten(-1, (-1, config.head_dim))
                out[:, :, part] = rope(heads, part).transpose(1, 2)
        yield LayerInput(layer=layer, state=state, x=x, q=q, k=k)
        if layer == last:
            return
        v = torch.empty_like(k)
        for part in _parts(length):
            v[:, :, part] = (
                functional.linear(x[:, part], weight("attn_v")).unflatten(-1, (-1, config.head_dim)).transpose(1, 2)
            )
        del x
        attended = _attention(q, k, v, rope.logit_factor, backend)
        del q, k, v
        for part in _parts(length):
            mixed = attended[:, :, part].transpose(1, 2).flatten(-2)
            now = state[:, part] + functional.linear(mixed, weight("attn_output"))
            y = rms_norm(now, weight("ffn_norm"), config.norm_eps)
            gate = functional.silu(functional.linear(y, weight("ffn_gate"))) * functional.linear(y, weight("ffn_up"))
            state[:, part] = now + functional.linear(gate, weight("ffn_down"))
        del attended


def _parts(length: int) -> list[slice]:
    """Positions of a text in pieces of at most ``CHUNK``."""
    return [slice(a, min(a + CHUNK, length)) for a in range(0, length, CHUNK)]


def attention_backend(device: torch.device, head_dim: int) -> SDPBackend:
    """The kernel that computes the attention on a device; headers of traces name it.

    A fixed choice: which kernel runs must not depend on the library's mood, or the same seed gives another trace. It is
    cuDNN's where the library says that it serves the model's heads, flash-attention's on other GPUs, and the plain one
    on a CPU. Nothing falls back later: a kernel that refuses a length raises an error.
    """
    if device.type != "cuda":
        return SDPBackend.MATH
    cuda: Any = torch.backends.cuda
    sample = torch.empty(1, 1, 128, head_dim, dtype=DTYPE, device=device)
    with _deterministic_forward():
        serves = cuda.can_use_cudnn_attention(cuda.SDPAParams(sample, sample, sample, None, 0.0, True, False))
    return SDPBackend.CUDNN_ATTENTION if serves else SDPBackend.FLASH_ATTENTION


@contextlib.contextmanager
def _deterministic_forward() -> Iterator[None]:
    """Let cuDNN's attention run where only deterministic operations may.

    The library refuses it as a whole, forward pass included. The forward pass, the only one used here, gave the same
    bits whenever it was repeated; ``docs/evidence/trace_hashes.json`` has hashes of traces from separate processes.
    """
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(False)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def _attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, logit_factor: float, backend: SDPBackend
) -> torch.Tensor:
    """Causal attention ``[batch, num_heads, n, head_dim]`` with grouped key and value heads.

    The logits are ``logit_factor head_dim^-0.5 q . k``.
    """
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    scale = logit_factor * q.shape[-1] ** -0.5
    with sdpa_kernel(backend), _deterministic_forward():
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)


# ---------------------------------------------------------------------------------------------------------------------
# What the length does to the predictions


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LossBin:
    """Mean losses of sampled tokens in a range of positions, in nats.

    Attributes:
        first, end: the range, half-open.
        long: after the whole text before them, with the frequencies of the pass.
        short: after the trained context alone, with the frequencies of the pass.
        native: after the trained context alone, with the model's own frequencies.
    """

    first: int
    end: int
    long: float
    short: float
    native: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LossCheck:
    """The model's loss over the positions of a pass.

    The same tokens are predicted with a long and with a short context, so that easy and hard passages of the text do
    not look like an effect of the position.

    Attributes:
        bins: in order of position.
    """

    bins: tuple[LossBin, ...]

    @property
    def excess(self) -> float:
        """The largest excess of the long over the short context among the bins, nats per token."""
        return max(entry.long - entry.short for entry in self.bins)

    @property
    def scaling(self) -> float:
        """What the frequencies of the pass alone cost, mean over the bins, nats per token."""
        return sum(entry.short - entry.native for entry in self.bins) / len(self.bins)

    @property
    def flat(self) -> bool:
        """Whether no bin is worse by more than ``FLAT_LIMIT``."""
        return self.excess <= FLAT_LIMIT


@torch.no_grad()
def check_loss(pack: Pack, tokens: torch.Tensor, state: torch.Tensor, rope: Rotary) -> LossCheck:
    """Compare a long pass with passes over short windows of the same text.

    Args:
        pack: the whole model.
        tokens: int64 ``[n]``, the text of the pass.
        state: ``[n, width]``, hidden state of the pass behind the last layer.
        rope: the tables of the pass.

    Returns:
        The losses; the softmax is over the tokens in use.
    """
    config, length = pack.config, len(tokens)
    window = min(config.context_length, max(2, length // LOSS_BINS))
    count = max(1, min(LOSS_WINDOWS, length // LOSS_BINS // window))
    edges = [length * i // LOSS_BINS for i in range(LOSS_BINS + 1)]
    native = rotary(window, config.head_dim, config.rope_base, tokens.device)
    half = window // 2
    # Each sampled state predicts the token behind it.
    sample = torch.arange(half, window - 1, max(1, (window - half) // LOSS_SAMPLES), device=tokens.device)
    bins = []
    for first, end in itertools.pairwise(edges):
        losses = []
        for start in (max(0, end - window * (i + 1)) for i in range(count)):
            text = tokens[start : start + window]
            states = [state[start + sample]]
            for tables in (rope, native):
                *_, after = run_layers(pack, text[None], config.model_layers, tables)
                states.append(after.state[0, sample])
            losses.append([_loss(pack, x, text[sample + 1]) for x in states])
        long, short, own = torch.tensor(losses).mean(0).tolist()
        bins.append(LossBin(first=first, end=end, long=long, short=short, native=own))
    return LossCheck(bins=tuple(bins))


def _loss(pack: Pack, state: torch.Tensor, following: torch.Tensor) -> float:
    """Mean cross-entropy in nats of the following tokens, among the tokens in use."""
    x = rms_norm(state, pack.weights["output_norm.weight"], pack.config.norm_eps)
    logits = functional.linear(x, pack.weights["token_embd.weight"]).float()
    return float(functional.cross_entropy(logits, following))


OnProgress = Callable[[int, int], None]
