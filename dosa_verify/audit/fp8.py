"""Exhaustive audit of the FP8 formats on this machine: its CPU, and its GPU if asked for.

Each part puts several implementations beside the reference on every input of a format, or on every input that can
decide a rounding. Disagreements are never dropped: each run of neighbouring inputs with the same answers is listed
with its bits. Those that a documented difference between libraries predicts *exactly* carry its name
(`KNOWN_CLASSES`).

Anything else is ``unexplained``, and one of those fails the audit.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import itertools
import time
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from dosa_ref import formats, quantize, tensorcore
from dosa_ref.formats import Overflow, float_evidence
from dosa_ref.spec import E4M3_MAX, HEAD_DIM
from dosa_verify.audit.interpreter import interpreted_casts, predicted_codes

if TYPE_CHECKING:
    from dosa_verify.audit.all_float32 import Run

SCHEMA = "dosa.audit_fp8/1"
UNEXPLAINED = "unexplained"
KNOWN_CLASSES = {
    "overflow": "finite, rounds beyond 448: saturates to 448 in the reference, becomes NaN elsewhere",
    "infinity": "Inf: saturates to 448 in the reference, becomes NaN elsewhere",
    "nan_bits": "NaN on both sides, another sign or payload",
    "zero_sign": "zero on both sides, another sign: a tensor-core dot of zero is always +0",
    "ue8m0_rounding": "a cast to float8_e8m0fnu rounds to the nearest power of two, production scales round up",
    "ue8m0_small": "below 2^-126: the reference gives 2^-126, a cast the nearest of 2^-127 and 2^-126",
    "ue8m0_zero": "zero, which has no UE8M0 code: 2^-126, 2^-127 or NaN",
    "ue8m0_sign": "negative, which has no UE8M0 code: the sign is ignored or the result is NaN",
    "non_finite_row": "a row with NaN or Inf: the reference gives NaN codes and a NaN scale, others what falls out",
    "reciprocal": "torch on a GPU divides by the number 448 as a product with float32's 1/448: another linear scale",
    "interpreter_cast": "Triton's interpreter encodes as dosa_verify.audit.interpreter.predicted_codes says",
    "interpreter_nan": "Triton's interpreter decodes NaN to 480",
}
"""Documented differences, each with what it says; one counts only where it predicts the other answer bit by bit."""
NOT_CHECKED_ON_CPU = (
    "all 4,294,967,296 float32 bit patterns: --device cuda; here every code, tie and midpoint with its neighbours",
    "casts of torch and Triton on a GPU",
)
OVERFLOW_ABOVE = 464.0
"""Midpoint of 448 and what would be the next value; it ties to 448, everything above overflows."""

FP8 = np.dtype(ml_dtypes.float8_e4m3fn)
E8M0 = np.dtype(ml_dtypes.float8_e8m0fnu)
Codes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
Array = npt.NDArray[Any]
Classify = Callable[[Array, Array, Array], npt.NDArray[np.str_]]
"""(inputs as float32, reference output bits, other output bits) -> class of each disagreement."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Encoder:
    """An implementation of the cast to E4M3FN.

    Attributes:
        name: who does it.
        encode: from an array of float32, bfloat16 or float16 to codes of the same shape.
    """

    name: str
    encode: Callable[[Array], Codes]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """An implementation of the cast from E4M3FN to float32.

    Attributes:
        name: who does it.
        decode: from codes to float32 of the same shape.
    """

    name: str
    decode: Callable[[Codes], Floats]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Disagreement:
    """A run of neighbouring inputs on which one implementation gives another answer than the reference.

    Attributes:
        implementation: who disagrees.
        kind: one of ``KNOWN_CLASSES`` or ``unexplained``.
        count: inputs in the run.
        first, last: the run's ends as the part writes inputs, bits and decimal.
        reference, got: the two answers (at the first input), bits and decimal.
    """

    implementation: str
    kind: str
    count: int
    first: dict[str, str]
    last: dict[str, str]
    reference: dict[str, str]
    got: dict[str, str]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AuditPart:
    """One table of the audit.

    Attributes:
        name: what was compared.
        inputs: how many inputs.
        implementations: who took part; the first is the reference.
        disagreements: all of them.
    """

    name: str
    inputs: int
    implementations: tuple[str, ...]
    disagreements: tuple[Disagreement, ...]

    def count(self, kind: str | None = None) -> int:
        """Return the number of disagreeing (input, implementation) pairs, of one class or of all."""
        return sum(item.count for item in self.disagreements if kind is None or item.kind == kind)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AuditReport:
    """The whole audit.

    Attributes:
        parts: the tables.
        time_s: seconds.
        device: ``cpu``, or ``cuda`` if the GPU's casts took part.
        not_checked: what this run cannot tell.
    """

    parts: tuple[AuditPart, ...]
    time_s: float
    device: str = "cpu"
    not_checked: tuple[str, ...] = ()

    @property
    def unexplained(self) -> int:
        """Disagreements that no known class predicts."""
        return sum(part.count(UNEXPLAINED) for part in self.parts)

    @property
    def outcome(self) -> str:
        """``exact`` if every disagreement is of a known class, else ``counterexample``."""
        return "counterexample" if self.unexplained else "exact"

    def to_json(self) -> dict[str, object]:
        """Return the audit as JSON values, schema ``dosa.audit_fp8/1``."""
        return {
            "schema": SCHEMA,
            "outcome": self.outcome,
            "device": self.device,
            "time_s": self.time_s,
            "not_checked": list(self.not_checked),
            "parts": [
                {
                    "name": part.name,
                    "inputs": part.inputs,
                    "implementations": list(part.implementations),
                    "disagreements": [dataclasses.asdict(item) for item in part.disagreements],
                }
                for part in self.parts
            ],
        }


