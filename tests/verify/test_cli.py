"""Exit codes, messages and JSON of the command line; nothing half-written, no traceback for a user's mistake."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from dosa_ref.trace import load_result, load_trace, save_result
from dosa_verify import cli

ROOT = Path(cli.__file__).resolve().parent.parent


def test_every_verb_has_help_with_an_example(dosa):
    for verb in (["prove"], ["audit", "fp8"], ["fuzz"], ["select"], ["check"], ["env"], ["verify"]):
        code, out, _ = dosa(*verb, "--help")
        assert code == 0
        assert f"dosa {' '.join(verb)}" in out.split("Example", 1)[1]


def test_env_says_what_is_here(dosa, schema_errors):
    code, out, err = dosa("env", "--json")
    record = json.loads(out)
    assert (code, err) == (0, "")
    assert schema_errors(record) == []
    assert record["packages"]["numpy"] == np.__version__
    assert record["gate"]["status"] in ("proved", "refused")


def test_prove_one_lemma(dosa, schema_errors):
    code, out, _ = dosa("prove", "relu_lipschitz", "--json")
    record = json.loads(out)
    assert code == 0
    assert schema_errors(record) == []
    assert [(lemma["id"], lemma["status"]) for lemma in record["lemmas"]] == [("relu_lipschitz", "proved")]
    assert {mutant["status"] for mutant in record["lemmas"][0]["mutants"]} == {"refuted"}


def test_prove_exports_scripts(dosa, tmp_path):
    code, _, _ = dosa("prove", "relu_lipschitz", "--solver", "z3", "--export", tmp_path / "smt2")
    assert code == 0
    assert "(check-sat)" in (tmp_path / "smt2" / "relu_lipschitz.smt2").read_text()


def test_prove_unknown_lemma_names_close_ones(dosa):
    code, out, err = dosa("prove", "relu_lipschiz")
    assert (code, out) == (2, "")
    assert "relu_lipschitz" in err


def test_prove_demands_the_confirmation_asked_for(dosa):
    # Bitwuzla reads no real arithmetic, so it cannot have confirmed this one.
    code, out, _ = dosa("prove", "relu_lipschitz", "--solver", "bitwuzla", "--json")
    assert code == 3
    assert json.loads(out)["outcome"] == "unknown"


def test_prove_unknown_solver(dosa):
    code, _, err = dosa("prove", "relu_lipschitz", "--solver", "yices")
    assert code == 2
    assert "yices" in err


@pytest.mark.parametrize("path", ["dosa", "dense", "auto"])
def test_select_then_check(dosa, trace, tmp_path, schema_errors, device, path):
    result = tmp_path / "result.safetensors"
    code, out, _ = dosa(
        "select", trace, "--path", path, "--rows", "1:3", "--device", device.value, "--out", result, "--json"
    )
    record = json.loads(out)
    assert code == 0
    assert schema_errors(record) == []
    assert (record["rows"], record["topk"]) == ([1, 3], 5)
    saved = load_result(result)
    assert saved.topk_indices.shape == (2, 5)
    assert saved.topk_indices.dtype == np.int32
    assert saved.scores.dtype == np.float32
    code, out, _ = dosa("check", trace, result, "--json")
    record = json.loads(out)
    assert (code, record["outcome"], record["rows"]) == (0, "exact", [1, 3])
    assert schema_errors(record) == []


def test_all_modes_give_one_hash(dosa, trace, device):
    hashes = set()
    for mode in ("both", "prune", "emit", "base"):
        code, out, _ = dosa("select", trace, "--path", "dosa", "--mode", mode, "--device", device.value, "--json")
        record = json.loads(out)
        assert (code, record["stats"]["mode"]) == (0, mode)
        hashes.add(record["result_sha256"])
    assert len(hashes) == 1


def test_topk_overrides_the_trace(dosa, trace, tmp_path, device):
    result = tmp_path / "result.safetensors"
    code, _, _ = dosa("select", trace, "--topk", "3", "--rows", "0:1", "--device", device.value, "--out", result)
    assert code == 0
    assert load_result(result).topk_indices.shape == (1, 3)
    assert dosa("check", trace, result)[0] == 0


def test_a_tampered_result_is_a_counterexample(dosa, trace, tmp_path, schema_errors, device):
    result = tmp_path / "result.safetensors"
    dosa("select", trace, "--rows", "1:4", "--device", device.value, "--out", result)
    saved = load_result(result)
    problem = load_trace(trace).problem
    indices = saved.topk_indices.copy()
    # A visible key that was not selected takes the place of the last selected one of the trace's row 2.
    other = max(set(range(*problem.window(2))) - set(indices[1].tolist()))
    indices[1] = np.sort(np.append(indices[1, :-1], other)).astype(np.int32)
    save_result(result, indices, saved.scores, saved.header)
    code, out, _ = dosa("check", trace, result, "--json")
    record = json.loads(out)
    assert schema_errors(record) == []
    assert (code, record["row"]) == (1, 2)
    assert record["outcome"] in ("wrong_set", "wrong_order")
    assert record["reproducer"].endswith(f" check {trace} {result}")


def test_one_flipped_score_bit_is_a_counterexample(dosa, trace, tmp_path, device):
    result = tmp_path / "result.safetensors"
    dosa("select", trace, "--device", device.value, "--out", result)
    saved = load_result(result)
    scores = saved.scores.copy()
    scores.view(np.uint32)[3, 4] ^= 1
    save_result(result, saved.topk_indices, scores, saved.header)
    code, out, _ = dosa("check", trace, result)
    assert code == 1
    assert "row 3" in out


def test_a_result_of_another_trace_is_refused(dosa, trace, tmp_path, device):
    result = tmp_path / "result.safetensors"
    dosa("select", trace, "--device", device.value, "--out", result)
    data = bytearray(trace.read_bytes())
    data[-1] ^= 1
    trace.write_bytes(data)
    code, _, err = dosa("check", trace, result)
    assert code == 2
    assert "trace_sha256" in err


@pytest.mark.parametrize("rows", ["3:1", "0:5", "-1:2", "a:b", "2", "1:2:3", "٣:4"])
def test_bad_rows(dosa, trace, tmp_path, rows):
    out = tmp_path / "result.safetensors"
    code, _, err = dosa("select", trace, f"--rows={rows}", "--out", out)
    assert code == 2
    assert "--rows" in err
    assert sorted(tmp_path.iterdir()) == [trace]


def test_mode_with_dense_is_a_usage_error(dosa, trace, tmp_path):
    code, _, err = dosa("select", trace, "--path", "dense", "--mode", "both", "--out", tmp_path / "r.safetensors")
    assert code == 2
    assert "--mode" in err
    assert sorted(tmp_path.iterdir()) == [trace]


@pytest.mark.parametrize("topk", ["-1", "2049", "many"])
def test_bad_topk(dosa, trace, device, topk):
    code, _, err = dosa("select", trace, f"--topk={topk}", "--device", device.value)
    assert code == 2
    assert "topk" in err


def test_missing_output_folder(dosa, trace, tmp_path):
    code, _, err = dosa("select", trace, "--out", tmp_path / "nowhere" / "r.safetensors")
    assert code == 2
    assert "--out" in err


@pytest.mark.parametrize("damage", ["truncated", "foreign", "empty", "other_schema"])
def test_damaged_traces(dosa, trace, tmp_path, damage):
    data = trace.read_bytes()
    damaged = {
        "truncated": data[: len(data) // 2],
        "foreign": b"PK\x03\x04" + data,
        "empty": b"",
        "other_schema": data.replace(b"dosa.trace/1", b"dosa.trace/9"),
    }
    trace.write_bytes(damaged[damage])
    out = tmp_path / "result.safetensors"
    for arguments in (["select", trace, "--out", out], ["check", trace, trace], ["fuzz", "--replay", trace]):
        code, stdout, err = dosa(*arguments)
        assert (code, stdout) == (2, "")
        assert err.startswith("dosa: ")
        assert "Traceback" not in err
    assert not out.exists()


def test_missing_files_and_unknown_names(dosa, tmp_path, trace):
    assert dosa("select", tmp_path / "none.safetensors")[0] == 2
    assert dosa("check", trace, tmp_path / "none.safetensors")[0] == 2
    assert dosa("fuzz", "sglang")[0] == 2
    assert dosa("select", trace, "--path", "fast")[0] == 2
    assert dosa("polish")[0] == 2


def test_cuda_without_a_gpu_is_unavailable(dosa, trace, device):
    if device is cli.Device.CUDA:
        pytest.skip("there is a GPU here: the case is a machine without one")
    code, out, err = dosa("select", trace, "--device", "cuda")
    assert (code, out) == (3, "")
    assert "no GPU" in err


def test_an_unproved_bound_exits_3(dosa, trace, monkeypatch, device):
    from dosa_gpu import gate
    from dosa_ref.spec import UnprovedBound

    def refuse():
        raise UnprovedBound("dot_error", "planted")

    monkeypatch.setattr(gate, "require_proved", refuse)
    code, out, err = dosa("select", trace, "--path", "dosa", "--device", device.value)
    assert (code, out) == (3, "")
    assert "dot_error" in err
    # The dense path rests on no lemma.
    assert dosa("select", trace, "--path", "dense", "--device", device.value)[0] == 0


BLOCKED = """
import sys
for name in {blocked}:
    sys.modules[name] = None
