"""Traces on demand: what can be seen without a language model, and the measurements of a trace."""

import dataclasses
import importlib.util
import json
import math
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import dosa_verify
from dosa_ref import bound, quantize, trace
from dosa_ref.quantize import ScaleFormat
from dosa_ref.spec import BackendUnavailable, InvalidProblem
from dosa_verify import pruning_page, pruning_study, pruning_variants
from dosa_verify.cli import app
from dosa_verify.traces import indexer, make, model, page, repeat, stats

EVIDENCE = Path(dosa_verify.__file__).resolve().parent.parent / "docs" / "evidence"
BUNDLED = Path(dosa_verify.__file__).parent / "data" / "en_layer06_h64_cut.safetensors"


@pytest.fixture(scope="module")
def report():
    return stats.measure(BUNDLED, topk=64, rows=2, columns=[8, 16])


def test_shares_of_weights_and_scores_are_plain_counts(report):
    problem = trace.load_trace(BUNDLED).problem
    rows = slice(*report.rows)
    weights = problem.weights[rows].astype(np.float64)
    assert report.weights_negative == pytest.approx((weights < 0).mean())
    assert report.weights_negative_mass == pytest.approx(-weights[weights < 0].sum() / np.abs(weights).sum())
    assert report.topk_share == pytest.approx(
        64 / (problem.cu_seqlen_ke[rows] - problem.cu_seqlen_ks[rows]).astype(float).mean(), rel=1e-3
    )


def test_the_best_seeds_reach_the_top_k_and_no_choice_reaches_less(report):
    found = {entry.strategy: entry for entry in report.tau}
    assert found["best"].reached == pytest.approx(report.topk_share, rel=1e-3)
    assert all(entry.reached >= found["best"].reached for entry in report.tau if entry.rows)


def test_survivors_are_those_of_the_reference_bound(report):
    """The page's number against the bound evaluated in the kernels' float32."""
    problem = trace.load_trace(BUNDLED).problem
    for entry in report.pruning:
        shares = []
        for row in range(*report.rows):
            window = slice(problem.cu_seqlen_ks[row], problem.cu_seqlen_ke[row])
            k, scale = problem.k[window], problem.k_scale[window]
            values = k.astype(np.float64)
            scores = scale * (np.maximum(values @ problem.q[row].astype(np.float64).T, 0) @ problem.weights[row])
            order = np.argsort(-scores, kind="stable")
            tau = scores[order[63]]
            hard = order[64:256][np.linspace(0, 191, 32).astype(int)]
            spread = np.arange(32) * len(k) // 32
            row_bound = bound.build_row_bound(
                problem.q[row], problem.weights[row], entry.columns, k[np.concatenate([hard, spread])]
            )
            shares.append((bound.evaluate(row_bound, k, scale) >= tau).mean())
        # Float32 against float64: a key whose bound lies within rounding of tau may fall on either side.
        assert 1 - entry.prune_rate == pytest.approx(np.mean(shares), abs=2e-4)
        assert entry.guard > 0
        assert entry.residual >= 0
        assert entry.negative >= 0
    assert report.pruning[0].prune_rate < report.pruning[1].prune_rate


def test_the_command_gives_the_record(schema_errors):
    options = ["--topk", "64", "--rows", "1", "--columns", "8", "--json"]
    done = CliRunner().invoke(app, ["trace", "stats", str(BUNDLED), *options])
    assert done.exit_code == 0, done.output
    record = json.loads(done.stdout)
    assert schema_errors(record) == []
    assert record["rows"] == [15, 16]


@pytest.mark.parametrize("arguments", [["--columns", "0"], ["--columns", "x"], ["--rows", "0"]])
def test_bad_arguments_are_named(arguments):
    done = CliRunner().invoke(app, ["trace", "stats", str(BUNDLED), *arguments])
    assert done.exit_code != 0


