"""TRADES: its attack on the divergence, and its formula."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from doubly.attacks import PGD
from doubly.bilevel import SignStep
from doubly.errors import NonFiniteError, UsageError
from doubly.losses import LogitMargin
from doubly.methods import TRADES, Standard
from doubly.threat import LinfBall
from doubly.types import TrainStep
from method_problems import by_batch_statistics, gradients
from method_problems import plain_noise as data

TRAIN_STEP = TrainStep(epoch=1, step=4, progress=0.2, seed=9)
RADIUS, K, SIZE = 0.1, 4, 0.03


def network():
    """Return a network whose running statistics are not those of the batch, so that its modes differ."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = nn.Linear(16, 12), nn.BatchNorm1d(12), nn.Tanh(), nn.Linear(12, 4)
        model = nn.Sequential(nn.Flatten(), *layers).double().train()
        model[2].running_mean.normal_()
        model[2].running_var.uniform_(0.5, 2)
        model[4].weight.data *= 5
    return model


def attack(**values):
    return PGD(**{"threat": LinfBall(RADIUS), "steps": K, "rule": SignStep(SIZE), "start": "gaussian", **values})


def divergence(clean, attacked):
    p, q = clean.softmax(1), attacked.softmax(1)
    return (p * (p.log() - q.log())).sum(1)


def literal_attack(model, batch, mode="eval"):
    """Attack with p(x) computed anew in each step."""
    model.train(mode == "train")
    draws = TRAIN_STEP.generator("attack").uniform(batch.x)
    lower, upper = (-batch.x).clamp(min=-RADIUS), (1 - batch.x).clamp(max=RADIUS)
    delta = (0.001 * torch.special.ndtri(draws)).clamp(lower, upper)
    for _ in range(K):
        delta.requires_grad_()
        logits = [model(x) if mode == "eval" else by_batch_statistics(model, x) for x in (batch.x, batch.x + delta)]
        (slope,) = torch.autograd.grad(divergence(*logits).sum(), delta)
        delta = (delta.detach() + SIZE * slope.sign()).clamp(lower, upper)
    model.train()
    return delta


def test_the_attack_increases_the_divergence_and_computes_the_clean_logits_once():
    for mode in ("eval", "train"):
        model, batch = network(), data()
        generator = TRAIN_STEP.generator("attack")
        delta = attack(attack_mode=mode).maximize_divergence(model, batch.x, batch.y, generator)
        assert torch.equal(delta, literal_attack(network(), batch, mode))
        assert model[2].num_batches_tracked == 0
    other = attack().maximize_divergence(network(), batch.x, (batch.y + 1) % 4, TRAIN_STEP.generator("attack"))
    assert torch.equal(other, literal_attack(network(), batch))  # whatever the labels


def test_trades_is_its_formula_with_a_gradient_through_both_arguments_of_the_divergence():
    model, twin, batch = network(), network(), data()
    result = TRADES(attack(), beta=3.0).objective(model, batch, {}, TRAIN_STEP)
    attacked = twin(batch.x + literal_attack(twin, batch))
    clean = by_batch_statistics(twin, batch.x)
    losses = F.cross_entropy(clean, batch.y, reduction="none") + 3 * divergence(clean, attacked)
    assert torch.allclose(result.sample_losses, losses.detach()) and torch.allclose(result.logits, attacked.detach())
    assert torch.equal(result.weights, torch.ones(8).double()) and result.state == {}
    for a, b in zip(gradients(result.loss, model), gradients(losses.mean(), twin), strict=True):
        assert torch.allclose(a, b, rtol=1e-9, atol=1e-12)
    assert model[2].num_batches_tracked == 1 and torch.equal(model[2].running_var, twin[2].running_var)


def test_beta_zero_has_exactly_the_gradient_of_standard_training():
    model, twin, batch = network(), network(), data()
    result = TRADES(attack(), beta=0.0).objective(model, batch, {}, TRAIN_STEP)
    expected = Standard().objective(twin, batch, {}, TRAIN_STEP)
    assert torch.equal(result.sample_losses, expected.sample_losses)
    for a, b in zip(gradients(result.loss, model), gradients(expected.loss, twin), strict=True):
        assert torch.equal(a, b)


