"""Algorithm 1 whole, on problems whose answer is known."""

import time
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import pytest
import torch
from scipy.optimize import minimize_scalar
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

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
    SolverWarning,
    Terms,
)
from doubly.bilevel import minimize as minimize

N, D, P = 12, 3, 2
CURVATURE = torch.tensor([1.0, 1.25, 0.8], dtype=torch.float64)
RIDGE = 0.1


def normal(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


A = 0.4 * normal(N, D, P, seed=1) + torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.3, 0.3]], dtype=torch.float64)
DATA = _, B, C = A, normal(N, D, seed=2), normal(N, D, seed=3)
START = torch.tensor([1.0, -1.0], dtype=torch.float64)
ROWS, ONE = torch.zeros(N, D, dtype=torch.float64), torch.zeros(D, dtype=torch.float64)
WELL = Descent(GradientStep(1.0), 8)  # which leaves 0.25^8 of the distance from the last delta
EXACTLY = Descent(GradientStep(1.0), 60, 1e-13)
SGD = partial(torch.optim.SGD, lr=0.4)


def quadratic(theta, delta, batch):
    """delta* = a theta + b of a sample, or its mean where delta is shared; g measures the distance from c."""
    a, b, c = batch
    inner = (CURVATURE * (delta - a @ theta - b).square()).sum(1) / 2
    return Terms((delta - c).square().sum(1) / 2 + RIDGE / 2 * theta @ theta, inner)


def answer(shared):
    """The theta at which the gradient of the mean of g(theta, delta*(theta)) vanishes."""
    a, b, c = (part.mean(0, keepdim=True) for part in DATA) if shared else DATA
    matrix = (a.mT @ a).mean(0) + RIDGE * torch.eye(P, dtype=torch.float64)
    return torch.linalg.solve(matrix, (a.mT @ (c - b)[..., None]).mean(0)[:, 0])


def run(theta=None, delta=ROWS, data=DATA, problem=quadratic, optimizer=SGD, steps=10, descent=WELL, **options):
    theta = START.clone() if theta is None else theta
    return minimize(problem, theta, delta, data, optimizer=optimizer, steps=steps, descent=descent, **options)


def logarithm(u):
    return (1 + u).log()


def alike(one, other, tolerance=0.0):
    """Two results, bit by bit or nearly."""
    pairs = [(one.theta, other.theta), (one.delta, other.delta), (one.u, other.u)]
    return all(torch.allclose(a, b, rtol=tolerance, atol=tolerance) for a, b in pairs)


# --- the answer is reached ---


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


