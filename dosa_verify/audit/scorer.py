"""Audit of whole scores: does a scorer still compute the bits of the contract ``sm90``, and if not, in which order?

The judge is written apart from ``dosa_ref`` and ``dosa_gpu``: dots by the integer model of
``dosa_verify.audit.kernels``, heads combined in torch with a fused multiply-add of its own. An order of operations is a
point of a small space:

- which product is rounded on its own before the chain of fused multiply-adds starts, for even and for odd heads;
- whether heads run upward or downward, and how a head's number splits into step, lane and parity;
- where ``k_scale`` multiplies, and which lane sums come first.

On a difference the whole space is tried on a sample that differs, and every order without a difference there is named.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
import importlib.util
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from dosa_ref.formats import float_evidence
from dosa_ref.spec import HEAD_DIM, SM90_NUM_HEADS, BackendUnavailable
from dosa_verify.audit import accumulation, evidence
from dosa_verify.audit.families import Draw, Family, vectors

if TYPE_CHECKING:
    import torch

SCHEMA = "dosa.audit_scorer/1"
LANES = 4
PAGE_SIZE = 64

Progress = Callable[[int, int], None] | None


class First(enum.Enum):
    """How a chain of head products begins."""

    SECOND_ALONE = "second product rounded alone, then the first fused, then the rest"
    FIRST_ALONE = "first product rounded alone, then the others fused"
    NO_FUSION = "every product rounded alone, then added"


class Split(enum.Enum):
    """How a head's number splits into step ``j``, lane ``c`` and parity ``b``."""

    LANE_THEN_PARITY = "h = 8j + 2c + b"
    PARITY_THEN_LANE = "h = 8j + 4b + c"


class Scale(enum.Enum):
    """Where ``k_scale`` multiplies."""

    LANE = "each lane's sum of even and odd heads"
    CHAIN = "each chain before even and odd heads are added"
    TOTAL = "the total"


class LaneSum(enum.Enum):
    """Which lane sums come first."""

    NEIGHBOURS = "(0 + 1) + (2 + 3)"
    ACROSS = "(0 + 2) + (1 + 3)"
    RUNNING = "((0 + 1) + 2) + 3"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HeadOrder:
    """An order of operations.

    Attributes:
        even, odd: how the chains of even and of odd heads begin.
        descending: heads run from the last step to the first.
        split: which head is where.
        scale: where ``k_scale`` multiplies.
        lanes: which lane sums come first.
    """

    even: First = First.SECOND_ALONE
    odd: First = First.SECOND_ALONE
    descending: bool = False
    split: Split = Split.LANE_THEN_PARITY
    scale: Scale = Scale.LANE
    lanes: LaneSum = LaneSum.NEIGHBOURS

    def describe(self) -> str:
        """Words for a reader."""
        chains = self.even.value if self.even is self.odd else f"even: {self.even.value}; odd: {self.odd.value}"
        way = "downward" if self.descending else "upward"
        words = (f"{self.split.value}, steps {way}", chains, f"k_scale multiplies {self.scale.value}")
        return "; ".join((*words, f"lanes {self.lanes.value}"))


CONTRACT = HeadOrder()
"""The order that the contract ``sm90`` fixes."""


def orders() -> Iterator[HeadOrder]:
    """Yield the whole space, the contract first."""
    space = itertools.product(First, First, (False, True), Split, Scale, LaneSum)
    for even, odd, descending, split, scale, lanes in space:
        yield HeadOrder(even=even, odd=odd, descending=descending, split=split, scale=scale, lanes=lanes)


