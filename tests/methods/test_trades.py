import dataclasses
import runpy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from doubly.attacks import PGD
from doubly.bilevel import SignStep
from doubly.distributed import collectives as parallel
from doubly.errors import NonFiniteError, UsageError
from doubly.losses import LogitMargin
from doubly.methods import TRADES, Standard
from doubly.threat import LinfBall
from doubly.types import TrainStep

PROBLEMS = runpy.run_path(str(Path(__file__).parent / "problems.py"))
data, by_batch_statistics = PROBLEMS["plain_noise"], PROBLEMS["by_batch_statistics"]

TRAIN_STEP = TrainStep(epoch=1, step=4, progress=0.2, seed=9)
RADIUS, K, SIZE = 0.1, 4, 0.03


def network():
    """With running statistics that are not those of the batch, so that the modes answer differently."""
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


def gradients(scalar, model):
    return torch.autograd.grad(scalar, list(model.parameters()))


def literal_attack(model, batch, mode="eval"):
    """The dumb twin: p(x) anew in each step."""
    model.train(mode == "train")
    draws = parallel.uniform(batch.x, TRAIN_STEP.generator("attack"))
    lower, upper = (-batch.x).clamp(min=-RADIUS), (1 - batch.x).clamp(max=RADIUS)
    delta = (0.001 * torch.special.ndtri(draws)).clamp(lower, upper)
    for _ in range(K):
        delta.requires_grad_()
        answers = [model(x) if mode == "eval" else by_batch_statistics(model, x) for x in (batch.x, batch.x + delta)]
        (slope,) = torch.autograd.grad(divergence(*answers).sum(), delta)
        delta = (delta.detach() + SIZE * slope.sign()).clamp(lower, upper)
    model.train()
    return delta


@pytest.mark.parametrize("mode", ["eval", "train"])
def test_the_attack_increases_the_divergence_and_may_take_the_clean_answer_once(mode):
    model, batch = network(), data()
    found = attack(attack_mode=mode).diverge(model, batch.x, batch.y, TRAIN_STEP.generator("attack"))
    assert torch.equal(found, literal_attack(network(), batch, mode))
    assert model[2].num_batches_tracked == 0


def test_the_attack_on_the_divergence_does_not_care_for_the_label():
    batch = data()
    one, other = (
        attack().diverge(network(), batch.x, y, TRAIN_STEP.generator("attack")) for y in (batch.y, (batch.y + 1) % 4)
    )
    assert torch.equal(one, other)


def test_trades_is_its_formula_with_a_gradient_through_both_arguments_of_the_divergence():
    model, twin, batch = network(), network(), data()
    found = TRADES(attack(), beta=3.0).objective(model, batch, {}, TRAIN_STEP)
    attacked = twin(batch.x + literal_attack(twin, batch))
    clean = by_batch_statistics(twin, batch.x)
    losses = F.cross_entropy(clean, batch.y, reduction="none") + 3 * divergence(clean, attacked)
    assert torch.allclose(found.sample_losses, losses.detach()) and torch.allclose(found.logits, attacked.detach())
    assert torch.equal(found.weights, torch.ones(8).double()) and found.state == {}
    for a, b in zip(gradients(found.loss, model), gradients(losses.mean(), twin), strict=True):
        assert torch.allclose(a, b, rtol=1e-9, atol=1e-12)


def test_batch_norm_remembers_the_attacked_images_alone():
    model, twin, batch = network(), network(), data()
    TRADES(attack()).objective(model, batch, {}, TRAIN_STEP)
    twin(batch.x + literal_attack(twin, batch))
    assert model[2].num_batches_tracked == 1
    assert torch.equal(model[2].running_mean, twin[2].running_mean)
    assert torch.equal(model[2].running_var, twin[2].running_var)


def test_beta_zero_has_exactly_the_gradient_of_standard_training():
    model, twin, batch = network(), network(), data()
    found = TRADES(attack(), beta=0.0).objective(model, batch, {}, TRAIN_STEP)
    expected = Standard().objective(twin, batch, {}, TRAIN_STEP)
    assert torch.equal(found.sample_losses, expected.sample_losses)
    for a, b in zip(gradients(found.loss, model), gradients(expected.loss, twin), strict=True):
        assert torch.equal(a, b)


