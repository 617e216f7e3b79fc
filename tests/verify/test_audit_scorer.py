"""The scorer audit passes for our kernels, and finds and names every planted order of operations."""

import dataclasses
import json

import numpy as np
import pytest
import torch

from dosa_ref.scorer import fma_float32, fma_float32_array, scores_sm90
from dosa_verify.audit import scorer
from dosa_verify.audit.scorer import CONTRACT, First, HeadOrder, LaneSum, Peer, Scale, Sizes, Split

SMALL = Sizes(rows=4, keys=64, row_block=2, key_block=64, special=(6, 64), sample=(4, 64))


@pytest.fixture(scope="module")
def where(device):
    return torch.device(device.value)


def in_order(order):
    """A peer that computes right, in another order."""
    return Peer(name="planted", scores=lambda inputs: scorer.judge(inputs, order))


def compared(peer, where, heads=32):
    inputs = scorer.random_inputs(4, heads, 64, 7, where)
    return scorer._compare_all([peer], "random", inputs, SMALL)[0]


def test_our_kernels_have_the_judge_s_bits(device, schema_errors):
    sizes = dataclasses.replace(SMALL, row_block=4)
    report = scorer.audit_scorer(device=device.value, peers=scorer.ours(), sizes=sizes)
    assert report.outcome == "exact"
    assert {(found.num_heads, found.inputs) for found in report.comparisons} == {
        (heads, inputs) for heads in (32, 64) for inputs in ("random", "special values")
    }
    assert all(found.scores >= 256 for found in report.comparisons)
    assert schema_errors(report.to_json()) == []


@pytest.mark.parametrize(
    "order",
    [
        HeadOrder(even=First.FIRST_ALONE, odd=First.FIRST_ALONE),
        HeadOrder(odd=First.FIRST_ALONE),
        HeadOrder(even=First.NO_FUSION, odd=First.NO_FUSION),
        HeadOrder(descending=True),
        HeadOrder(split=Split.PARITY_THEN_LANE),
        HeadOrder(scale=Scale.TOTAL),
        HeadOrder(scale=Scale.CHAIN),
        HeadOrder(lanes=LaneSum.ACROSS),
        HeadOrder(lanes=LaneSum.RUNNING),
    ],
    ids=lambda order: order.describe(),
)
def test_another_order_is_found_and_named(order, where):
    found = compared(in_order(order), where)
    assert found.differences > 0
    assert found.first.peer["bits"] != found.first.judge["bits"]
    assert order.describe() in found.orders
    assert CONTRACT.describe() not in found.orders
    assert len(found.orders) <= 2
    assert found.sample == 256


def test_one_wrong_score_fits_no_order(where):
    def scores(inputs):
        right = scorer.judge(inputs).clone()
        right.view(torch.int32)[:, 9] ^= 1
        return right

    found = compared(Peer(name="one bit", scores=scores), where)
    assert found.differences == 4
    assert (found.first.row, found.first.key) == (0, 9)
    assert found.orders == ()


def test_a_lost_nan_is_found(where):
    peer = Peer(name="no NaN", scores=lambda inputs: scorer.judge(inputs).nan_to_num(nan=0.0))
    inputs = scorer.special_inputs(6, 32, 64, 7, where)
    found = scorer._compare_all([peer], "special values", inputs, dataclasses.replace(SMALL, row_block=6))[0]
    assert found.differences > 0
    assert found.first.judge["decimal"] == "nan"


def test_the_report_of_a_difference_has_its_schema(device, schema_errors):
    sizes = dataclasses.replace(SMALL, rows=2, keys=64, special=(5, 64), sample=(2, 64))
    report = scorer.audit_scorer(device=device.value, peers=[in_order(HeadOrder(descending=True))], sizes=sizes)
    assert report.outcome == "counterexample"
    assert schema_errors(report.to_json()) == []


@pytest.mark.parametrize("heads", [32, 64])
def test_the_judge_is_the_reference(heads, where):
    for inputs in (scorer.random_inputs(4, heads, 64, 1, where), scorer.special_inputs(6, heads, 64, 2, where)):
        arrays = [tensor.cpu().numpy() for tensor in (inputs.q, inputs.weights, inputs.k, inputs.k_scale)]
        want, got = scores_sm90(*arrays), scorer.judge(inputs).cpu().numpy()
        nan = np.isnan(want)
        assert np.array_equal(nan, np.isnan(got))
        assert np.array_equal(want[~nan].view(np.int32), got[~nan].view(np.int32))


