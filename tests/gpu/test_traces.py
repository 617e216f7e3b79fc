"""Real traces: the pruned path in all modes, the reference, and an independent sort of the scores, index for index.

The bundled trace is always there, in all modes. ``DOSA_TRACES`` names a folder of more (files ``dosa.trace/1``); three
rows of each are taken, on a CPU in half of the combinations: all of them lie in ``docs/evidence/emulator.json``.
"""

import os
from pathlib import Path as FilePath

import numpy as np
import pytest

import dosa_verify
from dosa_gpu import api
from dosa_gpu.plan import Path
from dosa_ref import scorer, select, trace
from dosa_ref.problem import PrefillProblem
from dosa_ref.spec import Mode
from dosa_verify.targets.dosa import Device, to_torch

BUNDLED = sorted((FilePath(dosa_verify.__file__).parent / "data").glob("*.safetensors"))
MORE = sorted(FilePath(os.environ["DOSA_TRACES"]).glob("*.safetensors")) if os.environ.get("DOSA_TRACES") else []
ROWS = 3
MEASURED_ELSEWHERE = ((Mode.BASE, 256), (Mode.BASE, 2048), (Mode.PRUNE, 2048), (Mode.EMIT, 256))
"""Combinations that the emulator's evidence has for further traces; here they would take minutes."""


def independent_sort(logits, topk):
    """Top-K by a full sort on (score descending, key ascending), written apart from ``exact_topk``."""
    ranked = [(-(score + 0.0), key) for key, score in enumerate(logits.tolist()) if score == score]
    ranked.sort()
    return sorted(key for _, key in ranked[:topk])


@pytest.fixture(scope="module", params=[*BUNDLED, *MORE], ids=lambda file: file.stem)
def scored(request):
    """The last rows of a trace with their scores by the bit model."""
    problem = trace.load_trace(request.param).problem
    problem = problem.rows(len(problem.q) - ROWS, len(problem.q))
    return request.param, problem, [scorer.score_row(problem, row) for row in range(ROWS)]


@pytest.mark.parametrize("topk", [2048, 256])
@pytest.mark.parametrize("mode", list(Mode), ids=lambda mode: mode.value)
def test_every_index_and_score_of_the_pruned_path(scored, mode, topk, device):
    file, problem, logits = scored
    if device == "cpu" and file in MORE and (mode, topk) in MEASURED_ELSEWHERE:
        pytest.skip("in docs/evidence/emulator.json")
    parts = (problem.q, problem.k, problem.k_scale, problem.weights, problem.cu_seqlen_ks, problem.cu_seqlen_ke)
    tensors = [to_torch(part, Device(device)) for part in parts]
    selection = api.select_prefill(*tensors, topk, path=Path.DOSA, mode=mode)
    indices, scores = selection.topk_indices.cpu().numpy(), selection.scores.cpu().numpy()
    for row in range(ROWS):
        start = int(problem.cu_seqlen_ks[row])
        want = independent_sort(logits[row], topk)
        found = indices[row][indices[row] >= 0] - start
        assert found.tolist() == want
        got_bits, want_bits = scores[row][: len(want)].view(np.uint32), logits[row][want].view(np.uint32)
        np.testing.assert_array_equal(got_bits, want_bits)
        by_reference = select.exact_topk(logits[row], topk)
        assert by_reference[by_reference >= 0].tolist() == want
    if topk == 256 and mode in (Mode.PRUNE, Mode.BOTH):
        # Exact by the dense path alone would prove nothing.
        pruned = [done and rate > 0 for done, rate in zip(selection.stats.row_pruned, selection.stats.row_prune_rate)]
        # One of the rows is the pilot, which is scored densely too.
        assert sum(pruned) >= ROWS - 1, selection.stats


def test_the_references_own_modes_agree_on_a_real_row():
    problem = trace.load_trace(BUNDLED[0]).problem
    problem = PrefillProblem(
        q=problem.q[-1:], k=problem.k, k_scale=problem.k_scale, weights=problem.weights[-1:],
        cu_seqlen_ks=problem.cu_seqlen_ks[-1:], cu_seqlen_ke=problem.cu_seqlen_ke[-1:], topk=problem.topk,
    )  # fmt: skip
    hashes = {
        select.result_hash(result.topk_indices, result.scores)
        for result in (select.select_dense(problem), *(select.select_prefill(problem, mode) for mode in Mode))
    }
    assert len(hashes) == 1
