"""The benchmark judges before it times, writes what it measured, and its page says what the files say."""

import concurrent.futures
import contextlib
import dataclasses
import functools
import importlib.util
import inspect
import json
import math
import random
import sys
import types
from pathlib import Path

import pytest
import torch

import dosa_verify
from dosa_gpu.plan import Path as SelectPath
from dosa_ref.spec import BackendUnavailable, InvalidProblem, Mode, Outcome
from dosa_verify.bench import cells, contestants, indexer, inputs, judge, page, prefill, timing
from dosa_verify.bench.cells import CellResult, LayerResult, Spread

TOPK = 16
ONCE = timing.Effort(runs=1, long_runs=1, stage_runs=1)


class Ticks:
    """A meter whose clock moves by what the calls cost, and by nothing else."""

    def __init__(self):
        self.now, self.log = 0.0, []

    def spend(self, name, cost):
        self.log.append(name)
        self.now += cost

    def mark(self):
        return self.now

    def ms(self, start, end):
        return max(end - start, 0.001)

    def cool(self):
        self.log.append("cool")

    def start_memory(self):
        pass

    def peak_bytes(self):
        return 1024


@pytest.fixture
def pool(monkeypatch):
    """One thread in place of a process per core."""
    with concurrent.futures.ThreadPoolExecutor(1) as one:
        monkeypatch.setattr(prefill, "process_pool", lambda: contextlib.nullcontext(one))
        yield one


@pytest.fixture(scope="module")
def small(device):
    return inputs.synthetic(num_heads=32, num_keys=160, num_queries=4, seed=3, device=device)


def library(change=lambda logits: logits):
    """A stand-in for DeepGEMM: our scores, its way of calling."""

    def fp8_mqa_logits(q, keys, weights, ks, ke, clean_logits):
        k, scale = keys
        part = inputs.Inputs(domain="", layer=0, q=q, k=k, k_scale=scale, weights=weights, ks=ks, ke=ke)
        logits = contestants.our_logits(part, 0)
        column = torch.arange(len(k), device=q.device)
        hidden = (column < ks[:, None]) | (column >= ke[:, None])
        return change(logits.masked_fill(hidden, -torch.inf) if clean_logits else logits)

    return types.SimpleNamespace(fp8_mqa_logits=fp8_mqa_logits)


def options(who, **changes):
    settings = {
        "num_keys": [128, 160], "num_queries": [1, 2], "contestants": who, "topk": TOPK, "scope": prefill.SELECTION,
        "seed": 0, "reference_rows": 1, "effort": ONCE,
    }  # fmt: skip
    return prefill.Options(**{**settings, **changes})


@functools.cache
def first_line():
    return prefill.run_record(options([]), "synthetic", {"deep_gemm": "0.1.5"}, None, "0123456789abcdef")


def record(calibration):
    spread = None if calibration is None else {"median": calibration, "p10": calibration, "p90": calibration}
    return {**first_line(), "calibration_ms": spread}


def run(small, chosen, out=None, source=None):
    lines = []
    first = record(None)
    results = prefill.run(
        [small] if source is None else source, chosen, first=first, out=out, meter=Ticks(), clocks=timing.Clocks(),
        on_cell=lines.append,
    )  # fmt: skip
    return results, lines


# Timing


def test_contestants_take_turns_on_a_cold_cache():
    meter = Ticks()
    calls = {"a": functools.partial(meter.spend, "a", 1.0), "b": functools.partial(meter.spend, "b", 2.0)}
    times = timing.alternate(calls, meter, timing.Effort(runs=3, long_runs=2, long_ms=10))
    assert meter.log == ["cool", "a", "cool", "b"] * 3
    assert {name: timed.ms for name, timed in times.items()} == {"a": [1.0] * 3, "b": [2.0] * 3}
    assert {timed.peak_bytes for timed in times.values()} == {1024}


def test_long_calls_are_timed_less_often():
    meter = Ticks()
    calls = {"short": functools.partial(meter.spend, "s", 10.0), "long": functools.partial(meter.spend, "l", 10.5)}
    times = timing.alternate(calls, meter, timing.Effort(runs=20, long_runs=7, long_ms=10))
    assert (len(times["short"].ms), len(times["long"].ms)) == (20, 7)


def test_spread_is_the_median_and_two_percentiles():
    times = [float(x) for x in range(1, 12)]
    random.Random(0).shuffle(times)
    assert timing.spread(times) == Spread(median=6.0, p10=2.0, p90=10.0)


