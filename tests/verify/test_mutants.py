"""The test of the fuzzer: faults seeded into our own kernels and pipeline, each found within a budget of cases.

A kernel mutant is the kernel's source with one piece of text replaced, loaded as a module of its own.
``python -m tests.verify.test_mutants OUT.json [SEEDS [COMMIT [NAME ...]]]`` records how soon each is found (or renews
the record of some).

Not visible to the emulator, and looked for elsewhere: offsets in 32 bits (lemmas ``kernel_offsets`` and
``index_arithmetic``), a scorer that compiles to ``mma.sync`` (machine code, ``tests/gpu/test_machine_code.py``).

Equivalent, so never found: ``bound <= tau`` for ``bound < tau`` (slack keeps a bound strictly above its score, so a key
whose bound equals ``tau`` scores less); ``passing > topk`` for ``passing >= topk`` in the search for a threshold (where
they are equal, the threshold comes out as a lower score, all of whose ties are then left out); a NaN that passes the
top-K kernel's filter (its comparisons keep it out once more). Nearly so, and found by a random search but by no
directed case: order codes in which -0.0 lies below 0.0, since the kernel compares scores, not codes.
"""

import dataclasses
import importlib.util
import json
import sys
import tempfile
from pathlib import Path

import pytest
import torch

import dosa_gpu
import dosa_verify
from dosa_verify.fuzz import logits, logits_runner, runner
from dosa_verify.targets import logits as targets
from dosa_verify.targets.dosa import KernelTarget

BUDGET = 60
"""Cases within which each mutant must be found."""
RECORD = Path(dosa_verify.__file__).resolve().parent.parent / "docs" / "evidence" / "mutants.json"
"""Says which directed case finds each mutant."""
SEARCHED = 60
"""Random cases of a search that is only measured."""


@dataclasses.dataclass(frozen=True)
class OneVariant(KernelTarget):
    """Our kernels in one mode."""

    variant: str = "both"

    @property
    def variants(self):
        return (self.variant,)


class Mutator:
    """Puts mutated code in the place of ours until the test ends."""

    def __init__(self, monkeypatch, folder):
        self.monkeypatch, self.folder = monkeypatch, folder

    def load(self, file, old, new):
        """The module of a source file of ``dosa_gpu`` in which the only occurrence of ``old`` is replaced."""
        source = (Path(dosa_gpu.__file__).parent / file).read_text(encoding="utf-8")
        assert source.count(old) == 1, f"{file} has {source.count(old)} x {old!r}"
        path = self.folder / f"mutant_{Path(file).name}"
        path.write_text(source.replace(old, new), encoding="utf-8")
        spec = importlib.util.spec_from_file_location(path.stem, path)
        module = importlib.util.module_from_spec(spec)
        self.monkeypatch.setitem(sys.modules, path.stem, module)
        spec.loader.exec_module(module)
        return module

    def kernel(self, name, old, new):
        """Mutate ``launch_<name>`` for the pipeline and for the top-K target."""
        from dosa_gpu import kernels, pipeline

        module = self.load(f"kernels/{name}.py", old, new)
        launcher = f"launch_{name}"
        self.monkeypatch.setattr(pipeline, launcher, getattr(module, launcher))
        self.monkeypatch.setattr(getattr(kernels, name), launcher, getattr(module, launcher))

    def helper(self, file, name, users, old, new):
        """Mutate a function of one kernel file inside the kernels that use it."""
        module = self.load(f"kernels/{file}.py", old, new)
        for user in users:
            kernel = getattr(importlib.import_module(f"dosa_gpu.kernels.{user}"), f"_{user}_kernel")
            self.monkeypatch.setitem(getattr(kernel, "fn", kernel).__globals__, name, getattr(module, name))

    def heads(self, old, new):
        """Mutate the head combination inside the scoring kernels."""
        self.helper("combine_heads", "combine_heads", ("rescore", "score", "score_lists"), old, new)

    def pipeline(self, old, new):
        """Mutate the pipeline."""
        self.monkeypatch.setattr(dosa_gpu, "pipeline", self.load("pipeline.py", old, new))

    def wrap(self, name, change):
        """Replace a function of the pipeline by ``change(plain)``."""
        from dosa_gpu import pipeline

        self.monkeypatch.setattr(pipeline, name, change(getattr(pipeline, name)))