def audit_fp8(
    *,
    device: str = "cpu",
    interpreter: bool = False,
    encoders: Sequence[Encoder] = (),
    decoders: Sequence[Decoder] = (),
    on_progress: Callable[[int, int], None] | None = None,
) -> AuditReport:
    """Run the audit. For ``cuda``, ``dosa_verify.targets.dosa.connect`` must have been called for the GPU.

    Args:
        device: ``cpu``, or ``cuda`` for the GPU's casts beside the CPU's and all float32 bit patterns.
        interpreter: also audit Triton's interpreter as it is, in a process of its own.
        encoders: further casts to E4M3FN to put beside the built-in ones.
        decoders: further casts from E4M3FN.
        on_progress: called with (parts done, parts).

    Returns:
        The report; it passes only if every disagreement is exactly what a known class predicts.

    Raises:
        BackendUnavailable: the interpreter was asked for and does not run.

    Exactness: exact; answers are compared as bits.
    """
    started = time.monotonic()
    machines = _torch_machines(device)
    all_encoders = (*_builtin_encoders(machines), *encoders)
    all_decoders = (*_builtin_decoders(machines), *decoders)
    work: list[Callable[[], AuditPart]] = [
        lambda: _decode_part(all_decoders),
        lambda: _encode_part("encode all bfloat16", _all_values(ml_dtypes.bfloat16), all_encoders),
        lambda: _encode_part("encode all float16", _all_values(np.float16), all_encoders),
        lambda: _encode_part("encode float32 boundaries, ties and neighbours", float32_edges(), all_encoders),
        lambda: _clamped_part(all_encoders),
        lambda: _product_part(machines),
        lambda: _ue8m0_decode_part(machines),
        lambda: _ue8m0_encode_part(machines),
        *(lambda scale=scale: _quantize_part(scale, machines) for scale in quantize.ScaleFormat),
    ]
    if device == "cuda":
        work.append(_all_float32_part)
    if interpreter:
        answers = interpreted_casts(float32_edges())
        work += [lambda: _interpreter_encode_part(answers[0]), lambda: _interpreter_decode_part(answers[1])]
    parts = []
    for done, part in enumerate(work, start=1):
        # Overflow and NaN in casts are the subject here, not an accident to warn of.
        with np.errstate(all="ignore"):
            parts.append(part())
        if on_progress is not None:
            on_progress(done, len(work))
    missing = [] if interpreter else ["Triton's interpreter as it is"]
    return AuditReport(
        parts=tuple(parts),
        time_s=round(time.monotonic() - started, 3),
        device=device,
        not_checked=(*(NOT_CHECKED_ON_CPU if device == "cpu" else ()), *missing),
    )


