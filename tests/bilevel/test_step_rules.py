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
    StepRule,
    projected_descent,
)

EPS = 8 / 255
ALPHA = 1250 / 255


def symmetric(shape, strength=1e-6, eps=EPS, dtype=torch.float64):
    return Box(torch.full(shape, -eps, dtype=dtype), torch.full(shape, eps, dtype=dtype), strength)


def test_every_rule_is_listed_and_is_a_rule():
    simple = {GradientStep, MomentumStep, NormalizedStep, SignStep, AdamStep, BarrierStep}
    assert set(STEP_RULES.values()) == {*simple, FirstThen}
    assert all(isinstance(rule(), StepRule) for rule in STEP_RULES.values())


def test_gradient_and_sign_steps():
    gradient = torch.tensor([[2.0, -4.0, 0.0]])
    box, delta = symmetric((1, 3)), torch.zeros(1, 3)
    assert torch.equal(GradientStep(0.5).step(gradient, delta, box, {})[0], torch.tensor([[-1.0, 2.0, 0.0]]))
    assert torch.equal(SignStep(0.25).step(gradient, delta, box, {})[0], torch.tensor([[-0.25, 0.25, 0.0]]))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 1e-5)])
def test_adam_step_is_adam_of_torch(dtype, tolerance):
    generator = torch.Generator().manual_seed(0)
    target = torch.randn(3, 4, generator=generator).to(dtype)
    scale = torch.logspace(-4, 2, 12).view(3, 4).to(dtype)

    def inner(delta):
        return (scale * (delta - target).abs().pow(1.5)).sum(1)

    rule = AdamStep(size=0.03, decay=0.8, decay_squares=0.99, floor=1e-6)
    point = torch.zeros(3, 4, dtype=dtype, requires_grad=True)
    optimizer = torch.optim.Adam([point], lr=0.03, betas=(0.8, 0.99), eps=1e-6)
    room = symmetric((3, 4), eps=100.0, dtype=dtype)
    for steps in range(1, 13):
        optimizer.zero_grad()
        inner(point).sum().backward()
        optimizer.step()
        found = projected_descent(inner, torch.zeros(3, 4, dtype=dtype), room, rule, steps)
        assert torch.allclose(found, point.detach(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("decay", [0.0, 0.5, 0.9])
def test_momentum_step_is_sgd_with_momentum_of_torch(decay):
    target = torch.randn(3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    scale = torch.logspace(-2, 0, 12, dtype=torch.float64).view(3, 4)

    def inner(delta):
        return (scale * (delta - target).pow(4) + (delta - target).square()).sum(1)

    point = torch.zeros(3, 4, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.SGD([point], lr=0.02, momentum=decay)
    room = symmetric((3, 4), eps=100.0)
    for steps in range(1, 9):
        optimizer.zero_grad()
        inner(point).sum().backward()
        optimizer.step()
        found = projected_descent(inner, torch.zeros_like(target), room, MomentumStep(0.02, decay), steps)
        assert torch.allclose(found, point.detach(), rtol=1e-13)


def test_momentum_reaches_a_badly_conditioned_minimum_sooner():
    scale = torch.tensor([[1.0, 100.0]], dtype=torch.float64)
    start, room = torch.ones(1, 2, dtype=torch.float64), symmetric((1, 2), eps=10.0)
    plain, heavy = (
        projected_descent(lambda d: 0.5 * (scale * d.square()).sum(1), start, room, rule, 60).norm()
        for rule in (GradientStep(2 / 101), MomentumStep(4 / 121, (9 / 11) ** 2))  # each at its best size
    )
    assert heavy < 1e-2 * plain


def test_the_first_adam_step_is_a_sign_step():
    gradient = torch.tensor([[2.0, -4.0, 1e-3]], dtype=torch.float64)
    rule, delta = AdamStep(0.25), torch.zeros(1, 3, dtype=torch.float64)
    increment, _ = rule.step(gradient, delta, symmetric((1, 3)), rule.init(delta))
    assert torch.allclose(increment, -0.25 * gradient.sign(), rtol=2e-5)


def test_barrier_step_is_the_explicit_step_divided_by_its_curvature():
    box = symmetric((1, 200), strength=1e-5)
    delta = box.shrunk(0.01).sample(torch.Generator().manual_seed(0))
    gradient = 1e-2 * torch.randn(1, 200, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    s1, s2 = box.upper - delta, delta - box.lower
    by_hand = -(gradient + 1e-5 * (1 / s1 - 1 / s2)) / (1 / ALPHA + 1e-5 * (1 / s1**2 + 1 / s2**2))
    found, _ = BarrierStep(ALPHA, margin=0).step(gradient, delta, box, {})
    assert torch.allclose(found, box.project(delta + by_hand) - delta, rtol=1e-9, atol=1e-15)


def test_barrier_step_rests_where_the_explicit_gradient_of_the_barrier_vanishes():
    box = symmetric((1, 3), strength=1e-5)
    gradient = torch.tensor([[1.6e-3, -1e-2, 1e-4]], dtype=torch.float64)
    found = projected_descent(lambda d: (gradient * d).sum(1), 0 * gradient, box, BarrierStep(ALPHA), 3000)
    # g + c (1/(e-d) - 1/(e+d)) = 0, that is g (e^2 - d^2) + 2 c d = 0
    root = (1e-5 - (1e-5**2 + gradient**2 * EPS**2).sqrt()) / gradient
    assert torch.allclose(found, root, rtol=1e-6)
    increment, _ = BarrierStep(ALPHA).step(gradient, root, box, {})
    assert increment.abs().max() < 1e-12


def test_barrier_step_without_preconditioner_is_the_explicit_step_on_inner_plus_barrier():
    box = symmetric((2, 50), strength=1e-5)
    start = box.shrunk(0.1).sample(torch.Generator().manual_seed(0))
    slope = 1e-3 * torch.randn(2, 50, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def inner(delta):
        return (slope * delta + 0.01 * delta.square()).sum(1)

    literal = BarrierStep(0.5, preconditioned=False)
    inside = box.shrunk(literal.margin)
    for steps in range(1, 8):
        found = projected_descent(inner, start, box, literal, steps)
        explicit = projected_descent(lambda d: inner(d) + box.barrier(d), start, box, GradientStep(0.5), steps)
        assert (found > inside.lower).all() and (found < inside.upper).all()  # so nothing was cut
        assert (found - start).abs().max() > 1e-4
        torch.testing.assert_close(found, explicit, rtol=1e-10, atol=1e-14)
    preconditioned = projected_descent(inner, start, box, BarrierStep(0.5), 7)
    assert (found - preconditioned).abs().max() > 1e-4  # they are two rules, not one
    literal_at_the_face = projected_descent(inner, box.shrunk(1e-3).upper, box, BarrierStep(ALPHA, 0.0, False), 1)
    assert torch.equal(literal_at_the_face, box.lower)  # thrown across the whole box, as its docstring says


# methods.md 2.6: c, g, then mean delta/eps along +g and share on the wrong side after ten steps
TABLE = [
    (1e-5, 1.6e-3, 0.813, 0.0),
    (1e-5, 1e-2, 0.969, 0.0),
    (1e-6, 1e-3, 0.912, 0.0),
    (1e-6, 1.6e-3, 0.982, 0.0),
    (1e-6, 1e-2, 0.997, 0.0),
    (1e-6, 1e-5, 0.012, 0.49),
]


@pytest.mark.parametrize(("c", "g", "mean", "wrong"), TABLE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_barrier_step_reproduces_the_table_of_the_fact_sheet(c, g, mean, wrong, dtype):
    box = symmetric((1, 20_000), strength=c, dtype=dtype)
    start = box.sample(torch.Generator().manual_seed(0))
    delta = projected_descent(lambda d: -g * d.sum(1), start, box, BarrierStep(ALPHA), 10)
    assert delta.mean().item() / EPS == pytest.approx(mean, abs=0.01)
    assert (delta < 0).double().mean().item() == pytest.approx(wrong, abs=0.01)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [0.0, 1e-6, 1.0, 1e6, 1e20])
def test_barrier_step_never_leaves_the_box_and_stays_finite(scale, dtype):
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(4, 100, generator=generator).to(dtype)
    x[:, :10], x[:, 10:20] = 0, 1  # one-sided boxes, whose zero lies on a face
    box = Box((-x).clamp(min=-EPS), (1 - x).clamp(max=EPS), 1e-6)
    box.upper[:, 20:30] = box.lower[:, 20:30]  # boxes without width
    gradient = scale * torch.randn(4, 100, generator=generator).to(dtype)
    for start in (box.lower, box.upper, torch.zeros_like(x), box.sample(generator)):
        for steps in (1, 2, 10):
            delta = projected_descent(lambda d: (gradient * d).sum(1), start, box, BarrierStep(ALPHA), steps)
            assert delta.isfinite().all()
            assert (delta >= box.lower).all() and (delta <= box.upper).all()


def test_barrier_step_keeps_its_margin_free():
    box = symmetric((1, 50))
    delta = projected_descent(lambda d: -1e3 * d.sum(1), box.upper, box, BarrierStep(ALPHA, margin=0.01), 3)
    assert torch.allclose(delta, box.upper * 0.98)


def test_barrier_step_wants_a_box():
    with pytest.raises(TypeError, match="Box"):
        BarrierStep().step(torch.zeros(1, 2), torch.zeros(1, 2), Ball(1.0, symmetric((1, 2))), {})


def test_a_normalised_step_has_its_length_and_the_steepest_direction():
    gradient = torch.tensor([[3.0, 4.0], [0.0, 0.0], [1e-30, 0.0]], dtype=torch.float64)
    increment, _ = NormalizedStep(0.5).step(gradient, torch.zeros_like(gradient), Ball(1.0, symmetric((3, 2))), {})
    assert torch.allclose(increment, torch.tensor([[-0.3, -0.4], [0.0, 0.0], [-0.5, 0.0]], dtype=torch.float64))