def test_quantised_tokens_are_the_references():
    rows = np.random.default_rng(3).normal(0, 1, (50, 128)) * np.exp2(np.arange(50) - 25)[:, None]
    rows = rows.astype(np.float32)
    rows[7] = 0
    codes, scale = indexer.quantize(torch.from_numpy(rows))
    want_codes, want_scale = quantize.quantize_tokens(rows, ScaleFormat.UE8M0)
    np.testing.assert_array_equal(scale.numpy(), want_scale)
    np.testing.assert_array_equal(codes.view(torch.uint8).numpy(), want_codes.view(np.uint8))


def test_the_hadamard_rotation_is_orthogonal():
    matrix = indexer.hadamard_matrix(torch.device("cpu"))
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(128), atol=1e-5, rtol=0)


@pytest.mark.parametrize("half_split", [False, True])
def test_rotary_dots_depend_on_the_distance_alone(half_split):
    rope = model.rotary(60, 64, 1e4, torch.device("cpu"), half_split)
    a, b = torch.randn(2, 1, 1, 64, generator=torch.Generator().manual_seed(0)).double().float()
    dots = [float((rope(a, slice(at, at + 1)) * rope(b, slice(at + 7, at + 8))).sum()) for at in (0, 5, 40)]
    assert dots == pytest.approx([dots[0]] * 3, abs=1e-4)
    assert float((rope(a, slice(0, 1)) * rope(b, slice(9, 10))).sum()) != pytest.approx(dots[0], abs=1e-3)


def test_yarn_keeps_fast_pairs_and_slows_slow_ones_down():
    """By hand: 64 numbers at base 1e5, trained for 8192 tokens, stretched 16 times."""
    own = model.rotary(4, 64, 1e5, torch.device("cpu"))
    stretched = model.rotary(131_072, 64, 1e5, torch.device("cpu"), context=8192)
    for pair in range(32):
        frequency = 1e5 ** (-pair / 32)
        turns = 8192 * frequency / (2 * math.pi)
        kept = min(max((turns - 1) / 31, 0), 1)
        expected = frequency * kept + frequency / 16 * (1 - kept)
        for at in (1, 3, 131_071):
            assert float(stretched.cos[at, pair]) == pytest.approx(math.cos(at * expected), abs=1e-6)
            assert float(stretched.sin[at, pair]) == pytest.approx(math.sin(at * expected), abs=1e-6)
    assert torch.equal(stretched.cos[:4, 0], own.cos[:, 0])
    assert not torch.equal(stretched.sin[:4, 31], own.sin[:, 31])
    assert stretched.logit_factor == pytest.approx((0.1 * math.log(16) + 1) ** 2)


@pytest.mark.parametrize("length", [8, 64])
def test_within_the_trained_context_nothing_is_scaled(length):
    own = model.rotary(length, 64, 1e4, torch.device("cpu"))
    same = model.rotary(length, 64, 1e4, torch.device("cpu"), context=64)
    torch.testing.assert_close(same.cos, own.cos, atol=1e-7, rtol=0)
    assert same.logit_factor == own.logit_factor == 1.0


def test_the_logit_factor_is_in_the_attention_and_in_its_target():
    """One head of 8 numbers against a softmax written out."""
    random = torch.Generator().manual_seed(5)
    q, k, v = torch.randn(3, 1, 2, 6, 8, generator=random)
    hidden = torch.arange(6) > torch.arange(6)[:, None]
    for factor in (1.0, 2.5):
        weights = torch.softmax((q @ k.mT * factor / 8**0.5).masked_fill(hidden, -torch.inf), dim=-1)
        found = model._attention(q, k, v, factor, model.attention_backend(q.device, 8))
        torch.testing.assert_close(found, weights @ v, atol=1e-5, rtol=1e-5)
        target = indexer.attention_target(q[0], k[0], hidden, factor)
        torch.testing.assert_close(target, weights[0].mean(0), atol=1e-6, rtol=1e-5)


