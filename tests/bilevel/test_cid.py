from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch
import torch.nn.functional as F

from dense_cid import dense_cid
from doubly.bilevel import (
    Ball,
    BarrierStep,
    Box,
    ConjugateGradient,
    Diagonal,
    Direct,
    LogMeanExp,
    Neumann,
    RunningMean,
    Terms,
    cid,
    projected_descent,
)

N, D, P = 5, 4, 3
generator = torch.Generator().manual_seed(0)


def normal(*shape):
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


A, B, C = normal(N, D, P), normal(N, D), normal(N, P)
ROOT = normal(N, D, D)
Q = ROOT @ ROOT.mT / D + torch.eye(D, dtype=torch.float64)
THETA, DELTA = normal(P), 0.3 * normal(N, D)
EXACT = ConjugateGradient(30, 1e-14)


def h(theta, delta, i):
    """Smooth and convex in delta, with curvature that depends on theta."""
    quartic = 0.1 * delta.pow(4).sum() * (1 + theta[0] ** 2)
    return 0.5 * delta @ Q[i] @ delta + (A[i] @ theta).sin() @ delta + quartic


def g(theta, delta, i):
    return 1.5 + (B[i] @ delta + C[i] @ theta).tanh() + 0.2 * (delta * delta).sum() * theta[1]


def g_vector(theta, delta, i):
    return torch.stack([g(theta, delta, i), (C[i] @ theta).cos() + delta.sum() * theta[2], B[i] @ delta * theta[0]])


def loss(theta, delta, i):
    """Loss of the zero-sum problem; concave enough in delta that -loss + D is convex."""
    return F.softplus(B[i] @ delta + C[i] @ theta) - 0.1 * (A[i] @ theta).cos() @ delta.square()


def gradient(direction, theta):
    return torch.autograd.grad(direction.loss, theta)[0]


def close(one, other):
    return torch.allclose(one, other, rtol=1e-8, atol=1e-8)


def problem(theta, outer=g, inner=h, samples=range(N), shared=False):
    """The problem of some samples, as a function of their delta."""

    def values(function, delta):
        return torch.stack([function(theta, delta if shared else delta[k], i) for k, i in enumerate(samples)])

    return lambda delta: Terms(values(outer, delta), None if inner is None else values(inner, delta))


@pytest.fixture
def theta():
    return THETA.clone().requires_grad_()


def test_running_mean_equals_the_dense_twin(theta):
    for f in (lambda u: u, lambda u: u.log(), lambda u: u**3 - 2 * u, lambda u: (0.5 * u).exp()):
        expected = dense_cid(g, h, THETA, DELTA, f)
        for solve in (EXACT, Neumann(0.15, 200)):
            assert close(gradient(cid(problem(theta), DELTA, RunningMean(f), {}, solve), theta), expected)


def test_vector_valued_g_equals_the_dense_twin(theta):
    for f in (lambda u: u.sum(), lambda u: u.square().sum(), lambda u: u[0].log() * u[1].exp() + u[2].sin()):
        direction = cid(problem(theta, g_vector), DELTA, RunningMean(f), {}, EXACT)
        assert close(gradient(direction, theta), dense_cid(g_vector, h, THETA, DELTA, f))
        assert direction.values.shape == direction.cotangents.shape == (N, 3)


def test_the_average_of_earlier_batches_enters_the_direction(theta):
    composition, state, u = RunningMean(lambda u: u.log(), eta=0.6), {}, None
    for batch in (DELTA, DELTA + 0.5, DELTA - 0.4):
        direction = cid(problem(theta), batch, composition, state, EXACT)
        assert close(gradient(direction, theta), dense_cid(g, h, THETA, batch, torch.log, u, 0.6))
        mean = torch.stack([g(THETA, batch[i], i) for i in range(N)]).mean()
        state, u = direction.state, mean if u is None else 0.4 * u + 0.6 * mean
        assert torch.allclose(state["u"], u)


def test_log_mean_exp_equals_the_dense_twin_of_exponentials_and_a_logarithm(theta):
    for r in (0.3, 1.0, 10.0):
        composition, state, u = LogMeanExp(r, eta=0.7), {}, None

        def exponential(theta, delta, i, r=r):
            return (g(theta, delta, i) / r).exp()

        for batch in (DELTA, DELTA + 0.3):
            direction = cid(problem(theta), batch, composition, state, EXACT)
            expected = dense_cid(exponential, h, THETA, batch, lambda u, r=r: r * u.log(), u, 0.7)
            assert close(gradient(direction, theta), expected), r
            mean = torch.stack([exponential(THETA, batch[i], i) for i in range(N)]).mean()
            state, u = direction.state, mean if u is None else 0.3 * u + 0.7 * mean


