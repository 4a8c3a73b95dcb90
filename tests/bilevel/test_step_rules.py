from itertools import product

import pytest
import torch

from doubly.bilevel import (
    STEP_RULES,
    AdamStep,
    Ball,
    BarrierStep,
    Box,
    FirstThen,
    GradientStep,
    MomentumStep,
    NormalizedStep,
    SignStep,
    SparseStep,
    StepRule,
    WholeSpace,
    WithBarrier,
    projected_descent,
)

EPS = 8 / 255
ALPHA = 1250 / 255


def rows(*values):
    return torch.tensor(values, dtype=torch.float64)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def symmetric_box(shape, strength=1e-6, dtype=torch.float64):
    return Box(torch.full(shape, -EPS, dtype=dtype), torch.full(shape, EPS, dtype=dtype), strength)


def test_every_rule_is_listed_and_is_a_rule():
    simple = {GradientStep, MomentumStep, NormalizedStep, SignStep, SparseStep, AdamStep, BarrierStep}
    assert set(STEP_RULES.values()) == {*simple, FirstThen, WithBarrier}
    assert all(isinstance(rule(), StepRule) for rule in STEP_RULES.values())


def test_a_scaled_rule_has_scaled_sizes_and_is_otherwise_equal():
    nested = FirstThen(SignStep(0.5), AdamStep(0.25, decay=0.7))
    for rule in (*(kind() for kind in STEP_RULES.values()), nested):
        scaled = rule.scaled(2.0)
        assert scaled.sizes == tuple(2 * size for size in rule.sizes) and rule.sizes
        assert scaled.scaled(0.5) == rule
    with pytest.raises(TypeError, match=r"StepRule has no size.*use a step rule with one"):
        StepRule().scaled(2.0)
    with pytest.raises(NotImplementedError):
        StepRule().step(rows(1.0), rows(1.0), WholeSpace(), StepRule().init(rows(1.0)))


def test_rules_say_whether_they_rest_without_a_gradient_and_whether_they_need_a_box():
    delta = torch.full((1, 3), 0.3 * EPS, dtype=torch.float64)
    for rule in (kind() for kind in STEP_RULES.values()):
        if rule.rests_without_gradient:
            increment, _ = rule.step(torch.zeros_like(delta), delta, symmetric_box((1, 3)), rule.init(delta))
            assert not increment.any(), rule
    need_box = [
        BarrierStep(),
        WithBarrier(),
        FirstThen(BarrierStep(), SignStep()),
        FirstThen(SignStep(), BarrierStep()),
    ]
    assert all(rule.needs_box for rule in need_box)
    assert not any(rule().needs_box for rule in STEP_RULES.values() if rule not in (BarrierStep, WithBarrier))


def test_gradient_sign_and_normalized_steps_are_their_formulas():
    gradient = rows([3.0, -4.0], [0.0, 0.0], [1e-30, 0.0])
    table = [
        (GradientStep(0.5), -0.5 * gradient),
        (SignStep(0.25), -0.25 * gradient.sign()),
        (NormalizedStep(0.5), rows([-0.3, 0.4], [0.0, 0.0], [-0.5, 0.0])),
    ]
    for rule, expected in table:
        increment, _ = rule.step(gradient, torch.zeros_like(gradient), WholeSpace(), {})
        assert torch.allclose(increment, expected), rule


def test_the_first_adam_step_is_a_sign_step():
    gradient = rows([2.0, -4.0, 1e-3])
    rule, delta = AdamStep(0.25), torch.zeros_like(gradient)
    increment, _ = rule.step(gradient, delta, WholeSpace(), rule.init(delta))
    assert torch.allclose(increment, -0.25 * gradient.sign(), rtol=2e-5)


def check_against_torch(rule, make_optimizer, inner, dtype=torch.float64, tolerance=1e-13):
    """Compare the points after 1 to 10 steps with those of a torch optimizer."""
    start = torch.zeros(3, 4, dtype=dtype)
    point = start.clone().requires_grad_()
    optimizer = make_optimizer([point])
    for steps in range(1, 11):
        optimizer.zero_grad()
        inner(point).sum().backward()
        optimizer.step()
        delta = projected_descent(inner, start, WholeSpace(), rule, steps)
        assert torch.allclose(delta, point.detach(), rtol=tolerance, atol=tolerance)


