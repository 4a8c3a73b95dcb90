"""What the options of `minimize` do."""

import re
from dataclasses import dataclass, field
from functools import partial

import pytest
import torch

from doubly.bilevel import (
    CVaR,
    Descent,
    GradientStep,
    LogMeanExp,
    RunningMean,
    SolverWarning,
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
    D,
    N,
    alike,
    logarithm,
    normal,
    quadratic,
    run,
    solution,
)

each_shape = pytest.mark.parametrize("shared", [False, True], ids=["rows", "shared"])


@each_shape
def test_a_warm_start_makes_one_inner_step_enough(shared):
    start, descent = ONE if shared else ROWS, Descent(GradientStep(0.3), 1)
    warm = run(delta=start, shared=shared, steps=30, descent=descent)
    with pytest.warns(SolverWarning, match="the inner problems are not solved: .* take more or larger inner steps"):
        cold = run(delta=start, shared=shared, steps=30, descent=descent, warm_start=False)
    assert warm.history["gap"][-1] < 1e-2 * cold.history["gap"][-1]
    errors = [(result.theta - solution(shared)).norm() for result in (warm, cold)]
    assert errors[0] < 0.1 * errors[1]


@dataclass(frozen=True)
class RecordingStep(GradientStep):
    """Records where each inner solve starts."""

    size: float = 1.0
    starts: list = field(default_factory=list)

    def init(self, delta):
        self.starts.append(delta.detach().clone())
        return {}


def test_a_sample_starts_from_its_own_latest_delta():
    start, rule = normal(N, D, seed=10), RecordingStep()
    after_three, after_four = (run(delta=start, batch_size=4, steps=n, descent=Descent(rule, 3)) for n in (3, 4))
    first_epoch, fourth_step = torch.cat(rule.starts[3:6]), rule.starts[6]
    assert torch.equal(first_epoch.sort(0).values, start.sort(0).values)  # each sample once, from the start
    moved = (after_three.delta != after_four.delta).any(1)  # the samples of the fourth step
    assert moved.sum() == 4
    assert torch.equal(fourth_step.sort(0).values, after_three.delta[moved].sort(0).values)


def test_cold_starts_and_batches_of_an_iterable_begin_at_the_delta_given():
    start = normal(N, D, seed=10)
    for options in ({"warm_start": False}, {"data": [DATA]}):
        rule = RecordingStep()
        run(delta=start, steps=3, descent=Descent(rule, 3), **options)
        assert len(rule.starts) == 3 and all(torch.equal(each, start) for each in rule.starts)


def test_the_gap_is_what_the_inner_steps_left():
    """On h = |delta - s|^2 / 2 a step of size 0.3 leaves 0.7 of the distance."""

    def isotropic(theta, delta, batch):
        return quadratic(theta, delta, batch)._replace(inner=(delta - A @ theta - B).square().sum(1) / 2)

    with pytest.warns(SolverWarning, match="not solved: .* is 6.1e-01 after the last solve, and was 3.7e"):
        result = run(problem=isotropic, steps=1, descent=Descent(GradientStep(0.3), 5))
    solved = run(problem=isotropic, steps=1, descent=Descent(GradientStep(0.3), 50))
    assert re.fullmatch(r"Result\(1 steps, value \S+ -> \S+, gradient .*, delta \(12, 3\)\)", repr(solved))
    left = 0.7**5 * (A @ START + B).norm(dim=1).max()
    assert result.history["gap"].item() == pytest.approx(left.item(), rel=1e-12)
    assert result.history["residual"] < 1e-5


def test_schedules_of_the_step_size_and_of_eta_are_followed():
    sizes, etas, thetas, means = [0.4, 0.0, 0.1], [1.0, 0.5, 0.25], [START], []

    def callback(step):
        thetas.append(step.theta.clone())
        means.append(step.direction.values.mean())

    result = run(steps=3, step_size=sizes.__getitem__, eta=etas.__getitem__, callback=callback)
    assert result.history["step_size"].tolist() == sizes and result.history["eta"].tolist() == etas
    for i, size in enumerate(sizes):
        moved = (thetas[i + 1] - thetas[i]).norm().item()
        assert moved == pytest.approx(size * result.history["gradient"][i].item())
    u = means[0]
    for eta, mean in zip(etas, means, strict=True):
        u = (1 - eta) * u + eta * mean
    assert result.u.item() == pytest.approx(u.item(), rel=1e-12)


def test_the_history_has_one_number_per_step_in_each_column():
    result = run(steps=7, batch_size=4, composition=LogMeanExp(1.0, 0.7))
    assert set(result.history) == {"value", "gradient", "gap", "residual", "step_size", "eta"}
    assert all(column.shape == (7,) and column.isfinite().all() for column in result.history.values())
    assert result.history["step_size"].tolist() == [0.4] * 7 and result.history["eta"].tolist() == [0.7] * 7


def test_a_callback_receives_each_step_and_ends_the_run_by_returning_true():
    steps = []

    def callback(step):
        steps.append(step._replace(theta=step.theta.clone(), delta=step.delta.clone(), record=dict(step.record)))
        return step.number == 3

    result = run(steps=50, callback=callback)
    assert [step.number for step in steps] == [0, 1, 2, 3]
    theta = START
    for step in steps:
        outer = quadratic(theta, step.delta, DATA).outer  # g at the theta before the step
        assert torch.allclose(step.direction.values, outer) and step.record["value"] == pytest.approx(
            outer.mean().item()
        )
        assert step.record == {name: column[step.number].item() for name, column in result.history.items()}
        assert (step.theta - theta).norm().item() == pytest.approx(0.4 * step.record["gradient"])
        theta = step.theta
    assert torch.equal(theta, result.theta) and torch.equal(steps[-1].delta, result.delta)
    assert alike(result, run(steps=4))


