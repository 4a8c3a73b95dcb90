"""Group DRO: probabilities of classes that follow their losses, by hand."""

import math

import pytest
import torch

from doubly.attacks import PGD
from doubly.bilevel import SignStep
from doubly.errors import UsageError
from doubly.losses import TradesLoss
from doubly.methods import AT, GroupDRO
from doubly.threat import LinfBall
from doubly.types import TrainStep
from method_problems import flat_gradient
from method_problems import small_network as network
from method_problems import three_classes as samples

ATTACK = PGD(LinfBall(0.1), 3, SignStep(0.05))
TRAIN_STEP = TrainStep(epoch=1, step=4, progress=0.2, seed=9)


def test_q_grows_with_the_mean_loss_of_the_class_by_hand():
    """Mean losses 1, 2 and 4; with the adjustment 1 / sqrt n, n = 100, 25 and 4, these become 1.1, 2.2 and 4.5."""
    losses, y = torch.tensor([0.5, 1.5, 2.0, 3.0, 4.0, 5.0], dtype=torch.float64), torch.tensor([0, 0, 1, 2, 2, 2])
    counts, q = (
        torch.tensor([100.0, 25.0, 4.0], dtype=torch.float64),
        torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64),
    )
    for adjustment, rises in ((0.0, [1, 2, 4]), (1.0, [1.1, 2.2, 4.5])):
        new = GroupDRO(eta=0.1, adjustment=adjustment).updated(q.log(), counts, losses, y).exp()
        scores = [a * math.exp(0.1 * rise) for a, rise in zip([0.5, 0.3, 0.2], rises, strict=True)]
        assert new.tolist() == pytest.approx([score / sum(scores) for score in scores], rel=1e-12)


def test_classes_that_are_not_in_the_batch_keep_their_q():
    q, counts = (
        torch.tensor([0.5, 0.3, 0.2, 0.0], dtype=torch.float64),
        torch.tensor([5.0, 5.0, 5.0, 0.0], dtype=torch.float64),
    )
    losses, y = torch.tensor([1.0, 3.0], dtype=torch.float64), torch.tensor([0, 2])
    new = GroupDRO(eta=0.5, adjustment=1.0).updated(q.log(), counts, losses, y).exp()
    scores = [0.5 * math.exp(0.5), 0.2 * math.exp(1.5)]
    expected = [0.7 * scores[0] / sum(scores), 0.3, 0.7 * scores[1] / sum(scores), 0]
    assert new.tolist() == pytest.approx(expected, rel=1e-12)


def test_the_loss_is_weighted_by_the_new_q_by_a_loop_over_samples():
    for loss in (AT().loss, TradesLoss(2.0)):
        model, twin, batch, counts = network(), network(), samples(7), [50, 20, 10]
        method = GroupDRO(ATTACK, loss, eta=0.7)
        result = method.objective(model, batch, method.init(torch.tensor(counts)), TRAIN_STEP)
        at = AT(ATTACK, loss).objective(twin, batch, {}, TRAIN_STEP)
        means = [at.sample_losses[batch.y == c].mean().item() for c in range(3)]
        scores = [math.exp(0.7 * mean) for mean in means]
        weights = [score / sum(scores) * 80 / n for score, n in zip(scores, counts, strict=True)]
        assert result.weights.tolist() == pytest.approx([weights[y] for y in batch.y])
        expected = sum(weights[y] * loss_ for y, loss_ in zip(batch.y.tolist(), at.sample_losses, strict=True)) / 7
        assert result.loss.item() == pytest.approx(expected.item(), rel=1e-9)
        assert result.state["log_q"].exp().tolist() == pytest.approx([score / sum(scores) for score in scores])


def test_the_gradient_is_that_of_weighted_at():
    model, twin = network(), network()
    method = GroupDRO(ATTACK, eta=0.7)
    result = method.objective(model, samples(), method.init(torch.tensor([50, 20, 10])), TRAIN_STEP)
    logits = twin(samples().x + ATTACK(twin, samples().x, samples().y, TRAIN_STEP.generator("attack")))
    losses = torch.nn.functional.cross_entropy(logits, samples().y, reduction="none")
    expected = flat_gradient((result.weights * losses).mean(), twin)
    assert torch.allclose(flat_gradient(result.loss, model), expected, rtol=1e-9, atol=1e-13)


def test_without_eta_it_is_at_with_a_balanced_loss_and_with_equal_classes_at():
    for counts, plain in (([50, 20, 0], AT(ATTACK, balance="loss")), ([9, 9, 9], AT(ATTACK))):
        method, counts_ = GroupDRO(ATTACK, eta=0.0, adjustment=3.0), torch.tensor(counts)
        batch = samples(8)
        batch = batch._replace(y=batch.y % 2) if 0 in counts else batch
        model, twin = network(), network()
        result = method.objective(model, batch, method.init(counts_), TRAIN_STEP)
        expected = plain.objective(twin, batch, plain.init(counts_), TRAIN_STEP)
        assert torch.allclose(result.weights, expected.weights)
        slope = flat_gradient(expected.loss, twin)
        assert torch.allclose(flat_gradient(result.loss, model), slope, rtol=1e-9, atol=1e-13)


def test_refusals():
    for settings, message in [
        ({"eta": -0.1}, "eta=-0.1"),
        ({"eta": float("inf")}, "eta=inf"),
        ({"adjustment": -1.0}, "adjustment=-1"),
        ({"adjustment": float("nan")}, "adjustment=nan"),
    ]:
        with pytest.raises(UsageError, match=message):
            GroupDRO(**settings)
    with pytest.raises(UsageError, match="counts"):
        GroupDRO().init()