def test_only_deterministic_operations_are_allowed_again_behind_an_attention():
    with make.deterministic():
        model._attention(*torch.randn(3, 1, 2, 4, 8), 1.0, model.attention_backend(torch.device("cpu"), 8))
        assert torch.are_deterministic_algorithms_enabled()
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.fixture(scope="module")
def tiny():
    """A language model of one layer and a half with random weights."""
    config = model.ModelConfig(
        name="tiny", width=48, num_heads=4, num_kv_heads=2, head_dim=12, rope_base=1e4, norm_eps=1e-5,
        context_length=64, model_layers=2, pack_layers=1,
    )  # fmt: skip
    random = torch.Generator().manual_seed(1)
    shapes = {"attn_q": (48, 48), "attn_k": (24, 48), "attn_v": (24, 48), "attn_output": (48, 48)}
    shapes |= {"ffn_gate": (96, 48), "ffn_up": (96, 48), "ffn_down": (48, 96)}
    weights = {"token_embd.weight": torch.randn(30, 48, generator=random).to(model.DTYPE)}
    for layer in range(2):
        weights |= {
            f"blk.{layer}.{name}.weight": (torch.randn(shape, generator=random) * 0.2).to(model.DTYPE)
            for name, shape in shapes.items()
        }
        weights |= {f"blk.{layer}.{name}.weight": torch.ones(48) for name in ("attn_norm", "ffn_norm")}
    tokens = {"en": torch.randint(0, 30, (900,), generator=random)}
    return model.Pack(config=config, weights=weights, tokens=tokens, header={"content_sha256": "none"})


ARGUMENTS = {
    "domain": "en", "layers": [1], "num_heads": [8], "num_keys": [200, 120], "num_queries": 16, "steps": 3,
    "train_keys": 64, "train_windows": 2,
}  # fmt: skip


def test_traces_repeat_and_shorter_ones_are_suffixes(tiny):
    first, second = (list(make.make(tiny, **ARGUMENTS)) for _ in range(2))
    assert [t.name for t in first] == ["en_layer01_h8_200", "en_layer01_h8_120"]
    for one, other in zip(first, second, strict=True):
        for field in ("q", "k", "k_scale", "weights", "ks", "ke"):
            assert torch.equal(getattr(one, field).view(torch.uint8), getattr(other, field).view(torch.uint8))
    long, short = first
    assert torch.equal(long.k[80:].view(torch.uint8), short.k.view(torch.uint8))
    assert torch.equal(long.q.view(torch.uint8), short.q.view(torch.uint8))
    assert short.ke.tolist() == list(range(105, 121))
    assert short.ks.tolist() == [0] * 16
    other = next(iter(make.make(tiny, **{**ARGUMENTS, "seed": 1})))
    assert not torch.equal(other.k.view(torch.uint8), long.k.view(torch.uint8))


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"domain": "zh"}, "domain"),
        ({"layers": [2]}, "layers"),
        ({"num_queries": 121}, "num_queries"),
        ({"num_heads": [0]}, "num_heads"),
    ],
)
def test_what_the_pack_cannot_give_is_named(tiny, change, field):
    with pytest.raises(InvalidProblem) as error:
        list(make.make(tiny, **{**ARGUMENTS, **change}))
    assert error.value.field == field


def equal(one, other):
    return all(
        torch.equal(getattr(one, field).view(torch.uint8), getattr(other, field).view(torch.uint8))
        for field in ("q", "k", "k_scale", "weights", "ks", "ke")
    )


def test_headers_say_how_positions_were_scaled_and_which_kernel_attended(tiny):
    (trace_made,) = make.make(tiny, **{**ARGUMENTS, "num_keys": 200})
    said = trace_made.header["rope_scaling"]
    assert said.startswith("YaRN: factor 3.125 of 64 tokens, base 10000, ramp from 1 to 32 turns")
    assert f"logits times {(0.1 * math.log(3.125) + 1) ** 2:.6g}" in said
    assert trace_made.header["attention"] == "math"
    assert "YaRN factor 3.125 for 200 tokens" in trace_made.header["model"]


def test_training_has_the_tables_and_the_factor_of_the_pass(tiny, monkeypatch):
    seen = []

    def train(windows, indexers, rope, **rest):
        seen.append((windows.logit_factor, rope))
        return [indexer.Training(steps=rest["steps"], first_kl=1.0, last_kl=1.0) for _ in indexers]

    ropes = []
    run_layers = make.run_layers
    monkeypatch.setattr(make, "train", train)
    monkeypatch.setattr(make, "run_layers", lambda *args: ropes.append(args[3]) or run_layers(*args))
    list(make.make(tiny, **{**ARGUMENTS, "num_keys": 200}))
    ((factor, turned),) = seen
    assert len(ropes) == 3  # two training texts, one pass
    assert all(rope is ropes[0] for rope in ropes)
    assert factor == ropes[0].logit_factor > 1
    assert torch.equal(turned.cos, model.rotary(200, 64, 1e4, torch.device("cpu"), context=64).cos)


