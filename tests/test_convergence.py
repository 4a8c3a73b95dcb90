"""Theorem 1 and its lemmas hold in numbers on the problem of examples/convergence.py."""

import runpy
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from doubly.bilevel import (
    Descent,
    Diagonal,
    GradientStep,
    LogMeanExp,
    RunningMean,
    Terms,
    WholeSpace,
    minimize,
    projected_descent,
)

EXAMPLE = runpy.run_path(str(Path(__file__).parents[1] / "examples" / "convergence.py"))


@pytest.fixture(scope="module")
def problem():
    return EXAMPLE["distances"]()


@pytest.fixture(scope="module")
def results():
    return EXAMPLE["study"](EXAMPLE["SMALL"])


def test_the_closed_gradient_is_that_of_f_of_the_mean(problem):
    theta = torch.tensor([[2.0, -1.0], [0.3, 5.0]], dtype=torch.float64, requires_grad=True)
    objective = problem.values(theta)[0].mean(1).log().sum()
    (gradient,) = torch.autograd.grad(objective, theta)
    torch.testing.assert_close(problem.gradient(theta.detach()), gradient)


def test_the_closed_inner_solution_is_where_descent_arrives(problem):
    theta = torch.tensor([[2.0, -1.0]], dtype=torch.float64)
    batch = problem.shifts[:, None], problem.points[:, None]
    start = torch.zeros(len(problem.shifts), 1, 3, dtype=torch.float64)
    rule = GradientStep(problem.inner_step())
    for steps in (0, 1, 7):
        delta = projected_descent(lambda delta: problem.inner(theta, delta, batch), start, WholeSpace(), rule, steps)
        torch.testing.assert_close(problem.solutions(theta, steps)[0], delta[:, 0])
        torch.testing.assert_close(problem.values(theta, steps)[0][0], problem(theta, delta, batch).outer[:, 0])


def test_the_constants_of_f_and_g_are_one(problem):
    torch.manual_seed(0)
    u = (10 * torch.randn(1000, dtype=torch.float64)).requires_grad_()
    (slopes,) = torch.autograd.grad(EXAMPLE["f"](u), u, create_graph=True)
    (curvatures,) = torch.autograd.grad(slopes.sum(), u)
    assert slopes.abs().max() <= 1 and curvatures.abs().max() <= 1
    w = (10 * torch.randn(2, 1000, 5, dtype=torch.float64)).requires_grad_()
    g = torch.stack([problem(rows[:, None, :2], rows[:, None, 2:], (0, problem.points[0])).outer for rows in w])
    (slopes,) = torch.autograd.grad(g.sum(), w)
    assert g.min() >= 1 and slopes.norm(dim=-1).max() <= 1
    assert ((slopes[0] - slopes[1]).norm(dim=1) <= (w[0] - w[1]).norm(dim=1)).all()


def test_several_runs_at_once_equal_single_runs(problem):
    data = next(EXAMPLE["draws"](problem, 4, 3, seed=0))
    paths, _ = EXAMPLE["descend"](problem, EXAMPLE["start"](3), [data], 4, 5, 2.0, 0.5, 6)
    for run in range(3):
        own_data = [tuple(part[:, run : run + 1] for part in data)]
        path, _ = EXAMPLE["descend"](problem, EXAMPLE["start"](1), own_data, 4, 5, 2.0, 0.5, 6)
        torch.testing.assert_close(paths[:, run], path[:, 0])


def test_the_problem_is_kl_dro_of_the_logarithms(problem):
    """f = log of g is log mean exp of the losses log g, so both compositions take the same steps."""

    def losses(theta, delta, batch):
        terms = problem(theta, delta, batch)
        return Terms(terms.outer[:, 0].log(), terms.inner)

    theta = EXAMPLE["start"](1)
    zeros = torch.zeros(4, 1, 3, dtype=torch.float64)
    minimize(
        losses,
        theta,
        zeros,
        EXAMPLE["draws"](problem, 4, 1, seed=3),
        optimizer=partial(torch.optim.SGD, lr=2.0),
        steps=20,
        composition=LogMeanExp(1.0, 0.5),
        descent=Descent(GradientStep(problem.inner_step()), 6),
        solve=Diagonal(),
    )
    data = EXAMPLE["draws"](problem, 4, 1, seed=3)
    path, _ = EXAMPLE["descend"](problem, EXAMPLE["start"](1), data, 4, 20, 2.0, 0.5, 6)
    torch.testing.assert_close(path[-1], theta)
    assert (path[-1] - path[0]).norm() > 0.5


