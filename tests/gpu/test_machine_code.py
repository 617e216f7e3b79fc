"""Every scoring kernel, compiled for sm_90 without a GPU: FP8 tensor-core chains, no rounding but the contract's.

Compilation needs processes of their own, since this one may be bound to the interpreter. Triton 3.6.0 (on GPU machines)
and 3.9.0 (here) lower differently, so both are asked.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dosa_gpu import machine_code
from dosa_ref.spec import UnsupportedConfiguration

ROOT = Path(__file__).parents[2]
OLD_TRITON = Path(os.environ.get("DOSA_TRITON_360", ROOT / ".venv" / "triton-3.6.0"))

PLANTED = """
import triton, triton.language as tl

@triton.jit
def planted(q_ptr, k_ptr, out_ptr, ROWS: tl.constexpr, KIND: tl.constexpr):
    row, depth, column = tl.arange(0, ROWS), tl.arange(0, 128), tl.arange(0, 64)
    k = tl.load(k_ptr + row[:, None] * 128 + depth[None, :])
    q = tl.load(q_ptr + column[:, None] * 128 + depth[None, :])
    if KIND == 0:
        acc = tl.dot(k, tl.trans(q))
    elif KIND == 1:
        acc = tl.dot(k, tl.trans(q), max_num_imprecise_acc=32)
    else:
        acc = tl.zeros((ROWS, 64), tl.float32)
        for part in tl.static_range(4):
            inner = part * 32 + tl.arange(0, 32)
            kp = tl.load(k_ptr + row[:, None] * 128 + inner[None, :])
            qp = tl.load(q_ptr + column[:, None] * 128 + inner[None, :])
            acc += tl.dot(kp, tl.trans(qp))
    tl.store(out_ptr + row[:, None] * 64 + column[None, :], acc)
"""

COMPILE_PLANTED = """
import importlib.util, json, sys
spec = importlib.util.spec_from_file_location("planted", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
from dosa_gpu import ahead_of_time, machine_code
constants = {"ROWS": int(sys.argv[2]), "KIND": int(sys.argv[3])}
compiled = ahead_of_time.compile_kernel(module.planted, constants, {"num_warps": int(sys.argv[4])})
text = machine_code.sass(compiled.asm["cubin"])
print(json.dumps([machine_code.ptx_faults(compiled.asm["ptx"]), machine_code.sass_faults(text)]))
"""


def compiler_process(version, *arguments):
    """Run Python with the compiler and the asked Triton; skip only where that Triton was never set up."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    path = [str(ROOT)]
    if version == "3.6.0":
        if not OLD_TRITON.is_dir():
            pytest.fail(f"no Triton 3.6.0 at {OLD_TRITON}: `make setup` unpacks it")
        path.insert(0, str(OLD_TRITON))
    environment["PYTHONPATH"] = os.pathsep.join(path)
    return subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=300, check=False
    )


def installed_triton():
    import triton

    return triton.__version__


@pytest.fixture(params=["3.6.0", "installed"])
def version(request):
    return request.param


