import math
import runpy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from doubly.attacks import PGD
from doubly.bilevel import AdamStep, BarrierStep, GradientStep, MomentumStep, NormalizedStep, SignStep
from doubly.distributed import collectives as parallel
from doubly.errors import UsageError
from doubly.losses import LogitMargin, TradesLoss
from doubly.methods import AT, FAT
from doubly.schedules import Constant, Cyclic, Piecewise
from doubly.threat import L2Ball, LinfBall
from doubly.types import Batch, TrainStep

PROBLEMS = runpy.run_path(str(Path(__file__).parent / "problems.py"))
network, data = PROBLEMS["knowing_network"], PROBLEMS["labeled_noise"]

K, RADIUS, SIZE = 6, 0.2, 0.05
TRAIN_STEP = TrainStep(epoch=1, step=4, progress=0.2, seed=9)


def attack(**values):
    return PGD(**{"threat": LinfBall(RADIUS), "steps": K, "rule": SignStep(SIZE), **values})


def gradients(found, model):
    return torch.autograd.grad(found.loss, list(model.parameters()))


def one_by_one(model, batch, tau, steps=K):
    """The dumb twin: each sample alone, in a loop that is left once the sample is fooled and has no budget."""
    model.eval()
    draws = parallel.uniform(batch.x, TRAIN_STEP.generator("attack"))
    deltas, taken = [], []
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
        taken.append(count)
    model.train()
    return torch.stack(deltas), torch.tensor(taken)


@pytest.mark.parametrize("tau", range(K + 1))
def test_all_samples_at_once_stop_where_each_alone_would(tau):
    model, batch = network(), data()
    delta, taken = FAT(attack(), tau=Constant(tau)).stopped(model, batch, TRAIN_STEP)
    expected, counts = one_by_one(model, batch, tau)
    assert torch.equal(taken, counts)
    assert torch.allclose(delta, expected, atol=1e-12)
    if tau < 3:  # else the example shows nothing
        assert {tau, K} <= set(counts.tolist()) and len(set(counts.tolist())) > 3


class Scripted(nn.Module):
    """Pixel 0.3 + k * SIZE of sample i is right (+) or wrong (-) as scripts[i][k] says; the loss rises with it.

    The other pixel, i / 10, says which sample it is.
    """

    def __init__(self, scripts):
        super().__init__()
        self.rival = torch.tensor([[1.0 if sign == "-" else -1.0 for sign in script] for script in scripts])

    def forward(self, x):
        pixel, which = x.flatten(1)[:, :1], (10 * x.detach()[:, 0, 0, 1]).round().long()
        place = ((pixel.detach() - 0.3) / SIZE).round().long()
        return torch.cat([torch.zeros_like(pixel), self.rival[which].gather(1, place) + pixel - pixel.detach()], 1)


@pytest.mark.parametrize(
    ("tau", "expected"), [(0, [0, 1, 3, 6, 1]), (1, [1, 3, 4, 6, 5]), (2, [6, 4, 6, 6, 6]), (3, [6, 6, 6, 6, 6])]
)
def test_a_sample_that_recovers_keeps_the_rest_of_its_budget(tau, expected):
    scripts = ["--++++-", "+-+--+-", "+++--+-", "++++++-", "+-+++-+"]
    x = torch.stack([torch.full((5,), 0.3), torch.arange(5) / 10], 1).view(5, 1, 1, 2)
    batch = Batch(x, torch.zeros(5, dtype=torch.int64))
    method = FAT(attack(threat=LinfBall(0.5), start="zero"), tau=Constant(tau))
    delta, taken = method.stopped(Scripted(scripts), batch, TRAIN_STEP)
    assert taken.tolist() == expected
    assert delta[..., 0].flatten().tolist() == pytest.approx([SIZE * count for count in expected], abs=1e-6)
    assert delta[..., 1].abs().max() == 0


def test_a_stopped_sample_stays_so_whatever_a_random_model_answers_next():
    class Fickle(nn.Module):
        calls = 0

        def forward(self, x):
            self.calls += 1
            pixel = x.flatten(1)
            return torch.cat([torch.zeros_like(pixel), pixel + (9 if self.calls == 2 else -9)], 1)

    batch = Batch(torch.full((2, 1, 1, 1), 0.3), torch.tensor([0, 1]))  # + - + + … and - + - - …
    delta, taken = FAT(attack(threat=LinfBall(0.5), start="zero"), tau=Constant(0)).stopped(Fickle(), batch, TRAIN_STEP)
    assert taken.tolist() == [1, 0]
    assert delta.flatten().tolist() == pytest.approx([SIZE, 0.0])