def test_large_beta_is_the_gradient_of_the_divergence():
    model, twin, batch = network(), network(), data()
    found = TRADES(attack(), beta=1e9).objective(model, batch, {}, TRAIN_STEP)
    attacked = twin(batch.x + literal_attack(twin, batch))
    expected = divergence(by_batch_statistics(twin, batch.x), attacked).mean()
    for a, b in zip(gradients(found.loss / 1e9, model), gradients(expected, twin), strict=True):
        assert torch.allclose(a, b, rtol=1e-6, atol=1e-8)


def test_an_attack_on_the_cross_entropy_is_another_one():
    batch = data()
    model = network()
    kl, cross_entropy = TRADES(attack()), TRADES(attack(), attack_on="cross_entropy")
    assert not torch.equal(*(m.objective(network(), batch, {}, TRAIN_STEP).logits for m in (kl, cross_entropy)))
    delta = attack()(model, batch.x, batch.y, TRAIN_STEP.generator("attack"))
    found = cross_entropy.objective(network(), batch, {}, TRAIN_STEP)
    assert torch.equal(found.logits, network()(batch.x + delta).detach())


def test_it_costs_one_pass_for_the_clean_answer_of_the_attack_and_one_for_that_of_the_loss():
    seen = []
    for method in (TRADES(attack()), TRADES(attack(), attack_on="cross_entropy")):
        model, modes = network(), []
        model[1].register_forward_hook(lambda module, *_, modes=modes: modes.append(module.training))
        method.objective(model, data(), {}, TRAIN_STEP)
        seen.append((modes.count(False), modes.count(True)))
    assert seen == [(K + 1, 2), (K, 2)]


def test_restarts_keep_the_larger_divergence():
    batch = data()
    once, often = (
        attack(restarts=n, start="uniform").diverge(network(), batch.x, batch.y, TRAIN_STEP.generator("attack"))
        for n in (1, 4)
    )
    model = network().eval()
    one, other = (divergence(model(batch.x), model(batch.x + delta)) for delta in (once, often))
    assert (other >= one).all() and (other > one).any()


def test_by_default_it_is_as_published_but_for_the_radius():
    method = TRADES()
    assert (method.beta, method.attack_on, method.attack.start, method.attack.steps) == (6.0, "kl", "gaussian", 10)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"beta": -1.0}, "from 0 on, got -1"),
        ({"beta": float("nan")}, "from 0 on, got nan"),
        ({"attack": attack(start="zero")}, "no gradient at x itself.*use start gaussian or uniform"),
        ({"attack": attack(loss=LogitMargin())}, "leave the loss out"),
    ],
)
def test_options_that_do_not_fit_are_refused_with_the_fix(options, sentence):
    with pytest.raises(UsageError, match=sentence):
        TRADES(**options)


def test_what_is_refused_for_the_divergence_is_free_for_the_cross_entropy():
    for given in (attack(start="zero"), attack(loss=LogitMargin())):
        method = TRADES(given, attack_on="cross_entropy")
        assert method.objective(network(), data(), {}, TRAIN_STEP).loss.isfinite()
        with pytest.raises(UsageError):
            dataclasses.replace(method, attack_on="kl")
        with pytest.raises(UsageError):
            given.diverge(network(), data().x, data().y, TRAIN_STEP.generator("attack"))


@pytest.mark.parametrize(
    ("spoil", "problem", "sentence"),
    [
        (lambda batch: batch._replace(x=batch.x + 2), UsageError, "lie in"),
        (lambda batch: batch._replace(x=(255 * batch.x).to(torch.uint8)), UsageError, "divide uint8 images"),
    ],
)
def test_images_that_are_none_are_refused_before_the_clean_pass(spoil, problem, sentence):
    with pytest.raises(problem, match=sentence):
        TRADES(attack()).objective(network(), spoil(data()), {}, TRAIN_STEP)


def test_a_model_that_answers_nonsense_is_named():
    class Broken(nn.Module):
        def forward(self, x):
            return x.flatten(1)[:, :4] * float("nan")

    class Tuple(nn.Module):
        def forward(self, x):
            return x.flatten(1)[:, :4], None

    with pytest.raises(NonFiniteError, match="logits"):
        TRADES(attack()).objective(Broken(), data(), {}, TRAIN_STEP)
    with pytest.raises(UsageError, match="tensor of logits, got tuple"):
        TRADES(attack()).objective(Tuple(), data(), {}, TRAIN_STEP)
