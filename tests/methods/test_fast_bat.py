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

SIZE = 0.4
ATTACK = PGD(LinfBall(0.1), 1, GradientStep(SIZE), start="zero")


def network():
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Sequential(nn.Flatten(), nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def batch(count=6):
    generator = torch.Generator().manual_seed(2)
    return Batch(torch.rand(count, 1, 2, 2, generator=generator, dtype=torch.float64), torch.arange(count) % 3)


def flat(gradients):
    return torch.cat([g.flatten() for g in gradients])


def by_hand(model, samples, curvature):
    """The formulas of the docstring, written out with one autograd call each."""
    x, y = samples.x, samples.y
    parameters = list(model.parameters())
    lower, upper = (-x).clamp(min=-0.1), (1 - x).clamp(max=0.1)

    def attack_gradient(point, **options):
        point = point.detach().requires_grad_()
        return torch.autograd.grad(-CrossEntropy()(model(x + point), y).sum(), point, **options)[0]

    z = (-SIZE * attack_gradient(torch.zeros_like(x))).clamp(lower, upper)
    delta = (z - SIZE * attack_gradient(z)).clamp(lower, upper)
    inside = ((delta > lower + 1e-7) & (delta < upper - 1e-7)).double()
    q = -attack_gradient(delta)
    direct = torch.autograd.grad(CrossEntropy()(model(x + delta), y).mean(), parameters)
    pairing = (attack_gradient(z, create_graph=True) * inside * q / curvature).sum() / len(y)
    return flat(direct), -flat(torch.autograd.grad(pairing, parameters)), inside, delta


@pytest.mark.parametrize("curvature", [0.5, 10.0])
def test_the_gradient_is_the_direct_one_plus_the_implicit_one(curvature):
    model, samples = network(), batch()
    direct, implicit, inside, _ = by_hand(model, samples, curvature)
    assert 0 < inside.mean() < 1 and implicit.norm() > 1e-4 * direct.norm()
    found = FastBAT(ATTACK, curvature).objective(model, samples, {}, TrainStep())
    gradient = flat(torch.autograd.grad(found.loss, list(model.parameters())))
    assert torch.allclose(gradient, direct + implicit, rtol=1e-9, atol=1e-12)


def test_infinite_curvature_is_training_on_two_gradient_steps():
    model, samples = network(), batch()
    two = AT(PGD(LinfBall(0.1), 2, GradientStep(SIZE), start="zero")).objective(model, samples, {}, TrainStep())
    found = FastBAT(ATTACK, float("inf")).objective(model, samples, {}, TrainStep())
    assert torch.allclose(found.sample_losses, two.sample_losses, rtol=1e-12)
    one, other = (flat(torch.autograd.grad(o.loss, list(model.parameters()))) for o in (found, two))
    assert torch.allclose(one, other, rtol=1e-12)


def test_the_term_comes_from_coordinates_inside_the_ball_alone():
    model, samples = network(), batch()
    far = PGD(LinfBall(0.1), 1, GradientStep(1e6), start="zero")  # every coordinate ends on a face
    found = FastBAT(far, 0.1).objective(model, samples, {}, TrainStep())
    plain = FastBAT(far, float("inf")).objective(model, samples, {}, TrainStep())
    one, other = (flat(torch.autograd.grad(o.loss, list(model.parameters()))) for o in (found, plain))
    assert torch.equal(one, other)


def test_what_it_cannot_do_is_refused():
    with pytest.raises(UsageError, match="positive"):
        FastBAT(curvature=0.0)
    with pytest.raises(UsageError, match="LinfBall"):
        FastBAT(PGD(L2Ball(1.0), 1))