def test_stages_of_one_name_add_up_and_the_median_counts():
    meter, costs = Ticks(), iter([1.0, 5.0, 9.0])

    def call(on_stage):
        cost = next(costs)
        on_stage("bound")
        meter.spend("bound", cost)
        on_stage("emit")
        meter.spend("emit", 2.0)
        on_stage("bound")
        meter.spend("bound", cost)

    assert timing.stage_times(call, meter, 3) == {"bound": 10.0, "emit": 2.0}


def test_clocks_are_those_of_the_timed_span(monkeypatch):
    moments = iter([1.0, 2.0, 3.0])
    monkeypatch.setattr(timing.time, "monotonic", lambda: next(moments))
    clocks = timing.Clocks()
    assert clocks.since(0.0) is None
    clocks.read(iter(["345\n", "[N/A]\n", "1980\n", "1970\n"]))
    assert clocks.since(1.5) == 1975
    # A span shorter than the sampling takes the last sample.
    assert clocks.since(9.0) == 1970


# Inputs


def test_a_suffix_keeps_the_visible_keys(small):
    part = small.suffix(128, 2)
    assert torch.equal(part.k.view(torch.uint8), small.k.view(torch.uint8)[32:])
    assert torch.equal(part.q.view(torch.uint8), small.q.view(torch.uint8)[2:])
    assert part.ke.tolist() == [127, 128]
    assert part.ks.tolist() == [0, 0]
    moved = dataclasses.replace(small, ks=torch.full_like(small.ks, 40)).suffix(128, 2)
    assert moved.ks.tolist() == [8, 8]
    for keys, queries in ((161, 2), (128, 5)):
        with pytest.raises(InvalidProblem, match="at most"):
            small.suffix(keys, queries)


def test_trace_files_keep_their_bits(trace, device):
    from dosa_ref.trace import load_trace

    [found] = inputs.from_files([trace], device)
    problem = load_trace(trace).problem
    assert found.q.cpu().view(torch.uint8).numpy().tobytes() == problem.q.tobytes()
    assert found.weights.cpu().numpy().tobytes() == problem.weights.tobytes()
    assert (found.domain, found.layer, found.num_heads) == ("trace", 0, problem.num_heads)


def test_learned_inputs_are_what_the_traces_hold(small, monkeypatch, device):
    """The longest length of every trace, with a stand-in of the same signature for the maker."""
    from dosa_verify.traces import make as maker
    from dosa_verify.traces import model

    signature, asked = inspect.signature(maker.make), {}

    def make(*arguments, **options):
        asked.update(signature.bind(*arguments, **options).arguments)
        tensors = (small.q, small.k, small.k_scale, small.weights, small.ks, small.ke)
        yield maker.TraceTensors("zh_layer12_h32_160", *tensors, {"domain": "zh", "layer": "12"})

    monkeypatch.setattr(maker, "make", make)
    monkeypatch.setattr(model, "load_pack", lambda files, where: (files, where))
    sizes = {"domains": ["zh"], "layers": [12], "num_heads": [32], "num_keys": 160, "num_queries": 4, "seed": 7}
    [found] = inputs.learned([Path("a"), Path("b")], **sizes, device=device)
    assert (found.domain, found.layer) == ("zh", 12)
    assert found.q is small.q
    assert found.ke is small.ke
    assert asked["pack"] == ([Path("a"), Path("b")], torch.device(device.value))
    assert (asked["domain"], asked["num_keys"], asked["seed"]) == (["zh"], 160, 7)


# Judging


def test_every_contestant_is_judged_before_it_is_timed(small, pool, tmp_path, schema_errors):
    peer = contestants.deep_gemm_with(library(), "torch.topk", contestants.torch_topk)
    out = tmp_path / "bench.jsonl"
    results, lines = run(small, options([contestants.ours(SelectPath.DENSE), peer]), out)
    assert len(lines) == 4
    assert len(results) == 8
    assert not prefill.has_fault(results)
    assert all(one.equal_to_reference for one in results)
    assert {part.reference_rows for one in results for part in one.by_layer} == {1}
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert [schema_errors(record) for record in records] == [[]] * 9
    runs, again = cells.read([out])
    assert again == results
    assert runs[0]["inputs"] == "synthetic"
    dense = results[0].by_layer[0]
    assert (dense.taken, dense.rows_checked, dense.workspace_bytes, set(dense.stages_ms)) == (
        "dense",
        1,
        1024,
        {"dense"},
    )


