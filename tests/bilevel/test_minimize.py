"""`minimize` reaches solutions that are known."""

from functools import partial

import pytest
import torch
from scipy.optimize import minimize_scalar
from torch import nn

from doubly.bilevel import (
    Ball,
    Box,
    ChiSquare,
    CVaR,
    Descent,
    Direct,
    GradientStep,
    LogMeanExp,
    MeanVariance,
    RunningMean,
    Simplex,
    Terms,
)
from toy_bilevel import (
    DATA,
    EXACT,
    ONE,
    RIDGE,
    ROWS,
    START,
    A,
    B,
    C,
    D,
    N,
    P,
    logarithm,
    normal,
    quadratic,
    reachable,
    run,
    solution,
    without_ridge,
)

each_shape = pytest.mark.parametrize("shared", [False, True], ids=["rows", "shared"])


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.theta = nn.Parameter(START.clone())
        self.fixed = nn.Parameter(torch.ones(1), requires_grad=False)


KINDS = {
    "tensor": (START.clone, lambda theta: theta),
    "list": (lambda: [START[:1].clone(), START[1:].clone()], torch.cat),
    "dict": (lambda: {"a": START[0].clone(), "b": START[1].clone()}, lambda t: torch.stack([t["a"], t["b"]])),
    "module": (Net, lambda net: net.theta),
}


@each_shape
@pytest.mark.parametrize("kind", KINDS)
def test_a_quadratic_is_solved_whatever_theta_is(kind, shared):
    make, read = KINDS[kind]
    theta = make()
    result = run(
        theta,
        ONE if shared else ROWS,
        problem=lambda theta, delta, batch: quadratic(read(theta), delta, batch),
        steps=60,
        shared=shared,
    )
    expected = solution(shared)
    assert result.theta is theta and torch.allclose(read(theta), expected, atol=1e-6)
    delta = A @ expected + B
    delta = delta.mean(0) if shared else delta  # the minimizer of the mean of the h_i
    assert result.delta.shape == delta.shape and torch.allclose(result.delta, delta, atol=1e-5)
    outer = ((delta - C).square().sum(1) / 2).mean() + RIDGE / 2 * expected @ expected
    assert result.history["value"][-1].item() == pytest.approx(outer.item(), abs=1e-6)
    assert result.u.item() == pytest.approx(outer.item(), abs=1e-5)
    assert result.history["gradient"][-1] < 1e-5 < result.history["gradient"][0]
    if kind == "module":
        assert theta.fixed.tolist() == [1]


def test_any_torch_optimizer_will_do():
    for shared in (False, True):
        for optimizer, steps, tolerance in [
            (partial(torch.optim.SGD, lr=0.3, momentum=0.5), 40, 1e-4),
            (partial(torch.optim.Adam, lr=0.2), 60, 5e-2),
            (partial(torch.optim.LBFGS, max_iter=10), 4, 1e-5),
        ]:
            result = run(delta=ONE if shared else ROWS, optimizer=optimizer, steps=steps, shared=shared)
            assert torch.allclose(result.theta, solution(shared), atol=tolerance), (optimizer, shared)
            assert all(len(column) == steps for column in result.history.values())


def test_an_optimizer_that_tries_several_points_reports_the_one_it_started_at():
    several, single = run(optimizer=torch.optim.LBFGS, steps=1), run(steps=1)
    assert torch.equal(several.delta, single.delta) and not torch.equal(several.theta, single.theta)
    for name in ("value", "gradient", "gap"):
        assert torch.equal(several.history[name], single.history[name])


def test_an_optimizer_that_exists_is_used_and_keeps_its_state():
    theta = START.clone()
    optimizer = torch.optim.Adam([theta], lr=0.05)
    result = run(theta, optimizer=optimizer, steps=5)
    assert optimizer.state[theta]["step"] == 5
    assert torch.equal(result.theta, run(optimizer=partial(torch.optim.Adam, lr=0.05), steps=5).theta)


def test_g_of_width_three_and_a_curved_f():
    def f(u):
        return u[0].log() + u[0] * u[1].exp() + u[2].square()

    def wide(theta, delta, batch):
        distance = (delta - batch[2]).square().sum(1) / 2
        outer = torch.stack([1 + distance, 0.2 * delta @ theta.new_tensor([1, -1, 0.5]), delta[:, 0] * theta[0]], 1)
        return Terms(outer, quadratic(theta, delta, batch).inner)

    def gradient_norm(theta):
        theta = theta.clone().requires_grad_()
        return torch.autograd.grad(f(wide(theta, A @ theta + B, DATA).outer.mean(0)), theta)[0].norm().item()

    sgd = partial(torch.optim.SGD, lr=0.2)
    result = run(problem=wide, composition=RunningMean(f, 1.0), optimizer=sgd, steps=80)
    assert result.history["gradient"][0].item() == pytest.approx(gradient_norm(START), rel=1e-4)
    assert gradient_norm(result.theta) < 1e-5 < 0.5 < gradient_norm(START) and result.u.shape == (3,)


def test_small_batches_reach_a_solution_that_all_samples_share():
    theta, data = reachable()
    for batch_size in (3, 5):
        result = run(data=data, problem=without_ridge, batch_size=batch_size, steps=60, seed=1)
        assert torch.allclose(result.theta, theta, atol=1e-5) and torch.allclose(result.delta, data[2], atol=1e-4)


