import math
import runpy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from doubly import parallel
from doubly.attacks import PGD
from doubly.bilevel import AdamStep, BarrierStep, GradientStep, MomentumStep, NormalisedStep, SignStep
from doubly.errors import UsageError
from doubly.losses import LogitMargin, TradesLoss
from doubly.methods import AT, FAT
from doubly.schedules import Constant, Cyclic, Piecewise
from doubly.threat import L2Ball, LinfBall
from doubly.types import Batch, Moment

PROBLEMS = runpy.run_path(str(Path(__file__).parent / "problems.py"))
network, data = PROBLEMS["knowing_network"], PROBLEMS["labelled_noise"]

K, RADIUS, SIZE = 6, 0.2, 0.05
MOMENT = Moment(epoch=1, step=4, progress=0.2, seed=9)


def attack(**values):
    return PGD(**{"threat": LinfBall(RADIUS), "steps": K, "rule": SignStep(SIZE), **values})


def gradients(found, model):
    return torch.autograd.grad(found.scalar, list(model.parameters()))


def one_by_one(model, batch, tau, steps=K):
    """The dumb twin: each sample alone, in a loop that is left once the sample is fooled and has no budget."""
    model.eval()
    draws = parallel.uniform(batch.x, MOMENT.generator("attack"))
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
    delta, taken = FAT(attack(), tau=Constant(tau)).stopped(model, batch, MOMENT)
    expected, counts = one_by_one(model, batch, tau)
    assert torch.equal(taken, counts)
    assert torch.allclose(delta, expected, atol=1e-12)
    if tau < 3:  # else the example shows nothing
        assert {tau, K} <= set(counts.tolist()) and len(set(counts.tolist())) > 3


class Scripted(nn.Module):
    """Pixel 0.3 + k * SIZE of sample i is right (+) or wrong (-) as scripts[i][k] says; the loss rises with it."""

    def __init__(self, scripts):
        super().__init__()
        self.rival = torch.tensor([[1.0 if sign == "-" else -1.0 for sign in script] for script in scripts])

    def forward(self, x):
        pixel = x.flatten(1)
        place = ((pixel.detach() - 0.3) / SIZE).round().long()
        return torch.cat([torch.zeros_like(pixel), self.rival.gather(1, place) + pixel - pixel.detach()], 1)


@pytest.mark.parametrize(
    ("tau", "expected"), [(0, [0, 1, 3, 6, 1]), (1, [1, 3, 4, 6, 5]), (2, [6, 4, 6, 6, 6]), (3, [6, 6, 6, 6, 6])]
)
def test_a_sample_that_recovers_keeps_the_rest_of_its_budget(tau, expected):
    scripts = ["--++++-", "+-+--+-", "+++--+-", "++++++-", "+-+++-+"]
    x = torch.full((5, 1, 1, 1), 0.3)
    batch = Batch(x, torch.zeros(5, dtype=torch.int64))
    method = FAT(attack(threat=LinfBall(0.5), start="zero"), tau=Constant(tau))
    delta, taken = method.stopped(Scripted(scripts), batch, MOMENT)
    assert taken.tolist() == expected
    assert delta.flatten().tolist() == pytest.approx([SIZE * count for count in expected], abs=1e-6)


def test_a_stopped_sample_stays_so_whatever_a_random_model_answers_next():
    class Fickle(nn.Module):
        calls = 0

        def forward(self, x):
            self.calls += 1
            pixel = x.flatten(1)
            return torch.cat([torch.zeros_like(pixel), pixel + (9 if self.calls == 2 else -9)], 1)

    batch = Batch(torch.full((2, 1, 1, 1), 0.3), torch.tensor([0, 1]))  # + - + + … and - + - - …
    delta, taken = FAT(attack(threat=LinfBall(0.5), start="zero"), tau=Constant(0)).stopped(Fickle(), batch, MOMENT)
    assert taken.tolist() == [1, 0]
    assert delta.flatten().tolist() == pytest.approx([SIZE, 0.0])


@pytest.mark.parametrize("tau", [0, 1, 2])
def test_a_stopped_sample_was_fooled_exactly_tau_plus_one_times(tau):
    model, batch = network(), data()
    seen = []
    model.register_forward_hook(lambda module, given, logits: seen.append((given[0] - batch.x, logits.argmax(1))))
    delta, taken = FAT(attack(), tau=Constant(tau)).stopped(model, batch, MOMENT)
    fooled = torch.stack([labels != batch.y for _, labels in seen])
    assert len(seen) == K
    for i, steps in enumerate(taken.tolist()):
        if steps < K:
            assert fooled[: steps + 1, i].sum() == tau + 1 and fooled[steps, i]
            assert torch.allclose(delta[i], seen[steps][0][i].detach(), atol=1e-12)
        else:
            assert fooled[:, i].sum() <= tau