# Inputs


def _all_values(dtype: Any) -> Array:
    """All 65,536 bit patterns of a 16-bit format."""
    return np.arange(2**16, dtype=np.uint16).view(dtype)


def float32_edges() -> Floats:
    """Return the float32 values around which an E4M3FN encoder can go wrong.

    Returns:
        Every code's value and every midpoint between neighbours (448 and its would-be successor 480 included) with two
        neighbours on each side; the ends of float32's subnormals and normals; Inf; quiet and signalling NaNs; both
        signs. Ascending bit patterns, no duplicates.
    """
    values = [formats.decode_e4m3(code) for code in range(formats.E4M3_NAN_CODE)] + [Fraction(480)]
    exact = [Fraction(value) for value in values]
    points = exact + [(low + high) / 2 for low, high in itertools.pairwise(exact)]
    bits = np.array([float(point) for point in points], np.float32).view(np.uint32).astype(np.int64)
    near = (bits[:, None] + np.arange(-2, 3)).ravel()
    patterns = [0x0, 0x1, 0x7FFFFF, 0x800000, 0x800001, 0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FC00000, 0x7FFFFFFF]
    positive = np.unique(np.concatenate([near[near >= 0], patterns]))
    return np.concatenate([positive, positive | 0x80000000]).astype(np.uint32).view(np.float32)


def _ue8m0_inputs() -> Floats:
    """All bfloat16 values, and each power of two and each point 1.5 * 2^k with its neighbours."""
    halves = _as_float32(_all_values(ml_dtypes.bfloat16)).view(np.uint32)
    exponents = np.arange(255, dtype=np.int64) << 23
    points = np.concatenate([exponents, exponents | 0x400000])
    near = (points[:, None] + np.arange(-2, 3)).ravel()
    near = near[(near >= 0) & (near <= 0x7F800000)]
    return np.unique(np.concatenate([halves.astype(np.int64), near])).astype(np.uint32).view(np.float32)


def edge_rows() -> Floats:
    """Return float32 ``[n, 128]`` rows that quantisers treat differently: zero, denormal, huge, ties, NaN, Inf."""
    random = np.random.Generator(np.random.PCG64(8))
    smallest, largest = np.float32(2.0**-149), np.finfo(np.float32).max
    rows = [np.zeros(128), np.full(128, -0.0), np.full(128, smallest), np.full(128, 2.0**-126), np.full(128, 1e-4)]
    rows += [np.nextafter(np.float32(1e-4), np.float32(step)) * np.ones(128) for step in (0, 1)]
    rows += [np.full(128, largest), np.linspace(-1, 1, 128) * largest]
    rows += [random.normal(0, 10.0**exponent, 128) for exponent in range(-38, 38, 4)]
    # amax exactly 448 * 2^k, one step below and above: where a rounded logarithm picks the wrong power of two.
    for exponent in (-12, -1, 0, 1, 9):
        edge = np.float32(448 * 2.0**exponent)
        for amax in (edge, np.nextafter(edge, np.float32(0)), np.nextafter(edge, np.float32(np.inf))):
            row = random.uniform(-1, 1, 128) * float(amax) * 0.99
            row[5] = amax
            rows.append(row)
    # Ties of the encoder at scale one.
    ties = np.array([(k + 0.5) / 8 * 2.0**e for e in range(-6, 9) for k in range(8, 16)])
    rows.append(np.concatenate([np.resize(ties[ties < E4M3_MAX], 127), [E4M3_MAX]]))
    for bad in (np.nan, -np.nan, np.inf, -np.inf):
        row = random.normal(0, 1, 128)
        row[17] = bad
        rows.append(row)
    return np.array(rows).astype(np.float32)


# Implementations


def _reference_codes(values: Array, overflow: Overflow) -> Codes:
    """The scalar reference on every element."""
    numbers = values.astype(np.float64).tolist()
    return np.array([formats.encode_e4m3(number, overflow) for number in numbers], np.uint8)


def _torch() -> Any:
    """Torch, or None: the audit runs without it, with one implementation less."""
    try:
        import torch
    except ImportError:
        return None
    return torch