def test_the_pruned_path_reports_what_it_did(small, pool):
    # All keys but a few are near the common direction: the smallest problem that the bound pass takes.
    [one], _ = run(small, options([contestants.ours(SelectPath.DOSA, Mode.BOTH)], num_keys=[160], num_queries=[1]))
    assert (one.path, one.mode, one.contestant) == ("dosa", "both", "dosa.both")
    assert one.by_layer[0].outcome == "exact"
    assert one.by_layer[0].survivors is not None
    assert "bound" in one.by_layer[0].stages_ms


def altered(change):
    """Our dense path with a result changed by a function of indices and scores."""
    dense = contestants.ours(SelectPath.DENSE)

    def call(small, topk, on_stage):
        answer = dense.call(small, topk, on_stage)
        [(indices, scores)] = answer.pieces
        change(indices, scores)
        return answer

    return dataclasses.replace(dense, path="auto", call=call)


def other_key(indices, scores):
    row = set(indices[1].tolist())
    indices[1, -1] = next(key for key in range(128) if key not in row)


def other_bit(indices, scores):
    scores.view(torch.int32)[0, 3] ^= 1


@pytest.mark.parametrize("change", [other_key, other_bit])
def test_a_changed_index_or_bit_is_a_fault(small, pool, change):
    results, _ = run(small, options([altered(change)], num_keys=[128], num_queries=[2]))
    assert prefill.has_fault(results)
    assert (results[0].by_layer[0].outcome, results[0].by_layer[0].differing_rows) == ("wrong_set", 1)


def test_a_dense_path_that_is_not_the_reference_is_a_fault(small, pool, monkeypatch):
    monkeypatch.setattr(judge, "ours", lambda _: altered(other_bit))
    chosen = options([altered(other_bit)], num_keys=[128], num_queries=[2], reference_rows=2)
    results, _ = run(small, chosen)
    assert results[0].by_layer[0].differing_rows == 0
    assert prefill.has_fault(results)


def test_the_reference_shares_scores_between_lengths(small, pool):
    whole = judge.Reference(small, [0, 2], pool)
    length = small.suffix(128, 4)
    [(indices, scores)] = contestants.ours(SelectPath.DENSE).call(length, TOPK, None).pieces
    assert whole.wrong_rows(length, indices, scores) == 0
    indices[1, 0] = 127 if int(indices[1, 0]) != 127 else 126
    assert whole.wrong_rows(length, indices, scores) == 1


def test_the_reference_in_processes_is_the_reference(small, pool, monkeypatch):
    alone = judge.Reference(small, [0], pool)
    monkeypatch.setattr(judge, "KEYS_PER_TASK", 96)
    monkeypatch.setattr(judge.os, "cpu_count", lambda: 1)
    with judge.process_pool() as processes:
        assert judge.Reference(small, [0], processes).scores.tobytes() == alone.scores.tobytes()


def answer_of_a_peer(indices, scores):
    return contestants.Answer(pieces=[(torch.tensor(indices), torch.tensor(scores))])


def test_a_peer_may_settle_ties_otherwise_but_not_select_less():
    indices, scores = torch.tensor([[1, 4, -1]], dtype=torch.int32), torch.tensor([[2.0, 0.0, -torch.inf]])
    logits = torch.tensor([[-3.0, 2.0, -3.0, -1.0, 0.0, -0.0, -3.0, -3.0, -3.0, -3.0]])

    def verdict(index, score):
        answer = answer_of_a_peer(index, score)
        return judge.compare(answer, indices, scores, lambda rows, keys: logits[rows].gather(1, keys.long()))

    # In any order; behind the last visible key it lists keys whose logit is -Inf.
    assert verdict([[4, 7, 1]], [[0.0, -torch.inf, 2.0]]) == (Outcome.EXACT, 0)
    assert verdict([[1, 9, 5]], [[2.0, -torch.inf, -0.0]]) == (Outcome.TIE_EQUIVALENT, 1)
    assert verdict([[1, 5, 3]], [[2.0, -torch.inf, -1.0]]) == (Outcome.WRONG_SET, 1)
    # What it says of the scores does not help.
    assert verdict([[1, 9, 3]], [[2.0, -torch.inf, 0.0]]) == (Outcome.WRONG_SET, 1)
    # Twice the same key.
    logits[0, 4] = 2.0
    scores[0, 1] = 2.0
    assert verdict([[1, 1, 9]], [[2.0, 2.0, -torch.inf]]) == (Outcome.WRONG_SET, 1)
    with pytest.raises(InvalidProblem, match="answer"):
        verdict([[1, 4]], [[2.0, 0.0]])
    with pytest.raises(InvalidProblem, match="answer: got 0 rows"):
        judge.compare(contestants.Answer(pieces=[]), indices, scores, None)