def fused(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    """``x y + z`` of float32 tensors with one rounding.

    The product is exact in float64; the sum is rounded there to 53 bits, and its rounding error is known exactly.
    Rounding 53 to 24 bits goes wrong only where the 53-bit sum lies half-way between two float32 and the exact sum does
    not: the error's sign then decides.
    """
    import torch

    product, addend = x.double() * y.double(), z.double()
    total = product + addend
    back = total - product
    lost = (product - (total - back)) + (addend - back)
    rounded = total.float()
    # A sum that overflows float32 was rounded to 2^128, in effect.
    near = torch.where(rounded.isinf() & total.isfinite(), torch.sign(total) * 2.0**128, rounded.double())
    rest = total - near
    other = torch.nextafter(rounded, torch.where(rest > 0, torch.inf, -torch.inf).float())
    halfway = (rest != 0) & (rest * 2 == other.double() - near) & (lost != 0)
    return torch.where(halfway, torch.where((lost > 0) == (rest > 0), other, rounded), rounded)


def combine(order: HeadOrder, dots: torch.Tensor, weights: torch.Tensor, k_scale: torch.Tensor) -> torch.Tensor:
    """Scores from dots in a given order of operations.

    Args:
        order: the order.
        dots: float32 ``[rows, H, n]``.
        weights: float32 ``[rows, H]``.
        k_scale: float32 ``[n]``.

    Returns:
        float32 ``[rows, n]``.

    Special values: a NaN dot counts 0; NaN and Inf in weights and scales go through the arithmetic.
    """
    import torch

    rows, heads, keys = dots.shape
    relu = torch.where(dots > 0, dots, torch.zeros_like(dots))
    inner = (LANES, 2) if order.split is Split.LANE_THEN_PARITY else (2, LANES)
    relu = relu.view(rows, heads // 8, *inner, keys)
    weight = weights.reshape(rows, heads // 8, *inner, 1)
    if order.split is Split.PARITY_THEN_LANE:
        relu, weight = relu.transpose(2, 3), weight.transpose(2, 3)
    steps = list(range(heads // 8))
    if order.descending:
        steps.reverse()
    chains = []
    for parity, first in enumerate((order.even, order.odd)):
        terms = [(relu[:, j, :, parity], weight[:, j, :, parity]) for j in steps]
        chains.append(_chain(first, terms))
    scale = k_scale[None, None, :]
    if order.scale is Scale.CHAIN:
        chains = [chain * scale for chain in chains]
    lane = chains[0] + chains[1]
    if order.scale is Scale.LANE:
        lane = lane * scale
    v = [lane[:, c] for c in range(LANES)]
    if order.lanes is LaneSum.NEIGHBOURS:
        total = (v[0] + v[1]) + (v[2] + v[3])
    elif order.lanes is LaneSum.ACROSS:
        total = (v[0] + v[2]) + (v[1] + v[3])
    else:
        total = ((v[0] + v[1]) + v[2]) + v[3]
    return total * k_scale[None, :] if order.scale is Scale.TOTAL else total


def _chain(first: First, terms: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    if first is First.SECOND_ALONE:
        terms = [terms[1], terms[0], *terms[2:]]
    total = terms[0][0] * terms[0][1]
    for relu, weight in terms[1:]:
        total = total + relu * weight if first is First.NO_FUSION else fused(relu, weight.expand_as(relu), total)
    return total


# Problems


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScoreInputs:
    """Queries and keys; every row sees every key.

    Attributes:
        q: uint8 codes ``[rows, H, 128]``.
        k: uint8 codes ``[n, 128]``.
        k_scale: float32 ``[n]``.
        weights: float32 ``[rows, H]``.
    """

    q: torch.Tensor
    k: torch.Tensor
    k_scale: torch.Tensor
    weights: torch.Tensor

    def rows(self, start: int, end: int) -> ScoreInputs:
        """Some of the rows."""
        return dataclasses.replace(self, q=self.q[start:end], weights=self.weights[start:end])

    def keys(self, start: int, end: int) -> ScoreInputs:
        """Some of the keys."""
        return dataclasses.replace(self, k=self.k[start:end], k_scale=self.k_scale[start:end])


def random_inputs(rows: int, heads: int, keys: int, seed: int, device: torch.device) -> ScoreInputs:
    """Draw a problem: half normal values, half random bit patterns; scales that are no powers of two; signed weights.

    Args:
        rows, heads, keys: shape.
        seed: of the draw.
        device: where the tensors lie.
    """
    import torch

    draw = Draw(seed, device)
    q = [vectors(family, rows * heads // 2, "a", draw) for family in (Family.NORMAL, Family.BITS)]
    k = [vectors(family, keys // 2, "b", draw) for family in (Family.NORMAL, Family.BITS)]
    scale = torch.exp2(draw.normal(keys) * 2) * (1 + draw.normal(keys).abs() / 8)
    weights = draw.normal(rows, heads) * torch.exp2(draw.integers(-4, 5, rows, heads).float())
    # Each row has heads of both kinds, so that large and small terms meet in one sum.
    return ScoreInputs(
        q=torch.stack(q, dim=1).view(rows, heads, HEAD_DIM),
        k=torch.stack(k, dim=1).view(keys, HEAD_DIM),
        k_scale=scale,
        weights=weights,
    )


def special_inputs(rows: int, heads: int, keys: int, seed: int, device: torch.device) -> ScoreInputs:
    """A problem with NaN keys, zero keys, NaN, Inf, zero and negative scales, and NaN, Inf and zero weights."""
    plain = random_inputs(rows, heads, keys, seed, device)
    k, scale, weights = plain.k.clone(), plain.k_scale.clone(), plain.weights.clone()
    k[3::16, 7] = 0x7F
    k[5::16] = 0
    for place, value in enumerate((float("nan"), float("inf"), 0.0, -1.5, -float("inf"), -0.0)):
        scale[8 + place :: 32] = value
    weights[1, 0], weights[2, heads - 1] = float("nan"), float("inf")
    weights[3] = 0.0
    weights[4 % rows] = -weights[4 % rows].abs()
    return dataclasses.replace(plain, k=k, k_scale=scale, weights=weights)


def judge(inputs: ScoreInputs, order: HeadOrder = CONTRACT) -> torch.Tensor:
    """Scores by the audit's own arithmetic, float32 ``[rows, n]``."""
    rows, heads, _ = inputs.q.shape
    model = accumulation.MODELS[0]
    dots = accumulation.model_dots(model, inputs.q.reshape(rows * heads, HEAD_DIM), inputs.k)
    return combine(order, dots.view(rows, heads, len(inputs.k)), inputs.weights, inputs.k_scale)


# Peers


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """A scorer.

    Attributes:
        name: for reports.
        scores: inputs to float32 ``[rows, n]``.
    """

    name: str
    scores: Callable[[ScoreInputs], torch.Tensor]


def ours() -> tuple[Peer, ...]:
    """The dense and the gathered scoring kernel of this repository."""
    return (
        Peer(name="dosa_gpu, dense", scores=_dense_scores),
        Peer(name="dosa_gpu, gathered", scores=_gathered_scores),
    )


def _fp8(codes: torch.Tensor) -> torch.Tensor:
    import torch

    return codes.contiguous().view(torch.float8_e4m3fn)


def _windows(inputs: ScoreInputs) -> tuple[torch.Tensor, torch.Tensor]:
    import torch

    start = torch.zeros(len(inputs.q), dtype=torch.int32, device=inputs.q.device)
    return start, start + len(inputs.k)


def _empty(inputs: ScoreInputs) -> torch.Tensor:
    import torch

    return torch.full((len(inputs.q), len(inputs.k)), float("nan"), device=inputs.q.device)


def _dense_scores(inputs: ScoreInputs) -> torch.Tensor:
    from dosa_gpu.kernels.score import launch_score

    start, end = _windows(inputs)
    out = _empty(inputs)
    weights, scale = inputs.weights.contiguous(), inputs.k_scale.contiguous()
    launch_score(_fp8(inputs.q), _fp8(inputs.k), scale, weights, start, end, scale, out, 0, len(inputs.k))
    return out


def _gathered_scores(inputs: ScoreInputs) -> torch.Tensor:
    """Each row lists its keys backwards, so that gathering is really done."""
    import torch

    from dosa_gpu.kernels.rescore import launch_rescore

    keys = len(inputs.k)
    _, count = _windows(inputs)
    listed = torch.arange(keys - 1, -1, -1, dtype=torch.int32, device=inputs.q.device)
    index = listed.expand(len(inputs.q), keys).contiguous()
    out = _empty(inputs)
    weights, scale = inputs.weights.contiguous(), inputs.k_scale.contiguous()
    launch_rescore(_fp8(inputs.q), _fp8(inputs.k), scale, weights, index, count, out)
    return out.flip(1)


def deep_gemm() -> tuple[Peer, ...]:
    """DeepGEMM's prefill and paged scorers.

    Raises:
        BackendUnavailable: the library is not importable, or there is no GPU.
    """
    from dosa_verify.targets.dosa import cuda_is_available

    if importlib.util.find_spec("deep_gemm") is None:
        raise BackendUnavailable("--peer deep_gemm: the package deep_gemm is not installed")
    if not cuda_is_available():
        raise BackendUnavailable("--peer deep_gemm: torch sees no GPU here")
    library: Any = importlib.import_module("deep_gemm")

    def prefill(inputs: ScoreInputs) -> torch.Tensor:
        start, end = _windows(inputs)
        keys = (_fp8(inputs.k), inputs.k_scale.contiguous())
        logits = library.fp8_mqa_logits(
            _fp8(inputs.q), keys, inputs.weights.contiguous(), start, end, clean_logits=False
        )
        return logits[:, : len(inputs.k)]  # type: ignore[no-any-return]

    def paged(inputs: ScoreInputs) -> torch.Tensor:
        import torch

        rows, keys = len(inputs.q), len(inputs.k)
        pages = keys // PAGE_SIZE
        codes = inputs.k.view(pages, PAGE_SIZE * HEAD_DIM)
        scales = inputs.k_scale.contiguous().view(torch.uint8).view(pages, PAGE_SIZE * 4)
        cache = torch.cat([codes, scales], dim=1).view(pages, PAGE_SIZE, 1, HEAD_DIM + 4)
        # Pages in reverse, so that the table is really read.
        table = torch.arange(pages - 1, -1, -1, dtype=torch.int32, device=inputs.q.device)
        lengths = torch.full((rows, 1), keys, dtype=torch.int32, device=inputs.q.device)
        multiprocessors = torch.cuda.get_device_properties(inputs.q.device).multi_processor_count
        plan = library.get_paged_mqa_logits_metadata(lengths, PAGE_SIZE, multiprocessors)
        logits = library.fp8_paged_mqa_logits(
            _fp8(inputs.q)[:, None], cache.flip(0).contiguous(), inputs.weights.contiguous(), lengths,
            table.expand(rows, pages).contiguous(), plan, keys, clean_logits=False,
        )  # fmt: skip
        return logits[:, :keys]  # type: ignore[no-any-return]

    version = getattr(library, "__version__", "unknown version")
    return (
        Peer(name=f"DeepGEMM {version}, prefill", scores=prefill),
        Peer(name=f"DeepGEMM {version}, paged", scores=paged),
    )


# The audit


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How much is compared.

    Attributes:
        rows, keys: of the problem per head count.
        row_block, key_block: of one comparison.
        special: rows and keys of the problem with special values.
        sample: rows and keys of the search for an order.
    """

    rows: int
    keys: int
    row_block: int
    key_block: int
    special: tuple[int, int]
    sample: tuple[int, int]


CPU_SIZES = Sizes(rows=6, keys=192, row_block=6, key_block=192, special=(6, 64), sample=(6, 192))
GPU_SIZES = Sizes(rows=1024, keys=131072, row_block=64, key_block=8192, special=(32, 4096), sample=(16, 1024))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ScoreDifference:
    """One score that is not the judge's.

    Attributes:
        row, key: where in the drawn problem.
        peer, judge: the two answers, bits and decimal.
    """

    row: int
    key: int
    peer: dict[str, str]
    judge: dict[str, str]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ScoreComparison:
    """A peer against the judge on one problem.

    Attributes:
        peer: its name.
        inputs: which problem.
        num_heads: heads.
        scores: how many.
        differences: with another bit; two NaNs count as equal.
        first: the first of them, None if there is none.
        orders: if there is a difference, the orders of operations without one on the sample, in words.
        sample: scores of that sample, 0 if there was no search.
    """

    peer: str
    inputs: str
    num_heads: int
    scores: int
    differences: int
    first: ScoreDifference | None
    orders: tuple[str, ...]
    sample: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ScorerReport:
    """The whole audit.

    Attributes:
        device: ``cpu`` or ``cuda``.
        seed: of the problems.
        contract: the order of operations that the judge follows, in words.
        comparisons: every peer on every problem.
        not_checked: what this run cannot tell.
        time_s: seconds.
    """

    device: str
    seed: int
    contract: str
    comparisons: tuple[ScoreComparison, ...]
    not_checked: tuple[str, ...]
    time_s: float

    @property
    def outcome(self) -> str:
        """``exact`` or ``counterexample``."""
        return "counterexample" if any(found.differences for found in self.comparisons) else "exact"

    def to_json(self) -> dict[str, object]:
        """Return the audit as JSON values, schema ``dosa.audit_scorer/1``."""
        record = {"schema": SCHEMA, "outcome": self.outcome, **dataclasses.asdict(self)}
        return evidence.plain(record)  # type: ignore[no-any-return]


NOT_CHECKED_ON_CPU = (
    "the kernels as compiled for a GPU: they ran under the emulator",
    "10^8 scores: the interpreter is too slow for more than thousands",
    "other libraries: they have GPU kernels only",
)


def audit_scorer(
    *,
    device: str,
    peers: Sequence[Peer],
    sizes: Sizes | None = None,
    seed: int = 0,
    on_progress: Progress = None,
) -> ScorerReport:
    """Run the audit. ``dosa_verify.targets.dosa.connect`` must have been called for the device.

    Args:
        device: ``cpu`` (emulator) or ``cuda``.
        peers: the scorers.
        sizes: how much; None for what suits the device.
        seed: of the problems.
        on_progress: called with (parts done, parts).

    Returns:
        The report; it passes if every score of every peer has the judge's bits.

    Exactness: model of hardware; bits are compared.
    """
    import torch

    started = time.monotonic()
    where = torch.device(device)
    size = sizes or (GPU_SIZES if device == "cuda" else CPU_SIZES)
    found: list[ScoreComparison] = []
    parts = 2 * len(SM90_NUM_HEADS)
    for place, heads in enumerate(SM90_NUM_HEADS):
        plain = random_inputs(size.rows, heads, size.keys, seed + heads, where)
        found += _compare_all(peers, "random", plain, size)
        if on_progress is not None:
            on_progress(2 * place + 1, parts)
        special = special_inputs(size.special[0], heads, size.special[1], seed + heads + 1, where)
        found += _compare_all(peers, "special values", special, size)
        if on_progress is not None:
            on_progress(2 * place + 2, parts)
    return ScorerReport(
        device=device,
        seed=seed,
        contract=CONTRACT.describe(),
        comparisons=tuple(found),
        not_checked=NOT_CHECKED_ON_CPU if device == "cpu" else (),
        time_s=round(time.monotonic() - started, 3),
    )


def _differ(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Where two score arrays have other bits; any two NaNs are equal."""
    import torch

    bits = left.contiguous().view(torch.int32) != right.contiguous().view(torch.int32)
    return bits & ~(left.isnan() & right.isnan())


def _compare_all(peers: Sequence[Peer], name: str, inputs: ScoreInputs, size: Sizes) -> list[ScoreComparison]:
    """Every peer on one problem; the judge scores each block once."""
    rows, keys = len(inputs.q), len(inputs.k)
    counts = [0] * len(peers)
    firsts: list[ScoreDifference | None] = [None] * len(peers)
    for row in range(0, rows, size.row_block):
        part = inputs.rows(row, row + size.row_block)
        answers = [peer.scores(part) for peer in peers]
        for key in range(0, keys, size.key_block):
            want = judge(part.keys(key, key + size.key_block))
            for place, answer in enumerate(answers):
                got = answer[:, key : key + size.key_block]
                different = _differ(got, want)
                number = int(different.sum())
                counts[place] += number
                if number and firsts[place] is None:
                    i, j = (int(x) for x in different.nonzero()[0])
                    firsts[place] = ScoreDifference(
                        row=row + i, key=key + j, peer=_evidence(got[i, j]), judge=_evidence(want[i, j])
                    )
    records = []
    for peer, count, first in zip(peers, counts, firsts, strict=True):
        fitting, sample = _search_order(peer, inputs, first, size.sample) if first is not None else ((), 0)
        records.append(
            ScoreComparison(
                peer=peer.name,
                inputs=name,
                num_heads=inputs.q.shape[1],
                scores=rows * keys,
                differences=count,
                first=first,
                orders=fitting,
                sample=sample,
            )
        )
    return records


def _search_order(
    peer: Peer, inputs: ScoreInputs, first: ScoreDifference, size: tuple[int, int]
) -> tuple[tuple[str, ...], int]:
    """Orders of operations without a difference around the first one; whole pages of keys, for peers that page."""
    rows = min(first.row, max(len(inputs.q) - size[0], 0))
    keys = min(first.key // PAGE_SIZE * PAGE_SIZE, max(len(inputs.k) - size[1], 0))
    sample = inputs.rows(rows, rows + size[0]).keys(keys, keys + size[1])
    got = peer.scores(sample)
    heads = sample.q.shape[1]
    dots = accumulation.model_dots(accumulation.MODELS[0], sample.q.reshape(-1, HEAD_DIM), sample.k)
    dots = dots.view(len(sample.q), heads, len(sample.k))
    fitting = [
        order.describe()
        for order in orders()
        if not bool(_differ(got, combine(order, dots, sample.weights, sample.k_scale)).any())
    ]
    return tuple(fitting), got.numel()


def _evidence(score: torch.Tensor) -> dict[str, str]:
    return float_evidence(np.float32(score.cpu().numpy()))
