"""Who may prune: every lemma proved for this code's constants, and a device that computes the proved arithmetic.

The ledger and the files that it speaks of are read as package data; ``proofs`` itself is not imported, so the gate
works without any solver installed.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dosa_ref import spec
from dosa_ref.spec import UnprovedBound

if TYPE_CHECKING:
    import torch

LEDGER_SCHEMA = "dosa.ledger/1"
SHARED_SOURCES = ("encodings.py", "lemma.py", "prover.py", "terms.py")
"""Files of ``proofs`` that all statements are made of or decided by; each lemma's own file is named in its entry."""

_RAMP = [448.0, 128.0, -2.0] + [0.0] * 29 + [2.0] * 32 + [0.0] * 64
_RAMP_KEY = [256.0, 128.0, 4.0] + [0.0] * 29 + [4.0] * 32 + [0.0] * 64
WITNESSES: tuple[tuple[list[float], list[float], float], ...] = (
    # Exact 131320: the grid is 16 when the 32 products of 8 arrive, so each is cut; they arrive below 2^17 and survive
    # as 8s.
    (_RAMP, _RAMP_KEY, 131312.0),
    # Exact 131328: without the product of -8 the accumulator stands at 2^17 and every product of 8 is cut away.
    (_RAMP, [256.0, 128.0, 0.0, *_RAMP_KEY[3:]], 131072.0),
    # Exact 66488.5: 127 products of 7.5 vanish beside one of 65536; 1.4 % of the norm product, near the worst case.
    ([256.0] + [1.875] * 127, [256.0] + [4.0] * 127, 65536.0),
)
"""(query, key, the dot that the contract ``sm90`` computes). Other instructions and plain float32 give other bits."""


def ledger_folder() -> Path:
    """Folder of the ``proofs`` package, found without importing it.

    Raises:
        UnprovedBound: there is no such package, or it is another project's package of that name.
    """
    found = importlib.util.find_spec("proofs")
    for place in (found.submodule_search_locations or []) if found else []:
        if (Path(place) / "ledger.json").is_file():
            return Path(place)
    raise UnprovedBound("(all)", "no ledger.json in a package named proofs")


