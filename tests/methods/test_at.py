"""AT and standard training, with balanced classes and with losses that compare with the clean images."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from doubly.attacks import FGSM, PGD
from doubly.bilevel import SignStep
from doubly.errors import NonFiniteError, UsageError
from doubly.losses import LogitMargin, MartLoss, TradesLoss
from doubly.methods import AT, MART, TRADES, Standard
from doubly.threat import LinfBall
from doubly.types import Batch, TrainStep
from method_problems import gradients

TRAIN_STEP = TrainStep(epoch=1, step=4, progress=0.2, seed=9)
ATTACK = PGD(LinfBall(0.1), 3, SignStep(0.05))
COUNTS = torch.tensor([10, 40, 0, 50])


def network():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(16, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 4)).train()


@pytest.fixture
def batch():
    generator = torch.Generator().manual_seed(1)
    x = torch.rand(8, 1, 4, 4, generator=generator)
    return Batch(x, torch.randint(4, (8,), generator=generator), torch.arange(8))


def test_at_is_the_mean_loss_at_the_attacked_images(batch):
    model, twin = network(), network()
    delta = ATTACK(twin, batch.x, batch.y, TRAIN_STEP.generator("attack"))
    losses = F.cross_entropy(twin(batch.x + delta), batch.y, reduction="none")
    result = AT(ATTACK).objective(model, batch, {}, TRAIN_STEP)
    assert torch.equal(result.sample_losses, losses.detach()) and result.state == {}
    assert torch.equal(result.weights, torch.ones(8))
    for a, b in zip(gradients(result.loss, model), gradients(losses.mean(), twin), strict=True):
        assert torch.allclose(a, b, rtol=1e-6)
    perturbation = AT(ATTACK).perturb(network(), batch, {}, TRAIN_STEP)
    again = AT(ATTACK).objective(network(), batch, {}, TRAIN_STEP, perturbation)
    assert torch.equal(again.sample_losses, result.sample_losses)


def test_standard_is_the_mean_loss_at_the_images(batch):
    model, twin = network(), network()
    result = Standard().objective(model, batch, {}, TRAIN_STEP)
    expected = F.cross_entropy(twin(batch.x), batch.y)
    for a, b in zip(gradients(result.loss, model), gradients(expected, twin), strict=True):
        assert torch.allclose(a, b, rtol=1e-6)
    fast_at = AT(FGSM(LinfBall(0.1), 1.25, "uniform")).objective(network(), batch, {}, TRAIN_STEP)
    assert fast_at.loss > result.loss


def test_any_loss_can_be_minimized(batch):
    result = AT(PGD(LinfBall(0.1), 0, start="zero"), LogitMargin()).objective(network(), batch, {}, TRAIN_STEP)
    assert torch.allclose(result.sample_losses, LogitMargin()(network()(batch.x), batch.y).detach(), atol=1e-6)


def test_logits_that_make_no_sense_are_refused(batch):
    class Broken(nn.Module):
        def forward(self, x):
            return x.flatten(1)[:, :4] * float("nan")

    for method in (AT(PGD(LinfBall(0.1), 2)), Standard()):
        with pytest.raises(NonFiniteError, match="logits"):
            method.objective(Broken(), batch, {}, TRAIN_STEP)
        with pytest.raises(UsageError, match="classes"):
            method.objective(nn.Flatten(0), batch, {}, TRAIN_STEP)


def test_a_balanced_loss_weighs_a_class_by_the_inverse_of_its_size(batch):
    method = AT(balance="loss")
    samples = batch._replace(y=torch.tensor([0, 1, 3, 0, 1, 3, 3, 1]))
    result = method.objective(network(), samples, method.init(COUNTS), TRAIN_STEP)
    expected = torch.tensor([100 / 3 / n for n in (10, 40, 50, 10, 40, 50, 50, 40)])  # three classes have images
    assert torch.allclose(result.weights, expected)
    plain = AT().objective(network(), samples, {}, TRAIN_STEP)
    assert torch.equal(result.sample_losses, plain.sample_losses)
    assert result.loss.item() == pytest.approx((expected * plain.sample_losses).mean().item(), rel=1e-6)
    equal = method.objective(network(), batch, method.init(torch.full((4,), 25)), TRAIN_STEP)
    assert torch.equal(equal.weights, torch.ones(8))


def test_balanced_sampling_draws_the_classes_that_have_images_equally_often(batch):
    method = AT(balance="sampling")
    state = method.init(COUNTS)
    assert method.sampling(state).tolist() == pytest.approx([1 / 3, 1 / 3, 0, 1 / 3])
    one, other = (m.objective(network(), batch, state, TRAIN_STEP) for m in (method, AT()))
    assert torch.equal(one.loss, other.loss)
    with pytest.raises(UsageError, match=r"init\(images.counts\(\)\)"):
        AT(balance="loss").init()


def mart(attacked, clean, y):
    """Return MART's loss, one sample at a time."""
    values = []
    for a, c, label in zip(attacked.softmax(1), clean.softmax(1), y, strict=True):
        runner_up = torch.stack([p for k, p in enumerate(a) if k != label]).max()
        divergence = (c * (c / a).log()).sum()
        values.append(-a[label].log() - (1.0001 - runner_up).log() + 5 * divergence * (1.0000001 - c[label]))
    return torch.stack(values)


def test_a_paired_loss_sees_the_clean_images_in_training_mode_without_updating_statistics(batch):
    for balance in ("none", "loss"):
        model, twin = network(), network()
        method = AT(ATTACK, MartLoss(), balance)
        state = method.init(torch.tensor([10, 40, 30, 50]))
        delta = ATTACK(twin, batch.x, batch.y, TRAIN_STEP.generator("attack"))
        attacked, clean = twin(batch.x + delta), network()(batch.x)
        result = method.objective(model, batch, state, TRAIN_STEP)
        assert torch.equal(result.logits, attacked.detach())
        assert torch.allclose(result.sample_losses, mart(attacked, clean, batch.y).detach(), rtol=1e-5)
        assert model[2].num_batches_tracked == 1 and torch.equal(model[2].running_mean, twin[2].running_mean)
        clean = F.batch_norm(twin[1](batch.x.flatten(1)), None, None, twin[2].weight, twin[2].bias, True)
        expected = (result.weights * mart(attacked, twin[4](clean.relu()), batch.y)).mean()
        for a, b in zip(gradients(result.loss, model), gradients(expected, twin), strict=True):
            assert torch.allclose(a, b, rtol=1e-4, atol=1e-6)


def test_with_a_paired_loss_at_is_the_method_of_that_name(batch):
    for loss, method in [
        (MartLoss(4.0), MART(ATTACK, 4.0)),
        (MartLoss(4.0, True), MART(ATTACK, 4.0, detached=True)),
        (TradesLoss(4.0), TRADES(ATTACK, 4.0, attack_on="cross_entropy")),
    ]:
        model, twin = network(), network()
        result, expected = (
            m.objective(net, batch, {}, TRAIN_STEP) for m, net in ((AT(ATTACK, loss), model), (method, twin))
        )
        assert torch.equal(result.sample_losses, expected.sample_losses)
        assert torch.equal(model[2].running_var, twin[2].running_var)
        for a, b in zip(gradients(result.loss, model), gradients(expected.loss, twin), strict=True):
            assert torch.equal(a, b)
