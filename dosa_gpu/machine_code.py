"""What the compiler made of a scoring kernel: FP8 tensor-core chains only, or no result.

A Triton dot whose tile does not fit wgmma silently becomes f16 ``mma.sync`` with other bits (docs/arithmetic.md
counts them). Every scoring kernel is therefore checked after compilation: the PTX at run time, the
machine code (SASS) in the ahead-of-time test.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path

from dosa_ref.spec import HEAD_DIM, STEP_TERMS, UnsupportedConfiguration

STEPS_PER_DOT = HEAD_DIM // STEP_TERMS

# Accumulator registers, then two matrix descriptors, then whether the accumulator is added ("0" starts from zero).
_WGMMA = re.compile(
    r"wgmma\.mma_async\.\S*\.m64n\d+k32\.f32\.e4m3\.e4m3\s*(\{[^}]*\}),\s*%\w+,\s*%\w+,\s*(%?\w+),\s*1,\s*1;"
)
_ROUNDING = re.compile(r"\b(add|sub|mul|fma|mad)\.(r[nzmp]\.)?(ftz\.)?f32\b")


def ptx_faults(ptx: str) -> list[str]:
    """What is wrong with the PTX of a scoring kernel; empty if nothing.

    Right means: FP8 dots are ``wgmma ... k32 ... e4m3.e4m3`` in whole chains of four, no ``mma.sync`` stands beside
    them, and no float32 addition or product lies inside a chain.

    Args:
        ptx: the text that the compiler produced.
    """
    faults = []
    lines = ptx.splitlines()
    steps = [(place, match) for place, line in enumerate(lines) if (match := _WGMMA.search(line))]
    if not steps:
        faults.append("no FP8 wgmma instruction")
    if len(steps) != sum("wgmma.mma_async" in line for line in lines):
        faults.append("a wgmma instruction of another format")
    if len(steps) % STEPS_PER_DOT:
        faults.append(f"{len(steps)} FP8 wgmma instructions, not a multiple of {STEPS_PER_DOT}")
    if any("mma.sync" in line for line in lines):
        faults.append("mma.sync beside wgmma: other bits")
    if re.search(r"\.ftz\b", ptx):
        faults.append("an instruction that flushes subnormals to zero")
    for first in range(0, len(steps) - len(steps) % STEPS_PER_DOT, STEPS_PER_DOT):
        chain = steps[first : first + STEPS_PER_DOT]
        if len({match.group(1) for _, match in chain}) != 1:
            faults.append("a chain changes its accumulator")
        if [match.group(2) == "0" for _, match in chain] != [True, False, False, False]:
            faults.append("a chain does not start once from zero")
        if any(_ROUNDING.search(line) for line in lines[chain[0][0] : chain[-1][0]]):
            faults.append("a float32 rounding inside a dot's chain")
    return sorted(set(faults))


def require_tensor_core_chain(compiled: object) -> None:
    """Refuse a compiled scoring kernel whose PTX is not the proved chain.

    Args:
        compiled: what a Triton launch returns; None under the interpreter, where the emulator models the chain.

    Raises:
        UnsupportedConfiguration: the kernel was compiled to other instructions.
    """
    asm = getattr(compiled, "asm", None)
    if asm is None or getattr(compiled, "dosa_checked", False):
        return
    faults = ptx_faults(asm["ptx"])
    if faults:
        raise UnsupportedConfiguration(
            f"compiled scoring kernel: {'; '.join(faults)}; its scores would have other bits"
        )
    compiled.dosa_checked = True  # type: ignore[attr-defined]


def sass(cubin: bytes) -> str:
    """Machine code of a compiled kernel as text, by the disassembler that Triton ships."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(cubin)
        # cuobjdump looks for nvdisasm on the PATH; Triton ships both side by side.
        environment = {"PATH": str(tool.parent)}
        return subprocess.run(
            [str(tool), "--dump-sass", str(file)], check=True, capture_output=True, text=True, env=environment
        ).stdout


def sass_faults(text: str) -> list[str]:
    """What is wrong with the machine code of a scoring kernel; empty if nothing.

    Right means: ``QGMMA ... E4M3.E4M3`` in chains of four, whose first starts without an accumulator and whose others
    take the registers that the one before wrote; no ``HMMA``, ``QMMA`` or FP8 unpacking; no ``FADD``, ``FMUL`` or
    ``FFMA`` between the first and the last of a chain that touches the accumulator.

    Args:
        text: output of ``sass``.
    """
    faults = []
    lines = text.splitlines()
    chain = [(number, line) for number, line in enumerate(lines) if re.search(r"\bQGMMA\.", line)]
    if not chain:
        faults.append("no QGMMA")
    if len(chain) % STEPS_PER_DOT:
        faults.append(f"{len(chain)} QGMMA, not a multiple of {STEPS_PER_DOT}")
    others = [line.strip() for _, line in chain if "E4M3.E4M3" not in line or ".F32" not in line]
    faults += [f"QGMMA of another format: {line}" for line in others]
    for word in ("HMMA", "QMMA", "IMMA", "F2FP.F16.E4M3"):
        if re.search(rf"\b{re.escape(word)}", text):
            faults.append(f"{word} present")
    for position in range(0, len(chain) - len(chain) % STEPS_PER_DOT, STEPS_PER_DOT):
        block = chain[position : position + STEPS_PER_DOT]
        found = [re.search(r"QGMMA\.64x(\d+)x\S+\s+R(\d+)", line) for _, line in block]
        registers = {(int(match.group(2)), int(match.group(1)) // 2) if match else (0, 256) for match in found}
        if len(registers) != 1:
            faults.append(f"a chain changes its accumulator: {sorted(registers)}")
        accumulator = {name for first, count in registers for name in range(first, first + count)}
        starts_empty = [bool(re.search(r"\bRZ\b", line)) for _, line in block]
        if starts_empty != [True, False, False, False]:
            faults.append("a chain does not start once from zero")
        # The epilogue of another tile may run beside the chain; what reads or writes its accumulator may not.
        between = [line for line in lines[block[0][0] : block[-1][0]] if re.search(r"\b(FADD|FMUL|FFMA)\b", line)]
        if any(int(name) in accumulator for line in between for name in re.findall(r"\bR(\d+)", line)):
            faults.append("float32 arithmetic inside a chain")
    return sorted(set(faults))
