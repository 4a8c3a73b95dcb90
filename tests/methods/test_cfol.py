"""CFOL: the adversary that learns which classes to draw, by hand."""

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from doubly.attacks import PGD
from doubly.bilevel import SignStep
from doubly.data import Images
from doubly.data.loader import batches
from doubly.errors import UsageError
from doubly.losses import TradesLoss
from doubly.methods import AT, CFOL
from doubly.threat import LinfBall
from doubly.types import Batch, TrainStep
from method_problems import NO_ATTACK, Oracle, gradients, predicted

ATTACK = PGD(LinfBall(0.1), 3, SignStep(0.05))
TRAIN_STEP = TrainStep(epoch=1, step=4, progress=0.2, seed=9)


def network():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(16, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 3)).train()


def samples(count=9):
    x = torch.rand(count, 1, 4, 4, generator=torch.Generator().manual_seed(1))
    return Batch(x, torch.arange(count) % 3, torch.arange(count))


def test_p_is_a_uniform_share_and_a_softmax_of_the_scores_by_hand():
    p = CFOL(gamma=0.4).probabilities(torch.tensor([0.0, math.log(2), math.log(5)]).double(), torch.tensor([9, 9, 9]))
    assert p.tolist() == pytest.approx([0.4 / 3 + 0.6 / 8, 0.4 / 3 + 0.6 * 2 / 8, 0.4 / 3 + 0.6 * 5 / 8], rel=1e-7)
    method = CFOL(gamma=0.5)  # a class without images has no probability
    state = method.init(torch.tensor([5, 0, 3]))
    assert method.sampling(state).tolist() == pytest.approx([0.5, 0, 0.5])
    state["scores"][2] = math.log(3)
    assert method.sampling(state).tolist() == pytest.approx([0.25 + 0.125, 0, 0.25 + 0.375])


def test_scores_rise_by_the_inverse_probability_of_each_mistake_by_hand():
    """Five images, three mistakes: one of class 0, two of class 2. At first p = 1/3."""
    batch = predicted([1, 0, 1, 0, 1], [0, 0, 1, 2, 2])
    method = CFOL(NO_ATTACK, eta=0.1)
    first = method.objective(Oracle(), batch, method.init(torch.tensor([4, 4, 4])), TRAIN_STEP)
    assert first.state["scores"].tolist() == pytest.approx([0.1 * 3, 0, 0.1 * 6])
    # Within an epoch the classes are still drawn as they were at its beginning ...
    second = method.objective(Oracle(), batch, first.state, TRAIN_STEP._replace(step=5))
    assert second.state["scores"].tolist() == pytest.approx([0.6, 0, 1.2])
    # ... and in the next by the p that the loader was given.
    e = [math.exp(w) for w in (0.6, 0, 1.2)]
    p = [0.5 / 3 + 0.5 * part / sum(e) for part in e]
    assert method.sampling(second.state).tolist() == pytest.approx(p)
    third = method.objective(Oracle(), batch, second.state, TRAIN_STEP._replace(epoch=2, step=0))
    assert third.state["scores"].tolist() == pytest.approx([0.6 + 0.1 / p[0], 0, 1.2 + 0.1 * 2 / p[2]])
    assert third.record["largest_class_probability"].item() == pytest.approx(max(p))
    fourth = method.objective(Oracle(), batch, third.state, TRAIN_STEP._replace(epoch=2, step=1))
    assert fourth.state["scores"].tolist() == pytest.approx([0.6 + 0.2 / p[0], 0, 1.2 + 0.2 * 2 / p[2]])


def test_in_reweighting_a_class_is_drawn_by_its_share_of_the_images():
    batch = predicted([1, 0, 1, 0, 1], [0, 0, 1, 2, 2])
    method = CFOL(NO_ATTACK, mode="reweighting", eta=0.1)
    result = method.objective(Oracle(), batch, method.init(torch.tensor([5, 3, 2])), TRAIN_STEP)
    assert result.state["scores"].tolist() == pytest.approx([0.1 * 10 / 5, 0, 0.1 * 2 * 10 / 2])
    assert method.sampling(result.state) is None
    released = dataclasses.replace(method, draw="classes")  # each class as often, whatever its images
    result = released.objective(Oracle(), batch, released.init(torch.tensor([5, 3, 2])), TRAIN_STEP)
    assert result.state["scores"].tolist() == pytest.approx([0.1 * 3, 0, 0.1 * 2 * 3])
    assert released.sampling(released.init(torch.tensor([5, 0, 2]))).tolist() == [0.5, 0, 0.5]


