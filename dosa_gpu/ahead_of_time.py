"""Compile every scoring kernel for sm_90 without a GPU and look at the machine code.

``python -m dosa_gpu.ahead_of_time`` prints one JSON object per kernel variant (name, Triton version, instruction
counts, faults) and exits 1 if there is any fault. It needs a process of its own: in the interpreter's process kernels
cannot be compiled.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from typing import Any

from dosa_gpu.machine_code import ptx_faults, sass, sass_faults
from dosa_gpu.plan import GPU_TILE_KEYS
from dosa_ref.spec import SM90_NUM_HEADS

_POINTERS = {
    "q_ptr": "*fp8e4nv", "k_ptr": "*fp8e4nv", "column_ptr": "*fp8e4nv", "ks_ptr": "*i32", "ke_ptr": "*i32",
    "index_ptr": "*i32", "count_ptr": "*i32", "list_ptr": "*i32", "listed_ptr": "*i32",
}  # fmt: skip


def variants() -> Iterator[tuple[str, Any, dict[str, Any], dict[str, Any]]]:
    """(name, kernel, constexprs, options) of every variant that the launchers can start on a GPU."""
    from dosa_gpu.kernels import bound, rescore, score, score_lists

    for heads in SM90_NUM_HEADS:
        shape = {"HEADS": heads, "QUERIES": score.TILE_COLUMNS // heads, "KEYS": GPU_TILE_KEYS}
        for bits in (False, True):
            name = f"score H={heads} {'bits' if bits else 'logits'}"
            yield name, score._score_kernel, {**shape, "BITS": bits}, score.OPTIONS
        constants = {**shape, "PER_PROGRAM": GPU_TILE_KEYS * score_lists.TILES_PER_PROGRAM}
        yield f"score lists H={heads}", score_lists._score_lists_kernel, constants, score_lists.OPTIONS
        yield f"rescore H={heads}", rescore._rescore_kernel, {"HEADS": heads, "KEYS": GPU_TILE_KEYS}, rescore.OPTIONS
    for columns in bound.COLUMN_CHOICES:
        first, more = bound.dot_columns(columns)
        queries = bound.queries_per_tile(columns)
        constants = {"COLUMNS": first, "MORE": more, "QUERIES": queries, "KEYS": GPU_TILE_KEYS}
        yield f"bound M={columns}", bound._bound_kernel, constants, bound.OPTIONS


def compile_kernel(kernel: Any, constants: dict[str, Any], options: dict[str, Any]) -> Any:
    """Compile one kernel for sm_90 with 16-byte aligned pointers, as torch tensors have them.

    Args:
        kernel: a ``triton.jit`` function.
        constants: its constexpr arguments.
        options: compiler options.

    Returns:
        Triton's compiled kernel, with ``asm["ptx"]`` and ``asm["cubin"]``.
    """
    import triton
    from triton.backends.compiler import GPUTarget

    signature = {}
    for name in kernel.arg_names:
        if name in constants:
            signature[name] = "constexpr"
        elif name.endswith("_ptr"):
            signature[name] = _POINTERS.get(
                name, "*i32" if name == "out_ptr" and constants.get("BITS", True) else "*fp32"
            )
        else:
            signature[name] = "i32"
    aligned = {
        (place,): [["tt.divisibility", 16]] for place, name in enumerate(kernel.arg_names) if name.endswith("_ptr")
    }
    source = triton.compiler.ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def report() -> Iterator[dict[str, Any]]:
    """One record per variant."""
    import triton

    for name, kernel, constants, options in variants():
        compiled = compile_kernel(kernel, constants, options)
        text = sass(compiled.asm["cubin"])
        yield {
            "kernel": name,
            "triton": triton.__version__,
            "counts": {
                word: len(re.findall(rf"\b{word}\b", text)) for word in ("QGMMA", "HMMA", "FADD", "FMUL", "FFMA")
            },
            "faults": ptx_faults(compiled.asm["ptx"]) + sass_faults(text),
        }


def main() -> int:
    """Print the records; 1 if there is any fault."""
    faulty = False
    for record in report():
        sys.stdout.write(json.dumps(record) + "\n")
        sys.stdout.flush()
        faulty = faulty or bool(record["faults"])
    return 1 if faulty else 0


if __name__ == "__main__":
    sys.exit(main())
