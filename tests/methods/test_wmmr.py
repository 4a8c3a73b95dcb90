import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from doubly.attacks import PGD
from doubly.bilevel import SignStep
from doubly.distributed import collectives as parallel
from doubly.errors import UsageError
from doubly.losses import LogitMargin, TradesLoss
from doubly.methods import AT, WMMR
from doubly.threat import LinfBall
from doubly.types import Batch, TrainStep

K, RADIUS, SIZE = 5, 0.1, 0.03
TRAIN_STEP = TrainStep(epoch=1, step=4, progress=0.2, seed=9)
STILL = PGD(LinfBall(RADIUS), 0, start="zero")  # no attack: the logits are those of the images


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


def gradients(scalar, model):
    return torch.autograd.grad(scalar, list(model.parameters()))


def product(logits, y, alpha, detached=False):
    """w_i * CE_i, written out sample by sample."""
    terms, weights = [], []
    for row, label in zip(logits, y.tolist(), strict=True):
        shares = row.exp() / row.exp().sum()
        margin = shares[label] - torch.cat([shares[:label], shares[label + 1 :]]).max()
        weight = torch.exp(-alpha * margin)
        weights.append(weight.detach())
        terms.append((weight.detach() if detached else weight) * -shares[label].log())
    return torch.stack(terms), torch.stack(weights)


def test_weights_by_hand():
    logits = torch.tensor([[math.log(0.7), math.log(0.2), math.log(0.1)], [0.0, 0.0, math.log(2.0)]])
    found = WMMR(alpha=2.0).weights(logits, torch.tensor([0, 1])).tolist()
    assert found == pytest.approx([math.exp(-2 * (0.7 - 0.2)), math.exp(-2 * (0.25 - 0.5))], rel=1e-6)


@pytest.mark.parametrize("alpha", [0.5, 2.0])
def test_the_objective_is_the_weighted_mean_at_the_attacked_images(alpha, batch):
    model, twin = network(), network()
    draws = parallel.uniform(batch.x, TRAIN_STEP.generator("attack"))
    lower, upper = (-batch.x).clamp(min=-RADIUS), (1 - batch.x).clamp(max=RADIUS)
    delta = lower + draws * (upper - lower)
    twin.eval()
    for _ in range(K):
        delta = delta.detach().requires_grad_()
        (slope,) = torch.autograd.grad(product(twin(batch.x + delta), batch.y, alpha)[0].sum(), delta)
        delta = torch.minimum(torch.maximum(delta + SIZE * slope.sign(), lower), upper)
    logits = twin.train()(batch.x + delta.detach())
    terms, weights = product(logits, batch.y, alpha)
    found = WMMR(attack(), alpha=alpha).objective(model, batch, {}, TRAIN_STEP)
    assert torch.allclose(found.logits, logits.detach(), atol=1e-10)
    assert torch.allclose(found.weights, weights, atol=1e-10)
    assert torch.allclose(found.sample_losses, F.cross_entropy(logits, batch.y, reduction="none").detach(), atol=1e-10)
    for a, b in zip(gradients(found.loss, model), gradients(terms.mean(), twin), strict=True):
        assert torch.allclose(a, b, atol=1e-9)