def check_ledger(folder: Path, lemmas: Iterable[str], constants: Mapping[str, str]) -> None:
    """Demand that each lemma is proved, unedited, and proved for these constants.

    Args:
        folder: the ``proofs`` package folder.
        lemmas: ids that the pruned path rests on.
        constants: name to exact text, as the kernels use them.

    Raises:
        UnprovedBound: names the first lemma that is missing, not proved, edited since, or proved for another constant;
            or the shared source that was edited since.
    """
    try:
        ledger = json.loads((folder / "ledger.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UnprovedBound("(all)", f"the ledger cannot be read: {error}") from error
    if not isinstance(ledger, dict) or ledger.get("schema") != LEDGER_SCHEMA:
        raise UnprovedBound("(all)", f"the ledger does not have the schema {LEDGER_SCHEMA}")
    shared = ledger.get("shared")
    if not isinstance(shared, dict) or set(shared) != set(SHARED_SOURCES):
        raise UnprovedBound("(all)", f"the ledger does not speak of the sources {', '.join(SHARED_SOURCES)}")
    for name in SHARED_SOURCES:
        if _sha256(folder / name) != shared[name]:
            raise UnprovedBound("(all)", f"{name} was edited (or is missing) since the lemmas were proved")
    entries = ledger.get("lemmas")
    if not isinstance(entries, dict):
        raise UnprovedBound("(all)", "the ledger has no table of lemmas")
    spoken_of: set[str] = set()
    for lemma in lemmas:
        if lemma not in entries:
            raise UnprovedBound(lemma, "not in the ledger")
        try:
            spoken_of |= _check_entry(folder, lemma, entries[lemma], constants)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise UnprovedBound(lemma, f"its entry in the ledger is malformed: {error!r}") from error
    unproved = sorted(set(constants) - spoken_of)
    if unproved:
        raise UnprovedBound("(all)", f"no lemma of the ledger speaks of the constant {unproved[0]}")


def _check_entry(folder: Path, lemma: str, entry: dict[str, Any], constants: Mapping[str, str]) -> set[str]:
    """Judge one lemma's entry; returns the constants that it was proved for."""
    if entry["result"] != "proved":
        raise UnprovedBound(lemma, f"the ledger says {entry['result']}, not proved")
    verdicts = {solver["name"]: solver["result"] for solver in entry["solvers"]}
    if set(verdicts.values()) != {"proved"}:
        raise UnprovedBound(lemma, f"its solvers do not agree that it is proved: {verdicts}")
    if not entry["mutants"] or any(mutant["status"] != "refuted" for mutant in entry["mutants"]):
        raise UnprovedBound(lemma, "it has no mutants, or one that was not refuted: the statement may be empty")
    if entry["smt2"]["path"] != f"smt2/{lemma}.smt2":
        raise UnprovedBound(lemma, f"its script is {entry['smt2']['path']}, another lemma's")
    for part in ("source", "smt2"):
        if _sha256(folder / entry[part]["path"]) != entry[part]["sha256"]:
            raise UnprovedBound(lemma, f"{entry[part]['path']} was edited (or is missing) since it was proved")
    # The words and the formula are hashed together: the ledger's statement is the one that the script refutes.
    script = (folder / entry["smt2"]["path"]).read_text(encoding="utf-8")
    formula = script[script.index("(set-logic") :]
    if hashlib.sha256(f"{entry['statement']}\n{formula}".encode()).hexdigest() != entry["statement_sha256"]:
        raise UnprovedBound(lemma, "the ledger's statement is not that of its script")
    for name, proved in entry["constants"].items():
        if constants.get(name) != proved:
            raise UnprovedBound(lemma, f"proved for {name} = {proved}, the kernels use {constants.get(name)}")
    return set(entry["constants"])


def _sha256(file: Path) -> str | None:
    return hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else None


@functools.lru_cache(maxsize=1)
def require_proved() -> None:
    """``check_ledger`` for the bound kernel and ``dosa_ref.spec``, once per process.

    Raises:
        UnprovedBound: see ``check_ledger``.
    """
    from dosa_gpu.kernels.bound import LEMMAS

    # The values in use, not the table that was written when the module was loaded.
    in_use = {name: str(getattr(spec, name)) for name in spec.GUARD_CONSTANTS}
    check_ledger(ledger_folder(), LEMMAS, in_use)


def witness_faults(device: torch.device) -> list[str]:
    """Run the dense scorer on constructed dots; what differs from the contract ``sm90``, empty if nothing.

    Args:
        device: a CUDA device, or the CPU (Triton's interpreter).
    """
    import torch

    from dosa_gpu.kernels.score import launch_score

    # Head 0 carries the query with weight 1 and scale 1, so that the score is the dot itself.
    count = len(WITNESSES)
    heads = torch.zeros(count, 32, 128, dtype=torch.float32)
    heads[:, 0] = torch.tensor([query for query, _, _ in WITNESSES], dtype=torch.float32)
    weights = torch.zeros(count, 32, dtype=torch.float32, device=device)
    weights[:, 0] = 1.0
    q = heads.to(torch.float8_e4m3fn).to(device)
    k = torch.tensor([key for _, key, _ in WITNESSES], dtype=torch.float32).to(torch.float8_e4m3fn).to(device)
    ks = torch.zeros(count, dtype=torch.int32, device=device)
    logits = torch.full((count, 64), float("nan"), dtype=torch.float32, device=device)
    ones = torch.ones(count, dtype=torch.float32, device=device)
    launch_score(q, k, ones, weights, ks, ks + count, ones, logits, 0, count)
    faults = []
    for row, (_, _, expected) in enumerate(WITNESSES):
        got = logits[row, row].item()
        if struct.pack("<f", got) != struct.pack("<f", expected):
            faults.append(f"constructed dot {row}: computed {got!r}, the contract sm90 says {expected!r}")
    return faults


@functools.lru_cache
def _cuda_faults(index: int) -> tuple[str, ...]:
    import torch

    capability = torch.cuda.get_device_capability(index)
    if capability != (9, 0):
        name = torch.cuda.get_device_name(index)
        return (f"{name} has compute capability {capability[0]}.{capability[1]}; proved for sm_90 only",)
    return tuple(witness_faults(torch.device("cuda", index)))


def device_faults(device: torch.device) -> tuple[str, ...]:
    """Why no proved contract describes this device; empty if ``sm90`` does.

    Args:
        device: where the problem lies.
    """
    if device.type == "cuda":
        import torch

        return _cuda_faults(torch.cuda.current_device() if device.index is None else device.index)
    return tuple(witness_faults(device))


def require_contract(faults: tuple[str, ...]) -> None:
    """Demand a device whose arithmetic is the proved one.

    Args:
        faults: what ``device_faults`` said of it.

    Raises:
        UnprovedBound: says what was computed and what the contract says.
    """
    if faults:
        raise UnprovedBound("step_alignment", f"no proved contract describes this device: {faults[0]}")