def _to_torch(torch: Any, values: Array) -> Any:
    if values.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(values.view(np.uint16).copy()).view(torch.bfloat16)
    return torch.from_numpy(values.copy())


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TorchMachine:
    """Torch on one of the machine's devices.

    Attributes:
        name: for reports.
        device: torch's word for it.
        torch: the module.
    """

    name: str
    device: str
    torch: Any

    def tensor(self, values: Array) -> Any:
        """Copy an array to the device."""
        return _to_torch(self.torch, values).to(self.device)


def _torch_machines(device: str) -> tuple[TorchMachine, ...]:
    torch = _torch()
    if torch is None:
        return ()
    names = {"cpu": "CPU", "cuda": "CUDA"} if device == "cuda" else {"cpu": "CPU"}
    return tuple(
        TorchMachine(name=f"torch {torch.__version__} {name}", device=where, torch=torch)
        for where, name in names.items()
    )


def _builtin_encoders(machines: Sequence[TorchMachine]) -> tuple[Encoder, ...]:
    encoders = [
        Encoder(name="reference, overflow to NaN", encode=lambda values: _reference_codes(values, Overflow.NAN)),
        Encoder(
            name="reference, array twin",
            encode=lambda values: formats.encode_e4m3_array(_as_float32(values)).view(np.uint8),
        ),
        Encoder(name="ml_dtypes", encode=lambda values: values.astype(FP8).view(np.uint8)),
    ]
    encoders += [Encoder(name=machine.name, encode=_torch_encoder(machine)) for machine in machines]
    encoders += [
        Encoder(name=f"{_triton_name()} CUDA", encode=_triton_encoder(machine))
        for machine in machines
        if machine.device == "cuda"
    ]
    return tuple(encoders)


def _torch_encoder(machine: TorchMachine) -> Callable[[Array], Codes]:
    def encode(values: Array) -> Codes:
        torch = machine.torch
        codes: Codes = machine.tensor(values).to(torch.float8_e4m3fn).view(torch.uint8).cpu().numpy()
        return codes

    return encode


def _triton_encoder(machine: TorchMachine) -> Callable[[Array], Codes]:
    def encode(values: Array) -> Codes:
        from dosa_verify.audit import kernels

        codes: Codes = kernels.launch_cast(machine.tensor(values)).cpu().numpy()
        return codes

    return encode


def _triton_name() -> str:
    return f"Triton {importlib.metadata.version('triton')}"


def _builtin_decoders(machines: Sequence[TorchMachine]) -> tuple[Decoder, ...]:
    decoders = [Decoder(name="ml_dtypes", decode=lambda codes: codes.view(FP8).astype(np.float32))]
    decoders += [Decoder(name=machine.name, decode=_torch_decoder(machine)) for machine in machines]
    decoders += [
        Decoder(name=f"{_triton_name()} CUDA", decode=_triton_decoder(machine))
        for machine in machines
        if machine.device == "cuda"
    ]
    return tuple(decoders)


def _torch_decoder(machine: TorchMachine) -> Callable[[Codes], Floats]:
    def decode(codes: Codes) -> Floats:
        values: Floats = machine.tensor(codes).view(machine.torch.float8_e4m3fn).float().cpu().numpy()
        return values

    return decode


def _triton_decoder(machine: TorchMachine) -> Callable[[Codes], Floats]:
    def decode(codes: Codes) -> Floats:
        from dosa_verify.audit import kernels

        values: Floats = kernels.launch_decode(machine.tensor(codes)).cpu().numpy()
        return values

    return decode


# Parts


def _decode_part(decoders: Sequence[Decoder]) -> AuditPart:
    codes = np.arange(256, dtype=np.uint8)
    reference = np.array([float(formats.decode_e4m3(int(code))) for code in codes], np.float32)
    answers = {decoder.name: decoder.decode(codes) for decoder in decoders}
    return _part("decode all E4M3FN codes", codes, reference, answers, _classify_floats)


def _encode_part(name: str, values: Array, encoders: Sequence[Encoder]) -> AuditPart:
    reference = _reference_codes(values, Overflow.SATURATE)
    answers = {encoder.name: encoder.encode(values) for encoder in encoders}
    return _part(
        name, values, reference.view(FP8), {who: codes.view(FP8) for who, codes in answers.items()}, _classify_encode
    )


