import pytest
import torch
import torch.nn.functional as F
from torch import nn

from doubly.attacks import FGSM, PGD
from doubly.bilevel import SignStep
from doubly.errors import NonFiniteError, UsageError
from doubly.losses import LogitMargin
from doubly.methods import AT, Standard
from doubly.threat import LinfBall
from doubly.types import Batch, Moment

MOMENT = Moment(epoch=1, step=4, progress=0.2, seed=9)


def network():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(16, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 4)).train()


@pytest.fixture
def batch():
    generator = torch.Generator().manual_seed(1)
    return Batch(
        torch.rand(8, 1, 4, 4, generator=generator), torch.randint(4, (8,), generator=generator), torch.arange(8)
    )


def gradients(scalar, model):
    return torch.autograd.grad(scalar, list(model.parameters()))


def test_at_is_the_mean_loss_at_the_attacked_images(batch):
    attack = PGD(LinfBall(0.1), 5, SignStep(0.03))
    model, twin = network(), network()
    delta = attack(twin, batch.x, batch.y, MOMENT.generator("attack"))
    losses = F.cross_entropy(twin(batch.x + delta), batch.y, reduction="none")
    found = AT(attack).objective(model, batch, {}, MOMENT)
    assert torch.equal(found.losses, losses.detach()) and found.state == {}
    assert torch.equal(found.weights, torch.ones(8))
    for a, b in zip(gradients(found.scalar, model), gradients(losses.mean(), twin), strict=True):
        assert torch.allclose(a, b, rtol=1e-6)


def test_standard_is_the_mean_loss_at_the_images(batch):
    model, twin = network(), network()
    found = Standard().objective(model, batch, {}, MOMENT)
    expected = F.cross_entropy(twin(batch.x), batch.y)
    for a, b in zip(gradients(found.scalar, model), gradients(expected, twin), strict=True):
        assert torch.allclose(a, b, rtol=1e-6)


def test_fast_at_is_at_with_another_attack(batch):
    found = AT(FGSM(LinfBall(0.1), 1.25, "uniform")).objective(network(), batch, {}, MOMENT)
    assert found.scalar > Standard().objective(network(), batch, {}, MOMENT).scalar


def test_the_loss_is_free(batch):
    model = network()
    found = AT(PGD(LinfBall(0.1), 0, start="zero"), LogitMargin()).objective(model, batch, {}, MOMENT)
    assert torch.allclose(found.losses, LogitMargin()(network()(batch.x), batch.y).detach(), atol=1e-6)


@pytest.mark.parametrize("method", [AT(PGD(LinfBall(0.1), 2)), Standard()])
def test_a_model_that_answers_nonsense_is_named(method, batch):
    class Broken(nn.Module):
        def forward(self, x):
            return x.flatten(1)[:, :4] * float("nan")

    with pytest.raises(NonFiniteError, match="logits"):
        method.objective(Broken(), batch, {}, MOMENT)
    with pytest.raises(UsageError, match="classes"):
        method.objective(nn.Flatten(0), batch, {}, MOMENT)
