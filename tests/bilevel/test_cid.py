import math

import pytest
import torch
import torch.nn.functional as F

from doubly.bilevel import (
    BarrierStep,
    Box,
    ConjugateGradient,
    Diagonal,
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


def h(theta, delta, i):
    """Smooth and convex in delta, with curvature that depends on theta."""
    quartic = 0.1 * delta.pow(4).sum() * (1 + theta[0] ** 2)
    return 0.5 * delta @ Q[i] @ delta + (A[i] @ theta).sin() @ delta + quartic


def g(theta, delta, i):
    return 1.5 + (B[i] @ delta + C[i] @ theta).tanh() + 0.2 * (delta * delta).sum() * theta[1]


def g_vector(theta, delta, i):
    return torch.stack([g(theta, delta, i), (C[i] @ theta).cos() + delta.sum() * theta[2], B[i] @ delta * theta[0]])


def loss(theta, delta, i):
    """Of the zero-sum problem; concave enough in delta that -loss + D is convex."""
    return F.softplus(B[i] @ delta + C[i] @ theta) - 0.1 * (A[i] @ theta).cos() @ delta.square()


def gradient(direction, theta):
    return torch.autograd.grad(direction.scalar, theta)[0]


def problem(theta, outer=g, inner=h):
    def terms(delta):
        each = range(len(delta))
        values = torch.stack([outer(theta, delta[i], i) for i in each])
        return Terms(values, None if inner is None else torch.stack([inner(theta, delta[i], i) for i in each]))

    return terms


EXACT = ConjugateGradient(30, 1e-15)


@pytest.mark.parametrize("f", [lambda u: u, lambda u: u.log(), lambda u: u**3 - 2 * u, lambda u: (0.5 * u).exp()])
@pytest.mark.parametrize("solve", [EXACT, Neumann(0.15, 800)])
def test_running_mean_equals_the_dense_twin(dense_cid, f, solve):
    theta = THETA.clone().requires_grad_()
    found = cid(problem(theta), DELTA, RunningMean(f), {}, solve)
    assert torch.allclose(gradient(found, theta), dense_cid(g, h, THETA, DELTA, f), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize(
    "f", [lambda u: u.sum(), lambda u: u.square().sum(), lambda u: u[0].log() * u[1].exp() + u[2].sin()]
)
def test_vector_valued_g_equals_the_dense_twin(dense_cid, f):
    theta = THETA.clone().requires_grad_()
    found = cid(problem(theta, g_vector), DELTA, RunningMean(f), {}, EXACT)
    assert torch.allclose(gradient(found, theta), dense_cid(g_vector, h, THETA, DELTA, f), rtol=1e-8, atol=1e-8)
    assert found.values.shape == found.cotangents.shape == (N, 3)


def test_the_average_of_earlier_batches_enters_the_direction(dense_cid):
    rule, state, u = RunningMean(lambda u: u.log(), eta=0.6), {}, None
    for batch in (DELTA, DELTA + 0.5, DELTA - 0.4):
        theta = THETA.clone().requires_grad_()
        found = cid(problem(theta), batch, rule, state, EXACT)
        expected = dense_cid(g, h, THETA, batch, torch.log, u, 0.6)
        assert torch.allclose(gradient(found, theta), expected, rtol=1e-8, atol=1e-8)
        mean = torch.stack([g(THETA, batch[i], i) for i in range(N)]).mean()
        state, u = found.state, mean if u is None else 0.4 * u + 0.6 * mean
        assert torch.allclose(state["u"], u)


@pytest.mark.parametrize("r", [0.3, 1.0, 10.0])
def test_log_mean_exp_equals_the_dense_twin_of_exponentials_and_a_logarithm(dense_cid, r):
    rule, state, u = LogMeanExp(r, eta=0.7), {}, None

    def exponential(theta, delta, i):
        return (g(theta, delta, i) / r).exp()

    for batch in (DELTA, DELTA + 0.3):
        theta = THETA.clone().requires_grad_()
        found = cid(problem(theta), batch, rule, state, EXACT)
        expected = dense_cid(exponential, h, THETA, batch, lambda u: r * u.log(), u, 0.7)
        assert torch.allclose(gradient(found, theta), expected, rtol=1e-8, atol=1e-8)
        mean = torch.stack([exponential(THETA, batch[i], i) for i in range(N)]).mean()
        state, u = found.state, mean if u is None else 0.3 * u + 0.7 * mean


@pytest.mark.parametrize("full", [True, False])
def test_a_zero_sum_problem_with_a_barrier_equals_the_dense_twin(dense_cid, full):
    box = Box(torch.full_like(DELTA, -2.0), torch.full_like(DELTA, 1.5), 5.0)
    inverse = box.inverse_curvature(DELTA, 0.3)

    def exponential(theta, delta, i):
        return (loss(theta, delta, i) / 0.5).exp()

    def penalised(theta, delta, i):
        barrier = -5.0 * ((1.5 - delta).log() + (delta + 2.0).log()).sum() + 0.15 * delta.square().sum()
        return barrier - loss(theta, delta, i)

    def barrier_alone(delta, i):
        return torch.diag(5.0 * ((1.5 - delta) ** -2 + (delta + 2.0) ** -2) + 0.3)

    theta = THETA.clone().requires_grad_()
    solve = ConjugateGradient(30, 1e-15, inverse) if full else Diagonal(inverse)
    found = cid(problem(theta, loss, None), DELTA, LogMeanExp(0.5), {}, solve)
    expected = dense_cid(
        exponential, penalised, THETA, DELTA, lambda u: 0.5 * u.log(), curvature=None if full else barrier_alone
    )
    assert torch.allclose(gradient(found, theta), expected, rtol=1e-8, atol=1e-8)


def test_diagonal_is_exact_where_the_hessian_is_diagonal(dense_cid):
    diagonal = Q.diagonal(dim1=1, dim2=2)

    def separable(theta, delta, i):
        return 0.5 * (diagonal[i] * delta**2).sum() + (A[i] @ theta).sin() @ delta

    theta = THETA.clone().requires_grad_()
    found = cid(problem(theta, g, separable), DELTA, RunningMean(torch.log), {}, Diagonal(1 / diagonal))
    assert torch.allclose(gradient(found, theta), dense_cid(g, separable, THETA, DELTA, torch.log), rtol=1e-8)


@pytest.mark.parametrize("composition", [RunningMean(torch.log), LogMeanExp(0.5)])
def test_the_direction_is_the_gradient_of_f_at_a_converged_inner_solution(composition):
    def quadratic(theta, delta, i):
        return 0.5 * delta @ Q[i] @ delta - delta @ A[i] @ theta

    def best(theta):
        return torch.linalg.solve(Q, torch.einsum("ndp,p->nd", A, theta))

    def whole(theta):
        values = torch.stack([g(theta, d, i) for i, d in enumerate(best(theta))])
        if isinstance(composition, LogMeanExp):
            return 0.5 * ((values / 0.5).exp().mean()).log()
        return values.mean().log()

    size = 1e-5
    steps = size * torch.eye(P, dtype=torch.float64)
    differences = torch.stack([(whole(THETA + s) - whole(THETA - s)) / (2 * size) for s in steps])
    theta = THETA.clone().requires_grad_()
    found = gradient(cid(problem(theta, g, quadratic), best(THETA), composition, {}, EXACT), theta)
    assert torch.allclose(found, differences, rtol=1e-7, atol=1e-8)
    plain = gradient(cid(problem(theta, g, quadratic), best(THETA), composition, {}), theta)
    assert (plain - differences).norm() > 0.05 * differences.norm()  # the implicit term is no decoration here


def test_without_a_solver_the_direction_is_the_weighted_gradient():
    theta = THETA.clone().requires_grad_()
    found = cid(problem(theta), DELTA, LogMeanExp(0.5), {})
    values = torch.stack([g(theta, DELTA[i], i) for i in range(N)])
    expected = torch.autograd.grad(0.5 * ((values / 0.5).exp().mean()).log(), theta)[0]
    assert torch.allclose(gradient(found, theta), expected, rtol=1e-12)


def test_an_inner_function_that_is_linear_in_delta_has_no_curvature():
    def linear(theta, delta, i):
        return -(A[i] @ theta) @ delta

    theta = THETA.clone().requires_grad_()
    inverse = torch.full_like(DELTA, 0.5)
    solves = ConjugateGradient(5, 1e-15, inverse), Diagonal(inverse)
    full, diagonal = (gradient(cid(problem(theta, g, linear), DELTA, LogMeanExp(), {}, s), theta) for s in solves)
    assert torch.allclose(full, diagonal, rtol=1e-12)


def test_the_problem_is_called_once_and_nothing_is_left_behind():
    calls = []

    def counted(delta):
        calls.append(delta)
        return Terms((delta @ THETA_WEIGHT).tanh() + 2, aux="handed through")

    delta = DELTA.clone()
    found = cid(counted, delta, LogMeanExp(), {}, Diagonal(torch.ones_like(delta)))
    assert len(calls) == 1 and found.aux == "handed through"
    assert not delta.requires_grad and THETA_WEIGHT.grad is None
    assert not found.values.requires_grad and not found.cotangents.requires_grad


THETA_WEIGHT = normal(D).requires_grad_()


def test_gathered_values_give_a_rank_its_part_of_the_whole():
    def part(rows):
        def terms(delta):
            each = range(rows.start, rows.stop)
            return Terms(
                torch.stack([g(theta, delta[i - rows.start], i) for i in each]),
                torch.stack([h(theta, delta[i - rows.start], i) for i in each]),
            )

        return terms

    theta = THETA.clone().requires_grad_()
    everything = torch.stack([g(THETA, DELTA[i], i) for i in range(4)])
    whole = gradient(cid(part(range(4)), DELTA[:4], LogMeanExp(0.5), {}, EXACT), theta)
    ranks = [
        gradient(
            cid(part(rows), DELTA[rows.start : rows.stop], LogMeanExp(0.5), {}, EXACT, lambda _: everything), theta
        )
        for rows in (range(2), range(2, 4))
    ]
    assert torch.allclose(sum(ranks) / 2, whole, rtol=1e-10)


# The oracle of methods.md 2.6: a logistic loss, a box of half-width 0.1, c = 1e-3.
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


@pytest.mark.parametrize(
    ("solver", "expected"),
    [
        (lambda inverse: ConjugateGradient(20, 1e-14, inverse), (-0.15525066, -0.36220906, -0.20709554)),
        (Diagonal, (-0.15525218, -0.36220264, -0.20710247)),
        (lambda inverse: None, (-0.15581077, -0.35983893, -0.20965307)),
    ],
    ids=["full", "hessian-free", "without"],
)
@pytest.mark.parametrize("composition", [RunningMean(lambda u: u), LogMeanExp(1.0)])  # of one sample: the same
def test_the_logistic_oracle_s_gradients(delta_hat, solver, expected, composition):
    theta = LOGISTIC_THETA.clone().requires_grad_()
    solve = solver(LOGISTIC_BOX.inverse_curvature(delta_hat))
    found = cid(lambda d: Terms(logistic(theta, d)), delta_hat, composition, {}, solve)
    assert torch.allclose(gradient(found, theta), torch.tensor(expected, dtype=torch.float64), rtol=0, atol=2e-8)
    assert math.isclose(found.values.item(), logistic(LOGISTIC_THETA, delta_hat).item())