def test_every_composition_reaches_a_solution_that_all_samples_share():
    theta, data = reachable()
    capped = LogMeanExp(0.5, cap=2.0)
    for composition in (RunningMean(logarithm), LogMeanExp(0.5), capped, MeanVariance(), ChiSquare(), CVaR(0.4)):
        result = run(data=data, problem=without_ridge, batch_size=6, steps=40, composition=composition)
        assert (result.theta - theta).norm() < 0.15 < (START - theta).norm(), composition
        assert torch.equal(result.u, composition.estimate(result.state))


# An ordinary hyperparameter problem

X, X_VALIDATION = normal(20, 4, seed=4), normal(20, 4, seed=5)
SLOPES = torch.tensor([1.0, 0.0, -0.5, 0.0], dtype=torch.float64)
RIDGE_DATA = X, X @ SLOPES + normal(20, seed=6), X_VALIDATION, X_VALIDATION @ SLOPES + 0.5 * normal(20, seed=7)


def ridge(log_strength, weights, batch):
    x, y, x_validation, y_validation = batch
    inner = (x @ weights - y).square() / 2 + log_strength.exp() / 2 * weights @ weights
    return Terms((x_validation @ weights - y_validation).square() / 2, inner)


def validation_loss(log_strength):
    """F in closed form."""
    x, y, x_validation, y_validation = RIDGE_DATA
    matrix = x.T @ x / 20 + log_strength.exp() * torch.eye(4, dtype=torch.float64)
    weights = torch.linalg.solve(matrix, x.T @ y / 20)
    return (x_validation @ weights - y_validation).square().mean() / 2


def run_ridge(log_strength, optimizer, steps, descent, **options):
    start = torch.zeros(4, dtype=torch.float64)
    return run(log_strength, start, RIDGE_DATA, ridge, optimizer, steps, descent, shared=True, **options)


def test_the_hypergradient_of_ridge_regression_is_the_slope_of_its_closed_form():
    for number in (-3.0, -1.0, 1.0):
        strength, step = torch.tensor(number, dtype=torch.float64), 1e-5
        slope = (validation_loss(strength + step) - validation_loss(strength - step)) / 2 / step
        descent, sgd = Descent(GradientStep(0.25), 500, 1e-12), partial(torch.optim.SGD, lr=1.0)
        result = run_ridge(strength.clone(), sgd, 1, descent, solve=Direct())
        assert (strength - result.theta).item() == pytest.approx(slope.item(), rel=1e-6, abs=1e-9)
        assert result.history["value"].item() == pytest.approx(validation_loss(strength).item(), rel=1e-9)


def test_ridge_regression_finds_its_regularization():
    best = minimize_scalar(lambda t: validation_loss(torch.tensor(t, dtype=torch.float64)).item(), bounds=(-8, 4))
    lbfgs = partial(torch.optim.LBFGS, max_iter=10, line_search_fn="strong_wolfe")
    result = run_ridge(torch.tensor(1.0, dtype=torch.float64), lbfgs, 3, Descent(GradientStep(0.25), 300, 1e-9))
    assert -5 < best.x < 0 and result.theta.item() == pytest.approx(best.x, abs=1e-2)
    assert validation_loss(result.theta).item() == pytest.approx(best.fun, abs=1e-8)


# Constraints


def test_a_constraint_may_be_a_function_of_the_batch():
    """delta* = theta + b, clipped to an interval of the sample's own."""

    def clipped(theta, delta, batch):
        b, c, _, _ = batch
        return Terms((delta - c).square().sum(1) / 2, (delta - theta - b).square().sum(1) / 2)

    widths = torch.rand(2, N, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    offsets, lower, upper = normal(N, 1, seed=8), -widths[0], 0.5 + widths[1]
    expected = torch.tensor([0.4], dtype=torch.float64)
    targets, sgd = (expected + offsets).clamp(lower, upper), partial(torch.optim.SGD, lr=1.0)
    for batch_size in (None, 4):
        sizes = []

        def intervals(batch, sizes=sizes):
            sizes.append(len(batch[0]))
            return Box(*batch[2:])

        theta, start, data = -torch.ones(1).double(), torch.zeros(N, 1).double(), (offsets, targets, lower, upper)
        result = run(theta, start, data, clipped, sgd, 80, batch_size=batch_size, constraint=intervals)
        assert torch.allclose(result.theta, expected, atol=1e-6) and set(sizes) == {batch_size or N}
        assert torch.allclose(result.delta, targets, atol=1e-5)
        on_bound = (result.delta == lower) | (result.delta == upper)
        assert on_bound.any() and not on_bound.all()


@each_shape
def test_the_gradient_is_right_where_a_constraint_binds(shared):
    """A step of SGD moves theta by the slope of F, by finite differences through the inner solver."""
    step, units = 1e-5, torch.eye(P, dtype=torch.float64)
    for constraint, start in ((Box(-0.3, 0.3), ROWS), (Ball(0.5), ROWS), (Simplex(), ROWS + 1 / 3)):
        options = {"delta": start[0] if shared else start, "steps": 1, "descent": EXACT, "shared": shared}

        def run_at(theta, constraint=constraint, options=options):
            return run(theta, constraint=constraint, **options)

        values = [[run_at(START + s * step * unit).history["value"] for s in (1, -1)] for unit in units]
        slope = torch.cat([(up - down) / 2 / step for up, down in values])
        result = run_at(START.clone())
        assert torch.allclose((START - result.theta) / 0.4, slope, atol=1e-6), constraint
        assert slope.norm() > 0.01
        assert torch.allclose(constraint.project(result.delta.view(-1, D)), result.delta, atol=1e-9)
        assert not torch.allclose(result.delta, run(**options).delta, atol=1e-2)  # the constraint binds
