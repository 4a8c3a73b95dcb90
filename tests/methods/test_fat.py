"""FAT: samples stop where a loop over single samples would stop."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from doubly.attacks import PGD
from doubly.bilevel import AdamStep, BarrierStep, GradientStep, MomentumStep, NormalizedStep, SignStep
from doubly.errors import UsageError
from doubly.losses import LogitMargin, TradesLoss
from doubly.methods import AT, FAT
from doubly.schedules import Constant, Cyclic, Piecewise
from doubly.threat import L2Ball, LinfBall
from doubly.types import Batch, TrainStep
from method_problems import gradients
from method_problems import labeled_noise as data
from method_problems import trained_network as network

K, RADIUS, SIZE = 6, 0.2, 0.05
TRAIN_STEP = TrainStep(epoch=1, step=4, progress=0.2, seed=9)


def attack(**values):
    return PGD(**{"threat": LinfBall(RADIUS), "steps": K, "rule": SignStep(SIZE), **values})


def stopped(method, model, batch, step=TRAIN_STEP):
    """Return delta and the number of steps of each sample."""
    delta, values = method.perturb(model, batch, {}, step)
    return delta, values["steps"]


def one_by_one(model, batch, tau, steps=K):
    """Attack each sample alone, in a loop that is left once the sample is fooled and has no budget."""
    model.eval()
    draws = TRAIN_STEP.generator("attack").uniform(batch.x)
    deltas, counts = [], []
    for x, label, draw in zip(batch.x, batch.y, draws, strict=True):
        lower, upper = (-x).clamp(min=-RADIUS), (1 - x).clamp(max=RADIUS)
        delta, budget, count = lower + draw * (upper - lower), tau, 0
        for _ in range(steps):
            delta = delta.detach().requires_grad_()
            logits = model((x + delta)[None])
            if logits.argmax() != label:
                if budget == 0:
                    break
                budget -= 1
            (slope,) = torch.autograd.grad(F.cross_entropy(logits, label[None]), delta)
            delta = torch.minimum(torch.maximum(delta + SIZE * slope.sign(), lower), upper)
            count += 1
        deltas.append(delta.detach())
        counts.append(count)
    model.train()
    return torch.stack(deltas), torch.tensor(counts)


def test_all_samples_in_one_batch_stop_where_each_alone_would():
    model, batch = network(), data()
    for tau in range(K + 1):
        delta, steps = stopped(FAT(attack(), tau=Constant(tau)), model, batch)
        expected, counts = one_by_one(model, batch, tau)
        assert torch.equal(steps, counts)
        assert torch.allclose(delta, expected, atol=1e-12)
        if tau < 3:  # else the example shows nothing
            assert {tau, K} <= set(counts.tolist()) and len(set(counts.tolist())) > 3


class Scripted(nn.Module):
    """Pixel 0.3 + k * SIZE of sample i is right (+) or wrong (-) as scripts[i][k] says; the loss rises with it.

    The other pixel, i / 10, tells which sample it is.
    """

    def __init__(self, scripts):
        super().__init__()
        self.rival = torch.tensor([[1.0 if sign == "-" else -1.0 for sign in script] for script in scripts])

    def forward(self, x):
        pixel, sample = x.flatten(1)[:, :1], (10 * x.detach()[:, 0, 0, 1]).round().long()
        place = ((pixel.detach() - 0.3) / SIZE).round().long()
        return torch.cat([torch.zeros_like(pixel), self.rival[sample].gather(1, place) + pixel - pixel.detach()], 1)


def test_a_sample_that_recovers_keeps_the_rest_of_its_budget():
    scripts = ["--++++-", "+-+--+-", "+++--+-", "++++++-", "+-+++-+"]
    x = torch.stack([torch.full((5,), 0.3), torch.arange(5) / 10], 1).view(5, 1, 1, 2)
    batch = Batch(x, torch.zeros(5, dtype=torch.int64))
    for tau, expected in enumerate([[0, 1, 3, 6, 1], [1, 3, 4, 6, 5], [6, 4, 6, 6, 6], [6, 6, 6, 6, 6]]):
        method = FAT(attack(threat=LinfBall(0.5), start="zero"), tau=Constant(tau))
        delta, steps = stopped(method, Scripted(scripts), batch)
        assert steps.tolist() == expected
        assert delta[..., 0].flatten().tolist() == pytest.approx([SIZE * count for count in expected], abs=1e-6)
        assert delta[..., 1].abs().max() == 0


def test_a_stopped_sample_stays_so_whatever_a_random_model_returns_next():
    class Fickle(nn.Module):
        calls = 0

        def forward(self, x):
            self.calls += 1
            pixel = x.flatten(1)
            return torch.cat([torch.zeros_like(pixel), pixel + (9 if self.calls == 2 else -9)], 1)

    batch = Batch(torch.full((2, 1, 1, 1), 0.3), torch.tensor([0, 1]))  # + - + + … and - + - - …
    delta, steps = stopped(FAT(attack(threat=LinfBall(0.5), start="zero"), tau=Constant(0)), Fickle(), batch)
    assert steps.tolist() == [1, 0]
    assert delta.flatten().tolist() == pytest.approx([SIZE, 0.0])


def test_a_stopped_sample_was_fooled_exactly_tau_plus_one_times():
    for tau in (0, 1, 2):
        model, batch, passes = network(), data(), []
        model.register_forward_hook(lambda module, args, out, p=passes: p.append((args[0].detach(), out.argmax(1))))
        delta, steps = stopped(FAT(attack(), tau=Constant(tau)), model, batch)
        fooled = torch.zeros(len(steps), dtype=torch.int64)
        for step, (points, predictions) in enumerate(passes):
            rows = (steps >= step).nonzero().flatten()  # those that still move, and those that stop here
            assert len(points) == len(rows) and (len(rows) < len(steps) or step <= tau)
            wrong = predictions != batch.y[rows]
            fooled[rows] += wrong.long()
            stops = steps[rows] == step
            assert wrong[stops].all() and (fooled[rows][stops] == tau + 1).all()
            assert torch.allclose(points[stops], (batch.x + delta)[rows][stops], atol=1e-12)
        assert len(passes) == K and (fooled[steps == K] <= tau).all()


def test_without_budget_a_start_that_fools_is_kept():
    model, batch = network(), data()
    delta, steps = stopped(FAT(attack(start="zero"), tau=Constant(0.0)), model, batch)
    wrong = model.eval()(batch.x).argmax(1) != batch.y
    assert wrong.any() and not wrong.all()
    assert torch.equal(steps == 0, wrong)
    assert torch.equal(delta.flatten(1).abs().sum(1) == 0, wrong)


def test_a_budget_of_k_is_at_exactly_and_one_less_is_not():
    models, batch = (network(), network()), data()
    fat = FAT(attack(), tau=Constant(float(K))).objective(models[0], batch, {}, TRAIN_STEP)
    at = AT(attack()).objective(models[1], batch, {}, TRAIN_STEP)
    assert torch.equal(fat.sample_losses, at.sample_losses) and torch.equal(fat.loss, at.loss)
    for a, b in zip(gradients(fat.loss, models[0]), gradients(at.loss, models[1]), strict=True):
        assert torch.equal(a, b)
    assert fat.record["backpropagations"] == K
    less = FAT(attack(), tau=Constant(float(K - 1))).objective(network(), data(), {}, TRAIN_STEP)
    assert not torch.equal(less.sample_losses, at.sample_losses)
    assert FAT(attack()).costliest() == FAT(attack(), tau=Constant(float(K)))


def test_the_objective_is_the_plain_mean_loss_at_the_stopped_images():
    model, twin, batch = network(), network(), data()
    delta, steps = one_by_one(model, batch, 1)
    losses = F.cross_entropy(model(batch.x + delta), batch.y, reduction="none")
    result = FAT(attack(), tau=Constant(1.0)).objective(twin, batch, {}, TRAIN_STEP)
    assert torch.allclose(result.sample_losses, losses.detach(), atol=1e-10)
    assert torch.equal(result.weights, torch.ones_like(losses))
    for a, b in zip(gradients(result.loss, twin), gradients(losses.mean(), model), strict=True):
        assert torch.allclose(a, b, atol=1e-10)
    assert result.record["backpropagations"].item() == pytest.approx(steps.double().mean().item())
    assert result.record["backpropagations"].shape == () and 0 < result.record["backpropagations"] < K


def test_the_budget_follows_its_schedule():
    method = FAT(attack(), tau=Piecewise((0.0, 2.0), (0.5,)))
    expected = {tau: one_by_one(network(), data(), tau)[1] for tau in (0, 2)}
    for progress, tau in [(0.0, 0), (0.49, 0), (0.5, 2), (0.99, 2)]:
        _, steps = stopped(method, network(), data(), TRAIN_STEP._replace(progress=progress))
        assert torch.equal(steps, expected[tau])
    default = FAT().tau  # it grows at epochs 50 and 90 of 120
    assert [default.at((epoch + 0.5) / 120) for epoch in (0, 49, 50, 89, 90, 119)] == [0, 0, 1, 1, 2, 2]


def test_samples_keep_their_order():
    batch = data()
    order = torch.randperm(len(batch.y), generator=torch.Generator().manual_seed(0))
    method = FAT(attack(start="zero"), tau=Constant(1.0))
    (delta, steps), (mixed, mixed_steps) = (
        stopped(method, network(), samples) for samples in (batch, Batch(*(part[order] for part in batch)))
    )
    assert torch.allclose(delta[order], mixed, atol=1e-12) and torch.equal(steps[order], mixed_steps)
    assert len(set(steps.tolist())) > 3


def test_a_sample_that_leaves_the_batch_is_where_it_would_be_had_it_stayed():
    class AllSamples(PGD):
        """All samples go through all passes, and those that have stopped have a gradient of 0."""

        def maximize(self, model, x, y, generator, value, active=None):
            return super().maximize(model, x, y, generator, value)

    batch, model = data(), network()
    for rule in (SignStep(SIZE), GradientStep(0.3), NormalizedStep(0.2)):
        for threat in (LinfBall(RADIUS), L2Ball(0.8)):
            for tau in (0, 2):
                results = [
                    stopped(FAT(kind(threat, K, rule), tau=Constant(tau)), model, batch) for kind in (PGD, AllSamples)
                ]
                (delta, steps), (expected, counts) = results
                assert (steps < K).any() and (steps > 0).any() and torch.equal(steps, counts)
                assert torch.allclose(delta, expected, atol=1e-12)


def test_a_pass_gets_smaller_as_samples_stop_and_none_follows_the_last():
    model, batch, rows = network(), data(), []
    model.register_forward_hook(lambda module, args, logits: rows.append(len(logits)))
    _, steps = stopped(FAT(attack(), tau=Constant(0.0)), model, batch)
    assert rows == [int((steps >= step).sum()) for step in range(K)] and rows[0] > rows[-1]
    with torch.no_grad():
        predictions = model.eval()(batch.x).argmax(1)
    rows.clear()
    stopped(FAT(attack(start="zero"), tau=Constant(0.0)), model, batch._replace(y=(predictions + 1) % 2))
    assert rows == [len(predictions)]


def test_the_attack_loss_and_the_loss_are_free():
    model, batch = network(), data()
    method = FAT(attack(loss=LogitMargin()), LogitMargin(), Constant(1.0))
    delta, _ = stopped(method, model, batch)
    assert not torch.allclose(delta, stopped(FAT(attack(), tau=Constant(1.0)), model, batch)[0])
    expected = LogitMargin()(network()(batch.x + delta), batch.y).detach()
    assert torch.allclose(method.objective(network(), batch, {}, TRAIN_STEP).sample_losses, expected, atol=1e-10)


def test_refusals():
    budgets = (-1.0, 0.5, 7.0, math.nan)
    schedules = [*map(Constant, budgets), Piecewise((0.0, 7.0), (0.999,)), Cyclic(2.0)]
    for settings, message in [
        *(({"attack": attack(), "tau": tau}, "whole number from 0 to the attack's 6 steps") for tau in schedules),
        *(
            ({"attack": attack(rule=rule)}, f"SignStep.*got {type(rule).__name__}")
            for rule in (AdamStep(), MomentumStep(), BarrierStep())
        ),
        ({"attack": attack(restarts=2)}, r"restarts 1.*attack_mode eval"),
        ({"attack": attack(attack_mode="train")}, r"restarts 1.*attack_mode eval"),
        ({"loss": TradesLoss()}, "FAT knows one set of logits"),
    ]:
        with pytest.raises(UsageError, match=message):
            FAT(**settings)
