"""MART, compared with its formula written out sample by sample."""

import math

import pytest
import torch
from torch import nn

from doubly.attacks import FGSM, PGD
from doubly.bilevel import SignStep
from doubly.errors import UsageError
from doubly.losses import MartLoss
from doubly.methods import AT, MART
from doubly.threat import LinfBall
from doubly.types import TrainStep
from method_problems import by_batch_statistics, gradients
from method_problems import plain_noise as data

TRAIN_STEP = TrainStep(epoch=1, step=4, progress=0.2, seed=9)
ATTACK = PGD(LinfBall(0.1), 4, SignStep(0.03), "gaussian")


def network():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = nn.Linear(16, 12), nn.BatchNorm1d(12), nn.Tanh(), nn.Linear(12, 4)
        model = nn.Sequential(nn.Flatten(), *layers).double().train()
        model[4].weight.data *= 5
    return model


def literal(attacked, clean, y, beta, detached=False):
    """Return the loss, sample by sample."""
    values = []
    for q, p, label in zip(attacked.softmax(1), clean.softmax(1), y.tolist(), strict=True):
        runner_up = torch.stack([q[j] for j in range(4) if j != label]).max()
        factor = 1.0000001 - p[label]
        divergence = sum(p[j] * (p[j] / q[j]).log() for j in range(4))
        boosted = -q[label].log() - (1.0001 - runner_up + 1e-12).log()
        values.append(boosted + beta * divergence * (factor.detach() if detached else factor))
    return torch.stack(values)


def test_mart_is_its_formula():
    for detached in (False, True):
        model, twin, batch = network(), network(), data()
        result = MART(ATTACK, 3.0, detached).objective(model, batch, {}, TRAIN_STEP)
        delta = ATTACK(twin, batch.x, batch.y, TRAIN_STEP.generator("attack"))
        attacked, clean = twin(batch.x + delta), by_batch_statistics(twin, batch.x)
        losses = literal(attacked, clean, batch.y, 3.0, detached)
        assert torch.allclose(result.sample_losses, losses.detach()) and torch.equal(result.logits, attacked.detach())
        assert torch.equal(result.weights, torch.ones(8).double()) and result.state == {}
        for a, b in zip(gradients(result.loss, model), gradients(losses.mean(), twin), strict=True):
            assert torch.allclose(a, b, rtol=1e-9, atol=1e-12)
        assert model[2].num_batches_tracked == 1 and torch.equal(model[2].running_mean, twin[2].running_mean)


def test_detached_changes_the_gradient_and_no_value():
    batch, models = data(), (network(), network())
    one, other = (
        MART(ATTACK, detached=detached).objective(model, batch, {}, TRAIN_STEP)
        for detached, model in zip((False, True), models, strict=True)
    )
    assert torch.equal(one.sample_losses, other.sample_losses)
    assert not torch.allclose(gradients(one.loss, models[0])[0], gradients(other.loss, models[1])[0], rtol=1e-3)


def test_beta_zero_is_at_plus_a_term_for_the_runner_up_class():
    model, twin, batch = network(), network(), data()
    result = MART(ATTACK, beta=0.0).objective(model, batch, {}, TRAIN_STEP)
    at = AT(ATTACK).objective(network(), batch, {}, TRAIN_STEP)
    rows = zip(at.logits.softmax(1).tolist(), batch.y, strict=True)
    runners_up = [max(row[j] for j in range(4) if j != label) for row, label in rows]
    term = torch.tensor([-math.log(1.0001 - p + 1e-12) for p in runners_up], dtype=torch.float64)
    assert torch.allclose(result.sample_losses, at.sample_losses + term)
    attacked = twin(batch.x + ATTACK(twin, batch.x, batch.y, TRAIN_STEP.generator("attack")))
    expected = literal(attacked, attacked.detach(), batch.y, 0.0).mean()
    for a, b in zip(gradients(result.loss, model), gradients(expected, twin), strict=True):
        assert torch.allclose(a, b, rtol=1e-9, atol=1e-12)


def test_the_divergence_counts_most_where_the_clean_image_is_misclassified():
    clean = torch.tensor([[4.0, 0.0], [0.0, 4.0]], dtype=torch.float64)
    attacked = torch.zeros(2, 2).double()
    right, wrong = MartLoss(1.0).parts(attacked, torch.tensor([0, 0]), clean).unweighted.tolist()
    share = 1 / (1 + math.exp(-4))
    divergence = share * math.log(2 * share) + (1 - share) * math.log(2 * (1 - share))
    assert right == pytest.approx(divergence * (1.0000001 - share))
    assert wrong == pytest.approx(divergence * (1.0000001 - (1 - share)))


def test_any_attack_will_do_and_the_published_one_is_the_default():
    assert MART().attack == PGD(start="gaussian") and (MART().beta, MART().detached) == (5.0, False)
    result = MART(FGSM(LinfBall(0.1))).objective(network(), data(), {}, TRAIN_STEP)
    assert result.loss.isfinite()


def test_a_beta_that_is_no_weight_is_refused():
    for beta in (-1.0, math.inf, math.nan):
        with pytest.raises(UsageError, match="from 0 on, got"):
            MART(beta=beta)
