"""The accumulation audit names the model that an instruction follows, and finds every planted one."""

import dataclasses
import json

import numpy as np
import pytest
import torch

from dosa_ref import guard, tensorcore
from dosa_verify.audit import accumulation, families
from dosa_verify.audit.accumulation import CONTRACT_MODEL, MODELS, Instruction, Sizes, StepOrder
from dosa_verify.audit.families import Draw, Family

SMALL = Sizes(probe=4, family=12, block=64, population=16, generations=1, errors=8, adequacy=2)
BY_NAME = {model.name: model for model in MODELS}
CONTRACT = BY_NAME[CONTRACT_MODEL]


@pytest.fixture(scope="module")
def where(device):
    return torch.device(device.value)


def reference_dots(model, a, b):
    dots = tensorcore.dots(a.cpu().numpy(), b.cpu().numpy(), model)
    return torch.from_numpy(dots).to(a.device)


def follows(model):
    """An instruction that follows an entry of the table."""
    return Instruction(name="planted", dots=lambda a, b: accumulation.model_dots(model, a, b), counted=False)


def audited(instruction, device, models=MODELS, sizes=SMALL):
    return accumulation.audit_accumulation(
        device=device.value, instructions=[instruction], sizes=sizes, models=models, seed=3
    )


def values(text):
    table = families.value_table()
    return np.array([table[code] for code in bytes.fromhex(text)])


def test_this_machine_follows_the_contract(device, schema_errors):
    models = [CONTRACT, BY_NAME["wgmma_e4m3_14_bits"], BY_NAME["hmma_f16"]]
    report = accumulation.audit_accumulation(device=device.value, sizes=SMALL, models=models)
    assert report.failures == ()
    assert report.instructions[0].fits == (CONTRACT_MODEL,)
    assert [found.differences for found in report.adequacy] == [0, 0]
    assert {found.pairs for found in report.instructions[0].families} == {family.value for family in Family}
    assert schema_errors(report.to_json()) == []


@pytest.mark.parametrize(
    "name",
    [
        "wgmma_e4m3_12_bits",
        "wgmma_e4m3_14_bits",
        "wgmma_e4m3_nearest",
        "wgmma_e4m3_promoted",
        "hmma_f16_pairs_of_4",
    ],
)
def test_a_planted_model_is_found_with_a_counterexample(name, device, where):
    report = audited(follows(BY_NAME[name]), device, models=(CONTRACT, BY_NAME[name]))
    assert report.outcome == "counterexample"
    assert report.instructions[0].fits == (name,)
    example = report.instructions[0].probe[0].counterexample
    assert example.instruction["bits"] != example.model["bits"]
    assert example.terms <= 12
    # What the contract says of this pair is what the reference computes.
    codes = [np.frombuffer(bytes.fromhex(text), np.uint8) for text in (example.q, example.k)]
    assert f"0x{tensorcore.dot_scalar(*codes).view(np.uint32):08x}" == example.model["bits"]
    assert float(example.exact) == values(example.q) @ values(example.k)


def test_plain_float32_fits_nothing(device):
    def dots(a, b):
        table = torch.tensor(families.value_table(), dtype=torch.float32, device=a.device)
        return table[a.long()] @ table[b.long()].T

    tried = [CONTRACT, BY_NAME["wgmma_e4m3_nearest"], BY_NAME["hmma_f16"]]
    report = audited(Instruction(name="float32", dots=dots, counted=False), device, models=tried)
    assert report.instructions[0].fits == ()
    assert "no entry" in report.failures[0]
    assert all(found.differences for found in report.instructions[0].probe)


def test_a_zero_of_the_wrong_sign_is_found(device):
    def dots(a, b):
        right = reference_dots(tensorcore.WGMMA_E4M3, a, b)
        return torch.where(right == 0, -torch.zeros_like(right), right)

    report = audited(Instruction(name="-0", dots=dots, counted=False), device, models=(CONTRACT,))
    example = report.instructions[0].probe[0].counterexample
    assert (example.instruction["decimal"], example.model["decimal"]) == ("-0.0", "0.0")
    assert example.terms <= 1