def kernel(name, old, new):
    return lambda mutate: mutate.kernel(name, old, new)


def up(tau):
    return torch.nextafter(tau, torch.full_like(tau, torch.inf))


def own_seed_twice(plain):
    def choose(ks, ke, budget):
        seed = plain(ks, ke, budget)
        seed[:, 1] = seed[:, 0]
        return seed

    return choose


def racy_append(plain):
    """Survivors arrive in another order."""

    def compact(words, ks, ke, index, count, start, end):
        plain(words, ks, ke, index, count, start, end)
        for row in range(len(index)):
            listed = min(int(count[row]), index.shape[1])
            index[row, :listed] = index[row, :listed].flip(0)

    return compact


def guard_left_out(plain):
    def bound(column, coefficient, slack, *rest):
        plain(column, coefficient, torch.zeros_like(slack), *rest)

    return bound


def cut_survivors(mutate):
    """Survivors that the buffer does not hold are forgotten."""
    mutate.kernel("append", "full = count > stride", "count = tl.minimum(count, stride)\n    full = False")
    mutate.kernel("rescore", "tl.where(count > stride, 0, count)", "tl.minimum(count, stride)")


def tau_high_in_emit(plain):
    return lambda index, score, count, tau, *rest: plain(index, score, count, up(tau), *rest)


MUTANTS = {
    # name: (mode that runs, seeded fault)
    "emit_drops_keys_at_tau": ("both", kernel("append", "flag = (score >= tau)", "flag = (score > tau)")),
    "filter_drops_keys_at_tau": (
        "emit",
        kernel("score", "bits = tl.where(score >= tau, bit, 0)", "bits = tl.where(score > tau, bit, 0)"),
    ),
    "filter_sees_one_key_more": (
        "emit",
        lambda mutate: mutate.helper(
            "words", "store_words", ("score",), "_lowest(ke - first)", "_lowest(ke - first + 1)"
        ),
    ),
    "bound_misses_the_first_key": (
        "both",
        kernel("bound", "where(below, 0, bit)", "where(below | (span + order[:, None] == ks[None, :]), 0, bit)"),
    ),
    "bound_drops_nan": (
        "both",
        kernel("bound", "total * scale[:, None] < tau[None, :]", "(total * scale[:, None] >= tau[None, :]) == 0"),
    ),
    "guard_left_out": ("both", lambda mutate: mutate.wrap("launch_bound", guard_left_out)),
    "norm_of_another_key": (
        "both",
        kernel("bound", "tl.load(norm_ptr + safe_keys)", "tl.load(norm_ptr + safe_keys // 2)"),
    ),
    "tau_one_ulp_high": ("both", lambda mutate: mutate.wrap("launch_append", tau_high_in_emit)),
    "own_seed_counted_twice": ("both", lambda mutate: mutate.wrap("own_seeds", own_seed_twice)),
    "seed_beyond_the_window": (
        "both",
        kernel("score_lists", "(key[:, None] < ke[None, :])", "(key[:, None] <= ke[None, :] + 8)"),
    ),
    "racy_append": ("both", lambda mutate: mutate.wrap("launch_compact", racy_append)),
    "last_word_left_out": ("both", kernel("compact", "(last + 31) // 32", "last // 32")),
    "overflow_cut": ("both", cut_survivors),
    "one_place_too_many": ("both", kernel("finish", "filled = place < count", "filled = place <= count")),
    "stale_running_list": (
        "both",
        lambda mutate: mutate.pipeline("        self.now[2].zero_()\n", "        self.now[2].fill_(1)\n"),
    ),
    "heads_in_source_order": (
        "dense",
        lambda mutate: mutate.heads(
            "total = r1 * w1\n    total = _accumulate(r0, w0, total)",
            "total = r0 * w0\n    total = _accumulate(r1, w1, total)",
        ),
    ),
    "product_rounded": (
        "dense",
        lambda mutate: mutate.heads(
            "return tl.fma(relu, tl.broadcast_to(weight, relu.shape), total)", "return relu * weight + total"
        ),
    ),
    "scale_of_another_place": (
        "both",
        kernel("rescore", "tl.load(k_scale_ptr + key)", "tl.load(k_scale_ptr + place % 64)"),
    ),
    "a_tie_too_few": ("topk", kernel("topk", "(rank < ties)", "(rank < ties - 1)")),
    "all_ties_copied": ("topk", kernel("topk", "+ tl.minimum(rank, ties)", "+ rank")),
    "late_ties_copied": ("topk", kernel("topk", "e3 * (rank + e0 + e1 + e2 < ties)", "e3 * (rank < ties)")),
    "search_stops_early": (
        "topk",
        kernel("topk", "while (low < high) & (reached > enough)", "while (low + 64 < high) & (reached > enough)"),
    ),
    # Beyond the end of a row there may be no memory to read.
    "one_column_before_the_start": (
        "topk",
        kernel(
            "topk", "b_start = tl.load(b_start_ptr + row)", "b_start = tl.maximum(tl.load(b_start_ptr + row) - 1, 0)"
        ),
    ),
}