def test_every_scoring_kernel_is_a_chain_of_tensor_core_steps(version):
    done = compiler_process(version, "-m", "dosa_gpu.ahead_of_time")
    records = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, done.stdout + done.stderr
    assert {record["triton"] for record in records} == {version if version == "3.6.0" else installed_triton()}
    assert len(records) == 14
    for record in records:
        counts = record["counts"]
        assert record["faults"] == []
        # One dot of 128 dimensions: four steps. (A 64-key tile is one instruction row.) Words need two tiles; columns
        # that are no power of two need two dots.
        tiles = 2 if "bits" in record["kernel"] or "bound" in record["kernel"] else 1
        dots = 2 if record["kernel"] in ("bound M=12", "bound M=20", "bound M=24") else 1
        assert (counts["QGMMA"], counts["HMMA"]) == (4 * tiles * dots, 0), record
    # The contract's roundings per (key, query, lane) and nothing else: 2 products and 2 (J - 1) fused ones, then
    # even + odd, times k_scale, and two additions across lanes.
    for record in records:
        if record["kernel"].startswith("bound"):
            continue
        heads = 32 if "H=32" in record["kernel"] else 64
        queries = 1 if record["kernel"].startswith("rescore") else 128 // heads
        triples = 64 * queries * 4 // 128 * (2 if "bits" in record["kernel"] else 1)
        want = {"FADD": 3 * triples, "FMUL": 3 * triples, "FFMA": 2 * (heads // 8 - 1) * triples}
        assert {name: record["counts"][name] for name in want} == want, record


@pytest.mark.parametrize(
    ("rows", "kind", "warps", "fault"),
    [
        (32, 0, 4, "HMMA"),  # a 32-row tile: f16 mma.sync
        (64, 0, 2, "HMMA"),  # too few warps
        (64, 1, 4, "arithmetic inside a chain"),  # promoted every step
        (64, 2, 4, "chain"),  # added outside the tensor core
    ],
    ids=["32 rows", "2 warps", "promoted every step", "added outside"],
)
def test_a_planted_kernel_with_other_bits_is_found(version, tmp_path, rows, kind, warps, fault):
    source = tmp_path / "planted.py"
    source.write_text(PLANTED, encoding="utf-8")
    done = compiler_process(version, "-c", COMPILE_PLANTED, str(source), str(rows), str(kind), str(warps))
    assert done.returncode == 0, done.stderr
    ptx, sass = json.loads(done.stdout)
    assert any(fault in line for line in sass), sass
    assert ptx, "the run-time check must see it in the PTX too"


def test_the_run_time_check_refuses_and_remembers():
    class Compiled:
        def __init__(self, ptx):
            self.asm = {"ptx": ptx}

    def step(adds, registers="{%r1, %r2}"):
        return f"wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {registers}, %rd1, %rd2, {adds}, 1, 1;"

    chain = [step("0"), step("%p1"), step("%p1"), step("%p1")]
    good = Compiled("\n".join(chain))
    machine_code.require_tensor_core_chain(good)
    assert good.dosa_checked
    bad = {
        "no FP8 wgmma": [],
        "not a multiple of 4": chain[:3],
        "mma.sync": [*chain, "mma.sync.aligned.m16n8k16"],
        "rounding inside": [chain[0], "add.f32 %f1, %f2, %f3;", *chain[1:]],
        "start once from zero": [step("0")] * 4,
        "changes its accumulator": [*chain[:3], step("%p1", "{%r3, %r4}")],
        "flushes subnormals": [*chain, "add.ftz.f32 %f1, %f2, %f3;"],
        "another format": [*chain, "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {%r1}, %rd1, %rd2, 0, 1, 1;"],
    }
    for fault, lines in bad.items():
        with pytest.raises(UnsupportedConfiguration, match=fault):
            machine_code.require_tensor_core_chain(Compiled("\n".join(lines)))
    machine_code.require_tensor_core_chain(None)  # the interpreter returns nothing; the emulator models the chain


@pytest.mark.parametrize(
    ("line", "faulty"),
    [
        ("FFMA R90, R88, R1, R2", False),  # the epilogue of another tile
        ("FFMA R90, R87.reuse, R1, R2", True),  # reads the accumulator's last register
        ("FADD R24, R1, R2", True),  # writes its first
        ("FMUL R23, R1, R2", False),
    ],
)
def test_arithmetic_beside_a_chain_may_not_touch_its_accumulator(line, faulty):
    steps = [f"QGMMA.64x128x32.F32.E4M3.E4M3 R24, gdesc[UR16], {added}" for added in ("RZ, !UPT", "R24", "R24", "R24")]
    faults = machine_code.sass_faults("\n".join([*steps[:2], line, *steps[2:]]))
    assert faults == (["float32 arithmetic inside a chain"] if faulty else [])