@pytest.mark.parametrize("tau", [0, 1, 2])
def test_a_stopped_sample_was_fooled_exactly_tau_plus_one_times(tau):
    model, batch = network(), data()
    seen = []
    model.register_forward_hook(lambda module, given, logits: seen.append((given[0].detach(), logits.argmax(1))))
    delta, taken = FAT(attack(), tau=Constant(tau)).stopped(model, batch, TRAIN_STEP)
    fooled = torch.zeros(len(taken), dtype=torch.int64)
    for step, (points, labels) in enumerate(seen):
        rows = (taken >= step).nonzero().flatten()  # who still moves, and who stops here
        assert len(points) == len(rows) and (len(rows) < len(taken) or step <= tau)
        wrong = labels != batch.y[rows]
        fooled[rows] += wrong.long()
        stops = taken[rows] == step
        assert wrong[stops].all() and (fooled[rows][stops] == tau + 1).all()
        assert torch.allclose(points[stops], (batch.x + delta)[rows][stops], atol=1e-12)
    assert len(seen) == K and (fooled[taken == K] <= tau).all()


def test_without_budget_a_start_that_fools_is_kept():
    model, batch = network(), data()
    method = FAT(attack(start="zero"), tau=Constant(0.0))
    delta, taken = method.stopped(model, batch, TRAIN_STEP)
    wrong = model.eval()(batch.x).argmax(1) != batch.y
    assert wrong.any() and not wrong.all()
    assert torch.equal(taken == 0, wrong)
    assert torch.equal(delta.flatten(1).abs().sum(1) == 0, wrong)


def test_a_budget_of_k_is_at_exactly():
    models, batch = (network(), network()), data()
    fat = FAT(attack(), tau=Constant(float(K))).objective(models[0], batch, {}, TRAIN_STEP)
    at = AT(attack()).objective(models[1], batch, {}, TRAIN_STEP)
    assert torch.equal(fat.sample_losses, at.sample_losses) and torch.equal(fat.loss, at.loss)
    for a, b in zip(gradients(fat, models[0]), gradients(at, models[1]), strict=True):
        assert torch.equal(a, b)
    assert fat.record["backpropagations"] == K


def test_a_budget_of_k_minus_one_is_not_at():
    found = FAT(attack(), tau=Constant(float(K - 1))).objective(network(), data(), {}, TRAIN_STEP)
    assert not torch.equal(found.sample_losses, AT(attack()).objective(network(), data(), {}, TRAIN_STEP).sample_losses)


def test_the_objective_is_the_plain_mean_loss_at_the_stopped_images():
    model, batch = network(), data()
    delta, taken = one_by_one(model, batch, 1)
    losses = F.cross_entropy(model(batch.x + delta), batch.y, reduction="none")
    expected = torch.autograd.grad(losses.mean(), list(model.parameters()))
    twin = network()
    found = FAT(attack(), tau=Constant(1.0)).objective(twin, batch, {}, TRAIN_STEP)
    assert torch.allclose(found.sample_losses, losses.detach(), atol=1e-10)
    assert torch.equal(found.weights, torch.ones_like(losses))
    for a, b in zip(gradients(found, twin), expected, strict=True):
        assert torch.allclose(a, b, atol=1e-10)
    assert found.record["backpropagations"].item() == pytest.approx(taken.double().mean().item())
    assert found.record["backpropagations"].shape == () and 0 < found.record["backpropagations"] < K


def test_the_budget_follows_its_schedule():
    method = FAT(attack(), tau=Piecewise((0.0, 2.0), (0.5,)))
    for progress, tau in [(0.0, 0), (0.49, 0), (0.5, 2), (0.99, 2)]:
        _, taken = method.stopped(network(), data(), TRAIN_STEP._replace(progress=progress))
        assert torch.equal(taken, one_by_one(network(), data(), tau)[1])


def test_by_default_the_budget_grows_at_epochs_50_and_90_of_120():
    tau = FAT().tau
    assert [tau.at((epoch + 0.5) / 120) for epoch in (0, 49, 50, 89, 90, 119)] == [0, 0, 1, 1, 2, 2]