def test_what_else_is_requested_does_not_change_a_trace(tiny):
    options = make.Options(steps=3, train_keys=64, train_windows=2)

    def request(heads=(8,), keys=(200,), **change):
        return make.Request(options=dataclasses.replace(options, **change), layers=[1], num_heads=heads, num_keys=keys)

    kinds = [request(heads=(4, 8)), request(seed=1), request(hadamard=True), request(half_split=True), request(steps=0)]
    together = list(make.make_requests(tiny, kinds, domains=["en"], num_queries=16))
    assert [t.header["num_heads"] for t in together] == ["4", "8", "8", "8", "8", "8"]
    assert [t.header["indexer_steps"] for t in together] == ["3", "3", "3", "3", "3", "0"]
    alone = [
        next(iter(make.make_requests(tiny, [kind], domains=["en"], num_queries=16))) for kind in (request(), *kinds[1:])
    ]
    for one, other in zip(together[1:], alone, strict=True):
        assert equal(one, other)
    for place, one in enumerate(alone):
        assert not any(equal(one, other) for other in alone[place + 1 :])
    with pytest.raises(InvalidProblem, match="requests"):
        list(make.make_requests(tiny, [], domains=["en"], num_queries=16))


@pytest.fixture(scope="module")
def long_record(tiny):
    """A study of long traces, here of 600 tokens."""
    sizes = pruning_study.Sizes(
        domains=["en"], layers=[0, 1], num_heads=[32], lengths=[300, 600], seed_layers=[1], control_layers=[0],
        queries=20, rows=4, steps=2, topk=32, train_keys=64, train_windows=2,
    )  # fmt: skip
    found = {}
    with pytest.MonkeyPatch.context() as patch, pruning_study.builders(1) as submit:
        patch.setattr(pruning_study, "load_pack", lambda *_: tiny)
        patch.setattr(pruning_study, "NEAR", (1,))
        pruning_study.study_long(
            [], sizes, torch.device("cpu"), submit, lambda cases, texts: found.update(cases=cases, texts=texts)
        )
    record = {"schema": pruning_study.SCHEMA, "environment": {"git_commit": None}, "command": "c", "time_s": 1.0}
    return {**record, **found}


def test_a_study_of_long_traces_measures_every_kind_of_indexer(long_record):
    cases = long_record["cases"]
    kinds = [(c["layer"], c["keys"], c["own"], c["indexer"]["seed"], c["indexer"]["steps"]) for c in cases]
    assert [kind for kind in kinds if kind[2]] == [(layer, keys, True, 0, 2) for layer in (0, 1) for keys in (300, 600)]
    assert sorted(kind for kind in kinds if not kind[2]) == [
        (0, 600, False, 0, 0), (0, 600, False, 0, 2), (0, 600, False, 0, 2), (1, 600, False, 1, 2),
    ]  # fmt: skip
    for case in cases:
        whole = case["own"] and case["keys"] == 600
        assert set(case["survivors"]) == set(pruning_variants.MAKERS if whole else pruning_variants.VARIANTS)
        assert case["rows"] == (4 if whole else 2)
        assert bool(case["seeds"]) is case["own"]
        assert case["trace"] == f"en_layer0{case['layer']}_h32"
        assert (case["indexer"]["final_kl"] is None) is (case["indexer"]["steps"] == 0)
    (text,) = long_record["texts"]
    assert (text["domain"], text["pass_tokens"], text["loss_flat"]) == ("en", "600", "not checked")