def _clamped_part(encoders: Sequence[Encoder]) -> AuditPart:
    """With production's clamp in front, every library must agree, overflow and Inf included."""
    edges = float32_edges()
    values = np.unique(np.concatenate([edges, _as_float32(_all_values(ml_dtypes.bfloat16))]).view(np.uint32))
    values = values.view(np.float32)
    clamped = np.clip(values, -E4M3_MAX, E4M3_MAX)
    reference = _reference_codes(values, Overflow.SATURATE)
    answers = {encoder.name: encoder.encode(clamped).view(FP8) for encoder in encoders}
    return _part("encode after the clamp to 448", values, reference.view(FP8), answers, _classify_nan_only)


def _product_part(machines: Sequence[TorchMachine]) -> AuditPart:
    """All 65,536 products: float32 holds each exactly, and so does one step of the tensor core."""
    codes = np.arange(256, dtype=np.uint8)
    left, right = (axis.ravel() for axis in np.meshgrid(codes, codes, indexing="ij"))
    exact = [formats.decode_e4m3(code) for code in range(256)]
    reference = np.array(
        [_exact_product(exact[a], exact[b]) for a, b in zip(left.tolist(), right.tolist(), strict=True)], np.float32
    )
    values = codes.view(FP8).astype(np.float32)
    answers = {"float32, ml_dtypes": values[left] * values[right]}
    for machine in machines:
        tensor = machine.tensor(codes).view(machine.torch.float8_e4m3fn).float()
        answers[f"float32, {machine.name}"] = (tensor[:, None] * tensor[None, :]).ravel().cpu().numpy()
    operands = np.zeros((256, tensorcore.WGMMA_E4M3.terms_per_step), np.uint8)
    operands[:, 0] = codes
    answers["tensor-core model"] = tensorcore.dots(operands, operands, tensorcore.WGMMA_E4M3).ravel()
    for machine in machines:
        if machine.device == "cuda":
            answers["tensor core of the GPU, wgmma"] = _tensor_core_products(machine, operands)
    pairs = (left.astype(np.uint16) << 8) | right
    return _part("products of all pairs of codes", pairs, reference, answers, _classify_floats)


def _tensor_core_products(machine: TorchMachine, operands: Codes) -> Floats:
    from dosa_verify.audit import kernels

    padded = np.zeros((256, HEAD_DIM), np.uint8)
    padded[:, : operands.shape[1]] = operands
    tensor = machine.tensor(padded)
    dots, _ = kernels.launch_dots(tensor, tensor, tile_m=64, tile_n=128, warps=4)
    products: Floats = dots.ravel().cpu().numpy()
    return products


def _exact_product(a: Fraction | float, b: Fraction | float) -> float:
    """The product of two decoded codes; refuses a result that float32 does not hold exactly."""
    if isinstance(a, Fraction) and isinstance(b, Fraction) and a and b:
        product = a * b
        rounded = formats.nearest_float32(product)
        assert Fraction(float(rounded)) == product, "a product of two E4M3 values has at most 8 significant bits"
        return float(rounded)
    return float(a) * float(b)


def _ue8m0_decode_part(machines: Sequence[TorchMachine]) -> AuditPart:
    codes = np.arange(256, dtype=np.uint8)
    reference = np.array([float(formats.decode_ue8m0(int(code))) for code in codes], np.float32)
    answers = {
        "reference, array twin": formats.ue8m0_to_float32(codes),
        "ml_dtypes": codes.view(E8M0).astype(np.float32),
    }
    for machine in machines:
        answers[machine.name] = machine.tensor(codes).view(machine.torch.float8_e8m0fnu).float().cpu().numpy()
    return _part("decode all UE8M0 codes", codes, reference, answers, _classify_floats)


def _ue8m0_encode_part(machines: Sequence[TorchMachine]) -> AuditPart:
    """The bit trick against exact arithmetic, and the libraries' casts beside it."""
    values = _ue8m0_inputs()
    answers = {"exact ceiling": _exact_ceiling(values), "ml_dtypes cast": values.astype(E8M0).view(np.uint8)}
    for machine in machines:
        cast = machine.tensor(values).to(machine.torch.float8_e8m0fnu)
        answers[f"{machine.name} cast"] = cast.view(machine.torch.uint8).cpu().numpy()
    # Compared as codes: 0x00 is 2^-127 and 0xff NaN.
    wrapped = {name: codes.view(E8M0) for name, codes in answers.items()}
    return _part("encode UE8M0, rounding up", values, formats.ceil_ue8m0(values).view(E8M0), wrapped, _classify_ue8m0)


