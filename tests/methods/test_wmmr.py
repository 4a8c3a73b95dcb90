"""WMMR, compared with its formula written out sample by sample."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from doubly.attacks import PGD
from doubly.bilevel import SignStep
from doubly.errors import UsageError
from doubly.losses import LogitMargin, TradesLoss
from doubly.methods import AT, WMMR
from doubly.threat import LinfBall
from doubly.types import Batch, TrainStep
from method_problems import gradients

K, RADIUS, SIZE = 5, 0.1, 0.03
TRAIN_STEP = TrainStep(epoch=1, step=4, progress=0.2, seed=9)
NO_ATTACK = PGD(LinfBall(RADIUS), 0, start="zero")  # the logits are those of the images


def network():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = nn.Linear(16, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 4)
        model = nn.Sequential(nn.Flatten(), *layers).double().train()
        with torch.no_grad():
            model[-1].weight.mul_(5)  # confident, right or wrong: margins all over [-1, 1]
        return model


@pytest.fixture
def batch():
    generator = torch.Generator().manual_seed(1)
    x = torch.rand(12, 1, 4, 4, generator=generator, dtype=torch.float64)
    return Batch(x, torch.randint(4, (12,), generator=generator), torch.arange(12))


def attack(**values):
    return PGD(LinfBall(RADIUS), K, SignStep(SIZE), **values)


def product(logits, y, alpha, detached=False):
    """Return w_i * CE_i and w_i, sample by sample."""
    terms, weights = [], []
    for row, label in zip(logits, y.tolist(), strict=True):
        p = row.exp() / row.exp().sum()
        margin = p[label] - torch.cat([p[:label], p[label + 1 :]]).max()
        weight = torch.exp(-alpha * margin)
        weights.append(weight.detach())
        terms.append((weight.detach() if detached else weight) * -p[label].log())
    return torch.stack(terms), torch.stack(weights)


def test_weights_by_hand():
    logits = torch.tensor([[math.log(0.7), math.log(0.2), math.log(0.1)], [0.0, 0.0, math.log(2.0)]])
    result = WMMR(alpha=2.0).weights(logits, torch.tensor([0, 1])).tolist()
    assert result == pytest.approx([math.exp(-2 * (0.7 - 0.2)), math.exp(-2 * (0.25 - 0.5))], rel=1e-6)


def literal_attack(model, batch, alpha):
    draws = TRAIN_STEP.generator("attack").uniform(batch.x)
    lower, upper = (-batch.x).clamp(min=-RADIUS), (1 - batch.x).clamp(max=RADIUS)
    delta = lower + draws * (upper - lower)
    model.eval()
    for _ in range(K):
        delta = delta.detach().requires_grad_()
        (slope,) = torch.autograd.grad(product(model(batch.x + delta), batch.y, alpha)[0].sum(), delta)
        delta = torch.minimum(torch.maximum(delta + SIZE * slope.sign(), lower), upper)
    model.train()
    return delta.detach()


def test_the_objective_is_the_weighted_mean_at_the_attacked_images(batch):
    for alpha in (0.5, 2.0):
        model, twin = network(), network()
        logits = twin(batch.x + literal_attack(twin, batch, alpha))
        terms, weights = product(logits, batch.y, alpha)
        result = WMMR(attack(), alpha=alpha).objective(model, batch, {}, TRAIN_STEP)
        assert torch.allclose(result.logits, logits.detach(), atol=1e-10)
        assert torch.allclose(result.weights, weights, atol=1e-10)
        losses = F.cross_entropy(logits, batch.y, reduction="none").detach()
        assert torch.allclose(result.sample_losses, losses, atol=1e-10)
        for a, b in zip(gradients(result.loss, model), gradients(terms.mean(), twin), strict=True):
            assert torch.allclose(a, b, atol=1e-9)


def test_the_weighted_attack_raises_the_weighted_loss_further_and_restarts_further_still(batch):
    def weighted_losses(method):
        point = batch.x + method.perturb(network().eval(), batch, {}, TRAIN_STEP).delta
        return product(network().eval()(point), batch.y, 5.0)[0]

    weighted, detached, restarted, plain = (
        weighted_losses(method)
        for method in (
            WMMR(attack(), alpha=5.0),
            WMMR(attack(), alpha=5.0, detached=True),
            WMMR(attack(restarts=3), alpha=5.0),
            AT(attack()),
        )
    )
    assert weighted.mean() > plain.mean()
    assert torch.equal(weighted, detached)  # the attack sees its weight also where the model does not
    assert (restarted >= weighted - 1e-9).all() and (restarted > weighted + 1e-6).any()


def test_without_alpha_it_is_at_exactly(batch):
    for options in ({}, {"detached": True}, {"normalize": "batch"}):
        models = network(), network()
        result = WMMR(attack(), alpha=0.0, **options).objective(models[0], batch, {}, TRAIN_STEP)
        at = AT(attack()).objective(models[1], batch, {}, TRAIN_STEP)
        assert torch.equal(result.sample_losses, at.sample_losses) and torch.equal(result.weights, torch.ones(12))
        for a, b in zip(gradients(result.loss, models[0]), gradients(at.loss, models[1]), strict=True):
            assert torch.equal(a, b)


def test_the_released_gradient_goes_through_the_weights_and_the_detached_one_does_not(batch):
    slopes = {}
    for detached in (False, True):
        model, twin = network(), network()
        objective = WMMR(NO_ATTACK, alpha=2.0, detached=detached).objective(model, batch, {}, TRAIN_STEP)
        slopes[detached] = gradients(objective.loss, model)
        expected = gradients(product(twin(batch.x), batch.y, 2.0, detached)[0].mean(), twin)
        for a, b in zip(slopes[detached], expected, strict=True):
            assert torch.allclose(a, b, atol=1e-9)
        assert not objective.weights.requires_grad and (objective.weights > 0).all()
    assert not any(torch.allclose(a, b) for a, b in zip(slopes[False][-2:], slopes[True][-2:], strict=True))
    assert WMMR() == WMMR(detached=False, normalize="none", alpha=0.5)  # as released


def test_normalized_weights_have_mean_one_and_their_mean_is_a_constant(batch):
    for detached in (False, True):
        model, twin = network(), network()
        method = WMMR(NO_ATTACK, alpha=2.0, detached=detached, normalize="batch")
        result = method.objective(model, batch, {}, TRAIN_STEP)
        terms, weights = product(twin(batch.x), batch.y, 2.0, detached)
        mean = sum(weights.tolist()) / 12
        assert abs(mean - 1) > 0.1  # else the example shows nothing
        assert torch.allclose(result.weights, weights / mean, atol=1e-10)
        for a, b in zip(gradients(result.loss, model), gradients(terms.mean() / mean, twin), strict=True):
            assert torch.allclose(a, b, atol=1e-9)


def test_the_largest_alpha_has_finite_weights():
    weights = WMMR(alpha=80.0).weights(torch.tensor([[50.0, -50.0]]), torch.tensor([1]))
    assert weights.dtype is torch.float32 and weights.isfinite().all()


def test_refusals():
    for settings, message in [
        *(({"alpha": alpha}, r"alpha must lie in \[0, 80\]") for alpha in (-0.5, 81.0, math.inf, math.nan)),
        ({"attack": PGD(loss=LogitMargin())}, "CrossEntropy"),
        ({"loss": LogitMargin()}, "CrossEntropy"),
        ({"loss": TradesLoss()}, "WMMR knows one set of logits"),
    ]:
        with pytest.raises(UsageError, match=message):
            WMMR(**settings)