def test_adam_step_is_adam_of_torch():
    for dtype, tolerance in ((torch.float64, 1e-13), (torch.float32, 1e-5)):
        target, scale = normal(3, 4).to(dtype), torch.logspace(-4, 2, 12).view(3, 4).to(dtype)
        check_against_torch(
            AdamStep(size=0.03, decay=0.8, decay_squares=0.99, floor=1e-6),
            lambda tensors: torch.optim.Adam(tensors, lr=0.03, betas=(0.8, 0.99), eps=1e-6),
            lambda delta, scale=scale, target=target: (scale * (delta - target).abs().pow(1.5)).sum(1),
            dtype,
            tolerance,
        )


def test_momentum_step_is_sgd_with_momentum_of_torch():
    target, scale = normal(3, 4), torch.logspace(-2, 0, 12, dtype=torch.float64).view(3, 4)
    for decay in (0.0, 0.5, 0.9):
        check_against_torch(
            MomentumStep(0.02, decay),
            lambda tensors, decay=decay: torch.optim.SGD(tensors, lr=0.02, momentum=decay),
            lambda delta: (scale * (delta - target).pow(4) + (delta - target).square()).sum(1),
        )


def test_momentum_reaches_a_badly_conditioned_minimum_sooner():
    scale, start = rows([1.0, 100.0]), torch.ones(1, 2, dtype=torch.float64)
    plain, heavy = (
        projected_descent(lambda d: 0.5 * (scale * d.square()).sum(1), start, WholeSpace(), rule, 60).norm()
        for rule in (GradientStep(2 / 101), MomentumStep(4 / 121, (9 / 11) ** 2))  # each at its best size
    )
    assert heavy < 1e-2 * plain


def test_first_then_takes_one_step_of_the_first_rule_and_all_others_of_the_second():
    target, start = torch.tensor([[1.0, -2.0]]), torch.zeros(1, 2)

    def inner(delta):
        return 0.5 * (delta - target).square().sum(1)

    for then in (GradientStep(0.2), AdamStep(0.1)):
        after_one = projected_descent(inner, start, WholeSpace(), SignStep(0.1), 1)
        expected = projected_descent(inner, after_one, WholeSpace(), then, 3)
        delta = projected_descent(inner, start, WholeSpace(), FirstThen(SignStep(0.1), then), 4)
        assert torch.equal(delta, expected) and not torch.equal(delta, after_one)


def test_barrier_step_is_the_explicit_step_divided_by_its_curvature():
    box = symmetric_box((1, 200), strength=1e-5)
    delta = box.shrunk(0.01).sample(torch.Generator().manual_seed(0))
    gradient = 1e-2 * normal(1, 200, seed=1)
    above, below = box.upper - delta, delta - box.lower
    explicit = -(gradient + 1e-5 * (1 / above - 1 / below)) / (1 / ALPHA + 1e-5 * (above**-2 + below**-2))
    increment, _ = BarrierStep(ALPHA, margin=0).step(gradient, delta, box, {})
    assert torch.allclose(increment, box.project(delta + explicit) - delta, rtol=1e-9, atol=1e-15)


def test_barrier_step_rests_where_the_explicit_gradient_of_the_barrier_vanishes():
    box, gradient = symmetric_box((1, 3), strength=1e-5), rows([1.6e-3, -1e-2, 1e-4])
    delta = projected_descent(lambda d: (gradient * d).sum(1), 0 * gradient, box, BarrierStep(ALPHA), 1000)
    # g + c (1 / (e - d) - 1 / (e + d)) = 0, that is g (e^2 - d^2) + 2 c d = 0
    root = (1e-5 - (1e-5**2 + gradient**2 * EPS**2).sqrt()) / gradient
    assert torch.allclose(delta, root, rtol=1e-6)
    increment, _ = BarrierStep(ALPHA).step(gradient, root, box, {})
    assert increment.abs().max() < 1e-12


