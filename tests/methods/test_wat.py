"""WAT: class weights from held-out losses, by hand."""

import math

import pytest
import torch

from doubly.attacks import PGD
from doubly.errors import UsageError
from doubly.losses import TradesLoss
from doubly.methods import TRADES, WAT
from doubly.threat import LinfBall
from doubly.types import TrainStep
from method_problems import flat_gradient, labeled_noise, trained_network

NOISY = PGD(LinfBall(0.1), 2, start="gaussian")
COUNTS = torch.tensor([6, 6, 6, 6])
STEP = TrainStep(epoch=0, step=4, seed=9)


def test_weights_follow_the_sums_of_the_held_out_means_and_an_arm_for_all_by_hand():
    method, model, batch = WAT(NOISY, beta=2.0, eta=0.5), trained_network(), labeled_noise()
    state = method.objective(model, batch, method.init(COUNTS), STEP).state
    assert torch.equal(method.class_weights(state), torch.ones(4).double())
    model.eval()
    sums = torch.zeros(4).double()
    for epoch in range(2):
        for number, rows in enumerate((slice(0, 10), slice(10, 24))):  # in two batches
            step = TrainStep(epoch, number, seed=9)
            part = type(batch)(*(values[rows] for values in batch))
            state = method.on_validation(model, part, state, step)
            delta = NOISY.maximize_divergence(model, part.x, part.y, step.generator("validation"))
            losses = TradesLoss(2.0)(model(part.x + delta), part.y, model(part.x)).detach()
            sums = sums + torch.zeros(4).double().index_add(0, part.y, losses) / 6
        within = method.state_at(state, epoch)
        assert torch.equal(within["tally"], state["tally"])  # weights stay until the epoch is over
        state = method.state_at(state, epoch + 1)
        scores = [math.exp(0.5 * value) for value in (*sums.tolist(), sums.mean().item())]
        expected = [4 * score / sum(scores) + scores[-1] / sum(scores) for score in scores[:-1]]
        assert method.class_weights(state).tolist() == pytest.approx(expected)
    result = method.objective(model.train(), batch, state, TrainStep(2, 0, seed=9))
    assert result.weights.tolist() == pytest.approx([expected[label] for label in batch.y.tolist()])
    assert torch.allclose(result.loss, (result.weights * result.sample_losses).mean())


def test_a_class_without_held_out_images_has_the_mean_and_one_without_training_images_no_say():
    method = WAT(NOISY, eta=1.0)
    state = method.init(torch.tensor([5, 5, 0]))
    state["tally"] = torch.tensor([[6.0, 0, 0], [2.0, 0, 0]]).double()  # losses, images
    state = method.state_at(state, 1)
    assert state["totals"].tolist() == [3, 3, 3]
    assert method.class_weights(state)[:2].tolist() == pytest.approx([1, 1])


def test_eta_zero_is_trades():
    batch = labeled_noise()
    one, other = trained_network(), trained_network()
    method = WAT(NOISY, eta=0.0)
    state = {**method.init(COUNTS), "totals": torch.tensor([1.0, 2, 3, 4]).double()}
    result = method.objective(one, batch, state, STEP)
    expected = TRADES(NOISY).objective(other, batch, {}, STEP)
    assert torch.allclose(result.loss, expected.loss, rtol=1e-12)
    assert torch.allclose(flat_gradient(result.loss, one), flat_gradient(expected.loss, other), rtol=1e-10)


def test_refusals():
    for settings, message in [
        ({"eta": -1.0}, "eta must be a number from 0 on"),
        ({"beta": -1.0}, "beta"),
        ({"attack": PGD(start="zero")}, "start"),
    ]:
        with pytest.raises(UsageError, match=message):
            WAT(**settings)
    with pytest.raises(UsageError, match=r"init\(images\.counts\(\)\)"):
        WAT().init()