def test_a_wrong_peer_is_a_fault_and_a_tie_is_not(small, pool):
    def shifted(logits):
        return logits.roll(1, dims=1)

    peer = contestants.deep_gemm_with(library(shifted), "torch.topk", contestants.torch_topk)
    results, _ = run(small, options([peer], num_keys=[128], num_queries=[2]))
    assert prefill.has_fault(results)
    tie = [dataclasses.replace(part, outcome="tie_equivalent") for part in results[0].by_layer]
    assert not prefill.has_fault([dataclasses.replace(results[0], by_layer=tuple(tie))])
    assert prefill.has_fault([dataclasses.replace(results[0], by_layer=tuple(tie), peer=None, path="auto")])


def test_logits_come_in_pieces(small, monkeypatch):
    monkeypatch.setattr(contestants, "LOGITS_BYTES", 3 * 4 * 128)
    peer = contestants.deep_gemm_with(library(), "torch.topk", contestants.torch_topk)
    cell = small.suffix(128, 4)
    answer = peer.call(cell, TOPK, None)
    assert [len(index) for index, _ in answer.pieces] == [3, 1]
    [(indices, scores)] = contestants.ours(SelectPath.DENSE).call(cell, TOPK, None).pieces
    assert judge.compare(answer, indices, scores, None) == (Outcome.EXACT, 0)


def test_scorers_are_compared_bit_by_bit(small, pool, monkeypatch):
    def one_bit(logits):
        logits.view(torch.int32)[1, 5] ^= 1
        return logits

    for change, outcome in ((lambda logits: logits, "exact"), (one_bit, "wrong_set")):
        monkeypatch.setitem(sys.modules, "deep_gemm", library(change))
        who, _ = prefill.contestants([], [], True, prefill.SCORES)
        results, _ = run(small, options(who, scope=prefill.SCORES, num_keys=[128], num_queries=[2]))
        assert [(one.contestant, one.by_layer[0].outcome) for one in results] == [
            ("score", outcome),
            ("deep_gemm", outcome),
        ]
        assert prefill.has_fault(results) == (outcome != "exact")


def test_data_independent_contestants_are_timed_once(small, pool, tmp_path):
    calls = []
    fake = contestants.Contestant(path="auto", mode=None, peer=None, data_independent=False, call=None)
    dense = contestants.ours(SelectPath.DENSE)
    fake = dataclasses.replace(fake, call=lambda *rest: calls.append(1) or dense.call(*rest))
    out = tmp_path / "bench.jsonl"
    source = [small, dataclasses.replace(small, layer=6), dataclasses.replace(small, domain="en")]
    chosen = options([fake, dense], num_keys=[128], num_queries=[1], effort=dataclasses.replace(ONCE, stage_runs=0))
    results, lines = run(small, chosen, out, source)
    assert [(one.contestant, one.domain, one.layers) for one in results] == [
        ("auto", "synthetic", (0, 6)),
        ("dense", "synthetic", (0,)),
        ("auto", "en", (0,)),
    ]
    assert len(lines) == 3
    assert cells.read([out])[1] == results
    assert [json.loads(line).get("layers") for line in out.read_text().splitlines()] == [None, [0, 6], [0], [0]]


def test_an_interrupted_run_leaves_what_it_had(small, pool, tmp_path):
    def source():
        yield small
        raise KeyboardInterrupt

    out = tmp_path / "bench.jsonl"
    chosen = options([contestants.ours(SelectPath.DENSE)], num_keys=[128], num_queries=[1])
    with pytest.raises(KeyboardInterrupt):
        run(small, chosen, out, source())
    _, found = cells.read([out])
    assert [one.layers for one in found] == [(0,)]


def test_the_complete_indexer_prepares_before_it_selects(small, pool, monkeypatch):
    tiny = indexer.Sizes(model="tiny", hidden=32, q_rank=16)
    monkeypatch.setitem(indexer.MODELS, 32, tiny)
    chosen = options([contestants.ours(SelectPath.DENSE)], scope=prefill.COMPLETE, num_keys=[128], num_queries=[1])
    [one], _ = run(small, chosen)
    assert list(one.by_layer[0].stages_ms) == ["projections", "dense"]
    assert one.scope == "complete"


