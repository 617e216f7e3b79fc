"""The emulator: what it replaces in Triton's interpreter, and that it says so when it cannot."""

import dataclasses
import os
import subprocess
import sys
import types
from itertools import pairwise

import ml_dtypes
import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

from dosa_ref import formats, tensorcore
from dosa_ref.formats import Overflow
from dosa_ref.spec import BackendUnavailable, UnsupportedConfiguration
from dosa_verify import emulator
from dosa_verify.targets.dosa import cuda_is_available

pytestmark = pytest.mark.skipif(cuda_is_available(), reason="the emulator and the compiler cannot share a process")


@triton.jit
def _dot_kernel(a_ptr, b_ptr, c_ptr, out_ptr, WITH_C: tl.constexpr):
    row, depth = tl.arange(0, 64), tl.arange(0, 128)
    a = tl.load(a_ptr + row[:, None] * 128 + depth[None, :])
    b = tl.load(b_ptr + row[:, None] * 128 + depth[None, :])
    if WITH_C:
        out = tl.dot(a, tl.trans(b), tl.load(c_ptr + row[:, None] * 64 + row[None, :]))
    else:
        out = tl.dot(a, tl.trans(b))
    tl.store(out_ptr + row[:, None] * 64 + row[None, :], out)


@triton.jit
def _cast_kernel(x_ptr, code_ptr, back_ptr, N: tl.constexpr):
    place = tl.arange(0, N)
    code = tl.load(x_ptr + place).to(tl.float8e4nv)
    tl.store(code_ptr + place, code)
    tl.store(back_ptr + place, code.to(tl.float32))


@pytest.mark.parametrize("with_c", [False, True])
def test_a_dot_has_the_tensor_cores_bits(random, with_c):
    codes = [random.integers(0, 127, (64, 128), dtype=np.uint8) | (random.integers(0, 2, (64, 128)) << 7) for _ in "ab"]
    a, b = (part.astype(np.uint8) for part in codes)
    c = tensorcore.dots(b, a)
    out = torch.full((64, 64), float("nan"))
    fp8 = [torch.from_numpy(part).view(torch.float8_e4m3fn) for part in (a, b)]
    _dot_kernel[(1,)](*fp8, torch.from_numpy(c), out, WITH_C=with_c)
    for row, column in random.integers(0, 64, (40, 2)):
        start = c[row, column] if with_c else np.float32(0)
        want = tensorcore.dot_scalar(a[row], b[column], tensorcore.WGMMA_E4M3, start)
        assert out[row, column].numpy().tobytes() == want.tobytes()
    if with_c:
        return
    plain = a.view(ml_dtypes.float8_e4m3fn).astype(np.float32) @ b.view(ml_dtypes.float8_e4m3fn).astype(np.float32).T
    assert (out.numpy() != plain).mean() > 0.5, "these inputs must tell the tensor core from plain float32"


def test_casts_to_and_from_e4m3_agree_with_the_reference():
    finite = [float(formats.decode_e4m3(code)) for code in range(0x7F)]
    middle = [(low + high) / 2 for low, high in pairwise(finite)]
    values = np.array([*finite, *middle, 464.0, 465.0, 1e30, np.inf, np.nan, 2.0**-11], np.float32)
    values = np.concatenate(
        [values, np.nextafter(values, np.float32(np.inf)), np.nextafter(values, np.float32(0)), -values]
    )
    values = np.resize(values, 1024)
    code = torch.zeros(1024, dtype=torch.uint8)
    back = torch.full((1024,), -1.0)
    _cast_kernel[(1,)](torch.from_numpy(values), code.view(torch.float8_e4m3fn), back, N=1024)
    for value, got, decoded in zip(values, code.tolist(), back.numpy(), strict=True):
        if np.isnan(value):
            assert got & 0x7F == 0x7F
            assert np.isnan(decoded)
            continue
        exact = formats.Fraction(float(value)) if np.isfinite(value) else float(value)
        assert got == formats.encode_e4m3(exact, Overflow.SATURATE) | (0x80 if np.signbit(value) and got == 0x80 else 0)
        assert decoded == np.float32(float(formats.decode_e4m3(got)))