def test_a_fault_that_only_one_family_shows_is_counted(device):
    """Right on the probe's few vectors, wrong wherever a NaN comes from the key alone."""
    seen = []

    def dots(a, b):
        right = reference_dots(tensorcore.WGMMA_E4M3, a, b)
        seen.append(len(b))
        if len(b) == SMALL.probe * len(Family):
            return right
        return torch.where(right.isnan(), torch.zeros_like(right), right)

    report = audited(Instruction(name="NaN lost", dots=dots), device, models=(CONTRACT,))
    assert seen
    found = {item.pairs: item for item in report.instructions[0].families}
    assert report.instructions[0].fits == ()
    assert [pairs for pairs, item in found.items() if item.differences] == [Family.NAN.value]
    assert found[Family.NAN.value].counterexample.exact is None


def test_errors_beyond_the_bound_are_reported(device):
    """With 12 fraction bits the constructed worst case breaks the bound that was proved for 13."""
    coarse = dataclasses.replace(tensorcore.WGMMA_E4M3, name="coarse", fraction_bits=12, output_fraction_bits=12)
    instruction = Instruction(name="coarse", dots=lambda a, b: reference_dots(coarse, a, b), counted=False)
    report = audited(instruction, device, models=(CONTRACT,), sizes=dataclasses.replace(SMALL, population=700))
    assert report.search.tightness > 1.5
    assert any("of the proved bound" in line for line in report.failures)


def test_the_search_comes_near_the_bound_and_reports_its_pair_truly(device):
    instruction = Instruction(name="reference", dots=lambda a, b: reference_dots(tensorcore.WGMMA_E4M3, a, b))
    search = audited(
        dataclasses.replace(instruction, counted=False),
        device,
        models=(CONTRACT,),
        sizes=dataclasses.replace(SMALL, population=400, generations=1),
    ).search
    assert 0.94 < search.constructed <= search.tightness * (1 + 1e-12)
    assert search.tightness < 1
    codes = [np.frombuffer(bytes.fromhex(text), np.uint8) for text in (search.q, search.k)]
    computed = tensorcore.dot_scalar(*codes)
    assert f"0x{computed.view(np.uint32):08x}" == search.computed["bits"]
    raised = np.abs(values(search.k))
    raised = np.where(raised > 0, np.maximum(raised, 2.0**-6), 0)
    bound = float(guard.dot_error(codes[0])) * np.sqrt((raised**2).sum())
    error = abs(float(computed) - values(search.q) @ values(search.k))
    assert error / bound == pytest.approx(search.tightness, rel=1e-9)


@pytest.mark.parametrize("reference", tensorcore.MODELS, ids=lambda model: model.name)
def test_the_table_has_the_reference_s_parameters(reference):
    ours = BY_NAME[reference.name]
    for field in ("terms_per_step", "fraction_bits", "output_fraction_bits", "operand_min_exponent"):
        assert getattr(ours, field) == getattr(reference, field)


@pytest.mark.parametrize("reference", tensorcore.MODELS, ids=lambda model: model.name)
def test_the_integer_model_equals_the_reference_on_every_family(reference, where):
    for family in Family:
        a, b = accumulation._family_vectors(family, 8, 11, where)
        got = accumulation.model_dots(BY_NAME[reference.name], a, b).cpu().numpy()
        want = tensorcore.dots(a.cpu().numpy(), b.cpu().numpy(), reference)
        assert np.array_equal(got.view(np.int32), want.view(np.int32)), family


def test_an_integer_model_that_is_not_the_reference_s_fails_the_audit(device, monkeypatch):
    wrong = dataclasses.replace(tensorcore.WGMMA_E4M3, fraction_bits=12)
    monkeypatch.setattr(tensorcore, "MODELS", (wrong,))
    instruction = follows(CONTRACT)
    report = audited(instruction, device, models=(CONTRACT,))
    assert "audit and reference differ" in report.failures[0]


def test_promotion_and_nearest_rounding_by_hand(where):
    """One product of 2^16 and one of 7.875 in the same step, unit 8: cut it vanishes, to nearest it counts 8."""

    def vector(*pairs):
        codes = torch.zeros((1, 128), dtype=torch.uint8)
        for place, code in pairs:
            codes[0, place] = code
        return codes.to(where)

    def dot(name, a, b):
        return float(accumulation.model_dots(BY_NAME[name], a, b)[0, 0])

    q, k = vector((0, 0x78), (1, 0x41)), vector((0, 0x78), (1, 0x46))
    assert [dot(name, q, k) for name in (CONTRACT_MODEL, "wgmma_e4m3_nearest")] == [65536.0, 65544.0]
    later_q, later_k = vector((0, 0x78), (40, 0x41)), vector((0, 0x78), (40, 0x46))
    assert [dot(name, later_q, later_k) for name in (CONTRACT_MODEL, "wgmma_e4m3_promoted")] == [65536.0, 65543.875]