def test_the_preparation_is_that_of_an_indexer(device):
    tiny = indexer.Sizes(model="tiny", hidden=32, q_rank=16)
    made = indexer.Preparation(32, 5, torch.device(device.value), seed=1, sizes=tiny)
    q, k, k_scale, weights = made()
    assert (q.shape, k.shape, k_scale.shape, weights.shape) == ((5, 32, 128), (5, 128), (5,), (5, 32))
    assert q.dtype == k.dtype == torch.float8_e4m3fn
    assert torch.equal(torch.exp2(torch.log2(k_scale).round()), k_scale)
    # LayerNorm, RoPE and Hadamard keep the length of a key, up to rounding.
    length = (k.float() * k_scale[:, None]).norm(dim=1)
    assert torch.allclose(length, torch.full_like(length, math.sqrt(128)), rtol=0.05)
    with pytest.raises(InvalidProblem, match="num_heads"):
        indexer.Preparation(48, 5, torch.device(device.value), seed=1)


def test_peers_that_cannot_be_had_are_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "deep_gemm", None)
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    found, versions = contestants.peers()
    assert found == []
    assert set(versions) == {"deep_gemm", "flashinfer"}
    assert all(version.startswith(("not installed", "cannot be imported")) for version in versions.values())
    with pytest.raises(BackendUnavailable, match="DeepGEMM"):
        contestants.scorers()


def test_peers_are_the_scorer_with_each_top_k(small, monkeypatch):
    def top_k(logits, topk, deterministic, tie_break):
        assert (deterministic, tie_break) == (True, 1)
        return torch.topk(logits, topk)

    monkeypatch.setitem(sys.modules, "deep_gemm", library())
    monkeypatch.setitem(sys.modules, "flashinfer", types.SimpleNamespace(top_k=top_k))
    found, versions = contestants.peers()
    assert [one.name for one in found] == ["deep_gemm+torch.topk", "deep_gemm+flashinfer"]
    assert set(versions.values()) == {"unknown version"}
    cell = small.suffix(128, 2)
    [(indices, scores)] = contestants.ours(SelectPath.DENSE).call(cell, TOPK, None).pieces
    for one in found:
        assert judge.compare(one.call(cell, TOPK, None), indices, scores, None) == (Outcome.EXACT, 0)


# Records


def part(layer=0, median=2.0, **changes):
    fields = {
        "layer": layer, "ms": Spread(median=median, p10=0.9 * median, p90=1.2 * median), "runs": 20, "taken": "dosa",
        "prune_rate": 0.97, "survivors": {"p50": 9, "p99": 20, "max": 30}, "fallback": {"short_row": 2},
        "workspace_bytes": 2**20, "stated_workspace_bytes": 2**19, "outcome": "exact", "rows_checked": 4096,
        "differing_rows": 0, "reference_rows": 4, "stages_ms": {"bound": 1.5, "emit": 0.5}, "sm_clock_mhz": 1980,
    }  # fmt: skip
    return LayerResult(**{**fields, **changes})


def cell(contestant="auto", domain="en", heads=64, keys=2**20, queries=16384, by_layer=None, scope="selection"):
    path, _, mode = contestant.partition(".")
    is_peer = contestant.startswith("deep_gemm")
    return CellResult(
        domain=domain, num_heads=heads, num_keys=keys, num_queries=queries, topk=2048,
        path=None if is_peer else path, mode=(mode or None) if not is_peer else None,
        peer=contestant if is_peer else None, scope=scope, data_independent=is_peer or contestant == "dense",
        by_layer=by_layer or tuple(part(layer) for layer in cells.LAYERS),
    )  # fmt: skip


def test_layers_are_averaged_and_joined(schema_errors):
    second = part(0, 2.0, prune_rate=0.91, workspace_bytes=2**22)
    joined = cells.merge([cell(by_layer=(part(6, 4.0),)), cell("dense"), cell(by_layer=(second,))])
    assert [(one.contestant, one.layers) for one in joined] == [("auto", (0, 6)), ("dense", cells.LAYERS)]
    record = joined[0].to_json()
    assert schema_errors(record) == []
    assert record["ms"] == {"median": 3.0, "p10": 2.7, "p90": 3.6}
    assert (record["prune_rate"], record["workspace_bytes"]) == (0.94, 2**22)
    assert (record["fallback_rows"], record["equal_to_reference"], record["runs"]) == (4, True, 20)
    assert cells.from_json(json.loads(cells.line(record))) == joined[0]
    with pytest.raises(InvalidProblem, match="twice"):
        cells.merge([cell(), cell()])


