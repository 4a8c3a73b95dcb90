"""FRL: two weighted means, and multipliers that follow the errors of each class."""

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from doubly.attacks import PGD
from doubly.bilevel import SignStep
from doubly.errors import UsageError
from doubly.losses import LogitMargin
from doubly.methods import FRL, TRADES
from doubly.methods.frl import class_weights
from doubly.threat import LinfBall
from doubly.types import Batch, TrainStep
from method_problems import gradients

ATTACK = PGD(LinfBall(0.1), 3, SignStep(0.05))
TRAIN_STEP = TrainStep(epoch=1, step=4, progress=0.2, seed=9)


def network():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = [nn.Flatten(), nn.Linear(16, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 3)]
        return nn.Sequential(*layers).double().train()


def samples(count=9):
    x = torch.rand(count, 1, 4, 4, generator=torch.Generator().manual_seed(1)).double()
    return Batch(x, torch.arange(count) % 3, torch.arange(count))


def passes(model, batch, attack=ATTACK, step=TRAIN_STEP):
    """Return the logits of the attacked and of the clean images, in training mode."""
    delta = attack.maximize_divergence(model, batch.x, batch.y, step.generator("attack"))
    return model(batch.x + delta), model(batch.x)


def state_with(clean, boundary, tally=None, epoch=1):
    rows = torch.tensor([clean, boundary]).double()
    tally = torch.zeros(3, rows.shape[1]) if tally is None else torch.tensor(tally)
    return {"multipliers": rows, "tally": tally.double(), "epoch": torch.tensor(epoch)}


def test_the_loss_is_two_weighted_means_each_over_its_weights():
    """By a loop over samples; a = (1/3 + 0.3 - 0.1, 1/3 - 0.1, ...), b from the boundary's multipliers."""
    model, twin, batch = network(), network(), samples(7)
    result = FRL(ATTACK).objective(model, batch, state_with([0.3, 0.0, 0.0], [0.0, 0.1, 0.35]), TRAIN_STEP)
    attacked, clean = passes(twin, batch)
    a = [1 / 3 + 0.3 - 0.1, 1 / 3 - 0.1, 1 / 3 - 0.1]
    b = [1 / 3 - 0.15, 1 / 3 + 0.1 - 0.15, 1 / 3 + 0.35 - 0.15]
    sums = torch.zeros(4).double()
    for i, y in enumerate(batch.y.tolist()):
        p, q = clean[i].softmax(0), attacked[i].softmax(0)
        kl = sum(p[j] * (p[j].log() - q[j].log()) for j in range(3))
        sums = sums + torch.stack([-a[y] * p[y].log(), torch.tensor(a[y]), b[y] * kl, torch.tensor(b[y])])
    expected = sums[0] / sums[1] + 1.5 * sums[2] / sums[3]
    assert result.loss.item() == pytest.approx(expected.item(), rel=1e-6)
    for one, other in zip(gradients(result.loss, model), gradients(expected, twin), strict=True):
        assert torch.allclose(one, other, rtol=1e-5, atol=1e-7)


def test_without_multipliers_it_is_trades():
    """With rate 0, or in a first epoch."""
    for method in (FRL(ATTACK, beta=6.0, rate=0.0), FRL(ATTACK, beta=6.0)):
        model, twin = network(), network()
        first = method.objective(network(), samples(), {}, TRAIN_STEP._replace(epoch=0))
        state = first.state if method.rate == 0 else {}
        result = method.objective(model, samples(), state, TRAIN_STEP)
        trades = TRADES(ATTACK, 6.0).objective(twin, samples(), {}, TRAIN_STEP)
        assert torch.allclose(result.weights, torch.ones(9).double())
        single = method.objective(network().float(), samples()._replace(x=samples().x.float()), state, TRAIN_STEP)
        assert torch.equal(single.weights, torch.ones(9))
        assert torch.allclose(result.sample_losses, trades.sample_losses)
        assert result.loss.item() == pytest.approx(trades.loss.item(), rel=1e-12)
        for one, other in zip(gradients(result.loss, model), gradients(trades.loss, twin), strict=True):
            assert torch.allclose(one, other, rtol=1e-9, atol=1e-13)


