import math
import runpy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from doubly.attacks import PGD
from doubly.bilevel import AdamStep, SignStep
from doubly.distributed import collectives as parallel
from doubly.errors import UsageError
from doubly.losses import TradesLoss
from doubly.methods import AT, GAIRAT
from doubly.schedules import Constant, Cyclic, Piecewise
from doubly.threat import LinfBall
from doubly.types import Batch, TrainStep

PROBLEMS = runpy.run_path(str(Path(__file__).parent / "problems.py"))
network, data = PROBLEMS["knowing_network"], PROBLEMS["labeled_noise"]

K, RADIUS, SIZE = 6, 0.2, 0.05
TRAIN_STEP = TrainStep(epoch=1, step=4, progress=0.7, seed=9)


def attack(steps=K, **values):
    return PGD(LinfBall(RADIUS), steps, **{"rule": SignStep(SIZE), **values})


def gradients(scalar, model):
    return torch.autograd.grad(scalar, list(model.parameters()))


def omega(kappa, steps=10, shift=-1.0):
    """The formula as it is written in the paper."""
    return (1 + math.tanh(shift + 5 * (1 - 2 * kappa / steps))) / 2


def one_by_one(model, batch, steps=K):
    """The dumb twin: each sample attacked alone, its predictions at x_0 ... x_{K-1} kept."""
    model.eval()
    draws = parallel.uniform(batch.x, TRAIN_STEP.generator("attack"))
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


def test_kappa_is_what_a_loop_over_samples_counts():
    model, batch = network(), data()
    delta, kappa = GAIRAT(attack()).counted(model, batch, TRAIN_STEP.generator("attack"))
    expected, correct = one_by_one(model, batch)
    assert torch.allclose(delta, expected, atol=1e-12)
    assert kappa.tolist() == [sum(right) for right in correct]
    assert {0, K} <= set(kappa.tolist()) and len(set(kappa.tolist())) > 4  # else the example shows nothing


@pytest.mark.parametrize(("kappa", "expected"), [("official", [6, 5, 4, 3, 0, 3]), ("paper", [6, 0, 1, 3, 0, 1])])
def test_a_sample_that_recovers_tells_the_count_from_the_least_steps(kappa, expected):
    # The last sign is that of x_K, which neither definition looks at.
    scripts = ["++++++-", "-+++++-", "+--+++-", "+++---+", "------+", "+-+-+-+"]
    batch = Batch(torch.full((6, 1, 1, 1), 0.3), torch.zeros(6, dtype=torch.int64))
    method = GAIRAT(PGD(LinfBall(0.5), K, SignStep(SIZE), "zero"), kappa=kappa)
    assert method.counted(Scripted(scripts), batch, TRAIN_STEP.generator("attack"))[1].tolist() == expected


def test_kappa_is_counted_in_evaluation_mode():
    model, modes = network(), []
    model.register_forward_hook(lambda module, *_: modes.append(module.training))
    GAIRAT(attack()).objective(model, data(), {}, TRAIN_STEP)
    assert modes == [False] * K + [True]


def test_the_table_for_ten_steps_and_lambda_minus_one():
    table = [0.9997, 0.9975, 0.9820, 0.8808, 0.5, 0.1192, 0.0180, 0.0025, 3.4e-4, 4.5e-5, 6e-6]
    kappa = torch.arange(11, dtype=torch.float64)
    found = GAIRAT(attack(10)).log_omega(kappa, 0.7).exp().tolist()
    assert found == pytest.approx([omega(k) for k in range(11)], rel=1e-9)
    for value, written in zip(found, table, strict=True):
        assert value == pytest.approx(written, rel=0.03 if written < 0.01 else 1e-3)


def test_lambda_zero_moves_the_table_by_one_step():
    kappa = torch.arange(11, dtype=torch.float64)
    before, after = (GAIRAT(attack(10), shift=Constant(value)).log_omega(kappa, 0.7) for value in (-1.0, 0.0))
    assert torch.allclose(after[1:], before[:-1], atol=1e-12)