def test_the_average_squared_gradient_falls_like_one_over_the_root_of_t(results):
    assert results["rates"]["B = T/4, η = 1/2"]["slope"] <= -0.45


def test_the_second_setting_converges_where_the_plain_plug_in_stalls(results):
    second, plain = results["rates"]["B = 2, η = T^(-1/4)"], results["rates"]["B = 2, η = 1"]
    assert second["slope"] <= -0.25  # the paper's rate for it
    difference = plain["average"][-1] - second["average"][-1]
    assert difference > 3 * (plain["error"][-1] ** 2 + second["error"][-1] ** 2) ** 0.5


def test_the_floor_stays_under_the_bound_and_falls_at_least_as_fast(results):
    floors = results["floors"]
    assert all(floor <= bound for floor, bound in zip(floors["floor"], floors["bound"], strict=True))
    assert floors["rate"] <= floors["bound_rate"] < 1
    steps = floors["K"][-1] - floors["K"][-2]
    late = (floors["floor"][-1] / floors["floor"][-2]) ** (1 / steps)
    assert late == pytest.approx(floors["bound_rate"] ** 2, rel=0.03)  # the slowest direction, squared: it is a floor


def test_lemma_2_bounds_the_tracking_error_along_the_run(results):
    for run in results["tracking"]:
        assert 0 < run["closest"] <= 1
        assert all(error <= bound for error, bound in zip(run["error"], run["bound"], strict=True))


def test_the_error_of_u_has_the_expectation_that_lemma_2_bounds(problem):
    """At a theta that does not move, u is stationary: its variance is eta / (2 - eta) times that of a batch mean."""
    eta, runs = 0.5, 4000
    data = EXAMPLE["draws"](problem, 2, runs, seed=0)
    theta, u = EXAMPLE["descend"](problem, EXAMPLE["start"](runs), data, 2, 12, 0.0, eta, 3)
    g = problem.values(theta[0, :1], 3)[0]
    expected = eta / (2 - eta) * g.var(correction=0) / 2
    assert (u[-1] - g.mean()).square().mean().item() == pytest.approx(expected.item(), rel=0.1)


def clearly_above(larger, smaller):
    return larger[0] - smaller[0] > 3 * (larger[1] ** 2 + smaller[1] ** 2) ** 0.5


def test_the_bias_falls_with_eta_and_vanishes_under_the_second_setting(results):
    constant, falling = results["biases"]["eta"], list(results["biases"]["T"].values())
    assert clearly_above(constant["1.0"], constant["0.9"]) and clearly_above(constant["0.9"], constant["0.5"])
    assert all(clearly_above(constant["0.5"], later) for later in falling[1:])
    assert all(clearly_above(*pair) for pair in pairwise(falling))
    assert falling[-1][0] < 0.07 * constant["1.0"][0]  # eta is 1/16 there


def test_the_bias_is_that_of_the_estimates_one_chain_at_a_time(problem):
    """The chains are columns of one vector-valued g; this updates each by itself, on the same draws."""
    theta, eta, chains = EXAMPLE["start"](1), 0.5, 50
    g, slopes = (part[0] for part in problem.values(theta))
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(len(g), (2, chains), generator=generator) for _ in range(16)]
    estimates = []
    for chain in range(chains):
        state = {}
        for draw in ids:
            values = g[draw[:, chain]]
            weights, state = RunningMean(torch.log, eta).update(values, values, state)
        last = slopes[ids[-1][:, chain]]
        estimates.append((weights[:, None] * last).mean(0) - last.mean(0) / g.mean())
    expected = torch.stack(estimates).mean(0).norm().item()
    assert EXAMPLE["bias"](problem, theta, eta, chains)[0] == pytest.approx(expected)


def test_a_figure_is_drawn(results, tmp_path):
    EXAMPLE["draw"](results, tmp_path / "images" / "convergence.png")
    assert (tmp_path / "images" / "convergence.png").stat().st_size > 20_000