def test_an_epoch_raises_each_score_by_eta_n_times_the_error_of_the_class_in_either_mode():
    """What 1 / q is for: the loader's draws, whatever they favor, estimate the same error of each class."""
    errors = torch.tensor([0.1, 0.5, 0.9])
    y = torch.repeat_interleave(torch.arange(3), torch.tensor([3000, 2000, 1000]))
    rank = torch.cat([torch.arange(n) / n for n in (3000, 2000, 1000)])
    predictions = torch.where(rank < errors[y], (y + 1) % 3, y)
    images = Images.of((predictions / 10).view(-1, 1, 1, 1), y)
    for mode, draw in (("sampling", "images"), ("reweighting", "images"), ("reweighting", "classes")):
        method = CFOL(NO_ATTACK, mode=mode, draw=draw, eta=0.25 / 6000)
        state = method.init(images.counts())
        state["scores"] = torch.tensor([2.0, 0.0, 0.0]).double()
        for epoch in (1, 2):
            before = state["scores"]
            for step, batch in enumerate(batches(images, 500, 0, epoch, probabilities=method.sampling(state))):
                state = method.objective(Oracle(), batch, state, TrainStep(epoch, step)).state
            assert torch.allclose(state["scores"] - before, 0.25 * errors.double(), rtol=0.15)


def test_the_loss_is_weighted_by_c_p_y_in_reweighting_and_not_in_sampling():
    scores = torch.tensor([0.0, 1.0, 2.0]).double()
    p = 0.5 / 3 + 0.5 * torch.softmax(scores, 0)
    for mode, weights in (("sampling", torch.ones(9)), ("reweighting", (3 * p).float()[samples().y])):
        method, model, twin = CFOL(ATTACK, mode=mode), network(), network()
        state = {**method.init(torch.tensor([4, 4, 4])), "scores": scores}
        result = method.objective(model, samples(), state, TRAIN_STEP)
        delta = ATTACK(twin, samples().x, samples().y, TRAIN_STEP.generator("attack"))
        losses = F.cross_entropy(twin(samples().x + delta), samples().y, reduction="none")
        assert torch.allclose(result.weights, weights) and torch.allclose(result.sample_losses, losses)
        for a, b in zip(gradients(result.loss, model), gradients((weights * losses).mean(), twin), strict=True):
            assert torch.allclose(a, b, rtol=1e-5, atol=1e-7)


def test_gamma_one_is_at_whatever_the_adversary_has_learned():
    for mode in ("sampling", "reweighting"):
        method, model, twin = CFOL(ATTACK, mode=mode, gamma=1.0, eta=1.0), network(), network()
        state = {**method.init(torch.tensor([6, 4, 2])), "scores": torch.tensor([0.0, 50.0, 2.0]).double()}
        result, at = (
            m.objective(net, samples(), state, TRAIN_STEP) for m, net in ((method, model), (AT(ATTACK), twin))
        )
        assert torch.equal(result.loss, at.loss)
        pairs = zip(gradients(result.loss, model), gradients(at.loss, twin), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)
        if mode == "sampling":  # and the classes are drawn as balanced AT draws them
            assert torch.allclose(method.sampling(result.state), torch.full((3,), 1 / 3).double())


def test_eta_zero_leaves_the_adversary_at_the_uniform_distribution():
    method = CFOL(ATTACK, eta=0.0)
    state = method.init(torch.tensor([6, 4, 2]))
    for epoch in range(3):
        state = method.objective(network(), samples(), state, TrainStep(epoch)).state
    assert torch.allclose(method.sampling(state), torch.full((3,), 1 / 3).double())


def test_refusals():
    with pytest.raises(UsageError, match=r"init\(images\.counts\(\)\)"):
        CFOL().init()
    for settings, message in [
        ({"draw": "classes"}, "is for mode reweighting"),
        ({"gamma": 0.0}, r"\(0, 1\]"),
        ({"gamma": 1.5}, r"\(0, 1\]"),
        ({"eta": -1.0}, "eta"),
        ({"eta": math.inf}, "eta"),
        ({"loss": TradesLoss()}, "clean"),
    ]:
        with pytest.raises(UsageError, match=message):
            CFOL(**settings)
