import pytest
import torch

from doubly.bilevel import Box, Constraint, GradientStep, SignStep, StepRule, projected_descent


def box(low=-1.0, high=1.0, shape=(2, 3)):
    return Box(torch.full(shape, low, dtype=torch.float64), torch.full(shape, high, dtype=torch.float64))


def quadratic(target):
    return lambda delta: 0.5 * (delta - target).square().flatten(1).sum(1)


def test_gradient_steps_on_a_quadratic_follow_the_closed_form():
    target = torch.tensor([[0.5, -0.25, 0.0], [0.9, 0.1, -0.7]], dtype=torch.float64)
    start = torch.zeros_like(target)
    found = projected_descent(quadratic(target), start, box(), GradientStep(0.3), 7)
    assert torch.allclose(found, target * (1 - 0.7**7), rtol=1e-12)


def test_a_target_outside_ends_on_the_face():
    target = torch.tensor([[5.0, -5.0, 0.2], [0.0, 2.0, -2.0]], dtype=torch.float64)
    found = projected_descent(quadratic(target), torch.zeros_like(target), box(), GradientStep(0.5), 60)
    assert torch.allclose(found, target.clamp(-1, 1), atol=1e-12)


def test_no_steps_give_the_projected_start():
    start = torch.tensor([[2.0, 0.5, -3.0], [0.0, 0.0, 0.0]], dtype=torch.float64)
    assert torch.equal(projected_descent(quadratic(0 * start), start, box(), SignStep(0.1), 0), start.clamp(-1, 1))


def test_samples_do_not_see_each_other():
    target = torch.rand(2, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    together = projected_descent(quadratic(target), torch.zeros_like(target), box(), GradientStep(0.1), 5)
    alone = projected_descent(quadratic(target[1:]), 0 * target[1:], box(shape=(1, 3)), GradientStep(0.1), 5)
    assert torch.equal(together[1:], alone)


def test_one_evaluation_per_step_and_a_detached_answer():
    calls = []

    def inner(delta):
        calls.append(delta.detach().clone())
        return delta.square().flatten(1).sum(1)

    start = torch.ones(2, 3, dtype=torch.float64)
    found = projected_descent(inner, start, box(), GradientStep(0.1), 4)
    assert len(calls) == 4 and not found.requires_grad and not start.requires_grad
    assert torch.equal(start, torch.ones_like(start))


def test_works_where_gradients_are_switched_off():
    target = torch.full((2, 3), 0.5, dtype=torch.float64)
    with torch.no_grad():
        found = projected_descent(quadratic(target), 0 * target, box(), GradientStep(1.0), 1)
    assert torch.equal(found, target)


def test_no_gradient_reaches_what_the_inner_function_holds():
    weight = torch.ones((), requires_grad=True, dtype=torch.float64)
    projected_descent(lambda d: (weight * d).flatten(1).sum(1), torch.zeros(2, 3).double(), box(), SignStep(0.1), 2)
    assert weight.grad is None


def test_the_protocols_fit():
    assert isinstance(box(), Constraint) and isinstance(SignStep(), StepRule)


def test_a_gradient_that_is_not_finite_is_no_silent_standstill():
    box = Box(torch.full((2, 3), -1.0), torch.full((2, 3), 1.0))
    with pytest.raises(ArithmeticError, match="NaN"):
        projected_descent(lambda d: (d - d).sqrt().sum(1), torch.zeros(2, 3), box, SignStep(0.1), 3)