def test_a_page_of_long_traces_has_their_numbers_and_leaves_shorter_passes_out(long_record):
    short = json.loads((EVIDENCE / "pruning_traces.json").read_text(encoding="utf-8"))
    shown = pruning_page.page({"long.json": long_record, "short.json": short})
    (case,) = [c for c in long_record["cases"] if c["own"] and (c["layer"], c["keys"]) == (1, 600)]
    assert "No trace of a million keys" not in shown
    assert "No trace of a million keys" in pruning_page.page({"short.json": short})
    kept = np.mean(case["survivors"]["recipe"]["12"])
    assert f"| layer 1 | {case['seed_share']:.2f} |" in shown
    assert f"**{kept:.2f}** |" in shown
    shorter = json.loads(json.dumps(long_record))
    for other in shorter["cases"]:
        other["keys"] //= 2
    both = {"long.json": long_record, "shorter.json": shorter}
    assert pruning_page.main_records(both) == [long_record]
    assert pruning_page.main_records({"short.json": short}) == []


def test_pictures_need_matplotlib(long_record, tmp_path):
    if importlib.util.find_spec("matplotlib") is None:
        with pytest.raises(BackendUnavailable, match="matplotlib"):
            pruning_page.draw({"long.json": long_record}, tmp_path)
    else:
        pruning_page.draw({"long.json": long_record}, tmp_path)
        assert {path.name for path in tmp_path.iterdir()} == {
            pruning_page.COLUMNS_PICTURE,
            pruning_page.LENGTHS_PICTURE,
        }


class Process:
    """A run of `dosa trace make` that is over."""

    def __init__(self, answer, code=0):
        self.answer, self.returncode = answer, code

    def communicate(self):
        return self.answer, "no pack"


@pytest.mark.parametrize("hashes", [("aa", "aa"), ("aa", "ab")])
def test_repeated_traces_are_compared_by_their_hashes(hashes, tmp_path, monkeypatch):
    header = {"attention": "math", "rope_scaling": "none", "pack_sha256": "0"}
    commands = []

    def start(command, **_):
        commands.append(command)
        entry = {"file": "there/t.safetensors", "bytes": 7, "sha256": hashes[len(commands) - 1], "header": header}
        return Process(json.dumps({"traces": [entry]}))

    monkeypatch.setattr(repeat, "environment", dict)
    monkeypatch.setattr(subprocess, "Popen", start)
    out = tmp_path / "r.json"
    code = repeat.main(["p.safetensors", "--keys", "131072", "--steps", "300", "--commit", "abc", "--out", str(out)])
    record = json.loads(out.read_text())
    assert code == (0 if hashes[0] == hashes[1] else 1)
    assert record["equal"] is (hashes[0] == hashes[1])
    assert record["traces"] == [{"file": "t.safetensors", "bytes": 7, "sha256": list(hashes)}]
    assert record["command"] == "python -m dosa_verify.traces.repeat PACK --runs 2 --keys 131072 --steps 300"
    assert commands[0][2:6] == ["dosa_verify", "trace", "make", "p.safetensors"]
    assert commands[0][6:10] == ["--keys", "131072", "--steps", "300"]
    assert commands[0][commands[0].index("--out") + 1] != commands[1][commands[1].index("--out") + 1]


def test_a_run_that_fails_says_why(monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: Process("", code=2))
    with pytest.raises(BackendUnavailable, match="no pack"):
        repeat.repeat([Path("p")], 2, [])


def test_recorded_traces_repeat():
    record = json.loads((EVIDENCE / page.HASHES).read_text(encoding="utf-8"))
    assert record["schema"] == repeat.SCHEMA
    assert record["equal"] is True
    assert all(len(entry["sha256"]) >= 2 and len(set(entry["sha256"])) == 1 for entry in record["traces"])


def test_the_page_shows_the_records():
    text = (EVIDENCE.parent / "traces.md").read_text(encoding="utf-8")
    records = page.read(EVIDENCE)
    assert text == page.insert(text, page.section(records))
    changed = json.loads(json.dumps(records))
    changed[page.LONG]["texts"][0]["loss_bins"][15][2] += 1
    assert text != page.insert(text, page.section(changed))
    with pytest.raises(InvalidProblem, match="page"):
        page.insert(text.replace(page.END, ""), "")
