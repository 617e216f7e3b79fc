"""Make traces: one pass of the language model per text, indexers trained per layer, FP8 queries and keys.

The traces are those of *indexers trained with the DeepSeek-V3.2 warm-up loss on the activations of the model in the
pack*; they are not traces of DeepSeek or GLM, and every header says so. Training texts are the last tokens of every
domain, the pass runs over the first tokens of one: the two never overlap.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import ml_dtypes
import torch

from dosa_ref.problem import PrefillProblem
from dosa_ref.spec import HEAD_DIM, InvalidProblem
from dosa_ref.trace import save_trace
from dosa_verify.traces.indexer import (
    ROPE_DIM,
    Indexer,
    IndexerKey,
    Training,
    Windows,
    hadamard_matrix,
    prepare_keys,
    prepare_queries,
    train,
)
from dosa_verify.traces.model import (
    YARN_FAST,
    YARN_SLOW,
    LayerInput,
    LossCheck,
    OnProgress,
    Pack,
    Rotary,
    attention_backend,
    load_pack,
    rotary,
    run_layers,
)
from dosa_verify.traces.model import check_loss as loss_check

TOPK: Final = 2048
STEPS: Final = 1500
TRAIN_KEYS: Final = 16_384
"""Tokens of a training text."""
TRAIN_WINDOWS: Final = 5
"""Training texts per domain."""
QUERY_BLOCK: Final = 4096
"""Query rows that are prepared at once."""
KEY_BLOCK: Final = 131_072
LAYER_UNITS: Final = 50
"""Steps of the progress bar that a layer of the pass counts."""


class TraceTensors(NamedTuple):
    """One trace on the device, by the names of ``dosa.trace/1``.

    Attributes:
        name: ``<domain>_layer<layer>_h<H>_<keys>``.
        q: float8_e4m3fn ``[rows, H, 128]``, queries of the last positions.
        k: float8_e4m3fn ``[keys, 128]``.
        k_scale: float32 ``[keys]``, powers of two.
        weights: float32 ``[rows, H]``, every factor folded in.
        ks: int32 ``[rows]``, all 0.
        ke: int32 ``[rows]``; a query sees its own position and those before.
        header: text header of the file.
    """

    name: str
    q: torch.Tensor
    k: torch.Tensor
    k_scale: torch.Tensor
    weights: torch.Tensor
    ks: torch.Tensor
    ke: torch.Tensor
    header: Mapping[str, str]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How indexers are built and trained; goes into every header.

    Attributes:
        seed: of the initial weights and of the training rows.
        steps: training steps; 0 gives an untrained indexer, a control.
        half_split: rotary pairs ``(i, i + 32)`` instead of ``(2 i, 2 i + 1)``.
        hadamard: whether queries and keys go through the Hadamard rotation before they are rounded.
        train_keys: tokens of a training text.
        train_windows: training texts per domain.
    """

    seed: int = 0
    steps: int = STEPS
    half_split: bool = False
    hadamard: bool = False
    train_keys: int = TRAIN_KEYS
    train_windows: int = TRAIN_WINDOWS


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Traces of one kind of indexer.

    Attributes:
        options: how the indexers are built and trained.
        layers: layers whose attention they imitate.
        num_heads: their head counts.
        num_keys: lengths, in tokens.
    """

    options: Options
    layers: Sequence[int]
    num_heads: Sequence[int]
    num_keys: Sequence[int]


def make(
    pack: Pack,
    *,
    domain: str | Sequence[str],
    layers: Sequence[int],
    num_heads: Sequence[int],
    num_keys: int | Sequence[int],
    num_queries: int,
    seed: int = 0,
    steps: int = STEPS,
    half_split: bool = False,
    hadamard: bool = False,
    train_keys: int = TRAIN_KEYS,
    train_windows: int = TRAIN_WINDOWS,
    check_loss: bool = False,
    topk: int = TOPK,
    on_progress: OnProgress | None = None,
) -> Iterator[TraceTensors]:
    """Train the indexers of some layers, run the texts, and yield a trace per domain, layer, head count and length.

    The longest length is the length of the pass, and fixes the rotary frequencies and the factor of the attention's
    logits (YaRN), of the training texts too; shorter ones are its last keys, with the same queries. The indexers' own
    rotation has the same frequencies; its scores have no such factor, since they are trained with these frequencies.
    Traces come in the order domain, layer, heads, length; each holds its tensors alone, so that what is not kept is
    freed.

    Args:
        pack: model and texts, on the device that does the work.
        domain: name or names of texts in the pack.
        layers: layers whose attention the indexers imitate, each below the number of layers in the pack.
        num_heads: head counts of the indexers.
        num_keys: lengths, in tokens.
        num_queries: queries of each trace, the last positions; at most the shortest length.
        seed, steps, half_split, hadamard, train_keys, train_windows: see :class:`Options`.
        check_loss: compare the model's loss at every position of the pass with that after a short context; takes the
            pass through the whole model, so the pack must hold it. The header has the answer, or that nobody asked.
        topk: goes into the header.
        on_progress: called with (done, total).

    Yields:
        The traces.

    Raises:
        InvalidProblem: naming the argument: a domain that the pack lacks, a layer beyond it, a text too short for
            the lengths and the training texts, no length, more queries than keys.

    Exactness: the same pack, arguments and machine kind give the same bits; another GPU or library may round a matrix
        product otherwise.
    """
    domains = [domain] if isinstance(domain, str) else list(domain)
    options = Options(
        seed=seed,
        steps=steps,
        half_split=half_split,
        hadamard=hadamard,
        train_keys=train_keys,
        train_windows=train_windows,
    )
    lengths = [num_keys] if isinstance(num_keys, int) else list(num_keys)
    return make_requests(
        pack,
        [Request(options=options, layers=layers, num_heads=num_heads, num_keys=lengths)],
        domains=domains,
        num_queries=num_queries,
        check_loss=domains if check_loss else (),
        topk=topk,
        on_progress=on_progress,
    )


def make_requests(
    pack: Pack,
    requests: Sequence[Request],
    *,
    domains: Sequence[str],
    num_queries: int,
    check_loss: Collection[str] = (),
    topk: int = TOPK,
    on_progress: OnProgress | None = None,
) -> Iterator[TraceTensors]:
    """Traces of several kinds of indexers, from one pass per text; see :func:`make`.

    The longest length of all requests is the length of the pass. Traces come in the order domain, layer, request,
    heads, length. Requests that differ in the Hadamard rotation alone share their trained indexers.

    Args:
        pack: model and texts, on the device that does the work.
        requests: what is wanted of every text.
        domains: names of texts in the pack.
        num_queries: queries of each trace, the last positions; at most the shortest length.
        check_loss: the texts whose loss is checked.
        topk: goes into the header.
        on_progress: called with (done, total).

    Yields:
        The traces.

    Raises:
        InvalidProblem: as :func:`make`; ``requests`` if there is none.

    Exactness: as :func:`make`; what else is requested does not change a trace.
    """
    if not requests:
        raise InvalidProblem("requests", "none", "at least one")
    length = max((max(request.num_keys, default=0) for request in requests), default=0)
    for request in requests:
        _check(pack, request, domains, length, num_queries)
    if check_loss and pack.config.pack_layers < pack.config.model_layers:
        held = f"a pack of {pack.config.pack_layers} of {pack.config.model_layers} layers"
        raise InvalidProblem("check_loss", held, "the whole model")
    config = pack.config
    layers = sorted({layer for request in requests for layer in request.layers})
    depths = {name: config.model_layers if name in check_loss else max(layers) for name in domains}
    kinds = {_training_kind(request.options): None for request in requests}
    trainings = sum(
        kind.steps * len({layer for r in requests if _training_kind(r.options) == kind for layer in r.layers})
        for kind in kinds
    )
    progress = _Progress(on_progress, trainings + sum(depths.values()) * LAYER_UNITS)
    device = pack.weights["token_embd.weight"].device
    rope = rotary(length, config.head_dim, config.rope_base, device, context=config.context_length)
    turns = {
        half: rotary(length, ROPE_DIM, config.rope_base, device, half, context=config.context_length)
        for half in sorted({request.options.half_split for request in requests})
    }
    with deterministic():
        trained = _train_all(pack, requests, rope, turns, progress)
    for name in domains:
        tokens = pack.tokens[name][:length]
        with deterministic():
            inputs: dict[int, torch.Tensor] = {}
            state = None
            for entry in run_layers(pack, tokens[None], depths[name], rope):
                if entry.layer in layers:
                    inputs[entry.layer] = entry.x[0]
                state = entry.state[0]
                progress.add(LAYER_UNITS if entry.layer else 0)
            assert state is not None
            loss = loss_check(pack, tokens, state, rope) if name in check_loss else None
            del state, entry
        for layer in layers:
            x = inputs.pop(layer)
            for request in requests:
                options = request.options
                rotation = hadamard_matrix(device) if options.hadamard else None
                for heads in request.num_heads if layer in request.layers else ():
                    indexer, training = trained[_training_kind(options)][layer, heads]
                    with deterministic():
                        tensors = _apply(indexer, x, num_queries, turns[options.half_split], rotation)
                    for keys in request.num_keys:
                        header = _header(pack, options, name, layer, heads, rope, keys, topk, loss, training)
                        yield _suffix(f"{name}_layer{layer:02d}_h{heads}_{keys}", tensors, keys, header)


def _training_kind(options: Options) -> Options:
    """What decides how an indexer is trained: everything but the rotation behind it."""
    return dataclasses.replace(options, hadamard=False)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """A trace file.

    Attributes:
        file: where.
        sha256: of the file.
        bytes: its size.
        header: its text header.
    """

    file: Path
    sha256: str
    bytes: int
    header: Mapping[str, str]

    def to_json(self) -> dict[str, object]:
        """One entry of the record (schema ``dosa.trace_make/1``)."""
        return {"file": str(self.file), "sha256": self.sha256, "bytes": self.bytes, "header": dict(self.header)}


def write(files: Sequence[Path], folder: Path, *, device: str, topk: int, **arguments: Any) -> Iterator[Written]:
    """Make traces and write each to ``<folder>/<name>.safetensors``.

    Args:
        files: the pack's parts.
        folder: where the traces go.
        device: ``cuda`` or ``cpu``.
        topk: keys per row, for the header.
        **arguments: those of :func:`make`.

    Yields:
        What was written, file by file.

    Raises:
        InvalidProblem: see :func:`load_pack` and :func:`make`.
    """
    pack = load_pack(files, torch.device(device))
    for trace in make(pack, topk=topk, **arguments):
        file = folder / f"{trace.name}.safetensors"
        save_trace(file, to_problem(trace, topk), trace.header)
        data = file.read_bytes()
        yield Written(file=file, sha256=hashlib.sha256(data).hexdigest(), bytes=len(data), header=trace.header)


def to_problem(trace: TraceTensors, topk: int) -> PrefillProblem:
    """The reference's form of a trace, in host memory."""
    codes = (x.view(torch.uint8).cpu().numpy().view(ml_dtypes.float8_e4m3fn) for x in (trace.q, trace.k))
    q, k = codes
    return PrefillProblem(
        q=q,
        k=k,
        k_scale=trace.k_scale.cpu().numpy(),
        weights=trace.weights.cpu().numpy(),
        cu_seqlen_ks=trace.ks.cpu().numpy(),
        cu_seqlen_ke=trace.ke.cpu().numpy(),
        topk=topk,
    )


