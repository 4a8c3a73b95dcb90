"""DAFA: class weights from the confusion of one epoch, as radii of the attack and weights of the clean loss."""

import dataclasses

import pytest
import torch

from doubly.attacks import PGD
from doubly.bilevel import SignStep
from doubly.errors import UsageError
from doubly.losses import LogitMargin
from doubly.methods import DAFA, TRADES
from doubly.threat import LinfBall
from doubly.types import TrainStep
from method_problems import flat_gradient
from method_problems import small_network as network
from method_problems import three_classes as samples

ATTACK = PGD(LinfBall(0.1), 3, SignStep(0.05))
COUNTS = torch.tensor([3, 3, 3])
LATE = TrainStep(epoch=2, step=4, progress=0.7, seed=9)


def fixed(weights):
    """Return a state whose class weights are known."""
    state = DAFA(ATTACK).init(COUNTS)
    return {
        **state,
        "weights": torch.tensor(weights, dtype=torch.float64),
        "fixed": torch.tensor(1),
        "epoch": torch.tensor(2),
    }


def test_class_weights_by_hand():
    """Class 0 is weakest, 1 strongest.

    W_0 = 1 + 0.3 * 0.8 + 0.2 * 0.6,  W_1 = 1 - 0.3 * 0.8 - 0.25 * 0.8,  W_2 = 1 - 0.2 * 0.6 + 0.25 * 0.8.
    """
    q = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.8, 0.1], [0.15, 0.25, 0.6]], dtype=torch.float64)
    seen = torch.tensor([True, True, True])
    expected = [1.36, 0.56, 1.08]
    assert DAFA().class_weights(q, seen).tolist() == pytest.approx(expected)
    assert DAFA(strength=0.5).class_weights(q, seen).tolist() == pytest.approx([1 + (w - 1) / 2 for w in expected])
    assert DAFA(strength=3.0, floor=0.2).class_weights(q, seen).tolist() == pytest.approx([2.08, 0.2, 1.24])


def test_classes_of_equal_strength_and_classes_without_images_change_nothing():
    q = torch.tensor([[0.6, 0.4, 0.0], [0.4, 0.6, 0.0], [0.0, 0.0, 0.0]], dtype=torch.float64)
    assert DAFA().class_weights(q, torch.tensor([True, True, False])).tolist() == [1, 1, 1]
    assert DAFA().class_weights(torch.ones(1, 1).double(), torch.tensor([True])).tolist() == [1]


def test_the_loss_weighs_the_clean_loss_alone_by_a_loop_over_samples():
    model, twin, batch, W = network(), network(), samples(7), [1.5, 0.5, 1.25]
    result = DAFA(ATTACK, beta=2.0).objective(model, batch, fixed(W), LATE)
    attack = ATTACK.with_class_factors(torch.tensor(W, dtype=torch.float64))
    delta = attack.maximize_divergence(twin, batch.x, batch.y, LATE.generator("attack"))
    attacked, clean = twin(batch.x + delta), twin(batch.x)
    total = 0.0
    for i, y in enumerate(batch.y.tolist()):
        p, q = clean[i].softmax(0), attacked[i].softmax(0)
        total = total - W[y] * p[y].log() + 2 * sum(p[j] * (p[j].log() - q[j].log()) for j in range(3))
    assert result.loss.item() == pytest.approx(total.item() / 7, rel=1e-10)
    assert torch.allclose(flat_gradient(result.loss, model), flat_gradient(total / 7, twin), rtol=1e-8, atol=1e-12)
    assert result.weights.tolist() == [W[y] for y in batch.y]
    sizes = delta.flatten(1).abs().amax(1)
    assert torch.allclose(
        sizes, 0.1 * torch.tensor(W, dtype=torch.float64)[batch.y]
    )  # far from the images' range: all of it


def test_until_start_and_without_strength_it_is_trades():
    for method, step in ((DAFA(ATTACK), LATE._replace(progress=0.63)), (DAFA(ATTACK, strength=0.0), LATE)):
        state = DAFA(ATTACK).objective(network(), samples(), method.init(COUNTS), TrainStep(1)).state
        model, twin = network(), network()
        result = method.objective(model, samples(), state, step)
        trades = TRADES(ATTACK).objective(twin, samples(), {}, step)
        assert torch.allclose(result.sample_losses, trades.sample_losses)
        slope = flat_gradient(trades.loss, twin)
        assert torch.allclose(flat_gradient(result.loss, model), slope, rtol=1e-9, atol=1e-13)


def test_the_weights_follow_the_last_complete_epoch_before_start_and_stay():
    """Four steps per epoch; start lies in the middle of epoch 2, so W follows epoch 1."""
    method, model, batch = DAFA(ATTACK, start=0.5), network(), samples()
    state, confusion = method.init(COUNTS), torch.zeros(3, 3).double()
    for position in range(12):
        step = TrainStep(position // 4, position % 4, position / 20, seed=4)
        result = method.objective(model, batch, state, step)
        state = result.state
        if step.epoch == 1:
            for q, y in zip(result.logits.softmax(1), batch.y, strict=True):
                confusion[y] += q / 12
        if position < 10:
            assert not state["fixed"] and state["weights"].tolist() == [1, 1, 1]
        model.zero_grad()
        result.loss.backward()
        torch.optim.SGD(model.parameters(), 0.1).step()
    assert torch.allclose(state["weights"], method.class_weights(confusion, COUNTS > 0), rtol=1e-9)
    assert state["fixed"] and state["weights"].std() > 0.01
    later = method.objective(model, batch, state, TrainStep(4, 0, 0.9)).state
    assert torch.equal(later["weights"], state["weights"])


def test_a_start_in_the_first_epoch_waits_for_the_second():
    method = DAFA(ATTACK, start=0.0)
    first = method.objective(network(), samples(), method.init(COUNTS), TrainStep(0, 0, 0.0))
    assert not first.state["fixed"] and first.state["tally"][-1].tolist() == [3, 3, 3]
    assert method.objective(network(), samples(), first.state, TrainStep(1, 0, 0.1)).state["fixed"]


def test_refusals():
    for settings, message in [
        ({"beta": -1.0}, "beta"),
        ({"strength": -1.0}, "strength"),
        ({"strength": float("nan")}, "strength"),
        ({"start": 1.0}, r"\[0, 1\)"),
        ({"start": -0.1}, r"\[0, 1\)"),
        ({"floor": 0.0}, r"\(0, 1\]"),
        ({"attack": dataclasses.replace(ATTACK, start="zero")}, "gaussian or uniform"),
        ({"attack": dataclasses.replace(ATTACK, loss=LogitMargin())}, "loss"),
    ]:
        with pytest.raises(UsageError, match=message):
            DAFA(**settings)
    with pytest.raises(UsageError, match="counts"):
        DAFA().init()
