import math
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch
import torch.nn.functional as F

from doubly.bilevel import (
    Ball,
    BarrierStep,
    Box,
    ChiSquare,
    ConjugateGradient,
    CVaR,
    Diagonal,
    Direct,
    LogMeanExp,
    MeanVariance,
    Neumann,
    RunningMean,
    Simplex,
    SolverWarning,
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
    return torch.autograd.grad(direction.loss, theta)[0]


def problem(theta, outer=g, inner=h):
    def terms(delta):
        each = range(len(delta))
        values = torch.stack([outer(theta, delta[i], i) for i in each])
        return Terms(values, None if inner is None else torch.stack([inner(theta, delta[i], i) for i in each]))

    return terms


EXACT = ConjugateGradient(30, 1e-14)


@pytest.mark.parametrize("f", [lambda u: u, lambda u: u.log(), lambda u: u**3 - 2 * u, lambda u: (0.5 * u).exp()])
@pytest.mark.parametrize("solve", [EXACT, Neumann(0.15, 200)])
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

    def penalized(theta, delta, i):
        barrier = -5.0 * ((1.5 - delta).log() + (delta + 2.0).log()).sum() + 0.15 * delta.square().sum()
        return barrier - loss(theta, delta, i)

    def barrier_alone(delta, i):
        return torch.diag(5.0 * ((1.5 - delta) ** -2 + (delta + 2.0) ** -2) + 0.3)

    theta = THETA.clone().requires_grad_()
    solve = ConjugateGradient(30, 1e-14, inverse) if full else Diagonal(inverse)
    found = cid(problem(theta, loss, None), DELTA, LogMeanExp(0.5), {}, solve)
    expected = dense_cid(
        exponential, penalized, THETA, DELTA, lambda u: 0.5 * u.log(), curvature=None if full else barrier_alone
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
            cid(part(rows), DELTA[rows.start : rows.stop], LogMeanExp(0.5), {}, EXACT, all_gather=lambda _: everything),
            theta,
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


def shared_problem(theta, outer=g, inner=h):
    def terms(delta):
        values = torch.stack([outer(theta, delta, i) for i in range(N)])
        return Terms(values, None if inner is None else torch.stack([inner(theta, delta, i) for i in range(N)]))

    return terms


@pytest.mark.parametrize("outer", [g, g_vector])
def test_a_shared_delta_has_one_system_of_means(dense_cid, outer):
    theta = THETA.clone().requires_grad_()
    delta = DELTA[0].view(2, 2)  # of any shape

    def folded(function):
        return lambda theta, delta, i: function(theta, delta.flatten(), i)

    terms = shared_problem(theta, folded(outer), folded(h))
    found = cid(terms, delta, RunningMean(lambda u: u.square().sum()), {}, EXACT, shared=True)
    expected = dense_cid(outer, h, THETA, DELTA[0], lambda u: u.square().sum(), samples=N)
    assert torch.allclose(gradient(found, theta), expected, rtol=1e-8, atol=1e-8)
    assert found.residual.shape == (1,) and found.slope.shape == (1, 2, 2)
    slopes = torch.stack([torch.autograd.functional.jacobian(lambda d: h(THETA, d, i), DELTA[0]) for i in range(N)])  # noqa: B023
    assert torch.allclose(found.slope.flatten(), slopes.mean(0))


class Rank:
    """One of two threads that stand for processes: `gather` waits for the other."""

    meeting, table = Barrier(2, timeout=20), [None, None]

    def __init__(self, number):
        self.number = number

    def gather(self, numbers):
        self.table[self.number] = numbers
        self.meeting.wait()
        both = torch.cat(self.table)
        self.meeting.wait()
        return both


@pytest.mark.parametrize("limits", [None, Ball(0.5 * DELTA[0].norm().item())], ids=["free", "ball"])
def test_processes_that_share_delta_agree_on_its_system(limits):
    delta = DELTA[0] if limits is None else limits.project(DELTA[:1])[0]
    thetas = [THETA.clone().requires_grad_() for _ in range(3)]

    def direction(theta, samples, gather=lambda numbers: numbers):
        def terms(delta):
            values = torch.stack([g(theta, delta, i) for i in samples])
            return Terms(values, torch.stack([h(theta, delta, i) for i in samples]))

        found = cid(terms, delta, LogMeanExp(0.5), {}, EXACT, constraint=limits, shared=True, all_gather=gather)
        return gradient(found, theta), found

    whole, together = direction(thetas[2], range(4))
    with ThreadPoolExecutor(2) as pool:
        parts = pool.map(lambda n: direction(thetas[n], range(2 * n, 2 * n + 2), Rank(n).gather), range(2))
        (one, here), (other, there) = parts
    assert torch.allclose((one + other) / 2, whole, rtol=1e-10)
    assert torch.allclose(here.slope, together.slope) and torch.equal(here.slope, there.slope)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("limits", [None, Box(-0.2, 0.2), Ball(0.3)], ids=["free", "box", "ball"])
def test_a_zero_sum_problem_is_the_one_with_its_inner_function_written_out(limits, shared):
    def concave(theta, delta, i):
        return loss(theta, delta, i) - delta @ Q[i] @ delta

    start = DELTA[:1] if shared else DELTA
    delta = start if limits is None else limits.project(start)
    theta = THETA.clone().requires_grad_()
    found = []
    for inner in (None, lambda *arguments: -concave(*arguments)):
        make = shared_problem if shared else problem
        terms = make(theta, concave, inner)
        at = delta[0] if shared else delta
        direction = cid(terms, at, LogMeanExp(0.5), {}, EXACT, constraint=limits, shared=shared)
        found.append((gradient(direction, theta), direction.slope, direction.cotangents))
    for short, long in zip(*found, strict=True):
        assert torch.allclose(short, long, rtol=1e-10)


def test_the_values_at_the_previous_theta_correct_the_running_mean():
    before, now = THETA + 0.3, THETA.clone().requires_grad_()
    rule = RunningMean(lambda u: u**2, eta=0.6)
    state = {"u": torch.tensor(2.5, dtype=torch.float64)}
    previous = problem(before)(DELTA).outer.requires_grad_()
    found = cid(problem(now), DELTA, rule, state, EXACT, previous=previous)
    u = found.values.mean() + 0.4 * (2.5 - previous.detach().mean())
    assert torch.allclose(found.state["u"], u) and torch.allclose(found.cotangents, 2 * u.expand(N))
    assert not found.state["u"].requires_grad


def test_an_inner_function_without_delta_in_it_leaves_no_slope():
    theta = THETA.clone().requires_grad_()
    found = cid(problem(theta, g, lambda theta, delta, i: theta.sum()), DELTA, RunningMean(), {}, Diagonal(0 * DELTA))
    plain = cid(problem(theta), DELTA, RunningMean(), {})
    assert torch.equal(gradient(found, theta), gradient(plain, theta)) and not found.slope.any()


# Bad input: each message names the argument and the remedy


def with_terms(outer, inner=None, **options):
    """`cid` of terms that are functions of delta."""
    theta = THETA.clone().requires_grad_()
    options = {"composition": RunningMean(), "solve": Direct(), "delta": DELTA} | options
    delta, composition, solve = options.pop("delta"), options.pop("composition"), options.pop("solve")

    def terms(delta):
        return Terms(outer(theta, delta), None if inner is None else inner(theta, delta))

    return cid(terms, delta, composition, {}, solve, **options)


def per_sample(theta, delta):
    return (delta * theta.sum()).sum(-1) + delta.square().sum(-1)


@pytest.mark.parametrize(
    "outer",
    [
        lambda theta, delta: per_sample(theta, delta).mean(),
        lambda theta, delta: per_sample(theta, delta)[:3],
        lambda theta, delta: per_sample(theta, delta)[:, None, None],
    ],
    ids=["mean", "too few", "three dimensions"],
)
def test_an_outer_value_that_is_not_per_sample_is_named(outer):
    with pytest.raises(
        ValueError, match=r"outer must hold one g_i per sample, \(5,\) or \(5, m\).* before they are averaged"
    ):
        with_terms(outer, per_sample)


def test_an_outer_value_that_is_not_per_sample_is_named_where_delta_is_shared():
    with pytest.raises(ValueError, match=r"outer must hold one g_i per sample, \(B,\) or \(B, m\), got shape \(\)"):
        with_terms(per_sample, per_sample, delta=DELTA[0], shared=True)


@pytest.mark.parametrize(
    "inner",
    [
        lambda theta, delta: per_sample(theta, delta).sum(),
        lambda theta, delta: per_sample(theta, delta)[:, None],
        lambda theta, delta: delta.square(),
    ],
    ids=["sum", "column", "per coordinate"],
)
def test_an_inner_value_that_is_not_per_sample_is_named(inner):
    with pytest.raises(
        ValueError, match=r"inner must hold one h_i per sample, \(5,\), got .* before they are averaged"
    ):
        with_terms(per_sample, inner)


def test_a_vector_of_outer_values_needs_an_inner_function():
    with pytest.raises(ValueError, match=r"inner=None stands for -g, and g is a vector here: return h_i.* as inner"):
        with_terms(
            lambda theta, delta: torch.stack([per_sample(theta, delta)] * 2, 1), composition=RunningMean(torch.sum)
        )


def test_an_f_that_returns_a_vector_is_named():
    with pytest.raises(ValueError, match=r"f must return one number, got shape \(3,\) from u of shape \(\): reduce it"):
        with_terms(per_sample, per_sample, composition=RunningMean(lambda u: u * torch.ones(3)))


OUTSIDE = torch.tensor(
    [[0.1, 0.1, 0.1, 0.1], [1.0, 1.0, 0.0, 0.0], [0.0, 0.0, 0.0, -2.0], [0.0] * 4, [0.2] * 4]
).double()


@pytest.mark.parametrize(
    ("limits", "rows", "distance"),
    [(Box(-0.5, 0.5), 2, "1.5"), (Ball(1.0), 2, "1.0"), (Simplex(0.8), 4, "2.0"), (Ball(9.0, Box(-0.5, 2)), 1, "1.5")],
    ids=["box", "ball", "simplex", "ball with box"],
)
def test_a_delta_outside_its_constraint_is_named_with_the_remedy(limits, rows, distance):
    remedy = (
        rf"delta lies outside the constraint in {rows} of 5 rows, by up to {distance}e\+00: pass constraint.project\("
    )
    with pytest.raises(ValueError, match=remedy):
        with_terms(per_sample, per_sample, delta=OUTSIDE, constraint=limits)
    with_terms(per_sample, per_sample, delta=limits.project(OUTSIDE), constraint=limits)


def test_a_delta_that_is_not_a_number_is_outside_everything():
    with pytest.raises(ValueError, match="delta lies outside the constraint in 5 of 5 rows"):
        with_terms(per_sample, per_sample, delta=DELTA * torch.nan, constraint=Box(-1, 1))


def test_rounding_does_not_put_a_delta_outside():
    limits = Ball(1.0)
    with_terms(per_sample, per_sample, delta=limits.project(9 * DELTA.float()).double(), constraint=limits)


def saddle(theta, delta):
    return delta[:, 0].square() - delta[:, 1:].square().sum(1) + per_sample(theta, delta) - delta.square().sum(1)


@pytest.mark.parametrize("inner", [saddle, lambda theta, delta: (delta * theta[0]).sum(1)], ids=["saddle", "linear"])
def test_an_indefinite_or_singular_hessian_is_named(inner):
    with pytest.raises(
        ValueError, match=r"inner: its Hessian in delta is singular or indefinite in 5 of 5 .*add curvature"
    ):
        with_terms(per_sample, inner)
    with pytest.warns(
        SolverWarning, match=r"relative residual of .* inner has no positive curvature .*add curvature to inner"
    ):
        with_terms(per_sample, inner, solve=ConjugateGradient())


def test_an_indefinite_hessian_is_fine_where_the_constraint_holds_its_negative_directions():
    """Second-order sufficiency is asked on the face only."""
    limits = Box(torch.tensor([-9.0, -0.5, -0.5, -0.5]).double(), torch.tensor([9.0, 0.5, 0.5, 0.5]).double())
    theta = THETA.clone().requires_grad_()
    corner = torch.tensor([[0.0, 0.5, -0.5, 0.5]], dtype=torch.float64)
    delta = torch.cat([-theta.detach()[:1, None] / 2, corner[:, 1:]], 1)

    def terms(delta):
        h = delta[:, 0].square() + theta[0] * delta[:, 0] - delta[:, 1:].square().sum(1)
        return Terms((delta[:, 0] * theta[1]).sin() + delta.sum(1), h)

    for solve in (Direct(), ConjugateGradient(), Diagonal()):
        found = cid(terms, delta, RunningMean(), {}, solve, constraint=limits)
        best = -theta[0] / 2
        expected = torch.autograd.grad((best * theta[1]).sin() + best, theta)[0]
        assert torch.allclose(gradient(found, theta), expected, rtol=1e-12)


def test_a_diagonal_solve_on_a_sphere_warns_that_the_system_is_not_diagonal():
    limits = Ball(0.5)
    with pytest.warns(SolverWarning, match="not diagonal; use ConjugateGradient or Direct"):
        with_terms(
            lambda theta, delta: (delta * DELTA).sum(1),
            lambda theta, delta: 0.5 * (delta - 3 * DELTA - 1).square().sum(1),
            delta=limits.project(3 * DELTA + 1),
            constraint=limits,
            solve=Diagonal(),
        )


@pytest.mark.parametrize("solve", [Direct(), ConjugateGradient(), Diagonal()], ids=["direct", "cg", "diagonal"])
@pytest.mark.parametrize("shared", [False, True])
def test_a_delta_of_one_number_needs_no_axis(solve, shared):
    theta, target = THETA.clone().requires_grad_(), torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64)

    def terms(delta):
        return Terms(delta.square() + 0 * target, (delta - theta[0] * target).square())

    best = theta[0] * (target.mean() if shared else target)
    found = cid(terms, best.detach(), RunningMean(), {}, solve, shared=shared)
    expected = torch.autograd.grad((best.square() + 0 * target).mean(), theta)[0]
    assert torch.allclose(gradient(found, theta), expected)


@pytest.mark.parametrize(
    "composition", [LogMeanExp(), LogMeanExp(cap=2.0), MeanVariance(), ChiSquare(), CVaR()], ids=repr
)
def test_a_vector_of_outer_values_is_refused_by_compositions_of_losses(composition):
    with pytest.raises(ValueError, match="outer"):
        with_terms(
            lambda theta, delta: torch.stack([per_sample(theta, delta)] * 2, 1), per_sample, composition=composition
        )