def test_a_zero_sum_problem_with_a_barrier_equals_the_dense_twin(theta):
    box = Box(torch.full_like(DELTA, -2.0), torch.full_like(DELTA, 1.5), 5.0)
    inverse = box.inverse_curvature(DELTA, 0.3)

    def exponential(theta, delta, i):
        return (loss(theta, delta, i) / 0.5).exp()

    def penalized(theta, delta, i):
        barrier = -5.0 * ((1.5 - delta).log() + (delta + 2.0).log()).sum() + 0.15 * delta.square().sum()
        return barrier - loss(theta, delta, i)

    def barrier_alone(delta, i):
        return torch.diag(5.0 * ((1.5 - delta) ** -2 + (delta + 2.0) ** -2) + 0.3)

    for solve, curvature in ((ConjugateGradient(30, 1e-14, inverse), None), (Diagonal(inverse), barrier_alone)):
        direction = cid(problem(theta, loss, None), DELTA, LogMeanExp(0.5), {}, solve)
        expected = dense_cid(exponential, penalized, THETA, DELTA, lambda u: 0.5 * u.log(), curvature=curvature)
        assert close(gradient(direction, theta), expected), solve


def test_diagonal_is_exact_where_the_hessian_is_diagonal(theta):
    diagonal = Q.diagonal(dim1=1, dim2=2)

    def separable(theta, delta, i):
        return 0.5 * (diagonal[i] * delta**2).sum() + (A[i] @ theta).sin() @ delta

    direction = cid(problem(theta, g, separable), DELTA, RunningMean(torch.log), {}, Diagonal(1 / diagonal))
    assert close(gradient(direction, theta), dense_cid(g, separable, THETA, DELTA, torch.log))


def test_the_direction_is_the_gradient_of_f_at_a_converged_inner_solution(theta):
    def quadratic(theta, delta, i):
        return 0.5 * delta @ Q[i] @ delta - delta @ A[i] @ theta

    def minimizer(theta):
        return torch.linalg.solve(Q, torch.einsum("ndp,p->nd", A, theta))

    size = 1e-5
    steps = size * torch.eye(P, dtype=torch.float64)
    for composition in (RunningMean(torch.log), LogMeanExp(0.5)):

        def objective(theta, composition=composition):
            return composition.value(torch.stack([g(theta, d, i) for i, d in enumerate(minimizer(theta))]))

        differences = torch.stack([(objective(THETA + s) - objective(THETA - s)) / (2 * size) for s in steps])
        implicit, plain = (
            gradient(cid(problem(theta, g, quadratic), minimizer(THETA), composition, {}, solve), theta)
            for solve in (EXACT, None)
        )
        assert torch.allclose(implicit, differences, rtol=1e-7, atol=1e-8)
        assert (plain - differences).norm() > 0.05 * differences.norm()  # the implicit term matters


def test_without_a_solver_the_direction_is_the_weighted_gradient(theta):
    values = torch.stack([g(theta, DELTA[i], i) for i in range(N)])
    expected = torch.autograd.grad(0.5 * ((values / 0.5).exp().mean()).log(), theta)[0]
    assert torch.allclose(gradient(cid(problem(theta), DELTA, LogMeanExp(0.5), {}), theta), expected, rtol=1e-12)


def test_an_inner_function_that_is_linear_in_delta_has_no_curvature(theta):
    inverse = torch.full_like(DELTA, 0.5)
    solves = ConjugateGradient(5, 1e-15, inverse), Diagonal(inverse)
    for coefficients in (lambda theta, i: A[i] @ theta, lambda theta, i: B[i]):

        def linear(theta, delta, i, coefficients=coefficients):
            return -coefficients(theta, i) @ delta

        full, diagonal = (gradient(cid(problem(theta, g, linear), DELTA, LogMeanExp(), {}, s), theta) for s in solves)
        assert torch.allclose(full, diagonal, rtol=1e-12)


def test_an_inner_function_without_delta_in_it_leaves_no_slope(theta):
    terms = problem(theta, g, lambda theta, delta, i: theta.sum())
    direction = cid(terms, DELTA, RunningMean(), {}, Diagonal(0 * DELTA))
    plain = cid(problem(theta), DELTA, RunningMean(), {})
    assert torch.equal(gradient(direction, theta), gradient(plain, theta)) and not direction.slope.any()