@pytest.mark.parametrize("form", ["tanh", "sigmoid", "discrete"])
def test_the_forms_by_hand(form):
    def by_hand(kappa):
        argument = 0.3 + 5 * (1 - 2 * kappa / 4)
        values = {"tanh": (1 + math.tanh(argument)) / 2, "sigmoid": 1 / (1 + math.exp(-argument))}
        return {**values, "discrete": (4 + 1 - kappa) / (4 + 1)}[form]

    method = GAIRAT(attack(4), form=form, shift=Constant(0.3))
    kappa = torch.tensor([0.0, 1.0, 2.0, 4.0, 4.0], dtype=torch.float64)
    raw = [by_hand(k) for k in kappa.tolist()]
    expected = [value / (sum(raw) / 5) for value in raw]
    assert method.weights(kappa, 0.7).tolist() == pytest.approx(expected, rel=1e-9)


def test_an_odd_number_of_steps_is_halved_down_or_exactly():
    kappa = torch.arange(6, dtype=torch.float64)
    for half, value in [("official", 2), ("paper", 2.5)]:
        expected = [(1 + math.tanh(-1 + 5 * (1 - k / value))) / 2 for k in range(6)]
        assert GAIRAT(attack(5), half=half).log_omega(kappa, 0.7).exp().tolist() == pytest.approx(expected, rel=1e-9)
    official, paper = (GAIRAT(attack(4), half=half).log_omega(kappa, 0.7) for half in ("official", "paper"))
    assert torch.equal(official, paper)


@pytest.mark.parametrize("form", ["tanh", "sigmoid"])
@pytest.mark.parametrize("shift", [math.inf, 1e6])
def test_an_infinite_lambda_is_at_exactly(form, shift):
    models = network(), network()
    found = GAIRAT(attack(), form=form, shift=Constant(shift)).objective(models[0], data(), {}, TRAIN_STEP)
    at = AT(attack()).objective(models[1], data(), {}, TRAIN_STEP)
    assert torch.equal(found.weights, torch.ones(24)) and torch.equal(found.sample_losses, at.sample_losses)
    for a, b in zip(gradients(found.loss, models[0]), gradients(at.loss, models[1]), strict=True):
        assert torch.equal(a, b)


def test_the_burn_in_is_at_exactly_and_ends_at_its_share():
    method = GAIRAT(attack(), burn_in=0.3)
    for progress, plain in [(0.0, True), (0.299, True), (0.3, False), (0.9, False)]:
        models, moment = (network(), network()), TRAIN_STEP._replace(progress=progress)
        found = method.objective(models[0], data(), {}, moment)
        at = AT(attack()).objective(models[1], data(), {}, moment)
        pairs = zip(gradients(found.loss, models[0]), gradients(at.loss, models[1]), strict=True)
        assert torch.equal(found.weights, torch.ones(24)) == plain
        assert all(torch.equal(a, b) for a, b in pairs) == plain


def test_the_objective_is_the_weighted_mean_with_weights_that_are_constants():
    model, twin, batch = network(), network(), data()
    delta, correct = one_by_one(twin, batch)
    raw = torch.tensor([omega(sum(right), K) for right in correct], dtype=torch.float64)
    weights = raw / raw.mean()
    losses = F.cross_entropy(twin(batch.x + delta), batch.y, reduction="none")
    found = GAIRAT(attack()).objective(model, batch, {}, TRAIN_STEP)
    assert torch.allclose(found.weights, weights, atol=1e-10) and weights.max() > 2 * weights.min()
    assert torch.allclose(found.sample_losses, losses.detach(), atol=1e-10)
    expected = gradients((weights * losses).sum() / len(weights), twin)
    for a, b in zip(gradients(found.loss, model), expected, strict=True):
        assert torch.allclose(a, b, atol=1e-10)
    assert not found.weights.requires_grad
    assert found.record["kappa"].shape == ()
    assert found.record["kappa"].item() == pytest.approx(sum(map(sum, correct)) / len(correct))