from dosa_verify import cli
cli.main({arguments})
"""


def run_without(blocked, arguments, cwd):
    """The command line in a fresh process in which some libraries cannot be imported."""
    script = BLOCKED.format(blocked=blocked, arguments=[str(argument) for argument in arguments])
    return subprocess.run(
        [sys.executable, "-c", script],
        check=False,
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


SOLVERS = ["z3", "cvc5", "bitwuzla"]


def test_check_needs_no_torch_and_no_solver(dosa, trace, tmp_path, device):
    result = tmp_path / "result.safetensors"
    dosa("select", trace, "--device", device.value, "--out", result)
    done = run_without(["torch", "triton", *SOLVERS], ["check", trace, result], tmp_path)
    assert done.returncode == 0, done.stderr
    assert all(line.startswith("dosa: checking") for line in done.stderr.splitlines())
    assert done.stdout.startswith("exact")


def test_missing_libraries_exit_3(trace, tmp_path):
    for blocked, arguments in (
        (["torch"], ["select", trace]),
        (["torch"], ["fuzz"]),
        (["z3"], ["prove", "relu_lipschitz"]),
    ):
        done = run_without(blocked, arguments, tmp_path)
        assert done.returncode == 3, done.stderr
        assert blocked[0] in done.stderr
        assert "Traceback" not in done.stderr


def test_runs_from_a_checkout_without_installation(tmp_path):
    # -S leaves out the .pth file of an editable installation; the libraries come back by path.
    libraries = os.pathsep.join(entry for entry in sys.path if "site-packages" in entry)
    done = subprocess.run(
        [sys.executable, "-S", "-m", "dosa_verify.cli", "env", "--json"],
        check=False,
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": libraries},
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["schema"] == "dosa.env/1"


def test_json_only_on_stdout_without_a_terminal(trace, tmp_path, device):
    done = subprocess.run(
        [sys.executable, "-W", "error::SyntaxWarning", "-m", "dosa_verify.cli", "select", str(trace), "--json",
         "--device", device.value],
        check=False,
        capture_output=True,
        text=True,
        cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    json.loads(done.stdout)
    assert "\x1b" not in done.stderr
