"""Faults of the tools that a verifier leans on: solvers and generators."""

import collections
import itertools
import json
from pathlib import Path

import hypothesis
import numpy as np
import pytest

import proofs
from dosa_ref.scorer import fma_float32
from dosa_verify.fuzz import cases, logits, runner
from dosa_verify.fuzz.strategies import cases as problem_cases

EXPORTS = sorted((Path(proofs.__file__).parent / "smt2").glob("*.smt2"))


@pytest.mark.parametrize(
    "operation", ["fp.min", "fp.max", "fp.rem", "fp.to_ieee_bv", "(_ FloatingPoint 4 4)", "(_ to_fp 4 4)", "Float8"]
)
def test_b105_no_lemma_uses_what_solvers_disagree_on(operation):
    """Z3Prover/z3#68, #492, #1674, #2085 (min, max, NaN bits); E4M3FN is no SMT float."""
    assert EXPORTS
    assert [file.name for file in EXPORTS if operation in file.read_text(encoding="utf-8")] == []


def test_b102_a_lemma_with_fma_is_proved_by_other_solvers_too():
    """Z3Prover/z3#10608, #6117."""
    ledger = json.loads((EXPORTS[0].parent.parent / "ledger.json").read_text(encoding="utf-8"))
    with_fma = [file.stem for file in EXPORTS if "fp.fma" in file.read_text(encoding="utf-8")]
    assert with_fma
    for lemma in with_fma:
        proved = {solver["name"] for solver in ledger["lemmas"][lemma]["solvers"] if solver["result"] == "proved"}
        assert proved >= {"z3", "cvc5", "bitwuzla"}, lemma


def test_b102_fma_of_this_z3_rounds_as_exact_arithmetic_does():
    z3 = pytest.importorskip("z3", reason="it is z3's own arithmetic that is tried")
    random = np.random.default_rng(102)
    bits = random.integers(0, 2**32, (4000, 3), dtype=np.uint64).astype(np.uint32)
    # Half of them near each other in size, so that the sum cancels or lands between neighbours.
    bits[::2] = (bits[::2] & 0x807FFFFF) | random.integers(115, 140, (2000, 3)).astype(np.uint32) << 23
    bits[::4, 2] = (bits[::4, 2] & 0x807FFFFF) | (np.uint32(24) << 23)
    for triple in bits:
        want = fma_float32(*triple.view(np.float32))
        floats = [z3.fpBVToFP(z3.BitVecVal(int(part), 32), z3.Float32()) for part in triple]
        got = z3.simplify(z3.fpToIEEEBV(z3.fpFMA(z3.RNE(), *floats)))
        assert np.isnan(want) or got.as_long() == int(np.float32(want).view(np.uint32)), triple


def test_b106_generators_do_draw_the_special_values():
    """HypothesisWorks/hypothesis#3606, #2206, #3153, #3155, #1899, #2608: count what was drawn, do not hope."""
    seen = collections.Counter()

    @hypothesis.seed(106)
    @hypothesis.settings(max_examples=300, deadline=None, database=None, phases=[hypothesis.Phase.generate])
    @hypothesis.given(problem_cases(), logits.logits_cases())
    def draw(problem_case, logits_case):
        count(problem_case, logits_case)

    def count(problem_case, logits_case):
        problem = cases.build(problem_case)
        q, k = problem.q.view(np.uint8), problem.k.view(np.uint8)
        seen["negative zero byte"] += bool((k == 0x80).any())
        seen["NaN byte in q"] += bool(((q & 0x7F) == 0x7F).any())
        seen["NaN byte in k"] += bool(((k & 0x7F) == 0x7F).any())
        seen["subnormal byte"] += bool((((k & 0x7F) > 0) & ((k & 0x7F) < 8)).any())
        scale = problem.k_scale
        seen["subnormal scale"] += bool(((np.abs(scale) > 0) & (np.abs(scale) < 2.0**-126)).any())
        seen["NaN scale"] += bool(np.isnan(scale).any())
        seen["fewer keys than topk"] += any(
            problem.window(row)[1] - problem.window(row)[0] < problem.topk for row in range(problem.seq_len)
        )
        rows = logits.build(logits_case)
        visible = [rows.logits[row, slice(*rows.window(row))] for row in range(len(rows.logits))]
        flat = np.concatenate([np.empty(0, np.float32), *visible])
        seen["-0.0 score"] += bool((np.signbit(flat) & (flat == 0)).any())
        seen["NaN score"] += bool(np.isnan(flat).any())
        seen["subnormal score"] += bool(((flat != 0) & (np.abs(flat) < 2.0**-126)).any())
        seen["infinite score"] += bool(np.isinf(flat).any())
        seen["empty row"] += any(len(part) == 0 for part in visible)

    draw()
    # A run of the fuzzer starts with these: Hypothesis alone may leave out a kind in hundreds of cases.
    directed = itertools.zip_longest(runner.directed_cases(), logits.directed_cases(10))
    for problem_case, logits_case in directed:
        count(problem_case or cases.Case(), logits_case or logits.LogitsCase())
    assert len(seen) == 12
    assert all(count > 0 for count in seen.values()), seen
