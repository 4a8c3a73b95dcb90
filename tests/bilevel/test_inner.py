import pytest
import torch

from doubly.bilevel import (
    Ball,
    Box,
    GradientStep,
    MomentumStep,
    NormalizedStep,
    SignStep,
    Simplex,
    WholeSpace,
    projected_descent,
)
from doubly.bilevel.inner import gap

BOX = Box(-1.0, 1.0)


def rows(*values):
    return torch.tensor(values, dtype=torch.float64)


def quadratic(target):
    return lambda delta: 0.5 * (delta - target).square().flatten(1).sum(1)


def counted(inner):
    """The function, and the list of points at which it is called."""
    calls = []

    def counting(delta):
        calls.append(delta.detach().clone())
        return inner(delta)

    return counting, calls


def test_gradient_steps_on_a_quadratic_follow_the_closed_form():
    target = rows([0.5, -0.25, 0.0], [0.9, 0.1, -0.7])
    delta = projected_descent(quadratic(target), torch.zeros_like(target), BOX, GradientStep(0.3), 7)
    assert torch.allclose(delta, target * (1 - 0.7**7), rtol=1e-12)


def test_a_target_outside_ends_on_the_face_and_no_steps_give_the_projected_start():
    target = rows([5.0, -5.0, 0.2], [0.0, 2.0, -2.0])
    delta = projected_descent(quadratic(target), torch.zeros_like(target), BOX, GradientStep(0.5), 60)
    assert torch.allclose(delta, target.clamp(-1, 1), atol=1e-12)
    assert torch.equal(projected_descent(quadratic(target), target, BOX, SignStep(0.1), 0), target.clamp(-1, 1))


def test_samples_do_not_see_each_other():
    target = torch.rand(2, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    both, second = (
        projected_descent(quadratic(part), torch.zeros_like(part), BOX, GradientStep(0.1), 5)
        for part in (target, target[1:])
    )
    assert torch.equal(both[1:], second)


def test_a_step_costs_one_evaluation_and_leaves_no_gradient_behind():
    weight, start = torch.ones((), requires_grad=True, dtype=torch.float64), torch.ones(2, 3, dtype=torch.float64)
    inner, calls = counted(lambda delta: (weight * delta.square()).sum(1))
    with torch.no_grad():  # does not matter
        delta = projected_descent(inner, start, BOX, GradientStep(0.1), 4)
    assert len(calls) == 4 and not delta.requires_grad and not start.requires_grad and weight.grad is None
    assert torch.equal(start, torch.ones_like(start)) and torch.allclose(delta, 0.8**4 * start)


def test_a_tolerance_stops_early_and_leaves_a_projected_gradient_below_it():
    target, scale = rows([0.9, -0.2, 0.1], [0.05, 0.1, -0.7]), rows(0.5, 1.0, 2.0)
    for constraint in (WholeSpace(), Box(-0.4, 0.4), Ball(0.5), Simplex()):

        def largest_gap(delta, constraint=constraint):
            return gap(constraint, delta, scale * (delta - target)).max()

        for rule in (GradientStep(0.3), MomentumStep(0.2, 0.5)):
            counts = []
            for tolerance in (1e-2, 1e-4, 1e-6):
                inner, calls = counted(lambda delta: 0.5 * (scale * (delta - target).square()).sum(1))
                delta = projected_descent(inner, torch.zeros_like(target), constraint, rule, 5000, tolerance)
                assert largest_gap(delta) <= tolerance < largest_gap(calls[-2])  # and not one step too many
                counts.append(len(calls))
            assert counts[0] < counts[1] < counts[2] < 200, (constraint, rule)


def test_the_slowest_sample_decides_when_to_stop():
    target = rows([1e-9, 0.0, 0.0], [0.9, 0.1, -0.7])
    delta = projected_descent(quadratic(target), torch.zeros_like(target), BOX, GradientStep(0.1), 1000, 1e-5)
    assert 1e-7 < (delta - target)[1].norm() < 1e-5


def test_a_tolerance_that_is_not_reached_takes_all_steps_and_a_minimizer_none():
    target = rows([2.0, 0.1, 0.2], [0.0, 0.0, 0.5])
    inner, calls = counted(quadratic(target))
    projected_descent(inner, 0 * target, BOX, GradientStep(0.3), 3, 1e-9)
    assert len(calls) == 3
    inner, calls = counted(quadratic(target))
    delta = projected_descent(inner, target, BOX, NormalizedStep(0.1), 50, 1e-12)
    assert len(calls) == 1 and torch.equal(delta, target.clamp(-1, 1))


def test_the_gap_is_the_gradient_s_length_inside_and_what_is_left_of_it_on_a_face():
    delta, slope = rows([0.1, 0.2, 0.0], [1.0, 0.2, 0.0]), rows([0.3, 0.0, -0.4], [-5.0, 0.0, -0.4])
    assert torch.allclose(gap(BOX, delta, slope), rows(0.5, 0.4))


def test_the_gradient_of_a_shared_row_is_the_mean_over_processes():
    own, other = rows([[0.4, 0.2, 0.0]], [[0.0, 0.2, 0.4]])

    def all_gather(values):  # the other process is at the same delta, so its gradient differs by that of the target
        return torch.cat([values, values + own - other]) if values.dim() > 1 else torch.cat([values] * 2)

    rule = GradientStep(0.3)
    delta = projected_descent(quadratic(own), 0 * own, BOX, rule, 500, 1e-12, shared=True, all_gather=all_gather)
    assert torch.allclose(delta, (own + other) / 2, rtol=1e-10)


def test_processes_stop_at_the_same_step():
    target = rows([0.4, 0.2, 0.0])
    inner, calls = counted(quadratic(target))

    def with_a_far_one(values):
        return torch.cat([values, torch.ones(1, dtype=torch.float64)])

    projected_descent(inner, target, BOX, GradientStep(0.3), 7, 1e-6, all_gather=with_a_far_one)
    assert len(calls) == 7


def test_a_gradient_that_is_not_finite_is_an_error_even_for_sign_steps():
    with pytest.raises(ArithmeticError, match="NaN"):
        projected_descent(lambda d: (d - d).sqrt().sum(1), torch.zeros(2, 3), BOX, SignStep(0.1), 3)