def test_means_that_do_not_follow_are_refused():
    record = cell().to_json()
    for field, value in (("prune_rate", 0.99), ("equal_to_reference", False), ("runs", 21), ("extra", 1)):
        with pytest.raises(InvalidProblem, match="follow"):
            cells.from_json({**record, field: value})
    with pytest.raises(InvalidProblem, match="line"):
        cells.from_json({**record, "by_layer": [{"layer": 0}]})


@pytest.mark.parametrize(("text", "size"), [("4096", 4096), ("128K", 131072), ("1M", 1048576), ("24k", 24576)])
def test_sizes(text, size):
    assert cells.parse_size(text) == size
    assert cells.parse_size(cells.format_size(size)) == size


@pytest.mark.parametrize("text", ["", "K", "-1", "0", "1.5K", "1G", "٣", "9" * 30])
def test_bad_sizes(text):
    with pytest.raises(InvalidProblem, match="size"):
        cells.parse_size(text)


def test_growth_is_the_exponent():
    assert cells.growth([(2, 3.0), (4, 12.0), (8, 48.0)]) == pytest.approx(2.0)
    assert cells.growth([(2, 3.0), (2, 4.0)]) is None


# Page


def all_cells(ours=2.0, peer=9.0):
    for heads in cells.NUM_HEADS:
        for keys in cells.NUM_KEYS:
            for queries in cells.NUM_QUERIES:
                scale = keys / 2**20 * queries / 16384
                yield cell("deep_gemm+torch.topk", "en", heads, keys, queries, (part(0, peer * scale, taken=None),))
                yield cell("dense", "en", heads, keys, queries, (part(0, 1.1 * peer * scale, taken="dense"),))
                for domain in cells.DOMAINS:
                    layers = tuple(part(layer, ours * scale) for layer in cells.LAYERS)
                    yield cell("auto", domain, heads, keys, queries, layers)
                    slower = tuple(part(layer, 1.5 * ours * scale) for layer in cells.LAYERS)
                    yield cell("litetopk", domain, heads, keys, queries, slower)
        for mode, factor in (("both", 1.0), ("prune", 1.3), ("emit", 1.4), ("base", 2.0)):
            yield cell(f"dosa.{mode}", "en", heads, by_layer=(part(0, factor * ours),))
        yield cell("score", "en", heads, by_layer=(part(0, 1.04),), scope="scores")
        yield cell("deep_gemm", "en", heads, by_layer=(part(0, 1.0),), scope="scores")


def verdicts(found):
    return {claim.text: claim.holds for claim in page.claims(page.Results(found))}


def test_every_line_of_the_issue_can_be_shown():
    found = verdicts(list(all_cells()))
    assert len(found) == 11
    assert set(found.values()) == {True}


def slower(found, wanted, factor):
    """The same cells, some of them slower."""
    for one in found:
        if wanted(one):
            by_layer = tuple(
                dataclasses.replace(
                    part, ms=Spread(**{n: factor * getattr(part.ms, n) for n in ("median", "p10", "p90")})
                )
                for part in one.by_layer
            )
            one = dataclasses.replace(one, by_layer=by_layer)
        yield one


@pytest.mark.parametrize(
    ("words", "change"),
    [
        ("No cell more than 3 %", lambda one: (one.contestant, one.domain, one.num_keys) == ("auto", "zh", 131072)),
        ("Geometric mean", lambda one: one.contestant == "auto"),
        ("2.4x for H = 64", lambda one: (one.contestant, one.num_heads, one.num_queries) == ("auto", 64, 4096)),
        ("2.0x for H = 32", lambda one: (one.contestant, one.num_heads) == ("auto", 32)),
        ("`both` beats `prune`", lambda one: one.contestant == "dosa.both"),
        ("1.90x", lambda one: one.contestant == "dosa.both"),
        ("`litetopk` faster", lambda one: (one.contestant, one.domain) == ("litetopk", "code")),
        ("`dosa` faster", lambda one: one.contestant == "dosa.both"),
        ("1.05x DeepGEMM", lambda one: one.contestant == "score"),
    ],
)
def test_a_line_that_fails_says_so(words, change):
    found = verdicts(list(slower(all_cells(), change, 5.0)))
    assert [holds for text, holds in found.items() if words in text] == [False]