def _exact_ceiling(values: Floats) -> Codes:
    """The documented rule of the reference, from exact rationals: smallest power of two not below, at least 2^-126."""
    codes = []
    for value in np.abs(values.astype(np.float64)).tolist():
        if not value < float("inf"):
            codes.append(formats.UE8M0_NAN_CODE)
            continue
        exact = Fraction(value)
        exponent = -126
        if exact > Fraction(1, 2**126):
            exponent = exact.numerator.bit_length() - exact.denominator.bit_length() - 1
            while Fraction(2) ** exponent < exact:
                exponent += 1
        codes.append(min(exponent + 127, formats.UE8M0_NAN_CODE))
    return np.array(codes, np.uint8)


def _quantize_part(scale_format: quantize.ScaleFormat, machines: Sequence[TorchMachine]) -> AuditPart:
    rows = edge_rows()
    codes, scale = quantize.quantize_tokens(rows, scale_format)
    answers = {"float32, ml_dtypes": _pack_row(*_quantize_numpy(rows, scale_format))}
    for machine in machines:
        answers[machine.name] = _pack_row(*_quantize_torch(machine, rows, scale_format))
    finite = np.asarray(np.isfinite(rows).all(axis=1))
    by_product = _pack_row(*_quantize_numpy(rows, scale_format, reciprocal=True))
    name = f"quantise edge rows, scale {scale_format.value}"
    reference = _pack_row(codes.view(np.uint8), scale)
    disagreements = []
    for who, packed in answers.items():
        for row in np.flatnonzero((packed != reference).any(axis=1)).tolist():
            place = int(np.flatnonzero(packed[row] != reference[row])[0])
            kind = "reciprocal" if np.array_equal(packed[row], by_product[row]) else UNEXPLAINED
            disagreements.append(
                Disagreement(
                    implementation=who,
                    kind=kind if finite[row] else "non_finite_row",
                    count=1,
                    first=_row_evidence(rows, row),
                    last=_row_evidence(rows, row),
                    reference=_packed_evidence(reference[row], place),
                    got=_packed_evidence(packed[row], place),
                )
            )
    return AuditPart(
        name=name,
        inputs=len(rows),
        implementations=("reference", *answers),
        disagreements=tuple(disagreements),
    )


def _quantize_numpy(
    rows: Floats, scale_format: quantize.ScaleFormat, *, reciprocal: bool = False
) -> tuple[Codes, Floats]:
    """Production's formula with NumPy and ml_dtypes, the power of two by frexp; or with a product by 1/448."""
    amax = np.maximum(np.abs(rows).max(axis=1), np.float32(1e-4))
    scale = amax * (np.float32(1) / np.float32(448)) if reciprocal else amax / np.float32(448)
    if scale_format is quantize.ScaleFormat.UE8M0:
        fraction, exponent = np.frexp(scale)
        scale = np.ldexp(np.float32(1), np.where(fraction == 0.5, exponent - 1, exponent)).astype(np.float32)
    quotient = np.clip(rows / scale[:, None], -448, 448)
    return quotient.astype(FP8).view(np.uint8), scale


def _quantize_torch(machine: TorchMachine, rows: Floats, scale_format: quantize.ScaleFormat) -> tuple[Codes, Floats]:
    """Production's formula with torch, the power of two from the bits."""
    torch = machine.torch
    x = machine.tensor(rows)
    scale = x.abs().amax(dim=1).clamp(min=1e-4) / 448
    if scale_format is quantize.ScaleFormat.UE8M0:
        bits = scale.view(torch.int32)
        exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(torch.int32)
        scale = (exponent.clamp(max=255) << 23).view(torch.float32)
    codes = (x / scale[:, None]).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    return codes.cpu().numpy(), scale.cpu().numpy()


def _pack_row(codes: Codes, scale: Floats) -> npt.NDArray[np.uint8]:
    """Codes and the scale's bytes as one row."""
    return np.concatenate([codes, scale.astype("<f4").reshape(-1, 1).view(np.uint8)], axis=1)


