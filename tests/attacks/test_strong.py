"""The strong attack: closed forms on a linear network, masked gradients, and the promises that are its own."""

import math

import pytest
import torch
from torch import nn

from doubly.attacks import PGD, MarginPGD, Strong
from doubly.attacks.mode import eval_mode
from doubly.errors import NonFiniteError, UsageError
from doubly.evaluation.api import evaluate
from doubly.losses import LogitMargin
from doubly.seeding import BatchGenerator, Rows
from doubly.threat import L2Ball, LinfBall
from doubly.training.passes import counted_passes


def seeded(seed=0, rows=None):
    return BatchGenerator(torch.Generator().manual_seed(seed), rows)


class Linear(nn.Module):
    """A linear network in float64 with five classes on images of 1 x 4 x 4 pixels."""

    def __init__(self):
        super().__init__()
        random = torch.Generator().manual_seed(0)
        weight = torch.randn(5, 16, generator=random, dtype=torch.float64)
        self.weight = nn.Parameter(weight - weight.mean(1, keepdim=True))  # a gray image belongs to no class

    def forward(self, x):
        return x.flatten(1) @ self.weight.T


def linear_problem(count=40):
    """Images in the middle of the image range, labeled as the network predicts them."""
    model, random = Linear(), torch.Generator().manual_seed(1)
    x = 0.5 + 0.4 * (torch.rand(count, 1, 4, 4, generator=random, dtype=torch.float64) - 0.5)
    return model, x, model(x).argmax(1)


def margins(model, x, y):
    with torch.no_grad(), eval_mode(model):
        return LogitMargin()(model(x), y)


def test_reaches_the_worst_perturbation_of_a_linear_network():
    # z_t - z_y grows by radius * |w_t - w_y|, in the l1 norm for an l-infinity ball and in the l2 norm for an l2 ball.
    model, x, y = linear_problem()
    for threat, order in ((LinfBall(0.015), 1), (L2Ball(0.07), 2)):
        differences = model.weight.detach() - model.weight.detach()[y][:, None]
        gaps = (differences * x.flatten(1)[:, None]).sum(2) + threat.radius * differences.norm(order, dim=2)
        highest = gaps.scatter(1, y[:, None], -math.inf).amax(1)
        delta = Strong(threat)(model, x, y, seeded())
        attacked, robust = margins(model, x + delta, y), highest < -1e-3
        assert 5 < robust.sum() < 35
        assert torch.equal(attacked < 0, robust)  # it breaks exactly those that can be broken
        assert torch.allclose(attacked[robust], highest[robust], atol=1e-6)


class Saturated(Linear):
    """The same with logits so large that the softmax is 1 and the cross-entropy has no gradient."""

    def forward(self, x):
        return 1e4 * super().forward(x).float()


def test_breaks_what_a_saturated_softmax_hides_from_cross_entropy():
    x, y = linear_problem()[1:]
    model, threat = Saturated(), LinfBall(0.1)
    pgd = PGD(threat, 20, threat.step_rule(0.025), start="zero")(model, x, y, seeded())
    assert (margins(model, x + pgd, y) < 0).float().mean() > 0.9
    assert (margins(model, x + Strong(threat)(model, x, y, seeded()), y) < 0).float().mean() < 0.2