def _train_all(
    pack: Pack, requests: Sequence[Request], rope: Rotary, turns: Mapping[bool, Rotary], progress: _Progress
) -> dict[Options, dict[IndexerKey, tuple[Indexer, Training]]]:
    """The trained indexers of all requests by the kind of training, layer and head count."""
    wanted: dict[Options, dict[int, list[int]]] = {}
    for request in requests:
        kind = wanted.setdefault(_training_kind(request.options), {})
        for layer in request.layers:
            known = kind.setdefault(layer, [])
            known += [heads for heads in request.num_heads if heads not in known]
    captured: dict[tuple[int, int], dict[int, Windows]] = {}
    for size in {(kind.train_windows, kind.train_keys): None for kind in wanted if kind.steps}:
        layers = {layer for kind, found in wanted.items() for layer in found if kind.steps and _size(kind) == size}
        captured[size] = capture(pack, *size, sorted(layers), rope)
    return {
        kind: {
            key: entry
            for layer, heads in found.items()
            for key, entry in train_layer(
                captured[_size(kind)][layer] if kind.steps else None,
                pack.config.width,
                kind,
                layer,
                heads,
                turns[kind.half_split],
                progress,
            ).items()
        }
        for kind, found in wanted.items()
    }


def _size(options: Options) -> tuple[int, int]:
    return options.train_windows, options.train_keys