@pytest.mark.parametrize("shared", [False, True], ids=["rows", "shared"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_quadratic_is_solved_whatever_theta_is(kind, shared):
    make, read = KINDS[kind]
    theta = make()
    found = run(
        theta,
        ONE if shared else ROWS,
        problem=lambda theta, delta, batch: quadratic(read(theta), delta, batch),
        steps=60,
        shared=shared,
    )
    expected = answer(shared)
    assert found.theta is theta and torch.allclose(read(theta), expected, atol=1e-6)
    solution = A @ expected + B
    if shared:  # the minimizer of the mean of the h_i
        solution = solution.mean(0)
    assert found.delta.shape == solution.shape and torch.allclose(found.delta, solution, atol=1e-5)
    outer = ((solution - C).square().sum(1) / 2).mean() + RIDGE / 2 * expected @ expected
    assert found.history["value"][-1].item() == pytest.approx(outer.item(), abs=1e-6)
    assert found.u.item() == pytest.approx(outer.item(), abs=1e-5)
    assert found.history["gradient"][-1] < 1e-5 < found.history["gradient"][0]
    if kind == "module":
        assert theta.fixed.tolist() == [1]


@pytest.mark.parametrize("shared", [False, True], ids=["rows", "shared"])
@pytest.mark.parametrize(
    ("optimizer", "steps", "tolerance"),
    [
        (partial(torch.optim.SGD, lr=0.3, momentum=0.5), 60, 1e-5),
        (partial(torch.optim.Adam, lr=0.2), 80, 2e-2),
        (partial(torch.optim.LBFGS, max_iter=10), 4, 1e-5),
    ],
    ids=["momentum", "Adam", "LBFGS"],
)
def test_any_torch_optimiser_will_do(optimizer, steps, tolerance, shared):
    found = run(delta=ONE if shared else ROWS, optimizer=optimizer, steps=steps, shared=shared)
    assert torch.allclose(found.theta, answer(shared), atol=tolerance)
    assert all(len(column) == steps for column in found.history.values())


def test_an_optimiser_that_tries_several_points_tells_of_the_one_it_began_at():
    tried, once = run(optimizer=torch.optim.LBFGS, steps=1), run(steps=1)
    assert torch.equal(tried.delta, once.delta) and not torch.equal(tried.theta, once.theta)
    for name in ("value", "gradient", "gap"):
        assert torch.equal(tried.history[name], once.history[name])


def test_an_optimiser_that_exists_is_used_and_keeps_its_state():
    theta = START.clone()
    optimizer = torch.optim.Adam([theta], lr=0.05)
    found = run(theta, optimizer=optimizer, steps=5)
    assert optimizer.state[theta]["step"] == 5
    assert torch.equal(found.theta, run(optimizer=partial(torch.optim.Adam, lr=0.05), steps=5).theta)


def f(u):
    return u[0].log() + u[0] * u[1].exp() + u[2].square()


def width_three(theta, delta, batch):
    near = (delta - batch[2]).square().sum(1) / 2
    outer = torch.stack([1 + near, 0.2 * delta @ theta.new_tensor([1, -1, 0.5]), delta[:, 0] * theta[0]], 1)
    return Terms(outer, quadratic(theta, delta, batch).inner)


def closed_form_gradient(theta):
    theta = theta.clone().requires_grad_()
    value = f(width_three(theta, A @ theta + B, DATA).outer.mean(0))
    return torch.autograd.grad(value, theta)[0]


def test_g_of_width_three_and_a_curved_f():
    found = run(
        problem=width_three, composition=RunningMean(f, 1.0), optimizer=partial(torch.optim.SGD, lr=0.2), steps=80
    )
    assert found.history["gradient"][0].item() == pytest.approx(closed_form_gradient(START).norm().item(), rel=1e-4)
    assert closed_form_gradient(START).norm() > 0.5
    assert closed_form_gradient(found.theta).norm() < 1e-5
    assert found.u.shape == (3,)


def reachable():
    """Data for which one theta makes every g_i zero: then small batches have no noise at the answer."""
    hidden = torch.tensor([0.3, 0.7], dtype=torch.float64)
    return hidden, (A, B, A @ hidden + B)


def without_ridge(theta, delta, batch):
    terms = quadratic(theta, delta, batch)
    return terms._replace(outer=terms.outer - RIDGE / 2 * theta @ theta)


@pytest.mark.parametrize("batch_size", [3, 5])
def test_small_batches_reach_an_answer_that_all_samples_share(batch_size):
    hidden, data = reachable()
    found = run(data=data, problem=without_ridge, batch_size=batch_size, steps=60, seed=1)
    assert torch.allclose(found.theta, hidden, atol=1e-5)
    assert torch.allclose(found.delta, data[2], atol=1e-4)


@pytest.mark.parametrize(
    "composition",
    [
        RunningMean(logarithm),
        LogMeanExp(0.5),
        LogMeanExp(0.5, cap=2.0),
        MeanVariance(),
        ChiSquare(),
        CVaR(0.4),
    ],
    ids=lambda c: type(c).__name__,
)
def test_every_composition_reaches_an_answer_that_all_samples_share(composition):
    hidden, data = reachable()
    found = run(data=data, problem=without_ridge, batch_size=6, steps=40, composition=composition)
    assert (found.theta - hidden).norm() < 0.15 < (START - hidden).norm()
    assert torch.equal(found.u, composition.estimate(found.state))


# --- an ordinary hyper-parameter problem ---

X, X_HELD_OUT = normal(20, 4, seed=4), normal(20, 4, seed=5)
SLOPES = torch.tensor([1.0, 0.0, -0.5, 0.0], dtype=torch.float64)
RIDGE_DATA = X, X @ SLOPES + normal(20, seed=6), X_HELD_OUT, X_HELD_OUT @ SLOPES + 0.5 * normal(20, seed=7)


def ridge(log_strength, weights, batch):
    x, y, x_held_out, y_held_out = batch
    inner = (x @ weights - y).square() / 2 + log_strength.exp() / 2 * weights @ weights
    return Terms((x_held_out @ weights - y_held_out).square() / 2, inner)


def held_out_loss(log_strength):
    """F in closed form."""
    x, y, x_held_out, y_held_out = RIDGE_DATA
    matrix = x.T @ x / 20 + log_strength.exp() * torch.eye(4, dtype=torch.float64)
    weights = torch.linalg.solve(matrix, x.T @ y / 20)
    return (x_held_out @ weights - y_held_out).square().mean() / 2


@pytest.mark.parametrize("at", [-3.0, -1.0, 1.0])
def test_the_hypergradient_of_ridge_regression_is_the_slope_of_its_closed_form(at):
    log_strength, step = torch.tensor(at, dtype=torch.float64), 1e-5
    slope = (held_out_loss(log_strength + step) - held_out_loss(log_strength - step)) / 2 / step
    found = run(
        log_strength.clone(),
        torch.zeros(4, dtype=torch.float64),
        RIDGE_DATA,
        ridge,
        partial(torch.optim.SGD, lr=1.0),
        1,
        Descent(GradientStep(0.25), 500, 1e-12),
        shared=True,
        solve=Direct(),
    )
    assert (log_strength - found.theta).item() == pytest.approx(slope.item(), rel=1e-6, abs=1e-9)
    assert found.history["value"].item() == pytest.approx(held_out_loss(log_strength).item(), rel=1e-9)


def test_ridge_regression_finds_its_regularization():
    best = minimize_scalar(lambda t: held_out_loss(torch.tensor(t, dtype=torch.float64)).item(), bounds=(-8, 4))
    found = run(
        torch.tensor(1.0, dtype=torch.float64),
        torch.zeros(4, dtype=torch.float64),
        RIDGE_DATA,
        ridge,
        partial(torch.optim.LBFGS, max_iter=10, line_search_fn="strong_wolfe"),
        3,
        Descent(GradientStep(0.25), 300, 1e-9),
        shared=True,
    )
    assert -5 < best.x < 0 and found.theta.item() == pytest.approx(best.x, abs=1e-2)
    assert held_out_loss(found.theta).item() == pytest.approx(best.fun, abs=1e-8)


# --- constraints ---


def held_back(theta, delta, batch):
    """delta* = theta + b, pressed into the sample's own interval."""
    b, c, _, _ = batch
    return Terms((delta - c).square().sum(1) / 2, (delta - theta - b).square().sum(1) / 2)


WIDTHS = torch.rand(2, N, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
OFFSETS, LOWER, UPPER = normal(N, 1, seed=8), -WIDTHS[0], 0.5 + WIDTHS[1]
HIDDEN = torch.tensor([0.4], dtype=torch.float64)
INTERVALS = OFFSETS, (HIDDEN + OFFSETS).clamp(LOWER, UPPER), LOWER, UPPER


@pytest.mark.parametrize("batch_size", [None, 4])
def test_a_constraint_may_be_a_function_of_the_batch(batch_size):
    seen = []

    def intervals(batch):
        seen.append(len(batch[0]))
        return Box(*batch[2:])

    found = run(
        torch.full((1,), -1.0, dtype=torch.float64),
        torch.zeros(N, 1, dtype=torch.float64),
        INTERVALS,
        held_back,
        batch_size=batch_size,
        constraint=intervals,
        steps=80,
        optimizer=partial(torch.optim.SGD, lr=1.0),
    )
    assert torch.allclose(found.theta, HIDDEN, atol=1e-6) and set(seen) == {batch_size or N}
    assert torch.allclose(found.delta, INTERVALS[1], atol=1e-5)
    held = (found.delta == LOWER) | (found.delta == UPPER)
    assert held.any() and not held.all()


@pytest.mark.parametrize(
    ("constraint", "start"),
    [(Box(-0.3, 0.3), ROWS), (Ball(0.5), ROWS), (Simplex(), ROWS + 1 / 3)],
    ids=["box", "ball", "simplex"],
)
@pytest.mark.parametrize("shared", [False, True], ids=["rows", "shared"])
def test_the_gradient_is_right_where_a_constraint_binds(constraint, start, shared):
    """The move of one step of length one is the slope of F, by finite differences through the inner solver."""
    start = start[0] if shared else start

    def outer(theta):
        return run(theta, start, optimizer=SGD, steps=1, descent=EXACTLY, shared=shared, constraint=constraint)

    step = 1e-5
    units = torch.eye(P, dtype=torch.float64)
    values = [[outer(START + s * step * unit).history["value"] for s in (1, -1)] for unit in units]
    slope = torch.cat([(up - down) / 2 / step for up, down in values])
    found = outer(START.clone())
    assert torch.allclose((START - found.theta) / 0.4, slope, atol=1e-6)
    assert slope.norm() > 0.01 and torch.allclose(constraint.project(found.delta.view(-1, D)), found.delta, atol=1e-9)
    assert not torch.allclose(found.delta, run(steps=1, descent=EXACTLY, delta=start, shared=shared).delta, atol=1e-2)


# --- options ---


@pytest.mark.parametrize("shared", [False, True], ids=["rows", "shared"])
def test_a_warm_start_brings_one_inner_step_near(shared):
    options = {
        "delta": ONE if shared else ROWS,
        "shared": shared,
        "steps": 30,
        "descent": Descent(GradientStep(0.3), 1),
    }
    warm, cold = run(**options), run(**options, warm_start=False)
    assert warm.history["gap"][-1] < 1e-2 * cold.history["gap"][-1]
    errors = [(found.theta - answer(shared)).norm() for found in (warm, cold)]
    assert errors[0] < 0.1 * errors[1]


@dataclass(frozen=True)
class Watching(GradientStep):
    """Keeps where each inner solve began."""

    size: float = 1.0
    starts: list = field(default_factory=list)

    def init(self, delta):
        self.starts.append(delta.detach().clone())
        return {}


def test_a_sample_starts_from_its_own_last_delta():
    given, rule, found = normal(N, D, seed=10), Watching(), []
    for steps in (3, 4):
        found.append(run(delta=given, batch_size=4, steps=steps, descent=Descent(rule, 3)))
    first_epoch, again = torch.cat(rule.starts[3:6]), rule.starts[6]
    assert torch.equal(first_epoch.sort(0).values, given.sort(0).values)  # each sample once, from what was given
    moved = (found[0].delta != found[1].delta).any(1)  # those of the fourth step
    assert moved.sum() == 4
    assert torch.equal(again.sort(0).values, found[0].delta[moved].sort(0).values)


def test_without_a_warm_start_every_solve_begins_at_the_delta_given():
    given, rule = normal(N, D, seed=10), Watching()
    run(delta=given, steps=3, descent=Descent(rule, 3), warm_start=False)
    assert len(rule.starts) == 3 and all(torch.equal(start, given) for start in rule.starts)


def test_the_gap_is_what_the_inner_steps_left():
    """On h = |delta - s|^2 / 2 a step of size 0.3 leaves 0.7 of the distance."""

    def round_one(theta, delta, batch):
        return quadratic(theta, delta, batch)._replace(inner=(delta - A @ theta - B).square().sum(1) / 2)

    found = run(problem=round_one, steps=1, descent=Descent(GradientStep(0.3), 5))
    left = 0.7**5 * (A @ START + B).norm(dim=1).max()
    assert found.history["gap"].item() == pytest.approx(left.item(), rel=1e-12)
    assert found.history["residual"] < 1e-5


def test_schedules_of_the_step_size_and_of_eta_are_followed():
    sizes, shares, moves, means = [0.4, 0.0, 0.1], [1.0, 0.5, 0.25], [START], []

    def callback(step):
        moves.append(step.theta.clone())
        means.append(step.direction.values.mean())

    found = run(steps=3, step_size=sizes.__getitem__, eta=shares.__getitem__, callback=callback)
    assert found.history["step_size"].tolist() == sizes and found.history["eta"].tolist() == shares
    assert torch.equal(moves[2], moves[1]) and not torch.equal(moves[3], moves[2])
    for i in (0, 2):
        assert (moves[i + 1] - moves[i]).norm().item() == pytest.approx(sizes[i] * found.history["gradient"][i].item())
    u = means[0]
    for share, mean in zip(shares, means, strict=True):
        u = (1 - share) * u + share * mean
    assert found.u.item() == pytest.approx(u.item(), rel=1e-12)


def test_without_schedules_the_history_has_what_optimiser_and_composition_say():
    found = run(steps=2, composition=LogMeanExp(1.0, 0.7))
    assert found.history["step_size"].tolist() == [0.4, 0.4] and found.history["eta"].tolist() == [0.7, 0.7]


def test_the_history_has_one_number_per_step_in_each_column():
    found = run(steps=7, batch_size=4)
    assert set(found.history) == {"value", "gradient", "gap", "residual", "step_size", "eta"}
    assert all(column.shape == (7,) and column.isfinite().all() for column in found.history.values())


def test_a_callback_is_told_the_truth_after_each_step():
    seen = []

    def callback(step):
        seen.append((step.number, step.theta.clone(), step.delta.clone(), step.direction, dict(step.record)))

    found = run(steps=4, callback=callback)
    assert [number for number, *_ in seen] == [0, 1, 2, 3]
    theta = START
    for number, after, delta, direction, record in seen:
        terms = quadratic(theta, delta, DATA)
        assert torch.allclose(direction.values, terms.outer)  # g at the theta before the step
        assert record["value"] == pytest.approx(terms.outer.mean().item())
        assert record == {name: column[number].item() for name, column in found.history.items()}
        assert (after - theta).norm().item() == pytest.approx(0.4 * record["gradient"])
        theta = after
    assert torch.equal(theta, found.theta) and torch.equal(seen[-1][2], found.delta)


def test_a_callback_that_returns_true_ends_the_run():
    seen = []
    found = run(steps=50, callback=lambda step: seen.append(step.number) or step.number == 4)
    assert seen == [0, 1, 2, 3, 4] and all(len(column) == 5 for column in found.history.values())
    assert alike(found, run(steps=5))


@pytest.mark.parametrize("composition", [RunningMean(logarithm, 0.3), LogMeanExp(0.5, 0.3), CVaR(0.3, 0.3)])
def test_two_calls_are_one_long_one_on_the_full_batch(composition):
    whole = run(steps=8, composition=composition)
    half = run(steps=4, composition=composition)
    rest = run(half.theta, half.delta, steps=4, composition=composition, state=half.state)
    assert alike(rest, whole)
    assert all(torch.equal(torch.cat([half.history[k], rest.history[k]]), whole.history[k]) for k in whole.history)
    forgetful = run(steps=4, composition=composition)
    forgetful = run(forgetful.theta, forgetful.delta, steps=4, composition=composition)
    assert not torch.allclose(forgetful.theta, whole.theta, rtol=1e-8)


def test_two_calls_are_one_long_one_on_small_batches_if_the_batches_go_on():
    """An iterator of batches goes on where it was; rows in memory are shuffled from the seed in each call."""

    def stream():
        for first in range(100):
            yield tuple(part[torch.arange(first, first + 4) % N] for part in DATA)

    again = partial(run, composition=LogMeanExp(0.5, 0.3), shared=True)
    whole, batches = again(delta=ONE, data=stream(), steps=8), stream()
    half = again(delta=ONE, data=batches, steps=4)
    rest = again(half.theta, half.delta, batches, steps=4, state=half.state)
    assert alike(rest, whole)

    whole = run(batch_size=4, steps=6)  # an epoch is three steps
    half = run(batch_size=4, steps=3)
    rest = run(half.theta, half.delta, batch_size=4, steps=3, state=half.state)
    assert not alike(rest, whole)


def test_what_a_call_does_not_hand_on_is_the_memory_of_the_optimiser_and_storm_s_last_theta():
    momentum = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    for options in ({"optimizer": momentum}, {"storm": True, "composition": RunningMean(logarithm, 0.3)}):
        whole, half = run(steps=6, **options), run(steps=3, **options)
        rest = run(half.theta, half.delta, steps=3, state=half.state, **options)
        assert not torch.allclose(rest.theta, whole.theta, rtol=1e-8)
    theta = START.clone()
    optimizer = momentum([theta])  # one that exists is handed on by its owner
    half = run(theta, optimizer=optimizer, steps=3)
    assert alike(
        run(theta, half.delta, optimizer=optimizer, steps=3, state=half.state), run(optimizer=momentum, steps=6)
    )


def test_storm_follows_the_full_batch_exactly_however_small_eta_is():
    curved = partial(run, steps=12, descent=EXACTLY)
    exact = curved(composition=RunningMean(logarithm, 1.0))
    storm = curved(composition=RunningMean(logarithm, 0.1), storm=True)
    plain = curved(composition=RunningMean(logarithm, 0.1))
    assert alike(storm, exact, 1e-9)
    assert plain.u > 1.05 * exact.u  # it lags behind a value that falls


@pytest.mark.parametrize("shared", [False, True], ids=["rows", "shared"])
def test_storm_sees_the_same_samples_at_the_theta_before(shared):
    """u by hand, from inner problems that are solved exactly: on small batches the order of the samples matters."""
    seen, thetas = [], [START]

    def callback(step):
        seen.append(step.direction.values.mean())
        thetas.append(step.theta.clone())

    batches = [tuple(part[first : first + 4] for part in DATA) for first in (0, 4, 8)]
    start = ONE if shared else ROWS[:4]
    found = run(
        delta=start,
        data=batches,
        steps=3,
        composition=RunningMean(logarithm, 0.3),
        storm=True,
        shared=shared,
        descent=EXACTLY,
        callback=callback,
        optimizer=partial(torch.optim.SGD, lr=0.05),
    )
    u = seen[0]
    for number in (1, 2):
        a, b, _ = batches[number]
        solution = (a @ thetas[number - 1] + b).mean(0) if shared else a @ thetas[number - 1] + b
        before = quadratic(thetas[number - 1], solution, batches[number]).outer.mean()
        u = seen[number] + 0.7 * (u - before)
    assert found.u.item() == pytest.approx(u.item(), rel=1e-9)


@pytest.mark.parametrize("composition", [ChiSquare(), CVaR()], ids=lambda c: type(c).__name__)
def test_storm_and_a_threshold_exclude_each_other(composition):
    with pytest.raises(ValueError, match="leave storm off"):
        run(composition=composition, storm=True)


def test_without_a_solver_the_implicit_term_is_left_out():
    found = run(steps=1, solve=None)
    assert torch.allclose(START - found.theta, 0.4 * RIDGE * START)  # all that g says of theta itself
    assert found.history["gap"].isnan().all() and found.history["residual"].isnan().all()
    assert found.history["value"].isfinite().all()


@pytest.mark.parametrize("shared", [False, True], ids=["rows", "shared"])
@pytest.mark.parametrize("storm", [False, True], ids=["plain", "storm"])
def test_inner_alone_gives_the_same_run_for_fewer_calls_of_the_problem(shared, storm):
    calls = []

    def counted(theta, delta, batch):
        calls.append(1)
        return quadratic(theta, delta, batch)

    options = {"delta": ONE if shared else ROWS, "shared": shared, "batch_size": 4, "steps": 5, "storm": storm}
    whole = run(problem=counted, **options)
    many = len(calls)
    alone = run(problem=counted, inner=lambda *arguments: quadratic(*arguments).inner, **options)
    assert alike(alone, whole) and many >= 5 * 9
    assert all(torch.equal(alone.history[name], whole.history[name]) for name in whole.history)
    assert len(calls) - many == (9 if storm else 5)


def test_a_zero_sum_problem_needs_no_inner():
    """h = -g: a saddle point, concave in delta."""

    def saddle(theta, delta, batch):
        return Terms((theta - 1).square().sum() + delta @ theta - delta.square().sum(1) / 2)

    found = run(delta=ROWS[:, :2], problem=saddle, steps=60)
    assert torch.allclose(found.theta, torch.full((2,), 2 / 3, dtype=torch.float64), atol=1e-6)
    assert torch.allclose(found.delta, found.theta.expand(N, 2), atol=1e-5)


# --- where batches come from ---


class Sample(NamedTuple):
    a: torch.Tensor
    b: torch.Tensor
    c: torch.Tensor


@pytest.mark.parametrize(
    ("data", "read"),
    [
        (Sample(*DATA), lambda batch: (batch.a, batch.b, batch.c)),
        (dict(zip("abc", DATA, strict=True)), lambda batch: tuple(batch[name] for name in "abc")),
    ],
    ids=["NamedTuple", "dict"],
)
def test_data_may_be_any_collection_of_rows(data, read):
    found = run(data=data, problem=lambda t, d, batch: quadratic(t, d, read(batch)), batch_size=4, steps=6)
    assert alike(found, run(batch_size=4, steps=6))


def test_data_may_be_one_tensor_or_nothing():
    def whole(theta, delta, batch):
        return quadratic(theta, delta, DATA)

    def picked(theta, delta, batch):
        return quadratic(theta, delta, [part[batch] for part in DATA])

    assert alike(run(data=None, problem=whole), run())
    assert alike(run(data=torch.arange(N), problem=picked, batch_size=4), run(batch_size=4))


def test_a_loader_begins_again_as_often_as_it_takes():
    loader = DataLoader(TensorDataset(*reachable()[1]), 4, shuffle=True, generator=torch.Generator().manual_seed(0))
    found = run(delta=ROWS[:4], data=loader, problem=without_ridge, steps=60)
    assert torch.allclose(found.theta, reachable()[0], atol=1e-5)
    assert found.delta.shape == (4, D) and len(found.history["value"]) == 60


def test_a_generator_ends_the_run_when_it_ends():
    batches = (tuple(part[first : first + 4] for part in DATA) for first in (0, 4, 8))
    found = run(delta=ROWS[:4], data=batches, steps=100)
    assert all(len(column) == 3 for column in found.history.values())


def test_the_rows_of_a_batch_made_elsewhere_start_fresh():
    rule, given = Watching(), normal(4, D, seed=10)
    run(delta=given, data=[tuple(part[:4] for part in DATA)], steps=3, descent=Descent(rule, 3))
    assert all(torch.equal(start, given) for start in rule.starts) and len(rule.starts) == 3


# --- what belongs to the caller ---


def test_flags_gradients_delta_data_and_state_are_as_found():
    theta, other = START[:1].clone(), START[1:].clone().requires_grad_()
    other.grad = kept = torch.full((1,), 7.0, dtype=torch.float64)
    delta, copies = ROWS.clone().requires_grad_(), [part.clone() for part in DATA]
    state = {"u": torch.tensor(3.0, dtype=torch.float64)}
    run(
        [theta, other],
        delta,
        problem=lambda t, d, batch: quadratic(torch.cat(t), d, batch),
        steps=3,
        batch_size=4,
        state=state,
        storm=True,
    )
    assert not theta.requires_grad and theta.grad is None
    assert other.requires_grad and other.grad is kept and kept.item() == 7
    assert delta.requires_grad and torch.equal(delta, ROWS) and delta.grad is None
    assert all(torch.equal(part, copy) for part, copy in zip(DATA, copies, strict=True))
    assert state["u"].item() == 3 and not torch.equal(theta, START[:1])


def test_the_result_needs_no_gradients():
    found = run(steps=2)
    assert not any(t.requires_grad for t in (found.theta, found.delta, found.u, *found.history.values()))


def test_the_global_generator_is_left_alone_and_the_seed_decides():
    before = torch.get_rng_state()
    one, same, other = (run(batch_size=4, steps=7, seed=seed) for seed in (5, 5, 6))
    assert torch.equal(torch.get_rng_state(), before)
    assert alike(one, same) and not alike(one, other)
    torch.rand(1)
    assert alike(one, run(batch_size=4, steps=7, seed=5))
    torch.set_rng_state(before)


def test_single_precision_stays_single():
    def single(theta, delta, batch):
        a, b, c = batch
        return Terms((delta - c).square().sum(1) / 2, (delta - a @ theta - b).square().sum(1) / 2)

    found = run(START.float(), ROWS.float(), tuple(part.float() for part in DATA), single, steps=3)
    assert {found.theta.dtype, found.delta.dtype, found.u.dtype} == {torch.float32}


def test_the_bar_is_on_stderr_and_ends_its_line(capfd):
    run(steps=5)
    assert capfd.readouterr() == ("", "")
    run(steps=5, progress=True)
    out, err = capfd.readouterr()
    assert out == "" and err.endswith("\n") and err.count("\n") == 1 and "5/5" in err and "value" in err
    run(steps=5, progress=True, callback=lambda step: step.number == 2)
    out, err = capfd.readouterr()
    assert out == "" and err.endswith("\n")


# --- what goes wrong ---


def spoiled(number):
    """Batches of which one has a NaN that reaches g by theta alone."""
    for step in range(100):
        yield torch.full((N, 1), torch.nan if step == number else 1.0, dtype=torch.float64)


def test_a_value_that_is_not_finite_stops_the_run_and_names_the_step():
    def noisy(theta, delta, batch):
        terms = quadratic(theta, delta, DATA)
        return terms._replace(outer=terms.outer + (batch * theta).sum(1))

    theta = START.clone()
    with pytest.raises(ArithmeticError, match=r"step 3: .*not finite"):
        run(theta, data=spoiled(3), problem=noisy)
    assert not theta.requires_grad and theta.grad is None


def noisy_inside(theta, delta, batch):
    terms = quadratic(theta, delta, DATA)
    return terms._replace(inner=terms.inner * batch[:, 0])


def test_an_inner_gradient_that_is_not_finite_stops_the_run():
    with pytest.raises(ArithmeticError, match="gradient of the inner function"):
        run(data=spoiled(3), problem=noisy_inside)


def test_an_inner_gradient_that_is_not_finite_names_the_step():
    with pytest.raises(ArithmeticError, match="step 3"):
        run(data=spoiled(3), problem=noisy_inside)


def test_theta_is_the_last_good_one_after_a_failure():
    theta = START.clone()

    def noisy(theta, delta, batch):
        terms = quadratic(theta, delta, DATA)
        return terms._replace(outer=terms.outer + (batch * theta).sum(1))

    with pytest.raises(ArithmeticError):
        run(theta, data=spoiled(3), problem=noisy)
    assert theta.isfinite().all()


def test_the_bar_ends_its_line_after_a_failure_too(capfd):
    def failing(step):
        time.sleep(0.15)  # longer than the bar waits between two drawings
        if step.number == 2:
            raise KeyError

    with pytest.raises(KeyError):
        run(steps=5, progress=True, callback=failing)
    assert capfd.readouterr().err.endswith("\n")


def mean_of(part):
    def problem(theta, delta, batch):
        terms = quadratic(theta, delta, batch)
        return terms._replace(**{part: getattr(terms, part).mean()})

    return problem


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"theta": ["a"]}, TypeError, "theta must be a module"),
        ({"theta": START.clone().requires_grad_() * 2}, TypeError, r"use tensor\.detach\(\)"),
        ({"theta": torch.tensor([1, 2])}, TypeError, "floating-point"),
        ({"optimizer": SGD([torch.ones(2, requires_grad=True)])}, ValueError, "optimizer does not hold all tensors"),
        ({"batch_size": 0}, ValueError, "batch_size=0 is not allowed: 1 to 12"),
        ({"batch_size": 13}, ValueError, "batch_size=13 is not allowed: 1 to 12"),
        ({"delta": ROWS[:5]}, ValueError, r"equally many rows.*\[5, 12\]"),
        ({"data": (A, B, C[:5])}, ValueError, r"equally many rows.*\[5, 12\]"),
        (
            {"delta": ROWS + 3, "constraint": Box(-1.0, 1.0)},
            ValueError,
            r"outside the constraint in 12 of 12 .*project",
        ),
        ({"delta": ONE + 3, "shared": True, "constraint": Ball(1.0)}, ValueError, "outside the constraint in 1 of 1"),
        ({"steps": 0}, ValueError, "steps must be positive"),
        ({"data": iter([])}, ValueError, "data must hold a batch"),
        ({"problem": mean_of("outer")}, ValueError, r"outer must hold one g_i per sample.*before they are averaged"),
        ({"problem": mean_of("inner")}, ValueError, r"inner must hold one h_i per sample.*before they are averaged"),
        ({"composition": RunningMean(lambda u: u.expand(2))}, ValueError, "f must return one number"),
        ({"eta": lambda step: 1.5}, ValueError, r"eta=1\.5 is not allowed"),
        (
            {"problem": lambda t, d, b: Terms(torch.stack([quadratic(t, d, b).outer] * 2, 1))},
            ValueError,
            "return h_i, one number per sample, as inner",
        ),
        pytest.param(
            {"inner": lambda t, d, b: quadratic(t, d, b).inner.mean()},
            ValueError,
            "inner must hold one h_i per sample",
        ),
        pytest.param(
            {"problem": lambda t, d, b: quadratic(START, d, b)},
            ValueError,
            "theta",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_bad_input_is_refused_with_the_remedy(options, error, said):
    with pytest.raises(error, match=said):
        run(**options)


# --- shapes of delta ---


def flat(theta, delta, batch):
    """delta is one number per sample, or one number."""
    a, b, c = (part.flatten(1)[:, 0] for part in batch)
    return Terms((delta - c).square() / 2 + RIDGE / 2 * theta.square(), (delta - a * theta - b).square() / 2)


@pytest.mark.parametrize("delta", [torch.zeros(N, 2, 3), torch.zeros(N, 1)], ids=["image", "column"])
def test_a_row_of_delta_may_have_any_shape_with_an_axis(delta):
    def spread(theta, delta, batch):
        return Terms((delta - 1).square().flatten(1).sum(1), (delta - theta).square().flatten(1).sum(1))

    mild = partial(torch.optim.SGD, lr=0.1)
    found = run(torch.zeros(()), delta, None, spread, mild, 60, Descent(GradientStep(0.5), 2))
    assert found.theta.item() == pytest.approx(1, abs=1e-5) and found.delta.shape == delta.shape


@pytest.mark.parametrize("shared", [False, True], ids=["rows", "shared"])
def test_delta_may_be_one_number_per_sample_or_one_number(shared):
    delta = torch.zeros(() if shared else N, dtype=torch.float64)
    found = run(torch.zeros((), dtype=torch.float64), delta, problem=flat, steps=60, shared=shared)
    a, b, c = (part.flatten(1)[:, 0] for part in DATA)
    a, b, c = (a.mean(), b.mean(), c.mean()) if shared else (a, b, c)
    expected = (a * (c - b)).mean() / ((a * a).mean() + RIDGE)
    assert found.theta.item() == pytest.approx(expected.item(), abs=1e-6)


def test_a_shared_delta_needs_no_data():
    def whole(theta, delta, batch):
        return quadratic(theta, delta, DATA)

    assert alike(run(delta=ONE, data=None, problem=whole, shared=True), run(delta=ONE, shared=True))


# --- what is said, and how often ---


def flat_in_one_coordinate(theta, delta, batch):
    """h does not curve in the last coordinate of delta, and g pulls there."""
    terms = quadratic(theta, delta, batch)
    return terms._replace(inner=(delta[:, :2] - theta).square().sum(1) + 0 * delta.sum(1))


def test_a_solve_that_is_missed_in_every_step_is_told_once_and_does_not_explode():
    with pytest.warns(SolverWarning) as told:
        found = run(problem=flat_in_one_coordinate, steps=5)
    assert len(told) == 1 and (found.history["residual"] > 0.1).all()
    assert found.theta.isfinite().all() and found.theta.norm() < 10


def test_a_plain_pair_will_do_for_terms():
    found = run(problem=lambda *given: tuple(quadratic(*given))[:2])
    assert alike(found, run())


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"problem": lambda t, d, b: quadratic(t, d, b).outer}, TypeError, r"must return Terms\(outer, inner\)"),
        ({"problem": lambda t, d, b: Terms(t.sum() + B[:, 0], B[:, 0])}, ValueError, "inner does not depend on delta"),
        ({"composition": lambda u: u}, TypeError, r"RunningMean\(f\)"),
        ({"constraint": Simplex}, TypeError, r"write Simplex\(…\)"),
        (
            {"problem": lambda t, d, b: Terms((d - 1).sum(1), quadratic(t, d, b).inner), "solve": None},
            ValueError,
            "problem does not depend on theta",
        ),
        ({"data": B.numpy()}, TypeError, r"torch\.as_tensor makes one"),
        ({"data": [DATA], "batch_size": 4}, TypeError, "an iterable of batches has no batch_size"),
        ({"composition": RunningMean(lambda u: 1.0)}, ValueError, "f must be a differentiable function of u"),
        (
            {"composition": RunningMean(lambda u: torch.ones(()))},
            ValueError,
            "f must be a differentiable function of u",
        ),
    ],
    ids=[
        "no terms",
        "no delta",
        "bare f",
        "a class",
        "theta through delta alone",
        "array",
        "batch size",
        "float",
        "constant",
    ],
)
def test_slips_are_answered_with_the_remedy(options, error, said):
    with pytest.raises(error, match=said):
        run(**options)