def test_the_problem_is_called_once_and_nothing_is_left_behind():
    weight, calls, delta = normal(D).requires_grad_(), [], DELTA.clone()

    def counted(delta):
        calls.append(delta)
        return Terms((delta @ weight).tanh() + 2, aux="passed on")

    direction = cid(counted, delta, LogMeanExp(), {}, Diagonal(torch.ones_like(delta)))
    assert len(calls) == 1 and direction.aux == "passed on"
    assert not delta.requires_grad and weight.grad is None
    assert not direction.values.requires_grad and not direction.cotangents.requires_grad


def test_gathered_values_give_a_rank_its_part_of_the_whole(theta):
    """A microbatch gets the values of its whole batch in the same way: by the one call of all_gather."""
    expected = cid(problem(theta, samples=range(4)), DELTA[:4], LogMeanExp(0.5), {}, EXACT)
    calls = []

    def all_gather(values):
        calls.append(values)
        return expected.values

    parts = [
        cid(
            problem(theta, samples=part),
            DELTA[part.start : part.stop],
            LogMeanExp(0.5),
            {},
            EXACT,
            all_gather=all_gather,
        )
        for part in (range(2), range(2, 4))
    ]
    assert [values.shape for values in calls] == [(2,), (2,)]
    assert torch.equal(torch.cat(calls), expected.values)
    mean = sum(gradient(part, theta) for part in parts) / 2
    assert torch.allclose(mean, gradient(expected, theta), rtol=1e-10)


# An oracle with known digits: a logistic loss, a box of half-width 0.1, barrier strength 1e-3.
X = torch.tensor([[0.4, 0.6, 0.5]], dtype=torch.float64)
LOGISTIC_THETA = torch.tensor([1.0, -0.7, 0.3], dtype=torch.float64)
LOGISTIC_BOX = Box(torch.full_like(X, -0.1), torch.full_like(X, 0.1), 1e-3)


def logistic(theta, delta):
    return F.softplus(-(X + delta) @ theta)


@pytest.fixture(scope="module")
def delta_hat():
    start = torch.zeros_like(X)
    return projected_descent(lambda d: -logistic(LOGISTIC_THETA, d), start, LOGISTIC_BOX, BarrierStep(5.0), 500)


def test_the_logistic_oracle_s_delta(delta_hat):
    expected = torch.tensor([[-0.09808104, 0.09727012, -0.09374929]], dtype=torch.float64)
    assert torch.allclose(delta_hat, expected, rtol=0, atol=2e-8)


def test_the_logistic_oracle_s_gradients(delta_hat):
    theta, inverse = LOGISTIC_THETA.clone().requires_grad_(), LOGISTIC_BOX.inverse_curvature(delta_hat)
    table = [
        (ConjugateGradient(20, 1e-14, inverse), (-0.15525066, -0.36220906, -0.20709554)),
        (Diagonal(inverse), (-0.15525218, -0.36220264, -0.20710247)),
        (None, (-0.15581077, -0.35983893, -0.20965307)),
    ]
    for solve, expected in table:
        for composition in (RunningMean(lambda u: u), LogMeanExp(1.0)):  # the same for one sample
            direction = cid(lambda d: Terms(logistic(theta, d)), delta_hat, composition, {}, solve)
            expected_gradient = torch.tensor(expected, dtype=torch.float64)
            assert torch.allclose(gradient(direction, theta), expected_gradient, rtol=0, atol=2e-8), solve
            assert direction.values.item() == pytest.approx(logistic(LOGISTIC_THETA, delta_hat).item())


# A delta that all samples share


def test_a_shared_delta_has_one_system_of_means(theta):
    delta, f = DELTA[0].view(2, 2), lambda u: u.square().sum()  # delta of any shape
    slopes = torch.stack([torch.autograd.functional.jacobian(lambda d: h(THETA, d, i), DELTA[0]) for i in range(N)])  # noqa: B023

    def folded(function):
        return lambda theta, delta, i: function(theta, delta.flatten(), i)

    for outer in (g, g_vector):
        terms = problem(theta, folded(outer), folded(h), shared=True)
        direction = cid(terms, delta, RunningMean(f), {}, EXACT, shared=True)
        assert close(gradient(direction, theta), dense_cid(outer, h, THETA, DELTA[0], f, samples=N))
        assert direction.residual.shape == (1,) and direction.slope.shape == (1, 2, 2)
        assert torch.allclose(direction.slope.flatten(), slopes.mean(0))


class Rank:
    """One of two threads that stand for processes: `all_gather` waits for the other."""

    def __init__(self, number, barrier, table):
        self.number, self.barrier, self.table = number, barrier, table

    def all_gather(self, values):
        self.table[self.number] = values
        self.barrier.wait()
        gathered = torch.cat(self.table)
        self.barrier.wait()
        return gathered