def capture(pack: Pack, count: int, size: int, layers: Sequence[int], rope: Rotary) -> dict[int, Windows]:
    """What the indexers of some layers are trained on: the last ``count`` times ``size`` tokens of every text.

    Args:
        pack: model and texts.
        count: training texts per domain.
        size: tokens of each.
        layers: layers that are trained.
        rope: the tables of the pass.

    Returns:
        The training texts by layer.
    """
    texts = torch.cat([tokens[-count * size :].view(count, size) for tokens in pack.tokens.values()])
    # One text at a time: a batch of all would hold every layer's temporaries at once.
    parts: dict[int, list[LayerInput]] = {layer: [] for layer in layers}
    for text in texts:
        for entry in run_layers(pack, text[None], max(layers), rope):
            if entry.layer in parts:
                parts[entry.layer].append(entry)
    return {
        layer: Windows(
            **{name: torch.cat([getattr(e, name) for e in entries]) for name in ("x", "q", "k")},
            logit_factor=rope.logit_factor,
        )
        for layer, entries in parts.items()
    }


def train_layer(
    windows: Windows | None,
    width: int,
    options: Options,
    layer: int,
    num_heads: Sequence[int],
    rope: Rotary,
    progress: _Progress,
) -> dict[IndexerKey, tuple[Indexer, Training]]:
    """Train one indexer of a layer per head count, side by side; ``windows`` may be None without steps."""
    indexers = []
    for heads in num_heads:
        # Each indexer has a seed of its own, whatever else is trained in the same call.
        generator = torch.Generator().manual_seed(options.seed * 1_000_003 + layer * 1_009 + heads)
        indexers.append(Indexer(width, heads, generator).to(rope.cos.device))
    reports = [Training(steps=0, first_kl=float("nan"), last_kl=float("nan")) for _ in indexers]
    if windows is not None and options.steps:
        reports = train(
            windows,
            indexers,
            rope,
            steps=options.steps,
            seed=options.seed * 1_000_003 + layer,
            on_step=lambda: progress.add(1),
        )
    return {(layer, heads): (indexer, report) for heads, indexer, report in zip(num_heads, indexers, reports)}


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    """Forbid operations whose result depends on timing while the block runs."""
    # cuBLAS promises equal results from run to run only with a workspace of fixed size.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before = torch.are_deterministic_algorithms_enabled()
    settings: Any = torch.utils.deterministic
    fill = settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    # Filling every new tensor with NaN would only cost time.
    settings.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        settings.fill_uninitialized_memory = fill