@pytest.fixture(scope="module")
def curved():
    """A small untrained network whose margins bend, labeled as it predicts, in float64."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = [nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU()]
        model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(8 * 36, 10)).double().eval()
        x = torch.rand(60, 1, 8, 8, dtype=torch.float64)
    return model, x, model(x).argmax(1)


def test_leaves_fewer_samples_correct_than_pgd_on_either_loss(curved):
    model, x, y = curved
    for threat in (LinfBall(0.02), L2Ball(0.1)):
        reference = PGD(threat, 20, threat.step_rule(threat.radius / 4))
        attacks = (reference, MarginPGD.for_evaluation(reference), Strong(threat))
        pgd, margin, strong = ((margins(model, x + a(model, x, y, seeded()), y) < 0).sum() for a in attacks)
        assert 0 < strong <= min(pgd, margin) < len(y)


def test_a_split_batch_is_attacked_as_the_whole(curved):
    model, x, y = curved
    attack = Strong(LinfBall(0.02))
    parts = [
        attack(model, x[low:high], y[low:high], seeded(3, Rows(low, len(x))))
        for low, high in ((0, 7), (7, 40), (40, 60))
    ]
    assert torch.allclose(torch.cat(parts), attack(model, x, y, seeded(3)), atol=1e-9)


def test_broken_samples_leave_the_batch_and_wrong_ones_never_enter(curved):
    model, x, y = curved
    wrong = (y + 1) % 10
    with counted_passes(model, 1) as passes:
        delta = Strong(LinfBall(0.02))(model, x, wrong, seeded())
    assert (passes.forward, passes.backward) == (len(x), 0) and not delta.any()
    with counted_passes(model, len(x)) as passes:  # all are broken in a few steps
        Strong(LinfBall(0.5))(model, x, y, seeded())
    assert passes.backward < 10
    attack = Strong(LinfBall(1e-6), steps=4, targets=3, target_steps=5, rounds=2, start_steps=1)
    with counted_passes(model, len(x)) as passes:  # none is broken
        attack(model, x, y, seeded())
    assert passes.backward == 4 + 3 * 5 + 3 * (1 + 5) and passes.forward == passes.backward + 1 + 7


def test_more_rounds_never_undo_what_fewer_reached(curved):
    model, x, y = curved
    fewer, more = (margins(model, x + Strong(LinfBall(0.015), rounds=n)(model, x, y, seeded()), y) for n in (0, 2))
    assert (more >= fewer).all() and (more > fewer).any()


def test_few_classes_and_networks_without_a_gradient():
    x, y = torch.rand(6, 1, 4, 4), torch.zeros(6, dtype=torch.int64)
    for classes in (1, 2, 3):
        model = nn.Sequential(nn.Flatten(), nn.Linear(16, classes))
        delta = Strong(LinfBall(0.1))(model, x, y, seeded())
        assert delta.shape == x.shape and delta.isfinite().all()
    constant = nn.Sequential(nn.Flatten(), nn.Linear(16, 3))
    nn.init.zeros_(constant[1].weight)
    constant[1].bias.data = torch.tensor([1.0, 0.0, 0.0])
    assert margins(constant, x + Strong()(constant, x, y, seeded()), y).max() == -1


class NaNAway(nn.Module):
    """NaN as soon as the image is another, or a gradient of NaN."""

    def __init__(self, x, gradient):
        super().__init__()
        self.x, self.gradient = x, gradient

    def forward(self, x):
        logits = torch.stack((x.flatten(1).sum(1) * 0 + 1, x.flatten(1).sum(1) * 0), 1)
        if self.gradient:
            return logits + 0 * (x - x.detach()).flatten(1).square().sum(1, keepdim=True).sqrt()
        return logits if torch.equal(x, self.x) else logits * torch.nan


def test_nan_is_reported_as_by_pgd():
    x, y = torch.full((3, 1, 2, 2), 0.5), torch.zeros(3, dtype=torch.int64)
    broken = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
    nn.init.constant_(broken[1].weight, torch.nan)
    cases = ((broken, "the model's logits: 9 of 9"), (NaNAway(x, False), "logits"), (NaNAway(x, True), "gradient"))
    for model, message in cases:
        for attack in (Strong(), PGD()):
            with pytest.raises(NonFiniteError, match=message):
                attack(model, x, y, seeded())


@pytest.mark.parametrize("values", [{"steps": 0}, {"targets": 0}, {"target_steps": 0}, {"rounds": -1}])
def test_refuses_numbers_out_of_range(values):
    with pytest.raises(UsageError, match="the strong attack needs"):
        Strong(**values)


def test_an_evaluation_reports_it_with_its_tail(curved, tmp_path):
    model, x, y = curved
    data = (x.float(), y)
    result = evaluate(
        model.float(), data, LinfBall(0.02), ["pgd", "margin", "strong"], output=tmp_path, trust=False, chunk_size=25
    )
    model.double()
    assert result.accuracy("strong") <= min(result.ra_pgd, result.accuracy("margin"))
    assert 0 <= result.tail("strong")[0] <= result.accuracy("strong")
    assert '"ra_strong"' in (tmp_path / "evaluation.json").read_text()
