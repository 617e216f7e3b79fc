"""The FP8 audit passes on this machine's libraries, and finds encoders and decoders that are wrong in one place."""

import functools
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import dosa_verify
from dosa_ref import formats
from dosa_verify import terminal
from dosa_verify.audit import fp8

FP8 = ml_dtypes.float8_e4m3fn


@functools.lru_cache(maxsize=64)
def remembered_codes(data, kind, overflow):
    values = np.frombuffer(data, kind)
    return np.array([formats.encode_e4m3(number, overflow) for number in values.astype(np.float64).tolist()], np.uint8)


@pytest.fixture(autouse=True)
def quick_reference(monkeypatch):
    """The scalar reference takes most of an audit's time and gives the same codes each time."""
    monkeypatch.setattr(
        fp8, "_reference_codes", lambda values, overflow: remembered_codes(values.tobytes(), values.dtype, overflow)
    )


def part(audit, name):
    return next(part for part in audit.parts if part.name == name)


def test_everything_is_explained_here(audit, schema_errors):
    assert audit.outcome == "exact"
    assert audit.unexplained == 0
    assert schema_errors(audit.to_json()) == []


def test_inputs_are_exhaustive(audit):
    assert part(audit, "decode all E4M3FN codes").inputs == 256
    assert part(audit, "encode all bfloat16").inputs == 2**16
    assert part(audit, "encode all float16").inputs == 2**16
    assert part(audit, "products of all pairs of codes").inputs == 2**16


def test_every_overflowing_input_is_listed(audit):
    """Counted on its own: ml_dtypes gives NaN for each finite bfloat16 beyond 464 and for both infinities."""
    values = np.arange(2**16, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(np.float64)
    encode = part(audit, "encode all bfloat16")
    of_library = [item for item in encode.disagreements if item.implementation == "ml_dtypes"]
    beyond = int((np.isfinite(values) & (np.abs(values) > 464)).sum())
    assert sum(item.count for item in of_library if item.kind == "overflow") == beyond
    assert sum(item.count for item in of_library if item.kind == "infinity") == 2
    assert sum(item.count for item in of_library) == beyond + 2


def test_after_the_clamp_all_agree(audit):
    assert part(audit, "encode after the clamp to 448").disagreements == ()


def test_the_rounding_up_of_scales_differs_from_a_cast(audit):
    encode = part(audit, "encode UE8M0, rounding up")
    kinds = {item.kind for item in encode.disagreements if item.implementation == "ml_dtypes cast"}
    assert kinds == {"ue8m0_rounding", "ue8m0_small", "ue8m0_zero", "ue8m0_sign"}
    assert [item for item in encode.disagreements if item.implementation == "exact ceiling"] == []


def ties_away(values):
    """ml_dtypes' encoder, with ties rounded away from zero."""
    numbers = values.astype(np.float32)
    codes = numbers.astype(FP8).view(np.uint8)
    up = np.nextafter(np.abs(numbers), np.float32(np.inf)) * np.sign(numbers)
    away = up.astype(np.float32).astype(FP8).view(np.uint8)
    return np.where(np.isfinite(numbers) & (np.abs(numbers) <= 448), away, codes)


def one_wrong_bit_pattern(values):
    """Wrong for a single input: the tie between 1.125 and 1.25 goes up to the odd code."""
    codes = values.astype(FP8).view(np.uint8).copy()
    codes[values.astype(np.float32) == np.float32(1.0625)] ^= 1
    return codes


def saturates_early(values):
    """464 is a tie that goes to 448; this one makes it NaN, as if it overflowed."""
    codes = values.astype(FP8).view(np.uint8).copy()
    codes[values.astype(np.float32) == np.float32(464)] = formats.E4M3_NAN_CODE
    return codes


@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize("encode", [ties_away, one_wrong_bit_pattern, saturates_early])
def test_a_wrong_encoder_is_found(encode):
    report = fp8.audit_fp8(encoders=[fp8.Encoder(name="planted", encode=encode)])
    assert report.outcome == "counterexample"
    found = [item for part in report.parts for item in part.disagreements if item.kind == fp8.UNEXPLAINED]
    assert {item.implementation for item in found} == {"planted"}
    assert all(item.reference["bits"] != item.got["bits"] for item in found)


def test_a_wrong_decoder_is_found():
    def decode(codes):
        values = codes.view(FP8).astype(np.float32)
        return np.where(codes == 0x7F, np.float32(480), values)  # what Triton's interpreter did with NaN

    report = fp8.audit_fp8(decoders=[fp8.Decoder(name="planted", decode=decode)])
    found = [item for part in report.parts for item in part.disagreements if item.kind == fp8.UNEXPLAINED]
    assert [(item.implementation, item.first["bits"], item.got["decimal"]) for item in found] == [
        ("planted", "0x7f", "480.0")
    ]


def test_a_wrong_scale_is_found(monkeypatch):
    """The classes for UE8M0 predict exact codes: a rounding of one's own is not excused by them."""
    plain = formats.ceil_ue8m0
    monkeypatch.setattr(
        formats, "ceil_ue8m0", lambda values: np.where(values == 3.0, 128, plain(values)).astype(np.uint8)
    )
    assert fp8.audit_fp8().outcome == "counterexample"


def test_the_command_fails_on_an_unexplained_difference(monkeypatch, dosa):
    planted = fp8.Encoder(name="planted", encode=one_wrong_bit_pattern)
    plain = fp8.audit_fp8
    monkeypatch.setattr(fp8, "audit_fp8", lambda **arguments: plain(encoders=[planted], **arguments))
    code, out, _ = dosa("audit", "fp8")
    assert code == 1
    assert "unexplained" in out
    assert "planted" in out


def test_the_table_says_what_its_classes_mean(audit, capsys):
    seen = {item.kind for part in audit.parts for item in part.disagreements}
    assert 3 < len(seen) < len(fp8.KNOWN_CLASSES)
    terminal.print_audit(audit)
    out = capsys.readouterr().out
    assert {kind for kind, meaning in fp8.KNOWN_CLASSES.items() if f"\n{kind}: {meaning}\n" in out} == seen


def test_the_documents_say_what_the_classes_mean():
    text = (Path(dosa_verify.__file__).parents[1] / "docs" / "schemas.md").read_text(encoding="utf-8").replace("`", "")
    for kind, meaning in fp8.KNOWN_CLASSES.items():
        assert f"\n| {kind} | {meaning} |\n" in text
