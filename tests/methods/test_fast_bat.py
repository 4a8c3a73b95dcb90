"""Fast-BAT, compared with its formulas written out."""

import pytest
import torch
from torch import nn

from doubly.attacks import PGD
from doubly.bilevel import GradientStep
from doubly.errors import UsageError
from doubly.losses import CrossEntropy
from doubly.methods import AT, FastBAT
from doubly.threat import L2Ball, LinfBall
from doubly.types import Batch, TrainStep
from method_problems import flat_gradient

SIZE = 0.4
ATTACK = PGD(LinfBall(0.1), 1, GradientStep(SIZE), start="zero")


def network():
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Sequential(nn.Flatten(), nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def batch(count=6):
    generator = torch.Generator().manual_seed(2)
    return Batch(torch.rand(count, 1, 2, 2, generator=generator, dtype=torch.float64), torch.arange(count) % 3)


def by_hand(model, samples, curvature):
    """Return direct and implicit gradient by the formulas of the docstring, with one autograd call each."""
    x, y = samples.x, samples.y
    lower, upper = (-x).clamp(min=-0.1), (1 - x).clamp(max=0.1)

    def attack_gradient(point, **options):
        point = point.detach().requires_grad_()
        return torch.autograd.grad(-CrossEntropy()(model(x + point), y).sum(), point, **options)[0]

    z = (-SIZE * attack_gradient(torch.zeros_like(x))).clamp(lower, upper)
    delta = (z - SIZE * attack_gradient(z)).clamp(lower, upper)
    inside = ((delta > lower + 1e-7) & (delta < upper - 1e-7)).double()
    q = -attack_gradient(delta)
    direct = flat_gradient(CrossEntropy()(model(x + delta), y).mean(), model)
    pairing = (attack_gradient(z, create_graph=True) * inside * q / curvature).sum() / len(y)
    return direct, -flat_gradient(pairing, model), inside


def test_the_gradient_is_the_direct_one_plus_the_implicit_one():
    model, samples = network(), batch()
    for curvature in (0.5, 10.0):
        direct, implicit, inside = by_hand(model, samples, curvature)
        assert 0 < inside.mean() < 1 and implicit.norm() > 1e-4 * direct.norm()
        result = FastBAT(ATTACK, curvature).objective(model, samples, {}, TrainStep())
        assert torch.allclose(flat_gradient(result.loss, model), direct + implicit, rtol=1e-9, atol=1e-12)


def test_infinite_curvature_is_training_on_two_gradient_steps():
    model, samples = network(), batch()
    two = AT(PGD(LinfBall(0.1), 2, GradientStep(SIZE), start="zero")).objective(model, samples, {}, TrainStep())
    result = FastBAT(ATTACK, float("inf")).objective(model, samples, {}, TrainStep())
    assert torch.allclose(result.sample_losses, two.sample_losses, rtol=1e-12)
    assert torch.allclose(flat_gradient(result.loss, model), flat_gradient(two.loss, model), rtol=1e-12)


def test_the_implicit_term_comes_from_coordinates_inside_the_ball_alone():
    model, samples = network(), batch()
    far = PGD(LinfBall(0.1), 1, GradientStep(1e6), start="zero")  # every coordinate ends on a face
    one, other = (FastBAT(far, c).objective(model, samples, {}, TrainStep()) for c in (0.1, float("inf")))
    assert torch.equal(flat_gradient(one.loss, model), flat_gradient(other.loss, model))


def test_refusals():
    with pytest.raises(UsageError, match="positive"):
        FastBAT(curvature=0.0)
    with pytest.raises(UsageError, match="LinfBall"):
        FastBAT(PGD(L2Ball(1.0), 1))
