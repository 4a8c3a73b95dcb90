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

TRAIN_STEP = TrainStep(epoch=1, step=4, progress=0.2, seed=9)


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
    delta = attack(twin, batch.x, batch.y, TRAIN_STEP.generator("attack"))
    losses = F.cross_entropy(twin(batch.x + delta), batch.y, reduction="none")
    found = AT(attack).objective(model, batch, {}, TRAIN_STEP)
    assert torch.equal(found.sample_losses, losses.detach()) and found.state == {}
    assert torch.equal(found.weights, torch.ones(8))
    for a, b in zip(gradients(found.loss, model), gradients(losses.mean(), twin), strict=True):
        assert torch.allclose(a, b, rtol=1e-6)


def test_standard_is_the_mean_loss_at_the_images(batch):
    model, twin = network(), network()
    found = Standard().objective(model, batch, {}, TRAIN_STEP)
    expected = F.cross_entropy(twin(batch.x), batch.y)
    for a, b in zip(gradients(found.loss, model), gradients(expected, twin), strict=True):
        assert torch.allclose(a, b, rtol=1e-6)


def test_fast_at_is_at_with_another_attack(batch):
    found = AT(FGSM(LinfBall(0.1), 1.25, "uniform")).objective(network(), batch, {}, TRAIN_STEP)
    assert found.loss > Standard().objective(network(), batch, {}, TRAIN_STEP).loss


def test_the_loss_is_free(batch):
    model = network()
    found = AT(PGD(LinfBall(0.1), 0, start="zero"), LogitMargin()).objective(model, batch, {}, TRAIN_STEP)
    assert torch.allclose(found.sample_losses, LogitMargin()(network()(batch.x), batch.y).detach(), atol=1e-6)


@pytest.mark.parametrize("method", [AT(PGD(LinfBall(0.1), 2)), Standard()])
def test_a_model_that_answers_nonsense_is_named(method, batch):
    class Broken(nn.Module):
        def forward(self, x):
            return x.flatten(1)[:, :4] * float("nan")

    with pytest.raises(NonFiniteError, match="logits"):
        method.objective(Broken(), batch, {}, TRAIN_STEP)
    with pytest.raises(UsageError, match="classes"):
        method.objective(nn.Flatten(0), batch, {}, TRAIN_STEP)


COUNTS = torch.tensor([10, 40, 0, 50])


def test_a_balanced_loss_weighs_a_class_by_the_inverse_of_its_size(batch):
    method, model, twin = AT(balance="loss"), network(), network()
    samples = batch._replace(y=torch.tensor([0, 1, 3, 0, 1, 3, 3, 1]))
    found = method.objective(model, samples, method.init(COUNTS), TRAIN_STEP)
    expected = torch.tensor([100 / 3 / n for n in (10, 40, 50, 10, 40, 50, 50, 40)])  # three classes have images
    assert torch.allclose(found.weights, expected)
    plain = AT().objective(twin, samples, {}, TRAIN_STEP)
    assert torch.equal(found.sample_losses, plain.sample_losses)
    assert found.loss.item() == pytest.approx((expected * plain.sample_losses).mean().item(), rel=1e-6)


def test_balanced_sampling_draws_the_classes_that_have_images_alike(batch):
    method, model, twin = AT(balance="sampling"), network(), network()
    state = method.init(COUNTS)
    assert method.sampling(state).tolist() == pytest.approx([1 / 3, 1 / 3, 0, 1 / 3])
    one, other = method.objective(model, batch, state, TRAIN_STEP), AT().objective(twin, batch, {}, TRAIN_STEP)
    assert torch.equal(one.loss, other.loss)


def test_equal_classes_make_all_kinds_of_balance_the_same(batch):
    counts = torch.full((4,), 25)
    loss = AT(balance="loss")
    found = loss.objective(network(), batch, loss.init(counts), TRAIN_STEP)
    assert torch.equal(found.weights, torch.ones(8))


def test_balance_without_the_class_counts_is_refused_with_the_fix():
    with pytest.raises(UsageError, match=r"init\(images.counts\(\)\)"):
        AT(balance="loss").init()


def boosted(attacked, clean, y):
    """MART's loss, written out for one sample at a time."""
    values = []
    for a, c, label in zip(attacked.softmax(1), clean.softmax(1), y, strict=True):
        rival = torch.stack([share for k, share in enumerate(a) if k != label]).max()
        divergence = (c * (c / a).log()).sum()
        values.append(-a[label].log() - (1.0001 - rival).log() + 5 * divergence * (1.0000001 - c[label]))
    return torch.stack(values)


@pytest.mark.parametrize("balance", ["none", "loss"])
def test_a_paired_loss_sees_the_clean_images_in_training_mode_and_batch_norm_forgets_them(batch, balance):
    attack = PGD(LinfBall(0.1), 3, SignStep(0.05))
    model, twin = network(), network()
    method = AT(attack, MartLoss(), balance)
    state = method.init(torch.tensor([10, 40, 30, 50]))
    delta = attack(twin, batch.x, batch.y, TRAIN_STEP.generator("attack"))
    attacked, clean = twin(batch.x + delta), network()(batch.x)
    found = method.objective(model, batch, state, TRAIN_STEP)
    assert torch.equal(found.logits, attacked.detach())
    assert torch.allclose(found.sample_losses, boosted(attacked, clean, batch.y).detach(), rtol=1e-5)
    assert model[2].num_batches_tracked == 1 and torch.equal(model[2].running_mean, twin[2].running_mean)
    clean = nn.functional.batch_norm(twin[1](batch.x.flatten(1)), None, None, twin[2].weight, twin[2].bias, True)
    expected = (found.weights * boosted(attacked, twin[4](clean.relu()), batch.y)).mean()
    for a, b in zip(gradients(found.loss, model), gradients(expected, twin), strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("loss", "method"),
    [
        (MartLoss(4.0), lambda attack: MART(attack, 4.0)),
        (MartLoss(4.0, True), lambda attack: MART(attack, 4.0, detached=True)),
        (TradesLoss(4.0), lambda attack: TRADES(attack, 4.0, attack_on="cross_entropy")),
    ],
)
def test_with_a_paired_loss_at_is_the_method_of_that_name(batch, loss, method):
    attack = PGD(LinfBall(0.1), 3, SignStep(0.05))
    model, twin = network(), network()
    found = AT(attack, loss).objective(model, batch, {}, TRAIN_STEP)
    expected = method(attack).objective(twin, batch, {}, TRAIN_STEP)
    assert torch.equal(found.sample_losses, expected.sample_losses) and torch.equal(model[2].running_var, twin[2].running_var)
    for a, b in zip(gradients(found.loss, model), gradients(expected.loss, twin), strict=True):
        assert torch.equal(a, b)