def test_wrong_results_and_memory_are_lines_too():
    wrong = [cell(by_layer=(part(outcome="wrong_set", differing_rows=1), part(6, workspace_bytes=2**31 + 1)))]
    found = verdicts(wrong)
    assert [found[text] for text in found if "equal to the dense path" in text or "2 GiB" in text] == [False, False]
    unchecked = verdicts([cell(by_layer=(part(reference_rows=3),))])
    assert [unchecked[text] for text in unchecked if "equal to the dense path" in text] == [False]


def test_a_part_of_the_cells_shows_nothing():
    found = verdicts([one for one in all_cells() if one.num_keys > 131072])
    assert found["No cell more than 3 % slower than the best peer (automatic path)"] is None
    assert found["Geometric mean at least 1.8x over all cells"] is None
    # Other inputs than texts count for no line.
    synthetic = [dataclasses.replace(one, domain="synthetic") for one in all_cells() if one.domain == "en"]
    assert verdicts(synthetic)["Geometric mean at least 1.8x over all cells"] is None
    assert set(verdicts([]).values()) == {None}


def test_late_layers_are_averaged_alone():
    layers = (part(0, 100.0), *(part(layer, 2.0) for layer in (6, 12, 17)))
    found = [cell(by_layer=layers), cell("deep_gemm+torch.topk", by_layer=(part(0, 9.0),))]
    [(_, ratio)] = page.Results(found).speedups(layers=page.LATE_LAYERS)
    assert ratio == pytest.approx(4.5)
    assert page.Results([cell(by_layer=layers[:2]), found[1]]).speedups(layers=page.LATE_LAYERS) == []


def test_the_best_peer_is_the_fastest():
    found = [
        cell("deep_gemm+torch.topk", by_layer=(part(0, 9.0),)),
        cell("deep_gemm+flashinfer", by_layer=(part(0, 8.0),)),
    ]
    assert page.Results(found).best_peer("selection", (64, 2**20, 16384)).peer == "deep_gemm+flashinfer"


def test_files_are_stitched_only_with_equal_calibration():
    assert page.calibration_spread([record(None)]) is None
    assert page.calibration_spread([record(10.0), record(10.2)]) == pytest.approx(0.02)
    with pytest.raises(InvalidProblem, match="apart"):
        page.calibration_spread([record(10.0), record(10.4)])
    with pytest.raises(InvalidProblem, match="without a calibration"):
        page.calibration_spread([record(10.0), record(None)])


def file_of(path, found, calibration=10.0):
    lines = [record(calibration), *(one.to_json() for one in found)]
    path.write_text("".join(cells.line(line) for line in lines))
    return path


def test_the_page_follows_the_files(tmp_path):
    found = list(all_cells())
    files = [file_of(tmp_path / "a.jsonl", found[::2]), file_of(tmp_path / "b.jsonl", found[1::2], 10.1)]
    runs, merged = cells.read(files)
    text = page.render(runs, page.Results(merged), files, "evidence", "docs/performance.md")
    assert "1.0 % apart" in text
    assert "| Geometric mean at least 1.8x over all cells | shown | 4.50x |" in text
    assert "| auto | 32 | 1.00 | 16K | 1.00 | 1M |" in text
    assert "bound 1.50, emit 0.50" in text
    slow = list(slower(merged, lambda one: one.contestant == "auto", 3.0))
    text = page.render(runs, page.Results(slow), files, "evidence", "docs/performance.md")
    assert "| Geometric mean at least 1.8x over all cells | **not met** | 1.50x |" in text


@pytest.mark.parametrize("scope", [None, "scores"])
def test_pictures(tmp_path, scope):
    results = page.Results([one for one in all_cells() if scope in (None, one.scope)])
    drawn = {}
    for name, draw in (("speedup", page.draw_speedup), ("time", page.draw_time), ("stages", page.draw_stages)):
        file = tmp_path / f"{name}.svg"
        if importlib.util.find_spec("matplotlib") is None:
            with pytest.raises(BackendUnavailable, match="matplotlib"):
                draw(results, file)
            continue
        draw(results, file)
        drawn[name] = file.read_text()
        draw(results, file)
        assert file.read_text() == drawn[name]
        assert drawn[name].startswith("<?xml")