class _Progress:
    def __init__(self, on_progress: OnProgress | None, total: int) -> None:
        self.on_progress, self.total, self.done = on_progress, total, 0

    def add(self, units: int) -> None:
        self.done += units
        if self.on_progress is not None:
            self.on_progress(self.done, self.total)


def _check(pack: Pack, request: Request, domains: Sequence[str], length: int, num_queries: int) -> None:
    options, layers, num_heads, lengths = request.options, request.layers, request.num_heads, request.num_keys
    for name in domains:
        if name not in pack.tokens:
            raise InvalidProblem("domain", name, f"one of {sorted(pack.tokens)}")
    deepest = min(pack.config.pack_layers, pack.config.model_layers - 1)
    if not layers or min(layers) < 0 or max(layers) > deepest:
        raise InvalidProblem("layers", list(layers), f"layers 0 to {deepest}, those in the pack")
    if not num_heads or min(num_heads) < 1:
        raise InvalidProblem("num_heads", list(num_heads), "at least one positive head count")
    if not lengths or min(lengths) < 1:
        raise InvalidProblem("num_keys", list(lengths), "at least one positive length")
    if not 0 <= num_queries <= min(lengths):
        raise InvalidProblem("num_queries", num_queries, f"0 to {min(lengths)}, the shortest length")
    if options.steps < 0:
        raise InvalidProblem("steps", options.steps, "at least 0")
    if options.train_keys > length:
        raise InvalidProblem("train_keys", options.train_keys, f"at most {length}, the length of the pass")
    training = options.train_keys * options.train_windows if options.steps else 0
    for name, tokens in pack.tokens.items():
        needed = training + (length if name in domains else 0)
        if len(tokens) < needed:
            raise InvalidProblem(
                "num_keys", f"{needed} tokens with those of the training texts", f"{len(tokens)}, what {name} has"
            )