def _row_evidence(rows: Floats, row: int) -> dict[str, str]:
    extreme = rows[row][int(np.argmax(np.where(np.isfinite(rows[row]), 0, 1)))]
    amax = np.abs(rows[row]).max() if np.isfinite(rows[row]).all() else extreme
    return {**float_evidence(amax), "row": str(row)}


def _packed_evidence(packed: npt.NDArray[np.uint8], place: int) -> dict[str, str]:
    scale = float_evidence(packed[128:].copy().view("<f4")[0])
    if place < 128:
        code = packed[place : place + 1]
        return {
            "bits": f"0x{int(code[0]):02x}",
            "decimal": str(code.view(FP8)[0]),
            "element": str(place),
            "scale": scale["bits"],
        }
    return {**scale, "element": "scale"}


def _all_float32_part() -> AuditPart:
    """Every float32 bit pattern on the GPU, against integers; the reference itself is compared in the tests."""
    import torch

    from dosa_verify.audit import all_float32, kernels

    casts = (
        all_float32.Cast(
            name=f"torch {torch.__version__} CUDA",
            cast=lambda values: values.to(torch.float8_e4m3fn).view(torch.uint8),
        ),
        all_float32.Cast(name=f"{_triton_name()} CUDA", cast=kernels.launch_cast),
    )
    return sweep_part("encode all float32 bit patterns", all_float32.sweep(casts, torch.device("cuda")), 2**32)


def sweep_part(name: str, runs: dict[str, list[Run]], inputs: int) -> AuditPart:
    """Return the runs of a sweep as a part of the audit.

    Args:
        name: of the part.
        runs: per cast, from ``all_float32.sweep``.
        inputs: bit patterns compared.
    """

    def value(bits: int) -> dict[str, str]:
        return _evidence(np.array([bits], np.uint32).view(np.float32), 0)

    def code(bits: int) -> dict[str, str]:
        return _evidence(np.array([bits], np.uint8).view(FP8), 0)

    return AuditPart(
        name=name,
        inputs=inputs,
        implementations=("reference in integers, on the device", *runs),
        disagreements=tuple(
            Disagreement(
                implementation=who,
                kind=run.kind,
                count=run.count,
                first=value(run.first),
                last=value(run.last),
                reference=code(run.reference),
                got=code(run.got),
            )
            for who, found in runs.items()
            for run in found
        ),
    )


def _interpreter_encode_part(codes: Codes) -> AuditPart:
    values = float32_edges()
    predicted = predicted_codes(values)

    def classify(inputs: Array, _reference: Array, got: Array) -> npt.NDArray[np.str_]:
        at = np.searchsorted(values.view(np.uint32), inputs.view(np.uint32))
        return np.where(predicted[at] == _bits(got), "interpreter_cast", UNEXPLAINED)

    name = "encode float32 boundaries, Triton's interpreter"
    reference = _reference_codes(values, Overflow.SATURATE).view(FP8)
    return _part(name, values, reference, {f"{_triton_name()} interpreter": codes.view(FP8)}, classify)


def _interpreter_decode_part(values: Floats) -> AuditPart:
    codes = np.arange(256, dtype=np.uint8)
    reference = np.array([float(formats.decode_e4m3(int(code))) for code in codes], np.float32)

    def classify(inputs: Array, reference: Array, got: Array) -> npt.NDArray[np.str_]:
        kinds = _classify_floats(inputs, reference, got)
        kinds[got == np.where(inputs == 0x7F, 480, np.where(inputs == 0xFF, -480, np.nan))] = "interpreter_nan"
        return kinds

    name = "decode all E4M3FN codes, Triton's interpreter"
    return _part(name, codes, reference, {f"{_triton_name()} interpreter": values}, classify)


# Comparing and classing


def _bits(values: Array) -> npt.NDArray[np.int64]:
    """Bit patterns as integers."""
    return values.view(f"u{values.dtype.itemsize}").astype(np.int64)