@triton.jit
def _sum_kernel(x_ptr, out_ptr):
    place = tl.arange(0, 4)[:, None] * 2 + tl.arange(0, 2)[None, :]
    tl.store(out_ptr + tl.arange(0, 4), tl.sum(tl.load(x_ptr + place), axis=1))


def test_a_sum_keeps_the_sign_of_zero():
    x = torch.tensor([[-0.0, -0.0], [0.0, -0.0], [1.0, -1.0], [2.0, 3.0]])
    out = torch.full((4,), float("nan"))
    _sum_kernel[(1,)](x, out)
    assert out.numpy().tobytes() == np.array([-0.0, 0.0, 0.0, 5.0], np.float32).tobytes()


def test_other_dots_are_refused():
    @triton.jit
    def kernel(a_ptr, out_ptr):
        place = tl.arange(0, 32)[:, None] * 32 + tl.arange(0, 32)[None, :]
        a = tl.load(a_ptr + place)
        tl.store(out_ptr + place, tl.dot(a, a))

    with pytest.raises(Exception, match="E4M3 dots only") as refusal:
        kernel[(1,)](torch.ones(32, 32, dtype=torch.float16), torch.zeros(32, 32))
    assert isinstance(refusal.value.__cause__ or refusal.value, UnsupportedConfiguration)


def test_a_changed_interpreter_is_refused():
    class Changed:
        def create_dot(self, a, b):
            """Another form."""

    with pytest.raises(BackendUnavailable, match="interpreter changed: create_dot"):
        emulator._demand_form(Changed, "create_dot", emulator._DOT_SIGNATURE)
    with pytest.raises(BackendUnavailable, match="interpreter changed: create_fp_to_fp"):
        emulator._demand_form(Changed, "create_fp_to_fp", emulator._CAST_SIGNATURE)


def test_an_old_triton_is_refused(monkeypatch):
    monkeypatch.setattr(emulator, "_triton_version", lambda: (3, 6))
    with pytest.raises(BackendUnavailable, match=r"triton >= 3\.9"):
        emulator.install()


def run(code):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120, check=False
    )


def test_kernels_bound_to_the_compiler_cannot_be_emulated():
    done = run("import dosa_gpu.kernels.append\nfrom dosa_verify import emulator\nemulator.install()")
    assert "UnsupportedConfiguration: kernels are already bound to the compiler" in done.stderr


def test_the_plain_interpreter_does_not_pass_the_gate():
    done = run(
        "import os; os.environ['TRITON_INTERPRET'] = '1'\nimport torch\nfrom dosa_gpu import gate\n"
        "print(gate.witness_faults(torch.device('cpu')))"
    )
    assert "constructed dot 0: computed 131320.0, the contract sm90 says 131312.0" in done.stdout, done.stderr


CALL = (
    "import torch\nfrom dosa_gpu.api import select_prefill\nf8 = torch.float8_e4m3fn\n"
    "ks = torch.zeros(1, dtype=torch.int32)\n"
    "q, k = torch.ones(1, 32, 128).to(f8), torch.ones(9, 128).to(f8)\n"
    "select_prefill(q, k, torch.ones(9), torch.ones(1, 32), ks, ks + 9, 3)"
)


@pytest.mark.parametrize(
    "start", ["", "import os; os.environ['TRITON_INTERPRET'] = '1'\n"], ids=["plain", "interpreter"]
)
def test_a_cpu_call_without_the_emulator_says_what_to_call(start):
    assert "BackendUnavailable: tensors on the CPU: call dosa_verify.emulator.install()" in run(start + CALL).stderr
    done = run("from dosa_verify import emulator\nemulator.install()\n" + CALL)
    assert done.returncode == 0, done.stderr


