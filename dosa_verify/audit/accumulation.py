"""Audit of tensor-core accumulation: which entry of the model table an instruction follows, over how many dots.

An *instruction* is whatever computes the dots of two sets of E4M3 vectors; here that is ``tl.dot`` with a tile that
becomes ``wgmma`` or ``mma.sync``. A *model* is an entry of the table below, computed in integers by
``dosa_verify.audit.kernels`` and by nothing that ``dosa_ref`` shares.

1. Probe: vectors of all families mixed, all pairs, against every model of the table. A model with one different bit is
   out, and its counterexample is kept.
2. Count: the model that is left, over every family with many vectors.
3. Search: constructed worst cases and mutations of them, for the pair whose error is the largest part of the proved
   bound ``D(q) * ||k~||`` (docs/bound.md).

A counterexample is made small before it is shown: elements are set to zero for as long as the bits still differ.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
import re
import time
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np

from dosa_ref import guard, tensorcore
from dosa_ref.formats import float_evidence
from dosa_ref.spec import HEAD_DIM
from dosa_verify.audit import evidence, families
from dosa_verify.audit.families import Draw, Family

if TYPE_CHECKING:
    import torch

SCHEMA = "dosa.audit_accumulation/1"
CONTRACT_MODEL = "wgmma_e4m3"
"""The entry that the proofs speak of."""

Progress = Callable[[int, int], None] | None


class StepOrder(enum.Enum):
    """Which elements share a step."""

    CONSECUTIVE = "consecutive"
    PAIRS_OF_FOUR = "elements 0,1 of every 4 in a block of 32, then 2,3"
    HALVES_OF_EIGHT = "elements 0..3 of every 8 in a block of 32, then 4..7"
    PAIRS_OF_EIGHT = "elements 0,1 of every 8 in a block of 64, then 2,3, 4,5 and 6,7"

    def permutation(self) -> list[int]:
        """Elements in the order in which the steps take them."""
        block, period, width = {
            StepOrder.CONSECUTIVE: (HEAD_DIM, HEAD_DIM, HEAD_DIM),
            StepOrder.PAIRS_OF_FOUR: (32, 4, 2),
            StepOrder.HALVES_OF_EIGHT: (32, 8, 4),
            StepOrder.PAIRS_OF_EIGHT: (64, 8, 2),
        }[self]
        return [
            element
            for start in range(0, HEAD_DIM, block)
            for group in range(period // width)
            for element in range(start, start + block)
            if element % period // width == group
        ]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Accumulation:
    """An entry of the model table.

    Attributes:
        name: identifier.
        terms_per_step: products that one step aligns and adds.
        fraction_bits: fraction bits kept below the largest exponent.
        output_fraction_bits: fraction bits of a step's result.
        operand_min_exponent: exponent of subnormal operands in the alignment, -6 or at most -9 (normalised).
        nearest: round to nearest, ties to even, instead of cutting.
        promoted: each step starts from zero and its result is added to a float32 sum.
        step_order: which elements share a step.
    """

    name: str
    terms_per_step: int
    fraction_bits: int
    output_fraction_bits: int
    operand_min_exponent: int = -6
    nearest: bool = False
    promoted: bool = False
    step_order: StepOrder = StepOrder.CONSECUTIVE

    def parameters(self) -> dict[str, Any]:
        """Constants of the model kernel."""
        return {
            "TERMS": self.terms_per_step,
            "FRACTION": self.fraction_bits,
            "OUTPUT": self.output_fraction_bits,
            "NORMALIZE": self.operand_min_exponent <= -9,
            "NEAREST": self.nearest,
            "PROMOTE": self.promoted,
            # Sums of a step, in units, must stay below 2^24 for the narrow form.
            "WIDE": (self.terms_per_step + 1) * 4 << self.fraction_bits > 1 << 24,
        }


def _hmma(order: StepOrder, suffix: str) -> Accumulation:
    return Accumulation(
        name="hmma_f16" + suffix, terms_per_step=16, fraction_bits=25, output_fraction_bits=23,
        operand_min_exponent=-14, step_order=order,
    )  # fmt: skip


MODELS: tuple[Accumulation, ...] = (
    Accumulation(name=CONTRACT_MODEL, terms_per_step=32, fraction_bits=13, output_fraction_bits=13),
    Accumulation(name="wgmma_e4m3_12_bits", terms_per_step=32, fraction_bits=12, output_fraction_bits=12),
    Accumulation(name="wgmma_e4m3_14_bits", terms_per_step=32, fraction_bits=14, output_fraction_bits=14),
    Accumulation(name="wgmma_e4m3_nearest", terms_per_step=32, fraction_bits=13, output_fraction_bits=13, nearest=True),
    Accumulation(
        name="wgmma_e4m3_promoted", terms_per_step=32, fraction_bits=13, output_fraction_bits=13, promoted=True
    ),
    Accumulation(name="wgmma_e4m3_float32_output", terms_per_step=32, fraction_bits=13, output_fraction_bits=23),
    Accumulation(name="wgmma_e4m3_16_terms", terms_per_step=16, fraction_bits=13, output_fraction_bits=13),
    _hmma(StepOrder.CONSECUTIVE, ""),
    _hmma(StepOrder.PAIRS_OF_FOUR, "_pairs_of_4"),
    _hmma(StepOrder.HALVES_OF_EIGHT, "_halves_of_8"),
    _hmma(StepOrder.PAIRS_OF_EIGHT, "_pairs_of_8"),
)
"""What is tried. The first and the eighth stand in the reference's table; the others are their near misses."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Instruction:
    """Something that computes dots.

    Attributes:
        name: for reports.
        dots: uint8 codes ``[m, 128]`` and ``[n, 128]`` to float32 ``[m, n]``.
        mnemonics: the matrix instructions in its compiled code; empty if it has none.
        counted: whether the fitting model is counted over the families; else it is probed only.
    """

    name: str
    dots: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    mnemonics: tuple[str, ...] = ()
    counted: bool = True


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How much is compared.

    Attributes:
        probe: vectors per family and side of the probe.
        family: vectors per family and side of the count.
        block: rows of one launch.
        population: vectors per side and generation of the search.
        generations: of the search.
        errors: vectors per family and side whose errors are set against the bound.
        adequacy: vectors per family and side on which the audit's models are compared with the reference's.
    """

    probe: int
    family: int
    block: int
    population: int
    generations: int
    errors: int
    adequacy: int


CPU_SIZES = Sizes(probe=8, family=48, block=128, population=192, generations=12, errors=128, adequacy=8)
GPU_SIZES = Sizes(probe=1024, family=32768, block=8192, population=3072, generations=150, errors=4096, adequacy=64)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Counterexample:
    """One pair on which an instruction and a model differ.

    Attributes:
        q, k: codes, two hex digits an element.
        terms: non-zero products (all elements if a NaN is in it).
        exact: the real dot, decimal (None with a NaN).
        instruction, model: the two answers, bits and decimal.
    """

    q: str
    k: str
    terms: int
    exact: str | None
    instruction: dict[str, str]
    model: dict[str, str]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """An instruction against a model over one set of pairs.

    Attributes:
        model: name of the entry.
        pairs: which pairs.
        dots: how many.
        differences: with another bit.
        counterexample: the smallest found, None if there is none.
    """

    model: str
    pairs: str
    dots: int
    differences: int
    counterexample: Counterexample | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Identification:
    """What an instruction computes.

    Attributes:
        instruction: its name.
        mnemonics: matrix instructions of its compiled code.
        fits: entries of the table without a difference, after probe and count.
        probe: every entry against the mixed families.
        families: the fitting entry against each family; empty if none fits or the instruction is only probed.
    """

    instruction: str
    mnemonics: tuple[str, ...]
    fits: tuple[str, ...]
    probe: tuple[Comparison, ...]
    families: tuple[Comparison, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FamilyErrors:
    """|computed - exact| as parts of the proved bound, over one family.

    Attributes:
        family: its name.
        dots: pairs without NaN.
        exact: pairs without any error.
        largest: the largest ratio.
        first_log2: log2 of the lower end of the first bin.
        counts: pairs per bin; bin ``i`` holds ratios in ``[2^(first_log2 + i), 2^(first_log2 + i + 1))``.
    """

    family: str
    dots: int
    exact: int
    largest: float
    first_log2: int
    counts: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Adequacy:
    """The audit's integer model against the reference's model of the same name.

    Attributes:
        model: the name.
        dots: compared, all families mixed.
        differences: with another bit.
    """

    model: str
    dots: int
    differences: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """The adversarial search.

    Attributes:
        pairs: pairs evaluated.
        generations: of mutation.
        constructed: largest ratio |computed - exact| / (D(q) ||k~||) among the constructed pairs alone.
        tightness: the largest of all, recomputed with rationals for the pair below; above 1 the bound is broken.
        norm_share: largest |computed - exact| / (||q|| ||k||) of all pairs evaluated.
        q, k: codes of the pair, two hex digits an element.
        computed: its computed dot, bits and decimal.
        exact: its real dot, decimal.
        bound: ``D(q) ||k~||`` of it, decimal.
    """

    pairs: int
    generations: int
    constructed: float
    tightness: float
    norm_share: float
    q: str
    k: str
    computed: dict[str, str]
    exact: str
    bound: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AccumulationReport:
    """The whole audit.

    Attributes:
        device: ``cpu`` or ``cuda``.
        seed: of the vectors.
        vectors: distinct vectors per family and side of the count.
        models: the table, in the order of every probe.
        adequacy: the audit's models against the reference's.
        instructions: what each computes.
        errors: error against the bound, by family, of the first instruction.
        search: adversarial search on the first instruction.
        not_checked: what this device cannot tell.
        time_s: seconds.
    """

    device: str
    seed: int
    vectors: int
    models: tuple[Accumulation, ...]
    adequacy: tuple[Adequacy, ...]
    instructions: tuple[Identification, ...]
    errors: tuple[FamilyErrors, ...]
    search: Search
    not_checked: tuple[str, ...]
    time_s: float

    @property
    def failures(self) -> tuple[str, ...]:
        """One line for each thing that is not as the proofs need it; the first instruction is the scorer's."""
        lines = [
            f"model {found.model}: audit and reference differ in {found.differences} dots"
            for found in self.adequacy
            if found.differences
        ]
        for place, found in enumerate(self.instructions):
            if not found.fits:
                lines.append(f"{found.instruction}: no entry of the model table fits")
            elif place == 0 and found.fits != (CONTRACT_MODEL,):
                lines.append(f"{found.instruction}: {', '.join(found.fits)} fits, the contract says {CONTRACT_MODEL}")
        if self.search.tightness > 1:
            lines.append(f"a dot whose error is {self.search.tightness:.4f} of the proved bound")
        lines += [f"{e.family}: an error of {e.largest:.4f} of the proved bound" for e in self.errors if e.largest > 1]
        return tuple(lines)

    @property
    def outcome(self) -> str:
        """``exact`` or ``counterexample``."""
        return "counterexample" if self.failures else "exact"

    def to_json(self) -> dict[str, object]:
        """Return the audit as JSON values, schema ``dosa.audit_accumulation/1``."""
        record = {
            "schema": SCHEMA,
            "outcome": self.outcome,
            "failures": self.failures,
            **dataclasses.asdict(self),
            "models": [{**dataclasses.asdict(model), "step_order": model.step_order.value} for model in self.models],
        }
        return evidence.plain(record)  # type: ignore[no-any-return]


