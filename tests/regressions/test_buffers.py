"""Candidate buffers and coarse bins that overflow: winners lost in arrival order."""

import numpy as np


def test_b01_a_bin_with_more_scores_than_the_buffer(selects):
    """sgl-project/sglang#36807: 4096 candidates of an 8-bit half-precision bin."""
    scores = 1 + np.arange(8192) * 2.0**-15
    selects(scores, 2048, range(6144, 8192), whole=True)
    selects(scores[::-1], 2048, range(2048))


def test_b02_a_tie_buffer_for_scores_that_only_look_tied(selects):
    """sgl-project/sglang#35257, #37941: equal leading half-precision bits."""
    scores = np.concatenate([1 + np.arange(4096) * 2.0**-19, np.full(1000, 2.0)])
    selects(scores, 2048, [*range(4096, 5096), *range(3048, 4096)])


def test_b05_three_neighbouring_floats_on_a_long_row(selects, kernel):
    """flashinfer-ai/flashinfer#2604, #2605, #3529: a 16K refine buffer, then a race in its fallback."""
    j = np.arange(40000)
    scores = np.where(j % 40 == 0, 1 + 2.0**-22, np.where(j % 2 == 0, 1 + 2.0**-23, 1.0)).astype(np.float32)
    best = j[j % 40 == 0]
    others = j[(j % 2 == 0) & (j % 40 != 0)]
    selects(scores, 2048, [*best, *others[:1048]])
    first = kernel(scores[None], 2048)
    assert all((kernel(scores[None], 2048) == first).all() for _ in range(3))


def test_b06_equal_leading_22_bits(selects):
    """tile-ai/tilelang#1351: an illegal access when only the last ten bits differ."""
    j = np.arange(32768)
    low = (613 * j) % 1024
    selects((np.uint32(0x40200000) | low.astype(np.uint32)).view(np.float32), 2048, j[low >= 960])


def test_b07_a_realistic_row_in_one_half_precision_bucket(selects):
    """sgl-project/sglang#37591, #36745."""
    j = np.arange(20000)
    place = (7919 * j) % 20000
    selects(100 + place * 2.0**-12, 2048, j[place >= 17952])


def test_b10_scores_that_half_precision_calls_infinite(selects):
    """sgl-project/sglang#30645."""
    selects(70000.0 + np.arange(6000), 2048, range(3952, 6000), whole=True)


def test_b46_a_long_odd_row(selects):
    """NVIDIA/cudnn-frontend#311: 262,209 columns, no multiple of anything."""
    j = np.arange(262209, dtype=np.int64)
    place = (104729 * j) % 262209
    selects(place, 2048, j[place >= 260161])