def test_processes_that_share_delta_agree_on_its_system():
    for constraint in (None, Ball(0.5 * DELTA[0].norm().item())):
        delta = DELTA[0] if constraint is None else constraint.project(DELTA[:1])[0]
        barrier, table = Barrier(2, timeout=600), [None, None]

        def estimate(samples, all_gather=lambda values: values, delta=delta, constraint=constraint):
            theta = THETA.clone().requires_grad_()
            terms, options = problem(theta, samples=samples, shared=True), {"constraint": constraint, "shared": True}
            direction = cid(terms, delta, LogMeanExp(0.5), {}, EXACT, all_gather=all_gather, **options)
            return gradient(direction, theta), direction.slope

        expected, slope = estimate(range(4))
        ranks = [Rank(number, barrier, table) for number in range(2)]
        with ThreadPoolExecutor(2) as pool:
            halves = [range(2), range(2, 4)]
            (first, first_slope), (second, second_slope) = pool.map(estimate, halves, [r.all_gather for r in ranks])
        assert torch.allclose((first + second) / 2, expected, rtol=1e-10)
        assert torch.allclose(first_slope, slope) and torch.equal(first_slope, second_slope)


def test_a_zero_sum_problem_is_the_one_with_its_inner_function_written_out(theta):
    def concave(theta, delta, i):
        return loss(theta, delta, i) - delta @ Q[i] @ delta

    for shared in (False, True):
        for constraint in (None, Box(-0.2, 0.2), Ball(0.3)):
            rows = DELTA if constraint is None else constraint.project(DELTA)
            delta, results = rows[0] if shared else rows, []
            for inner in (None, lambda *arguments: -concave(*arguments)):
                terms = problem(theta, concave, inner, shared=shared)
                direction = cid(terms, delta, LogMeanExp(0.5), {}, EXACT, constraint=constraint, shared=shared)
                results.append((gradient(direction, theta), direction.slope, direction.cotangents))
            for short, long in zip(*results, strict=True):
                assert torch.allclose(short, long, rtol=1e-10), (shared, constraint)


def test_a_delta_of_one_number_needs_no_axis(theta):
    target = torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64)

    def terms(delta):
        return Terms(delta.square() + 0 * target, (delta - theta[0] * target).square())

    for shared in (False, True):
        minimizer = theta[0] * (target.mean() if shared else target)
        expected = torch.autograd.grad((minimizer.square() + 0 * target).mean(), theta)[0]
        for solve in (Direct(), ConjugateGradient(), Diagonal()):
            direction = cid(terms, minimizer.detach(), RunningMean(), {}, solve, shared=shared)
            assert torch.allclose(gradient(direction, theta), expected), (shared, solve)


def test_the_values_at_the_previous_theta_correct_the_running_mean(theta):
    composition = RunningMean(lambda u: u**2, eta=0.6)
    state = {"u": torch.tensor(2.5, dtype=torch.float64)}
    previous = problem(THETA + 0.3)(DELTA).outer.requires_grad_()
    direction = cid(problem(theta), DELTA, composition, state, EXACT, previous=previous)
    u = direction.values.mean() + 0.4 * (2.5 - previous.detach().mean())
    assert torch.allclose(direction.state["u"], u) and torch.allclose(direction.cotangents, 2 * u.expand(N))
    assert not direction.state["u"].requires_grad


def test_an_indefinite_hessian_is_fine_where_the_constraint_holds_its_negative_directions(theta):
    """Second-order sufficiency is needed on the face only."""
    constraint = Box(torch.tensor([-9.0, -0.5, -0.5, -0.5]).double(), torch.tensor([9.0, 0.5, 0.5, 0.5]).double())
    corner = torch.tensor([[0.5, -0.5, 0.5]], dtype=torch.float64)
    delta = torch.cat([-theta.detach()[:1, None] / 2, corner], 1)

    def terms(delta):
        h = delta[:, 0].square() + theta[0] * delta[:, 0] - delta[:, 1:].square().sum(1)
        return Terms((delta[:, 0] * theta[1]).sin() + delta.sum(1), h)

    minimizer = -theta[0] / 2
    expected = torch.autograd.grad((minimizer * theta[1]).sin() + minimizer, theta)[0]
    for solve in (Direct(), ConjugateGradient(), Diagonal()):
        direction = cid(terms, delta, RunningMean(), {}, solve, constraint=constraint)
        assert torch.allclose(gradient(direction, theta), expected, rtol=1e-12)