def test_the_weighted_attack_is_another_one_and_raises_the_weighted_loss_further(batch):
    class Tracked(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = network()

        def forward(self, x):
            self.last = x.detach()
            return self.inner(x)

    found = []
    for method in (WMMR(attack(), alpha=5.0), AT(attack())):
        model = Tracked()
        method.objective(model, batch, {}, TRAIN_STEP)
        found.append((model.last, product(network().eval()(model.last), batch.y, 5.0)[0].mean()))
    (weighted, high), (plain, low) = found
    assert not torch.equal(weighted, plain) and high > low


def test_without_alpha_it_is_at_exactly(batch):
    for options in ({}, {"detached": True}, {"normalize": "batch"}):
        models = network(), network()
        found = WMMR(attack(), alpha=0.0, **options).objective(models[0], batch, {}, TRAIN_STEP)
        at = AT(attack()).objective(models[1], batch, {}, TRAIN_STEP)
        assert torch.equal(found.sample_losses, at.sample_losses) and torch.equal(found.weights, torch.ones(12))
        for a, b in zip(gradients(found.loss, models[0]), gradients(at.loss, models[1]), strict=True):
            assert torch.equal(a, b)


def test_the_released_gradient_goes_through_the_weights_and_the_detached_one_does_not(batch):
    found = {}
    for detached in (False, True):
        model, twin = network(), network()
        objective = WMMR(STILL, alpha=2.0, detached=detached).objective(model, batch, {}, TRAIN_STEP)
        found[detached] = gradients(objective.loss, model)
        expected = gradients(product(twin(batch.x), batch.y, 2.0, detached)[0].mean(), twin)
        for a, b in zip(found[detached], expected, strict=True):
            assert torch.allclose(a, b, atol=1e-9)
        assert not objective.weights.requires_grad and (objective.weights > 0).all()
    assert not any(torch.allclose(a, b) for a, b in zip(found[False][-2:], found[True][-2:], strict=True))
    assert WMMR() == WMMR(detached=False, normalize="none", alpha=0.5)  # as released


def test_the_attack_sees_its_weight_also_where_the_model_does_not(batch):
    one, other = (
        WMMR(attack(), alpha=5.0, detached=detached).objective(network(), batch, {}, TRAIN_STEP)
        for detached in (False, True)
    )
    assert torch.equal(one.sample_losses, other.sample_losses)


@pytest.mark.parametrize("detached", [False, True])
def test_normalised_weights_have_mean_one_and_their_mean_is_a_constant(detached, batch):
    model, twin = network(), network()
    method = WMMR(STILL, alpha=2.0, detached=detached, normalize="batch")
    found = method.objective(model, batch, {}, TRAIN_STEP)
    terms, weights = product(twin(batch.x), batch.y, 2.0, detached)
    mean = sum(weights.tolist()) / 12
    assert abs(mean - 1) > 0.1  # else the example shows nothing
    assert torch.allclose(found.weights, weights / mean, atol=1e-10)
    for a, b in zip(gradients(found.loss, model), gradients(terms.mean() / mean, twin), strict=True):
        assert torch.allclose(a, b, atol=1e-9)


def test_two_processes_normalise_as_one(batch, monkeypatch):
    method = WMMR(STILL, alpha=2.0, normalize="batch")
    model = network().eval()  # no sample sees another
    whole = method.objective(model, batch, {}, TRAIN_STEP).weights
    raw = method.weights(model(batch.x), batch.y).detach()
    monkeypatch.setattr("doubly.distributed.collectives.gather", lambda values: raw)
    parts = [Batch(*(part[rows] for part in batch)) for rows in (slice(0, 6), slice(6, 12))]
    halves = [method.objective(model, part, {}, TRAIN_STEP).weights for part in parts]
    assert torch.allclose(torch.cat(halves), whole, atol=1e-12) and abs(halves[0].mean() - 1) > 1e-3


def test_restarts_keep_the_highest_weighted_loss(batch):
    class Tracked(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = network().eval()

        def forward(self, x):
            self.last = x.detach()
            return self.inner(x)

    values = []
    for restarts in (1, 3):
        model = Tracked()
        WMMR(attack(restarts=restarts), alpha=5.0).objective(model, batch, {}, TRAIN_STEP)
        values.append(product(network().eval()(model.last), batch.y, 5.0)[0])
    assert (values[1] >= values[0] - 1e-9).all() and (values[1] > values[0] + 1e-6).any()


@pytest.mark.parametrize("alpha", [-0.5, 81.0, math.inf, math.nan])
def test_an_alpha_without_finite_weights_is_refused(alpha):
    with pytest.raises(UsageError, match=r"alpha must lie in \[0, 80\]"):
        WMMR(alpha=alpha)


def test_the_largest_alpha_has_finite_weights():
    found = WMMR(alpha=80.0).weights(torch.tensor([[50.0, -50.0]]), torch.tensor([1]))
    assert found.dtype is torch.float32 and found.isfinite().all()


@pytest.mark.parametrize("values", [{"attack": PGD(loss=LogitMargin())}, {"loss": LogitMargin()}])
def test_a_loss_that_can_be_negative_is_refused(values):
    with pytest.raises(UsageError, match="CrossEntropy"):
        WMMR(**values)


def test_a_loss_that_needs_clean_logits_is_refused():
    with pytest.raises(UsageError, match="WMMR knows one set of logits"):
        WMMR(loss=TradesLoss())
