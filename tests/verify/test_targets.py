"""Adapters of other libraries, tried on stand-ins with their signatures: honest ones pass, faulty ones do not."""

import dataclasses
import types

import numpy as np
import pytest
import torch

from dosa_ref.scorer import scores_sm90
from dosa_ref.select import exact_topk
from dosa_ref.spec import PAD_INDEX, BackendUnavailable
from dosa_verify.fuzz import campaign, logits_runner, runner
from dosa_verify.fuzz.cases import FP8, Case, Special, Values, Windows
from dosa_verify.fuzz.logits import LogitsCase, Planted, RowWindows, Scores, build
from dosa_verify.fuzz.report import Fault
from dosa_verify.targets import libraries
from dosa_verify.targets import logits as targets
from dosa_verify.targets.dosa import Device


def best(row, topk):
    """The best of one row of a tensor, NaN last, as ``[topk]`` with a -1 tail."""
    return torch.from_numpy(exact_topk(torch.nan_to_num(row, nan=-torch.inf).numpy(), topk))


def top_k(values, k, sorted=False, deterministic=False, tie_break=0):  # noqa: A002
    """FlashInfer's form: every row has at least ``k`` columns."""
    assert tie_break == 1
    assert deterministic
    assert k <= values.shape[1]
    chosen = torch.stack([best(row, k) for row in values]) if len(values) else torch.empty(0, k)
    return values.gather(1, chosen.long()), chosen.long()


def top_k_ragged_transform(values, offsets, lengths, k, deterministic=False, tie_break=0):
    assert values.is_contiguous()
    out = torch.full((len(values), k), PAD_INDEX, dtype=torch.int32)
    for row, length in enumerate(lengths.tolist()):
        chosen = best(values[row, :length], k)
        out[row] = torch.where(chosen == PAD_INDEX, PAD_INDEX, chosen + offsets[row])
    return out


def fast_topk_v2(score, lengths, topk, row_starts=None):
    assert topk == 2048
    assert lengths.dtype == row_starts.dtype == torch.int32
    rows = [
        best(score[row, start : start + length], topk)
        for row, (start, length) in enumerate(zip(row_starts.tolist(), lengths.tolist(), strict=True))
    ]
    return torch.stack(rows) if rows else torch.empty(0, topk, dtype=torch.int32)


def top_k_per_row_prefill(logits, starts, ends, out, rows, stride0, stride1, topk):
    assert (rows, stride0, stride1) == (len(logits), *logits.stride())
    for row, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
        out[row] = best(logits[row, start:end], topk)


def tl_topk(values, starts, ends, topk):
    out = torch.zeros(len(values), topk, dtype=torch.int32)
    for row, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
        chosen = best(values[row, start:end], topk)
        out[row] = torch.where(chosen == PAD_INDEX, 0, chosen + start)
    return out


def fp8_mqa_logits(q, keys, weights, start, end, clean_logits=True):
    assert q.shape[1] in (32, 64)
    assert not clean_logits
    k, scale = keys
    assert all(tensor.is_contiguous() for tensor in (q, k, scale, weights))

    def array(tensor):
        return tensor.view(torch.uint8).numpy().view(FP8)

    scores = scores_sm90(array(q), weights.numpy(), array(k), scale.numpy())
    return torch.from_numpy(np.pad(scores, ((0, 0), (0, 256 - scores.shape[1] % 256)), constant_values=np.nan))


STAND_INS = {
    "flashinfer": types.SimpleNamespace(top_k=top_k, top_k_ragged_transform=top_k_ragged_transform),
    "sgl_kernel": types.SimpleNamespace(fast_topk_v2=fast_topk_v2),
    "vllm._custom_ops": types.SimpleNamespace(),
    "tilelang": types.SimpleNamespace(),
    "topk_selector": types.SimpleNamespace(tl_topk=tl_topk),
    "deep_gemm": types.SimpleNamespace(fp8_mqa_logits=fp8_mqa_logits),
}


@pytest.fixture
def stand_ins(monkeypatch):
    """Stand-ins in place of the libraries, on the CPU."""
    found = {name: types.SimpleNamespace(**vars(library)) for name, library in STAND_INS.items()}

    def library(module, device, name):
        return found[module]

    monkeypatch.setattr(libraries, "_library", library)
    operators = types.SimpleNamespace(top_k_per_row_prefill=top_k_per_row_prefill)
    monkeypatch.setattr(torch.ops, "_C", operators, raising=False)
    return found


def cases(topk):
    for windows in RowWindows:
        yield LogitsCase(seed=2, rows=6, columns=3 * topk, topk=topk, windows=windows, strided=True)
    for scores in (Scores.FEW_VALUES, Scores.SIGNED_ZERO, Scores.EQUAL_22):
        yield LogitsCase(seed=3, rows=2, columns=topk + 9, topk=topk, scores=scores)
    yield LogitsCase(seed=4, rows=2, columns=topk + 9, topk=topk, planted=(Planted.NAN, Planted.MINUS_INF))
    yield LogitsCase(seed=5, rows=0, columns=topk + 9, topk=topk)


ADAPTED = {name: 2048 if name == "sgl_kernel" else 7 for name in libraries.TOPK}