def test_samples_keep_their_order():
    batch = data()
    order = torch.randperm(len(batch.y), generator=torch.Generator().manual_seed(0))
    method = FAT(attack(start="zero"), tau=Constant(1.0))
    (delta, taken), (mixed, mixed_taken) = (
        method.stopped(network(), one, TRAIN_STEP) for one in (batch, Batch(*(part[order] for part in batch)))
    )
    assert torch.allclose(delta[order], mixed, atol=1e-12) and torch.equal(taken[order], mixed_taken)
    assert len(set(taken.tolist())) > 3


@pytest.mark.parametrize("rule", [SignStep(SIZE), GradientStep(0.3), NormalizedStep(0.2)])
@pytest.mark.parametrize("threat", [LinfBall(RADIUS), L2Ball(0.8)])
@pytest.mark.parametrize("tau", [0, 2])
def test_who_leaves_the_batch_is_where_it_would_be_had_it_stayed(tau, rule, threat):
    class Whole(PGD):
        """All samples go through all passes, and those that have stopped have a gradient of 0."""

        def search(self, model, x, y, generator, value, moving=None):
            return super().search(model, x, y, generator, value)

    batch, chosen = data(), attack(rule=rule, threat=threat)
    delta, taken = FAT(chosen, tau=Constant(tau)).stopped(network(), batch, TRAIN_STEP)
    whole = Whole(chosen.threat, chosen.steps, chosen.rule)
    expected, counts = FAT(whole, tau=Constant(tau)).stopped(network(), batch, TRAIN_STEP)
    assert (taken < K).any() and (taken > 0).any() and torch.equal(taken, counts)
    assert torch.allclose(delta, expected, atol=1e-12)


def test_a_pass_gets_smaller_as_samples_stop_and_none_follows_the_last():
    model, batch, rows = network(), data(), []
    model.register_forward_hook(lambda module, given, logits: rows.append(len(logits)))
    _, taken = FAT(attack(), tau=Constant(0.0)).stopped(model, batch, TRAIN_STEP)
    assert rows == [int((taken >= step).sum()) for step in range(K)] and rows[0] > rows[-1]
    rows.clear()
    with torch.no_grad():
        guessed = model.eval()(batch.x).argmax(1)
    rows.clear()
    FAT(attack(start="zero"), tau=Constant(0.0)).stopped(model, batch._replace(y=(guessed + 1) % 2), TRAIN_STEP)
    assert rows == [len(guessed)]


def test_the_attack_loss_and_the_loss_are_free():
    model, batch = network(), data()
    method = FAT(attack(loss=LogitMargin()), LogitMargin(), Constant(1.0))
    delta, _ = method.stopped(model, batch, TRAIN_STEP)
    assert not torch.allclose(delta, FAT(attack(), tau=Constant(1.0)).stopped(model, batch, TRAIN_STEP)[0])
    expected = LogitMargin()(network()(batch.x + delta), batch.y).detach()
    assert torch.allclose(method.objective(network(), batch, {}, TRAIN_STEP).sample_losses, expected, atol=1e-10)


@pytest.mark.parametrize(
    "tau",
    [Constant(-1.0), Constant(0.5), Constant(7.0), Constant(math.nan), Piecewise((0.0, 7.0), (0.999,)), Cyclic(2.0)],
)
def test_a_budget_that_is_no_whole_number_of_steps_is_refused(tau):
    with pytest.raises(UsageError, match="whole number from 0 to the attack's 6 steps"):
        FAT(attack(), tau=tau)


@pytest.mark.parametrize("rule", [AdamStep(), MomentumStep(), BarrierStep()])
def test_a_rule_that_moves_without_gradient_is_refused(rule):
    with pytest.raises(UsageError, match=f"SignStep.*got {type(rule).__name__}"):
        FAT(attack(rule=rule))


@pytest.mark.parametrize("values", [{"restarts": 2}, {"attack_mode": "train"}])
def test_restarts_and_batch_statistics_are_refused(values):
    with pytest.raises(UsageError, match=r"restarts 1.*attack_mode eval"):
        FAT(attack(**values))


def test_a_loss_that_needs_clean_logits_is_refused():
    with pytest.raises(UsageError, match="FAT knows one set of logits"):
        FAT(loss=TradesLoss())