def test_without_boundary_term_it_is_class_weighted_training_on_clean_images():
    model, twin, batch = network(), network(), samples()
    result = FRL(ATTACK, beta=0.0).objective(model, batch, state_with([0.3, 0.0, 0.0], [0.0, 0.1, 0.35]), TRAIN_STEP)
    weights = torch.tensor([1 / 3 + 0.2, 1 / 3 - 0.1, 1 / 3 - 0.1]).double()
    expected = F.cross_entropy(twin(batch.x), batch.y, weight=weights)  # torch's is the weighted mean too
    for one, other in zip(gradients(result.loss, model), gradients(expected, twin), strict=True):
        assert torch.allclose(one, other, rtol=1e-6, atol=1e-8)
    assert torch.allclose(result.weights, weights[batch.y] / weights.mean(), rtol=1e-6)


def test_class_weights_of_ten_classes_are_the_released_formula():
    multipliers = torch.rand(2, 10, generator=torch.Generator().manual_seed(0)).double() / 20
    expected = [
        [0.1 + 0.9 * row[i] - 0.1 * sum(row[j] for j in range(10) if j != i) for i in range(10)] for row in multipliers
    ]
    assert torch.allclose(class_weights(multipliers), torch.tensor(expected).double(), rtol=1e-6)


def test_the_attack_is_on_the_divergence():
    batch, inputs = samples(), []
    model = network()
    model.register_forward_hook(lambda module, args, out: inputs.append((module.training, args[0].detach())))
    FRL(ATTACK).objective(model, batch, {}, TRAIN_STEP)
    delta = ATTACK.maximize_divergence(network(), batch.x, batch.y, TRAIN_STEP.generator("attack"))
    trained = [x for training, x in inputs if training]
    assert len(trained) == 2 and torch.equal(trained[0], batch.x + delta) and torch.equal(trained[1], batch.x)
    assert not torch.equal(trained[0], batch.x + ATTACK(network(), batch.x, batch.y, TRAIN_STEP.generator("attack")))


def test_multipliers_follow_the_errors_by_hand():
    """Clean errors 0.5, 0.1, 0: mean 0.2. Boundary errors 0.1, 0.4, 0.1: mean 0.2, and twice the rate."""
    method = FRL(rate=0.1, tolerance=0.05, limit=0.9)
    tally = torch.tensor([[10, 10, 20], [5, 1, 0], [1, 4, 2]]).double()
    clean, boundary = method.updated_multipliers(torch.tensor([[0.0, 0.2, 0.01], [0.3, 0.0, 0.0]]).double(), tally)
    assert clean.tolist() == pytest.approx([0.1 * 0.25, 0.2 - 0.1 * 0.15, 0.0], rel=1e-6)
    assert boundary.tolist() == pytest.approx([0.3 - 0.2 * 0.15, 0.2 * 0.15, 0.0], rel=1e-6)


def test_multipliers_of_one_kind_sum_to_the_limit_at_most():
    method = FRL(rate=0.0, limit=0.5)
    tally = torch.tensor([[10, 10, 20], [5, 1, 0], [1, 4, 2]]).double()
    clean, boundary = method.updated_multipliers(torch.tensor([[0.6, 0.0, 0.2], [0.1, 0.2, 0.1]]).double(), tally)
    assert clean.tolist() == pytest.approx([0.375, 0, 0.125])  # in proportion
    assert boundary.tolist() == pytest.approx([0.1, 0.2, 0.1], rel=1e-6)  # by itself, and below it
    assert class_weights(torch.stack([clean, boundary])).min() >= (1 - 0.5) / 3


def test_a_class_that_was_not_seen_keeps_its_multiplier_and_is_no_part_of_the_mean():
    method = FRL(rate=0.1, tolerance=0.0, limit=0.9)
    tally = torch.tensor([[10, 0, 10], [5, 0, 1], [0, 0, 0]]).double()
    clean, _ = method.updated_multipliers(torch.tensor([[0.1, 0.1, 0.1], [0.0, 0.0, 0.0]]).double(), tally)
    assert clean.tolist() == pytest.approx([0.1 + 0.1 * 0.2, 0.1, 0.1 - 0.1 * 0.2], rel=1e-6)
    nothing = torch.zeros(3, 3).double()
    multipliers = torch.tensor([[0.1, 0.2, 0.0], [0.0, 0.0, 0.3]]).double()
    assert torch.equal(FRL().updated_multipliers(multipliers, nothing), multipliers)


