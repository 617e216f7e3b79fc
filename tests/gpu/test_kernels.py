"""Each kernel against NumPy or the reference, bit for bit, with everything around its output left alone."""

from fractions import Fraction

import numpy as np
import pytest
import torch

from dosa_gpu.kernels import bound, compact, key_norms, rescore, score, topk
from dosa_gpu.kernels.score_lists import launch_score_lists
from dosa_ref import formats, scorer, select

CANARY = -559038737


def codes(random, shape, finite=True):
    magnitude = random.integers(0, 127 if finite else 128, shape, dtype=np.uint8)
    return magnitude | (random.integers(0, 2, shape, dtype=np.uint8) << 7)


def fp8(array, device):
    return torch.from_numpy(np.ascontiguousarray(array)).to(device).view(torch.float8_e4m3fn)


def tensor(array, device):
    return torch.from_numpy(np.ascontiguousarray(array)).to(device)


def same_bits(got, want):
    """Equal bit for bit; a NaN is never selected, so its payload is nobody's business."""
    got, want = (np.ascontiguousarray(part).view(np.float32) for part in (got, want))
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    got, want = got[~np.isnan(got)], want[~np.isnan(want)]
    np.testing.assert_array_equal(np.ascontiguousarray(got).view(np.uint32), np.ascontiguousarray(want).view(np.uint32))


@pytest.fixture(params=[32, 64], ids=lambda heads: f"H{heads}")
def scoring(request, random, device):
    """Codes of every bit pattern (NaN keys included), any weights and scales; windows that start and end anywhere."""
    heads, rows, keys = request.param, 5, 203
    q, k = codes(random, (rows, heads, 128)), codes(random, (keys, 128))
    k[random.random(keys) < 0.05, 7] = 0x7F
    weights = random.normal(0, 1, (rows, heads)).astype(np.float32)
    scale = np.exp2(random.uniform(-20, 20, keys)).astype(np.float32)
    scale[:4] = [np.inf, np.nan, 0.0, -1.0]
    ks = np.array([0, 13, 64, 100, 77], np.int32)
    ke = np.array([203, 190, 64, 101, 141], np.int32)
    want = scorer.scores_sm90(q, weights, k, scale)
    arguments = (fp8(q, device), fp8(k, device), tensor(scale, device), tensor(weights, device))
    visible = (np.arange(keys) >= ks[:, None]) & (np.arange(keys) < ke[:, None])
    return arguments, tensor(ks, device), tensor(ke, device), want, visible


class TestScore:
    def test_logits_have_the_contracts_bits_inside_the_window_and_nothing_is_written_outside(self, scoring, device):
        arguments, ks, ke, want, visible = scoring
        out = torch.full((len(ks), 256), CANARY, dtype=torch.int32, device=device)
        logits = out.view(torch.float32)
        score.launch_score(*arguments, ks, ke, ke.float(), logits, 0, want.shape[1])
        got = out.cpu().numpy()
        same_bits(got[:, : want.shape[1]][visible], want[visible])
        assert (got[:, : want.shape[1]][~visible] == CANARY).all()
        assert (got[:, want.shape[1] :] == CANARY).all()

    def test_a_chunk_in_the_middle_lands_at_column_zero(self, scoring, device):
        arguments, ks, ke, want, visible = scoring
        logits = torch.full((len(ks), 70), float("nan"), device=device)
        score.launch_score(*arguments, ks, ke, ke.float(), logits, 50, 120)
        same_bits(logits.cpu().numpy()[visible[:, 50:120]], want[:, 50:120][visible[:, 50:120]])

    @pytest.mark.parametrize("same_windows", [False, True])
    def test_bits_say_score_at_least_tau(self, scoring, device, same_windows):
        arguments, ks, ke, want, visible = scoring
        if same_windows:
            ks, ke = torch.full_like(ks, 9), torch.full_like(ke, 190)
            visible = np.broadcast_to((np.arange(want.shape[1]) >= 9) & (np.arange(want.shape[1]) < 190), want.shape)
        # A score of each row as its tau: the comparison must keep equality.
        tau = np.array([np.nanmedian(row) for row in np.where(np.isfinite(want), want, np.nan)], np.float32)
        tau[0] = np.sort(want[0][np.isfinite(want[0])])[50]
        words = torch.full((len(ks), 7), CANARY, dtype=torch.int32, device=device)
        score.launch_score(*arguments, ks, ke, tensor(tau, device), words, 0, want.shape[1])
        got = ((words.cpu().numpy()[:, :, None] >> np.arange(32)) & 1).reshape(len(ks), -1)
        # Words that meet the window of their row are written as a whole, with 0 outside the window.
        padded = np.pad(visible, ((0, 0), (0, got.shape[1] - want.shape[1])))
        keep = padded & np.pad(want >= tau[:, None], ((0, 0), (0, got.shape[1] - want.shape[1])))
        met = np.repeat(padded.reshape(len(ks), 7, 32).any(-1), 32, axis=1)
        np.testing.assert_array_equal(got[met], keep[met])