def test_without_budget_a_start_that_fools_is_kept():
    model, batch = network(), data()
    method = FAT(attack(start="zero"), tau=Constant(0.0))
    delta, taken = method.stopped(model, batch, MOMENT)
    wrong = model.eval()(batch.x).argmax(1) != batch.y
    assert wrong.any() and not wrong.all()
    assert torch.equal(taken == 0, wrong)
    assert torch.equal(delta.flatten(1).abs().sum(1) == 0, wrong)


def test_a_budget_of_k_is_at_exactly():
    models, batch = (network(), network()), data()
    fat = FAT(attack(), tau=Constant(float(K))).objective(models[0], batch, {}, MOMENT)
    at = AT(attack()).objective(models[1], batch, {}, MOMENT)
    assert torch.equal(fat.losses, at.losses) and torch.equal(fat.scalar, at.scalar)
    for a, b in zip(gradients(fat, models[0]), gradients(at, models[1]), strict=True):
        assert torch.equal(a, b)
    assert fat.record["backpropagations"] == K


def test_a_budget_of_k_minus_one_is_not_at():
    found = FAT(attack(), tau=Constant(float(K - 1))).objective(network(), data(), {}, MOMENT)
    assert not torch.equal(found.losses, AT(attack()).objective(network(), data(), {}, MOMENT).losses)


def test_the_objective_is_the_plain_mean_loss_at_the_stopped_images():
    model, batch = network(), data()
    delta, taken = one_by_one(model, batch, 1)
    losses = F.cross_entropy(model(batch.x + delta), batch.y, reduction="none")
    expected = torch.autograd.grad(losses.mean(), list(model.parameters()))
    twin = network()
    found = FAT(attack(), tau=Constant(1.0)).objective(twin, batch, {}, MOMENT)
    assert torch.allclose(found.losses, losses.detach(), atol=1e-10)
    assert torch.equal(found.weights, torch.ones_like(losses))
    for a, b in zip(gradients(found, twin), expected, strict=True):
        assert torch.allclose(a, b, atol=1e-10)
    assert found.record["backpropagations"].item() == pytest.approx(taken.double().mean().item())
    assert found.record["backpropagations"].shape == () and 0 < found.record["backpropagations"] < K


def test_the_budget_follows_its_schedule():
    method = FAT(attack(), tau=Piecewise((0.0, 2.0), (0.5,)))
    for progress, tau in [(0.0, 0), (0.49, 0), (0.5, 2), (0.99, 2)]:
        _, taken = method.stopped(network(), data(), MOMENT._replace(progress=progress))
        assert torch.equal(taken, one_by_one(network(), data(), tau)[1])


def test_by_default_the_budget_grows_at_epochs_50_and_90_of_120():
    tau = FAT().tau
    assert [tau.at((epoch + 0.5) / 120) for epoch in (0, 49, 50, 89, 90, 119)] == [0, 0, 1, 1, 2, 2]


def test_samples_keep_their_order():
    batch = data()
    order = torch.randperm(len(batch.y), generator=torch.Generator().manual_seed(0))
    method = FAT(attack(start="zero"), tau=Constant(1.0))
    (delta, taken), (mixed, mixed_taken) = (
        method.stopped(network(), one, MOMENT) for one in (batch, Batch(*(part[order] for part in batch)))
    )
    assert torch.allclose(delta[order], mixed, atol=1e-12) and torch.equal(taken[order], mixed_taken)
    assert len(set(taken.tolist())) > 3


@pytest.mark.parametrize("rule", [SignStep(SIZE), GradientStep(0.3), NormalisedStep(0.2)])
@pytest.mark.parametrize("threat", [LinfBall(RADIUS), L2Ball(0.8)])
def test_a_stopped_sample_stands_still_under_every_rule_that_is_let_in(rule, threat):
    model, batch, seen = network(), data(), []
    model.register_forward_hook(lambda module, given, logits: seen.append(given[0].detach() - batch.x))
    delta, taken = FAT(attack(rule=rule, threat=threat), tau=Constant(0.0)).stopped(model, batch, MOMENT)
    assert (taken < K).any() and (taken > 0).any()
    for i, steps in enumerate(taken.tolist()):
        for later in [*seen[steps:], delta]:
            assert torch.allclose(later[i], seen[min(steps, K - 1)][i] if steps < K else delta[i], atol=1e-12)


def test_the_attack_loss_and_the_loss_are_free():
    model, batch = network(), data()
    method = FAT(attack(loss=LogitMargin()), LogitMargin(), Constant(1.0))
    delta, _ = method.stopped(model, batch, MOMENT)
    assert not torch.allclose(delta, FAT(attack(), tau=Constant(1.0)).stopped(model, batch, MOMENT)[0])
    expected = LogitMargin()(network()(batch.x + delta), batch.y).detach()
    assert torch.allclose(method.objective(network(), batch, {}, MOMENT).losses, expected, atol=1e-10)


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