def _apply(
    indexer: Indexer, x: torch.Tensor, num_queries: int, rope: Rotary, rotation: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """``q, weights`` of the last queries and ``k, k_scale`` of all keys of a pass."""
    length, device = len(x), x.device
    q = torch.empty(num_queries, indexer.num_heads, HEAD_DIM, dtype=torch.float8_e4m3fn, device=device)
    weights = torch.empty(num_queries, indexer.num_heads, device=device)
    k = torch.empty(length, HEAD_DIM, dtype=torch.float8_e4m3fn, device=device)
    k_scale = torch.empty(length, device=device)
    first = length - num_queries
    for a in range(first, length, QUERY_BLOCK):
        part = slice(a, min(a + QUERY_BLOCK, length))
        out = slice(part.start - first, part.stop - first)
        q[out], weights[out] = prepare_queries(indexer, x[part], part, rope, rotation)
    for a in range(0, length, KEY_BLOCK):
        part = slice(a, min(a + KEY_BLOCK, length))
        k[part], k_scale[part] = prepare_keys(indexer, x[part], part, rope, rotation)
    return q, weights, k, k_scale


def _suffix(
    name: str,
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    keys: int,
    header: Mapping[str, str],
) -> TraceTensors:
    """The last keys of a pass."""
    q, weights, k, k_scale = tensors
    rows = len(q)
    ke = torch.arange(keys - rows + 1, keys + 1, dtype=torch.int32, device=q.device)
    return TraceTensors(name, q, k[-keys:], k_scale[-keys:], weights, torch.zeros_like(ke), ke, header)


def _header(
    pack: Pack,
    options: Options,
    domain: str,
    layer: int,
    num_heads: int,
    rope: Rotary,
    keys: int,
    topk: int,
    loss: LossCheck | None,
    training: Training,
) -> dict[str, str]:
    config, length = pack.config, len(rope.cos)
    stretch = max(1.0, length / config.context_length)
    return {
        "schema": "dosa.trace/1",
        "kind": f"indexer trained with the DeepSeek-V3.2 warm-up loss on {config.name} activations"
        if options.steps
        else f"untrained indexer on {config.name} activations, a control",
        "model": f"{config.name}, YaRN factor {stretch:g} for {length} tokens",
        "rope_scaling": (
            f"YaRN: factor {stretch:g} of {config.context_length} tokens, base {config.rope_base:g}, ramp from "
            f"{YARN_SLOW:g} to {YARN_FAST:g} turns, attention logits times {rope.logit_factor:.6g}; indexer: same "
            "frequencies, no factor"
        ),
        "attention": attention_backend(rope.cos.device, config.head_dim).name.lower(),
        "text": pack.header.get(f"text.{domain}", domain),
        "domain": domain,
        "layer": str(layer),
        "num_heads": str(num_heads),
        "topk": str(topk),
        "scale_format": "ue8m0",
        "pass_tokens": str(length),
        "first_key_position": str(length - keys),
        "rope": "half_split" if options.half_split else "interleaved",
        "hadamard": str(options.hadamard).lower(),
        "indexer_seed": str(options.seed),
        "indexer_steps": str(training.steps),
        "indexer_first_kl": f"{training.first_kl:.4f}",
        "indexer_final_kl": f"{training.last_kl:.4f}",
        "train_keys": str(options.train_keys),
        "train_windows": str(options.train_windows),
        "pack_sha256": pack.header["content_sha256"],
        **_loss_header(loss, config.context_length),
    }


def _loss_header(loss: LossCheck | None, context: int) -> dict[str, str]:
    if loss is None:
        return {"loss_flat": "not checked"}
    bins = [
        [entry.first, entry.end, *(round(x, 4) for x in (entry.long, entry.short, entry.native))] for entry in loss.bins
    ]
    words = f"no: up to {loss.excess:.2f} nats per token worse than after {context} tokens"
    return {
        "loss_bins": json.dumps(bins),
        "loss_excess": f"{loss.excess:.4f}",
        "loss_of_scaling": f"{loss.scaling:.4f}",
        "loss_flat": "yes" if loss.flat else words,
    }