def test_the_errors_of_an_epoch_are_counted_and_move_the_multipliers_when_the_next_begins():
    method, model, state, batch = FRL(ATTACK, rate=0.5, tolerance=0.0), network(), {}, samples()
    images, clean_wrong, boundary_wrong = [0] * 3, [0] * 3, [0] * 3
    for step in range(3):
        train_step = TrainStep(0, step, seed=4)
        twin = network()
        twin.load_state_dict(model.state_dict())
        attacked, clean = passes(twin, batch, step=train_step)
        for i, y in enumerate(batch.y.tolist()):
            right = clean[i].argmax().item() == y
            images[y] += 1
            clean_wrong[y] += not right
            boundary_wrong[y] += right and attacked[i].argmax().item() != y
        result = method.objective(model, batch, state, train_step)
        state = result.state
        assert torch.equal(state["multipliers"], torch.zeros(2, 3).double())
        model.zero_grad()
        result.loss.backward()
        torch.optim.SGD(model.parameters(), 0.3).step()
    assert state["tally"].tolist() == [images, clean_wrong, boundary_wrong] and sum(boundary_wrong) > 0
    state = method.objective(model, batch, state, TrainStep(1, 0, seed=4)).state
    expected = []
    for wrong, rate in ((clean_wrong, 0.5), (boundary_wrong, 1.0)):
        errors = [w / n for w, n in zip(wrong, images, strict=True)]
        raw = [max(0.0, rate * (e - sum(errors) / 3)) for e in errors]
        expected.append([value * min(1.0, 0.5 / max(sum(raw), 1e-9)) for value in raw])
    assert state["multipliers"].flatten().tolist() == pytest.approx([v for row in expected for v in row], rel=1e-6)
    assert state["multipliers"].sum() > 0 and state["tally"][0].tolist() == [3, 3, 3]  # the new epoch's alone
    later = method.objective(model, batch, state, TrainStep(1, 1, seed=4)).state
    assert torch.equal(later["multipliers"], state["multipliers"]) and later["tally"][0].tolist() == [6, 6, 6]


def test_remargin_widens_the_radius_of_classes_with_a_large_boundary_error():
    """Boundary errors 0.1, 0.4, 0.1: mean 0.2, so that the logarithms change by 0.5 * (-0.15, 0.15, -0.15)."""
    method = FRL(ATTACK, rate=0.0, tolerance=0.05, remargin=0.5)
    tally, batch = [[10, 10, 20], [5, 1, 0], [1, 4, 2]], samples()
    state = {**state_with([0.0] * 3, [0.0] * 3, tally), "log_factors": torch.tensor([0.0, 0.1, 0.0]).double()}
    for epoch, log_factors in ((1, [0.0, 0.1, 0.0]), (2, [math.log(0.98), 0.1 + 0.5 * 0.15, math.log(0.98)])):
        step = TrainStep(epoch, 0, seed=4)
        delta = method.perturb(network(), batch, state, step).delta
        factors = torch.tensor(log_factors).double().exp()
        expected = ATTACK.with_class_factors(factors).maximize_divergence(
            network(), batch.x, batch.y, step.generator("attack")
        )
        assert torch.allclose(delta, expected) and (delta.abs().amax((1, 2, 3)) <= 0.1 * factors[batch.y] + 1e-9).all()
        assert (delta[batch.y == 1].abs().max() > 0.1).item()
        after = method.objective(network(), batch, state, step).state
        assert after["log_factors"].tolist() == pytest.approx(log_factors, abs=1e-7)
    state["log_factors"] += 5.0
    assert method.objective(network(), batch, state, step).state["log_factors"].tolist() == [math.log(3.0)] * 3
    start = method.objective(network(), batch, {}, step).state
    assert start["log_factors"].tolist() == [0.0] * 3 and "log_factors" not in FRL(ATTACK).state_at(
        {}, batch.x[0, 0], 0
    )


def test_batch_norm_remembers_the_attacked_images_alone():
    model, twin = network(), network()
    FRL(ATTACK).objective(model, samples(), {}, TRAIN_STEP)
    delta = ATTACK.maximize_divergence(twin, samples().x, samples().y, TRAIN_STEP.generator("attack"))
    twin(samples().x + delta)
    assert torch.equal(model[2].running_mean, twin[2].running_mean) and model[2].num_batches_tracked == 1


def test_refusals():
    for settings, message in [
        ({"beta": -1.0}, "beta=-1"),
        ({"rate": -0.1}, "rate=-0.1"),
        ({"tolerance": float("nan")}, "tolerance=nan"),
        ({"limit": 1.0}, r"\[0, 1\)"),
        ({"attack": dataclasses.replace(ATTACK, start="zero")}, "gaussian or uniform"),
        ({"attack": dataclasses.replace(ATTACK, loss=LogitMargin())}, "loss"),
    ]:
        with pytest.raises(UsageError, match=message):
            FRL(**settings)
