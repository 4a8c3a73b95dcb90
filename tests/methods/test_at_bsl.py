"""AT-BSL: the cross-entropy of logits that are adjusted by the logarithm of the class counts."""

import math

import pytest
import torch

from doubly.attacks import PGD
from doubly.bilevel import SignStep
from doubly.errors import UsageError
from doubly.methods import AT, ATBSL
from doubly.threat import LinfBall
from doubly.types import TrainStep
from method_problems import flat_gradient
from method_problems import small_network as network
from method_problems import three_classes as samples

ATTACK = PGD(LinfBall(0.1), 3, SignStep(0.05))
TRAIN_STEP = TrainStep(epoch=1, step=4, progress=0.2, seed=9)


def test_the_loss_is_the_balanced_softmax_by_a_loop_over_samples():
    """-log n_y^tau exp(z_y) / sum n_c^tau exp(z_c), at images that are attacked without the counts."""
    counts, batch = [50, 20, 5], samples(7)
    for tau in (1.0, 0.5):
        model, twin, method = network(), network(), ATBSL(ATTACK, tau)
        result = method.objective(model, batch, method.init(torch.tensor(counts)), TRAIN_STEP)
        logits = twin(batch.x + ATTACK(twin, batch.x, batch.y, TRAIN_STEP.generator("attack")))
        expected = []
        for z, y in zip(logits, batch.y.tolist(), strict=True):
            scores = [n**tau * score.exp() for n, score in zip(counts, z, strict=True)]
            expected.append(-(scores[y] / sum(scores)).log())
        expected = torch.stack(expected)
        assert torch.allclose(result.sample_losses, expected, rtol=1e-12)
        slope = flat_gradient(expected.mean(), twin)
        assert torch.allclose(flat_gradient(result.loss, model), slope, rtol=1e-10, atol=1e-14)
        assert torch.equal(result.logits, logits)  # without the counts, as at test time


def test_without_tau_and_with_equal_classes_it_is_at():
    for method, counts in ((ATBSL(ATTACK, 0.0), [50, 20, 5]), (ATBSL(ATTACK), [7, 7, 7])):
        model, twin = network(), network()
        result = method.objective(model, samples(), method.init(torch.tensor(counts)), TRAIN_STEP)
        at = AT(ATTACK).objective(twin, samples(), {}, TRAIN_STEP)
        assert torch.equal(result.sample_losses, at.sample_losses)
        assert torch.equal(flat_gradient(result.loss, model), flat_gradient(at.loss, twin))


def test_a_class_without_images_counts_as_one_image():
    adjustment = ATBSL().adjustment(torch.tensor([10.0, 0.0, 100.0]))
    assert adjustment.tolist() == pytest.approx([-math.log(10), -math.log(100), 0])


def test_half_precision_adds_the_counts_in_float32():
    method = ATBSL(PGD(LinfBall(0.1), 0, start="zero"))
    batch, state = samples()._replace(x=samples().x.float()), method.init(torch.tensor([3001, 1000, 1]))
    result = method.objective(model := network().float(), batch, state, TRAIN_STEP)
    half = method.objective(Halved(model), batch, state, TRAIN_STEP)
    assert half.sample_losses.dtype is torch.float32
    assert torch.allclose(half.sample_losses, result.sample_losses, atol=5e-3)


class Halved(torch.nn.Module):
    """Returns its network's logits in half precision, as autocast does."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return self.model(x).half()


def test_refusals():
    for tau in (-1.0, float("nan"), float("inf")):
        with pytest.raises(UsageError, match="tau"):
            ATBSL(tau=tau)
    with pytest.raises(UsageError, match="counts"):
        ATBSL().init()
