"""GAIRAT: kappa as a loop over single samples counts it, and the weights by hand."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from doubly.attacks import PGD
from doubly.bilevel import AdamStep, SignStep
from doubly.errors import UsageError
from doubly.losses import TradesLoss
from doubly.methods import AT, GAIRAT
from doubly.schedules import Constant, Cyclic, Piecewise
from doubly.threat import LinfBall
from doubly.types import Batch, TrainStep
from method_problems import gradients
from method_problems import labeled_noise as data
from method_problems import trained_network as network

K, RADIUS, SIZE = 6, 0.2, 0.05
TRAIN_STEP = TrainStep(epoch=1, step=4, progress=0.7, seed=9)


def attack(steps=K, **values):
    return PGD(LinfBall(RADIUS), steps, **{"rule": SignStep(SIZE), **values})


def omega(kappa, steps=10, shift=-1.0):
    """Return the weight before normalization, as the paper writes it."""
    return (1 + math.tanh(shift + 5 * (1 - 2 * kappa / steps))) / 2


def one_by_one(model, batch, steps=K):
    """Attack each sample alone; return delta, and whether it is classified correctly at x_0 ... x_{K-1}."""
    model.eval()
    draws = TRAIN_STEP.generator("attack").uniform(batch.x)
    deltas, correct = [], []
    for x, label, draw in zip(batch.x, batch.y, draws, strict=True):
        lower, upper = (-x).clamp(min=-RADIUS), (1 - x).clamp(max=RADIUS)
        delta, right = lower + draw * (upper - lower), []
        for _ in range(steps):
            delta = delta.detach().requires_grad_()
            logits = model((x + delta)[None])
            right.append(bool(logits.argmax() == label))
            (slope,) = torch.autograd.grad(F.cross_entropy(logits, label[None]), delta)
            delta = torch.minimum(torch.maximum(delta + SIZE * slope.sign(), lower), upper)
        deltas.append(delta.detach())
        correct.append(right)
    model.train()
    return torch.stack(deltas), correct


class Scripted(nn.Module):
    """Pixel 0.3 + k * SIZE of sample i is right (+) or wrong (-) as scripts[i][k] says; the loss rises with it."""

    def __init__(self, scripts):
        super().__init__()
        self.rival = torch.tensor([[1.0 if sign == "-" else -1.0 for sign in script] for script in scripts])

    def forward(self, x):
        pixel = x.flatten(1)
        place = ((pixel.detach() - 0.3) / SIZE).round().long()
        return torch.cat([torch.zeros_like(pixel), self.rival.gather(1, place) + pixel - pixel.detach()], 1)


def test_kappa_is_what_a_loop_over_samples_counts_in_evaluation_mode():
    model, batch, modes = network(), data(), []
    model.register_forward_hook(lambda module, *_: modes.append(module.training))
    delta, values = GAIRAT(attack()).perturb(model, batch, {}, TRAIN_STEP)
    assert modes == [False] * K
    expected, correct = one_by_one(model, batch)
    kappa = values["kappa"].tolist()
    assert torch.allclose(delta, expected, atol=1e-12)
    assert kappa == [sum(right) for right in correct]
    assert {0, K} <= set(kappa) and len(set(kappa)) > 4  # else the example shows nothing
    adam = GAIRAT(attack(rule=AdamStep(SIZE))).perturb(network(), data(), {}, TRAIN_STEP).values["kappa"]
    assert adam.min() >= 0 and adam.max() <= K and adam.unique().numel() > 3  # steps of any rule can be counted


def test_a_sample_that_recovers_tells_the_count_from_the_least_steps():
    # The last sign is that of x_K, which neither definition looks at.
    scripts = ["++++++-", "-+++++-", "+--+++-", "+++---+", "------+", "+-+-+-+"]
    batch = Batch(torch.full((6, 1, 1, 1), 0.3), torch.zeros(6, dtype=torch.int64))
    for kappa, expected in [("official", [6, 5, 4, 3, 0, 3]), ("paper", [6, 0, 1, 3, 0, 1])]:
        method = GAIRAT(PGD(LinfBall(0.5), K, SignStep(SIZE), "zero"), kappa=kappa)
        assert method.perturb(Scripted(scripts), batch, {}, TRAIN_STEP).values["kappa"].tolist() == expected


def test_the_table_for_ten_steps_and_lambda_minus_one():
    table = [0.9997, 0.9975, 0.9820, 0.8808, 0.5, 0.1192, 0.0180, 0.0025, 3.4e-4, 4.5e-5, 6e-6]
    kappa = torch.arange(11, dtype=torch.float64)
    weights = GAIRAT(attack(10)).log_omega(kappa, 0.7).exp().tolist()
    assert weights == pytest.approx([omega(k) for k in range(11)], rel=1e-9)
    for value, written in zip(weights, table, strict=True):
        assert value == pytest.approx(written, rel=0.03 if written < 0.01 else 1e-3)
    # lambda = 0 moves the table by one step.
    before, after = (GAIRAT(attack(10), shift=Constant(value)).log_omega(kappa, 0.7) for value in (-1.0, 0.0))
    assert torch.allclose(after[1:], before[:-1], atol=1e-12)


def test_the_forms_by_hand():
    kappa = torch.tensor([0.0, 1.0, 2.0, 4.0, 4.0], dtype=torch.float64)
    forms = {
        "tanh": lambda k: (1 + math.tanh(0.3 + 5 * (1 - 2 * k / 4))) / 2,
        "sigmoid": lambda k: 1 / (1 + math.exp(-0.3 - 5 * (1 - 2 * k / 4))),
        "discrete": lambda k: (4 + 1 - k) / (4 + 1),
    }
    for form, by_hand in forms.items():
        raw = [by_hand(k) for k in kappa.tolist()]
        weights = GAIRAT(attack(4), form=form, shift=Constant(0.3)).weights(kappa, 0.7).tolist()
        assert weights == pytest.approx([value / (sum(raw) / 5) for value in raw], rel=1e-9)
    for options in ({"half": "paper"}, {"form": "discrete"}):  # one step is enough without rounding
        weights = GAIRAT(attack(1), **options).weights(torch.tensor([0.0, 1.0]), 0.7)
        assert weights[0] > weights[1] > 0


def test_an_odd_number_of_steps_is_halved_down_or_exactly():
    kappa = torch.arange(6, dtype=torch.float64)
    for half, value in [("official", 2), ("paper", 2.5)]:
        expected = [(1 + math.tanh(-1 + 5 * (1 - k / value))) / 2 for k in range(6)]
        assert GAIRAT(attack(5), half=half).log_omega(kappa, 0.7).exp().tolist() == pytest.approx(expected, rel=1e-9)
    official, paper = (GAIRAT(attack(4), half=half).log_omega(kappa, 0.7) for half in ("official", "paper"))
    assert torch.equal(official, paper)


def test_an_infinite_lambda_and_the_burn_in_are_at_exactly():
    cases = [
        *(
            (GAIRAT(attack(), form=f, shift=Constant(s)), 0.7, True)
            for f in ("tanh", "sigmoid")
            for s in (math.inf, 1e6)
        ),
        *((GAIRAT(attack(), burn_in=0.3), progress, progress < 0.3) for progress in (0.0, 0.299, 0.3, 0.9)),
    ]
    for method, progress, is_at in cases:
        models, step = (network(), network()), TRAIN_STEP._replace(progress=progress)
        result, at = (m.objective(net, data(), {}, step) for m, net in zip((method, AT(attack())), models, strict=True))
        pairs = zip(gradients(result.loss, models[0]), gradients(at.loss, models[1]), strict=True)
        assert torch.equal(result.weights, torch.ones(24)) == is_at
        assert torch.equal(result.sample_losses, at.sample_losses)
        assert all(torch.equal(a, b) for a, b in pairs) == is_at


def test_the_objective_is_the_weighted_mean_with_weights_that_are_constants():
    model, twin, batch = network(), network(), data()
    delta, correct = one_by_one(twin, batch)
    raw = torch.tensor([omega(sum(right), K) for right in correct], dtype=torch.float64)
    weights = raw / raw.mean()
    losses = F.cross_entropy(twin(batch.x + delta), batch.y, reduction="none")
    result = GAIRAT(attack()).objective(model, batch, {}, TRAIN_STEP)
    assert torch.allclose(result.weights, weights, atol=1e-10) and weights.max() > 2 * weights.min()
    assert torch.allclose(result.sample_losses, losses.detach(), atol=1e-10)
    expected = gradients((weights * losses).sum() / len(weights), twin)
    for a, b in zip(gradients(result.loss, model), expected, strict=True):
        assert torch.allclose(a, b, atol=1e-10)
    assert result.record["kappa"].shape == ()
    assert result.record["kappa"].item() == pytest.approx(sum(map(sum, correct)) / len(correct))


def test_lambda_follows_its_schedule():
    method = GAIRAT(attack(10), shift=Piecewise((0.0, -2.0), (0.75,)))
    kappa = torch.tensor([2.0, 8.0], dtype=torch.float64)
    for progress, shift in [(0.5, 0.0), (0.74, 0.0), (0.75, -2.0)]:
        weights = method.weights(kappa, progress)
        assert (weights[1] / weights[0]).item() == pytest.approx(omega(8, 10, shift) / omega(2, 10, shift), rel=1e-6)


def test_weights_have_mean_one_however_small_omega_is():
    for dtype in (torch.float32, torch.float64):
        kappa = torch.tensor([10.0, 9.0, 9.0, 10.0], dtype=dtype)
        for shift in (-1000.0, -30.0, 0.0, 30.0):
            weights = GAIRAT(attack(10), shift=Constant(shift)).weights(kappa, 0.7)
            assert weights.dtype is dtype and weights.isfinite().all()
            assert weights.mean().item() == pytest.approx(1, rel=1e-6)
            if shift < -20:  # there omega is exp(2 lambda + 10 - 2 kappa) up to a factor
                assert (weights[1] / weights[0]).item() == pytest.approx(math.exp(2), rel=1e-4)


def test_refusals():
    two_stages = Piecewise((0.0, -1.0), (0.5,))
    for settings, message in [
        *(({"burn_in": value}, r"share of training in \[0, 1\)") for value in (-0.1, 1.0, 60.0, math.nan)),
        ({"shift": two_stages, "burn_in": 0.5}, r"burn_in 0\.5 covers the first stage"),
        ({"shift": Constant(-math.inf)}, r"lambda\) must be a number"),
        ({"shift": Constant(math.nan)}, r"lambda\) must be a number"),
        ({"shift": Piecewise((0.0, math.nan), (0.999,))}, r"lambda\) must be a number"),
        ({"attack": attack(steps=1)}, "restarts 1 and steps >= 2"),
        ({"attack": attack(steps=0), "half": "paper"}, "restarts 1 and steps >= 1"),
        ({"attack": attack(steps=0), "form": "discrete"}, "restarts 1 and steps >= 1"),
        ({"attack": attack(restarts=2)}, "restarts 1 and steps >= 2"),
        ({"loss": TradesLoss()}, "GAIRAT knows one set of logits"),
    ]:
        with pytest.raises(UsageError, match=message):
            GAIRAT(**settings)
    assert GAIRAT(shift=two_stages, burn_in=0.4).shift is two_stages
    assert GAIRAT(shift=Cyclic()).shift.at(0.4) == 0.2
