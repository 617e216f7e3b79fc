"""Query preparation, judged in exact rationals by the reference: the slack must cover what its own columns demand."""

import dataclasses

import ml_dtypes
import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from dosa_gpu import prepare
from dosa_gpu.kernels import choose_heads, head_means, head_terms, project, row_bound
from dosa_ref import bound, formats, guard, scorer
from dosa_ref.guard import BoundCertificate
from dosa_ref.spec import GUARD_CONSTANTS
from dosa_verify.fuzz.cases import Case, Values, Weights, build


def problem_of(values, weights, heads):
    return build(Case(seed=5, num_heads=heads, rows=3, keys=60, topk=8, values=values, weights=weights))


def fp8(array, device):
    return torch.from_numpy(np.ascontiguousarray(array).view(np.uint8)).view(torch.float8_e4m3fn).to(device)


def prepared(problem, columns, device):
    q, k = fp8(problem.q, device), fp8(problem.k, device)
    weights = torch.from_numpy(problem.weights).to(device)
    norm = torch.from_numpy(bound.key_norms(problem.k, problem.k_scale)).to(device)
    sample = torch.arange(64, dtype=torch.int32, device=device).expand(len(q), -1).contiguous()
    sample[:, len(k) :] = -1
    return prepare.prepare_rows(q, weights, prepare.head_terms(q, k, norm, sample), columns)


def linear_of(constants):
    linear = np.zeros(constants.columns.shape[1], dtype=bool)
    linear[-1] = True
    return linear


def certificate_of(constants, row):
    heads, columns = constants.multiplier.shape[1], constants.columns.shape[1]
    retained = np.full(columns, -1, np.int32)
    retained[:-1] = constants.head[row, : columns - 1].cpu().numpy()
    projection = np.zeros((heads, columns))
    projection[:, :-1] = constants.projection[row, :, : columns - 1].cpu().numpy()
    aggregate = np.zeros((columns, heads))
    aggregate[columns - 1] = constants.multiplier[row].cpu().numpy()
    return BoundCertificate(retained=retained, projection=projection, aggregate=aggregate)


def judge(problem, constants, row, **change):
    parts = {
        "columns": constants.columns[row].view(torch.uint8).cpu().numpy(),
        "coefficients": constants.coefficients[row].cpu().numpy(),
        "linear": linear_of(constants),
        "slack": constants.slack[row].item(),
        "certificate": certificate_of(constants, row),
    }
    return bound.check_row_bound(problem.q[row], problem.weights[row], **{**parts, **change}).coverage


@pytest.mark.parametrize("columns", [8, 12, 32])
@pytest.mark.parametrize("weights", [Weights.MIXED, Weights.POSITIVE, Weights.NEGATIVE, Weights.ZERO, Weights.TINY])
@pytest.mark.parametrize("values", [Values.LEARNED, Values.WIDE, Values.SUBNORMAL])
def test_the_slack_covers_what_the_columns_demand(values, weights, columns, device):
    problem = problem_of(values, weights, 32)
    constants = prepared(problem, columns, device)
    for row in range(2):
        assert judge(problem, constants, row) is bound.Coverage.COVERED


def test_64_heads_with_projections_and_linear_negatives(device):
    problem = problem_of(Values.LEARNED, Weights.MIXED, 64)
    constants = prepared(problem, 16, device)
    assert (constants.projection > 0).flatten(1).any(1).all()
    assert (constants.multiplier > 0).any(1).all()
    assert judge(problem, constants, 0) is bound.Coverage.COVERED


class TestPlantedFaults:
    """What the judge must refuse, so that its word above means something."""

    @pytest.fixture
    def parts(self, device):
        problem = problem_of(Values.LEARNED, Weights.MIXED, 32)
        return problem, prepared(problem, 8, device)

    def test_slack_without_the_guard(self, parts):
        problem, constants = parts
        lower, _ = guard.guard_enclosure(
            problem.q[0], problem.weights[0], constants.columns[0].view(torch.uint8).cpu().numpy(),
            constants.coefficients[0].cpu().numpy(), linear_of(constants), certificate_of(constants, 0),
        )  # fmt: skip
        residual_only = np.float32(float(lower.residual))
        assert judge(problem, constants, 0, slack=residual_only) is bound.Coverage.SLACK_TOO_SMALL

    def test_slack_a_thousandth_too_small(self, parts):
        problem, constants = parts
        assert judge(problem, constants, 0, slack=constants.slack[0].item() * 0.999) is bound.Coverage.SLACK_TOO_SMALL

    def test_a_coefficient_rounded_down_far(self, parts):
        problem, constants = parts
        coefficients = constants.coefficients[0].cpu().numpy().copy()
        place = int(np.flatnonzero(constants.head[0].cpu().numpy() >= 0)[0])
        coefficients[place] *= np.float32(0.9)
        assert judge(problem, constants, 0, coefficients=coefficients) is not bound.Coverage.COVERED

    def test_a_multiplier_of_too_much(self, parts):
        problem, constants = parts
        certificate = certificate_of(constants, 0)
        more = dataclasses.replace(certificate, aggregate=certificate.aggregate * 1.5)
        assert judge(problem, constants, 0, certificate=more) is bound.Coverage.BAD_CERTIFICATE


