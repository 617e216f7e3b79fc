"""Traces on demand: what can be seen without a language model, and the measurements of a trace."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import dosa_verify
from dosa_ref import bound, quantize, trace
from dosa_ref.quantize import ScaleFormat
from dosa_ref.spec import InvalidProblem
from dosa_verify.cli import app
from dosa_verify.traces import indexer, make, model, stats

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
