import pytest
import torch

from doubly.bilevel import (
    AdamStep,
    Ball,
    Box,
    Constraint,
    GradientStep,
    MomentumStep,
    NormalizedStep,
    SignStep,
    Simplex,
    StepRule,
    WholeSpace,
    projected_descent,
)
from doubly.bilevel.inner import gap


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
    assert all(
        isinstance(limits, Constraint) for limits in (box(), Ball(1.0), Ball(1.0, box()), Simplex(), WholeSpace())
    )
    assert all(isinstance(rule, StepRule) for rule in (GradientStep(), MomentumStep(), SignStep(), AdamStep()))
    assert not isinstance(SignStep(), Constraint) and not isinstance(box(), StepRule)


def counted(inner):
    calls = []

    def counting(delta):
        calls.append(delta.detach().clone())
        return inner(delta)

    return counting, calls


SETS = {"whole space": WholeSpace(), "box": box(-0.4, 0.4), "ball": Ball(0.5), "simplex": Simplex()}


@pytest.mark.parametrize("rule", [GradientStep(0.3), MomentumStep(0.2, 0.5)], ids=repr)
@pytest.mark.parametrize("limits", SETS.values(), ids=list(SETS))
def test_a_tolerance_stops_early_and_leaves_a_projected_gradient_below_it(limits, rule):
    target = torch.tensor([[0.9, -0.2, 0.1], [0.05, 0.1, -0.7]], dtype=torch.float64)
    scale = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)

    def left(delta):
        return gap(limits, delta, scale * (delta - target)).max()

    counts = []
    for tolerance in (1e-2, 1e-4, 1e-6):
        inner, calls = counted(lambda delta: 0.5 * (scale * (delta - target).square()).sum(1))
        found = projected_descent(inner, torch.zeros_like(target), limits, rule, 5000, tolerance)
        assert left(found) <= tolerance < left(calls[-2])  # and not one step too many
        counts.append(len(calls))
    assert counts[0] < counts[1] < counts[2] < 200


def test_the_slowest_sample_decides_when_to_stop():
    target = torch.tensor([[1e-9, 0.0, 0.0], [0.9, 0.1, -0.7]], dtype=torch.float64)
    found = projected_descent(quadratic(target), torch.zeros_like(target), box(), GradientStep(0.1), 1000, 1e-5)
    assert 1e-7 < (found - target)[1].norm() < 1e-5


def test_without_enough_steps_the_tolerance_is_missed_and_the_steps_are_kept():
    target = torch.full((2, 3), 0.5, dtype=torch.float64)
    inner, calls = counted(quadratic(target))
    found = projected_descent(inner, 0 * target, box(), GradientStep(0.3), 3, 1e-9)
    assert len(calls) == 3 and torch.allclose(found, target * (1 - 0.7**3))


def test_a_start_that_is_a_minimiser_stays():
    target = torch.tensor([[2.0, 0.1, 0.2], [0.0, 0.0, 0.5]], dtype=torch.float64)
    inner, calls = counted(quadratic(target))
    found = projected_descent(inner, target, box(), NormalizedStep(0.1), 50, 1e-12)
    assert len(calls) == 1 and torch.equal(found, target.clamp(-1, 1))


def test_the_gap_is_the_gradient_s_length_inside_and_what_is_left_of_it_on_a_face():
    delta = torch.tensor([[0.1, 0.2, 0.0], [1.0, 0.2, 0.0]], dtype=torch.float64)
    slope = torch.tensor([[0.3, 0.0, -0.4], [-5.0, 0.0, -0.4]], dtype=torch.float64)
    assert torch.allclose(gap(box(), delta, slope), torch.tensor([0.5, 0.4], dtype=torch.float64))


def test_the_gradient_of_a_shared_row_is_the_mean_over_processes():
    mine, other = torch.tensor([[[0.4, 0.2, 0.0]], [[0.0, 0.2, 0.4]]], dtype=torch.float64)

    def gather(numbers):  # the other process is at the same delta, so its gradient differs by that of the target
        return torch.cat([numbers, numbers + mine - other]) if numbers.dim() > 1 else torch.cat([numbers] * 2)

    found = projected_descent(
        quadratic(mine), 0 * mine, box(shape=(1, 3)), GradientStep(0.3), 500, 1e-12, shared=True, all_gather=gather
    )
    assert torch.allclose(found, (mine + other) / 2, rtol=1e-10)


def test_processes_stop_together():
    target, calls = torch.tensor([[0.4, 0.2, 0.0]], dtype=torch.float64), []
    inner = quadratic(target)

    def counted(delta):
        calls.append(1)
        return inner(delta)

    def with_a_far_one(numbers):
        return torch.cat([numbers, torch.ones(1, dtype=torch.float64)])

    projected_descent(counted, target, box(shape=(1, 3)), GradientStep(0.3), 7, 1e-6, all_gather=with_a_far_one)
    assert len(calls) == 7


def test_a_gradient_that_is_not_finite_is_no_silent_standstill():
    box = Box(torch.full((2, 3), -1.0), torch.full((2, 3), 1.0))
    with pytest.raises(ArithmeticError, match="NaN"):
        projected_descent(lambda d: (d - d).sqrt().sum(1), torch.zeros(2, 3), box, SignStep(0.1), 3)