def find(mode, device, folder, *, seed=0, directed=True):
    """Fuzz in one mode; gives the report."""
    examples = 0 if directed else SEARCHED
    if mode == "topk":
        return logits_runner.run(
            targets.make("topk", device), examples=examples, seed=seed, folder=folder, directed=directed
        )
    target = OneVariant(name="dosa", device=device, variant=mode)
    return runner.run(target, examples=examples, seed=seed, folder=folder, directed=directed)


def directed_case(mode, device, number):
    """One of the cases of a run, counted from 1; None if there are not so many."""
    if mode == "topk":
        _, _, usual = logits_runner._sizes(targets.make("topk", device).promise)
        cases = list(logits.directed_cases(usual))
    else:
        cases = list(runner.directed_cases())
    return cases[number - 1] if number is not None and number <= len(cases) else None


def is_found_by(mode, device, case):
    """Whether a case alone finds the fault that is in the kernels."""
    if mode == "topk":
        return logits_runner.check_logits(targets.make("topk", device), logits.build(case)) is not None
    return runner.check_case(OneVariant(name="dosa", device=device, variant=mode), case) is not None


@pytest.mark.parametrize("name", MUTANTS)
def test_each_mutant_is_found(name, device, monkeypatch, tmp_path):
    """By the case that the record names; where that one no longer finds it, within a run as `measure` does it."""
    mode, apply = MUTANTS[name]
    recorded = json.loads(RECORD.read_text(encoding="utf-8"))["mutants"].get(name, {}).get("directed")
    case = directed_case(mode, device, recorded)
    assert case is None or not is_found_by(mode, device, case), "the kernels as they are must pass this case"
    monkeypatch.setattr(runner, "SHRINK_SECONDS", 0.0)  # to find it is enough here
    apply(Mutator(monkeypatch, tmp_path))
    if case is not None and is_found_by(mode, device, case):
        return
    report = find(mode, device, tmp_path)
    assert report.failure is not None, f"{name} survived {report.cases} cases"
    assert report.cases <= BUDGET


def measure(file, seeds=3, commit=None, *names):
    """Record how many cases each mutant takes: directed ones, and random ones alone for some seeds."""
    from dosa_verify.environment import environment
    from dosa_verify.targets.dosa import Device, connect, cuda_is_available

    device = Device.CUDA if cuda_is_available() else Device.CPU
    connect(device)
    found = json.loads(Path(file).read_text(encoding="utf-8"))["mutants"] if names else {}
    for name, (mode, apply) in MUTANTS.items():
        if names and name not in names:
            continue
        counts = []
        for seed in (None, *range(int(seeds))):
            with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
                patch.setattr(runner, "SHRINK_SECONDS", 0.0)
                apply(Mutator(patch, Path(folder)))
                report = find(mode, device, Path(folder), seed=seed or 0, directed=seed is None)
            counts.append(report.cases if report.failure is not None else None)
        found[name] = {"mode": mode, "directed": counts[0], "searches": counts[1:]}
        record = {"kind": "mutants", "command": f"python -m tests.verify.test_mutants OUT.json {seeds}"}
        where = environment()
        where["git_commit"] = where["git_commit"] or commit
        known = {name: found[name] for name in MUTANTS if name in found}
        record |= {"budget": BUDGET, "searched": SEARCHED, "environment": where, "mutants": known}
        Path(file).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    measure(*sys.argv[1:])