def tile_instruction(tile_m: int, tile_n: int, warps: int, device: torch.device, *, counted: bool) -> Instruction:
    """``tl.dot`` on a tile, with the matrix instructions that the compiler made of it.

    Args:
        tile_m, tile_n, warps: of one program.
        device: where it runs; on the CPU the emulator stands in for wgmma.
        counted: see `Instruction`.
    """
    import torch

    from dosa_verify.audit import kernels

    def dots(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return kernels.launch_dots(a, b, tile_m=tile_m, tile_n=tile_n, warps=warps)[0]

    one = torch.zeros((1, HEAD_DIM), dtype=torch.uint8, device=device)
    _, compiled = kernels.launch_dots(one, one, tile_m=tile_m, tile_n=tile_n, warps=warps)
    found = re.findall(r"\b(?:wgmma\.mma_async|mma\.sync)\S*", compiled.asm["ptx"]) if compiled is not None else []
    name = f"tl.dot {tile_m}x{tile_n}, {warps} warps" if compiled is not None else "tl.dot under the emulator"
    return Instruction(name=name, dots=dots, mnemonics=tuple(sorted(set(found))), counted=counted)


def machine_instructions(device: torch.device) -> tuple[Instruction, ...]:
    """What this machine has: the scorer's kind of tile first; on a GPU other wgmma tiles and one for mma.sync."""
    if device.type == "cpu":
        return (tile_instruction(64, 128, 4, device, counted=True),)
    counted = [tile_instruction(*tile, device, counted=True) for tile in ((64, 128, 4), (32, 64, 4))]
    others = ((64, 64, 4), (128, 64, 4), (128, 256, 8))
    return (*counted, *(tile_instruction(*tile, device, counted=False) for tile in others))


NOT_CHECKED_ON_CPU = (
    "the tensor cores: no GPU was asked for; the emulator's arithmetic was audited in their place",
    "mma.sync: the emulator models wgmma only",
    "10^9 dots per family: the interpreter is too slow for more than thousands",
)


def audit_accumulation(
    *,
    device: str,
    instructions: Sequence[Instruction] | None = None,
    sizes: Sizes | None = None,
    models: Sequence[Accumulation] = MODELS,
    seed: int = 0,
    on_progress: Progress = None,
) -> AccumulationReport:
    """Run the audit. ``dosa_verify.targets.dosa.connect`` must have been called for the device.

    Args:
        device: ``cpu`` (emulator) or ``cuda``.
        instructions: what to audit, the scorer's first; None for what the machine has.
        sizes: how much; None for what suits the device.
        models: the table.
        seed: of the vectors.
        on_progress: called with (parts done, parts).

    Returns:
        The report; it passes if exactly the contract's entry fits the first instruction, some entry fits each other
        one, and no error exceeds the proved bound.

    Exactness: bits are compared; ratios to the bound are float64 but for the search's result, which is rational.
    """
    import torch

    started = time.monotonic()
    where = torch.device(device)
    audited = tuple(instructions) if instructions is not None else machine_instructions(where)
    size = sizes or (GPU_SIZES if device == "cuda" else CPU_SIZES)
    parts = sum(len(models) + len(Family) * found.counted for found in audited) + 3
    done = 0

    def step() -> None:
        nonlocal done
        done += 1
        if on_progress is not None:
            on_progress(done, parts)

    adequacy = _adequacy(models, size.adequacy, seed, where)
    step()
    identified = tuple(_identify(found, models, size, seed, where, step) for found in audited)
    errors = tuple(_family_errors(audited[0], family, size.errors, seed, where) for family in Family)
    step()
    search = _search(audited[0], size, seed, where)
    step()
    return AccumulationReport(
        device=device,
        seed=seed,
        vectors=size.family,
        models=tuple(models),
        adequacy=adequacy,
        instructions=identified,
        errors=errors,
        search=search,
        not_checked=NOT_CHECKED_ON_CPU if device == "cpu" else (),
        time_s=round(time.monotonic() - started, 3),
    )


def _family_vectors(family: Family, count: int, seed: int, where: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    draw = Draw(seed * 1000 + list(Family).index(family), where)
    return families.vectors(family, count, "a", draw), families.vectors(family, count, "b", draw)


def _mixed(count: int, seed: int, where: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Vectors of all families, for all pairs across them."""
    import torch

    pairs = [_family_vectors(family, count, seed, where) for family in Family]
    return torch.cat([a for a, _ in pairs]), torch.cat([b for _, b in pairs])


def _adequacy(models: Sequence[Accumulation], count: int, seed: int, where: torch.device) -> tuple[Adequacy, ...]:
    a, b = _mixed(count, seed + 3, where)
    reference = {model.name: model for model in tensorcore.MODELS}
    found = []
    for model in models:
        if model.name not in reference:
            continue
        want = tensorcore.dots(a.cpu().numpy(), b.cpu().numpy(), reference[model.name])
        got = model_dots(model, a, b).cpu().numpy()
        differences = int((got.view(np.int32) != want.view(np.int32)).sum())
        found.append(Adequacy(model=model.name, dots=got.size, differences=differences))
    return tuple(found)


def _identify(
    instruction: Instruction,
    models: Sequence[Accumulation],
    size: Sizes,
    seed: int,
    where: torch.device,
    step: Callable[[], None],
) -> Identification:
    a, b = _mixed(size.probe, seed, where)
    probe = []
    for model in models:
        probe.append(compare(instruction, model, "all families mixed", a, b, size.block))
        step()
    fits = [found.model for found in probe if not found.differences]
    counted = []
    by_name = {model.name: model for model in models}
    for family in Family if instruction.counted else ():
        a, b = _family_vectors(family, size.family, seed + 1, where)
        for name in tuple(fits):
            found = compare(instruction, by_name[name], family.value, a, b, size.block)
            counted.append(found)
            if found.differences:
                fits.remove(name)
        step()
    return Identification(
        instruction=instruction.name,
        mnemonics=instruction.mnemonics,
        fits=tuple(fits),
        probe=tuple(probe),
        families=tuple(counted),
    )


def compare(
    instruction: Instruction, model: Accumulation, pairs: str, a: torch.Tensor, b: torch.Tensor, block: int
) -> Comparison:
    """Compare an instruction with a model on all pairs of two sets of vectors, every bit.

    Args:
        instruction: what computes.
        model: an entry of the table.
        pairs: name of the set, for the record.
        a, b: uint8 codes ``[m, 128]`` and ``[n, 128]``, contiguous.
        block: rows of one launch.
    """
    import torch

    from dosa_verify.audit import kernels

    order = torch.tensor(model.step_order.permutation(), device=a.device)
    ordered_a, ordered_b = a[:, order], b[:, order]
    count = torch.zeros(1, dtype=torch.int64, device=a.device)
    first = torch.full((1,), kernels.NO_DIFFERENCE.value, dtype=torch.int64, device=a.device)
    for start in range(0, len(a), block):
        got = instruction.dots(a[start : start + block], b).contiguous()
        kernels.launch_compare(
            ordered_a[start : start + block], ordered_b, got, count, first, start, model.parameters()
        )
    differences = int(count)
    example = None
    if differences:
        row, column = divmod(int(first), len(b))
        example = _small(instruction, model, a[row], b[column])
    return Comparison(
        model=model.name, pairs=pairs, dots=len(a) * len(b), differences=differences, counterexample=example
    )


def model_dots(model: Accumulation, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Dots of all pairs as an entry of the table gives them, float32 ``[m, n]``."""
    import torch

    from dosa_verify.audit import kernels

    order = torch.tensor(model.step_order.permutation(), device=a.device)
    return kernels.launch_model(a[:, order], b[:, order], model.parameters())


def _small(instruction: Instruction, model: Accumulation, q: torch.Tensor, k: torch.Tensor) -> Counterexample:
    """Set elements of the query to zero, in halving groups, for as long as the two answers still differ."""
    import torch

    def differ(queries: torch.Tensor) -> torch.Tensor:
        got, want = instruction.dots(queries.contiguous(), k[None]), model_dots(model, queries, k[None])
        return (got.view(torch.int32) != want.view(torch.int32))[:, 0]

    group = HEAD_DIM // 2
    while group:
        present = torch.nonzero((q & families.NAN_CODE) != 0).ravel()
        variants = []
        for start in range(0, len(present), group):
            variant = q.clone()
            variant[present[start : start + group]] = 0
            variants.append(variant)
        hits = torch.nonzero(differ(torch.stack(variants))).ravel() if variants else present
        if len(hits) and len(present) > 1:
            q = variants[int(hits[0])]
        else:
            group //= 2
    used = (q & families.NAN_CODE) != 0
    k = torch.where(used | ((k & families.NAN_CODE) == families.NAN_CODE), k, 0)
    if not bool(differ(q[None])[0]):
        raise AssertionError("an instruction whose answers change from call to call has no reproducible counterexample")
    nan = bool((((q | 0) & families.NAN_CODE) == families.NAN_CODE).any()) or bool(
        ((k & families.NAN_CODE) == families.NAN_CODE).any()
    )
    return Counterexample(
        q=_hex(q),
        k=_hex(k),
        terms=HEAD_DIM if nan else int((used & ((k & families.NAN_CODE) != 0)).sum()),
        exact=None if nan else str(float(_exact(q, k))),
        instruction=_answer(instruction.dots(q[None], k[None])),
        model=_answer(model_dots(model, q[None], k[None])),
    )


def _hex(codes: torch.Tensor) -> str:
    return bytes(codes.cpu().tolist()).hex()


def _answer(dot: torch.Tensor) -> dict[str, str]:
    return float_evidence(np.float32(dot.cpu().numpy()[0, 0]))


def _exact(q: torch.Tensor, k: torch.Tensor) -> Fraction:
    table = [Fraction(value) for value in families.value_table()]
    return sum((table[x] * table[y] for x, y in zip(q.tolist(), k.tolist(), strict=True)), Fraction(0))


# Errors against the bound


@functools.lru_cache(maxsize=2)
def _values(device: torch.device) -> torch.Tensor:
    import torch

    return torch.tensor(families.value_table(), dtype=torch.float64, device=device)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Errors:
    """Errors of all pairs: ``[m, n]``, with the bound's and the norms' factors."""

    error: torch.Tensor
    bound: torch.Tensor
    norms: torch.Tensor


def _errors(instruction: Instruction, a: torch.Tensor, b: torch.Tensor) -> _Errors:
    """|computed - exact|, ``D(q) ||k~||`` and ``||q|| ||k||`` of all pairs, float64.

    The products of E4M3 values are multiples of 2^-18 below 2^18, so float64 adds 128 of them exactly in any order.
    """
    import torch

    table = _values(a.device)
    x, y = table[a.long()], table[b.long()]
    error = (instruction.dots(a, b).double() - x @ y.T).abs()
    raised = torch.where(y != 0, y.abs().clamp(min=2.0**-6), 0.0)
    share = torch.from_numpy(guard.dot_error(a.cpu().numpy())).to(a.device)
    return _Errors(
        error=error,
        bound=share[:, None] * raised.norm(dim=1)[None, :],
        norms=x.norm(dim=1)[:, None] * y.norm(dim=1)[None, :],
    )


def _ratio(part: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """``part / whole``, 0 where both are 0 and infinite where only the whole is."""
    import torch

    return torch.where(part == 0, torch.zeros_like(part), part / whole)


FIRST_BIN_LOG2 = -40


def _family_errors(
    instruction: Instruction, family: Family, count: int, seed: int, where: torch.device
) -> FamilyErrors:
    import torch

    a, b = _family_vectors(family, count, seed + 2, where)
    free = [((side & families.NAN_CODE) != families.NAN_CODE).all(dim=1) for side in (a, b)]
    a, b = a[free[0]].contiguous(), b[free[1]].contiguous()
    found = _errors(instruction, a, b)
    ratio = _ratio(found.error, found.bound)
    wrong = ratio[ratio > 0]
    bins = (torch.floor(torch.log2(wrong)).long() - FIRST_BIN_LOG2).clamp(0, -FIRST_BIN_LOG2)
    counts = torch.bincount(bins, minlength=1 - FIRST_BIN_LOG2)
    return FamilyErrors(
        family=family.value,
        dots=ratio.numel(),
        exact=ratio.numel() - wrong.numel(),
        largest=float(ratio.max()) if ratio.numel() else 0.0,
        first_log2=FIRST_BIN_LOG2,
        counts=tuple(counts.tolist()),
    )


# The search

ELITE = 48


def _search(instruction: Instruction, size: Sizes, seed: int, where: torch.device) -> Search:
    """Hill climbing from the constructed pairs; every generation is a full square of queries and keys."""
    import torch

    draw = Draw(seed * 1000 + 999, where)
    sides = [torch.tensor(side, dtype=torch.uint8, device=where) for side in families.worst_cases()]
    if size.population < len(sides[0]):
        # A small population keeps every kind of constructed vector, thinned evenly.
        keep = torch.linspace(0, len(sides[0]) - 1, size.population, device=where).long()
        sides = [side[keep] for side in sides]
    best = constructed = norm_share = 0.0
    champion = (sides[0][0], sides[1][0])
    pairs = 0
    for generation in range(size.generations + 1):
        a, b = sides
        found = _errors(instruction, a, b)
        pairs += found.error.numel()
        ratio = _ratio(found.error, found.bound)
        norm_share = max(norm_share, float(_ratio(found.error, found.norms).max()))
        top = torch.topk(ratio.ravel(), min(ELITE * 8, ratio.numel()))
        if generation == 0:
            constructed = float(top.values[0])
        if float(top.values[0]) > best:
            best = float(top.values[0])
            champion = (a[int(top.indices[0]) // len(b)].clone(), b[int(top.indices[0]) % len(b)].clone())
        kept = min(ELITE, size.population // 2)
        parents = [_distinct(a, top.indices // len(b), kept), _distinct(b, top.indices % len(b), kept)]
        sides = [
            torch.cat([elite, _mutants(elite, size.population - len(elite), draw)])
            for elite in (torch.cat([one[None], rest]) for one, rest in zip(champion, parents, strict=True))
        ]
    q, k = champion
    codes = [side.cpu().numpy() for side in champion]
    computed, exact = instruction.dots(q[None], k[None]), _exact(q, k)
    raised = [max(abs(Fraction(value)), Fraction(1, 64)) for value in guard.e4m3_float64(codes[1]).tolist() if value]
    bound = guard.dot_error_exact(codes[0]) * guard.sqrt_up(sum((value**2 for value in raised), Fraction(0)))
    error = abs(Fraction(float(computed[0, 0])) - exact)
    return Search(
        pairs=pairs,
        generations=size.generations,
        constructed=constructed,
        tightness=float(error / bound) if bound else math.inf if error else 0.0,
        norm_share=norm_share,
        q=_hex(q),
        k=_hex(k),
        computed=_answer(computed),
        exact=str(float(exact)),
        bound=float(bound),
    )


def _distinct(vectors: torch.Tensor, order: torch.Tensor, count: int) -> torch.Tensor:
    """The first ``count`` different vectors in the order of a ranking."""
    return vectors[list(dict.fromkeys(order.tolist()))[:count]]


def _mutants(parents: torch.Tensor, count: int, draw: Draw) -> torch.Tensor:
    """Children: some elements drawn anew, moved to a neighbouring code, or copied from another element."""
    import torch

    whose = draw.integers(0, len(parents), count).long()
    child = parents[whose].int()
    changed = draw.integers(0, HEAD_DIM, count, HEAD_DIM) < 2 ** draw.integers(0, 7, count, 1)
    kind = draw.integers(0, 4, count, 1)
    magnitude, sign = child & families.NAN_CODE, child & families.SIGN
    neighbour = (magnitude + draw.integers(0, 2, count, 1) * 2 - 1).clamp(0, families.MAX_CODE) | sign
    donor = draw.integers(0, HEAD_DIM, count, 1).long()
    copied = child.gather(1, donor).expand(count, HEAD_DIM)
    crossed = parents[draw.integers(0, len(parents), count).long()].int()
    fresh = draw.bits(count, HEAD_DIM)
    options = torch.stack([fresh, neighbour, copied, crossed])
    new = options.gather(0, kind.long()[None].expand(1, count, HEAD_DIM))[0]
    return torch.where(changed, new, child).to(torch.uint8)