def test_two_calls_are_one_long_one_on_the_full_batch():
    for composition in (RunningMean(logarithm, 0.3), LogMeanExp(0.5, 0.3), CVaR(0.3, 0.3)):
        whole, half = (run(steps=steps, composition=composition) for steps in (8, 4))
        rest = run(half.theta.clone(), half.delta, steps=4, composition=composition, state=half.state)
        assert alike(rest, whole)
        for name, column in whole.history.items():
            assert torch.equal(torch.cat([half.history[name], rest.history[name]]), column)
        without_state = run(half.theta.clone(), half.delta, steps=4, composition=composition)
        assert not torch.allclose(without_state.theta, whole.theta, rtol=1e-8)


def test_two_calls_are_one_long_one_on_small_batches_if_the_batches_continue():
    """An iterator of batches continues; rows in memory are shuffled from the seed in each call."""

    def stream():
        for first in range(100):
            yield tuple(part[torch.arange(first, first + 4) % N] for part in DATA)

    again = partial(run, composition=LogMeanExp(0.5, 0.3), shared=True)
    whole, batches = again(delta=ONE, data=stream(), steps=8), stream()
    half = again(delta=ONE, data=batches, steps=4)
    assert alike(again(half.theta, half.delta, batches, steps=4, state=half.state), whole)

    whole, half = (run(batch_size=4, steps=steps) for steps in (6, 3))  # an epoch is three steps
    assert not alike(run(half.theta, half.delta, batch_size=4, steps=3, state=half.state), whole)


def test_a_further_call_does_not_know_the_optimizer_s_state_and_storm_s_last_theta():
    momentum = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    for options in ({"optimizer": momentum}, {"storm": True, "composition": RunningMean(logarithm, 0.3)}):
        whole, half = run(steps=6, **options), run(steps=3, **options)
        rest = run(half.theta, half.delta, steps=3, state=half.state, **options)
        assert not torch.allclose(rest.theta, whole.theta, rtol=1e-8)
    theta = START.clone()
    optimizer = momentum([theta])  # unless the caller passes the same optimizer
    half = run(theta, optimizer=optimizer, steps=3)
    rest = run(theta, half.delta, optimizer=optimizer, steps=3, state=half.state)
    assert alike(rest, run(optimizer=momentum, steps=6))


def test_storm_follows_the_full_batch_exactly_however_small_eta_is():
    curved = partial(run, steps=12, descent=EXACT)
    exact = curved(composition=RunningMean(logarithm, 1.0))
    storm = curved(composition=RunningMean(logarithm, 0.1), storm=True)
    plain = curved(composition=RunningMean(logarithm, 0.1))
    assert alike(storm, exact, 1e-9)
    assert plain.u > 1.05 * exact.u  # lags behind a value that falls


@each_shape
def test_storm_evaluates_the_same_samples_at_the_previous_theta(shared):
    """u by hand, from inner problems that are solved exactly."""
    means, thetas = [], [START]

    def callback(step):
        means.append(step.direction.values.mean())
        thetas.append(step.theta.clone())

    batches = [tuple(part[first : first + 4] for part in DATA) for first in (0, 4, 8)]
    options = {"composition": RunningMean(logarithm, 0.3), "storm": True, "shared": shared, "callback": callback}
    sgd = partial(torch.optim.SGD, lr=0.05)
    result = run(delta=ONE if shared else ROWS[:4], data=batches, steps=3, descent=EXACT, optimizer=sgd, **options)
    u = means[0]
    for number in (1, 2):
        (a, b, _), previous = batches[number], thetas[number - 1]
        delta = (a @ previous + b).mean(0) if shared else a @ previous + b
        u = means[number] + 0.7 * (u - quadratic(previous, delta, batches[number]).outer.mean())
    assert result.u.item() == pytest.approx(u.item(), rel=1e-9)


def test_without_a_solver_the_implicit_term_is_left_out():
    result = run(steps=1, solve=None)
    assert torch.allclose(START - result.theta, 0.4 * RIDGE * START)  # the explicit gradient of g
    assert result.history["gap"].isnan().all() and result.history["residual"].isnan().all()
    assert result.history["value"].isfinite().all()


@each_shape
def test_inner_gives_the_same_run_for_fewer_calls_of_the_problem(shared):
    for storm, expected_calls in ((False, 5), (True, 9)):
        calls = []

        def counted(theta, delta, batch, calls=calls):
            calls.append(1)
            return quadratic(theta, delta, batch)

        options = {"delta": ONE if shared else ROWS, "shared": shared, "batch_size": 4, "steps": 5, "storm": storm}
        without = run(problem=counted, **options)
        assert len(calls) >= 5 * 9
        calls.clear()
        result = run(problem=counted, inner=lambda *arguments: quadratic(*arguments).inner, **options)
        assert len(calls) == expected_calls and alike(result, without)
        assert all(torch.equal(result.history[name], without.history[name]) for name in without.history)


def test_a_zero_sum_problem_needs_no_inner_and_a_plain_pair_will_do_for_terms():
    """h = -g, a saddle point that is concave in delta."""

    def saddle(theta, delta, batch):
        return Terms((theta - 1).square().sum() + delta @ theta - delta.square().sum(1) / 2)

    result = run(delta=ROWS[:, :2], problem=saddle, steps=60)
    assert torch.allclose(result.theta, torch.full((2,), 2 / 3, dtype=torch.float64), atol=1e-6)
    assert torch.allclose(result.delta, result.theta.expand(N, 2), atol=1e-5)
    assert alike(run(problem=lambda *arguments: tuple(quadratic(*arguments))[:2]), run())