def test_foreign_files_are_refused(tmp_path):
    for text in ("", "{}\n", "not json\n", cells.line(cell().to_json())):
        file = tmp_path / "f.jsonl"
        file.write_text(text)
        with pytest.raises(InvalidProblem, match="file"):
            cells.read([file])


DOCS = Path(dosa_verify.__file__).resolve().parent.parent / "docs"


@pytest.mark.skipif(not (DOCS / "performance.md").exists(), reason="no recorded run yet")
def test_the_committed_page_is_up_to_date(schema_errors):
    text = (DOCS / "performance.md").read_text(encoding="utf-8")
    names = text.split("dosa bench page ", 1)[1].split(" --out ", 1)[0].split()
    files = [Path(name) for name in names]
    runs, found = cells.read([DOCS.parent / name for name in names])
    assert page.render(runs, page.Results(found), files, "evidence", "docs/performance.md") == text
    assert [schema_errors(line) for line in (*runs, *(one.to_json() for one in found))] == [[]] * (
        len(runs) + len(found)
    )


# Command line


def test_without_a_gpu_the_benchmark_exits_3(dosa, tmp_path, monkeypatch):
    from dosa_verify.bench import cli

    monkeypatch.setattr(cli, "cuda_is_available", lambda: False)
    out = tmp_path / "bench.jsonl"
    code, text, err = dosa("bench", "prefill", "--synthetic", "--out", out)
    assert (code, text) == (3, "")
    assert "no" in err
    assert not out.exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "--synthetic"),
        (["--synthetic", "--keys", "1G"], "--keys"),
        (["--synthetic", "--keys", ","], "--keys"),
        (["--synthetic", "--keys", "2K", "--queries", "4K"], "--queries"),
        (["--synthetic", "--paths", "fast"], "--paths"),
        (["--synthetic", "--modes", "all"], "--modes"),
        (["--synthetic", "--out", "/nowhere/at/all.jsonl"], "--out"),
    ],
)
def test_bad_usage(dosa, arguments, words):
    code, out, err = dosa("bench", "prefill", *arguments)
    assert (code, out) == (2, "")
    assert words in err


def test_the_command_checks_times_and_writes(dosa, pool, tmp_path, monkeypatch, device):
    """The whole command with a stand-in for the GPU's clock."""
    from dosa_verify.bench import cli

    monkeypatch.setattr(cli, "cuda_is_available", lambda: True)
    monkeypatch.setattr(cli, "Device", types.SimpleNamespace(CUDA=device))
    monkeypatch.setattr(timing, "CudaMeter", Ticks)
    monkeypatch.setattr(timing, "QUICK", ONCE)
    monkeypatch.setattr(prefill, "environment", lambda: first_line()["environment"])
    for name, value in (("CALIBRATION_HEADS", 32), ("CALIBRATION_KEYS", 64), ("CALIBRATION_QUERIES", 1)):
        monkeypatch.setattr(prefill, name, value)
    out = tmp_path / "bench.jsonl"
    command = (
        "bench", "prefill", "--synthetic", "--keys", "96", "--queries", "1", "--num-heads", "32", "--topk", TOPK,
        "--paths", "dense", "--quick", "--calibration", "--reference-rows", "1", "--out", out,
    )  # fmt: skip
    code, text, err = dosa(*command)
    assert code == 0
    assert "dense" in text
    assert "1 x 96, H = 32: dense" in err
    [run_line], [one] = cells.read([out])
    assert run_line["calibration_ms"] is not None
    assert (one.domain, one.num_keys, one.by_layer[0].runs) == ("synthetic", 96, 1)
    monkeypatch.setattr(prefill, "ours", lambda *_: altered(other_bit))
    assert dosa(*command)[0] == 1


def test_the_page_command(dosa, tmp_path):
    if importlib.util.find_spec("matplotlib") is None:
        file = file_of(tmp_path / "a.jsonl", all_cells())
        code, _, err = dosa("bench", "page", file, "--out", tmp_path / "page.md")
        assert code == 3
        assert "matplotlib" in err
        assert not (tmp_path / "page.md").exists()
        return
    file = file_of(tmp_path / "a.jsonl", all_cells())
    assert dosa("bench", "page", file, "--out", tmp_path / "page.md")[0] == 0
    assert "![Stages](./bench_stages.svg)" in (tmp_path / "page.md").read_text()
