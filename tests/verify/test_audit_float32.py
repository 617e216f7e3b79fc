"""The sweep over float32 bit patterns and the interpreter's casts: the reference, the classes, planted encoders."""

import ml_dtypes
import numpy as np
import pytest
import torch

from dosa_ref.formats import Overflow
from dosa_verify.audit import all_float32, fp8, interpreter
from dosa_verify.audit.all_float32 import Cast, Run

FP8 = ml_dtypes.float8_e4m3fn
OVERFLOW = 0x43E80000  # 464, the last value that goes to 448


@pytest.fixture(scope="module")
def where(device):
    return torch.device(device.value)


def numpy_cast(name, encode):
    """A cast in NumPy, from uint32 bit patterns."""

    def cast(values):
        bits = values.cpu().numpy().view(np.uint32)
        with np.errstate(all="ignore"):
            return torch.from_numpy(encode(bits).astype(np.uint8)).to(values.device)

    return Cast(name=name, cast=cast)


def right(bits):
    return all_float32.encode(torch.from_numpy(bits.view(np.int32).copy())).numpy()


def unsaturated(bits):
    return bits.view(np.float32).astype(FP8).view(np.uint8)


def sweep(cast, where, start, count, chunk=2**14):
    return all_float32.sweep([cast], where, start=start, end=start + count, chunk=chunk)[cast.name]


def test_the_integer_reference_is_the_scalar_reference(where):
    random = np.random.Generator(np.random.PCG64(6)).integers(0, 2**32, 30_000, dtype=np.uint64)
    for bits in (fp8.float32_edges().view(np.uint32), random.astype(np.uint32)):
        want = fp8._reference_codes(bits.view(np.float32), Overflow.SATURATE)
        got = all_float32.encode(torch.from_numpy(bits.view(np.int32).copy()).to(where)).cpu().numpy()
        assert np.array_equal(want, got)


def test_a_cast_without_saturation_is_found(where):
    for sign in (0, 0x80000000):
        runs = sweep(numpy_cast("plain", unsaturated), where, sign | (OVERFLOW - 1000), 2**17)
        code = sign >> 24
        assert runs == [
            Run(
                kind="overflow", first=sign | (OVERFLOW + 1), last=sign | (OVERFLOW - 1000 + 2**17 - 1),
                count=2**17 - 1001, reference=code | 0x7E, got=code | 0x7F,
            )
        ]  # fmt: skip


def test_infinity_has_its_own_class(where):
    runs = sweep(numpy_cast("plain", unsaturated), where, 0x7F7FFF00, 0x200)
    assert [(run.kind, run.first, run.last) for run in runs] == [
        ("overflow", 0x7F7FFF00, 0x7F7FFFFF),
        ("infinity", 0x7F800000, 0x7F800000),
    ]


def test_another_nan_is_classed_and_a_lost_one_is_not(where):
    def one_nan(bits):
        codes = right(bits)
        return np.where((codes & 0x7F) == 0x7F, 0x7F, codes)

    assert [run.kind for run in sweep(numpy_cast("one NaN", one_nan), where, 0xFF800000, 2**15)] == ["nan_bits"]

    def saturated(bits):
        codes = right(bits)
        return np.where((codes & 0x7F) == 0x7F, codes - 1, codes)

    (run,) = sweep(numpy_cast("no NaN", saturated), where, 0x7F800000, 2**15)
    assert (run.kind, run.first, run.count) == ("unexplained", 0x7F800001, 2**15 - 1)


def test_a_single_wrong_tie_is_found(where):
    tie = int(np.float32(1.0625).view(np.uint32))

    def encode(bits):
        return right(bits) ^ (bits == tie)

    (run,) = sweep(numpy_cast("tie", encode), where, tie - 70_000, 2**17)
    assert (run.kind, run.first, run.last, run.count) == ("unexplained", tie, tie, 1)
    part = fp8.sweep_part("planted", {"tie": [run]}, 2**17)
    assert part.disagreements[0].first == {"bits": "0x3f880000", "decimal": "1.0625"}
    assert fp8.AuditReport(parts=(part,), time_s=0.0).outcome == "counterexample"