@pytest.mark.parametrize("name", ADAPTED)
def test_an_honest_library_keeps_its_promise(name, stand_ins):
    target = targets.make(name, Device.CPU)
    assert target.name == name
    for case in cases(ADAPTED[name]):
        assert logits_runner.check_logits(target, build(case)) is None, case


def shifted(plain):
    """Off by one: every index but the padding."""

    def call(*arguments, **named):
        answer = plain(*arguments, **named)
        if answer is None:  # vLLM's writes its output
            out = arguments[3]
            out[out != PAD_INDEX] += 1
        elif isinstance(answer, tuple):
            answer = (answer[0], answer[1] + 1)
        else:
            answer = torch.where(answer == PAD_INDEX, PAD_INDEX, answer + 1)
        return answer

    return call


@pytest.mark.parametrize("name", ["flashinfer", "flashinfer.ragged", "sgl_kernel", "vllm", "tilelang"])
def test_a_faulty_library_is_caught(name, stand_ins, monkeypatch):
    for library in (*stand_ins.values(), torch.ops._C):
        for function, plain in list(vars(library).items()):
            setattr(library, function, shifted(plain))
    target = targets.make(name, Device.CPU)
    found = [logits_runner.check_logits(target, build(case)) for case in cases(ADAPTED[name])]
    assert any(mismatch is not None for mismatch in found)


def test_signed_zeros_that_rank_apart_are_a_fault_and_can_be_waived(stand_ins):
    """FlashInfer compares bit patterns: -0.0 ranks below 0.0, though the two are equal."""

    def by_bits(values, k, **named):
        bits = values.view(torch.int32).long()
        key = torch.where(bits < 0, -(bits & 0x7FFFFFFF) - 1, bits)
        chosen = torch.stack([torch.from_numpy(exact_topk(row.numpy().astype(np.float64), k)) for row in key])
        return values.gather(1, chosen.long()), chosen.long()

    stand_ins["flashinfer"].top_k = by_bits
    problem = build(LogitsCase(seed=3, rows=2, columns=60, topk=7, scores=Scores.SIGNED_ZERO))
    mismatch = logits_runner.check_logits(targets.make("flashinfer", Device.CPU), problem)
    assert mismatch.fault is Fault.WRONG_SET
    assert mismatch.evidence["missing_score"]["decimal"] == "-0.0"
    waived = targets.make("flashinfer", Device.CPU, ("signed_zeros",))
    assert not waived.promise.signed_zeros
    assert logits_runner.check_logits(waived, problem) is None
    # What is waived is judged by, not passed over: an honest library now differs.
    stand_ins["flashinfer"].top_k = top_k
    honest = targets.make("flashinfer", Device.CPU, ("signed_zeros",))
    assert logits_runner.check_logits(honest, problem).fault is Fault.WRONG_SET


def test_vllm_without_the_operator_is_unavailable(stand_ins, monkeypatch):
    monkeypatch.setattr(torch.ops, "_C", types.SimpleNamespace())
    with pytest.raises(BackendUnavailable, match="top_k_per_row_prefill"):
        targets.make("vllm", Device.CPU)


SCORED = [
    Case(seed=1, rows=3, keys=90, topk=6, values=Values.FEW_KEYS, windows=Windows.RAGGED, num_heads=20),
    Case(seed=2, rows=6, keys=40, topk=6, windows=Windows.SHORT, strided=True),
    Case(seed=3, rows=2, keys=60, topk=6, specials=(Special.NAN_SCALE,)),
    Case(seed=4, rows=2, keys=60, topk=6, windows=Windows.INVERTED),
    Case(seed=5, rows=0, keys=60, topk=6),
    Case(seed=6, rows=2, keys=0, topk=6),
]


@pytest.mark.parametrize("topk", ["torch.topk", "flashinfer", "vllm"])
def test_a_scorer_and_a_top_k_kernel_together(topk, stand_ins):
    target = campaign.make(f"deep_gemm+{topk}", Device.CPU)
    assert target.name == f"deep_gemm+{topk}"
    for case in SCORED:
        assert runner.check_case(target, case) is None, case


def test_a_scorer_with_other_scores_is_caught(stand_ins):
    stand_ins["deep_gemm"].fp8_mqa_logits = lambda *arguments, **named: -fp8_mqa_logits(*arguments, **named)
    target = campaign.make("deep_gemm+torch.topk", Device.CPU)
    assert runner.check_case(target, SCORED[0]).fault is Fault.WRONG_SET


def test_our_kernel_on_the_scorers_logits_has_properties_too(stand_ins, device):
    target = campaign.make("deep_gemm+topk", device)
    tally = runner.Tally()
    case = dataclasses.replace(SCORED[0], rows=2, keys=30, seed=5)
    assert runner.check_case(target, case, tally) is None
    assert any(name.startswith("property.") for name in tally.features)


@pytest.mark.parametrize("name", ["vllm", "tilelang", "flashinfer.ragged", "deep_gemm+torch.topk"])
def test_gpu_libraries_say_that_they_need_a_gpu(name, dosa):
    code, _, err = dosa("fuzz", name)
    assert code == 3
    assert "GPU" in err


def test_an_unknown_top_k_kernel_behind_the_scorer(dosa):
    assert dosa("fuzz", "deep_gemm+nobody")[0] == 2