def test_large_beta_is_the_gradient_of_the_divergence():
    model, twin, batch = network(), network(), data()
    result = TRADES(attack(), beta=1e9).objective(model, batch, {}, TRAIN_STEP)
    attacked = twin(batch.x + literal_attack(twin, batch))
    expected = divergence(by_batch_statistics(twin, batch.x), attacked).mean()
    for a, b in zip(gradients(result.loss / 1e9, model), gradients(expected, twin), strict=True):
        assert torch.allclose(a, b, rtol=1e-6, atol=1e-8)


def test_an_attack_on_the_cross_entropy_is_another_one():
    batch = data()
    model = network()
    kl, cross_entropy = TRADES(attack()), TRADES(attack(), attack_on="cross_entropy")
    assert not torch.equal(*(m.objective(network(), batch, {}, TRAIN_STEP).logits for m in (kl, cross_entropy)))
    delta = attack()(model, batch.x, batch.y, TRAIN_STEP.generator("attack"))
    result = cross_entropy.objective(network(), batch, {}, TRAIN_STEP)
    assert torch.equal(result.logits, network()(batch.x + delta).detach())


def test_it_costs_one_clean_pass_for_the_attack_and_one_for_the_loss():
    counts = []
    for method in (TRADES(attack()), TRADES(attack(), attack_on="cross_entropy")):
        model, modes = network(), []
        model[1].register_forward_hook(lambda module, *_, modes=modes: modes.append(module.training))
        method.objective(model, data(), {}, TRAIN_STEP)
        counts.append((modes.count(False), modes.count(True)))
    assert counts == [(K + 1, 2), (K, 2)]


def test_restarts_keep_the_larger_divergence():
    batch = data()
    single, several = (
        attack(restarts=n, start="uniform").maximize_divergence(
            network(), batch.x, batch.y, TRAIN_STEP.generator("attack")
        )
        for n in (1, 4)
    )
    model = network().eval()
    one, other = (divergence(model(batch.x), model(batch.x + delta)) for delta in (single, several))
    assert (other >= one).all() and (other > one).any()


def test_by_default_it_is_as_published_but_for_the_radius():
    method = TRADES()
    assert (method.beta, method.attack_on, method.attack.start, method.attack.steps) == (6.0, "kl", "gaussian", 10)


def test_refused_settings_are_allowed_for_an_attack_on_the_cross_entropy():
    for settings in (attack(start="zero"), attack(loss=LogitMargin())):
        method = TRADES(settings, attack_on="cross_entropy")
        assert method.objective(network(), data(), {}, TRAIN_STEP).loss.isfinite()
        with pytest.raises(UsageError):
            dataclasses.replace(method, attack_on="kl")
        with pytest.raises(UsageError):
            settings.maximize_divergence(network(), data().x, data().y, TRAIN_STEP.generator("attack"))


class Broken(nn.Module):
    def forward(self, x):
        return x.flatten(1)[:, :4] * float("nan")


class Tuple(nn.Module):
    def forward(self, x):
        return x.flatten(1)[:, :4], None


def test_refusals():
    for settings, message in [
        ({"beta": -1.0}, "from 0 on, got -1"),
        ({"beta": float("nan")}, "from 0 on, got nan"),
        ({"attack": attack(start="zero")}, "no gradient at x itself.*use start gaussian or uniform"),
        ({"attack": attack(loss=LogitMargin())}, "leave the loss out"),
    ]:
        with pytest.raises(UsageError, match=message):
            TRADES(**settings)
    batch = data()
    for model, x, error, message in [
        (network(), batch.x + 2, UsageError, "lie in"),
        (network(), (255 * batch.x).to(torch.uint8), UsageError, "divide uint8 images"),
        (Broken(), batch.x, NonFiniteError, "logits"),
        (Tuple(), batch.x, UsageError, "tensor of logits, got tuple"),
    ]:
        with pytest.raises(error, match=message):
            TRADES(attack()).objective(model, batch._replace(x=x), {}, TRAIN_STEP)