def test_the_bound_is_at_least_the_computed_score(device):
    problem = problem_of(Values.WIDE, Weights.MIXED, 32)
    constants = prepared(problem, 16, device)
    scores = scorer.scores_sm90(problem.q, problem.weights, problem.k, problem.k_scale)
    for row in range(len(problem.q)):
        row_bound = bound.build_row_bound(problem.q[row], problem.weights[row], 16)
        ours = dataclasses.replace(
            row_bound,
            columns=constants.columns[row].view(torch.uint8).cpu().numpy().view(problem.q.dtype),
            coefficients=constants.coefficients[row].cpu().numpy(),
            linear=linear_of(constants),
            slack=np.float32(constants.slack[row].item()),
        )
        assert (bound.evaluate(ours, problem.k, problem.k_scale) >= scores[row]).all()


def test_rows_that_may_not_be_pruned_are_marked(device):
    problem = problem_of(Values.NORMAL, Weights.MIXED, 32)
    q, weights = problem.q.copy(), problem.weights.copy()
    q.view(np.uint8)[0, 3, 9] = 0x7F
    weights[1, 4] = np.inf
    weights[2, :] = 2.0**100
    constants = prepared(dataclasses.replace(problem, q=q, weights=weights), 8, device)
    assert constants.state.tolist() == [row_bound.NON_FINITE, row_bound.NON_FINITE, row_bound.TOO_LARGE]


@triton.jit
def _round_up_kernel(value_ptr, out_ptr, COUNT: tl.constexpr):
    place = tl.arange(0, COUNT)
    tl.store(out_ptr + place, row_bound.round_up(tl.load(value_ptr + place)))


def test_round_up_is_the_references(random, device):
    values = np.concatenate([random.normal(0, 1, 509) * np.exp2(random.uniform(-160, 120, 509)), [0.0, 1.0, -1.0]])
    got = torch.empty(512, dtype=torch.float32, device=device)
    _round_up_kernel[(1,)](torch.from_numpy(values).to(device), got, COUNT=512)
    want = [formats.round_up_float32(formats.Fraction(float(value))) for value in values]
    np.testing.assert_array_equal(got.cpu().numpy(), np.array(want, np.float32))


def test_head_terms_are_the_references(random, device):
    codes = random.integers(0, 127, (70, 128), dtype=np.uint8) | (random.integers(0, 2, (70, 128), dtype=np.uint8) << 7)
    codes[:10] &= 0x8F
    codes[10] = 0
    with_nan = codes.copy()
    with_nan[69, 3] = 0x7F
    codes[69, 3] = 0
    norm, error = (torch.empty(70, dtype=torch.float64, device=device) for _ in range(2))
    nan = torch.empty(70, dtype=torch.int32, device=device)
    head_terms.launch_head_terms(torch.from_numpy(with_nan).to(device), norm, error, nan)
    assert nan.tolist() == [0] * 69 + [1]
    values = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    # Two float64 evaluations of one formula; bits may differ.
    np.testing.assert_allclose(norm.cpu().numpy(), np.linalg.norm(values, axis=1), rtol=1e-12)
    np.testing.assert_allclose(error.cpu().numpy(), [guard.dot_error(row) for row in codes], rtol=1e-12)


def test_every_guard_constant_stands_in_a_lemma_that_the_gate_demands():
    import json

    from dosa_gpu import gate
    from dosa_gpu.kernels.bound import LEMMAS

    ledger = json.loads((gate.ledger_folder() / "ledger.json").read_text(encoding="utf-8"))["lemmas"]
    spoken_of = {name for lemma in LEMMAS for name in ledger[lemma]["constants"]}
    assert set(GUARD_CONSTANTS) <= spoken_of


