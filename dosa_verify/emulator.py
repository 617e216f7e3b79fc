"""One arithmetic on two machines: Triton's interpreter with the tensor cores of the contract ``sm90``.

Triton's CPU interpreter multiplies FP8 tiles in float32; wgmma does not. ``install`` replaces that operation by the
accumulation model of ``dosa_ref.tensorcore``, and two others whose bits are wrong there: casts from and to FP8, and
sums of negative zeros. With that the same kernel source gives on a CPU the bits that it gives on an H200. The emulator
always models wgmma: kernels that would compile to other instructions, and races, show only in compiled code or on a
GPU.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
from typing import Any

import ml_dtypes
import numpy as np

from dosa_ref import spec, tensorcore
from dosa_ref.spec import BackendUnavailable, UnsupportedConfiguration

MIN_TRITON = (3, 9)
"""Older interpreters round an ``fma`` twice."""

_DOT_SIGNATURE = ("self", "a", "b", "d", "input_precision", "max_num_imprecise_acc")
_CAST_SIGNATURE = ("self", "src", "dst_type", "rounding_mode")
_SUM_SIGNATURE = ("self", "input")
_KERNELS = "dosa_gpu.kernels"


def _triton_version() -> tuple[int, ...]:
    version = importlib.import_module("triton").__version__
    return tuple(int(part) for part in version.split("+")[0].split(".")[:2])


def _demand_form(builder: type, name: str, expected: tuple[str, ...]) -> Any:
    method = getattr(builder, name, None)
    found = tuple(inspect.signature(method).parameters) if method is not None else ()
    if found != expected:
        raise BackendUnavailable(
            f"Triton's interpreter changed: {name}{found} instead of {expected}; the emulator cannot replace it safely"
        )
    return method


def install() -> None:
    """Switch this process to the emulator. Call it before anything imports a kernel; a second call does nothing.

    Raises:
        BackendUnavailable: Triton is missing, older than 3.9, or its interpreter no longer has the replaced methods.
        UnsupportedConfiguration: kernels are already bound to the compiler in this process.
    """
    if importlib.util.find_spec("triton") is None:
        raise BackendUnavailable("the emulator needs triton >= 3.9; it is not installed")
    bound = [name for name in sys.modules if name.startswith(_KERNELS + ".")]
    if os.environ.get("TRITON_INTERPRET") != "1" and bound:
        raise UnsupportedConfiguration(
            "kernels are already bound to the compiler; use another process for the emulator"
        )
    os.environ["TRITON_INTERPRET"] = "1"
    if _triton_version() < MIN_TRITON:
        raise BackendUnavailable(
            f"the emulator needs triton >= 3.9, found {importlib.import_module('triton').__version__}"
        )
    interpreter = importlib.import_module("triton.runtime.interpreter")
    builder = interpreter.InterpreterBuilder
    if getattr(builder.create_dot, "models_wgmma", False):
        return
    plain_dot = _demand_form(builder, "create_dot", _DOT_SIGNATURE)
    plain_cast = _demand_form(builder, "create_fp_to_fp", _CAST_SIGNATURE)
    reductions = interpreter.ReduceOps
    _demand_form(reductions, "sum", _SUM_SIGNATURE)
    handle_type = interpreter.TensorHandle

    def create_dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
        kinds = {str(a.dtype.scalar), str(b.dtype.scalar)}
        if kinds in ({"fp32"}, {"fp64"}):
            # Query preparation: any order of additions is allowed there, so these bits need no model.
            return plain_dot(self, a, b, d, input_precision, max_num_imprecise_acc)
        if kinds != {"fp8e4nv"}:
            raise UnsupportedConfiguration(f"the emulator models E4M3 dots only, got {a.dtype} x {b.dtype}")
        product = tensorcore.dots(
            np.ascontiguousarray(a.data),
            np.ascontiguousarray(b.data.T),
            tensorcore.WGMMA_E4M3,
            d.data if d.data.any() else None,
        )
        return handle_type(product, d.dtype.scalar)

    create_dot.models_wgmma = True  # type: ignore[attr-defined]
    builder.create_dot = create_dot

    def create_fp_to_fp(self: Any, src: Any, dst_type: Any, rounding_mode: Any) -> Any:
        source, target = str(src.dtype.scalar), str(dst_type.scalar)
        if "fp8e4nv" not in (source, target):
            return plain_cast(self, src, dst_type, rounding_mode)
        if (source, target) == ("fp8e4nv", "fp32"):
            return handle_type(src.data.view(ml_dtypes.float8_e4m3fn).astype(np.float32), dst_type.scalar)
        if (source, target) == ("fp32", "fp8e4nv"):
            # The GPU's cast saturates; NaN stays NaN. Clipping first keeps the rounding to nearest even of the rest.
            limited = np.clip(src.data, -spec.E4M3_MAX, spec.E4M3_MAX).astype(np.float32)
            return handle_type(limited.astype(ml_dtypes.float8_e4m3fn).view(np.uint8), dst_type.scalar)
        raise UnsupportedConfiguration(f"the emulator casts E4M3 from and to float32 only, got {source} to {target}")

    builder.create_fp_to_fp = create_fp_to_fp

    def sum_of_elements(self: Any, input: Any) -> Any:  # noqa: A002 (the replaced method's own name for it)
        data = input.handle.data
        # NumPy starts a sum from +0.0, the GPU from the first element: the sum of two -0.0 is -0.0 there.
        start = -0.0 if np.issubdtype(data.dtype, np.floating) else 0
        total = np.sum(data, axis=self.axis, keepdims=self.keep_dims, initial=start)
        return self.to_tensor(total, input.dtype)

    reductions.sum = sum_of_elements
    _quicken(interpreter)


def _quicken(interpreter: Any) -> None:
    """Take costs out of Triton's interpreter that decide no bit; where its form is another one, they stay.

    Every call of a device function replaces the members of ``triton.language`` that its kernel has replaced already,
    after a look through all members for those to replace; every operation builds a table of NumPy's types; and every
    sum, difference and product of integers is followed by a check for overflow whose outcome nobody asks for.
    """
    language = importlib.import_module("triton.language")
    if _has_form(interpreter, "_patch_builtin", ("pkg", "builder", "scope")):
        plain_builtin, is_builtin, patch_attr = (
            interpreter._patch_builtin,
            language.core.is_builtin,
            interpreter._patch_attr,
        )
        # Taken now, while nothing is replaced yet: replaced members are no longer recognised.
        descriptors = [getattr(language.core, "tensor_descriptor_base", None)]
        packages = [language, language.core, language.tensor, language.math, *filter(None, descriptors)]
        names = {
            package: [name for name, member in inspect.getmembers(package) if is_builtin(member)]
            for package in packages
        }

        def patch_builtin(pkg: Any, builder: Any, scope: Any) -> None:
            if pkg not in names:
                plain_builtin(pkg, builder, scope)
                return
            for name in names[pkg]:
                member = getattr(pkg, name)
                if is_builtin(member):
                    patch_attr(pkg, name, member, builder, scope)

        interpreter._patch_builtin = _replacing(plain_builtin, patch_builtin)
    if _has_form(interpreter, "_patch_lang", ("fn",)):
        plain_lang = interpreter._patch_lang
        seen: dict[Any, frozenset[Any]] = {}
        replaced: set[Any] = set()
        """Modules whose members are replaced while a kernel runs."""

        def patch_lang(fn: Any) -> Any:
            if fn not in seen:
                values = [value for value in fn.__globals__.values() if inspect.ismodule(value)]
                seen[fn] = frozenset(value for value in values if value in (language, language.core))
            if seen[fn] and seen[fn] <= replaced:
                return interpreter._LangPatchScope()
            scope = plain_lang(fn)
            if not replaced:
                # The kernel's own: the interpreter restores this one alone, after the kernel.
                scope.restore = _clearing(replaced, scope.restore)
            replaced.update(seen[fn])
            return scope

        interpreter._patch_lang = _replacing(plain_lang, patch_lang)
    if _has_form(interpreter, "_get_np_dtype", ("tt_dtype",)):
        plain_type = interpreter._get_np_dtype
        known: dict[str, Any] = {}

        def np_type(tt_dtype: Any) -> Any:
            if tt_dtype.name not in known:
                known[tt_dtype.name] = plain_type(tt_dtype)
            return known[tt_dtype.name]

        interpreter._get_np_dtype = _replacing(plain_type, np_type)
    semantic: Any = getattr(interpreter, "interpreter_semantic", None)
    if _has_form(semantic, "binary_op_sanitize_overflow_impl", ("lhs", "rhs", "binary_op")):
        plain_check = semantic.binary_op_sanitize_overflow_impl

        def check_overflow(lhs: Any, rhs: Any, binary_op: Any) -> None:
            # Without this option the interpreter drops the condition after it was computed.
            if semantic.builder.options.debug:
                plain_check(lhs, rhs, binary_op)

        semantic.binary_op_sanitize_overflow_impl = _replacing(plain_check, check_overflow)


def _has_form(place: Any, name: str, parameters: tuple[str, ...]) -> bool:
    found = getattr(place, name, None)
    return found is not None and tuple(inspect.signature(found).parameters) == parameters


def _replacing(plain: Any, quick: Any) -> Any:
    quick.plain = plain
    return quick


def _clearing(replaced: set[Any], restore: Any) -> Any:
    def restore_and_clear() -> None:
        replaced.clear()
        restore()

    return restore_and_clear