def test_a_saturation_that_starts_too_late_is_unexplained(where):
    """448 up to 512 and NaN above is no documented overflow rule; neither is NaN at the tie."""

    def encode(bits):
        return np.where((bits >= OVERFLOW) & (bits < 0x44000000), 0x7F, right(bits))

    runs = sweep(numpy_cast("early", encode), where, OVERFLOW - 10, 100)
    assert [(run.kind, run.first) for run in runs] == [("unexplained", OVERFLOW), ("overflow", OVERFLOW + 1)]


def test_a_long_list_keeps_its_count(where):
    def encode(bits):
        return right(bits) ^ (bits & 1)

    runs = sweep(numpy_cast("odd", encode), where, 0x3F800000, 2**12)
    assert len(runs) == all_float32.LISTED + 1
    assert sum(run.count for run in runs) == 2**11
    assert (runs[-1].count, runs[-1].last) == (2**11 - all_float32.LISTED, 0x3F800000 + 2**12 - 1)


def test_torch_and_the_device_s_casts_on_boundaries(where):
    """Every disagreement of this machine's torch around each code and tie has a class."""
    cast = Cast(name="torch", cast=lambda values: values.to(torch.float8_e4m3fn).view(torch.uint8))
    for middle in fp8.float32_edges().view(np.uint32)[:1300:13].tolist():
        runs = sweep(cast, where, max(middle - 8, 0), 16)
        assert all(run.kind != "unexplained" for run in runs)


@pytest.fixture(scope="module")
def interpreted():
    return interpreter.interpreted_casts(fp8.float32_edges())


def test_the_interpreter_is_wrong_as_predicted(interpreted):
    codes, decoded = interpreted
    assert np.array_equal(codes, interpreter.predicted_codes(fp8.float32_edges()))
    encode, decode = fp8._interpreter_encode_part(codes), fp8._interpreter_decode_part(decoded)
    assert {item.kind for item in encode.disagreements} == {"interpreter_cast"}
    assert {item.kind for item in decode.disagreements} == {"interpreter_nan"}
    assert encode.count() > 200


def test_an_interpreter_that_is_wrong_in_another_way_is_unexplained(interpreted):
    codes, decoded = (array.copy() for array in interpreted)
    codes[np.flatnonzero(fp8.float32_edges() == 1.0)[0]] += 1
    decoded[0x38], decoded[0x7F] = 1.125, -480.0
    assert fp8._interpreter_encode_part(codes).count(fp8.UNEXPLAINED) == 1
    assert fp8._interpreter_decode_part(decoded).count(fp8.UNEXPLAINED) == 2


def test_a_linear_scale_by_a_reciprocal_is_classed(monkeypatch):
    """As torch does on a GPU; a scale that is wrong in another way stays unexplained."""
    plain = fp8._quantize_torch
    machines = fp8._torch_machines("cpu")
    linear = next(scale for scale in fp8.quantize.ScaleFormat if scale.value == "linear")

    def by_product(machine, rows, scale_format):
        return fp8._quantize_numpy(rows, scale_format, reciprocal=True)

    with np.errstate(all="ignore"):
        monkeypatch.setattr(fp8, "_quantize_torch", by_product)
        found = fp8._quantize_part(linear, machines)
        assert found.count("reciprocal") > 5
        assert found.count(fp8.UNEXPLAINED) == 0

        def one_ulp(machine, rows, scale_format):
            codes, scale = plain(machine, rows, scale_format)
            return codes, np.nextafter(scale, np.float32(np.inf))

        monkeypatch.setattr(fp8, "_quantize_torch", one_ulp)
        assert fp8._quantize_part(linear, machines).count(fp8.UNEXPLAINED) > 5