def one_score(order, dots, weights, scale):
    """One score in an order, scalar by scalar."""
    heads = len(dots)
    relu = [dot if dot > 0 else np.float32(0) for dot in dots]
    v = []
    for lane in range(4):
        chains = []
        for parity, first in enumerate((order.even, order.odd)):
            inner = 2 * lane + parity if order.split is Split.LANE_THEN_PARITY else 4 * parity + lane
            chain = [8 * step + inner for step in range(heads // 8)]
            if order.descending:
                chain.reverse()
            if first is First.SECOND_ALONE:
                chain[:2] = chain[1::-1]
            total = relu[chain[0]] * weights[chain[0]]
            for head in chain[1:]:
                if first is First.NO_FUSION:
                    total = total + relu[head] * weights[head]
                else:
                    total = fma_float32(relu[head], weights[head], total)
            chains.append(total * scale if order.scale is Scale.CHAIN else total)
        both = chains[0] + chains[1]
        v.append(both * scale if order.scale is Scale.LANE else both)
    if order.lanes is LaneSum.NEIGHBOURS:
        total = (v[0] + v[1]) + (v[2] + v[3])
    elif order.lanes is LaneSum.ACROSS:
        total = (v[0] + v[2]) + (v[1] + v[3])
    else:
        total = ((v[0] + v[1]) + v[2]) + v[3]
    return total * scale if order.scale is Scale.TOTAL else total


@pytest.mark.parametrize("heads", [32, 64])
def test_every_order_is_computed_as_it_says(heads):
    random = np.random.Generator(np.random.PCG64(heads))
    dots, weights = (random.normal(0, 1, (2, heads)) * 2.0 ** random.integers(-6, 7, (2, heads))).astype(np.float32)
    scale = np.float32(1.7)
    tensors = (torch.from_numpy(dots).view(1, heads, 1), torch.from_numpy(weights).view(1, heads))
    seen = set()
    for order in list(scorer.orders())[:: 5 if heads == 32 else 29]:
        want = one_score(order, dots, weights, scale)
        got = scorer.combine(order, *tensors, torch.tensor([scale])).numpy()[0, 0]
        assert want.dtype == np.float32
        assert got.view(np.int32) == want.view(np.int32), order.describe()
        seen.add(got.tobytes())
    assert len(seen) > 2


def test_orders_are_different_words():
    every = list(scorer.orders())
    assert every[0] == CONTRACT
    assert len({order.describe() for order in every}) == len(every) == 324


def fused(x, y, z):
    return scorer.fused(*(torch.from_numpy(np.asarray(part, np.float32)) for part in (x, y, z))).numpy()


def test_the_fused_multiply_add_rounds_once():
    random = np.random.Generator(np.random.PCG64(4))
    bits = random.integers(0, 2**32, (3, 200_000), dtype=np.uint64).astype(np.uint32)
    # Near cancellations and half-way cases are where one rounding and two differ.
    bits[2, 100_000:] = (-(bits[0].view(np.float32) * bits[1].view(np.float32)))[100_000:].view(np.uint32)
    x, y, z = (part.view(np.float32) for part in bits)
    want, got = fma_float32_array(x, y, z), fused(x, y, z)
    nan = np.isnan(want)
    assert np.array_equal(nan, np.isnan(got))
    assert np.array_equal(want[~nan].view(np.int32), got[~nan].view(np.int32))


def test_the_fused_multiply_add_where_float64_is_half_way():
    """x y lies half-way between two float32 and z decides, too small for float64 to hold beside it."""
    one, half_up = np.float32(1 + 2**-12), np.float32(1 + 2**-12)
    product = float(one) * float(half_up)  # 1 + 2^-11 + 2^-24: half-way
    for tail in (2.0**-100, -(2.0**-100), 0.0):
        want = fma_float32(one, half_up, np.float32(tail))
        assert fused(one, half_up, tail).view(np.int32) == want.view(np.int32)
    assert fused(one, half_up, 2.0**-100) > np.float32(product) == fused(one, half_up, -(2.0**-100))
    edge = np.float32(2.0**127 * (2 - 2**-24) / 2**64)  # rounds up to 2^64 in float32: stay below
    for x, y, z in (
        (2.0**64, 2.0**64, -(2.0**103)),
        (2.0**64, 2.0**64, -(2.0**103) * 1.0000001),
        (2.0**64, float(edge), 0.0),
        (-(2.0**64), 2.0**64, 2.0**103),
    ):
        parts = [np.float32(part) for part in (x, y, z)]
        with np.errstate(over="ignore"):
            want = fma_float32(*parts)
        assert fused(*parts).view(np.int32) == want.view(np.int32)


def test_the_command(dosa, device, tmp_path, schema_errors, monkeypatch):
    monkeypatch.setattr(scorer, "CPU_SIZES", SMALL)
    monkeypatch.setattr(scorer, "GPU_SIZES", SMALL)
    out = tmp_path / "record.json"
    code, text, _ = dosa("audit", "scorer", "--peer", "ours", "--device", device.value, "--out", out, "--json")
    assert code == 0
    assert schema_errors(json.loads(text)) == []
    record = json.loads(out.read_text())
    assert schema_errors(record) == []
    assert record["audit"] == json.loads(text)


def test_the_command_fails_on_a_difference(dosa, device, monkeypatch):
    monkeypatch.setattr(scorer, "CPU_SIZES", SMALL)
    monkeypatch.setattr(scorer, "GPU_SIZES", SMALL)
    order = HeadOrder(even=First.FIRST_ALONE, odd=First.FIRST_ALONE)
    monkeypatch.setattr(scorer, "ours", lambda: (in_order(order),))
    code, text, _ = dosa("audit", "scorer", "--peer", "ours", "--device", device.value)
    assert code == 1
    assert order.describe() in text.replace("\n", " ")


def test_a_peer_that_is_not_here_is_undecided(dosa, monkeypatch):
    code, out, err = dosa("audit", "scorer", "--peer", "deep_gemm", "--device", "cpu")
    assert (code, out) == (3, "")
    assert "deep_gemm" in err
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(scorer.BackendUnavailable):
        scorer.deep_gemm()