@pytest.mark.parametrize("price", [0.0, 0.3])
def test_the_projection_comes_near_the_best_fit_at_its_price(price, random, device):
    from scipy.optimize import nnls

    values = random.normal(0.2, 1, (1, 32, 128)).astype(ml_dtypes.float8_e4m3fn)
    head = np.full((1, 16), -1, np.int32)
    head[0, :6] = [0, 3, 5, 8, 30, 31]
    share = np.ones((1, 32), np.float32)
    share[0, [0, 9]] = 0
    above = torch.full((1, 32), price, device=device)
    out = torch.empty(1, 32, 16, dtype=torch.float32, device=device)
    project.launch_project(
        fp8(values, device), torch.from_numpy(head).to(device), torch.from_numpy(share).to(device),
        above, torch.zeros_like(above), torch.ones(1, device=device), out,
    )  # fmt: skip
    got = out[0].cpu().numpy().astype(np.float64)
    assert (got >= 0).all()
    assert (got[:, 6:] == 0).all()
    assert (got[[0, 9]] == 0).all()
    basis = values[0, head[0, :6]].astype(np.float64)
    for target in (1, 2, 15, 29):
        wanted = values[0, target].astype(np.float64)
        cost = 0.5 * np.linalg.norm(wanted) * price

        def value(multipliers, wanted=wanted, cost=cost):
            return 0.5 * np.linalg.norm(wanted - multipliers @ basis) ** 2 + cost * multipliers.sum()

        # min |y - B'a|^2 / 2 + c sum a, as plain non-negative least squares: complete the square with the Gram's root.
        root = np.linalg.cholesky(basis @ basis.T)
        best, _ = nnls(root.T, np.linalg.solve(root, basis @ wanted - cost))
        assert value(best) * (1 - 1e-6) <= value(got[target, :6]) <= value(best) * 1.01
    if price:
        assert got[:, :6].sum() < 0.9 * sum(nnls(basis.T, row.astype(np.float64))[0].sum() for row in values[0])


def test_head_means(random, device):
    values = random.normal(0, 1, (2, 32, 128)).astype(ml_dtypes.float8_e4m3fn)
    keys = random.normal(0, 1, (90, 128)).astype(ml_dtypes.float8_e4m3fn)
    norm = np.linalg.norm(keys.astype(np.float64), axis=1).astype(np.float32)
    norm[7] = np.inf
    sample = random.integers(0, 90, (2, 64)).astype(np.int32)
    sample[:, 40] = 7
    sample[1, 50:] = -1
    above, below = (torch.empty(2, 32, dtype=torch.float32, device=device) for _ in range(2))
    mean_norm = torch.empty(2, dtype=torch.float32, device=device)
    head_means.launch_head_means(
        fp8(values, device), fp8(keys, device), torch.from_numpy(norm).to(device), torch.from_numpy(sample).to(device),
        above, below, mean_norm,
    )  # fmt: skip
    for row in range(2):
        kept = sample[row][(sample[row] >= 0) & (sample[row] != 7)]
        dots = values[row].astype(np.float64) @ keys[kept].astype(np.float64).T
        # The tensor core's dots are cut to 13 fraction bits.
        np.testing.assert_allclose(above[row].cpu().numpy(), np.maximum(dots, 0).mean(1), rtol=2e-3, atol=1e-3)
        np.testing.assert_allclose(below[row].cpu().numpy(), np.maximum(-dots, 0).mean(1), rtol=2e-3, atol=1e-3)
        np.testing.assert_allclose(mean_norm[row].item(), norm[kept].mean(), rtol=1e-5)


def test_heads_are_chosen_by_pivots_and_by_what_they_lose(random, device):
    values = random.normal(0, 1, (1, 32, 128))
    values[0, 1] = values[0, 0] * 0.99  # nothing is left of head 1 after head 0
    values[0, 0] *= 30
    values[0, 1] *= 30
    q = fp8(values.astype(ml_dtypes.float8_e4m3fn), device)
    weights = torch.full((1, 32), 0.01, device=device)
    weights[0, :3] = 1.0
    weights[0, 20:] = -1.0
    above = torch.zeros(1, 32, device=device)
    below = torch.zeros(1, 32, device=device)
    above[0, 20:], below[0, 20:] = 1.0, 1e-6
    above[0, 25], below[0, 25] = 500.0, 400.0  # neither zero nor linear serves it
    above[0, 26], below[0, 26] = 1e-6, 1.0
    error = torch.full((1, 32), 1e-9, dtype=torch.float64, device=device)
    head = torch.empty(1, 16, dtype=torch.int32, device=device)
    share, multiplier = torch.empty(1, 32, device=device), torch.empty(1, 32, device=device)
    unusable = torch.empty(1, dtype=torch.int32, device=device)
    nan = torch.zeros(1, 32, dtype=torch.int32, device=device)
    choose_heads.launch_choose_heads(
        q, weights, error, nan, above, below, torch.ones(1, device=device), 3, head, share, multiplier, unusable
    )
    assert head[0, :3].tolist() == [0, 2, 25]
    assert (head[0, 3:] == -1).all()
    assert unusable.item() == 0
    assert torch.nonzero(share[0]).flatten().tolist() == [1, *range(3, 20)]
    assert torch.nonzero(multiplier[0]).flatten().tolist() == [*range(20, 25), *range(27, 32)]
    weights[0, 31] = torch.nan
    choose_heads.launch_choose_heads(
        q, weights, error, nan, above, below, torch.ones(1, device=device), 3, head, share, multiplier, unusable
    )
    assert unusable.item() == 1
    assert multiplier[0, 31] == 0