class TestRescore:
    def test_listed_keys_get_the_dense_bits(self, scoring, random, device):
        arguments, _, _, want, _ = scoring
        rows, keys = want.shape
        listed = np.stack([np.sort(random.permutation(keys)[:150]) for _ in range(rows)]).astype(np.int32)
        # The list of the last row does not hold all its keys: it is passed over.
        count = np.array([150, 0, 1, 65, 151], np.int32)
        out = torch.full((rows, 150), CANARY, dtype=torch.int32, device=device)
        rescore.launch_rescore(*arguments, tensor(listed, device), tensor(count, device), out.view(torch.float32))
        got = out.cpu().numpy()
        count[-1] = 0
        for row in range(rows):
            same_bits(got[row, : count[row]], want[row][listed[row, : count[row]]])
            assert (got[row, count[row] :] == CANARY).all()


class TestScoreLists:
    @pytest.mark.parametrize("width", [1, 70, 300])
    def test_rows_of_a_group_get_the_dense_bits_on_its_list_and_nan_elsewhere(self, scoring, random, device, width):
        (q, k, scale, weights), ks, ke, want, visible = scoring
        q = torch.cat([q.view(torch.uint8)] * 2).view(torch.float8_e4m3fn)
        weights, ks, ke = (torch.cat([part, part]) for part in (weights, ks, ke))
        want, visible = np.concatenate([want, want]), np.concatenate([visible, visible])
        rows, keys = want.shape
        # Three lists for ten rows; keys come in any order, more than once, and not in every place.
        lists = random.integers(-keys // 4, keys, (3, width)).clip(-1).astype(np.int32)
        out = torch.full((rows, width + 3), CANARY, dtype=torch.int32, device=device)
        scores = out.view(torch.float32)[:, :width]
        held = np.array([width, width // 2, 0], np.int32)
        launch_score_lists(
            q, k, scale, weights, ks, ke, tensor(lists, device), tensor(held, device), 4, scores
        )  # fmt: skip
        lists[np.arange(width) >= held[:, None]] = -1
        listed = lists.repeat(4, axis=0)[:rows]
        inside = (listed >= 0) & np.take_along_axis(visible, listed.clip(0), axis=1)
        expected = np.where(inside, np.take_along_axis(want, listed.clip(0), axis=1), np.float32(np.nan))
        same_bits(scores.cpu().numpy(), expected)
        assert (out[:, width:] == CANARY).all()


class TestCompact:
    @pytest.mark.parametrize("capacity", [600, 100])
    def test_lists_the_set_bits_of_the_window_in_order(self, random, device, capacity):
        start, end = 30, 1130
        ks = np.array([30, 0, 500, 700, 1129, 1130], np.int32)
        ke = np.array([1130, 1200, 500, 995, 1130, 1200], np.int32)
        flags = random.random((len(ks), 1120)) < 0.3
        column = start + np.arange(1120)
        flags &= (column >= ks[:, None]) & (column < np.minimum(ke, end)[:, None])
        words = (flags.reshape(len(ks), -1, 32).astype(np.uint32) << np.arange(32, dtype=np.uint32)).sum(-1)
        # What lies outside the window's words was never written.
        word = np.arange(35) * 32
        outside = (word[None] + 32 <= (ks - start)[:, None]) | (word[None] >= (ke - start)[:, None])
        words = np.where(outside, 0xFFFFFFFF, words).astype(np.uint32).view(np.int32)
        index = torch.full((len(ks), capacity), CANARY, dtype=torch.int32, device=device)
        count = torch.full((len(ks),), CANARY, dtype=torch.int32, device=device)
        compact.launch_compact(*(tensor(part, device) for part in (words, ks, ke)), index, count, start, end)
        for row in range(len(ks)):
            want = column[flags[row]]
            assert count[row].item() == len(want)
            np.testing.assert_array_equal(index[row].cpu().numpy()[: len(want)], want[:capacity])
            assert (index[row, len(want) :] == CANARY).all()

    @pytest.mark.parametrize("density", [0.0, 0.02, 1.0])
    @pytest.mark.parametrize("columns", [160, 157])
    def test_segments_follow_one_another(self, random, device, monkeypatch, density, columns):
        monkeypatch.setattr(compact, "SEGMENT_WORDS", 32)
        monkeypatch.setattr(compact, "TILE_WORDS", 8)
        start, rows, capacity = 70, 3, 2000
        words = np.where(random.random((rows, columns)) < 0.2, 0xFFFFFFFF, 0) * (density > 0)
        words |= ((random.random((rows, columns, 32)) < density) << np.arange(32)).sum(-1)
        # One segment of the first row is empty, whatever its neighbours hold.
        words[0, 64:96] = 0
        end = start + columns * 32
        ks, ke = np.array([start, 0, start + 1500], np.int32), np.array([end, end + 99, start + 4096], np.int32)
        words[2, :46], words[2, 46], words[2, 128:] = 0, words[2, 46] & ~np.int64(0xFFFFFFF), 0
        index = torch.full((rows, capacity), CANARY, dtype=torch.int32, device=device)
        count = torch.full((rows,), CANARY, dtype=torch.int32, device=device)
        parts = (words.astype(np.uint32).view(np.int32), ks, ke)
        compact.launch_compact(*(tensor(part, device) for part in parts), index, count, start, end)
        for row in range(rows):
            want = start + np.flatnonzero((words[row, :, None] >> np.arange(32)) & 1)
            assert count[row].item() == len(want)
            np.testing.assert_array_equal(index[row].cpu().numpy()[: len(want)], want[:capacity])
            assert (index[row, len(want) :] == CANARY).all()

    @pytest.mark.parametrize("end", range(1, 70))
    def test_the_last_key_of_a_window_counts_wherever_it_lies(self, device, end):
        words = torch.full((1, 4), -1, dtype=torch.int32, device=device)
        words[0, -(-end // 32) :] = CANARY
        index = torch.full((1, 80), CANARY, dtype=torch.int32, device=device)
        count = torch.full((1,), CANARY, dtype=torch.int32, device=device)
        window = torch.tensor([[0], [end]], dtype=torch.int32, device=device)
        # Bits behind the window are 0, as the bound pass writes them.
        words[0, (end - 1) // 32] = (1 << ((end - 1) % 32 + 1)) - 1 if end % 32 else -1
        compact.launch_compact(words, window[0], window[1], index, count, 0, 100)
        assert count.item() == end
        assert index[0, :end].tolist() == list(range(end))


def score_rows(random, kind, keys):
    match kind:
        case "ties":
            return random.integers(0, 4, keys).astype(np.float32)
        case "signed zeros":
            return np.where(random.random(keys) < 0.5, np.float32(-0.0), np.float32(0.0))
        case "specials":
            pool = np.array([np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-45, -1e-45, 3.4e38, -3.4e38], np.float32)
            return pool[random.integers(0, len(pool), keys)]
        case "neighbours":
            return (np.uint32(0x40200000) | random.integers(0, 1024, keys).astype(np.uint32)).view(np.float32)
        case "bits":
            return random.integers(0, 2**32, keys, dtype=np.uint64).astype(np.uint32).view(np.float32)
        case _:
            return np.full(keys, np.nan, np.float32)


@pytest.mark.parametrize("kind", ["ties", "signed zeros", "specials", "neighbours", "bits", "all NaN"])
@pytest.mark.parametrize("wanted", [1, 5, 300])
class TestTopK:
    def run(self, a, b, base, device):
        (a_index, a_score), (b_index, b_score, start, end), wanted = a, b, a[0].shape[1]
        rows = len(a_index)
        out = (
            torch.full((rows, wanted), CANARY, dtype=torch.int32, device=device),
            torch.full((rows, wanted), CANARY, dtype=torch.int32, device=device),
            torch.full((rows,), CANARY, dtype=torch.int32, device=device),
        )
        count = (np.arange(wanted) < self.held[:, None]).sum(1).astype(np.int32)
        topk.launch_topk(
            tensor(a_index, device), tensor(a_score, device), tensor(count, device),
            None if b_index is None else tensor(b_index, device), tensor(b_score, device),
            tensor(start, device), tensor(end, device), base, (out[0], out[1].view(torch.float32), out[2]),
        )  # fmt: skip
        return [part.cpu().numpy() for part in out]

    @pytest.mark.parametrize("listed", [False, True], ids=["logits", "list"])
    def test_merges_two_segments_exactly(self, random, device, kind, wanted, listed):
        rows, keys, base = 3, 1500, 5000
        self.held = np.minimum(np.array([0, 1, wanted]), wanted)
        a_index = np.stack([np.sort(random.permutation(base)[:wanted]) for _ in range(rows)]).astype(np.int32)
        a_score = np.stack([score_rows(random, kind, wanted) for _ in range(rows)])
        b_score = np.stack([score_rows(random, kind, keys) for _ in range(rows)])
        start, end = np.array([0, 3, 700], np.int32), np.array([1500, 1490, 700], np.int32)
        column = base + np.arange(keys, dtype=np.int32)[None].repeat(rows, 0)
        column = np.sort(column * 2, axis=1) if listed else column
        b_index = column.astype(np.int32) if listed else None
        index, scores, count = self.run((a_index, a_score), (b_index, b_score, start, end), base, device)
        for row in range(rows):
            all_index = np.concatenate([a_index[row, : self.held[row]], column[row, start[row] : end[row]]])
            all_score = np.concatenate([a_score[row, : self.held[row]], b_score[row, start[row] : end[row]]])
            chosen = select.exact_topk(all_score, wanted)
            chosen = chosen[chosen >= 0]
            assert count[row] == len(chosen)
            np.testing.assert_array_equal(index[row, : len(chosen)], all_index[chosen])
            same_bits(scores[row, : len(chosen)], all_score[chosen])
            assert (index[row, len(chosen) :] == CANARY).all()


def long_rows(random, kind, shape):
    """Orders that make a streaming selection work hardest, and values at the edges of float32."""
    match kind:
        case "ascending":
            return np.sort(random.normal(size=shape).astype(np.float32))
        case "descending":
            return -np.sort(random.normal(size=shape).astype(np.float32))
        case "flood of zeros":
            return np.where(random.random(shape) < 0.05, random.normal(size=shape), 0.0).astype(np.float32)
        case "late winners":
            return np.where(np.arange(shape[-1]) < shape[-1] - 400, -np.inf, random.integers(0, 99, shape)).astype("f4")
        case "one step above":
            late = (np.arange(shape[-1]) >= shape[-1] // 2) & (random.random(shape) < 0.1)
            return np.where(late, np.nextafter(np.float32(1.5), np.float32(2)), np.float32(1.5))
        case "fair" | "misleading":
            return random.normal(size=shape).astype(np.float32)
        case "subnormals":
            signs = random.integers(0, 2, shape).astype(np.uint32) << 31
            return (random.integers(0, 3000, shape).astype(np.uint32) | signs).view(np.float32)
        case _:
            return score_rows(random, kind, shape)


LONG_KINDS = [
    "ascending", "descending", "flood of zeros", "late winners", "one step above", "subnormals",
    "neighbours", "specials",
]  # fmt: skip


class TestLongRows:
    """Buffers that are cut several times, parts of rows, more rows than programs, ``tau``, rows at any pitch."""

    @pytest.mark.parametrize(
        ("kind", "rows", "wanted", "pitch", "listed"),
        [
            *((kind, 1, 300, 0, False) for kind in LONG_KINDS),
            *((kind, 4, 40, 1, True) for kind in LONG_KINDS),
            *((kind, 4, 40, 0, False) for kind in ("one step above", "neighbours")),
        ],
    )
    def test_the_best_of_a_long_row(self, random, device, monkeypatch, kind, rows, wanted, pitch, listed):
        monkeypatch.setattr(topk, "INTERPRETER_TILE", 256)
        plain = torch.empty

        def empty(*arguments, **options):
            # What nobody wrote would win.
            buffer = plain(*arguments, **options)
            return buffer.fill_(torch.inf) if buffer.is_floating_point() else buffer

        monkeypatch.setattr(topk.torch, "empty", empty)
        keys, base = 3200, 4000
        held = np.array([wanted, 7, wanted, 0][:rows], np.int32)
        start, end = np.array([[3, 3199], [0, 3200], [3199, 3199], [402, 2901]][:rows], np.int32).T
        a_index = np.stack([np.sort(random.permutation(base)[:wanted]) for _ in range(rows)]).astype(np.int32)
        a_score = long_rows(random, kind, (rows, wanted))
        b_score = np.pad(long_rows(random, kind, (rows, keys)), ((0, 0), (0, pitch)))
        b_index = base + 3 * np.arange(keys + pitch, dtype=np.int32)[None].repeat(rows, 0)
        tau = np.full(rows, -np.inf, np.float32)
        for row in range(rows):
            # Winners at the edges of the window and of the parts, and beyond them what must not be seen.
            b_score[row, [start[row], 1599, 1600, end[row] - 1]] = 3e38
            place = np.arange(keys + pitch)
            b_score[row, (place < start[row]) | (place >= end[row])] = np.inf
            if listed and row == 1:
                window = b_score[row, start[row] : end[row]]
                tau[row] = np.sort(window[~np.isnan(window)])[-20]
        out = [torch.full((rows, wanted), CANARY, dtype=torch.int32, device=device) for _ in range(2)]
        count = torch.full((rows,), CANARY, dtype=torch.int32, device=device)
        topk.launch_topk(
            *(tensor(part, device) for part in (a_index, a_score, held)),
            tensor(b_index, device)[:, :keys] if listed else None, tensor(b_score, device)[:, :keys],
            tensor(start, device), tensor(end, device), base, (out[0], out[1].view(torch.float32), count),
            tau=tensor(tau, device) if listed else None,
        )  # fmt: skip
        index, scores = (part.cpu().numpy() for part in out)
        for row in range(rows):
            place = np.arange(start[row], end[row])
            if listed:
                place = place[b_score[row, place] >= tau[row]]
            all_index = np.concatenate([a_index[row, : held[row]], b_index[row, place] if listed else base + place])
            all_score = np.concatenate([a_score[row, : held[row]], b_score[row, place]])
            chosen = select.exact_topk(all_score, wanted)
            chosen = chosen[chosen >= 0]
            assert count[row].item() == len(chosen)
            np.testing.assert_array_equal(index[row, : len(chosen)], all_index[chosen])
            same_bits(scores[row, : len(chosen)], all_score[chosen])
            assert (index[row, len(chosen) :] == CANARY).all()

    @pytest.mark.parametrize("kind", ["fair", "misleading", "all NaN"])
    def test_a_guess_from_a_sample_changes_nothing(self, random, device, monkeypatch, kind):
        monkeypatch.setattr(topk, "INTERPRETER_TILE", 256)
        rows, keys, wanted, sample = 2, 9000, 300, 1024
        score = long_rows(random, kind, (rows, keys))
        if kind == "misleading":
            # High where the kernel looks for its guess, and nowhere else: fewer than wanted reach it.
            score = -np.abs(score)
            quad = np.arange(sample // 4)
            place = quad * 32 + (quad.astype(np.uint32) * np.uint32(2654435761) >> 16) % 8 * 4
            score[:, place[:200]] += 1000
        none = np.zeros(rows, np.int32)
        held = (np.zeros((rows, wanted), np.int32), np.zeros((rows, wanted), np.float32), none)
        out = [torch.full((rows, wanted), CANARY, dtype=torch.int32, device=device) for _ in range(2)]
        count = torch.full((rows,), CANARY, dtype=torch.int32, device=device)
        topk.launch_topk(
            *(tensor(part, device) for part in held), None, tensor(score, device),
            tensor(none, device), tensor(none + keys, device), 0, (out[0], out[1].view(torch.float32), count),
        )  # fmt: skip
        for row in range(rows):
            chosen = select.exact_topk(score[row], wanted)
            chosen = chosen[chosen >= 0]
            assert count[row].item() == len(chosen)
            np.testing.assert_array_equal(out[0][row, : len(chosen)].cpu().numpy(), chosen)
            same_bits(out[1][row, : len(chosen)].cpu().numpy(), score[row][chosen])

    def test_scratch_is_what_was_announced(self, device, monkeypatch):
        taken = []
        plain = torch.empty

        def empty(*arguments, **options):
            taken.append(plain(*arguments, **options))
            return taken[-1]

        monkeypatch.setattr(topk.torch, "empty", empty)
        for rows, keys in ((1, 3000), (3, 700), (3, 40000)):
            taken.clear()
            none = torch.zeros(rows, dtype=torch.int32, device=device)
            held = (torch.zeros(rows, 9, dtype=torch.int32, device=device), torch.zeros(rows, 9, device=device), none)
            out = tuple(part.clone() for part in held)
            topk.launch_topk(*held, None, torch.zeros(rows, keys, device=device), none, none + 100, 0, out)
            announced = topk.scratch_bytes(device, rows, 9, keys)
            assert sum(part.numel() * part.element_size() for part in taken) == announced
            assert out[2].tolist() == [9] * rows


class TestKth:
    @pytest.mark.parametrize("kind", [*LONG_KINDS, "ties", "signed zeros", "all NaN"])
    @pytest.mark.parametrize(("keys", "pitch"), [(1100, 0), (333, 2)])
    def test_the_kth_best_score_or_nan(self, random, device, kind, keys, pitch):
        score = np.full((2, keys + pitch), np.inf, np.float32)
        score[:, :keys] = long_rows(random, kind, (2, keys))
        score[1, random.permutation(keys)[: keys - 50]] = np.nan
        inside = np.arange(keys)[None] >= np.array([[0], [7]])
        inside &= np.arange(keys)[None] < np.array([[keys - 3], [keys]])
        seen = np.where(inside, score[:, :keys], np.nan)
        ordered = -np.sort(-np.where(np.isnan(seen), -np.inf, seen))
        counts = (~np.isnan(seen)).sum(1)
        start, end = (tensor(np.array(part, np.int32), device) for part in ([0, 7], [keys - 3, keys]))
        for wanted in (1, 43, 50, keys):
            out, hard = (torch.full((2,), 7.0, device=device) for _ in range(2))
            found = torch.full((2,), -7, dtype=torch.int32, device=device)
            rank = torch.full((2,), wanted, dtype=torch.int32, device=device)
            topk.launch_kth(tensor(score, device)[:, :keys], start, end, rank, 3, out, hard, found)
            assert found.tolist() == counts.tolist()
            want = np.where(counts >= wanted, ordered[:, wanted - 1], np.nan) + np.float32(0.0)
            same_bits(out.cpu().numpy(), want)
            least = np.minimum(3 * wanted, np.maximum(counts, 1)) - 1
            want = np.where(counts > 0, np.take_along_axis(ordered, least[:, None], 1)[:, 0], np.nan) + np.float32(0.0)
            same_bits(hard.cpu().numpy(), want)


class TestTrim:
    @pytest.mark.parametrize("kind", [*(kind for kind in LONG_KINDS if kind != "specials"), "ties", "signed zeros"])
    @pytest.mark.parametrize(("capacity", "wanted"), [(256, 60), (256, 200), (2048, 7)])
    def test_a_list_that_is_too_long_keeps_its_best_entries_in_order(self, random, device, kind, capacity, wanted):
        most = wanted + wanted // 4
        held = np.array([0, most, most + 1, capacity, capacity - 1], np.int32)
        score = long_rows(random, kind, (5, capacity))
        key = np.cumsum(random.integers(1, 9, (5, capacity)), axis=1).astype(np.int32)
        tau = np.array([0.5, 0.5, -np.inf, -np.inf, np.inf], np.float32)
        got = [tensor(part.copy(), device) for part in (key, score, held, tau)]
        topk.launch_trim(got[0], got[1], got[2], wanted, got[3])
        index, scores, count, raised = (part.cpu().numpy() for part in got)
        assert count.tolist() == [0, most, wanted, wanted, wanted]
        for row in range(5):
            inside = slice(0, held[row])
            best = np.sort(np.lexsort((key[row, inside], -score[row, inside].astype(np.float64)))[: count[row]])
            if row < 2:
                best = np.arange(held[row])
            np.testing.assert_array_equal(index[row, : count[row]], key[row, best])
            same_bits(scores[row, : count[row]], score[row, best])
        # tau never falls. A cut list's lies between its least entry and what was cut.
        assert raised[:2].tolist() == [0.5, 0.5]
        assert raised[4] == np.inf
        for row in (2, 3):
            least = scores[row, :wanted].min()
            assert raised[row] <= least
            assert raised[row] == least or (score[row, : held[row]] >= raised[row]).sum() == wanted


class TestEmptyParts:
    """A row whose window lies behind what a launch looks at: nothing there may be read, let alone counted."""

    def test_top_k_of_logits(self, random, device):
        score = random.normal(0, 1, (2, 64)).astype(np.float32)
        start, end = np.array([0, 2**29 + 1], np.int32), np.array([64, 2**29 + 1], np.int32)
        known = [torch.zeros(2, 5, dtype=dtype, device=device) for dtype in (torch.int32, torch.float32)]
        known.append(torch.zeros(2, dtype=torch.int32, device=device))
        out = [torch.full_like(part, -9) for part in known]
        topk.launch_topk(*known, None, tensor(score, device), tensor(start, device), tensor(end, device), 0, out)
        assert out[2].tolist() == [5, 0]
        np.testing.assert_array_equal(out[0][0].cpu().numpy(), np.sort(np.argsort(-score[0])[:5]))

    def test_compaction(self, device):
        words = torch.full((2, 4), 0b101, dtype=torch.int32, device=device)
        ks, ke = (torch.tensor(part, dtype=torch.int32, device=device) for part in ([0, 2**30 + 33], [128, 2**30 + 40]))
        index, count = torch.full((2, 8), -9, dtype=torch.int32, device=device), torch.empty_like(ks)
        compact.launch_compact(words, ks, ke, index, count, 0, 128)
        assert count.tolist() == [8, 0]
        assert index.tolist() == [[0, 2, 32, 34, 64, 66, 96, 98], [-9] * 8]


class TestKeyNorms:
    def test_norms_are_rounded_up_and_unusable_keys_get_infinity(self, random, device):
        k = codes(random, (400, 128))
        k[0] = 0
        k[1] = 0x80
        k[2] = 1  # subnormals only
        k[3, 5] = 0xFF
        scale = np.exp2(random.uniform(-39, 39, 400)).astype(np.float32)
        scale[4:10] = [np.nan, np.inf, -np.inf, 0.0, -1.0, 2.0**-41]
        scale[10:12] = [2.0**-40, 2.0**40]
        norm = torch.full((400,), float("nan"), device=device)
        bound_scale = torch.full((400,), float("nan"), device=device)
        key_norms.launch_key_norms(fp8(k, device), tensor(scale, device), norm, bound_scale)
        norm, bound_scale = norm.cpu().numpy(), bound_scale.cpu().numpy()
        assert np.isinf(norm[3:10]).all()
        assert (bound_scale[3:10] == 1.0).all()
        usable = np.r_[0:3, 10:400]
        same_bits(bound_scale[usable], scale[usable])
        assert (norm[:2] == 0.0).all()
        for key in usable:
            raised = [
                max(abs(formats.decode_e4m3(int(code))), formats.decode_e4m3(8)) for code in k[key] if code & 0x7F
            ]
            squared = sum((value * value for value in raised), Fraction(0))
            norm_squared = Fraction(float(norm[key])) ** 2
            assert squared <= norm_squared <= squared * (1 + Fraction(1, 2**14))


class TestBound:
    def test_one_relu_and_one_linear_column_by_hand(self, device):
        # Two keys along the first axis, one against it. U = 1 * relu(2 k) - 0.5 * (k) + 3 * norm, scale 2.
        columns = torch.zeros(1, 8, 128)
        columns[0, 0, 0], columns[0, 7, 0] = 2.0, 1.0
        coefficients = torch.zeros(1, 8)
        coefficients[0, 0], coefficients[0, 7] = 1.0, -0.5
        given = (columns.to(torch.float8_e4m3fn).to(device), coefficients.to(device))
        k = torch.zeros(3, 128)
        k[:, 0] = torch.tensor([4.0, -4.0, 1.0])
        norm, scale = torch.tensor([4.0, 4.0, float("inf")]), torch.tensor([2.0, 2.0, 1.0])
        # U = 2 * (8 - 2 + 12) = 36 and 2 * (0 + 2 + 12) = 28; the third key always survives.
        ks, ke = torch.zeros(1, dtype=torch.int32), torch.full((1,), 3, dtype=torch.int32)
        for tau, want in ((28.0, 0b111), (28.5, 0b101), (36.0, 0b101), (36.5, 0b100), (float("inf"), 0b100)):
            words = torch.full((1, 2), CANARY, dtype=torch.int32, device=device)
            parts = (torch.tensor([3.0]), torch.tensor([tau]), k.to(torch.float8_e4m3fn), norm, scale, ks, ke)
            bound.launch_bound(*given, *(part.to(device) for part in parts), words, 0, 3)
            assert words[0, 0].item() == want

    @pytest.mark.parametrize("columns", bound.COLUMN_CHOICES)
    def test_bits_of_small_integers_are_exact(self, random, device, columns):
        # Every product, sum and bound is an integer below 2^13: no rounding anywhere, whatever the order.
        rows, keys, start, end = 2 * bound.queries_per_tile(columns) + 3, 330, 21, 311
        vectors = random.integers(-1, 2, (rows, columns, 128)) * (random.random((rows, columns, 128)) < 0.2)
        k = random.integers(-1, 2, (keys, 128))
        coefficient, slack = random.integers(-2, 3, (rows, columns)), random.integers(0, 3, rows)
        norm, scale = random.integers(0, 9, keys).astype(np.float32), 2.0 ** random.integers(-2, 3, keys)
        psi = np.einsum("rcd,kd->rck", vectors, k)
        psi[:, :-1] = psi[:, :-1].clip(0)
        exact = scale * (np.einsum("rc,rck->rk", coefficient, psi) + slack[:, None] * norm)
        # A bound that occurs is each row's tau: equality must keep the key.
        tau = np.sort(exact, axis=1)[np.arange(rows), random.integers(0, keys, rows)]
        norm[random.random(keys) < 0.1] = np.inf
        keep = ~(exact < tau[:, None]) | np.isinf(norm)
        queries = bound.queries_per_tile(columns)
        # The rows of the first tile see the same keys: its inner spans need no mask, its outer ones do.
        ks, ke = random.integers(0, 330, (2, rows))
        ks[: queries + 4] = [30] * queries + [0, 21, 100, 64]
        ke[: queries + 4] = [300] * queries + [330, 311, 100, 65]
        words = torch.full((rows, 11), CANARY, dtype=torch.int32, device=device)
        bound.launch_bound(
            tensor(vectors.astype(np.float32), device).to(torch.float8_e4m3fn),
            *(tensor(part.astype(np.float32), device) for part in (coefficient, slack, tau)),
            tensor(k.astype(np.float32), device).to(torch.float8_e4m3fn),
            tensor(norm, device), tensor(scale.astype(np.float32), device),
            *(tensor(part.astype(np.int32), device) for part in (ks, ke)), words, start, end,
        )  # fmt: skip
        bits = (words.cpu().numpy()[:, :, None] >> np.arange(32)) & 1
        key = start + np.arange(11 * 32)
        visible = (key >= ks[:, None]) & (key < np.minimum(ke, end)[:, None])
        want = visible & np.pad(keep[:, start:], ((0, 0), (0, len(key) + start - keys)))
        # Words that meet the window of their row are written as a whole.
        met = np.repeat(visible.reshape(rows, 11, 32).any(-1), 32, axis=1)
        np.testing.assert_array_equal(bits.reshape(rows, -1)[met], want[met])
        assert (words[:, 10] == CANARY).all()