def test_barrier_step_without_preconditioner_is_the_explicit_step_on_inner_plus_barrier():
    box, slope = symmetric_box((2, 50), strength=1e-5), 1e-3 * normal(2, 50, seed=1)
    start = box.shrunk(0.1).sample(torch.Generator().manual_seed(0))

    def inner(delta):
        return (slope * delta + 0.01 * delta.square()).sum(1)

    literal = BarrierStep(0.5, preconditioned=False)
    inside = box.shrunk(literal.margin)
    for steps in range(1, 8):
        delta = projected_descent(inner, start, box, literal, steps)
        explicit = projected_descent(lambda d: inner(d) + box.barrier(d), start, box, GradientStep(0.5), steps)
        assert (delta > inside.lower).all() and (delta < inside.upper).all()  # nothing was cut
        assert (delta - start).abs().max() > 1e-4
        torch.testing.assert_close(delta, explicit, rtol=1e-10, atol=1e-14)
        for rule in (GradientStep(0.5), SignStep(1e-3), AdamStep(1e-3)):
            one = projected_descent(inner, start, box, WithBarrier(rule), steps)
            other = projected_descent(lambda d: inner(d) + box.barrier(d), start, box, rule, steps)
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-14)
    preconditioned = projected_descent(inner, start, box, BarrierStep(0.5), 7)
    assert (delta - preconditioned).abs().max() > 1e-4  # the two rules differ
    at_the_face = projected_descent(inner, box.shrunk(1e-3).upper, box, BarrierStep(ALPHA, 0.0, False), 1)
    assert torch.equal(at_the_face, box.lower)  # thrown across the whole box, as the docstring says


def test_barrier_step_moves_pixels_as_far_as_simulated():
    """For barrier c and gradient g: mean of delta / eps along -g, and share on the wrong side, after ten steps."""
    table = [
        (1e-5, 1.6e-3, (0.813, 0.0), (0.808, 0.0)),
        (1e-5, 1e-2, (0.969, 0.0), (0.873, 0.0)),
        (1e-6, 1e-3, (0.912, 0.0), (0.873, 0.0)),
        (1e-6, 1.6e-3, (0.982, 0.0), (0.876, 0.0)),
        (1e-6, 1e-2, (0.997, 0.0), (0.875, 0.0)),
        (1e-6, 1e-5, (0.012, 0.49), (0.156, 0.19)),
    ]
    rules = (BarrierStep(ALPHA), WithBarrier(SignStep(2 / 255)))
    for dtype in (torch.float32, torch.float64):
        for c, g, *expected in table:
            box = symmetric_box((1, 20_000), strength=c, dtype=dtype)
            start = box.sample(torch.Generator().manual_seed(0))
            for rule, (mean, wrong) in zip(rules, expected, strict=True):
                delta = projected_descent(lambda d, g=g: -g * d.sum(1), start, box, rule, 10)
                assert delta.mean().item() / EPS == pytest.approx(mean, abs=0.01), (c, g, dtype, rule)
                assert (delta < 0).double().mean().item() == pytest.approx(wrong, abs=0.01), (c, g, dtype, rule)


def test_barrier_step_never_leaves_the_box_and_stays_finite():
    for dtype in (torch.float32, torch.float64):
        generator = torch.Generator().manual_seed(0)
        x = torch.rand(4, 100, generator=generator).to(dtype)
        x[:, :10], x[:, 10:20] = 0, 1  # one-sided boxes, with 0 on a face
        box = Box((-x).clamp(min=-EPS), (1 - x).clamp(max=EPS), 1e-6)
        box.upper[:, 20:30] = box.lower[:, 20:30]  # boxes without width
        noise = torch.randn(4, 100, generator=generator).to(dtype)
        for scale in (0.0, 1e-6, 1.0, 1e6, 1e20):
            for start in (box.lower, box.upper, torch.zeros_like(x), box.sample(generator)):
                for steps, rule in product((1, 2, 10), (BarrierStep(ALPHA), WithBarrier(SignStep(2 / 255)))):
                    delta = projected_descent(
                        lambda d, slope=scale * noise: (slope * d).sum(1), start, box, rule, steps
                    )
                    assert delta.isfinite().all() and (delta >= box.lower).all() and (delta <= box.upper).all()


def test_barrier_step_keeps_its_margin_free():
    box = symmetric_box((1, 50))
    delta = projected_descent(lambda d: -1e3 * d.sum(1), box.upper, box, BarrierStep(ALPHA, margin=0.01), 3)
    assert torch.allclose(delta, box.upper * 0.98)


def test_barrier_step_needs_a_box():
    for rule in (BarrierStep(), WithBarrier()):
        with pytest.raises(TypeError, match=f"{type(rule).__name__} needs a Box"):
            rule.step(torch.zeros(1, 2), torch.zeros(1, 2), Ball(1.0, symmetric_box((1, 2))), {})