def test_lambda_follows_its_schedule():
    method = GAIRAT(attack(10), shift=Piecewise((0.0, -2.0), (0.75,)))
    kappa = torch.tensor([2.0, 8.0], dtype=torch.float64)
    for progress, shift in [(0.5, 0.0), (0.74, 0.0), (0.75, -2.0)]:
        found = method.weights(kappa, progress)
        assert (found[1] / found[0]).item() == pytest.approx(omega(8, 10, shift) / omega(2, 10, shift), rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shift", [-1000.0, -30.0, 0.0, 30.0])
def test_weights_have_mean_one_however_small_omega_is(shift, dtype):
    kappa = torch.tensor([10.0, 9.0, 9.0, 10.0], dtype=dtype)
    found = GAIRAT(attack(10), shift=Constant(shift)).weights(kappa, 0.7)
    assert found.dtype is dtype and found.isfinite().all() and found.mean().item() == pytest.approx(1, rel=1e-6)
    if shift < -20:  # there omega is exp(2 lambda + 10 - 2 kappa) up to a factor
        assert (found[1] / found[0]).item() == pytest.approx(math.exp(2), rel=1e-4)


def test_two_processes_weigh_as_one(monkeypatch):
    method, kappa = GAIRAT(attack()), torch.tensor([0.0, 1, 2, 6, 5, 4])
    whole = method.weights(kappa, 0.7)
    monkeypatch.setattr(
        "doubly.distributed.collectives.gather", lambda values: method.log_omega(kappa, 0.7)
    )  # of both ranks
    halves = [method.weights(part, 0.7) for part in kappa.chunk(2)]
    assert torch.allclose(torch.cat(halves), whole) and halves[0].mean() > 1.5 > 0.5 > halves[1].mean()


def test_any_step_rule_can_be_counted():
    method = GAIRAT(attack(rule=AdamStep(SIZE)))
    kappa = method.counted(network(), data(), TRAIN_STEP.generator("attack"))[1]
    assert kappa.min() >= 0 and kappa.max() <= K and kappa.unique().numel() > 3


@pytest.mark.parametrize("burn_in", [-0.1, 1.0, 60.0, math.nan])
def test_a_burn_in_that_is_no_share_of_training_is_refused(burn_in):
    with pytest.raises(UsageError, match=r"share of training in \[0, 1\)"):
        GAIRAT(burn_in=burn_in)


def test_a_stage_of_lambda_that_the_burn_in_covers_is_refused():
    shift = Piecewise((0.0, -1.0), (0.5,))
    with pytest.raises(UsageError, match=r"burn_in 0\.5 covers the first stage"):
        GAIRAT(shift=shift, burn_in=0.5)
    assert GAIRAT(shift=shift, burn_in=0.4).shift is shift


@pytest.mark.parametrize("shift", [Constant(-math.inf), Constant(math.nan), Piecewise((0.0, math.nan), (0.999,))])
def test_a_lambda_without_weights_is_refused(shift):
    with pytest.raises(UsageError, match=r"lambda\) must be a number"):
        GAIRAT(shift=shift)
    assert GAIRAT(shift=Cyclic()).shift.at(0.4) == 0.2


@pytest.mark.parametrize(
    ("values", "options", "least"),
    [
        ({"steps": 1}, {}, 2),
        ({"steps": 0}, {"half": "paper"}, 1),
        ({"steps": 0}, {"form": "discrete"}, 1),
        ({"restarts": 2}, {}, 2),
    ],
)
def test_an_attack_whose_steps_cannot_be_counted_is_refused(values, options, least):
    with pytest.raises(UsageError, match=f"restarts 1 and steps >= {least}"):
        GAIRAT(attack(**values), **options)


def test_one_step_is_enough_without_rounding():
    for options in ({"half": "paper"}, {"form": "discrete"}):
        found = GAIRAT(attack(1), **options).weights(torch.tensor([0.0, 1.0]), 0.7)
        assert found[0] > found[1] > 0


def test_a_loss_that_needs_clean_logits_is_refused():
    with pytest.raises(UsageError, match="GAIRAT knows one set of logits"):
        GAIRAT(loss=TradesLoss())
