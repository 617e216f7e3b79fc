"""The command line under hostile files and unwritable places, and what it says about a fault of its own."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from rich.table import Table

from dosa_ref.trace import load_result, save_result
from dosa_verify import cli, environment, selection, terminal

ROOT = Path(cli.__file__).resolve().parent.parent


def rewrite_header(file, change):
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


def set_topk(text):
    return lambda header: header["__metadata__"].update(topk=text)


def set_shape(name, shape):
    return lambda header: header[name].update(shape=shape, data_offsets=[header[name]["data_offsets"][0]] * 2)


@pytest.mark.parametrize("topk", ["9" * 5000, "-1", "1e3", ""], ids=["long", "negative", "float", "empty"])
def test_a_header_topk_that_is_no_number_is_bad_input(dosa, trace, topk):
    rewrite_header(trace, set_topk(topk))
    code, out, err = dosa("select", trace)
    assert (code, out) == (2, "")
    assert "topk: got" in err
    assert len(err) < 400


def test_rows_of_thousands_of_digits_are_bad_input(dosa, trace):
    code, _, err = dosa("select", trace, "--rows", "0:" + "9" * 5000)
    assert code == 2
    assert "--rows: got" in err


def test_a_result_whose_shape_denies_its_header_is_bad_input(dosa, trace, tmp_path):
    result = tmp_path / "result.safetensors"
    assert dosa("select", trace, "--topk", "5", "--out", result)[0] == 0
    saved = load_result(result)
    save_result(result, saved.topk_indices[:, :0], saved.scores[:, :0], saved.header)
    code, _, err = dosa("check", trace, result)
    assert code == 2
    assert "topk_indices: got 0 columns, expected 5" in err


def test_the_trace_itself_is_never_overwritten(dosa, trace):
    before = trace.read_bytes()
    link = trace.parent / "link.safetensors"
    os.link(trace, link)
    for out in (trace, link):
        code, _, err = dosa("select", trace, "--out", out)
        assert code == 2
        assert "another file than the trace" in err
    assert trace.read_bytes() == before


def test_what_is_no_regular_file_is_never_replaced(dosa, trace, tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    code, _, err = dosa("select", trace, "--out", pipe)
    assert code == 2
    assert "no regular file" in err
    assert pipe.is_fifo()


@pytest.mark.parametrize(
    "arguments",
    [
        ("prove", "relu_lipschitz", "--export", "FILE/x"),
        ("verify", "--report", "missing/report.json"),
        ("audit", "fp8", "--out", "missing/audit.json"),
    ],
    ids=lambda arguments: arguments[0],
)
def test_places_that_cannot_be_written_are_found_before_the_work(dosa, tmp_path, monkeypatch, arguments):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "FILE").write_text("in the way")
    code, out, err = dosa(*arguments)
    assert (code, out) == (2, "")
    assert "Traceback" not in err


def test_a_fault_of_the_tool_is_no_counterexample(dosa, trace, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("planted")

    monkeypatch.setattr(selection, "load_trace", fail)
    code, _, err = dosa("select", trace)
    assert code == 70
    assert "RuntimeError: planted" in err


def test_no_case_is_no_verdict(dosa):
    code, out, _ = dosa("fuzz", "dosa", "--budget", "0", "--json")
    assert code == 3
    assert json.loads(out)["outcome"] == "undecided"


def test_reproducers_can_be_pasted(dosa, trace, tmp_path, monkeypatch):
    result = tmp_path / "result.safetensors"
    assert dosa("select", trace, "--out", result)[0] == 0
    saved = load_result(result)
    scores = saved.scores.copy()
    scores[0, 0] = np.nextafter(scores[0, 0], np.float32(np.inf))
    save_result(result, saved.topk_indices, scores, saved.header)
    code, out, _ = dosa("check", trace, result)
    command = re.search(r"reproduce: (.*)", out)[1]
    assert code == 1
    assert command == f"{environment.invocation()} check {trace} {result}"
    done = subprocess.run(command.split(), cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr


def test_a_checkout_without_libraries_says_so():
    done = subprocess.run(
        [sys.executable, "-S", "-m", "dosa_verify", "env"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 3
    assert re.fullmatch(r"dosa: the Python package \w+ is not installed;.*\n", done.stderr)


def test_a_missing_folder_is_blamed_on_the_option_that_named_it(dosa, trace, tmp_path):
    nowhere = tmp_path / "no" / "file"
    for option, verb in (
        ("--record", ["fuzz", "torch.topk"]),
        ("--report", ["verify"]),
        ("--out", ["select", trace]),
        ("--out", ["audit", "fp8"]),
    ):
        code, _, err = dosa(*verb, option, nowhere)
        assert code == 2
        assert f"Invalid value for {option}: there is no folder" in " ".join(err.split())


def test_text_is_shown_as_it_is(capsys):
    terminal._print("k:ok: [red] one[/red] :smile:")
    assert capsys.readouterr().out == "k:ok: [red] one[/red] :smile:\n"
    table = Table(":ok:")
    table.add_row("[bold]a[/bold]")
    terminal._print(table)
    out = capsys.readouterr().out
    assert ":ok:" in out
    assert "[bold]a[/bold]" in out


@pytest.mark.parametrize("as_json", [False, True])
def test_a_reader_that_leaves_does_not_change_the_exit_code(trace, tmp_path, as_json):
    script = (
        "import sys, typer; from dosa_verify import cli, terminal\n"
        f"show = (lambda: terminal.print_json({{'a': 'b' * 10**6}})) if {as_json} else "
        "(lambda: [terminal._print('b' * 10**5) for _ in range(20)])\n"
        "cli.app.command('flood')(lambda: (show(), cli._exit(cli.Exit.UNDECIDED)))\n"
        "cli.main(['flood'])\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"},
    )
    process.stdout.read(10)
    process.stdout.close()
    err = process.stderr.read()
    process.stderr.close()
    assert process.wait() == 3, err
    assert err == ""
