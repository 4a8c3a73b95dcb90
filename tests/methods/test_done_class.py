"""DONE over classes: the best response by hand, its limits, the gradient against the formula, and its refusals."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from doubly.attacks import PGD
from doubly.bilevel import GradientStep, SignStep
from doubly.errors import UsageError
from doubly.losses import TradesLoss, probability_margin
from doubly.methods import AT, ATBSL, DONE, DONEClass
from doubly.schedules import Constant, Piecewise
from doubly.threat import L2Ball, LinfBall
from doubly.types import Batch, TrainStep
from method_problems import NO_ATTACK, Oracle, predicted
from method_problems import flat_gradient as gradient

ATTACK = PGD(LinfBall(0.2, barrier=1e-2), 3, SignStep(0.05))
COUNTS = torch.tensor([8, 4, 4])
STEP = TrainStep(epoch=1, step=4, progress=0.2, seed=9)
FREE = {"mode": "gradient", "class_cap": None}


def network():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(9, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def samples(shift=0, classes=(0, 1, 0, 2, 0, 1, 0, 2)):
    x = torch.rand(8, 1, 3, 3, generator=torch.Generator().manual_seed(1 + shift)).double()
    return Batch(x, torch.tensor(classes), torch.arange(8))


def objectives(method, steps=3, counts=COUNTS, **batch):
    """Return the weights and gradients of a few steps."""
    model, state, results = network(), method.init(counts), []
    for step in range(steps):
        result = method.objective(model, samples(step, **batch), state, STEP._replace(step=step))
        results.append((result.weights, gradient(result.loss, model)))
        state = result.state
    return results


def assert_equal_steps(one, other, **options):
    for a, b in zip(objectives(one, **options), objectives(other, **options), strict=True):
        for x, y in zip(a, b, strict=True):
            assert torch.allclose(x, y, rtol=1e-6, atol=1e-9)


def test_the_best_response_by_hand():
    """Five images, three mistakes: one of two in class 0, none in class 1, both in class 2; one image is added each."""
    method = DONEClass(NO_ATTACK, class_cap=None, rate=0.1, class_temperature=Constant(0.5))
    batch, state = predicted([1, 0, 1, 0, 1], [0, 0, 1, 2, 2]), method.init(COUNTS)
    first = method.objective(Oracle(), batch, state, STEP)
    assert torch.allclose(first.weights, torch.tensor([2, 2, 4, 4, 4]) / 3)  # p is the prior: balanced AT
    e = [(1 + 0.6) / 3, 0.6 / 2, (2 + 0.6) / 3]
    assert method.class_scores(first.state).tolist() == pytest.approx(e)
    p = [math.exp(score / 0.5) for score in e]
    p = [part / sum(p) for part in p]
    second = method.objective(Oracle(), batch, first.state, STEP)
    assert second.weights.tolist() == pytest.approx([2 * p[0], 2 * p[0], 4 * p[1], 4 * p[2], 4 * p[2]])
    assert second.record["largest_class_probability"].item() == pytest.approx(p[2])
    assert torch.allclose(second.state["images"], torch.tensor([[3.8, 1.9, 3.8], [1.9, 0, 3.8]]).double())
    tight = replace(method, class_cap=1.2)
    assert tight.class_probabilities(first.state, 0.2)[2].item() == pytest.approx(0.4)
    late = replace(method, class_temperature=Piecewise((1e9, 0.5), (0.5,)))
    assert torch.allclose(late.class_probabilities(first.state, 0.2), torch.ones(3).double() / 3)
    assert late.class_probabilities(first.state, 0.6).tolist() == pytest.approx(p)


def test_sampling_draws_by_the_best_response_and_weighs_all_classes_alike():
    weights = DONEClass(NO_ATTACK, rate=0.1, class_temperature=Piecewise((1e9, 0.5), (0.5,)))
    method = replace(weights, action="sampling")
    batch, state = predicted([1, 0, 1, 0, 1], [0, 0, 1, 2, 2]), method.init(COUNTS)
    result = method.objective(Oracle(), batch, state, STEP)
    assert torch.equal(result.weights, torch.ones(5)) and weights.sampling(result.state) is None
    assert torch.allclose(method.sampling(state, 0.6), torch.ones(3).double() / 3)  # nothing is known yet
    assert torch.allclose(method.sampling(result.state, 0.2), torch.ones(3).double() / 3)  # R is infinite
    assert torch.equal(method.sampling(result.state, 0.6), weights.class_probabilities(result.state, 0.6))
    assert_equal_steps(replace(method, attack=ATTACK), AT(ATTACK))


def test_offsets_lead_where_the_weights_lead():
    """Logits that are free at one x: the expected loss over the data is least at softmax(z) = p, with either action."""
    weights = DONEClass(NO_ATTACK, rate=0.1, class_cap=None)
    offsets = replace(weights, action="offsets")
    batch = predicted([1, 0, 1, 0, 1], [0, 0, 1, 2, 2])
    state = weights.objective(Oracle(), batch, weights.init(COUNTS), STEP).state
    p, shares = weights.class_probabilities(state, 0.2), COUNTS.double() / 16
    z = p.log().requires_grad_()
    b = offsets.logit_shift(state, 0.2)
    weighted = (p / shares * shares * -z.log_softmax(0)).sum()
    shifted = (shares * -(z + b).log_softmax(0)).sum()
    for loss in (weighted, shifted):
        assert torch.autograd.grad(loss, z)[0].abs().max() < 1e-12
    assert b.tolist() == pytest.approx((shares / p).log().tolist())
    data = replace(offsets, prior="data")
    assert torch.allclose(data.logit_shift(state, 0.2), -(data.class_probabilities(state, 0.2) / shares).log())
    losses = offsets.objective(Oracle(), batch, state, STEP).sample_losses
    assert torch.allclose(losses, F.cross_entropy(Oracle()(batch.x) + b.float(), batch.y, reduction="none"))


def test_margins_and_priors_of_your_own():
    method, model = DONEClass(ATTACK, score="margin", prior_weights=(1.0, 2.0, 1.0), class_cap=None), network()
    state = method.objective(model, samples(), method.init(COUNTS), STEP).state
    delta = ATTACK(model, samples().x, samples().y, STEP.generator("attack"))
    margins = probability_margin(model(samples().x + delta), samples().y)
    badness = torch.zeros(3).double().index_add(0, samples().y, (1 - margins) / 2)
    e = (badness + badness.sum() / 8) / (torch.tensor([4, 2, 2]) + 1)
    p = torch.tensor([0.25, 0.5, 0.25]).double() * (e / 0.5).exp()
    assert torch.allclose(method.class_probabilities(state, 0.0), p / p.sum())


def test_held_out_images_drive_it_instead_of_the_batches():
    method = DONEClass(NO_ATTACK, driver="holdout", rate=0.1, interval=3)
    batch, state = predicted([1, 0, 1, 0, 1], [0, 0, 1, 2, 2]), method.init(COUNTS)
    assert method.validation_interval == 3 and DONEClass().validation_interval is None
    state = method.objective(Oracle(), batch, state, STEP).state
    assert (state["images"] == 0).all()
    state = method.on_validation(Oracle().eval(), batch, state, STEP)
    assert torch.equal(state["images"], torch.tensor([[2, 1, 2], [1, 0, 2]]).double())
    for step in (STEP._replace(step=7), STEP._replace(step=7)):  # two microbatches of one batch
        state = method.on_validation(Oracle().eval(), batch, state, step)
    assert torch.allclose(state["images"][0], torch.tensor([2, 1, 2]).double() * (2 + 0.9**3))


def test_large_temperatures_are_balanced_at_or_at():
    for mode in ("gradient", "best_response"):
        method = DONEClass(ATTACK, mode=mode, class_temperature=Constant(1e9), class_cap=None)
        for classes in ((0, 1, 0, 2, 0, 1, 0, 2), (0, 0, 0, 0, 0, 1, 1, 2)):  # whatever a batch is made of
            assert_equal_steps(method, AT(ATTACK, balance="loss"), classes=classes)
            assert_equal_steps(replace(method, prior="data"), AT(ATTACK), classes=classes)
    offsets = replace(method, action="offsets")
    assert_equal_steps(offsets, ATBSL(ATTACK))
    assert_equal_steps(replace(offsets, prior="data"), AT(ATTACK))


def test_one_class_or_equal_temperatures_and_the_prior_of_the_data_are_the_paper_s_done():
    for implicit in ("none", "exact"):
        done = DONE(ATTACK, temperature=Constant(0.3), implicit=implicit, eta=0.6)
        method = DONEClass(ATTACK, **FREE, temperature=Constant(0.3), implicit=implicit, eta=0.6)
        equal = replace(method, class_temperature=Constant(0.3), prior="data")
        assert_equal_steps(equal, done)
        assert_equal_steps(method, done, counts=torch.tensor([0, 8, 0]), classes=(1,) * 8)
    exact, none = (objectives(replace(equal, implicit=implicit), 1)[0][1] for implicit in ("exact", "none"))
    assert (exact - none).norm() > 1e-3 * none.norm()


def test_a_small_class_temperature_is_the_mean_of_the_worst_class():
    method, model, batch = DONEClass(ATTACK, **FREE, class_temperature=Constant(1e-4)), network(), samples()
    result = method.objective(model, batch, method.init(COUNTS), STEP)
    delta = ATTACK(model, batch.x, batch.y, STEP.generator("attack"))
    losses = F.cross_entropy(model(batch.x + delta), batch.y, reduction="none")
    worst = max((losses[batch.y == c].mean() for c in range(3)), key=torch.Tensor.item)
    assert torch.allclose(gradient(result.loss, model), gradient(worst, model), rtol=1e-6)


@pytest.mark.parametrize("loss", [None, TradesLoss(2.0), "adjusted"], ids=["ce", "trades", "adjusted"])
def test_the_gradient_is_that_of_f_by_autograd(loss):
    method = DONEClass(ATTACK, mode="gradient", class_temperature=Constant(0.4), temperature=Constant(0.7))
    if isinstance(loss, TradesLoss):
        method = replace(method, loss=loss)
    elif loss:
        method = replace(method, logit_adjustment=1.0)
    model, batch = network(), samples()
    result = method.objective(model, batch, method.init(COUNTS), STEP)
    logits = model(batch.x + ATTACK(model, batch.x, batch.y, STEP.generator("attack")))
    if isinstance(loss, TradesLoss):
        losses = loss(logits, batch.y, model(batch.x))
    else:
        shift = (COUNTS.double() / 16).log() if loss else torch.zeros(3)
        losses = F.cross_entropy(logits + shift, batch.y, reduction="none")
    G = torch.stack([0.7 * (losses[batch.y == c] / 0.7).exp().mean().log() for c in range(3)])
    value = 0.4 * (G / 0.4).exp().mean().log()
    assert torch.allclose(gradient(result.loss, model), gradient(value, model), rtol=1e-9, atol=1e-12)


def test_classes_without_images_have_no_weight_and_many_classes_stay_near_the_prior():
    method = DONEClass(ATTACK)
    state = method.init(torch.tensor([8, 0, 4]))
    assert method.class_probabilities(state, 0.0).tolist() == pytest.approx([0.5, 0, 0.5])
    # A class is missing from a batch, or from the data, or there is one class only.
    for counts, classes in [([8, 4, 4], (0, 1) * 4), ([8, 0, 4], (0, 2) * 4), ([0, 8, 0], (1,) * 8)]:
        for settings in ({"action": "sampling"}, {"action": "offsets"}, {"mode": "gradient"}, {"driver": "holdout"}):
            steps = objectives(DONEClass(ATTACK, **settings), counts=torch.tensor(counts), classes=classes)
            assert all(torch.isfinite(values).all() for step in steps for values in step), (counts, settings)
    method = DONEClass(NO_ATTACK)  # a thousand classes, one image each, half of them misclassified
    state = method.init(torch.ones(1000).long())
    y = torch.arange(1000)
    rows = torch.stack([torch.ones(1000), y, y % 2], 1)
    state = {**state, "images": method._count(state, rows, 1.0)}
    p = 1000 * method.class_probabilities(state, 0.0)
    assert p.min() > 0.5 and p.max() < 2 and p.mean().item() == pytest.approx(1)


def test_refusals():
    for settings, message in [
        ({"class_temperature": Constant(0.0)}, "class_temperature=0.0 is not allowed"),
        ({"class_temperature": Piecewise((1.0, -1.0), (0.5,))}, "class_temperature=-1.0"),
        ({"temperature": Constant(0.0)}, "r=0.0"),
        ({"class_cap": 0.5}, "class_cap=0.5"),
        ({"cap": 0.5}, "cap=0.5"),
        ({"floor": 2.0}, "floor=2.0"),
        ({"eta": 0.0}, "eta=0.0"),
        ({"rate": 0.0}, "rate lies in"),
        ({"interval": 0}, "interval is at least 1"),
        ({"prior_weights": (1.0, -1.0)}, "prior_weights are numbers from 0 on"),
        ({"prior_weights": (0.0, 0.0)}, "not all of them 0"),
        ({"logit_adjustment": 1.0, "loss": TradesLoss()}, "TradesLoss: use CrossEntropy"),
        ({"logit_adjustment": math.nan}, "logit_adjustment is a number"),
        ({"action": "offsets", "loss": TradesLoss()}, "like action offsets for a loss of the attacked"),
        ({"action": "offsets", "mode": "gradient"}, "action offsets needs mode best_response"),
        ({"action": "sampling", "mode": "gradient"}, "action sampling needs mode best_response"),
        ({"action": "sampling", "logit_adjustment": 1.0}, "logit_adjustment 0, since p takes the place"),
        ({"implicit": "exact", "attack": PGD(L2Ball(), rule=GradientStep())}, "use these, or implicit none"),
    ]:
        with pytest.raises(UsageError, match=message):
            DONEClass(**settings)
    with pytest.raises(UsageError, match=r"init\(images\.counts\(\)\)"):
        DONEClass().init()
    with pytest.raises(UsageError, match="prior_weights has 2 numbers for 3 classes"):
        DONEClass(prior_weights=(1.0, 2.0)).init(COUNTS)
    with pytest.raises(UsageError, match="must be above 0 for classes with training images"):
        DONEClass(prior_weights=(1.0, 0.0, 1.0), action="offsets").init(COUNTS)
    with pytest.raises(UsageError, match="without training images"):
        DONEClass(prior_weights=(1.0, 2.0)).init(torch.tensor([4, 0]))