@triton.jit
def _inner(x):
    return tl.sum(tl.where(x > 0, x + 1, 0), 0)


@triton.jit
def _outer_kernel(x_ptr, out_ptr, N: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, N))
    total = _inner(x) + tl.max(x, 0)
    if total > 5:
        total = total + _inner(x + 1)
    tl.store(out_ptr, total)


class TestQuicker:
    """What the emulator spares the interpreter changes nothing but time."""

    def test_the_same_members_are_replaced(self):
        packages = (tl, tl.core, tl.tensor, tl.math, tl.core.tensor_descriptor_base)

        def replaced(patch):
            scope = interpreter._LangPatchScope()
            for package in packages:
                patch(package, interpreter.interpreter_builder, scope)
            changed = [(package, name) for package, name, _ in scope._changes]
            scope.restore()
            return changed

        found = replaced(interpreter._patch_builtin)
        assert found == replaced(interpreter._patch_builtin.plain)
        # What this process replaced before and never restored is not replaced again, by either.
        assert len(found) > 100

    def test_the_language_is_whole_inside_a_kernel_and_restored_after_it(self):
        def members():
            inside = {name: vars(tl.tensor).get(name) for name in ("__add__", "__bool__", "__index__")}
            return inside | {name: getattr(tl, name) for name in ("load", "sum", "range", "reduce")}

        before = members()
        for values, want in (([3, -1, 4, 0], 9 + 4 + 13), ([-3, -1, -4, 0], 0)):
            out = torch.zeros(1, dtype=torch.int32)
            _outer_kernel[(1,)](torch.tensor(values, dtype=torch.int32), out, N=4)
            assert out.item() == want
            assert members() == before

    def test_a_kernel_that_fails_leaves_the_language_as_it_was(self):
        out = torch.zeros(1, dtype=torch.int32)
        with pytest.raises(Exception, match="arange"):
            _outer_kernel[(1,)](out, out, N=3)
        assert tl.core.is_builtin(tl.load)
        _outer_kernel[(1,)](torch.tensor([1, 2], dtype=torch.int32), out, N=2)
        assert out.item() == 5 + 2 + 7

    def test_types_are_those_of_the_plain_table(self):
        kinds = {tl.int1, tl.int8, tl.uint8, tl.int32, tl.uint32, tl.int64, tl.float32, tl.float64, tl.float8e4nv}
        every = [*kinds, *(tl.pointer_type(kind) for kind in kinds), *(tl.block_type(kind, [4, 8]) for kind in kinds)]
        every += [tl.block_type(tl.pointer_type(kind), [2]) for kind in kinds]
        for _ in range(2):
            for kind in every:
                assert interpreter._get_np_dtype(kind) == interpreter._get_np_dtype.plain(kind)

    def test_integers_still_overflow_aloud_where_that_is_asked_for(self, monkeypatch):
        large = torch.tensor([2**31 - 1, 0], dtype=torch.int32)
        out = torch.zeros(1, dtype=torch.int32)
        _outer_kernel[(1,)](large, out, N=2)
        options = dataclasses.replace(interpreter.interpreter_builder.options, debug=True)
        monkeypatch.setattr(interpreter.interpreter_builder, "options", options)
        with pytest.raises(Exception, match="int32 overflow detected"):
            _outer_kernel[(1,)](large, out, N=2)

    def test_an_interpreter_of_another_form_keeps_its_own_pace(self):
        def another(*_):
            raise AssertionError

        names = ("_patch_builtin", "_patch_lang", "_get_np_dtype")
        other = types.SimpleNamespace(**dict.fromkeys(names, another), interpreter_semantic=types.SimpleNamespace())
        emulator._quicken(other)
        assert all(getattr(other, name) is another for name in names)
        emulator._quicken(types.SimpleNamespace())