@pytest.mark.parametrize("order", StepOrder)
def test_step_orders_are_permutations(order):
    assert sorted(order.permutation()) == list(range(128))


def test_step_orders_are_what_they_say():
    pairs = StepOrder.PAIRS_OF_FOUR.permutation()
    assert pairs[:16] == [x for x in range(32) if x % 4 < 2]
    assert StepOrder.HALVES_OF_EIGHT.permutation()[:16] == [x for x in range(32) if x % 8 < 4]
    assert StepOrder.PAIRS_OF_EIGHT.permutation()[16:32] == [x for x in range(64) if x % 8 in (2, 3)]
    assert StepOrder.CONSECUTIVE.permutation() == list(range(128))


@pytest.mark.parametrize("family", Family)
def test_families_are_drawn_alike_and_hold_what_they_say(family, where):
    sides = [families.vectors(family, 64, side, Draw(5, where)).cpu().numpy() for side in "ab"]
    again = families.vectors(family, 64, "a", Draw(5, where)).cpu().numpy()
    assert np.array_equal(sides[0], again)
    assert len(np.unique(sides[0], axis=0)) > 32
    nan = ((sides[0] & 0x7F) == 0x7F).any(axis=1)
    assert 0 < nan.sum() < 64 if family is Family.NAN else not nan.any()
    table = np.array(families.value_table())
    products = np.abs(table[sides[0]] * table[sides[1]])
    total = np.abs((table[sides[0]] * table[sides[1]]).sum(axis=1))
    if family in (Family.CANCEL_IN_STEP, Family.CANCEL_ACROSS_STEPS):
        assert np.median(total / products.sum(axis=1)) < 0.2
    if family is Family.SPARSE:
        assert (products == 0).mean() > 0.8
    if family is Family.HUGE_THEN_TINY:
        largest = np.sort(np.abs(table[sides[0]]), axis=1)
        assert (largest[:, -1] >= 8 * largest[:, -2]).all()


def test_the_value_table_is_the_reference_s():
    codes = np.arange(256, dtype=np.uint8)
    want = np.where((codes & 0x7F) == 0x7F, 0, guard.e4m3_float64(codes))
    assert np.array_equal(np.array(families.value_table()), want)


@pytest.mark.gpu
def test_a_tile_of_32_rows_is_mma_sync(device):
    """On a GPU: the fallback that other bits come from is named, and would not pass for the scorer's instruction."""
    if device.value != "cuda":
        pytest.skip("needs an sm_90 GPU")
    tile = accumulation.tile_instruction(32, 64, 4, torch.device("cuda"), counted=False)
    report = audited(tile, device)
    assert all("mma.sync" in mnemonic for mnemonic in tile.mnemonics)
    assert report.instructions[0].fits == ("hmma_f16_pairs_of_4",)
    assert report.outcome == "counterexample"


def test_the_command(dosa, device, tmp_path, schema_errors, monkeypatch):
    for name in ("CPU_SIZES", "GPU_SIZES"):
        monkeypatch.setattr(accumulation, name, SMALL)
    plain = accumulation.audit_accumulation
    monkeypatch.setattr(
        accumulation, "audit_accumulation", lambda **options: plain(models=(CONTRACT, BY_NAME["hmma_f16"]), **options)
    )
    out = tmp_path / "record.json"
    code, text, _ = dosa("audit", "accumulation", "--device", device.value, "--out", out)
    assert code == 0
    assert "tl.dot" in text
    assert schema_errors(json.loads(out.read_text())) == []
    if device.value == "cpu":
        assert "not checked: the tensor cores" in text
    monkeypatch.setattr(accumulation, "machine_instructions", lambda _device: (follows(BY_NAME["wgmma_e4m3_nearest"]),))
    code, text, _ = dosa("audit", "accumulation", "--device", device.value)
    assert code == 1
    assert "no entry of the model table fits" in text


@pytest.mark.parametrize("verb", ["accumulation", "fp8", "scorer"])
def test_help_and_a_gpu_that_is_not_here(dosa, verb, monkeypatch):
    code, text, _ = dosa("audit", verb, "--help")
    assert code == 0
    assert f"dosa audit {verb}" in text.split("Example", 1)[1]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    peer = ("--peer", "ours") if verb == "scorer" else ()
    code, text, err = dosa("audit", verb, *peer, "--device", "cuda")
    assert (code, text) == (3, "")
    assert "GPU" in err