def _part(name: str, inputs: Array, reference: Array, answers: dict[str, Array], classify: Classify) -> AuditPart:
    """Compare answers as bits; group disagreements into runs of neighbouring inputs."""
    expected = _bits(reference)
    disagreements: list[Disagreement] = []
    for who, answer in answers.items():
        got = _bits(answer)
        places = np.flatnonzero(got != expected)
        if not len(places):
            continue
        kinds = classify(_as_float32(inputs[places]), reference[places], answer[places])
        keys = list(zip(kinds.tolist(), expected[places].tolist(), got[places].tolist(), strict=True))
        start = 0
        for end in range(1, len(places) + 1):
            if end < len(places) and keys[end] == keys[start] and places[end] == places[end - 1] + 1:
                continue
            first, last = int(places[start]), int(places[end - 1])
            disagreements.append(
                Disagreement(
                    implementation=who,
                    kind=keys[start][0],
                    count=end - start,
                    first=_evidence(inputs, first),
                    last=_evidence(inputs, last),
                    reference=_evidence(reference, first),
                    got=_evidence(answer, first),
                )
            )
            start = end
    return AuditPart(
        name=name,
        inputs=len(inputs),
        implementations=("reference", *answers),
        disagreements=tuple(disagreements),
    )


def _as_float32(values: Array) -> Floats:
    """Inputs as float32 where they are numbers; code inputs stay what they are."""
    return values.astype(np.float32)


def _evidence(values: Array, place: int) -> dict[str, str]:
    width = 2 * values.dtype.itemsize
    bits = int(_bits(values[place : place + 1])[0])
    return {"bits": f"0x{bits:0{width}x}", "decimal": str(values[place])}


def _is_nan(values: Array) -> npt.NDArray[np.bool_]:
    return np.isnan(values.astype(np.float32))


def _classify_floats(inputs: Array, reference: Array, got: Array) -> npt.NDArray[np.str_]:
    kinds = np.full(len(inputs), UNEXPLAINED, dtype="<U16")
    kinds[_is_nan(reference) & _is_nan(got)] = "nan_bits"
    kinds[(reference == 0) & (got == 0)] = "zero_sign"
    return kinds


def _classify_nan_only(inputs: Array, reference: Array, got: Array) -> npt.NDArray[np.str_]:
    kinds = np.full(len(inputs), UNEXPLAINED, dtype="<U16")
    kinds[_is_nan(reference) & _is_nan(got)] = "nan_bits"
    return kinds


def _classify_encode(inputs: Array, reference: Array, got: Array) -> npt.NDArray[np.str_]:
    kinds = _classify_nan_only(inputs, reference, got)
    # The prediction is exact: the reference saturates, the other gives the NaN of the same sign.
    sign = np.where(np.signbit(inputs), 0x80, 0)
    predicted = (_bits(reference) == (sign | formats.E4M3_MAX_CODE)) & (_bits(got) == (sign | formats.E4M3_NAN_CODE))
    kinds[predicted & np.isinf(inputs)] = "infinity"
    kinds[predicted & np.isfinite(inputs) & (np.abs(inputs) > OVERFLOW_ABOVE)] = "overflow"
    return kinds


def _classify_ue8m0(inputs: Array, reference: Array, got: Array) -> npt.NDArray[np.str_]:
    bits = _bits(inputs)
    magnitude = bits & 0x7FFFFFFF
    codes, expected = _bits(got), _bits(reference)
    # The casts round to the nearest power of two: up from 1.5 on. Subnormals lie between 2^-127 and 2^-126.
    nearest = np.where(magnitude >= 0x7F800000, 255, (magnitude + 0x400000) >> 23)
    nearest = np.where(magnitude < 0x800000, (magnitude >= 0x600000).astype(np.int64), nearest)
    ceiling = np.clip((magnitude + 0x7FFFFF) >> 23, 1, 255)
    kinds = np.full(len(inputs), UNEXPLAINED, dtype="<U16")
    sound = expected == ceiling
    normal = (bits < 0x7F800000) & (magnitude >= 0x800000)
    kinds[sound & normal & (codes == nearest)] = "ue8m0_rounding"
    kinds[sound & (bits < 0x800000) & (codes == nearest)] = "ue8m0_small"
    kinds[sound & (bits >= 0x80000000) & ((codes == nearest) | (codes == 255))] = "ue8m0_sign"
    kinds[sound & (magnitude == 0) & ((codes == 0) | (codes == 255))] = "ue8m0_zero"
    return kinds
